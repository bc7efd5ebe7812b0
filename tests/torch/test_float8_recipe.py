"""The float8 recipe of torchao, whose weights are wrappers in DTensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.helpers.ranks import Job
from tests.peers.required import required
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import reshard
from reshard.torch import Checkpointer

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


def run(root: Path, n_steps: int, how: str) -> Any:
    """Train up to a step, from where the run was. Returns where it was, weights and state, and a weight's class."""
    float8 = required("torchao.float8")
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).bfloat16()
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    float8.convert_to_float8_training(model, config=config)
    if how == "tp":
        plan: dict[str, Any] = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    else:
        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with Checkpointer(root, save_every=1, signals=(), commit={"durable": False}) as checkpointer:
        start = checkpointer.resume(model=model, optimizer=optimizer).initial_step
        for step in range(start + 1, n_steps + 1):
            model(torch.sin(torch.arange(512.0) * step).view(16, 32).bfloat16()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if how == "scales":
                float8.precompute_float8_dynamic_scale_for_fsdp(model)
            checkpointer.step(step)
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        states = {"": parameter.detach()} | {f"{slot}.": one for slot, one in optimizer.state[parameter].items()}
        for slot, one in states.items():
            local: Any = one.to_local() if hasattr(one, "to_local") else one
            found[slot + name] = getattr(local, "_tensor", local).float().tolist()
    return start, found, type(model[0].weight.to_local()).__name__


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fsdp", "scales", "tp"])
def test_a_run_that_is_cut_equals_one_that_is_not(how: str, tmp_path: Path) -> None:
    required("torchao")

    def work(_: Any) -> Any:
        _, expected, kind = run(tmp_path / "whole", 3, how)
        for n_steps in (2, 3):
            start, found, _ = run(tmp_path / "cut", n_steps, how)
        return [start, kind, [name for name, one in expected.items() if found[name] != one], found["2.bias"]]

    with Job(2, work) as job:
        for start, kind, wrong, _ in job.values():
            assert (start, kind, wrong) == (2, "WeightWithDynamicFloat8CastTensor", [])
    # The weights are weights: a run on one rank without the recipe goes on with them.
    plain = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).bfloat16()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    resumed = Checkpointer(tmp_path / "cut", save_every=None, signals=()).resume(model=plain, optimizer=optimizer)
    assert resumed.initial_step == 3
    with reshard.open(tmp_path / "cut") as saved:
        assert sorted(saved.keys("model")) == ["0.bias", "0.weight", "2.bias", "2.weight"]
        weight: Any = plain[0].weight
        assert torch.equal(weight, torch.from_numpy(saved.read("0.weight").view("i2")).view(torch.bfloat16))
