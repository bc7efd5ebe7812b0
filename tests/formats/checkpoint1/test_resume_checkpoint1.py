"""Checkpoint 1.0: the save that a restart uses, compared with the save that MindSpore Transformers uses.

The trees were written by MindSpore Transformers. Its answers for damaged trees were recorded on copies with the same
damage.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.formats.checkpoint1.copies import RANKS, age, copy, file, load, put, truncate
from tests.helpers.threads import in_threads

import reshard
from reshard.config import Config
from reshard.errors import (
    CheckpointNotFoundError,
    DamagedFileError,
    ReshardError,
    StorageError,
    UnsupportedError,
)
from reshard.formats.checkpoint1.candidates import RankFolder, name_of_rank, order_saves
from reshard.formats.checkpoint1.names import Meta, parse_file_name, read_meta, write_meta
from reshard.opening.gather import gather
from reshard.resume import ResumeDecision, RunFacts, decide
from reshard.storage.location import locate

if TYPE_CHECKING:
    from collections.abc import Callable


SAMPLES = Path(__file__).parents[2] / "data" / "mindspore"
PREFIX = {"ckpt1": "llama2_7b", "ckpt1_pb": "old"}
EXTENSION = {"ckpt1": "safetensors", "ckpt1_pb": "ckpt"}


def resume(root: Path | str, **what: Any) -> ResumeDecision:
    config = Config(str(root), resume=True, **what)
    return decide(config, gather(config))


def taken(root: Path | str, **what: Any) -> str:
    """The save which is used, by the end of its name."""
    parsed = parse_file_name(Path(str(resume(root, **what).path)).name)
    assert parsed is not None
    return parsed.suffix


# -- the answers of the original


DAMAGE: dict[str, Callable[[Path, str], None]] = {
    "intact tree": lambda root, _: None,
    "last file of rank_3 removed": lambda root, _: file(root, 3, "-20_2").unlink(),
    "last file of rank_1 truncated to half its bytes": lambda root, _: truncate(file(root, 1, "-20_2")),
    "meta.json of rank_3 removed": lambda root, _: (root / "rank_3" / "meta.json").unlink(),
    "meta.json of every rank removed": lambda root, _: without_meta(root),
    "meta.json of every rank removed and last file of rank_1 removed": lambda root, _: without_meta(root, 1),
    "meta.json of rank_1 names the previous save": lambda root, sample: write_meta(
        locate(root / "rank_1"), Meta(15, 2, f"{PREFIX[sample]}_rank_1-15_2.{EXTENSION[sample]}")
    ),
    "meta.json of rank_1 is not JSON": lambda root, _: put(root / "rank_1" / "meta.json", "{"),
    "meta.json of rank_1 has a string epoch": lambda root, _: put(
        root / "rank_1" / "meta.json",
        (root / "rank_1" / "meta.json").read_text().replace('"last_epoch": 20', '"last_epoch": "20"'),
    ),
    "last file removed on rank_1, previous removed on rank_2": lambda root, _: remove(
        file(root, 1, "-20_2"), file(root, 2, "-15_2")
    ),
    "every file of rank_1 removed": lambda root, _: remove(*(root / "rank_1").glob("*.[sc]*")),
    "second-run tree, intact": lambda root, _: None,
    "second-run tree, every second-run file of rank_2 removed": lambda root, _: file(root, 2, "_1-25_2").unlink(),
}

# Where the original is wrong: what it would have to answer, and what it does.
BETTER = {
    "last file of rank_1 truncated to half its bytes": ("15_2", "takes a file that is cut in half"),
    "meta.json of every rank removed": ("20_2", "fails for safetensors"),
    "meta.json of every rank removed and last file of rank_1 removed": ("15_2", "fails"),
    "second-run tree, every second-run file of rank_2 removed": ("20_2", "fails, whatever the first run saved"),
}


def remove(*paths: Path) -> None:
    for path in paths:
        path.unlink()


def without_meta(root: Path, *without_the_last: int) -> None:
    remove(*(root / f"rank_{rank}" / "meta.json" for rank in RANKS))
    remove(*(file(root, rank, "-20_2") for rank in without_the_last))


def answers(sample: str) -> list[Any]:
    scenarios = json.loads((SAMPLES / sample / "resume_decisions.json").read_text())["scenarios"]
    return [
        pytest.param(sample, one["scenario"], one["result_per_rank"], id=f"{sample}: {one['scenario']}")
        for one in scenarios
    ]


@pytest.mark.parametrize(("sample", "scenario", "answer"), [*answers("ckpt1"), *answers("ckpt1_pb")])
def test_the_originals_answers(sample: str, scenario: str, answer: dict[str, str | bool], tmp_path: Path) -> None:
    root = copy(sample, tmp_path, "output_second_run" if scenario.startswith("second-run") else "output")
    DAMAGE[scenario](root, sample)
    if scenario in BETTER:
        better = taken(root)
        assert better == BETTER[scenario][0]
        if answer["rank_0"] is True:  # each rank its newest file
            assert better == "20_2"
        return
    if "Error" in str(answer["rank_0"]):
        with pytest.raises(ReshardError):
            resume(root)
        return
    save = Path(str(resume(root).path)).name
    assert {f"rank_{rank}": name_of_rank(save, rank) for rank in RANKS} == answer


@pytest.mark.parametrize("sample", ["ckpt1", "ckpt1_pb"])
def test_every_rank_loads_its_own_file_of_the_save_that_all_have_whole(sample: str, tmp_path: Path) -> None:
    root = copy(sample, tmp_path)
    truncate(file(root, 2, "-20_2"))
    for rank, got in enumerate(in_threads(4, lambda group: load(root, group))):
        assert isinstance(got, reshard.Loaded)
        assert (got.iteration, got.decision.initial_step, got.decision.initial_epoch) == (30, 30, 15)
        assert got.common is not None
        assert got.common.loss_scale == 65536.0
        # Both samples hold the same numbers under the same names.
        expected = load_file(file(copy("ckpt1", tmp_path / f"of_{rank}"), rank, "-15_2"))
        if sample == "ckpt1":
            assert got.state.keys() == expected.keys()
            for key, array in expected.items():
                np.testing.assert_array_equal(got.state[key], array, strict=True)
        else:
            assert got.state.keys() == expected.keys()


# -- the order, by itself


def folder(*names: str, meta: str | None = None, fault: str | None = None) -> RankFolder:
    """A rank's folder: files in the order of their times, and what its meta.json names."""
    parsed = None if meta is None else parse_file_name(meta)
    return RankFolder(
        tuple((name, time) for time, name in enumerate(names)),
        None if parsed is None else Meta(parsed.epoch, parsed.step, parsed.name),
        fault,
    )


def two(
    *suffixes: str, meta: tuple[str | None, str | None] = (None, None), lack: str | None = None
) -> dict[int, RankFolder]:
    """Two ranks' folders with the same saves, but for one that the second lacks."""
    names = [[f"m_rank_{rank}{suffix}.ckpt" for suffix in suffixes if rank == 0 or suffix != lack] for rank in (0, 1)]
    metas = [None if one is None else f"m_rank_{rank}{one}.ckpt" for rank, one in enumerate(meta)]
    return {rank: folder(*names[rank], meta=metas[rank]) for rank in (0, 1)}


ORDERS: list[tuple[str, dict[int, RankFolder], dict[str, Any], list[str], list[str]]] = [
    # what, folders, options, candidates without a fault, those refused
    ("nothing there", {}, {}, [], []),
    ("empty folders", {0: folder(), 1: folder()}, {}, [], []),
    ("what all name, then before", two("-1_2", "-2_2", "-3_2", meta=("-3_2",) * 2), {}, ["-3_2", "-2_2", "-1_2"], []),
    ("the oldest that one names", two("-1_2", "-2_2", "-3_2", meta=("-3_2", "-2_2")), {}, ["-2_2", "-1_2"], ["-3_2"]),
    ("one names nothing", two("-1_2", "-2_2", "-3_2", meta=(None, "-2_2")), {}, ["-2_2", "-1_2"], ["-3_2"]),
    ("what one names is gone everywhere", two("-1_2", "-3_2", meta=("-2_2", "-3_2")), {}, ["-1_2"], ["-3_2"]),
    ("steps within an epoch count, as numbers", two("-2_9", "-2_10", "-10_1", meta=("-10_1", "-10_1")), {},
        ["-10_1", "-2_10", "-2_9"], []),
    ("a rank lacks the newest", two("-1_2", "-2_2", meta=("-2_2", "-2_2"), lack="-2_2"), {}, ["-1_2"], []),
    ("an earlier run after the newest", two("-9_2", "_1-10_2", "_1-11_2", meta=("_1-11_2", "_1-11_2")), {},
        ["_1-11_2", "_1-10_2", "-9_2"], []),
    ("an earlier run, nothing of the newest is whole",
        two("-9_2", "_1-10_2", meta=("_1-10_2",) * 2, lack="_1-10_2"), {}, ["-9_2"], []),
    ("what an earlier run had beyond it was left behind", two("-9_2", "-20_2", "_1-10_2", meta=("_1-10_2",) * 2), {},
        ["_1-10_2", "-9_2"], ["-20_2"]),
    ("a later run that no rank had ended", two("-9_2", "_1-3_2", "_1-10_2", meta=("-9_2",) * 2), {},
        ["-9_2"], ["_1-10_2", "_1-3_2"]),
    ("no meta.json: by time", two("-3_2", "-1_2", "-2_2"), {}, ["-2_2", "-1_2", "-3_2"], []),
    ("no meta.json, and one lacks the newest", two("-1_2", "-2_2", "-3_2", lack="-3_2"), {}, ["-2_2", "-1_2"], []),
    ("by time, whatever is named", two("-3_2", "-1_2", "-2_2", meta=("-3_2",) * 2), {"by_time": True},
        ["-2_2", "-1_2", "-3_2"], []),
    ("by time, runs after each other", two("-9_2", "_1-5_2"), {}, ["_1-5_2", "-9_2"], []),
    ("by time, weights alone last", two("-1_2", "-network-2_2"), {}, ["-1_2", "-network-2_2"], []),
    ("named", two("-1_2", "-2_2", meta=("-2_2",) * 2), {"named": "m_rank_0-1_2.ckpt"}, ["-1_2"], ["-2_2"]),
    ("named after another rank", two("-1_2", "-2_2"), {"named": "m_rank_7-1_2.ckpt"}, ["-1_2"], ["-2_2"]),
    ("named without extension", two("-1_2", "-2_2"), {"named": "m_rank_0-1_2"}, ["-1_2"], ["-2_2"]),
    ("named, newer than meta.json", two("-1_2", "-2_2", meta=("-1_2",) * 2), {"named": "m_rank_0-2_2.ckpt"},
        ["-2_2"], ["-1_2"]),
    ("named and not there", two("-1_2"), {"named": "m_rank_0-5_2.ckpt"}, [], ["-1_2"]),
    ("named as a path", two("-1_2"), {"named": "../m_rank_0-1_2.ckpt"}, [], ["-1_2"]),
    ("of the other extension", two("-1_2", meta=("-1_2",) * 2), {"extension": "safetensors"}, [], ["-1_2"]),
    ("of this extension", two("-1_2", meta=("-1_2",) * 2), {"extension": "ckpt"}, ["-1_2"], []),
]  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "options", "candidates", "refused"), [o[1:] for o in ORDERS], ids=[o[0] for o in ORDERS]
)
def test_order(
    ranks: dict[int, RankFolder], options: dict[str, Any], candidates: list[str], refused: list[str]
) -> None:
    order = order_saves(ranks, **options)
    name = "m_rank_0{}.ckpt".format
    assert [save.name for save in order.candidates if save.fault is None] == [name(one) for one in candidates]
    assert sorted(save.name for save in order.refused) == sorted(name(one) for one in refused)
    assert order == order_saves(dict(reversed(ranks.items())), **options)


def test_order_of_files_that_are_named_otherwise() -> None:
    ranks = {rank: folder("net.safetensors") for rank in (0, 1)}
    assert [save.name for save in order_saves(ranks).candidates] == ["net.safetensors"]
    assert [save.name for save in order_saves(ranks, named="net").candidates] == ["net.safetensors"]


def test_order_of_both_formats_takes_the_converted_one() -> None:
    ranks = {0: RankFolder((("m_rank_0-1_2.ckpt", 5), ("m_rank_0-1_2.safetensors", 5)))}
    assert [save.name for save in order_saves(ranks).candidates] == ["m_rank_0-1_2.safetensors", "m_rank_0-1_2.ckpt"]


def test_order_of_another_prefix_is_none_of_those_named() -> None:
    zero = folder("m_rank_0-1_2.ckpt", "other_rank_0-1_1.ckpt", meta="m_rank_0-1_2.ckpt")
    (refused,) = order_saves({0: zero}).refused
    assert refused.name == "other_rank_0-1_1.ckpt"
    assert "not one of the saves `m`" in refused.reason


@pytest.mark.parametrize(
    ("ranks", "warning"),
    [
        (
            {0: folder("m_rank_1-1_2.ckpt")},
            "in the folder of another rank are ignored: `rank_0/m_rank_1-1_2.ckpt`",
        ),
        ({0: folder("m_rank_0-1_2.ckpt", meta="m_rank_1-1_2.ckpt")}, "names a file of rank 1"),
        ({0: folder(fault="it is not valid JSON")}, "meta.json of rank_0 is skipped: it is not valid JSON"),
        ({0: folder(), 3: folder()}, "there is no folder of ranks 1, 2"),
        ({10**17: folder()}, f"there is no folder of ranks 0, 1, 2, 3 and {10**17 - 4} more"),
        ({0: folder("m_rank_0-2_2.ckpt", "m_rank_0-1_2.ckpt")}, "the times of the files contradict their names"),
    ],
)
def test_warning(ranks: dict[int, RankFolder], warning: str) -> None:
    assert any(warning in one for one in order_saves(ranks).warnings)


def test_times_of_two_prefixes_do_not_contradict_names() -> None:
    order = order_saves({0: folder("b_rank_0-5_2.ckpt", "a_rank_0-1_2.ckpt")})
    assert [save.name[0] for save in order.candidates] == ["a", "b"]
    assert not any("contradict" in one for one in order.warnings)


# -- damage


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def link(path: Path) -> None:
    other = path.with_suffix(".moved")
    path.rename(other)
    path.symlink_to(other)


def replace_by(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def swap_for_another_save(path: Path) -> None:
    shutil.copy(file(path.parent.parent, 1, "-10_2"), path)


FAULTS: list[tuple[str, Callable[[Path], object]]] = [
    ("cut in half", truncate),
    ("its last byte is missing", lambda path: os.truncate(path, path.stat().st_size - 1)),
    ("empty", lambda path: os.truncate(path, 0)),
    ("all zero", zero),
    ("text", lambda path: path.write_text("no such file\n" * 50)),
    ("longer than it says", lambda path: path.write_bytes(path.read_bytes() + b"\0")),
    ("the content of another save", swap_for_another_save),
    ("a link", link),
    ("a folder", lambda path: replace_by(path, Path.mkdir)),
    ("a pipe", lambda path: replace_by(path, os.mkfifo)),
    ("gone", remove),
]


@pytest.mark.parametrize("sample", ["ckpt1", "ckpt1_pb"])
@pytest.mark.parametrize("harm", [one[1] for one in FAULTS], ids=[one[0] for one in FAULTS])
def test_damage_on_one_rank_rolls_back_all(harm: Callable[[Path], object], sample: str, tmp_path: Path) -> None:
    root = copy(sample, tmp_path)
    harm(file(root, 1, "-20_2"))
    decision = resume(root)
    assert str(decision.path).endswith(f"rank_0-15_2.{EXTENSION[sample]}")
    assert any("20_2" in warning and "rank 1" in warning for warning in decision.warnings)


def test_a_ckpt_that_ends_between_two_records(tmp_path: Path) -> None:
    """Its structure is whole; the counters, which come last, are missing."""
    root = copy("ckpt1_pb", tmp_path)
    path = file(root, 3, "-20_2")
    data, ends, at = path.read_bytes(), [0], 0
    while at < len(data):
        assert data[at] == 0x0A
        size, shift, at = 0, 0, at + 1
        while True:
            byte = data[at]
            size |= (byte & 0x7F) << shift
            shift, at = shift + 7, at + 1
            if byte < 0x80:
                break
        at += size
        ends.append(at)
    os.truncate(path, ends[4])
    decision = resume(root)
    assert str(decision.path).endswith("rank_0-15_2.ckpt")
    assert "truncated" in decision.verdicts[0].reason


def test_none_is_whole(tmp_path: Path) -> None:
    root = copy("ckpt1", tmp_path)
    for suffix in ("-10_2", "-15_2", "-20_2"):
        truncate(file(root, 2, suffix))
    with pytest.raises(DamagedFileError, match=r"(?s)20_2.*rank 2.*15_2.*rank 2.*10_2.*rank 2"):
        resume(root)
    config = Config(str(root), resume=True)
    assert decide(config, gather(config), allow_fresh=True).fresh


def test_what_is_nobodys_damage_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StorageError("too many open files", errno=24)

    monkeypatch.setattr("reshard.formats.checkpoint1.rank_saves.open_rank_files", fail)
    with pytest.raises(StorageError, match="too many"):
        resume(copy("ckpt1", tmp_path))


METAS: list[tuple[str, str]] = [
    ("[]", "expected an object"),
    ("{}", "`last_epoch` is not an integer"),
    ('{"last_epoch": true, "last_step": 2, "last_ckpt_file": "x_rank_0-1_2.ckpt"}', "`last_epoch` is not an integer"),
    ('{"last_epoch": 1.0, "last_step": 2, "last_ckpt_file": "x_rank_0-1_2.ckpt"}', "`last_epoch` is not an integer"),
    ('{"last_epoch": -1, "last_step": 2, "last_ckpt_file": "x_rank_0-1_2.ckpt"}', "`last_epoch` is not an integer"),
    ('{"last_epoch": 1, "last_step": "2", "last_ckpt_file": "x_rank_0-1_2.ckpt"}', "`last_step` is not an integer"),
    ('{"last_epoch": 1, "last_step": 2, "last_ckpt_file": null}', "is not the name of a rank's file"),
    ('{"last_epoch": 1, "last_step": 2, "last_ckpt_file": "../x_rank_0-1_2.ckpt"}', "is not the name of a rank's file"),
    ('{"last_epoch": 1, "last_step": 2, "last_ckpt_file": "x_rank_0-01_2.ckpt"}', "is not the name of a rank's file"),
    ('{"last_epoch": 1, "last_step": 2, "last_ckpt_file": "x_rank_0-1_2.pt"}', "is not the name of a rank's file"),
    ('{"last_epoch": 1, "last_step": 2, "last_ckpt_file": "x_rank_0-3_2.ckpt"}', "epoch and step are 1 and 2"),
    ('{"last_epoch": 1, "last_epoch": 2, "last_step": 2, "last_ckpt_file": "x_rank_0-1_2.ckpt"}', "is repeated"),
    ("[" * 100 + "]" * 100, "nests deeper"),
    ('{"last_epoch": 99999999999999999999999}', "does not fit 64 bits"),
    ('{"last_epoch": NaN}', "is not a JSON number"),
    ("\ufeff{}", "byte order mark"),
    (" " * (1 << 16) + "{}", "larger than"),
    ("", "not valid JSON"),
]


@pytest.mark.parametrize(("text", "message"), METAS)
def test_hostile_meta(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text(text)
    with pytest.raises(DamagedFileError, match=message):
        read_meta(locate(tmp_path))
    root = copy("ckpt1", tmp_path)
    (root / "rank_2" / "meta.json").write_text(text)
    assert taken(root) == "20_2"  # the other ranks' count


def test_meta_is_written_as_the_original_writes_it(tmp_path: Path) -> None:
    sample = SAMPLES / "ckpt1" / "output" / "checkpoint" / "rank_1" / "meta.json"
    write_meta(locate(tmp_path), Meta(20, 2, "llama2_7b_rank_1-20_2.safetensors"))
    assert (tmp_path / "meta.json").read_bytes() == sample.read_bytes()


def test_a_link_is_no_meta(tmp_path: Path) -> None:
    root = copy("ckpt1", tmp_path)
    (root / "rank_1" / "meta.json").rename(tmp_path / "elsewhere")
    (root / "rank_1" / "meta.json").symlink_to(tmp_path / "elsewhere")
    decision = resume(root)
    assert any("meta.json of rank_1 is skipped: it is a symbolic link" in one for one in decision.warnings)


# -- the four cases, and the words around them


def test_a_file_is_that_file(tmp_path: Path) -> None:
    path = file(copy("ckpt1", tmp_path), 2, "-10_2")
    decision = resume(path)
    assert (decision.path, decision.initial_step) == (str(path), 20)
    got = reshard.load(path)
    np.testing.assert_array_equal(got.state["layers.0.w"], load_file(path)["layers.0.w"])
    named = resume(path, resume_file="llama2_7b_rank_0-20_2.safetensors")  # said twice: the file counts
    assert named.path == str(path)
    assert any("which is used" in warning for warning in named.warnings)


def test_a_ranks_file_means_that_save_where_several_ranks_load(tmp_path: Path) -> None:
    root = copy("ckpt1", tmp_path)
    for rank, got in enumerate(in_threads(4, lambda group: load(file(root, 0, "-10_2"), group))):
        np.testing.assert_array_equal(got.state["layers.0.w"], load_file(file(root, rank, "-10_2"))["layers.0.w"])


@pytest.mark.parametrize(
    "name",
    ["llama2_7b_rank_0-15_2.safetensors", "llama2_7b_rank_0-15_2", "llama2_7b_rank_3-15_2.safetensors"],
)
def test_a_folder_and_a_name(name: str, tmp_path: Path) -> None:
    config = {"load_checkpoint": str(copy("ckpt1", tmp_path)), "resume_training": name}
    for rank, got in enumerate(in_threads(4, lambda group: load(None, group, config=config))):
        assert got.iteration == 30
        expected = load_file(file(tmp_path / "checkpoint", rank, "-15_2"))
        np.testing.assert_array_equal(got.state["layers.0.w"], expected["layers.0.w"])


@pytest.mark.parametrize("name", ["llama2_7b_rank_0-99_2", "../rank_1/llama2_7b_rank_1-15_2", "rank_0", "/etc/passwd"])
def test_a_name_that_is_not_there_is_no_reason_to_take_another(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="is requested"):
        resume(copy("ckpt1", tmp_path), resume_file=name)


def test_a_named_save_that_is_damaged_is_an_error(tmp_path: Path) -> None:
    root = copy("ckpt1", tmp_path)
    truncate(file(root, 3, "-20_2"))
    with pytest.raises(DamagedFileError, match="rank 3"):
        resume(root, resume_file="llama2_7b_rank_0-20_2")


def test_a_name_in_a_2_0_root_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="as for Checkpoint"):
        resume(SAMPLES / "ckpt2" / "checkpoint", resume_file="x_rank_0-1_2")


def test_full_weights_with_their_counters(tmp_path: Path) -> None:
    decision = resume(SAMPLES / "full_ms")
    hyper = load_file(SAMPLES / "full_ms" / "hyper_param.safetensors")
    assert decision.initial_step == int(hyper["step_num"])
    assert decision.path == str(SAMPLES / "full_ms")
    # They count also where rank folders lie beside them.
    shutil.copytree(SAMPLES / "full_ms", tmp_path / "both")
    shutil.copytree(copy("ckpt1", tmp_path) / "rank_0", tmp_path / "both" / "rank_0")
    assert resume(tmp_path / "both").path == str(tmp_path / "both")


def test_by_timestamp(tmp_path: Path) -> None:
    root = copy("ckpt1", tmp_path)
    for rank in RANKS:
        age(file(root, rank, "-10_2"), 1000)
    assert taken(root) == "20_2"
    assert taken(root, by_timestamp=True) == "10_2"
    truncate(file(root, 0, "-10_2"))
    assert taken(root, by_timestamp=True) == "20_2"  # never each rank its own


def test_only_files_of_the_format_that_is_asked_for(tmp_path: Path) -> None:
    root = copy("ckpt1", tmp_path)
    assert taken(root, load_format="safetensors") == "20_2"
    with pytest.raises(CheckpointNotFoundError, match="load_ckpt_format"):
        resume(root, load_format="ckpt")


def test_weights_alone(tmp_path: Path) -> None:
    root = copy("ckpt1", tmp_path)
    got = reshard.load(config={"load_checkpoint": str(root)}, rank=1)
    assert got.decision.restored == ("weights",)
    assert set(got.state) == {"embed.weight", "layers.0.w"}
    network = SAMPLES / "ckpt1" / "output" / "checkpoint_network"
    got = reshard.load(config={"load_checkpoint": str(network)}, rank=1)
    assert str(got.decision.path).endswith("llama2_7b_rank_0-network-20_2.safetensors")
    assert set(got.state) == {"embed.weight", "layers.0.w"}


def test_an_iteration_is_the_save_that_made_so_many_steps(tmp_path: Path) -> None:
    root = copy("ckpt1", tmp_path)
    assert str(reshard.load(root, rank=0, iteration=20).decision.path).endswith("-10_2.safetensors")
    with pytest.raises(CheckpointNotFoundError, match="iteration 25 is requested"):
        reshard.load(root, rank=0, iteration=25)


# -- counters


def test_compatible_counters_are_the_originals_float32(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint" / "rank_0" / "m_rank_0-1_2.safetensors"
    path.parent.mkdir(parents=True)
    rows = json.loads((SAMPLES / "resume_math" / "resume_context_table.json").read_text())
    assert any(row["initial_step"] != row["exact_integer_step"] for row in rows)
    for row in rows:
        scalars = {
            "step_num": np.array(row["saved_step_num"]),
            "epoch_num": np.array(row["saved_epoch_num"]),
            "global_batch_size": np.array(row["saved_global_batch_size"]),
        }
        save_file({**scalars, "w": np.zeros(2)}, path)
        run = RunFacts(global_batch_size=row["new_global_batch_size"], steps_per_epoch=row["new_dataset_size_steps"])
        config = Config(str(path.parent.parent), resume=True, sink_mode=row["sink_mode"])
        facts = gather(config, run)
        assert decide(config, facts).initial_step == row["exact_integer_step"]
        decision = decide(config, facts, compatible=True)
        assert (decision.initial_step, decision.initial_epoch) == (row["initial_step"], row["initial_epoch"])


def test_no_counters(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint" / "rank_0" / "m_rank_0-1_2.safetensors"
    path.parent.mkdir(parents=True)
    save_file({"w": np.zeros(2)}, path)
    with pytest.raises(UnsupportedError, match="its counters are missing"):
        resume(tmp_path / "checkpoint")
    assert reshard.load(config={"load_checkpoint": str(tmp_path / "checkpoint")}).state["w"].shape == (2,)
    save_file({"w": np.zeros(2), "step_num": np.zeros((100, 100), np.int64)}, path)
    with pytest.raises(DamagedFileError, match=r"`step_num` has shape \(100, 100\)"):
        resume(tmp_path / "checkpoint")


# -- health


def healthy(root: Path, **status: int) -> None:
    """What the monitor records: 0 is healthy."""
    records = [
        {"is_health": value, "ckpt_name": f"llama2_7b_rank_0-{name.removeprefix('at_')}.safetensors"}
        for name, value in status.items()
    ]
    (root.parent / "health_ckpts.json").write_text(json.dumps(records, indent=4))


def test_only_healthy_ones(tmp_path: Path) -> None:
    root = copy("ckpt1", tmp_path)
    healthy(root, at_10_2=0, at_15_2=0, at_20_2=1)
    assert taken(root) == "20_2"  # nobody asks
    assert taken(root, healthy_only=True) == "15_2"
    assert taken(root, healthy_only=True, resume_file="llama2_7b_rank_0-20_2") == "20_2"  # a name goes before
    healthy(root, at_10_2=0)
    assert taken(root, healthy_only=True) == "10_2"  # what was not recorded is not known to be healthy
    healthy(root, at_10_2=1, at_15_2=1, at_20_2=1)
    with pytest.raises(UnsupportedError, match="it was saved as unhealthy"):
        resume(root, healthy_only=True)


@pytest.mark.parametrize("text", ["{", "{}", "[1, null]", '[{"ckpt_name": 5}]'])
def test_hostile_health_file(text: str, tmp_path: Path) -> None:
    root = copy("ckpt1", tmp_path)
    (root.parent / "health_ckpts.json").write_text(text)
    with pytest.raises(UnsupportedError, match="its health was not recorded"):
        resume(root, healthy_only=True)
