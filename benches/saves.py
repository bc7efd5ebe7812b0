"""Durable saves and verified loads, compared with yardsticks in the same run. Every result is checked.

    python benches/saves.py [--size-gb 3] [--dir DIR] [--rounds 5] [--wait SECONDS] [--json] [--quick]

Durable saves are compared with raw writes of the same bytes, by one process and by two; the time that a background save
blocks its caller with a copy of the state; loads with verification with loads without. See README.md.
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

import load_cases
import save_cases
import fresh
import model
from table import Case, Result, Run, Target, main, say

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TARGETS = [
    Target("1 process: save", ("1 process: raw, direct", "1 process: raw, buffered"), 0.8),
    Target("2 processes: save", ("2 processes: raw, direct", "2 processes: raw, buffered"), 0.8),
    Target("stall", ("memcpy, warm",), 1 / 1.3),
    Target("fresh: whole", ("fresh: whole, unverified",), 0.8),
    Target("fresh: rows", ("fresh: rows, unverified",), 0.8),
    Target("fresh: columns", ("fresh: columns, unverified",), 0.45),
    Target("given: whole", ("given: plain map copy of the whole",), 1.0),
    Target("given: rows", ("given: plain map copy of the rows",), 1.0),
]


def measure(folder: Path, size_gb: float, run_table: Run) -> list[Result]:
    """Measure all tables, on a model that is written to the folder."""
    path, root, target = folder / "model.safetensors", folder / "root", folder / "out"
    say(f"writing a model of {size_gb:g} GB")
    fresh.run(model.write, path, size_gb)
    fresh.run(save_cases.publish, path, root)
    subprocess.run(["sync", "-f", path], check=True)
    n_bytes = {cut: save_cases.own_bytes(path, cut) for cut in ("whole", "rows", "columns")}
    file = load_cases.shard_files(root)[0]

    def saving(name: str, n: int, function: Callable[..., tuple[float, float]], *arguments: Any) -> Case:
        def run() -> float:
            load_cases.remove(target)
            target.with_suffix(".store").unlink(missing_ok=True)
            return fresh.run_together(n, function, path, target, *arguments)

        return Case(f"{'1 process' if n == 1 else f'{n} processes'}: {name}", n_bytes["whole"], run)

    def stalling() -> float:
        load_cases.remove(target)
        return fresh.run(save_cases.stall, path, target)

    def loading(into: str, cut: str, verify: str) -> Case:
        name = f"{into}: {cut}" if verify == "touched" else f"{into}: {cut}, unverified"
        return Case(name, n_bytes[cut], lambda: fresh.run(save_cases.load, path, root, cut, verify, into))

    def copying(name: str, cut: str) -> Case:
        return Case(name, n_bytes[cut], lambda: fresh.run(load_cases.copy_plain, file, n_bytes[cut], "warm"))

    tables = {
        f"durable, {n} process{'es' if n > 1 else ''}": [
            saving("save", n, save_cases.save),
            saving("raw, direct", n, save_cases.write_raw, "direct"),
            saving("raw, buffered", n, save_cases.write_raw, "buffered"),
        ]
        for n in (1, 2)
    } | {
        "save in the background": [
            Case("stall", n_bytes["whole"], stalling),
            Case("memcpy, warm", n_bytes["whole"], lambda: fresh.run(load_cases.copy_memory, path, n_bytes["whole"])),
        ],
        f"loads into fresh memory; shard {save_cases.PART} of {save_cases.N_PARTS}": [
            loading("fresh", cut, verify) for cut in n_bytes for verify in ("touched", "structure")
        ],
        "loads into given memory": [
            loading("given", "whole", "touched"),
            copying("given: plain map copy of the whole", "whole"),
            loading("given", "rows", "touched"),
            copying("given: plain map copy of the rows", "rows"),
        ],
    }
    return [result for name, table in tables.items() for result in run_table(name, table)]


if __name__ == "__main__":
    main(__doc__, TARGETS, measure)
