"""The operations of which saving, recovering and deleting consist: one change of a store each, by a small function.

A sequence of them is safe if it may end after any of them. So that tests can end it there, every operation announces
itself to `_step` first, which otherwise does nothing. Nothing here knows what a checkpoint is, except for one thing:
where a folder is removed, the file that makes it count is removed first, and the mark that it does not count last.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from reshard.errors import CheckpointNotFoundError, StorageError
from reshard.storage.store import kind_words
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from reshard.storage.location import Location


MANIFEST_FILE = "manifest.json"
UNFINISHED_FILE = ".unfinished"


def _step(name: str) -> None:
    """Called before each operation with what it does; a crash test puts a kill in its place."""


def announce(name: str) -> None:
    """Announce an operation that another module performs."""
    _step(name)


def names(folder: Location) -> list[str]:
    """The names in a folder, sorted; none if there is no such folder.

    Raises:
        StorageError: it cannot be listed.
    """
    try:
        return folder.names()
    except CheckpointNotFoundError:
        return []


def sync(folder: Location) -> None:
    """Make the entries of a folder durable. Raises StorageError; after that nothing in it counts as durable."""
    _step(f"sync {folder.name}")
    folder.store.sync_folder(folder.path)


def sync_together(files: Sequence[Location], folders: Sequence[Location]) -> None:
    """Make files and the names in folders durable, at the same time.

    Args:
        files: the files.
        folders: one or more folders.

    Raises:
        StorageError: the system failed; after that none of them counts as durable.
    """
    _step(f"sync {' and '.join([one.name for one in (*files, *folders)])}")
    folders[0].store.sync_together([one.path for one in files], [one.path for one in folders])


def make_folder(path: Location, mode: int, *, durable: bool) -> None:
    """Make a folder unless there is one, and make its name durable.

    Args:
        path: the folder.
        mode: permission bits, less the umask.
        durable: sync the folder that it is in.

    Raises:
        StorageError: something else has the name, a link for example, or the system failed.
    """
    try:
        kind = path.stat().kind
    except CheckpointNotFoundError:
        _step(f"make {path.name}")
        path.store.make_folder(path.path, mode)
        if durable:
            sync(path.parent)
    else:
        if kind != "folder":
            raise StorageError(
                f"{show(path.path)} is {kind_words(kind)}, expected a folder",
                path=path.path,
                errno=errno.ENOTDIR,
                hint="move it away, and save again: a save makes this folder",
            )


def make_file(path: Location, data: bytes = b"", *, durable: bool) -> None:
    """Make a small file that must not exist. For files whose name alone has a meaning, or that are read under a lock.

    Args:
        path: the file.
        data: its content. It need not appear in one step with the name.
        durable: sync the file and the folder that it is in.

    Raises:
        FileExistsError: it exists.
        StorageError: the system failed; the file is removed again if that is possible.
    """
    _step(f"make {path.name}")
    path.store.create(path.path, data, durable=durable, announce=_step)
    if durable:
        sync(path.parent)


def replace_file(path: Location, data: bytes, mode: int = 0o666, *, durable: bool) -> None:
    """Write a small file so that readers see the old content or all of the new.

    Args:
        path: the file.
        data: its content.
        mode: permission bits, less the umask.
        durable: sync the file and the folder that it is in.

    Raises:
        StorageError: the system failed; the file is as it was.
    """
    _step(f"write {path.name}")
    path.store.replace(path.path, data, mode, durable=durable)


def replace_after(
    path: Location, data: bytes, mode: int = 0o666, *, files: Sequence[Location] = (), folders: Sequence[Location] = ()
) -> None:
    """Write a small file as `replace_file` does, once its content, other files and the names in folders are durable.

    Args:
        path: the file. Its name becomes durable with its folder.
        data: its content.
        mode: permission bits, less the umask.
        files: files that are not durable yet.
        folders: folders whose names are not.

    Raises:
        StorageError: the system failed; the file is as it was, and none of the others counts as durable.
    """
    _step(f"write {path.name}")
    path.store.replace_after(
        path.path, data, mode, files=[one.path for one in files], folders=[one.path for one in folders]
    )


def rename(source: Location, target: Location) -> None:
    """Give a file or folder a name that is free.

    Raises:
        FileExistsError: the name is taken.
        StorageError: the system failed, or the store cannot rename.
    """
    _step(f"rename {source.name} to {target.name}")
    source.store.rename(source.path, target.path)


def exchange(one: Location, other: Location) -> None:
    """Exchange two names in one step; only where the store is known to be able to. Raises StorageError."""
    _step(f"exchange {one.name} and {other.name}")
    one.store.exchange(one.path, other.path)


def remove_file(path: Location) -> None:
    """Remove a file or a link; no error if there is none. Raises StorageError."""
    _step(f"remove {path.name}")
    path.store.remove_file(path.path)


def remove_folder(path: Location, *, durable: bool = True, keep: Collection[str] = ()) -> None:
    """Remove a folder with everything in it, the manifest first, so that what is left at any time counts for nothing.

    No link in it or in its place is followed: the link is removed. No error if there is none.

    Args:
        path: the folder.
        durable: make it durable that the manifest is gone before anything else goes.
        keep: names of what stays, and with it the folder.

    Raises:
        StorageError: the system failed; a part may be left.
    """
    path.store.remove_folder(
        path.path, first=MANIFEST_FILE, last=UNFINISHED_FILE, keep=keep, durable=durable, announce=_step
    )
