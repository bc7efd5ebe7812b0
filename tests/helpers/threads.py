"""Ranks as threads of one process, for properties over many worlds: what they exchange goes through JSON text."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.ranks.group import Group


class ThreadGroup:
    """One rank of a world of threads."""

    def __init__(self, rank: int, world_size: int, slots: list[str], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.world_size = world_size
        self._slots = slots
        self._barrier = barrier

    def barrier(self, *, timeout: float) -> None:
        self._barrier.wait(timeout)

    def gather(self, value: Any, *, root: int = 0, timeout: float) -> list[Any] | None:
        self._slots[self.rank] = json.dumps(value, allow_nan=False)
        self._barrier.wait(timeout)
        gathered = [json.loads(text) for text in self._slots] if self.rank == root else None
        self._barrier.wait(timeout)
        return gathered

    def broadcast(self, value: Any, *, root: int = 0, timeout: float) -> Any:
        if self.rank == root:
            self._slots[root] = json.dumps(value, allow_nan=False)
        self._barrier.wait(timeout)
        text = self._slots[root]
        self._barrier.wait(timeout)
        return json.loads(text)


def in_threads(world_size: int, work: Callable[[Group], Any]) -> list[Any]:
    """What `work(group)` returns or raises on each rank."""
    slots, barrier = [""] * world_size, threading.Barrier(world_size)

    def of_rank(rank: int) -> Any:
        try:
            return work(ThreadGroup(rank, world_size, slots, barrier))
        except Exception as error:  # noqa: BLE001
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(of_rank, range(world_size)))
