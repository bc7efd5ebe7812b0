"""The layout in which rank folders are stored, from the strategy with which they were opened.

Where device layouts of Checkpoint 2.0 can express the strategy, they are returned, and `like` finds patterns for keys
with the same partition. Otherwise, for uneven tables, every key gets a rule.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from reshard._core import DeviceLayout
from reshard.layout.strategy_layout import layouts_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.layout.strategy import Strategy

Shapes = dict[str, tuple[int, ...]]


def device_layouts(strategy: Strategy, shapes: Shapes, followed: Mapping[str, str]) -> dict[str, DeviceLayout | None]:
    """The layout of each tensor on the stages that hold it; None: every rank holds it whole.

    Args:
        strategy: how the run divided its tensors.
        shapes: the global shape, in elements, of each tensor.
        followed: keys that the strategy does not list, and the parameter with the same partition.

    Raises:
        MismatchError, UnsupportedError: as `Strategy.cut_of`.

    Example:
        >>> from reshard.layout.strategy import Strategy
        >>> from reshard.layout.strategy_file import LayoutItem
        >>> strategy = Strategy({0: {"w": LayoutItem((2, 2), ((0, -1),))}})
        >>> layouts = device_layouts(strategy, {"w": (4, 6), "step": ()}, {})
        >>> layouts["w"].tensor_map, layouts["step"]
        (((0,), ()), None)
    """
    return {key: _device_layout(strategy, followed.get(key, key), shape) for key, shape in shapes.items()}


def _device_layout(strategy: Strategy, key: str, shape: tuple[int, ...]) -> DeviceLayout | None:
    stages = strategy.stages_of(key)
    if not stages:
        return None
    n = strategy.devices_per_stage
    cut = strategy.cut_of(key, stages[0] * n, len(shape), shape)
    if cut is None:
        return None
    matrix = cut.dev_matrix if len(stages) == 1 else (len(stages), *cut.dev_matrix)
    names = ("",) * len(matrix)  # the axes of a strategy have no names
    ranks = tuple(rank for stage in stages for rank in range(stage * n, stage * n + n))
    return DeviceLayout(matrix, cut.tensor_map, names, ranks)


def named_mapping(strategy: Strategy, shapes: Shapes, followed: Mapping[str, str]) -> dict[str, object] | None:
    """The layout mapping that names every tensor; None if device layouts express the same.

    Args:
        strategy: how the run divided its tensors.
        shapes: the global shape, in elements, of each tensor.
        followed: keys that the strategy does not list, and the parameter with the same partition.

    Raises:
        LayoutError: no layout can describe it.
        MismatchError, UnsupportedError: as `Strategy.cut_of`.
    """
    found = layouts_of(strategy, shapes)
    partitions = {key: layout.partition for key, layout in found.layouts.items()}
    if not any(one.sizes for one in partitions.values()):
        return None
    layouts = {key: replace(found.layouts[of], shape=shapes[key]) for key, of in followed.items()}
    return replace(found, layouts=found.layouts | layouts).mapping()
