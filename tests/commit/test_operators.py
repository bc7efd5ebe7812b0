"""Commands that root runs in the checkpoint root of another user: that user can resume and save afterwards."""

from __future__ import annotations

import errno
import fcntl
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.helpers import small_saves
from tests.helpers.unprivileged import nobody, reachable

import reshard
from reshard.commit import protocol
from reshard.errors import StorageError
from reshard.storage.local import LOCAL
from reshard.storage.location import locate

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["reachable"]  # a fixture

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")

TRAINER = 65534  # who `nobody` is


@pytest.fixture
def root(reachable: Path, tmp_path: Path) -> Iterator[Path]:
    """A root of the trainer with iterations 100, 200 and 300."""
    for iteration in (1, 1, 2):  # imports what is imported when it is needed, where the trainer cannot read
        reshard.save(tmp_path / "warm", iteration, {"w": np.zeros(3)}, keep=1)
    reshard.load(tmp_path / "warm")
    os.chown(reachable, TRAINER, TRAINER)
    save(reachable / "run", 100, 200, 300)
    yield reachable / "run"
    protocol.release()


def save(root: Path, *iterations: int, keep: int | None = None) -> None:
    """As the trainer, in a process that ends."""
    with nobody():
        for iteration in iterations:
            content = {"w": np.full(99, float(iteration))}
            report = reshard.save(root, iteration, content, keep=keep, commit={"rollback": True})
            assert report.warnings == ()
        protocol.release()


def resumed(root: Path) -> int | None:
    with nobody():
        return reshard.load(root).iteration


def owners(root: Path) -> set[int]:
    return {path.lstat().st_uid for path in (root, *root.rglob("*"))}


@pytest.mark.parametrize("umask", [0o022, 0o077], ids=oct)
def test_a_run_goes_on_after_commands_of_root(umask: int, root: Path) -> None:
    tracker = root / "latest_checkpointed_iteration.txt"
    mode = tracker.stat().st_mode
    old = os.umask(umask)
    try:
        reshard.rollback(root, 200)
        reshard.prune(root, 1)
    finally:
        os.umask(old)
    assert (root / ".trash").exists()
    assert owners(root) == {TRAINER}
    assert tracker.stat().st_mode == mode
    assert resumed(root) == 200
    save(root, 201, 202, keep=1)
    assert not small_saves.debris(root)
    assert resumed(root) == 202


def test_a_copy_without_hidden_files(root: Path) -> None:
    (root / ".lock").unlink()
    reshard.prune(root, 2)
    assert owners(root) == {TRAINER}
    save(root, 301)


def test_a_lock_file_that_root_made_before(root: Path) -> None:
    os.chown(root / ".lock", 0, 0)
    (root / ".lock").chmod(0o644)
    save(root, 301)
    with nobody(), locate(root / ".lock").lock(make=True) as lock:
        assert lock.is_real


def test_a_lock_that_needs_a_file_open_for_writing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS. That the claims alone separate writers must not follow from the owner of a file."""

    def flock(*_: object) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    os.chown(root / ".lock", 0, 0)
    monkeypatch.setattr(fcntl, "flock", flock)
    with nobody(), pytest.raises(StorageError, match=r"opening .*\.lock`: Permission denied"):
        reshard.save(root, 301, {"w": np.zeros(3)})


def test_a_lock_in_a_folder_of_another_user(root: Path) -> None:
    for path in (root, root / ".lock"):
        os.chown(path, 0, 0)
    with nobody(), pytest.raises(StorageError, match=r"opening .*\.lock`: Permission denied"):
        reshard.prune(root, 1)


def test_a_file_that_is_replaced_is_no_more_readable_than_requested(root: Path) -> None:
    path = root / "note"
    path.write_text("old")
    path.chmod(0o666)
    LOCAL.replace(str(path), b"new", 0o600, durable=False)
    assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (TRAINER, 0o600)


def test_what_root_has_written_before_is_not_given_away(root: Path) -> None:
    kept = root.parent.parent / f"{root.parent.name}.kept"
    kept.touch()
    try:
        os.link(kept, root / "linked")
        (root / "full").write_text("a secret\n")
        for name in ("linked", "full"):
            LOCAL.append_line(str(root / name), b"x\n", durable=False)
            assert (root / name).stat().st_uid == 0
    finally:
        kept.unlink()


def test_where_root_may_not_give_files_away(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fchown(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "fchown", fchown)
    reshard.rollback(root, 200)
    assert reshard.load(root).iteration == 200
