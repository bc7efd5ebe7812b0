"""A strategy as a layout.

A strategy gives each tensor a device matrix of its own over the ranks of its stage; a layout has one mesh. So the
matrices are refined to their common mesh, with the stages as an outermost axis. A strategy speaks of each tensor by its
name, and so does the layout: no pattern can take in what the strategy does not list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.errors import LayoutError
from reshard.layout.like import axis_names, common_spans, cut_on, stage_axis_name
from reshard.layout.patterns import glob_of
from reshard.layout.resolve import Resolved, Spec
from reshard.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.layout.strategy import DeviceCut, Strategy

__all__ = ["StrategySpecs", "specs_of"]


@dataclass(frozen=True)
class StrategySpecs:
    """A strategy over one mesh.

    Attributes:
        mesh: the stages, if there are several, then the axes that all device matrices have in common.
        specs: how each tensor lies on it.
        warnings: what a layout says otherwise than the strategy, and tensors that the strategy does not list.
        uncertain: the tensors whose shapes it takes to say how they are cut; `specs` has what is likely. A layout that
            says that refuses the tensors of which it is not true: they have fewer dims than it cuts.
    """

    mesh: dict[str, int]
    specs: dict[str, Spec]
    warnings: list[str]
    uncertain: tuple[str, ...] = ()

    def resolved(self) -> Resolved:
        """The same as if rules had been met."""
        return Resolved(self.specs, [], self.warnings)

    def mapping(self) -> dict[str, object]:
        """The same as a layout mapping, in which every tensor that is cut or placed is named."""
        cuts: dict[tuple[object, ...], list[str]] = {}
        places: dict[tuple[tuple[tuple[str, ...], int], ...], list[str]] = {}
        for key, spec in self.specs.items():
            if any(spec.cut):
                cuts.setdefault((spec.cut, spec.sizes), []).append(glob_of(key))
            if spec.place:
                places.setdefault(spec.place, []).append(glob_of(key))
        rules: list[dict[str, object]] = []
        for (cut, sizes), keys in cuts.items():
            rule: dict[str, object] = {"match": keys, "cut": [list(axes) for axes in cut]}  # type: ignore[attr-defined]
            rules.append(rule | ({"sizes": dict(sizes)} if sizes else {}))  # type: ignore[call-overload]
        mapping: dict[str, object] = {
            "mesh": self.mesh,
            "rules": [*rules, {"match": "*"}],
            "optimizer": {"follow": False},
        }
        if places:
            mapping["place"] = [
                {"match": keys, "axis": list(axes), "at": at} for ((axes, at),), keys in sorted(places.items())
            ]
        return mapping


def specs_of(strategy: Strategy, tensors: Mapping[str, Sequence[int]] | None = None) -> StrategySpecs:
    """How the tensors of a checkpoint lie on the mesh of a strategy.

    Args:
        strategy: the strategy.
        tensors: the global shape of each; None: those that the strategy lists, as far as it tells.

    Raises:
        LayoutError: the device matrices have no common mesh, or the stages cut a tensor differently.
        MismatchError, UnsupportedError: as `Strategy.cut_of`, and `Strategy.check_unlisted`.
    """
    shapes = {key: None if tensors is None or key not in tensors else tuple(tensors[key]) for key in strategy.keys()}  # noqa: SIM118
    found = {key: _by_stage(strategy, key, shape) for key, shape in shapes.items()}
    cuts = {key: by_stage for key, (by_stage, _) in found.items()}
    uncertain = tuple(key for key, (_, is_certain) in found.items() if not is_certain) if tensors is None else ()
    ranks = range(strategy.devices_per_stage)
    layouts = {
        key: (cut.dev_matrix, cut.tensor_map, [""] * len(cut.dev_matrix), ranks)
        for key, by_stage in cuts.items()
        for cut in by_stage[:1]
    }
    matrices = {cut.dev_matrix for by_stage in cuts.values() for cut in by_stage}
    spans = common_spans(matrices)
    names = axis_names(spans, layouts.values())
    sizes = {name: outer // inner for name, (outer, inner) in zip(names, spans, strict=True)}
    mesh = dict(sizes)
    if strategy.n_stages > 1:
        stage_axis = stage_axis_name(names)
        mesh = {stage_axis: strategy.n_stages, **sizes}
    warnings: list[str] = []
    several: list[str] = []
    specs: dict[str, Spec] = {}
    for key, shape in (shapes if tensors is None else {key: tuple(shape) for key, shape in tensors.items()}).items():
        if key not in cuts:
            specs[key] = Spec(shape or ())
            continue
        stages = strategy.stages_of(key)
        cut_by_stage = [cut_on((cut.dev_matrix, cut.tensor_map, (), ranks), spans, names) for cut in cuts[key]]
        rows = cuts[key][0].sizes
        for stage, cut, other in zip(stages, cut_by_stage, cuts[key], strict=True):
            if found[key][1] and (cut != cut_by_stage[0] or other.sizes != rows):
                raise LayoutError(
                    f"{show(strategy.source)}: stages {stages[0]} and {stage} cut {show(key)} differently, which no "
                    "layout says",
                    path=strategy.source,
                    key=key,
                )
        if 1 < len(stages) < strategy.n_stages:
            several.append(key)
        specs[key] = Spec(
            shape=shape if shape is not None else _nominal_shape(cuts[key][0]),
            cut=cut_by_stage[0],
            sizes=((0, rows),) if rows is not None else (),
            place=(((stage_axis,), stages[0]),) if len(stages) == 1 and strategy.n_stages > 1 else (),
        )
    if several:
        warnings.append(
            f"{show(strategy.source)} puts {listed(map(show, several))} on some stages; in a layout, one or all: "
            "here it is all"
        )
    unlisted = [key for key, spec in specs.items() if key not in cuts and spec.shape]
    strategy.check_unlisted(unlisted)
    if unlisted:
        warnings.append(f"{show(strategy.source)} does not list {listed(map(show, unlisted))}: whole on every rank")
    return StrategySpecs(mesh or {"dp": 1}, specs, warnings, uncertain)


def _by_stage(strategy: Strategy, key: str, shape: tuple[int, ...] | None) -> tuple[list[DeviceCut], bool]:
    """The cut of a tensor on each stage that has it, and whether it is certain."""
    cuts, is_certain = [], True
    for stage in strategy.stages_of(key):
        if shape is None:
            cut, known = strategy.likely_cut(key, stage)
            is_certain &= known
        else:
            told = strategy.cut_of(key, stage * strategy.devices_per_stage, len(shape), shape)
            assert told is not None
            cut = told
        cuts.append(cut)
    return cuts, is_certain


def _nominal_shape(cut: DeviceCut) -> tuple[int, ...]:
    """The smallest shape that can be cut so."""
    parts = cut.parts()
    return parts if cut.sizes is None else (sum(cut.sizes), *parts[1:])
