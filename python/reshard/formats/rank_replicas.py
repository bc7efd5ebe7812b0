"""Arrays of several ranks that are read as copies of each other.

A tensor that is not divided is on all tensor-parallel ranks, a word embedding that is the output layer too is on the
first and the last pipeline stage, and what a device mesh replicates is on each rank of that axis. Such copies are
compared before the tensor is first read, in bounded memory.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

from reshard._core import StoredArray, Tile
from reshard.errors import MismatchError
from reshard.values.indexing import in_batches
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from reshard import _core

_BATCH_ARRAYS = 1 << 14
"""Copies of which the core is told at once: a run of 256 ranks can have a million."""


class HeldArray(NamedTuple):
    """An array of one rank.

    Attributes:
        rank: the number of the rank.
        file: the number of its file.
        stored: the name of the stored array that it lies in.
        stored_shape: the shape of that array.
        start: its first element in that array.
        shape: its shape in elements.
        dtype: its safetensors name.
        strides: elements from one to the next, by dim; None: row-major.
    """

    rank: int
    file: int
    stored: str
    stored_shape: tuple[int, ...]
    start: int
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None

    def part(self, tile: Tile, offset: tuple[int, ...], shape: tuple[int, ...]) -> Self:
        """A region of a tensor that lies in one of the tiles of this array.

        Args:
            tile: the tile.
            offset: the first element of the region in the tensor.
            shape: its extent.
        """
        steps = zip(offset, tile.offset, tile.local_strides, strict=True)
        start = self.start + tile.local_offset + sum((at - first) * stride for at, first, stride in steps)
        return self._replace(start=start, shape=shape, strides=tile.local_strides)

    def tiled(self, tiles: Iterable[Tile]) -> StoredArray:
        """The stored array with these tiles, whose offsets count from the start of this array."""
        moved = [tile._replace(local_offset=tile.local_offset + self.start) for tile in tiles]
        return StoredArray(self.file, self.stored, self.stored_shape, moved)


def copies_of(arrays: Iterable[tuple[HeldArray, Sequence[Tile]]], shape: tuple[int, ...]) -> list[list[HeldArray]]:
    """The groups of arrays, and of regions in them, that are copies of each other.

    Args:
        arrays: each array with the tiles of the tensor in it. All tiles together cover the tensor.
        shape: the shape of the tensor.

    Example:
        >>> tiles = {0: [Tile((0,), (3,), 0, (1,))], 1: [Tile((0,), (1,), 0, (1,)), Tile((3,), (2,), 1, (1,))]}
        >>> held = [(HeldArray(rank, rank, "w", (3,), 0, (3,), "F32"), of_rank) for rank, of_rank in tiles.items()]
        >>> [[(one.rank, one.start, one.shape) for one in group] for group in copies_of(held, (5,))]
        [[(0, 0, (1,)), (1, 0, (1,))]]
    """
    by_tiles: dict[tuple[Tile, ...], list[HeldArray]] = {}
    for array, tiles in arrays:
        by_tiles.setdefault(tuple(tiles), []).append(array)
    groups = [group for group in by_tiles.values() if len(group) > 1 and 0 not in group[0].shape]
    if sum(math.prod(tile.shape) for tiles in by_tiles for tile in tiles) > math.prod(shape):
        groups += _overlaps((tile, held[0]) for tiles, held in by_tiles.items() for tile in tiles)
    return groups


def _overlaps(tiles: Iterable[tuple[Tile, HeldArray]]) -> Iterator[list[HeldArray]]:
    """The regions that lie in two arrays. A region in many arrays is compared with the first of them."""
    first: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[Tile, HeldArray]] = {}
    for tile, array in tiles:
        same = first.get((tile.offset, tile.shape))
        for other, of_other in first.values() if same is None else (same,):
            ends = zip(tile.offset, tile.shape, other.offset, other.shape, strict=True)
            offset = tuple(map(max, tile.offset, other.offset))
            extent = tuple(min(a + n, b + m) - at for (a, n, b, m), at in zip(ends, offset, strict=True))
            if all(n > 0 for n in extent):
                yield [of_other.part(other, offset, extent), array.part(tile, offset, extent)]
        if same is None:
            first[tile.offset, tile.shape] = tile, array


class Copies(Protocol):
    """Which stored arrays are read as copies of each other."""

    def __contains__(self, key: object, /) -> bool:
        """Whether there are copies of a tensor."""

    def __len__(self) -> int:
        """How many tensors have copies."""

    def keys_of(self, stored: StoredArray, /) -> Collection[str]:
        """The tensors of which a stored array holds copies; there can be others among them."""

    def different(self, index: _core.Index, keys: Sequence[str], /) -> tuple[str, int, int] | None:
        """The first of some tensors of which copies differ, and two ranks that hold different ones."""


class ListedCopies(dict[str, list[list[HeldArray]]]):
    """By key, groups of arrays that are read as copies of each other."""

    @cached_property
    def _keys_of(self) -> Mapping[tuple[int, str], set[str]]:
        """The keys of the arrays of each stored array."""
        keys_of: dict[tuple[int, str], set[str]] = {}
        for key, of_key in self.items():
            for array in (array for group in of_key for array in group):
                keys_of.setdefault((array.file, array.stored), set()).add(key)
        return keys_of

    def keys_of(self, stored: StoredArray) -> Collection[str]:
        """As `Copies.keys_of`."""
        return self._keys_of.get((stored.file, stored.name), ())

    def different(self, index: _core.Index, keys: Sequence[str]) -> tuple[str, int, int] | None:
        """As `Copies.different`."""
        groups = ((key, group) for key in keys for group in self[key])
        for batch in in_batches(groups, lambda one: len(one[1]), _BATCH_ARRAYS):
            found = index.first_different([group for _, group in batch])
            if found is not None:
                key, group = batch[found[0]]
                return key, group[0].rank, group[found[1]].rank
        return None


class Replicas:
    """The copies of each tensor that has any, and which of them have been compared."""

    def __init__(self, index: _core.Index, copies: Copies, hint: str) -> None:
        """Note the copies.

        Args:
            index: with the tensors.
            copies: which arrays of them are copies.
            hint: for the message about copies that differ.
        """
        self._index = index
        self._copies = copies
        self._hint = hint
        self._equal: set[str] = set()

    def check(self, index: _core.Index, keys: Iterable[str]) -> None:
        """Compare the copies of which some tensors consist, unless that was done before.

        Args:
            index: that of the tensors, or one of the same files with other tensors.
            keys: tensors of this index.

        Raises:
            MismatchError: copies differ.
            DamagedFileError, StorageError: while reading.
        """
        pending: set[str] = set()
        if index is self._index:
            pending.update(key for key in keys if key in self._copies)
        elif self._copies:
            stored = (one for key in keys for one in index.stored(key))
            pending.update(key for one in stored for key in self._copies.keys_of(one))
        pending -= self._equal
        different = self._copies.different(index, sorted(pending)) if pending else None
        if different is not None:
            key, rank, other = different
            raise MismatchError(
                f"{show(key)} is read as one value, equal on several ranks, but the bytes on rank {other} differ from "
                f"those on rank {rank}",
                key=key,
                hint=self._hint,
            )
        self._equal |= pending


def are_equal(index: _core.Index, arrays: Sequence[HeldArray]) -> bool:
    """Whether arrays of the files of an index hold the same bytes."""
    return index.first_different([arrays]) is None
