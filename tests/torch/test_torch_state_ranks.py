"""What ranks hold, saved together and loaded under any other cut: real processes, real files, torch's own gathering."""

from __future__ import annotations

import itertools
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._dynamo  # what DTensor imports when it is first used: here once, instead of in every rank
from tests.helpers.blocks import Blocks, batch, sharded, whole
from tests.helpers.ranks import Job
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import reshard
from reshard.errors import ReshardError
from reshard.ranks.group import SingleProcess
from reshard.torch.restore import Report, apply
from reshard.torch.state import Described, describe

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from reshard.ranks.group import TorchGroup


def cut_with_tp(model: Blocks, mesh: Any) -> Blocks:
    plan: dict[str, Any] = {"layers.a": ColwiseParallel(), "layers.b": RowwiseParallel()}
    parallelize_module(model, mesh, plan, src_data_rank=None)
    return model


def train(model: nn.Module, optimizer: Any, group: TorchGroup, steps: range, *, same: bool = False) -> None:
    for n in steps:
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # FSDP2 over TP warns of the views that TP returns
            model(batch(n, 0 if same else group.rank)).square().sum().backward()
        optimizer.step()


def wholes(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """Parameters and state by the names that they should have."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {name.removeprefix("module."): whole(p) for p, name in names.items()}
    for p, state in getattr(optimizer, "optim", optimizer).state.items():
        found |= {f"{slot}.{names[p].removeprefix('module.')}": whole(value) for slot, value in state.items()}
    return found


def mapping_of(described: Described) -> dict[str, Any] | None:
    return None if described.layout is None else described.layout.to_mapping()


def agrees(described: Described, expected: Mapping[str, torch.Tensor], group: TorchGroup) -> list[str]:
    """Names of arrays that are not what the layout cuts out of the whole."""
    shapes = {key: tuple(tensor.shape) for key, tensor in expected.items()}
    assert described.layout is not None
    optimizer = [key for key in expected if key.split(".")[0] in ("step", "exp_avg", "exp_avg_sq")]
    bound = described.layout.bind(shapes, optimizer_keys=optimizer)
    arrays = described.model | described.optimizer
    assert set(bound.local_names(group.rank)) == set(arrays) & set(expected)
    wrong = []
    for key in bound.local_names(group.rank):
        layout = bound.layouts[key]
        wanted = torch.empty(layout.local_shape(group.rank))
        for first, extents, at, strides in layout.tiles(group.rank):
            box = tuple(slice(f, f + n) for f, n in zip(first, extents, strict=True))
            torch.as_strided(wanted, extents, strides, at).copy_(expected[key][box])
        if not torch.equal(wanted, arrays[key]):
            wrong.append(key)
    return wrong


KINDS = ["DDP", "FSDP2", "FSDP2 over TP"]


def built(kind: str, world_size: int) -> tuple[nn.Module, Any]:
    model = Blocks()
    wrapped: nn.Module
    if kind == "DDP":
        wrapped = nn.parallel.DistributedDataParallel(model)
    elif kind == "FSDP2":
        wrapped = sharded(model, init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",)))
    else:
        mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
        wrapped = sharded(cut_with_tp(model, mesh["tp"]), mesh["dp"])
    return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_ranks_hold_is_saved_and_loaded_under_any_other_cut(kind: str, tmp_path: Path) -> None:
    def save(group: TorchGroup) -> Any:
        torch.set_num_threads(1)
        model, optimizer = built(kind, group.world_size)
        train(model, optimizer, group, range(2), same=kind == "FSDP2 over TP")
        described = describe(model, optimizer)
        expected = wholes(model, optimizer)
        wrong = agrees(described, expected, group)
        reshard.save(tmp_path, 2, **described.saving(), extra={"trainer": described.extra})
        raw = {key: tensor.tolist() for key, tensor in expected.items()}
        return [wrong, mapping_of(described), described.reason, raw, model.get_buffer(BUFFER[kind]).tolist()]

    with Job(4, save) as job:
        values = job.values()
    assert [value[0] for value in values] == [[]] * 4
    assert [value[1:3] for value in values] == [[values[0][1], None]] * 4
    expected, running_mean = values[0][3], values[0][4]
    assert running_mean != values[1][4] or kind == "FSDP2 over TP"  # ranks differ, and the first one's is saved

    def load(group: TorchGroup) -> Any:
        torch.set_num_threads(1)
        told = {}
        for other in KINDS:
            model, optimizer = built(other, group.world_size)
            if other == "DDP":  # also into what has state already
                train(model, optimizer, group, range(7, 8))
            described = describe(model, optimizer)
            loaded = reshard.load(tmp_path, described.layout)
            assert apply(described, loaded.state, loaded.extra["trainer"]) == Report()
            raw = {key: tensor.tolist() for key, tensor in wholes(model, optimizer).items()}
            told[other] = [raw, model.get_buffer(BUFFER[other]).tolist()]
            train(model, optimizer, group, range(2, 3), same=True)  # it can go on
        return told

    with Job(2, load) as job:
        for value in job.values():
            for told in value.values():
                assert told == [expected, running_mean]


BUFFER = {"DDP": "module.norm.running_mean", "FSDP2": "norm.running_mean", "FSDP2 over TP": "norm.running_mean"}


@pytest.mark.slow
def test_zero_redundancy_optimizer_and_back(tmp_path: Path) -> None:
    """Each state is whole on its owner, and belongs to another rank in another world."""

    def built(group: TorchGroup) -> Any:
        torch.set_num_threads(1)
        model = nn.parallel.DistributedDataParallel(Blocks())
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)

    def save(group: TorchGroup) -> Any:
        model, optimizer = built(group)
        train(model, optimizer, group, range(2))
        described = describe(model, optimizer)
        own = {key: tensor.tolist() for key, tensor in described.optimizer.items()}
        reshard.save(tmp_path, 2, **described.saving(), extra={"trainer": described.extra})
        train(model, optimizer, group, range(2, 4), same=True)
        return [own, {key: tensor.tolist() for key, tensor in wholes(model, torch.optim.SGD([model_p(model)])).items()}]

    def load(group: TorchGroup) -> Any:
        model, optimizer = built(group)
        described = describe(model, optimizer)
        loaded = reshard.load(tmp_path, described.layout)
        assert apply(described, loaded.state, loaded.extra["trainer"]) == Report()
        own = {key: tensor.tolist() for key, tensor in describe(model, optimizer).optimizer.items()}
        train(model, optimizer, group, range(2, 4), same=True)
        return [own, {key: tensor.tolist() for key, tensor in wholes(model, torch.optim.SGD([model_p(model)])).items()}]

    def model_p(model: nn.Module) -> nn.Parameter:
        return next(model.parameters())

    with Job(3, save) as job:
        saved = job.values()
    parts = [set(own) for own, _ in saved]
    assert all(parts)
    assert not any(a & b for a, b in itertools.combinations(parts, 2))
    state = {key: value for own, _ in saved for key, value in own.items()}
    with Job(2, load) as job:
        loaded = job.values()
    assert {key: value for own, _ in loaded for key, value in own.items()} == state
    with Job(3, load) as job:
        assert job.values() == saved


@pytest.mark.slow(disk=False)
def test_stages_of_a_pipeline_keep_one_record(tmp_path: Path) -> None:
    """Options and state besides tensors of every stage are saved, though only rank 0 writes them."""

    class Counting(torch.optim.SGD):
        """Keeps a number where torch would keep a tensor."""

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["n_steps"] = self.state[p].get("n_steps", 0) + 1

    def built(group: TorchGroup, stages: list[str]) -> Any:
        torch.set_num_threads(1)
        keys = stages[group.rank * len(stages) // group.world_size]
        model = nn.ModuleDict({key: nn.Linear(3, 3) for key in keys})
        in_first = [p for key, one in model.items() for p in one.parameters() if key in "ac"]
        in_second = [p for key, one in model.items() for p in one.parameters() if key in "bd"]
        groups: list[dict[str, Any]] = [{"params": in_first}, {"params": in_second, "lr": 0.5}]
        return model, Counting(groups, lr=torch.tensor(0.25), momentum=0.5)

    def save(group: TorchGroup) -> Any:
        model, optimizer = built(group, ["ab", "cd"])
        for _ in range(3):
            for module in model.values():
                module(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        for options in optimizer.param_groups:
            options["lr"] = torch.tensor(0.125) if options["lr"] == 0.25 else 0.0625
        described = describe(model, optimizer)
        options = [one["options"] for one in described.extra["optimizer"]["groups"]]
        kinds = [type(one["lr"]).__name__ for one in options]
        for one in options:
            one["lr"] = float(one["lr"])
        reshard.save(tmp_path, 3, **described.saving(), extra={"trainer": described.extra})
        raw = {key: tensor.tolist() for key, tensor in (described.model | described.optimizer).items()}
        return [mapping_of(described), raw, kinds]

    def load(group: TorchGroup) -> Any:
        model, optimizer = built(group, ["abcd"] if group.world_size == 1 else ["a", "bcd"])
        described = describe(model, optimizer)
        loaded = reshard.load(tmp_path, described.layout)
        report = apply(described, loaded.state, loaded.extra["trainer"], strict=False)
        described = describe(model, optimizer)
        raw = {key: tensor.tolist() for key, tensor in (described.model | described.optimizer).items()}
        rates = {
            key: float(options["lr"])
            for options in optimizer.param_groups
            for key, one in model.items()
            if any(one.weight is p for p in options["params"])
        }
        counts = [state["n_steps"] for state in optimizer.state.values()]
        return [list(report.missing + report.unexpected), raw, rates, counts]

    with Job(4, save) as job:
        values = job.values()
    layout = values[0][0]
    assert layout["mesh"] == {"pp": 2, "dp": 2}
    assert [value[2] for value in values] == [["Tensor", "float"]] * 4  # of all stages, and as they were
    expected = values[0][1] | values[3][1]
    assert len(expected) == 16
    with Job(2, load) as job:
        first, second = job.values()
    assert first[0] == second[0] == []
    assert first[1] | second[1] == expected
    assert first[2] | second[2] == {"a": 0.125, "b": 0.0625, "c": 0.125, "d": 0.0625}


def test_what_only_another_rank_has_is_saved_by_rank_0() -> None:
    """A frozen first stage; lists of tensors that are too large to be sent."""

    def work(group: TorchGroup) -> Any:
        torch.set_num_threads(1)
        model = nn.ModuleDict({"ab"[group.rank]: nn.Linear(2, 2)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5) if group.rank else None
        told = [describe(model, optimizer).extra["optimizer"]["groups"][0]["params"]]
        for n, size in ((1, 10), (1, 20_000), (0, 20_000)):
            own = torch.optim.SGD(model.parameters(), lr=0.5)
            if group.rank == n:
                own.state[next(model.parameters())] = {"list": [torch.full((size,), 7.0)]}
            try:
                state = describe(model, own).extra["optimizer"]["state"]
                told.append({name: float(of["list"][0].sum()) for name, of in state.items()})
            except ReshardError as error:
                told.append(str(error))
        return told

    with Job(2, work) as job:
        first, second = job.values()
    assert first[0] == second[0] == ["b.weight", "b.bias"]
    assert first[1] == second[1] == {"b.weight": 70.0}
    assert first[2] == second[2]
    assert "rank 1 has large lists of tensors in the state of `b.weight`, which rank 0 does not have" in first[2]
    assert first[3] == {"a.weight": 140_000.0}  # and it is rank 0 that saves them


@pytest.mark.slow(disk=False)
def test_boxes_where_no_layout_can_say_it(tmp_path: Path) -> None:
    def save(group: TorchGroup) -> Any:
        keys = "tied a" if group.rank == 0 else "tied b" if group.rank == 3 else "c"
        model = nn.ModuleDict({key: nn.BatchNorm1d(3) for key in keys.split()})
        for tensor in model.state_dict().values():
            tensor.fill_(5 + group.rank)
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        described = describe(model)
        saving = described.saving()
        reshard.save(tmp_path, 1, **saving)
        return [mapping_of(described), described.reason, sorted(saving["model"])]

    with Job(4, save) as job:
        values = job.values()
    assert all(value[0] is None for value in values)
    assert values[0][1] == "some tensors are held only by ranks 0, 3, which are not part of a mesh"
    assert "tied.running_mean" in values[0][2]
    assert "tied.running_mean" not in values[3][2]
    checkpoint = reshard.open(tmp_path)
    assert checkpoint.read("tied.running_mean").tolist() == [5] * 3
    assert checkpoint.read("b.running_mean").tolist() == [8] * 3
    assert checkpoint.read("c.running_var").tolist() == [6] * 3


@pytest.mark.slow
def test_fsdp_models_on_the_device_meta(tmp_path: Path) -> None:
    def work(group: TorchGroup) -> Any:
        torch.set_num_threads(1)
        model, optimizer = built("FSDP2 over TP", group.world_size)
        train(model, optimizer, group, range(1), same=True)
        described = describe(model, optimizer)
        reshard.save(tmp_path, 1, **described.saving(), extra={"trainer": described.extra})
        with torch.device("meta"):
            empty = Blocks()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        other = sharded(cut_with_tp(empty, mesh["tp"]), mesh["dp"])
        other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
        target = describe(other, other_optimizer)
        loaded = reshard.load(tmp_path, target.layout)
        apply(target, loaded.state, loaded.extra["trainer"])
        same = []
        for _ in range(2):
            here, there = wholes(model, optimizer), wholes(other, other_optimizer)
            same.append(here.keys() == there.keys() and all(torch.equal(here[key], there[key]) for key in here))
            train(model, optimizer, group, range(1, 2), same=True)
            train(other, other_optimizer, group, range(1, 2), same=True)
        return same

    with Job(4, work) as job:
        assert job.values() == [[True, True]] * 4


def test_first_fsdp_and_foreign_groups_are_refused() -> None:
    def work(group: TorchGroup) -> list[str]:
        texts = []
        first = FullyShardedDataParallel(nn.Sequential(nn.Linear(2, 2)), device_id=torch.device("cpu"))
        second = sharded(Blocks(), init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)))
        for model, members in ((nn.Sequential(first), None), (second, SingleProcess())):
            try:
                describe(model, group=members)
            except ReshardError as error:
                texts.append(f"{type(error).__name__}: {error}")
        return texts

    with Job(2, work) as job:
        first, foreign = job.values()[0]
    assert "UnsupportedError: rank 0: `0` is wrapped in FullyShardedDataParallel" in first
    assert "hint: use `torch.distributed.fsdp.fully_shard`" in first
    assert "ArgumentError: the device meshes of the tensors have 2 ranks, and the group has 1" in foreign


def test_unsharded_parameters_are_sharded_again() -> None:
    """After a forward pass FSDP2 leaves the last parameters whole until it needs the memory."""

    def work(group: TorchGroup) -> bool:
        model = sharded(Blocks(), init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)))
        before = describe(model)
        with torch.no_grad():
            model(batch(0, 0))
        after = describe(model)
        return before.layout == after.layout and before.model.keys() == after.model.keys()

    with Job(2, work) as job:
        assert job.values() == [True, True]
