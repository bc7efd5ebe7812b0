"""`dcp.save` and `dcp.load` through the storage of this package; the other side is torch's own planner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch._dynamo  # what DTensor imports when it is first used: here once, instead of in every rank
import torch.distributed as dist
import torch.distributed.checkpoint
from tests.helpers.mesh_files import as_rank
from tests.helpers.ranks import Job
from tests.peers.required import long
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import reshard
from reshard import _core
from reshard._core import Opaque
from reshard.errors import EmptyRootError, MismatchError, UnsupportedError
from reshard.torch.dcp import Reader, Writer

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.ranks.group import TorchGroup

dcp: Any = torch.distributed.checkpoint  # torch does not list its functions as exported
FAST = {"durable": False}


class Counter:
    """A Stateful object."""

    def __init__(self, n: int) -> None:
        self.n = n

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n, "at": torch.tensor(float(self.n))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["at"] == state["n"]
        self.n = state["n"]


def trained(seed: int, n_steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    train(model, optimizer, n_steps)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, n_steps: int) -> None:
    for n in range(n_steps):
        model(torch.randn(3, 6, generator=torch.Generator().manual_seed(n))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, counter: Counter) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "counter": counter, "names": ["a", {"b": torch.arange(3)}]}


def save(state: dict[str, Any], path: Path, *, planner: Any = None, **options: Any) -> None:
    dcp.save(state, storage_writer=Writer(path, commit=FAST, **options), planner=planner)


def load(state: dict[str, Any], path: Path, *, planner: Any = None, **options: Any) -> None:
    dcp.load(state, storage_reader=Reader(path, **options), planner=planner)


def refused(kind: str, call: Any, *arguments: Any, **keywords: Any) -> str:
    """The message of the error of this class that DCP reports of each rank."""
    with pytest.raises(CheckpointException) as caught:
        call(*arguments, **keywords)
    errors = [error for error, _ in caught.value.failures.values()]
    assert {type(error).__name__ for error in errors} == {kind}, errors
    return str(errors[0])


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.suffix == ".safetensors")


def test_model_optimizer_and_objects_come_back_and_are_a_checkpoint_of_this_package(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    path = tmp_path / "run" / "iteration_00000012"
    save(state_of(model, optimizer, Counter(12)), path)
    other, fresh = trained(1, n_steps=1)
    counter = Counter(0)
    state = state_of(other, fresh, counter)
    load(state, path)
    set_state_dict(other, fresh, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert counter.n == 12
    assert state["names"][0] == "a"
    assert state["names"][1]["b"].tolist() == [0, 1, 2]
    assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.1
    for _ in range(2):  # the same steps from here on
        train(model, optimizer, 1)
        train(other, fresh, 1)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    with reshard.open(tmp_path / "run") as checkpoint:  # the root: its tracker names the iteration
        assert (checkpoint.iteration, checkpoint.verified, checkpoint.ranks()) == (12, True, [0])
        assert checkpoint.common is not None
        assert checkpoint.common.global_step == 12
        assert {"model.0.weight", "counter.at"} <= set(checkpoint.keys("model"))
        assert "optimizer.state.0.weight.exp_avg" in checkpoint.keys("optimizer")
        extra = checkpoint.extra()
        assert (extra["counter.n"], extra["names.0"], extra["optimizer.param_groups.0.betas"]) == (
            12,
            "a",
            (0.9, 0.999),
        )
        layout = {"mesh": {"tp": 7}, "rules": [{"match": "model.0.weight", "cut": ["tp"]}, {"match": "*"}]}
        assert checkpoint.load(layout, rank=3, keys=["model.0.weight"])["model.0.weight"].shape == (1, 6)
    assert reshard.verify(path).ok
    reshard.convert(path, tmp_path / "whole.safetensors")
    with reshard.open(tmp_path / "whole.safetensors") as whole, reshard.open(path) as checkpoint:
        assert all(np.array_equal(whole.read(key), checkpoint.read(key)) for key in checkpoint)


def test_one_writer_serves_many_saves_and_a_plain_path_is_a_root_of_its_own(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run" / "iteration_00000001", keep=2, commit=FAST)
    for n in range(1, 4):
        dcp.save(
            {"w": torch.full((2,), n)}, storage_writer=writer, checkpoint_id=f"{tmp_path}/run/iteration_0000000{n}"
        )
    assert [path.name for path in sorted((tmp_path / "run").glob("iteration*"))] == [
        "iteration_00000002", "iteration_00000003",
    ]  # fmt: skip
    for name, iteration in (("step-30", 30), ("epoch=1-step=40.ckpt", 40), ("last", 0)):
        for value in (1, 2):  # the second one replaces the first
            dcp.save({"w": torch.full((2,), value)}, storage_writer=writer, checkpoint_id=tmp_path / name)
        with reshard.open(tmp_path / name) as checkpoint:
            assert (checkpoint.iteration, checkpoint.read("w").tolist()) == (iteration, [2, 2])
        assert len(files_of(tmp_path / name)) == 1
    state = {"w": torch.zeros(2, dtype=torch.int64)}
    dcp.load(state, storage_reader=Reader("unused"), checkpoint_id=tmp_path / "step-30")
    assert state["w"].tolist() == [2, 2]
    assert not Writer.validate_checkpoint_id("https://host/run")


def test_tensors_of_every_kind_come_back(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    state = {
        "transposed": whole.T,
        "slice": whole[:, 1:3],
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "bf16": whole.bfloat16(),
        "fp8": whole.to(torch.float8_e4m3fn),
        "bool": whole > 5,
        "complex": torch.complex(whole, whole).conj(),
        "parameter": nn.Parameter(whole.clone()),
    }
    save(dict(state), tmp_path / "run")
    target: dict[str, torch.Tensor] = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    memory = torch.zeros(6, 8)
    target["transposed"] = memory[:, :4]  # not contiguous
    load(target, tmp_path / "run")
    for name, tensor in state.items():
        assert target[name].dtype == tensor.dtype
        assert torch.equal(target[name].float() if name == "fp8" else target[name],
                           tensor.float() if name == "fp8" else tensor), name  # fmt: skip
    assert not memory[:, 4:].any()
    found = _load_state_dict_from_keys({"bf16"}, storage_reader=Reader(tmp_path / "run"))
    assert torch.equal(found["bf16"], whole.bfloat16())


def test_a_failed_save_leaves_what_was_there(tmp_path: Path) -> None:
    class Failing(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if write_item.index.fqn == "b":
                raise OSError("the tensor is gone")
            return super().resolve_data(write_item)

    path, events = tmp_path / "step-1", list[Any]()
    save({"a": torch.ones(2), "b": torch.ones(2)}, path)
    writer = Writer(path, on_event=events.append)
    for place in (path, tmp_path / "step-2"):
        refused("OSError", dcp.save, {"a": torch.zeros(2), "b": torch.zeros(2)}, storage_writer=writer,
                checkpoint_id=place, planner=Failing())  # fmt: skip
    with reshard.open(path) as checkpoint:
        assert checkpoint.read("a").tolist() == [1, 1]
    with pytest.raises(EmptyRootError):
        reshard.open(tmp_path / "step-2")
    assert not list(tmp_path.rglob(".staging/*"))
    assert [(event.kind, event.iteration, event.fields.get("error")) for event in events] == [
        ("failed", 1, "OSError"),
        ("failed", 2, "OSError"),
    ]
    save({"a": torch.full((2,), 5.0)}, tmp_path / "step-2")
    assert reshard.open(tmp_path / "step-2").read("a").tolist() == [5, 5]


def test_what_dcp_would_cast_or_keep_silently_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    save({"w": torch.ones(2, 3), "step": 3}, path)
    target = {"w": torch.zeros(2, 3, dtype=torch.bfloat16)}
    assert "`w` is torch.float32" in refused("MismatchError", load, target, path)
    assert not target["w"].any()
    load(target, path, cast=True)
    assert target["w"].float().sum() == 6
    assert "no tensor" in refused("MismatchError", load, {"step": torch.tensor(0)}, path)
    assert "Missing key" in refused("RuntimeError", load, {"v": torch.ones(2)}, path)
    assert "Size mismatch" in refused("ValueError", load, {"w": torch.ones(3, 3)}, path)
    assert "nothing at" in refused("AssertionError", load, {"w": torch.ones(2)}, tmp_path / "absent")

    class Casting(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            found = super().resolve_data(write_item)
            return found.half() if isinstance(found, torch.Tensor) else found

    assert "planned as torch.float32" in refused("MismatchError", save, {"w": torch.ones(2)}, path, planner=Casting())

    class Dropping(DefaultSavePlanner):
        def create_global_plan(self, all_plans: Any) -> Any:
            plans, metadata = super().create_global_plan(all_plans)
            return [replace(plan, items=plan.items[1:]) for plan in plans], metadata

    assert "leaves out" in refused("MismatchError", save, {"w": torch.ones(2)}, path, planner=Dropping())
    caching = DefaultSavePlanner(enable_plan_caching=True)
    save({"w": torch.ones(2)}, tmp_path / "cached", planner=caching)
    with pytest.raises(CheckpointException, match="enable_plan_caching"):
        save({"w": torch.ones(2)}, tmp_path / "cached", planner=caching)
    with pytest.raises(UnsupportedError, match="use_collectives"):
        dcp.save({"w": torch.ones(2)}, storage_writer=Writer(path), use_collectives=False)
    assert "complex128" in refused("UnsupportedError", save, {"w": torch.ones(2, dtype=torch.complex128)}, path)
    assert reshard.open(path).read("w").sum() == 6  # none of the saves has replaced it


def chunked(value: torch.Tensor, rows: list[tuple[int, int]], n_rows: int) -> Any:
    """A planner that saves these rows of one tensor `w` of `n_rows` rows, each as a chunk."""

    class Chunked(DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            (item,) = plan.items
            assert item.tensor_data is not None
            size = torch.Size([n_rows, value.shape[1]])
            made = []
            for first, end in rows:
                chunk = ChunkStorageMetadata(torch.Size([first, 0]), torch.Size([end - first, value.shape[1]]))
                index = MetadataIndex("w", chunk.offsets)
                made.append(
                    replace(
                        item,
                        index=index,
                        type=WriteItemType.SHARD,
                        tensor_data=replace(item.tensor_data, chunk=chunk, size=size),
                    )
                )
            self.plan = replace(plan, items=made)
            return self.plan

        def resolve_data(self, write_item: Any) -> Any:
            first, n = write_item.tensor_data.chunk.offsets[0], write_item.tensor_data.chunk.sizes[0]
            return value[first : first + n]

        def _create_global_plan(self, all_plans: Any) -> Any:  # without the checks of torch
            return dcp.default_planner.create_default_global_save_plan(all_plans)

    return Chunked()


def test_several_chunks_of_a_tensor_on_a_rank_are_kept_and_holes_and_overlaps_are_refused(tmp_path: Path) -> None:
    value = torch.arange(12.0).reshape(6, 2)
    save({"w": value}, tmp_path / "run", planner=chunked(value, [(4, 6), (0, 1), (1, 4)], 6))
    target = {"w": torch.zeros(6, 2)}
    load(target, tmp_path / "run")
    assert torch.equal(target["w"], value)
    assert len(files_of(tmp_path / "run")) == 3
    assert reshard.verify(tmp_path / "run").ok
    for rows in ([(0, 2), (3, 6)], [(0, 4), (3, 6)], [(0, 5)]):
        refused("CoverageError", save, {"w": value}, tmp_path / "other", planner=chunked(value, rows, 6))
    assert not (tmp_path / "other").exists()


def test_a_flipped_bit_is_found_when_it_is_loaded(tmp_path: Path) -> None:
    save({"w": torch.ones(1000), "v": torch.ones(10)}, tmp_path / "run")
    (file,) = (tmp_path / "run").rglob("model*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert file.name in refused(
        "DamagedFileError", load, {"w": torch.zeros(1000), "v": torch.zeros(10)}, tmp_path / "run"
    )


class Custom:
    """An object of a class; torch pickles it, and `extra` shows it without importing the class."""

    ran = 0

    def __setstate__(self, state: object) -> None:
        Custom.ran += 1


def test_extra_runs_no_code_of_objects(tmp_path: Path) -> None:
    value = Custom()
    value.__dict__["x"] = 1
    save({"w": torch.ones(2), "object": value, "plain": {"a": (1, "b", None, 2.5, b"c")}}, tmp_path / "run")
    with reshard.open(tmp_path / "run") as checkpoint:
        extra = checkpoint.extra()
    assert isinstance(extra["object"], Opaque)
    assert extra["object"].name.endswith("Custom")
    assert Custom.ran == 0
    assert extra["plain.a"] == (1, "b", None, 2.5, b"c")


def test_a_save_in_a_thread_and_one_after_the_other(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run" / "iteration_00000001")
    live = torch.ones(1000)
    for n in (1, 2):
        future: Any = dcp.async_save({"w": live}, storage_writer=writer, checkpoint_id=tmp_path / f"run/iteration_{n}")
        live += 1  # it was staged
        future.result()
    for n in (1, 2):
        assert reshard.open(tmp_path / f"run/iteration_{n:08d}").read("w").tolist() == [n] * 1000


def test_a_planner_is_told_of_each_tensor_that_was_loaded(tmp_path: Path) -> None:
    told = []

    class Watching(DefaultLoadPlanner):
        def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
            told.append((read_item.storage_index.fqn, tensor.tolist()))

    save({"a": torch.ones(2), "b": torch.zeros(1)}, tmp_path / "run")
    load({"a": torch.zeros(2), "b": torch.ones(1)}, tmp_path / "run", planner=Watching())
    assert sorted(told) == [("a", [1.0, 1.0]), ("b", [0.0])]


def test_a_reader_loads_what_others_wrote(tmp_path: Path) -> None:
    reshard.save_file({"w": np.arange(6, dtype=np.float32)}, tmp_path / "model.safetensors")
    target = {"w": torch.zeros(6)}
    load(target, tmp_path / "model.safetensors")
    assert target["w"].tolist() == [0, 1, 2, 3, 4, 5]
    tied = torch.zeros(6)
    both = {"w": tied, "v": tied}  # one memory under two names is filled once after the other
    reshard.save_file({"w": np.ones(6, np.float32), "v": np.ones(6, np.float32)}, tmp_path / "tied.safetensors")
    load(both, tmp_path / "tied.safetensors", planner=DefaultLoadPlanner())
    assert tied.tolist() == [1] * 6


def test_a_reader_loads_the_plain_values_that_torch_wrote(tmp_path: Path) -> None:
    def state(n: int) -> dict[str, Any]:
        inner = {"rates": [0.1 * n, None], "w": torch.full((2,), float(n))}
        return {"w": torch.full((3,), n), "step": n, "in": inner, "pair": (n, "x" * n), "at": np.float64(n), "of": {}}

    dcp.save(state(3) | {"kind": Custom()}, checkpoint_id=str(tmp_path / "saved"), no_dist=True)
    into = state(0)
    load(into, tmp_path / "saved")
    assert str(into) == str(state(3))
    into = state(0) | {"kind": None}
    said = refused(UnsupportedError.__name__, load, into, tmp_path / "saved")
    assert "`kind`" in said
    assert "FileSystemReader" in said
    torch.save(state(4), tmp_path / "state.pt")
    into = state(0)
    load(into, tmp_path / "state.pt")
    assert str(into) == str(state(4))
    mean = {"step": torch.zeros(2)}
    assert "it would keep its content" in refused("MismatchError", load, mean, tmp_path / "saved")


# ------------------------------------------------------------------------------------------------------ several ranks


def failure(call: Any, *arguments: Any, **keywords: Any) -> list[str]:
    """Class and message of what DCP reports of the first rank that failed."""
    try:
        call(*arguments, **keywords)
    except CheckpointException as error:
        found = next(iter(error.failures.values()))[0]
        return [type(found).__name__, str(found)]
    return []


@pytest.mark.slow
@pytest.mark.usefixtures("_quick_saves")
def test_saves_report_events(tmp_path: Path) -> None:
    seen: list[Any] = []
    root = tmp_path / "run"
    writer = Writer(root, keep=1, commit=FAST, on_event=[seen.append, reshard.EventLog(root)])
    for step in (3, 4):
        dcp.save({"w": torch.ones(64)}, storage_writer=writer, checkpoint_id=root / f"iteration_{step:08d}")
    kinds = [(event.kind, event.iteration) for event in seen]
    assert kinds == [*(("begun", 3), ("written", 3), ("published", 3)), *(("begun", 4), ("written", 4)),
                     ("published", 4), ("pruned", 3)]  # fmt: skip
    begun, written, published = (dict(event.fields) for event in seen[:3])
    assert begun == {"n_bytes": 256, "n_ranks": 1, "blocking": True}
    assert written["n_bytes"] > 256
    assert published["path"] == str(root / "iteration_00000003")
    lines = [json.loads(line)["kind"] for line in (root / "events.jsonl").read_text().splitlines()]
    assert lines == [event.kind for event in seen]
    dcp.async_save({"w": torch.ones(64)}, storage_writer=writer, checkpoint_id=root / "iteration_00000005").result()
    later = [event for event in seen if event.iteration == 5]
    assert [event.kind for event in later] == ["begun", "written", "published"]
    assert later[0].fields["blocking"] is False


@pytest.mark.slow(disk=False)
@pytest.mark.usefixtures("_quick_saves")
def test_two_ranks_save_and_another_number_of_ranks_loads(tmp_path: Path) -> None:
    whole = torch.arange(35.0).reshape(5, 7)

    def work(group: TorchGroup) -> dict[str, Any]:
        warnings.simplefilter("ignore")
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5))
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        train(model, optimizer, 2)
        said: dict[str, Any] = {}
        state = state_of(model, optimizer, Counter(5))
        state |= {
            "rows": distribute_tensor(whole, mesh, [Shard(0)]),
            "one": distribute_tensor(whole[:1], mesh, [Shard(0)]),  # rank 1 holds nothing
            "all": distribute_tensor(whole, mesh, [Replicate()]),
            "only": {f"rank {group.rank}": group.rank, f"t{group.rank}": torch.tensor(group.rank)},
        }
        events: list[Any] = []
        save(state, tmp_path / "run/iteration_00000005", on_event=events.append)
        assert all(event.rank == group.rank for event in events)
        assert [event.kind for event in events] == ["begun", "written", "published"][: 3 - group.rank]
        said["model"] = {key: one.full_tensor().tolist() for key, one in state["model"].items()}
        said["moments"] = state["optimizer"]["state"]["0.weight"]["exp_avg"].full_tensor().tolist()
        # The same ranks, cut in another way.
        target = {"rows": distribute_tensor(torch.zeros(5, 7), mesh, [Shard(1)]),
                  "one": distribute_tensor(torch.zeros(1, 7), mesh, [Replicate()])}  # fmt: skip
        load(target, tmp_path / "run")
        assert torch.equal(target["rows"].full_tensor(), whole)
        assert torch.equal(target["one"].to_local(), whole[:1])
        # Values of which DCP keeps one rank's without a look at the others.
        bad = tmp_path / "bad"
        said["tensor"] = failure(save, {"rng": torch.tensor([group.rank, 2])}, bad)
        said["object"] = failure(save, {"seed": {"a": group.rank}}, bad)
        said["dtype"] = failure(save, {"w": torch.ones(2, dtype=[torch.float32, torch.float16][group.rank])}, bad)
        said["shape"] = failure(save, {"w": torch.ones(2 + group.rank)}, bad)
        said["kind"] = failure(save, {"w": [torch.ones(2), 3][group.rank]}, bad)
        different = distribute_tensor(whole, mesh, [Replicate()])
        different.to_local().add_(group.rank)
        said["replica"] = failure(save, {"w": different}, bad)
        verify = {"may_differ": ["rng*"]}
        said["allowed"] = failure(save, {"rng": torch.tensor([group.rank, 2])}, tmp_path / "allowed", verify=verify)
        said["equal"] = failure(save, {"order": {"a": [1.5, "x"], "b": None}}, tmp_path / "equal")

        class Failing(DefaultSavePlanner):
            def resolve_data(self, write_item: Any) -> Any:
                if group.rank == 1:
                    raise OSError("rank 1 fails")
                return super().resolve_data(write_item)

        writer = Writer(tmp_path / "failed/iteration_00000001")
        rows = {"w": distribute_tensor(whole, mesh, [Shard(0)])}
        said["failing"] = failure(dcp.save, rows, storage_writer=writer, planner=Failing())
        said["left"] = [path.name for path in (tmp_path / "failed").glob("iteration*")]
        dist.barrier()
        dcp.save(rows, storage_writer=writer)  # the same writer goes on
        future: Any = dcp.async_save(rows, storage_writer=writer, checkpoint_id=tmp_path / "failed/iteration_00000002")
        future.result()
        return said

    with Job(2, work) as job:
        said = job.values()[0]
    refusals = {"tensor": "`rng`", "object": "`seed.a`", "replica": "`w`", "dtype": "F32", "shape": "(3,)"}
    for name, words in refusals.items():
        assert said[name][0] == "MismatchError", (name, said[name])
        assert words in said[name][1], (name, said[name])
    assert said["kind"][0] == "AssertionError"  # of torch's planner
    assert said["allowed"] == said["equal"] == []
    assert said["failing"][0] == "OSError"
    assert said["left"] == []
    assert not list((tmp_path / "bad").glob("iteration*"))
    with reshard.open(tmp_path / "failed") as checkpoint:
        assert checkpoint.iteration == 2
        assert checkpoint.read("w").tolist() == whole.tolist()
    assert not list((tmp_path / "failed").rglob("*-*.[0-9a-f]*"))
    # One process.
    model, optimizer = trained(3, n_steps=1)
    counter = Counter(0)
    state = state_of(model, optimizer, counter)
    state |= {
        "rows": torch.zeros(5, 7),
        "all": torch.zeros(5, 7),
        "only": {"t0": torch.tensor(9), "t1": torch.tensor(9)},
    }
    load(state, tmp_path / "run")
    assert {key: one.tolist() for key, one in state["model"].items()} == said["model"]
    assert state["optimizer"]["state"]["0.weight"]["exp_avg"].tolist() == said["moments"]
    assert torch.equal(state["rows"], whole)
    assert torch.equal(state["all"], whole)
    assert (state["only"]["t0"], state["only"]["t1"], counter.n) == (0, 1, 5)
    with reshard.open(tmp_path / "run") as checkpoint:
        assert checkpoint.extra()["only.rank 1"] == 1
        assert checkpoint.ranks() == [0, 1]
    assert reshard.verify(tmp_path / "run").ok


@pytest.mark.slow
def test_four_ranks_with_replicas_and_two_dims(tmp_path: Path) -> None:
    whole = torch.arange(40.0).reshape(5, 8)

    def work(group: TorchGroup) -> bool:
        warnings.simplefilter("ignore")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Linear(8, 6)
        with torch.no_grad():
            model.weight.copy_(torch.arange(48.0).reshape(6, 8))
        fully_shard(model, mesh=mesh)  # HSDP
        state = {"model": model.state_dict(), "w": distribute_tensor(whole, mesh, [Shard(0), Shard(1)])}
        save(state, tmp_path / "run")
        target = {"w": distribute_tensor(torch.zeros(5, 8), mesh, [Shard(1), Replicate()])}
        load(target, tmp_path / "run")
        found = target["w"]
        assert isinstance(found, DTensor)
        return torch.equal(found.full_tensor(), whole)

    with Job(4, work) as job:
        assert job.values() == [True] * 4
    target: dict[str, Any] = {"model": {"weight": torch.zeros(6, 8)}, "w": torch.zeros(5, 8)}
    load(target, tmp_path / "run")
    assert torch.equal(target["w"], whole)
    assert target["model"]["weight"].flatten().tolist() == list(range(48))


def test_small_files_of_rank_0_are_synced_before_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, synced = _core.sync_together, list[str]()

    def sync_together(files: list[str], folders: list[str]) -> None:
        if any("manifest.json" in one for one in files):
            assert any(one.endswith(".safetensors") for one in synced)
        synced.extend(files)
        real(files, folders)

    monkeypatch.setattr(_core, "sync_together", sync_together)
    dcp.save({"w": torch.ones(3), "n": 7}, storage_writer=Writer(tmp_path / "run"), no_dist=True)
    names = {os.path.basename(one) for one in synced}  # noqa: PTH119
    written = {one.name for one in (tmp_path / "run").glob("iteration_*/*")}
    assert written - names == {"manifest.json"}  # under its temporary name


PROCESS = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from reshard.torch.dcp import Writer

if __name__ == "__main__":
    dist.init_process_group("gloo", init_method="file://" + sys.argv[1] + "/store", rank=0, world_size=1)
    root = sys.argv[1] + "/run"
    for n in (1, 2):
        dcp.async_save({"w": torch.full((3,), n), "n": n}, storage_writer=Writer(f"{root}/iteration_{n:08d}"),
                       async_checkpointer_type=AsyncCheckpointerType.PROCESS).result()
    dcp.save({"w": torch.full((3,), 3), "n": 3}, storage_writer=Writer(f"{root}/iteration_00000003"))  # by this process
    dist.destroy_process_group()
"""


@long
@pytest.mark.slow
def test_a_save_in_another_process(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PROCESS)
    done = subprocess.run(
        [sys.executable, "script.py", str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={**os.environ, "MASTER_ADDR": "127.0.0.1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for n in (1, 2, 3):
        with reshard.open(tmp_path / f"run/iteration_{n:08d}") as checkpoint:
            assert (checkpoint.read("w").tolist(), checkpoint.extra()["n"]) == ([n] * 3, n)
    assert json.loads((tmp_path / "run/latest_checkpointed_iteration.txt").read_text()) == 3


def save_alone(path: Path, rank: int, world_size: int, value: dict[str, Any]) -> None:
    """What torch writes of a rank when the ranks do not exchange messages."""
    with as_rank(rank, world_size), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected an existing checkpoint")  # that of a rank that was faster
        dcp.save(value, checkpoint_id=path, use_collectives=False)


def test_ranks_without_collectives_that_saved_other_steps_are_refused(tmp_path: Path) -> None:
    for rank in range(2):
        for name, step in (("same", 7), ("differ", 7 + rank)):
            save_alone(tmp_path / name, rank, 2, {"model": {"w": torch.ones(3)}, "step": step, "own": rank})
    with reshard.open(tmp_path / "same") as checkpoint:
        common = checkpoint.data.read_common()
        assert common is not None
        assert (common.global_step, checkpoint.extra(rank=1)["own"]) == (7, 1)
    with (
        reshard.open(tmp_path / "differ") as checkpoint,
        pytest.raises(MismatchError, match="rank 1 saved step 8, and another rank step 7"),
    ):
        checkpoint.data.read_common()


def test_a_writer_keeps_its_folder_when_the_program_changes_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    writer = Writer("run/iteration_00000001")
    monkeypatch.chdir(tmp_path / "other")
    dcp.save({"w": torch.ones(3)}, storage_writer=writer)
    with reshard.open(tmp_path / "run") as checkpoint:
        assert checkpoint.iteration == 1
    dcp.save({"w": torch.ones(3)}, storage_writer=writer, checkpoint_id="run/iteration_00000002")
    assert (tmp_path / "other/run/iteration_00000002").is_dir()


def test_values_that_a_rank_lacks_are_those_in_which_the_others_agree(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    for rank in range(3):
        value: dict[str, Any] = {"w": torch.ones(3), "own": rank}
        if rank:
            value |= {"agreed": {"lr": 0.5, "kind": Custom()}, "differs": rank}
        save_alone(path, rank, 3, value)

    def found(group: TorchGroup) -> Any:
        names = ["own", "agreed.lr", "differs"]
        values: dict[str, Any] = {}
        for name in names:
            first, *rest = name.split(".")
            state: dict[str, Any] = {first: {rest[0]: None} if rest else None}
            try:
                dcp.load(state, storage_reader=Reader(path))
                values[name] = state[first]
            except CheckpointException as error:
                values[name] = {rank: str(one[0]) for rank, one in error.failures.items()}
        group.barrier(timeout=60)
        return values

    with Job(4, found) as job:
        by_rank = job.values()
    message = "ranks saved different values of `{}`: {} on rank {}, {} on rank {}"
    for rank, values in enumerate(by_rank):
        assert values["agreed.lr"] == {"lr": 0.5}, rank
        assert list(values["own"]) == ["3"]  # the others have their own values
        assert message.format("own", 0, 0, 1, 1) in values["own"]["3"]
        assert list(values["differs"]) == ["0", "3"]
        assert message.format("differs", 1, 1, 2, 2) in values["differs"]["0"]
    with reshard.open(path) as checkpoint:
        values = [checkpoint.data.run_values(rank) for rank in range(3)]
        assert [one.by_name["own"] for one in values if one is not None] == [0, 1, 2]
        assert [checkpoint.extra(rank)["differs"] for rank in (1, 2)] == [1, 2]
        with pytest.raises(MismatchError, match="`differs`: 1 on rank 1, 2 on rank 2"):
            checkpoint.extra(0)
