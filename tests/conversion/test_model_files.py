"""Files that are copied beside the weights of a Hugging Face folder, so that `from_pretrained` can load the folder."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

import reshard
from reshard import _core
from reshard.cli import main
from reshard.conversion import model_files
from reshard.errors import ArgumentError, DestinationExistsError

if TYPE_CHECKING:
    from pathlib import Path

W = np.arange(96, dtype=np.float32).reshape(8, 12)
# What a repository of a model has: files, and whether they belong to the model whatever its weights.
COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.txt",
    "merges.txt",
    "modeling_own.py",
    "README.md",
    "LICENSE",
    "additional_chat_templates/rag.jinja",
    "1_Pooling/config.json",
)
LEFT = (
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "model.safetensors.index.fp16.json",
    "model.fp16.safetensors",
    "tf_model.h5",
    "flax_model.msgpack",
    "optimizer.pt",
    "training_args.bin",
    "q4.gguf",
    "tiles.json",
    "param_name_map.json",
    ".gitattributes",
    ".cache/huggingface/x.lock",
    "onnx/model.onnx",
    "onnx/config.json",
    "original/consolidated.00.pth",
    "original/params.json",
)


def model(folder: Path, version: int = 0, *, sharded: bool = False) -> Path:
    for name in (*COPIED, *LEFT):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name} {version}")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "float32", "n": version}))
    if sharded:
        save_file({"a": W}, folder / "model-00001-of-00002.safetensors")
        save_file({"b": W}, folder / "model-00002-of-00002.safetensors")
        weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    else:
        save_file({"a": W + version, "b": W}, folder / "model.safetensors")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("sharded", [False, True])
def test_a_copy_has_all_that_is_no_weight(tmp_path: Path, sharded: bool) -> None:  # noqa: FBT001
    source = model(tmp_path / "hf", sharded=sharded)
    report = reshard.convert(source, tmp_path / "out")
    found = content(tmp_path / "out")
    assert set(found) == {*COPIED, "model.safetensors"}
    assert {name: found[name] for name in COPIED} == {name: content(source)[name] for name in COPIED}
    assert sorted(load_file(tmp_path / "out" / "model.safetensors")) == ["a", "b"]
    assert report.n_files == 1
    assert any("onnx holds weights, such as" in warning for warning in report.warnings)


def test_layers_behind_a_model_are_copied_with_their_weights(tmp_path: Path) -> None:
    """As sentence-transformers saves them: `modules.json` lists their folders."""
    model, out = tmp_path / "model", tmp_path / "out"
    for folder in ("", "2_Dense", "other"):
        (model / folder).mkdir()
        save_file({"w": W}, model / folder / "model.safetensors")
    modules = [{"idx": 0, "path": "", "type": "Transformer"}, {"idx": 1, "path": "2_Dense", "type": "Dense"}]
    (model / "modules.json").write_text(json.dumps([*modules, {"idx": 2, "path": "../model"}, {"idx": 3}, 4]))
    report = reshard.convert(model, out, dtype="float16")
    assert load_file(out / "model.safetensors")["w"].dtype == np.float16
    assert (load_file(out / "2_Dense" / "model.safetensors")["w"] == W).all()
    assert not (out / "other").exists()
    assert any("2_Dense/model.safetensors` belongs to a layer" in one for one in report.warnings)
    with reshard.open(out) as checkpoint:
        assert checkpoint.format == "huggingface"


def test_modes_of_copies_are_those_of_the_umask(tmp_path: Path) -> None:
    source = model(tmp_path / "hf")
    (source / "config.json").chmod(0o600)
    before = os.umask(0o027)
    try:
        reshard.convert(source, tmp_path / "out")
        reshard.convert(source, tmp_path / "private", commit={"private": True})
    finally:
        os.umask(before)
    for name, folder_mode, file_mode in (("out", "0o750", "0o640"), ("private", "0o700", "0o600")):
        for path in (tmp_path / name).rglob("*"):
            assert oct(path.stat().st_mode & 0o777) == (folder_mode if path.is_dir() else file_mode), path


def test_a_download_cache_is_copied_out_of_its_store(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--x" / "snapshots" / "0a"
    blobs = tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file({"a": W}, blobs / "1")
    (blobs / "2").write_text("{}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/1")
    (snapshot / "config.json").symlink_to("../../blobs/2")
    reshard.convert(snapshot, tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").is_symlink()
    assert (tmp_path / "out" / "config.json").read_text() == "{}"


def test_what_is_no_plain_file_of_the_folder_is_left_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "_MAX_FILE_BYTES", 100)
    source = tmp_path / "hf"
    source.mkdir()
    save_file({"a": W}, source / "model.safetensors")
    (tmp_path / "secret").write_text("secret")
    (source / "stolen.json").symlink_to("../secret")
    (source / "absolute.json").symlink_to("/etc/passwd")
    (source / "folder").symlink_to("/etc")
    (source / "dangling.json").symlink_to("nowhere")
    (source / "circle.json").symlink_to("circle.json")
    (source / "large.json").write_text("x" * 101)
    (source / "config.json").write_text("{}")
    (source / "same.json").symlink_to("config.json")
    os.mkfifo(source / "pipe.json")
    report = reshard.convert(source, tmp_path / "out")
    assert set(content(tmp_path / "out")) == {"config.json", "same.json", "model.safetensors"}
    for name in ("stolen", "absolute", "folder", "dangling", "circle", "large", "pipe"):
        assert any(name in warning and "not copied" in warning for warning in report.warnings), name


@pytest.mark.parametrize(("limit", "named"), [("_MAX_FILES", "more than 3 files"), ("_MAX_ENTRIES", "more than 3 ent")])
def test_a_folder_of_many_files_costs_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, named: str
) -> None:
    monkeypatch.setattr(model_files, limit, 3)
    report = reshard.convert(model(tmp_path / "hf"), tmp_path / "out")
    assert any(named in warning for warning in report.warnings)
    assert len(content(tmp_path / "out")) <= 4


def test_folders_are_copied_two_levels_deep(tmp_path: Path) -> None:
    folder = model(tmp_path / "hf")
    (folder / "a" / "b" / "c").mkdir(parents=True)
    for name in ("a/x.json", "a/b/x.json", "a/b/c/x.json"):
        (folder / name).write_text("{}")
    report = reshard.convert(folder, tmp_path / "out")
    assert {*COPIED, "a/x.json", "a/b/x.json", "model.safetensors"} == set(content(tmp_path / "out"))
    assert any("/hf/a/b/c` is more than 2 folders deep" in warning for warning in report.warnings)


def test_over_an_earlier_copy(tmp_path: Path) -> None:
    first, second = model(tmp_path / "first"), model(tmp_path / "second", 1)
    out = tmp_path / "out"
    reshard.convert(first, out)
    (out / "notes.txt").write_text("mine")
    reshard.convert(first, out, overwrite=True)
    before = content(out)
    with pytest.raises(DestinationExistsError, match=r"differs from .*, which would be copied with the weights"):
        reshard.convert(second, out, overwrite=True)
    assert content(out) == before
    # What stands there is meant:
    reshard.convert(second, out, overwrite=True, files={"model_files": out})
    after = content(out)
    assert {name for name in before if before[name] != after[name]} == {"model.safetensors"}
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


def test_the_files_of_a_model_beside_the_weights_of_a_trainer(tmp_path: Path) -> None:
    base = model(tmp_path / "base")
    reshard.save(tmp_path / "run", 3, {"a": W})
    reshard.convert(tmp_path / "run", tmp_path / "plain")
    assert set(content(tmp_path / "plain")) == {"model.safetensors"}
    for share in (0, 1):
        reshard.convert(tmp_path / "run", tmp_path / "out", files={"model_files": base}, share=(share, 2))
    assert set(content(tmp_path / "out")) == {*COPIED, "model.safetensors"}
    assert list(load_file(tmp_path / "out" / "model.safetensors")) == ["a"]
    done = CliRunner().invoke(main, ["convert", f"{tmp_path}/run", f"{tmp_path}/cli", "--model-files", str(base)])
    assert done.exit_code == 0, done.output
    assert set(content(tmp_path / "cli")) == {*COPIED, "model.safetensors"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"files": {"model_files": "nowhere"}}, "is not a folder"),
        ({"files": {"model_files": "run"}, "to": "checkpoint2"}, "`model_files` belongs to"),
    ],
)
def test_no_folder_of_a_model(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    reshard.save(tmp_path / "run", 3, {"a": W})
    options["files"] = {"model_files": tmp_path / options["files"]["model_files"]}
    with pytest.raises(ArgumentError, match=message):
        reshard.convert(tmp_path / "run", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_config_of_another_dtype_is_named(tmp_path: Path) -> None:
    source = model(tmp_path / "hf")
    assert any("config.json has `dtype` `float32`" in text for text in
               reshard.convert(source, tmp_path / "bf16", dtype="bfloat16").warnings)  # fmt: skip
    assert not any("config.json" in text for text in
                   reshard.convert(source, tmp_path / "f32", dtype="float32").warnings)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "weights", "cast", "expected"),
    [
        ({"dtype": "float32"}, ["F32"], None, None),
        (
            {"torch_dtype": "bfloat16"},
            ["F32"],
            None,
            "config.json has `torch_dtype` `bfloat16`, and",
        ),
        ({"dtype": "float32"}, ["BF16"], None, "config.json has `dtype` `float32`, and the weights are BF16"),
        ({"dtype": "float32"}, ["BF16", "BF16", "F32"], None, None),  # as transformers writes: of the first tensor
        (
            {"dtype": "bfloat16"},
            ["BF16", "F32", "F32"],
            None,
            "config.json has `dtype` `bfloat16`, and the weights are",
        ),
        ({"dtype": "bfloat16"}, ["BF16", "BF16", "F32"], None, None),
        ({"dtype": "float32"}, ["BF16", "F32"], "BF16", "config.json has `dtype` `float32`, and the weights are BF16"),
        ({"text_config": {"dtype": "float16"}}, ["F32"], None, "config.json has `text_config.dtype` `float16`, and"),
        ({"dtype": "float32", "text_config": {"dtype": "float32"}}, ["F32"], None, None),
        ({"dtype": "bfloat16"}, ["F8_E4M3"], None, None),
        ({"dtype": None, "vision_config": 3}, ["F32"], None, None),
        ({"dtype": "auto"}, ["F32"], None, None),
    ],
)
def test_a_config_agrees_with_the_weights_beside_it(
    tmp_path: Path, config: object, weights: list[str], cast: str | None, expected: str | None
) -> None:
    """Also where nothing is cast, and where the weights were saved by a run."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(config))
    of = {"F32": np.float32, "BF16": np.uint16, "F8_E4M3": np.uint8}
    tensors = [(f"w{n}", dtype, (4,), np.zeros(4, of[dtype])) for n, dtype in enumerate(weights)]
    _core.write_arrays(str(tmp_path / "m.safetensors"), tensors, durable=False)
    report = reshard.convert(
        tmp_path / "m.safetensors", tmp_path / "out", to="huggingface", dtype=cast, files={"model_files": base}
    )
    told = [text for text in report.warnings if "config.json" in text]
    assert len(told) == (expected is not None)
    assert all(text.startswith(str(expected)) for text in told), told


def test_sizes_of_a_name_map_come_from_the_model_files(tmp_path: Path) -> None:
    hub, base = tmp_path / "hub", tmp_path / "base"
    hub.mkdir()
    shapes = {"q": 8, "k": 4, "v": 4}
    reshard.save_file(
        {f"model.layers.0.self_attn.{name}_proj.weight": np.ones((n, 8), np.float32) for name, n in shapes.items()},
        hub / "model.safetensors",
    )
    sizes = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 2,
        "hidden_size": 8,
        "num_hidden_layers": 1,
    }
    base.mkdir()
    (base / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 8, **sizes}))
    given: Any = {"to": "huggingface", "names": "llama-mindspore", "files": {"check_names": False}}
    with pytest.raises(reshard.ReshardError, match="config"):
        reshard.convert(hub, tmp_path / "without", **given)
    given["files"]["model_files"] = base
    reshard.convert(hub, tmp_path / "out", **given)
    assert (tmp_path / "out" / "config.json").is_file()


def test_a_copy_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = model(tmp_path / "hf")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(reshard.errors.StorageError) as caught:
        reshard.convert(source, tmp_path / "out")
    assert caught.value.errno == 28
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
