"""Changes of local files and folders that need no commit protocol: of a conversion, a demo, a strategy folder.

Names, copies, permission bits and temporary folders. Nothing here syncs unless it says so. The steps of a save, which
crash tests stop at, are in `filesystem`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import filecmp
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from reshard.errors import ReshardError, StorageError
from reshard.storage.local import close_read
from reshard.storage.location import locate
from reshard.storage.store import failing
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Iterator


LOCK_FILE = ".reshard.lock.staging"
"""The file in a locked folder, which counts as no content of it."""

_BLOCK_BYTES = 1 << 20


def make_folders(
    path: str | os.PathLike[str], mode: int = 0o777, *, inside: str | os.PathLike[str] | None = None
) -> None:
    """Make a folder and those above it that are missing; one that is there stays as it is.

    Args:
        path: the folder.
        mode: permission bits of what is made, less the umask.
        inside: a folder above it, which is not made.

    Raises:
        StorageError: the system failed.
    """
    with failing("making", path):
        folder = Path(path)
        missing = [one for one in (folder, *folder.parents) if not one.exists()]
        if inside is not None:
            missing = [one for one in missing if Path(inside) in one.parents]
        for one in (*reversed(missing[1:]), folder):  # `path` itself always: a file there is an error
            one.mkdir(mode=mode, exist_ok=True)


def remove_file(path: str | os.PathLike[str]) -> bool:
    """Remove a file or a link. Never raises: returns whether it was removed."""
    try:
        Path(path).unlink()
    except OSError:
        return False
    return True


def enter_folder(path: str | os.PathLike[str]) -> bool:
    """Make a folder that of relative paths in this process. Never raises: returns whether it is."""
    try:
        os.chdir(path)
    except OSError:
        return False
    return True


def remove_folder(path: str | os.PathLike[str]) -> None:
    """Remove a folder with everything in it. Never raises: what cannot be removed stays."""
    shutil.rmtree(path, ignore_errors=True)


def replace_link(path: str | os.PathLike[str], target: str) -> None:
    """Make a symbolic link, or give the link that is there another target, in one step. Nothing is followed.

    Args:
        path: the link.
        target: what it names, relative to its folder.

    Raises:
        StorageError: something other than a link has that name, or the system failed.
    """
    link = Path(path)
    with failing("linking", path):
        if link.is_symlink() or not os.path.lexists(link):
            if link.is_symlink() and str(link.readlink()) == target:
                return
            beside = link.with_name(f".{link.name}.{os.urandom(4).hex()}")
            beside.symlink_to(target)
            try:
                beside.rename(link)
            except OSError:
                beside.unlink(missing_ok=True)
                raise
            return
    raise StorageError(f"{show(str(link))} is not a link, and stays as it is", path=str(link))


def set_mode(path: str | os.PathLike[str], mode: int) -> None:
    """Set the permission bits of a file or folder. Raises StorageError."""
    with failing("setting the permissions of", path):
        Path(path).chmod(mode)


def link_or_move(source: os.PathLike[str], target: os.PathLike[str]) -> None:
    """Give a file a second name; on a file system without hard links it moves.

    Args:
        source: the file; a link is not followed.
        target: the other name, which is free.

    Raises:
        StorageError: neither is possible.
    """
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        with failing("moving", source):
            Path(source).rename(target)


def copy_file(source: os.PathLike[str], target: os.PathLike[str], mode: int, *, durable: bool) -> None:
    """Copy a regular file, or an object of a bucket, into a local file.

    Args:
        source: the file; a link is refused.
        target: its copy, which must not exist.
        mode: permission bits of the copy, less the umask.
        durable: sync the copy, not the folder it is in.

    Raises:
        StorageError: `source` is not a regular file, or the system failed.
    """
    origin = locate(source)
    if not origin.is_local:
        with failing("copying", source), _opened_new(target, mode) as copy:
            copy.writelines(origin.pieces())
            copy.flush()
            if durable:
                os.fsync(copy.fileno())
        return
    with failing("copying", source):
        read = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(read, "rb") as content:  # noqa: PTH123  of a handle
            if not stat.S_ISREG(os.fstat(read).st_mode):
                raise StorageError(f"{show(str(source))} is not a regular file any more", path=os.fspath(source))
            with _opened_new(target, mode) as copy:
                shutil.copyfileobj(content, copy, 1 << 20)
                copy.flush()
                if durable:
                    os.fsync(copy.fileno())


def _opened_new(target: os.PathLike[str], mode: int) -> BinaryIO:
    write = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    return open(write, "wb")  # noqa: PTH123  of a handle, which the caller closes


def has_same_content(path: os.PathLike[str], other: os.PathLike[str]) -> bool:
    """Whether `other` is a regular file, not a link, with the content of the file `path`. Never raises."""
    one, two = locate(path), locate(other)
    if not (one.is_local and two.is_local):
        try:
            with one.open(follow_links=True) as first, two.open() as second:
                while block := first.read(_BLOCK_BYTES):
                    if second.read(_BLOCK_BYTES) != block:
                        return False
                return not second.read(1)
        except ReshardError:
            return False
    try:
        return stat.S_ISREG(os.lstat(other).st_mode) and filecmp.cmp(path, other, shallow=False)
    except OSError:
        return False


@contextlib.contextmanager
def try_lock(folder: str | os.PathLike[str], *, waits: bool = False) -> Iterator[bool]:
    """Lock a folder, and a file in it: network file systems such as NFS lock a folder within one host only.

    The file is removed at the end.

    Args:
        folder: the folder.
        waits: whether to wait while another process has the lock.

    Yields:
        Whether it is locked; not if it does not exist, another process has the lock, or it was removed meanwhile.

    Raises:
        StorageError: the system failed.
    """
    how, is_ours = fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB), False
    with contextlib.ExitStack() as opened:
        try:
            own = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            opened.callback(close_read, own)
            fcntl.flock(own, how)
            held: int | None = None
            while not is_ours:
                file = os.open(LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=own)
                opened.callback(close_read, file)
                # Opened again: the process that had the lock has removed the file.
                is_ours = held is not None and os.path.sameopenfile(file, held)
                if not is_ours:
                    _lock_file(file, how)
                    held = file
            opened.callback(_remove_lock, own)
            is_ours = _is_at(folder, own)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE, errno.EWOULDBLOCK):
                raise StorageError(
                    f"locking {show(str(folder))}: {error.strerror}", path=str(folder), errno=error.errno
                ) from error
            is_ours = False
        yield is_ours


def _lock_file(handle: int, how: int) -> None:
    try:
        fcntl.flock(handle, how)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):  # as of Lustre mounted without `flock`
            raise


def _remove_lock(folder: int) -> None:
    with contextlib.suppress(OSError):
        os.unlink(LOCK_FILE, dir_fd=folder)


def _is_at(path: str | os.PathLike[str], handle: int) -> bool:
    """Whether a path names what is open: it was not removed, and perhaps made again."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(handle))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return False
        raise


@contextlib.contextmanager
def temporary_folder(prefix: str, *, inside: str | os.PathLike[str] | None = None) -> Iterator[Path]:
    """A new folder, which is removed when the block ends.

    Args:
        prefix: first part of its name.
        inside: the folder that it is made in; None: the system's temporary folder.

    Raises:
        StorageError: it cannot be made.
    """
    with contextlib.ExitStack() as made:
        try:
            folder = made.enter_context(tempfile.TemporaryDirectory(prefix=prefix, dir=inside))
        except OSError as error:
            raise StorageError(f"making a temporary folder: {error.strerror or error}", errno=error.errno) from error
        yield Path(folder)
