"""The interface of a format: its traits, and the data of an opened checkpoint that its reader returns.

A reader opens files, checks them, and returns a `CheckpointData`: an index of the stored arrays and what the format
records beside them. `reshard.Checkpoint` reads arrays from it. Code outside the formats reads a trait or calls a method
of the data. It does not compare the name of a format.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, TypeAlias

from reshard.errors import LayoutError
from reshard.formats import counter_tensors
from reshard.storage.location import Location, locate

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Mapping, Sequence

    from reshard import _core
    from reshard._core import DeviceLayout
    from reshard.commit.candidates import Candidate, Order
    from reshard.commit.manifest import Manifest
    from reshard.commit.scrub import Fault
    from reshard.documents.common_info import CommonInfo
    from reshard.errors import ReshardError
    from reshard.formats.chosen import Chosen
    from reshard.formats.run_state import Values
    from reshard.layout.strategy import Strategy
    from reshard.quantised.kinds import Quantised
    from reshard.storage.store import Lock
    from reshard.values.traits import Traits

StrategyLike: TypeAlias = "Strategy | str | os.PathLike[str]"

PartName = Literal["model", "optimizer"]
Shapes: TypeAlias = "dict[str, tuple[int, ...]]"


UNCHANGED_HINT = "wait until the program that writes it is done, or copy the folder first and read the copy"


class UnplacedTensor(NamedTuple):
    """A tensor whose local arrays have no known position.

    Attributes:
        dtype: its safetensors name.
        local_shapes: the distinct shapes of its local arrays, in elements.
    """

    dtype: str
    local_shapes: tuple[tuple[int, ...], ...]


class StoredTensor(NamedTuple):
    """A tensor and the stored arrays that it consists of: the arguments of `Index.add_tiles`.

    Attributes:
        dtype: its safetensors name.
        shape: the global shape, in elements.
        stored: the stored arrays.
        factors: by dim, the factors of the dims of the tiles, where they differ from the dims of the tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    stored: Sequence[_core.StoredArray]
    factors: Mapping[int, Sequence[int]] | None = None


class Match(IntEnum):
    """How certainly a path is in a format."""

    NO = 0
    FALLBACK = 1
    """It is opened in this format if no other format matches. The reader then reports what is missing."""
    YES = 2


class OpenOptions(NamedTuple):
    """Options of opening.

    Attributes:
        method: how files are read, as in `reshard.open`.
        strategy: the strategy that describes the shards in rank folders, as in `reshard.open`; None: not given.
        known: the checkpoint was opened and checked by another rank: open the same, or raise MismatchError.
    """

    method: _core.ReadMethod = "auto"
    strategy: StrategyLike | None = None
    known: Chosen | None = None


class Format(ABC):
    """A format: its traits, how it is recognised and how it is opened. `registry.FORMATS` lists the instances."""

    traits: ClassVar[Traits]
    hidden_files: ClassVar[tuple[str, ...]] = ()
    """Files of a checkpoint whose names begin with a dot."""

    @abstractmethod
    def detect(self, path: Location) -> Match:
        """Whether an existing path is in this format. It reads names, and at most the first bytes of a file.

        Raises:
            StorageError: the system failed to list or read it.
        """

    @abstractmethod
    def open(self, path: Location, options: OpenOptions) -> CheckpointData:
        """Open and check a checkpoint; for a root, the best checkpoint in it.

        Raises:
            ReshardError: as `reshard.open`.
        """

    def note_renamed(self, source: Location, target: Location, *, durable: bool) -> None:  # noqa: B027  most have nothing
        """A file was written under another name, into another folder: write there what names it beside the source.

        Args:
            source: the file that was read.
            target: the file that was written.
            durable: sync what is written.

        Raises:
            StorageError: it cannot be written.
        """

    def may_be_foreign(self, file: Location) -> bool:  # noqa: ARG002
        """Whether a damaged file can be one of another tool that only begins as this format does."""
        return False

    def root(
        self,
        path: Location,  # noqa: ARG002
        options: OpenOptions,  # noqa: ARG002
        *,
        exact: int | None = None,  # noqa: ARG002
    ) -> Root | None:
        """The checkpoints of a folder, of which one is chosen; None: a path in this format is one checkpoint.

        Args:
            path: an existing path.
            options: with which its checkpoints are opened.
            exact: only this iteration, where the folders are named `iteration_<number>`; else there is no root.

        Raises:
            StorageError: the system failed to list it.
        """
        return None


class Root(ABC):
    """A folder with several checkpoints of a format, as it was when it was listed. Leave it as a context manager.

    Attributes:
        path: the folder.
        options: with which its checkpoints are opened.
        order: which checkpoints it holds, in the order in which they are tried.
        is_ours: `reshard.save` fills such folders: each checkpoint in them is listed and verified.
        in_turn: a run that resumes judges its checkpoints one by one; else the root is one candidate, as for `open`.
        of_options: errors of what the caller gave, such as a strategy. They are no fault of a checkpoint.
    """

    order: Order
    is_ours: ClassVar[bool] = False
    in_turn: ClassVar[bool] = False
    of_options: ClassVar[tuple[type[ReshardError], ...]] = (LayoutError,)

    def __init__(self, path: Location, options: OpenOptions) -> None:
        self.path = path
        self.options = options

    @abstractmethod
    def open(self, one: Candidate) -> CheckpointData:
        """Open a checkpoint of it. Raises as `reshard.open`."""

    def again(self) -> Root:
        """The same folder, listed once more."""
        return type(self)(self.path, self.options)

    def check(self) -> None:  # noqa: B027  most have nothing to check
        """Raise an error of the options, before the first checkpoint is opened."""

    def place(self, one: Candidate) -> Location:
        """Where a checkpoint lies: its folder, or the file of the first rank."""
        return self.path / one.name

    def newest_first(self) -> Sequence[Candidate]:
        """All checkpoints, with those that are never tried."""
        return (*self.order.candidates, *self.order.refused)

    def ignored(self) -> Sequence[str]:
        """Sentences about what only looks like a checkpoint of it."""
        return ()

    def close(self) -> None:  # noqa: B027  most hold nothing
        """Release what protects a checkpoint that was not opened."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RankRoot(Root):
    """A root in which a checkpoint consists of a file in the folder of each rank."""

    @abstractmethod
    def files(self, one: Candidate) -> Mapping[int, Location]:
        """The path of each rank's file of a checkpoint, whether it exists or not."""

    @abstractmethod
    def compare(self, one: Candidate) -> tuple[list[int], list[Fault]]:
        """Compare the files of a checkpoint with the checksums in them, and what lies beside them with its digests.

        Returns:
            The bytes of each file that has checksums; and all faults.
        """

    @abstractmethod
    def open_suffix(self, suffix: str) -> CheckpointData:
        """Open the files whose names end with a text, one of each rank.

        Raises:
            ArgumentError: the text does not say which files.
            ReshardError: as `reshard.open`.
        """

    def place(self, one: Candidate) -> Location:
        """The file of rank 0, or of the first rank that is there."""
        return next(iter(self.files(one).values()))


@dataclass(frozen=True, kw_only=True)
class CheckpointData:
    """An opened checkpoint as its reader returns it.

    The methods return the values of a format that stores whole tensors. Readers of other formats return a subclass.

    Attributes:
        traits: those of the format.
        path: the file or folder that is read.
        index: the stored arrays of every tensor.
        method: how the files are read.
        iteration: the iteration, or None.
        common: counters of the run, or None.
        manifest: the manifest, or None: then there are no checksums.
        lock: a lock that protects the folder from retention, or None. The owner closes it.
        skipped: `(folder, reason)` of iterations that were tried first and could not be opened.
        strings: names of values that are text, not tensors.
        aliases: for tied tensors, which are stored once: each further name and the stored name.
        is_renamed: whether the tensors are renamed by a name map.
        listing: the file that lists the others and that a save writes last, where there is one.
        base_name: what the names of files with these weights begin with, where their library expects other names than
            those of a Hugging Face model.
        model_files: the folder with `config.json`, the tokenizer and other files of the model, where it is another one.
        naming: the naming of its tensors, as in the presets of name maps; None: not recorded.
        config: what it records of the model, under the names of `config.json`.
        derived: tensors that follow from the configuration of the model, which other formats do not hold.
        chosen: what other ranks need to open the same; None: its path.
        place: `path` as an absolute path, for what is read later: the program may have changed its working folder.
    """

    traits: Traits
    path: Location
    index: _core.Index
    method: _core.ReadMethod = "auto"
    iteration: int | None = None
    common: CommonInfo | None = None
    manifest: Manifest | None = None
    lock: Lock | None = None
    skipped: tuple[tuple[str, str], ...] = ()
    strings: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    is_renamed: bool = False
    listing: Location | None = None
    base_name: str | None = None
    model_files: Location | None = None
    naming: str | None = None
    config: Mapping[str, object] = field(default_factory=dict)
    derived: tuple[str, ...] = ()
    chosen: Chosen | None = None
    place: Location = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "place", self.path.absolute())

    def keys(self) -> Sequence[str] | None:
        """Names of all tensors in order, including those without a position. None: those of the index."""
        return None

    def check_files(self) -> None:
        """Compare with their description all files that opening has not compared yet.

        Raises:
            DamagedFileError, MismatchError: a file is damaged, or holds other tensors.
            StorageError: the system failed to read one.
        """

    def unplaced(self) -> Mapping[str, UnplacedTensor]:
        """Tensors that can only be read rank by rank."""
        return {}

    def unplaced_hint(self) -> str:
        """What to do to read such tensors whole."""
        return (
            "copy the strategy files of the run into a folder named strategy beside it, or pass `strategy=`; if every "
            "rank holds the whole model, open the folder of one rank"
        )

    def strategy(self) -> Strategy | None:
        """The strategy with which rank folders were opened."""
        return None

    def part(self, key: str) -> PartName:
        """Whether a tensor belongs to the model or to the optimizer."""
        return "optimizer" if self.traits.counters_as_tensors and counter_tensors.is_state(key) else "model"

    def slot_of(self, key: str) -> tuple[str, str] | None:
        """The slot and the parameter of a tensor that is the state of an optimizer for a parameter; else None."""
        slot, dot, parameter = key.partition(".")
        return (slot, parameter) if dot and self.part(key) == "optimizer" else None

    def has_optimizer(self) -> bool:
        """Whether a tensor can belong to the optimizer. False: all belong to the model."""
        return True

    def weights(self, dtype: str | None = None) -> Mapping[str, str] | None:  # noqa: ARG002  of formats with masters
        """The key of each weight of the model, by the name of the weight; None: each key of the model is its name.

        Args:
            dtype: the dtype to which the weights are cast, where a format stores them in several.
        """
        return None

    def file_name(self, file: int) -> str:
        """The path of a file, relative to the folder of the checkpoint."""
        return locate(self.index.file_path(file)).name

    def rank_files(self) -> Mapping[int, list[int]] | None:
        """Numbers of the files that each rank wrote; None: the files hold whole tensors.

        Raises:
            ArgumentError: nothing records which rank wrote a file.
        """
        return None

    def is_deduplicated(self) -> bool | None:
        """Whether the file of a rank lacks shards that another rank wrote; None: that is not known."""
        return False

    def world_size(self) -> int | None:
        """Number of ranks that saved it, if that is recorded."""
        return None if self.manifest is None else self.manifest.world_size

    def rank_axes(self) -> Mapping[str, int]:
        """Sizes of the axes of the ranks that saved it, where the names of its files say so; empty: they do not."""
        return {}

    def extra_state(self, rank: int) -> dict[str, Any]:  # noqa: ARG002
        """The state saved beside the tensors, as `Checkpoint.extra` returns it."""
        return {}

    def read_common(self) -> CommonInfo | None:
        """The counters of the run, also where reading them takes the contents of tensors or other values."""
        return self.common

    def run_values(self, rank: int = 0) -> Values | None:  # noqa: ARG002
        """The values that are no tensors, of a checkpoint that names the state of a run as torch does; else None.

        Args:
            rank: the rank that gets them. It gets its own ones, and those that it lacks if other ranks agree in them.
        """
        return None

    def has_values_of_ranks(self) -> bool:
        """Whether `extra_state` can differ between ranks without a manifest that lists their files."""
        return False

    def encoded_state(self) -> dict[str, Any]:
        """The shared state, in which values that `torch.save` encoded are `TorchSaved`; empty if nothing is so."""
        return {}

    def quantised(self, keys: Collection[str]) -> Mapping[str, Quantised] | None:  # noqa: ARG002  of formats without
        """The quantised weights among some tensors, by name; None: they are found by their names."""
        return None

    def tiled_keys(self) -> Collection[str]:
        """Tensors that only `tiles.json` describes."""
        return ()

    def device_layouts(self, shapes: Callable[[], Shapes]) -> Mapping[str, DeviceLayout]:  # noqa: ARG002
        """The recorded device layout of each tensor that has one; `shapes()` gives the shapes of all."""
        return self.index.metadata_layouts()

    def layout_mapping(self, shapes: Callable[[], Shapes]) -> Mapping[str, Any] | None:  # noqa: ARG002
        """The recorded layout of the whole checkpoint, or None."""
        return None

    def check(self, keys: Collection[str] | None) -> None:
        """Run the checks that need the contents of tensors, before a read. None: all tensors.

        Raises:
            MismatchError: files that should hold the same bytes of a tensor do not.
        """

    def view(self, index: _core.Index, lock: Lock | None) -> Self:
        """The same files with an index of other tensors. Records about the stored tensors are left out."""
        return replace(self, index=index, lock=lock, strings=(), aliases={}, chosen=None)
