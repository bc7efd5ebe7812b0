"""The structure of the Python package: no file imports itself by way of others, formats are named in one place."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

import pytest

import reshard
from reshard.formats import registry
from reshard.formats.savable import save_traits
from reshard.formats.writers import WRITERS
from reshard.verbs.convert import Target

PACKAGE = Path(reshard.__file__).parent
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


def imports_of(text: str, own: str, modules: set[str]) -> set[str]:
    """The modules that a file imports anywhere: for type checkers and within functions, too."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in modules else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    # The package itself names its parts for type checkers and imports them when they are used.
    return (found & modules) - {own, "reshard"}


def cycle_of(graph: dict[str, set[str]]) -> list[str]:
    """Some modules that import each other in a circle; empty: there are none."""
    left = dict(graph)
    while True:
        free = [name for name, used in left.items() if not used & left.keys()]
        if not free:
            break
        for name in free:
            del left[name]
    if not left:
        return []
    path = [min(left)]
    while True:
        path.append(min(left[path[-1]] & left.keys()))
        if path[-1] in path[:-1]:
            return path[path.index(path[-1]) :]


def test_no_file_imports_itself_by_way_of_others() -> None:
    graph = {name: imports_of(path.read_text(), name, set(MODULES)) for name, path in MODULES.items()}
    assert cycle_of(graph) == []


@pytest.mark.parametrize(
    ("texts", "cycle"),
    [
        (["from reshard.b import x", "from reshard import c", "x = 1"], []),
        (["from reshard.b import x", "from reshard import c", "def f(): import reshard.a"], ["a", "b", "c", "a"]),
        (["x = 1", "if TYPE_CHECKING:\n    from reshard.c import X", "from reshard.b import y"], ["b", "c", "b"]),
    ],
)
def test_a_cycle_is_found(texts: list[str], cycle: list[str]) -> None:
    names = [f"reshard.{name}" for name in "abc"]
    graph = {name: imports_of(text, name, set(names)) for name, text in zip(names, texts, strict=True)}
    assert cycle_of(graph) == [f"reshard.{name}" for name in cycle]


def compared(text: str, names: set[str]) -> list[int]:
    """The lines that compare something with the name of a format."""

    def is_name(node: ast.expr) -> bool:
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            return any(map(is_name, node.elts))
        return isinstance(node, ast.Constant) and node.value in names

    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Compare) and any(map(is_name, [node.left, *node.comparators]))
    ]


def test_no_code_outside_formats_compares_the_name_of_a_format() -> None:
    names = {one.traits.name for one in registry.FORMATS} - {
        "safetensors",
        "torch",
    }  # words with other meanings
    # Words of a configuration and of a naming, which are no formats.
    others = {"reshard.config.words", "reshard.names.presets"}
    found = {
        name: lines
        for name, path in MODULES.items()
        if not name.startswith("reshard.formats.")
        and name not in others
        and (lines := compared(path.read_text(), names))
    }
    assert not found


def test_a_comparison_is_found() -> None:
    text = 'x = 1\nif a.format == "b":\n    pass\ny = f in ("c", "b")\nz = "b"'
    assert compared(text, {"b"}) == [2, 4]


def test_what_convert_and_save_accept_are_the_formats_that_are_written() -> None:
    assert {one.name for one in WRITERS} == set(get_args(Target))
    for name in ("checkpoint2", "checkpoint1"):
        assert save_traits(name).name == name
