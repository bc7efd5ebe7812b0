"""Arrays of several ranks that are read as copies of each other.

A tensor that is not divided is on all tensor-parallel ranks, a word embedding that is the output layer too is on the
first and the last pipeline stage, and what a device mesh replicates is on each rank of that axis. Such copies are
compared before the tensor is first read, in bounded memory.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Self

from reshard import _core, dtypes
from reshard._core import StoredArray, Tile
from reshard.errors import MismatchError
from reshard.formats.outputs import load_all
from reshard.values.indexing import row_major
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_BATCH_BYTES = 4 << 20
_ROUND_ARRAYS = 1 << 14


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


class Replicas:
    """The copies of each tensor that has any, and which of them have been compared."""

    def __init__(self, copies: Mapping[str, Sequence[Sequence[HeldArray]]], hint: str) -> None:
        """Note the copies.

        Args:
            copies: by key, groups of arrays that are read as copies of each other.
            hint: for the message about copies that differ.
        """
        self._copies = copies
        self._hint = hint
        self._equal: set[str] = set()

    @cached_property
    def _keys_of(self) -> Mapping[tuple[int, str], set[str]]:
        """The keys of the arrays of each stored array."""
        keys_of: dict[tuple[int, str], set[str]] = {}
        for key, of_key in self._copies.items():
            for array in (array for group in of_key for array in group):
                keys_of.setdefault((array.file, array.stored), set()).add(key)
        return keys_of

    def check(self, index: _core.Index, keys: Iterable[str]) -> None:
        """Compare the copies of which some tensors consist, unless that was done before.

        Args:
            index: an index of the files.
            keys: tensors of the index, also of one with other names.

        Raises:
            MismatchError: copies differ.
            DamagedFileError, StorageError: while reading.
        """
        pending: set[str] = set()
        for key in keys if self._copies else ():
            if key in self._copies:
                pending.add(key)
                continue
            for stored in index.stored(key):
                pending |= self._keys_of.get((stored.file, stored.name), set())
        pending -= self._equal
        if not pending:
            return
        groups = ((key, group) for key in sorted(pending) for group in self._copies[key])
        different = next(_different(index, groups), None)
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
    return next(_different(index, [("", arrays)]), None) is None


def _different(index: _core.Index, groups: Iterable[_Group]) -> Iterator[tuple[str, int, int]]:
    """The key of arrays that differ, with their ranks."""
    again = index.files_again(range(index.n_files))
    first = 0
    try:
        for described in _rounds(groups):
            for n, (_, group) in enumerate(described, first):
                # One after the other in the first dim of one tensor: of many small ones an index has less to hold.
                shape = group[0].shape or (1,)
                stored = []
                for i, array in enumerate(group):
                    strides = (row_major(array.shape) if array.strides is None else array.strides) or (1,)
                    stored.append(array.tiled([Tile((i * shape[0], *(0 for _ in shape[1:])), shape, 0, strides)]))
                again.add_tiles(str(n), group[0].dtype, (len(group) * shape[0], *shape[1:]), stored)
            for batch in _batches(described):
                yield from _different_of(again, described, first, batch)
            first += len(described)
    finally:
        again.close()


def _different_of(
    again: _core.Index, groups: Sequence[_Group], first: int, batch: Sequence[_Unit]
) -> Iterator[tuple[str, int, int]]:
    """As `_different`, of the rows of a batch. The groups are those from number `first` on of the index."""
    request = _core.Request()
    for n, (start, *rest), shape in batch:
        group = groups[n][1]
        n_rows = (group[0].shape or (1,))[0]
        for i in range(len(group)):
            request.add_region(f"{first + n} {i}", str(first + n), (i * n_rows + start, *rest), shape)
    found = load_all(again.plan(request))
    for n, *_ in batch:
        key, group = groups[n]
        expected = found[f"{first + n} 0"].tobytes()
        for i in range(1, len(group)):
            if found[f"{first + n} {i}"].tobytes() != expected:
                yield key, group[0].rank, group[i].rank


def _rounds(groups: Iterable[_Group]) -> Iterator[list[_Group]]:
    """Groups that are described together: a run of 256 ranks can have a million copies."""
    described: list[_Group] = []
    n_arrays = 0
    for one in groups:
        described.append(one)
        n_arrays += len(one[1])
        if n_arrays >= _ROUND_ARRAYS:
            yield described
            described, n_arrays = [], 0
    if described:
        yield described


_Group = tuple[str, "Sequence[HeldArray]"]
_Unit = tuple[int, tuple[int, ...], tuple[int, ...]]


def _batches(groups: Sequence[_Group]) -> Iterator[list[_Unit]]:
    """Rows that are read together: number of the group, offset and shape. A group is once in a batch."""
    batch: list[_Unit] = []
    n_bytes = 0
    for n, (_, group) in enumerate(groups):
        shape, bits = group[0].shape or (1,), dtypes.bits(group[0].dtype) * len(group)
        rest = tuple(shape[1:])
        row = max(1, math.prod(rest) * bits // 8)
        rows = max(1, _BATCH_BYTES // row)
        for start in range(0, shape[0], rows):
            unit_shape = (min(rows, shape[0] - start), *rest)
            size = math.prod(unit_shape) * bits // 8
            if batch and (start or n_bytes + size > _BATCH_BYTES):
                yield batch
                batch, n_bytes = [], 0
            batch.append((n, (start, *(0 for _ in rest)), unit_shape))
            n_bytes += size
    if batch:
        yield batch
