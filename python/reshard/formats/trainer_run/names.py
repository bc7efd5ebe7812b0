"""Names of the files that `transformers.Trainer` and accelerate save beside the weights.

```text
trainer_state.json     the step, the epoch and what was logged
optimizer.pt           `Optimizer.state_dict()`, whose parameters are numbered in the order of the groups
scheduler.pt           the state of the scheduler
rng_state[_<R>].pth    random states of each rank

optimizer.bin, scheduler.bin, random_states_<R>.pkl    the same, of `Accelerator.save_state`, which saves no step
```

With FSDP both save model and optimizer by the names of the parameters, as folders of DCP or as whole files:

```text
pytorch_model_fsdp_0/, optimizer_0/       SHARDED_STATE_DICT: `{"model": ...}` and `{"optimizer": ...}`
pytorch_model_fsdp.bin, optimizer.bin     FULL_STATE_DICT
```

Trainer of transformers 4.31 to 4.35 also saves `optimizer.pt` then, which holds what rank 0 has of the optimizer.

With DeepSpeed they save its checkpoint below the folder, and `latest`; `scheduler.pt` only of a scheduler that is not
one of DeepSpeed, and weights only where the parameters are not partitioned:

```text
global_step<N>/        the files of a save of DeepSpeed, of Trainer
```

Source: `trainer.py` of transformers 5; `utils/constants.py` and `utils/fsdp_utils.py` of accelerate 1.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from reshard.values.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Collection

TRAITS = Traits("trainer-run", counters="trainer_state.json with a number of steps")

STATE_FILE = "trainer_state.json"
OPTIMIZER_FILE = "optimizer.pt"
SCHEDULER_FILE = "scheduler.pt"
PREFIX = "optimizer."
"""What stands before the names of the state of the optimizer."""
MODEL_PREFIX = "model."
"""What stands before the names of the weights in a folder of DCP."""
SHARDED_MODEL = "pytorch_model_fsdp_0"
_OF_DEEPSPEED = re.compile(r"global_step[0-9]{1,18}")
_RANDOM_OF_ACCELERATE = "random_states_0.pkl"
_SHARDED_OPTIMIZER = "optimizer_0"
_FULL_MODEL, _FULL_OPTIMIZER = "pytorch_model_fsdp.bin", "optimizer.bin"
_SECOND = ("optimizer_1.bin", "optimizer_1")
"""Of a second optimizer: which one the run has is not known."""


class RunFiles(NamedTuple):
    """The files and folders of a run.

    Attributes:
        optimizer, scheduler: their names.
        model: of the weights that FSDP saved; None: they are in files of a model.
        has_state: there is a `trainer_state.json`.
        is_deepspeed: the optimizer and its weights are a checkpoint of DeepSpeed below the folder.
    """

    optimizer: str
    scheduler: str
    model: str | None = None
    has_state: bool = True
    is_deepspeed: bool = False


def holds_deepspeed(names: Collection[str]) -> bool:
    """Whether a folder with these names is one of Trainer that DeepSpeed saved the weights and the optimizer in.

    Example:
        >>> holds_deepspeed(["trainer_state.json", "latest", "global_step3"])
        True
    """
    of_run = files(names)
    return of_run is not None and of_run.is_deepspeed


def rivals(names: Collection[str]) -> tuple[str, str] | None:
    """Two files or folders among these names that belong to saves of different kinds, of which one would be ignored.

    Example:
        >>> rivals(["optimizer_0", "pytorch_model_fsdp_0", "pytorch_model_fsdp.bin"])
        ('pytorch_model_fsdp_0', 'pytorch_model_fsdp.bin')
    """
    for kind in ((SHARDED_MODEL, _FULL_MODEL), (_SHARDED_OPTIMIZER, _FULL_OPTIMIZER)):
        there = [name for name in kind if name in names]
        if len(there) > 1:
            return there[0], there[1]
    of_run = files(names)
    if of_run is None or of_run.model is not None:  # beside weights of FSDP, `optimizer.pt` is what rank 0 has of it
        return None
    of_deepspeed = sorted(filter(_OF_DEEPSPEED.fullmatch, names))
    taken = of_deepspeed[0] if of_run.is_deepspeed else of_run.optimizer
    others = [_SHARDED_OPTIMIZER, _FULL_OPTIMIZER, *_SECOND, SHARDED_MODEL, _FULL_MODEL]
    others += [] if of_run.is_deepspeed else of_deepspeed
    other = next((name for name in others if name in names and name != taken), None)
    return None if other is None else (other, taken)


def files(names: Collection[str]) -> RunFiles | None:
    """The files of a run among the names in a folder; None: it is of no run with one optimizer.

    Example:
        >>> files(["model.safetensors", "trainer_state.json", "optimizer.pt"])
        RunFiles(optimizer='optimizer.pt', scheduler='scheduler.pt', model=None, has_state=True, is_deepspeed=False)
        >>> files(["trainer_state.json", "optimizer_0", "pytorch_model_fsdp_0"]).model
        'pytorch_model_fsdp_0'
        >>> files(["trainer_state.json", "latest", "global_step3"]).is_deepspeed
        True
        >>> files(["model.safetensors", "optimizer.pt"]) is None
        True
    """
    has_state = STATE_FILE in names
    is_fsdp = any(name in names for name in (SHARDED_MODEL, _FULL_MODEL)) and any(
        name in names for name in (_SHARDED_OPTIMIZER, _FULL_OPTIMIZER)
    )
    if has_state and OPTIMIZER_FILE in names and not is_fsdp:
        return RunFiles(OPTIMIZER_FILE, SCHEDULER_FILE)
    if has_state and any(map(_OF_DEEPSPEED.fullmatch, names)):
        return RunFiles("", SCHEDULER_FILE, is_deepspeed=True)
    if not (has_state or _RANDOM_OF_ACCELERATE in names) or any(name in names for name in _SECOND):
        return None
    optimizer = next((name for name in (_SHARDED_OPTIMIZER, _FULL_OPTIMIZER) if name in names), None)
    model = next((name for name in (SHARDED_MODEL, _FULL_MODEL) if name in names), None)
    if optimizer is None or (optimizer == _SHARDED_OPTIMIZER and model is None):
        return None
    return RunFiles(optimizer, SCHEDULER_FILE if has_state else "scheduler.bin", model, has_state)
