"""The layout in which a checkpoint is stored, as a layout mapping.

Checkpoint 2.0 gives each tensor a device matrix of its own over the ranks of its pipeline stage, with names of axes
that mean nothing outside it. A layout file has one mesh: the matrices are refined to the coarsest mesh in which each of
their axes is a run of axes, and the stages become the outermost axis. Patterns are then found for keys with the same
partition. The mapping is resolved against the checkpoint before it is returned, so it is always right, though it may
have more patterns than needed.
"""

from __future__ import annotations

import itertools
import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from reshard._core import DeviceLayout
from reshard.errors import LayoutError
from reshard.layout.describe import NUMBER, Patterns, place_of, rule_of
from reshard.layout.file import LayoutFile
from reshard.layout.partition import Cut, trimmed
from reshard.layout.patterns import IndexedPattern, glob_of
from reshard.layout.resolve import resolve, state_of
from reshard.values.words import counted, listed, show

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

_log = logging.getLogger("reshard")

_ALL = -1
"""The stage of a tensor that all stages hold."""


class CheckpointLike(Protocol):
    """The part of a checkpoint that `like` uses."""

    def keys(self, part: Literal["all", "optimizer"] = "all", /) -> Iterable[str]:
        """The keys, all of them or those of the optimizer part."""

    def _device_layouts(self) -> Mapping[str, DeviceLayout | None]:
        """The device layout of each key that has one."""

    def _info(self, key: str) -> tuple[str, tuple[int, ...]]:
        """The dtype and the shape of a tensor, without its shards."""

    def _layout_mapping(self) -> Mapping[str, object] | None:
        """The layout that was stored with the checkpoint, if one was."""


def mapping_like(checkpoint: CheckpointLike) -> Mapping[str, object] | None:
    """The layout mapping of a checkpoint, or None if it is stored whole.

    Raises:
        LayoutError: its device matrices cannot be refined to one mesh, or its stages overlap or differ in size.
    """
    stored = checkpoint._layout_mapping()  # noqa: SLF001
    if stored is not None:
        return stored
    layouts = checkpoint._device_layouts()  # noqa: SLF001
    recorded = {key: layout for key, layout in layouts.items() if layout is not None}
    if not recorded:
        return None
    tensors = {key: checkpoint._info(key)[1] for key in checkpoint.keys()}  # noqa: SIM118, SLF001  not a mapping
    known = {key: recorded[key] for key in tensors if key in recorded}
    if not known:
        return None
    held = _Stored.of(tensors, known)
    if held.ranks == [0]:
        return None  # one rank holds every tensor whole
    return _Writer(held, set(checkpoint.keys("optimizer"))).mapping()


# ------------------------------------------------------------------------------------------------------- one mesh


@dataclass(frozen=True)
class _Stored:
    """How every tensor is stored, on one mesh.

    Attributes:
        tensors: shapes.
        mesh: the common axes, the one of the stages first if there are several.
        ranks: the rank at each mesh point.
        stage_axis: its name, or None if there is one stage.
        n_stages: how many.
        cut: the axes that divide each dim of a tensor; (): none.
        stage: of each tensor; `_ALL`: every stage holds it; None: unknown (a null layout), or there is only one.
    """

    tensors: dict[str, tuple[int, ...]]
    mesh: dict[str, int]
    ranks: list[int]
    stage_axis: str | None
    n_stages: int
    cut: dict[str, Cut]
    stage: dict[str, int | None]

    @classmethod
    def of(cls, tensors: dict[str, tuple[int, ...]], known: Mapping[str, DeviceLayout]) -> _Stored:
        # Tensors with the same layout mostly share the object: each is looked at once.
        distinct: dict[int, tuple[str, DeviceLayout]] = {}
        for key, layout in known.items():
            distinct.setdefault(id(layout), (key, layout))
        for key, (matrix, tensor_map, alias, ranks) in distinct.values():
            if math.prod(matrix) != len(ranks) or len(alias) != len(matrix) or min(matrix, default=1) < 1:
                raise LayoutError(
                    f"{show(key)}: device matrix {list(matrix)} and its axes do not fit its "
                    f"{counted(len(ranks), 'rank')}",
                    key=key,
                )
            if any(not -1 <= v < len(matrix) for axes in tensor_map for v in axes):
                raise LayoutError(f"{show(key)}: its tensor map names an axis outside {list(matrix)}", key=key)
        groups = {tuple(layout.rank_list) for _, layout in distinct.values()}
        several = {group for group in groups if any(set(other) < set(group) for other in groups)}
        n_ranks = min(map(len, groups))
        parts = {group[at : at + n_ranks] for group in several for at in range(0, len(group), n_ranks)}
        stages = sorted(groups - several | parts)
        ranks = [rank for stage in stages for rank in stage]
        if len({len(stage) for stage in stages}) > 1 or len(set(ranks)) != len(ranks):
            raise _no_stages()
        number = {stage: n for n, stage in enumerate(stages)}
        stage_of = {one: number.get(tuple(layout.rank_list), _ALL) for one, (_, layout) in distinct.items()}
        on_each = {
            one: _on_each(layout, stages) if stage_of[one] == _ALL else layout for one, (_, layout) in distinct.items()
        }
        on_some = [
            key for key, layout in known.items() if stage_of[id(layout)] == _ALL and len(layout.rank_list) < len(ranks)
        ]
        if on_some:
            _log.warning("tensors are stored on some stages; in a layout, on all: %s", listed(map(show, on_some)))
        spans = common_spans({tuple(matrix) for matrix, *_ in on_each.values()})
        names = axis_names(spans, on_each.values())
        cuts = {one: cut_on(*layout[:2], spans, names) for one, layout in on_each.items()}
        stage_axis: str | None = None
        if len(stages) > 1:
            stage_axis = stage_axis_name(names)
        mesh = {stage_axis: len(stages)} if stage_axis else {}
        mesh |= {name: outer // inner for name, (outer, inner) in zip(names, spans, strict=True)}
        return cls(
            tensors=tensors,
            mesh=mesh or {"dp": 1},
            ranks=ranks,
            stage_axis=stage_axis,
            n_stages=len(stages),
            cut=dict.fromkeys(tensors, ()) | {key: cuts[id(layout)] for key, layout in known.items()},
            stage=dict.fromkeys(tensors)
            | {
                key: stage
                for key, layout in known.items()
                if (stage := stage_of[id(layout)]) == _ALL or stage_axis is not None
            },
        )


def _on_each(layout: DeviceLayout, stages: Sequence[tuple[int, ...]]) -> DeviceLayout:
    """The layout over the ranks of the first stage of a tensor that several stages hold alike. Raises LayoutError."""
    matrix, tensor_map, alias, ranks = layout
    held = [stage for stage in stages if stage[0] in ranks]
    if [rank for stage in held for rank in stage] != list(ranks):
        raise _no_stages()
    left = len(held[0])
    sizes: list[int] = []  # of the axes within a stage, innermost first
    for size in reversed(matrix):
        if left == 1:
            break
        sizes.append(min(size, left))
        if max(size, left) % sizes[-1]:
            raise _no_stages()
        left //= sizes[-1]
    n_axes = len(sizes)
    sizes_of = dict(enumerate(sizes))
    divided = {v for axes in tensor_map for v in axes if v >= 0}
    if any(size != sizes_of.get(v, 1) for v, size in enumerate(reversed(matrix)) if v in divided):
        raise _no_stages()
    within = [[v for v in axes if v < n_axes] for axes in tensor_map]
    return DeviceLayout(sizes[::-1], within, alias[len(matrix) - n_axes :], held[0])


def _no_stages() -> LayoutError:
    return LayoutError(
        "tensors lie on different groups of ranks, which are not the stages of one mesh", hint="write a layout file"
    )


# An axis of a device matrix spans from the product of all axes from it on (outer) to that of those after it (inner).
Span: TypeAlias = tuple[int, int]


def _span(matrix: Sequence[int], axis: int) -> Span:
    return math.prod(matrix[axis:]), math.prod(matrix[axis + 1 :])


def common_spans(matrices: Collection[tuple[int, ...]]) -> list[Span]:
    """The spans of the common mesh, outermost first. Raises LayoutError if the matrices have no common mesh."""
    bounds = sorted({bound for matrix in matrices for axis in range(len(matrix)) for bound in _span(matrix, axis)})
    for inner, outer in itertools.pairwise(bounds):
        if outer % inner:
            listed = ", ".join(str(list(matrix)) for matrix in sorted(matrices)[:8])
            raise LayoutError(
                f"the device matrices {listed} cannot be refined to one mesh: {outer} is no multiple of {inner}",
                hint="write a layout file",
            )
    return [(outer, inner) for inner, outer in itertools.pairwise(bounds)][::-1]


def axis_names(spans: Sequence[Span], layouts: Iterable[DeviceLayout]) -> list[str]:
    """A name for each span: its alias where all matrices agree on one that is unique; else a generated name."""
    aliases: dict[Span, set[str]] = {span: set() for span in spans}
    used: dict[str, set[Span]] = {}
    for matrix, _, alias, _ in layouts:
        for axis, name in enumerate(alias):
            span = _span(matrix, axis)
            if span[0] == span[1]:
                continue  # an axis of one device
            used.setdefault(name, set()).add(span)
            aliases.setdefault(span, set()).add(name)
    generated = iter(_generated(used))
    names: list[str] = []
    for span in spans:
        alias_name = next(iter(aliases[span])) if len(aliases[span]) == 1 else ""
        usable = 0 < len(alias_name) <= 256 and alias_name.isprintable() and len(used[alias_name]) == 1
        names.append(alias_name if usable else next(generated))
    return names


def stage_axis_name(names: Collection[str]) -> str:
    """A name for the axis of the pipeline stages that is not among `names`."""
    return next(name for name in ("pp", "stage", *_generated(names)) if name not in names)


def _generated(taken: Collection[str]) -> list[str]:
    return [name for n in range(2 * len(taken) + 64) if (name := f"axis{n}") not in taken]


def cut_on(
    matrix: Sequence[int], tensor_map: Sequence[Sequence[int]], spans: Sequence[Span], names: Sequence[str]
) -> Cut:
    """The axes of the common mesh that divide each dim of a tensor.

    Args:
        matrix: sizes of its device axes, outermost first.
        tensor_map: for each dim its device axes, counted from the last one (0), outermost first; -1: none.
        spans: those of the common mesh, outermost first.
        names: of the axes of the common mesh.

    Example:
        >>> cut_on((2, 4), ((1,), (-1,)), [(8, 4), (4, 1)], ["dp", "tp"])
        (('dp',),)
    """
    cut: list[tuple[str, ...]] = []
    for dim in tensor_map:
        axes: list[str] = []
        for v in dim:
            if v >= 0:
                outer, inner = _span(matrix, len(matrix) - 1 - v)
                axes += [name for name, (o, i) in zip(names, spans, strict=True) if o <= outer and i >= inner]
        cut.append(tuple(axes))
    return trimmed(cut)


# ------------------------------------------------------------------------------------------------------- one file


class _Writer:
    """Writes the layout mapping of the stored tensors, and checks it."""

    def __init__(self, stored: _Stored, optimizer: set[str]) -> None:
        self.stored = stored
        self.optimizer = optimizer
        in_optimizer = [key for key in stored.tensors if key in optimizer]
        self.parameter = state_of(in_optimizer, stored.tensors.keys() - optimizer)
        self.states: dict[str, list[str]] = {}
        for key, parameter in self.parameter.items():
            self.states.setdefault(parameter, []).append(key)

    def mapping(self) -> dict[str, object]:
        # Parameters first: their patterns can take in the state, not the other way round.
        keys = sorted(self.stored.tensors, key=lambda key: key in self.parameter)
        own = [key for key in keys if key not in self.parameter]
        candidates: list[tuple[Mapping[str, object] | None, list[str]]] = [(None, own)]
        if add := self._add():
            candidates.append(({"add": add}, own))
        if self.parameter:
            candidates.append(({"follow": False}, keys))
        for optimizer, seen in candidates:
            mapping = self._mapping(optimizer, seen)
            if self._describes(mapping):
                return mapping
        raise LayoutError("no layout file describes this checkpoint", hint="write one, or load whole tensors")

    def _mapping(self, optimizer: Mapping[str, object] | None, seen: Sequence[str]) -> dict[str, object]:
        """The file whose rules and places are for the keys in `seen`."""
        stored = self.stored
        mapping: dict[str, object] = {"mesh": stored.mesh}
        if stored.ranks != list(range(len(stored.ranks))):
            mapping["ranks"] = stored.ranks
        mapping["rules"] = self._rules(seen)
        if optimizer:
            mapping["optimizer"] = optimizer
        if stored.stage_axis and (place := self._places(seen, stored.stage_axis)):
            mapping["place"] = place
        return mapping

    def _describes(self, mapping: Mapping[str, object]) -> bool:
        stored = self.stored
        try:
            resolved = resolve(LayoutFile.from_mapping(mapping), stored.tensors, self.optimizer)
        except LayoutError:
            return False
        if resolved.warnings:
            return False
        alike: set[tuple[int, int, int | None]] = set()
        for key, layout in resolved.layouts.items():
            one = id(layout), id(stored.cut[key]), stored.stage[key]
            if one in alike:
                continue
            alike.add(one)
            stages = {coordinate for _, coordinate in layout.place}
            stage = stored.stage[key]
            expected = set() if stage == _ALL else {stage}
            if trimmed(layout.partition.cut) != stored.cut[key] or (stage is not None and stages != expected):
                return False
        return True

    def _add(self) -> dict[int, list[str]]:
        """The value of `add`, from state that is divided further than its parameter; it is checked later."""
        add: dict[int, list[str]] = {}
        for key, parameter in self.parameter.items():
            cut, base = self.stored.cut[key], self.stored.cut[parameter]
            if self.stored.tensors[key] != self.stored.tensors[parameter]:
                continue
            for dim, axes in enumerate(cut):
                before = base[dim] if dim < len(base) else ()
                if axes[: len(before)] == before and len(axes) > len(before):
                    add.setdefault(dim, list(axes[len(before) :]))
        return add

    # -- rules

    def _rules(self, seen: Sequence[str]) -> list[dict[str, object]]:
        cut = {key: self.stored.cut[key] for key in seen}
        patterns = Patterns(cut, lambda key: self._candidates(key, cut))
        for key in seen:
            if cut[key]:
                patterns.add(key)
        rules = [rule_of(texts, axes) for axes, texts in patterns.by_value.items()]
        return rules if len(patterns.covered) == len(seen) else [*rules, {"match": "*"}]

    def _candidates(self, key: str, seen: Collection[str]) -> list[str]:
        """Patterns for a key, wide ones first; those with a star are to be checked."""
        if glob_of(key) != key:
            return []
        wide = NUMBER.sub("*", key)
        # Optimizer state among the keys often has the partition of its parameter: one pattern for both.
        stars = [f"*{wide}"] if any(state in seen for state in self.states.get(key, ())) else []
        return [*stars, wide] if wide != key else stars

    # -- places

    def _places(self, seen: Sequence[str], axis: str) -> list[dict[str, object]]:
        stage = {key: self.stored.stage[key] for key in seen}
        entries: list[dict[str, object]] = []
        patterns = Patterns(stage, lambda key: self._candidates(key, stage))
        tried: set[str] = set()
        with_state = not self.parameter.keys().isdisjoint(seen)
        for key in seen:
            if stage[key] in (None, _ALL) or key in patterns.covered:
                continue
            for template in self._templates(key, with_state=with_state):
                if template in tried:
                    continue
                tried.add(template)
                if (found := self._by_index(template, seen)) is not None:
                    entries.append({"match": template, "axis": axis, **found[0]})
                    patterns.covered.update(found[1])
                    break
            patterns.add(key)
        at = patterns.by_value
        return entries + [place_of(at[n], ((axis,), n)) for n in range(self.stored.n_stages) if n in at]

    def _templates(self, key: str, *, with_state: bool) -> list[str]:
        """The key up to its first number, which `{i}` replaces; the first template also matches optimizer state."""
        number = NUMBER.search(key)
        if number is None or glob_of(key) != key:
            return []
        before, rest = key[: number.start()], ".*" if number.end() < len(key) else ""
        return ([f"*{before}{{i}}{rest}"] if with_state and before else []) + [f"{before}{{i}}{rest}"]

    def _by_index(self, template: str, seen: Sequence[str]) -> tuple[dict[str, object], list[str]] | None:
        """How the stage follows from the index in the template, and the keys that match; None: it does not follow."""
        pattern = IndexedPattern.compile(template)
        stage_of: dict[int, int] = {}
        matched: list[str] = []
        n = 0
        for key in seen:
            indices = pattern.indices(key)
            if len(indices) > 1:
                return None
            if not indices:
                continue
            matched.append(key)
            index = indices.pop()
            n = max(n, index + 1)
            stage = self.stored.stage[key]
            # A null layout records no stage: the tensor may be on that of its layer.
            if stage == _ALL or (stage is not None and stage_of.setdefault(index, stage) != stage):
                return None
        if n != len(stage_of):
            return None
        stages = [stage_of[index] for index in range(n)]
        n_stages = self.stored.n_stages
        if n % n_stages == 0 and stages == [index * n_stages // n for index in range(n)]:
            return {}, matched
        if stages == sorted(stages):
            return {"sizes": [stages.count(stage) for stage in range(n_stages)]}, matched
        return {"to": stages}, matched
