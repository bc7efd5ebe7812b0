"""`reshard diff`: compare two checkpoints, tensor by tensor."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import click

import reshard
from reshard.cli.conversion import options
from reshard.cli.output import (
    PATH,
    collected_warnings,
    command,
    echo,
    echo_json,
    echo_more,
    echo_table,
    join_dims,
    plain_table,
    progress_bar,
    shown,
    size,
    warn,
)

if TYPE_CHECKING:
    from reshard.verbs.diff import TensorDifference

_MAX_ROWS = 60


@click.command(short_help="Compare two checkpoints of any formats and layouts, tensor by tensor.")
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@click.option(
    "--part", type=click.Choice(["model", "optimizer", "all"]), default="all", show_default=True, help="Which tensors."
)
@click.option("--strategy-a", type=PATH, metavar="PATH", help="Strategy files of A, if A is a folder of rank folders.")
@click.option("--strategy-b", type=PATH, metavar="PATH", help="The same for B.")
@options("memory", "threads")
@click.option("--all", "everything", is_flag=True, help="List every tensor that differs.")
@functools.partial(command, refused=2)
def diff(a: str, b: str, *, everything: bool, as_json: bool, **options: Any) -> None:
    """Compare the tensors of A and B: keys, shapes, dtypes, and every bit.

    A and B are checkpoints in any formats that reshard reads, in any layouts; see `reshard inspect --help`. Files that
    hold no tensors, such as config.json, are not compared.

    \b
    Examples:
      reshard diff output/checkpoint hf/ --part model
      reshard diff hf/ output/checkpoint --part model --json

    Exit codes: 0 equal, 1 different, 2 refused or usage error.
    """
    with collected_warnings() as logged, progress_bar() as progress:
        report = reshard.diff(a, b, progress=progress, **options)
    if as_json:
        echo_json(
            {
                "equal": report.equal,
                **dataclasses.asdict(report),
                # JSON has no infinity.
                "differences": [_json(one) for one in report.differences],
                "warnings": logged,
            }
        )
    else:
        echo(f"a: {shown(report.a)}")
        echo(f"b: {shown(report.b)}")
        echo(f"{report.n_equal} tensors are equal, {len(report.differences)} differ, {size(report.n_bytes)} compared")
        listed = report.differences if everything else report.differences[:_MAX_ROWS]
        if listed:
            _print_rows(listed)
        echo_more(len(report.differences) - len(listed))
        warn(*logged)
    if not report.equal:
        raise click.exceptions.Exit(1)


def _json(one: TensorDifference) -> dict[str, Any]:
    fields = dataclasses.asdict(one)
    if one.max_abs is not None and not math.isfinite(one.max_abs):
        fields["max_abs"] = str(one.max_abs)
    return fields


def _print_rows(differences: tuple[TensorDifference, ...]) -> None:
    table = plain_table("key", "what", "dtype", "shape", "elements", "largest difference", right=("elements",))
    for one in differences:
        count = "" if one.n_different is None else f"{one.n_different} of {one.n_elements}"
        largest = "" if one.max_abs is None else f"{one.max_abs:.6g}"
        nan = f", {one.n_nan} NaN on one side" if one.n_nan else ""
        table.add_row(
            shown(one.key),
            one.kind,
            _both(one.dtype_a, one.dtype_b),
            _both(*(None if shape is None else join_dims(shape) for shape in (one.shape_a, one.shape_b))),
            count,
            largest + nan,
        )
    echo_table(table)


def _both(a: str | None, b: str | None) -> str:
    return a or b or "" if a == b or a is None or b is None else f"{a} / {b}"
