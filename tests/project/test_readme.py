"""README and the pages of docs/ show code that runs and what it prints, name what exists, and link to what exists.

The code blocks of a page run in order in one folder, each on the files that those before it wrote:

- `python`, `sh`: run. A block `output` behind one is what it prints.
- `console`: lines behind `$ ` run, and the lines that follow are what they print. Without `$ ` it shows commands that
  need a network or several processes; the commands of reshard in it, and their options, must exist.
- Blocks in `<!-- -->` run, too: they make what a page takes for granted.
- `yaml`: a layout, a name map, or a section of a configuration. `text` is not code.

In what is printed, `...` stands for any text.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest
from click.testing import CliRunner
from tests.helpers.command_line import PROGRAM
from tests.peers.required import long, required

import reshard
from reshard.cli import main
from reshard.commit import protocol
from reshard.documents.strict_yaml import read_yaml
from reshard.names.file import NamesFile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from _pytest.mark import ParameterSet

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")),
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts),
]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
MARKS = {
    r"^ *(?:import|from) (?:reshard\.)?(?:accelerate|bitsandbytes|jax|lightning|ray|transformers)\b": pytest.mark.slow,
    r"^\$ .*torchrun": long,
}


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of the code blocks of a page."""
    return re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def _pages() -> list[ParameterSet]:
    pages = []
    for page, name in zip(PAGES, NAMES, strict=True):
        marks = [mark for pattern, mark in MARKS.items() if re.search(pattern, page.read_text(), re.MULTILINE)]
        pages.append(pytest.param(page, id=name, marks=marks))
    return pages


@pytest.fixture
def handlers() -> Iterator[None]:
    """Restores the signal handlers: pages show single calls of a `Checkpointer` that nobody closes."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.disk  # memory is volatile, and a save says so
@pytest.mark.filterwarnings("ignore::UserWarning:lightning.*", "ignore:.*LeafSpec")
@pytest.mark.parametrize("page", _pages())
def test_examples_of_a_page_run_in_order_and_print_what_it_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = ""
    for language, code in blocks(page):
        assert language in ("python", "sh", "output", "yaml", "console", "text"), language
        if language == "python":
            if "import mindspore" in code:
                required("mindspore")
            compiled = compile(code, str(page), "exec")
            if "import bitsandbytes" in code:
                required("bitsandbytes")
                # Its threads must not be in the process from which other tests fork ranks.
                command = [sys.executable, "-c", code]
                printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
                continue
            if "import wandb" in code and importlib.util.find_spec("wandb") is None:
                continue  # its many dependencies are not worth ten lines
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compiled, {"__name__": "page"})
            printed = out.getvalue()
            protocol.release()  # as at the end of a process
        elif language == "sh":
            printed = _run_shell(code, tmp_path)
        elif language == "output":
            _compare(printed, code, page.name)
        elif language == "console" and code.startswith("$ "):
            _run_console(code, tmp_path)
        elif language == "console":
            _check_commands(code)
        elif language == "yaml":
            _read_yaml(code)


def _run_shell(code: str, folder: Path) -> str:
    lines = code.strip().splitlines()
    if all(re.match(r"reshard [^|&;>]*$", line) for line in lines):
        done = [_run_command(line) for line in lines]
        assert all(status == 0 for _, status in done), done
        return "".join(printed for printed, _ in done)
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    program = folder / ".bin" / "reshard"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!{sys.executable}\n" + PROGRAM[2].replace("; ", "\n"))
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{program.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ended = subprocess.run([bash, "-e", "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def _run_command(line: str) -> tuple[str, int]:
    """What a command of reshard prints, run in this process, and its status."""
    result = CliRunner().invoke(main, shlex.split(line, comments=True)[1:])
    protocol.release()  # as at the end of a process
    return result.output, result.exit_code


def _run_console(code: str, folder: Path) -> None:
    """Run each line behind `$ `. One that shows no output must succeed."""
    for command, _, shown in (part.partition("\n") for part in re.split(r"^\$ ", code, flags=re.MULTILINE)[1:]):
        if re.match(r"reshard [^|&;>]*$", command):
            printed, status = _run_command(command)
            assert status == 0 or shown.strip(), f"{command}\n{printed}"
        else:
            printed = _run_shell(command, folder)
        _compare(printed, shown, command)


def _compare(printed: str, shown: str, source: str) -> None:
    if not shown.strip():
        return
    pattern = ".*".join(re.escape(part) for part in _stripped(shown).split("..."))
    assert re.fullmatch(pattern, _stripped(printed), re.DOTALL), f"{source} printed\n{printed}\nand not\n{shown}"


def _stripped(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def _check_commands(code: str) -> None:
    for line in re.findall(r"(?:^|&& )reshard ([^#|&>\n]*)", code.replace("\\\n", " "), re.MULTILINE):
        words = shlex.split(line)
        command: click.Command = main
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            command = command.commands[words.pop(0)]
        known = {
            name for one in command.get_params(click.Context(command)) for name in (*one.opts, *one.secondary_opts)
        }
        given = {word.partition("=")[0] for word in words if word.startswith("-")}
        assert given <= known, f"`reshard {line}` has options that do not exist: {given - known}"


def _read_yaml(code: str) -> None:
    Path("example.yaml").write_text(code)
    value, lines = read_yaml("example.yaml")
    assert isinstance(value, dict)
    if "mesh" in value:
        reshard.ModelLayout.from_yaml("example.yaml")
    elif "rules" in value:
        NamesFile.from_lines(value, source=None, lines=lines)


# -- links


def _anchors(page: Path) -> set[str]:
    """The anchors of the headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#{1,3} (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Links of a page to files and anchors that do not exist."""
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    targets = [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r'(?:src|href|srcset)="([^"]+)"', text)]
    broken = []
    for target in targets:
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in _anchors(file)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", [ROOT / "CHANGELOG.md", ROOT / "benches" / "README.md"], ids=lambda page: page.name)
def test_links_exist(page: Path) -> None:
    assert broken_links(page) == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_and_named_paths_exist(page: Path) -> None:
    assert broken_links(page) == []
    for name in re.findall(r"`((?:rust|python|tests|benches|docs)/[\w./-]*)`", page.read_text()):
        assert (ROOT / name).exists() or name == "docs/_build", name


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# One `two`\n")
    page = tmp_path / "a.md"
    page.write_text("[a](b.md#one-two) [b](b.md#three) [c](c.md) [d](https://d) ![e](e.svg)\n```text\n[f](f.md)\n```\n")
    assert broken_links(page) == ["b.md#three", "c.md", "e.svg"]


def test_broken_links_of_the_site_are_found(tmp_path: Path) -> None:
    (tmp_path / "b.html").write_text('<h1 id="one">b</h1>')
    (tmp_path / "a.html").write_text('<a href="b.html#one"></a><a href="b.html#two"></a><img src="c.png"><a href="#d">')
    program = [sys.executable, str(ROOT / "docs" / "check_site.py"), str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "a.html: #d\na.html: b.html#two\na.html: c.png\n")


# -- README and the table of contents


def test_readme_is_short_and_shows_every_interface() -> None:
    assert len(README.splitlines()) <= 150
    languages = [language for language, _ in blocks(PAGES[0])]
    assert languages.count("python") >= 2
    assert languages.count("sh") >= 1


def test_links_of_readme_are_absolute_in_a_release(tmp_path: Path) -> None:
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    program = [sys.executable, str(ROOT / ".ci" / "readme_for_pypi.py"), "https://host/me/it", "v1"]
    subprocess.run(program, cwd=tmp_path, check=True)
    links = re.findall(r"\]\(([^)]+)\)", (tmp_path / "README.md").read_text())
    assert len(links) == len(re.findall(r"\]\(", README))
    for link in links:
        assert re.match(r"https://host/me/it/(blob|raw)/v1/", link), link
        assert (ROOT / link.split("/v1/")[1].partition("#")[0]).exists(), link
    assert "https://host/me/it/raw/v1/docs/images/reshard.svg" in links
    urls = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["urls"]
    assert urls["Repository"] == "https://host/me/it"


def test_pages_name_the_rust_version_of_the_build() -> None:
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["rust-version"]
    named = {page.name: re.findall(r"Rust ([0-9.]+) or newer", page.read_text()) for page in PAGES}
    assert {page: found for page, found in named.items() if set(found) - {version}} == {}
    assert sum(map(len, named.values())) >= 3


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = (ROOT / "docs" / "index.md").read_text().splitlines()
    pages = [name.removeprefix("docs/").removesuffix(".md") for name in NAMES if name.startswith("docs/")]
    assert [page for page in pages if page not in listed] == ["index"]


def test_every_public_name_is_in_the_reference() -> None:
    reference = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    described = set(re.findall(r":: (reshard[\w.]*\.\w+)$", reference, re.MULTILINE))
    names = {f"reshard.{name}" for name in reshard.__all__} - {"reshard.ReshardError", "reshard.__version__"}
    for module in ("torch", "torch/dcp", "transformers", "accelerate", "jax", "mindspore"):
        source = (ROOT / "python" / "reshard" / module / "__init__.py").read_text()
        listed = re.search(r"^__all__ = (\[.*?\])", source, re.MULTILINE | re.DOTALL)
        assert listed is not None, module
        names |= {f"reshard.{module.replace('/', '.')}.{name}" for name in ast.literal_eval(listed[1])}
    assert sorted(names - described) == []


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
