"""What objects say of themselves, what the log of a run has, and what another process gets of a checkpoint."""

from __future__ import annotations

import logging
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import reshard
from reshard.errors import CheckpointNotFoundError
from reshard.torch import Checkpointer, ElasticSampler

if TYPE_CHECKING:
    from pathlib import Path


def test_a_checkpoint_is_pickled_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2):
        reshard.save(tmp_path / "run", number, {"w": np.full(3, number)})
    monkeypatch.chdir(tmp_path)
    with reshard.open("run") as opened:
        text = pickle.dumps(opened)
    reshard.save(tmp_path / "run", 3, {"w": np.full(3, 3)})
    monkeypatch.chdir("/")
    with pickle.loads(text) as again:
        assert (again.iteration, again.read("w").tolist()) == (2, [2, 2, 2])
    reshard.prune(tmp_path / "run", keep=1)
    with pytest.raises(CheckpointNotFoundError):
        pickle.loads(text)


def test_a_renamed_checkpoint_is_pickled_with_its_names(tmp_path: Path) -> None:
    reshard.save_file({"a": np.arange(3)}, tmp_path / "w.safetensors")
    names = {"rules": [{"from": "a", "to": "b"}]}
    with reshard.open(tmp_path / "w.safetensors", names=names) as opened:
        assert list(pickle.loads(pickle.dumps(opened))) == ["b"]
    with reshard.open(tmp_path / "w.safetensors") as opened, pytest.raises(TypeError, match="is a view"):
        pickle.dumps(opened.renamed(names))


class Rows(torch.utils.data.Dataset[Any]):
    """Reads rows of a tensor of a checkpoint that another process has opened."""

    def __init__(self, checkpoint: reshard.Checkpoint) -> None:
        self.checkpoint = checkpoint

    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> Any:
        return self.checkpoint.read("w", (row, slice(None)))


@pytest.mark.slow
def test_spawned_workers_of_a_loader_open_it_again(tmp_path: Path) -> None:
    reshard.save_file({"w": np.arange(8).reshape(4, 2)}, tmp_path / "w.safetensors")
    with reshard.open(tmp_path / "w.safetensors") as opened:
        loader = torch.utils.data.DataLoader(Rows(opened), num_workers=1, multiprocessing_context="spawn")
        assert torch.cat(list(loader)).tolist() == np.arange(8).reshape(4, 2).tolist()


def test_objects_say_what_they_are(tmp_path: Path) -> None:
    sampler = ElasticSampler(16, 0, True, 4, 0, 2)
    sampler.step(2)
    assert repr(sampler) == "<reshard.torch.ElasticSampler rank 0 of 2, epoch 0, 8 of 16 samples, 4 a step>"
    made = Checkpointer(tmp_path, save_every=2, signals=())
    assert repr(made) == f"<reshard.torch.Checkpointer {tmp_path}, not resumed>"
    with made:
        made.resume(model=torch.nn.Linear(1, 1))
        for step in (1, 2, 3):
            made.step(step)
        assert repr(made) == f"<reshard.torch.Checkpointer {tmp_path}, step 3, saved 2>"
    assert repr(made).endswith(", closed>")


def test_the_log_says_what_an_operator_looks_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "reshard"):
        for _ in range(2):
            with Checkpointer(tmp_path, save_every=1, keep=1, signals=()) as made:
                start = made.resume(model=torch.nn.Linear(1, 1)).initial_step
                for step in (1, 2):
                    made.step(start + step)
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert [" ".join(line.split()[:3]).rstrip(":") for line in lines] == [
        "resumed: fresh=True, initial_step=0,",
        "iteration 1 published",
        "iteration 2 published",
        "iteration 1 pruned",
        "iteration 2 resumed",
        "iteration 3 published",
        "iteration 2 pruned",
        "iteration 4 published",
        "iteration 3 pruned",
    ]
    assert all(word in lines[1] for word in ("n_bytes=", "seconds=", "stall_seconds="))


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ((), None),
        ((1, 2), None),
        ((1, 2, 3), "step 3 is not saved"),
        ((1,), "step 1 is"),
        ((1, 4, 5, 7), "steps 5 to 7"),
    ],
)
def test_steps_that_no_save_holds_are_named(
    steps: tuple[int, ...], said: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(tmp_path, save_every=2 if len(steps) < 4 else 4, signals=()) as made:
        made.resume(model=torch.nn.Linear(1, 1))
        for step in steps:
            made.step(step)
    lines = [line for line in caplog.messages if "not saved" in line]
    assert len(lines) == (said is not None)
    assert said is None or lines[0].startswith(said)


def test_the_last_step_is_saved_if_that_is_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(tmp_path, save_every=2, save_at_end=True, signals=()) as made:
        made.resume(model=torch.nn.Linear(1, 1))
        for step in (1, 2, 3):
            made.step(step)
    assert reshard.open(tmp_path).iteration == 3
    assert not [line for line in caplog.messages if "not saved" in line]
    with pytest.raises(RuntimeError, match="the loop fails"):
        fail(tmp_path)
    assert reshard.open(tmp_path).iteration == 3


def fail(root: Path) -> None:
    """A run whose loop fails before a save is due."""
    with Checkpointer(root, save_every=8, save_at_end=True, signals=()) as made:
        made.resume(model=torch.nn.Linear(1, 1))
        made.step(4)
        message = "the loop fails"
        raise RuntimeError(message)
