"""One word for one thing: identifiers that the table of words in CONTRIBUTING.md replaces do not return."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import reshard

PACKAGE = Path(reshard.__file__).parent


def identifiers(text: str) -> set[str]:
    """The names in Python source: of definitions, imports, arguments, variables and attributes."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        for field in ("name", "asname", "id", "arg", "attr"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                found.add(name.lstrip("_"))
    return found


def replaced(table: str) -> set[tuple[str, str]]:
    """The identifiers in the last of three columns, each with the package in which it does not return; "": in all."""
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| ") and line.count("|") == 4]
    return {pair for row in rows for pair in re.findall(r"`(?:(\w+)\.)?(\w+)`", row[3])}


def returned(words: set[tuple[str, str]], path: Path, text: str) -> set[str]:
    """The words that a file of the package must not have, and has."""
    banned = {word for package, word in words if package in ("", path.parts[0]) and word in text}
    return banned & identifiers(text) if banned else set()


def test_a_replaced_word_is_found() -> None:
    assert identifiers("from a import b as c\ndef d(e): f.g = h\nclass _I: j: int") >= set("bcdefghIj")
    assert replaced("| a | `A` is one | `B`, `p.C` |\n| b | c | |\n| `D` | two |") == {("", "B"), ("p", "C")}
    words = {("", "B"), ("p", "C")}
    assert returned(words, Path("q/a.py"), "B = C") == {"B"}
    assert returned(words, Path("p/a.pyi"), "def f(C: int) -> D: ...") == {"C"}


def test_replaced_words_do_not_return() -> None:
    table = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text().split("## Words\n")[1].split("\n## ")[0]
    words = replaced(table)
    assert words
    paths = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py*") if path.suffix in (".py", ".pyi")]
    found = {path: returned(words, path, (PACKAGE / path).read_text()) for path in paths}
    assert {path: names for path, names in found.items() if names} == {}
