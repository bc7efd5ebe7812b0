"""Convert a layout to a strategy that MindSpore can read.

The axes of the `place` entries become the pipeline stages. The partition of each tensor is written in the first form
that can express it:

1. a flat tensor map with adjacent axes merged,
2. a flat tensor map with the further partition by the optimizer (`opt_weight_shard_*`),
3. a list of axes for each dim.

If no form can express the partition, the error names the tensor and the reason.
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
from reshard.values.words import counted, show

if TYPE_CHECKING:
    import os
    from collections.abc import Collection

    from reshard.layout.bind import BoundLayout
    from reshard.layout.partition import TensorLayout


def strategy_of(bound: BoundLayout) -> Strategy:
    """The strategy of a bound layout.

    Raises:
        UnsupportedError: a strategy cannot express the partition or the place of a tensor; the message names the tensor
            and the reason.
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
    """Write one file `ckpt_strategy_rank_<r>.ckpt` for each rank, as MindSpore does. It contains the stage of the rank.

    Args:
        strategy: the strategy.
        folder: the destination. It is created if it does not exist. Files with the same names are replaced.
        ranks: the ranks whose files are written; None: all ranks.
        suffix: ".ckpt" for protobuf, ".json" for JSON.
        mode: permission bits of the files.
        durable: sync the files before the function returns.

    Returns:
        The paths of the files, in the order of the ranks.

    Raises:
        ArgumentError: a rank does not exist, or the suffix is not supported.
        UnsupportedError: JSON cannot express a tensor, or a file would be read back as another strategy.
        StorageError: the operating system reported an error.
    """
    if suffix not in (".ckpt", ".json"):
        raise ArgumentError(f'`suffix` is {suffix!r}; ".ckpt" or ".json" are accepted')
    make_folders(folder)
    written = []
    contents: dict[int, StrategyFile] = {}
    for rank in sorted(range(strategy.world_size) if ranks is None else ranks):
        stage = rank // strategy.devices_per_stage
        if stage not in strategy.stages:
            raise ArgumentError(f"the strategy has {counted(strategy.world_size, 'rank')}, there is no rank {rank}")
        path = Path(folder) / f"ckpt_strategy_rank_{rank}{suffix}"
        if stage not in contents:
            contents[stage] = stage_file(stage, strategy.stages[stage])
            check_reads_back(path, contents[stage], {stage: strategy.stages[stage]})
        write_strategy_file(path, contents[stage], mode, durable=durable)
        written.append(path)
    return written


class _Writer:
    """Converts one bound layout to a strategy."""

    def __init__(self, bound: BoundLayout) -> None:
        self.bound = bound
        sizes = dict(bound.mesh.axes)
        # The axes in the order in which ranks are numbered, outermost first.
        order = _order(bound)
        layouts = bound.tensor_layouts
        placing = {axis for one in layouts.values() for axes, _ in one.place for axis in axes if sizes[axis] > 1}
        self.stage_axes = [axis for axis in order if axis in placing]
        self.axes = [axis for axis in order if axis not in placing]
        self.sizes = sizes
        self.matrix = tuple(sizes[axis] for axis in self.axes) or (1,)
        self.n_stages = math.prod(sizes[axis] for axis in self.stage_axes)
        for axis, expected in zip(order, self.stage_axes, strict=False):
            if axis != expected:
                key = next(key for key, one in layouts.items() for axes, _ in one.place if expected in axes)
                raise _inexpressible(
                    key,
                    f"it is placed on axis {show(expected)}, and the ranks of one place are not neighbours",
                    hint=f"make {show(expected)} the outermost axis of the mesh",
                )

    def strategy(self) -> Strategy:
        stages: dict[int, dict[str, LayoutItem]] = {stage: {} for stage in range(self.n_stages)}
        joined = {key for join in self.bound.joins for key in join.keys}
        made: dict[TensorLayout, LayoutItem] = {}
        for key, layout in self.bound.tensor_layouts.items():
            if key in joined:
                raise _inexpressible(key, "it is joined with others into one array")
            held = self._stages(layout)
            if not layout.shape and len(held) == self.n_stages:
                continue  # a counter: MindSpore does not list it in a strategy
            if layout not in made:
                made[layout] = self._item(key, layout)
            for stage in held:
                stages[stage][key] = made[layout]
        if not any(stages.values()):
            raise UnsupportedError("no tensor has dims: the number of devices follows from the tensors of a strategy")
        return Strategy(stages, source="layout")

    def _stages(self, layout: TensorLayout) -> list[int]:
        """The stages that hold a tensor: the stages at the coordinates of its `place` entries."""
        at = self.bound.mesh.fixed(layout.place)
        coordinates = itertools.product(*(range(self.sizes[axis]) for axis in self.stage_axes))
        return [
            stage
            for stage, point in enumerate(coordinates)
            if all(at.get(axis, k) == k for axis, k in zip(self.stage_axes, point, strict=True))
        ]

    def _item(self, key: str, layout: TensorLayout) -> LayoutItem:
        dims = self._dims(key, layout)
        rows = self._rows(key, layout, dims)
        if not layout.shape:
            return LayoutItem(self.matrix, ((),))
        further = None if rows else self._shared_further(dims)
        # MindSpore's tools return wrong slices if the first device axis is partitioned further and the axes ascend.
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
            raise _inexpressible(key, f"its one dim is cut by the axes {axes}, which are not neighbours in this order")
        if rows:
            starts = tuple(itertools.accumulate(rows[:-1], initial=0))
            return LayoutItem(item.dev_matrix, item.tensor_map, rows, starts)
        return item

    def _dims(self, key: str, layout: TensorLayout) -> list[list[int]]:
        """For each dim, the indices of the device axes that partition it."""
        partition = layout.partition
        if partition.flat:  # also over one rank, because the stored array has one dim
            raise _inexpressible(key, "it is flattened and cut 1-D")
        if partition.is_reordered:
            raise _inexpressible(key, "its dims are stored in another order")
        dims: list[list[int]] = []
        for dim in range(len(layout.shape)):
            axes = [axis for axis in partition.axes_of(dim) if self.sizes[axis] > 1]
            for axis in axes:
                if axis in self.stage_axes:
                    raise _inexpressible(key, f"axis {show(axis)} cuts it, which places other tensors")
            if axes and partition.blocks_of(dim) is not None:
                raise _inexpressible(key, f"dim {dim} consists of blocks that are cut by themselves")
            dims.append([self.axes.index(axis) for axis in axes])
        return dims

    def _rows(self, key: str, layout: TensorLayout, dims: list[list[int]]) -> tuple[int, ...]:
        """The number of rows of each part of dim 0; empty if all parts have the same size."""
        uneven = [dim for dim in range(len(dims)) if not self._is_even(layout, dim, dims[dim])]
        if uneven and uneven[-1] > 0:
            raise _inexpressible(key, f"dim {uneven[-1]} is cut into parts of different sizes")
        if not uneven:
            return ()
        if (sizes := layout.partition.sizes_of(0)) is not None:
            return sizes
        made, order = self.bound.layouts[key], math.prod(self.matrix)
        first = self._stages(layout)[0] * order
        rows: dict[int, int] = {}
        for position in range(order):
            part = 0
            for a in dims[0]:
                part = part * self.matrix[a] + position // math.prod(self.matrix[a + 1 :]) % self.matrix[a]
            rows[part] = made.local_shape(first + position)[0]
        return tuple(rows[part] for part in range(len(rows)))

    def _is_even(self, layout: TensorLayout, dim: int, axes: list[int]) -> bool:
        """Whether all parts of a dim have the same size."""
        sizes = layout.partition.sizes_of(dim)
        if sizes is not None:
            return len(set(sizes)) < 2
        return layout.shape[dim] % math.prod(self.matrix[a] for a in axes) == 0

    def _flat(self, dims: list[list[int]]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """A device matrix and one axis for each dim; None if this form cannot express the partition.

        Adjacent axes that partition the same dim are merged into one axis.
        """
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
        """The record with the innermost axes of dim 0 as a further partition by the optimizer; None if impossible."""
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
    """The mesh axes of more than one rank, in the order in which ranks are numbered, outermost first."""
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
            "a strategy numbers ranks by stage and then by device axes; the layout's `ranks` have another order",
            hint="leave `ranks` out, or order the axes of the mesh as the ranks are counted",
        )
    return order


def _inexpressible(key: str, reason: str, *, hint: str | None = None) -> UnsupportedError:
    return UnsupportedError(f"a strategy cannot express {show(key)}: {reason}", key=key, hint=hint)
