"""Going on from files of `torch.save` that hold the state of several optimizers, as Lightning lists it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim.lr_scheduler import MultiStepLR, StepLR

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
            "`optimizer_states.b`, which are not items of one list",
        ),
        (
            [AdamW] * 2,
            [AdamW] * 2,
            lambda states: dict(zip("ab", states, strict=True)),
            "which are not items of one list at the top level; the run has 2",
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


SHAPES = ["keys", "numbers", "a list", "a list below a key", "beside others"]


class Several:
    """Optimizers in one, with a `state_dict` that `shape` makes of theirs."""

    def __init__(self, shape: str, optimizers: list[AdamW]) -> None:
        self.shape, self.optimizers = shape, optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for one in self.optimizers for group in one.param_groups]

    def state_dict(self) -> Any:
        states = state(self.optimizers)
        slow = {"state": {0: {"slow": torch.ones(3)}}}
        return {
            "keys": dict(zip("abcd", states, strict=False)),
            "numbers": dict(enumerate(states)),
            "a list": states,
            "a list below a key": {"optimizers": states},
            "beside others": {"base": states[0], "more": states[1:], "slow": slow},
        }[self.shape]

    def load_state_dict(self, saved: Any) -> None:
        """Ignores what it does not find, as some programs do."""
        if self.shape in {"a list", "a list below a key"}:
            states = saved if isinstance(saved, list) else saved.get("optimizers", [])
        elif self.shape == "beside others":
            states = [saved["base"], *saved["more"]] if "slow" in saved else []
        else:
            keys = range(9) if self.shape == "numbers" else "abcd"
            states = [saved[key] for key in keys if key in saved]
        for one, its in zip(self.optimizers, states, strict=False):
            one.load_state_dict(its)


def resumed_as(source: Path, root: Path, model: nn.Module, optimizer: Any, **more: Any) -> None:
    config = {"load_checkpoint": str(source), "resume_training": True}
    with Checkpointer.from_config(config, root=root, signals=()) as checkpointer:
        assert checkpointer.resume(model=model, optimizer=optimizer, **more).initial_step == 3


def saved_as(kind: str, folder: Path, content: dict[str, Any]) -> Path:
    if kind == "file":
        torch.save(content, folder / "last.pt")
        return folder / "last.pt"
    dcp.save(content, checkpoint_id=folder / "step-3", no_dist=True)  # type: ignore[attr-defined]
    return folder / "step-3"


def check_equal(found: list[AdamW], expected: list[AdamW]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert set(one.state) == set(one.param_groups[0]["params"])
        exp_avg = [slots["exp_avg"] for slots in one.state_dict()["state"].values()]
        assert len(exp_avg) == 2
        for a, b in zip(exp_avg, other.state_dict()["state"].values(), strict=True):
            assert torch.equal(a, b["exp_avg"])


@pytest.mark.parametrize(
    ("shape", "n", "key", "kind"),
    [
        *((shape, n, "optimizer", "file") for shape in SHAPES for n in (1, 2)),
        *((shape, n, "optimizer", "DCP") for shape in SHAPES for n in (1, 2)),  # DCP has text for keys that are numbers
        ("keys", 2, "optim", "file"),
        ("keys", 2, "optimizer_states", "file"),
        ("a list", 2, "optimizer_states", "DCP"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_composite_optimizer_gets_its_whole_state(tmp_path: Path, shape: str, n: int, key: str, kind: str) -> None:
    model, optimizers = made([AdamW] * n, lr=0.1, steps=3)
    own: Any = Several(shape, optimizers).state_dict()
    content = {"model": model.state_dict(), key: [own] if key == "optimizer_states" else own, "step": 3}
    found, now = made([AdamW] * n, lr=9)
    resumed_as(saved_as(kind, tmp_path, content), tmp_path / "run", found, Several(shape, now))
    check_equal(now, optimizers)


@pytest.mark.parametrize("kind", ["file", "DCP"])
@pytest.mark.parametrize("is_one", [False, True])
@pytest.mark.parametrize("keys", ["below one", "two"])
@pytest.mark.filterwarnings("ignore")
def test_state_by_the_names_of_parameters_may_lie_below_several_keys(
    tmp_path: Path, keys: str, kind: str, *, is_one: bool
) -> None:
    model, optimizers = made([AdamW] * 2, lr=0.1, steps=3)
    g, d = (get_optimizer_state_dict(model, one) for one in optimizers)
    of_optimizers = {"optimizer": {"g": g, "d": d}} if keys == "below one" else {"optim": g, "optimizer": d}
    source = saved_as(kind, tmp_path, {"model": model.state_dict(), **of_optimizers, "step": 3})
    found, now = made([AdamW] * 2, lr=9)
    one = AdamW([{"params": layer.parameters()} for layer in found])
    resumed_as(source, tmp_path / "run", found, one if is_one else now)
    for layer, expected, optimizer in zip(found, optimizers, [one, one] if is_one else now, strict=True):
        weight: Any = layer.weight
        slots = optimizer.state[weight]
        assert torch.equal(slots["exp_avg"], expected.state_dict()["state"][0]["exp_avg"])


def test_two_lists_of_optimizers_are_not_one(tmp_path: Path) -> None:
    model, optimizers = made([AdamW] * 2, lr=0.1, steps=3)
    first, second = state(optimizers)
    content = {"model": model.state_dict(), "optimizer_states": [first], "optimizers": [second], "step": 3}
    with pytest.raises(MismatchError, match=r"`optimizer_states.0`, `optimizers.0`, which are not items of one list"):
        resumed(tmp_path, content, [AdamW] * 2)


def test_an_optimizer_keeps_the_state_below_its_own_name(tmp_path: Path) -> None:
    model, (first, second) = made([AdamW, Own], lr=0.1, steps=3)
    content = {
        "model": model.state_dict(),
        "optimizer": first.state_dict(),
        "optimizer.1": second.state_dict(),
        "step": 3,
    }
    _, now = resumed(tmp_path, content, [AdamW, Own])
    check_equal(now, [first, second])


@pytest.mark.parametrize("kind", ["file", "DCP"])
@pytest.mark.filterwarnings("ignore")
def test_numbers_that_are_keys_of_the_state_of_a_scheduler_are_numbers_again(tmp_path: Path, kind: str) -> None:
    model, (optimizer,) = made([AdamW], lr=0.1, steps=3)
    scheduler = MultiStepLR(optimizer, [5, 9])
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    source = saved_as(kind, tmp_path, {**content, "step": 3})
    found, (now,) = made([AdamW], lr=9)
    restored = MultiStepLR(now, [100])
    resumed_as(source, tmp_path / "run", found, now, scheduler=restored)
    assert dict(restored.milestones) == {5: 1, 9: 1}
    check_equal([now], [optimizer])


def scheduled(optimizer: AdamW, epoch: int) -> StepLR:
    one = StepLR(optimizer, 2)
    one.load_state_dict({**one.state_dict(), "last_epoch": epoch})
    return one


CONFIGS: list[dict[str, Any]] = [
    {"schedulers": [{"name": "cosine", "warmup": 5}]},
    {"train": {"schedulers": [{"name": "cosine", "warmup": 5}]}},
    {"scheduler": ["x", "y"]},
    {"lr_scheduler": []},
]


@pytest.mark.parametrize(("key", "config"), [*(("config", one) for one in CONFIGS), ("hyper_parameters", CONFIGS[0])])
@pytest.mark.parametrize("is_lightning", [False, True])
def test_lists_in_other_entries_are_no_state_of_schedulers(
    tmp_path: Path, key: str, config: dict[str, Any], *, is_lightning: bool
) -> None:
    model, (optimizer,) = made([AdamW], lr=0.1, steps=3)
    own = scheduled(optimizer, 5).state_dict()
    content = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        **({"lr_schedulers": [own]} if is_lightning else {"scheduler": own}),
        key: config,
        "step": 3,
    }
    torch.save(content, tmp_path / "last.pt")
    found, (now,) = made([AdamW], lr=9)
    with pytest.raises(MismatchError, match=rf"both are state of `scheduler`|does not have `extra\['{key}'\]`"):
        resumed_as(tmp_path / "last.pt", tmp_path / "run", found, now, scheduler=scheduled(now, 0))


@pytest.mark.parametrize("kind", ["file", "DCP"])
@pytest.mark.filterwarnings("ignore")
def test_two_entries_with_the_state_of_one_scheduler_are_refused(tmp_path: Path, kind: str) -> None:
    model, (optimizer,) = made([AdamW], lr=0.1, steps=3)
    own = scheduled(optimizer, 5).state_dict()
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "lr_schedulers": [own], "step": 3}
    found, (now,) = made([AdamW], lr=9)
    scheduler = scheduled(now, 0)
    resumed_as(saved_as(kind, tmp_path, content), tmp_path / "run", found, now, scheduler=scheduler)
    assert scheduler.last_epoch == 5
    (tmp_path / "two").mkdir()
    source = saved_as(kind, tmp_path / "two", {**content, "scheduler": own})
    with pytest.raises(MismatchError, match=r"`(scheduler|lr_schedulers.0)` and `(lr_schedulers.0|scheduler)` of"):
        resumed_as(source, tmp_path / "other", found, now, scheduler=scheduler)


def test_a_list_is_no_state_of_a_scheduler_that_has_none(tmp_path: Path) -> None:
    class Listed:
        def __init__(self, rows: list[dict[str, int]]) -> None:
            self.rows = rows

        def state_dict(self) -> list[dict[str, int]]:
            return self.rows

        def load_state_dict(self, rows: list[dict[str, int]]) -> None:
            self.rows = rows

    model, (optimizer,) = made([AdamW], lr=0.1, steps=3)
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    for key, rows in {"scheduler": [{"a": 1}], "schedulers": [{"a": 1}, {"a": 2}]}.items():
        source = tmp_path / f"{key}.pt"
        torch.save({**content, key: rows}, source)
        own = Listed([{"a": 0}])
        resumed_as(source, tmp_path / key, *made([AdamW], lr=9)[:1], None, strict=False)
        found, (now,) = made([AdamW], lr=9)
        resumed_as(source, tmp_path / f"own-{key}", found, now, scheduler=own)
        assert own.rows == rows
    torch.save({**content, "config": CONFIGS[0]}, tmp_path / "config.pt")
    with pytest.raises(MismatchError, match=r"`config.schedulers` of the checkpoint is a list"):
        resumed_as(tmp_path / "config.pt", tmp_path / "run", found, now, scheduler=scheduled(now, 0))


def test_a_start_from_the_weights_needs_no_schedulers(tmp_path: Path) -> None:
    model, optimizers = made([AdamW] * 2, lr=0.1, steps=3)
    schedulers = [scheduled(one, 5).state_dict() for one in optimizers]
    file = tmp_path / "last.pt"
    torch.save({**LIGHTNING(model, state(optimizers)), "lr_schedulers": schedulers}, file)
    for is_fresh in (True, False):
        found, now = made([AdamW] * 2, lr=9)
        own = scheduled(now[0], 0)
        with Checkpointer(tmp_path / f"run-{is_fresh}", signals=()) as run:
            start = InitFrom(str(file), entry="state_dict", fresh_optimizer=is_fresh)
            run.resume(model=found, optimizer=now, scheduler=own, init_from=start)
        assert own.last_epoch == 0
        assert all(torch.equal(a, b) for a, b in zip(found.parameters(), model.parameters(), strict=True))
        if not is_fresh:
            check_equal(now, optimizers)


@pytest.mark.parametrize("kind", [AdamW, Own])
def test_an_evaluation_leaves_out_the_state_of_several_optimizers(tmp_path: Path, kind: type[AdamW]) -> None:
    model, optimizers = made([kind] * 2, lr=0.1, steps=3)
    torch.save(LIGHTNING(model, state(optimizers)), tmp_path / "last.pt")
    found = made([kind] * 2, lr=9)[0]
    resumed_as(tmp_path / "last.pt", tmp_path / "run", found, None, strict={"unexpected": "skip"})
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), model.parameters(), strict=True))
