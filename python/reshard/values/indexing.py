"""Regions of tensors. NumPy's basic indexing in two steps: the region that must be read, and the index into it.

This is arithmetic on shapes, without tensors or files. Indexing by lists, arrays or masks is not supported.
"""

from __future__ import annotations

import math
import operator
from types import EllipsisType
from typing import TYPE_CHECKING, NamedTuple, SupportsIndex, TypeAlias, TypeVar

from reshard.errors import ArgumentError
from reshard.values.words import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_T = TypeVar("_T")
IndexItem: TypeAlias = SupportsIndex | slice | EllipsisType | None
TensorIndex: TypeAlias = IndexItem | tuple[IndexItem, ...]
Region: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape of a region, in elements."""


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
        raise TensorIndexError(f"too many indices: {n_dims} for a tensor of {counted(len(shape), 'dim')}")
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


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements.

    Example:
        >>> row_major((2, 3, 4))
        (12, 4, 1)
    """
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def regions(shape: tuple[int, ...], max_elements: int, bits: int) -> Iterator[Region]:
    """Regions that make up an array, in its order, each as large as allowed.

    Args:
        shape: of the array, in elements.
        max_elements: of one region. A region of packed elements can have more, so that it has whole bytes.
        bits: of one element.

    Example:
        >>> list(regions((2, 3), 4, 32))
        [((0, 0), (1, 3)), ((1, 0), (1, 3))]
    """
    n_elements = math.prod(shape)
    if n_elements <= max_elements:
        if n_elements:
            yield (0,) * len(shape), shape
        return
    row = n_elements // shape[0]
    n_rows = max_elements // row
    if row * bits % 8:
        n_rows = max(n_rows // 8 * 8, 8)
    elif bits < 8:
        n_rows = max(n_rows, 1)
    if n_rows == 0:
        for first in range(shape[0]):
            for offset, extent in regions(shape[1:], max_elements, bits):
                yield (first, *offset), (1, *extent)
        return
    for first in range(0, shape[0], n_rows):
        yield (first, *(0,) * (len(shape) - 1)), (min(n_rows, shape[0] - first), *shape[1:])


def in_batches(
    items: Iterable[_T], n_bytes_of: Callable[[_T], int], max_bytes: int, max_items: int | None = None
) -> Iterator[list[_T]]:
    """Items that are read at a time, in their order: several small ones, or one that alone is larger than allowed.

    Args:
        items: such as regions of tensors.
        n_bytes_of: bytes that an item takes.
        max_bytes: of a batch.
        max_items: of a batch; None: no limit.

    Example:
        >>> list(in_batches([3, 3, 9, 1], lambda size: size, 6))
        [[3, 3], [9], [1]]
    """
    batch: list[_T] = []
    n_bytes = 0
    for one in items:
        size = n_bytes_of(one)
        if batch and (n_bytes + size > max_bytes or len(batch) == max_items):
            yield batch
            batch, n_bytes = [], 0
        batch.append(one)
        n_bytes += size
    if batch:
        yield batch


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
        raise TensorIndexError(f"index {position} is out of range for dim {dim} of {counted(n, 'element')}")
    return position % n
