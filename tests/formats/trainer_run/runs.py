"""Folders as `Trainer` of transformers leaves them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pathlib import Path


class Training:
    """A model, two groups of parameters and a scheduler, as Trainer makes them: without and with weight decay."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.LayerNorm(6), torch.nn.Linear(6, 2))
        named = dict(self.model.named_parameters())
        decayed = [one for name, one in named.items() if name.endswith("weight") and not name.startswith("1")]
        rest = [one for name, one in named.items() if not name.endswith("weight") or name.startswith("1")]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))

    def step(self, number: int) -> float:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
        loss = self.model(x).square().sum()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return float(loss.item())

    def save_as_trainer(self, folder: Path, step: int) -> Path:
        from safetensors.torch import save_file

        folder.mkdir(parents=True)
        save_file(self.model.state_dict(), folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
        torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")
        torch.save(self.scheduler.state_dict(), folder / "scheduler.pt")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "epoch": 0.5, "log_history": []}))
        return folder
