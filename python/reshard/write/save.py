"""Saving a checkpoint: every rank gives what it holds, and the iteration appears whole or not at all.

The ranks meet three times. First each tells rank 0 its names, dtypes and shapes, and rank 0 answers who writes what
(`facts`, `iteration`). Then rank 0 claims the root and makes a staging folder, into which each rank writes its files.
Last each tells the sums of what it wrote, and rank 0 describes, seals and publishes (`together`, `protocol`).

With `blocking=False` a save returns after the first meeting and a snapshot of the files to be; the rest goes on in the
background. Here stands what one rank brings along; nothing is known of how folders are published.
"""

from __future__ import annotations

import functools
import hashlib
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from reshard import _core
from reshard.arguments import check, check_given, check_texts
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
from reshard.storage import mounts
from reshard.storage.host import boot_id
from reshard.words import show
from reshard.write import background, retention
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
    from collections.abc import Callable, Collection, Sequence

    from reshard.layout import ModelLayout
    from reshard.layout.model import LayoutLike
    from reshard.write.arrays import LocalArray

__all__ = ["PendingSave", "SaveReport", "Shard", "check_save_options", "save"]

_EPOCH = "1970-01-01T00:00:00+00:00"
_METADATA = {"format": "ms", "reshard": _core.__version__}
_COMMON_KEYS = tuple(name for name in CommonInfo.__dataclass_fields__ if name != "unknown")


@overload
def save(
    root: str | os.PathLike[str],
    iteration: int,
    model: Mapping[str, object],
    optimizer: Mapping[str, object] | None = None,
    common: CommonInfo | Mapping[str, object] | None = None,
    extra: Mapping[str, object] | None = None,
    layout: LayoutLike | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    prefix: str | None = None,
    keep: int | None = None,
    dedup: bool = True,  # noqa: FBT001, FBT002
    group: object = None,
    *,
    rank: int | None = None,
    blocking: Literal[True] = True,
    durable: bool = True,
    format: Literal["checkpoint2", "checkpoint1"] = "checkpoint2",
    keep_every: int | None = None,
    keep_best: tuple[str, int] | None = None,
    metrics: Mapping[str, float] | None = None,
    check_replicas: bool = True,
    may_differ: Collection[str] = (),
    rank_local: RankLocal | None = None,
    verify_after_save: bool = False,
    strict_format: bool = False,
    rollback: bool = False,
    takeover: bool = False,
    private: bool = False,
    ready: Callable[[], object] | None = None,
    after: Callable[[SaveReport], list[str]] | None = None,
    sink_size: int | None = None,
    steps_per_epoch: int | None = None,
    save_network_params: bool = False,
    save_trainable_params: Collection[str] | None = None,
    only_save_strategy: bool = False,
    timeout: float = 600.0,
    threads: int | None = None,
    progress: _core.Progress | None = None,
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
    shapes: Mapping[str, Sequence[int]] | None = None,
    prefix: str | None = None,
    keep: int | None = None,
    dedup: bool = True,  # noqa: FBT001, FBT002
    group: object = None,
    *,
    rank: int | None = None,
    blocking: Literal[False],
    durable: bool = True,
    format: Literal["checkpoint2", "checkpoint1"] = "checkpoint2",
    keep_every: int | None = None,
    keep_best: tuple[str, int] | None = None,
    metrics: Mapping[str, float] | None = None,
    check_replicas: bool = True,
    may_differ: Collection[str] = (),
    rank_local: RankLocal | None = None,
    verify_after_save: bool = False,
    strict_format: bool = False,
    rollback: bool = False,
    takeover: bool = False,
    private: bool = False,
    ready: Callable[[], object] | None = None,
    after: Callable[[SaveReport], list[str]] | None = None,
    sink_size: int | None = None,
    steps_per_epoch: int | None = None,
    save_network_params: bool = False,
    save_trainable_params: Collection[str] | None = None,
    only_save_strategy: bool = False,
    timeout: float = 600.0,
    threads: int | None = None,
    progress: _core.Progress | None = None,
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
    shapes: Mapping[str, Sequence[int]] | None = None,
    prefix: str | None = None,
    keep: int | None = None,
    dedup: bool = True,  # noqa: FBT001, FBT002
    group: object = None,
    *,
    dry_run: Literal[True],
    rank: int | None = None,
    durable: bool = True,
    format: Literal["checkpoint2", "checkpoint1"] = "checkpoint2",
    keep_every: int | None = None,
    keep_best: tuple[str, int] | None = None,
    metrics: Mapping[str, float] | None = None,
    check_replicas: bool = False,
    verify_after_save: bool = False,
    strict_format: bool = False,
    sink_size: int | None = None,
    steps_per_epoch: int | None = None,
    save_network_params: bool = False,
    save_trainable_params: Collection[str] | None = None,
    only_save_strategy: bool = False,
    timeout: float = 600.0,
    threads: int | None = None,
) -> None: ...
def save(  # noqa: PLR0917
    root: str | os.PathLike[str],
    iteration: int,
    model: Mapping[str, object],
    optimizer: Mapping[str, object] | None = None,
    common: CommonInfo | Mapping[str, object] | None = None,
    extra: Mapping[str, object] | None = None,
    layout: LayoutLike | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    prefix: str | None = None,
    keep: int | None = None,
    dedup: bool = True,  # noqa: FBT001, FBT002  the order and the names are those of the original's options
    group: object = None,
    *,
    rank: int | None = None,
    blocking: bool = True,
    durable: bool = True,
    format: Literal["checkpoint2", "checkpoint1"] = "checkpoint2",  # noqa: A002
    keep_every: int | None = None,
    keep_best: tuple[str, int] | None = None,
    metrics: Mapping[str, float] | None = None,
    check_replicas: bool = True,
    may_differ: Collection[str] = (),
    rank_local: RankLocal | None = None,
    verify_after_save: bool = False,
    strict_format: bool = False,
    rollback: bool = False,
    takeover: bool = False,
    private: bool = False,
    ready: Callable[[], object] | None = None,
    after: Callable[[SaveReport], list[str]] | None = None,
    sink_size: int | None = None,
    steps_per_epoch: int | None = None,
    save_network_params: bool = False,
    save_trainable_params: Collection[str] | None = None,
    only_save_strategy: bool = False,
    timeout: float = 600.0,
    threads: int | None = None,
    progress: _core.Progress | None = None,
    dry_run: bool = False,
) -> SaveReport | PendingSave[SaveReport] | None:
    """Save an iteration, all ranks together: it is published whole and on the disk, or the root is as it was.

    Every rank of the group calls this with what it holds, and with the same options. What the ranks are asked besides
    (`common`, `metrics`, plain `extra`, retention) is taken from rank 0.

    Args:
        root: the checkpoint root; made if it is missing.
        iteration: the number: steps that were made. One that is there is replaced, in one step. A lower one than the
            tracker's is refused, but for the first save after `reshard.load` took an older one.
        model: this rank's arrays by key: numpy arrays, torch tensors, anything with DLPack or the buffer protocol,
            contiguous or not; or `reshard.Shard`s of them.
        optimizer: the same for the state of the optimizer. State named `<slot>.<key>` follows its parameter.
        common: `CommonInfo`, written as it is; or a mapping of some of its fields. `step_num` and `global_step` that
            are not given are the iteration.
        extra: any other state by name: numbers, text, bytes, lists, tuples, mappings, arrays, tensors. A value wrapped
            in `reshard.per_rank` is kept for each rank. Of any other rank 0's is saved, and it is an error if another
            rank gives a different one.
        layout: how the arrays are cut: a `ModelLayout`, a layout file, its mapping, or a strategy file or folder. Every
            rank gives its own cut, and global shapes follow from those of all ranks. None: in a world of one all arrays
            are whole; else each array is a `Shard` with its offset, and only `tiles.json` describes it.
        shapes: with a layout, global shapes by key: of flattened tensors, and of those that are joined into one array.
            Joined state is that of all parameters of the join, in their shapes; where only some have state, name those.
        prefix: first part of the names of the shard files.
        keep: keep the newest `keep` complete iterations and remove older ones; None: remove nothing. Nothing is removed
            before one that stays has been verified: if none is, this save is read back as with `verify_after_save`,
            about one save in `keep`.
        dedup: write each shard once, balanced over its holders, instead of once for every rank that holds it.
        group: a process group of torch, or any object with `rank`, `world_size`, `barrier`, `gather`, `broadcast`.
            None: torch's default group if there is one, else this process alone.
        rank: what the caller takes to be its rank, to be checked.
        blocking: False returns as soon as this rank's part is copied; what happens to the arrays then is no matter.
            One save at a time goes on in the background: the next one first waits for it, and raises its error. The
            end of the process waits for it too, except where that is `os._exit` or a signal (see `PendingSave`).
        durable: sync everything before it is published. False survives a crash of the process, not of the machine.
        format: "checkpoint2"; or "checkpoint1", a file for each rank, under a name that says epoch and step (see
            `write.checkpoint1`). There every layout that is saved must be one that a strategy file can say, a root is
            of one number of ranks and one strategy, and `keep` counts the saves of this process.
        keep_every: keep every iteration that is a multiple of this.
        keep_best: `(metric, n)`: keep the n iterations with the smallest value of a metric.
        metrics: numbers by name, such as the loss: kept in the manifest of the iteration and in `saves.jsonl`.
        check_replicas: compare the sums of all copies of a shard, and refuse the save if they differ. False: one of the
            copies is saved. Sums are taken in the background where the arrays belong to the save (`ready`).
        may_differ: patterns of keys whose copies may differ between ranks. Where they do, one of the copies is saved,
            and each rank's own is kept in `checkpoint.extra(rank)["rank_local"]["differing"]`, by key.
        rank_local: state that every rank keeps for itself, and further copies that may differ, see
            `write.replicas.RankLocal`. All ranks give one, or none does.
        verify_after_save: read back what was written, past the page cache, before it is published.
        strict_format: refuse tensors whose layout metadata.json cannot express, instead of describing them in
            tiles.json, which only this package reads.
        rollback: allow an iteration below the tracker's.
        takeover: end the claim of another process that seems to be alive.
        private: iteration folders and what is in them, the log, and a root that is made, are for their owner alone
            (0700, files 0600). Default: as the umask has it. The weights of Checkpoint 1.0 are read-only in both cases.
        ready: for arrays that are still being filled, such as copies from a device: waits until they have their
            content. With it nothing is copied, and the arrays belong to the save until it has ended. It is called more
            than once, and in the background if `blocking` is False.
        after: called on every rank as `after(report)` once the save has succeeded and all have heard so, in the thread
            that saved; the texts that it returns are warnings of the report.
        sink_size: of Checkpoint 1.0: steps of a sink, if the loop runs in sinks: names then count sinks as epochs.
        steps_per_epoch: of Checkpoint 1.0: steps of an epoch, for the names. With neither, `common` says the epoch and
            the step is the iteration.
        save_network_params: of Checkpoint 1.0: save the weights a second time, alone, into `<root>_network`.
        save_trainable_params: of Checkpoint 1.0: names of the weights that are trained, to be saved alone into
            `<root>_trainable`.
        only_save_strategy: of Checkpoint 1.0: write the strategy files, that is how the tensors are cut, and nothing
            else.
        timeout: seconds that a rank waits for the others in each of the three meetings, the time to write included.
        threads: threads of the copies.
        progress: called as `progress(done_bytes, total_bytes)` with this rank's bytes; from the thread in the
            background if `blocking` is False.
        dry_run: check everything that is known before anything is written: options, arrays, layout, state, and that
            the ranks agree. The root is neither made nor claimed, and nothing is written.

    Returns:
        What was saved; with `blocking=False` a `PendingSave`, whose `result()` returns that; with `dry_run` None.

    Raises:
        ArgumentError, LayoutError, MismatchError, CoverageError, UnsupportedError: what the ranks gave is not whole
            tensors, or cannot be written; the message names key and ranks.
        GroupError: a rank did not answer in time. Nothing is published, unless only rank 0's last word was lost.
        StorageError: a write failed, or there is no room.
        DestinationExistsError: another process is saving into this root.
        ReshardError: a rank failed otherwise: the message names it and what it met.

    Example:
        >>> import numpy as np, reshard
        >>> report = reshard.save("output", 100, {"w": np.arange(6.0).reshape(2, 3)}, common={"global_batch_size": 32})
        >>> report.n_files, reshard.open("output").iteration
        (1, 100)
        >>> reshard.save("legacy", 40, {"w": np.zeros(2)}, format="checkpoint1", sink_size=2).suffix
        '20_2'
    """
    started = time.monotonic()
    check_given(
        root=root,
        format=format,
        dedup=dedup,
        blocking=blocking,
        durable=durable,
        check_replicas=check_replicas,
        verify_after_save=verify_after_save,
        strict_format=strict_format,
        rollback=rollback,
        takeover=takeover,
        save_network_params=save_network_params,
        only_save_strategy=only_save_strategy,
        timeout=timeout,
        dry_run=dry_run,
    )
    check(rank=rank)
    if save_trainable_params is not None:
        check_texts("save_trainable_params", save_trainable_params)  # a flag elsewhere
    members = resolve(group, rank)
    channel = session(members, f"save {iteration}"[:200])
    terms = Terms(
        root=Path(root),
        iteration=iteration,
        durable=durable,
        verify=verify_after_save,
        rollback=rollback,
        takeover=takeover,
        timeout=timeout,
        threads=threads,
        keep=keep,
        keep_every=keep_every,
        keep_best=keep_best,
        private=private,
    )
    how = checkpoint1.How(
        prefix=prefix,
        dedup=dedup,
        sink_size=sink_size,
        steps_per_epoch=steps_per_epoch,
        network=save_network_params,
        trainable=None if save_trainable_params is None else frozenset(save_trainable_params),
        only_strategy=only_save_strategy,
        check_replicas=check_replicas,
    )
    agreed = {
        "format": format,
        "blocking": blocking,
        "strict_format": strict_format,
        "check_replicas": check_replicas,
        **how.agreed(),
    }

    own_files = False  # whether each rank has files of its own, which hold all that the rank needs

    def prepare() -> Own:
        nonlocal own_files
        own_files = save_traits(format).rank_folders
        check_given(model=model, may_differ=may_differ)
        check(
            optimizer=optimizer,
            extra=extra,
            rank_local=rank_local,
            private=private,
            layout=layout,
            shapes=shapes,
            prefix=prefix,
            keep=keep,
            keep_every=keep_every,
            metrics=metrics,
            ready=ready,
            after=after,
            sink_size=sink_size,
            steps_per_epoch=steps_per_epoch,
            threads=threads,
            progress=progress,
        )
        if not dry_run:
            background.finish_previous(timeout)
        checkpoint2.iteration_folder_name(iteration)
        _check_options(format, how, model, keep=keep, keep_every=keep_every, keep_best=keep_best)
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
        allowed = (*may_differ, *(() if rank_local is None else rank_local.may_differ))
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
            facts, told, own.layout, check_replicas=check_replicas, prefix=prefix, dedup=dedup, strict=strict_format
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
    files = capture(lambda: [make(name, arrays) for name, arrays in arrays_of.items()])
    if not blocking and ready is None:
        own.copies.freeze(members.rank)
    share = Share(files, own.common, own.record, own.copies)
    if blocking:
        return carry_out(terms, channel, share, planned, started=started, progress=progress, after=after)
    stall_seconds = time.monotonic() - started
    work = functools.partial(
        carry_out, terms, channel, share, planned, started=started, stall_seconds=stall_seconds, after=after
    )
    return background.start(iteration, work, progress, exit_seconds=timeout)


def _check_is_written_as_it_is(given: object, array: LocalArray) -> None:
    """Refuse what was copied to be looked at: before `ready`, that is before it has its content."""
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
    """The plan of this save, which mostly is that of the last one."""

    def make() -> Planned:
        plan = plan_iteration(facts, layout, **options)
        replicas = Replicas.of(plan.holders if check_replicas else {}, facts)
        return Planned(plan, planned_bytes(plan, facts), replicas)

    of_ranks = [[one["arrays"], one["shapes"], one["copies"]] for one in told]
    return _plans.get([of_ranks, str(layout), check_replicas, options], make)


def _agreed(terms: Terms, layout: ModelLayout | None) -> dict[str, object]:
    """What must be the same on all ranks."""
    return {
        "root": os.fspath(terms.root),
        "iteration": terms.iteration,
        "durable": terms.durable,
        "layout": None if layout is None else hashlib.blake2b(str(layout).encode()).hexdigest()[:16],
    }


def check_save_options(
    *,
    format: str,  # noqa: A002
    prefix: str | None,
    keep: int | None,
    keep_every: int | None,
    keep_best: tuple[str, int] | None,
    sink_size: int | None,
    save_network_params: bool,
    only_save_strategy: bool,
) -> None:
    """Refuse options of `save` that no save could have, before there is anything to save.

    Args:
        format: as in `save`, and so are the others.
        prefix: see `save`.
        keep: see `save`.
        keep_every: see `save`.
        keep_best: see `save`.
        sink_size: see `save`.
        save_network_params: see `save`.
        only_save_strategy: see `save`.

    Raises:
        ArgumentError: an option has a value that is not accepted, or does not go with another one.
    """
    how = checkpoint1.How(
        prefix=prefix,
        dedup=True,
        sink_size=sink_size,
        steps_per_epoch=None,
        network=save_network_params,
        trainable=None,
        only_strategy=only_save_strategy,
        check_replicas=True,
    )
    _check_options(format, how, {}, keep=keep, keep_every=keep_every, keep_best=keep_best)


def _check_options(
    format: str,  # noqa: A002
    how: checkpoint1.How,
    model: Mapping[str, object],
    *,
    keep: int | None,
    keep_every: int | None,
    keep_best: tuple[str, int] | None,
) -> None:
    own_files = save_traits(format).rank_folders
    _check_retention(keep, keep_every, keep_best)
    how.check(is_chosen=own_files, model=model)
    if not own_files:
        checkpoint2.check_prefix(how.prefix)
    elif keep_every is not None or keep_best is not None:
        raise ArgumentError("`keep_every` and `keep_best` are for Checkpoint 2.0; of 1.0 the newest `keep` are kept")


def _check_retention(keep: int | None, keep_every: int | None, keep_best: tuple[str, int] | None) -> None:
    """Refuse what would be a mere warning once the iteration is saved."""
    if keep is None:
        if keep_every is not None or keep_best is not None:
            raise ArgumentError("`keep_every` and `keep_best` say what is kept besides the newest: give `keep`, too")
        return
    retention.plan([], tracker=None, keep=keep, keep_every=keep_every)
    if keep_best is not None:
        is_pair = isinstance(keep_best, tuple | list) and len(keep_best) == 2
        if not is_pair or not isinstance(keep_best[0], str) or type(keep_best[1]) is not int or keep_best[1] < 1:
            raise ArgumentError(
                f"`keep_best` is {keep_best!r}, expected the name of a metric and a number from 1 on",
                hint='for example `keep_best=("loss", 3)`',
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
    """This rank's share of `extra`, as it is written: rank 0 everything, the others what is kept for each rank.

    One that `is_alone`, in a folder that may be all that it will see, keeps what all share, too.
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
    """A digest of each value of `extra` that all ranks share."""
    return {
        name: state.digest_of(value, f"extra[{name!r}]")
        for name, value in (extra or {}).items()
        if not isinstance(value, state.PerRank)
    }


def _host() -> str:
    """What tells one machine from another: the name alone may be that of every container."""
    return f"{socket.gethostname()} {boot_id()}"


def _check_shared(root: Path, facts: Sequence[RankFacts]) -> None:
    hosts = {one.host for one in facts}
    if len(hosts) > 1 and not mounts.is_shared(root, os.environ.get("SHARED_PATHS")):
        raise ArgumentError(
            f"{len(hosts)} hosts save together, and {root} is not on a file system that they are known to share",
            path=str(root),
            hint="save to a network file system, or name the folder in the environment variable SHARED_PATHS",
        )
