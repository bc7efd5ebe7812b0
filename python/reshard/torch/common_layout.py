"""One layout of all ranks, computed from the partitions of the tensors that each rank holds.

Ranks first compare digests of their partitions. Of all ranks with the same partitions only the first sends them. Every
rank then computes the same layout from the same input. The mesh is the coarsest one in which every mesh dim of a rank,
and every set of ranks that holds a key, is a consecutive group of axes. Keys with the same partition are then combined
into patterns, because a checkpoint records rules. These are resolved and compared with the input before the layout is
returned, so a pattern can be longer than necessary but not wrong.

If no layout file can describe the tensors, the reason is returned. This module uses neither torch nor tensor contents.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from reshard import _core
from reshard.errors import LayoutError, MismatchError
from reshard.layout.bind import bound_of
from reshard.layout.describe import NUMBER, Patterns, place_of, rule_of
from reshard.layout.file import LayoutFile
from reshard.layout.partition import Partition, trimmed
from reshard.layout.patterns import glob_of
from reshard.layout.resolve import Resolved, resolve
from reshard.torch.placements import DigitLayout, Row, digits_of, part_of
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from reshard.layout.bind import BoundLayout
    from reshard.layout.partition import Place
    from reshard.torch.placements import Digit

V = TypeVar("V", bound=Hashable)


def layout_of(
    rows: Sequence[tuple[Row, Sequence[int]]],
    model: Sequence[tuple[Mapping[str, DigitLayout], Sequence[int]]],
    optimizer: Sequence[tuple[Mapping[str, DigitLayout], Sequence[int]]] = (),
    aliases: Mapping[str, str] | None = None,
) -> tuple[BoundLayout, None] | tuple[None, str]:
    """The layout in which all ranks hold their tensors, or the reason why there is none.

    Args:
        rows: each distinct row, and the ranks that have it.
        model: layouts of the model's tensors by key, and the ranks that hold tensors in these layouts.
        optimizer: the same for the state of the optimizer.
        aliases: other names of keys, which a checkpoint may use instead. The rules partition them like their tensor.

    Returns:
        `(layout, None)`; or `(None, reason)`.

    Raises:
        MismatchError: ranks hold tensors of different shapes or partitions under one key.

    Example:
        >>> row = Row(2, spans=frozenset({(2, 1, "tp")}))
        >>> held = {"a.w": DigitLayout((4, 2), ((((2, 1),),),)), "a.b": DigitLayout((4,))}
        >>> layout_of([(row, [0, 1])], [(held, [0, 1])])[0].to_mapping()
        {'mesh': {'tp': 2}, 'rules': [{'match': 'a.w', 'cut': ['tp']}, {'match': '*'}]}
    """
    held_model, held_optimizer = _HeldTensors.of(model), _HeldTensors.of(optimizer)
    try:
        return _LayoutBuilder(_one_row(rows), held_model, held_optimizer, aliases or {}).layout(), None
    except _NoLayoutError as reason:
        return None, str(reason)


class _NoLayoutError(Exception):
    """No layout file can describe the tensors."""


@dataclass(frozen=True)
class _HeldTensors:
    """The tensors of all ranks, and which ranks hold them.

    Attributes:
        layouts: the layout of each key.
        holders: the ranks that hold each key, ascending.
    """

    layouts: dict[str, DigitLayout]
    holders: dict[str, tuple[int, ...]]

    @classmethod
    def of(cls, known: Sequence[tuple[Mapping[str, DigitLayout], Sequence[int]]]) -> _HeldTensors:
        layouts: dict[str, DigitLayout] = {}
        kinds: dict[str, list[int]] = {}
        for kind, (held, ranks) in enumerate(known):
            for key, layout in held.items():
                first = layouts.setdefault(key, layout)
                if first.shape == layout.shape and (first.reason or layout.reason):
                    layouts[key] = first if first.reason else layout
                elif first != layout:
                    raise MismatchError(
                        f"{show(key)} is {_describe(first)} on rank {known[kinds[key][0]][1][0]} and "
                        f"{_describe(layout)} on rank {ranks[0]}",
                        key=key,
                        hint="different tensors need different names: in each pipeline stage use the names of the "
                        "whole model",
                    )
                kinds.setdefault(key, []).append(kind)
        # Thousands of keys share a few sets of ranks.
        sets: dict[tuple[int, ...], tuple[int, ...]] = {}
        for of_key in map(tuple, kinds.values()):
            if of_key not in sets:
                sets[of_key] = tuple(sorted(rank for kind in of_key for rank in known[kind][1]))
        return cls(layouts, {key: sets[tuple(of_key)] for key, of_key in kinds.items()})


def _describe(layout: DigitLayout) -> str:
    cuts = {dim: [_size(line) for line in lines] for dim, lines in enumerate(layout.cuts)}
    cut = "".join(f", dim {dim} split by {' x '.join(map(str, sizes))}" for dim, sizes in cuts.items() if sizes)
    return f"of shape {layout.shape}{cut}"


def _size(line: Iterable[Digit]) -> int:
    return math.prod(outer // inner for outer, inner in line)


def _one_row(rows: Sequence[tuple[Row, Sequence[int]]]) -> Row:
    """The row of all ranks, with the spans of all rows."""
    orders = {row.order for row, _ in rows}
    if len(orders) > 1:
        raise _NoLayoutError("the meshes have different rank orders")
    return Row(rows[0][0].n_ranks, orders.pop(), frozenset().union(*(row.spans for row, _ in rows)))


@dataclass(frozen=True)
class _LayoutBuilder:
    """Builds the layout and checks it."""

    row: Row
    model: _HeldTensors
    optimizer: _HeldTensors
    aliases: Mapping[str, str]
    axes: dict[str, Digit] = field(default_factory=dict)  # the mesh: the span of each axis, outermost first
    places: dict[tuple[int, ...], Place | None] = field(default_factory=dict)  # by set of ranks

    def layout(self) -> BoundLayout:
        held = {**self.model.layouts, **self.optimizer.layouts}
        for key, layout in held.items():
            if layout.reason:
                raise _NoLayoutError(f"{show(key)}: {layout.reason}")
        self._make_mesh()
        holders = self.model.holders | self.optimizer.holders
        expected = {key: (self._partition(layout), self.places[holders[key]]) for key, layout in held.items()}
        shapes = {key: layout.shape for key, layout in held.items()}
        own = list(self.model.layouts)
        for optimizer, seen in ((None, own), ({"follow": False}, list(held))):
            mapping = self._mapping({key: expected[key] for key in seen}, held)
            if optimizer is not None:
                mapping["optimizer"] = optimizer
            if (found := self._checked(mapping, shapes, expected)) is not None:
                return found
        raise _NoLayoutError("no rules describe how its tensors are partitioned")

    # -- the mesh

    def _make_mesh(self) -> None:
        n_ranks = self.row.n_ranks
        position = {rank: p for p, rank in enumerate(self.row.order or range(n_ranks))}
        sets = sorted({*self.model.holders.values(), *self.optimizer.holders.values()})
        free: dict[tuple[int, ...], tuple[int, tuple[Digit, ...]]] = {}
        for ranks in sets:
            positions = sorted(position[rank] for rank in ranks)
            line = digits_of(positions)
            if line is None or any(n_ranks % outer for outer, _ in line):
                raise _NoLayoutError(
                    f"some tensors are held only by ranks {listed(ranks)}, which are not part of a mesh"
                )
            free[ranks] = positions[0], line
        spans = {(outer, inner) for outer, inner, _ in self.row.spans} | {d for _, line in free.values() for d in line}
        bounds = sorted({1, n_ranks} | {bound for span in spans for bound in span})
        for inner, outer in itertools.pairwise(bounds):
            if outer % inner:
                raise _NoLayoutError(f"its meshes cannot be combined: {outer} ranks are not a multiple of {inner}")
        digits = [(outer, inner) for inner, outer in itertools.pairwise(bounds)][::-1]
        fixed = {
            ranks: [d for d in digits if not any(o >= d[0] and i <= d[1] for o, i in line)]
            for ranks, (_, line) in free.items()
        }
        self.axes.update(_axis_names(digits, self.row, {digit for of_set in fixed.values() for digit in of_set}))
        name_of = {digit: name for name, digit in self.axes.items()}
        for ranks, of_set in fixed.items():
            at = 0
            for outer, inner in of_set:
                at = at * (outer // inner) + free[ranks][0] % outer // inner
            self.places[ranks] = (tuple(name_of[digit] for digit in of_set), at) if of_set else None

    # -- rules

    def _partition(self, layout: DigitLayout) -> Partition:
        """The partition on the axes of the mesh; `uneven` is left to the rule."""
        cut, sizes = [], []
        for dim, lines in enumerate(layout.cuts):
            names = [[name for digit in line for name in self._axes_in(digit)] for line in lines]
            cut.append(tuple(itertools.chain.from_iterable(names)))
            parts = [_size(line) for line in lines]
            if any(len(of_line) > 1 for of_line in names) and layout.shape[dim] % math.prod(parts):
                # torch splits once over the product of these axes; `uneven: ceil` would split once for each axis.
                which = itertools.product(*map(range, parts))
                extent = layout.shape[dim : dim + 1]
                shapes = (part_of(extent, [list(zip(parts, w, strict=True))])[1] for w in which)
                sizes.append((dim, tuple(shape[0] for shape in shapes)))
        return Partition(trimmed(cut), sizes=tuple(sizes))

    def _axes_in(self, digit: Digit) -> Iterator[str]:
        return (name for name, (outer, inner) in self.axes.items() if outer <= digit[0] and inner >= digit[1])

    def _mapping(
        self, values: Mapping[str, tuple[Partition, Place | None]], held: Mapping[str, DigitLayout]
    ) -> dict[str, object]:
        """The layout mapping whose rules and places match these keys."""
        mapping: dict[str, object] = {"mesh": {name: outer // inner for name, (outer, inner) in self.axes.items()}}
        if self.row.order is not None:
            mapping["ranks"] = list(self.row.order)
        rules: list[dict[str, object]] = []
        uneven = {partition for key, (partition, _) in values.items() if _is_uneven(held[key], dict(partition.sizes))}
        for partition, texts in self._patterns({key: value[0] for key, value in values.items()}).items():
            if not partition.cut:
                continue
            rule = rule_of(texts, partition.cut)
            if partition in uneven:
                rule["uneven"] = "ceil"
            if partition.sizes:
                rule["sizes"] = {dim: list(parts) for dim, parts in partition.sizes}
            rules.append(rule)
        mapping["rules"] = [*rules, {"match": "*"}]
        places = self._patterns({key: value[1] for key, value in values.items()})
        if any(place is not None for place in places):
            mapping["place"] = [place_of(texts, place) for place, texts in places.items() if place is not None]
        return mapping

    def _patterns(self, values: Mapping[str, V]) -> dict[V, list[str]]:
        """Patterns that match exactly the keys with each value, and the other names of these keys."""
        patterns = Patterns(values, _wide_patterns)
        for key in values:
            patterns.add(key)
        for alias, key in self.aliases.items():
            if key in values and alias not in values:
                patterns.by_value[values[key]].append(glob_of(alias))
        return patterns.by_value

    def _checked(
        self,
        mapping: Mapping[str, object],
        shapes: Mapping[str, tuple[int, ...]],
        expected: Mapping[str, tuple[Partition, Place | None]],
    ) -> BoundLayout | None:
        """The layout of a mapping; None: its tensors do not lie as expected."""
        try:
            file = LayoutFile.from_mapping(mapping)
            layouts = resolve(file, shapes, self.optimizer.layouts.keys()).layouts
        except LayoutError:
            return None
        for key, (partition, place) in expected.items():
            found = layouts[key].partition
            if (trimmed(found.cut), found.sizes) != (partition.cut, partition.sizes):
                return None
            if layouts[key].place != (() if place is None else (place,)):
                return None
        return bound_of(_core.Mesh(list(file.mesh.items()), file.ranks), Resolved(layouts, [], []), file.to_mapping)


def _is_uneven(layout: DigitLayout, sizes: Collection[int]) -> bool:
    return any(
        layout.shape[dim] % math.prod(map(_size, lines)) for dim, lines in enumerate(layout.cuts) if dim not in sizes
    )


def _axis_names(digits: Sequence[Digit], row: Row, placing: Collection[Digit]) -> dict[str, Digit]:
    """A name for each axis: that of the mesh dim if it is unique, else a generated one."""
    names: dict[Digit, set[str]] = {}
    meant: dict[str, set[Digit]] = {}
    for outer, inner, name in row.spans:
        if name is not None:
            names.setdefault((outer, inner), set()).add(name)
            meant.setdefault(name, set()).add((outer, inner))
    named: dict[str, Digit] = {}
    for digit in digits:
        usable = sorted(
            name
            for name in names.get(digit, ())
            if len(meant[name]) == 1 and 0 < len(name) <= 256 and name.isprintable()
        )
        made_up = (["pp"] if digit in placing else []) + ["dp", *(f"axis{n}" for n in range(len(digits)))]
        name = usable[0] if usable else next(n for n in made_up if n not in meant and n not in named)
        named[name] = digit
    return named


def _wide_patterns(key: str) -> Iterator[str]:
    """Patterns to try for a key: all its numbers replaced by `*`, the prefix up to the first number before `.*`."""
    number = NUMBER.search(key)
    if number is None or glob_of(key) != key:
        return
    yield NUMBER.sub("*", key)
    yield key[: number.end()] + (".*" if number.end() < len(key) else "")
