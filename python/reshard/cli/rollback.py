"""`reshard rollback`: make the next restart resume from a given iteration."""

from __future__ import annotations

import dataclasses

import click

import reshard
from reshard.cli.output import (
    PATH,
    WholeNumber,
    collected_warnings,
    command,
    echo,
    echo_json,
    progress_bar,
    shown,
    warn,
)
from reshard.commit import event_log


@click.command(short_help="Make the next restart resume from a given iteration.")
@click.argument("root", type=PATH)
@click.argument("iteration", type=WholeNumber(0, 10**18 - 1), required=False)
@click.option("--healthy", is_flag=True, help="Instead of ITERATION: the newest that was saved as healthy.")
@click.option(
    "--verify/--no-verify",
    default=True,
    show_default=True,
    help="Compare every byte of the iteration with its manifest first, or only sizes and headers.",
)
@click.option(
    "--threads", type=WholeNumber(1, 1024), metavar="N", help="Number of read threads. Default: all processors."
)
@click.option("--dry-run", is_flag=True, help="Change nothing; print what would change.")
@command
def rollback(
    root: str,
    iteration: int | None,
    *,
    healthy: bool,
    verify: bool,
    threads: int | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Make the next restart of a run resume from ITERATION of the checkpoint root ROOT.

    The tracker, latest_checkpointed_iteration.txt, is set to ITERATION. Newer iterations stay on disk, and a restart
    does not use them; the first save of the resumed run records this. The command fails if the iteration is missing or
    damaged, or if a running job writes into the root: end the job first.

    \b
    Examples:
      reshard rollback output/checkpoint 400 --dry-run
      reshard rollback output/checkpoint 400
    """
    if (iteration is None) is not healthy:
        raise click.UsageError("give either ITERATION or --healthy")
    with collected_warnings() as logged, progress_bar() as progress:
        changes = reshard.rollback(
            root,
            iteration,
            healthy=healthy,
            verify=verify,
            dry_run=dry_run,
            threads=threads,
            progress=progress,
            on_event=event_log.follow_up(root),  # of the run, if it has one
        )
    if as_json:
        echo_json({"root": root, "dry_run": dry_run, **dataclasses.asdict(changes), "warnings": logged})
        return
    before = "there was no valid tracker" if changes.previous is None else f"the tracker named {changes.previous}"
    state = "every byte verified" if changes.verified else "only the structure was checked"
    resumes = f"{'would resume' if dry_run else 'resumes'} from iteration {changes.iteration}"
    echo(f"{shown(root)}: the next restart {resumes} ({before}; {state})")
    if changes.newer:
        echo(f"newer iterations, which stay on disk and are not used: {', '.join(map(str, changes.newer))}")
    warn(*logged)
