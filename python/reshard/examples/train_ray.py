"""A small network trained by the workers of Ray Train, which may be killed.

    python -m reshard.examples.train_ray /shared/runs --workers 2 --steps 30

Start it again with the same folder and `--name`, and it resumes, also with another `--workers`. The log
`<storage>/<name>.log` gets a line a step: step, loss, samples, workers.
"""

import argparse
import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

from reshard.ray.train import Checkpointer
from reshard.storage.location import locate
from reshard.torch import ElasticSampler

_GLOBAL_BATCH = 12


def train(config: dict[str, Any]) -> None:
    """What each worker does: train from the newest checkpoint on.

    Args:
        config: the arguments of the command line, by name, and `log`.
    """
    torch.manual_seed(1)
    torch.set_num_threads(1)
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    model = prepare_model(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    data = torch.stack([torch.sin(torch.arange(8) * float(index)) for index in range(96)])
    sampler = ElasticSampler(len(data), 1, True, _GLOBAL_BATCH, rank, n_ranks)
    loader = torch.utils.data.DataLoader(range(len(data)), sampler.local_batch_size, sampler=sampler)  # type: ignore[arg-type,var-annotated]

    with Checkpointer(save_every=config["save_every"], async_save=config["async_save"]) as checkpointer:
        start = checkpointer.resume(model=model, optimizer=optimizer, scheduler=schedule, sampler=sampler)
        step = start.initial_step
        while step < config["steps"]:
            for ids in loader:
                step += 1
                inputs = data[ids]
                loss = (model(inputs).squeeze(-1) - inputs.mean(-1)).square().mean()
                loss.backward()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                if step == config["kill_at"] and start.fresh and rank == n_ranks - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                mean /= n_ranks
                samples = [torch.empty_like(ids) for _ in range(n_ranks)]
                dist.all_gather(samples, ids)
                if rank == 0:
                    line = f"{step} {mean.item().hex()} {sorted(torch.cat(samples).tolist())} {n_ranks}\n"
                    locate(config["log"]).append_line(line.encode())
                checkpointer.step(step, loss=mean)  # reports to Ray what it saves
                if step >= config["steps"]:
                    break


def main() -> None:
    """Start the workers, and print the newest checkpoint that Ray knows."""
    parser = argparse.ArgumentParser("reshard.examples.train_ray", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("storage", help="folder of the runs, which all hosts share")
    parser.add_argument("--name", default="run", help="of the run")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--async-save", action="store_true", help="write checkpoints in the background")
    parser.add_argument("--keep", type=int, help="checkpoints that Ray keeps; default: all")
    parser.add_argument("--kill-at", type=int, help="step of the first attempt at which a worker is killed")
    args = parser.parse_args()
    log = f"{args.storage}/{args.name}.log"
    trainer = TorchTrainer(
        train,
        train_loop_config=vars(args) | {"log": log},
        scaling_config=ScalingConfig(num_workers=args.workers),
        run_config=RunConfig(
            name=args.name,
            storage_path=args.storage,
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=args.keep),
        ),
    )
    result = trainer.fit()
    print(result.checkpoint.path, result.metrics["loss"])


if __name__ == "__main__":
    main()
