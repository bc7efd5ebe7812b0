"""A path that holds no checkpoint: the error says what lies there, who wrote it and what can be opened."""

from __future__ import annotations

import json
import tarfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.helpers.command_line import run
from tests.helpers.mesh_files import distributed, save_ranks
from tests.servers.proxy import before_server

import reshard
from reshard.config import Config
from reshard.errors import ArgumentError, CheckpointNotFoundError, DamagedFileError, ReshardError, UnsupportedError
from reshard.opening.gather import gather
from reshard.opening.what_is_there import _alone_below, what_is_there
from reshard.resume import RunFacts
from reshard.storage.location import locate
from reshard.verbs.explain import explain

if TYPE_CHECKING:
    from pathlib import Path

    from tests.servers.s3 import S3Server

WEIGHTS: dict[str, Any] = {"w": np.ones((2, 3), np.float32)}


def refused(path: Path) -> CheckpointNotFoundError:
    with pytest.raises(CheckpointNotFoundError) as caught:
        reshard.open(path)
    assert str(path) in str(caught.value.path)
    return caught.value


def weights(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        reshard.save_file(WEIGHTS, folder / name)
    return folder


def files(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("tool", "names"),
    [
        ("Mistral", ["consolidated_lora.safetensors"]),
        ("nanotron", ["model_weight_pp-rank-0-of-1_tp-rank-0-of-2.safetensors"]),
        ("TensorRT-LLM", ["rank0.safetensors", "rank1.safetensors"]),
    ],
)
def test_weight_files_and_their_tool_are_named(tmp_path: Path, tool: str, names: list[str]) -> None:
    error = refused(files(weights(tmp_path / "here", *names), "config.json"))
    size = (tmp_path / "here" / names[0]).stat().st_size
    assert f"holds no checkpoint: it holds `{names[0]}` (safetensors, {size} bytes)" in str(error)
    assert f"probably written by {tool}" in str(error)
    assert error.hint is not None
    assert ("did you mean" in error.hint) == (len(names) == 1 and "rank" not in names[0]), error.hint


@pytest.mark.parametrize(
    ("tool", "names"),
    [
        ("MLX", ["weights.npz", "config.json"]),
        ("OpenVINO", ["openvino_model.bin", "openvino_model.xml"]),
        ("Core ML", ["m.mlpackage/Manifest.json"]),
        ("Tensorizer", ["model.tensors"]),
        ("PaddlePaddle", ["model_state.pdparams"]),
        ("TensorFlow Lite", ["m.tflite"]),
        ("TensorFlow", ["checkpoint", "model.ckpt-100.index"]),
        ("TensorRT", ["rank0.engine", "config.json"]),
        ("llama.cpp before GGUF", ["ggml-model-q4_0.bin"]),
        ("huggingface_hub", ["blobs/0a.incomplete", "refs/main", "snapshots/0a/config.json"]),
        ("an unfinished download", ["model.safetensors.crdownload"]),
    ],
)
def test_other_tools_are_named(tmp_path: Path, tool: str, names: list[str]) -> None:
    error = refused(files(tmp_path / "here", *names))
    assert f"probably written by {tool}" in str(error)


@pytest.mark.parametrize("name", ["model.safetensors", "last.ckpt", "pytorch_model.bin"])
@pytest.mark.parametrize(
    ("head", "what"),
    [
        (b"<!DOCTYPE html><html>404</html>", "the text of a page"),
        (b'<?xml version="1.0"?><Error>AccessDenied</Error>', "the text of a page"),
        (b"\x89HDF\r\n\x1a\n" + bytes(99), "HDF5 file, as Keras writes it"),
    ],
)
def test_a_file_of_another_kind_under_the_name_of_weights(tmp_path: Path, name: str, head: bytes, what: str) -> None:
    (tmp_path / name).write_bytes(head)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises((DamagedFileError, CheckpointNotFoundError), match=what):
            reshard.open(path)


def test_a_file_some_folders_below_is_meant(tmp_path: Path) -> None:
    file = tmp_path / "logs" / "version_0" / "checkpoints" / "epoch=0-step=10.ckpt"
    file.parent.mkdir(parents=True)
    torch.save({"state_dict": {"w": torch.ones(2)}}, file)
    error = refused(tmp_path / "logs")
    assert error.hint == f"did you mean `{file}`?"


def test_files_beside_a_folder_do_not_hide_it(tmp_path: Path) -> None:
    for name in ("LICENSE", "README.md", *(f"notes_{n:03}.txt" for n in range(400))):
        (tmp_path / name).write_text("text")
    file = weights(tmp_path / "weights", "some_weights.safetensors") / "some_weights.safetensors"
    assert refused(tmp_path).hint == f"did you mean `{file}`?"


def test_parts_of_a_model_are_opened_by_a_pattern(tmp_path: Path) -> None:
    for number in (1, 2):
        torch.save({f"w{number}": torch.ones(2)}, tmp_path / f"part_{number}.pt")
    error = refused(tmp_path)
    assert "the pattern `part_*.pt` opens all as one" in str(error.hint)
    with reshard.open(tmp_path / "part_*.pt") as checkpoint:
        assert sorted(checkpoint.keys()) == ["w1", "w2"]


def test_several_files_can_be_opened_alone(tmp_path: Path) -> None:
    error = refused(weights(tmp_path / "here", "a.safetensors", "b.safetensors"))
    assert error.hint == f"each of these files can be opened alone, such as `{tmp_path / 'here' / 'a.safetensors'}`"


def test_a_checkpoint_below_is_meant(tmp_path: Path) -> None:
    for to in ("dcp", "megatron", "huggingface", "deepspeed-universal"):
        below = tmp_path / to / "part_0"
        weights(tmp_path, "w.safetensors")
        reshard.convert(tmp_path / "w.safetensors", below, to=to)
        torch.save({"last_epoch": 1}, tmp_path / to / "scheduler.bin")
        error = refused(tmp_path / to)
        assert error.hint == f"did you mean `{below}`?", to
        assert "`part_0/` (a checkpoint of the format " in str(error)
        assert "`scheduler.bin` (a torch file, 1 KiB)" in str(error)
        assert f"did you mean `{below}`?" in run("inspect", tmp_path / to).stderr


def test_a_folder_with_the_suffix_of_a_file(tmp_path: Path) -> None:
    weights(tmp_path, "w.safetensors")
    reshard.convert(tmp_path / "w.safetensors", tmp_path / "runs" / "epoch=1.ckpt", to="dcp")
    error = refused(tmp_path / "runs")
    assert "`epoch=1.ckpt` is a folder, expected a file: it holds `epoch=1.ckpt/`" in str(error)
    assert error.hint == f"did you mean `{tmp_path / 'runs' / 'epoch=1.ckpt'}`?"


def test_folders_of_other_formats(tmp_path: Path) -> None:
    orbax = files(tmp_path / "orbax", "_CHECKPOINT_METADATA", "default/manifest.ocdbt")
    assert "probably written by Orbax" in str(refused(orbax))
    nanotron = files(tmp_path / "nanotron", "model/model_weight.safetensors")
    assert "`model/` (a folder with `model_weight.safetensors`)" in str(refused(nanotron))
    assert "probably written by nanotron" in str(refused(nanotron))


@pytest.mark.parametrize(
    ("name", "head", "what"),
    [
        ("m.h5", b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
        ("m.npy", b"\x93NUMPY\x01", "an array of NumPy"),
        ("m.gz", b"\x1f\x8b\x08", "packed by gzip"),
        ("m.onnx", b"\x08\x07", "an ONNX model"),
        ("m.pkl", b"\x80\x04K\x01.", "a pickle"),
        ("__0_0.distcp", b"\x01\x02", "a data file of torch.distributed.checkpoint"),
    ],
)
def test_files_of_other_formats(tmp_path: Path, name: str, head: bytes, what: str) -> None:
    (tmp_path / name).write_bytes(head + bytes(100))
    assert f"holds no checkpoint: it looks like {what}" in str(refused(tmp_path / name))


def test_an_archive_and_an_index(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "m.nemo", "w") as archive:
        archive.add(files(tmp_path, "model_config.yaml") / "model_config.yaml", "model_config.yaml")
    assert "it holds `model_config.yaml`" in str(refused(tmp_path / "m.nemo"))
    (tmp_path / "m.nemo").rename(tmp_path / "m.tar")
    assert "it looks like a tar archive" in str(refused(tmp_path / "m.tar"))
    (tmp_path / "flax_model.msgpack.index.json").write_text(json.dumps({"weight_map": {}}))
    assert "open its folder" in str(refused(tmp_path / "flax_model.msgpack.index.json").hint)


def test_what_is_looked_at_is_bounded(tmp_path: Path) -> None:
    for n in range(500):
        (tmp_path / f"{n}.dat").touch()
    (tmp_path / "folder").mkdir()
    there = what_is_there(locate(tmp_path))
    assert len(there.text) < 300
    assert "more" in there.text


def test_weight_files_and_folders_come_before_many_others(tmp_path: Path) -> None:
    for n in range(400):
        (tmp_path / f"{n}.dat").touch()
    weights(tmp_path / "x_part")
    error = refused(weights(tmp_path, "zz.safetensors"))
    assert "it holds `zz.safetensors` (safetensors, " in str(error)
    assert "`x_part/` (an empty folder)" in str(error)
    assert "and 398 more" in str(error)
    assert error.hint == f"did you mean `{tmp_path / 'zz.safetensors'}`?"


def test_a_weight_file_in_a_folder_below_is_meant(tmp_path: Path) -> None:
    file = weights(tmp_path / "unet", "diffusion_model.safetensors") / "diffusion_model.safetensors"
    assert refused(tmp_path).hint == f"did you mean `{file}`?"


def test_numbered_parts_are_told_apart_from_whole_files(tmp_path: Path) -> None:
    parts = (["rank0.pt", "rank1.pt"], ["a-part-1.safetensors", "a-part-2.safetensors"])
    for n, names in enumerate((*parts, ["epoch=1.ckpt", "epoch=2.ckpt"])):
        folder = tmp_path / str(n)
        folder.mkdir()
        for name in names:
            torch.save({"w": torch.ones(2)}, folder / name)
            if name.endswith(".safetensors"):
                reshard.save_file(WEIGHTS, folder / name)
        assert ("a part of the tensors" in str(refused(folder).hint)) == (names in parts)


def test_an_archive_that_looks_like_a_torch_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "w.npz", w=np.ones(2))
    with pytest.raises(DamagedFileError, match="it looks like an archive of NumPy"):
        reshard.open(tmp_path / "w.npz")


def test_a_run_that_resumes_is_told(tmp_path: Path) -> None:
    weights(tmp_path / "unet", "diffusion_model.safetensors")
    error = explain(Config(str(tmp_path / "unet"), resume=True), RunFacts()).error
    assert "exists and holds no checkpoint: it holds `diffusion_model.safetensors`" in str(error)


# -- torch files that are no whole model


def test_numpy_arrays_are_told_apart_from_tensors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.save({"a.weight": np.ones((2, 2)), "b": torch.ones(1)}, tmp_path / "np.pt")
    with reshard.open(tmp_path / "np.pt") as checkpoint:
        assert checkpoint.keys() == ["b"]
    assert "numpy arrays are values beside the tensors, not tensors: `a.weight`" in caplog.text


def test_the_file_of_a_rank_is_not_converted(tmp_path: Path) -> None:
    folder = tmp_path / "actor"
    folder.mkdir()
    for rank in range(2):
        torch.save({"w": torch.ones(2)}, folder / f"optim_world_size_2_rank_{rank}.pt")
    error = refused(folder)
    assert "saves the shards of FSDP ranks" in str(error)
    assert "model_world_size_<N>_rank_<R>.pt" in str(error.hint)
    for to in ("huggingface", "torch"):
        with pytest.raises(UnsupportedError, match="the file of one rank of several") as caught:
            reshard.convert(folder / "optim_world_size_2_rank_0.pt", tmp_path / to, to=to)
        assert f"convert its folder `{folder}`" in str(caught.value.hint)
        assert not (tmp_path / to).exists()


def test_tensors_of_a_mesh_are_refused_with_a_way_out(tmp_path: Path) -> None:
    from torch.distributed.tensor import Shard

    save_ranks(tmp_path / "ranks", (2,), lambda mesh: {"model": {"w": distributed(torch.ones(4), mesh, [Shard(0)])}})
    (tmp_path / "ranks" / "model_world_size_2_rank_0.pt").rename(tmp_path / "state.pt")
    for command in (["inspect"], ["convert"]):
        out = [tmp_path / "out"] if command == ["convert"] else []
        result = run(*command, tmp_path / "state.pt", *out)
        assert result.exit_code == 1
        assert "DTensor" in result.stderr
        assert "no rank the whole model" in result.stderr
        assert "hint: open the files of all ranks together" in result.stderr
    with pytest.raises(UnsupportedError, match="no rank the whole model") as caught:
        gather(Config(str(tmp_path / "state.pt"), resume=False))
    assert "files of all ranks" in str(caught.value.hint)
    assert not (tmp_path / "out").exists()


def test_an_index_in_a_list_of_files_is_no_file_of_weights(tmp_path: Path) -> None:
    folder = weights(tmp_path / "m", "a.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
    for given in ([folder / "a.safetensors", index], f"{folder}/*"):
        with pytest.raises(ArgumentError, match="is an index of weight files, and a list or a pattern names") as caught:
            reshard.open(given)
        assert caught.value.path == str(index)
        assert f"open `{index}` alone, which opens all files that it lists" in str(caught.value.hint)
    assert list(reshard.open(index)) == ["w"]
    index.rename(folder / "config.json")
    with pytest.raises(ArgumentError, match="is a JSON file, and a list") as caught:
        reshard.open(f"{folder}/*")


@pytest.mark.parametrize("name", ["w.bin", "w.pt", "w.gguf", "w.ckpt", "w.safetensors", "w.nemo"])
def test_an_empty_file_is_called_empty(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    for given in (tmp_path / name, [tmp_path / name]):
        with pytest.raises(ReshardError, match=r"is empty|has 0 bytes"):
            reshard.open(given)


def test_adapters_of_mlx_are_told_from_those_of_earlier_steps(tmp_path: Path) -> None:
    """mlx-lm writes `adapter_config.json` as PEFT does, and a file for every so many steps."""
    folder = weights(tmp_path / "m", "0000100_adapters.safetensors", "adapters.safetensors")
    (folder / "adapter_config.json").write_text('{"fine_tune_type": "lora"}')
    error = refused(folder)
    assert "probably written by MLX" in str(error)
    assert "open `adapters.safetensors`, the newest adapters" in str(error.hint)


def test_few_requests_look_for_what_a_folder_of_a_bucket_holds_further_below(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for at in range(4**3):
        s3.put(f"wrong/a{at // 16}/b{at // 4 % 4}/c{at % 4}/notes.txt", b"")
    with before_server(s3.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        assert _alone_below(locate("s3://reshard/wrong")) == []
    assert len(proxy.log) == 20
