"""The module graph of the Rust core has no cycle."""

import re
from pathlib import Path

CORE = Path(__file__).parent.parent / "rust/core"


def without_tests_and_comments(source: str) -> str:
    """Rust source without line comments and without the test module, which is at the end of a file."""
    source = re.sub(r"//.*", "", source)
    return source.split("#[cfg(test)]\nmod ")[0]


def used_modules(source: str) -> set[str]:
    """Names of the modules of the crate that a source file names, as `crate::x` or inside `crate::{x, y::z}`."""
    source = without_tests_and_comments(source)
    used = set(re.findall(r"\bcrate::([a-z]\w*)", source))
    for group in re.findall(r"\bcrate::\{((?:[^{}]|\{[^{}]*\})*)\}", source):
        used |= set(re.findall(r"(?:^|,)\s*([a-z]\w*)", re.sub(r"\{[^{}]*\}", "", group)))
    return used


def graph_of(core: Path) -> dict[str, set[str]]:
    """For each top-level module, with its submodules, the other top-level modules that it uses."""
    graph: dict[str, set[str]] = {}
    for path in sorted(core.rglob("*.rs")):
        module = path.relative_to(core).with_suffix("").parts[0]
        if module != "lib":
            graph.setdefault(module, set()).update(used_modules(path.read_text()))
    return {module: (used & graph.keys()) - {module} for module, used in graph.items()}


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """A cycle of modules, the first one repeated at the end; empty if there is none."""
    finished: set[str] = set()

    def search(path: list[str]) -> list[str]:
        for used in sorted(graph[path[-1]] - finished):
            if used in path:
                return [*path[path.index(used) :], used]
            if found := search([*path, used]):
                return found
        finished.add(path[-1])
        return []

    return next((found for module in sorted(graph) if (found := search([module]))), [])


def test_the_modules_of_the_core_have_no_cycle() -> None:
    graph = graph_of(CORE)
    assert len(graph) > 20, "the modules were not found"
    assert {"plan", "verify", "error"} <= graph["copy"], "the uses were not found"
    assert cycle_in(graph) == []


def test_the_check_finds_a_cycle_through_every_form_of_use(tmp_path: Path) -> None:
    def check(**sources: str) -> list[str]:
        for old in tmp_path.rglob("*.rs"):
            old.unlink()
        for name, source in sources.items():
            path = tmp_path / (name.replace("__", "/") + ".rs")
            path.parent.mkdir(exist_ok=True)
            path.write_text(source)
        return cycle_in(graph_of(tmp_path))

    assert check(a="use crate::b::B;", b="use crate::c;", c="fn f() { crate::a::g() }") == ["a", "b", "c", "a"]
    assert check(a="use crate::{\n    Kind,\n    x::{y, z},\n    b,\n};", b="use crate::a::A;") == ["a", "b", "a"]
    assert check(a="", a__part="use crate::b::B;", b="use crate::a::A;") == ["a", "b", "a"]
    assert check(a="use crate::b::B;", b="/// See [`crate::a`].\n#[cfg(test)]\nmod tests { use crate::a; }") == []


def test_only_sources_and_writers_open_files() -> None:
    """Other modules read from a `Source`, so that a file can be an object in a store."""
    opening = re.compile(r"\bFileExt\b|\bMmap\b|rustix::fs::open|\bstd::fs\b")
    modules = {path.stem: without_tests_and_comments(path.read_text()) for path in CORE.rglob("*.rs")}
    assert {name for name, source in modules.items() if opening.search(source)} == {"source", "writer", "small_files"}
