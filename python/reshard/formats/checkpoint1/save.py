"""What `reshard.save` does in Checkpoint 1.0: each rank writes its own file, then its `meta.json`.

Every rank reports its arrays and the content of its folder, and rank 0 answers who keeps what under which name. Every
rank writes its files, rank 0 the strategy as well. Once all files are on the disk, every rank confirms: it writes its
`meta.json`. Then every rank removes its files that are no longer kept.

A restart takes the newest save of which every rank has a file and that is no newer than the oldest `meta.json`. So a
save that is interrupted leaves the one before as it was: nothing of that is removed before all ranks have confirmed,
and no name is used twice (`save_plan`). Nothing is removed before a save that stays has been read back by every rank,
as with `verify_after_save`. If none was, this save is read back. That is known of the saves of this process, and no
others are removed: there is no manifest that could record it.

The weights alone (`<root>_network`, `<root>_trainable`) have the same names and are removed with them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from reshard import dtypes
from reshard.commit import claims, filesystem, folder_protocol, protocol
from reshard.commit.session import Claim, find_session, session_of
from reshard.documents.common_info import CommonInfo  # noqa: TC001  as the one before
from reshard.errors import ArgumentError, CheckpointNotFoundError, ReshardError, UnsupportedError
from reshard.formats import counter_tensors, health
from reshard.formats.checkpoint1 import health as checkpoint1_health
from reshard.formats.checkpoint1 import names as checkpoint1
from reshard.formats.checkpoint1 import save_plan as rank_plan
from reshard.formats.checkpoint1 import state as checkpoint1_state
from reshard.formats.checkpoint1 import strategies
from reshard.formats.checkpoint1.names import TRAITS
from reshard.formats.checkpoint1.save_plan import FolderView, Naming, ShardAssignment
from reshard.formats.checkpoint1.save_rank import RankSide, WrittenWeights, arrays_by_kind, folder_of, look
from reshard.formats.checkpoint1.state import SAVE_KEY
from reshard.formats.checkpoint1.strategies import Shapes  # noqa: TC001  messages are decoded by their type hints
from reshard.formats.checkpoint2.planning import plan_iteration
from reshard.formats.replicas import is_any_of
from reshard.options import Checkpoint1Options
from reshard.ranks.messages import recurring
from reshard.storage import mounts
from reshard.values.words import show
from reshard.write.phases import Begun, Draft, Messages, Planned, Prepared, Publication, Published, Written
from reshard.write.rank_facts import LastMade, RankFacts, check_options, check_state, layout_key, plan_key
from reshard.write.replicas import Replicas

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import numpy as np

    from reshard import _core
    from reshard.formats.checkpoint1.names import FileName
    from reshard.formats.checkpoint1.strategies import Strategies
    from reshard.formats.checkpoint2.iteration import IterationPlan
    from reshard.options import SaveOptions
    from reshard.storage.location import Location
    from reshard.write.phases import RankInput, SaveTask
    from reshard.write.replicas import State
    from reshard.write.shard_files import ShardFileMaker


@dataclass(frozen=True)
class _Report:
    """What a rank holds, what is in its folder, and whether it has state besides arrays."""

    facts: RankFacts
    view: FolderView
    has_state: bool = False


@dataclass(frozen=True)
class _Orders:
    """The answer of rank 0.

    Attributes:
        naming: what files are called.
        assignment: who keeps what.
        common: the counters of rank 0.
        strategy_by: the ranks that write the strategy besides rank 0: one on each host that has a root of its own.
        shapes: the shapes of the strategy; None: rank 0 alone writes it.
        replicas: which ranks hold copies of what.
        save: the id of the save, if any rank may have state; None: there are no state files.
    """

    naming: Naming
    assignment: ShardAssignment = field(metadata=recurring())
    common: CommonInfo
    strategy_by: tuple[int, ...] = ()
    shapes: Shapes | None = None
    replicas: Replicas = field(default_factory=Replicas, metadata=recurring())
    save: str | None = None


@dataclass(frozen=True)
class _BegunMessage:
    """What rank 0 knows of the saves before this one.

    Attributes:
        reads_back: whether all ranks read back what they write.
        outdated: epochs and steps that are removed once the save is complete.
        last_healthy: epoch and step of the newest save that is not recorded as unhealthy; it stays after an unhealthy
            save. None: there is none.
    """

    reads_back: bool
    outdated: tuple[tuple[int, int], ...]
    last_healthy: tuple[int, int] | None = None


_PlanOfRanks: TypeAlias = "tuple[IterationPlan, Shapes, Strategies | None]"
_Weights: TypeAlias = tuple[WrittenWeights, ...]
_MESSAGES = Messages(_Report, _Orders, _BegunMessage, tuple[WrittenWeights, ...])
_plans = LastMade[_PlanOfRanks]()


@dataclass
class _Runs:
    """What this process remembers of its saves into a root.

    Attributes:
        numbers: by prefix, the number of its run: a process is one run, and a restarted one the next.
        read_back: by prefix and number of the run, epochs and steps of the saves that it has read back.
    """

    numbers: dict[str, int] = field(default_factory=dict)
    read_back: defaultdict[tuple[str, int | None], set[tuple[int, int]]] = field(
        default_factory=lambda: defaultdict(set)
    )


def _own(options: SaveOptions) -> Checkpoint1Options:
    """The options of this format."""
    return options.of_format if isinstance(options.of_format, Checkpoint1Options) else Checkpoint1Options()


class Checkpoint1Draft(Draft[_Report, _Orders, _BegunMessage, _Weights]):
    """What one rank has to save in Checkpoint 1.0."""

    traits = TRAITS
    messages = _MESSAGES

    def __init__(self, task: SaveTask, own: RankInput) -> None:
        """As `Draft`."""
        super().__init__(task, own)
        self._options = _own(task.options)
        if self._options.save_trainable_params is True:
            raise ArgumentError(
                "`save_trainable_params` is True, and `save` needs the names of the weights that are trained",
                hint='for example `format=Checkpoint1Options(save_trainable_params=["head.weight"])`',
            )
        self.confirms = not self._options.only_save_strategy
        self._prefix = rank_plan.check_prefix(task.options.files.prefix)

    @staticmethod
    def check_options(options: SaveOptions, model: Mapping[str, object]) -> None:
        """Refuse a prefix, sizes and names that cannot be, and retention of Checkpoint 2.0."""
        own, retention = _own(options), options.retention
        rank_plan.check_prefix(options.files.prefix)
        rank_plan.position(1, sink_size=own.sink_size, steps_per_epoch=own.steps_per_epoch)
        unknown = sorted((own.trained_names or frozenset()) - model.keys())
        if unknown:
            raise ArgumentError(
                f"`save_trainable_params` names {show(unknown[0])}, which is not in `model`", key=unknown[0]
            )
        if retention is not None and (retention.keep_every is not None or retention.best is not None):
            raise ArgumentError(
                "`keep_every` and `best` of `Retention` are for Checkpoint 2.0; of 1.0 the newest `keep` are kept"
            )

    @staticmethod
    def dump_extra(kept: Mapping[str, object], own: Collection[str]) -> tuple[str, dict[str, np.ndarray]]:
        """The values of this rank apart from those of all ranks."""
        shared = {name: value for name, value in kept.items() if name not in own}
        return checkpoint1_state.dump(shared, {name: kept[name] for name in kept if name in own})

    def report(self) -> _Report:
        """The facts of this rank, and the content of its folder."""
        own = self.own
        view = look(self.task.root, own.rank, own.world_size, self._prefix, self._position)
        return _Report(own.facts, view, own.copies.has_state)

    @property
    def _position(self) -> tuple[int, int]:
        """Epoch and step of the names."""
        own, epoch = self._options, self.own.common.epoch_num
        return rank_plan.position(
            self.task.iteration, sink_size=own.sink_size, steps_per_epoch=own.steps_per_epoch, epoch=epoch
        )

    def plan(self, reports: list[_Report]) -> Checkpoint1Planned:
        """Check what the ranks reported, and plan who keeps what under which name."""
        task, layout = self.task, self.own.layout
        facts, views = [one.facts for one in reports], [one.view for one in reports]
        check_options(facts)
        check_state(facts)
        firsts = self._first_of_each_root(facts)
        rank_plan.check_world(views, os.fspath(task.root), is_shared=len(firsts) == 1)
        key = [plan_key(facts), layout_key(facts, layout), os.fspath(task.root)]
        plan, shapes, strategy = _plans.get(key, lambda: self._plan_of_ranks(facts))
        assignment = ShardAssignment()
        if strategy is None:
            _check_whole(plan, only_strategy=self._options.only_save_strategy, has_layout=layout is not None)
        else:
            strategy.check_same(is_used=any(view.has_meta for view in views))
            if task.options.dedup:
                holders = {name: plan.holders[name] for name in strategy.strategy.keys()}  # noqa: SIM118
                n_devices = strategy.devices_per_stage
                assignment = rank_plan.assign(holders, [rank // n_devices for rank in range(len(facts))])
        if self._options.only_save_strategy:
            naming, replicas = Naming(self._prefix, None, 0, 0), Replicas()
        else:
            session = find_session(task.root)
            known = None if session is None else session.of(_Runs).numbers.get(self._prefix)
            number = rank_plan.run_number(views, known)
            naming = Naming(self._prefix, number or None, *self._position)
            replicas = Replicas.of(plan.holders if task.options.verify.check_replicas else {}, facts)
        has_state = any(one.has_state for one in reports) or any(may_differ for *_, may_differ in replicas.rows)
        orders = _Orders(
            naming,
            assignment,
            self.own.common,
            tuple(firsts[1:]) if strategy is not None else (),
            shapes if len(firsts) > 1 else None,
            replicas,
            os.urandom(16).hex() if has_state else None,
        )
        return Checkpoint1Planned(orders, task, self.own, facts, strategy, is_one_root=len(firsts) == 1)

    def _plan_of_ranks(self, facts: list[RankFacts]) -> _PlanOfRanks:
        layout = self.own.layout
        plan = plan_iteration(facts, layout, prefix=None, dedup=False, strict=False)
        shapes = _shapes(plan, facts)
        if layout is None or len(facts) == 1:
            return plan, shapes, None
        return plan, shapes, strategies.make(layout, shapes, self.task.root)

    def _first_of_each_root(self, facts: list[RankFacts]) -> list[int]:
        """The lowest rank that sees each root: one, unless several hosts have each their own."""
        of_hosts: dict[str, int] = {}
        for rank, one in enumerate(facts):
            of_hosts.setdefault(one.host, rank)
        if len(of_hosts) == 1 or mounts.is_shared(self.task.root, os.environ.get("SHARED_PATHS")):
            return [0]
        if self.task.options.dedup:
            raise ArgumentError(
                f"{len(of_hosts)} hosts save together, each into a folder of its own: what is kept once would be on "
                "one of them",
                path=str(self.task.root),
                hint="`files=Files(dedup=False)` makes each rank's file complete; a folder that they share is named in "
                "SHARED_PATHS",
            )
        return list(of_hosts.values())

    def prepare(self, orders: _Orders, make: ShardFileMaker) -> Checkpoint1Prepared:
        """Make this rank's files ready, and the strategy, if this rank writes it."""
        own, task, layout = self.own, self.task, self.own.layout
        counters = [name for name in counter_tensors.NAMES if name in own.arrays]
        side = RankSide(task, own.rank, orders.naming, counters, orders.save)
        strategy = None
        if own.rank in orders.strategy_by and layout is not None and orders.shapes is not None:
            strategy = strategies.make(layout, orders.shapes, task.root)
        if self.confirms:
            metadata = {"format": "ms", "remove_redundancy": str(task.options.dedup and own.world_size > 1)}
            by_kind = arrays_by_kind(
                own.arrays,
                orders.common,
                orders.naming,
                orders.assignment.left_out(own.rank),
                network=self._options.save_network_params,
                trainable=self._options.trained_names,
            )
            of_kind = {"full": metadata | ({} if orders.save is None else {SAVE_KEY: orders.save})}
            side.files.update(
                (kind, make(orders.naming.file(own.rank, kind).name, arrays, of_kind.get(kind, metadata)))
                for kind, arrays in by_kind.items()
            )
        return Checkpoint1Prepared(own, side, strategy)


@dataclass(frozen=True)
class Checkpoint1Planned(Planned[_Orders, _BegunMessage, _Weights]):
    """On rank 0: who keeps what under which name.

    Attributes:
        task: the save.
        own: what rank 0 holds.
        facts: those of each rank.
        strategy: how tensors are partitioned, which rank 0 writes into its root; None: no tensor is.
        is_one_root: whether all ranks see one root, not each host its own.
    """

    task: SaveTask
    own: RankInput
    facts: list[RankFacts]
    strategy: Strategies | None
    is_one_root: bool

    def begin(self) -> Checkpoint1Begun:
        """Claim the root, if there is space for what this host writes into it."""
        task, options, naming = self.task, self.task.options, self.orders.naming
        claim = protocol.claim_root(
            task.root, takeover=options.commit.takeover, durable=task.durable, folder_mode=task.folder_mode
        )
        folder_protocol.check_space(task.root, self._n_bytes(), durable=task.durable)
        if _own(options).only_save_strategy:
            return Checkpoint1Begun(_BegunMessage(options.verify.after_save, ()), self, claim)
        runs = session_of(task.root).of(_Runs)
        runs.numbers[naming.prefix] = naming.run or 0
        files: list[FileName] = []
        with contextlib.suppress(CheckpointNotFoundError):
            files = checkpoint1.list_files(folder_of(task.root, 0))
        outdated = rank_plan.outdated(files, naming, None if options.retention is None else options.retention.keep)
        there = {(file.epoch, file.step) for file in files if (file.prefix, file.run) == (naming.prefix, naming.run)}
        known = runs.read_back[naming.prefix, naming.run]
        known &= there
        reads_back = options.verify.after_save or (bool(outdated) and not known - set(outdated))
        message = _BegunMessage(reads_back, tuple(outdated), self._last_healthy(files))
        return Checkpoint1Begun(message, self, claim)

    def _last_healthy(self, files: Sequence[FileName]) -> tuple[int, int] | None:
        """The newest save of this run, before this one, that is not recorded as unhealthy."""
        statuses: dict[str, int] = {}
        with contextlib.suppress(ReshardError):  # there is no record, or it cannot be read, which `confirm` reports
            statuses = checkpoint1_health.read(self.task.root)
        naming = self.orders.naming
        found = {
            (file.epoch, file.step)
            for file in files
            if file.kind == "full" and (file.prefix, file.run) == (naming.prefix, naming.run)
            if statuses.get(file.name) != 1
        }
        return max(found - {(naming.epoch, naming.step)}, default=None)

    def _n_bytes(self) -> int:
        """What is written into the root of this host."""
        own, facts, n_bytes = _own(self.task.options), self.facts, 0
        for rank, one in enumerate(facts):
            if not own.only_save_strategy and (self.is_one_root or one.host == facts[0].host):
                left_out = self.orders.assignment.left_out(rank)
                written = [fact for fact in one.arrays if fact.name not in left_out]
                sizes = {fact.name: dtypes.n_bytes(fact.dtype, fact.shape) for fact in written}
                n_bytes += sum(sizes.values())
                weights = sum(sizes[fact.name] for fact in written if fact.part == "model")
                n_bytes += weights * (own.save_network_params + (own.trained_names is not None))
        return n_bytes


@dataclass(frozen=True)
class Checkpoint1Begun(Begun[_BegunMessage, _Weights]):
    """On rank 0: a save for which the root is claimed.

    Attributes:
        planned: who keeps what.
        claim: of the root.
    """

    planned: Checkpoint1Planned
    claim: Claim

    def publish(
        self,
        own: Written[_Weights],  # noqa: ARG002
        written: list[_Weights],
        *,
        durable: bool,
        log: Callable[[Published], list[Location]],  # noqa: ARG002
    ) -> Checkpoint1Publication:
        """Write the strategy. All files are on the disk then, and a restart does not find them yet."""
        claims.check(self.claim)
        planned, task = self.planned, self.planned.task
        path = task.root
        rows = sorted((file.name, file.n_bytes, file.digest) for of_rank in written for file in of_rank)
        only_strategy = _own(task.options).only_save_strategy
        if planned.strategy is not None:
            planned.strategy.write(task.file_mode, task.folder_mode, durable=task.durable)
            if only_strategy:
                path = planned.strategy.folder
                rows = [(name, n_bytes, "") for name, n_bytes in planned.strategy.files()]
        digest = hashlib.blake2b(json.dumps(rows).encode(), digest_size=16).hexdigest()
        may_be = is_any_of(task.options.verify.may_be_infinite, "may_be_infinite")
        found = (one for of_rank in written for file in of_rank for one in file.not_finite)
        not_finite = health.joined(found, may_be)
        # Without a monitor only unhealthy saves are recorded: the file lies outside of the root.
        ckpt_status = planned.own.common.ckpt_status
        reason = f"the save is recorded as unhealthy: {health.reason_of(not_finite)}"
        published = Published(
            path=str(path),
            n_bytes=sum(n_bytes for _, n_bytes, _ in rows),
            n_files=len(rows),
            durable=durable,
            digest=digest,
            warnings=(reason,) if not_finite else (),
            suffix=None if only_strategy else planned.orders.naming.file(0).suffix,
            generation=self.claim.generation,
            attempt_id=None if only_strategy else digest,
            ckpt_status=health.status_of(ckpt_status, not_finite) or ckpt_status,
        )
        return Checkpoint1Publication(published, self)


@dataclass(frozen=True)
class Checkpoint1Publication(Publication):
    """On rank 0: a save whose files are on the disk.

    Attributes:
        begun: what it was before.
    """

    begun: Checkpoint1Begun

    def confirmed(self) -> None:
        """Record what was read back."""
        planned, naming = self.begun.planned, self.begun.planned.orders.naming
        session = session_of(planned.task.root)
        if self.begun.message.reads_back:
            session.of(_Runs).read_back[naming.prefix, naming.run].add((naming.epoch, naming.step))
        session.resumed = None


@dataclass(frozen=True)
class Checkpoint1Prepared(Prepared[_BegunMessage, _Weights]):
    """The files of one rank.

    Attributes:
        own: what the rank holds.
        side: its files.
        strategy: what it writes of how tensors are partitioned, into a root that rank 0 does not see; None: nothing.
    """

    own: RankInput
    side: RankSide
    strategy: Strategies | None

    def write(self, begun: _BegunMessage, state: State, progress: _core.Progress | None) -> Checkpoint1Written:
        """Write everything but `meta.json`."""
        weights = self.side.write(state, self.strategy, reads_back=begun.reads_back, progress=progress)
        return Checkpoint1Written(weights, self, begun)

    def withdraw(self) -> None:
        """Remove this rank's files."""
        self.side.withdraw()


@dataclass(frozen=True)
class Checkpoint1Written(Written[_Weights]):
    """The files of one rank are on the disk.

    Attributes:
        prepared: what they were before.
        begun: what rank 0 knows of older saves.
    """

    prepared: Checkpoint1Prepared
    begun: _BegunMessage

    def confirm(self, published: Published) -> tuple[str, ...]:
        """Write `meta.json`; rank 0 records the health first, before anybody can resume from the save."""
        side, warning, status = self.prepared.side, None, published.ckpt_status
        if side.rank == 0 and status is not None:
            task = side.task
            filesystem.announce(f"write {checkpoint1_health.HEALTH_FILE}")
            warning = checkpoint1_health.note(task.root, side.file.name, status, task.file_mode, durable=task.durable)
        side.confirm()
        return () if warning is None else (warning,)

    def remove_older(self, published: Published) -> list[str]:
        """Remove this rank's files of saves that are no longer kept; the last healthy one stays."""
        stays = self.begun.last_healthy if published.ckpt_status == 1 else None
        outdated = [one for one in self.begun.outdated if one != stays]
        warnings = self.prepared.side.remove(outdated)
        for epoch, step in outdated:
            # These saves have a name and no iteration.
            self.prepared.own.observers.first(
                "pruned", None, name=f"{epoch}_{step}", reason="older than the newest `keep` saves"
            )
        return warnings


def _shapes(plan: IterationPlan, facts: list[RankFacts]) -> Shapes:
    """The global shape of each tensor, and whether it is the optimizer's; without counters."""
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
    counter_tensors.check_names({key: shape for key, (shape, _) in shapes.items() if key in counter_tensors.NAMES})
    return {key: one for key, one in shapes.items() if key not in counter_tensors.NAMES}


def _check_whole(plan: IterationPlan, *, only_strategy: bool, has_layout: bool) -> None:
    """Without a strategy every array must be whole."""
    if only_strategy:
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
