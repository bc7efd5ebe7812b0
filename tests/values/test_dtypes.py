"""Dtype names and their spellings against the header format, ml_dtypes, torch and MindSpore's files."""

from __future__ import annotations

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from reshard import dtypes
from reshard.errors import MismatchError, UnsupportedError

# name in a header, bits, numpy dtype of its arrays, torch dtype: the format's and the frameworks' own definitions.
TABLE = [
    ("BOOL", 8, np.bool_, torch.bool),
    ("U8", 8, np.uint8, torch.uint8),
    ("I8", 8, np.int8, torch.int8),
    ("F8_E5M2", 8, ml_dtypes.float8_e5m2, torch.float8_e5m2),
    ("F8_E4M3", 8, ml_dtypes.float8_e4m3fn, torch.float8_e4m3fn),
    ("F8_E8M0", 8, ml_dtypes.float8_e8m0fnu, torch.float8_e8m0fnu),
    ("F8_E4M3FNUZ", 8, ml_dtypes.float8_e4m3fnuz, torch.float8_e4m3fnuz),
    ("F8_E5M2FNUZ", 8, ml_dtypes.float8_e5m2fnuz, torch.float8_e5m2fnuz),
    ("I16", 16, np.int16, torch.int16),
    ("U16", 16, np.uint16, torch.uint16),
    ("F16", 16, np.float16, torch.float16),
    ("BF16", 16, ml_dtypes.bfloat16, torch.bfloat16),
    ("I32", 32, np.int32, torch.int32),
    ("U32", 32, np.uint32, torch.uint32),
    ("F32", 32, np.float32, torch.float32),
    ("C64", 64, np.complex64, torch.complex64),
    ("F64", 64, np.float64, torch.float64),
    ("I64", 64, np.int64, torch.int64),
    ("U64", 64, np.uint64, torch.uint64),
]


@pytest.mark.parametrize(("name", "bits", "scalar_type", "torch_dtype"), TABLE)
def test_names(name: str, bits: int, scalar_type: type[np.generic], torch_dtype: torch.dtype) -> None:
    dtype = np.dtype(scalar_type)
    assert dtypes.bits(name) == bits
    assert dtypes.numpy_dtype(name) == dtype
    assert dtypes.name_of(dtype) == name
    assert not dtypes.is_packed(name)
    assert dtypes.array_shape(name, (2, 3)) == dtypes.tensor_shape(name, (2, 3)) == (2, 3)
    for spelling in (
        name,
        name.lower(),
        dtype,
        scalar_type,
        dtype.name,
        dtype.name.upper(),
        torch_dtype,
        str(torch_dtype),
    ):
        assert dtypes.parse_dtype(spelling) == name


@pytest.mark.parametrize(("name", "bits"), [("F4", 4), ("F6_E2M3", 6), ("F6_E3M2", 6)])
def test_packed_names(name: str, bits: int) -> None:
    assert dtypes.bits(name) == bits
    assert dtypes.numpy_dtype(name) == np.uint8
    assert dtypes.is_packed(name)
    assert dtypes.parse_dtype(name) == name


def test_the_torch_dtype_of_packed_floats() -> None:
    assert dtypes.parse_dtype(torch.float4_e2m1fn_x2) == "F4"


def test_names_are_those_of_the_core() -> None:
    source = (Path(__file__).parents[2] / "rust/core/geometry/dtype.rs").read_text()
    core = {name: int(bits) for name, bits in re.findall(r'= "(\w+)", (\d+);', source)}
    assert {name: dtypes.bits(name) for name in dtypes.NAMES} == core


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("bf16", "BF16"),
        ("BF16", "BF16"),
        ("fp16", "F16"),
        ("half", "F16"),
        ("fp32", "F32"),
        ("f32", "F32"),
        ("double", "F64"),
        (" Float32 ", "F32"),
        ("BFloat16", "BF16"),
        ("Float8E4M3FN", "F8_E4M3"),
        ("fp8_e4m3", "F8_E4M3"),
        (float, None),
        (int, None),
        ("float", None),
        ("int", None),
        ("float8_e4m3", None),
        ("float16x", None),
        ("", None),
        (None, None),
        (16, None),
        (ml_dtypes.float8_e4m3, None),
        (ml_dtypes.float4_e2m1fn, None),
        (ml_dtypes.int4, None),
        (np.dtype("complex128"), None),
        (np.dtype("S3"), None),
        (torch.complex128, None),
        ("\x1b[31mred" + "x" * 500, None),
    ],
)
def test_spellings(spelling: object, name: str | None) -> None:
    if name is not None:
        assert dtypes.parse_dtype(spelling) == name
        return
    with pytest.raises(UnsupportedError, match=r"hint: .*(known|accepted) are .*(BF16|bfloat16)") as caught:
        dtypes.parse_dtype(spelling)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_foreign_byte_order_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="expected little-endian"):
        dtypes.name_of(np.dtype(">f4"))


@pytest.mark.parametrize(
    ("name", "shape", "array_shape"),
    [
        ("F4", (8,), (4,)),
        ("F4", (3, 8), (3, 4)),
        ("F4", (2, 3), (3,)),
        ("F4", (0, 3), (0,)),
        ("F4", (3, 0), (3, 0)),
        ("F6_E2M3", (5, 4), (5, 3)),
        ("F6_E3M2", (2, 2), (3,)),
        ("BF16", (), ()),
        ("BF16", (0, 3), (0, 3)),
    ],
)
def test_array_shapes(name: str, shape: tuple[int, ...], array_shape: tuple[int, ...]) -> None:
    assert dtypes.array_shape(name, shape) == array_shape
    if len(array_shape) == len(shape):
        assert dtypes.tensor_shape(name, array_shape) == shape


@pytest.mark.parametrize(("name", "shape"), [("F4", ()), ("F4", (3,)), ("F6_E2M3", (2,)), ("F6_E2M3", (3, 2))])
def test_shapes_of_no_whole_bytes_are_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(MismatchError, match="whole number of bytes"):
        dtypes.array_shape(name, shape)


@pytest.mark.parametrize(("name", "shape"), [("F4", ()), ("F6_E2M3", (4,)), ("F6_E2M3", (3, 2))])
def test_arrays_of_no_whole_elements_are_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(MismatchError, match=name):
        dtypes.tensor_shape(name, shape)


@pytest.mark.parametrize("name", ["F31", "bf16", "", "../x"])
def test_unknown_names_are_refused(name: str) -> None:
    for ask in (dtypes.bits, dtypes.numpy_dtype, dtypes.to_mindspore, lambda n: dtypes.array_shape(n, (2,))):
        with pytest.raises(UnsupportedError, match="unknown dtype"):
            ask(name)


@pytest.mark.parametrize(
    ("spelling", "meant"),
    [
        ("bfloat", "did you mean `bfloat16`? known are F4, "),
        ("flaot32", "did you mean `float32`? "),
        ("torch.float", "did you mean `float64` or `float32` or `float16`? "),
        ("int", "did you mean `int8` or `int16` or `int32` or `int64`? "),
        ("foo", "known are "),
    ],
)
def test_a_misspelt_dtype(spelling: str, meant: str) -> None:
    with pytest.raises(UnsupportedError, match="unknown dtype") as caught:
        dtypes.parse_dtype(spelling)
    assert caught.value.hint is not None
    assert caught.value.hint.startswith(meant)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("Float32", "F32"),
        ("Float16", "F16"),
        ("Float64", "F64"),
        ("BFloat16", "BF16"),
        ("Int8", "I8"),
        ("Int16", "I16"),
        ("Int32", "I32"),
        ("Int64", "I64"),
        ("UInt8", "U8"),
        ("UInt16", "U16"),
        ("UInt32", "U32"),
        ("UInt64", "U64"),
        ("Bool", "BOOL"),
        ("Complex64", "C64"),
        ("Float8E4M3FN", "F8_E4M3"),
        ("Float8E5M2", "F8_E5M2"),
    ],
)
def test_mindspore_spellings(spelling: str, name: str) -> None:
    assert dtypes.from_mindspore(spelling) == dtypes.from_mindspore(spelling.upper()) == name
    assert dtypes.to_mindspore(name) == spelling


def test_dtypes_that_one_side_lacks() -> None:
    for spelling in ("Int4", "HiFloat8", "str", ""):
        with pytest.raises(UnsupportedError, match="unknown MindSpore dtype"):
            dtypes.from_mindspore(spelling)
    for name in ("F8_E8M0", "F4", "F8_E5M2FNUZ"):
        with pytest.raises(UnsupportedError, match="MindSpore has no dtype"):
            dtypes.to_mindspore(name)
