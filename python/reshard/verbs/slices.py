"""Slices of tensors, read one after the other into a buffer, for what looks at all values of a checkpoint."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from reshard import _core, dtypes
from reshard.conversion.shares import MIN_CUT_BYTES, cut
from reshard.ranks.places import do_shares
from reshard.values.indexing import in_batches, regions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from reshard.ranks.places import Place, Work
    from reshard.values.argument_types import Progress
    from reshard.values.indexing import Region

_T = TypeVar("_T")

_BUFFER_BYTES = 8 << 20  # larger ones leave the cache, and take twice as long
_ALIGN_BYTES = 64
_MAX_ARRAYS = 4096  # of one plan
_MIN_PIECE_BYTES = 1 << 20
_MANY_PIECES = 1024  # of a tensor, before they become larger


class Slice(NamedTuple):
    """A slice of a tensor that is read."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    region: Region

    @property
    def n_bytes(self) -> int:
        """Its bytes in a buffer."""
        return dtypes.n_bytes(self.dtype, self.region[1])


class Buffer:
    """Memory that slices are read into, one after the other."""

    def __init__(self) -> None:
        self.bytes = np.empty(0, np.uint8)

    def fill(
        self, plan: Callable[[_core.Request], _core.Plan], slices: Sequence[Slice], *, threads: int | None
    ) -> list[tuple[int, np.ndarray]]:
        """Read slices.

        Args:
            plan: makes the plan of a request.
            slices: what is read.
            threads: threads that read.

        Returns:
            For each slice where it begins in the memory, and its bytes.
        """
        request = _core.Request()
        starts, end = [], 0
        for i, one in enumerate(slices):
            request.add_region(str(i), one.key, *one.region)
            starts.append(end)
            end += -(-one.n_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        if end > self.bytes.size:
            self.bytes = np.empty(end, np.uint8)
        arrays = [self.bytes[start : start + one.n_bytes] for start, one in zip(starts, slices, strict=True)]
        plan(request).fill(arrays, threads=threads)
        return list(zip(starts, arrays, strict=True))


def regions_of(shape: tuple[int, ...], dtype: str, max_elements: int | None = None) -> Iterator[Region]:
    """Regions of a tensor that fit into a buffer.

    Args:
        shape: of the tensor.
        dtype: of the tensor.
        max_elements: of a region; None: as many as fit.
    """
    bits = dtypes.bits(dtype)
    return regions(shape, max_elements or _BUFFER_BYTES * 8 // bits, bits)


def pieces_of(shape: tuple[int, ...], dtype: str, max_bytes: int = _BUFFER_BYTES) -> Iterator[Region]:
    """The pieces of a tensor of which sums are made, which are then added in their order.

    They follow from the tensor alone: the sums are the same, to the last bit, however the pieces are divided between
    processes. A tensor has at most some thousand pieces, if that leaves 8 MiB for each.

    Args:
        shape: of the tensor.
        dtype: of the tensor.
        max_bytes: of a piece.
    """
    n_bytes = min(max_bytes, max(_MIN_PIECE_BYTES, min(dtypes.n_bytes(dtype, shape) // _MANY_PIECES, _BUFFER_BYTES)))
    bits = dtypes.bits(dtype)
    return regions(shape, max(n_bytes * 8 // bits, 1), bits)


class Span(NamedTuple):
    """Some pieces of a tensor.

    Attributes:
        key: the tensor.
        first: number of the first piece.
        end: number of the piece after the last; None: these are all pieces.
    """

    key: str
    first: int
    end: int | None


def by_shares(
    on: Place,
    sizes: Mapping[str, int],
    pieces: Callable[[str], Iterable[int]],
    work_of: Callable[[list[list[Span]]], Work[Any]],
    made: Callable[..., _T],
    *,
    progress: Progress | None,
) -> Iterator[tuple[str, _T]]:
    """What the processes of a place find in the pieces of tensors.

    Args:
        on: where.
        sizes: bytes of each tensor.
        pieces: as for `shared_out`.
        work_of: the work on the pieces of each share. A share returns what it finds in each of its spans, see `packed`.
        made: makes a find of its numbers.
        progress: called as `progress(done_bytes, total_bytes)`.

    Returns:
        The tensor of each find, and the find, in the order of the tensors and their pieces.
    """
    n_bytes = sum(sizes.values())
    shares = shared_out(sizes, on.n_shares(n_bytes), pieces)
    results, _ = do_shares(on, work_of(shares), len(shares), n_bytes, progress)
    for spans, of_spans in zip(shares, results, strict=True):
        for span, found in zip(spans, json.loads(of_spans), strict=True):
            for one in found:
                yield span.key, made(*one)


def packed(finds: Iterable[Sequence[Any]]) -> str:
    """What a share finds in each of its spans, objects with slots of numbers, as one text: these take more memory.

    Example:
        >>> from reshard.verbs.stats import _Sums
        >>> packed([[_Sums(n=3, low=0.5)], []])
        '[[[3,0,0,0,0.5,-Infinity,0.0,0.0,1.0]],[]]'
    """
    rows = [[[getattr(one, name) for name in one.__slots__] for one in found] for found in finds]
    return json.dumps(rows, separators=(",", ":"))


def shared_out(sizes: Mapping[str, int], n_shares: int, pieces: Callable[[str], Iterable[int]]) -> list[list[Span]]:
    """The pieces that each share reads: as many bytes for each, in the order of the tensors.

    Args:
        sizes: bytes of each tensor.
        n_shares: how many shares there are at most.
        pieces: the bytes of each piece of a tensor. It is called for those that several shares read.

    Example:
        >>> shared_out({"v": 2 << 20, "w": 6 << 20}, 2, lambda _: [2 << 20] * 3)[1]
        [Span(key='w', first=1, end=3)]
    """
    keys = list(sizes)
    n_shares = max(1, min(n_shares, sum(1 + size // MIN_CUT_BYTES for size in sizes.values())))
    parts = cut([*sizes.values()], n_shares)
    borders: dict[str, list[int]] = {key: [0] for key in keys}
    for part in (part for share in parts for part in share):
        borders[keys[part.file]].append(part.end)
    numbers = {key: _n_before(of_key, pieces(key)) for key, of_key in borders.items() if len(of_key) > 2}
    shares: list[list[Span]] = []
    for share in parts:
        spans: list[Span] = []
        for key, is_whole in ((keys[part.file], part.is_whole) for part in share):
            if is_whole:
                spans.append(Span(key, 0, None))
                continue
            first, end = numbers[key].pop(0), numbers[key][0]
            if first < end:
                is_all = first == 0 and end == numbers[key][-1]
                spans.append(Span(key, first, None if is_all else end))
        shares.append(spans)
    return shares


def _n_before(borders: Sequence[int], pieces: Iterable[int]) -> list[int]:
    """How many pieces have their middle before each border."""
    numbers, number, end = list[int](), 0, 0
    for number, n_bytes in enumerate(pieces):
        while borders[len(numbers)] <= end + n_bytes // 2:
            numbers.append(number)
        end += n_bytes
    return numbers + [number + 1] * (len(borders) - len(numbers))


def batches(slices: Iterable[_T], slice_of: Callable[[_T], Slice]) -> Iterator[list[_T]]:
    """Slices that are read at a time, so that they fit into a buffer."""
    return in_batches(slices, lambda one: slice_of(one).n_bytes + _ALIGN_BYTES, _BUFFER_BYTES, _MAX_ARRAYS)
