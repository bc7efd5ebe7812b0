"""`reshard split`: split full tensors into the shards of each rank."""

from __future__ import annotations

from typing import Any

import click

from reshard.cli.conversion import options, run_conversion
from reshard.cli.output import PATH, command


@click.command(short_help="Split full weights into the shards of each rank.")
@click.argument("src", type=PATH)
@click.argument("dst", type=PATH)
@click.option(
    "--to",
    type=click.Choice(["checkpoint1", "checkpoint2", "safetensors"]),
    default="checkpoint1",
    show_default=True,
    help="Format of DST: rank folders, a Checkpoint 2.0, or one file per rank.",
)
@click.option(
    "--strategy",
    type=PATH,
    metavar="PATH",
    help="How DST is sharded: a strategy file, or the folder with those of all stages. The same as --layout.",
)
@click.option("--layout", type=PATH, metavar="FILE", help="How DST is sharded: a layout file, or a strategy.")
@click.option(
    "--source-strategy",
    type=PATH,
    metavar="PATH",
    help="How SRC is sharded, if it is a folder of rank folders. Default: the folder `strategy` beside it.",
)
@options(
    "format",
    "suffix",
    "only",
    "drop",
    "rename",
    "part",
    "dtype",
    "dtype_all",
    "iteration",
    "prefix",
    "dedup",
    "memory",
    "threads",
    "share",
    "on",
)
@options("no_sync", "overwrite", "modes", "private")
@command
def split(
    src: str, dst: str, *, strategy: str | None, layout: str | None, source_strategy: str | None, **given: Any
) -> None:
    """Split the full weights SRC into the shards of each rank, DST.

    SRC is anything that `reshard convert` reads; a sharded checkpoint is resharded. The file of every rank also holds
    the counters. A tensor that the strategy does not list is written in full for every rank, with a warning; --drop
    leaves it out.

    \b
    Arguments of load_distributed_checkpoint of MindSpore:
      SRC               unified_safetensors_dir
      DST               dst_safetensors_dir
      --strategy        predict_strategy                          files of several stages need no merging first
      --rename OLD=NEW  name_map
      --threads         max_process_num
      --share I/N       (rank_id)                                 part of the ranks, on one of several machines

    \b
    Examples:
      reshard split hf/ ranks4/ --layout tp4.yaml
      reshard split full/ ranks8/ --strategy strategy/
      reshard split full/ again/ --strategy strategy/ --prefix llama --iteration 20
    """
    if (strategy is None) == (layout is None):
        raise click.UsageError("use either --strategy or --layout to say how DST is sharded")
    run_conversion(src, dst, layout=layout or strategy, strategy=source_strategy, **given)
