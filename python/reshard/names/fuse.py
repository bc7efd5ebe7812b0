"""The geometry of one rule: the shape of a whole from its parts and the reverse, and the part map of each part.

Both directions return the same type, a `Fusion`, with shapes and part maps; so fusing and splitting again is the
identity. Shapes that do not fit the `turns` and counts of the rule raise an error with the key.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from reshard.errors import NamesError
from reshard.names.part_map import DimMap, PartMap, SwappedDim
from reshard.values.words import counted, show

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.names.file import NameRule
    from reshard.names.sizes import Expression

Shape: TypeAlias = tuple[int, ...]

_NOT_THIS_MODEL = "are the sizes those of this model?"
_MAX_UNKNOWN = 64  # of a size that is not known, such as the number of tensor-parallel ranks
_MAX_POWER = 13  # 2**13 = 128 * 64


@dataclass(frozen=True)
class Fusion:
    """The shapes and placements of the parts of one whole.

    Attributes:
        rule: its rule.
        extents: for each entry of the rule, the shape of its parts after `transpose`, in elements.
        interleave: for each entry, its elements in one round along the dim `join`.
        counts: number of values of each index that only the parts have.
    """

    rule: NameRule
    extents: tuple[Shape, ...]
    interleave: tuple[int, ...]
    counts: Mapping[str, int]

    @property
    def n_members(self) -> int:
        """The number of parts."""
        return len(self.rule.parts) * math.prod(self.counts.values())

    def members(self) -> list[tuple[int, tuple[int, ...]]]:
        """Every part: its entry in the rule, and the values of its indices."""
        return members(self.rule, self.counts)

    def shape(self) -> Shape:
        """The shape of the whole."""
        dims = self._dims()
        shape = dict(zip(dims, self.extents[0], strict=True))
        if self.rule.join is not None:
            at = dims.index(self.rule.join)
            shape[self.rule.join] = sum(extents[at] for extents in self.extents)
        for index, dim in self.rule.lay.items():
            shape[dim] *= self.counts[index]
        shape |= {dim: self.counts[index] for index, dim in self.rule.stack.items()}
        return tuple(shape[dim] for dim in range(len(shape)))

    def part_shape(self, entry: int) -> Shape:
        """The shape of the parts of an entry, before `transpose`."""
        shape = dict(zip(self._order(entry), self.extents[entry], strict=True))
        return tuple(shape[dim] for dim in range(len(shape)))

    def part_map(self, entry: int, values: tuple[int, ...], whole: Shape) -> PartMap:
        """The position of a part in the whole, as a map of tiles.

        Args:
            entry: the entry of the part in the rule.
            values: the values of its indices.
            whole: the shape of the whole, in elements.
        """
        rule = self.rule
        indices = dict(zip(rule.indices, values, strict=True))
        laid = {dim: index for index, dim in rule.lay.items()}
        dims = []
        for dim, extent in zip(self._dims(), self.extents[entry], strict=True):
            start, run, period, n_runs = 0, extent, extent, 1
            if dim == rule.join:
                start, run, period = sum(self.interleave[:entry]), self.interleave[entry], sum(self.interleave)
                n_runs = extent // run if run else 1
            if dim in laid:
                start += indices[laid[dim]] * (whole[dim] // self.counts[laid[dim]])
            dims.append(DimMap(dim, start, run, period, n_runs))
        by_part_dim = sorted(zip(self._order(entry), dims, strict=True), key=lambda one: one[0])
        fixed = tuple((dim, indices[index]) for index, dim in rule.stack.items())
        return PartMap(tuple(one for _, one in by_part_dim), fixed)

    def _dims(self) -> list[int]:
        """For each dim of a transposed part, the dim of the whole."""
        new = set(self.rule.stack.values())
        return [dim for dim in range(len(self.extents[0]) + len(new)) if dim not in new]

    def _order(self, entry: int) -> Sequence[int]:
        """For each dim of a transposed part, its dim before `transpose`."""
        return self.rule.transpose or range(len(self.extents[entry]))


def members(rule: NameRule, counts: Mapping[str, int]) -> list[tuple[int, tuple[int, ...]]]:
    """Every part of a whole: its entry in the rule, and the values of its indices."""
    values = list(itertools.product(*(range(counts[index]) for index in rule.indices)))
    return [(entry, one) for entry in range(len(rule.parts)) for one in values]


def fuse_parts(
    rule: NameRule, parts: Sequence[tuple[str, Shape]], counts: Mapping[str, int], sizes: Mapping[str, int]
) -> Fusion:
    """The fusion of given parts.

    Args:
        rule: the rule.
        parts: for each entry, the key of one of its parts, and the shape of all of them, in elements.
        counts: number of values of each index that only the parts have.
        sizes: values of the known sizes.

    Raises:
        NamesError: the shapes do not fit each other or the rule.
    """
    extents = [_transposed(rule, key, shape) for key, shape in parts]
    first_key, first_shape = parts[0]
    n_dims = len(extents[0]) + len(rule.stack)
    _check_dims(rule, n_dims, first_key, first_shape)
    at = None
    if rule.join is not None:
        at = [dim for dim in range(n_dims) if dim not in rule.stack.values()].index(rule.join)
    for (key, shape), own in zip(parts, extents, strict=True):
        if (
            [*own[:at], *own[at:][1:]] != [*extents[0][:at], *extents[0][at:][1:]]
            if at is not None
            else own != extents[0]
        ):
            raise NamesError(
                f"{show(key)} of shape {shape} and {show(first_key)} of shape {first_shape} cannot be fused into "
                f"{show(rule.whole.text)}",
                key=key,
            )
    along = [0 if at is None else own[at] for own in extents]
    interleave = _interleave(rule, sizes)
    if interleave is None:
        if len(set(along)) > 1:
            raise NamesError(
                f"{show(first_key)} and the other parts have {along} elements along dim {rule.join}: "
                "`turns` is missing",
                key=first_key,
                hint="without `turns` all parts must have the same size, so that the whole can be split again",
            )
        interleave = along
    n_runs = {divmod(extent, run) for extent, run in zip(along, interleave, strict=True) if run}
    if len(n_runs) > 1 or any(rest for _, rest in n_runs):
        raise NamesError(
            f"{show(first_key)} and the other parts have {along} elements along dim {rule.join}, which is not the same "
            f"multiple of {interleave}",
            key=first_key,
            hint=_NOT_THIS_MODEL,
        )
    return Fusion(rule, tuple(extents), tuple(interleave), counts)


def split_whole(rule: NameRule, key: str, shape: Shape, sizes: Mapping[str, int]) -> Fusion:
    """The fusion of a given whole.

    Args:
        rule: the rule.
        key: the key of the whole.
        shape: the shape of the whole, in elements.
        sizes: values of the known sizes.

    Raises:
        NamesError: the shape is not divisible as the rule requires, or a size is not known.
    """
    _check_dims(rule, len(shape), key, shape)
    counts: dict[str, int] = {}
    extents = list(shape)
    for index, dim in rule.stack.items():
        counts[index] = shape[dim]
        if sizes.get(index, shape[dim]) != shape[dim]:
            raise NamesError(
                f"{show(key)} has {counted(shape[dim], 'element')} along dim {dim}, and the name map has "
                f"{index} = {sizes[index]}",
                key=key,
            )
    for index, dim in rule.lay.items():
        if index not in sizes:
            raise NamesError(
                f"{show(key)} is split by `{{{index}}}`, and the number of its values is not known",
                key=key,
                hint=f"pass the model's config.json, or write the number as `{index}` under `sizes`",
            )
        counts[index] = sizes[index]
        extents[dim] = _divided(key, extents, dim, sizes[index], f"{sizes[index]} of `{{{index}}}`")
    parts = [list(extents) for _ in rule.parts]
    interleave, rounds = [0] * len(rule.parts), 1
    if rule.join is not None:
        specified = _interleave(rule, sizes)
        if specified is None:
            specified = [_divided(key, extents, rule.join, len(parts), f"{len(parts)} parts")] * len(parts)
        else:
            rounds = _divided(key, extents, rule.join, sum(specified), f"turns of {specified}")
        for part, run in zip(parts, specified, strict=True):
            part[rule.join] = run * rounds
        interleave = specified
    new = set(rule.stack.values())
    of_parts = tuple(tuple(extent for dim, extent in enumerate(part) if dim not in new) for part in parts)
    if rule.transpose and len(rule.transpose) != len(of_parts[0]):
        raise _not_transposable(rule, key, shape)
    return Fusion(rule, of_parts, tuple(interleave), counts)


@dataclass(frozen=True)
class Resized:
    """A tensor with another number of elements along a dim.

    Attributes:
        part_map: the position of the shorter one of the two tensors in the longer one.
        dim: the dim.
        n_before, n_after: the elements along it, of the given tensor and of the new one.
        is_explained: whether the sizes and the multiple of the rule give the longer one of the two numbers. If not, a
            tensor that is trimmed may be that of a larger model.
    """

    part_map: PartMap
    dim: int
    n_before: int
    n_after: int
    is_explained: bool

    @property
    def is_padded(self) -> bool:
        """Whether the new tensor is the longer one, which ends with zeros."""
        return self.n_after > self.n_before


def resized(
    rule: NameRule, key: str, shape: Shape, shape_of_parameter: Shape, sizes: Mapping[str, int]
) -> Resized | None:
    """What a rule with `trim` or `pad` does to a tensor of side `from`.

    Args:
        rule: the rule, with one name on each side.
        key: the key of the tensor.
        shape: its shape, in elements.
        shape_of_parameter: of optimizer state, the shape of its parameter; else the same shape.
        sizes: values of the known sizes.

    Returns:
        None: the tensors are equal, or the size of the new one is not known.

    Raises:
        NamesError: the tensor has no such dim or an unexpected length, or optimizer state is not laid out like its
            parameter.
    """
    dim = rule.trim
    if dim is None or (rule.to_size is None and rule.to_multiple is None):
        return None
    word, done = ("pad", "padded") if rule.pad_side == "to" else ("trim", "trimmed")
    if dim >= len(shape_of_parameter):
        raise NamesError(
            f"the rule for {show(rule.whole.text)} {word}s dim {dim}, and {show(key)} has shape {shape_of_parameter}",
            key=key,
        )
    own, n = _known(rule, rule.from_size, sizes), _known(rule, rule.to_size, sizes)
    had = shape_of_parameter[dim]
    if n is None and (multiple := _known(rule, rule.to_multiple, sizes)) is not None:
        if multiple == 0:
            raise NamesError(f"the rule for {show(rule.whole.text)}: `to_multiple` is 0, expected at least 1")
        n = -(-max(had, own or 0) // multiple) * multiple
    if n is None or had == n or (shape != shape_of_parameter and math.prod(shape) == 1):
        return None
    if shape != shape_of_parameter:
        raise NamesError(
            f"{show(key)} has shape {shape}, and its parameter {shape_of_parameter}, which is {done} to {n} elements "
            f"along dim {dim}: which elements of the state belong to them is not known",
            key=key,
            hint="convert the weights alone",
        )
    has = f"{show(key)} has {counted(had, 'element')} along dim {dim}, and the name map {word}s it to {n}"
    if word == "pad" and had > n:
        raise NamesError(has, key=key, hint=f"{_NOT_THIS_MODEL} `pad` leaves no elements out")
    if word == "pad" and own is not None and had < own:
        raise NamesError(f"{has} from {own}", key=key, hint=_NOT_THIS_MODEL)
    if word == "trim" and had < n:
        raise NamesError(has, key=key, hint=f"{_NOT_THIS_MODEL} `trim` adds no elements, and `pad` does")
    extents = [min(n, had) if one == dim else extent for one, extent in enumerate(shape)]
    dims = tuple(DimMap(one, 0, extent, extent, 1) for one, extent in enumerate(extents))
    return Resized(PartMap(dims), dim, had, n, word == "pad" or _is_explained(rule, had, n, sizes))


def swapped(rule: NameRule, key: str, shape: Shape, sizes: Mapping[str, int]) -> PartMap:
    """The position of a tensor in one whose groups of elements along dim 0 are transposed.

    Args:
        rule: a rule with `swap`.
        key: the key of the tensor.
        shape: its shape, in elements.
        sizes: values of the known sizes.

    Raises:
        NamesError: the dim has no complete groups, or a size is not known.
    """
    rows, columns = _values(rule, rule.swap, sizes)
    if not shape:
        raise NamesError(f"the rule for {show(rule.whole.text)} swaps dim 0, and {show(key)} has no dim", key=key)
    n_groups = _divided(key, shape, 0, rows * columns, f"groups of {rows} x {columns}")
    first = SwappedDim(0, rows, columns, n_groups)
    return PartMap((first, *(DimMap(dim, 0, extent, extent, 1) for dim, extent in enumerate(shape) if dim)))


def _is_explained(rule: NameRule, had: int, n: int, sizes: Mapping[str, int]) -> bool:
    """Whether a tensor of `n` elements along a dim has `had` of them when this rule has padded it."""
    if rule.pad_side is None:
        return True  # `trim` says nothing about the longer side
    if (size := _known(rule, rule.from_size, sizes)) is not None:
        return had == size
    if rule.from_multiple is None:
        return False
    unknown = [name for name in rule.from_multiple.names if name not in sizes]
    multiples = [
        _known(rule, rule.from_multiple, {**sizes, **dict.fromkeys(unknown, times)})
        for times in (range(1, _MAX_UNKNOWN + 1) if unknown else [1])
    ]
    if unknown:  # the number in the map may be the default of a program, and programs pad to powers of two
        multiples += [1 << power for power in range(_MAX_POWER + 1)]
    return any(multiple and -(-n // multiple) * multiple == had for multiple in multiples)


def _known(rule: NameRule, size: Expression | None, sizes: Mapping[str, int]) -> int | None:
    """The value of a size of a rule; None if a number in it is not known."""
    if size is None or any(name not in sizes for name in size.names):
        return None
    try:
        return size.value(sizes)
    except ValueError as error:
        raise NamesError(f"the rule for {show(rule.whole.text)}: {error}") from None


# -- checks


def _interleave(rule: NameRule, sizes: Mapping[str, int]) -> list[int] | None:
    """The elements of each part in one round; None if the rule has no `turns`."""
    return _values(rule, rule.interleave, sizes) or None


def _values(rule: NameRule, expressions: Sequence[Expression], sizes: Mapping[str, int]) -> list[int]:
    """The values of sizes of a rule."""
    values = []
    for run in expressions:
        unknown = next((name for name in run.names if name not in sizes), None)
        if unknown is not None:
            raise NamesError(
                f"the rule for {show(rule.whole.text)} needs the size `{unknown}`, which is not known",
                hint="pass the model's config.json, or write a number under `sizes`",
            )
        try:
            values.append(run.value(sizes))
        except ValueError as error:
            raise NamesError(f"the rule for {show(rule.whole.text)}: {error}") from None
        if values[-1] < 1:
            raise NamesError(
                f"the rule for {show(rule.whole.text)}: {show(run.text)} is {values[-1]}, expected at least 1"
            )
    return values


def _transposed(rule: NameRule, key: str, shape: Shape) -> Shape:
    if rule.transpose and len(rule.transpose) != len(shape):
        raise _not_transposable(rule, key, shape)
    return tuple(shape[dim] for dim in rule.transpose) if rule.transpose else shape


def _not_transposable(rule: NameRule, key: str, shape: Shape) -> NamesError:
    return NamesError(f"{show(key)} of shape {shape} cannot be transposed by {list(rule.transpose)}", key=key)


def _check_dims(rule: NameRule, n_dims: int, key: str, shape: Shape) -> None:
    dims = [*rule.lay.values(), *rule.stack.values(), *([] if rule.join is None else [rule.join])]
    if any(dim >= n_dims for dim in dims):
        raise NamesError(
            f"the rule for {show(rule.whole.text)} uses dim {max(dims)}, and the whole has {counted(n_dims, 'dim')}: "
            f"{show(key)} has shape {shape}",
            key=key,
        )


def _divided(key: str, shape: Sequence[int], dim: int, n: int, by: str) -> int:
    if n < 1 or shape[dim] % n:
        raise NamesError(
            f"{show(key)}: the {shape[dim]} elements along dim {dim} are not divisible into {by}",
            key=key,
            hint=_NOT_THIS_MODEL,
        )
    return shape[dim] // n
