"""The steps of which saving, recovering and deleting consist: one change of the file system each, by a small function.

A sequence of them is safe if it may end after any one of them. So that tests can end it there, every step announces
itself to `_step` first, which does nothing otherwise. Nothing here knows what a checkpoint is, but for one thing: where
a folder is removed, the file that makes it count goes first, and the mark that it does not count goes last.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from typing import TYPE_CHECKING

from reshard import _core
from reshard.errors import ReshardError, StorageError
from reshard.formats.manifest import MANIFEST_FILE
from reshard.storage.small_files import close_read, fsync_folder
from reshard.words import show

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

__all__ = [
    "NO_FOLDER_RENAME",
    "UNFINISHED_FILE",
    "announce",
    "exchange",
    "failing",
    "make_file",
    "make_folder",
    "names",
    "remove_file",
    "remove_folder",
    "rename",
    "sync",
]

UNFINISHED_FILE = ".unfinished"

# What file systems answer that cannot rename folders, or not between folders.
NO_FOLDER_RENAME = frozenset((errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM))


def _step(name: str) -> None:
    """Called before each step with what it does; a crash test puts a kill in its place."""


def announce(name: str) -> None:
    """Announce a step that another module takes."""
    _step(name)


@contextlib.contextmanager
def failing(doing: str, path: Path) -> Iterator[None]:
    """Errors of the system become a StorageError that says what was being done.

    Raises:
        StorageError: the block raised an OSError; errors of this package pass.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, ReshardError):
            raise
        raise StorageError(
            f"{doing} {show(str(path))}: {error.strerror or error}", path=str(path), errno=error.errno
        ) from error


def names(folder: Path) -> list[str]:
    """The names in a folder, sorted; none if there is no such folder.

    Raises:
        StorageError: it cannot be listed.
    """
    try:
        with failing("listing", folder):
            return sorted(os.listdir(folder))  # noqa: PTH208  names are wanted, not paths
    except StorageError as error:
        if error.errno == errno.ENOENT:
            return []
        raise


def sync(folder: Path) -> None:
    """Make the entries of a folder durable. Raises StorageError; after that nothing in it counts as durable."""
    _step(f"sync {folder.name}")
    fsync_folder(folder)


def make_folder(path: Path, mode: int, *, durable: bool) -> None:
    """A folder, where there is none yet, and its name durable.

    Raises:
        StorageError: something else is there, a link for example, or the system failed.
    """
    with failing("making", path):
        try:
            found = path.lstat().st_mode
        except FileNotFoundError:
            _step(f"make {path.name}")
            path.mkdir(mode, exist_ok=True)
            if durable:
                sync(path.parent)
        else:
            if not stat.S_ISDIR(found):
                raise NotADirectoryError(errno.ENOTDIR, "it is a link or a file, expected a folder")


def make_file(path: Path, data: bytes = b"", mode: int = 0o666, *, durable: bool) -> None:
    """A small file that must not exist. Not atomic: for files whose name alone says everything, or says it by a lock.

    Raises:
        FileExistsError: it is there.
        StorageError: the system failed; the file is removed again if that can be done.
    """
    _step(f"make {path.name}")
    try:
        with failing("making", path):
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    except StorageError as error:
        if error.errno == errno.EEXIST:
            raise FileExistsError(errno.EEXIST, "it is there", str(path)) from error
        raise
    try:
        with failing("writing", path):
            _write(handle, data)
            if durable:
                _step(f"sync {path.name}")
                os.fsync(handle)
            # A network file system tells here that it could not keep what was written. After that there is no handle.
            open_handle, handle = handle, -1
            os.close(open_handle)
    except BaseException:
        # After a failed sync the pages may count as clean: the file is dropped, never synced a second time.
        with contextlib.suppress(OSError):
            path.unlink()
        if handle >= 0:
            close_read(handle)
        raise
    if durable:
        sync(path.parent)


def _write(handle: int, data: bytes) -> None:
    """Write all of `data`, however little of it the system takes at a time. Raises OSError."""
    while data:
        data = data[os.write(handle, data) :]


def rename(source: Path, target: Path) -> None:
    """Give a file or folder a name that is free.

    Where the system cannot insist on that by itself, the core looks before it renames. A folder is safe all the same:
    a rename onto one that is not empty is refused everywhere.

    Raises:
        FileExistsError: the name is taken.
        StorageError: the system failed.
    """
    _step(f"rename {source.name} to {target.name}")
    try:
        with failing(f"renaming {show(str(source))} to", target):
            _core.rename(str(source), str(target), exchange=False)
    except StorageError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise FileExistsError(errno.EEXIST, "it is there", str(target)) from error
        raise


def exchange(one: Path, other: Path) -> None:
    """Exchange two names in one step; only where the file system is known to be able to. Raises StorageError."""
    _step(f"exchange {one.name} and {other.name}")
    with failing(f"exchanging {show(str(one))} and", other):
        _core.rename(str(one), str(other), exchange=True)


def remove_file(path: Path) -> None:
    """Remove a file or a link; one that is gone already is fine. Raises StorageError."""
    _step(f"remove {path.name}")
    with failing("removing", path):
        path.unlink(missing_ok=True)


def remove_folder(path: Path, *, durable: bool = True, keep: Collection[str] = ()) -> None:
    """Remove a folder with everything in it, the manifest first, so that what is left at any time counts for nothing.

    By handles: no link in it or in its place is followed, it is removed itself. What is gone already is fine.

    Args:
        path: the folder.
        durable: make it durable that the manifest is gone before anything else goes.
        keep: names of what stays, and with it the folder.

    Raises:
        StorageError: the system failed; a part may be left.
    """
    with failing("removing", path), contextlib.ExitStack() as stack:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        parent = os.open(path.parent, flags)
        stack.callback(os.close, parent)
        try:
            folder = os.open(path.name, flags | os.O_NOFOLLOW, dir_fd=parent)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
            os.unlink(path.name, dir_fd=parent)
            return
        stack.callback(os.close, folder)
        _step(f"remove {MANIFEST_FILE} of {path.name}")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(MANIFEST_FILE, dir_fd=folder)
            if durable:
                os.fsync(folder)
        _step(f"remove {path.name}")
        for name in sorted(os.listdir(folder), key=UNFINISHED_FILE.__eq__):  # noqa: PTH208  of a handle
            if name not in keep:
                _remove(name, folder)
        if not keep:
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(path.name, dir_fd=parent)


def _remove(name: str, folder: int) -> None:
    """Remove an entry of an open folder, whatever it is."""
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.EPERM):
            raise
        shutil.rmtree(name, dir_fd=folder)  # by handles too, where there are such, as on Linux
