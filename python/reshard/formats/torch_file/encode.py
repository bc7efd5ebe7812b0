"""Encodes values as `torch.save` and `torch.distributed.checkpoint` store them: opcodes are written, nothing is run.

Only plain values have an encoding: None, numbers, text, bytes, lists, tuples, dicts and sets of these, and tensors.
Each object is encoded once, so a value takes as many bytes as it has objects, and a list can contain itself. As in
torch, every object is stored under a number, also where nothing refers to it: readers bound their memory by the bytes.

Source: the module `pickletools` of CPython (the opcodes); `torch/_utils.py` and `torch/serialization.py` of torch 2.15.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from reshard.errors import UnsupportedError
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MAX_DEPTH = 90
"""Nesting of values; this package reads back 100 levels."""
MAX_OBJECTS = 1_000_000

_MARK, _STOP = b"(", b"."

TORCH_DTYPES: Mapping[str, tuple[str, str | None]] = {
    "BOOL": ("bool", "BoolStorage"),
    "U8": ("uint8", "ByteStorage"),
    "I8": ("int8", "CharStorage"),
    "F8_E5M2": ("float8_e5m2", None),
    "F8_E4M3": ("float8_e4m3fn", None),
    "F8_E8M0": ("float8_e8m0fnu", None),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", None),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", None),
    "I16": ("int16", "ShortStorage"),
    "U16": ("uint16", None),
    "F16": ("float16", "HalfStorage"),
    "BF16": ("bfloat16", "BFloat16Storage"),
    "I32": ("int32", "IntStorage"),
    "U32": ("uint32", None),
    "F32": ("float32", "FloatStorage"),
    "C64": ("complex64", "ComplexFloatStorage"),
    "F64": ("float64", "DoubleStorage"),
    "I64": ("int64", "LongStorage"),
    "U64": ("uint64", None),
}
"""For each dtype its name in torch, and the class of its storage; None: the storage has no type."""


class NotPlainError(Exception):
    """A value has no encoding."""


def torch_dtype(key: str, dtype: str) -> str:
    """The name of a dtype in torch; `key` is the tensor, for the message.

    Raises:
        UnsupportedError: torch has none.

    Example:
        >>> torch_dtype("w", "F8_E4M3")
        'float8_e4m3fn'
    """
    if dtype not in TORCH_DTYPES:
        raise UnsupportedError(
            f"{show(key)} is {dtype}, which files of torch cannot hold",
            key=key,
            hint=f"leave it out with `select=`; supported are {', '.join(TORCH_DTYPES)}",
        )
    return TORCH_DTYPES[dtype][0]


def tensor_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, in elements.

    Example:
        >>> tensor_strides((2, 0, 3)), tensor_strides(())
        ((3, 3, 1), ())
    """
    strides = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


class Encoder:
    r"""Appends the opcodes of values to `data`.

    Args:
        protocol: 2, as in files of `torch.save`, or 4, as in `.metadata`.

    Example:
        >>> encoder = Encoder(2)
        >>> encoder.value({"step": 3})
        >>> encoder.finished()
        b'\x80\x02}q\x00(X\x04\x00\x00\x00stepq\x01K\x03u.'
    """

    def __init__(self, protocol: int) -> None:
        self._has_short_names = protocol >= 4
        self.data = bytearray((0x80, protocol))
        self._n_stored = 0
        self._last = b""
        self._stored: dict[object, bytes] = {}
        self._kept: list[object] = []  # objects whose `id` is a key of `_stored`

    def finished(self) -> bytes:
        """The bytes, with their end."""
        return bytes(self.data + _STOP)

    # -- opcodes

    def opcodes(self, data: bytes) -> None:
        """Append opcodes without arguments."""
        self.data += data

    def text(self, text: str) -> None:
        """Text."""
        data = text.encode("utf-8", "surrogatepass")
        if self._has_short_names and len(data) < 256:
            self.data += b"\x8c" + len(data).to_bytes(1) + data
        else:
            self.data += b"X" + struct.pack("<I", len(data)) + data
        self._store(None)

    def word(self, text: str) -> None:
        """Text that occurs often: it is stored at the first time, and then named."""
        if not self._again(text):
            self.text(text)
            self._stored[text] = self._last

    def name(self, module: str, name: str) -> None:
        """A class, function or dtype of a module."""
        if self._again((module, name)):
            return
        if self._has_short_names:
            self.word(module)
            self.word(name)
            self.data += b"\x93"
        else:
            self.data += b"c" + f"{module}\n{name}\n".encode()
        self._store((module, name))

    def integer(self, value: int) -> None:
        """An integer."""
        if 0 <= value < 1 << 8:
            self.data += b"K" + value.to_bytes(1)
        elif 0 <= value < 1 << 16:
            self.data += b"M" + value.to_bytes(2, "little")
        elif -(1 << 31) <= value < 1 << 31:
            self.data += b"J" + struct.pack("<i", value)
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            if len(data) > 255:
                raise NotPlainError("an integer of more than 2000 bits")
            self.data += b"\x8a" + len(data).to_bytes(1) + data

    def integers(self, values: Sequence[int]) -> None:
        """A tuple of integers."""
        if len(values) > 3:
            self.data += _MARK
        for value in values:
            self.integer(value)
        self.close_tuple(len(values))

    def close_tuple(self, n: int) -> None:
        """Make a tuple of the last `n` values; if there are more than three, a mark stands before them."""
        self.data += (b")", b"\x85", b"\x86", b"\x87")[n] if n <= 3 else b"t"
        if n:
            self._store(None)

    # -- values

    def value(self, value: object) -> None:
        """A plain value.

        Raises:
            NotPlainError: it has no encoding, is nested too deep, or has too many objects.
        """
        self._value(value, 0)

    def _value(self, value: object, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise NotPlainError(f"it is nested more than {MAX_DEPTH} levels deep")
        if value is None:
            self.data += b"N"
        elif type(value) is bool:
            self.data += b"\x88" if value else b"\x89"
        elif type(value) is int:
            self.integer(value)
        elif type(value) is float:
            self.data += b"G" + struct.pack(">d", value)
        elif type(value) is str:
            self.text(value)
        elif type(value) is bytes:
            self.name("_codecs", "encode")
            self.text(value.decode("latin1"))
            self.word("latin1")
            self.data += b"\x86R"
        elif type(value) is complex:
            self.name("builtins" if self._has_short_names else "__builtin__", "complex")
            for part in (value.real, value.imag):
                self._value(part, depth)
            self.data += b"\x86R"
        elif not self._again(id(value)):
            self._container(value, depth)

    def _container(self, value: object, depth: int) -> None:
        self._kept.append(value)
        if len(self._kept) > MAX_OBJECTS:
            raise NotPlainError(f"it has more than {MAX_OBJECTS} objects")
        if type(value) is dict:
            self.data += b"}"
            self._store(id(value))
            self.data += _MARK
            for key, item in value.items():
                self._value(key, depth + 1)
                self._value(item, depth + 1)
            self.data += b"u"
        elif type(value) is list:
            self.data += b"]"
            self._store(id(value))
            self.data += _MARK
            self._values(value, depth)
            self.data += b"e"
        elif type(value) is tuple:
            if len(value) > 3:
                self.data += _MARK
            self._values(value, depth)
            self.close_tuple(len(value))
            if value:
                self._stored[id(value)] = self._last
        elif type(value) in (set, frozenset):
            self.name("builtins" if self._has_short_names else "__builtin__", type(value).__name__)
            self.data += b"](" if value else b"]"
            self._values(value, depth)  # type: ignore[arg-type]
            self.data += b"e\x85R" if value else b"\x85R"
            self._store(id(value))
        else:
            raise NotPlainError(f"a {type(value).__module__}.{type(value).__qualname__}")

    def _values(self, values: Iterable[object], depth: int) -> None:
        for value in values:
            self._value(value, depth + 1)

    def tensor(self, storage: str, dtype: str, shape: Sequence[int], n_bytes: int) -> None:
        """A contiguous tensor that is all of a storage.

        Args:
            storage: key of the storage.
            dtype: a name in `TORCH_DTYPES`.
            shape: its shape, in elements.
            n_bytes: bytes of the storage.
        """
        name, storage_class = TORCH_DTYPES[dtype]
        self.name("torch._utils", "_rebuild_tensor_v2" if storage_class else "_rebuild_tensor_v3")
        self.data += b"(("
        self.word("storage")
        if storage_class is not None:
            self.name("torch", storage_class)
        else:
            self.name("torch.storage", "UntypedStorage")
        self.text(storage)
        self.word("cpu")
        n_elements = 1
        for extent in shape:
            n_elements *= extent
        self.integer(n_elements if storage_class else n_bytes)
        self.close_tuple(5)
        self.data += b"QK\x00"
        self.integers(shape)
        self.integers(tensor_strides(shape))
        self.data += b"\x89"
        self.name("collections", "OrderedDict")
        self.data += b")R"
        self._store(None)
        if storage_class is None:
            self.name("torch", name)
        self.close_tuple(6)
        self.data += b"R"
        self._store(None)

    # -- what was stored

    def _again(self, key: object) -> bool:
        """Append a reference to what was stored under a key; False if there is none."""
        stored = self._stored.get(key)
        if stored is None:
            return False
        self.data += stored
        return True

    def _store(self, key: object) -> None:
        """Store the last value, under a key unless that is None."""
        n = self._n_stored
        self._n_stored += 1
        if n < 256:
            number, short = n.to_bytes(1), True
        else:
            number, short = struct.pack("<I", n), False
        if self._has_short_names:
            self.data += b"\x94"
        else:
            self.data += (b"q" if short else b"r") + number
        self._last = (b"h" if short else b"j") + number
        if key is not None:
            self._stored[key] = self._last
