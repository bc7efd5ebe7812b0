"""Saving in Checkpoint 1.0, all ranks together: each its own file, and `meta.json` once all of them are on the disk.

    1. every rank tells its arrays and what it finds in its folder; rank 0 claims the root and answers who keeps what
       under which name
    2. every rank writes its files, rank 0 the strategy; all tell that these are on the disk
    3. every rank writes its `meta.json`; all tell that
    4. every rank removes its files that are no longer kept

A restart takes the newest save of which every rank has a file, no newer than the oldest `meta.json`. So whatever ends a
save in the midst leaves the one before as it was: until all have told in 3 nothing of it is removed, and no name is
ever used twice (`rank_plan`). Nothing is removed before one that stays has been read back by every rank, as with
`verify_after_save`: if none has, it is the one that is being saved. That is known of the saves of this process, and no
other is ever removed; there is no manifest that a record could be bound to.

The weights alone (`<root>_network`, `<root>_trainable`) follow the names and go with them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from reshard.collective import Collective, capture
from reshard.errors import ArgumentError, CheckpointNotFoundError, GroupError, ReshardError, UnsupportedError
from reshard.formats import counter_tensors
from reshard.formats.checkpoint1 import health as checkpoint1_health
from reshard.formats.checkpoint1 import names as checkpoint1
from reshard.formats.checkpoint1 import save_plan as rank_plan
from reshard.formats.checkpoint1 import strategies
from reshard.formats.checkpoint1.save_plan import Naming, RankView, ShardAssignment
from reshard.formats.checkpoint1.save_rank import RankSide, arrays_by_kind, folder_of, look, n_bytes_of
from reshard.storage import claims, filesystem, mounts, protocol
from reshard.storage.location import Location, locate
from reshard.words import show
from reshard.write import background, pending_rollback
from reshard.write.collective_save import Own, SaveReport, Terms, append_to_log, report_of
from reshard.write.rank_facts import LastMade, RankFacts, check_options, check_state, plan_iteration
from reshard.write.replicas import Replicas
from reshard.write.shard_files import maker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from reshard import _core
    from reshard.formats.checkpoint1.names import FileName
    from reshard.formats.checkpoint1.strategies import Shapes, Strategies
    from reshard.formats.save_log import SaveRecord
    from reshard.group import Group
    from reshard.write.background import PendingSave
    from reshard.write.iteration import IterationPlan

__all__ = ["How", "check_ranks", "save_ranks"]


@dataclass(frozen=True)
class How:
    """How it is saved in this format, the same on all ranks but for what they train. See the arguments of `save`."""

    prefix: str | None
    dedup: bool
    sink_size: int | None
    steps_per_epoch: int | None
    network: bool
    trainable: frozenset[str] | None
    only_strategy: bool
    check_replicas: bool

    def agreed(self) -> dict[str, object]:
        """The options by name, to be compared among ranks."""
        return {
            "prefix": self.prefix,
            "dedup": self.dedup,
            "sink_size": self.sink_size,
            "steps_per_epoch": self.steps_per_epoch,
            "save_network_params": self.network,
            "save_trainable_params": self.trainable is not None,
            "only_save_strategy": self.only_strategy,
        }

    def check(self, model: Mapping[str, object]) -> None:
        """Refuse options that do not fit the model. Raises ArgumentError."""
        rank_plan.check_prefix(self.prefix)
        self.position(1, None)
        unknown = sorted((self.trainable or frozenset()) - model.keys())
        if unknown:
            raise ArgumentError(
                f"`save_trainable_params` names {show(unknown[0])}, which is not in `model`", key=unknown[0]
            )

    def position(self, iteration: int, epoch: int | None) -> tuple[int, int]:
        """Epoch and step of the names."""
        return rank_plan.position(
            iteration, sink_size=self.sink_size, steps_per_epoch=self.steps_per_epoch, epoch=epoch
        )


@dataclass(frozen=True)
class _Agreed:
    """What rank 0 has answered.

    Attributes:
        naming: what files are called.
        assignment: who keeps what.
        outdated: epochs and steps that go once the save is complete.
        strategy_by: the ranks that write the strategy: one on each host that has a root of its own.
        shapes: what they write it for; None where rank 0 alone does, which knows it.
        read_back: whether all ranks read back what they write.
        replicas: which ranks hold copies of what.
    """

    naming: Naming
    assignment: ShardAssignment
    outdated: tuple[tuple[int, int], ...] = ()
    strategy_by: tuple[int, ...] = ()
    shapes: Shapes | None = None
    read_back: bool = False
    replicas: Replicas = field(default_factory=Replicas)

    def to_json(self) -> dict[str, Any]:
        naming = self.naming
        return {
            "naming": [naming.prefix, naming.run, naming.epoch, naming.step],
            "assignment": self.assignment.to_json(),
            "outdated": [list(one) for one in self.outdated],
            "strategy_by": list(self.strategy_by),
            "read_back": self.read_back,
            "shapes": None if self.shapes is None else {key: [list(s), o] for key, (s, o) in self.shapes.items()},
            "replicas": self.replicas.to_json(),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> _Agreed:
        shapes = value["shapes"]
        return cls(
            Naming(*value["naming"]),
            ShardAssignment.from_json(value["assignment"]),
            tuple((epoch, step) for epoch, step in value["outdated"]),
            tuple(value["strategy_by"]),
            None if shapes is None else {key: (tuple(shape), is_state) for key, (shape, is_state) in shapes.items()},
            value["read_back"],
            Replicas.from_json(value["replicas"]),
        )


def save_ranks(
    terms: Terms,
    how: How,
    channel: Group,
    own: Own | BaseException,
    *,
    started: float,
    blocking: bool,
    ready: Callable[[], object] | None = None,
    progress: _core.Progress | None = None,
    after: Callable[[SaveReport], list[str]] | None = None,
) -> SaveReport | PendingSave[SaveReport]:
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
    coordinator = _Coordinator(terms, how, own) if rank == 0 and isinstance(own, Own) else None
    told = capture(lambda: _told(terms, how, channel, own))
    ranks = Collective(channel, terms.timeout)
    agreed = _Agreed.from_json(ranks.combine(told, None if coordinator is None else coordinator.plan))
    assert isinstance(own, Own)

    def files() -> dict[Any, Any]:
        if how.only_strategy:
            return {}
        metadata = {"format": "ms", "remove_redundancy": str(how.dedup and channel.world_size > 1)}
        make = maker(metadata, terms.threads, blocking=blocking, ready=ready)
        by_kind = arrays_by_kind(
            own, agreed.naming, agreed.assignment.left_out(rank), network=how.network, trainable=how.trainable
        )
        return {kind: make(agreed.naming.file(rank, kind).name, arrays) for kind, arrays in by_kind.items()}

    strategy = None if coordinator is None else coordinator.strategy
    if coordinator is None and rank in agreed.strategy_by and own.layout is not None and agreed.shapes is not None:
        strategy = strategies.make(own.layout, agreed.shapes, terms.root)  # on a host of its own
    own.copies.replicas = agreed.replicas
    if not blocking and ready is None:
        own.copies.freeze(rank)
    side = RankSide(replace(terms, verify=agreed.read_back), rank, agreed.naming, capture(files), own.copies, strategy)
    job = _Job(terms, how, ranks, side, coordinator, agreed.outdated, own.record, after)
    if blocking:
        return job.carry_out(started=started, progress=progress)
    stall_seconds = time.monotonic() - started
    later = functools.partial(job.carry_out, started=started, stall_seconds=stall_seconds)
    return background.start(terms.iteration, later, progress, exit_seconds=terms.timeout)


def check_ranks(terms: Terms, how: How, channel: Group, own: Own | BaseException) -> None:
    """Check a save without claiming the root or writing; all ranks call this.

    Args:
        terms: how, in every format.
        how: how, in this one.
        channel: the session of the check.
        own: what this rank brings along, or the exception in which making that ended.

    Raises:
        ReshardError: as `save`.
    """

    def check(told: list[Any]) -> None:
        assert isinstance(own, Own)
        _Coordinator(terms, how, own).check(told)

    Collective(channel, terms.timeout).combine(capture(lambda: _told(terms, how, channel, own)), check)


def _told(terms: Terms, how: How, channel: Group, own: Own | BaseException) -> dict[str, Any]:
    """What a rank tells in the first meeting."""
    if isinstance(own, BaseException):
        raise own
    at = how.position(terms.iteration, own.common.epoch_num)
    view = look(terms.root, channel.rank, channel.world_size, rank_plan.check_prefix(how.prefix), at)
    return {"facts": own.facts.to_json(), "view": view.to_json()}


@dataclass(frozen=True)
class _Job:
    """What is to be done once it is agreed."""

    terms: Terms
    how: How
    ranks: Collective
    side: RankSide
    coordinator: _Coordinator | None
    outdated: tuple[tuple[int, int], ...]
    record: SaveRecord
    after: Callable[[SaveReport], list[str]] | None

    def carry_out(
        self, *, started: float, stall_seconds: float | None = None, progress: _core.Progress | None = None
    ) -> SaveReport:
        """Steps 2 to 4; none raises once the save is complete, but see `GroupError` at `save`."""
        terms, side, coordinator = self.terms, self.side, self.coordinator
        side.settle(self.ranks.channel)
        written = capture(lambda: side.write(progress))
        try:
            summary = self.ranks.combine(written, None if coordinator is None else coordinator.sum_up)
        except BaseException as error:
            # Where ranks merely did not hear of each other, the others may have gone on: then what is written stays.
            is_told = isinstance(error, ReshardError) and not isinstance(error, GroupError)
            if is_told or isinstance(written, BaseException):
                side.withdraw()
            raise
        is_heard = self.how.only_strategy or self._make_count(summary)
        report = report_of(terms, summary, started, stall_seconds)
        report = replace(
            report,
            warnings=(*report.warnings, *side.remove(self.outdated)),
            suffix=None if self.how.only_strategy else side.file.suffix,
        )
        more: list[str] = []
        if coordinator is not None and not self.how.only_strategy:
            more += append_to_log(terms, self.record, report, coordinator.generation, report.digest)
        if self.after is not None and is_heard:
            more += self.after(report)
        return replace(report, warnings=(*report.warnings, *more))

    def _make_count(self, summary: dict[str, Any]) -> bool:
        """Step 3; whether all ranks have heard of its end."""
        coordinator = self.coordinator

        def make_count() -> None:
            if coordinator is not None:
                coordinator.before_it_counts(self.side.file)
            self.side.make_count()

        done = capture(make_count)
        try:
            self.ranks.combine(done, None if coordinator is None else coordinator.complete)
        except GroupError as error:
            if coordinator is None or not coordinator.is_complete:
                raise
            # It is complete, whoever has not heard of it.
            summary["warnings"].append(f"not every rank learned that the save succeeded: {error.message}")
            return False
        return True


# -- rank 0

_Planned: TypeAlias = "tuple[IterationPlan, Shapes, Strategies | None]"
_plans = LastMade[_Planned]()

_runs: dict[tuple[Location, str], int] = {}
"""The run that this process is, by root and prefix: a process is one run, and a restarted one the next."""

_read_back: dict[tuple[Location, str, int | None], set[tuple[int, int]]] = {}
"""Epochs and steps of the saves that this process read back, by root, prefix and number of the run."""

os.register_at_fork(after_in_child=_runs.clear)
os.register_at_fork(after_in_child=_read_back.clear)


@dataclass(eq=False)
class _Coordinator:
    """Rank 0's side of a save."""

    terms: Terms
    how: How
    own: Own
    strategy: Strategies | None = None
    claim: claims.Claim | None = None
    is_complete: bool = False
    read_back: tuple[tuple[Location, str, int | None], tuple[int, int]] | None = None  # what is noted at the end
    warnings: list[str] = field(default_factory=list)

    @property
    def generation(self) -> int:
        """That of our claim."""
        return 0 if self.claim is None else self.claim.generation

    # -- 1

    def check(
        self, told: list[Any]
    ) -> tuple[list[RankFacts], list[RankView], list[int], ShardAssignment, Shapes, IterationPlan]:
        """What all ranks reported, if it can be saved: facts, views, first rank of each root, who keeps what, plan."""
        terms, how = self.terms, self.how
        facts = [RankFacts.from_json(one["facts"]) for one in told]
        views = [RankView.from_json(one["view"]) for one in told]
        check_options(facts)
        check_state(facts)
        firsts = self._first_of_each_root(facts)
        rank_plan.check_world(views, os.fspath(terms.root), is_shared=len(firsts) == 1)
        same = [[[one["facts"]["arrays"], one["facts"]["shapes"]] for one in told], str(self.own.layout)]
        plan, shapes, self.strategy = _plans.get([same, os.fspath(terms.root)], lambda: self._plan(facts))
        assignment = ShardAssignment()
        if self.strategy is None:
            _check_whole(plan, how, has_layout=self.own.layout is not None)
        else:
            self.strategy.check_same(is_used=any(view.has_meta for view in views))
            if how.dedup:
                holders = {name: plan.holders[name] for name in self.strategy.strategy.keys()}  # noqa: SIM118
                n_devices = self.strategy.devices_per_stage
                assignment = rank_plan.assign(holders, [rank // n_devices for rank in range(len(told))])
        return facts, views, firsts, assignment, shapes, plan

    def plan(self, told: list[Any]) -> dict[str, Any]:
        """Answer what all ranks told."""
        terms, how = self.terms, self.how
        facts, views, firsts, assignment, shapes, plan = self.check(told)
        self._claim(facts, assignment, None if len(firsts) == 1 else facts[0].host)
        naming = self._naming(views)
        files: list[FileName] = []
        with contextlib.suppress(CheckpointNotFoundError):
            files = checkpoint1.list_files(folder_of(terms.root, 0))
        keep = None if terms.retention is None else terms.retention.keep
        outdated = () if how.only_strategy else tuple(rank_plan.outdated(files, naming, keep))
        return _Agreed(
            naming,
            assignment,
            outdated,
            tuple(firsts) if self.strategy is not None else (),
            shapes if len(firsts) > 1 else None,
            self._is_read_back(naming, files, outdated),
            Replicas() if how.only_strategy else Replicas.of(plan.holders if how.check_replicas else {}, facts),
        ).to_json()

    def _is_read_back(self, naming: Naming, files: list[FileName], outdated: tuple[tuple[int, int], ...]) -> bool:
        """Whether this save is: if it is asked for, or something goes and nothing that stays was."""
        key = (locate(self.terms.root).resolved(), naming.prefix, naming.run)
        there = {(file.epoch, file.step) for file in files if (file.prefix, file.run) == (naming.prefix, naming.run)}
        known = _read_back[key] = _read_back.get(key, set()) & there
        is_read_back = self.terms.verify or (bool(outdated) and not known - set(outdated))
        if is_read_back:
            self.read_back = (key, (naming.epoch, naming.step))
        return is_read_back

    def _plan(self, facts: list[RankFacts]) -> _Planned:
        layout = self.own.layout
        plan = plan_iteration(facts, layout, prefix=None, dedup=False, strict=False)
        shapes = _shapes(plan, facts)
        if layout is None or len(facts) == 1:
            return plan, shapes, None
        return plan, shapes, strategies.make(layout, shapes, self.terms.root)

    def _first_of_each_root(self, facts: list[RankFacts]) -> list[int]:
        """The lowest rank that sees each root: one, unless several hosts have each their own."""
        of_hosts: dict[str, int] = {}
        for rank, one in enumerate(facts):
            of_hosts.setdefault(one.host, rank)
        if len(of_hosts) == 1 or mounts.is_shared(self.terms.root, os.environ.get("SHARED_PATHS")):
            return [0]
        if self.how.dedup:
            raise ArgumentError(
                f"{len(of_hosts)} hosts save together, each into a folder of its own: what is kept once would be on "
                "one of them",
                path=str(self.terms.root),
                hint="`files=Files(dedup=False)` makes each rank's file complete; a folder that they share is named in "
                "SHARED_PATHS",
            )
        return list(of_hosts.values())

    def _claim(self, facts: list[RankFacts], assignment: ShardAssignment, host: str | None) -> None:
        """Make the root ours, with room for what this host (None: every one) writes into it."""
        terms, how = self.terms, self.how
        self.claim = protocol.claim_root(
            terms.root, takeover=terms.takeover, durable=terms.durable, folder_mode=terms.folder_mode
        )
        n_bytes = 0
        for rank, one in enumerate(facts):
            if not how.only_strategy and host in (None, one.host):
                left_out = assignment.left_out(rank)
                written = [fact for fact in one.arrays if fact.name not in left_out]
                n_bytes += n_bytes_of((fact.dtype, fact.shape) for fact in written)
                weights = n_bytes_of((fact.dtype, fact.shape) for fact in written if fact.part == "model")
                n_bytes += weights * (how.network + (how.trainable is not None))
        protocol.check_space(terms.root, n_bytes, durable=terms.durable)

    def _naming(self, views: list[RankView]) -> Naming:
        prefix = rank_plan.check_prefix(self.how.prefix)
        if self.how.only_strategy:
            return Naming(prefix, None, 0, 0)
        key = (locate(self.terms.root).resolved(), prefix)
        number = _runs[key] = rank_plan.run_number(views, _runs.get(key))
        return Naming(prefix, number or None, *self.how.position(self.terms.iteration, self.own.common.epoch_num))

    # -- 2

    def sum_up(self, reports: list[Any]) -> dict[str, Any]:
        """What the ranks have written, all of which is on the disk now."""
        assert self.claim is not None
        claims.check(self.claim)
        rows = sorted(tuple(row) for one in reports for row in one)
        volatile = mounts.volatile(self.terms.root) if self.terms.durable else None
        if volatile is not None:
            self.warnings.append(
                f"{self.terms.root} lies on {volatile}, which forgets everything when the power is lost"
            )
        path = self.terms.root
        if self.how.only_strategy:
            assert self.strategy is not None
            path = self.strategy.folder
            rows = [(name, n_bytes, "") for name, n_bytes in self.strategy.files()]
        return {
            "path": str(path),
            "n_bytes": sum(n_bytes for _, n_bytes, _ in rows),
            "n_files": len(rows),
            "durable": self.terms.durable and volatile is None,
            "digest": hashlib.blake2b(json.dumps(rows).encode(), digest_size=16).hexdigest(),
            "warnings": self.warnings,
        }

    # -- 3

    def before_it_counts(self, file: FileName) -> None:
        """Note the health, if there is a word of it, before anybody can resume from the save."""
        status = self.own.common.ckpt_status
        if status is not None:
            filesystem.announce(f"write {checkpoint1_health.HEALTH_FILE}")
            warning = checkpoint1_health.note(
                self.terms.root, file.name, status, self.terms.file_mode, durable=self.terms.durable
            )
            self.warnings += [] if warning is None else [warning]

    def complete(self, _: list[Any]) -> None:
        """All ranks have told that their `meta.json` is there."""
        self.is_complete = True
        if self.read_back is not None:
            _read_back[self.read_back[0]].add(self.read_back[1])
        pending_rollback.forget(self.terms.root)


def _shapes(plan: IterationPlan, facts: list[RankFacts]) -> Shapes:
    """The global shape of each tensor, and whether it is the optimizer's; counters are not cut, and not told of."""
    shapes = {record.key: (record.layout.shape, record.part == "optimizer") for record in plan.records}
    if plan.tiles is not None:
        parts = {fact.name: fact.part for one in facts for fact in one.arrays}
        for key, tensor in plan.tiles.tensors.items():
            if key not in parts:
                raise UnsupportedError(
                    f"a strategy cannot express {show(key)}: it is joined with others into one array",
                    key=key,
                    hint='save with `format="checkpoint2"`, or without `join` in the layout',
                )
            shapes[key] = tensor.shape, parts[key] == "optimizer"
    return {key: one for key, one in shapes.items() if key not in counter_tensors.NAMES}


def _check_whole(plan: IterationPlan, how: How, *, has_layout: bool) -> None:
    """Without a strategy every array must be whole."""
    if how.only_strategy:
        raise ArgumentError(
            "`only_save_strategy` writes how tensors are cut over ranks",
            hint="there is one rank: it holds them whole" if has_layout else "give `layout=`",
        )
    if plan.not_expressible:
        key, reason = next(iter(plan.not_expressible.items()))
        raise UnsupportedError(
            f"Checkpoint 1.0 cannot say how {show(key)} is cut: {reason}",
            key=key,
            hint='save with `format="checkpoint2"`' if has_layout else "give `layout=`",
        )
