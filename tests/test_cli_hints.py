"""Hints of the command line: what was meant, what lies around, and options instead of arguments of functions."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.test_cli import outcome, run

import reshard
from reshard.opening.near import near
from reshard.write import protocol

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Iterations 100 and 200, in a folder of a folder."""
    root = tmp_path / "runs" / "checkpoint"
    for iteration in (100, 200):
        reshard.save(root, iteration, {"w": np.full((4, 6), iteration, np.float32)}, durable=False)
    protocol.release(root)
    return root


# -- what was meant


COMMANDS = [["inspect"], ["verify"], ["explain"], ["prune", "--keep", "3"], ["pin", "100"], ["rollback", "100"]]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_parent_or_a_typo_of_a_root_gets_a_hint(command: list[str], root: Path, tmp_path: Path) -> None:
    for given in (root.parent, root.parent.parent, root.with_name("chekpoint"), tmp_path / "rnus" / "checkpoint"):
        name, *more = command
        result = run(name, given, *more)
        assert result.exit_code != 0, given
        assert f"hint: did you mean `{root}`?" in result.stderr, given
    assert not (root.parent / ".lock").exists()


def test_a_hint_names_the_iterations_that_are_there(root: Path) -> None:
    result = run("inspect", root / "iteration_00000101")
    assert f"`{root / 'iteration_00000100'}`" in result.stderr
    assert json.loads(run("inspect", root.parent, "--json").stdout)["hint"] == f"did you mean `{root}`?"


def test_either_side_of_a_comparison_gets_a_hint(root: Path, tmp_path: Path) -> None:
    reshard.convert(root, tmp_path / "hf")
    assert f"did you mean `{tmp_path / 'hf'}`?" in run("diff", root, tmp_path / "hff").stderr
    assert f"did you mean `{root}`?" in run("diff", root.parent, tmp_path / "hf").stderr


def test_what_is_near_is_bounded_and_never_an_error(root: Path, tmp_path: Path) -> None:
    assert near(root) == []
    assert near(tmp_path / "nothing" / "like" / "it") == []
    assert near(tmp_path / ("x" * 300)) == []
    (tmp_path / "file").write_text("")
    assert near(tmp_path / "file") == []
    assert near(tmp_path / "file" / "below") == []
    deep = tmp_path / "deep"
    shutil.copytree(root, deep / "1" / "2" / "3" / "4")
    assert near(deep) == []  # three levels are searched
    assert near(deep / "1") == [str(deep / "1" / "2" / "3" / "4")]
    loop = tmp_path / "loop"
    loop.mkdir()
    (loop / "again").symlink_to(loop)
    assert near(loop) == []


# -- what lies around


def test_inspect_mentions_what_is_no_part_of_the_checkpoint(root: Path) -> None:
    assert "also there" not in run("inspect", root).stdout
    shutil.copytree(root / "iteration_00000100", root / "iteration_00000100.bak")
    shutil.copytree(root / "iteration_00000100", root / "iteration_100")
    (root / "iteration_00000300").symlink_to("iteration_00000100")
    (root / "notes\x1b.txt").write_text("abc")
    (root / "iteration_00000200" / "model.tmp").write_text("abcd")
    staged = root / ".staging" / f"300.1.{'a' * 32}"
    staged.mkdir(parents=True)
    (staged / "part").write_bytes(bytes(2048))
    (root / ".trash" / f"50.{'b' * 32}").mkdir(parents=True)
    found = {
        one["name"]: (one["what"], one["n_bytes"])
        for one in json.loads(run("inspect", root, "--json").stdout)["leftovers"]
    }
    assert {name: what for name, (what, _) in found.items()} == {
        f".staging/300.1.{'a' * 32}": "a save of iteration 300 that was interrupted: "
        "the next save publishes it if it is complete, and removes it otherwise",
        f".trash/50.{'b' * 32}": "removed, and still to be deleted: the next save does so",
        "iteration_00000100.bak": "folder, no part of the checkpoint",
        "iteration_100": "iteration 100 is read from iteration_00000100",
        "iteration_00000300": "symbolic link, no part of the checkpoint",
        "notes\x1b.txt": "file, no part of the checkpoint",
        "iteration_00000200/model.tmp": "file, not in the manifest",
    }
    assert found[f".staging/300.1.{'a' * 32}"][1] == 2048
    page = run("inspect", root).stdout
    assert "also there, and not read:" in page
    assert "  iteration_00000100.bak " in page
    assert "notes\\x1b.txt" in page
    assert "iteration_00000200  complete (taken, tracker)" in page


def test_inspect_tells_a_save_in_progress_from_one_that_was_interrupted(root: Path) -> None:
    attempt = protocol.begin(root, 300)
    try:
        for result in (run("inspect", root).stdout, outcome("inspect", root)[1]):
            assert "a save of iteration 300 in progress (0 B)" in result
    finally:
        protocol.abandon(attempt)
        os.makedirs(attempt.staging)  # noqa: PTH103  as if it had been killed
        protocol.release(root)
    assert "a save of iteration 300 that was interrupted" in run("inspect", root).stdout


def test_many_leftovers_are_counted(root: Path) -> None:
    for number in range(30):
        (root / f"note{number:02d}").write_text("")
    page = run("inspect", root).stdout
    assert "and 20 more; --all lists them" in page
    assert "note29" in run("inspect", root, "--all").stdout
