"""A small model with quantised projections."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.helpers.quantised_samples import CONFIGS, Array, weight

import reshard

torch = pytest.importorskip("torch")
RNG = np.random.default_rng


def to_torch(array: Array) -> Any:
    """A torch tensor with the same bytes."""
    kinds = {"bfloat16": "bfloat16", "float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2"}
    name = kinds.get(array.dtype.name)
    if name is None:
        return torch.from_numpy(np.array(array))
    return torch.from_numpy(np.array(array).view(f"u{array.itemsize}").copy()).view(getattr(torch, name))


def llama(path: Path, kind: str) -> dict[str, Array]:
    """A folder of a small model of transformers whose projections are quantised, and its tensors."""
    rng = RNG(7)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
        "num_attention_heads": 2, "num_hidden_layers": 1, "num_key_value_heads": 2, "vocab_size": 32,
        "dtype": "bfloat16", "quantization_config": CONFIGS[kind],
    }  # fmt: skip
    layer = "model.layers.0."
    shapes = {f"{layer}self_attn.{one}_proj": (128, 128) for one in "qkvo"}
    shapes |= {f"{layer}mlp.{one}_proj": (256, 128) for one in ("gate", "up")} | {f"{layer}mlp.down_proj": (128, 256)}
    arrays = {key: one for name, shape in shapes.items() for key, one in weight(kind, name, rng, *shape).items()}
    ones = [f"{layer}{one}_layernorm.weight" for one in ("input", "post_attention")] + ["model.norm.weight"]
    arrays |= {name: np.ones(128, ml_dtypes.bfloat16) for name in ones}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        arrays[name] = rng.normal(size=(32, 128)).astype(ml_dtypes.bfloat16)
    path.mkdir()
    reshard.save_file(arrays, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    (path / "hf_quant_config.json").write_text("{}")
    return arrays
