"""Folders of a Trainer whose files are damaged or contradict each other: refused before state is lost."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.formats.trainer_run.runs import Training

import reshard
from reshard.errors import MismatchError, ReshardError
from reshard.torch import Checkpointer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Change = Callable[[Path], object]

STATE, OPTIMIZER, SCHEDULER, WEIGHTS = "trainer_state.json", "optimizer.pt", "scheduler.pt", "model.safetensors"


class RunsCode:
    def __reduce__(self) -> Any:
        return os.system, ("touch PWNED",)


def state(value: Any) -> Change:
    return lambda folder: (folder / STATE).write_bytes(
        value if isinstance(value, bytes) else json.dumps(value).encode()
    )


def cut(name: str, n_bytes: int) -> Change:
    return lambda folder: os.truncate(folder / name, n_bytes)


def replaced(name: str, make: Callable[[Path], object]) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return change


def saved(name: str, value: Any) -> Change:
    return lambda folder: torch.save(value, folder / name)


def optimizer(edit: Callable[[dict[str, Any]], object]) -> Change:
    def change(folder: Path) -> None:
        content = torch.load(folder / OPTIMIZER, weights_only=True)
        edit(content)
        torch.save(content, folder / OPTIMIZER)

    return change


def first(**slots: Any) -> Change:
    return optimizer(lambda content: content["state"][0].update(slots))


def group(**options: Any) -> Change:
    return optimizer(lambda content: content["param_groups"][0].update(options))


NO_STEP = "has no number of steps, `global_step`"
HOSTILE: dict[str, tuple[Change, str]] = {
    "an empty state": (state(b""), "is not valid JSON"),
    "a list": (state([]), NO_STEP),
    "null": (state(None), NO_STEP),
    "text": (state("x"), NO_STEP),
    "no step": (state({}), NO_STEP),
    "a negative step": (state({"global_step": -1}), NO_STEP),
    "half a step": (state({"global_step": 1.5}), NO_STEP),
    "true as step": (state({"global_step": True}), NO_STEP),
    "text as step": (state({"global_step": "4"}), NO_STEP),
    "null as step": (state({"global_step": None}), NO_STEP),
    "a list as step": (state({"global_step": [4]}), NO_STEP),
    "a step beyond 64 bits": (state({"global_step": 1 << 70}), "does not fit 64 bits"),
    "NaN": (state(b'{"global_step": NaN}'), "NaN is not a JSON number"),
    "infinity": (state(b'{"global_step": Infinity}'), "Infinity is not a JSON number"),
    "two steps": (state(b'{"global_step": 4, "global_step": 5}'), "the name `global_step` is repeated"),
    "a state that is cut off": (state(b'{"global_step": 4'), "is not valid JSON"),
    "text behind the state": (state(b'{"global_step": 4} x'), "Extra data"),
    "no UTF-8": (state(b'{"\xff": 4, "global_step": 4}'), "is not UTF-8"),
    "a state that is nested deeply": (state(b"[" * 100_000), "nests deeper than"),
    "a folder as state": (replaced(STATE, lambda file: file.mkdir()), "is not a regular file"),
    "a pipe as state": (replaced(STATE, os.mkfifo), "is not a regular file"),
    "a state that leads to nothing": (replaced(STATE, lambda file: file.symlink_to("gone")), "there is no file"),
    "a state that leads to itself": (replaced(STATE, lambda file: file.symlink_to(file)), "is a symbolic link"),
    "an empty optimizer": (cut(OPTIMIZER, 0), "the file is empty"),
    "four bytes of an optimizer": (cut(OPTIMIZER, 4), "too short"),
    "100 bytes of an optimizer": (cut(OPTIMIZER, 100), "the file is cut short"),
    "text as optimizer": (lambda folder: (folder / OPTIMIZER).write_text("hello"), "no file of `torch.save`"),
    "a folder as optimizer": (replaced(OPTIMIZER, lambda file: file.mkdir()), "holds no checkpoint"),
    "a pipe as optimizer": (replaced(OPTIMIZER, os.mkfifo), "is not a regular file"),
    "an optimizer that leads to nothing": (replaced(OPTIMIZER, lambda file: file.symlink_to("gone")), "No such file"),
    "an optimizer that leads to itself": (replaced(OPTIMIZER, lambda file: file.symlink_to(file)), "symbolic links"),
    "an optimizer that runs code": (saved(OPTIMIZER, {"state": RunsCode(), "param_groups": []}), "which can run code"),
    "a sparse state": (first(exp_avg=torch.eye(3).to_sparse()), "is not supported"),
    "a scheduler that runs code": (saved(SCHEDULER, {"last_epoch": RunsCode()}), "which can run code"),
    "an empty scheduler": (cut(SCHEDULER, 0), "the file is empty"),
    "a scheduler that is cut off": (cut(SCHEDULER, 50), "the file is cut short"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "the state of a run, and no weights"),
    "empty weights": (cut(WEIGHTS, 0), "the file has 0 bytes"),
    "weights that are cut off": (cut(WEIGHTS, 100), "but only 92 bytes follow"),
    "two optimizers of FSDP and not": (saved("optimizer.bin", {}), "both fit"),
    "a second optimizer of accelerate": (
        saved("optimizer_1.bin", {}),
        r"`.*/optimizer_1\.bin` and `.*/optimizer\.pt` both fit",
    ),
    "weights of FSDP": (saved("pytorch_model_fsdp.bin", {}), r"`.*_fsdp\.bin` and `.*/optimizer\.pt` both fit"),
    "a save of DeepSpeed": (lambda folder: (folder / "global_step4").mkdir(), "global_step4` and .* both fit"),
    "an empty folder of an optimizer": (lambda folder: (folder / "optimizer_0").mkdir(), "both fit"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    training = Training()
    for number in range(1, 5):
        training.step(number)
    return training.save_as_trainer(tmp_path / "checkpoint-4", 4)


@pytest.mark.parametrize("case", HOSTILE)
def test_folders_that_are_not_opened(folder: Path, case: str) -> None:
    change, message = HOSTILE[case]
    change(folder)
    with pytest.raises(ReshardError, match=message) as caught:
        reshard.open(folder, format="trainer-run")
    assert str(folder) in str(caught.value.path)
    assert not (folder.parent / "PWNED").exists()


LACKS_OPTIONS = "the checkpoint lacks the options of the optimizer"
CONTRADICTIONS: dict[str, tuple[Change, str]] = {
    "no groups": (optimizer(lambda content: content.pop("param_groups")), LACKS_OPTIONS),
    "a dict as groups": (optimizer(lambda content: content.update(param_groups={"a": 1})), LACKS_OPTIONS),
    "text as a group": (optimizer(lambda content: content.update(param_groups=["x"])), LACKS_OPTIONS),
    "a list as state": (optimizer(lambda content: content.update(state=[1, 2])), "the run does not have `optimizer`"),
    "one group": (optimizer(lambda content: content["param_groups"].pop()), r"in groups of \[2\]; the run has"),
    "text as parameters": (group(params="x"), r"in groups of \[4\]; the run has"),
    "more parameters": (group(params=[0, 1, 2]), r"in groups of \[3, 4\]; the run has"),
    "a negative parameter": (group(params=[-1, 1]), "the run does not have `step.0`"),
    "an unknown parameter": (
        optimizer(lambda content: content["state"].update({99: content["state"].pop(0)})),
        "step.99",
    ),
    "a slot of another shape": (first(exp_avg=torch.ones(9, 9)), r"`exp_avg.0.weight` is F32 of shape \(9, 9\)"),
    "complex numbers": (first(exp_avg=torch.ones(6, 4).to(torch.complex64)), r"`exp_avg.0.weight` is C64"),
    "integers": (first(exp_avg=torch.ones(6, 4).int()), r"`exp_avg.0.weight` is I32"),
    "text as step": (first(step="x"), "has `exp_avg`, `exp_avg_sq`, and lacks `step`"),
    "a missing slot": (
        optimizer(lambda content: content["state"][0].pop("exp_avg")),
        "has `exp_avg_sq`, `step`, and lacks `exp_avg`",
    ),
    "a list as scheduler": (saved(SCHEDULER, [1]), "scheduler"),
    "no scheduler": (lambda folder: (folder / SCHEDULER).unlink(), "the checkpoint lacks `scheduler`"),
}


def go_on(folder: Path) -> None:
    other = Training()
    config = {"load_checkpoint": str(folder), "resume_training": True}
    with Checkpointer.from_config(config, root=folder.parent / "run", signals=()) as run:
        run.resume(model=other.model, optimizer=other.optimizer, scheduler=other.scheduler)
    other.step(5)


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_runs_that_do_not_go_on(folder: Path, case: str) -> None:
    change, message = CONTRADICTIONS[case]
    change(folder)
    with pytest.raises(MismatchError, match=message):
        go_on(folder)


def test_options_without_state_are_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    optimizer(lambda content: content.update(state={}))(folder)
    go_on(folder)
    assert "the options of the optimizer, and no state of it: it starts with new state" in caplog.text
