"""`reshard strategy`: merge and show strategy files of MindSpore."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import click

from reshard.cli.output import (
    PATH,
    command,
    echo,
    echo_as_file,
    echo_facts,
    echo_json,
    echo_table,
    plain_table,
    shown,
    warn,
)
from reshard.values.words import counted, listed

if TYPE_CHECKING:
    from reshard.layout.strategy_file import LayoutItem
    from reshard.layout.strategy_folder import Stage


@click.group(short_help="Merge and show strategy files.")
def strategy() -> None:
    """Strategy files: how a run of MindSpore sharded each tensor (ckpt_strategy_rank_<r>.ckpt, or .json).

    A strategy file, or the folder with those of all stages, can be used in place of a layout file.

    \b
    Examples:
      reshard strategy show output/strategy
      reshard strategy merge output/strategy merged_strategy.ckpt
      reshard convert hf/ ranks/ --layout merged_strategy.ckpt
    """


@strategy.command(short_help="Merge the strategy files of all stages into one.")
@click.argument("src", type=PATH)
@click.argument("dst", type=PATH)
@click.option("--overwrite", is_flag=True, help="Replace DST, if it is a strategy file.")
@command
def merge(src: str, dst: str, *, overwrite: bool, as_json: bool) -> None:
    """Merge the strategy files in the folder SRC into the file DST: JSON if its name ends with .json, else protobuf.

    Files of one stage must be equal, and no stage may be missing.

    \b
    Examples:
      reshard strategy merge output/strategy merged_strategy.ckpt
    """
    from reshard.layout import merge_strategies

    merged = merge_strategies(src, dst, overwrite=overwrite)
    summary = {
        "path": dst,
        "n_stages": merged.n_stages,
        "devices_per_stage": merged.devices_per_stage,
        "n_tensors": len(merged.keys()),
    }
    if as_json:
        echo_json(summary)
    else:
        echo(
            f"{shown(dst)}: {counted(len(merged.keys()), 'tensor')}, "
            f"{_stages(merged.n_stages, merged.devices_per_stage)}"
        )


@strategy.command(short_help="Show how a strategy shards each tensor.")
@click.argument("path", type=PATH)
@click.option("--layout", "as_layout", is_flag=True, help="Print the strategy as a layout file.")
@command
def show(path: str, *, as_layout: bool, as_json: bool) -> None:
    """Show how the strategy PATH shards each tensor: a strategy file, also of a single stage, or a folder of them.

    \b
    Examples:
      reshard strategy show output/strategy
      reshard strategy show output/strategy/ckpt_strategy_rank_0.ckpt --json
      reshard strategy show merged_strategy.ckpt --layout
    """
    from reshard.layout import ModelLayout, read_stages

    if as_layout:
        layout = ModelLayout.from_strategy(path)
        echo_as_file(layout, as_json=as_json)
        if layout.uncertain:
            warn(
                "the strategy does not record the number of dims of these tensors: "
                f"{listed(f'`{key}`' for key in layout.uncertain)}."
                "\nThey are printed with one device axis per dim. If such a tensor has one dim, all these axes split "
                "it. If the strategy itself is used as `--layout`, the shapes of the tensors decide."
            )
        return
    stages = read_stages(path)
    if as_json:
        echo_json({"path": path, "stages": {str(number): _json(stage) for number, stage in stages.items()}})
        return
    # A very large stage number in a malicious file must not create a long list.
    missing = list(itertools.islice((n for n in range(max(stages, default=0)) if n not in stages), 64))
    facts = [("strategy", shown(path)), ("stages", ", ".join(map(str, list(stages)[:64])))]
    if missing:
        facts.append(("missing", f"the strategy of stage {', '.join(map(str, missing))}"))
    named = list(stages.items())[:64]
    facts += [(f"stage {number}", shown(stage.path)) for number, stage in named if stage.path != path]
    echo_facts(facts)
    echo()
    table = plain_table("tensor", "stage", "devices", "map", "more")
    for number, stage in stages.items():
        for name, item in stage.layouts.items():
            table.add_row(shown(name), str(number), *_words(item))
    echo_table(table)


def _stages(n_stages: int, devices: int) -> str:
    return f"{counted(n_stages, 'stage')} of {counted(devices, 'device')}"


def _words(item: LayoutItem) -> tuple[str, str, str]:
    lists = [list(axes) for axes in item.tensor_map]
    more = []
    if item.opt_weight_shard_size:
        holders = "all" if item.opt_weight_shard_size == -1 else str(item.opt_weight_shard_size)
        more.append(f"dim 0 split further over {holders} devices, step {item.opt_weight_shard_step}")
    if item.param_split_shape:
        more.append(f"split shape {list(item.param_split_shape)[:8]}")
    if item.field:
        more.append(f"field {item.field}")
    return str(list(item.dev_matrix)), str(lists[0] if len(lists) == 1 else lists), ", ".join(more)


def _json(stage: Stage) -> dict[str, Any]:
    from dataclasses import asdict

    return {"file": stage.path, "tensors": {name: asdict(item) for name, item in stage.layouts.items()}}
