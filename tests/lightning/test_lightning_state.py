"""State that callbacks, metrics and optimizers of a Trainer have beside the tensors of the model."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import BackboneFinetuning, Callback
from torch.utils.data import DataLoader, TensorDataset

from reshard.errors import UnsupportedError
from reshard.lightning import ReshardCheckpoint, callback

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's, about workers, logging and the position in the data

VALUES = torch.randn(44, 4, generator=torch.Generator().manual_seed(0))


class Stop(Exception):  # noqa: N818
    """The run is interrupted."""


class Model(pl.LightningModule):
    """A backbone and a head, with metrics of which one is logged."""

    def __init__(self, stop: int) -> None:
        super().__init__()
        self.backbone = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
        self.head = torch.nn.Linear(8, 1)
        self.error = torchmetrics.MeanAbsoluteError()
        self.mean = torchmetrics.MeanMetric()  # over the whole training
        self.stop, self.seen = stop, list[Any]()

    def training_step(self, batch: Any, _index: int) -> Any:
        if self.seen and self.global_step == self.stop:
            raise Stop
        found, wanted = self.head(torch.relu(self.backbone(batch[0]))), batch[0].sum(1, keepdim=True)
        loss = (found - wanted).square().mean()
        self.seen.append((self.global_step, self.current_epoch, float(loss).hex()))
        self.error(found.detach(), wanted)
        self.log("error", self.error, on_step=False, on_epoch=True)
        self.mean.update(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.seen.append(("metrics", float(self.mean.compute()).hex(), float(self.error.compute()).hex()))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


def run(
    folder: Path, *callbacks: Callback, stop: int = -1, seed: int = 0, model: type[Model] = Model, saving: Any = None
) -> Any:
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    pl.seed_everything(seed, verbose=False)
    made = model(stop)
    trainer = pl.Trainer(
        callbacks=[ReshardCheckpoint(folder, **(saving or {"every_n_train_steps": 5})), *callbacks],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=4,
    )
    with contextlib.suppress(Stop):
        trainer.fit(made, DataLoader(TensorDataset(VALUES), 4, shuffle=True), ckpt_path="last")
        weights = b"".join(one.detach().numpy().tobytes() for one in made.state_dict().values())
        made.seen += [hashlib.sha256(weights).hexdigest(), float(trainer.callback_metrics["error"]).hex()]
    return made.seen


def check_resumes(folder: Path, *callbacks: Callable[[], Callback], stop: int, **words: Any) -> None:
    """Compare a run that is interrupted at a step, and resumed, with an uninterrupted one."""
    expected = run(folder / "whole", *(make() for make in callbacks), **words)
    run(folder / "torn", *(make() for make in callbacks), stop=stop, **words)
    found = run(folder / "torn", *(make() for make in callbacks), seed=7, **words)
    starts = [one[0] for one in expected]
    assert found[0][0] == stop // 5 * 5
    assert found == expected[starts.index(found[0][0]) :]


def test_metrics_go_on_within_an_epoch(tmp_path: Path) -> None:
    check_resumes(tmp_path, stop=17)


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("stop", [12, 27, 37])
def test_a_backbone_that_was_unfrozen_is_trained(tmp_path: Path, stop: int) -> None:
    check_resumes(tmp_path, lambda: BackboneFinetuning(1, lambda _: 1.1, backbone_initial_ratio_lr=0.5), stop=stop)


class Accumulating(Model):
    """Makes a step of the optimizer every fourth batch itself, and is interrupted between two of them."""

    def __init__(self, stop: int) -> None:
        super().__init__(stop)
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> Any:
        if index == 2 and self.global_step == self.stop and self.seen[-1][0] == self.stop:
            raise Stop
        loss = self.head(torch.relu(self.backbone(batch[0]))).square().mean()
        self.seen.append((self.global_step, self.current_epoch, float(loss.detach()).hex()))
        self.log("error", loss.detach())
        self.error.update(loss.detach(), loss.detach())
        self.mean.update(loss.detach())
        self.manual_backward(loss)
        optimizer: Any = self.optimizers()
        if (index + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()


def test_a_save_by_time_waits_for_a_step_of_manual_optimization(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()  # one for each batch: a save would be due at the first one of a step
    monkeypatch.setattr(callback, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    saving = {"train_time_interval": timedelta(seconds=5), "every_n_train_steps": None}
    expected = run(tmp_path / "whole", model=Accumulating, saving=saving)
    run(tmp_path / "torn", model=Accumulating, saving=saving, stop=2)
    found = run(tmp_path / "torn", seed=7, model=Accumulating, saving=saving)
    assert found == expected[len(expected) - len(found) :]


class Own(torch.optim.AdamW):
    """Has a `state_dict` of its own, as the 8-bit optimizers of bitsandbytes have."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict()


class WithOwn(Model):
    """Has such an optimizer."""

    def configure_optimizers(self) -> Any:
        return Own(self.parameters(), 1e-2)


def test_an_optimizer_with_its_own_state_dict_goes_on(tmp_path: Path) -> None:
    check_resumes(tmp_path, stop=17, model=WithOwn)


class Averaging(Callback):
    """Has a module in its state."""

    def state_dict(self) -> dict[str, Any]:
        return {"n": 3, "average": torch.nn.Linear(2, 2)}


def test_an_object_in_the_state_of_a_callback_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"the state of the callback Averaging\[\"average\"\] is a .*Linear"):
        run(tmp_path, Averaging(), stop=1)
