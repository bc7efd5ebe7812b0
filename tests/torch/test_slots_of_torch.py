"""State that an optimizer of torch does not make: that of another class, of a program, and damaged state."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from reshard.errors import MismatchError
from reshard.torch import Checkpointer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Make = Callable[[nn.Module], torch.optim.Optimizer]


class Mixed(torch.optim.Optimizer):
    """Muon with an Adam for the other parameters, all in one group."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in itertools.chain.from_iterable(group["params"] for group in self.param_groups):
            slots = ("momentum_buffer",) if p.ndim > 1 else ("exp_avg", "exp_avg_sq")
            self.state[p].update({slot: torch.ones_like(p) for slot in slots})


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


OTHERS: dict[str, Make] = {
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
    "Mixed": lambda model: Mixed(model.parameters()),
    "LBFGS": lambda model: torch.optim.LBFGS(model.parameters()),
}


def made(make: Make = adamw) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    return model, make(model)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value: torch.Tensor = model(torch.ones(5, 3)).square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    loss()
    optimizer.step(loss)  # type: ignore[arg-type]


def run(root: Path, make: Make = adamw, *, edit: Callable[[Any, Any], object] | None = None, **given: Any) -> Any:
    """Save after a step, or go on from there, with another step."""
    model, optimizer = made(make)
    with Checkpointer(root, signals=(), async_save=False) as checkpointer:
        checkpointer.resume(model=model, optimizer=optimizer, **given)
        loaded = {name: dict(optimizer.state.get(p, {})) for name, p in model.named_parameters()}
        step(model, optimizer)
        if edit is not None:
            edit(model, optimizer)
            checkpointer.save(1, blocking=True)
    return loaded


@pytest.mark.parametrize("name", OTHERS)
def test_state_of_another_class_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    run(tmp_path, OTHERS[name], edit=lambda *_: None)
    with pytest.raises(MismatchError, match=rf"was saved with optimizer {name}, and now has AdamW\n.*other_optimizer"):
        run(tmp_path)
    loaded = run(tmp_path, strict={"other_optimizer": "skip"})
    assert not any(loaded.values())
    assert "it starts with new optimizer state" in caplog.text


def test_slots_of_the_program_are_loaded(tmp_path: Path) -> None:
    def own(model: Any, optimizer: Any) -> None:
        optimizer.state[model[0].weight]["ema"] = torch.full((3, 3), 2.0)
        optimizer.state[model[0].bias].update(mask=torch.tensor([True, False, True]), rows=torch.arange(5))
        optimizer.state[model[1].weight]["note"] = "text"

    run(tmp_path, edit=own)
    loaded = run(tmp_path)
    assert torch.equal(loaded["0.weight"]["ema"], torch.full((3, 3), 2.0))
    assert loaded["0.bias"]["mask"].tolist() == [True, False, True]
    assert loaded["0.bias"]["rows"].tolist() == [0, 1, 2, 3, 4]
    assert loaded["1.weight"]["note"] == "text"
    assert all({"step", "exp_avg", "exp_avg_sq"} <= slots.keys() for slots in loaded.values())


def test_a_parameter_with_slots_of_the_program_alone(tmp_path: Path) -> None:
    def untrained(model: nn.Module) -> torch.optim.Optimizer:
        model[0].bias.requires_grad_(False)  # type: ignore[index]
        return adamw(model)

    run(tmp_path, untrained, edit=lambda model, of: of.state[model[0].bias].update(ema=torch.ones(3)))
    assert run(tmp_path, untrained)["0.bias"].keys() == {"ema"}


DAMAGED: dict[str, tuple[dict[str, Any], str]] = {
    "one element": ({"exp_avg": torch.ones(1)}, r"`exp_avg.0.weight` is F32 of shape \(1,\); of AdamW"),
    "another shape": ({"exp_avg": torch.ones(3)}, r"`exp_avg.0.weight` is F32 of shape \(3,\); of AdamW"),
    "booleans": ({"exp_avg_sq": torch.ones(3, 3).bool()}, "`exp_avg_sq.0.weight` is BOOL"),
    "steps": ({"step": torch.ones(3)}, r"`step.0.weight` is F32 of shape \(3,\); of AdamW it is one number"),
    "no slot": ({"exp_avg": None}, "`0.weight` has `exp_avg_sq`, `step`, and lacks `exp_avg`"),
    "no step": ({"step": None}, "`0.weight` has `exp_avg`, `exp_avg_sq`, and lacks `step`"),
    "another optimizer": (
        {"exp_avg": None, "exp_avg_sq": None, "row_var": torch.ones(3, 1)},
        "has `step`, and lacks `exp_avg`, `exp_avg_sq`, which AdamW keeps",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_state_is_refused_or_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str) -> None:
    slots, message = DAMAGED[case]

    def edit(model: Any, optimizer: Any) -> None:
        state = optimizer.state[model[0].weight]
        state.update(slots)
        for slot in [slot for slot, one in state.items() if one is None]:
            del state[slot]

    run(tmp_path, edit=edit)
    with pytest.raises(MismatchError, match=message):
        run(tmp_path)
    loaded = run(tmp_path, strict=False)
    assert not loaded["0.weight"]
    assert loaded["0.bias"].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert "`0.weight` starts with new optimizer state" in caplog.text
