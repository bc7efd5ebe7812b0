"""`reshard watch`: show a run while it saves: recent events, the save in progress, the newest complete iteration.

`watched` gathers the state; here it is printed. All text of events is escaped: the log may come from anywhere.
"""

from __future__ import annotations

import datetime as dt
import json
import shlex
import sys
import time
from typing import TYPE_CHECKING

import click

from reshard.cli.output import (
    PATH,
    Number,
    command,
    console,
    duration,
    echo,
    echo_facts,
    echo_file,
    echo_json,
    echo_table,
    facts_table,
    fitted,
    plain_table,
    rate,
    shown,
    size,
    warn,
)
from reshard.commit.event_log import EVENT_FILE
from reshard.errors import ArgumentError, CheckpointNotFoundError
from reshard.storage.location import locate
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from reshard.cli.watched import InFlight, Newest, RunState, Watch
    from reshard.values.events import Event

_MAX_SHOWN = 20  # events that `--once` prints
_MIN_SHOWN = 3
_MAX_REASON = 300


@click.command(short_help="Show a run while it saves.")
@click.argument("root", type=PATH)
@click.option("--once", is_flag=True, help="Print the state once and exit.")
@click.option(
    "--interval",
    type=Number(min=0.1, max=3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Seconds between two looks at ROOT.",
)
@command
def watch(root: str, *, once: bool, interval: float, as_json: bool) -> None:
    """Show the run that saves into the checkpoint root ROOT, until Ctrl-C.

    The command shows recent events, the save in progress, the newest complete iteration and its age, and the rate of
    the last save. Tensor data is not read.

    Events come from events.jsonl in ROOT, which the run writes if it is given on_event=reshard.EventLog(ROOT). Without
    this file, they follow from the files of ROOT: saves that were published and iterations that were removed. If ROOT
    does not exist yet, the command waits for it.

    With --json, each event is printed as one line as soon as it is known. With --once --json, the state is one JSON
    object.

    \b
    Examples:
      reshard watch output/checkpoint
      reshard watch output/checkpoint --once
      reshard watch output/checkpoint --json

    Exit codes: 0 success or Ctrl-C, 1 ROOT cannot be read, or does not exist with --once, 2 usage error.
    """
    from reshard.cli.watched import Watch

    place = locate(root)
    if place.found() not in (None, "folder"):
        raise ArgumentError(f"{show(root)} is a file, expected a checkpoint root", path=root)
    watched = Watch(root)
    if once:
        if not place.is_folder():
            raise CheckpointNotFoundError(f"there is nothing at {show(root)}", path=root)
        state, _ = watched.look()
        if as_json:
            echo_json(state.to_json())
        else:
            echo_facts(_facts(state))
            if state.events:
                echo()
                echo_table(_table(state.events[-_MAX_SHOWN:]))
        if state.problem is not None:
            warn(state.problem)
            raise click.exceptions.Exit(1)
        return
    try:
        if sys.stdout.isatty() and not as_json:
            _show_live(watched, interval)
        else:
            _print_lines(watched, interval, as_json=as_json)
    except KeyboardInterrupt:
        return  # the usual end


def _print_lines(watched: Watch, interval: float, *, as_json: bool) -> None:
    """A line for each event."""
    known: tuple[bool, str | None] = (True, None)
    is_first = True
    while True:
        state, new = watched.look()
        if is_first and state.exists and not as_json:
            echo(f"{shown(state.root)}: {_newest(state, dt.datetime.now(dt.UTC))}")
        is_first = False
        if (state.exists, state.problem) != known:
            known = (state.exists, state.problem)
            if not state.exists:
                echo(_waiting(state), err=True)
            if state.problem is not None:
                warn(state.problem)
        for event in new:
            if as_json:
                echo_file(f"{json.dumps(event.to_json())}\n")
            elif event.kind != "writing":
                echo("  ".join(text for text in _cells(event, with_date=True) if text))
        sys.stdout.flush()
        time.sleep(interval)


def _show_live(watched: Watch, interval: float) -> None:
    """The state, drawn again after each look."""
    from rich.live import Live

    out = console()
    with Live(console=out, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            state, _ = watched.look()
            live.update(_page(state, max(_MIN_SHOWN, out.height - 11), out), refresh=True)
            time.sleep(interval)


def _page(state: RunState, n_events: int, out: Console) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [fitted(facts_table(_facts(state)), out)]
    if state.events:
        parts += ["", fitted(_table(state.events[-n_events:]), out)]
    return Group(*parts, "", Text("Ctrl-C ends this command; the run goes on", style="dim"))


def _facts(state: RunState) -> list[tuple[str, str]]:
    facts = [("root", shown(state.root))]
    if not state.exists:
        return [*facts, ("state", _waiting(state))]
    if state.problem is not None:
        facts.append(("problem", shown(state.problem)))
    now = dt.datetime.now(dt.UTC)
    facts.append(("newest", _newest(state, now)))
    if state.newest is not None and state.newest.skipped:
        names = listed(map(shown, state.newest.skipped))
        facts.append(("skipped", f"{names}; {_reasons(state)}"))
    if state.newest is not None and state.newest.unhealthy is not None:
        facts.append(("health", shown(state.newest.unhealthy)))
    if state.newest is not None and state.newest.seconds is not None:
        facts.append(("last save", _last_save(state.newest)))
    facts.append(("in progress", "no save" if state.in_flight is None else _in_flight(state.in_flight, now)))
    if state.interval_seconds is not None:
        facts.append(("interval", f"{duration(state.interval_seconds)} between saves"))
    source = f"{EVENT_FILE}" if state.source == EVENT_FILE else f"the files of the root (there is no {EVENT_FILE})"
    if state.n_bad:
        source += f"; {state.n_bad} invalid line{'' if state.n_bad == 1 else 's'} skipped"
    return [*facts, ("source", source)]


def _reasons(state: RunState) -> str:
    return f"for the reasons run: reshard explain {shlex.quote(shown(state.root))}"


def _waiting(state: RunState) -> str:
    return f"{shown(state.root)} does not exist yet: waiting for it"


def _newest(state: RunState, now: dt.datetime) -> str:
    newest = state.newest
    if newest is None:
        return f"{'not known' if state.problem else 'no complete checkpoint'}; {_reasons(state)}"
    what = shown(newest.name) if newest.iteration is None else f"iteration {newest.iteration}"
    age = duration(max(0.0, (now - newest.saved_at).total_seconds()))
    when = newest.saved_at.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    return f"{what}, complete, {size(newest.n_bytes)}, saved {age} ago ({when})"


def _last_save(newest: Newest) -> str:
    assert newest.seconds is not None
    text = f"{newest.seconds:.1f} s, {rate(newest.n_bytes, newest.seconds)}"
    return text if newest.stall_seconds is None else f"{text}; the training waited {newest.stall_seconds:.1f} s"


def _in_flight(save: InFlight, now: dt.datetime) -> str:
    seconds = max(0.0, (now - save.begun_at).total_seconds())
    text = f"iteration {save.iteration}, begun {duration(seconds)} ago"
    if save.is_alive is False:
        return f"{text}: interrupted; its process has ended"
    if save.n_bytes is not None and save.total_bytes:
        done = min(100, 100 * save.n_bytes // save.total_bytes)
        text += f": {done}%, {size(save.n_bytes)} of {size(save.total_bytes)} written on rank 0"
        return f"{text}, {rate(save.n_bytes, seconds)}" if save.stage == "writing" else f"{text}; waiting for all ranks"
    return f"{text}: copied, writing" if save.stage == "copied" else text


def _table(events: tuple[Event, ...]) -> Table:
    table = plain_table("time", "iteration", "event", "", right=("iteration",), folds=("",))
    for event in events:
        table.add_row(*_cells(event, with_date=False))
    return table


def _cells(event: Event, *, with_date: bool) -> tuple[str, str, str, str]:
    when = event.time.astimezone().strftime("%Y-%m-%d %H:%M:%S" if with_date else "%H:%M:%S")
    iteration = "" if event.iteration is None else str(event.iteration)
    return when, iteration, shown(event.kind.replace("_", " ")), shown(_details(event))


def _details(event: Event) -> str:
    """What an event says besides its kind; of a kind that is not known, its fields."""
    numbers = {name: value for name, value in event.fields.items() if isinstance(value, int | float) and value >= 0}
    n_bytes, seconds, stall = (numbers.get(name) for name in ("n_bytes", "seconds", "stall_seconds"))
    reason = event.fields.get("reason")
    parts = []
    if event.kind == "published" and n_bytes is not None and seconds is not None:
        parts = [f"{size(int(n_bytes))} in {seconds:.1f} s", rate(int(n_bytes), seconds)]
        parts += [] if stall is None else [f"the training waited {stall:.1f} s"]
    elif event.kind in ("begun", "written") and n_bytes is not None:
        parts = [f"{size(int(n_bytes))} on rank {event.rank}"]
    elif event.kind == "copied" and seconds is not None:
        parts = [f"after {seconds:.2f} s"]
    elif event.kind in ("pruned", "skipped", "failed"):
        parts = [] if n_bytes is None else [size(int(n_bytes))]
        parts += [str(event.fields["name"])] if "name" in event.fields else []
        parts += [str(reason)[:_MAX_REASON]] if reason is not None else []
    elif event.kind == "resumed":
        parts = ["nothing to resume from"] if event.fields.get("fresh") else [str(event.fields.get("path") or "")]
    elif event.kind == "rolled_back" and event.fields.get("previous") is not None:
        parts = [f"the tracker named {event.fields['previous']}"]
    else:
        parts = [f"{name}={value}" for name, value in event.fields.items()]
    return ", ".join(part for part in parts if part)[:_MAX_REASON]
