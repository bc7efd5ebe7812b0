"""`reshard merge`: merge the shards of all ranks into full tensors."""

from __future__ import annotations

from typing import Any

import click

from reshard.cli.conversion import options, run_conversion
from reshard.cli.output import PATH, command


@click.command(short_help="Merge the shards of all ranks into full weights.")
@click.argument("src", type=PATH)
@click.argument("dst", type=PATH)
@click.option(
    "--to",
    type=click.Choice(["mindspore", "huggingface", "safetensors"]),
    default="mindspore",
    show_default=True,
    help="Format of DST: weight files with param_name_map.json, a Hugging Face folder, or one file.",
)
@options(
    "strategy",
    "format",
    "suffix",
    "only",
    "drop",
    "rename",
    "part",
    "dtype",
    "dtype_all",
    "max_shard_size",
    "memory",
    "threads",
    "share",
    "on",
)
@options("model_files", "check_names", "no_sync", "overwrite", "modes", "private")
@command
def merge(src: str, dst: str, **given: Any) -> None:
    """Merge SRC, whose tensors are sharded over ranks, into the full weights DST.

    SRC is a folder of rank folders (Checkpoint 1.0 and others), for which --strategy says how they are sharded, or
    anything else that `reshard convert` reads. It is an error if a rank or a pipeline
    stage is missing. The rank folders need not hold all replicas.

    \b
    Arguments of unified_safetensors of MindSpore and of its script:
      --strategy        src_strategy_file, --src_strategy_dirs    files of several stages need no merging first
      --suffix          file_suffix, --file_suffix
      --drop PREFIX     choice_func, --filter_out_param_prefix    dropped tensors are not in DST
      --rename OLD=NEW  choice_func
      --max-shard-size  (3 GiB)
      --threads         max_process_num, --max_process_num
      --share I/N       split_dst_file=(I + 1, N)
      (automatic)       merge_with_redundancy, --has_redundancy

    \b
    Examples:
      reshard merge output/checkpoint full/
      reshard merge ranks/ full/ --strategy strategy/ --suffix 20_2
      reshard merge ranks/ full/ --strategy strategy/ --drop adam_ --rename =model.
      reshard merge ranks/ hf/ --strategy strategy/ --to huggingface --max-shard-size 2GB
      reshard merge ranks/ full/ --strategy strategy/ --share 0/2      # on the first of two machines
    """
    run_conversion(src, dst, **given)
