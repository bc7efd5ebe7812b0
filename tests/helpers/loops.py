"""Training loops that several tests run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reshard.torch import Checkpointer


def batches_and_draws(checkpointer: Checkpointer, loader: Iterable[torch.Tensor], step: int, last: int) -> list[Any]:
    """Complete the steps after `step` up to `last`; returns the batch of each, and a number that torch draws."""
    seen: list[Any] = []
    while step < last:
        for batch in loader:
            seen.append([batch.tolist(), torch.rand(()).item()])
            step += 1
            checkpointer.step(step)
            if step == last:
                break
    return seen
