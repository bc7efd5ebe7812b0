"""The order of the samples after a resume: equal, or refused before the first step."""

from __future__ import annotations

import itertools
import os
import pickle
import random
from typing import TYPE_CHECKING, Any

import lightning.pytorch
import pytest
import torch
from tests.helpers.cases import slow
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from reshard.errors import ArgumentError, MismatchError
from reshard.lightning import ReshardCheckpoint
from reshard.torch import Checkpointer, ElasticSampler
from reshard.transformers import ReshardCallback

if TYPE_CHECKING:
    from pathlib import Path

N = 12
ORDERS: dict[str, Any] = {
    "shuffle": lambda: {"shuffle": True},
    "shuffle generator": lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(3)},
    "sampler generator": lambda: {"sampler": RandomSampler(range(N), generator=torch.Generator().manual_seed(3))},
    "weighted": lambda: {"sampler": WeightedRandomSampler([float(i + 1) for i in range(N)], N)},
    "subset": lambda: {"sampler": SubsetRandomSampler(range(N))},
}


class Items(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.tensor([float(index)])}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return ({"x": torch.tensor([float(i)])} for i in range(N))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(1, 1)
        self.seen: list[Any] = []

    def forward(self, x: Any) -> Any:
        self.seen.append(x[:, 0].tolist())
        return {"loss": torch.nn.functional.dropout(self.line(x / N), 0.5).square().mean()}


class Stop(TrainerCallback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **_others: Any) -> None:
        if state.global_step == self.at:
            raise KeyboardInterrupt


def by_trainer(root: Path, options: Any, stop: int = -1, data: Any = None, **arguments: Any) -> Any:
    torch.manual_seed(0)
    net = Net()
    args = TrainingArguments(
        str(root) + ".out",
        max_steps=14,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        **arguments,
    )
    callback = ReshardCallback(root, save_every=2, signals=(), commit={"durable": False})
    trainer = Trainer(net, args, train_dataset=data or Items(), callbacks=[callback, Stop(stop)])
    if options is not None:
        made: dict[str, Any] = options()
        made |= {} if "batch_sampler" in made else {"batch_size": 2}
        loader: Any = DataLoader(Items(), **made)
        trainer.get_train_dataloader = lambda: trainer.accelerator.prepare(loader)  # type: ignore[method-assign]
    if stop >= 0:
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    else:
        trainer.train()
    return net.seen, net.line.weight.detach().clone()


class Module(lightning.pytorch.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: Any, _index: int) -> Any:
        return self.net(batch["x"])["loss"]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Cut(lightning.pytorch.Callback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_end(self, trainer: Any, *_others: Any) -> None:
        if trainer.global_step == self.at:
            raise KeyboardInterrupt


def by_lightning(root: Path, options: Any, stop: int = -1) -> Any:
    torch.manual_seed(0)
    module = Module()
    callbacks = [ReshardCheckpoint(str(root), every_n_train_steps=2, save_last=True), Cut(stop)]
    trainer = lightning.pytorch.Trainer(
        max_steps=14,
        max_epochs=-1,
        callbacks=callbacks,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(module, DataLoader(Items(), 2, **options()), ckpt_path="last")
    except (KeyboardInterrupt, SystemExit):
        assert stop >= 0
    return module.net.seen, module.net.line.weight.detach().clone()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Lightning, about workers, logging and the position in the data
@pytest.mark.parametrize("run", [by_trainer, by_lightning])
@pytest.mark.parametrize("order", ORDERS)
def test_order_goes_on(tmp_path: Path, run: Any, order: str) -> None:
    seen, weight = run(tmp_path / "whole", ORDERS[order])
    for stop, saved in ((5, 4), (7, 6), (11, 10)):  # within an epoch, at its end, within the second one
        run(tmp_path / str(stop), ORDERS[order], stop)
        rest, again = run(tmp_path / str(stop), ORDERS[order])
        assert rest == seen[saved:], stop
        assert torch.equal(weight, again), stop


class Sized(Items):
    """Samples with a length."""

    def __getitem__(self, index: int) -> Any:
        if index >= N:
            raise IndexError(index)
        return {"x": torch.tensor([float(index)]), "input_ids": "a" * (1 + index % 5)}


class Batches(torch.utils.data.Sampler[Any]):
    """A batch sampler of the user, which draws from a stream of the program and has no `batch_size`."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Any:
        order = random.sample(range(N), N)
        return iter([order[:2], order[2:5], order[5:6], order[6:10], order[10:]])


class Fewer(torch.utils.data.Sampler[int]):
    """It has fewer samples than its length says: Trainer ends with its last epoch, before `max_steps`."""

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Any:
        return iter(range(N - 4))


CHOICES: dict[str, dict[str, Any]] = {
    "group_by_length": {"train_sampling_strategy": "group_by_length"},
    "batch_rebalance": {"train_sampling_strategy": "batch_rebalance"},
    "sequential": {"train_sampling_strategy": "sequential", "dataloader_drop_last": True},
    "no seed": {"accelerator_config": {"use_seedable_sampler": False}},
    "split": {"accelerator_config": {"split_batches": True}},
    "dispatch": {"accelerator_config": {"dispatch_batches": True, "use_seedable_sampler": False}},
    "workers": {"dataloader_num_workers": 1},
    "batch sampler": {"options": lambda: {"batch_sampler": Batches()}},
    "accumulated": {"gradient_accumulation_steps": 4},
    "fewer": {"gradient_accumulation_steps": 3, "options": lambda: {"sampler": Fewer()}, "stop": 5},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("choice", ["accumulated", *slow(one for one in CHOICES if one != "accumulated")])
def test_each_choice_of_trainer_goes_on(tmp_path: Path, choice: str) -> None:
    arguments: dict[str, Any] = dict(CHOICES[choice])
    options, stop = arguments.pop("options", None), arguments.pop("stop", 11)
    data = Sized()
    seen, weight = by_trainer(tmp_path / "whole", options, data=data, **arguments)
    by_trainer(tmp_path / "cut", options, stop, data=data, **arguments)
    rest, again = by_trainer(tmp_path / "cut", options, data=data, **arguments)
    assert 0 < len(rest) < len(seen)
    assert rest == seen[-len(rest) :]
    assert torch.equal(weight, again)


class Holding(Stream):
    """A stream that goes on from epoch to epoch."""

    def __init__(self) -> None:
        self.rest = iter(range(100))

    def __iter__(self) -> Any:
        return ({"x": torch.tensor([float(i)])} for i in itertools.islice(self.rest, 8))


class Other(Stream):
    def __iter__(self) -> Any:
        return ({"x": torch.tensor([float(i + 1)])} for i in range(N))


class Secret(torch.utils.data.Sampler[int]):
    """Its order follows from nothing that is saved."""

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Any:
        return iter(random.Random(os.urandom(8)).sample(range(N), N))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_found_again_is_refused(tmp_path: Path) -> None:
    by_trainer(tmp_path / "holds", None, 7, data=Holding())
    with pytest.raises(MismatchError, match="`Holding` holds an iterator"):
        by_trainer(tmp_path / "holds", None, data=Holding())
    by_trainer(tmp_path / "other", None, 3, data=Stream())
    with pytest.raises(MismatchError, match="are other ones when `Other` begins again"):
        by_trainer(tmp_path / "other", None, data=Other())

    def secret() -> Any:
        return {"sampler": Secret()}

    for run in (by_trainer, by_lightning):
        run(tmp_path / run.__name__, secret, 3)
        with pytest.raises(MismatchError, match="are other ones when `Secret` begins again"):
            run(tmp_path / run.__name__, secret)


@pytest.mark.filterwarnings("ignore:.*set_vital")
@pytest.mark.parametrize("kind", ["elastic", "stateful"])
def test_iterator_made_before_resume_is_refused(tmp_path: Path, kind: str) -> None:
    def parts() -> Any:
        if kind == "stateful":
            data: Any = range(N)
            loader = StatefulDataLoader(data, 2, shuffle=True)
            return loader, loader
        sampler = ElasticSampler(N, 0, True, 2, 0, 1)
        return sampler, DataLoader(Items(), 2, sampler=sampler)

    sampler, loader = parts()
    net = torch.nn.Linear(1, 1)
    with Checkpointer(tmp_path, signals=()) as checkpointer:
        checkpointer.resume(model=net, sampler=sampler)
        next(iter(loader))
        checkpointer.step(1, save=True)
    sampler, loader = parts()
    early = iter(loader)
    next(early)
    with Checkpointer(tmp_path, signals=()) as checkpointer, pytest.raises(ArgumentError, match="before `resume`"):
        checkpointer.resume(model=net, sampler=sampler)
    del early  # a loop that was left is no hindrance
    with Checkpointer(tmp_path, signals=()) as checkpointer:
        assert checkpointer.resume(model=net, sampler=sampler).initial_step == 1


def test_sampler_in_use_can_be_pickled() -> None:
    sampler = ElasticSampler(N, 0, True, 2, 0, 1)
    reader = iter(sampler)
    first = next(reader)
    assert next(iter(pickle.loads(pickle.dumps(sampler)))) == first
