"""The position of a part in a whole tensor, and the conversion of tiles between the two.

The whole is one tensor, such as a fused `qkv`. A part is a tensor contained in it, such as `q`. A dim of the part maps
to a dim of the whole in runs of equal length: element `r * run + u` of the part (u < run) is element
`start + r * period + u` of the whole. One run is a concatenation. Several runs are an interleaving, such as heads or
alternating rows. The part can have another order of dims. In a dim of the whole that the part does not have, the part
has one index. This mapping describes renaming, fusing, splitting, stacking and transposing. A dim can also be swapped:
the elements of each group, seen as a matrix, are transposed.

A stored tile is a region of a tensor, with its offset and strides in a stored array. The conversion splits the tile at
the borders of the parts and computes the new offsets and strides. It does not read or copy data. An interleaved dim
becomes two dims, the run and the element in the run, as `factors` of `Index.add_tiles`. All runs of a part are one
region in these dims, so the number of tiles does not depend on the number of runs. This module does not use files or
names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from reshard._core import Tile

if TYPE_CHECKING:
    from collections.abc import Sequence


class _Segment(NamedTuple):
    """A region along one dim of a tile.

    All fields except `skipped` have one item for a contiguous dim, and as many as it has factors for another dim.

    Attributes:
        offset: the offset of the region in the other tensor, in elements.
        extent: the size of the region, in elements.
        skipped: the number of elements of the tile before the region.
        steps: the distance in the tile, in elements, between neighbours in the region.
    """

    offset: tuple[int, ...]
    extent: tuple[int, ...]
    skipped: int
    steps: tuple[int, ...]


@dataclass(frozen=True)
class DimMap:
    """The mapping of one dim of a part to a dim of the whole.

    Attributes:
        whole: the index of the dim of the whole.
        start: the offset of the first run in the whole, in elements. If there are several runs, each run is within one
            period.
        run: the length of a run, in elements.
        period: the distance in the whole from the start of one run to the start of the next, in elements.
        n_runs: the number of runs.
    """

    whole: int
    start: int
    run: int
    period: int
    n_runs: int

    @property
    def is_contiguous(self) -> bool:
        """Whether neighbouring elements of the part are neighbours in the whole."""
        return self.n_runs <= 1 or self.period == self.run

    def factors_of_whole(self, extent: int) -> tuple[int, ...]:
        """The factors of the dim of the whole, of so many elements: the periods, and the elements of one."""
        return (extent // self.period, self.period)

    def factors_of_part(self) -> tuple[int, ...]:
        """The factors of the dim of the part: the runs, and the elements of one."""
        return (self.n_runs, self.run)

    def to_whole(self, begin: int, end: int) -> list[_Segment]:
        """The regions of the whole that contain elements `begin` to `end` (exclusive) of the part."""
        if self.is_contiguous:
            return [_Segment((self.start + begin,), (end - begin,), 0, (1,))]
        first, inside = divmod(self.start, self.period)
        return [
            _Segment((first + r, inside + u), (n_r, n_u), r * self.run + u - begin, (self.run, 1))
            for r, u, n_r, n_u in _run_regions(begin, end, self.run)
        ]

    def to_part(self, begin: int, end: int) -> list[_Segment]:
        """The regions of the part that are within elements `begin` to `end` (exclusive) of the whole."""
        if self.is_contiguous:
            low, high = max(begin, self.start), min(end, self.start + self.run * self.n_runs)
            return [_Segment((low - self.start,), (high - low,), low - begin, (1,))] if low < high else []
        first, inside = divmod(self.start, self.period)
        segments: list[_Segment] = []
        for r, u, n_r, n_u in _run_regions(begin, end, self.period):
            low, high = max(r, first), min(r + n_r, first + self.n_runs)
            left, right = max(u, inside), min(u + n_u, inside + self.run)
            if low < high and left < right:
                skipped = low * self.period + left - begin
                offset, extent = (low - first, left - inside), (high - low, right - left)
                segments.append(_Segment(offset, extent, skipped, (self.period, 1)))
        return segments


@dataclass(frozen=True)
class SwappedDim:
    """The mapping of a dim of a part to the same dim of a whole, in which the matrices of its elements are transposed.

    Element `(g * rows + i) * columns + j` of the part is element `(g * columns + j) * rows + i` of the whole.

    Attributes:
        whole: the index of the dim.
        rows, columns: of each matrix in the part.
        n_groups: the number of matrices.
    """

    whole: int
    rows: int
    columns: int
    n_groups: int

    @property
    def is_contiguous(self) -> bool:
        """Whether neighbouring elements of the part are neighbours in the whole."""
        return False

    def factors_of_whole(self, extent: int) -> tuple[int, ...]:  # noqa: ARG002  as of a `DimMap`
        """The factors of the dim of the whole."""
        return (self.n_groups, self.columns, self.rows)

    def factors_of_part(self) -> tuple[int, ...]:
        """The factors of the dim of the part."""
        return (self.n_groups, self.rows, self.columns)

    def to_whole(self, begin: int, end: int) -> list[_Segment]:
        """The regions of the whole that contain elements `begin` to `end` (exclusive) of the part."""
        return _transposed(begin, end, self.rows, self.columns)

    def to_part(self, begin: int, end: int) -> list[_Segment]:
        """The regions of the part that are within elements `begin` to `end` (exclusive) of the whole."""
        return _transposed(begin, end, self.columns, self.rows)


def _transposed(begin: int, end: int, rows: int, columns: int) -> list[_Segment]:
    """Elements `begin` to `end` of matrices, as regions of the transposed matrices."""
    n = rows * columns
    segments = []
    for group, first, n_groups, n_elements in _run_regions(begin, end, n):
        regions = [(0, 0, rows, columns)] if n_elements == n else _run_regions(first, first + n_elements, columns)
        for i, j, n_i, n_j in regions:
            skipped = group * n + i * columns + j - begin
            segments.append(_Segment((group, j, i), (n_groups, n_j, n_i), skipped, (n, 1, columns)))
    return segments


def _run_regions(begin: int, end: int, n: int) -> list[tuple[int, int, int, int]]:
    """Elements `begin` to `end` (exclusive) of runs of `n`, as regions `(run, element, n_runs, n_elements)`."""
    (first, head), (last, tail) = divmod(begin, n), divmod(end, n)
    if begin >= end:
        return []
    if first == last:
        return [(first, head, 1, tail - head)]
    regions = [(first, head, 1, n - head)] if head else []
    if (middle := first + bool(head)) < last:
        regions.append((middle, 0, last - middle, n))
    return [*regions, (last, 0, 1, tail)] if tail else regions


@dataclass(frozen=True)
class PartMap:
    """The mapping of a part to a whole.

    Attributes:
        dims: for each dim of the part, its mapping to a dim of the whole.
        fixed: `(dim of the whole, index)` for each dim of the whole that the part does not have.
    """

    dims: tuple[DimMap | SwappedDim, ...]
    fixed: tuple[tuple[int, int], ...] = ()

    def factors_of_whole(self, shape: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """The factors of the interleaved and swapped dims of the whole.

        Args:
            shape: the shape of the whole, in elements.
        """
        return {one.whole: one.factors_of_whole(shape[one.whole]) for one in self.dims if not one.is_contiguous}

    def factors_of_part(self) -> dict[int, tuple[int, ...]]:
        """The factors of the interleaved and swapped dims of the part."""
        return {dim: one.factors_of_part() for dim, one in enumerate(self.dims) if not one.is_contiguous}

    def to_whole(self, tile: Tile) -> list[Tile]:
        """Convert a stored tile of the part to tiles of the whole, in the dims of `factors_of_whole`.

        Example:
            >>> rows = PartMap((DimMap(whole=0, start=1, run=1, period=2, n_runs=3),))  # every other row
            >>> rows.to_whole(Tile((0,), (2,), 10, (1,)))
            [Tile(offset=(0, 1), shape=(2, 1), local_offset=10, local_strides=(1, 1))]
        """
        offset, shape, local_offset, strides = tile
        if 0 in shape:
            return []
        n_dims = len(self.dims) + len(self.fixed)
        sides: list[list[_Segment]] = [[]] * n_dims
        whole_strides = [1] * n_dims
        for dim, one in enumerate(self.dims):
            sides[one.whole] = one.to_whole(offset[dim], offset[dim] + shape[dim])
            whole_strides[one.whole] = strides[dim]
        for dim, index in self.fixed:
            sides[dim] = [_Segment((index,), (1,), 0, (1,))]
        return _tiles(sides, local_offset, whole_strides)

    def to_part(self, tile: Tile) -> list[Tile]:
        """Convert a stored tile of the whole to tiles of the part, in the dims of `factors_of_part`. Can be empty.

        Example:
            >>> rows = PartMap((DimMap(whole=0, start=1, run=1, period=2, n_runs=3),))
            >>> rows.to_part(Tile((0,), (6,), 10, (1,)))
            [Tile(offset=(0, 0), shape=(3, 1), local_offset=11, local_strides=(2, 1))]
        """
        offset, shape, local_offset, strides = tile
        if 0 in shape:
            return []
        for dim, index in self.fixed:
            if not offset[dim] <= index < offset[dim] + shape[dim]:
                return []
            local_offset += (index - offset[dim]) * strides[dim]
        sides = []
        for one in self.dims:
            begin = offset[one.whole]
            segments = one.to_part(begin, begin + shape[one.whole])
            if not segments:
                return []
            sides.append(segments)
        return _tiles(sides, local_offset, [strides[one.whole] for one in self.dims])


def _tiles(sides: Sequence[list[_Segment]], local_offset: int, strides: Sequence[int]) -> list[Tile]:
    """The tiles of all combinations of one segment for each dim."""
    regions: list[tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]] = [((), (), local_offset, ())]
    for segments, stride in zip(sides, strides, strict=True):
        regions = [
            (
                offset + at,
                shape + extent,
                local + skipped * stride,
                steps + tuple(step * stride for step in own_steps),
            )
            for offset, shape, local, steps in regions
            for at, extent, skipped, own_steps in segments
        ]
    return [Tile(*region) for region in regions]
