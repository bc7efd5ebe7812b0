"""A view of a checkpoint in which ordinary weights are block-scaled FP8, as `quant_method: fp8` of config.json.

The rule is that of transformers, `Fp8Quantize`: the largest magnitude of a block of 128 x 128 values becomes 448. The
core computes codes and scales when they are read. Only weights with complete blocks are quantised, as in transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard import _core
from reshard.errors import ArgumentError
from reshard.quantised.dequantise import reshaped
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Iterable

BLOCK = (128, 128)
FP8 = "F8_E4M3"
"""The dtype of the codes."""


def fits(shape: tuple[int, ...]) -> bool:
    """Whether a weight has complete blocks.

    Example:
        >>> fits((256, 128)), fits((576, 128)), fits((128,))
        (True, False, False)
    """
    return len(shape) in (2, 3) and all(n and n % size == 0 for n, size in zip(shape[-2:], BLOCK, strict=True))


def scale_name(key: str) -> str:
    """The name of the scales of a weight.

    Example:
        >>> scale_name("a.weight"), scale_name("experts.gate_up_proj")
        ('a.weight_scale_inv', 'experts.gate_up_proj_scale_inv')
    """
    return f"{key}_scale_inv"


def add_quantised(
    index: _core.Index, stored: _core.Index, source: _core.Index, keys: Iterable[str], path: str
) -> tuple[int, dict[str, str]]:
    """Add a file with the codes and the scales of weights to an index.

    Args:
        index: the index.
        stored: an index with the same files as `source`, which is used up.
        source: the index with the weights.
        keys: the weights, which have complete blocks.
        path: the name of the file in messages.

    Returns:
        The number of the file, and the name of the scales of each weight.

    Raises:
        ArgumentError: a weight is no float of 16 or 32 bits, or its scales would have the name of another tensor.
    """
    made: list[tuple[str, str, tuple[int, ...], str, tuple[float, ...], list[str]]] = []
    names: dict[str, str] = {}
    for key in keys:
        dtype, shape = source.info(key)
        if dtype not in ("F32", "BF16", "F16"):
            raise ArgumentError(f"{show(key)} is {dtype}: FP8 is made of F32, BF16 and F16", key=key)
        names[key] = scale_name(key)
        if names[key] in source:
            raise ArgumentError(f"there is a tensor {show(names[key])}, the name of the scales of {show(key)}", key=key)
        wanted = (*(1,) * (3 - len(shape)), *shape)
        stored.add_tiles(key, dtype, wanted, reshaped(source.stored(key), shape, wanted), overlapping=True)
        grid = (*shape[:-2], shape[-2] // BLOCK[0], shape[-1] // BLOCK[1])
        made.append((key, FP8, shape, "codes", BLOCK, [key]))
        made.append((names[key], "F32", grid, "scales", BLOCK, [key]))
    return _core.add_quantised(index, stored, path, made), names


def entry(skipped: Iterable[str]) -> dict[str, Any]:
    """`quantization_config` of such a model.

    Args:
        skipped: names of modules that are not quantised.
    """
    return {
        "activation_scheme": "dynamic",
        "modules_to_not_convert": sorted(skipped),
        "quant_method": "fp8",
        "weight_block_size": list(BLOCK),
    }
