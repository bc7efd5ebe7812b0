"""Every dependency of a Rust crate is used by it."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

CRATES = {
    ".": (["rust/core"], ["rust/core", "tests", "benches"]),
    "rust/formats": (["rust/formats/src"], ["rust/formats/src", "rust/formats/tests"]),
    "rust/python": (["rust/python/src"], ["rust/python/src"]),
    "rust/remote": (["rust/remote/src"], ["rust/remote/src"]),
}
"""For each crate the folders of its sources, and those of its sources and tests."""


def unused(names: set[str], source: str) -> set[str]:
    """The crates of which Rust source has no path."""
    source = re.sub(r"//.*", "", source)
    used = set(re.findall(r"\b(\w+)(?:::|;|\s+as\s)", source))
    return {name for name in names if name.replace("-", "_") not in used}


def source_of(folders: list[str]) -> str:
    return "\n".join(path.read_text() for folder in folders for path in sorted((ROOT / folder).rglob("*.rs")))


@pytest.mark.parametrize("crate", CRATES)
def test_dependencies_are_used(crate: str) -> None:
    manifest = tomllib.loads((ROOT / crate / "Cargo.toml").read_text())
    sources, with_tests = (source_of(folders) for folders in CRATES[crate])
    assert sources, "the sources were not found"
    assert unused(set(manifest["dependencies"]), sources) == set()
    assert unused(set(manifest.get("dev-dependencies", {})), with_tests) == set()


def test_every_crate_is_checked() -> None:
    workspace = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]
    assert set(CRATES) == {".", *workspace["members"]}


def test_the_check_knows_each_form_of_use() -> None:
    names = {"a-b", "c", "d", "e"}
    assert unused(names, "use a_b::X;\nuse c;\nfn f() { d::g() }\n// e::f") == {"e"}
    assert unused(names, "use crate::c_d;") == names
