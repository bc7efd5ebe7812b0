"""`.ci/run` stops at the first command that fails, runs what README says, and the tree holds nothing else."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci" / "run"
TOOLS = (
    "cargo",
    "python",
    "python3",
    "pip",
    "reshard",
    "pytest",
    "ruff",
    "mypy",
    "lint-imports",
    "sphinx-build",
    "git",
)

# Stands in for each tool. It writes its command line to $CALLS, and fails if that is line $FAIL of the file.
# `git clone` and `python3 -m venv` leave behind what the script needs next. What is compiled in the background fails at
# once, as its result does not count, or with $COMPILE runs until it is ended.
STAND_IN = """#!/bin/sh
name=$(basename "$0")
if test "$name $*" = "cargo test --no-run"; then
  test "$COMPILE" || exit 1
  echo $$ > "$COMPILE"
  exec sleep 60
fi
while test "$COMPILE" && test "$name" = pip && ! test -s "$COMPILE"; do sleep 0.01; done
echo "$name $*" >> "$CALLS"
test "$(wc -l < "$CALLS")" = "$FAIL" && exit 1
case "$name $1" in
  "git clone") mkdir -p "$4" ;;
  "git status") printf '%s' "$LEFT" ;;
  "python3 -m") mkdir -p .venv/bin && : > .venv/bin/activate ;;
esac
exit 0
"""


def run(folder: Path, fail: int = 0, left: str = "", compiling: str = "") -> tuple[int, list[str], str]:
    """The exit status of the script, the commands that it ran, and what it printed."""
    tools = folder / "tools"
    tools.mkdir()
    for name in TOOLS:
        (tools / name).write_text(STAND_IN)
        (tools / name).chmod(0o755)
    calls = folder / "calls"
    calls.touch()
    environment = {
        "PATH": f"{tools}:/usr/bin:/bin",
        "CALLS": str(calls),
        "FAIL": str(fail),
        "LEFT": left,
        "COMPILE": compiling,
        "TMPDIR": str(folder),
    }
    done = subprocess.run(["bash", SCRIPT], env=environment, capture_output=True, text=True, check=False, timeout=30)
    return done.returncode, calls.read_text().splitlines(), done.stdout + done.stderr


def commands_of_the_script() -> list[str]:
    lines = SCRIPT.read_text().splitlines()
    return [line for line in lines if re.match(rf"""(\w+=("[^"]*"|\S+) )?({"|".join(TOOLS)}) ?""", line)]


@pytest.fixture(scope="module")
def all_calls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    status, calls, output = run(tmp_path_factory.mktemp("green"))
    assert (status, output.count("FAILED")) == (0, 0), output
    return calls


def test_every_command_of_the_script_is_run(all_calls: list[str]) -> None:
    assert len(all_calls) == len(commands_of_the_script()) + 2  # git rev-parse and git status stand in assignments


@pytest.mark.slow(disk=False)
def test_the_script_stops_at_each_command_that_fails(all_calls: list[str], tmp_path: Path) -> None:
    for place in range(1, len(all_calls) + 1):
        folder = tmp_path / str(place)
        folder.mkdir()
        status, calls, output = run(folder, fail=place)
        assert status != 0, f"{all_calls[place - 1]} failed and the script went on"
        assert len(calls) == place, f"{calls[place:]} ran after {all_calls[place - 1]} had failed"
        assert "=== FAILED" in output


def test_files_that_are_left_behind_fail_the_run(tmp_path: Path) -> None:
    status, _, output = run(tmp_path, left="?? strategy/\n")
    assert status != 0
    assert "strategy/" in output


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_compiled_in_the_background_ends_with_the_script(
    all_calls: list[str],
    tmp_path: Path,
    fails: bool,  # noqa: FBT001
) -> None:
    place = all_calls.index("pytest -n auto") + 1 if fails else 0
    status, _, output = run(tmp_path, fail=place, compiling=str(tmp_path / "compiling"))
    assert (status != 0) == fails, output
    pid = int((tmp_path / "compiling").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert {path.name for path in tmp_path.iterdir()} == {"calls", "tools", "compiling"}


def test_no_command_is_followed_by_another_on_its_line() -> None:
    for line in commands_of_the_script():
        assert not re.search(r"&&|\|\||;|\|", line), line


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no git checkout")
def test_the_top_level_holds_nothing_but_the_project() -> None:
    """A check for untracked files does not see what a test left and somebody committed."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert {name.partition("/")[0] for name in listed.stdout.splitlines()} <= {
        ".ci",
        ".github",
        ".gitignore",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "Cargo.lock",
        "Cargo.toml",
        "LICENSE",
        "README.md",
        "SECURITY.md",
        "benches",
        "deny.toml",
        "docs",
        "pyproject.toml",
        "python",
        "rust",
        "tests",
    }
