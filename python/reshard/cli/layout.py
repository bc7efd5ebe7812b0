"""`reshard layout`: print the layout of a model family, and check a layout against a checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import click

import reshard
from reshard.cli.output import (
    FORMAT_HELP,
    PATH,
    STRATEGY_HELP,
    WholeNumber,
    collected_warnings,
    command,
    common_key,
    echo,
    echo_as_file,
    echo_facts,
    echo_json,
    echo_more,
    echo_table,
    hint_of,
    plain_table,
    shown,
    size,
    warn,
    without_numbers,
)
from reshard.values.words import counted, listed

if TYPE_CHECKING:
    from reshard.verbs.check_layout import Fault, LayoutCheck, RuleUse

_COUNT = WholeNumber(1, 1 << 20)
_MAX_SHOWN = 20  # faults, and rules
_MAX_RANKS = 16


@click.group(short_help="Print the layout of a model family; check a layout.")
def layout() -> None:
    """Layout files, which say how the tensors of a model are partitioned over ranks.

    \b
    Examples:
      reshard layout preset --list
      reshard layout preset llama --tp 4 --pp 2 > tp4.yaml
      reshard layout check tp4.yaml hf/
      reshard convert hf/ sharded/ --layout tp4.yaml
    """


@layout.command(short_help="Print the usual layout of a model family.")
@click.argument("family", required=False, type=PATH)
@click.option("--list", "lists", is_flag=True, help="Print the names of the families.")
@click.option("--tp", type=_COUNT, default=1, metavar="N", help="Ranks over which each layer is partitioned.")
@click.option("--pp", type=_COUNT, default=1, metavar="N", help="Pipeline stages, of consecutive layers.")
@click.option("--ep", type=_COUNT, default=1, metavar="N", help="Ranks over which the experts are distributed.")
@click.option("--dp", type=_COUNT, default=1, metavar="N", help="Replicas of every tensor.")
@command
def preset(family: str | None, *, lists: bool, tp: int, pp: int, ep: int, dp: int, as_json: bool) -> None:
    """Print the layout file of a Hugging Face model family: tensor, pipeline and expert parallel.

    FAMILY is a name such as llama, or a config.json or the folder of a model with one. With a config, the number of
    heads is checked, and stages may have different numbers of layers. There are pp x dp x ep x tp ranks; along
    tp they have consecutive numbers.

    \b
    Examples:
      reshard layout preset llama --tp 4 --pp 2 > tp4.yaml
      reshard layout preset hf/ --tp 4 --pp 2 > tp4.yaml
      reshard layout preset --list
    """
    from reshard.layout.presets import FAMILIES

    if lists or family is None:
        if not lists:
            raise click.UsageError(f"FAMILY is missing: a path, or one of {', '.join(FAMILIES)}")
        if family is not None:
            raise click.UsageError("--list excludes FAMILY")
        if as_json:
            echo_json({"families": list(FAMILIES)})
        else:
            echo("\n".join(FAMILIES))
        return
    echo_as_file(reshard.ModelLayout.preset(family, tp=tp, pp=pp, ep=ep, dp=dp), as_json=as_json)


@layout.command(short_help="Check a layout against a checkpoint.")
@click.argument("file", type=PATH)
@click.argument("src", type=PATH)
@click.option("--strategy", type=PATH, metavar="PATH", help=STRATEGY_HELP)
@click.option("--format", metavar="NAME", help=FORMAT_HELP)
@command
def check(
    file: str,
    src: str,
    *,
    strategy: str | None,
    format: str | None,  # noqa: A002  the name of the option
    as_json: bool,
) -> None:
    """Check whether the layout FILE fits the tensors of the checkpoint SRC. Tensor data is not read.

    FILE is a layout file, a strategy file, or a folder of these. The command prints what each rule matches, the bytes
    of each rank, and every fault: tensors that no rule matches, dims that cannot be divided, rules that match no
    tensor. `convert --layout` refuses a layout with a fault.

    \b
    Examples:
      reshard layout check tp4.yaml hf/
      reshard layout check tp4.yaml output/checkpoint --json

    Exit codes: 0 it fits, 1 it does not fit, or a file cannot be read, 2 usage error.
    """
    from reshard.cli.contents import cut_by_rule
    from reshard.verbs.check_layout import check_layout

    opened = functools.partial(reshard.open, src, strategy=strategy, format=format)
    with collected_warnings(print_on_error=False) as logged, opened() as checkpoint:
        n_before = len(logged)  # warnings of the layout are part of the result
        found = check_layout(checkpoint, file)
        del logged[n_before:]
    if as_json:
        fields = dataclasses.asdict(dataclasses.replace(found, rules=()))
        rules = [
            {"match": one.match, "cut": cut_by_rule(one.partition, dict(found.mesh)), "n_tensors": len(one.keys),
             "n_bytes": one.n_bytes, "optional": one.optional} for one in found.rules
        ]  # fmt: skip
        echo_json({"layout": file, "path": src, "ok": found.ok, **fields, "rules": rules, "source_warnings": logged})
    else:
        _print(found, file, src)
        warn(*logged, *found.warnings)
    if not found.ok:
        raise click.exceptions.Exit(1)


def _print(found: LayoutCheck, file: str, src: str) -> None:
    n_faults = f"{'at least ' if found.stopped else ''}{counted(len(found.faults), 'fault')}"
    echo(f"{shown(file)} {'fits' if found.ok else 'does not fit'} {shown(src)}{'' if found.ok else f': {n_faults}'}")
    mesh = ", ".join(f"{shown(axis)} {n}" for axis, n in found.mesh.items())
    facts = [
        ("tensors", f"{found.n_tensors}, {size(found.n_bytes)}"),
        ("mesh", f"{mesh} ({counted(math.prod(found.mesh.values()), 'rank')})"),
    ]
    if found.rank_bytes:
        sizes = list(found.rank_bytes.values())
        mean = sum(sizes) / len(sizes)
        facts.append(("each rank", f"{size(min(sizes))} to {size(max(sizes))}, mean {size(round(mean))}"))
    echo_facts(facts)
    if found.rules:
        echo()
        _print_rules(found.rules, dict(found.mesh))
    if len(found.rank_bytes) > 1 and len(set(found.rank_bytes.values())) > 1:
        echo()
        _print_ranks(found)
    groups: dict[str, list[Fault]] = {}  # tensors whose names differ only in numbers have mostly one reason
    for fault in found.faults:
        groups.setdefault(fault.message if fault.key is None else without_numbers(fault.key), []).append(fault)
    listed_groups = list(groups.values())[:_MAX_SHOWN]
    for first, *others in listed_groups:
        echo()
        echo(f"fault: {shown(first.message)}")
        if hint := hint_of(first.hint):
            echo(f"hint: {shown(hint)}")
        if others:
            echo(f"and {len(others)} more of {common_key([str(one.key) for one in (first, *others)])}")
    n_more = len(found.faults) - sum(map(len, listed_groups))
    if n_more:
        echo()
        echo(f"and {counted(n_more, 'more fault')}; --json lists them")


def _print_rules(rules: tuple[RuleUse, ...], mesh: dict[str, int]) -> None:
    from reshard.cli.contents import cut_by_rule

    table = plain_table("rule", "match", "cut", "tensors", "size", right=("rule", "tensors", "size"), folds=("match",))
    for n, rule in enumerate(rules[:_MAX_SHOWN]):
        unused = "none, optional" if rule.optional else "none"
        count = str(len(rule.keys)) if rule.keys else unused
        match = listed(map(shown, rule.match), 4)
        table.add_row(str(n), match, shown(cut_by_rule(rule.partition, mesh)), count, size(rule.n_bytes))
    echo_table(table)
    echo_more(len(rules) - _MAX_SHOWN, "more rules", "--json lists them")


def _print_ranks(found: LayoutCheck) -> None:
    """The ranks with the most bytes."""
    ordered = sorted(found.rank_bytes, key=lambda rank: (-found.rank_bytes[rank], rank))
    table = plain_table("rank", "bytes", right=("rank", "bytes"))
    for rank in sorted(ordered[:_MAX_RANKS]):
        table.add_row(str(rank), size(found.rank_bytes[rank]))
    echo_table(table)
    echo_more(len(ordered) - _MAX_RANKS, "ranks with no more bytes", "--json lists them")
