"""Publishing into a folder that exists: files are written into a hidden folder inside it, and then moved up.

The folder itself is never replaced: its inode, mode, owner and mount stay, and so do all entries that are not replaced.
Knows files and renames, no format. A file system cannot publish several names in one step, so the order of the moves
decides what a reader finds in between, and after a crash: the old files, the new files, or files without the one that
makes them a checkpoint (`commits`). It never finds some of the old files together with some of the new ones.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import stat
from typing import TYPE_CHECKING

from reshard import _core
from reshard.errors import DestinationExistsError
from reshard.storage.publication import as_storage_error, sync_folder, sync_tree

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path

__all__ = ["filled_folder", "is_staging", "staging_name"]

_STAGING = re.compile(r"\.reshard\.[0-9a-z-]{1,64}\.staging")
_REPLACED = ".replaced"  # in the staging folder: what is removed once the new files are published

_log = logging.getLogger("reshard")


def staging_name(token: str) -> str:
    """The name of a staging folder inside a destination.

    Args:
        token: lower-case letters, digits and dashes.

    Example:
        >>> staging_name("0f"), is_staging(staging_name("0f"))
        ('.reshard.0f.staging', True)
    """
    return f".reshard.{token}.staging"


def is_staging(name: str) -> bool:
    """Whether an entry is such a folder. It is no content of the destination."""
    return _STAGING.fullmatch(name) is not None


@contextlib.contextmanager
def filled_folder(
    target: Path,
    *,
    replaces: Callable[[Path], bool] | None,
    commits: Sequence[str],
    durable: bool,
    mode: int,
    keep_modes: bool = True,
    subfolders: Collection[str] = (),
) -> Iterator[Path]:
    """A staging folder in `target`, whose entries become entries of `target` when the block ends well.

    When the block or a move raises, the moves that were made are undone and `target` holds what it held.

    Args:
        target: a folder that exists.
        replaces: which entries of `target` the new ones replace; None: `target` must be empty.
        commits: names of entries that make the others a checkpoint; they are moved last, in this order.
        durable: sync the staging folder before the moves, and `target` after them. The files themselves must have been
            synced by who wrote them.
        mode: permission bits of the folders that are made, less the umask.
        keep_modes: a file that replaces one of the same name gets the permission bits of that one.
        subfolders: folders in the staging folder, which are made empty.

    Raises:
        DestinationExistsError: an entry that is not replaced appeared in `target`.
        StorageError: a folder cannot be made, moved or synced.
    """
    staging = target / staging_name(secrets.token_hex(8))
    with as_storage_error("write", target):
        staging.mkdir(mode=mode)
    moves = _Moves(staging / _REPLACED)
    try:
        with as_storage_error("write", target):
            for name in subfolders:
                (staging / name).mkdir(mode=mode)
        yield staging
        with as_storage_error("publish", target):
            _publish(staging, target, moves, replaces, commits, durable=durable, keep_modes=keep_modes)
    except BaseException:
        if moves.undo():
            shutil.rmtree(staging, ignore_errors=True)
        else:
            _log.error("%s: what was replaced there could not be moved back, and lies in %s", target, staging)
        raise
    try:
        shutil.rmtree(staging)
    except OSError as error:
        _log.warning("%s is written, but %s could not be removed: %s", target, staging, error)


def _publish(
    staging: Path,
    target: Path,
    moves: _Moves,
    replaces: Callable[[Path], bool] | None,
    commits: Sequence[str],
    *,
    durable: bool,
    keep_modes: bool,
) -> None:
    """Move the new entries up and the replaced ones away, in an order of which every part can be read or is refused."""
    new = {entry.name for entry in staging.iterdir()}
    there = {entry.name for entry in target.iterdir() if not is_staging(entry.name)}
    old = {name for name in there if replaces(target / name)} if replaces is not None else set()
    appeared = min(there - old if replaces is None else new & there - old, default=None)
    if appeared is not None:
        raise DestinationExistsError(
            f"{target / appeared} appeared while the files beside it were being written", path=str(target / appeared)
        )
    if keep_modes:
        for name in new & old:
            _copy_mode(target / name, staging / name)
    (staging / _REPLACED).mkdir()
    if durable:
        sync_tree(staging)
    last = [name for name in commits if name in new]
    # Parts are counted from 0 or 1. While the first one is missing no reader takes the others for the whole.
    data = sorted(new - set(last), key=_by_number, reverse=True)
    first_away = [name for name in commits if name in old]
    away = [*first_away, *sorted(old - set(first_away), key=_by_number)]
    if set(data) & old and not old == new == set(data[:1]):
        # Names of the old checkpoint are names of the new one: all of the old one goes before any of the new comes.
        for name in away:
            moves.move(target / name, staging / _REPLACED / name)
        away = []
        if durable:
            sync_folder(target)
    for names in (data, last):
        for name in names:
            moves.move(staging / name, target / name)
        if durable:
            sync_folder(target)
    for name in away:
        if name not in new:
            moves.move(target / name, staging / _REPLACED / name)
    if durable:
        sync_folder(target)


class _Moves:
    """Renames that can be undone: each is recorded before it is made, with the inode by which it is recognised."""

    def __init__(self, replaced: Path) -> None:
        self._replaced = replaced
        self._made: list[tuple[Path, Path, int]] = []

    def move(self, source: Path, target: Path) -> None:
        """Rename; a file that is at `target` is replaced in one step, and can be put back."""
        inode = source.lstat().st_ino
        if not os.path.lexists(target):
            self._made.append((source, target, inode))
            _core.rename(str(source), str(target), exchange=False)
            return
        kept = self._replaced / target.name
        try:
            os.link(target, kept, follow_symlinks=False)
        except OSError:  # a folder, or a file system without second names
            self._made.append((source, target, inode))
            _core.rename(str(source), str(target), exchange=True)
        else:
            self._made.append((kept, target, inode))
            source.replace(target)

    def undo(self) -> bool:
        """Rename all back, the last one first; whether everything is where it was."""
        is_undone = True
        for source, target, inode in reversed(self._made):
            try:
                if os.path.lexists(target) and target.lstat().st_ino == inode:
                    _core.rename(str(target), str(source), exchange=os.path.lexists(source))
            except OSError:
                is_undone = False
        return is_undone


def _copy_mode(old: Path, new: Path) -> None:
    """Give a file, or a folder and the files in it, the permission bits of those that it replaces."""
    found, made = old.lstat().st_mode, new.lstat().st_mode
    if stat.S_IFMT(found) != stat.S_IFMT(made) or stat.S_ISLNK(found):
        return
    new.chmod(stat.S_IMODE(found))
    for entry in new.iterdir() if stat.S_ISDIR(made) else ():
        if os.path.lexists(old / entry.name):
            _copy_mode(old / entry.name, entry)


def _by_number(name: str) -> tuple[list[object], str]:
    """A sort key in which runs of digits compare as numbers."""
    parts = re.split(r"([0-9]+)", name)
    return [int(part) if n % 2 else part for n, part in enumerate(parts)], name
