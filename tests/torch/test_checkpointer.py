"""The three lines of a trainer: what they save, and what comes back."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.helpers.cases import slow
from tests.helpers.loops import batches_and_draws
from tests.helpers.ranks import Job
from tests.helpers.small_training import Counter, Trainer
from tests.torch.runs import make, resumed
from torch import nn
from torch.utils.data import DataLoader

import reshard
from reshard.errors import ArgumentError, DamagedFileError, MismatchError
from reshard.resume import EpochStep
from reshard.storage.location import locate
from reshard.torch import Checkpointer, ElasticSampler, LossHealth

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from reshard.ranks.group import TorchGroup


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


@pytest.mark.slow(disk=False)
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("kind", ["plain", "batches", "generator", "stateful"])
@pytest.mark.parametrize("workers", [0, *slow([2])])
def test_a_resumed_loop_over_a_loader_draws_the_same_numbers(tmp_path: Path, workers: int, kind: str) -> None:
    """Resumed within an epoch, at its end, and twice within the same epoch."""
    whole = Loop(tmp_path / "whole", workers=workers, kind=kind).run(12)
    loop = Loop(tmp_path / "parts", workers=workers, kind=kind)
    assert [one for last in (1, 3, 5, 6, 10, 12) for one in loop.run(last)] == whole


@pytest.mark.slow
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
        warned = [one.message for one in caplog.records if one.levelname == "WARNING"]
        (line,) = (line for line in warned if "is skipped" in line)
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
