"""Dequantised weights are bit for bit those of the library that owns their kind, however they are read."""

import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.helpers.quantised_samples import CONFIGS, Array, config_of, weight
from tests.quantised.models import RNG, llama, to_torch

import reshard
from reshard.errors import DestinationExistsError, UnsupportedError

torch = pytest.importorskip("torch")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
FLOAT = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def from_torch(tensor: Any, dtype: str) -> Array:
    rounded = tensor.to(getattr(torch, dtype)).contiguous()
    found: Array = np.array(rounded.view(torch.uint8).numpy()).view(FLOAT[dtype])
    return found.reshape(tuple(rounded.shape))


def blocks_of_transformers(arrays: Mapping[str, Array], dtype: str) -> Array:
    module: Any = importlib.import_module("transformers.integrations.finegrained_fp8")
    values, of = arrays["a.weight"], next(one for key, one in arrays.items() if "weight_scale" in key)
    if of.ndim == 0:
        of = of.reshape(1, 1)
    made = module.Fp8Dequantize(None)._dequantize_one(to_torch(values), to_torch(of), getattr(torch, dtype))
    return from_torch(made, dtype)


def mxfp4_of_transformers(arrays: Mapping[str, Array], dtype: str) -> Array:
    module: Any = importlib.import_module("transformers.integrations.mxfp4")
    blocks, exponents = (to_torch(arrays[f"a.w_{one}"]) for one in ("blocks", "scales"))
    return from_torch(module.convert_moe_packed_tensors(blocks, exponents, dtype=getattr(torch, dtype)), dtype)


def bits_of_bitsandbytes(arrays: Mapping[str, Array], dtype: str) -> Array:
    library: Any = pytest.importorskip("bitsandbytes")
    start = "a.weight."
    state = {key.removeprefix(start): to_torch(one) for key, one in arrays.items() if key.startswith(start)}
    state = library.functional.QuantState.from_dict(state, device="cpu")
    state.dtype = getattr(torch, dtype)
    return from_torch(library.functional.dequantize_4bit(to_torch(arrays["a.weight"]), state), dtype)


def int8_of_bitsandbytes(arrays: Mapping[str, Array], dtype: str) -> Array:
    library: Any = pytest.importorskip("bitsandbytes")
    of = library.functional.int8_vectorwise_dequant(to_torch(arrays["a.weight"]), to_torch(arrays["a.SCB"]))
    return from_torch(of, dtype)


def e2m1(packed: Array) -> Array:
    pairs = np.stack([packed & 15, packed >> 4], axis=-1)
    return E2M1[pairs.reshape(*packed.shape[:-1], -1)]


def nvfp4(arrays: Mapping[str, Array], dtype: str) -> Array:
    """As `compressed_tensors` (`scale / global_scale`) and modelopt (`scale * weight_scale_2`) compute it."""
    of: Array = arrays["a.weight_scale"].astype(np.float32)
    if "a.weight_packed" in arrays:
        packed, of = arrays["a.weight_packed"], of / arrays["a.weight_global_scale"]
    else:
        packed, of = arrays["a.weight"], of * arrays["a.weight_scale_2"]
    values = e2m1(packed)
    if "a.weight" in arrays:
        values += 0.0  # `e2m1_values` of modelopt has no -0
    return np.asarray(values * np.repeat(of, 16, axis=-1)).astype(FLOAT[dtype])


def mxfp4_packed(arrays: Mapping[str, Array], dtype: str) -> Array:
    of = np.exp2(arrays["a.weight_scale"].astype(np.float32) - 127)
    packed = arrays["a.weight_packed" if "a.weight_packed" in arrays else "a.weight"]
    return np.asarray(e2m1(packed) * np.repeat(of, 32, axis=-1)).astype(FLOAT[dtype])


def int8(arrays: Mapping[str, Array], dtype: str) -> Array:
    return np.asarray(arrays["a.weight"].astype(np.float32) * arrays["a.weight_scale"]).astype(FLOAT[dtype])


def integers(words: Array, bits: int, axis: int) -> Array:
    """The integers in words of 32 bits, along an axis: bit after bit, the lowest first."""
    shifts = np.arange(32).reshape(-1, *(1,) * (words.ndim - 1))
    each = np.moveaxis(words.view(np.uint32), axis, 0)[:, None] >> shifts & 1
    each = each.reshape(-1, *each.shape[2:])  # the bits of all words
    each = each.reshape(-1, bits, *each.shape[1:])
    return np.moveaxis((each << np.arange(bits).reshape(1, -1, *(1,) * (words.ndim - 1))).sum(1), 0, axis)


def gptq(arrays: Mapping[str, Array], dtype: str, bits: int = 4) -> Array:
    """As AutoGPTQ: `scales[g_idx] * (weight - (zeros + 1)[g_idx])`, of a linear layer in `[outputs, inputs]`."""
    codes, zeros = integers(arrays["a.qweight"], bits, 0), integers(arrays["a.qzeros"], bits, 1) + 1
    order = arrays["a.g_idx"]
    values = (codes.astype(np.int64) - zeros[order]).astype(np.float32) * arrays["a.scales"].astype(np.float32)[order]
    return np.ascontiguousarray(values.T).astype(FLOAT[dtype])


def awq(arrays: Mapping[str, Array], dtype: str) -> Array:
    """As AutoAWQ: `unpack_awq`, `reverse_awq_order`, `(weight - zeros) * scales`."""
    order = np.arange(arrays["a.scales"].shape[1]).reshape(-1, 8)[:, [0, 4, 1, 5, 2, 6, 3, 7]].reshape(-1)
    codes, zeros = (integers(arrays[f"a.{one}"], 4, 1)[:, order].astype(np.int64) for one in ("qweight", "qzeros"))
    group = codes.shape[0] // zeros.shape[0]
    zeros, of = np.repeat(zeros, group, 0), np.repeat(arrays["a.scales"].astype(np.float32), group, 0)
    return np.ascontiguousarray(((codes - zeros).astype(np.float32) * of).T).astype(FLOAT[dtype])


def packed_integers(arrays: Mapping[str, Array], dtype: str) -> Array:
    """As `compressed_tensors.pack_quantized`: integers less half of their range, times the scale of the group."""
    codes = integers(arrays["a.weight_packed"], 4, 1).astype(np.int64) - 8
    of = arrays["a.weight_scale"].astype(np.float32)
    of = np.repeat(of, codes.shape[1] // of.shape[1], 1)
    return np.asarray(codes.astype(np.float32) * of).astype(FLOAT[dtype])


ORACLES: dict[str, Callable[[Mapping[str, Array], str], Array]] = {
    "fp8-block": blocks_of_transformers,
    "fp8-channel": blocks_of_transformers,
    "fp8-tensor": blocks_of_transformers,
    "mxfp4": mxfp4_of_transformers,
    "mxfp4-packed": mxfp4_packed,
    "mxfp4-modelopt": mxfp4_packed,
    "nvfp4": nvfp4,
    "nvfp4-modelopt": nvfp4,
    "int8-channel": int8,
    "int-packed": packed_integers,
    "gptq": gptq,
    "awq": awq,
    "bnb-4bit": bits_of_bitsandbytes,
    "bnb-int8": int8_of_bitsandbytes,
}


def same(found: Array, expected: Array) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    nan = np.isnan(found.astype(np.float32))
    assert (nan == np.isnan(expected.astype(np.float32))).all()
    whole = f"u{found.itemsize}"
    differ = (found.view(whole) != expected.view(whole)) & ~nan
    assert not differ.any(), (int(differ.sum()), found[differ][:4], expected[differ][:4])


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("dtype", list(FLOAT))
@pytest.mark.parametrize("kind", list(CONFIGS))
def test_values_are_those_of_the_library(kind: str, dtype: str, tmp_path: Path) -> None:
    arrays = weight(kind, "a", RNG(5), 256, 384)
    hf = tmp_path / "hf"
    hf.mkdir()
    reshard.save_file(arrays | {"a.norm": np.ones(3, np.float32)}, hf / "model.safetensors")
    (hf / "config.json").write_text(json.dumps(config_of(kind) | {"vocab_size": 1 << 40}))
    name = "a.w" if kind == "mxfp4" else "a.weight"
    expected = ORACLES[kind](arrays, dtype)
    with reshard.open(hf) as checkpoint, checkpoint.dequantised() as plain:
        assert sorted(plain) == sorted([name, "a.norm"])
        same(plain.load(dtype=dtype)[name], expected)
        float32 = ORACLES[kind](arrays, "float32")
        same(plain.read(name, (..., slice(3, 200), slice(5, 77))), np.ascontiguousarray(float32[..., 3:200, 5:77]))
        layout = {"mesh": {"tp": 4}, "rules": [{"match": name, "cut": [None] * (expected.ndim - 1) + ["tp"]},
                                               {"match": "*"}]}  # fmt: skip
        part = plain.load(layout, rank=2, dtype=dtype)[name]
        wide = expected.shape[-1] // 4
        same(part, np.ascontiguousarray(expected[..., 2 * wide : 3 * wide]))
    single = tmp_path / "m.safetensors"
    reshard.convert(hf / "model.safetensors", single, dtype=dtype)
    same(reshard.load_file(single)[name], expected)
    # From parts that are themselves divided, through checksums.
    if kind != "bnb-4bit":
        whole = {"mesh": {"tp": 2}, "rules": [{"match": "*"}]}
        reshard.convert(hf / "model.safetensors", tmp_path / "ranks", to="checkpoint2", layout=whole)
        with reshard.open(tmp_path / "ranks") as checkpoint, checkpoint.dequantised() as plain:
            same(plain.load(dtype=dtype)[name], expected)


def torchao_tensors() -> dict[str, Any]:
    """A tensor of each class of torchao that is quantised on a processor, by name."""
    quantization: Any = importlib.import_module("torchao.quantization")
    formats: Any = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
    nvfp4_tensor: Any = importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor")
    torch.manual_seed(3)
    values = torch.randn(64, 128, dtype=torch.bfloat16)
    made = {}
    for name in ("Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig"):
        model = torch.nn.Sequential(torch.nn.Linear(128, 64, bias=False)).to(torch.bfloat16)
        quantization.quantize_(model, getattr(quantization, name)())
        made[f"{name}.weight"] = model[0].weight.detach()
    made["mx8.weight"] = formats.MXTensor.to_mx(values, torch.float8_e4m3fn, 32)
    made["mx4.weight"] = formats.MXTensor.to_mx(values, torch.float4_e2m1fn_x2, 32)
    made["nv.weight"] = nvfp4_tensor.NVFP4Tensor.to_nvfp4(
        values, per_tensor_scale=nvfp4_tensor.per_tensor_amax_to_scale(values.abs().max())
    )
    return made


@pytest.mark.filterwarnings("ignore")
def test_tensors_of_torchao(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    support: Any = importlib.import_module("torchao.prototype.safetensors.safetensors_support")
    library: Any = importlib.import_module("safetensors.torch")
    made = torchao_tensors()
    arrays, header = support.flatten_tensor_state_dict({**made, "norm.weight": torch.ones(4)})
    hf = tmp_path / "hf"
    hf.mkdir()
    library.save_file({key: one.contiguous() for key, one in arrays.items()}, hf / "model.safetensors", header)
    with reshard.open(hf) as checkpoint, checkpoint.dequantised() as plain:
        assert {one.kind for one in checkpoint.quantised().values()} == {"torchao"}
        assert sorted(plain) == sorted([*made, "norm.weight"])
        for dtype in ("float32", "bfloat16"):
            found = plain.load(dtype=dtype)
            for name, one in made.items():
                if name.startswith("Intx"):  # it has no other dtype than that of the module
                    zeros, of = (part.to(torch.float32).reshape(64, 1) for part in (one.zero_point, one.scale))
                    assert torch.equal(((one.qdata - zeros) * of).to(torch.bfloat16), one.dequantize())
                    same(found[name], from_torch((one.qdata - zeros) * of, dtype))
                    continue
                same(found[name], from_torch(one.dequantize(torch.float32), dtype))
    # The description of the tensors stays, in several files, too.
    reshard.convert(hf, tmp_path / "out", files={"max_shard_size": 4096})
    written: dict[str, Any] = {}
    described: dict[str, str] = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        with library.safe_open(path, "pt") as file:
            described |= file.metadata()
            written |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  no mapping
    again, rest = support.unflatten_tensor_state_dict(written, described)
    assert not rest
    assert all(torch.equal(again[name].dequantize(), one.dequantize()) for name, one in made.items())
    with pytest.raises(reshard.ReshardError, match="cannot be renamed"):
        reshard.convert(hf, tmp_path / "no", select={"rename": {"nv.": "nw."}})
    with pytest.raises(reshard.ReshardError, match="described in the header of its file"):
        reshard.convert(hf, tmp_path / "no", to="torch")


def test_the_library_loads_a_dequantised_model(tmp_path: Path) -> None:
    library: Any = pytest.importorskip("transformers")
    arrays = llama(tmp_path / "hf", "fp8-block")
    report = reshard.convert(tmp_path / "hf", tmp_path / "out", dtype="bfloat16")
    assert report.warnings == ()
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    model = library.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    found = from_torch(model.model.layers[0].mlp.down_proj.weight.detach(), "bfloat16")
    name = "model.layers.0.mlp.down_proj.weight"
    same(
        found,
        blocks_of_transformers({"a.weight": arrays[name], "a.weight_scale": arrays[f"{name}_scale_inv"]}, "bfloat16"),
    )
    reshard.convert(tmp_path / "hf", tmp_path / "out", dtype="bfloat16", overwrite=True)  # the same files
    (tmp_path / "out" / "config.json").write_text("{}")
    with pytest.raises(DestinationExistsError, match=r"config\.json"):
        reshard.convert(tmp_path / "hf", tmp_path / "out", dtype="bfloat16", overwrite=True)


def test_edges_of_blocks(tmp_path: Path) -> None:
    """Rows and columns that fill no block, as of DeepSeek-V3, whose own code is the rule: transformers refuses them."""
    arrays = weight("fp8-block", "a", RNG(1), 576, 200)
    reshard.save_file(arrays, tmp_path / "m.safetensors")
    reshard.convert(tmp_path / "m.safetensors", tmp_path / "out.safetensors", dtype="float32")
    of = np.repeat(np.repeat(arrays["a.weight_scale_inv"], 128, 0), 128, 1)[:576, :200]
    same(reshard.load_file(tmp_path / "out.safetensors")["a.weight"], arrays["a.weight"].astype(np.float32) * of)


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_bits_of_gptq(bits: int, tmp_path: Path) -> None:
    rng = RNG(bits)
    rows, columns = 64, 96  # outputs and inputs
    arrays: dict[str, Array] = {
        "a.qweight": rng.integers(0, 1 << 31, (columns * bits // 32, rows), np.int32),
        "a.qzeros": rng.integers(0, 1 << 31, (3, rows * bits // 32), np.int32),
        "a.scales": rng.uniform(0.1, 1, (3, rows)).astype(np.float16),
        "a.g_idx": np.arange(columns, dtype=np.int32) // 32,
    }
    reshard.save_file(arrays, tmp_path / "m.safetensors")
    with reshard.open(tmp_path / "m.safetensors") as checkpoint, checkpoint.dequantised() as plain:
        same(plain.read("a.weight"), gptq(arrays, "float32", bits))
        same(plain.read("a.weight", (slice(5, 40), slice(33, 71))), gptq(arrays, "float32", bits)[5:40, 33:71].copy())
    arrays["a.g_idx"][5] = 3
    reshard.save_file(arrays, tmp_path / "m.safetensors")
    reshard.convert(tmp_path / "m.safetensors", tmp_path / "same.safetensors")
    with pytest.raises(reshard.ReshardError, match=r"`g_idx` of `a\.weight` names group 3; expected less than 3"):
        reshard.convert(tmp_path / "m.safetensors", tmp_path / "out.safetensors", dtype="bfloat16")


def test_nested_scales_of_bitsandbytes(tmp_path: Path) -> None:
    library: Any = pytest.importorskip("bitsandbytes")
    torch.manual_seed(1)
    values = torch.randn(96, 130, dtype=torch.bfloat16)
    for kind in ("nf4", "fp4"):
        packed, state = library.functional.quantize_4bit(
            values, blocksize=64, quant_type=kind, compress_statistics=True
        )
        arrays = {f"a.weight.{key}": one.numpy() for key, one in state.as_dict(packed=True).items()}
        reshard.save_file({"a.weight": packed.numpy(), **arrays}, tmp_path / "m.safetensors")
        with reshard.open(tmp_path / "m.safetensors") as checkpoint, checkpoint.dequantised() as plain:
            assert list(plain) == ["a.weight"]
            for dtype in ("float32", "bfloat16"):
                state.dtype = getattr(torch, dtype)
                expected = from_torch(library.functional.dequantize_4bit(packed, state), dtype)
                same(plain.load(dtype=dtype)["a.weight"], expected)


@pytest.mark.parametrize("dtype", ["U8", "I8", "F16", "BF16", "F32", "F64"])
def test_bytes_of_bitsandbytes_in_elements_of_any_dtype(dtype: str, tmp_path: Path) -> None:
    """`bnb_4bit_quant_storage`, as FSDP needs it: the same bytes as elements of another dtype."""
    arrays = weight("bnb-4bit", "a", RNG(1), 96, 128)
    reshard.save_file(arrays, tmp_path / "bytes.safetensors")
    with reshard.open(tmp_path / "bytes.safetensors") as checkpoint, checkpoint.dequantised() as plain:
        expected = plain.read("a.weight")
    stored = {"U8": np.uint8, "I8": np.int8, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32,
              "F64": np.float64}[dtype]  # fmt: skip
    arrays["a.weight"] = arrays["a.weight"].reshape(-1).view(stored).reshape(-1, 1)
    hf = tmp_path / "hf"
    hf.mkdir()
    reshard.save_file(arrays, hf / "model.safetensors")
    (hf / "config.json").write_text(json.dumps(config_of("bnb-4bit")))
    with reshard.open(hf) as checkpoint:
        assert checkpoint["a.weight"].dtype == dtype
        assert {one.kind for one in checkpoint.quantised().values()} == {"bnb-4bit"}
    reshard.convert(hf, tmp_path / "copy")
    copied = reshard.load_file(tmp_path / "copy" / "model.safetensors")["a.weight"]
    assert copied.tobytes() == arrays["a.weight"].tobytes()
    with reshard.open(hf) as checkpoint, checkpoint.dequantised() as plain:
        same(plain.read("a.weight"), expected)
        same(plain.read("a.weight", (slice(7, 30), slice(5, 60))), expected[7:30, 5:60].copy())
        same(plain.read("a.weight", (50, slice(127, 128))), expected[50, 127:128].copy())
    arrays["a.weight"] = arrays["a.weight"][:-1]
    reshard.save_file(arrays, hf / "model.safetensors")
    with (
        reshard.open(hf) as checkpoint,
        pytest.raises(reshard.ReshardError, match=r"12288 values of 4 bits, two a byte"),
    ):
        checkpoint.quantised()


def test_what_stays_float32(tmp_path: Path) -> None:
    arrays = weight("fp8-block", "a", RNG(1)) | {"a.e_score_correction_bias": np.ones(4, np.float32)}
    reshard.save_file(arrays | {"a.norm": np.ones(3, np.float32)}, tmp_path / "m.safetensors")
    report = reshard.convert(tmp_path / "m.safetensors", tmp_path / "out.safetensors", dtype="bfloat16")
    assert "stays float32" in report.warnings[0]
    with reshard.open(tmp_path / "out.safetensors") as checkpoint:
        assert {key: checkpoint[key].dtype for key in checkpoint} == {
            "a.weight": "BF16", "a.e_score_correction_bias": "F32", "a.norm": "BF16"}  # fmt: skip


def test_a_name_that_is_taken(tmp_path: Path) -> None:
    reshard.save_file(weight("gptq", "a", RNG(1)) | {"a.weight": np.ones(3, np.float32)}, tmp_path / "m.safetensors")
    with reshard.open(tmp_path / "m.safetensors") as checkpoint, pytest.raises(reshard.ReshardError, match="beside"):
        checkpoint.dequantised()


def test_weights_one_behind_the_other(tmp_path: Path) -> None:
    """Tensors that follow each other are read together, also where there are bytes between them."""
    arrays: dict[str, Array] = {}
    for number, rows in enumerate((3, 7, 128, 1)):
        arrays |= weight("fp8-channel", f"l.{number}", RNG(number), rows, 13)
    reshard.save_file(arrays, tmp_path / "m.safetensors")
    for dtype in ("float32", "bfloat16"):
        reshard.convert(tmp_path / "m.safetensors", tmp_path / f"{dtype}.safetensors", dtype=dtype)
        found = reshard.load_file(tmp_path / f"{dtype}.safetensors")
        for number in range(4):
            one = {"a.weight": arrays[f"l.{number}.weight"], "a.weight_scale": arrays[f"l.{number}.weight_scale"]}
            same(found[f"l.{number}.weight"], blocks_of_transformers(one, dtype))


def test_zero_points_of_torchao_are_bytes_beside_bytes(tmp_path: Path) -> None:
    """The core subtracts bytes: zero points of other dtypes, and those of FP8, are refused by name."""
    of = {
        "_type": "Int8Tensor",
        "_data": {"block_size": [1, 8]},
        "_tensor_data_names": ["qdata", "scale", "zero_point"],
    }
    bytes_, scale = np.arange(-16, 16, dtype=np.int8).reshape(4, 8), np.full((4, 1), 0.5, np.float32)
    header = {"tensor_names": json.dumps(["a.weight"]), "a.weight": json.dumps(of)}
    for values, zeros in (
        (bytes_, np.ones((4, 1), np.int8)),
        (bytes_, np.ones((4, 1), np.int32)),
        (bytes_, np.ones((4, 1), ml_dtypes.bfloat16)),
        (bytes_.astype(ml_dtypes.float8_e4m3fn), np.ones((4, 1), np.int8)),
    ):
        parts = {"a._weight_qdata": values, "a._weight_scale": scale, "a._weight_zero_point": zeros}
        reshard.save_file(parts, tmp_path / "m.safetensors", metadata=header)
        with reshard.open(tmp_path / "m.safetensors") as checkpoint:
            if values.dtype == zeros.dtype == np.int8:
                with checkpoint.dequantised() as plain:
                    assert (plain.read("a.weight") == (values.astype(np.float32) - 1) * 0.5).all()
                continue
            with pytest.raises(UnsupportedError, match=r"`a\.weight` is quantised as torchao"):
                checkpoint.dequantised()
