"""The record of an environment, and what differences between two mean."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reshard.errors import ArgumentError, MismatchError
from reshard.torch import environment
from reshard.torch.environment import Difference, check, compare, record


def git(folder: Path, *arguments: str) -> str:
    names = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *names, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(environment, "_GIT_SECONDS", 600)  # on a loaded machine git takes longer than a run waits
    git(tmp_path, "init", "-q")
    (tmp_path / "train.py").write_text("pass\n")
    git(tmp_path, "add", "train.py")
    git(tmp_path, "commit", "-q", "-m", "one")
    return tmp_path


def test_record_is_plain_and_says_what_there_is() -> None:
    found = record(world_size=8, mesh={"dp": 4, "tp": 2}, config={"a": 1}, dataset="v1")
    assert json.loads(json.dumps(found)) == found
    assert all(value is None or type(value) in {str, int, bool} for value in found.values())
    assert found["torch"] == torch.__version__
    assert found["numpy"] == np.__version__
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert (found["world_size"], found["mesh"], found["dataset"]) == (8, "dp=4, tp=2", "v1")
    assert found["n_threads"] == torch.get_num_threads()
    assert not any(socket.gethostname() in str(value) for value in found.values())
    assert not any(str(Path.cwd()) in str(value) for value in found.values())


def test_every_entry_has_a_severity_and_the_same_environment_no_difference() -> None:
    found = record(world_size=8, mesh={"dp": 8}, config={}, dataset="v1")
    assert set(found) == set(environment._SEVERITIES)
    assert compare(found, found) == check(found, found) == []


@pytest.mark.parametrize(
    ("saved", "now", "same"),
    [
        ({"a": 1, "b": [1, 2]}, {"b": [1, 2], "a": 1}, True),
        ({"a": 1}, {"a": 2}, False),
        ({"a": 1}, {"a": "1"}, False),
        ("lr: 1\n", b"lr: 1\n", True),
        ("lr: 1\n", "lr: 2\n", False),
    ],
)
def test_config_digest(saved: Any, now: Any, same: bool) -> None:  # noqa: FBT001
    digests = [record(config=config)["config"] for config in (saved, now)]
    assert (digests[0] == digests[1]) == same
    assert all(len(digest) == 32 for digest in digests)


def test_config_without_json_form_is_refused() -> None:
    with pytest.raises(ArgumentError, match="not JSON-serializable"):
        record(config={"a": object()})


def differing(name: str, saved: Any, now: Any) -> list[Difference]:
    base = record(world_size=8, mesh={"dp": 8}, config={}, dataset="v1")
    return compare(base | {name: saved}, base | {name: now})


@pytest.mark.parametrize(
    ("name", "saved", "now", "severity"),
    [
        ("world_size", 8, 4, "breaks exactness"),
        ("mesh", "dp=8", "dp=4, tp=2", "breaks exactness"),
        ("dataset", "v1", "v2", "breaks exactness"),
        ("device", "NVIDIA A100", "NVIDIA H100", "breaks exactness"),
        ("torch", "2.6.0", "2.7.0", "may change numbers"),
        ("code_revision", "0" * 40, "1" * 40, "may change numbers"),
        ("code_dirty", False, True, "may change numbers"),
        ("code_dirty", 0, False, "may change numbers"),  # of another type
        ("python", "3.11.7", "3.12.1", "informational"),
        ("from_the_future", 1, 2, "informational"),
        ("dataset", None, "v2", "informational"),  # not known is not different
        ("world_size", 8, None, "informational"),
    ],
)
def test_severity_of_a_difference(name: str, saved: Any, now: Any, severity: Any) -> None:
    assert differing(name, saved, now) == [Difference(severity, name, saved, now)]


def test_entry_that_one_side_lacks_is_informational() -> None:
    found = record(world_size=8)
    older = {name: value for name, value in found.items() if name not in {"world_size", "torch"}}
    assert {difference.severity for difference in compare(older, found)} == {"informational"}
    assert {difference.name for difference in compare(found, older)} == {"world_size", "torch"}


def test_most_severe_first() -> None:
    saved = {"python": "1", "torch": "1", "world_size": 1, "numpy": "1", "device": "x"}
    now = {"python": "2", "torch": "2", "world_size": 2, "numpy": "2", "device": "y"}
    assert [difference.name for difference in compare(saved, now)] == [
        "device",
        "world_size",
        "numpy",
        "torch",
        "python",
    ]


def test_strict_lists_all_that_matters_and_passes_the_rest() -> None:
    saved, now = {"torch": "1", "world_size": 4, "python": "1"}, {"torch": "2", "world_size": 2, "python": "2"}
    with pytest.raises(MismatchError) as caught:
        check(saved, now)
    assert "results are not bitwise equal: world_size was 4, is 2\nresults may differ: torch was '1', is '2'" in str(
        caught.value
    )
    assert "python" not in caught.value.message
    assert [d.name for d in check({"python": "1"}, {"python": "2"})] == ["python"]


@pytest.mark.parametrize("saved", [None, [], "x", {1: 2}])
def test_what_is_no_record_is_refused(saved: Any) -> None:
    with pytest.raises(ArgumentError, match="not a record"):
        compare(saved, record())


def test_hostile_text_is_escaped_and_cut() -> None:
    text = str(compare({"torch": "\x1b[2J" + "x" * 10_000}, {"torch": "2"})[0])
    assert "\x1b" not in text
    assert len(text) < 300


# -- git


def test_revision_and_changes(repository: Path) -> None:
    head = git(repository, "rev-parse", "HEAD")
    (repository / "sub").mkdir()
    (repository / "output.txt").write_text("not tracked")
    for folder in (repository, repository / "sub"):
        found = record(code=folder)
        assert (found["code_revision"], found["code_dirty"]) == (head, False)
    (repository / "train.py").write_text("changed\n")
    assert record(code=repository)["code_dirty"] is True
    assert record(code=repository)["code_revision"] == head


def test_working_directory_is_the_default(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repository)
    assert record()["code_revision"] == git(repository, "rev-parse", "HEAD")


def test_no_git_no_commit_no_folder_and_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_is_known(folder: Path) -> bool:
        found = record(code=folder)
        return found["code_revision"] is found["code_dirty"] is None

    assert nothing_is_known(tmp_path)
    assert nothing_is_known(tmp_path / "absent")
    git(tmp_path, "init", "-q")
    assert nothing_is_known(tmp_path)
    monkeypatch.setenv("PATH", "")
    assert nothing_is_known(tmp_path)


def test_slow_git_is_given_up(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    fifo = tmp_path / "never"
    os.mkfifo(fifo)
    (programs / "git").write_text(f"#!/bin/sh\nread x < {fifo}\n")
    (programs / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    monkeypatch.setattr(environment, "_GIT_SECONDS", 0.2)
    before = time.monotonic()
    assert record(code=repository)["code_revision"] is None
    assert time.monotonic() - before < 20


def test_repository_cannot_start_a_program(repository: Path, tmp_path: Path) -> None:
    trace = tmp_path / "started"
    hook = tmp_path / "hook"
    hook.write_text(f"#!/bin/sh\ntouch {trace}\n")
    hook.chmod(0o755)
    git(repository, "config", "core.fsmonitor", str(hook))
    git(repository, "status")
    assert trace.exists()  # plain git does start it
    trace.unlink()
    assert record(code=repository)["code_dirty"] is False
    assert not trace.exists()
