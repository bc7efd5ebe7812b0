"""Folders of torchtune. The samples are of its own checkpointers; older names follow the docstring of `names`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.helpers.command_line import run

import reshard
from reshard.errors import CheckpointNotFoundError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

DATA = Path(__file__).parents[2] / "data" / "torch" / "torchtune"


def check(path: Path, truth: str) -> None:
    expected: Mapping[str, Any] = reshard.load_file(DATA / f"truth_{truth}.safetensors")
    with reshard.open(path) as checkpoint:
        assert checkpoint.format == "torchtune"
        assert set(checkpoint.keys()) == set(expected)
        for key, array in expected.items():
            assert checkpoint.read(key).tobytes() == array.tobytes(), key
            assert checkpoint.read(key, slice(1, 3)).tobytes() == array[1:3].tobytes(), key


@pytest.mark.parametrize(("folder", "truth"), [("hf_bin", "hf"), ("torchtune", "torchtune")])
def test_the_newest_epoch_of_a_run(tmp_path: Path, folder: str, truth: str, caplog: pytest.LogCaptureFixture) -> None:
    check(DATA / folder, truth)
    assert "the optimizer in recipe_state.pt is not" in caplog.text
    run_ = Path(shutil.copytree(DATA / folder, tmp_path / "run"))
    shutil.copytree(run_ / "epoch_0", run_ / "epoch_10")
    for path in (run_ / "epoch_0").iterdir():
        path.write_bytes(b"")
    (run_ / "epoch_11").mkdir()  # the save of the next epoch was stopped
    check(run_, truth)
    with reshard.open(run_) as checkpoint:
        assert checkpoint.skipped == (("epoch_11", "it holds no weights"),)
    assert run("inspect", run_).exit_code == 0
    result = run("convert", run_, tmp_path / "hf")
    assert result.exit_code == 0, result.output
    with reshard.open(tmp_path / "hf") as converted:
        assert len(converted) == 12
    for name in ("epoch_0", "epoch_10"):
        shutil.rmtree(run_ / name)
    with pytest.raises(CheckpointNotFoundError, match="no epoch holds weights: `epoch_11`"):
        reshard.open(run_)


def test_an_epoch_with_a_missing_file_is_refused(tmp_path: Path) -> None:
    run_ = Path(shutil.copytree(DATA / "hf_bin", tmp_path / "run"))
    (run_ / "epoch_0" / "model-00002-of-00002.bin").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"lists missing files: `model-00002-of-00002.bin`"):
        reshard.open(run_)


def old(folder: Path, **files: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, state in files.items():
        torch.save(state, folder / f"{name}.pt")
    torch.save({"epochs_run": 1, "seed": 0}, folder / "recipe_state.pt")
    return folder


def test_names_of_older_versions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    a, b = {"a": torch.ones(2)}, {"b": torch.arange(3.0)}
    for kind in ("meta_model_3", "torchtune_model_0"):
        with reshard.open(old(tmp_path / kind, **{kind: a})) as checkpoint:
            assert list(checkpoint) == ["a"]
    folder = old(tmp_path / "hf", hf_model_0001_0=b, hf_model_0002_0=a, hf_model_0001_1=a, hf_model_0002_1=b)
    with reshard.open(folder) as checkpoint:
        assert checkpoint.format == "torchtune"
        assert {key: checkpoint.read(key).tolist() for key in checkpoint} == {"a": [1, 1], "b": [0, 1, 2]}
    assert "epoch 1 is read; not read: those of 0" in caplog.text
    (folder / "hf_model_0002_1.pt").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"holds 1 of 2 files of epoch 1; missing: `hf_model_0002_1`"):
        reshard.open(folder)
    (folder / "hf_model_0001_1.pt").unlink()
    (folder / "hf_model_0001_0.pt").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"missing: `hf_model_0001_0`"):
        reshard.open(folder)
    with pytest.raises(UnsupportedError, match="of epoch 0 under several namings"):
        reshard.open(old(folder, meta_model_0=a))
    old(tmp_path / "huge", hf_model_0001_0=a, hf_model_999999999_0=b)
    with pytest.raises(CheckpointNotFoundError, match="holds 2 of 999999999 files") as caught:
        reshard.open(tmp_path / "huge")
    assert len(str(caught.value)) < 500


def test_folders_of_others_are_not_taken_for_torchtune(tmp_path: Path) -> None:
    (tmp_path / "epoch_0").mkdir()
    reshard.save_file({"w": np.ones(2)}, tmp_path / "epoch_0" / "model.safetensors")
    with pytest.raises(CheckpointNotFoundError) as caught:
        reshard.open(tmp_path)
    assert caught.value.hint == f"did you mean `{tmp_path / 'epoch_0'}`?"
