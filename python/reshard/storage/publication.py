"""Publishing files and new folders: written under a staging name, synced, then renamed in one step.

Knows folders and renames, no format. Whatever fails before the rename leaves the destination as it was. A folder that
exists is filled, see `filling`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from reshard import _core
from reshard.errors import DestinationExistsError, StorageError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

__all__ = ["as_storage_error", "made_folder", "published_file", "published_folder", "sync_folder", "sync_tree"]


def sync_folder(path: Path) -> None:
    """Make the entries of a folder durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(path: Path) -> None:
    """Make the entries of a folder, and of the folders below it, durable; the lowest first."""
    for folder, _, _ in os.walk(path, topdown=False):
        sync_folder(Path(folder))


@contextlib.contextmanager
def made_folder(path: Path, *, mode: int, durable: bool) -> Iterator[None]:
    """A folder to write into; if the block fails, those that had to be made for it are removed again.

    Args:
        path: the folder; it and those above it are made if they are missing.
        mode: permission bits of what is made, less the umask.
        durable: sync the names of what was made once the block ends well.

    Raises:
        StorageError: a folder cannot be made or synced.
    """
    missing = [path, *path.parents]
    missing = missing[: next((i for i, folder in enumerate(missing) if folder.exists()), len(missing))]
    made: list[Path] = []
    try:
        with as_storage_error("make", path):
            for folder in reversed(missing):
                folder.mkdir(mode=mode, exist_ok=True)
                made.append(folder)
        yield
        if durable:
            with as_storage_error("sync", path):
                for folder in reversed(made):
                    sync_folder(folder.parent)
    except BaseException:
        for folder in reversed(made):
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


@contextlib.contextmanager
def published_file(target: Path, *, replace: bool, durable: bool, keep_mode: bool = True) -> Iterator[Path]:
    """A name beside `target` for a file to write; it becomes `target` when the block ends well, else it is removed.

    Args:
        target: the name to be, in a folder that is there.
        replace: whether a file that is there is replaced.
        durable: sync the folder. The file itself must have been synced by who wrote it.
        keep_mode: a file that is replaced passes on its permission bits.

    Raises:
        DestinationExistsError: `target` appeared meanwhile.
        StorageError: the rename or the sync failed.
    """
    staging = target.parent / f".{target.name[:200]}.{secrets.token_hex(8)}.staging"
    try:
        yield staging
        with as_storage_error("publish", target):
            if replace and keep_mode and target.is_file() and not target.is_symlink():
                staging.chmod(stat.S_IMODE(target.stat().st_mode))
            _rename(staging, target, replace=replace)
    except BaseException:
        with contextlib.suppress(OSError):
            staging.unlink()
        raise
    if durable:
        with as_storage_error("sync", target):
            sync_folder(target.parent)


@contextlib.contextmanager
def published_folder(target: Path, *, durable: bool, mode: int, subfolders: Collection[str] = ()) -> Iterator[Path]:
    """A staging folder that becomes `target` when the block ends well, and is removed if it does not.

    Args:
        target: the name to be, which must not exist, in a folder that does.
        durable: sync the new folder, and the one in which it appears, in that order.
        mode: permission bits of the folders, less the umask.
        subfolders: the folders in it, which are made empty.

    Raises:
        DestinationExistsError: `target` appeared meanwhile.
        StorageError: a rename or a sync failed. `target` is as it was, unless the message says otherwise.
    """
    staging = target.parent / f".{target.name[:200]}.{secrets.token_hex(8)}.staging"
    with as_storage_error("write", target):
        staging.mkdir(mode=mode)
    try:
        with as_storage_error("write", target):
            for name in subfolders:
                (staging / name).mkdir(mode=mode)
        yield staging
        with as_storage_error("publish", target):
            if durable:
                sync_tree(staging)
            _rename(staging, target, replace=False)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    if durable:
        with as_storage_error("sync", target):
            sync_folder(target)
            sync_folder(target.parent)


def _rename(staging: Path, target: Path, *, replace: bool) -> None:
    if replace:
        staging.replace(target)
        return
    try:
        _core.rename(str(staging), str(target), exchange=False)
    except FileExistsError as error:
        raise DestinationExistsError(f"{target} appeared while it was being written", path=str(target)) from error


@contextlib.contextmanager
def as_storage_error(doing: str, target: Path) -> Iterator[None]:
    """Tell a failure of the system as what was being done to which file or folder."""
    try:
        yield
    except OSError as error:
        if isinstance(error, DestinationExistsError | StorageError):
            raise
        raise StorageError(f"cannot {doing} {target}: {error}", path=str(target), errno=error.errno) from error
