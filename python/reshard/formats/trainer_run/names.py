"""Names of the files that `transformers.Trainer` saves beside the weights.

```text
trainer_state.json     the step, the epoch and what was logged
optimizer.pt           `Optimizer.state_dict()`, whose parameters are numbered in the order of the groups
scheduler.pt           the state of the scheduler
rng_state[_<R>].pth    random states of each rank
```

Source: `trainer.py` of transformers 5.
"""

from __future__ import annotations

from reshard.formats.base import Traits

TRAITS = Traits("trainer-run", counters="trainer_state.json with a number of steps")

STATE_FILE = "trainer_state.json"
OPTIMIZER_FILE = "optimizer.pt"
SCHEDULER_FILE = "scheduler.pt"
PREFIX = "optimizer."
"""What stands before the names of the state of the optimizer."""
