"""Output of all commands: text that is safe to print, numbers with units, errors, warnings, progress, tables.

Names and messages may come from malicious files, so all such text is escaped by `shown` before it is printed. JSON is
written in ASCII, with all other characters escaped.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import errno
import functools
import json
import logging
import math
import os
import re
import shlex
import shutil
import sys
import textwrap
import threading
import time
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, ParamSpec, TypeVar

import click
from click.shell_completion import CompletionItem

from reshard import _core
from reshard.errors import (
    ArgumentError,
    CheckpointNotFoundError,
    DestinationExistsError,
    ReshardError,
    StorageError,
    adapt_hint,
)
from reshard.storage.host import disconnect
from reshard.storage.location import locate
from reshard.values.arguments import parse_size
from reshard.values.fetched import fetched_so_far
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console
    from rich.status import Status
    from rich.table import Table
    from rich.text import Text

    from reshard.layout import ModelLayout
    from reshard.names import NameMap

P = ParamSpec("P")
R = TypeVar("R")

FORMAT_HELP = "Which checkpoint of a folder with several: huggingface, deepspeed and so on. Default: by what it holds."
STRATEGY_HELP = "Layout of rank folders: the strategy file, or the folder with the strategy files of the run."

INTERRUPTED = 130
_NO_OUTPUT = 74  # EX_IOERR of sysexits.h
_NO_READER = 141  # of a process that SIGPIPE ends
_QUIET = "reshard.quiet"  # key in the `meta` of a click context, which nested contexts share
_FETCHED = "reshard.fetched"  # likewise: what the process had fetched when the command began
# Arguments whose options have another name, by command and argument. All other names are the same.
_OPTIONS = {("diff", "strategy"): "--strategy-a or --strategy-b", ("split", "strategy"): "--source-strategy"}
_NUMBER = re.compile(r"(?:(?<=\.)|^)[0-9]{1,18}(?=\.|$)")  # a component of a key
_PAGE = re.compile(rb"\s*(<!doctype html|$)", re.IGNORECASE)  # the beginning of a file that a page may replace
_LINE_SECONDS = 5.0  # time between two lines of progress without a terminal
_GAP = 2  # blanks between the columns of a table
_INDENT = 4  # of the cells of a row that have their own lines
_MIN_FOLDED = 20  # characters that a wrapped column needs, if its longest word is not shorter


class _PathType(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on
    """A path, passed on unchanged, with shell completion of file names. An empty one is refused: it would be `.`."""

    name = "path"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not value:
            self.fail("is empty; `.` is the current folder", param, ctx)
        return value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        del ctx, param
        return [CompletionItem(incomplete, type="file")]


PATH = _PathType()


class WholeNumber(click.IntRange):
    """An integer of a range. `click.IntRange` calls another text "not a valid integer range"."""

    name = "integer"


class Number(click.FloatRange):
    """A number of a range, named as in `WholeNumber`."""

    name = "number"


class _SizeType(click.ParamType):  # type: ignore[type-arg]  # as above
    """A size in bytes, checked and passed on as text."""

    name = "size"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            parse_size(value)
        except ArgumentError as error:
            self.fail(str(error), param, ctx)
        return value


SIZE = _SizeType()


# -- text and numbers


def shown(text: object) -> str:
    r"""Text that is safe to print: control characters and characters that reorder a line are escaped.

    Example:
        >>> shown("a" + chr(27) + "[2J")
        'a\\x1b[2J'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def size(n_bytes: int) -> str:
    """Bytes with a binary unit.

    Example:
        >>> size(512), size(1536), size(86 << 20), size(1023 << 10), size(1048575)
        ('512 B', '1.50 KiB', '86.0 MiB', '1023 KiB', '1.00 MiB')
    """
    if n_bytes < 1024:
        return f"{n_bytes} B"
    value = float(n_bytes)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
        value /= 1024
        # Compared as it will be printed: 1023.9 KiB is 1.00 MiB, not 1024 KiB.
        if round(value) < 1024 or unit == "EiB":
            break
    return f"{_three_digits(value)} {unit}"


def rate(n_bytes: int, seconds: float) -> str:
    """Bytes per second with a decimal unit, as usual for disks and networks.

    Example:
        >>> rate(3_000_000_000, 2.0), rate(5_000_000, 1.0), rate(1, 0.0)
        ('1.50 GB/s', '5.00 MB/s', '-')
    """
    if seconds <= 0:
        return "-"
    per_second = n_bytes / seconds
    return f"{_three_digits(per_second / 1e9)} GB/s" if per_second >= 1e9 else f"{_three_digits(per_second / 1e6)} MB/s"


def _three_digits(value: float) -> str:
    n = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{math.floor(value * 10**n + 0.5) / 10**n:.{n}f}"  # halves up, as the pages do: 64.25 MiB is 64.3 MiB


def join_dims(shape: Sequence[int]) -> str:
    """A shape as text; for a 0-d tensor "scalar".

    Example:
        >>> join_dims((4096, 1024)), join_dims((7,)), join_dims(())
        ('4096 x 1024', '7', 'scalar')
    """
    return " x ".join(map(str, shape)) or "scalar"


def natural_order(name: str) -> list[tuple[int, str]]:
    """A key for `sorted`, by the numbers in names.

    Example:
        >>> sorted(["model-10", "model-9"], key=natural_order)
        ['model-9', 'model-10']
    """
    parts = re.split(r"([0-9]{1,18})", name)
    return [(int(part), "") if n % 2 else (-1, part) for n, part in enumerate(parts)]


def without_numbers(key: str) -> str:
    """A key with its numbers replaced: equal for keys that `common_key` can show as one."""
    return _NUMBER.sub("\0", key)


def common_key(keys: Sequence[str]) -> str:
    """One text for keys that differ only in their numbers; untrusted characters are escaped.

    Example:
        >>> common_key(["layers.0.w", "layers.1.w", "layers.2.w", "layers.5.w"])
        'layers.{0-2,5}.w'
    """
    places = zip(*(_NUMBER.findall(key) for key in keys), strict=True)
    return _with_numbers(keys[0], [list(dict.fromkeys(numbers)) for numbers in places])


class NumberedGroup(NamedTuple):
    """Keys that differ only in their numbers.

    Attributes:
        text: one text for all of them, as of `common_key`.
        first: the position of the first of them.
        n_keys: how many they are.
    """

    text: str
    first: int
    n_keys: int


class NumberedGroups(NamedTuple):
    """Groups of keys, and the number of the group of each key."""

    of_keys: list[int]
    groups: list[NumberedGroup]


def number_groups(keys: Sequence[str], labels: Sequence[int] = ()) -> NumberedGroups:
    """Group keys that differ only in their numbers.

    Args:
        keys: the keys.
        labels: of each key; keys of a group have the same. Empty: all have the same.

    Example:
        >>> found = number_groups(["layers.0.w", "layers.1.w", "head"])
        >>> found.of_keys, [(one.text, one.n_keys) for one in found.groups]
        ([0, 0, 1], [('layers.{0-1}.w', 2), ('head', 1)])
    """
    of_keys, groups = _core.number_groups(keys, labels)
    return NumberedGroups(
        of_keys,
        [NumberedGroup(_with_numbers(keys[first], numbers), first, n_keys) for first, n_keys, numbers in groups],
    )


def _with_numbers(key: str, numbers: Sequence[Sequence[str]]) -> str:
    """A key with all numbers of its group; untrusted characters are escaped."""
    texts = iter([one[0] if len(one) == 1 else _shortened(sorted(set(map(int, one)))) for one in numbers])
    return shown(_NUMBER.sub(lambda _: next(texts), key))


def _shortened(numbers: Sequence[int]) -> str:
    texts = ranges(numbers)
    return "{" + ",".join(texts if len(texts) <= 4 else [*texts[:3], "...", texts[-1]]) + "}"


def ranges(numbers: Sequence[int]) -> list[str]:
    """Ascending numbers in braces, with a dash for consecutive ones."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return [str(a) if a == b else f"{a}-{b}" for a, b in runs]


# -- printing


class OutputError(Exception):
    """stdout cannot be written, for the reason `cause`. Not an OSError, because those are errors of checkpoints."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.cause = cause


def end_output(error: OutputError) -> int:
    """Report that stdout cannot be written. Returns the exit code; a reader that has ended is no error."""
    disconnect(sys.stdout)
    if isinstance(error.cause, BrokenPipeError):
        return _NO_READER
    _echo_message("error", f"cannot write to stdout: {error.cause.strerror}")
    _echo_message("hint", "only the output is lost: what the command has already done to checkpoints is not undone")
    return _NO_OUTPUT


def _write(text: str, *, nl: bool = True) -> None:
    try:
        click.echo(text, nl=nl)
    except OSError as error:
        raise OutputError(error) from None


def _write_stderr(text: str) -> None:
    """Print a message. If that is not possible, there is no place for an error either, and the work goes on."""
    try:
        click.echo(text, err=True)
    except OSError:
        disconnect(sys.stderr)


def echo(text: str = "", *, err: bool = False) -> None:
    """Print a line; untrusted parts must be escaped by `shown`. With `--quiet` only text for stderr is printed.

    Args:
        text: the line.
        err: print to stderr.
    """
    if err:
        _write_stderr(text)
    elif not _is_set(_QUIET):
        _write(text)


def echo_file(text: str) -> None:
    """Print the content of a requested file, such as a layout, also with `--quiet`."""
    _write(text, nl=False)


def write_page(path: str, content: str) -> None:
    """Write a page. An older page is replaced as a whole; another file is refused.

    Raises:
        DestinationExistsError: the file is not a page.
        StorageError: the system failed, or `path` is not a file.
    """
    target = locate(path)
    target.check_replaceable()
    if target.is_file() and not _PAGE.match(target.read_head(64, follow_links=True)):
        hint = "choose another name for the page, or remove the file"
        raise DestinationExistsError(f"{show(path)} exists and is not a page", path=path, hint=hint)
    target.replace(content, durable=False)


def _is_set(name: str) -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(name))


def _is_plain() -> bool:
    """Whether colours and bold text are disabled, see https://no-color.org."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


def echo_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Print names and values in two columns. On a terminal the second one is wrapped."""
    width = max(len(name) for name, _ in facts)
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for name, text in facts:
        first = f"  {name:<{width}}  "
        lines = textwrap.wrap(text, max(20, columns - len(first))) if columns else [text]
        echo(first + f"\n{' ' * len(first)}".join(lines or [""]))


def echo_as_file(made: ModelLayout | NameMap, *, as_json: bool) -> None:
    """Print a layout or a name map, as its file or as JSON."""
    if as_json:
        echo_json(made.to_mapping())
    else:
        echo_file(str(made))


def echo_more(n: int, what: str = "more", how: str = "--all lists them") -> None:
    """Print how much is left out, if anything is.

    Args:
        n: what is left out, as a number.
        what: the noun of it.
        how: the option that prints it.
    """
    if n > 0:
        echo(f"and {n} {what}; {how}")


def note_fetched(context: click.Context) -> None:
    """Note, at the beginning of a command, what the process has fetched until now, see `echo_json`."""
    context.meta[_FETCHED] = fetched_so_far()


def echo_json(value: object) -> None:
    """Print the JSON object of a command; if it read objects of buckets, `remote` tells what it fetched."""
    context = click.get_current_context(silent=True)
    if isinstance(value, dict) and context is not None and _FETCHED in context.meta:
        fetched = fetched_so_far() - context.meta[_FETCHED]
        if fetched.n_requests:
            value = {**value, "remote": dataclasses.asdict(fetched)}
    _write(json.dumps(value, indent=2, ensure_ascii=True, default=str))


def warn(*messages: str) -> None:
    """Print a warning, escaped."""
    for message in messages:
        _echo_message("warning", message)


def _echo_message(kind: str, message: str) -> None:
    first, *rest = message.split("\n")
    title = f"{kind}:" if _is_plain() else click.style(f"{kind}:", bold=True)
    _write_stderr(f"{title} {shown(first)}")
    for line in rest:
        _write_stderr(shown(line))


def console(*, err: bool = False) -> Console:
    """A rich console without markup and highlighting. If the stream is not a terminal, lines are not wrapped."""
    from rich.console import Console

    stream = sys.stderr if err else sys.stdout
    width = None if stream.isatty() else 10_000
    # With NO_COLOR alone, rich keeps bold and dim text.
    colors: Literal["auto"] | None = None if _is_plain() else "auto"
    return Console(file=stream, markup=False, highlight=False, emoji=False, width=width, color_system=colors)


def plain_table(*columns: str, right: Sequence[str] = (), folds: Sequence[str] = (), header: bool = True) -> Table:
    """A table without lines, whose columns are separated by two spaces.

    Args:
        columns: headers of the columns.
        right: headers of right-aligned columns.
        folds: headers of columns that are wrapped if the terminal is too narrow. All others need their full width.
        header: whether to show the headers.
    """
    from rich.table import Table

    table = Table(
        box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim", show_edge=False, show_header=header
    )
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=name not in folds, overflow="fold")
    return table


def styled(text: str, style: str | None) -> Text:
    """Text for a cell of a table, in a style of rich such as "green"; without colours where the output has none."""
    from rich.text import Text

    return Text(text, style or "")


def facts_table(facts: Sequence[tuple[str, str | Text]]) -> Table:
    """Names and values as `echo_facts` prints them, to be drawn with other parts."""
    table = plain_table("name", "", folds=("",), header=False)
    for name, text in facts:
        table.add_row(f"  {name}", text)
    return table


def n_fitting(table: Table, out: Console) -> int:
    """How many columns of a `plain_table` the terminal is wide enough for, from the first one on."""
    from rich.measure import Measurement

    options = out.options.update(width=10_000)
    end = 0
    for n, column in enumerate(table.columns):
        header = [column.header] if table.show_header else []
        widths = [Measurement.get(out, options, cell) for cell in (*header, *column.cells)]
        if column.no_wrap:
            end += max((width.maximum for width in widths), default=0)
        else:
            end += min(max((width.minimum for width in widths), default=0), _MIN_FOLDED)
        if end > out.width:
            return n
        end += _GAP
    return len(table.columns)


def fitted(table: Table, out: Console) -> Table:
    """A `plain_table` as it is or, if the terminal is too narrow for it, as a list with a line for each cell.

    rich would crop the columns, and a cropped number is a wrong one.
    """
    from rich.padding import Padding

    if n_fitting(table, out) == len(table.columns):
        return table
    stacked = plain_table("", folds=("",), header=False)
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        for n, (column, cell) in enumerate(zip(table.columns, cells, strict=True)):
            if n and not str(cell):
                continue
            name = str(column.header) if table.show_header else ""
            text = styled("", None).append(f"{name}: " if name else "", "dim").append(cell)
            stacked.add_row(Padding(text, (0, 0, 0, _INDENT if n else 0)))
    return stacked


def echo_table(table: Table, out: Console | None = None) -> None:
    """Print a table without trailing blanks; a table without lines as `fitted` makes it."""
    out = console() if out is None else out
    with out.capture() as captured:
        out.print(fitted(table, out) if table.box is None else table)
    echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


# -- progress


class ProgressBar:
    """A progress bar on stderr with bytes, rate and remaining time, for use as `progress=`. Can be reused."""

    wait_s: ClassVar[float] = 2.0
    """Time until `waiting` is called, and between two calls."""

    def __init__(self) -> None:
        from rich.progress import (
            BarColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._bar = Progress(
            BarColumn(bar_width=30),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[bytes]}"),
            TransferSpeedColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=console(err=True),
            transient=True,
            refresh_per_second=8,
        )
        self._task = self._bar.add_task("", total=None, bytes="")
        self._lock = threading.Lock()
        self._has_begun = False
        self._status: Status | None = None  # until then

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Shows how much is done."""
        if not self._bar.live.is_started:
            self._begin()
            self._bar.reset(self._task, total=total_bytes)
            self._bar.start()
        self._bar.update(
            self._task, completed=done_bytes, total=total_bytes, bytes=f"{size(done_bytes)} of {size(total_bytes)}"
        )

    def waiting(self, seconds: float) -> bool:
        """Show that so long nothing is done yet. Returns whether that is still so."""
        from rich.status import Status

        with self._lock:
            if self._has_begun:
                return False
            if self._status is None:
                self._status = Status(_preparing(seconds), console=self._bar.console, spinner="line")
                self._status.start()
            self._status.update(_preparing(seconds))
            return True

    def pause(self) -> None:
        """Hide the bar until the next call."""
        self._begin()
        self._bar.stop()

    def _begin(self) -> None:
        with self._lock:
            self._has_begun = True
            if self._status is not None:
                self._status.stop()
                self._status = None


class ProgressLines:
    """Progress as lines on stderr, one every few seconds."""

    wait_s: ClassVar[float] = _LINE_SECONDS
    """Time until `waiting` is called, and between two calls."""

    def __init__(self) -> None:
        self._has_begun = False
        self._begin: float | None = None
        self._last = 0.0

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Prints how much is done, if the last line is old enough."""
        self._has_begun = True
        now = time.monotonic()
        if self._begin is None:
            self._begin = self._last = now
        if now - self._last < _LINE_SECONDS or done_bytes >= total_bytes:
            return
        self._last = now
        seconds = now - self._begin
        left = seconds * (total_bytes - done_bytes) / done_bytes if done_bytes else None
        line = f"{100 * done_bytes // total_bytes}%, {size(done_bytes)} of {size(total_bytes)}"
        if left is not None:
            line += f", {rate(done_bytes, seconds)}, {duration(left)} left"
        with contextlib.suppress(OSError):  # a closed stderr must not stop the work
            echo(line, err=True)

    def waiting(self, seconds: float) -> bool:
        """Print that so long nothing is done yet. Returns whether that is still so."""
        if self._has_begun:
            return False
        with contextlib.suppress(OSError):
            echo(_preparing(seconds), err=True)
        return True

    def pause(self) -> None:
        """Start again with the next call, which is for another job."""
        self._has_begun = True
        self._begin = None


def _preparing(seconds: float) -> str:
    return f"preparing, {duration(seconds)}"


def duration(seconds: float) -> str:
    """Seconds as hours, minutes and seconds.

    Example:
        >>> duration(7.2), duration(125), duration(7260)
        ('8 s', '2 min 5 s', '2 h 1 min')
    """
    whole = math.ceil(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


@contextlib.contextmanager
def progress_bar() -> Iterator[ProgressBar | ProgressLines | None]:
    """Progress on stderr: a bar that disappears at the end of the block, or lines if stderr is not a terminal.

    Until the work reports progress, which takes seconds for a plan of 100,000 ranks, the passed time is shown.
    None with `--quiet`, and with `--json` if stderr is not a terminal.
    """
    is_terminal = sys.stderr.isatty()
    if _is_set(_QUIET) or (not is_terminal and click.get_current_context().params.get("as_json")):
        yield None
        return
    bar = ProgressBar() if is_terminal else ProgressLines()
    begun, ended = time.monotonic(), threading.Event()

    def wait() -> None:
        while not ended.wait(bar.wait_s) and bar.waiting(time.monotonic() - begun):
            pass

    waiting = threading.Thread(target=wait, name="reshard-progress", daemon=True)
    waiting.start()
    try:
        yield bar
    finally:
        ended.set()
        waiting.join()
        bar.pause()


@contextlib.contextmanager
def collected_warnings(*, print_on_error: bool = True) -> Iterator[list[str]]:
    """Collect logged warnings of the package in a list, each text once. If the block raises, they are printed."""
    collected: list[str] = []

    class _Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if (text := record.getMessage()) not in collected:
                collected.append(text)

    logger = logging.getLogger("reshard")
    handler = _Collector(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield collected
    except BaseException:
        warn(*(collected if print_on_error else ()))
        raise
    finally:
        logger.removeHandler(handler)


# -- commands


def quiet_option(function: Callable[P, R]) -> Callable[P, R]:
    """Add `--quiet` to a command or group. `echo` and `progress_bar` read it."""

    def set_quiet(context: click.Context, _: click.Parameter, value: bool) -> None:  # noqa: FBT001  click's
        if value:
            context.meta[_QUIET] = True

    return click.option(
        "-q",
        "--quiet",
        is_flag=True,
        expose_value=False,
        callback=set_quiet,
        help="Print only warnings, errors, JSON, and files that are printed.",
    )(function)


def command(function: Callable[P, None], *, refused: int = 1) -> Callable[P, None]:
    """Wrap a command: errors are printed, with `--json` as an object, and end it with the exit code `refused`."""

    @click.option("--json", "as_json", is_flag=True, help="Print the result as JSON; an error is JSON, too.")
    @quiet_option
    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except (ReshardError, OSError) as error:
            _report(error, as_json=bool(kwargs["as_json"]))
            raise click.exceptions.Exit(refused) from None
        except KeyboardInterrupt:
            echo("interrupted", err=True)
            raise click.exceptions.Exit(INTERRUPTED) from None

    return wrapped


def echo_usage(error: click.ClickException, *, as_json: bool) -> None:
    """Print why the command line is wrong."""
    if as_json:
        context = getattr(error, "ctx", None)
        hint = None if context is None else f"see {context.command_path} {context.help_option_names[-1]}"
        echo_json({"error": "UsageError", "message": error.format_message(), "path": None, "key": None, "hint": hint})
        return
    try:
        error.show()
    except OSError:
        disconnect(sys.stderr)


def hint_of(hint: str | None) -> str | None:
    """A hint of an error in the words of the command: with its options instead of arguments of functions."""
    return adapt_hint(hint, _option)


def hint_near(path: str) -> None:
    """Print which checkpoints are near a path that has none."""
    hint = _near_hint(path)
    if hint is not None:
        _echo_message("hint", hint)


def _near_hint(path: str) -> str | None:
    from reshard.opening.near import near

    found = near(path)
    return f"did you mean {' or '.join(show(one) for one in found)}?" if found else None


def _is_given(path: str | None) -> bool:
    """Whether a path is an argument of the command, possibly spelled in another way."""
    context = click.get_current_context()
    found = [context.params.get(param.name or "") for param in context.command.params if param.type is PATH]
    values = [one for value in found for one in (value if isinstance(value, tuple) else (value,))]
    return path is not None and locate(path).absolute() in [locate(one).absolute() for one in values if one]


def _report(error: ReshardError | OSError, *, as_json: bool) -> None:
    facts = error_facts(error)
    has_names = (facts["hint"] or "").startswith("did you mean")
    if isinstance(error, CheckpointNotFoundError) and not has_names and _is_given(error.path):
        facts["hint"] = _near_hint(str(error.path)) or facts["hint"]
    if as_json:
        echo_json(facts)
        return
    _echo_message("error", facts["message"])
    if facts["hint"]:
        _echo_message("hint", facts["hint"])


def _with_options(text: str) -> str:
    """A message with function arguments in backticks replaced by the options of the command."""
    text = re.sub(r"`([a-z_]+)=([^`]*)`", lambda match: _option(match[1], match[2]) or match[0], text)
    return re.sub("`([a-z_]+)`", lambda match: _option(match[1], "") or match[0], text)


def _option(name: str, value: str) -> str | None:
    """The option for an argument of a function, with its value; None if the command has none."""
    field = re.fullmatch(r"[A-Z]\w*\(([a-z_]+)=(.*)\)", value, re.DOTALL)
    if field is not None:  # of a group of options, as in `files=Files(dedup=False)`
        return _option(field[1], "" if field[2] == "..." else field[2])
    command = click.get_current_context().command
    special = _OPTIONS.get((command.name or "", name))
    if special is not None:
        return special
    param = next((one for one in command.params if one.name == name and isinstance(one, click.Option)), None)
    if param is None:
        return None
    try:
        given = ast.literal_eval(value) if value else True
    except (ValueError, SyntaxError):
        given = True
    if given is False:
        return param.secondary_opts[0] if param.secondary_opts else None
    if given is True:
        return param.opts[0]
    if isinstance(given, tuple):  # a share
        return f"{param.opts[0]} {'/'.join(map(str, given))}"
    if isinstance(given, dict):  # as in `rename={"model.": ""}`
        given = [f"{key}={item}" for key, item in given.items()]
    values = given if isinstance(given, list) else [given]
    return " ".join(f"{param.opts[0]} {shlex.quote(str(one))}" for one in values)


def error_facts(error: ReshardError | OSError) -> dict[str, Any]:
    """An error as the object that `--json` prints, in the words of the command."""
    name = type(error).__name__
    if isinstance(error, ReshardError):
        message = _with_options(error.message) if isinstance(error, ArgumentError) else error.message
        hint = hint_of(error.hint)
        if hint is None and isinstance(error, StorageError) and error.errno in (errno.EACCES, errno.EPERM):
            hint = "run this as the user that owns the files, or change their permissions"
        return {"error": name, "message": message, "path": error.path, "key": error.key, "hint": hint}
    path = None if error.filename is None else str(error.filename)
    message = str(error) if error.strerror is None else error.strerror if path is None else f"{path}: {error.strerror}"
    return {"error": name, "message": message, "path": path, "key": None, "hint": None}
