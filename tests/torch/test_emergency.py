"""Signals: all ranks save at one step and leave, wherever it reaches them."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
from tests.helpers.ranks import Job
from tests.helpers.training import Run, whole_run

import reshard
from reshard.errors import GroupError
from reshard.torch.emergency import EXIT_CODE, Rendezvous, Signals, notice_store_of

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.ranks.group import TorchGroup


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_ranks", "options", "signals"),
    [
        (1, "--save-every 100", [(0, signal.SIGTERM)]),
        (2, "--save-every 100 --fsdp", [(1, signal.SIGUSR1)]),
        (2, "--save-every 1 --async-save", [(0, signal.SIGTERM)]),
        (
            2,
            "--save-every 2",
            [(0, signal.SIGTERM), (1, signal.SIGTERM), (0, signal.SIGTERM), (1, signal.SIGUSR1)],
        ),
        (3, "--save-every 1 --async-save", [(2, signal.SIGTERM), (0, signal.SIGTERM), (1, signal.SIGTERM)]),
    ],
    ids=["alone", "one rank", "in an async save", "again and again", "all ranks"],
)
def test_signal_saves_and_ends(tmp_path: Path, n_ranks: int, options: str, signals: list[tuple[int, int]]) -> None:
    with Run(tmp_path / "torn", n_ranks, options, steps=10_000) as run:
        run.until(3)
        for rank, number in signals:
            run.signal(rank, number)
        # Launchers do not leave it at one either.
        assert run.codes(pester=signals if len(signals) > 3 else ()) == [EXIT_CODE] * n_ranks
    root = tmp_path / "torn" / "run"
    last = max(run.lines)
    assert reshard.open(root).iteration == last
    assert reshard.verify(root).ok
    assert not list((root / ".staging").glob("*"))
    again = whole_run(tmp_path / "torn", n_ranks, options, steps=last + 2)
    assert list(again.lines) == [last + 1, last + 2]
    expected = whole_run(tmp_path / "whole", n_ranks, "--fsdp" if "--fsdp" in options else "", steps=last + 2)
    assert run.lines | again.lines == expected.lines


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("steps", [(5, 5, 5), (5, 6, 9), (9, 5, 5), (30, 1, 2)])
def test_ranks_meet_wherever_they_are(steps: tuple[int, ...]) -> None:
    """Rank 0 asks at the end of its step; no rank waits for another before its own step is that far."""

    def work(group: TorchGroup) -> Any:
        board = notice_store_of(group)
        assert board is not None
        meeting = Rendezvous(group, board, "run")
        if group.rank == 0:
            meeting.post(steps[0], "a test", leave=False, seconds=60)
        group.barrier(timeout=60)  # so that all see it at once; how far they are is told by `steps`
        at = steps[group.rank]
        while (notice := meeting.poll(at, 60)) is None:
            at += 1
        return [at, notice.why, meeting.poll(at, 60)]

    with Job(3, work) as job:
        first, *others = job.values()
    # Where all do as they should it is the step after that of rank 0; who is beyond it makes all meet after him.
    assert first == [max(steps) + 1 if len(set(steps)) > 1 and max(steps) > steps[0] else steps[0] + 1, "a test", None]
    assert others == [first] * 2


def test_rank_that_does_not_come_costs_the_notice() -> None:
    def work(group: TorchGroup) -> Any:
        board = notice_store_of(group)
        assert board is not None
        meeting = Rendezvous(group, board, "run")
        if group.rank == 0:
            meeting.post(1, "a test", leave=False, seconds=60)
            with pytest.raises(GroupError, match="rank 1 of 2"):
                meeting.poll(2, 0.2)
        return (
            [None if notice is None else notice.step for notice in [meeting.poll(3, 0.2)]] if group.rank == 0 else None
        )

    with Job(2, work) as job:
        assert job.values() == [[None], None]


def test_first_signal_counts_and_forked_children_die() -> None:
    signals = Signals([signal.SIGTERM, signal.SIGUSR1])
    try:
        assert signals.seen is None
        pid = os.fork()
        if pid == 0:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
        assert signals.seen is None
        for number in (signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert str(signals.seen) == "SIGUSR1"
        assert signals.number == signal.SIGUSR1
    finally:
        signals.close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
