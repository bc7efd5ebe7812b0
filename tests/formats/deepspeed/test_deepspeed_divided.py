"""Saves of DeepSpeed with a file for each expert or for each layer of a pipeline, as its engine wrote them."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import reshard
from reshard.errors import CheckpointNotFoundError, DamagedFileError, ReshardError, UnsupportedError
from reshard.torch import as_tensor

DATA = Path(__file__).parents[2] / "data" / "torch"
EXPERTS, PIPELINE = DATA / "ds_experts", DATA / "ds_pipeline"
EXPERT = "layer_0_expert_1_mp_rank_00_model_states.pt"


@pytest.mark.parametrize("tree", [EXPERTS, PIPELINE], ids=lambda tree: tree.name)
def test_the_weights_are_those_of_the_module(tree: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = load_file(tree / "truth.safetensors")
    for path in (tree, tree / "t"):  # the root, by `latest`
        with caplog.at_level(logging.WARNING), reshard.open(path) as checkpoint:
            assert (checkpoint.format, set(checkpoint.keys("model"))) == ("deepspeed", set(expected))
            for key, tensor in expected.items():
                assert torch.equal(as_tensor(checkpoint.read(key)), tensor), key
    assert "the state of the optimizer of" in caplog.text
    reshard.convert(tree, tmp_path / "hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_slices_and_layouts() -> None:
    key = "moe.deepspeed_moe.experts.deepspeed_experts.2.0.weight"
    whole = load_file(EXPERTS / "truth.safetensors")[key]
    layout = {"mesh": {"tp": 2}, "rules": [{"match": "*experts.*.0.weight", "cut": ["tp"]}, {"match": "*"}]}
    with reshard.open(EXPERTS) as checkpoint:
        assert torch.equal(as_tensor(checkpoint.read(key, (slice(1, 3), slice(2)))), whole[1:3, :2])
        assert torch.equal(as_tensor(checkpoint.load(layout, rank=1)[key]), whole[3:])


def changed(tmp_path: Path, tree: Path) -> Path:
    shutil.copytree(tree / "t", tmp_path / "t")
    return tmp_path / "t"


def refused(folder: Path, message: str, kind: type[ReshardError] = DamagedFileError) -> None:
    with pytest.raises(kind, match=message) as caught:
        reshard.open(folder)
    assert str(caught.value.path).startswith(str(folder))


@pytest.mark.parametrize("expert", [0, 1, 2])
def test_a_missing_expert(tmp_path: Path, expert: int) -> None:
    folder = changed(tmp_path, EXPERTS)
    (folder / f"layer_0_expert_{expert}_mp_rank_00_model_states.pt").unlink()
    refused(folder, f"3 experts of layer 0 were saved: expected the file of expert {expert}")


@pytest.mark.parametrize("layer", [0, 2, 3])
def test_a_missing_layer(tmp_path: Path, layer: int) -> None:
    folder = changed(tmp_path, PIPELINE)
    (folder / f"layer_{layer:02}-model_states.pt").unlink()
    refused(folder, f"its stages have `{layer}.weight`, `{layer}.bias`, and no file of a layer holds them")


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    folder = changed(tmp_path, EXPERTS)
    content = (folder / EXPERT).read_bytes()
    shutil.copy(folder / "layer_0_expert_0_mp_rank_00_model_states.pt", folder / EXPERT)
    refused(folder, r"experts\.0\.0\.weight` is no tensor of expert 1")
    (folder / EXPERT).write_bytes(content[:100])
    refused(folder, "model_states")
    (folder / EXPERT).write_bytes(content)
    (folder / "layer_0_expert_3_mp_rank_00_model_states.pt").write_bytes(content)
    refused(folder, r"is no tensor of expert 3")
    (folder / "layer_0_expert_3_mp_rank_00_model_states.pt").unlink()
    (folder / "layer_1_expert_1_mp_rank_00_model_states.pt").write_bytes(content)
    refused(folder, r"experts\.1\.0\.weight` is in `layer_0_expert_1")
    (folder / "layer_1_expert_1_mp_rank_00_model_states.pt").unlink()
    (folder / "mp_rank_00_model_states.pt").unlink()
    refused(folder, "the save was not finished", CheckpointNotFoundError)


def test_stages_of_different_steps(tmp_path: Path) -> None:
    folder = changed(tmp_path, PIPELINE)
    state = torch.load(folder / "mp_rank_01_model_states.pt", weights_only=False)
    torch.save({**state, "global_steps": 7}, folder / "mp_rank_01_model_states.pt")
    refused(folder, "mp_rank_01_model_states.pt`: it is of another step than `mp_rank_00_model_states.pt`")


@pytest.mark.parametrize(
    ("tree", "name"),
    [
        (EXPERTS, "layer_0_expert_0_mp_rank_01_model_states.pt"),
        (EXPERTS, "mp_rank_01_model_states.pt"),
        (EXPERTS, "layer_00-model_00-model_states.pt"),
        (EXPERTS, "zero_pp_rank_0_mp_rank_00_model_states.pt"),
        (PIPELINE, "layer_00-model_01-model_states.pt"),
    ],
)
def test_tensor_parallel_ranks_and_stage_3(tmp_path: Path, tree: Path, name: str) -> None:
    folder = changed(tmp_path, tree)
    shutil.copy(folder / "mp_rank_00_model_states.pt", folder / name)
    refused(folder, "how the tensors are divided is not stored", UnsupportedError)
