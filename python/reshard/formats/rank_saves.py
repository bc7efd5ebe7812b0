"""The interface to saves whose ranks have folders of their own, each perhaps on its own host.

The processes of a run find and check such saves together, each in the folders that it can see and that are its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from reshard.commit.candidates import Order
from reshard.formats.base import Format

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard import _core
    from reshard.documents.common_info import CommonInfo
    from reshard.formats.base import CheckpointData, OpenOptions
    from reshard.ranks.collective import Collective
    from reshard.storage.location import Location
    from reshard.values.traits import Traits


@dataclass(frozen=True)
class SavesRoot:
    """A folder of rank folders, and the requested save in it.

    Attributes:
        format: the name of the format.
        path: the folder.
        named: the requested save, by the name of one of its files; None: any.
        iteration: the requested save, by its number of steps; None: any.
    """

    format: str
    path: str
    named: str | None = None
    iteration: int | None = None


@dataclass(frozen=True)
class SaveOrder(Order):
    """The order in which the saves of a tree are tried; the name of the first rank's file identifies a save.

    Attributes:
        n_ranks: number of ranks of a save.
    """

    n_ranks: int = 0


@dataclass(frozen=True)
class FoundSaves:
    """The saves of all ranks.

    Attributes:
        order: the order in which they are tried.
        statuses: the health that is recorded of some, by name: 0 is healthy.
    """

    order: SaveOrder
    statuses: dict[str, int]


class FolderView(NamedTuple):
    """The content of one rank's folder.

    Attributes:
        rank: the rank.
        meta: the file that it names as the last one; None: it names none.
        meta_fault: why what should name it is invalid.
        files: names of its weight files, sorted.
    """

    rank: int
    meta: str | None
    meta_fault: str | None
    files: tuple[str, ...]


class CheckedSave(NamedTuple):
    """What all processes found in the files of a save.

    Attributes:
        faults: `(rank, fault)` of each file that is damaged.
        common: the counters; None: it has none, or has faults.
        has_optimizer: whether it holds state of the optimizer.
    """

    faults: tuple[tuple[int, str], ...]
    common: CommonInfo | None
    has_optimizer: bool


class RankSaves(ABC):
    """The saves of a root. All processes call `find` and `check`.

    Attributes:
        traits: of the format.
        root: as given.
        folders: on process 0, what `find` has found in the folders of all ranks.
    """

    traits: ClassVar[Traits]

    def __init__(self, root: SavesRoot) -> None:
        self.root = root
        self.folders: tuple[FolderView, ...] = ()

    @abstractmethod
    def find(
        self,
        ranks: Collective,
        *,
        by_time: bool,
        extension: Literal["safetensors", "ckpt"] | None,
        healthy_only: bool,
    ) -> FoundSaves:
        """The saves, by the names of their files.

        Args:
            ranks: the processes.
            by_time: put them in the order of the times of their files.
            extension: only files with this extension.
            healthy_only: read the recorded health.

        Raises:
            StorageError: a folder cannot be listed.
        """

    @abstractmethod
    def check(self, save: str, ranks: Collective, method: _core.ReadMethod) -> CheckedSave:
        """Open the files of a save, each process its own, and compare what they say.

        Args:
            save: its name.
            ranks: the processes.
            method: how files are read.

        Raises:
            StorageError: a file cannot be read.
        """

    @abstractmethod
    def labels(self) -> Mapping[str, str]:
        """Short names of the files in `folders`, to be shown beside each other."""

    @abstractmethod
    def place(self, save: str, rank: int) -> Location:
        """The path of a rank's file of a save."""

    @abstractmethod
    def open(self, save: str, n_ranks: int, options: OpenOptions) -> CheckpointData:
        """Open the files of all ranks as one checkpoint.

        Args:
            save: the name of the save.
            n_ranks: number of ranks that saved it.
            options: the options of opening.

        Raises:
            ReshardError: as `reshard.open`.
        """

    @abstractmethod
    def open_own(self, save: str, rank: int, method: _core.ReadMethod) -> CheckpointData:
        """Open the file of one rank: its local arrays are the tensors. Raises as `open`.

        Args:
            save: the name of the save.
            rank: the rank.
            method: how the file is read.
        """


class RankFormat(Format):
    """A format whose ranks have folders of their own."""

    @abstractmethod
    def saves_at(self, path: Location, iteration: int | None = None) -> SavesRoot | None:
        """The saves to which a path leads: a folder of rank folders, or a file in one of these, which need not exist.

        Args:
            path: the path.
            iteration: the requested save, by its number of steps.

        Returns:
            None: it is neither.

        Raises:
            StorageError: the folder cannot be listed.
        """

    @abstractmethod
    def rank_saves(self, root: SavesRoot) -> RankSaves:
        """The saves of a root."""
