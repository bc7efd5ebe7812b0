"""Reads the weights of a checkpoint of nanotron: a shard is placed by the slices that its metadata records."""

from __future__ import annotations

import itertools
import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reshard import _core
from reshard.documents.strict_json import read_json
from reshard.errors import CheckpointNotFoundError, CoverageError, DamagedFileError, UnsupportedError
from reshard.formats.base import CheckpointData
from reshard.formats.nanotron import names
from reshard.values.indexing import row_major
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reshard.storage.location import Location

_log = logging.getLogger("reshard")

_MOST_BYTES = 16 << 20
_MOST_FOLDERS = 1 << 20
_MOST_DEPTH = 64
_MOST_STEPS = 1 << 62
_MOST_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class _NanotronData(CheckpointData):
    """The weights, with the ranks that saved them.

    Attributes:
        axes: sizes of the axes of the ranks.
    """

    axes: Mapping[str, int] = field(default_factory=dict)

    def rank_axes(self) -> Mapping[str, int]:
        """From the names of the files."""
        return self.axes


class _File:
    """A file with a parameter or a shard of one."""

    def __init__(self, path: Location, place: names.Place | None) -> None:
        self.path = path
        self.place = place


def open_folder(folder: Location, method: _core.ReadMethod) -> CheckpointData:
    """Open the weights of a checkpoint.

    Raises:
        CheckpointNotFoundError: there are no weights, or the shard of a rank is missing.
        DamagedFileError: the description of a shard is invalid; files are of several saves; or as `reshard.open`.
        CoverageError: the shards of a parameter leave a hole.
        UnsupportedError: a later version of nanotron wrote it.
        StorageError: as `reshard.open`.
    """
    iteration, n_tp = _metadata(folder / names.METADATA_FILE)
    index = _core.Index()
    sizes: dict[tuple[int, int], Location] = {}
    for key, files in sorted(_parameters(folder / names.MODEL_FOLDER).items()):
        _add(index, key, files, method)
        for file in files:
            if file.place is not None:
                sizes.setdefault(file.place.sizes[:2], file.path)
    if not len(index):
        raise CheckpointNotFoundError(
            f"{show(str(folder / names.MODEL_FOLDER))} holds no weights", path=str(folder / names.MODEL_FOLDER)
        )
    index.check_coverage()
    if len(sizes) > 1:
        (first, at), (second, other), *_ = sizes.items()
        raise DamagedFileError(
            f"{show(str(other))} is of a save with {second[0]} pipeline and {second[1]} tensor-parallel ranks, and "
            f"{show(str(at))} of one with {first[0]} and {first[1]}",
            path=str(other),
            hint="remove the files of the other save",
        )
    for of_model, path in sizes.items():
        if n_tp is not None and of_model[1] != n_tp:
            raise DamagedFileError(
                f"{show(str(path))} is of a save with {of_model[1]} tensor-parallel ranks, and "
                f"{names.METADATA_FILE} says {n_tp}",
                path=str(path),
                hint="the files are of different saves",
            )
    if (folder / "optimizer").is_folder():
        _log.warning("%s: the weights are read; the optimizer of nanotron is not", folder)
    axes = dict(zip(("pp", "tp"), next(iter(sizes)), strict=False)) if sizes else {}
    return _NanotronData(traits=names.TRAITS, path=folder, index=index, method=method, iteration=iteration, axes=axes)


def _metadata(path: Location) -> tuple[int | None, int | None]:
    """The step and the number of tensor-parallel ranks that the description of a checkpoint says."""
    content = read_json(path, _MOST_BYTES, follow_links=True)
    version = names.parse_version(content.get("version")) if isinstance(content, dict) else None
    if not isinstance(content, dict) or version is None:
        raise DamagedFileError(f"{show(str(path))} has no `version`", path=str(path))
    if version > names.NEWEST_VERSION:
        raise UnsupportedError(
            f"{show(str(path))} is of version {version[0]}.{version[1]}, and versions up to "
            f"{names.NEWEST_VERSION[0]}.{names.NEWEST_VERSION[1]} are read",
            path=str(path),
            hint="convert it to a Hugging Face folder with nanotron",
        )
    metas, n_tp = content.get("metas"), content.get("tp")
    step = metas.get("last_train_step") if isinstance(metas, dict) else None
    return (
        step if type(step) is int and 0 <= step <= _MOST_STEPS else None,
        n_tp if type(n_tp) is int else None,
    )


def _parameters(folder: Location) -> dict[str, list[_File]]:
    """The files of each parameter."""
    found: dict[str, list[_File]] = {}
    for path, modules in _files(folder):
        parsed = names.parse_file(path.name)
        if parsed is None:
            raise DamagedFileError(
                f"{show(str(path))} is not called as a parameter of nanotron",
                path=str(path),
                hint="move the file to another folder",
            )
        found.setdefault(".".join((*modules, parsed[0])), []).append(_File(path, parsed[1]))
    return found


def _files(folder: Location) -> Iterator[tuple[Location, tuple[str, ...]]]:
    """The weight files below a folder, each with the folders that lead to it."""
    open_: list[tuple[Location, tuple[str, ...]]] = [(folder, ())]
    for n in itertools.count(1):
        if not open_:
            return
        here, modules = open_.pop()
        if n > _MOST_FOLDERS or len(modules) > _MOST_DEPTH:
            raise DamagedFileError(f"{show(str(here))}: its folder holds too many folders", path=str(folder))
        for entry in here.entries():
            path = here / entry.name
            if entry.kind == "folder":
                open_.append((path, (*modules, entry.name)))
            elif entry.kind == "link" and path.is_folder():
                raise UnsupportedError(f"{show(str(path))} is a link to a folder, which is not read", path=str(path))
            elif entry.name.endswith(".safetensors"):
                yield path, modules


def _add(index: _core.Index, key: str, files: Sequence[_File], method: _core.ReadMethod) -> None:
    """Add a parameter of one file or of the shards of several ranks."""
    of_kind = {file.place is None for file in files}
    if len(of_kind) > 1 or (of_kind == {True} and len(files) > 1):
        raise DamagedFileError(
            f"{show(str(files[0].path))} and {show(str(files[1].path))} both hold {show(key)}",
            path=str(files[1].path),
            key=key,
            hint="one of them is of another save: remove it",
        )
    _check_ranks(key, files)
    whole, first = _stored(index, key, files[0], method)
    stored = [first]
    for file in files[1:]:
        own, array = _stored(index, key, file, method)
        if own != whole:
            raise _damaged(
                file, key, f"it is {own[0]} of shape {own[1]}, and {whole[0]} of shape {whole[1]} in the others"
            )
        stored.append(array)
    n_held = sum(math.prod(tile.shape) for one in stored for tile in one.tiles)
    if n_held != math.prod(whole[1]):
        raise CoverageError(
            f"{show(str(files[0].path.parent))}: {show(key)} has {math.prod(whole[1])} elements, and its files hold "
            f"{n_held} of them",
            path=str(files[0].path),
            key=key,
            hint="the files are of different saves",
        )
    index.add_tiles(key, *whole, stored)


def _stored(
    index: _core.Index, key: str, file: _File, method: _core.ReadMethod
) -> tuple[tuple[str, tuple[int, ...]], _core.StoredArray]:
    """Open a file of a parameter: the dtype and the shape of the whole, and what the file holds of it."""
    number = index.add_file(str(file.path), method=method)
    held = {one.name: one for one in index.file_tensors(number)}
    tensor = held.get(names.TENSOR)
    if tensor is None or not held.keys() <= names.FLAGS:
        raise _damaged(file, key, f"it holds {listed(map(show, held), _MOST_NAMED)}, expected {names.TENSOR}")
    metadata = index.file_metadata(number) or {}
    if file.place is None:
        shape, start = tensor.shape, (0,) * len(tensor.shape)
        regions = [names.StoredRegion(start, start, shape)]
    else:
        _check_version(file, key, metadata.get("version"))
        described = names.parse_shape(metadata.get("unsharded_shape"))
        if described is None:
            raise _damaged(file, key, "its metadata has no shape of the whole tensor, `unsharded_shape`")
        shape = described
        pairs = names.parse_slices(metadata.get("local_global_slices_pairs"), tensor.shape, shape)
        if pairs is None:
            raise _damaged(
                file,
                key,
                f"`local_global_slices_pairs` in its metadata are no slices of {tensor.shape} and of {shape}",
            )
        regions = pairs
    strides = row_major(tensor.shape)
    tiles = [
        _core.Tile(region.offset, region.shape, sum(map(int.__mul__, region.local, strides)), strides)
        for region in regions
        if 0 not in region.shape
    ]
    return (tensor.dtype, shape), _core.StoredArray(number, names.TENSOR, tensor.shape, tiles)


def _check_ranks(key: str, files: Sequence[_File]) -> None:
    """Refuse shards of which some are missing."""
    places = [file.place for file in files if file.place is not None]
    if not places:
        return
    sizes = {(place.rank[0], place.sizes) for place in places}
    there = {place.rank[1:] for place in places}
    if len(sizes) > 1 or len(there) < len(places):
        raise DamagedFileError(
            f"{show(str(files[0].path.parent))} holds shards of {show(key)} of several saves",
            path=str(files[0].path),
            key=key,
            hint="remove the files of the other save",
        )
    [(_, (_, n_tp, n_ep))] = sizes
    wrong = next((one for one in places if any(map(int.__ge__, one.rank, one.sizes))), None)
    if wrong is not None:
        raise _damaged(files[places.index(wrong)], key, "the number of its rank is not below the number of ranks")
    count = n_tp * n_ep
    if len(there) < count:
        of_all = ((tp, ep) for tp in range(n_tp) for ep in range(n_ep))
        missing = itertools.islice((one for one in of_all if one not in there), _MOST_NAMED)
        words = [f"tp-rank-{tp}-of-{n_tp}" + (f"_exp-rank-{ep}-of-{n_ep}" if n_ep > 1 else "") for tp, ep in missing]
        raise CheckpointNotFoundError(
            f"{show(str(files[0].path.parent))} holds {len(there)} of {count} shards of {show(key)}; missing: "
            f"{listed(words, _MOST_NAMED, n_items=count - len(there))}",
            path=str(files[0].path.parent),
            key=key,
            hint="copy the files of all ranks into one folder",
        )


def _check_version(file: _File, key: str, text: object) -> None:
    version = names.parse_version(text)
    if version is None:
        raise _damaged(file, key, "its metadata has no `version`")
    if version > names.NEWEST_VERSION:
        raise UnsupportedError(
            f"{show(str(file.path))} is of version {version[0]}.{version[1]}, which is not read",
            path=str(file.path),
            key=key,
        )


def _damaged(file: _File, key: str, fault: str) -> DamagedFileError:
    return DamagedFileError(f"{show(str(file.path))}: {show(key)}: {fault}", path=str(file.path), key=key)
