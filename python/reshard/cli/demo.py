"""`reshard demo`: split, reshard and merge a small model, with a comparison after each step."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from reshard.cli.output import PATH, SIZE, collected_warnings, command, echo, echo_json, progress_bar, rate, shown, size
from reshard.storage.changes import temporary_folder
from reshard.values.arguments import parse_size
from reshard.values.words import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reshard.verbs.demo import DemoStep


@click.command(short_help="Shard, reshard and merge a small model in a temporary folder, and compare every byte.")
@click.option("--size", "model_size", type=SIZE, default="200MB", show_default=True, metavar="SIZE",
              help="Approximate size of the model; a number without a unit is in MB. "
              "The demo writes four times as much.")  # fmt: skip
@click.option("--keep", type=PATH, metavar="DIR", help="Use this empty or new folder, and keep it.")
@command
def demo(model_size: str, keep: str | None, *, as_json: bool) -> None:
    """Shard a small bf16 model, reshard it, merge it, and compare every byte.

    The model is sharded over 2 x 2 ranks, tensor parallel and pipeline parallel (TP2 x PP2), and resharded to 4 ranks,
    tensor parallel (TP4).

    \b
    Examples:
      reshard demo
      reshard demo --size 20 --keep try
    """
    from reshard.verbs.demo import demo as run
    from reshard.verbs.demo import layout_of

    n_bytes = parse_size(f"{model_size}MB" if model_size.isdecimal() else model_size)
    with _folder(keep) as folder, collected_warnings(), progress_bar() as progress:

        def on_step(step: DemoStep) -> None:
            if progress is not None:
                progress.pause()
            if as_json:
                return
            if step.name == "make":
                echo(f"in {shown(folder)}; files are not synced to the disk")
                echo("the layout for TP2 x PP2; for TP4 it has `mesh: {tp: 4}` and no `place`:\n")
                echo("\n".join(f"  {line}" for line in str(layout_of({"pp": 2, "tp": 2})).splitlines()) + "\n")
            echo(_line(step))

        report = run(folder, n_bytes, on_step=on_step, progress=progress)
    if as_json:
        echo_json({**dataclasses.asdict(report), "folder": keep})
    elif report.equal:
        echo(f"\nall {counted(report.n_tensors, 'tensor')} equal, byte for byte, after each step")
        if keep is not None:
            echo(f"kept in {shown(keep)}")
    else:
        different = list(dict.fromkeys(key for step in report.steps for key in step.different))
        echo(f"\n{len(different)} of {report.n_tensors} tensors differ, such as {shown(different[0])}")
    if not report.equal:
        raise click.exceptions.Exit(1)


def _line(step: DemoStep) -> str:
    files = f"{step.n_files} file{'s' if step.n_files != 1 else ' '}"
    line = f"{step.name:<15}  {files}  {size(step.n_bytes):>8}  {step.seconds:>5.2f} s"
    if not step.n_compared:
        return line  # the model: its time is that of the random number generator
    proof = (
        f"{counted(step.n_compared, 'array')} equal"
        if not step.different
        else f"{counted(len(step.different), 'tensor')} DIFFER"
    )
    return f"{line}  {rate(step.n_bytes, step.seconds):>9}  {proof}"


@contextlib.contextmanager
def _folder(keep: str | None) -> Iterator[Path]:
    if keep is not None:
        yield Path(keep)
        return
    with temporary_folder("reshard-demo-") as folder:
        yield folder
