"""`reshard plan`: forecast a conversion to a layout, as text, as a page or as one JSON object."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

import reshard
from reshard.cli.output import (
    FORMAT_HELP,
    PATH,
    STRATEGY_HELP,
    collected_warnings,
    command,
    echo,
    echo_facts,
    echo_json,
    echo_more,
    echo_table,
    natural_order,
    plain_table,
    progress_bar,
    shown,
    size,
    warn,
    write_page,
)
from reshard.values.argument_types import Part
from reshard.values.words import counted

if TYPE_CHECKING:
    from reshard.verbs.forecast import Forecast, Speed

_MAX_ROWS = 16
_MAX_COLUMNS = 8
_SPARE = 20  # a save needs 1/20 more free space than it writes
_BUFFERS = 256 << 20  # the default of `convert --memory`


@click.command(short_help="Forecast a conversion: bytes by rank and file, transfers, memory, disk, seconds.")
@click.argument("src", type=PATH)
@click.option("--layout", type=PATH, required=True, metavar="FILE",
              help="The layout to reshard to: a layout file, a strategy file, or a folder of these.")  # fmt: skip
@click.option("--part", type=click.Choice(["model", "optimizer", "all"]), default="all", show_default=True,
              help="Which tensors.")  # fmt: skip
@click.option("--strategy", type=PATH, metavar="PATH", help=STRATEGY_HELP)
@click.option("--format", metavar="NAME", help=FORMAT_HELP)
@click.option("--dst", type=PATH, default=".", metavar="DIR",
              help="An existing folder on the file system of the destination, for its free space and speed. "
              "Default: the current folder.")  # fmt: skip
@click.option("--measure/--no-measure", default=True, show_default=True,
              help="Measure the speed in DIR, with 384 MiB that are written there and removed.")  # fmt: skip
@click.option(
    "--html", "html", type=PATH, metavar="FILE", help="Write a page for a browser: one file, which uses no network."
)
@command
def plan(
    src: str,
    *,
    layout: str,
    part: Part,
    strategy: str | None,
    format: str | None,  # noqa: A002  the name of the option
    dst: str,
    measure: bool,
    html: str | None,
    as_json: bool,
) -> None:
    """Forecast the conversion of the checkpoint SRC to a layout, before it runs. Tensor data is not read.

    The command prints the bytes that each rank would load, the files that `convert --layout` would write with each
    shard once, which source files each rank would read, the memory and disk that are needed, and the time at the speed
    of this machine.

    \b
    Examples:
      reshard plan output/checkpoint --layout tp4.yaml
      reshard plan output/checkpoint --layout tp4.yaml --dst output
      reshard plan output/checkpoint --layout tp4.yaml --html plan.html
      reshard plan output/checkpoint --layout tp4.yaml --no-measure --json
    """
    from reshard.verbs.forecast import forecast, free_bytes, measure_speed

    opened = functools.partial(reshard.open, src, strategy=strategy, format=format)
    with progress_bar():
        with collected_warnings(print_on_error=False), opened() as checkpoint:
            found = forecast(checkpoint, layout, part=part)
            title = f"{checkpoint.format}: {checkpoint.path}"
        free, speed = free_bytes(dst), measure_speed(dst) if measure else None
    numbers = _numbers(found, free, speed)
    if html is not None:
        from reshard.cli.pages.html import page
        from reshard.cli.pages.plan_data import plan_data

        data = plan_data(found, src=src, layout=layout, facts=_facts(found, numbers, dst))
        write_page(html, page(f"reshard plan {src}", "plan", data))
    if as_json:
        echo_json({"path": src, "layout": layout, **dataclasses.asdict(found), **numbers})
    elif html is not None:
        echo(f"wrote {shown(html)}")
    else:
        echo(f"{shown(title)}, resharded by {shown(layout)}")
        echo_facts([(name, shown(value)) for name, value in _facts(found, numbers, dst)])
        _print_ranks(found)
        _print_transfers(found)
    warn(*found.warnings)


def _numbers(found: Forecast, free: int | None, speed: Speed | None) -> dict[str, Any]:
    """What is needed and available, in bytes and seconds."""
    written = found.written_bytes
    return {
        "written_bytes": written,
        "load_bytes": sum(found.rank_bytes.values()),
        "max_rank_bytes": max(found.rank_bytes.values(), default=0),
        "needed_bytes": written + -(-written // _SPARE),
        "free_bytes": free,
        "convert_bytes_per_s": None if speed is None else speed.convert_bytes_per_s,
        "read_bytes_per_s": None if speed is None else speed.read_bytes_per_s,
        "seconds_cached": None if speed is None else speed.seconds(written, cached=True),
        "seconds": None if speed is None else speed.seconds(written, cached=False),
    }


def _facts(found: Forecast, numbers: dict[str, Any], dst: str) -> list[tuple[str, str]]:
    mesh = " x ".join(f"{axis} {n}" for axis, n in found.mesh.items())
    ranks = list(found.rank_bytes.values())
    mean = sum(ranks) / max(len(ranks), 1)  # 0 if there are no tensors
    largest = numbers["max_rank_bytes"]
    load = f"{size(largest)} of memory on the largest rank"
    load += f", {largest / mean:.2f} times the mean" if mean else ""
    facts = [
        ("tensors", f"{found.n_tensors}, {size(found.n_bytes)} in {counted(len(found.sources), 'file')}"),
        ("layout", f"{mesh}, {counted(len(ranks), 'rank')}"),
        ("load", f"{load}; {size(numbers['load_bytes'])} on all ranks"),
        ("convert", f"writes {size(found.written_bytes)}, each shard once, in at most {size(_BUFFERS)} of buffers"),
    ]
    if found.files is not None:
        sizes = [file.n_bytes for file in found.files]
        ends = dict.fromkeys((size(min(sizes, default=0)), size(max(sizes, default=0))))
        facts.append(("files", f"{len(sizes)}, {' to '.join(ends)} each"))
    else:
        facts.append(("files", "not assigned: more than a million shards"))
    free = numbers["free_bytes"]
    enough = "" if free is None or free >= numbers["needed_bytes"] else ": NOT ENOUGH"
    here = "unknown" if free is None else size(free)
    folder = "the current folder" if dst == "." else dst
    facts.append(("disk", f"{size(numbers['needed_bytes'])} needed with 5 % to spare, {here} free in {folder}{enough}"))
    if numbers["seconds"] is not None:
        cached = f"{_seconds(numbers['seconds_cached'])} if the source is in the page cache"
        facts.append(("time", f"{_seconds(numbers['seconds'])} for convert in one process here, {cached}"))
        write, read = (f"{numbers[name] / 1e9:.2f} GB/s" for name in ("convert_bytes_per_s", "read_bytes_per_s"))
        facts.append(
            ("measured", f"96 MiB in {folder}: {write} converting and syncing, {read} reading past the page cache")
        )
    if len(found.transfers) < len(found.rank_bytes):
        planned = f"planned for {len(found.transfers)} of {len(found.rank_bytes)} ranks, evenly chosen"
        facts.append(("transfers", planned))
    return facts


def _seconds(value: float) -> str:
    if value < 120:
        return f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def _print_ranks(found: Forecast) -> None:
    """The ranks with what they load, consecutive equal ones in one line; of many lines those of the largest loads."""
    are_all = len(found.transfers) == len(found.rank_bytes)
    lines: list[tuple[int, int, int, str]] = []  # first and last rank, bytes, files
    for rank, n_bytes in sorted(found.rank_bytes.items()):
        n_files = str(len(found.transfers[rank])) if are_all else ""
        if lines and lines[-1][1:] == (rank - 1, n_bytes, n_files):
            lines[-1] = (lines[-1][0], rank, n_bytes, n_files)
        else:
            lines.append((rank, rank, n_bytes, n_files))
    listed = sorted(sorted(lines, key=lambda line: (-line[2], line[0]))[:_MAX_ROWS])
    names = ("ranks", "each loads", "files read") if are_all else ("ranks", "each loads")
    table = plain_table(*names, right=names)
    for first, last, n_bytes, n_files in listed:
        table.add_row(
            str(first) if first == last else f"{first}-{last}", size(n_bytes), *([n_files] if are_all else [])
        )
    echo()
    echo_table(table)
    n_left = len(found.rank_bytes) - sum(last - first + 1 for first, last, _, _ in listed)
    echo_more(n_left, "ranks that load at most as much", "--json and --html list all")


def _print_transfers(found: Forecast) -> None:
    """The transfers as a matrix if it is small, else the largest."""
    files = Counter[int]()
    for by_file in found.transfers.values():
        files.update(by_file)
    echo()
    if len(found.transfers) <= _MAX_COLUMNS and len(files) <= _MAX_ROWS:
        echo("bytes from each source file to each rank:")
        names = [f"rank {rank}" for rank in found.transfers]
        table = plain_table("file", *names, right=names)
        for file in sorted(files, key=lambda file: natural_order(found.sources[file].name)):
            cells = [size(by[file]) if file in by else "-" for by in found.transfers.values()]
            table.add_row(shown(found.sources[file].name), *cells)
    else:
        echo("largest transfers (--html shows the matrix):")
        table = plain_table("file", "rank", "bytes", right=("rank", "bytes"))
        all_of_them = [(n, rank, file) for rank, by in found.transfers.items() for file, n in by.items()]
        for n, rank, file in sorted(all_of_them, key=lambda one: (-one[0], one[1], one[2]))[:_MAX_ROWS]:
            table.add_row(shown(found.sources[file].name), str(rank), size(n))
    echo_table(table)
