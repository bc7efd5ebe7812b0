"""`reshard watch`: what it shows of a run with and without a log of events, and how it starts and ends."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import pty
import re
import select
import shutil
import signal
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.helpers.command_line import run, start

import reshard
from reshard.cli.watched import Watch
from reshard.commit import claims, protocol
from reshard.commit.event_log import EVENT_FILE, EventLog
from reshard.errors import StorageError
from reshard.storage.location import locate
from reshard.values.events import Event

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("_quick_saves")


def save(root: Path, iteration: int, **options: Any) -> None:
    reshard.save(root, iteration, {"w": np.zeros(1000, np.float32)}, commit={"durable": False}, **options)


def logged(root: Path, kind: str, iteration: int, **fields: Any) -> None:
    EventLog(root)(Event(kind, iteration, dt.datetime.now(dt.UTC), 0, fields))


# -- once


def test_a_run_with_a_log(tmp_path: Path) -> None:
    root = tmp_path / "run"
    save(root, 100)  # before the log was asked for
    for iteration in (200, 300, 400):
        save(root, iteration, keep=2, on_event=EventLog(root))
    result = run("watch", root, "--once")
    assert result.exit_code == 0, result.output
    for text in (
        "newest       iteration 400, complete, ",
        " ago (",
        "in progress  no save",
        f"source       {EVENT_FILE}\n",
        "the training waited",
        "not kept by Retention(keep=2)",
    ):
        assert text in result.stdout, text
    rows = [line.split()[1:3] for line in result.stdout.splitlines() if line.count(":") >= 2]
    assert rows[1:5] == [["100", "published"], ["200", "begun"], ["200", "written"], ["200", "published"]]
    found = json.loads(run("watch", root, "--once", "--json").stdout)
    assert (found["source"], found["newest"]["iteration"], found["in_flight"]) == (EVENT_FILE, 400, None)
    assert found["newest"]["n_bytes"] == reshard.open(root).manifest.n_bytes  # type: ignore[union-attr]
    assert [event["iteration"] for event in found["events"] if event["kind"] == "published"] == [100, 200, 300, 400]


@pytest.mark.parametrize("format_", ["checkpoint2", "checkpoint1"])
def test_a_run_without_a_log(tmp_path: Path, format_: str) -> None:
    root = tmp_path / "run"
    for iteration in (1, 2):
        save(root, iteration, format=format_)
    found = json.loads(run("watch", root, "--once", "--json").stdout)
    assert (found["source"], found["newest"]["iteration"], found["problem"]) == ("files", 2, None)
    assert [event["iteration"] for event in found["events"]] == [1, 2]
    assert f"the files of the root (there is no {EVENT_FILE})" in run("watch", root, "--once").stdout


def test_files_of_whole_weights_and_empty_folders(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert (
        "no complete checkpoint; for the reasons run: reshard explain"
        in run("watch", tmp_path / "empty", "--once").stdout
    )
    reshard.save_file({"w": np.zeros(3)}, tmp_path / "model.safetensors")
    assert "newest" in run("watch", tmp_path, "--once").stdout
    result = run("watch", tmp_path / "model.safetensors", "--once")
    assert (result.exit_code, "is a file, expected a checkpoint root" in result.stderr) == (1, True)
    result = run("watch", tmp_path / "none", "--once")
    assert (result.exit_code, "there is nothing at" in result.stderr) == (1, True)
    assert run("watch", tmp_path, "--interval", "0").exit_code == 2


def test_a_damaged_newest_iteration_is_not_the_newest_complete_one(tmp_path: Path) -> None:
    root = tmp_path / "run"
    for iteration in (1, 2):
        save(root, iteration)
    watch = Watch(str(root))
    assert watch.look()[0].newest.iteration == 2  # type: ignore[union-attr]
    (root / "iteration_00000002" / "common.json").unlink()
    os.utime(root / "iteration_00000002", (5, 5))  # the times of some file systems have long steps
    state, _ = watch.look()
    assert state.newest is not None
    assert state.newest.iteration == 1
    assert state.newest.skipped == ("iteration_00000002",)
    assert "skipped      iteration_00000002; for the reasons run: reshard" in run("watch", root, "--once").output


# -- the save in progress


def test_an_iteration_that_cannot_be_read_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "run"
    save(root, 100)

    def refuse(*_: object) -> None:
        raise StorageError("opening `manifest.json`: Permission denied")

    monkeypatch.setattr("reshard.cli.watched.reshard.open", refuse)
    result = run("watch", root, "--once")
    assert result.exit_code == 1
    assert "problem      opening `manifest.json`: Permission denied\n" in result.stdout
    assert f"newest       not known; for the reasons run: reshard explain {root}\n" in result.stdout


def test_the_save_in_progress_with_its_progress(tmp_path: Path) -> None:
    root = tmp_path / "run"
    save(root, 100, on_event=EventLog(root))
    attempt = protocol.begin(locate(root), 200)
    try:
        logged(root, "begun", 200, n_bytes=4000)
        watch = Watch(str(root))
        state, _ = watch.look()
        assert state.in_flight is not None
        assert (state.in_flight.iteration, state.in_flight.stage, state.in_flight.is_alive) == (200, "begun", True)
        logged(root, "writing", 200, n_bytes=1 << 20, total_bytes=4 << 20)
        page = run("watch", root, "--once").stdout
        assert re.search(r"iteration 200, begun \d+ s ago: 25%, 1\.00 MiB of 4\.00 MiB written on rank 0", page)
        assert all(event.kind != "writing" for event in watch.look()[0].events)
    finally:
        protocol.abandon(attempt)
        os.makedirs(attempt.staging)  # noqa: PTH103  as if it had been killed
        protocol.release(locate(root))
    assert "interrupted; its process has ended" in run("watch", root, "--once").stdout
    logged(root, "resumed", 100)
    assert watch.look()[0].in_flight is None


@pytest.mark.parametrize("end", ["published", "failed"])
def test_a_save_that_has_ended_is_not_in_progress(tmp_path: Path, end: str) -> None:
    root = tmp_path / "run"
    save(root, 100)
    for kind in ("begun", "copied", "written"):
        logged(root, kind, 200, n_bytes=5)
    watch = Watch(str(root))
    assert watch.look()[0].in_flight is not None
    logged(root, end, 300)
    assert watch.look()[0].in_flight is not None, "the end of another save"
    logged(root, end, 200, reason="no space")
    assert watch.look()[0].in_flight is None


def test_without_a_log_the_staging_folder_shows_a_save(tmp_path: Path) -> None:
    root = tmp_path / "run"
    save(root, 100)
    watch = Watch(str(root))
    watch.look()
    attempt = protocol.begin(locate(root), 200)
    state, new = watch.look()
    assert state.in_flight is not None
    assert (state.in_flight.iteration, state.in_flight.is_alive, new) == (200, True, [])
    protocol.abandon(attempt)
    assert watch.look()[0].in_flight is None


def test_folders_that_go_after_they_were_listed_are_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "run"
    save(root, 1)
    watch, attempt = Watch(str(root)), protocol.begin(locate(root), 2)
    is_alive = claims.is_alive

    def ends(of: Any, generation: int) -> bool | None:
        if attempt.staging.exists():
            protocol.abandon(attempt)
        return is_alive(of, generation)

    monkeypatch.setattr(claims, "is_alive", ends)
    state, _ = watch.look()
    assert (state.problem, state.in_flight) == (None, None)
    assert state.newest is not None
    assert state.newest.iteration == 1


def test_without_a_log_differences_of_the_files_are_events(tmp_path: Path) -> None:
    root = tmp_path / "run"
    watch = Watch(str(root))
    state, new = watch.look()
    assert (state.exists, new) == (False, [])
    save(root, 1)
    save(root, 2)
    assert [(event.kind, event.iteration) for event in watch.look()[1]] == [("published", 1), ("published", 2)]
    shutil.rmtree(root / "iteration_00000001")
    save(root, 3)
    assert [(event.kind, event.iteration) for event in watch.look()[1]] == [("published", 3), ("pruned", 1)]
    assert watch.look()[1] == []


# -- what cannot be trusted


def test_text_of_the_log_is_escaped_and_invalid_lines_are_counted(tmp_path: Path) -> None:
    root = tmp_path / "run"
    save(root, 1)
    logged(root, "failed", 2, reason="a\x1b[2J\u202eb")
    logged(root, "exported", 3, path="/x\x07")
    with (root / EVENT_FILE).open("ab") as file:
        file.write(b"{}\nnonsense\n")
    result = run("watch", root, "--once")
    assert result.exit_code == 0
    assert all(c.isprintable() or c == "\n" for c in result.output)
    assert "a\\x1b[2J\\u202eb" in result.stdout
    assert "path=/x\\x07" in result.stdout
    assert f"{EVENT_FILE}; 2 invalid lines skipped" in result.stdout


def test_a_log_that_cannot_be_read_is_a_problem_and_no_end(tmp_path: Path) -> None:
    root = tmp_path / "run"
    save(root, 1)
    (root / EVENT_FILE).symlink_to("/dev/zero")
    watch = Watch(str(root))
    assert "is not a regular file" in str(watch.look()[0].problem)
    (root / EVENT_FILE).unlink()
    assert watch.look()[0].problem is None
    (root / EVENT_FILE).symlink_to("/dev/zero")
    result = run("watch", root, "--once")
    assert (result.exit_code, "is not a regular file" in result.stderr) == (1, True)


# -- the running command


@pytest.mark.slow
def test_json_lines_of_a_root_that_comes_later(tmp_path: Path) -> None:
    root = tmp_path / "run"
    process = start("watch", root, "--json", "--interval", "0.1")
    assert process.stderr is not None
    assert process.stdout is not None
    try:
        assert "does not exist yet: waiting for it" in process.stderr.readline()
        save(root, 1, on_event=EventLog(root))
        lines = [json.loads(process.stdout.readline()) for _ in range(3)]
        assert [(line["kind"], line["iteration"]) for line in lines] == [("begun", 1), ("written", 1), ("published", 1)]
        save(root, 2, on_event=EventLog(root))
        assert json.loads(process.stdout.readline())["kind"] == "begun"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert (process.returncode, err) == (0, "")
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_on_a_terminal_the_page_is_drawn_again(tmp_path: Path) -> None:
    root = tmp_path / "run"
    save(root, 1)
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    process = start("watch", root, "--interval", "0.1", stdout=theirs, stdin=theirs, env=environment)
    os.close(theirs)
    seen = ""

    def wait_for(text: str) -> None:
        nonlocal seen
        deadline = time.monotonic() + 30
        while text not in seen and time.monotonic() < deadline:
            if select.select([ours], [], [], 1.0)[0]:
                with contextlib.suppress(OSError):
                    seen += os.read(ours, 1 << 16).decode()
        assert text in seen, seen

    try:
        wait_for("iteration 1, complete")
        save(root, 2)
        wait_for("iteration 2, complete")
        process.send_signal(signal.SIGINT)
        wait_for("\x1b[?25h")  # the cursor is shown again
        _, err = process.communicate(timeout=30)
        assert (process.returncode, err) == (0, "")
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_commands_that_change_the_root_append_to_its_log(tmp_path: Path) -> None:
    for name in ("with", "without"):
        for iteration in (1, 2, 3):
            save(tmp_path / name, iteration, **({"on_event": EventLog(tmp_path / name)} if name == "with" else {}))
        protocol.release(locate(tmp_path / name))
        assert run("rollback", tmp_path / name, 2).exit_code == 0
        assert run("prune", tmp_path / name, "--keep", 1).exit_code == 0
    assert not (tmp_path / "without" / EVENT_FILE).exists()
    events = [json.loads(line) for line in (tmp_path / "with" / EVENT_FILE).read_text().splitlines()]
    assert [(event["kind"], event["iteration"]) for event in events[9:]] == [("rolled_back", 2), ("pruned", 1)]
    assert "the tracker named 3" in run("watch", tmp_path / "with", "--once").stdout
    assert EVENT_FILE not in [
        one["name"] for one in json.loads(run("inspect", tmp_path / "with", "--json").stdout)["leftovers"]
    ]
