"""`.trash`: folders that are being removed. A folder is renamed into it, which is one step, and is removed there.

It knows names and the lock of readers; `protocol` and `retention` decide what is removed. Where folders cannot be
renamed there is no trash: a folder is removed in place, the manifest first, and is marked as unfinished before. So is
an old iteration if the disk is so full that the trash cannot be made.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from typing import TYPE_CHECKING

from reshard.commit import filesystem
from reshard.commit.filesystem import MANIFEST_FILE, UNFINISHED_FILE
from reshard.errors import ReshardError, StorageError
from reshard.storage.store import NO_FOLDER_RENAME, NO_SPACE, LockHeldError
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reshard.storage.location import Location

STAGING_FOLDER = ".staging"
TRASH_FOLDER = ".trash"
REMOVED = "removed"  # in the mark of an unfinished folder, where others have the name of who writes

STAGED_NAME = re.compile(r"([0-9]{1,18})\.([0-9]{1,18})\.([0-9a-f]{32})")
"""The name of a staging folder: iteration, generation and attempt, see `staging.StagedName`."""

_ENTRY = re.compile(r"[0-9]{1,18}\.[0-9a-f]{32}")


def discard(root: Location, folder: Location, iteration: int, attempt_id: str | None = None, *, durable: bool) -> None:
    """Rename a folder, or what else has the name, into the trash.

    Args:
        root: the checkpoint root.
        folder: what is discarded.
        iteration: its iteration.
        attempt_id: 32 hex digits for its name there; by default random ones.
        durable: sync the folders whose entries change.

    Raises:
        StorageError: the system failed; `folder` is where it was, unless a sync failed.
    """
    trash = root / TRASH_FOLDER
    try:
        filesystem.rename(folder, trash / f"{iteration}.{attempt_id or os.urandom(16).hex()}")
    except FileExistsError:
        filesystem.rename(folder, trash / f"{iteration}.{os.urandom(16).hex()}")
    if durable:
        filesystem.sync(trash)
        filesystem.sync(folder.parent)


def set_aside(root: Location) -> dict[int, str]:
    """Old iterations that were moved into the trash for new ones that are still in `.staging`.

    A process that ends between the two renames leaves them there. `staging.put_back` moves them back.

    Returns:
        The paths relative to the root, by iteration.

    Raises:
        StorageError: a folder cannot be listed.
    """
    found = {}
    for name in filesystem.names(root / STAGING_FOLDER):
        match = STAGED_NAME.fullmatch(name)
        if match is not None and (root / TRASH_FOLDER / f"{match[1]}.{match[3]}").is_folder():
            found[int(match[1])] = f"{TRASH_FOLDER}/{match[1]}.{match[3]}"
    return found


def remove(root: Location, folder: Location, iteration: int, *, durable: bool) -> None:
    """Remove a folder from the root: into the trash, or in place where folders cannot be renamed.

    Args:
        root: the checkpoint root.
        folder: what is removed.
        iteration: its iteration.
        durable: sync every change.

    Raises:
        StorageError: the system failed; in place, a part may be left, marked as unfinished.
    """
    if take_out(root, folder, iteration, durable=durable):
        filesystem.remove_folder(folder, durable=durable)


def take_out(root: Location, folder: Location, iteration: int, *, durable: bool) -> bool:
    """Do what makes a folder no checkpoint: rename it into the trash, or mark it and remove its manifest.

    Args:
        root: the checkpoint root.
        folder: what is removed.
        iteration: its iteration.
        durable: sync every change.

    Returns:
        Whether the folder is still there, and the caller removes it. No file in it may be open then.

    Raises:
        StorageError: the system failed.
    """
    try:
        if not (root.store.renames_by_copy(root.path) and folder.kind() == "folder"):
            discard(root, folder, iteration, durable=durable)
            return False
    except StorageError as error:
        if error.errno not in NO_FOLDER_RENAME or not folder.is_folder():
            raise
    mark_removed(folder, durable=durable)
    return True


def make(root: Location, *, durable: bool) -> bool:
    """Make the trash unless there is one. Returns whether there is: not if the disk is full. Raises StorageError."""
    try:
        filesystem.make_folder(root / TRASH_FOLDER, 0o777, durable=durable)
    except StorageError as error:
        if error.errno not in NO_SPACE:
            raise
        return False
    return True


def mark_removed(folder: Location, *, durable: bool) -> None:
    """Begin to remove a folder without the trash: mark it as unfinished, then remove the manifest.

    On a full disk the mark may be impossible. Then only a folder with a manifest is removed: what this package wrote
    does not count once its manifest is gone, but what is left after a crash has to be removed by hand.

    Args:
        folder: what is removed.
        durable: sync every change.

    Raises:
        StorageError: the system failed.
    """
    try:
        filesystem.make_file(folder / UNFINISHED_FILE, REMOVED.encode(), durable=durable)
    except FileExistsError:
        pass
    except StorageError as error:
        if error.errno not in NO_SPACE or not (folder / MANIFEST_FILE).exists():
            raise
    _drop_manifest(folder, durable=durable)


def _drop_manifest(folder: Location, *, durable: bool) -> None:
    if (folder / MANIFEST_FILE).exists():
        filesystem.remove_file(folder / MANIFEST_FILE)
        if durable:
            filesystem.sync(folder)


def empty(root: Location, *, durable: bool) -> list[str]:
    """Remove what is in the trash.

    What is still being read stays, and so do iterations that `set_aside` returns and what this package did not put
    there.

    Returns:
        What could not be removed, and why.
    """
    trash = root / TRASH_FOLDER
    warnings = []
    try:
        kept = set(set_aside(root).values())
        entries = [name for name in filesystem.names(trash) if _ENTRY.fullmatch(name)]
    except StorageError as error:
        return [error.message]
    for name in entries:
        if f"{TRASH_FOLDER}/{name}" in kept:
            continue
        try:
            if remove_manifest(trash / name, durable=durable):
                filesystem.remove_folder(trash / name, durable=durable)
            else:
                warnings.append(f"{show(str(trash / name))} is still being read: it is removed another time")
        except StorageError as error:
            warnings.append(f"{show(str(trash / name))} is left over: {error.message}")
    return warnings


def remove_manifest(folder: Location, *, durable: bool) -> bool:
    """Remove the manifest of a folder unless a process reads the folder. After that no process opens it for reading.

    The rest is removed without the lock. On NFS and FUSE, a file that is removed while it is open gets another name in
    its folder, and the folder cannot be removed.

    Args:
        folder: a folder that is being removed.
        durable: sync the folder.

    Returns:
        Whether no process reads it.

    Raises:
        StorageError: the system failed.
    """
    if folder.kind() != "folder":  # a link in its place is not followed
        return True
    with reader_held_off(folder) as is_free:
        if is_free:
            _drop_manifest(folder, durable=durable)
    return is_free


@contextlib.contextmanager
def reader_held_off(folder: Location) -> Iterator[bool]:
    """Keep others from opening a checkpoint for reading while the block lasts.

    Advice: where there is no manifest, or the store has no such locks, no reader is seen.

    Yields:
        Whether no process reads it.
    """
    try:
        lock = (folder / MANIFEST_FILE).lock()
    except LockHeldError:
        yield False
        return
    except ReshardError:
        yield True
        return
    with lock:
        yield lock.errno != errno.EACCES
