"""Runs each measurement in a new process, forked from a server that has imported all modules and allocated nothing.

No run reuses memory, maps or thread pools of an earlier one, whichever library it measures. A forked process shares
its pages with the server until it writes to them; it copies them before anything is measured, since a process that was
not forked has pages of its own. `prepare` puts the page cache and the free memory of the machine into the same state
before each run.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import multiprocessing
import os
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from benches.table import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.synchronize import Barrier

HUGE_PAGE_BYTES = 2 << 20
Result = TypeVar("Result")

_MEET_SECONDS = 120.0
_barrier: Barrier
_CONTEXT = multiprocessing.get_context("forkserver")
# Modules that many cases use. Those of peers are imported by the case that needs them, before its clock starts.
_CONTEXT.set_forkserver_preload(
    [
        "numpy",
        "torch",
        "torch.distributed.checkpoint",
        "torch.testing._internal.distributed.fake_pg",
        "safetensors",
        "reshard.opening",
        "reshard.formats.checkpoint2.root",
        "reshard.formats.own_files",
        "reshard.commit.scrub",
        "reshard.verbs.convert",
        "reshard.torch",
    ]
)
# Not in Python's mmap yet.
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23


def run(case: Callable[..., Result], *arguments: Any, **keywords: Any) -> Result:
    """Run a case in a new process; return its result, or raise its exception."""
    with ProcessPoolExecutor(1, mp_context=_CONTEXT, initializer=_begin) as pool:
        return pool.submit(case, *arguments, **keywords).result()


@dataclass(frozen=True)
class Member:
    """One of several processes of one measurement."""

    rank: int
    n: int

    def meet(self) -> None:
        """Wait for the others."""
        _barrier.wait(_MEET_SECONDS)


def run_together(n: int, case: Callable[..., tuple[float, float]], *arguments: Any) -> float:
    """Run `case(member, ...)` in each of n new processes; returns the seconds from the first start to the last end.

    Each case returns its start and its end, and calls `member.meet`, so that each process runs exactly one.
    """
    with ProcessPoolExecutor(n, mp_context=_CONTEXT, initializer=_join, initargs=(_CONTEXT.Barrier(n),)) as pool:
        members = [pool.submit(case, Member(rank, n), *arguments) for rank in range(n)]
        times = [member.result() for member in members]
    return max(end for _, end in times) - min(start for start, _ in times)


def _begin() -> None:
    """Copy the pages that are shared with the server, and silence warnings, which would stand between the tables."""
    madvise = ctypes.CDLL(None).madvise
    span, n_bytes = "", 0
    for name, value, *_ in map(str.split, Path("/proc/self/smaps").read_text().splitlines()):
        if not name.endswith(":"):
            span = name if value == "rw-p" else ""
        elif name == "Size:":
            n_bytes = int(value) << 10
        elif name == "Rss:" and span and int(value) << 10 > n_bytes // 2:  # no memory that is only reserved
            start = ctypes.c_void_p(int(span.partition("-")[0], 16))
            madvise(start, ctypes.c_size_t(n_bytes), _MADV_POPULATE_WRITE)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def _join(barrier: Barrier) -> None:
    global _barrier  # noqa: PLW0603  a barrier can be passed to a process only at its start
    _barrier = barrier
    _begin()


def prepare(sources: list[Path], n_bytes: int) -> None:
    """Read the files into the page cache, and make the host back this much free memory.

    A virtual machine may return free pages to its host; the next access then takes twenty times as long. Memory that
    was accessed a moment ago is not affected.
    """
    for path in (path for path in sources if path.stat().st_size):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            mapped.madvise(mmap.MADV_HUGEPAGE)
            mapped.madvise(_MADV_POPULATE_READ)
    if n_bytes:
        anonymous(n_bytes, touch=True)


def drop(sources: list[Path]) -> None:
    """Remove synced files from the page cache; `Unavailable` if the file system keeps them there."""
    for path in sources:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            n = path.stat().st_size
            if n == 0:
                continue
            with mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
                resident = (ctypes.c_ubyte * -(-n // mmap.PAGESIZE))()
                start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
                status = ctypes.CDLL(None, use_errno=True).mincore(
                    ctypes.c_void_p(start), ctypes.c_size_t(n), ctypes.byref(resident)
                )
                assert status == 0, os.strerror(ctypes.get_errno())
            if np.count_nonzero(np.frombuffer(resident, np.uint8) & 1) > len(resident) // 100:
                raise Unavailable("the file system keeps the file in memory")


def anonymous(n_bytes: int, *, touch: bool, pages: Literal["huge", "4 KiB"] = "huge") -> np.ndarray:
    """New private memory that begins on a huge page; resident if `touch`."""
    memory = mmap.mmap(-1, n_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE if pages == "huge" else mmap.MADV_NOHUGEPAGE)
    if touch:
        memory.madvise(_MADV_POPULATE_WRITE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE_BYTES
    return whole[start : start + n_bytes]
