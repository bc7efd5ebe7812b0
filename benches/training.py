"""The cost of background saves in a training loop: the time of its steps, and how long `Checkpointer.step` blocks it.

The loop computes with one thread less than there are processors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from benches import convert_cases, fresh, load_cases, training_cases
from benches.table import Case, Table, Target

if TYPE_CHECKING:
    from benches.sources import Sources
    from benches.table import Kind


def training(sources: Sources) -> list[Table]:
    """Steps and stalls; each round is one process, so that consecutive steps are compared."""
    n_layers, n_steps = training_cases.n_layers(sources.size_gb), round(min(20, 20 * sources.size_gb))
    n_bytes = n_layers * training_cases.LAYER_BYTES
    sources.folder.mkdir()
    content, root = sources.folder / "content", sources.folder / "root"
    np.random.default_rng(0).integers(0, 256, n_bytes, np.uint8).tofile(content)
    left: dict[str, float] = {}

    def timed(name: str) -> float:
        if name not in left:
            convert_cases.remove(root)
            left.update(fresh.run(training_cases.train, root, n_layers, n_steps))
        return left.pop(name)

    def case(name: str, n: int, kind: Kind = "reshard") -> Case:
        return Case(name, n, lambda: timed(name), kind)

    return [
        Table(
            f"steps of a state of {n_bytes / 1e9:.2f} GB, {n_steps} an interval",
            [
                case("step, no save", 0, "limit"),
                case("step, one save in an interval", 0),
                case("step, one save in an interval, overlap", 0),
                case("step, save in flight", 0),
                case("step, save in flight, overlap", 0),
            ],
            (
                Target("step, one save in an interval", ("step, no save",), 1 / 1.03),
                Target("step, one save in an interval, overlap", ("step, no save",), 1 / 1.03),
            ),
        ),
        Table(
            "how long a save blocks the loop",
            [
                case("stall of `step`", n_bytes),
                case("stall of `step`, overlap", 0),
                case("stall of `step`, the first time", n_bytes),
                Case("memory to memory", n_bytes, lambda: fresh.run(load_cases.copy_memory, content, n_bytes), "limit"),
            ],
            (Target("stall of `step`", ("memory to memory",), 1 / 1.1),),
        ),
    ]
