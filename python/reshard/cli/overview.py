"""The list that `reshard inspect` prints for several paths: one line for each checkpoint or run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

import reshard
from reshard.cli.bucket import check_answers
from reshard.cli.output import collected_warnings, echo_json, echo_table, error_facts, plain_table, shown, size
from reshard.errors import ReshardError
from reshard.formats import health
from reshard.opening import iterations
from reshard.storage.location import locate
from reshard.values.words import counted

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Overview:
    """One path of the list.

    Attributes:
        path: as it was given.
        format: the format, or None if the path could not be opened.
        iteration: the newest complete iteration, or that of the checkpoint; None if it has no number.
        n_iterations: number of iterations of a root; None if it is no root.
        n_bytes: size of the files of that iteration.
        saved_at: when it was saved, if its manifest says so.
        healthy: whether it was saved as healthy; None if nothing is recorded.
        unhealthy: why it is unhealthy, and since when.
        skipped: names of newer saves that are not complete.
        error: why the path could not be opened.
    """

    path: str
    format: str | None = None
    iteration: int | None = None
    n_iterations: int | None = None
    n_bytes: int | None = None
    saved_at: str | None = None
    healthy: bool | None = None
    unhealthy: str | None = None
    skipped: tuple[str, ...] = ()
    error: dict[str, Any] | None = None


def print_overview(paths: Sequence[str], *, as_json: bool) -> None:
    """Print a line for each path. A path that cannot be opened has its error, and the exit code is 1."""
    found = [_look(path) for path in paths]
    if as_json:
        echo_json({"checkpoints": [dataclasses.asdict(one) for one in found]})
    else:
        table = plain_table("path", "format", "iteration", "of", "size", "state", right=("iteration", "of", "size"))
        for one in found:
            table.add_row(
                shown(one.path),
                one.format or "",
                *("" if number is None else str(number) for number in (one.iteration, one.n_iterations)),
                "" if one.n_bytes is None else size(one.n_bytes),
                _state(one),
            )
        echo_table(table)
    if any(one.error for one in found):
        raise click.exceptions.Exit(1)


def _look(path: str) -> Overview:
    try:
        check_answers(path)
        with collected_warnings(print_on_error=False), reshard.open(path) as checkpoint:
            order, manifest = iterations(path), checkpoint.manifest
            status = None if manifest is None else manifest.ckpt_status
            known = None
            if manifest is not None and status == 1 and locate(checkpoint.path).is_folder():
                known = health.unhealthy(locate(checkpoint.path).parent, manifest.iteration)
            return Overview(
                path,
                checkpoint.format,
                checkpoint.iteration,
                n_iterations=None if order is None else len(order.candidates) + len(order.refused),
                n_bytes=sum(file.n_bytes for file in checkpoint.files()) if manifest is None else manifest.n_bytes,
                saved_at=None if manifest is None else manifest.saved_at,
                healthy=None if status is None else status == 0,
                unhealthy=None if known is None else str(known),
                skipped=tuple(name for name, _ in checkpoint.skipped),
            )
    except (ReshardError, OSError) as error:
        return Overview(path, error=error_facts(error))


def _state(one: Overview) -> str:
    if one.error is not None:
        return shown(f"error: {one.error['message'].splitlines()[0]}")
    states = {True: "healthy", False: "unhealthy", None: "complete"}
    more = f"; {counted(len(one.skipped), 'newer save')} not complete" if one.skipped else ""
    return shown((one.unhealthy or states[one.healthy]) + more)
