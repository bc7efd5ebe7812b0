"""numpy arrays as torch tensors and back, over the same memory, for every dtype of the format.

numpy's DLPack and `torch.from_numpy` refuse bfloat16 and the 8-bit floats. Both sides, however, can look at their
memory as integers of the same width, so the way across is an integer view. Nothing here copies, moves or casts.
"""

from __future__ import annotations

import numpy as np
import torch

from reshard import dtypes
from reshard.errors import ArgumentError, UnsupportedError
from reshard.write.arrays import as_array

__all__ = ["as_tensor", "from_tensor", "torch_dtype"]

# The names that this torch knows: older ones lack some of the narrow floats.
_TORCH: dict[str, torch.dtype] = {
    name: getattr(torch, attribute)
    for name, attribute in {
        "F4": "float4_e2m1fn_x2",
        "BOOL": "bool",
        "U8": "uint8",
        "I8": "int8",
        "F8_E5M2": "float8_e5m2",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E8M0": "float8_e8m0fnu",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "I16": "int16",
        "U16": "uint16",
        "F16": "float16",
        "BF16": "bfloat16",
        "I32": "int32",
        "U32": "uint32",
        "F32": "float32",
        "C64": "complex64",
        "F64": "float64",
        "I64": "int64",
        "U64": "uint64",
    }.items()
    if hasattr(torch, attribute)
}

# Signed, since every torch release that is supported knows these, and unsigned 16 to 64 bits only some.
_INTEGERS = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.int16),
    4: np.dtype(np.int32),
    8: np.dtype(np.int64),
}


def torch_dtype(dtype: str) -> torch.dtype:
    """The torch dtype of tensors of this dtype.

    Raises:
        UnsupportedError: this torch has none (the 6-bit floats; newer 8-bit floats in an old torch).

    Example:
        >>> torch_dtype("BF16"), torch_dtype("F8_E4M3")
        (torch.bfloat16, torch.float8_e4m3fn)
    """
    if dtype not in _TORCH:
        dtypes.bits(dtype)  # an unknown name is not torch's lack
        raise UnsupportedError(
            f"torch {torch.__version__} has no dtype for {dtype}", hint="read it as numpy: packed bytes, or `ml_dtypes`"
        )
    return _TORCH[dtype]


def as_tensor(array: np.ndarray, dtype: str | None = None) -> torch.Tensor:
    """The array as a tensor over the same memory; strides are kept.

    Args:
        array: any dtype that `reshard` returns, `ml_dtypes` included. Writable, since a tensor cannot be read-only.
        dtype: "F4" says that a `uint8` array holds packed 4-bit floats (the tensor has torch's packed dtype and the
            array's shape, a byte an element); otherwise the array knows its dtype.

    Returns:
        A CPU tensor of the array's shape, which keeps the array's memory alive.

    Raises:
        ArgumentError: the array is read-only, or `dtype` is not what it holds.
        UnsupportedError: torch has no such dtype, or cannot have the array's strides (negative ones).

    Example:
        >>> import ml_dtypes
        >>> array = np.zeros(3, ml_dtypes.bfloat16)
        >>> tensor = as_tensor(array)
        >>> tensor.fill_(1.5)
        tensor([1.5000, 1.5000, 1.5000], dtype=torch.bfloat16)
        >>> array
        array([1.5, 1.5, 1.5], dtype=bfloat16)
    """
    name = dtypes.name_of(array.dtype) if dtype is None else dtype
    if array.dtype != dtypes.numpy_dtype(name):
        raise ArgumentError(f"an array of dtype {array.dtype} holds no {name}, expected {dtypes.numpy_dtype(name)}")
    if not array.flags.writeable:
        raise ArgumentError("the array is read-only, and a tensor over it would be written", hint="pass `array.copy()`")
    integers = _INTEGERS[array.itemsize]
    result_dtype = torch_dtype(name)
    try:
        tensor = torch.from_numpy(array.view(integers))
    except ValueError as error:
        raise UnsupportedError(
            f"torch cannot take an array of strides {array.strides} bytes: {error}", hint="pass `array.copy()`"
        ) from error
    return tensor.view(result_dtype)


def from_tensor(tensor: torch.Tensor) -> tuple[np.ndarray, str]:
    """The tensor as an array over the same memory, and its dtype; strides are kept, gradients are not.

    Args:
        tensor: a dense CPU tensor. Lazily conjugated and negated ones are the exception that is copied.

    Returns:
        The array and the name of the tensor's dtype, which a `uint8` array alone does not tell: a
        `torch.float4_e2m1fn_x2` comes as its packed bytes and "F4".

    Raises:
        UnsupportedError: the tensor is on another device, sparse, quantized, distributed, or of a dtype that the
            format lacks.

    Example:
        >>> array, dtype = from_tensor(torch.ones(2, 3, dtype=torch.bfloat16).T)
        >>> array.shape, array.dtype, dtype
        ((3, 2), dtype(bfloat16), 'BF16')
    """
    if tensor.device.type != "cpu":
        raise UnsupportedError(f"a tensor on device `{tensor.device}` has no array", hint="pass `tensor.cpu()`")
    return as_array(tensor)
