"""Names of the files that `transformers.Trainer` and accelerate save beside the weights.

```text
trainer_state.json     the step, the epoch and what was logged
optimizer.pt           `Optimizer.state_dict()`, whose parameters are numbered in the order of the groups
scheduler.pt           the state of the scheduler
rng_state[_<R>].pth    random states of each rank

optimizer.bin, scheduler.bin, random_states_<R>.pkl    the same, of `Accelerator.save_state`, which saves no step
```

Source: `trainer.py` of transformers 5; `utils/constants.py` of accelerate 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.formats.base import Traits

if TYPE_CHECKING:
    from collections.abc import Collection

TRAITS = Traits("trainer-run", counters="trainer_state.json with a number of steps")

STATE_FILE = "trainer_state.json"
OPTIMIZER_FILE = "optimizer.pt"
SCHEDULER_FILE = "scheduler.pt"
OF_ACCELERATE = ("optimizer.bin", "scheduler.bin", "random_states_0.pkl")
SECOND_OPTIMIZER = "optimizer_1.bin"
PREFIX = "optimizer."
"""What stands before the names of the state of the optimizer."""


def files(names: Collection[str]) -> tuple[str, str] | None:
    """The files of the optimizer and of the scheduler among the names in a folder; None: it is of no run with one.

    Example:
        >>> files(["model.safetensors", "trainer_state.json", "optimizer.pt"])
        ('optimizer.pt', 'scheduler.pt')
        >>> files(["model.safetensors", "optimizer.pt"]) is None
        True
    """
    if {STATE_FILE, OPTIMIZER_FILE}.issubset(names):
        return OPTIMIZER_FILE, SCHEDULER_FILE
    optimizer, scheduler, random = OF_ACCELERATE
    is_one = optimizer in names and random in names and SECOND_OPTIMIZER not in names
    return (optimizer, scheduler) if is_one else None
