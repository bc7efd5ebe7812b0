"""`reshard convert`: any format and layout to any other."""

from __future__ import annotations

from typing import Any, get_args

import click

from reshard.cli.conversion import OPTIONS, options, run_conversion
from reshard.cli.output import PATH, command
from reshard.options import Target


@click.command(short_help="Merge, split, reshard, cast: any format and layout to any other.")
@click.argument("src", type=PATH)
@click.argument("dst", type=PATH)
@click.option(
    "--to",
    type=click.Choice(get_args(Target)),
    help="Format of DST. Default: checkpoint2 with --layout; safetensors if DST ends with .safetensors; torch if it "
    "ends with .bin, .pt or .pth; else huggingface.",
)
@options(*OPTIONS)
@command
def convert(src: str, dst: str, **given: Any) -> None:
    """Convert the checkpoint SRC to DST, in another format, layout, file size or dtype.

    SRC is a checkpoint in any format that reshard reads; see `reshard inspect --help`. In a checkpoint root, the
    newest complete iteration is read. DST is written atomically. With --overwrite, it may be a folder with other files,
    which stay. Buffers stay within --memory for any size of the model.

    \b
    Examples:
      reshard convert output/checkpoint hf/                  # merge to Hugging Face
      reshard convert output/checkpoint hf/ --model-files base/      # and copy config.json, the tokenizer and so on
      reshard convert hf/ tp4/ --layout tp4.yaml             # split
      reshard convert output/checkpoint/iteration_00000400 hf/       # an older iteration than the newest
      reshard convert hf/ tp4/ --layout tp4.yaml --iteration 7       # split, as iteration 7
      reshard convert output/checkpoint all.safetensors
      reshard convert weights.ckpt weights.safetensors
      reshard convert output/checkpoint weights.pt           # one file for torch.load
      reshard convert hf/ start/step-0 --to dcp --layout tp4.yaml    # for torch.distributed.checkpoint.load
      reshard convert hf/ small/ --max-shard-size 500MB --dtype bfloat16
      reshard convert hf/ mcore/ --names mindspore           # as MindSpore Transformers names, fuses and stacks tensors
      reshard convert mcore/ back/ --names mindspore:reverse --config hf/
      reshard convert output/checkpoint hf/ --share 0/4      # a quarter of the work, on the first of four machines
      srun reshard convert output/checkpoint hf/ --on ranks  # each of the processes that Slurm starts writes its share
      reshard convert output/checkpoint hf/ --on ray         # the workers of a Ray cluster write the shares
    """
    run_conversion(src, dst, **given)
