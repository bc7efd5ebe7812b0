"""A `checkpoint-N` of Trainer on two ranks of DDP: a run with the callback goes on as Trainer itself, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.helpers.ports import unused_port

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_two_ranks_go_on_as_with_trainer_itself(tmp_path: Path) -> None:
    port = unused_port()
    words = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "trainer_ranks.py"), str(tmp_path)],
            env={**os.environ, **words, "RANK": str(rank), "LOCAL_RANK": str(rank), "CUDA_VISIBLE_DEVICES": ""},
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=400)[1].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    for rank in range(2):
        found = json.loads((tmp_path / f"found_{rank}.json").read_text())
        assert (found["step"], found["is_equal"]) == (15, True)
        assert "those of 2 ranks are `rng_state_0.pth`, `rng_state_1.pth`" in found["error"]
        assert found["refused_at"] == 0
