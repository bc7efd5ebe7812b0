"""Output arrays: new ones over memory of the core, and arrays of the caller, checked before they are filled."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard import _core, dtypes
from reshard.errors import ArgumentError, MismatchError, ReshardError
from reshard.values.indexing import row_major

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.values.indexing import IndexedRegion


def as_array(buffer: _core.Buffer, offset: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """An array over memory of the core.

    Args:
        buffer: the memory.
        offset: position of the first byte in `buffer`.
        dtype: the dtype of the tensor.
        shape: the shape of the tensor, in elements.
    """
    return np.ndarray(dtypes.array_shape(dtype, shape), dtypes.numpy_dtype(dtype), memoryview(buffer), offset)


def as_arrays(names: Sequence[str], loaded: _core.Loaded) -> dict[str, np.ndarray]:
    """Arrays over memory of the core, by name.

    Args:
        names: the names of the arrays of the plan, in its order.
        loaded: their memory.
    """
    made: list[Any] = [None] * len(names)
    memories: dict[int, memoryview] = {}  # by address, which `loaded` keeps
    for buffer, start, step_bytes, dtype, shape, numbers in loaded.stacks:
        memory = memories.get(id(buffer))
        if memory is None:
            memory = memories[id(buffer)] = memoryview(buffer)
        of_dtype, own_shape = dtypes.numpy_dtype(dtype), dtypes.array_shape(dtype, shape)
        if len(numbers) == 1:
            made[numbers[0]] = np.ndarray(own_shape, of_dtype, memory, start)
            continue
        # The rows of one array are made four times as fast as arrays one by one.
        strides = (step_bytes, *(n * of_dtype.itemsize for n in row_major(own_shape)))
        stack: np.ndarray = np.ndarray((len(numbers), *own_shape), of_dtype, memory, start, strides)
        rows = stack if own_shape else (stack[row, ...] for row in range(len(numbers)))
        for number, array in zip(numbers, rows, strict=True):
            made[number] = array
    return dict(zip(names, made, strict=True))


def load_all(plan: _core.Plan) -> dict[str, np.ndarray]:
    """Execute a plan into new arrays, by name. Raises DamagedFileError and StorageError as the plan does."""
    return as_arrays([array.name for array in plan.arrays], plan.load())


def keeps_order(region: IndexedRegion) -> bool:
    """Whether the result has all elements of the region, in the same order."""
    return all(item in (None, 0, ...) or item == slice(None) for item in region.post)


def fill(
    plan: _core.Plan,
    out: list[np.ndarray],
    threads: int | None = None,
    progress: _core.Progress | None = None,
) -> None:
    """Execute a plan into given arrays.

    Args:
        plan: the plan.
        out: one array for each array of the plan; their content is undefined after an error.
        threads: number of threads; None: all processors.
        progress: called with the bytes done and in total.
    """
    # As bytes: numpy refuses to export the types of ml_dtypes under their own format.
    plan.fill([_bytes(array) for array in out], threads=threads, progress=progress)


def fill_out(
    plan: _core.Plan,
    out: list[np.ndarray],
    threads: int | None = None,
    progress: _core.Progress | None = None,
) -> None:
    """The same as `fill`, for arrays that a caller gave as `out`: an error says that they are undefined."""
    try:
        fill(plan, out, threads, progress)
    except ArgumentError:
        raise  # before the first byte
    except ReshardError as error:
        error.message += " (the arrays given in `out` are undefined now)"
        raise


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def check_out(key: str, out: np.ndarray, dtype: str, shape: tuple[int, ...]) -> None:
    """Check that a tensor can be read into an array.

    Args:
        key: the key of the tensor, for messages.
        out: the array.
        dtype: the dtype of the tensor.
        shape: the shape of the tensor, in elements.

    Raises:
        ArgumentError: `out` is not an array, not writable or not C-contiguous.
        MismatchError: its dtype or shape differs.
    """
    expected, expected_shape = dtypes.numpy_dtype(dtype), dtypes.array_shape(dtype, shape)
    masked = sys.modules.get("numpy.ma")
    if not isinstance(out, np.ndarray) or (masked is not None and isinstance(out, masked.MaskedArray)):
        raise ArgumentError(f"`out` for `{key}` is a {type(out).__name__}, expected a numpy array", key=key)
    if out.dtype != expected or out.shape != expected_shape:
        raise MismatchError(
            f"`out` for `{key}` is {out.dtype} of shape {out.shape}, expected {expected} of shape {expected_shape}",
            key=key,
        )
    if not out.flags.c_contiguous or not out.flags.writeable:
        raise ArgumentError(f"`out` for `{key}` must be writable and C-contiguous", key=key)


def check_outs(out: Mapping[str, np.ndarray], names: list[str], arrays: list[_core.PlannedArray]) -> None:
    """Check that given arrays are exactly those of a plan, by name, shape and dtype.

    Args:
        out: the given arrays by name.
        names: the names of the arrays of the plan.
        arrays: `(name, dtype, shape, bytes)` of each array of the plan.

    Raises:
        ArgumentError, MismatchError: as `check_out`, or an array is missing or unexpected.
    """
    missing, extra = [name for name in names if name not in out], sorted(set(out) - set(names))
    if missing or extra:
        what = f"lacks {missing[:3]}" if missing else f"has {extra[:3]}, which are not loaded"
        raise ArgumentError(
            f"`out` {what}; it must hold exactly the {len(names)} arrays that are loaded",
            hint="choose fewer tensors; `keys=` selects some; `part=` selects the model or the optimizer",
        )
    for name, dtype, shape, _ in arrays:
        check_out(name, out[name], dtype, shape)
