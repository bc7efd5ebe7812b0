"""A save by all ranks of a group: the phases of a format (`phases`), and the messages between the ranks.

    1. every rank reports what it holds; rank 0 checks the reports and answers with its orders. What was said in an
       earlier save is not said again (`ranks.recurring`)
    2. every rank prepares its files; with `blocking=False` that copies their content, and the rest is done in the
       background
    3. the copies of an array on several ranks are compared
    4. rank 0 claims the root and begins
    5. every rank writes its files; rank 0 publishes what all have written, and appends to the log
    6. every rank confirms, in a format in which a restart finds the save by a file of each rank; rank 0 appends to the
       log then
    7. older saves are removed; `after` is called

The error of one rank is sent in place of its next message and is raised on all ranks, so that no rank waits for one
that has failed.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from reshard.commit import claims, save_log
from reshard.errors import ArgumentError, CheckpointNotFoundError, GroupError, ReshardError, StorageError
from reshard.ranks import recurring
from reshard.ranks.collective import Collective, capture
from reshard.storage import mounts
from reshard.write import background
from reshard.write.phases import BegunT, OrdersT, Published, ReportT, WrittenT
from reshard.write.shard_files import reserved_bytes, shard_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from reshard import _core
    from reshard.ranks.group import Group
    from reshard.storage.location import Location
    from reshard.values.events import Observers
    from reshard.write.arrays import LocalArrays
    from reshard.write.background import PendingSave
    from reshard.write.phases import Begun, Draft, Planned, Prepared, Publication, RankInput, SaveTask, Written
    from reshard.write.replicas import Replicas
    from reshard.write.shard_files import ShardFile

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


def save_collectively(
    draft: Draft[ReportT, OrdersT, BegunT, WrittenT] | BaseException,
    task: SaveTask,
    channel: Group,
    *,
    check_root: Callable[[], object],
    started: float,
    blocking: bool,
    dry_run: bool = False,
    ready: Callable[[], object] | None = None,
    progress: _core.Progress | None = None,
    after: Callable[[SaveReport], list[str]] | None = None,
) -> SaveReport | PendingSave[SaveReport] | None:
    """Save; all ranks call this. No rank raises unless nothing is published, except for `GroupError`.

    Args:
        draft: what this rank saves, or the exception that it met while it was made.
        task: what is saved where and how.
        channel: the session of this save.
        check_root: called on rank 0 before the plan: raises an error if a restart would open the root as another
            format.
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
    if isinstance(draft, BaseException):
        ranks.fail(draft)
    own = draft.own
    if not dry_run:
        own.observers("begun", task.iteration, n_bytes=own.arrays.n_bytes, n_ranks=ranks.world_size, blocking=blocking)
    planned: Planned[OrdersT, BegunT, WrittenT] | None = None  # on rank 0

    def plan(reports: list[ReportT]) -> OrdersT:
        nonlocal planned
        check_root()
        planned = draft.plan(reports)
        return planned.orders

    messages = draft.messages
    combine = functools.partial(recurring.combine, ranks) if ranks.world_size > 1 else ranks.combine
    orders: OrdersT = combine(capture(draft.report), plan, messages.report, messages.orders)
    if dry_run:
        if ready is None and not blocking:
            _reserve(draft, orders)
        return None
    make = functools.partial(shard_file, threads=task.options.threads, blocking=blocking, ready=ready)
    prepared = capture(lambda: draft.prepare(orders, make))
    if not blocking and ready is None:
        own.copies.freeze(orders.replicas, ranks.rank)
    finish = functools.partial(_finish, draft, planned, orders.replicas, prepared, ranks, started=started, after=after)
    if blocking:
        return finish(progress=progress)
    stall_seconds = time.monotonic() - started
    if ready is None:
        own.observers("copied", task.iteration, seconds=stall_seconds)
    finish = functools.partial(
        _watched, own.observers, task, started, functools.partial(finish, stall_seconds=stall_seconds)
    )
    return background.start(task.iteration, finish, progress, exit_seconds=task.timeout, root=task.root)


def _watched(
    observers: Observers,
    task: SaveTask,
    started: float,
    finish: Callable[..., SaveReport],
    progress: _core.Progress | None,
) -> SaveReport:
    """Finish a save in the background; its failure is an event."""
    try:
        return finish(progress=progress)
    except BaseException as error:
        save_failed(observers, task.iteration, error, started)
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


def _reserve(draft: Draft[ReportT, OrdersT, BegunT, WrittenT], orders: OrdersT) -> None:
    """Reserve memory for the copies of this rank's files."""
    sizes = []

    def measured(name: str, arrays: LocalArrays, metadata: Mapping[str, str]) -> ShardFile:
        sizes.append(reserved_bytes(arrays))
        return shard_file(name, arrays, metadata, blocking=True)

    draft.prepare(orders, measured)
    background.snapshot_pool().reserve(sizes)


def _finish(
    draft: Draft[ReportT, OrdersT, BegunT, WrittenT],
    planned: Planned[OrdersT, BegunT, WrittenT] | None,
    replicas: Replicas,
    prepared: Prepared[BegunT, WrittenT] | BaseException,
    ranks: Collective,
    *,
    started: float,
    stall_seconds: float | None = None,
    progress: _core.Progress | None = None,
    after: Callable[[SaveReport], list[str]] | None = None,
) -> SaveReport:
    """Steps 3 to 7.

    Args:
        draft: what this rank saves.
        planned: on rank 0: what all ranks are going to write.
        replicas: which ranks hold copies of what.
        prepared: the files of this rank, or what it met in step 2; the other ranks do not know of it.
        ranks: all ranks of the save.
        started: when `reshard.save` was called, on the monotonic clock.
        stall_seconds: how long the caller waited; None: it is waiting.
        progress: as in `reshard.save`.
        after: as in `reshard.save`.
    """
    own, task, observers, messages = draft.own, draft.task, draft.own.observers, draft.messages
    state = draft.own.copies.settle(replicas, ranks.channel, task.timeout)
    watched = observers.progress(task.iteration, progress)
    log_warnings: list[str] = []
    begun: Begun[BegunT, WrittenT] | None = None  # this and the next two: on rank 0
    publication: Publication | None = None
    found: Published | None = None  # once a restart finds the save

    def begin(planned: Planned[OrdersT, BegunT, WrittenT]) -> BegunT:
        nonlocal begun
        begun = planned.begin()
        return begun.message

    def write(message: BegunT) -> Written[WrittenT]:
        if isinstance(prepared, BaseException):
            raise prepared
        if isinstance(state, BaseException):
            raise state
        start = time.monotonic()
        with _taken_over(task.root):
            done = prepared.write(message, state, watched if observers.functions else progress)
        observers("written", task.iteration, n_bytes=watched.n_bytes, seconds=time.monotonic() - start)
        return done

    def log(done: Published) -> list[Location]:
        report = _report_of(task, done, started, stall_seconds)
        warnings = _append_to_log(task, own, done, report, durable=False)
        log_warnings.extend(warnings)
        return [] if warnings else [task.root / save_log.SAVE_LOG_FILE]

    def publish(begun: Begun[BegunT, WrittenT], own: Written[WrittenT], messages_of_ranks: list[WrittenT]) -> Published:
        nonlocal publication, found
        volatile = mounts.volatile(task.root) if task.durable else None
        with _taken_over(task.root):
            publication = begun.publish(own, messages_of_ranks, durable=task.durable and volatile is None, log=log)
        done = publication.published
        if volatile is not None:
            warning = f"{task.root} is on {volatile}, which is volatile: its content is lost with the power"
            done = done._replace(warnings=(*done.warnings, warning))
        if not draft.confirms:
            found = done
        return done

    def confirmed(publication: Publication, done: Published, warnings: list[tuple[str, ...]]) -> tuple[str, ...]:
        nonlocal found
        publication.confirmed()
        found = done._replace(warnings=(*done.warnings, *warnings[0]))
        return warnings[0]

    is_heard, is_written = True, True
    try:
        message = ranks.first(None if planned is None else functools.partial(begin, planned), messages.begun)
        outcome = capture(functools.partial(write, message))
        if isinstance(outcome, BaseException):
            is_written = False
            ranks.fail(outcome)
        written = outcome
        choose = None if begun is None else functools.partial(publish, begun, written)
        result = ranks.combine(written.message, choose, messages.written, Published)
        if draft.confirms:
            more = capture(functools.partial(written.confirm, result))
            decide = None if publication is None else functools.partial(confirmed, publication, result)
            warnings = ranks.combine(more, decide, tuple[str, ...], tuple[str, ...])
            result = result._replace(warnings=(*result.warnings, *warnings))
    except BaseException as failure:
        if not isinstance(failure, GroupError) or found is None:
            is_known = isinstance(failure, ReshardError) and not isinstance(failure, GroupError)
            if begun is not None and publication is None:
                begun.withdraw()
            if (is_known or not is_written) and not isinstance(prepared, BaseException):
                prepared.withdraw()
            raise
        # It is published, although not every rank was told.
        warning = f"not every rank learned that the save succeeded: {failure.message}"
        result, is_heard = found._replace(warnings=(*found.warnings, warning)), False
    report = _report_of(task, result, started, stall_seconds)
    if ranks.rank == 0 and draft.confirms:
        log_warnings = _append_to_log(task, own, result, report, durable=task.durable)
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
    removal = [*written.remove_older(result), *([] if publication is None else publication.remove_older())]
    report = replace(report, warnings=(*report.warnings, *log_warnings, *removal))
    if ranks.rank == 0:
        for warning in report.warnings:
            log_once(warning, is_note=draft.is_note(warning))
    return report if after is None or not is_heard else _call_after(after, report)


@contextlib.contextmanager
def _taken_over(root: Location) -> Iterator[None]:
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
    task: SaveTask, own: RankInput, published: Published, report: SaveReport, *, durable: bool
) -> list[str]:
    """A line in the log of saves. Returns warnings."""
    if published.attempt_id is None:
        return []
    try:
        line = save_log.SaveRecord(
            task.iteration,
            metrics=own.metrics,
            saved_at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            wall_s=round(report.seconds, 3),
            stall_s=round(report.stall_seconds, 3),
            n_bytes=report.n_bytes,
            generation=published.generation,
            attempt=published.attempt_id,
            digest=published.digest,
            ckpt_status=own.common.ckpt_status if published.ckpt_status is None else published.ckpt_status,
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
