"""Files to files: four tensor-parallel files to one (merge), one to four (split), four to two; durable or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benches import convert_cases, fresh
from benches.sources import create
from benches.table import Case, Table, Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from benches.convert_cases import Task
    from benches.sources import Sources
    from benches.table import Kind


def merge(sources: Sources) -> list[Table]:
    """To one file of Hugging Face."""
    create(sources, "tree", "dcp_tree", "rank_folders")
    peers = [
        ("safetensors", convert_cases.safetensors_, ("merge",)),
        (f"numpy, {convert_cases.N_THREADS} threads", convert_cases.numpy_, ("merge",)),
        ("torch DCP, consolidation", convert_cases.dcp_merge, ()),
        ("MindSpore, unified_safetensors", convert_cases.mindspore_merge, ()),
    ]
    return _tables(sources, "merge", peers)


def split(sources: Sources) -> list[Table]:
    """To one file for each of four ranks."""
    create(sources)
    peers = [
        ("safetensors", convert_cases.safetensors_, ("split",)),
        (f"numpy, {convert_cases.N_THREADS} threads", convert_cases.numpy_, ("split",)),
    ]
    return _tables(sources, "split", peers)


def tp4_to_tp2(sources: Sources) -> list[Table]:
    """From the files of four ranks to those of two."""
    create(sources, "tree")
    return _tables(sources, "tp4 to tp2", [("safetensors", convert_cases.safetensors_, ("tp4 to tp2",))])


def _tables(
    sources: Sources, task: Task, peers: list[tuple[str, Callable[..., float], tuple[Any, ...]]]
) -> list[Table]:
    n_bytes = sources.n_bytes()

    def case(name: str, kind: Kind, function: Callable[..., float], *arguments: Any, **keywords: bool) -> Case:
        def run() -> float:
            convert_cases.remove(sources.target)
            return fresh.run(function, sources, *arguments, **keywords)

        return Case(name, n_bytes, run, kind)

    plain = [
        case("reshard", "reshard", convert_cases.reshard_, task, durable=False),
        *(case(name, "peer", function, *arguments) for name, function, arguments in peers),
        case("cp -r", "limit", convert_cases.cp, task, durable=False),
        case("parallel copy", "limit", convert_cases.copy_parallel, task, "buffered"),
    ]
    durable = [
        case("reshard", "reshard", convert_cases.reshard_, task, durable=True),
        case("cp -r; sync -f", "limit", convert_cases.cp, task, durable=True),
        case("cached read, direct write, fsync", "limit", convert_cases.copy_parallel, task, "direct"),
    ]
    return [
        Table(task, plain, (Target("reshard", ("cp -r", "parallel copy"), 0.9),)),
        Table(f"{task}, durable", durable, (Target("reshard", ("cached read, direct write, fsync",), 0.9),)),
    ]
