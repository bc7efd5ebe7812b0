"""A folder of `torch.distributed.checkpoint`: its tensors from their chunks, and its other values.

`.metadata` is a pickle. It is decoded by the core and never executed. Chunks that overlap or leave a part of a tensor
uncovered are refused, and so is a chunk whose item has another shape or dtype than `.metadata` says: torch reads these
without an error.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from reshard import _core
from reshard.errors import CheckpointNotFoundError, ReshardError, StorageError
from reshard.formats.base import CheckpointData, Format, Match, Traits
from reshard.formats.dcp.names import DATA_SUFFIX, MAX_METADATA_BYTES, METADATA_FILE, is_optimizer, step_of
from reshard.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.formats.base import OpenOptions, PartName
    from reshard.storage.location import Location

__all__ = ["DCP"]

_log = logging.getLogger("reshard")


class Dcp(Format):
    """A folder of `torch.distributed.checkpoint`, or a root with a folder for each step."""

    traits = Traits("dcp")

    def detect(self, path: Location) -> Match:
        """By `.metadata`; by data files where that is missing, so that the reader can say so."""
        if not path.is_folder():
            return Match.NO
        names = path.names()
        return Match.YES if _is_dcp(path, names) or _has_steps(path, names) else Match.NO

    def open(self, path: Location, options: OpenOptions) -> CheckpointData:
        """The tensors that `.metadata` lists; data files are opened when they are first needed.

        Of a root, the newest step that can be opened.
        """
        return _open_root(path, options.method) if self.is_root(path) else _open_dcp(path, options.method)

    def is_root(self, path: Location) -> bool:
        """Whether it holds a folder `step-<N>` of this format, and is none itself."""
        names = path.names()
        return not _is_dcp(path, names) and _has_steps(path, names)


DCP = Dcp()


@dataclass(frozen=True, kw_only=True)
class _DcpData(CheckpointData):
    """A folder with its values that are no tensors.

    Attributes:
        objects: `(name, file, first byte, bytes, transforms)` of each value.
    """

    objects: Sequence[tuple[str, str, int, int, list[str]]] = ()

    def part(self, key: str) -> PartName:
        """By the name: the state of an optimizer is saved below `optimizer` or `optim`."""
        return "optimizer" if is_optimizer(key) else "model"

    def extra_state(self, rank: int) -> dict[str, Any]:  # noqa: ARG002  every value has a name of its own
        """The values that are no tensors, by name."""
        return {
            name: _core.read_torch_object(str(self.path / file), start, n_bytes, transforms=transforms)
            for name, file, start, n_bytes, transforms in self.objects
        }


def _is_dcp(folder: Location, names: Sequence[str]) -> bool:
    """Whether a folder with these names is of this format."""
    has_metadata = METADATA_FILE in names and (folder / METADATA_FILE).is_file()
    return has_metadata or any(name.endswith(DATA_SUFFIX) for name in names)


def _has_steps(root: Location, names: Sequence[str]) -> bool:
    return any(_is_dcp(root / name, (root / name).names()) for _, name in _steps(root, names))


def _steps(root: Location, names: Sequence[str]) -> list[tuple[int, str]]:
    """Step and name of each folder of a step, the newest first."""
    steps = [(step, name) for name in names if (step := step_of(name)) is not None]
    return sorted(((step, name) for step, name in steps if (root / name).is_folder()), reverse=True)


def _open_root(root: Location, method: _core.ReadMethod) -> CheckpointData:
    """The newest step that can be opened, with the reasons why newer ones cannot."""
    skipped: list[tuple[str, str]] = []
    for step, name in _steps(root, root.names()):
        try:
            data = _open_dcp(root / name, method)
        except StorageError:
            raise  # a file that cannot be read is not damage
        except ReshardError as error:
            _log.warning("%s is skipped: %s", root / name, error.message)
            skipped.append((name, error.message))
        else:
            return replace(data, iteration=step, skipped=tuple(skipped))
    raise CheckpointNotFoundError(
        f"none of the {len(skipped)} steps in {show(str(root))} can be opened; the newest: {skipped[0][1]}",
        path=str(root),
    )


def _open_dcp(folder: Location, method: _core.ReadMethod) -> CheckpointData:
    try:
        data = (folder / METADATA_FILE).read_small(MAX_METADATA_BYTES)
    except CheckpointNotFoundError:
        raise CheckpointNotFoundError(
            f"{show(str(folder))} has data files of torch.distributed.checkpoint, but no `{METADATA_FILE}`: the "
            "save was not finished",
            path=str(folder),
            hint="use another step; `.metadata` is written last, and without it the files cannot be read",
        ) from None
    index, objects, unsupported, _ = _core.open_dcp(str(folder), data, method=method)
    index.check_coverage()  # torch leaves a hole as it was, and reads overlaps in any order
    if unsupported:
        names = listed(f"{show(name)} ({why})" for name, why in unsupported)
        _log.warning("%s: %d tensors cannot be read and are left out: %s", folder, len(unsupported), names)
    return _DcpData(traits=Dcp.traits, path=folder, index=index, method=method, objects=objects)
