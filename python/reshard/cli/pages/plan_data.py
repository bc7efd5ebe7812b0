"""The data of the page of `reshard plan`: ranks, files and transfers in a bounded number of marks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from reshard.cli.output import natural_order
from reshard.cli.pages.html import text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.verbs.forecast import Forecast

_MAX_BARS = 1024
_MAX_SIDE = 64  # rows and columns of the matrix


def plan_data(found: Forecast, *, src: str, layout: str, facts: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """The data of the page.

    Args:
        found: the forecast.
        src: path of the source.
        layout: path of the layout.
        facts: names and values that are shown first.
    """
    notes: list[str] = []
    ranks = [(f"rank {rank}", n_bytes) for rank, n_bytes in found.rank_bytes.items()]
    files = None if found.files is None else [(file.name, file.n_bytes) for file in found.files]
    return {
        "path": text(src),
        "layout": text(layout),
        "facts": [[text(name), text(value)] for name, value in facts],
        "ranks": _bars(ranks, "ranks", notes),
        "files": None if files is None else _bars(files, "files", notes),
        "matrix": _matrix(found, notes),
        "warnings": [text(warning) for warning in found.warnings[:20]],
        "notes": notes,
    }


def _bars(items: Sequence[tuple[str, int]], what: str, notes: list[str]) -> list[tuple[str, int, int]]:
    """Name, number and mean bytes of each bar; a bar is one item, or consecutive ones of very many."""
    each = math.ceil(len(items) / _MAX_BARS) or 1
    if each > 1:
        notes.append(f"There are {len(items)} {what}: each bar is the mean of {each} consecutive {what}.")
    bars = []
    for start in range(0, len(items), each):
        members = items[start : start + each]
        first, last = text(members[0][0]), text(members[-1][0])
        name = first if len(members) == 1 else f"{first} to {last}"
        bars.append((name, len(members), sum(n_bytes for _, n_bytes in members) // len(members)))
    return bars


def _matrix(found: Forecast, notes: list[str]) -> dict[str, Any]:
    """Bytes from files to ranks; a row or a column is one file or rank, or consecutive ones of many."""
    if len(found.transfers) < len(found.rank_bytes):
        notes.append(f"Transfers are planned for {len(found.transfers)} of {len(found.rank_bytes)} ranks, "
                     "evenly chosen.")  # fmt: skip
    ranks, read = list(found.transfers), {file for by_file in found.transfers.values() for file in by_file}
    used = sorted(read, key=lambda file: natural_order(found.sources[file].name))
    rows_each, columns_each = (math.ceil(n / _MAX_SIDE) or 1 for n in (len(used), len(ranks)))
    for each, what, n in ((rows_each, "files", len(used)), (columns_each, "ranks", len(ranks))):
        if each > 1:
            notes.append(f"The matrix draws {each} consecutive {what} of {n} as one.")
    row_of = {file: n // rows_each for n, file in enumerate(used)}
    cells: dict[tuple[int, int], int] = {}
    for n, rank in enumerate(ranks):
        for file, n_bytes in found.transfers[rank].items():
            place = row_of[file], n // columns_each
            cells[place] = cells.get(place, 0) + n_bytes
    names = [text(found.sources[file].name) for file in used]
    return {
        "rows": _ends(names, rows_each),
        "columns": _ends([str(rank) for rank in ranks], columns_each),
        "cells": [(row, column, n_bytes) for (row, column), n_bytes in sorted(cells.items())],
    }


def _ends(names: Sequence[str], each: int) -> list[str]:
    found = []
    for start in range(0, len(names), each):
        first, last = names[start], names[min(start + each, len(names)) - 1]
        found.append(first if first == last else f"{first} to {last}")
    return found
