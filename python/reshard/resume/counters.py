"""Arithmetic of counters: steps scaled to another batch size, epochs, and growing batch sizes.

There are three arithmetics. "exact" uses integers and reports what it rounds off. The other two reproduce MindSpore
Transformers bit for bit, including its errors: "double" that of Checkpoint 2.0 (45 steps, batch 448 -> 160: 125 instead
of 126), and "float32" that of Checkpoint 1.0 (16777217 steps become 16777216 even if the batch size is the same). Use
them only to resume at the same step as MindSpore Transformers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from reshard.errors import ArgumentError

if TYPE_CHECKING:
    from reshard.documents.common_info import CommonInfo

Arithmetic: TypeAlias = Literal["exact", "double", "float32"]

_MAX_LEVELS = 1_000_000  # a schedule may come from a file, and its levels are processed one by one


def saved_steps(common: CommonInfo, iteration: int | None) -> tuple[int, bool] | None:
    """The number of completed steps, and whether eager mode saved the checkpoint; None if it is not recorded.

    Eager mode writes the length of the whole run as step_num. It is recognised by consumed_samples, or by a global_step
    below step_num. But if the iteration in the folder name is step_num, then step_num is the step, and global_step is
    lower because the optimizer skips steps whose gradients overflow.

    Args:
        common: the common info of the checkpoint.
        iteration: the number in the folder name; None: it has none.
    """
    step, global_step = common.step_num, common.global_step
    if step is None or global_step is None:
        known = global_step if step is None else step
        known = iteration if known is None else known
        return None if known is None else (known, common.consumed_samples is not None)
    is_eager = common.consumed_samples is not None or (global_step < step and iteration != step)
    return (global_step if is_eager else step), is_eager


@dataclass(frozen=True)
class Scaling:
    """A number of steps, scaled to another batch size.

    Attributes:
        factor: the old batch size divided by the new one.
        exact: the steps times the factor, before rounding.
        steps: the scaled steps, an integer.
        lost_samples: samples of the old steps that the scaled steps do not cover, and that are seen again. Negative if
            the arithmetic of MindSpore Transformers rounds up.
    """

    factor: Fraction
    exact: Fraction
    steps: int
    lost_samples: int


def scale_steps(steps: int, saved_batch: int, new_batch: int, arithmetic: Arithmetic = "exact") -> Scaling:
    """The number of steps with the new batch size that see the same samples.

    Args:
        steps: completed steps, at least 0.
        saved_batch: global batch size of these steps, in samples, at least 1.
        new_batch: global batch size of the new run, in samples, at least 1.
        arithmetic: "exact" rounds down; the others compute as MindSpore Transformers does.

    Raises:
        ArgumentError: a number is out of range.

    Example:
        >>> scale_steps(45, 448, 160).steps, scale_steps(45, 448, 160, "double").steps
        (126, 125)
        >>> scale_steps(119, 160, 448)
        Scaling(factor=Fraction(5, 14), exact=Fraction(85, 2), steps=42, lost_samples=224)
    """
    if steps < 0 or saved_batch < 1 or new_batch < 1:
        raise ArgumentError(f"{steps} steps, batch {saved_batch} -> {new_batch}: expected at least 0, 1 and 1")
    if arithmetic == "exact":
        scaled = steps * saved_batch // new_batch
    elif arithmetic == "double":
        scaled = int(steps * (saved_batch / new_batch))
    elif arithmetic == "float32":
        # In MindSpore Transformers this is a tensor times a Python number: both and the product are float32.
        scaled = int(np.float32(steps) * np.float32(saved_batch / new_batch))
    else:
        raise ArgumentError(f"arithmetic is {arithmetic!r}; expected 'exact', 'double' or 'float32'")
    factor = Fraction(saved_batch, new_batch)
    return Scaling(factor, steps * factor, scaled, steps * saved_batch - scaled * new_batch)


def initial_epoch(
    epoch_num: int,
    initial_step: int,
    steps_per_epoch: int | None,
    *,
    sink_mode: bool,
    saved_batch: int = 1,
    new_batch: int = 1,
    arithmetic: Arithmetic = "exact",
) -> int:
    """The number of epochs that the training loop counts as complete.

    In sink mode an epoch is a sink (a fixed number of steps), and epochs are scaled like steps. Otherwise an epoch is a
    pass over the data, for any batch size; the last one is complete if the step ends an epoch of the current dataset.

    Args:
        epoch_num: the saved epoch.
        initial_step: number of completed steps, after scaling.
        steps_per_epoch: steps in an epoch of the current dataset; None: not known, the epoch is assumed complete.
        sink_mode: whether the loop runs in sink mode.
        saved_batch: global batch size of the saved run, in samples.
        new_batch: global batch size of the new run, in samples.
        arithmetic: as in `scale_steps`.

    Example:
        >>> initial_epoch(3, 41, 20, sink_mode=False), initial_epoch(2, 40, 20, sink_mode=False)
        (2, 2)
        >>> initial_epoch(20, 20, 100, sink_mode=True, saved_batch=8, new_batch=16)
        10
    """
    if sink_mode:
        return scale_steps(epoch_num, saved_batch, new_batch, arithmetic).steps
    in_mid_epoch = steps_per_epoch is not None and initial_step % steps_per_epoch != 0
    return epoch_num - 1 if in_mid_epoch else epoch_num


@dataclass(frozen=True)
class EpochStep:
    """A step as epoch and step within the epoch, as in the training log.

    Attributes:
        epoch: the epoch, from 1.
        step: the step within the epoch, from 1.
    """

    epoch: int
    step: int


def epoch_step(step: int, steps_per_epoch: int) -> EpochStep:
    """The epoch and the step within it, for a step counted from 1 over the whole training.

    When the dataset is replaced the total count stays, and epoch and step within it change.

    Raises:
        ArgumentError: the step or the epoch is less than 1.

    Example:
        >>> epoch_step(100, 100), epoch_step(101, 100)
        (EpochStep(epoch=1, step=100), EpochStep(epoch=2, step=1))
    """
    if step < 1 or steps_per_epoch < 1:
        raise ArgumentError(f"step {step} of epochs of {steps_per_epoch} steps: expected at least 1 of each")
    return EpochStep((step - 1) // steps_per_epoch + 1, (step - 1) % steps_per_epoch + 1)


@dataclass(frozen=True)
class BatchSchedule:
    """A global batch size that grows with the consumed samples, in equal levels from `start` to `maximum`.

    Attributes:
        start: the first batch size, in samples.
        increment: increase of the batch size at each level, in samples.
        ramp_samples: consumed samples after which `maximum` is reached; 0: at once.
        maximum: the last batch size, in samples.
        base_units: samples of one micro-step over all ranks; every level is a multiple of it. 1: not known.

    Raises:
        ArgumentError: the increments do not lead from `start` to `maximum`, or a number is out of range.

    Example:
        >>> schedule = BatchSchedule(8, 8, 400, 32, base_units=4)
        >>> [schedule.size_at(seen) for seen in (0, 133, 134, 400)], schedule.consumed_at(21)
        ([8, 8, 16, 32], 200)
    """

    start: int
    increment: int
    ramp_samples: int
    maximum: int
    base_units: int = 1

    def __post_init__(self) -> None:
        schedule = f"a batch from {self.start} to {self.maximum} by {self.increment} over {self.ramp_samples} samples"
        if self.start < 1 or self.increment < 1 or self.ramp_samples < 0 or self.base_units < 1:
            raise ArgumentError(f"{schedule}: expected at least 1, 1 and 0")
        if self.maximum < self.start or (self.maximum - self.start) % self.increment:
            raise ArgumentError(f"{schedule}: the increments do not lead from the start to the end")
        if self.n_levels > _MAX_LEVELS:
            raise ArgumentError(f"{schedule}: more than {_MAX_LEVELS} levels")
        for size in (self.start, self.increment if self.n_levels else 0):  # so every level between
            if size % self.base_units:
                raise ArgumentError(
                    f"{schedule}: the levels are not multiples of the {self.base_units} samples of a micro-step"
                )

    @property
    def n_levels(self) -> int:
        """The number of increases of the batch size."""
        return (self.maximum - self.start) // self.increment

    def size_at(self, consumed: int, *, compatible: bool = False) -> int:
        """The global batch size after a number of consumed samples, in samples.

        Args:
            consumed: consumed samples, at least 0.
            compatible: compute in double precision as MindSpore Transformers does, which can start a level one sample
                early or late.
        """
        if consumed > self.ramp_samples or not self.n_levels or not self.ramp_samples:
            return self.maximum
        if compatible:
            level = int(consumed / (self.ramp_samples / self.n_levels))
        else:
            level = consumed * self.n_levels // self.ramp_samples
        return min(self.start + level * self.increment, self.maximum)

    def consumed_at(self, steps: int, *, compatible: bool = False) -> int:
        """The consumed samples after a number of steps from the start of training.

        Args:
            steps: completed steps, at least 0.
            compatible: compute the ends of levels in double precision, as MindSpore Transformers does.
        """
        if steps < 0:
            raise ArgumentError(f"{steps} steps: expected at least 0")
        consumed = 0
        if self.ramp_samples:
            for level in range(self.n_levels):
                size = self.start + level * self.increment
                n_steps = min(steps, self._steps_to_end(level, consumed, size, compatible=compatible))
                consumed += n_steps * size
                steps -= n_steps
        return consumed + steps * self.maximum

    def _steps_to_end(self, level: int, consumed: int, size: int, *, compatible: bool) -> int:
        """Steps with the batch size of a level until its end; 0 if the consumed samples are past it."""
        # They are past it by less than one step of a lower level, so the result is not negative.
        if compatible:
            left = (level + 1) * (self.ramp_samples / self.n_levels) - consumed
            return math.ceil(left / size)
        beyond = consumed * self.n_levels - (level + 1) * self.ramp_samples
        return -(beyond // (size * self.n_levels))
