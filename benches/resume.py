"""Resuming a torch training state: `Checkpointer.resume`, which compares checksums, beside `dcp.load`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benches import fresh, training_cases
from benches.table import Case, Table, Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from benches.sources import Sources


def resume(sources: Sources) -> list[Table]:
    """A model of linear layers and AdamW, one process, files in the page cache, new objects."""
    n_layers = training_cases.n_layers(sources.size_gb)
    n_bytes = n_layers * training_cases.LAYER_BYTES
    sources.folder.mkdir()
    for library in ("reshard", "dcp"):
        fresh.run(training_cases.save_for_resume, sources.folder, n_layers, library)

    def case(name: str, kind: str, function: Callable[..., float], *arguments: bool) -> Case:
        return Case(name, n_bytes, lambda: fresh.run(function, sources.folder, n_layers, *arguments), kind)

    cases = [
        case("Checkpointer.resume, verified", "reshard", training_cases.resume),
        case("dcp.load into the state", "peer", training_cases.load_dcp, False),
        case("dcp.load with get_ and set_state_dict", "peer", training_cases.load_dcp, True),
    ]
    targets = (Target("Checkpointer.resume, verified", ("dcp.load into the state",), 1.0),)
    return [Table("resume of model and AdamW", cases, targets)]
