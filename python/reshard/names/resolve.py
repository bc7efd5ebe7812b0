"""Rules meet keys: the tensors that there are under the new names, and where each of them lies in the old ones.

Keys are grouped first: all parts of one whole, or the one whole of many parts; state of the optimizer makes groups of
its own, by its slot. What `fuse` says of each group's shapes is collected then. Pure: shapes in, part maps out.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from reshard._core import StoredArray
from reshard.errors import NamesError
from reshard.names.file import Rule, Tie
from reshard.names.fuse import Fusion, Shape, fused, members, split
from reshard.names.templates import Templates
from reshard.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from reshard._core import Tile
    from reshard.names.file import NamesFile
    from reshard.names.part_map import PartMap

__all__ = ["ResolvedTensor", "Source", "resolve"]

_MAX_PIECES = 500_000  # that a map makes by splits and copies; experts of the largest models, with state, are 200,000

_Member: TypeAlias = tuple[int, tuple[int, ...]]
"""A part of a whole: its entry in the rule, and its own indices."""


@dataclass(frozen=True)
class Source:
    """A tensor of the checkpoint, as it lies in one under a new name.

    Attributes:
        key: its key in the checkpoint.
        part_map: how the one lies in the other; None: they are the same.
        is_whole: whether the tensor of the checkpoint is the whole and the new one its part; else the reverse.
    """

    key: str
    part_map: PartMap | None = None
    is_whole: bool = False

    def factors(self, shape: Shape) -> dict[int, tuple[int, int]]:
        """In what factors tiles of the new tensor, whose shape is given, describe its dims."""
        if self.part_map is None:
            return {}
        return self.part_map.factors_of_part() if self.is_whole else self.part_map.factors_of_whole(shape)

    def moved(self, tiles: Sequence[Tile]) -> list[Tile]:
        """Tiles of the tensor of the checkpoint as tiles of the new one, in the dims of `factors`."""
        if self.part_map is None:
            return list(tiles)
        move = self.part_map.to_part if self.is_whole else self.part_map.to_whole
        return [one for tile in tiles for one in move(tile)]


@dataclass(frozen=True)
class ResolvedTensor:
    """A tensor under its new name.

    Attributes:
        key: the name.
        shape: its shape, in elements.
        sources: the tensors of the checkpoint that it consists of.
    """

    key: str
    shape: Shape
    sources: tuple[Source, ...]

    @property
    def factors(self) -> dict[int, tuple[int, int]]:
        """Of the dims in which parts take turns, the rounds and the elements of one: what `Index.add_tiles` takes."""
        # They follow from the turns and counts of the one rule that made it: all sources have the same.
        return self.sources[0].factors(self.shape)

    def stored(self, stored_of: Callable[[str], Sequence[StoredArray]]) -> list[StoredArray]:
        """Where it is stored.

        Args:
            stored_of: the stored arrays of a tensor of the checkpoint, by key.

        Returns:
            The stored arrays of this tensor, with tiles in the dims of `factors`; arrays that hold no part of it are
            left out.
        """
        arrays: list[StoredArray] = []
        for source in self.sources:
            for stored in stored_of(source.key):
                moved = source.moved(stored.tiles)
                if moved:
                    arrays.append(StoredArray(stored.file, stored.name, stored.shape, moved))
        return arrays


def resolve(
    names: NamesFile,
    shapes: Mapping[str, Shape],
    *,
    optimizer_keys: Collection[str] = (),
    sizes: Mapping[str, int] | None = None,
) -> list[ResolvedTensor]:
    """What a name map makes of tensors, going from its side `from` to its side `to`.

    Args:
        names: the name map.
        shapes: the tensors: key and shape, in order.
        optimizer_keys: which of them belong to the optimizer part, whether or not the tensor is there that they are of.
        sizes: the values of the sizes that are known.

    Returns:
        The tensors under their new names, in the order of those that they are made of.

    Raises:
        NamesError: a part is missing, shapes do not fit, two tensors would get one name, no rule matches anything, or a
            key has no rule and the map says `other: refuse`.

    Example:
        >>> from reshard.names.file import NamesFile
        >>> names = NamesFile.from_mapping({"rules": [{"from": ["q", "k"], "to": "qk", "join": 0}]})
        >>> resolve(names, {"q": (4, 8), "k": (4, 8)})[0].shape
        (8, 8)
    """
    return _Resolver(names, shapes, optimizer_keys, dict(sizes or {})).made()


# A group is one application of a rule: its slot, the number of the rule, and the indices that both sides have.
_Group: TypeAlias = tuple[str, int, tuple[tuple[str, int], ...]]


class _Resolver:
    def __init__(
        self, names: NamesFile, shapes: Mapping[str, Shape], optimizer_keys: Collection[str], sizes: dict[str, int]
    ) -> None:
        self.names = names
        self.shapes = shapes
        self.optimizer_keys = optimizer_keys
        self.sizes = sizes
        self.new: dict[str, ResolvedTensor] = {}
        self.made_of: dict[str, str] = {}  # of each new key, one it came from: for messages

    def made(self) -> list[ResolvedTensor]:
        groups, kept = self._groups()
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
            self._add(ResolvedTensor(key, self.shapes[key], (Source(key),)))
        self._add_ties()
        place = {key: n for n, key in enumerate(self.shapes)}
        return sorted(self.new.values(), key=lambda made: place[made.sources[0].key])

    def _groups(self) -> tuple[dict[_Group, dict[_Member, str]], list[str]]:
        """The keys of each group by what they are in it, and the keys that no rule names."""
        templates = []
        for n, rule in enumerate(self.names.rules):
            if isinstance(rule, Rule):
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
            own = rule.indices if isinstance(rule, Rule) and rule.parts_side == "from" else ()
            shared = tuple(sorted((name, value) for name, value in found.numbers.items() if name not in own))
            members = groups.setdefault((found.slot, n, shared), {})
            members[entry, tuple(found.numbers[name] for name in own)] = key
        return groups, kept

    def _refuse_nothing(self) -> None:
        back = Templates(
            [(template, 0) for rule in self.names.rules if isinstance(rule, Rule) for template in rule.templates("to")]
        )
        if not self.shapes or not self.names.rules:
            return
        example = next(iter(self.shapes))
        turned = any(back.find(key) is not None for key in self.shapes)
        raise NamesError(
            f"no rule of the name map matches any of the {len(self.shapes)} keys, such as {show(example)}",
            key=example,
            hint="its other side does: reverse the map (`:reverse`)" if turned else "is it the map of this model?",
        )

    def _unnamed(self, kept: Sequence[str]) -> NamesError:
        return NamesError(
            f"no rule of the name map names {listed(map(show, kept), 1)}",
            key=kept[0],
            hint="add a rule for it, or say `other: keep` to keep such keys as they are",
        )

    def _add(self, made: ResolvedTensor) -> None:
        source = made.sources[0].key
        if made.key in self.new:
            raise NamesError(
                f"{show(source)} and {show(self.new[made.key].sources[0].key)} would both be called {show(made.key)}",
                key=source,
            )
        self.new[made.key] = made

    def _leave_out(self, group: _Group, tie: Tie, key: str) -> None:
        """A copy is left out only where the tensor is there that it is a copy of."""
        tied = group[0] + tie.tied.format(dict(group[2]))
        if tied not in self.shapes:
            raise NamesError(
                f"{show(key)} is tied to {show(tied)}, which is not there: to leave it out would lose it", key=key
            )
        if self.shapes[tied] != self.shapes[key]:
            raise NamesError(
                f"{show(key)} of shape {self.shapes[key]} is tied to {show(tied)} of shape {self.shapes[tied]}", key=key
            )

    def _add_ties(self) -> None:
        """The copies that the new side has: of each tensor that a tie names, and of its states."""
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
            if n_made > _MAX_PIECES:
                raise NamesError(
                    f"the ties of the name map would make more than {_MAX_PIECES} tensors, with the copies of "
                    f"{show(made.key)}",
                    key=made.key,
                )
            for tie in copies[found.value.tied.text]:
                self._add(ResolvedTensor(found.slot + tie.name.format(found.numbers), made.shape, made.sources))

    # -- one group

    def _whole(self, group: _Group, rule: Rule, keys: Mapping[_Member, str]) -> Iterable[ResolvedTensor]:
        """The whole of parts."""
        slot, _, shared = group
        name = slot + rule.whole.format(dict(shared))
        counts = {
            index: self.sizes.get(index, max(values[n] for _, values in keys) + 1)
            for n, index in enumerate(rule.indices)
        }
        # Counted before they are listed: an index in a hostile name can be anything.
        if len(rule.parts) * math.prod(counts.values()) != len(keys):
            raise _wrong_members(rule, group, counts, keys)
        if any(member not in keys for member in members(rule, counts)):
            raise _wrong_members(rule, group, counts, keys)
        firsts = [keys[entry, (0,) * len(rule.indices)] for entry in range(len(rule.parts))]
        for (entry, _), key in keys.items():
            if self.shapes[key] != self.shapes[firsts[entry]]:
                raise NamesError(
                    f"{show(key)} has shape {self.shapes[key]} and {show(firsts[entry])} {self.shapes[firsts[entry]]}: "
                    f"parts of {show(name)} that differ in an index only have one shape",
                    key=key,
                )
        if not (rule.is_list or rule.transpose or rule.indices):
            return [ResolvedTensor(name, self.shapes[firsts[0]], (Source(firsts[0]),))]
        fusion = fused(rule, [(key, self.shapes[key]) for key in firsts], counts, self.sizes)
        shape = fusion.shape()
        sources = (Source(keys[member], fusion.part_map(*member, shape)) for member in fusion.members())
        return [ResolvedTensor(name, shape, tuple(sources))]

    def _fusions(self, groups: Mapping[_Group, Mapping[_Member, str]]) -> dict[_Group, tuple[str, Fusion]]:
        """How each whole is split, and its key. All parts are counted before the first one is made."""
        fusions: dict[_Group, tuple[str, Fusion]] = {}
        n_pieces = 0
        for group, keys in groups.items():
            rule = self.names.rules[group[1]]
            if isinstance(rule, Tie) or rule.parts_side == "from":
                continue
            key = next(iter(keys.values()))
            fusion = split(rule, key, self.shapes[key], self.sizes)
            n_pieces += fusion.n_members
            if n_pieces > _MAX_PIECES:
                raise NamesError(
                    f"the name map would cut tensors into more than {_MAX_PIECES} parts: {n_pieces} with the "
                    f"{fusion.n_members} of {show(key)} by the rule for {show(rule.whole.text)}",
                    key=key,
                )
            fusions[group] = (key, fusion)
        return fusions

    def _parts(self, group: _Group, rule: Rule, whole: tuple[str, Fusion]) -> Iterable[ResolvedTensor]:
        """The parts of a whole."""
        slot, _, shared = group
        key, fusion = whole
        shape = self.shapes[key]
        for entry, values in fusion.members():
            numbers = dict(shared) | dict(zip(rule.indices, values, strict=True))
            source = Source(key, fusion.part_map(entry, values, shape), is_whole=True)
            yield ResolvedTensor(slot + rule.parts[entry].format(numbers), fusion.part_shape(entry), (source,))


def _wrong_members(rule: Rule, group: _Group, counts: Mapping[str, int], keys: Mapping[_Member, str]) -> NamesError:
    """The error for a whole that lacks a part or has one too many."""
    slot, _, shared = group
    name = slot + rule.whole.format(dict(shared))
    said = ", ".join(f"{index} = {n}" for index, n in counts.items())
    for (_, values), key in keys.items():
        if any(value >= n for value, n in zip(values, counts.values(), strict=True)):
            return NamesError(f"{show(key)} is one part too many of {show(name)}: the name map says {said}", key=key)
    # Indices are below the counts, so one of the first that there should be is missing, whatever the counts are.
    firsts = [range(min(counts[index], len(keys) + 1)) for index in rule.indices]
    for entry, part in enumerate(rule.parts):
        for values in itertools.product(*firsts):
            if (entry, values) not in keys:
                missing = slot + part.format(dict(shared) | dict(zip(rule.indices, values, strict=True)))
                other = next(iter(keys.values()))
                return NamesError(
                    f"{show(missing)} is missing: {show(name)} is made of it and {show(other)}", key=missing
                )
    raise AssertionError  # not reached
