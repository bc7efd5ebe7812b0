"""One measurement, one process: forked from a server that has imported everything and allocated nothing since.

No run finds memory, maps or thread pools that an earlier one left warm, whichever library it measures. What the machine
itself remembers is put into the same state before each run by `prepare`.
"""

from __future__ import annotations

import mmap
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.synchronize import Barrier
    from pathlib import Path

HUGE_PAGE_BYTES = 2 << 20
Result = TypeVar("Result")

_MEET_SECONDS = 120.0
_barrier: Barrier
_CONTEXT = multiprocessing.get_context("forkserver")
# What takes long to import; the modules beside this one are not on the server's path.
_CONTEXT.set_forkserver_preload(
    ["numpy", "torch", "safetensors", "reshard.opening", "reshard.verbs.convert", "reshard.torch"]
)
# Not in Python's mmap yet.
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23


def run(case: Callable[..., Result], *arguments: Any, **keywords: Any) -> Result:
    """What a case returns in a new process; what it raises there is raised here."""
    with ProcessPoolExecutor(1, mp_context=_CONTEXT) as pool:
        return pool.submit(case, *arguments, **keywords).result()


@dataclass(frozen=True)
class Member:
    """One of several processes that measure something together."""

    rank: int
    n: int

    def meet(self) -> None:
        """Wait for the others."""
        _barrier.wait(_MEET_SECONDS)


def run_together(n: int, case: Callable[..., tuple[float, float]], *arguments: Any) -> float:
    """Seconds from the first beginning to the last end: `case(member, ...)` in each of n new processes tells both.

    Every case meets the others: only so does each process run one of them.
    """
    with ProcessPoolExecutor(n, mp_context=_CONTEXT, initializer=_join, initargs=(_CONTEXT.Barrier(n),)) as pool:
        members = [pool.submit(case, Member(rank, n), *arguments) for rank in range(n)]
        times = [member.result() for member in members]
    return max(end for _, end in times) - min(start for start, _ in times)


def _join(barrier: Barrier) -> None:
    global _barrier  # noqa: PLW0603  it can be handed to a process only when that is made
    _barrier = barrier


def prepare(sources: list[Path], n_bytes: int) -> None:
    """Bring the files into the page cache, and have this much free memory backed by the host.

    A virtual machine may hand free pages back to its host; the next touch then costs twenty times as much, for seconds
    or not at all, as it happens. Memory that was touched a moment ago is free of that.
    """
    for path in sources:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            mapped.madvise(mmap.MADV_HUGEPAGE)
            mapped.madvise(_MADV_POPULATE_READ)
    if n_bytes:
        anonymous(n_bytes, touch=True)


def anonymous(n_bytes: int, *, touch: bool) -> np.ndarray:
    """New private memory that begins on a huge page, resident if it is to be touched."""
    memory = mmap.mmap(-1, n_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    if touch:
        memory.madvise(_MADV_POPULATE_WRITE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE_BYTES
    return whole[start : start + n_bytes]
