"""Load universal folders with DeepSpeed and save what was loaded: `python load.py <folder> <jobs>`."""

# mypy: ignore-errors
from __future__ import annotations

import json
import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed_train import Net


def run(folder: Path, name: str, source: str, stage: int, *, bf16: bool, n_groups: int, module_only: bool) -> None:
    torch.manual_seed(77)
    net = Net()
    trained = [one for one in net.parameters() if one.requires_grad]
    wide, narrow = [one for one in trained if one.dim() > 1], [one for one in trained if one.dim() <= 1]
    groups = [{"params": trained}] if n_groups == 1 else [{"params": wide}, {"params": narrow, "weight_decay": 0.0}]
    config = {
        "train_batch_size": 4,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": bf16},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"load_universal": True},
    }
    engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(groups, lr=0.5), config=config)
    path, client = engine.load_checkpoint(str(folder / source), load_module_only=module_only)
    assert path is not None
    engine.save_checkpoint(str(folder / name), client_state={"loaded": client.get("note")})
    weights = {key: deepspeed.utils.safe_get_full_fp32_param(one) for key, one in net.named_parameters()}
    if engine.global_rank == 0:
        rates = [(group["lr"], group["weight_decay"]) for group in engine.optimizer.param_groups]
        torch.save({"weights": weights, "rates": rates, "steps": engine.global_steps}, folder / f"{name}.pt")
    engine.backward(engine(torch.randint(0, 31, (2, 5))))
    engine.step()


if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    for name, options in json.loads(sys.argv[2]).items():
        run(Path(sys.argv[1]), name, **options)
