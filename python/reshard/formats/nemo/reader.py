"""Reads checkpoints of NeMo: the folder of Megatron-Core in one, or the file of `torch.save` inside an archive."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

from reshard import _core
from reshard.errors import CheckpointNotFoundError, ReshardError, UnsupportedError
from reshard.formats.base import CheckpointData
from reshard.formats.nemo import archive, names
from reshard.formats.torch_file.format import TORCH_FILE
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from reshard.formats.base import Format, OpenOptions
    from reshard.storage.location import Location

_MOST_NAMED = 3


def open_weights(folder: Location, of: Format, options: OpenOptions) -> CheckpointData:
    """Open the folder of weights below a checkpoint.

    Args:
        folder: the folder of the weights.
        of: its format.
        options: of opening.

    Raises:
        ReshardError: as `reshard.open` of the folder.
    """
    return _named(of.open(folder, options))


def open_folder(folder: Location, options: OpenOptions) -> CheckpointData:
    """Open an unpacked archive with one file of weights. Raises as `reshard.open` of the file."""
    return _named(TORCH_FILE.open(folder / names.WEIGHTS_FILE, options))


def _named(data: CheckpointData) -> CheckpointData:
    return replace(data, traits=data.traits._replace(name=names.TRAITS.name, is_pretrained=True, counters=None))


def open_archive(path: Location, method: _core.ReadMethod) -> CheckpointData:
    """Open the file of weights inside an archive. It is read in place.

    Raises:
        CheckpointNotFoundError: no member holds weights.
        DamagedFileError: the archive or the member is damaged.
        UnsupportedError: the weights are those of several ranks, a folder, or packed.
        StorageError: it cannot be read.
    """
    held = archive.members(path)
    member = held.get(names.WEIGHTS_FILE)
    if member is None:
        raise _without_file(path, held)
    if not member.is_file:
        raise UnsupportedError(
            f"{show(str(path))}: its member {show(names.WEIGHTS_FILE)} is no file", path=str(path), hint=_unpacked(path)
        )
    index = _core.Index()
    number = index.add_torch_file(str(path), method=method, within=(member.start, member.n_bytes))
    try:
        tensors = index.file_tensors(number)
    except ReshardError as error:
        error.message += f" (in the member {show(names.WEIGHTS_FILE)} at byte {member.start})"
        raise
    if not tensors:
        raise CheckpointNotFoundError(
            f"{show(str(path))}: its member {show(names.WEIGHTS_FILE)} holds no tensors", path=str(path)
        )
    index.add_whole_file(number)
    return CheckpointData(traits=names.TRAITS._replace(has_sums=True), path=path, index=index, method=method)


def _without_file(path: Location, held: dict[str, archive.Member]) -> ReshardError:
    """The error for an archive without one file of weights at its top."""
    folders = (f"{name}/" for name in names.WEIGHTS_FOLDERS)
    inside = tuple(folders)
    weights = itertools.islice(
        (name for name in held if name.endswith(f"/{names.WEIGHTS_FILE}") or name.startswith(inside)), _MOST_NAMED + 1
    )
    there = list(weights)
    if there:
        return UnsupportedError(
            f"{show(str(path))} holds weights in several members, which are not read inside an archive: "
            f"{listed(map(show, there), _MOST_NAMED)}",
            path=str(path),
            hint=_unpacked(path),
        )
    return CheckpointNotFoundError(
        f"{show(str(path))} holds no member {show(names.WEIGHTS_FILE)}; it holds "
        f"{listed(map(show, itertools.islice(held, _MOST_NAMED)), _MOST_NAMED, n_items=len(held)) or 'nothing'}",
        path=str(path),
    )


def _unpacked(path: Location) -> str:
    return f"unpack it into a folder, `tar -xf {path.name} -C DIR`, and open the folder"
