"""What holds for the package as a whole: no way to run what a file says, no framework at import."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).parent.parent / "python").rglob("*.py"))
FORBIDDEN = {
    "pickle": r"\b(import|from) _?(c?[pP]ickle|dill|cloudpickle)\b|\b(pickle|pickletools|cloudpickle|dill)\.\w",
    "eval": r"(?<![\w.])eval\(",
    "exec": r"(?<![\w.])exec\(",
    "torch.load": r"torch\.load\(",
    "yaml loaders that make objects": r"yaml\.(load|full_load|unsafe_load)\(",
    "marshal": r"\bmarshal\b",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_source_does_not_use(what: str) -> None:
    pattern = re.compile(FORBIDDEN[what])
    found = [
        f"{path.name}: {line.strip()}"
        for path in SOURCES
        for line in path.read_text().splitlines()
        if pattern.search(line) and "no pickle" not in line.lower()
    ]
    assert not found


def test_import_brings_no_framework() -> None:
    code = "import sys, reshard; print(sorted({'torch', 'mindspore', 'jax', 'rich', 'click'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
