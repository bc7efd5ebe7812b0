"""The kinds of quantised weights, and one quantised weight with its parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class Kind(NamedTuple):
    """A kind of quantised weights.

    Attributes:
        title: what it is, in words.
        methods: values of `quant_method` in `config.json` that stand for it.
        named: whether the file names each tensor in its header, so that it cannot be renamed.
        only_here: whether no other format can hold it.
    """

    title: str
    methods: tuple[str, ...]
    named: bool = False
    only_here: bool = False


KINDS: Mapping[str, Kind] = {
    "fp8-block": Kind("FP8, a scale a block", ("fp8", "mxfp8", "compressed-tensors", "modelopt", "fbgemm_fp8")),
    "fp8-channel": Kind("FP8, a scale a row", ("fp8", "compressed-tensors", "modelopt", "fbgemm_fp8")),
    "fp8-tensor": Kind("FP8, one scale", ("fp8", "compressed-tensors", "modelopt")),
    "mxfp4": Kind("MXFP4, a scale for 32 values", ("mxfp4",)),
    "mxfp4-packed": Kind("MXFP4 of compressed-tensors", ("compressed-tensors",)),
    "mxfp4-modelopt": Kind("MXFP4 of modelopt", ("modelopt",)),
    "nvfp4": Kind("NVFP4 of compressed-tensors", ("compressed-tensors",)),
    "nvfp4-modelopt": Kind("NVFP4 of modelopt", ("modelopt",)),
    "int4-modelopt": Kind("packed integers of modelopt", ("modelopt",)),
    "int8-channel": Kind("int8, a scale a row, group or tensor", ("compressed-tensors", "modelopt")),
    "int-packed": Kind("packed integers of compressed-tensors", ("compressed-tensors",)),
    "gptq": Kind("GPTQ", ("gptq", "auto-round")),
    "awq": Kind("AWQ", ("awq",)),
    "bnb-4bit": Kind("4 bits of bitsandbytes", ("bitsandbytes",)),
    "bnb-int8": Kind("int8 of bitsandbytes", ("bitsandbytes",)),
    "torchao": Kind("a tensor of torchao", ("torchao",), named=True),
    "gguf-blocks": Kind("blocks of GGUF", (), only_here=True),
}
"""All kinds, by name."""


FLOATING = ("F64", "F32", "BF16", "F16")
"""The dtypes of ordinary tensors, in which dequantised weights are returned."""


class Follows(NamedTuple):
    """A dim of a part that is divided as a dim of the packed tensor is.

    Attributes:
        dim: the dim of the packed tensor.
        packed: elements of it ...
        own: ... that belong to so many elements of the part.
    """

    dim: int
    packed: int = 1
    own: int = 1


@dataclass(frozen=True)
class Quantised:
    """A quantised weight: one logical tensor.

    Attributes:
        name: the name of the weight, as in a model that is not quantised.
        kind: a key of `KINDS`.
        shape: the shape of the weight that the library computes with, in elements.
        parts: key of each part by its role. The first is the packed tensor.
        follows: for each part that is divided with the packed tensor: for each of its dims how, or None.
        steps: by dim of the packed tensor, a number of elements that must stay together.
        is_whole: whether it cannot be divided at all.
        values: what the kind needs beside the parts, such as `bits`.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    parts: Mapping[str, str]
    follows: Mapping[str, tuple[Follows | None, ...]] = field(default_factory=dict)
    steps: Mapping[int, int] = field(default_factory=dict)
    is_whole: bool = False
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def packed(self) -> str:
        """The key of the packed tensor."""
        return next(iter(self.parts.values()))
