"""Files of the ranks of a device mesh, written by torch in one process with its fake process group."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    """This process as a rank of a group that does not communicate."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with suppress(
        ImportError, AttributeError
    ):  # torch would reuse the mesh of another rank, which its cache takes for the same
        from torch.distributed.tensor import debug

        clear: Any = debug._clear_sharding_prop_cache
        clear()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def distributed(tensor: torch.Tensor, mesh: Any, placements: Sequence[Any]) -> Any:
    """A DTensor of which every rank has the whole at first."""
    from torch.distributed.tensor import distribute_tensor

    made = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
    made._local_tensor = made._local_tensor.clone()
    return made


def save_ranks(folder: Path, sizes: Sequence[int], make: Callable[[Any], dict[str, Any]], kind: str = "model") -> None:
    """The file of each rank with what `make` returns for its mesh."""
    from torch.distributed.device_mesh import init_device_mesh

    folder.mkdir(exist_ok=True, parents=True)
    n = 1
    for size in sizes:
        n *= size
    for rank in range(n):
        with as_rank(rank, n):
            mesh = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=tuple("abcd"[: len(sizes)]))
            torch.save(make(mesh), folder / f"{kind}_world_size_{n}_rank_{rank}.pt")


def save_fsdp2(
    folder: Path, world_size: int, model: Callable[[], torch.nn.Module], *, replicas: int = 1
) -> dict[str, Any]:
    """A step of AdamW with `fully_shard`, saved as verl does; returns model and optimizer of a run without shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    folder.mkdir(parents=True)
    whole = model()
    generator = torch.Generator().manual_seed(1)
    grads = {name: torch.randn(one.shape, generator=generator) for name, one in whole.named_parameters()}

    def step(one: torch.nn.Module, grad: Callable[[str, Any], Any]) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.1)
        for name, parameter in one.named_parameters():
            parameter.grad = grad(name, parameter)
        optimizer.step()
        return optimizer

    for rank in range(world_size):
        with as_rank(rank, world_size):
            sizes = (replicas, world_size // replicas) if replicas > 1 else (world_size,)
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("ddp", "fsdp")[-len(sizes) :])
            sharded = model()
            for layer in sharded.children():
                fully_shard(layer, mesh=mesh)
            fully_shard(sharded, mesh=mesh)
            optimizer = step(sharded, lambda name, one: distributed(grads[name], one.device_mesh, one.placements))
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
            extra = {"lr_scheduler": scheduler.state_dict(), "rng": {"cpu": torch.get_rng_state()}}
            files = {"model": sharded.state_dict(), "optim": optimizer.state_dict(), "extra_state": extra}
            for kind, state in files.items():
                torch.save(state, folder / f"{kind}_world_size_{world_size}_rank_{rank}.pt")
    optimizer = step(whole, lambda name, _: grads[name])
    return {"model": whole.state_dict(), "optimizer": optimizer.state_dict()}
