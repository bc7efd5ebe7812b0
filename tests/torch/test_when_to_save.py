"""When a trainer saves: by steps, by the clock and at the end of the block; and what follows from saves that fail."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.helpers.ranks import Job
from tests.helpers.small_training import Trainer
from tests.torch.runs import make, resumed
from torch import nn

import reshard
from reshard.errors import ArgumentError, ReshardError, StorageError
from reshard.formats.checkpoint2.save import Checkpoint2Begun
from reshard.torch import Checkpointer, LossHealth
from reshard.torch.run import interval
from reshard.verbs.save import SaveRequest, save_with

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.options import SaveOptions
    from reshard.ranks.group import TorchGroup

# -- when to save


def test_saves_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with resumed(tmp_path, save_every="30min", async_save=False, keep=None) as (trainer, made, _):
        for step in range(1, 8):
            now += 700
            trainer.run(made, step, step)
    assert sorted(path.name for path in tmp_path.glob("iteration_*")) == ["iteration_00000003", "iteration_00000006"]


@pytest.mark.slow(disk=False)
def test_ranks_save_by_the_clock_of_rank_0(tmp_path: Path) -> None:
    def work(group: TorchGroup) -> list[int]:
        trainer = Trainer()
        seconds = "0.05s" if group.rank == 0 else "100h"
        with make(tmp_path, save_every=seconds, keep=None, async_save=False) as made:
            made.resume(model=trainer.model)
            step = 0
            while step < 3 or not list(tmp_path.glob("iteration_*")) or step < 3:
                step += 1
                group.barrier(timeout=30)
                made.step(step)
                if step > 10_000:
                    break
                # All leave at the same step.
                if group.broadcast(bool(list(tmp_path.glob("iteration_*"))), timeout=30):
                    break
            return [step]

    with Job(2, work) as job:
        first, second = job.values()
    assert first == second
    assert first[0] < 10_000


def test_a_spike_is_a_loss_above_a_factor_of_more_than_one() -> None:
    health = LossHealth(spike=1.5, window=2)
    assert [health(step, loss, {}) for step, loss in enumerate([2.0, 2.0, 2.9, 3.9])] == [True, True, True, False]
    for wrong in ({"spike": 1.0}, {"window": 0}):
        with pytest.raises(ArgumentError, match="expected spike above 1 and window of at least 1"):
            LossHealth(**wrong)


def test_without_an_interval_only_save_saves(tmp_path: Path) -> None:
    with resumed(tmp_path) as (trainer, made, _):
        trainer.run(made, 1, 4)
        assert not list(tmp_path.glob("iteration_*"))
        assert made.wait() is None
        assert made.save(blocking=True).iteration == 4
        trainer.run(made, 5, 5)
        assert made.save().result(60).iteration == 5
        assert made.wait().iteration == 5


@pytest.mark.parametrize("text", ["", "30", "min", "1.2.3s", "0s", "1min 1h", "-5s"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="is not a duration"):
        interval(text)


def test_steps_count_up(tmp_path: Path) -> None:
    made = make(tmp_path)
    with pytest.raises(ArgumentError, match="`resume` has not been called"):
        made.step(1)
    trainer = Trainer()
    made.resume(**trainer.parts())
    with pytest.raises(ArgumentError, match="called before"):
        made.resume(**trainer.parts())
    made.step(1)
    made.step(5)
    assert trainer.sampler.total == 5 * 4
    with pytest.raises(
        ArgumentError, match=r"`step` is 5, expected more than 5, the last completed step.*\n.*`initial_step \+ 1`"
    ):
        made.step(5)


def test_a_save_that_was_due_at_an_omitted_step_is_made_at_the_next_one(tmp_path: Path) -> None:
    with make(tmp_path, save_every=10, keep=None, async_save=False) as made:
        made.resume(model=nn.Linear(1, 1))
        for step in (5, 9, 15, 19, 20, 25, 55):
            made.step(step)
    assert reshard.open(tmp_path).iteration == 55
    assert sorted(path.name[-2:] for path in tmp_path.glob("iteration_*")) == ["15", "20", "55"]


def test_a_root_that_a_shell_expands_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match="begins with `~`"):
        Checkpointer("~/run", save_every=1, signals=()).resume(model=nn.Linear(1, 1))
    assert not list(tmp_path.iterdir())


def test_nothing_is_saved_after_close(tmp_path: Path) -> None:
    with resumed(tmp_path, save_every=1) as (trainer, made, _):
        made.step(1)
    for call in (lambda: made.step(2), made.save, lambda: make_closed(tmp_path).resume(**trainer.parts())):
        with pytest.raises(ArgumentError, match=r"the Checkpointer of `.*` is closed"):
            call()
    assert made.wait().iteration == reshard.open(tmp_path).iteration == trainer.sampler.total // 4 == 1


def make_closed(root: Path) -> Checkpointer:
    made = make(root)
    made.close()
    return made


def test_every_option_of_a_save_is_handed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {
        "files": reshard.Files(prefix="net", dedup=False, strict_format=True),
        "retention": reshard.Retention(keep=3, keep_every=4, best=("loss", 2)),
        "verify": reshard.Verify(after_save=True),
        "commit": reshard.Commit(durable=True, private=True),
        "threads": 2,
        "timeout": 77.0,
    }
    seen: list[dict[str, Any]] = []

    def save(request: SaveRequest, options: SaveOptions, *_: Any) -> bool:
        seen.append(vars(request) | vars(options))
        return True

    monkeypatch.setattr("reshard.torch.saving.save_with", save)
    made = make(tmp_path, async_save=False, **asked)
    made.resume(model=nn.Linear(1, 1))
    made.step(1, loss=0.5, metrics={"norm": 2})
    made.save()
    assert {name: seen[0][name] for name in asked} == asked
    assert seen[0]["metrics"] == {"norm": 2.0, "loss": 0.5}
    assert seen[0]["blocking"]


def test_full_verification_finds_damage_in_what_is_not_loaded(tmp_path: Path) -> None:
    with resumed(tmp_path, save_every=1) as (trainer, made, _):
        trainer.run(made, 1, 2)
    path = next((tmp_path / "iteration_00000002").glob("opt-*"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    for verify, step in (("touched", 2), ("full", 1)):
        with make(tmp_path, verify=verify) as made:
            assert made.resume(model=Trainer().model, strict=False).initial_step == step


# -- saves that fail


@pytest.mark.parametrize("options", [{"async_save": False}, {}])
def test_failed_saves_are_told_and_the_third_raises(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real: Any = save_with
    failing = {2, 3, 5, 6, 7}

    def save(request: SaveRequest, *others: Any) -> Any:
        if request.iteration in failing:
            raise StorageError("no room", errno=28)
        return real(request, *others)

    monkeypatch.setattr("reshard.torch.saving.save_with", save)
    with make(tmp_path, save_every=1, **options) as made:
        trainer = Trainer()
        made.resume(**trainer.parts())
        with caplog.at_level(logging.ERROR, "reshard"):
            trainer.run(made, 1, 6)
        assert [line for line in caplog.messages if "is not saved" in line] == [
            f"iteration {step} is not saved: no room (failure {n} of 3 in a row; the training goes on, and failure 3 "
            "ends it)"
            for step, n in ((2, 1), (3, 2), (5, 1), (6, 2))
        ]
        with pytest.raises(StorageError, match="no room"):
            trainer.run(made, 7, 7)
        with pytest.raises(StorageError, match="no room"):
            made.save(7)
    assert reshard.open(tmp_path).iteration == 4


def test_failures_in_the_background_and_before_it_are_counted_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Any = save_with

    def fail() -> None:
        raise StorageError("no room", errno=28)

    def save(request: SaveRequest, *others: Any) -> Any:
        if request.iteration > 3:
            fail()
        return real(replace(request, ready=fail) if request.iteration == 3 else request, *others)

    monkeypatch.setattr("reshard.torch.saving.save_with", save)
    trainer = Trainer()
    made = make(tmp_path, save_every=1)
    made.resume(**trainer.parts())
    trainer.run(made, 1, 4)  # the second failure is that of the save of step 4
    with pytest.raises(StorageError, match="no room"):
        trainer.run(made, 5, 5)
    made.close()


def test_a_save_that_fails_was_due_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks need not have failed, and may do together what follows a save."""

    def save(*_: Any, **__: Any) -> None:
        raise StorageError("no room", errno=28)

    monkeypatch.setattr("reshard.torch.saving.save_with", save)
    with make(tmp_path, save_every=2, async_save=False) as made:
        made.resume(**Trainer().parts())
        assert made._step(1, None, None, save=False) == (False, None)
        assert made._step(2, None, None, save=False) == (True, None)


@pytest.mark.parametrize("most", [1, 2, 5])
def test_the_number_of_failures_that_ends_the_training_is_an_option(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def save(*_: Any, **__: Any) -> None:
        raise StorageError("no room", errno=28)

    monkeypatch.setattr("reshard.torch.saving.save_with", save)
    with make(tmp_path, save_every=1, async_save=False, interrupts={"max_failures": most}) as made:
        trainer = Trainer()
        made.resume(**trainer.parts())
        with caplog.at_level(logging.ERROR, "reshard"), pytest.raises(StorageError, match="no room"):
            trainer.run(made, 1, 9)
    assert len([line for line in caplog.messages if f" of {most} in a row" in line]) == most - 1
    with pytest.raises(ArgumentError, match=r"`max_failures` is .*, expected a whole number from 1 on"):
        make(tmp_path, interrupts={"max_failures": 0})


def test_failure_in_the_background_is_never_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "root"
    with resumed(root, save_every=1) as (trainer, made, _):
        trainer.run(made, 1, 1)
        made.wait()
        root.rename(tmp_path / "away")
        root.write_text("no folder")
        with pytest.raises(ReshardError):
            trainer.run(made, 2, 9)
        root.unlink()
        (tmp_path / "away").rename(root)
    assert any("the training goes on" in line for line in caplog.messages)


def test_what_cannot_be_saved_at_all_raises_at_once(tmp_path: Path) -> None:
    with resumed(tmp_path, save_every=1) as (trainer, made, _):
        trainer.counter.n = object()
        with pytest.raises(ArgumentError, match="counter"):
            made.step(1)


# -- the end of the block


@pytest.mark.slow(disk=False)
def test_exception_saves_the_last_complete_step(tmp_path: Path) -> None:
    class StopError(Exception):
        pass

    def stop(step: int, *, incomplete: bool = False, **options: Any) -> None:
        with resumed(tmp_path, **options) as (trainer, made, decision):
            trainer.run(made, decision.initial_step + 1, step)
            if incomplete:
                trainer.step()  # the parameters are those of the next step, which is not complete
            raise StopError

    with pytest.raises(StopError):
        stop(3, interrupts={"save_on_exception": True})
    with resumed(tmp_path, interrupts={"save_on_exception": True}) as (trainer, made, decision):
        assert decision.initial_step == 3
        assert any("after an exception in the step after 3" in line for line in decision.warnings)
        trainer.run(made, 4, 4)
    with pytest.raises(StopError):
        stop(4, interrupts={"save_on_exception": True}, incomplete=True)
    with pytest.raises(StopError):
        stop(4)
    assert reshard.open(tmp_path).iteration == 3


@pytest.mark.parametrize(("stops_at", "waits"), [(2, False), (2, True), (3, False)])
def test_exception_after_a_failed_save_in_the_background_saves_the_last_complete_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stops_at: int, *, waits: bool
) -> None:
    real = Checkpoint2Begun.publish
    failures = [StorageError("no room")]

    def publish(save: Checkpoint2Begun, *args: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return real(save, *args, **options)

    monkeypatch.setattr(Checkpoint2Begun, "publish", publish)

    def stop() -> None:
        with resumed(tmp_path, save_every=2, interrupts={"save_on_exception": True}) as (trainer, made, _):
            trainer.run(made, 1, stops_at)
            if waits:
                made.wait()
            raise KeyError

    with pytest.raises(StorageError if waits else KeyError):
        stop()
    assert reshard.open(tmp_path).iteration == stops_at
    assert waits or "the save in the background failed: no room" in caplog.messages


@pytest.mark.slow(disk=False)
def test_exception_on_one_rank_saves_nothing(tmp_path: Path) -> None:
    def work(group: TorchGroup) -> str:
        trainer = Trainer()
        ok = "no error"
        try:
            with make(tmp_path, interrupts={"save_on_exception": True, "grace_s": 0.5}) as made:
                made.resume(model=trainer.model, optimizer=trainer.optimizer)
                made.step(1)
                group.barrier(timeout=30)
                if group.rank == 1:
                    raise KeyError("a")  # noqa: TRY301
        except KeyError:
            ok = "its own error"
        return ok

    with Job(2, work) as job:
        assert job.values() == ["no error", "its own error"]
    assert not list(tmp_path.glob("iteration_*"))


def test_exception_on_all_ranks_saves(tmp_path: Path) -> None:
    def work(group: TorchGroup) -> str:
        trainer = Trainer()
        try:
            with make(tmp_path, interrupts={"save_on_exception": True}) as made:
                made.resume(model=trainer.model, optimizer=trainer.optimizer)
                made.step(1)
                raise KeyError(group.rank)  # noqa: TRY301
        except KeyError as error:
            return str(error)

    with Job(2, work) as job:
        assert job.values() == ["0", "1"]
    assert reshard.open(tmp_path).iteration == 1
