"""Applies a name map to keys and shapes: the tensors under their new names, and their placements in the old ones.

First keys are grouped: the parts of one whole, or one whole that is split; optimizer state is grouped by slot. Then
`fuse` computes the geometry of each group. Pure functions: shapes in, part maps out.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from reshard._core import ZEROS, StoredArray, Tile
from reshard.errors import NamesError
from reshard.names.file import NameRule, Tie
from reshard.names.fuse import Fusion, Shape, fuse_parts, members, resized, split_whole, swapped
from reshard.names.templates import Templates
from reshard.values.indexing import row_major
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from reshard.names.file import NamesFile
    from reshard.names.part_map import PartMap

_MAX_PARTS = 500_000  # tensors created by splits and copies; experts of the largest models, with state, are 200,000

_Member: TypeAlias = tuple[int, tuple[int, ...]]
"""A part of a whole: its entry in the rule, and the values of its indices."""


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of the checkpoint that is a source of a tensor with a new name.

    Attributes:
        key: its key in the checkpoint.
        part_map: the position of the part in the whole; None: the tensors are equal.
        is_whole: whether the tensor of the checkpoint is the whole and the new tensor the part; else the reverse.
    """

    key: str
    part_map: PartMap | None = None
    is_whole: bool = False

    def factors(self, shape: Shape) -> dict[int, tuple[int, ...]]:
        """The factors into which dims of the new tensor are split for its tiles, by dim; `shape` is its shape."""
        if self.part_map is None:
            return {}
        return self.part_map.factors_of_part() if self.is_whole else self.part_map.factors_of_whole(shape)

    def moved(self, tiles: Sequence[Tile]) -> list[Tile]:
        """Tiles of the tensor of the checkpoint as tiles of the new tensor, with dims split as in `factors`."""
        if self.part_map is None:
            return list(tiles)
        move = self.part_map.to_part if self.is_whole else self.part_map.to_whole
        return [one for tile in tiles for one in move(tile)]


@dataclass(frozen=True)
class ResolvedTensor:
    """A tensor under its new name.

    Attributes:
        key: its new name.
        shape: its shape, in elements.
        sources: the tensors of the checkpoint that it is made of.
        padding: a dim, and its element from which on the tensor is zero; None: nothing is padding.
    """

    key: str
    shape: Shape
    sources: tuple[SourceTensor, ...]
    padding: tuple[int, int] | None = None

    @property
    def factors(self) -> dict[int, tuple[int, ...]]:
        """For interleaved and swapped dims, the dims of their tiles, as for `Index.add_tiles`."""
        # They follow from the `turns` and counts of one rule, so all sources have the same.
        return self.sources[0].factors(self.shape)

    def stored(self, stored_of: Callable[[str], Sequence[StoredArray]]) -> list[StoredArray]:
        """The stored arrays that hold the tensor.

        Args:
            stored_of: returns the stored arrays of a tensor of the checkpoint.

        Returns:
            The stored arrays of this tensor, with dims of its tiles split as in `factors`; without arrays that hold no
            element of it. Padding is an array in the file `ZEROS`.
        """
        arrays: list[StoredArray] = []
        for source in self.sources:
            for stored in stored_of(source.key):
                moved = source.moved(stored.tiles)
                if moved:
                    arrays.append(StoredArray(stored.file, stored.name, stored.shape, moved))
        if self.padding is not None:
            dim, start = self.padding
            offset = tuple(start if one == dim else 0 for one in range(len(self.shape)))
            shape = tuple(n - at for n, at in zip(self.shape, offset, strict=True))
            arrays.append(StoredArray(ZEROS, "", shape, [Tile(offset, shape, 0, row_major(shape))]))
        return arrays


def resolve(
    names: NamesFile,
    shapes: Mapping[str, Shape],
    *,
    optimizer_keys: Collection[str] = (),
    sizes: Mapping[str, int] | None = None,
) -> list[ResolvedTensor]:
    """Apply a name map to tensors, from side `from` to side `to`.

    Args:
        names: the name map.
        shapes: the shape of each tensor by key, in elements.
        optimizer_keys: the keys of optimizer state, even if the tensor that it belongs to is missing.
        sizes: values of the known sizes.

    Returns:
        The tensors under their new names, in the order of their sources.

    Raises:
        NamesError: a part is missing, shapes do not fit, two tensors would get the same name, no rule matches any key,
            or no rule matches a key and the map has `other: refuse`.

    Example:
        >>> from reshard.names.file import NamesFile
        >>> names = NamesFile.from_mapping({"rules": [{"from": ["q", "k"], "to": "qk", "join": 0}]})
        >>> resolve(names, {"q": (4, 8), "k": (4, 8)})[0].shape
        (8, 8)
    """
    return _Resolver(names, shapes, optimizer_keys, dict(sizes or {})).made()


def unnamed(names: NamesFile, keys: Collection[str], *, optimizer_keys: Collection[str] = ()) -> list[str]:
    """The keys that no rule of a name map matches, from side `from`.

    Args:
        names: the name map.
        keys: the keys of the tensors.
        optimizer_keys: those of optimizer state.

    Example:
        >>> from reshard.names.file import NamesFile
        >>> unnamed(NamesFile.from_mapping({"rules": [{"from": "a.{i}", "to": "b.{i}"}]}), ["a.0", "c"])
        ['c']
    """
    return _Resolver(names, dict.fromkeys(keys, ()), optimizer_keys, {}).groups()[1]


def copies_left_out(names: NamesFile, keys: Collection[str], *, optimizer_keys: Collection[str] = ()) -> dict[str, str]:
    """The keys that a name map leaves out as copies, and the key that each is a copy of, from side `from`.

    Args:
        names: the name map.
        keys: the keys of the tensors.
        optimizer_keys: those of optimizer state.

    Example:
        >>> from reshard.names.file import NamesFile
        >>> copies_left_out(NamesFile.from_mapping({"rules": [{"from": "head", "tied": "embed"}]}), ["head", "embed"])
        {'head': 'embed'}
    """
    groups, _ = _Resolver(names, dict.fromkeys(keys, ()), optimizer_keys, {}).groups()
    return {
        next(iter(found.values())): _tied_key(group, rule)
        for group, found in groups.items()
        if isinstance(rule := names.rules[group[1]], Tie)
    }


def numbers_joined(
    names: NamesFile, shapes: Mapping[str, Shape], *, optimizer_keys: Collection[str] = ()
) -> dict[str, str]:
    """Numbers of an optimizer that a name map leaves out, because the whole has one, and the key that has the same.

    Args:
        names: the name map.
        shapes: the shape of each tensor by key, in elements.
        optimizer_keys: the keys of optimizer state.

    Example:
        >>> from reshard.names.file import NamesFile
        >>> names = NamesFile.from_mapping({"rules": [{"from": ["q", "k"], "to": "qk", "join": 0}]})
        >>> numbers_joined(names, {"q": (4, 8), "k": (4, 8), "step.q": (), "step.k": ()})
        {'step.k': 'step.q'}
    """
    resolver = _Resolver(names, shapes, optimizer_keys, {})
    joined: dict[str, str] = {}
    for group, keys in resolver.groups()[0].items():
        first, *others = keys.values()
        if others and resolver.is_number(group, first):
            joined |= dict.fromkeys(others, first)
    return joined


@dataclass(frozen=True)
class ResizedTensor:
    """A tensor that a name map pads or trims.

    Attributes:
        key: its key in the checkpoint.
        name: its new name.
        dim: the dim along which it has another number of elements.
        n_before, n_after: the elements along it, in the checkpoint and under the new name.
        is_explained: whether the sizes of the map give the longer one of the two numbers.
    """

    key: str
    name: str
    dim: int
    n_before: int
    n_after: int
    is_explained: bool


def resized_tensors(
    names: NamesFile,
    shapes: Mapping[str, Shape],
    *,
    optimizer_keys: Collection[str] = (),
    sizes: Mapping[str, int] | None = None,
) -> list[ResizedTensor]:
    """The tensors that a name map pads or trims, from side `from`.

    Args:
        names: the name map.
        shapes: the shape of each tensor by key, in elements.
        optimizer_keys: the keys of optimizer state.
        sizes: values of the known sizes.

    Raises:
        NamesError: as `resolve`.

    Example:
        >>> from reshard.names.file import NamesFile
        >>> rule = {"from": "a", "to": "b", "trim": 0, "to_size": 3}
        >>> [found] = resized_tensors(NamesFile.from_mapping({"rules": [rule]}), {"a": (4, 2), "c": (4,)})
        >>> found.key, found.name, found.n_before, found.n_after
        ('a', 'b', 4, 3)
    """
    if not any(isinstance(rule, NameRule) and rule.trim is not None for rule in names.rules):
        return []
    return list(_Resolver(names, shapes, optimizer_keys, dict(sizes or {})).resized())


# A group is one application of a rule: its slot, the number of the rule, and the values of the indices on both sides.
_Group: TypeAlias = tuple[str, int, tuple[tuple[str, int], ...]]


def _tied_key(group: _Group, tie: Tie) -> str:
    return group[0] + tie.tied.format(dict(group[2]))


class _Resolver:
    def __init__(
        self, names: NamesFile, shapes: Mapping[str, Shape], optimizer_keys: Collection[str], sizes: dict[str, int]
    ) -> None:
        self.names = names
        self.shapes = shapes
        self.optimizer_keys = optimizer_keys
        self.sizes = sizes
        self.new: dict[str, ResolvedTensor] = {}

    def made(self) -> list[ResolvedTensor]:
        groups, kept = self.groups()
        fusions = self._fusions(groups)
        if not groups:
            self._refuse_nothing()
        if self.names.other == "refuse" and (unnamed := [key for key in kept if key not in self.optimizer_keys]):
            raise self._unnamed(unnamed)
        for group, keys in groups.items():
            rule = self.names.rules[group[1]]
            if isinstance(rule, Tie):
                self._leave_out(group, rule, next(iter(keys.values())))
                continue
            made = self._parts(group, rule, fusions[group]) if group in fusions else self._whole(group, rule, keys)
            for one in made:
                self._add(one)
        for key in kept:
            self._add(ResolvedTensor(key, self.shapes[key], (SourceTensor(key),)))
        self._add_ties()
        place = {key: n for n, key in enumerate(self.shapes)}
        return sorted(self.new.values(), key=lambda made: place[made.sources[0].key])

    def groups(self) -> tuple[dict[_Group, dict[_Member, str]], list[str]]:
        """The keys of each group by member, and the keys that no rule matches."""
        templates = []
        for n, rule in enumerate(self.names.rules):
            if isinstance(rule, NameRule):
                templates += [(template, (n, e)) for e, template in enumerate(rule.templates("from"))]
            elif rule.side == "from":
                templates.append((rule.name, (n, 0)))
        finder = Templates(templates)
        groups: dict[_Group, dict[_Member, str]] = {}
        kept = []
        for key in self.shapes:
            found = finder.find(key)
            if found is None:
                found = next(
                    (
                        state
                        for rest, state in finder.find_state(key)
                        if rest in self.shapes or key in self.optimizer_keys
                    ),
                    None,
                )
            if found is None:
                kept.append(key)
                continue
            n, entry = found.value
            rule = self.names.rules[n]
            own = rule.indices if isinstance(rule, NameRule) and rule.parts_side == "from" else ()
            shared = tuple(sorted((name, value) for name, value in found.numbers.items() if name not in own))
            members = groups.setdefault((found.slot, n, shared), {})
            members[entry, tuple(found.numbers[name] for name in own)] = key
        return groups, kept

    def _refuse_nothing(self) -> None:
        back = Templates(
            [
                (template, 0)
                for rule in self.names.rules
                if isinstance(rule, NameRule)
                for template in rule.templates("to")
            ]
        )
        if not self.shapes or not self.names.rules:
            return
        example = next(iter(self.shapes))
        is_reversed = any(back.find(key) is not None for key in self.shapes)
        raise NamesError(
            f"no rule of the name map matches any of the {len(self.shapes)} keys, such as {show(example)}",
            key=example,
            hint="the other side of the map matches: reverse it (`:reverse`)"
            if is_reversed
            else "is it the map of this model?",
        )

    def _unnamed(self, kept: Sequence[str]) -> NamesError:
        return NamesError(
            f"no rule of the name map matches {listed(map(show, kept), 1)}",
            key=kept[0],
            hint="add a rule, or set `other: keep` to keep such keys",
        )

    def _add(self, made: ResolvedTensor) -> None:
        source = made.sources[0].key
        if made.key in self.new:
            raise NamesError(
                f"{show(source)} and {show(self.new[made.key].sources[0].key)} would both be named {show(made.key)}",
                key=source,
            )
        self.new[made.key] = made

    def _leave_out(self, group: _Group, tie: Tie, key: str) -> None:
        """Drop a copy, after a check that the checkpoint has the tensor that it copies."""
        tied = _tied_key(group, tie)
        if tied not in self.shapes:
            raise NamesError(
                f"{show(key)} is tied to {show(tied)}, which is missing: dropping it would lose its data", key=key
            )
        if self.shapes[tied] != self.shapes[key]:
            raise NamesError(
                f"{show(key)} of shape {self.shapes[key]} is tied to {show(tied)} of shape {self.shapes[tied]}", key=key
            )

    def _add_ties(self) -> None:
        """Add the copies on the new side: of each tensor in a tie, and of its optimizer state."""
        ties = [rule for rule in self.names.rules if isinstance(rule, Tie) and rule.side == "to"]
        finder = Templates([(tie.tied, tie) for tie in ties])
        if not ties:
            return
        copies: dict[str, list[Tie]] = {}  # one tensor can have several
        for tie in ties:
            copies.setdefault(tie.tied.text, []).append(tie)
        n_made = len(self.new)
        for made in list(self.new.values()):
            found = finder.find(made.key)
            if found is None:
                found = next((state for rest, state in finder.find_state(made.key) if rest in self.new), None)
            if found is None:
                continue
            n_made += len(copies[found.value.tied.text])
            if n_made > _MAX_PARTS:
                raise NamesError(
                    f"the ties of the name map would create more than {_MAX_PARTS} tensors, with the copies of "
                    f"{show(made.key)}",
                    key=made.key,
                )
            for tie in copies[found.value.tied.text]:
                self._add(replace(made, key=found.slot + tie.name.format(found.numbers)))

    def resized(self) -> Iterable[ResizedTensor]:
        for group, keys in self.groups()[0].items():
            rule = self.names.rules[group[1]]
            if isinstance(rule, Tie) or rule.trim is None:
                continue
            key = next(iter(keys.values()))
            found = resized(rule, key, self.shapes[key], self._shape_of_parameter(group, rule, key), self.sizes)
            if found is not None:
                name = group[0] + rule.whole.format(dict(group[2]))
                yield ResizedTensor(key, name, found.dim, found.n_before, found.n_after, found.is_explained)

    # -- one group

    def is_number(self, group: _Group, key: str) -> bool:
        """Whether a tensor is one number of an optimizer for all elements of a parameter, such as a count of steps."""
        slot, shape = group[0], self.shapes[key]
        return bool(slot) and math.prod(shape) == 1 and math.prod(self.shapes.get(key.removeprefix(slot), (2,))) != 1

    def _whole(self, group: _Group, rule: NameRule, keys: Mapping[_Member, str]) -> Iterable[ResolvedTensor]:
        """The whole of parts."""
        slot, _, shared = group
        name = slot + rule.whole.format(dict(shared))
        counts = {
            index: self.sizes.get(index, max(values[n] for _, values in keys) + 1)
            for n, index in enumerate(rule.indices)
        }
        # Check the count before listing: an index in a malicious name can be very large.
        if len(rule.parts) * math.prod(counts.values()) != len(keys):
            raise _wrong_members(rule, group, counts, keys)
        if any(member not in keys for member in members(rule, counts)):
            raise _wrong_members(rule, group, counts, keys)
        firsts = [keys[entry, (0,) * len(rule.indices)] for entry in range(len(rule.parts))]
        for (entry, _), key in keys.items():
            if self.shapes[key] != self.shapes[firsts[entry]]:
                raise NamesError(
                    f"{show(key)} has shape {self.shapes[key]} and {show(firsts[entry])} {self.shapes[firsts[entry]]}: "
                    f"parts of {show(name)} that differ only in an index must have the same shape",
                    key=key,
                )
        if self.is_number(group, firsts[0]):
            return [ResolvedTensor(name, self.shapes[firsts[0]], (SourceTensor(firsts[0]),))]
        if not (rule.is_list or rule.transpose or rule.indices):
            key = firsts[0]
            if rule.swap:
                moved = swapped(rule, key, self.shapes[key], self.sizes)
                return [ResolvedTensor(name, self.shapes[key], (SourceTensor(key, moved),))]
            found = resized(rule, key, self.shapes[key], self._shape_of_parameter(group, rule, key), self.sizes)
            if found is None:
                return [ResolvedTensor(name, self.shapes[key], (SourceTensor(key),))]
            shape = tuple(found.n_after if dim == found.dim else n for dim, n in enumerate(self.shapes[key]))
            source = SourceTensor(key, found.part_map, is_whole=not found.is_padded)
            return [ResolvedTensor(name, shape, (source,), (found.dim, found.n_before) if found.is_padded else None)]
        fusion = fuse_parts(rule, [(key, self.shapes[key]) for key in firsts], counts, self.sizes)
        shape = fusion.shape()
        sources = (SourceTensor(keys[member], fusion.part_map(*member, shape)) for member in fusion.members())
        return [ResolvedTensor(name, shape, tuple(sources))]

    def _shape_of_parameter(self, group: _Group, rule: NameRule, key: str) -> Shape:
        """The shape of the tensor to which optimizer state belongs; of other tensors, their own."""
        slot, _, shared = group
        return self.shapes.get(rule.parts[0].format(dict(shared)) if slot else key, self.shapes[key])

    def _fusions(self, groups: Mapping[_Group, Mapping[_Member, str]]) -> dict[_Group, tuple[str, Fusion]]:
        """The key and the fusion of each whole that is split. The number of all parts is checked first."""
        fusions: dict[_Group, tuple[str, Fusion]] = {}
        n_parts = 0
        for group, keys in groups.items():
            rule = self.names.rules[group[1]]
            if isinstance(rule, Tie) or rule.parts_side == "from":
                continue
            key = next(iter(keys.values()))
            parameter = key.removeprefix(group[0]) if self.is_number(group, key) else key
            fusion = split_whole(rule, key, self.shapes.get(parameter, self.shapes[key]), self.sizes)
            n_parts += fusion.n_members
            if n_parts > _MAX_PARTS:
                raise NamesError(
                    f"the name map would split tensors into more than {_MAX_PARTS} parts: {n_parts} with the "
                    f"{fusion.n_members} of {show(key)} by the rule for {show(rule.whole.text)}",
                    key=key,
                )
            fusions[group] = (key, fusion)
        return fusions

    def _parts(self, group: _Group, rule: NameRule, whole: tuple[str, Fusion]) -> Iterable[ResolvedTensor]:
        """The parts of a whole."""
        slot, _, shared = group
        key, fusion = whole
        shape = self.shapes[key]
        for entry, values in fusion.members():
            numbers = dict(shared) | dict(zip(rule.indices, values, strict=True))
            name = slot + rule.parts[entry].format(numbers)
            if self.is_number(group, key):
                yield ResolvedTensor(name, shape, (SourceTensor(key),))
                continue
            source = SourceTensor(key, fusion.part_map(entry, values, shape), is_whole=True)
            yield ResolvedTensor(name, fusion.part_shape(entry), (source,))


def _wrong_members(rule: NameRule, group: _Group, counts: Mapping[str, int], keys: Mapping[_Member, str]) -> NamesError:
    """The error for a whole with a missing or an extra part."""
    slot, _, shared = group
    name = slot + rule.whole.format(dict(shared))
    numbers = ", ".join(f"{index} = {n}" for index, n in counts.items())
    for (_, values), key in keys.items():
        if any(value >= n for value, n in zip(values, counts.values(), strict=True)):
            return NamesError(f"{show(key)} is an extra part of {show(name)}: the name map has {numbers}", key=key)
    # All indices are below the counts, so a part with small indices is missing: search only as many as there are keys.
    firsts = [range(min(counts[index], len(keys) + 1)) for index in rule.indices]
    for entry, part in enumerate(rule.parts):
        for values in itertools.product(*firsts):
            if (entry, values) not in keys:
                missing = slot + part.format(dict(shared) | dict(zip(rule.indices, values, strict=True)))
                other = next(iter(keys.values()))
                return NamesError(
                    f"{show(missing)} is missing: {show(name)} is fused from it and {show(other)}", key=missing
                )
    raise AssertionError  # not reached
