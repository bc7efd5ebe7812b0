"""Staging folders, into which an iteration is written, and the operations that publish it.

    .staging/<iteration>.<generation>.<attempt>   written under that claim, to be renamed to `iteration_<8 digits>`
    .trash/<iteration>.<attempt>                  what had that name before, where names cannot be exchanged
    iteration_<8 digits>/.unfinished              where folders cannot be renamed: written in place by
                                                  `<generation>.<attempt>`

`protocol` and `recovery` decide on the order of the operations.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.commit import filesystem, roots
from reshard.commit.filesystem import UNFINISHED_FILE
from reshard.commit.manifest import TRACKED_FILE
from reshard.commit.roots import PINNED_FILE
from reshard.commit.trash import STAGED_NAME, STAGING_FOLDER, TRASH_FOLDER
from reshard.errors import ReshardError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.commit.session import Claim
    from reshard.storage.location import Location
    from reshard.storage.store import Abilities

_log = logging.getLogger("reshard")


@dataclass(frozen=True)
class StagedName:
    """The fields in the name of a staging folder.

    Attributes:
        iteration: the iteration that is saved.
        generation: generation of the claim under which it is saved.
        attempt_id: 32 hex digits, unique to this attempt.
    """

    iteration: int
    generation: int
    attempt_id: str

    def __str__(self) -> str:
        return f"{self.iteration}.{self.generation}.{self.attempt_id}"

    @classmethod
    def parse(cls, name: str) -> StagedName | None:
        """Parse a name; None if it is not that of a staging folder.

        Example:
            >>> StagedName.parse("400.3." + "0" * 32).generation, StagedName.parse("share-0")
            (3, None)
        """
        match = STAGED_NAME.fullmatch(name)
        return cls(int(match[1]), int(match[2]), match[3]) if match else None


def abilities(claim: Claim) -> Abilities:
    """The abilities of the root's store, tested once for each claim in `.staging`, under the lock.

    Raises:
        StorageError: the system failed with an error other than a missing ability.
    """
    if claim.abilities is None:
        place = claim.root / STAGING_FOLDER
        claim.abilities = place.store.abilities(place.path)
        if not claim.abilities.renames_folders:
            _log.warning(
                "%s: the store cannot rename folders: iterations are written in place, and one that is saved again is "
                "gone before the new one is complete",
                claim.root,
            )
    return claim.abilities


# -- operations of both publication and recovery


def sync(folders: Sequence[Location], *, durable: bool) -> None:
    """Make the entries of folders durable, if `durable`. Raises StorageError."""
    for folder in folders if durable else ():
        filesystem.sync(folder)


def move_tracker(root: Location, iteration: int, *, durable: bool, unsynced: Sequence[Location] = ()) -> None:
    """Make the tracker name an iteration, after its folder is durable. `mark_tracked` must follow: it syncs the root.

    Args:
        root: the checkpoint root.
        iteration: the iteration.
        durable: sync the content of the tracker.
        unsynced: folders that are synced with it, before the tracker names the iteration.

    Raises:
        StorageError: the system failed; the tracker is unchanged.
    """
    filesystem.announce("move the tracker")
    roots.write_tracker(root, iteration, durable=durable, unsynced=unsynced)


def mark_tracked(folder: Location, *, durable: bool, unsynced: Sequence[Location] = ()) -> None:
    """Mark an iteration that the tracker has named. A lower tracker then shows that a run resumed from an older one.

    Args:
        folder: the iteration folder, in its root.
        durable: sync the mark and the tracker.
        unsynced: files of the root that are synced with them.

    Raises:
        StorageError: the system failed.
    """
    made = [folder / TRACKED_FILE]
    try:
        filesystem.make_file(made[0], durable=False)
    except FileExistsError:
        made = []
    if durable:
        filesystem.sync_together([*made, *unsynced], [folder, folder.parent])


def put_back(root: Location, staging: Location, *, durable: bool) -> bool:
    """Move an old iteration back from the trash, if the staged one that should replace it was not published.

    Args:
        root: the checkpoint root.
        staging: the staging folder of the new iteration.
        durable: sync the folders whose entries change.

    Returns:
        Whether there was one.

    Raises:
        StorageError: the system failed.
    """
    name = StagedName.parse(staging.name)
    assert name is not None
    folder = root / roots.iteration_folder_name(name.iteration)
    old = root / TRASH_FOLDER / f"{name.iteration}.{name.attempt_id}"
    if folder.exists() or not old.exists() or not staging.exists():
        return False
    filesystem.rename(old, folder)
    sync([root, root / TRASH_FOLDER], durable=durable)
    return True


# -- in place


def make_in_place(folder: Location, owner: str, mode: int, *, durable: bool) -> None:
    """Create an empty final folder with its marker. Old entries but a pin are removed, the manifest first.

    Args:
        folder: the final folder.
        owner: `<generation>.<attempt>`, the content of the marker.
        mode: permission bits, less the umask.
        durable: sync the changes.

    Raises:
        StorageError: the system failed.
    """
    filesystem.make_folder(folder, mode, durable=durable)
    filesystem.remove_file(folder / UNFINISHED_FILE)
    filesystem.make_file(folder / UNFINISHED_FILE, owner.encode(), durable=durable)
    filesystem.remove_folder(folder, durable=durable, keep=(UNFINISHED_FILE, PINNED_FILE))


def unfinished(folder: Location) -> str | None:
    """The writer of an unfinished folder: `<generation>.<attempt>`, or `removed`; None: the folder is finished."""
    try:
        return (folder / UNFINISHED_FILE).read_small(128).decode("ascii", "replace")
    except FileNotFoundError:
        return None
    except ReshardError:
        return ""
