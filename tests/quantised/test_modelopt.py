"""What nvidia-modelopt 0.47 exports beside NVFP4 in blocks of 16 and FP8 with a scale a row or tensor."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.helpers.quantised_samples import ARCHITECTURE, Array, fp8, integers, scales, weight

import reshard
from reshard.errors import LayoutError, MismatchError, ReshardError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

RNG = np.random.default_rng
TP = {"mesh": {"tp": 2}, "rules": [{"match": "a.weight", "cut": ["tp"]}, {"match": "*"}]}


def model(folder: Path, arrays: Mapping[str, Array]) -> Path:
    folder.mkdir()
    reshard.save_file(dict(arrays), folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps({**ARCHITECTURE, "quantization_config": {"quant_method": "modelopt"}})
    )
    return folder


def parts(path: Path) -> tuple[str, list[str]]:
    with reshard.open(path) as checkpoint:
        [one] = checkpoint.quantised().values()
        return one.kind, list(one.parts)


def test_blocks_of_fp8_with_a_scale_of_four_dims(tmp_path: Path) -> None:
    """`FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG`: scales as rows, 1, columns, 1."""
    for rows, columns in ((512, 256), (128, 256), (512, 128)):
        grid = (rows // 128, columns // 128)
        arrays = {"a.weight": fp8(RNG(1), (rows, columns)), "a.weight_scale": scales(RNG(2), (grid[0], 1, grid[1], 1))}
        path = model(tmp_path / f"{rows} {columns}", arrays)
        assert parts(path) == ("fp8-block", ["weight", "scale"])
        of = np.repeat(np.repeat(arrays["a.weight_scale"].reshape(grid), 128, 0), 128, 1)
        with reshard.open(path) as checkpoint, checkpoint.dequantised() as plain:
            assert (plain.read("a.weight") == arrays["a.weight"].astype(np.float32) * of).all()
        if rows > 128:
            reshard.convert(path, tmp_path / f"{rows} {columns} ranks", layout=TP)
            with reshard.open(tmp_path / f"{rows} {columns} ranks") as checkpoint:
                assert checkpoint.load(TP, rank=1)["a.weight_scale"].shape == (2, 1, grid[1], 1)


def test_nvfp4_in_blocks_of_32(tmp_path: Path) -> None:
    """`W4A8_NVFP4_FP8_CFG`, which has no other form."""
    of_16, of_32 = (weight("nvfp4-modelopt", "a", RNG(1), 64, n) for n in (256, 128))
    path = model(tmp_path / "m", of_16 | {"a.weight_scale": of_32["a.weight_scale"]})
    with reshard.open(path) as checkpoint, checkpoint.dequantised() as plain:
        assert checkpoint.quantised()["a.weight"].values == {"block": 32}
        found = plain.read("a.weight")
        with pytest.raises(UnsupportedError, match="has blocks of 32 values"):
            checkpoint.in_nvfp4("nvfp4")
    codes = np.stack([of_16["a.weight"] & 15, of_16["a.weight"] >> 4], -1).reshape(64, 256)
    magnitude = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)[codes & 7] * np.where(codes > 8, -1, 1)
    of = of_32["a.weight_scale"].astype(np.float32) * of_16["a.weight_scale_2"]
    expected = magnitude.astype(np.float32) * np.repeat(of, 32, 1)
    assert (found.view(np.uint32) == expected.view(np.uint32)).all()  # the code of -0 is +0


def test_integers_with_a_scale_of_inputs_are_kept_together_and_not_dequantised(tmp_path: Path) -> None:
    """`INT8_SMOOTHQUANT_CFG` and `INT4_AWQ_CFG`: the inputs are multiplied by `pre_quant_scale` first."""
    of_inputs = {"a.pre_quant_scale": scales(RNG(1), (256,)), "a.input_scale": scales(RNG(1), ())}
    eight = {"a.weight": integers(RNG(2), (512, 256), np.int8), "a.weight_scale": scales(RNG(3), (512,))}
    four = {"a.weight": integers(RNG(2), (256, 256), np.uint8), "a.weight_scale": scales(RNG(3), (512, 2))}
    second = {"a.weight_scale_2": scales(RNG(4), ())}
    cases: dict[str, tuple[dict[str, Array], str, list[str]]] = {
        "8": (eight | of_inputs, "int8-channel", ["weight", "scale", "input_scale", "pre_quant_scale"]),
        "4": (four | of_inputs, "int4-modelopt", ["weight", "scale", "input_scale", "pre_quant_scale"]),
        "fused": (four, "int4-modelopt", ["weight", "scale"]),
        "two": (four | second, "int4-modelopt", ["weight", "scale", "global"]),
    }
    for name, (arrays, kind, roles) in cases.items():
        path = model(tmp_path / name, arrays)
        assert parts(path) == (kind, roles)
        words = "scales the inputs of the module" if "a.pre_quant_scale" in arrays else "how its values are computed"
        with pytest.raises(UnsupportedError, match=words):
            reshard.convert(path, tmp_path / "out", dtype="bfloat16")
        for key in arrays.keys() - {"a.weight"}:  # which begins the names of others
            with pytest.raises(ReshardError, match="without"):
                reshard.convert(path, tmp_path / "out", select={"drop": [key]})
        reshard.convert(path, tmp_path / f"{name} copy")
        with reshard.open(tmp_path / f"{name} copy") as checkpoint:
            assert all(checkpoint.read(key).tobytes() == one.tobytes() for key, one in arrays.items())
        if kind == "int4-modelopt":
            with pytest.raises(LayoutError, match="it can be kept whole"):
                reshard.convert(path, tmp_path / "out", layout=TP)


def test_zero_points_of_activations_are_parts(tmp_path: Path) -> None:
    """As compressed-tensors writes them for activations that are not symmetric."""
    roles = ("input_scale", "input_zero_point", "output_scale", "output_zero_point")
    arrays: dict[str, Any] = weight("int8-channel", "a", RNG(1)) | {f"a.{one}": np.ones(1, np.int8) for one in roles}
    reshard.save_file(arrays, tmp_path / "m.safetensors")
    assert parts(tmp_path / "m.safetensors")[1] == ["weight", "scale", *roles]
    with reshard.open(tmp_path / "m.safetensors") as checkpoint, checkpoint.dequantised() as plain:
        assert list(plain) == ["a.weight"]


@pytest.mark.parametrize("said", [16, 32])
def test_blocks_of_32_are_those_of_the_configuration(tmp_path: Path, said: int) -> None:
    of_16, of_32 = (weight("nvfp4-modelopt", "a", RNG(1), 64, n) for n in (256, 128))
    path = model(tmp_path / "m", of_16 | {"a.weight_scale": of_32["a.weight_scale"]})
    group = {"weights": {"num_bits": 4, "type": "float", "group_size": said}, "targets": ["Linear"]}
    layer = {"a": {"quant_algo": "NVFP4", "group_size": said}}
    for entry in ({"group_size": said}, {"config_groups": {"group_0": group}}, {"quantized_layers": layer}):
        for name, of in (("config.json", "quantization_config"), ("hf_quant_config.json", "quantization")):
            (path / "config.json").write_text(json.dumps(ARCHITECTURE))
            (path / name).write_text(json.dumps({**ARCHITECTURE, of: {"quant_method": "modelopt", **entry}}))
            with reshard.open(path) as checkpoint:
                if said == 32:
                    assert checkpoint.quantised()["a.weight"].values == {"block": 32}
                    continue
                with pytest.raises(MismatchError, match=f"{name}` says `group_size` 16, and .* has blocks of 32"):
                    checkpoint.quantised()
