"""Weights without elements beside the checkpoint that holds them: both are named, and one can be chosen."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tests.test_cli import run

import reshard
from reshard.errors import ArgumentError, UnsupportedError
from reshard.torch import Checkpointer

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def both(tmp_path: Path) -> Path:
    """A folder with a save of DeepSpeed, and the model beside it."""
    reshard.save_file({"w": np.ones((2, 3), np.float32)}, tmp_path / "w.safetensors")
    reshard.convert(tmp_path / "w.safetensors", tmp_path / "both", to="deepspeed-universal", iteration=3)
    return tmp_path / "both"


def test_placeholders_are_not_opened_in_place_of_the_weights(both: Path) -> None:
    placeholders = {"w": np.zeros(0, np.float32), "norm": np.ones(2, np.float32)}
    reshard.save_file(placeholders, both / "model.safetensors")
    with pytest.raises(UnsupportedError, match=r"formats huggingface and deepspeed.* placeholders: `w` has the"):
        reshard.open(both)
    with reshard.open(both, format="deepspeed") as checkpoint:
        assert checkpoint.shape("w.fp32") == (2, 3)
    with reshard.open(both, format="huggingface") as checkpoint:
        assert checkpoint.shape("w") == (0,)
    with pytest.raises(ArgumentError, match="no checkpoint of the format `dcp`\nhint: its format can be huggin"):
        reshard.open(both, format="dcp")
    with reshard.open(both, format="deepspeed") as checkpoint:
        again = pickle.loads(pickle.dumps(checkpoint))
        assert again.format == "deepspeed"
        again.close()
    found = run("inspect", both)
    assert found.exit_code == 1
    assert "--format deepspeed" in found.stderr
    assert run("inspect", both, "--format", "deepspeed").exit_code == 0
    assert run("convert", both, both.parent / "out").exit_code == 1
    assert not (both.parent / "out").exists()


def test_a_run_that_starts_from_placeholders_is_told_what_to_open(both: Path) -> None:
    reshard.save_file({"w": np.zeros(0, np.float32)}, both / "model.safetensors")
    with pytest.raises(UnsupportedError, match="are placeholders") as caught:
        Checkpointer(both.parent / "run", save_every=None).resume(model=torch.nn.Linear(3, 2), init_from=str(both))
    assert "the path of its own folder" in str(caught.value.hint)


def test_a_format_of_a_path_without_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ArgumentError, match="hint: no format recognises it"):
        reshard.open(tmp_path, format="dcp")


def test_whole_weights_are_opened_as_before(both: Path, caplog: pytest.LogCaptureFixture) -> None:
    reshard.save_file({"w": np.zeros(4, np.float32)}, both / "model.safetensors")
    with reshard.open(both) as checkpoint:
        assert checkpoint.shape("w") == (4,)
    alone = both.parent / "alone"
    alone.mkdir()
    reshard.save_file({"w": np.zeros((0, 4), np.float32)}, alone / "model.safetensors")
    with reshard.open(alone) as checkpoint:
        assert checkpoint.shape("w") == (0, 4)
    assert "are placeholders: `w` has the shape (0, 4)" in caplog.text
