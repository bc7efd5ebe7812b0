"""How one tensor is divided over a matrix of devices, and further among the devices that hold the same slice.

The holders of a slice are numbered in the order of their positions; a holder has the part `number % share`. This is a
partition by device axes if the share is the product of the innermost free axes, which may have to be split.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceCut:
    """How one tensor is divided over the devices of one stage.

    Attributes:
        dev_matrix: sizes of the device axes, outermost first.
        tensor_map: for each dim the axes that divide it, outermost first, counted from the innermost axis (0). The
            axes of the further division by ZeRO are the last ones of dim 0.
        sizes: rows of each part of dim 0 if they differ; None: every dim divides evenly.
    """

    dev_matrix: tuple[int, ...]
    tensor_map: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...] | None = None

    def parts(self) -> tuple[int, ...]:
        """The number of parts of each dim.

        Example:
            >>> DeviceCut((2, 4), ((0,), ())).parts()
            (4, 1)
        """
        return tuple(math.prod(self._size(v) for v in axes) for axes in self.tensor_map)

    def part_of(self, position: int) -> tuple[int, ...]:
        """Which part of each dim lies at a position of the stage.

        Example:
            >>> DeviceCut((2, 4), ((0,), ())).part_of(6)
            (2, 0)
        """
        parts = []
        for axes in self.tensor_map:
            part = 0
            for v in axes:
                inner = math.prod(self.dev_matrix[len(self.dev_matrix) - v :])
                part = part * self._size(v) + position // inner % self._size(v)
            parts.append(part)
        return tuple(parts)

    @property
    def free_axes(self) -> list[int]:
        """The axes of several devices that divide no dim, counted from the outermost."""
        used = {len(self.dev_matrix) - 1 - v for axes in self.tensor_map for v in axes}
        return [axis for axis, size in enumerate(self.dev_matrix) if size > 1 and axis not in used]

    def as_words(self) -> object:
        """A value that is equal for equal partitions of tensors with different numbers of dims."""
        maps = [tuple(v for v in axes if self._size(v) > 1) for axes in self.tensor_map]
        while maps and not maps[-1]:
            maps.pop()
        return self.dev_matrix, tuple(maps), self.sizes

    def _size(self, v: int) -> int:
        return self.dev_matrix[len(self.dev_matrix) - 1 - v]


def shared_further(cut: DeviceCut, share: int) -> DeviceCut | None:
    """The partition with each slice divided again along dim 0, by its holders' numbers modulo `share`.

    Args:
        cut: the partition of a tensor of at least one dim.
        share: how many parts; divides the number of holders.

    Returns:
        The partition, possibly over a matrix with other free axes; None: no axes express it.

    Example:
        >>> shared_further(DeviceCut((3, 2), ((), ())), 3)
        DeviceCut(dev_matrix=(2, 3), tensor_map=((0,), ()), sizes=None)
    """
    return _innermost(cut, share) or _innermost(_with_free_merged(cut), share)


def _with_free_merged(cut: DeviceCut) -> DeviceCut:
    """The same partition with neighbouring free axes merged, so that they can be split in another way."""
    free = set(cut.free_axes)
    matrix: list[int] = []
    new_axis: dict[int, int] = {}
    before = -1
    for axis, size in enumerate(cut.dev_matrix):
        if size == 1:
            continue
        if axis in free and before in free:
            matrix[-1] *= size
        else:
            matrix.append(size)
        new_axis[axis] = len(matrix) - 1
        before = axis
    n_axes = len(cut.dev_matrix)
    maps = (
        tuple(len(matrix) - 1 - new_axis[n_axes - 1 - v] for v in axes if n_axes - 1 - v in new_axis)
        for axes in cut.tensor_map
    )
    return DeviceCut(tuple(matrix), tuple(maps))


def _innermost(cut: DeviceCut, share: int) -> DeviceCut | None:
    """The partition with `share` holders as the innermost division of dim 0; None: no product of free axes is `share`.

    The innermost free axes are used, and the inner part of an axis that is longer than the rest of `share`.
    """
    matrix = cut.dev_matrix
    axes: list[int] = []
    for axis in reversed(cut.free_axes):
        if share == 1:
            break
        size = matrix[axis]
        if size > share and size % share == 0:
            matrix = (*matrix[:axis], size // share, share, *matrix[axis + 1 :])
            # Axes are counted from the innermost: those before the new one have one more behind them.
            behind = len(cut.dev_matrix) - 1 - axis
            cut = DeviceCut(
                matrix, tuple(tuple(v + 1 if v > behind else v for v in of_dim) for of_dim in cut.tensor_map)
            )
            axes = [a + 1 for a in axes]
            axes.insert(0, axis + 1)
            share = 1
        elif share % size == 0:
            axes.insert(0, axis)
            share //= size
        else:
            return None
    last = tuple(len(matrix) - 1 - axis for axis in axes)
    first, *others = cut.tensor_map
    return DeviceCut(matrix, ((*first, *last), *others))
