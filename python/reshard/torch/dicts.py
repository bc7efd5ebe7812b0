"""Dicts of values as objects with state: averages of weights, counters.

A dict is compared with its saved state before anything is changed (`DictState.fitted`), and restored in place. Tensors
and containers in it stay the same objects. This module knows no checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from reshard.errors import MismatchError
from reshard.torch.tensors import overwrite
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.options import Strict


class DictState:
    """A dict as an object with state. Loading changes the dict, and the containers and tensors in it, in place."""

    def __init__(self, values: dict[Any, Any]) -> None:
        self.values = values

    def state_dict(self) -> dict[Any, Any]:
        """The dict, as a new one with the same values."""
        return dict(self.values)

    def load_state_dict(self, state: Mapping[Any, Any]) -> None:
        """Give the dict the content of a state."""
        _set(self.values, state)

    def fitted(self, state: Any, name: str, policy: Strict, *, cast: bool) -> Fitted:
        """Compare the dict with its saved state.

        Args:
            state: the saved state.
            name: the name of the dict in messages.
            policy: what happens to differences.
            cast: whether floating-point tensors may have another dtype.

        Raises:
            MismatchError: a tensor has another shape or dtype, or the state is not that of a dict.

        Example:
            >>> from reshard.options import Strict
            >>> DictState({"n": 0, "best": 1.5}).fitted({"n": 3}, "extra['progress']", Strict(), cast=False)
            Fitted(value={'n': 3, 'best': 1.5}, missing=["extra['progress']['best']"], notes=[])
        """
        if not isinstance(state, dict):
            raise MismatchError(
                f"{show(name)} is a dict, and the checkpoint has a value of type {type(state).__name__} for it",
                key=name,
                hint="pass an object of the class that was saved",
            )
        fitted = Fitted({})
        fitted.value = _fit(self.values, state, name, _Rules(policy, cast), fitted)
        return fitted


@dataclass(eq=False)
class Fitted:
    """A saved value for a live dict.

    Attributes:
        value: the saved value, with the live value where the checkpoint has none or a tensor keeps its own.
        missing: keys that only the live dict has, such as `extra['progress']['best']`.
        notes: other differences that the policy accepts, as sentences.
    """

    value: Any
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Rules:
    policy: Strict
    cast: bool


def _fit(live: Any, saved: Any, name: str, rules: _Rules, fitted: Fitted) -> Any:
    if isinstance(live, dict) and isinstance(saved, dict):
        # A key that only the checkpoint has is added: programs add keys while they train.
        value = {
            key: _fit(live[key], one, f"{name}[{key!r}]", rules, fitted) if key in live else one
            for key, one in saved.items()
        }
        kept = {key: one for key, one in live.items() if key not in saved}
        fitted.missing += [f"{name}[{key!r}]" for key in kept]
        return value | kept
    if type(live) is type(saved) and type(live) in (list, tuple) and len(live) == len(saved):
        pairs = enumerate(zip(live, saved, strict=True))
        return type(live)(_fit(one, other, f"{name}[{number}]", rules, fitted) for number, (one, other) in pairs)
    if isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor):
        return _fit_tensor(live, saved, name, rules, fitted)
    return saved


def _fit_tensor(live: torch.Tensor, saved: torch.Tensor, name: str, rules: _Rules, fitted: Fitted) -> torch.Tensor:
    if not live.numel() and live.shape != saved.shape:
        return saved  # a tensor without elements is a place for one of any shape
    if live.shape != saved.shape:
        message = f"{show(name)} has shape {tuple(saved.shape)} in the checkpoint, and {tuple(live.shape)} in the run"
        if rules.policy.shape != "skip":
            raise MismatchError(message, key=name, hint='`strict={"shape": "skip"}` keeps the value of the run')
        fitted.notes.append(f"{message}: it keeps its value")
        return live
    if live.dtype != saved.dtype:
        can_cast = live.is_floating_point() and saved.is_floating_point()
        if not (rules.cast and can_cast):
            raise MismatchError(
                f"{show(name)} is {_dtype(saved)} in the checkpoint, and {_dtype(live)} in the run",
                key=name,
                hint="`cast=True` converts floating-point tensors" if can_cast else None,
            )
        return saved.to(live.dtype)
    return saved


def _is_alike(live: np.ndarray, saved: np.ndarray) -> bool:
    return (live.shape, live.dtype) == (saved.shape, saved.dtype) and live.flags.writeable


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@torch.no_grad()
def _set(live: Any, saved: Any) -> Any:
    """Give a live value the content of a saved one, in place if both have the same type; returns the new value."""
    if live is saved:
        return live
    if isinstance(live, dict) and isinstance(saved, dict):
        values = {key: _set(live.get(key), value) for key, value in saved.items()}
        live.clear()
        live.update(values)
    elif isinstance(live, list) and isinstance(saved, list):
        live[:] = map(_set, [*live, *[None] * len(saved)], saved)
    elif type(live) is type(saved) is tuple and len(live) == len(saved):
        return tuple(map(_set, live, saved))
    elif type(live) is type(saved) is np.ndarray and _is_alike(live, saved):
        live[...] = saved
    elif not (
        isinstance(live, torch.Tensor)
        and isinstance(saved, torch.Tensor)
        and (live.shape, live.dtype, live.is_meta) == (saved.shape, saved.dtype, False)
        and overwrite(live, saved)
    ):
        return saved
    return live
