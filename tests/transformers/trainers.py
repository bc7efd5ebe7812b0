"""Runs of `Trainer` of transformers with a small model, and what came of them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import Dataset
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from reshard.transformers import ReshardCallback

if TYPE_CHECKING:
    from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")


class Data(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, length: int = 20) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(4) * (index % 3 + 1) + index) % 24
        return {"input_ids": ids, "labels": ids}


class Observer(TrainerCallback):
    """Records the samples of each step, and ends the process' run after a step, as a crash would."""

    def __init__(self, crash: int) -> None:
        self.crash = crash

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.crash:
            raise KeyboardInterrupt


def trainer(root: Path, crash: int = -1, *, length: int = 20, callback: Any = None, **options: Any) -> Trainer:
    set_seed(1)
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=24, max_position_embeddings=8, attention_dropout=0.2, **sizes))
    args = TrainingArguments(
        output_dir=str(root.parent / f"{root.name}.out"),
        **{
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            "num_train_epochs": 3,
            "per_device_train_batch_size": 2,
            "logging_steps": 4,
            "learning_rate": 0.01,
            "save_strategy": "no",
            **options,
        },
    )
    ours = callback or ReshardCallback(root, save_every=3, signals=(), commit={"durable": False})
    callbacks = [Observer(crash), ours]
    if args.metric_for_best_model:
        callbacks.append(EarlyStoppingCallback(100))
    data = Data(length)
    return Trainer(model, args, train_dataset=data, eval_dataset=Data(4), callbacks=callbacks)


def outcome(made: Any) -> Any:
    """Everything that must be equal to the last bit."""
    times = ("runtime", "per_second", "train_loss")
    logs = [{k: v for k, v in log.items() if not any(t in k for t in times)} for log in made.state.log_history]
    weights = {name: tensor.tolist() for name, tensor in made.model.state_dict().items()}
    state = made.optimizer.state_dict()["state"]
    moments = {
        number: {slot: value.tolist() if isinstance(value, torch.Tensor) else value for slot, value in of_one.items()}
        for number, of_one in state.items()
    }
    stateful = [one.state() for one in made.callback_handler.callbacks if isinstance(one, EarlyStoppingCallback)]
    best = (made.state.best_metric, made.state.best_global_step)
    return logs, weights, moments, made.lr_scheduler.state_dict(), made.state.total_flos, stateful, best


SAVES: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": None}


def plain(root: Path, stop: int | None = None, **options: Any) -> Trainer:
    """A trainer without the callback of this package, with the same seeds."""
    made = trainer(root, -1 if stop is None else stop, callback=Observer(-1), **{**SAVES, **options})
    made.args.output_dir = str(root)
    return made


def stopped(root: Path, step: int, **options: Any) -> Path:
    """The checkpoint of a run of Trainer that stops after a step."""
    with pytest.raises(KeyboardInterrupt):
        plain(root, step, **{**options, "save_steps": step}).train()
    return root / f"checkpoint-{step}"
