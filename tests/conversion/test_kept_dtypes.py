"""Tensors that a cast leaves in float32, and casts of a part of quantised weights, which are refused."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import reshard
from reshard import _core
from reshard.errors import UnsupportedError
from reshard.formats.outputs import load_all

if TYPE_CHECKING:
    from pathlib import Path

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def is_cast(found: np.ndarray, right: np.ndarray) -> bool:
    return found.dtype == ml_dtypes.bfloat16 and bool((found == right.astype(ml_dtypes.bfloat16)).all())


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("seed", range(30))
def test_a_plan_casts_all_but_these_tensors(seed: int, tmp_path: Path) -> None:
    """Whole tensors and parts of them, in one file or divided over two, against numpy."""
    chance, rng = random.Random(seed), np.random.default_rng(seed)
    names = [f"t{i}" for i in range(chance.choice([3, 40, 3000]))]
    arrays = {name: rng.standard_normal((4, chance.choice([1, 2, 6])), np.float32) for name in names}
    path = tmp_path / "all.safetensors"
    reshard.save_file(arrays, path)
    if chance.random() < 0.5:
        layout = {"mesh": {"tp": 2}, "rules": [{"match": "*", "cut": ["tp"]}]}
        reshard.convert(path, tmp_path / "divided", layout=layout, iteration=1)
        path = tmp_path / "divided"
    kept = set(chance.sample(names, chance.randint(0, 3))) | {"not there"}
    with reshard.open(path) as checkpoint:
        index = checkpoint.data.index
        index.keep_dtypes(sorted(kept))
        request = index.whole_request(names)
        if chance.random() < 0.5:
            request = _core.Request()
            for name, array in arrays.items():
                request.add_region(name, name, (1, 0), (2, array.shape[1]))
            arrays = {name: array[1:3] for name, array in arrays.items()}
        right = {name: array if name in kept else array.astype(ml_dtypes.bfloat16) for name, array in arrays.items()}
        assert index.request_bytes([request], dtype="BF16") == [sum(array.nbytes for array in right.values())]
        found = load_all(index.plan(request, dtype="BF16"))
    assert list(found) == names
    for name, array in found.items():
        assert (array.dtype, array.tobytes()) == (right[name].dtype, right[name].tobytes())


def weights() -> dict[str, np.ndarray]:
    return {BIAS: np.linspace(6.8, 7.1, 256, dtype=np.float32), "model.w": np.full((4, 4), 1 / 3, np.float32)}


def test_known_names_stay_float32_with_a_warning(tmp_path: Path) -> None:
    reshard.save_file(weights(), tmp_path / "w.safetensors")
    (warning,) = reshard.convert(tmp_path / "w.safetensors", tmp_path / "hf", dtype="bfloat16").warnings
    assert warning == f"`{BIAS}` stays float32, as models with such names keep them; `dtype_all=True` casts all"
    with reshard.open(tmp_path / "hf") as found:
        assert found.read(BIAS).tobytes() == weights()[BIAS].tobytes()
        assert is_cast(found.read("model.w"), weights()["model.w"])
    assert not reshard.convert(tmp_path / "hf", tmp_path / "wide", dtype="float32").warnings
    with reshard.open(tmp_path / "wide") as found:
        assert {found[key].dtype for key in found} == {"F32"}


def test_all_are_cast_if_that_is_asked(tmp_path: Path) -> None:
    reshard.save_file(weights(), tmp_path / "w.safetensors")
    assert not reshard.convert(tmp_path / "w.safetensors", tmp_path / "hf", dtype="bfloat16", dtype_all=True).warnings
    with reshard.open(tmp_path / "hf") as found:
        assert is_cast(found.read(BIAS), weights()[BIAS])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DeepseekV3", "Llama", "Qwen3Moe", "Mamba2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_the_library_keeps_in_float32_stays(kind: str, dtype: str, tmp_path: Path) -> None:
    """The dtypes are those of the model that `from_pretrained` makes in that dtype."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    values: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    values |= {"num_attention_heads": 2, "num_key_value_heads": 2, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
    values |= {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "v_head_dim": 8, "first_k_dense_replace": 1}
    values |= {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "num_experts": 4}
    if kind == "Mamba2":
        values = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8}
        values |= {"state_size": 8, "n_groups": 1}
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**values))
    model.save_pretrained(tmp_path / "hf")
    loaded = type(model).from_pretrained(tmp_path / "hf", dtype=getattr(torch, dtype))
    loaded.save_pretrained(tmp_path / "right")
    reshard.convert(tmp_path / "hf", tmp_path / "out", dtype=dtype)
    with reshard.open(tmp_path / "out") as found, reshard.open(tmp_path / "right") as right:
        assert {key: found[key].dtype for key in found} == {key: right[key].dtype for key in right}
    reshard.convert(tmp_path / "out", tmp_path / "wide", dtype="float32")
    with reshard.open(tmp_path / "out") as narrow, reshard.open(tmp_path / "wide") as wide:
        assert all((wide.read(key) == narrow.read(key).astype(np.float32)).all() for key in narrow)
        assert {wide[key].dtype for key in wide} == {"F32"}


@pytest.mark.parametrize(
    ("packed", "scale"),
    [
        ("l.weight_codes", "l.codebooks"),
        ("l.mlp.gate_up_proj_blocks", "l.mlp.gate_up_proj_norm"),
    ],
)
def test_scales_are_not_cast_apart_from_packed_integers(packed: str, scale: str, tmp_path: Path) -> None:
    arrays: dict[str, np.ndarray] = {
        packed: np.zeros((4, 4), np.uint8),
        scale: np.ones(4, np.float32),
        "l.bias": np.ones(4, np.float32),
    }
    reshard.save_file(arrays, tmp_path / "w.safetensors")
    with pytest.raises(UnsupportedError, match=rf"`{scale}` \(F32\) lies beside the packed integers `{packed}`"):
        reshard.convert(tmp_path / "w.safetensors", tmp_path / "hf", dtype="bfloat16")
    assert not (tmp_path / "hf").exists()
    reshard.convert(tmp_path / "w.safetensors", tmp_path / "hf")


def test_only_real_floating_point_tensors_are_cast(tmp_path: Path) -> None:
    arrays: dict[str, np.ndarray] = {
        "float": np.ones(2, np.float64),
        "complex": np.full(2, 1 + 2j, np.complex64),
        "bool": np.ones(2, np.bool_),
        **{kind: np.ones(2, kind) for kind in ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8")},
    }
    reshard.save_file(arrays, tmp_path / "w.safetensors")
    reshard.convert(tmp_path / "w.safetensors", tmp_path / "out.safetensors", dtype="bfloat16", dtype_all=True)
    found = reshard.load_file(tmp_path / "out.safetensors")
    right = {**arrays, "float": np.ones(2, ml_dtypes.bfloat16)}
    assert {key: (one.dtype, one.tobytes()) for key, one in found.items()} == {
        key: (one.dtype, one.tobytes()) for key, one in right.items()
    }


def test_integers_beside_weights_are_no_packed_weights(tmp_path: Path) -> None:
    arrays = {
        "norm.running_mean": np.ones(2, np.float32),
        "norm.num_batches_tracked": np.array(3),
        "attn.bias": np.ones((2, 2), np.uint8),
        "attn.masked_bias": np.array(-1e4, np.float32),
        "embed.position_ids": np.zeros((1, 2), np.int64),
        "embed.weight": np.ones((2, 2), np.float32),
    }
    reshard.save_file(arrays, tmp_path / "w.safetensors")
    reshard.convert(tmp_path / "w.safetensors", tmp_path / "hf", dtype="bfloat16")
    with reshard.open(tmp_path / "hf") as found:
        assert {key for key in found if found[key].dtype == "BF16"} == {k for k in arrays if arrays[k].dtype == "f4"}
