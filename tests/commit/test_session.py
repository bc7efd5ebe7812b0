"""What a process knows of a root between two calls, and who of it writes into the root."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch

import reshard
from reshard.commit import claims, protocol
from reshard.commit import session as session_module
from reshard.commit.session import PassedOver, find_session, forget_all, session_of
from reshard.errors import ClaimedError
from reshard.storage.location import locate
from reshard.torch import Checkpointer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _no_sessions() -> Iterator[None]:
    yield
    protocol.release()
    forget_all()


def test_one_session_a_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    session = session_of(locate(tmp_path / "run"))
    assert session_of(locate(tmp_path / "link")) is session
    assert find_session(locate(tmp_path / "none")) is None


def test_a_folder_that_was_moved_or_replaced_begins_anew(tmp_path: Path) -> None:
    """Another folder may get the inode of one that was removed: nothing that was known of that holds for it."""
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
        session = session_of(locate(tmp_path / name))
        assert session.resumed is None
        assert session.of(dict) == {}
        session.resumed = PassedOver(1, (2,))
        session.of(dict)["known"] = True
        shutil.rmtree(tmp_path / name)
    (tmp_path / "old").mkdir()
    session_of(locate(tmp_path / "old")).resumed = PassedOver(1, (2,))
    (tmp_path / "old").rename(tmp_path / "new")
    assert session_of(locate(tmp_path / "new")).resumed is None


def test_a_heartbeat_ends_before_its_file_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would touch another file that gets the same file descriptor."""
    monkeypatch.setattr(claims, "_BEAT_SECONDS", 0.01)
    protocol.claim_root(locate(tmp_path / "run"), durable=False)
    forget_all()
    others = [tmp_path / f"other {number}" for number in range(50)]
    with contextlib.ExitStack() as opened:
        for other in others:
            opened.enter_context(other.open("w"))
        before = [other.stat().st_mtime_ns for other in others]
        time.sleep(0.1)
        assert [other.stat().st_mtime_ns for other in others] == before


def test_a_heartbeat_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file stays open: no other file gets the descriptor that it may still touch."""
    monkeypatch.setattr(session_module, "_END_SECONDS", 0.01)
    root = locate(tmp_path / "run")
    protocol.claim_root(root, durable=False)
    claim = session_of(root).claim
    assert claim is not None
    end = threading.Event()
    claim.stop.set()
    claim.beat.join()
    claim.beat = threading.Thread(target=end.wait, daemon=True)
    claim.beat.start()
    forget_all()
    claim.file.beat()
    end.set()
    claim.beat.join()
    claim.file.close()


def test_a_fork_has_no_claim_of_its_parent(tmp_path: Path) -> None:
    root = locate(tmp_path / "run")
    protocol.claim_root(root, durable=False)
    child = os.fork()
    if child == 0:
        os._exit(0 if claims.held(root) is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert claims.held(root) is not None


def resumed(root: Path, *, step: int = 0) -> Checkpointer:
    checkpointer = Checkpointer(root, save_every=1, signals=(), commit={"durable": False})
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    assert checkpointer.resume(model=model, optimizer=optimizer).initial_step == step
    return checkpointer


@pytest.mark.slow(disk=False)
def test_two_checkpointers_of_a_process_do_not_save_into_one_root(tmp_path: Path) -> None:
    first = resumed(tmp_path / "run")
    first.step(1)
    first.wait()
    (tmp_path / "link").symlink_to("run")
    for path in ("run", "link"):
        with pytest.raises(
            ClaimedError, match="is claimed by another Checkpointer of this process, which is not closed"
        ):
            resumed(tmp_path / path, step=1)
    first.step(2)  # the first one goes on
    first.wait()
    assert reshard.open(tmp_path / "run").iteration == 2
    other = resumed(tmp_path / "other")  # another root
    other.close()
    first.close()
    second = resumed(tmp_path / "run", step=2)
    second.step(3)
    second.close()
    assert reshard.open(tmp_path / "run").iteration == 3


def test_a_dropped_checkpointer_owns_nothing(tmp_path: Path) -> None:
    """As in a notebook, in which a cell that makes a Checkpointer runs again."""
    gc.disable()
    try:
        circle: list[object] = [resumed(tmp_path / "run")]
        circle.append(circle)  # as a frame of an error that is kept makes one
        del circle
        again = resumed(tmp_path / "run")
    finally:
        gc.enable()
    again.close()
