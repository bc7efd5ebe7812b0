"""Files of the ranks of FSDP1, written by torch in processes that are forked from this one and talk over gloo."""

from __future__ import annotations

import multiprocessing
import traceback
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_PATIENCE_S = 120  # until a test that hangs is ended


def in_processes(n_ranks: int, folder: Path, work: Callable[[int], None]) -> None:
    """`work(rank)` in so many processes with a group of gloo."""
    folder.mkdir(parents=True, exist_ok=True)

    def be(rank: int) -> None:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        address = f"file://{folder / 'store'}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=n_ranks)
        try:
            work(rank)
            dist.barrier()
        except BaseException:
            (folder / f"error_{rank}").write_text(traceback.format_exc())
            raise
        finally:
            dist.destroy_process_group()

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=be, args=(rank,)) for rank in range(n_ranks)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(_PATIENCE_S)
    finally:
        for process in processes:
            process.kill()
            process.join()
    errors = [path.read_text() for path in sorted(folder.glob("error_*"))]
    assert all(process.exitcode == 0 for process in processes), "\n".join(errors)
    (folder / "store").unlink(missing_ok=True)


class Model(torch.nn.Module):
    """Nested modules of two dtypes, sizes that no number of ranks divides, a tied weight and a buffer."""

    def __init__(self, wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(11, 6)
        self.block = wrap(torch.nn.Sequential(torch.nn.Linear(6, 5), wrap(torch.nn.Linear(5, 3).bfloat16())))
        self.scale = torch.nn.Parameter(torch.full((1, 1, 2), 0.5))
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.arange(3))


def take_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step with gradients of which a rank needs no other one: the values of the parameters."""
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()


def save_fsdp1(
    folder: Path,
    n_ranks: int,
    *,
    kinds: tuple[str, ...] = ("SHARDED",),
    strategy: str = "FULL_SHARD",
    mesh: bool = False,
) -> None:
    """Save a step of AdamW in each kind of state dict; `full.pt` has the model under FULL_STATE_DICT.

    The optimizer under FULL_STATE_DICT is no truth: on CPU torch 2.15 gathers all slots of a parameter into one buffer.

    Args:
        folder: gets a folder of each kind.
        n_ranks: the number of processes.
        kinds: of `StateDictType`.
        strategy: of `ShardingStrategy`; HYBRID_SHARD: two ranks hold one copy of the model.
        mesh: FSDP1 is given a device mesh.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType

    def work(rank: int) -> None:
        options: dict[str, Any] = {"sharding_strategy": ShardingStrategy[strategy]}
        if strategy == "HYBRID_SHARD":
            pairs = [dist.new_group([first, first + 1]) for first in range(0, n_ranks, 2)]
            across = [dist.new_group(list(range(first, n_ranks, 2))) for first in range(2)]
            options["process_group"] = (pairs[rank // 2], across[rank % 2])
        if mesh:
            options["device_mesh"] = init_device_mesh("cpu", (n_ranks,))

        def wrap(module: torch.nn.Module) -> torch.nn.Module:
            return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True, **options)

        model = wrap(Model(wrap))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        take_step(model, optimizer)
        for kind in (*kinds, "FULL"):
            with FullyShardedDataParallel.state_dict_type(model, StateDictType[f"{kind}_STATE_DICT"]):
                states = {"model": model.state_dict()}
                if kind == "FULL":
                    if rank == 0:
                        torch.save(states["model"], folder / "full.pt")
                    continue
                states["optim"] = FullyShardedDataParallel.optim_state_dict(model, optimizer)
            (folder / kind).mkdir(exist_ok=True)
            for name, state in states.items():
                torch.save(state, folder / kind / f"{name}_world_size_{n_ranks}_rank_{rank}.pt")

    in_processes(n_ranks, folder, work)


def optimizer_of_one() -> dict[str, torch.Tensor]:
    """The state of the optimizer of a run of one process, by the names of the parameters."""
    model = Model(lambda module: module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    take_step(model, optimizer)
    states = optimizer.state_dict()["state"].values()
    names = (name for name, _ in model.named_parameters())
    return {f"{name}.{slot}": one for name, state in zip(names, states, strict=True) for slot, one in state.items()}
