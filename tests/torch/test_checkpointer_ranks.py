"""The three lines of a trainer on several ranks."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.helpers.ranks import Job
from tests.helpers.small_training import Counter, Trainer
from tests.helpers.training import gathered
from tests.torch.runs import make, resumed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import reshard
from reshard.errors import ArgumentError, GroupError, MismatchError
from reshard.formats.checkpoint2.save import Checkpoint2Prepared
from reshard.formats.state import PerRank
from reshard.ranks.group import SingleProcess
from reshard.torch import Checkpointer
from reshard.torch.saving import Saver
from reshard.torch.state import describe

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from reshard.ranks.group import TorchGroup


@pytest.mark.slow
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


@pytest.mark.slow(disk=False)
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


@pytest.mark.slow
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


@pytest.mark.slow(disk=False)
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


@pytest.mark.slow(disk=False)
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


@pytest.mark.slow(disk=False)
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


@pytest.mark.slow(disk=False)
def test_save_that_moves_is_waited_for_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes a part each second of a clock of its own: the grace is a second and a half."""
    real, wait, now = Checkpoint2Prepared.write, Saver.wait, time.monotonic()
    may_write, has_written, n_looks = threading.Semaphore(0), threading.Semaphore(0), 0

    def slowly(*args: Any) -> Any:
        for done in range(10):
            assert may_write.acquire(timeout=60)
            args[-1](done, 10)
            has_written.release()
        return real(*args)

    def look(saver: Saver, timeout: float | None = None) -> Any:
        nonlocal now, n_looks
        if saver.run.pending is None:
            return wait(saver, timeout)
        n_looks += 1
        if n_looks > 10:
            return wait(saver, 60)
        now += 1
        may_write.release()
        assert has_written.acquire(timeout=60)
        return wait(saver, timeout)

    def fail() -> None:
        with resumed(tmp_path, save_every=1, interrupts={"grace_s": 1.5}) as (trainer, made, _):
            trainer.run(made, 1, 1)
            raise KeyError

    monkeypatch.setattr(Checkpoint2Prepared, "write", slowly)
    monkeypatch.setattr(Saver, "wait", look)
    monkeypatch.setattr("reshard.torch.saving.time", SimpleNamespace(monotonic=lambda: now))
    with pytest.raises(KeyError):
        fail()
    assert n_looks >= 10
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
