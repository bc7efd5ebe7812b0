"""`reshard names`: print a name map, and what it makes of the names of a checkpoint."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

import reshard
from reshard.cli.output import (
    PATH,
    command,
    common_key,
    echo,
    echo_as_file,
    echo_facts,
    echo_json,
    echo_more,
    echo_table,
    join_dims,
    plain_table,
    shown,
    warn,
    without_numbers,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reshard.names import NameMap, ResolvedTensor

_MAX_ROWS = 60
_MAX_SOURCES = 6  # lines for the sources of one tensor


@click.group(short_help="Show name maps and what they do.")
def names() -> None:
    """Name maps, which rename, fuse, split and stack the tensors of a checkpoint: presets and files.

    \b
    Examples:
      reshard names show --list
      reshard names show llama-mindspore hf/
      reshard convert hf/ mcore/ --names llama-mindspore
    """


@names.command(short_help="Show a name map, or what it makes of a checkpoint.")
@click.argument("map_", metavar="[MAP]", required=False, type=PATH)
@click.argument("src", required=False, type=PATH)
@click.option("--list", "lists", is_flag=True, help="Print the names of the presets.")
@click.option("--config", type=PATH, metavar="PATH", help="config.json for sizes of MAP. Default: the one in SRC.")
@click.option("--format", metavar="NAME", help="Which checkpoint of SRC, if it is a folder with several formats.")
@click.option("--all", "everything", is_flag=True, help="Print every line.")
@command
def show(
    map_: str | None,
    src: str | None,
    *,
    lists: bool,
    config: str | None,
    format: str | None,  # noqa: A002  the name of the option
    everything: bool,
    as_json: bool,
) -> None:
    """Show what the name map MAP makes of the tensors of the checkpoint SRC, and which tensors it does not match.

    Without SRC, MAP is printed as a file. Tensor data is not read.

    MAP is a file or a preset. The name of a preset is FAMILY-NAMING; with the config.json of a model, NAMING is
    enough. MAP:reverse applies it in reverse. Tensors whose names differ only in numbers are one line.

    \b
    Examples:
      reshard names show --list
      reshard names show llama-mindspore hf/
      reshard names show mindspore:reverse mcore/ --config hf/
      reshard names show llama-mindspore --config hf/ > names.yaml

    Exit codes: 0 success, 1 MAP does not fit SRC, 2 usage error.
    """
    from reshard.names import as_names, config_beside, unnamed

    if lists or map_ is None:
        if not lists:
            raise click.UsageError("MAP is missing: a file or a preset; --list prints the presets")
        if map_ is not None:
            raise click.UsageError("--list excludes MAP")
        _print_presets(as_json=as_json)
        return
    if src is None:
        echo_as_file(as_names(map_, config), as_json=as_json)
        return
    with reshard.open(src, format=format) as checkpoint:
        known: NameMap = as_names(map_, config_beside(checkpoint.data.path) if config is None else config)
        keys = checkpoint.keys()
        optimizer_keys = set(checkpoint.keys("optimizer"))
        shapes = {key: checkpoint[key].shape for key in keys}
    unmatched = unnamed(known, keys, optimizer_keys=optimizer_keys)
    # All names are shown, also where the map refuses a checkpoint with others.
    tensors = dataclasses.replace(known, other="keep").resolve(shapes, optimizer_keys=optimizer_keys)
    used = {source.key for tensor in tensors for source in tensor.sources}
    left_out = [key for key in keys if key not in used]
    refused = [key for key in unmatched if key not in optimizer_keys] if known.other == "refuse" else []
    if as_json:
        echo_json(_json(map_, src, tensors, unmatched=unmatched, left_out=left_out, refused=refused))
    else:
        _print(tensors, unmatched=unmatched, left_out=left_out, everything=everything)
    if refused:
        if not as_json:
            warn(f"{shown(map_)} refuses tensors that no rule matches: {len(refused)}, such as {shown(refused[0])}")
        raise click.exceptions.Exit(1)


def _print_presets(*, as_json: bool) -> None:
    from reshard.names.presets import FAMILIES, NAMINGS, families_of

    if as_json:
        echo_json({"families": list(FAMILIES), "namings": list(NAMINGS)})
    else:
        echo("presets are named FAMILY-NAMING:")
        echo_facts([(naming, ", ".join(families_of(naming))) for naming in NAMINGS])


def _json(
    map_: str,
    src: str,
    tensors: Iterable[ResolvedTensor],
    *,
    unmatched: list[str],
    left_out: list[str],
    refused: list[str],
) -> dict[str, Any]:
    return {
        "map": map_,
        "path": src,
        "ok": not refused,
        "tensors": {
            tensor.key: {
                "shape": tensor.shape,
                "sources": [source.key for source in tensor.sources],
                "change": _change(tensor, set(unmatched)),
            }
            for tensor in tensors
        },
        "unmatched": unmatched,
        "left_out": left_out,
    }


def _change(tensor: ResolvedTensor, unmatched: set[str]) -> str:
    """What happens to a tensor, in one word."""
    first = tensor.sources[0]
    if len(tensor.sources) > 1:
        return "joined"
    if first.part_map is not None:
        return "part" if first.is_whole else "rearranged"
    if first.key in unmatched:
        return "unmatched"
    return "same" if first.key == tensor.key else "renamed"


@dataclass
class _Line:
    """Tensors whose names differ only in numbers, and which change in the same way."""

    change: str
    shape: tuple[int, ...]
    new: list[str]
    old: dict[str, list[str]]  # by name without numbers


def _lines(tensors: Iterable[ResolvedTensor], unmatched: set[str]) -> list[_Line]:
    lines: dict[object, _Line] = {}
    for tensor in tensors:
        change = _change(tensor, unmatched)
        old: dict[str, list[str]] = {}
        for source in tensor.sources:
            old.setdefault(without_numbers(source.key), []).append(source.key)
        group = (without_numbers(tensor.key), change, tensor.shape, tuple(old), len(tensor.sources))
        line = lines.setdefault(group, _Line(change, tensor.shape, [], {name: [] for name in old}))
        line.new.append(tensor.key)
        for name, keys in old.items():
            line.old[name] += keys
    return list(lines.values())


def _print(tensors: list[ResolvedTensor], *, unmatched: list[str], left_out: list[str], everything: bool) -> None:
    others = set(unmatched)
    lines = [line for line in _lines(tensors, others) if line.change != "unmatched"]
    n_named = sum(len(line.new) for line in lines)
    table = plain_table("old", "new", "n", "shape", "change", right=("n",), folds=("old", "new"))
    listed = lines if everything else lines[:_MAX_ROWS]
    for line in listed:
        old = [common_key(keys) for keys in line.old.values()]
        if len(old) > _MAX_SOURCES and not everything:
            old = [*old[:_MAX_SOURCES], f"and {len(old) - _MAX_SOURCES} more"]
        change = line.change
        n_sources = sum(map(len, line.old.values())) // len(line.new)
        if change == "joined":
            change = f"joined from {n_sources}"
        elif change == "part":
            change = "part of the old one"
        table.add_row("\n".join(old), common_key(line.new), str(len(line.new)), join_dims(line.shape), change)
    echo_table(table)
    echo_more(len(lines) - len(listed), "more lines")
    echo()
    echo(f"{n_named} tensors have a rule")
    for what, keys in (("no rule matches", unmatched), ("left out, as copies of others", left_out)):
        if keys:
            groups: dict[str, list[str]] = {}
            for key in keys:
                groups.setdefault(without_numbers(key), []).append(key)
            echo(f"{what}: {len(keys)}")
            shown_groups = list(groups.values()) if everything else list(groups.values())[:_MAX_ROWS]
            for of_group in shown_groups:
                echo(f"  {common_key(of_group)}")
            if len(shown_groups) < len(groups):
                echo(f"  and {len(groups) - len(shown_groups)} more lines; --all lists them")
