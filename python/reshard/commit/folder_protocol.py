"""The protocol of a commit in a file system: an iteration is staged in a folder, which a rename publishes.

    begin     claim the root once a process, recover what a crash left, check the request, make the staging folder
    seal      every file is there: checksums.bin, then manifest.json
    publish   under the lock: still the highest claim? rename staging to its name, sync; move the tracker, sync; mark it

A published folder is never changed in place. An existing iteration is exchanged with the new one in one step, and then
moved to the trash.

If the store cannot exchange names, the old iteration is moved to the trash first and kept there. If the new one was not
published, readers find the old one there (`trash.set_aside`), and `recover` moves it back. If the store cannot rename
folders, files are written into the final folder and the manifest completes them. Only in this case, an iteration that
is saved again is removed before the new one is complete.

`store` defines what a store must support.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reshard.commit import claims, filesystem, proofs, roots, staging, trash
from reshard.commit import manifest as manifests
from reshard.commit.attempts import (
    Attempt,
    Retired,
    check_above_tracker,
    check_sealed,
    check_sound,
    claim_of,
    forget_failed,
    mark_failed,
    n_bytes_of,
    seal_files,
)
from reshard.commit.filesystem import MANIFEST_FILE, UNFINISHED_FILE
from reshard.commit.recovery import recover as recover  # noqa: PLC0414  a part of the protocol
from reshard.commit.recovery import recover_locked
from reshard.commit.roots import PINNED_FILE
from reshard.commit.session import session_of
from reshard.commit.staging import StagedName
from reshard.commit.trash import STAGING_FOLDER, TRASH_FOLDER
from reshard.errors import (
    DestinationExistsError,
    ReshardError,
    StorageError,
)
from reshard.storage.location import BROKEN_LINK_HINT, Location
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reshard.commit.attempts import Content
    from reshard.commit.manifest import Manifest
    from reshard.commit.session import Claim, RootSession

_SPARE = 20  # 5 % more than planned, for metadata, block sizes and files of other programs
_log = logging.getLogger("reshard")


@dataclass
class _Left:
    """Attempts of this process that have ended and whose folder remains: recovery only covers those of dead processes.

    Attributes:
        attempts: these.
    """

    attempts: set[Attempt] = field(default_factory=set)


def begin(
    root: Location,
    iteration: int,
    *,
    planned_bytes: int,
    durable: bool,
    overwrite: bool,
    rollback: bool,
    takeover: bool,
    folder_mode: int,
) -> Attempt:
    """See `protocol.begin`."""
    place = root
    folder = place / roots.iteration_folder_name(iteration)
    claim = claim_root(place, takeover=takeover, durable=durable, folder_mode=folder_mode)
    with claims.locked(place):
        claims.check(claim)
        for name in (STAGING_FOLDER, TRASH_FOLDER):
            filesystem.make_folder(place / name, folder_mode, durable=durable)
        _check_one_filesystem(place)
        lines, entries, tracker = recover_locked(claim, below=0 if rollback else iteration, durable=durable)
        for line in lines:
            _log.warning("%s: %s", place, line)
        if not rollback:
            check_above_tracker(place, iteration, tracker)
        if folder.exists() and not overwrite:
            raise DestinationExistsError(
                f"{show(str(folder))} exists", path=str(folder), hint="give `overwrite=True` to replace it"
            )
        check_space(place, planned_bytes, durable=durable)
        attempt_id = os.urandom(16).hex()
        in_staging = staging.abilities(claim).renames_folders
        work = folder
        if in_staging:
            work = place / STAGING_FOLDER / str(StagedName(iteration, claim.generation, attempt_id))
        attempt = Attempt(
            root=place,
            iteration=iteration,
            generation=claim.generation,
            id=attempt_id,
            staging=work,
            folder=folder,
            previous_tracker=tracker,
            durable=durable,
            replaces=overwrite,
            session=session_of(place),
            entries=tuple(entries),
        )
        try:
            if in_staging:
                # Its name becomes durable when it is renamed: what a crash leaves here is removed, if it is there.
                filesystem.make_folder(work, folder_mode, durable=False)
            else:
                staging.make_in_place(folder, f"{claim.generation}.{attempt_id}", folder_mode, durable=durable)
        except BaseException:
            abandon(attempt)  # it may exist without being durable
            raise
    return attempt


def seal(attempt: Attempt, content: Content) -> Manifest:
    """See `protocol.seal`."""
    check_sound(attempt)
    claims.check(claim_of(attempt))
    # Read again: another save of this process may have been published since the attempt began.
    return seal_files(attempt, content, roots.tracked_iteration(attempt.root))


def publish(attempt: Attempt, manifest: Manifest, log_save: Callable[[], Sequence[Location]]) -> list[str]:
    """See `protocol.publish`."""
    check_sound(attempt)
    claim = claim_of(attempt)
    root, durable = attempt.root, attempt.durable
    warnings: list[str] = []
    try:
        with claims.locked(root):
            claims.check(claim)
            check_sealed(attempt, manifest)
            if (attempt.folder / PINNED_FILE).exists():
                warnings.append(
                    f"iteration {attempt.iteration} was pinned, and this save has replaced its content; it stays pinned"
                )
            unsynced = _put_in_place(attempt, claim)
            tracker = roots.tracked_iteration(root)
            if tracker is not None and tracker > attempt.iteration and tracker != attempt.previous_tracker:
                warnings.append(f"the tracker names the newer iteration {tracker} already and stays there")
                staging.sync(unsynced, durable=durable)
            else:
                staging.move_tracker(root, attempt.iteration, durable=durable, unsynced=unsynced)
            staging.mark_tracked(attempt.folder, durable=durable, unsynced=log_save())
            _discard_left(attempt.session, durable=durable)
    except StorageError as error:
        mark_failed(attempt)
        if _is_in_place(attempt, manifest):
            raise _unfinished(attempt, error) from error
        raise
    return warnings + trash.empty(root, durable=durable)


def abandon(attempt: Attempt) -> None:
    """See `protocol.abandon`; remaining files are removed when a later save is published, or recovered."""
    forget_failed(attempt)
    try:
        if attempt.in_place:
            if staging.unfinished(attempt.folder) == f"{attempt.generation}.{attempt.id}":
                filesystem.remove_folder(attempt.folder, durable=False)
            return
        if not attempt.folder.exists():
            staging.put_back(attempt.root, attempt.staging, durable=attempt.durable)
        with contextlib.suppress(ReshardError):
            # After an exchange that was not finished, the staging name refers to the old iteration.
            if manifests.read(attempt.staging).attempt != attempt.id:
                attempt.session.of(_Left).attempts.add(attempt)
                return
        filesystem.remove_folder(attempt.staging, durable=False)
    except (ReshardError, OSError) as error:
        attempt.session.of(_Left).attempts.add(attempt)
        _log.warning("the staging folder %s is left over: %s", attempt.staging, error)


def release(root: Location) -> None:
    """See `protocol.release`."""
    place = root
    with contextlib.suppress(ReshardError, OSError):
        claim = claims.held(place)
        if claim is not None:
            with claims.locked(place):
                claims.check(claim)
                for name in (STAGING_FOLDER, TRASH_FOLDER):
                    with contextlib.suppress(StorageError):  # not empty
                        place.store.remove_empty_folder(str(place / name))
    claims.release(place)


# -- before


def claim_root(root: Location, *, takeover: bool, durable: bool, folder_mode: int) -> Claim:
    """See `protocol.claim_root`."""
    place = root
    make_root(place, folder_mode, durable=durable)
    return claims.hold(place, takeover=takeover, durable=durable, folder_mode=folder_mode)


def obstacle(root: Location) -> ReshardError | None:
    """See `protocol.obstacle`."""
    place = root
    there = next((folder for folder in (place, *place.parents) if folder.exists()), None)
    wrong = None if there is None else _wrong_root(there)
    if wrong is not None:
        return wrong
    if there is not None and not there.store.is_writable(there.path):
        return StorageError(
            f"{show(str(there))} cannot be written to",
            path=str(there),
            errno=errno.EACCES,
            hint="change its permissions, or choose another root",
        )
    return claims.living_claim(place)


def make_root(root: Location, mode: int, *, durable: bool) -> None:
    """Create the folder of a checkpoint root and its parent folders if they are missing.

    Args:
        root: the folder.
        mode: permission bits, less the umask.
        durable: sync the names of the created folders.

    Raises:
        DestinationExistsError: it is not a folder.
        StorageError: the system failed.
    """
    missing = itertools.takewhile(lambda folder: not folder.exists(), itertools.chain([root], root.parents))
    for folder in reversed(list(missing)):
        filesystem.make_folder(folder, mode, durable=durable)
    wrong = _wrong_root(root)
    if wrong is not None:
        raise wrong


def _wrong_root(place: Location) -> DestinationExistsError | None:
    """The error for an existing path that cannot be a checkpoint root."""
    if (broken := place.broken_link()) is not None:
        return DestinationExistsError(
            f"{show(str(place))} is not a folder: {broken}", path=str(place), hint=BROKEN_LINK_HINT
        )
    if place.kind(follow_links=True) not in (None, "folder"):
        return DestinationExistsError(
            f"{show(str(place))} is not a folder; a checkpoint root is one", path=str(place), hint="choose another root"
        )
    if (place / MANIFEST_FILE).exists():
        return DestinationExistsError(
            f"{show(str(place))} is a checkpoint itself, and a checkpoint root holds iteration folders",
            path=str(place),
            hint=f"name the root, such as {show(str(place.parent))}, or another folder",
        )
    return None


def _check_one_filesystem(root: Location) -> None:
    for name in (STAGING_FOLDER, TRASH_FOLDER):
        if not root.store.same_filesystem(root.path, (root / name).path):
            raise StorageError(
                f"{show(str(root / name))} lies on another file system than {show(str(root))}",
                path=str(root / name),
                errno=errno.EXDEV,
                hint="unmount it: a checkpoint is published by a rename, which works on one file system",
            )


def check_space(root: Location, planned_bytes: int, *, durable: bool) -> None:
    """Refuse to begin a save that does not fit into the free space.

    Args:
        root: the checkpoint root.
        planned_bytes: bytes that will be written; the free space must be 5 % larger.
        durable: sync changes of the trash, which is emptied to free space.

    Raises:
        StorageError: there is not enough space, or the system failed.
    """
    needed = planned_bytes + -(-planned_bytes // _SPARE)
    free = root.store.free_bytes(root.path)
    if free is not None and free < needed and filesystem.names(root / TRASH_FOLDER):
        # Recovery has moved back all iterations to restore. The rest was replaced by newer iterations or never
        # finished. If it were kept, a disk that was full once would stay full.
        for line in trash.empty(root, durable=durable):
            _log.warning("%s", line)
        free = root.store.free_bytes(root.path)
    if free is not None and free < needed:
        raise StorageError(
            f"{show(str(root))} has {free} bytes free; the save writes {planned_bytes}, with 5 % to spare {needed}",
            path=str(root),
            errno=errno.ENOSPC,
            hint="free some space: `reshard prune` removes old iterations. Nothing was changed",
        )


# -- publishing


def _put_in_place(attempt: Attempt, claim: Claim) -> list[Location]:
    """Give the staging folder its final name. Returns folders whose names must be durable before the tracker moves."""
    root, folder, durable = attempt.root, attempt.folder, attempt.durable
    if attempt.in_place:
        staging.sync([folder], durable=durable)
        filesystem.remove_file(folder / UNFINISHED_FILE)
        return [folder]
    changed = [root, root / STAGING_FOLDER]
    if not folder.exists():
        try:
            filesystem.rename(attempt.staging, folder)
        except FileExistsError:
            raise _made_meanwhile(attempt) from None
        # The name of the manifest, too: until it is durable, a loss of power leaves a folder that is not complete.
        return [folder, *changed]
    if not attempt.replaces:
        raise _made_meanwhile(attempt)
    # The new iteration is complete before the old one loses its name.
    staging.sync([attempt.staging], durable=durable)
    if (folder / PINNED_FILE).exists():  # the pin belongs to the iteration number
        with contextlib.suppress(FileExistsError):
            filesystem.make_file(attempt.staging / PINNED_FILE, durable=durable)
    if staging.abilities(claim).exchanges:
        filesystem.exchange(attempt.staging, folder)
        staging.sync(changed, durable=durable)
        trash.discard(root, attempt.staging, attempt.iteration, durable=durable)
        return []
    # With the id of the attempt, so that `recover` finds the new iteration for which the old one was moved.
    trash.discard(root, folder, attempt.iteration, attempt.id, durable=durable)
    try:
        filesystem.rename(attempt.staging, folder)
    except StorageError:
        staging.put_back(root, attempt.staging, durable=durable)
        raise
    except FileExistsError:
        raise _made_meanwhile(attempt) from None
    return changed


def _is_in_place(attempt: Attempt, manifest: Manifest) -> bool:
    """Whether the folder with the final name holds this attempt, and counts."""
    with contextlib.suppress(ReshardError):
        is_finished = staging.unfinished(attempt.folder) is None
        return is_finished and manifests.read_digest(attempt.folder) == manifest.digest
    return False


def _unfinished(attempt: Attempt, error: StorageError) -> StorageError:
    """The error for a published iteration that the tracker does not name, or that may be lost with the power."""
    restart = "and a restart resumes from it"
    try:
        tracker = roots.read_tracker(attempt.root)[0]
    except ReshardError:  # the same cause
        restart = "but the tracker cannot be read (`reshard explain` shows what a restart resumes from)"
    else:
        if tracker is not None and tracker > attempt.iteration:
            restart = f"but the tracker still names {tracker} (`reshard explain` shows what a restart resumes from)"
    return StorageError(
        f"iteration {attempt.iteration} is complete in {show(str(attempt.folder))}, {restart}; its save is not "
        f"finished: {error.message}",
        path=error.path,
        hint="remove the cause and save again: any later save finishes it, and until then a loss of power may undo it",
        errno=error.errno,
    )


def _discard_left(session: RootSession, *, durable: bool) -> None:
    """After a publication: move the remaining folders of this process's attempts to the trash, old iterations too."""
    with contextlib.suppress(ReshardError):  # the rest stays for another time: `.trash` is not synced again
        left = session.of(_Left).attempts
        for attempt in list(left):
            left.discard(attempt)
            if attempt.in_place:
                abandon(attempt)
            elif attempt.staging.exists():
                trash.discard(attempt.root, attempt.staging, attempt.iteration, durable=durable)


def _made_meanwhile(attempt: Attempt) -> DestinationExistsError:
    return DestinationExistsError(
        f"{show(str(attempt.folder))} was made while it was being saved",
        path=str(attempt.folder),
        hint="something else writes into this root: stop it, and save again"
        if attempt.replaces
        else "give `overwrite=True` to replace it",
    )


# -- removing


def retire(root: Location, choose: Callable[[], Sequence[tuple[int, str]] | None], *, durable: bool) -> Retired | None:
    """See `protocol.retire`: by a rename into the trash, or in place if the disk is too full to make the trash."""
    done = Retired()
    with claims.locked(root):
        chosen = choose()
        if chosen is None:
            return None
        if chosen:
            trash.make(root, durable=durable)
        for iteration, name in chosen:
            _remove(root, iteration, name, done, durable=durable)
    if done.sizes:
        # Outside the lock: deleting takes long, and no other process uses the trash.
        done.warnings += trash.empty(root, durable=durable)
        proofs.sweep(root)
    return done


def _remove(root: Location, iteration: int, name: str, done: Retired, *, durable: bool) -> None:
    folder = root / name
    n_bytes = n_bytes_of(folder)
    try:
        with trash.reader_held_off(folder) as is_free:
            if not is_free:
                done.kept[iteration] = "it is being read"
                done.warnings.append(f"iteration {iteration} is being read: it is removed another time")
                return
            is_there = True
            if trash.make(root, durable=durable):
                is_there = trash.take_out(root, folder, iteration, durable=durable)
            else:
                trash.mark_removed(folder, durable=durable)  # a removal in place needs no space, and makes some
        if is_there:
            filesystem.remove_folder(folder, durable=durable)
    except StorageError as error:
        done.kept[iteration] = "it could not be removed"
        done.warnings.append(f"iteration {iteration} could not be removed: {error.message}")
        done.failed.append(iteration)
        return
    done.sizes[iteration] = n_bytes


def clean(root: Location) -> None:
    """See `protocol.clean`: saves and `retire` empty the trash."""


# -- marks


def pin(root: Location, iteration: int) -> None:
    """See `protocol.pin`."""
    roots.folder_of(root, iteration)  # before a lock file is created in a folder that is not a root
    with claims.locked(root):
        folder = roots.folder_of(root, iteration)
        with contextlib.suppress(FileExistsError):
            filesystem.make_file(folder / PINNED_FILE, durable=True)


def unpin(root: Location, iteration: int) -> None:
    """See `protocol.unpin`."""
    roots.folder_of(root, iteration)  # before a lock file is created in a folder that is not a root
    with claims.locked(root):
        folder = roots.folder_of(root, iteration)
        filesystem.remove_file(folder / PINNED_FILE)
        filesystem.sync(folder)


def go_back(root: Location, check: Callable[[], int]) -> None:
    """See `protocol.go_back`."""
    claim = claims.hold(root)
    with claims.locked(root):
        claims.check(claim)
        iteration = check()
        for number, name in roots.list_iterations(root):
            # Before the tracker moves: an iteration above it without the mark counts as one whose save was interrupted.
            if number > iteration and (root / name / MANIFEST_FILE).exists():
                staging.mark_tracked(root / name, durable=True)
        staging.move_tracker(root, iteration, durable=True)
        staging.mark_tracked(roots.folder_of(root, iteration), durable=True)
