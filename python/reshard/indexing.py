"""NumPy's basic indexing in two steps: the region of a tensor that must be read, and the index into that region.

This is arithmetic on shapes, without tensors or files. Indexing by lists, arrays or masks is not supported.
"""

from __future__ import annotations

import operator
from types import EllipsisType
from typing import NamedTuple, SupportsIndex, TypeAlias

from reshard.errors import ArgumentError

IndexItem: TypeAlias = SupportsIndex | slice | EllipsisType | None
TensorIndex: TypeAlias = IndexItem | tuple[IndexItem, ...]


class TensorIndexError(ArgumentError, IndexError):
    """An index that is out of range for the shape of the tensor, or of an unsupported kind."""


class IndexedRegion(NamedTuple):
    """The region to read for an index, and the index into the array of the region.

    Attributes:
        offset: first element of the region, one index for each dim.
        shape: its extent in elements, one for each dim.
        post: `array_of_the_region[post]` is the result of the index; an array also if it has one element.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    post: tuple[int | slice | EllipsisType | None, ...]


def normalize_index(index: object, shape: tuple[int, ...]) -> IndexedRegion:
    """Split a basic index into the smallest region that contains the result, and an index into that region.

    Args:
        index: the index, a `TensorIndex`: integers, slices (any step), one `...`, `None`, or a tuple of them. Anything
            else is refused.
        shape: shape of the tensor, in elements.

    Returns:
        The region. Reading it and applying `post` equals NumPy's `array[index]`, except that a single element is a 0-d
        array.

    Raises:
        TensorIndexError: too many items, an integer out of range, a step of zero, or another kind of item.

    Example:
        >>> normalize_index((1, slice(None, None, 3)), (4, 8))
        IndexedRegion(offset=(1, 0), shape=(1, 7), post=(0, slice(None, None, 3), Ellipsis))
    """
    items = index if isinstance(index, tuple) else (index,)
    ellipses = [position for position, item in enumerate(items) if item is Ellipsis]
    n_dims = sum(item is not None for item in items) - len(ellipses)
    if len(ellipses) > 1:
        raise TensorIndexError("an index can have only one `...`")
    if n_dims > len(shape):
        raise TensorIndexError(f"too many indices: {n_dims} for a tensor of {len(shape)} dims")
    whole = (slice(None),) * (len(shape) - n_dims)
    at = ellipses[0] if ellipses else len(items)

    offset: list[int] = []
    extent: list[int] = []
    post: list[int | slice | EllipsisType | None] = []
    for item in (*items[:at], *whole, *items[at + 1 :]):
        dim = len(offset)
        if item is None:
            post.append(None)
        elif isinstance(item, slice):
            first, n_elements, step = _of_slice(item, dim, shape[dim])
            offset.append(first)
            extent.append(n_elements)
            post.append(slice(None) if step == 1 else slice(None, None, step))
        else:
            offset.append(_of_integer(item, dim, shape[dim]))
            extent.append(1)
            post.append(0)
    # The last `...` keeps numpy from turning a single element into a scalar.
    return IndexedRegion(tuple(offset), tuple(extent), (*post, Ellipsis))


def as_integer(item: object) -> int | None:
    """The integer that an index item is; None for booleans (masks to numpy and torch) and for everything else.

    Example:
        >>> as_integer(3), as_integer(True), as_integer([3])
        (3, None, None)
    """
    # To Python a 1-element tensor is an integer; to numpy and torch it is a list.
    is_scalar = getattr(item, "ndim", 0) == 0
    is_mask = isinstance(item, bool) or str(getattr(item, "dtype", "")).endswith("bool")
    if not is_scalar or is_mask or not isinstance(item, SupportsIndex):
        return None
    try:
        return operator.index(item)
    except TypeError:  # a scalar array or tensor of floats has the method, and raises
        return None


def _of_slice(item: slice, dim: int, n: int) -> tuple[int, int, int]:
    """First element and extent of the hull of a slice of a dim of `n` elements, and the step within it."""
    try:
        selected = range(n)[item]
    except (TypeError, ValueError) as error:
        raise TensorIndexError(f"slice of dim {dim}: {error}") from error
    if not selected:
        return min(max(selected.start, 0), n), 0, 1
    first, last = sorted((selected[0], selected[-1]))
    # The hull begins and ends on a selected element, so that the step alone, from whichever end, finds the others.
    return first, last - first + 1, selected.step


def _of_integer(item: object, dim: int, n: int) -> int:
    """The element of a dim of `n` elements that an integer, counted from either end, means."""
    position = as_integer(item)
    if position is None:
        raise TensorIndexError(
            f"dim {dim}: an item of type {type(item).__name__} is no index, expected an integer, a slice, `...` or None"
        )
    if not -n <= position < n:
        raise TensorIndexError(f"index {position} is out of range for dim {dim} of {n} elements")
    return position % n
