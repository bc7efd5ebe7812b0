"""What a scheduler is besides its state: its class, and those of its children.

The `state_dict` of a scheduler of torch does not have its class. It is recorded beside the state.
"""

from __future__ import annotations

from typing import Any

import torch

KINDS = "schedulers"
"""The name of the classes in the saved state of a trainer."""

CHILDREN = "_schedulers"
"""The name of the states of its children in the state of a scheduler."""


_WRAPPERS = {"AcceleratedScheduler", "TrainerScheduler"}


def unwrapped(one: Any) -> Any:
    """The scheduler in a wrapper of accelerate or of `reshard.transformers`, or the object itself."""
    return one.scheduler if type(one).__name__ in _WRAPPERS else one


def kind_of(one: Any) -> str | None:
    """The class of a scheduler of torch and of its children; None: the object is none.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
        >>> kind_of(torch.optim.lr_scheduler.StepLR(optimizer, 5)), kind_of({})
        ('StepLR', None)
    """
    one = unwrapped(one)
    if not isinstance(one, torch.optim.lr_scheduler.LRScheduler):
        return None
    inner = [kind_of(child) or type(child).__name__ for child in children(one)]
    return type(one).__name__ + (f"({', '.join(inner)})" if inner else "")


def children(one: Any) -> list[Any]:
    """The schedulers inside a scheduler."""
    found = getattr(one, CHILDREN, ())
    return list(found) if isinstance(found, list | tuple) else []
