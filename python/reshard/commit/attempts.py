"""What the protocols of a commit have in common: an attempt to save an iteration, and how it is sealed.

An attempt is sealed by `checksums.bin` and then `manifest.json`, which lists every file. Whether it counts then is up
to the protocol.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from reshard import _core
from reshard.commit import filesystem
from reshard.commit import manifest as manifests
from reshard.commit.filesystem import MANIFEST_FILE
from reshard.commit.manifest import CHECKSUMS_FILE, Manifest
from reshard.errors import ArgumentError, ClaimedError, DamagedFileError, ReshardError, StorageError
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.commit.session import Claim, RootSession
    from reshard.storage.location import Location
    from reshard.storage.store import Entry


@dataclass(frozen=True)
class Attempt:
    """One attempt to save one iteration.

    Attributes:
        root: the checkpoint root.
        iteration: the iteration that is saved.
        generation: generation of the claim under which it is saved.
        id: 32 hex digits, unique to this attempt.
        staging: the folder to write into, without subfolders.
        folder: the folder that it is published as.
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
    folder: Location
    previous_tracker: int | None
    durable: bool
    replaces: bool
    session: RootSession = field(repr=False, compare=False)
    entries: tuple[Entry, ...] = ()

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
    """A record that also says which arrays hold values that are not finite, and the worst one."""

    @property
    def not_finite(self) -> Sequence[tuple[str, _core.NotFinite]]: ...  # noqa: D102


@dataclass(frozen=True)
class Content:
    """What the ranks have written, and what the manifest says of it. See `protocol.seal`."""

    shards: Mapping[str, tuple[FileRecord, int]]
    world_size: int
    unsynced: Sequence[str]
    known: Mapping[str, manifests.PlainEntry | None]
    passed_over: tuple[int, ...]
    ckpt_status: int | None
    metrics: Mapping[str, int | float]
    file_mode: int


@dataclass
class _Failed:
    """Attempts of this process that failed: what of them is stored is not known, and a second sync would not say so.

    Attributes:
        ids: their ids.
    """

    ids: set[str] = field(default_factory=set)


@dataclass
class Retired:
    """What was removed of the iterations that were to be, see `protocol.retire`.

    Attributes:
        sizes: bytes of each that was removed, by iteration, in the order in which they went.
        kept: why the others stay, by iteration.
        warnings: sentences about these.
        failed: those of which the system refused the removal.
    """

    sizes: dict[int, int] = field(default_factory=dict)
    kept: dict[int, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)


def mark_failed(attempt: Attempt) -> None:
    """Refuse to go on with an attempt in which the system failed."""
    attempt.session.of(_Failed).ids.add(attempt.id)


def forget_failed(attempt: Attempt) -> None:
    """Forget an attempt that has ended."""
    attempt.session.of(_Failed).ids.discard(attempt.id)


def check_sound(attempt: Attempt) -> None:
    """Refuse an attempt that has failed before. Raises StorageError."""
    if attempt.id in attempt.session.of(_Failed).ids:
        raise StorageError(
            f"this attempt to save iteration {attempt.iteration} has failed before; what of it is on disk is not known",
            path=str(attempt.staging),
            errno=errno.EIO,
            hint="abandon it and save again",
        )


def claim_of(attempt: Attempt) -> Claim:
    """The claim of an attempt. A forked child has no claim, and a new claim has another generation.

    Raises:
        ClaimedError: this process does not hold it.
    """
    claim = attempt.session.claim
    if claim is None or claim.generation != attempt.generation:
        raise ClaimedError(
            f"this process does not hold claim {attempt.generation} of {show(str(attempt.root))}, under which "
            f"iteration {attempt.iteration} was begun",
            path=str(attempt.root),
            hint="seal and publish in the process that began, before it releases the root; a fork is another process",
        )
    return claim


def check_sealed(attempt: Attempt, manifest: Manifest) -> None:
    """Refuse an attempt that holds another manifest than was sealed. Raises DamagedFileError."""
    if manifests.read_digest(attempt.staging) != manifest.digest:
        raise DamagedFileError(
            f"{show(str(attempt.staging))} holds another manifest than was sealed", path=str(attempt.staging)
        )


def seal_files(attempt: Attempt, content: Content, previous_tracker: int | None) -> Manifest:
    """Check the files of an attempt and write the checksums and the manifest, as the last file.

    Args:
        attempt: what `protocol.begin` returned.
        content: what was written.
        previous_tracker: the iteration that the tracker names now.

    Raises:
        DamagedFileError: see `protocol.seal`.
        StorageError: the system failed; the attempt can only be abandoned.
    """
    shards, file_mode = content.shards, content.file_mode
    try:
        plain = _check_staged(attempt, shards)
        checksums = b"".join(shards[name][0].checksums for name in sorted(shards))
        filesystem.replace_file(attempt.staging / CHECKSUMS_FILE, checksums, file_mode, durable=False)
        entries = dict(content.known) | {
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
            world_size=content.world_size,
            previous_tracker=previous_tracker,
            passed_over=content.passed_over,
            writer=f"reshard {_core.__version__}",
            saved_at=dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            ckpt_status=content.ckpt_status,
            shards=_shard_entries(shards),
            files=files,
            metrics=content.metrics,
        )
        filesystem.announce(f"write {MANIFEST_FILE}")
        manifests.write(
            attempt.staging, manifest, file_mode, durable=attempt.durable, unsynced=[*content.unsynced, CHECKSUMS_FILE]
        )
    except StorageError:
        mark_failed(attempt)
        raise
    return manifest


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


def n_bytes_of(folder: Location) -> int:
    """Bytes of the files of a folder; 0 if it cannot be listed."""
    with contextlib.suppress(ReshardError):
        return sum(n_bytes for _, _, n_bytes in folder.sizes())
    return 0
