"""State of a trainer is restored exactly, every type and every bit, or an error gives the path of the value."""

from __future__ import annotations

import base64
import collections
import contextlib
import enum
import itertools
import json
import math
import random
import re
import struct
import sys
from collections import Counter, OrderedDict
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from reshard import dtypes
from reshard.errors import ArgumentError, DamagedFileError, UnsupportedError
from reshard.formats.state import PerRank, arrays_file_name, dump, file_name, load, per_rank


def same(a: Any, b: Any) -> bool:
    """Whether two values are of the same types and the same bits, in the same order where there is one."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, np.ndarray | np.generic):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, torch.Tensor):
        flat = (t.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
        return bool(a.dtype == b.dtype and a.shape == b.shape and torch.equal(*flat))
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(k, m) and same(v, w) for (k, v), (m, w) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, set | frozenset):
        left = list(b)
        for x in a:
            match = next((i for i, y in enumerate(left) if same(x, y)), None)
            if match is None:
                return False
            del left[match]
        return not left
    return bool(a == b)


def check(value: Any) -> None:
    text, arrays = dump(value)
    text.encode()  # is whole Unicode
    assert all(array.flags.c_contiguous and array.dtype in map(np.dtype, KNOWN) for array in arrays.values())
    stored = {name: array.copy() for name, array in arrays.items()}
    back = load(text.encode(), stored)
    assert same(back, value), (value, back)


KNOWN = [dtypes.numpy_dtype(name) for name in dtypes.NAMES]
NUMPY = [*KNOWN, *map(np.dtype, [">f4", ">i8", "c16", "M8[ns]", "m8[25s]", "M8", "U3", "S5", ">U2"])]
NUMPY += [np.dtype(kind) for kind in (ml_dtypes.int4, ml_dtypes.uint2, ml_dtypes.float8_e3m4, ml_dtypes.float8_e4m3)]
SHAPES = [(), (0,), (3,), (2, 0, 2), (2, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", NUMPY, ids=str)
def test_arrays_of_every_dtype(dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    n_bytes = math.prod(shape) * dtype.itemsize
    data = bytes(i % 2 for i in range(n_bytes)) if dtype.kind in "bU" else np.random.default_rng(0).bytes(n_bytes)
    if dtype.kind == "U":
        data = (
            np.full(n_bytes // 4, ord("x"), dtype.newbyteorder("=").str[0] + "u4")
            .astype(">u4" if dtype.byteorder == ">" else "<u4")
            .tobytes()
        )
    array = np.ndarray(shape, dtype, bytearray(data) if data else None)
    check(array)
    check([array.T, array[::-1] if array.ndim else array, np.asfortranarray(array)])
    if dtype.kind not in "SU" and array.ndim == 1 and array.size and dtype.isnative:
        check({"scalar": array[0]})


SCALARS = [
    np.float64(-0.0), np.float32("nan"), np.bool_(True), np.int8(-1), np.uint64(2**64 - 1), np.complex128(1 + 2j),
    np.datetime64("2025-03-01T12"), np.datetime64("NaT"), np.timedelta64(3, "ms"), np.str_("a\0"), np.str_(""),
    np.str_("\ud800"), np.bytes_(b"a\0"), np.bytes_(b""), ml_dtypes.bfloat16(1.5), ml_dtypes.int4(-8),
]  # fmt: skip


@pytest.mark.parametrize("value", SCALARS, ids=repr)
def test_scalars_of_numpy(value: Any) -> None:
    check(value)
    check({value: [value]})


TORCH = [
    name
    for name in vars(torch).values()
    if isinstance(name, torch.dtype) and not str(name).startswith(("torch.q", "torch.bits", "torch.int", "torch.uint"))
] + [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64]


@pytest.mark.parametrize("dtype", sorted(set(TORCH), key=str), ids=str)
def test_tensors_of_every_dtype(dtype: torch.dtype) -> None:
    data = torch.arange(96, dtype=torch.uint8) % 2
    tensor = data.view(dtype) if dtype != torch.bool else data.bool()
    if "complex32" in str(dtype):
        with pytest.raises(ArgumentError, match=r"extra is a tensor of dtype torch.b?complex32, which cannot be saved"):
            dump(tensor)
        return
    check(tensor)
    check([tensor[:1].reshape(()), tensor[:0], tensor[:6].reshape(2, 3).T, tensor[::2], tensor.reshape(2, 1, -1)])
    check({"dtype": dtype})


def test_what_else_torch_has() -> None:
    check([torch.Size([2, 0]), torch.Size([]), torch.device("cpu"), torch.device("cuda:3"), torch.device("meta")])
    conjugated = torch.tensor([1 + 2j, 3 - 1j]).conj()
    assert load(*dump(conjugated)).tolist() == [1 - 2j, 3 + 1j]
    back = load(*dump(torch.ones(2, requires_grad=True)))
    assert back.tolist() == [1, 1]
    assert not back.requires_grad


def test_a_tensor_loaded_from_memory_that_is_read_only_or_not_aligned() -> None:
    text, arrays = dump(torch.arange(3, dtype=torch.float64))
    read_only = arrays["0"].copy()
    read_only.flags.writeable = False
    shifted = np.frombuffer(bytearray(b"x" + arrays["0"].tobytes()), np.uint8)[1:].view(np.float64)
    for array in (read_only, shifted):
        tensor = load(text, {"0": array})
        tensor += 1
        assert tensor.tolist() == [1, 2, 3]


def test_where_torch_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    value = [torch.ones(2, dtype=torch.bfloat16), torch.Size([3]), torch.float32, torch.device("cuda:1")]
    text, arrays = dump(value)
    monkeypatch.setitem(sys.modules, "torch", None)
    array, *others = load(text, arrays)
    assert others == [(3,), "torch.float32", "cuda:1"]
    assert isinstance(array, np.ndarray)
    assert array.dtype == ml_dtypes.bfloat16


VALUES: list[Any] = [
    None, True, False, 0, 1 << 63, -(1 << 63), -(1 << 63) - 1, (1 << 63) - 1, -(1 << 20_000), 1.0, 1e308, 5e-324, -0.0,
    {1 << 20_000: 1},
    0.1, 1e16, math.inf, -math.inf, math.nan, -math.nan, struct.unpack(">d", bytes.fromhex("7ff0000000000001"))[0],
    complex("nan-0j"), complex(-0.0, math.inf), "", "a\nb", "\ud800", "\ud83d\ude00", "\U0001f600", "\0",
    b"", b"\xff\0",
    [], (), {}, set(), frozenset(), OrderedDict(), Counter(), [[]], ((),), {"": ""},
    {"!tuple": [1]}, {"!": 1, "a": 2}, {"a": {"!dict": []}}, {"\ud800": 1}, {"__class__": "os.system"},
    {1: "a", "1": "b", None: "c", 2.5: "d", (1, ("x",)): "e", b"k": "f", frozenset({1, "1"}): "g", math.nan: 0},
    {True: 1}, {"z": 1, "a": 2}, OrderedDict([("z", 1), ("a", {2: 3})]), Counter({"a": 2, 3: -1, "f": 0.5}),
    {1, 1.5, "1", (1,), frozenset({2}), None, math.nan}, frozenset({math.inf, b"1"}),
    ([1], {"a": (1, [2])}, {(1,): {2}}),
    random.Random(0).getstate(), np.random.RandomState(0).get_state(),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=itertools.count())
def test_values(value: Any) -> None:
    check(value)
    check([value, {"a": value}, (value,)])


def hashables() -> st.SearchStrategy[Any]:
    leaves = (
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(st.characters())
        | st.text(st.sampled_from("!a\ud800\udc00"))
        | st.binary(max_size=20)
        | st.complex_numbers()
        | st.sampled_from(SCALARS)
        | st.sampled_from([torch.float8_e5m2, torch.Size([1, 2]), torch.device("cuda:0")])
    )
    return st.recursive(leaves, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4)


def values() -> st.SearchStrategy[Any]:
    some: list[np.dtype[Any]] = [np.dtype("f4"), np.dtype(">i2"), np.dtype("U2")]
    arrays = hnp.arrays(st.sampled_from(some), hnp.array_shapes(min_dims=0, max_side=3))
    tensors = arrays.filter(lambda array: array.dtype == np.float32).map(torch.tensor)

    def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        dicts = st.dictionaries(st.text(max_size=3) | hashables(), inner, max_size=3)
        lists = st.lists(inner, max_size=3)
        return (
            lists
            | lists.map(tuple)
            | st.sets(hashables(), max_size=3)
            | dicts
            | st.dictionaries(st.text(max_size=3), inner, max_size=3)
            | dicts.map(OrderedDict)
            | dicts.map(Counter)
        )

    return st.recursive(hashables() | arrays | tensors, containers, max_leaves=8)


@pytest.mark.slow(disk=False)
@settings(max_examples=100)
@given(values())
def test_any_value_comes_back(value: Any) -> None:
    check(value)


def test_a_readable_text() -> None:
    text, arrays = dump(
        {"scheduler": {"last_epoch": 3, "betas": (0.9, 0.95)}, "rng": torch.tensor([1, 2], dtype=torch.uint8)}
    )
    assert json.loads(text) == {
        "version": 1,
        "state": {
            "scheduler": {"last_epoch": 3, "betas": {"!tuple": [0.9, 0.95]}},
            "rng": {"!tensor": ["0", "U8", [2]]},
        },
    }
    assert arrays["0"].tolist() == [1, 2]


def test_equal_states_make_equal_texts() -> None:
    one, other = {0, 8}, {8, 0}
    assert list(one) != list(other)  # equal all the same
    assert dump(one) == dump(other)


class Colour(enum.IntEnum):
    RED = 1


class Point(NamedTuple):
    x: int


class OwnStr(str):
    __slots__ = ()


class Anything:
    def __reduce__(self) -> Any:
        raise AssertionError("pickled")


CYCLE: list[Any] = [1]
CYCLE.append({"again": (CYCLE,)})

REFUSED: list[tuple[Any, str]] = [
    (
        {"scheduler": {"state": [0, 1, 2, Anything()]}},
        f'extra["scheduler"]["state"][3] is a {__name__}.Anything',
    ),
    ({"a": (1, Colour.RED)}, f'extra["a"][1] is a {__name__}.Colour'),
    (Colour.RED, "the additional data of Colour would be lost: pass the int"),
    ([Point(1)], f"extra[0] is a {__name__}.Point"),
    (OwnStr("x"), "pass the str"),
    ({1: collections.defaultdict(list)}, "extra[1] is a collections.defaultdict"),
    ({(1, Anything): 2}, "(the key)[1] is a builtins.type"),
    ({Colour.RED}, "extra{"),
    ({"f": len}, 'extra["f"] is a builtins.builtin_function_or_method'),
    ({"a" * 100: Anything}, 'extra["' + "a" * 39 + "...]"),
    ({"\x1b[2J": Anything}, 'extra["\\u001b[2J"]'),
    (bytearray(b"x"), "extra is a builtins.bytearray"),
    ([per_rank(1)], "`per_rank` must enclose a whole value"),
    (np.ma.masked_array([1]), "the additional data of MaskedArray would be lost: pass the ndarray"),
    (np.array([object()]), "extra has numpy dtype object, which cannot be saved"),
    (np.zeros(2, [("a", "f4")]), "which cannot be saved"),
    (np.zeros(2, np.longdouble), "which cannot be saved"),
    (np.longdouble(1), "which cannot be saved"),
    (torch.nn.Parameter(torch.ones(2)), "pass `value.detach()`"),
    (torch.ones(2).to_sparse(), "extra is not a dense tensor"),
    (torch.ones(2, device="meta"), "extra is a tensor on device meta"),
    (torch.Generator(), "extra is a torch"),
    (CYCLE, 'extra[1]["again"][0] contains itself'),
]


@pytest.mark.parametrize(("value", "message"), REFUSED, ids=lambda value: re.sub("0x[0-9a-f]+", "", ascii(value))[:40])
def test_what_cannot_be_kept_is_named(value: Any, message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        dump(value)
    assert message in str(caught.value)


def nested(depth: int, kind: Any) -> Any:
    value: Any = kind([])
    for _ in range(depth - 1):
        value = kind([value])
    return value


def in_dict(items: list[Any]) -> dict[Any, Any]:
    return dict(zip("a", items, strict=False))


def by_number(items: list[Any]) -> dict[Any, Any]:
    return dict(enumerate(items))


@pytest.mark.parametrize("kind", [list, tuple, in_dict, by_number])
def test_how_deep_state_nests(kind: Any) -> None:
    deepest = nested(200, lambda items: kind(items or [math.nan]))
    text, arrays = dump(deepest)
    assert dump(load(text, arrays))[0] == text
    with pytest.raises(ArgumentError, match="more than 200 levels of nesting"):
        dump([deepest])


def test_state_too_large_for_text() -> None:
    with pytest.raises(ArgumentError, match="more than 67108864 bytes"):
        dump(["x" * (1 << 20)] * 65)
    with pytest.raises(DamagedFileError, match="has more than 67108864 bytes"):
        load(b" " * (65 << 20), {})


BAD: list[Any] = [
    {"!unknown": 1}, {"!tuple": [1], "more": 1}, {"more": 1, "!tuple": [1]}, {"!tuple": 1}, {"!tuple": {"a": 1}},
    {"!set": [1, 1]}, {"!set": [[1]]}, {"!set": [1, True]}, {"!frozenset": [{"!set": []}]}, {"!dict": [1]},
    {"!dict": [1, 2, 1, 3]}, {"!dict": [[], 1]}, {"!ordered": {"a": 1}}, {"!counter": 1}, {"!int": "1"},
    {"!int": "0x1"},
    {"!int": "1_0"}, {"!int": " " + "1" * 20}, {"!int": "A" * 20}, {"!int": 5}, {"!int": "0" * 20}, {"!float": "1.0"},
    {"!float": "NaN"}, {"!float": "3ff0000000000000"}, {"!float": "7ff0000000000000"}, {"!float": 1.0},
    {"!float": None},
    {"!complex": [1]}, {"!complex": [1, 2]}, {"!complex": ["a", 1.0]}, {"!complex": [1.0, {"!complex": [1.0, 1.0]}]},
    {"!bytes": "?"}, {"!bytes": "YQ"}, {"!bytes": "Y Q=="}, {"!bytes": 1}, {"!bytes": "\u00e9"}, {"!text": "zz"},
    {"!text": "ff"}, {"!text": "6"}, {"!text": 6}, {"!scalar": ["F32", "00"]}, {"!scalar": ["F32"]}, {"!scalar": "F32"},
    {"!scalar": ["O", "00" * 8]},
    {"!scalar": ["|O", "00" * 8]}, {"!scalar": ["<f16", "00" * 16]}, {"!scalar": ["|V4", "00" * 4]},
    {"!scalar": ["float32", "00" * 4]}, {"!scalar": ["<f4", "00" * 4]}, {"!scalar": ["f4,f4", "00" * 8]},
    {"!scalar": ["<U1", "00" * 4]}, {"!scalar": ["|S0", ""]}, {"!scalar": [["F32"], "00" * 4]},
    {"!numpy.str": "xyz"}, {"!numpy.bytes": "xyz"}, {"!array": ["0", "F32", [2]]}, {"!torch.Size": [1.0]},
    {"!torch.Size": [True]}, {"!torch.Size": 3}, {"!torch.dtype": 3}, {"!torch.dtype": "a.b"},
    {"!torch.device": "cpu; ls"},
    {"!torch.device": 0}, {"!": 1},
]  # fmt: skip


def file(state: Any) -> bytes:
    return json.dumps({"version": 1, "state": state}).encode()


@pytest.mark.parametrize("node", BAD, ids=ascii)
def test_a_damaged_value(node: Any) -> None:
    for state in (node, {"a": [node]}):
        with pytest.raises(DamagedFileError, match="`extra` is not valid saved state: "):
            load(file(state), {})


@pytest.mark.parametrize("name", ["float7", "onnx", "_dynamo", "Tensor", "__dict__"])
def test_a_torch_dtype_is_a_dtype(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__getattr__", lambda name: pytest.fail(f"torch was asked to import {name}"))
    with pytest.raises(UnsupportedError, match="this torch has no dtype"):
        load(file({"!torch.dtype": name}), {})


ARRAY = np.arange(6, dtype=np.float32)
RAW = np.zeros(16, np.uint8)
BAD_ARRAYS: list[tuple[Any, dict[str, np.ndarray]]] = [
    (["0", "F32", [6]], {}),
    (["1", "F32", [6]], {"0": ARRAY}),
    (["0", "F32", [2, 3]], {"0": ARRAY}),
    (["0", "I32", [6]], {"0": ARRAY}),
    (["0", "F32", [-6]], {"0": ARRAY}),
    (["0", "F32", [6.0]], {"0": ARRAY}),
    (["0", "F32", 6], {"0": ARRAY}),
    (["0", "F32", [6] + [1] * 32], {"0": ARRAY}),
    (["0", "F32"], {"0": ARRAY}),
    ([0, "F32", [6]], {"0": ARRAY}),
    (["0", "|O", [2]], {"0": RAW}),
    (["0", "<c16", [2]], {"0": RAW}),
    (["0", "<c16", [1]], {"0": RAW.reshape(4, 4)}),
    (["0", "<c16", [1]], {"0": RAW.view(np.int8)}),
    (["0", "|S0", [1 << 62]], {"0": RAW[:0]}),
    (["0", "<c16", [0, 1 << 62, 1 << 62]], {"0": RAW[:0]}),
    (["0", "<M8[fortnights]", [2]], {"0": RAW}),
    (["0", "<M8[D]; import os", [2]], {"0": RAW}),
    (["0", "F32", [6]], {"0": ARRAY, "1": ARRAY}),
]


@pytest.mark.parametrize(("node", "arrays"), BAD_ARRAYS, ids=lambda value: ascii(value)[:50])
def test_arrays_that_do_not_fit(node: Any, arrays: dict[str, np.ndarray]) -> None:
    for tag in ("!array", "!tensor"):
        with pytest.raises(DamagedFileError, match="`extra` is not valid saved state: "):
            load(file({tag: node}), arrays)


def test_an_array_is_named_once() -> None:
    node = {"!array": ["0", "F32", [6]]}
    with pytest.raises(DamagedFileError, match="or it is named twice"):
        load(file([node, node]), {"0": ARRAY})


FILES: list[tuple[bytes, str]] = [
    (b"", "is not valid JSON"),
    (b"\xff", "is not UTF-8"),
    (b"[]", "there is no version"),
    (b'{"state":1}', "there is no version"),
    (b'{"version":1}', "the entries are not"),
    (b'{"version":1,"state":1,"more":1}', "the entries are not"),
    (b'{"version":1,"state":NaN}', "NaN is not a JSON number"),
    (b'{"version":1,"state":{"a":1,"a":2}}', "is repeated"),
    (b'{"version":1,"state":9223372036854775808}', "does not fit 64 bits"),
    (b'{"version":1,"state":"\\ud800"}', "not valid Unicode"),
    (file(nested(201, list)), "more than 200 levels of nesting"),
    (file({"!tuple": [nested(200, list)]}), "more than 200 levels of nesting"),
    (b'{"version":1,"state":' + b"[" * 100_000, "nests deeper than"),
    (b'{"version":1,"state":' + b'{"!tuple":[' * 300 + b"]}" * 300 + b"}", "nests deeper than"),
]


@pytest.mark.parametrize(("data", "message"), FILES, ids=lambda value: ascii(value)[:40])
def test_a_damaged_file(data: bytes, message: str) -> None:
    with pytest.raises(DamagedFileError) as caught:
        load(data, {}, "x/extra-0000003.json")
    assert message in str(caught.value)
    assert "`x/extra-0000003.json`" in str(caught.value)


@pytest.mark.parametrize("version", [2, "1", True, None, 1.5])
def test_a_later_version(version: Any) -> None:
    with pytest.raises(UnsupportedError, match="this release reads version 1"):
        load(json.dumps({"version": version, "anything": "else"}), {})


def test_every_flip_of_a_bit_is_an_error_or_a_value() -> None:
    value = {"a": (1, -0.0, 1 << 70), 3: {b"x", 2.5}, "t": torch.ones(2), "n": np.float32(1), "d": torch.float16}
    text, arrays = dump(value)
    data = text.encode()
    for i in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[i // 8] ^= 1 << i % 8
        with contextlib.suppress(DamagedFileError, UnsupportedError):
            load(bytes(flipped), dict(arrays))


def test_names_and_marks() -> None:
    assert (file_name(7), arrays_file_name(7)) == ("extra-0000007.json", "extra-0000007.arrays")
    assert per_rank([1]) == PerRank([1])
    assert base64.b64decode(json.loads(dump(b"abc")[0])["state"]["!bytes"]) == b"abc"
