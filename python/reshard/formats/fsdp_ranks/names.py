"""Names of the files that each FSDP rank writes: its shards of the model and of the optimizer, and its other state.

```text
model_world_size_<N>_rank_<R>.pt           a dict of DTensors, or, of FSDP1 without a device mesh, of ShardedTensors
optim_world_size_<N>_rank_<R>.pt           `Optimizer.state_dict()`, whose parameters are numbered, or
                                           `FSDP.optim_state_dict`, by the names of the parameters
extra_state_world_size_<N>_rank_<R>.pt     the scheduler and random states
huggingface/                               config.json and tokenizer
```

Source: `verl/utils/checkpoint/fsdp_checkpoint_manager.py` of verl 0.7.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from reshard.values.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Iterable

TRAITS = Traits("fsdp-ranks", has_sums=True, counters="number of a step in the name of its folder")

MODEL, OPTIMIZER, EXTRA = "model", "optim", "extra_state"
MODEL_FILES = "huggingface"
"""The folder of the files of the model that are not weights."""

_FILE = re.compile(r"(model|optim|extra_state)_world_size_([1-9][0-9]{0,8})_rank_(0|[1-9][0-9]{0,8})\.pt")
_STEP = re.compile(r"global_step_?([0-9]{1,15})")


def file_name(kind: str, world_size: int, rank: int) -> str:
    """The name of a file.

    Args:
        kind: "model", "optim" or "extra_state".
        world_size: the number of ranks.
        rank: the rank that writes it.

    Example:
        >>> file_name("model", 8, 3)
        'model_world_size_8_rank_3.pt'
    """
    return f"{kind}_world_size_{world_size}_rank_{rank}.pt"


def rank_files(names: Iterable[str]) -> dict[tuple[str, int], dict[int, str]]:
    """The files among some names: by kind and number of ranks, then by rank.

    Example:
        >>> rank_files(["model_world_size_2_rank_1.pt", "notes.txt"])
        {('model', 2): {1: 'model_world_size_2_rank_1.pt'}}
    """
    found: dict[tuple[str, int], dict[int, str]] = {}
    for name in names:
        if (match := _FILE.fullmatch(name)) is not None:
            found.setdefault((match[1], int(match[2])), {})[int(match[3])] = name
    return found


def step_of(names: Iterable[str]) -> int | None:
    """The step in the name of a folder, the first that has one.

    Example:
        >>> step_of(["actor", "global_step_40"]), step_of(["actor"])
        (40, None)
    """
    return next((int(match[1]) for name in names if (match := _STEP.fullmatch(name)) is not None), None)
