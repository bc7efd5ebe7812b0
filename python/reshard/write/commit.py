"""Publishing folders: written under a staging name, synced, then renamed.

Knows folders and renames, no format. A folder that is replaced is exchanged with the new one in one step, so that a
reader finds the old or the new at every instant; only then is the old one removed. Whatever fails before that step
leaves the destination as it was; what was not written here is never removed but by the success of a replacement.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
from typing import TYPE_CHECKING

from reshard import _core
from reshard.errors import DestinationExistsError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path

__all__ = ["as_storage_error", "made_folder", "published_file", "published_folder", "sync_folder"]

_log = logging.getLogger("reshard")


def sync_folder(path: Path) -> None:
    """Make the entries of a folder durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
def published_file(target: Path, *, replace: bool, durable: bool) -> Iterator[Path]:
    """A name beside `target` for a file to write; it becomes `target` when the block ends well, else it is removed.

    Args:
        target: the name to be, in a folder that is there.
        replace: whether a file that is there is replaced.
        durable: sync the folder. The file itself must have been synced by who wrote it.

    Raises:
        DestinationExistsError: `target` appeared meanwhile.
        StorageError: the rename or the sync failed.
    """
    staging = target.parent / f".{target.name[:200]}.{secrets.token_hex(8)}.staging"
    try:
        yield staging
        with as_storage_error("publish", target):
            _rename(staging, target, replace=replace)
    except BaseException:
        with contextlib.suppress(OSError):
            staging.unlink()
        raise
    if durable:
        with as_storage_error("sync", target):
            sync_folder(target.parent)


@contextlib.contextmanager
def published_folder(
    target: Path,
    staging_parent: Path,
    *,
    replace: bool,
    durable: bool,
    mode: int,
    keep: Callable[[Path], bool] = lambda _: False,
    subfolders: Collection[str] = (),
) -> Iterator[Path]:
    """A staging folder that becomes `target` when the block ends well, and is removed if it does not.

    It is for files, and for folders of files whose names are told.

    Args:
        target: the name to be.
        staging_parent: where the staging folder is made: a folder on the same mount as `target`.
        replace: whether an existing `target` is exchanged for the new folder; else it must not exist or be empty.
        durable: sync the new folder, and the folders whose entries change, in that order.
        mode: permission bits of the folder, less the umask.
        keep: which entries of a replaced folder are carried over into the new one; not those in `subfolders`.
        subfolders: the folders in it, which are made empty.

    Raises:
        DestinationExistsError: `target` appeared meanwhile.
        StorageError: a rename or a sync failed. `target` is as it was, unless the message says otherwise.
    """
    staging = staging_parent / f".{target.name[:200]}.{secrets.token_hex(8)}.staging"
    with as_storage_error("write", target):
        staging.mkdir(mode=mode)
    try:
        with as_storage_error("write", target):
            for name in subfolders:
                (staging / name).mkdir(mode=mode)
        yield staging
        with as_storage_error("publish", target):
            for name in subfolders if durable else ():
                sync_folder(staging / name)
            is_exchanged = _publish(staging, target, replace=replace, durable=durable, keep=keep)
    except BaseException:
        # Only what is written here: after an interrupt in the very exchange this is the old folder, and in it lie the
        # folders that were to move over.
        for name in subfolders:
            _remove_files(staging / name)
        _remove_files(staging)
        raise
    if is_exchanged:
        _remove_replaced(staging, target, keep)
    if durable:
        with as_storage_error("sync", target):
            for folder in dict.fromkeys((target, target.parent, staging_parent)):
                sync_folder(folder)


def _publish(staging: Path, target: Path, *, replace: bool, durable: bool, keep: Callable[[Path], bool]) -> bool:
    """Give the new folder its name; whether `staging` is now the old one."""
    is_exchange = replace and os.path.lexists(target)
    for entry in [entry for entry in target.iterdir() if keep(entry)] if is_exchange else []:
        if entry.is_symlink():
            (staging / entry.name).symlink_to(entry.readlink())
        elif not entry.is_dir():
            # A second name for the same file: at no instant is it missing from `target`.
            os.link(entry, staging / entry.name, follow_symlinks=False)
    if durable:
        sync_folder(staging)
    if not is_exchange:
        with contextlib.suppress(OSError):
            target.rmdir()  # an empty folder may stand at the name
    if is_exchange:
        _core.rename(str(staging), str(target), exchange=True)
    else:
        _rename(staging, target, replace=False)
    return is_exchange


def _rename(staging: Path, target: Path, *, replace: bool) -> None:
    if replace:
        staging.replace(target)
        return
    try:
        _core.rename(str(staging), str(target), exchange=False)
    except FileExistsError as error:
        raise DestinationExistsError(f"{target} appeared while it was being written", path=str(target)) from error


def _remove_replaced(old: Path, target: Path, keep: Callable[[Path], bool]) -> None:
    """Remove the old folder, once the folders in it that are kept have moved over: they cannot have two names."""
    if not old.is_symlink():
        with as_storage_error(f"move what was in the replaced folder, now {old}, to", target):
            for entry in [
                entry for entry in old.iterdir() if entry.is_dir() and not entry.is_symlink() and keep(entry)
            ]:
                _core.rename(str(entry), str(target / entry.name), exchange=False)
    try:
        old.unlink() if old.is_symlink() else shutil.rmtree(old)
    except OSError as error:
        _log.warning("%s is replaced, but what it was remains in %s: %s", target, old, error)


def _remove_files(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for entry in folder.iterdir():
            if entry.is_symlink() or not entry.is_dir():
                entry.unlink()
        folder.rmdir()


@contextlib.contextmanager
def as_storage_error(doing: str, target: Path) -> Iterator[None]:
    """Tell a failure of the system as what was being done to which file or folder."""
    try:
        yield
    except OSError as error:
        if isinstance(error, DestinationExistsError | StorageError):
            raise
        raise StorageError(f"cannot {doing} {target}: {error}", path=str(target), errno=error.errno) from error
