"""Decodes state, the inverse of `state.dump`: from JSON to values.

The file is untrusted. Every part is checked before a value is created, and nothing is called or imported by a name in
the file. The spelling of dtypes, which encoding and decoding share, is here too.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import struct
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import ml_dtypes
import numpy as np

from reshard import _core, dtypes
from reshard.errors import DamagedFileError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_DEPTH = 200
INT64 = range(-(1 << 63), 1 << 63)

_MAX_DIMS = 32  # the limit of numpy 1
_MAX_SHOWN = 40
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_NUMPY_DTYPE = re.compile(r"[<>|][biufcmMSU][0-9]{1,9}(\[[0-9]{0,9}[A-Za-z]{1,2}\])?")
_ML_DTYPES = {
    np.dtype(kind).name: np.dtype(kind)
    for kind in vars(ml_dtypes).values()
    if isinstance(kind, type) and issubclass(kind, np.generic)
}
_HEX = re.compile("(?:[0-9a-f]{2})*")
_HEX_INT = re.compile("-?[1-9a-f][0-9a-f]*")


@dataclass(frozen=True)
class TorchSaved:
    """A value as the bytes that `torch.save` made of it.

    Attributes:
        data: the bytes. They may come from an untrusted file.
    """

    data: bytes

    def decoded(self) -> object:
        """The value. No code is run: an object of a class that is no plain value is a `_core.Opaque`.

        Raises:
            DamagedFileError, UnsupportedError: the bytes are invalid.
        """
        return _core.decode_torch_object(self.data)


class Loader:
    """Decodes one value.

    Attributes:
        arrays: arrays that no value has referred to so far.
    """

    def __init__(self, name: str, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays
        self._name = name
        self._containers: dict[str, Callable[[list[Any]], Any]] = {
            "!tuple": tuple,
            "!set": self._set,
            "!frozenset": lambda items: frozenset(self._set(items)),
            "!dict": lambda items: dict(self._pairs(items)),
            "!ordered": lambda items: OrderedDict(self._pairs(items)),
            "!counter": lambda items: Counter(dict(self._pairs(items))),
        }
        self._leaves: dict[str, Callable[[Any], Any]] = {
            "!int": self._int,
            "!float": self._float,
            "!complex": self._complex,
            "!bytes": self._base64,
            "!text": self._text,
            "!scalar": self._scalar,
            "!numpy.str": lambda content: np.str_(self._text(content)),
            "!numpy.bytes": lambda content: np.bytes_(self._base64(content)),
            "!array": self._array,
            "!tensor": self._tensor,
            "!torch.save": self._torch_saved,
            "!torch.Size": self._size,
            "!torch.dtype": self._torch_dtype,
            "!torch.device": self._torch_device,
        }

    def decode(self, node: Any, depth: int) -> Any:
        """The value of a JSON node inside of `depth` containers."""
        if isinstance(node, list):
            return self._items(node, depth)
        if not isinstance(node, dict):
            return node
        tag = next((key for key in node if key[:1] == "!"), None)
        if tag is None:
            self._check(depth < MAX_DEPTH, f"it has more than {MAX_DEPTH} levels of nesting")
            decoded = {}
            for key, item in node.items():
                decoded[key] = self.decode(item, depth + 1)
            return decoded
        self._check(len(node) == 1, f"there are more entries beside {tag[:_MAX_SHOWN]!a}")
        content = node[tag]
        if tag in self._containers:
            self._check(isinstance(content, list), "the content of a container is not a list")
            return self._containers[tag](self._items(content, depth))
        self._check(tag in self._leaves, f"unknown type {tag[:_MAX_SHOWN]!a}")
        return self._leaves[tag](content)

    def _items(self, content: list[Any], depth: int) -> list[Any]:
        self._check(depth < MAX_DEPTH, f"it has more than {MAX_DEPTH} levels of nesting")
        items = []  # until Python 3.12 a comprehension counts as a call
        for item in content:
            items.append(self.decode(item, depth + 1))  # noqa: PERF401
        return items

    def _set(self, items: list[Any]) -> set[Any]:
        values = set(self._hashable(items))
        self._check(len(values) == len(items), "a set has a value twice")
        return values

    def _pairs(self, items: list[Any]) -> list[tuple[Any, Any]]:
        keys = self._hashable(items[::2])
        self._check(len(items) % 2 == 0 and len(set(keys)) == len(keys), "a dict has a key twice, or without a value")
        return list(zip(keys, items[1::2], strict=True))

    def _hashable(self, items: list[Any]) -> list[Any]:
        try:
            for item in items:
                hash(item)
        except TypeError:
            self._fail("a key, or a value in a set, is not hashable")
        return items

    def _int(self, content: Any) -> int:
        self._check(isinstance(content, str) and _HEX_INT.fullmatch(content), "an integer is not hexadecimal")
        value = int(content, 16)
        self._check(value not in INT64, "an integer of 64 bits is not a plain number")
        return value

    def _float(self, content: Any) -> float:
        self._check(isinstance(content, str), "a float is not text")
        if content in _FLOATS:
            return _FLOATS[content]
        self._check(len(content) == 16 and _HEX.fullmatch(content), "a float does not have 16 hexadecimal digits")
        value: float = struct.unpack(">d", bytes.fromhex(content))[0]
        self._check(math.isnan(value), "a float of hexadecimal digits is not nan")
        return value

    def _complex(self, content: Any) -> complex:
        self._check(isinstance(content, list) and len(content) == 2, "a complex number is not two numbers")
        parts = [self.decode(part, 0) for part in content]
        self._check(all(type(part) is float for part in parts), "a complex number is not two floats")
        return complex(*parts)

    def _base64(self, content: Any) -> bytes:
        self._check(isinstance(content, str) and content.isascii(), "bytes are not base64")
        try:
            return base64.b64decode(content, validate=True)
        except binascii.Error:
            self._fail("bytes are not base64")

    def _text(self, content: Any) -> str:
        try:
            return self._bytes(content).decode(errors="surrogatepass")
        except UnicodeDecodeError:
            self._fail("text is not UTF-8")

    def _bytes(self, content: Any) -> bytes:
        self._check(isinstance(content, str) and _HEX.fullmatch(content), "bytes are not hexadecimal")
        return bytes.fromhex(content)

    def _scalar(self, content: Any) -> np.generic:
        self._check(isinstance(content, list) and len(content) == 2, "a scalar is not a dtype and its bytes")
        dtype, data = self._dtype(content[0]), self._bytes(content[1])
        self._check(dtype.kind not in "SU", "a scalar is text")
        self._check(len(data) == dtype.itemsize, f"a scalar of dtype {dtype} has {len(data)} bytes")
        value: np.generic = np.frombuffer(data, dtype)[0]
        return value

    def _array(self, content: Any) -> np.ndarray:
        stored, dtype, shape = self._stored(content)
        if content[1] in dtypes.NAMES:
            self._check(
                stored.dtype == dtype and stored.shape == shape, f"array {content[0]!a} has another dtype or shape"
            )
            return stored
        n_bytes = math.prod(shape) * dtype.itemsize
        is_whole = stored.dtype == np.uint8 and stored.shape == (n_bytes,)
        self._check(is_whole, f"array {content[0]!a} does not have {n_bytes} bytes")
        try:
            return (
                np.frombuffer(bytearray(stored.tobytes()), dtype).reshape(shape) if n_bytes else np.empty(shape, dtype)
            )
        except (ValueError, MemoryError):  # no elements, but a dim that exceeds numpy's limit
            self._fail(f"array {content[0]!a} has an impossible shape")

    def _torch_saved(self, content: Any) -> TorchSaved:
        array = self._array(content)
        self._check(array.dtype == np.uint8 and array.ndim == 1, "an object of torch.save is not bytes")
        return TorchSaved(array.tobytes())

    def _tensor(self, content: Any) -> Any:
        array = self._array(content)
        torch = _torch()
        if torch is None:
            return array
        spelling = "complex128" if content[1] == "<c16" else _torch_spelling(content[1])
        dtype = vars(torch).get(spelling)
        if not isinstance(dtype, torch.dtype):
            raise UnsupportedError(f"this torch has no dtype for {content[1]}, which `{self._name}` uses")
        # The memory of a tensor must be writable and aligned.
        data = np.require(array.reshape(-1), requirements=["C", "A", "W"])
        return torch.from_numpy(data.view(np.uint8)).view(dtype).reshape(array.shape)

    def _stored(self, content: Any) -> tuple[np.ndarray, np.dtype[np.generic], tuple[int, ...]]:
        self._check(
            isinstance(content, list) and len(content) == 3 and isinstance(content[0], str),
            "an array is not a name, a dtype and a shape",
        )
        name, spelling, dims = content
        self._check(
            isinstance(dims, list) and len(dims) <= _MAX_DIMS and all(type(n) is int and n >= 0 for n in dims),
            "a shape is not a list of sizes",
        )
        self._check(name in self.arrays, f"there is no array {name[:_MAX_SHOWN]!a}, or it is named twice")
        return self.arrays.pop(name), self._dtype(spelling), tuple(dims)

    def _dtype(self, spelling: Any) -> np.dtype[np.generic]:
        self._check(isinstance(spelling, str), "a dtype is not text")
        if spelling in dtypes.NAMES:
            return dtypes.numpy_dtype(spelling)
        if spelling in _ML_DTYPES:
            return _ML_DTYPES[spelling]
        try:
            dtype: np.dtype[Any] | None = np.dtype(spelling) if _NUMPY_DTYPE.fullmatch(spelling) else None
        except TypeError:
            dtype = None
        # numpy accepts several spellings; a dtype of the safetensors format must have its safetensors name.
        if dtype is None or dtype_spelling(dtype) != spelling:
            self._fail(f"unknown dtype {spelling[:_MAX_SHOWN]!a}")
        return dtype

    def _size(self, content: Any) -> Any:
        self._check(
            isinstance(content, list) and all(type(n) is int for n in content), "a size is not a list of integers"
        )
        torch = _torch()
        return tuple(content) if torch is None else torch.Size(content)

    def _torch_dtype(self, content: Any) -> Any:
        self._check(isinstance(content, str) and content.isidentifier(), "a torch dtype is not a name")
        torch = _torch()
        if torch is None:
            return f"torch.{content}"
        # Not getattr: access to an attribute of torch can import a module.
        dtype = vars(torch).get(content)
        if not isinstance(dtype, torch.dtype):
            raise UnsupportedError(f"this torch has no dtype {content[:_MAX_SHOWN]!a}, which `{self._name}` uses")
        return dtype

    def _torch_device(self, content: Any) -> Any:
        is_device = isinstance(content, str) and re.fullmatch("[a-z]{1,20}(:[0-9]{1,3})?", content)
        self._check(is_device, "a device is invalid")
        torch = _torch()
        try:
            return content if torch is None else torch.device(content)
        except RuntimeError:
            raise UnsupportedError(f"this torch has no device {content}, which `{self._name}` uses") from None

    def _check(self, holds: object, message: str) -> None:
        if not holds:
            self._fail(message)

    def _fail(self, message: str) -> NoReturn:
        damaged(self._name, message)


def damaged(name: str, message: str) -> NoReturn:
    """Raise the error for a damaged file."""
    raise DamagedFileError(f"`{name}` is not valid saved state: {message}", path=name)


def dtype_spelling(dtype: np.dtype[Any]) -> str | None:
    """The spelling of a dtype in files; None if it cannot be saved."""
    try:
        return dtypes.name_of(dtype)
    except UnsupportedError:
        pass
    if dtype.name in _ML_DTYPES and dtype == _ML_DTYPES[dtype.name]:
        return dtype.name
    # No long doubles: they depend on the machine. No objects and records: they can hold any type.
    is_supported = dtype.kind in "biufcmMSU" and dtype.char not in "gG" and dtype.itemsize > 0
    return dtype.str if is_supported else None


def _torch_spelling(name: str) -> str:
    return "float4_e2m1fn_x2" if name == "F4" else dtypes.numpy_dtype(name).name


def _torch() -> Any:
    """torch, or None if it is not installed."""
    try:
        import torch  # noqa: PLC0415  only where a value needs it
    except ImportError:
        return None
    return torch


def float_name(value: float) -> str:
    """The spelling of a float that is not finite."""
    bits = struct.pack(">d", value)
    names = {struct.pack(">d", known): name for name, known in _FLOATS.items()}
    return names.get(bits, bits.hex())
