"""A save by all ranks of a group: one sequence of steps, which a format of saving completes.

    1. every rank reports what it holds; rank 0 checks the reports and answers with a plan
    2. every rank prepares its files; with `blocking=False` that copies their content, and the rest is done in the
       background
    3. the copies of an array on several ranks are compared
    4. rank 0 claims the root and begins
    5. every rank writes its files; rank 0 publishes what all have written, and appends to the log
    6. every rank confirms, in a format in which a restart finds the save by a file of each rank; rank 0 appends to the
       log then
    7. older saves are removed; `after` is called

The error of one rank is sent in place of its next message and is raised on all ranks, so that no rank waits for one
that has failed. `SaveFormat` is what a format does in each step.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import logging
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from reshard.commit import claims, save_log
from reshard.errors import ArgumentError, CheckpointNotFoundError, GroupError, ReshardError, StorageError
from reshard.ranks.collective import Collective, capture
from reshard.storage import mounts
from reshard.storage.location import Location, locate
from reshard.values.events import Observers
from reshard.write import background
from reshard.write.shard_files import reserved_bytes, shard_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from reshard import _core
    from reshard.commit.save_log import SaveRecord
    from reshard.formats.base import Traits
    from reshard.formats.checkpoint2.common import CommonInfo
    from reshard.formats.checkpoint2.rank_facts import RankFacts
    from reshard.formats.replicas import Copies, Replicas, State
    from reshard.layout import ModelLayout
    from reshard.options import SaveOptions
    from reshard.ranks.group import Group
    from reshard.write.arrays import LocalArrays
    from reshard.write.background import PendingSave
    from reshard.write.shard_files import ShardFile, ShardFileMaker

_log = logging.getLogger("reshard")


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
        durable: whether the iteration survives a loss of power: this was requested, and the file system is capable.
        digest: of the manifest, or of the checksums of the files: it identifies this content of the iteration.
        warnings: what deserves attention.
        suffix: of Checkpoint 1.0, the end of the names of its files, such as "20_2" or, of a later run, "1-20_2".
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


class SaveTask(NamedTuple):
    """What is saved where and how; the same on all ranks. See `save`."""

    root: Path
    iteration: int
    timeout: float
    options: SaveOptions

    @property
    def durable(self) -> bool:
        """Whether files and folders are synced before the save is published."""
        return self.options.commit.durable

    @property
    def file_mode(self) -> int:
        """Permission bits of files, less the umask."""
        return 0o600 if self.options.commit.private else 0o666

    @property
    def folder_mode(self) -> int:
        """Permission bits of folders, less the umask."""
        return 0o700 if self.options.commit.private else 0o777


class RankInput(NamedTuple):
    """What this rank holds.

    Attributes:
        arrays: its arrays, by name.
        facts: what it reports of them.
        layout: how they are partitioned; None: the arrays are shards that say it themselves.
        common: the counters; rank 0's are saved.
        record: the line of the log, except for what is known at the end; rank 0's is written.
        copies: its copies of arrays of other ranks, and its state.
        observers: called with the events of this rank.
    """

    arrays: LocalArrays
    facts: RankFacts
    layout: ModelLayout | None
    common: CommonInfo
    record: SaveRecord
    copies: Copies
    observers: Observers = Observers()


class Published(NamedTuple):
    """What rank 0 has published.

    Attributes:
        path: see `SaveReport`, also for the attributes that follow.
        n_bytes: see there.
        n_files: see there.
        durable: see there.
        digest: see there.
        warnings: see there.
        suffix: see there.
        generation: the number of the claim.
        attempt_id: 32 hex digits for the log of saves; None: this save has no line there.
        ckpt_status: the health of the save, if its values were looked at; None: only what the caller gave is known.
    """

    path: str
    n_bytes: int
    n_files: int
    durable: bool
    digest: str
    warnings: tuple[str, ...]
    suffix: str | None
    generation: int
    attempt_id: str | None
    ckpt_status: int | None = None


class SavePlan(Protocol):
    """What rank 0 answers; each format has a message of its own."""

    @property
    def replicas(self) -> Replicas:
        """Which ranks hold copies of what."""


class SaveFormat(ABC):
    """One rank's part of one save in a format. `save_collectively` calls the methods in the order in which they stand.

    Attributes:
        traits: of the format.
        report_type: the message of each rank to rank 0.
        plan_type: the answer of rank 0, a `SavePlan`.
        begun_type: the message of rank 0 once it has begun.
        written_type: the message of each rank once its files are on the disk.
        confirms: whether step 6 takes place.
        log: appends a line about what rank 0 has published to the log. Returns the files to be synced with the names.
            A format that does not confirm calls it when it publishes.
    """

    traits: ClassVar[Traits]
    report_type: ClassVar[Any]
    plan_type: ClassVar[Any]
    begun_type: ClassVar[Any]
    written_type: ClassVar[Any]

    def __init__(self, task: SaveTask, channel: Group, own: RankInput) -> None:
        """Begin one save.

        Args:
            task: what is saved where and how.
            channel: the session of the save.
            own: what this rank holds.
        """
        self.task = task
        self.rank = channel.rank
        self.world_size = channel.world_size
        self.own = own
        self.confirms = False
        self.log: Callable[[Published], list[Location]] = lambda _: []

    @staticmethod
    @abstractmethod
    def check_options(options: SaveOptions, model: Mapping[str, object]) -> None:
        """Refuse options that the format does not have, or that do not fit what this rank saves, by key.

        Raises:
            ArgumentError: there is such an option.
        """

    @staticmethod
    def is_note(warning: str) -> bool:  # noqa: ARG004
        """Whether a warning of the report is of no use in the log of this program."""
        return False

    @abstractmethod
    def check_root(self) -> None:
        """On rank 0: refuse a root that a restart would open as another format. Raises ReshardError."""

    @abstractmethod
    def report(self) -> Any:
        """What this rank sends to rank 0."""

    @abstractmethod
    def check(self, reports: list[Any]) -> Any:
        """On rank 0: check that what the ranks reported can be saved; writes nothing. Raises ReshardError."""

    @abstractmethod
    def plan(self, reports: list[Any]) -> Any:
        """On rank 0: check, and make the plan; writes nothing. Raises ReshardError."""

    @abstractmethod
    def prepare(self, plan: Any, make: ShardFileMaker) -> None:
        """Make the files of this rank ready to be written."""

    @abstractmethod
    def begin(self) -> Any:
        """On rank 0: claim the root."""

    @abstractmethod
    def write(self, begun: Any, state: State, progress: _core.Progress | None) -> Any:
        """Write the files of this rank, and sync them.

        Args:
            begun: the message of rank 0.
            state: text and arrays of this rank's state files; None: it has none.
            progress: called as `progress(done_bytes, total_bytes)`.
        """

    @abstractmethod
    def publish(self, written: list[Any], *, durable: bool) -> Published:
        """On rank 0: publish what all ranks have written.

        Args:
            written: the messages of the ranks.
            durable: whether what is published survives a loss of power.
        """

    def confirm(self) -> None:  # noqa: B027  most formats have no such step
        """On every rank, if the format `confirms`: from now on a restart may find the save."""

    def confirmed(self) -> tuple[str, ...]:
        """On rank 0: all ranks have confirmed. Returns warnings."""
        return ()

    @abstractmethod
    def withdraw(self, *, is_known: bool) -> None:
        """The save has failed: leave nothing of it. Never raises.

        Args:
            is_known: whether all ranks know that it failed. If not, the others may have gone on.
        """

    @abstractmethod
    def remove_older(self, published: Published) -> list[str]:
        """Remove what is no longer kept, once the save has succeeded. Returns warnings: nothing is raised.

        Args:
            published: what rank 0 has published.
        """


def save_collectively(
    save: SaveFormat | BaseException,
    task: SaveTask,
    channel: Group,
    *,
    started: float,
    blocking: bool,
    dry_run: bool = False,
    ready: Callable[[], object] | None = None,
    progress: _core.Progress | None = None,
    after: Callable[[SaveReport], list[str]] | None = None,
) -> SaveReport | PendingSave[SaveReport] | None:
    """Save; all ranks call this. No rank raises unless nothing is published, except for `GroupError`.

    Args:
        save: this rank's part, or the exception that it met while it was made.
        task: what is saved where and how.
        channel: the session of this save.
        started: when `reshard.save` was called, on the monotonic clock.
        blocking: whether to wait for the end.
        dry_run: check without claiming the root or writing; with `blocking=False` and without `ready`, memory is
            reserved for the copies.
        ready: as in `reshard.save`.
        progress: as in `reshard.save`.
        after: as in `reshard.save`.

    Returns:
        The report; with `blocking=False` what waits for it; with `dry_run` None.

    Raises:
        GroupError: a rank did not answer in time. Nothing is published, unless only the last message was lost.
        ReshardError: what a rank met.
    """
    ranks = Collective(channel, task.timeout)
    if not dry_run and not isinstance(save, BaseException):
        n_bytes = save.own.arrays.n_bytes
        save.own.observers("begun", task.iteration, n_bytes=n_bytes, n_ranks=channel.world_size, blocking=blocking)
    if isinstance(save, BaseException):
        ranks.combine(save, None)  # raises it, and an error on the other ranks
        raise save
    report = capture(save.report)
    if dry_run and blocking:
        ranks.combine(report, functools.partial(_check, save), save.report_type, None)
        return None
    plan = ranks.combine(report, functools.partial(_plan, save), save.report_type, save.plan_type)
    if dry_run:
        if ready is None:
            _reserve(save, plan)
        return None
    save.own.copies.replicas = plan.replicas
    make = functools.partial(shard_file, threads=task.options.threads, blocking=blocking, ready=ready)
    error = capture(lambda: save.prepare(plan, make))
    if not blocking and ready is None:
        save.own.copies.freeze(ranks.rank)
    finish = functools.partial(_finish, save, error, ranks, started=started, after=after)
    if blocking:
        return finish(progress=progress)
    stall_seconds = time.monotonic() - started
    if ready is None:
        save.own.observers("copied", task.iteration, seconds=stall_seconds)
    finish = functools.partial(_watched, save, started, functools.partial(finish, stall_seconds=stall_seconds))
    return background.start(task.iteration, finish, progress, exit_seconds=task.timeout, root=task.root)


def _watched(
    save: SaveFormat, started: float, finish: Callable[..., SaveReport], progress: _core.Progress | None
) -> SaveReport:
    """Finish a save in the background; its failure is an event."""
    try:
        return finish(progress=progress)
    except BaseException as error:
        save_failed(save.own.observers, save.task.iteration, error, started)
        raise


def save_failed(observers: Observers, iteration: int, error: BaseException, started: float) -> None:
    """Make the event of a save that has failed.

    Args:
        observers: called with the event.
        iteration: what was saved.
        error: the error of this rank.
        started: when `reshard.save` was called, on the monotonic clock.
    """
    reason = error.message if isinstance(error, ReshardError) else str(error)
    seconds = time.monotonic() - started
    observers("failed", iteration, error=type(error).__name__, reason=reason, seconds=seconds)


def _reserve(save: SaveFormat, plan: Any) -> None:
    """Reserve memory for the copies of this rank's files."""
    sizes = []

    def measured(name: str, arrays: LocalArrays, metadata: Mapping[str, str]) -> ShardFile:
        sizes.append(reserved_bytes(arrays))
        return shard_file(name, arrays, metadata, blocking=True)

    save.prepare(plan, measured)
    background.snapshot_pool().reserve(sizes)


def _check(save: SaveFormat, reports: list[Any]) -> None:
    save.check_root()
    save.check(reports)


def _plan(save: SaveFormat, reports: list[Any]) -> Any:
    save.check_root()
    return save.plan(reports)


def _finish(
    save: SaveFormat,
    error: BaseException | None,
    ranks: Collective,
    *,
    started: float,
    stall_seconds: float | None = None,
    progress: _core.Progress | None = None,
    after: Callable[[SaveReport], list[str]] | None = None,
) -> SaveReport:
    """Steps 3 to 7.

    Args:
        save: this rank's part.
        error: what this rank met in step 2; the other ranks do not know of it.
        ranks: all ranks of the save.
        started: when `reshard.save` was called, on the monotonic clock.
        stall_seconds: how long the caller waited; None: it is waiting.
        progress: as in `reshard.save`.
        after: as in `reshard.save`.
    """
    task, observers = save.task, save.own.observers
    state = save.own.copies.settle(ranks.channel, task.timeout)
    written: object = None
    published: Published | None = None  # on rank 0, once a restart finds the save
    watched = observers.progress(task.iteration, progress)
    log_warnings: list[str] = []
    record = save.own.record  # `log` does not refer to `save`, which refers to it: memory is freed without a collection

    def write() -> Any:
        for failed in (error, state):
            if isinstance(failed, BaseException):
                raise failed
        begin = time.monotonic()
        with _taken_over(task.root):
            done = save.write(begun, state, watched if observers.functions else progress)  # type: ignore[arg-type]
        observers("written", task.iteration, n_bytes=watched.n_bytes, seconds=time.monotonic() - begin)
        return done

    def log(done: Published) -> list[Location]:
        report = _report_of(task, done, started, stall_seconds)
        warnings = _append_to_log(task, record, done, report, durable=False)
        log_warnings.extend(warnings)
        return [] if warnings else [locate(task.root) / save_log.SAVE_LOG_FILE]

    def publish(messages: list[Any]) -> Published:
        nonlocal published
        save.log = log
        volatile = mounts.volatile(task.root) if task.durable else None
        with _taken_over(task.root):
            done = save.publish(messages, durable=task.durable and volatile is None)
        if volatile is not None:
            warning = f"{task.root} is on {volatile}, which is volatile: its content is lost with the power"
            done = done._replace(warnings=(*done.warnings, warning))
        if not save.confirms:
            published = done
        return done

    def confirmed(_: list[None]) -> tuple[str, ...]:
        nonlocal published
        warnings = save.confirmed()
        published = result._replace(warnings=(*result.warnings, *warnings))
        return warnings

    is_heard = True
    try:
        begun = ranks.first(save.begin, save.begun_type)
        written = capture(write)
        result = ranks.combine(written, publish, save.written_type, Published)
        if save.confirms:
            done = capture(save.confirm)
            more = ranks.combine(done, confirmed, None, tuple[str, ...])
            result = result._replace(warnings=(*result.warnings, *more))
    except BaseException as failure:
        if not isinstance(failure, GroupError) or published is None:
            is_known = isinstance(failure, ReshardError) and not isinstance(failure, GroupError)
            save.withdraw(is_known=is_known or isinstance(written, BaseException))
            raise
        # It is published, although not every rank was told.
        warning = f"not every rank learned that the save succeeded: {failure.message}"
        result, is_heard = published._replace(warnings=(*published.warnings, warning)), False
    report = _report_of(task, result, started, stall_seconds)
    if ranks.rank == 0 and save.confirms:
        log_warnings = _append_to_log(task, record, result, report, durable=task.durable)
    observers.first(
        "published",
        task.iteration,
        n_bytes=report.n_bytes,
        n_files=report.n_files,
        seconds=report.seconds,
        stall_seconds=report.stall_seconds,
        durable=report.durable,
        path=report.path,
    )
    report = replace(report, warnings=(*report.warnings, *log_warnings, *save.remove_older(result)))
    if ranks.rank == 0:
        for warning in report.warnings:
            log_once(warning, is_note=save.is_note(warning))
    return report if after is None or not is_heard else _call_after(after, report)


@contextlib.contextmanager
def _taken_over(root: Path) -> Iterator[None]:
    """On rank 0: raise ClaimedError in place of a file error, if another process has taken the root over.

    That process removes the staging folder of this save, and the file error would not say so.
    """
    try:
        yield
    except (StorageError, CheckpointNotFoundError):
        claim = claims.held(root)
        if claim is not None:
            claims.check(claim)
        raise


def _report_of(task: SaveTask, published: Published, started: float, stall_seconds: float | None) -> SaveReport:
    seconds = time.monotonic() - started
    known = published._asdict()
    del known["generation"], known["attempt_id"], known["ckpt_status"]
    stall_seconds = seconds if stall_seconds is None else stall_seconds
    return SaveReport(iteration=task.iteration, seconds=seconds, stall_seconds=stall_seconds, **known)


def _append_to_log(
    task: SaveTask, record: SaveRecord, published: Published, report: SaveReport, *, durable: bool
) -> list[str]:
    """A line in the log of saves. Returns warnings."""
    if published.attempt_id is None:
        return []
    try:
        line = replace(
            record,
            saved_at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            wall_s=round(report.seconds, 3),
            stall_s=round(report.stall_seconds, 3),
            n_bytes=report.n_bytes,
            generation=published.generation,
            attempt=published.attempt_id,
            ckpt_status=record.ckpt_status if published.ckpt_status is None else published.ckpt_status,
        )
        save_log.append(task.root, line, durable=durable, mode=task.file_mode)
    except (ReshardError, OSError) as error:
        return [f"the save is not in the log: {error}"]
    return []


def _call_after(after: Callable[[SaveReport], list[str]], report: SaveReport) -> SaveReport:
    warnings = after(report)
    is_list = isinstance(warnings, list | tuple) and all(isinstance(text, str) for text in warnings)
    if warnings is not None and not is_list:
        raise ArgumentError(
            f"iteration {report.iteration} is saved, but `after` returned a {type(warnings).__name__}, expected a list "
            "of texts that become warnings of the report"
        )
    return replace(report, warnings=(*report.warnings, *(warnings or ())))


@functools.lru_cache(maxsize=1024)
def log_once(warning: str, *, is_note: bool) -> None:
    """Log a warning of a report the first time that it is given: a layout or a disk causes it at every save."""
    _log.log(logging.DEBUG if is_note else logging.WARNING, "save: %s", warning)
