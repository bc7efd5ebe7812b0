"""torchtitan's optimizers, schedules and CheckpointManager, saving by this package. Run it again after a kill.

torchrun --nproc-per-node 2 -m reshard.examples.train_torchtitan run 40
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from reshard.torch.dcp.torchtitan import CheckpointManager


class Train:
    def __init__(self, out: str, n_steps: int) -> None:
        self.step, self.n_steps = 0, n_steps
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
        fully_shard(self.model)
        config = default_adamw(lr=1e-2)
        config.implementation = "foreach"  # on the CPU
        self.optimizers = config.build(model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=5)
        self.schedulers = schedule.build(optimizers=self.optimizers, training_steps=n_steps)
        # In a trainer of torchtitan this line is the field `checkpoint` of its configuration; the rest is as it was.
        checkpoint = CheckpointManager.Config(enable=True, interval=3, async_mode="async", last_save_model_only=False)
        parts = {"model_parts": [self.model], "optimizers": self.optimizers, "lr_schedulers": self.schedulers}
        more = {"dataloader": None, "states": {"train_state": self}, "sd_adapter": None, "base_folder": out}
        self.checkpoints: Any = checkpoint.build(**parts, **more)

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]

    def run(self) -> None:
        self.checkpoints.load()
        while self.step < self.n_steps:
            self.step += 1
            torch.manual_seed(self.step * dist.get_world_size() + dist.get_rank())
            batch = torch.randn(16, 32)
            loss = (self.model(batch) - batch.cumsum(1)).square().mean()
            loss.backward()
            self.optimizers.step()
            self.schedulers.step()
            self.optimizers.zero_grad()
            print(f"rank {dist.get_rank()} step {self.step} loss {loss.item().hex()}", flush=True)
            self.checkpoints.save(self.step, last_step=self.step == self.n_steps)
        self.checkpoints.close()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Train(sys.argv[1], int(sys.argv[2])).run()
    dist.destroy_process_group()
