"""`reshard convert-files`: each `.ckpt` file as a safetensors file of its own."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

import reshard
from reshard.cli.output import PATH, collected_warnings, command, echo, echo_json, progress_bar, rate, shown, size, warn

__all__ = ["convert_files"]


@click.command("convert-files", short_help="Write each .ckpt file again as a safetensors file.")
@click.argument("src", type=PATH)
@click.argument("dst", type=PATH, required=False)
@click.option("--name-map", type=PATH, metavar="FILE", help="New names of tensors by old ones, a YAML or JSON file.")
@click.option("--name-regex", metavar="REGEX", help="Only files of the folder in whose names this is found.")
@click.option("--memory", default="256MiB", show_default=True, metavar="SIZE", help="Memory that the copy may use.")
@click.option(
    "--threads", type=click.IntRange(1, 1024), metavar="N", help="Threads of the copy. Default: all processors."
)
@click.option("--no-sync", is_flag=True, help="Do not wait until all is on disk: a power cut can lose files.")
@click.option("--overwrite", is_flag=True, help="Replace files that are there.")
@command
def convert_files(src: str, dst: str | None, *, no_sync: bool, as_json: bool, **options: Any) -> None:
    """Write each .ckpt file of SRC again as a safetensors file: nothing is merged or cut.

    SRC is a .ckpt file, or a folder: its own .ckpt files and those in its rank* folders. DST is the folder that gets
    the files, with the same rank* folders; of a single file also its name. Without DST each file goes beside its
    source. To merge what the ranks hold, use convert.

    \b
    Examples:
      reshard convert-files weights.ckpt
      reshard convert-files old_run/ safetensors/
      reshard convert-files old_run/ safetensors/ --name-regex '-1_1.ckpt' --name-map names.yaml
    """
    with collected_warnings() as logged, progress_bar() as progress:
        report = reshard.convert_files(src, dst, durable=not no_sync, progress=progress, **options)
    warnings = [*report.warnings, *logged]
    if as_json:
        echo_json({**dataclasses.asdict(report), "n_bytes": report.n_bytes, "warnings": warnings})
        return
    for file in report.files:
        n_tensors = f"{file.n_tensors} tensor{'s' if file.n_tensors != 1 else ''}"
        echo(f"wrote {shown(file.path)}: {n_tensors}, {size(file.n_bytes)}")
    n_files = f"{len(report.files)} file{'s' if len(report.files) != 1 else ''}"
    echo(f"{n_files}, {size(report.n_bytes)} in {report.seconds:.1f} s, {rate(report.n_bytes, report.seconds)}")
    for warning in warnings:
        warn(warning)
