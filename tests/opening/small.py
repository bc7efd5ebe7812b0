"""Small checkpoints of one file, and what is held against them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from tests.helpers import original_reader

import reshard

if TYPE_CHECKING:
    from tests.helpers.arrays import Arrays

SAMPLES = Path(__file__).parents[1] / "data" / "mindspore"
# Saved beside the parameters of a run; the ground truth does not list it.
UNLISTED = "global_step"
BIAS = "decoder.layers.1.mlp.router.expert_bias"


def ground_truth(tree: str, iteration: int) -> Arrays:
    return original_reader.read_shard_file(SAMPLES / tree / f"expected_{iteration:08d}.safetensors")


def folder_of(tree: str, iteration: int) -> Path:
    return SAMPLES / tree / "checkpoint" / f"iteration_{iteration:08d}"


TENSORS: Arrays = {
    "w": np.arange(48, dtype=np.float32).reshape(8, 6),
    "half": np.arange(16).astype(ml_dtypes.bfloat16).reshape(4, 4),
    "ids": np.arange(5, dtype=np.int64),
    "one": np.array(7, np.float64),
    "none": np.zeros((0, 3), np.float32),
}
LAYOUT: dict[str, Any] = {
    "mesh": {"dp": 2, "tp": 2},
    "rules": [
        {"match": "w", "cut": ["tp", "dp"]},
        {"match": "half", "cut": [None, "tp"]},
        {"match": "*"},
    ],
}


@pytest.fixture
def small(tmp_path: Path) -> Any:
    """A file with `TENSORS` in it."""
    reshard.save_file(TENSORS, tmp_path / "small.safetensors")
    with reshard.open(tmp_path / "small.safetensors") as opened:
        yield opened
