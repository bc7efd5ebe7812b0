"""`reshard.lightning`: an interrupted run that resumes is the uninterrupted one, to the last bit."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.helpers.examples import in_fresh_process
from tests.peers.required import long
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import reshard
from reshard.errors import ArgumentError, DamagedFileError, MismatchError, UnsupportedError
from reshard.lightning import callback_of, resuming
from reshard.torch import load_file

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's, about workers, logging and the position in the data

PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


class Stop(Exception):  # noqa: N818
    """The run is interrupted."""


class Noisy(TensorDataset):
    """A dataset that draws from the global random state, as augmentations do."""

    def __getitem__(self, index: int) -> Any:
        return (self.tensors[0][index] + 0.1 * torch.rand(4) + random.random() * np.random.rand(),)  # noqa: NPY002


class Stream(IterableDataset[Any]):
    """A dataset without a length, of which Lightning takes a batch ahead."""

    def __iter__(self) -> Iterator[Any]:
        return ((torch.rand(4),) for _ in range(22))


def data(kind: str) -> Any:
    values = torch.randn(44, 4, generator=torch.Generator().manual_seed(0))
    if kind == "stream":
        return DataLoader(Stream(), 4)
    if kind == "stateful":
        return StatefulDataLoader(TensorDataset(values), 4, shuffle=True)
    if kind == "two":
        return {"a": DataLoader(Noisy(values), 4, shuffle=True), "b": DataLoader(Noisy(values[:20]), 4, shuffle=True)}
    if kind == "workers":
        return DataLoader(Noisy(values), 4, shuffle=True, num_workers=2)
    if kind == "persistent":
        return DataLoader(TensorDataset(values), 4, shuffle=True, num_workers=2, persistent_workers=True)
    return DataLoader(Noisy(values), 4, shuffle=True)


def run(folder: Path, *, package: str = "lightning", stop: int = -1, **words: Any) -> list[tuple[Any, ...]]:
    """Train in a folder from its last checkpoint, and return what every batch was: step, epoch, loss, inputs."""
    library = importlib.import_module(PACKAGES[package])
    seen: list[tuple[Any, ...]] = []

    class Model(library.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(
                torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
            )
            self.save_hyperparameters({"width": 8, "act": torch.relu})

        def training_step(self, batch: Any, _index: int) -> Any:
            inputs = sum(one[0] for one in batch.values()) if isinstance(batch, dict) else batch[0]
            loss = self.net(inputs).square().mean()
            seen.append((self.global_step, self.current_epoch, float(loss).hex(), float(inputs.sum()).hex()))
            if len(seen) > 1 and self.global_step == stop:
                raise Stop
            return loss

        def validation_step(self, batch: Any, _index: int) -> None:
            self.log("val", self.net(batch[0]).square().mean())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
            if words.get("plateau"):
                scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val"}}
            by_step = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
            return [optimizer], [{"scheduler": by_step, "interval": "step"}]

    for name in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    library.seed_everything(words.get("seed", 0), verbose=False)
    saving = callback_of(package)(folder, **words.get("saving", {"every_n_train_steps": 5}))
    model = Model()
    trainer = library.Trainer(
        callbacks=[saving, *words.get("callbacks", ())],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 4, **words.get("trainer", {})},
    )
    validation = DataLoader(TensorDataset(torch.ones(8, 4)), 4)
    with contextlib.suppress(Stop):
        trainer.fit(model, data(words.get("data", "map")), validation, ckpt_path=words.get("ckpt_path", "last"))
        content = [value.detach().float().numpy().tobytes() for value in model.state_dict().values()]
        seen.append(("end", hashlib.sha256(b"".join(content)).hexdigest(), trainer.optimizers[0].param_groups[0]["lr"]))
    run.saving, run.trainer, run.model = saving, trainer, model  # type: ignore[attr-defined]
    return seen


def check_resumes(folder: Path, *, stop: int, starts_at: int, **words: Any) -> None:
    """Compare a run that is interrupted at a step, and resumed, with an uninterrupted one."""
    expected = run(folder / "whole", **words)
    first = run(folder / "torn", stop=stop, **words)
    assert first == expected[: len(first)]
    second = run(folder / "torn", seed=7, **words)
    assert second[0][0] == starts_at
    assert second == expected[[one[0] for one in expected].index(starts_at) :]
    assert set(_metrics(folder / "torn")) == set(_metrics(folder / "whole"))  # the same iterations


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("package", PACKAGES)
def test_within_an_epoch(tmp_path: Path, package: str) -> None:
    check_resumes(tmp_path, stop=17, starts_at=15, package=package)


CASES: dict[str, dict[str, Any]] = {
    "end of epoch": {"stop": 24, "starts_at": 22, "saving": {"every_n_train_steps": 11}},
    "epochs": {"stop": 24, "starts_at": 22, "saving": {"every_n_epochs": 2, "async_save": True}},
    "max_steps": {
        "stop": 24, "starts_at": 22, "saving": {"every_n_train_steps": 11},
        "trainer": {"max_steps": 30, "max_epochs": None},
    },
    "plateau": {"stop": 24, "starts_at": 22, "saving": {"every_n_epochs": 1}, "plateau": True},
    "validations within": {"stop": 17, "starts_at": 15, "trainer": {"val_check_interval": 5}},
    "accumulated": {
        "stop": 9, "starts_at": 8, "saving": {"every_n_train_steps": 4}, "trainer": {"accumulate_grad_batches": 2},
    },
    "no length": {"stop": 9, "starts_at": 8, "saving": {"every_n_train_steps": 4}, "data": "stream"},
    "stateful": {"stop": 17, "starts_at": 15, "data": "stateful"},
    "two loaders": {"stop": 17, "starts_at": 15, "data": "two"},
    "workers": {"stop": 17, "starts_at": 15, "data": "workers", "trainer": {"max_epochs": 2}},
    "persistent workers": {"stop": 17, "starts_at": 15, "data": "persistent"},
    "persistent workers, end of epoch": {
        "stop": 24, "starts_at": 22, "data": "persistent", "saving": {"every_n_train_steps": 11},
    },
    "bfloat16": {"stop": 17, "starts_at": 15, "trainer": {"precision": "bf16-true"}},
}  # fmt: skip


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("case", CASES)
def test_resumes(tmp_path: Path, case: str) -> None:
    check_resumes(tmp_path, **CASES[case])


@pytest.mark.usefixtures("_quick_saves")
def test_a_damaged_newest_iteration_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = run(tmp_path / "whole")
    run(tmp_path / "torn", stop=17)
    file = next((tmp_path / "torn" / "iteration_00000015").glob("*opt*.safetensors"), None)
    file = file or max((tmp_path / "torn" / "iteration_00000015").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    seen: list[Any] = []
    with caplog.at_level(logging.WARNING, "reshard"):
        second = run(tmp_path / "torn", seed=7, saving={"every_n_train_steps": 5, "on_event": seen.append})
    assert second == expected[10:]
    found = [(event.kind, event.iteration) for event in seen]
    assert found[:2] == [("skipped", 15), ("resumed", 10)]
    assert found[2:5] == [("begun", 15), ("written", 15), ("published", 15)]
    assert any("iteration_00000015" in line and "differ from" in line for line in caplog.messages)


def test_nothing_but_damage_is_refused(tmp_path: Path) -> None:
    run(tmp_path, stop=6)
    for file in (tmp_path / "iteration_00000005").glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(DamagedFileError, match="iteration_00000005"):
        run(tmp_path)


def test_the_best_are_kept(tmp_path: Path) -> None:
    words: dict[str, Any] = {
        "saving": {"monitor": "val", "save_top_k": 2, "every_n_epochs": 1, "save_last": True, "keep": 1}
    }
    run(tmp_path, stop=40, trainer={"max_epochs": 8}, **words)
    first = dict(run.saving.best_k_models)  # type: ignore[attr-defined]
    run(tmp_path, trainer={"max_epochs": 8}, **words)
    saving = run.saving  # type: ignore[attr-defined]
    kept = {path.name for path in tmp_path.glob("iteration_*")}
    scores = {number: report["val"] for number, report in _metrics(tmp_path).items()}
    best = sorted(scores, key=lambda number: scores[number])[:2]
    assert first
    assert {Path(path).name for path in saving.best_k_models} == {f"iteration_{number:08d}" for number in best}
    assert saving.best_model_path.endswith(f"{best[0]:08d}")
    assert float(saving.best_model_score) == scores[best[0]]
    assert kept == {f"iteration_{number:08d}" for number in {*best, 88}}
    trainer, model = run.trainer, run.model  # type: ignore[attr-defined]
    with torch.no_grad():
        model.net[0].weight.zero_()
    trainer.validate(model, DataLoader(TensorDataset(torch.ones(8, 4)), 4), ckpt_path="best", verbose=False)
    with reshard.open(saving.best_model_path) as checkpoint:
        assert model.net[0].weight.tolist() == checkpoint.read("net.0.weight").tolist()
    with torch.no_grad():
        model.net[0].weight.zero_()
    tensors = load_file(saving.best_model_path)
    model.load_state_dict({name: tensors[name] for name in model.state_dict()})
    assert torch.equal(model.net[0].weight, tensors["net.0.weight"])


def test_an_unknown_argument_is_one_of_the_public_class() -> None:
    with pytest.raises(TypeError, match=r"^ReshardCheckpoint.__init__\(\) got an unexpected .*'filename'"):
        callback_of("lightning")(filename="best")  # type: ignore[call-arg]


def _metrics(root: Path) -> dict[int, dict[str, float]]:
    lines = [importlib.import_module("json").loads(line) for line in (root / "saves.jsonl").read_text().splitlines()]
    return {line["iteration"]: line["metrics"] for line in lines}


def test_a_used_root_is_refused_without_resuming(tmp_path: Path) -> None:
    run(tmp_path, stop=6)
    with pytest.raises(ArgumentError, match="is at iteration 5, and this run at step 0"):
        run(tmp_path, ckpt_path=None)


def test_state_of_another_run_is_refused(tmp_path: Path) -> None:
    reshard.save(tmp_path, 5, {"net.0.weight": np.zeros((8, 4), np.float32)})
    with pytest.raises(MismatchError, match="has no state of a Trainer of Lightning"):
        run(tmp_path)


def test_a_callback_of_the_other_package_is_refused(tmp_path: Path) -> None:
    other = callback_of("lightning")(tmp_path)
    with pytest.raises(ArgumentError, match=r"belongs to lightning.pytorch, and the Trainer to pytorch_lightning"):
        run(tmp_path, package="pytorch_lightning", callbacks=[other])


def test_two_of_these_callbacks_are_refused_before_the_first_step(tmp_path: Path) -> None:
    other = callback_of("lightning")(tmp_path / "other", monitor="loss")
    with pytest.raises(ArgumentError, match="has two `ReshardCheckpoint`"):
        run(tmp_path / "one", package="lightning", callbacks=[other])
    assert not (tmp_path / "one").exists()


def test_fsdp1_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning makes a Trainer with it on GPUs only."""
    library = importlib.import_module("lightning.pytorch")
    trainer = library.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    monkeypatch.setattr(trainer._accelerator_connector, "strategy", library.strategies.FSDPStrategy())
    with pytest.raises(UnsupportedError, match="`FSDPStrategy`"):
        callback_of("lightning")(tmp_path).setup(trainer, library.LightningModule(), "fit")


def start(n_ranks: int, *words: object) -> subprocess.Popen[str]:
    """Start a program, on several ranks under torchrun, in a process group of its own."""
    command = [sys.executable, *map(str, words)]
    if n_ranks > 1:
        command[1:2] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}", str(words[0])]
        command[6:6] = ["--"] if words[0] == "-m" else []
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def finished(process: subprocess.Popen[str]) -> str:
    out, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors[-3000:]
    return out


@pytest.mark.slow
@pytest.mark.parametrize("n_ranks", [pytest.param(1, marks=long), 2])
def test_the_killed_example_goes_on(tmp_path: Path, n_ranks: int) -> None:
    """With one rank, and with two under DDP. `torchrun` starts the run that is not killed."""
    words = ["-m", "reshard.examples.train_lightning", "--epochs", "6", "--save-every", "7", "--out"]
    finished(start(n_ranks, *words, tmp_path / "whole", "--log", tmp_path / "whole.log"))
    in_fresh_process("lightning", tmp_path, n_ranks, *words[2:])


@long
@pytest.mark.slow
@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2)])
def test_model_parallel(tmp_path: Path, dp: int, tp: int) -> None:
    program = Path(__file__).with_name("lightning_parallel.py")
    whole = finished(start(2, program, tmp_path / "whole", dp, tp, -1, 0, 5)).splitlines()
    killed = start(2, program, tmp_path / "torn", dp, tp, 17, 0, 5)
    first = killed.communicate(timeout=240)[0].splitlines()
    resumed = start(2, program, tmp_path / "torn", dp, tp, -1, 5, 5)
    out, errors = resumed.communicate(timeout=240)
    assert "the sampler goes on with seed 0 of the checkpoint, not with 5" in errors
    second = out.splitlines()
    assert min(int(line.split()[0]) for line in second) == 15
    assert {*first, *second} == {*whole}


@long
@pytest.mark.slow
def test_another_number_of_ranks_resumes_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    """From two ranks with FSDP2 to one: the second epoch has all samples once."""
    program = Path(__file__).with_name("lightning_parallel.py")
    start(2, program, tmp_path, 2, 1, 16, 0, 11).communicate(timeout=240)
    lines = [line.split() for line in finished(start(1, program, tmp_path, 1, 1, -1, 0, 11)).splitlines()]
    assert [int(line[0]) for line in lines] == list(range(11, 11 + 22))
    samples = torch.randn(88, 4, generator=torch.Generator().manual_seed(0))
    assert sum(float.fromhex(line[3]) for line in lines) == pytest.approx(float(samples.sum()), abs=1e-4)


def test_another_number_of_ranks_is_refused_within_an_epoch() -> None:
    saved = {"lightning": {"is_end_of_epoch": False}}
    with pytest.raises(MismatchError, match="saved within an epoch by 2 ranks, and this run has 1"):
        resuming._check(saved, "x", 2, 1)
    resuming._check(saved, "x", 2, 2)
    resuming._check({"lightning": {"is_end_of_epoch": True}}, "x", 2, 1)


def test_the_scaler_and_the_datamodule_go_on(tmp_path: Path) -> None:
    def train(folder: str, stop: int = -1) -> tuple[Any, ...]:
        library = importlib.import_module("lightning.pytorch")

        class Counted(library.LightningDataModule):  # type: ignore[misc,name-defined]
            n = 0

            def train_dataloader(self) -> Any:
                return data("map")

            def state_dict(self) -> dict[str, Any]:
                return {"n": self.n}

            def load_state_dict(self, state: dict[str, Any]) -> None:
                self.n = state["n"]

        class Model(library.LightningModule):  # type: ignore[misc,name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.net = torch.nn.Linear(4, 1)

            def training_step(self, batch: Any, _index: int) -> Any:
                self.trainer.datamodule.n += 1
                if self.global_step == stop:
                    raise Stop
                return self.net(batch[0]).square().mean()

            def configure_optimizers(self) -> Any:
                return torch.optim.AdamW(self.parameters(), 1e-2)

        library.seed_everything(0, verbose=False)
        scaler: Any = torch.amp.GradScaler("cpu", growth_interval=3)
        trainer = library.Trainer(
            callbacks=[callback_of("lightning")(tmp_path / folder, every_n_train_steps=5)],
            plugins=[library.plugins.MixedPrecision("16-mixed", "cpu", scaler)],
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, max_epochs=2,
        )  # fmt: skip
        model, module = Model(), Counted()
        with contextlib.suppress(Stop):
            trainer.fit(model, datamodule=module, ckpt_path="last")
        return module.n, scaler.state_dict(), [one.tolist() for one in model.parameters()]

    whole = train("whole")
    train("torn", stop=17)
    assert train("torn") == whole
    assert whole[0] == 22
    assert whole[1]["scale"] != 65536.0  # it has changed


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize(
    ("kind", "saving", "options"),
    [
        ("EMAWeightAveraging", {"every_n_train_steps": 5}, {"decay": 0.9}),
        ("EMAWeightAveraging", {"every_n_epochs": 1}, {"update_every_n_steps": 3, "update_starting_at_epoch": 1}),
        ("WeightAveraging", {"every_n_train_steps": 5, "async_save": True}, {"use_buffers": False}),
    ],
)
def test_averaged_weights(kind: str, saving: Any, options: Any, tmp_path: Path) -> None:
    """A resumed run is the uninterrupted one, which ends with the average."""
    callbacks: Any = importlib.import_module("lightning.pytorch.callbacks")

    def of_folder(name: str, **words: Any) -> list[tuple[Any, ...]]:
        return run(tmp_path / name, callbacks=[getattr(callbacks, kind)(**options)], saving=saving, **words)

    expected = of_folder("whole")
    first = of_folder("torn", stop=17)
    assert first == expected[: len(first)]
    second = of_folder("torn", seed=7)
    assert second == expected[[one[0] for one in expected].index(second[0][0]) :]
    path = run.saving.last_model_path or run.saving.best_model_path  # type: ignore[attr-defined]
    averaged = reshard.open(path).extra()["lightning"]["weights"]["replaced"]
    assert averaged.keys() == run.model.state_dict().keys()  # type: ignore[attr-defined]
    seen: dict[str, Any] = {}
    model = run.model  # type: ignore[attr-defined]
    model.test_step = lambda *_: seen.update({key: one.clone() for key, one in model.state_dict().items()})
    run.trainer.callbacks = [one for one in run.trainer.callbacks if not isinstance(one, getattr(callbacks, kind))]  # type: ignore[attr-defined]
    run.trainer.test(model, DataLoader(TensorDataset(torch.ones(4, 4)), 4), ckpt_path=path, verbose=False)  # type: ignore[attr-defined]
    assert all(torch.equal(seen[key], one) for key, one in averaged.items())
    with pytest.raises(MismatchError, match=r"`net\.0\.weight` was saved beside other weights that a callback put"):
        run(tmp_path / "torn", saving=saving, trainer={"max_epochs": 6})


def test_replaced_weights_that_are_kept_nowhere_are_refused_before_the_first_step(tmp_path: Path) -> None:
    library: Any = importlib.import_module("lightning.pytorch")

    class Doubles(library.Callback):  # type: ignore[misc]
        def on_save_checkpoint(self, _trainer: Any, _module: Any, checkpoint: Any) -> None:
            checkpoint["state_dict"] = {key: 2 * one for key, one in checkpoint["state_dict"].items()}

    with pytest.raises(UnsupportedError, match=r"has replaced or added `net\.0\.weight` in the `state_dict`"):
        run(tmp_path, callbacks=[Doubles()])
    assert not list(tmp_path.glob("iteration*"))


def fit(  # noqa: PLR0917
    folder: Path,
    steps: int = 2,
    scheduler: Any = None,
    change: Any = None,
    lr: float = 0.1,
    decay: float = 0.1,
    loader: Any = None,
    ckpt_path: str = "last",
    **how: Any,
) -> Any:
    """Train a model of one layer for some steps; `change` gets the model first."""
    library = importlib.import_module("lightning.pytorch")

    class Model(library.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 1)
            self.seen: list[float] = []

        def training_step(self, batch: Any, _index: int) -> Any:
            self.seen += batch[:, 0].tolist()
            return sum(one(batch).square().mean() for one in self.children())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr, weight_decay=decay)
            made = torch.optim.lr_scheduler.StepLR(optimizer, 3) if scheduler is None else scheduler(optimizer)
            return [optimizer], [{"scheduler": made, "interval": "step"}]

    samples: Any = torch.arange(32.0).reshape(8, 4)
    loader = loader or DataLoader(samples, 2, shuffle=True)
    saving = callback_of("lightning")(folder, every_n_train_steps=1, **how)
    model: Any = Model()
    if change is not None:
        change(model)
    trainer = library.Trainer(
        callbacks=[saving], accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        max_steps=steps,
    )  # fmt: skip
    trainer.fit(model, loader, ckpt_path=ckpt_path)
    model.trainer_of_test = trainer
    return model


def test_a_start_from_other_weights(tmp_path: Path) -> None:
    weights = {"weight": torch.full((1, 4), 3.0), "bias": torch.full((1,), 5.0)}
    reshard.torch.save_file(weights, tmp_path / "w.safetensors")
    init = {"path": tmp_path / "w.safetensors", "names": {"rename": {"": "net."}}}
    with pytest.raises(MismatchError, match=r"`names=\{'rename': \{'': 'net\.'\}\}` of `InitFrom`"):
        fit(tmp_path / "wrong", init_from=tmp_path / "w.safetensors")
    model = fit(tmp_path / "run", init_from=init, lr=0.0)
    assert (model.net.weight.tolist(), model.net.bias.tolist()) == ([[3.0] * 4], [5.0])
    assert _metrics(tmp_path / "run").keys() == {1, 2}
    model = fit(tmp_path / "run", init_from=init, lr=0.5, steps=3)  # its own checkpoint, with the saved rate
    assert model.net.weight.tolist() == [[3.0] * 4]
    (tmp_path / "lightning.ckpt").parent.mkdir(exist_ok=True)
    model.trainer_of_test.save_checkpoint(tmp_path / "lightning.ckpt")
    with pytest.raises(ArgumentError, match=r"`init_from` is .*, and `ckpt_path` has another checkpoint"):
        fit(tmp_path / "other", init_from=init, ckpt_path=str(tmp_path / "lightning.ckpt"))


def test_strict_and_settings_of_the_callback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scheduler = torch.optim.lr_scheduler
    fit(tmp_path)
    with pytest.raises(MismatchError, match="`scheduler` was saved as StepLR, and is now ExponentialLR"):
        fit(tmp_path, steps=3, scheduler=lambda o: scheduler.ExponentialLR(o, 0.5))
    with pytest.raises(MismatchError, match=r"`step_size` of `scheduler` is 3 in the checkpoint, and 1"):
        fit(tmp_path, steps=3, scheduler=lambda o: scheduler.StepLR(o, 1), settings={"scheduler": "error"})
    fit(tmp_path, steps=3, decay=0.7, scheduler=lambda o: scheduler.StepLR(o, 1))
    told = [line for line in caplog.messages if "in the program" in line]
    assert len(told) == 2
    assert "`weight_decay` of `optimizer` is 0.1 in the checkpoint, and 0.7 in the program: the saved" in "".join(told)
    model = fit(tmp_path, steps=4, decay=0.7, settings={"optimizer": "program"})
    assert model.trainer_of_test.optimizers[0].param_groups[0]["weight_decay"] == 0.7

    def named(name: str) -> Any:
        return lambda model: setattr(model, name, torch.nn.Linear(4, 1))

    fit(tmp_path / "two", change=named("head"))
    with pytest.raises(MismatchError, match=r"lacks .*`other\.weight`.*, and the run does not have .*`head\.weight`"):
        fit(tmp_path / "two", steps=5, change=named("other"))
    caplog.clear()
    model = fit(tmp_path / "two", steps=5, change=named("other"), strict=False)
    assert model.trainer_of_test.global_step == 5
    assert any("lacks" in line and "`other.weight`" in line for line in caplog.messages), caplog.messages
    with pytest.raises(ArgumentError, match="`data`"):
        fit(tmp_path, data="old")


def test_the_next_epoch_has_other_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path)  # within the epoch of 4 steps
    samples: Any = torch.arange(100.0, 112.0).reshape(3, 4)
    other: Any = DataLoader(samples, 1, shuffle=True)
    model = fit(tmp_path, steps=5, data="new", loader=other)
    assert sorted(model.seen) == [100.0, 104.0, 108.0]
    assert (model.trainer_of_test.current_epoch, model.trainer_of_test.global_step) == (2, 5)
    assert any('`data="new"`' in line for line in caplog.messages)
    assert sorted(fit(tmp_path, steps=8, loader=other).seen) == [100.0, 104.0, 108.0]
