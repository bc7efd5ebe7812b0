"""Runs of the example on forked ranks: `Run(...)` goes on from what is in a folder, and can be killed at a step.

    with Run(folder, 4, "--tp 2", steps=12) as run:
        run.until(7)
        run.kill()

The log is a pipe to the test: a line is an event that can be waited for.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import time
from typing import TYPE_CHECKING, Any, Self

import torch._dynamo  # what DTensor imports when it is first used: here once, instead of in every rank
from tests.helpers.ranks import Job
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from reshard.examples.train_gpt import GPT, arguments, parallel, train
from reshard.torch import Checkpointer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from reshard.ranks.group import TorchGroup

PATIENCE_S = 240


class Run:
    """One start of the example; `lines` is what its log has said so far, by step."""

    def __init__(self, folder: Path, n_ranks: int, options: str = "", *, steps: int = 12) -> None:
        folder.mkdir(exist_ok=True)
        self.log = folder / f"log.{time.monotonic_ns()}"
        os.mkfifo(self.log)
        self._reader = os.open(self.log, os.O_RDONLY | os.O_NONBLOCK)
        self._rest = b""
        self.lines: dict[int, dict[str, Any]] = {}
        words = ["--out", str(folder / "run"), "--log", str(self.log), "--steps", str(steps), *options.split()]
        args = arguments(words)

        def work(group: TorchGroup) -> int:
            del group
            try:
                train(args)
            except SystemExit as end:
                return int(str(end.code))
            return 0

        self.job = Job(n_ranks, work)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.job.__exit__()
        os.close(self._reader)

    def until(self, step: int) -> None:
        """Wait until a step is logged."""
        while step not in self.lines:
            assert select.select([self._reader], [], [], PATIENCE_S)[0], f"step {step} is not reached: {self.lines}"
            part = os.read(self._reader, 1 << 16)
            if not part:
                assert not self._is_over(), self.job.outcomes()
                time.sleep(0.01)  # nobody has opened it yet
            self._take(part)

    def kill(self) -> None:
        for rank in range(len(self.job.pids)):
            self.job.kill(rank)
        for pid in self.job.pids:
            os.waitpid(pid, 0)
        self._drain()

    def signal(self, rank: int, number: int = signal.SIGTERM) -> None:
        self.job.kill(rank, number)

    def codes(self, pester: Sequence[tuple[int, int]] = ()) -> list[int]:
        """Wait for the end: what the ranks exit with. Until then send these `(rank, signal)` again and again."""
        values = []
        pending = dict(enumerate(self.job._pipes))
        while pending:  # the log must be read, or its writer waits
            ready = select.select([*pending.values(), self._reader], [], [], 0.001 if pester else PATIENCE_S)[0]
            assert ready or pester, "it does not end"
            for rank, number in pester:
                self.signal(rank, number)
            if self._reader in ready:
                self._drain()
            pending = {rank: pipe for rank, pipe in pending.items() if pipe not in ready}
        values = self.job.values()
        self._drain()
        return values

    def losses(self) -> dict[int, str]:
        return {step: line["loss"] for step, line in self.lines.items()}

    def samples(self) -> dict[int, list[int]]:
        return {step: line["samples"] for step, line in self.lines.items()}

    def _is_over(self) -> bool:
        return bool(select.select(self.job._pipes, [], [], 0)[0])

    def _drain(self) -> None:
        while select.select([self._reader], [], [], 0)[0] and (part := os.read(self._reader, 1 << 16)):
            self._take(part)

    def _take(self, part: bytes) -> None:
        *whole, self._rest = (self._rest + part).split(b"\n")
        for text in whole:
            line = json.loads(text)
            self.lines[line["step"]] = line


def whole_run(folder: Path, n_ranks: int, options: str = "", *, steps: int = 12) -> Run:
    """A run from its beginning, or where it stands, to its end."""
    with Run(folder, n_ranks, options, steps=steps) as run:
        assert run.codes() == [0] * n_ranks
        return run


def gathered(folder: Path, n_steps: int, *, dp: int, tp: int, fsdp: bool) -> dict[str, str]:
    """Resume the example's model, make steps and save; all its tensors, whole, as digests by name."""
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(dp)
    model = parallel(GPT(0.0), mesh, fsdp=fsdp)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with Checkpointer(folder, signals=(), ranks={"mesh": mesh}) as made:
        start = made.resume(model=model, optimizer=optimizer).initial_step
        for step in range(start + 1, start + n_steps + 1):
            ids = torch.randint(0, 13, (2, 8), generator=torch.Generator().manual_seed(step))
            model(ids).square().mean().backward()
            optimizer.step()
            made.step(step)
        if n_steps:
            made.save(blocking=True)
    found = {}
    for name, parameter in model.named_parameters():
        for slot, value in {"": parameter, **optimizer.state[parameter]}.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            data = whole.detach().contiguous().numpy().tobytes()
            found[f"{slot}.{name.removeprefix('module.')}"] = hashlib.blake2b(data).hexdigest()
    return found
