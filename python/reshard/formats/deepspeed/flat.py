"""Parameters as ranges of flat tensors.

ZeRO concatenates parameters in row-major order to flat tensors, and divides these between ranks without regard to
dims. A parameter is then some ranges of elements, and each range is a few boxes of the parameter: the rest of a row,
complete rows, the start of a row. No flat tensor is joined in memory.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from reshard import _core

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["Line", "Piece", "Segment", "strides_of", "tiles"]


@dataclass(frozen=True)
class Segment:
    """A stored flat tensor.

    Attributes:
        file: number of its file in the index.
        name: its stored name.
        n: its elements.
    """

    file: int
    name: str
    n: int


@dataclass(frozen=True)
class Piece:
    """A range of the elements of a parameter, and where it lies.

    Attributes:
        start: the first element, in row-major order of the parameter.
        end: one past the last.
        segment: the flat tensor.
        at: the element of the flat tensor at which the range begins.
    """

    start: int
    end: int
    segment: Segment
    at: int


class Line:
    """Flat tensors one after the other.

    Attributes:
        segments: the flat tensors.
        n: elements in total.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        self._starts = [0, *accumulate(segment.n for segment in segments)]
        self.n = self._starts[-1]

    def pieces(self, start: int, end: int, first: int = 0) -> Iterator[Piece]:
        """The flat tensors of a range.

        Args:
            start: the first element of the range in the line.
            end: one past the last.
            first: the element of the parameter that lies at `start`.

        Example:
            >>> line = Line([Segment(0, "a", 4), Segment(1, "b", 4)])
            >>> [(piece.start, piece.end, piece.segment.name, piece.at) for piece in line.pieces(3, 6)]
            [(0, 1, 'a', 3), (1, 3, 'b', 0)]
        """
        number = bisect_right(self._starts, start) - 1
        while start < end:
            begin, stop = self._starts[number], min(end, self._starts[number + 1])
            if stop > start:
                yield Piece(first, first + stop - start, self.segments[number], start - begin)
                first, start = first + stop - start, stop
            number += 1


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements.

    Example:
        >>> strides_of((2, 3, 4))
        (12, 4, 1)
    """
    return tuple(reversed(list(accumulate(reversed(shape[1:]), int.__mul__, initial=1)))) if shape else ()


def _boxes(shape: Sequence[int], start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offset and shape of the boxes of a row-major range, in order: at most `2 n - 1` for `n` dims."""
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    zeros, inner = (0,) * (len(shape) - 1), tuple(shape[1:])
    # The rest of the first row, the complete rows, the start of the last row.
    head, tail = -(-start // row), end // row
    cuts = [start, head * row, tail * row, end] if head <= tail else [start, end]
    for from_, to in pairwise(cuts):
        if from_ == to:
            continue
        first = from_ // row
        if (to - from_) % row == 0 and from_ % row == 0:
            yield (first, *zeros), ((to - from_) // row, *inner)
        else:
            for offset, extent in _boxes(inner, from_ - first * row, to - first * row):
                yield (first, *offset), (1, *extent)


def tiles(shape: Sequence[int], pieces: Iterable[Piece]) -> list[_core.StoredArray]:
    """The stored arrays of a parameter that consists of these ranges.

    Example:
        >>> line = Line([Segment(0, "a", 4), Segment(1, "b", 4)])
        >>> for stored in tiles((2, 3), line.pieces(0, 6)):
        ...     print(stored.name, [(tile.offset, tile.shape, tile.local_offset) for tile in stored.tiles])
        a [((0, 0), (1, 3), 0), ((1, 0), (1, 1), 3)]
        b [((1, 1), (1, 2), 0)]
    """
    strides = strides_of(shape)
    stored = []
    for piece in pieces:
        boxes = []
        for offset, extent in _boxes(shape, piece.start, piece.end):
            first = sum(o * s for o, s in zip(offset, strides, strict=True))
            boxes.append(_core.Tile(offset, extent, piece.at + first - piece.start, strides))
        stored.append(_core.StoredArray(piece.segment.file, piece.segment.name, (piece.segment.n,), boxes))
    return stored
