"""A run whose program differs from the one that saved in one thing: a scheduler, a constant, tied weights."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from reshard.errors import MismatchError

torch = pytest.importorskip("torch")

from reshard.torch import Checkpointer  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

S = torch.optim.lr_scheduler

KINDS: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda o: S.CosineAnnealingLR(o, 20),
    "plateau": lambda o: S.ReduceLROnPlateau(o, patience=1),
    "onecycle": lambda o: S.OneCycleLR(o, 0.1, total_steps=40),
    "sequential": lambda o: S.SequentialLR(o, [S.LinearLR(o, 0.1, total_iters=5), S.StepLR(o, 15)], [5]),
    "other child": lambda o: S.SequentialLR(o, [S.LinearLR(o, 0.1, total_iters=5), S.ExponentialLR(o, 0.5)], [5]),
    "chained": lambda o: S.ChainedScheduler([S.ConstantLR(o, 0.1, 2), S.ExponentialLR(o, 0.9)]),
}


def resume(root: Path, make: Callable[[Any], Any], *, save: bool = False, strict: Any = True) -> tuple[Any, Any]:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = make(optimizer)
    with Checkpointer(root, signals=(), async_save=False) as checkpointer:
        decision = checkpointer.resume(model=model, optimizer=optimizer, scheduler=scheduler, strict=strict)
        if save:
            for _ in range(3):
                optimizer.step()
                scheduler.step(*((1.0,) if isinstance(scheduler, S.ReduceLROnPlateau) else ()))
            checkpointer.save(3, blocking=True)
    return decision, scheduler


def test_a_scheduler_of_another_class_or_with_other_children_is_refused(tmp_path: Path) -> None:
    for name, make in KINDS.items():
        resume(tmp_path / name, make, save=True)
    for saved, now in itertools.product(KINDS, KINDS):
        if saved == now:
            decision, _ = resume(tmp_path / saved, KINDS[now])
            assert not any("scheduler" in line for line in decision.warnings)
            continue
        with pytest.raises(MismatchError, match="`scheduler` was saved as"):
            resume(tmp_path / saved, KINDS[now])
    decision, scheduler = resume(tmp_path / "cosine", KINDS["onecycle"], strict={"other_optimizer": "skip"})
    assert any("was saved as CosineAnnealingLR, and is now OneCycleLR" in line for line in decision.warnings)
    assert not hasattr(scheduler, "T_max")


@pytest.mark.parametrize(
    ("word", "make"),
    [
        ("T_max", S.CosineAnnealingLR),
        ("eta_min", lambda o, n: S.CosineAnnealingLR(o, 50, eta_min=n / 1000)),
        ("total_steps", lambda o, n: S.OneCycleLR(o, 0.1, total_steps=n)),
        ("step_size", S.StepLR),
        ("milestones", lambda o, n: S.MultiStepLR(o, [5, n])),
        ("T_0", S.CosineAnnealingWarmRestarts),
        ("patience", lambda o, n: S.ReduceLROnPlateau(o, patience=n)),
        ("total_iters", lambda o, n: S.SequentialLR(o, [S.ConstantLR(o, 0.5, 2), S.PolynomialLR(o, n)], [2])),
        ("milestones", lambda o, n: S.SequentialLR(o, [S.ConstantLR(o, 0.5, 2), S.StepLR(o, 5)], [n])),
        ("gamma", lambda o, n: S.ChainedScheduler([S.ConstantLR(o, 0.1, 2), S.ExponentialLR(o, 1 - n / 100)])),
    ],
)
def test_another_constant_of_a_scheduler_is_told(tmp_path: Path, word: str, make: Callable[[Any, int], Any]) -> None:
    resume(tmp_path, lambda o: make(o, 10), save=True)
    decision, _ = resume(tmp_path, lambda o: make(o, 20))
    told = [line for line in decision.warnings if "in the program" in line]
    assert len(told) == 1
    assert f"`{word}`" in told[0]
    decision, _ = resume(tmp_path, lambda o: make(o, 10))
    assert not [line for line in decision.warnings if "in the program" in line]


class Two(torch.nn.Module):  # type: ignore[name-defined,misc]
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(8, 4)
        self.head = torch.nn.Linear(4, 8, bias=False)
        if tied:
            self.head.weight = self.table.weight


@pytest.mark.parametrize("how", ["resume", "init_from"])
def test_two_tensors_that_are_one_in_the_run_must_be_equal(tmp_path: Path, how: str) -> None:
    def run(root: str, *, tied: bool, equal: bool, moments: bool = False, strict: bool = True) -> Any:
        model = Two(tied=tied)
        if equal:
            with torch.no_grad():
                model.head.weight.copy_(model.table.weight)
        optimizer = torch.optim.SGD(model.parameters(), 0.0, momentum=0.9)
        with Checkpointer(tmp_path / root, signals=(), async_save=False) as checkpointer:
            start: dict[str, Any] = {"init_from": tmp_path / root[:1]} if len(root) > 1 else {}
            decision = checkpointer.resume(model=model, optimizer=optimizer, strict=strict, **start)
            if not tied:
                for parameter in model.parameters():
                    parameter.grad = torch.rand(8, 4) if moments else torch.ones(8, 4)
                optimizer.step()
                checkpointer.save(1, blocking=True)
        return decision

    end = "" if how == "resume" else "-from"
    run("a", tied=False, equal=False)
    with pytest.raises(MismatchError, match=r"table\.weight.*head\.weight.*differ"):
        run("a" + end, tied=True, equal=False)
    assert any("differ" in line for line in run("a" + end, tied=True, equal=False, strict=False).warnings)
    run("b", tied=False, equal=True)
    run("b" + end, tied=True, equal=True)
    if how == "resume":
        run("c", tied=False, equal=True, moments=True)
        with pytest.raises(MismatchError, match="momentum_buffer"):
            run("c", tied=True, equal=True)
