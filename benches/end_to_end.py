"""Loads and conversions of a model from end to end, beside their yardsticks in the same run; every result is checked.

    python benches/end_to_end.py [--size-gb 3] [--dir DIR] [--rounds 5] [--wait SECONDS] [--json] [--quick]

GB/s are 10^9 useful bytes a second: of what was asked for, not of what had to be read for it. Each is the median over
rounds; a round runs every case once, in an order that is drawn anew. See README.md for what the yardsticks are.
"""

from __future__ import annotations

import argparse
import datetime as dt
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
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors
import torch

import cases
import fresh
import model
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
    """The seconds of a case, one a round; 0 bytes: nothing is moved, and only the time says something.

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


@dataclass(frozen=True)
class Target:
    """How fast a case must be: a factor of the rate of another one."""

    case: str
    yardstick: str
    factor: float


TARGETS = [
    Target("slices: map", "slices: stock safetensors", 1.5),
    Target("slices: map", "slices: plain map copy, fresh", 0.8),
    Target("merge", "cp -r", 0.8),
    Target("split", "cp -r", 0.8),
]


def main() -> None:
    """Parse the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-gb", type=float, default=3, help="size of the model (default: 3)")
    parser.add_argument("--dir", type=Path, help="where to put the model and what is made of it, 4 x its size")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each case (default: 5)")
    parser.add_argument(
        "--wait",
        type=float,
        default=0,
        help="seconds to wait before each run for other processes to rest; a run that they disturb nevertheless is "
        f"repeated, {_ATTEMPTS - 1} times at most (default: 0, no wait and no repetition)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--quick", action="store_true", help="0.3 GB and 1 round: shows that it runs, measures nothing")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.size_gb, arguments.rounds = 0.3, 1
    machine = describe_machine(arguments.dir or Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix="reshard-bench-", dir=arguments.dir) as folder:
        results = measure(Path(folder), arguments.size_gb, arguments.rounds, arguments.wait)
    machine["disturbed"] = f"{sum(r.n_disturbed for r in results)} of {sum(len(r.seconds) for r in results)} runs"
    if arguments.json:
        print(json.dumps({"machine": machine, "results": [asdict(r) for r in results], "targets": judge(results)}))
        return
    print("\n".join(f"{name}: {value}" for name, value in machine.items()))
    print_tables(results)
    print_targets(judge(results))


def measure(folder: Path, size_gb: float, n_rounds: int, wait_seconds: float) -> list[Result]:
    """All tables, on a model that is made in the folder."""
    hf, tree, target = folder / "hf", folder / "tp4", folder / "out"
    hf.mkdir()
    path = hf / "model.safetensors"
    say(f"writing a model of {size_gb:g} GB")
    fresh.run(model.write, path, size_gb)
    subprocess.run(["sync", "-f", path], check=True)
    fresh.run(cases.split, hf, tree, path, durable=False)
    own_bytes, all_bytes = model.own_bytes(path, cases.RANK), sum(a.nbytes for a in model.read(path).values())

    def case(name: str, n_bytes: int, function: Callable[..., float], *arguments: Any) -> Case:
        return Case(name, n_bytes, lambda: fresh.run(function, *arguments))

    def writing(name: str, function: Callable[..., float], source: Path, *, durable: bool = False) -> Case:
        def run() -> float:
            cases.remove(target)
            return fresh.run(function, source, target, path, durable=durable)

        return Case(name, all_bytes, run)

    tables = {
        f"slices of rank {cases.RANK} of {model.N_RANKS}, tensor parallel": [
            case("slices: map", own_bytes, cases.load_rank, path, "map"),
            case("slices: read", own_bytes, cases.load_rank, path, "read"),
            case("slices: stock safetensors", own_bytes, cases.load_rank_stock, path),
            case("slices: plain map copy, fresh", own_bytes, cases.copy_plain, path, own_bytes, "fresh"),
            case("slices: plain map copy, warm", own_bytes, cases.copy_plain, path, own_bytes, "warm"),
            case("slices: memcpy, warm", own_bytes, cases.copy_memory, path, own_bytes),
        ],
        "whole tensors": [
            case("whole: map", all_bytes, cases.load_whole, path, "map"),
            case("whole: read", all_bytes, cases.load_whole, path, "read"),
            case("whole: stock safetensors", all_bytes, cases.load_whole_stock, path),
            case("whole: plain map copy, fresh", all_bytes, cases.copy_plain, path, all_bytes, "fresh"),
            case("whole: into given memory, warm", all_bytes, cases.load_given, path),
            case("whole: plain map copy, warm", all_bytes, cases.copy_plain, path, all_bytes, "warm"),
            case("whole: views", 0, cases.load_views, path),
        ],
        "file to file": [
            writing("merge", cases.merge, tree),
            writing("split", cases.split, hf),
            writing("cp -r", cases.cp, hf),
            writing("merge, durable", cases.merge, tree, durable=True),
            writing("split, durable", cases.split, hf, durable=True),
            writing("cp -r; sync -f", cases.cp, hf, durable=True),
        ],
    }
    return [r for name, table in tables.items() for r in run_interleaved(name, table, n_rounds, wait_seconds)]


def run_interleaved(table: str, all_cases: list[Case], n_rounds: int, wait_seconds: float) -> list[Result]:
    """Every case once a round, so that what disturbs the machine for a while disturbs them all."""
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
    """Whether the machine runs nothing but this for a tenth of a second, within the time to wait."""
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


def judge(results: list[Result]) -> list[dict[str, Any]]:
    """What became of the targets."""
    rates = {result.name: result.rate for result in results}
    return [
        asdict(target)
        | {"found": (found := rates[target.case] / rates[target.yardstick]), "ok": found >= target.factor}
        for target in TARGETS
    ]


def print_tables(results: list[Result]) -> None:
    """One table after the other, as Markdown."""
    for table in dict.fromkeys(result.table for result in results):
        print(f"\n| {table} | GB | GB/s | seconds: median (least to most) |\n|---|---:|---:|---:|")
        for result in (r for r in results if r.table == table):
            size, rate = (f"{result.n_bytes / 1e9:.2f}", f"{result.rate:.2f}") if result.n_bytes else ("-", "-")
            spread = f"{result.median:.4f} ({min(result.seconds):.4f} to {max(result.seconds):.4f})"
            print(f"| {result.name.split(': ')[-1]} | {size} | {rate} | {spread} |")


def print_targets(judged: list[dict[str, Any]]) -> None:
    """One line a target."""
    print("\n| target | wanted | found | |\n|---|---:|---:|---|")
    for target in judged:
        verdict = "ok" if target["ok"] else "MISSED"
        print(f"| {target['case']} / {target['yardstick']} | {target['factor']} | {target['found']:.2f} | {verdict} |")


def describe_machine(folder: Path) -> dict[str, str]:
    """What the figures depend on."""
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
    """Tell a person at a terminal what is going on."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
