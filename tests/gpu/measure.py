"""What saves and loads of a model on a GPU cost: `python -m tests.gpu.measure --gib 4`.

The folder is in memory, so that the numbers are those of the GPU, its bus and the host. Each number is the median of
some rounds after one that does not count. Results are compared bit by bit.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors.torch
import torch
from torch import nn

from reshard.interop import load_file, save_file
from reshard.torch import Checkpointer
from reshard.verbs.save import PendingSave

if TYPE_CHECKING:
    from collections.abc import Callable

_WIDTH = 4096
_ROUNDS = 5


def _model(gib: float) -> nn.Module:
    layer_bytes = 2 * _WIDTH * _WIDTH
    n = max(1, int(gib * (1 << 30) / layer_bytes))
    made = nn.Sequential(
        *(nn.Linear(_WIDTH, _WIDTH, bias=False, dtype=torch.bfloat16, device="cuda") for _ in range(n))
    )
    return made.requires_grad_(False)


def _seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_ROUNDS + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        kept = work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        del kept
    return statistics.median(times[1:])


def _line(name: str, seconds: float, n_bytes: int) -> None:
    print(f"{name:<58} {seconds * 1000:9.1f} ms {n_bytes / seconds / 1e9:8.1f} GB/s", flush=True)


def _bounds(n_bytes: int) -> None:
    host = torch.empty(n_bytes, dtype=torch.uint8).fill_(1)
    pinned = host.pin_memory()
    device = torch.empty(n_bytes, dtype=torch.uint8, device="cuda")
    _line("bound: pinned memory to the GPU", _seconds(lambda: device.copy_(pinned)), n_bytes)
    _line("bound: pageable memory to the GPU", _seconds(lambda: device.copy_(host)), n_bytes)
    _line("bound: the GPU to pinned memory", _seconds(lambda: pinned.copy_(device)), n_bytes)


def _saves(folder: Path, model: nn.Module, n_bytes: int, *, overlap: bool) -> None:
    stalls, saves = [], []
    options = {"keep": 1, "overlap": overlap, "signals": (), "commit": {"durable": False}}
    with Checkpointer(folder, **options) as checkpointer:  # type: ignore[arg-type]
        checkpointer.resume(model=model)
        for step in range(1, _ROUNDS + 3):  # the first two allocate the pinned memory
            torch.cuda.synchronize()
            start = time.perf_counter()
            pending = checkpointer.save(step)
            stalls.append(time.perf_counter() - start)
            assert isinstance(pending, PendingSave)
            pending.result()
            saves.append(time.perf_counter() - start)
    name = "overlap=True" if overlap else "overlap=False"
    _line(f"background save, the host waits ({name})", statistics.median(stalls[2:]), n_bytes)
    _line(f"background save, until it is published ({name})", statistics.median(saves[2:]), n_bytes)


def _resume(folder: Path, model: nn.Module, n_bytes: int) -> None:
    expected = [parameter.clone() for parameter in model.parameters()]

    def work() -> None:
        with Checkpointer(folder, signals=()) as checkpointer:
            checkpointer.resume(model=model)

    for parameter in model.parameters():
        parameter.zero_()
    _line("resume of the model in place, every byte verified", _seconds(work), n_bytes)
    if not all(torch.equal(a, b) for a, b in zip(model.parameters(), expected, strict=True)):
        raise SystemExit("the model that was resumed differs from the one that was saved")


def main() -> None:
    """Measure and print one line for each case."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.measure", description=__doc__)
    parser.add_argument("--gib", type=float, default=4, help="size of the model in GiB (default: 4)")
    args = parser.parse_args()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as path:
        folder = Path(path)
        model = _model(args.gib)
        n_bytes = sum(parameter.nbytes for parameter in model.parameters())
        print(f"{torch.cuda.get_device_name()}, {n_bytes / 1e9:.2f} GB in bfloat16, files in memory")
        _bounds(n_bytes)
        for overlap in (False, True):
            _saves(folder / f"run-{overlap}", model, n_bytes, overlap=overlap)
        _resume(folder / "run-True", model, n_bytes)
        file = folder / "model.safetensors"
        state = model.state_dict()
        save_file(state, file)
        _line("load_file to the GPU", _seconds(lambda: load_file(file, "pt", 0)), n_bytes)
        _line("safetensors.torch.load_file to the GPU", _seconds(lambda: safetensors.torch.load_file(file, 0)), n_bytes)
        if not all(torch.equal(one, state[key]) for key, one in load_file(file, "pt", 0).items()):
            raise SystemExit("the tensors that were loaded differ from those that were saved")


if __name__ == "__main__":
    main()
