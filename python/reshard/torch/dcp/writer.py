"""`Writer`: `dcp.save` into Checkpoint 2.0.

DCP carries the messages between the ranks; the files, their checksums and the commit are those of `reshard.save`:

    prepare_local_plan    every rank adds the facts of its items to its plan
    prepare_global_plan   the coordinator compares them, plans the files, claims the root and makes the staging folder
    write_data            every rank writes its files, and computes checksums of the items that other ranks hold, too
    finish                the coordinator compares the checksums of copies, seals the iteration and publishes it

A plan does not say that a tensor is made of others, such as a quantised weight. That is seen when it is written: then
its inner tensors take its place in the file of the rank, and the coordinator plans again with what the ranks report.
"""

from __future__ import annotations

import functools
import logging
import re
import socket
import threading
import time
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from reshard import _core
from reshard.commit import claims, protocol, roots
from reshard.documents.common_info import CommonInfo
from reshard.errors import ArgumentError, MismatchError, ReshardError, UnsupportedError
from reshard.formats import state
from reshard.formats.checkpoint2.save import Checkpoint2Draft, Checkpoint2Prepared
from reshard.formats.replicas import Copies, is_any_of
from reshard.formats.run_state import is_optimizer
from reshard.formats.state_loader import TorchSaved
from reshard.options import SaveOptions
from reshard.storage.host import boot_id
from reshard.storage.location import locate, locate_root
from reshard.torch.dcp import items
from reshard.torch.dcp.items import Inner, LocalFacts
from reshard.torch.tensors import inner_tensors
from reshard.values.arguments import check
from reshard.values.events import Observers, OnEvent
from reshard.values.words import listed, show
from reshard.write.arrays import Facts, Shard, local_arrays
from reshard.write.collective_save import log_once, save_failed
from reshard.write.phases import RankInput, SaveTask
from reshard.write.rank_facts import RankFacts
from reshard.write.shard_files import shard_file

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

    from reshard.formats.checkpoint2.save import Checkpoint2Begun, Checkpoint2Planned
    from reshard.options import CommitLike, RetentionLike, VerifyLike
    from reshard.storage.location import Location
    from reshard.torch.dcp.items import InnerFacts, ItemKey
    from reshard.write.replicas import Replicas
    from reshard.write.shard_files import WrittenFile

STATE_NAME = "torch.distributed.checkpoint"
"""The name in the state of an iteration under which the planner's own data is kept."""

_LAST_NUMBER = re.compile(r"([0-9]{1,18})(?:\.[A-Za-z]+)?")
_log = logging.getLogger("reshard")


@dataclass(frozen=True)
class _Orders:
    """What the coordinator adds to the plan of a rank.

    Attributes:
        plan: the files of this rank.
        begun: the message of the coordinator: the staging folder.
        numbers: the rank, and those under which it saves further parts of a tensor.
        n_numbers: how many of these numbers all ranks have.
        n_ranks: how many ranks save.
        compared: the items that other ranks hold, too.
    """

    plan: Any
    begun: Any
    numbers: list[int]
    n_numbers: int
    n_ranks: int
    compared: list[ItemKey]


@dataclass(frozen=True)
class _Written:
    """What a rank reports.

    Attributes:
        staging: the folder that it has written into.
        records: its files, by number of the rank.
        objects: its values that are no tensors, as the bytes of `torch.save`.
        sums: checksums of the items that other ranks hold, too, by name.
        inner: the tensors that are made of others, by number of the rank.
    """

    staging: str
    records: dict[int, dict[str, WrittenFile]]
    objects: dict[str, bytes]
    sums: dict[str, int]
    inner: dict[int, dict[str, InnerFacts]]


@dataclass(frozen=True)
class _Begun:
    """The save that the coordinator has begun.

    Attributes:
        draft: makes the plan, and the plan anew.
        save: what is staged.
        replicas: the copies that are compared.
        n_numbers: how many numbers of ranks all ranks have.
        reports: what the ranks hold, by number.
    """

    draft: Checkpoint2Draft
    save: Checkpoint2Begun
    replicas: Replicas
    n_numbers: int
    reports: list[RankFacts]


@dataclass
class _Running:
    """What is to be ended of a save, if anything is."""

    n_ranks: int = 0
    begun: _Begun | None = None
    claimed: Location | None = None  # a root that was claimed for this save

    def end(self) -> None:
        """Withdraw what was not published, and release the root."""
        begun, self.begun, self.n_ranks = self.begun, None, 0
        if begun is not None:
            begun.save.withdraw()
        if self.claimed is not None:
            protocol.release(self.claimed)
            self.claimed = None


class Writer(StorageWriter):
    """Saves what `torch.distributed.checkpoint` plans as a Checkpoint 2.0, for `dcp.save` and `dcp.async_save`.

    The checkpoint appears when all ranks have written their files, in one step; if a rank fails, the path is as it was
    before. All files have checksums. Copies of a value on several ranks are compared: DCP keeps one of them.

    Args:
        path: the checkpoint, also in a bucket; `dcp.save(..., checkpoint_id=...)` replaces it, so that one writer
            serves many saves. If its name is `iteration_<N>`, it is that iteration of the root above it, whose tracker
            then names it. Any other path is a root of its own; its iteration is the number at the end of the name, or
            0, and is replaced by the next save to the same path.
        keep: keep the newest `keep` complete iterations of the root; short for `retention`.
        retention: which iterations are kept, as in `reshard.save`.
        verify: what is compared, as in `reshard.save`; of values in `may_differ` one rank's is saved.
        commit: how the save is published, as in `reshard.save`.
        threads: threads of the copies.
        on_event: a function, or a list of functions, called with each `Event` of the saves on this rank, such as
            `EventLog(root)`; see docs/watching.md.

    Raises:
        ArgumentError: an option has a value that is not accepted.

    Example:
        >>> import torch, torch.distributed.checkpoint as dcp, reshard
        >>> state = {"model": {"w": torch.ones(2, 3)}, "step": 7}
        >>> _ = dcp.save(state, storage_writer=Writer("run/step-7"))
        >>> with reshard.open("run/step-7") as checkpoint:
        ...     checkpoint.iteration, checkpoint.keys(), checkpoint.extra()["step"]
        (7, ['model.w'], 7)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep: int | None = None,
        retention: RetentionLike | None = None,
        verify: VerifyLike | None = None,
        commit: CommitLike | None = None,
        threads: int | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        check(Writer.__init__, on_event=on_event)
        self._on_event = on_event
        self.options = SaveOptions.of(
            keep=keep,
            retention=retention,
            verify=verify,
            commit=commit,
            files=None,
            format="checkpoint2",
            threads=threads,
        )
        self._start(path)

    def __getstate__(self) -> dict[str, Any]:
        """For `AsyncCheckpointerType.PROCESS`, which saves in another process."""
        return {"path": self.path, "options": self.options, "on_event": self._on_event}

    def __setstate__(self, content: dict[str, Any]) -> None:
        """As `__getstate__`."""
        self.options, self._on_event = content["options"], content["on_event"]
        self._start(content["path"])

    def _start(self, path: str | os.PathLike[str]) -> None:
        # The program may change its working folder while a save runs, or before the next one.
        self.path = str(locate_root(path).absolute())
        self._items: dict[ItemKey, WriteItem] = {}
        self._started = time.monotonic()
        self._running = _Running()
        # A save ends without `finish` if another rank has failed: then the next one withdraws it, or the end of this.
        weakref.finalize(self, self._running.end)

    @property
    def checkpoint_id(self) -> str:
        """The path of the checkpoint."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path of the local file system, or the URL of a folder in a bucket."""
        try:
            locate_root(checkpoint_id)
        except ReshardError:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another checkpoint, at this path if one is given."""
        self._running.end()
        if checkpoint_id is not None:
            self.path = str(locate_root(checkpoint_id).absolute())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002, FBT001
        """Begin a save. Raises UnsupportedError for `use_collectives=False`."""
        if not kwargs.get("use_collectives", True):
            raise UnsupportedError(
                "with `use_collectives=False` each rank publishes alone, and a checkpoint is complete or absent",
                hint="leave it out",
            )
        self._running.end()
        self._started = time.monotonic()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Add the facts of this rank's items.

        Raises:
            UnsupportedError: a tensor has a dtype that cannot be stored, or the planner caches plans.
        """
        if not plan.usable:
            raise _caching()
        self._items = {items.key_of(item): item for item in plan.items}
        agreed = {"path": self.path, "durable": self.options.commit.durable}
        return replace(plan, storage_data=items.local_facts(plan, f"{socket.gethostname()} {boot_id()}", agreed))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: compare the ranks, plan the files, and make the staging folder.

        Raises:
            MismatchError, CoverageError, ArgumentError: what the ranks hold does not make up whole tensors.
            ClaimedError, StorageError: as `reshard.save`.
        """
        ranks: list[LocalFacts] = []
        for plan in plans:
            if not isinstance(plan.storage_data, LocalFacts):
                raise _caching()
            ranks.append(plan.storage_data)
        items.check_ranks(ranks, plans)
        reports, numbers = items.rank_facts(ranks, plans)
        reports = [replace(one, options=dict(ranks[0].options)) for one in reports]
        for rank, facts in enumerate(ranks):
            reports[rank] = replace(reports[rank], options=dict(facts.options))
        checked = self.options.verify.check_replicas
        may_differ = is_any_of(self.options.verify.may_differ)
        copies, compared = items.replicas(ranks if checked else [replace(one, items=()) for one in ranks], may_differ)
        draft = self._draft(0, len(reports), {})
        planned = _planned(draft, reports)
        orders, running = planned.orders, self._running
        root = draft.task.root
        if not (root.exists() and claims.held(root) is not None):
            running.claimed = root
        running.n_ranks = len(plans)
        try:
            save = planned.begin()
        except BaseException as error:
            running.end()
            self._failed(0, error)
            raise
        running.begun = _Begun(draft, save, copies, len(reports), reports)
        return [
            replace(
                plan,
                storage_data=_Orders(
                    replace(orders, files=tuple(one for one in orders.files if one.rank in numbers[rank])),
                    save.message,
                    numbers[rank],
                    len(reports),
                    len(plans),
                    compared[rank],
                ),
            )
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items.

        Raises:
            MismatchError: the planner gives another dtype or shape than it planned.
            StorageError: a write failed.
        """
        try:
            written, n_bytes = self._write(plan, planner)
        except BaseException as error:
            if self._running.n_ranks == 1:  # else other ranks may be writing
                self._running.end()
            self._failed(plan.storage_data.numbers[0] if isinstance(plan.storage_data, _Orders) else 0, error)
            raise
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(MetadataIndex(STATE_NAME), n_bytes, written)])
        return done

    def _write(self, plan: SavePlan, planner: SavePlanner) -> tuple[_Written, int]:
        """Write this rank's items. Returns what is reported of them, and the bytes of the files."""
        orders = plan.storage_data
        if not isinstance(orders, _Orders):
            raise _caching()
        objects: dict[str, bytes] = {}
        tensors: dict[ItemKey, Inner] = {}
        parts: list[dict[str, Shard]] = [{} for _ in orders.numbers]
        inner: dict[int, dict[str, InnerFacts]] = {}
        made_of: dict[str, Shard] = {}  # the tensors inside others
        for item in plan.items:
            key, value = items.key_of(item), planner.resolve_data(item)
            if key[1] is None:
                objects[key[0]] = _bytes_of(value, key[0])
                continue
            tensors[key] = one = _checked(value, item)
            assert item.tensor_data is not None
            if one.text:
                made_of |= {f"{key[0]}.{name}": _whole(tensor) for name, tensor in one.tensors.items()}
                inner.setdefault(orders.numbers[0], {})[key[0]] = items.inner_facts(key[0], one, item.tensor_data)
                continue
            of_name = next(of_number for of_number in parts if key[0] not in of_number)
            of_name[key[0]] = Shard(one.tensors[""], tuple(item.tensor_data.size), key[1])
        for name in made_of.keys() & parts[0].keys():
            raise ArgumentError(f"two tensors are named {show(name)}", key=name)
        parts[0] |= made_of
        observers, iteration = Observers.of(self._on_event, orders.numbers[0]), _place(self.path)[1]
        n_own = sum(part.numel() * part.element_size() for one in tensors.values() for part in one.tensors.values())
        observers("begun", iteration, n_bytes=n_own, n_ranks=orders.n_ranks, blocking=_is_main_thread())
        begin = time.monotonic()
        records: dict[int, dict[str, WrittenFile]] = {}
        for number, given in zip(orders.numbers, parts, strict=True):
            draft = self._draft(number, orders.n_numbers, given)
            orders_of_rank = replace(orders.plan, files=items.with_inner(orders.plan.files, inner.get(number, {})))
            make = functools.partial(shard_file, threads=self.options.threads, blocking=True)
            # The coordinator, which publishes, may be another process.
            prepared = replace(draft.prepare(orders_of_rank, make), leaves_unsynced=False)
            progress = observers.progress(iteration, None) if observers.functions else None
            records[number] = prepared.write(orders.begun, None, progress).message
        n_written = sum(one.n_bytes for of_number in records.values() for one in of_number.values())
        observers("written", iteration, n_bytes=n_written, seconds=time.monotonic() - begin)
        sums = [self._sum(key, tensors, objects, planner) for key in orders.compared]
        by_name = items.sums_by_name(orders.compared, sums)
        written = _Written(orders.begun.staging, records, objects, by_name, inner)
        return written, n_written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: publish the iteration.

        Raises:
            MismatchError: copies of a value differ between ranks.
            ReshardError: as `reshard.save`. Nothing is published.
        """
        try:
            warnings = self._publish(metadata, [one.storage_data for of_rank in results for one in of_rank])
        except BaseException as error:
            self._failed(0, error)
            raise
        finally:
            self._running.end()
        for warning in warnings:
            log_once(warning, is_note=Checkpoint2Draft.is_note(warning))

    def _publish(self, metadata: Metadata, written: Sequence[_Written]) -> list[str]:
        """Publish what the ranks have written. Returns warnings."""
        begun = self._running.begun
        if begun is None or any(one.staging != begun.save.message.staging for one in written):
            raise ArgumentError(
                f"another save with this writer began before the one to {show(self.path)} had ended",
                hint="wait for the future of `async_save` before the next save",
            )
        self._compare(begun.replicas, written)
        records: list[dict[str, WrittenFile]] = [{} for _ in range(begun.n_numbers)]
        for one in written:
            for number, of_number in one.records.items():
                records[number] |= of_number
        objects = {name: TorchSaved(data) for one in written for name, data in one.objects.items()}
        if STATE_NAME in objects:
            raise ArgumentError(f"{STATE_NAME} is a name that is taken", key=STATE_NAME)
        inner = {number: of_number for one in written for number, of_number in one.inner.items()}
        save = begun.save
        if inner:
            save = save.with_plan(_planned(begun.draft, items.reports_with_inner(begun.reports, inner)))
            self._running.begun = replace(begun, save=save)
        own: dict[str, Any] = {"paths": {name: tuple(path) for name, path in (metadata.planner_data or {}).items()}}
        if inner:
            own["inner"] = {name: facts.to_value() for of_number in inner.values() for name, facts in of_number.items()}
        kept = state.dump({STATE_NAME: own, **objects})
        written_state = Checkpoint2Prepared(begun.draft.task, 0, (), leaves_unsynced=True).write(
            save.message, kept, None
        )
        records[0] |= written_state.message
        publication = save.publish(written_state, records, durable=self.options.commit.durable, log=lambda _: [])
        self._running.begun = None
        published = publication.published
        seconds = time.monotonic() - self._started
        Observers.of(self._on_event)(
            "published",
            begun.draft.task.iteration,
            n_bytes=published.n_bytes,
            n_files=published.n_files,
            seconds=seconds,
            stall_seconds=seconds if _is_main_thread() else None,
            durable=published.durable,
            path=published.path,
        )
        return [*published.warnings, *publication.remove_older()]

    def _failed(self, rank: int, error: BaseException) -> None:
        save_failed(Observers.of(self._on_event, rank), _place(self.path)[1], error, self._started)

    def _draft(self, rank: int, n_ranks: int, arrays: Mapping[str, Shard]) -> Checkpoint2Draft:
        """What a rank saves."""
        root, iteration = _place(self.path)
        task = SaveTask(root, iteration, 600.0, self.options)
        own = local_arrays(
            {name: one for name, one in arrays.items() if not is_optimizer(name)},
            {name: one for name, one in arrays.items() if is_optimizer(name)},
        )
        common = CommonInfo(step_num=iteration, global_step=iteration)
        observers = Observers.of(self._on_event, rank)
        facts = RankFacts("", {}, Facts())
        return Checkpoint2Draft(task, RankInput(rank, n_ranks, own, facts, None, common, {}, Copies(own), observers))

    def _sum(
        self,
        key: ItemKey,
        tensors: Mapping[ItemKey, Inner],
        objects: Mapping[str, bytes],
        planner: SavePlanner,
    ) -> int:
        """The checksum of an item of this rank, which this rank or another one writes."""
        if key[1] is None:
            return _object_sum(objects.get(key[0]) or _bytes_of(planner.resolve_data(self._items[key]), key[0]))
        tensor = tensors.get(key)
        if tensor is None:
            tensor = _checked(planner.resolve_data(self._items[key]), self._items[key])
        parts = local_arrays(tensor.tensors if tensor.text else {"w": tensor.tensors[""]}, None)
        sums = [parts[name].crc32c() for name in parts]
        return sums[0] if not tensor.text else _core.crc32c(f"{tensor.text} {sums}".encode())

    @staticmethod
    def _compare(replicas: Replicas, written: Sequence[_Written]) -> None:
        try:
            differing = replicas.differing([one.sums for one in written])
        except MismatchError as error:
            error.hint = (
                "`torch.distributed.checkpoint` keeps one of them: give the values of the ranks names of their own, "
                'such as `rng.<rank>`; or accept it with `verify=Verify(may_differ=["<pattern>"])`'
            )
            raise
        if differing:
            _log.warning("copies of %d values differ between ranks, and one of each is saved", len(differing))


def _planned(draft: Checkpoint2Draft, reports: list[RankFacts]) -> Checkpoint2Planned:
    """The plan, without the warning that MindSpore Transformers does not read all tensors: it is not the reader."""
    planned = draft.plan(reports)
    return replace(planned, plan=planned.plan._replace(iteration=replace(planned.plan.iteration, warnings=())))


def _is_main_thread() -> bool:
    """Whether the training waits for the save: `async_save` makes it in a thread."""
    return threading.current_thread() is threading.main_thread()


def _place(path: str) -> tuple[Location, int]:
    """The checkpoint root of a path, and its iteration."""
    place = locate(path).absolute()
    iteration = roots.parse_iteration_folder(place.name)
    if iteration is not None:
        return place.parent, iteration
    number = re.search(_LAST_NUMBER.pattern + "$", place.name)
    return place, 0 if number is None else int(number[1])


def _checked(value: Any, item: WriteItem) -> Inner:
    """The tensors of an item. Raises MismatchError if it is not as planned, UnsupportedError if it cannot be kept."""
    assert item.tensor_data is not None
    name, planned = item.index.fqn, item.tensor_data
    if not isinstance(value, torch.Tensor):
        raise MismatchError(f"{show(name)} is planned as a tensor, and the planner gives a {type(value)}", key=name)
    if value.dtype != planned.properties.dtype or value.shape != planned.chunk.sizes:
        raise MismatchError(
            f"{show(name)} is planned as {planned.properties.dtype} of shape {tuple(planned.chunk.sizes)}, and the "
            f"planner gives {value.dtype} of shape {tuple(value.shape)}",
            key=name,
            hint="a planner that casts says so in its plan: in `tensor_data.properties.dtype`",
        )
    parts, text = inner_tensors(value, name)
    if text and planned.chunk.sizes != planned.size:
        raise UnsupportedError(
            f"{show(name)} is a part of a {type(value).__name__}, which is made of other tensors: "
            f"{listed(map(show, parts))}",
            key=name,
            hint="such tensors are saved if each rank holds them whole; give these tensors, each under its own name",
        )
    return Inner({part: tensor.detach() for part, tensor in parts.items()}, text)


def _whole(tensor: torch.Tensor) -> Shard:
    return Shard(tensor, tuple(tensor.shape), (0,) * tensor.dim())


def _bytes_of(value: Any, name: str) -> bytes:
    if not hasattr(value, "getvalue"):
        raise MismatchError(f"{show(name)} is planned as bytes, and the planner gives a {type(value)}", key=name)
    data: bytes = value.getvalue()
    return data


def _object_sum(data: bytes) -> int:
    """A checksum of a value that `torch.save` has encoded: equal values may have been encoded in different ways."""
    try:
        return int(state.digest_of(_core.decode_torch_object(data))[:8], 16)
    except ReshardError:  # an object of a class that is not known here
        return _core.crc32c(data)


def _caching() -> UnsupportedError:
    return UnsupportedError(
        "the planner does not pass on what the storage has added to the plan of this save",
        hint="leave out `enable_plan_caching` of the planner: the storage plans each save",
    )
