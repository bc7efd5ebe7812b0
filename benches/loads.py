"""Loads and conversions of a model from end to end, compared with yardsticks in the same run. Every result is checked.

    python benches/loads.py [--size-gb 3] [--dir DIR] [--rounds 5] [--wait SECONDS] [--json] [--quick]

GB/s are 10^9 useful bytes per second: bytes that were requested, not bytes that were read for them. Each is the median
over rounds; a round runs every case once, in random order. README.md describes the yardsticks.
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

import load_cases
import fresh
import model
from table import Case, Result, Run, Target, main, say

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TARGETS = [
    Target("slices: map", ("slices: stock safetensors",), 1.5),
    Target("slices: map", ("slices: plain map copy, fresh",), 0.8),
    Target("merge", ("cp -r",), 0.8),
    Target("split", ("cp -r",), 0.8),
]


def measure(folder: Path, size_gb: float, run_table: Run) -> list[Result]:
    """Measure all tables, on a model that is written to the folder."""
    hf, tree, target = folder / "hf", folder / "tp4", folder / "out"
    hf.mkdir()
    path = hf / "model.safetensors"
    say(f"writing a model of {size_gb:g} GB")
    fresh.run(model.write, path, size_gb)
    subprocess.run(["sync", "-f", path], check=True)
    fresh.run(load_cases.split, hf, tree, path, durable=False)
    own_bytes, all_bytes = model.own_bytes(path, load_cases.RANK), sum(a.nbytes for a in model.read(path).values())

    def case(name: str, n_bytes: int, function: Callable[..., float], *arguments: Any) -> Case:
        return Case(name, n_bytes, lambda: fresh.run(function, *arguments))

    def writing(name: str, function: Callable[..., float], source: Path, *, durable: bool = False) -> Case:
        def run() -> float:
            load_cases.remove(target)
            return fresh.run(function, source, target, path, durable=durable)

        return Case(name, all_bytes, run)

    tables = {
        f"slices of rank {load_cases.RANK} of {model.N_RANKS}, tensor parallel": [
            case("slices: map", own_bytes, load_cases.load_rank, path, "map"),
            case("slices: read", own_bytes, load_cases.load_rank, path, "read"),
            case("slices: stock safetensors", own_bytes, load_cases.load_rank_stock, path),
            case("slices: plain map copy, fresh", own_bytes, load_cases.copy_plain, path, own_bytes, "fresh"),
            case("slices: plain map copy, warm", own_bytes, load_cases.copy_plain, path, own_bytes, "warm"),
            case("slices: memcpy, warm", own_bytes, load_cases.copy_memory, path, own_bytes),
        ],
        "whole tensors": [
            case("whole: map", all_bytes, load_cases.load_whole, path, "map"),
            case("whole: read", all_bytes, load_cases.load_whole, path, "read"),
            case("whole: stock safetensors", all_bytes, load_cases.load_whole_stock, path),
            case("whole: plain map copy, fresh", all_bytes, load_cases.copy_plain, path, all_bytes, "fresh"),
            case("whole: into given memory, warm", all_bytes, load_cases.load_given, path),
            case("whole: plain map copy, warm", all_bytes, load_cases.copy_plain, path, all_bytes, "warm"),
            case("whole: views", 0, load_cases.load_views, path),
        ],
        "file to file": [
            writing("merge", load_cases.merge, tree),
            writing("split", load_cases.split, hf),
            writing("cp -r", load_cases.cp, hf),
            writing("merge, durable", load_cases.merge, tree, durable=True),
            writing("split, durable", load_cases.split, hf, durable=True),
            writing("cp -r; sync -f", load_cases.cp, hf, durable=True),
        ],
    }
    return [result for name, table in tables.items() for result in run_table(name, table)]


if __name__ == "__main__":
    main(__doc__, TARGETS, measure)
