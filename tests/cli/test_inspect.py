"""`reshard inspect`: what it shows of each kind of path."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from tests.cli.samples import model
from tests.helpers.command_line import outcome, run
from tests.helpers.unprivileged import closed, nobody, reachable, readable

import reshard
from reshard.cli.output import common_key

__all__ = ["model", "reachable"]

SAMPLES = Path(__file__).parents[1] / "data" / "mindspore"
CKPT2 = SAMPLES / "ckpt2" / "checkpoint"


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


@pytest.mark.slow
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


@pytest.mark.slow(disk=False)
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
