"""numpy arrays as torch tensors and back, over the same memory, for every dtype of the format.

numpy's DLPack and `torch.from_numpy` refuse bfloat16 and the 8-bit floats. So the memory is passed as an array of
integers of the same width, and viewed with the right dtype on the other side. Nothing is copied, moved or cast.
"""

from __future__ import annotations

import numpy as np
import torch

from reshard import dtypes
from reshard.errors import ArgumentError, UnsupportedError
from reshard.values.words import listed, show
from reshard.write.arrays import as_array

# The dtypes of this torch version: older ones lack some of the narrow floats.
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

_COMPUTED = "_precomputed"

# Signed, because not all supported torch releases have unsigned integers of 16 to 64 bits.
_INTEGERS = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.int16),
    4: np.dtype(np.int32),
    8: np.dtype(np.int64),
}


def torch_dtype(dtype: str) -> torch.dtype:
    """The torch dtype for a dtype name.

    Raises:
        UnsupportedError: this torch version has none (the 6-bit floats; newer 8-bit floats in an old torch).

    Example:
        >>> torch_dtype("BF16"), torch_dtype("F8_E4M3")
        (torch.bfloat16, torch.float8_e4m3fn)
    """
    if dtype not in _TORCH:
        dtypes.bits(dtype)  # raises for an unknown name
        raise UnsupportedError(
            f"torch {torch.__version__} has no dtype for {dtype}", hint="read it as numpy: packed bytes, or `ml_dtypes`"
        )
    return _TORCH[dtype]


def as_tensor(array: np.ndarray, dtype: str | None = None) -> torch.Tensor:
    """The array as a tensor over the same memory, with the same strides.

    Args:
        array: an array of any dtype that `reshard` returns, including those of `ml_dtypes`. It must be writable,
            because tensors cannot be read-only.
        dtype: the name of its dtype. "F4" for a `uint8` array of packed 4-bit floats: the tensor has the packed dtype
            of torch, with one byte per element. None: the dtype of the array.

    Returns:
        A CPU tensor with the shape of the array. It keeps the memory of the array alive.

    Raises:
        ArgumentError: the array is read-only, or has another dtype than `dtype`.
        UnsupportedError: torch has no such dtype, or does not support the strides of the array (negative ones).

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
        raise ArgumentError(f"dtype {name} needs an array of dtype {dtypes.numpy_dtype(name)}, found {array.dtype}")
    if not array.flags.writeable:
        raise ArgumentError("the array is read-only, and tensors are always writable", hint="pass `array.copy()`")
    integers = _INTEGERS[array.itemsize]
    result_dtype = torch_dtype(name)
    try:
        tensor = torch.from_numpy(array.view(integers))
    except ValueError as error:
        raise UnsupportedError(
            f"torch does not support an array with strides {array.strides}, in bytes: {error}",
            hint="pass `array.copy()`",
        ) from error
    return tensor.view(result_dtype)


def from_tensor(tensor: torch.Tensor) -> tuple[np.ndarray, str]:
    """The tensor as an array over the same memory, with the same strides, and the name of its dtype.

    Args:
        tensor: a dense CPU tensor; its gradient is ignored. Lazily conjugated and negated tensors are copied.

    Returns:
        The array, and the name of the tensor's dtype. For `torch.float4_e2m1fn_x2` these are a `uint8` array of the
        packed bytes, and "F4".

    Raises:
        UnsupportedError: the tensor is on another device, sparse, quantized, distributed, or of a dtype that the
            format lacks.

    Example:
        >>> array, dtype = from_tensor(torch.ones(2, 3, dtype=torch.bfloat16).T)
        >>> array.shape, array.dtype, dtype
        ((3, 2), dtype(bfloat16), 'BF16')
    """
    if tensor.device.type != "cpu":
        raise UnsupportedError(f"expected a CPU tensor, found device `{tensor.device}`", hint="pass `tensor.cpu()`")
    return as_array(tensor)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a class that is made of other tensors, such as quantised ones; not a DTensor.

    Example:
        >>> is_wrapper(torch.zeros(2))
        False
    """
    return hasattr(tensor, "__tensor_flatten__") and not hasattr(tensor, "device_mesh")


def inner_tensors(tensor: torch.Tensor, key: str) -> tuple[dict[str, torch.Tensor], str]:
    """The plain tensors that a tensor is made of, by the protocol `__tensor_flatten__` of torch.

    A single inner tensor with the shape and the dtype of the whole holds its values: a wrapper that only changes how a
    weight is used is saved as the weight. Those that torchao computes from the weight, `_precomputed_scale`, do not
    count; any others do, such as low-rank factors or the scale of an activation.

    Args:
        tensor: the tensor.
        key: its name, for messages.

    Returns:
        The inner tensors by name, of which changes are changes of the whole; the name is empty for one that holds the
        values. And what the tensor is besides: its class and its options, as text; empty for one that holds the values.

    Raises:
        UnsupportedError: the class does not follow the protocol.

    Example:
        >>> list(inner_tensors(torch.zeros(2), "w")[0])
        ['']
    """
    if not is_wrapper(tensor):
        return {"": tensor}, ""
    kind = type(tensor).__name__
    try:
        names, options = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = {str(name): getattr(tensor, name) for name in names}
    except Exception as error:
        raise UnsupportedError(
            f"{show(key)} is a {kind}, whose `__tensor_flatten__` fails: {type(error).__name__}: {show(str(error))}",
            key=key,
        ) from error
    if not inner or not all(isinstance(one, torch.Tensor) for one in inner.values()):
        raise UnsupportedError(f"{show(key)} is a {kind}, whose `__tensor_flatten__` names no tensors", key=key)
    kept = [one for name, one in inner.items() if not name.startswith(_COMPUTED)]
    if len(kept) == 1 and (kept[0].shape, kept[0].dtype) == (tensor.shape, tensor.dtype):
        return inner_tensors(kept[0], key)
    found: dict[str, torch.Tensor] = {}
    words = [f"{kind}({options!r})"]
    for name, one in inner.items():
        parts, text = inner_tensors(one, f"{key}.{name}")
        found |= {f"{name}.{part}" if part else name: tensor for part, tensor in parts.items()}
        words += [f"{name}: {text}"] if text else []
    return found, ", ".join(words)


def plain_tensor(tensor: torch.Tensor, key: str) -> torch.Tensor:
    """The one plain tensor that holds the values of a tensor; itself, if it is plain.

    Args:
        tensor: the tensor.
        key: its name, for messages.

    Raises:
        UnsupportedError: it is made of several tensors.
    """
    parts, _ = inner_tensors(tensor, key)
    if list(parts) != [""]:
        raise UnsupportedError(
            f"{show(key)} is a {type(tensor).__name__}, which is made of other tensors: {listed(map(show, parts))}",
            key=key,
            hint="`Checkpointer` keeps such weights of a model if they are not sharded; elsewhere give these tensors, "
            "each under a name of its own",
        )
    return parts[""]


def overwrite(live: torch.Tensor, new: torch.Tensor) -> bool:
    """Copy into a tensor of the same shape.

    Elements of an expanded tensor share memory. It can hold the values only if they are equal there.

    Returns:
        False: it is expanded, and cannot hold the values. Nothing is changed then.

    Example:
        >>> row = torch.zeros(1, 2)
        >>> overwrite(row.expand(3, 2), torch.ones(3, 2)), row
        (True, tensor([[1., 1.]]))
        >>> overwrite(row.expand(3, 2), torch.arange(6.0).reshape(3, 2))
        False
    """
    live = live.detach()
    expanded = [dim for dim, stride in enumerate(_strides(live)) if stride == 0 and live.shape[dim] > 1]
    for dim in expanded:
        first = new.narrow(dim, 0, 1)
        if not first.expand_as(new).equal(new):
            return False
        live, new = live.narrow(dim, 0, 1), first
    live.copy_(new)
    return True


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides; none of a distributed tensor, or of one with another layout."""
    is_plain = tensor.layout is torch.strided and not hasattr(tensor, "device_mesh")
    return tensor.stride() if is_plain else ()
