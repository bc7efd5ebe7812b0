"""`reshard verify`: verify every byte of a checkpoint, or of all iterations of a root."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

import reshard
from reshard.cli.conversion import place_and_progress, read_on
from reshard.cli.output import (
    FORMAT_HELP,
    PATH,
    STRATEGY_HELP,
    WholeNumber,
    collected_warnings,
    command,
    echo,
    echo_json,
    hint_of,
    rate,
    shown,
    size,
    warn,
)
from reshard.values.words import counted, listed

if TYPE_CHECKING:
    from reshard.verbs.loads_in import Library, LoadsIn
    from reshard.verbs.verify import VerifiedCheckpoint


@click.command(short_help="Compare every byte with the checksums of the manifest.")
@click.argument("path", type=PATH)
@click.option("--strategy", type=PATH, metavar="PATH", help=STRATEGY_HELP)
@click.option("--format", metavar="NAME", help=FORMAT_HELP)
@click.option(
    "--cached",
    is_flag=True,
    help="Read through the page cache. This is faster, and does not find damage on the disk if a file is in the cache.",
)
@click.option(
    "--threads", type=WholeNumber(1, 1024), metavar="N", help="Number of read threads. Default: all processors."
)
@click.option(
    "--loads-in",
    type=click.Choice(["transformers", "peft", "diffusers"]),
    help="Also compare the names and shapes with those of the model that this library makes of the folder's config.",
)
@click.option(
    "--base",
    type=PATH,
    metavar="DIR",
    help="With --loads-in peft, the folder with the config.json of the base model. Default: what adapter_config.json "
    "names.",
)
@click.option(
    "--health",
    is_flag=True,
    help="Also look for NaN and infinities, negative second moments, weights that are not the rounded fp32 weights of "
    "the optimizer, and copies that differ.",
)
@click.option(
    "--since",
    type=WholeNumber(0),
    metavar="ITERATION",
    help="Also list the tensors of the newest iteration that did not change since this older one. Implies --health.",
)
@click.option(
    "--may-be-infinite",
    multiple=True,
    metavar="PATTERN",
    help="With --health: keys that hold infinities on purpose, such as masks. May be given several times.",
)
@read_on
@command
def verify(
    path: str,
    *,
    strategy: str | None,
    format: str | None,  # noqa: A002  the name of the option
    cached: bool,
    threads: int | None,
    loads_in: Library | None,
    base: str | None,
    health: bool,
    since: int | None,
    may_be_infinite: tuple[str, ...],
    on: str | None,
    timeout: float,
    as_json: bool,
) -> None:
    """Compare every byte of a checkpoint with its checksums, and print the files, tensors and bytes that differ.

    PATH is an iteration folder or any other path that inspect accepts. In a checkpoint root all iterations are
    verified, newest first, and in a folder of rank folders all saves. The manifest of an iteration holds the
    checksums. Without one (checkpoints of MindSpore Transformers) only the structure is checked, and the result is
    "unverified". A .ckpt file with a CRC is compared with it. A file without read permission, or
    one that this version does not support, is reported as unreadable, not as damaged.

    The result for an iteration folder is recorded in a hidden file beside it, for retention: prune, and saves with
    `keep`, do not count a damaged iteration, and do not remove the last verified one.

    With --loads-in, PATH is the folder of a model, an adapter or a pipeline. The library makes the model without memory
    for its weights. Tensors that are missing, have another shape or would be lost are listed. The library must be
    installed.
    With --health each tensor with wrong values is printed with their number and the index of the first one. Checkpoints
    of all formats are looked at. Tensors that --since lists are not wrong: they are perhaps frozen on purpose.

    \b
    Examples:
      reshard verify output/checkpoint
      reshard verify output/checkpoint --json
      reshard verify pretrained --loads-in transformers

    Exit codes: 0 no fault, 1 damaged, unreadable or not what the library loads, 2 usage error, 4 undamaged, but
    --health found wrong values.
    """
    with collected_warnings() as logged, place_and_progress(on, timeout) as (place, progress):
        report = reshard.verify(
            path,
            strategy=strategy,
            format=format,
            health=health,
            since=since,
            may_be_infinite=may_be_infinite,
            direct=not cached,
            threads=threads,
            progress=progress,
            loads_in=loads_in,
            base=base,
            on=place,
        )
    asked = report.loads_in
    warnings = [*report.warnings, *(asked.warnings if asked else ()), *logged]
    if as_json:
        fields: dict[str, Any] = dataclasses.asdict(report)
        if asked is not None:
            fields["loads_in"]["differences"] = [one._asdict() for one in asked.differences]
        echo_json({"ok": report.ok, "healthy": report.healthy, **fields, "warnings": warnings})
    else:
        for one in report.checkpoints:
            _print_checkpoint(one)
        if report.n_bytes:
            echo(f"{size(report.n_bytes)} compared in {report.seconds:.1f} s, {rate(report.n_bytes, report.seconds)}")
        if asked is not None:
            _print_loads_in(report.path, asked)
        warn(*warnings)
        for reason in dict.fromkeys(one.not_recorded for one in report.checkpoints if one.not_recorded):
            warn(f"the result is not recorded for `reshard prune`: {reason}")
    if not report.ok:
        raise click.exceptions.Exit(1)
    if not report.healthy:
        raise click.exceptions.Exit(4)


def _print_checkpoint(one: VerifiedCheckpoint) -> None:
    if one.state == "damaged":
        state = f"damaged, {counted(len(one.faults), 'fault')}"
    elif one.state == "unreadable":
        state = "could not be read: not known whether it is complete or damaged"
    elif one.state == "whole":
        state = f"complete, {counted(one.n_files, 'file')}, {size(one.n_bytes)}"
    else:
        state = "unverified: no manifest, the structure is valid"
    echo(f"{shown(one.path)}: {state}")
    for fault in one.faults:
        echo(f"  {shown(fault)}")
    if one.left_out is not None:
        echo(f"  left out of the save: {shown(one.left_out)}; a resume compares them with their digests")
    findings = one.health or ()
    # Constants and frozen parameters: most of what did not change, where an optimizer has state for the others.
    has_trained = any(finding.is_trained for finding in findings)
    frozen = [finding for finding in findings if not finding.is_alarm and has_trained and not finding.is_trained]
    for finding in findings:
        if finding not in frozen:
            echo(f"  {shown(finding)}")
    if frozen:
        some = listed(shown(finding.key) for finding in frozen)
        echo(f"  unchanged, and no optimizer has state for them, so they are perhaps frozen: {some}")
    if findings == () and one.health is not None:
        echo("  healthy: no wrong values")


def _print_loads_in(path: str, asked: LoadsIn) -> None:
    models = ", ".join(kind if name == "." else f"{kind} in {shown(name)}" for name, kind in asked.models.items())
    if not asked.differences:
        echo(f"{shown(path)}: {asked.library} loads it: {counted(asked.n_tensors, 'tensor')} of {shown(models)}")
        return
    echo(f"{shown(path)}: it differs from what {asked.library} loads, {shown(models)}:")
    for one in asked.differences:
        echo(f"  {shown(str(one))}")
    if asked.hint is not None:
        echo(f"hint: {hint_of(asked.hint)}")
