"""Formats of PyTorch: conversions to Hugging Face with their memory, a rank's load from DCP, saves by `dcp.save`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benches import convert_cases, format_cases, fresh, model, save_cases
from benches.machine import LIBRARIES
from benches.sources import create
from benches.table import Case, Table, Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from benches.format_cases import Origin
    from benches.sources import Sources
    from benches.table import Kind

MOST_BYTES = (256 + 64) << 20
"""What a conversion may take: its buffers, and the interpreter with its modules."""


def dcp_to_huggingface(sources: Sources) -> list[Table]:
    """A folder of `dcp.save` to a Hugging Face model."""
    create(sources, "dcp")
    peers = [("dcp_to_torch_save, save_torch_state_dict", "torch")]
    return _conversions(sources, "dcp", "DCP to Hugging Face", sources.n_bytes(), peers)


def zero3_to_huggingface(sources: Sources) -> list[Table]:
    """The fp32 weights of a checkpoint of ZeRO-3 to a Hugging Face model."""
    create(sources, "zero3")
    return _conversions(
        sources, "zero3", "ZeRO-3 to Hugging Face", 2 * sources.n_bytes(), [("zero_to_fp32", "DeepSpeed")]
    )


def _conversions(
    sources: Sources, origin: Origin, name: str, n_bytes: int, peers: list[tuple[str, str]]
) -> list[Table]:
    def case(name: str, kind: Kind, library: str, *, durable: bool = False) -> Case:
        def run() -> float:
            convert_cases.remove(sources.target)
            LIBRARIES[library].require()
            return fresh.run(format_cases.convert, sources, origin, library, durable=durable)

        return Case(name, n_bytes, run, kind)

    def memory(name: str, kind: Kind, library: str) -> Case:
        def run() -> float:
            convert_cases.remove(sources.target)
            LIBRARIES[library].require()
            return format_cases.peak_bytes(sources, origin, library)

        return Case(name, 0, run, kind, "bytes")

    return [
        Table(
            name,
            [
                case("reshard", "reshard", "reshard"),
                case("reshard, durable", "reshard", "reshard", durable=True),
                *(case(peer, "peer", library) for peer, library in peers),
            ],
            (Target("reshard", tuple(peer for peer, _ in peers), 3.0),),
        ),
        Table(
            f"{name}: peak of private memory (RssAnon) of a new process",
            [memory("reshard", "reshard", "reshard"), *(memory(peer, "peer", library) for peer, library in peers)],
            (Target("reshard", at_most=MOST_BYTES),),
        ),
    ]


def dcp_rank(sources: Sources) -> list[Table]:
    """The slices of a rank from a folder of `dcp.save`, beside the same from a checkpoint of reshard; both mapped."""
    create(sources, "dcp", "root")
    n_bytes = model.own_bytes(sources.path, format_cases.RANK)

    def case(name: str, origin: Origin, verify: str) -> Case:
        return Case(name, n_bytes, lambda: fresh.run(format_cases.load, sources, origin, verify))

    cases = [case("DCP", "dcp", "structure"), case("reshard's format", "root", "structure")]
    verified = [case("DCP", "dcp", "touched"), case("reshard's format", "root", "touched")]
    name = f"slices of rank {format_cases.RANK} of {model.N_RANKS}"
    target = Target("DCP", ("reshard's format",), 0.8)
    return [Table(f"{name}, unverified", cases, (target,)), Table(f"{name}, verified", verified)]


def dcp_save(sources: Sources) -> list[Table]:
    """`dcp.save` by reshard's writer, with checksums, and by torch's, which syncs its files."""
    create(sources)

    def case(n: int, name: str, kind: Kind, function: Callable[..., tuple[float, float]], how: Any) -> Case:
        def run() -> float:
            for target in (sources.target, sources.small.target):
                convert_cases.remove(target)
            sources.target.with_suffix(".store").unlink(missing_ok=True)
            return fresh.run_together(n, function, sources, how)

        return Case(name, sources.n_bytes(), run, kind)

    def table(n: int) -> Table:
        cases = [
            case(n, "reshard's Writer", "reshard", save_cases.save_dcp, "reshard"),
            case(n, "FileSystemWriter, files synced", "peer", save_cases.save_dcp, "torch"),
            case(n, "raw, direct", "limit", save_cases.write_raw, "direct"),
        ]
        targets = (Target("reshard's Writer", ("FileSystemWriter, files synced",), 1.5),)
        return Table(f"durable dcp.save, {n} process{'es' if n > 1 else ''}", cases, targets)

    return [table(1), table(2)]
