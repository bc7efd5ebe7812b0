"""The common part of `convert`, `merge` and `split`: their options, and running and reporting a conversion."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

import click

import reshard
from reshard.cli.output import (
    FORMAT_HELP,
    PATH,
    SIZE,
    WholeNumber,
    collected_warnings,
    echo,
    echo_json,
    progress_bar,
    rate,
    shown,
    size,
    warn,
)
from reshard.ranks.launcher import known_variables, launched
from reshard.values.words import counted, listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from reshard.ranks.places import Place, ShareRun
    from reshard.values.argument_types import Progress

F = TypeVar("F", bound="Callable[..., object]")


class Where(click.ParamType[str]):
    """Where work is done: "ranks", or a cluster of Ray."""

    name = "where"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:  # noqa: ARG002
        """As in the help."""
        return "ranks|ray[://ADDRESS]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The same text."""
        if value not in ("ranks", "ray") and re.match(r"ray://.+:[0-9]", value) is None:
            self.fail(f"{value!r} is not ranks, ray or ray://HOST:PORT", param, ctx)
        return str(value)


_WAIT_S = 3600.0  # ranks for each other, for a share of 1 GiB


@contextlib.contextmanager
def place_of(on: str | None, timeout: float) -> Iterator[Place | None]:
    """The place that an option `--on` names; None: it names none. Of several ranks, rank 0 prints what all know."""
    if on is None:
        yield None
        return
    if on != "ranks":
        from reshard.ray import Ray

        with contextlib.redirect_stdout(sys.stderr):  # Ray prints there that a worker died
            yield Ray("auto" if on == "ray" else on)
        return
    from reshard.ranks.led import launched_ranks

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # the error says why; torch prints its stack as well
    ranks = launched_ranks(timeout)
    context, nowhere = click.get_current_context(), io.StringIO()
    context.call_on_close(ranks.end)
    if ranks.group.rank == 0:
        yield ranks
        return
    try:
        yield ranks
    finally:
        if ranks.is_told:
            context.with_resource(contextlib.redirect_stdout(nowhere))
            context.with_resource(contextlib.redirect_stderr(nowhere))


@contextlib.contextmanager
def place_and_progress(on: str | None, timeout: float) -> Iterator[tuple[Place | None, Progress | None]]:
    """As `place_of`, with the progress of the command. Rank 0 alone shows it: no other knows what is done."""
    from reshard.ranks.led import LedRanks

    with contextlib.ExitStack() as stack:
        place = stack.enter_context(place_of(on, timeout))
        is_led = isinstance(place, LedRanks) and place.group.rank > 0
        yield place, None if is_led else stack.enter_context(progress_bar())


OPTIONS: dict[str, Callable[[Any], Any]] = {
    "part": click.option(
        "--part",
        type=click.Choice(["model", "optimizer", "all"]),
        help="Which tensors. Default: model for huggingface, torch and megatron, else all.",
    ),
    "strategy": click.option(
        "--strategy",
        type=PATH,
        metavar="PATH",
        help="How the rank folders of SRC are sharded: a strategy file, or the folder with those of all stages. "
        "Default: the folder `strategy` beside SRC. For ranks of Megatron-LM and vLLM, a layout file.",
    ),
    "format": click.option("--format", metavar="NAME", help=FORMAT_HELP.replace("a folder", "SRC")),
    "suffix": click.option(
        "--suffix",
        metavar="TEXT",
        help="Which file of each rank folder to read, by the end of its name: 20_2, or 1-20_2 for a later run. "
        "Default: the newest.",
    ),
    "entry": click.option(
        "--entry",
        metavar="NAME",
        help="Take the weights below the entry NAME of a file that holds several sets of them, such as ema, and leave "
        "it out of their names.",
    ),
    "only": click.option(
        "--only",
        multiple=True,
        metavar="PREFIX",
        help="Take only the tensors whose names start with PREFIX. Can be repeated.",
    ),
    "drop": click.option(
        "--drop",
        multiple=True,
        metavar="PREFIX",
        help="Leave out the tensors whose names start with PREFIX. Can be repeated.",
    ),
    "rename": click.option(
        "--rename",
        multiple=True,
        metavar="OLD=NEW",
        help="Replace the prefix OLD of tensor names by NEW. The longest matching OLD is used; an empty OLD matches "
        "every name. Can be repeated.",
    ),
    "pad": click.option(
        "--pad",
        multiple=True,
        metavar="PREFIX=ROWS",
        help="Lengthen the tensors whose names start with PREFIX to ROWS rows, with zeros: a number, or a field of "
        "config.json such as padded_vocab_size. Optimizer state follows. Can be repeated.",
    ),
    "trim": click.option(
        "--trim",
        multiple=True,
        metavar="PREFIX=ROWS",
        help="Leave out the rows after ROWS of the tensors whose names start with PREFIX, such as lm_head.=vocab_size. "
        "Can be repeated.",
    ),
    "names": click.option(
        "--names",
        type=PATH,
        metavar="FILE|PRESET",
        help="Name map, which renames, fuses and splits tensors, after --drop and --rename: a file, or a preset such "
        "as qwen3-mindspore. Append :reverse to apply it in reverse.",
    ),
    "config": click.option(
        "--config",
        type=PATH,
        metavar="FILE",
        help="config.json for the sizes that --names, --pad and --trim need. Default: the one in SRC, else in "
        "--model-files.",
    ),
    "model_files": click.option(
        "--model-files",
        metavar="DIR",
        type=PATH,
        help="Folder from which config.json, tokenizer and other files except weights are copied into DST, if DST is a "
        "folder of huggingface or torch. Default: SRC, if it is one.",
    ),
    "layout": click.option(
        "--layout",
        type=PATH,
        metavar="FILE",
        help="How DST is sharded: a layout file, a strategy file, or a folder of these. Default: full tensors.",
    ),
    "iteration": click.option(
        "--iteration",
        type=WholeNumber(min=0),
        metavar="N",
        help="Number of the iteration that is written; for rank folders with --prefix the step. Default: that of SRC, "
        "or its step, or 0.",
    ),
    "prefix": click.option(
        "--prefix",
        metavar="NAME",
        help="Prefix of the names of Checkpoint 2.0 shard files, or of rank files. Default for rank files: "
        "net.safetensors, without rank and step.",
    ),
    "dtype": click.option(
        "--dtype",
        metavar="DTYPE",
        help="Cast floating-point tensors to DTYPE, such as bfloat16. Quantised weights become ordinary tensors of it, "
        "and float8_e4m3fn quantises weights; nvfp4 and nvfp4-modelopt change between the forms of NVFP4 of "
        "compressed-tensors and modelopt. Tensors that the library of the model keeps in float32 stay float32.",
    ),
    "dtype_all": click.option("--dtype-all", is_flag=True, help="With --dtype: cast these tensors, too."),
    "max_shard_size": click.option(
        "--max-shard-size",
        type=SIZE,
        metavar="SIZE",
        help="Maximum size of a file of full weights or of dcp. Default: 4GiB for huggingface and torch, about 3GiB "
        "for mindspore, no limit for dcp.",
    ),
    "dedup": click.option(
        "--dedup/--no-dedup",
        default=None,
        help="Write each shard once, or every replica. Default: once, but in rank folders every replica.",
    ),
    "memory": click.option(
        "--memory",
        type=SIZE,
        default="256MiB",
        show_default=True,
        metavar="SIZE",
        help="Memory limit of the copy buffers.",
    ),
    "threads": click.option(
        "--threads", type=WholeNumber(1, 1024), metavar="N", help="Number of copy threads. Default: all processors."
    ),
    "no_sync": click.option(
        "--no-sync", is_flag=True, help="Do not sync files to disk. DST can be lost in a power failure."
    ),
    "overwrite": click.option(
        "--overwrite", is_flag=True, help="Replace an existing iteration, or the files of an earlier conversion."
    ),
    "check_names": click.option(
        "--no-check",
        "check_names",
        is_flag=True,
        flag_value=False,
        default=True,
        help="Do not compare the names with those of the model of config.json, as transformers loads it.",
    ),
    "strict_format": click.option(
        "--strict-format", is_flag=True, help="Refuse tensors that metadata.json cannot describe."
    ),
    "modes": click.option(
        "--modes",
        type=click.Choice(["mindspore-transformers"]),
        help="File permissions as MindSpore Transformers sets them (0400).",
    ),
    "private": click.option(
        "--private", is_flag=True, help="Create files with mode 0600 and folders with 0700. Default: by the umask."
    ),
    "share": click.option(
        "--share",
        metavar="I/N",
        help="Write share I of N, with I from 0: as many bytes as the others, of files and of ranges inside of files. "
        "The process that writes the last share publishes DST.",
    ),
    "on": click.option(
        "--on",
        type=Where(),
        help="ranks: of the processes that torchrun, srun or mpirun started, each writes its share, as with --share. "
        "ray: the workers of the Ray cluster of this host write the shares; ray://HOST:10001: of another cluster.",
    ),
}
"""Each option of `reshard.convert` on the command line, by the name of its argument, or of its field of an option."""


def read_on(function: F) -> F:
    """Add the options of a command that reads: where, and how long ranks wait."""
    for option in (
        click.option(
            "--timeout",
            type=click.FloatRange(min=0, min_open=True),
            default=3600.0,
            show_default=True,
            metavar="SECONDS",
            help="With --on ranks: how long the ranks wait for each other. They read 1 GiB each at a time.",
        ),
        click.option(
            "--on",
            type=Where(),
            help="ranks: the processes that torchrun, srun or mpirun started read the bytes, and rank 0 prints the "
            "result. ray: the workers of the Ray cluster of this host do; ray://HOST:10001: of another cluster.",
        ),
    ):
        function = option(function)
    return function


def options(*names: str) -> Callable[[F], F]:
    """Add these options to a command, in this order."""

    def decorate(function: F) -> F:
        for name in reversed(names):
            function = OPTIONS[name](function)
        return function

    return decorate


def run_conversion(
    src: str, dst: str, *, no_sync: bool, as_json: bool, share: str | None, on: str | None, **given: Any
) -> None:
    """Convert, and print a report.

    Args:
        src: the source.
        dst: the destination.
        no_sync: do not sync files to disk.
        as_json: print the report as JSON.
        share: "I/N", or None.
        on: "ranks": the share is that of this rank; "ray" or "ray://ADDRESS"; or None.
        given: the other arguments of `reshard.convert`.
    """
    own = _share(share, on)
    from reshard.verbs.convert import is_led as is_led_conversion

    is_led = on == "ranks" and is_led_conversion(dst, given.get("to"), has_layout=given.get("layout") is not None)
    given["rename"] = _renames(given["rename"])
    for name in ("pad", "trim"):
        if name in given:
            given[name] = _rows(name, given[name])
    groups: dict[str, Any] = {
        group.keyword: group(**{field.name: given.pop(field.name) for field in fields(group) if field.name in given})
        for group in (reshard.Select, reshard.Files)
    }
    commit = reshard.Commit(durable=not no_sync, private=given.pop("private"))
    is_first = own is None or own[0] == 0 or on is None
    given["share"] = None if is_led else own
    where = on if on != "ranks" or (is_led and own is not None) else None
    bar = progress_bar() if is_first else contextlib.nullcontext()
    with collected_warnings() as logged, bar as progress, place_of(where, _WAIT_S) as place:
        report = reshard.convert(src, dst, commit=commit, on=place, progress=progress, **groups, **given)
    # What is in the report was often logged as well, with where it came from before it.
    warnings = [*report.warnings, *(line for line in logged if not any(known in line for known in report.warnings))]
    if as_json:
        of_share = {} if given["share"] is None else {"share": "{}/{}".format(*given["share"])}
        echo_json({**dataclasses.asdict(report), "warnings": warnings, **of_share})
        return
    if report.pending:
        number, of = given["share"]
        echo(f"wrote share {number} of {of}; shares still to be written: {listed(report.pending)}")
    else:
        echo(f"wrote {shown(report.path)}")
    echo(
        f"{report.to}, {counted(report.n_tensors, 'tensor')}, {counted(report.n_files, 'file')}, "
        f"{size(report.n_bytes)} in {report.seconds:.1f} s, {rate(report.n_bytes, report.seconds)}"
    )
    print_shares(report.shares)
    warn(*warnings)
    if report.not_expressible:
        echo(f"hint: `reshard inspect {shown(dst)}` marks them", err=True)


def print_shares(shares: Sequence[ShareRun]) -> None:
    """Print what each worker did, and which shares were begun again."""
    workers: dict[tuple[str, int], list[ShareRun]] = {}
    for one in shares:
        workers.setdefault((one.host, one.process), []).append(one)
    for (host, process), own in sorted(workers.items()):
        n_bytes, seconds = sum(one.n_bytes for one in own), sum(one.seconds for one in own)
        speed = rate(n_bytes, seconds)
        echo(f"  {shown(host)}, process {process}: {counted(len(own), 'share')}, {size(n_bytes)}, {speed}")
    for one in shares:
        for reason in one.retried:
            echo(f"  share {one.share} was begun again: {shown(reason)}")


def _renames(given: tuple[str, ...]) -> dict[str, str] | None:
    renames: dict[str, str] = {}
    for text in given:
        old, equals, new = text.partition("=")
        if not equals:
            raise click.BadParameter(f"{text!r} is not OLD=NEW, such as model.=", param_hint="--rename")
        if renames.setdefault(old, new) != new:
            raise click.BadParameter(f"{old!r} is renamed to two names", param_hint="--rename")
    return renames or None


def _rows(name: str, given: tuple[str, ...]) -> dict[str, int | str] | None:
    sizes: dict[str, int | str] = {}
    for text in given:
        prefix, equals, size = text.rpartition("=")
        if not (equals and prefix and size):
            raise click.BadParameter(f"{text!r} is not PREFIX=ROWS, such as lm_head.=32000", param_hint=f"--{name}")
        rows = int(size) if size.isascii() and size.isdigit() else size
        if sizes.setdefault(prefix, rows) != rows:
            raise click.BadParameter(f"{prefix!r} has two sizes", param_hint=f"--{name}")
    return sizes or None


def _parsed(share: str) -> tuple[int, int]:
    index, slash, count = share.partition("/")
    if not (slash and index.isascii() and index.isdigit() and count.isascii() and count.isdigit()):
        raise click.BadParameter(f"{share!r} is not I/N, such as 0/4 for the first of four", param_hint="--share")
    return int(index), int(count)


def _share(share: str | None, on: str | None) -> tuple[int, int] | None:
    """The share of this process; None: it converts all."""
    if on is None:
        return None if share is None else _parsed(share)
    if share is not None:
        raise click.UsageError("--share and --on exclude each other: with --on, each rank or worker has its shares")
    if on != "ranks":
        return None
    found = launched()
    if found is None:
        raise click.UsageError(
            f"no launcher has started this process: none of {known_variables()} are set. Start it with torchrun, srun "
            "or mpirun, or give --share I/N"
        )
    return (found.rank, found.size) if found.size > 1 else None
