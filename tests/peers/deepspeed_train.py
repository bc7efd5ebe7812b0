"""Train a small model with DeepSpeed on the CPU, on several ranks, and save it: `python train.py <folder> <jobs>`."""

# mypy: ignore-errors
from __future__ import annotations

import json
import sys
from pathlib import Path

import deepspeed
import deepspeed.comm.torch
import torch
from torch import nn

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it would compile C++


class Net(nn.Module):
    """Tied, frozen and zero-dimensional parameters, buffers, and sizes that two ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 10)
        self.conv = nn.Conv2d(3, 5, 3)
        self.up = nn.Linear(10, 17)
        self.frozen = nn.Linear(17, 7, bias=False)
        self.down = nn.Linear(7, 10)
        self.head = nn.Linear(10, 31, bias=False)
        self.head.weight = self.embed.weight
        self.gate = nn.Parameter(torch.ones(1))
        self.register_buffer("scale", torch.rand(3))
        self.register_buffer("count", torch.tensor(7))
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embed(x)
        z = self.conv(torch.ones(1, 3, 4, 4, dtype=y.dtype)).mean()
        y = y + self.down(self.frozen(torch.relu(self.up(y)))) * self.gate + z
        return self.head(y).float().logsumexp(-1).mean()


def run(folder: str, stage: int, zero: dict[str, object], *, bf16: bool, n_groups: int) -> None:
    torch.manual_seed(3)
    net = Net()
    trained = [one for one in net.parameters() if one.requires_grad]
    wide, narrow = [one for one in trained if one.dim() > 1], [one for one in trained if one.dim() <= 1]
    groups = [{"params": trained}] if n_groups == 1 else [{"params": wide}, {"params": narrow, "weight_decay": 0.0}]
    config = {
        "train_batch_size": 4,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
        "bf16": {"enabled": bf16},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(groups, lr=1e-2), config=config)
    for i in range(3):
        generator = torch.Generator().manual_seed(i + 10 * engine.global_rank)
        engine.backward(engine(torch.randint(0, 31, (2, 5), generator=generator)))
        engine.step()
    engine.save_checkpoint(folder, client_state={"note": {"a": [1, 2]}, "seen": torch.arange(4)})


if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    for name, (stage, zero, bf16, n_groups) in json.loads(sys.argv[2]).items():
        run(str(Path(sys.argv[1], name)), stage, zero, bf16=bf16, n_groups=n_groups)
