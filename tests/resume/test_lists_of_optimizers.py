"""Going on from files of `torch.save` that hold the state of several optimizers, as Lightning lists it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from reshard import InitFrom
from reshard.errors import MismatchError
from reshard.torch import Checkpointer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

AdamW = torch.optim.AdamW


class Own(AdamW):
    """An optimizer whose state is not assigned to parameters."""

    def state_dict(self) -> dict[str, Any]:
        return dict(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)


def made(kinds: list[type[AdamW]], *, lr: float, steps: int = 0) -> tuple[nn.Sequential, list[AdamW]]:
    torch.manual_seed(steps)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in kinds))
    optimizers = [
        kind(layer.parameters(), lr=lr * (n + 1)) for n, (kind, layer) in enumerate(zip(kinds, model, strict=True))
    ]
    for _ in range(steps):
        model(torch.randn(5, 3)).square().sum().backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
    return model, optimizers


def state(optimizers: list[AdamW]) -> list[dict[str, Any]]:
    return [one.state_dict() for one in optimizers]


LIGHTNING: Callable[[nn.Module, list[Any]], dict[str, Any]] = lambda model, states: {  # noqa: E731
    "state_dict": model.state_dict(),
    "optimizer_states": states,
    "global_step": 3,
}
LAYOUTS: dict[str, Callable[[nn.Module, list[Any]], dict[str, Any]]] = {
    "Lightning": LIGHTNING,
    "a list": lambda model, states: {"model": model.state_dict(), "optimizer": states, "step": 3},
    "keys": lambda model, states: {
        "model": model.state_dict(),
        **{f"optimizer.{n}": one for n, one in enumerate(states)},
        "step": 3,
    },
}


def resumed(folder: Path, content: dict[str, Any], kinds: list[type[AdamW]]) -> tuple[nn.Sequential, list[AdamW]]:
    torch.save(content, folder / "last.pt")
    model, optimizers = made(kinds, lr=9)
    config = {"load_checkpoint": str(folder / "last.pt"), "resume_training": True}
    with Checkpointer.from_config(config, root=folder / "run") as checkpointer:
        assert checkpointer.resume(model=model, optimizer=optimizers).initial_step == 3
    return model, optimizers


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kinds", [[AdamW] * 2, [Own] * 2, [Own, AdamW], [AdamW, Own], [AdamW, Own, AdamW], [Own]])
def test_each_optimizer_gets_its_state(tmp_path: Path, kinds: list[type[AdamW]], layout: str) -> None:
    model, optimizers = made(kinds, lr=0.1, steps=3)
    found, loaded = resumed(tmp_path, LAYOUTS[layout](model, state(optimizers)), kinds)
    for one, expected in zip(loaded, optimizers, strict=True):
        assert one.param_groups[0]["lr"] == expected.param_groups[0]["lr"]
        for number, slots in expected.state_dict()["state"].items():
            for slot, value in slots.items():
                assert torch.equal(one.state_dict()["state"][number][slot], value), (number, slot)
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("kinds", "now", "change", "message"),
    [
        ([AdamW] * 2, [AdamW] * 3, list, "the state of 2 optimizers, .*; the run has 3"),
        ([AdamW] * 3, [AdamW] * 2, list, "the state of 3 optimizers, .*; the run has 2"),
        ([Own] * 2, [Own] * 3, list, "the state of 2 optimizers, .*; the run has 3"),
        ([Own] * 3, [Own, AdamW], list, "the state of 3 optimizers, .*; the run has 2"),
        ([Own] * 2, [Own] * 2, lambda states: states[0], r"`extra\['optimizer.0'\]`|optimizer.0"),
        (
            [Own] * 2,
            [Own] * 2,
            lambda states: dict(zip("ab", states, strict=True)),
            "`optimizer_states.b`, which are not numbered",
        ),
        (
            [AdamW] * 2,
            [AdamW] * 2,
            lambda states: dict(zip("ab", states, strict=True)),
            "which are not numbered; the run has 2",
        ),
    ],
)
def test_other_optimizers_are_refused(
    tmp_path: Path, kinds: list[type[AdamW]], now: list[type[AdamW]], change: Callable[[list[Any]], Any], message: str
) -> None:
    model, optimizers = made(kinds, lr=0.1, steps=3)
    content = LIGHTNING(model, change(state(optimizers)))
    content["state_dict"] = made(now, lr=1)[0].state_dict()
    with pytest.raises(MismatchError, match=message):
        resumed(tmp_path, content, now)


@pytest.mark.parametrize("n_schedulers", [1, 2])
def test_each_scheduler_gets_its_state(tmp_path: Path, n_schedulers: int) -> None:
    def schedulers(optimizers: list[AdamW]) -> list[StepLR]:
        return [StepLR(one, 2 + n) for n, one in enumerate(optimizers[:n_schedulers])]

    model, optimizers = made([AdamW] * 2, lr=0.1, steps=3)
    trained = schedulers(optimizers)
    for one in trained:
        one.load_state_dict({**one.state_dict(), "last_epoch": 5})
    states = [one.state_dict() for one in trained]
    content = LIGHTNING(model, state(optimizers))
    file = tmp_path / "last.pt"

    def restored(listed: list[Any], root: str) -> list[dict[str, Any]]:
        torch.save({**content, "lr_schedulers": listed}, file)
        found, now = made([AdamW] * 2, lr=9)
        own = schedulers(now)
        config = {"load_checkpoint": str(file), "resume_training": True}
        with Checkpointer.from_config(config, root=tmp_path / root) as checkpointer:
            checkpointer.resume(model=found, optimizer=now, scheduler=own)
        return [one.state_dict() for one in own]

    assert restored(states, "run") == states
    with pytest.raises(MismatchError, match=f"has the state of {n_schedulers + 1} schedulers, and the run has"):
        restored([*states, states[0]], "other")
    with pytest.raises(MismatchError, match="scheduler"):
        restored([], "none")


def test_groups_of_several_optimizers_are_compared(tmp_path: Path) -> None:
    model, optimizers = made([AdamW] * 2, lr=0.1, steps=3)
    states = state(optimizers)
    states[1]["param_groups"][0]["params"].pop()
    with pytest.raises(
        MismatchError, match=r"in groups of \[2\] and of \[1\]; the run has groups of \[2\] and of \[2\]"
    ):
        resumed(tmp_path, LIGHTNING(model, states), [AdamW] * 2)


@pytest.mark.parametrize("now", [[AdamW], [Own] * 3, [AdamW, Own, AdamW]])
def test_a_start_from_the_weights_needs_no_optimizers(tmp_path: Path, now: list[type[AdamW]]) -> None:
    model, optimizers = made(now, lr=0.1, steps=3)
    states = state(optimizers) + state(made([AdamW], lr=1, steps=1)[1])
    torch.save(LIGHTNING(model, states), tmp_path / "last.pt")
    found, new = made(now, lr=9)
    with Checkpointer(tmp_path / "run", signals=()) as run:
        run.resume(model=found, optimizer=new, init_from=InitFrom(str(tmp_path / "last.pt"), entry="state_dict"))
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), model.parameters(), strict=True))
    assert not any(one.state_dict()["state"] for one in new)
