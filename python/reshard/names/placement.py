"""Where a part lies in a whole tensor, and the tiles of the one as tiles of the other.

A part's dim lies along a dim of the whole in *rounds*: element `r * turn + u` of the part (u < turn) is element
`start + r * period + u` of the whole. One round is plain concatenation; several are heads that take turns, or rows that
alternate. Dims may stand in another order, and a dim of the whole may be one that the part has not: there the part lies
at one index. That is all there is to renaming, fusing, splitting, stacking and transposing.

A stored tile says that a box of a tensor lies in a stored array at an offset with strides. Seen as a tile of the other
tensor it is cut at the borders of the rounds, and its offset and strides follow: nothing is read, copied or built.
Where a part of the whole is asked for and a turn is one element long, all rounds are one tile with a longer stride.
Knows no files, no names.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard._core import Tile

__all__ = ["Link", "Placement"]

# `(offset, extent, skipped, step)` in one dim: the box in the other tensor, the elements of the tile's own dim before
# it, and the elements of the tile's own dim from one to the next.
_Segment: TypeAlias = tuple[int, int, int, int]


@dataclass(frozen=True)
class Link:
    """How one dim of a part lies along a dim of the whole.

    Attributes:
        whole: the dim of the whole.
        start: where the part begins in it.
        turn: elements of the part in one round.
        period: elements of the whole from one round to the next.
        rounds: how many there are.
    """

    whole: int
    start: int
    turn: int
    period: int
    rounds: int

    @property
    def is_plain(self) -> bool:
        """Whether neighbours in the part are neighbours in the whole."""
        return self.rounds <= 1 or self.period == self.turn

    def to_whole(self, begin: int, end: int) -> list[_Segment]:
        """Where elements `begin` to `end` of the part lie in the whole."""
        if self.is_plain:
            return [(self.start + begin, end - begin, 0, 1)]
        turn, period, start = self.turn, self.period, self.start
        first, last = begin // turn, (end - 1) // turn
        segments = []
        for r in range(first, last + 1):
            low, high = max(begin, r * turn), min(end, (r + 1) * turn)
            segments.append((start + r * period + low - r * turn, high - low, low - begin, 1))
        return segments

    def to_part(self, begin: int, end: int) -> list[_Segment]:
        """Which elements of the part lie in `begin` to `end` of the whole."""
        turn, period, start = self.turn, self.period, self.start
        if self.is_plain:
            low, high = max(begin, start), min(end, start + turn * self.rounds)
            return [(low - start, high - low, low - begin, 1)] if low < high else []
        first = max(0, (begin - start) // period)
        last = min(self.rounds, -((start - end) // period))
        if turn == 1:
            first = max(0, -((start - begin) // period))
            return [(first, last - first, start + first * period - begin, period)] if first < last else []
        segments = []
        for r in range(first, last):
            at = start + r * period
            low, high = max(begin, at), min(end, at + turn)
            if low < high:
                segments.append((r * turn + low - at, high - low, low - begin, 1))
        return segments


@dataclass(frozen=True)
class Placement:
    """How a part lies in a whole.

    Attributes:
        links: for each dim of the part, how it lies in the whole.
        fixed: `(dim of the whole, index)` of the dims that the part has not.
    """

    links: tuple[Link, ...]
    fixed: tuple[tuple[int, int], ...] = ()

    def to_whole(self, tile: Tile) -> list[Tile]:
        """Tiles of the whole that a stored tile of the part is.

        Example:
            >>> rows = Placement((Link(whole=0, start=1, turn=1, period=2, rounds=3),))  # every other row
            >>> rows.to_whole(((0,), (2,), 10, (1,)))
            [((1,), (1,), 10, (1,)), ((3,), (1,), 11, (1,))]
        """
        offset, shape, local_offset, strides = tile
        if 0 in shape:
            return []
        n_dims = len(self.links) + len(self.fixed)
        sides: list[list[_Segment]] = [[]] * n_dims
        whole_strides = [1] * n_dims
        for dim, link in enumerate(self.links):
            sides[link.whole] = link.to_whole(offset[dim], offset[dim] + shape[dim])
            whole_strides[link.whole] = strides[dim]
        for dim, index in self.fixed:
            sides[dim] = [(index, 1, 0, 1)]
        return _boxes(sides, local_offset, whole_strides)

    def to_part(self, tile: Tile) -> list[Tile]:
        """Tiles of the part that a stored tile of the whole is; none if they have nothing in common.

        Example:
            >>> rows = Placement((Link(whole=0, start=1, turn=1, period=2, rounds=3),))
            >>> rows.to_part(((0,), (6,), 10, (1,)))
            [((0,), (3,), 11, (2,))]
        """
        offset, shape, local_offset, strides = tile
        if 0 in shape:
            return []
        for dim, index in self.fixed:
            if not offset[dim] <= index < offset[dim] + shape[dim]:
                return []
            local_offset += (index - offset[dim]) * strides[dim]
        sides = []
        for link in self.links:
            begin = offset[link.whole]
            segments = link.to_part(begin, begin + shape[link.whole])
            if not segments:
                return []
            sides.append(segments)
        return _boxes(sides, local_offset, [strides[link.whole] for link in self.links])

    @classmethod
    def transposed(cls, shape: Sequence[int], order: Sequence[int]) -> Placement:
        """A tensor of a shape as one whose dim `j` is its dim `order[j]`."""
        return cls(tuple(Link(order.index(dim), 0, extent, extent, 1) for dim, extent in enumerate(shape)))


def _boxes(sides: Sequence[list[_Segment]], local_offset: int, strides: Sequence[int]) -> list[Tile]:
    """All boxes that have one segment a dim."""
    if not sides:
        return [((), (), local_offset, ())]
    # There can be tens of thousands that differ in one dim only: what they share is made once.
    varied = max(range(len(sides)), key=lambda dim: len(sides[dim]))
    stride = strides[varied]
    boxes: list[Tile] = []
    for before in itertools.product(*sides[:varied]):
        for after in itertools.product(*sides[varied + 1 :]):
            offsets = [one[0] for one in before], [one[0] for one in after]
            extents = [one[1] for one in before], [one[1] for one in after]
            steps_before = [one[3] * step for one, step in zip(before, strides, strict=False)]
            steps_after = [one[3] * step for one, step in zip(after, strides[varied + 1 :], strict=True)]
            skipped = sum(
                one[2] * step
                for one, step in zip((*before, *after), (*strides[:varied], *strides[varied + 1 :]), strict=True)
            )
            boxes += [
                (
                    (*offsets[0], offset, *offsets[1]),
                    (*extents[0], extent, *extents[1]),
                    local_offset + skipped + skip * stride,
                    (*steps_before, step * stride, *steps_after),
                )
                for offset, extent, skip, step in sides[varied]
            ]
    return boxes
