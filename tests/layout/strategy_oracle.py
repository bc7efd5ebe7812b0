"""What a record of a strategy means, in plain numpy, and strategies to draw."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

from reshard.layout.strategy_file import LayoutItem

COUNTERS = {"epoch_num", "step_num", "global_step", "loss_scale", "global_batch_size"}


def cut_out(full: np.ndarray, offset: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    return full[tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))]


def oracle(item: LayoutItem, shape: tuple[int, ...]) -> list[np.ndarray]:
    """The elements of each position by the rules, one step after the other."""
    whole = np.arange(math.prod(shape)).reshape(shape)
    matrix = item.dev_matrix
    maps = [list(axes) for axes in item.tensor_map]
    if len(maps) == 1 and len(shape) != 1:
        maps = [[v] for v in maps[0]]

    def slice_of(at: int) -> np.ndarray:
        coordinates = np.unravel_index(at, matrix)
        part = whole
        for dim, axes in enumerate(maps):
            n, k = 1, 0
            for v in axes:
                if v >= 0:
                    n *= matrix[len(matrix) - 1 - v]
                    k = k * matrix[len(matrix) - 1 - v] + int(coordinates[len(matrix) - 1 - v])
            part = np.split(part, n, axis=dim)[k]
        return part

    slices = [slice_of(at) for at in range(math.prod(matrix))]
    if not item.opt_weight_shard_size:
        return slices
    groups: dict[bytes, list[int]] = {}
    for at, part in enumerate(slices):
        groups.setdefault(part.tobytes(), []).append(at)
    shared = []
    for at, part in enumerate(slices):
        group = groups[part.tobytes()]
        share = len(group) if item.opt_weight_shard_size == -1 else item.opt_weight_shard_size
        shared.append(np.split(part, share, axis=0)[group.index(at) % share])
    return shared


def step_of(matrix: tuple[int, ...], used: set[int]) -> int:
    free = [axis for axis in range(len(matrix)) if matrix[axis] > 1 and axis not in used]
    return math.prod(matrix[free[-1] + 1 :]) if free else 0


@st.composite
def cuts(draw: Any, sizes: tuple[int, ...] = (1, 2, 3, 4)) -> tuple[LayoutItem, tuple[int, ...]]:
    """A record, and a shape that it divides."""
    matrix = tuple(draw(st.lists(st.sampled_from(sizes), min_size=1, max_size=4)))
    ndim = draw(st.integers(1, 3))
    axes = list(draw(st.permutations(range(len(matrix)))))
    if draw(st.booleans()) or ndim == 1:
        flat = [draw(st.sampled_from([-1, v])) for v in (axes + [-1] * ndim)[:ndim]]
        tensor_map = [flat]
        parts = [matrix[len(matrix) - 1 - v] if v >= 0 else 1 for v in flat]
    else:
        bounds = sorted(draw(st.lists(st.integers(0, len(axes)), min_size=ndim, max_size=ndim)))
        tensor_map = [axes[a:b] or [-1] for a, b in zip([0, *bounds], bounds, strict=False)]
        parts = [math.prod(matrix[len(matrix) - 1 - v] if v >= 0 else 1 for v in dim) for dim in tensor_map]
    used = {len(matrix) - 1 - v for dim in tensor_map for v in dim if v >= 0}
    holders = math.prod(n for axis, n in enumerate(matrix) if axis not in used)
    share = draw(st.sampled_from([0, -1, *(n for n in range(1, holders + 1) if holders % n == 0)]))
    shape = [n * draw(st.integers(1, 2)) for n in parts]
    shape[0] *= holders if share == -1 else max(share, 1)
    item = LayoutItem(
        matrix,
        tuple(map(tuple, tensor_map)),
        opt_weight_shard_size=share,
        opt_weight_shard_step=step_of(matrix, used) if share else 0,
    )
    return item, tuple(shape)
