"""`tiles.json`, a file of this package: where the tensors lie whose layout no other file of a checkpoint describes.

Beside a `metadata.json` it describes the tensors that `metadata.json` cannot; beside plain shard files, one for each
rank, it describes all tensors. MindSpore Transformers ignores it. It is one JSON object:

    {"version": 1,
     "layout": the mapping of the layout file by which the tensors were cut, or null,
     "tensors": {key: {"dtype": safetensors name, "shape": [...], "overlapping": whether regions may overlap,
                       "stored": [{"file": name, "name": name in the file, "shape": [...],
                                   "tiles": [[offset, shape, local_offset, local_strides], ...]}, ...]}}}

In a tile, the region `offset, shape` of the tensor lies in the stored array at element `local_offset` with element
strides `local_strides`. The core checks that the tiles cover their tensor.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard._core import Tile
from reshard.documents.strict_json import parse_json
from reshard.errors import ArgumentError, DamagedFileError, ReshardError, UnsupportedError
from reshard.storage.location import locate
from reshard.storage.names import component_fault
from reshard.values.words import show

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence

    from reshard.storage.location import Location

TILES_FILE = "tiles.json"
MAX_BYTES = 256 << 20

_VERSION = 1
_END_BYTES = 64  # behind the tensors
_MAX_TENSORS = 1_000_000
_MAX_DIMS = 32
_MAX_NAME_BYTES = 1024
_DTYPE = re.compile("[A-Z][A-Z0-9_]{1,15}")


class TiledArray(NamedTuple):
    """One array in one file, and the tiles of the tensor in it.

    Attributes:
        file: name of the file, in the same folder.
        name: name of the array in it.
        shape: its shape, in elements.
        tiles: each inside the tensor and inside the array.
    """

    file: str
    name: str
    shape: tuple[int, ...]
    tiles: tuple[Tile, ...]


class TiledTensor(NamedTuple):
    """One tensor.

    Attributes:
        dtype: its safetensors name.
        shape: the global shape, in elements.
        overlapping: whether stored regions may overlap without being equal.
        stored: the arrays that hold it.
    """

    dtype: str
    shape: tuple[int, ...]
    overlapping: bool
    stored: tuple[TiledArray, ...]


class TilesFile(NamedTuple):
    """The content of the file.

    Attributes:
        layout: the layout file's mapping, unchecked, or None.
        tensors: by key, in the file's order.
    """

    layout: Mapping[str, Any] | None
    tensors: Mapping[str, TiledTensor]


class Builder:
    """Collects the content of the file while the shard files are planned, one array after the other.

    Example:
        >>> builder = Builder()
        >>> for rank in (0, 1):
        ...     tile = Tile((2 * rank,), (2,), 0, (1,))
        ...     builder.add("w", "F32", (4,), TiledArray(f"rank_{rank}.safetensors", "w", (2,), (tile,)))
        >>> [stored.file for stored in builder.build().tensors["w"].stored]
        ['rank_0.safetensors', 'rank_1.safetensors']
    """

    def __init__(self) -> None:
        self._tensors: dict[str, tuple[str, tuple[int, ...], bool]] = {}
        self._stored: dict[str, list[TiledArray]] = {}

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, key: object) -> bool:
        return key in self._tensors

    def expect(self, key: str, dtype: str, shape: Sequence[int], *, overlapping: bool = False) -> None:
        """Give a tensor its place among the others before its arrays are added.

        Args:
            key: as in `add`, like the others.
            dtype: as there.
            shape: as there.
            overlapping: as there.

        Raises:
            ArgumentError: as `add`.
        """
        facts = (dtype, tuple(shape), overlapping)
        if self._tensors.setdefault(key, facts) != facts:
            raise ArgumentError(f"{show(key)} is {facts} here and {self._tensors[key]} before", key=key)
        self._stored.setdefault(key, [])

    def is_stored(self, key: str) -> bool:
        """Whether an array of the tensor was added."""
        return bool(self._stored.get(key))

    def add(self, key: str, dtype: str, shape: Sequence[int], stored: TiledArray, *, overlapping: bool = False) -> None:
        """Add one array that holds a part of a tensor.

        Args:
            key: the tensor.
            dtype: its safetensors name.
            shape: its global shape, in elements.
            stored: the array.
            overlapping: whether stored regions of the tensor may overlap.

        Raises:
            ArgumentError: the tensor was added before with another dtype or shape.
        """
        self.expect(key, dtype, shape, overlapping=overlapping)
        self._stored[key].append(stored)

    def build(self, layout: Mapping[str, Any] | None = None) -> TilesFile:
        """The content of the file, with the layout by which the tensors were cut."""
        return TilesFile(
            layout, {key: TiledTensor(*facts, tuple(self._stored[key])) for key, facts in self._tensors.items()}
        )


def write(path: str | os.PathLike[str], content: TilesFile, mode: int = 0o666, *, durable: bool = True) -> None:
    """Write the file atomically, tensor by tensor.

    Args:
        path: the file.
        content: what is written.
        mode: permission bits before the umask is applied.
        durable: whether the file and its folder are synced.

    Raises:
        StorageError: the operating system reported an error; the file that was there before is unchanged.
    """
    with locate(path).writing(mode, durable=durable) as file:
        for piece in pieces(content):
            file.write(piece)


def pieces(content: TilesFile) -> Iterator[bytes]:
    """The text of the file, tensor by tensor. Raises UnsupportedError if it is longer than a reader accepts."""
    head = f'{{"version":{_VERSION},\n"layout":{_dump(content.layout)},\n"tensors":{{'.encode()
    yield head
    comma, n_bytes = "", len(head)
    for key, tensor in content.tensors.items():
        value = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "overlapping": tensor.overlapping,
            "stored": [
                {"file": one.file, "name": one.name, "shape": one.shape, "tiles": one.tiles} for one in tensor.stored
            ],
        }
        piece = f"{comma}\n{_dump(key)}:{_dump(value)}".encode()
        n_bytes += len(piece)
        if n_bytes > MAX_BYTES - _END_BYTES:
            raise UnsupportedError(
                f"{TILES_FILE} would have more than {MAX_BYTES >> 20} MiB: it lists the parts of "
                f"{len(content.tensors)} tensors on all ranks",
                key=key,
                hint="choose a layout in which fewer ranks hold a part of each tensor, such as one with `join`",
            )
        yield piece
        comma = ","
    yield b"}}\n"


# One encoder: `json.dumps` with options makes one in each call, and it is called for every tensor.
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _dump(value: object) -> str:
    return _ENCODER.encode(value)


# -- reading


def read(path: str | os.PathLike[str]) -> TilesFile:
    """Read the file, and check every name, number and shape in it.

    Raises:
        CheckpointNotFoundError: there is no such file.
        DamagedFileError: it is not such a file, or larger than 256 MiB; the message names the field.
        UnsupportedError: it has a later version.
        StorageError: it cannot be read.
    """
    return parse(locate(path).read_small(MAX_BYTES), str(path))


def is_ours(path: Location) -> bool:
    """Whether a file of this name is one of this package: no other writes it."""
    try:
        read(path)
    except ReshardError:
        return False
    return True


def parse(data: bytes, name: str) -> TilesFile:
    """The content of a file that was already read.

    Args:
        data: its bytes.
        name: its name in messages.

    Raises:
        DamagedFileError, UnsupportedError: as `read`.
    """
    content = parse_json(data, name)
    try:
        return _content(content)
    except _FormatError as fault:
        raise DamagedFileError(f"{show(name)}: {fault}", path=name) from None
    except UnsupportedError as error:
        raise UnsupportedError(f"{show(name)} {error.message}", path=name, hint="use a later release") from None


class _FormatError(Exception):
    """What is wrong, and where; `parse` adds the file."""


def _content(content: object) -> TilesFile:
    version = content.get("version", _VERSION) if isinstance(content, dict) else _VERSION
    if type(version) is not int:  # true is an integer to Python
        raise _FormatError("`version` is not an integer")
    if version != _VERSION:
        raise UnsupportedError(f"is of version {version}; this release reads version {_VERSION}")
    _, layout, tensors = _fields(content, "the file", ("version", "layout", "tensors"))
    if layout is not None and not isinstance(layout, dict):
        raise _FormatError("`layout` is neither an object nor null")
    if not isinstance(tensors, dict):
        raise _FormatError("`tensors` is not an object")
    if len(tensors) > _MAX_TENSORS:
        raise _FormatError(f"`tensors` has {len(tensors)} entries; at most {_MAX_TENSORS} are allowed")
    return TilesFile(layout, {_name(key, "a key"): _tensor(key, value) for key, value in tensors.items()})


def _tensor(key: str, value: object) -> TiledTensor:
    place = show(key)
    dtype, shape, overlapping, stored = _fields(value, place, ("dtype", "shape", "overlapping", "stored"))
    if not isinstance(dtype, str) or not _DTYPE.fullmatch(dtype):
        raise _FormatError(f"{place}: `dtype` is not the name of a dtype")
    if not isinstance(overlapping, bool):
        raise _FormatError(f"{place}: `overlapping` is not true or false")
    if not isinstance(stored, list):
        raise _FormatError(f"{place}: `stored` is not a list")
    extents = _numbers(shape, f"{place}: `shape`")
    return TiledTensor(dtype, extents, overlapping, tuple(_stored(one, place, extents) for one in stored))


def _stored(value: object, place: str, extents: tuple[int, ...]) -> TiledArray:
    file, name, shape, tiles = _fields(value, f"{place}: an entry of `stored`", ("file", "name", "shape", "tiles"))
    if not isinstance(file, str):
        raise _FormatError(f"{place}: `file` is not text")
    fault = component_fault(file)
    if fault is not None:
        raise _FormatError(f"{place}: the file name {show(file)} is refused: {fault}")
    stored_shape = _numbers(shape, f"{place}: the stored shape")
    if not isinstance(tiles, list):
        raise _FormatError(f"{place}: `tiles` is not a list")
    n_elements = math.prod(stored_shape)
    return TiledArray(
        file,
        _name(name, f"{place}: `name`"),
        stored_shape,
        tuple(_tile(tile, place, extents, n_elements) for tile in tiles),
    )


def _tile(value: object, place: str, extents: tuple[int, ...], n_elements: int) -> Tile:
    if not isinstance(value, list) or len(value) != 4:
        raise _FormatError(f"{place}: a tile is not a list of offset, shape, local offset and local strides")
    what = f"{place}: a tile"
    offset, shape, strides = (_numbers(value[i], what) for i in (0, 1, 3))
    local_offset = _number(value[2], what)
    if not len(offset) == len(shape) == len(strides) == len(extents):
        raise _FormatError(f"{place}: a tile has not as many dims as the tensor, {len(extents)}")
    if any(first + n > extent for first, n, extent in zip(offset, shape, extents, strict=True)):
        raise _FormatError(f"{place}: the tile at {offset} of shape {shape} leaves the tensor of shape {extents}")
    if 0 not in shape:
        last = local_offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        if last >= n_elements:
            raise _FormatError(f"{place}: the tile at {offset} ends at element {last} of an array of {n_elements}")
    return Tile(offset, shape, local_offset, strides)


def _fields(value: object, place: str, names: tuple[str, ...]) -> list[Any]:
    if not isinstance(value, dict):
        raise _FormatError(f"{place} is not an object")
    if set(value) != set(names):
        odd = min(set(value) ^ set(names))
        raise _FormatError(f"{place} {'lacks' if odd in names else 'has an unknown field'} {show(odd)}")
    return [value[name] for name in names]


def _name(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise _FormatError(f"{what} is not text")
    n_bytes = len(value.encode())
    if not 1 <= n_bytes <= _MAX_NAME_BYTES:
        raise _FormatError(f"{what} has {n_bytes} bytes; from 1 to {_MAX_NAME_BYTES} are allowed")
    if any(c < " " or "\x7f" <= c < "\xa0" for c in value):
        raise _FormatError(f"{what}, {show(value)}, has a control character in it")
    return value


def _numbers(value: object, what: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise _FormatError(f"{what} holds no list of numbers")
    if len(value) > _MAX_DIMS:
        raise _FormatError(f"{what} has {len(value)} dims; at most {_MAX_DIMS} are allowed")
    return tuple(_number(one, what) for one in value)


def _number(value: object, what: str) -> int:
    if type(value) is not int or value < 0:  # true and false are integers to Python
        raise _FormatError(f"{what} holds something else than integers from 0 on")
    return value
