"""Files of every kind that are wrong in one place: an error with the name of what is wrong, or values within the parts.

The list of each kind has the parts left out, of other dtypes and shapes, with other values, twice under two names, and
what config.json, the header and texts beside the values can say.
"""

from __future__ import annotations

import json
import resource
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from tests.helpers.command_line import run
from tests.helpers.quantised_samples import ARCHITECTURE, CONFIGS, Array, integers, scales, weight

import reshard
from reshard.errors import DamagedFileError, ReshardError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

DTYPES = (np.uint8, np.int8, np.int32, np.int64, np.float16, ml_dtypes.bfloat16, np.float32, np.float64,
          ml_dtypes.float8_e4m3fn, np.bool_)  # fmt: skip
NUMBERS: tuple[Any, ...] = (0, -1, 3, 1 << 31, 1 << 62, 10**30, 0.5, "128", [], {}, True, None)
ENTRIES = (
    "bits",
    "w_bit",
    "group_size",
    "q_group_size",
    "weight_block_size",
    "config_groups",
    "version",
    "quant_method",
)
WORDS = ("group_0", "W4A16", "UNQUANTIZED")
GROUPS: tuple[Any, ...] = (
          {}, [], [["Linear"]], {"targets": ["Linear"]}, {"targets": ["re:("], "weights": {"num_bits": 4}}, "x", 1,
          {"targets": ["Linear"], "weights": {"group_size": 0}}, {"targets": ["Linear"], "weights": {"num_bits": -4}},
          {"targets": ["Linear"], "weights": {"strategy": "block", "block_structure": [0, 128]}},
          {"targets": ["Linear"], "weights": {"type": "float", "group_size": 1 << 40}})  # fmt: skip
MAX_BYTES = 256 << 20
Case = tuple[str, dict[str, Array], dict[str, Any], dict[str, str]]
STATE: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [256, 256]}
STATES: tuple[dict[str, Any], ...] = (
    {}, {"blocksize": 0}, {"blocksize": 1 << 62}, {"blocksize": True}, {"shape": [1 << 31] * 2}, {"shape": [-1, 2]},
    {"shape": [[]]}, {"quant_type": 7}, {"dtype": []}, {"nested_blocksize": 0, "nested_offset": 0.5},
    {"nested_blocksize": 256, "nested_offset": float("nan")},
)  # fmt: skip
CHANGES: tuple[dict[str, Any], ...] = (
    {"_data": {"block_size": [0, 64]}}, {"_data": {"block_size": [1 << 62, 1]}}, {"_data": {}}, {"_data": []},
    {"_type": "x"}, {"_type": "Int4Tensor"}, {"_type": []}, {"_tensor_data_names": ["qdata"] * 3},
    {"_tensor_data_names": ["qdata", "x"]}, {"_tensor_data_names": 1},
)  # fmt: skip
TORCHAO: dict[str, Any] = {
    "_type": "Int8Tensor",
    "_data": {"block_size": [1, 64]},
    "_tensor_data_names": ["qdata", "scale"],
}


def whole(kind: str) -> Case:
    rng = np.random.default_rng(5)
    if kind == "torchao":
        arrays: dict[str, Array] = {
            "a._weight_qdata": integers(rng, (64, 64), np.int8),
            "a._weight_scale": scales(rng, (64, 1)),
        }
        return (
            "",
            arrays,
            {"quant_method": "torchao"},
            {"a.weight": json.dumps(TORCHAO), "tensor_names": '["a.weight"]'},
        )
    return "", weight(kind, "a", rng, 256, 256), CONFIGS[kind], {}


def cast(array: Array, dtype: Any) -> Array:
    with np.errstate(all="ignore"):
        return array.astype(np.float32).astype(dtype)


def shapes(array: Array) -> Iterator[Array]:
    """The same values in other shapes, and more or fewer of them."""
    yield array.reshape(1, *array.shape)
    yield array.reshape(*array.shape, 1)
    yield array.reshape(-1)
    yield array[..., None].repeat(2, -1)
    for dim, n in enumerate(array.shape):
        yield np.take(array, range(n + 1), dim, mode="wrap")
        yield np.take(array, range(n - 1), dim)
        yield np.take(array, [], dim).reshape(*array.shape[:dim], 0, *array.shape[dim + 1 :])


def values(array: Array) -> Iterator[Array]:
    """Other values: all bits set, the largest exponent, and the smallest."""
    for byte in (0xFF, 0x7F, 0x80, 0x00):
        yield np.full(array.nbytes, byte, np.uint8).view(array.dtype).reshape(array.shape)
    if array.dtype.kind == "f":
        for number in (np.nan, np.inf, -1):
            yield np.full_like(array, number)


def cases(kind: str) -> Iterator[Case]:
    _, arrays, entry, header = whole(kind)
    for key, array in arrays.items():
        yield f"without {key}", {name: one for name, one in arrays.items() if name != key}, entry, header
        yield f"{key} twice", {**arrays, key + "_scale": array, key + "_scale_inv": array}, entry, header
        for dtype in DTYPES:
            if array.dtype != dtype:
                yield (
                    f"{key} as {np.dtype(dtype)}",
                    {**arrays, key: cast(array, dtype)},
                    entry,
                    header,
                )
        for one in (*shapes(array), *values(array)):
            yield f"{key} {one.shape}", {**arrays, key: one}, entry, header
    for name in ENTRIES:
        for number in NUMBERS:
            yield f"{name} {number!r}", arrays, {**entry, name: number}, header
    for number, group in enumerate(GROUPS):
        for name in WORDS:
            yield f"{name} {number}", arrays, {**entry, "config_groups": {name: group}}, header
    for other in CONFIGS.values():
        if other != entry:
            yield str(other), arrays, other, header
    for state in STATES if kind == "bnb-4bit" else ():
        text = np.frombuffer(json.dumps({**STATE, **state} if state else {}).encode(), np.uint8)
        yield f"{state}", {**arrays, "a.weight.quant_state.bitsandbytes__nf4": text}, entry, header
    for change in CHANGES if kind == "torchao" else ():
        yield f"{change}", arrays, entry, {**header, "a.weight": json.dumps({**TORCHAO, **change})}


def attempt(folder: Path, case: Case) -> str:
    """Read a model in every way. Returns the message of the error, or nothing."""
    _, arrays, entry, header = case
    reshard.save_file(arrays, folder / "model.safetensors", metadata=header or None)
    (folder / "config.json").write_text(json.dumps({**ARCHITECTURE, "quantization_config": entry}))
    try:
        with reshard.open(folder) as checkpoint:
            found = checkpoint.quantised()
            assert all(key in arrays for one in found.values() for key in one.parts.values())
            with checkpoint.dequantised() as plain:
                for key, array in plain.load(dtype="bfloat16").items():
                    assert array.shape == plain.shape(key)
    except ReshardError as error:
        return str(error)
    return ""


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("kind", [*CONFIGS, "torchao"])
def test_a_model_that_is_wrong_in_one_place(kind: str, tmp_path: Path) -> None:
    assert attempt(tmp_path, whole(kind)) == ""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused: Mapping[str, str] = {}
    n = 0
    for case in cases(kind):
        n += 1
        try:
            message = attempt(tmp_path, case)
        except Exception as error:
            error.add_note(case[0])
            raise
        if message:
            refused = {**refused, case[0]: message}
            assert "`a." in message or "`g_idx`" in message or "config.json" in message, (case[0], message)
    assert n >= 150
    assert len(refused) >= 20, (kind, n, len(refused))
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < MAX_BYTES
    last = [case for case in cases(kind) if case[0].startswith("without")][-1]
    attempt(tmp_path, last)
    assert run("inspect", tmp_path).exit_code == 0


@pytest.mark.parametrize("names", ["7", "[", '[["a"]]', '{"a.weight": 1}', "null", "[" * 100_000, "9" * 5_000])
def test_names_in_a_header_that_are_no_list(names: str, tmp_path: Path) -> None:
    _, arrays, entry, header = whole("torchao")
    (tmp_path / "m").mkdir()
    reshard.save_file(arrays, tmp_path / "m" / "model.safetensors", metadata={**header, "tensor_names": names})
    (tmp_path / "m" / "config.json").write_text(json.dumps({**ARCHITECTURE, "quantization_config": entry}))
    with pytest.raises(
        DamagedFileError, match=r"model.safetensors` has `tensor_names` .*, expected a list of the names"
    ):
        reshard.convert(tmp_path / "m", tmp_path / "out", to="huggingface")
