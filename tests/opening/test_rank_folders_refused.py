"""Rank folders that are no checkpoint, in whole or in part, and what of them can still be read."""

from __future__ import annotations

import json
import logging
import os
import shutil
import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.helpers import ckpt_files
from tests.helpers.arrays import Arrays, assert_same
from tests.helpers.command_line import run
from tests.opening.rank_trees import ITEM, SLICES, Change, Item, W, holding, tree, write_ranks, write_strategy

import reshard
from reshard.errors import (
    CheckpointNotFoundError,
    DamagedFileError,
    LayoutError,
    MismatchError,
    ReshardError,
)
from reshard.formats.checkpoint1 import replicas
from reshard.opening import root_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["tree"]


def without(rank: int) -> Change:
    return lambda tree: shutil.rmtree(tree / f"rank_{rank}")


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
