"""The interface of a format that a conversion can write. `formats.writers.WRITERS` lists the instances."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from reshard.conversion.destinations import Job, Written
    from reshard.conversion.known_files import Mark
    from reshard.conversion.source import Source
    from reshard.layout import BoundLayout
    from reshard.storage.location import Location
    from reshard.write.contents import DtypeAndPart, FileContent


@dataclass(frozen=True)
class Settings:
    """Options of a conversion that only some formats have. See `reshard.convert`.

    Attributes:
        layout: how the tensors of the source lie in the destination. Without a layout one rank holds them whole, and
            nothing is recorded.
        iteration: the iteration, or None.
        prefix: prefix of the file names, or None.
        max_bytes: largest size of a file in bytes, or None.
        dedup: whether each shard is written once; None: the default of the format.
        strict_format: refuse what metadata.json cannot express.
        original_modes: create files with the permissions that MindSpore Transformers uses.
        model_files: a folder whose files that are not weights are copied, or None.
        check_names: whether the names are compared with those of the model of its config.json.
        source: the path of the source.
        with_state: whether counters and other state beside the tensors are written, by formats that hold them.
        with_extra: whether the state of the run is, as `writes_extra` of the writer says.
    """

    layout: BoundLayout
    iteration: int | None
    prefix: str | None
    max_bytes: int | None
    dedup: bool | None
    strict_format: bool
    original_modes: bool
    model_files: Location | None
    check_names: bool
    source: Location
    with_state: bool
    with_extra: bool


class Writer(ABC):
    """Writes a format.

    Attributes:
        name: the name of the format in the API and on the command line.
        metadata: entries of the `__metadata__` of its files.
        default_part: the part that is written if `part` is not given.
        is_whole: it holds whole tensors, so a layout has no meaning.
        options: names of those arguments of `convert` that this format has, but not every format.
        counts_counters: counters are tensors of the destination and are counted as such.
        has_headers: its files keep `__metadata__`, which describes tensors of some libraries.
        in_root: an iteration is added to a checkpoint root, which can have other iterations.
        keeps_others: files of other formats in the destination stay where they are, not only folders of iterations.
        commits: names of files and folders that identify a checkpoint: published last, in this order.
        marks: by the name or the suffix of a file that readers of the format open: a function that returns whether an
            earlier conversion wrote it. A conversion never replaces such a file that none wrote, and adds none to it.
    """

    name: ClassVar[str]
    metadata: ClassVar[Mapping[str, str]] = {"format": "pt"}
    default_part: ClassVar[Literal["all", "model"]] = "all"
    is_whole: ClassVar[bool] = False
    options: ClassVar[frozenset[str]] = frozenset()
    counts_counters: ClassVar[bool] = False
    has_headers: ClassVar[bool] = False
    in_root: ClassVar[bool] = False
    keeps_others: ClassVar[bool] = False
    commits: ClassVar[tuple[str, ...]] = ()
    marks: ClassVar[Mapping[str, Mark]] = {}

    @abstractmethod
    def write(self, job: Job, settings: Settings) -> Written:
        """Write the tensors of a job and publish them.

        Raises:
            ReshardError: as `reshard.convert`.
        """

    def is_one_file(self, target: Location) -> bool:  # noqa: ARG002
        """Whether the destination is a file, not a folder."""
        return False

    def writes_extra(self, job: Job) -> bool:  # noqa: ARG002
        """Whether it writes the state of the run beside the tensors and the counters, if the source has any.

        Raises:
            ReshardError: that state cannot be read.
        """
        return False

    def planned(
        self,
        tensors: Mapping[str, DtypeAndPart],  # noqa: ARG002
        layout: BoundLayout,  # noqa: ARG002
    ) -> tuple[Sequence[FileContent], Sequence[str]] | None:
        """The files in which it writes tensors with a layout, and warnings; None: that is not known before."""
        return None

    def apart(self, source: Source) -> Collection[str]:  # noqa: ARG002
        """Names of counters that are not written as ordinary tensors."""
        return ()
