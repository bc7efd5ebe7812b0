"""Gathers the data of `reshard inspect`, which is printed as text or as JSON.

No tensor is read. The partition of a tensor is computed from the stored regions; a layout only adds the names of axes.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import reshard
from reshard import dtypes
from reshard.checkpoint import Checkpoint
from reshard.cli.bucket import bucket_facts
from reshard.cli.leftovers import leftovers_in_iteration, leftovers_in_root
from reshard.cli.output import warn
from reshard.commit.scrub import is_damage
from reshard.errors import LayoutError, MismatchError, ReshardError
from reshard.formats import counter_tensors, health
from reshard.formats.base import RankRoot
from reshard.formats.left_out import LeftOut
from reshard.layout import Partition
from reshard.storage.location import locate

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from reshard.checkpoint import TensorInfo
    from reshard.cli.bucket import BucketFacts
    from reshard.cli.leftovers import Leftover
    from reshard.commit.candidates import Order
    from reshard.commit.save_log import SaveRecord
    from reshard.layout import BoundLayout, ModelLayout

_PARTS: tuple[Literal["model", "optimizer"], ...] = ("model", "optimizer")
_MAX_CHECKED = 10  # iterations that are opened to check whether they are complete


@dataclass(frozen=True)
class Iteration:
    """An iteration of a root. `complete` and `verified` are None if it was not opened, or could not be read."""

    iteration: int
    folder: str
    tracker: bool  # whether the tracker names it now
    tracked: bool  # whether the tracker has ever named it
    pinned: bool
    taken: bool
    complete: bool | None
    verified: bool | None  # whether it has a manifest
    reason: str | None = None  # why it is not complete, or could not be read
    refused: str | None = None  # why it is not a candidate
    unhealthy: bool = False  # whether its save recorded that


@dataclass(frozen=True)
class RankSaveState:
    """A save in rank folders. `complete` is None if it was not opened, or could not be read."""

    name: str  # of the first rank's file
    why: str  # the reason for its position in the order, or why it is never opened
    taken: bool
    complete: bool | None
    reason: str | None = None  # why it is not complete, or could not be read


@dataclass(frozen=True, slots=True, eq=False)
class StoredAs:
    """How tensors are stored; one object for all tensors that are stored alike.

    If they are not placed, dtype and shape are those of one rank's array.
    """

    part: str
    dtype: str
    shape: tuple[int, ...]
    cut: str
    n_shards: int
    replicas: tuple[int, int]  # fewest and most files that hold a shard
    n_bytes: int
    stored_bytes: int
    tiled: bool  # described in tiles.json only
    placed: bool = True  # whether the regions of the ranks' arrays are known


class TensorRow(NamedTuple):
    """A tensor."""

    key: str
    stored: StoredAs


@dataclass(frozen=True)
class QuantisedRow:
    """A quantised weight: one logical tensor. `parts` are the keys of the tensors that store it, by their roles."""

    kind: str
    title: str
    shape: tuple[int, ...]
    parts: dict[str, str]


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint, and of the root that it is in."""

    path: str
    checkpoint: Checkpoint
    rows: list[TensorRow]
    iterations: list[Iteration] | None
    rank_saves: list[RankSaveState] | None
    tracker_reason: str | None  # why the tracker is invalid
    layout: ModelLayout | None
    layout_reason: str | None  # why there is no layout
    files: list[tuple[str, int]]  # name and bytes
    saves: list[SaveRecord]  # the save log of the root, oldest first
    parts: dict[str, dict[str, Any]]  # totals of "model" and "optimizer"
    leftovers: list[Leftover]
    warnings: tuple[str, ...] = ()  # about the root
    left_out: LeftOut | None = None  # the tensors that the save leaves out
    quantised: dict[str, QuantisedRow] = field(default_factory=dict)  # by the name of the weight
    bucket: BucketFacts | None = None  # of the bucket in which it is

    @property
    def unseen(self) -> list[str]:
        """Keys of tensors in a Checkpoint 2.0 that MindSpore Transformers cannot read."""
        return [row.key for row in self.rows if row.stored.tiled] if self.checkpoint.data.traits.has_metadata else []


def gather_contents(path: str, checkpoint: Checkpoint, *, everything: bool) -> Contents:
    """Gather the contents of a checkpoint.

    Args:
        path: the path that was opened. If it is a root, its iterations are listed.
        checkpoint: the checkpoint opened from it.
        everything: open every iteration to check whether it is complete, without a limit.
    """
    from reshard.opening import iterations

    layout: ModelLayout | None = None
    bound: BoundLayout | None = None
    reason: str | None = None
    unplaced = checkpoint.unplaced()
    try:
        layout = reshard.ModelLayout.like(checkpoint)
        # With one rank there are no axes to name.
        bound = None if math.prod(layout.mesh.values()) == 1 else checkpoint.bind(layout)
    except (LayoutError, MismatchError) as error:
        layout, reason = None, "there is no strategy" if unplaced else error.message
    rows = _rows(checkpoint, bound, unplaced)
    order = iterations(path)
    found = None if order is None else _iterations(path, order, checkpoint, everything=everything)
    return Contents(
        path=path,
        checkpoint=checkpoint,
        rows=rows,
        iterations=found,
        rank_saves=_rank_saves(path, checkpoint, everything=everything),
        tracker_reason="; ".join(order.warnings) or None if order is not None and order.tracker is None else None,
        layout=layout,
        layout_reason=reason,
        files=[(file.name, file.n_bytes) for file in checkpoint.files()],
        saves=[] if order is None else _saves(path),
        parts=_parts(rows),
        leftovers=[*([] if order is None else leftovers_in_root(locate(path))), *leftovers_in_iteration(checkpoint)],
        left_out=_left_out(checkpoint),
        warnings=() if order is None else order.warnings,
        quantised=_quantised(checkpoint),
        bucket=bucket_facts(locate(path), is_root=order is not None),
    )


def _left_out(checkpoint: Checkpoint) -> LeftOut | None:
    """The record of tensors that the save leaves out; None also if the state beside the tensors cannot be read."""
    try:
        return LeftOut.of_checkpoint(checkpoint)
    except ReshardError:
        return None


def _quantised(checkpoint: Checkpoint) -> dict[str, QuantisedRow]:
    """The quantised weights; none, with a warning, if their parts contradict each other."""
    from reshard.quantised.kinds import KINDS

    try:
        weights = checkpoint.quantised()
    except ReshardError as error:
        warn(f"the quantised weights cannot be read: {error}")
        return {}
    return {
        name: QuantisedRow(one.kind, KINDS[one.kind].title, one.shape, dict(one.parts)) for name, one in weights.items()
    }


def _saves(root: str) -> list[SaveRecord]:
    """The log of saves; none, with a warning, if it cannot be read: the checkpoint can."""
    from reshard.commit import save_log

    try:
        return save_log.read(locate(root))
    except ReshardError as error:
        warn(error.message)
        return []


def _iterations(root: str, order: Order, taken: Checkpoint, *, everything: bool) -> list[Iteration]:
    """The iterations, newest first. Those that `open` did not try are opened here to check them."""
    from reshard.opening import marks

    skipped, refused = dict(taken.skipped), {one.name: one.reason for one in order.refused}
    found: list[Iteration] = []
    n_checked = 0
    by_number = {one.iteration: one for one in (*order.candidates, *order.refused) if one.iteration is not None}
    for number, one in sorted(by_number.items(), reverse=True):
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
                number,
                one.name,
                tracker=number == order.tracker,
                tracked=tracked,
                pinned=pinned,
                taken=one.name == taken.path.name,
                complete=complete,
                verified=verified,
                reason=reason,
                refused=refused.get(one.name),
                unhealthy=bool(complete and verified) and health.is_unhealthy(locate(root) / one.name),
            )
        )
    return found


def _rank_saves(path: str, taken: Checkpoint, *, everything: bool) -> list[RankSaveState] | None:
    """The saves of rank folders, in the order in which they are tried. All but the one taken are opened here."""
    from reshard.opening import root_of

    with root_of(path, strategy=taken.strategy) or contextlib.nullcontext() as root:
        if not isinstance(root, RankRoot):
            return None
        opened, skipped = {locate(path) / file.name for file in taken.files()}, dict(taken.skipped)
        found: list[RankSaveState] = []
        n_checked = 0
        for save in root.newest_first():
            is_taken = any(file in opened for file in root.files(save).values())
            complete: bool | None = True
            reason = skipped.get(save.name, save.fault)
            if reason is not None:
                complete = False
            elif not is_taken and n_checked == _MAX_CHECKED and not everything:
                complete = None
            elif not is_taken:
                n_checked += 1
                try:
                    Checkpoint(root.open(save)).close()
                except ReshardError as error:
                    complete, reason = False if is_damage(error) else None, error.message
            found.append(RankSaveState(save.name, save.reason, is_taken, complete, reason))
        return found


def _rows(
    checkpoint: Checkpoint, bound: BoundLayout | None, unplaced: Mapping[str, tuple[str, tuple[tuple[int, ...], ...]]]
) -> list[TensorRow]:
    """All tensors, those of the model first."""
    index = checkpoint.data.index
    kind_of = dict(zip(index.keys(), index.alike()[0], strict=True)) if len(unplaced) < len(checkpoint) else {}
    tiled = set(checkpoint.tiled_keys())
    layouts = {} if bound is None else bound.tensor_layouts
    known: dict[object, StoredAs] = {}
    rows = []
    for part in _PARTS:
        for key in checkpoint.keys(part):
            if key in unplaced:
                rows.append(TensorRow(key, _unplaced(key, *unplaced[key])))
                continue
            layout = layouts.get(key)
            kind = kind_of[key], part, key in tiled, None if layout is None else layout.partition
            if kind not in known:
                known[kind] = _stored_as(key, checkpoint[key], bound, tiled=key in tiled)
            rows.append(TensorRow(key, known[kind]))
    return rows


def _unplaced(key: str, dtype: str, shapes: tuple[tuple[int, ...], ...]) -> StoredAs:
    """Of a tensor whose regions are not known: the largest of the ranks' arrays."""
    shape = max(shapes, key=math.prod)
    n_bytes = dtypes.n_bytes(dtype, shape)
    part = "optimizer" if counter_tensors.is_state(key) else "model"
    return StoredAs(part, dtype, shape, "unknown", 1, (1, 1), n_bytes, n_bytes, tiled=False, placed=False)


def _stored_as(key: str, info: TensorInfo, bound: BoundLayout | None, *, tiled: bool) -> StoredAs:
    held = [len(shard.files) for shard in info.shards] or [0]
    n_elements = math.prod(info.shape)
    stored = sum(math.prod(shard.shape) * len(shard.files) for shard in info.shards)
    return StoredAs(
        part=info.part,
        dtype=info.dtype,
        shape=info.shape,
        cut=_cut(key, info, bound),
        n_shards=len(info.shards),
        replicas=(min(held), max(held)),
        n_bytes=info.n_bytes,
        stored_bytes=info.n_bytes * stored // n_elements if n_elements else 0,
        tiled=tiled,
    )


def _cut(key: str, info: TensorInfo, bound: BoundLayout | None) -> str:
    """The partition of a tensor by its stored regions, with names of axes where the layout has the same partition."""
    layout = None if bound is None else bound.tensor_layouts.get(key)
    partition = Partition() if layout is None else layout.partition
    mesh = {} if bound is None else dict(bound.mesh.axes)
    if partition.flat or partition.blocks or partition.is_reordered:
        return cut_by_rule(partition, mesh)
    extents = [{(shard.offset[d], shard.shape[d]) for shard in info.shards} for d in range(len(info.shape))]
    if math.prod(len(parts) for parts in extents) != len(info.shards):
        return f"{len(info.shards)} regions, no grid"
    texts = []
    for dim, parts in enumerate(extents):
        if len(parts) < 2:
            continue
        axes = [axis for axis in partition.axes_of(dim) if mesh[axis] > 1]
        over = f" over {' x '.join(axes)}" if axes and math.prod(mesh[axis] for axis in axes) == len(parts) else ""
        uneven = ", uneven" if len({extent for _, extent in parts}) > 1 else ""
        texts.append(f"dim {dim}{over}: {len(parts)}{uneven}")
    return "; ".join(texts) or "whole"


def cut_by_rule(partition: Partition, mesh: dict[str, int]) -> str:
    """The partition in the terms of a layout file, for regions that are not a grid."""
    texts = []
    for dim, axes in enumerate(partition.cut):
        if n := math.prod(mesh[axis] for axis in axes) if axes else 0:
            blocks = partition.blocks_of(dim)
            n_blocks = len(blocks) if isinstance(blocks, tuple) else blocks
            each = f" in each of {n_blocks} blocks" if n_blocks is not None else ""
            texts.append(f"dim {dim} over {' x '.join(axes)}: {n}{each}")
    if partition.flat:
        texts.append(f"flat over {' x '.join(partition.flat)}: {math.prod(mesh[axis] for axis in partition.flat)}")
    if partition.is_reordered:
        texts.append(f"stored as dims {', '.join(map(str, partition.stored))}")
    return "; ".join(texts) or "whole"


def _parts(rows: Iterable[TensorRow]) -> dict[str, dict[str, Any]]:
    parts: dict[str, dict[str, Any]] = {}
    for stored, n in Counter(row.stored for row in rows).items():
        part = parts.setdefault(
            stored.part, {"n_tensors": 0, "n_elements": 0, "n_bytes": 0, "stored_bytes": 0, "dtypes": Counter()}
        )
        part["n_tensors"] += n
        part["n_elements"] += n * math.prod(stored.shape)
        part["n_bytes"] += n * stored.n_bytes
        part["stored_bytes"] += n * stored.stored_bytes
        part["dtypes"][stored.dtype] += n
    return parts
