"""Folders with checkpoints of several formats: what was written last is opened, or nothing is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reshard
from reshard.errors import DestinationExistsError

if TYPE_CHECKING:
    from pathlib import Path

FOLDERS = ("huggingface", "mindspore", "dcp", "deepspeed-universal", "megatron", "checkpoint1", "checkpoint2")


def weights(value: float) -> dict[str, np.ndarray]:
    return {"w": np.full((4, 4), value, np.float32)}


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def convert(tmp_path: Path, value: float, to: Any, dst: Path, **options: Any) -> None:
    source = tmp_path / f"{value}.safetensors"
    reshard.save_file(weights(value), source)
    if to in ("megatron", "checkpoint2", "deepspeed-universal"):
        options["iteration"] = 5
    reshard.convert(source, dst, to=to, **options)


@pytest.mark.parametrize("to", [*FOLDERS, "torch"])
@pytest.mark.parametrize("there", FOLDERS)
def test_a_conversion_into_a_folder_of_another_format(tmp_path: Path, there: str, to: str) -> None:
    folder = tmp_path / "folder"
    convert(tmp_path, 0, there, folder)
    before = content(folder)
    try:
        convert(tmp_path, 1, to, folder, overwrite=True)
    except DestinationExistsError:
        assert content(folder) == before
        return
    with reshard.open(folder) as checkpoint:
        arrays = list(checkpoint.load().values())
        assert len(arrays) == 1, checkpoint.data.traits.name
        assert (arrays[0] == 1).all(), checkpoint.data.traits.name


def test_a_save_into_a_run_of_megatron_is_refused(tmp_path: Path) -> None:
    convert(tmp_path, 0, "megatron", tmp_path / "run")
    before = content(tmp_path / "run")
    for options in ({}, {"dry_run": True}, {"format": "checkpoint1"}):
        with pytest.raises(DestinationExistsError, match="of the format megatron, which would be opened instead"):
            reshard.save(tmp_path / "run", 10, weights(1), **options)
    assert content(tmp_path / "run") == before


def test_a_save_in_rank_folders_into_a_root_of_iterations_is_refused(tmp_path: Path) -> None:
    reshard.save(tmp_path, 10, weights(0))
    with pytest.raises(DestinationExistsError, match="of the format checkpoint2"):
        reshard.save(tmp_path, 20, weights(1), format="checkpoint1")
    assert reshard.load(tmp_path).iteration == 10


@pytest.mark.parametrize("to", ["huggingface", "mindspore", "dcp"])
def test_a_run_goes_on_beside_weights_in_its_root(tmp_path: Path, to: str) -> None:
    convert(tmp_path, 99, to, tmp_path / "weights")
    run = tmp_path / "run"
    reshard.save(run, 10, weights(1))
    for path in (tmp_path / "weights").iterdir():
        if path.name != "manifest.json":
            path.rename(run / path.name)
    assert (reshard.load(run).state["w"] == 1).all()
    reshard.save(run, 20, weights(2))
    assert reshard.load(run).iteration == 20
    assert reshard.rollback(run, 10).verified
    assert reshard.load(run).iteration == 10
    assert reshard.verify(run).ok


def test_the_first_save_beside_weights_is_resumed(tmp_path: Path) -> None:
    reshard.save_file(weights(99), tmp_path / "model.safetensors")
    reshard.save(tmp_path, 10, weights(1))
    assert reshard.load(tmp_path).iteration == 10
