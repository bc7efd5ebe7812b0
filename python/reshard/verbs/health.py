"""What `verify(health=True)` looks for beyond damage: values and tensors that a training run should not have.

A file with checksums is looked at while it is compared with them, so it is read once: tensors that must agree are
compared by digests (`HealthChecks`). Other files are read through a buffer. Tensors that must agree, and whose
digests differ or are not known, are read in pairs, region by region, through two. Memory use does not depend on the
size of a tensor.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np

from reshard import _core, dtypes
from reshard.formats import optimizer_slots
from reshard.values.words import counted, show
from reshard.verbs.slices import Buffer, Slice, batches, regions_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from reshard.checkpoint import Checkpoint
    from reshard.formats.base import CheckpointData
    from reshard.values.indexing import Region

Kind: TypeAlias = Literal["not finite", "negative", "rounding", "replicas", "unchanged"]
Found: TypeAlias = "Mapping[tuple[int, str], _core.ArrayCounts]"
"""The counts of a stored array by the number of its file and its stored name."""

_PROBE_ELEMENTS = 4096  # of a tensor that is expected to have changed
_MAX_PARTS = 4096  # pairs of stored arrays of a weight and its fp32 weight; with more of them both are read again


@dataclass(frozen=True)
class HealthFinding:
    """A tensor that a healthy run does not have, or that did not change.

    Attributes:
        key: its name.
        kind: "not finite": it holds NaN or infinities. "negative": it is a second moment, or another slot of an
            optimizer without negative values, and has some. "rounding": it is not the rounded fp32 weight of the
            optimizer. "replicas": copies in several files differ. "unchanged": every bit is as in the older iteration.
        count: number of its elements; of "unchanged" all of them.
        first: the index of the first of them in the tensor; None: of "unchanged", and where the position is not known.
        detail: what was found, as the end of a sentence that begins with the name.
        is_trained: whether an optimizer has state for the tensor, or the tensor is such state. One that did not change
            and has none is perhaps frozen.
    """

    key: str
    kind: Kind
    count: int
    first: tuple[int, ...] | None
    detail: str
    is_trained: bool

    @property
    def is_alarm(self) -> bool:
        """Whether it is wrong. That a tensor did not change can be intended."""
        return self.kind != "unchanged"

    def __str__(self) -> str:
        first = "" if self.first is None else f"; the first is at {list(self.first)}"
        return f"{show(self.key)} {self.detail}{first}"


class Meter(NamedTuple):
    """Reports progress: `grow` adds bytes that will be read, `advance` those that were."""

    grow: Callable[[int], object]
    advance: Callable[[int], object]


class _Range(NamedTuple):
    """Bytes of a stored array."""

    file: str
    number: int
    start: int
    n_bytes: int
    dtype: str


_RangePair: TypeAlias = "tuple[_Range, _Range]"


@dataclass(frozen=True)
class HealthChecks:
    """Checks of the values of safetensors files, made while their bytes are read in order.

    Attributes:
        values: by the name of a file, what is called with its bytes.
        rounded: by the name of a weight, ranges of its stored arrays, each with that of the fp32 weight.
        same: by tensor, files and region, the ranges of two copies.
    """

    values: Mapping[str, _core.ValueCounts]
    rounded: Mapping[str, Sequence[_RangePair]]
    same: Mapping[tuple[str, int, int, Region], _RangePair]

    @classmethod
    def of(cls, opened: Checkpoint, first_bytes: Mapping[str, int]) -> HealthChecks:
        """The checks of a checkpoint.

        Args:
            opened: the checkpoint.
            first_bytes: of each file that is read, by its name, the bytes before its data.

        Raises:
            ReshardError: the header of a file is damaged, or cannot be read.
        """
        index = opened._index  # noqa: SLF001
        tensors = {
            name: sorted(index.file_tensors(file), key=lambda one: one.start)
            for file, name in enumerate(index.file_names)
            if name in first_bytes
        }
        ranges = _Ranges(index, tensors)
        rounded = {weight: found for weight, key in _masters(opened) if (found := ranges.rounded(weight, key))}
        same = {
            (key, one.file, other.file, region): (first, second)
            for key, one, other, region in _copies(index)
            if (first := ranges.of(key, one, region)) and (second := ranges.of(key, other, region))
        }
        cuts: dict[str, dict[tuple[int, str], set[int]]] = defaultdict(lambda: defaultdict(set))
        for pair in (*(one for some in rounded.values() for one in some), *same.values()):
            for one in pair:
                cuts[one.file][one.number, one.dtype] |= {one.start, one.start + one.n_bytes}
        values = {
            name: _core.ValueCounts(
                [
                    (
                        one.dtype,
                        first_bytes[name] + one.start,
                        one.end - one.start,
                        _is_non_negative(opened.data, one.name),
                    )
                    for one in own
                ],
                [(number, dtype, sorted(at)) for (number, dtype), at in cuts[name].items()],
            )
            for name, own in tensors.items()
        }
        return cls(values, rounded, same)

    def found(self, opened: Checkpoint) -> Found:
        """The counts of all files, by stored array."""
        index = opened._index  # noqa: SLF001
        found: dict[tuple[int, str], _core.ArrayCounts] = {}
        for file, name in enumerate(index.file_names):
            if name in self.values and (counts := self.values[name].found()):
                tensors = sorted(index.file_tensors(file), key=lambda one: one.start)
                found |= {(file, tensors[one.number].name): one for one in counts}
        return found

    def is_rounded(self, weight: str) -> bool:
        """Whether a weight is known to be the rounded fp32 weight. After all files were looked at."""
        return weight in self.rounded and all(map(self._agree, self.rounded[weight]))

    def is_same(self, key: str, one: int, other: int, region: Region) -> bool:
        """Whether a region of a tensor is known to be the same in two files. After all files were looked at.

        Args:
            key: the tensor.
            one: number of a file that holds the region.
            other: that of the other file.
            region: the region.
        """
        return (key, one, other, region) in self.same and self._agree(self.same[key, one, other, region])

    def _agree(self, pair: _RangePair) -> bool:
        first, second = (self.values[one.file].digest(one.number, one.dtype, one.start, one.n_bytes) for one in pair)
        return first is not None and first == second


class _Ranges:
    """Where the regions of tensors are in files.

    Args:
        index: of the tensors.
        files: the tensors of each file that is read, in its order.
    """

    def __init__(self, index: _core.Index, files: Mapping[str, Sequence[_core.FileTensor]]) -> None:
        self._index = index
        self._numbers = {
            name: {one.name: (number, one.dtype) for number, one in enumerate(own)} for name, own in files.items()
        }

    def of(self, key: str, stored: _core.StoredArray, region: Region, dtype: str | None = None) -> _Range | None:
        """The range of a region in a stored array.

        Args:
            key: the tensor.
            stored: the array.
            region: the region.
            dtype: to which its digest is cast.

        Returns:
            None: the region is not one range of a file that is read, or is stored in another dtype.
        """
        name = self._index.file_names[stored.file]
        number, stored_dtype = self._numbers.get(name, {}).get(stored.name, (0, None))
        bits = dtypes.bits(stored_dtype or "U8")
        if stored_dtype != self._index.info(key)[0] or bits % 8:
            return None
        first = next((at for tile in stored.tiles if (at := _first_element(tile, region)) is not None), None)
        if first is None:
            return None
        return _Range(name, number, first * bits // 8, math.prod(region[1]) * bits // 8, dtype or stored_dtype)

    def rounded(self, weight: str, master: str) -> list[_RangePair]:
        """The ranges of all regions of a weight and of its fp32 weight; none: not all of them are ranges."""
        (dtype, shape), parts, wide = self._index.info(weight), _parts(self._index, weight), _parts(self._index, master)
        if len(parts) * len(wide) > _MAX_PARTS or sum(math.prod(region[1]) for region in parts) != math.prod(shape):
            return []
        found = []
        for region, of_master in wide.items():
            for own, of_weight in parts.items():
                both = _intersection(own, region)
                if both is None:
                    continue
                pair = self.of(weight, of_weight, both), self.of(master, of_master, both, dtype)
                if pair[0] is None or pair[1] is None:
                    return []
                found.append((pair[0], pair[1]))
        return found


def _parts(index: _core.Index, key: str) -> dict[Region, _core.StoredArray]:
    """The stored regions of a tensor, each with the first array that holds it."""
    found: dict[Region, _core.StoredArray] = {}
    for one in index.stored(key):
        for tile in one.tiles:
            if 0 not in tile.shape:
                found.setdefault((tile.offset, tile.shape), one)
    return found


def _first_element(tile: _core.Tile, region: Region) -> int | None:
    """The first element of a region in an array with a tile; None: it is not in the tile, or not one range."""
    offset, extent = region
    at, step = tile.local_offset, 1
    for dim in reversed(range(len(extent))):
        begin = offset[dim] - tile.offset[dim]
        if begin < 0 or begin + extent[dim] > tile.shape[dim]:
            return None
        if extent[dim] > 1 and tile.local_strides[dim] != step:
            return None
        at += begin * tile.local_strides[dim]
        step *= extent[dim]
    return at


def read_counts(opened: Checkpoint, threads: int | None, meter: Meter) -> Found:
    """The counts of all stored arrays of all files: each is read once.

    Args:
        opened: the checkpoint.
        threads: threads that read.
        meter: of the bytes of the arrays.

    Raises:
        DamagedFileError, StorageError: a file cannot be read.
    """
    index = opened._index  # noqa: SLF001
    buffer = Buffer()
    total: dict[tuple[int, str], _core.ArrayCounts] = {}
    owners = {(one.file, one.name): key for key in index.keys() for one in index.stored(key)}  # noqa: SIM118
    for file in range(index.n_files):
        own = index.files_again([file])
        own.add_whole_file(0)
        arrays = [(name, *own.info(name)) for name in own.keys()]  # noqa: SIM118  an index is no mapping
        floats = [one for one in arrays if _is_float(one[1]) and not dtypes.is_packed(one[1])]
        meter.grow(sum(dtypes.n_bytes(dtype, shape) for _, dtype, shape in floats))
        slices = (
            Slice(name, dtype, shape, region) for name, dtype, shape in floats for region in regions_of(shape, dtype)
        )
        for batch in batches(slices, lambda one: one):
            read = buffer.fill(functools.partial(own.plan, verify=False), batch, threads=threads)
            counts = _core.ValueCounts(
                [
                    (one.dtype, start, one.n_bytes, _is_non_negative(opened.data, owners.get((file, one.key))))
                    for one, (start, _) in zip(batch, read, strict=True)
                ]
            )
            end = read[-1][0] + batch[-1].n_bytes
            counts.look(0, buffer.bytes[:end], threads=threads)
            for found in counts.found():
                read_slice = batch[found.number]
                at = (file, read_slice.key)
                total[at] = _joined(total.get(at), found, read_slice)
            meter.advance(sum(one.n_bytes for one in batch))
    return total


def _joined(before: _core.ArrayCounts | None, found: _core.ArrayCounts, of: Slice) -> _core.ArrayCounts:
    """The counts of an array with those of one more slice of it."""
    width = _values_of_element(of.dtype)

    def moved(first: int | None) -> int | None:
        if first is None:
            return None
        at = _place(of.region, first // width)
        return int(np.ravel_multi_index(at, of.shape)) * width if at else 0

    found = found._replace(first_not_finite=moved(found.first_not_finite), first_negative=moved(found.first_negative))
    if before is None:
        return found
    return _core.ArrayCounts(
        before.number,
        before.n_nan + found.n_nan,
        before.n_infinite + found.n_infinite,
        _first(before.first_not_finite, found.first_not_finite),
        before.n_negative + found.n_negative,
        _first(before.first_negative, found.first_negative),
    )


def wrong_values(opened: Checkpoint, found: Found, may_be_infinite: Callable[[str], bool]) -> list[HealthFinding]:
    """The findings of counts: values that are not finite, and negative second moments.

    Args:
        opened: the checkpoint.
        found: the counts.
        may_be_infinite: whether infinities of a tensor are intended.
    """
    if not found:
        return []
    index = opened._index  # noqa: SLF001
    by_key: dict[str, dict[object, _Sum]] = defaultdict(dict)
    for key, number, stored in _keys_of(index, found):
        tiles = () if stored is None else stored.tiles
        signature = tuple((tile.offset, tile.shape) for tile in tiles) or number
        width = _values_of_element(index.info(key)[0]) if key in index else 1
        one = _Sum.of(found[number], tiles, width)
        same = by_key[key].get(signature)
        by_key[key][signature] = one if same is None else same.larger(one)  # replicas count once
    findings = []
    trained = _Trained(opened)
    for key, parts in by_key.items():
        total = _Sum.all(parts.values())
        n = total.n_nan + (0 if may_be_infinite(key) else total.n_infinite)
        if n:
            what = [f"{total.n_nan} NaN"] if total.n_nan else []
            what += [counted(total.n_infinite, "infinite value")] if total.n_infinite else []
            detail = f"holds {' and '.join(what)}"
            findings.append(HealthFinding(key, "not finite", n, total.not_finite_at, detail, key in trained))
        if total.n_negative:
            slot, _ = opened.data.slot_of(key) or ("it", "")
            detail = f"holds {counted(total.n_negative, 'negative value')}, which `{slot}` cannot have"
            findings.append(HealthFinding(key, "negative", total.n_negative, total.negative_at, detail, key in trained))
    return findings


def rounding(opened: Checkpoint, checks: HealthChecks | None, threads: int | None, meter: Meter) -> list[HealthFinding]:
    """Weights in bf16 or fp16 that are not the rounded fp32 weights of the optimizer.

    Args:
        opened: the checkpoint.
        checks: those made of its files; None: all weights are read.
        threads: threads that read.
        meter: of the bytes of both.

    Raises:
        DamagedFileError, StorageError: a file cannot be read.
    """
    index = opened._index  # noqa: SLF001
    pairs: dict[str, list[_Pair]] = defaultdict(list)
    for weight, key in _masters(opened):
        dtype, shape = index.info(weight)
        if checks is None or not checks.is_rounded(weight):
            pairs[dtype].append(_Pair(weight, key, dtype, shape, ((0,) * len(shape), shape), weight))
    findings = []
    trained = _Trained(opened)
    for dtype, of_dtype in pairs.items():
        _compare((index, index), of_dtype, threads=threads, meter=meter, dtype=dtype, verify=False)
        findings += [
            HealthFinding(
                one.name,
                "rounding",
                one.n,
                one.first,
                f"is not the rounded {show(one.b)}: {one.n} of {math.prod(one.shape)} values differ",
                one.name in trained,
            )
            for one in of_dtype
            if one.n
        ]
    return findings


def replicas(opened: Checkpoint, checks: HealthChecks | None, threads: int | None, meter: Meter) -> list[HealthFinding]:
    """Tensors of which several stored arrays hold the same elements, and differ in them.

    Args:
        opened: the checkpoint.
        checks: those made of its files; None: all copies are read.
        threads: threads that read.
        meter: of the bytes of the copies.

    Raises:
        DamagedFileError, StorageError: a file cannot be read.
    """
    index = opened._index  # noqa: SLF001
    sides = [index.files_again(range(index.n_files)) for _ in range(2)]
    pairs: list[_Pair] = []
    names: list[tuple[str, str, str]] = []
    for key, one, other, region in _copies(index):
        if checks is not None and checks.is_same(key, one.file, other.file, region):
            continue
        dtype, shape = index.info(key)
        number = str(len(pairs))
        for side, stored in zip(sides, (one, other), strict=True):
            side.add_tiles(number, dtype, shape, [stored], overlapping=True)
        pairs.append(_Pair(number, number, dtype, shape, region, key))
        names.append((key, opened.data.file_name(one.file), opened.data.file_name(other.file)))
    _compare((sides[0], sides[1]), pairs, threads=threads, meter=meter, verify=False)
    worst: dict[str, tuple[_Pair, str]] = {}
    for pair, (key, a, b) in zip(pairs, names, strict=True):
        if pair.n and (key not in worst or pair.n > worst[key][0].n):
            worst[key] = (pair, f"differs between {show(a)} and {show(b)} in {counted(pair.n, 'value')}")
    trained = _Trained(opened)
    return [
        HealthFinding(key, "replicas", pair.n, pair.first, detail, key in trained)
        for key, (pair, detail) in worst.items()
    ]


def unchanged(opened: Checkpoint, older: Checkpoint, threads: int | None, meter: Meter) -> list[HealthFinding]:
    """The floating-point tensors of which every bit is as in an older checkpoint.

    Of a tensor that did change, only its first elements are read, and what follows if these are equal.

    Args:
        opened: the checkpoint.
        older: the older one.
        threads: threads that read.
        meter: of the bytes of both.

    Raises:
        DamagedFileError, StorageError: a file cannot be read.
    """
    indexes = opened._index, older._index  # noqa: SLF001
    pairs = []
    for key in indexes[0].keys():  # noqa: SIM118  an index is no mapping
        dtype, shape = indexes[0].info(key)
        if key in indexes[1] and indexes[1].info(key) == (dtype, shape) and _is_float(dtype) and 0 not in shape:
            pairs.append(_Pair(key, key, dtype, shape, ((0,) * len(shape), shape), key, until_first=True))
    probes = [
        _Pair(one.a, one.b, one.dtype, one.shape, next(regions_of(one.shape, one.dtype, _PROBE_ELEMENTS)), one.name)
        for one in pairs
    ]
    _compare(indexes, probes, threads=threads, meter=meter, verify=True)
    equal = [pair for pair, probe in zip(pairs, probes, strict=True) if not probe.n]
    _compare(indexes, equal, threads=threads, meter=meter, verify=True)
    since = "the older checkpoint" if older.iteration is None else f"iteration {older.iteration}"
    trained = _Trained(opened)
    return [
        HealthFinding(
            one.name,
            "unchanged",
            math.prod(one.shape),
            None,
            f"is unchanged since {since}" + ("" if one.name in trained else ", and no optimizer has state for it"),
            one.name in trained,
        )
        for one in equal
        if not one.n
    ]


# -- names


class _Trained:
    """The tensors that an optimizer has state for, and this state."""

    def __init__(self, opened: Checkpoint) -> None:
        self._opened = opened
        self._parameters: frozenset[str] | None = None

    def __contains__(self, key: str) -> bool:
        slot_of = self._opened.data.slot_of
        if self._parameters is None:
            found = map(slot_of, self._opened._index.keys())  # noqa: SLF001
            self._parameters = frozenset(one[1] for one in found if one is not None)
        # Formats put a prefix before the names of the model.
        ends = (key, *(key.split(".", n)[-1] for n in (1, 2)))
        return slot_of(key) is not None or any(end in self._parameters for end in ends)


def _is_non_negative(data: CheckpointData, key: str | None) -> bool:
    slot = data.slot_of(key) if key is not None and key in data.index else None
    return slot is not None and optimizer_slots.is_non_negative(slot[0])


def _keys_of(index: _core.Index, found: Found) -> Iterator[tuple[str, tuple[int, str], _core.StoredArray | None]]:
    """The tensors that stored arrays belong to; the name of the array where none is known to."""
    left = dict.fromkeys(found)
    named = [name for _, name in found if name in index]
    # Most formats store an array under the name of its tensor.
    for keys in (named, index.keys()):
        if not left:
            return
        for key in dict.fromkeys(keys):
            for stored in index.stored(key):
                number = (stored.file, stored.name)
                if number in left:
                    del left[number]
                    yield key, number, stored
    for number in left:
        yield number[1], number, None


class _Sum(NamedTuple):
    """Counts of a tensor, with indexes in it."""

    n_nan: int
    n_infinite: int
    not_finite_at: tuple[int, ...] | None
    n_negative: int
    negative_at: tuple[int, ...] | None

    @classmethod
    def of(cls, one: _core.ArrayCounts, tiles: Sequence[_core.Tile], width: int) -> _Sum:
        at = [
            None if first is None else _in_tensor(tiles, first // width)
            for first in (one.first_not_finite, one.first_negative)
        ]
        return cls(one.n_nan, one.n_infinite, at[0], one.n_negative, at[1])

    def larger(self, other: _Sum) -> _Sum:
        return max(self, other, key=lambda one: (one.n_nan + one.n_infinite, one.n_negative))

    @classmethod
    def all(cls, parts: Iterable[_Sum]) -> _Sum:
        parts = list(parts)
        return cls(
            sum(one.n_nan for one in parts),
            sum(one.n_infinite for one in parts),
            min((one.not_finite_at for one in parts if one.not_finite_at is not None), default=None),
            sum(one.n_negative for one in parts),
            min((one.negative_at for one in parts if one.negative_at is not None), default=None),
        )


def _in_tensor(tiles: Sequence[_core.Tile], local: int) -> tuple[int, ...] | None:
    """The index in the tensor of an element of a stored array; None: it is padding."""
    for tile in tiles:
        rest = local - tile.local_offset
        at = list(tile.offset)
        # The longest stride first; dims of one element have any stride.
        for dim in sorted(range(len(at)), key=lambda dim: -tile.local_strides[dim]):
            if tile.shape[dim] > 1 and rest >= 0:
                steps = min(rest // tile.local_strides[dim], tile.shape[dim] - 1)
                rest -= steps * tile.local_strides[dim]
                at[dim] += steps
        if rest == 0 and 0 not in tile.shape:
            return tuple(at)
    return None


# -- stored arrays that hold the same elements


def _masters(opened: Checkpoint) -> Iterator[tuple[str, str]]:
    """Each weight in bf16 or fp16 that has a wider one in the optimizer, and this one."""
    data, index = opened.data, opened._index  # noqa: SLF001
    keys = index.keys()
    prefix = ""
    weights = [key for key in keys if data.slot_of(key) is None]
    known = frozenset(weights)
    for key in keys:
        of_state = data.slot_of(key)
        if of_state is None or not optimizer_slots.is_master(of_state[0]):
            continue
        weight = prefix + of_state[1]
        if weight not in known:
            # Formats put different prefixes before the names of the model.
            ends = [one for one in weights if one.endswith(f".{of_state[1]}")]
            if len(ends) != 1:
                continue
            weight, prefix = ends[0], ends[0].removesuffix(of_state[1])
        (dtype, shape), (wide, same) = index.info(weight), index.info(key)
        if dtype in ("BF16", "F16") and wide in ("F32", "F64") and shape == same:
            yield weight, key


def _copies(index: _core.Index) -> Iterator[tuple[str, _core.StoredArray, _core.StoredArray, Region]]:
    """Each region of a tensor that two files hold, with both."""
    for key in index.keys() if index.n_files > 1 else ():
        if len(index.holders(key)) > 1:
            for one, other, region in _overlaps(index.stored(key), index.info(key)[1]):
                yield key, one, other, region


def _overlaps(
    stored: Sequence[_core.StoredArray], shape: tuple[int, ...]
) -> Iterator[tuple[_core.StoredArray, _core.StoredArray, Region]]:
    """Pairs of stored arrays with a region of the tensor that both hold; of several copies each with the first."""
    by_region: dict[Region, list[_core.StoredArray]] = defaultdict(list)
    for one in stored:
        for tile in one.tiles:
            if 0 not in tile.shape:
                by_region[tile.offset, tile.shape].append(one)
    for region, (first, *others) in by_region.items():
        for other in others:
            yield first, other, region
    if sum(math.prod(extent) for _, extent in by_region) <= math.prod(shape):
        return  # they cover the tensor, so none of them overlaps another one
    distinct = list(by_region.items())
    for i, (a, of_a) in enumerate(distinct):
        for b, of_b in distinct[i + 1 :]:
            both = _intersection(a, b)
            if both is not None:
                yield of_a[0], of_b[0], both


def _intersection(a: Region, b: Region) -> Region | None:
    begin = tuple(map(max, a[0], b[0]))
    ends = (min(x + n, y + m) for x, n, y, m in zip(a[0], a[1], b[0], b[1], strict=True))
    extent = tuple(end - start for start, end in zip(begin, ends, strict=True))
    return (begin, extent) if all(n > 0 for n in extent) else None


# -- reading


@dataclass
class _Pair:
    """A region of two tensors that must be equal, and what was found so far."""

    a: str
    b: str
    dtype: str
    shape: tuple[int, ...]
    region: Region
    name: str
    until_first: bool = False
    n: int = 0
    first: tuple[int, ...] | None = None


def _compare(
    indexes: tuple[_core.Index, _core.Index],
    pairs: Sequence[_Pair],
    *,
    threads: int | None,
    meter: Meter,
    dtype: str | None = None,
    verify: bool,
) -> None:
    """Compare pairs, and note in each how many elements differ, and the first one.

    Args:
        indexes: where the first and the second tensor of each pair are stored.
        pairs: what is compared.
        threads: threads that read.
        meter: of the bytes of both.
        dtype: to which both are cast.
        verify: whether what is read is compared with checksums.
    """
    buffers = Buffer(), Buffer()
    plans = [functools.partial(index.plan, dtype=dtype, verify=verify) for index in indexes]
    meter.grow(2 * sum(dtypes.n_bytes(one.dtype, one.region[1]) for one in pairs))

    def slices() -> Iterator[tuple[_Pair, Slice]]:
        for pair in pairs:
            offset, extent = pair.region
            for inner, size in regions_of(extent, pair.dtype):
                if not (pair.until_first and pair.n):
                    region = tuple(map(sum, zip(offset, inner, strict=True))), size
                    yield pair, Slice(pair.a, pair.dtype, pair.shape, region)

    for batch in batches(slices(), lambda one: one[1]):
        first = buffers[0].fill(plans[0], [one for _, one in batch], threads=threads)
        others = [one._replace(key=pair.b) for pair, one in batch]
        second = buffers[1].fill(plans[1], others, threads=threads)
        for (pair, one), (_, a), (_, b) in zip(batch, first, second, strict=True):
            n, at = _core.differing(pair.dtype, a, b, threads=threads)
            pair.n += n
            if at is not None and pair.first is None and not dtypes.is_packed(pair.dtype):
                pair.first = _place(one.region, at)
        meter.advance(2 * sum(one.n_bytes for _, one in batch))


def _place(region: Region, number: int) -> tuple[int, ...]:
    """The index in a tensor of an element of a region of it."""
    at = np.unravel_index(number, region[1]) if region[1] else ()
    return tuple(int(start + step) for start, step in zip(region[0], at, strict=True))


def _is_float(dtype: str) -> bool:
    return dtype[0] in "FC" or dtype == "BF16"


def _values_of_element(dtype: str) -> int:
    return 2 if dtype == "C64" else 1


def _first(a: int | None, b: int | None) -> int | None:
    return min((one for one in (a, b) if one is not None), default=None)
