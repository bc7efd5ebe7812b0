"""`reshard prune`, `reshard pin` and `reshard unpin`: which iterations of a root are kept."""

from __future__ import annotations

import dataclasses

import click

import reshard
from reshard.cli.output import PATH, command, echo, echo_facts, echo_json, shown, size, warn

__all__ = ["pin", "prune", "unpin"]

_COUNT = click.IntRange(min=1)
_ITERATION = click.IntRange(min=0)


@click.command(short_help="Remove old iterations of a root.")
@click.argument("root", type=PATH)
@click.option("--keep", type=_COUNT, required=True, metavar="N", help="Keep the newest N complete iterations.")
@click.option("--keep-every", type=_COUNT, metavar="N", help="Keep every iteration that N divides, too.")
@click.option(
    "--keep-best",
    type=(str, _COUNT),
    metavar="METRIC N",
    help="Keep the N with the lowest values of a metric in the log of saves, too; -METRIC: the highest.",
)
@click.option("--dry-run", is_flag=True, help="Only tell what would be removed.")
@command
def prune(
    root: str,
    *,
    keep: int,
    keep_every: int | None,
    keep_best: tuple[str, int] | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove the iterations of ROOT that are not to be kept, and tell of each why it stays.

    What the tracker names, what is pinned or above the tracker, what is not complete, the newest verified one, and what
    somebody reads is never removed.

    \b
    Examples:
      reshard prune output/checkpoint --keep 5 --dry-run
      reshard prune output/checkpoint --keep 5 --keep-every 1000
    """
    removed = reshard.prune(root, keep, keep_every=keep_every, keep_best=keep_best, dry_run=dry_run)
    if as_json:
        echo_json({"dry_run": dry_run, **dataclasses.asdict(removed)})
        return
    gone = dict.fromkeys(removed.iterations, "would be removed" if dry_run else "removed")
    told = {**gone, **{iteration: f"stays: {reason}" for iteration, reason in removed.kept.items()}}
    if told:
        echo_facts([(str(iteration), shown(told[iteration])) for iteration in sorted(told, reverse=True)])
    count = len(removed.iterations)
    echo(
        f"{count} iteration{'' if count == 1 else 's'}, {size(removed.n_bytes)}, "
        f"{'would be removed' if dry_run else 'removed'}"
    )
    for warning in removed.warnings:
        warn(warning)


@click.command(short_help="Keep an iteration whatever retention is asked for.")
@click.argument("root", type=PATH)
@click.argument("iteration", type=_ITERATION)
@command
def pin(root: str, iteration: int, *, as_json: bool) -> None:
    """Keep ITERATION of ROOT whatever retention is asked for.

    \b
    Examples:
      reshard pin output/checkpoint 0
    """
    reshard.pin(root, iteration)
    _echo_pin(root, iteration, "pinned", as_json=as_json)


@click.command(short_help="Let a pinned iteration go the way of all others again.")
@click.argument("root", type=PATH)
@click.argument("iteration", type=_ITERATION)
@command
def unpin(root: str, iteration: int, *, as_json: bool) -> None:
    """Let ITERATION of ROOT go the way of all others again.

    \b
    Examples:
      reshard unpin output/checkpoint 0
    """
    reshard.unpin(root, iteration)
    _echo_pin(root, iteration, "not pinned", as_json=as_json)


def _echo_pin(root: str, iteration: int, state: str, *, as_json: bool) -> None:
    if as_json:
        echo_json({"root": root, "iteration": iteration, "pinned": state == "pinned"})
    else:
        echo(f"{shown(root)}: iteration {iteration} is {state}")
