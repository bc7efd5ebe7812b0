"""The modules of the Rust core stand in one order: that in which `lib.rs` declares them."""

import re
from pathlib import Path

CORE = Path(__file__).parents[2] / "rust/core"


def without_tests_and_comments(source: str) -> str:
    """Rust source without line comments and without the test module, which is at the end of a file."""
    source = re.sub(r"//.*", "", source)
    return source.split("#[cfg(test)]\nmod ")[0]


def used_modules(source: str) -> set[str]:
    """Paths of modules of the crate that a source file names, as `crate::x::y` or inside `crate::{x, y::z}`."""
    source = without_tests_and_comments(source)
    used = set(re.findall(r"\bcrate::([a-z]\w*(?:::[a-z]\w*)?)", source))
    for group in re.findall(r"\bcrate::\{((?:[^{}]|\{[^{}]*\})*)\}", source):
        used |= set(re.findall(r"(?:^|,)\s*([a-z]\w*(?:::[a-z]\w*)?)", re.sub(r"\{[^{}]*\}", "", group)))
    return used


def declared_modules(lib: str) -> list[str]:
    """The modules that `lib.rs` declares, in its order: `x`, or `folder::x` for those of a folder."""
    declared, folder = [], ""
    for line in without_tests_and_comments(lib).splitlines():
        if found := re.match(r"\s*(?:pub |pub\(crate\) )?mod (\w+)( \{|;)$", line.rstrip()):
            if found[2] == ";":
                declared.append(folder + found[1])
            else:
                folder = f"{found[1]}::"
        elif line == "}":
            folder = ""
    return declared


def module_of(path: str, declared: list[str]) -> str | None:
    """The declared module with a path, or that contains it."""
    parts = path.split("::")
    return next((name for name in ("::".join(parts[:2]), parts[0]) if name in declared), None)


def sources_of(core: Path) -> dict[str, str]:
    """For each declared module the text of its files, those of submodules included."""
    declared = declared_modules((core / "lib.rs").read_text())
    sources = dict.fromkeys(declared, "")
    for path in sorted(core.rglob("*.rs")):
        name = "::".join(path.relative_to(core).with_suffix("").parts)
        if name != "lib":
            module = module_of(name, declared)
            assert module is not None, f"lib.rs does not declare {path}"
            sources[module] += without_tests_and_comments(path.read_text())
    return sources


def graph_of(core: Path) -> dict[str, set[str]]:
    """For each declared module, with its submodules, the other declared modules that it uses.

    A path that is none of a declared module, as that of a folder or of a module without its folder, is kept as it is.
    """
    sources = sources_of(core)
    declared = list(sources)
    return {
        module: {module_of(path, declared) or path for path in used_modules(source)} - {module}
        for module, source in sources.items()
    }


def uses_of_later_modules(core: Path) -> list[str]:
    """Each use of a module that is not declared above the one that uses it."""
    graph = graph_of(core)
    above: set[str] = set()
    found = []
    for module, used in graph.items():
        found += [f"{module} uses {other}" for other in sorted(used - above)]
        above.add(module)
    return found


def test_the_modules_of_the_core_use_only_modules_above_them() -> None:
    graph = graph_of(CORE)
    assert len(graph) > 20, "the modules were not found"
    assert {"planning::plan", "check::verify", "error"} <= graph["read::copy"], "the uses were not found"
    assert uses_of_later_modules(CORE) == []


def test_a_folder_is_declared_once() -> None:
    folders = [name.split("::")[0] for name in declared_modules((CORE / "lib.rs").read_text())]
    assert {"geometry", "write"} <= set(folders), "the folders were not found"
    neighbours = [folder for folder, before in zip(folders, ["", *folders], strict=False) if folder != before]
    assert len(neighbours) == len(set(neighbours))


def test_the_check_finds_every_form_of_use_of_a_later_module(tmp_path: Path) -> None:
    def check(lib: str, **sources: str) -> list[str]:
        for old in tmp_path.rglob("*.rs"):
            old.unlink()
        (tmp_path / "lib.rs").write_text(lib)
        for name, source in sources.items():
            path = tmp_path / (name.replace("__", "/") + ".rs")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        return uses_of_later_modules(tmp_path)

    flat = "pub mod c;\nmod b;\npub(crate) mod a;\n"
    assert check(flat, a="use crate::b::B;", b="use crate::c;", c="fn f() { crate::a::g() }") == ["c uses a"]
    assert check(flat, a="", b="", c="use crate::{\n    Kind,\n    x::{y, z},\n    b,\n};") == ["c uses b", "c uses x"]
    assert check(flat, a="", c="", c__part="use crate::b::B;", b="") == ["c uses b"]
    assert (
        check(flat, a="", b="use crate::c::C;", c="/// [`crate::a`]\n#[cfg(test)]\nmod tests { use crate::a; }") == []
    )
    folders = "/// F.\npub mod f {\n    pub mod c;\n\n    mod b;\n}\n\npub mod g {\n    pub mod a;\n}\npub use f::c;\n"
    assert check(folders, g__a="use crate::f::{b, c};", f__b="use crate::f::c::C;", f__c="") == ["g::a uses f"]
    assert check(folders, g__a="use crate::c::C;", f__b="", f__c="use crate::g::a::A;") == [
        "f::c uses g::a",
        "g::a uses c",
    ]
    assert check(folders, g__a="", f__b="", f__c="use crate::error::E;", f__c__part="use crate::f::b;") == [
        "f::c uses error",
        "f::c uses f::b",
    ]


def test_only_sources_and_writers_open_files() -> None:
    """Other modules read from a `Source`, so that a file can be an object in a store."""
    opening = re.compile(r"\bFileExt\b|\bMmap\b|rustix::fs::open|\bstd::fs\b")
    assert {name for name, source in sources_of(CORE).items() if opening.search(source)} == {
        "files::source",
        "write::writer",
        "write::small_files",
    }
