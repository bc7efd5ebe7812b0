"""Loads of a rank's slices and of the whole model, into fresh memory and into memory of the caller; and from a disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benches import fresh, load_cases, model
from benches.load_cases import N_THREADS, RANK
from benches.sources import create
from benches.table import Case, Table, Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from benches.load_cases import Cut, Into
    from benches.sources import Sources
    from benches.table import Kind

_NAMES = {
    "slices": f"slices of rank {RANK} of {model.N_RANKS}, tensor parallel",
    "whole": "whole model",
}
_INTO = {"fresh": "fresh memory", "huge": "given memory", "4 KiB": "given memory in 4 KiB pages"}
_NUMPY = f"numpy, {N_THREADS} threads"
_FASTEST = (_NUMPY, "safetensors", "torch DCP", "torch DCP, safetensors file")


def slices(sources: Sources) -> list[Table]:
    """A rank's slices into fresh memory."""
    create(sources, "dcp")
    targets = (Target("reshard", ("map copy",), 0.9), Target("reshard", ("safetensors",), 1.7))
    return [Table(_name("slices", "fresh"), _cases(sources, "slices", "fresh"), targets)]


def slices_given(sources: Sources) -> list[Table]:
    """A rank's slices into memory of the caller, in huge pages and in pages of 4 KiB."""
    return _given(sources, "slices", (Target("reshard", _FASTEST, 1.0), Target("reshard", ("map copy",), 0.85)))


def whole(sources: Sources) -> list[Table]:
    """The whole model into fresh memory."""
    create(sources, "dcp", "orbax")

    def case(name: str, function: Callable[..., float]) -> Case:
        return Case(name, sources.n_bytes(), lambda: fresh.run(function, sources), "peer")

    more = [
        case("fastsafetensors", load_cases.fastsafetensors),
        case("Run:ai model streamer", load_cases.run_ai),
        case("Orbax", load_cases.orbax),
        Case("reshard, views (copy=False)", 0, lambda: fresh.run(load_cases.views, sources)),
    ]
    targets = (Target("reshard", ("map copy",), 0.85),)
    return [Table(_name("whole", "fresh"), _cases(sources, "whole", "fresh") + more, targets)]


def whole_given(sources: Sources) -> list[Table]:
    """The whole model into memory of the caller, in huge pages and in pages of 4 KiB."""
    return _given(sources, "whole", (Target("reshard", _FASTEST, 1.0),))


def cold(sources: Sources) -> list[Table]:
    """Loads of a file that is not in the page cache, and the bytes that they read."""
    create(sources)
    tables = []
    for cut, name in _NAMES.items():
        n_bytes = _n_bytes(sources, cut)
        reading = Case("read of the whole file", sources.n_bytes(), _run(load_cases.read_cold, sources), "limit")
        timed = [Case(one, n_bytes, _run(load_cases.cold, sources, cut, library), kind) for one, library, kind in _COLD]
        counted = [
            Case(one, 0, _run(load_cases.cold_bytes, sources, cut, library), kind, "bytes")
            for one, library, kind in _COLD
        ]
        needed = Case("pages that are needed", 0, _run(load_cases.pages, sources, cut), "limit", "bytes")
        tables += [
            Table(
                f"{name}, from the disk",
                [*timed, reading],
                (Target("reshard", ("read of the whole file",), 0.6),),
            ),
            Table(
                f"{name}, bytes read from the disk",
                [*counted, needed],
                (Target("reshard", ("pages that are needed",), 1 / 1.05),),
            ),
        ]
    whole = Case("read of the whole file", sources.n_bytes(), _run(load_cases.read_cold, sources), "limit")
    together = [Case(one, sources.n_bytes(), _run_of_all(sources, library), kind) for one, library, kind in _COLD]
    name = f"slices of {model.N_RANKS} ranks at the same time, from the disk"
    return [*tables, Table(name, [*together, whole])]


def _run_of_all(sources: Sources, library: str) -> Callable[[], float]:
    return lambda: fresh.run_together(model.N_RANKS, load_cases.cold_of_all, sources, library)


_COLD: list[tuple[str, str, Kind]] = [
    ("reshard", "reshard", "reshard"),
    ("safetensors", "safetensors", "peer"),
    (_NUMPY, "numpy", "peer"),
]


def _given(sources: Sources, cut: Cut, targets: tuple[Target, ...]) -> list[Table]:
    create(sources, "dcp")
    tables = []
    for into in ("huge", "4 KiB"):
        cases = _cases(sources, cut, into)
        n_bytes = _n_bytes(sources, cut)
        if into == "huge":
            cases.append(
                Case("memory to memory", n_bytes, _run(load_cases.copy_memory, sources.path, n_bytes), "limit")
            )
        tables.append(Table(_name(cut, into), cases, targets))
    return tables


def _cases(sources: Sources, cut: Cut, into: Into) -> list[Case]:
    n_bytes = _n_bytes(sources, cut)

    def case(name: str, function: Callable[..., float], *more: Any, kind: Kind = "peer") -> Case:
        return Case(name, n_bytes, _run(function, sources, cut, into, *more), kind)

    found = [case("reshard", load_cases.reshard_, kind="reshard")]
    if into == "fresh":
        found.append(case("reshard, method=read", load_cases.reshard_, "read", kind="reshard"))
    return [
        *found,
        case("safetensors", load_cases.safetensors_),
        case(_NUMPY, load_cases.numpy_),
        case("torch DCP", load_cases.dcp_, "torch"),
        case("torch DCP, safetensors file", load_cases.dcp_, "hf"),
        case("torch DCP, reshard's Reader", load_cases.dcp_, "reshard", kind="reshard"),
        Case("map copy", n_bytes, _run(load_cases.copy_plain, sources.path, n_bytes, into), "limit"),
    ]


def _run(function: Callable[..., float], *arguments: Any) -> Callable[[], float]:
    return lambda: fresh.run(function, *arguments)


def _name(cut: Cut, into: Into) -> str:
    return f"{_NAMES[cut]}, into {_INTO[into]}"


def _n_bytes(sources: Sources, cut: Cut) -> int:
    return sources.n_bytes() if cut == "whole" else model.own_bytes(sources.path, RANK)
