"""The memory of torch tensors as numpy arrays. This module does not import torch."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

_ORDER = "<" if sys.byteorder == "little" else ">"
# Integers by their size in bytes, as numpy and torch call them.
_INTEGERS = {1: ("|u1", "uint8"), 2: (f"{_ORDER}i2", "int16"), 4: (f"{_ORDER}i4", "int32"), 8: (f"{_ORDER}i8", "int64")}


class _ArrayInterface:
    """What numpy makes an array of. The array holds this object, and so the tensor."""

    __slots__ = ("__array_interface__", "tensor")


def memory_of(tensor: Any, torch: Any) -> np.ndarray:
    """The memory of a tensor as an array of integers of the width of its elements.

    `Tensor.numpy` does the same, but then the storage of the tensor can never be resized again, as some trainers do to
    free memory.
    """
    size = tensor.element_size()
    spelling, integers = _INTEGERS[size]
    address = tensor.data_ptr() if type(tensor) is torch.Tensor else 0
    if not address:
        # Empty; or computed, such as one of a subclass, which has no memory of its own: `numpy` refuses it.
        computed: np.ndarray = tensor.view(getattr(torch, integers)).numpy()
        return computed
    described: Any = _ArrayInterface()
    described.tensor = tensor
    interface = {"version": 3, "typestr": spelling, "shape": tuple(tensor.shape), "data": (address, False)}
    if not tensor.is_contiguous():
        interface["strides"] = tuple(n * size for n in tensor.stride())
    described.__array_interface__ = interface
    array = np.asarray(described)
    del described.__array_interface__  # objects that live make each run of the garbage collector longer
    return array
