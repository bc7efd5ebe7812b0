"""Rank folders opened as one checkpoint: whole tensors with a strategy, local arrays without one.

The samples are real trees with their whole tensors. Other trees are sharded here by the formula of the format.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tests.helpers import ckpt_files, original_reader
from tests.helpers.arrays import Arrays, assert_same
from tests.helpers.command_line import run
from tests.opening.rank_trees import ITEM, SLICES, Item, W, holding, tree, write_ranks, write_strategy

import reshard
from reshard.errors import (
    DamagedFileError,
    KeyNotFoundError,
    LayoutError,
    MismatchError,
)
from reshard.opening import root_of

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["tree"]

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


@pytest.mark.slow(disk=False)
@given(models(), st.randoms(use_true_random=False))
@settings(max_examples=60)
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
