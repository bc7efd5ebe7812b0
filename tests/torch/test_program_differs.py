"""A run whose program differs from the one that saved in one thing: a scheduler, a constant, tied weights."""

from __future__ import annotations

import functools
import itertools
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from reshard import per_rank
from reshard.config import Config
from reshard.errors import MismatchError
from reshard.resume import RunFacts
from reshard.verbs.explain import explain

torch = pytest.importorskip("torch")

pytest.importorskip("torchdata")

from tests.helpers import differences  # noqa: E402

from reshard.torch import Checkpointer, ElasticSampler  # noqa: E402

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


@pytest.mark.slow
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


@pytest.mark.slow(disk=False)
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


@pytest.mark.slow(disk=False)
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


class Warmup:
    """A scheduler that is none of torch: a constant, and a value that it moves."""

    def __init__(self, optimizer: Any, warm: int) -> None:
        self.optimizer, self.n_warm, self.n_done = optimizer, warm, 0

    def step(self) -> None:
        self.n_done += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 * min(1, self.n_done / self.n_warm)

    def state_dict(self) -> dict[str, int]:
        return {"n_warm": self.n_warm, "n_done": self.n_done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


def cosine_lambda(step: int, *, total: int) -> float:
    return max(0.0, 1 - step / total)


def rates(total: int) -> Any:
    return lambda step: 1 / (1 + step / total)


PROGRAMS: dict[str, tuple[str, Callable[[int], tuple[dict[str, Any], Any]]]] = {
    "lr": ("lr", lambda n: ({"lr": n / 100}, None)),
    "weight_decay": ("weight_decay", lambda n: ({"weight_decay": n / 100}, None)),
    "betas": ("betas", lambda n: ({"betas": (0.9, 1 - 1 / n)}, None)),
    "eps": ("eps", lambda n: ({"eps": n * 1e-9}, None)),
    "lr with a schedule": ("lr", lambda n: ({"lr": n / 100}, lambda o: S.StepLR(o, 2))),
    "max_lr": ("max_lr", lambda n: ({}, lambda o: S.OneCycleLR(o, n / 100, total_steps=40))),
    "total_steps": ("total_steps", lambda n: ({}, lambda o: S.OneCycleLR(o, 0.1, total_steps=n))),
    "base_lr": ("base_lr", lambda n: ({}, lambda o: S.CyclicLR(o, n / 1000, 0.1, cycle_momentum=False))),
    "T_max": ("T_max", lambda n: ({}, lambda o: S.CosineAnnealingLR(o, n))),
    "not of torch": ("n_warm", lambda n: ({}, lambda o: Warmup(o, n))),
    "partial": ("total", lambda n: ({}, lambda o: S.LambdaLR(o, functools.partial(cosine_lambda, total=n)))),
    "closure": ("total", lambda n: ({}, lambda o: S.LambdaLR(o, rates(n)))),
}


def run_program(root: Path, options: dict[str, Any], make: Any, n_steps: int = 0, **given: Any) -> Any:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    scheduler = None if make is None else make(optimizer)
    with Checkpointer(root, signals=(), async_save=False) as checkpointer:
        decision = checkpointer.resume(model=model, optimizer=optimizer, scheduler=scheduler, **given)
        for step in range(decision.initial_step + 1, decision.initial_step + n_steps + 1):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            checkpointer.step(step, save=step == decision.initial_step + n_steps)
    told = [line for line in decision.warnings if "in the program" in line]
    return told, optimizer.param_groups[0], scheduler


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_setting_that_differs_is_told_once_and_one_side_wins(name: str, tmp_path: Path) -> None:
    word, make = PROGRAMS[name]
    run_program(tmp_path, *make(10), n_steps=3)
    assert run_program(tmp_path, *make(10))[0] == []
    told, saved, _ = run_program(tmp_path, *make(20))
    assert len(told) == 1, told
    assert told[0].startswith(f"`{word}` of `")
    assert ("the program's value" in told[0]) == (name in {"partial", "closure"})
    if word in {"weight_decay", "eps", "betas"}:
        assert saved[word] == make(10)[0][word]
    for field in ("scheduler", "optimizer"):
        other, group, _ = run_program(tmp_path, *make(20), settings={field: "program"})
        assert len(other) == 1
        if "the program's value" in other[0] and word in {"weight_decay", "eps", "betas"}:
            assert group[word] == make(20)[0][word]
    with pytest.raises(MismatchError, match=rf"`{word}` of .* in the checkpoint, and .* in the program"):
        run_program(tmp_path, *make(20), settings={"scheduler": "error", "optimizer": "error"})


def test_what_is_in_effect_is_recorded(tmp_path: Path) -> None:
    """A run that goes on with the saved settings is compared with these at its next start, too."""
    run_program(tmp_path, {"weight_decay": 0.1}, lambda o: S.StepLR(o, 5), n_steps=2)
    for _ in range(2):
        assert len(run_program(tmp_path, {"weight_decay": 0.2}, lambda o: S.StepLR(o, 6), n_steps=2)[0]) == 2
    assert run_program(tmp_path, {"weight_decay": 0.1}, lambda o: S.StepLR(o, 5))[0] == []
    both = {"scheduler": "program", "optimizer": "program"}
    told, _, scheduler = run_program(
        tmp_path, {"weight_decay": 0.2}, lambda o: S.StepLR(o, 6), n_steps=2, settings=both
    )
    assert len(told) == 2
    assert (scheduler.step_size, scheduler.last_epoch) == (6, 8)
    assert run_program(tmp_path, {"weight_decay": 0.2}, lambda o: S.StepLR(o, 6))[0] == []


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("kind", ["cosine", "lambda", "onecycle", "step"])
def test_the_schedule_of_the_program_goes_on_at_the_saved_step(kind: str, tmp_path: Path) -> None:
    made: dict[str, Callable[[Any, int], Any]] = {
        "cosine": S.CosineAnnealingLR,
        "lambda": lambda o, n: S.LambdaLR(o, functools.partial(cosine_lambda, total=n)),
        "onecycle": lambda o, n: S.OneCycleLR(o, 0.1, total_steps=n),
        "step": lambda o, n: S.StepLR(o, n // 10),
    }
    program = {"scheduler": "program"}
    run_program(tmp_path / "a", {}, lambda o: made[kind](o, 20), n_steps=4)
    _, group, _ = run_program(tmp_path / "a", {}, lambda o: made[kind](o, 40), n_steps=3, settings=program)
    _, expected, _ = run_program(tmp_path / "b", {}, lambda o: made[kind](o, 40), n_steps=7)
    assert group["lr"] == pytest.approx(expected["lr"])


def test_the_learning_rate_of_the_program_is_that_of_its_schedule(tmp_path: Path) -> None:
    for kind in (lambda o: S.StepLR(o, 2), lambda o: S.ReduceLROnPlateau(o, patience=1), None):
        root = tmp_path / str(id(kind))
        model = torch.nn.Linear(2, 1)
        for lr, settings in ((0.1, None), (0.4, {"optimizer": "program"})):
            optimizer = torch.optim.SGD(model.parameters(), lr)
            scheduler: Any = kind and kind(optimizer)
            with Checkpointer(root, signals=(), async_save=False) as checkpointer:
                start = checkpointer.resume(
                    model=model, optimizer=optimizer, scheduler=scheduler, settings=settings
                ).initial_step
                assert start or settings is None
                if settings is None:
                    for _ in range(4 if scheduler else 0):
                        optimizer.step()
                        scheduler.step(*([1.0] if isinstance(scheduler, S.ReduceLROnPlateau) else []))
                    saved = optimizer.param_groups[0]["lr"]
                    checkpointer.save(4, blocking=True)
                else:
                    assert optimizer.param_groups[0]["lr"] == pytest.approx(4 * saved)


def test_a_run_goes_on_with_another_dataset(tmp_path: Path) -> None:
    def start(n: int, **given: Any) -> tuple[Any, ElasticSampler]:
        sampler = ElasticSampler(n, seed=1, shuffle=True, global_batch_size=4, rank=0, world_size=1)
        model = torch.nn.Linear(2, 1)
        with Checkpointer(tmp_path, signals=(), async_save=False) as checkpointer:
            decision = checkpointer.resume(model=model, sampler=sampler, **given)
            for step in (1, 2):
                checkpointer.step(decision.initial_step + step, save=step == 2)
        return decision, sampler

    start(16)
    with pytest.raises(MismatchError, match=r'`resume\(data="new"\)`'):
        start(20)
    decision, sampler = start(20, data="new")
    assert decision.initial_step == 2
    assert decision.consumed_samples == 0
    assert "data position" not in decision.restored
    assert [line for line in decision.warnings if 'data="new"' in line]
    assert (sampler.epoch, sampler.consumed) == (0, 8)
    decision, sampler = start(20)  # a restart within the new data
    assert (decision.initial_step, sampler.consumed) == (4, 16)


def test_resume_and_explain_list_the_same_parts(tmp_path: Path) -> None:
    def start(**more: Any) -> Any:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        given = {"scheduler": S.StepLR(optimizer, 7), "extra": {"n": {"n": 1}, "own": per_rank({"m": 2})}, **more}
        with Checkpointer(tmp_path, signals=(), async_save=False) as checkpointer:
            decision = checkpointer.resume(model=model, optimizer=optimizer, **given)
            if decision.fresh:
                model(torch.ones(2)).sum().backward()
                optimizer.step()
                checkpointer.step(1, save=True)
        return decision

    for sampler in (None, ElasticSampler(16, seed=1, shuffle=True, global_batch_size=4, rank=0, world_size=1)):
        shutil.rmtree(tmp_path)
        start(sampler=sampler)
        decision = start(sampler=sampler)
        answer = explain(Config(str(tmp_path), resume=True), RunFacts())
        assert answer.decision is not None
        assert answer.decision.restored == decision.restored
        parts = ("scheduler", "extra['n']", "extra['own']", "random streams", "data position")
        assert decision.restored == ("weights", "optimizer", "counters", *parts[: 4 + (sampler is not None)])
        assert any("scheduler: step_size=7" in line for line in answer.settings)
        assert any("AdamW, group 0: lr=0.001" in line for line in answer.settings)


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs that several rows begin with."""
    return tmp_path_factory.mktemp("differences")


@pytest.mark.slow(disk=False)
@pytest.mark.filterwarnings("ignore")  # of schedulers, when steps are counted
@pytest.mark.parametrize("number", range(len(differences.ROWS)))
def test_what_happens_for_each_difference_is_what_the_guide_says(number: int, saved_once: Path) -> None:
    kind, what, expected, saved, now = differences.ROWS[number]
    word, message = differences.outcome(saved_once, kind, saved, now)
    assert word == expected, message
    written = differences.on_page()
    hint = "`python -m tests.helpers.differences` writes the table of the guide"
    assert len(written) == len(differences.ROWS), hint
    assert written[number] == differences.row(kind, what, word, message), hint
