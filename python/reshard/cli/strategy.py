"""`reshard strategy`: strategy files of the original, merged and shown."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import click

from reshard.cli.output import (
    PATH,
    command,
    echo,
    echo_facts,
    echo_file,
    echo_json,
    echo_table,
    plain_table,
    shown,
    warn,
)
from reshard.words import listed

if TYPE_CHECKING:
    from reshard.layout.strategy_file import LayoutItem
    from reshard.layout.strategy_folder import Stage

__all__ = ["strategy"]


@click.group(short_help="Merge and show strategy files.")
def strategy() -> None:
    """Strategy files: how a run of the original cut each tensor over its ranks (ckpt_strategy_rank_<r>.ckpt, or .json).

    A strategy file, or the folder with those of all stages, can stand wherever a layout can.

    \b
    Examples:
      reshard strategy show output/strategy
      reshard strategy merge output/strategy merged_strategy.ckpt
      reshard convert hf/ ranks/ --layout merged_strategy.ckpt
    """


@strategy.command(short_help="One file of the files of all stages.")
@click.argument("src", type=PATH)
@click.argument("dst", type=PATH)
@click.option("--overwrite", is_flag=True, help="Replace DST, if it is a strategy file.")
@command
def merge(src: str, dst: str, *, overwrite: bool, as_json: bool) -> None:
    """Merge the strategy files in the folder SRC into the file DST; JSON if its name ends in .json, else protobuf.

    Files of one stage must agree, and no stage may be missing.

    \b
    Examples:
      reshard strategy merge output/strategy merged_strategy.ckpt
    """
    from reshard.layout import merge_strategies

    merged = merge_strategies(src, dst, overwrite=overwrite)
    told = {
        "path": dst,
        "n_stages": merged.n_stages,
        "devices_per_stage": merged.devices_per_stage,
        "n_tensors": len(merged.keys()),
    }
    if as_json:
        echo_json(told)
    else:
        echo(f"{shown(dst)}: {len(merged.keys())} tensors, {_stages(merged.n_stages, merged.devices_per_stage)}")


@strategy.command(short_help="What a strategy says of each tensor.")
@click.argument("path", type=PATH)
@click.option("--layout", "as_layout", is_flag=True, help="Print it as a layout file.")
@command
def show(path: str, *, as_layout: bool, as_json: bool) -> None:
    """Show what the strategy file or folder PATH says; one stage's file alone is as good.

    \b
    Examples:
      reshard strategy show output/strategy
      reshard strategy show output/strategy/ckpt_strategy_rank_0.ckpt --json
      reshard strategy show merged_strategy.ckpt --layout
    """
    from reshard.layout import ModelLayout, read_stages

    if as_layout:
        layout = ModelLayout.from_strategy(path)
        if as_json:
            echo_json(layout.to_mapping())
        else:
            echo_file(str(layout))
        if layout.uncertain:
            warn(
                f"the strategy does not say how many dims these have: {listed(f'`{key}`' for key in layout.uncertain)}."
                "\nThey are printed with a device axis for each dim; if there is one dim, all these axes cut it. "
                "Given as `--layout`, the strategy itself goes by their shapes."
            )
        return
    stages = read_stages(path)
    if as_json:
        echo_json({"path": path, "stages": {str(number): _json(stage) for number, stage in stages.items()}})
        return
    # A hostile number of a stage must not make a list of what is missing before it.
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
    return f"{n_stages} stage{'' if n_stages == 1 else 's'} of {devices} device{'' if devices == 1 else 's'}"


def _words(item: LayoutItem) -> tuple[str, str, str]:
    lists = [list(axes) for axes in item.tensor_map]
    more = []
    if item.opt_weight_shard_size:
        holders = "all" if item.opt_weight_shard_size == -1 else str(item.opt_weight_shard_size)
        more.append(f"dim 0 shared further by {holders} holders, {item.opt_weight_shard_step} apart")
    if item.param_split_shape:
        more.append(f"split shape {list(item.param_split_shape)[:8]}")
    if item.field:
        more.append(f"field {item.field}")
    return str(list(item.dev_matrix)), str(lists[0] if len(lists) == 1 else lists), ", ".join(more)


def _json(stage: Stage) -> dict[str, Any]:
    from dataclasses import asdict

    return {"file": stage.path, "tensors": {name: asdict(item) for name, item in stage.layouts.items()}}
