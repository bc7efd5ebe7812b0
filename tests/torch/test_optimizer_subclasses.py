"""State of optimizers that is made of other tensors: it comes back exactly, or is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.helpers.ranks import Job
from tests.helpers.wrapped_tensors import Made
from tests.peers.required import required
from torch import nn
from torch.distributed.fsdp import fully_shard

import reshard
from reshard.errors import MismatchError, ReshardError
from reshard.torch import Checkpointer
from reshard.torch.optimizers import StateUpdate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

KINDS = ["AdamW8bit", "AdamW4bit", "AdamWFp8"]


class Packed(torch.optim.Optimizer):
    """Momentum as a tensor of two, the high and the low half of its bits."""

    def __init__(self, parameters: Any, options: Any = (1, 2)) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.options = options

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    codes, scale = torch.zeros(p.shape, dtype=torch.int16), torch.zeros(p.shape, dtype=torch.int16)
                    state["momentum"] = Made(p.shape, p.dtype, self.options, codes=codes, scale=scale)
                    state["n"] = 0
                held = state["momentum"]
                both = torch.stack([held.scale, held.codes], -1).view(torch.float32)[..., 0]
                both = 0.9 * both + p.grad
                halves = both.contiguous().view(torch.int16).view(*p.shape, 2)
                held.scale.copy_(halves[..., 0])
                held.codes.copy_(halves[..., 1])
                state["n"] += 1
                p.sub_(both, alpha=float(group["lr"]))


def torchao(kind: str) -> Callable[[Any], Any]:
    return lambda parameters: getattr(required("torchao.optim"), kind)(parameters, lr=0.01)


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """The compiler takes half a minute."""
    with torch.compiler.set_stance("force_eager"):
        yield


def run(
    root: Path,
    make: Callable[[Any], Any],
    n_steps: int,
    *,
    width: int = 64,
    sharded: bool = False,
    every: int | None = 1,
) -> Any:
    """Train up to a step, from where the run was. Returns where it was, and parameters and state."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, width), nn.Linear(width, 1))
    if sharded:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with Checkpointer(root, save_every=every, signals=(), commit={"durable": False}) as checkpointer:
        start = checkpointer.resume(model=model, optimizer=optimizer, scheduler=schedule).initial_step
        for step in range(start + 1, n_steps + 1):
            model(torch.sin(torch.arange(128.0) * step).view(2, 64)).square().mean().backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            checkpointer.step(step)
    return start, contents(model, optimizer)


def contents(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        found[name] = flat(parameter)
        found |= {f"{slot}.{name}": flat(one) for slot, one in optimizer.state[parameter].items()}
    return found


def flat(one: Any) -> Any:
    if not isinstance(one, torch.Tensor):
        return one
    local: Any = one.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    if hasattr(local, "__tensor_flatten__"):
        names, _ = local.__tensor_flatten__()
        return [type(local).__name__, *(getattr(local, name).float().tolist() for name in names)]
    return local.tolist()


def check(root: Path, make: Callable[[Any], Any], **how: Any) -> dict[str, Any]:
    """A run that is cut at each step equals one that is not."""
    _, expected = run(root / "whole", make, 4, **how)
    for n_steps in (1, 2, 4):
        start, found = run(root / "cut", make, n_steps, **how)
    assert start == 2
    assert found == expected
    return found  # type: ignore[no-any-return]


def test_state_of_a_class_of_ones_own(tmp_path: Path) -> None:
    found = check(tmp_path, Packed)
    assert found["momentum.0.weight"][0] == "Made"
    with reshard.open(tmp_path / "cut") as saved:
        assert "momentum:codes.0.weight" in saved


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("kind", KINDS)
def test_torchao(kind: str, tmp_path: Path) -> None:
    required("torchao")
    found = check(tmp_path, torchao(kind))
    assert found["exp_avg.0.weight"][0].startswith("OptimState")
    assert not isinstance(found["exp_avg.1.weight"][0], str)  # too small


@pytest.mark.parametrize(
    ("group", "of_steps"), [({}, "cpu"), ({"capturable": True}, "meta"), ({"fused": True}, "meta")]
)
def test_new_state_is_on_the_device_of_the_parameter_and_steps_as_the_options_say(
    group: dict[str, Any], of_steps: str
) -> None:
    live: Any = None
    update = StateUpdate(live, torch.empty(2, device="meta"), group)
    made = [update._new_state(slot, torch.zeros(())).device.type for slot in ("step", "exp_avg")]
    assert made == [of_steps, "meta"]


def test_other_classes_and_options_are_refused(tmp_path: Path) -> None:
    run(tmp_path, Packed, 1)
    words = r"`momentum\.0\.weight` was saved as Made\(\(1, 2\)\) of codes .*, and is Made\(\(9,\)\) of codes"
    with pytest.raises(MismatchError, match=words):
        run(tmp_path, lambda parameters: Packed(parameters, (9,)), 2)

    class Broken(Packed):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise RuntimeError("no step")

    Broken.__name__ = "Packed"
    with pytest.raises(MismatchError, match=r"the Packed does not make its state of `0\.weight` before the first step"):
        run(tmp_path, Broken, 2)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    optimizer = Packed(model.parameters(), (9,))
    found = Checkpointer(tmp_path, save_every=None, signals=()).resume(model=model, optimizer=optimizer, strict=False)
    assert any("starts with new optimizer state" in one for one in found.warnings)
    assert not optimizer.state


def test_a_file_that_does_not_record_the_class_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "run", Packed, 1)
    reshard.convert(tmp_path / "run", tmp_path / "dcp", to="dcp")
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    optimizer = Packed(model.parameters())
    start = {"path": tmp_path / "dcp", "fresh_optimizer": False}
    with pytest.raises(
        MismatchError, match=r"`momentum\.0\.weight` was saved as an unrecorded class of codes \(64, 64\)"
    ):
        Checkpointer(tmp_path / "new", save_every=None, signals=()).resume(
            model=model, optimizer=optimizer, init_from=start
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_torchao_sharded(kind: str, tmp_path: Path) -> None:
    """On the second rank the first weight is too small to be quantised."""
    required("torchao")

    def work(_: Any) -> Any:
        with torch.compiler.set_stance("force_eager"):
            found = check(tmp_path, torchao(kind), width=127, sharded=True)
            return found["exp_avg.0.weight"][0]

    with Job(2, work) as job:
        values = job.values()
    assert isinstance(values[0], str)
    assert not isinstance(values[1], str)
    with pytest.raises(ReshardError, match="cannot be resharded: it is rank-local state, saved by 2 ranks"):
        run(tmp_path / "cut", torchao(kind), 5, width=127)

    def widen(_: Any) -> Any:
        with torch.compiler.set_stance("force_eager"):
            return run(tmp_path / "one", torchao(kind), 2, width=128, sharded=True, every=None)

    run(tmp_path / "one", torchao(kind), 1, width=128)
    with Job(2, widen) as job:
        told = job.outcomes()
    assert all("cannot be resharded or converted" in str(one) for one in told), told


class Counting(torch.optim.SGD):
    """Keeps state that belongs to no parameter, as `state_dict()` of torch saves it: it scales the steps."""

    def step(self, closure: Any = None) -> Any:
        state: Any = self.state
        state["n"] = state.get("n", 0) + 1
        state.setdefault("means", {"of all": [torch.zeros(3)]})["of all"][0].add_(state["n"])
        for group in self.param_groups:
            group["lr"] = 0.1 / float(state["means"]["of all"][0][0])
        return super().step(closure)


def counting(parameters: Any) -> Counting:
    return Counting(parameters, lr=0.1, momentum=0.9)


def test_state_of_no_parameter_is_restored(tmp_path: Path) -> None:
    found: list[Counting] = []

    def made(parameters: Any) -> Counting:
        found.append(counting(parameters))
        return found[-1]

    check(tmp_path, made)
    whole, cut = found[0].state_dict()["state"], found[-1].state_dict()["state"]
    assert whole["n"] == cut["n"] == 4
    assert torch.equal(whole["means"]["of all"][0], cut["means"]["of all"][0])


def test_state_of_no_parameter_that_the_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    def begun(parameters: Any) -> Counting:
        optimizer = counting(parameters)
        optimizer.state["seen"] = 0  # type: ignore[index]
        return optimizer

    run(tmp_path / "run", counting, 1)
    with pytest.raises(MismatchError, match="lacks the state of the optimizer that belongs to no parameter: `seen`"):
        run(tmp_path / "run", begun, 2)


def test_a_name_map_does_not_drop_state_of_no_parameter(tmp_path: Path) -> None:
    run(tmp_path / "run", counting, 1)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    names = {"rules": [{"from": name, "to": name} for name in ("0.weight", "0.bias", "1.weight", "1.bias")]}
    start = {"path": tmp_path / "run", "fresh_optimizer": False, "names": names}
    with pytest.raises(ReshardError, match="the optimizer has state besides tensors, which a name map does not rename"):
        Checkpointer(tmp_path / "new", signals=()).resume(
            model=model, optimizer=counting(model.parameters()), init_from=start
        )


@pytest.mark.slow(disk=False)
def test_state_of_no_parameter_is_compared_between_ranks(tmp_path: Path) -> None:
    def work(group: Any) -> str:
        model = nn.Linear(2, 2)
        with torch.no_grad():
            model.weight.fill_(1.0)
            model.bias.fill_(1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state: Any = optimizer.state
        texts = []
        for step, n in ((1, 5), (2, 5 + group.rank)):
            state["n"] = n
            checkpointer = Checkpointer(tmp_path / str(step), save_every=1, signals=(), group=group)
            try:
                checkpointer.resume(model=model, optimizer=optimizer)
                checkpointer.save(step, blocking=True)
                texts.append("saved")
            except ReshardError as error:
                texts.append(str(error.message))
        return "; ".join(texts)

    with Job(2, work) as job:
        found = job.values()
    message = (
        "the state of optimizer 0 that belongs to no parameter differs between ranks: `n` is 5 on rank 0, 6 on rank 1"
    )
    assert found == [f"saved; {message}"] * 2
