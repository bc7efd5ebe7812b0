"""`reshard inspect`: print the contents of a checkpoint, as text or as one JSON object.

`contents` gathers the data, and `picture` draws a single tensor.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import shlex
import sys
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import click

import reshard
from reshard.cli.conversion import options, read_on
from reshard.cli.output import (
    FORMAT_HELP,
    PATH,
    STRATEGY_HELP,
    collected_warnings,
    command,
    console,
    duration,
    echo,
    echo_as_file,
    echo_facts,
    echo_json,
    echo_more,
    echo_table,
    facts_table,
    join_dims,
    n_fitting,
    number_groups,
    plain_table,
    shown,
    size,
    styled,
    warn,
    write_page,
)
from reshard.errors import KeyNotFoundError
from reshard.formats import health
from reshard.storage.location import locate
from reshard.values.words import counted, listed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from reshard.checkpoint import Checkpoint
    from reshard.cli.bucket import BucketFacts
    from reshard.cli.contents import Contents, Iteration, RankSaveState, StoredAs, TensorRow
    from reshard.cli.leftovers import Leftover
    from reshard.commit.manifest import Manifest
    from reshard.commit.save_log import SaveRecord
    from reshard.storage.location import Location

_MAX_PLAIN = 24  # tensors that are listed one by one
_MAX_ROWS = 60  # lines of the summary
_MAX_ITERATIONS = 20  # that are listed
_MAX_SAVES = 10
_MAX_LEFTOVERS = 10
_MAX_MODULES = 6
_BAR = 20  # characters of the largest module
_MIN_KEY = 36  # minimum width of the key column; in a narrower table each key has its own line
_STATES = {True: "complete", False: "damaged", None: "not checked"}


@click.command(short_help="Show the contents: iterations, tensors, partitions, files, replicas.")
@click.argument("path", type=PATH)
@click.argument("pattern", required=False, metavar="[PATTERN]")
@click.argument("more", nargs=-1, type=PATH, metavar="[PATH ...]")
@click.option("--strategy", type=PATH, metavar="PATH", help=STRATEGY_HELP)
@click.option("--format", metavar="NAME", help=FORMAT_HELP)
@click.option("--layout", "as_layout", is_flag=True, help="Print the layout as a layout file, for `convert --layout`.")
@click.option(
    "--html", "html", type=PATH, metavar="FILE", help="Write a page for a browser: one file, which uses no network."
)
@click.option(
    "--stats", "with_stats", is_flag=True, help="Read the tensors: bounds, mean, deviation, zeros, NaN, infinities."
)
@options("threads")
@read_on
@click.option("--all", "everything", is_flag=True, help="List every tensor and check every iteration.")
@command
def inspect(
    path: str,
    pattern: str | None,
    more: tuple[str, ...],
    *,
    strategy: str | None,
    format: str | None,  # noqa: A002  the name of the option
    as_layout: bool,
    html: str | None,
    with_stats: bool,
    threads: int | None,
    on: str | None,
    timeout: float,
    everything: bool,
    as_json: bool,
) -> None:
    """Show the contents of a checkpoint. Tensor data is read only with --stats.

    PATH is a checkpoint in any format that reshard reads: a .safetensors, .ckpt or torch file, a Hugging Face folder, a
    checkpoint root or one of its iteration folders, a folder of rank folders, or a folder of
    torch.distributed.checkpoint, Megatron-LM or DeepSpeed. PATTERN selects tensors: a glob that matches the whole key,
    as in layout files, or re:... for a regular expression. If it selects one tensor, its regions are drawn.

    With several paths, one line is printed for each: format, newest complete iteration, number of iterations, size, and
    whether it was saved as healthy. A second word is a path if there is a file or folder of this name, or it is a
    URL; else a pattern.

    --stats reads each tensor once, in parts, and compares what it reads with the checksums. Values are finite ones, in
    double precision. A quantised weight is one tensor of the values that its parts stand for. Other tensors whose
    elements are narrower than a byte (F4, F6) are listed, and not read.

    \b
    Examples:
      reshard inspect output/checkpoint
      reshard inspect output/checkpoint '*.layers.0.*'
      reshard inspect output/checkpoint model.embed_tokens.weight
      reshard inspect output/checkpoint --layout > layout.yaml
      reshard inspect output/checkpoint --html page.html
      reshard inspect output/checkpoint --json
      reshard inspect output/checkpoint '*.weight' --stats
      reshard inspect output/checkpoint --strategy output/strategy
      reshard inspect runs/*/

    Exit codes: 0 success, 1 refused; with several paths: at least one could not be opened, and the others are listed.
    """
    if pattern is not None and (more or (pattern and _is_path(locate(pattern)))):
        if strategy or format or as_layout or html is not None or everything or with_stats:
            raise click.UsageError("several paths are listed, one line each: only --json can be combined with them")
        from reshard.cli.overview import print_overview

        print_overview((path, pattern, *more), as_json=as_json)
        return
    from reshard.cli.bucket import check_answers

    if html is not None and (pattern is not None or as_layout):
        raise click.UsageError("--html shows the whole checkpoint: it excludes PATTERN and --layout")
    if as_layout and pattern is not None:
        raise click.UsageError("--layout prints the layout of all tensors: it excludes PATTERN")
    if with_stats:
        if html is not None or as_layout:
            raise click.UsageError("--stats prints statistics alone: it excludes --html and --layout")
        from reshard.cli.statistics import print_stats

        check_answers(path)
        given = {"strategy": strategy, "format": format, "threads": threads}
        print_stats(path, pattern, everything=everything, as_json=as_json, on=on, timeout=timeout, **given)
        return
    if on is not None or threads is not None:
        raise click.UsageError("--on and --threads are for --stats, which reads tensors")
    check_answers(path)
    opened = functools.partial(reshard.open, path, strategy=strategy, format=format)
    with collected_warnings(print_on_error=False) as logged, opened() as checkpoint:
        if as_layout:
            echo_as_file(reshard.ModelLayout.like(checkpoint), as_json=as_json)
            return
        from reshard.cli.contents import gather_contents

        facts = gather_contents(path, checkpoint, everything=everything)
        # The output of a root contains the warnings that are logged (skipped iterations).
        warnings = logged if facts.iterations is None and facts.rank_saves is None else []
        if not as_json:
            warn(*warnings)
        rows = _matching(facts.rows, pattern)
        if html is not None:
            from reshard.cli.pages.html import page
            from reshard.cli.pages.inspect_data import inspect_data

            write_page(html, page(f"reshard inspect {path}", "inspect", inspect_data(facts, _lines(facts))))
        if as_json:
            echo_json({**_json(facts, rows), "warnings": warnings})
        elif html is not None:
            echo(f"wrote {shown(html)}")
        elif pattern is None:
            _print_page(facts, everything=everything)
        elif len(rows) == 1 and rows[0].stored.placed:
            from reshard.cli.picture import print_tensor

            _print_title(facts)
            echo()
            print_tensor(rows[0].key, checkpoint[rows[0].key], rows[0].stored.cut, everything=everything)
        else:
            _print_title(facts)
            echo()
            _print_rows([_Line.of(row) for row in rows])


def _is_path(place: Location) -> bool:
    return not place.is_local or place.exists()


def _matching(rows: list[TensorRow], pattern: str | None) -> list[TensorRow]:
    from reshard.layout.patterns import Pattern

    if pattern is None:
        return rows
    try:
        compiled = Pattern.compile(pattern)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="PATTERN") from None
    found = [row for row in rows if compiled.matches(row.key)]
    if not found:
        hint = None if compiled.key is None else f"a pattern matches whole keys: try '*{pattern}*'"
        raise KeyNotFoundError(f"no key matches {pattern}", key=compiled.key, hint=hint)
    return found


def _json(facts: Contents, rows: list[TensorRow]) -> dict[str, Any]:
    checkpoint, layout = facts.checkpoint, facts.layout
    return {
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "iteration": checkpoint.iteration,
        "iterations": None if facts.iterations is None else [dataclasses.asdict(one) for one in facts.iterations],
        "rank_saves": None if facts.rank_saves is None else [dataclasses.asdict(one) for one in facts.rank_saves],
        "tracker_reason": facts.tracker_reason,
        "verified": checkpoint.verified,
        "manifest": _json_manifest(checkpoint.manifest),
        "saves": [{**dataclasses.asdict(save), "metrics": _finite(save.metrics)} for save in facts.saves],
        "strings": list(checkpoint.strings),
        "common": None if checkpoint.common is None else dataclasses.asdict(checkpoint.common),
        "parts": facts.parts,
        "left_out": None if facts.left_out is None else facts.left_out.summary(),
        "mesh": dict(checkpoint.data.rank_axes()) or (None if layout is None else layout.mesh),
        "mesh_reason": facts.layout_reason,
        "files": [{"name": name, "n_bytes": n_bytes} for name, n_bytes in facts.files],
        "n_bytes": _total(facts, "n_bytes"),
        "stored_bytes": _total(facts, "stored_bytes"),
        "unseen_by_mindspore": facts.unseen,
        "leftovers": [dataclasses.asdict(one) for one in facts.leftovers],
        "bucket": None if facts.bucket is None else dataclasses.asdict(facts.bucket),
        "quantised": {name: dataclasses.asdict(one) for name, one in facts.quantised.items()},
        "tensors": {row.key: _json_row(row, facts.checkpoint, with_shards=len(rows) == 1) for row in rows},
    }


def _json_manifest(manifest: Manifest | None) -> dict[str, Any] | None:
    if manifest is None:
        return None
    names = ("attempt", "world_size", "previous_tracker", "passed_over", "writer", "saved_at", "ckpt_status", "digest")
    known = {name: getattr(manifest, name) for name in names}
    return {"iteration": manifest.iteration, "epoch": manifest.generation, **known}


def _finite(metrics: Mapping[str, int | float]) -> dict[str, object]:
    """The metrics with infinity and NaN as text, because JSON has neither."""
    return {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}


def _json_row(row: TensorRow, checkpoint: Checkpoint, *, with_shards: bool) -> dict[str, Any]:
    fields = dataclasses.asdict(row.stored)
    if with_shards and row.stored.placed:
        fields["shards"] = [dataclasses.asdict(shard) for shard in checkpoint[row.key].shards]
    return fields


# -- printing


def _print_title(facts: Contents) -> None:
    checkpoint = facts.checkpoint
    iteration = "" if checkpoint.iteration is None else f", iteration {checkpoint.iteration}"
    echo(f"{checkpoint.format}{iteration}: {shown(checkpoint.path)}")


def _print_page(facts: Contents, *, everything: bool) -> None:
    if facts.iterations is not None:
        _print_iterations(facts, facts.iterations, everything=everything)
        echo()
    if facts.leftovers:
        _print_leftovers(facts.leftovers, everything=everything)
        echo()
    if facts.bucket is not None:
        _print_bucket(facts.bucket, everything=everything)
    if facts.rank_saves:
        _print_rank_saves(facts, facts.rank_saves, everything=everything)
        echo()
    if facts.saves:
        _print_saves(facts.saves if everything else facts.saves[-_MAX_SAVES:], len(facts.saves))
        echo()
    _print_title(facts)
    echo_facts(_lines(facts))
    echo()
    if len(facts.rows) > _MAX_PLAIN:
        _print_modules(facts.rows)
        echo()
    if not facts.rows:
        echo("there are no tensors")
        return
    if everything or len(facts.rows) <= _MAX_PLAIN:
        _print_rows([line for row in _logical(facts) for line in _Line.of(row).with_parts()])
        return
    lines = [line for group in _grouped(_logical(facts)) for line in group.with_parts()]
    _print_rows(lines[:_MAX_ROWS])
    echo_more(len(lines) - _MAX_ROWS, "more lines", "give a pattern, or --all")


def _total(facts: Contents, name: Literal["n_bytes", "stored_bytes"]) -> int:
    return sum(part[name] for part in facts.parts.values())


def _lines(facts: Contents) -> list[tuple[str, str]]:
    checkpoint = facts.checkpoint
    lines = []
    if checkpoint.common is not None:
        values = dataclasses.asdict(checkpoint.common)
        unknown = values.pop("unknown")
        text = ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)
        more = f"; not known here: {', '.join(map(shown, unknown[:8]))}" if unknown else ""
        lines.append(("common", (text or "no counters") + more))
    manifest = checkpoint.manifest
    if manifest is not None:
        ranks = counted(manifest.world_size, "rank")
        lines.append(("manifest", f"saved {shown(manifest.saved_at)} by {ranks}, {shown(manifest.writer)}"))
        found = None
        if manifest.ckpt_status == 1 and locate(checkpoint.path).is_folder():
            found = health.unhealthy(locate(checkpoint.path).parent, manifest.iteration)
        if found is not None:
            lines.append(("health", shown(str(found))))
        elif manifest.ckpt_status is not None:
            lines.append(("health", "saved as unhealthy" if manifest.ckpt_status else "saved as healthy"))
    elif checkpoint.data.traits.expects_manifest:
        lines.append(("manifest", "none: unverified, only the structure can be checked"))
    for part, totals in sorted(facts.parts.items()):  # model, optimizer
        dtypes = ", ".join(f"{n} {dtype}" for dtype, n in totals["dtypes"].most_common())
        elements = "parameters" if part == "model" else "elements"
        n = totals["n_tensors"]
        counts = f"{n} tensor{'s' if n > 1 else ''}, {_count(totals['n_elements'])} {elements}"
        lines.append((part, f"{counts}, {size(totals['n_bytes'])} ({dtypes})"))
    if facts.quantised:
        kinds = Counter(one.title for one in facts.quantised.values())
        n_elements = sum(math.prod(one.shape) for one in facts.quantised.values())
        text = ", ".join(f"{n} {title}" for title, n in kinds.most_common())
        weights = counted(len(facts.quantised), "weight")
        lines.append(("quantised", f"{weights}, {_count(n_elements)} parameters ({text})"))
    if facts.left_out is not None:
        text = f"{facts.left_out.to_text()}: {listed(facts.left_out.tensors)}. Only their digests are saved"
        lines.append(("left out", shown(text)))
    if checkpoint.strings:
        names = listed(map(shown, checkpoint.strings))
        lines.append(("text", f"{len(checkpoint.strings)} values that are not tensors and cannot be read: {names}"))
    if checkpoint.data.traits.rank_folders:
        lines.append(("ranks", f"{len(checkpoint.ranks())}, each with its own file"))
        lines.append(("strategy", _strategy(checkpoint)))
    lines.append(("mesh", _mesh(facts)))
    sizes = [n_bytes for _, n_bytes in facts.files]
    ends = dict.fromkeys(size(end(sizes)) for end in (min, max) if sizes)
    each = f", {' to '.join(ends)} each" if len(sizes) > 1 else ""
    if len(ends) > 1:
        each += f", {_balance(facts.files)}"
    lines.append(("files", f"{len(sizes)}, {size(sum(sizes))} in all{each}"))
    unique, stored = _total(facts, "n_bytes"), _total(facts, "stored_bytes")
    if checkpoint.unplaced():
        return lines
    times = f"{size(stored)} stored for {size(unique)} of tensors, {stored / max(unique, 1):.2f} times"
    lines.append(("replicas", "none" if stored == unique else times))
    if unseen := facts.unseen:
        count = f"describes {len(unseen)} of {len(facts.rows)} tensors, marked *, whose layouts metadata.json cannot "
        effect = "a program that reads metadata.json alone, such as MindSpore Transformers, does not load them"
        lines.append(("tiles.json", f"{count}express; {effect}"))
    return lines


def _balance(files: Iterable[tuple[str, int]]) -> str:
    """How much larger than the mean the largest file is: of all, or of those whose names differ in numbers only."""
    kinds: dict[str, list[int]] = {}
    for name, n_bytes in files:
        kinds.setdefault(re.sub("[0-9]+", "", name), []).append(n_bytes)
    if len(kinds) == 1 or all(len(sizes) == 1 for sizes in kinds.values()):
        sizes = [n_bytes for sizes in kinds.values() for n_bytes in sizes]
        return f"the largest {_times_mean(sizes):.2f} times the mean"
    return f"at most {max(map(_times_mean, kinds.values())):.2f} times the mean of files with similar names"


def _times_mean(sizes: Sequence[int]) -> float:
    return max(sizes) * len(sizes) / max(sum(sizes), 1)


def _strategy(checkpoint: Checkpoint) -> str:
    if checkpoint.strategy is not None:
        known = checkpoint.strategy
        return (
            f"{shown(known.source)}: {counted(known.n_stages, 'stage')} of {counted(known.devices_per_stage, 'rank')}"
        )
    if checkpoint.unplaced():
        return "none: shapes and sizes are those of one rank, and the global tensors are not known; use --strategy"
    return "none, one rank"


def _mesh(facts: Contents) -> str:
    if axes := facts.checkpoint.data.rank_axes():
        return f"{_sizes(axes)} ({counted(math.prod(axes.values()), 'rank')}, by the names of files and folders)"
    if facts.layout is None:
        return f"{'unknown' if facts.checkpoint.unplaced() else 'no single one'}: {shown(facts.layout_reason)}"
    mesh = facts.layout.mesh
    n_ranks = math.prod(mesh.values())
    if n_ranks == 1:
        return "none, full tensors"
    return f"{_sizes(mesh)} ({counted(n_ranks, 'rank')})"


def _sizes(mesh: Mapping[str, int]) -> str:
    return ", ".join(f"{shown(axis)} {n}" for axis, n in mesh.items())


def _print_iterations(facts: Contents, iterations: Sequence[Iteration], *, everything: bool) -> None:
    echo(f"root: {shown(facts.path)}")
    listed = iterations if everything else iterations[:_MAX_ITERATIONS]
    lines: list[tuple[str, str | Text]] = []
    for one in listed:
        state = _STATES[one.complete]
        if one.complete is None and one.reason is not None:
            state = "unreadable"
        if one.complete and not one.verified:
            state = "complete, unverified"
        marks = [
            mark
            for mark, is_so in (
                ("selected", one.taken),
                ("tracker", one.tracker),
                ("never tracked", one.verified and not one.tracked),
                ("pinned", one.pinned),
                ("unhealthy", one.unhealthy),
            )
            if is_so
        ]
        text = f" ({', '.join(marks)})" if marks else ""
        reason = one.reason or one.refused
        lines.append((shown(one.folder), _colored(state, text if reason is None else f"{text}: {shown(reason)}")))
    if len(listed) < len(iterations):
        lines.append(("...", f"and {len(iterations) - len(listed)} older; --all lists and checks them"))
    lines += [("warning", shown(one)) for one in facts.warnings]
    if listed and listed[0].complete is False:
        lines.append(("next", f"see what a restart does: reshard explain {shlex.quote(shown(facts.path))}"))
    echo_table(facts_table(lines))


def _colored(state: str, rest: str) -> Text:
    """A state in its colour, and text."""
    color = {"complete": "green", "damaged": "red", "unreadable": "red"}.get(state.partition(",")[0])
    return styled("", None).append(state, color).append(rest)


def _print_leftovers(leftovers: Sequence[Leftover], *, everything: bool) -> None:
    echo("other files and folders, which are not read:")
    listed = leftovers if everything else leftovers[:_MAX_LEFTOVERS]
    lines = [(shown(one.name), f"{shown(one.what)} ({size(one.n_bytes)})") for one in listed]
    if len(listed) < len(leftovers):
        lines.append(("...", f"and {len(leftovers) - len(listed)} more; --all lists them"))
    echo_facts(lines)


def _print_bucket(bucket: BucketFacts, *, everything: bool) -> None:
    for danger in bucket.dangers:
        warn(danger)
    uploads = bucket.uploads if everything else bucket.uploads[:_MAX_LEFTOVERS]
    if uploads:
        echo("unfinished uploads, which cost money; a young one can be of a save that runs:")
    for one in uploads:
        age = "begun at an unknown time" if one.begun is None else f"begun {shown(one.begun)}"
        age = age if one.age_s is None or one.age_s < 0 else f"begun {duration(one.age_s)} ago"
        parts = "" if one.n_bytes is None else f", {size(one.n_bytes)}"
        echo(f"  {shown(one.key)}  {age}{parts}")
        echo(f"    {'removed by the service a week later' if one.end_with is None else shown(one.end_with)}")
    echo_more(len(bucket.uploads) - len(uploads), "more uploads", "--all lists them")
    for note in bucket.notes:
        echo(f"note: {shown(note)}")
    if bucket.uploads or bucket.notes:
        echo()


def _print_rank_saves(facts: Contents, saves: Sequence[RankSaveState], *, everything: bool) -> None:
    echo(f"root: {shown(facts.path)}")
    lines = []
    for one in saves if everything else saves[:_MAX_ITERATIONS]:
        state = "complete, unverified" if one.complete else _STATES[one.complete]
        if one.complete is None and one.reason is not None:
            state = "unreadable"
        text = f"{state} (selected)" if one.taken else state
        lines.append((shown(one.name), f"{text}: {shown(one.reason or one.why)}"))
    if len(lines) < len(saves):
        lines.append(("...", f"and {len(saves) - len(lines)} more; --all lists and checks them"))
    echo_facts(lines)


def _print_saves(saves: Sequence[SaveRecord], n_saves: int) -> None:
    """Print the save log, newest first. On a narrow terminal the metrics have a table of their own."""
    newest_first = list(reversed(saves))
    columns = [
        ("saved at", [shown(save.saved_at) for save in newest_first]),
        ("iteration", [str(save.iteration) for save in newest_first]),
        ("size", [size(save.n_bytes) for save in newest_first]),
        ("took", [f"{save.wall_s:.1f} s" for save in newest_first]),
        ("training waited", [f"{save.stall_s:.1f} s" for save in newest_first]),
    ]
    metrics = [
        (shown(name), [f"{save.metrics[name]:.6g}" if name in save.metrics else "" for save in newest_first])
        for name in dict.fromkeys(name for save in saves for name in save.metrics)
    ]
    out = console()
    table = _saves_table([*columns, *metrics])
    if n_fitting(table, out) == len(table.columns):
        echo_table(table, out)
    else:
        echo_table(_saves_table(columns), out)
        _print_metrics(columns[1], metrics, out)
    echo_more(n_saves - len(saves), "older saves")


def _saves_table(columns: Sequence[tuple[str, list[str]]]) -> Table:
    table = plain_table(*(name for name, _ in columns), right=("iteration",))
    for cells in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(*cells)
    return table


def _print_metrics(iterations: tuple[str, list[str]], metrics: Sequence[tuple[str, list[str]]], out: Console) -> None:
    """Print as many metrics as the terminal is wide enough for, at least one."""
    if not metrics:
        return
    n_shown = max(1, n_fitting(_saves_table([iterations, *metrics]), out) - 1)
    echo()
    echo_table(_saves_table([iterations, *metrics[:n_shown]]), out)
    rest = [name for name, _ in metrics[n_shown:]]
    echo_more(len(rest), f"more metric{'' if len(rest) == 1 else 's'}: {listed(rest)}", "--json lists them")


def _print_modules(rows: Iterable[TensorRow]) -> None:
    """Print the largest modules, which are the keys without their last component, with bars of their size."""
    sizes: Counter[str] = Counter()
    for row in rows:
        sizes[row.key.rpartition(".")[0] or row.key] += row.stored.n_bytes
    modules = number_groups(list(sizes))
    n_bytes_of = Counter[int]()
    for module, n_bytes in zip(modules.of_keys, sizes.values(), strict=True):
        n_bytes_of[module] += n_bytes
    ordered = [(modules.groups[module], n_bytes) for module, n_bytes in n_bytes_of.most_common()]
    total = sum(n_bytes for _, n_bytes in ordered)
    header = "largest modules"
    table = plain_table(header, "n", "size", "share", "", right=("n", "size", "share"), folds=(header,))
    block = "█" if "utf" in (sys.stdout.encoding or "").lower() else "#"
    for group, n_bytes in ordered[:_MAX_MODULES]:
        share = n_bytes / max(total, 1)
        bar = block * round(_BAR * n_bytes / max(ordered[0][1], 1))
        table.add_row(group.text, str(group.n_keys), size(n_bytes), f"{100 * share:.0f} %", bar)
    echo_table(table)
    rest = ordered[_MAX_MODULES:]
    if rest:
        echo(f"and {len(rest)} smaller, {size(sum(n_bytes for _, n_bytes in rest))}")


@dataclass(frozen=True)
class _Line:
    """A line of the table: one tensor, or several that differ only in the numbers in their names."""

    key: str
    n: int
    row: _Row

    @classmethod
    def of(cls, row: _Row) -> _Line:
        return cls(shown(row.key), 1, row)

    def with_parts(self) -> list[_Line]:
        """The line, and of a quantised weight one for each of its parts."""
        parts = self.row.parts if isinstance(self.row, _Logical) else ()
        return [self, *(_Line(f"  {shown(part.key.rpartition('.')[2])}", self.n, part) for part in parts)]


class _Logical(NamedTuple):
    """A quantised weight as a row: what is stored is that of its parts."""

    key: str
    stored: StoredAs
    parts: tuple[TensorRow, ...]


_Row: TypeAlias = "TensorRow | _Logical"


def _logical(facts: Contents) -> list[_Row]:
    """The rows, with one for each quantised weight in the place of its parts."""
    if not facts.quantised:
        return [*facts.rows]
    rows = {row.key: row for row in facts.rows}
    weight_of = {key: (name, one) for name, one in facts.quantised.items() for key in one.parts.values()}
    found: dict[str, _Row] = {}
    for key, row in rows.items():
        name, one = weight_of.get(key, (key, None))
        if one is None:
            found[key] = row
        elif name not in found:
            parts = tuple(rows[part] for part in one.parts.values())
            n_bytes = sum(part.stored.n_bytes for part in parts)
            stored = dataclasses.replace(parts[0].stored, dtype=one.kind, shape=one.shape, n_bytes=n_bytes)
            found[name] = _Logical(name, stored, parts)
    return list(found.values())


def _grouped(rows: Sequence[_Row]) -> list[_Line]:
    """One line for each group of tensors that differ only in the numbers in their keys."""
    labels: dict[tuple[object, ...], int] = {}
    label_of: dict[StoredAs, int] = {}
    for stored in {row.stored: None for row in rows}:
        values = (stored.part, stored.dtype, stored.shape, stored.cut, stored.n_shards, stored.replicas, stored.tiled)
        label_of[stored] = labels.setdefault(values, len(labels))
    found = number_groups([row.key for row in rows], [label_of[row.stored] for row in rows])
    return [_Line(group.text, group.n_keys, rows[group.first]) for group in found.groups]


def _print_rows(lines: Sequence[_Line]) -> None:
    # A column in which every cell is 1 or "whole" is left out, for wider keys.
    rows = [line.row.stored for line in lines]
    columns = {
        "key": [line.key for line in lines],
        "n": [str(line.n) for line in lines],
        "dtype": [row.dtype for row in rows],
        "shape": [join_dims(row.shape) for row in rows],
        "cut": [shown(row.cut) + (" *" if row.tiled else "") for row in rows],
        "shards": [str(row.n_shards) for row in rows],
        "replicas": [f"{a}" if a == b else f"{a}-{b}" for a, b in (row.replicas for row in rows)],
        "size": [size(row.n_bytes * line.n) for row, line in zip(rows, lines, strict=True)],
    }
    defaults = {"n": {"1"}, "shards": {"1"}, "replicas": {"1"}, "cut": {"whole"}}
    names = [name for name, cells in columns.items() if set(cells) != defaults.get(name)]
    out = console()
    widths = {name: max(len(name), *map(len, columns[name])) for name in names}
    free = out.width - sum(2 + width for name, width in widths.items() if name not in ("key", "cut"))
    # The key column gets the remaining width, and at least 3/5 of it: the `cut` column can be wrapped at blanks.
    width = max(free - (2 + widths["cut"] if "cut" in widths else 0), free * 3 // 5)
    if width < min(widths["key"], _MIN_KEY):
        _print_stacked(columns, names)
        return
    columns["key"] = [_folded(key, width) for key in columns["key"]]
    table = plain_table(*names, right=("n", "shards", "replicas", "size"), folds=("cut",))
    for cells in zip(*(columns[name] for name in names), strict=True):
        table.add_row(*cells)
    echo_table(table, out)


def _print_stacked(columns: dict[str, list[str]], names: Sequence[str]) -> None:
    """For a narrow terminal: each key on one line, the other columns on the next."""
    for row, key in enumerate(columns["key"]):
        echo(key)
        cells = {name: columns[name][row] for name in names}
        counts = [f"{cells[name]} {name}" for name in ("shards", "replicas") if cells.get(name, "1") != "1"]
        n = f"{cells['n']} x " if cells.get("n", "1") != "1" else ""
        cut = [cells["cut"]] if "cut" in cells else []
        echo("  " + "  ".join([n + cells["dtype"], cells["shape"], cells["size"], *counts, *cut]))


def _folded(key: str, width: int) -> str:
    """A key in lines of at most this width, broken after dots if possible; all but the first line are indented."""
    lines = []
    while len(key) > width:
        at = key.rfind(".", 1, width) + 1 or width
        lines.append(key[:at])
        key = f"  {key[at:]}"
    return "\n".join([*lines, key])


def _count(n: int) -> str:
    """A count with three significant digits: 8.03 billion, 1.2 million, 999."""
    for scale, word in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if n >= scale:
            return f"{n / scale:.3g} {word}"
    return str(n)
