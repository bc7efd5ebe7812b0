"""The memory of torch tensors as numpy arrays. This module does not import torch."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


class _Lent:
    """The memory of a tensor as numpy reads it. The array holds this object, and so the tensor."""

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        size, kind = tensor.element_size(), "u" if tensor.element_size() == 1 else "i"
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"{'<' if sys.byteorder == 'little' else '>'}{kind}{size}",
            "shape": tuple(tensor.shape),
            "strides": tuple(n * size for n in tensor.stride()),
            "data": (tensor.data_ptr(), False),
        }


def memory_of(tensor: Any, torch: Any) -> np.ndarray:
    """The memory of a tensor of integers as an array.

    `Tensor.numpy` does the same, but then the storage of the tensor can never be resized again, as some trainers do to
    free memory.
    """
    # A tensor that is computed, such as one of a subclass, has no memory of its own: `numpy` refuses it.
    if type(tensor) is torch.Tensor and (tensor.numel() == 0 or tensor.data_ptr()):
        return np.asarray(_Lent(tensor))
    array: np.ndarray = tensor.numpy()
    return array
