"""Recovery of a root after a crash or a power failure. It is idempotent and may itself be killed at any operation.

Complete folders of dead processes are published, and incomplete ones are moved to the trash. Names that this package
does not create are not changed, and nothing is deleted: the trash is emptied after the next publication.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from reshard.commit import claims, filesystem, roots, staging, trash
from reshard.commit import manifest as manifests
from reshard.commit.filesystem import MANIFEST_FILE, UNFINISHED_FILE
from reshard.commit.manifest import TRACKED_FILE
from reshard.commit.publication import SHARED_PREFIX, remove_links
from reshard.commit.staging import StagedName
from reshard.commit.trash import STAGING_FOLDER, TRASH_FOLDER
from reshard.errors import ReshardError
from reshard.storage.store import PROBE_PREFIX

if TYPE_CHECKING:
    from reshard.commit.manifest import Manifest
    from reshard.commit.roots import Candidates
    from reshard.commit.session import Claim
    from reshard.storage.location import Location
    from reshard.storage.store import Entry

_TRACKER_DEBRIS = re.compile(rf"\.{re.escape(roots.TRACKER_FILE)}\.[0-9a-f]+\.tmp")
_log = logging.getLogger("reshard")


def recover(root: Location, *, roll_forward: bool = True, durable: bool = True, takeover: bool = False) -> list[str]:
    """See `protocol.recover`."""
    place = root
    if not place.is_folder():
        return []
    claim = claims.hold(place, takeover=takeover, durable=durable)
    with claims.locked(place):
        claims.check(claim)
        for name in (STAGING_FOLDER, TRASH_FOLDER):
            filesystem.make_folder(place / name, 0o777, durable=durable)
        return recover_locked(claim, below=None if roll_forward else 0, durable=durable)[0]


def recover_locked(claim: Claim, *, below: int | None, durable: bool) -> tuple[list[str], list[Entry], int | None]:
    """As `recover`, under the lock; `.staging` and `.trash` must exist.

    Args:
        claim: the claim of this process on the root.
        below: publish only iterations below this one; None: all.
        durable: sync every change.

    Returns:
        Descriptions of the actions; what the root holds now, and the iteration that the tracker names.
    """
    root, done, staged = claim.root, [], []
    entries = root.entries()
    for entry in entries:
        if _TRACKER_DEBRIS.fullmatch(entry.name):
            filesystem.remove_file(root / entry.name)
    for staged_entry in filesystem.names(root / STAGING_FOLDER):
        name = StagedName.parse(staged_entry)
        if staged_entry.startswith(PROBE_PREFIX):
            filesystem.remove_folder(root / STAGING_FOLDER / staged_entry, durable=False)
        elif staged_entry.startswith(SHARED_PREFIX):
            remove_links(root / STAGING_FOLDER / staged_entry, root)
        # A claim is created only if no other is alive: writers with a lower generation are dead or were replaced.
        elif name is not None and name.generation < claim.generation:
            staged.append(name)
    for name in sorted(staged, key=lambda one: (one.iteration, one.generation)):
        folder = root / STAGING_FOLDER / str(name)
        if staging.put_back(root, folder, durable=durable):
            done.append(f"iteration {name.iteration} was being replaced, and is put back")
        if (below is None or name.iteration < below) and _roll_forward(root, name, durable=durable):
            done.append(f"iteration {name.iteration} was saved but not published, and is now")
        else:
            trash.remove(root, folder, name.iteration, durable=durable)
    if not staging.abilities(claim).renames_folders:
        done += _finish_in_place(claim, durable=durable)
    if staged or done:
        entries = root.entries()
    listed = roots.resolve_candidates(root, entries)
    moved_to = _track(root, listed, below, durable=durable)
    if moved_to is None:
        return done, entries, listed.tracker
    return [*done, f"iteration {moved_to} was published but not tracked, and is now"], entries, moved_to


def _roll_forward(root: Location, name: StagedName, *, durable: bool) -> bool:
    tracker = roots.tracked_iteration(root)
    source = root / STAGING_FOLDER / str(name)
    folder = root / roots.iteration_folder_name(name.iteration)
    if (tracker is not None and name.iteration <= tracker) or folder.exists():
        return False
    manifest = _complete(source)
    # After an exchange that was not finished, the staging name refers to the old iteration.
    if manifest is None or manifest.attempt != name.attempt_id:
        return False
    staging.sync([source], durable=durable)  # the crash may have happened before the sync of the save
    filesystem.rename(source, folder)
    staging.move_tracker(root, name.iteration, durable=durable, unsynced=[root, source.parent])
    staging.mark_tracked(folder, durable=durable)
    return True


def _complete(folder: Location) -> Manifest | None:
    """The manifest of a folder if all files but their data match it, else None. Data is verified when it is read."""
    try:
        manifest = manifests.read(folder)
        manifests.check_headers(folder, manifest)
        for name, entry in manifest.files.items():
            if manifests.plain_entry(folder, name) != entry:
                _log.warning("%s was altered, %s is no checkpoint", folder / name, folder)
                return None
    except ReshardError as error:
        _log.info("%s is not complete: %s", folder, error)
        return None
    return manifest


def _finish_in_place(claim: Claim, *, durable: bool) -> list[str]:
    """Where folders cannot be renamed: finish folders with a manifest, remove folders without one."""
    done = []
    for iteration, name in roots.list_iterations(claim.root):
        folder = claim.root / name
        owner = staging.unfinished(folder)
        if owner is None or owner.startswith(f"{claim.generation}."):
            continue
        if _complete(folder) is None:
            filesystem.remove_folder(folder, durable=durable)
            done.append(f"iteration {iteration} was being written or removed, and is removed")
        else:
            staging.sync([folder], durable=durable)  # the name of its manifest, before it counts
            filesystem.remove_file(folder / UNFINISHED_FILE)
            staging.sync([folder], durable=durable)
    return done


def _track(root: Location, candidates: Candidates, below: int | None, *, durable: bool) -> int | None:
    """Finish the last step of a publication: the marker `.tracked`, and the tracker. Returns where it was moved to."""
    tracker = candidates.tracker
    for iteration, name in sorted(candidates.folders, reverse=True):
        folder = root / name
        if (folder / TRACKED_FILE).exists() or not (folder / MANIFEST_FILE).exists():
            continue
        if iteration == tracker:
            staging.mark_tracked(folder, durable=durable)
        elif (tracker is None or iteration > tracker) and (below is None or iteration < below):
            manifest = _complete(folder)
            # Its save began with another tracker: it remained when a run resumed from an older iteration.
            if manifest is not None and manifest.previous_tracker == tracker:
                # Their names may not be durable yet: the process may have ended right after the rename.
                places = [folder, root, root / STAGING_FOLDER]
                existing = [place for place in places if place.is_folder()]
                staging.move_tracker(root, iteration, durable=durable, unsynced=existing)
                staging.mark_tracked(folder, durable=durable)
                return iteration
    return None
