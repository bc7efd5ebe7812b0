"""`metadata.json` of a Checkpoint 2.0: what we write is what the original would have written, and would read.

It is compared with trees of the original, and read back by `original_reader`, which shares no code with it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tests.formats.checkpoint2.records import NUMPY, models, record_of
from tests.helpers import original_reader

from reshard._core import Mesh
from reshard.commit import roots
from reshard.documents.common_info import CommonInfo
from reshard.errors import ArgumentError, LayoutError, UnsupportedError
from reshard.formats.checkpoint2.metadata import inexpressible, write_metadata
from reshard.formats.checkpoint2.shards import (
    FilePlan,
    HeldGrid,
    Records,
    TensorRecord,
    assign,
    shard_id,
    shards_of,
)
from reshard.storage.location import locate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.write.contents import Part


class HeldShard(NamedTuple):
    """One shard and the ranks that hold it."""

    key: str
    part: Part
    offset: int
    holders: tuple[int, ...]
    n_bits: int


def assigned(shards: list[HeldShard], ranks: Sequence[int], *, dedup: bool) -> FilePlan:
    grids = [HeldGrid(key, part, {offset: holders}, n_bits) for key, part, offset, holders, n_bits in shards]
    return assign(grids, ranks, dedup=dedup)


SAMPLES = Path(__file__).parents[2] / "data" / "mindspore"

# The layouts of the samples. In graph mode the axes of a stage are called a, b.
MESH_8 = Mesh([("pp", 2), ("a", 2), ("b", 2)])
FIRST, LAST = (((("pp",), 0),), ((("pp",), 1),))
FC1 = ((("b", "a"),), FIRST)
EXPERTS = ((("a",), (), ("b",)), LAST)
VOCABULARY = ((("b",),), FIRST)
TABLE_8: list[tuple[str, str, tuple[int, ...], Part, Any]] = [
    ("embedding.word_embeddings.weight", "F32", (16, 8), "model", VOCABULARY),
    ("decoder.layers.0.input_layernorm.weight", "F32", (8,), "model", ((), FIRST)),
    ("decoder.layers.0.self_attention.linear_qkv.weight", "F32", (12, 8), "model", VOCABULARY),
    ("decoder.layers.0.self_attention.linear_proj.weight", "BF16", (8, 4), "model", (((), ("b",)), FIRST)),
    ("decoder.layers.0.mlp.linear_fc1.weight", "F32", (16, 6), "model", FC1),
    ("shared.scale", "F32", (4,), "model", ((), ())),
    ("decoder.layers.1.mlp.experts.weight1", "F32", (4, 6, 4), "model", EXPERTS),
    ("decoder.layers.1.mlp.router.expert_bias", "F32", (4,), "model", ((), LAST)),
    ("decoder.final_layernorm.weight", "F32", (8,), "model", ((), LAST)),
    ("output_layer.weight", "F16", (16, 8), "model", ((("b",),), LAST)),
    ("adam_m.embedding.word_embeddings.weight", "F32", (16, 8), "optimizer", VOCABULARY),
    ("adam_v.embedding.word_embeddings.weight", "F32", (16, 8), "optimizer", VOCABULARY),
    (
        "adam_m.decoder.layers.0.self_attention.linear_proj.weight",
        "F32",
        (8, 4),
        "optimizer",
        ((("a",), ("b",)), FIRST),
    ),
    ("adam_m.decoder.layers.0.mlp.linear_fc1.weight", "F32", (16, 6), "optimizer", FC1),
    ("adam_v.decoder.layers.0.mlp.linear_fc1.weight", "F32", (16, 6), "optimizer", FC1),
    ("adam_m.decoder.layers.1.mlp.experts.weight1", "F32", (4, 6, 4), "optimizer", EXPERTS),
    ("adam_v.output_layer.weight", "F32", (16, 8), "optimizer", ((("b", "a"),), LAST)),
]
MESH_4 = Mesh([("dp", 2), ("tp", 2)])
TABLE_4: list[tuple[str, str, tuple[int, ...], Part, Any]] = [
    ("lm.emb.weight", "F32", (12, 4), "model", ((("tp",),), ())),
    ("lm.fc.weight", "F32", (8, 6), "model", ((("dp", "tp"),), ())),
    ("lm.norm.weight", "F32", (4,), "model", ((), ())),
    ("lm.freqs", "F32", (3,), "model", ((), ())),
    ("exp_avg.lm.fc.weight", "F32", (8, 6), "optimizer", ((("dp", "tp"),), ())),
]
# The original wrote these without a layout, or with that of its first stage alone; we say where they really are.
DIFFERENT = {"shared.scale", "decoder.layers.1.mlp.router.expert_bias", "lm.freqs"}


@dataclass(frozen=True)
class Tree:
    """A sample, and what its layouts are."""

    name: str
    folder: str
    mesh: Mesh
    table: Any
    prefix: str
    dedup: bool


TREES = [
    Tree("ckpt2", "iteration_00000005", MESH_8, TABLE_8, "demo", dedup=False),
    Tree("ckpt2_dedup", "iteration_00000010", MESH_8, TABLE_8, "demo", dedup=True),
    Tree("ckpt2_named", "iteration_00000007", MESH_4, TABLE_4, "checkpoint", dedup=False),
]


def records_of(table: Any) -> list[TensorRecord]:
    return [record_of(key, dtype, shape, part, cut=cut, place=place) for key, dtype, shape, part, (cut, place) in table]


def expected_tensors(tree: str, iteration: int) -> dict[str, np.ndarray]:
    return original_reader.read_shard_file(SAMPLES / tree / f"expected_{iteration:08d}.safetensors")


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], keys: set[str]) -> None:
    for key in keys:
        assert found[key].dtype == expected[key].dtype, key
        assert found[key].shape == expected[key].shape, key
        assert found[key].tobytes() == expected[key].tobytes(), key


# -- the second reader itself: the samples


@pytest.mark.parametrize(("tree", "iteration"), [("ckpt2", 10), ("ckpt2_dedup", 10), ("ckpt2_named", 7)])
def test_the_second_reader_rebuilds_the_samples(tree: str, iteration: int) -> None:
    expected = expected_tensors(tree, iteration)
    null_on_a_later_stage = "decoder.layers.1.mlp.router.expert_bias"
    keys = set(expected) - {null_on_a_later_stage}
    assert_same(original_reader.read_tree(SAMPLES / tree / "checkpoint", "head", keys), expected, keys)
    assert original_reader.read_common(SAMPLES / tree / "checkpoint", "head").global_step == iteration
    if tree == "ckpt2":
        with pytest.raises(ValueError, match="search_rank=0"):
            original_reader.read_tree(SAMPLES / tree / "checkpoint", "head", {null_on_a_later_stage})


def test_the_second_reader_rebuilds_a_one_device_tree() -> None:
    found = original_reader.read_tree(SAMPLES / "ckpt2_single" / "checkpoint")
    expected = expected_tensors("ckpt2_single", 3)
    assert set(found) >= set(expected)
    assert_same(found, expected, set(expected))


def test_release_190_refuses_what_the_younger_one_writes() -> None:
    with pytest.raises(AttributeError):
        original_reader.read_tree(SAMPLES / "ckpt2" / "checkpoint")  # a null layout
    with pytest.raises(TypeError, match="consumed_samples"):
        original_reader.read_common(SAMPLES / "ckpt2" / "checkpoint")


# -- metadata.json against the original's


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.name)
def test_metadata_has_the_content_of_the_originals(tree: Tree, tmp_path: Path) -> None:
    records = records_of(tree.table)
    assert {inexpressible(record, tree.mesh) for record in records} == {None}
    plan = assign(shards_of(records, tree.mesh), tree.mesh.ranks, dedup=tree.dedup)
    write_metadata(locate(tmp_path / "metadata.json"), Records.of(records), tree.mesh, plan, prefix=tree.prefix)
    ours = json.loads((tmp_path / "metadata.json").read_text())
    theirs = json.loads((SAMPLES / tree.name / "checkpoint" / tree.folder / "metadata.json").read_text())

    assert set(ours["state_dict_metadata"]) == set(theirs["state_dict_metadata"])
    for key, meta in theirs["state_dict_metadata"].items():
        if key in DIFFERENT:
            assert meta["layout"] is None or meta["layout"]["rank_list"] == [0, 1, 2, 3]
        else:
            assert json.dumps(ours["state_dict_metadata"][key]) == json.dumps(meta), key  # order of names included

    def as_set(entries: list[dict[str, Any]]) -> set[str]:
        return {json.dumps(entry) for entry in entries}

    assert set(ours["storage_data"]) == set(theirs["storage_data"])
    for shard, entries in theirs["storage_data"].items():
        assert as_set(ours["storage_data"][shard]) == as_set(entries), shard
        assert len(ours["storage_data"][shard]) == len(entries)


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.name)
def test_release_190_reads_the_samples_by_our_metadata(tree: Tree, tmp_path: Path) -> None:
    source = SAMPLES / tree.name / "checkpoint" / tree.folder
    for path in source.glob("*.safetensors"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    records = records_of(tree.table)
    plan = assign(shards_of(records, tree.mesh), tree.mesh.ranks, dedup=tree.dedup)
    write_metadata(locate(tmp_path / "metadata.json"), Records.of(records), tree.mesh, plan, prefix=tree.prefix)
    original_reader.audit(tmp_path, dedup=tree.dedup)
    expected = expected_tensors(tree.name, int(tree.folder[-2:]))
    assert_same(original_reader.read_tree(tmp_path), expected, set(expected))  # all of them, null layouts or not


# -- whole trees of ours, read by the second reader


def box_of(record: TensorRecord, mesh: Mesh, rank: int) -> tuple[slice, ...] | None:
    """A rank's box, by the plainest arithmetic: the coordinate of the rank on each axis, axis after axis."""
    names, sizes = zip(*mesh.axes, strict=True)
    size_of = dict(mesh.axes)
    point = dict(zip(names, np.unravel_index(mesh.ranks.index(rank), sizes), strict=True))
    for axes, folded in record.layout.place:
        if np.ravel_multi_index([point[axis] for axis in axes], [size_of[axis] for axis in axes]) != folded:
            return None
    box = []
    for dim, extent in enumerate(record.layout.shape):
        start, size = 0, extent
        for axis in record.layout.partition.axes_of(dim):
            size //= size_of[axis]
            start += int(point[axis]) * size
        box.append(slice(start, start + size))
    return tuple(box)


def write_tree(
    root: Path, records: list[TensorRecord], mesh: Mesh, *, dedup: bool, prefix: str | None
) -> tuple[FilePlan, dict[str, np.ndarray]]:
    """A tree as a conversion writes it, with numpy slices and the stock library for the shard files."""
    random = np.random.default_rng(7)
    tensors = {}
    for record in records:
        raw = random.integers(
            0, 2, (math.prod(record.layout.shape) * np.dtype(NUMPY[record.dtype]).itemsize,), np.uint8
        )
        tensors[record.key] = raw.view(NUMPY[record.dtype]).reshape(record.layout.shape)
    folder = root / roots.iteration_folder_name(12)
    folder.mkdir()
    plan = assign(shards_of(records, mesh), mesh.ranks, dedup=dedup)
    by_key = {record.key: record for record in records}
    for file in plan.files:
        shards = {}
        for key in file.keys:
            box = box_of(by_key[key], mesh, file.rank)
            assert box is not None
            shards[key] = np.ascontiguousarray(tensors[key][box]).reshape(tensors[key][box].shape)
        save_file(shards, folder / file.name(prefix), metadata={"format": "ms"})
    write_metadata(locate(folder / "metadata.json"), Records.of(records), mesh, plan, prefix=prefix, durable=False)
    CommonInfo(step_num=12, global_step=12).write(locate(folder / "common.json"), durable=False)
    roots.write_tracker(locate(root), 12, durable=False)
    return plan, tensors


@settings(max_examples=60)
@given(model=models(), dedup=st.booleans(), prefix=st.sampled_from([None, "run-model"]))
def test_release_190_reads_whatever_we_call_expressible(
    *,
    model: tuple[Mesh, list[TensorRecord]],
    dedup: bool,
    prefix: str | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    mesh, records = model
    records = [record for record in records if inexpressible(record, mesh) is None]
    root = tmp_path_factory.mktemp("root")
    plan, tensors = write_tree(root, records, mesh, dedup=dedup, prefix=prefix)
    original_reader.audit(root / "iteration_00000012", dedup=dedup)
    assert_same(original_reader.read_tree(root), tensors, set(tensors))
    assert original_reader.read_common(root).global_step == 12
    for part in ("model", "optimizer"):
        of_part = [file for file in plan.files if file.part == part]
        indices = list(range(len(of_part))) if dedup else [file.rank for file in of_part]
        assert [file.index for file in of_part] == indices
        assert {file.count for file in of_part} <= {len(of_part) if dedup else mesh.n_ranks}


EXPRESSIBLE: list[tuple[str, Mesh, dict[str, Any], str | None]] = [
    ("whole", Mesh([("tp", 4)]), {}, None),
    ("an even cut", Mesh([("tp", 4)]), {"cut": (("tp",),)}, None),
    ("0-d", Mesh([("tp", 4)]), {"shape": ()}, None),
    ("an empty dim", Mesh([("tp", 4)]), {"shape": (0, 6), "cut": (("tp",),)}, None),
    ("even by ceil", Mesh([("tp", 4)]), {"cut": (("tp",),), "uneven": "ceil"}, None),
    ("equal sizes", Mesh([("tp", 4)]), {"cut": (("tp",),), "sizes": ((0, (2, 2, 2, 2)),)}, None),
    ("storage order that is the global one", Mesh([("tp", 4)]), {"stored": (0, 1)}, None),
    ("blocks of a dim that is not cut", Mesh([("tp", 1)]), {"cut": (("tp",),), "blocks": ((0, ("x",)),)}, None),
    ("both stages", Mesh([("pp", 2), ("tp", 2)]), {"cut": (("tp",),)}, None),
    ("the last stage", Mesh([("pp", 2), ("tp", 2)]), {"cut": (("tp",),), "place": ((("pp",), 1),)}, None),
    ("one rank of folded axes", Mesh([("dp", 2), ("tp", 2)]), {"place": ((("dp", "tp"), 3),)}, None),
    ("uneven", Mesh([("tp", 4)]), {"cut": ((), ("tp",))}, "dim 1 has 6 elements, which 4 parts"),
    ("uneven by ceil", Mesh([("tp", 4)]), {"cut": ((), ("tp",)), "uneven": "ceil"}, "do not divide evenly"),
    ("sizes", Mesh([("tp", 2)]), {"cut": (("tp",),), "sizes": ((0, (5, 3)),)}, "parts of different sizes"),
    ("blocks", Mesh([("tp", 2)]), {"cut": (("tp",),), "blocks": ((0, ("x", "y")),)}, "blocks"),
    ("flat", Mesh([("dp", 2)]), {"flat": ("dp",)}, "flattened"),
    ("permuted storage", Mesh([("dp", 2)]), {"stored": (1, 0)}, "another order"),
    ("8-bit float", Mesh([("dp", 2)]), {"dtype": "F8_E4M3"}, "no shard files of F8_E4M3"),
    ("complex", Mesh([("dp", 2)]), {"dtype": "C64"}, "no shard files of C64"),
    ("the inner axis", Mesh([("dp", 2), ("tp", 2)]), {"place": ((("tp",), 0),)}, "0, 2, are not a contiguous"),
    ("permuted ranks", Mesh([("tp", 4)], (1, 0, 2, 3)), {}, "1, 0, 2, 3, are not"),
    ("ranks not aligned", Mesh([("tp", 4)], (2, 3, 4, 5)), {}, "aligned"),
    ("cut by what places it", Mesh([("tp", 4)]), {"cut": (("tp",),), "place": ((("tp",), 0),)}, "both places"),
    ("an axis called None", Mesh([("None", 4)]), {}, "`None` has another meaning"),
    ("a virtual axis", Mesh([("interleaved_parallel", 2)]), {}, "has another meaning"),
]


@pytest.mark.parametrize(("mesh", "fields", "reason"), [pytest.param(*row[1:], id=row[0]) for row in EXPRESSIBLE])
def test_what_metadata_can_express(mesh: Mesh, fields: dict[str, Any], reason: str | None, tmp_path: Path) -> None:
    record = record_of(**{"key": "w", "dtype": "F32", "shape": (8, 6), **fields})
    found = inexpressible(record, mesh)
    plan = assign(shards_of([record], mesh), mesh.ranks, dedup=True)
    if reason is None:
        assert found is None
        write_metadata(locate(tmp_path / "m.json"), Records.of([record]), mesh, plan, durable=False)
    else:
        assert found is not None
        assert reason in found
        with pytest.raises(UnsupportedError, match="cannot describe `w`"):
            write_metadata(locate(tmp_path / "m.json"), Records.of([record]), mesh, plan)
        assert list(tmp_path.iterdir()) == []


def test_metadata_refuses_a_name_twice_and_a_shard_in_no_file(tmp_path: Path) -> None:
    mesh = Mesh([("tp", 2)])
    record = record_of("w", "F32", (8,))
    plan = assign(shards_of([record], mesh), mesh.ranks, dedup=True)
    with pytest.raises(ArgumentError, match="`w` is described twice"):
        write_metadata(locate(tmp_path / "m.json"), Records.of([record, record]), mesh, plan)
    with pytest.raises(ArgumentError, match="shard 0 of `w` is in no file"):
        write_metadata(locate(tmp_path / "m.json"), Records.of([record]), mesh, FilePlan(()))
    assert list(tmp_path.iterdir()) == []


def test_every_axis_placed_still_gives_a_device_matrix(tmp_path: Path) -> None:
    mesh = Mesh([("dp", 2), ("tp", 2)])
    record = record_of("w", "F32", (8,), place=((("dp", "tp"), 2),))
    plan = assign(shards_of([record], mesh), mesh.ranks, dedup=True)
    write_metadata(locate(tmp_path / "m.json"), Records.of([record]), mesh, plan)
    layout = json.loads((tmp_path / "m.json").read_text())["state_dict_metadata"]["w"]["layout"]
    assert (layout["device_matrix"], layout["tensor_map"], layout["rank_list"]) == ([1], [-1], [2])


# -- who writes what


def test_few_holders_first_then_large_then_by_name() -> None:
    everyone = (0, 1, 2)
    shards = [
        HeldShard("small", "model", 0, everyone, 8),
        HeldShard("b", "model", 0, everyone, 64),
        HeldShard("a", "model", 0, everyone, 64),
        HeldShard("mine", "model", 0, (0,), 100),
        HeldShard("pair", "model", 0, (0, 1), 16),
        HeldShard("step", "optimizer", 0, everyone, 64),
    ]
    plan = assigned(shards, everyone, dedup=True)
    # mine -> 0 (100), pair -> 1 (16), a -> 2 (64), b -> 1 (80), small -> 2; the optimizer's loads start anew
    assert [(f.part, f.rank, f.index, f.count, f.keys) for f in plan.files] == [
        ("model", 0, 0, 3, ("mine",)),
        ("model", 1, 1, 3, ("b", "pair")),
        ("model", 2, 2, 3, ("small", "a")),
        ("optimizer", 0, 0, 1, ("step",)),
    ]
    assert plan.files[3].name("p") == "p-opt-0000000-0000001.safetensors"


def sorted_by_the_rule(shards: list[HeldShard], ranks: list[int]) -> dict[int, list[str]]:
    """The rule of the original, shard by shard."""
    loads = dict.fromkeys(ranks, 0)
    keys: dict[int, set[str]] = {rank: set() for rank in ranks}
    for shard in sorted(shards, key=lambda one: (len(one.holders), -one.n_bits, shard_id(one.key, one.offset))):
        rank = min(shard.holders, key=lambda rank: loads[rank])
        loads[rank] += shard.n_bits
        keys[rank].add(shard.key)
    return {rank: sorted(of_rank) for rank, of_rank in keys.items() if of_rank}


@given(
    drawn=st.lists(st.tuples(st.sets(st.integers(0, 4), min_size=1), st.integers(0, 3)), min_size=1, max_size=12),
)
def test_shards_of_one_holder_are_assigned_by_the_same_rule(drawn: list[tuple[set[int], int]]) -> None:
    shards = [HeldShard(f"w{i}", "model", 0, tuple(sorted(of)), n) for i, (of, n) in enumerate(drawn)]
    plan = assigned(shards, list(range(5)), dedup=True)
    assert {file.rank: sorted(file.keys) for file in plan.files} == sorted_by_the_rule(shards, list(range(5)))


@given(
    grids=st.lists(st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=3), min_size=1, max_size=3),
    drawn=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.booleans()), max_size=12),
    dedup=st.booleans(),
)
def test_a_grid_of_shards_is_assigned_as_its_shards(
    grids: list[list[set[int]]], drawn: list[tuple[int, int, bool]], *, dedup: bool
) -> None:
    shared = [{offset: tuple(sorted(ranks)) for offset, ranks in enumerate(grid)} for grid in grids]
    of_grids = [
        HeldGrid(f"w{i}", "optimizer" if is_other else "model", shared[number % len(shared)], n_bits)
        for i, (number, n_bits, is_other) in enumerate(drawn)
    ]
    alone = [HeldShard(key, part, *one, n_bits) for key, part, grid, n_bits in of_grids for one in grid.items()]
    found = assign(of_grids, list(range(5)), dedup=dedup)
    expected = assigned(alone, list(range(5)), dedup=dedup)
    assert [replace(file, keys=tuple(sorted(file.keys))) for file in found.files] == [
        replace(file, keys=tuple(sorted(file.keys))) for file in expected.files
    ]


def test_a_shard_weighs_what_the_original_says() -> None:
    mesh = Mesh([("dp", 2)])
    records = [
        record_of("mask", "BOOL", (40,)),  # a boolean counts one bit there, though it is a byte in the file
        record_of("half", "BF16", (4,)),
        record_of("cut", "F32", (6, 2), cut=(("dp",),)),
        record_of("uneven", "F64", (3,), cut=(("dp",),), uneven="ceil"),
        record_of("eight", "F8_E4M3", (4,)),
    ]
    weights = {shard.key: shard.n_bits for shard in shards_of(records, mesh)}
    assert weights == {"mask": 40, "half": 64, "cut": 192, "uneven": 128, "eight": 32}


def test_a_rank_that_gets_nothing_has_no_file() -> None:
    mesh = Mesh([("pp", 2), ("tp", 2)])
    records = [record_of("w", "F32", (8,), cut=(("tp",),), place=((("pp",), 1),))]
    shards = shards_of(records, mesh)
    assert [shard.grid for shard in shards] == [{0: (2,), 1: (3,)}]
    assert [(f.rank, f.index, f.count) for f in assign(shards, mesh.ranks, dedup=True).files] == [(2, 0, 2), (3, 1, 2)]
    assert [(f.rank, f.index, f.count) for f in assign(shards, mesh.ranks, dedup=False).files] == [(2, 2, 4), (3, 3, 4)]


def test_a_name_in_both_parts_is_refused() -> None:
    shards = [HeldShard("w", "model", 0, (0,), 8), HeldShard("w", "optimizer", 0, (0,), 8)]
    with pytest.raises(ArgumentError, match="`w` names a tensor of the model and one of the optimizer"):
        assigned(shards, [0], dedup=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mesh([("a", 2), ("a", 2)]), "mesh axis `a` occurs twice"),
        (lambda: Mesh([("a", 0)]), "a size of at least 1"),
        (lambda: Mesh([("a", 2)], (1, 1)), "lists rank 1 twice"),
        (lambda: Mesh([("a", 2)], (0, 1, 2)), "lists 3 ranks"),
        (lambda: Mesh([("a", 2)]).held(((("b",), 0),)), "no axis `b`"),
        (lambda: Mesh([("a", 2)]).held(((("a",), 2),)), "coordinate 2 is outside"),
        (lambda: Mesh([("a", 2)]).held(((("a",), 0), (("a",), 1))), "fixes axis `a` at 0 and at 1"),
        (lambda: Mesh([("a", 2)]).folded(("c",), ()), "no axis `c`"),
    ],
)
def test_a_mesh_that_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make()


@pytest.mark.parametrize("key", ["a.b", "it's", 'say "a"', "back\\slash", "\u00e9", "tab\t", "100%", "\u200b", "{x}"])
def test_the_text_is_that_of_pythons_json(key: str, tmp_path: Path) -> None:
    mesh = Mesh([("tp", 12)])
    records = [record_of(key, "F32", (12,), cut=(("tp",),)), record_of("b", "F32", (3,)), record_of("c", "U8", ())]
    plan = assign(shards_of(records, mesh), mesh.ranks, dedup=True)
    write_metadata(locate(tmp_path / "m.json"), Records.of(records), mesh, plan)
    text = (tmp_path / "m.json").read_text(encoding="utf-8")
    content = json.loads(text)
    assert json.dumps(content, ensure_ascii=False, separators=(",", ":")) == text.replace("\n", "")
    assert list(content["state_dict_metadata"]) == [key, "b", "c"]
    assert list(content["storage_data"]) == [*(shard_id(key, n) for n in range(12)), shard_id("b", 0), shard_id("c", 0)]
