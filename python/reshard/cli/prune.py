"""`reshard prune`, `reshard pin` and `reshard unpin`: which iterations of a root are kept."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

import reshard
from reshard.cli.output import (
    PATH,
    WholeNumber,
    collected_warnings,
    command,
    echo,
    echo_facts,
    echo_json,
    progress_bar,
    shown,
    size,
    warn,
)
from reshard.commit import event_log
from reshard.values.words import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.verbs.prune import Removed

_COUNT = WholeNumber(min=1)
_ITERATION = WholeNumber(min=0)


@click.command(short_help="Remove old iterations of a root.")
@click.argument("root", type=PATH)
@click.option("--keep", type=_COUNT, required=True, metavar="N", help="Keep the newest N complete iterations.")
@click.option("--keep-every", type=_COUNT, metavar="N", help="Also keep every iteration that is a multiple of N.")
@click.option(
    "--keep-best",
    type=(str, _COUNT),
    multiple=True,
    metavar="METRIC N",
    help="Also keep the N iterations with the lowest values of METRIC, such as loss; -METRIC: the highest. Once only.",
)
@click.option("--dry-run", is_flag=True, help="Only report what would be removed.")
@command
def prune(
    root: str,
    *,
    keep: int,
    keep_every: int | None,
    keep_best: tuple[tuple[str, int], ...],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove the iterations of ROOT that are not to be kept, and report why the others stay.

    These are never removed: the iteration that the tracker names, pinned iterations, iterations above the tracker,
    incomplete and damaged ones, the newest verified one, and those that a process reads. Nothing is removed unless a
    newer iteration that stays has been verified since it was written. If there is none, the newest one that stays is
    verified first, and the next one if it is damaged.

    \b
    Examples:
      reshard prune output/checkpoint --keep 5 --dry-run
      reshard prune output/checkpoint --keep 5 --keep-every 1000

    Exit codes: 0 success, 1 refused, or an iteration could not be removed, 2 usage error.
    """
    if len(keep_best) > 1:
        raise click.BadParameter(
            "is given twice; pin the iterations that are the best by another metric", param_hint="--keep-best"
        )
    best = keep_best[0] if keep_best else None
    with collected_warnings() as logged, progress_bar() as progress:
        retention = reshard.Retention(keep=keep, keep_every=keep_every, best=best)
        log = event_log.follow_up(root)  # of the run, if it has one
        removed = reshard.prune(root, retention=retention, dry_run=dry_run, progress=progress, on_event=log)
    warnings = list(dict.fromkeys((*logged, *removed.warnings)))
    if as_json:
        echo_json({"dry_run": dry_run, **dataclasses.asdict(removed), "warnings": warnings})
    else:
        _print(removed, warnings, dry_run=dry_run)
    if removed.failed:
        raise click.exceptions.Exit(1)


def _print(removed: Removed, warnings: Sequence[str], *, dry_run: bool) -> None:
    lines = dict.fromkeys(removed.iterations, "would be removed" if dry_run else "removed")
    lines |= {iteration: f"kept: {reason}" for iteration, reason in removed.kept.items()}
    if lines:
        echo_facts([(str(iteration), shown(lines[iteration])) for iteration in sorted(lines, reverse=True)])
    if removed.iterations:
        verb = "would be removed" if dry_run else "removed"
        echo(f"{counted(len(removed.iterations), 'iteration')}, {size(removed.n_bytes)}, {verb}")
    else:
        echo(f"nothing {'would be' if dry_run else 'was'} removed")
    warn(*warnings)


@click.command(short_help="Protect an iteration from removal.")
@click.argument("root", type=PATH)
@click.argument("iteration", type=_ITERATION)
@command
def pin(root: str, iteration: int, *, as_json: bool) -> None:
    """Protect ITERATION of ROOT: neither `prune` nor the retention of a run removes it.

    \b
    Examples:
      reshard pin output/checkpoint 400
    """
    reshard.pin(root, iteration)
    _echo_pin(root, iteration, "pinned", as_json=as_json)


@click.command(short_help="Remove the protection of an iteration.")
@click.argument("root", type=PATH)
@click.argument("iteration", type=_ITERATION)
@command
def unpin(root: str, iteration: int, *, as_json: bool) -> None:
    """Undo `pin`: retention may remove ITERATION of ROOT again.

    \b
    Examples:
      reshard unpin output/checkpoint 400
    """
    reshard.unpin(root, iteration)
    _echo_pin(root, iteration, "not pinned", as_json=as_json)


def _echo_pin(root: str, iteration: int, state: str, *, as_json: bool) -> None:
    if as_json:
        echo_json({"root": root, "iteration": iteration, "pinned": state == "pinned"})
    else:
        echo(f"{shown(root)}: iteration {iteration} is {state}")
