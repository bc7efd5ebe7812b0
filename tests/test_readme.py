"""README shows code that runs, names files that exist, and gives the commands that CI runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_python_block_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})


def test_there_are_blocks() -> None:
    assert BLOCKS


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:rust|python|tests|benches)/[\w./-]*)`", README))))
def test_named_path_exists(name: str) -> None:
    assert (ROOT / name).exists(), f"README names {name}"


def test_every_source_file_is_in_the_description_of_the_architecture() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    files = [*(ROOT / "rust").rglob("*.rs"), *(ROOT / "python").rglob("*.py")]
    missing = [
        str(file.relative_to(ROOT))
        for file in files
        if not re.search(rf"\b{re.escape(file.stem if file.stem != '__init__' else file.parent.name)}\b", text)
    ]
    assert not missing, f"docs/architecture.md does not name {missing}"


@pytest.mark.parametrize("command", re.findall(r"^    \$ (.*)$", README, re.MULTILINE) or [""])
def test_commands_are_those_of_ci(command: str) -> None:
    """CI runs them in this order, one a line, so that it stops at the first that fails."""
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    for part in command.split(" && "):
        assert part in lines
        del lines[: lines.index(part) + 1]
