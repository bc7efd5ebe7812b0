"""Runs in buckets: what is saved, and what must be read back."""

from __future__ import annotations

import numpy as np
from click.testing import CliRunner

import reshard
from reshard.cli import main
from reshard.commit import roots
from reshard.storage.location import locate


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
