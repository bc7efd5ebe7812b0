"""The names of GGUF files, and the names of what they record of a model."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from reshard.values.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TRAITS = Traits("gguf", is_pretrained=True)
SUFFIX = ".gguf"
MAGIC = b"GGUF"
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")

_MODEL_TYPES = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "olmoe": "olmoe",
    "phi3": "phi3",
}
"""`model_type` of a config.json by `general.architecture`. That of mistral and mixtral is `llama`, too."""

_FIELDS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
}

DERIVED = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight")
"""Tensors that the converter of llama.cpp computes from the configuration of a model."""


def part_of(name: str) -> tuple[str, int, int] | None:
    """The model, the number and the count in the name of a part of a divided model; None: it is no such name.

    Example:
        >>> part_of("m-Q4_K-00002-of-00003.gguf"), part_of("m.gguf")
        (('m-Q4_K', 2, 3), None)
    """
    found = _PART.fullmatch(name)
    return None if found is None else (found[1], int(found[2]), int(found[3]))


def part_names(model: str, count: int) -> Sequence[str]:
    """The names of the parts of a divided model, in their order."""
    return [f"{model}-{number:05}-of-{count:05}{SUFFIX}" for number in range(1, count + 1)]


def config_of(values: Mapping[str, object]) -> dict[str, object]:
    """What the values of a file say of the model, under the names of config.json; empty: an unknown architecture.

    Example:
        >>> config_of({"general.architecture": "llama", "llama.attention.head_count": 8, "llama.expert_count": 4})
        {'model_type': 'mixtral', 'num_attention_heads': 8}
    """
    architecture = values.get("general.architecture")
    model_type = _MODEL_TYPES.get(architecture) if isinstance(architecture, str) else None
    if model_type is None:
        return {}
    if values.get(f"{architecture}.expert_count") and model_type in ("llama", "mistral"):
        model_type = "mixtral"
    found = {name: values.get(f"{architecture}.{field}") for field, name in _FIELDS.items()}
    return {"model_type": model_type, **{name: value for name, value in found.items() if type(value) is int}}
