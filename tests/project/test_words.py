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


def replaced(table: str) -> set[str]:
    """The identifiers in the last of three columns."""
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| ") and line.count("|") == 4]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row[3])}


def test_a_replaced_word_is_found() -> None:
    assert identifiers("from a import b as c\ndef d(e): f.g = h\nclass _I: j: int") >= set("bcdefghIj")
    assert replaced("| a | `A` is one | `B`, `C` |\n| b | c | |\n| `D` | two |") == {"B", "C"}


def test_replaced_words_do_not_return() -> None:
    table = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text().split("## Words\n")[1].split("\n## ")[0]
    words = replaced(table)
    assert words
    texts = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    found = {path: words & identifiers(text) for path, text in texts.items() if any(word in text for word in words)}
    assert {path: names for path, names in found.items() if names} == {}
