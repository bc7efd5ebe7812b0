"""Start the examples as processes, kill them and compare the logs that they write."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 14
PATIENCE_S = 240


def start(name: str, root: Path, n_ranks: int, batch: int) -> list[subprocess.Popen[bytes]]:
    """The ranks of an example, as torchrun would start them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", f"reshard.examples.{name}", str(root), f"--steps={STEPS}", f"--batch={batch}"]
    ranks = []
    for rank in range(n_ranks):
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        if n_ranks > 1:
            env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n_ranks)}
            env |= {"LOCAL_WORLD_SIZE": str(n_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with (root.parent / f"{root.name}.{rank}.txt").open("ab") as out:
            ranks.append(subprocess.Popen(command, env=env, stdout=out, stderr=out))
    return ranks


def lines(root: Path) -> list[str]:
    log = root.parent / f"{root.name}.log"
    return log.read_text().splitlines() if log.exists() else []


def steps(*runs: list[str]) -> dict[int, list[str]]:
    """The lines of each step. A run repeats steps of the run before it: the lines of the last run count."""
    by_step: dict[int, list[str]] = {}
    for found in runs:
        of_run: dict[int, list[str]] = {}
        for line in found:
            of_run.setdefault(int(line.split()[0]), []).append(line)
        by_step |= of_run
    return by_step


def finish(ranks: list[subprocess.Popen[bytes]], root: Path) -> list[int]:
    codes = [one.wait(PATIENCE_S) for one in ranks]
    if any(code not in (0, 75) for code in codes):
        raise AssertionError([path.read_text()[-3000:] for path in root.parent.glob(f"{root.name}.*.txt")])
    return codes


def until(root: Path, step: int, ranks: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    tracker = root / "latest_checkpointed_iteration.txt"  # a save is published: the run is resumed
    while max(steps(lines(root)), default=0) < step or not tracker.exists():
        assert time.monotonic() < deadline
        if any(one.poll() not in (None, 0) for one in ranks):
            finish(ranks, root)
        time.sleep(0.01)


def check_example(name: str, tmp_path: Path, n_ranks: int, then: int) -> None:
    """Kill an example at a random step and resume it on `then` ranks: with the same number, nothing differs."""
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    batch = 4 // n_ranks
    finish(start(name, whole, n_ranks, batch), whole)
    expected = steps(lines(whole))
    assert max(expected) == STEPS
    ranks = start(name, torn, n_ranks, batch)
    until(torn, random.Random().randint(4, 9), ranks)
    for one in ranks:
        one.kill()
    for one in ranks:
        one.wait()
    ends = [0, len(lines(torn))]  # of the log, after each run
    if n_ranks == then == 1:  # a signal, too: it saves and exits
        ranks = start(name, torn, then, batch)
        while len(lines(torn)) == ends[-1]:
            time.sleep(0.001)
        ranks[0].send_signal(signal.SIGTERM)
        assert finish(ranks, torn) in ([75], [0])
        ends.append(len(lines(torn)))
    finish(start(name, torn, then, 4 // then), torn)
    found = lines(torn)
    runs = [found[start:end] for start, end in zip(ends, [*ends[1:], None], strict=True)]
    after = steps(*runs[1:])
    assert min(after) > 1  # it was resumed
    if then == n_ranks:
        resumed_at = min(steps(runs[-1])) - 1  # saved in time, but perhaps killed before its line was written
        assert {resumed_at: expected[resumed_at], **steps(*runs)} == expected
    else:
        made = [line.split(maxsplit=2)[2:] for found in after.values() for line in found]
        assert made == [line.split(maxsplit=2)[2:] for step in after for line in expected[step]]  # the same samples
