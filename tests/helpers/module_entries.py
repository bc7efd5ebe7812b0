"""Modules with entries of their own in `state_dict`, and trees of them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch
from tests.helpers.wrapped_tensors import cast, quantised
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from reshard.torch.tensors import inner_tensors

if TYPE_CHECKING:
    from collections.abc import Callable


class Overridden(nn.Module):
    """Saves a tensor by the methods that modules override for it."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.scale = torch.full((2, 3), value)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:  # noqa: FBT001
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scale"] = self.scale

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.scale = state_dict.pop(prefix + "scale")
        super()._load_from_state_dict(state_dict, prefix, *args)


class Hooked(nn.Module):
    """Saves a new tensor and a plain value by hooks."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.value = value

        def save(_: nn.Module, state: dict[str, Any], prefix: str, __: object) -> None:
            state[prefix + "twice"] = torch.tensor([self.value, 2 * self.value])
            state[prefix + "name"] = f"value {self.value}"

        def load(_: nn.Module, state: dict[str, Any], prefix: str, *__: object) -> None:
            self.value = float(state.pop(prefix + "twice")[0])
            assert state.pop(prefix + "name") == f"value {self.value}"

        self.register_state_dict_post_hook(save)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(load)  # type: ignore[no-untyped-call]


class Counted(nn.Linear):
    """Has extra state."""

    def __init__(self, value: float) -> None:
        super().__init__(2, 2)
        self.value = value

    def get_extra_state(self) -> Any:
        return {"value": self.value}

    def set_extra_state(self, state: Any) -> None:
        self.value = state["value"]


def random_tree(seed: int) -> Callable[[float], nn.Module]:
    """Makes a model of nested modules with entries of their own, weights that are made of others, and wrappers."""

    def make(value: float) -> nn.Module:
        chance = random.Random(seed)

        def wrapped() -> nn.Module:
            layer: Any = nn.Linear(4, 4)
            weight = quantised(int(value)) if chance.random() < 0.5 else cast(value)
            layer.weight = nn.Parameter(weight, requires_grad=False)
            return layer  # type: ignore[no-any-return]

        def tree(depth: int) -> nn.Module:
            if depth == 0:
                kinds: list[Callable[[], nn.Module]] = [
                    lambda: Overridden(value),
                    lambda: Hooked(value),
                    lambda: Counted(value),
                    lambda: nn.BatchNorm1d(2),
                    lambda: nn.Linear(2, 2),
                    wrapped,
                ]
                return chance.choice(kinds)()
            one = nn.Sequential(*(tree(depth - 1) for _ in range(chance.randint(1, 3))))
            return checkpoint_wrapper(one) if chance.random() < 0.3 else one

        return tree(3)

    return make


def inside(model: nn.Module) -> dict[str, Any]:
    """The `state_dict()`, with the tensors inside others in the places of these."""
    found: dict[str, Any] = {}
    for name, one in model.state_dict().items():
        parts = inner_tensors(one, name)[0] if isinstance(one, torch.Tensor) else {"": one}
        for part, value in parts.items():
            found[f"{name}.{part}" if part else name] = value.clone() if isinstance(value, torch.Tensor) else value
    return found
