"""What `training.py` times: a training loop with and without background saves. The saved state is checked."""

from __future__ import annotations

import collections
import os
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

import reshard
from reshard.torch import Checkpointer
from reshard.torch.tensors import from_tensor

if TYPE_CHECKING:
    from pathlib import Path

_WIDTH, _BATCH = 2048, 64
LAYER_BYTES = 3 * 4 * (_WIDTH * _WIDTH + _WIDTH)
"""Bytes of a layer in float32 and of its AdamW state, without the two counters."""


class _Loop:
    """A model, its optimizer and a batch; the number of layers sets the size of the state."""

    def __init__(self, n_layers: int) -> None:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
        torch.manual_seed(0)
        layers = [part for _ in range(n_layers) for part in (nn.Linear(_WIDTH, _WIDTH), nn.ReLU())]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn(_BATCH, _WIDTH)
        self.n = 0

    def step(self) -> None:
        loss = (self.model(self.batch) - self.batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.n += 1

    def state(self) -> dict[str, np.ndarray]:
        """A copy of the state."""
        found = dict(self.model.named_parameters())
        for name, parameter in self.model.named_parameters():
            found |= {f"{slot}.{name}": value for slot, value in self.optimizer.state[parameter].items()}
        return {name: from_tensor(tensor)[0].copy() for name, tensor in found.items()}


def train(root: Path, n_layers: int, n_steps: int) -> dict[str, float]:
    """Run the loop and measure steps and stalls.

    Intervals of the three kinds are interleaved, and each kind comes first once: the speed of processors varies.

    Args:
        root: where the saves are written.
        n_layers: layers of the model.
        n_steps: steps of an interval.

    Returns:
        Seconds by the name of the case.
    """
    loop = _Loop(n_layers)
    for _ in range(3):
        loop.step()
    made = {"": _checkpointer(root / "plain", loop), ", overlap": _checkpointer(root / "overlap", loop, overlap=True)}
    found: dict[str, list[float]] = collections.defaultdict(list)
    for name, one in made.items():
        first = _save(loop, one)
        if not name:
            found["stall of `step`, the first time"].append(first)
        loop.step()
        one.wait()  # from here on the memory for copies exists
    kinds = [None, *made]
    for turn in range(len(kinds)):
        for kind in kinds[turn:] + kinds[:turn]:
            if kind is None:
                found["step, no save"].append(_interval(loop, n_steps))
                continue
            seconds, stall, in_flight = _interval_with_save(loop, made[kind], n_steps)
            found[f"step, one save in an interval{kind}"].append(seconds)
            found[f"stall of `step`{kind}"].append(stall)
            found[f"step, save in flight{kind}"].append(in_flight)
    for one in made.values():
        _check(loop, one)
        one.close()
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def _checkpointer(root: Path, loop: _Loop, **options: Any) -> Checkpointer:
    made = Checkpointer(root, keep=1, signals=(), **options)
    made.resume(model=loop.model, optimizer=loop.optimizer)
    return made


def _save(loop: _Loop, made: Checkpointer) -> float:
    """Make a step with a save; returns its seconds."""
    started = time.perf_counter()
    made.step(loop.n)
    made.save()
    return time.perf_counter() - started


def _interval(loop: _Loop, n_steps: int) -> float:
    """Seconds of a step, with no save."""
    started = time.perf_counter()
    for _ in range(n_steps):
        loop.step()
    return (time.perf_counter() - started) / n_steps


def _interval_with_save(loop: _Loop, made: Checkpointer, n_steps: int) -> tuple[float, float, float]:
    """Seconds of a step of an interval with a save, of the stall, and of a step that began before the save ended."""
    in_flight: list[float] = []
    started, before = time.perf_counter(), loop.n
    loop.step()
    stall = _save(loop, made)
    pending = made._saver.run.pending
    while loop.n - before < n_steps or not pending.done():  # an interval lasts until its save ends
        is_in_flight, began = not in_flight or not pending.done(), time.perf_counter()
        loop.step()
        if is_in_flight:
            in_flight.append(time.perf_counter() - began)
    seconds = (time.perf_counter() - started) / (loop.n - before)
    made.wait()
    return seconds, stall, statistics.mean(in_flight)


def _check(loop: _Loop, made: Checkpointer) -> None:
    """Compare a save with the state at its step; the loop goes on meanwhile."""
    expected = loop.state()
    _save(loop, made)
    for _ in range(2):
        loop.step()
    report = made.wait()
    assert report is not None
    assert report.durable
    with reshard.open(report.path) as checkpoint:
        found = checkpoint.load()
    assert set(found) == set(expected)
    assert all(np.array_equal(found[name], array) for name, array in expected.items())
