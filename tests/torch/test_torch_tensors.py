"""Arrays as tensors and back: same memory, same bits, every dtype."""

from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import torch

from reshard import dtypes
from reshard.errors import ArgumentError, UnsupportedError
from reshard.torch import as_tensor, from_tensor
from reshard.torch.tensors import torch_dtype

NAMES = [name for name in dtypes.NAMES if not dtypes.is_packed(name)]


def bits_of(name: str, n: int) -> np.ndarray:
    """`n` elements of all sorts of bit patterns, NaNs with payloads among them."""
    raw = np.random.default_rng(7).integers(0, 256, n * dtypes.bits(name) // 8, np.uint8)
    return (raw % 2 if name == "BOOL" else raw).view(dtypes.numpy_dtype(name))


def raw(value: np.ndarray | torch.Tensor) -> bytes:
    if isinstance(value, torch.Tensor):
        # By way of torch's own bytes, not by the code under test.
        return bytes(value.contiguous().reshape(-1).view(torch.uint8).tolist())
    return value.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_same_memory_and_bits_both_ways(name: str) -> None:
    array = bits_of(name, 12).reshape(3, 4)
    tensor = as_tensor(array)
    assert tensor.dtype == torch_dtype(name) == getattr(torch, array.dtype.name)
    assert tensor.shape == (3, 4)
    assert tensor.data_ptr() == array.ctypes.data
    assert raw(tensor) == raw(array)
    back, back_name = from_tensor(tensor)
    assert back_name == name
    assert back.dtype == array.dtype
    assert back.ctypes.data == array.ctypes.data
    assert raw(back) == raw(array)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (2, 3, 1)])
def test_all_shapes(name: str, shape: tuple[int, ...]) -> None:
    array = bits_of(name, int(np.prod(shape))).reshape(shape)
    tensor = as_tensor(array)
    assert tuple(tensor.shape) == shape
    assert raw(tensor) == raw(array)
    assert from_tensor(tensor)[0].shape == shape


@pytest.mark.parametrize("name", ["BF16", "F8_E4M3", "F32", "C64", "BOOL", "U16"])
def test_strides_are_kept(name: str) -> None:
    array = bits_of(name, 24).reshape(4, 6)
    for view in (array.T, array[::2, 1:5:3], np.broadcast_to(array[:1], (3, 6))):
        if not view.flags.writeable:
            view.flags.writeable = True
        tensor = as_tensor(view)
        assert tuple(stride * view.itemsize for stride in tensor.stride()) == view.strides
        assert raw(tensor) == raw(view)
        back, _ = from_tensor(tensor)
        assert back.strides == view.strides
        assert raw(back) == raw(view)


def test_the_tensor_keeps_the_memory_alive() -> None:
    tensor = as_tensor(np.full(100_000, 3.5, ml_dtypes.bfloat16))
    junk = [np.zeros(100_000, np.uint16) for _ in range(4)]
    assert bool((tensor == 3.5).all())
    assert junk


def test_packed_floats() -> None:
    array = np.arange(8, dtype=np.uint8).reshape(2, 4)
    tensor = as_tensor(array, "F4")
    assert tensor.dtype == torch.float4_e2m1fn_x2
    assert tensor.shape == (2, 4)
    back, name = from_tensor(tensor)
    assert name == "F4"
    assert back.ctypes.data == array.ctypes.data
    assert raw(back) == raw(array)
    with pytest.raises(UnsupportedError, match="no dtype for F6_E2M3"):
        as_tensor(np.zeros(3, np.uint8), "F6_E2M3")


def test_arrays_that_torch_cannot_take() -> None:
    with pytest.raises(ArgumentError, match="read-only"):
        as_tensor(np.frombuffer(bytes(8), np.float32))
    with pytest.raises(UnsupportedError, match="strides") as caught:
        as_tensor(np.zeros(3, ml_dtypes.bfloat16)[::-1])
    assert "array.copy()" in (caught.value.hint or "")
    with pytest.raises(UnsupportedError, match="byte order"):
        as_tensor(np.zeros(3, ">f4"))
    with pytest.raises(UnsupportedError, match="complex128"):
        as_tensor(np.zeros(3, np.complex128))
    with pytest.raises(ArgumentError, match="dtype F32 needs an array of dtype float32"):
        as_tensor(np.zeros(3, np.int32), "F32")
    with pytest.raises(UnsupportedError, match="unknown dtype"):
        as_tensor(np.zeros(3, np.int32), "F33")


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        (torch.zeros(2, 2).to_sparse(), "sparse"),
        (torch.zeros(2, device="meta"), "device `meta`"),
    ],
    ids=["complex128", "sparse", "meta"],
)
def test_tensors_that_have_no_array(tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        from_tensor(tensor)


def test_parameters_and_lazy_tensors() -> None:
    array, name = from_tensor(torch.nn.Parameter(torch.ones(3)))
    assert (array.tolist(), name) == ([1.0, 1.0, 1.0], "F32")
    conjugated = torch.tensor([1 + 2j], dtype=torch.complex64).conj()
    assert from_tensor(conjugated)[0].tolist() == [1 - 2j]
    negated = torch._neg_view(torch.tensor([1.0, -2.0]))
    assert from_tensor(negated)[0].tolist() == [-1.0, 2.0]


def test_reshard_alone_does_not_import_torch() -> None:
    code = "import sys, reshard, reshard.dtypes, reshard.values.indexing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
