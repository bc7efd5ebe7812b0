"""A view of a checkpoint in which quantised weights are ordinary tensors.

Nothing is read to make it, except packed integers that fit two ways of packing: bits that are set exclude one of them.
The core computes the values when they are read, from regions of the parts: `add_quantised`.
The recipes, and the order in which parts and numbers are given, are those of `rust/formats/src/quantised/recipe.rs`.

Source of the rules:
    GPTQ: `auto_gptq/nn_modules/qlinear/qlinear_cuda.py`, `QuantLinear.forward`, of
    https://github.com/AutoGPTQ/AutoGPTQ/tree/058fd80a72d63d992347e3a23dcd5757449a9e2d
    AWQ: `awq/utils/packing_utils.py`, `dequantize_gemm`, of
    https://github.com/casper-hansen/AutoAWQ/tree/958d6048b7be87e21d54717c0420349b5f2eaf2d
    NVFP4 and packed integers of compressed-tensors: `src/compressed_tensors/compressors/nvfp4/base.py` and
    `pack_quantized/base.py` of https://github.com/vllm-project/compressed-tensors/tree/d34b8fdcdb26b285a8a0520bdbaa765239e3bf9e
    NVFP4 of modelopt: `modelopt/torch/quantization/qtensor/nvfp4_tensor.py`, `NVFP4QTensor.dequantize`, of
    https://github.com/NVIDIA/Model-Optimizer/tree/c601044e6d9d50389e60b36290944a2b2d755344
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reshard import _core
from reshard.errors import MismatchError, UnsupportedError
from reshard.quantised.kinds import KINDS
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from reshard.quantised.kinds import Quantised

    ReadRows = Callable[[str, slice], np.ndarray[Any, np.dtype[Any]]]

_GGUF = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S", "IQ1_M",
         "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4",
         "NVFP4")  # fmt: skip
_OF_SCALES = ("F32", "BF16", "F16", "U8", "F8_E8M0", "F8_E4M3")
_DIVIDES, _POSITIVE = 1, 2  # the global scale divides; the code of -0 is +0
_ROWS_BYTES = 4 << 20  # of packed integers that are read at once
_INT8 = 7.874015718698502e-3  # 1 / 127, as bitsandbytes has it


class Recipe(NamedTuple):
    """How the values of a weight are computed.

    Attributes:
        name: that of a recipe of the core.
        numbers: its numbers.
        parts: the roles of its parts, and for each the shape in which the recipe takes it.
    """

    name: str
    numbers: tuple[float, ...]
    parts: tuple[tuple[str, tuple[int, ...]], ...]


def add_dequantised(
    index: _core.Index,
    stored: _core.Index,
    source: _core.Index,
    weights: Iterable[Quantised],
    path: str,
    *,
    read: ReadRows,
) -> int:
    """Add a file with the values of quantised weights to an index, in float32 under their names.

    Args:
        index: the index.
        stored: an index with the same files as `source`, which is used up.
        source: the index with the parts.
        weights: the quantised weights.
        path: the name of the file in messages.
        read: gives rows of a tensor, for packed integers that fit two ways of packing.

    Returns:
        The number of the file.

    Raises:
        UnsupportedError: the values of a kind are not known here.
        MismatchError: packed integers have bits that they cannot have.
    """
    made = []
    for one in weights:
        if "packings" in one.values:
            _check_packing(one, source.shape(one.parts["weight"]), read)
        recipe = _recipe(one, source)
        keys = []
        for role, shape in recipe.parts:
            key = f"{role} {one.name}"
            dtype, its = source.info(one.parts[role])
            stored.add_tiles(key, dtype, shape, reshaped(source.stored(one.parts[role]), its, shape), overlapping=True)
            keys.append(key)
        made.append((one.name, "F32", one.shape, recipe.name, recipe.numbers, keys))
    return _core.add_quantised(index, stored, path, made)


def _recipe(one: Quantised, index: _core.Index) -> Recipe:
    shapes = {role: index.shape(key) for role, key in one.parts.items()}
    if "pre_quant_scale" in one.parts:
        raise UnsupportedError(
            f"{show(one.parts['pre_quant_scale'])} scales the inputs of the module of {show(one.name)}: the weight "
            "alone is not that of an ordinary model",
            key=one.name,
            hint="leave `dtype=` out; or fold that scale into the weights with the library that wrote it first",
        )
    if one.kind.startswith("fp8-") or one.kind in ("int8-channel", "bnb-int8"):
        block = one.values.get("block", (1, one.shape[-1]))
        factor = _INT8 if one.kind == "bnb-int8" else 1.0
        scales = [(role, _grid(one, shapes[role], block)) for role in ("scale", "zero_point") if role in shapes]
        return Recipe("scaled", (*block, factor), (("weight", _matrices(one, one.shape)), *scales))
    if one.kind in ("mxfp4-packed", "mxfp4-modelopt", "nvfp4", "nvfp4-modelopt"):
        how = {"nvfp4": _DIVIDES, "nvfp4-modelopt": _POSITIVE}.get(one.kind, 0)
        parts = [("weight", _matrices(one, shapes["weight"])), ("scale", _matrices(one, shapes["scale"]))]
        if "global" in one.parts:
            parts.append(("global", (max(1, math.prod(shapes["global"])),)))
        return Recipe("e2m1", (one.values["block"], how), tuple(parts))
    if one.kind == "mxfp4":
        return Recipe("transposed", (), (("blocks", shapes["blocks"]), ("scales", shapes["scales"])))
    if one.kind == "bnb-4bit":
        state = one.values
        roles = ["weight", "absmax", "quant_map"]
        of_state = [state["blocksize"], 0, 0.0, state.get("quant_type") == "fp4"]
        if "nested_absmax" in one.parts:
            roles += ["nested_quant_map", "nested_absmax"]
            of_state[1:3] = [state["nested_blocksize"], state["nested_offset"]]
        return Recipe("table", tuple(of_state), tuple((role, (math.prod(shapes[role]),)) for role in roles))
    if one.kind in ("gptq", "awq"):
        numbers = (one.values["bits"], one.values["zero_offset"]) if one.kind == "gptq" else (one.values["group"],)
        return Recipe(one.kind, numbers, tuple(shapes.items()))
    zeros = one.parts.get("zero_point")
    if one.kind == "int-packed" and "g_idx" not in one.parts and (zeros is None or index.info(zeros)[0] == "I32"):
        grid = shapes["scale"] if len(shapes["scale"]) == len(one.shape) else (1, 1)
        parts = [("weight", shapes["weight"]), ("scale", grid)]
        if zeros is not None:
            parts.append(("zero_point", shapes["zero_point"]))
        return Recipe("packed", (one.values["bits"], one.shape[-1] // grid[1]), tuple(parts))
    if one.kind == "gguf-blocks" and one.values["type"] in _GGUF:
        return Recipe("blocks", (one.values["number"],), (("weight", _matrices(one, shapes["weight"])),))
    recipe = _of_torchao(one, shapes, index) if one.kind == "torchao" else None
    if recipe is not None:
        return recipe
    raise UnsupportedError(
        f"{show(one.name)} is quantised as {one.kind} ({KINDS[one.kind].title}) with {', '.join(one.parts)}: how its "
        "values are computed is not known here",
        key=one.name,
        hint="leave `dtype=` out; or dequantise the model with the library that wrote it first",
    )


def _check_packing(one: Quantised, shape: Sequence[int], read: ReadRows) -> None:
    """Refuse integers unless they are packed one after the other.

    Each way of packing that fits the shape has bits that no integer fills. The library leaves them 0, so one of
    them that is set excludes the way: any of the 4 highest bits of a word excludes 7 bits in words of their own.
    """
    key, ways, columns, n_words = one.parts["weight"], list(one.values["packings"]), one.shape[-1], shape[-1]
    step = max(1, _ROWS_BYTES // (4 * n_words))
    start = 0
    while len(ways) > 1 and start < shape[0]:
        seen = np.bitwise_or.reduce(read(key, slice(start, min(start + step, shape[0]))).view(np.uint32), axis=0)
        left = [way for way in ways if not (seen & ~_filled(columns, n_words, *way)).any()]
        if not left:
            raise MismatchError(
                f"{show(key)} packs integers of {_worded(ways)} by its shape, and in its rows from {start} on "
                "bits are set that no integer fills",
                key=key,
                hint="the file is damaged, or was packed by another program: fetch it again",
            )
        ways, start = left, start + step
    if ways == [(one.values["bits"], False)]:
        return
    raise UnsupportedError(
        f"{show(key)} packs integers of {_worded(ways)}{': both fit' if len(ways) > 1 else ', which is not supported'}",
        key=one.name,
        hint="versions of compressed-tensors to 0.17.1 keep each integer in one word, later ones do not; "
        "`version` in `quantization_config` of config.json decides where both fit. Dequantise it with that library",
    )


def _worded(ways: Iterable[tuple[int, bool]]) -> str:
    return " or ".join(
        f"{n} bits, {'each in one word of 32 bits' if is_loose else 'one after the other'}" for n, is_loose in ways
    )


def _filled(columns: int, n_words: int, bits: int, is_loose: bool) -> np.ndarray[Any, np.dtype[np.uint32]]:  # noqa: FBT001
    """The bits of each word of a row that integers fill."""
    of_word = 32 // bits * bits if is_loose else 32
    last = columns * bits - of_word * (n_words - 1)
    filled = np.full(n_words, (1 << of_word) - 1, np.uint32)
    filled[-1] = (1 << last) - 1
    return filled


def _of_torchao(one: Quantised, shapes: dict[str, tuple[int, ...]], index: _core.Index) -> Recipe | None:
    values, block = one.values, one.values.get("block_size")
    kind, roles = values["type"], set(one.parts)
    if values.get("is_swizzled_scales") or len(one.shape) > 3 or not {"qdata", "scale"} <= roles:
        return None
    if index.info(one.parts["scale"])[0] not in _OF_SCALES:
        return None
    is_scaled = kind not in ("MXTensor", "NVFP4Tensor") or _elements(values) not in ("", "float4_e2m1fn_x2")
    if is_scaled and index.info(one.parts["qdata"])[0] not in ("I8", "F8_E4M3", "F8_E5M2"):
        return None
    if "zero_point" in roles and [index.info(one.parts[role])[0] for role in ("qdata", "zero_point")] != ["I8", "I8"]:
        return None  # the core subtracts bytes
    if kind == "MXTensor" and type(block) is int and block > 0:
        if _elements(values) != "float4_e2m1fn_x2":
            return _torchao_scaled(one, shapes, (1, block))
        if shapes["scale"] != (*one.shape[:-1], -(-one.shape[-1] // block)):
            return None
        return Recipe("e2m1", (block, 0), tuple((role, _matrices(one, shapes[role])) for role in ("qdata", "scale")))
    if kind == "NVFP4Tensor" and roles <= {"qdata", "scale", "per_tensor_scale"} and block == 16:
        if shapes["scale"] != (*one.shape[:-1], -(-one.shape[-1] // block)):
            return None
        parts = [(role, _matrices(one, shapes[role])) for role in ("qdata", "scale")]
        if "per_tensor_scale" in roles:
            parts.append(("per_tensor_scale", (1,)))
        return Recipe("e2m1", (block, 0), tuple(parts))
    is_plain = kind in ("Float8Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor") and roles <= {
        "qdata",
        "scale",
        "zero_point",
    }
    if is_plain and isinstance(block, list) and len(block) == len(one.shape) > 1:
        return _torchao_scaled(one, shapes, (block[-2], block[-1]))
    return None


def _torchao_scaled(one: Quantised, shapes: dict[str, tuple[int, ...]], block: tuple[Any, Any]) -> Recipe | None:
    if any(type(n) is not int or n < 1 for n in block):
        return None
    parts = [("qdata", _matrices(one, shapes["qdata"]))]
    for role in ("scale", "zero_point"):
        if role in shapes:
            grid = _grid(one, shapes[role], block)
            if [n for n in grid if n != 1] != [n for n in shapes[role] if n != 1]:
                return None
            parts.append((role, grid))
    return Recipe("scaled", (*block, 1.0), tuple(parts))


def _elements(values: Mapping[str, Any]) -> str:
    dtype = values.get("elem_dtype")
    return str(dtype.get("_data")) if isinstance(dtype, dict) else ""


def _matrices(one: Quantised, shape: Sequence[int]) -> tuple[int, ...]:
    """A shape with exactly one dim before rows and columns."""
    if len(shape) > 3:
        raise UnsupportedError(f"{show(one.name)} has {len(shape)} dims, and at most 3 are dequantised", key=one.name)
    return (*(1,) * (3 - len(shape)), *shape)


def _grid(one: Quantised, shape: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    """The shape of scales as matrices, rows of blocks, columns of blocks."""
    matrices, rows, columns = _matrices(one, one.shape)
    blocks = -(-rows // block[0]), -(-columns // block[1])
    return (1 if math.prod(shape) == math.prod(blocks) else matrices, *blocks)


def reshaped(
    stored: Sequence[_core.StoredArray], shape: Sequence[int], wanted: Sequence[int]
) -> list[_core.StoredArray]:
    """The stored arrays of a tensor, for the same tensor with other dims of one element.

    Args:
        stored: the arrays, as `_core.Index.stored` returns them.
        shape: the shape of the tensor.
        wanted: the other shape, which differs in dims of one element.
    """
    if tuple(shape) == tuple(wanted):
        return list(stored)
    kept = [dim for dim, n in enumerate(shape) if n != 1]
    if [shape[dim] for dim in kept] != [n for n in wanted if n != 1]:
        raise AssertionError((shape, wanted))

    def dims(values: Sequence[Any], one: int) -> tuple[int, ...]:
        left = iter([values[dim] for dim in kept])
        return tuple(one if n == 1 else next(left) for n in wanted)

    return [
        array._replace(
            tiles=[
                _core.Tile(dims(tile.offset, 0), dims(tile.shape, 1), tile.local_offset, dims(tile.local_strides, 1))
                for tile in array.tiles
            ]
        )
        for array in stored
    ]
