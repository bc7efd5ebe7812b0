"""Publication of files and new folders: written under a staging name, synced, then renamed in one step.

It knows folders and renames, no format. A failure before the rename leaves the destination as it was. A folder that
exists is filled, see `filling`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from typing import TYPE_CHECKING

from reshard.commit import filesystem
from reshard.errors import DestinationExistsError, ReshardError, StorageError
from reshard.storage.changes import LOCK_FILE, remove_folder, try_lock
from reshard.storage.names import as_start
from reshard.storage.store import NO_FOLDER_RENAME
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterator

    from reshard.storage.location import Location


SHARED_PREFIX = "share-"
"""In the name of a folder in which the shares of a conversion write."""
_RECORD = re.compile(rf"{SHARED_PREFIX}[0-9]+\.json")
_PUBLISHED = "published"

_log = logging.getLogger("reshard")


def sync_tree(folder: Location) -> None:
    """Make the entries of a folder, and of the folders below it, durable; the lowest first. Raises StorageError."""
    for entry in folder.entries():
        if entry.kind == "folder":
            sync_tree(folder / entry.name)
    filesystem.sync(folder)


def remove_staging(folder: Location) -> None:
    """Remove a folder with everything in it. Never raises: what cannot be removed stays."""
    with contextlib.suppress(StorageError):
        filesystem.remove_folder(folder, durable=False)


def remove_links(folder: Location, target: Location) -> bool:
    """Remove a folder of shares if each file in it is one of the destination, which was published by links to them.

    So a process leaves it that is killed between the rename and the removal. Files of shares that are still written are
    in no destination, and a process that publishes has locked the folder.

    Args:
        folder: the folder of the shares.
        target: the destination, a file or a folder; what is hidden in it is not compared.

    Returns:
        Whether it was removed. What cannot be read or removed stays.
    """
    try:
        with try_lock(folder) as is_ours:
            files = _files_of(folder) if is_ours else set()
            if not files or not files <= _files_of(target, hidden=False):
                return False
            remove_folder(folder)
    except (ReshardError, OSError) as error:
        _log.debug("%s stays: %s", folder, error)
        return False
    _log.info("%s is removed: its conversion was killed after it had published %s", folder, target)
    return True


def _files_of(place: Location, *, hidden: bool = True) -> set[Hashable]:
    """Identity and size of each file, without the records of shares and the file of a lock."""
    found = place.stat()
    if found.kind == "file":
        return {(found.identity, found.n_bytes)}
    files: set[Hashable] = set()
    for name in place.names() if found.kind == "folder" else ():
        if (hidden or not name.startswith(".")) and not _RECORD.fullmatch(name) and name != LOCK_FILE:
            files |= _files_of(place / name, hidden=hidden)
    return files


@contextlib.contextmanager
def made_folder(path: Location, *, mode: int, durable: bool) -> Iterator[None]:
    """A folder to write into; if the block fails, those that had to be made for it are removed again.

    Args:
        path: the folder; it and those above it are made if they are missing.
        mode: permission bits of what is made, less the umask.
        durable: sync the names of what was made once the block ends without an error.

    Raises:
        StorageError: a folder cannot be made or synced.
    """
    missing = []
    for folder in (path, *path.parents):
        if folder.kind(follow_links=True) is not None:
            break
        missing.append(folder)
    made: list[Location] = []
    try:
        for folder in reversed(missing):
            made.append(folder)  # first: an interrupt may come right after it is made
            folder.store.make_folder(folder.path, mode)
        yield
        if durable:
            for folder in reversed(made):
                filesystem.sync(folder.parent)
    except BaseException:
        for folder in reversed(made):
            with contextlib.suppress(StorageError):
                folder.store.remove_empty_folder(folder.path)
        raise


@contextlib.contextmanager
def published_file(
    target: Location, *, replace: bool, durable: bool, keep_mode: bool = True, inside: Location | None = None
) -> Iterator[Location]:
    """A name beside `target` for a file to write; it becomes `target` when the block ends, and is removed if it fails.

    Args:
        target: the name to be, in a folder that exists.
        replace: whether a file that exists is replaced.
        durable: sync the folder. The file itself must have been synced by the code that wrote it.
        keep_mode: the new file gets the permission bits of the file that it replaces.
        inside: as for `published_folder`.

    Raises:
        DestinationExistsError: `target` was made meanwhile.
        StorageError: the rename or the sync failed.
    """
    staging = _staging_of(target, inside)
    try:
        if inside is not None and staging.exists():
            staging.remove_file()
        yield staging
        if replace and keep_mode and target.kind() == "file":
            staging.store.set_mode(staging.path, target.stat().mode)
        _rename(staging, target, replace=replace)
    except BaseException:
        with contextlib.suppress(StorageError):
            staging.remove_file()
        raise
    if durable:
        filesystem.sync(target.parent)


@contextlib.contextmanager
def published_folder(
    target: Location, *, durable: bool, mode: int, subfolders: Collection[str] = (), inside: Location | None = None
) -> Iterator[Location]:
    """A staging folder that becomes `target` when the block ends, and is removed if it fails.

    Args:
        target: the name to be, which must not exist, in a folder that does.
        durable: sync the new folder, and the one in which it appears, in that order.
        mode: permission bits of the folders, less the umask.
        subfolders: names of the folders in it, which are made empty.
        inside: a folder that this process has locked, in which the new one is made. What a process that was killed has
            left there is removed. None: it has a name of its own beside `target`.

    Raises:
        DestinationExistsError: `target` was made meanwhile.
        StorageError: a rename or a sync failed. `target` is as it was, unless the message says otherwise.
    """
    staging = _staging_of(target, inside)
    try:
        if inside is not None and staging.exists():
            remove_staging(staging)
        staging.store.make_folder(staging.path, mode)
        for name in subfolders:
            staging.store.make_folder(str(staging / name), mode)
        yield staging
        if durable:
            sync_tree(staging)
        _rename(staging, target, replace=False)
    except BaseException:
        remove_staging(staging)
        raise
    if durable:
        filesystem.sync(target)
        filesystem.sync(target.parent)


def _staging_of(target: Location, inside: Location | None) -> Location:
    """A new name beside `target`. What has such a name already is logged and not changed: its writer may be alive."""
    if inside is not None:
        return inside / _PUBLISHED
    own = re.compile(rf"\.{re.escape(as_start(target.name))}\.[0-9a-f]{{16}}\.staging")
    with contextlib.suppress(StorageError):  # a folder in which files can be created need not be readable
        for name in filesystem.names(target.parent):
            if own.fullmatch(name):
                left = show(str(target.with_name(name)))
                _log.warning("%s is left by a conversion that did not end: remove it if none is running", left)
    return target.with_name(f".{as_start(target.name)}.{os.urandom(8).hex()}.staging")


def _rename(staging: Location, target: Location, *, replace: bool) -> None:
    try:
        staging.store.rename(staging.path, target.path, replace=replace)
    except FileExistsError as error:
        raise DestinationExistsError(
            f"{show(str(target))} was made while it was being written", path=str(target)
        ) from error
    except StorageError as error:
        if error.errno in NO_FOLDER_RENAME and staging.is_folder():
            error.hint = (
                f"if this file system cannot rename folders, make {show(str(target))} first: a folder that exists is "
                "filled file by file; or write to another file system, and copy the folder"
            )
        raise
