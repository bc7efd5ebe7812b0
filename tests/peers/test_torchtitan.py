"""The example of torchtitan, killed and run again, is the run that was never interrupted."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tests.peers.required import required

import reshard

if TYPE_CHECKING:
    from pathlib import Path

required("torchtitan")
pytestmark = pytest.mark.slow

N_STEPS = 12


def start(out: Path, n_ranks: int) -> list[subprocess.Popen[str]]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    common = {**os.environ, "WORLD_SIZE": str(n_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    words = [sys.executable, "-m", "reshard.examples.train_torchtitan", str(out), str(N_STEPS)]
    return [
        subprocess.Popen(
            words,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(n_ranks)
    ]


def losses(text: str) -> dict[int, str]:
    words = [line.split() for line in text.splitlines() if line.startswith("rank 0 step")]
    return {int(line[3]): line[5] for line in words}


def finished(ranks: list[subprocess.Popen[str]]) -> dict[int, str]:
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), said
    return losses(said[0])


def test_a_folder_that_is_given_takes_the_place_of_that_of_the_manager() -> None:
    from reshard.torch.dcp.torchtitan import CheckpointManager

    manager: Any = SimpleNamespace(folder="own")
    of_step = CheckpointManager._create_checkpoint_id
    assert of_step(manager, 5) == "own/iteration_00000005"
    assert of_step(manager, 5, "given") == "given/iteration_00000005"


def test_killed_and_resumed_is_never_interrupted(tmp_path: Path) -> None:
    expected = finished(start(tmp_path / "whole", 2))
    ranks = start(tmp_path / "killed", 2)
    assert ranks[0].stdout is not None
    for line in ranks[0].stdout:
        if line.startswith("rank 0 step 8 "):
            break
    for rank in ranks:
        rank.send_signal(signal.SIGKILL)
    for rank in ranks:
        rank.communicate()
    root = tmp_path / "killed" / "checkpoint"
    with reshard.open(root) as checkpoint:  # a root of this package, whenever it was killed
        assert checkpoint.iteration in {3, 6}
        assert checkpoint.verified
        found = checkpoint.iteration
    resumed = finished(start(tmp_path / "killed", 2))
    assert resumed == {step: loss for step, loss in expected.items() if step > found}
    with reshard.open(root) as checkpoint, reshard.open(tmp_path / "whole" / "checkpoint") as whole:
        assert checkpoint.iteration == whole.iteration == N_STEPS
        assert checkpoint.extra()["train_state.step"] == N_STEPS
        assert checkpoint.keys() == whole.keys()
        assert all((checkpoint.read(key) == whole.read(key)).all() for key in checkpoint)
