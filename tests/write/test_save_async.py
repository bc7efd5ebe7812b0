"""Saves in the background: what was given is what is saved, one at a time, no error lost, forks do no harm."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load
from tests.helpers.gate import Gate
from tests.helpers.oracle import local_arrays
from tests.helpers.ranks import Job

import reshard
from reshard.commit import protocol
from reshard.errors import ArgumentError, StorageError
from reshard.write import background

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

N = 40_000


@pytest.fixture(autouse=True)
def _leave_nothing_pending() -> Iterator[None]:
    yield
    background.finish_previous(30)
    protocol.release()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def saved(root: Path, key: str = "w") -> np.ndarray:
    with reshard.open(root) as opened:
        return opened.read(key)


def save(root: Path, iteration: int, array: np.ndarray) -> reshard.PendingSave[reshard.SaveReport]:
    return reshard.save(root, iteration, {"w": array}, blocking=False, commit={"durable": False})


def test_what_is_changed_afterwards_is_not_saved(tmp_path: Path, gate: Gate) -> None:
    array, transposed = np.arange(N), np.arange(N).reshape(200, 200)
    state = np.arange(3)
    pending = reshard.save(
        tmp_path, 1, {"w": array, "t": transposed.T}, extra={"rng": state}, blocking=False, commit={"durable": False}
    )
    array[:] = -1
    transposed[:] = -1
    state[:] = -1
    gate.open()
    report = pending.result(30)
    assert np.array_equal(saved(tmp_path), np.arange(N))
    assert np.array_equal(saved(tmp_path, "t"), np.arange(N).reshape(200, 200).T)
    (stored,) = load((tmp_path / "iteration_00000001" / "extra-0000000.arrays").read_bytes()).values()
    assert stored.tolist() == [0, 1, 2]
    assert report.stall_seconds <= report.seconds


def test_a_pending_save(tmp_path: Path, gate: Gate) -> None:
    seen: list[tuple[int, int]] = []
    pending = reshard.save(
        tmp_path,
        7,
        {"w": np.zeros(N)},
        blocking=False,
        commit={"durable": False},
        progress=lambda *now: seen.append(now),
    )
    assert gate.reached.wait(30)
    assert not pending.done()
    with pytest.raises(TimeoutError):
        pending.result(0.01)
    assert pending.progress[0] == pending.progress[1] >= 8 * N
    assert seen[-1] == pending.progress
    assert not (tmp_path / "iteration_00000007").exists()
    assert "iteration 7, pending" in repr(pending)
    gate.open()
    report = pending.result()
    assert pending.done()
    assert "done" in repr(pending)
    assert report is pending.result(0)
    assert report.iteration == 7


def test_the_next_save_waits_for_the_pending_one(tmp_path: Path, gate: Gate) -> None:
    first = save(tmp_path, 1, np.zeros(N))
    order: list[str] = []

    def next_save() -> None:
        save(tmp_path, 2, np.ones(N))
        order.append("second began")

    thread = threading.Thread(target=next_save)
    assert gate.reached.wait(30)
    thread.start()
    thread.join(0.1)
    order.append("first goes on")
    gate.open()
    thread.join(30)
    assert order == ["first goes on", "second began"]
    assert first.done()
    background.finish_previous(30)
    assert np.array_equal(saved(tmp_path), np.ones(N))


def test_memory_of_snapshots_is_used_again(tmp_path: Path) -> None:
    free = []
    for iteration in (1, 2, 3):
        save(tmp_path, iteration, np.zeros(N)).result(30)
        free.append(background.snapshot_pool().free_bytes)
    assert free[0] >= 8 * N
    assert len(set(free)) == 1


def fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def publish(*args: Any) -> None:
        raise StorageError("the disk is gone", path="/disk")

    monkeypatch.setattr(protocol, "publish", publish)


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("check_replicas", [False, True])
def test_arrays_that_are_still_being_filled(tmp_path: Path, blocking: Any, check_replicas: Any) -> None:
    """They are not copied, and not looked at before they are ready."""
    array, asked = np.zeros(N), list[str]()

    def ready() -> None:
        asked.append(threading.current_thread().name)
        array[:] = 7

    options: dict[str, Any] = {
        "verify": {"check_replicas": check_replicas},
        "ready": ready,
        "commit": {"durable": False},
    }
    saving: Any = reshard.save(tmp_path, 3, {"w": array, "empty": np.zeros(0)}, blocking=blocking, **options)
    if not blocking:
        saving.result(30)
    assert (saved(tmp_path) == 7).all()
    assert reshard.verify(tmp_path).ok
    here = threading.current_thread().name
    assert set(asked) == {here} if blocking else asked[-1] != here


@pytest.mark.parametrize(
    "array", [np.zeros(3, ">f4"), memoryview(b"abc"), torch.zeros(3, dtype=torch.complex64).conj()], ids=type
)
def test_what_would_be_copied_before_it_is_filled_is_refused(tmp_path: Path, array: Any) -> None:
    with pytest.raises(ArgumentError, match="with `ready` only numpy arrays and tensors of the host"):
        reshard.save(tmp_path, 3, {"a": np.zeros(3), "w": array}, ready=lambda: None, blocking=False)


def test_arrays_that_are_never_filled_cost_the_save(tmp_path: Path) -> None:
    def ready() -> None:
        raise RuntimeError("the device is lost")

    pending = reshard.save(tmp_path, 3, {"w": np.zeros(3)}, ready=ready, blocking=False)
    with pytest.raises(RuntimeError, match="the device is lost"):
        pending.result(30)
    assert not list(tmp_path.glob("iteration_*"))
    assert not list((tmp_path / ".staging").glob("*"))


def test_an_error_surfaces_at_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        fail(patch)
        save(tmp_path, 1, np.zeros(N))._thread.join(30)
    with pytest.raises(StorageError, match="the disk is gone") as error:
        reshard.save(tmp_path, 2, {"w": np.zeros(N)})
    assert "iteration 1 failed in the background" in "".join(error.value.__notes__)
    assert not (tmp_path / "iteration_00000001").exists()
    assert list((tmp_path / ".staging").iterdir()) == []
    reshard.save(tmp_path, 2, {"w": np.zeros(N)})  # told once
    assert (tmp_path / "iteration_00000002").exists()


def test_an_error_that_was_seen_at_result_is_not_told_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        fail(patch)
        pending = save(tmp_path, 1, np.zeros(N))
        with pytest.raises(StorageError):
            pending.result(30)
    with pytest.raises(StorageError):
        pending.result()
    save(tmp_path, 2, np.zeros(N)).result(30)


def test_what_cannot_be_saved_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError):
        reshard.save(tmp_path, 1, {"w": 7}, blocking=False)


def run(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.slow(disk=False)
@pytest.mark.disk  # memory is volatile, and a save says so
def test_the_end_of_the_interpreter_waits(tmp_path: Path) -> None:
    code = """
    import sys, threading, time, numpy as np, reshard
    save = reshard.save
    from reshard.commit import protocol
    main_is_over = threading.Event()
    threading._register_atexit(main_is_over.set)
    real = protocol.seal
    def seal(*args, **options):
        assert main_is_over.wait(30)
        time.sleep(0.2)  # whatever else the end of the interpreter ends too early has ended then
        return real(*args, **options)
    protocol.seal = seal
    reshard.save(sys.argv[1], 3, {"w": np.ones(1 << 20)}, blocking=False)
    """
    done = run(code, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert np.array_equal(saved(tmp_path), np.ones(1 << 20))


def test_the_end_of_the_interpreter_tells_of_an_error(tmp_path: Path) -> None:
    code = """
    import sys, numpy as np, reshard
    from reshard.commit import protocol
    def publish(*args):
        raise reshard.ReshardError("the disk is gone")
    protocol.publish = publish
    reshard.save(sys.argv[1], 3, {"w": np.ones(9)}, blocking=False)
    """
    done = run(code, tmp_path)
    assert "iteration 3 failed in the background: the disk is gone" in done.stderr


@pytest.mark.slow(disk=False)
def test_the_end_of_the_interpreter_does_not_wait_for_what_was_let_go(tmp_path: Path) -> None:
    code = """
    import sys, threading, numpy as np, reshard
    from reshard.commit import protocol
    protocol.seal = lambda *args, **options: threading.Event().wait()
    reshard.save(sys.argv[1], 3, {"w": np.ones(9)}, blocking=False).let_go()
    """
    done = run(code, tmp_path)
    assert done.returncode == 0
    assert "iteration 3 had not ended 0 s after the program: it is not published" in done.stderr


def in_child(work: Callable[[], bytes]) -> bytes:
    """What `work` returns in a forked child."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the threads that the child has not
        pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, work())
        except BaseException as error:  # noqa: BLE001
            os.write(writer, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with os.fdopen(reader, "rb") as file:
        return file.read()


def test_a_fork_in_mid_save(tmp_path: Path, gate: Gate) -> None:
    array = np.arange(N)
    pending = save(tmp_path / "a", 1, array)
    assert gate.reached.wait(30)

    def child() -> bytes:
        refused = 0
        for use in (pending.done, pending.result, lambda: pending.progress):
            try:
                use()
            except ArgumentError as error:
                refused += f"process {os.getppid()}" in str(error)
        assert "of another process" in repr(pending)
        array[:] = 9  # its own memory
        gate.open()  # its own event
        save(tmp_path / "b", 5, array).result(30)
        return b"%d refused" % refused

    assert in_child(child) == b"3 refused"
    assert not pending.done()
    gate.open()
    assert pending.result(30).iteration == 1
    assert np.array_equal(saved(tmp_path / "a"), np.arange(N))
    assert np.array_equal(saved(tmp_path / "b"), np.full(N, 9))


def _sum(numbers: np.ndarray) -> int:
    return int(numbers.sum())


def test_data_workers_that_fork_in_mid_save(tmp_path: Path, gate: Gate) -> None:
    pending = save(tmp_path, 1, np.arange(N))
    assert gate.reached.wait(30)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(_sum, [np.arange(n) for n in (3, 4, 5)]) == [3, 6, 10]
            pool.close()
            pool.join()
    gate.open()
    pending.result(30)
    assert np.array_equal(saved(tmp_path), np.arange(N))


LAYOUT = {"mesh": {"dp": 2, "tp": 2}, "rules": [{"match": "*.w", "cut": ["tp"]}, {"match": "*"}]}
WHOLE = {"a.w": np.arange(64.0).reshape(8, 8), "b.w": np.arange(16, dtype=np.int32), "step": np.array(3)}


@pytest.mark.slow(disk=False)
def test_four_ranks_in_the_background(tmp_path: Path) -> None:
    def work(group: Any) -> list[Any]:
        own = local_arrays(LAYOUT, WHOLE, group.rank)
        pending = []
        for iteration in (1, 2, 3):
            pending.append(reshard.save(tmp_path, iteration, own, layout=LAYOUT, blocking=False, timeout=30, keep=2))
            for array in own.values():
                array[...] += 1
        return [one.result(30).iteration for one in pending]

    with Job(4, work) as job:
        assert job.values() == [[1, 2, 3]] * 4
    assert {entry.name for entry in tmp_path.glob("iteration_*")} == {"iteration_00000002", "iteration_00000003"}
    with reshard.open(tmp_path) as opened:
        assert opened.iteration == 3
        for key, array in opened.load().items():
            assert np.array_equal(array, WHOLE[key] + 2)


def test_an_error_in_the_background_is_told_on_all_ranks(tmp_path: Path) -> None:
    def work(group: Any) -> list[str]:
        if group.rank == 1:
            fail_writing(group)
        told = []
        reshard.save(tmp_path, 1, local_arrays(LAYOUT, WHOLE, group.rank), layout=LAYOUT, blocking=False, timeout=30)
        try:
            reshard.save(tmp_path, 2, local_arrays(LAYOUT, WHOLE, group.rank), layout=LAYOUT, timeout=30)
        except reshard.ReshardError as error:
            told.append(str(error))
        return told

    def fail_writing(group: Any) -> None:
        from reshard.formats.checkpoint2.save import Checkpoint2Prepared

        def write(*args: Any) -> None:
            raise StorageError("the disk is gone")

        Checkpoint2Prepared.write = write  # type: ignore[assignment, method-assign]

    with Job(4, work) as job:
        for told in job.values():
            assert "rank 1: the disk is gone" in told[0]
    assert not list(tmp_path.glob("iteration_*"))


def test_a_failed_save_into_another_root_is_logged_and_does_not_fail_the_next_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    save(first, 1, np.zeros(N)).result(30)
    (first / ".lock").unlink()
    (first / ".lock").mkdir()
    failed = save(first, 2, np.zeros(N))
    save(second, 2, np.ones(N)).result(30)
    assert np.array_equal(saved(second), np.ones(N))
    assert any(f"the save of iteration 2 into {first} failed" in line for line in caplog.messages)
    with pytest.raises(StorageError):
        failed.result(30)
