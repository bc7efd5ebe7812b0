"""Which ranks hold which shard of a Checkpoint 2.0, and which of them writes it into which file.

A *shard* is named by its tensor and one number, its `global_offset`: the row-major index of the shard in the grid of
cuts. Ranks whose shards have the same name hold the same bytes. Everything here is plain numbers; the shape of
`metadata.json` is known to `checkpoint2_metadata`, the bytes to the core.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from reshard.errors import ArgumentError, LayoutError
from reshard.formats.checkpoint2.names import Part, shard_file_name
from reshard.words import show

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["FilePlan", "PlannedFile", "Shard", "TensorRecord", "World", "assign", "shard_id", "shards_of"]

Place = tuple[tuple[tuple[str, ...], int], ...]


@dataclass(frozen=True)
class World:
    """The device mesh of a run.

    Attributes:
        axes: `(name, size)`; the first varies slowest.
        ranks: the global rank at each mesh point, row-major; none: 0, 1, 2, ...

    Raises:
        LayoutError: a name or a rank stands twice, a size is below 1, or the number of ranks is not that of the points.

    Example:
        >>> World((("pp", 2), ("tp", 2))).held(((("pp",), 1),))
        (2, 3)
    """

    axes: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", tuple((name, size) for name, size in self.axes))
        n_points = math.prod(size for _, size in self.axes)
        object.__setattr__(self, "ranks", tuple(self.ranks) or tuple(range(n_points)))
        if len(self.sizes) != len(self.axes) or any(size < 1 for _, size in self.axes):
            raise LayoutError(f"a mesh has axes of different names and sizes from 1 on, not {dict(self.axes)}")
        if len(set(self.ranks)) != len(self.ranks) or len(self.ranks) != n_points or min(self.ranks) < 0:
            raise LayoutError(f"a mesh of {n_points} points needs as many different ranks, not {len(self.ranks)}")

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Size of each axis, by name."""
        return dict(self.axes)

    @cached_property
    def n_slots(self) -> int:
        """One more than the highest rank: the world size, as far as the ranks tell it."""
        return max(self.ranks) + 1

    def fixed(self, place: Place) -> dict[str, int]:
        """The coordinate at which `place` fixes each axis that it names; folded coordinates are unfolded.

        Raises:
            LayoutError: an axis is not of the mesh, a coordinate out of range, or an axis is fixed twice differently.
        """
        coordinates: dict[str, int] = {}
        for axes, folded in place:
            rest = folded
            for axis in reversed(axes):
                if axis not in self.sizes:
                    raise LayoutError(f"the mesh has no axis {show(axis)}")
                rest, coordinate = divmod(rest, self.sizes[axis])
                if coordinates.setdefault(axis, coordinate) != coordinate:
                    raise LayoutError(f"axis {show(axis)} is fixed at {coordinates[axis]} and at {coordinate}")
            if rest:
                raise LayoutError(f"coordinate {folded} is outside the axes {', '.join(axes)}")
        return coordinates

    def held(self, place: Place) -> tuple[int, ...]:
        """The ranks that `place` selects, in mesh order. Raises as `fixed` does."""
        return tuple(self._select(np.array(self.ranks).reshape(self._extents), place))

    def offsets(self, place: Place, axes: Iterable[str]) -> list[int]:
        """For each rank of `held`, its coordinates on some axes folded into one number, the first axis outermost.

        Raises:
            LayoutError: an axis is not of the mesh; or as `fixed` does.
        """
        folded = np.zeros(self._extents, dtype=np.int64)
        names = list(self.sizes)
        for axis in axes:
            if axis not in self.sizes:
                raise LayoutError(f"the mesh has no axis {show(axis)}")
            along = [1] * len(names)
            along[names.index(axis)] = self.sizes[axis]
            folded = folded * self.sizes[axis] + np.arange(self.sizes[axis]).reshape(along)
        return self._select(folded, place)

    @property
    def _extents(self) -> tuple[int, ...]:
        return tuple(self.sizes.values())

    def _select(self, values: np.ndarray, place: Place) -> list[int]:
        fixed = self.fixed(place)
        picked: list[int] = values[tuple(fixed.get(axis, slice(None)) for axis in self.sizes)].reshape(-1).tolist()
        return picked


@dataclass(frozen=True)
class TensorRecord:
    """One tensor and how it lies on the mesh, in the words of a layout file.

    Attributes:
        key: its name.
        dtype: its safetensors name.
        shape: the global shape, in elements.
        part: "model" or "optimizer".
        cut: the axes of each dim, first = outermost; missing dims are not cut.
        uneven: what happens to a dim that does not divide.
        sizes: `(dim, sizes of its parts)`.
        blocks: `(dim, its blocks)`, where a dim consists of blocks that are cut by themselves.
        flat: axes over which the local block is cut 1-D.
        stored: storage order of the dims; empty: the global order.
        place: `(axes, folded coordinate)`; only ranks for which every one holds have a part.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    part: Part = "model"
    cut: tuple[tuple[str, ...], ...] = ()
    uneven: str = "refuse"
    sizes: tuple[tuple[int, tuple[int, ...]], ...] = ()
    blocks: tuple[tuple[int, Sequence[object]], ...] = ()
    flat: tuple[str, ...] = ()
    stored: tuple[int, ...] = ()
    place: Place = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis that cuts it, outermost first: folded, they are the `global_offset`."""
        return tuple(axis for axes in self.cut for axis in axes) + self.flat


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard of a tensor, or of several that are joined into one array.

    Attributes:
        key: the name under which it is stored.
        part: "model" or "optimizer".
        offset: its `global_offset`.
        holders: the ranks that hold it, ascending.
        n_bits: its size; only the proportions matter.
    """

    key: str
    part: Part
    offset: int
    holders: tuple[int, ...]
    n_bits: int


def shard_id(key: str, offset: int) -> str:
    """The text that names a shard in `metadata.json`: the original builds it by Python's `str`, quotes and all.

    Example:
        >>> shard_id("embed.weight", 3)
        "('embed.weight', (3,))"
    """
    return str((key, (offset,)))


def shards_of(records: Iterable[TensorRecord], world: World) -> list[Shard]:
    """The shards of tensors, by tensor and then in the order in which ascending ranks first hold them.

    Raises:
        LayoutError: a record names an axis or a coordinate that the mesh does not have.
    """
    grids: dict[tuple[Place, tuple[str, ...]], dict[int, tuple[int, ...]]] = {}
    shards = []
    for record in records:
        grid = grids.get((record.place, record.axes))
        if grid is None:
            grid = grids[record.place, record.axes] = _holders(record, world)
        n_parts = math.prod(world.sizes[axis] for axis in record.axes)
        n_bits = -(-math.prod(record.shape) // n_parts) * _element_bits(record.dtype)
        shards += [Shard(record.key, record.part, offset, holders, n_bits) for offset, holders in grid.items()]
    return shards


def _holders(record: TensorRecord, world: World) -> dict[int, tuple[int, ...]]:
    """The ranks of each `global_offset`, ascending."""
    grid: dict[int, list[int]] = {}
    for rank, offset in sorted(zip(world.held(record.place), world.offsets(record.place, record.axes), strict=True)):
        grid.setdefault(offset, []).append(rank)
    return {offset: tuple(ranks) for offset, ranks in grid.items()}


def _element_bits(dtype: str) -> int:
    """Bits by which the original weighs an element: a boolean counts one."""
    if dtype == "BOOL":
        return 1
    width = re.search("[0-9]+", dtype)
    return int(width[0]) if width else 16


@dataclass(frozen=True)
class PlannedFile:
    """One shard file to be.

    Attributes:
        part: "model" or "optimizer".
        index: its number in the name.
        count: the count in the name.
        rank: the rank whose shards it holds.
        keys: names of the arrays in it, in the order of the shards that were planned.
    """

    part: Part
    index: int
    count: int
    rank: int
    keys: tuple[str, ...]

    def name(self, prefix: str | None = None) -> str:
        """The file's name. Raises ArgumentError for a prefix that cannot stand in one."""
        return shard_file_name(self.part, self.index, self.count, prefix)


@dataclass(frozen=True)
class FilePlan:
    """Who writes what.

    Attributes:
        files: model files first, each part by index. A rank that writes nothing of a part has no file of it.
    """

    files: tuple[PlannedFile, ...]

    @cached_property
    def by_rank(self) -> Mapping[tuple[Part, int], PlannedFile]:
        """The file of each part and rank."""
        return {(file.part, file.rank): file for file in self.files}


def assign(shards: Sequence[Shard], world: World, *, dedup: bool) -> FilePlan:
    """Choose the files of shards.

    With `dedup` each shard is written once, by the rule of the original: shards with few holders first, then large
    ones, then by name; each to the holder with the least so far, the lowest rank on ties; model and optimizer each by
    themselves. Files are then numbered without gaps, so that an index is no rank.

    Without it every holder writes its copy, index = rank, count = world size. The original also writes a file for a
    rank that has nothing of a part; nobody looks for that one, and it is left out here.

    Args:
        shards: all shards of the checkpoint, each name in one part only.
        world: the mesh.
        dedup: whether copies are written once.

    Raises:
        ArgumentError: a name is in both parts.

    Example:
        >>> world = World((("dp", 2),))
        >>> shards = [Shard("a", "model", 0, (0, 1), 64), Shard("b", "model", 0, (0, 1), 32)]
        >>> [(file.rank, file.keys) for file in assign(shards, world, dedup=True).files]
        [(0, ('a',)), (1, ('b',))]
    """
    parts: dict[str, Part] = {}
    for shard in shards:
        if parts.setdefault(shard.key, shard.part) != shard.part:
            raise ArgumentError(
                f"{show(shard.key)} names a tensor of the model and one of the optimizer",
                key=shard.key,
                hint="rename one of them: a reader could not tell which is meant",
            )
    files: list[PlannedFile] = []
    for part in ("model", "optimizer"):
        of_part = [shard for shard in shards if shard.part == part]
        writers = _balanced(of_part, world) if dedup else [shard.holders for shard in of_part]
        keys: dict[int, list[str]] = {}
        for shard, ranks in zip(of_part, writers, strict=True):
            for rank in ranks:
                keys.setdefault(rank, []).append(shard.key)
        for number, rank in enumerate(sorted(keys)):
            index, count = (number, len(keys)) if dedup else (rank, world.n_slots)
            files.append(PlannedFile(part, index, count, rank, tuple(keys[rank])))
    return FilePlan(tuple(files))


def _balanced(shards: Sequence[Shard], world: World) -> list[tuple[int]]:
    """The one rank that writes each shard."""
    loads = dict.fromkeys(world.ranks, 0)
    writers: list[tuple[int]] = [(0,)] * len(shards)
    order = sorted(
        range(len(shards)),
        key=lambda i: (len(shards[i].holders), -shards[i].n_bits, shard_id(shards[i].key, shards[i].offset)),
    )
    for i in order:
        rank = min(shards[i].holders, key=loads.__getitem__)  # the first of equals, and holders ascend
        loads[rank] += shards[i].n_bits
        writers[i] = (rank,)
    return writers
