"""A `checkpoint-<N>` that Trainer saved with DeepSpeed: weights and optimizer of ZeRO, by the names of the parameters.

The expected tensors are those of the live engine. Neither DeepSpeed nor Trainer is needed to read the folders.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import deepspeed_files
from tests.helpers.command_line import run
from tests.helpers.gpt_training import GptTraining

import reshard
from reshard.errors import DamagedFileError, MismatchError, ReshardError, UnsupportedError
from reshard.options import InitFrom
from reshard.torch import Checkpointer

SAVED = Path(__file__).parents[2] / "data" / "torch" / "trainer_deepspeed"
STAGES = (1, 2, 3)


def expected(stage: int) -> dict[str, Any]:
    return reshard.load_file(SAVED / f"zero{stage}.safetensors")


class Training(GptTraining):
    def assert_restored(self, stage: int) -> None:
        whole = expected(stage)
        for name, parameter in self.model.named_parameters():
            assert np.array_equal(parameter.detach().numpy(), whole[name]), name
            state = self.optimizer.state[parameter]
            assert state["step"] == 3
            for slot in ("exp_avg", "exp_avg_sq"):
                assert np.array_equal(state[slot].numpy(), whole[f"optimizer.{name}.{slot}"]), (name, slot)


@pytest.mark.parametrize("stage", STAGES)
def test_the_tensors_are_those_of_the_run(stage: int, tmp_path: Path) -> None:
    folder = SAVED / f"zero{stage}"
    with reshard.open(folder, format="trainer-run") as checkpoint:
        assert (checkpoint.format, checkpoint.iteration) == ("trainer-run", 3)
        for key, tensor in expected(stage).items():
            start, _, rest = key.partition(".")
            name = f"optimizer.state.{rest}" if start == "optimizer" else key
            assert checkpoint.read(name).dtype == np.float32
            assert np.array_equal(checkpoint.read(name), tensor), name
        # The tied weight, and a step for each parameter.
        assert np.array_equal(checkpoint.read("lm_head.weight"), expected(stage)["transformer.wte.weight"])
        assert checkpoint.read("optimizer.state.transformer.wte.weight.step") == 3
        assert len(checkpoint) == 17 + 3 * 16
        extra = checkpoint.extra()
        of_scheduler = "deepspeed_scheduler.last_batch_iteration" if stage == 1 else "lr_scheduler.last_epoch"
        assert extra[of_scheduler] == (2 if stage == 1 else 3)
        assert extra["trainer_state"]["epoch"] == 0.75
        decays = {one["weight_decay"]: one["params"] for one in extra["optimizer.param_groups"]}
        assert "transformer.wte.weight" in decays[0.1]
        assert "transformer.ln_f.weight" in decays[0.0]
    report = reshard.convert(folder, tmp_path / "m.safetensors", format="trainer-run", part="model")
    assert report.n_tensors == 17
    assert run("verify", folder, "--format", "trainer-run").exit_code == 0
    assert "trainer-run, iteration 3" in run("inspect", folder, "--format", "trainer-run").output


def test_what_is_opened_without_a_format() -> None:
    """A folder with a model is a model; without one it is the run. The checkpoint of DeepSpeed can be named."""
    for stage, format_ in ((1, "huggingface"), (2, "huggingface"), (3, "trainer-run")):
        folder = SAVED / f"zero{stage}"
        with reshard.open(folder) as checkpoint:
            assert checkpoint.format == format_
        assert run("inspect", folder).exit_code == 0
        with reshard.open(folder, format="deepspeed") as checkpoint:
            assert checkpoint.format == "deepspeed"


def test_a_model_that_is_converted_from_it_is_opened(tmp_path: Path) -> None:
    """`latest` of DeepSpeed is not copied with the configuration: the folder would be one of its runs, too."""
    shutil.copytree(SAVED / "zero3", tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-3" / "zero_to_fp32.py").write_text("")
    reshard.convert(tmp_path / "checkpoint-3", tmp_path / "model", to="huggingface", part="model")
    there = {file.name for file in (tmp_path / "model").iterdir()}
    assert {"config.json", "model.safetensors"} <= there
    assert not there & {"latest", "zero_to_fp32.py"}
    with reshard.open(tmp_path / "model") as checkpoint:
        assert checkpoint.format == "huggingface"
        assert np.array_equal(checkpoint.read("transformer.wte.weight"), expected(3)["transformer.wte.weight"])


@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_without_deepspeed_goes_on_from_it(stage: int, tmp_path: Path) -> None:
    training = Training()
    config = {"load_checkpoint": str(SAVED / f"zero{stage}"), "resume_training": True}
    with Checkpointer.from_config(config, root=tmp_path / "run", signals=(), save_every=1) as checkpointer:
        decision = checkpointer.resume(model=training.model, optimizer=training.optimizer, scheduler=training.scheduler)
        assert decision.initial_step == 3
        training.assert_restored(stage)
        assert training.scheduler.last_epoch == 3
        assert [(one["lr"], one["weight_decay"]) for one in training.optimizer.param_groups] == [
            (0.0025, 0.0), (0.0025, 0.1)
        ]  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_a_new_run_takes_the_optimizer(stage: int, tmp_path: Path) -> None:
    training = Training()
    init: Any = InitFrom(SAVED / f"zero{stage}", format="trainer-run", fresh_optimizer=False)
    with Checkpointer(tmp_path / "run", save_every=1, signals=()) as checkpointer:
        decision = checkpointer.resume(model=training.model, optimizer=training.optimizer, init_from=init)
    assert decision.initial_step == 0
    training.assert_restored(stage)


@pytest.mark.parametrize("stage", STAGES)
def test_files_that_are_missing_or_damaged(stage: int, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-3"
    shutil.copytree(SAVED / f"zero{stage}", folder)
    for file in sorted((folder / "global_step3").iterdir()):
        data = file.read_bytes()
        file.unlink()
        with pytest.raises(ReshardError):
            reshard.open(folder, format="trainer-run")
        for n_bytes in (0, 4, 100, len(data) // 3, len(data) // 2, len(data) - 1):
            file.write_bytes(data[:n_bytes])
            with pytest.raises(ReshardError):
                reshard.open(folder, format="trainer-run")
        file.write_bytes(data)
    for text in ("", "[]", "{}", '{"global_step": -1}', '{"global_step": 1.5}', '{"global_step": true}', "{"):
        (folder / "trainer_state.json").write_text(text)
        with pytest.raises(ReshardError):
            reshard.open(folder, format="trainer-run")
    # Files of two saves in one folder.
    (folder / "trainer_state.json").write_text('{"global_step": 4}')
    with pytest.raises(DamagedFileError, match=r"is of step 4, the checkpoint of DeepSpeed in .* of step 3"):
        reshard.open(folder, format="trainer-run")
    (folder / "trainer_state.json").unlink()
    if stage == 3:
        with reshard.open(folder) as checkpoint:
            assert checkpoint.format == "deepspeed"


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Copies the folder of a stage, and changes its files of the optimizer and of the model."""
    deepspeed_files.stand_in(monkeypatch)

    def copy(stage: int, change: Any = None, change_model: Any = None) -> Path:
        folder = tmp_path / f"checkpoint-{stage}"
        shutil.copytree(SAVED / f"zero{stage}", folder)
        for file in (folder / "global_step3").glob("*_states.pt"):
            is_optimizer = file.name.endswith("optim_states.pt")
            if is_optimizer and change is not None:
                deepspeed_files.edited_state(file, change)
            elif not is_optimizer and change_model is not None:
                deepspeed_files.edited(file, change_model)
        return folder

    return copy


def resumed(folder: Path, root: Path) -> Training:
    training = Training()
    init: Any = InitFrom(folder, format="trainer-run", fresh_optimizer=False)
    with Checkpointer(root, save_every=1, signals=()) as checkpointer:
        checkpointer.resume(model=training.model, optimizer=training.optimizer, init_from=init)
    return training


def test_groups_at_different_steps_are_refused(copied: Any) -> None:
    folder = copied(1, lambda state: state["base_optimizer_state"]["state"][1].update(step=torch.tensor(2.0)))
    with pytest.raises(UnsupportedError, match="at different steps"):
        reshard.open(folder, format="trainer-run")


def set_steps(state: dict[str, Any], of_state: int | None, of_groups: tuple[int | None, ...]) -> None:
    """Replace the steps of the state by integers there, in the groups, or in both."""
    inner = state["base_optimizer_state"]
    for one, group, of_group in zip(inner["state"].values(), inner["param_groups"], of_groups, strict=True):
        del one["step"]
        one.update({} if of_state is None else {"step": of_state})
        group.update({} if of_group is None else {"step": of_group})


@pytest.mark.parametrize(("of_state", "of_groups"), [(3, (0, 0)), (3, (None, None)), (None, (3, 3)), (3, (0, 7))])
def test_a_step_that_is_no_tensor(
    of_state: int | None, of_groups: tuple[int | None, ...], copied: Any, tmp_path: Path
) -> None:
    """FusedAdam counts in the state, and its groups have the step 0; DeepSpeedCPUAdam has no step in the groups."""

    training = resumed(copied(2, lambda state: set_steps(state, of_state, of_groups)), tmp_path / "run")
    training.assert_restored(2)
    for parameter in training.model.parameters():
        step = training.optimizer.state[parameter]["step"]
        assert (step.dtype, step.shape) == (torch.float32, ())
        parameter.grad = torch.ones_like(parameter)
    training.optimizer.step()
    assert all(state["step"] == 4 for state in training.optimizer.state.values())


@pytest.mark.parametrize(("of_groups", "message"), [((2, 3), "at different steps"), ((None, None), "records no step")])
def test_steps_that_are_not_known_are_refused(of_groups: tuple[int | None, ...], message: str, copied: Any) -> None:
    with pytest.raises(UnsupportedError, match=message) as caught:
        reshard.open(copied(2, lambda state: set_steps(state, None, of_groups)), format="trainer-run")
    assert "format='deepspeed'" in str(caught.value.hint)


@pytest.mark.parametrize(("tree", "n_steps"), [("ds_experts_ep2", 2), ("ds_pipeline_dp2", 1)])
def test_experts_and_pipeline_stages_are_refused(tree: str, n_steps: int, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(SAVED.parent / tree / "checkpoint" / "t", folder / f"global_step{n_steps}")
    (folder / "latest").write_text(f"global_step{n_steps}")
    with reshard.open(folder, format="deepspeed") as checkpoint:
        n_made = checkpoint.iteration
    (folder / "trainer_state.json").write_text(f'{{"global_step": {n_made}}}')
    with pytest.raises(UnsupportedError, match=r"groups of parameters .* are not known") as caught:
        reshard.open(folder, format="trainer-run")
    assert "format='deepspeed'" in str(caught.value.hint)


def test_a_scheduler_of_deepspeed_is_not_loaded_into_another(tmp_path: Path) -> None:
    training = Training()
    scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 5)  # whose `load_state_dict` takes any values
    config = {"load_checkpoint": str(SAVED / "zero1"), "resume_training": True}
    with (
        Checkpointer.from_config(config, root=tmp_path / "run", signals=(), save_every=1) as checkpointer,
        pytest.raises(MismatchError, match="lacks `scheduler`"),
    ):
        checkpointer.resume(model=training.model, optimizer=training.optimizer, scheduler=scheduler)
    assert not hasattr(scheduler, "last_batch_iteration")


def test_the_file_of_the_scheduler_replaces_what_deepspeed_has_of_one(copied: Any) -> None:
    state = {"last_epoch": 1, "of_engine": 5, "_last_lr": [0.5]}
    folder = copied(2, change_model=lambda content: content.update(lr_scheduler=state))
    with reshard.open(folder, format="trainer-run") as checkpoint:
        extra = checkpoint.extra()
        assert extra["lr_scheduler.last_epoch"] == 3
        assert "lr_scheduler.of_engine" not in extra
    (folder / "scheduler.pt").unlink()
    with reshard.open(folder, format="trainer-run") as checkpoint:  # a scheduler of torch, given to the engine
        assert checkpoint.extra()["lr_scheduler.of_engine"] == 5


def test_sub_groups_of_stage_3(copied: Any) -> None:
    """A group of parameters that is larger than `sub_group_size` is in several; the options name their numbers."""
    n_first = 4

    def split_model(content: dict[str, Any]) -> None:
        first, second = content["param_shapes"]
        names = list(second)
        parts = names[:n_first], names[n_first:]
        content["param_shapes"] = [first, *({name: second[name] for name in part} for part in parts)]
        sizes.append(sum(-(-second[name].numel() // 2) for name in parts[0]))

    def split(state: dict[str, Any]) -> None:
        flat, inner = state["fp32_flat_groups"], state["optimizer_state_dict"]
        n = sizes[0]
        state["fp32_flat_groups"] = [flat[0], flat[1][:n].clone(), flat[1][n:].clone()]
        whole = inner["state"].pop(1)
        for number, part in ((1, slice(0, n)), (2, slice(n, None))):
            inner["state"][number] = {slot: one[part].clone() if one.ndim else one for slot, one in whole.items()}
        inner["param_groups"][1]["params"] = [1, 2]

    sizes: list[int] = []
    folder = copied(3, change_model=split_model)
    for file in (folder / "global_step3").glob("*optim_states.pt"):
        deepspeed_files.edited_state(file, split)
    with reshard.open(SAVED / "zero3", format="trainer-run") as checkpoint:
        expected_groups = checkpoint.extra()["optimizer.param_groups"]
    with reshard.open(folder, format="trainer-run") as checkpoint:
        assert checkpoint.extra()["optimizer.param_groups"] == expected_groups
        for key, tensor in expected(3).items():
            start, _, rest = key.partition(".")
            name = f"optimizer.state.{rest}" if start == "optimizer" else key
            assert np.array_equal(checkpoint.read(name), tensor), name


@pytest.mark.slow
@pytest.mark.parametrize("stage", [3])
def test_a_run_of_trainer_goes_on_with_the_callback(stage: int, tmp_path: Path) -> None:
    """Model, optimizer, scheduler and position, by `resume_from_checkpoint`."""
    transformers = pytest.importorskip("transformers")
    from reshard.transformers import ReshardCallback

    rows = [{"input_ids": (ids := (torch.arange(8) + n) % 16), "labels": ids} for n in range(8)]
    folder = tmp_path / "checkpoint-3"
    shutil.copytree(SAVED / f"zero{stage}", folder)
    (folder / "rng_state_0.pth").rename(folder / "rng_state.pth")
    (folder / "rng_state_1.pth").unlink()
    found: list[Any] = []

    class See(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_begin(self, *args: Any, model: Any, optimizer: Any, lr_scheduler: Any, **__: Any) -> None:
            training = Training()
            training.model, training.optimizer = model, optimizer.optimizer
            training.assert_restored(stage)
            found.append((args[1].global_step, args[1].epoch, lr_scheduler.last_epoch))
            found.append([one["lr"] for one in optimizer.param_groups])

    def trainer(steps: int, see: list[Any]) -> Any:
        args = transformers.TrainingArguments(
            str(tmp_path / "out"),
            max_steps=steps,
            per_device_train_batch_size=2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            weight_decay=0.1,
            learning_rate=0.01,
        )
        callbacks = [ReshardCallback(tmp_path / "root"), *see]
        return transformers.Trainer(Training().model, args, train_dataset=rows, callbacks=callbacks)

    trainer(4, [See()]).train(resume_from_checkpoint=str(folder))
    assert found == [(3, 0.75, 3), [0.0025, 0.0025]]
    with reshard.open(tmp_path / "root") as checkpoint:
        assert checkpoint.iteration == 4
    shutil.rmtree(tmp_path / "root")
    other = trainer(4, [])  # another number of groups than the scheduler has rates
    parameters = [{"params": [one], "weight_decay": 0.1} for one in other.model.parameters()]
    other.optimizer = torch.optim.AdamW(parameters, lr=0.01)
    with pytest.raises(MismatchError, match=r"has the learning rates of 2 groups .* has 16 groups"):
        other.train(resume_from_checkpoint=str(folder))
    (folder / "scheduler.pt").unlink()
    shutil.rmtree(tmp_path / "root", ignore_errors=True)
    with pytest.raises(UnsupportedError, match="its scheduler is one of DeepSpeed"):
        trainer(4, []).train(resume_from_checkpoint=str(folder))
