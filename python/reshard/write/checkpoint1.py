"""Saving in Checkpoint 1.0, all ranks together: each its own file, and `meta.json` once all of them are on the disk.

    1. every rank tells its arrays and what it finds in its folder; rank 0 claims the root and answers who keeps what
       under which name
    2. every rank writes its files, rank 0 the strategy; all tell that these are on the disk
    3. every rank writes its `meta.json`; all tell that
    4. every rank removes its files that are no longer kept

A restart takes the newest save of which every rank has a file, no newer than the oldest `meta.json`. So whatever ends a
save in the midst leaves the one before as it was: until all have told in 3 nothing of it is removed, and no name is
ever used twice (`rank_plan`). The weights alone (`<root>_network`, `<root>_trainable`) follow the names and go with
them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard import _core, dtypes
from reshard.errors import ArgumentError, CheckpointNotFoundError, GroupError, ReshardError, UnsupportedError
from reshard.formats import checkpoint1, checkpoint1_state, mounts, scalars
from reshard.formats.checkpoint1 import FileName, Meta, rank_folder_name
from reshard.small_files import show, write_file_atomically
from reshard.write import background, claims, protocol, rank_plan, steps, strategies, taken
from reshard.write.arrays import local_arrays
from reshard.write.facts import RankFacts, check_options, plan_iteration
from reshard.write.iteration import JointProgress
from reshard.write.rank_plan import Dealt, Naming, RankView
from reshard.write.shard_files import maker
from reshard.write.together import Own, SaveReport, Terms, append_to_log, meet, outcome_of, read_back

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from reshard.formats.checkpoint1 import FileKind
    from reshard.formats.save_log import SaveRecord
    from reshard.group import Group
    from reshard.write.arrays import LocalArray
    from reshard.write.shard_files import ShardFile
    from reshard.write.strategies import Strategies

__all__ = ["How", "save_ranks"]

_WEIGHTS_MODE = 0o400  # as the original's
_FILE_MODE = 0o640
_FOLDER_MODE = 0o750
_SHAPES = {"full": "", "network": "_network", "trainable": "_trainable"}


@dataclass(frozen=True)
class How:
    """How it is saved, besides `Terms`; the same on all ranks. See the arguments of `save`."""

    prefix: str | None
    dedup: bool
    sink_size: int | None
    steps_per_epoch: int | None
    network: bool
    trainable: frozenset[str] | None
    only_strategy: bool

    def agreed(self) -> dict[str, object]:
        """The options, to be compared among ranks, which may train different weights."""
        return {
            "prefix": self.prefix,
            "dedup": self.dedup,
            "sink_size": self.sink_size,
            "steps_per_epoch": self.steps_per_epoch,
            "save_network_params": self.network,
            "save_trainable_params": self.trainable is not None,
            "only_save_strategy": self.only_strategy,
        }

    def position(self, iteration: int, epoch: int | None) -> tuple[int, int]:
        """Epoch and step of the names."""
        return rank_plan.position(
            iteration, sink_size=self.sink_size, steps_per_epoch=self.steps_per_epoch, epoch=epoch
        )


@dataclass(frozen=True)
class Agreed:
    """What rank 0 has answered.

    Attributes:
        naming: what files are called.
        dealt: who keeps what.
        outdated: epochs and steps that go once the save is complete.
        strategy_by: the ranks that write the strategy: one on each host that has a root of its own.
        shapes: the global shapes that they write it for, and whether each is of the optimizer; None where rank 0 alone
            does, which knows them.
    """

    naming: Naming
    dealt: Dealt
    outdated: tuple[tuple[int, int], ...] = ()
    strategy_by: tuple[int, ...] = ()
    shapes: Mapping[str, tuple[tuple[int, ...], bool]] | None = None

    def to_json(self) -> dict[str, Any]:
        """The answer as a value that ranks can exchange."""
        naming = self.naming
        return {
            "naming": [naming.prefix, naming.run, naming.epoch, naming.step],
            "dealt": self.dealt.to_json(),
            "outdated": [list(one) for one in self.outdated],
            "strategy_by": list(self.strategy_by),
            "shapes": None if self.shapes is None else {key: [list(s), o] for key, (s, o) in self.shapes.items()},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Agreed:
        """What `to_json` of rank 0 gave."""
        shapes = value["shapes"]
        return cls(
            Naming(*value["naming"]),
            Dealt.from_json(value["dealt"]),
            tuple((epoch, step) for epoch, step in value["outdated"]),
            tuple(value["strategy_by"]),
            None if shapes is None else {key: (tuple(shape), is_state) for key, (shape, is_state) in shapes.items()},
        )


def save_ranks(
    terms: Terms,
    how: How,
    channel: Group,
    own: Own | BaseException,
    *,
    started: float,
    blocking: bool,
    ready: Callable[[], object] | None,
    progress: _core.Progress | None,
    after: Callable[[SaveReport], list[str]] | None = None,
) -> Any:
    """Save in rank folders; all ranks call this. A report, or what waits for one if it is not `blocking`.

    Args:
        terms: how, in every format.
        how: how, in this one.
        channel: the session of this save.
        own: what this rank brings along, or the exception in which making that ended.
        started: when `save` was called, on the monotonic clock.
        blocking: whether to wait.
        ready: as in `save`.
        progress: as in `save`.
        after: as in `save`.

    Raises:
        ReshardError: as `save`.
    """
    rank = channel.rank

    def tell() -> dict[str, Any]:
        if isinstance(own, BaseException):
            raise own
        at = how.position(terms.iteration, own.common.epoch_num)
        view = _look(terms.root, rank, channel.world_size, rank_plan.check_prefix(how.prefix), at)
        return {"facts": own.facts.to_json(), "view": view.to_json()}

    coordinator = _Coordinator(terms, how, own) if rank == 0 and isinstance(own, Own) else None
    told = outcome_of(tell)
    agreed = Agreed.from_json(meet(channel, told, None if coordinator is None else coordinator.plan, terms.timeout))
    assert isinstance(own, Own)
    metadata = {"format": "ms", "remove_redundancy": str(how.dedup and channel.world_size > 1)}
    make = maker(metadata, terms.threads, blocking=blocking, ready=ready)
    files = outcome_of(lambda: _files(make, terms, how, own, agreed, rank))
    strategy = _strategy_of(terms, own, agreed, rank) if coordinator is None else coordinator.strategy
    work = _Work(terms, how, channel, agreed, own, files, strategy, coordinator)
    if blocking:
        return work.carry_out(started=started, progress=progress, after=after)
    stall_seconds = time.monotonic() - started
    later = functools.partial(work.carry_out, started=started, stall_seconds=stall_seconds, after=after)
    return background.start(terms.iteration, later, progress, exit_seconds=terms.timeout)


# -- what a rank finds, and what it will write


def _folder(root: Path, rank: int, kind: FileKind = "full") -> Path:
    return root.with_name(root.name + _SHAPES[kind]) / rank_folder_name(rank)


def _look(root: Path, rank: int, n_ranks: int, prefix: str, at: tuple[int, int]) -> RankView:
    folder = _folder(root, rank)
    files: list[FileName] = []
    for kind in _SHAPES:
        with contextlib.suppress(CheckpointNotFoundError):
            files += checkpoint1.list_files(_folder(root, rank, kind), None)  # type: ignore[arg-type]  # a kind
    try:
        checkpoint1.read_meta(folder)
        has_meta = True
    except ReshardError:
        has_meta = False
    return rank_plan.view_of(
        files,
        prefix,
        at,
        has_folder=folder.is_dir(),
        has_meta=has_meta,
        has_more=(root / rank_folder_name(n_ranks)).is_dir(),
    )


def _files(
    make: Callable[[str, list[LocalArray]], ShardFile], terms: Terms, how: How, own: Own, agreed: Agreed, rank: int
) -> list[tuple[Path, ShardFile]]:
    """This rank's files with their folders, the one that counts first."""
    if how.only_strategy:
        return []
    left_out = agreed.dealt.left_out(rank)
    arrays = [array for name, array in own.arrays.items() if name not in left_out]
    counters = local_arrays({}, _counters(own, agreed.naming)).values()
    weights = [array for array in arrays if array.part == "model"]
    by_kind: dict[FileKind, list[LocalArray]] = {"full": [*arrays, *counters]}
    if how.network:
        by_kind["network"] = weights
    if how.trainable is not None:
        by_kind["trainable"] = [array for array in weights if array.name in how.trainable]
    return [
        (_folder(terms.root, rank, kind), make(agreed.naming.file(rank, kind).name, _in_order(of_kind)))
        for kind, of_kind in by_kind.items()
    ]


def _in_order(arrays: Collection[LocalArray]) -> list[LocalArray]:
    """Wide elements first, so that every tensor begins on a multiple of its element."""
    return sorted(arrays, key=lambda array: (-dtypes.bits(array.dtype), array.name))


def _counters(own: Own, naming: Naming) -> dict[str, object]:
    """The counters as tensors; one that the caller gave as a tensor is that."""
    common = own.common
    if common.epoch_num is None:
        common = type(common)(**{**_fields(common), "epoch_num": naming.epoch})
    return {name: array for name, array in scalars.arrays_of(common).items() if name not in own.arrays}


def _fields(common: Any) -> dict[str, Any]:
    return {name: getattr(common, name) for name in common.__dataclass_fields__}


def _strategy_of(terms: Terms, own: Own, agreed: Agreed, rank: int) -> Strategies | None:
    """What a rank writes that is not rank 0, on a host of its own."""
    if rank not in agreed.strategy_by or own.layout is None or agreed.shapes is None:
        return None
    return strategies.make(own.layout, agreed.shapes, terms.root)


# -- one save


class _Work:
    """One rank's side of a save."""

    def __init__(
        self,
        terms: Terms,
        how: How,
        channel: Group,
        agreed: Agreed,
        own: Own,
        files: list[tuple[Path, ShardFile]] | BaseException,
        strategy: Strategies | None,
        coordinator: _Coordinator | None,
    ) -> None:
        self.terms, self.how, self.channel, self.agreed = terms, how, channel, agreed
        self.state = own.extra
        self.common, self.record = own.common, own.record
        self.files, self.strategy, self.coordinator = files, strategy, coordinator
        self.folder = _folder(terms.root, channel.rank)
        self.file = agreed.naming.file(channel.rank)
        self.made: list[Path] = []

    def carry_out(
        self,
        *,
        started: float,
        stall_seconds: float | None = None,
        progress: _core.Progress | None = None,
        after: Callable[[SaveReport], list[str]] | None = None,
    ) -> SaveReport:
        terms, coordinator = self.terms, self.coordinator
        written = outcome_of(lambda: self._write(progress))
        try:
            summary = meet(self.channel, written, None if coordinator is None else coordinator.sum_up, terms.timeout)
        except BaseException as error:
            # Where ranks merely did not hear of each other, the others may have gone on: then what is written stays.
            if isinstance(written, BaseException) or (
                isinstance(error, ReshardError) and not isinstance(error, GroupError)
            ):
                self._withdraw()
            raise
        if not self.how.only_strategy:
            finished = outcome_of(self._finish)
            try:
                meet(self.channel, finished, None if coordinator is None else coordinator.complete, terms.timeout)
            except GroupError as error:
                if coordinator is None or not coordinator.is_complete:
                    raise
                # It is complete, whoever has not heard of it.
                summary["warnings"].append(f"not every rank learned that the save succeeded: {error.message}")
        seconds = time.monotonic() - started
        report = SaveReport(
            path=summary["path"],
            iteration=terms.iteration,
            n_bytes=summary["n_bytes"],
            n_files=summary["n_files"],
            seconds=seconds,
            stall_seconds=seconds if stall_seconds is None else stall_seconds,
            durable=summary["durable"],
            digest=summary["digest"],
            warnings=(*summary["warnings"], *self._remove_outdated()),
            suffix=None if self.how.only_strategy else self.file.suffix,
        )
        if coordinator is not None and not self.how.only_strategy:
            more = append_to_log(terms, self.record, report, coordinator.epoch, report.digest)
            report = _with_warnings(report, more)
        return report if after is None else _with_warnings(report, after(report))

    # -- 2: the files

    def _write(self, progress: _core.Progress | None) -> list[tuple[str, int, str]]:
        """Write this rank's files; the name, size and digest of each."""
        if isinstance(self.files, BaseException):
            raise self.files
        terms = self.terms
        rows = []
        joint = JointProgress(progress, sum(file.n_bytes for _, file in self.files))
        for folder, file in self.files:
            protocol.make_root(folder, _FOLDER_MODE, durable=terms.durable)
            _sweep(folder, self.file)
            path = folder / file.name
            if os.path.lexists(path):
                raise ReshardError(
                    f"{show(str(path))} has appeared since this save began", path=str(path), hint="do two jobs save here?"
                )
            steps.announce(f"write {file.name}")
            self.made.append(path)
            written = file.write(
                str(path), durable=terms.durable, mode=_WEIGHTS_MODE, progress=joint.of_file(file.n_bytes)
            )
            if terms.verify:
                read_back(str(path), written, terms.threads)
            told = hashlib.blake2b(written.header_sum.to_bytes(4, "little") + written.sums, digest_size=16).hexdigest()
            rows.append((f"{folder.parent.name}/{folder.name}/{file.name}", written.n_bytes, told))
        self._write_state()
        if self.strategy is not None:
            rows += self.strategy.write(_FILE_MODE, _FOLDER_MODE, durable=terms.durable)
        return rows

    def _write_state(self) -> None:
        """What else the rank keeps, in files of our own beside its weights."""
        if self.state is None or self.how.only_strategy:
            return
        text, arrays = self.state
        if arrays:
            path = self.folder / checkpoint1_state.arrays_file_name(self.file)
            self.made.append(path)
            own = [(one.name, one.dtype, one.shape, one.buffer()) for one in local_arrays(arrays, None).values()]
            steps.announce(f"write {path.name}")
            _core.write_arrays(str(path), own, durable=self.terms.durable, mode=_FILE_MODE)
        path = self.folder / checkpoint1_state.file_name(self.file)
        self.made.append(path)
        steps.announce(f"write {path.name}")
        write_file_atomically(path, text, _FILE_MODE, durable=self.terms.durable)

    def _withdraw(self) -> None:
        """Leave nothing of a save that all know to have failed."""
        for path in self.made:
            with contextlib.suppress(OSError):
                path.unlink()

    # -- 3: what makes it count

    def _finish(self) -> None:
        if self.coordinator is not None:
            self.coordinator.before_it_counts(self.file)
        steps.announce(f"write {checkpoint1.META_FILE} of rank {self.channel.rank}")
        meta = Meta(self.file.epoch, self.file.step, self.file.name)
        checkpoint1.write_meta(self.folder, meta, _FILE_MODE, durable=self.terms.durable)

    # -- 4: what is kept no longer

    def _remove_outdated(self) -> list[str]:
        warnings = []
        naming, rank = self.agreed.naming, self.channel.rank
        for epoch, step in self.agreed.outdated:
            for kind in _SHAPES:
                old = Naming(naming.prefix, naming.run, epoch, step).file(rank, kind)  # type: ignore[arg-type]  # a kind
                folder = _folder(self.terms.root, rank, kind)  # type: ignore[arg-type]
                names = [old.name]
                if kind == "full":
                    names += [checkpoint1_state.file_name(old), checkpoint1_state.arrays_file_name(old)]
                for name in names:
                    try:
                        steps.remove_file(folder / name)
                    except ReshardError as error:
                        warnings.append(f"an older file is not removed: {error}")
        return warnings


def _sweep(folder: Path, file: FileName) -> None:
    """Remove what a writer that was killed has left half-written under a hidden name: the root is ours alone."""
    debris = re.compile(rf"\.(?:{re.escape(file.prefix)}_rank_{file.rank}[-_].*|{re.escape(checkpoint1.META_FILE)}\..*)\.tmp")
    for name in steps.names(folder):
        if debris.fullmatch(name):
            with contextlib.suppress(ReshardError):
                steps.remove_file(folder / name)


def _with_warnings(report: SaveReport, more: list[str]) -> SaveReport:
    return report if not more else SaveReport(**{**report.__dict__, "warnings": (*report.warnings, *more)})


# -- rank 0

_runs: dict[tuple[Path, str], int] = {}
"""The run that this process is, by root and prefix: a process is one run, and a restarted one the next."""

os.register_at_fork(after_in_child=_runs.clear)


@dataclass
class _Coordinator:
    """Rank 0's side of a save."""

    terms: Terms
    how: How
    own: Own
    strategy: Strategies | None = None
    claim: claims.Claim | None = None
    is_complete: bool = False
    warnings: list[str] = field(default_factory=list)

    @property
    def epoch(self) -> int:
        """The number of our claim."""
        return 0 if self.claim is None else self.claim.epoch

    # -- 1

    def plan(self, told: list[Any]) -> dict[str, Any]:
        """Answer what all ranks told."""
        terms, how, layout = self.terms, self.how, self.own.layout
        facts = [RankFacts.from_json(one["facts"]) for one in told]
        views = [RankView.from_json(one["view"]) for one in told]
        check_options(facts)
        rank_plan.check_world(views, os.fspath(terms.root))
        hosts = list(dict.fromkeys(one.host for one in facts))
        is_shared = len(hosts) == 1 or mounts.is_shared(terms.root, os.environ.get("SHARED_PATHS"))
        if not is_shared and how.dedup:
            raise ArgumentError(
                f"{len(hosts)} hosts save together, each into a folder of its own, and what is kept once is on one of "
                "them",
                path=str(terms.root),
                hint="`dedup=False` makes each rank's file complete; a shared folder may be named in SHARED_PATHS",
            )
        plan = plan_iteration(facts, layout, prefix=None, dedup=False, strict=False)
        shapes = {record.key: (record.shape, record.part == "optimizer") for record in plan.records}
        if plan.tiles is not None:
            parts = {fact.name: fact.part for one in facts for fact in one.arrays}
            shapes |= {key: (one.shape, parts.get(key) == "optimizer") for key, one in plan.tiles.tensors.items()}
        shapes = {key: one for key, one in shapes.items() if key not in scalars.NAMES}
        stage_of = [0] * len(told)
        if layout is not None and len(told) > 1:
            self.strategy = strategies.make(layout, shapes, terms.root)
            stage_of = [rank // self.strategy.devices_per_stage for rank in range(len(told))]
        elif plan.not_expressible:
            key, reason = next(iter(plan.not_expressible.items()))
            raise UnsupportedError(
                f"a strategy cannot say how {show(key)} is cut: {reason}",
                key=key,
                hint="give `layout`" if layout is None else 'save it with `format="checkpoint2"`',
            )
        if self.strategy is not None:
            self.strategy.check_same(is_used=any(view.has_meta for view in views))
        dealt = rank_plan.deal(plan.holders, stage_of) if how.dedup else Dealt()
        self._claim(facts, dealt, hosts[0] if not is_shared else None)
        naming = self._naming(views)
        files = []
        with contextlib.suppress(CheckpointNotFoundError):
            files = checkpoint1.list_files(_folder(terms.root, 0))
        firsts = [[one.host for one in facts].index(host) for host in hosts] if not is_shared else [0]
        return Agreed(
            naming,
            dealt,
            () if how.only_strategy else tuple(rank_plan.outdated(files, naming, terms.keep)),
            tuple(firsts) if self.strategy is not None else (),
            shapes if len(firsts) > 1 else None,
        ).to_json()

    def _naming(self, views: list[RankView]) -> Naming:
        prefix = rank_plan.check_prefix(self.how.prefix)
        if self.how.only_strategy:
            return Naming(prefix, None, 0, 0)
        key = (self.terms.root.resolve(), prefix)
        number = _runs[key] = rank_plan.run_number(views, _runs.get(key))
        at = self.how.position(self.terms.iteration, self.own.common.epoch_num)
        return Naming(prefix, number or None, *at)

    def _claim(self, facts: list[RankFacts], dealt: Dealt, host: str | None) -> None:
        """Make the root ours, with room for what this host (None: every one) writes into it."""
        terms, how = self.terms, self.how
        protocol.make_root(terms.root, _FOLDER_MODE, durable=terms.durable)
        self.claim = claims.hold(
            terms.root, takeover=terms.takeover, durable=terms.durable, folder_mode=_FOLDER_MODE
        )
        n_bytes = 0
        for rank, one in enumerate(facts):
            if how.only_strategy or host not in (None, one.host):
                continue
            left_out = dealt.left_out(rank)
            for fact in one.arrays:
                if fact.name not in left_out:
                    n_copies = 1 + (how.network + (how.trainable is not None)) * (fact.part == "model")
                    n_bytes += n_copies * math.prod(fact.shape) * dtypes.bits(fact.dtype) // 8
        protocol.check_space(terms.root, n_bytes, durable=terms.durable)

    # -- 2

    def sum_up(self, reports: list[Any]) -> dict[str, Any]:
        """What the ranks have written, all of which is on the disk now."""
        assert self.claim is not None
        claims.check(self.claim)
        terms = self.terms
        rows = sorted(tuple(row) for one in reports for row in one)
        volatile = mounts.volatile(terms.root) if terms.durable else None
        if volatile is not None:
            self.warnings.append(f"{terms.root} lies on {volatile}, which forgets everything when the power is lost")
        return {
            "path": str(terms.root),
            "n_bytes": sum(n_bytes for _, n_bytes, _ in rows),
            "n_files": len(rows),
            "durable": terms.durable and volatile is None,
            "digest": hashlib.blake2b(json.dumps(rows).encode(), digest_size=16).hexdigest(),
            "warnings": self.warnings,
        }

    # -- 3

    def before_it_counts(self, file: FileName) -> None:
        """Note the health, if there is a word of it, before anybody can resume from the save."""
        status = self.own.common.ckpt_status
        if status is not None:
            steps.announce(f"write {checkpoint1_state.HEALTH_FILE}")
            checkpoint1_state.note_health(self.terms.root, file.name, status, _FILE_MODE, durable=self.terms.durable)

    def complete(self, _: list[Any]) -> None:
        """All ranks have told that their `meta.json` is there."""
        self.is_complete = True
        taken.forget(self.terms.root)
