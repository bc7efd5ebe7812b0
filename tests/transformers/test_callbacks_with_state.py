"""Callbacks of `Trainer` with state: values of every type, and callbacks that differ from the saved ones."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.transformers import trainers
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

if TYPE_CHECKING:
    from pathlib import Path


class Counting(TrainerCallback, ExportableState):
    """Counts steps, and keeps a value."""

    def __init__(self, value: Any = None, limit: int = 3) -> None:
        self.value, self.limit, self.n = value, limit, 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.n += 1

    def state(self) -> Any:
        return {"args": {"limit": self.limit}, "attributes": {"value": self.value, "n": self.n}}


class Another(Counting):
    """Another class."""


def run(root: Path, *callbacks: Any, stop: int = -1) -> Any:
    made = trainers.trainer(root, stop)
    for one in callbacks:
        made.callback_handler.callbacks.append(one)
    if stop < 0:
        return made.train()
    with pytest.raises(KeyboardInterrupt):
        made.train()
    return None


@pytest.mark.slow(disk=False)
def test_values_keep_their_types_and_differences_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    value = {1: (2, {3}), "array": np.ones(3, np.float32), "tensor": torch.arange(3), "none": None}
    run(tmp_path / "run", Counting(value), Another(5), stop=4)
    counting, more = Counting(limit=4), Counting()
    with caplog.at_level(logging.WARNING, "reshard"):
        run(tmp_path / "run", counting, more)
    array, tensor = counting.value.pop("array"), counting.value.pop("tensor")
    assert counting.value == {1: (2, {3}), "none": None}
    assert (array.dtype, array.tolist()) == (np.float32, [1, 1, 1])
    assert torch.equal(tensor, torch.arange(3))
    assert (counting.n, more.n) == (30, 27)
    told = [line for line in caplog.messages if "callback" in line or "limit" in line]
    assert told == [
        "resume: the checkpoint has the state of 1 callback of the class `Counting`, and the trainer has 2",
        "resume: `limit` of `Counting` was 3, and is 4 in the program, which is used",
        "resume: the checkpoint has the state of 1 callback of the class `Another`, and the trainer has 0",
    ]


def test_a_trainer_that_loads_state_of_its_own_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Loading(Trainer):
        def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
            super()._load_optimizer_and_scheduler(checkpoint)

    monkeypatch.setattr(trainers, "Trainer", Loading)
    trainers.trainer(tmp_path / "run")
    [told] = [line for line in caplog.messages if "overrides" in line]
    assert told.startswith("`Loading` overrides `_load_optimizer_and_scheduler`: state of its own")
