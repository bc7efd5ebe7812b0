"""Runs in buckets: what is saved, and what must be read back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner

import reshard
from reshard.cli import main
from reshard.commit import roots
from reshard.commit.session import forget_all
from reshard.storage.location import locate

if TYPE_CHECKING:
    from pathlib import Path


def arrays(iteration: int) -> dict[str, np.ndarray]:
    return {"w": np.arange(iteration, iteration + 120_000, dtype=np.float32).reshape(120, 1000), "b": np.ones(7)}


def check(url: str, iteration: int) -> None:
    """A restart takes this iteration, and all of it is what was saved."""
    with reshard.open(url) as opened:
        assert opened.iteration == iteration
        found = opened.load(verify="full")
    expected = arrays(iteration)
    assert {key: one.tobytes() for key, one in found.items()} == {key: one.tobytes() for key, one in expected.items()}


def iterations(url: str) -> list[int]:
    return [number for number, _ in roots.list_iterations(locate(url))]


def run(*command: str) -> str:
    """The output of a command that succeeds."""
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def train(root: str | Path, until: int, **how: Any) -> tuple[int, float]:
    """Train up to a step, in a process that has not used the root before: the step it resumed at, and the last loss."""
    torch = pytest.importorskip("torch")
    from reshard.torch import Checkpointer

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with Checkpointer(root, save_every=2, keep=2, signals=(), **how) as checkpointer:
        first = checkpointer.resume(model=model, optimizer=optimizer).initial_step
        for step in range(first + 1, until + 1):
            loss = model(torch.ones(3, 8)).pow(2).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpointer.step(step)
    forget_all()
    return first, loss.item()
