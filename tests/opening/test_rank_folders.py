"""Rank folders opened as one checkpoint: whole tensors with a strategy, local arrays without one.

The samples are real trees with their whole tensors. Other trees are sharded here by the formula of the format, and
their strategies are written as the JSON that MindSpore writes.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tests.helpers import ckpt_files, original_reader
from tests.helpers.arrays import Arrays, assert_same

import reshard
from reshard.cli import main
from reshard.errors import (
    CheckpointNotFoundError,
    DamagedFileError,
    KeyNotFoundError,
    LayoutError,
    MismatchError,
    ReshardError,
)
from reshard.formats.checkpoint1 import replicas
from reshard.opening import root_of

SAMPLES = Path(__file__).parents[1] / "data" / "mindspore"
SRC = SAMPLES / "strategy"
PY = SAMPLES / "strategy_py"
CKPT1 = SAMPLES / "ckpt1"
COUNTERS = {"epoch_num", "step_num", "global_step", "loss_scale", "global_batch_size"}


def file_of(tree: Path, rank: int) -> Arrays:
    (file,) = (tree / f"rank_{rank}").glob("*.safetensors")
    return original_reader.read_shard_file(file)


# -- the samples


@pytest.mark.parametrize(
    ("tree", "strategy", "truth"),
    [
        (SRC / "src_rank_slices", SRC / "merged" / "src_merged_strategy.ckpt", SRC),
        (SRC / "src_rank_slices", SRC / "merged" / "src_merged_strategy.json", SRC),
        (SRC / "src_rank_slices", SRC / "src_strategy", SRC),
        (SRC / "src_rank_slices", SRC / "src_strategy_json", SRC),
        (SRC / "src_rank_slices_dedup", SRC / "src_strategy", SRC),
        (PY / "src_rank_slices", PY / "src_strategy", PY),
        (PY / "src_rank_slices", PY / "merged" / "merged_ckpt_strategy.ckpt", PY),
    ],
    ids=lambda path: f"{path.parent.name}-{path.name}",
)
def test_samples_are_their_ground_truth(tree: Path, strategy: Path, truth: Path) -> None:
    expected = original_reader.read_shard_file(truth / "expected_full.safetensors")
    with reshard.open(tree, strategy=strategy) as opened:
        assert opened.format == "checkpoint1"
        assert not opened.unplaced()
        assert set(opened) - set(expected) <= COUNTERS
        assert_same(opened.load(keys=expected.keys()), expected)
        for key, array in expected.items():
            part = tuple(slice(extent // 3, None) for extent in array.shape)
            assert opened.read(key, part).tobytes() == array[part].tobytes()
        # The layout that it is stored in gives every rank what its own file holds, as far as that is its own alone.
        layout = reshard.ModelLayout.like(opened)
        whole = SRC / "src_rank_slices" if truth == SRC else tree
        for rank in range(8):
            own = file_of(whole, rank)
            got = opened.load(layout, rank=rank)
            assert_same(
                {key: got[key] for key in got if key not in COUNTERS}, {k: own[k] for k in own if k in expected}
            )
            assert_same(opened.stored(rank), file_of(tree, rank))


def test_counters_are_the_common_info_and_stay_readable() -> None:
    with reshard.open(SRC / "src_rank_slices", strategy=SRC / "src_strategy") as opened:
        assert opened.iteration == 40
        assert opened.common == reshard.CommonInfo(20, 40, 40, 65536.0, 8)
        assert int(opened.read("step_num")) == 40
        assert opened.keys("optimizer") == [key for key in opened if key in COUNTERS or key.startswith("adam_m.")]
    with reshard.open(PY / "src_rank_slices", strategy=PY / "src_strategy") as opened:
        assert opened.common is not None
        assert opened.common.loss_scale is None


@pytest.mark.parametrize(
    ("folder", "steps", "suffix"),
    [("output/checkpoint", 40, "-20_2"), ("output_second_run/checkpoint", 50, "_1-25_2")],
)
def test_a_root_is_its_last_save(folder: str, steps: int, suffix: str) -> None:
    with reshard.open(CKPT1 / folder) as opened:
        assert opened.iteration == steps
        names = [f"rank_{rank}/llama2_7b_rank_{rank}{suffix}.safetensors" for rank in range(4)]
        assert [file.name for file in opened.files()] == names
        assert opened.ranks() == [0, 1, 2, 3]
        for rank, name in enumerate(names):
            assert_same(opened.stored(rank), original_reader.read_shard_file(CKPT1 / folder / name))
    root = root_of(CKPT1 / folder)
    assert root is not None
    assert root.newest_first()[0].name.endswith(f"{suffix}.safetensors")


def test_weights_alone_have_no_counters() -> None:
    with reshard.open(CKPT1 / "output" / "checkpoint_network") as opened:
        assert opened.common is None
        assert opened.iteration is None
        assert opened.keys() == ["embed.weight", "layers.0.w"]
        assert all("-network-20_2." in file.name for file in opened.files())


# -- without a strategy


@pytest.mark.parametrize(
    "read",
    [
        lambda opened: opened["embed.weight"],
        lambda opened: opened.read("embed.weight"),
        lambda opened: opened.shape("embed.weight"),
        lambda opened: opened.load(keys=["embed.weight"]),
        lambda opened: opened.load(),
        lambda opened: opened.bind({"mesh": {"tp": 1}, "rules": [{"match": "*"}]}),
        reshard.ModelLayout.like,
    ],
    ids=["item", "read", "shape", "load", "load all", "bind", "like"],
)
def test_cut_tensors_cannot_be_read_without_a_strategy(read: Callable[[reshard.Checkpoint], object]) -> None:
    with (
        reshard.open(CKPT1 / "output" / "checkpoint") as opened,
        pytest.raises(LayoutError, match=r"their positions in the tensor are not known\nhint: copy the strategy files"),
    ):
        read(opened)


def test_what_is_known_without_a_strategy() -> None:
    with reshard.open(CKPT1 / "output" / "checkpoint") as opened:
        assert opened.unplaced() == {
            "embed.weight": ("F32", ((8, 4),)),
            "layers.0.w": ("BF16", ((4, 6),)),
            "adam_m.layers.0.w": ("F32", ((4, 6),)),
            "adam_v.layers.0.w": ("F32", ((4, 6),)),
        }
        assert set(opened.keys()) == set(opened.unplaced()) | COUNTERS
        assert len(opened) == 9
        assert "embed.weight" in opened
        assert "nothing" not in opened
        assert opened.read("global_step").tolist() == [40]
        assert opened.keys("model") == ["embed.weight", "layers.0.w"]
        with pytest.raises(KeyNotFoundError):
            opened.read("nothing")


def test_the_folder_of_one_rank_is_whole_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    folder = CKPT1 / "output" / "checkpoint" / "rank_2"
    with caplog.at_level(logging.WARNING, "reshard"), reshard.open(folder) as opened:
        assert opened.iteration == 40
        assert opened.ranks() == [2]
        expected = original_reader.read_shard_file(folder / "llama2_7b_rank_2-20_2.safetensors")
        assert_same(opened.load(), expected)
        assert_same(opened.stored(2), expected)
    assert any(
        "arrays of rank 2 are read as whole tensors; 3 more rank folders exist" in line for line in caplog.messages
    )


# -- trees that are cut here


@dataclass(frozen=True)
class Item:
    """A parameter of a strategy, in the words of the file."""

    shape: tuple[int, ...]
    dev_matrix: tuple[int, ...] = (1,)
    tensor_map: tuple[int, ...] = ()
    shard_size: int = 0
    stage: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    def slices(self, array: np.ndarray) -> list[np.ndarray]:
        """What each rank of the stage holds: sections 1.4 and 4.3 of the format, device by device."""
        n = math.prod(self.dev_matrix)
        own = []
        for position in range(n):
            point = np.unravel_index(position, self.dev_matrix)
            box = []
            for extent, v in zip(self.shape, self.tensor_map, strict=True):
                parts, k = (1, 0) if v < 0 else (self.dev_matrix[-1 - v], int(point[len(point) - 1 - v]))
                box.append(slice(k * extent // parts, (k + 1) * extent // parts))
            own.append(tuple(box))
        if self.shard_size == 0:
            return [array[index] for index in own]
        shared = []
        for position, index in enumerate(own):
            holders = [p for p in range(n) if own[p] == index]
            size = len(holders) if self.shard_size == -1 else self.shard_size
            rows = array[index]
            k = holders.index(position) % size
            shared.append(rows[k * len(rows) // size : (k + 1) * len(rows) // size])
        return shared

    @property
    def shard_step(self) -> int:
        """The distance of neighbours that share a slice."""
        used = {len(self.dev_matrix) - 1 - v for v in self.tensor_map if v >= 0}
        free = [axis for axis, size in enumerate(self.dev_matrix) if axis not in used and size > 1]
        return math.prod(self.dev_matrix[free[-1] + 1 :]) if free and self.shard_size else 0


def write_strategy(folder: Path, items: dict[str, Item], n_stages: int = 1) -> Path:
    """The strategy file of each stage."""
    folder.mkdir(parents=True)
    for stage in range(n_stages):
        layouts = {
            key: {
                "dev_matrix": item.dev_matrix,
                "tensor_map": item.tensor_map,
                "param_split_shape": [],
                "indices_offset": [],
                "field": 0,
                "opt_weight_shard_step": item.shard_step,
                "opt_weight_shard_size": item.shard_size,
                **item.extra,
            }
            for key, item in items.items()
            if item.stage == stage
        }
        content = {
            "current_stage": 1,
            "parallel_strategy_item": {f"op{stage}": {"stage": stage, "parallel_strategy": [[1]]}},
            "parallel_layout_item": layouts,
        }
        (folder / f"strategy_stage_{stage}.json").write_text(json.dumps(content))
    return folder


def write_ranks(root: Path, ranks: list[Arrays], name: str = "net.safetensors") -> Path:
    for rank, arrays in enumerate(ranks):
        (root / f"rank_{rank}").mkdir(parents=True, exist_ok=True)
        file = root / f"rank_{rank}" / name.replace("#", str(rank))
        save_file({key: np.array(array, order="C") for key, array in arrays.items()}, file, {"format": "ms"})
    return root


W = np.arange(24, dtype=np.float32).reshape(8, 3)
ITEM = Item((8, 3), (2, 2), (0, -1))
SLICES = ITEM.slices(W)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Four ranks, `w` cut in two rows-wise, each half held twice; the strategy lies in `tmp_path`."""
    write_strategy(tmp_path / "cut", {"w": ITEM})
    return write_ranks(tmp_path / "tree", [{"w": rows, "step_num": np.array(7)} for rows in SLICES])


def test_the_tree_of_these_tests(tree: Path) -> None:
    with reshard.open(tree, strategy=tree.parent / "cut") as opened:
        assert_same(opened.load(keys=["w"]), {"w": W})
        assert [shard.offset for shard in opened["w"].shards] == [(0, 0), (4, 0)]
        assert opened["w"].shards[1].files == ("rank_1/net.safetensors", "rank_3/net.safetensors")
        assert str(opened.strategy.source) == str(tree.parent / "cut") if opened.strategy else False


@pytest.mark.parametrize("place", ["strategy", "tree/strategy"])
def test_a_strategy_beside_or_inside_is_found_and_told(
    place: str, tree: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(tree.parent / "cut", tree.parent / place)
    with caplog.at_level(logging.INFO, "reshard"), reshard.open(tree) as opened:
        assert_same(opened.load(keys=["w"]), {"w": W})
    assert any("is opened with the strategy in" in line for line in caplog.messages)


def test_any_holder_of_a_part_will_do(tree: Path) -> None:
    """De-duplicated: ranks 0 and 3 keep the halves."""
    for rank in (1, 2):
        save_file({"step_num": np.array(7)}, tree / f"rank_{rank}" / "net.safetensors", {"remove_redundancy": "True"})
    with reshard.open(tree, strategy=tree.parent / "cut") as opened:
        assert_same(opened.load(keys=["w"]), {"w": W})
        assert list(opened.stored(1)) == ["step_num"]


def test_a_save_that_is_damaged_on_one_rank_is_passed_over(tree: Path, caplog: pytest.LogCaptureFixture) -> None:
    for rank in range(4):
        (tree / f"rank_{rank}" / "net.safetensors").unlink()
    for steps in (5, 10, 15):
        ranks = [{"w": rows + steps, "step_num": np.array(steps)} for rows in SLICES]
        write_ranks(tree, ranks, name=f"x_rank_#-{steps}_1.safetensors")
    for rank in range(4):
        text = json.dumps({"last_epoch": 15, "last_step": 1, "last_ckpt_file": f"x_rank_{rank}-15_1.safetensors"})
        (tree / f"rank_{rank}" / "meta.json").write_text(text)
    newest, middle = tree / "rank_2" / "x_rank_2-15_1.safetensors", tree / "rank_1" / "x_rank_1-10_1.safetensors"
    newest.write_bytes(newest.read_bytes()[:-5])
    middle.unlink()
    with caplog.at_level(logging.WARNING, "reshard"), reshard.open(tree, strategy=tree.parent / "cut") as opened:
        assert opened.iteration == 5
        assert_same(opened.load(keys=["w"]), {"w": W + 5})
        assert [name for name, _ in opened.skipped] == ["x_rank_0-15_1.safetensors", "x_rank_0-10_1.safetensors"]
    for reason in ("x_rank_2-15_1.safetensors", "rank 1 has no file of it"):
        assert any(reason in line and "skipped" in line for line in caplog.messages)
    report = reshard.verify(tree, strategy=tree.parent / "cut")
    assert [bool(one.faults) for one in report.checkpoints] == [True, True, False]
    assert report.checkpoints[0].faults[0].file == "rank_2/x_rank_2-15_1.safetensors"
    oldest = tree / "rank_3" / "x_rank_3-5_1.safetensors"
    oldest.write_bytes(b"")
    with pytest.raises(DamagedFileError, match=r"(?s)no complete checkpoint.*15_1.*10_1.*5_1"):
        reshard.open(tree, strategy=tree.parent / "cut")


# -- what is refused

Change = Callable[[Path], None]


def without(rank: int) -> Change:
    return lambda tree: shutil.rmtree(tree / f"rank_{rank}")


def holding(*ranks: int, **arrays: np.ndarray) -> Change:
    """Other arrays in the file of a rank, which need not be there; one of no elements is taken out."""

    def change(tree: Path) -> None:
        for rank in ranks:
            (tree / f"rank_{rank}").mkdir(exist_ok=True)
            file = tree / f"rank_{rank}" / "net.safetensors"
            old = original_reader.read_shard_file(file) if file.exists() else {}
            save_file({key: array for key, array in {**old, **arrays}.items() if array.size}, file)

    return change


def cut_by(n_stages: int = 1, **items: Item) -> Change:
    """Another strategy."""

    def change(tree: Path) -> None:
        shutil.rmtree(tree.parent / "cut")
        write_strategy(tree.parent / "cut", items, n_stages)

    return change


def raw(data: bytes) -> Change:
    """Other bytes in the file of rank 2."""

    def change(tree: Path) -> None:
        (tree / "rank_2" / "net.safetensors").write_bytes(data)

    return change


def without_the_first_stage(tree: Path) -> None:
    cut_by(2, w=ITEM, v=Item((4, 2), (2, 2), (0, -1), stage=1))(tree)
    (tree.parent / "cut" / "strategy_stage_0.json").unlink()


def linked(tree: Path) -> None:
    file = tree / "rank_2" / "net.safetensors"
    file.rename(tree.parent / "bait.safetensors")
    file.symlink_to(tree.parent / "bait.safetensors")


def linked_to_nothing(tree: Path) -> None:
    linked(tree)
    (tree.parent / "bait.safetensors").unlink()


def pipe(tree: Path) -> None:
    (tree / "rank_2" / "net.safetensors").unlink()
    os.mkfifo(tree / "rank_2" / "net.safetensors")


def without_files(*ranks: int) -> Change:
    def change(tree: Path) -> None:
        for rank in ranks:
            (tree / f"rank_{rank}" / "net.safetensors").unlink()

    return change


def weights_as_strategy(tree: Path) -> None:
    (tree.parent / "cut" / "strategy_stage_0.json").unlink()
    shutil.copy(tree / "rank_0" / "net.safetensors", tree.parent / "cut" / "ckpt_strategy_rank_0.ckpt")


def unlisted(tree: Path) -> None:
    holding(1, v=W[1:])(tree)
    holding(2, v=W)(tree)


V = Item((4, 2), (2, 2), (0, -1), stage=1)
NOTHING = np.zeros(0)
HEADER = b'{"w":{"dtype":"F32","shape":[4,3],"data_offsets":[0,48]}}'
REFUSED: dict[str, tuple[Change, type[ReshardError], str]] = {
    "a rank is missing": (without(2), CheckpointNotFoundError, r"no file of rank 2 \(stage 0\).*1 stage of 4 ranks"),
    "the last rank is missing": (without(3), CheckpointNotFoundError, "no file of rank 3"),
    "a rank without a file": (without_files(1), DamagedFileError, "rank 1 has no file of it"),
    "no files at all": (without_files(0, 1, 2, 3), CheckpointNotFoundError, "hold no weight files"),
    "ranks of another run": (holding(4, w=SLICES[0]), MismatchError, "files of rank 4, but .* has 4 ranks"),
    "a stage without ranks": (cut_by(2, w=ITEM, v=V), CheckpointNotFoundError, r"rank 4, 5, 6, 7 \(stage 1\)"),
    "a stage without strategy": (without_the_first_stage, CheckpointNotFoundError, "no strategy of stage 0"),
    "a strategy of fewer ranks": (cut_by(w=Item((8, 3), (2,), (0, -1))), MismatchError, "files of rank 2, 3"),
    "a strategy of more ranks": (cut_by(w=Item((8, 3), (2, 4), (0, -1))), CheckpointNotFoundError, "rank 4, 5, 6, 7"),
    "a strategy of other dims": (cut_by(w=Item((8,), (2, 2), (0,))), MismatchError, "cuts 1 dim of `w`, which has 2"),
    "a strategy that is weights": (weights_as_strategy, ReshardError, "strategy"),
    "parts of other shapes": (holding(2, w=SLICES[2][:2]), MismatchError, "`w` has different shapes"),
    "another dtype": (holding(2, w=SLICES[2].astype(np.float16)), DamagedFileError, "`w` is F32 in .* and F16 in"),
    "a part that nobody holds": (holding(1, 3, w=NOTHING), DamagedFileError, "missing in the file of rank 1, 3"),
    "unlisted, and not alike": (unlisted, MismatchError, "`v` is not in the strategy"),
    "files of two saves": (holding(2, step_num=np.array(6)), DamagedFileError, "`step_num` is 6, .* of rank 0 it is 7"),
    "a counter of two": (holding(0, 1, 2, 3, loss_scale=np.ones(2)), DamagedFileError, "`loss_scale` has shape"),
    "a counter below 0": (holding(0, 1, 2, 3, step_num=np.array(-1)), DamagedFileError, "`step_num` is -1"),
    "an empty file": (raw(b""), DamagedFileError, "net.safetensors"),
    "zeros": (raw(bytes(200)), DamagedFileError, "net.safetensors"),
    "garbage": (raw(b"\xff" * 200), DamagedFileError, "net.safetensors"),
    "cut short": (raw(struct.pack("<Q", len(HEADER)) + HEADER + bytes(47)), DamagedFileError, "net.safetensors"),
    "a link": (linked, DamagedFileError, "rank_2/net.safetensors` is a symbolic link"),
    "a link to nothing": (linked_to_nothing, DamagedFileError, "rank_2/net.safetensors` is a symbolic link"),
    "a pipe": (pipe, DamagedFileError, "rank_2/net.safetensors` is not a regular file"),
    "counters that a rank lacks": (holding(3, step_num=NOTHING), DamagedFileError, "`step_num` is missing, .*rank 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tree: Path) -> None:
    change, kind, message = REFUSED[name]
    change(tree)
    with pytest.raises(kind, match=f"(?s){message}"):
        reshard.open(tree, strategy=tree.parent / "cut")


def test_a_tensor_that_another_stage_holds(tmp_path: Path) -> None:
    stages = write_strategy(tmp_path / "cut", {"w": Item((4,), (2,), (0,)), "v": Item((4,), (2,), (0,), stage=1)}, 2)
    half = np.zeros(2, np.float32)
    root = write_ranks(tmp_path / "tree", [{"w": half}, {"w": half, "v": half}, {"v": half}, {"v": half}])
    with pytest.raises(MismatchError, match=r"rank_1/net.safetensors` holds `v`, which is on stage 1 in .*"):
        reshard.open(root, strategy=stages)


def test_one_rank_and_the_strategy_of_several(tree: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"rank 0, 2, 3 .*\nhint: .*the parent folder with it"):
        reshard.open(tree / "rank_1", strategy=tree.parent / "cut")


def test_a_gap_is_refused_without_a_strategy_too(tree: Path) -> None:
    shutil.rmtree(tree / "rank_1")
    with pytest.raises(CheckpointNotFoundError, match=r"no file of rank 1\nhint: .* open the folder of one rank"):
        reshard.open(tree)
    (tree / "rank_999999999999999999").mkdir()
    with pytest.raises(CheckpointNotFoundError, match=r"no file of rank 1, 4, 5, 6, 7, 8, 9, 10 and 9{16}88 more"):
        reshard.open(tree)


def test_what_the_strategy_does_not_list(tree: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Alike on all ranks: whole, and told once. State of a parameter's very shape: cut as that is."""
    bias = np.arange(3, dtype=np.float32)
    for rank, rows in enumerate(SLICES):
        holding(rank, **{"bias": bias, "adam_m.w": rows + 1, "adam_v.bias": bias + 1})(tree)
    with caplog.at_level(logging.WARNING, "reshard"), reshard.open(tree, strategy=tree.parent / "cut") as opened:
        expected = {"w": W, "bias": bias, "adam_m.w": W + 1, "adam_v.bias": bias + 1}
        assert_same(opened.load(keys=expected), expected)
        assert opened["bias"].shards[0].files == tuple(f"rank_{rank}/net.safetensors" for rank in range(4))
        layout = reshard.ModelLayout.like(opened)
        assert opened.load(layout, rank=3)["adam_m.w"].tolist() == (SLICES[3] + 1).tolist()
    told = [line.partition(" does not list ")[2] for line in caplog.messages if " does not list " in line]
    assert sorted(told) == [
        "`adam_m.w`: assumed to be sharded like its parameter",
        "`adam_v.bias`, `bias`: assumed to be whole on every rank",
    ]


UNLISTED: Arrays = {"small": np.arange(6, dtype=np.int16).reshape(2, 3), "large": np.arange(4000, dtype=np.float32)}
WHOLE = {"mesh": {"dp": 1}, "rules": [{"match": "*"}]}
READS: dict[str, Callable[[Path, str], object]] = {
    "read": lambda tree, key: opened_cut(tree).read(key),
    "a slice": lambda tree, key: opened_cut(tree).read(key, (slice(0, 1),)),
    "load": lambda tree, key: opened_cut(tree).load(keys=[key]),
    "everything": lambda tree, _: opened_cut(tree).load(),
    "layout": lambda tree, key: opened_cut(tree).load(WHOLE, keys=[key]),
    "views": lambda tree, key: opened_cut(tree).load(keys=[key], copy=False),
    "plan": lambda tree, _: opened_cut(tree).plan(opened_cut(tree).bind(WHOLE).request(0)),
    "names": lambda tree, key: opened_cut(tree).renamed({"rules": [{"from": key, "to": "v"}]}, part="model").read("v"),
    "resume": lambda tree, _: reshard.load(tree, WHOLE, rank=0, strategy=tree.parent / "cut"),
    "convert": lambda tree, _: reshard.convert(tree, tree.parent / "hf", strategy=tree.parent / "cut"),
    "diff": lambda tree, _: reshard.diff(tree, tree, strategy_a=tree.parent / "cut", strategy_b=tree.parent / "cut"),
}


def opened_cut(tree: Path) -> reshard.Checkpoint:
    return reshard.open(tree, strategy=tree.parent / "cut")


@pytest.mark.parametrize("key", UNLISTED)
@pytest.mark.parametrize("how", READS)
def test_what_is_not_listed_and_differs_from_rank_to_rank_is_not_read(how: str, key: str, tree: Path) -> None:
    for rank in range(4):
        holding(rank, **{key: UNLISTED[key] + rank % 2})(tree)
    with pytest.raises(
        MismatchError, match=rf"`{key}`.* the bytes on rank 1, 3 differ from those on rank 0\nhint: list"
    ):
        READS[how](tree, key)
    assert not (tree.parent / "hf").exists()


@pytest.mark.parametrize("key", UNLISTED)
def test_a_difference_in_one_element_of_one_holder_is_found(
    key: str, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """De-duplicated, so that two ranks hold the tensor; compared in several batches."""
    monkeypatch.setattr(replicas, "_BATCH_BYTES", 1 << 10)
    for at in (0, -1):
        other = UNLISTED[key].copy()
        other.flat[at] += 1
        holding(1, **{key: UNLISTED[key]})(tree)
        holding(2, **{key: other})(tree)
        with opened_cut(tree) as opened, pytest.raises(MismatchError, match="on rank 2 differ from those on rank 1"):
            opened.read(key)
        holding(2, **{key: UNLISTED[key]})(tree)
        with opened_cut(tree) as opened:
            assert_same({key: opened.read(key)}, {key: UNLISTED[key]})


def test_the_other_tensors_of_such_a_tree_can_be_read(tree: Path) -> None:
    for rank in range(4):
        holding(rank, own=np.full(3000, rank), **UNLISTED)(tree)
    with opened_cut(tree) as opened:
        assert opened.shape("own") == (3000,)
        assert opened["own"].shape == (3000,)
        assert_same(opened.load(keys=["w", *UNLISTED]), {"w": W, **UNLISTED})
        assert_same(opened.stored(3, keys=["own"]), {"own": np.full(3000, 3)})
        request = opened.bind(WHOLE).request(0, ["w"])
        assert opened.plan(request, keys=["w"]).n_bytes == W.nbytes
        with pytest.raises(MismatchError, match="`own`"):
            opened.plan(request)
    strategy = tree.parent / "cut"
    reshard.convert(tree, tree.parent / "out", strategy=strategy, select={"drop": "own"}, to="safetensors")
    with reshard.open(tree.parent / "out") as written:
        assert_same(written.load(keys=["w", *UNLISTED]), {"w": W, **UNLISTED})


def test_the_state_of_a_listed_parameter_is_compared_among_ranks_of_one_part(tree: Path) -> None:
    for rank, rows in enumerate(SLICES):
        holding(rank, **{"adam_m.w": rows + 1, "accu_grads.w": rows + rank})(tree)
    with opened_cut(tree) as opened:
        assert_same(opened.load(keys=["adam_m.w"]), {"adam_m.w": W + 1})
        with pytest.raises(
            MismatchError, match="assumed to be sharded like `w`, but the bytes on rank 2 differ from those on rank 0"
        ):
            opened.read("accu_grads.w")


def test_without_a_strategy_values_without_dims_are_compared(tree: Path) -> None:
    for rank in range(4):
        holding(rank, seed=np.array(rank // 3), learning_rate=np.array([0.5], np.float32))(tree)
    with reshard.open(tree) as opened:
        assert opened.read("learning_rate").tolist() == [0.5]
        with pytest.raises(MismatchError, match=r"`seed` is read as one .* on rank 3 differ from those on rank 0"):
            opened.read("seed")


def test_counters_and_small_tensors_are_read_without_opening_the_files_again(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(4):
        holding(rank, learning_rate=np.array(0.5), small=UNLISTED["small"])(tree)
    with opened_cut(tree) as opened:
        monkeypatch.setattr("reshard.formats.own_files.opened_again", None)
        assert opened.read("step_num") == 7
        assert opened.read("learning_rate") == 0.5
        assert_same(opened.load(keys=["small", "w"]), {"small": UNLISTED["small"], "w": W})


@pytest.mark.parametrize("key", UNLISTED)
def test_a_damaged_copy_is_damage_and_no_difference(key: str, tree: Path) -> None:
    for rank, rows in enumerate(SLICES):
        content = ckpt_files.dump({"w": rows, key: UNLISTED[key]}, record_bytes=1 << 10, crc=True)
        (tree / f"rank_{rank}" / "net.safetensors").unlink()
        if rank == 2:
            at = content.index(UNLISTED[key].tobytes()[:8])
            content = content[: at + 4] + b"\xff" + content[at + 5 :]
        (tree / f"rank_{rank}" / "net.ckpt").write_bytes(content)
    with opened_cut(tree) as opened, pytest.raises(DamagedFileError, match=r"rank_2/net\.ckpt"):
        opened.read(key)


def test_a_strategy_that_is_not_needed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reshard.save_file({"w": W}, tmp_path / "w.safetensors")
    with caplog.at_level(logging.WARNING, "reshard"), reshard.open(tmp_path / "w.safetensors", strategy="x") as opened:
        assert_same(opened.load(), {"w": W})
    assert any("the strategy is ignored" in line for line in caplog.messages)


def test_files_that_end_in_their_rank(tree: Path) -> None:
    """As `transform_checkpoints` of MindSpore names them; a step in the name is no rank."""

    def name(form: str) -> None:
        for rank in range(4):
            (file,) = (tree / f"rank_{rank}").iterdir()
            file.rename(file.with_name(form.replace("#", str(rank))))

    name("checkpoint_#.safetensors")
    with opened_cut(tree) as opened:
        assert_same(opened.load(keys=["w"]), {"w": W})
    root = root_of(tree)
    assert root is not None
    assert [(save.name, save.fault) for save in root.newest_first()] == [("checkpoint_0.safetensors", None)]
    result = run("merge", tree, tree.parent / "full", "--strategy", tree.parent / "cut")
    assert result.exit_code == 0, result.stderr
    name("net-1_#.safetensors")
    with pytest.raises(DamagedFileError, match="ranks 1, 2, 3 have no file of it"):
        opened_cut(tree)


def test_a_folder_that_is_called_like_a_rank_and_is_something_else(tmp_path: Path) -> None:
    reshard.save_file({"w": W}, tmp_path / "w.safetensors")
    layout = {"mesh": {"tp": 2}, "rules": [{"match": "*", "cut": ["tp"]}]}
    reshard.convert(tmp_path / "w.safetensors", tmp_path / "rank_0", layout=layout, to="safetensors")
    with reshard.open(tmp_path / "rank_0") as opened:
        assert opened.format == "safetensors"
        assert_same(opened.load(), {"w": W})


def test_an_uneven_table(tmp_path: Path) -> None:
    """Rows as the strategy lists them; the layout that it is stored in says so."""
    table = np.arange(20, dtype=np.float32).reshape(10, 2)
    rows = {"param_split_shape": [3, 3, 4], "indices_offset": [0, 3, 6]}
    cut = write_strategy(tmp_path / "cut", {"table": Item((10, 2), (3,), (0, -1), extra=rows)})
    root = write_ranks(tmp_path / "tree", [{"table": part} for part in (table[:3], table[3:6], table[6:])])
    with reshard.open(root, strategy=cut) as opened:
        assert_same(opened.load(), {"table": table})
        layout = reshard.ModelLayout.like(opened)
        assert [opened.load(layout, rank=rank)["table"].shape for rank in range(3)] == [(3, 2), (3, 2), (4, 2)]


def test_a_table_on_two_stages(tmp_path: Path) -> None:
    """Tied: both stages hold it, cut alike. The layout that it is stored in has it on both, too."""
    items = {"own": Item((4, 2), (2,), (0, -1), stage=1), "tied": Item((4, 2), (2,), (0, -1))}
    cut = write_strategy(tmp_path / "cut", items, 2)
    for stage in (0, 1):
        path = cut / f"strategy_stage_{stage}.json"
        content = json.loads(path.read_text())
        tied = json.loads((cut / "strategy_stage_0.json").read_text())["parallel_layout_item"]["tied"]
        content["parallel_layout_item"]["tied"] = tied
        path.write_text(json.dumps(content))
    tied, own = np.arange(8.0).reshape(4, 2), np.ones((4, 2))
    halves = [{"tied": tied[:2]}, {"tied": tied[2:]}]
    root = write_ranks(tmp_path / "tree", [*halves, *({**half, "own": own[:2]} for half in halves)])
    with reshard.open(root, strategy=cut) as opened:
        assert_same(opened.load(), {"tied": tied, "own": own})
        assert [len(shard.files) for shard in opened["tied"].shards] == [2, 2]
        layout = reshard.ModelLayout.like(opened)
        assert_same(opened.load(layout, rank=1), {"tied": tied[2:]})
        assert_same(opened.load(layout, rank=3), {"tied": tied[2:], "own": own[2:]})


@pytest.mark.parametrize("axes", [(-1, -1), (0, -1)])
def test_a_tensor_of_a_layer_on_two_stages(axes: tuple[int, ...], tmp_path: Path) -> None:
    """The place of the other tensors of its layer does not apply to it."""
    items = {f"l.{stage}.w": Item((4, 2), (2,), (0, -1), stage=stage) for stage in (0, 1)}
    tied = Item((4, 2), (2,), axes)
    cut = write_strategy(tmp_path / "cut", items | {"l.0.tied": tied}, 2)
    path = cut / "strategy_stage_1.json"
    content = json.loads(path.read_text())
    first = json.loads((cut / "strategy_stage_0.json").read_text())
    content["parallel_layout_item"]["l.0.tied"] = first["parallel_layout_item"]["l.0.tied"]
    path.write_text(json.dumps(content))
    whole = np.arange(8.0).reshape(4, 2)
    held = [
        {f"l.{rank // 2}.w": whole[rank % 2 * 2 :][:2], "l.0.tied": tied.slices(whole)[rank % 2]} for rank in range(4)
    ]
    root = write_ranks(tmp_path / "tree", held)
    with reshard.open(root, strategy=cut) as opened:
        layout = reshard.ModelLayout.like(opened)
        for rank in range(4):
            assert_same(opened.load(layout, rank=rank), held[rank])


def test_a_tensor_that_two_stages_divide_differently(tmp_path: Path) -> None:
    items = {"tied": Item((4, 2), (2,), (0, -1)), "other": Item((4, 2), (2,), (-1, 0), stage=1)}
    cut = write_strategy(tmp_path / "cut", items, 2)
    path = cut / "strategy_stage_1.json"
    path.write_text(path.read_text().replace('"other"', '"tied"'))
    tied = np.arange(8.0).reshape(4, 2)
    parts = (tied[:2], tied[2:], tied[:, :1], tied[:, 1:])
    root = write_ranks(tmp_path / "tree", [{"tied": np.ascontiguousarray(part)} for part in parts])
    with reshard.open(root, strategy=cut) as opened:
        assert_same(opened.load(), {"tied": tied})
        with pytest.raises(LayoutError, match="stages 0 and 1 cut `tied` differently"):
            reshard.ModelLayout.like(opened)


def test_state_without_redundant_copies_that_is_not_beside_its_parameter(tree: Path) -> None:
    """Ranks 0 and 1 hold the parameter, ranks 2 and 3 its state, with values that are equal on all ranks."""
    holding(2, 3, **{"adam_m.w": np.zeros_like(SLICES[0]), "w": np.empty(0)})(tree)
    with opened_cut(tree) as opened:
        assert_same(opened.load(keys=["adam_m.w", "w"]), {"adam_m.w": np.zeros_like(W), "w": W})


# -- `.ckpt` files


def as_ckpt(tree: Path, **options: Any) -> None:
    for file in tree.rglob("*.safetensors"):
        file.with_suffix(".ckpt").write_bytes(ckpt_files.dump(original_reader.read_shard_file(file), **options))
        file.unlink()


@pytest.mark.parametrize("record_bytes", [None, 8])
def test_ckpt_files_make_up_the_same(record_bytes: int | None, tree: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also where arrays are split into many records, and some values are text."""
    as_ckpt(tree, record_bytes=record_bytes, crc=True)
    first = tree / "rank_0" / "net.ckpt"
    arrays = {"w": SLICES[0], "step_num": np.array(7)}
    first.write_bytes(ckpt_files.with_sum(ckpt_files.text("note", "hello") + ckpt_files.dump(arrays)))
    with caplog.at_level(logging.WARNING, "reshard"), reshard.open(tree, strategy=tree.parent / "cut") as opened:
        assert opened.iteration == 7
        assert opened.strings == ("note",)
        assert_same(opened.load(keys=["w"]), {"w": W})
        assert opened.read("w", (slice(3, 5), 1)).tolist() == W[3:5, 1].tolist()
        for rank, rows in enumerate(SLICES):
            assert_same(opened.stored(rank), {"w": rows, "step_num": np.array(7)})
    assert any("rank_0/net.ckpt` holds text" in line and "`note`" in line for line in caplog.messages)


@pytest.mark.parametrize(
    ("n_kept", "crc", "told"),
    [
        (4, False, "`global_batch_size` is missing, in the file of rank 0 it is 8"),
        (2, False, "`epoch_num` is missing, in the file of rank 0 it is "),
        (5, True, "it has no CRC, but the file of rank 0 has one"),
    ],
    ids=["the last record", "all counters", "the sum alone"],
)
def test_a_ckpt_cut_between_two_records_is_passed_over_by_all(
    n_kept: int,
    crc: bool,  # noqa: FBT001
    told: str,
    tmp_path: Path,
) -> None:
    """Its structure is whole: what it lacks is told by the others' files, and all readers agree."""
    root = tmp_path / "checkpoint"
    for steps in (5, 10):
        for rank in range(3):
            (root / f"rank_{rank}").mkdir(parents=True, exist_ok=True)
            file = root / f"rank_{rank}" / f"x_rank_{rank}-{steps}_1.ckpt"
            counters = {"epoch_num": steps, "step_num": steps, "global_batch_size": 8}
            arrays = {"w": W + rank, "adam_m.w": W, **{name: np.array(value) for name, value in counters.items()}}
            kept = dict(list(arrays.items())[:n_kept]) if (rank, steps) == (1, 10) else arrays
            file.write_bytes(ckpt_files.dump(kept, crc=crc and kept is arrays))
            meta = {"last_epoch": 10, "last_step": 1, "last_ckpt_file": f"x_rank_{rank}-10_1.ckpt"}
            (file.parent / "meta.json").write_text(json.dumps(meta))
    whole = "x_rank_0-5_1.ckpt"
    for rank in range(3):
        loaded = reshard.load(root, rank=rank)
        assert Path(str(loaded.decision.path)).name == whole
        assert any(told in verdict.reason for verdict in loaded.decision.verdicts)
    with reshard.open(root) as opened:
        assert opened.iteration == 5
        assert [name for name, reason in opened.skipped if told in reason] == ["x_rank_0-10_1.ckpt"]
        assert_same(opened.stored(1), reshard.load(root, rank=1).state)
    report = reshard.verify(root)
    assert [any(told in fault.message for fault in one.faults) for one in report.checkpoints] == [True, False]
    for command in ("explain", "inspect"):
        shown = " ".join(run(command, root).output.split())
        assert " ".join(told.split()[:4]) in shown, shown


def test_a_ckpt_that_lacks_what_its_stage_holds(tmp_path: Path) -> None:
    """Without counters the strategy tells it; where each part is kept once, nothing is missing."""
    cut = write_strategy(tmp_path / "cut", {"w": ITEM, "v": ITEM})
    root = tmp_path / "tree"

    def write(*lacking: tuple[int, str]) -> None:
        for rank, rows in enumerate(SLICES):
            (root / f"rank_{rank}").mkdir(parents=True, exist_ok=True)
            arrays = {key: rows for key in ("w", "v") if (rank, key) not in lacking}
            (root / f"rank_{rank}" / "net.ckpt").write_bytes(ckpt_files.dump(arrays))

    write((2, "v"))
    with pytest.raises(DamagedFileError, match=r"rank_2/net.ckpt`: `v`: missing, but other ranks of stage 0 hold it"):
        reshard.open(root, strategy=cut)
    write((2, "v"), (0, "w"), (3, "v"), (1, "w"))
    with reshard.open(root, strategy=cut) as opened:
        assert_same(opened.load(), {"w": W, "v": W})


def test_ranks_gathered_by_links(tree: Path, tmp_path: Path) -> None:
    """A rank's folder that is a link counts: without it a part would be taken for the whole."""
    for rank in (1, 2, 3):
        (tree / f"rank_{rank}").rename(tmp_path / f"host_{rank}")
        (tree / f"rank_{rank}").symlink_to(tmp_path / f"host_{rank}")
    with reshard.open(tree, strategy=tmp_path / "cut") as opened:
        assert_same(opened.load(keys=["w"]), {"w": W})
    with reshard.open(tree) as opened:
        assert opened.ranks() == [0, 1, 2, 3]
        with pytest.raises(LayoutError):
            opened.read("w")
    assert_same(reshard.load(tree, rank=3).state, {"w": SLICES[3], "step_num": np.array(7)})
    with reshard.open(tree / "rank_2") as opened:
        assert opened.ranks() == [2]
    (tmp_path / "host_3" / "net.safetensors").unlink()
    (tmp_path / "host_3").rmdir()
    for reader in (reshard.open, reshard.load, root_of):
        with pytest.raises(DamagedFileError, match="rank_3` is a link that does not lead to a folder"):
            reader(tree)


# -- names that begin with a number, as in a merged strategy


def test_a_stage_whose_names_all_begin_with_its_number(tmp_path: Path) -> None:
    reshard.save_file({"1-2": W}, tmp_path / "w.safetensors")
    layout = {
        "mesh": {"pp": 2, "tp": 2},
        "rules": [{"match": "*", "cut": ["tp"]}],
        "place": [{"match": "1-2", "axis": "pp", "at": 1}],
    }
    reshard.convert(tmp_path / "w.safetensors", tmp_path / "tree", to="checkpoint1", layout=layout)
    with reshard.open(tmp_path / "tree") as opened:
        assert_same(opened.load(), {"1-2": W})


@pytest.mark.parametrize(
    ("name", "key", "stored"),
    [("cut.json", "0-w", "0-w"), ("ckpt_strategy_rank_0.json", "0-w", "w")],
    ids=["taken for merged", "taken for a stage's own"],
)
def test_a_strategy_that_may_be_merged_or_not_is_refused_by_the_tensors(
    name: str, key: str, stored: str, tmp_path: Path
) -> None:
    cut = write_strategy(tmp_path / "cut", {key: ITEM}) / "strategy_stage_0.json"
    cut = cut.rename(tmp_path / name)
    root = write_ranks(tmp_path / "tree", [{stored: rows} for rows in SLICES])
    with pytest.raises(MismatchError, match=f"does not list `{stored}`, but .*: is it merged or not"):
        reshard.open(root, strategy=cut)
    reshard.save_file({stored: W}, tmp_path / "w.safetensors")
    with (
        reshard.open(tmp_path / "w.safetensors") as opened,
        pytest.raises(MismatchError, match="is it merged or not"),
    ):
        opened.load(reshard.ModelLayout.from_strategy(cut), rank=1)


def test_the_sums_of_ckpt_files_are_proven(tree: Path) -> None:
    as_ckpt(tree, crc=True)
    report = reshard.verify(tree, strategy=tree.parent / "cut")
    assert report.ok
    assert (report.checkpoints[0].verified, report.checkpoints[0].n_files) == (True, 4)
    last = tree / "rank_3" / "net.ckpt"
    data = bytearray(last.read_bytes())
    data[data.index(SLICES[3].tobytes()) + 4] ^= 1
    last.write_bytes(data)
    report = reshard.verify(tree, strategy=tree.parent / "cut")
    assert [fault.file for fault in report.checkpoints[0].faults] == ["rank_3/net.ckpt"]
    with reshard.open(tree, strategy=tree.parent / "cut") as opened:
        with pytest.raises(DamagedFileError, match="have the CRC"):
            opened.load(verify="full")
        with pytest.raises(DamagedFileError, match="have the CRC"):
            opened.stored(3)
        assert_same(opened.stored(2), {"w": SLICES[2], "step_num": np.array(7)})


def test_the_original_in_ckpt_files() -> None:
    root = SAMPLES / "ckpt1_pb" / "output" / "checkpoint"
    with reshard.open(root) as opened:
        assert opened.iteration == 40
        assert [file.name for file in opened.files()] == [f"rank_{n}/old_rank_{n}-20_2.ckpt" for n in range(4)]
        for rank in range(4):
            with reshard.open(root / f"rank_{rank}" / f"old_rank_{rank}-20_2.ckpt") as alone:
                assert_same(opened.stored(rank), alone.load())


# -- any strategy


@st.composite
def models(draw: st.DrawFn) -> tuple[dict[str, Item], int]:
    """Parameters that are cut in any way over stages of one size, and the number of stages."""
    n_stages = draw(st.integers(1, 2))
    factors = draw(st.sampled_from([(2, 2), (4,), (2, 3), (2, 2, 2), (1, 4), (2, 1, 3)]))
    items = {}
    for n in range(draw(st.integers(1, 3))):
        n_dims = draw(st.integers(1, 3))
        axes = draw(st.permutations([*range(len(factors)), *[-1] * n_dims]))[:n_dims]
        parts = [1 if v < 0 else factors[-1 - v] for v in axes]
        used = {len(factors) - 1 - v for v in axes if v >= 0}
        free = [size for axis, size in enumerate(factors) if axis not in used and size > 1]
        # One free axis: what the original and the rule agree on.
        shard = draw(st.sampled_from([0, -1])) if len(free) == 1 else 0
        unit = [draw(st.integers(1, 2)) for _ in parts]
        unit[0] *= math.prod(free) if shard else 1
        shape = tuple(a * b for a, b in zip(parts, unit, strict=True))
        items[f"p{n}"] = Item(shape, factors, tuple(axes), shard, draw(st.integers(0, n_stages - 1)))
    for stage in range(n_stages):
        items[f"norm{stage}"] = Item((2,), factors, (-1,), 0, stage)
    return items, n_stages


@given(models(), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_any_strategy_gives_the_whole_tensors(model: tuple[dict[str, Item], int], random: Any) -> None:
    """Cut by the plain formula, some of the copies lost, and put together again."""
    items, n_stages = model
    whole = {
        key: np.arange(math.prod(item.shape), dtype=np.int32).reshape(item.shape) + 1000 * n
        for n, (key, item) in enumerate(items.items())
    }
    n = math.prod(next(iter(items.values())).dev_matrix)
    ranks: list[Arrays] = [{} for _ in range(n * n_stages)]
    for key, item in items.items():
        seen: dict[bytes, list[int]] = {}
        for position, part in enumerate(item.slices(whole[key])):
            ranks[item.stage * n + position][key] = part
            seen.setdefault(part.tobytes(), []).append(item.stage * n + position)
        for holders in seen.values():
            for rank in random.sample(holders, random.randrange(len(holders))):
                del ranks[rank][key]
    with tempfile.TemporaryDirectory() as folder:
        cut = write_strategy(Path(folder) / "cut", items, n_stages)
        root = write_ranks(Path(folder) / "tree", ranks)
        with reshard.open(root, strategy=cut) as opened:
            assert_same(opened.load(), whole)
            for rank, arrays in enumerate(ranks):
                assert_same(opened.stored(rank), arrays)


# -- what is made of them


def run(*args: object) -> Any:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def test_conversions_of_rank_folders(tmp_path: Path) -> None:
    truth = original_reader.read_shard_file(SRC / "expected_full.safetensors")
    source, strategy = SRC / "src_rank_slices_dedup", SRC / "src_strategy"
    reshard.convert(source, tmp_path / "hf", strategy=strategy)
    model = {key: array for key, array in truth.items() if not key.startswith("adam_m.")}
    assert_same(reshard.load_file(tmp_path / "hf"), model)
    layout = {"mesh": {"tp": 1}, "rules": [{"match": "*"}]}
    reshard.convert(source, tmp_path / "root", strategy=strategy, layout=layout)
    with reshard.open(tmp_path / "root") as opened:
        assert opened.iteration == 40
        assert_same(opened.load(keys=truth), truth)
    with pytest.raises(LayoutError, match="pass `strategy=`"):
        reshard.convert(source, tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_comparisons_of_rank_folders() -> None:
    plain, dedup, strategy = SRC / "src_rank_slices", SRC / "src_rank_slices_dedup", SRC / "src_strategy"
    report = reshard.diff(plain, dedup, strategy_a=strategy, strategy_b=SRC / "src_strategy_json")
    assert report.equal
    assert report.n_equal == 15
    told = run("diff", plain, SRC / "expected_full.safetensors", "--strategy-a", strategy, "--json")
    differences = json.loads(told.stdout)["differences"]
    assert {one["key"] for one in differences} == COUNTERS
    assert run("diff", plain, dedup, "--strategy-a", strategy).exit_code == 2


def test_the_page_of_rank_folders() -> None:
    tree, strategy = SRC / "src_rank_slices", SRC / "src_strategy"
    told = json.loads(run("inspect", tree, "--strategy", strategy, "--json").stdout)
    assert (told["format"], told["iteration"], told["verified"]) == ("checkpoint1", 40, False)
    assert [(one["taken"], one["complete"]) for one in told["rank_saves"]] == [(True, True)]
    assert told["mesh"] == {"pp": 2, "axis0": 2, "axis1": 2}
    assert told["tensors"]["embed.weight"]["shape"] == [16, 6]
    page = run("inspect", tree, "--strategy", strategy).stdout
    for text in ("ranks      8, each with its own file", "2 stages of 4 ranks", "1.31 times", "step_num 40"):
        assert text in page
    assert "rank_5/demo_rank_5-20_2" in run("inspect", tree, "l1.exp.weight", "--strategy", strategy).stdout
    bare = run("inspect", CKPT1 / "output_second_run" / "checkpoint")
    assert bare.exit_code == 0
    assert "use --strategy" in bare.stdout
    assert "1-25_2.safetensors  complete, unverified (selected): named by every meta.json" in bare.stdout
    assert run("inspect", tree, "embed.weight").exit_code == 0
    bare = json.loads(run("inspect", tree, "--json").stdout)
    for key, part, placed in (
        ("embed.weight", "model", False),
        ("adam_m.head.weight", "optimizer", False),
        ("step_num", "optimizer", True),
    ):
        assert (bare["tensors"][key]["part"], bare["tensors"][key]["placed"]) == (part, placed)
    assert bare["mesh"] is None


def test_rank_folders_are_verified_save_by_save(tree: Path) -> None:
    told = run("verify", CKPT1 / "output_second_run" / "checkpoint")
    assert told.exit_code == 0
    assert told.stdout.count("unverified: no manifest, the structure is valid") == 4
    holding(3, w=SLICES[3][1:])(tree)
    assert run("verify", tree).exit_code == 0  # nothing tells that anything is wrong
    told = run("verify", tree, "--strategy", tree.parent / "cut", "--json")
    assert told.exit_code == 1
    assert json.loads(told.stdout)["checkpoints"][0]["faults"][0]["tensors"] == ["w"]
