"""The rules of a layout file applied to the tensors of a checkpoint: which partition, place and join each key gets.

Everything that depends on shapes is decided and checked here, in plain values; `bind` turns them into geometry. This
module does not know the content of the tensors or where they are stored.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from reshard.errors import LayoutError
from reshard.layout.partition import Block, Blocks, Partition, TensorLayout
from reshard.layout.patterns import IndexedPattern, Matcher, natural_order
from reshard.values.counters import is_counter
from reshard.values.words import counted, listed, nearest, show

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from reshard.layout.file import LayoutFile, LayoutRule, PlaceRule
    from reshard.layout.partition import Places

_EVERY_KEY = re.compile(r"\*+|re:\.[*+]")
_MAX_WARNINGS = 100  # about rules that match no key
_MAX_PLACED = 10_000_000  # matches of all entries of `place`: real layouts have a few for each tensor
_MAX_BLOCKS = 1 << 20  # of all tensors of different shape together: fused tensors have a few for each expert
_MAX_LISTED = 1 << 24  # uneven parts of all tensors of different shape together; 65,536 ranks and 100 shapes are less


@dataclass(frozen=True)
class Join:
    """Keys that are one 1-D array on each rank: the flattened local blocks of the keys that it holds, end to end.

    Attributes:
        name: the name of the array; for optimizer state `<slot>.<name in the file>`.
        keys: in the order of their blocks.
        align: elements to a multiple of which each start is rounded up.
        axes: the axes over which the array is divided.
    """

    name: str
    keys: tuple[str, ...]
    align: int
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Unused:
    """A rule or an entry of `place` without effect: it matches no key, or follows a rule that matches every key.

    Attributes:
        text: which one.
        match: its patterns, with a wildcard for the index; empty if other keys would change nothing.
    """

    text: str
    match: tuple[str, ...]
    _hint: Callable[[], str] = field(repr=False, compare=False)

    @property
    def hint(self) -> str:
        """What to do about it. Found on demand: the search for the nearest keys takes time, and few hints are shown."""
        return self._hint()

    def matches(self, keys: Collection[str]) -> bool:
        """Whether it matches one of these keys."""
        matcher = Matcher([self.match])
        return any(matcher.find(key) is not None for key in keys)


@dataclass(frozen=True)
class Resolved:
    """The result of `resolve`.

    Attributes:
        layouts: the layout of each key, in the order of the tensors.
        joins: keys that are one array.
        warnings: messages for the author of the layout, those of `unused` included.
        unused: rules and entries of `place` that are not optional and match no key.
    """

    layouts: dict[str, TensorLayout]
    joins: list[Join]
    warnings: list[str]
    unused: list[Unused] = field(default_factory=list)


def resolve(
    layout: LayoutFile, tensors: Mapping[str, tuple[int, ...]], optimizer_keys: Collection[str] = ()
) -> Resolved:
    """Decide for each tensor of a checkpoint how it is divided and which ranks hold it.

    Args:
        layout: the layout.
        tensors: the global shape, in elements, of every tensor, model and optimizer.
        optimizer_keys: which of them belong to the optimizer part.

    Raises:
        LayoutError: no rule matches a key, a partition does not fit a shape, or no rank would hold a part of a tensor.

    Example:
        >>> from reshard.layout.file import LayoutFile
        >>> layout = LayoutFile.from_mapping({"mesh": {"tp": 2}, "rules": [{"match": "*.w", "cut": ["tp"]}]})
        >>> resolve(layout, {"a.w": (4, 2)}).layouts["a.w"].partition.cut
        (('tp',),)
    """
    return _Resolver(layout, tensors, optimizer_keys).run()


class _Resolver:
    """The state of one `resolve`: each method answers one question of the layout file."""

    def __init__(
        self, layout: LayoutFile, tensors: Mapping[str, tuple[int, ...]], optimizer_keys: Collection[str]
    ) -> None:
        self.layout = layout
        self.mesh = layout.mesh
        self.tensors = {key: tuple(shape) for key, shape in tensors.items()}
        optimizer = set(optimizer_keys) if layout.optimizer.follow else set()
        in_optimizer = [key for key in self.tensors if key in optimizer]  # in order, not as a set has them
        self.parameter = state_of(in_optimizer, self.tensors.keys() - optimizer)
        self.own = [key for key in self.tensors if key not in self.parameter]
        self.matcher = Matcher([rule.match for rule in layout.rules])
        self.rule_of: dict[str, tuple[int, int]] = {}  # (rule, entry of its `match`)
        # Thousands of rules share a handful of partitions: the first rule with the partition of each rule.
        first: dict[tuple[Partition, bool], int] = {}
        self.like = [first.setdefault((rule.partition, rule.join is None), n) for n, rule in enumerate(layout.rules)]
        self.by_rule: dict[tuple[int, tuple[int, ...]], TensorLayout] = {}
        self.states: dict[TensorLayout, tuple[TensorLayout, tuple[int, ...]]] = {}
        self.n_blocks = 0
        self.n_listed = 0
        self.kept: dict[int, list[str]] = {}  # dim of `add`: state that keeps the partition of its parameter

    def run(self) -> Resolved:
        for key in self.own:
            if not is_counter(key, self.tensors[key]):
                self.rule_of[key] = self._rule(key)
        place, unused_places = self._places()
        layouts: dict[str, TensorLayout] = {}
        for key in self.own:
            layout = self._by_rule(key) if key in self.rule_of else TensorLayout(self.tensors[key])
            layouts[key] = self._with_place(key, layout, place[key]) if key in place else layout
        for key, parameter in self.parameter.items():
            layouts[key] = self._state(key, layouts[parameter])
        joins = self._joins(layouts)
        unused = [*self._unused_rules(), *unused_places]
        n_more = len(unused) - _MAX_WARNINGS
        more = [f"{n_more} more rules match no key"] if n_more > 0 else []
        warnings = [*(one.text for one in unused[:_MAX_WARNINGS]), *more, *self._kept()]
        return Resolved({key: layouts[key] for key in self.tensors}, joins, warnings, unused)

    # -- which rule

    def _rule(self, key: str) -> tuple[int, int]:
        found = self.matcher.find(key)
        if found is None:
            patterns = (text for rule in self.layout.rules for text in rule.match)
            near = ", ".join(show(text) for text in nearest(key, patterns, cutoff=0.0))
            nearby = f"the nearest patterns are {near}; " if near else ""
            hint = f'{nearby}a last rule `match: "*"` keeps the others unsharded'
            raise LayoutError(f"no rule matches {show(key)}", key=key, hint=hint)
        return found

    def _unused_rules(self) -> Iterator[Unused]:
        used = {rule for rule, _ in self.rule_of.values()}
        cutting = [n for n, rule in enumerate(self.layout.rules) if self._cuts(rule)]
        if cutting and self.own and all(self.layout.rules[n].optional for n in cutting) and used.isdisjoint(cutting):
            # Each of them may be there for another model, but not all: then nothing is cut.
            texts = tuple(text for n in cutting for text in self.layout.rules[n].match)
            what = f"none of the rules that cut, such as {_texts(texts[:3])}, matches a key"
            yield Unused(what, texts, functools.partial(self._hint, texts[0]))
        every = (
            (n, text) for n, rule in enumerate(self.layout.rules) for text in rule.match if _EVERY_KEY.fullmatch(text)
        )
        last, pattern = next(every, (len(self.layout.rules), ""))
        for n, rule in enumerate(self.layout.rules):
            if n > last and not rule.optional:
                yield Unused(
                    f"rules[{n}], {_texts(rule.match)}, comes after rules[{last}], {show(pattern)}, which takes "
                    "every key",
                    (),
                    lambda: f"of the rules that match a key the first counts: put {show(pattern)} last",
                )
        rest = [n for n, rule in enumerate(self.layout.rules[:last]) if n not in used and not rule.optional]
        # A rule whose keys all belong to earlier ones does match something, and is there for a reason.
        for n in Matcher([self.layout.rules[n].match for n in rest]).unused(self.own):
            match = self.layout.rules[rest[n]].match
            yield self._no_key(f"rules[{rest[n]}], {_texts(match)}", match)

    def _no_key(self, which: str, match: tuple[str, ...]) -> Unused:
        return Unused(f"{which}, matches no key", match, functools.partial(self._hint_of, match))

    def _cuts(self, rule: LayoutRule) -> bool:
        """Whether a rule divides its tensors over several ranks."""
        return any(self.mesh[axis] > 1 for axis in rule.partition.axes)

    def _hint_of(self, match: Sequence[str]) -> str:
        """What to do about patterns that match no key that has a rule of its own."""
        matcher = Matcher([match])
        state = next((key for key in self.parameter if matcher.find(key) is not None), None)
        if state is not None:
            return (
                f"it matches state of the optimizer, such as {show(state)}, which is cut as its parameter; for "
                "rules of its own write `optimizer: {follow: false}`"
            )
        return self._hint(match[0])

    def _hint(self, pattern: str) -> str:
        near = ", ".join(show(key) for key in _nearest_keys(pattern, self.own))
        return f"the nearest keys are {near}; if a model may have none, write `optional: true`"

    # -- how it is divided

    def _by_rule(self, key: str) -> TensorLayout:
        n, _ = self.rule_of[key]
        kind = (self.like[n], self.tensors[key])
        if kind not in self.by_rule:
            self.by_rule[kind] = self._checked(key, self.tensors[key], self.layout.rules[n])
        return self.by_rule[kind]

    def _checked(self, key: str, shape: tuple[int, ...], rule: LayoutRule) -> TensorLayout:
        partition = rule.partition
        if not shape:  # never divided; in a join it is one element of the joint array
            return TensorLayout(shape, Partition(flat=partition.flat if rule.join is not None else ()))
        if len(partition.cut) > len(shape):
            raise LayoutError(
                f"{show(key)} has {counted(len(shape), 'dim')}, and the rule {_texts(rule.match)} cuts dim "
                f"{len(partition.cut) - 1}",
                key=key,
                hint="put a rule for this key before it",
            )
        for what, dims in (("sizes", dict(partition.sizes)), ("blocks", dict(partition.blocks))):
            for dim in dims:
                if dim >= len(shape):
                    raise LayoutError(
                        f"{show(key)} has {counted(len(shape), 'dim')}, and `{what}` names dim {dim}", key=key
                    )
        if partition.stored and len(partition.stored) != len(shape):
            raise LayoutError(
                f"{show(key)} has {counted(len(shape), 'dim')}, and `stored` of its rule orders "
                f"{len(partition.stored)}",
                key=key,
            )
        layout = TensorLayout(shape, partition)
        for dim, blocks in partition.blocks:
            self._check_blocks(key, shape[dim], dim, blocks)
        for dim in range(len(shape)):
            self._check_dim(key, layout, dim)
        self._check_listed(key, layout)
        return layout

    def _check_listed(self, key: str, layout: TensorLayout) -> None:
        """Limit the bounds of parts that are kept for each shape: those of dims that do not divide evenly."""
        for extent, axes in zip(layout.shape, layout.partition.cut, strict=False):
            n_parts = math.prod(self.mesh[axis] for axis in axes)
            self.n_listed += n_parts if extent % n_parts or layout.partition.sizes else 0
        if self.n_listed > _MAX_LISTED:
            raise LayoutError(
                f"the tensors are cut into more than {_MAX_LISTED} uneven parts in total, with those of {show(key)}",
                key=key,
                hint="cut over fewer ranks, or only dims that divide",
            )

    def _check_blocks(self, key: str, extent: int, dim: int, blocks: Blocks) -> None:
        self.n_blocks += blocks if isinstance(blocks, int) else len(blocks)
        if self.n_blocks > _MAX_BLOCKS:
            raise LayoutError(
                f"the `blocks` of the tensors are more than {_MAX_BLOCKS} in total, with those of dim {dim} of "
                f"{show(key)}",
                key=key,
                hint="cut with fewer blocks; `blocks` counts the parts of a fused tensor, not its elements",
            )
        if isinstance(blocks, int) and extent % blocks:
            raise LayoutError(
                f"dim {dim} of {show(key)} has {counted(extent, 'element')}: no {blocks} equal blocks", key=key
            )
        if not isinstance(blocks, int) and (total := sum(block.size for block in blocks)) != extent:
            raise LayoutError(
                f"dim {dim} of {show(key)} has {counted(extent, 'element')}, and its `blocks` sum to {total}", key=key
            )

    def _check_dim(self, key: str, layout: TensorLayout, dim: int) -> None:
        extent, partition = layout.shape[dim], layout.partition
        sizes, has_blocks = partition.sizes_of(dim), partition.blocks_of(dim) is not None
        if sizes is not None and sum(sizes) != extent:
            raise LayoutError(
                f"dim {dim} of {show(key)} has {counted(extent, 'element')}, and its `sizes` sum to {sum(sizes)}",
                key=key,
            )
        for number, size in self._undivided(layout, dim):
            axes = self._axes_text(partition.axes_of(dim))
            what = f"block {number} of dim {dim}" if has_blocks else f"dim {dim}"
            hint = "write `uneven: ceil` in its rule" + ("" if has_blocks else ", or the `sizes` of the parts")
            raise LayoutError(
                f"{what} of {show(key)} has {counted(size, 'element')}, not a multiple of {axes}", key=key, hint=hint
            )

    def _undivided(self, layout: TensorLayout, dim: int) -> Iterator[tuple[int, int]]:
        """`(number, size)` of the blocks of a dim, or of the dim itself as block 0, that its axes do not divide."""
        partition = layout.partition
        if partition.uneven == "ceil" or partition.sizes_of(dim) is not None or not partition.axes_of(dim):
            return
        n_parts = math.prod(self.mesh[axis] for axis in partition.axes_of(dim))
        extent, blocks = layout.shape[dim], partition.blocks_of(dim) or 1
        if isinstance(blocks, int):  # of equal size: one speaks for all
            blocks = (Block(extent // blocks),)
        yield from ((n, block.size) for n, block in enumerate(blocks) if block.is_cut and block.size % n_parts)

    def _axes_text(self, axes: tuple[str, ...]) -> str:
        return " x ".join(f"{axis} ({self.mesh[axis]})" for axis in axes)

    # -- state of the optimizer

    def _state(self, key: str, parameter: TensorLayout) -> TensorLayout:
        if self.tensors[key] != parameter.shape:
            return TensorLayout(self.tensors[key], place=parameter.place)
        optimizer = self.layout.optimizer
        if not parameter.shape or not (optimizer.add or optimizer.flat):
            return parameter
        if parameter not in self.states:
            self.states[parameter] = (
                self._flattened(key, parameter) if optimizer.flat else self._divided_further(key, parameter)
            )
        layout, kept = self.states[parameter]
        for dim in kept:
            self.kept.setdefault(dim, []).append(key)
        return layout

    def _flattened(self, key: str, parameter: TensorLayout) -> tuple[TensorLayout, tuple[int, ...]]:
        axes = self.layout.optimizer.flat
        if parameter.partition.flat:
            self._refuse_state(key, "`flat`", "its parameter is `flat` already")
        self._refuse_used(key, "`flat`", parameter, axes)
        return replace(parameter, partition=replace(parameter.partition, flat=axes)), ()

    def _divided_further(self, key: str, parameter: TensorLayout) -> tuple[TensorLayout, tuple[int, ...]]:
        """The layout with the axes of `add` innermost, and the dims that they do not divide."""
        layout, kept = parameter, []
        for dim, axes in self.layout.optimizer.add.items():
            if parameter.partition.flat:
                self._refuse_state(key, "`add`", "its parameter is `flat`")
            if parameter.partition.sizes_of(dim) is not None:
                self._refuse_state(key, "`add`", f"dim {dim} of its parameter has `sizes`")
            self._refuse_used(key, "`add`", parameter, axes)
            partition = layout.partition
            cut = [*partition.cut, *[()] * (dim + 1 - len(partition.cut))]
            cut[dim] = (*cut[dim], *axes)
            further = replace(layout, partition=replace(partition, cut=tuple(cut)))
            if dim >= len(layout.shape) or any(self._undivided(further, dim)):
                kept.append(dim)
            else:
                layout = further
        return layout, tuple(kept)

    def _refuse_used(self, key: str, what: str, parameter: TensorLayout, axes: tuple[str, ...]) -> None:
        placed = {axis for placed_axes, _ in parameter.place for axis in placed_axes if self.mesh[axis] > 1}
        for axis in axes:
            if axis in parameter.partition.axes:
                self._refuse_state(key, what, f"axis {show(axis)} cuts its parameter already")
            if axis in placed:
                self._refuse_state(key, what, f"axis {show(axis)} places its parameter already")

    def _refuse_state(self, key: str, what: str, why: str) -> None:
        raise LayoutError(f"{what} of `optimizer` cannot cut {show(key)} further: {why}", key=key)

    def _kept(self) -> Iterator[str]:
        for dim, keys in self.kept.items():
            axes = self._axes_text(self.layout.optimizer.add[dim])
            some = listed(map(show, keys))
            yield f"optimizer: {axes} does not divide dim {dim} and leaves the parameter's cut of {some}"

    # -- who holds it

    def _places(self) -> tuple[dict[str, Places], list[Unused]]:
        """The places of each key that has any, and the entries that match no key."""
        place: dict[str, list[tuple[tuple[str, ...], int]]] = {}
        unused: list[Unused] = []
        indexed = [
            [] if entry.at is not None else [IndexedPattern.compile(text) for text in entry.match]
            for entry in self.layout.place
        ]
        matched = self._matched_by_place(indexed)
        for n, entry in enumerate(self.layout.place):
            if entry.at is not None:
                coordinates = dict.fromkeys(matched[n], entry.at)
            else:
                coordinates = self._coordinates_of(n, entry, indexed[n], matched[n])
            if not coordinates and not entry.optional:
                match = tuple(IndexedPattern.any_index(text) if entry.at is None else text for text in entry.match)
                unused.append(self._no_key(f"place[{n}], {_texts(entry.match)}", match))
            for key, coordinate in coordinates.items():
                place.setdefault(key, []).append((entry.axes, coordinate))
        return {key: tuple(entries) for key, entries in place.items()}, unused

    def _matched_by_place(self, indexed: Sequence[Sequence[IndexedPattern]]) -> list[list[str]]:
        """The keys that each entry of `place` can match; the index is checked by `_coordinates_of`."""
        if not self.layout.place:
            return []
        matcher = Matcher(
            [
                [IndexedPattern.any_index(pattern.text) for pattern in patterns] or entry.match
                for entry, patterns in zip(self.layout.place, indexed, strict=True)
            ]
        )
        matched: list[list[str]] = [[] for _ in self.layout.place]
        n_matches = 0
        for key in self.own:
            found = matcher.find_all(key)
            n_matches += len(found)
            if n_matches > _MAX_PLACED:
                raise LayoutError(
                    f"the {len(self.layout.place)} entries of `place` match the {len(self.own)} tensors more than "
                    f"{_MAX_PLACED} times",
                    hint="write entries that match fewer keys each",
                )
            for n in found:
                matched[n].append(key)
        return matched

    def _coordinates_of(
        self, n: int, entry: PlaceRule, patterns: Sequence[IndexedPattern], keys: Sequence[str]
    ) -> dict[str, int]:
        index: dict[str, int] = {}
        for key in keys:
            try:
                found = set().union(*(pattern.indices(key) for pattern in patterns))
            except ValueError as error:
                raise LayoutError(f"place[{n}] on {show(key)}: {error}", key=key) from None
            if len(found) > 1:
                low, high = sorted(found)[:2]
                raise LayoutError(
                    f"place[{n}], {_texts(entry.match)}: `{{i}}` could be {low} or {high} in {show(key)}",
                    key=key,
                    hint="write more of the key around `{i}`, as in `model.layers.{i}.*`",
                )
            if found:
                index[key] = found.pop()
        if not index:
            return {}
        coordinate_of = self._coordinate_of(n, entry, max(index.values()) + 1)
        return {key: coordinate_of[i] for key, i in index.items()}

    def _coordinate_of(self, n: int, entry: PlaceRule, n_indices: int) -> _Coordinates:
        n_parts = math.prod(self.mesh[axis] for axis in entry.axes)
        what = f"place[{n}], {_texts(entry.match)}: the checkpoint has indices 0 to {n_indices - 1}"
        if entry.to is not None:
            if len(entry.to) != n_indices:
                raise LayoutError(f"{what}, and `to` gives the coordinates of {len(entry.to)}")
            return _Coordinates(to=entry.to)
        if entry.sizes is not None:
            if sum(entry.sizes) != n_indices:
                raise LayoutError(f"{what}, and `sizes` sum to {sum(entry.sizes)}")
            return _Coordinates(ends=tuple(itertools.accumulate(entry.sizes)))
        if n_indices % n_parts:
            axes = self._axes_text(entry.axes)
            hint = "write `sizes`, how many indices each coordinate holds, or `to`"
            raise LayoutError(f"{what}: {n_indices} are not a multiple of {axes}", hint=hint)
        return _Coordinates(each=n_indices // n_parts)

    def _with_place(self, key: str, layout: TensorLayout, place: Places) -> TensorLayout:
        """The layout with its place. Raises LayoutError unless some rank holds every part of the tensor."""
        at: dict[str, int] = {}
        for axes, folded in place:
            coordinate = folded
            for axis in reversed(axes):
                coordinate, c = divmod(coordinate, self.mesh[axis])
                if at.setdefault(axis, c) != c:
                    raise LayoutError(
                        f"no rank holds {show(key)}: `place` asks for {show(axis)} {at[axis]} and {c}", key=key
                    )
        for axis in at:
            if axis in layout.partition.axes and self.mesh[axis] > 1:
                raise LayoutError(
                    f"axis {show(axis)} cuts {show(key)}, and `place` gives it to one coordinate of that axis only",
                    key=key,
                    hint="leave the axis out of its rule, or out of `place`",
                )
        return replace(layout, place=place)

    # -- joins

    def _joins(self, layouts: Mapping[str, TensorLayout]) -> list[Join]:
        members: dict[tuple[int, str], list[tuple[int, tuple[object, ...], str]]] = {}
        for key in self.tensors if any(rule.join is not None for rule in self.layout.rules) else ():
            parameter = self.parameter.get(key, key)
            if parameter not in self.rule_of:
                continue
            n, entry = self.rule_of[parameter]
            join = self.layout.rules[n].join
            # State whose shape differs from its parameter's is whole, and not in a join.
            if join is None or not layouts[key].partition.flat:
                continue
            slot = key[: len(key) - len(parameter)]
            members.setdefault((n, slot + join), []).append((entry, natural_order(parameter), key))
        joins: list[Join] = []
        names: set[str] = set()
        for (n, name), found in members.items():
            rule = self.layout.rules[n]
            if name in self.tensors or name in names:
                raise LayoutError(f"the join {show(name)} has the name of a tensor or of another join", key=name)
            names.add(name)
            joins.append(Join(name, tuple(key for *_, key in sorted(found)), rule.align, rule.partition.flat))
        return joins


@dataclass(frozen=True)
class _Coordinates:
    """The coordinate of each index: listed, by the ends of consecutive runs of indices, or by runs of equal length."""

    to: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    each: int = 0

    def __getitem__(self, i: int) -> int:
        if self.to:
            return self.to[i]
        return bisect.bisect_right(self.ends, i) if self.ends else i // self.each


def state_of(keys: Iterable[str], parameters: Iterable[str]) -> dict[str, str]:
    """The parameter of each key that is state: of those named `<slot>.P`, the longest P that is a parameter.

    Example:
        >>> state_of(["adam_m.a.w", "step"], ["w", "a.w"])
        {'adam_m.a.w': 'a.w'}
    """
    known = set(parameters)
    return {key: parameter for key in keys if (parameter := _parameter(key, known)) is not None}


def _parameter(key: str, known: Collection[str]) -> str | None:
    # The slot has at least one character, and the longest suffix is the first that is found from the left.
    dot = key.find(".", 1)
    while dot != -1:
        if (suffix := key[dot + 1 :]) in known:
            return suffix
        dot = key.find(".", dot + 1)
    return None


def _nearest_keys(pattern: str, keys: Iterable[str]) -> list[str]:
    """Keys that look like a pattern: of a glob, in as many components as it names at that end where it has no star."""
    text = pattern.strip("*").strip(".")
    n = text.count(".") + 1
    parts: dict[str, str] = {}
    for key in keys:
        names = key.split(".")
        if pattern.startswith("*"):
            names = names[-n:]
        elif pattern.endswith("*"):
            names = names[:n]
        parts.setdefault(".".join(names)[:200], key)
    return [parts[part] for part in nearest(text, parts, cutoff=0.0)]


def _texts(match: Sequence[str]) -> str:
    return listed(map(show, match))
