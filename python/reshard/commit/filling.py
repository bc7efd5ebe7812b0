"""Publication into an existing folder: files are written into a hidden subfolder and then moved into the folder.

The folder itself is never replaced: its inode, mode, owner and mount stay, and so do all entries that are not replaced.
This module does not depend on formats. A file system cannot publish several names in one step, so the order of the
moves determines what a reader finds during publication and after a crash: the old files, the new files, or files
without those that identify a checkpoint (`commits`). A reader never finds a mixture of old and new files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from typing import TYPE_CHECKING

from reshard.commit import filesystem
from reshard.commit.publication import remove_staging, sync_tree
from reshard.errors import DestinationExistsError, ReshardError, StorageError
from reshard.storage.changes import try_lock
from reshard.storage.store import failing
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterator, Sequence

    from reshard.storage.location import Location

_STAGING = re.compile(r"\.reshard\.[0-9a-z-]{1,64}\.staging")
_REPLACED = ".replaced"  # in the staging folder: entries that are removed once the new files are published

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
    """Whether an entry is a staging folder, which is not part of the content of the destination."""
    return _STAGING.fullmatch(name) is not None


@contextlib.contextmanager
def filled_folder(
    target: Location,
    *,
    replaces: Callable[[Location], bool] | None,
    commits: Sequence[str],
    durable: bool,
    mode: int,
    keep_modes: bool = True,
    subfolders: Collection[str] = (),
) -> Iterator[Location]:
    """A staging folder in `target`, whose entries are moved to `target` if the block ends without an exception.

    If the block or a move raises, the moves are undone and `target` is unchanged. Of several processes that fill one
    folder, one moves its entries after the other: the files of two are never mixed.

    Args:
        target: an existing folder.
        replaces: returns whether an entry of `target` is replaced; None: `target` must be empty.
        commits: names of entries that identify a checkpoint; they are moved last, in this order.
        durable: sync the staging folder before the moves, and `target` after them. The caller must have synced the
            files themselves.
        mode: permission bits of created folders, less the umask.
        keep_modes: a new file gets the permission bits of the file that it replaces.
        subfolders: empty folders to create in the staging folder.

    Raises:
        DestinationExistsError: an entry that is not replaced appeared in `target`.
        StorageError: a folder cannot be created, moved or synced.
    """
    staging = target / staging_name(os.urandom(8).hex())
    is_undone = True
    try:
        staging.store.make_folder(staging.path, mode)
        for name in subfolders:
            staging.store.make_folder(str(staging / name), mode)
        yield staging
        with failing("publishing", target), try_lock(target, waits=True):
            moves = _Moves(staging / _REPLACED)
            try:
                _publish(staging, target, moves, replaces, commits, durable=durable, keep_modes=keep_modes)
            except BaseException:
                is_undone = moves.undo()
                raise
    except BaseException:
        if is_undone:
            remove_staging(staging)
        else:
            _log.error("%s: what was replaced there could not be moved back, and lies in %s", target, staging)
        raise
    try:
        filesystem.remove_folder(staging, durable=False)
    except StorageError as error:
        _log.warning("%s is written, but %s could not be removed: %s", target, staging, error)


def _publish(
    staging: Location,
    target: Location,
    moves: _Moves,
    replaces: Callable[[Location], bool] | None,
    commits: Sequence[str],
    *,
    durable: bool,
    keep_modes: bool,
) -> None:
    """Move the replaced entries away and the new ones in, so that readers accept or refuse every intermediate state."""
    new = set(staging.names())
    there = {name for name in target.names() if not is_staging(name)}
    old = {name for name in there if replaces(target / name)} if replaces is not None else set()
    appeared = min(there - old if replaces is None else new & there - old, default=None)
    if appeared is not None:
        raise DestinationExistsError(
            f"{show(str(target / appeared))} was made while the files beside it were being written",
            path=str(target / appeared),
        )
    if keep_modes:
        for name in new & old:
            _copy_mode(target / name, staging / name)
    staging.store.make_folder(str(staging / _REPLACED))
    if durable:
        sync_tree(staging)
    last = [name for name in commits if name in new]
    # Parts are counted from 0 or 1. While the first one is missing, no reader accepts the others as complete.
    data = sorted(new - set(last), key=_by_number, reverse=True)
    first_away = [name for name in commits if name in old]
    away = [*first_away, *sorted(old - set(first_away), key=_by_number)]
    if set(data) & old and not old == new == set(data[:1]):
        # The old and new checkpoint have names in common: all old entries are moved before any new one.
        for name in away:
            moves.move(target / name, staging / _REPLACED / name)
        away = []
        if durable:
            filesystem.sync(target)
    for names in (data, last):
        for name in names:
            moves.move(staging / name, target / name)
        if durable:
            filesystem.sync(target)
    for name in away:
        if name not in new:
            moves.move(target / name, staging / _REPLACED / name)
    if durable:
        filesystem.sync(target)


class _Moves:
    """Renames that can be undone: each is recorded before it is done, with the identity of the moved file."""

    def __init__(self, replaced: Location) -> None:
        self._replaced = replaced
        self._made: list[tuple[Location, Location, Hashable]] = []

    def move(self, source: Location, target: Location) -> None:
        """Rename; a file at `target` is replaced in one step, and can be restored."""
        store, identity = source.store, source.stat().identity
        if not target.exists():
            self._made.append((source, target, identity))
            try:
                store.rename(source.path, target.path)
            except FileExistsError as error:
                message = f"{show(str(target))} was made while the files beside it were being written"
                raise DestinationExistsError(message, path=str(target)) from error
            return
        kept = self._replaced / target.name
        try:
            store.link(target.path, kept.path)
        except StorageError:  # a folder, or a file system without hard links
            self._made.append((source, target, identity))
            store.exchange(source.path, target.path)
        else:
            self._made.append((kept, target, identity))
            store.rename(source.path, target.path, replace=True)

    def undo(self) -> bool:
        """Undo all renames, the last one first. Returns whether all were undone."""
        is_undone = True
        for source, target, identity in reversed(self._made):
            try:
                if not target.exists() or target.stat().identity != identity:
                    continue
                if source.exists():
                    source.store.exchange(target.path, source.path)
                else:
                    source.store.rename(target.path, source.path)
            except (ReshardError, OSError):
                is_undone = False
        return is_undone


def _copy_mode(old: Location, new: Location) -> None:
    """Copy permission bits to a file, or to a folder and its files, from those that they replace."""
    found, made = old.stat(), new.stat()
    if found.kind != made.kind or found.kind == "link":
        return
    new.store.set_mode(new.path, found.mode)
    for name in new.names() if made.kind == "folder" else ():
        if (old / name).exists():
            _copy_mode(old / name, new / name)


def _by_number(name: str) -> tuple[list[object], str]:
    """A sort key in which runs of digits compare as numbers."""
    parts = re.split(r"([0-9]+)", name)
    return [int(part) if n % 2 else part for n, part in enumerate(parts)], name
