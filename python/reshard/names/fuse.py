"""The geometry of one rule: the shape of a whole from those of its parts, and the reverse, and where each part lies.

Both directions make the same value, a `Fusion`, so a tensor that is fused and split again is unchanged. Extents that do
not fit the interleaving and the counts of the rule are refused here, with the key that has them.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from reshard.errors import NamesError
from reshard.names.part_map import DimMap, PartMap
from reshard.words import show

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.names.file import Rule

__all__ = ["Fusion", "Shape", "fused", "split"]

Shape: TypeAlias = tuple[int, ...]

_NOT_THIS_MODEL = "are the sizes those of this model?"


@dataclass(frozen=True)
class Fusion:
    """How the parts of one whole lie in it.

    Attributes:
        rule: its rule.
        extents: of each entry of the rule, the shape of its parts after `transpose`.
        interleave: of each entry, the elements of one run along the dim `join`.
        counts: how many values each index takes that only the parts have.
    """

    rule: Rule
    extents: tuple[Shape, ...]
    interleave: tuple[int, ...]
    counts: Mapping[str, int]

    @property
    def n_members(self) -> int:
        """How many parts there are."""
        return len(self.rule.parts) * math.prod(self.counts.values())

    def members(self) -> list[tuple[int, tuple[int, ...]]]:
        """Every part: its entry in the rule, and its own indices."""
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
        """The shape of the parts of an entry, as they are stored."""
        shape = dict(zip(self._order(entry), self.extents[entry], strict=True))
        return tuple(shape[dim] for dim in range(len(shape)))

    def part_map(self, entry: int, values: tuple[int, ...], whole: Shape) -> PartMap:
        """Where a part lies in the whole.

        Args:
            entry: the entry of the part in the rule.
            values: the indices that only the part has.
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
        """Of each dim of a transposed part, the dim of the whole."""
        new = set(self.rule.stack.values())
        return [dim for dim in range(len(self.extents[0]) + len(new)) if dim not in new]

    def _order(self, entry: int) -> Sequence[int]:
        """Of each dim of a transposed part, its dim as it is stored."""
        return self.rule.transpose or range(len(self.extents[entry]))


def members(rule: Rule, counts: Mapping[str, int]) -> list[tuple[int, tuple[int, ...]]]:
    """Every part of a whole: its entry in the rule, and its own indices."""
    values = list(itertools.product(*(range(counts[index]) for index in rule.indices)))
    return [(entry, one) for entry in range(len(rule.parts)) for one in values]


def fused(
    rule: Rule, parts: Sequence[tuple[str, Shape]], counts: Mapping[str, int], sizes: Mapping[str, int]
) -> Fusion:
    """The fusion of parts.

    Args:
        rule: the rule.
        parts: of each entry, the key of one of its parts, and the shape of all of them.
        counts: how many values each index takes that only the parts have.
        sizes: the sizes that are known.

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
                f"{show(key)} of shape {shape} and {show(first_key)} of shape {first_shape} cannot be parts of one "
                f"{show(rule.whole.text)}",
                key=key,
            )
    along = [0 if at is None else own[at] for own in extents]
    interleave = _interleave(rule, sizes)
    if interleave is None:
        if len(set(along)) > 1:
            raise NamesError(
                f"{show(first_key)} and its neighbours have {along} elements along dim {rule.join}: say `turns`",
                key=first_key,
                hint="without `turns` parts are of one size, else they could not be told apart on the way back",
            )
        interleave = along
    n_runs = {divmod(extent, run) for extent, run in zip(along, interleave, strict=True) if run}
    if len(n_runs) > 1 or any(rest for _, rest in n_runs):
        raise NamesError(
            f"{show(first_key)} and its neighbours have {along} elements along dim {rule.join}, which is not one "
            f"number of turns of {interleave}",
            key=first_key,
            hint=_NOT_THIS_MODEL,
        )
    return Fusion(rule, tuple(extents), tuple(interleave), counts)


def split(rule: Rule, key: str, shape: Shape, sizes: Mapping[str, int]) -> Fusion:
    """The fusion whose whole is given.

    Args:
        rule: the rule.
        key: the key of the whole.
        shape: its shape.
        sizes: the sizes that are known.

    Raises:
        NamesError: the shape does not divide as the rule says, or nothing says into how many.
    """
    _check_dims(rule, len(shape), key, shape)
    counts: dict[str, int] = {}
    extents = list(shape)
    for index, dim in rule.stack.items():
        counts[index] = shape[dim]
        if sizes.get(index, shape[dim]) != shape[dim]:
            raise NamesError(
                f"{show(key)} has {shape[dim]} elements along dim {dim}, the name map says {index} = {sizes[index]}",
                key=key,
            )
    for index, dim in rule.lay.items():
        if index not in sizes:
            raise NamesError(
                f"{show(key)} is to be divided by `{{{index}}}`, and nothing says how many there are",
                key=key,
                hint=f"give the model's config.json, or write the number as `{index}` under `sizes`",
            )
        counts[index] = sizes[index]
        extents[dim] = _divided(key, extents, dim, sizes[index], f"{sizes[index]} of `{{{index}}}`")
    parts = [list(extents) for _ in rule.parts]
    interleave, n_runs = [0] * len(rule.parts), 1
    if rule.join is not None:
        given = _interleave(rule, sizes)
        if given is None:
            given = [_divided(key, extents, rule.join, len(parts), f"{len(parts)} parts")] * len(parts)
        else:
            n_runs = _divided(key, extents, rule.join, sum(given), f"turns of {given}")
        for part, run in zip(parts, given, strict=True):
            part[rule.join] = run * n_runs
        interleave = given
    new = set(rule.stack.values())
    of_parts = tuple(tuple(extent for dim, extent in enumerate(part) if dim not in new) for part in parts)
    if rule.transpose and len(rule.transpose) != len(of_parts[0]):
        raise _not_transposable(rule, key, shape)
    return Fusion(rule, of_parts, tuple(interleave), counts)


# -- checks


def _interleave(rule: Rule, sizes: Mapping[str, int]) -> list[int] | None:
    """The elements of each part in one run; None if each part is one run."""
    values = []
    for run in rule.interleave:
        unknown = next((name for name in run.names if name not in sizes), None)
        if unknown is not None:
            raise NamesError(
                f"the rule for {show(rule.whole.text)} needs the size `{unknown}`, which nothing says",
                hint="give the model's config.json, or write a number under `sizes`",
            )
        try:
            values.append(run.value(sizes))
        except ValueError as error:
            raise NamesError(f"the rule for {show(rule.whole.text)}: {error}") from None
        if values[-1] < 1:
            raise NamesError(f"the rule for {show(rule.whole.text)}: {show(run.text)} is no element at all")
    return values or None


def _transposed(rule: Rule, key: str, shape: Shape) -> Shape:
    if rule.transpose and len(rule.transpose) != len(shape):
        raise _not_transposable(rule, key, shape)
    return tuple(shape[dim] for dim in rule.transpose) if rule.transpose else shape


def _not_transposable(rule: Rule, key: str, shape: Shape) -> NamesError:
    return NamesError(f"{show(key)} of shape {shape} cannot be transposed by {list(rule.transpose)}", key=key)


def _check_dims(rule: Rule, n_dims: int, key: str, shape: Shape) -> None:
    asked = [*rule.lay.values(), *rule.stack.values(), *([] if rule.join is None else [rule.join])]
    if any(dim >= n_dims for dim in asked):
        raise NamesError(
            f"the rule for {show(rule.whole.text)} speaks of dim {max(asked)}, and its wholes have {n_dims} dims: "
            f"{show(key)} has shape {shape}",
            key=key,
        )


def _divided(key: str, shape: Sequence[int], dim: int, n: int, by: str) -> int:
    if n < 1 or shape[dim] % n:
        raise NamesError(
            f"{show(key)}: the {shape[dim]} elements along dim {dim} do not divide into {by}",
            key=key,
            hint=_NOT_THIS_MODEL,
        )
    return shape[dim] // n
