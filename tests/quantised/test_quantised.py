"""Quantised weights are one logical tensor: recognised, shown, cut, renamed and left out with all of their parts."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from tests.helpers.command_line import run
from tests.helpers.quantised_samples import ARCHITECTURE, CONFIGS, Array, config_of, fp8, scales, weight

import reshard
from reshard.errors import LayoutError, MismatchError, ReshardError, UnsupportedError

KINDS = list(CONFIGS)
RNG = np.random.default_rng


def folder_of(path: Path, arrays: Mapping[str, Array], config: object = None) -> Path:
    path.mkdir()
    reshard.save_file(dict(arrays), path / "model.safetensors")
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


def plain() -> dict[str, Array]:
    return {"a.norm.weight": np.ones(4, np.float32), "a.q.bias": np.ones(256, np.float32)}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_one_tensor_with_parts(kind: str, tmp_path: Path) -> None:
    arrays = weight(kind, "a.q", RNG(1)) | plain()
    source = folder_of(tmp_path / "hf", arrays, config_of(kind))
    with reshard.open(source) as checkpoint:
        (one,) = checkpoint.quantised().values()
    assert one.kind == kind
    assert set(one.parts.values()) == arrays.keys() - plain().keys()
    assert one.name == ("a.q.w" if kind == "mxfp4" else "a.q.weight")
    assert one.shape == ((2, 256, 256) if kind == "mxfp4" else (256, 256))
    page = run("inspect", source).stdout
    assert re.search(rf"{one.name} +{kind} +{' x '.join(map(str, one.shape))}", page)
    assert all(re.search(rf"  {re.escape(key.rpartition('.')[2])} ", page) for key in one.parts.values())
    assert json.loads(run("inspect", source, "--json").stdout)["quantised"][one.name]["parts"] == dict(one.parts)


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_part_is_named(kind: str, tmp_path: Path) -> None:
    arrays = weight(kind, "a.q", RNG(1))
    source = folder_of(tmp_path / "whole", arrays | plain(), config_of(kind))
    with reshard.open(source) as checkpoint:
        (one,) = checkpoint.quantised().values()
    for role, key in one.parts.items():
        if role in ("input_scale", "input_global_scale", "format"):  # of activations, and of one value only
            continue
        rest = {name: array for name, array in arrays.items() if name != key} | plain()
        path = folder_of(tmp_path / role, rest, config_of(kind))
        with reshard.open(path) as checkpoint, pytest.raises(MismatchError) as error:
            checkpoint.quantised()
        assert key in str(error.value) or "no tensor is quantised so" in str(error.value), (role, str(error.value))
        with pytest.raises(MismatchError):
            reshard.convert(path, tmp_path / "out")
        warned = run("inspect", path)
        assert warned.exit_code == 0
        assert "the quantised weights cannot be read" in warned.stderr


def test_config_and_tensors_agree(tmp_path: Path) -> None:
    arrays = weight("fp8-block", "a.q", RNG(1)) | plain()
    told = {"quant_method": "fp8", "weight_block_size": [64, 128]}
    cases: dict[str, tuple[Mapping[str, Array], object, str]] = {
        "none": (arrays, ARCHITECTURE, "has no `quantization_config`"),
        "another": (arrays, config_of("gptq"), "says `quant_method` `gptq`"),
        "blocks": (arrays, {**ARCHITECTURE, "quantization_config": told}, "blocks of 64 x 128, as `weight_block_size`"),
        "nothing": (plain(), config_of("fp8-block"), "no tensor is quantised so"),
        "bits": (
            weight("gptq", "a.q", RNG(1)),
            {**ARCHITECTURE, "quantization_config": {**CONFIGS["gptq"], "bits": 8}},
            "says `bits` 8, and `a.q.qweight` has 4",
        ),
        "group": (
            weight("awq", "a.q", RNG(1)),
            {**ARCHITECTURE, "quantization_config": {**CONFIGS["awq"], "group_size": 64}},
            "says `group_size` 64, and `a.q.qweight` has 2 groups of 256",
        ),
    }
    for name, (stored, config, message) in cases.items():
        path = folder_of(tmp_path / name, stored, config)
        with reshard.open(path) as checkpoint, pytest.raises(MismatchError, match=re.escape(message)):
            checkpoint.quantised()


def test_shapes_that_contradict(tmp_path: Path) -> None:
    block = weight("fp8-block", "a", RNG(1))
    cases: list[tuple[Mapping[str, Array], str]] = [
        (block | {"a.weight_scale_inv": np.ones((3, 2), np.float32)}, "has (3, 2) scales for the (256, 256) values"),
        (block | {"a.weight_scale_inv": np.ones((2, 2), np.int32)}, "is I32, expected F32 or"),
        (block | {"a.weight_scale": np.ones((), np.float32)}, "has two scales"),
        (
            block | {"a.weight": np.ones((256, 256), np.float32)},
            "is a part of a quantised weight, and `a.weight` is F32",
        ),
        (block | {"b.weight": fp8(RNG(1), (4, 4))}, "`b.weight_scale_inv` is missing"),
        ({"a.weight_scale_inv": np.ones((2, 2), np.float32)}, "`a.weight` is missing"),
        (weight("nvfp4", "a", RNG(1)) | {"a.weight_global_scale": np.ones(3, np.float32)}, "has shape (3,)"),
        (
            weight("gptq", "a", RNG(1)) | {"a.qzeros": np.zeros((2, 31), np.int32)},
            "has shape (2, 31), expected (2, 32)",
        ),
    ]
    for number, (arrays, message) in enumerate(cases):
        path = tmp_path / f"{number}.safetensors"
        reshard.save_file(dict(arrays), path)
        with reshard.open(path) as checkpoint, pytest.raises(MismatchError, match=re.escape(message)):
            checkpoint.quantised()


def test_names_that_only_look_like_parts(tmp_path: Path) -> None:
    arrays = {
        "logit_scale": np.ones((), np.float32),
        "a.weight": np.ones((4, 4), np.float32),
        "a.weight_scale": np.ones(4, np.float32),  # as in models with normalised weights
        "b.fp8": fp8(RNG(1), (4, 4)),  # without any scale
        "c.layer_scale": np.ones(4, np.float32),
        "d.scales": np.ones(4, np.float32),
    }
    reshard.save_file(arrays, tmp_path / "m.safetensors")
    with reshard.open(tmp_path / "m.safetensors") as checkpoint:
        assert checkpoint.quantised() == {}


def test_parts_are_cut_with_their_weight(tmp_path: Path) -> None:
    arrays = {key: one for kind in ("fp8-block", "gptq", "awq", "nvfp4", "bnb-int8")
              for key, one in weight(kind, kind, RNG(2), 512, 512).items()}  # fmt: skip
    reshard.save_file(arrays, tmp_path / "m.safetensors")
    packed = ["*.weight", "*.qweight", "*.weight_packed"]
    shapes = {
        0: {
            "fp8-block.weight_scale_inv": (2, 4), "gptq.qzeros": (4, 64), "gptq.scales": (4, 512), "gptq.g_idx": (256,),
            "awq.qzeros": (2, 64), "awq.scales": (2, 512), "nvfp4.weight_scale": (256, 32), "bnb-int8.SCB": (256,),
            "nvfp4.weight_global_scale": (1,),
        },
        1: {
            "fp8-block.weight_scale_inv": (4, 2), "gptq.qzeros": (4, 32), "gptq.scales": (4, 256), "gptq.g_idx": (512,),
            "awq.qzeros": (4, 32), "awq.scales": (4, 256), "nvfp4.weight_scale": (512, 16), "bnb-int8.SCB": (512,),
            "nvfp4.weight_global_scale": (1,),
        },
    }  # fmt: skip
    for dim, expected in shapes.items():
        layout = {"mesh": {"tp": 2}, "rules": [{"match": packed, "cut": [None] * dim + ["tp"]}, {"match": "*"}]}
        reshard.convert(tmp_path / "m.safetensors", tmp_path / f"tp{dim}", layout=layout)
        with reshard.open(tmp_path / f"tp{dim}") as checkpoint:
            found = checkpoint.load(layout, rank=1)
            assert {key: found[key].shape for key in expected} == expected
            assert all((checkpoint.read(key).view(np.uint8) == one.view(np.uint8)).all() for key, one in arrays.items()
                       if one.ndim)  # fmt: skip


def test_a_cut_through_a_block_is_refused(tmp_path: Path) -> None:
    reshard.save_file(weight("fp8-block", "a", RNG(2), 640, 256), tmp_path / "m.safetensors")
    layout = {"mesh": {"tp": 2}, "rules": [{"match": "a.weight", "cut": ["tp"]}]}
    message = "dim 0 of `a.weight` has 640 elements, of which 128 at a time share a scale"
    with pytest.raises(LayoutError, match=message) as error:
        reshard.convert(tmp_path / "m.safetensors", tmp_path / "out", layout=layout)
    assert "the nearest sizes that fit are 256 and 384; equal parts fit over 1 or 5 ranks" in str(error.value)
    sized = {"mesh": {"tp": 2}, "rules": [{"match": "a.weight", "cut": ["tp"], "sizes": {0: [256, 384]}}]}
    reshard.convert(tmp_path / "m.safetensors", tmp_path / "out", layout=sized)
    with reshard.open(tmp_path / "out") as checkpoint:
        assert checkpoint.load(sized, rank=1)["a.weight_scale_inv"].shape == (3, 2)
    reshard.save_file(weight("bnb-4bit", "a", RNG(2)), tmp_path / "nf4.safetensors")
    by_columns = {"mesh": {"tp": 2}, "rules": [{"match": "a.weight", "cut": [None, "tp"]}]}  # the dim has one element
    with pytest.raises(LayoutError, match="the layout divides it: it can be kept whole"):
        reshard.convert(tmp_path / "nf4.safetensors", tmp_path / "nf4", layout=by_columns)
    with pytest.raises(LayoutError, match="the layout divides it: it can be kept whole"):
        reshard.convert(tmp_path / "nf4.safetensors", tmp_path / "no", layout=layout)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cast_of_parts_alone_is_refused(kind: str, tmp_path: Path) -> None:
    reshard.save_file(weight(kind, "a", RNG(2)), tmp_path / "m.safetensors")
    with reshard.open(tmp_path / "m.safetensors") as checkpoint, pytest.raises(UnsupportedError, match="a cast of its"):
        checkpoint.load(dtype="bfloat16")


def test_selections_and_names_keep_parts_together(tmp_path: Path) -> None:
    arrays = weight("fp8-block", "a.q", RNG(1)) | weight("fp8-block", "a.k", RNG(2)) | plain()
    source = folder_of(tmp_path / "hf", arrays, config_of("fp8-block"))
    refused: dict[str, dict[str, Any]] = {
        "without `a.q.weight_scale_inv`": {"select": {"drop": ["a.q.weight_scale_inv"]}},
        "without `a.k.weight_scale_inv`": {"select": {"only": ["a.q", "a.k"], "drop": ["a.k.weight_"]}},
        "with the new names": {"select": {"rename": {"a.q.weight_scale": "a.q.scale"}}},
        "not fused": {"names": {"rules": [
            {"from": ["a.q.weight", "a.k.weight"], "to": "a.qk.weight", "join": 0},
            {"from": ["a.q.weight_scale_inv", "a.k.weight_scale_inv"], "to": "a.qk.weight_scale_inv", "join": 0}]}},
        "would be named|is no part of": {"names": {"rules": [
            {"from": "a.q.weight", "to": "a.k2.weight"}, {"from": "a.k.weight", "to": "a.q2.weight"},
            {"from": "a.q.weight_scale_inv", "to": "a.q2.weight_scale_inv"},
            {"from": "a.k.weight_scale_inv", "to": "a.k2.weight_scale_inv"}]}},
    }  # fmt: skip
    for message, options in refused.items():
        with pytest.raises(ReshardError, match=message):
            reshard.convert(source, tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()
    renamed: dict[str, Any] = {"select": {"rename": {"a.": "model.b."}, "drop": ["a.k."]}}
    reshard.convert(source, tmp_path / "out", **renamed)
    with reshard.open(tmp_path / "out") as checkpoint:
        assert list(checkpoint.quantised()) == ["model.b.q.weight"]


@pytest.mark.parametrize("seed", range(60))
def test_parts_are_never_separated(seed: int, tmp_path: Path) -> None:
    """Random models, selections, names, layouts: refused, or every part is beside its weight with the same bytes."""
    draw, rng = Random(seed), RNG(seed)
    arrays: dict[str, Array] = plain()
    for i in range(draw.randint(1, 3)):
        kind = draw.choice(KINDS)
        arrays |= weight(kind, f"m.{i}.{draw.choice('qk')}", rng, draw.choice((256, 384)), draw.choice((256, 512)))
    reshard.save_file(arrays, tmp_path / "m.safetensors")
    with reshard.open(tmp_path / "m.safetensors") as checkpoint:
        before = checkpoint.quantised()
    options: dict[str, Any] = {}
    keys = sorted(arrays)
    choice = draw.randint(0, 3)
    if choice == 0:
        options["select"] = {draw.choice(("only", "drop")): [draw.choice(keys)[: draw.randint(3, 20)]]}
    elif choice == 1:
        start = draw.choice(keys)[: draw.randint(2, 24)]
        options["select"] = {"rename": {start: draw.choice((start + "_x.", "n.", ""))}}
    elif choice == 2:
        some = draw.sample(keys, draw.randint(1, len(keys)))
        options["names"] = {"rules": [{"from": key, "to": draw.choice(("", "x.")) + key} for key in some]}
    if draw.random() < 0.6:
        cut = draw.choice((["tp"], [None, "tp"]))
        matrices = [key for key, one in arrays.items() if one.ndim >= len(cut)]
        rules = [{"match": key, "cut": cut, "uneven": draw.choice(("refuse", "ceil"))}
                 for key in draw.sample(matrices, draw.randint(1, len(matrices)))]  # fmt: skip
        options["layout"] = {"mesh": {"tp": draw.choice((2, 3, 4))}, "rules": [*rules, {"match": "*"}]}
        if choice in (0, 1, 2):
            del options["select" if choice < 2 else "names"]
    try:
        reshard.convert(tmp_path / "m.safetensors", tmp_path / "out", **options)
    except ReshardError:
        assert not (tmp_path / "out").exists()
        return
    with reshard.open(tmp_path / "out") as checkpoint:
        after = checkpoint.quantised()
        stored = {key: checkpoint.read(key).tobytes() for key in checkpoint}
    of_bytes = {tuple(stored[key] for key in one.parts.values()) for one in after.values()}
    n_written = 0
    for one in before.values():
        parts = tuple(arrays[key].tobytes() for key in one.parts.values())
        is_written = parts in of_bytes
        n_written += is_written
        assert is_written or not any(part in stored.values() for part in parts if len(part) > 512), (options, one)
    assert n_written == len(after)


def test_scales_of_rows_and_experts(tmp_path: Path) -> None:
    rng = RNG(3)
    arrays = {
        "e.gate": fp8(rng, (4, 256, 128)), "e.gate_scale_inv": scales(rng, (4, 2, 1)),
        "e.up": fp8(rng, (4, 256, 128)), "e.up_scale": scales(rng, (4, 1, 1)),
        "e.down": fp8(rng, (4, 256, 128)), "e.down_scale": scales(rng, (4, 256, 1)),
        "e.flat": fp8(rng, (256, 96)), "e.flat_scale": scales(rng, (256,)),
        "e.mx": fp8(rng, (64, 128)), "e.mx_scale_inv": rng.integers(100, 140, (64, 4), np.uint8),
    }  # fmt: skip
    reshard.save_file(arrays, tmp_path / "m.safetensors")
    with reshard.open(tmp_path / "m.safetensors") as checkpoint:
        found = checkpoint.quantised()
    assert {name: (one.kind, one.values["block"]) for name, one in found.items()} == {
        "e.gate": ("fp8-block", (128, 128)),
        "e.up": ("fp8-tensor", (256, 128)),
        "e.down": ("fp8-channel", (1, 128)),
        "e.flat": ("fp8-channel", (1, 96)),
        "e.mx": ("fp8-block", (1, 32)),
    }


@pytest.mark.parametrize("kind", ["fp8-block", "bnb-int8"])
def test_a_run_starts_from_all_parts_or_none(kind: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    checkpointers = pytest.importorskip("reshard.torch")
    reshard.save_file(weight(kind, "q", RNG(1)), tmp_path / "m.safetensors")
    model = torch.nn.ModuleDict({"q": torch.nn.Linear(256, 256, bias=False)})
    start: dict[str, Any] = {"path": tmp_path / "m.safetensors"}
    with (
        checkpointers.Checkpointer(tmp_path / "run") as checkpointer,
        pytest.raises(MismatchError, match=r"the model would load `q\.weight` without `q\."),
    ):
        checkpointer.resume(model=model, init_from=start)
    quantised = torch.nn.ModuleDict({"q": torch.nn.Module()})
    with reshard.open(tmp_path / "m.safetensors") as checkpoint:
        for key, array in checkpoint.load().items():
            stored = torch.from_numpy(array.view(np.uint8).copy())
            stored = stored.view(torch.float8_e4m3fn) if array.dtype.itemsize == 1 and kind == "fp8-block" else stored
            stored = (
                stored.view(getattr(torch, array.dtype.name)) if array.dtype.name in ("float32", "int8") else stored
            )
            quantised["q"].register_buffer(key.partition(".")[2], torch.zeros_like(stored.reshape(array.shape)))
    with checkpointers.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.resume(model=quantised, init_from=start)
        found = quantised["q"].weight.view(torch.uint8).numpy()
        assert (found == weight(kind, "q", RNG(1))["q.weight"].view(np.uint8)).all()
