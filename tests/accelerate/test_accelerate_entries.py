"""Entries that modules add to `state_dict()`, in models that accelerate has prepared."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from tests.helpers.module_entries import Counted, Hooked, Overridden, inside, random_tree
from tests.helpers.ranks import Job
from tests.helpers.wrapped_tensors import Made
from torch import nn

import reshard
from reshard.accelerate import prepared
from reshard.torch import Checkpointer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")

N_TREES = int(os.environ.get("RESHARD_ACCELERATE_TREES", "3"))


class Model(nn.Module):
    """A trained layer beside a tree of modules."""

    def __init__(self, tree: nn.Module) -> None:
        super().__init__()
        self.tree, self.head = tree, nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(x)


def entries(value: float) -> nn.Module:
    """One module of each way to add entries, and a metric if there is the library."""
    kinds: list[nn.Module] = [Overridden(value), Hooked(value), Counted(value)]
    try:
        import torchmetrics
    except ImportError:
        return nn.ModuleList(kinds)
    metric = torchmetrics.MeanMetric()
    metric.persistent(mode=True)
    metric.update(torch.tensor(value))
    return nn.ModuleList([*kinds, metric])


def cycle(root: Path, make: Callable[[float], nn.Module]) -> list[str]:
    """Save a prepared model of `make(1)` after a step, and resume it as `make(2)`. Returns what differs."""

    def start(value: float) -> tuple[Any, Any, dict[str, Any]]:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        accelerator = Accelerator(cpu=True)
        bare = Model(make(value))
        # Parameters of the tree get no gradients.
        bare.tree.requires_grad_(requires_grad=False)
        model, optimizer = accelerator.prepare(bare, torch.optim.AdamW(bare.head.parameters(), lr=0.1))
        return bare, accelerator, {"model": model, "optimizer": optimizer}

    first, accelerator, live = start(1.0)
    with Checkpointer(root, save_every=1, signals=(), commit={"durable": False}) as checkpointer:
        checkpointer.resume(**prepared(accelerator))
        accelerator.backward(live["model"](torch.ones(2, 2)).square().mean())
        live["optimizer"].step()
        checkpointer.step(1)
    expected = inside(first)
    names = {name.replace("_checkpoint_wrapped_module.", "") for name in expected}
    plain = {name for name in names if name.endswith((".name", "_extra_state"))}
    with reshard.open(root) as saved:
        wrong = sorted(set(saved.keys("model")) ^ (names - plain))
    second, accelerator, _ = start(2.0)
    assert Checkpointer(root, save_every=None, signals=()).resume(**prepared(accelerator)).initial_step == 1
    found = inside(second)
    wrong += sorted(found.keys() ^ expected.keys())
    for name, one in expected.items():
        is_same = torch.equal(found[name], one) if isinstance(one, torch.Tensor) else found[name] == one
        wrong += [] if is_same else [name]
    return wrong


def test_each_kind(tmp_path: Path) -> None:
    assert cycle(tmp_path, entries) == []


@pytest.mark.parametrize("seed", range(N_TREES))
def test_random_trees(seed: int, tmp_path: Path) -> None:
    assert cycle(tmp_path, random_tree(seed)) == []


@pytest.mark.slow
def test_on_two_ranks(tmp_path: Path) -> None:
    """In DistributedDataParallel, which cannot send weights of the tests' own class."""
    made = {seed: random_tree(seed)(1.0).parameters() for seed in range(100)}
    seeds = [seed for seed, of_tree in made.items() if not any(isinstance(one.data, Made) for one in of_tree)][:N_TREES]

    def work(group: Any) -> list[list[str]]:
        os.environ |= {"RANK": str(group.rank), "LOCAL_RANK": str(group.rank), "WORLD_SIZE": "2"}
        os.environ |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        AcceleratorState._reset_state(reset_partial_state=True)
        wrapped = type(Accelerator(cpu=True).prepare(nn.Linear(1, 1))).__name__
        assert wrapped == "DistributedDataParallel", wrapped
        kinds = [entries, *(random_tree(seed) for seed in seeds)]
        return [cycle(tmp_path / str(number), kind) for number, kind in enumerate(kinds)]

    with Job(2, work) as job:
        assert job.values() == [[[]] * (len(seeds) + 1)] * 2
