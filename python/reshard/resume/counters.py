"""The arithmetic of counters: steps that are scaled when the batch changes, epochs, views, and growing batches.

Two ways. "exact" is integer arithmetic, and what it rounds off is kept. The others repeat MindSpore Transformers bit
for bit: "double", as its Checkpoint 2.0 computes (45 steps, batch 448 -> 160: 125 where 126 is right), and
"float32", as its Checkpoint 1.0 does (16777217 steps become 16777216 with nothing changed at all). Use those to land
on the same step as the original; nothing else is good in them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from reshard.errors import ArgumentError

if TYPE_CHECKING:
    from reshard.formats.checkpoint2.common import CommonInfo

__all__ = [
    "Arithmetic",
    "BatchSchedule",
    "EpochStep",
    "Scaling",
    "epoch_step",
    "initial_epoch",
    "saved_steps",
    "scale_steps",
]

Arithmetic: TypeAlias = Literal["exact", "double", "float32"]

_MAX_LEVELS = 1_000_000  # a schedule comes out of a file, and its levels are walked one by one


def saved_steps(common: CommonInfo, iteration: int | None) -> tuple[int, bool] | None:
    """The steps that a checkpoint has made, and whether the eager mode wrote it; None if nothing says.

    The eager mode writes the length of the whole run as step_num. It is known by its consumed_samples, or by a
    global_step below step_num; but where the folder's number is step_num, that is the step, and the optimizer only
    made fewer (it skips a step whose gradients overflow).
    """
    step, made = common.step_num, common.global_step
    if step is None or made is None:
        known = made if step is None else step
        known = iteration if known is None else known
        return None if known is None else (known, common.consumed_samples is not None)
    is_eager = common.consumed_samples is not None or (made < step and iteration != step)
    return (made if is_eager else step), is_eager


@dataclass(frozen=True)
class Scaling:
    """A number of steps at another batch size.

    Attributes:
        factor: the old batch size by the new one.
        exact: the steps times the factor, before rounding.
        steps: the whole steps that are gone on from.
        lost_samples: samples seen at the old batch size that these steps do not make up for: they are seen again.
            Negative where the original's arithmetic rounds up.
    """

    factor: Fraction
    exact: Fraction
    steps: int
    lost_samples: int


def scale_steps(steps: int, saved_batch: int, new_batch: int, arithmetic: Arithmetic = "exact") -> Scaling:
    """How many steps of the new batch size have seen the samples of so many steps of the old one.

    Args:
        steps: steps made, at least 0.
        saved_batch: global batch size that they were made with, in samples, at least 1.
        new_batch: global batch size of the new run, in samples, at least 1.
        arithmetic: "exact" rounds down what does not divide; the others compute as the original.

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
        # A tensor times a Python number: both become float32, and so does the product.
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
    """The epochs that the training loop counts as done.

    In sink mode the loop counts sinks of steps, and they are scaled as steps are. Otherwise it counts passes over the
    data, whatever the batch size; the last one counts if the step ends an epoch of the current dataset.

    Args:
        epoch_num: the epoch that was saved.
        initial_step: the step that is gone on from.
        steps_per_epoch: of the current dataset; None, if it is not known: the step is taken to end an epoch.
        sink_mode: whether the loop runs in sinks.
        saved_batch: global batch size that was saved with, in samples.
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
    """A step as the training log shows it.

    Attributes:
        epoch: from 1.
        step: within the epoch, from 1.
    """

    epoch: int
    step: int


def epoch_step(step: int, steps_per_epoch: int) -> EpochStep:
    """Where a step, counted from 1 over the whole training, lies in the epochs of the current dataset.

    The total count is kept when the dataset is replaced; this view of it is what changes.

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
    """A global batch that grows with the samples seen: in equal levels from `start` to `maximum`.

    Attributes:
        start: samples a step at first.
        increment: samples a step more at each level.
        ramp_samples: samples after which `maximum` is reached; 0: at once.
        maximum: samples a step in the end.
        base_units: samples that one micro-step takes over all ranks; every level is a multiple. 1: not known.

    Raises:
        ArgumentError: there are no such levels.

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
                    f"{schedule}: the levels are no multiples of {self.base_units}, what one micro-step takes"
                )

    @property
    def n_levels(self) -> int:
        """How often the batch grows."""
        return (self.maximum - self.start) // self.increment

    def size_at(self, consumed: int, *, compatible: bool = False) -> int:
        """The global batch size, in samples, after so many samples.

        Args:
            consumed: samples seen, at least 0.
            compatible: compute with the original's double, which can enter a level one sample late or early.
        """
        if consumed > self.ramp_samples or not self.n_levels or not self.ramp_samples:
            return self.maximum
        if compatible:
            level = int(consumed / (self.ramp_samples / self.n_levels))
        else:
            level = consumed * self.n_levels // self.ramp_samples
        return min(self.start + level * self.increment, self.maximum)

    def consumed_at(self, steps: int, *, compatible: bool = False) -> int:
        """The samples seen after so many steps from the beginning.

        Args:
            steps: steps made, at least 0.
            compatible: find the ends of levels with the original's double.
        """
        if steps < 0:
            raise ArgumentError(f"{steps} steps: expected at least 0")
        consumed = 0
        if self.ramp_samples:
            for level in range(self.n_levels):
                size = self.start + level * self.increment
                made = min(steps, self._steps_to_end(level, consumed, size, compatible=compatible))
                consumed += made * size
                steps -= made
        return consumed + steps * self.maximum

    def _steps_to_end(self, level: int, consumed: int, size: int, *, compatible: bool) -> int:
        """Steps of a level's size until the samples seen reach its end; none if they are beyond it."""
        # They are beyond it by less than one step of a lower level, so nothing here is negative.
        if compatible:
            left = (level + 1) * (self.ramp_samples / self.n_levels) - consumed
            return math.ceil(left / size)
        beyond = consumed * self.n_levels - (level + 1) * self.ramp_samples
        return -(beyond // (size * self.n_levels))
