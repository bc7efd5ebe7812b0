"""The files that describe a save, which are written beside its shards by a thread."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.write.saves import SQUARE, no_claim_outlives_a_test

import reshard
from reshard.commit import protocol
from reshard.errors import (
    StorageError,
)
from reshard.formats.checkpoint2 import iteration as iterations
from reshard.formats.checkpoint2.metadata import write_metadata
from reshard.formats.checkpoint2.save import Checkpoint2Prepared

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from reshard.commit.attempts import Attempt

__all__ = ["no_claim_outlives_a_test"]  # a fixture

pytestmark = pytest.mark.disk


def join_descriptions() -> None:
    for thread in threading.enumerate():
        if thread.name == "reshard descriptions":
            thread.join(60)
            assert not thread.is_alive()


@pytest.mark.parametrize("many", [1, 1 << 30])
def test_descriptions_beside_the_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many: int) -> None:
    monkeypatch.setattr(iterations, "_MANY_LINES", many)
    threads: list[str] = []

    def slow(*args: Any, **options: Any) -> object:
        threads.append(threading.current_thread().name)
        time.sleep(0.2)  # the shards are written, or have failed, by then
        return write_metadata(*args, **options)

    monkeypatch.setattr(iterations, "write_metadata", slow)
    arrays = {f"w{i}": np.arange(i + 1) for i in range(5)}
    reshard.save(tmp_path / "root", 1, arrays)
    with reshard.open(tmp_path / "root") as checkpoint:
        loaded = checkpoint.load()
    assert all(np.array_equal(loaded[name], array) for name, array in arrays.items())
    assert (threads == ["reshard descriptions"]) == (many == 1)

    def fail(*_: object, **__: object) -> object:
        raise StorageError("the disk is full")

    with monkeypatch.context() as patch:  # what the thread writes does not outlive the attempt
        patch.setattr(Checkpoint2Prepared, "write", fail)
        with pytest.raises(StorageError, match="the disk is full"):
            reshard.save(tmp_path / "root", 2, arrays)
        join_descriptions()
        assert not list((tmp_path / "root" / ".staging").iterdir())
    monkeypatch.setattr(iterations, "write_metadata", fail)
    with pytest.raises(StorageError, match="the disk is full"):
        reshard.save(tmp_path / "root", 2, arrays)
    assert not list((tmp_path / "root" / ".staging").iterdir())


class FailedError(Exception):
    pass


def fail_at_once(*_: object, **__: object) -> object:
    raise FailedError


def failing_save(root: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint2Prepared, "write", fail_at_once)
        reshard.save(root, 2, {"w": SQUARE})


def failing_conversion(root: Path) -> None:
    reshard.convert(root, root.with_name("target"), to="checkpoint2", progress=fail_at_once)


@pytest.mark.parametrize("act", [failing_save, failing_conversion])
@pytest.mark.parametrize("moment", ["start", "stop", "twice"])
def test_an_interrupt_does_not_leave_the_thread_of_the_descriptions_alone(
    moment: str, act: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends before the staging folder is removed, unless the user insists."""
    root = tmp_path / "root"
    reshard.save(root, 1, {"w": SQUARE})
    is_writing, states = threading.Event(), []
    start, end, abandon = threading.Thread.start, iterations.Descriptions._end, protocol.abandon
    begin = iterations.Descriptions.start
    waits, is_abandoned = threading.Semaphore(0), threading.Event()

    def slow(*args: Any, **options: Any) -> object:
        is_writing.set()
        for _ in range({"start": 0, "stop": 1, "twice": 2}[moment]):
            waits.acquire(timeout=60)
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)
        if moment == "twice":
            is_abandoned.wait(60)
        else:
            time.sleep(0.1)  # for the save to go on, if it does not wait
        try:
            return write_metadata(*args, **options)
        finally:
            is_writing.clear()

    def watched_begin(descriptions: iterations.Descriptions) -> None:
        begin(descriptions)
        assert is_writing.wait(60)  # else the save fails before the thread begins, which then writes nothing

    def watched_end(descriptions: iterations.Descriptions) -> None:
        waits.release()
        end(descriptions)

    def interrupted_start(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "reshard descriptions":
            is_writing.wait(60)
            raise KeyboardInterrupt

    def watched_abandon(attempt: Attempt) -> None:
        states.append(is_writing.is_set())
        abandon(attempt)
        is_abandoned.set()

    monkeypatch.setattr(iterations, "_MANY_LINES", 1)
    monkeypatch.setattr(iterations, "write_metadata", slow)
    monkeypatch.setattr(iterations.Descriptions, "start", watched_begin)
    monkeypatch.setattr(iterations.Descriptions, "_end", watched_end)
    monkeypatch.setattr(protocol, "abandon", watched_abandon)
    if moment == "start":
        monkeypatch.setattr(threading.Thread, "start", interrupted_start)
    with pytest.raises(KeyboardInterrupt):
        act(root)
    join_descriptions()
    assert states == [moment == "twice"]
    assert not list((root / ".staging").iterdir())
    assert not (tmp_path / "target").exists()
    with reshard.open(root) as checkpoint:
        assert checkpoint.iteration == 1


def test_descriptions_without_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread starts while the interpreter ends."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "reshard descriptions":
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(thread)

    monkeypatch.setattr(iterations, "_MANY_LINES", 1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        reshard.save(tmp_path, 1, {"w": SQUARE})
    with reshard.open(tmp_path) as checkpoint:
        assert np.array_equal(checkpoint.read("w"), SQUARE)
