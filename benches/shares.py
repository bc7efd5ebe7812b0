"""What shares of some work read and cost, beside one process that does all: `python benches/shares.py`.

The work is on ONE file with ONE tensor: the largest share cannot be that of the largest file or tensor. The shares are
done one after the other by one process with one thread, which has done others before, as a worker of Ray has. Before
each share the files leave the page cache, so that the bytes are those of the disk; seconds are those of the processor,
the least of some rounds. Memory is touched and freed before, see `touch`.

64 workers are simulated with these seconds: each takes the next share when it has done one, as `--on ray` gives them
out. A worker that dies loses what it has done of its share.
"""

from __future__ import annotations

import argparse
import heapq
import multiprocessing
import os
import random
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np

import reshard
from reshard.ray.cluster import _MAX_SHARES, _MIN_SHARE_BYTES, _SHARE_BYTES, _SHARES_OF_SLOT
from reshard.verbs.stats import stats

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.ranks.places import ShareRun, Work

N_WORKERS, N_DEAD = 64, 16
WORKS = ("convert", "verify", "diff", "stats")


class Cost(NamedTuple):
    """What a share cost."""

    read: int
    wrote: int
    seconds: float
    elapsed: float


def measured(work: Callable[..., Any], *arguments: Any) -> tuple[Cost, Any]:
    """Do a share in this process."""
    before, begun, elapsed = io_bytes(), time.process_time(), time.monotonic()
    result = work(*arguments)
    seconds, after = time.process_time() - begun, io_bytes()
    return Cost(after[0] - before[0], after[1] - before[1], seconds, time.monotonic() - elapsed), result


def io_bytes() -> tuple[int, int]:
    """Bytes that this process has read from disks and written to them."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])


def leave_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def touch(n_bytes: int) -> None:
    """Touch memory and free it. A virtual machine gives free memory back to its host, and gets it again slowly.

    The page cache needs new memory for a file that is read: one process for all of it, and a share for its part.
    """
    memory = np.empty(n_bytes, np.uint8)
    memory[:: 4 << 10] = 1


def written(folder: str, target: str, share: tuple[int, int]) -> int:
    return reshard.convert(Path(folder) / "a.safetensors", target, share=share, threads=1).n_bytes


@dataclass
class Worker:
    """A place: one process that does all shares."""

    folder: Path
    pool: ProcessPoolExecutor
    n: int
    n_touched: int
    cpus: int = 1
    costs: list[Cost] = field(default_factory=list)

    def n_shares(self, n_bytes: int) -> int:  # noqa: ARG002  one signature
        return self.n

    def run(
        self,
        work: Work[Any],
        n_shares: int,
        done: Callable[[ShareRun], object],  # noqa: ARG002
    ) -> list[Any]:
        return [self.do(work, share)[1] for share in range(n_shares)]

    def do(self, work: Callable[..., Any], *arguments: Any) -> Any:
        leave_cache(self.folder)
        touch(self.n_touched // self.n)
        cost, result = self.pool.submit(measured, work, *arguments).result()
        self.costs.append(cost)
        return result

    def all_of(self, work: str) -> list[Cost]:
        """The costs of all shares of some work."""
        one, other = (self.folder / "run" / f"iteration_{number:08}" for number in (1, 2))
        self.costs = []
        if work == "convert":
            target = self.folder / "out" / "one.pt"
            for share in range(self.n):
                self.do(written, str(self.folder), str(target), (share, self.n))
            target.unlink()
        elif work == "verify":
            assert reshard.verify(one, on=self).ok
        elif work == "diff":
            assert len(reshard.diff(one, other, on=self).differences) == 1
        else:
            stats(one, on=self)
        return self.costs


def simulated(costs: list[Cost], n_bytes: int, share_bytes: int, n_dead: int, seed: int) -> float:
    """By how much the last of 64 workers ends later than if they had done the same work without a pause."""
    generator = random.Random(seed)
    wanted = max(_SHARES_OF_SLOT * N_WORKERS, n_bytes // _SHARE_BYTES)
    n_shares = int(max(1, min(wanted, n_bytes // _MIN_SHARE_BYTES, _MAX_SHARES)))
    rates = [cost.seconds / share_bytes for cost in costs]
    seconds = [generator.choice(rates) * n_bytes / n_shares for _ in range(n_shares)]
    ideal = sum(seconds) / N_WORKERS
    deaths = {worker: generator.uniform(0, ideal) for worker in range(n_dead)}
    free = [(0.0, worker) for worker in range(N_WORKERS)]
    todo, end = [*reversed(seconds)], 0.0
    while todo:
        at, worker = heapq.heappop(free)
        share = todo.pop()
        if worker in deaths and deaths[worker] < at + share:
            todo.insert(0, share)  # begun again at the end
            heapq.heappush(free, (max(at, deaths.pop(worker)), worker))  # Ray starts another one
            continue
        heapq.heappush(free, (at + share, worker))
        end = max(end, at + share)
    return end / ideal - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gib", type=float, default=1.0, help="size of the tensor")
    parser.add_argument("--shares", type=int, nargs="*", default=[4, 12])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the files are made, on a disk")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=given.folder) as name,
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool,
    ):
        folder, n_rows = Path(name), int(given.gib * 1024)
        tensor = np.random.default_rng(0).standard_normal((n_rows, (1 << 20) // 4), np.float32)
        reshard.save_file({"w": tensor}, folder / "a.safetensors")
        for number in (1, 2):
            reshard.save(folder / "run", number, {"w": tensor * np.float32(number)})
        del tensor
        print(f"{given.gib} GiB in one tensor; the least of {given.rounds} rounds")
        for work in WORKS:
            report(work, folder, pool, given)


def report(work: str, folder: Path, pool: ProcessPoolExecutor, given: argparse.Namespace) -> None:
    best: dict[int, list[Cost]] = {}
    for _ in range(given.rounds):
        for n in (1, *given.shares):
            costs = Worker(folder, pool, n, int(2 * given.gib * (1 << 30))).all_of(work)
            known = best.get(n, costs)
            best[n] = [min(pair, key=lambda cost: cost.seconds) for pair in zip(known, costs, strict=True)]
    alone = best[1][0]
    print(f"\n{work}: alone {alone.read / 1e6:,.1f} MB read, {alone.wrote / 1e6:,.1f} written, {alone.seconds:.2f} s")
    for n in given.shares:
        for name in ("read", "wrote", "seconds"):
            own = [getattr(cost, name) for cost in best[n]]
            whole = getattr(alone, name)
            if whole > 1 << 20 or name == "seconds":
                print(
                    f"  {n} shares: {name} {100 * (sum(own) / whole - 1):+.1f} %, "
                    f"largest share {100 * (max(own) * n / whole - 1):+.1f} % of its part"
                )
    n = max(given.shares)
    for label, n_bytes in (("64 GiB", 64 << 30), ("1 TiB", 1 << 40), ("10 TiB", 10 << 40)):
        late = []
        for n_dead in (0, N_DEAD):
            runs = [simulated(best[n], n_bytes, int(given.gib * (1 << 30)) // n, n_dead, seed) for seed in range(20)]
            late.append(f"{100 * sum(runs) / len(runs):.0f} %")
        print(f"  simulated, 64 workers, {label}: the last one ends later by {late[0]}; if {N_DEAD} die, by {late[1]}")


if __name__ == "__main__":
    main()
