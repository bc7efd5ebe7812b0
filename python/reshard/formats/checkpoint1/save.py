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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from reshard import dtypes
from reshard.commit import claims, filesystem, protocol
from reshard.errors import ArgumentError, CheckpointNotFoundError, ReshardError, UnsupportedError
from reshard.formats import counter_tensors, health
from reshard.formats.checkpoint1 import health as checkpoint1_health
from reshard.formats.checkpoint1 import names as checkpoint1
from reshard.formats.checkpoint1 import save_plan as rank_plan
from reshard.formats.checkpoint1 import strategies
from reshard.formats.checkpoint1.names import TRAITS
from reshard.formats.checkpoint1.save_plan import FolderView, Naming, ShardAssignment
from reshard.formats.checkpoint1.save_rank import RankSide, WrittenWeights, arrays_by_kind, folder_of, look
from reshard.formats.checkpoint1.state import SAVE_KEY
from reshard.formats.checkpoint1.strategies import Shapes  # noqa: TC001  messages are decoded by their type hints
from reshard.formats.checkpoint2.common import CommonInfo  # noqa: TC001  as the one before
from reshard.formats.checkpoint2.rank_facts import (
    LastMade,
    RankFacts,
    check_options,
    check_state,
    plan_iteration,
    plan_key,
)
from reshard.formats.replicas import Replicas, is_any_of
from reshard.storage import mounts
from reshard.storage.location import Location, locate
from reshard.values.words import show
from reshard.write import pending_rollback
from reshard.write.collective_save import Published, SaveFormat

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard import _core
    from reshard.formats.checkpoint1.names import FileName
    from reshard.formats.checkpoint1.strategies import Strategies
    from reshard.formats.checkpoint2.iteration import IterationPlan
    from reshard.formats.replicas import State
    from reshard.options import SaveOptions
    from reshard.ranks.group import Group
    from reshard.write.collective_save import RankInput, SaveTask
    from reshard.write.shard_files import ShardFileMaker


@dataclass(frozen=True)
class _Report:
    """What a rank holds, what is in its folder, and whether it has state besides arrays."""

    facts: RankFacts
    view: FolderView
    has_state: bool = False


@dataclass(frozen=True)
class _Plan:
    """The answer of rank 0.

    Attributes:
        naming: what files are called.
        assignment: who keeps what.
        common: the counters of rank 0.
        strategy_by: the ranks that write the strategy: one on each host that has a root of its own.
        shapes: the shapes of the strategy; None where rank 0 alone writes it.
        replicas: which ranks hold copies of what.
        save: the id of the save, if any rank may have state; None: there are no state files.
    """

    naming: Naming
    assignment: ShardAssignment
    common: CommonInfo
    strategy_by: tuple[int, ...] = ()
    shapes: Shapes | None = None
    replicas: Replicas = field(default_factory=Replicas)
    save: str | None = None


@dataclass(frozen=True)
class _Begun:
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


@dataclass(frozen=True)
class _Checked:
    """What rank 0 knows once it has checked the reports.

    Attributes:
        facts: those of each rank.
        views: those of each rank.
        firsts: the lowest rank that sees each root: one, unless several hosts have each their own.
        assignment: who keeps what.
        shapes: global shape of each tensor.
        plan: which ranks hold what.
    """

    facts: list[RankFacts]
    views: list[FolderView]
    firsts: list[int]
    assignment: ShardAssignment
    shapes: Shapes
    plan: IterationPlan


_Planned: TypeAlias = "tuple[IterationPlan, Shapes, Strategies | None]"
_plans = LastMade[_Planned]()

_runs: dict[tuple[Location, str], int] = {}
"""The number of the run of this process, by root and prefix: a process is one run, and a restarted one the next."""

_read_back: dict[tuple[Location, str, int | None], set[tuple[int, int]]] = {}
"""Epochs and steps of the saves that this process read back, by root, prefix and number of the run."""

os.register_at_fork(after_in_child=_runs.clear)
os.register_at_fork(after_in_child=_read_back.clear)


class Checkpoint1Save(SaveFormat):
    """One rank's part of a save in Checkpoint 1.0."""

    traits = TRAITS
    report_type = _Report
    plan_type = _Plan
    begun_type = _Begun
    written_type = tuple[WrittenWeights, ...]

    def __init__(self, task: SaveTask, channel: Group, own: RankInput) -> None:
        """As `SaveFormat`."""
        super().__init__(task, channel, own)
        self._own_options = task.options.checkpoint1
        self.confirms = not self._own_options.only_save_strategy
        self._prefix = rank_plan.check_prefix(task.options.files.prefix)
        self._side: RankSide | None = None
        self._outdated: tuple[tuple[int, int], ...] = ()
        self._last_healthy_save: tuple[int, int] | None = None
        self._status: int | None = None  # on rank 0
        self._strategy: Strategies | None = None
        self._checked: _Checked | None = None  # this and what follows: on rank 0
        self._naming: Naming | None = None
        self._claim: claims.Claim | None = None
        self._reads_back = False
        self._warnings: tuple[str, ...] = ()

    @staticmethod
    def check_options(options: SaveOptions, model: Mapping[str, object]) -> None:
        """Refuse a prefix, sizes and names that cannot be, and retention of Checkpoint 2.0."""
        own, retention = options.checkpoint1, options.retention
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

    # -- 1 to 3

    def check_root(self) -> None:
        """On rank 0: refuse a root that a restart would open as another format."""
        from reshard.formats.registry import check_destination  # noqa: PLC0415  slow to import

        check_destination(locate(self.task.root), self.traits.name)

    def report(self) -> _Report:
        """The facts of this rank, and the content of its folder."""
        view = look(self.task.root, self.rank, self.world_size, self._prefix, self._position)
        return _Report(self.own.facts, view, self.own.copies.has_state)

    @property
    def _position(self) -> tuple[int, int]:
        """Epoch and step of the names."""
        own, epoch = self._own_options, self.own.common.epoch_num
        return rank_plan.position(
            self.task.iteration, sink_size=own.sink_size, steps_per_epoch=own.steps_per_epoch, epoch=epoch
        )

    def check(self, reports: list[_Report]) -> _Checked:
        """Check what the ranks reported, and plan who keeps what."""
        root, layout = self.task.root, self.own.layout
        facts, views = [one.facts for one in reports], [one.view for one in reports]
        check_options(facts)
        check_state(facts)
        firsts = self._first_of_each_root(facts)
        rank_plan.check_world(views, os.fspath(root), is_shared=len(firsts) == 1)
        key = [plan_key(facts), str(layout), os.fspath(root)]
        plan, shapes, self._strategy = _plans.get(key, lambda: self._plan(facts))
        assignment = ShardAssignment()
        if self._strategy is None:
            _check_whole(plan, only_strategy=self._own_options.only_save_strategy, has_layout=layout is not None)
        else:
            self._strategy.check_same(is_used=any(view.has_meta for view in views))
            if self.task.options.dedup:
                holders = {name: plan.holders[name] for name in self._strategy.strategy.keys()}  # noqa: SIM118
                n_devices = self._strategy.devices_per_stage
                assignment = rank_plan.assign(holders, [rank // n_devices for rank in range(len(facts))])
        return _Checked(facts, views, firsts, assignment, shapes, plan)

    def plan(self, reports: list[_Report]) -> _Plan:
        """Check, and tell every rank what it keeps under which name."""
        checked = self._checked = self.check(reports)
        if self._own_options.only_save_strategy:
            self._naming = Naming(self._prefix, None, 0, 0)
            replicas = Replicas()
        else:
            number = rank_plan.run_number(checked.views, _runs.get(self._run_key))
            self._naming = Naming(self._prefix, number or None, *self._position)
            replicas = Replicas.of(
                checked.plan.holders if self.task.options.verify.check_replicas else {}, checked.facts
            )
        has_state = any(one.has_state for one in reports) or any(may_differ for *_, may_differ in replicas.rows)
        return _Plan(
            self._naming,
            checked.assignment,
            self.own.common,
            tuple(checked.firsts) if self._strategy is not None else (),
            checked.shapes if len(checked.firsts) > 1 else None,
            replicas,
            os.urandom(16).hex() if has_state else None,
        )

    @property
    def _run_key(self) -> tuple[Location, str]:
        return locate(self.task.root).resolved(), self._prefix

    def _plan(self, facts: list[RankFacts]) -> _Planned:
        layout = self.own.layout
        plan = plan_iteration(facts, layout, prefix=None, dedup=False, strict=False)
        shapes = _shapes(plan, facts)
        if layout is None or len(facts) == 1:
            return plan, shapes, None
        return plan, shapes, strategies.make(layout, shapes, self.task.root)

    def _first_of_each_root(self, facts: list[RankFacts]) -> list[int]:
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

    def prepare(self, plan: _Plan, make: ShardFileMaker) -> None:
        """Make this rank's files ready, and the strategy, if this rank writes it."""
        layout = self.own.layout
        counters = [name for name in counter_tensors.NAMES if name in self.own.arrays]
        self._side = RankSide(self.task, self.rank, plan.naming, counters, plan.save)
        if self.rank not in plan.strategy_by:
            self._strategy = None
        elif self.rank != 0 and layout is not None and plan.shapes is not None:  # on a host of its own
            self._strategy = strategies.make(layout, plan.shapes, self.task.root)
        if self._own_options.only_save_strategy:
            return
        metadata = {"format": "ms", "remove_redundancy": str(self.task.options.dedup and self.world_size > 1)}
        by_kind = arrays_by_kind(
            self.own.arrays,
            plan.common,
            plan.naming,
            plan.assignment.left_out(self.rank),
            network=self._own_options.save_network_params,
            trainable=self._own_options.trained_names,
        )
        of_kind = {"full": metadata | ({} if plan.save is None else {SAVE_KEY: plan.save})}
        self._side.files.update(
            (kind, make(plan.naming.file(self.rank, kind).name, arrays, of_kind.get(kind, metadata)))
            for kind, arrays in by_kind.items()
        )

    # -- 4

    def begin(self) -> _Begun:
        """Claim the root, if there is space for what this host writes into it."""
        task, options = self.task, self.task.options
        assert self._checked is not None
        assert self._naming is not None
        self._claim = protocol.claim_root(
            task.root, takeover=options.commit.takeover, durable=task.durable, folder_mode=task.folder_mode
        )
        protocol.check_space(task.root, self._n_bytes(self._checked), durable=task.durable)
        if self._own_options.only_save_strategy:
            return _Begun(options.verify.after_save, ())
        naming = self._naming
        _runs[self._run_key] = naming.run or 0
        files: list[FileName] = []
        with contextlib.suppress(CheckpointNotFoundError):
            files = checkpoint1.list_files(folder_of(task.root, 0))
        outdated = rank_plan.outdated(files, naming, None if options.retention is None else options.retention.keep)
        there = {(file.epoch, file.step) for file in files if (file.prefix, file.run) == (naming.prefix, naming.run)}
        known = _read_back[self._read_back_key] = _read_back.get(self._read_back_key, set()) & there
        self._reads_back = options.verify.after_save or (bool(outdated) and not known - set(outdated))
        return _Begun(self._reads_back, tuple(outdated), self._last_healthy(files))

    def _last_healthy(self, files: Sequence[FileName]) -> tuple[int, int] | None:
        """The newest save of this run, before this one, that is not recorded as unhealthy."""
        assert self._naming is not None
        statuses: dict[str, int] = {}
        with contextlib.suppress(ReshardError):  # there is no record, or it cannot be read, which `confirm` reports
            statuses = checkpoint1_health.read(self.task.root)
        naming = self._naming
        found = {
            (file.epoch, file.step)
            for file in files
            if file.kind == "full" and (file.prefix, file.run) == (naming.prefix, naming.run)
            if statuses.get(file.name) != 1
        }
        return max(found - {(naming.epoch, naming.step)}, default=None)

    @property
    def _read_back_key(self) -> tuple[Location, str, int | None]:
        assert self._naming is not None
        return locate(self.task.root).resolved(), self._naming.prefix, self._naming.run

    def _n_bytes(self, checked: _Checked) -> int:
        """What is written into the root of this host."""
        own, facts, n_bytes = self._own_options, checked.facts, 0
        for rank, one in enumerate(facts):
            if not own.only_save_strategy and (len(checked.firsts) == 1 or one.host == facts[0].host):
                left_out = checked.assignment.left_out(rank)
                written = [fact for fact in one.arrays if fact.name not in left_out]
                sizes = {fact.name: dtypes.n_bytes(fact.dtype, fact.shape) for fact in written}
                n_bytes += sum(sizes.values())
                weights = sum(sizes[fact.name] for fact in written if fact.part == "model")
                n_bytes += weights * (own.save_network_params + (own.trained_names is not None))
        return n_bytes

    # -- 5

    def write(self, begun: _Begun, state: State, progress: _core.Progress | None) -> tuple[WrittenWeights, ...]:
        """Write everything but `meta.json`."""
        assert self._side is not None
        self._outdated, self._last_healthy_save = begun.outdated, begun.last_healthy
        return self._side.write(state, self._strategy, reads_back=begun.reads_back, progress=progress)

    def publish(self, written: list[tuple[WrittenWeights, ...]], *, durable: bool) -> Published:
        """All files are on the disk, and a restart does not find them yet."""
        assert self._claim is not None
        assert self._naming is not None
        claims.check(self._claim)
        path = self.task.root
        rows = sorted((file.name, file.n_bytes, file.digest) for of_rank in written for file in of_rank)
        only_strategy = self._own_options.only_save_strategy
        if only_strategy:
            assert self._strategy is not None
            path = self._strategy.folder
            rows = [(name, n_bytes, "") for name, n_bytes in self._strategy.files()]
        digest = hashlib.blake2b(json.dumps(rows).encode(), digest_size=16).hexdigest()
        may_be = is_any_of(self.task.options.verify.may_be_infinite, "may_be_infinite")
        found = (one for of_rank in written for file in of_rank for one in file.not_finite)
        not_finite = health.joined((name, kind) for name, kind in found if kind == "nan" or not may_be(name))
        # Without a monitor only unhealthy saves are recorded: the file lies outside of the root.
        self._status = health.status_of(self.own.common.ckpt_status, not_finite) or self.own.common.ckpt_status
        reason = f"the save is recorded as unhealthy: {health.reason_of(not_finite)}"
        return Published(
            path=str(path),
            n_bytes=sum(n_bytes for _, n_bytes, _ in rows),
            n_files=len(rows),
            durable=durable,
            digest=digest,
            warnings=(reason,) if not_finite else (),
            suffix=None if only_strategy else self._naming.file(0).suffix,
            generation=self._claim.generation,
            attempt_id=None if only_strategy else digest,
            ckpt_status=self._status,
        )

    def withdraw(self, *, is_known: bool) -> None:
        """Remove this rank's files, if no rank goes on."""
        if self._side is not None and is_known:
            self._side.withdraw()

    # -- 6

    def confirm(self) -> None:
        """Write `meta.json`; rank 0 records the health first, before anybody can resume from the save."""
        assert self._side is not None
        warning, status = None, self._status
        if self.rank == 0 and status is not None:
            task = self.task
            filesystem.announce(f"write {checkpoint1_health.HEALTH_FILE}")
            warning = checkpoint1_health.note(
                task.root, self._side.file.name, status, task.file_mode, durable=task.durable
            )
        self._warnings = () if warning is None else (warning,)
        self._side.confirm()

    def confirmed(self) -> tuple[str, ...]:
        """Record on rank 0 what was read back."""
        if self._reads_back:
            assert self._naming is not None
            _read_back[self._read_back_key].add((self._naming.epoch, self._naming.step))
        pending_rollback.forget(self.task.root)
        return self._warnings

    # -- 7

    def remove_older(self, published: Published) -> list[str]:
        """Remove this rank's files of saves that are no longer kept; the last healthy one stays."""
        assert self._side is not None
        stays = self._last_healthy_save if published.ckpt_status == 1 else None
        outdated = [one for one in self._outdated if one != stays]
        warnings = self._side.remove(outdated)
        for epoch, step in outdated:
            # These saves have a name and no iteration.
            self.own.observers.first(
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
