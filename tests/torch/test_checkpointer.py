"""The three lines of a trainer: what they save, when, and what comes back."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.helpers.loops import batches_and_draws
from tests.helpers.ranks import Job
from tests.helpers.small_training import Counter, Trainer
from tests.helpers.training import gathered
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import reshard
from reshard.errors import ArgumentError, DamagedFileError, GroupError, MismatchError, ReshardError, StorageError
from reshard.formats.checkpoint2.save import Checkpoint2Begun, Checkpoint2Prepared
from reshard.formats.state import PerRank
from reshard.ranks.group import SingleProcess
from reshard.resume import EpochStep
from reshard.storage.location import locate
from reshard.torch import Checkpointer, ElasticSampler, LossHealth
from reshard.torch.run import interval
from reshard.torch.state import describe
from reshard.verbs.save import SaveRequest, save_with

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from reshard.options import SaveOptions
    from reshard.ranks.group import TorchGroup


def make(root: Path, **options: Any) -> Checkpointer:
    given: dict[str, Any] = {"signals": (), "commit": {"durable": False}, **options}
    return Checkpointer(root, **given)


@contextmanager
def resumed(root: Path, seed: int = 0, *, trainer: Trainer | None = None, **options: Any) -> Iterator[Any]:
    trainer = trainer or Trainer(seed)
    with make(root, **options) as made:
        yield trainer, made, made.resume(**trainer.parts())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run of 12 steps that nothing happens to."""
    with resumed(tmp_path_factory.mktemp("whole")) as (trainer, made, _):
        losses: list[float] = trainer.run(made, 1, 12)
        return losses


@pytest.mark.parametrize("mode", [{"async_save": False}, {"async_save": True}, {"overlap": True}], ids=str)
def test_resumed_run_is_the_same_run(tmp_path: Path, whole: list[float], mode: dict[str, Any]) -> None:
    with resumed(tmp_path, save_every=3, **mode) as (trainer, made, decision):
        assert decision.fresh
        losses = trainer.run(made, 1, 8)
    with resumed(tmp_path, seed=99, save_every=3, **mode) as (trainer, made, decision):
        seed_is_saved = "seed 99 of the sampler is not used: the order of the saved seed 0 continues"
        assert (decision.initial_step, decision.warnings) == (6, (seed_is_saved,))
        assert (trainer.counter.n, trainer.sampler.total, trainer.schedule.last_epoch) == (24, 24, 6)
        assert losses[:6] + trainer.run(made, 7, 12) == whole
    assert [line.iteration for line in reshard.commit.save_log.read(locate(tmp_path))] == [3, 6, 9, 12]


class Loop:
    """A loop over a DataLoader of 20 samples, 5 steps an epoch, that draws from the stream of torch in each step."""

    def __init__(
        self, root: Path, *, workers: int = 0, rank: int = 0, world_size: int = 1, kind: str = "plain"
    ) -> None:
        self.root, self.workers, self.rank, self.world_size, self.kind = root, workers, rank, world_size, kind

    def loader(self, sampler: ElasticSampler) -> Any:
        options: dict[str, Any] = {"batch_size": sampler.local_batch_size, "sampler": sampler}
        if self.kind == "batches":
            options = {"batch_sampler": sampler.batches()}
        if self.kind == "generator":
            options["generator"] = torch.Generator()
        if self.kind == "stateful":
            stateful = pytest.importorskip("torchdata.stateful_dataloader")
            return stateful.StatefulDataLoader(range(20), num_workers=self.workers, **options)
        return DataLoader(range(20), num_workers=self.workers, **options)  # type: ignore[arg-type]

    def run(self, last: int) -> list[Any]:
        torch.manual_seed(5)
        model = nn.Linear(1, 1)
        torch.manual_seed(6 + self.rank)
        sampler = ElasticSampler(20, 0, True, 4, self.rank, self.world_size)
        loader = self.loader(sampler)
        with make(self.root, save_every=1, async_save=False) as made:
            step = made.resume(model=model, sampler=sampler).initial_step
            return batches_and_draws(made, loader, step, last)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("kind", ["plain", "batches", "generator", "stateful"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_loop_over_a_loader_draws_the_same_numbers(tmp_path: Path, workers: int, kind: str) -> None:
    """Resumed within an epoch, at its end, and twice within the same epoch."""
    whole = Loop(tmp_path / "whole", workers=workers, kind=kind).run(12)
    loop = Loop(tmp_path / "parts", workers=workers, kind=kind)
    assert [one for last in (1, 3, 5, 6, 10, 12) for one in loop.run(last)] == whole


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_loop_over_a_loader_draws_the_same_numbers_on_every_rank(tmp_path: Path, workers: int) -> None:
    def run(name: str, last: int) -> list[list[Any]]:
        def work(group: TorchGroup) -> list[Any]:
            return Loop(tmp_path / name, workers=workers, rank=group.rank, world_size=2).run(last)

        with Job(2, work) as job:
            return list(job.values())

    whole = run("whole", 8)
    assert whole[0][0][1] != whole[1][0][1]
    parts = [run("parts", last) for last in (3, 5, 8)]
    assert [parts[0][rank] + parts[1][rank] + parts[2][rank] for rank in range(2)] == whole


@pytest.mark.parametrize("draw", [torch.rand, torch.manual_seed])
def test_only_the_draw_of_the_loader_is_taken_back(tmp_path: Path, draw: Callable[[int], object]) -> None:
    """A program that draws or seeds between `resume` and the loop keeps what it did."""
    Loop(tmp_path).run(3)
    sampler = ElasticSampler(20, 0, True, 4, 0, 1)
    make(tmp_path).resume(model=nn.Linear(1, 1), sampler=sampler)
    draw(1)
    batches = iter(DataLoader(range(20), 4, sampler=sampler))  # type: ignore[arg-type]
    before = torch.get_rng_state()
    next(batches)
    assert torch.equal(torch.get_rng_state(), before)


def test_live_tensors_are_filled_in_place(tmp_path: Path) -> None:
    with resumed(tmp_path, save_every=1) as (trainer, made, _):
        trainer.run(made, 1, 2)
        before = {key: tensor.clone() for key, tensor in trainer.model.state_dict().items()}
    trainer = Trainer(5)
    places = {key: tensor.data_ptr() for key, tensor in trainer.model.state_dict().items()}
    with resumed(tmp_path, trainer=trainer):
        after = trainer.model.state_dict()
        assert {key: tensor.data_ptr() for key, tensor in after.items()} == places
        assert all(torch.equal(after[key], tensor) for key, tensor in before.items())


def test_model_on_meta_gets_its_content(tmp_path: Path) -> None:
    with resumed(tmp_path, save_every=1) as (trainer, made, _):
        trainer.run(made, 1, 1)
    with torch.device("meta"):
        model = Trainer().model
    with make(tmp_path) as made:
        made.resume(model=model, strict=False)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), trainer.model.parameters(), strict=True))


# -- when to save


def test_saves_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with resumed(tmp_path, save_every="30min", async_save=False, keep=None) as (trainer, made, _):
        for step in range(1, 8):
            now += 700
            trainer.run(made, step, step)
    assert sorted(path.name for path in tmp_path.glob("iteration_*")) == ["iteration_00000003", "iteration_00000006"]


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


def test_failed_saves_are_told_and_the_third_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real: Any = save_with
    failing = {2, 3, 5, 6, 7}

    def save(request: SaveRequest, *others: Any) -> Any:
        if request.iteration in failing:
            raise StorageError("no room", errno=28)
        return real(request, *others)

    monkeypatch.setattr("reshard.torch.saving.save_with", save)
    with make(tmp_path, save_every=1, async_save=False) as made:
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


# -- what is recorded, and compared


def test_unhealthy_checkpoints_are_marked_and_passed_over(tmp_path: Path) -> None:
    with resumed(tmp_path, save_every=1, health=LossHealth(spike=3.0, window=2)) as (_, made, _):
        for step, loss in enumerate([2.0, 2.1, 1.9, 50.0, float("nan")], 1):
            made.step(step, loss=torch.tensor([loss]), metrics={"norm": np.float32(0.5)})
    commons = {n: reshard.open(tmp_path / f"iteration_{n:08d}").common for n in range(1, 6)}
    marks = {n: None if common is None else common.ckpt_status for n, common in commons.items()}
    assert marks == {1: 0, 2: 0, 3: 0, 4: 1, 5: 1}
    lines = reshard.commit.save_log.read(locate(tmp_path))
    assert [line.metrics["norm"] for line in lines] == [0.5] * 5
    assert lines[3].metrics["loss"] == 50.0
    with resumed(tmp_path) as (_, _, decision):
        assert decision.initial_step == 5
    with resumed(tmp_path, healthy_only=True) as (_, made, decision):
        assert decision.initial_step == 3
        made.step(4, loss=2.0)
        made.save(blocking=True)
    assert reshard.open(tmp_path).iteration == 4


def test_environment_is_compared(tmp_path: Path) -> None:
    with resumed(tmp_path, save_every=1, environment={"dataset": "v1", "config": {"lr": 1}}) as (trainer, made, _):
        trainer.run(made, 1, 1)
    with resumed(tmp_path, environment={"dataset": "v2", "config": {"lr": 1}}) as (_, _, decision):
        assert decision.warnings == ("results are not bitwise equal: dataset was 'v1', is 'v2'",)
    with pytest.raises(MismatchError, match="dataset was 'v1', is 'v2'"):
        make(tmp_path, environment={"dataset": "v2", "must_match": True}).resume(**Trainer().parts())


def test_check_sees_what_was_restored(tmp_path: Path, whole: list[float]) -> None:
    with resumed(tmp_path, save_every=2) as (trainer, made, _):
        losses = trainer.run(made, 1, 2)
    seen = []

    def check(saved: Any) -> bool:
        seen.append(dict(saved))
        torch.rand(100)  # a forward pass may draw
        return len(seen) == 1

    trainer = Trainer(9)
    with make(tmp_path) as made:
        made.resume(**trainer.parts(), check=check)
        assert seen == [{"step": 2, "loss": losses[-1]}]
        assert losses + trainer.run(made, 3, 12) == whole
    with pytest.raises(MismatchError, match="`check` returned False"):
        make(tmp_path).resume(**trainer.parts(), check=check)


# -- what does not fit


def test_what_is_missing_or_left_over_is_refused_or_told(tmp_path: Path) -> None:
    with resumed(tmp_path, save_every=1) as (trainer, made, _):
        trainer.run(made, 1, 1)
    parts = Trainer(3).parts()
    for change, named in (
        ({"extra": {}}, "extra['counter']"),
        ({"extra": {"counter": Counter(), "other": Counter()}}, "extra['other']"),
        ({"scheduler": None}, "does not have `scheduler`"),
        ({"sampler": None}, "sampler"),
        ({"model": nn.Sequential(*parts["model"], nn.Linear(1, 1)), "optimizer": None}, "4.weight"),
    ):
        with pytest.raises(MismatchError, match=re.escape(named)):
            make(tmp_path).resume(**parts | change)
        decision = make(tmp_path).resume(**parts | change, strict=False)
        assert any(named in line for line in decision.warnings), (named, decision.warnings)
    with pytest.raises(MismatchError, match="has shape"):
        make(tmp_path).resume(**Trainer(width=5).parts())
    half = Trainer()
    half.model.to(torch.bfloat16)
    with pytest.raises(MismatchError, match="F32 in the checkpoint and BF16 in the run"):
        make(tmp_path).resume(model=half.model, strict=False)
    make(tmp_path).resume(model=half.model, strict=False, cast=True)
    wanted = trainer.model.state_dict()["0.weight"].to(torch.bfloat16)
    assert torch.equal(half.model.state_dict()["0.weight"], wanted)


def test_a_loop_that_starts_over_after_resuming_does_not_take_the_root_back(tmp_path: Path) -> None:
    with resumed(tmp_path, save_every=5) as (trainer, made, _):
        trainer.run(made, 1, 5)
    with resumed(tmp_path, save_every=2) as (_, made, decision):
        assert decision.initial_step == 5
        with pytest.raises(ArgumentError, match="iteration 2 is below 5"):
            made.save(2, blocking=True)
    assert reshard.open(tmp_path).iteration == 5


def test_optimizer_without_state_is_resumed_and_a_missing_one_is_missed(tmp_path: Path) -> None:
    model = Trainer().model
    with make(tmp_path) as made:
        made.resume(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        made.step(1)
        made.save()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    decision = make(tmp_path).resume(model=model, optimizer=optimizer)
    assert (decision.initial_step, optimizer.param_groups[0]["lr"]) == (1, 0.1)
    with make(tmp_path / "other") as made:
        made.resume(model=model)
        made.step(1)
        made.save()
    with pytest.raises(MismatchError, match="the checkpoint holds no optimizer state"):
        make(tmp_path / "other").resume(model=model, optimizer=optimizer)
    decision = make(tmp_path / "other").resume(model=model, optimizer=optimizer, strict=False)
    assert "starts with new state" in decision.warnings[0]


def test_objects_without_state_are_refused(tmp_path: Path) -> None:
    for parts, named in (
        ({"extra": {"thing": 7}}, "extra['thing']"),
        ({"sampler": 7}, "sampler"),
        ({"extra": {"own": reshard.per_rank(7)}}, "extra['own']"),
        ({"extra": {"scheduler": Counter()}, "scheduler": Counter()}, "scheduler"),
    ):
        with pytest.raises(ArgumentError, match=re.escape(f"`{named}`")):
            make(tmp_path).resume(model=Trainer().model, **parts)


def test_damage_is_passed_over_and_the_run_goes_on(
    tmp_path: Path, whole: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    with resumed(tmp_path, save_every=2, async_save=False) as (trainer, made, _):
        losses = trainer.run(made, 1, 6)
    file = next((tmp_path / "iteration_00000006").glob("model-*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with resumed(tmp_path, save_every=2, seed=4) as (trainer, made, decision):
        assert decision.initial_step == 4
        assert any("iteration_00000006 is skipped" in line for line in decision.warnings)
        (line,) = (line for line in caplog.messages if "is skipped" in line)
        assert "`out`" not in line  # the trainer gave no arrays
        assert losses[:4] + trainer.run(made, 5, 12) == whole
    for name in tmp_path.glob("iteration_*/manifest.json"):
        name.write_text("{}")
    with pytest.raises(DamagedFileError, match="no checkpoint in"):
        make(tmp_path).resume(**Trainer().parts())
    assert make(tmp_path).resume(**Trainer().parts(), allow_fresh=True).fresh


# -- the data


def test_larger_batch_leaves_steps_and_the_scheduler_where_they_were_and_reads_on(tmp_path: Path) -> None:
    with resumed(tmp_path, save_every=8) as (trainer, made, _):
        trainer.run(made, 1, 8)
        done = trainer.sampler.total
    with resumed(tmp_path, trainer=Trainer(batch=8), save_every=1) as (trainer, made, decision):
        assert (decision.initial_step, decision.global_step, trainer.schedule.last_epoch) == (8, 8, 8)
        assert (trainer.sampler.total, decision.consumed_samples, decision.global_batch_size) == (done, done, 8)
        assert (decision.next_step, decision.scaling) == (EpochStep(1, 5), None)
        assert decision.warnings == ("global_batch_size 4 -> 8: steps continue from 8, not scaled",)
        trainer.run(made, 9, 10)
    with resumed(tmp_path, trainer=Trainer(batch=8)) as (trainer, made, decision):
        assert (decision.initial_step, trainer.sampler.total) == (10, done + 16)
        assert decision.consumed_samples == done + 16


def test_configuration_scales_steps_when_the_batch_changes(tmp_path: Path) -> None:
    with resumed(tmp_path, save_every=8) as (trainer, made, _):
        trainer.run(made, 1, 8)
    trainer, words = Trainer(batch=8), {"load_checkpoint": str(tmp_path), "resume_training": True}
    decision = Checkpointer.from_config(words, signals=()).resume(**trainer.parts())
    assert (decision.initial_step, trainer.sampler.total) == (4, 32)
    assert any("the scheduler goes on where it was" in line for line in decision.warnings)


def test_other_data_needs_a_word(tmp_path: Path) -> None:
    with resumed(tmp_path, save_every=5) as (trainer, made, _):
        trainer.run(made, 1, 5)
    with pytest.raises(MismatchError, match="the dataset has 80 samples, the saved one had 64"):
        make(tmp_path).resume(**Trainer(n=80).parts())
    for words, expected in (
        ({"ignore_data_skip": True}, 0),
        ({"data_skip_steps": 3}, 12),
    ):
        trainer = Trainer(n=80)
        config = {"load_checkpoint": str(tmp_path), "resume_training": True, "trainer": words}
        decision = Checkpointer.from_config(config, signals=()).resume(**trainer.parts())
        assert (decision.initial_step, trainer.sampler.consumed) == (5, expected)
    trainer = Trainer(n=80)
    decision = make(tmp_path).resume(**trainer.parts(), grown=True)
    assert trainer.sampler.consumed == 20
    assert any("epoch 0 ends after the 64" in line for line in decision.warnings)


def test_checkpoint_without_a_sampler_skips_by_steps(tmp_path: Path) -> None:
    model = Trainer().model
    reshard.save(tmp_path, 6, model.state_dict())
    sampler = ElasticSampler(64, 0, True, 4, 0, 1)
    with pytest.raises(MismatchError, match="lacks state of the run beside the tensors: the random streams"):
        make(tmp_path).resume(model=model, sampler=sampler)
    decision = make(tmp_path).resume(model=model, sampler=sampler, strict=False)
    assert (decision.initial_step, sampler.total) == (6, 24)


def test_checkpoint_without_a_sampler_skips_as_many_samples_at_another_batch_size(tmp_path: Path) -> None:
    model = Trainer().model
    reshard.save(tmp_path, 6, model.state_dict(), common={"global_batch_size": 4})
    sampler = ElasticSampler(64, 0, True, 8, 0, 1)
    decision = make(tmp_path).resume(model=model, sampler=sampler, strict=False)
    assert (decision.initial_step, sampler.total, decision.consumed_samples) == (6, 24, 24)


def test_resume_without_a_sampler_says_that_the_data_starts_over(tmp_path: Path) -> None:
    model = Trainer().model
    for _ in range(2):
        with make(tmp_path, save_every=1) as made:
            decision = made.resume(model=model)
            made.step(decision.initial_step + 1)
    assert "data position" not in decision.restored
    assert any("no sampler was given: the data starts from the beginning" in line for line in decision.warnings)


# -- configuration


def test_configuration_in_the_original_words(tmp_path: Path, whole: list[float]) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(
        f"""
output_dir: {tmp_path}/out
load_checkpoint: {tmp_path}/out/checkpoint
resume_training: true
callbacks:
  - type: CheckpointMonitor
    prefix: net
    save_checkpoint_steps: 2
    keep_checkpoint_max: 1
    async_save: true
"""
    )
    with Checkpointer.from_config(path, signals=()) as made:
        trainer = Trainer()
        assert made.resume(**trainer.parts()).fresh
        losses = trainer.run(made, 1, 7)
    root = tmp_path / "out" / "checkpoint"
    assert [one.name for one in root.glob("iteration_*/net-*")] == [
        "net-model-0000000-0000001.safetensors",
        "net-opt-0000000-0000001.safetensors",
    ] or len(list(root.glob("iteration_00000006/net-*"))) == 2
    with Checkpointer.from_config(path, signals=(), save_every=None) as made:
        trainer = Trainer(8)
        assert made.resume(**trainer.parts()).initial_step == 6
        assert losses[:6] + trainer.run(made, 7, 12) == whole
    # Weights alone: everything else begins anew.
    trainer, words = Trainer(8), {"load_checkpoint": str(root), "output_dir": str(tmp_path / "tuned")}
    with Checkpointer.from_config(words, signals=()) as made:
        decision = made.resume(**trainer.parts())
        assert (decision.initial_step, decision.restored, trainer.sampler.total) == (0, ("weights",), 0)
        trainer.run(made, 1, 1)
    with pytest.raises(ArgumentError, match="does not say where to save"):
        Checkpointer.from_config({"load_checkpoint": str(root)}, signals=())


# -- the end of the block


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


# -- several ranks


def test_streams_and_private_state_of_ranks(tmp_path: Path) -> None:
    def work(n_before: int | None, group: TorchGroup) -> Any:
        torch.manual_seed(7 + group.rank)
        model = nn.Linear(2, 2)
        with torch.no_grad():
            model.weight.fill_(1.0)
            model.bias.fill_(1.0)
        own = Counter()
        with make(tmp_path, async_save=False) as made:
            decision = made.resume(model=model, extra={"own": reshard.per_rank(own)}, strict=n_before != 3)
            counted = own.n
            if decision.fresh:
                own.n = 10 + group.rank
                made.step(1)
                made.save()
            return [torch.rand(1).item(), random.random(), counted, list(decision.warnings)]

    with Job(3, lambda group: work(None, group)) as job:
        before = job.values()
    with Job(3, lambda group: work(3, group)) as job:
        same = job.values()
    assert [one[0] for one in same] == [one[0] for one in before]
    assert [one[2] for one in same] == [10, 11, 12]
    with Job(4, lambda group: work(3, group)) as job:
        more = job.values()
    draws = [one[n] for one in (*before, *more) for n in (0, 1)]
    assert len(set(draws)) == len(draws)
    assert all("start from new seeds" in " ".join(one[3]) for one in more)
    assert all("3 ranks saved it, 4 ranks load it" in " ".join(one[3]) for one in more)
    with Job(2, lambda group: work(None, group)) as job:
        assert {one["error"] for one in job.outcomes() if one is not None} == {"MismatchError"}


@pytest.mark.parametrize("is_local", [False, True])
def test_the_state_of_all_ranks_is_read_only_for_objects_of_each_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_local: bool
) -> None:
    def work(group: Any) -> None:
        with make(tmp_path, group=group, async_save=False) as made:
            made.resume(model=nn.Linear(2, 2), extra={"own": reshard.per_rank(Counter())} if is_local else {})
            made.step(1)
            made.save()

    with Job(3, work) as job:
        job.values()
    read: list[int] = []
    extra = reshard.Checkpoint.extra

    def spy(self: Any, rank: int = 0) -> Any:
        read.append(rank)
        return extra(self, rank=rank)

    monkeypatch.setattr(reshard.Checkpoint, "extra", spy)
    with make(tmp_path, async_save=False) as made:
        own = {"own": PerRank(Counter(), reshape=lambda states, *_: states[0])} if is_local else {}
        made.resume(model=nn.Linear(2, 2), extra=own)
    assert set(read) == ({0, 1, 2} if is_local else {0})


@pytest.mark.slow
def test_optimizer_is_cut_anew_bit_for_bit(tmp_path: Path) -> None:
    """What ranks hold after a restart under another mesh is what they held, gathered."""

    def work(n_steps: int, dp: int, tp: int, **options: Any) -> Callable[[TorchGroup], Any]:
        return lambda group: gathered(tmp_path, n_steps, dp=dp, tp=tp, **options)

    with Job(4, work(2, 2, 2, fsdp=True)) as job:
        (expected, *others) = job.values()
    assert others == [expected] * 3
    assert len(expected) > 50
    for n_ranks, dp, tp, fsdp in ((3, 1, 3, False), (2, 2, 1, True), (2, 1, 2, False)):
        with Job(n_ranks, work(0, dp, tp, fsdp=fsdp)) as job:
            assert job.values() == [expected] * n_ranks


def test_tensors_that_no_layout_can_say(tmp_path: Path) -> None:
    """Ranks 0 and 3 alone hold a layer, which is not part of a mesh: boxes are saved, and loaded as boxes."""

    def work(group: TorchGroup) -> Any:
        model = nn.ModuleDict({"all": nn.Linear(2, 2), "cut": nn.Linear(2, 6)})
        fully_shard(model["cut"], mesh=init_device_mesh("cpu", (4,)))
        if group.rank in (0, 3):
            model["some"] = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        with make(tmp_path, async_save=False) as made:
            decision = made.resume(model=model, optimizer=optimizer)
            if decision.fresh:
                with torch.no_grad():
                    for n, parameter in enumerate(model.parameters()):
                        own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                        own.copy_(
                            torch.arange(own.numel()).reshape(own.shape) + n + 100 * group.rank * (own is not parameter)
                        )
                for parameter in model.parameters():
                    parameter.square().sum().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                made.step(1)
                made.save()
            held = [one for p in model.parameters() for one in (p, optimizer.state[p]["exp_avg"])]
            local = [one.to_local() if isinstance(one, DTensor) else one for one in held]
            return [decision.initial_step, describe(model, optimizer).reason, [one.tolist() for one in local]]

    with Job(4, work) as job:
        before = job.values()
    with Job(4, work) as job:
        after = job.values()
    assert [one[0] for one in after] == [1] * 4
    assert all("not part of a mesh" in one[1] for one in after)
    assert [one[2] for one in after] == [one[2] for one in before]
    assert reshard.open(tmp_path)["some.weight"].shape == (2, 3)


class Ring(SingleProcess):
    """A group of a user's own, which has no board."""

    world_size = 2

    def __init__(self, inner: TorchGroup) -> None:
        self.rank, self._inner = inner.rank, inner

    def barrier(self, *, timeout: float) -> None:
        self._inner.barrier(timeout=timeout)

    def gather(self, value: Any, *, root: int = 0, timeout: float) -> Any:
        return self._inner.gather(value, root=root, timeout=timeout)

    def broadcast(self, value: Any, *, root: int = 0, timeout: float) -> Any:
        return self._inner.broadcast(value, root=root, timeout=timeout)


def test_group_of_ones_own_heeds_signals_where_a_save_is_due(tmp_path: Path) -> None:
    def work(group: TorchGroup) -> Any:
        made = Checkpointer(tmp_path, save_every=3, group=Ring(group), commit={"durable": False})
        made.resume(model=Trainer().model)
        step = 0
        try:
            while True:
                step += 1
                if step == 5 and group.rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                made.step(step)
        except SystemExit as end:
            return [step, end.code]

    with Job(2, work) as job:
        assert job.values() == [[6, 75]] * 2
    assert reshard.open(tmp_path).iteration == 6


def test_clock_needs_a_board(tmp_path: Path) -> None:
    def work(group: TorchGroup) -> None:
        with pytest.raises(ArgumentError, match="post"):
            make(tmp_path, save_every="1h", group=Ring(group)).resume(model=Trainer().model)

    with Job(2, work) as job:
        job.values()


def test_lost_rank_costs_a_save_and_not_the_training(tmp_path: Path) -> None:
    def work(group: TorchGroup) -> Any:
        with make(tmp_path, save_every=1, timeout=30, async_save=False) as made:
            made.resume(model=Trainer().model)
            if group.rank == 1:
                return "gone"
            assert made._saver is not None
            made._timeout = made._saver.timeout = 0.5
            made.step(1)
            with pytest.raises(GroupError, match="rank 1 of 2"):
                made.save()
            return "there"

    with Job(2, work) as job:
        assert job.values() == ["there", "gone"]
    assert not list(tmp_path.glob("iteration_*"))


def test_killed_rank_costs_the_pending_save_and_not_the_time_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save waits long for other ranks; a rank that ends in an error of its own does not wait for the save."""

    def work(group: TorchGroup) -> str:
        if group.rank == 1:
            monkeypatch.setattr(Checkpoint2Prepared, "write", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        try:
            with make(tmp_path, save_every=1, timeout=600, interrupts={"grace_s": 0.3}) as made:
                made.resume(model=Trainer().model)
                made.step(1)
                if group.rank == 1:
                    signal.pause()  # until its save kills it
                raise KeyError("the network is gone")  # noqa: TRY301
        except KeyError as error:
            assert made._saver is not None
            assert made._saver.run.pending is not None
            assert made._saver.run.pending.exit_seconds == 0
            return str(error)

    with Job(2, work) as job:
        first, second = job.outcomes()
    assert first == {"value": "'the network is gone'"}
    assert second is None
    assert not list(tmp_path.glob("iteration_*"))


def test_save_that_moves_is_waited_for_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Checkpoint2Prepared.write

    def slowly(*args: Any) -> Any:
        for done in range(10):
            time.sleep(0.2)
            args[-1](done, 10)
        return real(*args)

    def fail() -> None:
        with resumed(tmp_path, save_every=1, interrupts={"grace_s": 1.5}) as (trainer, made, _):
            trainer.run(made, 1, 1)
            raise KeyError

    monkeypatch.setattr(Checkpoint2Prepared, "write", slowly)
    with pytest.raises(KeyError):
        fail()
    assert reshard.open(tmp_path).iteration == 1


def test_extra_arrays_are_proven_like_shards(tmp_path: Path) -> None:
    extra = {"mean": np.arange(6.0), "own": reshard.per_rank(np.ones(3, np.float32))}
    reshard.save(tmp_path, 1, {"w": np.zeros(2)}, extra=extra)
    found = reshard.open(tmp_path).extra()
    assert found["mean"].tolist() == [0, 1, 2, 3, 4, 5]
    manifest = json.loads((tmp_path / "iteration_00000001" / "manifest.json").read_text())
    assert "extra-0000000.arrays" in manifest["shards"]


class _WithState(nn.Linear):
    """A layer with state of its own."""

    seen = 0

    def get_extra_state(self) -> int:
        return self.seen

    def set_extra_state(self, state: int) -> None:
        self.seen = state


def test_a_layer_of_a_run_is_renamed_by_a_conversion(tmp_path: Path) -> None:
    """The run goes on under the new name as under the old one."""

    def parts(name: str) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.ModuleDict({name: _WithState(3, 2), "other": nn.Linear(2, 2)})
        groups: Any = [{"params": model[name].parameters(), "lr": 0.2}, {"params": model["other"].parameters()}]
        optimizer = torch.optim.AdamW(groups, lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        average = torch.optim.swa_utils.AveragedModel(model)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "extra": {"ema": average, "n": {"n": 0}},
        }

    def train(of: dict[str, Any], name: str, n_steps: int) -> None:
        for _ in range(n_steps):
            of["model"]["other"](of["model"][name](torch.ones(1, 3))).sum().backward()
            of["optimizer"].step()
            of["optimizer"].zero_grad()
            of["scheduler"].step()
            of["extra"]["ema"].update_parameters(of["model"])
            of["extra"]["n"]["n"] += 1
            of["model"][name].seen += 1

    whole, old, new = parts("old"), parts("old"), parts("new")
    for of in (whole, old):
        train(of, "old", 2)
        if of is old:
            with make(tmp_path / "source") as made:
                made.resume(**old)
                made.save(1, blocking=True)
    select = {"rename": {"old.": "new.", "extra.ema.module.old.": "extra.ema.module.new."}}
    assert not reshard.convert(tmp_path / "source", tmp_path / "target", to="checkpoint2", select=select).warnings
    with make(tmp_path / "target") as made:
        decision = made.resume(**new)
    assert decision.initial_step == 1
    assert all("no sampler was given" in line for line in decision.warnings)
    train(new, "new", 2)
    train(whole, "old", 2)
    assert (new["extra"]["n"], new["model"]["new"].seen) == ({"n": 4}, 4)
    for one in ("model", "extra"):
        first, second = (of[one]["ema"] if one == "extra" else of[one] for of in (whole, new))
        pairs = zip(first.parameters(), second.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), one
    assert new["optimizer"].param_groups[0]["lr"] == whole["optimizer"].param_groups[0]["lr"]


def test_a_strict_resume_without_the_state_of_the_run_is_refused(tmp_path: Path) -> None:
    """A conversion that fuses tensors leaves the state out, and says so."""

    def parts() -> dict[str, Any]:
        model = nn.ModuleDict({"new": nn.Linear(3, 2)})
        optimizer = torch.optim.AdamW(model.parameters())
        return {"model": model, "optimizer": optimizer, "extra": {"n": {"n": 0}}}

    old: Any = nn.ModuleDict({"old": nn.Linear(3, 2)})
    optimizer = torch.optim.AdamW(old.parameters())
    with make(tmp_path / "source") as made:
        made.resume(model=old, optimizer=optimizer)
        old["old"](torch.ones(1, 3)).sum().backward()
        optimizer.step()
        made.save(1, blocking=True)
    names = {"rules": [{"from": "old.weight", "to": "new.weight"}, {"from": "old.bias", "to": "new.bias"}]}
    (warning,) = reshard.convert(tmp_path / "source", tmp_path / "target", to="checkpoint2", names=names).warnings
    assert "is not written: environment, rng, run, trainer. A strict resume from it is refused" in warning
    lacks = r"`extra\['n'\]`, the options of the optimizer, such as the learning rate, the random streams"
    with pytest.raises(MismatchError, match=f"lacks state of the run beside the tensors: {lacks}"):
        make(tmp_path / "target").resume(**parts())
    new = parts()
    assert make(tmp_path / "target").resume(**new, strict=False).initial_step == 1
    weight, moved = old["old"].weight, new["model"]["new"].weight
    assert torch.equal(moved, weight)
    assert torch.equal(new["optimizer"].state[moved]["exp_avg"], optimizer.state[weight]["exp_avg"])


def test_the_last_healthy_checkpoint_stays_and_a_resume_from_another_warns(tmp_path: Path) -> None:
    root, model = tmp_path / "run", torch.nn.Linear(2, 2)
    with Checkpointer(root, save_every=1, keep=2, signals=()) as checkpointer:
        checkpointer.resume(model=model)
        for step in range(1, 7):
            checkpointer.step(step, loss=1.0 if step < 3 else float("nan"))
    assert sorted(path.name for path in root.glob("iteration_*")) == [f"iteration_0000000{n}" for n in (2, 5, 6)]
    decision = Checkpointer(root, save_every=None, signals=()).resume(model=model)
    assert decision.initial_step == 6
    assert any("iteration_00000006 was saved as unhealthy" in line for line in decision.warnings)
    healthy = Checkpointer(root, save_every=None, signals=(), healthy_only=True).resume(model=model)
    assert healthy.initial_step == 2
