"""Goes on from a `checkpoint-<N>` of Trainer with an optimizer of bitsandbytes, and prints what became of each.

Trainer itself goes on from it, too: both have the same state, and the same after two more steps.
"""

from __future__ import annotations

import logging
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from reshard.errors import UnsupportedError
from reshard.torch import Checkpointer

OPTIMIZERS = ("adamw_bnb_8bit", "lion_8bit", "adamw_bnb_8bit by name")


class Data(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.randn(64, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x.sum()}


class Model(nn.Module):
    """Of its weights one is large enough for 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        made = self.second(torch.tanh(self.first(x))).squeeze(-1)
        return {"loss": (made - labels).square().mean()}


def trainer(folder: Path, optim: str) -> Any:
    options: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_steps": 3}
    args = TrainingArguments(str(folder), max_steps=3, optim=optim, learning_rate=0.01, logging_steps=9, **options)
    made = Trainer(Model(), args, train_dataset=Data())
    made.create_optimizer_and_scheduler(6)
    return made


def state(made: Any) -> list[Any]:
    return [made.model.state_dict(), made.optimizer.state_dict(), made.lr_scheduler.state_dict()]


def is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(is_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return type(one) is type(other) and bool(one == other)


def step(made: Any) -> None:
    for number in (7, 8):
        sample = Data()[number]
        made.model(sample["x"][None], sample["labels"][None])["loss"].backward()
        made.optimizer.step()
        made.lr_scheduler.step()
        made.optimizer.zero_grad()


def check(folder: Path, optim: str, *, by_name: bool) -> str:
    trainer(folder, optim).train()
    saved = folder / "checkpoint-3"
    expected, ours = trainer(folder, optim), trainer(folder, optim)
    expected._load_from_checkpoint(str(saved))
    expected._load_optimizer_and_scheduler(str(saved))
    assert "state1" in expected.optimizer.state[expected.model.first.weight]
    if by_name:
        whole = torch.load(saved / "optimizer.pt", weights_only=True)
        names = [name for name, _ in Model().named_parameters()]
        whole["state"] = {names[number]: one for number, one in whole["state"].items()}
        torch.save(whole, saved / "optimizer.pt")
    config = {"load_checkpoint": str(saved), "resume_training": True}
    with Checkpointer.from_config(config, root=folder / "run", signals=()) as checkpointer:
        try:
            checkpointer.resume(model=ours.model, optimizer=ours.optimizer, scheduler=ours.lr_scheduler)
        except UnsupportedError as error:
            return f"refused: {error.message.partition(': ')[2].partition(': ')[0]}"
        assert ours.optimizer.state[ours.model.first.weight]["state1"].dtype == torch.uint8
        assert is_equal(state(ours), state(expected))
        step(ours)
        step(expected)
        assert is_equal(state(ours), state(expected))
    shutil.rmtree(folder)
    return "goes on"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable()
    for one in OPTIMIZERS:
        came = check(Path(sys.argv[1]) / one.partition(" ")[0], one.partition(" ")[0], by_name=one.endswith("by name"))
        print(f"{one} {came}")
