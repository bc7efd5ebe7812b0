"""`reshard diff`: compare two checkpoints, tensor by tensor."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import click

import reshard
from reshard.cli.conversion import options, place_and_progress, read_on
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
@click.option(
    "--sort",
    type=click.Choice(["stored", "change"]),
    default="stored",
    show_default=True,
    help="The order of the list. change: the largest relative change first.",
)
@click.option("--atol", type=float, metavar="NUMBER", help="Absolute tolerance. Default: 0 with --rtol.")
@click.option("--rtol", type=float, metavar="NUMBER", help="Relative tolerance. Default: 0 with --atol.")
@click.option("--format-a", metavar="NAME", help="Which checkpoint of A, if A is a folder with several formats.")
@click.option("--format-b", metavar="NAME", help="The same for B.")
@options("memory", "threads")
@read_on
@click.option("--all", "everything", is_flag=True, help="List every tensor that differs, also within the tolerance.")
@functools.partial(command, refused=2)
def diff(a: str, b: str, *, everything: bool, on: str | None, timeout: float, as_json: bool, **options: Any) -> None:
    """Compare the tensors of A and B: keys, shapes, dtypes, and every bit.

    A and B are checkpoints in any formats that reshard reads, in any layouts; see `reshard inspect --help`. Files that
    hold no tensors, such as config.json, are not compared. For each tensor that differs, the list shows the largest
    absolute difference of two elements, the norm of the difference relative to that of the first
    tensor, and both norms.

    With --atol or --rtol, differences of two elements up to atol + rtol * (the larger absolute value) are
    accepted, also between dtypes. Rounding to bfloat16 is within --rtol 0.00390625 (2**-8).

    \b
    Examples:
      reshard diff output/checkpoint hf/ --part model
      reshard diff output/checkpoint hf/ --part model --sort change
      reshard diff output/checkpoint hf/ --part model --rtol 0.00390625
      reshard diff hf/ output/checkpoint --part model --json

    Exit codes: 0 equal or within the tolerance, 1 different, 2 refused or usage error.
    """
    tolerance = options["atol"] if options["rtol"] is None else options["rtol"]
    with collected_warnings() as logged, place_and_progress(on, timeout) as (place, progress):
        report = reshard.diff(a, b, on=place, progress=progress, **options)
    if as_json:
        echo_json(
            {
                "equal": report.equal,
                "close": None if tolerance is None else report.close,
                **dataclasses.asdict(report),
                # JSON has no infinity.
                "differences": [_json(one) for one in report.differences],
                "warnings": logged,
            }
        )
    else:
        echo(f"a: {shown(report.a)}")
        echo(f"b: {shown(report.b)}")
        counts = [f"{report.n_equal} tensors are equal", f"{len(report.differences)} differ"]
        outside = [one for one in report.differences if not one.close]
        if tolerance is not None:
            counts[1:] = [f"{len(report.differences) - len(outside)} within the tolerance", f"{len(outside)} differ"]
        echo(f"{', '.join(counts)}, {size(report.n_bytes)} compared")
        listed = list(report.differences) if everything else outside[:_MAX_ROWS]
        if listed:
            _print_rows(listed, has_tolerance=tolerance is not None)
        echo_more(0 if everything else len(outside) - len(listed))
        warn(*logged)
    if not report.close:
        raise click.exceptions.Exit(1)


def _json(one: TensorDifference) -> dict[str, Any]:
    fields = dataclasses.asdict(one)
    infinite = {name: str(value) for name, value in fields.items() if isinstance(value, float) and math.isinf(value)}
    return fields | infinite


def _print_rows(differences: list[TensorDifference], *, has_tolerance: bool) -> None:
    outside = ["outside"] if has_tolerance else []
    table = plain_table(
        *("key", "what", "dtype", "shape", "elements", *outside, "largest difference", "change", "norms"),
        right=("elements", "outside", "change"),
    )
    for one in differences:
        count = "" if one.n_different is None else f"{one.n_different} of {one.n_elements}"
        nan = f", {one.n_nan} NaN on one side" if one.n_nan else ""
        n_outside = "" if one.n_outside is None else str(one.n_outside)
        table.add_row(
            shown(one.key),
            one.kind,
            _both(one.dtype_a, one.dtype_b),
            _both(*(None if shape is None else join_dims(shape) for shape in (one.shape_a, one.shape_b))),
            count,
            *([n_outside] if has_tolerance else []),
            _number(one.max_abs) + nan,
            "" if one.change is None else f"{one.change:.3g}",
            _both(*(_number(norm) or None for norm in (one.norm_a, one.norm_b))),
        )
    echo_table(table)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _both(a: str | None, b: str | None) -> str:
    return a or b or "" if a == b or a is None or b is None else f"{a} / {b}"
