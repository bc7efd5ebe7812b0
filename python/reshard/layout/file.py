"""The content of a layout file: its fields, the checks that do not need tensors, and its serialization.

The dataclasses mirror the file. A rule contains the `Partition` of the tensors that it matches. This module does not
match rules with the keys of a checkpoint (`resolve` does), and it does not read or write files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self, TypeVar

from reshard.documents.fields import (
    At,
    and_words,
    found,
    is_list,
    read_by_dim,
    read_fields,
    read_integer,
    read_items,
    read_name,
)
from reshard.documents.strict_yaml import Lines, flow
from reshard.errors import ReshardError
from reshard.layout.partition import WHOLE, Block, Blocks, Cut, Partition, trimmed
from reshard.layout.patterns import IndexedPattern, Matcher, Pattern, expand_braces
from reshard.values.words import counted, nearest, show

T = TypeVar("T")

_MAX_RANKS = 1 << 20
_MAX_AXES = 256
_MAX_BLOCKS = 1 << 16  # of one dim
_MAX_EXTENT = 1 << 62
_MAX_EXPRESSIONS = 2000  # regular expressions of one layout
_MAX_NAME = 256  # characters of an axis or a join
_MAX_EXPANDED = 1 << 16  # patterns of a layout that are expanded from braces


@dataclass(frozen=True)
class LayoutRule:
    """The partition of the tensors whose keys match a pattern.

    Attributes:
        match: patterns that must match the complete key. `*` and `?` match any characters. Braces are expanded as in a
            shell (`*.{q,k,v}_proj.weight`, `h.{0..7}.*`). `re:` is the prefix of a regular expression. The braces in
            this attribute are already expanded.
        partition: the partition of the tensors.
        join: the name of the array that contains all keys of the rule on each rank, or None. The flattened local blocks
            of the keys are concatenated, and the result is partitioned over `partition.flat`.
        align: the alignment, in elements, of the start of each key in that array.
        optional: whether the rule can match no key. If False, such a rule is an error when tensors are written.
    """

    match: tuple[str, ...]
    partition: Partition = WHOLE
    join: str | None = None
    align: int = 1
    optional: bool = False


@dataclass(frozen=True)
class OptimizerRule:
    """The further partition of optimizer state, compared with its parameter.

    Attributes:
        add: axes that are appended as the innermost axes, by dim.
        flat: axes over which flattened state is partitioned in one dimension.
        follow: whether state has the rule of its parameter. If False, the rules are matched with the key of the state.
    """

    add: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    flat: tuple[str, ...] = ()
    follow: bool = True


FOLLOWING = OptimizerRule()
"""The default: optimizer state has the partition of its parameter."""


@dataclass(frozen=True)
class PlaceRule:
    """The ranks that hold the tensors whose keys match a pattern.

    These are the ranks with one coordinate on `axes`. Several axes are folded into one coordinate.

    Attributes:
        match: patterns. If `at` is None, each pattern contains the index `{i}` once.
        axes: the axes, outermost first.
        at: the coordinate, from 0.
        sizes: the number of consecutive indices at each coordinate. If `at`, `sizes` and `to` are None, the indices are
            distributed evenly.
        to: the coordinate of each index.
        optional: whether the rule can match no key, as in `LayoutRule`.
    """

    match: tuple[str, ...]
    axes: tuple[str, ...]
    at: int | None = None
    sizes: tuple[int, ...] | None = None
    to: tuple[int, ...] | None = None
    optional: bool = False


@dataclass(frozen=True, eq=False)
class LayoutFile:
    """The content of a layout file. `from_mapping` creates and validates it.

    Attributes:
        mesh: the size of each axis in ranks, outermost axis first.
        ranks: the global rank at each mesh point, row-major; None: 0, 1, 2, ...
        rules: the first rule that matches a key applies. Counters of one element (`global_step`) need no rule and are
            replicated.
        optimizer: the further partition of optimizer state.
        place: the ranks that hold a key. Every matching entry applies.
    """

    mesh: dict[str, int]
    rules: tuple[LayoutRule, ...]
    ranks: tuple[int, ...] | None = None
    optimizer: OptimizerRule = FOLLOWING
    place: tuple[PlaceRule, ...] = ()

    # Two meshes with different axis orders are equal as dicts, but they are different layouts.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LayoutFile):
            return NotImplemented
        return self._values() == other._values()

    def __hash__(self) -> int:
        return hash((tuple(self.mesh.items()), self.ranks, tuple(rule.match for rule in self.rules)))

    def _values(self) -> tuple[object, ...]:
        return list(self.mesh.items()), self.ranks, self.rules, self.optimizer, self.place

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object], *, source: str | None = None) -> Self:
        """Create a layout from a mapping and validate it.

        Args:
            mapping: the content of a layout file. The dims in `sizes`, `blocks` and `add` can be strings, as in JSON.
            source: the path of the file, for messages.

        Raises:
            LayoutError: two fields contradict each other, a field is unknown, or a field has an invalid value. The
                message names the field.

        Example:
            >>> mapping = {"mesh": {"tp": 2}, "rules": [{"match": "*", "cut": ["tp"]}]}
            >>> LayoutFile.from_mapping(mapping).rules[0].partition.cut
            (('tp',),)
        """
        return cls.from_lines(mapping, source=source, lines={})

    @classmethod
    def from_lines(cls, mapping: object, *, source: str | None, lines: Lines) -> Self:
        """Create a layout from the parsed content of a file and validate it, as `from_mapping` does.

        Args:
            mapping: the content of the file.
            source: the path of the file, for messages.
            lines: the line number of each value in the file, for messages.

        Raises:
            LayoutError: as `from_mapping`.
        """
        at = At(source, lines)
        fields = read_fields(at, mapping, required=("mesh", "rules"), optional=("ranks", "optimizer", "place"))
        mesh = _mesh(at / "mesh", fields["mesh"])
        n_ranks = math.prod(mesh.values())
        read = _PatternReader()
        return cls(
            mesh=mesh,
            ranks=_ranks(at / "ranks", fields["ranks"], n_ranks) if "ranks" in fields else None,
            rules=_rules(at / "rules", fields["rules"], mesh, read),
            optimizer=_optimizer(at / "optimizer", fields["optimizer"], mesh) if "optimizer" in fields else FOLLOWING,
            place=_places(at / "place", fields["place"], mesh, read) if "place" in fields else (),
        )

    def to_mapping(self) -> dict[str, object]:
        """The layout as a mapping in canonical form. `from_mapping` of the result is equal to this layout.

        Example:
            >>> mapping = {"mesh": {"tp": 2}, "rules": [{"match": ["*"], "cut": [["tp"], None]}]}
            >>> LayoutFile.from_mapping(mapping).to_mapping()
            {'mesh': {'tp': 2}, 'rules': [{'match': '*', 'cut': ['tp']}]}
        """
        mapping: dict[str, object] = {"mesh": dict(self.mesh)}
        if self.ranks is not None:
            mapping["ranks"] = list(self.ranks)
        mapping["rules"] = [_rule_mapping(rule) for rule in self.rules]
        if optimizer := _optimizer_mapping(self.optimizer):
            mapping["optimizer"] = optimizer
        if self.place:
            mapping["place"] = [_place_mapping(place, self.mesh) for place in self.place]
        return mapping

    def to_yaml(self) -> str:
        """The text of the layout file: one line for each field of a rule, one line for each entry of `place`.

        Example:
            >>> mapping = {"mesh": {"tp": 2}, "rules": [{"match": "*.w", "cut": ["tp"]}]}
            >>> print(LayoutFile.from_mapping(mapping).to_yaml())
            mesh: {tp: 2}
            rules:
              - match: "*.w"
                cut: [tp]
            <BLANKLINE>
        """
        mapping = self.to_mapping()
        lines = [f"{name}: {flow(mapping[name])}" for name in ("mesh", "ranks") if name in mapping]
        lines.append("rules:" if self.rules else "rules: []")
        for rule in map(_rule_mapping, self.rules):
            lines += [f"  {'-' if n == 0 else ' '} {name}: {flow(rule[name])}" for n, name in enumerate(rule)]
        if "optimizer" in mapping:
            lines.append(f"optimizer: {flow(mapping['optimizer'])}")
        if self.place:
            lines += ["place:", *(f"  - {flow(_place_mapping(place, self.mesh))}" for place in self.place)]
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        return self.to_yaml()


# ---------------------------------------------------------------------------------------------------- from a mapping


def _mesh(at: At, value: object) -> dict[str, int]:
    if not isinstance(value, Mapping) or not value:
        raise at.error(f"expected axes and their sizes, as in {{dp: 2, tp: 4}}, found {found(value)}")
    if len(value) > _MAX_AXES:
        raise at.error(f"has {len(value)} axes, more than {_MAX_AXES}")
    mesh = {read_name(at, axis): read_integer(at / str(axis), size, 1) for axis, size in value.items()}
    if (n_ranks := math.prod(mesh.values())) > _MAX_RANKS:
        raise at.error(f"has {counted(n_ranks, 'rank')}, more than {_MAX_RANKS}")
    return mesh


def _ranks(at: At, value: object, n_ranks: int) -> tuple[int, ...]:
    ranks = tuple(read_items(at, value, lambda a, v: read_integer(a, v, 0)))
    if len(ranks) != n_ranks:
        raise at.error(f"expected one rank for each of the {n_ranks} points of the mesh, found {len(ranks)}")
    if (twice := _first_repeated(ranks)) is not None:
        raise at.error(f"rank {twice} stands here twice")
    return ranks


def _rules(at: At, value: object, mesh: Mapping[str, int], read: _PatternReader) -> tuple[LayoutRule, ...]:
    rules = tuple(read_items(at, value, lambda a, v: _rule(a, v, mesh, read)))
    _refuse_expressions(at, rules)
    joins: dict[str, int] = {}
    for n, rule in enumerate(rules):
        if rule.join is not None and joins.setdefault(rule.join, n) != n:
            where = at / n / "flat"
            raise where.error(f"join {show(rule.join)} is the name of an earlier rule's join too")
    return rules


def _rule(at: At, value: object, mesh: Mapping[str, int], read: _PatternReader) -> LayoutRule:
    fields = read_fields(
        at, value, required=("match",), optional=("cut", "uneven", "sizes", "blocks", "flat", "stored", "optional")
    )
    match = read.patterns(at / "match", fields["match"], Pattern.check)
    cut: Cut = ()
    if "cut" in fields:
        cut = trimmed(read_items(at / "cut", fields["cut"], lambda a, v: _cut(a, v, mesh)))
    flat, join, align = _flat(at / "flat", fields["flat"], mesh) if "flat" in fields else ((), None, 1)
    uneven = fields.get("uneven", "refuse")
    if uneven not in ("refuse", "ceil"):
        raise (at / "uneven").error(f"expected `refuse` or `ceil`, found {found(uneven)}")
    sizes = read_by_dim(at / "sizes", fields.get("sizes", {}), _sizes)
    if sizes and fields.get("blocks"):
        raise at.error("`sizes` and `blocks` cannot stand together", hint="give each block's size, or each part's")
    blocks = read_by_dim(at / "blocks", fields.get("blocks", {}), _blocks)
    stored = _stored(at / "stored", fields["stored"], len(cut)) if "stored" in fields else ()
    partition = Partition(cut, uneven, tuple(sorted(sizes.items())), tuple(sorted(blocks.items())), flat, stored)
    _refuse_twice(at, partition.axes, "in one tensor")
    for dim, parts in partition.sizes:
        axes = partition.axes_of(dim)
        if len(parts) != (n := math.prod(mesh[axis] for axis in axes)):
            by = f"{_axes_text(axes, mesh)} cut it into {n}" if axes else "`cut` does not cut it"
            raise (at / "sizes" / dim).error(f"{len(parts)} sizes for dim {dim}, but {by}")
    return LayoutRule(match, partition, join, align, _flag(at / "optional", fields.get("optional", False)))


def _refuse_expressions(at: At, entries: Sequence[LayoutRule | PlaceRule]) -> None:
    """Raise an error if the number or the compiled size of the regular expressions exceeds the limit of one search."""
    texts = [_without_index(text) for entry in entries for text in entry.match]
    expressions = [text for text in texts if text.startswith("re:") and Pattern.check(text)]
    if len(expressions) > _MAX_EXPRESSIONS:
        raise at.error(
            f"has {len(expressions)} regular expressions, more than {_MAX_EXPRESSIONS}",
            hint="write globs; a key with special characters escaped does not count",
        )
    try:
        Matcher([expressions])
    except ValueError as error:
        message, hint = _message_of(error)
        raise at.error(message, hint=hint) from None


def _cut(at: At, value: object, mesh: Mapping[str, int]) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (_axis(at, value, mesh),)
    if not is_list(value):
        raise at.error(f"expected null, an axis or a list of axes, found {found(value)}")
    return tuple(read_items(at, value, lambda a, v: _axis(a, v, mesh)))


def _sizes(at: At, value: object) -> tuple[int, ...]:
    sizes = tuple(read_items(at, value, lambda a, v: read_integer(a, v, 0)))
    _check_extent(at, sum(sizes))
    return sizes


def _check_extent(at: At, extent: int) -> None:
    if extent > _MAX_EXTENT:
        raise at.error(f"has {extent} elements, more than {_MAX_EXTENT}")


def _blocks(at: At, value: object) -> Blocks:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    n_blocks = read_integer(at, value, 1) if is_number else len(value) if isinstance(value, Sequence) else 0
    if n_blocks > _MAX_BLOCKS:
        raise at.error(
            f"has {n_blocks} blocks, more than {_MAX_BLOCKS}",
            hint="`blocks` is how many parts a fused dim has, or the size of each",
        )
    if is_number:
        return n_blocks
    blocks = tuple(read_items(at, value, _block))
    if not blocks:
        raise at.error("expected at least one block")
    _check_extent(at, sum(block.size for block in blocks))
    return blocks


def _block(at: At, value: object) -> Block:
    if not isinstance(value, Mapping):
        return Block(read_integer(at, value, 0))
    fields = read_fields(at, value, required=("size",), optional=("cut",))
    if fields.get("cut") is not None:
        raise (at / "cut").error(
            f"can only be null (the block is whole on every rank), found {found(fields['cut'])}",
            hint="leave it out for a block that is cut; the rule's `cut` names the axes",
        )
    return Block(read_integer(at / "size", fields["size"], 0), is_cut="cut" not in fields)


def _flat(at: At, value: object, mesh: Mapping[str, int]) -> tuple[tuple[str, ...], str | None, int]:
    """The axes of `flat`, the name of the join or None, and its alignment."""
    if not isinstance(value, Mapping):
        return _axes(at, value, mesh), None, 1
    fields = read_fields(at, value, required=("axes",), optional=("join", "align"))
    if "align" in fields and "join" not in fields:
        raise (at / "align").error("has a meaning only with `join`")
    return (
        _axes(at / "axes", fields["axes"], mesh),
        read_name(at / "join", fields["join"]) if "join" in fields else None,
        read_integer(at / "align", fields.get("align", 1), 1),
    )


def _stored(at: At, value: object, n_cut: int) -> tuple[int, ...]:
    stored = tuple(read_items(at, value, lambda a, v: read_integer(a, v, 0)))
    if not stored or sorted(stored) != list(range(len(stored))):
        raise at.error(f"expected each dim once, as in [1, 0], found {found(value)}")
    if n_cut > len(stored):
        raise at.error(f"names {counted(len(stored), 'dim')}, but `cut` {n_cut}")
    return stored


def _optimizer(at: At, value: object, mesh: Mapping[str, int]) -> OptimizerRule:
    fields = read_fields(at, value, optional=("add", "flat", "follow"))
    if len(fields) != 1:
        raise at.error(f"expected one of `add`, `flat` and `follow`, found {', '.join(fields) or 'none'}")
    if "follow" in fields:
        return OptimizerRule(follow=_flag(at / "follow", fields["follow"]))
    if "flat" in fields:
        return OptimizerRule(flat=_axes(at / "flat", fields["flat"], mesh))
    add = read_by_dim(at / "add", fields["add"], lambda a, v: _axes(a, v, mesh))
    if not add:
        raise (at / "add").error("expected dims and their axes, as in {0: [dp]}")
    _refuse_twice(at / "add", [axis for axes in add.values() for axis in axes], "in one tensor")
    return OptimizerRule(add=add)


def _places(at: At, value: object, mesh: Mapping[str, int], read: _PatternReader) -> tuple[PlaceRule, ...]:
    places = tuple(read_items(at, value, lambda a, v: _place(a, v, mesh, read)))
    _refuse_expressions(at, places)
    return places


def _place(at: At, value: object, mesh: Mapping[str, int], read: _PatternReader) -> PlaceRule:
    fields = read_fields(at, value, required=("match", "axis"), optional=("at", "sizes", "to", "optional"))
    axes = (
        (_axis(at / "axis", fields["axis"], mesh),)
        if isinstance(fields["axis"], str)
        else _axes(at / "axis", fields["axis"], mesh)
    )
    n_parts = math.prod(mesh[axis] for axis in axes)
    optional = _flag(at / "optional", fields.get("optional", False))
    ways = [way for way in ("at", "sizes", "to") if way in fields]
    if len(ways) > 1:
        raise at.error(f"{and_words(ways)} cannot stand together")
    if ways == ["at"]:
        match = read.patterns(at / "match", fields["match"], _pattern_without_index)
        coordinate = read_integer(at / "at", fields["at"], -n_parts)
        if coordinate >= n_parts:
            raise (at / "at").error(
                f"{coordinate} is outside {_axes_text(axes, mesh)}: expected {-n_parts} to {n_parts - 1}"
            )
        return PlaceRule(match, axes, at=coordinate % n_parts, optional=optional)
    match = read.patterns(at / "match", fields["match"], _pattern_with_index)
    if ways == ["sizes"]:
        sizes = _sizes(at / "sizes", fields["sizes"])
        if len(sizes) != n_parts:
            raise (at / "sizes").error(f"expected {n_parts} sizes for {_axes_text(axes, mesh)}, found {len(sizes)}")
        return PlaceRule(match, axes, sizes=sizes, optional=optional)
    if ways == ["to"]:
        to = tuple(read_items(at / "to", fields["to"], lambda a, v: read_integer(a, v, 0)))
        for n, coordinate in enumerate(to):
            if coordinate >= n_parts:
                where = at / "to" / n
                raise where.error(f"{coordinate} is outside {_axes_text(axes, mesh)}: expected 0 to {n_parts - 1}")
        return PlaceRule(match, axes, to=to, optional=optional)
    return PlaceRule(match, axes, optional=optional)


def _pattern_without_index(text: str) -> None:
    if "{i}" in text:
        raise ValueError(f"{show(text)} holds `{{i}}`, and `at` gives the coordinate without it")
    Pattern.check(text)


def _pattern_with_index(text: str) -> None:
    if "{i}" not in text:
        raise ValueError(f"{show(text)} must hold `{{i}}`, the index of a layer or an expert, or the entry say `at`")
    Pattern.check(IndexedPattern.any_index(text))


def _without_index(text: str) -> str:
    return IndexedPattern.any_index(text) if text.count("{i}") == 1 else text


class _PatternReader:
    """Reads the patterns of one layout and limits brace expansion: a short text can expand to very many patterns."""

    def __init__(self) -> None:
        self.n_expanded = 0

    def patterns(self, at: At, value: object, check: Callable[[str], object]) -> tuple[str, ...]:
        texts = [(at, value)] if isinstance(value, str) else list(read_items(at, value, lambda a, v: (a, v)))
        if not texts:
            raise at.error("expected at least one pattern")
        patterns: list[str] = []
        for where, text in texts:
            if not isinstance(text, str):
                raise where.error(f"expected a pattern, found {found(text)}")
            try:
                expanded = expand_braces(text)
                for one in expanded:
                    check(one)
            except ValueError as error:
                message, hint = _message_of(error)
                raise where.error(message, hint=hint) from None
            if expanded != [text]:
                self.n_expanded += len(expanded)
            if self.n_expanded > _MAX_EXPANDED:
                raise where.error(f"the braces of the layout stand for more than {_MAX_EXPANDED} patterns")
            patterns += expanded
        return tuple(patterns)


def _flag(at: At, value: object) -> bool:
    if not isinstance(value, bool):
        raise at.error(f"expected true or false, found {found(value)}")
    return value


def _message_of(error: ValueError) -> tuple[str, str | None]:
    """Message and hint of an error about a pattern."""
    return (error.message, error.hint) if isinstance(error, ReshardError) else (str(error), None)


def _axes(at: At, value: object, mesh: Mapping[str, int]) -> tuple[str, ...]:
    axes = tuple(read_items(at, value, lambda a, v: _axis(a, v, mesh)))
    if not axes:
        raise at.error("expected at least one axis")
    _refuse_twice(at, list(axes), "here")
    return axes


def _axis(at: At, value: object, mesh: Mapping[str, int]) -> str:
    if not isinstance(value, str):
        raise at.error(f"expected the name of an axis, found {found(value)}")
    if value not in mesh:
        near = nearest(value, mesh, n=1)
        hint = f"did you mean `{near[0]}`?" if near else None
        raise at.error(f"unknown axis {show(value)}; the axes are {', '.join(mesh)}", hint=hint)
    return value


def _refuse_twice(at: At, axes: Sequence[str], where: str) -> None:
    if (axis := _first_repeated(axes)) is not None:
        raise at.error(f"axis {show(axis)} is used twice {where}")


def _first_repeated(items: Iterable[T]) -> T | None:
    seen: set[T] = set()
    for item in items:
        if item in seen:
            return item
        seen.add(item)
    return None


def _axes_text(axes: Sequence[str], mesh: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} ({mesh[axis]})" for axis in axes)


# ------------------------------------------------------------------------------------------------------- to a mapping


def _rule_mapping(rule: LayoutRule) -> dict[str, object]:
    mapping: dict[str, object] = {"match": _one_or_list(rule.match)}
    partition = rule.partition
    if partition.cut:
        mapping["cut"] = [_one_or_list(axes) if axes else None for axes in partition.cut]
    if partition.uneven != "refuse":
        mapping["uneven"] = partition.uneven
    if partition.sizes:
        mapping["sizes"] = {dim: list(sizes) for dim, sizes in partition.sizes}
    if partition.blocks:
        mapping["blocks"] = {dim: _blocks_value(blocks) for dim, blocks in partition.blocks}
    if rule.join is not None:
        align = {"align": rule.align} if rule.align != 1 else {}
        mapping["flat"] = {"axes": list(partition.flat), "join": rule.join, **align}
    elif partition.flat:
        mapping["flat"] = list(partition.flat)
    if partition.stored:
        mapping["stored"] = list(partition.stored)
    if rule.optional:
        mapping["optional"] = True
    return mapping


def _blocks_value(blocks: Blocks) -> object:
    if isinstance(blocks, int):
        return blocks
    return [block.size if block.is_cut else {"size": block.size, "cut": None} for block in blocks]


def _optimizer_mapping(optimizer: OptimizerRule) -> dict[str, object]:
    if optimizer.add:
        return {"add": {dim: list(axes) for dim, axes in optimizer.add.items()}}
    if optimizer.flat:
        return {"flat": list(optimizer.flat)}
    return {} if optimizer.follow else {"follow": False}


def _place_mapping(place: PlaceRule, mesh: Mapping[str, int]) -> dict[str, object]:
    mapping: dict[str, object] = {"match": _one_or_list(place.match), "axis": _one_or_list(place.axes)}
    if place.at is not None:
        # Write the last coordinate as -1. It remains the last coordinate if the user changes the size of the axis.
        n_parts = math.prod(mesh[axis] for axis in place.axes)
        mapping["at"] = -1 if place.at == n_parts - 1 and n_parts > 1 else place.at
    if place.sizes is not None:
        mapping["sizes"] = list(place.sizes)
    if place.to is not None:
        mapping["to"] = list(place.to)
    if place.optional:
        mapping["optional"] = True
    return mapping


def _one_or_list(texts: Sequence[str]) -> str | list[str]:
    return texts[0] if len(texts) == 1 else list(texts)
