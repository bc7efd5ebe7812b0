"""Where a part lies in a whole tensor, and the tiles of the one as tiles of the other.

A part's dim lies along a dim of the whole in *rounds*: element `r * turn + u` of the part (u < turn) is element
`start + r * period + u` of the whole. One round is plain concatenation; several are heads that take turns, or rows that
alternate. Dims may stand in another order, and a dim of the whole may be one that the part has not: there the part lies
at one index. That is all there is to renaming, fusing, splitting, stacking and transposing.

A stored tile says that a box of a tensor lies in a stored array at an offset with strides. Seen as a tile of the other
tensor it is cut at the borders of the parts, and its offset and strides follow: nothing is read, copied or built.
A dim in which there are rounds is described by two, the round and the element in it, as `factors` of `Index.add_tiles`:
there all rounds of a part are one box, so tiles are as many as what they come from, whatever the number of rows.
Knows no files, no names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard._core import Tile

__all__ = ["Link", "Placement"]

_Segment: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]
"""`(offset, extent, skipped, step)` along one dim: the box in the other tensor, the elements of the tile's own dim
before it, and the elements of that dim from one to the next. All but `skipped` for each dim that describes the one."""


@dataclass(frozen=True)
class Link:
    """How one dim of a part lies along a dim of the whole.

    Attributes:
        whole: the dim of the whole.
        start: where the part begins in it; of several rounds, each lies within one period.
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
            return [((self.start + begin,), (end - begin,), 0, (1,))]
        first, inside = divmod(self.start, self.period)
        return [
            ((first + r, inside + u), (n_r, n_u), r * self.turn + u - begin, (self.turn, 1))
            for r, u, n_r, n_u in _rounds(begin, end, self.turn)
        ]

    def to_part(self, begin: int, end: int) -> list[_Segment]:
        """Which elements of the part lie in `begin` to `end` of the whole."""
        if self.is_plain:
            low, high = max(begin, self.start), min(end, self.start + self.turn * self.rounds)
            return [((low - self.start,), (high - low,), low - begin, (1,))] if low < high else []
        first, inside = divmod(self.start, self.period)
        segments: list[_Segment] = []
        for r, u, n_r, n_u in _rounds(begin, end, self.period):
            low, high = max(r, first), min(r + n_r, first + self.rounds)
            left, right = max(u, inside), min(u + n_u, inside + self.turn)
            if low < high and left < right:
                skipped = low * self.period + left - begin
                segments.append(((low - first, left - inside), (high - low, right - left), skipped, (self.period, 1)))
        return segments


def _rounds(begin: int, end: int, n: int) -> list[tuple[int, int, int, int]]:
    """Elements `begin` to `end` of rounds of `n` as boxes `(round, element in it, rounds, elements)`."""
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
class Placement:
    """How a part lies in a whole.

    Attributes:
        links: for each dim of the part, how it lies in the whole.
        fixed: `(dim of the whole, index)` of the dims that the part has not.
    """

    links: tuple[Link, ...]
    fixed: tuple[tuple[int, int], ...] = ()

    def factors_of_whole(self, shape: Sequence[int]) -> dict[int, tuple[int, int]]:
        """In what factors tiles of the whole describe its dims: the rounds and their elements. The shape is its own."""
        rounds = [link for link in self.links if not link.is_plain]
        return {link.whole: (shape[link.whole] // link.period, link.period) for link in rounds}

    def factors_of_part(self) -> dict[int, tuple[int, int]]:
        """The same of the part."""
        return {dim: (link.rounds, link.turn) for dim, link in enumerate(self.links) if not link.is_plain}

    def to_whole(self, tile: Tile) -> list[Tile]:
        """Tiles of the whole that a stored tile of the part is, in the dims of `factors_of_whole`.

        Example:
            >>> rows = Placement((Link(whole=0, start=1, turn=1, period=2, rounds=3),))  # every other row
            >>> rows.to_whole(((0,), (2,), 10, (1,)))
            [((0, 1), (2, 1), 10, (1, 1))]
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
            sides[dim] = [((index,), (1,), 0, (1,))]
        return _boxes(sides, local_offset, whole_strides)

    def to_part(self, tile: Tile) -> list[Tile]:
        """Tiles of the part that a stored tile of the whole is, in the dims of `factors_of_part`.

        None if they have nothing in common.

        Example:
            >>> rows = Placement((Link(whole=0, start=1, turn=1, period=2, rounds=3),))
            >>> rows.to_part(((0,), (6,), 10, (1,)))
            [((0, 0), (3, 1), 11, (2, 1))]
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
    boxes: list[Tile] = [((), (), local_offset, ())]
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
    return boxes
