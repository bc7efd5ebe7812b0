"""A small network trained with accelerate, killed and resumed at will.

    torchrun --nproc-per-node 2 -m -- reshard.examples.train_accelerate run --steps 30

Start it again with the same folder and it resumes. The log `run.log` gets a line a batch: step, loss, samples.
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from reshard.accelerate import prepared
from reshard.storage.location import locate
from reshard.torch import Checkpointer


def main() -> None:
    """Train from the newest checkpoint on."""
    parser = argparse.ArgumentParser("reshard.examples.train_accelerate", description=__doc__)
    parser.add_argument("root", help="the checkpoint root")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=2, help="samples of a batch on each process")
    args = parser.parse_args()
    torch.manual_seed(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    data = [(torch.sin(torch.arange(8) * float(index)), index) for index in range(96)]
    loader: DataLoader[torch.Tensor] = DataLoader(data, args.batch, shuffle=True)  # type: ignore[arg-type]
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)

    with Checkpointer(args.root, save_every=3) as checkpointer:
        step = checkpointer.resume(**prepared(accelerator, loader)).initial_step
        while step < args.steps:
            for inputs, ids in loader:
                with accelerator.accumulate(model):
                    loss = (model(inputs).squeeze(-1) - inputs.mean(-1)).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                mean, samples = accelerator.gather(loss.detach().reshape(1)).mean(), accelerator.gather(ids)
                if accelerator.is_main_process:
                    line = f"{step + 1} {mean.item().hex()} {sorted(samples.tolist())}\n"
                    locate(f"{args.root}.log").append_line(line.encode())
                if accelerator.sync_gradients:
                    step += 1
                    checkpointer.step(step, loss=mean)
                    if step >= args.steps:
                        break
    accelerator.end_training()


if __name__ == "__main__":
    main()
