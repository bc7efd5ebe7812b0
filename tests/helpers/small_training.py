"""A small training with everything in it that can be restored."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler

from reshard.torch import Checkpointer, ElasticSampler


class Counter:
    """Anything with state."""

    def __init__(self) -> None:
        self.n = 0

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n, "seen": {self.n}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["seen"] == {state["n"]}
        self.n = state["n"]


class Trainer:
    """A small training with everything in it that can be restored."""

    def __init__(self, seed: int = 0, *, n: int = 64, batch: int = 4, width: int = 4) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002  the global stream is one of those that are restored
        self.model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.schedule = lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.sampler = ElasticSampler(n, seed, True, batch, 0, 1)
        self.counter = Counter()

    def parts(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.schedule,
            "sampler": self.sampler,
            "extra": {"counter": self.counter},
        }

    def step(self) -> float:
        ids = next(iter(self.sampler.batches()))
        noise = random.random() + float(np.random.rand())  # noqa: NPY002
        batch = torch.tensor([[i, i % 3, 1.0] for i in ids])
        loss: torch.Tensor = (self.model(batch) - batch.mean() * noise).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.counter.n += len(ids)
        return float(loss.detach())

    def run(self, made: Checkpointer, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last + 1):
            losses.append(self.step())
            made.step(step, loss=losses[-1])
        return losses
