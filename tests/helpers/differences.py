"""Runs whose program differs in one thing from the one that saved, and what happens for each: the table of a guide.

python -m tests.helpers.differences    # writes the table into docs/guides/pytorch.md
"""

# ruff: noqa: E501  a row of the table is a line

from __future__ import annotations

import functools
import re
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tests.helpers.ranks import Job
from torch import nn
from torch.optim import lr_scheduler as S  # noqa: N812
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from reshard import per_rank
from reshard.errors import ReshardError
from reshard.torch import Checkpointer, ElasticSampler

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "pytorch.md"
BEGIN = "<!-- the table of tests/helpers/differences.py -->"
END = "<!-- the end of the table -->"

N_SAMPLES = 24
SAVING: dict[str, Any] = {"signals": (), "async_save": False, "commit": {"durable": False}}
DATA: Any = [(torch.tensor([index % 8, index % 5]), index) for index in range(32)]


class Net(nn.Module):
    """A table, a layer with a norm and dropout, and a head."""

    layer: Any

    def __init__(self, *, rows: int = 8, head: str = "head", norm: Any = nn.BatchNorm1d, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 4)
        for name in ("head", "layer") if options.get("other_order") else ("layer", "head"):
            made = nn.Linear(4, 4, bias=options.get("bias", True))
            setattr(self, head if name == "head" else name, made)
        self.norm = norm(4)
        self.drop = nn.Dropout(options.get("dropout", 0.2))
        self.act = options.get("act", nn.Tanh)()
        self.head_name = head
        if options.get("more"):
            self.more = nn.Linear(4, 4)
        if options.get("buffer"):
            self.register_buffer("mean", torch.zeros(4))
        if options.get("tied"):
            self.layer.weight = getattr(self, head).weight
        self.to(options.get("dtype", torch.float32))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        inner = self.drop(self.norm(self.act(self.layer(self.table(ids).sum(1)))))
        out: torch.Tensor = getattr(self, self.head_name)(inner)
        more: Any = getattr(self, "more", None)
        return out if more is None else out + more(inner)


def elastic(n_samples: int = N_SAMPLES, **options: Any) -> Any:
    """A sampler and its loader."""
    sampler = ElasticSampler(
        n_samples, **{"seed": 1, "shuffle": True, "global_batch_size": 4, "rank": 0, "world_size": 1, **options}
    )
    return sampler, DataLoader(DATA, sampler.local_batch_size, sampler=sampler)


def stateful(n_samples: int = N_SAMPLES, n_workers: int = 0, batch: int = 4, *, shuffle: bool = True) -> Any:
    """A loader with a position, as sampler and loader."""
    loader = StatefulDataLoader(DATA[:n_samples], batch, shuffle=shuffle, num_workers=n_workers)
    return loader, loader


def groups(model: Any, **options: Any) -> Any:
    """Two parameter groups."""
    every = list(model.parameters())
    return torch.optim.AdamW([{"params": every[:2]}, {"params": every[2:], **options}], 0.01)


@dataclass
class Program:
    """A program that trains."""

    model: Callable[[], Any] = Net
    optimizer: Callable[[Any], Any] | None = lambda model: torch.optim.AdamW(model.parameters(), 0.01)
    scheduler: Callable[[Any], Any] | None = lambda optimizer: S.CosineAnnealingLR(optimizer, 20)
    data: Callable[[], Any] | None = elastic
    extra: Callable[[Any], dict[str, Any]] = lambda model: {
        "progress": {"n": 0},
        "ema": AveragedModel(model),
        "own": per_rank({"m": 1}),
    }
    seed: int = 3
    frozen: tuple[str, ...] = ()
    given: dict[str, Any] = field(default_factory=dict)
    made: dict[str, Any] = field(default_factory=dict)

    def run(self, root: Path, n_steps: int) -> tuple[Any, list[Any]]:
        """Train some steps, and save the last one. Returns the decision, and what each step was."""
        torch.manual_seed(self.seed)
        model = self.model()
        for name in self.frozen:
            getattr(model, name).requires_grad_(requires_grad=False)
        optimizer = None if self.optimizer is None else self.optimizer(model)
        scheduler = None if self.scheduler is None or optimizer is None else self.scheduler(optimizer)
        sampler, loader = (None, DataLoader(DATA[:N_SAMPLES], 4)) if self.data is None else self.data()
        extra = self.extra(model)
        progress = extra.get("progress", {"n": 0})
        trace: list[Any] = []
        with Checkpointer(root, save_every=3 if n_steps else None, **SAVING) as checkpointer:
            objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler}
            decision = checkpointer.resume(**objects, extra=extra, **self.given)
            batches = iter(loader) if n_steps else iter(())
            for step in range(decision.initial_step + 1, decision.initial_step + n_steps + 1):
                inputs, ids = next(batches)
                loss = model(inputs).square().mean()
                loss.backward()
                if optimizer is not None:
                    optimizer.step()
                    optimizer.zero_grad()
                if "ema" in extra:
                    extra["ema"].update_parameters(model)
                if scheduler is not None:
                    scheduler.step()
                progress["n"] += 1
                rate = None if optimizer is None else float(optimizer.param_groups[0]["lr"])
                trace.append((ids.tolist(), float(loss).hex(), rate, progress["n"]))
                checkpointer.step(step, loss=loss)
        return decision, trace


def adam(**options: Any) -> dict[str, Any]:
    """A program with other options of the optimizer."""
    return {"optimizer": lambda model: torch.optim.AdamW(model.parameters(), **{"lr": 0.01, **options})}


def net(**options: Any) -> dict[str, Any]:
    """A program with another model."""
    return {"model": functools.partial(Net, **options)}


def schedule(make: Callable[[Any], Any]) -> dict[str, Any]:
    """A program with another scheduler."""
    return {"scheduler": make}


def extra(**changes: Any) -> dict[str, Any]:
    """A program with other objects in `extra`; None: without it."""

    def make(model: Any) -> dict[str, Any]:
        found = {**Program.extra(model), **{name: one(model) for name, one in changes.items() if one is not None}}
        return {name: one for name, one in found.items() if changes.get(name, one) is not None}

    return {"extra": make}


def linear(step: int, *, total: int = 20) -> float:
    """A schedule."""
    return max(0.0, 1 - step / total)


def root_of(step: int, *, total: int = 20) -> float:
    """Another schedule."""
    return float(max(0.0, 1 - step / total) ** 0.5)


def decay(base: float) -> dict[str, Any]:
    """A program whose scheduler has a function."""
    functions = {0.9: lambda step: 0.9**step, 0.8: lambda step: 0.8**step}
    return schedule(lambda optimizer: S.LambdaLR(optimizer, functions[base]))


def partial(function: Any, total: int = 20) -> dict[str, Any]:
    """A program whose scheduler has a function with arguments."""
    return schedule(lambda optimizer: S.LambdaLR(optimizer, functools.partial(function, total=total)))


def chain(*ends: Any) -> dict[str, Any]:
    """A program whose scheduler has schedulers inside."""
    return schedule(
        lambda optimizer: S.SequentialLR(
            optimizer, [S.ConstantLR(optimizer, 0.5, 2), *(make(optimizer) for make in ends)], [2]
        )
    )


SGD = {"optimizer": lambda model: torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)}
RANKS = "ranks"

# What differs, the outcome, the program that saves, and the one that resumes.
SAME: dict[str, Any] = {}
ROWS: list[tuple[str, str, str, dict[str, Any], dict[str, Any]]] = [
    ("class", "nothing", "equal", SAME, {}),
    ("class", "the optimizer is `SGD` and was `AdamW`", "refused", SAME, SGD),
    ("class", "the optimizer is `Adam` and was `AdamW`", "refused", SAME, {"optimizer": lambda m: torch.optim.Adam(m.parameters(), 0.01)}),
    ("class", "the scheduler is `StepLR` and was `CosineAnnealingLR`", "refused", SAME, schedule(lambda o: S.StepLR(o, 5))),
    ("class", "a scheduler inside `SequentialLR` is another", "refused", chain(lambda o: S.StepLR(o, 5)), chain(lambda o: S.ExponentialLR(o, 0.9))),
    ("class", "`LayerNorm` was `BatchNorm1d`", "refused", SAME, net(norm=nn.LayerNorm)),
    ("class", "`GELU` was `Tanh`", "told", SAME, net(act=nn.GELU)),
    ("class", "`StatefulDataLoader` was `ElasticSampler`", "refused", SAME, {"data": stateful}),
    ("class", "`ElasticSampler` was `StatefulDataLoader`", "refused", {"data": stateful}, {}),
    ("class", "`extra['ema']` is a dict and was an `AveragedModel`", "refused", SAME, extra(ema=lambda _: {"w": torch.zeros(3)})),
    ("class", "a tensor has another shape", "refused", SAME, net(rows=12)),
    ("class", "a tensor has another dtype", "refused", SAME, {**net(dtype=torch.bfloat16), "scheduler": Program.scheduler}),
    ("constant", "`T_max` of the scheduler", "told", SAME, schedule(lambda o: S.CosineAnnealingLR(o, 30))),
    ("constant", "a constant of a scheduler inside `SequentialLR`", "told", chain(lambda o: S.StepLR(o, 5)), chain(lambda o: S.StepLR(o, 6))),
    ("constant", "an argument of the function of a `LambdaLR`", "told", partial(linear), partial(linear, 30)),
    ("constant", "the function of a `LambdaLR`", "told", partial(linear), partial(root_of)),
    ("constant", "the code of the function of a `LambdaLR`", "told", decay(0.9), decay(0.8)),
    ("constant", "the rate of a dropout", "told", SAME, net(dropout=0.5)),
    ("constant", "the momentum of a norm", "told", SAME, net(norm=functools.partial(nn.BatchNorm1d, momentum=0.3))),
    ("constant", "the seed of the program", "equal", SAME, {"seed": 4}),
    ("option", "`lr` under a scheduler", "told", SAME, adam(lr=0.02)),
    ("option", "`weight_decay`", "told", SAME, adam(weight_decay=0.3)),
    ("option", "`betas`", "told", SAME, adam(betas=(0.8, 0.99))),
    ("option", "`eps`", "told", SAME, adam(eps=1e-6)),
    ("option", "`amsgrad`", "told", SAME, adam(amsgrad=True)),
    ("option", "`maximize`", "told", SAME, adam(maximize=True)),
    ("option", "`foreach`", "equal", SAME, adam(foreach=True)),
    ("option", "`requires_grad` of a layer, which is frozen now", "told", SAME, {"frozen": ("table",)}),
    ("option", "`requires_grad` of a layer, which was frozen", "told", {"frozen": ("table",)}, {}),
    ("option", "two parameter groups with the same options", "equal", SAME, {"optimizer": groups}),
    ("option", "two parameter groups with different options", "refused", SAME, {"optimizer": functools.partial(groups, weight_decay=0.7)}),
    ("option", "one parameter group, and there were two with different options", "refused", {"optimizer": functools.partial(groups, weight_decay=0.7)}, {}),
    ("name", "the order of the layers in the program", "equal", SAME, net(other_order=True)),
    ("name", "the order of the parameters in the optimizer", "equal", SAME, {"optimizer": lambda m: torch.optim.AdamW(list(m.parameters())[::-1], 0.01)}),
    ("name", "the name of a layer", "refused", SAME, net(head="output")),
    ("name", "the name of an object of `extra`", "refused", SAME, extra(progress=None, state=lambda _: {"n": 0})),
    ("name", "the scheduler has a name of its own", "refused", SAME, schedule(lambda o: {"main": S.CosineAnnealingLR(o, 20)})),
    ("name", "two tensors are one (tied)", "refused", SAME, net(tied=True)),
    ("missing part", "the checkpoint lacks a layer", "refused", SAME, net(more=True)),
    ("missing part", "the run lacks a layer", "refused", net(more=True), {}),
    ("missing part", "the checkpoint lacks a buffer", "refused", SAME, net(buffer=True)),
    ("missing part", "the run lacks the biases", "refused", SAME, net(bias=False)),
    ("missing part", "the checkpoint lacks the optimizer", "refused", {"optimizer": None, "scheduler": None}, {"scheduler": None}),
    ("missing part", "the run lacks the optimizer", "told", {"scheduler": None}, {"optimizer": None, "scheduler": None}),
    ("missing part", "the checkpoint lacks the scheduler", "refused", {"scheduler": None}, {}),
    ("missing part", "the run lacks the scheduler", "refused", SAME, {"scheduler": None}),
    ("missing part", "the checkpoint lacks an object of `extra`", "refused", extra(ema=None), {}),
    ("missing part", "the run lacks an object of `extra`", "refused", SAME, extra(ema=None)),
    ("missing part", "the checkpoint lacks an object of `per_rank`", "refused", extra(own=None), {}),
    ("missing part", "the run lacks an object of `per_rank`", "refused", SAME, extra(own=None)),
    ("missing part", "the checkpoint lacks the sampler", "told", {"data": None}, {}),
    ("missing part", "the run lacks the sampler", "refused", SAME, {"data": None}),
    ("missing part", "a layer is frozen now", "refused", SAME, {"frozen": ("table",), "optimizer": lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], 0.01)}),
    ("missing part", "a layer is not frozen any more", "refused", {"frozen": ("table",), "optimizer": lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], 0.01)}, {}),
    ("loader", "`num_workers` of a `StatefulDataLoader`", "equal", {"data": stateful}, {"data": functools.partial(stateful, n_workers=1)}),
    ("loader", "`shuffle` of a `StatefulDataLoader`", "refused", {"data": stateful}, {"data": functools.partial(stateful, shuffle=False)}),
    ("loader", "the batch size of a `StatefulDataLoader`", "told", {"data": stateful}, {"data": functools.partial(stateful, batch=2)}),
    ("loader", "the dataset of a `StatefulDataLoader` is longer", "refused", {"data": stateful}, {"data": functools.partial(stateful, 28)}),
    ("loader", "`global_batch_size` of an `ElasticSampler`", "told", SAME, {"data": functools.partial(elastic, global_batch_size=2)}),
    ("loader", "the dataset of an `ElasticSampler` is longer", "refused", SAME, {"data": functools.partial(elastic, 28)}),
    ("loader", "`seed` of an `ElasticSampler`", "told", SAME, {"data": functools.partial(elastic, seed=2)}),
    ("loader", "`shuffle` of an `ElasticSampler`", "refused", SAME, {"data": functools.partial(elastic, shuffle=False)}),
    (RANKS, "two, with an `ElasticSampler`; without `per_rank` objects", "told", extra(own=None), extra(own=None)),
    (RANKS, "two, with objects of `per_rank`", "refused", SAME, {}),
    (RANKS, "two, with a `StatefulDataLoader` that shuffles", "refused", {**extra(own=None), "data": stateful}, {**extra(own=None), "data": stateful}),
]  # fmt: skip


_VARIES = {  # with the machine, and with releases of Python and torch
    r" \(of Python [0-9.]+\)": "",
    r"'[0-9a-f]{8}'": "...",
    r"\{'kind'.*": "{...}",
    r"\(4, eps=.*?momentum=([0-9.]+).*?\)": r"(momentum=\1)",
    r"a save would fail: rank 0:.*? is alive; ": "",
}


def outcome(root: Path, kind: str, saved: dict[str, Any], now: dict[str, Any]) -> tuple[str, str]:
    """What happens when a program resumes what another has saved: the word of the table, and the message.

    "silent": nothing is said, and the run is not the one that would have gone on.
    """
    first = root / f"saved by {id(saved)}"
    if not first.exists():
        Program(**saved).run(first, 3)
    shutil.rmtree(root / "run", ignore_errors=True)
    shutil.copytree(first, root / "run")
    if kind == RANKS:
        return _on_two_ranks(root / "run", now)
    try:
        decision, found = Program(**now).run(root / "run", 3)
    except ReshardError as error:
        return "refused", _line(error)
    if decision.warnings:
        return "told", _line("; ".join(decision.warnings))
    shutil.rmtree(root / "whole", ignore_errors=True)
    _, expected = Program(**saved).run(root / "whole", 6)
    return ("equal", "") if found == expected[3:] else ("silent", "")


def _on_two_ranks(root: Path, now: dict[str, Any]) -> tuple[str, str]:
    def work(group: Any) -> list[str]:
        given = dict(now)
        if "data" not in given:
            given["data"] = functools.partial(elastic, rank=group.rank, world_size=2)
        try:
            decision, _ = Program(**given).run(root, 0)
        except ReshardError as error:
            return ["refused", _line(error)]
        return ["told", _line("; ".join(decision.warnings))] if decision.warnings else ["silent", ""]

    with Job(2, work) as job:
        told: Any = job.outcomes()[0]
    return tuple(told["value"])


def _line(message: object) -> str:
    """The message without hint, folders and numbers that differ from run to run."""
    text = str(message).split("\nhint:")[0].splitlines()[0]
    for pattern, by in _VARIES.items():
        text = re.sub(pattern, by, text)
    return text


def row(kind: str, what: str, word: str, message: str) -> str:
    """A row of the table in the guide."""
    said = message if len(message) <= 200 else f"{message[:200]} ..."
    return f"| {kind} | {what} | {word} | {said.replace('|', ',')} |"


def on_page() -> list[str]:
    """The rows that the guide has."""
    lines = PAGE.read_text().split(BEGIN)[1].split(END)[0].strip().splitlines()
    return lines[2:]


def main() -> None:
    """Write the table into the guide."""
    lines = ["| | what differs | outcome | message |", "|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        for kind, what, expected, saved, now in ROWS:
            word, message = outcome(Path(folder), kind, saved, now)
            lines.append(row(kind, what, word, message))
            if word != expected:
                print(f"{kind}, {what}: {word} instead of {expected}: {message}")
    before, rest = PAGE.read_text().split(BEGIN)
    table = "\n".join(lines)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
