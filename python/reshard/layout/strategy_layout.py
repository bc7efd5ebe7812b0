"""A strategy as a layout.

A strategy gives each tensor a device matrix of its own over the ranks of its stage; a layout has one mesh. The matrices
are refined to their common mesh, with the stages as the outermost axis. The rules of the layout name each tensor, as
the strategy does, so no pattern matches a tensor that the strategy does not list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard._core import DeviceLayout
from reshard.errors import LayoutError
from reshard.layout.describe import Patterns, place_of, rule_of
from reshard.layout.like import axis_names, common_spans, cut_on, stage_axis_name
from reshard.layout.partition import Partition, TensorLayout
from reshard.layout.resolve import Resolved
from reshard.values.counters import is_counter
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.layout.strategy import DeviceCut, Strategy


@dataclass(frozen=True)
class StrategyLayouts:
    """The layout of each tensor of a strategy, over one mesh.

    Attributes:
        mesh: the stages, if there are several, then the axes that all device matrices have in common.
        layouts: how each tensor lies on it.
        warnings: where the layouts differ from the strategy, and tensors that the strategy does not list.
        uncertain: tensors whose partition depends on their shapes, which are not known; `layouts` has the likely one.
            It is refused for a tensor of which it is not true: such a tensor has fewer dims than it divides.
    """

    mesh: dict[str, int]
    layouts: dict[str, TensorLayout]
    warnings: list[str]
    uncertain: tuple[str, ...] = ()

    def resolved(self) -> Resolved:
        """The layouts as a result of `reshard.layout.resolve.resolve`."""
        return Resolved(self.layouts, [], self.warnings)

    def mapping(self) -> dict[str, object]:
        """The layouts as the mapping of a layout file that names every tensor that is divided or placed."""
        partitions = Patterns({key: layout.partition for key, layout in self.layouts.items()})
        places = Patterns({key: layout.place for key, layout in self.layouts.items()})
        for key, layout in self.layouts.items():
            if layout.partition.axes:
                partitions.add(key)
            if layout.place:
                places.add(key)
        rules = [
            rule_of(keys, partition.cut) | ({"sizes": dict(partition.sizes)} if partition.sizes else {})
            for partition, keys in partitions.by_value.items()
        ]
        mapping: dict[str, object] = {
            "mesh": self.mesh,
            "rules": [*rules, {"match": "*"}],
            "optimizer": {"follow": False},
        }
        if places.by_value:
            mapping["place"] = [place_of(keys, place) for (place,), keys in sorted(places.by_value.items())]
        return mapping


def layouts_of(strategy: Strategy, tensors: Mapping[str, Sequence[int]] | None = None) -> StrategyLayouts:
    """How the tensors of a checkpoint lie on the mesh of a strategy.

    Args:
        strategy: the strategy.
        tensors: the global shape of each, in elements; None: the tensors that the strategy lists, with unknown shapes.

    Raises:
        LayoutError: the device matrices have no common mesh, or the stages divide a tensor differently.
        MismatchError, UnsupportedError: as `Strategy.cut_of`, and `Strategy.check_unlisted`.
    """
    shapes = {key: None if tensors is None or key not in tensors else tuple(tensors[key]) for key in strategy.keys()}  # noqa: SIM118
    found = {key: _by_stage(strategy, key, shape) for key, shape in shapes.items()}
    cuts = {key: by_stage for key, (by_stage, _) in found.items()}
    uncertain = tuple(key for key, (_, is_certain) in found.items() if not is_certain) if tensors is None else ()
    ranks = range(strategy.devices_per_stage)
    on_devices = [
        DeviceLayout(cut.dev_matrix, cut.tensor_map, [""] * len(cut.dev_matrix), ranks)
        for by_stage in cuts.values()
        for cut in by_stage[:1]
    ]
    matrices = {cut.dev_matrix for by_stage in cuts.values() for cut in by_stage}
    try:
        spans = common_spans(matrices)
    except LayoutError as error:
        error.path, error.message = strategy.source, f"{show(strategy.source)}: {error.message}"
        raise
    names = axis_names(spans, on_devices)
    sizes = {name: outer // inner for name, (outer, inner) in zip(names, spans, strict=True)}
    mesh = dict(sizes)
    if strategy.n_stages > 1:
        stage_axis = stage_axis_name(names)
        mesh = {stage_axis: strategy.n_stages, **sizes}
    warnings: list[str] = []
    several: list[str] = []
    layouts: dict[str, TensorLayout] = {}
    for key, shape in (shapes if tensors is None else {key: tuple(shape) for key, shape in tensors.items()}).items():
        if key not in cuts:
            layouts[key] = TensorLayout(shape or ())
            continue
        stages = strategy.stages_of(key)
        cut_by_stage = [cut_on(cut.dev_matrix, cut.tensor_map, spans, names) for cut in cuts[key]]
        rows = cuts[key][0].sizes
        for stage, cut, other in zip(stages, cut_by_stage, cuts[key], strict=True):
            if found[key][1] and (cut != cut_by_stage[0] or other.sizes != rows):
                raise LayoutError(
                    f"{show(strategy.source)}: stages {stages[0]} and {stage} cut {show(key)} differently, which no "
                    "layout can describe",
                    path=strategy.source,
                    key=key,
                )
        if 1 < len(stages) < strategy.n_stages:
            several.append(key)
        layouts[key] = TensorLayout(
            shape if shape is not None else _nominal_shape(cuts[key][0]),
            Partition(cut_by_stage[0], sizes=((0, rows),) if rows is not None else ()),
            (((stage_axis,), stages[0]),) if len(stages) == 1 and strategy.n_stages > 1 else (),
        )
    if several:
        warnings.append(
            f"{show(strategy.source)} puts {listed(map(show, several))} on some stages; in a layout, one or all: "
            "here it is all"
        )
    whole = {key: layout.shape for key, layout in layouts.items() if key not in cuts}
    unlisted = [key for key, shape in whole.items() if shape and not is_counter(key, shape)]
    strategy.check_unlisted(unlisted)
    if unlisted:
        warnings.append(f"{show(strategy.source)} does not list {listed(map(show, unlisted))}: whole on every rank")
    return StrategyLayouts(mesh or {"dp": 1}, layouts, warnings, uncertain)


def _by_stage(strategy: Strategy, key: str, shape: tuple[int, ...] | None) -> tuple[list[DeviceCut], bool]:
    """The partition of a tensor over the devices of each stage that has it, and whether it is certain."""
    cuts, is_certain = [], True
    for stage in strategy.stages_of(key):
        if shape is None:
            cut, known = strategy.likely_cut(key, stage)
            is_certain &= known
        else:
            found = strategy.cut_of(key, stage * strategy.devices_per_stage, len(shape), shape)
            assert found is not None
            cut = found
        cuts.append(cut)
    return cuts, is_certain


def _nominal_shape(cut: DeviceCut) -> tuple[int, ...]:
    """The smallest shape that can be divided so."""
    parts = cut.parts()
    return parts if cut.sizes is None else (sum(cut.sizes), *parts[1:])
