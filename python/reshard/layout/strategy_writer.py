"""A layout as a strategy, so that it can go to the original.

The axes on which `place` puts tensors are the stages. Each tensor's cut is written in the plainest words that say it: a
flat map in which neighbouring axes are taken together, then what the optimizer shares further, then a list of axes a
dim. What no words say is an error that names the tensor and the reason.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.errors import ArgumentError, UnsupportedError
from reshard.layout.strategy import Strategy
from reshard.layout.strategy_file import LayoutItem, StrategyFile, write_strategy_file
from reshard.layout.strategy_folder import check_reads_back, stage_file
from reshard.storage.changes import make_folders
from reshard.words import show

if TYPE_CHECKING:
    import os
    from collections.abc import Collection

    from reshard.layout.bind import BoundLayout
    from reshard.layout.resolve import Spec

__all__ = ["strategy_of", "write_stage_files"]


def strategy_of(bound: BoundLayout) -> Strategy:
    """The strategy that says what a layout says of the tensors to which it was bound.

    Raises:
        UnsupportedError: a strategy has no words for the cut or the place of a tensor; the message names it, and why.
    """
    return _Writer(bound).strategy()


def write_stage_files(
    strategy: Strategy,
    folder: str | os.PathLike[str],
    *,
    ranks: Collection[int] | None = None,
    suffix: str = ".ckpt",
    mode: int = 0o666,
    durable: bool = True,
) -> list[Path]:
    """Write what each rank of the original would: `ckpt_strategy_rank_<r>.ckpt`, the file of its stage.

    The other arguments, and what it returns, are those of `write_strategy`.

    Raises:
        ArgumentError: there is no such rank, or no such kind of file.
        UnsupportedError: JSON has no words for a tensor; or a file would be read back as another strategy.
        StorageError: the system failed.
    """
    if suffix not in (".ckpt", ".json"):
        raise ArgumentError(f'`suffix` is {suffix!r}; ".ckpt" or ".json" are accepted')
    make_folders(folder)
    written = []
    contents: dict[int, StrategyFile] = {}
    for rank in sorted(range(strategy.world_size) if ranks is None else ranks):
        stage = rank // strategy.devices_per_stage
        if stage not in strategy.stages:
            raise ArgumentError(f"the strategy has {strategy.world_size} ranks, there is no rank {rank}")
        path = Path(folder) / f"ckpt_strategy_rank_{rank}{suffix}"
        if stage not in contents:
            contents[stage] = stage_file(stage, strategy.stages[stage])
            check_reads_back(path, contents[stage], {stage: strategy.stages[stage]})
        write_strategy_file(path, contents[stage], mode, durable=durable)
        written.append(path)
    return written


class _Writer:
    """Writes one bound layout as a strategy."""

    def __init__(self, bound: BoundLayout) -> None:
        self.bound = bound
        sizes = dict(bound.mesh.axes)
        # The axes as the ranks count them, outermost first.
        order = _order(bound)
        placing = {axis for spec in bound.specs.values() for axes, _ in spec.place for axis in axes if sizes[axis] > 1}
        self.stage_axes = [axis for axis in order if axis in placing]
        self.axes = [axis for axis in order if axis not in placing]
        self.sizes = sizes
        self.matrix = tuple(sizes[axis] for axis in self.axes) or (1,)
        self.n_stages = math.prod(sizes[axis] for axis in self.stage_axes)
        for axis, expected in zip(order, self.stage_axes, strict=False):
            if axis != expected:
                key = next(key for key, spec in bound.specs.items() for axes, _ in spec.place if expected in axes)
                raise _inexpressible(
                    key,
                    f"it is placed on axis {show(expected)}, and the ranks of one place are not neighbours",
                    hint=f"make {show(expected)} the outermost axis of the mesh",
                )

    def strategy(self) -> Strategy:
        stages: dict[int, dict[str, LayoutItem]] = {stage: {} for stage in range(self.n_stages)}
        joined = {key for join in self.bound.joins for key in join.keys}
        made: dict[Spec, LayoutItem] = {}
        for key, spec in self.bound.specs.items():
            if key in joined:
                raise _inexpressible(key, "it lies in one array with others")
            held = self._stages(spec)
            if not spec.shape and len(held) == self.n_stages:
                continue  # counters, which the original lists nowhere
            if spec not in made:
                made[spec] = self._item(key, spec)
            for stage in held:
                stages[stage][key] = made[spec]
        if not any(stages.values()):
            raise UnsupportedError("no tensor has dims: a strategy tells its number of devices by what it lists")
        return Strategy(stages, source="layout")

    def _stages(self, spec: Spec) -> list[int]:
        """The stages that hold a tensor: those whose coordinates are where its places put it."""
        at: dict[str, int] = {}
        for axes, coordinate in spec.place:
            for axis in reversed(axes):
                at[axis] = coordinate % self.sizes[axis]
                coordinate //= self.sizes[axis]  # noqa: PLW2901
        coordinates = itertools.product(*(range(self.sizes[axis]) for axis in self.stage_axes))
        return [
            stage
            for stage, point in enumerate(coordinates)
            if all(at.get(axis, k) == k for axis, k in zip(self.stage_axes, point, strict=True))
        ]

    def _item(self, key: str, spec: Spec) -> LayoutItem:
        dims = self._dims(key, spec)
        rows = self._rows(key, spec, dims)
        if not spec.shape:
            return LayoutItem(self.matrix, ((),))
        further = None if rows else self._shared_further(dims)
        # Where the first device axis is shared further and the map's axes ascend, the original's tools err silently.
        is_trap = further is not None and self._is_trap(further)
        plain = self._flat(dims)
        if plain is not None:
            matrix, flat = plain
            item = LayoutItem(matrix, (flat,))
        elif further is not None and not (is_trap and len(dims) > 1):
            item = further
        elif len(dims) > 1:
            lists = tuple(tuple(len(self.matrix) - 1 - a for a in axes) or (-1,) for axes in dims)
            item = LayoutItem(self.matrix, lists)
        else:
            axes = ", ".join(self.axes[a] for a in dims[0])
            raise _inexpressible(key, f"its one dim is cut by the axes {axes}, which are no neighbours in this order")
        if rows:
            starts = tuple(itertools.accumulate(rows[:-1], initial=0))
            return LayoutItem(item.dev_matrix, item.tensor_map, rows, starts)
        return item

    def _dims(self, key: str, spec: Spec) -> list[list[int]]:
        """For each dim the numbers of the device axes that cut it."""
        if spec.flat:  # over one rank too: its array has one dim then
            raise _inexpressible(key, "it is flattened and cut 1-D")
        if spec.stored and spec.stored != tuple(range(len(spec.shape))):
            raise _inexpressible(key, "its dims are stored in another order")
        dims: list[list[int]] = []
        for dim in range(len(spec.shape)):
            axes = [axis for axis in (spec.cut[dim] if dim < len(spec.cut) else ()) if self.sizes[axis] > 1]
            for axis in axes:
                if axis in self.stage_axes:
                    raise _inexpressible(key, f"axis {show(axis)} cuts it, which places other tensors")
            if axes and any(d == dim for d, _ in spec.blocks):
                raise _inexpressible(key, f"dim {dim} consists of blocks that are cut by themselves")
            dims.append([self.axes.index(axis) for axis in axes])
        return dims

    def _rows(self, key: str, spec: Spec, dims: list[list[int]]) -> tuple[int, ...]:
        """The rows of each part of dim 0, if they are not even."""
        uneven = [dim for dim in range(len(dims)) if not self._is_even(spec, dim, dims[dim])]
        if uneven and uneven[-1] > 0:
            raise _inexpressible(key, f"dim {uneven[-1]} is cut into parts of different sizes")
        if not uneven:
            return ()
        if 0 in dict(spec.sizes):
            return dict(spec.sizes)[0]
        layout, order = self.bound.layouts[key], math.prod(self.matrix)
        first = self._stages(spec)[0] * order
        rows: dict[int, int] = {}
        for position in range(order):
            part = 0
            for a in dims[0]:
                part = part * self.matrix[a] + position // math.prod(self.matrix[a + 1 :]) % self.matrix[a]
            rows[part] = layout.local_shape(first + position)[0]
        return tuple(rows[part] for part in range(len(rows)))

    def _is_even(self, spec: Spec, dim: int, axes: list[int]) -> bool:
        """Whether all parts of a dim have one size."""
        sizes = dict(spec.sizes).get(dim)
        if sizes is not None:
            return len(set(sizes)) < 2
        return spec.shape[dim] % math.prod(self.matrix[a] for a in axes) == 0

    def _flat(self, dims: list[list[int]]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """A device matrix and one axis a dim, neighbours that cut one dim taken together; None if they are none."""
        begin: dict[int, list[int]] = {}
        for axes in dims:
            if axes:
                if axes != list(range(axes[0], axes[0] + len(axes))):
                    return None
                begin[axes[0]] = axes
        taken = {a for axes in begin.values() for a in axes[1:]}
        matrix: list[int] = []
        number: dict[int, int] = {}
        for a in range(len(self.matrix)):
            if a not in taken:
                number[a] = len(matrix)
                matrix.append(math.prod(self.matrix[one] for one in begin.get(a, [a])))
        return tuple(matrix), tuple(len(matrix) - 1 - number[axes[0]] if axes else -1 for axes in dims)

    def _shared_further(self, dims: list[list[int]]) -> LayoutItem | None:
        """The innermost cut of dim 0 as what the holders of one slice share further; None if it cannot be said so."""
        for n in range(1, len(dims[0]) + 1 if dims else 0):
            kept, tail = dims[0][:-n], dims[0][-n:]
            used = {a for axes in (kept, *dims[1:]) for a in axes}
            free = [a for a in range(len(self.matrix)) if a not in used]
            plain = self._flat([kept, *dims[1:]])
            if tail == free[-n:] and plain is not None:
                matrix, flat = plain
                step = math.prod(self.matrix[tail[-1] + 1 :])
                return LayoutItem(
                    matrix,
                    (flat,),
                    opt_weight_shard_step=step,
                    opt_weight_shard_size=math.prod(self.matrix[a] for a in tail),
                )
        return None

    @staticmethod
    def _is_trap(item: LayoutItem) -> bool:
        (flat,) = item.tensor_map
        used = [v for v in flat if v >= 0]
        return len(item.dev_matrix) - 1 not in used and used != sorted(used, reverse=True)


def _order(bound: BoundLayout) -> list[str]:
    """The mesh axes of more than one rank, outermost first as the ranks count them."""
    axes = [(name, size) for name, size in bound.mesh.axes if size > 1]
    ranks = bound.ranks
    strides, stride = {}, 1
    for name, size in reversed(axes):
        strides[name] = ranks[stride] - ranks[0]
        stride *= size
    order = sorted((name for name, _ in axes), key=lambda name: -strides[name])
    expected, sizes = 1, dict(axes)
    for name in reversed(order):
        if strides[name] != expected:
            break
        expected *= sizes[name]
    points = itertools.product(*(range(size) for _, size in axes))
    counted = [sum(k * strides[name] for k, (name, _) in zip(point, axes, strict=True)) for point in points]
    if expected != len(ranks) or counted != ranks:
        raise UnsupportedError(
            "a strategy counts ranks through the stages and then through the device axes; the layout's `ranks` do not",
            hint="leave `ranks` out, or order the axes of the mesh as the ranks are counted",
        )
    return order


def _inexpressible(key: str, reason: str, *, hint: str | None = None) -> UnsupportedError:
    return UnsupportedError(f"a strategy has no words for {show(key)}: {reason}", key=key, hint=hint)
