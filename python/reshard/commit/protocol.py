"""Commit of an iteration to a checkpoint root. After a crash, the old or the new iteration is complete.

    begin     claim the root once a process, recover what a crash left, check the request, make the staging folder
              (every rank writes and syncs its files in it)
    seal      check that every file is there, write checksums.bin, then manifest.json: the commit record, last
    publish   under the lock: still the highest claim? rename staging to its name, sync; move the tracker, sync; mark it

A published folder is never changed in place. An existing iteration is exchanged with the new one in one step, and then
moved to the trash.

If the store cannot exchange names, the old iteration is moved to the trash first and kept there. If the new one was not
published, readers find the old one there (`trash.set_aside`), and `recover` moves it back. If the store cannot rename
folders, files are written into the final folder and the manifest completes them. Only in this case, an iteration that
is saved again is removed before the new one is complete.

Only the coordinator calls this module; the other ranks know only the staging folder. This module does not choose the
content of files, nor the old iterations that are kept (`retention`). `store` defines what a store must support.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import logging
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from reshard import _core
from reshard.commit import claims, filesystem, roots, staging, trash
from reshard.commit import manifest as manifests
from reshard.commit.filesystem import MANIFEST_FILE, UNFINISHED_FILE
from reshard.commit.manifest import CHECKSUMS_FILE, PINNED_FILE, Manifest
from reshard.commit.recovery import recover, recover_locked
from reshard.commit.session import session_of
from reshard.commit.staging import StagedName
from reshard.commit.trash import STAGING_FOLDER, TRASH_FOLDER
from reshard.errors import (
    ArgumentError,
    ClaimedError,
    DamagedFileError,
    DestinationExistsError,
    ReshardError,
    StorageError,
)
from reshard.storage.location import BROKEN_LINK_HINT, Location
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reshard.commit.session import Claim, RootSession
    from reshard.storage.store import Entry

__all__ = [
    "Attempt",
    "FileRecord",
    "abandon",
    "begin",
    "check_above_tracker",
    "check_space",
    "claim_root",
    "make_root",
    "obstacle",
    "publish",
    "recover",
    "release",
    "seal",
]

_SPARE = 20  # 5 % more than planned, for metadata, block sizes and files of other programs
_log = logging.getLogger("reshard")


@dataclass(frozen=True)
class Attempt:
    """One attempt to save one iteration.

    Attributes:
        root: the checkpoint root.
        iteration: the iteration that is saved.
        generation: generation of the claim under which it is saved.
        id: 32 hex digits, unique to this attempt.
        staging: the folder to write into, without subfolders.
        previous_tracker: the iteration that the tracker named when the attempt began, or None.
        durable: whether everything is synced.
        replaces: whether a folder of the same iteration is replaced.
        session: of the root.
        entries: what the root held when the attempt began.
    """

    root: Location
    iteration: int
    generation: int
    id: str
    staging: Location
    previous_tracker: int | None
    durable: bool
    replaces: bool
    session: RootSession = field(repr=False, compare=False)
    entries: tuple[Entry, ...] = ()

    @property
    def folder(self) -> Location:
        """The folder that it is published as."""
        return self.root / roots.iteration_folder_name(self.iteration)

    @property
    def in_place(self) -> bool:
        """Whether it is written into its final folder, since the store cannot rename folders."""
        return self.staging == self.folder


class FileRecord(Protocol):
    """The writer's record of a synced shard file: `_core.Written`, or the same received from a rank."""

    @property
    def n_bytes(self) -> int: ...  # noqa: D102
    @property
    def header_bytes(self) -> int: ...  # noqa: D102
    @property
    def header_checksum(self) -> int: ...  # noqa: D102
    @property
    def checksums(self) -> bytes: ...  # noqa: D102


class ValueRecord(FileRecord, Protocol):
    """A record that also says which arrays hold values that are not finite, as "nan" or "inf"."""

    @property
    def not_finite(self) -> Sequence[tuple[str, str]]: ...


@dataclass
class _Attempts:
    """Attempts of this process that went wrong.

    Attributes:
        failed: their ids, where a sync failed: their content on disk is unknown, and a second sync would not report it.
        left: those that have ended and whose folder remains: recovery only covers folders of dead processes.
    """

    failed: set[str] = field(default_factory=set)
    left: set[Attempt] = field(default_factory=set)


def begin(
    root: Location,
    iteration: int,
    *,
    planned_bytes: int = 0,
    durable: bool = True,
    overwrite: bool = True,
    rollback: bool = False,
    takeover: bool = False,
    folder_mode: int = 0o777,
) -> Attempt:
    """Begin to save an iteration: claim and recover the root, and create an empty staging folder.

    Args:
        root: the checkpoint root; it is created if it is missing.
        iteration: the iteration that is saved.
        planned_bytes: bytes that will be written; the free space must be 5 % larger.
        durable: sync everything, so that it survives a power failure.
        overwrite: whether an existing iteration is replaced.
        rollback: whether the tracker may move down to this iteration.
        takeover: replace the claim of another process, even if it is alive.
        folder_mode: permission bits of created folders, less the umask.

    Raises:
        ArgumentError: the iteration is not an integer from 0 to 10**18 - 1, or below the tracker's without `rollback`.
        ClaimedError: another process writes into the root, or has taken it over.
        DestinationExistsError: the iteration exists without `overwrite`, or the root is not a folder.
        StorageError: there is not enough space, a folder of the root is on another file system, or the system failed.

    Example:
        >>> from reshard.storage.location import locate
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     attempt = begin(locate(root), 400)
        ...     (attempt.staging / "common.json").replace("{}")
        ...     warnings = publish(attempt, seal(attempt, {}, world_size=1))
        ...     release()
        ...     attempt.folder.name, attempt.folder.names()
        ('iteration_00000400', ['.tracked', 'checksums.bin', 'common.json', 'manifest.json'])
    """
    place = root.absolute()
    folder = place / roots.iteration_folder_name(iteration)
    claim = claim_root(place, takeover=takeover, durable=durable, folder_mode=folder_mode)
    with claims.locked(place):
        claims.check(claim)
        for name in (STAGING_FOLDER, TRASH_FOLDER):
            filesystem.make_folder(place / name, folder_mode, durable=durable)
        _check_one_filesystem(place)
        lines, entries = recover_locked(claim, below=0 if rollback else iteration, durable=durable)
        for line in lines:
            _log.warning("%s: %s", place, line)
        tracker = roots.tracked_iteration(place)
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


def seal(
    attempt: Attempt,
    shards: Mapping[str, tuple[FileRecord, int]],
    *,
    world_size: int,
    unsynced: Sequence[str] = (),
    known: Mapping[str, manifests.PlainEntry | None] | None = None,
    passed_over: Sequence[int] = (),
    ckpt_status: int | None = None,
    metrics: Mapping[str, int | float] | None = None,
    file_mode: int = 0o666,
) -> Manifest:
    """Check the staging folder and write the commit record into it, as the last file.

    Args:
        attempt: what `begin` returned.
        shards: by file name, the writer's record of each shard file, and the writer's rank.
        world_size: number of ranks that the checkpoint is written for.
        unsynced: names of files in the folder that this process wrote and did not sync. They are synced before the
            manifest gets its name.
        known: size and digest of other files, by name, as their writer computed them; those of the rest are read.
        passed_over: iterations that the run skipped when it resumed below them.
        ckpt_status: the status that the health monitor reports, or None.
        metrics: numbers by name that are stored with the iteration.
        file_mode: permission bits of the created files, less the umask.

    Returns:
        The manifest. It lists all other files in the folder with their digests.

    Raises:
        DamagedFileError: a shard file is missing or does not have the reported size, or the folder has an unexpected
            shard file or an entry that is not a file.
        ClaimedError: another process has taken the root over.
        StorageError: the system failed; call `abandon`.
    """
    _check_sound(attempt)
    claims.check(_claim_of(attempt))
    try:
        plain = _check_staged(attempt, shards)
        checksums = b"".join(shards[name][0].checksums for name in sorted(shards))
        filesystem.replace_file(attempt.staging / CHECKSUMS_FILE, checksums, file_mode, durable=False)
        entries = dict(known or {}) | {
            CHECKSUMS_FILE: manifests.PlainEntry(len(checksums), manifests.digest_of(checksums))
        }
        files = {
            name: entries.get(name) or manifests.plain_entry(attempt.staging, name)
            for name in sorted({*plain, CHECKSUMS_FILE})
        }
        manifest = Manifest(
            iteration=attempt.iteration,
            generation=attempt.generation,
            attempt=attempt.id,
            world_size=world_size,
            # Read again: another save of this process may have been published since the attempt began.
            previous_tracker=roots.tracked_iteration(attempt.root),
            passed_over=tuple(passed_over),
            writer=f"reshard {_core.__version__}",
            saved_at=dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            ckpt_status=ckpt_status,
            shards=_shard_entries(shards),
            files=files,
            metrics=metrics or {},
        )
        filesystem.announce(f"write {MANIFEST_FILE}")
        manifests.write(
            attempt.staging, manifest, file_mode, durable=attempt.durable, unsynced=[*unsynced, CHECKSUMS_FILE]
        )
    except StorageError:
        attempt.session.of(_Attempts).failed.add(attempt.id)
        raise
    return manifest


def publish(attempt: Attempt, manifest: Manifest, log: Callable[[], Sequence[Location]] = tuple) -> list[str]:
    """Rename a sealed iteration to its final name, and update the tracker.

    When this returns, a restart finds the iteration; with `durable` it survives a power failure.

    Args:
        attempt: what `begin` returned.
        manifest: what `seal` returned.
        log: called when the tracker names the iteration. Returns files of the root that it has changed; they are synced
            together with the name of the tracker.

    Returns:
        Warnings: problems that do not make the save fail.

    Raises:
        ClaimedError: another process has taken the root over; nothing is published.
        DestinationExistsError: the iteration was created meanwhile and may not be replaced; nothing is published.
        DamagedFileError: the staging folder no longer holds this manifest; nothing is published.
        StorageError: the system failed. The iteration is complete, which the message says, or does not exist.
    """
    _check_sound(attempt)
    claim = _claim_of(attempt)
    root, durable = attempt.root, attempt.durable
    warnings: list[str] = []
    try:
        with claims.locked(root):
            claims.check(claim)
            if manifests.read_digest(attempt.staging) != manifest.digest:
                raise DamagedFileError(
                    f"{show(str(attempt.staging))} holds another manifest than was sealed", path=str(attempt.staging)
                )
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
            staging.mark_tracked(attempt.folder, durable=durable, unsynced=log())
            _discard_left(attempt.session, durable=durable)
    except StorageError as error:
        attempt.session.of(_Attempts).failed.add(attempt.id)
        if _is_in_place(attempt, manifest):
            raise _unfinished(attempt, error) from error
        raise
    return warnings + trash.empty(root, durable=durable)


def abandon(attempt: Attempt) -> None:
    """Remove the staging folder of an attempt that will not be published.

    Never raises. Remaining files are removed when a later save is published, or recovered by the next process.
    """
    attempt.session.of(_Attempts).failed.discard(attempt.id)
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
                attempt.session.of(_Attempts).left.add(attempt)
                return
        filesystem.remove_folder(attempt.staging, durable=False)
    except (ReshardError, OSError) as error:
        attempt.session.of(_Attempts).left.add(attempt)
        _log.warning("the staging folder %s is left over: %s", attempt.staging, error)


def release(root: Location | None = None) -> None:
    """Release the claim on a root, or all claims of this process. Happens at its exit too. Never raises.

    Args:
        root: the checkpoint root, whose empty folders are removed too; None: all roots.
    """
    if root is None:
        claims.release()
        return
    place = root.absolute()
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


def claim_root(root: Location, *, takeover: bool = False, durable: bool = True, folder_mode: int = 0o777) -> Claim:
    """Create a root if it is missing, and claim it for this process.

    Args:
        root: the checkpoint root.
        takeover: replace the claim of another process, even if it is alive.
        durable: sync what is made.
        folder_mode: permission bits of created folders, less the umask.

    Raises:
        ClaimedError: another process writes into the root, or has taken it over.
        DestinationExistsError: the root is no folder.
        StorageError: it cannot be written to.

    Example:
        >>> from reshard.storage.location import locate
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     claim = claim_root(locate(folder) / "new/root")
        ...     release()
        ...     claim.generation
        1
    """
    place = root.absolute()
    make_root(place, folder_mode, durable=durable)
    return claims.hold(place, takeover=takeover, durable=durable, folder_mode=folder_mode)


def obstacle(root: Location) -> ReshardError | None:
    """The error with which a save would fail, found without changing files; None: no error was found.

    Args:
        root: the checkpoint root; it may be missing.

    Example:
        >>> from reshard.storage.location import locate
        >>> obstacle(locate("a/new/root")) is None
        True
    """
    place = root.absolute()
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


def check_above_tracker(root: Location, iteration: int, tracker: int | None) -> None:
    """Refuse an iteration below the one that the tracker names.

    Args:
        root: the checkpoint root.
        iteration: the iteration to be saved.
        tracker: the iteration that the tracker names; None: there is no tracker.

    Raises:
        ArgumentError: the iteration is below the tracker's.
    """
    if tracker is not None and iteration < tracker:
        raise ArgumentError(
            f"iteration {iteration} is below {tracker}, which the tracker of {show(str(root))} names",
            hint="if the run went back on purpose give `commit=Commit(rollback=True)`; another run needs another root",
        )


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
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    for folder in reversed(missing):
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
    if place.exists() and not place.is_folder():
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
        if not root.store.same_filesystem(str(root), str(root / name)):
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


# -- sealing


def _claim_of(attempt: Attempt) -> Claim:
    """The claim of the attempt. A forked child has no claim, and a new claim has another generation."""
    claim = attempt.session.claim
    if claim is None or claim.generation != attempt.generation:
        raise ClaimedError(
            f"this process does not hold claim {attempt.generation} of {show(str(attempt.root))}, under which "
            f"iteration {attempt.iteration} was begun",
            path=str(attempt.root),
            hint="seal and publish in the process that began, before it releases the root; a fork is another process",
        )
    return claim


def _check_sound(attempt: Attempt) -> None:
    if attempt.id in attempt.session.of(_Attempts).failed:
        raise StorageError(
            f"this attempt to save iteration {attempt.iteration} has failed before; what of it is on disk is not known",
            path=str(attempt.staging),
            errno=errno.EIO,
            hint="abandon it and save again",
        )


def _check_staged(attempt: Attempt, shards: Mapping[str, tuple[FileRecord, int]]) -> list[str]:
    """Check the entries of the folder; returns the names of files that are not shard files."""
    plain, missing = [], set(shards)
    for name, kind, n_bytes in attempt.staging.sizes():
        if name.startswith("."):
            if name.endswith(".tmp"):  # of a write that failed and was repeated
                filesystem.remove_file(attempt.staging / name)
            continue
        if kind != "file":
            path = attempt.staging / name
            raise DamagedFileError(
                f"{show(str(path))} is not a regular file; a checkpoint holds no other", path=str(path)
            )
        if name in shards:
            missing.discard(name)
            expected_bytes = shards[name][0].n_bytes
            if n_bytes != expected_bytes:
                path = attempt.staging / name
                raise DamagedFileError(
                    f"{show(str(path))} has {n_bytes} bytes, its writer reported {expected_bytes}", path=str(path)
                )
        elif name.endswith(".safetensors"):
            path = attempt.staging / name
            raise DamagedFileError(
                f"{show(str(path))} is an unexpected shard file", path=str(path), hint="was it written twice?"
            )
        elif name not in (MANIFEST_FILE, CHECKSUMS_FILE):
            plain.append(name)
    if missing:
        path = attempt.staging / min(missing)
        raise DamagedFileError(
            f"{show(str(path))} is missing, and {len(missing) - 1} more: their writers reported them as written",
            path=str(path),
            hint="on a network file system all ranks must see the same root",
        )
    return plain


def _shard_entries(shards: Mapping[str, tuple[FileRecord, int]]) -> dict[str, manifests.ShardEntry]:
    entries, n_chunks = {}, 0
    for name in sorted(shards):
        record, rank = shards[name]
        entry = entries[name] = manifests.ShardEntry(
            n_bytes=record.n_bytes,
            header_bytes=record.header_bytes,
            header_checksum=record.header_checksum,
            first_chunk=n_chunks,
            checksums_digest=manifests.digest_of(record.checksums),
            rank=rank,
        )
        n_chunks += entry.n_chunks
        if len(record.checksums) != 4 * entry.n_chunks:
            raise ArgumentError(
                f"{show(name)}: {len(record.checksums)} bytes of checksums were reported, {entry.n_chunks} chunks have "
                "4 bytes each"
            )
    return entries


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
        left = session.of(_Attempts).left
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
