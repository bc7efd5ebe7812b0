"""What `training.py` and `resume.py` time: a training loop with and without background saves, and resuming its state.

The saved and the restored state are checked.
"""

from __future__ import annotations

import collections
import os
import statistics
import time
import zlib
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import reshard
from benches import fresh
from reshard.torch import Checkpointer
from reshard.torch.tensors import from_tensor

if TYPE_CHECKING:
    from pathlib import Path

N_THREADS = len(os.sched_getaffinity(0))
_WIDTH, _BATCH = 2048, 64
_SLOTS = ("exp_avg", "exp_avg_sq")
LAYER_BYTES = 3 * 4 * (_WIDTH * _WIDTH + _WIDTH)
"""Bytes of a layer in float32 and of its AdamW state, without the two counters."""


def n_layers(size_gb: float) -> int:
    """Layers of a state of about this size."""
    return max(1, round(size_gb * 1e9 / LAYER_BYTES))


class _Loop:
    """A model, its optimizer and a batch; the number of layers sets the size of the state."""

    def __init__(self, n_layers: int, n_threads: int) -> None:
        torch.set_num_threads(n_threads)
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
    loop = _Loop(n_layers, max(1, N_THREADS - 1))
    made = {"": _checkpointer(root / "plain", loop), ", overlap": _checkpointer(root / "overlap", loop, overlap=True)}
    for _ in range(3):
        loop.step()
        for one in made.values():
            one.step(loop.n)
    loop.step()
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


def save_for_resume(folder: Path, n_layers: int, library: Literal["reshard", "dcp"]) -> None:
    """Write the state by a library. Its values are computed from the names, so that no copy of them is needed later."""
    loop = _Loop(n_layers, N_THREADS)
    for name, parameter in loop.model.named_parameters():
        slots = {slot: torch.from_numpy(_values(f"{slot}.{name}", parameter)) for slot in _SLOTS}
        loop.optimizer.state[parameter] = {"step": torch.tensor(1.0), **slots}
        parameter.data.copy_(torch.from_numpy(_values(name, parameter)))
    loop.n = 1
    if library == "reshard":
        made = Checkpointer(folder / library, keep=1, signals=(), async_save=False)  # without a copy of the state
        made.resume(model=loop.model, optimizer=loop.optimizer)
        made.step(loop.n)
        made.save()
        made.close()
    else:
        model, optimizer = get_state_dict(loop.model, loop.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder / library, no_dist=True)
    os.sync()
    fresh.drop(_files(folder / library))


def resume(folder: Path, n_layers: int) -> float:
    """`Checkpointer.resume` into new objects; every checksum is compared."""
    _checkpointer(folder / "empty", _Loop(1, N_THREADS)).close()  # imports what is imported late
    loop = _Loop(n_layers, N_THREADS)
    made = Checkpointer(folder / "reshard", signals=())
    _prepare(folder, "reshard", n_layers)
    started = time.perf_counter()
    made.resume(model=loop.model, optimizer=loop.optimizer)
    seconds = time.perf_counter() - started
    made.close()
    _check_resumed(loop)
    return seconds


def load_dcp(folder: Path, n_layers: int, with_states: bool) -> float:  # noqa: FBT001  passed by position to a process
    """`dcp.load`, which compares no checksum.

    Args:
        folder: where `save_for_resume` wrote.
        n_layers: of the model.
        with_states: the clock includes `get_state_dict`, which makes the optimizer's state, and `set_state_dict`.
    """
    loop = _Loop(n_layers, N_THREADS)
    _prepare(folder, "dcp", n_layers)
    started = time.perf_counter()
    model, optimizer = get_state_dict(loop.model, loop.optimizer)
    state = {"model": model, "optimizer": optimizer}
    if not with_states:
        started = time.perf_counter()
    dcp.load(state, checkpoint_id=folder / "dcp", no_dist=True)
    loaded = time.perf_counter()
    set_state_dict(loop.model, loop.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    seconds = (time.perf_counter() if with_states else loaded) - started
    _check_resumed(loop)
    return seconds


def _prepare(folder: Path, library: Literal["reshard", "dcp"], n_layers: int) -> None:
    """The files of one library are in the page cache, and the memory of a state without the model was just accessed."""
    other = "dcp" if library == "reshard" else "reshard"
    fresh.drop(_files(folder / other))
    fresh.prepare(_files(folder / library), n_layers * LAYER_BYTES * len(_SLOTS) // (1 + len(_SLOTS)))


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _values(name: str, parameter: torch.Tensor) -> np.ndarray:
    generator = np.random.Generator(np.random.SFC64(zlib.crc32(name.encode())))
    return generator.random(tuple(parameter.shape), np.float32)


def _check_resumed(loop: _Loop) -> None:
    """Compare the state with the values that were saved, bit for bit and one tensor after the other."""
    for name, parameter in loop.model.named_parameters():
        slots = loop.optimizer.state[parameter]
        assert set(slots) == {"step", *_SLOTS}
        assert float(slots["step"]) == 1.0
        found = {name: parameter.detach()} | {f"{slot}.{name}": slots[slot] for slot in _SLOTS}
        for key, tensor in found.items():
            assert tensor.dtype == torch.float32
            assert np.array_equal(tensor.numpy().view(np.uint32), _values(key, parameter).view(np.uint32)), key
