"""How a folder of `torch.distributed.checkpoint` is recognised. `reader` opens it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.commit import roots
from reshard.commit.candidates import Candidate, Order
from reshard.formats.base import Format, Match, OpenOptions, Root
from reshard.formats.dcp import sharded_files
from reshard.formats.dcp.names import DATA_SUFFIX, METADATA_FILE, rank_of_metadata, step_of
from reshard.formats.dcp.traits import TRAITS
from reshard.formats.huggingface.reader import HUGGINGFACE
from reshard.formats.newest import open_newest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.formats.base import CheckpointData
    from reshard.storage.location import Location


class Dcp(Format):
    """A folder of `torch.distributed.checkpoint`, or a root with a folder for each step."""

    traits = TRAITS
    hidden_files = (METADATA_FILE,)

    def detect(self, path: Location) -> Match:
        """By `.metadata` or the names of shard files; by data files where `.metadata` is missing, to say so."""
        if not path.is_folder():
            return Match.NO
        names = path.names()
        return Match.YES if _is_dcp(path, names) or _has_steps(path, names) else Match.NO

    def open(self, path: Location, options: OpenOptions) -> CheckpointData:
        """The tensors that `.metadata` lists; data files are opened when they are first needed.

        Of a root, the newest step that can be opened.
        """
        from reshard.formats.dcp import reader  # noqa: PLC0415  slow to import

        root = self.root(path, options)
        return reader.open_folder(path, options.method) if root is None else open_newest(root)

    def root(self, path: Location, options: OpenOptions, *, exact: int | None = None) -> _Steps | None:
        """The folders `step-<N>` of this format in a folder that is none itself."""
        names = () if exact is not None else path.names()
        return _Steps(path, options) if not _is_dcp(path, names) and _has_steps(path, names) else None


class _Steps(Root):
    """The folders of steps, the highest first."""

    in_turn = True

    def __init__(self, path: Location, options: OpenOptions) -> None:
        super().__init__(path, options)
        steps = enumerate(_steps(path, path.names()))
        self.order = Order(
            tuple(Candidate(step, name, "a lower step" if n else "the highest step") for n, (step, name) in steps)
        )

    def open(self, one: Candidate) -> CheckpointData:
        """The data of a step. The trainer can write its last one as a Hugging Face model."""
        from reshard.formats.dcp import reader  # noqa: PLC0415  slow to import

        folder = self.place(one)
        is_model = HUGGINGFACE.detect(folder) is Match.YES
        data = HUGGINGFACE.open(folder, self.options) if is_model else reader.open_folder(folder, self.options.method)
        return replace(data, iteration=one.iteration)


DCP = Dcp()


def _is_dcp(folder: Location, names: Sequence[str]) -> bool:
    """Whether a folder with these names is of this format."""
    has_metadata = METADATA_FILE in names and (folder / METADATA_FILE).is_file()
    return has_metadata or any(
        name.endswith(DATA_SUFFIX) or rank_of_metadata(name) is not None or sharded_files.parse_name(name) is not None
        for name in names
    )


def _has_steps(root: Location, names: Sequence[str]) -> bool:
    steps = _steps(root, names)
    # A run that resumes from such a root can save into it in the format of this package.
    return any(_is_dcp(root / name, (root / name).names()) for _, name in steps) and not roots.is_root(root)


def _steps(root: Location, names: Sequence[str]) -> list[tuple[int, str]]:
    """Step and name of each folder of a step, the newest first."""
    steps = [(step, name) for name in names if (step := step_of(name)) is not None]
    return sorted(((step, name) for step, name in steps if (root / name).is_folder()), reverse=True)
