"""The layout in which rank folders are stored, out of the strategy with which they were opened.

What a device layout of Checkpoint 2.0 can say is told as one, so that `like` finds patterns of keys that are cut alike.
The rest, tables that are cut unevenly and tensors that several stages cut, is told key by key.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.layout.strategy_layout import specs_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.layout.like import DeviceLayout
    from reshard.layout.strategy import Strategy

__all__ = ["device_layouts", "named_mapping"]

Shapes = dict[str, tuple[int, ...]]


def device_layouts(strategy: Strategy, shapes: Shapes, followed: Mapping[str, str]) -> dict[str, DeviceLayout | None]:
    """The layout of each tensor on the stage that holds it; None: every rank holds it whole.

    Args:
        strategy: how the run cut its tensors.
        shapes: the global shape, in elements, of each tensor.
        followed: keys that the strategy does not list, and the parameters as which they are cut.

    Raises:
        MismatchError, UnsupportedError: as `Strategy.cut_of`.

    Example:
        >>> from reshard.layout.strategy import Strategy
        >>> from reshard.layout.strategy_file import LayoutItem
        >>> device_layouts(Strategy({0: {"w": LayoutItem((2, 2), ((0, -1),))}}), {"w": (4, 6), "step": ()}, {})
        {'w': ((2, 2), ((0,), ()), ('', ''), (0, 1, 2, 3)), 'step': None}
    """
    return {key: _device_layout(strategy, followed.get(key, key), shape) for key, shape in shapes.items()}


def _device_layout(strategy: Strategy, key: str, shape: tuple[int, ...]) -> DeviceLayout | None:
    stages = strategy.stages_of(key)
    if not stages:
        return None
    first = stages[0] * strategy.devices_per_stage
    cut = strategy.cut_of(key, first, len(shape), shape)
    if cut is None or (len(stages) > 1 and not any(cut.tensor_map)):
        return None
    # Axes have no names there; nothing can be meant by an empty one.
    names = ("",) * len(cut.dev_matrix)
    return cut.dev_matrix, cut.tensor_map, names, tuple(range(first, first + strategy.devices_per_stage))


def named_mapping(strategy: Strategy, shapes: Shapes, followed: Mapping[str, str]) -> dict[str, object] | None:
    """The layout mapping that names every tensor; None if device layouts say the same.

    Raises:
        LayoutError: no one layout says it.
        MismatchError, UnsupportedError: as `Strategy.cut_of`.
    """
    found = specs_of(strategy, shapes)
    if not any(spec.sizes or (any(spec.cut) and len(strategy.stages_of(key)) > 1) for key, spec in found.specs.items()):
        return None
    specs = {key: replace(found.specs[of], shape=shapes[key]) for key, of in followed.items()}
    return replace(found, specs=found.specs | specs).mapping()
