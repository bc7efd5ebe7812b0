"""`reshard convert-files`: convert each `.ckpt` file to a safetensors file."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

import reshard
from reshard.cli.conversion import options
from reshard.cli.output import (
    PATH,
    collected_warnings,
    command,
    echo,
    echo_json,
    progress_bar,
    rate,
    shown,
    size,
    warn,
)
from reshard.values.words import counted


@click.command("convert-files", short_help="Convert each .ckpt file to a safetensors file.")
@click.argument("src", type=PATH)
@click.argument("dst", type=PATH, required=False)
@click.option("--name-map", type=PATH, metavar="FILE", help="YAML or JSON file with new tensor names by old ones.")
@click.option("--name-regex", metavar="REGEX", help="Convert only files whose names match this regular expression.")
@options("memory", "threads")
@click.option("--no-sync", is_flag=True, help="Do not sync files to disk. They can be lost in a power failure.")
@click.option("--overwrite", is_flag=True, help="Replace existing files.")
@command
def convert_files(src: str, dst: str | None, *, no_sync: bool, as_json: bool, **options: Any) -> None:
    """Convert each .ckpt file of SRC to a safetensors file, without merging or resharding.

    SRC is a .ckpt file, or a folder with .ckpt files, also in rank* folders. DST is the folder for the new files, with
    the same rank* folders; for a single file it may also be the new file. Without DST each new file is written beside
    its source. To merge the files of several ranks, use convert.

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
        echo(f"wrote {shown(file.path)}: {counted(file.n_tensors, 'tensor')}, {size(file.n_bytes)}")
    n_files = counted(len(report.files), "file")
    echo(f"{n_files}, {size(report.n_bytes)} in {report.seconds:.1f} s, {rate(report.n_bytes, report.seconds)}")
    warn(*warnings)
