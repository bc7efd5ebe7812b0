"""Parameters as ranges of flat tensors.

ZeRO concatenates parameters in row-major order to flat tensors, and divides these between ranks without regard to
dims. A parameter is then some ranges of elements of flat tensors, and the index knows which regions of the parameter
each range is. No flat tensor is joined in memory.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from reshard import _core

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Segment(NamedTuple):
    """A stored flat tensor.

    Attributes:
        file: number of its file in the index.
        name: its stored name.
        n: its elements.
    """

    file: int
    name: str
    n: int


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

    def pieces(self, start: int, end: int, first: int = 0) -> Iterator[_core.StoredRange]:
        """The flat tensors of a range.

        Args:
            start: the first element of the range in the line.
            end: one past the last.
            first: the element of the parameter that lies at `start`.

        Example:
            >>> line = Line([Segment(0, "a", 4), Segment(1, "b", 4)])
            >>> [(piece.start, piece.end, piece.name, piece.at) for piece in line.pieces(3, 6)]
            [(0, 1, 'a', 3), (1, 3, 'b', 0)]
        """
        number = bisect_right(self._starts, start) - 1
        while start < end:
            begin, stop = self._starts[number], min(end, self._starts[number + 1])
            if stop > start:
                file, name, n = self.segments[number]
                yield _core.StoredRange(first, first + stop - start, file, name, n, start - begin)
                first, start = first + stop - start, stop
            number += 1
