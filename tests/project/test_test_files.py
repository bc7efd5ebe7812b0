"""The files of the tests: each is found by its subject, and none needs another one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FILES = {path.relative_to(TESTS).as_posix(): path for path in TESTS.rglob("*.py")}


def too_long(texts: dict[str, str]) -> dict[str, int]:
    """The files of more than 800 lines, and how many they have."""
    return {name: n for name, text in texts.items() if (n := len(text.splitlines())) > 800}


def test_no_file_is_too_long_to_be_read() -> None:
    assert too_long({name: path.read_text() for name, path in FILES.items()}) == {}


def test_a_file_that_is_too_long_is_found() -> None:
    assert too_long({"a.py": "x = 1\n" * 800, "b.py": "x = 1\n" * 801}) == {"b.py": 801}


_CANDIDATE = re.compile(r"\btests(\.\w+)*\.test_|^ *from tests[\w.]* import (\(|.*\btest_)", re.MULTILINE)


def imported_tests(text: str) -> list[str]:
    """The modules of tests that a file imports, where it should import helpers."""
    if _CANDIDATE.search(text) is None:  # most files: parsing all of them takes seconds
        return []
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return [name for name in found if name.split(".")[0] == "tests" and name.split(".")[-1].startswith("test_")]


def test_no_file_imports_a_file_of_tests() -> None:
    assert {name: found for name, path in FILES.items() if (found := imported_tests(path.read_text()))} == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from tests.helpers import arrays", []),
        ("from tests.cli import test_cli", ["tests.cli.test_cli"]),
        ("def f():\n    from tests.cli.test_cli import run", ["tests.cli.test_cli"]),
        ("import tests.cli.test_cli", ["tests.cli.test_cli"]),
        ("from tests.cli import (\n    test_cli,\n    test_watch,\n)", ["tests.cli.test_cli", "tests.cli.test_watch"]),
    ],
)
def test_an_import_of_a_file_of_tests_is_found(text: str, expected: list[str]) -> None:
    assert imported_tests(text) == expected


def unknown_tests(pages: dict[str, str], texts: list[str]) -> dict[str, list[str]]:
    """The tests that pages name by their functions, and that no file has."""
    known = {name for text in texts for name in re.findall(r"^def (test_\w+)\(", text, re.MULTILINE)}
    named = {page: re.findall(r"`(test_[a-z0-9_]+)`", text) for page, text in pages.items()}
    return {page: found for page, names in named.items() if (found := [name for name in names if name not in known])}


def test_the_tests_that_pages_name_exist() -> None:
    pages = {path.name: path.read_text() for path in (TESTS.parent / "docs").rglob("*.md")}
    assert unknown_tests(pages, [path.read_text() for path in FILES.values()]) == {}


def test_a_test_that_only_a_page_has_is_found() -> None:
    pages = {"a.md": "`test_one` and `test_two`", "b.md": "`test_one`, `test_<name>.py`"}
    assert unknown_tests(pages, ["def test_one(path: Path) -> None:\n"]) == {"a.md": ["test_two"]}
