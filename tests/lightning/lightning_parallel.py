"""A run with ModelParallelStrategy, as a program: `out dp tp stop seed every`. SIGKILL ends it at the step `stop`."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from typing import Any

warnings.filterwarnings("ignore")

import lightning.pytorch as L  # noqa: E402, N812
import torch  # noqa: E402
from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from reshard.lightning import ReshardCheckpoint  # noqa: E402

OUT, DP, TP, STOP, DRAWN, EVERY = sys.argv[1], *map(int, sys.argv[2:])


class Model(L.LightningModule):
    def configure_model(self) -> None:
        if hasattr(self, "net"):
            return
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 2))
        mesh: Any = self.device_mesh
        if TP > 1:
            parallelize_module(self.net, mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if DP > 1:
            fully_shard(self.net, mesh=mesh["data_parallel"])

    def training_step(self, batch: Any, _index: int) -> Any:
        loss = self.net(batch[0]).square().mean()
        line = f"{self.global_step} {self.global_rank} {float(loss.detach()).hex()} {float(batch[0].sum()).hex()}\n"
        os.write(1, line.encode())
        if self.global_step == STOP:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


L.seed_everything(DRAWN)
values = TensorDataset(torch.randn(88, 4, generator=torch.Generator().manual_seed(0)))
trainer = L.Trainer(
    strategy=ModelParallelStrategy(data_parallel_size=DP, tensor_parallel_size=TP),
    callbacks=[ReshardCheckpoint(OUT, every_n_train_steps=EVERY)],
    accelerator="cpu",
    devices=DP * TP,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    max_epochs=2,
)
trainer.fit(Model(), DataLoader(values, 4, shuffle=True), ckpt_path="last")
