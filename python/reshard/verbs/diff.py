"""Compares two checkpoints of any formats and layouts, tensor by tensor.

Tensors are equal if key, dtype, shape and every bit are equal: a NaN equals a NaN with the same bits, and -0.0 differs
from 0.0. Bytes are compared first, values only where bytes differ. Both sides are read region by region into two
buffers, so memory use does not depend on the size of a tensor. Counters and files beside the tensors are not compared.

A tensor that differs has norms and a relative change. A tolerance separates differences that are only rounding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

from reshard import _core, dtypes, opening
from reshard.conversion.shares import digest_of
from reshard.errors import ArgumentError, MismatchError
from reshard.ranks.led import LedRanks
from reshard.ranks.places import Work
from reshard.values.argument_types import Part, PlaceLike, Progress, Size
from reshard.values.arguments import checked, parse_size
from reshard.values.indexing import in_batches
from reshard.values.words import show
from reshard.verbs.slices import Span, by_shares, packed, pieces_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

    from reshard.checkpoint import Checkpoint
    from reshard.opening import StrategyLike
    from reshard.ranks.places import Place
    from reshard.values.indexing import Region

Sort = Literal["stored", "change"]
Tolerance = tuple[float, float]
"""The absolute and the relative tolerance."""

_ALIGN_BYTES = 64
# Elements compared at a time, so that temporary arrays stay in the cache. A multiple of 8: a block is whole bytes.
_BLOCK_BYTES = 1 << 20
_BLOCK_ELEMENTS = 1 << 14
_SMALL_BYTES = 1 << 13  # of a region that is compared together with others
_MANY = 256  # such regions whose values are compared at once
_MANY_SMALL = 1 << 14  # whole tensors of this size whose bytes are compared at once
_BATCH_BYTES = 8 << 20  # of them
_FLOATS = {"F64", "F32", "F16", "BF16"}  # compared by the core, if they are not small


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that differs between the two checkpoints.

    Attributes:
        key: its name.
        kind: "only in a", "only in b", "shape", "dtype" or "values": the first that applies.
        dtype_a: its dtype in the first checkpoint, or None if it is missing there.
        dtype_b: its dtype in the second checkpoint, or None.
        shape_a: its global shape in the first checkpoint in elements, or None.
        shape_b: its global shape in the second checkpoint, or None.
        n_elements: number of elements.
        n_different: number of elements that differ; None if the tensor is missing on one side or the shapes differ.
            Bits are compared if the dtypes are equal, else values in double precision.
        n_nan: number of those elements that are NaN on one side only.
        max_abs: the largest absolute difference of two elements, without those of `n_nan`. None if elements are not
            compared, and for packed dtypes, which are not decoded. The attributes below are None then, too.
        norm_a: the Euclidean norm of the elements in the first checkpoint that are finite.
        norm_b: the same for the second checkpoint.
        norm_change: the norm of the difference of the elements that are finite in both.
        change: the relative change, `norm_change / norm_a`; infinite if `norm_a` is 0, and if a NaN or an infinity is
            on one side only.
        n_outside: number of elements outside the tolerance; None without a tolerance. For packed dtypes and a
            tolerance, the number of elements that differ.
    """

    key: str
    kind: Literal["only in a", "only in b", "shape", "dtype", "values"]
    dtype_a: str | None
    dtype_b: str | None
    shape_a: tuple[int, ...] | None
    shape_b: tuple[int, ...] | None
    n_elements: int
    n_different: int | None = None
    n_nan: int | None = None
    max_abs: float | None = None
    norm_a: float | None = None
    norm_b: float | None = None
    norm_change: float | None = None
    change: float | None = None
    n_outside: int | None = None

    @property
    def close(self) -> bool:
        """Whether all elements are within the tolerance; False without a tolerance."""
        return self.n_outside == 0


@dataclass(frozen=True)
class DiffReport:
    """The result of a comparison.

    Attributes:
        a: the folder or file of the first checkpoint.
        b: the folder or file of the second checkpoint.
        n_equal: number of equal tensors.
        n_bytes: bytes of tensors that were read from both.
        differences: the tensors that differ, also those within the tolerance. In the order of the first checkpoint,
            then those only in the second; with `sort="change"`, the largest relative change first.
    """

    a: str
    b: str
    n_equal: int
    n_bytes: int
    differences: tuple[TensorDifference, ...]

    @property
    def equal(self) -> bool:
        """Whether all tensors are equal."""
        return not self.differences

    @property
    def close(self) -> bool:
        """Whether all tensors are equal or within the tolerance."""
        return all(one.close for one in self.differences)


@checked
def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    part: Part = "all",
    strategy_a: StrategyLike | None = None,
    strategy_b: StrategyLike | None = None,
    sort: Sort = "stored",
    atol: float | None = None,
    rtol: float | None = None,
    format_a: str | None = None,
    format_b: str | None = None,
    memory: Size = "256MiB",
    threads: int | None = None,
    on: PlaceLike = None,
    progress: Progress | None = None,
) -> DiffReport:
    """Compare the tensors of two checkpoints.

    Two elements x and y are within the tolerance if `|x - y| <= atol + rtol * max(|x|, |y|)`, computed in double
    precision, or if both are NaN. Rounding to bfloat16 is within `rtol=2**-8`, to float16 within `rtol=2**-11,
    atol=2**-25`.

    Args:
        a: path of the first checkpoint: anything that `reshard.open` opens.
        b: path of the second checkpoint; its format and layout may differ.
        part: "model", "optimizer" or "all". Hugging Face folders and plain files hold only model tensors.
        strategy_a: the strategy of the first checkpoint, if it consists of rank folders; as `strategy` of
            `reshard.open`.
        strategy_b: the strategy of the second checkpoint.
        format_a: of a first folder that holds checkpoints of several formats, which one is compared, as `format` of
            `reshard.open`.
        format_b: the same of the second.
        sort: the order of the differences: "stored", or "change": tensors that are missing or have another shape, then
            the largest relative change first.
        atol: the absolute tolerance; None: 0 if `rtol` is given, else there is no tolerance.
        rtol: the relative tolerance; None: 0 if `atol` is given.
        memory: size of the buffers, such as "256MiB", or bytes. Other memory use does not depend on the model.
        threads: number of threads that copy.
        on: where the tensors are compared: a `reshard.ray.Ray`, or `reshard.ranks.led.LedRanks`, all of which call
            this.
        progress: called as `progress(done_bytes, total_bytes)`.

    Returns:
        The differences.

    Raises:
        CheckpointNotFoundError, DamagedFileError, CoverageError, StorageError: a checkpoint cannot be opened or read.
        ArgumentError: `part`, `sort`, `memory` or a tolerance is invalid.
        LayoutError: rank folders without a strategy.

    Example:
        >>> import numpy as np, reshard
        >>> reshard.save_file({"w": np.zeros(4), "b": np.ones(2)}, "a.safetensors")
        >>> reshard.save_file({"w": np.array([0, 0, 0.5, 0]), "b": np.ones(2)}, "b.safetensors")
        >>> report = reshard.diff("a.safetensors", "b.safetensors")
        >>> report.n_equal, [(d.key, d.n_different, d.max_abs) for d in report.differences]
        (1, [('w', 1, 0.5)])
        >>> reshard.diff("a.safetensors", "b.safetensors", atol=0.5).close
        True
    """
    tolerance = _tolerance(atol, rtol)
    if not isinstance(sort, str) or sort not in ("stored", "change"):
        raise ArgumentError(f'`sort` is {show(str(sort))}, expected "stored" or "change"')
    max_bytes = parse_size(memory)
    asked = _Asked(a, b, part, strategy_a, strategy_b, format_a, format_b, tolerance, max_bytes)
    lead = functools.partial(_diff, asked, threads=threads, on=on, progress=progress)
    work = functools.partial(_comparing, asked)
    report = on.led(lead, work, _Spans, DiffReport) if isinstance(on, LedRanks) else lead()
    if sort == "stored":
        return report
    order = sorted(report.differences, key=lambda one: math.inf if one.change is None else one.change, reverse=True)
    return dataclasses.replace(report, differences=tuple(sorted(order, key=lambda one: one.change is not None)))


def _diff(asked: _Asked, *, threads: int | None, on: Place | None, progress: Progress | None) -> DiffReport:
    with asked.opened() as (left, right):
        compare: Callable[[list[_Pair]], dict[str, TensorDifference]] | None = None
        if on is not None:
            compare = functools.partial(
                _compared_on, on, asked, _digests(left, right), threads=threads, progress=progress
            )
        return diff_opened(
            left,
            right,
            part=asked.part,
            tolerance=asked.tolerance,
            max_bytes=asked.max_bytes,
            threads=threads,
            progress=progress,
            compare=compare,
        )


def _tolerance(atol: float | None, rtol: float | None) -> Tolerance | None:
    for name, value in (("atol", atol), ("rtol", rtol)):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 <= value < math.inf):
            raise ArgumentError(f"`{name}` is {show(repr(value))[1:-1]}, expected a finite number from 0 on")
    return None if atol is None and rtol is None else (float(atol or 0), float(rtol or 0))


def diff_opened(
    left: Checkpoint,
    right: Checkpoint,
    *,
    part: Part = "all",
    tolerance: Tolerance | None = None,
    max_bytes: int,
    threads: int | None = None,
    progress: Progress | None = None,
    compare: Callable[[list[_Pair]], dict[str, TensorDifference]] | None = None,
) -> DiffReport:
    """Compare the tensors of two opened checkpoints, as `diff`.

    Args:
        left: the first checkpoint.
        right: the second checkpoint.
        part: "model", "optimizer" or "all".
        tolerance: the absolute and the relative tolerance.
        max_bytes: size of the buffers, in bytes.
        threads: number of threads that copy.
        progress: called as `progress(done_bytes, total_bytes)`.
        compare: finds the differences of tensors that are in both, by key; None: this process does.

    Raises:
        DamagedFileError, CoverageError, StorageError: a checkpoint cannot be read.

    Example:
        >>> import numpy as np, reshard
        >>> reshard.save_file({"w": np.zeros(4)}, "w.safetensors")
        >>> with reshard.open("w.safetensors") as opened:
        ...     diff_opened(opened, opened, max_bytes=1 << 20).equal
        True
    """
    half_bytes = max(max_bytes // 2, 1)
    keys, other = left.keys(part), set(right.keys(part))
    common = [key for key in keys if key in other]
    for side in (left, right):
        if side.unplaced():
            side._check_placed(*common)  # noqa: SLF001  the check of a read
    pairs = _pairs(left, right, common, tolerance)
    n_bytes = _comparable_bytes(pairs)
    if compare is None:
        found = _compared(left, right, pairs, half_bytes=half_bytes, threads=threads, progress=progress)
    else:
        found = compare(pairs)
    unmatched = set(keys) - other
    found |= {key: _unmatched(left, key, is_a=True) for key in keys if key in unmatched}
    differences = [found[key] for key in keys if key in found]
    known = set(keys)
    differences += [_unmatched(right, key, is_a=False) for key in right.keys(part) if key not in known]
    return DiffReport(str(left.path), str(right.path), len(keys) - len(found), n_bytes, tuple(differences))


def _comparable_bytes(pairs: Sequence[_Pair]) -> int:
    return sum(sum(pair.kind.n_bytes) for pair in pairs if pair.kind.is_comparable)


def _compared(
    left: Checkpoint,
    right: Checkpoint,
    pairs: list[_Pair],
    *,
    half_bytes: int,
    threads: int | None,
    progress: Progress | None = None,
) -> dict[str, TensorDifference]:
    """The differences of tensors that are in both, by key."""
    n_bytes = _comparable_bytes(pairs)
    spans = [(pair, 0, None) for pair in pairs if pair.kind.is_comparable]

    def advance(done: int) -> None:
        if progress is not None:
            progress(done, n_bytes)

    for pair, counts in _counted(left, right, spans, half_bytes=half_bytes, threads=threads, advance=advance):
        pair.join(counts)
    return _differences(pairs)


def _differences(pairs: Sequence[_Pair]) -> dict[str, TensorDifference]:
    return {pair.key: difference for pair in pairs if (difference := pair.difference()) is not None}


def _counted(
    left: Checkpoint,
    right: Checkpoint,
    spans: Sequence[tuple[_Pair, int, int | None]],
    *,
    half_bytes: int,
    threads: int | None,
    advance: Callable[[int], None],
) -> Iterator[tuple[_Pair, _Counts]]:
    """What pieces of tensors have, in their order; not of tensors that are equal as a whole.

    Args:
        left: the first checkpoint.
        right: the second checkpoint.
        spans: the tensors, and which pieces of each: the first and the end, or all.
        half_bytes: size of the buffer of each side.
        threads: number of threads that copy.
        advance: called with the bytes that were compared so far.
    """
    done = 0
    equal: set[_Pair] = set()
    for same in _equal_small(left, right, spans, half_bytes=half_bytes, threads=threads):
        equal.update(same)
        done += sum(sum(pair.kind.n_bytes) for pair in same)
        advance(done)
    spans = [span for span in spans if span[0] not in equal]
    comparison = _Comparison(left, right, half_bytes, threads)
    pair_regions = (one for pair, first, end in spans for one in _regions_of(pair, first, end, half_bytes))
    for batch in in_batches(pair_regions, lambda one: _aligned(max(one.n_bytes)), half_bytes):
        comparison.compare(batch)
        done += sum(region.n_bytes[0] + region.n_bytes[1] for region in batch)
        for region in batch:
            for counts in region.found:
                yield region.pair, counts
        advance(done)


def _equal_small(
    left: Checkpoint,
    right: Checkpoint,
    spans: Sequence[tuple[_Pair, int, int | None]],
    *,
    half_bytes: int,
    threads: int | None,
) -> Iterator[list[_Pair]]:
    """The small tensors whose bytes are equal, in several lists: the core compares many at once."""
    small = (pair for pair, _, end in spans if end is None and pair.kind.is_small)
    for batch in in_batches(small, lambda pair: pair.kind.n_bytes[0], min(half_bytes, _BATCH_BYTES), _MANY_SMALL):
        keys = [pair.key for pair in batch]
        a, b = (side.plan(side.data.index.whole_request(keys), keys=keys) for side in (left, right))
        yield list(itertools.compress(batch, a.are_equal(b, threads=threads)))


class _Asked(NamedTuple):
    """What `diff` is asked for, as another process needs it."""

    a: str | os.PathLike[str]
    b: str | os.PathLike[str]
    part: Part
    strategy_a: StrategyLike | None
    strategy_b: StrategyLike | None
    format_a: str | None
    format_b: str | None
    tolerance: Tolerance | None
    max_bytes: int

    @contextlib.contextmanager
    def opened(self, digests: tuple[str, str] | None = None) -> Iterator[tuple[Checkpoint, Checkpoint]]:
        """Both checkpoints. Raises MismatchError: one of them was changed in the block."""
        with (
            opening.open(self.a, strategy=self.strategy_a, format=self.format_a) as left,
            opening.open(self.b, strategy=self.strategy_b, format=self.format_b) as right,
        ):
            if digests is not None and digests != _digests(left, right):
                raise MismatchError(
                    f"{show(str(left.path))} or {show(str(right.path))} is not what it is where the comparison began",
                    path=str(left.path),
                    hint="all hosts must see the same files under the same paths",
                )
            yield left, right
            left.check_unchanged()
            right.check_unchanged()


def _digests(left: Checkpoint, right: Checkpoint) -> tuple[str, str]:
    """What tells both from other checkpoints at their paths."""
    return digest_of(left, {}), digest_of(right, {})


def _compared_on(
    on: Place,
    asked: _Asked,
    digests: tuple[str, str],
    pairs: list[_Pair],
    *,
    threads: int | None,
    progress: Progress | None,
) -> dict[str, TensorDifference]:
    """As `_compared`, by the processes of a place: each compares as many bytes."""
    comparable = {pair.key: pair for pair in pairs if pair.kind.is_comparable}
    half_bytes = max(asked.max_bytes // 2, 1)
    sizes = {key: sum(pair.kind.n_bytes) for key, pair in comparable.items()}

    def pieces(key: str) -> Iterator[int]:
        kind = comparable[key].kind
        return (sum(_n_bytes(dtype, shape) for dtype in kind.dtypes) for _, shape in kind.pieces(half_bytes))

    def work_of(shares: list[list[Span]]) -> Work[Any]:
        return _comparing(asked, _Spans(digests, shares, threads or on.cpus))

    for key, counts in by_shares(on, sizes, pieces, work_of, _Counts, progress=progress):
        comparable[key].join(counts)
    return _differences(pairs)


@dataclass(frozen=True)
class _Spans:
    """Tensors that several processes compare, once one of them has opened both checkpoints.

    Attributes:
        digests: what tells the checkpoints from others at their paths.
        shares: the pieces of tensors of each share.
        threads: of each process.
    """

    digests: tuple[str, str]
    shares: list[list[Span]]
    threads: int | None


def _comparing(asked: _Asked, sent: _Spans) -> Work[_Spans]:
    return Work(functools.partial(_sent_spans, asked), sent, str)


def _sent_spans(asked: _Asked, sent: _Spans, index: int) -> tuple[int, str]:
    """Compare the pieces of a share: one result for a tensor, none if it is equal, or one for each piece of a part."""
    spans, n_bytes = sent.shares[index], 0

    def advance(done: int) -> None:
        nonlocal n_bytes
        n_bytes = done

    found: dict[str, list[_Counts]] = {span.key: [] for span in spans}
    with asked.opened(sent.digests) as (left, right):
        pairs = _pairs(left, right, [span.key for span in spans], asked.tolerance)
        is_whole = {span.key: span.end is None for span in spans}
        ranges = [(pair, span.first, span.end) for pair, span in zip(pairs, spans, strict=True)]
        half_bytes = max(asked.max_bytes // 2, 1)
        compared = _counted(left, right, ranges, half_bytes=half_bytes, threads=sent.threads, advance=advance)
        for pair, counts in compared:
            if is_whole[pair.key] and found[pair.key]:
                found[pair.key][0].join(counts)
            else:
                found[pair.key].append(counts)
    return n_bytes, packed(found[span.key] for span in spans)


def _unmatched(opened: Checkpoint, key: str, *, is_a: bool) -> TensorDifference:
    info = opened[key]
    n = math.prod(info.shape)
    if is_a:
        return TensorDifference(key, "only in a", info.dtype, None, info.shape, None, n)
    return TensorDifference(key, "only in b", None, info.dtype, None, info.shape, n)


_n_bytes = functools.lru_cache(maxsize=1024)(dtypes.n_bytes)  # many tensors have the same shape


class _PairKind:
    """What pairs with the same dtypes and shapes have in common: thousands of tensors are of a few kinds."""

    __slots__ = ("dtypes", "is_comparable", "is_packed", "is_small", "n_bytes", "shapes", "tolerance")

    def __init__(
        self, a: tuple[str, tuple[int, ...]], b: tuple[str, tuple[int, ...]], tolerance: Tolerance | None
    ) -> None:
        self.dtypes = (a[0], b[0])
        self.shapes = (a[1], b[1])
        self.n_bytes = (_n_bytes(*a), _n_bytes(*b))
        self.is_packed = dtypes.is_packed(a[0]) or dtypes.is_packed(b[0])
        # Packed elements are not decoded, so they cannot be compared with another dtype.
        self.is_comparable = a[1] == b[1] and (a[0] == b[0] or not self.is_packed)
        # A tensor whose bytes are compared before its values, together with others.
        self.is_small = a == b and 0 < self.n_bytes[0] <= _SMALL_BYTES
        self.tolerance = tolerance

    def pieces(self, max_bytes: int) -> Iterator[Region]:
        """The pieces that are compared on their own, see `pieces_of`."""
        return pieces_of(self.shapes[0], max(self.dtypes, key=dtypes.bits), max_bytes)


class _Pair:
    """A tensor in both checkpoints, and the result of its comparison so far; None: no element was compared by value."""

    __slots__ = ("_found", "key", "kind")

    def __init__(self, key: str, kind: _PairKind) -> None:
        self.key = key
        self.kind = kind
        self._found: _Counts | None = None

    def join(self, counts: _Counts) -> None:
        """Add those of the piece that follows."""
        if self._found is None:
            self._found = counts
        else:
            self._found.join(counts)

    def difference(self) -> TensorDifference | None:
        kind: Literal["shape", "dtype", "values"]
        of = self.kind
        if of.shapes[0] != of.shapes[1]:
            kind = "shape"
        elif of.dtypes[0] != of.dtypes[1]:
            kind = "dtype"
        elif self._found is not None and self._found.n_different:
            kind = "values"
        else:
            return None
        n = math.prod(of.shapes[0])
        facts = (self.key, kind, *of.dtypes, *of.shapes, n)
        if not of.is_comparable:
            return TensorDifference(*facts)
        found = self._found or _Counts()
        if of.is_packed:
            n_outside = None if of.tolerance is None else found.n_different
            return TensorDifference(*facts, found.n_different, n_outside=n_outside)
        norm_a, norm_b, norm_change = map(math.sqrt, (found.squares_a, found.squares_b, found.squares_change))
        relative = norm_change / norm_a if norm_a else math.inf if norm_change else 0.0
        return TensorDifference(
            *facts,
            n_different=found.n_different,
            n_nan=found.n_nan,
            max_abs=found.max_abs,
            norm_a=norm_a,
            norm_b=norm_b,
            norm_change=norm_change,
            # The norms of values near the largest double are infinite, and their ratio is no number.
            change=math.inf if found.n_nan or found.max_abs == math.inf or math.isnan(relative) else relative,
            n_outside=None if of.tolerance is None else found.n_outside,
        )


def _pairs(left: Checkpoint, right: Checkpoint, keys: Sequence[str], tolerance: Tolerance | None) -> list[_Pair]:
    """The pairs of keys that both have."""
    infos_a, infos_b = _infos(left, keys), _infos(right, keys)
    known: dict[tuple[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...]]], _PairKind] = {}
    pairs = []
    for key in keys:
        a, b = infos_a[key], infos_b[key]
        if (a, b) not in known:
            known[a, b] = _PairKind(a, b, tolerance)
        pairs.append(_Pair(key, known[a, b]))
    return pairs


def _infos(opened: Checkpoint, keys: Sequence[str]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of the tensors: where all are compared, one call for each way of storing one."""
    index = opened.data.index
    if len(keys) < len(index):
        return {key: index.info(key) for key in keys}
    keys = index.keys()
    kind_of, firsts = index.alike()
    infos = [index.info(keys[first]) for first in firsts]
    return dict(zip(keys, map(infos.__getitem__, kind_of), strict=True))


@dataclass(slots=True)
class _Counts:
    n_different: int = 0
    n_nan: int = 0
    n_outside: int = 0
    max_abs: float = 0.0
    squares_a: float = 0.0
    squares_b: float = 0.0
    squares_change: float = 0.0

    def join(self, other: _Counts) -> None:
        """Add those of a block or a piece that follows."""
        self.n_different += other.n_different
        self.n_nan += other.n_nan
        self.n_outside += other.n_outside
        self.max_abs = max(self.max_abs, other.max_abs)
        self.squares_a += other.squares_a
        self.squares_b += other.squares_b
        self.squares_change += other.squares_change


# -- regions that are read at a time


class _PairRegion:
    """A region of a pair's tensor, its bytes on both sides, and what its pieces have: none if the tensor is equal."""

    __slots__ = ("found", "n_bytes", "offset", "pair", "shape")

    def __init__(self, pair: _Pair, offset: tuple[int, ...], shape: tuple[int, ...], n_bytes: tuple[int, int]) -> None:
        self.pair = pair
        self.offset = offset
        self.shape = shape
        self.n_bytes = n_bytes
        self.found: list[_Counts] = []


def _regions_of(pair: _Pair, first: int, end: int | None, max_bytes: int) -> Iterator[_PairRegion]:
    """All of a tensor if it fits and no end is given, and else each piece."""
    kind = pair.kind
    shape = kind.shapes[0]
    if end is None and min(kind.n_bytes) > 0 and max(kind.n_bytes) <= max_bytes:
        yield _PairRegion(pair, (0,) * len(shape), shape, kind.n_bytes)
        return
    a, b = kind.dtypes
    for offset, extent in itertools.islice(kind.pieces(max_bytes), first, end):
        yield _PairRegion(pair, offset, extent, (_n_bytes(a, extent), _n_bytes(b, extent)))


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


_Read = tuple[_PairRegion, np.ndarray, np.ndarray]
"""A region, and its bytes on both sides."""


class _Comparison:
    """Two buffers that are filled from both sides and compared, batch by batch."""

    def __init__(self, left: Checkpoint, right: Checkpoint, half_bytes: int, threads: int | None) -> None:
        self.sides = (left, right)
        self.threads = threads
        self.buffers = [np.empty(0, np.uint8) for _ in range(2)]
        self.half_bytes = half_bytes

    def compare(self, batch: list[_PairRegion]) -> None:
        small: dict[tuple[str, str], list[_Read]] = {}
        for region, a, b in zip(batch, *(self._read(side, batch) for side in range(2)), strict=True):
            pair = region.pair
            if region.n_bytes == pair.kind.n_bytes and pair.kind.dtypes[0] == pair.kind.dtypes[1] and _same(a, b):
                continue  # a whole tensor that is equal: its norms are not needed
            if pair.kind.is_packed:
                _compare_packed(region, a, b)
            elif max(region.n_bytes) > _SMALL_BYTES:
                _compare(region, a, b, self.half_bytes, self.threads)
            else:
                several = small.setdefault(pair.kind.dtypes, [])
                several.append((region, a, b))
                if len(several) == _MANY:
                    _compare_small(small.pop(pair.kind.dtypes))
        for several in small.values():
            _compare_small(several)

    def _read(self, side: int, batch: list[_PairRegion]) -> list[np.ndarray]:
        opened = self.sides[side]
        keys = [region.pair.key for region in batch]
        starts, end = [], 0
        for region in batch:
            starts.append(end)
            end += _aligned(region.n_bytes[side])
        if all(map(_is_whole, batch)):
            request = opened.data.index.whole_request(keys)
        else:
            request = _core.Request()
            for i, region in enumerate(batch):
                request.add_region(str(i), region.pair.key, region.offset, region.shape)
        if end > self.buffers[side].size:
            self.buffers[side] = np.empty(end, np.uint8)
        buffer = self.buffers[side]
        arrays = [buffer[start : start + region.n_bytes[side]] for start, region in zip(starts, batch, strict=True)]
        opened.plan(request, keys=set(keys)).fill(arrays, threads=self.threads)
        return arrays


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether bytes are equal. Views of bytes are compared one by one, and arrays need memory for the result."""
    blocks = (slice(start, start + _BLOCK_BYTES) for start in range(0, a.size, _BLOCK_BYTES))
    return all(np.array_equal(a[block], b[block]) for block in blocks)


def _is_whole(region: _PairRegion) -> bool:
    return region.shape == region.pair.kind.shapes[0]


# -- bytes, then values


def _compare_packed(region: _PairRegion, a: np.ndarray, b: np.ndarray) -> None:
    """Compare the bits of one region, block by block."""
    bits = dtypes.bits(region.pair.kind.dtypes[0])
    n_bytes = _BLOCK_ELEMENTS * bits // 8
    counts = _Counts()
    for start in range(0, a.size, n_bytes):
        x, y = a[start : start + n_bytes], b[start : start + n_bytes]
        if not np.array_equal(x, y):
            differs = np.unpackbits(x ^ y, bitorder="little").reshape(-1, bits).any(axis=1)
            counts.n_different += int(np.count_nonzero(differs))
    region.found.append(counts)


def _compare(region: _PairRegion, a: np.ndarray, b: np.ndarray, max_bytes: int, threads: int | None) -> None:
    """Compare the elements of one region, piece by piece."""
    kind = region.pair.kind
    x, y = _values(a, kind.dtypes[0]), _values(b, kind.dtypes[1])
    sizes = [math.prod(extent) for _, extent in kind.pieces(max_bytes)] if _is_whole(region) else [x.size]
    start = 0
    for size in sizes:
        piece = slice(start, start + size)
        region.found.append(_compare_piece(x[piece], y[piece], kind, threads))
        start += size


def _compare_piece(x: np.ndarray, y: np.ndarray, kind: _PairKind, threads: int | None) -> _Counts:
    with np.errstate(invalid="ignore", over="ignore"):
        if max(x.nbytes, y.nbytes) <= _SMALL_BYTES:
            (counts,) = _compare_block(_Parts(np.zeros(1, np.intp)), x, y, kind.tolerance)
        elif _FLOATS.issuperset(kind.dtypes):
            sides = [(dtype, side.view(np.uint8)) for dtype, side in zip(kind.dtypes, (x, y), strict=True)]
            counts = _Counts(*_core.changes(*sides, tolerance=kind.tolerance, threads=threads))
        else:
            counts = _Counts()
            for start in range(0, x.size, _BLOCK_ELEMENTS):
                block = slice(start, start + _BLOCK_ELEMENTS)
                counts.join(*_compare_block(_Parts(None), x[block], y[block], kind.tolerance))
    return counts


def _compare_small(several: list[_Read]) -> None:
    """Compare the elements of several small regions of the same dtypes at once."""
    kind = several[0][0].pair.kind
    x, y = (
        _values(np.concatenate(sides), dtype)
        for sides, dtype in zip(([a for _, a, _ in several], [b for _, _, b in several]), kind.dtypes, strict=True)
    )
    sizes = [a.size // x.itemsize for _, a, _ in several]
    with np.errstate(invalid="ignore", over="ignore"):
        found = _compare_block(_Parts(np.cumsum([0, *sizes[:-1]])), x, y, kind.tolerance)
    for (region, _, _), counts in zip(several, found, strict=True):
        region.found.append(counts)


def _values(array: np.ndarray, dtype: str) -> np.ndarray:
    return array.view(dtypes.numpy_dtype(dtype))


class _Parts(NamedTuple):
    """The parts of a block, which are of several small pieces, and sums over each.

    The sums of a part are the same whatever else is in the block.

    Attributes:
        starts: the first element of each part; None: the block is one part, of a piece that is not small.
    """

    starts: np.ndarray | None

    def n_true(self, flags: np.ndarray) -> list[int]:
        if self.starts is None:
            return [int(np.count_nonzero(flags))]
        return list(np.add.reduceat(flags.astype(bool), self.starts, dtype=np.int64).tolist())

    def largest(self, values: np.ndarray) -> list[float]:
        if self.starts is None:
            return [float(values.max(initial=0.0))]
        return list(np.maximum.reduceat(values, self.starts).tolist())

    def squares(self, values: np.ndarray) -> list[float]:
        """The sum of the squares of all values."""
        parts = values.view(np.float64)  # of complex numbers
        if self.starts is None:
            return [float(np.einsum("i,i->", parts, parts))]  # np.dot starts threads for a block
        return list(np.add.reduceat(parts * parts, self.starts * (parts.size // values.size)).tolist())

    def finite_squares(self, values: np.ndarray) -> list[float]:
        """The sum of the squares of the values that are finite."""
        found = self.squares(values)
        return found if _are_finite(found) else self.squares(np.where(np.isfinite(values), values, 0.0))


def _are_finite(sums: list[float]) -> bool:
    return math.isfinite(sum(sums))


def _compare_block(parts: _Parts, a: np.ndarray, b: np.ndarray, tolerance: Tolerance | None) -> list[_Counts]:
    """What each part of a block has."""
    kind = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
    x = _wide(a, kind)
    differs = _bits(a) != _bits(b) if a.dtype == b.dtype else None
    if differs is not None and not differs.any():
        return [_Counts(squares_a=squares, squares_b=squares) for squares in parts.finite_squares(x)]
    y = _wide(b, kind)
    change = x - y
    sums = parts.squares(x), parts.squares(y), parts.squares(change)
    n_nan = n_outside = [0] * len(sums[0])
    if a.dtype.kind not in "biu" and all(map(_are_finite, sums)):
        distance = np.abs(change)
        n_different = parts.n_true(distance if differs is None else differs)
        if tolerance is not None:
            n_outside = parts.n_true(distance > _allowed(x, y, tolerance))
    else:
        is_nan_x, is_nan_y = np.isnan(x), np.isnan(y)
        is_either_nan = is_nan_x | is_nan_y
        is_same = (x == y) | (is_nan_x & is_nan_y)
        if a.dtype.kind in "biu" and b.dtype.kind in "biu":
            # Doubles do not hold every integer of 64 bits, but their exact difference is below 2**64.
            change = distance = _integer_distance(a, b)
            is_same = distance == 0
        else:
            # The difference of complex infinities can be NaN although neither operand is NaN.
            distance = np.nan_to_num(np.abs(x - y), nan=np.inf, posinf=np.inf)
            distance[is_same | is_either_nan] = 0.0
        n_different = parts.n_true(~is_same if differs is None else differs)
        n_nan = parts.n_true(is_nan_x ^ is_nan_y)
        sums = parts.finite_squares(x), parts.finite_squares(y), parts.finite_squares(change)
        if tolerance is not None:
            # An infinity is within the tolerance of an equal one only, although its allowance is infinite.
            is_close = (distance <= _allowed(x, y, tolerance)) & (distance < np.inf) & ~is_either_nan
            n_outside = parts.n_true(~(is_same | is_close))
    fields = zip(n_different, n_nan, n_outside, parts.largest(distance), *sums, strict=True)
    return list(itertools.starmap(_Counts, fields))


def _allowed(x: np.ndarray, y: np.ndarray, tolerance: Tolerance) -> np.ndarray:
    atol, rtol = tolerance
    allowed: np.ndarray = atol + rtol * np.maximum(np.abs(x), np.abs(y))
    return allowed


def _wide(array: np.ndarray, kind: type[np.float64 | np.complex128]) -> np.ndarray:
    """The values in double precision."""
    if array.dtype == ml_dtypes.bfloat16:  # its bits are the upper half of a float32: faster than astype
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(kind)
    # A boolean's byte may have other values than 0 and 1.
    return (array.view(np.uint8) if array.dtype.kind == "b" else array).astype(kind)


def _bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.dtype(f"u{array.itemsize}"))


def _integer_distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = (side.view(np.uint8) if side.dtype.kind == "b" else side for side in (a, b))
    common = np.result_type(a, b)
    if common.kind not in "iu":  # int64 and uint64 have no common dtype: as integers of Python, for a rare case
        return np.array([abs(x - y) for x, y in zip(a.tolist(), b.tolist(), strict=True)], np.float64)
    a, b = a.astype(common, copy=False), b.astype(common, copy=False)
    # Unsigned subtraction is exact modulo 2**64.
    distance: np.ndarray = np.maximum(a, b).astype(np.uint64) - np.minimum(a, b).astype(np.uint64)
    return distance.astype(np.float64)
