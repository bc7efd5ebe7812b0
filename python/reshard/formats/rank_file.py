"""One rank's weight file, opened and checked: a `.safetensors` or a `.ckpt` file, told apart by what is in it.

What it holds are *local arrays*: a rank's own part of each key. Where these lie in the whole tensors the file does not
say; a strategy or a layout does, and `placed` shifts a local array to there. An array may be stored in several parts
(records of a `.ckpt` that was too large for one), which only this module and `ckpt` know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from reshard.errors import DamagedFileError, KeyNotFoundError
from reshard.formats.ckpt import names as ckpt
from reshard.storage.location import Location, locate
from reshard.words import show

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from reshard import _core

__all__ = ["LocalTensor", "Placed", "RankFile", "add_rank_file", "kind_of", "placed"]

Tile: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]
Placed: TypeAlias = list[tuple[int, str, tuple[int, ...], list[Tile]]]
"""`(file, stored name, stored shape, tiles)` of each part: what `Index.add_tiles` takes."""


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """What a rank's own file holds of a key.

    Attributes:
        dtype: its safetensors name, such as "BF16".
        shape: of the local array, in elements.
        parts: `(stored name, stored shape, tiles)`, the tiles in coordinates of the local array; one
            unless it was split.
    """

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[tuple[str, tuple[int, ...], tuple[Tile, ...]], ...]


@dataclass(frozen=True)
class RankFile:
    """A rank's weight file in an index.

    Attributes:
        file: its number in the index.
        path: where it lies.
        kind: its format.
        tensors: the local arrays by key, in the order of the file.
        metadata: `__metadata__` of a safetensors file; of a `.ckpt` nothing.
        strings: keys whose value is text and no tensor: they are reported and cannot be read.
        has_sum: whether a `.ckpt` ends with a sum of itself; None: its format has none.
    """

    file: int
    path: Location
    kind: Literal["safetensors", "ckpt"]
    tensors: Mapping[str, LocalTensor]
    metadata: Mapping[str, str]
    strings: tuple[str, ...]
    has_sum: bool | None = None


def add_rank_file(
    index: _core.Index,
    path: str | os.PathLike[str],
    *,
    follow_links: bool = False,
    method: _core.ReadMethod = "auto",
) -> RankFile:
    """Add a rank's weight file to an index: it is opened, and everything but the tensors' bytes is checked.

    Keys are not added; the caller does that, who knows where in the whole tensors the arrays lie (see `placed`).

    Args:
        index: what it is added to. After an error it keeps a file that nothing refers to.
        path: the file. Its format is told by its content.
        follow_links: whether the last component may be a symbolic link.
        method: how its bytes are read.

    Raises:
        CheckpointNotFoundError: there is no such file.
        DamagedFileError: it is empty, cut short, zeroed, or whatever else violates its format; or a link.
        UnsupportedError: it holds a type that is not known here.
        StorageError: it cannot be read.

    Example:
        >>> import numpy as np, reshard
        >>> from reshard import _core
        >>> reshard.save_file({"w": np.zeros((2, 3), np.float32)}, "rank_0.safetensors")
        >>> add_rank_file(_core.Index(), "rank_0.safetensors").tensors["w"].shape
        (2, 3)
    """
    path = locate(path)
    kind = kind_of(path, follow_links=follow_links)
    add = index.add_ckpt_file if kind == "ckpt" else index.add_file
    file = add(str(path), follow_links=follow_links, method=method)
    tensors = {
        name: LocalTensor(dtype, shape, tuple((stored, extents, tuple(tiles)) for stored, extents, tiles in parts))
        for name, dtype, shape, parts in index.file_arrays(file)
    }
    has_sum = None
    if kind == "ckpt":
        has_sum = ckpt.has_sum(locate(path).read_tail(ckpt.TAIL_BYTES, follow_links=follow_links))
    metadata, strings = index.file_metadata(file) or {}, tuple(index.file_strings(file))
    return RankFile(file, path, kind, tensors, metadata, strings, has_sum)


def kind_of(path: str | os.PathLike[str], *, follow_links: bool = False) -> Literal["safetensors", "ckpt"]:
    """What a weight file is, by its content; of a file that looks like neither its suffix decides whose errors it gets.

    Raises:
        CheckpointNotFoundError: there is no such file.
        DamagedFileError: it is no regular file.
        StorageError: it cannot be read.

    Example:
        >>> kind_of("rank_0/llama_rank_0-10_2.ckpt")  # doctest: +SKIP
        'ckpt'
    """
    head = locate(path).read_head(ckpt.HEAD_BYTES, follow_links=follow_links)
    if ckpt.is_head(head):
        return "ckpt"
    is_named_ckpt = locate(path).suffix == ckpt.SUFFIX and not ckpt.is_safetensors_head(head)
    return "ckpt" if is_named_ckpt else "safetensors"


def placed(rank_file: RankFile, key: str, offset: Sequence[int]) -> Placed:
    """The parts of a local array, shifted to where it lies in the whole tensor.

    Args:
        rank_file: whose array it is.
        key: which.
        offset: the global element at which the local array begins, one a dim.

    Returns:
        What `Index.add_tiles` takes; the lists of several ranks are joined.

    Raises:
        KeyNotFoundError: the file does not hold the key.
        DamagedFileError: the array has another number of dims than the offset.

    Example:
        >>> index.add_tiles("w", "F32", (4, 3), placed(a, "w", (0, 0)) + placed(b, "w", (2, 0)))  # doctest: +SKIP
    """
    tensor = rank_file.tensors.get(key)
    if tensor is None:
        raise KeyNotFoundError(
            f"{show(str(rank_file.path))} does not hold {show(key)}", path=str(rank_file.path), key=key
        )
    if len(offset) != len(tensor.shape):
        raise DamagedFileError(
            f"{show(key)} in {show(str(rank_file.path))} has shape {tensor.shape}, {len(offset)} dims were expected",
            path=str(rank_file.path),
            key=key,
        )
    return [
        (rank_file.file, name, shape, [_shifted(tile, offset) for tile in tiles]) for name, shape, tiles in tensor.parts
    ]


def _shifted(tile: Tile, offset: Sequence[int]) -> Tile:
    start, shape, local_offset, strides = tile
    return tuple(a + b for a, b in zip(start, offset, strict=True)), shape, local_offset, strides
