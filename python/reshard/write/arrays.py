"""The arrays of a caller as memory with a dtype and a shape; copied only where that is necessary.

An array is a numpy array, a torch tensor, or any object with DLPack or the buffer protocol. A `Shard` adds the offset
of an array in its tensor. This module does not import torch: a caller that has a tensor has imported it.
"""

from __future__ import annotations

import functools
import hashlib
import math
import operator
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reshard import _core, dtypes
from reshard.errors import ArgumentError, MismatchError, UnsupportedError
from reshard.values.tensor_memory import memory_of
from reshard.values.words import show
from reshard.write.columns import Columns
from reshard.write.contents import Part  # noqa: TC001  messages are decoded by their type hints

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_MAX_NAME_BYTES = 1024
# The names of the dtypes of ordinary numpy arrays.
_PLAIN = {
    dtype: dtypes.name_of(dtype)
    for name in dtypes.NAMES
    if not dtypes.is_packed(name) and (dtype := dtypes.numpy_dtype(name)).itemsize in (1, 2, 4, 8)
}


@dataclass(frozen=True, eq=False)
class Shard:
    """An array that is a part of a tensor, as `save` takes it.

    Attributes:
        array: what this rank holds: anything that `save` takes as an array.
        global_shape: shape of the whole tensor, in elements.
        offset: the array's first element in the tensor, one index a dim. Left out where a layout says it.

    Raises:
        ArgumentError: shape and offset are no sequences of integers from 0 on, or of different lengths.

    Example:
        >>> Shard(np.zeros((2, 3)), (4, 3), offset=(2, 0)).offset
        (2, 0)
    """

    array: Any
    global_shape: tuple[int, ...]
    offset: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "global_shape", as_shape(self.global_shape, "the global shape of a shard"))
        if self.offset is not None:
            object.__setattr__(self, "offset", as_shape(self.offset, "the offset of a shard"))
            if len(self.offset) != len(self.global_shape):
                raise ArgumentError(
                    f"a shard at {self.offset} of a tensor of shape {self.global_shape}: as many numbers are needed"
                )


class FactKind(NamedTuple):
    """What arrays have in common: a `Fact` without its name."""

    part: Part
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...] | None = None
    may_differ: bool = False

    @property
    def n_bytes(self) -> int:
        """Bytes that an array takes in a file."""
        return math.prod(self.shape) * dtypes.bits(self.dtype) // 8


class Fact(NamedTuple):
    """One array of a rank, without its memory.

    Attributes:
        name: its key, or the name of a join.
        part: "model" or "optimizer".
        dtype: its safetensors name.
        shape: in elements.
        offset: that of a `Shard`, or None.
        may_differ: whether copies of it may differ between ranks.
    """

    name: str
    part: Part
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...] | None = None
    may_differ: bool = False


@dataclass(frozen=True)
class Facts(Columns[FactKind, Fact]):
    """The arrays of a rank without their memory, which other ranks can have.

    Example:
        >>> facts = Facts.of([Fact("a", "model", "F32", (2,)), Fact("b", "model", "F32", (2,))])
        >>> facts.names, len(facts.kinds), facts.kind_of
        (('a', 'b'), 1, (0, 0))
    """

    names: tuple[str, ...] = ()
    kinds: tuple[FactKind, ...] = ()
    kind_of: tuple[int, ...] = ()

    @staticmethod
    def kind(fields: Iterable[Any]) -> FactKind:
        """What a row says after its name."""
        return FactKind(*fields)

    def __iter__(self) -> Iterator[Fact]:
        return (Fact(name, *kind) for name, kind in self.named_kinds())

    @cached_property
    def digest(self) -> str:
        """A digest of the names, and of which have the same kind."""
        digest = hashlib.blake2b("".join(self.names).encode("utf-8", "surrogatepass"))
        for column in (map(len, self.names), self.kind_of):
            digest.update(array("Q", column).tobytes())
        return digest.hexdigest()


class LocalArray(NamedTuple):
    """One array of this rank, ready to be written.

    Attributes:
        name: as in `Fact`, and so are the others.
        part: see there.
        dtype: see there.
        shape: see there.
        array: the memory, in any dtype with elements of that width.
        offset: see there.
    """

    name: str
    part: Part
    dtype: str
    shape: tuple[int, ...]
    array: np.ndarray
    offset: tuple[int, ...] | None = None

    def crc32c(self) -> int:
        """Sum of the bytes, in the order in which they are written."""
        return _core.crc32c(np.ascontiguousarray(self.array).reshape(-1).view(np.uint8))


@dataclass(frozen=True, eq=False)
class LocalArrays(Mapping[str, LocalArray]):
    """The arrays of this rank by name.

    A rank can have 100,000 of them, which differ in name and memory alone: one object for each would take longer than
    to write them.

    Attributes:
        names: their names, each once.
        memory: the memory of each.
        kinds: what they have in common.
        kind_of: the number of the kind of each.
        global_shapes: of those that are a `Shard`.
    """

    names: Sequence[str]
    memory: Sequence[np.ndarray]
    kinds: Sequence[FactKind]
    kind_of: Sequence[int]
    global_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, arrays: Iterable[LocalArray]) -> LocalArrays:
        """Those of single arrays, each name once."""
        given = list(arrays)
        facts = Facts.of(Fact(name, part, dtype, shape, offset) for name, part, dtype, shape, _, offset in given)
        return cls(facts.names, [one.array for one in given], facts.kinds, facts.kind_of)

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __getitem__(self, name: str) -> LocalArray:
        number = self._numbers[name]
        part, dtype, shape, offset, _ = self.kinds[self.kind_of[number]]
        return LocalArray(name, part, dtype, shape, self.memory[number], offset)

    @cached_property
    def _numbers(self) -> Mapping[str, int]:
        return dict(zip(self.names, range(len(self.names)), strict=True))

    @property
    def twin(self) -> str | None:
        """A name that two arrays have; None: there is none."""
        numbers = self._numbers
        if len(numbers) == len(self.names):
            return None
        return next(name for number, name in enumerate(self.names) if numbers[name] != number)

    @property
    def facts(self) -> Facts:
        """The same without the memory."""
        return Facts(tuple(self.names), tuple(self.kinds), tuple(self.kind_of))

    @cached_property
    def n_bytes(self) -> int:
        """Bytes that they take in files."""
        sizes = [kind.n_bytes for kind in self.kinds]
        return sum(map(sizes.__getitem__, self.kind_of))

    def only(self, names: Sequence[str]) -> LocalArrays:
        """Some of them, in this order."""
        if list(names) == self.names:
            return self
        found = _core.reordered(self.names, names, (self.memory, self.kind_of))
        if found is None:  # equal names are different objects
            numbers = list(map(self._numbers.__getitem__, names))
            found = list(map(self.memory.__getitem__, numbers)), list(map(self.kind_of.__getitem__, numbers))
        return LocalArrays(names, found[0], self.kinds, found[1])

    def tensors(self) -> _core.ArrayColumns:
        """As the core writes them."""
        kinds = [(kind.dtype, kind.shape) for kind in self.kinds]
        return _core.ArrayColumns(self.names, kinds, self.kind_of, self.memory)


def local_arrays(model: Mapping[str, object] | None, optimizer: Mapping[str, object] | None) -> LocalArrays:
    """The arrays of this rank by name: those of the model, then those of the optimizer.

    Raises:
        ArgumentError: a name that a file cannot have or that is in both, or a value that is not an array.
        UnsupportedError: a dtype that the format lacks; a sparse, quantized or distributed tensor.
        MismatchError: a shard that leaves its tensor.

    Example:
        >>> arrays = local_arrays({"w": np.zeros((2, 3), np.float32)}, None)
        >>> arrays["w"].dtype, arrays.n_bytes
        ('F32', 24)
    """
    names: list[str] = []
    memory: list[np.ndarray] = []
    numbers: dict[FactKind, int] = {}
    global_shapes: dict[str, tuple[int, ...]] = {}
    kind_of: list[int] = []
    most_distinct = 0  # plain names of one dict: those of a subclass of `str` may say themselves what they are equal to
    parts: tuple[tuple[Part, object], ...] = (("model", model), ("optimizer", optimizer))
    for part, given in parts:
        if not isinstance(given, Mapping | None):
            raise ArgumentError(f"`{part}` is a {type(given).__name__}, expected a mapping of names to arrays")
        own_names: list[Any] = list(given or ())
        is_plain = _are_free(own_names)
        names += own_names if is_plain else map(_checked_name, own_names)
        if is_plain and type(given) is dict:
            most_distinct = max(most_distinct, len(own_names))
        # Another mapping may make each value when it is asked for it.
        values: list[Any] = list(given.values()) if type(given) is dict else [None]
        # No statement for each array: 100,000 of them take as long as to write the arrays.
        found = _core.array_kinds(values)
        if found is not None and all(dtype in _PLAIN for dtype, _ in found[0]):
            own_kinds = [FactKind(part, _PLAIN[dtype], shape) for dtype, shape in found[0]]
            own_numbers = [numbers.setdefault(kind, len(numbers)) for kind in own_kinds]
            is_same = own_numbers == list(range(len(own_numbers)))
            kind_of += found[1] if is_same else map(own_numbers.__getitem__, found[1])
            memory += values
            continue
        for name, value in (given or {}).items():
            array, own = _array(name, value, part)
            if isinstance(value, Shard):
                global_shapes[str.__str__(name)] = value.global_shape
            memory.append(array)
            kind_of.append(numbers.setdefault(own, len(numbers)))
    made = LocalArrays(names, memory, tuple(numbers), kind_of, global_shapes)
    if most_distinct < len(names) and (name := made.twin) is not None:
        raise _named_twice(made, name)
    return made


def as_array(value: object) -> tuple[np.ndarray, str]:
    """The value as an array over the same memory where that can be, and its dtype.

    Args:
        value: a numpy array or scalar; a torch tensor (one on a device is copied to the host); anything with DLPack
            or the buffer protocol. Big-endian arrays are turned round, in a copy.

    Raises:
        ArgumentError: it is none of these.
        UnsupportedError: the format lacks the dtype, or a tensor has no one array.

    Example:
        >>> as_array(memoryview(b"abc"))
        (array([97, 98, 99], dtype=uint8), 'U8')
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _of_tensor(value, torch)
    array: np.ndarray | None = None
    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(value, masked.MaskedArray):
        raise UnsupportedError("a masked array has a mask, which no file holds", hint="pass `.filled()` or `.data`")
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
    elif hasattr(value, "__dlpack__"):
        try:
            array = np.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            # numpy's DLPack knows neither bfloat16 nor the 8-bit floats; what has them often has an array of them too.
            if not hasattr(value, "__array__"):
                raise UnsupportedError(f"a {type(value).__name__} cannot be had as an array: {error}") from error
            array = np.asarray(value)
    elif not isinstance(value, str):
        try:
            array = np.asarray(memoryview(value))  # type: ignore[arg-type]
        except (TypeError, ValueError, NotImplementedError):
            array = None
    if array is None:
        raise ArgumentError(
            f"expected an array, a tensor, or what has DLPack or the buffer protocol, found {type(value).__name__}",
            hint="numbers are saved as arrays (`np.int64(7)`); other state belongs into `extra=`",
        )
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return array, dtypes.name_of(array.dtype)


def as_shape(value: Sequence[object], what: str) -> tuple[int, ...]:
    """A sequence of integers from 0 on, numpy's included. Raises ArgumentError if it is none."""
    try:
        numbers = tuple(operator.index(one) for one in value)  # type: ignore[arg-type]
    except TypeError:
        numbers = (-1,)
    if any(n < 0 for n in numbers):
        raise ArgumentError(f"{what} is {value!r}, expected integers from 0 on")
    return numbers


def _array(name: str, value: object, part: Part) -> tuple[np.ndarray, FactKind]:
    shard = value if isinstance(value, Shard) else None
    try:
        array, dtype = as_array(value if shard is None else shard.array)
        shape = dtypes.tensor_shape(dtype, array.shape)
    except (ArgumentError, MismatchError, UnsupportedError) as error:
        raise type(error)(f"saving {show(name)}: {error.message}", key=name, hint=error.hint) from None
    if shard is not None and shard.offset is not None:
        ends = [first + n for first, n in zip(shard.offset, shape, strict=False)]
        if len(shape) != len(shard.offset) or any(e > n for e, n in zip(ends, shard.global_shape, strict=True)):
            raise MismatchError(
                f"{show(name)}: a shard of shape {shape} at {shard.offset} leaves the tensor of shape "
                f"{shard.global_shape}",
                key=name,
            )
    return array, FactKind(part, dtype, shape, None if shard is None else shard.offset)


def _of_tensor(tensor: Any, torch: Any) -> tuple[np.ndarray, str]:
    """A tensor's memory as an array, for every dtype: both sides can look at it as integers of the same width."""
    name = _torch_dtype(tensor.dtype)
    if tensor.is_nested:
        raise UnsupportedError("a nested tensor has no one array", hint="pass `tensor.to_padded_tensor(...)`")
    if tensor.layout != torch.strided:
        raise UnsupportedError(f"a tensor of layout {tensor.layout} has no one array", hint="pass `tensor.to_dense()`")
    if hasattr(tensor, "to_local"):
        raise UnsupportedError("a distributed tensor has no one array", hint="pass `tensor.to_local()` in a `Shard`")
    if tensor.device.type == "meta":
        raise UnsupportedError("a tensor on device `meta` has no content")
    plain = tensor.detach().resolve_conj().resolve_neg()
    if tensor.device.type != "cpu":
        plain = plain.cpu()
    return memory_of(plain, torch).view(dtypes.numpy_dtype(name)), name


@functools.cache
def _torch_dtype(dtype: Any) -> str:
    try:
        return dtypes.parse_dtype(dtype)
    except UnsupportedError:
        raise UnsupportedError(f"tensors of dtype {dtype} have no place in a safetensors file") from None


def _named_twice(arrays: LocalArrays, name: str) -> ArgumentError:
    found = zip(arrays.names, arrays.kind_of, strict=True)
    parts = {arrays.kinds[kind].part for one, kind in found if one == name}
    what = "a tensor of the model and one of the optimizer" if len(parts) > 1 else f"two tensors of the {parts.pop()}"
    return ArgumentError(
        f"{show(name)} names {what}",
        key=name,
        hint="rename one of them: a reader could not tell which is meant",
    )


def _are_free(names: Sequence[object]) -> bool:
    """Whether no file gives one of these names a meaning, and all are plain."""
    return _core.are_plain(names, _MAX_NAME_BYTES) and "__metadata__" not in names


def _checked_name(name: object) -> str:
    if not isinstance(name, str):
        raise ArgumentError(f"the name of a tensor must be text, found {type(name).__name__}")
    try:
        n_bytes = len(name.encode())
    except UnicodeEncodeError as error:
        raise ArgumentError(f"the name of a tensor has no UTF-8 form: {error}") from None
    if name == "__metadata__" or not 1 <= n_bytes <= _MAX_NAME_BYTES:
        raise ArgumentError(
            f"{show(name)} cannot name a tensor: a name has from 1 to {_MAX_NAME_BYTES} bytes, and `__metadata__` is "
            "taken",
            key=name,
        )
    if any(c < " " or "\x7f" <= c < "\xa0" for c in name):
        raise ArgumentError(f"{show(name)} has a control character in it", key=name)
    return str.__str__(name)  # a subclass, such as of an enumeration, may print itself in another way
