"""Carrying out a planned save, all ranks together: claim, write, seal, publish; then the log and retention.

Rank 0 is the coordinator. What fails on one rank travels to the next meeting as a value and is raised on all, so that
nobody waits for a rank that has already given up, and rank 0 removes what was written.
"""

from __future__ import annotations

import base64
import datetime as dt
import functools
import logging
import os
import socket
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from reshard import _core
from reshard.errors import ArgumentError, DamagedFileError, GroupError, ReshardError, StorageError
from reshard.formats import checkpoint2, mounts, save_log, state
from reshard.group import agree
from reshard.small_files import show, write_file_atomically
from reshard.write import protocol, retention, taken
from reshard.write.arrays import local_arrays
from reshard.write.iteration import JointProgress, write_descriptions

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from reshard.formats.checkpoint2_common import CommonInfo
    from reshard.formats.save_log import SaveRecord
    from reshard.group import Group
    from reshard.layout import ModelLayout
    from reshard.write.arrays import LocalArray
    from reshard.write.facts import RankFacts
    from reshard.write.iteration import IterationPlan
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
    "meet",
    "outcome_of",
    "read_back",
    "report_of",
]

_log = logging.getLogger("reshard")

T = TypeVar("T")
R = TypeVar("R")

_FILE_MODE = 0o640
_FOLDER_MODE = 0o750
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
    keep: int | None
    keep_every: int | None
    keep_best: tuple[str, int] | None


@dataclass(frozen=True)
class Own:
    """What this rank brings along.

    Attributes:
        arrays: what it holds, by name.
        facts: what it tells of them.
        layout: how they are cut; None: they say it themselves.
        common: the counters.
        record: the line of the log, but for what is known at the end.
        extra: text and arrays of its state; None: it has none.
    """

    arrays: dict[str, LocalArray]
    facts: RankFacts
    layout: ModelLayout | None
    common: CommonInfo
    record: SaveRecord
    extra: tuple[str, dict[str, np.ndarray]] | None


@dataclass(frozen=True)
class Planned:
    """What rank 0 decided, and how many bytes it makes."""

    plan: IterationPlan
    n_bytes: int


@dataclass(frozen=True)
class Share:
    """What one rank contributes.

    Attributes:
        files: its shard files, or the exception in which making them ended.
        extra: text and arrays of its state files; None: it has none.
        common: the counters; rank 0's are written.
        record: the line of the log, but for what is known at the end; rank 0's is written.
    """

    files: list[ShardFile] | BaseException
    extra: tuple[str, dict[str, np.ndarray]] | None
    common: CommonInfo
    record: SaveRecord


@dataclass(frozen=True)
class _WrittenFile:
    """`_core.Written` of another rank."""

    n_bytes: int
    header_bytes: int
    header_sum: int
    sums: bytes = field(repr=False)


def outcome_of(work: Callable[[], T]) -> T | BaseException:
    """What the work gives, or the exception in which it ended.

    Example:
        >>> outcome_of(lambda: 1 // 0)
        ZeroDivisionError('integer division or modulo by zero')
    """
    try:
        return work()
    except BaseException as error:  # noqa: BLE001  an interrupt, too, must not leave the other ranks waiting
        return error


def meet(channel: Group, own: object, decide: Callable[[list[Any]], R] | None, timeout: float) -> R:
    """What rank 0 makes of what all ranks bring; every rank gets it, or the error of whoever failed.

    Args:
        channel: all its ranks call this.
        own: this rank's value, JSON-able, or the exception in which it ended.
        decide: what rank 0 does with the values of all ranks; it returns what is JSON-able. None on the others.
        timeout: seconds that a rank waits for the others.

    Raises:
        GroupError: a rank did not answer in time.
        ReshardError: a rank failed, or rank 0 decided so.

    Example:
        >>> from reshard.group import SingleProcess
        >>> meet(SingleProcess(), 7, lambda brought: sum(brought), timeout=10)
        7
    """
    failed = isinstance(own, BaseException)
    try:
        brought = channel.gather({"failed": True} if failed else {"value": own}, timeout=timeout)
        outcome: Any = own if failed else None
        if brought is not None and decide is not None and not any("failed" in one for one in brought):
            values = [one["value"] for one in brought]
            outcome = outcome_of(lambda: decide(values))
        result: R = agree(channel, outcome, timeout)[0]
    except Exception:
        if isinstance(own, BaseException) and not isinstance(own, Exception):
            raise own from None  # an interrupt stays one
        raise
    return result


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
    coordinator = None if planned is None else _Coordinator(terms, share.common, planned, channel.world_size)
    is_heard = True
    try:
        begun = None if coordinator is None else outcome_of(coordinator.begin)
        staging = Path(agree(channel, begun, terms.timeout)[0])
        written = outcome_of(lambda: _write_own(staging, channel.rank, terms, share, progress))
        summary = meet(channel, written, None if coordinator is None else coordinator.publish, terms.timeout)
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
        report = _aftermath(terms, coordinator.attempt, share.record, report)
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
    if not share.files and share.extra is None:
        return []
    # Not as long as rank 0 waits for this rank: it is to hear the reason.
    _wait_for(staging, min(_SIGHT_SECONDS, terms.timeout / 2))
    joint = JointProgress(progress, sum(file.n_bytes for file in share.files))
    rows = []
    for file in share.files:
        path = str(staging / file.name)
        written = file.write(path, durable=terms.durable, mode=_FILE_MODE, progress=joint.of_file(file.n_bytes))
        rows.append(_row(path, written, terms))
    if share.extra is not None:
        text, arrays = share.extra
        if arrays:
            path = str(staging / state.arrays_file_name(rank))
            own = [
                (array.name, array.dtype, array.shape, array.buffer()) for array in local_arrays(arrays, None).values()
            ]
            rows.append(_row(path, _core.write_arrays(path, own, durable=terms.durable, mode=_FILE_MODE), terms))
        write_file_atomically(staging / state.file_name(rank), text, _FILE_MODE, durable=terms.durable)
    return rows


def _row(path: str, written: _core.Written, terms: Terms) -> tuple[str, int, int, int, str]:
    """What rank 0 must know of a file that is written, read back if that is asked for."""
    if terms.verify:
        read_back(path, written, terms.threads)
    sums = base64.b64encode(written.sums).decode()
    return Path(path).name, written.n_bytes, written.header_bytes, written.header_sum, sums


def read_back(path: str, written: _core.Written, threads: int | None) -> None:
    """Read a file past the page cache. Raises DamagedFileError: it is not what was written."""
    damaged = _core.scrub(path, written.n_bytes, written.sums, threads=threads)
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
            os.close(os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise StorageError(
                    f"{staging}, which rank 0 made, did not appear on {socket.gethostname()} within {timeout:g} s",
                    path=str(staging),
                    hint="is the checkpoint root on a file system that all hosts share?",
                ) from None
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, _LAST_SLEEP_S)
        except OSError as error:
            raise StorageError(f"opening {staging}: {error.strerror}", path=str(staging), errno=error.errno) from None
        else:
            return


# -- rank 0


class _Coordinator:
    """Rank 0's side of one attempt."""

    def __init__(self, terms: Terms, common: CommonInfo, planned: Planned, world_size: int) -> None:
        self.terms = terms
        self.common = common
        self.planned = planned
        self.world_size = world_size
        self.resumed = taken.recall(terms.root)
        self.attempt: protocol.Attempt | None = None
        self.summary: dict[str, Any] | None = None  # once it is published

    def begin(self) -> str:
        """Claim the root and make the staging folder; its path."""
        terms = self.terms
        self.attempt = protocol.begin(
            terms.root,
            terms.iteration,
            planned_bytes=self.planned.n_bytes,
            durable=terms.durable,
            rollback=terms.rollback or self.resumed is not None,
            takeover=terms.takeover,
            folder_mode=_FOLDER_MODE,
        )
        return str(self.attempt.staging)

    def publish(self, reports: list[Any]) -> dict[str, Any]:
        """Describe, seal and publish what the ranks have written."""
        terms, plan = self.terms, self.planned.plan
        assert self.attempt is not None
        shards: dict[str, tuple[Any, int]] = {}
        for rank, rows in enumerate(reports):
            for name, n_bytes, header_bytes, header_sum, sums in rows:
                shards[name] = (_WrittenFile(n_bytes, header_bytes, header_sum, base64.b64decode(sums)), rank)
        planned = {file.name: file.rank for file in plan.files}
        told = {name: rank for name, (_, rank) in shards.items() if name != state.arrays_file_name(rank)}
        if told != planned:
            raise ReshardError(f"the ranks wrote {sorted(shards)}, planned were {sorted(planned)}")
        staging = self.attempt.staging
        write_descriptions(plan, staging, mode=_FILE_MODE, durable=terms.durable)
        self.common.write(staging / checkpoint2.COMMON_FILE, _FILE_MODE, durable=terms.durable)
        manifest = protocol.seal(
            self.attempt,
            shards,
            world_size=self.world_size,
            passed_over=() if self.resumed is None else self.resumed.passed_over,
            ckpt_status=self.common.ckpt_status,
            file_mode=_FILE_MODE,
        )
        warnings = list(plan.warnings)
        volatile = mounts.volatile(terms.root) if terms.durable else None
        if volatile is not None:
            warnings.append(f"{terms.root} lies on {volatile}, which forgets everything when the power is lost")
        warnings += protocol.publish(self.attempt, manifest)
        if self.resumed is not None:
            taken.forget(terms.root)
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


def _aftermath(terms: Terms, attempt: protocol.Attempt, record: SaveRecord, report: SaveReport) -> SaveReport:
    """The log and retention. The save has succeeded: what fails here is a warning."""
    warnings = append_to_log(terms, record, report, attempt.epoch, attempt.id)
    if terms.keep is not None:
        try:
            removed = retention.apply(
                terms.root,
                keep=terms.keep,
                keep_every=terms.keep_every,
                keep_best=terms.keep_best,
                durable=terms.durable,
            )
            warnings += removed.warnings
        except (ReshardError, OSError) as error:
            warnings.append(f"older iterations are not removed: {error}")
            _log.warning("%s: %s", terms.root, error)
    return replace(report, warnings=(*report.warnings, *warnings))


def append_to_log(terms: Terms, record: SaveRecord, report: SaveReport, epoch: int, attempt: str) -> list[str]:
    """A line in the log of saves, and what the report warns of in that of the program; what failed."""
    warnings: list[str] = []
    try:
        line = replace(
            record,
            saved_at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            wall_s=round(report.seconds, 3),
            stall_s=round(report.stall_seconds, 3),
            n_bytes=report.n_bytes,
            epoch=epoch,
            attempt=attempt,
        )
        save_log.append(terms.root, line, durable=terms.durable)
    except (ReshardError, OSError) as error:
        warnings.append(f"the save is not in the log: {error}")
    for warning in (*report.warnings, *warnings):
        log_once(warning)
    return warnings


@functools.lru_cache(maxsize=1024)
def log_once(warning: str) -> None:
    """What is said of a layout or a disk at every save needs to be read once; every report has it."""
    _log.warning("save: %s", warning)
