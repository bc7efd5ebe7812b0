"""The phases of a save: each is a value from which the next is made, so that none can be left out or come twice.

    every rank   Draft --------------------------> Prepared ----------> Written
                   | report            orders ^        ^  begun       | written
                   v                          |        |              v
    rank 0       Draft.plan ------------> Planned -> Begun -------> Publication

The upper line is what each rank does with its own files; the lower one is what rank 0 does for all. Between them are
the messages: what a rank reports, the orders of rank 0, what rank 0 has begun, and what a rank has written.
`collective_save` carries them between the ranks of a group, and the writer for `torch.distributed.checkpoint` in the
plans of that library. A format derives a class from each phase; the types of its messages are their parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from reshard.values.events import Observers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    import numpy as np

    from reshard import _core
    from reshard.documents.common_info import CommonInfo
    from reshard.layout import BoundLayout, ModelLayout
    from reshard.options import SaveOptions
    from reshard.storage.location import Location
    from reshard.values.traits import Traits
    from reshard.write.arrays import LocalArrays
    from reshard.write.rank_facts import RankFacts
    from reshard.write.replicas import RankCopies, Replicas, State
    from reshard.write.shard_files import ShardFileMaker


class Orders(Protocol):
    """The answer of rank 0 to the reports of the ranks; each format has a message of its own."""

    @property
    def replicas(self) -> Replicas:
        """Which ranks hold copies of what."""


ReportT = TypeVar("ReportT")
OrdersT = TypeVar("OrdersT", bound=Orders)
BegunT = TypeVar("BegunT")
WrittenT = TypeVar("WrittenT")


@dataclass(frozen=True)
class Messages(Generic[ReportT, OrdersT, BegunT, WrittenT]):
    """The types of the messages of a format, by which they are decoded.

    Attributes:
        report: of each rank to rank 0: what it holds.
        orders: the answer of rank 0.
        begun: of rank 0, once it has begun.
        written: of each rank, once its files are on the disk.
    """

    report: type[ReportT]
    orders: type[OrdersT]
    begun: type[BegunT]
    written: type[WrittenT]


class SaveTask(NamedTuple):
    """What is saved where and how; the same on all ranks. See `save`."""

    root: Location
    iteration: int
    timeout: float
    options: SaveOptions

    @property
    def durable(self) -> bool:
        """Whether files and folders are synced before the save is published."""
        return self.options.commit.durable

    @property
    def file_mode(self) -> int:
        """Permission bits of files, less the umask."""
        return 0o600 if self.options.commit.private else 0o666

    @property
    def folder_mode(self) -> int:
        """Permission bits of folders, less the umask."""
        return 0o700 if self.options.commit.private else 0o777


class RankInput(NamedTuple):
    """What this rank holds.

    Attributes:
        rank: this process, from 0.
        world_size: how many ranks save.
        arrays: its arrays, by name.
        facts: what it reports of them.
        layout: how they are partitioned: bound where this rank knows the tensors of all ranks, else the rules of the
            caller, which are bound once all ranks have reported. None: the arrays are shards that say it themselves.
        common: the counters; rank 0's are saved.
        metrics: numbers of the caller by name; rank 0's are saved.
        copies: its copies of arrays of other ranks, and its state.
        observers: called with the events of this rank.
    """

    rank: int
    world_size: int
    arrays: LocalArrays
    facts: RankFacts
    layout: BoundLayout | ModelLayout | None
    common: CommonInfo
    metrics: Mapping[str, int | float]
    copies: RankCopies
    observers: Observers = Observers()


class Published(NamedTuple):
    """What rank 0 has published.

    Attributes:
        path: see `SaveReport`, also for the attributes that follow.
        n_bytes: see there.
        n_files: see there.
        durable: see there.
        digest: see there.
        warnings: see there.
        suffix: see there.
        generation: the number of the claim.
        attempt_id: 32 hex digits for the log of saves; None: this save has no line there.
        ckpt_status: the health of the save, if its values were looked at; None: only what the caller gave is known.
    """

    path: str
    n_bytes: int
    n_files: int
    durable: bool
    digest: str
    warnings: tuple[str, ...]
    suffix: str | None
    generation: int
    attempt_id: str | None
    ckpt_status: int | None = None


class Draft(ABC, Generic[ReportT, OrdersT, BegunT, WrittenT]):
    """What one rank has to save, checked as far as it can be without the others.

    Args:
        task: what is saved where and how.
        own: what this rank holds.

    Attributes:
        traits: of the format.
        confirms: whether a restart finds the save by a file of each rank: `Written.confirm` writes it.
        task: as given.
        own: as given.
    """

    traits: ClassVar[Traits]
    confirms = False

    def __init__(self, task: SaveTask, own: RankInput) -> None:
        self.task = task
        self.own = own

    @staticmethod
    @abstractmethod
    def check_options(options: SaveOptions, model: Mapping[str, object]) -> None:
        """Refuse options that the format does not have, or that do not fit what this rank saves, by key.

        Raises:
            ArgumentError: there is such an option.
        """

    @staticmethod
    def is_note(warning: str) -> bool:  # noqa: ARG004
        """Whether a warning of the report is of no use in the log of this program."""
        return False

    @staticmethod
    @abstractmethod
    def dump_extra(kept: Mapping[str, object], own: Collection[str]) -> tuple[str, dict[str, np.ndarray]]:
        """Encode what this rank writes of `extra`, as a text and arrays.

        Args:
            kept: the values by name.
            own: names of the values that are kept for each rank.

        Raises:
            ArgumentError: a value cannot be saved.
        """

    @property
    @abstractmethod
    def messages(self) -> Messages[ReportT, OrdersT, BegunT, WrittenT]:
        """The types of the messages."""

    @abstractmethod
    def report(self) -> ReportT:
        """What this rank sends to rank 0."""

    @abstractmethod
    def plan(self, reports: list[ReportT]) -> Planned[OrdersT, BegunT, WrittenT]:
        """On rank 0: check that what the ranks reported can be saved, and plan it; writes nothing.

        Raises:
            ReshardError: it cannot be saved.
        """

    @abstractmethod
    def prepare(self, orders: OrdersT, make: ShardFileMaker) -> Prepared[BegunT, WrittenT]:
        """Make the files of this rank ready to be written.

        Args:
            orders: of rank 0.
            make: makes a file; it may copy what is written.
        """


@dataclass(frozen=True)
class Planned(ABC, Generic[OrdersT, BegunT, WrittenT]):
    """On rank 0: what all ranks are going to write.

    Attributes:
        orders: the message to the ranks.
    """

    orders: OrdersT

    @abstractmethod
    def begin(self) -> Begun[BegunT, WrittenT]:
        """Claim the root. If that fails, nothing is left of it. Raises ReshardError."""


@dataclass(frozen=True)
class Begun(ABC, Generic[BegunT, WrittenT]):
    """On rank 0: a save for which the root is claimed.

    Attributes:
        message: to the ranks.
    """

    message: BegunT

    @abstractmethod
    def publish(
        self,
        own: Written[WrittenT],
        written: list[WrittenT],
        *,
        durable: bool,
        log: Callable[[Published], list[Location]],
    ) -> Publication:
        """Publish what all ranks have written.

        Args:
            own: what this rank has written.
            written: the messages of all ranks.
            durable: whether what is published survives a loss of power.
            log: appends a line to the log. Returns the files to be synced with the names. A format that `confirms` does
                not call it: the line is appended once all ranks have confirmed.

        Raises:
            ReshardError: nothing is published.
        """

    def withdraw(self) -> None:
        """The save has failed before it was published: leave nothing of it. Never raises ReshardError."""


class Prepared(ABC, Generic[BegunT, WrittenT]):
    """The files of one rank, ready to be written."""

    @abstractmethod
    def write(self, begun: BegunT, state: State, progress: _core.Progress | None) -> Written[WrittenT]:
        """Write the files of this rank, and sync them.

        Args:
            begun: the message of rank 0.
            state: text and arrays of this rank's state files; None: it has none.
            progress: called as `progress(done_bytes, total_bytes)`.

        Raises:
            ReshardError: a file was not written.
        """

    def withdraw(self) -> None:
        """The save has failed on all ranks: remove the files of this rank, unless they are confirmed. Never raises."""


@dataclass(frozen=True)
class Written(Generic[WrittenT]):
    """The files of one rank are on the disk.

    Attributes:
        message: to rank 0.
        unsynced: names of files of rank 0 that `Begun.publish` syncs together with its own.
    """

    message: WrittenT
    unsynced: tuple[str, ...] = field(default=(), kw_only=True)

    def confirm(self, published: Published) -> tuple[str, ...]:  # noqa: ARG002
        """On every rank, if the format `confirms`: from now on a restart may find the save. Returns warnings."""
        return ()

    def remove_older(self, published: Published) -> list[str]:  # noqa: ARG002
        """On every rank: remove its files that are no longer kept. Returns warnings: nothing is raised."""
        return []


@dataclass(frozen=True)
class Publication:
    """On rank 0: a save that is published.

    Attributes:
        published: the message to the ranks.
    """

    published: Published

    def confirmed(self) -> None:
        """All ranks have confirmed."""

    def remove_older(self) -> list[str]:
        """Remove what is no longer kept of all ranks. Returns warnings: nothing is raised."""
        return []
