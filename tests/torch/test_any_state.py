"""State of any shape: averages, second models, wrapped and composite optimizers, loaders, and tensors on ranks."""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict, defaultdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.helpers.loops import batches_and_draws
from tests.helpers.ranks import Job
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

import reshard
from reshard.errors import ArgumentError, DamagedFileError, MismatchError, UnsupportedError
from reshard.torch import Checkpointer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from reshard.ranks.group import TorchGroup


def layers(seed: int) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def train(model: Any, *optimizers: Any, n_steps: int = 2) -> None:
    for n in range(n_steps):
        model(torch.arange(12.0).reshape(4, 3).sin() + n).square().sum().backward()
        for one in optimizers:
            one.step()
            one.zero_grad()


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return type(one) is type(other) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


class Average:
    """An average of the weights as a dict of tensors, with other state of every kind around it."""

    def __init__(self, model: Any) -> None:
        self.shadow = {name: one.detach().clone() for name, one in model.named_parameters()}
        self.rest: dict[str, Any] = {"decay": 0.9, "history": [torch.ones(3), (torch.zeros(2, 2), "text")]}

    def update(self, model: Any) -> None:
        for name, one in model.named_parameters():
            self.shadow[name].lerp_(one.detach(), 0.1)
        self.rest["history"].append(torch.full((2,), 7, dtype=torch.int32))

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, **self.rest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]
        self.rest = {"decay": state["decay"], "history": state["history"]}


class Masters:
    """A wrapper that trains copies of the parameters in float32."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)
        self.masters = [one.detach().float().clone().requires_grad_() for one in self.parameters]
        self.inner = torch.optim.AdamW(self.masters, lr=0.05, foreach=False)

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    def step(self) -> None:
        for master, one in zip(self.masters, self.parameters, strict=True):
            master.grad = None if one.grad is None else one.grad.float()
        self.inner.step()
        with torch.no_grad():
            for master, one in zip(self.masters, self.parameters, strict=True):
                one.copy_(master)

    def zero_grad(self) -> None:
        for one in self.parameters:
            one.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"masters": self.masters, "inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for master, saved in zip(self.masters, state["masters"], strict=True):
                master.copy_(saved)
        self.inner.load_state_dict(state["inner"])


class Composite(torch.optim.Optimizer):
    """Muon for matrices and AdamW for the rest, behind one interface."""

    def __init__(self, parameters: Any) -> None:
        of_ndim = [[one for one in parameters if (one.ndim == 2) == is_matrix] for is_matrix in (True, False)]
        self.parts: list[Any] = [torch.optim.Muon(of_ndim[0], lr=0.01), torch.optim.AdamW(of_ndim[1])]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for one in self.parts:
            one.step()

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002
        del set_to_none
        for one in self.parts:
            one.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [one.state_dict() for one in self.parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for one, saved in zip(self.parts, state["parts"], strict=True):
            one.load_state_dict(saved)


class EightBit(torch.optim.Optimizer):
    """Moments as codes in blocks of four, with a scale for each block."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for one in self.param_groups[0]["params"]:
            blocks = nn.functional.pad(one.grad.flatten(), (0, -one.numel() % 4)).reshape(-1, 4)
            scale = blocks.abs().amax(1).clamp_min(1e-9)
            codes = (blocks / scale[:, None] * 127 + 128).round().to(torch.uint8)
            self.state[one] = {"codes": codes, "scale": scale, "n": self.state[one].get("n", 0) + 1}
            change = (codes.float() - 128) / 127 * scale[:, None]
            one.sub_(0.1 * change.flatten()[: one.numel()].reshape(one.shape))


def average(seed: int) -> Any:
    model = layers(seed)
    optimizer, kept = torch.optim.AdamW(model.parameters()), Average(model)

    def act() -> None:
        train(model, optimizer)
        kept.update(model)

    return {"model": model, "optimizer": optimizer, "extra": {"ema": kept}}, act, kept.state_dict


def averaged_model(seed: int) -> Any:
    model = layers(seed)
    optimizer, kept = torch.optim.AdamW(model.parameters()), AveragedModel(model, use_buffers=True)

    def act() -> None:
        train(model, optimizer)
        kept.update_parameters(model)

    return {"model": model, "optimizer": optimizer, "extra": {"swa": kept}}, act, lambda: dict(kept.state_dict())


def two_models(seed: int) -> Any:
    one, other = layers(seed), layers(seed + 10)
    optimizers = [torch.optim.AdamW(one.parameters()), torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)]

    def act() -> None:
        train(one, optimizers[0])
        train(other, optimizers[1])

    parts = {"model": {"generator": one, "critic": other}, "optimizer": optimizers}
    return parts, act, lambda: [dict(other.state_dict()), [o.state_dict() for o in optimizers]]


def same_names_in_extra(seed: int) -> Any:
    model, teacher = layers(seed), layers(seed + 10)
    parts = {"model": model, "extra": {"teacher": teacher}}
    return parts, lambda: None, lambda: [dict(model.state_dict()), dict(teacher.state_dict())]


def with_optimizer(make: Callable[[Any], Any]) -> Any:
    def build(seed: int) -> Any:
        model = layers(seed)
        if make is Masters:
            model = model.bfloat16()
        optimizer = make(list(model.parameters()))

        def act() -> None:
            for n in range(2):
                model(torch.arange(12.0).reshape(4, 3).to(model[0].weight.dtype) + n).square().sum().backward()
                for one in optimizer if isinstance(optimizer, list) else [optimizer]:
                    one.step()
                    one.zero_grad()

        def state() -> Any:
            several = optimizer if isinstance(optimizer, list) else [optimizer]
            return [dict(model.state_dict()), [one.state_dict() for one in several]]

        return {"model": model, "optimizer": optimizer}, act, state

    return build


def muon_and_adamw(parameters: Any) -> Any:
    matrices, rest = ([one for one in parameters if (one.ndim == 2) == which] for which in (True, False))
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest)]


def scaler(seed: int) -> Any:
    one = torch.amp.GradScaler("cpu", init_scale=2.0 ** (seed + 3))
    return {"model": layers(seed), "extra": {"scaler": one}}, lambda: None, one.state_dict


KINDS = {
    "average": average,
    "AveragedModel": averaged_model,
    "two models": two_models,
    "same names": same_names_in_extra,
    "masters": with_optimizer(Masters),
    "composite": with_optimizer(Composite),
    "Muon and AdamW": with_optimizer(muon_and_adamw),
    "8 bits": with_optimizer(EightBit),
    "GradScaler": scaler,
}


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("format", ["checkpoint2", "checkpoint1"])
@pytest.mark.parametrize("kind", KINDS)
def test_state_comes_back_equal(tmp_path: Path, kind: str, format: Any) -> None:  # noqa: A002
    parts, act, state = KINDS[kind](0)
    with Checkpointer(tmp_path / "run", signals=(), format=format) as made:
        made.resume(**parts)
        act()
        made.save(4, blocking=True)
    other, act_again, found = KINDS[kind](1)
    assert not equal(state(), found())
    Checkpointer(tmp_path / "run", signals=()).resume(**other)
    assert equal(state(), found())
    act()
    act_again()
    assert equal(state(), found())


def test_tensors_of_objects_are_tensors_of_the_checkpoint(tmp_path: Path) -> None:
    parts, act, _ = average(0)
    with Checkpointer(tmp_path / "run", signals=()) as made:
        made.resume(**parts)
        act()
        made.save(4, blocking=True)
    with reshard.open(tmp_path / "run") as checkpoint:
        key = "extra.ema.shadow.0.weight"
        assert torch.equal(torch.from_numpy(checkpoint.read(key)), parts["extra"]["ema"].shadow["0.weight"])
        assert key in checkpoint.keys("optimizer")  # not among the weights, which are converted
        assert key not in checkpoint.keys("model")
        file = checkpoint[key].shards[0].files[0]
    shard = tmp_path / "run/iteration_00000004" / file
    data = bytearray(shard.read_bytes())
    data[data.index(parts["extra"]["ema"].shadow["0.weight"].numpy().tobytes())] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DamagedFileError):
        Checkpointer(tmp_path / "run", signals=()).resume(**average(1)[0])


class Kept:
    """An object whose state is a value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize("wrap", [lambda one: one, reshard.per_rank])
def test_values_beside_tensors_keep_their_types(tmp_path: Path, wrap: Callable[[Any], Any]) -> None:
    """A MultiStepLR keeps its milestones in a Counter."""
    milestones = {"steps": Counter({30: 1, (1, 2): 2}), "mean": torch.ones(3), "last": nn.Parameter(torch.ones(2))}
    saved = Kept({"inner": OrderedDict(milestones), "seen": defaultdict(int, a=1), "both": (torch.ones(2), {4})})
    with Checkpointer(tmp_path, signals=()) as made:
        made.resume(model=nn.Linear(1, 1), extra={"kept": wrap(saved)})
        made.save(1, blocking=True)
    found = Kept({})
    Checkpointer(tmp_path, signals=()).resume(model=nn.Linear(1, 1), extra={"kept": wrap(found)})
    assert found.value["inner"]["steps"] == Counter({30: 1, (1, 2): 2})
    assert type(found.value["inner"]) is OrderedDict
    assert (found.value["seen"], found.value["both"][1]) == ({"a": 1}, {4})
    assert torch.equal(found.value["inner"]["last"], torch.ones(2))


def test_a_tensor_without_values_in_an_object_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="a tensor on device `meta` in the state of an object has no values"):
        Checkpointer(tmp_path, save_every=1, signals=()).resume(
            model=nn.Linear(1, 1), extra={"kept": Kept([torch.ones(2, device="meta")])}
        )


def test_an_average_grows_with_its_model_and_an_absent_object_is_reported(tmp_path: Path) -> None:
    def build(rows: int, seed: int) -> Any:
        torch.manual_seed(seed)
        model = nn.Embedding(rows, 2)
        return model, AveragedModel(model)

    old, kept = build(3, 0)
    with Checkpointer(tmp_path, signals=()) as made:
        made.resume(model=old, extra={"swa": kept})
        made.save(1, blocking=True)
    model, larger = build(5, 1)
    initial = larger.module.weight.detach().clone()
    with pytest.raises(MismatchError, match="the run does not have"):
        Checkpointer(tmp_path, signals=()).resume(model=build(3, 1)[0])
    decision = Checkpointer(tmp_path, signals=()).resume(model=model, extra={"swa": larger}, strict={"shape": "grow"})
    assert torch.equal(larger.module.weight[:3], kept.module.weight)
    assert torch.equal(larger.module.weight[3:], initial[3:])
    assert any("`extra.swa.module.weight` has shape (3, 2)" in line for line in decision.warnings)
    model, smaller = build(2, 1)
    Checkpointer(tmp_path, signals=()).resume(model=model, extra={"swa": smaller}, strict={"shape": "trim"})
    assert torch.equal(smaller.module.weight, kept.module.weight[:2])


def tied_average(seed: int, rows: int) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(rows, 2), nn.Linear(2, rows, bias=False))
    model[1].weight = model[0].weight
    return AveragedModel(model)


def views(seed: int, rows: int) -> Any:
    table = torch.full((rows, 2), float(seed))
    return {"table": table, "first": table[:2], "flat": table.view(-1)}


@pytest.mark.parametrize("make", [tied_average, views])
def test_an_object_whose_tensors_share_memory_is_restored(make: Callable[[int, int], Any], tmp_path: Path) -> None:
    kept, restored, model = make(3, 4), make(5, 4), nn.Linear(2, 1)
    with Checkpointer(tmp_path, signals=()) as made:
        made.resume(model=model, extra={"kept": kept})
        made.save(1, blocking=True)
    Checkpointer(tmp_path, signals=()).resume(model=model, extra={"kept": restored})
    state, expected = ((one if isinstance(one, dict) else one.state_dict()) for one in (restored, kept))
    assert equal(dict(state), dict(expected))
    if make is tied_average:
        assert restored.module[0].weight is restored.module[1].weight
        larger = make(5, 6)
        Checkpointer(tmp_path, signals=()).resume(model=model, extra={"kept": larger}, strict={"shape": "grow"})
        assert torch.equal(larger.module[0].weight[:4], kept.module[0].weight)


def test_names_of_objects_do_not_collide(tmp_path: Path) -> None:
    model = layers(0)
    with pytest.raises(ArgumentError, match=r"`extra` has an object named `optimizer`"):
        Checkpointer(tmp_path, signals=()).resume(
            model=model, optimizer=Composite(list(model.parameters())), extra={"optimizer": Average(model)}
        )
    odd = {"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}, 3: [torch.full((2,), 3.0)] * 2}
    kept = Average(model)
    kept.shadow = odd
    with Checkpointer(tmp_path, signals=()) as made:
        made.resume(model=model, extra={"ema": kept})
        made.save(1, blocking=True)
    other = Average(model)
    Checkpointer(tmp_path, signals=()).resume(model=model, extra={"ema": other})
    assert equal(other.shadow, odd)


def test_a_dict_is_restored_in_place(tmp_path: Path) -> None:
    def build(seed: int) -> tuple[Any, dict[str, Any]]:
        model = layers(seed)
        shadow = {name: one.detach().clone() for name, one in model.named_parameters()}
        grown = torch.ones(3 - 3 * seed)
        return model, {"shadow": shadow, "decay": 0.9 + seed, "history": [seed] * (2 - seed), "grown": grown}

    model, saved = build(0)
    with Checkpointer(tmp_path, signals=()) as made:
        made.resume(model=model, extra={"ema": saved, "mine": reshard.per_rank({"n": 3})})
        made.save(1, blocking=True)
    assert "extra.ema.shadow.0.weight" in reshard.open(tmp_path)
    model, live = build(1)
    weight, history, mine = live["shadow"]["0.weight"], live["history"], SimpleNamespace(n=0)
    Checkpointer(tmp_path, signals=()).resume(model=model, extra={"ema": live, "mine": reshard.per_rank(vars(mine))})
    assert equal(live, saved)
    assert mine == SimpleNamespace(n=3)
    assert live["shadow"]["0.weight"] is weight
    assert live["history"] is history


def counters() -> dict[str, Any]:
    return {"a": 0, "b": 7, "w": torch.zeros(3), "deep": [{"n": 1, "m": torch.zeros(1)}], "later": {}}


def in_dicts(root: Path, saved: Any, live: Any, *, is_per_rank: bool, **options: Any) -> Any:
    """Save a dict, then resume with another one."""
    wrap = reshard.per_rank if is_per_rank else lambda one: one
    with Checkpointer(root, signals=()) as made:
        made.resume(model=layers(0), extra={"p": wrap(saved)})
        made.save(1, blocking=True)
    return Checkpointer(root, signals=()).resume(model=layers(1), extra={"p": wrap(live)}, **options)


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("is_per_rank", [False, True])
def test_a_dict_keeps_keys_that_the_checkpoint_lacks_or_is_refused(tmp_path: Path, *, is_per_rank: bool) -> None:
    saved = {"a": 1, "w": torch.ones(3), "deep": [{"m": torch.ones(1)}], "later": {"x": 2}, "new": 4}
    for number, strict in enumerate((True, {"unexpected": "skip"})):
        live = counters()
        with pytest.raises(MismatchError, match=r"the checkpoint lacks `extra\['p'\]\['deep'\]\[0\]\['n'\]`.*\['b'\]"):
            in_dicts(tmp_path / f"{number}", saved, live, is_per_rank=is_per_rank, strict=strict)
        assert equal({**live, "w": None}, {**counters(), "w": None})  # tensors are read into the memory of the run
    live = counters()
    w, inner = live["w"], live["deep"][0]["m"]
    decision = in_dicts(tmp_path / "keep", saved, live, is_per_rank=is_per_rank, strict={"missing": "keep"})
    assert equal(live, {**saved, "b": 7, "deep": [{"n": 1, "m": torch.ones(1)}]})
    assert live["w"] is w
    assert live["deep"][0]["m"] is inner
    assert any("extra['p']['b']" in line for line in decision.warnings)


@pytest.mark.slow
@pytest.mark.parametrize("is_per_rank", [False, True])
def test_tensors_of_a_dict_have_the_saved_shape_and_dtype(tmp_path: Path, *, is_per_rank: bool) -> None:
    for number, (of_saved, of_live) in enumerate(((2, 3), (1, 3), (3, 1), (0, 3))):
        root, live = tmp_path / f"{number}", {"w": torch.zeros(of_live)}
        saved = {"w": torch.ones(of_saved)}
        words = rf"`extra\['p'\]\['w'\]` has shape \({of_saved},\) in the checkpoint, and \({of_live},\) in the run"
        with pytest.raises(MismatchError, match=words):
            in_dicts(root, saved, live, is_per_rank=is_per_rank, strict=False)
        decision = in_dicts(root / "skip", saved, live, is_per_rank=is_per_rank, strict={"shape": "skip"})
        assert equal(live, {"w": torch.zeros(of_live)})
        assert sum("has shape" in line for line in decision.warnings) == 1
    half = {"w": torch.zeros(2, dtype=torch.bfloat16)}
    w = half["w"]
    with pytest.raises(MismatchError, match=r"`extra\['p'\]\['w'\]` is float32 in the checkpoint, and bfloat16 in"):
        in_dicts(tmp_path / "dtype", {"w": torch.ones(2)}, half, is_per_rank=is_per_rank)
    in_dicts(tmp_path / "cast", {"w": torch.ones(2)}, half, is_per_rank=is_per_rank, cast=True)
    assert half["w"] is w
    assert equal(half, {"w": torch.ones(2, dtype=torch.bfloat16)})


class Refusing:
    """An object that saves its state, and does not load it."""

    def state_dict(self) -> dict[str, Any]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError(*state)


def test_an_object_that_does_not_load_its_state_is_named(tmp_path: Path) -> None:
    def parts(**changed: Any) -> dict[str, Any]:
        model = layers(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": None, **changed}

    def check(name: str, both: list[dict[str, Any]], message: str) -> Any:
        with Checkpointer(tmp_path / name, signals=()) as made:
            made.resume(**both[0])
            made.save(1, blocking=True)
        with pytest.raises(MismatchError, match=message) as caught:
            Checkpointer(tmp_path / name, signals=()).resume(**both[1])
        return caught.value

    other = parts()
    two: list[Any] = [torch.optim.lr_scheduler.LinearLR(other["optimizer"]) for _ in range(2)]
    other["scheduler"] = torch.optim.lr_scheduler.SequentialLR(other["optimizer"], two, [3])
    words = r"^`scheduler` was saved as CosineAnnealingLR, and is now SequentialLR\(LinearLR, LinearLR\)"
    check("scheduler", [parts(), other], words)
    words = r"^`extra\['a'\]`, a Refusing, does not load its saved state: KeyError: 'n'"
    check("shared", [parts(extra={"a": Refusing()}) for _ in range(2)], words)
    check("per rank", [parts(extra={"a": reshard.per_rank(Refusing())}) for _ in range(2)], words)
    check("sampler", [parts(sampler=Refusing()) for _ in range(2)], "^`sampler`, a Refusing, does not load")
    words = r"^`weight` of `extra\['teacher'\]` has shape \(2, 2\) in the checkpoint, and \(3, 2\) in the run"
    teachers = [nn.Linear(2, 2), nn.Linear(2, 3)]
    assert check("teacher", [parts(extra={"teacher": one}) for one in teachers], words).key == "weight"
    teachers = [nn.Linear(2, 2, bias=False), nn.Linear(2, 2)]
    words = r"^`extra\['teacher'\]`, a Linear, does not load .* Missing key\(s\) in state_dict: \"bias"
    check("bias", [parts(extra={"teacher": one}) for one in teachers], words)


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"`model` has a Tensor(.|\n)*not its `state_dict\(\)`"):
        Checkpointer(tmp_path, signals=()).resume(model=layers(0).state_dict())
    with Checkpointer(tmp_path, signals=()) as made:
        made.resume(model=layers(0))
        with pytest.raises(ArgumentError, match=r"`loss` has shape \(2,\), expected a number"):
            made.step(1, loss=torch.ones(2))
        with pytest.raises(ArgumentError, match=r"`metrics\['x'\]` is of type str"):
            made.step(1, metrics={"x": "a"})
        made.step(1, loss=1.0)


def test_an_object_without_state_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"`extra\['n'\]` is of type int(.|\n)*pass a dict of the values"):
        Checkpointer(tmp_path, signals=()).resume(model=layers(0), extra={"n": 3})


def test_state_that_contains_itself_is_refused(tmp_path: Path) -> None:
    progress: dict[str, Any] = {}
    progress["self"] = [progress]
    with pytest.raises(ArgumentError, match="`progress` contains itself"):
        Checkpointer(tmp_path, signals=()).resume(model=nn.Linear(1, 1), extra={"progress": progress})


def test_extra_without_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"`extra` is of type list, expected a mapping"):
        Checkpointer(tmp_path, signals=()).resume(model=layers(0), extra=[nn.Linear(1, 1)])  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [list, dict])
def test_several_schedulers_are_resumed(tmp_path: Path, kind: type) -> None:
    def build() -> tuple[Any, Any, list[Any], Any]:
        model = layers(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        given = [warmup, decay] if kind is list else {"warmup": warmup, "decay": decay}
        return model, optimizer, [warmup, decay], given

    model, optimizer, schedulers, given = build()
    with Checkpointer(tmp_path, signals=()) as made:
        made.resume(model=model, optimizer=optimizer, scheduler=given)
        optimizer.step()
        for one in schedulers:
            one.step()
        schedulers[1].step()
        made.save(1, blocking=True)
    rate = optimizer.param_groups[0]["lr"]
    model, optimizer, schedulers, given = build()
    Checkpointer(tmp_path, signals=()).resume(model=model, optimizer=optimizer, scheduler=given)
    assert [one.last_epoch for one in schedulers] == [1, 2]
    assert optimizer.param_groups[0]["lr"] == rate


def test_an_invalid_scheduler_is_named(tmp_path: Path) -> None:
    model = layers(0)
    with pytest.raises(ArgumentError, match=r"`scheduler\.1` is of type int"):
        Checkpointer(tmp_path, signals=()).resume(model=model, scheduler=[nn.Linear(1, 1), 3])
    with pytest.raises(ArgumentError, match=r"`extra` has an object named `scheduler\.a`"):
        Checkpointer(tmp_path, signals=()).resume(
            model=model, scheduler={"a": nn.Linear(1, 1)}, extra={"scheduler.a": nn.Linear(1, 1)}
        )


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("has_generator", [False, True])
@pytest.mark.parametrize("stop", [3, 4, 5, 9])
def test_a_stateful_loader_goes_on_with_or_without_a_generator(
    tmp_path: Path, stop: int, *, has_generator: bool
) -> None:
    """Batches and the random numbers of the loop go on as in an uninterrupted run, within an epoch and at its end."""
    loader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def run(root: Path, last: int) -> list[Any]:
        torch.manual_seed(5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            generator = torch.Generator().manual_seed(3) if has_generator else None
            data = loader(list(range(10)), batch_size=2, shuffle=True, generator=generator)
        with Checkpointer(root, save_every=3, signals=(), async_save=False) as made:
            decision = made.resume(model=nn.Linear(1, 1), sampler=data)
            assert not decision.warnings
            return batches_and_draws(made, data, decision.initial_step, last)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = run(tmp_path / "whole", 12)
        run(tmp_path / "cut", stop)
        assert run(tmp_path / "cut", 12) == whole[stop // 3 * 3 :]


# ------------------------------------------------------------------------------------------------------------- ranks


def full(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: full(item) for key, item in value.items()}
    return [full(item) for item in value] if isinstance(value, list | tuple) else value


class Plain(nn.Module):
    """A model without running means, whose sizes do not divide by the ranks."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b = nn.Linear(3, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.b(self.a(x).tanh())
        return out


def sharded(seed: int, n_ranks: int) -> tuple[Any, dict[str, Any], Masters]:
    model: Any = Plain(seed)
    if n_ranks > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (n_ranks,)))
    torch.manual_seed(seed + 50)
    teacher: Any = Plain(seed + 100)
    if n_ranks > 1:
        fully_shard(teacher, mesh=init_device_mesh("cpu", (n_ranks,)))
    return model, {"ema": Average(model), "teacher": teacher}, Masters(model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_distributed_tensors_in_objects_are_resharded(tmp_path: Path, before: int, after: int) -> None:
    """Also state that a new optimizer does not have yet: it gets the placements of its parameter."""

    def start(n_ranks: int, seed: int, *, is_first: bool) -> Callable[[TorchGroup], Any]:
        def work(group: TorchGroup) -> Any:
            model, extra, optimizer = sharded(seed, n_ranks)
            with Checkpointer(tmp_path, signals=(), timeout=30) as made:
                decision = made.resume(model=model, optimizer=optimizer, extra=extra)
                if is_first:
                    train(model, optimizer)
                    extra["ema"].update(model)
                    made.save(2, blocking=True)
                else:
                    assert decision.initial_step == 2
                state = [extra["ema"].state_dict(), dict(extra["teacher"].state_dict()), optimizer.state_dict()]
                saved = full(state)
                if n_ranks > 1:
                    assert isinstance(extra["ema"].shadow["a.weight"], DTensor)
                    assert isinstance(optimizer.inner.state[optimizer.masters[0]]["exp_avg"], DTensor)
                train(model, optimizer)  # it goes on
                after_it = full(dict(model.state_dict()))
            if group.rank == 0:
                torch.save([saved, after_it], tmp_path.parent / f"{tmp_path.name}.{int(is_first)}.pt")
            return None

        return work

    for n_ranks, seed, is_first in ((before, 0, True), (after, 1, False)):
        with Job(n_ranks, start(n_ranks, seed, is_first=is_first)) as job:
            job.values()
    first, second = (torch.load(tmp_path.parent / f"{tmp_path.name}.{n}.pt", weights_only=True) for n in (1, 0))
    assert equal(first[0], second[0])
    for key, value in first[1].items():
        assert torch.allclose(value, second[1][key], atol=1e-5), key
