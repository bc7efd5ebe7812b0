"""The names of the counters of a training run, where a format stores them as tensors of one element."""

from __future__ import annotations

import math

COUNTERS = ("epoch_num", "step_num", "global_step", "loss_scale", "global_batch_size")
"""Counters of a training run, which some formats store as tensors of one element."""

AS_TENSORS = "tensor `step_num` or `global_step`"
"""What holds the counters in a format that stores them as tensors, for messages."""

OF_NO_PARAMETER = frozenset((*COUNTERS, "beta1_power", "beta2_power", "learning_rate", "momentum"))
"""Counters, and state of the optimizer that belongs to no parameter."""


def is_counter(key: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is whole under every layout. Writers add such tensors, so that they must not need a rule.

    Example:
        >>> is_counter("global_step", (1,)), is_counter("global_step", (4,)), is_counter("w", (1,))
        (True, False, False)
    """
    return key in OF_NO_PARAMETER and math.prod(shape) == 1
