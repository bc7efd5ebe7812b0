"""`reshard.transformers`: a training by Trainer is resumed as if it had not been interrupted."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.helpers.examples import in_fresh_process
from tests.peers.required import long
from tests.transformers.trainers import Data, outcome, trainer
from transformers import (
    LlamaForCausalLM,
    Trainer,
)

import reshard
from reshard.errors import ArgumentError, MismatchError, UnsupportedError
from reshard.transformers import ReshardCallback, export
from reshard.transformers.position import DataPosition

if TYPE_CHECKING:
    from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

pytestmark = pytest.mark.filterwarnings("ignore")


def train(root: Path, crash: int = -1, **options: Any) -> Trainer:
    made = trainer(root, crash, **options)
    if crash >= 0:
        with pytest.raises(KeyboardInterrupt):
            made.train()
    else:
        made.train()
    return made


BEST: dict[str, Any] = {
    "eval_strategy": "steps",
    "eval_steps": 4,
    "save_strategy": "steps",
    "save_steps": 4,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
}


@pytest.mark.parametrize(
    ("crashes", "options"),
    [
        pytest.param((9, 14), {**BEST, "max_steps": 17}, marks=pytest.mark.slow),
        pytest.param((7, 20, 29), {}, marks=pytest.mark.slow),  # within an epoch, at its end, and near the end
        pytest.param((5,), {"gradient_accumulation_steps": 3, "lr_scheduler_type": "cosine"}, marks=long),
        pytest.param(
            (14,),
            {"eval_strategy": "epoch", "save_strategy": "epoch", "include_num_input_tokens_seen": "all"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_resumed_is_uninterrupted(tmp_path: Path, crashes: tuple[int, ...], options: dict[str, Any]) -> None:
    expected = outcome(train(tmp_path / "whole", **options))
    for crash in crashes:
        train(tmp_path / "torn", crash, **options)
    made = train(tmp_path / "torn", **options)
    assert outcome(made) == expected
    assert not list((tmp_path / "torn.out").glob("checkpoint-*"))
    saves = (tmp_path / "torn" / "saves.jsonl").read_text()
    assert ("trainer_best" in saves) == ("metric_for_best_model" in options)
    again = train(tmp_path / "torn", **options)  # complete: no further step
    assert outcome(again)[1:] == expected[1:]


@pytest.mark.slow(disk=False)
def test_best_model_and_export(tmp_path: Path) -> None:
    root, hf = tmp_path / "run", tmp_path / "hf"
    callback = ReshardCallback(root, keep=1, hf=hf, signals=(), commit={"durable": False})
    made: Any = trainer(root, callback=callback, **BEST, greater_is_better=True)  # the highest loss is the best
    made.train()
    best = made.state.best_global_step
    assert best is not None
    assert best < made.state.global_step == 30
    assert made.evaluate()["eval_loss"] == made.state.best_metric
    assert {int(path.name[-8:]) for path in root.glob("iteration_*")} == {best, 30}
    assert made.state.best_model_checkpoint == str(root / f"iteration_{best:08d}")
    loaded = LlamaForCausalLM.from_pretrained(hf)
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    assert all(torch.equal(one, other) for one, other in zip(loaded.parameters(), made.model.parameters(), strict=True))
    export(root, tmp_path / "last", iteration=30)
    last = reshard.load(root / "iteration_00000030", part="model").state
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "last")
    assert all(torch.equal(tensor, torch.from_numpy(last[name])) for name, tensor in loaded.state_dict().items())


@pytest.mark.slow
def test_other_batch_size_ends_with_the_data(tmp_path: Path) -> None:
    train(tmp_path / "run", 9)
    made = train(tmp_path / "run", per_device_train_batch_size=4)
    # Step 9 was saved at sample 18 of 20; 16 are a multiple of 4, so the rest is 1 + 5 + 5 steps.
    assert (made.state.global_step, made.state.epoch, made.state.max_steps) == (20, 3.0, 20)
    made = train(tmp_path / "steps", 9)
    made = train(tmp_path / "steps", per_device_train_batch_size=1, max_steps=60)
    assert made.state.global_step == 60


@pytest.mark.slow
def test_changed_data_is_refused(tmp_path: Path) -> None:
    train(tmp_path / "run", 5)
    with pytest.raises(MismatchError, match="`n_samples` is 24, and was 20"):
        train(tmp_path / "run", length=24)
    with pytest.raises(MismatchError, match="`seed` is 2, and was 42"):
        train(tmp_path / "run", data_seed=2)
    assert train(tmp_path / "run", length=24, ignore_data_skip=True).state.global_step > 30


def test_position_in_other_batches() -> None:
    now = DataPosition(batch_size=4)
    now.load_state_dict(DataPosition(batches=3, batch_size=2).state_dict())
    assert now.resume(1, ignore_data_skip=False) == [
        "6 samples of the epoch are read, not a multiple of 4: the last 2 are read again"
    ]
    assert now.batches == 1


@pytest.mark.slow
def test_the_root_of_the_callback_may_be_named(tmp_path: Path) -> None:
    train(tmp_path / "run", max_steps=4, save_strategy="steps", save_steps=2)
    made = trainer(tmp_path / "run", max_steps=6, save_strategy="steps", save_steps=2)
    made.train(resume_from_checkpoint=str(tmp_path / "other" / ".." / "run"))
    assert made.state.global_step == 6


@pytest.mark.slow(disk=False)
def test_what_is_not_supported_is_refused(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    request.addfinalizer(partial(signal.signal, signal.SIGTERM, signal.getsignal(signal.SIGTERM)))  # of jit_checkpoint
    for options in ({"save_only_model": True}, {"auto_find_batch_size": True}, {"enable_jit_checkpoint": True}):
        with pytest.raises(UnsupportedError, match=next(iter(options))):
            trainer(tmp_path / "run", **options)
    made = trainer(tmp_path / "run")
    with pytest.raises(ArgumentError, match="is True, and there is no checkpoint"):
        made.train(resume_from_checkpoint=True)
    with pytest.raises(ArgumentError, match="and there is no checkpoint"):
        made.train(resume_from_checkpoint=str(tmp_path / "run"))
    with pytest.raises(ArgumentError, match="leave it out, or remove the callback"):
        made.train(resume_from_checkpoint=str(tmp_path))
    callback = ReshardCallback(tmp_path / "late")
    plain = Trainer(made.model, made.args, train_dataset=Data())
    plain.add_callback(callback)
    with pytest.raises(ArgumentError, match="not attached"):
        plain.train()
    assert type(plain) is Trainer
    callback.attach(plain)
    assert isinstance(plain, Trainer)
    assert type(plain) is not Trainer


@pytest.mark.slow
@pytest.mark.parametrize(("n_ranks", "then"), [pytest.param(1, 1, marks=long), (2, 2), pytest.param(2, 1, marks=long)])
def test_killed_example_is_uninterrupted(tmp_path: Path, n_ranks: int, then: int) -> None:
    in_fresh_process("train_transformers", tmp_path, n_ranks, then)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "torn.hf")
    assert loaded.config.vocab_size == 32


def resumed_as(root: Path, caplog: Any = None, **how: Any) -> Any:
    """Train with these arguments of the callback; `options` are those of the training."""
    options: dict[str, Any] = how.pop("options", {})
    if caplog is not None:
        caplog.clear()
    made: Any = trainer(
        root, callback=ReshardCallback(root, save_every=2, signals=(), commit={"durable": False}, **how), **options
    )
    made.train()
    return made


@pytest.mark.slow
def test_a_start_from_a_published_folder(tmp_path: Path) -> None:
    source = trainer(tmp_path / "source")
    source.model.save_pretrained(tmp_path / "hub")  # type: ignore[union-attr, operator]
    options = {"max_steps": 2, "learning_rate": 0.0}
    made = resumed_as(tmp_path / "run", init_from=tmp_path / "hub", options=options)
    expected = {name: one.clone() for name, one in source.model.state_dict().items()}  # type: ignore[union-attr]
    assert made.state.global_step == 2
    assert all(torch.equal(one, expected[name]) for name, one in made.model.state_dict().items())
    with torch.no_grad():
        for one in source.model.parameters():  # type: ignore[union-attr]
            one.zero_()
    source.model.save_pretrained(tmp_path / "zeros")  # type: ignore[union-attr, operator]
    zeros = resumed_as(tmp_path / "zero run", init_from=str(tmp_path / "zeros"), options=options)
    assert not any(one.any() for one in zeros.model.parameters())
    again = resumed_as(tmp_path / "run", init_from=tmp_path / "zeros", options={**options, "max_steps": 3})
    assert again.state.global_step == 3  # its own checkpoint goes on, with the saved learning rate
    assert all(torch.equal(one, expected[name]) for name, one in again.model.state_dict().items())
    with pytest.raises(ArgumentError, match="there is no checkpoint in"):
        trainer(
            tmp_path / "new", callback=ReshardCallback(tmp_path / "new", signals=(), init_from=tmp_path / "hub")
        ).train(resume_from_checkpoint=True)


@pytest.mark.slow
def test_strict_settings_and_the_scheduler_of_a_trainer(tmp_path: Path, caplog: Any) -> None:
    options = {"max_steps": 2, "lr_scheduler_type": "linear"}
    resumed_as(tmp_path, options=options)
    made: Any = trainer(tmp_path, callback=ReshardCallback(tmp_path, signals=()), max_steps=4)
    made.create_optimizer()
    made.lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(made.optimizer, 4)
    with pytest.raises(MismatchError, match=r"`scheduler` was saved as LambdaLR, and is now CosineAnnealingLR"):
        made.train()
    more = {"max_steps": 4, "lr_scheduler_type": "linear", "adam_beta2": 0.9}
    with pytest.raises(MismatchError, match=r"`betas` of group 0 of|`betas` of `optimizer`"):
        resumed_as(tmp_path, settings={"optimizer": "error"}, options=more)
    made = resumed_as(tmp_path, caplog, options=more)
    assert made.optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    told = [line for line in caplog.messages if "in the program" in line]
    assert any("`betas`" in line for line in told), caplog.messages
    assert any("`num_training_steps` of `scheduler` is 2 in the checkpoint, and 4" in line for line in told)

    renamed: Any = trainer(tmp_path, callback=ReshardCallback(tmp_path, signals=()), max_steps=6)
    renamed.model.config.num_hidden_layers = 1
    renamed.model.model.other = renamed.model.model.norm
    del renamed.model.model.norm
    with pytest.raises(MismatchError, match=r"lacks `model\.other\.weight`.*does not have `model\.norm\.weight`"):
        renamed.train()
    loose = {"missing": "keep", "unexpected": "skip", "other_optimizer": "skip"}
    renamed = trainer(tmp_path, callback=ReshardCallback(tmp_path, signals=(), strict=loose), max_steps=6)
    renamed.model.model.embed = renamed.model.model.embed_tokens  # an alias is no difference
    renamed.train()
    assert renamed.state.global_step == 6
    for wrong in ({"strict": {"missing": "no"}}, {"settings": {"optimizer": 1}}, {"data": "old"}, {"init_from": 3}):
        with pytest.raises(ArgumentError):
            ReshardCallback(tmp_path, **wrong)


@pytest.mark.slow
def test_a_second_stage_with_other_data(tmp_path: Path, caplog: Any) -> None:
    train(tmp_path, 8, num_train_epochs=2)
    seen: list[int] = []

    class Other(Data):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            seen.append(index)
            return super().__getitem__(index)

    def stage(crash: int = -1, **how: Any) -> Any:
        seen.clear()
        callback = ReshardCallback(tmp_path, save_every=3, signals=(), commit={"durable": False}, **how)
        made: Any = trainer(tmp_path, crash, callback=callback, num_train_epochs=2)
        made.train_dataset = Other(12)
        if crash < 0:
            made.train()
        else:
            with pytest.raises(KeyboardInterrupt):
                made.train()
        return made

    with pytest.raises(MismatchError, match=r"`n_samples` is 12, and was 20"):
        stage()
    stage(14, data="new")  # saved at step 6, and then at 9 and 12
    assert any('`data="new"`' in line or 'data="new"' in line for line in caplog.messages)
    assert sorted(seen[:12]) == list(range(12))
    first = list(seen)
    made = stage()
    assert (made.state.global_step, made.state.epoch) == (6 + 12, 2.0)
    assert first[:12] + seen == [*first[:12], *seen]
    assert sorted(seen) == list(range(12))  # the second epoch
