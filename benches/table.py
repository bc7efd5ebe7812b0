"""Measures cases in rounds and prints tables of rates and targets. The cases are in other modules."""

from __future__ import annotations

import argparse
import datetime as dt
import functools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import safetensors
import torch

import reshard

if TYPE_CHECKING:
    from collections.abc import Callable

_ATTEMPTS = 4


@dataclass(frozen=True)
class Case:
    """One line of a table: a name, and how to run it once for its seconds."""

    name: str
    n_bytes: int
    run: Callable[[], float]


@dataclass(frozen=True)
class Result:
    """The seconds of a case in each round. With 0 bytes, only the time has a meaning.

    A run is disturbed if other processes were running when it began or ended.
    """

    table: str
    name: str
    n_bytes: int
    seconds: list[float]
    n_disturbed: int

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)

    @property
    def rate(self) -> float:
        """GB/s."""
        return self.n_bytes / self.median / 1e9

    @property
    def speed(self) -> float:
        """The value that targets compare: the rate, or runs per second with 0 bytes."""
        return self.rate or 1 / self.median


@dataclass(frozen=True)
class Target:
    """How fast a case must be: a factor of the speed of another one, or of the fastest of several."""

    case: str
    yardsticks: tuple[str, ...]
    factor: float


class Run(Protocol):
    """Runs the cases of a table, in rounds."""

    def __call__(self, table: str, all_cases: list[Case]) -> list[Result]: ...


def main(
    description: str,
    targets: list[Target],
    measure: Callable[[Path, float, Run], list[Result]],
    *,
    size_gb: float = 3,
    rounds: int = 5,
) -> None:
    """Parse the arguments of the command line, measure and print.

    Args:
        description: text of `--help`.
        targets: what to compare.
        measure: called with a folder to work in, the size of the model in GB, and the function that runs a table.
        size_gb: default of `--size-gb`, in 10^9 bytes.
        rounds: default of `--rounds`.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-gb", type=float, default=size_gb, help=f"size of the model (default: {size_gb})")
    parser.add_argument("--dir", type=Path, help="where to put the model and what is made of it, 4 x its size")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"runs of each case (default: {rounds})")
    parser.add_argument(
        "--wait",
        type=float,
        default=0,
        help="seconds to wait before each run for other processes to become idle; a run that they disturb is "
        f"repeated, {_ATTEMPTS - 1} times at most (default: 0, no wait and no repetition)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--quick", action="store_true", help="0.3 GB and 1 round: only tests the script")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.size_gb, arguments.rounds = 0.3, 1
    machine = describe_machine(arguments.dir or Path(tempfile.gettempdir()))
    run = functools.partial(run_interleaved, n_rounds=arguments.rounds, wait_seconds=arguments.wait)
    with tempfile.TemporaryDirectory(prefix="reshard-bench-", dir=arguments.dir) as folder:
        results = measure(Path(folder), arguments.size_gb, run)
    machine["disturbed"] = f"{sum(r.n_disturbed for r in results)} of {sum(len(r.seconds) for r in results)} runs"
    judged = judge(results, targets)
    if arguments.json:
        print(json.dumps({"machine": machine, "results": [asdict(r) for r in results], "targets": judged}))
        return
    print("\n".join(f"{name}: {value}" for name, value in machine.items()))
    print_tables(results)
    print_targets(judged)


def run_interleaved(table: str, all_cases: list[Case], n_rounds: int, wait_seconds: float) -> list[Result]:
    """Run every case once per round, so that a disturbance of the machine affects all load_cases.

    Args:
        table: name of the table.
        all_cases: the load_cases.
        n_rounds: how often each runs.
        wait_seconds: how long to wait for other processes before each run; 0: no wait, no repetition.
    """
    seconds: dict[str, list[float]] = {case.name: [] for case in all_cases}
    n_disturbed = dict.fromkeys(seconds, 0)
    order = random.Random(0)
    for number in range(n_rounds):
        for case in order.sample(all_cases, len(all_cases)):
            say(f"{table}, round {number + 1} of {n_rounds}: {case.name}")
            for _ in range(_ATTEMPTS if wait_seconds else 1):
                was_quiet = is_quiet(wait_seconds)
                found = case.run()
                if was_quiet and is_quiet(0):
                    break
            else:
                n_disturbed[case.name] += 1
            seconds[case.name].append(found)
    return [Result(table, c.name, c.n_bytes, seconds[c.name], n_disturbed[c.name]) for c in all_cases]


def is_quiet(wait_seconds: float) -> bool:
    """Whether no other process runs for a tenth of a second, within the time to wait."""
    deadline = time.monotonic() + wait_seconds
    while True:
        n_running = 0
        for _ in range(10):
            n_running += int(_lines("/proc/loadavg")[0].split()[3].split("/")[0]) - 1  # this process runs, too
            time.sleep(0.01)
        if n_running <= 2:
            return True
        if time.monotonic() >= deadline:
            return False


def judge(results: list[Result], targets: list[Target]) -> list[dict[str, Any]]:
    """Compare the results with the targets."""
    speeds = {result.name: result.speed for result in results}
    judged = []
    for target in targets:
        yardstick = max(target.yardsticks, key=lambda name: speeds[name])
        found = speeds[target.case] / speeds[yardstick]
        ok = found >= target.factor
        judged.append({"case": target.case, "yardstick": yardstick, "factor": target.factor, "found": found, "ok": ok})
    return judged


def print_tables(results: list[Result]) -> None:
    """Print the tables as Markdown."""
    for table in dict.fromkeys(result.table for result in results):
        print(f"\n| {table} | GB | GB/s | seconds: median (least to most) |\n|---|---:|---:|---:|")
        for result in (r for r in results if r.table == table):
            size, rate = (f"{result.n_bytes / 1e9:.2f}", f"{result.rate:.2f}") if result.n_bytes else ("-", "-")
            spread = f"{result.median:.4f} ({min(result.seconds):.4f} to {max(result.seconds):.4f})"
            print(f"| {result.name.split(': ')[-1]} | {size} | {rate} | {spread} |")


def print_targets(judged: list[dict[str, Any]]) -> None:
    """Print one line for each target."""
    print("\n| target | wanted | found | |\n|---|---:|---:|---|")
    for target in judged:
        verdict = "ok" if target["ok"] else "MISSED"
        print(
            f"| {target['case']} / {target['yardstick']} | {target['factor']:.2f} | {target['found']:.2f} | {verdict} |"
        )


def describe_machine(folder: Path) -> dict[str, str]:
    """What the figures depend on: machine, system and versions."""
    cpu = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "?")
    memory_kib = next(int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal"))
    file_system = subprocess.run(
        ["stat", "-f", "-c", "%T", folder], check=True, capture_output=True, text=True
    ).stdout.strip()
    huge_pages = _lines("/sys/kernel/mm/transparent_hugepage/enabled")
    versions = {
        "reshard": reshard.__version__,
        "safetensors": safetensors.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "Python": platform.python_version(),
    }
    return {
        "date": dt.datetime.now(tz=dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{cpu}, {len(os.sched_getaffinity(0))} processors, {memory_kib / 2**20:.0f} GiB",
        "system": f"Linux {platform.release()}, {file_system}, huge pages {' '.join(huge_pages)}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "load average before": " ".join(f"{load:.2f}" for load in os.getloadavg()),
    }


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.exists() else []


def say(text: str) -> None:
    """Show progress at a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
