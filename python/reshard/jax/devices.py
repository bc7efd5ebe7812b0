"""Devices as ranks: the shards that each device holds, and the layout that follows from the shardings.

The devices of a process save as the ranks of a world, each in its own thread. If all arrays that are sharded have a
`NamedSharding` of the same mesh, the layout has the axes of that mesh. Otherwise the shards are saved by their regions.
"""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding

from reshard.errors import UnsupportedError
from reshard.verbs.save import Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from reshard.ranks.group import Group

T = TypeVar("T")


@dataclass(frozen=True)
class OnDevices:
    """The arrays of each device.

    Attributes:
        arrays: for each device its shards, by name of the array.
        layout: the layout, as the mapping of a layout file; None: the arrays are `Shard`s with their regions.
    """

    arrays: list[dict[str, object]]
    layout: dict[str, object] | None


def on_devices(arrays: Mapping[str, Any]) -> OnDevices:
    """The shards of arrays by device. The memory of arrays on the host is not copied.

    Args:
        arrays: arrays of JAX and of numpy, by name.

    Raises:
        UnsupportedError: an array was deleted or donated.

    Example:
        >>> on_devices({"w": np.zeros(3)}).layout is None
        True
    """
    for name, array in arrays.items():
        if isinstance(array, jax.Array) and array.is_deleted():
            raise UnsupportedError(f"`{name}` was deleted or donated", key=name)
    sharded = {name: one for name, one in arrays.items() if _is_sharded(one)}
    if not sharded:
        return OnDevices([{name: np.asarray(one) for name, one in arrays.items()}], None)
    meshes = {one.sharding.mesh if isinstance(one.sharding, NamedSharding) else None for one in sharded.values()}
    mesh = meshes.pop()
    if not meshes and mesh is not None and all(one.sharding.memory_kind != "unpinned_host" for one in sharded.values()):
        devices = list(mesh.devices.flat)
        return OnDevices(_by_device(arrays, sharded, devices), _layout(mesh, sharded))
    devices = sorted(
        {shard.device for one in sharded.values() for shard in one.addressable_shards}, key=lambda one: one.id
    )
    return OnDevices(_by_region(arrays, sharded, devices), None)


def in_threads(n_ranks: int, work: Callable[[Group], T]) -> list[T]:
    """Call `work(group)` for every rank of a world, each in its own thread.

    Args:
        n_ranks: number of ranks.
        work: the function.

    Returns:
        The results by rank. The first error is raised.

    Example:
        >>> in_threads(2, lambda group: group.broadcast(group.rank, timeout=10))
        [0, 0]
    """
    slots, barrier = [""] * n_ranks, threading.Barrier(n_ranks)
    with ThreadPoolExecutor(n_ranks) as pool:
        futures = [pool.submit(work, _ThreadGroup(rank, n_ranks, slots, barrier)) for rank in range(n_ranks)]
        return [future.result() for future in futures]


class _ThreadGroup:
    """One rank of a world of threads."""

    def __init__(self, rank: int, world_size: int, slots: list[str], barrier: threading.Barrier) -> None:
        self.rank, self.world_size = rank, world_size
        self._slots, self._barrier = slots, barrier

    def barrier(self, *, timeout: float) -> None:
        self._barrier.wait(timeout)

    def gather(self, value: Any, *, root: int = 0, timeout: float) -> list[Any] | None:
        self._slots[self.rank] = json.dumps(value)
        self._barrier.wait(timeout)
        gathered = [json.loads(text) for text in self._slots] if self.rank == root else None
        self._barrier.wait(timeout)
        return gathered

    def broadcast(self, value: Any, *, root: int = 0, timeout: float) -> Any:
        if self.rank == root:
            self._slots[root] = json.dumps(value)
        self._barrier.wait(timeout)
        text = self._slots[root]
        self._barrier.wait(timeout)
        return json.loads(text)


def _is_sharded(array: Any) -> bool:
    return isinstance(array, jax.Array) and len(array.sharding.device_set) > 1


def _by_device(arrays: Mapping[str, Any], sharded: Mapping[str, Any], devices: list[Any]) -> list[dict[str, object]]:
    """Every device gives its shards, replicas included, which are compared; and all arrays that are not sharded."""
    rank_of = {device: rank for rank, device in enumerate(devices)}
    by_rank: list[dict[str, object]] = [{} for _ in devices]
    for name, array in arrays.items():
        if name not in sharded:
            whole = np.asarray(array)
            for of_rank in by_rank:
                of_rank[name] = whole
            continue
        for shard in array.addressable_shards:
            by_rank[rank_of[shard.device]][name] = np.asarray(shard.data)
    return by_rank


def _by_region(arrays: Mapping[str, Any], sharded: Mapping[str, Any], devices: list[Any]) -> list[dict[str, object]]:
    """Every device gives the shards whose first replica it holds, with their regions."""
    rank_of = {device: rank for rank, device in enumerate(devices)}
    by_rank: list[dict[str, object]] = [{} for _ in devices]
    for name, array in arrays.items():
        if name not in sharded:
            whole = np.asarray(array)
            by_rank[0][name] = Shard(whole, whole.shape, (0,) * whole.ndim)
            continue
        for shard in array.addressable_shards:
            if shard.replica_id == 0:
                offset = tuple(one.start or 0 for one in shard.index)
                by_rank[rank_of[shard.device]][name] = Shard(np.asarray(shard.data), array.shape, offset)
    return by_rank


def _layout(mesh: Any, sharded: Mapping[str, Any]) -> dict[str, object]:
    by_cut: dict[str, tuple[list[str], list[list[str] | None]]] = {}
    for name, array in sharded.items():
        cut = [_axes(entry) for entry in array.sharding.spec]
        if any(cut):
            by_cut.setdefault(json.dumps(cut), ([], cut))[0].append("re:" + re.escape(name))
    rules: list[dict[str, object]] = [{"match": names, "cut": cut} for names, cut in by_cut.values()]
    rules.append({"match": "*", "optional": True})
    return {"mesh": dict(mesh.shape), "rules": rules}


def _axes(entry: Any) -> list[str] | None:
    """The mesh axes of a dim, the outermost first."""
    if entry is None:
        return None
    return [entry] if isinstance(entry, str) else list(entry) or None
