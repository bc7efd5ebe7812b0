"""`reshard inspect --stats`: the statistics of the values of each tensor."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from reshard.cli.conversion import place_and_progress
from reshard.cli.output import (
    collected_warnings,
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
from reshard.layout.patterns import Pattern
from reshard.verbs.stats import stats

if TYPE_CHECKING:
    from reshard.verbs.stats import TensorStats

_MAX_ROWS = 60


def print_stats(
    path: str, pattern: str | None, *, everything: bool, as_json: bool, on: str | None, timeout: float, **given: Any
) -> None:
    """Print the statistics of a checkpoint.

    Args:
        path: the checkpoint.
        pattern: which tensors; None: all.
        everything: print a line for every tensor.
        as_json: print one JSON object.
        on: "ranks", "ray" or "ray://ADDRESS"; None: this process reads.
        timeout: seconds that ranks wait for each other.
        given: the other arguments of `reshard.verbs.stats.stats`.
    """
    if pattern is not None:
        try:
            Pattern.compile(pattern)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="PATTERN") from None
    with collected_warnings() as logged, place_and_progress(on, timeout) as (place, progress):
        report = stats(path, pattern, on=place, progress=progress, **given)
    if as_json:
        tensors = {one.key: _json(one) for one in report.tensors}
        echo_json({**dataclasses.asdict(report), "tensors": tensors, "warnings": logged})
        return
    iteration = "" if report.iteration is None else f", iteration {report.iteration}"
    echo(f"{report.format}{iteration}: {shown(report.path)}")
    echo(f"{len(report.tensors)} tensors, {size(report.n_bytes)} read")
    if left_out := sorted({one.dtype for one in report.tensors if one.n_zero is None}):
        echo(
            f"{sum(one.n_zero is None for one in report.tensors)} of them are not read: values of {', '.join(left_out)}"
        )
    listed = report.tensors if everything else report.tensors[:_MAX_ROWS]
    if listed:
        _print_rows(listed)
    echo_more(len(report.tensors) - len(listed), "more tensors", "give a pattern, or --all")
    warn(*logged)


def _json(one: TensorStats) -> dict[str, Any]:
    fields = dataclasses.asdict(one)
    del fields["key"]
    return fields


def _print_rows(tensors: tuple[TensorStats, ...]) -> None:
    from reshard.quantised.kinds import KINDS

    numbers = ("min", "max", "mean", "std", "zeros", "NaN", "infinite")
    table = plain_table("key", "dtype", "shape", *numbers, right=numbers)
    for one in tensors:
        dtype = one.dtype if one.quantised is None else f"{one.dtype} of {KINDS[one.quantised].title}"
        counts = [""] * 3 if one.n_zero is None else [_share(one), str(one.n_nan or ""), str(one.n_infinite or "")]
        values = [_number(value) for value in (one.min, one.max, one.mean, one.std)]
        table.add_row(shown(one.key), dtype, join_dims(one.shape), *values, *counts)
    echo_table(table)


def _share(one: TensorStats) -> str:
    return f"{one.n_zero / one.n_elements:.2%}" if one.n_zero and one.n_elements else ""


def _number(value: float | None) -> str:
    return "" if value is None else str(value) if isinstance(value, int) else f"{value:.6g}"
