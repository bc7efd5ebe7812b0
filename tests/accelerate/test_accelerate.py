"""`reshard.accelerate`: what accelerate has prepared is resumed as if the run had not been interrupted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration
from tests.helpers.examples import in_fresh_process
from tests.peers.required import long
from torch.optim import lr_scheduler as S  # noqa: N812
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from reshard.accelerate import prepared
from reshard.errors import ArgumentError, MismatchError
from reshard.torch import Checkpointer

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


class Counter:
    def __init__(self) -> None:
        self.n = 0

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.n = state["n"]


def accelerator(**options: Any) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=True, **options)


def run(root: Path, stop: int = 0, *, accumulated: int = 1, batch: int = 4, **options: Any) -> list[Any]:
    """Train three epochs of 40 samples. Returns samples and loss of each batch, and the final state."""
    torch.manual_seed(0)
    accelerate = accelerator(
        gradient_accumulation_steps=accumulated, dataloader_config=DataLoaderConfiguration(**options)
    )
    model: Any = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    data: Any = [(torch.tensor([index / 40, index % 3]), index) for index in range(40)]
    loader: Any = DataLoader(data, batch_size=batch, shuffle=True)
    model, optimizer, schedule, loader = accelerate.prepare(model, optimizer, schedule, loader)
    counter = Counter()
    accelerate.register_for_checkpointing(counter)
    log: list[Any] = []
    with Checkpointer(root, save_every=1, signals=(), commit={"durable": False}) as checkpointer:
        step = checkpointer.resume(**prepared(accelerate)).initial_step
        assert counter.n == step
        while loader.iteration < 3:
            for inputs, ids in loader:
                with accelerate.accumulate(model):
                    loss = model(inputs).square().mean()
                    accelerate.backward(loss)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                log.append((ids.tolist(), loss.item()))
                if accelerate.sync_gradients:
                    step = counter.n = step + 1
                    checkpointer.step(step, loss=loss)
                    if step == stop:
                        return log
    return [*log, [p.tolist() for p in model.parameters()], schedule.get_last_lr()]


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize(
    ("accumulated", "stops", "options"),
    [
        (1, (4, 10), {}),
        (3, (5,), {"use_seedable_sampler": True}),  # ten batches: the last step of an epoch has one
        (2, (2,), {"use_stateful_dataloader": True}),
    ],
)
def test_resumed_is_uninterrupted(
    tmp_path: Path, accumulated: int, stops: tuple[int, ...], options: dict[str, bool]
) -> None:
    expected = run(tmp_path / "whole", accumulated=accumulated, **options)
    for stop in stops:
        root = tmp_path / str(stop)
        first = run(root, stop, accumulated=accumulated, **options)
        assert first + run(root, accumulated=accumulated, **options) == expected


@pytest.mark.slow(disk=False)
def test_other_batch_size_continues_at_the_same_sample(tmp_path: Path) -> None:
    expected = [index for ids, _ in run(tmp_path / "whole")[:-2] for index in ids]
    first = run(tmp_path / "run", 4)
    rest = run(tmp_path / "run", batch=8)[:-2]
    assert [index for ids, _ in first + rest for index in ids] == expected
    run(tmp_path / "odd", 1)
    with pytest.raises(MismatchError, match="4 samples of the epoch are read, which is not a multiple of the 8"):
        run(tmp_path / "odd", batch=8)


def test_what_cannot_be_followed_is_refused() -> None:
    accelerate = accelerator()
    with pytest.raises(ArgumentError, match="prepared no model"):
        prepared(accelerate)
    data: Any = list(range(8))
    accelerate.prepare(torch.nn.Linear(1, 1))
    with pytest.raises(ArgumentError, match="was not prepared"):
        prepared(accelerate, DataLoader(data))
    accelerate.prepare(DataLoader(data), DataLoader(data))
    with pytest.raises(ArgumentError, match="prepared 2 loaders"):
        prepared(accelerate)


def start(
    root: Path, *, n_samples: int = 8, n_steps: int = 2, make: Any = None, schedule: Any = None, **how: Any
) -> Any:
    """Train a prepared model for some steps. Returns the decision, the model, the scheduler and the samples."""
    torch.manual_seed(0)
    accelerate = accelerator()
    model: Any = torch.nn.Sequential(torch.nn.Linear(1, 1)) if make is None else make()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    made: Any = S.StepLR(optimizer, 5) if schedule is None else schedule(optimizer)
    data: Any = [(torch.tensor([float(index)]), index) for index in range(n_samples)]
    model, optimizer, made, loader = accelerate.prepare(
        model, optimizer, made, DataLoader(data, batch_size=2, shuffle=True)
    )
    seen: list[int] = []
    with Checkpointer(root, save_every=1, signals=(), commit={"durable": False}) as checkpointer:
        decision = checkpointer.resume(**prepared(accelerate, loader), **how)
        step = decision.initial_step
        for inputs, ids in loader:
            if step == decision.initial_step + n_steps:
                break
            accelerate.backward(model(inputs).sum())
            optimizer.step()
            made.step()
            optimizer.zero_grad()
            seen += ids.tolist()
            step += 1
            checkpointer.step(step)
    return decision, accelerate.unwrap_model(model), made.scheduler, seen


@pytest.mark.slow(disk=False)
def test_differences_are_refused_or_reported(tmp_path: Path) -> None:
    root = tmp_path / "run"
    start(root)
    with pytest.raises(MismatchError, match="`scheduler` was saved as StepLR, and is now CosineAnnealingLR"):
        start(root, schedule=lambda o: S.CosineAnnealingLR(o, 9))
    decision = start(root, schedule=lambda o: S.StepLR(o, 6), n_steps=0)[0]
    assert any("`step_size` of `scheduler` is 5 in the checkpoint, and 6" in line for line in decision.warnings)
    _, _, schedule, _ = start(root, schedule=lambda o: S.StepLR(o, 6), settings={"scheduler": "program"}, n_steps=0)
    assert schedule.step_size == 6

    def renamed() -> Any:
        return torch.nn.ModuleDict({"net": torch.nn.Linear(1, 1)})

    with pytest.raises(MismatchError, match=r"lacks `net\.bias`, `net\.weight`"):
        start(root, make=renamed, n_steps=0)
    with pytest.raises(MismatchError, match="no tensor of the model is loaded"):
        start(root, make=renamed, n_steps=0, strict=False)
    with pytest.raises(MismatchError, match="the checkpoint is within an epoch of 8 samples, and the dataset has 6"):
        start(root, n_samples=6)
    decision, _, _, seen = start(root, n_samples=6, n_steps=3, data="new")
    assert (decision.initial_step, sorted(seen)) == (2, list(range(6)))
    assert any('data="new"' in line for line in decision.warnings)


def test_a_start_from_a_published_folder(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}

    def make() -> Any:
        return LlamaForCausalLM(LlamaConfig(vocab_size=24, max_position_embeddings=8, **sizes))

    torch.manual_seed(7)
    source = make()
    source.save_pretrained(tmp_path / "hub")
    decision, model, _, _ = start(tmp_path / "run", make=make, init_from=tmp_path / "hub", n_steps=0)
    assert decision.init_from == str(tmp_path / "hub")
    expected = source.state_dict()
    assert all(torch.equal(one, expected[name]) for name, one in model.state_dict().items())


@pytest.mark.slow
@long
@pytest.mark.parametrize(("n_ranks", "then"), [(1, 1), (2, 2), (2, 1)])
def test_killed_example_is_uninterrupted(tmp_path: Path, n_ranks: int, then: int) -> None:
    in_fresh_process("train_accelerate", tmp_path, n_ranks, then)


def test_two_models_with_the_same_names(tmp_path: Path) -> None:
    def make(seed: int) -> Any:
        AcceleratorState._reset_state(reset_partial_state=True)
        torch.manual_seed(seed)
        accelerator = Accelerator(cpu=True)
        models = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
        optimizers = [torch.optim.AdamW(one.parameters()) for one in models]
        return accelerator, accelerator.prepare(*models, *optimizers)

    accelerator, (one, two, first, second) = make(0)
    with Checkpointer(tmp_path, signals=()) as checkpointer:
        checkpointer.resume(**prepared(accelerator))
        accelerator.backward((one(torch.ones(1, 2)) + 2 * two(torch.ones(1, 2))).square().sum())
        first.step()
        second.step()
        checkpointer.save(1, blocking=True)
    accelerator, (other, another, *_) = make(1)
    assert Checkpointer(tmp_path, signals=()).resume(**prepared(accelerator)).initial_step == 1
    assert torch.equal(one.weight, other.weight)
    assert torch.equal(two.weight, another.weight)
    assert not torch.equal(one.weight, two.weight)
