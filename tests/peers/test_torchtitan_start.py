"""Folders that torchtitan's CheckpointManager starts from, and its own folders, written again."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.peers.required import required
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import reshard

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Optimizers:
    """The state of an optimizer with one entry for each value, as torchtitan stores it."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer, options=FLAT)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state, options=FLAT)


class Progress:
    """Counters, as the trainer of torchtitan stores them."""

    def __init__(self, step: int) -> None:
        self.step = step

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step), "ntokens_seen": 7 * self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])
        assert state["ntokens_seen"] == 7 * self.step


class Run:
    """A model with what a CheckpointManager saves of it."""

    def __init__(self, folder: Path, step: int = 0) -> None:
        dcp = required("torchtitan.components.checkpointer.dcp")
        self.model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7))
        self.optimizers, self.progress = Optimizers(self.model), Progress(step)
        schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizers.optimizer, lambda step: 1 / (1 + step))
        self.manager = dcp.CheckpointManager(
            dcp.CheckpointManager.Config(enable=True, folder=str(folder), interval=1, last_save_model_only=False),
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=schedule,
            states={"train_state": self.progress},
            sd_adapter=None,
        )
        self.manager.states.pop("dataloader")

    def train(self) -> None:
        for _ in range(2):
            self.model(torch.randn(3, 5)).square().sum().backward()
            self.optimizers.optimizer.step()


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    required("torchtitan.components.checkpointer.dcp")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    dist.init_process_group("gloo", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_run_goes_on_from_its_folder_written_again(tmp_path: Path) -> None:
    first = Run(tmp_path / "first", step=2)
    first.train()
    first.manager.save(2, last_step=True)
    first.manager.close()
    layout = {"mesh": {"dp": 2}, "rules": [{"match": "0.weight", "cut": ["dp"], "uneven": "ceil"}, {"match": "*"}]}
    report = reshard.convert(tmp_path / "first" / "step-2", tmp_path / "second" / "step-2", to="dcp", layout=layout)
    assert not report.warnings
    second = Run(tmp_path / "second")
    assert second.manager.load()
    assert second.progress.step == 2
    for found, right in (
        (second.model.state_dict(), first.model.state_dict()),
        (second.optimizers.state_dict(), first.optimizers.state_dict()),
    ):
        assert list(found) == list(right)
        assert all(
            torch.equal(torch.as_tensor(found[key]), torch.as_tensor(right[key]))
            for key in right
            if right[key] is not None
        )
    second.manager.close()


def test_a_run_starts_from_weights(tmp_path: Path) -> None:
    weights = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7)).state_dict()
    torch.save(weights, tmp_path / "weights.pt")
    reshard.convert(tmp_path / "weights.pt", tmp_path / "run" / "step-0", to="dcp")
    run = Run(tmp_path / "run")
    assert run.manager.load()  # step 0: the model only
    assert all(torch.equal(value, weights[key]) for key, value in run.model.state_dict().items())
    run.manager.close()
