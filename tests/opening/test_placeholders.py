"""Weights without elements beside the checkpoint that holds them: both are named, and one can be chosen."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tests.helpers.command_line import run

import reshard
from reshard.errors import ArgumentError, MismatchError, UnsupportedError
from reshard.options import InitFrom
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


def test_every_command_and_verb_takes_the_format(both: Path) -> None:
    reshard.save_file({"w": np.zeros(0, np.float32)}, both / "model.safetensors")
    layout = both.parent / "layout.json"
    layout.write_text('{"mesh": {"tp": 2}, "rules": [{"match": "*", "cut": ["tp"]}]}')
    assert reshard.convert(both, both.parent / "all.safetensors", format="deepspeed", part="all").n_tensors == 1
    with reshard.open(both.parent / "all.safetensors") as written:
        assert written.read("w.fp32").tolist() == np.ones((2, 3)).tolist()
    assert reshard.diff(both, both, format_a="deepspeed", format_b="deepspeed").equal
    assert not reshard.diff(both, both, format_a="deepspeed", format_b="huggingface").equal
    assert reshard.verify(both, format="deepspeed").ok
    names = '{"rules": [{"from": "w.fp32", "to": "v"}]}'
    (both.parent / "names.json").write_text(names)
    commands: list[tuple[str | Path, ...]] = [
        ("inspect", both),
        ("verify", both),
        ("plan", both, "--layout", layout, "--no-measure"),
        ("layout", "check", layout, both),
        ("names", "show", both.parent / "names.json", both),
        ("convert", both, both.parent / "one.safetensors", "--part", "all"),
        ("merge", both, both.parent / "full", "--part", "all"),
        ("split", both, both.parent / "ranks", "--layout", layout, "--part", "all"),
    ]
    for command in commands:
        refused = run(*command)
        assert refused.exit_code == 1, command
        assert "placeholders" in refused.output, command
        chosen = run(*command, "--format", "deepspeed")
        assert chosen.exit_code == 0, (command, chosen.output)
    assert run("diff", both, both, "--format-a", "deepspeed", "--format-b", "deepspeed").exit_code == 0
    with pytest.raises(ArgumentError, match="no checkpoint of the format `dcp`"):
        reshard.convert(both, both.parent / "x", format="dcp")
    with pytest.raises(ArgumentError, match="no checkpoint of the format `dcp`"):
        reshard.verify(both, format="dcp")
    asked = run("explain", both.parent / "none", "--init-from", both, "--format", "deepspeed")
    assert asked.exit_code == 0, asked.output


def test_a_run_starts_from_the_checkpoint_of_the_format(both: Path) -> None:
    reshard.save_file({"weight": np.zeros(0, np.float32)}, both / "model.safetensors")
    names = {"rules": [{"from": "w.fp32", "to": "weight"}]}
    for start, value in (("deepspeed", 1.0), ("huggingface", None)):
        model = torch.nn.Linear(3, 2, bias=False)
        init = InitFrom(both, format=start, names=names if value else None)
        checkpointer = Checkpointer(both.parent / f"run_{start}", save_every=None, signals=())
        if value is None:
            with pytest.raises(MismatchError, match="weight"):
                checkpointer.resume(model=model, init_from=init)
        else:
            checkpointer.resume(model=model, init_from=init)
            assert model.weight.eq(value).all()


def test_a_format_of_a_path_without_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ArgumentError, match="hint: no format recognises it"):
        reshard.open(tmp_path, format="dcp")


def test_whole_weights_beside_the_checkpoint_of_a_run_are_not_opened_by_an_order(both: Path) -> None:
    reshard.save_file({"w": np.zeros(4, np.float32)}, both / "model.safetensors")
    with pytest.raises(UnsupportedError, match="holds checkpoints of the formats huggingface and deepspeed") as caught:
        reshard.open(both)
    assert "`format='huggingface'` opens the weights, `format='deepspeed'` the other checkpoint" in str(caught.value)
    for name, key, shape in (("huggingface", "w", (4,)), ("deepspeed", "w.fp32", (2, 3))):
        with reshard.open(both, format=name) as checkpoint:
            assert checkpoint.shape(key) == shape
        assert run("inspect", both, "--format", name).exit_code == 0
    refused = run("inspect", both)
    assert (refused.exit_code, "--format" in refused.stderr) == (1, True)
    assert not reshard.verify(both).ok
    with pytest.raises(UnsupportedError, match="formats huggingface and deepspeed"):
        reshard.convert(both, both.parent / "out")


def test_two_files_of_the_same_weights_are_one_checkpoint(tmp_path: Path) -> None:
    reshard.save_file({"w": np.zeros(4, np.float32)}, tmp_path / "model.safetensors")
    torch.save({"w": torch.zeros(4)}, tmp_path / "pytorch_model.bin")
    with reshard.open(tmp_path) as checkpoint:
        assert checkpoint.format == "huggingface"


def test_weights_without_elements_are_told(both: Path, caplog: pytest.LogCaptureFixture) -> None:
    alone = both.parent / "alone"
    alone.mkdir()
    reshard.save_file({"w": np.zeros((0, 4), np.float32)}, alone / "model.safetensors")
    with reshard.open(alone) as checkpoint:
        assert checkpoint.shape("w") == (0, 4)
    assert "are placeholders: `w` has the shape (0, 4)" in caplog.text
    caplog.clear()
    reshard.save_file({"w": np.zeros((4, 0), np.float32)}, alone / "model.safetensors")
    reshard.open(alone).close()
    assert caplog.text == ""
