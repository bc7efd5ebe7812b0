"""Where a part lies in a whole tensor, and the tiles of the one as tiles of the other.

A dim of the part lies along a dim of the whole in runs of equal length: element `r * run + u` of the part (u < run) is
element `start + r * period + u` of the whole. One run is a concatenation. Several runs are an interleaving, such as
heads or alternating rows. Dims can be in another order. Along a dim of the whole that the part does not have, the part
lies at one index. Renaming, fusing, splitting, stacking and transposing are all described so.

A stored tile says that a box of a tensor lies in a stored array at an offset with strides. As a tile of the other
tensor it is split at the borders of the parts, with the offset and strides that follow. Nothing is read or copied.
An interleaved dim is described by two dims, the run and the element in it, as `factors` of `Index.add_tiles`. All runs
of a part are one box there, so the number of tiles does not depend on the number of runs.
This module knows no files and no names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from reshard._core import Tile

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DimMap", "PartMap"]


class _Segment(NamedTuple):
    """A box along one dim. All fields but `skipped` have an item for each dim that describes the one.

    Attributes:
        offset: its first element in the other tensor.
        extent: its elements.
        skipped: elements of the tile's own dim before it.
        steps: elements of the tile's own dim from one element of the box to the next.
    """

    offset: tuple[int, ...]
    extent: tuple[int, ...]
    skipped: int
    steps: tuple[int, ...]


@dataclass(frozen=True)
class DimMap:
    """How one dim of a part lies along a dim of the whole.

    Attributes:
        whole: the dim of the whole.
        start: the element of the whole at which the part begins. Each of several runs lies within one period.
        run: elements of the part in one run.
        period: elements of the whole from the start of one run to that of the next.
        n_runs: how many runs there are.
    """

    whole: int
    start: int
    run: int
    period: int
    n_runs: int

    @property
    def is_contiguous(self) -> bool:
        """Whether neighbours in the part are neighbours in the whole."""
        return self.n_runs <= 1 or self.period == self.run

    def to_whole(self, begin: int, end: int) -> list[_Segment]:
        """The boxes of the whole in which elements `begin` to `end` of the part lie."""
        if self.is_contiguous:
            return [_Segment((self.start + begin,), (end - begin,), 0, (1,))]
        first, inside = divmod(self.start, self.period)
        return [
            _Segment((first + r, inside + u), (n_r, n_u), r * self.run + u - begin, (self.run, 1))
            for r, u, n_r, n_u in _run_boxes(begin, end, self.run)
        ]

    def to_part(self, begin: int, end: int) -> list[_Segment]:
        """The boxes of the part that lie in elements `begin` to `end` of the whole."""
        if self.is_contiguous:
            low, high = max(begin, self.start), min(end, self.start + self.run * self.n_runs)
            return [_Segment((low - self.start,), (high - low,), low - begin, (1,))] if low < high else []
        first, inside = divmod(self.start, self.period)
        segments: list[_Segment] = []
        for r, u, n_r, n_u in _run_boxes(begin, end, self.period):
            low, high = max(r, first), min(r + n_r, first + self.n_runs)
            left, right = max(u, inside), min(u + n_u, inside + self.run)
            if low < high and left < right:
                skipped = low * self.period + left - begin
                offset, extent = (low - first, left - inside), (high - low, right - left)
                segments.append(_Segment(offset, extent, skipped, (self.period, 1)))
        return segments


def _run_boxes(begin: int, end: int, n: int) -> list[tuple[int, int, int, int]]:
    """Elements `begin` to `end` of runs of `n` elements as boxes `(run, element in it, runs, elements)`."""
    (first, head), (last, tail) = divmod(begin, n), divmod(end, n)
    if begin >= end:
        return []
    if first == last:
        return [(first, head, 1, tail - head)]
    boxes = [(first, head, 1, n - head)] if head else []
    if (middle := first + bool(head)) < last:
        boxes.append((middle, 0, last - middle, n))
    return [*boxes, (last, 0, 1, tail)] if tail else boxes


@dataclass(frozen=True)
class PartMap:
    """How a part lies in a whole.

    Attributes:
        dims: for each dim of the part, how it lies along a dim of the whole.
        fixed: `(dim of the whole, index)` of the dims that the part does not have.
    """

    dims: tuple[DimMap, ...]
    fixed: tuple[tuple[int, int], ...] = ()

    def factors_of_whole(self, shape: Sequence[int]) -> dict[int, tuple[int, int]]:
        """The factors of the dims of the whole that its tiles use: runs, and elements of a period.

        Args:
            shape: the shape of the whole, in elements.
        """
        interleaved = [one for one in self.dims if not one.is_contiguous]
        return {one.whole: (shape[one.whole] // one.period, one.period) for one in interleaved}

    def factors_of_part(self) -> dict[int, tuple[int, int]]:
        """The factors of the dims of the part that its tiles use: runs, and elements of a run."""
        return {dim: (one.n_runs, one.run) for dim, one in enumerate(self.dims) if not one.is_contiguous}

    def to_whole(self, tile: Tile) -> list[Tile]:
        """The tiles of the whole that a stored tile of the part is, in the dims of `factors_of_whole`.

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
        """The tiles of the part that a stored tile of the whole holds, in the dims of `factors_of_part`; can be empty.

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

    @classmethod
    def transposed(cls, shape: Sequence[int], order: Sequence[int]) -> PartMap:
        """A tensor of a shape as one whose dim `j` is its dim `order[j]`."""
        return cls(tuple(DimMap(order.index(dim), 0, extent, extent, 1) for dim, extent in enumerate(shape)))


def _tiles(sides: Sequence[list[_Segment]], local_offset: int, strides: Sequence[int]) -> list[Tile]:
    """The tiles of all combinations of one segment for each dim."""
    boxes: list[tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]] = [((), (), local_offset, ())]
    for segments, stride in zip(sides, strides, strict=True):
        boxes = [
            (
                offset + at,
                shape + extent,
                local + skipped * stride,
                steps + tuple(step * stride for step in own_steps),
            )
            for offset, shape, local, steps in boxes
            for at, extent, skipped, own_steps in segments
        ]
    return [Tile(*box) for box in boxes]
