"""Runs of Lightning whose root is in a bucket: saved and resumed as in a folder."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.peers.required import long
from tests.servers.s3 import BUCKET
from torch.utils.data import DataLoader, TensorDataset

import reshard
from reshard.commit import roots
from reshard.errors import ArgumentError, UnsupportedError
from reshard.lightning import callback_of

if TYPE_CHECKING:
    from tests.servers.s3 import S3Server

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's, about workers and logging

PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
_numbers = itertools.count()


def url() -> str:
    return f"s3://{BUCKET}/lightning-{os.getpid()}-{next(_numbers)}/run"


class Stop(Exception):  # noqa: N818
    """The run is interrupted."""


def fit(root: str | Path, package: str = "lightning", *, stop: int = -1, **words: Any) -> list[str]:
    """Train for two epochs of 6 steps; returns the losses."""
    library = importlib.import_module(PACKAGES[package])
    seen: list[str] = []

    class Model(library.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))

        def training_step(self, batch: Any, _index: int) -> Any:
            loss = self.net(batch[0]).square().mean()
            self.log("loss", loss)
            seen.append(f"{self.global_step} {float(loss.detach()).hex()}")
            if self.global_step == stop:
                raise Stop
            return loss

        def test_step(self, batch: Any) -> None:
            self.log("test", self.net(batch[0]).square().mean())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    library.seed_everything(words.get("seed", 0), verbose=False)
    values = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    loader: Any = DataLoader(TensorDataset(values), 4, shuffle=True)
    saving = callback_of(package)(root, **{"every_n_train_steps": 2, **words.get("saving", {})})
    trainer = library.Trainer(
        callbacks=[saving, *words.get("callbacks", ())],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=2,
    )
    model = Model()
    with contextlib.suppress(Stop):
        trainer.fit(model, loader, ckpt_path=words.get("ckpt_path", "last"))
    fit.trainer, fit.model, fit.loader = trainer, model, loader  # type: ignore[attr-defined]
    return seen


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("package", PACKAGES)
def test_a_run_resumes_bit_for_bit(s3: S3Server, tmp_path: Path, package: str) -> None:
    root, monitored = url(), {"monitor": "loss", "save_last": True, "async_save": True}
    expected = fit(tmp_path / "whole", package, saving=monitored)
    first = fit(root, package, stop=9, saving=monitored)
    assert first == expected[: len(first)]
    assert fit(root, package, seed=7, saving=monitored) == expected[8:]
    trainer: Any = fit.trainer  # type: ignore[attr-defined]
    assert trainer.ckpt_path == root
    trainer.test(fit.model, fit.loader, ckpt_path="best", verbose=False)  # type: ignore[attr-defined]
    assert roots.parse_iteration_folder(trainer.ckpt_path.removeprefix(f"{root}/")) is not None
    with reshard.open(root) as opened:
        assert opened.iteration == 12
    last = f"{root}/iteration_00000012"
    assert fit(root, package, ckpt_path=last) == [], "an iteration can be named"


def test_roots_that_cannot_be_used_are_named(s3: S3Server, tmp_path: Path) -> None:
    library: Any = importlib.import_module("lightning.pytorch")
    with pytest.raises(UnsupportedError, match="is a URL"):
        callback_of("lightning")("https://example.org/run")
    with pytest.raises(ArgumentError, match="pass a URL as text"):
        callback_of("lightning")(Path("s3://bucket/run"))
    root = url()
    fit(root, stop=3)
    with pytest.raises(ArgumentError, match=r"is at iteration 2, and this run at step 0"):
        fit(root, ckpt_path=None)
    other = library.callbacks.ModelCheckpoint(tmp_path / "other", every_n_train_steps=1, save_last=True)
    with pytest.raises(ArgumentError, match=r"`ckpt_path=\"last\"` is the newest of .* and of `ModelCheckpoint`"):
        fit(root, callbacks=[other])
    assert fit(root, callbacks=[other], ckpt_path=root)[0].startswith("2 ")


@long
@pytest.mark.slow(disk=False)
def test_another_number_of_ranks_goes_on_at_the_end_of_an_epoch(s3: S3Server) -> None:
    program, root = Path(__file__).with_name("lightning_parallel.py"), url()

    def start(n_ranks: int, *words: object) -> str:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"]
        command = [*torchrun, str(program), root, str(n_ranks), "1", *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240).stdout

    start(2, 16, 0, 11)  # it is killed after the first epoch
    lines = [line.split() for line in start(1, -1, 0, 11).splitlines()]
    assert [int(line[0]) for line in lines] == list(range(11, 11 + 22))
    samples = torch.randn(88, 4, generator=torch.Generator().manual_seed(0))
    assert sum(float.fromhex(line[3]) for line in lines) == pytest.approx(float(samples.sum()), abs=1e-4)
