"""What `reshard.save` does in Checkpoint 2.0: an iteration folder is staged, sealed by its manifest and published.

Rank 0 plans the files from the facts of all ranks and makes a staging folder, into which each rank writes its files. A
long metadata.json is written meanwhile, a short one afterwards. Each rank reports the checksums of what it wrote. Then
rank 0 writes common.json and the manifest, and publishes the folder (`storage.protocol`).
"""

from __future__ import annotations

import os
import socket
import sys
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from reshard import _core
from reshard.commit import filesystem, protocol, writer_mark
from reshard.commit.manifest import ManifestCache
from reshard.commit.session import find_session
from reshard.errors import ArgumentError, CheckpointNotFoundError, ReshardError, StorageError
from reshard.formats import health
from reshard.formats import state as state_files
from reshard.formats.checkpoint2 import names as checkpoint2
from reshard.formats.checkpoint2.iteration import NOT_EXPRESSED, Descriptions, Kept, check_copies
from reshard.formats.checkpoint2.planning import plan_iteration, planned_bytes
from reshard.formats.checkpoint2.traits import CHECKPOINT2
from reshard.formats.replicas import is_any_of
from reshard.ranks.messages import recurring
from reshard.storage import mounts
from reshard.storage.location import locate
from reshard.storage.objects import ObjectStore
from reshard.storage.store import Entry
from reshard.values.words import show
from reshard.write.arrays import local_arrays
from reshard.write.contents import FileContent, FileTable, JointProgress
from reshard.write.phases import Begun, Draft, Messages, Planned, Prepared, Publication, Published, Written
from reshard.write.rank_facts import LastMade, RankFacts, check_options, check_state, layout_key, plan_key
from reshard.write.replicas import Replicas
from reshard.write.shard_files import WrittenFile, read_back

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import numpy as np

    from reshard.commit.attempts import Attempt
    from reshard.commit.manifest import Manifest
    from reshard.commit.session import PassedOver
    from reshard.formats.checkpoint2.iteration import IterationPlan
    from reshard.options import SaveOptions
    from reshard.storage.location import Location
    from reshard.write.phases import RankInput, SaveTask
    from reshard.write.replicas import State
    from reshard.write.shard_files import ShardFile, ShardFileMaker

_METADATA = {"format": "ms", **writer_mark.MARK}
_LAST_SLEEP_S = 1.0
_SYNCED_TOGETHER_BYTES = 64 << 20  # of a rank: small files are written first and then synced at the same time
_VISIBLE_SECONDS = 60.0  # for which a network file system may not show a folder that another host made


@dataclass(frozen=True)
class _Orders:
    """The answer of rank 0: who writes what, and which ranks hold copies of what."""

    files: tuple[FileContent, ...] = field(metadata=recurring(FileTable))
    replicas: Replicas = field(metadata=recurring())


class _Plan(NamedTuple):
    """What follows from the reports: the iteration, bytes of its arrays, the orders, and what later saves use again."""

    iteration: IterationPlan
    n_bytes: int
    orders: _Orders
    kept: Kept


class _BegunMessage(NamedTuple):
    """The folder into which all ranks write, and whether they read back what they have written."""

    staging: str
    reads_back: bool


_Records: TypeAlias = dict[str, WrittenFile]
_MESSAGES = Messages(RankFacts, _Orders, _BegunMessage, dict[str, WrittenFile])
_plans = LastMade[_Plan]()


class Checkpoint2Draft(Draft[RankFacts, _Orders, _BegunMessage, _Records]):
    """What one rank has to save in Checkpoint 2.0."""

    traits = CHECKPOINT2
    messages = _MESSAGES

    @staticmethod
    def is_note(warning: str) -> bool:
        """What only MindSpore Transformers does not read is no warning for a program that does not use MindSpore."""
        return warning.startswith(NOT_EXPRESSED) and sys.modules.get("mindspore") is None

    @staticmethod
    def check_options(options: SaveOptions, model: Mapping[str, object]) -> None:  # noqa: ARG004
        """Refuse a prefix that no file name can have."""
        checkpoint2.check_prefix(options.files.prefix)

    @staticmethod
    def dump_extra(kept: Mapping[str, object], own: Collection[str]) -> tuple[str, dict[str, np.ndarray]]:  # noqa: ARG004
        """One file for each rank that has something to write."""
        return state_files.dump(kept)

    def report(self) -> RankFacts:
        """The facts of this rank."""
        return self.own.facts

    def plan(self, reports: list[RankFacts]) -> Checkpoint2Planned:
        """Check the facts of all ranks; the plan that follows from them, mostly that of the last save."""
        check_options(reports)
        check_state(reports)
        _check_shared(self.task.root, reports)
        layout, options = self.own.layout, self.task.options
        prefix, dedup, strict = options.files.prefix, options.dedup, options.files.strict_format
        check_replicas = options.verify.check_replicas

        def make() -> _Plan:
            plan = plan_iteration(reports, layout, prefix=prefix, dedup=dedup, strict=strict)
            if not dedup:
                check_copies(plan)
            replicas = Replicas.of(plan.holders if check_replicas else {}, reports)
            return _Plan(plan, planned_bytes(plan, reports), _Orders(plan.files, replicas), Kept())

        plan = _plans.get(
            [plan_key(reports), layout_key(reports, layout), [prefix, dedup, strict, check_replicas]], make
        )
        session = find_session(self.task.root)
        return Checkpoint2Planned(plan.orders, self.task, self.own, plan, None if session is None else session.resumed)

    def prepare(self, orders: _Orders, make: ShardFileMaker) -> Checkpoint2Prepared:
        """Make this rank's shard files."""
        own = self.own
        files = [
            make(file.name, own.arrays.only(file.arrays), _METADATA) for file in orders.files if file.rank == own.rank
        ]
        return Checkpoint2Prepared(self.task, own.rank, tuple(files), leaves_unsynced=own.rank == 0)


@dataclass(frozen=True)
class Checkpoint2Planned(Planned[_Orders, _BegunMessage, _Records]):
    """On rank 0: the plan of the iteration.

    Attributes:
        task: the save.
        own: what rank 0 holds: its counters and its line of the log are saved.
        plan: what the ranks write.
        resumed: the rollback from which this process goes on; None: it goes on from the newest iteration.
    """

    task: SaveTask
    own: RankInput
    plan: _Plan
    resumed: PassedOver | None

    def begin(self) -> Checkpoint2Begun:
        """Claim the root and make the staging folder."""
        task, options = self.task, self.task.options
        attempt = protocol.begin(
            task.root,
            task.iteration,
            planned_bytes=self.plan.n_bytes,
            durable=task.durable,
            rollback=options.commit.rollback or self.resumed is not None,
            takeover=options.commit.takeover,
            folder_mode=task.folder_mode,
        )
        cache = ManifestCache()
        try:
            reads_back = options.verify.after_save
            if options.retention is not None and not reads_back:
                from reshard.commit import retention  # noqa: PLC0415  slow to import, and many saves have none

                with task.root.store.remembering():
                    reads_back = retention.must_read_back(
                        task.root, task.iteration, options.retention.keep, entries=attempt.entries, cache=cache
                    )
            plan = self.plan
            descriptions = Descriptions(plan.iteration, attempt.staging, mode=task.file_mode, kept=plan.kept)
            begun = Checkpoint2Begun(
                _BegunMessage(str(attempt.staging), reads_back), self, attempt, descriptions, cache
            )
        except BaseException:
            protocol.abandon(attempt)
            raise
        try:
            descriptions.start()
        except BaseException:
            begun.withdraw()
            raise
        return begun


@dataclass(frozen=True)
class Checkpoint2Begun(Begun[_BegunMessage, _Records]):
    """On rank 0: an iteration that is staged.

    Attributes:
        planned: what the ranks write.
        attempt: the claim and the staging folder.
        descriptions: the files that describe the iteration, which may be in the making.
        cache: manifests that were read.
    """

    planned: Checkpoint2Planned
    attempt: Attempt
    descriptions: Descriptions
    cache: ManifestCache

    def with_plan(self, planned: Checkpoint2Planned) -> Checkpoint2Begun:
        """The same save with another plan: of the same files, with other arrays."""
        self.descriptions.stop()
        plan, mode = planned.plan, planned.task.file_mode
        descriptions = Descriptions(plan.iteration, self.attempt.staging, mode=mode, kept=plan.kept)
        return replace(self, planned=planned, descriptions=descriptions)

    def publish(
        self,
        own: Written[_Records],
        written: list[_Records],
        *,
        durable: bool,
        log: Callable[[Published], list[Location]],
    ) -> Checkpoint2Publication:
        """Describe, seal and publish what the ranks have written."""
        task, plan, attempt = self.planned.task, self.planned.plan.iteration, self.attempt
        staging, rank0, resumed = attempt.staging, self.planned.own, self.planned.resumed
        records = {name: (file, rank) for rank, of_rank in enumerate(written) for name, file in of_rank.items()}
        planned = {file.name: file.rank for file in plan.files}
        shards = {name: rank for name, (_, rank) in records.items() if name != state_files.arrays_file_name(rank)}
        if shards != planned:
            raise ReshardError(f"the ranks wrote {sorted(records)}, planned were {sorted(planned)}")
        described = self.descriptions.result()
        may_be = is_any_of(task.options.verify.may_be_infinite, "may_be_infinite")
        found = (one for file, _ in records.values() for one in file.not_finite)
        not_finite = health.joined(found, may_be)
        status = health.status_of(rank0.common.ckpt_status, not_finite)
        # Without a monitor 0 is not written: MindSpore Transformers 1.9.0 does not know the key.
        common = rank0.common if not not_finite else replace(rank0.common, ckpt_status=status)
        common.write(staging / checkpoint2.COMMON_FILE, task.file_mode, durable=False)
        own_files = [checkpoint2.COMMON_FILE, *health.write(staging, not_finite, task.file_mode)]
        warnings = list(plan.warnings)
        if not_finite:
            warnings.append(f"iteration {task.iteration} is saved as unhealthy: {health.reason_of(not_finite)}")
        manifest = protocol.seal(
            attempt,
            records,
            world_size=rank0.world_size,
            unsynced=[*own.unsynced, *described, *own_files],
            known=described,
            passed_over=() if resumed is None else resumed.newer,
            ckpt_status=status,
            metrics=rank0.metrics,
            file_mode=task.file_mode,
        )
        published = Published(
            path=str(attempt.folder),
            n_bytes=manifest.n_bytes,
            n_files=len(planned),
            durable=durable,
            digest=manifest.digest,
            warnings=tuple(warnings),
            suffix=None,
            generation=attempt.generation,
            attempt_id=attempt.id,
            ckpt_status=status,
        )
        more = protocol.publish(attempt, manifest, lambda: log(published))
        if resumed is not None:
            attempt.session.resumed = None
        published = published._replace(warnings=(*published.warnings, *more))
        return Checkpoint2Publication(published, self, manifest)

    def withdraw(self) -> None:
        """Remove the staging folder."""
        try:
            self.descriptions.stop()
        finally:
            protocol.abandon(self.attempt)


@dataclass(frozen=True)
class Checkpoint2Prepared(Prepared[_BegunMessage, _Records]):
    """The shard files of one rank.

    Attributes:
        task: the save.
        rank: this one.
        files: its shard files.
        leaves_unsynced: whether small files are left for `Begun.publish` to sync, with those that describe the save.
    """

    task: SaveTask
    rank: int
    files: tuple[ShardFile, ...]
    leaves_unsynced: bool

    def write(self, begun: _BegunMessage, state: State, progress: _core.Progress | None) -> Written[_Records]:
        """Write this rank's files into the staging folder; the record of each that has checksums."""
        if not self.files and state is None:
            return Written({})
        task, staging = self.task, locate(begun.staging)
        # Rank 0 waits longer than this, so that it receives the reason.
        _wait_for(staging, min(_VISIBLE_SECONDS, task.timeout / 2))
        records: _Records = {}

        def record(path: Location, written: _core.Written) -> None:
            if begun.reads_back:
                read_back(str(path), written, task.options.threads)
            records[path.name] = WrittenFile.of(written)

        n_bytes = sum(file.n_bytes for file in self.files)
        own = local_arrays(None if state is None else state[1], None)
        # Files that are read back must be on the disk by then.
        is_small = n_bytes + own.n_bytes <= _SYNCED_TOGETHER_BYTES and not begun.reads_back
        durable, mode = task.durable and not is_small, task.file_mode
        joint = JointProgress(progress, n_bytes)
        for file in self.files:
            path = staging / file.name
            report = joint.of_file(file.n_bytes)
            record(path, file.write(str(path), durable=durable, mode=mode, progress=report))
        if own:
            path = staging / state_files.arrays_file_name(self.rank)
            record(path, _core.write_arrays(str(path), own.tensors(), durable=durable, mode=mode))
            # Objects of the caller: the best loss so far begins as an infinity.
            records[path.name] = replace(records[path.name], not_finite=())
        names = list(records)
        if state is not None:
            path = staging / state_files.file_name(self.rank)
            path.replace(state[0], mode, durable=durable)
            names.append(path.name)
        if is_small and self.leaves_unsynced:
            return Written(records, unsynced=tuple(names))
        if is_small and task.durable:
            filesystem.sync_together([staging / name for name in names], [staging])
        return Written(records)


@dataclass(frozen=True)
class Checkpoint2Publication(Publication):
    """On rank 0: an iteration that is published.

    Attributes:
        begun: what it was before.
        manifest: of the iteration.
    """

    begun: Checkpoint2Begun
    manifest: Manifest

    def remove_older(self) -> list[str]:
        """Record that the save was verified, and apply retention."""
        planned, manifest, reads_back = self.begun.planned, self.manifest, self.begun.message.reads_back
        task, folder = planned.task, self.begun.attempt.folder
        warnings = []
        if reads_back:
            from reshard.commit import proofs  # noqa: PLC0415

            try:
                with folder.store.remembering():
                    proofs.write(folder, manifest, proofs.state_of(folder, manifest), None)
            except ReshardError as error:
                warnings.append(f"that the save was read back is not recorded: {error.message}")
        if task.options.retention is not None:
            from reshard.commit import retention  # noqa: PLC0415

            own = Entry(folder.name, "folder")
            entries = [*[one for one in self.begun.attempt.entries if one.name != own.name], own]
            try:
                self.begun.cache.add(folder, manifest)
                removed = retention.apply(
                    task.root,
                    task.options.retention,
                    original_fault=original_fault,
                    durable=task.durable,
                    verify=False,
                    verified=(manifest.digest,) if reads_back else (),
                    observers=planned.own.observers,
                    entries=entries,
                    cache=self.begun.cache,
                )
                warnings += removed.warnings
            except (ReshardError, OSError) as error:
                warnings.append(f"older iterations are not removed: {error}")
        return warnings


def _check_shared(root: Location, facts: Sequence[RankFacts]) -> None:
    hosts = {one.host for one in facts}
    if len(hosts) > 1 and not mounts.is_shared(root, os.environ.get("SHARED_PATHS")):
        raise ArgumentError(
            f"{len(hosts)} hosts save together, and {root} is not on a file system that they are known to share",
            path=str(root),
            hint="save to a network file system, or name the folder in the environment variable SHARED_PATHS",
        )


def _wait_for(staging: Location, timeout: float) -> None:
    """Wait until this host sees the folder that rank 0 made: a network file system may cache that it was not there."""
    if isinstance(staging.store, ObjectStore):
        return  # which has no folders
    deadline, sleep_s = time.monotonic() + timeout, 0.001
    while True:
        try:
            staging.opened().close()
        except CheckpointNotFoundError:
            if time.monotonic() > deadline:
                raise StorageError(
                    f"{staging}, which rank 0 made, did not appear on {socket.gethostname()} within {timeout:g} s",
                    path=str(staging),
                    hint="is the checkpoint root on a file system that all hosts share?",
                ) from None
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, _LAST_SLEEP_S)
        else:
            return


def original_fault(folder: Location) -> str | None:
    """Why an iteration without manifest is not complete, by the files that are there; their contents are not read."""
    metadata = folder / checkpoint2.METADATA_FILE
    if metadata.exists():
        index = _core.Index.from_metadata(str(metadata.local))
        paths = [locate(index.file_path(number)) for number in range(index.n_files)]
    else:
        paths = [folder / name for name in checkpoint2.list_shard_files(folder)]
    if not paths:
        return "it holds no shard files"
    missing = next((one for one in paths if not one.is_file()), None)
    if missing is not None:
        return f"there is no file {show(missing.name)}"
    index = _core.Index()
    if writer_mark.is_marked(index, index.add_file(str(paths[0].local), follow_links=False)):
        return "it holds shard files of this package, and no manifest"
    return None
