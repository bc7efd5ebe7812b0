"""Prints one tensor: the grid of its stored regions, and the files that hold each region."""

from __future__ import annotations

import math
import os
import re
from typing import TYPE_CHECKING

from reshard.cli.output import console, echo, echo_facts, echo_more, echo_table, join_dims, plain_table, shown, size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reshard.checkpoint import StoredShard, TensorInfo

_MAX_ACROSS, _MAX_DOWN = 8, 32  # regions in a grid; a larger grid is listed
_MAX_LISTED = 64  # shards
_MAX_FILES = 8  # files per region


def print_tensor(key: str, info: TensorInfo, cut: str, *, everything: bool) -> None:
    """Print one tensor, with the grid of its regions or a list of its shards.

    Args:
        key: its key.
        info: its description.
        cut: its partition, as text.
        everything: list all shards, without a limit.
    """
    held = [len(shard.files) for shard in info.shards] or [0]
    each = f"{min(held)}" if min(held) == max(held) else f"{min(held)} to {max(held)}"
    names = list(dict.fromkeys(name for shard in info.shards for name in shard.files))
    pattern, short = _short_names(names)
    echo(shown(key))
    echo_facts(
        [
            (info.part, f"{info.dtype}, {join_dims(info.shape)}, {size(info.n_bytes)}"),
            ("cut", shown(cut)),
            ("shards", f"{len(info.shards)}, each in {each} file{'' if each == '1' else 's'}"),
            ("files", pattern),
        ]
    )
    echo()
    if not _draw(info, short):
        _list(info.shards, short, everything=everything)


def _draw(info: TensorInfo, short: Callable[[str], str]) -> bool:
    """Draw the regions if they are a grid over at most two dims and not too large. Dim 0 of a matrix is vertical."""
    from rich.box import SQUARE
    from rich.table import Table

    regions = {(shard.offset, shard.shape): shard for shard in info.shards}
    cuts = [sorted({(shard.offset[d], shard.shape[d]) for shard in info.shards}) for d in range(len(info.shape))]
    if not regions or math.prod(map(len, cuts)) != len(info.shards):
        return False
    dims = [d for d, parts in enumerate(cuts) if len(parts) > 1]
    if len(dims) > 2:
        return False
    if len(dims) == 2:
        down, across = dims[0], dims[1]
    elif dims and dims[0] > 0:
        down, across = 0, dims[0]
    else:
        down, across = 0, 1
    rows = cuts[down] if down < len(cuts) else [None]
    columns = cuts[across] if across < len(cuts) else [None]
    if len(rows) > _MAX_DOWN or len(columns) > _MAX_ACROSS:
        return False
    corner = f"dim {down}" if info.shape else ""
    corner = f"{corner} \\ dim {across}" if across < len(cuts) else corner
    left = ["" if row is None else _interval(*row) for row in rows]
    top = ["" if column is None else _interval(*column) for column in columns]
    # Each column has two blanks and a line, and a cell of several files is wrapped.
    out = console()
    if sum(3 + len(text) for text in (max(corner, *left, key=len), *top)) + 1 > out.width:
        return False
    table = Table(box=SQUARE, show_lines=True, header_style="dim", pad_edge=True)
    table.add_column(corner, style="dim", no_wrap=True)
    for text in top:
        table.add_column(text, overflow="fold", min_width=max(1, len(text)))
    for row, name in zip(rows, left, strict=True):
        cells = []
        for column in columns:
            region = [parts[0] for parts in cuts]
            for dim, part in ((down, row), (across, column)):
                if part is not None:
                    region[dim] = part
            shard = regions[tuple(offset for offset, _ in region), tuple(extent for _, extent in region)]
            cells.append(_files(shard, short))
        table.add_row(name, *cells)
    echo_table(table, out)
    return True


def _list(shards: Sequence[StoredShard], short: Callable[[str], str], *, everything: bool) -> None:
    table = plain_table("region", "files", folds=["files"])
    listed = shards if everything else shards[:_MAX_LISTED]
    for shard in listed:
        region = ", ".join(_interval(start, n) for start, n in zip(shard.offset, shard.shape, strict=True))
        table.add_row(f"[{region}]", _files(shard, short))
    echo_table(table)
    echo_more(len(shards) - len(listed))


def _interval(start: int, n: int) -> str:
    return f"{start}:{start + n}"


def _files(shard: StoredShard, short: Callable[[str], str]) -> str:
    more = f" +{len(shard.files) - _MAX_FILES}" if len(shard.files) > _MAX_FILES else ""
    return ", ".join(short(name) for name in sorted(shard.files)[:_MAX_FILES]) + more


def _short_names(names: Sequence[str]) -> tuple[str, Callable[[str], str]]:
    """A pattern for file names that differ in one number, with `#` for it, and a function from name to number."""
    if len(names) < 2:
        return ", ".join(map(shown, names)), shown
    before = re.sub(r"[0-9]+\Z", "", os.path.commonprefix(names))  # noqa: RUF071  names, not paths
    after = re.sub(r"\A[0-9]+", "", os.path.commonprefix([name[::-1] for name in names])[::-1])  # noqa: RUF071
    middles = {name: name[len(before) : len(name) - len(after)] for name in names}
    if not all(re.fullmatch(r"[0-9]{1,18}", middle) for middle in middles.values()):
        return f"{len(names)}", shown
    return f"{shown(before)}#{shown(after)}, # as listed below", lambda name: str(int(middles[name]))
