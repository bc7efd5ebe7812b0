"""What holds for the package as a whole: no way to run what a file says, no framework at import."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import reshard

SOURCES = sorted((Path(__file__).parents[2] / "python").rglob("*.py"))
FORBIDDEN = {
    # What Ray sends is made once more, and searched: that executes nothing. A worker unpacks what the driver has sent
    # over Ray, as Ray does with all arguments, so that its error can name the host.
    "pickle": r"\b(import|from) _?(c?[pP]ickle|dill|cloudpickle)\b"
    r"|\b(pickle|pickletools|(?<!ray\.)cloudpickle|dill)\.\w",
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


_FIRST_LOAD = """
import sys
import numpy as np
import reshard
with reshard.open(sys.argv[1]) as checkpoint:
    assert checkpoint.load()["w"].tolist() == [0.0, 0.0]
readers = {f"reshard.formats.{name}.reader" for name in ("checkpoint1", "dcp", "deepspeed", "megatron", "torch_file")}
unused = {"yaml", "reshard.names", "reshard.layout.file", "reshard.verbs.save", "tempfile", "subprocess"}
print(sorted(sys.modules.keys() & (readers | unused)))
"""


@pytest.mark.slow
def test_the_first_load_imports_only_what_it_needs(tmp_path: Path) -> None:
    """It takes 60 ms, of which most are imports: 100 ms more with everything that other formats and layouts need."""
    reshard.save(tmp_path, 1, {"w": np.zeros(2)})
    command = [sys.executable, "-c", _FIRST_LOAD, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.slow
def test_help_imports_no_numpy() -> None:
    code = "import sys, reshard.cli; print(sorted({'numpy', 'yaml', 'rich', 'reshard.checkpoint'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
