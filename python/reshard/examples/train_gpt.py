r"""A small GPT that learns to add, trained on any number of processes, killed and resumed at will.

    torchrun --nproc-per-node 4 -m -- reshard.examples.train_gpt --out run --log run.jsonl --steps 40 --save-every 5 \
        --dp 2 --tp 2

Start it again with the same `--out` and it resumes from its last checkpoint: on as many processes, with every loss the
same to the last bit as if nothing had happened; on others, or sharded otherwise (`--dp`, `--tp`, `--fsdp`), with the
same samples in the same order. The three lines that do it are marked in `train`. Everything runs on the CPU,
over gloo.

The log gets a line of JSON a step: `step`, `loss` (the mean over all ranks, as `float.hex` writes it), `samples` (the
ids that all ranks read in that step), `world_size`.

`--` ends what torchrun reads itself: on Python 3.11 it takes even a `--log` behind the module's name for one of its own
options cut short, and refuses it as ambiguous. `--log-file` means the same as `--log`, and needs no `--`.
"""

import argparse
import ctypes
import json
import math
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Before torch is imported, which takes seconds, in which the launcher may die.
_LAUNCHER = os.getppid()

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket, HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F  # noqa: N812  as everybody calls it
from torch.utils.data import DataLoader, Dataset

from reshard.torch import Checkpointer, ElasticSampler, rng

# Everything divides by 1, 2, 3, 4, 6 and 12 ranks.
N_LAYERS, WIDTH, N_HEADS, CONTEXT, N_TOKENS = 2, 48, 12, 36, 24
ALPHABET = "0123456789+=;"
N_SAMPLES = 4096


class Sums(Dataset[torch.Tensor]):
    """Lines such as "12+7=19;80+4=84;", of which line `i` is always the same."""

    def __len__(self) -> int:
        return N_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        text, state = "", index
        while len(text) <= CONTEXT:
            state = (1103515245 * state + 12345) % 2**31
            a, b = state // 2**8 % 100, state // 2**16 % 100
            text += f"{a}+{b}={a + b};"
        return torch.tensor([ALPHABET.index(c) for c in text[: CONTEXT + 1]])

    def __getitems__(self, indices: list[int]) -> list[tuple[int, torch.Tensor]]:
        return [(index, self[index]) for index in indices]  # the log shows which ones were read


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # A tensor parallel rank has some of the heads.
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH // N_HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return result


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        result: torch.Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return result


class GPT(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(N_TOKENS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(N_LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, N_TOKENS, bias=False)
        self.head.weight = self.tokens.weight  # tied: a checkpoint has it once
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.05)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def parallel(model: GPT, mesh: DeviceMesh, *, fsdp: bool) -> nn.Module:
    """The model, sharded over the axis `tp` and replicated or (FSDP2) sharded over the axis `dp`.

    Args:
        model: the model, on one process.
        mesh: a mesh with the axes `dp` and `tp`.
        fsdp: shard over `dp` with FSDP2 instead of replicating.
    """
    if mesh["tp"].size() > 1:
        wide, narrow = ColwiseParallel(), RowwiseParallel()
        plan = {"attention.q": wide, "attention.k": wide, "attention.v": wide, "attention.out": narrow}
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], plan | {"up": wide, "down": narrow})
    if fsdp:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    elif mesh["tp"].size() == 1:
        return replicated(model, mesh)
    return model


def replicated(model: GPT, mesh: DeviceMesh) -> nn.Module:
    """The model in DDP, whose gradients do not depend on how it fills its buckets.

    It fills them in another order from its second step on, so the first step after a restart is another than it would
    have been, and where in a bucket a number stands decides in which order gloo adds it up over the ranks. With a
    message a parameter there is one order.
    """
    ddp = nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    n_ranks = mesh["dp"].size()

    def mean(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        for gradient in bucket.gradients():
            dist.all_reduce(gradient, group=group)
            gradient.div_(n_ranks)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    ddp.register_comm_hook(mesh.get_group("dp"), mean)
    return ddp


def average_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """What DDP does, for a model whose parameters are sharded over `tp`, which DDP does not accept."""
    for parameter in model.parameters():
        gradient: Any = parameter.grad
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        dist.all_reduce(local, group=mesh.get_group("dp"))
        local.div_(mesh["dp"].size())


def train(args: argparse.Namespace) -> None:
    """Train up to step `args.steps`, from where the last checkpoint in `args.out` was saved."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    world_size = dist.get_world_size()
    dp = args.dp or world_size // args.tp
    if dp * args.tp != world_size:
        sys.exit(f"--dp {dp} times --tp {args.tp} is not the {world_size} processes that were started")
    mesh = init_device_mesh("cpu", (dp, args.tp), mesh_dim_names=("dp", "tp"))
    place = {"dp": mesh.get_local_rank("dp")}

    torch.manual_seed(args.seed)  # all ranks begin with the same weights, and each goes on with its own dropout
    model = parallel(GPT(args.dropout), mesh, fsdp=args.fsdp)
    rng.derive(args.seed, 0, place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 10) * (0.1 + 0.9 * math.exp(-step / 200))
    )
    dataset = Sums()
    sampler = ElasticSampler(len(dataset), args.seed, True, args.global_batch_size, place["dp"], dp)
    loader = DataLoader(
        dataset,
        sampler.local_batch_size,
        sampler=sampler,
        generator=torch.Generator(),
        collate_fn=lambda rows: (torch.tensor([n for n, _ in rows]), torch.stack([line for _, line in rows])),
    )
    sums = mesh.get_group("dp")

    checkpointer = Checkpointer(  # <- line 1
        args.out,
        save_every=args.save_every,
        async_save=args.async_save,
        ranks={"mesh": mesh, "coordinate": place, "seed": args.seed},
    )
    start = checkpointer.resume(model=model, optimizer=optimizer, scheduler=schedule, sampler=sampler)  # <- line 2
    step = start.initial_step
    log = Path(args.log).open("a", encoding="utf-8") if args.log and dist.get_rank() == 0 else None  # noqa: SIM115
    with checkpointer:
        while step < args.steps:
            for ids, lines in loader:
                step += 1
                loss = F.cross_entropy(model(lines[:, :-1]).flatten(0, 1), lines[:, 1:].flatten())
                loss.backward()  # type: ignore[no-untyped-call]
                if args.tp > 1 and not args.fsdp:
                    average_gradients(model, mesh)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                mean = loss.detach().double()
                dist.all_reduce(mean, group=sums)
                mean /= dp
                samples = [torch.empty_like(ids) for _ in range(dp)]
                dist.all_gather(samples, ids, group=sums)
                if log is not None:
                    line = {"step": step, "loss": float(mean).hex(), "samples": torch.cat(samples).tolist()}
                    print(json.dumps(line | {"world_size": world_size}), file=log, flush=True)
                checkpointer.step(step, loss=mean)  # <- line 3: saves when it is due, or when a signal came
                if step >= args.steps:
                    break
        if step % args.save_every:
            checkpointer.save()  # the end, too
    if log is not None:
        log.close()


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser("reshard.examples.train_gpt", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40, help="steps in all, those before a restart included")
    parser.add_argument("--save-every", type=int, default=5, help="steps from one checkpoint to the next")
    parser.add_argument("--out", required=True, help="the checkpoint root; the run resumes from its newest checkpoint")
    parser.add_argument("--log", "--log-file", help="file that gets a line of JSON a step")
    parser.add_argument("--dp", type=int, default=0, help="data parallel ranks; default: all that --tp leaves")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel ranks: 1, 2, 3, 4, 6 or 12")
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 over the data parallel ranks instead of replicas")
    parser.add_argument("--async-save", action="store_true", help="write checkpoints in the background")
    parser.add_argument("--global-batch-size", type=int, default=12, help="samples a step over all ranks")
    parser.add_argument("--dropout", type=float, default=0.1, help="other data parallel ranks drop other numbers")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(argv)


def end_with_launcher() -> None:
    """End when the launcher is killed: torchrun starts its ranks in sessions of their own, where no signal follows."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != _LAUNCHER:
        sys.exit("the launcher is gone")


def main() -> None:
    """Join the other ranks that torchrun started, if any, and train."""
    args = arguments()
    end_with_launcher()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        train(args)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
