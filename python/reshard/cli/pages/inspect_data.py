"""The data of the page of `reshard inspect`: a bounded summary of the contents of a checkpoint.

Where a checkpoint has more files, tensors, regions or saves than a page can show, several are one mark, and `notes`
says so. The largest page has a few megabytes.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reshard.cli.output import join_dims, natural_order
from reshard.cli.pages.html import text
from reshard.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reshard import _core
    from reshard.checkpoint import Checkpoint
    from reshard.cli.contents import Contents, Iteration, StoredAs, TensorRow

_MAX_TENSORS = 3000
_MAX_FILES = 1024
_MAX_SAVES = 600
_MAX_METRICS = 12
_MAX_CELLS = 60_000  # of the drawings of all tensors
_MAX_CELLS_EACH = 1024
_MIN_CELLS_EACH = 16
_MAX_FILES_IN_CELL = 6
_MAX_KNOWN = 32  # ways of storing a tensor that are remembered
_NUMBER_IN_KEY = re.compile(r"(?:(?<=\.)|^)[0-9]{1,18}(?=\.|$)")


def inspect_data(facts: Contents, lines: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """The data of the page.

    Args:
        facts: the contents.
        lines: names and values that are shown first.
    """
    notes: list[str] = []
    files = _Files(facts.files, _ranks_of(facts.checkpoint), notes)
    rows = _tensor_groups(facts.rows, notes)
    checkpoint = facts.checkpoint
    return {
        "path": text(facts.path),
        "opened": text(checkpoint.path),
        "format": text(checkpoint.format),
        "iteration": checkpoint.iteration,
        "facts": [[text(name), text(value)] for name, value in lines],
        "parts": [[name, totals["n_tensors"], totals["n_bytes"]] for name, totals in sorted(facts.parts.items())],
        "saves": _saves(facts, notes),
        **_tensors(facts, rows, files, notes),
        "files": files.data(),
        "notes": notes,
    }


# -- the time line


def _saves(facts: Contents, notes: list[str]) -> dict[str, Any]:
    """Every iteration that is in the root or in its log, oldest first, and the metrics by name."""
    found = {one.iteration: one for one in facts.iterations or ()}
    logged = {save.iteration: save for save in facts.saves}
    numbers = sorted(found.keys() | logged.keys())
    if len(numbers) > _MAX_SAVES:
        # Evenly over those that are gone or not marked, and all that a reader looks for, newest first.
        special = [n for n in numbers if n in found and (_marks(found[n]) or found[n].complete is False)]
        kept = set(special[-_MAX_SAVES // 2 :])
        left = [n for n in numbers if n not in kept]
        step = math.ceil(len(left) / (_MAX_SAVES - len(kept)))
        shown_numbers = sorted(kept | set(left[::step]) | {numbers[-1]})
        notes.append(f"The time line shows {len(shown_numbers)} of {len(numbers)} saves, evenly chosen; "
                     "those with a mark or damage are kept.")  # fmt: skip
        numbers = shown_numbers
    names = list(dict.fromkeys(name for save in facts.saves for name in save.metrics))
    if len(names) > _MAX_METRICS:
        notes.append(f"The time line has the first {_MAX_METRICS} of {len(names)} metrics.")
    names = names[:_MAX_METRICS]
    points = []
    for number in numbers:
        one, save = found.get(number), logged.get(number)
        points.append(
            {
                "iteration": number,
                "state": _state(one),
                "marks": [] if one is None else _marks(one),
                "reason": None if one is None or not (one.reason or one.refused) else text(one.reason or one.refused),
                "saved_at": None if save is None else text(save.saved_at),
                "n_bytes": None if save is None else save.n_bytes,
                "wall_s": None if save is None else save.wall_s,
                "stall_s": None if save is None else save.stall_s,
                "values": [None if save is None else _number(save.metrics.get(name)) for name in names],
            }
        )
    return {"metrics": [text(name) for name in names], "points": points}


def _state(one: Iteration | None) -> str:
    if one is None:
        return "deleted"
    if one.complete is None:
        return "unreadable" if one.reason else "not checked"
    if not one.complete:
        return "damaged"
    return "complete" if one.verified else "unverified"


def _marks(one: Iteration) -> list[str]:
    marks = {"tracker": one.tracker, "pinned": one.pinned, "selected": one.taken}
    return [name for name, is_so in marks.items() if is_so]


def _number(value: float | None) -> float | str | None:
    """A metric; infinity and NaN as text, because JSON has neither."""
    return value if value is None or math.isfinite(value) else str(value)


# -- files


class _Files:
    """The files as marks: each mark is one file, or consecutive files in a checkpoint with many."""

    def __init__(self, files: Sequence[tuple[str, int]], ranks: Mapping[int, int], notes: list[str]) -> None:
        ordered = sorted(range(len(files)), key=lambda n: natural_order(files[n][0]))
        each = max(1, math.ceil(len(files) / _MAX_FILES))
        if each > 1:
            each = math.ceil(len(files) / (_MAX_FILES // 2))
        self._files = [files[n] for n in ordered]
        self._ranks = [ranks.get(n) for n in ordered]
        self._each = each
        self._mark = [0] * len(files)
        for position, n in enumerate(ordered):
            self._mark[n] = position // each
        n_marks = math.ceil(len(files) / each)
        self._tensors = [0] * n_marks
        self._held: list[dict[str, int]] = [{} for _ in range(n_marks)]
        if each > 1:
            notes.append(f"There are {len(files)} files: each mark stands for {each} consecutive files.")

    def mark(self, number: int) -> int:
        """The mark of a file, by its number in the checkpoint."""
        return self._mark[number]

    def add(self, mark: int, part: str, n_bytes: int, n_tensors: int) -> None:
        """Count tensors of which a mark holds so many bytes each."""
        self._held[mark][part] = self._held[mark].get(part, 0) + n_bytes * n_tensors
        self._tensors[mark] += n_tensors

    def data(self) -> dict[str, Any]:
        marks = []
        for mark in range(len(self._tensors)):
            members = self._files[mark * self._each : (mark + 1) * self._each]
            name = text(members[0][0])
            if len(members) > 1:
                name = f"{name} to {text(members[-1][0])}"
            sizes = [n_bytes for _, n_bytes in members]
            held = self._held[mark]
            ranks = sorted({rank for rank in self._ranks[mark * self._each :][: len(members)] if rank is not None})
            marks.append([name, len(members), sum(sizes), max(sizes), self._tensors[mark],
                          held.get("model", 0), held.get("optimizer", 0),
                          ranks[0] if ranks else None, ranks[-1] if ranks else None])  # fmt: skip
        return {"n": len(self._files), "each": self._each, "marks": marks}


def _ranks_of(checkpoint: Checkpoint) -> dict[int, int]:
    """The rank that wrote each file, by the number of the file, where that is recorded."""
    try:
        recorded = checkpoint.data.rank_files()
    except ArgumentError:
        return {}
    return {file: rank for rank, files in (recorded or {}).items() for file in files}


# -- tensors


def _tensor_groups(rows: Sequence[TensorRow], notes: list[str]) -> list[tuple[str, list[TensorRow]]]:
    """Name and members of each mark: a tensor, or tensors whose names differ in numbers, if there are too many."""
    if len(rows) <= _MAX_TENSORS:
        return [(row.key, [row]) for row in rows]
    groups: dict[tuple[object, ...], list[TensorRow]] = {}
    for row in rows:
        groups.setdefault(
            (_NUMBER_IN_KEY.sub("*", row.key), row.stored.part, row.stored.dtype, row.stored.shape), []
        ).append(row)
    notes.append(f"There are {len(rows)} tensors: those with equal shapes whose names differ in numbers are one mark, "
                 "such as layers.*.weight, and the regions are those of the first.")  # fmt: skip
    found = [(str(group[0]) if len(members) > 1 else members[0].key, members) for group, members in groups.items()]
    if len(found) > _MAX_TENSORS:
        found.sort(key=lambda group: -sum(row.stored.n_bytes for row in group[1]))
        rest = found[_MAX_TENSORS - 1 :]
        notes.append(f"The {len(rest)} smallest groups of tensors are left out of the map of tensors.")
        found = found[: _MAX_TENSORS - 1]
    return found


def _tensors(
    facts: Contents, groups: Sequence[tuple[str, list[TensorRow]]], files: _Files, notes: list[str]
) -> dict[str, Any]:
    """The tensors, with the drawings of their regions; equal drawings and texts are in the page once."""
    max_cells = min(_MAX_CELLS_EACH, max(_MIN_CELLS_EACH, _MAX_CELLS // max(len(groups), 1)))
    texts: dict[str, int] = {}
    drawings: dict[tuple[object, ...], int] = {}
    found = []
    n_merged = 0
    # Many tensors of a model lie alike: their regions, which can be millions, are looked at once. Of places of several
    # numbers the regions are compared, as long as they are known: a hash of many of them takes longer.
    index = facts.checkpoint.data.index
    placed = [row for row in facts.rows if row.stored.placed]
    place_of = dict(zip(index.keys(), index.places(), strict=True)) if placed else {}
    known: list[tuple[Sequence[int], Sequence[_core.StoredRegion], _Drawn]] = []
    same: dict[tuple[object, ...], _Drawn] = {}
    of_places: dict[int, _Drawn] = {}
    alike: Counter[tuple[int, StoredAs]] = Counter()
    drawn = {members[0].key for _, members in groups}
    drawing_of: dict[str, int | None] = {}
    for row in placed:
        place = place_of[row.key]
        alike[place, row.stored] += 1
        if place not in of_places:
            regions = index.shards(row.key)
            one = next((one for shape, of_one, one in known if shape == row.stored.shape and of_one == regions), None)
            if one is None:
                drawing, merged = _drawing(row.stored.shape, regions, files, max_cells)
                held = _held(regions, files)
                one = same.setdefault((drawing, merged, *held.items()), _Drawn(drawing, None, merged, held))
                known = [(row.stored.shape, regions, one), *known[: _MAX_KNOWN - 1]]
            of_places[place] = one
        one = of_places[place]
        if row.key in drawn:
            if one.number is None:
                one.number = drawings.setdefault(one.drawing, len(drawings))
            drawing_of[row.key] = one.number
            n_merged += one.merged
    for (place, stored), n_tensors in alike.items():
        n_elements = max(math.prod(stored.shape), 1)
        for mark, n in of_places[place].held.items():
            files.add(mark, stored.part, stored.n_bytes * n // n_elements, n_tensors)
    if n_merged:
        notes.append(f"The regions of {n_merged} tensors are drawn together: several regions are one cell.")
    for name, members in groups:
        first = members[0]
        found.append(
            [
                text(name),
                len(members),
                texts.setdefault(first.stored.part, len(texts)),
                texts.setdefault(text(first.stored.dtype), len(texts)),
                texts.setdefault(join_dims(first.stored.shape), len(texts)),
                texts.setdefault(text(first.stored.cut), len(texts)),
                first.stored.n_shards,
                *first.stored.replicas,
                sum(row.stored.n_bytes for row in members),
                drawing_of.get(first.key),
            ]
        )
    return {"tensors": found, "texts": list(texts), "drawings": list(drawings)}


@dataclass(eq=False)
class _Drawn:
    """Regions of tensors that lie alike.

    Attributes:
        drawing: as cells.
        number: of the drawing in the page; None: no tensor that is drawn lies so, as yet.
        merged: whether cells hold several regions.
        held: the elements that each mark of files holds.
    """

    drawing: tuple[object, ...]
    number: int | None
    merged: bool
    held: Mapping[int, int]


def _held(regions: Sequence[_core.StoredRegion], files: _Files) -> dict[int, int]:
    """The elements of a tensor that each mark holds."""
    held: dict[int, int] = {}
    for region in regions:
        n = math.prod(region.shape)
        for mark in map(files.mark, region.files):
            held[mark] = held.get(mark, 0) + n
    return held


def _drawing(
    shape: Sequence[int], shards: Sequence[_core.StoredRegion], files: _Files, max_cells: int
) -> tuple[tuple[object, ...], bool]:
    """The regions of a tensor as cells of a grid of rows and columns, and whether cells hold several regions.

    A cell is `(row, column, number of regions, number of marks, the first marks)`. Regions that are no grid are cells
    of one row, in their order.
    """
    cuts = [sorted({(shard.offset[d], shard.shape[d]) for shard in shards}) for d in range(len(shape))]
    dims = [d for d, parts in enumerate(cuts) if len(parts) > 1]
    is_grid = math.prod(len(parts) for parts in cuts) == len(shards)
    if is_grid:
        down, across = (*dims[:2],) if len(dims) > 1 else (0, dims[0]) if dims and dims[0] > 0 else (0, 1)
        rows = _intervals(cuts[down]) if down < len(cuts) else [(0, 1)]
        columns = _intervals(cuts[across]) if across < len(cuts) else [(0, 1)]
    else:
        down, across = -1, -1
        rows, columns = [(0, 1)], [(n, 1) for n in range(len(shards))]
    side = max(1, math.isqrt(max_cells))
    n_rows = min(len(rows), max(side, max_cells // len(columns)))
    n_columns = min(len(columns), max_cells // n_rows)
    row_of = {part: n * n_rows // len(rows) for n, part in enumerate(rows)}
    column_of = {part: n * n_columns // len(columns) for n, part in enumerate(columns)}
    counts: Counter[tuple[int, int]] = Counter()
    marks_of: dict[tuple[int, int], set[int]] = defaultdict(set)
    for number, shard in enumerate(shards):
        row = row_of[shard.offset[down], shard.shape[down]] if is_grid and down < len(shape) else 0
        if is_grid:
            column = column_of[shard.offset[across], shard.shape[across]] if across < len(shape) else 0
        else:
            column = column_of[number, 1]
        counts[row, column] += 1
        marks_of[row, column].update(map(files.mark, shard.files))
    data = []
    for (row, column), n in sorted(counts.items()):
        marks = sorted(marks_of[row, column])
        data.append((row, column, n, len(marks), tuple(marks[:_MAX_FILES_IN_CELL])))
    labels = (_labels(rows, n_rows), _labels(columns, n_columns)) if is_grid else ((), ())
    merged = len(counts) < len(shards)
    return (down if down < len(shape) else -1, across if across < len(shape) else -1, *labels, tuple(data)), merged


def _intervals(parts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    return list(parts) or [(0, 1)]


def _labels(parts: Sequence[tuple[int, int]], n: int) -> tuple[str, ...]:
    """The interval of each row or column, of which several can be one."""
    ends: Mapping[int, list[int]] = {i: [] for i in range(n)}
    for number, (start, extent) in enumerate(parts):
        ends[number * n // len(parts)] += [start, start + extent]
    return tuple(f"{min(both)}:{max(both)}" for both in ends.values())
