"""The cost of background saves in a training loop: the time of its steps, and how long `Checkpointer.step` blocks it.

    python benches/training.py [--size-gb 1] [--dir DIR] [--rounds 3] [--wait SECONDS] [--json] [--quick]

The loop computes with one thread less than there are processors. See README.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

import load_cases
import fresh
import training_cases
from table import Case, Result, Run, Target, main

if TYPE_CHECKING:
    from pathlib import Path

TARGETS = [
    Target("step, one save in an interval", ("step, no save",), 1 / 1.05),
    Target("step, one save in an interval, overlap", ("step, no save",), 1 / 1.05),
    Target("stall of `step`", ("memcpy, warm",), 1 / 1.2),
]


def measure(folder: Path, size_gb: float, run_table: Run) -> list[Result]:
    """Measure all tables, each round in one process, so that consecutive steps are compared."""
    n_layers, n_steps = max(1, round(size_gb * 1e9 / training_cases.LAYER_BYTES)), round(min(20, 20 * size_gb))
    n_bytes = n_layers * training_cases.LAYER_BYTES
    content = folder / "content"
    np.random.default_rng(0).integers(0, 256, n_bytes, np.uint8).tofile(content)
    left: dict[str, float] = {}

    def timed(name: str) -> float:
        if name not in left:
            load_cases.remove(folder / "root")
            left.update(fresh.run(training_cases.train, folder / "root", n_layers, n_steps))
        return left.pop(name)

    def case(name: str, n: int) -> Case:
        return Case(name, n, lambda: timed(name))

    return [
        *run_table(
            f"steps of a state of {n_bytes / 1e9:.2f} GB, {n_steps} an interval",
            [
                case("step, no save", 0),
                case("step, one save in an interval", 0),
                case("step, one save in an interval, overlap", 0),
                case("step, save in flight", 0),
                case("step, save in flight, overlap", 0),
            ],
        ),
        *run_table(
            "how long a save blocks the loop",
            [
                case("stall of `step`", n_bytes),
                case("stall of `step`, overlap", 0),
                case("stall of `step`, the first time", n_bytes),
                Case("memcpy, warm", n_bytes, lambda: fresh.run(load_cases.copy_memory, content, n_bytes)),
            ],
        ),
    ]


if __name__ == "__main__":
    main(__doc__, TARGETS, measure, size_gb=1, rounds=3)
