"""A `checkpoint-<N>` of Trainer in a run with a `ReshardCallback`: it goes on as with Trainer itself, bit for bit."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from tests.helpers.cases import slow
from tests.transformers.trainers import SAVES, Data, Observer, outcome, plain, stopped, trainer
from torch.utils.data import IterableDataset

from reshard.errors import ArgumentError, UnsupportedError
from reshard.transformers import ReshardCallback

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transformers import Trainer

pytestmark = pytest.mark.filterwarnings("ignore")


def compare(tmp_path: Path, step: int, crash: int | None = None, **options: Any) -> None:
    checkpoint = stopped(tmp_path / "before", step, **options)
    expected = plain(tmp_path / "expected", **options)
    expected.train(resume_from_checkpoint=str(checkpoint))
    if crash is not None:
        with pytest.raises(KeyboardInterrupt):
            trainer(tmp_path / "run", crash, **options).train(resume_from_checkpoint=str(checkpoint))
        shutil.rmtree(checkpoint)  # the root has its own checkpoint now
    made = trainer(tmp_path / "run", **options)
    made.train(resume_from_checkpoint=str(checkpoint))
    assert made.state.global_step == expected.state.global_step > step
    assert outcome(made)[1:] == outcome(expected)[1:]
    losses = [{name: log[name] for name in ("step", "loss", "grad_norm", "learning_rate") if name in log}
              for log in made.state.log_history]  # fmt: skip
    of_trainer = [{name: log[name] for name in ("step", "loss", "grad_norm", "learning_rate") if name in log}
                  for log in expected.state.log_history]  # fmt: skip
    assert losses == of_trainer
    assert not list((tmp_path / "run.out").glob("checkpoint-*"))


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("step", [4, 10], ids=["within an epoch", "at its end"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        *slow(
            [
                {"optim": "sgd", "lr_scheduler_type": "cosine"},
                {"optim": "adafactor", "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 6},
                {"gradient_accumulation_steps": 2, "lr_scheduler_type": "polynomial"},
                {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 2, **SAVES},
                {"dataloader_num_workers": 1},
                {"accelerator_config": {"use_seedable_sampler": False}},
            ]
        ),
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "default",
)
def test_it_goes_on_as_with_trainer_itself(tmp_path: Path, step: int, options: dict[str, Any]) -> None:
    compare(tmp_path, step if "gradient_accumulation_steps" not in options else step // 2, **options)


@pytest.mark.slow
@pytest.mark.parametrize("step", [4, 10])
def test_after_a_crash_the_root_is_used(tmp_path: Path, step: int) -> None:
    compare(tmp_path, step, crash=step + 5)


class Stream(IterableDataset[dict[str, Any]]):
    """Samples without an index."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter([Data()[n] for n in range(20)])


@pytest.mark.slow
def test_a_stream(tmp_path: Path) -> None:
    def made(root: Path, stop: int = -1, *, is_ours: bool = False) -> Trainer:
        one = trainer(root, stop, callback=None if is_ours else Observer(-1), max_steps=25, **SAVES)
        one.args.output_dir = str(root)
        one.train_dataset = Stream()
        return one

    with pytest.raises(KeyboardInterrupt):
        made(tmp_path / "before", 13).train()
    checkpoint = str(tmp_path / "before" / "checkpoint-13")
    expected, ours = made(tmp_path / "expected"), made(tmp_path / "run", is_ours=True)
    expected.train(resume_from_checkpoint=checkpoint)
    ours.train(resume_from_checkpoint=checkpoint)
    assert outcome(ours)[1:] == outcome(expected)[1:]


@pytest.mark.slow(disk=False)
def test_what_trainer_would_leave_out_is_refused_before_the_first_step(tmp_path: Path) -> None:
    whole = stopped(tmp_path / "before", 3)

    def refused(message: str, **options: Any) -> None:
        made = trainer(tmp_path / "run", 0, **options)  # no step is made
        with pytest.raises(UnsupportedError, match=message) as caught:
            made.train(resume_from_checkpoint=str(tmp_path / "torn"))
        assert caught.value.path == str(tmp_path / "torn")
        assert "init_from" in str(caught.value.hint)

    for name, message in (
        ("optimizer.pt", r"no optimizer\.pt with the state of the optimizer"),
        ("scheduler.pt", r"no scheduler\.pt"),
        ("rng_state.pth", r"random states are none, and those of 1 ranks are `rng_state\.pth`"),
    ):
        shutil.copytree(whole, tmp_path / "torn")
        (tmp_path / "torn" / name).unlink()
        refused(message)
        shutil.rmtree(tmp_path / "torn")
    shutil.copytree(whole, tmp_path / "torn")
    refused("batches of 2 samples on each rank, and they have 4", per_device_train_batch_size=4)
    (tmp_path / "torn" / "rng_state.pth").rename(tmp_path / "torn" / "rng_state_0.pth")
    refused("random states are `rng_state_0.pth`")
    (tmp_path / "torn" / "rng_state_0.pth").rename(tmp_path / "torn" / "rng_state.pth")
    state = json.loads((whole / "trainer_state.json").read_text())
    (tmp_path / "torn" / "trainer_state.json").write_text(json.dumps({**state, "best_global_step": 2}))
    best = {"eval_strategy": "steps", "save_strategy": "steps", "load_best_model_at_end": True, "eval_steps": 500}
    refused("`load_best_model_at_end` is set", metric_for_best_model="loss", **best)
    (tmp_path / "torn" / "trainer_state.json").write_text("{}")
    refused("no number of steps")


@pytest.mark.slow(disk=False)
def test_two_starts_are_refused(tmp_path: Path) -> None:
    checkpoint = str(stopped(tmp_path / "before", 3))
    for options, word in (({"init_from": checkpoint}, "init_from"), ({"data": "new"}, 'data="new"')):
        callback = ReshardCallback(tmp_path / "run", save_every=3, signals=(), **options)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match=f"the callback has `{word}`"):
            trainer(tmp_path / "run", callback=callback).train(resume_from_checkpoint=checkpoint)
