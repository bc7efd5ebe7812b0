"""A small network that Lightning trains, which can be killed and started again.

    python -m reshard.examples.train_lightning --out run
    torchrun --nproc-per-node 2 -m -- reshard.examples.train_lightning --out run

Started again, it resumes from the newest undamaged iteration, within an epoch too. `--log` appends a line for every
batch: step, loss and the rank. On the same number of ranks the lines equal those of an uninterrupted run.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as L  # noqa: N812
import torch
from torch.utils.data import DataLoader, TensorDataset

from reshard.lightning import ReshardCheckpoint


class Network(L.LightningModule):
    def __init__(self, log: str | None) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1))
        self.log_path = log

    def training_step(self, batch: list[torch.Tensor], _index: int) -> torch.Tensor:
        inputs, expected = batch
        loss = torch.nn.functional.mse_loss(self.net(inputs), expected)
        if self.log_path is not None:
            with Path(self.log_path).open("a", encoding="utf-8") as file:
                file.write(f"{self.global_step} {self.global_rank} {float(loss.detach()).hex()}\n")
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)]


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--log")
    args = parser.parse_args()
    L.seed_everything(0)
    inputs = torch.randn(512, 16)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    saving = ReshardCheckpoint(args.out, every_n_train_steps=args.save_every, async_save=True)
    n_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = L.Trainer(max_epochs=args.epochs, callbacks=[saving], accelerator="cpu", devices=n_ranks, logger=False)
    trainer.fit(Network(args.log), loader, ckpt_path="last")


if __name__ == "__main__":
    main()
