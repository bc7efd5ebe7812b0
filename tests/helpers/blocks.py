"""A small model of uneven matrices, cut by FSDP2."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo  # what DTensor imports when it is first used: here once, instead of in every rank
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


class Blocks(nn.Module):
    """Matrices of uneven sizes, a norm with running means; every rank makes the same."""

    def __init__(self, keys: str = "abcd") -> None:
        super().__init__()
        torch.manual_seed(3)
        sizes = {"a": (6, 10), "b": (10, 7), "c": (7, 9), "d": (9, 6)}
        layers = {key: nn.Linear(*size) for key, size in sizes.items()}
        self.layers = nn.ModuleDict({key: layers[key] for key in keys})
        self.norm = nn.BatchNorm1d(6) if "a" in keys else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        for layer in self.layers.values():
            x = layer(x).tanh()
        return x


def batch(n: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * n + rank))


def sharded(model: Blocks, mesh: Any) -> Blocks:
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def whole(tensor: Any) -> torch.Tensor:
    """The oracle: torch's own gathering."""
    full: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach()
