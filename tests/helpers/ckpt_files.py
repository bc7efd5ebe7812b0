"""Writes `.ckpt` files as the protobuf documentation has the wire format; nothing of this is in the package."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

TYPES = {
    "float16": "Float16",
    "float32": "Float32",
    "float64": "Float64",
    "bfloat16": "BFloat16",
    "bool": "Bool",
    **{f"{sign}int{bits}": f"{sign.upper()}Int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}


def varint(n: int) -> bytes:
    out = bytearray()
    while n >= 0x80:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    return bytes([*out, n])


def field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + varint(len(content)) + content


def value(tag: str, type_name: str, dims: Iterable[int], content: bytes) -> bytes:
    numbers = b"".join(b"\x08" + varint(dim) for dim in dims)
    tensor = numbers + field(2, type_name.encode()) + field(3, content)
    return field(1, field(1, tag.encode()) + field(2, tensor))


def text(tag: str, content: str) -> bytes:
    return value(tag, "str", [0], content.encode("utf-32-le"))


def dump(arrays: Mapping[str, np.ndarray], *, record_bytes: int | None = None, crc: bool = False) -> bytes:
    """A file of arrays; contents longer than `record_bytes` in several records."""
    out = b""
    for tag, array in arrays.items():
        content = np.ascontiguousarray(array).tobytes()
        n = record_bytes or max(len(content), 1)
        for at in range(0, max(len(content), 1), n):
            out += value(tag, TYPES[array.dtype.name], array.shape, content[at : at + n])
    return with_sum(out) if crc else out


def with_sum(content: bytes) -> bytes:
    return content + b"crc_num" + zlib.crc32(content).to_bytes(10, "big")
