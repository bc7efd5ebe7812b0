"""The dtypes of the safetensors format: their names, their widths, and the numpy dtype that holds each.

In this package a dtype is its name in a safetensors header ("BF16", "F8_E4M3", ...). This module converts the spellings
of users, numpy, torch and MindSpore to these names. It imports no framework: a torch dtype is recognised by its `str`.

bfloat16 and the 8-bit floats are numpy dtypes of `ml_dtypes`. The 4- and 6-bit floats have no numpy dtype; their arrays
hold packed bytes, see `array_shape`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from reshard.errors import MismatchError, UnsupportedError
from reshard.values.words import nearest, show

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_MAX_SIMILAR = 4
_PACKED_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}

_NUMPY: dict[str, np.dtype[np.generic]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "I16": np.dtype(np.int16),
    "U16": np.dtype(np.uint16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "F32": np.dtype(np.float32),
    "C64": np.dtype(np.complex64),
    "F64": np.dtype(np.float64),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
}
_NAME_OF = {dtype: name for name, dtype in _NUMPY.items()}

NAMES: tuple[str, ...] = (*_PACKED_BITS, *_NUMPY)
"""All dtypes of the format, narrow ones first."""

# Accepted spellings besides the names of the header, numpy and torch. Not accepted: `float` and `int` (their width
# differs between torch and Python) and `float8_e4m3` (in ml_dtypes another format than F8_E4M3 of a header, which is
# `float8_e4m3fn`).
_ABBREVIATIONS = {
    "bf16": "BF16",
    "fp16": "F16",
    "half": "F16",
    "fp32": "F32",
    "single": "F32",
    "fp64": "F64",
    "double": "F64",
    "fp8_e4m3": "F8_E4M3",
    "fp8_e5m2": "F8_E5M2",
    "float4_e2m1fn_x2": "F4",
}
_SPELLINGS = (
    {name.lower(): name for name in NAMES} | {dtype.name: name for name, dtype in _NUMPY.items()} | _ABBREVIATIONS
)

_MINDSPORE = {
    "BOOL": "Bool",
    "U8": "UInt8",
    "I8": "Int8",
    "F8_E5M2": "Float8E5M2",
    "F8_E4M3": "Float8E4M3FN",
    "I16": "Int16",
    "U16": "UInt16",
    "F16": "Float16",
    "BF16": "BFloat16",
    "I32": "Int32",
    "U32": "UInt32",
    "F32": "Float32",
    "C64": "Complex64",
    "F64": "Float64",
    "I64": "Int64",
    "U64": "UInt64",
}
_FROM_MINDSPORE = {spelling.lower(): name for name, spelling in _MINDSPORE.items()}


def bits(dtype: str) -> int:
    """The number of bits of one element.

    Raises:
        UnsupportedError: the name is not in `NAMES`.

    Example:
        >>> bits("BF16"), bits("F6_E2M3")
        (16, 6)
    """
    if dtype in _PACKED_BITS:
        return _PACKED_BITS[dtype]
    return 8 * numpy_dtype(dtype).itemsize


def n_bytes(dtype: str, shape: Iterable[int]) -> int:
    """The bytes of an array, rounded down where packed elements do not fill the last one.

    Example:
        >>> n_bytes("BF16", (2, 3)), n_bytes("F4", (4,))
        (12, 2)
    """
    return math.prod(shape) * bits(dtype) // 8


def file_order(name: str, dtype: str) -> tuple[int, str]:
    """The sort key of a tensor within a file: wide elements first, then by name.

    So every tensor begins at a multiple of the size of its elements. The safetensors package has the same order.

    Example:
        >>> sorted([("a", "U8"), ("b", "F32"), ("c", "F32")], key=lambda one: file_order(*one))
        [('b', 'F32'), ('c', 'F32'), ('a', 'U8')]
    """
    return -bits(dtype), name


def is_packed(dtype: str) -> bool:
    """Whether elements are narrower than a byte, so that arrays hold packed bytes.

    Example:
        >>> is_packed("F4"), is_packed("F8_E4M3")
        (True, False)
    """
    return dtype in _PACKED_BITS


def numpy_dtype(dtype: str) -> np.dtype[np.generic]:
    """The numpy dtype of arrays of this dtype: `uint8` for packed dtypes, see `array_shape`.

    Raises:
        UnsupportedError: the name is not in `NAMES`.

    Example:
        >>> numpy_dtype("BF16"), numpy_dtype("F4")
        (dtype(bfloat16), dtype('uint8'))
    """
    if dtype in _PACKED_BITS:
        return np.dtype(np.uint8)
    try:
        return _NUMPY[dtype]
    except KeyError:
        raise _unknown(dtype) from None


def array_shape(dtype: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of the array that holds a tensor of this dtype and shape.

    It is the shape of the tensor, except for packed dtypes, whose arrays are `uint8`: there the last dim is in bytes
    (8 elements of F4 are 4 bytes, of F6_E2M3 6 bytes). If a row is not an integer number of bytes, rows share bytes,
    and the array has one dim with all bytes of the tensor.

    Args:
        dtype: a name in `NAMES`.
        shape: the shape of the tensor, in elements.

    Raises:
        UnsupportedError: the name is not in `NAMES`.
        MismatchError: a tensor of this shape is not an integer number of bytes.

    Example:
        >>> array_shape("BF16", (3, 8)), array_shape("F4", (3, 8)), array_shape("F4", (2, 3))
        ((3, 8), (3, 4), (3,))
    """
    if not is_packed(dtype):
        numpy_dtype(dtype)
        return tuple(shape)
    row_bytes, rest = divmod((shape[-1] if shape else 1) * bits(dtype), 8)
    if rest == 0:
        return (*shape[:-1], row_bytes)
    n_bytes, rest = divmod(math.prod(shape) * bits(dtype), 8)
    if rest:
        raise MismatchError(
            f"a {dtype} tensor of shape {tuple(shape)} has {math.prod(shape) * bits(dtype)} bits, "
            "expected a whole number of bytes"
        )
    return (n_bytes,)


def tensor_shape(dtype: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of the tensor that an array of this shape holds: the inverse of `array_shape`.

    Args:
        dtype: a name in `NAMES`.
        shape: the shape of the array; for packed dtypes the last dim is in bytes.

    Returns:
        The shape of the tensor, in elements.

    Raises:
        UnsupportedError: the name is not in `NAMES`.
        MismatchError: the bytes of a row are not an integer number of elements.

    Example:
        >>> tensor_shape("F4", (3, 4)), tensor_shape("BF16", ())
        ((3, 8), ())
    """
    if not is_packed(dtype):
        numpy_dtype(dtype)
        return tuple(shape)
    row, rest = divmod((shape[-1] if shape else 1) * 8, bits(dtype))
    if not shape or rest:
        raise MismatchError(
            f"a packed array of shape {tuple(shape)} cannot be a {dtype} tensor: "
            f"expected rows of a multiple of {math.lcm(8, bits(dtype)) // 8} bytes"
        )
    return (*shape[:-1], row)


def name_of(dtype: np.dtype[np.generic]) -> str:
    """The name of the dtype of an array. A `uint8` array is "U8", packed or not.

    Raises:
        UnsupportedError: the format has no such dtype, or the byte order is not little-endian.

    Example:
        >>> name_of(np.dtype(np.float32)), name_of(np.dtype(ml_dtypes.bfloat16))
        ('F32', 'BF16')
    """
    if dtype in _NAME_OF:
        return _NAME_OF[dtype]
    if dtype.newbyteorder("=") in _NAME_OF:
        raise UnsupportedError(
            f"arrays of dtype {dtype} have the wrong byte order, expected little-endian",
            hint='convert with `array.astype(array.dtype.newbyteorder("<"))`',
        )
    raise UnsupportedError(
        f"safetensors files cannot hold arrays of dtype {dtype}",
        hint="accepted are " + ", ".join(known.name for known in _NAME_OF),
    )


def parse_dtype(value: object) -> str:
    """The name of a dtype in any accepted spelling.

    Args:
        value: a name in any case ("BF16", "bfloat16", "bf16", "torch.bfloat16", MindSpore's "BFloat16"), a numpy
            dtype or scalar type (those of `ml_dtypes` included), or a torch dtype.

    Raises:
        UnsupportedError: the value is not a dtype of the format, or is ambiguous.

    Example:
        >>> parse_dtype("bf16"), parse_dtype(ml_dtypes.bfloat16), parse_dtype(np.dtype("float32")), parse_dtype("Int8")
        ('BF16', 'BF16', 'F32', 'I8')
    """
    if isinstance(value, np.dtype):
        return name_of(value)
    if isinstance(value, type) and issubclass(value, np.generic):
        return name_of(np.dtype(value))
    # The `str` of a torch dtype is "torch.bfloat16", so torch need not be imported.
    is_text = isinstance(value, str) or type(value).__module__.startswith("torch")
    text = str(value).strip().lower().removeprefix("torch.") if is_text else ""
    name = _SPELLINGS.get(text) or _FROM_MINDSPORE.get(text)
    if name is None:
        raise _unknown(value, _similar(text) if isinstance(value, str) else ())
    return name


def from_mindspore(spelling: str) -> str:
    """The dtype for its spelling in files of MindSpore, in any case.

    Raises:
        UnsupportedError: the format has no such dtype (`Int4`, `HiFloat8`, ...).

    Example:
        >>> from_mindspore("BFloat16"), from_mindspore("float32")
        ('BF16', 'F32')
    """
    name = _FROM_MINDSPORE.get(spelling.lower())
    if name is None:
        raise UnsupportedError(
            f"unknown MindSpore dtype {_shown(spelling)}", hint="known are " + ", ".join(_MINDSPORE.values())
        )
    return name


def to_mindspore(dtype: str) -> str:
    """The spelling of a dtype in files of MindSpore.

    Raises:
        UnsupportedError: MindSpore has no such dtype, or the name is not in `NAMES`.

    Example:
        >>> to_mindspore("BF16"), to_mindspore("F32")
        ('BFloat16', 'Float32')
    """
    bits(dtype)  # raises for an unknown name
    if dtype not in _MINDSPORE:
        raise UnsupportedError(f"MindSpore has no dtype for {dtype}", hint="it has " + ", ".join(_MINDSPORE))
    return _MINDSPORE[dtype]


def _similar(text: str) -> list[str]:
    """Spellings that may be meant."""
    begin = [spelling for spelling in _SPELLINGS if spelling.startswith(text)]
    return begin if 1 <= len(begin) <= _MAX_SIMILAR else nearest(text, _SPELLINGS, cutoff=0.8)


def _unknown(value: object, near: Sequence[str] = ()) -> UnsupportedError:
    meant = f"did you mean {' or '.join(map(show, near))}? " if near else ""
    return UnsupportedError(f"unknown dtype {_shown(value)}", hint=f"{meant}known are {', '.join(NAMES)}")


def _shown(value: object) -> str:
    """The `ascii` form of a value that may come from a file, shortened to 80 characters: safe to print."""
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."
