"""The command line as a program: its exit code if the output cannot be written."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import click

from reshard.cli.output import INTERRUPTED, OutputError, echo, echo_usage, end_output

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Program(click.Group):
    """The group of all commands. Commands report their own errors; what is left is handled here, not by click."""

    def main(self, args: Sequence[str] | None = None, *more: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run a command and end the process with its exit code."""
        run = functools.partial(super().main, args, *more, standalone_mode=False, **extra)
        return sys.exit(_exit_code(run)) if standalone_mode else run()

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Parse the words of the command line. `--help` and `--version` are printed here."""
        try:
            return super().make_context(*args, **kwargs)
        except OSError as error:
            raise OutputError(error) from None

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Its errors are reported within: an OSError here is that of a text that click prints."""
        try:
            return super().invoke(ctx)
        except OSError as error:
            raise OutputError(error) from None


def _exit_code(run: Callable[[], Any]) -> int:
    try:
        code = run()
    except click.ClickException as error:
        echo_usage(error)
        return error.exit_code
    except click.Abort:
        echo("interrupted", err=True)
        return INTERRUPTED
    except OutputError as error:
        return end_output(error)
    return code if isinstance(code, int) else 0
