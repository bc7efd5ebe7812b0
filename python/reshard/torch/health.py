"""Health of a run at the time of a save, determined from the loss or by a function of the user.

It is stored in the checkpoint as `ckpt_status`. A run that is configured to resume from healthy checkpoints only skips
the others.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from typing import TypeAlias

from reshard.errors import ArgumentError

Health: TypeAlias = Callable[[int, float | None, Mapping[str, float]], bool | None]
"""Called after each step as `health(step, loss, metrics)`. Returns whether the run is healthy; None: not known."""


class LossHealth:
    """Health from the loss: a run is unhealthy while its loss is NaN or infinite, or far above the last losses.

    Args:
        spike: factor; a loss above `spike` times the median of the last losses is unhealthy. None: only NaN and
            infinite losses are.
        window: number of losses of which the median is taken. Spikes are detected once so many losses are known.

    Raises:
        ArgumentError: `spike` is not above 1, or `window` is below 1.

    Example:
        >>> health = LossHealth(spike=3.0, window=2)
        >>> [health(step, loss, {}) for step, loss in enumerate([2.0, 2.2, 9.0, float("nan"), 2.1])]
        [True, True, False, False, True]
    """

    def __init__(self, spike: float | None = None, window: int = 50) -> None:
        if (spike is not None and not spike > 1) or window < 1:
            raise ArgumentError(f"spike {spike}, window {window}: expected spike above 1 and window of at least 1")
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
            self._seen.append(loss)  # a spike must not raise the median
        return not is_spike
