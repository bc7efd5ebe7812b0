"""Copies that overlap with the training: content is that of the save, whatever runs ahead, on the host and on streams.

There is no GPU where these tests mostly run. `Device` stands in for one: it queues what is done on its streams, and
runs one of them ahead of the other as far as its waits allow: a wait too few is a wrong number. What is marked `gpu`
does the same on a real one.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import torch
from tests.helpers.ranks import Job
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import reshard
from reshard.errors import ArgumentError
from reshard.torch import Checkpointer, staging
from reshard.torch.staging import Staging
from reshard.torch.tensors import as_tensor, from_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from reshard.ranks.group import TorchGroup


class Copies:
    """Holds up copies on the host until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        self.is_on, real = False, np.copyto

        def copyto(*args: Any) -> None:
            if self.is_on:
                self.reached.set()
                assert self.go.wait(30)
            real(*args)

        monkeypatch.setattr(np, "copyto", copyto)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    made = Copies(monkeypatch)
    yield made
    made.go.set()


def waits(act: Callable[[], object], until: Callable[[], object]) -> bool:
    """Whether `act` does not end before `until` was called."""
    thread = threading.Thread(target=act)
    thread.start()
    thread.join(0.05)
    is_waiting = thread.is_alive()
    until()
    thread.join(30)
    return is_waiting and not thread.is_alive()


# -- copies on the host


def test_only_what_overlaps_is_waited_for_later(copies: Copies) -> None:
    live = {"now": torch.arange(4.0), "later": torch.arange(9.0)}
    made = Staging()
    staged = made.stage({"now": live["now"]})
    assert staged.tensors["now"].tolist() == [0, 1, 2, 3]  # without a wait
    copies.is_on = True
    staged = made.stage({"later": live["later"]}, {"later"})
    assert waits(made.hold, copies.go.set)
    live["later"].zero_()
    staged.ready()
    assert staged.tensors["later"].tolist() == list(range(9))
    copies.go.clear()
    assert waits(lambda: made.stage({"now": live["now"]}), copies.go.set)


def test_every_hold_holds_and_the_next_copies_come_after_it(copies: Copies) -> None:
    """Several optimizers have a hook each, and no step may come between two saves."""
    made, live = Staging(), torch.zeros(3)
    copies.is_on = True
    made.stage({"w": live}, {"w"})
    assert waits(made.hold, copies.go.set)
    made.hold()
    copies.go.clear()
    made.stage({"w": live}, {"w"}, reuse=False)
    assert waits(lambda: made.stage({"w": live}, {"w"}, reuse=False), copies.go.set)


def test_memory_is_kept_while_it_fits_and_nobody_looks_at_it() -> None:
    made, live = Staging(), torch.zeros(1000)

    def copy(tensor: torch.Tensor = live, **options: Any) -> torch.Tensor:
        staged = made.stage({"w": tensor}, **options)
        staged.ready()
        return staged.tensors["w"]

    first = copy()
    assert copy() is first
    second = copy(reuse=False)
    assert second.data_ptr() != first.data_ptr()
    assert copy() is second
    for other in (torch.zeros(1001), torch.zeros(1000, dtype=torch.int32)):
        assert (copy(other).shape, copy(other).dtype) == (other.shape, other.dtype)


def test_what_goes_wrong_is_told_where_the_copies_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr(np, "copyto", fail)
    made = Staging()
    staged = made.stage({"w": torch.zeros(3)}, {"w"})
    made.hold()
    for _ in range(2):
        with pytest.raises(MemoryError, match="none left"):
            staged.ready()


def tensors() -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(0)
    data = torch.from_numpy(rng.integers(0, 255, 512, dtype=np.uint8))
    packed = (
        as_tensor(rng.integers(0, 255, (4, 6), dtype=np.uint8), "F4") if hasattr(torch, "float4_e2m1fn_x2") else data
    )
    return {
        "bf16": data.view(torch.bfloat16),
        "f8": as_tensor(data.numpy().view(ml_dtypes.float8_e4m3fn)),
        "packed": packed,
        "turned": data.view(torch.int32).reshape(16, 8).T,
        "strided": data.view(torch.float64)[::3],
        "0-d": torch.tensor(7.5),
        "empty": torch.zeros(0, 3),
        "bool": data > 100,
        "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "parameter": nn.Parameter(torch.ones(3)),
    }


@pytest.mark.parametrize("name", tensors())
@pytest.mark.parametrize("lane", ["thread", "stream"])
def test_every_kind_of_tensor(name: str, lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if lane == "stream":
        monkeypatch.setattr(staging, "_InThread", Device(monkeypatch).copying)
    live = tensors()[name]
    staged = Staging().stage({name: live}, {name})
    staged.ready()
    copy = staged.tensors[name]
    assert copy.is_contiguous()
    assert not copy.requires_grad
    assert from_tensor(copy)[1] == from_tensor(live)[1]
    assert from_tensor(copy)[0].tobytes() == from_tensor(live)[0].tobytes()


# -- streams


class Stream:
    def __init__(self) -> None:
        self.queue: list[Any] = []  # what is to be run, or an event to be waited for

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    def wait_event(self, event: Event) -> None:
        self.queue.append(event)

    def run_to(self, event: Event | None) -> None:
        """Run what is queued, to an event or the end; what is waited for first."""
        while self.queue and (event is None or not event.is_done):
            one = self.queue.pop(0)
            if not isinstance(one, Event):
                one()
            elif one.stream is not self:
                one.synchronize()
            else:
                one.is_done = True


class Event:
    def __init__(self, *, blocking: bool = False) -> None:
        self.is_done = False

    def record(self, stream: Stream) -> None:
        self.stream = stream
        stream.queue.append(self)

    def synchronize(self) -> None:
        if not self.is_done:
            self.stream.run_to(self)


class Device:
    """A GPU that computes on `compute` and copies on `side`, when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compute, self.side = Stream(), Stream()
        self._current, real = self.compute, torch.Tensor.copy_
        self.recorded: list[int] = []

        @contextlib.contextmanager
        def stream(other: Stream) -> Iterator[None]:
            self._current = other
            yield
            self._current = self.compute

        def copy(host: torch.Tensor, live: torch.Tensor, *, non_blocking: bool) -> None:
            assert non_blocking
            assert self._current is self.side
            self.side.queue.append(lambda: real(host, live))

        for name, what in {
            "current_stream": lambda _: self._current,
            "stream": stream,
            "Event": Event,
        }.items():
            monkeypatch.setattr(torch.cuda, name, what)
        monkeypatch.setattr(staging, "_side_stream", lambda _: self.side)
        monkeypatch.setattr(torch.Tensor, "copy_", copy)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda live, _: self.recorded.append(live.data_ptr()))

    @staticmethod
    def copying(pairs: Any) -> Any:
        return staging._OnStream(torch.device("cuda", 0), pairs)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ahead", ["compute", "side"])
def test_a_stream_runs_ahead_as_far_as_it_may(monkeypatch: pytest.MonkeyPatch, overlap: Any, ahead: str) -> None:
    device = Device(monkeypatch)
    monkeypatch.setattr(staging, "_InThread", device.copying)
    mean, weight, forward = torch.zeros(2), torch.zeros(2), []
    made = Staging()

    def compute(act: Callable[[], object]) -> None:
        device.compute.queue.append(act)

    def step(number: float) -> None:
        compute(lambda: forward.append(mean.add_(1).tolist()))
        made.hold()  # the hook
        compute(lambda: weight.fill_(number))

    step(1.0)
    step(2.0)
    staged = made.stage({"mean": mean, "weight": weight}, {"weight"} if overlap else ())
    step(3.0)
    step(4.0)
    assert device.recorded == [mean.data_ptr(), weight.data_ptr()]
    assert forward == []  # the host waited for nothing
    getattr(device, ahead).run_to(None)
    device.compute.run_to(None)  # long before anybody asks for the copies
    assert (weight.tolist(), len(forward)) == ([4, 4], 4)
    staged.ready()
    assert {key: copy.tolist() for key, copy in staged.tensors.items()} == {"mean": [2, 2], "weight": [2, 2]}


def test_forward_pass_overlaps_with_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has no part in the copies runs before them, unless it is the optimizer's."""
    device = Device(monkeypatch)
    monkeypatch.setattr(staging, "_InThread", device.copying)
    made, weight, seen = Staging(), torch.ones(2), list[str]()
    made.stage({"weight": weight}, {"weight"})
    device.side.queue.insert(-1, lambda: seen.append("copied"))
    device.compute.queue.append(lambda: seen.append("forward"))
    made.hold()
    device.compute.queue.append(lambda: seen.append("optimizer"))
    device.compute.run_to(None)
    assert seen == ["forward", "copied", "optimizer"]


# -- a trainer


class Small(nn.Module):
    """A parameter that is trained, one that is not, and a buffer that a forward pass moves."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2, affine=False)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(self.trained(x)) * self.frozen
        return result


def pass_through(model: nn.Module, seed: int) -> None:
    device = next(model.parameters()).device
    batch = torch.randn(8, 3, generator=torch.Generator().manual_seed(seed)).to(device)
    model(batch).square().sum().backward()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, bytes]:
    found = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        found |= {f"{slot}.{name}": value.cpu().clone() for slot, value in optimizer.state.get(parameter, {}).items()}
    return {name: from_tensor(tensor)[0].tobytes() for name, tensor in found.items()}


def held_from_the_first_wait_on(copies: Copies) -> Callable[..., Any]:
    """`Staging.stage`, and all copies are held up that are not waited for at once."""
    real, real_hold = Staging.stage, staging._InThread.hold

    def hold(one: Any) -> None:
        real_hold(one)
        copies.is_on = True

    def stage(self: Staging, tensors: Any, overlap: Any, **options: Any) -> Any:
        slots = ("", "step.", "exp_avg.", "exp_avg_sq.")
        assert set(overlap) == {f"{slot}trained.{name}" for slot in slots for name in ("weight", "bias")}
        buffers = {f"norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
        assert set(tensors) - set(overlap) == buffers | {"frozen"}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(staging._InThread, "hold", hold)
            return real(self, tensors, overlap, **options)

    return stage


def test_next_step_of_the_optimizer_waits_for_the_copies(tmp_path: Path, copies: Copies) -> None:
    model = Small()
    optimizer = torch.optim.AdamW(model.trained.parameters(), lr=0.1)
    with Checkpointer(tmp_path, save_every=2, overlap=True, signals=(), commit={"durable": False}) as made:
        made.resume(model=model, optimizer=optimizer)
        for step in range(1, 3):
            optimizer.zero_grad()
            pass_through(model, step)
            optimizer.step()
            if step == 2:
                expected = state_of(model, optimizer)
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(Staging, "stage", held_from_the_first_wait_on(copies))
                    made.step(step)
            else:
                made.step(step)
        assert copies.reached.wait(30)
        optimizer.zero_grad()
        pass_through(model, 3)  # moves the running means
        assert waits(optimizer.step, copies.go.set)
        assert state_of(model, optimizer) != expected
        made.wait()
    with reshard.open(tmp_path) as checkpoint:
        found = {key: checkpoint.read(key).tobytes() for key in checkpoint.keys()}  # noqa: SIM118
    assert found == expected
    optimizer.step()  # and after the end nobody holds it up


def test_overlap_without_a_background_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="about saves in the background"):
        Checkpointer(tmp_path, overlap=True, async_save=False, signals=())


def test_hook_is_that_of_every_optimizer(tmp_path: Path, copies: Copies) -> None:
    """Of several, and of one that has another inside."""

    def work(_: TorchGroup) -> list[bool]:
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        optimizers: list[Any] = [
            torch.optim.SGD(first.parameters(), lr=0.1),
            ZeroRedundancyOptimizer(second.parameters(), torch.optim.SGD, lr=0.1),
        ]
        waited = []
        with Checkpointer(tmp_path, overlap=True, signals=(), commit={"durable": False}) as made:
            made.resume(model=nn.ModuleDict({"first": first, "second": second}), optimizer=optimizers)
            for number, optimizer in enumerate(optimizers, 1):
                made.step(number)
                copies.go.clear()
                copies.is_on = True
                made.save()
                waited.append(waits(optimizer.step, copies.go.set))
        return waited

    with Job(1, work) as job:
        assert job.values() == [[True, True]]


def test_without_memory_for_copies_it_is_saved_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(staging, "_host_memory", fail)
    model = Small()
    with Checkpointer(tmp_path, save_every=1, overlap=True, signals=(), commit={"durable": False}) as made:
        made.resume(model=model)
        made.step(1)
    assert "copied one by one before the training goes on: CUDA error" in caplog.text
    assert reshard.open(tmp_path).read("frozen").tolist() == [1, 1]


# -- a real device


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True])
def test_checkpoints_of_a_gpu_hold_what_it_held(tmp_path: Path, overlap: Any) -> None:
    """The device is far behind the host all the time, and parameters change at once after each save."""
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4)), nn.BatchNorm1d(2048)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    expected = {}
    with Checkpointer(
        tmp_path, save_every=1, keep=None, overlap=overlap, signals=(), commit={"durable": False}
    ) as made:
        made.resume(model=model, optimizer=optimizer)
        for step in range(1, 4):
            optimizer.zero_grad()
            torch.cuda._sleep(10**8)  # type: ignore[no-untyped-call]
            model(torch.randn(64, 2048, device="cuda")).square().sum().backward()
            optimizer.step()
            kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            kept |= {f"exp_avg.{n}": optimizer.state[p]["exp_avg"].clone() for n, p in model.named_parameters()}
            made.step(step)
            expected[step] = kept
    for step, kept in expected.items():
        with reshard.open(tmp_path / f"iteration_{step:08d}") as checkpoint:
            for key, tensor in kept.items():
                assert torch.equal(as_tensor(checkpoint.read(key)), tensor.cpu()), (step, key)


@pytest.mark.gpu
def test_the_host_does_not_wait_for_the_device() -> None:
    live = torch.zeros(1 << 26, device="cuda")
    made = Staging()
    made.stage({"w": live}).ready()  # the memory is pinned from here on
    torch.cuda._sleep(10**9)  # type: ignore[no-untyped-call]
    live += 1
    staged = made.stage({"w": live})
    assert staged.tensors["w"].is_pinned()
    live += 1
    assert not torch.cuda.current_stream().query()  # still asleep
    staged.ready()
    assert (staged.tensors["w"] == 1).all()
    assert (live == 2).all()


@pytest.mark.gpu
def test_a_model_on_a_gpu_is_resumed_in_place(tmp_path: Path) -> None:
    def built(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = Small().cuda()
        return model, torch.optim.AdamW(model.trained.parameters(), lr=0.1)

    model, optimizer = built(0)
    with Checkpointer(tmp_path, save_every=1, signals=()) as made:
        made.resume(model=model, optimizer=optimizer)
        pass_through(model, 1)
        optimizer.step()
        made.step(1)
    other, other_optimizer = built(1)
    places = [parameter.data_ptr() for parameter in other.parameters()]
    with Checkpointer(tmp_path, signals=()) as made:
        assert made.resume(model=other, optimizer=other_optimizer).initial_step == 1
    assert [parameter.data_ptr() for parameter in other.parameters()] == places
    assert state_of(other, other_optimizer) == state_of(model, optimizer)
