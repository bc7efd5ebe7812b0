"""Block-scaled FP8 is written with the bytes that transformers writes, and stays the same when it is made again."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.helpers.quantised_samples import Array, weight
from tests.quantised.models import llama, to_torch

import reshard
from reshard.errors import ArgumentError, UnsupportedError

torch = pytest.importorskip("torch")
RNG = np.random.default_rng


def of_transformers(array: Array) -> tuple[Array, Array]:
    module: Any = importlib.import_module("transformers.integrations.finegrained_fp8")
    config = SimpleNamespace(weight_block_size=(128, 128), scale_fmt=None)
    made = module.Fp8Quantize(SimpleNamespace(quantization_config=config))._quantize_one("w", to_torch(array))
    return made["w"].view(torch.uint8).numpy(), made["w_scale_inv"].numpy()


def odd_values(rng: np.random.Generator, dtype: Any) -> Array:
    array = np.asarray(rng.normal(size=(256, 384)) * np.exp2(rng.integers(-20, 20, (256, 384)))).astype(dtype)
    array[:128, :128] = 0
    array[130, 5] = np.inf
    array[130, 200] = np.nan
    array[0, 130] = array.dtype.type(3e-39)
    return array


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bytes_are_those_of_transformers(dtype: str, tmp_path: Path) -> None:
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    rng = RNG(2)
    with np.errstate(over="ignore"):
        arrays = {"a": odd_values(rng, kind), "b": rng.normal(size=(384, 128)).astype(kind),
                  "e": rng.normal(size=(3, 128, 256)).astype(kind)}  # fmt: skip
    reshard.save_file(arrays, tmp_path / "m.safetensors")
    with reshard.open(tmp_path / "m.safetensors") as checkpoint, checkpoint.in_fp8(list(arrays)) as narrow:
        for name, array in arrays.items():
            codes, scales = of_transformers(array)
            found = narrow.read(name).view(np.uint8)
            is_nan = codes & 0x7F == 0x7F
            assert (is_nan == (found & 0x7F == 0x7F)).all()
            assert (found == codes)[~is_nan].all()
            assert (narrow.read(f"{name}_scale_inv").view(np.uint32) == scales.view(np.uint32)).all()
        part = narrow.read("b", (slice(100, 300), slice(3, 99)))
        assert (part.view(np.uint8) == of_transformers(arrays["b"])[0][100:300, 3:99]).all()


@pytest.mark.parametrize("seed", range(3))
def test_the_same_bytes_again(seed: int, tmp_path: Path) -> None:
    rng = RNG(seed)
    array = np.asarray(rng.normal(size=(512, 512)) * np.exp2(rng.normal(size=(512, 1)) * 4)).astype(ml_dtypes.bfloat16)
    reshard.save_file({"a.weight": array}, tmp_path / "m.safetensors")
    with reshard.open(tmp_path / "m.safetensors") as checkpoint, checkpoint.in_fp8(["a.weight"]) as first:
        found = first.load()
    reshard.save_file(found, tmp_path / "fp8.safetensors")
    reshard.convert(tmp_path / "fp8.safetensors", tmp_path / "wide.safetensors", dtype="bfloat16")
    with reshard.open(tmp_path / "wide.safetensors") as checkpoint, checkpoint.in_fp8(["a.weight"]) as second:
        again = second.load()
    assert found.keys() == again.keys()
    assert all((found[key].view(np.uint8) == again[key].view(np.uint8)).all() for key in found)


def test_a_model_is_published_in_fp8(tmp_path: Path) -> None:
    library: Any = pytest.importorskip("transformers")
    llama(tmp_path / "fp8", "fp8-block")
    reshard.convert(tmp_path / "fp8", tmp_path / "wide", dtype="bfloat16")
    report = reshard.convert(tmp_path / "wide", tmp_path / "out", dtype="float8_e4m3fn")
    with reshard.open(tmp_path / "out") as checkpoint, reshard.open(tmp_path / "wide") as wide:
        weights = checkpoint.quantised()
        assert sorted(weights) == sorted(key for key in wide if "proj" in key)
        codes, scales = of_transformers(wide.read("model.layers.0.mlp.up_proj.weight"))
        assert (checkpoint.read("model.layers.0.mlp.up_proj.weight").view(np.uint8) == codes).all()
        assert (checkpoint.read("model.layers.0.mlp.up_proj.weight_scale_inv") == scales).all()
        assert report.n_tensors == len(wide) + len(weights)
    entry = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (entry["quant_method"], entry["weight_block_size"]) == ("fp8", [128, 128])
    assert entry["modules_to_not_convert"] == ["lm_head"]
    reshard.convert(tmp_path / "out", tmp_path / "again", dtype="bfloat16")
    reshard.convert(tmp_path / "again", tmp_path / "twice", dtype="float8_e4m3fn")
    files = [(tmp_path / one / "model.safetensors").read_bytes() for one in ("out", "twice")]
    assert files[0] == files[1]
    config = library.AutoConfig.from_pretrained(tmp_path / "out")
    assert config.quantization_config["quant_method"] == "fp8"


def test_what_cannot_be_fp8(tmp_path: Path) -> None:
    reshard.save_file(weight("fp8-block", "a", RNG(1)), tmp_path / "m.safetensors")
    with pytest.raises(UnsupportedError, match="is quantised already"):
        reshard.convert(tmp_path / "m.safetensors", tmp_path / "out", dtype="float8_e4m3fn")
    reshard.save_file({"a.weight": np.ones((128, 100), np.float32)}, tmp_path / "b.safetensors")
    with pytest.raises(UnsupportedError, match="the model is not made: there is no config"):
        reshard.convert(tmp_path / "b.safetensors", tmp_path / "out", dtype="float8_e4m3fn")
    with (
        reshard.open(tmp_path / "b.safetensors") as checkpoint,
        pytest.raises(ArgumentError, match="no complete blocks"),
    ):
        checkpoint.in_fp8(["a.weight"])
    ints = {"a.weight": np.ones((128, 128), np.int32)}
    reshard.save_file(ints, tmp_path / "c.safetensors")
    with reshard.open(tmp_path / "c.safetensors") as checkpoint, pytest.raises(ArgumentError, match="is I32"):
        checkpoint.in_fp8(["a.weight"])
    taken = {"a.weight": np.ones((128, 128), np.float32), "a.weight_scale_inv": np.ones(1, np.float32)}
    reshard.save_file(taken, tmp_path / "d.safetensors")
