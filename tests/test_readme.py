"""README and the pages of docs/ show code that runs, name files that exist, and give the commands that CI runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.peers.required import required
from tests.test_cli import PROGRAM

from reshard.names.file import NamesFile
from reshard.strict_yaml import read_yaml

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of the code blocks of a page."""
    return re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.disk  # memory is volatile, and a save says so
@pytest.mark.filterwarnings("ignore::UserWarning:lightning.*", "ignore:.*LeafSpec")
@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_examples_of_a_page_run_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one folder: a block works on what those before it wrote. `yaml` is a name map; `console` is not run."""
    monkeypatch.chdir(tmp_path)
    for language, code in blocks(page):
        assert language in ("python", "sh", "yaml", "console"), language
        if language == "python":
            if "import mindspore" in code:
                required("mindspore")
            exec(compile(code, str(page), "exec"), {})
        elif language == "sh":
            _run_shell(code, tmp_path)
        elif language == "yaml":
            Path("example.yaml").write_text(code)
            value, lines = read_yaml("example.yaml")
            NamesFile.from_lines(value, source=None, lines=lines)


def _run_shell(code: str, folder: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    program = folder / ".bin" / "reshard"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!{sys.executable}\n" + PROGRAM[2].replace("; ", "\n"))
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
    done = subprocess.run([bash, "-e", "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_blocks() -> None:
    languages = [language for language, _ in blocks(PAGES[0])]
    assert languages.count("python") >= 2
    assert languages.count("sh") >= 1
    for page in ("saving", "pytorch", "layouts", "names", "formats"):
        assert "python" in [language for language, _ in blocks(ROOT / "docs" / f"{page}.md")], page


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_named_paths_exist(page: Path) -> None:
    for name in re.findall(r"`((?:rust|python|tests|benches)/[\w./-]*)`", page.read_text()):
        assert (ROOT / name).exists(), name
    for link in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = (ROOT / "docs" / "index.md").read_text().splitlines()
    pages = [name.removeprefix("docs/").removesuffix(".md") for name in NAMES[1:]]
    assert [page for page in pages if page not in listed] == ["index"]


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
