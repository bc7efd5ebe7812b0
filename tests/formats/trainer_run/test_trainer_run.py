"""A folder `checkpoint-<N>` of transformers' Trainer as a run: optimizer by parameter name, scheduler and step."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.formats.trainer_run.runs import Training
from tests.helpers.command_line import run

import reshard
from reshard.errors import CheckpointNotFoundError, DamagedFileError, ReshardError
from reshard.options import InitFrom
from reshard.torch import Checkpointer


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Training, Path]:
    training = Training()
    for number in range(1, 5):
        training.step(number)
    return training, training.save_as_trainer(tmp_path / "out" / "checkpoint-4", 4)


def test_it_is_a_model_and_a_run(saved: tuple[Training, Path], tmp_path: Path) -> None:
    training, folder = saved
    with reshard.open(folder) as checkpoint:
        assert checkpoint.format == "huggingface"
    with reshard.open(folder, format="trainer-run") as checkpoint:
        assert (checkpoint.iteration, checkpoint.keys("model")) == (4, sorted(training.model.state_dict()))
        state = training.optimizer.state_dict()["state"]
        assert (checkpoint.read("optimizer.state.5.exp_avg") == state[5]["exp_avg"].numpy()).all()
        extra = checkpoint.extra()
        assert (extra["lr_scheduler.last_epoch"], extra["trainer_state"]["epoch"]) == (4, 0.5)
        assert extra["optimizer.param_groups"][1]["weight_decay"] == 0.0
    assert "trainer-run, iteration 4" in run("inspect", folder, "--format", "trainer-run").output
    assert run("convert", folder, tmp_path / "dcp", "--format", "trainer-run", "--to", "dcp").exit_code == 0
    with reshard.open(tmp_path / "dcp") as checkpoint:
        assert "optimizer.state.0.exp_avg" in checkpoint


def test_a_run_goes_on_from_it(saved: tuple[Training, Path], tmp_path: Path) -> None:
    training, folder = saved
    other = Training()
    config = {"load_checkpoint": str(folder), "resume_training": True}
    checkpointer = Checkpointer.from_config(config, root=tmp_path / "run", signals=(), save_every=1)
    decision = checkpointer.resume(model=other.model, optimizer=other.optimizer, scheduler=other.scheduler)
    assert decision.initial_step == 4
    with checkpointer:
        for number in range(5, 8):
            assert other.step(number) == training.step(number)
            checkpointer.step(number)
    assert all(torch.equal(a, b) for a, b in zip(other.model.parameters(), training.model.parameters(), strict=True))
    for one, same in zip(other.model.parameters(), training.model.parameters(), strict=True):
        for slot, value in training.optimizer.state[same].items():
            assert torch.equal(other.optimizer.state[one][slot], value)
    assert other.scheduler.state_dict() == training.scheduler.state_dict()


def test_a_new_run_takes_the_optimizer(saved: tuple[Training, Path], tmp_path: Path) -> None:
    training, folder = saved
    other = Training()
    checkpointer = Checkpointer(tmp_path / "run", save_every=1, signals=())
    init: Any = InitFrom(folder, format="trainer-run", fresh_optimizer=False)
    with checkpointer:
        decision = checkpointer.resume(model=other.model, optimizer=other.optimizer, init_from=init)
        assert decision.initial_step == 0
    for one, same in zip(other.model.parameters(), training.model.parameters(), strict=True):
        assert torch.equal(one, same)
        assert torch.equal(other.optimizer.state[one]["exp_avg_sq"], training.optimizer.state[same]["exp_avg_sq"])


def test_state_that_is_refused(saved: tuple[Training, Path], tmp_path: Path) -> None:
    _, folder = saved
    for text in ("", "[]", "{}", '{"global_step": -1}', '{"global_step": 1.5}', '{"global_step": true}', "{"):
        (folder / "trainer_state.json").write_text(text)
        with pytest.raises(ReshardError):
            reshard.open(folder, format="trainer-run")
    (folder / "trainer_state.json").write_text('{"global_step": 4}')
    data = (folder / "optimizer.pt").read_bytes()
    for n_bytes in (0, 4, 100, len(data) // 2, len(data) - 1):
        (folder / "optimizer.pt").write_bytes(data[:n_bytes])
        with pytest.raises(DamagedFileError):
            reshard.open(folder, format="trainer-run")
    (folder / "optimizer.pt").write_bytes(data)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointNotFoundError, match="the state of a run, and no weights"):
        reshard.open(folder)
    shutil.rmtree(folder)


def test_state_that_accelerate_saved(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    training = Training()
    parts = accelerator.prepare(training.model, training.optimizer, training.scheduler)
    training.step(1)
    accelerator.save_state(str(tmp_path / "state"))
    other = Training()
    with Checkpointer(tmp_path / "run", save_every=1, signals=()) as checkpointer:
        init: Any = InitFrom(tmp_path / "state", format="trainer-run", fresh_optimizer=False)
        checkpointer.resume(model=other.model, optimizer=other.optimizer, init_from=init)
    for one, same in zip(other.model.parameters(), training.model.parameters(), strict=True):
        assert torch.equal(one, same)
        assert torch.equal(other.optimizer.state[one]["exp_avg"], training.optimizer.state[same]["exp_avg"])
    with reshard.open(tmp_path / "state", format="trainer-run") as checkpoint:
        assert (checkpoint.common, checkpoint.extra()["lr_scheduler.last_epoch"]) == (None, 1)
    torch.save({}, tmp_path / "state" / "optimizer_1.bin")
    with pytest.raises(ReshardError, match="no checkpoint of the format `trainer-run`"):
        reshard.open(tmp_path / "state", format="trainer-run")
    assert parts


@pytest.mark.slow
def test_the_optimizer_of_trainer_comes_into_the_callback(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from reshard.transformers import ReshardCallback

    rows = [{"input_ids": (ids := torch.arange(8) + n), "labels": ids} for n in range(16)]

    def trainer(folder: Path, callbacks: list[Any], steps: int) -> Any:
        torch.manual_seed(0)
        sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=1))
        kept: dict[str, Any] = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "weight_decay": 0.1}
        args = transformers.TrainingArguments(
            str(folder), max_steps=steps, save_steps=2, per_device_train_batch_size=2, **kept
        )
        return transformers.Trainer(model, args, train_dataset=rows, callbacks=callbacks)

    first = trainer(tmp_path / "first", [], 2)
    first.train()
    saved = {
        name: {slot: value.clone() for slot, value in first.optimizer.optimizer.state[parameter].items()}
        for name, parameter in first.model.named_parameters()
    }
    found: dict[str, Any] = {}

    class See(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_begin(self, *_: Any, model: Any, optimizer: Any, **__: Any) -> None:
            for name, parameter in model.named_parameters():
                state = optimizer.optimizer.state[parameter]
                found.setdefault(name, {slot: value.clone() for slot, value in state.items()})

    init = InitFrom(tmp_path / "first" / "checkpoint-2", format="trainer-run", fresh_optimizer=False)
    trainer(tmp_path / "second", [ReshardCallback(tmp_path / "root", init_from=init), See()], 1).train()
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name][slot], saved[name][slot]) for name in saved for slot in saved[name])


@pytest.mark.slow
def test_optimizers_of_bitsandbytes_go_on(tmp_path: Path) -> None:
    """In a process of its own: the threads of bitsandbytes must not be in the one from which other tests fork ranks."""
    if importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed")
    program = Path(__file__).parent / "eight_bits.py"
    command = [sys.executable, str(program), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    refused = "adamw_bnb_8bit by name refused: the state of the optimizer is there, and cannot be loaded"
    came = ["adamw_bnb_8bit goes on", "lion_8bit goes on", refused]
    printed = [line for line in done.stdout.splitlines() if not line.startswith("{")]  # those of Trainer
    assert (done.returncode, printed) == (0, came), done.stderr
