"""What `reshard inspect` shows, gathered once: the page and the JSON object are two views of it.

No tensor is read. Cuts are told from the regions that are stored; a layout only adds the names of axes to them.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import reshard
from reshard import dtypes
from reshard.checkpoint import Checkpoint
from reshard.cli.leftovers import leftovers_in_iteration, leftovers_in_root
from reshard.errors import LayoutError, ReshardError
from reshard.formats import scalars
from reshard.formats.scrub import is_damage
from reshard.storage.location import locate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reshard.checkpoint import TensorInfo
    from reshard.cli.leftovers import Leftover
    from reshard.formats.checkpoint2.candidates import Order
    from reshard.formats.save_log import SaveRecord
    from reshard.layout import BoundLayout, ModelLayout

__all__ = ["Facts", "Iteration", "RankSaveState", "Row", "gather"]

_PARTS: tuple[Literal["model", "optimizer"], ...] = ("model", "optimizer")
_MAX_CHECKED = 10  # iterations that are opened only to say whether they are complete


@dataclass(frozen=True)
class Iteration:
    """An iteration of a root; `complete` and `verified` are None where it was not opened, or could not be read."""

    iteration: int
    folder: str
    tracker: bool  # named by the tracker now
    tracked: bool  # named by the tracker once
    pinned: bool
    taken: bool
    complete: bool | None
    verified: bool | None  # whether a manifest proves it
    reason: str | None = None  # why it is not complete, or could not be read
    refused: str | None = None  # why it is no candidate


@dataclass(frozen=True)
class RankSaveState:
    """A save in rank folders; `complete` is None where it was not opened, or could not be read."""

    name: str  # of the first rank's file
    why: str  # it stands where it does, or is never opened
    taken: bool
    complete: bool | None
    reason: str | None = None  # why it is not complete, or could not be read


@dataclass(frozen=True, slots=True)
class Row:
    """A tensor; without a place, what one rank holds of it."""

    key: str
    part: str
    dtype: str
    shape: tuple[int, ...]
    cut: str
    n_shards: int
    replicas: tuple[int, int]  # fewest and most files that hold a shard
    n_bytes: int
    stored_bytes: int
    tiled: bool  # described in tiles.json only
    placed: bool = True  # whether it is known how the ranks' arrays make it up


@dataclass(frozen=True)
class Facts:
    """Everything that is printed."""

    path: str
    checkpoint: Checkpoint
    rows: list[Row]
    iterations: list[Iteration] | None
    rank_saves: list[RankSaveState] | None
    tracker_reason: str | None
    layout: ModelLayout | None
    layout_reason: str | None  # why there is no layout
    files: list[tuple[str, int]]  # name and bytes
    saves: list[SaveRecord]  # the log of the root, the oldest first
    parts: dict[str, dict[str, Any]]  # totals of "model" and "optimizer"
    leftovers: list[Leftover]

    @property
    def unseen(self) -> list[str]:
        """The tensors that MindSpore Transformers does not see in a Checkpoint 2.0."""
        return [row.key for row in self.rows if row.tiled] if self.checkpoint.data.traits.has_metadata else []


def gather(path: str, checkpoint: Checkpoint, *, everything: bool) -> Facts:
    """Gather what there is to say of a checkpoint.

    Args:
        path: what was opened: a root tells its iterations.
        checkpoint: opened from it.
        everything: look into every iteration, however many there are.
    """
    from reshard.formats import save_log
    from reshard.opening import iterations

    layout: ModelLayout | None = None
    bound: BoundLayout | None = None
    reason: str | None = None
    unplaced = checkpoint.unplaced()
    try:
        layout = reshard.ModelLayout.like(checkpoint)
        # Where all tensors are whole there are no axes to name.
        bound = None if math.prod(layout.mesh.values()) == 1 else checkpoint.bind(layout)
    except LayoutError as error:
        layout, reason = None, "no strategy tells it" if unplaced else error.message
    tiled = set(checkpoint.tiled_keys())
    shared: dict[object, Any] = {}  # most tensors have a shape that others have, too
    rows = [
        _unplaced_row(key, *unplaced[key])
        if key in unplaced
        else _row(key, checkpoint[key], bound, shared, tiled=key in tiled)
        for part in _PARTS
        for key in checkpoint.keys(part)
    ]
    order = iterations(path)
    found = None if order is None else _iterations(path, order, checkpoint, everything=everything)
    return Facts(
        path=path,
        checkpoint=checkpoint,
        rows=rows,
        iterations=found,
        rank_saves=_rank_saves(path, checkpoint, everything=everything),
        tracker_reason="; ".join(order.warnings) or None if order is not None else None,
        layout=layout,
        layout_reason=reason,
        files=[(file.name, file.n_bytes) for file in checkpoint.files()],
        saves=[] if order is None else save_log.read(path),
        parts=_parts(rows),
        leftovers=[*([] if order is None else leftovers_in_root(locate(path))), *leftovers_in_iteration(checkpoint)],
    )


def _iterations(root: str, order: Order, taken: Checkpoint, *, everything: bool) -> list[Iteration]:
    """The iterations, newest first. What `open` did not try is opened here to know whether it is complete."""
    from reshard.opening import marks

    skipped, refused = dict(taken.skipped), {one.name: one.reason for one in order.refused}
    found: list[Iteration] = []
    n_checked = 0
    for one in sorted((*order.candidates, *order.refused), key=lambda one: -one.iteration):
        complete: bool | None = True
        verified: bool | None = taken.verified
        reason: str | None = None
        if one.name in skipped:
            complete, verified, reason = False, None, skipped[one.name]
        elif one.name != taken.path.name and n_checked == _MAX_CHECKED and not everything:
            complete = verified = None
        elif one.name != taken.path.name:
            n_checked += 1
            try:
                with reshard.open(locate(root) / one.name) as opened:
                    verified = opened.verified
            except ReshardError as error:
                complete, verified, reason = False if is_damage(error) else None, None, error.message
        tracked, pinned = marks(locate(root) / one.name)
        found.append(
            Iteration(
                one.iteration,
                one.name,
                tracker=one.iteration == order.tracker,
                tracked=tracked,
                pinned=pinned,
                taken=one.name == taken.path.name,
                complete=complete,
                verified=verified,
                reason=reason,
                refused=refused.get(one.name),
            )
        )
    return found


def _rank_saves(path: str, taken: Checkpoint, *, everything: bool) -> list[RankSaveState] | None:
    """The saves of rank folders, in the order in which they are tried. Others than the one taken are opened here."""
    from reshard.opening import open_rank_files, rank_saves

    saves = rank_saves(path)
    if saves is None:
        return None
    opened, skipped = {file.name for file in taken.files()}, dict(taken.skipped)
    found: list[RankSaveState] = []
    n_checked = 0
    for save in saves:
        is_taken = any(file.relative_to(locate(path)) in opened for file in save.files.values())
        complete: bool | None = True
        reason = skipped.get(save.name, save.fault)
        if reason is not None:
            complete = False
        elif not is_taken and n_checked == _MAX_CHECKED and not everything:
            complete = None
        elif not is_taken:
            n_checked += 1
            try:
                Checkpoint(open_rank_files(locate(path), save.files, taken.strategy)).close()
            except ReshardError as error:
                complete, reason = False if is_damage(error) else None, error.message
        found.append(RankSaveState(save.name, save.why, is_taken, complete, reason))
    return found


def _unplaced_row(key: str, dtype: str, shapes: tuple[tuple[int, ...], ...]) -> Row:
    """What can be told of a tensor of which only the ranks' own arrays are known: the largest of them."""
    shape = max(shapes, key=math.prod)
    n_bytes = math.prod(shape) * dtypes.bits(dtype) // 8
    part = "optimizer" if scalars.is_state(key) else "model"
    return Row(key, part, dtype, shape, "unknown", 1, (1, 1), n_bytes, n_bytes, tiled=False, placed=False)


def _row(key: str, info: TensorInfo, bound: BoundLayout | None, shared: dict[object, Any], *, tiled: bool) -> Row:
    """What is told of a tensor. Equal values of many rows are one object, by `shared`."""
    held = [len(shard.files) for shard in info.shards] or [0]
    n_elements = math.prod(info.shape)
    stored = sum(math.prod(shard.shape) * len(shard.files) for shard in info.shards)
    cut, replicas = _cut(key, info, bound), (min(held), max(held))
    return Row(
        key=key,
        part=info.part,
        dtype=shared.setdefault(info.dtype, info.dtype),
        shape=shared.setdefault(info.shape, info.shape),
        cut=shared.setdefault(cut, cut),
        n_shards=len(info.shards),
        replicas=shared.setdefault(replicas, replicas),
        n_bytes=info.n_bytes,
        stored_bytes=info.n_bytes * stored // n_elements if n_elements else 0,
        tiled=tiled,
    )


def _cut(key: str, info: TensorInfo, bound: BoundLayout | None) -> str:
    """How the stored regions divide the tensor; axes are named where the layout says the same as the regions."""
    spec = None if bound is None else bound.specs.get(key)
    axes_of = dict(enumerate(spec.cut)) if spec is not None else {}
    mesh = {} if bound is None else dict(bound.mesh.axes)
    if spec is not None and (spec.flat or spec.blocks or spec.stored):
        return _cut_by_rule(spec, mesh)
    extents = [{(shard.offset[d], shard.shape[d]) for shard in info.shards} for d in range(len(info.shape))]
    if math.prod(len(parts) for parts in extents) != len(info.shards):
        return f"{len(info.shards)} regions, no grid"
    texts = []
    for dim, parts in enumerate(extents):
        if len(parts) < 2:
            continue
        axes = [axis for axis in axes_of.get(dim, ()) if mesh[axis] > 1]
        over = f" over {' x '.join(axes)}" if axes and math.prod(mesh[axis] for axis in axes) == len(parts) else ""
        uneven = ", uneven" if len({extent for _, extent in parts}) > 1 else ""
        texts.append(f"dim {dim}{over}: {len(parts)}{uneven}")
    return "; ".join(texts) or "whole"


def _cut_by_rule(spec: Any, mesh: dict[str, int]) -> str:
    """The words of a layout file, for what is no grid."""
    blocks = dict(spec.blocks)
    texts = []
    for dim, axes in enumerate(spec.cut):
        if n := math.prod(mesh[axis] for axis in axes) if axes else 0:
            each = f" in each of {len(blocks[dim])} blocks" if dim in blocks else ""
            texts.append(f"dim {dim} over {' x '.join(axes)}: {n}{each}")
    if spec.flat:
        texts.append(f"flat over {' x '.join(spec.flat)}: {math.prod(mesh[axis] for axis in spec.flat)}")
    if spec.stored:
        texts.append(f"stored as dims {', '.join(map(str, spec.stored))}")
    return "; ".join(texts) or "whole"


def _parts(rows: Iterable[Row]) -> dict[str, dict[str, Any]]:
    parts: dict[str, dict[str, Any]] = {}
    for row in rows:
        part = parts.setdefault(
            row.part, {"n_tensors": 0, "n_elements": 0, "n_bytes": 0, "stored_bytes": 0, "dtypes": Counter()}
        )
        part["n_tensors"] += 1
        part["n_elements"] += math.prod(row.shape)
        part["n_bytes"] += row.n_bytes
        part["stored_bytes"] += row.stored_bytes
        part["dtypes"][row.dtype] += 1
    return parts
