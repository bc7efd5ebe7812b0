"""The calls that a training waits for: saves of small states, the stall of a background save, resuming, first use.

    python benches/latency.py [--dir DIR] [--rounds 5] [--sizes-mb 1 10 100 1000] [--only save resume start] [--quick]

The state consists of 5 `Linear` in float32 and the state of AdamW, in one process. `reshard.torch.Checkpointer`,
`reshard.save` and `torch.distributed.checkpoint` (DCP) are interleaved. Imports are outside the clock, except for
`start`. DCP syncs its files, as it does by default, except for "no sync". It verifies nothing when it loads.
"""

# ruff: noqa: PLC0415  imports are a part of what is measured

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

RESUMES = ("Checkpointer.resume", "DCP load", "DCP get, load, set")
_LAYERS = 5


def _trainer(n_bytes: float, *, with_state: bool) -> tuple[Any, Any]:
    import torch
    from torch import nn

    width = max(8, int((n_bytes / 12 / _LAYERS) ** 0.5))
    torch.manual_seed(0 if with_state else 1)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(_LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters())
    if with_state:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _touch(n_bytes: int) -> None:
    """Touch memory and free it: a virtual machine gives memory that was free for some seconds back to its host."""
    import numpy as np

    np.ones(n_bytes, np.uint8)


def _clock(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def save(folder: str, n_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of saves by name, the first of each kind first."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    from reshard import save as save_arrays
    from reshard.torch import Checkpointer

    model, optimizer = _trainer(n_bytes, with_state=True)
    arrays = {name: one.detach() for name, one in model.named_parameters()}
    slots = {
        f"{slot}.{name}": value
        for name, one in model.named_parameters()
        for slot, value in optimizer.state[one].items()
    }
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optim": of_optimizer}
    checkpointer = Checkpointer(f"{folder}/checkpointer", signals=(), keep=None)
    checkpointer.resume(model=model, optimizer=optimizer)

    def by_checkpointer(step: int, *, blocking: bool) -> None:
        checkpointer.step(step)
        checkpointer.save(blocking=blocking)

    def stalled(step: int) -> float:
        seconds = _clock(lambda: by_checkpointer(2 * step, blocking=False))
        checkpointer.wait()
        return seconds

    def writer(name: str, *, sync: bool = True) -> Any:
        return dcp.FileSystemWriter(f"{folder}/{name}", sync_files=sync)

    def stalled_by_dcp(step: int) -> float:
        found: list[Any] = []
        seconds = _clock(lambda: found.append(dcp.async_save(state, storage_writer=writer(f"async-{step}"))))
        found[0].result()
        return seconds

    source, target = torch.ones(n_bytes, dtype=torch.uint8), torch.zeros(n_bytes, dtype=torch.uint8)
    calls: dict[str, Callable[[int], float]] = {
        "Checkpointer": lambda step: _clock(lambda: by_checkpointer(2 * step - 1, blocking=True)),
        "reshard.save": lambda step: _clock(lambda: save_arrays(f"{folder}/save", step, arrays, slots)),
        "DCP": lambda step: _clock(lambda: dcp.save(state, storage_writer=writer(f"dcp-{step}"))),
        "DCP, no sync": lambda step: _clock(lambda: dcp.save(state, storage_writer=writer(f"no-{step}", sync=False))),
        "Checkpointer, stall": stalled,
        "DCP, stall": stalled_by_dcp,
        "memcpy, warm": lambda _: _clock(lambda: target.copy_(source)),
    }
    found: dict[str, list[float]] = {name: [] for name in calls}
    for step in range(1, rounds + 2):
        for name, call in calls.items():
            os.sync()
            _touch(2 * n_bytes)
            found[name].append(call(step))
        for pattern in ("dcp-*", "no-*", "async-*", "save/iteration_*", "checkpointer/iteration_*"):
            for one in sorted(Path(folder).glob(pattern))[: None if "/" not in pattern else -1]:
                shutil.rmtree(one)
    checkpointer.close()
    return found


def write(folder: str, n_bytes: int, rounds: int) -> dict[str, list[float]]:  # noqa: ARG001
    """Write what `resume` reads."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    from reshard.torch import Checkpointer

    model, optimizer = _trainer(n_bytes, with_state=True)
    with Checkpointer(f"{folder}/checkpointer", signals=()) as checkpointer:
        checkpointer.resume(model=model, optimizer=optimizer)
        checkpointer.save(1, blocking=True)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optim": of_optimizer}, checkpoint_id=f"{folder}/dcp")
    return {}


def resume(folder: str, n_bytes: int, kind: int) -> dict[str, list[float]]:
    """Seconds of resuming a new trainer, whose optimizer has no state yet."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    from reshard.torch import Checkpointer

    model, optimizer = _trainer(n_bytes, with_state=False)
    before = [one.detach().flatten()[:64].clone() for one in model.parameters()]
    _touch(2 * n_bytes)
    if kind == 0:
        resumed = Checkpointer(f"{folder}/checkpointer", signals=())
        found = {RESUMES[0]: [_clock(lambda: resumed.resume(model=model, optimizer=optimizer))]}
        resumed.close()
    else:
        started = time.perf_counter()
        of_model, of_optimizer = get_state_dict(model, optimizer)
        state = {"model": of_model, "optim": of_optimizer}
        loading = _clock(lambda: dcp.load(state, checkpoint_id=f"{folder}/dcp"))
        set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
        found = {RESUMES[1]: [loading], RESUMES[2]: [time.perf_counter() - started]}
    after = [one.detach().flatten()[:64] for one in model.parameters()]
    assert not any(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert all(float(one["step"]) == 1 for one in optimizer.state.values())
    return found


def start(folder: str, n_bytes: int, rounds: int) -> dict[str, list[float]]:  # noqa: ARG001
    """The first use of the package in a process; numpy is imported before."""
    started = time.perf_counter()
    import numpy as np

    after_numpy = time.perf_counter()
    import reshard

    found = reshard.open(f"{folder}/small").load()
    ended = time.perf_counter()
    assert isinstance(found["0.w"], np.ndarray)
    return {"numpy": [after_numpy - started], "reshard, open, load": [ended - after_numpy]}


def _run(function: str, folder: Path, n_bytes: float, number: int) -> dict[str, list[float]]:
    """Run one of the functions above in a new process."""
    folder.mkdir(exist_ok=True)
    words = [sys.executable, __file__, "--one", function, str(folder), str(int(n_bytes)), str(number)]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _line(name: str, seconds: list[float]) -> str:
    return f"  {name:22} best {1e3 * min(seconds):8.1f} ms, median {1e3 * statistics.median(seconds):8.1f} ms"


def measure(folder: Path, sizes_mb: list[float], rounds: int, only: list[str]) -> None:
    """Measure and print.

    Args:
        folder: where to write.
        sizes_mb: sizes of the state.
        rounds: runs of each case.
        only: what is measured.
    """
    for size in sizes_mb if "save" in only else ():
        found = _run("save", folder / "saves", size * 1e6, rounds)
        shutil.rmtree(folder / "saves")
        print(f"saves of {size:g} MB, {rounds} rounds after the first")
        for name, seconds in found.items():
            print(f"{_line(name, seconds[1:])}, first {1e3 * seconds[0]:.1f} ms", flush=True)
    for size in sizes_mb if "resume" in only else ():
        _run("write", folder / "kept", size * 1e6, 0)
        loads: dict[str, list[float]] = {name: [] for name in RESUMES}
        for _ in range(rounds):
            for kind in (0, 1):
                for name, seconds in _run("resume", folder / "kept", size * 1e6, kind).items():
                    loads[name] += seconds
        shutil.rmtree(folder / "kept")
        print(f"resuming {size:g} MB, a new process each, the files in the page cache")
        for name in RESUMES:
            print(_line(name, loads[name]), flush=True)
    if "start" in only:
        import numpy as np

        import reshard

        reshard.save(folder / "small", 1, {f"{n}.w": np.zeros((100, 100), np.float32) for n in range(20)})
        starts: dict[str, list[float]] = {"numpy": [], "reshard, open, load": [], "reshard --help": []}
        words = [sys.executable, "-c", "import sys; sys.argv[1:] = ['--help']; from reshard.cli import main; main()"]
        for _ in range(rounds):
            for name, seconds in _run("start", folder, 0, 0).items():
                starts[name] += seconds
            starts["reshard --help"].append(_clock(lambda: subprocess.run(words, capture_output=True, check=True)))
        print("first use in a process")
        for name, seconds in starts.items():
            print(_line(name, seconds), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="where to write, 6 x the largest size")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes-mb", type=float, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--only", nargs="+", choices=["save", "resume", "start"], default=["save", "resume", "start"])
    parser.add_argument("--quick", action="store_true", help="1 MB and 1 round: only tests the script")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        warnings.simplefilter("ignore")
        function, folder, n_bytes, number = args.one
        print(json.dumps(globals()[function](folder, int(n_bytes), int(number))))
        return
    sizes, rounds = ([1.0], 1) if args.quick else (args.sizes_mb, args.rounds)
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        measure(Path(folder), sizes, rounds, args.only)
    print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
