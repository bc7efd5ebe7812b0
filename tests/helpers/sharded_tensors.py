"""ShardedTensors of torch in files of ranks, written in one process with its fake process group, and changed ones."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from tests.helpers.mesh_files import as_rank
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

Region = tuple[tuple[int, ...], tuple[int, ...]]
"""The first element and the shape."""


def sharded(whole: torch.Tensor, regions: Sequence[tuple[Region, int]], rank: int) -> Any:
    """A ShardedTensor as a rank has it. Its group of processes is that of `as_rank`.

    Args:
        whole: the values.
        regions: each with the rank that holds it.
        rank: the rank.
    """
    listed = [ShardMetadata(list(at), list(shape), f"rank:{of}/cpu") for (at, shape), of in regions]
    held = [
        Shard(whole[tuple(map(slice, at, [a + n for a, n in zip(at, shape, strict=True)]))].clone(), metadata)
        for ((at, shape), of), metadata in zip(regions, listed, strict=True)
        if of == rank
    ]
    metadata = ShardedTensorMetadata(listed, whole.shape, TensorProperties(dtype=whole.dtype))
    return ShardedTensor._init_from_local_shards_and_global_metadata(held, metadata)


def save_sharded(folder: Path, n_ranks: int, make: Callable[[int], dict[str, Any]], kind: str = "model") -> None:
    """The file of each rank with what `make` returns for it."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(n_ranks):
        with as_rank(rank, n_ranks), warnings.catch_warnings(action="ignore", category=FutureWarning):
            torch.save(make(rank), folder / f"{kind}_world_size_{n_ranks}_rank_{rank}.pt")


class Called:
    """What is pickled as the call of a function, with a state."""

    def __init__(self, function: Any, arguments: Any, state: Any = None) -> None:
        self.call = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self.call


def changed(tensor: Any, **changes: Any) -> Called:
    """A ShardedTensor whose pickle has other parts: `held`, `metadata`, `group`, `made`, `state`, `function`.

    Without a change it is pickled as torch does it.
    """
    function, (rebuild, kind, made, state) = tensor.__reduce_ex__(2)
    held, metadata, group, *rest = state
    parts: dict[str, Any] = {"held": held, "metadata": metadata, "group": group, "made": made, "kind": kind} | changes
    state = (parts["held"], parts["metadata"], parts["group"], *rest)
    arguments = (rebuild, parts["kind"], parts["made"], parts.get("state", state))
    return Called(parts.get("function", function), arguments)
