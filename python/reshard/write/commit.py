"""Publishing folders: written under a staging name, synced, then renamed.

Knows folders and renames, no format. A folder that is replaced is exchanged with the new one in one step, so that a
reader finds the old or the new at every instant; only then is the old one removed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from typing import TYPE_CHECKING

from reshard import _core
from reshard.errors import DestinationExistsError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["published_folder", "sync_folder"]


def sync_folder(path: Path) -> None:
    """Make the entries of a folder durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def published_folder(
    target: Path,
    staging_parent: Path,
    *,
    replace: bool,
    durable: bool,
    mode: int,
    keep: Callable[[Path], bool] = lambda _: False,
) -> Iterator[Path]:
    """A staging folder that becomes `target` when the block ends well, and is removed when it does not.

    Args:
        target: the name to be.
        staging_parent: where the staging folder is made: on the same mount as `target`.
        replace: whether an existing `target` is exchanged for the new folder; else it must not exist or be empty.
        durable: sync the new folder, and the folders whose entries change, in that order.
        mode: permission bits of the folder, less the umask.
        keep: which entries of a replaced folder are carried over into the new one.

    Raises:
        DestinationExistsError: `target` appeared meanwhile.
        StorageError: a rename or a sync failed; `target` is as it was.
    """
    staging = staging_parent / f".{target.name}.{secrets.token_hex(8)}.staging"
    with _as_storage_error(target):
        staging_parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir(mode=mode)
    try:
        yield staging
        with _as_storage_error(target):
            _publish(staging, target, replace=replace, durable=durable, keep=keep)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _publish(staging: Path, target: Path, *, replace: bool, durable: bool, keep: Callable[[Path], bool]) -> None:
    kept = [entry for entry in target.iterdir() if keep(entry)] if replace and target.exists() else []
    for entry in kept:
        if entry.is_symlink():
            (staging / entry.name).symlink_to(entry.readlink())
        elif entry.is_file():
            # A second name for the same file: at no instant is it missing from `target`.
            os.link(entry, staging / entry.name, follow_symlinks=False)
    if durable:
        sync_folder(staging)
    if not (replace and target.exists()):
        with contextlib.suppress(FileNotFoundError, OSError):
            target.rmdir()  # an empty folder may stand at the name
        try:
            _core.rename(str(staging), str(target), exchange=False)
        except FileExistsError as error:
            raise DestinationExistsError(f"{target} appeared while it was being written", path=str(target)) from error
    else:
        _core.rename(str(staging), str(target), exchange=True)
        # What cannot have two names moves over now; a crash before this leaves it in the staging folder, not lost.
        for entry in [e for e in staging.iterdir() if e.is_dir() and not e.is_symlink() and keep(e)]:
            entry.rename(target / entry.name)
        if durable:
            sync_folder(target)
        shutil.rmtree(staging)
    if durable:
        for folder in dict.fromkeys((target.parent, staging.parent)):
            if folder.exists():
                sync_folder(folder)


@contextlib.contextmanager
def _as_storage_error(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, DestinationExistsError | StorageError):
            raise
        raise StorageError(f"cannot publish {target}: {error}", path=str(target), errno=error.errno) from error
