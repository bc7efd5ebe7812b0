"""Random histories of Trainer, Lightning and accelerate: cut and resumed, they read what the uninterrupted run reads.

What cannot be found again is refused before the first step, and nothing else is (`may_be_refused`). An uninterrupted
run reads and draws what the program without this package does, except where the guide says so (`draws_privately`).
The environment variable `RESHARD_LIBRARY_HISTORIES` sets the number of histories.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
from typing import TYPE_CHECKING, Any

import lightning.pytorch
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration
from lightning.pytorch.utilities import CombinedLoader
from tests.helpers.cases import slow
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from reshard.accelerate import prepared
from reshard.errors import ReshardError
from reshard.lightning import ReshardCheckpoint
from reshard.torch import Checkpointer
from reshard.transformers import ReshardCallback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

N_HISTORIES = int(os.environ.get("RESHARD_LIBRARY_HISTORIES", "5"))
pytestmark = pytest.mark.filterwarnings("ignore")
N = 22


def drawn() -> float:
    """A number from each random stream of the program."""
    return random.random() + float(np.random.random()) + torch.rand(1).item()  # noqa: NPY002


class Items(Dataset[Any]):
    """Samples that are their index, and what the dataset draws while it reads them."""

    def __init__(self, *, draws: bool, own: bool = False) -> None:
        self.draws, self.own = draws, np.random.default_rng(3) if own else None
        self.lengths = [1 + i % 5 for i in range(N)]

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < N:
            raise IndexError(index)
        noise = drawn() if self.draws else float(self.own.random()) if self.own is not None else 0.0
        return {"x": torch.tensor([float(index), noise]), "input_ids": list(range(1 + index % 5))}


class Stream(IterableDataset[Any]):
    """A stream; each worker reads a part of it."""

    def __init__(self, kind: str) -> None:
        self.kind, self.n_passes = kind, 0
        self.rng = np.random.default_rng(5) if kind == "own" else None

    def __iter__(self) -> Iterator[Any]:
        self.n_passes += 1
        info = torch.utils.data.get_worker_info()
        numbers: list[int] = list(range(N))[::1] if info is None else list(range(info.id, N, info.num_workers))
        if self.kind == "counts":
            numbers = [(one + self.n_passes) % N for one in numbers]
        held: list[int] = []
        for one in numbers:  # as a buffer that shuffles
            held.append(one)
            if len(held) > 4:
                yield self.item(held.pop(self.place(len(held))))
        while held:
            yield self.item(held.pop(self.place(len(held))))

    def place(self, n: int) -> int:
        if self.kind == "buffer":
            return random.randrange(n)
        return int(self.rng.integers(n)) if self.rng is not None else 0

    def item(self, number: int) -> Any:
        return {"x": torch.tensor([float(number), drawn() if self.kind == "draws" else 0.0])}


class Lazy(Sampler[int]):
    """Draws from the global random streams while it is read."""

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        for _ in range(N):
            yield int(drawn() * N) % N


class Own(Sampler[int]):
    """Draws from a generator in an attribute, and counts its passes."""

    def __init__(self) -> None:
        self.rng, self.n_passes = random.Random(4), 0

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        self.n_passes += 1
        return iter(self.rng.sample(range(N), N - self.n_passes % 9))


class Buckets(Sampler[Any]):
    """Batches of different sizes, drawn from a global stream when a pass begins. It has no `batch_size`."""

    def __len__(self) -> int:
        return len(range(0, N, 3))

    def __iter__(self) -> Iterator[list[int]]:
        order = random.sample(range(N), N)
        return (order[first : first + 2 + first % 2] for first in range(0, N, 3))


class Custom:
    """A loader that is no DataLoader."""

    def __init__(self, size: int) -> None:
        self.size, self.dataset = size, Items(draws=False)

    def __len__(self) -> int:
        return N // self.size

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(N).tolist()
        for first in range(0, N - self.size + 1, self.size):
            yield {"x": torch.tensor([[float(one), drawn()] for one in order[first : first + self.size]])}


def collate(rows: list[Any]) -> Any:
    return {"x": torch.stack([row["x"] for row in rows])}


SAMPLERS: dict[str, Callable[[], Any]] = {
    "sequential": dict,
    "shuffle": lambda: {"shuffle": True},
    "shuffle generator": lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(3)},
    "sampler generator": lambda: {"sampler": RandomSampler(range(N), generator=torch.Generator().manual_seed(3))},
    "replacement": lambda: {"sampler": RandomSampler(range(N), replacement=True, num_samples=40)},
    "weighted": lambda: {"sampler": WeightedRandomSampler([float(i + 1) for i in range(N)], N)},
    "weighted generator": lambda: {
        "sampler": WeightedRandomSampler([1.0 + i for i in range(N)], N, generator=torch.Generator().manual_seed(3))
    },
    "subset": lambda: {"sampler": SubsetRandomSampler(range(N))},
    "lazy": lambda: {"sampler": Lazy()},
    "own": lambda: {"sampler": Own()},
    "buckets": lambda: {"batch_sampler": Buckets()},
    "batch sampler": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(N)), 4, drop_last=False)},
}
STREAMS = ("plain", "draws", "buffer", "own", "counts")


def loader_of(case: dict[str, Any]) -> Any:
    """The loader of a case."""
    kind, size = case["kind"], case["size"]
    if kind == "custom":
        return Custom(size)
    options: dict[str, Any] = {"num_workers": case["workers"], "collate_fn": collate}
    if case["workers"]:
        options |= {"prefetch_factor": case["prefetch"], "persistent_workers": case["persistent"]}
    made = StatefulDataLoader if case.get("stateful") else DataLoader
    if kind.startswith("stream "):
        return made(Stream(kind[7:]), size, drop_last=case["drop_last"], **options)
    how = SAMPLERS[kind]()
    if "batch_sampler" not in how:
        how |= {"batch_size": size, "drop_last": case["drop_last"]}
    return made(Items(draws=case["noise"] == "draws", own=case["noise"] == "own"), **how, **options)


class Net(torch.nn.Module):
    """A model that draws, and keeps what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(2, 1)
        self.seen: list[Any] = []

    def forward(self, x: Any, **_others: Any) -> Any:
        self.seen.append([x.tolist(), drawn(), self.line.bias.item()])
        return {"loss": torch.nn.functional.dropout(self.line(x / N), 0.5).square().mean()}


class Cut(Exception):  # noqa: N818
    """The run is interrupted."""


def reset() -> Net:
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Net()


def by_trainer(root: Path, case: dict[str, Any], stop: int | None, *, saves: bool = True) -> Net:
    class Stop(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **_others: Any) -> None:
            pass

        def on_step_begin(self, args: Any, state: Any, control: Any, **_others: Any) -> None:
            if state.global_step == stop:
                raise Cut

    net = reset()
    data = loader_of(case)
    kind = case["kind"]
    by_dataset = case["wrap"] == "dataset" and (kind in {"shuffle", "sequential"} or kind.startswith("stream "))
    config = {"use_seedable_sampler": case["seedable"], "split_batches": case["split"]}
    if case["dispatch"] is not None:
        config["dispatch_batches"] = case["dispatch"]
    args = TrainingArguments(
        f"{root}.out",
        max_steps=case["steps"],
        per_device_train_batch_size=case["size"],
        gradient_accumulation_steps=case["accumulate"],
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_num_workers=case["workers"],
        dataloader_persistent_workers=bool(case["workers"]) and case["persistent"],
        dataloader_drop_last=case["drop_last"],
        train_sampling_strategy="group_by_length" if case["grouped"] else "random",
        accelerator_config=config,
    )
    saving: dict[str, Any] = {"signals": (), "commit": {"durable": False}, "async_save": False}
    callbacks = [ReshardCallback(root, save_every=case["every"], **saving)] if saves else []
    dataset = data.dataset if by_dataset else Items(draws=False)
    trainer = Trainer(net, args, train_dataset=dataset, data_collator=collate, callbacks=[*callbacks, Stop()])
    if not by_dataset:
        given = trainer.accelerator.prepare(data) if case["wrap"] != "plain" and isinstance(data, DataLoader) else data
        trainer.get_train_dataloader = lambda: given  # type: ignore[method-assign]
    with contextlib.suppress(Cut):
        trainer.train()
    return net


class Drawing(lightning.pytorch.Callback):
    """Draws random numbers in hooks before and after an epoch, and keeps those of the epochs."""

    def __init__(self, net: Net) -> None:
        self.net = net

    def on_train_start(self, *_others: Any) -> None:
        drawn()

    def on_train_epoch_start(self, *_others: Any) -> None:
        self.net.seen.append(drawn())

    def on_train_batch_start(self, *_others: Any) -> None:
        drawn()

    def on_train_epoch_end(self, *_others: Any) -> None:
        drawn()


class Module(lightning.pytorch.LightningModule):
    """A model whose hooks draw if `draws`, with loaders that it makes or keeps for each epoch."""

    def __init__(self, net: Net, case: dict[str, Any], data: Any) -> None:
        super().__init__()
        self.net, self.case, self.data = net, case, data

    def training_step(self, batch: Any, _index: int) -> Any:
        parts = batch if isinstance(batch, list) else [batch]
        rows = torch.cat([part["x"] for part in parts if part is not None])
        loss = self.net(rows)["loss"]
        self.log("loss", loss, batch_size=len(rows), on_epoch=self.case["mean"])
        return loss

    def validation_step(self, batch: Any, _index: int) -> None:
        self.log("val", self.net.line(batch[0]).sum() + drawn(), batch_size=1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if not self.case["plateau"]:
            return optimizer
        monitor = "loss_epoch" if self.case["mean"] and self.case["plateau"] == "epoch" else "loss"
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0)
        config = {"scheduler": scheduler, "monitor": monitor, "interval": self.case["plateau"]}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def train_dataloader(self) -> Any:
        return loaders_of(self.case) if self.case["reload"] == "new" else self.data

    def on_train_start(self) -> None:
        if self.case["hooks"]:
            drawn()

    def on_train_epoch_start(self) -> None:
        if self.case["hooks"]:
            self.net.seen.append(drawn())

    def on_train_epoch_end(self) -> None:
        if self.case["hooks"]:
            drawn()

    def on_train_batch_end(self, *_others: Any) -> None:
        if self.case["hooks"]:
            self.net.line.bias.data += drawn() / 8

    def on_validation_end(self) -> None:
        if self.case["hooks"]:
            self.net.line.bias.data -= drawn() / 8


def loaders_of(case: dict[str, Any]) -> Any:
    """The loader of a case, or two."""
    second = case["second"]
    if second is None:
        return loader_of(case)
    return CombinedLoader([loader_of(case), loader_of({**case, "kind": second, "size": 2})], case["mode"])


def by_lightning(root: Path, case: dict[str, Any], stop: int | None, *, saves: bool = True) -> Net:
    class Stop(lightning.pytorch.Callback):
        def on_train_batch_start(self, trainer: Any, *_others: Any) -> None:
            if trainer.global_step == stop:
                raise Cut

    net = reset()
    saving = [ReshardCheckpoint(str(root), every_n_train_steps=case["every"], save_last=True)] if saves else []
    drawing = [Drawing(net)] if case["hooks"] == "callback" else []
    trainer = lightning.pytorch.Trainer(
        max_steps=case["steps"],
        max_epochs=-1,
        accumulate_grad_batches=case["accumulate"],
        val_check_interval=case["val"] or 1.0,
        num_sanity_val_steps=0,
        reload_dataloaders_every_n_epochs=case["every_epochs"] if case["reload"] else 0,
        callbacks=[*saving, *drawing, Stop()],
        enable_checkpointing=saves,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = loaders_of(case)
    given = None if case["reload"] else data
    validation = DataLoader(TensorDataset(torch.ones(4, 2)), 2) if case["val"] else None
    with contextlib.suppress(Cut):
        trainer.fit(Module(net, case, data), given, validation, ckpt_path="last" if saves else None)
    return net


def by_accelerate(root: Path, case: dict[str, Any], stop: int | None, *, saves: bool = True) -> Net:
    net = reset()
    config = DataLoaderConfiguration(
        use_seedable_sampler=case["seedable"],
        split_batches=case["split"],
        dispatch_batches=case["dispatch"],
        use_stateful_dataloader=case["stateful"],
    )
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=case["accumulate"], dataloader_config=config)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    model, optimizer, data = accelerator.prepare(net, optimizer, loader_of(case))
    saving: dict[str, Any] = {"signals": (), "commit": {"durable": False}, "async_save": False}
    with Checkpointer(root, save_every=case["every"], **saving) if saves else contextlib.nullcontext() as made:
        step = made.resume(**prepared(accelerator)).initial_step if made else 0
        while True:
            for batch in data:
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch["x"])["loss"])
                    optimizer.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    step += 1
                    if made:
                        made.step(step)
                    if step in {stop, case["steps"]}:
                        return net


LIBRARIES: dict[str, Callable[..., Net]] = {
    "transformers": by_trainer,
    "lightning": by_lightning,
    "accelerate": by_accelerate,
}


def case_of(number: int) -> tuple[str, dict[str, Any], random.Random]:
    """A random case."""
    choice = random.Random(number)
    library = sorted(LIBRARIES)[number % 3]
    kinds = [*SAMPLERS, *(f"stream {one}" for one in STREAMS)]
    kinds += {"transformers": ["custom"], "lightning": ["custom"], "accelerate": []}[library]
    kind = choice.choice(kinds)
    workers = choice.choice([0, 0, 0, 2])
    case = {
        "kind": kind,
        "size": choice.choice([2, 3, 4]),
        "workers": workers,
        "prefetch": choice.choice([1, 2]),
        "persistent": choice.random() < 0.4,
        "drop_last": choice.random() < 0.4,
        "noise": choice.choice(["", "draws", "own"]),
        "stateful": library != "transformers" and choice.random() < 0.15,
        "accumulate": choice.choice([1, 1, 2, 3]),
        "steps": choice.randint(12, 22),
        "every": choice.choice([1, 1, 2]),
        "seedable": choice.random() < 0.6,
        "split": choice.random() < 0.2,
        "dispatch": choice.choice([None, None, False, True]),
        "grouped": choice.random() < 0.2,
        "wrap": choice.choice(["dataset", "prepared", "plain"]),
        "hooks": choice.choice(["", "module", "callback"]),
        "reload": choice.choice(["", "", "new", "same"]),
        "every_epochs": choice.choice([1, 2]),
        "second": choice.choice([None, None, choice.choice(kinds)]),
        "mode": choice.choice(["max_size_cycle", "max_size_cycle", "min_size", "max_size"]),
        "val": choice.choice([0, 0, 2, 3]),
        "plateau": choice.choice(["", "step", "epoch"]),
        "mean": choice.random() < 0.5,
    }
    if kind == "buckets":
        case["split"] = False  # accelerate wants a batch size
    return library, case, choice


def history(number: int, root: Path) -> str:
    """Compare a run that is cut and resumed with an uninterrupted one. Returns "exact" or why it was refused."""
    library, case, choice = case_of(number)
    cuts = sorted({choice.randint(1, case["steps"] - 1) for _ in range(choice.randint(1, 2))})
    logging.disable(logging.ERROR)
    try:
        compare(root, library, case, cuts)
    except ReshardError as error:
        return str(error)
    finally:
        logging.disable(logging.NOTSET)
    return "exact"


def compare(root: Path, library: str, case: dict[str, Any], cuts: list[int]) -> None:
    """Compare a run that is cut and resumed with one that is not, and this with one without this package."""
    run = LIBRARIES[library]
    what = (library, case, cuts)
    whole = run(root / "whole", case, None)
    if not draws_privately(library, case):
        without = run(root / "without", case, None, saves=False)
        assert without.seen == whole.seen, what
        assert torch.equal(without.line.weight, whole.line.weight), what
    done = first = 0
    for place, stop in enumerate([*cuts, None]):
        net = run(root / "cut", case, stop)
        if not net.seen:  # Trainer ends before `max_steps` if a loader has fewer batches than its length says
            first = done
            assert done == len(whole.seen), what
            continue
        # It begins after the last save before the cut.
        first = next((i for i in range(len(whole.seen)) if whole.seen[i : i + len(net.seen)] == net.seen), -1)
        assert first > 0 if place and cuts[place - 1] >= case["every"] else first == 0, what
        done = first + len(net.seen)
    assert net.seen == whole.seen[first:], what
    assert torch.equal(net.line.weight, whole.line.weight), what


def kinds_of(library: str, case: dict[str, Any]) -> list[str]:
    """The kinds of the loaders of a case."""
    return [case["kind"], *([case["second"]] if library == "lightning" and case["second"] else [])]


def may_be_refused(library: str, case: dict[str, Any]) -> bool:
    """Persistent workers have a state that is in no checkpoint, if they read a stream or draw random numbers."""
    is_stream = any(kind.startswith("stream ") for kind in kinds_of(library, case))
    return bool(case["workers"]) and case["persistent"] and (is_stream or case["noise"] != "")


def draws_privately(library: str, case: dict[str, Any]) -> bool:
    """Whether the main process draws random numbers after the first batch of a pass, which it must read again.

    These are streams, custom loaders, samplers that draw while they are read, and the data of dispatching loaders.
    """
    kinds, has_workers = set(kinds_of(library, case)), case["workers"] > 0
    if kinds & {"lazy", "custom"} or (library == "accelerate" and case["stateful"]):
        return True  # accelerate's StatefulDataLoader, which draws more than a DataLoader, is replaced by one
    is_prepared = library == "accelerate" or (library == "transformers" and case["wrap"] != "plain")
    is_dispatching = is_prepared and case["dispatch"]
    draws = kinds & {"stream draws", "stream buffer"} or (is_dispatching and case["noise"] == "draws")
    return bool(draws) and not has_workers


@pytest.mark.parametrize("number", [1, *slow(number for number in range(N_HISTORIES) if number != 1)])
def test_a_history_reads_what_the_uninterrupted_run_reads(number: int, tmp_path: Path) -> None:
    library, case, _ = case_of(number)
    found = history(number, tmp_path)
    assert found == "exact" or may_be_refused(library, case), (number, case, found)


# An epoch has six steps. The runs are cut within an epoch, within its rest, at the end of one and within a later one.
OF_LIGHTNING: dict[str, dict[str, Any]] = {
    "a stream, hooks of the model draw": {"kind": "stream buffer", "hooks": "module"},
    "a stream, hooks of callbacks draw": {"kind": "stream draws", "hooks": "callback"},
    "hooks of callbacks draw": {"kind": "shuffle", "hooks": "callback", "noise": "draws"},
    "a stream beside a shorter loader": {"kind": "stream own", "second": "batch sampler"},
    "a stream until both end": {"kind": "shuffle", "second": "stream own", "mode": "max_size"},
    "two loaders": {"kind": "shuffle", "second": "shuffle", "noise": "draws"},
    "new loaders": {"kind": "shuffle generator", "reload": "new", "hooks": "module"},
    "new streams": {"kind": "stream own", "reload": "new", "hooks": "callback"},
    "new streams in some epochs": {"kind": "stream draws", "reload": "new", "every_epochs": 2},
    "hooks after a batch, and a scheduler": {"kind": "sequential", "hooks": "module", "plateau": "step"},
    "validations within an epoch": {"kind": "stream plain", "hooks": "module", "plateau": "step", "val": 2},
    "validations and epochs": {"kind": "shuffle", "hooks": "callback", "plateau": "epoch", "val": 3},
    "the mean of an epoch": {"kind": "stream own", "plateau": "epoch"},
    "the loader is kept": {"kind": "shuffle generator", "reload": "same", "noise": "own"},
    "the stream is kept": {"kind": "stream buffer", "reload": "same", "every_epochs": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_LIGHTNING)
def test_lightning_goes_on(tmp_path: Path, name: str) -> None:
    case: dict[str, Any] = {
        "size": 2, "workers": 0, "drop_last": False, "noise": "", "accumulate": 2, "steps": 20, "every": 1,
        "hooks": "", "reload": "", "every_epochs": 1, "second": None, "mode": "max_size_cycle",
        "val": 0, "plateau": "", "mean": True,
    } | OF_LIGHTNING[name]  # fmt: skip
    compare(tmp_path, "lightning", case, [3, 5, 12, 15])
