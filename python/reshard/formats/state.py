"""State of a trainer as JSON: `extra-<rank>.json`, with its arrays in `extra-<rank>.arrays`.

    {"version": 1, "state": VALUE}

Values that JSON can represent are stored as such: None, bool, text, 64-bit integers, finite floats, lists, and dicts
with text as keys. Every other value is an object with one entry whose name begins with "!"; a dict with such a key is
encoded as "!dict":

    {"!int": "-1f..."}                hexadecimal, of more than 64 bits
    {"!float": "nan"}                 or "inf", "-inf", or the 16 hexadecimal digits of another nan
    {"!complex": [VALUE, VALUE]}      {"!bytes": "<base64>"}      {"!text": "<hexadecimal UTF-8>"}: unpaired surrogates
    {"!tuple": [VALUE, ...]}          {"!set": [...]}             {"!frozenset": [...]}
    {"!dict": [KEY, VALUE, ...]}      {"!ordered": [...]}         {"!counter": [...]}
    {"!scalar": [DTYPE, "<hex>"]}     a numpy scalar; {"!numpy.str": "..."}, {"!numpy.bytes": "<base64>"}
    {"!array": [NAME, DTYPE, SHAPE]}  a numpy array, stored under this name in the other file
    {"!tensor": [NAME, DTYPE, SHAPE]} a torch tensor, likewise; {"!torch.Size": [...]}, {"!torch.dtype": "bfloat16"},
                                      {"!torch.device": "cuda:0"}
    {"!torch.save": [NAME, "U8", [N]]}  a value as the bytes that `torch.save` made of it, stored under this name

A DTYPE is a name of the safetensors format, or numpy's spelling (`<M8[ns]`, `int4`); arrays of the latter are stored in
the other file as bytes, U8. Types are exact: a value is restored with its type. Therefore a subclass (an enum, a named
tuple, a defaultdict with its factory, a masked array) is refused: its additional data would be lost. Values that occur
twice are stored twice. Whether a tensor requires a gradient is not stored.

Torch is used if it is installed. Where it cannot be imported at loading, a tensor is restored as a numpy array, a
`torch.Size` as a tuple, a dtype and a device as text ("torch.bfloat16", "cuda:0").

Files are untrusted: no code is run, and nothing is imported or called by a name in the file.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import sys
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from reshard import _core, dtypes
from reshard.documents.strict_json import parse_json
from reshard.errors import ArgumentError, DamagedFileError, UnsupportedError
from reshard.formats.state_loader import INT64, MAX_DEPTH, Loader, TorchSaved, damaged, dtype_spelling, float_name
from reshard.values.tensor_memory import memory_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

MAX_BYTES = 64 << 20
"""Largest size of a text in bytes, without arrays."""

RANK_LOCAL = "rank_local"
"""The reserved name of state that a save stores for each rank: no value of `extra` has it."""

_VERSION = 1
_CONTAINERS: dict[type, str] = {
    list: "",
    tuple: "!tuple",
    set: "!set",
    frozenset: "!frozenset",
    dict: "!dict",
    OrderedDict: "!ordered",
    Counter: "!counter",
}
_MAX_SHOWN = 40  # characters of a key in a path


@dataclass(frozen=True)
class PerRank:
    """A value of `extra`, or a sampler, whose state every rank saves separately.

    Attributes:
        value: the value.
        reshape: makes the state of a rank when the number of ranks changed: it is called on every rank as
            `reshape(states, rank, world_size)`, with the states of all ranks that saved, in their order, and the rank
            and number of ranks now. None: another number of ranks is refused. For objects with `load_state_dict` of a
            `Checkpointer`; `reshard.save` ignores it.

    Example:
        >>> import torch
        >>> from reshard.torch import Checkpointer
        >>> class Stream:
        ...     files = ["a", "b", "c"]
        ...     def state_dict(self):
        ...         return {"files": list(self.files)}
        ...     def load_state_dict(self, state):
        ...         self.files = state["files"]
        >>> def divided(states, rank, world_size):
        ...     return {"files": [name for state in states for name in state["files"]][rank::world_size]}
        >>> with Checkpointer("streams", signals=()) as checkpointer:
        ...     start = checkpointer.resume(model=torch.nn.Linear(1, 1), sampler=PerRank(Stream(), reshape=divided))
    """

    value: object
    reshape: Callable[[list[Any], int, int], Any] | None = None


def per_rank(value: object) -> PerRank:
    """Mark a value of `extra` as rank-local: every rank saves its value and loads it again. Short for `PerRank(value)`.

    Example:
        >>> extra = {"scheduler": {"last_epoch": 3}, "rng": per_rank(b"state")}
        >>> extra["rng"].value
        b'state'
    """
    return PerRank(value)


def file_name(rank: int) -> str:
    """Name of the file with the state of a rank.

    Example:
        >>> file_name(3), arrays_file_name(3)
        ('extra-0000003.json', 'extra-0000003.arrays')
    """
    return f"extra-{rank:07d}.json"


def arrays_file_name(rank: int) -> str:
    """Name of the safetensors file with the arrays of a rank's state. Without arrays there is no such file."""
    return f"extra-{rank:07d}.arrays"


def dump(value: object, name: str = "extra") -> tuple[str, dict[str, np.ndarray]]:
    """Encode a value as a text and arrays.

    Args:
        value: a value of the types above, with at most 200 levels of nesting.
        name: its name in messages.

    Returns:
        The text, and the arrays by the names in it, in dtypes of the safetensors format. They may share the memory of
        the value: changes to it before they are written change what is written.

    Raises:
        ArgumentError: a part has another type, contains itself or is nested too deeply; the message gives its path.

    Example:
        >>> text, arrays = dump({"betas": (0.9, 0.95), "seen": {7}, "mean": np.zeros(2, np.float32)})
        >>> text
        '{"version":1,"state":{"betas":{"!tuple":[0.9,0.95]},"seen":{"!set":[7]},"mean":{"!array":["0","F32",[2]]}}}'
        >>> arrays["0"].tolist()
        [0.0, 0.0]
    """
    dumper = _Dumper()
    try:
        record = {"version": _VERSION, "state": dumper.encode(value, name, 0)}
        text = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except RecursionError:
        raise ArgumentError(f"`{name}` is nested too deeply for the recursion limit at this call") from None
    if len(text) > MAX_BYTES or len(text.encode()) > MAX_BYTES:
        raise ArgumentError(
            f"`{name}` makes a text of more than {MAX_BYTES} bytes", hint="pass many numbers as a numpy array"
        )
    return text, dumper.arrays


def digest_of(value: object, name: str = "extra") -> str:
    """A digest of the encoding of a value. It does not depend on the order of a dict with text as keys.

    Args:
        value: as in `dump`.
        name: its name in messages.

    Raises:
        ArgumentError: as `dump`.

    Example:
        >>> digest_of({"a": 1, "b": np.ones(2)}) == digest_of({"b": np.ones(2), "a": 1})
        True
    """
    text, arrays = dump(_in_order(value), name)
    digest = hashlib.blake2b(text.encode(), digest_size=16)
    for array in arrays.values():
        digest.update(_core.crc32c(np.ascontiguousarray(array).reshape(-1).view(np.uint8)).to_bytes(4, "little"))
    return digest.hexdigest()


def _in_order(value: Any, depth: int = 0) -> Any:
    """The value with the entries of its dicts sorted by key."""
    if type(value) is dict and depth < MAX_DEPTH and all(type(key) is str for key in value):
        return {key: _in_order(value[key], depth + 1) for key in sorted(value)}
    if type(value) in (list, tuple) and depth < MAX_DEPTH:
        return type(value)(_in_order(one, depth + 1) for one in value)
    return value


def load(text: str | bytes, arrays: Mapping[str, np.ndarray], name: str = "extra") -> Any:
    """Decode a value that `dump` encoded.

    Args:
        text: the text.
        arrays: the arrays by name. They become part of the value without a copy, where that is possible.
        name: name of the file in messages.

    Raises:
        DamagedFileError: the text is invalid, or the arrays do not match it.
        UnsupportedError: it has a later version, or a dtype that this numpy or torch does not have.

    Example:
        >>> load(*dump({3: Counter("aab"), "x": float("inf")}))
        {3: Counter({'a': 2, 'b': 1}), 'x': inf}
    """
    data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    if len(data) > MAX_BYTES:
        raise DamagedFileError(f"`{name}` has more than {MAX_BYTES} bytes, the limit of such a file", path=name)
    record = parse_json(data, name, max_depth=2 * MAX_DEPTH + 4)
    if not isinstance(record, dict) or "version" not in record:
        damaged(name, "there is no version")
    if record["version"] != _VERSION or record["version"] is True:
        raise UnsupportedError(
            f"`{name}` is state of version {str(record['version'])[:20]!a}; this release reads version {_VERSION}",
            path=name,
        )
    if set(record) != {"version", "state"}:
        damaged(name, "the entries are not `version` and `state`")
    loader = Loader(name, dict(arrays))
    try:
        value = loader.decode(record["state"], 0)
    except RecursionError:
        damaged(name, "it is nested too deeply")
    if loader.arrays:
        damaged(name, f"there are arrays that no value refers to: {sorted(loader.arrays)[:3]!a}")
    return value


class _Dumper:
    """Encodes one value and collects its `arrays`."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self._open: set[int] = set()  # containers that are being encoded: one that occurs again is a cycle

    def encode(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if value is None or kind is bool or (kind is int and value in INT64):
            return value
        if kind is str:
            return value if _is_valid_unicode(value) else {"!text": value.encode(errors="surrogatepass").hex()}
        if kind is float:
            return value if math.isfinite(value) else {"!float": float_name(value)}
        if kind is int:
            return {"!int": f"{value:x}"}
        if kind is complex:
            return {"!complex": [self.encode(part, path, depth) for part in (value.real, value.imag)]}
        if kind is bytes:
            return {"!bytes": base64.b64encode(value).decode()}
        if kind is np.ndarray:
            return {"!array": self._array(value, path)}
        if isinstance(value, np.generic) and kind is value.dtype.type:
            return self._scalar(value, path)
        if kind is TorchSaved:
            return {"!torch.save": self._array(np.frombuffer(value.data, np.uint8), path)}
        if kind.__module__.split(".")[0] == "torch" and "torch" in sys.modules:
            return self._of_torch(value, path)
        return self._container(value, path, depth)

    def _container(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        tag = _CONTAINERS.get(kind)
        if tag is None:
            _refuse(value, path)
        if id(value) in self._open:
            raise ArgumentError(f"{path} contains itself", key=path)
        if depth == MAX_DEPTH:
            raise ArgumentError(f"{path[:200]}... has more than {MAX_DEPTH} levels of nesting", key=path)
        self._open.add(id(value))
        is_plain = kind is dict and all(type(key) is str and key[:1] != "!" and _is_valid_unicode(key) for key in value)
        named: dict[str, Any] = {}
        items: list[Any] = []  # filled by loops: until Python 3.12 a comprehension counts as a call
        if isinstance(value, dict):
            for key, item in value.items():
                where = f"{path}[{_shown(key)}]"
                if is_plain:
                    named[key] = self.encode(item, where, depth + 1)
                else:
                    items.append(self.encode(key, f"{where} (the key)", depth + 1))
                    items.append(self.encode(item, where, depth + 1))
        else:
            for i, item in enumerate(value):
                where = f"{path}[{i}]" if kind in (list, tuple) else f"{path}{{{_shown(item)}}}"
                items.append(self.encode(item, where, depth + 1))
        self._open.discard(id(value))
        if kind in (set, frozenset):
            items.sort(key=json.dumps)  # equal states give equal files
        return named if is_plain else items if kind is list else {tag: items}

    def _array(self, array: np.ndarray, path: str) -> list[Any]:
        spelling = _spelling(array.dtype, path)
        if not array.flags.c_contiguous:
            array = array.copy(order="C")
        is_known = spelling in dtypes.NAMES
        return self._stored(array if is_known else array.reshape(-1).view(np.uint8), spelling, array.shape)

    def _stored(self, array: np.ndarray, spelling: str, shape: Iterable[int]) -> list[Any]:
        name = str(len(self.arrays))
        self.arrays[name] = array
        return [name, spelling, list(shape)]

    @staticmethod
    def _scalar(value: np.generic, path: str) -> dict[str, Any]:
        # As an array these would lose NULs at the end, which numpy treats as padding.
        if type(value) is np.str_:
            return {"!numpy.str": str.__str__(value).encode(errors="surrogatepass").hex()}
        if type(value) is np.bytes_:
            return {"!numpy.bytes": base64.b64encode(bytes(value)).decode()}
        return {"!scalar": [_spelling(value.dtype, path), value.tobytes().hex()]}

    def _of_torch(self, value: Any, path: str) -> dict[str, Any]:
        torch = sys.modules["torch"]
        if type(value) is torch.Size:
            return {"!torch.Size": list(value)}
        if type(value) is torch.dtype:
            return {"!torch.dtype": str(value).removeprefix("torch.")}
        if type(value) is torch.device:
            return {"!torch.device": str(value)}
        if type(value) is not torch.Tensor:
            _refuse(value, path)
        if value.layout != torch.strided or value.is_quantized:
            raise ArgumentError(f"{path} is not a dense tensor", key=path, hint="pass `tensor.to_dense()`")
        if value.device.type != "cpu":
            raise ArgumentError(f"{path} is a tensor on device {value.device}", key=path, hint="pass `tensor.cpu()`")
        try:
            spelling = "<c16" if value.dtype == torch.complex128 else dtypes.parse_dtype(value.dtype)
        except UnsupportedError:
            raise ArgumentError(f"{path} is a tensor of dtype {value.dtype}, which cannot be saved", key=path) from None
        plain = value.detach().resolve_conj().resolve_neg().contiguous()
        data = memory_of(plain.reshape(-1).view(torch.uint8), torch)
        if spelling != "<c16":
            data = data.view(dtypes.numpy_dtype(spelling)).reshape(tuple(value.shape))
        return {"!tensor": self._stored(data, spelling, value.shape)}


def _refuse(value: object, path: str) -> NoReturn:
    kind = type(value)
    hint = "pass its `state_dict()`, or plain values: numbers, text, bytes, lists, tuples, sets, dicts, arrays"
    if isinstance(value, PerRank):
        hint = "`per_rank` must enclose a whole value of `extra=`, not a part of it"
    elif any(isinstance(value, plain) for plain in (dict, list, tuple, set, frozenset, str, int, float, np.ndarray)):
        base = next(plain.__name__ for plain in kind.__mro__[1:] if plain.__module__ in ("builtins", "numpy"))
        hint = f"the additional data of {kind.__name__} would be lost: pass the {base}"
    elif hasattr(value, "detach"):
        hint = "pass `value.detach()`, and `.to_local()` for a distributed tensor"
    name = f"{kind.__module__}.{kind.__qualname__}"
    raise ArgumentError(f"{path} is a {name}, which cannot be saved", key=path, hint=hint)


def _spelling(dtype: np.dtype[Any], path: str) -> str:
    spelling = dtype_spelling(dtype)
    if spelling is None:
        raise ArgumentError(f"{path} has numpy dtype {dtype}, which cannot be saved", key=path)
    return spelling


def _is_valid_unicode(text: str) -> bool:
    """Whether it is valid Unicode, without unpaired surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(key: object) -> str:
    try:
        text = json.dumps(key) if isinstance(key, str) else ascii(key)
    except Exception:  # noqa: BLE001  a user-defined type, or an integer with too many digits to print
        text = type(key).__name__
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
