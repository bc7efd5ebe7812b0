"""Where an iteration is written before it has its name, what the file system can do for it, and the steps between.

    .staging/<iteration>.<epoch>.<attempt>     written under the claim `epoch`, to be renamed to `iteration_<8 digits>`
    .trash/<iteration>.<attempt>               what had that name and made room for it, where names cannot be exchanged
    iteration_<8 digits>/.unfinished           where folders cannot be renamed: written in place by `<epoch>.<attempt>`

The order of the steps, and when they are taken, is known to `protocol` and `recovery`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.errors import ReshardError, StorageError
from reshard.formats.checkpoint2 import names as checkpoint2
from reshard.formats.manifest import PINNED_FILE, TRACKED_FILE
from reshard.storage import filesystem
from reshard.storage.filesystem import UNFINISHED_FILE
from reshard.storage.small_files import read_small_file
from reshard.storage.trash import TRASH_FOLDER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from reshard.storage.claims import Claim

__all__ = [
    "PROBE_PREFIX",
    "STAGING_FOLDER",
    "Abilities",
    "StagedName",
    "abilities",
    "make_in_place",
    "mark_tracked",
    "move_tracker",
    "put_back",
    "sync",
    "unfinished",
]

STAGING_FOLDER = ".staging"
PROBE_PREFIX = ".probe."

_STAGED = re.compile(r"([0-9]{1,18})\.([0-9]{1,18})\.([0-9a-f]{32})")
_log = logging.getLogger("reshard")


@dataclass(frozen=True)
class StagedName:
    """What the name of a staging folder says.

    Attributes:
        iteration: what is saved.
        epoch: the claim under which it is saved.
        attempt: 32 hex digits that no other attempt has.
    """

    iteration: int
    epoch: int
    attempt: str

    def __str__(self) -> str:
        return f"{self.iteration}.{self.epoch}.{self.attempt}"

    @classmethod
    def parse(cls, name: str) -> StagedName | None:
        """What a name says; None if it is none of ours.

        Example:
            >>> StagedName.parse("400.3." + "0" * 32).epoch, StagedName.parse("share-0")
            (3, None)
        """
        match = _STAGED.fullmatch(name)
        return cls(int(match[1]), int(match[2]), match[3]) if match else None


@dataclass(frozen=True)
class Abilities:
    """What the file system of a root can do.

    Attributes:
        renames_folders: give a folder another name, in another folder.
        exchanges: exchange two names in one step.
    """

    renames_folders: bool
    exchanges: bool


_found: weakref.WeakKeyDictionary[Claim, Abilities] = weakref.WeakKeyDictionary()


def abilities(claim: Claim) -> Abilities:
    """What the file system of the claimed root can do, tried out once a claim, in `.staging`, under the lock.

    Raises:
        StorageError: the system failed in another way than by not being able to.
    """
    if claim not in _found:
        _found[claim] = _probe(claim.root / STAGING_FOLDER)
    return _found[claim]


def _probe(staging: Path) -> Abilities:
    folder = staging / f"{PROBE_PREFIX}{secrets.token_hex(8)}"
    try:
        with filesystem.failing("probing", folder):
            (folder / "one" / "inner").mkdir(parents=True)
            (folder / "one" / "inner" / "file").touch()
        renames = _is_able(lambda: filesystem.rename(folder / "one" / "inner", folder / "two"))
        exchanges = False
        if renames:
            with filesystem.failing("probing", folder):
                # Where names cannot be exchanged the core makes do with three renames, the first one to `one.old`, and
                # a crash between them would lose both names. With something in the way it cannot.
                (folder / "one.old" / "in the way").mkdir(parents=True)
            with contextlib.suppress(StorageError):
                filesystem.exchange(folder / "one", folder / "two")
                exchanges = True
    finally:
        with contextlib.suppress(ReshardError):
            filesystem.remove_folder(folder, durable=False)
    if not renames:
        _log.warning(
            "%s: the file system cannot rename folders: iterations are written in place, and one that is saved again "
            "is gone before the new one is whole",
            staging.parent,
        )
    return Abilities(renames, exchanges)


def _is_able(act: Callable[[], None]) -> bool:
    try:
        act()
    except StorageError as error:
        if error.errno in filesystem.NO_FOLDER_RENAME:
            return False
        raise
    return True


# -- steps that publishing and recovering share


def sync(folders: Sequence[Path], *, durable: bool) -> None:
    """Make the entries of folders durable, if anything is to be. Raises StorageError."""
    for folder in folders if durable else ():
        filesystem.sync(folder)


def move_tracker(root: Path, iteration: int, *, durable: bool) -> None:
    """Let the tracker name an iteration, whose folder is durable. Raises StorageError."""
    filesystem.announce("move the tracker")
    checkpoint2.write_tracker(root, iteration, durable=durable)


def mark_tracked(folder: Path, *, durable: bool) -> None:
    """Mark an iteration that the tracker has named: a lower tracker means from here on that somebody went back."""
    with contextlib.suppress(FileExistsError):
        filesystem.make_file(folder / TRACKED_FILE, durable=durable)


def put_back(root: Path, staging: Path, *, durable: bool) -> bool:
    """Put back the iteration that made room for a staged one which never took its place.

    Returns:
        Whether there was one.

    Raises:
        StorageError: the system failed.
    """
    name = StagedName.parse(staging.name)
    assert name is not None
    folder = root / checkpoint2.iteration_folder_name(name.iteration)
    old = root / TRASH_FOLDER / f"{name.iteration}.{name.attempt}"
    if os.path.lexists(folder) or not os.path.lexists(old) or not os.path.lexists(staging):
        return False
    filesystem.rename(old, folder)
    sync([root, root / TRASH_FOLDER], durable=durable)
    return True


# -- in place


def make_in_place(folder: Path, owner: str, mode: int, *, durable: bool) -> None:
    """An empty final folder, marked: what was in it goes, the manifest first. A pin stays. Raises StorageError."""
    filesystem.make_folder(folder, mode, durable=durable)
    filesystem.remove_file(folder / UNFINISHED_FILE)
    filesystem.make_file(folder / UNFINISHED_FILE, owner.encode(), durable=durable)
    filesystem.remove_folder(folder, durable=durable, keep=(UNFINISHED_FILE, PINNED_FILE))


def unfinished(folder: Path) -> str | None:
    """Who writes in an unfinished folder: `<epoch>.<attempt>`, or that it is being removed; None: it is finished."""
    try:
        return read_small_file(folder / UNFINISHED_FILE, 128).decode("ascii", "replace")
    except FileNotFoundError:
        return None
    except ReshardError:
        return ""
