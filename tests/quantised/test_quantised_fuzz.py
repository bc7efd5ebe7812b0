"""What describes quantised weights, changed at random: names, dtypes, shapes, config.json, and texts beside the values.

Each is an error of the package, or weights whose parts are there, and values that are read within them.
`RESHARD_FUZZ_RUNS=1000000 pytest tests/quantised/test_quantised_fuzz.py` makes more of them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from functools import cache
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.helpers.quantised_samples import ARCHITECTURE, CONFIGS, Array, state_4bit, weight

import reshard
from reshard import _core
from reshard.errors import MismatchError, ReshardError
from reshard.quantised.config import Said
from reshard.quantised.dequantise import add_dequantised
from reshard.quantised.kinds import KINDS
from reshard.quantised.recognise import recognise
from reshard.values.indexing import row_major

if TYPE_CHECKING:
    from pathlib import Path

RUNS = 3_000
FILES = 100  # one of so many is written as a model and read
DTYPES = ("U8", "I8", "I32", "I64", "F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2", "F8_E8M0", "BOOL")
EXTENTS = (0, 1, 2, 3, 7, 16, 32, 64, 127, 128, 129, 256, 1 << 20, 1 << 31, 1 << 62, (1 << 63) - 1)
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 3, 4, 8, 16, 64, 128, 1 << 31, 1 << 63, 10**400, 0.5, -0.0, 1e308, float("nan"), "", "fp4",
    "gptq_v2", "awq", "fp8", "mxfp4", "bitsandbytes", "Int4Tensor", "MXTensor", "NVFP4Tensor", "Int8Tensor", "qdata",
    "float4_e2m1fn_x2", [], [128, 128], [1, 0], [[]], {}, {"_data": "x"}, ["qdata", "scale"],
)  # fmt: skip


def torchao(m: str, kind: str, rng: np.random.Generator) -> tuple[dict[str, Array], str]:
    """A tensor of torchao as its writer stores it, and its description in the header."""
    values = {"Int8Tensor": (64, 64), "Float8Tensor": (64, 64)}.get(kind, (64, 32))
    data = {"block_size": [1, 64] if kind in ("Int8Tensor", "Float8Tensor") else 16 if kind == "NVFP4Tensor" else 32}
    if kind == "MXTensor":
        data["elem_dtype"] = {"_type": "torch.dtype", "_data": "float4_e2m1fn_x2"}  # type: ignore[assignment]
    scale = (64, 1) if values[1] == 64 else (64, 64 // (16 if kind == "NVFP4Tensor" else 32))
    arrays: dict[str, Array] = {
        f"{m}._weight_qdata": rng.integers(0, 127, values, np.int8 if kind == "Int8Tensor" else np.uint8),
        f"{m}._weight_scale": np.ones(scale, np.float32 if values[1] == 64 else np.uint8),
    }
    return arrays, json.dumps({"_type": kind, "_data": data, "_tensor_data_names": ["qdata", "scale"]})


@cache
def sample(number: int) -> tuple[dict[str, Array], dict[str, Any], dict[str, str]]:
    """Tensors, `quantization_config` and headers of a small model."""
    kinds = (*CONFIGS, "nested", *("Int8Tensor", "Float8Tensor", "MXTensor", "NVFP4Tensor"))
    kind, rng = kinds[number % len(kinds)], np.random.default_rng(number)
    if kind == "nested":
        arrays = weight("bnb-4bit", "m.a", rng, 128, 128)
        state = state_4bit((128, 128), nested_blocksize=256, nested_dtype="float32", nested_offset=0.25)
        arrays |= {
            "m.a.weight.absmax": rng.integers(0, 255, 256, np.uint8),
            "m.a.weight.nested_absmax": np.ones(1, np.float32),
            "m.a.weight.nested_quant_map": np.linspace(-1, 1, 256, dtype=np.float32),
            "m.a.weight.quant_state.bitsandbytes__nf4": state,
        }
        return arrays, CONFIGS["bnb-4bit"], {}
    if kind in CONFIGS:
        return weight(kind, "m.a", rng, 128, 128) | weight(kind, "m.b", rng, 128, 256), CONFIGS[kind], {}
    arrays, text = torchao("m.a", kind, rng)
    return arrays, {"quant_method": "torchao"}, {"m.a.weight": text, "tensor_names": '["m.a.weight"]'}


def changed(value: Any, draw: Random) -> Any:
    """A JSON value with some of its parts replaced, added or left out."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        key = draw.choice(sorted(value))
        choice = draw.randrange(4)
        if choice == 0:
            return {name: one for name, one in value.items() if name != key}
        if choice == 1:
            return {**value, draw.choice(("group_size", "block_size", "nested_blocksize", "x")): draw.choice(VALUES)}
        return {**value, key: changed(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.6:
        at = draw.randrange(len(value))
        return [*value[:at], changed(value[at], draw), *value[at + draw.randrange(2) :]]
    return draw.choice(VALUES)


def changed_text(text: bytes, draw: Random) -> bytes:
    """A text with another JSON value, or with other bytes."""
    if draw.random() < 0.7:
        with contextlib.suppress(ValueError):
            return json.dumps(changed(json.loads(text), draw)).encode()
    at = draw.randrange(len(text) + 1)
    return draw.choice(
        (text[:at], text[:at] + bytes([draw.randrange(256)]) + text[at + 1 :], text[:at] + b"[" * 300 + text[at:], b"")
    )


def changed_tensors(tensors: dict[str, Any], draw: Random) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtypes and shapes with one tensor changed, added or left out."""
    key = draw.choice(sorted(tensors))
    dtype, shape = tensors[key]
    choice = draw.randrange(6)
    if choice == 0:
        return {name: one for name, one in tensors.items() if name != key}
    if choice == 1:
        return {**tensors, key: (draw.choice(DTYPES), shape)}
    if choice == 2:
        end = draw.choice(sorted(tensors)).rpartition(".")[2]
        name = f"{draw.choice(('m.a', 'm.b', 'n'))}.{end}{draw.choice(('', '', '_scale', '_packed', '_blocks'))}"
        return {**tensors, name: (dtype, shape)}
    at = draw.randrange(len(shape) + 1)
    new = (draw.choice(EXTENTS),) if choice < 5 else ()
    return {**tensors, key: (dtype, (*shape[:at], *new, *shape[at + draw.randrange(2) :]))}


def index_of(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> _core.Index:
    """An index of a file that is not there: nothing is read."""
    index = _core.Index()
    index.add_file("/nowhere/m.safetensors")
    for key, (dtype, shape) in tensors.items():
        tile = _core.Tile((0,) * len(shape), shape, 0, row_major(shape))
        index.add_tiles(key, dtype, shape, [_core.StoredArray(0, key, shape, [tile])])
    return index


def check(run: int) -> int:
    """Decode one changed description. Returns the number of weights that it has."""
    draw = Random(run)
    arrays, entry, headers = sample(draw.randrange(18))
    tensors: dict[str, Any] = {key: (dtype_of(one), one.shape) for key, one in arrays.items()}
    texts = {key: one.tobytes() for key, one in arrays.items() if one.nbytes < 1024}
    for _ in range(draw.randint(1, 3)):
        choice = draw.randrange(4)
        if choice == 0:
            entry = changed(entry, draw)
        elif choice == 1 and headers:
            key = draw.choice(sorted(headers))
            headers = {**headers, key: changed_text(headers[key].encode(), draw).decode(errors="replace")}
        elif choice == 2 and (keys := [key for key in texts if "quant_state" in key or key.endswith("_shape")]):
            key = draw.choice(keys)
            texts[key] = changed_text(texts[key], draw)
            if key in tensors and draw.random() < 0.9:
                tensors[key] = (tensors[key][0], (len(texts[key]),))
        else:
            tensors = changed_tensors(tensors, draw)
        if not tensors:
            return 0
    values = entry if isinstance(entry, dict) else {}
    method = values.get("quant_method")
    said = Said("config.json", method if isinstance(method, str) else None, values)
    try:
        weights = recognise(tensors, said, read=lambda key: texts.get(key, b""), headers=headers)
    except ReshardError:
        return 0
    used: list[str] = []
    for name, one in weights.items():
        assert one.name == name
        assert one.kind in KINDS
        assert all(key in tensors for key in one.parts.values())
        assert all(type(n) is int and n >= 0 for n in one.shape)
        used += set(one.parts.values())
    assert len(used) == len(set(used))
    if any(math.prod(filter(None, shape)) > 1 << 58 for _, shape in tensors.values()):
        return len(weights)  # in no file

    def read(key: str, rows: slice) -> Array:
        shape = (rows.stop - rows.start, *tensors[key][1][1:])
        if math.prod(shape) > 1 << 22:
            raise MismatchError("too large for a test")
        return np.full(shape, draw.choice([0, 1, -1, 1 << 29]), np.int32)

    with contextlib.suppress(ReshardError):
        indexes = [index_of(tensors) for _ in range(2)]
        add_dequantised(_core.Index(), indexes[0], indexes[1], weights.values(), "m", read=read)
    return len(weights)


def dtype_of(array: Array) -> str:
    names = {"float8_e4m3fn": "F8_E4M3", "bfloat16": "BF16", "float16": "F16", "float32": "F32", "uint8": "U8",
             "int8": "I8", "int32": "I32", "int64": "I64"}  # fmt: skip
    return names[array.dtype.name]


def check_files(run: int, folder: Path) -> None:
    """Read one changed model: its config.json, its header, and the texts in its tensors."""
    draw = Random(run)
    arrays, entry, headers = sample(draw.randrange(18))
    arrays = dict(arrays)
    config: Any = {**ARCHITECTURE, "quantization_config": entry}
    text = json.dumps(config).encode()
    for _ in range(draw.randint(1, 3)):
        choice = draw.randrange(3)
        if choice == 0:
            text = changed_text(text, draw)
        elif choice == 1 and headers:
            key = draw.choice(sorted(headers))
            headers = {**headers, key: changed_text(headers[key].encode(), draw).decode(errors="replace")}
        else:
            key = draw.choice(sorted(arrays))
            one = arrays[key]
            if one.nbytes < 1024 and one.dtype == np.uint8:
                arrays[key] = np.frombuffer(changed_text(one.tobytes(), draw), np.uint8)
            elif one.nbytes:
                raw = one.copy().view(np.uint8).reshape(-1) if one.ndim else np.array(one).reshape(1).view(np.uint8)
                raw[draw.randrange(raw.size)] = draw.randrange(256)
                arrays[key] = raw.view(one.dtype).reshape(one.shape)
    reshard.save_file(arrays, folder / "model.safetensors", metadata=headers or None)
    (folder / "config.json").write_bytes(text)
    with contextlib.suppress(ReshardError), reshard.open(folder) as checkpoint, checkpoint.dequantised() as plain:
        for key in plain:
            assert plain.read(key).shape == plain.shape(key)


def test_changed_descriptions(tmp_path: Path) -> None:
    runs = int(os.environ.get("RESHARD_FUZZ_RUNS", RUNS))
    n_weights = 0
    for run in range(runs):
        try:
            n_weights += check(run)
            if run % FILES == 0:
                check_files(run, tmp_path)
        except Exception as error:
            error.add_note(f"run {run}")
            raise
    assert n_weights > runs // 10
