"""`reshard convert`: any format and layout to any other."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import click

import reshard
from reshard.cli.output import collected_warnings, command, echo, echo_json, progress_bar, rate, shown, size, warn

__all__ = ["convert"]


@click.command(short_help="Merge, split, re-cut, cast: any format and layout to any other.")
@click.argument("src")
@click.argument("dst")
@click.option(
    "--to",
    type=click.Choice(["huggingface", "checkpoint2", "safetensors"]),
    help="Format of DST. Default: checkpoint2 with --layout, safetensors if DST ends so, else huggingface.",
)
@click.option(
    "--part",
    type=click.Choice(["model", "optimizer", "all"]),
    help="Which tensors. Default: model for huggingface, else all.",
)
@click.option(
    "--names",
    metavar="FILE|PRESET",
    help="Name map: tensors get other names, are fused and split. Ends in :reverse to go the other way.",
)
@click.option("--config", metavar="FILE", help="config.json for the sizes that --names needs. Default: that in SRC.")
@click.option("--layout", metavar="FILE", help="Layout file: how DST is cut. Default: whole tensors.")
@click.option(
    "--iteration",
    type=click.IntRange(min=0),
    metavar="N",
    help="Iteration that is written. Default: that of SRC, or 0.",
)
@click.option("--prefix", metavar="NAME", help="First part of the names of Checkpoint 2.0 shard files.")
@click.option("--dtype", metavar="DTYPE", help="Cast floating-point tensors to this, such as bfloat16.")
@click.option(
    "--max-shard-size", default="4GiB", show_default=True, metavar="SIZE", help="Largest file of a Hugging Face folder."
)
@click.option("--no-dedup", is_flag=True, help="Write every replica, not each shard once.")
@click.option("--memory", default="256MiB", show_default=True, metavar="SIZE", help="Memory that the copy may use.")
@click.option(
    "--threads", type=click.IntRange(1, 1024), metavar="N", help="Threads of the copy. Default: all processors."
)
@click.option("--no-sync", is_flag=True, help="Do not wait until all is on disk: a power cut can lose DST.")
@click.option("--overwrite", is_flag=True, help="Replace that iteration, or the files of an earlier conversion.")
@click.option("--strict-format", is_flag=True, help="Refuse tensors that metadata.json cannot describe.")
@click.option(
    "--modes", type=click.Choice(["original"]), help="File permissions as MindSpore Transformers sets them (0400)."
)
@click.option(
    "--share",
    metavar="I/N",
    help="Write the I-th of N shares, I from 0; whoever writes the last one publishes. Default: by torchrun or Slurm.",
)
@command
def convert(
    src: str, dst: str, *, no_dedup: bool, no_sync: bool, share: str | None, as_json: bool, **options: Any
) -> None:
    """Write the checkpoint SRC again as DST: in another format, layout, file size or dtype.

    SRC is a .safetensors or .ckpt file, a Hugging Face folder, a checkpoint root or one of its iteration folders. DST appears
    whole or not at all. Memory stays within --memory, whatever the size of the model.

    \b
    Examples:
      reshard convert output/checkpoint hf/                  merge to Hugging Face
      reshard convert hf/ tp4/ --layout tp4.yaml             split
      reshard convert output/checkpoint tp4/ --layout tp4.yaml --iteration 7
      reshard convert output/checkpoint all.safetensors
      reshard convert weights.ckpt weights.safetensors
      reshard convert hf/ small/ --max-shard-size 500MB --dtype bfloat16
      reshard convert hf/ ms/ --names mindspore --layout tp4.yaml
      reshard convert ms/ hf2/ --names mindspore:reverse --config hf/
      reshard convert output/checkpoint hf/ --share 0/4      a fourth of the work, on one of four machines
    """
    options["share"] = _launched() if share is None else _parsed(share)
    with collected_warnings() as logged, progress_bar() as progress:
        report = reshard.convert(src, dst, dedup=not no_dedup, durable=not no_sync, progress=progress, **options)
    # What is in the report was often logged as well, with where it came from before it.
    warnings = [*report.warnings, *(line for line in logged if not any(known in line for known in report.warnings))]
    if as_json:
        echo_json({**dataclasses.asdict(report), "warnings": warnings})
        return
    if report.pending:
        others = ", ".join(map(str, report.pending[:8])) + (", ..." if len(report.pending) > 8 else "")
        echo(f"wrote share {options['share'][0]} of {options['share'][1]}; to be written before it appears: {others}")
    else:
        echo(f"wrote {shown(report.path)}")
    echo(
        f"{report.to}, {report.n_tensors} tensors, {report.n_files} file{'s' if report.n_files != 1 else ''}, "
        f"{size(report.n_bytes)} in {report.seconds:.1f} s, {rate(report.n_bytes, report.seconds)}"
    )
    for warning in warnings:
        warn(warning)
    if report.not_expressible:
        echo(f"hint: `reshard inspect {shown(dst)}` marks them", err=True)


def _parsed(share: str) -> tuple[int, int]:
    index, slash, count = share.partition("/")
    if not (slash and index.isascii() and index.isdigit() and count.isascii() and count.isdigit()):
        raise click.BadParameter(f"{share!r} is not I/N, such as 0/4 for the first of four", param_hint="--share")
    return int(index), int(count)


def _launched() -> tuple[int, int] | None:
    """The share of a process that torchrun or Slurm started beside others."""
    for rank, of in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        index, count = os.environ.get(rank, ""), os.environ.get(of, "")
        if index.isascii() and index.isdigit() and count.isascii() and count.isdigit():
            return (int(index), int(count)) if int(count) > 1 else None
    return None
