"""`reshard.save`: every rank saves its arrays, and all ranks end with one iteration that is published or none.

This module checks the arguments and collects what one rank holds (`RankInput`). `write.phases` says what the phases of
a save are, `formats.checkpoint2.save` and `formats.checkpoint1.save` are those of a format, and `write.collective_save`
runs them on all ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

import numpy as np

from reshard.commit import roots
from reshard.commit.metrics import checked
from reshard.documents.common_info import CommonInfo
from reshard.errors import ArgumentError, MismatchError, UnsupportedError
from reshard.formats import state
from reshard.formats.differing import MISSING, Fields, difference
from reshard.formats.registry import save_format
from reshard.formats.replicas import Copies, RankLocal, is_any_of
from reshard.options import SaveOptions, agreed, explains_moved
from reshard.ranks.collective import capture
from reshard.ranks.distinct import gather_distinct
from reshard.ranks.group import resolve, session
from reshard.storage.host import boot_id
from reshard.storage.location import Location, locate_root
from reshard.values.argument_types import GroupLike, Progress, Seconds
from reshard.values.arguments import check, plain_integer
from reshard.values.events import Observers, OnEvent
from reshard.values.words import show
from reshard.write import background
from reshard.write.arrays import Shard, as_shape, local_arrays
from reshard.write.background import PendingSave
from reshard.write.collective_save import SaveReport, save_collectively, save_failed
from reshard.write.phases import RankInput, SaveTask
from reshard.write.rank_facts import differs_between_ranks, facts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reshard.layout import BoundLayout
    from reshard.layout.model import LayoutLike
    from reshard.options import CommitLike, FilesLike, FormatLike, RetentionLike, VerifyLike
    from reshard.ranks.group import Group
    from reshard.write.arrays import LocalArray
    from reshard.write.phases import Draft

__all__ = ["PendingSave", "SaveReport", "Shard", "check_save_options", "save"]

_COMMON_KEYS = tuple(name for name in CommonInfo.__dataclass_fields__ if name != "unknown")


class _Keywords(TypedDict, total=False):
    """The keywords of `save` that do not decide what it returns; they are documented there."""

    shapes: Mapping[str, Sequence[int]] | None
    rank_local: RankLocal | None
    group: GroupLike
    rank: int | None
    format: FormatLike
    keep: int | None
    retention: RetentionLike | None
    verify: VerifyLike | None
    commit: CommitLike | None
    files: FilesLike | None
    metrics: Mapping[str, float] | None
    ready: Callable[[], object] | None
    after: Callable[[SaveReport], list[str]] | None
    timeout: Seconds
    threads: int | None
    progress: Progress | None
    on_event: OnEvent | None


@overload
def save(
    root: str | os.PathLike[str],
    iteration: int,
    model: Mapping[str, object],
    optimizer: Mapping[str, object] | None = None,
    common: CommonInfo | Mapping[str, object] | None = None,
    extra: Mapping[str, object] | None = None,
    layout: LayoutLike | None = None,
    *,
    blocking: Literal[True] = True,
    dry_run: Literal[False] = False,
    **options: Unpack[_Keywords],
) -> SaveReport: ...
@overload
def save(
    root: str | os.PathLike[str],
    iteration: int,
    model: Mapping[str, object],
    optimizer: Mapping[str, object] | None = None,
    common: CommonInfo | Mapping[str, object] | None = None,
    extra: Mapping[str, object] | None = None,
    layout: LayoutLike | None = None,
    *,
    blocking: Literal[False],
    **options: Unpack[_Keywords],
) -> PendingSave[SaveReport]: ...
@overload
def save(
    root: str | os.PathLike[str],
    iteration: int,
    model: Mapping[str, object],
    optimizer: Mapping[str, object] | None = None,
    common: CommonInfo | Mapping[str, object] | None = None,
    extra: Mapping[str, object] | None = None,
    layout: LayoutLike | None = None,
    *,
    dry_run: Literal[True],
    blocking: bool = True,
    **options: Unpack[_Keywords],
) -> None: ...
@explains_moved
def save(  # noqa: PLR0917  what is saved is often given by position
    root: str | os.PathLike[str],
    iteration: int,
    model: Mapping[str, object],
    optimizer: Mapping[str, object] | None = None,
    common: CommonInfo | Mapping[str, object] | None = None,
    extra: Mapping[str, object] | None = None,
    layout: LayoutLike | None = None,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    rank_local: RankLocal | None = None,
    group: GroupLike = None,
    rank: int | None = None,
    blocking: bool = True,
    format: FormatLike = "checkpoint2",  # noqa: A002
    keep: int | None = None,
    retention: RetentionLike | None = None,
    verify: VerifyLike | None = None,
    commit: CommitLike | None = None,
    files: FilesLike | None = None,
    metrics: Mapping[str, float] | None = None,
    ready: Callable[[], object] | None = None,
    after: Callable[[SaveReport], list[str]] | None = None,
    timeout: Seconds = 600.0,
    threads: int | None = None,
    progress: Progress | None = None,
    on_event: OnEvent | None = None,
    dry_run: bool = False,
) -> SaveReport | PendingSave[SaveReport] | None:
    """Save an iteration, all ranks collectively. If it fails, the root is as it was before.

    Every rank of the group calls this with what it holds and with the same options. `common`, `metrics`, plain values
    of `extra` and retention are taken from rank 0.

    Args:
        root: the checkpoint root; made if it is missing.
        iteration: its number: steps that were made. An iteration of this number is replaced, in one step. A number
            below the tracker's is refused, except in the first save after `reshard.load` loaded an older iteration.
        model: this rank's arrays by key: numpy arrays, torch tensors, anything with DLPack or the buffer protocol,
            contiguous or not; or a `reshard.Shard` of one.
        optimizer: the same for the state of the optimizer. State named `<slot>.<key>` is sharded as its parameter.
        common: `CommonInfo`, written as it is; or a mapping of some of its fields. The defaults of `step_num` and
            `global_step` are the iteration.
        extra: any other state by name: numbers, text, bytes, lists, tuples, mappings, arrays, tensors. A value wrapped
            in `reshard.per_rank` is kept for each rank. Of any other rank 0's is saved, and it is an error if another
            rank gives a different one.
        layout: how the arrays are sharded: a `ModelLayout`, a layout file, its mapping, or a strategy file or folder;
            or what `bind` of a layout returns. Every rank gives its own shards, and global shapes follow from those of
            all ranks. None: in a world of one all arrays are whole; else each array is a `Shard` with its offset, and
            only `tiles.json` describes it.
        shapes: with a layout, global shapes by key, in elements: of flattened tensors, and of those that are joined
            into one array. Joined state is that of all parameters of the join, in their shapes; where only some have
            state, give those.
        rank_local: state that every rank keeps for itself, and further copies that may differ, see
            `write.replicas.RankLocal`. Either all ranks give one, or none does.
        group: a process group of torch, or any object with `rank`, `world_size`, `barrier`, `gather`, `broadcast`.
            None: torch's default group if there is one, else this process alone.
        rank: the rank that the caller expects to be, to be checked.
        blocking: False returns as soon as this rank's arrays are copied; they may be changed then. One save at a time
            is written in the background: the next one first waits for it, and raises its error. The end of the process
            waits for it too, except where that is `os._exit` or a signal (see `PendingSave`).
        format: "checkpoint2"; or "checkpoint1" or a `Checkpoint1Options` for a file for each rank. In Checkpoint 1.0
            every layout that is saved must be one that a strategy file can express, a root has one number of ranks and
            one strategy, and `keep` counts the saves of this process.
        keep: keep the newest `keep` complete iterations and remove older ones; short for
            `retention=Retention(keep=...)`. None: remove nothing.
        retention: which iterations are kept: a `Retention` or a mapping of its fields.
        verify: what is compared: a `Verify` or a mapping of its fields. `on_load` has no effect here.
        commit: how the save is published: a `Commit` or a mapping of its fields.
        files: which files hold the tensors: a `Files` or a mapping of its fields.
        metrics: numbers by name, such as the loss: kept in the manifest of the iteration and in `saves.jsonl`.
        ready: for arrays that are still being filled, such as copies from a device: waits until they have their
            content. With it nothing is copied, and the arrays belong to the save until it has ended. It is called more
            than once, and in the background if `blocking` is False.
        after: called on every rank as `after(report)` once the save has succeeded and all ranks know it, in the thread
            that saved; the texts that it returns are warnings of the report.
        timeout: seconds that a rank waits for the others in each of the three exchanges, the time to write included.
        threads: threads of the copies.
        progress: called as `progress(done_bytes, total_bytes)` with this rank's bytes; from the thread in the
            background if `blocking` is False.
        on_event: a function, or a list of functions, called with each `Event` of the save on this rank, such as
            `EventLog(root)`; see docs/watching.md. An error of it is logged once and does not fail the save.
        dry_run: check everything that is known before anything is written: options, arrays, layout, state, and that
            the ranks agree. The root is neither made nor claimed, and nothing is written. With `blocking=False` and
            without `ready`, memory for the copies is allocated by a thread, so that the first save does not wait for
            it; it is kept until the end of the process, as that of a save is.

    Returns:
        What was saved; with `blocking=False` a `PendingSave`, whose `result()` returns that; with `dry_run` None.

    Raises:
        ArgumentError, LayoutError, MismatchError, CoverageError, UnsupportedError: an option is not accepted, or the
            arrays of the ranks do not make up whole tensors, or cannot be written; the message names key and ranks.
        GroupError: a rank did not answer in time. Nothing is published, unless only rank 0's last message was lost.
        StorageError: a write failed, or there is not enough space.
        DestinationExistsError: another process is saving into this root.
        ReshardError: a rank failed otherwise: the message names it and its error.

    Example:
        >>> import numpy as np, reshard
        >>> report = reshard.save("output", 100, {"w": np.arange(6.0).reshape(2, 3)}, common={"global_batch_size": 32})
        >>> report.n_files, reshard.open("output").iteration
        (1, 100)
        >>> _ = reshard.save("output", 200, {"w": np.zeros((2, 3))}, retention={"keep": 5, "keep_every": 1000})
    """
    check(save, root=root, blocking=blocking, timeout=timeout, dry_run=dry_run, rank=rank, on_event=on_event)
    members = resolve(group, rank)
    # The other ranks wait for this one: they must receive the error of its options.
    options = capture(
        lambda: SaveOptions.of(
            keep=keep,
            retention=retention,
            verify=verify,
            commit=commit,
            files=files,
            format=format,
            threads=threads,
        )
    )
    request = SaveRequest(
        root,
        iteration,
        model,
        optimizer,
        common=common,
        extra=extra,
        layout=layout,
        shapes=shapes,
        rank_local=rank_local,
        metrics=metrics,
        blocking=blocking,
        dry_run=dry_run,
        ready=ready,
        after=after,
        timeout=timeout,
        progress=progress,
    )
    return save_with(request, options, members, Observers.of(on_event, members.rank))


@dataclass(frozen=True, eq=False)
class SaveRequest:
    """What one rank saves, and how it calls: the arguments of `save` that are not options, group or observers."""

    root: str | os.PathLike[str]
    iteration: int
    model: Mapping[str, object]
    optimizer: Mapping[str, object] | None = None
    _: KW_ONLY
    common: CommonInfo | Mapping[str, object] | None = None
    extra: Mapping[str, object] | None = None
    layout: LayoutLike | BoundLayout | None = None
    shapes: Mapping[str, Sequence[int]] | None = None
    rank_local: RankLocal | None = None
    metrics: Mapping[str, float] | None = None
    blocking: bool = True
    dry_run: bool = False
    ready: Callable[[], object] | None = None
    after: Callable[[SaveReport], list[str]] | None = None
    timeout: float = 600.0
    progress: Progress | None = None


def check_format(root: Location, options: SaveOptions) -> None:
    """Refuse a format that lives by renames, in a bucket. Raises UnsupportedError."""
    if root.objects is not None and save_format(options.format).traits.rank_folders:
        raise UnsupportedError(
            f"{show(str(root))} is in a bucket, and rank folders of Checkpoint 1.0 are published by renames, which a "
            "bucket does not have",
            path=str(root),
            hint="leave `format` out, or save into a folder of a file system",
        )


def save_with(
    request: SaveRequest, options: SaveOptions | BaseException, group: Group, observers: Observers
) -> SaveReport | PendingSave[SaveReport] | None:
    """Save as `save` does, with options that are parsed.

    Args:
        request: what is saved.
        options: how it is saved; or the error of this rank's options, which is raised on all ranks.
        group: the group of the ranks.
        observers: called with the events of the save.

    Raises:
        ReshardError: as `save`.

    Example:
        >>> import numpy as np
        >>> from reshard.ranks.group import SingleProcess
        >>> request = SaveRequest("parsed", 1, {"w": np.zeros(2)})
        >>> save_with(request, SaveOptions(threads=1), SingleProcess(), Observers.of(None)).n_files
        1
    """
    started = time.monotonic()
    iteration = plain_integer(request.iteration)
    if request.dry_run:
        observers = Observers.of(None, group.rank)
    ready = request.ready
    if ready is not None and observers.functions:
        ready = _reports_copies(ready, observers, iteration, started)
    known = SaveOptions() if isinstance(options, BaseException) else options
    task = SaveTask(locate_root(request.root).absolute(), iteration, request.timeout, known)
    channel = session(group, f"save {iteration}"[:200])

    def draft() -> Draft[Any, Any, Any, Any]:
        if isinstance(options, BaseException):
            raise options
        check_format(task.root, options)
        return _draft(replace(request, ready=ready), task, channel, observers)

    # The other ranks wait for this one: they must receive its error.
    try:
        return save_collectively(
            capture(draft),
            task,
            channel,
            check_root=lambda: _check_root(task),
            started=started,
            blocking=request.blocking,
            dry_run=request.dry_run,
            ready=ready,
            progress=request.progress,
            after=request.after,
        )
    except BaseException as error:
        if isinstance(error, MismatchError):
            _say_what_differs(error, request.extra, group, request.timeout)
        save_failed(observers, iteration, error, started)
        raise


def _draft(request: SaveRequest, task: SaveTask, channel: Group, observers: Observers) -> Draft[Any, Any, Any, Any]:
    """The first phase of the save, of what this rank holds. Everything that is wrong with it is an error here."""
    options, rank_local, extra, ready = task.options, request.rank_local, request.extra, request.ready
    names = ("model", "optimizer", "extra", "rank_local", "layout", "shapes", "metrics", "ready", "after", "progress")
    check(save, **{name: getattr(request, name) for name in names}, threads=options.threads)
    if not request.dry_run:
        background.finish_previous(task.timeout, task.root)
    roots.iteration_folder_name(task.iteration)
    of = save_format(options.format)
    of.check_options(options, request.model)
    is_alone = of.traits.rank_folders  # each rank has files of its own, which hold all that the rank needs
    layout = None
    if request.layout is not None:
        from reshard.layout import BoundLayout, as_layout  # noqa: PLC0415  slow to import

        layout = request.layout if isinstance(request.layout, BoundLayout) else as_layout(request.layout)
    arrays = local_arrays(request.model, request.optimizer)
    if ready is not None:
        for name, given in [*(request.model or {}).items(), *(request.optimizer or {}).items()]:
            _check_is_written_as_it_is(given, arrays[name])
    copies = Copies.of(
        arrays,
        rank_local,
        extra=_extra(extra, channel.rank, of, copy=not request.blocking, is_alone=is_alone),
        is_alone=is_alone,
        ready=ready,
        threads=options.threads,
    )
    allowed = (*options.verify.may_differ, *(() if rank_local is None else rank_local.may_differ))
    facts = facts_of(
        arrays,
        {key: as_shape(shape, f"the shape of {show(str(key))}") for key, shape in (request.shapes or {}).items()},
        host=_host(),
        options=_agreed(task, blocking=request.blocking)
        | {"layout": None if layout is None else _digest(json.dumps(layout.to_mapping()))},
        has_layout=layout is not None,
        may_differ=is_any_of(allowed) if allowed else None,
        state=_digests(extra) if channel.world_size > 1 else {},
        copies=() if rank_local is None else rank_local.copies,
    )
    counters = _common_info(request.common, task.iteration)
    # Made now, so that a metric that is no number is refused before anything is written.
    try:
        metrics = checked(request.metrics or {})
    except ArgumentError as error:
        raise ArgumentError(f"`metrics`: {error.message}") from None
    own = RankInput(channel.rank, channel.world_size, arrays, facts, layout, counters, metrics, copies, observers)
    return of(task, own)


def _check_root(task: SaveTask) -> None:
    """Refuse a root that a restart would open as another format."""
    from reshard.formats.registry import check_destination  # noqa: PLC0415  slow to import

    check_destination(task.root, task.options.format)


def _say_what_differs(error: MismatchError, extra: Mapping[str, object] | None, members: Group, timeout: float) -> None:
    """Add the first field that differs to an error of a value in `extra`, which is the same on all ranks."""
    if error.key is not None and error.message.endswith(differs_between_ranks(error.key)):
        own = (extra or {}).get(error.key, MISSING)
        what = difference(
            MISSING if isinstance(own, state.PerRank) else own,
            lambda fields: gather_distinct(members, [fields], [Fields], timeout)[0],
            error.key,
        )
        error.message = f"{error.message}: {what}"


def _reports_copies(
    ready: Callable[[], object], observers: Observers, iteration: int, started: float
) -> Callable[[], object]:
    """`ready`, with an event when it has waited the first time."""
    is_reported = False

    def wait() -> None:
        nonlocal is_reported
        ready()
        if not is_reported:
            is_reported = True
            observers("copied", iteration, seconds=time.monotonic() - started)

    return wait


def _check_is_written_as_it_is(given: object, array: LocalArray) -> None:
    """Refuse an array that was copied to make it readable: before `ready` it does not have its content."""
    one: Any = given.array if isinstance(given, Shard) else given
    place = one.data_ptr() if callable(getattr(one, "data_ptr", None)) else None
    if isinstance(one, np.ndarray):
        place = one.ctypes.data
    if array.array.nbytes and place != array.array.ctypes.data:
        raise ArgumentError(
            f"saving {show(array.name)}: with `ready` only numpy arrays and tensors of the host are taken, in the byte "
            "order of the machine",
            key=array.name,
        )


def _agreed(task: SaveTask, *, blocking: bool) -> dict[str, object]:
    """What must be the same on all ranks, by the names that users know."""
    root = os.fspath(task.root)
    same = {"root": root, "iteration": task.iteration, "blocking": blocking}
    return same | agreed(task.options) | {"dedup": task.options.dedup}


def check_save_options(options: SaveOptions) -> None:
    """Refuse options that do not go together, before there is anything to save.

    Raises:
        ArgumentError: an option is not for the format, or the format is not known.

    Example:
        >>> check_save_options(SaveOptions())
    """
    save_format(options.format).check_options(options, {})


def _common_info(common: CommonInfo | Mapping[str, object] | None, iteration: int) -> CommonInfo:
    if isinstance(common, CommonInfo):
        return common
    if not isinstance(common, Mapping | None):
        raise ArgumentError(f"`common` is a {type(common).__name__}, expected a CommonInfo or a mapping of its fields")
    given = dict(common or {})
    for name in given:
        if name not in _COMMON_KEYS:
            raise ArgumentError(
                f"`common` has {show(str(name))}, and common.json holds exactly {', '.join(_COMMON_KEYS)}: its reader "
                "refuses any other",
                hint=f"put it into `extra={{{str(name)[:80]!r}: ...}}`",
            )
    return CommonInfo(**{"step_num": iteration, "global_step": iteration} | given)  # type: ignore[arg-type]


def _extra(
    extra: Mapping[str, object] | None, rank: int, of: type[Draft[Any, Any, Any, Any]], *, copy: bool, is_alone: bool
) -> tuple[str, dict[str, np.ndarray]] | None:
    """The part of `extra` that this rank writes: rank 0 all of it, the others what is kept for each rank.

    A rank that `is_alone` has a folder of its own and writes the values that all ranks share, too.
    """
    if not isinstance(extra, Mapping | None):
        raise ArgumentError(f"`extra` is a {type(extra).__name__}, expected a mapping of names to state")
    if state.RANK_LOCAL in (extra or {}):
        raise ArgumentError(f"`extra` has `{state.RANK_LOCAL}`, a name that is taken", hint="choose another one")
    own = {name: value.value for name, value in (extra or {}).items() if isinstance(value, state.PerRank)}
    kept = {name: own.get(name, value) for name, value in (extra or {}).items() if name in own or is_alone or rank == 0}
    if not kept:
        return None
    text, arrays = of.dump_extra(kept, own)
    return text, {name: array.copy() for name, array in arrays.items()} if copy else dict(arrays)


def _digests(extra: Mapping[str, object] | None) -> dict[str, str]:
    """A digest of each value of `extra` that is shared by all ranks."""
    return {
        name: state.digest_of(value, f"extra[{name!r}]")
        for name, value in (extra or {}).items()
        if not isinstance(value, state.PerRank)
    }


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode()).hexdigest()[:16]


def _host() -> str:
    """The identity of this machine: the host name alone may be that of every container."""
    return f"{socket.gethostname()} {boot_id()}"
