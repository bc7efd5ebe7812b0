"""What a scheduler is besides its state: its class, those of its children, and its constants.

The `state_dict` of a scheduler of torch has neither its class nor a difference between what training moves and what the
program has chosen. The class is recorded beside the state. Constants are the arguments of the constructor that the
state has under the same name.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from reshard.torch.optimizers import plain
from reshard.words import show

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS = "schedulers"
"""The name of the classes in the saved state of a trainer."""

_MOVED = {"last_epoch", "optimizer"}
_CHILDREN = "_schedulers"


def unwrapped(one: Any) -> Any:
    """The scheduler in a wrapper of accelerate, or the object itself."""
    return one.scheduler if type(one).__name__ == "AcceleratedScheduler" else one


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
    inner = [kind_of(child) or type(child).__name__ for child in _children(one)]
    return type(one).__name__ + (f"({', '.join(inner)})" if inner else "")


def other_constants(one: Any, saved: Any, name: str) -> Iterator[str]:
    """The constants of a scheduler that differ from the saved ones, as sentences.

    Args:
        one: the scheduler of the run, before its state is restored.
        saved: the saved state.
        name: the name of the scheduler in messages.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
        >>> one = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        >>> list(other_constants(one, {**one.state_dict(), "step_size": 3}, "scheduler"))
        ['`step_size` of `scheduler` is 3 in the checkpoint, and 5 in the program: the saved value is used']
    """
    one = unwrapped(one)
    if not isinstance(one, torch.optim.lr_scheduler.LRScheduler) or not isinstance(saved, dict):
        return
    arguments = {word for base in type(one).__mro__ if "__init__" in vars(base) for word in _arguments(base)} - _MOVED
    for word in sorted(arguments):
        for key in (word, f"_{word}", f"{word}s"):
            if key not in saved or key not in vars(one) or key == _CHILDREN:
                continue
            before, now = _value(saved[key]), _value(vars(one)[key])
            if before is not None and now is not None and before != now:
                yield (
                    f"{show(word)} of {show(name)} is {before!r:.80} in the checkpoint, and {now!r:.80} in the "
                    "program: the saved value is used"
                )
    states = saved.get(_CHILDREN)
    children = _children(one)
    if isinstance(states, list | tuple) and len(states) == len(children):
        for number, (child, state) in enumerate(zip(children, states, strict=True)):
            yield from other_constants(child, state, f"{name}[{number}]")


def _children(one: Any) -> list[Any]:
    found = getattr(one, _CHILDREN, ())
    return list(found) if isinstance(found, list | tuple) else []


def _arguments(kind: type) -> list[str]:
    return list(inspect.signature(kind.__init__).parameters)[1:]  # type: ignore[misc]


def _value(value: Any) -> Any:
    """A constant as a value that can be compared; None: it is no plain value."""
    if isinstance(value, dict):
        named = {key: _value(one) for key, one in value.items()}
        return None if None in named.values() else named
    if isinstance(value, list | tuple):
        found = [_value(one) for one in value]
        return None if None in found else found  # functions, such as those of LambdaLR
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return plain(value) if isinstance(value, bool | int | float | str) else None
