"""Saving a checkpoint: every rank gives the arrays that it holds; the iteration is published completely or not at all.

The ranks exchange messages three times. First each reports its names, dtypes and shapes, and rank 0 answers who writes
what (`rank_facts`, `iteration`). Then rank 0 claims the root and makes a staging folder, into which each rank writes
its files. Last each reports the checksums of its files, and rank 0 describes, seals and publishes (`collective_save`,
`protocol`).

With `blocking=False` a save returns after the first exchange and a snapshot of the arrays; the rest runs in the
background. This module prepares the contribution of one rank. It does not know how folders are published.
"""

from __future__ import annotations

import functools
import hashlib
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

import numpy as np

from reshard import _core
from reshard.arguments import check, check_given
from reshard.collective import Collective, capture
from reshard.errors import ArgumentError
from reshard.formats import state
from reshard.formats.checkpoint1 import save as checkpoint1
from reshard.formats.checkpoint1 import state as checkpoint1_state
from reshard.formats.checkpoint2 import names as checkpoint2
from reshard.formats.checkpoint2.common import CommonInfo
from reshard.formats.savable import save_traits
from reshard.formats.save_log import SaveRecord
from reshard.group import resolve, session
from reshard.layout import as_layout
from reshard.options import SaveOptions, explains_moved
from reshard.storage import mounts
from reshard.storage.host import boot_id
from reshard.words import show
from reshard.write import background
from reshard.write.arrays import Shard, as_shape, local_arrays
from reshard.write.background import PendingSave
from reshard.write.collective_save import Own, Planned, SaveReport, Share, Terms, carry_out
from reshard.write.rank_facts import (
    LastMade,
    RankFacts,
    check_options,
    check_state,
    facts_of,
    plan_iteration,
    planned_bytes,
)
from reshard.write.replicas import Copies, RankLocal, Replicas, is_any_of
from reshard.write.shard_files import maker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reshard.layout import ModelLayout
    from reshard.layout.model import LayoutLike
    from reshard.options import CommitLike, FilesLike, FormatLike, RetentionLike, VerifyLike
    from reshard.write.arrays import LocalArray

__all__ = ["PendingSave", "SaveReport", "Shard", "check_save_options", "save"]

_EPOCH = "1970-01-01T00:00:00+00:00"
_METADATA = {"format": "ms", "reshard": _core.__version__}
_COMMON_KEYS = tuple(name for name in CommonInfo.__dataclass_fields__ if name != "unknown")


class _Keywords(TypedDict, total=False):
    """The keywords of `save` that do not decide what it returns; they are documented there."""

    shapes: Mapping[str, Sequence[int]] | None
    rank_local: RankLocal | None
    group: object
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
    timeout: float
    threads: int | None
    progress: _core.Progress | None


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
    group: object = None,
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
    timeout: float = 600.0,
    threads: int | None = None,
    progress: _core.Progress | None = None,
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
            contiguous or not; or `reshard.Shard`s of them.
        optimizer: the same for the state of the optimizer. State named `<slot>.<key>` is sharded as its parameter.
        common: `CommonInfo`, written as it is; or a mapping of some of its fields. The defaults of `step_num` and
            `global_step` are the iteration.
        extra: any other state by name: numbers, text, bytes, lists, tuples, mappings, arrays, tensors. A value wrapped
            in `reshard.per_rank` is kept for each rank. Of any other rank 0's is saved, and it is an error if another
            rank gives a different one.
        layout: how the arrays are sharded: a `ModelLayout`, a layout file, its mapping, or a strategy file or folder.
            Every rank gives its own shards, and global shapes follow from those of all ranks. None: in a world of one
            all arrays are whole; else each array is a `Shard` with its offset, and only `tiles.json` describes it.
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
        dry_run: check everything that is known before anything is written: options, arrays, layout, state, and that
            the ranks agree. The root is neither made nor claimed, and nothing is written.

    Returns:
        What was saved; with `blocking=False` a `PendingSave`, whose `result()` returns that; with `dry_run` None.

    Raises:
        ArgumentError, LayoutError, MismatchError, CoverageError, UnsupportedError: an option is not accepted, or the
            arrays of the ranks do not make up whole tensors, or cannot be written; the message names key and ranks.
        GroupError: a rank did not answer in time. Nothing is published, unless only rank 0's last message was lost.
        StorageError: a write failed, or there is no room.
        DestinationExistsError: another process is saving into this root.
        ReshardError: a rank failed otherwise: the message names it and its error.

    Example:
        >>> import numpy as np, reshard
        >>> report = reshard.save("output", 100, {"w": np.arange(6.0).reshape(2, 3)}, common={"global_batch_size": 32})
        >>> report.n_files, reshard.open("output").iteration
        (1, 100)
        >>> _ = reshard.save("output", 200, {"w": np.zeros((2, 3))}, retention={"keep": 5, "keep_every": 1000})
    """
    started = time.monotonic()
    check_given(root=root, blocking=blocking, timeout=timeout, dry_run=dry_run)
    check(rank=rank)
    members = resolve(group, rank)
    channel = session(members, f"save {iteration}"[:200])
    # An error of one rank's options must reach the others as a value: they are waiting.
    parsed = capture(
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
    options = parsed if isinstance(parsed, SaveOptions) else SaveOptions()
    is_compared = options.verify.check_replicas
    terms = Terms(
        root=Path(root),
        iteration=iteration,
        durable=options.commit.durable,
        verify=options.verify.after_save,
        rollback=options.commit.rollback,
        takeover=options.commit.takeover,
        timeout=timeout,
        threads=threads,
        retention=options.retention,
        private=options.commit.private,
    )
    how = _how(options)
    agreed = {
        "format": options.format,
        "blocking": blocking,
        "strict_format": options.files.strict_format,
        "check_replicas": is_compared,
        **how.agreed(),
    }

    own_files = False  # whether each rank has files of its own, which hold all that the rank needs

    def prepare() -> Own:
        nonlocal own_files
        if isinstance(parsed, BaseException):
            raise parsed
        own_files = save_traits(options.format).rank_folders
        check_given(model=model)
        check(
            optimizer=optimizer,
            extra=extra,
            rank_local=rank_local,
            layout=layout,
            shapes=shapes,
            metrics=metrics,
            ready=ready,
            after=after,
            threads=threads,
            progress=progress,
        )
        if not dry_run:
            background.finish_previous(timeout)
        checkpoint2.iteration_folder_name(iteration)
        _check_options(options, model)
        own_layout = None if layout is None else as_layout(layout)
        arrays = local_arrays(model, optimizer)
        if ready is not None:
            for name, given in [*(model or {}).items(), *(optimizer or {}).items()]:
                _check_is_written_as_it_is(given, arrays[name])
        copies = Copies.of(
            arrays,
            rank_local,
            extra=_extra(extra, members.rank, copy=not blocking, is_alone=own_files),
            is_alone=own_files,
            ready=ready,
            threads=threads,
        )
        allowed = (*options.verify.may_differ, *(() if rank_local is None else rank_local.may_differ))
        facts = facts_of(
            arrays.values(),
            {key: as_shape(shape, f"the shape of {show(str(key))}") for key, shape in (shapes or {}).items()},
            host=_host(),
            options=agreed | _agreed(terms, own_layout),
            has_layout=own_layout is not None,
            may_differ=is_any_of(allowed),
            state=_digests(extra) if members.world_size > 1 else {},
            copies=() if rank_local is None else rank_local.copies,
        )
        counters = _common_info(common, iteration)
        # Made now, so that a metric that is no number is refused before anything is written.
        record = SaveRecord(iteration, _EPOCH, 0, 0, 0, dict(metrics or {}), ckpt_status=counters.ckpt_status)
        return Own(arrays, facts, own_layout, counters, record, copies)

    # What fails on this rank alone must reach the others as a value: they are waiting.
    own = capture(prepare)
    if own_files:
        if dry_run:
            checkpoint1.check_ranks(terms, how, channel, own)
            return None
        return checkpoint1.save_ranks(
            terms, how, channel, own, started=started, blocking=blocking, ready=ready, progress=progress, after=after
        )
    planned: Planned | None = None

    def decide(told: list[Any]) -> dict[str, Any]:
        nonlocal planned
        assert isinstance(own, Own)
        facts = [RankFacts.from_json(one) for one in told]
        check_options(facts)
        check_state(facts)
        _check_shared(terms.root, facts)
        planned = _plan(
            facts,
            told,
            own.layout,
            check_replicas=is_compared,
            prefix=how.prefix,
            dedup=how.dedup,
            strict=options.files.strict_format,
        )
        files = [(file.rank, file.name, file.arrays) for file in planned.plan.files]
        return {"files": files, "replicas": planned.replicas.to_json()}

    brought = own.facts.to_json() if isinstance(own, Own) else own
    answer = Collective(channel, timeout).combine(brought, decide)
    assert isinstance(own, Own)
    if dry_run:
        return None
    own.copies.replicas = Replicas.from_json(answer["replicas"])
    arrays_of = {name: [own.arrays[one] for one in names] for of, name, names in answer["files"] if of == members.rank}
    make = maker(_METADATA, threads, blocking=blocking, ready=ready)
    shard_files = capture(lambda: [make(name, arrays) for name, arrays in arrays_of.items()])
    if not blocking and ready is None:
        own.copies.freeze(members.rank)
    share = Share(shard_files, own.common, own.record, own.copies)
    if blocking:
        return carry_out(terms, channel, share, planned, started=started, progress=progress, after=after)
    stall_seconds = time.monotonic() - started
    work = functools.partial(
        carry_out, terms, channel, share, planned, started=started, stall_seconds=stall_seconds, after=after
    )
    return background.start(iteration, work, progress, exit_seconds=timeout)


def _check_is_written_as_it_is(given: object, array: LocalArray) -> None:
    """Refuse an array that had to be copied: `ready` has not been called, so the copy has no content."""
    one: Any = given.array if isinstance(given, Shard) else given
    place = one.data_ptr() if callable(getattr(one, "data_ptr", None)) else None
    if isinstance(one, np.ndarray):
        place = one.ctypes.data
    if array.n_bytes and place != array.array.ctypes.data:
        raise ArgumentError(
            f"saving {show(array.name)}: with `ready` only numpy arrays and tensors of the host are taken, in the byte "
            "order of the machine",
            key=array.name,
        )


_plans = LastMade[Planned]()


def _plan(
    facts: Sequence[RankFacts], told: Sequence[Any], layout: ModelLayout | None, *, check_replicas: bool, **options: Any
) -> Planned:
    """The plan of this save. It mostly equals that of the last save, which is kept."""

    def make() -> Planned:
        plan = plan_iteration(facts, layout, **options)
        replicas = Replicas.of(plan.holders if check_replicas else {}, facts)
        return Planned(plan, planned_bytes(plan, facts), replicas)

    of_ranks = [[one["arrays"], one["shapes"], one["copies"]] for one in told]
    return _plans.get([of_ranks, str(layout), check_replicas, options], make)


def _agreed(terms: Terms, layout: ModelLayout | None) -> dict[str, object]:
    """The options that must be the same on all ranks."""
    return {
        "root": os.fspath(terms.root),
        "iteration": terms.iteration,
        "durable": terms.durable,
        "layout": None if layout is None else hashlib.blake2b(str(layout).encode()).hexdigest()[:16],
    }


def check_save_options(options: SaveOptions) -> None:
    """Refuse options that do not go together, before there is anything to save.

    Raises:
        ArgumentError: an option is not for the format, or the format is not known.

    Example:
        >>> check_save_options(SaveOptions())
    """
    _check_options(options, None)


def _how(options: SaveOptions) -> checkpoint1.How:
    own, trained = options.checkpoint1, options.checkpoint1.save_trainable_params
    return checkpoint1.How(
        prefix=options.files.prefix,
        dedup=options.files.dedup is not False,
        sink_size=own.sink_size,
        steps_per_epoch=own.steps_per_epoch,
        network=own.save_network_params,
        trainable=None if isinstance(trained, bool) else frozenset([trained] if isinstance(trained, str) else trained),
        only_strategy=own.only_save_strategy,
        check_replicas=options.verify.check_replicas,
    )


def _check_options(options: SaveOptions, model: Mapping[str, object] | None) -> None:
    """Refuse options that do not fit the format or the model; None: the model is not known yet."""
    how = _how(options)
    if not save_traits(options.format).rank_folders:
        checkpoint2.check_prefix(how.prefix)
        return
    how.check({} if model is None else model)
    if model is not None and options.checkpoint1.save_trainable_params is True:
        raise ArgumentError(
            "`save_trainable_params` is True, and `save` needs the names of the weights that are trained",
            hint='for example `format=Checkpoint1Options(save_trainable_params=["head.weight"])`',
        )
    retention = options.retention
    if retention is not None and (retention.keep_every is not None or retention.best is not None):
        raise ArgumentError(
            "`keep_every` and `best` of `Retention` are for Checkpoint 2.0; of 1.0 the newest `keep` are kept"
        )


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
    extra: Mapping[str, object] | None, rank: int, *, copy: bool, is_alone: bool
) -> tuple[str, dict[str, np.ndarray]] | None:
    """This rank's share of `extra`, as it is written: all values on rank 0, only rank-local values on others.

    A rank that `is_alone`, whose folder may be all that it will see, writes the shared values too.
    """
    if not isinstance(extra, Mapping | None):
        raise ArgumentError(f"`extra` is a {type(extra).__name__}, expected a mapping of names to state")
    if state.RANK_LOCAL in (extra or {}):
        raise ArgumentError(f"`extra` has `{state.RANK_LOCAL}`, a name that is taken", hint="choose another one")
    own = {name: value.value for name, value in (extra or {}).items() if isinstance(value, state.PerRank)}
    shared = {name: value for name, value in (extra or {}).items() if name not in own and (is_alone or rank == 0)}
    kept = own | shared
    if not kept:
        return None
    if is_alone:
        text, arrays = checkpoint1_state.dump(shared, own)
    else:
        text, arrays = state.dump({name: kept[name] for name in extra or () if name in kept})
    return text, {name: array.copy() for name, array in arrays.items()} if copy else dict(arrays)


def _digests(extra: Mapping[str, object] | None) -> dict[str, str]:
    """A digest of each value of `extra` that is shared by all ranks."""
    return {
        name: state.digest_of(value, f"extra[{name!r}]")
        for name, value in (extra or {}).items()
        if not isinstance(value, state.PerRank)
    }


def _host() -> str:
    """An identifier of this machine. The name is not enough, as all containers may have the same."""
    return f"{socket.gethostname()} {boot_id()}"


def _check_shared(root: Path, facts: Sequence[RankFacts]) -> None:
    hosts = {one.host for one in facts}
    if len(hosts) > 1 and not mounts.is_shared(root, os.environ.get("SHARED_PATHS")):
        raise ArgumentError(
            f"{len(hosts)} hosts save together, and {root} is not on a file system that they are known to share",
            path=str(root),
            hint="save to a network file system, or name the folder in the environment variable SHARED_PATHS",
        )
