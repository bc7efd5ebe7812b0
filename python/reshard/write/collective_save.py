"""Carrying out a planned save, all ranks together: claim, write, seal, publish; then the log and retention.

Rank 0 is the coordinator. What fails on one rank travels to the next meeting as a value and is raised on all, so that
nobody waits for a rank that has already given up, and rank 0 removes what was written.
"""

from __future__ import annotations

import base64
import datetime as dt
import functools
import logging
import socket
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from reshard import _core
from reshard.collective import Collective, capture
from reshard.errors import (
    ArgumentError,
    CheckpointNotFoundError,
    DamagedFileError,
    GroupError,
    ReshardError,
    StorageError,
)
from reshard.formats import proofs, save_log, state
from reshard.formats.checkpoint2 import names as checkpoint2
from reshard.storage import mounts, protocol
from reshard.storage.location import locate
from reshard.words import show
from reshard.write import pending_rollback, retention
from reshard.write.arrays import local_arrays
from reshard.write.iteration import JointProgress, write_descriptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.formats.checkpoint2.common import CommonInfo
    from reshard.formats.manifest import Manifest
    from reshard.formats.save_log import SaveRecord
    from reshard.group import Group
    from reshard.layout import ModelLayout
    from reshard.options import Retention
    from reshard.write.arrays import LocalArray
    from reshard.write.iteration import IterationPlan
    from reshard.write.rank_facts import RankFacts
    from reshard.write.replicas import Copies, Replicas, State
    from reshard.write.shard_files import ShardFile

__all__ = [
    "Own",
    "Planned",
    "SaveReport",
    "Share",
    "Terms",
    "append_to_log",
    "carry_out",
    "log_once",
    "read_back",
    "report_of",
]

_log = logging.getLogger("reshard")

T = TypeVar("T")
R = TypeVar("R")

_LAST_SLEEP_S = 1.0
_SIGHT_SECONDS = 60.0  # for which a network file system may remember that a folder was not there


@dataclass(frozen=True)
class SaveReport:
    """What was saved.

    Attributes:
        path: the iteration folder; of Checkpoint 1.0 the root.
        iteration: its number.
        n_bytes: bytes of all files of the iteration.
        n_files: shard files of all ranks.
        seconds: from the call to the end of the save.
        stall_seconds: how long the caller waited in `save`.
        durable: whether the iteration survives a loss of power: asked for, and within the file system's means.
        digest: of its manifest, or of its files' sums: it names this content of the iteration and no other.
        warnings: what deserves a look.
        suffix: of Checkpoint 1.0, what the names of its files end in, such as "20_2" or, of a later run, "1-20_2".
    """

    path: str
    iteration: int
    n_bytes: int
    n_files: int
    seconds: float
    stall_seconds: float
    durable: bool
    digest: str
    warnings: tuple[str, ...] = ()
    suffix: str | None = None


@dataclass(frozen=True)
class Terms:
    """How it is saved, the same on all ranks; see the arguments of `save`."""

    root: Path
    iteration: int
    durable: bool
    verify: bool
    rollback: bool
    takeover: bool
    timeout: float
    threads: int | None
    retention: Retention | None
    private: bool = False

    @property
    def file_mode(self) -> int:
        """Permission bits of files, less the umask."""
        return 0o600 if self.private else 0o666

    @property
    def folder_mode(self) -> int:
        """Permission bits of folders, less the umask."""
        return 0o700 if self.private else 0o777


@dataclass(frozen=True)
class Own:
    """What this rank brings along.

    Attributes:
        arrays: what it holds, by name.
        facts: what it tells of them.
        layout: how they are cut; None: they say it themselves.
        common: the counters.
        record: the line of the log, but for what is known at the end.
        copies: what it holds copies of; and its state.
    """

    arrays: dict[str, LocalArray]
    facts: RankFacts
    layout: ModelLayout | None
    common: CommonInfo
    record: SaveRecord
    copies: Copies


@dataclass(frozen=True)
class Planned:
    """What rank 0 decided, how many bytes it makes, and which ranks hold copies of what."""

    plan: IterationPlan
    n_bytes: int
    replicas: Replicas


@dataclass(frozen=True)
class Share:
    """What one rank contributes.

    Attributes:
        files: its shard files, or the exception in which making them ended.
        common: the counters; rank 0's are written.
        record: the line of the log, but for what is known at the end; rank 0's is written.
        copies: what this rank holds copies of; and its state.
        extra: text and arrays of its state files, once copies were compared; None: it has none. Or the exception in
            which making them ended.
    """

    files: list[ShardFile] | BaseException
    common: CommonInfo
    record: SaveRecord
    copies: Copies
    extra: State | BaseException = None


@dataclass(frozen=True)
class _WrittenFile:
    """`_core.Written` of another rank."""

    n_bytes: int
    header_bytes: int
    header_checksum: int
    checksums: bytes = field(repr=False)


def report_of(terms: Terms, summary: dict[str, Any], started: float, stall_seconds: float | None) -> SaveReport:
    """The report of a save that rank 0 has summed up.

    Args:
        terms: how it was saved.
        summary: path, bytes, files, durability, digest and warnings, by the names that the report has for them.
        started: when `save` was called, on the monotonic clock.
        stall_seconds: how long the caller waited; None: it is waiting.
    """
    seconds = time.monotonic() - started
    return SaveReport(
        **{**summary, "warnings": tuple(summary["warnings"])},
        iteration=terms.iteration,
        seconds=seconds,
        stall_seconds=seconds if stall_seconds is None else stall_seconds,
    )


def carry_out(
    terms: Terms,
    channel: Group,
    share: Share,
    planned: Planned | None,
    *,
    started: float,
    stall_seconds: float | None = None,
    progress: _core.Progress | None = None,
    after: Callable[[SaveReport], list[str]] | None = None,
) -> SaveReport:
    """Save what was planned. All ranks call this; none raises unless nothing is published, but see `GroupError`.

    Args:
        terms: how.
        channel: the session of this save.
        share: what this rank contributes.
        planned: rank 0's plan; None on the others.
        started: when `save` was called, on the monotonic clock.
        stall_seconds: how long the caller waited; None: it is waiting.
        progress: called as `progress(done_bytes, total_bytes)` with this rank's bytes.
        after: as in `save`.

    Raises:
        GroupError: a rank did not answer in time. Nothing is published, unless only rank 0's last word was lost.
        ReshardError: whatever a rank met.
    """
    coordinator = None if planned is None else _Coordinator(terms, share, planned, channel.world_size)
    ranks = Collective(channel, terms.timeout)
    is_heard = True
    # Before the root is touched: what differs is not saved.
    share = replace(share, extra=share.copies.settle(channel, terms.timeout))
    try:
        begun = None if coordinator is None else capture(coordinator.begin)
        staging, is_read_back = ranks.share(begun)[0]
        own_terms = replace(terms, verify=is_read_back)
        written = capture(lambda: _write_own(Path(staging), channel.rank, own_terms, share, progress))
        summary = ranks.combine(written, None if coordinator is None else coordinator.publish)
    except GroupError as error:
        if coordinator is None or coordinator.summary is None:
            raise
        # It is published, whoever has not heard of it.
        summary = coordinator.summary
        summary["warnings"].append(f"not every rank learned that the save succeeded: {error.message}")
        is_heard = False
    finally:
        if coordinator is not None:
            coordinator.clean_up()
    report = report_of(terms, summary, started, stall_seconds)
    if coordinator is not None and coordinator.attempt is not None:
        report = _aftermath(terms, coordinator.attempt, coordinator.proven, share.record, report)
    if after is None or not is_heard:
        return report
    told = after(report)
    if told is not None and not (isinstance(told, list | tuple) and all(isinstance(text, str) for text in told)):
        raise ArgumentError(
            f"iteration {terms.iteration} is saved, but `after` returned a {type(told).__name__}, expected a list of "
            "texts that become warnings of the report"
        )
    return replace(report, warnings=(*report.warnings, *(told or ())))


# -- every rank


def _write_own(
    staging: Path, rank: int, terms: Terms, share: Share, progress: _core.Progress | None
) -> list[tuple[str, int, int, int, str]]:
    """Write this rank's files; what rank 0 must know of each that has sums, the arrays beside its state among them."""
    if isinstance(share.files, BaseException):
        raise share.files
    if isinstance(share.extra, BaseException):
        raise share.extra
    if not share.files and share.extra is None:
        return []
    # Not as long as rank 0 waits for this rank: it is to hear the reason.
    _wait_for(staging, min(_SIGHT_SECONDS, terms.timeout / 2))
    joint = JointProgress(progress, sum(file.n_bytes for file in share.files))
    rows = []
    for file in share.files:
        path = str(staging / file.name)
        written = file.write(path, durable=terms.durable, mode=terms.file_mode, progress=joint.of_file(file.n_bytes))
        rows.append(_row(path, written, terms))
    if share.extra is not None:
        text, arrays = share.extra
        if arrays:
            path = str(staging / state.arrays_file_name(rank))
            own = [
                (array.name, array.dtype, array.shape, array.buffer()) for array in local_arrays(arrays, None).values()
            ]
            rows.append(_row(path, _core.write_arrays(path, own, durable=terms.durable, mode=terms.file_mode), terms))
        locate(staging / state.file_name(rank)).replace(text, terms.file_mode, durable=terms.durable)
    return rows


def _row(path: str, written: _core.Written, terms: Terms) -> tuple[str, int, int, int, str]:
    """What rank 0 must know of a file that is written, read back if that is asked for."""
    if terms.verify:
        read_back(path, written, terms.threads)
    checksums = base64.b64encode(written.checksums).decode()
    return Path(path).name, written.n_bytes, written.header_bytes, written.header_checksum, checksums


def read_back(path: str, written: _core.Written, threads: int | None) -> None:
    """Read a file past the page cache. Raises DamagedFileError: it is not what was written."""
    damaged = _core.scrub(path, written.n_bytes, written.checksums, threads=threads)
    if damaged:
        first, end = damaged[0]
        raise DamagedFileError(
            f"{show(path)}: bytes {first} to {end}, read back, are not what was written",
            path=path,
            hint="the disk or the memory fails: save elsewhere",
        )


def _wait_for(staging: Path, timeout: float) -> None:
    """Wait until the folder that rank 0 made is seen here: a network file system may remember that it was not there."""
    deadline, sleep_s = time.monotonic() + timeout, 0.001
    while True:
        try:
            locate(staging).opened().close()
        except CheckpointNotFoundError:
            if time.monotonic() > deadline:
                raise StorageError(
                    f"{staging}, which rank 0 made, did not appear on {socket.gethostname()} within {timeout:g} s",
                    path=str(staging),
                    hint="is the checkpoint root on a file system that all hosts share?",
                ) from None
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, _LAST_SLEEP_S)
        else:
            return


# -- rank 0


class _Coordinator:
    """Rank 0's side of one attempt."""

    def __init__(self, terms: Terms, share: Share, planned: Planned, world_size: int) -> None:
        self.terms = terms
        self.common = share.common
        self.metrics = share.record.metrics
        self.planned = planned
        self.world_size = world_size
        self.resumed = pending_rollback.get(terms.root)
        self.attempt: protocol.Attempt | None = None
        self.is_read_back = terms.verify
        self.proven: Manifest | None = None  # once it is published, if it was read back
        self.summary: dict[str, Any] | None = None  # once it is published

    def begin(self) -> tuple[str, bool]:
        """Claim the root and make the staging folder; its path, and whether what is written is to be read back."""
        terms = self.terms
        self.attempt = protocol.begin(
            terms.root,
            terms.iteration,
            planned_bytes=self.planned.n_bytes,
            durable=terms.durable,
            rollback=terms.rollback or self.resumed is not None,
            takeover=terms.takeover,
            folder_mode=terms.folder_mode,
        )
        if terms.retention is not None and not terms.verify:
            self.is_read_back = retention.must_read_back(terms.root, terms.iteration, terms.retention.keep)
        return str(self.attempt.staging), self.is_read_back

    def publish(self, reports: list[Any]) -> dict[str, Any]:
        """Describe, seal and publish what the ranks have written."""
        terms, plan = self.terms, self.planned.plan
        assert self.attempt is not None
        shards: dict[str, tuple[Any, int]] = {}
        for rank, rows in enumerate(reports):
            for name, n_bytes, header_bytes, header_checksum, checksums in rows:
                shards[name] = (_WrittenFile(n_bytes, header_bytes, header_checksum, base64.b64decode(checksums)), rank)
        planned = {file.name: file.rank for file in plan.files}
        told = {name: rank for name, (_, rank) in shards.items() if name != state.arrays_file_name(rank)}
        if told != planned:
            raise ReshardError(f"the ranks wrote {sorted(shards)}, planned were {sorted(planned)}")
        staging = self.attempt.staging
        write_descriptions(plan, staging, mode=terms.file_mode, durable=terms.durable)
        self.common.write(staging / checkpoint2.COMMON_FILE, terms.file_mode, durable=terms.durable)
        manifest = protocol.seal(
            self.attempt,
            shards,
            world_size=self.world_size,
            passed_over=() if self.resumed is None else self.resumed.passed_over,
            ckpt_status=self.common.ckpt_status,
            metrics=self.metrics,
            file_mode=terms.file_mode,
        )
        warnings = list(plan.warnings)
        volatile = mounts.volatile(terms.root) if terms.durable else None
        if volatile is not None:
            warnings.append(f"{terms.root} lies on {volatile}, which forgets everything when the power is lost")
        warnings += protocol.publish(self.attempt, manifest)
        if self.resumed is not None:
            pending_rollback.forget(terms.root)
        self.proven = manifest if self.is_read_back else None
        self.summary = {
            "path": str(terms.root / checkpoint2.iteration_folder_name(terms.iteration)),
            "n_bytes": manifest.n_bytes,
            "n_files": len(planned),
            "durable": terms.durable and volatile is None,
            "digest": manifest.digest,
            "warnings": warnings,
        }
        return self.summary

    def clean_up(self) -> None:
        """Leave no debris of an attempt that was not published."""
        if self.attempt is not None and self.summary is None:
            protocol.abandon(self.attempt)


def _aftermath(
    terms: Terms, attempt: protocol.Attempt, proven: Manifest | None, record: SaveRecord, report: SaveReport
) -> SaveReport:
    """The log and retention. The save has succeeded: what fails here is a warning.

    Args:
        terms: how it was saved.
        attempt: the one that was published.
        proven: its manifest, if its files were read back.
        record: the line of the log, but for what is known at the end.
        report: what is told of the save.
    """
    warnings = append_to_log(terms, record, report, attempt.generation, attempt.id)
    if proven is not None:
        try:
            proofs.write(attempt.folder, proven, proofs.state_of(attempt.folder, proven), None)
        except ReshardError as error:
            warnings.append(f"that the save was read back is not recorded: {error.message}")
    if terms.retention is not None:
        try:
            removed = retention.apply(
                terms.root,
                terms.retention,
                durable=terms.durable,
                verify=False,
                verified=() if proven is None else (proven.digest,),
            )
            warnings += removed.warnings
        except (ReshardError, OSError) as error:
            warnings.append(f"older iterations are not removed: {error}")
            _log.warning("%s: %s", terms.root, error)
    return replace(report, warnings=(*report.warnings, *warnings))


def append_to_log(terms: Terms, record: SaveRecord, report: SaveReport, generation: int, attempt: str) -> list[str]:
    """A line in the log of saves, and what the report warns of in that of the program; what failed."""
    warnings: list[str] = []
    try:
        line = replace(
            record,
            saved_at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            wall_s=round(report.seconds, 3),
            stall_s=round(report.stall_seconds, 3),
            n_bytes=report.n_bytes,
            generation=generation,
            attempt=attempt,
        )
        save_log.append(terms.root, line, durable=terms.durable, mode=terms.file_mode)
    except (ReshardError, OSError) as error:
        warnings.append(f"the save is not in the log: {error}")
    for warning in (*report.warnings, *warnings):
        log_once(warning)
    return warnings


@functools.lru_cache(maxsize=1024)
def log_once(warning: str) -> None:
    """What is said of a layout or a disk at every save needs to be read once; every report has it."""
    _log.warning("save: %s", warning)
