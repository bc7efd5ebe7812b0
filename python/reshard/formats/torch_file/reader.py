"""A file of `torch.save`, or a folder of `.bin` files: its tensors by path, and its other values.

A path is the keys and positions that lead to a value, joined with dots: `model.layers.0.weight`. A file that is one
tensor has the empty path. No class of the file is imported; a value that is no plain Python object is a `_core.Opaque`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard import _core
from reshard.errors import CoverageError, UnsupportedError
from reshard.formats import mesh_shards, run_state, torch_head, weight_map
from reshard.formats.base import CheckpointData
from reshard.formats.run_state import is_optimizer
from reshard.formats.torch_file import names
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reshard.documents.common_info import CommonInfo
    from reshard.formats.base import PartName
    from reshard.storage.location import Location

_log = logging.getLogger("reshard")

_MAX_NAMED = 3
_OF_RANK_HINT = (
    "open the files of all ranks together: the folder of `model_world_size_<N>_rank_<R>.pt`, or a list of the files, "
    "or a pattern of their names"
)


@dataclass(frozen=True, kw_only=True)
class _FileData(CheckpointData):
    """A file with its values that are no tensors.

    Attributes:
        file: the file.
        objects: the values by path.
    """

    file: Location
    objects: Mapping[str, object] = field(default_factory=dict)

    def part(self, key: str) -> PartName:
        """By the name: the state of an optimizer is saved below `optimizer` or `optim`."""
        return "optimizer" if is_optimizer(key) else "model"

    def slot_of(self, key: str) -> tuple[str, str] | None:
        """By the parts of the name: `<optimizer>.state.<parameter>.<slot>`."""
        found = run_state.state_of(key)
        return None if found is None else (found[1], found[0])

    def extra_state(self, rank: int) -> dict[str, Any]:  # noqa: ARG002  a file has no ranks
        """The values that are no tensors, by path."""
        return dict(self.objects)

    def read_common(self) -> CommonInfo | None:
        """The step that a value of the file says; without state of an optimizer it is no checkpoint of a run."""
        if not any(map(is_optimizer, map(self.index.key, range(len(self.index))))):
            return None
        return run_state.common_of(self.index, self.objects, self.objects.__getitem__, None)

    def run_values(self, rank: int = 0) -> run_state.Values:  # noqa: ARG002
        """The values that are no tensors, with the lists that hold them."""
        whole = _core.read_torch_object(str(self.file.resolved()), 0, self.file.stat(follow_links=True).n_bytes)
        return run_state.flat_values(whole)


def open_file(path: Location, file: Location, method: _core.ReadMethod) -> CheckpointData:
    """Open one file.

    Args:
        path: the path that was given: the file or its folder.
        file: the file.
        method: how it is read.

    Raises:
        DamagedFileError, StorageError: as `reshard.open`.
    """
    index = _core.Index()
    number = index.add_torch_file(str(file), method=method)
    tensors, objects = _core.add_torch_wholes(index, number)
    shards = {one.key: one.kind for one in tensors.tensors()}
    if any(map(mesh_shards.is_flat, (*index.keys(), *shards))):
        mesh_shards.refuse_flat(_core.read_torch_ranks([(str(file), number, 0)]).tensors(), is_alone=True)
    _warn_of_unread(path, objects)
    try:
        mesh_shards.add_tensors(index, [(tensors, shards)], _OF_RANK_HINT)
    except CoverageError as error:
        if error.hint != _OF_RANK_HINT:
            raise  # parts of one tensor overlap
        kind = shards.get(str(error.key), "shard")
        raise UnsupportedError(
            f"{show(str(file))}: {show(str(error.key))} is a {kind}: each rank saved its shard of the tensors, and no "
            "rank the whole model",
            path=str(file),
            key=error.key,
            hint=_OF_RANK_HINT,
        ) from None
    return _FileData(
        traits=names.TRAITS._replace(
            has_sums=torch_head.is_zip(file.read_head(torch_head.HEAD_BYTES, follow_links=True))
        ),
        path=path,
        file=file,
        index=index,
        method=method,
        objects=dict(objects),
    )


def _warn_of_unread(path: Location, objects: Sequence[tuple[str, object]]) -> None:
    """Tell of tensors that are not read: those in objects of other classes, such as a whole module."""
    opaque = [(name, value) for name, value in objects if isinstance(value, _core.Opaque)]
    holders = _holders(value for _, value in opaque)
    unread = [(name, value) for name, value in opaque if id(value) in holders]
    if unread:
        of = listed((f"{show(name)} ({value.name})" for name, value in unread), _MAX_NAMED)
        _log.warning("%s: tensors inside objects of classes are not read: %s. Save their `state_dict()`", path, of)
    arrays = [name for name, value in objects if isinstance(value, np.ndarray)]
    if arrays:
        of = listed(map(show, arrays), _MAX_NAMED)
        _log.warning(
            "%s: numpy arrays are values beside the tensors, not tensors: %s. Save `torch.from_numpy(...)` of them",
            path,
            of,
        )


def _holders(values: Iterable[object]) -> set[int]:
    """The addresses of the objects among some values that hold tensors, and of all containers of these.

    Objects of a file can share what they consist of: each is looked at once.
    """
    inside: dict[int, list[int]] = {}
    found: list[int] = []
    open_ = list(values)
    seen: set[int] = set()
    while open_:
        one = open_.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        parts: Iterable[object] = ()
        if isinstance(one, _core.Opaque):
            if run_state.is_tensor(one) or one.name == "torch.storage":
                found.append(id(one))
                continue
            parts = one.arguments, one.state, one.items, one.appended
        elif isinstance(one, dict):
            parts = one.values()
        elif isinstance(one, list | tuple):
            parts = one
        for part in parts:
            if isinstance(part, _core.Opaque | dict | list | tuple):
                inside.setdefault(id(part), []).append(id(one))
                open_.append(part)
    holders: set[int] = set()
    while found:
        address = found.pop()
        if address not in holders:
            holders.add(address)
            found += inside.get(address, ())
    return holders


def open_single(folder: Location, method: _core.ReadMethod) -> CheckpointData:
    """Open the one file of a folder. Raises as `reshard.open`."""
    weight_map.check_config(folder, names.SINGLE_FILE)
    if (folder / names.INDEX_FILE).is_file():
        _log.warning(
            "%s holds %s, which is read, as transformers does, and an index of several files, which is not",
            folder,
            names.SINGLE_FILE,
        )
    return open_file(folder, folder / names.SINGLE_FILE, method)


def open_index(folder: Location, method: _core.ReadMethod) -> CheckpointData:
    """Open the files that the index of a folder names. Raises as `reshard.open`."""
    index = _core.Index()
    listing = folder / names.INDEX_FILE
    file_of = weight_map.read(listing)
    weight_map.check_config(folder, names.INDEX_FILE)
    # Files of a hub cache are symbolic links into its store: here links are followed.
    weight_map.add_tensors(index, folder, file_of, partial(index.add_torch_file, method=method))
    weight_map.add_unlisted(index, folder, names.INDEX_FILE, add=_core.Index.add_torch_file)
    return CheckpointData(traits=names.TRAITS, path=folder, index=index, method=method, listing=listing)
