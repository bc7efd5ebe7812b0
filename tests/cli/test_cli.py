"""The command line: what it prints, where, and with which exit code; as processes wherever that could matter."""

from __future__ import annotations

import errno
import inspect
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import safetensors.numpy
from rich.cells import cell_len
from rich.console import Console
from tests.helpers import sealed
from tests.helpers.command_line import PROGRAM, all_commands, on_terminal, outcome, run, start
from tests.helpers.unprivileged import closed, nobody, reachable, readable

import reshard
from reshard.cli import main
from reshard.cli.inspect import _folded
from reshard.cli.output import common_key, fitted, plain_table, rate, shown, size
from reshard.cli.picture import _short_names
from reshard.layout import merge_strategies, write_strategy
from reshard.verbs import demo as demo_module

__all__ = ["reachable"]

SAMPLES = Path(__file__).parents[1] / "data" / "mindspore"
CKPT2 = SAMPLES / "ckpt2" / "checkpoint"
LAYOUT = """
mesh: {tp: 2}
rules:
  - {match: "*.weight", cut: [tp]}
  - match: "*"
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small model in one file, written by the stock package."""
    rng = np.random.default_rng(1)
    arrays = {f"model.layers.{i}.w.weight": rng.random((8, 6), np.float32) for i in range(30)}
    safetensors.numpy.save_file({**arrays, "model.norm": np.ones(4, np.float16)}, tmp_path / "m.safetensors")
    (tmp_path / "tp2.yaml").write_text(LAYOUT)
    return tmp_path / "m.safetensors"


# -- inspect


def test_inspect_shows_a_root() -> None:
    result = run("inspect", CKPT2)
    assert result.exit_code == 0
    # Facts of the sample: README of the samples, and its metadata.json.
    for text in (
        "iteration_00000010  complete, unverified (selected, tracker)",
        "iteration_00000005  complete, unverified\n",
        "checkpoint2, iteration 10",
        "global_step 10",
        "model      10 tensors",
        "1 BF16",
        "optimizer  8 tensors",
        "(8 ranks)",
        "files      16,",
        "replicas   7.34 KiB stored for 4.79 KiB of tensors",
    ):
        assert text in result.stdout
    row = next(line for line in result.stdout.splitlines() if line.startswith("decoder.layers.0.mlp.linear_fc1"))
    assert row.split()[-4:] == ["4", "1", "384", "B"]
    assert "dim 0 over b x a: 4" in row
    assert result.stderr == ""


def test_inspect_draws_the_largest_modules(model: Path) -> None:
    lines = run("inspect", model).stdout.splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("largest modules"))
    assert lines[first + 1].split() == ["model.layers.{0-29}.w", "30", "5.63", "KiB", "100", "%", "█" * 20]
    assert lines[first + 2].split() == ["model", "1", "8", "B", "0", "%"]


def test_inspect_of_each_format() -> None:
    for tree, expected in {
        "full_hf": "huggingface: ",
        "ckpt2_named/checkpoint": "mesh       dp 2, tp 2 (4 ranks)",
        "ckpt2_single/checkpoint": "mesh       none, full tensors",
        "ckpt2_dedup/checkpoint": "replicas   none",
        "ckpt2/checkpoint/iteration_00000005": "checkpoint2, iteration 5",
        "full_hf/model-00001-of-00002.safetensors": "safetensors: ",
    }.items():
        result = run("inspect", SAMPLES / tree)
        assert (result.exit_code, expected in result.stdout) == (0, True), (tree, result.output)
    assert "root:" not in run("inspect", CKPT2 / "iteration_00000005").stdout


def test_inspect_of_several_paths_lists_them(tmp_path: Path) -> None:
    for name, value in (("good", 1.0), ("bad", np.nan)):
        for iteration in (1, 2):
            reshard.save(tmp_path / name, iteration, {"w": np.full(4, value)}, commit={"durable": False})
    next((tmp_path / "good" / "iteration_00000002").glob("*.safetensors")).unlink()
    (tmp_path / "empty").mkdir()
    reshard.save_file({"w": np.ones(2)}, tmp_path / "m.safetensors")
    paths = [tmp_path / name for name in ("bad", "empty", "good", "m.safetensors", "nothing")]
    code, out, err = outcome("inspect", *paths)
    assert (code, err) == (1, "")
    header, *lines = out.splitlines()
    assert header.split() == ["path", "format", "iteration", "of", "size", "state"]
    assert [line.split()[0] for line in lines] == list(map(str, paths))
    assert re.search(
        r"bad +checkpoint2 +2 +2 .* iteration 2 is unhealthy, as all since iteration 1: `w` holds", lines[0]
    )
    assert "empty  " in lines[1]
    assert "error: " in lines[1]
    assert re.search(r"good +checkpoint2 +1 +2 .* healthy; 1 newer save not complete$", lines[2])
    assert re.search(r"m.safetensors +\w+ .* complete$", lines[3])
    assert "error: " in lines[4]
    found = json.loads(outcome("inspect", *paths, "--json")[1])["checkpoints"]
    assert [one["healthy"] for one in found] == [False, None, True, None, None]
    assert [one["error"] is None for one in found] == [True, False, True, True, False]
    assert outcome("inspect", *paths[:1], paths[2])[0] == 0
    code, _, err = outcome("inspect", *paths, "--all")
    assert (code, "only --json can be combined" in err) == (2, True)


def test_inspect_names_the_damage_of_what_it_passes_over(tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"
    shutil.copytree(CKPT2, root)
    (root / "iteration_00000010" / "demo-model-0000003-0000008.safetensors").unlink()
    code, out, err = outcome("inspect", root)
    assert (code, err) == (0, "")
    assert re.search(r"iteration_00000010  damaged \(tracker\): .*demo-model-0000003-0000008", out)
    assert "iteration_00000005  complete, unverified (selected)" in out
    assert f"see what a restart does: reshard explain {root}" in out
    assert "checkpoint2, iteration 5" in out
    facts = json.loads(run("inspect", root, "--json").stdout)
    assert [(one["iteration"], one["complete"], one["taken"], one["tracker"]) for one in facts["iterations"]] == [
        (10, False, False, True),
        (5, True, True, False),
    ]
    (root / "latest_checkpointed_iteration.txt").write_text("5")
    (root / "iteration_00000010" / "metadata.json").write_text("{")
    out = run("inspect", root).stdout
    assert re.search(r"iteration_00000010  damaged: .*metadata\.json", out)
    assert "iteration_00000005  complete, unverified (selected, tracker)" in out


def test_inspect_of_two_folders_of_one_iteration_does_not_call_the_tracker_invalid(tmp_path: Path) -> None:
    reshard.save(tmp_path, 7, {"w": np.zeros(2)}, commit={"durable": False})
    shutil.copytree(tmp_path / "iteration_00000007", tmp_path / "iteration_0000000007")
    out = run("inspect", tmp_path).stdout
    assert "iteration_00000007  complete (selected, tracker)" in out
    assert re.search(r"^ +warning +`iteration_0000000007` is skipped", out, re.MULTILINE)
    assert json.loads(run("inspect", tmp_path, "--json").stdout)["tracker_reason"] is None
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("9")
    out = run("inspect", tmp_path).stdout
    assert re.search(
        r"^ +warning +the tracker is invalid: it names iteration 9, which has no folder$", out, re.MULTILINE
    )
    assert "the tracker is invalid" in json.loads(run("inspect", tmp_path, "--json").stdout)["tracker_reason"]


def test_inspect_does_not_call_an_unreadable_iteration_damaged(reachable: Path) -> None:
    for iteration in (1, 2, 3):
        reshard.save(reachable / "root", iteration, {"w": np.zeros(2)}, commit={"durable": False})
    readable(reachable / "root")
    closed(reachable / "root" / "iteration_00000001")
    closed(reachable / "root" / "iteration_00000002" / "common.json")
    with nobody():
        page = run("inspect", reachable / "root")
        facts = json.loads(run("inspect", reachable / "root", "--json").stdout)
    for name in ("iteration_00000001", "iteration_00000002/common.json"):
        assert re.search(rf"unreadable: .*{name}.*Permission denied", page.stdout), page.output
    assert "damaged" not in page.stdout
    assert [(one["iteration"], one["complete"]) for one in facts["iterations"]] == [(3, True), (2, None), (1, None)]


def test_inspect_of_a_root_without_a_whole_iteration(tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"
    shutil.copytree(CKPT2, root)
    for folder in root.glob("iteration_*"):
        (folder / "metadata.json").write_text("{")
    code, out, err = outcome("inspect", root)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert err.count("iteration_00000010: ") == err.count("iteration_00000005: ") == 1


def test_inspect_of_no_tensors_and_of_one(tmp_path: Path) -> None:
    for tensors, text in (({}, "there are no tensors"), ({"w": np.zeros(3)}, "1 tensor, 3 parameters")):
        safetensors.numpy.save_file(tensors, tmp_path / "m.safetensors")
        result = run("inspect", tmp_path / "m.safetensors")
        assert (result.exit_code, text in result.stdout) == (0, True), result.output


def test_inspect_of_a_save_without_tensors(tmp_path: Path) -> None:
    reshard.save(tmp_path / "run", 1, {})
    result = run("inspect", tmp_path / "run")
    assert (result.exit_code, "there are no tensors" in result.stdout) == (0, True), result.output
    assert re.search(r"^ +files +0, 0 B in all$", result.stdout, re.MULTILINE)


def test_inspect_of_a_root_whose_log_cannot_be_read(tmp_path: Path) -> None:
    reshard.save(tmp_path, 1, {"w": np.zeros(3)})
    (tmp_path / "saves.jsonl").rename(tmp_path / "moved.jsonl")
    (tmp_path / "saves.jsonl").symlink_to("moved.jsonl")
    result = run("inspect", tmp_path)
    assert (result.exit_code, "1 tensor, 3 parameters" in result.stdout) == (0, True), result.output
    assert "warning:" in result.stderr
    assert "saves.jsonl` is a symbolic link" in result.stderr
    watched = run("watch", tmp_path, "--once").output
    assert re.search(r"problem .*saves\.jsonl", watched)
    assert re.search(r"newest +iteration 1", watched), watched


def test_inspect_groups_long_lists_and_a_pattern_or_all_lists_them(model: Path) -> None:
    assert "model.layers.{0-29}.w.weight  30  F32    8 x 6  5.63 KiB" in run("inspect", model).stdout
    everything = run("inspect", model, "--all").stdout
    assert all(f"model.layers.{i}.w.weight" in everything for i in range(30))
    some = run("inspect", model, "model.layers.1?.*").stdout
    assert re.findall(r"layers\.(\d+)", some) == [str(i) for i in range(10, 20)]
    assert "files" not in some


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["a.0.w", "a.1.w", "a.2.w"], "a.{0-2}.w"),
        (["a.0.w", "a.2.w", "a.3.w"], "a.{0,2-3}.w"),
        (["a.0.e.5.w", "a.0.e.6.w", "a.1.e.5.w", "a.1.e.6.w"], "a.{0-1}.e.{5-6}.w"),
        (["a.7.w1"], "a.7.w1"),
        ([f"a.{i}" for i in range(0, 20, 2)], "a.{0,2,4,...,18}"),
    ],
)
def test_keys_that_differ_in_numbers(keys: list[str], expected: str) -> None:
    assert common_key(keys) == expected


def test_a_pattern_that_matches_nothing_or_is_none() -> None:
    result = run("inspect", CKPT2, "linear_fc1")
    assert result.exit_code == 1
    assert "hint: a pattern matches whole keys: try '*linear_fc1*'" in result.stderr
    assert run("inspect", CKPT2, "re:(").exit_code == 2


def test_a_single_tensor_is_drawn() -> None:
    # 4 x 6 x 4 in quarters over ranks 4 to 7: dim 0 over the first axis of the stage, dim 2 over the second.
    out = run("inspect", CKPT2, "adam_m*experts.weight1").stdout
    boxes = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    assert boxes == [["dim 0 \\ dim 2", "0:2", "2:4"], ["0:2", "4", "5"], ["2:4", "6", "7"]]
    assert "demo-opt-#-0000008.safetensors, # as listed below" in out
    out = run("inspect", CKPT2, "shared.scale").stdout
    assert "│ 0:4   │ 0, 1, 2, 3, 4, 5, 6, 7 │" in out
    assert "shards  1, each in 8 files" in out


def test_what_is_no_grid_is_listed(tmp_path: Path, model: Path) -> None:
    layout = {"mesh": {"dp": 5}, "rules": [{"match": "*", "flat": ["dp"]}]}
    (tmp_path / "flat.yaml").write_text(json.dumps(layout))
    assert run("convert", model, tmp_path / "flat", "--layout", tmp_path / "flat.yaml").exit_code == 0
    out = run("inspect", tmp_path / "flat", "model.layers.0.w.weight").stdout
    # 48 elements in 5 parts of 10: the first rank holds row 0 and 4 elements of row 1.
    assert "cut     flat over dp: 5" in out
    assert re.search(r"^\[0:1, 0:6\] +0$", out, re.MULTILINE)
    assert re.search(r"^\[1:2, 0:4\] +0$", out, re.MULTILINE)
    page = run("inspect", tmp_path / "flat").stdout
    assert "tiles.json  describes 31 of 31 tensors, marked *," in page
    assert "flat over dp: 5 *" in page


def test_inspect_layout_is_a_layout_file(tmp_path: Path, model: Path) -> None:
    assert run("convert", model, tmp_path / "a", "--layout", tmp_path / "tp2.yaml").exit_code == 0
    (tmp_path / "again.yaml").write_text(run("inspect", tmp_path / "a", "--layout").stdout)
    assert run("convert", model, tmp_path / "b", "--layout", tmp_path / "again.yaml").exit_code == 0
    for path in (tmp_path / "a" / "iteration_00000000").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "b" / "iteration_00000000" / path.name).read_bytes()


def test_inspect_json() -> None:
    facts = json.loads(run("inspect", CKPT2, "--json").stdout)
    assert facts["format"] == "checkpoint2"
    assert facts["common"]["global_step"] == 10
    assert facts["parts"]["model"]["dtypes"] == {"F32": 8, "BF16": 1, "F16": 1}
    assert len(facts["files"]) == 16
    assert len(facts["tensors"]) == 18
    assert facts["tensors"]["shared.scale"]["replicas"] == [8, 8]
    (one,) = json.loads(run("inspect", CKPT2, "shared.scale", "--json").stdout)["tensors"].values()
    assert one["shards"][0]["offset"] == [0]
    assert json.loads(run("inspect", CKPT2, "--layout", "--json").stdout)["mesh"] == {"pp": 2, "a": 2, "b": 2}


# -- convert


def test_convert_says_what_it_wrote(tmp_path: Path, model: Path) -> None:
    code, out, err = outcome("convert", model, tmp_path / "hf")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == f"wrote {tmp_path / 'hf'}"
    assert re.fullmatch(r"huggingface, 31 tensors, 1 file, \d\.\d\d KiB in \d\.\d s, .* MB/s", out.splitlines()[1])
    assert safetensors.numpy.load_file(tmp_path / "hf" / "model.safetensors")["model.norm"].tolist() == [1, 1, 1, 1]


def test_convert_hands_every_option_on(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = inspect.signature(reshard.convert).parameters.items()
    defaults = {name: one.default for name, one in parameters if one.default is not one.empty}
    # For programs: a process of a launcher takes its share. The size is handed on in `files`.
    del defaults["group"], defaults["timeout"], defaults["max_shard_size"]
    seen: dict[str, Any] = {}

    class Stop(reshard.ReshardError):
        pass

    def stand_in(src: str, dst: str, **options: Any) -> None:
        seen.update(options, src=src, dst=dst)
        raise Stop("enough")

    monkeypatch.setattr(reshard, "convert", stand_in)
    args = "a b --to checkpoint2 --part all --layout l.yaml --iteration 7 --prefix p --dtype bf16 --max-shard-size 1MB"
    more = "--dtype-all --strategy s --suffix 20_2 --drop a. --drop b. --rename =m. --rename c.= --names n --config c "
    more += "--model-files m --private --format dcp --pad a.=8 --trim b.=rows --trim c=.=3 "
    more += "--no-dedup --memory 8MiB --threads 3 --no-sync --overwrite --strict-format --share 1/3 "
    more += "--modes mindspore-transformers"
    assert run("convert", *args.split(), *more.split()).exit_code == 1
    assert seen == {
        "src": "a",
        "dst": "b",
        "to": "checkpoint2",
        "format": "dcp",
        "part": "all",
        "strategy": "s",
        "select": reshard.Select(
            drop=("a.", "b."),
            rename={"": "m.", "c.": ""},
            pad={"a.": 8},
            trim={"b.": "rows", "c=.": 3},
            suffix="20_2",
        ),
        "names": "n",
        "config": "c",
        "layout": "l.yaml",
        "iteration": 7,
        "files": reshard.Files(
            prefix="p",
            dedup=False,
            strict_format=True,
            max_shard_size="1MB",
            model_files="m",
            modes="mindspore-transformers",
        ),
        "commit": reshard.Commit(durable=False, private=True),
        "dtype": "bf16",
        "dtype_all": True,
        "memory": "8MiB",
        "threads": 3,
        "overwrite": True,
        "share": (1, 3),
        "progress": seen["progress"],
    }
    seen.clear()
    run("convert", "a", "b")
    assert callable(seen.pop("progress"))
    del defaults["progress"]
    defaults |= {"select": reshard.Select(), "files": reshard.Files(), "commit": reshard.Commit()}
    assert {name: value for name, value in seen.items() if name not in ("src", "dst")} == defaults


def test_convert_warns_on_stderr_and_in_json_once(tmp_path: Path, model: Path) -> None:
    (tmp_path / "odd.yaml").write_text(
        'mesh: {tp: 2}\nrules: [{match: "*.weight", cut: [tp], sizes: {0: [5, 3]}}, {match: "*"}]'
    )
    code, out, err = outcome("convert", model, tmp_path / "a", "--layout", tmp_path / "odd.yaml")
    assert code == 0
    assert "warning" not in out
    assert err.count("warning: metadata.json cannot express the layout of 30 tensors") == 1
    assert f"hint: `reshard inspect {tmp_path / 'a'}` marks them" in err
    code, out, err = outcome("convert", model, tmp_path / "b", "--layout", tmp_path / "odd.yaml", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert len(report["warnings"]) == 1
    assert len(report["not_expressible"]) == 30
    code, out, err = outcome("convert", model, tmp_path / "c", "--layout", tmp_path / "odd.yaml", "--strict-format")
    assert (code, out, (tmp_path / "c").exists()) == (1, "", False)
    assert "leave out --strict-format" in err


# -- errors and exit codes


def refusals(folder: Path) -> dict[str, tuple[list[object], str]]:
    """By name: arguments, and the class of the error."""
    (folder / "short.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{")
    (folder / "bad.yaml").write_text("mesh: {tp: 2}\nrules: 7\n")
    (folder / "full").mkdir()
    (folder / "full" / "note").write_text("")
    model = folder / "m.safetensors"
    return {
        "nothing there": (["inspect", folder / "nope"], "EmptyRootError"),
        "damaged": (["inspect", folder / "short.safetensors"], "DamagedFileError"),
        "no key": (["inspect", model, "nothing"], "KeyNotFoundError"),
        "bad layout": (["convert", model, folder / "x", "--layout", folder / "bad.yaml"], "LayoutError"),
        "no layout": (["convert", model, folder / "x", "--layout", folder / "nope.yaml"], "CheckpointNotFoundError"),
        "occupied": (["convert", model, folder / "full"], "DestinationExistsError"),
        "into itself": (["convert", folder / "full", folder / "full" / "x"], "ArgumentError"),
        "dtype": (["convert", model, folder / "x", "--dtype", "int3"], "UnsupportedError"),
        "demo into something": (["demo", "--keep", folder / "full"], "DestinationExistsError"),
    }


def test_refusals_are_messages(tmp_path: Path, model: Path) -> None:
    assert model.exists()
    for name, (args, error) in refusals(tmp_path).items():
        result = run(*args)
        assert (result.exit_code, result.stdout) == (1, ""), name
        assert result.stderr.startswith("error: "), name
        assert "Traceback" not in result.output, name
        result = run(*args, "--json")
        assert (result.exit_code, result.stderr) == (1, ""), name
        facts = json.loads(result.stdout)
        assert list(facts) == ["error", "message", "path", "key", "hint"]
        assert facts["error"] == error, name
    assert not (tmp_path / "x").exists()
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["note"]


@pytest.mark.slow
def test_exit_codes_of_processes(tmp_path: Path, model: Path) -> None:
    assert model.exists()
    for args, code in (
        (["--version"], 0),
        (["inspect", CKPT2], 0),
        (["inspect", tmp_path / "nope"], 1),
        (["inspect"], 2),
        (["convert", "a", "b", "--to", "pickle"], 2),
        (["frobnicate"], 2),
    ):
        found, _, err = outcome(*args)
        assert (found, "Traceback" in err) == (code, False), args


def test_an_error_of_the_system_is_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/some/where")

    monkeypatch.setattr(reshard, "convert", full)
    result = run("convert", "a", "b")
    assert (result.exit_code, result.stderr) == (1, "error: /some/where: No space left on device\n")
    facts = json.loads(run("convert", "a", "b", "--json").stdout)
    assert (facts["error"], facts["path"]) == ("OSError", "/some/where")


def test_arguments_are_named_as_options(tmp_path: Path, model: Path) -> None:
    result = run("convert", model, tmp_path / "x", "--prefix", "p")
    assert "error: --prefix belongs to" in result.stderr
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("")
    assert "give --overwrite" in run("convert", model, tmp_path / "full").stderr


def test_an_empty_path_is_not_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for iteration in (1, 2, 3):
        reshard.save(tmp_path, iteration, {"w": np.zeros(2)}, commit={"durable": False})
    monkeypatch.chdir(tmp_path)
    for words in (("inspect", ""), ("prune", "", "--keep", 1), ("diff", ".", ""), ("explain", "")):
        result = run(*words)
        assert (result.exit_code, "is empty" in result.stderr) == (2, True), words
    assert len(list(tmp_path.glob("iteration_*"))) == 3


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    with start("inspect", CKPT2) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # before anything was printed
        assert process.stderr.read() == ""
    assert process.returncode == 141  # as if SIGPIPE had ended it


@pytest.mark.parametrize(
    "words",
    [["--help"], ["plan", "--help"], ["inspect", CKPT2], ["inspect", CKPT2, "--json"], ["diff", "a", "b", "--json"]],
)
def test_output_that_cannot_be_written(words: list[object]) -> None:
    with Path("/dev/full").open("wb") as full:
        code, _, err = outcome(*words, stdout=full)
    assert code == 74
    assert err.startswith("error: cannot write to stdout: No space left on device\nhint: only the output is lost")
    assert len(err.splitlines()) == 2


def test_messages_that_cannot_be_written_change_no_exit_code(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        assert outcome("inspect", tmp_path, stderr=full)[:2] == (1, "")
        assert outcome("inspect", stderr=full)[:2] == (2, "")
        assert outcome("inspect", tmp_path, stdout=full, stderr=full)[0] == 1


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_change_neither_files_nor_the_exit_code(tmp_path: Path, closed: str) -> None:
    for words in ("inspect", CKPT2), ("convert", CKPT2, tmp_path / "hf"), ("verify", tmp_path / "hf"):
        command = shlex.join([*PROGRAM, *map(str, words)])
        found = subprocess.run(["sh", "-c", f"{command} {closed}"], check=False, capture_output=True, text=True)
        assert (found.returncode, "Traceback" in found.stderr) == (0, False)


def test_interrupt_leaves_nothing(tmp_path: Path) -> None:
    source = tmp_path / "big.safetensors"
    header = json.dumps({"w": {"dtype": "U8", "shape": [4 << 30], "data_offsets": [0, 4 << 30]}}).encode()
    source.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(source, 8 + len(header) + (4 << 30))  # seconds of work for one thread, without the time to write it
    process = start("convert", source, tmp_path / "hf", "--memory", "16MiB", "--threads", 1)
    while not list(tmp_path.glob(".hf.*")) and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["big.safetensors"]


@pytest.mark.parametrize("module", ["click", "reshard.cli.inspect", "numpy", "reshard.cli.contents"])
@pytest.mark.parametrize("becomes", ["KeyboardInterrupt", "ImportError"])
@pytest.mark.parametrize("times", [1, 2])
def test_interrupts_of_imports(module: str, becomes: str, times: int) -> None:
    program = f"""
import os, signal, sys, time
from reshard.__main__ import main

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            try:
                for _ in range({times}):
                    os.kill(os.getpid(), signal.SIGINT)
                    time.sleep(0.05)
            except KeyboardInterrupt:
                print({times} - 1 or "not expected")
                raise {becomes}

sys.meta_path.insert(0, Interrupting())
sys.argv[1:] = ["inspect", {str(CKPT2)!r}]
main()
"""
    found = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)
    is_late = module in ("numpy", "reshard.cli.contents")  # the others come before the command
    is_raised = times == 2 and is_late
    assert (found.returncode in (130, -signal.SIGINT), found.stderr.strip()) == (True, "interrupted")
    # A short time after the import, in which the command may have printed something, the interrupt takes effect.
    assert found.stdout == "1\n" * is_raised or (times == 1 and is_late and found.stdout.startswith("root: "))
    assert is_raised or found.returncode == 130


@pytest.mark.parametrize(
    "words", [["plan", "x"], ["prune", "x", "--keep", "0"], ["inspect", "x", "--no-such"], ["no-such"], ["explain"]]
)
def test_wrong_usage_with_json_is_json(words: list[str]) -> None:
    plain, found = run(*words), run(*words, "--json")
    facts = json.loads(found.stdout)
    assert (found.exit_code, found.stderr, facts["error"]) == (2, "", "UsageError")
    assert f"Error: {facts['message']}" in plain.stderr
    assert facts["hint"] == f"see {' '.join(['main', words[0]] if words[0] != 'no-such' else ['main'])} --help"


# -- hostile names


HOSTILE = {
    "bidi\u202eback": "bidi\\u202eback",
    "zero\u200bwidth": "zero\\u200bwidth",
    "[red]markup[/red]": "[red]markup[/red]",
    ":smile:": ":smile:",
}


def test_names_cannot_drive_a_terminal(tmp_path: Path) -> None:
    for number, (name, expected) in enumerate(HOSTILE.items()):
        path = tmp_path / f"{number}.safetensors"
        safetensors.numpy.save_file({name: np.zeros(1, np.uint8), "other": np.zeros(1, np.uint8)}, path)
        result = run("inspect", path)
        if result.exit_code == 1:  # refused, as control characters are
            assert shown(name) in result.output or expected in result.output, name
        else:
            assert expected in result.stdout, name
            assert expected in run("inspect", path, "re:.{6,}|[^o].*").stdout, name
        assert all(c.isprintable() or c == "\n" for c in result.output), name
        assert result.output.isascii() or number > 1


def test_paths_and_control_characters_are_escaped(tmp_path: Path) -> None:
    evil = "x\x1b[2J\x9b31m\ry"
    result = run("inspect", tmp_path / evil)
    assert result.exit_code == 1
    assert "\\x1b[2J\\x9b31m\\ry" in result.stderr
    assert all(c.isprintable() or c == "\n" for c in result.output)
    assert json.loads(run("inspect", tmp_path / evil, "--json").stdout)["path"].endswith(evil)
    assert run("inspect", tmp_path / evil, "--json").stdout.isascii()
    folder = tmp_path / evil
    folder.mkdir()
    safetensors.numpy.save_file({"w": np.zeros(3, np.uint8)}, folder / "model.safetensors")
    assert "huggingface: " in (page := run("inspect", folder).stdout)
    assert all(c.isprintable() or c == "\n" for c in page)


# -- terminals


@pytest.mark.slow
def test_progress_is_for_terminals(tmp_path: Path) -> None:
    source = tmp_path / "m.safetensors"
    safetensors.numpy.save_file({f"w{i}": np.zeros((1024, 1024), np.float32) for i in range(64)}, source)
    code, out, seen = on_terminal("convert", source, tmp_path / "a", "--memory", "16MiB", "--threads", 1)
    assert code == 0
    assert "of 256 MiB" in seen
    assert "left" in seen
    assert re.search(r"[MG]B/s", seen)
    assert out.startswith("wrote ")  # not drawn into the progress
    assert "\x1b" not in out
    code, out, seen = on_terminal("convert", source, tmp_path / "b", "--json")
    assert (code, "of 256 MiB" in seen) == (0, True)
    json.loads(out)
    assert outcome("convert", source, tmp_path / "c")[2] == ""


@pytest.mark.slow
def test_progress_gives_way_to_lines() -> None:
    code, _, seen = on_terminal("demo", "--size", 100, both=True)
    assert code == 0
    assert "of 93." in seen
    for step in ("shard TP2 x PP2", "reshard TP4", "merge"):
        assert f"\x1b[2K{step} " in seen  # its line was erased before


def test_a_pipe_gets_one_line_a_tensor(tmp_path: Path) -> None:
    key = "k" * 500 + ".weight"
    safetensors.numpy.save_file({key: np.zeros(1, np.uint8), "v": np.zeros(1, np.uint8)}, tmp_path / "m.safetensors")
    code, out, _ = outcome("inspect", tmp_path / "m.safetensors", env={**os.environ, "COLUMNS": "40"})
    assert code == 0
    assert re.search(rf"^{re.escape(key)} +U8 +1 +1 B$", out, re.MULTILINE)


@pytest.mark.parametrize("width", [1000, 80, 40, 20, 10])
def test_a_narrow_terminal_crops_nothing(width: int) -> None:
    terminal = io.StringIO()
    columns = ("saved at", "iteration", "size", "why")
    rows = [
        ("2026-11-25T23:50:28+00:00", "1200400", "2.29 MiB", "the tracker names it " * 3),
        ("2026-11-25T23:50:28+00:00", "999999999999", "1023 KiB", "[x] \u5c42 " + "q" * 70),
        ("", "7", "", ""),
    ]
    out = Console(file=terminal, force_terminal=True, color_system=None, width=width, markup=False)
    table = plain_table(*columns, right=("iteration",), folds=("why",))
    for row in rows:
        table.add_row(*row)
    out.print(fitted(table, out))
    lines = terminal.getvalue().splitlines()
    words = [word for row in rows for cell in row for word in cell.split()]
    assert all(cell_len(line.rstrip()) <= width for line in lines)
    found = "".join(terminal.getvalue().split())
    if fitted(table, out) is table:
        assert all(word in found or len(word) == 70 for word in words)
        assert found.count("q") == 70
    else:
        cells = [(f"{name}: ", cell) for row in rows for name, cell in zip(columns, row, strict=True)]
        expected = "".join(name + cell for name, cell in cells if cell or name == "saved at: ")
        assert found == "".join(expected.split())
    assert (fitted(table, out) is table) == (width >= 80)


@pytest.mark.slow
def test_metrics_of_saves_on_a_narrow_terminal(tmp_path: Path) -> None:
    metrics = {"train/loss": 12.345678, "eval/perplexity": 123.456789, "iteration": 1523.25, "lr": 3e-4}
    reshard.save(tmp_path / "run", 1200400, {"w": np.zeros(300000)}, metrics=metrics)
    _, _, seen = on_terminal("inspect", tmp_path / "run", both=True, columns=80)
    rows = [line.split() for line in re.sub("\x1b\\[[0-9;]*m", "", seen).splitlines()]
    first = next(n for n, row in enumerate(rows) if row[:2] == ["saved", "at"])
    assert rows[first + 1][1:4] == ["1200400", "2.29", "MiB"]
    assert rows[first + 3] == ["iteration", "train/loss", "eval/perplexity", "iteration", "lr"]
    assert rows[first + 4] == ["1200400", "12.3457", "123.457", "1523.25", "0.0003"]
    _, _, seen = on_terminal("inspect", tmp_path / "run", both=True, columns=40)
    assert "    iteration: 1200400" in re.sub("\x1b\\[[0-9;]*m", "", seen)
    assert "and 2 more metrics: iteration, lr; --json lists them" in seen


@pytest.mark.parametrize(
    ("key", "width", "expected"),
    [
        ("a.b", 10, "a.b"),
        ("layers.0.weight", 10, "layers.0.\n  weight"),
        ("abcdefgh", 4, "abcd\n  ef\n  gh"),
    ],
)
def test_long_keys_are_folded_at_dots(key: str, width: int, expected: str) -> None:
    assert _folded(key, width) == expected


# -- demo


def test_demo_from_start_to_end() -> None:
    before = set(Path("/tmp").glob("reshard-demo-*"))
    code, out, err = outcome("demo", "--size", 2, env={**os.environ, "TMPDIR": "/tmp"})
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "all 39 tensors equal, byte for byte, after each step"
    for step in ("make", "shard TP2 x PP2", "reshard TP4", "merge"):
        assert re.search(rf"^{re.escape(step)} .* [KM]iB .* s\b", out, re.MULTILINE)
    assert set(Path("/tmp").glob("reshard-demo-*")) <= before


def test_demo_keeps_what_it_is_asked_to_keep(tmp_path: Path) -> None:
    result = run("demo", "--size", 1, "--keep", tmp_path / "try", "--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["equal"], report["n_tensors"]) == (0, True, 39)
    # 4 x 7 cut keys in stages of 2 layers, cut in two; 2 more cut ones; 9 norms once each.
    assert [step["n_compared"] for step in report["steps"]] == [0, 30 * 2 + 9, 30 * 4 + 9, 39]
    names = sorted(path.name for path in (tmp_path / "try").iterdir())
    assert names == ["hf", "merged", "tp2_pp2", "tp2_pp2.yaml", "tp4", "tp4.yaml"]
    original: dict[str, np.ndarray] = {}
    for path in (tmp_path / "try" / "hf").glob("*.safetensors"):
        original |= safetensors.numpy.load_file(path)
    merged = safetensors.numpy.load_file(tmp_path / "try" / "merged" / "model.safetensors")
    assert {key: array.tobytes() for key, array in merged.items()} == {k: a.tobytes() for k, a in original.items()}


def test_demo_fails_when_a_byte_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    def damaging(src: Path, dst: Path, **options: Any) -> Any:
        report = reshard.convert(src, dst, **options)
        if dst.name == "tp4":
            path = sorted(Path(report.path).glob("*.safetensors"))[2]
            path.chmod(0o600)
            with path.open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                last = file.read(1)
                file.seek(-1, os.SEEK_END)
                file.write(bytes([last[0] ^ 1]))
            # As if that had been written: what was damaged afterwards is found before it is compared.
            sealed.seal(path.parent, int(path.parent.name.removeprefix("iteration_")))
        return report

    monkeypatch.setattr(demo_module, "convert", damaging)
    result = run("demo", "--size", 1)
    assert result.exit_code == 1
    assert re.search(r"^reshard TP4 .* 1 tensor DIFFER$", result.stdout, re.MULTILINE)
    assert re.search(r"^1 of 39 tensors differ, such as \S+$", result.stdout, re.MULTILINE)
    assert json.loads(run("demo", "--size", 1, "--json").stdout)["equal"] is False


def test_demo_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['reshard', 'demo', '--size', '1']; "
        + PROGRAM[2].split("; ", 2)[2]
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# -- help


def examples() -> list[str]:
    """The lines of all help texts that show a command, without the comment behind it."""
    commands = [main, *(command for _, command in all_commands())]
    lines = [line.strip() for command in commands for line in (command.help or "").splitlines()]
    return list(dict.fromkeys(re.split(r" {2,}# ", line)[0] for line in lines if line.startswith("reshard ")))


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `reshard demo` leaves, made once; tests copy what they change."""
    folder = tmp_path_factory.mktemp("demo") / "demo"
    assert run("demo", "--size", 1, "--keep", folder).exit_code == 0
    return folder


@pytest.mark.parametrize("example", examples())
def test_the_examples_of_the_help_run(
    example: str, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    shutil.copytree(demo / "tp2_pp2", folder / "output" / "checkpoint")
    shutil.copy(demo / "tp4.yaml", folder)
    shutil.copy(SAMPLES / "train.yaml", folder)
    shutil.copy(SAMPLES / "ckpt" / "dtypes.ckpt", folder / "weights.ckpt")
    shutil.copytree(SAMPLES / "ckpt" / "tree", folder / "old_run")
    (folder / "names.yaml").write_text("w: model.w\n")
    if re.search("(convert|split|diff .*|layout check .*) hf/|diff hf/", example):
        shutil.copytree(demo / "hf", folder / "hf")
    for name, sample in (("ranks/", "src_rank_slices"), ("strategy/", "src_strategy")):
        if re.search(f"(merge|--strategy) {name}", example):
            shutil.copytree(SAMPLES / "strategy" / sample, folder / name)
    if "output/strategy" in example:
        shutil.copytree(SAMPLES / "strategy" / "src_strategy", folder / "output" / "strategy")
    if re.search("(show|--layout) merged_strategy.ckpt", example):
        with reshard.open(demo / "hf") as opened:
            shapes = {key: opened[key].shape for key in opened.keys()}  # noqa: SIM118
        write_strategy(demo / "tp4.yaml", shapes, tmp_path / "written")
        merge_strategies(tmp_path / "written", folder / "merged_strategy.ckpt")
    if "runs/" in example:
        example = example.replace("runs/*/", "runs/1/ runs/2/")  # as a shell does
        for name in ("1", "2"):
            shutil.copytree(demo / "tp2_pp2", folder / "runs" / name)
    if "split full/" in example:
        shutil.copytree(SAMPLES / "full_ms", folder / "full")
    if re.search("rollback|pin |_00000400", example):
        shutil.rmtree(folder / "output" / "checkpoint")
        reshard.convert(demo / "hf", folder / "output" / "checkpoint", to="checkpoint2", iteration=400)
    if "--model-files" in example:
        (folder / "base").mkdir()
        (folder / "base" / "config.json").write_text("{}")
    if re.search("--names|names show|layout preset hf/", example):
        hf = shutil.copytree(demo / "hf", folder / "hf", dirs_exist_ok=True)
        width = reshard.open(hf)["model.norm.weight"].shape[0]
        config = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": width}
        (hf / "config.json").write_text(json.dumps(config))
        if ":reverse" in example:
            reshard.convert(hf, folder / "mcore", names="mindspore")
    if "--loads-in" in example:
        transformers = pytest.importorskip("transformers")
        bert = transformers.BertConfig(hidden_size=4, num_hidden_layers=1, num_attention_heads=1, vocab_size=4)
        transformers.BertModel(bert).save_pretrained(folder / "pretrained")
    if example.startswith("reshard watch"):  # it ends by Ctrl-C
        clock = types.SimpleNamespace(sleep=lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        monkeypatch.setattr(sys.modules["reshard.cli.watch"], "time", clock)
    if example == "reshard demo":
        example += " --size 1"
    monkeypatch.chdir(folder)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command = example.partition(" > ")[0]
    name, *arguments = shlex.split(command)
    assert name == "reshard"
    assert not set("|&;<>$`") & set("".join(arguments))  # nothing that only a shell understands
    done = run(*arguments)
    told = re.sub(r"^preparing, \d+ s\n", "", done.stderr, flags=re.MULTILINE)  # of a slow machine
    assert (done.exit_code, told) == (0, ""), done.exception
    assert done.stdout or "watch" in example  # this run has no events


def test_every_command_has_help_with_examples() -> None:
    assert sorted(main.commands) == [
        "convert",
        "convert-files",
        "demo",
        "diff",
        "explain",
        "inspect",
        "layout",
        "merge",
        "names",
        "pin",
        "plan",
        "prune",
        "rollback",
        "split",
        "strategy",
        "unpin",
        "verify",
        "watch",
    ]
    for name in ("", *dict(all_commands())):
        text = run(*name.split(), "--help").stdout
        assert "Examples:" in text
        assert len(examples()) >= 10
    for _, command in all_commands():
        if isinstance(command, click.Group):
            continue
        options = [param for param in command.params if isinstance(param, click.Option)]
        assert all(option.help for option in options)
        assert "--json" in [option.opts[0] for option in options]


def test_version() -> None:
    assert run("--version").stdout == f"reshard {reshard.__version__}\n"


# -- words and numbers


@pytest.mark.parametrize(
    ("n_bytes", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10 * 1024, "10.0 KiB"),
        (1_048_575, "1.00 MiB"),
        (999 << 20, "999 MiB"),
        (3 << 40, "3.00 TiB"),
        (1 << 63, "8.00 EiB"),
    ],
)
def test_sizes(n_bytes: int, expected: str) -> None:
    assert size(n_bytes) == expected


def test_rates() -> None:
    assert [rate(10**9, 1), rate(10**9, 2), rate(5, 0)] == ["1.00 GB/s", "500 MB/s", "-"]


@pytest.mark.parametrize(
    ("names", "pattern", "short"),
    [
        (
            ["a-model-0000009-0000012.s", "a-model-0000010-0000012.s"],
            "a-model-#-0000012.s, # as listed below",
            ["9", "10"],
        ),
        (["rank_0.s", "rank_10.s"], "rank_#.s, # as listed below", ["0", "10"]),
        (["only.s"], "only.s", ["only.s"]),
        (["a.s", "b.s"], "2", ["a.s", "b.s"]),
        (["1.s", "1.s.s"], "2", ["1.s", "1.s.s"]),
    ],
)
def test_names_of_files_are_shortened_to_their_number(names: list[str], pattern: str, short: list[str]) -> None:
    found, shorten = _short_names(names)
    assert (found, [shorten(name) for name in names]) == (pattern, short)
