"""A `checkpoint-<N>` that Trainer saved with FSDP: weights, and the optimizer by the names of the parameters."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.command_line import run
from tests.helpers.gpt_training import GptTraining

import reshard
from reshard.errors import CheckpointNotFoundError, DamagedFileError, ReshardError, UnsupportedError
from reshard.options import InitFrom
from reshard.torch import Checkpointer

SAVED = Path(__file__).parents[2] / "data" / "torch" / "trainer_fsdp2"
FORMS = ("sharded", "full")


def expected() -> dict[str, Any]:
    """Weights and optimizer of the run, gathered before it saved."""
    return reshard.load_file(SAVED / "expected.safetensors")


@pytest.mark.parametrize("form", FORMS)
def test_the_tensors_are_those_of_the_run(form: str, tmp_path: Path) -> None:
    with reshard.open(SAVED / form, format="trainer-run") as checkpoint:
        assert (checkpoint.format, checkpoint.iteration) == ("trainer-run", 3)
        weights = set(checkpoint.keys("model")) - {"lm_head.weight"}
        assert np.array_equal(checkpoint.read("lm_head.weight"), expected()["transformer.wte.weight"])
        for key, tensor in expected().items():
            start, _, rest = key.partition(".")
            name = f"optimizer.state.{rest}" if start == "optimizer" else key
            assert np.array_equal(checkpoint.read(name), tensor), name
            weights.discard(key)
        assert not weights
        assert len(checkpoint) == len(expected()) + 1
        extra = checkpoint.extra()
        assert (extra["lr_scheduler.last_epoch"], extra["trainer_state"]["global_step"]) == (3, 3)
    report = reshard.convert(SAVED / form, tmp_path / "m.safetensors", format="trainer-run", part="model")
    assert report.n_tensors == 17
    assert run("verify", SAVED / form, "--format", "trainer-run").exit_code == 0
    assert "trainer-run, iteration 3" in run("inspect", SAVED / form, "--format", "trainer-run").output


def test_what_is_opened_without_a_format() -> None:
    """Sharded weights are no model of transformers, so the folder is the run."""
    with reshard.open(SAVED / "sharded") as checkpoint:
        assert checkpoint.format == "trainer-run"
    with reshard.open(SAVED / "full") as checkpoint:
        assert checkpoint.format == "huggingface"


class Training(GptTraining):
    def assert_restored(self) -> None:
        for name, parameter in self.model.named_parameters():
            assert np.array_equal(parameter.detach().numpy(), expected()[name]), name
            state = self.optimizer.state[parameter]
            for slot in ("exp_avg", "exp_avg_sq", "step"):
                assert np.array_equal(state[slot].numpy(), expected()[f"optimizer.{name}.{slot}"]), (name, slot)


@pytest.mark.parametrize("form", FORMS)
def test_a_run_without_fsdp_goes_on_from_it(form: str, tmp_path: Path) -> None:
    training = Training()
    config = {"load_checkpoint": str(SAVED / form), "resume_training": True}
    with Checkpointer.from_config(config, root=tmp_path / "run", signals=(), save_every=1) as checkpointer:
        decision = checkpointer.resume(model=training.model, optimizer=training.optimizer, scheduler=training.scheduler)
        assert decision.initial_step == 3
        training.assert_restored()
        assert training.scheduler.last_epoch == 3
        assert [(one["lr"], one["weight_decay"]) for one in training.optimizer.param_groups] == [
            (0.0025, 0.0), (0.0025, 0.1)
        ]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_new_run_takes_the_optimizer(form: str, tmp_path: Path) -> None:
    training = Training()
    init: Any = InitFrom(SAVED / form, format="trainer-run", fresh_optimizer=False)
    with Checkpointer(tmp_path / "run", save_every=1, signals=()) as checkpointer:
        decision = checkpointer.resume(model=training.model, optimizer=training.optimizer, init_from=init)
    assert decision.initial_step == 0
    training.assert_restored()


def test_what_lacks_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-3"
    shutil.copytree(SAVED / "sharded", folder)
    (folder / "optimizer_0" / "__1_0.distcp").rename(tmp_path / "away")
    with pytest.raises(ReshardError, match="__1_0"):
        reshard.open(folder)
    (tmp_path / "away").rename(folder / "optimizer_0" / "__1_0.distcp")
    (folder / "optimizer_0" / ".metadata").unlink()
    with pytest.raises(CheckpointNotFoundError, match="the save was not finished"):
        reshard.open(folder)
    shutil.rmtree(folder / "optimizer_0")
    with pytest.raises(CheckpointNotFoundError):
        reshard.open(folder)
    shutil.copytree(SAVED / "full", tmp_path / "full")
    file = tmp_path / "full" / "pytorch_model_fsdp.bin"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(DamagedFileError, match="pytorch_model_fsdp"):
        reshard.open(tmp_path / "full", format="trainer-run")
    # Of two optimizers it is not known which one the run has.
    shutil.copytree(SAVED / "sharded", tmp_path / "two")
    shutil.copytree(tmp_path / "two" / "optimizer_0", tmp_path / "two" / "optimizer_1")
    with pytest.raises(CheckpointNotFoundError):
        reshard.open(tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_model_and_optimizer_come_into_the_callback(form: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from reshard.transformers import ReshardCallback

    rows = [{"input_ids": (ids := (torch.arange(8) + n) % 16), "labels": ids} for n in range(4)]
    found: list[str] = []

    class See(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_begin(self, *_: Any, model: Any, optimizer: Any, **__: Any) -> None:
            for name, parameter in model.named_parameters():
                assert np.array_equal(parameter.detach().numpy(), expected()[name]), name
                for slot, value in optimizer.optimizer.state[parameter].items():
                    assert np.array_equal(value.numpy(), expected()[f"optimizer.{name}.{slot}"]), (name, slot)
                    found.append(name)

    init = InitFrom(SAVED / form, format="trainer-run", fresh_optimizer=False)
    args = transformers.TrainingArguments(
        str(tmp_path / "out"), max_steps=1, per_device_train_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True
    )
    callbacks = [ReshardCallback(tmp_path / "root", init_from=init), See()]
    transformers.Trainer(Training().model, args, train_dataset=rows, callbacks=callbacks).train()
    assert len(found) == 3 * 16


@pytest.mark.parametrize(
    ("first", "second", "name"),
    [
        ("sharded", "full", "pytorch_model_fsdp.bin"),
        ("sharded", "full", "optimizer.bin"),
        ("full", "sharded", "pytorch_model_fsdp_0"),
    ],
)
def test_shards_beside_whole_files_are_two_answers(first: str, second: str, name: str, tmp_path: Path) -> None:
    """A run that was saved again under the other kind of state dict leaves both."""
    folder = shutil.copytree(SAVED / first, tmp_path / "checkpoint-3")
    (shutil.copytree if (SAVED / second / name).is_dir() else shutil.copy)(SAVED / second / name, folder / name)
    with pytest.raises(UnsupportedError, match="both fit: they can be of different saves") as caught:
        reshard.open(folder, format="trainer-run")
    kind = name.partition("_fsdp")[0].removesuffix(".bin")
    both = {"pytorch_model": ("pytorch_model_fsdp_0", "pytorch_model_fsdp.bin"), "optimizer": ("optimizer_0", name)}
    assert all(f"`{folder / one}`" in str(caught.value) for one in both[kind])
    with reshard.open(folder / both[kind][0]) as alone:
        assert len(alone) > 0


def test_what_rank_0_has_of_the_optimizer_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Trainer of transformers 4.31 to 4.35 saves it beside the optimizer that FSDP gathers."""
    for form in FORMS:
        folder = shutil.copytree(SAVED / form, tmp_path / form)
        torch.save({"state": {0: {"exp_avg": torch.ones(7)}}, "param_groups": []}, folder / "optimizer.pt")
        caplog.clear()
        with reshard.open(folder, format="trainer-run") as checkpoint:
            assert set(checkpoint) == set(reshard.open(SAVED / form, format="trainer-run"))
        assert "optimizer.pt is not: beside an optimizer of FSDP" in caplog.text
    for name in ("pytorch_model_fsdp.bin", "pytorch_model_fsdp_0"):
        path = tmp_path / FORMS[name.endswith(".bin")] / name
        path.rename(path.with_name("moved"))
        with pytest.raises(UnsupportedError, match=r"`.*/optimizer[_.].*` and `.*/optimizer\.pt` both fit"):
            reshard.open(path.parent, format="trainer-run")
