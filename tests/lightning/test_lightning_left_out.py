"""`ReshardCheckpoint(leave_out_frozen=True)`: saves of Lightning without frozen parameters, and their resumes."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import reshard
from reshard.errors import ArgumentError, MismatchError, UnsupportedError
from reshard.lightning import callback_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore")

FROZEN = {f"tower.{number}.{kind}" for number in (0, 2) for kind in ("weight", "bias")} | {
    "tower.1.weight",
    "tower.1.bias",
}


def fit(folder: Path, n_epochs: int, *, seed: int = 0, unfreeze: bool = False, **words: Any) -> Any:
    """Train in a folder from its last checkpoint to an epoch; the model."""
    library = importlib.import_module("lightning.pytorch")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Model(library.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(seed)
            layers = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4)
            self.tower = torch.nn.Sequential(*layers).requires_grad_(unfreeze)
            self.head = torch.nn.Linear(4, 1)
            torch.manual_seed(0)
            self.head.load_state_dict(torch.nn.Linear(4, 1).state_dict())

        def training_step(self, batch: Any, _index: int) -> Any:
            return self.head(self.tower(batch[0])).square().mean()

        def test_step(self, batch: Any) -> None:
            self.training_step(batch, 0)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], 1e-2)

    library.seed_everything(1, verbose=False)
    test = words.pop("test", None)
    trained = {"precision": words.pop("precision", "32-true"), "strategy": words.pop("strategy", "auto")}
    ckpt_path, write = words.pop("ckpt_path", "last"), words.pop("write", None)
    saving = callback_of("lightning")(folder, every_n_epochs=1, save_top_k=-1, **words)
    trainer = library.Trainer(
        callbacks=[saving],
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=n_epochs,
        **trained,
    )
    model = Model()
    inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(inputs), 4, shuffle=test is None)
    if test is not None:
        trainer.test(model, loader, ckpt_path=test)
    else:
        trainer.fit(model, loader, ckpt_path=ckpt_path)
        if write is not None:
            trainer.save_checkpoint(write)
    return model


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def saved(folder: Path) -> set[str]:
    with reshard.open(folder) as checkpoint:
        return set(checkpoint.keys("model"))


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_frozen_parameters_are_left_out_and_compared_before_the_first_step(precision: str, tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", 3, precision=precision)
    options: dict[str, Any] = {"leave_out_frozen": True, "precision": precision}
    fit(tmp_path / "run", 1, **options)
    assert saved(tmp_path / "run") & FROZEN == set()
    again = fit(tmp_path / "run", 3, **options)
    assert same(whole, again)
    assert saved(tmp_path / "whole") - saved(tmp_path / "run") == FROZEN
    assert (tmp_path / "run/iteration_00000030").is_dir()
    for words in ({}, {"leave_out_frozen": False}, {"test": str(tmp_path / "run")}):
        with pytest.raises(MismatchError, match=r"leaves out `tower\.0\.bias`.* and the run has other values"):
            fit(tmp_path / "run", 4, seed=3, **{**options, **words})
    fit(tmp_path / "run", 4, test=str(tmp_path / "run"), **options)
    with pytest.raises(UnsupportedError, match="a conversion needs all tensors"):
        reshard.convert(tmp_path / "run", tmp_path / "hf")


def test_leaving_out_begins_and_ends_with_a_resume(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", 4)
    for n_epochs, leaves_out in ((1, False), (2, True), (3, False)):
        fit(tmp_path / "run", n_epochs, leave_out_frozen=leaves_out)
        assert (saved(tmp_path / "run") >= FROZEN) != leaves_out, n_epochs
    # The frozen parameters of this program are other ones: only the checkpoint has the values of the run.
    assert same(whole, fit(tmp_path / "run", 4, seed=5, leave_out_frozen=True))
    assert FROZEN - saved(tmp_path / "run") == {"tower.1.weight", "tower.1.bias"}  # ones and zeros in both


def test_init_from_gives_them(tmp_path: Path) -> None:
    base = fit(tmp_path / "base", 1, unfreeze=True)
    reshard.torch.save_file(base.state_dict(), tmp_path / "base.safetensors")
    options: dict[str, Any] = {"leave_out_frozen": True, "init_from": tmp_path / "base.safetensors"}
    whole = fit(tmp_path / "whole", 3, seed=1, init_from=tmp_path / "base.safetensors")
    fit(tmp_path / "run", 1, seed=2, **options)
    assert saved(tmp_path / "run") & FROZEN == set()
    again = fit(tmp_path / "run", 3, seed=3, **options)
    assert same(whole, again)
    assert torch.equal(again.tower[0].weight, base.tower[0].weight)
    with reshard.open(tmp_path / "run") as checkpoint:
        assert checkpoint.extra()["left out"]["source"] == str(tmp_path / "base.safetensors")


def test_what_only_a_checkpoint_gave_is_saved(tmp_path: Path) -> None:
    path = tmp_path / "base.ckpt"
    fit(tmp_path / "base", 1, write=path)
    fit(tmp_path / "run", 2, seed=2, leave_out_frozen=True, ckpt_path=path)
    assert saved(tmp_path / "run") >= FROZEN
    with pytest.raises(ArgumentError, match="`leave_out_frozen` is 'yes', expected True or False"):
        fit(tmp_path / "run", 1, leave_out_frozen="yes")
