"""Ranks that are real processes meet over real stores; some fail, some die, some never come."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch._C._distributed_c10d
import torch.distributed as dist
from tests.helpers.ranks import Job, Signal, may_be_silent, only_missing

from reshard.errors import ArgumentError, DamagedFileError, ReshardError, StorageError
from reshard.ranks import torch_group
from reshard.ranks.group import Group, SingleProcess, TorchGroup, agree, decide, resolve, session
from reshard.ranks.torch_group import TorchSession

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LONG = 40.0  # a deadline that is not meant to pass
SHORT = 2.0  # one that passes
LATE = 20.0  # how long after the deadline the last rank must know, on a loaded machine


def timed(do: Any) -> dict[str, Any]:
    """What became of it: the error as data, and seconds."""
    start = time.monotonic()
    try:
        told: dict[str, Any] = {"value": do()}
    except ReshardError as error:
        told = {"error": type(error).__name__, "text": str(error), "ranks": getattr(error, "ranks", None)}
        told |= {"path": error.path, "errno": getattr(error, "errno", None)}
    return told | {"seconds": time.monotonic() - start}


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("store", ["tcp", "file"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_values_reach_all_ranks(world_size: int, store: str) -> None:
    def work(group: TorchGroup) -> list[Any]:
        everything: list[Any] = [group.rank, group.world_size]
        for place in (group, session(group, "work")):
            place.barrier(timeout=LONG)
            for root in range(world_size):
                everything.append(place.gather({"from": place.rank}, root=root, timeout=LONG))
                everything.append(place.broadcast(["to", place.rank], root=root, timeout=LONG))
        return everything

    def expected(rank: int) -> list[Any]:
        gathered = [{"from": other} for other in range(world_size)]
        place = [entry for root in range(world_size) for entry in (gathered if rank == root else None, ["to", root])]
        return [rank, world_size, *place, *place]

    with Job(world_size, work, store) as job:
        assert job.values() == [expected(rank) for rank in range(world_size)]


VALUES: list[Any] = [
    None,
    -(1 << 70),
    1.5e-300,
    "",
    'a\nb"\\\u2028',
    "half a pair \ud800",
    {"a": [True, None, {"b": []}]},
    "\U0001f600" * 800_000,  # 9.6 MB, 12 letters each: the store closes the connection at messages of 8 MiB
]


def test_values_come_as_they_are() -> None:
    def work(group: TorchGroup) -> bool:
        channel = session(group, "values")
        for value in VALUES:
            gathered = channel.gather([group.rank, value], timeout=LONG)
            assert gathered in (None, [[0, value], [1, value]])
            assert channel.broadcast(value, root=1, timeout=LONG) == value
        return True

    with Job(2, work) as job:
        assert job.values() == [True, True]


def test_agreeing_on_values() -> None:
    def work(group: TorchGroup) -> list[Any]:
        own = session(group, "work")
        return [agree(group, {"r": group.rank}, LONG), agree(own, True, LONG), agree(own, group.rank == 0 or 1, LONG)]

    with Job(3, work) as job:
        for value in job.values():
            assert value == [[{"r": 0}, {"r": 1}, {"r": 2}], [True] * 3, [True, 1, 1]]
            assert [type(entry) for entry in value[2]] == [bool, int, int]


def test_agreeing_that_ranks_failed() -> None:
    faults: dict[str, dict[int, BaseException]] = {
        "one": {1: DamagedFileError("it is torn", path="/x/y", hint="take the older one")},
        "same class": {0: StorageError("disk full", errno=28), 2: StorageError("no such disk", errno=28)},
        "two classes": {0: DamagedFileError("torn"), 2: StorageError("full")},
        "foreign": {2: MemoryError("too much")},
    }

    def work(group: TorchGroup) -> dict[str, Any]:
        return {
            name: timed(lambda fault=fault: agree(group, fault.get(group.rank), LONG)) for name, fault in faults.items()
        } | {"after": agree(group, 7, LONG)}

    with Job(3, work) as job:
        for told in job.values():
            one = told["one"]
            assert (one["error"], one["path"]) == ("DamagedFileError", "/x/y")
            assert one["text"] == "rank 1: it is torn\nhint: take the older one"
            same = told["same class"]
            assert (same["error"], same["errno"]) == ("StorageError", 28)
            assert same["text"] == "rank 0: disk full\nrank 2: no such disk"
            assert (told["two classes"]["error"], told["foreign"]["error"]) == ("ReshardError", "ReshardError")
            assert told["two classes"]["text"] == "rank 0: torn\nrank 2: full"
            assert told["foreign"]["text"] == "rank 2: MemoryError: too much"
            assert all(told[name]["seconds"] < LONG / 2 for name in faults)
            assert told["after"] == [7, 7, 7]


@pytest.mark.slow(disk=False)
def test_a_rank_that_never_comes_is_named_and_meets_the_others_again() -> None:
    over = Signal()

    def work(group: TorchGroup) -> Any:
        told: Any = None
        group.barrier(timeout=LONG)
        if group.rank == 2:
            over.wait()
        else:
            with only_missing(2):
                told = [
                    timed(lambda: agree(group, None, LONG)),
                    timed(lambda: session(group, "save").barrier(timeout=LONG)),
                ]
            if group.rank == 0:
                over.set()
        return [told, agree(group, group.rank, LONG), session(group, "save").broadcast(group.rank, timeout=LONG)]

    with Job(4, work) as job:
        for rank, (told, agreed, sent) in enumerate(job.values()):
            assert (agreed, sent) == ([0, 1, 2, 3], 0)
            for entry in told or []:
                assert (entry["error"], entry["ranks"]) == ("GroupError", [2]), rank
                assert "no answer of rank 2 of 4 within 40 s" in entry["text"]
                assert "gather 1" in entry["text"]
                assert entry["seconds"] < LONG / 2, "the others are told"


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 2])
def test_a_long_wait_says_which_rank_is_missing(late: int) -> None:
    said = Signal()

    def work(group: TorchGroup) -> list[str]:
        handler = logging.Handler()
        lines: list[str] = []
        wait = TorchSession._wait

        def wait_and_say(session: TorchSession, keys: Sequence[str], *rest: Any, **given: Any) -> bool:
            """Only a wait for the late rank, or for one that waits for it, is long."""
            others = [key for key in keys if not key.endswith(f"/{late}")]
            if 0 < len(others) < len(keys):
                assert wait(session, others, *rest), "the others do not answer"
            is_long = not lines and group.rank != late and (bool(keys) or not late)
            torch_group._FIRST_NOTICE_S = 0.2 if is_long else LONG
            return wait(session, keys, *rest, **given)

        def emit(record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            said.set()

        handler.emit = emit  # type: ignore[method-assign]
        logging.getLogger("reshard").addHandler(handler)
        TorchSession._wait = wait_and_say  # type: ignore[method-assign, assignment]
        if group.rank == late:
            said.wait(2 if late else 1)
        session(group, "save").barrier(timeout=LONG)
        return lines

    with Job(3, work) as job:
        lines = job.values()
    assert [len(of_rank) for of_rank in lines] == ([1, 1, 0] if late else [0, 1, 0])
    if late:
        assert re.match(
            r"rank 0 has waited for \d+ s in session `save` \(gather 1\) for rank 2 of 3: every rank has to",
            lines[0][0],
        )
        assert "for rank 0 of 3, or a rank for which that one waits: every rank" in lines[1][0]
    else:
        assert "for rank 0 of 3: every rank has to call the same" in lines[1][0]


@pytest.mark.slow(disk=False)
def test_a_rank_killed_in_the_middle_of_a_message() -> None:
    def work(group: TorchGroup) -> Any:
        channel = session(group, "save")
        channel.barrier(timeout=LONG)
        if group.rank == 1:
            store = group._store

            class Deadly:
                def __getattr__(self, name: str) -> Any:
                    return getattr(store, name)

                def set(self, key: str, value: str) -> None:
                    store.set(key, value)
                    if key.endswith("/2"):
                        os.kill(os.getpid(), signal.SIGKILL)

            group._store = Deadly()  # type: ignore[assignment]
        with only_missing(1):
            return timed(lambda: agree(channel, "x" * 5_000_000, LONG))

    with Job(3, work) as job:
        first, killed, last = job.outcomes()
        assert killed is None
        for said in (first, last):
            assert said is not None
            assert (said["value"]["error"], said["value"]["ranks"]) == ("GroupError", [1])
            assert said["value"]["seconds"] < LONG / 2, "the others are told"


@pytest.mark.slow
def test_rank_0_gone() -> None:
    def work(group: TorchGroup) -> Any:
        group.barrier(timeout=LONG)  # else the others may still connect to it
        if group.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return timed(lambda: agree(group, None, SHORT))

    with Job(3, work) as job:
        for said in job.outcomes()[1:]:
            assert said is not None
            assert (said["value"]["error"], said["value"]["ranks"]) == ("GroupError", [0])
            assert said["value"]["seconds"] < SHORT + LATE


def test_a_failure_in_one_rank_ends_the_session_for_all_at_once() -> None:
    def work(group: TorchGroup) -> Any:
        channel = session(group, "save")
        channel.barrier(timeout=LONG)
        told = timed(lambda: channel.gather({1, 2} if group.rank == 2 else None, timeout=LONG))
        told2 = timed(lambda: channel.barrier(timeout=LONG))
        return [told, told2, agree(group, None, LONG)]

    with Job(3, work) as job:
        first, second, third = job.values()
    assert (third[0]["error"], first[0]["error"]) == ("ArgumentError", "GroupError")
    assert "ranks exchange JSON values" in first[0]["text"]
    assert "value" in second[0]  # it had sent its part and learns of it in the next operation
    assert [told[1]["error"] for told in (first, second, third)] == ["GroupError"] * 3
    assert all(entry["seconds"] < LONG / 2 for told in (first, second, third) for entry in told[:2])


def test_what_was_sent_before_a_rank_failed_is_received() -> None:
    missing = Signal()

    def work(group: TorchGroup) -> Any:
        channel = group.session("save")
        channel.barrier(timeout=LONG)
        if group.rank == 1:
            store = group._store

            class Slow:
                """The first answer that the value is missing arrives when rank 0 has sent it and failed."""

                n_delayed = 0

                def __getattr__(self, name: str) -> Any:
                    return getattr(store, name)

                def check(self, keys: list[str]) -> bool:
                    found: bool = store.check(keys)
                    if not found and not self.n_delayed and keys[0].endswith("/0"):
                        self.n_delayed = 1
                        missing.set()
                        until = time.monotonic() + LONG / 2
                        while not store.check([f"{channel._token}/failed"]) and time.monotonic() < until:
                            time.sleep(0.001)
                    return found

            slow = Slow()
            group._store = slow  # type: ignore[assignment]
            told = timed(lambda: channel.broadcast(None, timeout=LONG))
            group._store = store
            return [told, slow.n_delayed, timed(lambda: channel.barrier(timeout=LONG))]
        missing.wait()
        channel.broadcast("sent", timeout=0.1)
        return [timed(lambda: channel.gather({1, 2}, timeout=LONG))]

    with Job(2, work) as job:
        (failed,), (told, n_delayed, after) = job.values()
    assert failed["error"] == "ArgumentError"
    assert (told["value"], n_delayed) == ("sent", 1)
    assert after["error"] == "GroupError"
    assert "ranks exchange JSON values" in after["text"]


@pytest.mark.slow
def test_a_store_that_is_silent_or_gone() -> None:
    ready, stopped, told, ended, gone = (Signal() for _ in range(5))

    def work(group: TorchGroup) -> Any:
        may_be_silent()
        group.barrier(timeout=LONG)
        ready.set()
        stopped.wait()
        silent = timed(lambda: agree(group, None, SHORT))
        told.set()
        again = agree(group, group.rank, LONG)
        ended.set()
        gone.wait()
        return [silent, again, timed(lambda: agree(group, None, LONG))]

    with Job(2, work) as job:
        ready.wait(2)
        os.kill(job.server, signal.SIGSTOP)
        stopped.set()
        told.wait(2)
        os.kill(job.server, signal.SIGCONT)
        ended.wait(2)
        os.kill(job.server, signal.SIGKILL)
        gone.set()
        for silent, again, lost in job.values():
            assert again == [0, 1]
            assert silent["error"] == "GroupError"
            assert "the rendezvous store did not answer within 2 s" in silent["text"]
            assert silent["seconds"] < SHORT + LATE
            assert lost["error"] == "GroupError"
            assert "connection to the rendezvous store is lost" in lost["text"]
            assert lost["seconds"] < LATE


def told_without_rank_0(before_each: Callable[[], None], seconds: float) -> Callable[[TorchGroup], Any]:
    """The work of two ranks: rank 1 agrees within some seconds, and calls a function before each request of the store.

    Rank 0 takes no part.
    """
    over = Signal()

    def work(group: TorchGroup) -> Any:
        may_be_silent()
        group.barrier(timeout=LONG)
        if group.rank == 0:
            over.wait()
            return None
        store = group._store

        class Watched:
            def __getattr__(self, name: str) -> Any:
                before_each()
                return getattr(store, name)

        group._store = Watched()  # type: ignore[assignment]
        told = timed(lambda: agree(group, None, seconds))
        over.set()
        return told

    return work


@pytest.mark.slow(disk=False)
def test_a_store_that_answers_slowly_is_not_silent() -> None:
    # As on a loaded machine: the last answer comes later than a silent store is waited for.
    with Job(2, told_without_rank_0(lambda: time.sleep(0.9), 0.2)) as job:
        _, told = job.values()
    assert (told["error"], told["ranks"]) == ("GroupError", [0])
    assert "no answer of rank 0 of 2 within 0.2 s" in told["text"]


@pytest.mark.slow(disk=False)
def test_the_store_is_not_silent_while_this_process_is_stopped() -> None:
    asked = Signal()

    def before_each() -> None:
        asked.set()
        for _ in range(10):
            time.sleep(0.05)  # those that begin after the stop take their time

    with Job(2, told_without_rank_0(before_each, 0.5)) as job:
        asked.wait()
        os.kill(job.pids[1], signal.SIGSTOP)
        time.sleep(3)  # beyond the deadline, and beyond the time for which a silent store is waited for
        os.kill(job.pids[1], signal.SIGCONT)
        _, told = job.values()
    assert (told["error"], told["ranks"]) == ("GroupError", [0])
    assert "no answer of rank 0 of 2 within 0.5 s" in told["text"]


def test_sessions_in_two_threads_do_not_hold_each_other_up() -> None:
    def work(group: TorchGroup) -> Any:
        slow, quick = session(group, "slow"), session(group, "quick")
        told: dict[str, Any] = {}
        quick_done = threading.Event()

        def be_slow() -> None:
            if group.rank == 0:
                quick_done.wait()  # all other ranks wait for this one meanwhile
            told["slow"] = agree(slow, ["slow", group.rank], LONG)

        def be_quick() -> None:
            told["quick"] = [agree(quick, ["quick", i], LONG)[0] for i in range(10)]
            quick_done.set()

        threads = [threading.Thread(target=do) for do in (be_slow, be_quick)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return told

    with Job(4, work) as job:
        told = {"slow": [["slow", rank] for rank in range(4)], "quick": [["quick", i] for i in range(10)]}
        assert job.values() == [told] * 4


@pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d.Store, "clone"), reason="this torch has one connection a process"
)
def test_a_wait_of_torch_in_the_store_holds_nobody_up() -> None:
    def work(group: TorchGroup) -> Any:
        store = dist.distributed_c10d._get_default_store()
        waiting = threading.Thread(target=lambda: store.get("never before"), daemon=True)
        waiting.start()
        for _ in range(20):
            agree(group, None, LONG)
        return waiting.is_alive()

    with Job(2, work) as job:
        assert job.values() == [True, True]


@pytest.mark.slow(disk=False)
def test_a_session_that_one_rank_missed_is_not_taken_for_the_next() -> None:
    failed, over = Signal(), Signal()

    def work(group: TorchGroup) -> Any:
        told: Any = None
        group.barrier(timeout=LONG)
        if group.rank == 2:
            over.wait()
        else:
            # Sent to nobody in particular: rank 0 cannot know yet that one is missing, but the next session waits.
            assert session(group, "save").broadcast("first", timeout=LONG) == "first"
            told = timed(lambda: session(group, "save").broadcast("second", timeout=0.2))
            if group.rank == 1:
                failed.set()
            else:
                failed.wait()
                over.set()
        return [told, agree(session(group, "save"), group.rank, LONG)]

    with Job(3, work) as job:
        (first, _), (second, _), _ = told = job.values()
        assert [entry[1] for entry in told] == [[0, 1, 2]] * 3
        assert "not all ranks have come to the session of this label before within 0.2 s" in first["text"]
        assert "no answer of rank 0 of 3 within 0.2 s" in second["text"]


def test_messages_of_sessions_of_one_label_are_not_mixed() -> None:
    def work(group: TorchGroup) -> Any:
        return [session(group, "news").broadcast(i + 100 * group.rank, timeout=LONG) for i in range(30)]

    with Job(2, work) as job:
        assert job.values() == [list(range(30))] * 2


needs_list_keys = pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d.Store, "list_keys"), reason="this torch does not list keys"
)


@pytest.mark.slow(disk=False)
@needs_list_keys
def test_nothing_is_left_in_the_store() -> None:
    def work(group: TorchGroup) -> Any:
        channel = session(group, "save")
        agree(channel, ["x" * 3_000_000, group.rank], LONG)
        channel.broadcast("x" * 3_000_000, root=1, timeout=LONG)
        group.barrier(timeout=LONG)
        end = time.monotonic() + LONG
        # Whoever reads last clears up, and may still be at it.
        while len(keys := group._store.list_keys()) > 2 and time.monotonic() < end:
            os.sched_yield()
        return sorted(keys)

    with Job(3, work) as job:
        assert job.values() == [["barrier", "save"]] * 3


@pytest.mark.slow(disk=False)
@needs_list_keys
def test_a_broadcast_is_fetched_before_its_root_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    linger_s = torch_group._LINGER_S

    def work(group: TorchGroup) -> Any:
        monkeypatch.setattr(torch_group, "_LINGER_S", LONG)  # in which the others fetch it on a loaded machine, too
        for i in range(20):
            assert session(group, "news").broadcast(i, timeout=LONG) == i
            if group.rank == 0:
                assert not [key for key in group._store.list_keys() if "broadcast" in key]
        monkeypatch.setattr(torch_group, "_LINGER_S", linger_s)
        return timed(lambda: session(group, "others").broadcast(1, timeout=LONG)) if group.rank == 0 else None

    with Job(3, work) as job:
        assert job.values()[0]["seconds"] < LATE  # a second for those who never come


def test_a_forked_child_is_no_rank() -> None:
    def work(group: TorchGroup) -> Any:
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.write(writer, timed(lambda: resolve().barrier(timeout=LONG))["text"].encode())
            os._exit(0)
        os.wait()
        return [os.read(reader, 1000).decode(), agree(group, group.rank, LONG)]

    with Job(2, work) as job:
        for text, agreed in job.values():
            assert "this process was forked from a rank and is none itself" in text
            assert agreed == [0, 1]


def test_a_part_of_the_ranks() -> None:
    def work(group: TorchGroup) -> Any:
        part = dist.new_group([1, 3])
        if group.rank in (1, 3):
            own = resolve(part)
            assert resolve(part) is own
            assert resolve() is resolve(dist.group.WORLD) is group
            return [own.rank, own.world_size, agree(own, group.rank, LONG), agree(group, 0, LONG)]
        return [timed(lambda: resolve(part))["text"], agree(group, 0, LONG)]

    with Job(4, work) as job:
        outside = ["this process is not a member of the process group that was given as `group`", [0] * 4]
        assert job.values() == [outside, [0, 2, [1, 3], [0] * 4], outside, [1, 2, [1, 3], [0] * 4]]


def test_a_rank_that_contradicts_the_group() -> None:
    def work(group: TorchGroup) -> Any:
        assert resolve(rank=group.rank) is resolve(group, rank=group.rank) is group
        return timed(lambda: resolve(rank=0))["text"] if group.rank else None

    with Job(2, work) as job:
        text = "`rank` is 0, but this process is rank 1 of 2\nhint: leave `rank=` out: the group knows it"
        assert job.values() == [None, text]
    with pytest.raises(ArgumentError, match="`rank` is 3, but this process is rank 0 of 1"):
        resolve(rank=3)


LAUNCHERS: list[tuple[dict[str, str], str | None]] = [
    ({}, None),
    ({"WORLD_SIZE": "1"}, None),
    ({"WORLD_SIZE": "several"}, None),
    ({"WORLD_SIZE": "4", "RANK": "1"}, "one of 4 processes (WORLD_SIZE)"),
    ({"SLURM_NTASKS": "8"}, None),  # inside an allocation, but not started by srun
    ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, "one of 8 processes (SLURM_NTASKS)"),
    ({"OMPI_COMM_WORLD_SIZE": "2"}, "one of 2 processes (OMPI_COMM_WORLD_SIZE)"),
    ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "one of 2 processes (PMI_SIZE)"),
]


@pytest.mark.parametrize(("environment", "message"), LAUNCHERS)
def test_what_the_launcher_says(
    environment: dict[str, str], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "SLURM_NTASKS", "SLURM_PROCID", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert resolve(SingleProcess()).world_size == 1
    if message is None:
        assert isinstance(resolve(), SingleProcess)
        return
    with pytest.raises(ArgumentError) as caught:
        resolve()
    assert message in str(caught.value)
    assert "SingleProcess()" in str(caught.value.hint)


def test_torch_is_looked_at_and_not_imported() -> None:
    code = "import sys; from reshard.ranks import group; print(group.resolve().world_size, 'torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "1 False\n"


@pytest.mark.parametrize("group", [3, "world", object(), dist])
def test_what_is_no_group(group: object) -> None:
    with pytest.raises(ArgumentError, match="`group` is of type"):
        resolve(group)


def test_one_process() -> None:
    group = session(SingleProcess(), "save")
    group.barrier(timeout=0)
    assert (group.gather(1, timeout=0), group.broadcast(2, timeout=0), agree(group, 3, 0)) == ([1], 2, [3])
    error = DamagedFileError("torn")
    with pytest.raises(DamagedFileError) as caught:
        agree(group, error, 0)
    assert caught.value is error


@pytest.mark.parametrize("label", ["", "x" * 201])
def test_labels_are_bounded(label: str) -> None:
    with pytest.raises(ArgumentError, match="from 1 to 200 characters"):
        session(SingleProcess(), label)


class OwnGroup:
    """A group as a user would write one, here between threads: it knows no sessions."""

    def __init__(self, rank: int, barrier: threading.Barrier, values: list[Any]) -> None:
        self.rank, self.world_size, self._barrier, self._values = rank, barrier.parties, barrier, values

    def barrier(self, *, timeout: float) -> None:
        self._barrier.wait(timeout)

    def gather(self, value: Any, *, root: int = 0, timeout: float) -> list[Any] | None:
        self._values[self.rank] = value
        self.barrier(timeout=timeout)
        got = list(self._values) if self.rank == root else None
        self.barrier(timeout=timeout)
        return got

    def broadcast(self, value: Any, *, root: int = 0, timeout: float) -> Any:
        self._values[self.rank] = value
        self.barrier(timeout=timeout)
        got = self._values[root]
        self.barrier(timeout=timeout)
        return got


def in_threads(n: int, work: Any, kind: type[OwnGroup] = OwnGroup) -> list[Any]:
    barrier, values, told = threading.Barrier(n), [None] * n, [None] * n

    def be(rank: int) -> None:
        told[rank] = work(resolve(kind(rank, barrier, values), rank=rank))

    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


def test_a_group_of_the_users_own() -> None:
    def work(group: Group) -> Any:
        channel = session(group, "save")
        channel.barrier(timeout=LONG)
        fault = StorageError("full") if group.rank == 1 else None
        return [agree(channel, group.rank, LONG), timed(lambda: agree(channel, fault, LONG))["text"]]

    assert in_threads(3, work) == [[[0, 1, 2], "rank 1: full"]] * 3


def test_the_decision_of_rank_0_has_the_whole_time_after_a_slow_rank() -> None:
    timeouts = []

    class Noting(OwnGroup):
        def barrier(self, *, timeout: float) -> None:
            timeouts.append(timeout)
            super().barrier(timeout=timeout)

    def work(group: Group) -> int:
        decided: int = decide(group, group.rank, sum, LONG)
        return decided

    assert in_threads(3, work, Noting) == [3, 3, 3]
    assert timeouts == [LONG] * (4 * 3)


def test_a_stray_message_in_a_group_of_the_users_own() -> None:
    def work(group: Group) -> Any:
        channel = session(group, f"save {100 if group.rank else 200}")
        return timed(lambda: channel.broadcast(None, timeout=LONG)).get("text")

    first, second = in_threads(2, work)
    assert first is None
    assert "operation 1 of session `save 100` met operation 1 of `save 200`" in second
