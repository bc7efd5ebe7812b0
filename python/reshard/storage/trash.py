"""`.trash`: folders on the way out. A folder is renamed into it, which takes it away in one step, and removed there.

Knows names and the lock of readers; what may go is decided elsewhere. Where folders cannot be renamed there is no
trash: a folder is removed in place, the manifest first, and marked before as one that nobody should count on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
from typing import TYPE_CHECKING

from reshard.errors import StorageError
from reshard.formats.manifest import MANIFEST_FILE
from reshard.storage import filesystem
from reshard.storage.filesystem import UNFINISHED_FILE
from reshard.storage.small_files import close_read
from reshard.words import show

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["REMOVED", "TRASH_FOLDER", "discard", "empty", "reader_held_off", "remove"]

TRASH_FOLDER = ".trash"
REMOVED = "removed"  # in the mark of an unfinished folder, where others have the name of who writes

_ENTRY = re.compile(r"[0-9]{1,18}\.[0-9a-f]{32}")


def discard(root: Path, folder: Path, iteration: int, number: str | None = None, *, durable: bool) -> None:
    """Rename a folder, or what else bears the name, into the trash.

    Args:
        root: the checkpoint root.
        folder: what goes.
        iteration: what it was.
        number: 32 hex digits for the name of it there; by default random ones.
        durable: sync the folders whose entries change.

    Raises:
        StorageError: the system failed; `folder` is where it was, unless a sync failed.
    """
    trash = root / TRASH_FOLDER
    try:
        filesystem.rename(folder, trash / f"{iteration}.{number or secrets.token_hex(16)}")
    except FileExistsError:
        filesystem.rename(folder, trash / f"{iteration}.{secrets.token_hex(16)}")
    if durable:
        filesystem.sync(trash)
        filesystem.sync(folder.parent)


def remove(root: Path, folder: Path, iteration: int, *, durable: bool) -> None:
    """Take a folder away for good: into the trash, or in place where folders cannot be renamed.

    Args:
        root: the checkpoint root.
        folder: what goes.
        iteration: what it was.
        durable: sync every change.

    Raises:
        StorageError: the system failed; in place, a part may be left, marked as unfinished.
    """
    try:
        discard(root, folder, iteration, durable=durable)
    except StorageError as error:
        if error.errno not in filesystem.NO_FOLDER_RENAME or not folder.is_dir():
            raise
        with contextlib.suppress(FileExistsError):
            filesystem.make_file(folder / UNFINISHED_FILE, REMOVED.encode(), durable=durable)
        filesystem.remove_folder(folder, durable=durable)


def empty(root: Path, *, durable: bool) -> list[str]:
    """Remove what is in the trash; what is still being read and what nobody here put there stays.

    Returns:
        What could not be removed, and why.
    """
    trash = root / TRASH_FOLDER
    warnings = []
    try:
        entries = [name for name in filesystem.names(trash) if _ENTRY.fullmatch(name)]
    except StorageError as error:
        return [error.message]
    for name in entries:
        with reader_held_off(trash / name) as is_free:
            if not is_free:
                warnings.append(f"{show(str(trash / name))} is still being read: it is removed another time")
                continue
            try:
                filesystem.remove_folder(trash / name, durable=durable)
            except StorageError as error:
                warnings.append(f"{show(str(trash / name))} is left over: {error.message}")
    return warnings


@contextlib.contextmanager
def reader_held_off(folder: Path) -> Iterator[bool]:
    """Whether nobody reads a checkpoint; then nobody begins to for as long as this lasts.

    Advice: where there is no manifest, or the file system has no such locks, nobody is seen to read.
    """
    try:
        handle = os.open(folder / MANIFEST_FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        yield True
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            yield error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
        else:
            try:
                yield True
            finally:
                # Said, not left to the close: a child that was forked meanwhile has the handle open too.
                with contextlib.suppress(OSError):
                    fcntl.flock(handle, fcntl.LOCK_UN)
    finally:
        close_read(handle)
