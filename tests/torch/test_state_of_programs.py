"""State that a program changes while it trains, beside tensors and options: flags, hooks, arrays, metrics, orders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import reshard
from reshard.errors import ArgumentError, MismatchError, UnsupportedError
from reshard.torch import Checkpointer

if TYPE_CHECKING:
    from pathlib import Path


def layers() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def told(start: Any) -> list[str]:
    """The warnings about frozen parameters."""
    return [line for line in start.warnings if "requires_grad" in line]


def step(model: Any, optimizer: Any) -> None:
    model(torch.ones(1, 2)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def run(root: Path, n_steps: int, *, changes: bool = True, frozen: bool = True, stop: int | None = None) -> Any:
    """Train; at step 2 the first layer is no longer frozen, and the second one is."""
    model = layers()
    model[0].requires_grad_(not frozen)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    with Checkpointer(root, save_every=3, signals=(), async_save=False) as checkpointer:
        start = checkpointer.resume(model=model, optimizer=optimizer)
        for number in range(start.initial_step + 1, n_steps + 1):
            if number == 2 and changes:
                model[0].requires_grad_(requires_grad=True)
                model[1].bias.requires_grad_(requires_grad=False)
            step(model, optimizer)
            checkpointer.step(number)
            if number == stop:
                break
    return start, model


def test_parameters_that_a_run_freezes_or_trains_later_go_on_so(tmp_path: Path) -> None:
    _, whole = run(tmp_path / "whole", 6)
    run(tmp_path / "torn", 6, stop=3)
    start, model = run(tmp_path / "torn", 6)
    assert start.initial_step == 3
    assert not told(start)
    assert [one.requires_grad for one in model.parameters()] == [True, True, True, False]
    assert all(map(torch.equal, model.parameters(), whole.parameters()))
    start, model = run(tmp_path / "torn", 7)  # saved by the resumed run
    assert (start.initial_step, told(start)) == (6, [])
    assert [one.requires_grad for one in model.parameters()] == [True, True, True, False]


@pytest.mark.parametrize("frozen", [True, False])
def test_a_program_that_freezes_other_parameters_is_told(tmp_path: Path, *, frozen: bool) -> None:
    run(tmp_path, 3, changes=False, frozen=not frozen)
    start, model = run(tmp_path, 4, changes=False, frozen=frozen)
    was, now = ("trained", "frozen") if frozen else ("frozen", "trained")
    [line] = told(start)
    assert line.startswith(f"`0.weight`, `0.bias` were {was} when the checkpoint was saved, and are {now} in the")
    assert [one.requires_grad for one in model[0].parameters()] == [not frozen] * 2


def test_an_evaluation_is_told_nothing_of_frozen_parameters(tmp_path: Path) -> None:
    run(tmp_path, 3, changes=False)
    model = layers().requires_grad_(requires_grad=False)
    start = Checkpointer(tmp_path, signals=()).resume(model=model)
    assert not told(start)


def test_frozen_parameters_are_renamed_with_the_others(tmp_path: Path) -> None:
    run(tmp_path / "run", 3)
    reshard.convert(
        tmp_path / "run", tmp_path / "new", to="checkpoint2", select=reshard.options.Select(rename={"1.": "2."})
    )
    with reshard.open(tmp_path / "new") as checkpoint:
        assert checkpoint.extra()["trainer"]["frozen"] == {
            "always": [],
            "now": ["2.bias"],
            "started": ["0.bias", "0.weight"],
        }


def test_state_that_hooks_add_to_the_state_dict_of_an_optimizer_comes_back(tmp_path: Path) -> None:
    def make(n: int) -> Any:
        model, box = layers(), {"n": n}
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

        def add(_: Any, state: dict[str, Any]) -> dict[str, Any]:
            return {**state, "n": box["n"]}

        def take(_: Any, state: dict[str, Any]) -> dict[str, Any]:
            box["n"] = state.pop("n")
            return state

        optimizer.register_state_dict_post_hook(add)
        optimizer.register_load_state_dict_pre_hook(take)
        return model, optimizer, box

    model, optimizer, _ = make(7)
    with Checkpointer(tmp_path, signals=()) as checkpointer:
        checkpointer.resume(model=model, optimizer=optimizer)
        step(model, optimizer)
        checkpointer.save(1, blocking=True)
    other, again, box = make(0)
    Checkpointer(tmp_path, signals=()).resume(model=other, optimizer=again)
    assert box == {"n": 7}
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[one]["momentum_buffer"], again.state[two]["momentum_buffer"])


class Own(torch.optim.AdamW):
    """Has a `state_dict` of its own, so that it is saved whole."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict()


class Other(Own):
    """Another class."""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: Own([*model[1].parameters(), *model[0].parameters()]), "`1.weight` instead of `0.weight`"),
        (lambda model: Own(model[0].parameters()), "`none` instead of `1.weight`"),
        (lambda model: Other(model.parameters()), "`optimizer` was saved as Own, and is now Other"),
    ],
)
def test_an_optimizer_that_numbers_its_parameters_has_the_saved_ones(tmp_path: Path, make: Any, message: str) -> None:
    model = layers()
    optimizer = Own(model.parameters())
    with Checkpointer(tmp_path, signals=()) as checkpointer:
        checkpointer.resume(model=model, optimizer=optimizer)
        step(model, optimizer)
        checkpointer.save(1, blocking=True)
    again = layers()
    Checkpointer(tmp_path, signals=()).resume(model=again, optimizer=Own(again.parameters()))
    with pytest.raises(MismatchError, match=message):
        Checkpointer(tmp_path, signals=()).resume(model=again, optimizer=make(again))
    other = make(again)
    start = Checkpointer(tmp_path, signals=()).resume(model=again, optimizer=other, strict={"other_optimizer": "skip"})
    assert any("its saved state is not loaded" in line for line in start.warnings)
    assert not other.state


def test_arrays_and_tuples_in_a_dict_are_restored_in_place(tmp_path: Path) -> None:
    def values(n: int) -> Any:
        array, tensor, inner = np.full(3, n), torch.full((2,), n), [n]
        return {"array": array, "pair": (tensor, inner), "other": np.full(n, 1)}, array, tensor, inner

    given = values(5)[0]
    with Checkpointer(tmp_path, signals=()) as checkpointer:
        checkpointer.resume(model=layers(), extra={"values": given})
        checkpointer.save(1, blocking=True)
    held, array, tensor, inner = values(0)
    Checkpointer(tmp_path, signals=()).resume(model=layers(), extra={"values": held})
    assert (array.tolist(), tensor.tolist(), inner) == ([5, 5, 5], [5, 5], [5])
    assert held["array"] is array
    assert held["pair"][0] is tensor
    assert held["other"].tolist() == [1] * 5


def test_a_metric_goes_on_with_what_it_has_counted(tmp_path: Path) -> None:
    torchmetrics: Any = pytest.importorskip("torchmetrics")

    def metric() -> Any:
        return torchmetrics.MetricCollection([torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError()])

    whole = metric()
    whole.update(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
    with Checkpointer(tmp_path, signals=()) as checkpointer:
        checkpointer.resume(model=layers(), extra={"metric": whole})
        whole.update(torch.tensor([3.0]), torch.tensor([8.0]))
        checkpointer.save(1, blocking=True)
    again = metric()
    Checkpointer(tmp_path, signals=()).resume(model=layers(), extra={"metric": again})
    assert again.compute() == whole.compute()
    for one in (whole, again):
        one.update(torch.tensor([3.0]), torch.tensor([9.0]))
    assert again.compute() == whole.compute()
    with pytest.raises(MismatchError, match=r"`MeanSquaredError`.*no such metric"):
        Checkpointer(tmp_path, signals=()).resume(model=layers(), extra={"metric": torchmetrics.MeanMetric()})


def test_an_object_without_methods_is_still_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="of type Generator, without `state_dict`"):
        Checkpointer(tmp_path, signals=()).resume(model=layers(), extra={"stream": torch.Generator()})


def test_adapters_in_use_are_compared_and_merged_ones_refused(tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft")

    def make() -> Any:
        made = peft.get_peft_model(layers(), peft.LoraConfig(target_modules=["0"], r=2))
        made.add_adapter("more", peft.LoraConfig(target_modules=["0"], r=2))
        return made

    model = make()
    with Checkpointer(tmp_path, signals=()) as checkpointer:
        checkpointer.resume(model=model)
        model.set_adapter("more")
        checkpointer.save(1, blocking=True)
        model.merge_adapter()
        with pytest.raises(UnsupportedError, match=r"adapters are merged into the weight of `base_model\.model\.0`"):
            checkpointer.save(2, blocking=True)
    start = Checkpointer(tmp_path, signals=()).resume(model=make())
    [line] = [one for one in start.warnings if "adapters" in one]
    assert "active_adapters=['more']" in line
    with pytest.raises(UnsupportedError, match="merged"):
        Checkpointer(tmp_path, signals=()).resume(model=model)


def test_extra_state_that_is_not_loaded_is_refused_before_the_first_step(tmp_path: Path) -> None:
    class Lossy(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"n": 1}

    with pytest.raises(UnsupportedError, match=r"`0`.*Lossy.*`get_extra_state`, and not `set_extra_state`"):
        Checkpointer(tmp_path, signals=(), save_every=1).resume(model=nn.Sequential(Lossy(1, 1)))
