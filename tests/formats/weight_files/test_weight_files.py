"""Weights under other names than those of a Hugging Face model, numbered files, lists and patterns of files."""

from __future__ import annotations

import json
import logging
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.command_line import run

import reshard
from reshard.errors import (
    ArgumentError,
    CheckpointNotFoundError,
    DamagedFileError,
    EmptyRootError,
    ReshardError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

DIFFUSERS = "diffusion_pytorch_model"
ARRAYS: dict[str, Any] = {f"layers.{n}.w": torch.arange(6.0).reshape(2, 3) + n for n in range(5)}


def opened(path: Any) -> dict[str, np.ndarray]:
    with reshard.open(path) as checkpoint:
        assert checkpoint.format == "weight-files"
        return {key: checkpoint.read(key) for key in checkpoint.keys()}  # noqa: SIM118  no mapping


def assert_all(path: Any, arrays: dict[str, Any] = ARRAYS) -> None:
    found = opened(path)
    assert set(found) == set(arrays)
    assert all((found[key] == array.numpy()).all() for key, array in arrays.items())


def files(folder: Path, base: str, count: int, suffix: str = "safetensors", digits: int = 5) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for number in range(1, count + 1):
        part = dict(list(ARRAYS.items())[number - 1 :: count])
        path = folder / f"{base}-{number:0{digits}d}-of-{count:0{digits}d}.{suffix}"
        (save_file if suffix == "safetensors" else torch.save)(part, path)
        written.append(path)
    return written


BASES = [DIFFUSERS, "adapter_model", "pytorch_lora_weights", "consolidated", "model.fp16", f"{DIFFUSERS}.fp16"]


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_one_file(tmp_path: Path, base: str, suffix: str) -> None:
    (save_file if suffix == "safetensors" else torch.save)(ARRAYS, tmp_path / f"{base}.{suffix}")
    (tmp_path / "config.json").write_text("{}")
    assert_all(tmp_path)


@pytest.mark.parametrize(("base", "suffix"), [("x.y", "safetensors"), ("pytorch_model", "bin"), (DIFFUSERS, "bin")])
def test_numbered_files_without_an_index(tmp_path: Path, base: str, suffix: str) -> None:
    paths = files(tmp_path / "all", base, 3, suffix)
    assert_all(tmp_path / "all")
    assert_all(paths)
    assert_all(str(tmp_path / "all" / f"*.{suffix}"))
    paths[1].unlink()
    for path in (tmp_path / "all", str(tmp_path / "all" / "*-of-*"), [paths[0], paths[2]]):
        with pytest.raises(CheckpointNotFoundError, match="holds 2 of 3 files") as caught:
            reshard.open(path)
        assert f"missing: `{paths[1].name}`" in str(caught.value)
        assert caught.value.path == str(paths[1])


def test_many_missing_files_are_counted(tmp_path: Path) -> None:
    save_file(ARRAYS, tmp_path / "x-00001-of-999999999.safetensors")
    with pytest.raises(CheckpointNotFoundError, match="and 999999995 more"):
        reshard.open(tmp_path)


def test_an_index_chooses_a_variant(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_file({key: array + 1 for key, array in ARRAYS.items()}, tmp_path / f"{DIFFUSERS}.safetensors")
    paths = files(tmp_path, f"{DIFFUSERS}.fp16", 2)
    file_of = {key: path.name for path in paths for key in load_file(path)}
    index = tmp_path / f"{DIFFUSERS}.safetensors.index.fp16.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    with caplog.at_level(logging.WARNING, "reshard"):
        assert_all(tmp_path, {key: array + 1 for key, array in ARRAYS.items()})
    assert f"not read: `{index.name}`" in caplog.text
    assert_all(index)
    (tmp_path / f"{DIFFUSERS}.safetensors").unlink()
    assert_all(tmp_path)
    paths[0].unlink()
    with pytest.raises(CheckpointNotFoundError, match=f"lists missing files: `{paths[0].name}`"):
        reshard.open(tmp_path)


def test_one_warning_names_the_variants_that_are_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for variant in ("", ".fp16"):
        paths = files(tmp_path, f"{DIFFUSERS}{variant}", 2)
        file_of = {key: path.name for path in paths for key in load_file(path)}
        index = tmp_path / f"{DIFFUSERS}.safetensors.index{variant}.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    with caplog.at_level(logging.WARNING, "reshard"):
        assert_all(tmp_path)
    assert set(caplog.messages) == {
        f"{tmp_path}: `{DIFFUSERS}.safetensors.index.json` is read; not read: `{index.name}`"
    }
    (tmp_path / "more.safetensors").write_bytes(paths[0].read_bytes())
    assert "holds weights that" not in caplog.text
    with caplog.at_level(logging.WARNING, "reshard"):
        assert_all(tmp_path / f"{DIFFUSERS}.safetensors.index.json")
    assert f"not read: `{DIFFUSERS}.fp16-00001-of-00002.safetensors`, " in caplog.text


def test_sets_of_which_none_comes_first(tmp_path: Path) -> None:
    save_file(ARRAYS, tmp_path / f"{DIFFUSERS}.fp16.safetensors")
    save_file(ARRAYS, tmp_path / f"{DIFFUSERS}.ema.safetensors")
    with pytest.raises(UnsupportedError, match=r"several sets of weights: .*ema.*, .*fp16") as caught:
        reshard.open(tmp_path)
    assert f"`{tmp_path / f'{DIFFUSERS}.ema.safetensors'}`" in str(caught.value.hint)
    (tmp_path / f"{DIFFUSERS}.ema.safetensors").unlink()
    files(tmp_path, "other", 2)
    with pytest.raises(UnsupportedError, match="several sets"):
        reshard.open(tmp_path)
    (tmp_path / f"{DIFFUSERS}.fp16.safetensors").unlink()
    files(tmp_path, "other", 3)
    with pytest.raises(DamagedFileError, match="count 2, 3 files"):
        reshard.open(tmp_path)


def test_files_that_hold_one_tensor(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.safetensors", "b.bin")]
    save_file(ARRAYS, paths[0])
    torch.save({"layers.0.w": ARRAYS["layers.0.w"], "more": torch.ones(2)}, paths[1])
    assert set(opened(paths)) == {*ARRAYS, "more"}
    torch.save({"layers.0.w": ARRAYS["layers.0.w"] + 1}, paths[1])
    with pytest.raises(DamagedFileError, match=r"both hold `layers.0.w`, with different content"):
        reshard.open(paths)


def test_lists_and_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = files(tmp_path / "m[1]" / "a", "x", 2)
    assert_all("m*/a/x-*.safetensors")
    with reshard.open("m*/?/x-*.safetensors") as checkpoint:
        again = pickle.loads(pickle.dumps(checkpoint))
        monkeypatch.chdir("/")
        assert (again.read("layers.1.w") == ARRAYS["layers.1.w"].numpy()).all()
        again.close()
    with pytest.raises(EmptyRootError):
        reshard.open(tmp_path / "nothing*")
    with pytest.raises(ArgumentError, match="empty list"):
        reshard.open([])
    with pytest.raises(ArgumentError, match="expected a path"):
        reshard.open([paths[0], 3])  # type: ignore[list-item]
    with pytest.raises(UnsupportedError, match="is no file"):
        reshard.open([tmp_path])
    with pytest.raises(CheckpointNotFoundError, match="nothing at"):
        reshard.open([tmp_path / "x.safetensors"])
    with pytest.raises(ArgumentError, match="2 files of weights are opened"):
        reshard.open(paths, format="huggingface")
    for source in (paths, f"{tmp_path}/m*/a/*"):
        reshard.convert(source, tmp_path / "out.safetensors", overwrite=True)
        assert load_file(tmp_path / "out.safetensors").keys() == ARRAYS.keys()
    with pytest.raises(ArgumentError, match="same"):
        reshard.convert([paths[0], paths[1]], paths[1], overwrite=True)
    assert "5 tensors" in run("inspect", f"{tmp_path}/m*/a/*").stdout
    assert run("convert", f"{tmp_path}/m*/a/*", tmp_path / "hf").exit_code == 0


def test_names_that_are_refused(tmp_path: Path) -> None:
    """Each is an error of the package, and none reads outside of the folder."""
    outside = tmp_path / "secret.safetensors"
    save_file(ARRAYS, outside)
    folder = tmp_path / "m"
    folder.mkdir()
    index = folder / "consolidated.safetensors.index.json"
    for text in (
        "",
        "[]",
        "{",
        '{"weight_map": 3}',
        '{"weight_map": {}}',
        '{"weight_map": {"w": "../secret.safetensors"}}',
        json.dumps({"weight_map": {"w": str(outside)}}),
        '{"weight_map": {"w": "."}}',
        '{"weight_map": {"": "x"}}',
        '{"weight_map": {"w": ["x"]}}',
    ):
        index.write_text(text)
        with pytest.raises(ReshardError):
            reshard.open(folder)
        with pytest.raises(ReshardError):
            reshard.open(index)
    index.unlink()
    save_file(ARRAYS, folder / "x-00000-of-00002.safetensors")
    save_file(ARRAYS, folder / "x-00001-of-00002.safetensors")
    with pytest.raises(DamagedFileError, match="not from 1 to 2"):
        reshard.open(folder)
    (folder / "x-00000-of-00002.safetensors").write_bytes(b"")
    (folder / "x-00000-of-00002.safetensors").rename(folder / "x-00002-of-00002.safetensors")
    with pytest.raises(DamagedFileError):
        reshard.open(folder)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{",
        "{}",
        '{"_class_name": "P"}',
        '{"../m": ["a", "b"]}',
        '{"/etc": ["a", "b"]}',
        '{".": ["a", "b"]}',
        '{"unet": ["a", "b"]}',
        '{"unet": [null, null]}',
        '{"tokenizer": ["a", "b"]}',
        json.dumps({f"c{n}": ["a", "b"] for n in range(2000)}),
    ],
)
def test_pipelines_that_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "model_index.json").write_text(text)
    with pytest.raises(ReshardError):
        reshard.open(tmp_path)


def test_components_of_a_pipeline(tmp_path: Path) -> None:
    save = {"unet": f"{DIFFUSERS}.safetensors", "text_encoder": "model.safetensors", "vae": f"{DIFFUSERS}.bin"}
    listed = {name: ["diffusers", "Model"] for name in save}
    (tmp_path / "model_index.json").parent.mkdir(exist_ok=True)
    for component, name in save.items():
        (tmp_path / component).mkdir()
        (save_file if name.endswith("safetensors") else torch.save)(ARRAYS, tmp_path / component / name)
        (tmp_path / component / "config.json").write_text("{}")
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "scheduler_config.json").write_text("{}")
    more = {"_class_name": "P", "scheduler": ["d", "S"], "safety_checker": [None, None], "force_zeros": True}
    (tmp_path / "model_index.json").write_text(json.dumps({**listed, **more}))
    assert_all(tmp_path, {f"{component}.{key}": array for component in save for key, array in ARRAYS.items()})
    reshard.convert(tmp_path, tmp_path.parent / "out", select={"entry": "vae"})
    with reshard.open(tmp_path.parent / "out") as checkpoint:
        assert set(checkpoint.keys()) == set(ARRAYS)
    assert not (tmp_path.parent / "out" / "model_index.json").exists()
    (tmp_path / "unet" / save["unet"]).unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"holds config.json of a model, and no weights"):
        reshard.open(tmp_path)


@pytest.mark.slow
def test_folders_of_diffusers(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    torch.manual_seed(0)
    model = diffusers.UNet2DModel(sample_size=8, layers_per_block=1, block_out_channels=(32, 64), **blocks)
    expected = model.state_dict()
    kinds: dict[str, dict[str, Any]] = {
        "single": {},
        "bin": {"safe_serialization": False},
        "sharded": {"max_shard_size": "500KB"},
        "variant": {"variant": "fp16"},
        "sharded_variant": {"variant": "fp16", "max_shard_size": "500KB"},
    }
    for name, options in kinds.items():
        model.save_pretrained(tmp_path / name, **options)
        assert_all(tmp_path / name, expected)
        reshard.convert(tmp_path / name, tmp_path / "out", files={"max_shard_size": "700KB"}, overwrite=True)
        loaded = diffusers.UNet2DModel.from_pretrained(tmp_path / "out").state_dict()
        assert all(torch.equal(loaded[key], tensor) for key, tensor in expected.items())
    pipeline = diffusers.DDPMPipeline(model, diffusers.DDPMScheduler())
    pipeline.save_pretrained(tmp_path / "pipeline")
    assert_all(tmp_path / "pipeline", {f"unet.{key}": tensor for key, tensor in expected.items()})


def test_an_adapter_of_peft_is_written_under_its_names(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"], r=2))
    adapted.save_pretrained(tmp_path / "adapter")
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert_all(tmp_path / "adapter", stored)
    reshard.convert(tmp_path / "adapter", tmp_path / "out", dtype="float16")
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {key: tensor.half() for key, tensor in stored.items()}.keys() == written.keys()
    assert all(torch.equal(written[key], tensor.half()) for key, tensor in stored.items())
    fresh = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    loaded = peft.PeftModel.from_pretrained(fresh, str(tmp_path / "out"))
    assert any(torch.equal(tensor, written[key]) for key in written for tensor in loaded.half().state_dict().values())


def test_an_adapter_of_diffusers_is_written_under_its_name(tmp_path: Path) -> None:
    (tmp_path / "lora").mkdir()
    save_file(ARRAYS, tmp_path / "lora" / "pytorch_lora_weights.safetensors")
    reshard.convert(tmp_path / "lora", tmp_path / "out", dtype="float16")
    assert load_file(tmp_path / "out" / "pytorch_lora_weights.safetensors").keys() == ARRAYS.keys()
