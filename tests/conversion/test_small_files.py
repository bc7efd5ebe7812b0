"""Many small files of one conversion: written together, each under its name, from requests that are made late."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from tests.helpers.arrays import assert_same

import reshard
from reshard import _core
from reshard.errors import ArgumentError, DamagedFileError, LayoutError, StorageError
from reshard.formats.outputs import load_all
from reshard.layout import ModelLayout

if TYPE_CHECKING:
    from reshard.layout import BoundLayout

LAYOUT = {
    "mesh": {"dp": 2, "tp": 3},
    "rules": [
        {"match": "a*", "cut": ["tp"]},
        {"match": "b*", "cut": [["dp", "tp"]], "uneven": "ceil"},
        {"match": "c*", "cut": [None, "dp"]},
        {"match": "*"},
    ],
}
N_RANKS = 6
NAMES = ("a0", "a1", "b", "c", "d")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((5 if name == "b" else 6, 4), np.float32) for name in NAMES}
    save_file(arrays, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def bound_to(checkpoint: reshard.Checkpoint) -> BoundLayout:
    return checkpoint.bind(ModelLayout.from_mapping(LAYOUT))


def test_files_that_a_stopped_conversion_left_are_replaced(source: Path, tmp_path: Path) -> None:
    """As after a share that was interrupted. What still has them open sees no other bytes."""
    folder = tmp_path / "out"
    for rank in range(0, N_RANKS, 2):
        (folder / f"rank_{rank}").mkdir(parents=True)
        (folder / f"rank_{rank}" / "w").write_bytes(b"cut off")
        os.link(folder / f"rank_{rank}" / "w", tmp_path / f"kept-{rank}")
    with reshard.open(source) as checkpoint:
        bound = bound_to(checkpoint)
        requests = bound.requests_of([(rank, NAMES) for rank in range(N_RANKS)])
        names = [f"rank_{rank // 2 * 2}/{'wx'[rank % 2]}" for rank in range(N_RANKS)]
        index = checkpoint.data.index
        written = index.write_small(str(folder), list(zip(names, requests, strict=True)), mode=0o600)
    for rank, (name, record) in enumerate(zip(names, written, strict=True)):
        with reshard.open(source) as checkpoint:
            expected = checkpoint.load(LAYOUT, rank)
        found = load_file(folder / name)
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[key], expected[key]) for key in found)
        assert record is not None
        assert record.n_bytes == (folder / name).stat().st_size
        assert (folder / name).stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == ["w", "w", "w", "x", "x", "x"]
    assert {path.read_bytes() for path in tmp_path.glob("kept-*")} == {b"cut off"}


def test_a_file_that_cannot_be_written_is_removed(source: Path, tmp_path: Path) -> None:
    """All of it: no file is left under its name without its bytes."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    (tmp_path / "out").mkdir()
    with reshard.open(source) as checkpoint:
        requests = bound_to(checkpoint).requests_of([(0, NAMES), (1, ("d",))])
        pairs = [("0.safetensors", requests[0]), ("1.safetensors", requests[1])]
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        try:
            with pytest.raises(StorageError, match="File too large") as caught:
                checkpoint.data.index.write_small(str(tmp_path / "out"), pairs, durable=False)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(caught.value.path).startswith(str(tmp_path / "out"))
    assert "raise the limit of this process (`ulimit -f`)" in str(caught.value)
    assert not list((tmp_path / "out").iterdir())


def test_damage_is_found_though_files_are_planned_together(tmp_path: Path) -> None:
    arrays = {f"w{i}": np.full((64, 600), i, np.float32) for i in range(4)}
    reshard.save(tmp_path / "root", 1, arrays, commit={"durable": False})
    (shard,) = (tmp_path / "root").glob("iteration_*/model-*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    layout = {"mesh": {"tp": 64}, "rules": [{"match": "*", "cut": ["tp"]}]}
    with pytest.raises(DamagedFileError, match="differ from what was written"):
        reshard.convert(tmp_path / "root", tmp_path / "out", layout=layout, commit={"durable": False})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("names", [("d",), ("a0",), ("c", "d"), ("a0", "a1", "c")])
def test_the_plan_of_a_request_that_is_made_late_is_that_of_the_rank(names: tuple[str, ...], source: Path) -> None:
    with reshard.open(source) as checkpoint:
        bound, index = bound_to(checkpoint), checkpoint.data.index
        for rank, late in enumerate(bound.requests_of([(rank, names) for rank in range(N_RANKS)])):
            plan, expected = index.plan(late, dtype="F64"), index.plan(bound.request_of(rank, names), dtype="F64")
            assert plan.arrays == expected.arrays
            assert_same(load_all(plan), load_all(expected))


@pytest.mark.parametrize("dtype", [None, "F64"])
@pytest.mark.parametrize("parts", [1, 2])
def test_files_of_ranks_that_are_planned_once_are_those_planned_one_by_one(
    dtype: str | None, parts: int, source: Path, tmp_path: Path
) -> None:
    """Out of one file, and out of several, where each rank is planned alone."""
    if parts > 1:
        layout = {"mesh": {"tp": parts}, "rules": [{"match": "*", "cut": ["tp"], "uneven": "ceil"}]}
        source = Path(reshard.convert(source, tmp_path / "root", layout=layout).path)
    with reshard.open(source) as checkpoint:
        bound, index = bound_to(checkpoint), checkpoint.data.index
        late = bound.requests_of([(rank, NAMES) for rank in range(N_RANKS)])
        alone = [bound.request_of(rank, NAMES) for rank in range(N_RANKS)]
        written: list[list[tuple[bytes, bytes | None]]] = []
        for requests in (late, alone):
            folder = tmp_path / f"of-{len(written)}"
            folder.mkdir()
            pairs = [(str(rank), request) for rank, request in enumerate(requests)]
            records = index.write_small(str(folder), pairs, dtype=dtype, metadata={"x": "y"}, durable=False)
            assert all(record is not None for record in records)
            written.append(
                [
                    ((folder / name).read_bytes(), one and one.checksums)
                    for (name, _), one in zip(pairs, records, strict=True)
                ]
            )
    assert written[0] == written[1]
    assert len({data for data, _ in written[0]}) == N_RANKS


def test_a_request_that_is_made_late_is_that_of_the_rank(source: Path) -> None:
    with reshard.open(source) as checkpoint:
        bound, index = bound_to(checkpoint), checkpoint.data.index
        late = bound.requests_of([(rank, NAMES[::-1]) for rank in range(N_RANKS)])
        made = [bound.request_of(rank, NAMES[::-1]) for rank in range(N_RANKS)]
        assert [len(request) for request in late] == [len(NAMES)] * N_RANKS
        assert index.request_bytes(late, dtype="BF16") == index.request_bytes(made, dtype="BF16")
        for one, other in zip(late, made, strict=True):
            assert index.request_arrays(one) == index.request_arrays(other) == index.plan(one).arrays
            for request in (one, other):
                request.add_region("more", "a0", (1, 1), (2, 2))
            assert index.plan(one).arrays == index.plan(other).arrays
            assert index.plan(one).n_bytes == index.plan(other).n_bytes
        with pytest.raises(LayoutError, match="rank 6 is not in the mesh") as caught:
            _core.Request.of_ranks([("a0", bound.layouts["a0"])], [0, N_RANKS])
        assert caught.value.key == "a0"
    placed = {"mesh": {"pp": 2}, "rules": [{"match": "*"}], "place": [{"match": "*", "axis": "pp", "at": 1}]}
    with reshard.open(source) as checkpoint:
        layout = checkpoint.bind(ModelLayout.from_mapping(placed)).layouts["d"]
        with pytest.raises(ArgumentError, match="rank 0 holds no part of `d`"):
            _core.Request.of_ranks([("d", layout)], [1, 0])


@pytest.mark.slow(disk=False)
@given(
    shapes=st.lists(st.lists(st.integers(1, 6), max_size=3).map(tuple), min_size=1, max_size=4),
    cut=st.integers(0, 2),
    n_ranks=st.integers(1, 5),
)
def test_rank_files_hold_what_numpy_cuts(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, ...]], cut: int, n_ranks: int
) -> None:
    tmp_path = tmp_path_factory.mktemp("cut")
    arrays = {f"w{i}": np.random.default_rng(i).random(shape) for i, shape in enumerate(shapes)}
    save_file(arrays, tmp_path / "m.safetensors")
    rules = [
        {"match": name, "cut": [*[None] * min(cut, array.ndim - 1), "tp"], "uneven": "ceil"}
        if array.ndim
        else {"match": name}
        for name, array in arrays.items()
    ]
    layout = {"mesh": {"tp": n_ranks}, "rules": rules}
    reshard.convert(
        tmp_path / "m.safetensors", tmp_path / "out", to="safetensors", layout=layout, commit={"durable": False}
    )
    for rank in range(n_ranks):
        found = load_file(tmp_path / "out" / f"rank_{rank}.safetensors")
        for name, array in arrays.items():
            expected = array
            if array.ndim:
                dim = min(cut, array.ndim - 1)
                size = -(-array.shape[dim] // n_ranks)
                expected = array.take(range(size * rank, min(size * (rank + 1), array.shape[dim])), dim)
            assert found[name].shape == expected.shape
            assert np.array_equal(found[name], expected)
