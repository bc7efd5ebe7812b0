"""How one tensor is cut over a matrix of devices, and further by those that hold the same slice.

The holders of a slice are numbered in the order of their positions; the number modulo the share is the part of each.
That is a cut by device axes where the share is a run of the innermost free ones, which may have to be divided anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["DeviceCut", "shared_further"]


@dataclass(frozen=True)
class DeviceCut:
    """How one tensor is cut over the devices of one stage.

    Attributes:
        dev_matrix: sizes of the device axes, outermost first.
        tensor_map: for each dim the axes that cut it, the most significant first, counted from the innermost axis (0).
            What ZeRO cuts further stands last in dim 0.
        sizes: rows of each part of dim 0 if they differ; None: every dim divides evenly.
    """

    dev_matrix: tuple[int, ...]
    tensor_map: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...] | None = None

    def parts(self) -> tuple[int, ...]:
        """In how many parts each dim is cut.

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
        """The axes of several devices that cut no dim, counted from the outermost."""
        used = {len(self.dev_matrix) - 1 - v for axes in self.tensor_map for v in axes}
        return [axis for axis, size in enumerate(self.dev_matrix) if size > 1 and axis not in used]

    def as_words(self) -> object:
        """What is equal for cuts that say the same of tensors of different dims."""
        maps = [tuple(v for v in axes if self._size(v) > 1) for axes in self.tensor_map]
        while maps and not maps[-1]:
            maps.pop()
        return self.dev_matrix, tuple(maps), self.sizes

    def _size(self, v: int) -> int:
        return self.dev_matrix[len(self.dev_matrix) - 1 - v]


def shared_further(cut: DeviceCut, share: int) -> DeviceCut | None:
    """The cut with each slice cut again along dim 0, by its holders' numbers modulo `share`.

    Args:
        cut: the cut; of at least one dim.
        share: how many parts; divides the number of holders.

    Returns:
        The cut, perhaps over a matrix whose free axes are other ones; None: no axes say it.

    Example:
        >>> shared_further(DeviceCut((3, 2), ((), ())), 3)
        DeviceCut(dev_matrix=(2, 3), tensor_map=((0,), ()), sizes=None)
    """
    return _innermost(cut, share) or _innermost(_with_free_merged(cut), share)


def _with_free_merged(cut: DeviceCut) -> DeviceCut:
    """The same cut, its free axes one where they are neighbours: they can be divided in another way then."""
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
    """The cut with so many of its holders as the innermost cut of dim 0; None: they are no product of free axes.

    They are the innermost free axes; of one that is longer than what is still to be shared, the inner part.
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
