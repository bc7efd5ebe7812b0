"""The command line as a program: its exit code if it is interrupted or its output cannot be written."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import click

from reshard.cli.output import INTERRUPTED, OutputError, echo, echo_usage, end_output, note_fetched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

_SECONDS_TO_WAIT = 0.01  # until the next look whether an import has ended


class Program(click.Group):
    """The group of all commands. Commands report their own errors; what is left is handled here, not by click."""

    def main(self, args: Sequence[str] | None = None, *more: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run a command and end the process with its exit code."""
        run = functools.partial(super().main, args, *more, standalone_mode=False, **extra)
        if not standalone_mode:
            return run()
        words = itertools.takewhile(lambda word: word != "--", sys.argv[1:] if args is None else args)
        return sys.exit(_exit_code(run, as_json="--json" in words))

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Parse the words of the command line. `--help` and `--version` are printed here."""
        try:
            return super().make_context(*args, **kwargs)
        except OSError as error:
            raise OutputError(error) from None

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Its errors are reported within: an OSError here is that of a text that click prints."""
        note_fetched(ctx)
        try:
            return super().invoke(ctx)
        except OSError as error:
            raise OutputError(error) from None


def _exit_code(run: Callable[[], Any], *, as_json: bool) -> int:
    with _noted_interrupts() as interrupts:
        try:
            code = run()
            interrupts.end()
        except click.ClickException as error:
            return _usage(error, as_json=as_json)
        except OutputError as error:
            return end_output(error)
        except BaseException as error:
            # A second interrupt, within the import of an extension module, becomes an ImportError.
            if not interrupts.count and not isinstance(error, click.Abort):
                raise
            echo("interrupted", err=True)
            return INTERRUPTED
    return code if isinstance(code, int) else 0


def _usage(error: click.ClickException, *, as_json: bool) -> int:
    try:
        echo_usage(error, as_json=as_json)
    except OutputError as lost:
        return end_output(lost)
    return error.exit_code


@dataclasses.dataclass
class _Interrupts:
    count: int = 0
    is_waiting: bool = False  # the first one has not taken effect yet

    def end(self) -> None:
        """Let an interrupt take effect that still waits when the command is done."""
        waits, self.is_waiting = self.is_waiting, False
        if waits:
            raise KeyboardInterrupt


@contextlib.contextmanager
def _noted_interrupts() -> Iterator[_Interrupts]:
    """Count the interrupts of the block, which raise KeyboardInterrupt: after an import, if one is going on.

    KeyboardInterrupt within the import of an extension module may be printed as a traceback or become another error. A
    second interrupt does not wait. One that is raised where Python drops errors (in a finalizer) is raised again.
    """
    interrupts = _Interrupts()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            interrupts.count += 1
        elif not interrupts.is_waiting:
            return  # it has taken effect
        interrupts.is_waiting = interrupts.count == 1 and _is_importing(frame)
        signal.setitimer(signal.ITIMER_REAL, _SECONDS_TO_WAIT if interrupts.is_waiting else 0)
        if not interrupts.is_waiting:
            raise KeyboardInterrupt

    def dropped(error: sys.UnraisableHookArgs) -> None:
        if not isinstance(error.exc_value, KeyboardInterrupt):
            old_hook(error)
            return
        interrupts.is_waiting = True
        signal.setitimer(signal.ITIMER_REAL, _SECONDS_TO_WAIT)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupts
        return
    old, old_hook = signal.signal(signal.SIGALRM, interrupt), sys.unraisablehook
    sys.unraisablehook = dropped
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
        sys.unraisablehook = old_hook


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
