"""How an iteration gets into a checkpoint root: a crash at any step leaves what was there, or the new one, whole.

    begin     claim the root once a process, recover what a crash left, refuse what must not be, make the staging folder
              (every rank writes and syncs its files in it)
    seal      check that everything is there, write checksums.bin, then manifest.json: the commit record, last
    publish   under the lock: still the highest claim? rename staging to its name, sync; move the tracker, sync; mark it

What is published is never changed in place. An iteration that is there already is exchanged with the new one in one
step, and only then goes to the trash. Where names cannot be exchanged the old one goes to the trash first, is kept
there, and is put back by `recover` if the new one did not follow. Where folders cannot be renamed at all, files are
written in the final folder and the manifest alone says that it is whole; there, and only there, an iteration that is
saved again is gone before the new one is whole.

Coordinator only: the other ranks know the staging folder and nothing of this. Which bytes go into which file is not
known here either, nor which old iterations are kept (`retention`).
"""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import logging
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from reshard import _core
from reshard.errors import (
    ArgumentError,
    ClaimedError,
    DamagedFileError,
    DestinationExistsError,
    ReshardError,
    StorageError,
)
from reshard.formats import manifest as manifests
from reshard.formats.checkpoint2 import names as checkpoint2
from reshard.formats.manifest import CHECKSUMS_FILE, MANIFEST_FILE, PINNED_FILE, Manifest
from reshard.storage import claims, filesystem, staging, trash
from reshard.storage.filesystem import UNFINISHED_FILE
from reshard.storage.recovery import recover, recover_locked
from reshard.storage.small_files import write_file_atomically
from reshard.storage.staging import STAGING_FOLDER, StagedName
from reshard.storage.trash import TRASH_FOLDER
from reshard.words import show

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.storage.claims import Claim

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

_SPARE = 20  # one part in 20 more than planned: names, blocks and what others write meanwhile
_log = logging.getLogger("reshard")


@dataclass(frozen=True)
class Attempt:
    """One attempt to save one iteration.

    Attributes:
        root: the checkpoint root.
        iteration: what is saved.
        epoch: the claim under which it is saved.
        id: 32 hex digits that no other attempt has.
        staging: the folder to write into, for files alone.
        previous_tracker: the iteration that the tracker named at the beginning, or None.
        durable: whether everything is synced.
        replaces: whether a folder of the same iteration is replaced.
    """

    root: Path
    iteration: int
    epoch: int
    id: str
    staging: Path
    previous_tracker: int | None
    durable: bool
    replaces: bool

    @property
    def folder(self) -> Path:
        """Where it will be published."""
        return self.root / checkpoint2.iteration_folder_name(self.iteration)

    @property
    def in_place(self) -> bool:
        """Whether it is written where it will be, since the file system cannot rename folders."""
        return self.staging == self.folder


class FileRecord(Protocol):
    """What a writer tells of a shard file that it has synced: `_core.Written`, or what came of it over a network."""

    @property
    def n_bytes(self) -> int: ...  # noqa: D102
    @property
    def header_bytes(self) -> int: ...  # noqa: D102
    @property
    def header_sum(self) -> int: ...  # noqa: D102
    @property
    def sums(self) -> bytes: ...  # noqa: D102


# Attempts of which a sync failed: what the disk holds of them is unknown, and a second sync would only hide it.
_poisoned: set[str] = set()
# Attempts of this process whose folder is still there though they are over: recovery is for what dead processes left.
_left: set[Attempt] = set()


def begin(
    root: str | os.PathLike[str],
    iteration: int,
    *,
    planned_bytes: int = 0,
    durable: bool = True,
    overwrite: bool = True,
    rollback: bool = False,
    takeover: bool = False,
    folder_mode: int = 0o777,
) -> Attempt:
    """Begin to save an iteration: an empty staging folder, in a root that is ours and in order.

    Args:
        root: the checkpoint root; it is made where it is missing.
        iteration: what is saved.
        planned_bytes: bytes that will be written; there must be 5 % more.
        durable: sync everything, so that it outlives a loss of power.
        overwrite: whether an iteration that is there is replaced.
        rollback: whether the tracker may move down to this iteration.
        takeover: overtake another process that has claimed the root and is alive.
        folder_mode: permission bits of the folders that are made, less the umask.

    Raises:
        ArgumentError: the iteration is not an integer from 0 to 10**18 - 1, or below the tracker's without `rollback`.
        ClaimedError: another process writes into the root, or has taken it over.
        DestinationExistsError: the iteration is there and `overwrite` is off, or the root is no folder.
        StorageError: there is not enough space, a folder of the root lies on another file system, or the system failed.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     attempt = begin(root, 400)
        ...     _ = (attempt.staging / "common.json").write_text("{}")
        ...     warnings = publish(attempt, seal(attempt, {}, world_size=1))
        ...     release()
        ...     attempt.folder.name, sorted(file.name for file in attempt.folder.iterdir())
        ('iteration_00000400', ['.tracked', 'checksums.bin', 'common.json', 'manifest.json'])
    """
    root = Path(os.path.abspath(root))  # noqa: PTH100  not resolved: a link stays the user's business
    folder = root / checkpoint2.iteration_folder_name(iteration)
    claim = claim_root(root, takeover=takeover, durable=durable, folder_mode=folder_mode)
    with claims.locked(root):
        claims.check(claim)
        for name in (STAGING_FOLDER, TRASH_FOLDER):
            filesystem.make_folder(root / name, folder_mode, durable=durable)
        _check_one_device(root)
        for line in recover_locked(claim, below=0 if rollback else iteration, durable=durable):
            _log.warning("%s: %s", root, line)
        tracker = checkpoint2.resolve_candidates(root).tracker
        if not rollback:
            check_above_tracker(root, iteration, tracker)
        if os.path.lexists(folder) and not overwrite:
            raise DestinationExistsError(
                f"{show(str(folder))} is there already", path=str(folder), hint="give `overwrite=True` to replace it"
            )
        check_space(root, planned_bytes, durable=durable)
        number = secrets.token_hex(16)
        in_staging = staging.abilities(claim).renames_folders
        work = root / STAGING_FOLDER / str(StagedName(iteration, claim.epoch, number)) if in_staging else folder
        attempt = Attempt(root, iteration, claim.epoch, number, work, tracker, durable, overwrite)
        try:
            if in_staging:
                filesystem.make_folder(work, folder_mode, durable=durable)
            else:
                staging.make_in_place(folder, f"{claim.epoch}.{number}", folder_mode, durable=durable)
        except StorageError:
            abandon(attempt)  # it may be made, and not durable
            raise
    return attempt


def seal(
    attempt: Attempt,
    shards: Mapping[str, tuple[FileRecord, int]],
    *,
    world_size: int,
    passed_over: Sequence[int] = (),
    ckpt_status: int | None = None,
    metrics: Mapping[str, int | float] | None = None,
    file_mode: int = 0o666,
) -> Manifest:
    """Check the staging folder and write the commit record into it, after everything else.

    Args:
        attempt: what `begin` returned.
        shards: by file name, what its writer told of each shard file, and the writer's rank.
        world_size: number of ranks that the checkpoint is written for.
        passed_over: iterations that the run refused when it resumed below them.
        ckpt_status: what the health monitor says, or None.
        metrics: numbers by name that are kept with the iteration.
        file_mode: permission bits of the files that are made here, less the umask.

    Returns:
        The manifest. Any other file that lies in the folder is in it with its digest.

    Raises:
        DamagedFileError: a shard file is missing or has another size than was told, or there is one that nobody told
            of, or something that is no file.
        ClaimedError: another process has taken the root over.
        StorageError: the system failed; the attempt can then only be abandoned.
    """
    _check_sound(attempt)
    claims.check(_claim_of(attempt))
    try:
        plain = _check_staged(attempt, shards)
        sums = b"".join(shards[name][0].sums for name in sorted(shards))
        filesystem.announce(f"write {CHECKSUMS_FILE}")
        write_file_atomically(attempt.staging / CHECKSUMS_FILE, sums, file_mode, durable=attempt.durable)
        files = {name: manifests.plain_entry(attempt.staging, name) for name in sorted({*plain, CHECKSUMS_FILE})}
        manifest = Manifest(
            iteration=attempt.iteration,
            epoch=attempt.epoch,
            attempt=attempt.id,
            world_size=world_size,
            # Not that of the beginning: another save of this process may have been published since.
            previous_tracker=checkpoint2.resolve_candidates(attempt.root).tracker,
            passed_over=tuple(passed_over),
            writer=f"reshard {_core.__version__}",
            saved_at=dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            ckpt_status=ckpt_status,
            shards=_shard_entries(shards),
            files=files,
            metrics=metrics or {},
        )
        filesystem.announce(f"write {MANIFEST_FILE}")
        manifests.write(attempt.staging, manifest, file_mode, durable=attempt.durable)
    except StorageError:
        _poisoned.add(attempt.id)
        raise
    return manifest


def publish(attempt: Attempt, manifest: Manifest) -> list[str]:
    """Give a sealed iteration its name, and let the tracker name it.

    When this returns, the iteration is what a restart finds, and with `durable` it stays so.

    Returns:
        Warnings: what is out of order and yet no reason to call the save a failure.

    Raises:
        ClaimedError: another process has taken the root over; nothing is published.
        DestinationExistsError: the iteration appeared meanwhile and is not to be replaced; nothing is published.
        DamagedFileError: the staging folder does not hold this manifest any more; nothing is published.
        StorageError: the system failed. The iteration may be published or not; it is whole or not there.
    """
    _check_sound(attempt)
    claim = _claim_of(attempt)
    root, durable = attempt.root, attempt.durable
    warnings: list[str] = []
    try:
        with claims.locked(root):
            claims.check(claim)
            found = manifests.read(attempt.staging)
            if found.digest != manifest.digest:
                raise DamagedFileError(
                    f"{show(str(attempt.staging))} holds another manifest than was sealed", path=str(attempt.staging)
                )
            if attempt.in_place:
                filesystem.remove_file(attempt.folder / UNFINISHED_FILE)
                staging.sync([attempt.folder], durable=durable)
            else:
                _put_in_place(attempt, claim)
            tracker = checkpoint2.resolve_candidates(root).tracker
            if tracker is not None and tracker > attempt.iteration and tracker != attempt.previous_tracker:
                warnings.append(f"the tracker names the newer iteration {tracker} already and stays there")
            else:
                staging.move_tracker(root, attempt.iteration, durable=durable)
            staging.mark_tracked(attempt.folder, durable=durable)
            _discard_left(root, durable=durable)
    except StorageError:
        _poisoned.add(attempt.id)
        raise
    return warnings + trash.empty(root, durable=durable)


def abandon(attempt: Attempt) -> None:
    """Remove the staging folder of an attempt that will not be published.

    Never raises; what is left goes when a later save is published, or is recovered by the next process.
    """
    _poisoned.discard(attempt.id)
    try:
        if attempt.in_place:
            if staging.unfinished(attempt.folder) == f"{attempt.epoch}.{attempt.id}":
                filesystem.remove_folder(attempt.folder, durable=False)
            return
        if not attempt.folder.exists():
            staging.put_back(attempt.root, attempt.staging, durable=attempt.durable)
        with contextlib.suppress(ReshardError):
            # After an exchange that was not finished the name is that of the old iteration.
            if manifests.read(attempt.staging).attempt != attempt.id:
                _left.add(attempt)
                return
        filesystem.remove_folder(attempt.staging, durable=False)
    except (ReshardError, OSError) as error:
        _left.add(attempt)
        _log.warning("the staging folder %s is left over: %s", attempt.staging, error)


def release(root: str | os.PathLike[str] | None = None) -> None:
    """Give back the claim on a root, or all of this process, which happens at its end too. Never raises.

    Args:
        root: the checkpoint root, which is tidied up as well; None: all of them.
    """
    if root is None:
        claims.release()
        return
    path = Path(os.path.abspath(root))  # noqa: PTH100
    with contextlib.suppress(ReshardError, OSError):
        claim = claims.held(path)
        if claim is not None:
            with claims.locked(path):
                claims.check(claim)
                for name in (STAGING_FOLDER, TRASH_FOLDER):
                    with contextlib.suppress(OSError):  # not empty
                        (path / name).rmdir()
    claims.release(path)


# -- before


def claim_root(
    root: str | os.PathLike[str], *, takeover: bool = False, durable: bool = True, folder_mode: int = 0o777
) -> Claim:
    """Make a root where it is missing, and claim it for this process.

    Args:
        root: the checkpoint root.
        takeover: overtake another process that has claimed the root and is alive.
        durable: sync what is made.
        folder_mode: permission bits of the folders that are made, less the umask.

    Raises:
        ClaimedError: another process writes into the root, or has taken it over.
        DestinationExistsError: the root is no folder.
        StorageError: it cannot be written to.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     claim = claim_root(f"{folder}/new/root")
        ...     release()
        ...     claim.epoch
        1
    """
    path = Path(os.path.abspath(root))  # noqa: PTH100
    make_root(path, folder_mode, durable=durable)
    return claims.hold(path, takeover=takeover, durable=durable, folder_mode=folder_mode)


def obstacle(root: str | os.PathLike[str]) -> ReshardError | None:
    """What would make a save fail, as far as it is seen without changing anything; None: nothing was found.

    Args:
        root: the checkpoint root; it may be missing.

    Example:
        >>> obstacle("a/new/root") is None
        True
    """
    path = Path(os.path.abspath(root))  # noqa: PTH100
    there = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
    if not there.is_dir():
        return DestinationExistsError(
            f"{show(str(there))} is not a folder; a checkpoint root is one", path=str(there), hint="choose another root"
        )
    if not os.access(there, os.W_OK | os.X_OK):
        return StorageError(
            f"{show(str(there))} cannot be written to",
            path=str(there),
            errno=errno.EACCES,
            hint="change its permissions, or choose another root",
        )
    return claims.living_claim(path)


def check_above_tracker(root: Path, iteration: int, tracker: int | None) -> None:
    """Refuse an iteration below the one that the tracker names. Raises ArgumentError."""
    if tracker is not None and iteration < tracker:
        raise ArgumentError(
            f"iteration {iteration} is below {tracker}, which the tracker of {show(str(root))} names",
            hint="if the run went back on purpose give `rollback=True`; another run needs another root",
        )


def make_root(root: Path, mode: int, *, durable: bool) -> None:
    """The folder of a checkpoint root, and those above it, where they are missing. Raises StorageError."""
    missing = [folder for folder in (root, *root.parents) if not os.path.lexists(folder)]
    for folder in reversed(missing):
        filesystem.make_folder(folder, mode, durable=durable)
    if not root.is_dir():
        raise DestinationExistsError(
            f"{show(str(root))} is not a folder; a checkpoint root is one", path=str(root), hint="choose another root"
        )


def _check_one_device(root: Path) -> None:
    with filesystem.failing("looking at", root):
        device = root.stat().st_dev
        for name in (STAGING_FOLDER, TRASH_FOLDER):
            if (root / name).lstat().st_dev != device:
                raise StorageError(
                    f"{show(str(root / name))} lies on another file system than {show(str(root))}",
                    path=str(root / name),
                    errno=errno.EXDEV,
                    hint="unmount it: a checkpoint is published by a rename, which works on one file system",
                )


def check_space(root: Path, planned_bytes: int, *, durable: bool) -> None:
    """Refuse to begin what does not fit: there must be 5 % more room than is written. Raises StorageError."""
    needed = planned_bytes + -(-planned_bytes // _SPARE)
    free = _free_bytes(root)
    if free is not None and free < needed and filesystem.names(root / TRASH_FOLDER):
        # Recovery has put back what was to be put back: the rest was given up when something newer was published, or
        # never finished. Were it kept here, a disk once full would stay full.
        for line in trash.empty(root, durable=durable):
            _log.warning("%s", line)
        free = _free_bytes(root)
    if free is not None and free < needed:
        raise StorageError(
            f"{show(str(root))} has {free} bytes free; the save writes {planned_bytes}, with 5 % to spare {needed}",
            path=str(root),
            errno=errno.ENOSPC,
            hint="make room: `reshard prune` removes old iterations; all that is there is as it was",
        )


def _free_bytes(root: Path) -> int | None:
    """What an ordinary user can still write; None where the file system does not tell."""
    with filesystem.failing("looking at", root):
        found = os.statvfs(root)
    return found.f_bavail * found.f_frsize if found.f_blocks else None


# -- sealing


def _claim_of(attempt: Attempt) -> Claim:
    """Our claim, if it is still that of the attempt: a forked child has none, and a new one is another epoch."""
    claim = claims.held(attempt.root)
    if claim is None or claim.epoch != attempt.epoch:
        raise ClaimedError(
            f"this process does not hold claim {attempt.epoch} of {show(str(attempt.root))}, under which iteration "
            f"{attempt.iteration} was begun",
            path=str(attempt.root),
            hint="seal and publish in the process that began, before it releases the root; a fork is another process",
        )
    return claim


def _check_sound(attempt: Attempt) -> None:
    if attempt.id in _poisoned:
        raise StorageError(
            f"this attempt to save iteration {attempt.iteration} has failed before; what of it is on disk is not known",
            path=str(attempt.staging),
            errno=errno.EIO,
            hint="abandon it and save again",
        )


def _check_staged(attempt: Attempt, shards: Mapping[str, tuple[FileRecord, int]]) -> list[str]:
    """Check what lies in the folder; the names of the files that are no shard files."""
    plain, missing = [], set(shards)
    for name in filesystem.names(attempt.staging):
        path = attempt.staging / name
        if name.startswith("."):
            if name.endswith(".tmp"):  # of a write that failed and was made again
                filesystem.remove_file(path)
            continue
        with filesystem.failing("looking at", path):
            found = path.lstat()
        if not stat.S_ISREG(found.st_mode):
            raise DamagedFileError(
                f"{show(str(path))} is not a regular file; a checkpoint holds no other", path=str(path)
            )
        if name in shards:
            missing.discard(name)
            told = shards[name][0]
            if found.st_size != told.n_bytes:
                raise DamagedFileError(
                    f"{show(str(path))} has {found.st_size} bytes, its writer told of {told.n_bytes}", path=str(path)
                )
        elif name.endswith(".safetensors"):
            raise DamagedFileError(
                f"{show(str(path))} is a shard file that nobody told of", path=str(path), hint="was it written twice?"
            )
        elif name not in (MANIFEST_FILE, CHECKSUMS_FILE):
            plain.append(name)
    if missing:
        path = attempt.staging / min(missing)
        raise DamagedFileError(
            f"{show(str(path))} is missing, and {len(missing) - 1} more: their writers told that they were written",
            path=str(path),
            hint="on a network file system all ranks must see the same root",
        )
    return plain


def _shard_entries(shards: Mapping[str, tuple[FileRecord, int]]) -> dict[str, manifests.ShardEntry]:
    entries, n_chunks = {}, 0
    for name in sorted(shards):
        told, rank = shards[name]
        entry = entries[name] = manifests.ShardEntry(
            n_bytes=told.n_bytes,
            header_bytes=told.header_bytes,
            header_sum=told.header_sum,
            first_chunk=n_chunks,
            sums_digest=manifests.digest_of(told.sums),
            rank=rank,
        )
        n_chunks += entry.n_chunks
        if len(told.sums) != 4 * entry.n_chunks:
            raise ArgumentError(
                f"{show(name)}: {len(told.sums)} bytes of sums were told, {entry.n_chunks} chunks have 4 bytes each"
            )
    return entries


# -- publishing


def _put_in_place(attempt: Attempt, claim: Claim) -> None:
    root, folder, durable = attempt.root, attempt.folder, attempt.durable
    staging_parent = root / STAGING_FOLDER
    if not os.path.lexists(folder):
        try:
            filesystem.rename(attempt.staging, folder)
        except FileExistsError:
            raise _appeared(attempt) from None
        staging.sync([root, staging_parent], durable=durable)
        return
    if not attempt.replaces:
        raise _appeared(attempt)
    if os.path.lexists(folder / PINNED_FILE):  # it is the iteration that is pinned
        with contextlib.suppress(FileExistsError):
            filesystem.make_file(attempt.staging / PINNED_FILE, durable=durable)
    if staging.abilities(claim).exchanges:
        filesystem.exchange(attempt.staging, folder)
        staging.sync([root, staging_parent], durable=durable)
        trash.discard(root, attempt.staging, attempt.iteration, durable=durable)
        return
    # Under the number of the attempt: that is how `recover` knows what the old one made room for.
    trash.discard(root, folder, attempt.iteration, attempt.id, durable=durable)
    try:
        filesystem.rename(attempt.staging, folder)
    except StorageError:
        staging.put_back(root, attempt.staging, durable=durable)
        raise
    except FileExistsError:
        raise _appeared(attempt) from None
    staging.sync([root, staging_parent], durable=durable)


def _discard_left(root: Path, *, durable: bool) -> None:
    """Something newer is published: what attempts of this process left goes to the trash, old iterations with it."""
    for attempt in [one for one in _left if one.root == root]:
        _left.discard(attempt)
        with contextlib.suppress(ReshardError):
            if attempt.in_place:
                abandon(attempt)
            elif os.path.lexists(attempt.staging):
                trash.discard(root, attempt.staging, attempt.iteration, durable=durable)


def _appeared(attempt: Attempt) -> DestinationExistsError:
    return DestinationExistsError(
        f"{show(str(attempt.folder))} appeared while it was being saved",
        path=str(attempt.folder),
        hint="something else writes into this root: stop it, and save again"
        if attempt.replaces
        else "give `overwrite=True` to replace it",
    )
