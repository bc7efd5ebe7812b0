"""Files of DeepSpeed that a test writes anew, where DeepSpeed is not installed."""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any, Self

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

CLASSES = {
    "deepspeed.runtime.fp16.loss_scaler": "LossScaler",
    "deepspeed.runtime.zero.config": "ZeroStageEnum",
    "deepspeed.utils.tensor_fragment": "fragment_address",
}
"""The classes that the files name."""


class StandIn:
    """An object of DeepSpeed that a file holds: its arguments and its state."""

    args: tuple[Any, ...]

    def __new__(cls, *args: Any) -> Self:
        self = super().__new__(cls)
        self.args = args
        return self

    def __reduce__(self) -> Any:
        return type(self), self.args, vars(self)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch read and write the classes that the files name."""
    importlib.import_module("transformers.integrations.deepspeed")  # looks for DeepSpeed, and must not find this
    for path, name in CLASSES.items():
        parts = path.split(".")
        for n_parts in range(1, len(parts) + 1):
            module = ".".join(parts[:n_parts])
            monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
        setattr(sys.modules[path], name, type(name, (StandIn,), {"__module__": path}))


def edited(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the content of a file of torch."""
    content = torch.load(file, weights_only=False)
    change(content)
    torch.save(content, file)


def edited_state(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the state in a file of the optimizer."""
    edited(file, lambda content: change(content["optimizer_state_dict"]))
