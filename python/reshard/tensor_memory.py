"""The memory of torch tensors as numpy arrays. This module does not import torch."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

_ORDER = "<" if sys.byteorder == "little" else ">"
_SPELLINGS = {1: "|u1", 2: f"{_ORDER}i2", 4: f"{_ORDER}i4", 8: f"{_ORDER}i8"}  # by size in bytes


class _ArrayInterface:
    """What numpy makes an array of. The array holds this object, and so the tensor."""

    __slots__ = ("__array_interface__", "tensor")


def memory_of(tensor: Any, torch: Any) -> np.ndarray:
    """The memory of a tensor of integers as an array.

    `Tensor.numpy` does the same, but then the storage of the tensor can never be resized again, as some trainers do to
    free memory.
    """
    address = tensor.data_ptr() if type(tensor) is torch.Tensor else 0
    if not address:
        # Empty; or computed, such as one of a subclass, which has no memory of its own: `numpy` refuses it.
        computed: np.ndarray = tensor.numpy()
        return computed
    size = tensor.element_size()
    described: Any = _ArrayInterface()
    described.tensor = tensor
    interface = {"version": 3, "typestr": _SPELLINGS[size], "shape": tuple(tensor.shape), "data": (address, False)}
    if not tensor.is_contiguous():
        interface["strides"] = tuple(n * size for n in tensor.stride())
    described.__array_interface__ = interface
    array = np.asarray(described)
    del described.__array_interface__  # objects that live make each run of the garbage collector longer
    return array
