"""The two forms of NVFP4: names, global scales and config.json, exact in both directions."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from tests.helpers.command_line import run
from tests.helpers.quantised_samples import weight
from tests.quantised.models import RNG

import reshard
from reshard.errors import ArgumentError, MismatchError, ReshardError, UnsupportedError
from reshard.quantised.nvfp4 import COMPRESSED, MODELOPT, reciprocal

if TYPE_CHECKING:
    from pathlib import Path

Array = np.ndarray[Any, Any]
MOST = np.float32(2688)
ENTRIES: dict[str, dict[str, Any]] = {
    COMPRESSED: {
        "config_groups": {"group_0": {"format": "nvfp4-pack-quantized", "targets": ["Linear"]}},
        "format": "nvfp4-pack-quantized",
        "ignore": ["lm_head"],
        "quant_method": "compressed-tensors",
    },
    MODELOPT: {"ignore": ["lm_head"], "quant_algo": "NVFP4", "quant_method": "modelopt"},
}


def amax(rng: np.random.Generator, dtype: Any = ml_dtypes.bfloat16) -> np.float32:
    return np.float32(np.exp2(rng.uniform(-12, 15)).astype(dtype))


def tensors(form: str, seed: int = 0, *, with_input: bool = True) -> dict[str, Array]:
    """Weights whose global scales are what the library of the form computes."""
    rng, found = RNG(seed), dict[str, Array]()
    for module in ("a", "b.c"):
        of = weight(form, module, rng, 32, 64)
        for key in of:
            if "global" in key or "scale_2" in key or "input" in key:
                value = amax(rng) / MOST if form == MODELOPT else MOST / amax(rng)
                of[key] = np.full(of[key].shape, value, np.float32)
        found |= {key: array for key, array in of.items() if with_input or "input" not in key}
    return {**found, "norm.weight": rng.normal(size=8).astype(np.float32)}


def model(folder: Path, form: str, *, with_input: bool = True, **entry: Any) -> Path:
    folder.mkdir()
    reshard.save_file(tensors(form, with_input=with_input), folder / "model.safetensors")
    config = {"model_type": "llama", "quantization_config": {**ENTRIES[form], **entry}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("form", [COMPRESSED, MODELOPT])
def test_both_directions_are_exact(tmp_path: Path, form: str) -> None:
    other = MODELOPT if form == COMPRESSED else COMPRESSED
    source = model(tmp_path / "source", form)
    assert run("convert", source, tmp_path / "other", "--dtype", other).exit_code == 0
    reshard.convert(tmp_path / "other", tmp_path / "back", dtype=form)
    before, after = (reshard.load_file(tmp_path / one / "model.safetensors") for one in ("source", "back"))
    assert before.keys() == after.keys()
    assert all(before[key].tobytes() == after[key].tobytes() for key in before)
    assert all(before[key].shape == after[key].shape for key in before)
    with reshard.open(tmp_path / "other") as checkpoint, reshard.open(source) as first:
        weights = checkpoint.quantised()
        assert {one.kind for one in weights.values()} == {other}
        for name, one in first.quantised().items():
            for role in ("weight", "scale"):  # the same bytes
                both = checkpoint.read(weights[name].parts[role]), first.read(one.parts[role])
                assert both[0].tobytes() == both[1].tobytes()
            scale = checkpoint.read(weights[name].parts["global"])
            assert scale.shape == ((1,) if other == COMPRESSED else ())
            expected = 1 / first.read(one.parts["global"]).astype(np.float64).reshape(-1)[0]
            assert abs(float(scale.reshape(-1)[0]) / expected - 1) < 2**-23
        with checkpoint.dequantised() as plain, first.dequantised() as expected_values:
            for name in weights:
                values = plain.load(dtype="float32")[name], expected_values.load(dtype="float32")[name]
                assert np.allclose(*values, rtol=2**-22, atol=0)
    entry = json.loads((tmp_path / "other" / "config.json").read_text())["quantization_config"]
    assert entry["quant_method"] == ENTRIES[other]["quant_method"]
    assert entry["ignore"] == ["lm_head"]
    assert entry["config_groups"]["group_0"]["weights"]["group_size"] == 16
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == ENTRIES[form]["quant_method"]


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_scales_of_the_libraries(dtype: Any) -> None:
    """Each form has the value that its library computes of the same largest magnitude."""
    rng = RNG(1)
    for _ in range(2000):
        of = amax(rng, dtype)
        if not of:
            continue
        compressed, modelopt = np.float32(MOST / of), np.float32(of / MOST)
        assert reciprocal(compressed, COMPRESSED) == modelopt
        assert reciprocal(modelopt, MODELOPT) == compressed


def test_other_scales_come_back_or_are_refused(tmp_path: Path) -> None:
    rng, n = RNG(2), 0
    for value in np.exp2(rng.normal(size=4000) * 5).astype(np.float32):
        other = reciprocal(value, MODELOPT)
        if other is not None:
            n += 1
            assert reciprocal(other, COMPRESSED) == value
    assert 1000 < n < 4000
    for value in (0.0, -1.0, np.inf, np.nan, 1e-45):
        assert reciprocal(np.float32(value), MODELOPT) is None
        made = tensors(MODELOPT) | {"a.weight_scale_2": np.array(value, np.float32)}
        reshard.save_file(made, tmp_path / "m.safetensors")
        with pytest.raises(UnsupportedError, match="no float32 value") as caught:
            reshard.convert(tmp_path / "m.safetensors", tmp_path / "out.safetensors", dtype=COMPRESSED)
        assert caught.value.key == "a.weight_scale_2"
        assert not (tmp_path / "out.safetensors").exists()


def test_what_has_no_other_form(tmp_path: Path) -> None:
    def refused(made: dict[str, Array], words: str, error: type[ReshardError] = UnsupportedError) -> None:
        reshard.save_file(made, tmp_path / "m.safetensors")
        with pytest.raises(error, match=words):
            reshard.convert(tmp_path / "m.safetensors", tmp_path / "out.safetensors", dtype=COMPRESSED)
        assert not (tmp_path / "out.safetensors").exists()

    refused({"w": np.ones((2, 2), np.float32)}, "has no weights in NVFP4")
    refused(tensors(MODELOPT) | weight("fp8-block", "d", RNG(3)), "is quantised otherwise")
    refused(tensors(MODELOPT) | {"a.weight_packed": np.ones(3, np.float32)}, "name of another tensor", MismatchError)
    reshard.save_file(tensors(COMPRESSED), tmp_path / "same.safetensors")  # it stays
    reshard.convert(tmp_path / "same.safetensors", tmp_path / "out.safetensors", dtype=COMPRESSED)
    found = reshard.load_file(tmp_path / "out.safetensors")
    assert all(found[key].tobytes() == array.tobytes() for key, array in tensors(COMPRESSED).items())
    cache = model(tmp_path / "cache", MODELOPT, kv_cache_quant_algo="FP8")
    with pytest.raises(UnsupportedError, match="`kv_cache_quant_algo`"):
        reshard.convert(cache, tmp_path / "hf", dtype=COMPRESSED)
    weights_only = model(tmp_path / "w4a16", COMPRESSED, with_input=False)
    with pytest.raises(UnsupportedError, match="scales of activations"):
        reshard.convert(weights_only, tmp_path / "hf", dtype=MODELOPT)
    with pytest.raises((ArgumentError, UnsupportedError)):
        reshard.convert(weights_only, tmp_path / "hf", dtype="nvfp5")
    assert not (tmp_path / "hf").exists()
