"""Calls of the command line: within the process, as a process, and on a terminal.

Commands that take seconds print lines of progress to stderr. Here none does, however slow the machine is.
"""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
from typing import Any

import click
from click.testing import CliRunner, Result

from reshard.cli import main, output

_NO_LINES = "output._LINE_SECONDS = output.ProgressLines.wait_s = 3600.0"
PROGRAM = [
    sys.executable,
    "-c",
    f"import sys; sys.argv[0] = 'reshard'; from reshard.cli import main, output; {_NO_LINES}; main()",
]
output._LINE_SECONDS = output.ProgressLines.wait_s = 3600.0


def run(*args: object) -> Result:
    """In this process."""
    return CliRunner().invoke(main, [str(arg) for arg in args])


def start(*args: object, **options: Any) -> subprocess.Popen[str]:
    """As a process, its outputs piped."""
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen([*PROGRAM, *map(str, args)], **piped)


def outcome(*args: object, **options: Any) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a process."""
    process = start(*args, **options)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def on_terminal(*args: object, both: bool = False, columns: int = 100) -> tuple[int, str, str]:
    """Exit code, stdout (a pipe, unless `both`) and what a terminal at stderr gets to see."""
    master, slave = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm-256color"}
    process = start(*args, stdout=slave if both else subprocess.PIPE, stderr=slave, env=environment)
    os.close(slave)
    seen = b""
    while True:
        ready, _, _ = select.select([master], [], [], 60)
        assert ready
        try:
            data = os.read(master, 65536)
        except OSError:  # the other side is closed
            break
        if not data:
            break
        seen += data
    out, _ = process.communicate(timeout=60)
    os.close(master)
    return process.returncode, out, seen.decode()


def all_commands() -> list[tuple[str, click.Command]]:
    """Every command and the commands of groups, by what is typed."""
    named = list(main.commands.items())
    return named + [
        (f"{name} {n}", c) for name, g in named if isinstance(g, click.Group) for n, c in g.commands.items()
    ]
