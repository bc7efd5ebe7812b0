"""Statistics of the values of each tensor of a checkpoint: bounds, mean, deviation, zeros, NaN and infinities.

Every element counts once, however many files hold it, and a quantised weight is one tensor of the values that its parts
stand for. Tensors are read slice by slice into one buffer, so memory use does not depend on their size. Sums are in
double precision; those of blocks are joined, so that the deviation of values far from 0 is exact, too. The blocks of a
piece are joined, and then the pieces of a tensor, so that any number of processes makes the same of them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np

from reshard import dtypes, opening
from reshard.conversion.shares import digest_of
from reshard.errors import KeyNotFoundError, MismatchError
from reshard.layout.patterns import Pattern
from reshard.ranks.led import LedRanks
from reshard.ranks.places import Work
from reshard.values.words import show
from reshard.verbs.slices import Buffer, Slice, Span, batches, by_shares, packed, pieces_of, regions_of

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Iterator, Sequence

    from reshard.checkpoint import Checkpoint
    from reshard.opening import StrategyLike
    from reshard.ranks.places import Place
    from reshard.values.argument_types import Progress
    from reshard.values.indexing import Region

_BLOCK_ELEMENTS = 1 << 15  # so that temporary arrays stay in the cache
_LARGE = 2.0**400  # the squares of larger numbers, or their sum, could be infinite
_OF_LARGE = 2.0**-560


@dataclass(frozen=True, slots=True)
class TensorStats:
    """The statistics of a tensor.

    Attributes:
        key: its name.
        dtype: its dtype; of a quantised weight that of the values, F32.
        shape: its shape.
        n_elements: the number of its elements; of complex ones that of the real and imaginary parts, whose statistics
            these are.
        n_nan: how many are NaN.
        n_infinite: how many are infinite.
        n_zero: how many are 0 or -0. None: the values of a dtype below a byte are not decoded; so are those below.
        min: the smallest finite value; None also if there is none, as below.
        max: the largest finite value.
        mean: the mean of the finite values.
        std: their standard deviation, divided by their number, not by one less.
        rms: the square root of the mean of their squares.
        quantised: the kind of a quantised weight, as `kind` of `Checkpoint.quantised`; None: it is none.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    n_elements: int
    n_nan: int = 0
    n_infinite: int = 0
    n_zero: int | None = None
    min: int | float | None = None
    max: int | float | None = None
    mean: float | None = None
    std: float | None = None
    rms: float | None = None
    quantised: str | None = None


@dataclass(frozen=True)
class StatsReport:
    """The statistics of a checkpoint.

    Attributes:
        path: the folder or file.
        format: its format.
        iteration: of a checkpoint root, which one.
        n_bytes: bytes of the tensors that were read, as they are stored; those of a dtype below a byte are not read.
        tensors: the statistics of each tensor, in the order of the checkpoint.
    """

    path: str
    format: str
    iteration: int | None
    n_bytes: int
    tensors: tuple[TensorStats, ...]


def stats(
    path: str | os.PathLike[str],
    pattern: str | None = None,
    *,
    strategy: StrategyLike | None = None,
    format: str | None = None,  # noqa: A002  as of `reshard.open`
    threads: int | None = None,
    on: Place | None = None,
    progress: Progress | None = None,
) -> StatsReport:
    """Read all values of a checkpoint, and count them.

    Args:
        path: anything that `reshard.open` opens.
        pattern: only tensors whose whole key it matches, as in layout files; None: all.
        strategy: of rank folders, as in `reshard.open`.
        format: which checkpoint of a folder with several, as in `reshard.open`.
        threads: threads that read.
        on: where the tensors are read: a `reshard.ray.Ray`, or `reshard.ranks.led.LedRanks`, all of which call this.
        progress: called as `progress(done_bytes, total_bytes)`.

    Raises:
        KeyNotFoundError: no key matches the pattern.
        CheckpointNotFoundError, DamagedFileError, CoverageError, StorageError: it cannot be opened or read.
        LayoutError: rank folders without a strategy.
        MismatchError: it was changed while it was read.

    Example:
        >>> import numpy as np, reshard
        >>> reshard.save_file({"w": np.array([[3.0, -1.0], [0.0, np.nan]], np.float32)}, "some.safetensors")
        >>> (w,) = stats("some.safetensors").tensors
        >>> w.min, w.max, w.n_zero, w.n_nan, round(w.mean, 3), round(w.rms, 3)
        (-1.0, 3.0, 1, 1, 0.667, 1.826)
    """
    asked = _Asked(path, strategy, format)
    lead = functools.partial(_stats, asked, pattern, threads=threads, on=on, progress=progress)
    work = functools.partial(_counting, asked)
    return on.led(lead, work, _Spans, StatsReport) if isinstance(on, LedRanks) else lead()


def _stats(
    asked: _Asked, pattern: str | None, *, threads: int | None, on: Place | None, progress: Progress | None
) -> StatsReport:
    with asked.opened() as (opened, quantised, digest):
        keys = _matching(opened, pattern)
        opened._check_placed(*keys)  # noqa: SLF001  the check of a read
        known: dict[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...]]] = {}  # thousands are of a few kinds
        infos = {key: known.setdefault(one, one) for key in keys for one in [opened._index.info(key)]}  # noqa: SLF001
        sizes = [dtypes.n_bytes(*infos[key]) for key in keys]
        decoded = [key for key in keys if not dtypes.is_packed(infos[key][0])]
        sums: dict[str, _Sums] = {}
        if on is None:
            spans = [Span(key, 0, None) for key in decoded]
            for key, one in _counted(opened, spans, quantised, threads=threads, progress=progress):
                _join(sums, key, one)
        else:
            of_decoded = {key: dtypes.n_bytes(*infos[key]) for key in decoded}

            def pieces(key: str) -> Iterator[int]:
                regions = _pieces_of(*infos[key], key not in quantised)
                return (dtypes.n_bytes(infos[key][0], shape) for _, shape in regions)

            def work_of(shares: list[list[Span]]) -> Work[Any]:
                return _counting(asked, _Spans(digest, shares, threads or on.cpus))

            for key, one in by_shares(on, of_decoded, pieces, work_of, _Sums, progress=progress):
                _join(sums, key, one)
        for key in decoded:
            sums.setdefault(key, _Sums())  # without elements
        kinds = {key: one.kind for key, one in quantised.items()}
        found = [_of(key, *infos[key], sums.get(key), kinds.get(key)) for key in keys]
        stored = [0 if one.n_zero is None else n_bytes for one, n_bytes in zip(found, sizes, strict=True)]
        n_bytes = sum(
            n if key not in quantised else quantised[key].n_bytes for key, n in zip(keys, stored, strict=True)
        )
        return StatsReport(str(opened.path), opened.format, opened.iteration, n_bytes, tuple(found))


def _matching(opened: Checkpoint, pattern: str | None) -> list[str]:
    if pattern is None:
        return opened.keys()
    compiled = Pattern.compile(pattern)
    found = [key for key in opened.keys() if compiled.matches(key)]  # noqa: SIM118  a checkpoint is no mapping
    if not found:
        hint = None if compiled.key is None else f"a pattern matches whole keys: try '*{pattern}*'"
        raise KeyNotFoundError(f"no key matches {pattern}", key=compiled.key, hint=hint)
    return found


class _Quantised(NamedTuple):
    """How a quantised weight is stored."""

    kind: str
    n_bytes: int


class _Asked(NamedTuple):
    """What `stats` is asked for, as another process needs it."""

    path: str | os.PathLike[str]
    strategy: StrategyLike | None
    format: str | None

    @contextlib.contextmanager
    def opened(self, digest: str | None = None) -> Iterator[tuple[Checkpoint, dict[str, _Quantised], str]]:
        """The checkpoint, with ordinary tensors instead of quantised weights, how each is stored, and a digest.

        Raises MismatchError: the digest is another one, or the checkpoint was changed in the block.
        """
        with opening.open(self.path, strategy=self.strategy, format=self.format) as stored:
            own = digest_of(stored, {})
            if digest is not None and digest != own:
                raise MismatchError(
                    f"{show(str(stored.path))} is not what it is where the work began",
                    path=str(stored.path),
                    hint="all hosts must see the same files under the same paths",
                )
            infos = stored._index.info  # noqa: SLF001
            quantised = {
                name: _Quantised(one.kind, sum(dtypes.n_bytes(*infos(part)) for part in one.parts.values()))
                for name, one in stored.quantised().items()
            }
            with stored.dequantised() if quantised else contextlib.nullcontext(stored) as values:
                yield values, quantised, own
            stored.check_unchanged()


def _join(sums: dict[str, _Sums], key: str, one: _Sums) -> None:
    if key in sums:
        sums[key].join(one)
    else:
        sums[key] = one


def _pieces_of(dtype: str, shape: tuple[int, ...], is_stored: bool) -> Iterator[Region]:  # noqa: FBT001
    # A quantised weight is not stored row by row.
    return pieces_of(shape, dtype) if is_stored else regions_of(shape, dtype)


@dataclass(frozen=True)
class _Spans:
    """Tensors that several processes read, once one of them has opened the checkpoint.

    Attributes:
        digest: what tells the checkpoint from others at its path.
        shares: the pieces of tensors of each share.
        threads: of each process.
    """

    digest: str
    shares: list[list[Span]]
    threads: int | None


def _counting(asked: _Asked, sent: _Spans) -> Work[_Spans]:
    return Work(functools.partial(_sent_spans, asked), sent, str)


def _sent_spans(asked: _Asked, sent: _Spans, share: int) -> tuple[int, str]:
    """Count the values of the pieces of a share: one sum of a whole tensor, and else one of each piece."""
    spans, n_bytes = sent.shares[share], 0

    def advance(done: int, _: int) -> None:
        nonlocal n_bytes
        n_bytes = done

    found: dict[str, list[_Sums]] = {span.key: [] for span in spans}
    is_whole = {span.key: span.end is None for span in spans}
    with asked.opened(sent.digest) as (opened, quantised, _):
        for key, one in _counted(opened, spans, quantised, threads=sent.threads, progress=advance):
            if is_whole[key] and found[key]:
                found[key][0].join(one)
            else:
                found[key].append(one)
    return n_bytes, packed(found[span.key] for span in spans)


def _counted(
    opened: Checkpoint,
    spans: Sequence[Span],
    quantised: Collection[str],
    *,
    threads: int | None,
    progress: Progress | None,
) -> Iterator[tuple[str, _Sums]]:
    """The sums of each piece, in their order."""
    infos = {span.key: opened._index.info(span.key) for span in spans}  # noqa: SLF001

    def slices_of(span: Span) -> Iterator[Slice]:
        regions = _pieces_of(*infos[span.key], span.key not in quantised)
        return (Slice(span.key, *infos[span.key], region) for region in itertools.islice(regions, span.first, span.end))

    def n_bytes_of(span: Span) -> int:
        return dtypes.n_bytes(*infos[span.key]) if span.end is None else sum(one.n_bytes for one in slices_of(span))

    total, done = sum(map(n_bytes_of, spans)), 0
    buffer = Buffer()
    slices = (one for span in spans for one in slices_of(span))
    for batch in batches(slices, lambda one: one):
        plan = functools.partial(opened.plan, keys={one.key for one in batch})
        for one, (_, content) in zip(batch, buffer.fill(plan, batch, threads=threads), strict=True):
            values = content.view(dtypes.numpy_dtype(one.dtype))
            sums = _Sums.of(values[:_BLOCK_ELEMENTS])
            for start in range(_BLOCK_ELEMENTS, values.size, _BLOCK_ELEMENTS):
                sums.join(_Sums.of(values[start : start + _BLOCK_ELEMENTS]))
            done += one.n_bytes
            yield one.key, sums
        if progress is not None:
            progress(done, total)


def _of(key: str, dtype: str, shape: tuple[int, ...], sums: _Sums | None, kind: str | None) -> TensorStats:
    if sums is None:
        return TensorStats(key, dtype, shape, math.prod(shape), quantised=kind)
    counts = sums.n + sums.n_nan + sums.n_infinite, sums.n_nan, sums.n_infinite, sums.n_zero
    if not sums.n:
        return TensorStats(key, dtype, shape, *counts, quantised=kind)
    std = math.sqrt(sums.squares / sums.n)
    most = max(abs(float(sums.low)), abs(float(sums.high)))  # rounding leads beyond it, and could to infinity
    mean, std, rms = (min(max(one / sums.scale, -most), most) for one in (sums.mean, std, math.hypot(sums.mean, std)))
    values = (sums.low, sums.high, mean, std, rms)
    return TensorStats(key, dtype, shape, *counts, *values, quantised=kind)


@dataclass(slots=True)
class _Sums:
    """What was found in the blocks of a tensor so far.

    Attributes:
        n: number of finite values.
        mean: their mean, times `scale`.
        squares: the sum of the squares of their distances from their mean, times `scale` twice.
        scale: 1, or a small power of 2 if there are large values.
    """

    n: int = 0
    n_nan: int = 0
    n_infinite: int = 0
    n_zero: int = 0
    low: int | float = math.inf
    high: int | float = -math.inf
    mean: float = 0.0
    squares: float = 0.0
    scale: float = 1.0

    @classmethod
    def of(cls, block: np.ndarray) -> _Sums:
        """The sums of a block."""
        if block.dtype.kind == "c":
            block = block.view(np.float64 if block.itemsize == 16 else np.float32)
        elif block.dtype.kind == "b":  # its bytes may have other values than 0 and 1
            block = (block.view(np.uint8) != 0).view(np.uint8)
        is_whole = block.dtype.kind in "iu"
        sums = cls(n_zero=block.size - int(np.count_nonzero(block)))
        with np.errstate(invalid="ignore"):
            wide = _wide(block)
            is_finite = np.isfinite(wide)
            if not is_finite.all():
                sums.n_nan = int(np.count_nonzero(np.isnan(wide)))
                sums.n_infinite = wide.size - int(np.count_nonzero(is_finite)) - sums.n_nan
                wide = wide[is_finite]
            if not wide.size:
                return sums
            bounds = block if is_whole else wide  # a double does not hold every integer
            sums.low, sums.high = bounds.min().item(), bounds.max().item()
            if max(-sums.low, sums.high) > _LARGE:
                sums.scale = _OF_LARGE
                wide = wide * sums.scale
            sums.n, sums.mean = wide.size, float(wide.mean())
            wide = wide - sums.mean
            sums.squares = float(np.einsum("i,i->", wide, wide))
        return sums

    def join(self, other: _Sums) -> None:
        """Add what was found in the blocks that follow."""
        self.n_nan += other.n_nan
        self.n_infinite += other.n_infinite
        self.n_zero += other.n_zero
        if not other.n:
            return
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        scale = min(self.scale, other.scale)
        mean, squares = other._scaled(scale)
        self.mean, self.squares = self._scaled(scale)
        self.scale = scale
        part = other.n / (self.n + other.n)
        change = mean - self.mean
        self.squares += squares + (change * change * part * self.n if self.n else 0.0)
        self.mean = self.mean + change * part if self.n else mean
        self.n += other.n

    def _scaled(self, scale: float) -> tuple[float, float]:
        """The mean and the squares with another scale."""
        factor = scale / self.scale
        return self.mean * factor, self.squares * factor * factor


def _wide(block: np.ndarray) -> np.ndarray:
    """The values in double precision."""
    if block.dtype == ml_dtypes.bfloat16:  # its bits are the upper half of a float32: faster than astype
        return (block.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return block.astype(np.float64)
