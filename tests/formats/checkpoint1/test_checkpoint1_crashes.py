"""A Checkpoint 1.0 save that ends before any single change that it makes to the file system, on all ranks or on one.

Whatever was left, a restart by the original's rules finds the save before or the new one, of one iteration on all ranks
and whole; and the next save works. Ranks are threads here, and one whose end has come changes nothing any more and
says nothing any more. Processes that are killed by signals are in `test_checkpoint1_ranks`.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.helpers import original_reader1 as original
from tests.helpers.oracle import local_arrays
from tests.helpers.original_reader import read_shard_file
from tests.helpers.small_saves import KilledError, stopped_at
from tests.helpers.threads import ThreadGroup

import reshard
from reshard import _core
from reshard.commit import claims, protocol
from reshard.commit.session import forget_all, session_of, sessions
from reshard.errors import GroupError, ReshardError
from reshard.formats.checkpoint1 import save as checkpoint1
from reshard.storage.location import locate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

N_RANKS = 2
LAYOUT = {"mesh": {"tp": 2}, "rules": [{"match": "w", "cut": ["tp"]}, {"match": "*"}]}


def tensors(iteration: int) -> dict[str, np.ndarray]:
    return {"w": np.arange(8.0) + iteration, "n": np.full(3, iteration, np.int32)}


def save(root: Path, iteration: int, group: Any, *, keep: int = 1) -> Any:
    return reshard.save(
        root,
        iteration,
        local_arrays(LAYOUT, tensors(iteration), group.rank),
        layout=LAYOUT,
        group=group,
        format={"name": "checkpoint1", "sink_size": 2, "save_network_params": True},
        keep=keep,
        commit={"durable": True},
        timeout=20,
        extra={"at": iteration, "own": reshard.per_rank(np.arange(group.rank + 1))},
    )


class Ending:
    """Ends all ranks, or the one that comes there, before the change with a number."""

    def __init__(self, number: int, barrier: threading.Barrier, *, ends_all: bool) -> None:
        self.left, self.barrier, self.ends_all = number, barrier, ends_all
        self.ended: set[int] = set()
        self.lock = threading.Lock()

    def is_over(self) -> bool:
        return bool(self.ended) if self.ends_all else threading.get_ident() in self.ended

    def tick(self) -> None:
        with self.lock:
            if not self.is_over():
                self.left -= 1
                if self.left >= 0:
                    return
                if not self.ended:
                    self.ended.add(threading.get_ident())
                    self.barrier.abort()
                elif not self.ends_all:
                    return  # another one has ended
        raise KilledError


class MortalGroup(ThreadGroup):
    """Whose ranks learn at once that one is gone."""

    def __init__(self, rank: int, slots: list[str], ending: Ending) -> None:
        super().__init__(rank, N_RANKS, slots, ending.barrier)
        self.ending = ending

    def gather(self, *args: Any, **options: Any) -> Any:
        with self._mortal():
            return super().gather(*args, **options)

    def broadcast(self, *args: Any, **options: Any) -> Any:
        with self._mortal():
            return super().broadcast(*args, **options)

    @contextlib.contextmanager
    def _mortal(self) -> Iterator[None]:
        if self.ending.is_over():
            raise KilledError
        try:
            yield
        except threading.BrokenBarrierError:
            raise KilledError if self.ending.is_over() else GroupError("a rank did not answer") from None


def run(act: Callable[[Any], Any], number: int = 10**9, *, ends_all: bool = True) -> list[Any]:
    """What each rank returns or raises, ended before the change with a number; then the processes are no more."""
    ending = Ending(number, threading.Barrier(N_RANKS), ends_all=ends_all)
    slots, results = [""] * N_RANKS, list[Any]([None] * N_RANKS)

    def of_rank(rank: int) -> None:
        try:
            results[rank] = act(MortalGroup(rank, slots, ending))
        except (KilledError, ReshardError) as error:
            results[rank] = error

    real = _core.write_arrays

    def write_arrays(*args: Any, **options: Any) -> Any:
        ending.tick()
        return real(*args, **{**options, "durable": False})

    with stopped_at(0, ending.tick, lasting=True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(_core, "write_arrays", write_arrays)
        threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(N_RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for one in sessions():
        claims._drop(one)
    forget_all()
    return results


def found(root: Path) -> int:
    """The iteration that a restart goes on from: on all ranks the same, and everything in it as it was saved."""
    files = original.resume(root)
    steps = {int(read_shard_file(path)["step_num"]) for path in files.values()}
    assert len(steps) == 1, "files of two saves"
    (iteration,) = steps
    for rank, arrays in enumerate(original.read(files, {"n": [[0, 1]], "w": [[0], [1]]})):
        for key, array in local_arrays(LAYOUT, tensors(iteration), rank).items():
            assert (arrays[key] == array).all(), (rank, key)
    assert found_by_us(root) in (iteration, iteration + 10), "no older one, and a newer one only if it is whole"
    return iteration


def found_by_us(root: Path) -> int:
    with reshard.open(root) as opened:
        assert opened.iteration is not None
        for key, array in tensors(opened.iteration).items():
            assert (opened.read(key) == array).all()
        extra = opened.extra(1)
        assert extra["at"] == opened.iteration
        assert extra["own"].tolist() == [0, 1]
        return opened.iteration


def debris(output: Path) -> list[str]:
    return [str(path) for path in output.rglob("*.tmp")]


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Path]:
    """An output with two saves, whose writers are gone; in memory, as nobody takes the power away here."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        output = Path(folder) / "base"
        run(lambda group: [save(output / "checkpoint", n, group, keep=2) for n in (10, 20)])
        assert found(output / "checkpoint") == 20
        yield output
        protocol.release()


def signature(output: Path) -> frozenset[str]:
    """What lies where, less random names: what crashes leave alike need not be looked at twice."""
    metas = {path.read_text() + str(path) for path in output.rglob("meta.json")}
    names = (str(path.relative_to(output)) for path in output.rglob("*"))
    return frozenset({re.sub("[0-9a-f]{16}", "*", name) for name in names} | metas)


@pytest.mark.slow
@pytest.mark.parametrize("ends_all", [True, False], ids=["all", "one"])
def test_ended_in_a_save(ends_all: bool, base: Path) -> None:  # noqa: FBT001
    seen: set[frozenset[str]] = set()
    answers: list[int] = []
    for number in range(1000):
        output = base.with_name(f"output{number}")
        shutil.copytree(base, output, symlinks=True)
        root = output / "checkpoint"
        # the process that made the saves before goes on: they are removed
        session_of(locate(root)).of(checkpoint1._Runs).numbers["CKP"] = 0
        results = run(lambda group: save(root, 30, group), number, ends_all=ends_all)  # noqa: B023
        is_ended = any(isinstance(one, KilledError) for one in results)
        if signature(output) not in seen:
            seen.add(signature(output))
            answers.append(found(root))
            assert answers[-1] in ((20, 30) if is_ended else (30,))
            if not is_ended or any(not isinstance(one, BaseException) for one in results):
                assert answers[-1] == 30, "who was told that it is saved was told the truth"
            following = 40 if len(seen) % 2 else 30  # a later one, or the same again
            run(lambda group: save(root, following, group))  # noqa: B023
            assert found(root) == following
            assert not debris(output)
        shutil.rmtree(output)
        if not is_ended:
            break
    assert answers[-1] == 30
    assert len(seen) > 10


@pytest.mark.slow
def test_ended_in_the_first_save(base: Path) -> None:
    for number in range(1000):
        output = base.with_name(f"first{number}")
        root = output / "checkpoint"
        results = run(lambda group: save(root, 10, group), number)  # noqa: B023
        if not isinstance(results[0], KilledError):
            break
        with contextlib.suppress(ValueError, RuntimeError, FileNotFoundError):
            assert found(root) == 10
        following = 20 if number % 2 else 10
        run(lambda group: save(root, following, group))  # noqa: B023
        assert found(root) == following
        assert not debris(output)
        shutil.rmtree(output)
    assert number > 20


@pytest.mark.slow(disk=False)
def test_a_disk_that_fails_leaves_the_save_before(base: Path) -> None:
    """An error of the system, where a process goes on: all ranks are told, and nothing of the attempt stays."""
    before = None
    for number in range(1000):
        output = base.with_name(f"failed{number}")
        shutil.copytree(base, output, symlinks=True)
        root = output / "checkpoint"
        calls = iter(range(1000))

        def fail() -> None:
            if next(calls) == number:  # noqa: B023
                raise OSError(5, "Input/output error")

        with stopped_at(0, fail, lasting=True):
            results = run_plain(lambda group: save(root, 30, group))  # noqa: B023
        before = before or names(base)
        assert len({isinstance(one, ReshardError) for one in results}) == 1, results
        has_failed = isinstance(results[0], ReshardError)
        at_last = has_failed and "all files are written" in str(results[0])  # so it may be what is found
        assert found(root) in ({20, 30} if at_last else {20} if has_failed else {30})
        if has_failed and not at_last:
            assert names(output) == before
        assert not debris(output)
        shutil.rmtree(output)
        if next(calls) <= number:
            break
    assert number > 20


def names(output: Path) -> set[str]:
    return {str(path.relative_to(output)) for path in output.rglob("*") if ".writers" not in str(path)}


def run_plain(act: Callable[[Any], Any]) -> list[Any]:
    from tests.helpers.threads import in_threads

    try:
        return in_threads(N_RANKS, act)
    finally:
        protocol.release()
        forget_all()
