"""Start the examples as processes, kill them and compare the logs that they write."""

from __future__ import annotations

import ctypes
import importlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.helpers.ports import unused_port

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 14
PATIENCE_S = 240
ROOT = Path(__file__).parents[2]
_started: list[Rank] = []


class Rank:
    """A process of an example, forked off one that has imported it: the imports take longer than the runs.

    Forked processes have one order of sets. With `own_order`, it is an interpreter of its own, as launchers start them.
    """

    def __init__(
        self, example: str, words: list[str], variables: dict[str, str], out: Path, *, own_order: bool = False
    ) -> None:
        main = importlib.import_module(f"reshard.examples.{example}").main
        self.pid = os.fork()
        self.code: int | None = None
        if self.pid:
            _started.append(self)
            return
        end_with_parent()
        os.environ |= variables
        with out.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        if own_order:
            os.environ["PYTHONHASHSEED"] = str(1 + int(variables.get("RANK", 0)))
            os.execv(sys.executable, [sys.executable, "-m", f"reshard.examples.{example}", *words])
        sys.argv = [example, *words]
        main()
        raise SystemExit(0)  # through all that called this, to the end of the interpreter

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None: it runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self) -> int:
        """The exit code once it has ended."""
        deadline = time.monotonic() + PATIENCE_S
        while (code := self.poll()) is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return code

    def send(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def end_with_parent() -> None:
    """Let the system kill this process when the one that started it ends, however it does."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it has ended before
        os._exit(1)


def ranks_of(example: str, words: list[str], n_ranks: int, out: Path, *, own_order: bool = False) -> list[Rank]:
    """The ranks of an example, with the variables that torchrun sets."""
    port = unused_port()
    ranks = []
    for rank in range(n_ranks):
        variables = {}
        if n_ranks > 1:
            variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n_ranks)}
            variables |= {"GROUP_RANK": "0", "LOCAL_WORLD_SIZE": str(n_ranks), "TORCHELASTIC_RUN_ID": "none"}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks.append(Rank(example, words, variables, out.with_name(f"{out.name}.{rank}.txt"), own_order=own_order))
    return ranks


def killed_at(step: int, begin: Callable[[], list[Rank]], root: Path) -> None:
    """Begin a run and kill it at a step, before its end: again, if it was quicker than this process."""
    for _ in range(10):
        ranks = begin()
        until(root, step, ranks)
        kill(ranks)
        if max(steps(lines(root))) < STEPS:
            return
        shutil.rmtree(root)
        (root.parent / f"{root.name}.log").unlink()
    raise AssertionError("it always ends before it is killed")


def start(name: str, root: Path, n_ranks: int, batch: int, *, own_order: bool = False) -> list[Rank]:
    words = [str(root), f"--steps={STEPS}", f"--batch={batch}"]
    return ranks_of(name, words, n_ranks, root, own_order=own_order)


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


def finish(ranks: list[Rank], root: Path) -> list[int]:
    codes = [one.wait() for one in ranks]
    if any(code not in (0, 75) for code in codes):
        raise AssertionError([path.read_text()[-3000:] for path in root.parent.glob(f"{root.name}.*.txt")])
    return codes


def until(root: Path, step: int, ranks: list[Rank]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    tracker = root / "latest_checkpointed_iteration.txt"  # a save is published: the run is resumed
    while max(steps(lines(root)), default=0) < step or not tracker.exists():
        assert time.monotonic() < deadline
        if any(one.poll() not in (None, 0) for one in ranks):
            finish(ranks, root)
        time.sleep(0.01)


def kill(ranks: list[Rank]) -> None:
    for one in ranks:
        one.send(signal.SIGKILL)
    for one in ranks:
        one.wait()


def in_fresh_process(check: str, *arguments: object) -> None:
    """Run a function of this file where nothing but an example is imported, so that it can be forked."""
    command = [sys.executable, "-m", "tests.helpers.examples", check, *map(str, arguments)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    patience = 4 * PATIENCE_S
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=patience)
    assert done.returncode == 0, done.stderr[-5000:]


def check_example(name: str, tmp_path: Path, n_ranks: int, then: int) -> None:
    """Kill an example at a random step and resume it on `then` ranks: with the same number, nothing differs.

    The last run has other orders of sets than those before it, and another one on each rank.
    """
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    batch = 4 // n_ranks
    finish(start(name, whole, n_ranks, batch), whole)
    expected = steps(lines(whole))
    assert max(expected) == STEPS
    killed_at(random.Random().randint(4, 9), lambda: start(name, torn, n_ranks, batch), torn)
    ends = [0, len(lines(torn))]  # of the log, after each run
    if n_ranks == then == 1:  # a signal, too: it saves and exits
        ranks = start(name, torn, then, batch)
        while len(lines(torn)) == ends[-1]:
            time.sleep(0.001)
        ranks[0].send(signal.SIGTERM)
        assert finish(ranks, torn) in ([75], [0])
        ends.append(len(lines(torn)))
    finish(start(name, torn, then, 4 // then, own_order=True), torn)
    found = lines(torn)
    runs = [found[start:end] for start, end in zip(ends, [*ends[1:], None], strict=True)]
    after = steps(*runs[1:])
    assert min(after) > 1  # it was resumed
    if then == n_ranks:
        # Saved in time, but perhaps killed before its line was written; or the signal came after the last step.
        resumed_at = min(steps(runs[-1]), default=STEPS + 1) - 1
        assert {resumed_at: expected[resumed_at], **steps(*runs)} == expected
    else:
        made = [line.split(maxsplit=2)[2:] for found in after.values() for line in found]
        assert made == [line.split(maxsplit=2)[2:] for step in after for line in expected[step]]  # the same samples


def check_lightning(folder: Path, n_ranks: int, words: list[str]) -> None:
    """Kill the example of Lightning within an epoch and resume it: it logs what the whole run has logged."""
    log, words = folder / "torn.log", [*words, str(folder / "torn"), "--log", str(folder / "torn.log")]
    whole = (folder / "whole.log").read_text().splitlines()

    def kill_after(n_lines: int) -> int:
        """How many lines it has logged by then."""
        killed = ranks_of("train_lightning", words, n_ranks, folder / "torn")
        deadline = time.monotonic() + PATIENCE_S
        while not log.exists() or len(log.read_text().splitlines()) < n_lines:
            if any(one.poll() not in (None, 0) for one in killed):
                finish(killed, folder / "torn")
            assert time.monotonic() < deadline
            time.sleep(0.005)
        kill(killed)
        return len(log.read_text().splitlines())

    while (n_before := kill_after(80 * n_ranks)) >= len(whole):  # it was quicker than this process
        shutil.rmtree(folder / "torn")
        log.unlink()
    finish(ranks_of("train_lightning", words, n_ranks, folder / "torn", own_order=True), folder / "torn")
    found = log.read_text().splitlines()
    assert int(found[n_before].split()[0]) > 40  # it has not started over
    assert set(found) == set(whole)


if __name__ == "__main__":
    end_with_parent()
    own = os.getpid()
    try:
        if sys.argv[1] == "lightning":
            check_lightning(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
        else:
            check_example(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    finally:
        if os.getpid() == own:  # a rank ends here, too
            kill(_started)
