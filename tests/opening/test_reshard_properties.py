"""The whole path, from shard files under one random layout to arrays under another, equals the oracle byte for byte.

Source files are written by stock safetensors from what the oracle cuts; nothing of ours has touched them.
"""

import itertools
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tests.helpers.arrays import whole_request
from tests.helpers.oracle import element_numbers, element_tiles, local_arrays, mesh_ranks, rule_of
from tests.helpers.plans import bind, loaded, tell_sums
from tests.helpers.strategies import (
    DTYPE_NAMES,
    DTYPES,
    KINDS,
    Array,
    Checkpoint,
    cases,
    checkpoints,
    content,
    kinds,
    large_shapes,
    layouts,
    some_ranks,
)

from reshard._core import Index, Plan, Request, StoredArray, Tile

Method = Literal["auto", "map", "read"]
METHODS: tuple[Method, ...] = ("map", "read", "auto")
HOW = ("layout", "elements", "runs")
GUARD = 0x5A


def save_locals(folder: Path, arrays: Mapping[int, Mapping[str, Array]]) -> dict[int, Path]:
    """One file a rank, by stock safetensors."""
    paths = {rank: folder / f"rank-{rank}.safetensors" for rank in arrays}
    for rank, path in paths.items():
        save_file(dict(arrays[rank]), path)
    return paths


def index_of(
    checkpoint: Checkpoint,
    mapping: Mapping[str, Any],
    paths: Mapping[int, Path],
    *,
    how: str,
    method: Method = "auto",
    proven: bool = False,
) -> Index:
    """An index of files that hold the oracle's local arrays.

    `how`: keys are added by their layout, or as explicit tiles, single elements or runs. Joined ones are always tiles.
    `proven`: sums are told, so that every chunk is checked on the way.
    """
    index = Index()
    files = {rank: index.add_file(str(paths[rank]), method=method) for rank in mesh_ranks(mapping)}
    for rank, file in files.items() if proven else ():
        tell_sums(index, file, paths[rank].read_bytes())
    bound = bind(checkpoint, mapping)
    tiles: dict[int, Any] = {}
    for key, shape in checkpoint.shapes.items():
        joined = rule_of(mapping, key, checkpoint.shapes, checkpoint.optimizer_keys).join is not None
        if how == "layout" and not joined:
            index.add_layout(key, checkpoint.dtypes[key], bound.layouts[key], list(files.values()))
            continue
        for rank in files:
            if rank not in tiles:
                tiles[rank] = element_tiles(
                    mapping, checkpoint.shapes, rank, checkpoint.optimizer_keys, runs=how == "runs"
                )
        stored = [
            StoredArray(files[rank], name, local_shape, [Tile(*tile) for tile in own])
            for rank in files
            for name, local_shape, own in tiles[rank].get(key, ())
        ]
        index.add_tiles(key, checkpoint.dtypes[key], shape, stored, overlapping=how == "runs")
    return index


def filled(plan: Plan, lead_bytes: int, threads: int | None = None) -> tuple[dict[str, bytes], int]:
    """What `fill` writes into the caller's arrays, which begin anywhere, and the bytes read; nothing around changes."""
    room = [np.full(lead_bytes + n_bytes + 16, GUARD, np.uint8) for _, _, _, n_bytes in plan.arrays]
    out = [
        array[lead_bytes : lead_bytes + n_bytes] for array, (_, _, _, n_bytes) in zip(room, plan.arrays, strict=True)
    ]
    n_read = plan.fill(out, threads=threads)
    for array in room:
        assert (array[:lead_bytes] == GUARD).all()
        assert (array[-16:] == GUARD).all()
    return {name: array.tobytes() for (name, _, _, _), array in zip(plan.arrays, out, strict=True)}, n_read


def differing(found: Mapping[str, bytes], expected: Mapping[str, Array]) -> list[str]:
    """Names whose bytes differ. (Bytes compared in an assertion would be shown, which takes minutes for large ones.)"""
    return sorted(found.keys() ^ expected.keys()) + [n for n in found if found[n] != expected[n].tobytes()]


def needed_bytes(checkpoint: Checkpoint, mapping: Mapping[str, Any], rank: int, arrays: Mapping[str, Array]) -> int:
    """Bytes of the local arrays that are no padding."""
    numbers = element_numbers(mapping, checkpoint.shapes, rank, checkpoint.optimizer_keys)
    return sum(int((numbers[name] > 0).sum()) * array.itemsize for name, array in arrays.items())


def check_rank(checkpoint: Checkpoint, index: Index, mapping: Mapping[str, Any], rank: int, lead_bytes: int) -> Plan:
    """Everything that one rank can ask of a plan, against what the oracle says it must hold."""
    expected = local_arrays(mapping, checkpoint.tensors, rank, checkpoint.optimizer_keys)
    plan = index.plan(bind(checkpoint, mapping).request(rank))
    assert sorted((name, dtype, shape, n) for name, dtype, shape, n in plan.arrays) == sorted(
        (name, DTYPE_NAMES[array.dtype], array.shape, array.nbytes) for name, array in expected.items()
    )
    assert plan.n_bytes == sum(array.nbytes for array in expected.values())
    # Every wanted byte comes from one place only.
    assert sum(plan.source_bytes.values()) == needed_bytes(checkpoint, mapping, rank, expected)
    assert differing(loaded(plan), expected) == []
    found, n_read = filled(plan, lead_bytes)
    assert differing(found, expected) == []
    assert n_read >= sum(plan.source_bytes.values())
    for (name, _, _, n_bytes), view in zip(plan.arrays, plan.views(), strict=True):
        if view is not None:
            buffer, offset = view
            assert (
                differing({name: memoryview(buffer)[offset : offset + n_bytes].tobytes()}, {name: expected[name]}) == []
            )
    keys = list(checkpoint.shapes)[:: -1 if rank % 2 else 1]
    whole = index.plan(index.whole_request(keys))
    request = index.plan(whole_request({key: checkpoint.shapes[key] for key in keys}))
    assert (whole.arrays, whole.n_copies) == (request.arrays, request.n_copies)
    assert differing(loaded(whole), checkpoint.tensors) == []
    return plan


@pytest.mark.slow
def test_any_layout_to_any_layout() -> None:
    seen_source: Counter[str] = Counter()
    seen_destination: Counter[str] = Counter()

    @cases(400)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        checkpoint: Checkpoint = data.draw(checkpoints())
        how = data.draw(st.sampled_from(HOW))
        source = data.draw(layouts(checkpoint, max_ranks=16))
        destination = data.draw(layouts(checkpoint))
        seen_source.update(kinds(source))
        seen_destination.update(kinds(destination))
        method = data.draw(st.sampled_from(METHODS))
        lead_bytes = data.draw(st.integers(0, 9))
        with tempfile.TemporaryDirectory() as folder:
            stored = {
                rank: local_arrays(source, checkpoint.tensors, rank, checkpoint.optimizer_keys)
                for rank in mesh_ranks(source)
            }
            index = index_of(
                checkpoint,
                source,
                save_locals(Path(folder), stored),
                how=how,
                method=method,
                proven=data.draw(st.booleans()),
            )
            index.check_coverage()
            assert index.keys() == list(checkpoint.tensors)
            assert {key: index.info(key) for key in index.keys()} == {  # noqa: SIM118
                key: (checkpoint.dtypes[key], checkpoint.shapes[key]) for key in checkpoint.tensors
            }
            for rank in data.draw(some_ranks(destination, 3)):
                check_rank(checkpoint, index, destination, rank, lead_bytes)
            index.close()

    check()
    assert set(seen_source) == KINDS
    assert set(seen_destination) == KINDS


@pytest.mark.slow
@cases(60)
@given(st.data())
def test_sources_of_many_ranks(data: st.DataObject) -> None:
    checkpoint: Checkpoint = data.draw(checkpoints())
    source = data.draw(layouts(checkpoint, max_ranks=64).filter(lambda mapping: len(mesh_ranks(mapping)) > 16))
    with tempfile.TemporaryDirectory() as folder:
        stored = {
            rank: local_arrays(source, checkpoint.tensors, rank, checkpoint.optimizer_keys)
            for rank in mesh_ranks(source)
        }
        index = index_of(checkpoint, source, save_locals(Path(folder), stored), how="layout")
        destination = {"mesh": {"tp": 1}, "rules": [{"match": "*"}]}
        check_rank(checkpoint, index, destination, 0, 0)
        index.close()


@pytest.mark.slow
@cases(250)
@given(st.data())
def test_there_and_back_is_the_identity(data: st.DataObject) -> None:
    checkpoint: Checkpoint = data.draw(checkpoints())
    here = data.draw(layouts(checkpoint, max_ranks=8))
    there = data.draw(layouts(checkpoint, max_ranks=8))
    ours = data.draw(st.booleans())
    keys = checkpoint.optimizer_keys
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stored = {rank: local_arrays(here, checkpoint.tensors, rank, keys) for rank in mesh_ranks(here)}
        index = index_of(checkpoint, here, save_locals(folder, stored), how="layout")
        paths = {rank: folder / f"there-{rank}.safetensors" for rank in mesh_ranks(there)}
        bound = bind(checkpoint, there)
        for rank, path in paths.items():
            plan = index.plan(bound.request(rank))
            if ours:
                assert plan.write(str(path), durable=False).n_bytes == path.stat().st_size
            else:
                kind = {name: (DTYPES[dtype], shape) for name, dtype, shape, _ in plan.arrays}
                arrays = {n: np.frombuffer(b, kind[n][0]).reshape(kind[n][1]) for n, b in loaded(plan).items()}
                save_file(arrays, path)
        index.close()
        index = index_of(checkpoint, there, paths, how="layout")
        bound = bind(checkpoint, here)
        for rank, arrays in stored.items():
            assert differing(loaded(index.plan(bound.request(rank))), arrays) == []
        index.close()


@pytest.mark.slow
@cases(250)
@given(st.data())
def test_map_and_read_and_any_number_of_threads_are_equal(data: st.DataObject) -> None:
    checkpoint: Checkpoint = data.draw(checkpoints())
    source = data.draw(layouts(checkpoint, max_ranks=8))
    destination = data.draw(layouts(checkpoint, max_ranks=16))
    with tempfile.TemporaryDirectory() as folder:
        stored = {
            rank: local_arrays(source, checkpoint.tensors, rank, checkpoint.optimizer_keys)
            for rank in mesh_ranks(source)
        }
        paths = save_locals(Path(folder), stored)
        (rank,) = data.draw(some_ranks(destination, 1))
        expected = local_arrays(destination, checkpoint.tensors, rank, checkpoint.optimizer_keys)
        for method, proven in itertools.product(METHODS, (False, True)):
            index = index_of(checkpoint, source, paths, how="layout", method=method, proven=proven)
            plan = index.plan(bind(checkpoint, destination).request(rank))
            for threads in (1, 3):
                assert differing(loaded(plan, threads), expected) == []
                assert differing(filled(plan, 0, threads)[0], expected) == []
            index.close()


@pytest.mark.slow
@cases(100)
@given(st.data())
def test_large_tensors(data: st.DataObject) -> None:
    checkpoint: Checkpoint = data.draw(checkpoints(shapes=large_shapes()))
    source = data.draw(layouts(checkpoint, max_ranks=4))
    for rule in source["rules"]:
        # Joined sources are made of one tile an element here: too many.
        if "join" in rule.get("flat", ()):
            rule["flat"] = rule["flat"]["axes"]
    destination = data.draw(layouts(checkpoint, max_ranks=8))
    with tempfile.TemporaryDirectory() as folder:
        stored = {
            rank: local_arrays(source, checkpoint.tensors, rank, checkpoint.optimizer_keys)
            for rank in mesh_ranks(source)
        }
        method = data.draw(st.sampled_from(METHODS))
        paths = save_locals(Path(folder), stored)
        index = index_of(checkpoint, source, paths, how="layout", method=method, proven=data.draw(st.booleans()))
        for rank in data.draw(some_ranks(destination, 1)):
            check_rank(checkpoint, index, destination, rank, data.draw(st.integers(0, 9)))
        index.close()


@pytest.mark.parametrize("join_source", [False, True])
def test_joined_layers_lie_in_the_order_of_their_numbers(tmp_path: Path, *, join_source: bool) -> None:
    # Random cases seldom join two layers whose numbers sort otherwise as text.
    checkpoint = Checkpoint({f"layers.{i}.b": content(DTYPES["BF16"], (i,), i) for i in (10, 2, 1, 20)})
    join = {"mesh": {"dp": 2}, "rules": [{"match": "layers.*", "flat": {"axes": ["dp"], "join": "j", "align": 4}}]}
    whole = {"mesh": {"dp": 1}, "rules": [{"match": "*"}]}
    source, destination = (join, whole) if join_source else (whole, join)
    stored = {rank: local_arrays(source, checkpoint.tensors, rank) for rank in mesh_ranks(source)}
    index = index_of(checkpoint, source, save_locals(tmp_path, stored), how="runs")
    for rank in mesh_ranks(destination):
        check_rank(checkpoint, index, destination, rank, 0)
    index.close()


ROW = 4096
"""F32 elements of one row: 16 KiB, so that a quarter of a row is a run of 4 KiB."""


@st.composite
def coarse_layouts(draw: Any) -> dict[str, Any]:
    """Layouts of a 32 x ROW matrix whose pieces, also against each other, are runs of 4 KiB or more."""
    mesh = {"a": draw(st.sampled_from((1, 2, 4))), "b": draw(st.sampled_from((1, 2, 4)))}
    rules: list[dict[str, Any]] = [
        {"cut": [["a", "b"]]},
        {"cut": ["a", "b"]},
        {"cut": ["b", "a"]},
        {"cut": [None, "b"]},
        {"cut": ["a"], "uneven": "ceil"},
        {"cut": ["a"], "blocks": {0: [16, {"size": 4, "cut": None}, 12]}},
        {"cut": [None, "b"], "blocks": {1: [ROW // 2, ROW // 2]}} if mesh["b"] <= 2 else {},
        {"cut": ["a"], "flat": ["b"]},
        {"flat": ["b", "a"]},
        {},
    ]
    return {"mesh": mesh, "rules": [{"match": "*"} | draw(st.sampled_from(rules))]}


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("method", ["map", "read"])
def test_no_more_is_read_than_needed_where_runs_are_long(method: Method) -> None:
    tensor = content(DTYPES["F32"], (32, ROW), 7)
    checkpoint = Checkpoint({"w": tensor})

    @cases(100)
    @given(coarse_layouts(), coarse_layouts(), st.data())
    def check(source: dict[str, Any], destination: dict[str, Any], data: st.DataObject) -> None:
        with tempfile.TemporaryDirectory() as folder:
            stored = {rank: local_arrays(source, checkpoint.tensors, rank) for rank in mesh_ranks(source)}
            index = index_of(checkpoint, source, save_locals(Path(folder), stored), how="layout", method=method)
            for rank in data.draw(some_ranks(destination, 2)):
                expected = local_arrays(destination, checkpoint.tensors, rank)
                found, n_read = filled(index.plan(bind(checkpoint, destination).request(rank)), 0)
                assert differing(found, expected) == []
                needed = needed_bytes(checkpoint, destination, rank, expected)
                assert needed <= n_read <= 1.05 * needed
            index.close()

    check()


FLOATS = ("F16", "BF16", "F32", "F64")


def cast(array: Array, dtype: str) -> Array:
    """Rounded once, to nearest even."""
    with np.errstate(all="ignore"):
        if (DTYPE_NAMES[array.dtype], dtype) == ("F64", "BF16"):
            # ml_dtypes rounds twice here, by way of F32. An F32 that is odd wherever it is inexact lies on the same
            # side of every BF16 and of the middle between two, so that the second rounding is the only one.
            single = array.astype(np.float32)
            moved = (single != array) & (single.view(np.uint32) % 2 == 0) & ~np.isnan(array)
            other = np.nextafter(single, np.where(single < array, np.inf, -np.inf).astype(np.float32))
            array = np.where(moved, other, single)
        return array.astype(DTYPES[dtype])


def assert_equal_but_for_nans(found: Array, expected: Array) -> None:
    """Equal bytes, and NaN where NaN is expected; which of the NaNs is nobody's promise."""
    if DTYPE_NAMES[expected.dtype] in FLOATS:
        with np.errstate(all="ignore"):
            nan = np.isnan(expected)
            assert (np.isnan(found) == nan).all()
        found, expected = found[~nan], expected[~nan]
    assert found.shape == expected.shape
    assert np.flatnonzero(found.view(f"u{found.itemsize}") != expected.view(f"u{found.itemsize}")).size == 0


@pytest.mark.slow
@pytest.mark.parametrize("wanted", FLOATS)
def test_a_cast_rounds_once_to_nearest_even(wanted: str) -> None:
    @cases(60)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        checkpoint: Checkpoint = data.draw(checkpoints(dtypes=(*FLOATS, "I32", "BOOL")))
        source = data.draw(layouts(checkpoint, max_ranks=8))
        destination = data.draw(layouts(checkpoint, max_ranks=8))
        tensors = {
            key: cast(tensor, wanted) if checkpoint.dtypes[key] in FLOATS else tensor
            for key, tensor in checkpoint.tensors.items()
        }
        (rank,) = data.draw(some_ranks(destination, 1))
        expected = local_arrays(destination, tensors, rank, checkpoint.optimizer_keys)
        with tempfile.TemporaryDirectory() as folder:
            stored = {
                rank: local_arrays(source, checkpoint.tensors, rank, checkpoint.optimizer_keys)
                for rank in mesh_ranks(source)
            }
            index = index_of(checkpoint, source, save_locals(Path(folder), stored), how="layout")
            plan = index.plan(bind(checkpoint, destination).request(rank), dtype=wanted)
            for name, data_bytes in loaded(plan).items():
                found = np.frombuffer(data_bytes, expected[name].dtype).reshape(expected[name].shape)
                assert_equal_but_for_nans(found, expected[name])
            index.close()

    check()


def edge_values(dtype: str) -> Array:
    """All values of 16 bits; of wider ones those that lie on, between and next to them."""
    bits = np.arange(2**16, dtype=np.uint32)
    if dtype in ("F16", "BF16"):
        return bits.astype(np.uint16).view(DTYPES[dtype])
    with np.errstate(all="ignore"):
        narrow = [(bits << 16).view(np.float32), bits.astype(np.uint16).view(np.float16).astype(np.float32)]
        ties = np.concatenate(
            [(x.view(np.uint32) + np.uint32(half)).view(np.float32) for x in narrow for half in HALVES]
        )
        if dtype == "F64":
            # And what two roundings, first to F32, would get wrong.
            ties = ties.astype(np.float64)
        return np.concatenate(
            [np.nextafter(ties, -np.inf, dtype=ties.dtype), ties, np.nextafter(ties, np.inf, dtype=ties.dtype)]
        )


HALVES = (0, 1, 1 << 12, 1 << 15, (1 << 13) - 1, (1 << 16) - 1)
"""Added to the bits of an F32: half of the last bit of an F16 and of a BF16, and ends of their ranges."""


@pytest.mark.parametrize("wanted", FLOATS)
@pytest.mark.parametrize("stored", FLOATS)
def test_a_cast_of_edge_values_rounds_once_to_nearest_even(stored: str, wanted: str, tmp_path: Path) -> None:
    values = edge_values(stored)
    save_file({"w": values}, tmp_path / "w.safetensors")
    index = Index()
    index.add_whole("w", index.add_file(str(tmp_path / "w.safetensors")))
    request = Request()
    request.add_region("w", "w", (0,), values.shape)
    found = loaded(index.plan(request, dtype=wanted))["w"]
    assert_equal_but_for_nans(np.frombuffer(found, DTYPES[wanted]), cast(values, wanted))


def test_a_whole_tensor_is_viewed_and_writing_to_the_view_leaves_the_file_alone(tmp_path: Path) -> None:
    checkpoint = Checkpoint({"w": content(DTYPES["F32"], (64, 64), 1)})
    mapping = {"mesh": {"tp": 2}, "rules": [{"match": "*", "cut": ["tp"]}]}
    paths = save_locals(tmp_path, {rank: local_arrays(mapping, checkpoint.tensors, rank) for rank in range(2)})
    before = paths[0].read_bytes()
    index = index_of(checkpoint, mapping, paths, how="layout")
    plan = index.plan(bind(checkpoint, mapping).request(0))
    ((buffer, offset),) = [view for view in plan.views() if view is not None]
    index.close()
    view = np.frombuffer(memoryview(buffer), np.float32, 32 * 64, offset)
    assert view.tobytes() == checkpoint.tensors["w"][:32].tobytes()
    view[:] = 1
    assert (view == 1).all()
    assert paths[0].read_bytes() == before
