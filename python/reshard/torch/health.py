"""Whether a checkpoint was saved in good health: judged by the loss, or by whatever a trainer knows better.

The verdict goes into the checkpoint as `ckpt_status`, and a run that asks for healthy ones passes others over.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import TYPE_CHECKING, TypeAlias

from reshard.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Health", "LossHealth"]

Health: TypeAlias = "Callable[[int, float | None, Mapping[str, float]], bool | None]"
"""Called after each step as `health(step, loss, metrics)`: whether the run is healthy; None: it cannot say."""


class LossHealth:
    """A run is unhealthy while its loss is nan or infinite, or far above what it was.

    Args:
        spike: how many times the median of the last losses is too much; None: only nan and infinities count.
        window: losses that the median is taken of. Spikes are judged once so many have been seen.

    Raises:
        ArgumentError: a spike that is not above 1, or a window without losses.

    Example:
        >>> health = LossHealth(spike=3.0, window=2)
        >>> [health(step, loss, {}) for step, loss in enumerate([2.0, 2.2, 9.0, float("nan"), 2.1])]
        [True, True, False, False, True]
    """

    def __init__(self, spike: float | None = None, window: int = 50) -> None:
        if (spike is not None and not spike > 1) or window < 1:
            raise ArgumentError(f"a spike of {spike} over a window of {window}: expected more than 1, and at least 1")
        self.spike = spike
        self._seen: deque[float] = deque(maxlen=window)

    def __call__(self, step: int, loss: float | None, metrics: Mapping[str, float]) -> bool | None:
        """Whether the run is healthy after a step; None without a loss."""
        del step, metrics
        if loss is None:
            return None
        if not math.isfinite(loss):
            return False
        is_spike = (
            self.spike is not None
            and len(self._seen) == self._seen.maxlen
            and loss > self.spike * statistics.median(self._seen)
        )
        if not is_spike:
            self._seen.append(loss)  # a spike is no measure of the next one
        return not is_spike
