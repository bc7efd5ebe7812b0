"""Durable saves, saves of small models, saves in the background; and loads that compare checksums."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from benches import convert_cases, fresh, load_cases, save_cases
from benches.sources import create
from benches.table import Case, Table, Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from benches.sources import Sources
    from benches.table import Kind

_CUTS: tuple[save_cases.Cut, ...] = ("whole", "rows", "columns")
_SMALL_BYTES = {"1 MB": 10**6, "10 MB": 10**7, "100 MB": 10**8, "1 GB": 10**9}


def saves(sources: Sources) -> list[Table]:
    """Durable saves of the model by one process, and by two that each hold half of the rows."""
    create(sources)
    raw = ("raw, direct", "raw, buffered")
    targets = (Target("reshard", raw, 0.9), Target("reshard", ("torch DCP, files synced",), 2.0))
    first = (Target("reshard, first save of the process", raw, 0.9),)
    tables = [
        Table(f"durable save, {_processes(n)}", _saves(sources, n), targets + (first if n == 1 else ())) for n in (1, 2)
    ]
    return [*tables, *_looks(sources)]


def _looks(sources: Sources) -> list[Table]:
    """What the look for values that are not finite adds to a background save, and to the time its caller waits."""

    def case(name: str, what: Literal["stall", "save"], *, is_float: bool) -> Case:
        def run() -> float:
            _remove(sources)
            return fresh.run(save_cases.look, sources, what, is_float=is_float)

        return Case(name, sources.n_bytes(), run)

    names = ("floats", "the same bytes as integers")
    heads: dict[Literal["stall", "save"], str] = {
        "save": "save in the background, with the look for values that are not finite",
        "stall": "the same, while its caller is blocked",
    }
    return [
        Table(
            head,
            [case(names[0], what, is_float=True), case(names[1], what, is_float=False)],
            (Target(names[0], (names[1],), 0.95),),
        )
        for what, head in heads.items()
    ]


def _saves(sources: Sources, n: int) -> list[Case]:
    def case(name: str, kind: Kind, function: Callable[..., tuple[float, float]], *arguments: Any) -> Case:
        def run() -> float:
            _remove(sources)
            return fresh.run_together(n, function, sources, *arguments)

        return Case(name, sources.n_bytes(), run, kind)

    found = [
        case("reshard", "reshard", save_cases.save),
        case("safetensors, synced", "peer", save_cases.save_safetensors),
        case("torch DCP, files synced", "peer", save_cases.save_dcp, "torch"),
        case("torch DCP, reshard's Writer", "reshard", save_cases.save_dcp, "reshard"),
        case("raw, direct", "limit", save_cases.write_raw, "direct"),
        case("raw, buffered", "limit", save_cases.write_raw, "buffered"),
    ]
    if n == 1:
        first = partial(save_cases.save, first=True)
        found.insert(1, case("reshard, first save of the process", "reshard", first))
        found.append(case("Orbax", "peer", save_cases.save_orbax))
    return found


def small_saves(sources: Sources) -> list[Table]:
    """Durable saves of models up to the size that is measured: what a save costs beyond its bytes."""
    sources.folder.mkdir()
    tables = []
    for size, n_bytes in _SMALL_BYTES.items():
        if n_bytes > sources.size_gb * 1e9:
            break

        def run(library: str, n_bytes: int = n_bytes) -> float:
            _remove(sources)
            return fresh.run(save_cases.save_small, sources, n_bytes, library)

        cases = [
            Case("reshard", n_bytes, lambda run=run: run("reshard")),
            Case("torch DCP, files synced", n_bytes, lambda run=run: run("torch DCP"), "peer"),
        ]
        tables.append(Table(f"durable save of {size}", cases, (Target("reshard", ("torch DCP, files synced",), 1.0),)))
    return tables


def background(sources: Sources) -> list[Table]:
    """How long a save in the background blocks its caller."""
    create(sources)
    n_bytes = sources.n_bytes()

    def ours(number: int) -> float:
        _remove(sources)
        return fresh.run(save_cases.stall, sources, number)

    def theirs(number: int) -> float:
        _remove(sources)
        return fresh.run_together(1, save_cases.stall_dcp, sources, number)

    cases = [
        Case("reshard, the first save", n_bytes, lambda: ours(1)),
        Case("reshard, a later save", n_bytes, lambda: ours(2)),
        Case("torch DCP, the first save", n_bytes, lambda: theirs(1), "peer"),
        Case("torch DCP, a later save", n_bytes, lambda: theirs(2), "peer"),
        Case("memory to memory", n_bytes, lambda: fresh.run(load_cases.copy_memory, sources.path, n_bytes), "limit"),
    ]
    targets = (
        Target("reshard, a later save", ("memory to memory",), 1 / 1.1),
        Target("reshard, a later save", ("torch DCP, a later save",), 1.0),
        Target("reshard, the first save", ("memory to memory",), 1 / 2),
        Target("reshard, the first save", ("torch DCP, the first save",), 1.0),
    )
    return [Table("save in the background: the caller is blocked", cases, targets)]


def verified(sources: Sources) -> list[Table]:
    """Loads that compare checksums, beside loads that do not."""
    create(sources, "root")
    (file,) = sources.at("root").rglob("*.safetensors")
    n_bytes = {cut: save_cases.own_bytes(sources.path, cut) for cut in _CUTS}

    def loading(into: str, cut: str, verify: str) -> Case:
        name = cut if verify == "touched" else f"{cut}, unverified"
        return Case(name, n_bytes[cut], lambda: fresh.run(save_cases.load, sources, cut, verify, into))

    def copying(cut: str) -> Case:
        run = lambda: fresh.run(load_cases.copy_plain, file, n_bytes[cut], "huge")  # noqa: E731  one line of three
        return Case(f"map copy of the {cut}", n_bytes[cut], run, "limit")

    part = f"part {save_cases.PART} of {save_cases.N_PARTS}"
    return [
        Table(
            f"verified load into fresh memory; rows and columns: {part}",
            [loading("fresh", cut, verify) for cut in _CUTS for verify in ("touched", "structure")],
            tuple(
                Target(cut, (f"{cut}, unverified",), factor)
                for cut, factor in zip(_CUTS, (0.85, 0.85, 0.5), strict=True)
            ),
        ),
        Table(
            "verified load into given memory",
            [one for cut in ("whole", "rows") for one in (loading("given", cut, "touched"), copying(cut))],
            tuple(Target(cut, (f"map copy of the {cut}",), 1.0) for cut in ("whole", "rows")),
        ),
    ]


def _remove(sources: Sources) -> None:
    convert_cases.remove(sources.target)
    convert_cases.remove(sources.target.with_suffix(".first"))
    convert_cases.remove(sources.small.target)
    sources.target.with_suffix(".store").unlink(missing_ok=True)


def _processes(n: int) -> str:
    return "1 process" if n == 1 else f"{n} processes"
