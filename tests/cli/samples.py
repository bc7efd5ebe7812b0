"""Checkpoints that the command line is run on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import safetensors.numpy

if TYPE_CHECKING:
    from pathlib import Path

LAYOUT = """
mesh: {tp: 2}
rules:
  - {match: "*.weight", cut: [tp]}
  - match: "*"
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small model in one file, written by the stock package."""
    rng = np.random.default_rng(1)
    arrays = {f"model.layers.{i}.w.weight": rng.random((8, 6), np.float32) for i in range(30)}
    safetensors.numpy.save_file({**arrays, "model.norm": np.ones(4, np.float16)}, tmp_path / "m.safetensors")
    (tmp_path / "tp2.yaml").write_text(LAYOUT)
    return tmp_path / "m.safetensors"
