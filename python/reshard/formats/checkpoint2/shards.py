"""Which ranks hold which shard of a Checkpoint 2.0, and which of them writes it into which file.

A *shard* is identified by its tensor and one number, its `global_offset`: the row-major index of the shard in the grid
of all shards of the tensor. Ranks that hold a shard of the same name and number hold the same bytes. The form of
`metadata.json` is in `metadata`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from reshard.errors import ArgumentError
from reshard.formats.checkpoint2.names import shard_file_name
from reshard.values.words import show
from reshard.write.columns import Columns

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from reshard import _core
    from reshard.layout.partition import Places, TensorLayout
    from reshard.write.contents import Part


_Holders: TypeAlias = "Mapping[int, tuple[int, ...]]"


class TensorRecord(NamedTuple):
    """One tensor of a checkpoint and how it lies on the mesh.

    Records with the same layout are faster if they share the object.

    Attributes:
        key: its name.
        dtype: its safetensors name.
        part: "model" or "optimizer".
        layout: its global shape, its partition, and the place of its holders.
    """

    key: str
    dtype: str
    part: Part
    layout: TensorLayout


class RecordKind(NamedTuple):
    """What tensors have in common: a `TensorRecord` without its key."""

    dtype: str
    part: Part
    layout: TensorLayout


class Records(Columns[RecordKind, TensorRecord]):
    """The tensors of a checkpoint.

    Example:
        >>> from reshard.layout import TensorLayout
        >>> records = Records.of(TensorRecord(key, "F32", "model", TensorLayout((4,))) for key in "ab")
        >>> records.names, records.kind_of, [record.key for record in records.without({"a"})]
        (('a', 'b'), (0, 0), ['b'])
    """

    @staticmethod
    def kind(fields: Iterable[Any]) -> RecordKind:
        """What a row says after its name."""
        return RecordKind(*fields)

    def __iter__(self) -> Iterator[TensorRecord]:
        return (TensorRecord(name, *kind) for name, kind in self.named_kinds())


class HeldGrid(NamedTuple):
    """Shards of a tensor, or of several that are joined into one array, all of one size, and the ranks that hold them.

    A tuple: there can be one for each tensor and rank, and making another object takes three times as long.

    Attributes:
        key: the name under which they are stored.
        part: "model" or "optimizer".
        grid: the holders of each shard, ascending, by its `global_offset`. Tensors that lie alike share the object.
        n_bits: size of a shard; only the proportions between shards matter.
    """

    key: str
    part: Part
    grid: Mapping[int, tuple[int, ...]]
    n_bits: int


def shard_id(key: str, offset: int) -> str:
    """The name of a shard in `metadata.json`. MindSpore Transformers makes it with Python's `str`, quotes included.

    Args:
        key: the tensor.
        offset: the `global_offset` of the shard.

    Example:
        >>> shard_id("embed.weight", 3)
        "('embed.weight', (3,))"
    """
    return str((key, (offset,)))


def shards_of(records: Iterable[TensorRecord], mesh: _core.Mesh) -> list[HeldGrid]:
    """The shards of tensors, those of each in the order in which ascending ranks first hold them.

    Args:
        records: the tensors.
        mesh: the mesh on which they lie.

    Raises:
        LayoutError: a record names an axis or a coordinate that the mesh does not have.
    """
    grids: dict[tuple[Places, tuple[str, ...]], dict[int, tuple[int, ...]]] = {}
    sizes = dict(mesh.axes)
    shards = []
    for record in records:
        place, axes = record.layout.place, record.layout.partition.axes
        grid = grids.get((place, axes))
        if grid is None:
            grid = grids[place, axes] = holders_of(mesh, place, axes)
        n_parts = math.prod(sizes[axis] for axis in axes)
        n_bits = -(-math.prod(record.layout.shape) // n_parts) * _element_bits(record.dtype)
        shards.append(HeldGrid(record.key, record.part, grid, n_bits))
    return shards


def holders_of(mesh: _core.Mesh, place: Places, axes: tuple[str, ...]) -> dict[int, tuple[int, ...]]:
    """The ranks of each `global_offset`, ascending, in the order in which ascending ranks first hold one.

    Args:
        mesh: the mesh.
        place: the place of the holders.
        axes: the axes that divide the tensor, outermost first.

    Raises:
        LayoutError: an axis or a coordinate does not exist in the mesh.
    """
    grid: dict[int, list[int]] = {}
    for rank, offset in sorted(zip(mesh.held(place), mesh.folded(axes, place), strict=True)):
        grid.setdefault(offset, []).append(rank)
    return {offset: tuple(ranks) for offset, ranks in grid.items()}


def _element_bits(dtype: str) -> int:
    """Bits of an element as MindSpore Transformers counts them: a boolean is one."""
    if dtype == "BOOL":
        return 1
    width = re.search("[0-9]+", dtype)
    return int(width[0]) if width else 16


@dataclass(frozen=True)
class PlannedFile:
    """One shard file that will be written.

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
        """The file's name. Raises ArgumentError for an invalid prefix."""
        return shard_file_name(self.part, self.index, self.count, prefix)


@dataclass(frozen=True)
class FilePlan:
    """Which rank writes which shards into which file.

    Attributes:
        files: model files first, each part by index. A rank that writes nothing of a part has no file of it.
    """

    files: tuple[PlannedFile, ...]

    @cached_property
    def by_rank(self) -> Mapping[tuple[Part, int], PlannedFile]:
        """The file of each part and rank."""
        return {(file.part, file.rank): file for file in self.files}


def assign(shards: Sequence[HeldGrid], ranks: Sequence[int], *, dedup: bool) -> FilePlan:
    """Choose the files of shards.

    With `dedup` each shard is written once, by the rule of MindSpore Transformers. Shards are assigned in this order:
    those with few holders first, then large ones, then by name. Each goes to its holder with the fewest bits so far,
    the lowest rank on ties. Model and optimizer are assigned separately. Files are numbered without gaps, so the index
    of a file is not a rank.

    Without `dedup` every holder writes its copy; the index is the rank, the count the world size. MindSpore
    Transformers also writes a file for a rank that holds nothing of a part. No reader needs it, so it is left out here.

    Args:
        shards: all shards of the checkpoint, each name in one part only.
        ranks: all ranks of the mesh.
        dedup: whether copies are written once.

    Raises:
        ArgumentError: a name is in both parts.

    Example:
        >>> shards = [HeldGrid("a", "model", {0: (0, 1)}, 64), HeldGrid("b", "model", {0: (0, 1)}, 32)]
        >>> [(file.rank, file.keys) for file in assign(shards, [0, 1], dedup=True).files]
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
    world_size = max(ranks) + 1
    same: dict[tuple[str, ...], tuple[str, ...]] = {}  # equal ones are one object
    for part in ("model", "optimizer"):
        of_part = [shard for shard in shards if shard.part == part]
        grids = [shard.grid for shard in of_part]
        if dedup:
            grids = _balanced(of_part, grids, ranks)
        keys: dict[int, list[str]] = {}
        for grid, names in _runs(grids, of_part):
            for holders in grid.values():
                for rank in holders:
                    keys.setdefault(rank, []).extend(names)
        for number, rank in enumerate(sorted(keys)):
            index, count = (number, len(keys)) if dedup else (rank, world_size)
            of_rank = tuple(keys[rank])
            files.append(PlannedFile(part, index, count, rank, same.setdefault(of_rank, of_rank)))
    return FilePlan(tuple(files))


def assigned_to_one(keys: Mapping[Part, Sequence[str]]) -> FilePlan:
    """The files of one rank that holds everything, as `assign` chooses them.

    Args:
        keys: the names of the arrays of each part.

    Example:
        >>> shards = [HeldGrid("a", "model", {0: (0,)}, 64), HeldGrid("b", "optimizer", {0: (0,)}, 32)]
        >>> assigned_to_one({"model": ["a"], "optimizer": ["b"]}) == assign(shards, [0], dedup=True)
        True
    """
    return FilePlan(tuple(PlannedFile(part, 0, 1, 0, tuple(of_part)) for part, of_part in keys.items() if of_part))


def _runs(grids: Sequence[_Holders], shards: Sequence[HeldGrid]) -> Iterator[tuple[_Holders, list[str]]]:
    """The grids of shards, and the keys of adjacent ones that share a grid."""
    names: list[str] = []
    before: _Holders = {}
    for grid, shard in zip(grids, shards, strict=True):
        if grid is not before:
            yield before, names
            before, names = grid, []
        names.append(shard.key)
    yield before, names


def _balanced(shards: Sequence[HeldGrid], grids: Sequence[_Holders], ranks: Sequence[int]) -> list[_Holders]:
    """The grids, with the one rank that writes each shard."""
    n_most: dict[int, int] = {}  # by address of the grid
    for grid in grids:
        if id(grid) not in n_most:
            n_most[id(grid)] = max(map(len, grid.values()), default=0)
    several = [i for i, grid in enumerate(grids) if n_most[id(grid)] > 1]
    if not several:
        return list(grids)
    loads = dict.fromkeys(ranks, 0)
    order = []
    for i, grid in enumerate(grids):
        n_bits = shards[i].n_bits
        for offset, holders in grid.items():
            if len(holders) == 1:  # they come first in the order, and have no choice
                loads[holders[0]] += n_bits
            else:
                order.append(((len(holders), -n_bits, shard_id(shards[i].key, offset)), i, offset))
    chosen: dict[int, dict[int, tuple[int, ...]]] = {i: dict(grids[i]) for i in several}
    for (_, negative_bits, _), i, offset in sorted(order):
        rank = min(grids[i][offset], key=loads.__getitem__)  # the first of equals, and holders ascend
        loads[rank] -= negative_bits
        chosen[i][offset] = (rank,)
    return [chosen.get(i, grid) for i, grid in enumerate(grids)]
