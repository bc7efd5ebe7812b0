"""Bringing a root in order that a crash or a loss of power left. Idempotent, and itself safe to be killed at any step.

What dead processes left is finished where it is whole, and goes to the trash where it is not. Names that nobody here
gives are not touched, and nothing is deleted: the trash is emptied when something newer has been published.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.errors import ReshardError
from reshard.formats import manifest as manifests
from reshard.formats.checkpoint2 import names as checkpoint2
from reshard.formats.manifest import MANIFEST_FILE, TRACKED_FILE
from reshard.storage import claims, filesystem, staging, trash
from reshard.storage.filesystem import UNFINISHED_FILE
from reshard.storage.staging import PROBE_PREFIX, STAGING_FOLDER, StagedName
from reshard.storage.trash import TRASH_FOLDER

if TYPE_CHECKING:
    from reshard.formats.manifest import Manifest
    from reshard.storage.claims import Claim

__all__ = ["recover", "recover_locked"]

_TRACKER_DEBRIS = re.compile(rf"\.{re.escape(checkpoint2.TRACKER_FILE)}\.[0-9a-f]+\.tmp")
_log = logging.getLogger("reshard")


def recover(
    root: str | os.PathLike[str], *, roll_forward: bool = True, durable: bool = True, takeover: bool = False
) -> list[str]:
    """Bring a root in order, before anything is read from it; the process has claimed it from then on.

    A checkpoint that was sealed but not published, and is newer than the tracker's, is published; one that was
    published but not tracked is tracked; one that had made room for another that never came is put back; all else that
    dead processes left in staging goes to the trash.

    `begin` does the same, but rolls forward only what is below the iteration that is being saved: a run that resumed
    below a staged iteration is making it anew.

    Args:
        root: the checkpoint root. One that does not exist is in order.
        roll_forward: whether unpublished checkpoints are published; otherwise they go to the trash.
        durable: sync every change.
        takeover: overtake another process that has claimed the root and is alive.

    Returns:
        What was done, a line each.

    Raises:
        ClaimedError: another process writes into the root.
        StorageError: the system failed; what is not yet in order is so next time.

    Example:
        >>> recover("there/is/no/such/root")
        []
    """
    root = Path(os.path.abspath(root))  # noqa: PTH100  not resolved: a link stays the user's business
    if not root.is_dir():
        return []
    claim = claims.hold(root, takeover=takeover, durable=durable)
    with claims.locked(root):
        claims.check(claim)
        for name in (STAGING_FOLDER, TRASH_FOLDER):
            filesystem.make_folder(root / name, 0o777, durable=durable)
        return recover_locked(claim, below=None if roll_forward else 0, durable=durable)


def recover_locked(claim: Claim, *, below: int | None, durable: bool) -> list[str]:
    """As `recover`, under the lock, once `.staging` and `.trash` are made; rolls forward only what is below `below`."""
    root, done, staged = claim.root, [], []
    for entry in filesystem.names(root):
        if _TRACKER_DEBRIS.fullmatch(entry):
            filesystem.remove_file(root / entry)
    for entry in filesystem.names(root / STAGING_FOLDER):
        name = StagedName.parse(entry)
        if entry.startswith(PROBE_PREFIX):
            filesystem.remove_folder(root / STAGING_FOLDER / entry, durable=False)
        # A claim is made while no other is alive: whoever wrote under a lower one is dead or was overtaken.
        elif name is not None and name.epoch < claim.epoch:
            staged.append(name)
    for name in sorted(staged, key=lambda one: (one.iteration, one.epoch)):
        folder = root / STAGING_FOLDER / str(name)
        if staging.put_back(root, folder, durable=durable):
            done.append(f"iteration {name.iteration} was being replaced, and is put back")
        if (below is None or name.iteration < below) and _roll_forward(root, name, durable=durable):
            done.append(f"iteration {name.iteration} was saved but not published, and is now")
        else:
            trash.remove(root, folder, name.iteration, durable=durable)
    if not staging.abilities(claim).renames_folders:
        done += _finish_in_place(claim, durable=durable)
    return done + _track(root, below, durable=durable)


def _roll_forward(root: Path, name: StagedName, *, durable: bool) -> bool:
    tracker = checkpoint2.resolve_candidates(root).tracker
    source = root / STAGING_FOLDER / str(name)
    folder = root / checkpoint2.iteration_folder_name(name.iteration)
    if (tracker is not None and name.iteration <= tracker) or os.path.lexists(folder):
        return False
    manifest = _whole(source)
    # After an exchange that was not finished the name is that of the old iteration.
    if manifest is None or manifest.attempt != name.attempt:
        return False
    staging.sync([source], durable=durable)  # the crash may have come before that of the save
    filesystem.rename(source, folder)
    staging.sync([root, source.parent], durable=durable)
    staging.move_tracker(root, name.iteration, durable=durable)
    staging.mark_tracked(folder, durable=durable)
    return True


def _whole(folder: Path) -> Manifest | None:
    """The manifest of a folder, if it proves all but the payload, which is proven whenever it is read; else None."""
    try:
        manifest = manifests.read(folder)
        manifests.check_headers(folder, manifest)
        for name, entry in manifest.files.items():
            if manifests.plain_entry(folder, name) != entry:
                _log.warning("%s was altered, %s is no checkpoint", folder / name, folder)
                return None
    except ReshardError as error:
        _log.info("%s is not whole: %s", folder, error)
        return None
    return manifest


def _finish_in_place(claim: Claim, *, durable: bool) -> list[str]:
    """Where folders cannot be renamed: finish what has its manifest, remove what has none."""
    done = []
    for iteration, name in checkpoint2.list_iterations(claim.root):
        folder = claim.root / name
        owner = staging.unfinished(folder)
        if owner is None or owner.startswith(f"{claim.epoch}."):
            continue
        if _whole(folder) is None:
            filesystem.remove_folder(folder, durable=durable)
            done.append(f"iteration {iteration} was being written or removed, and is removed")
        else:
            filesystem.remove_file(folder / UNFINISHED_FILE)
            staging.sync([folder], durable=durable)
    return done


def _track(root: Path, below: int | None, *, durable: bool) -> list[str]:
    """Finish the last step of a publication: the tracker, and the mark that it has named the iteration."""
    candidates = checkpoint2.resolve_candidates(root)
    tracker = candidates.tracker
    for iteration, name in sorted(candidates.folders, reverse=True):
        folder = root / name
        if os.path.lexists(folder / TRACKED_FILE) or not os.path.lexists(folder / MANIFEST_FILE):
            continue
        if iteration == tracker:
            staging.mark_tracked(folder, durable=durable)
        elif (tracker is None or iteration > tracker) and (below is None or iteration < below):
            manifest = _whole(folder)
            # Saved after another tracker than this, it was left behind when somebody went back.
            if manifest is not None and manifest.previous_tracker == tracker:
                staging.move_tracker(root, iteration, durable=durable)
                staging.mark_tracked(folder, durable=durable)
                return [f"iteration {iteration} was published but not tracked, and is now"]
    return []
