"""Tensors that are made of other tensors, by `__tensor_flatten__`: quantised weights, wrappers of weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.helpers.ranks import Job
from tests.helpers.wrapped_tensors import Made, cast, quantised
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import reshard
from reshard.errors import ArgumentError, MismatchError, UnsupportedError
from reshard.torch import Checkpointer, load_file, save_file
from reshard.torch.dcp import Reader, Writer

if TYPE_CHECKING:
    from pathlib import Path


class Broken(Made):
    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["not there"], None


def model(weight: Any, *, is_frozen: bool = True) -> Any:
    made: Any = nn.Sequential(nn.Linear(4, 4))
    made[0].weight = nn.Parameter(weight, requires_grad=not is_frozen)
    return made


def save(root: Path, **objects: Any) -> None:
    with Checkpointer(root, signals=()) as checkpointer:
        checkpointer.resume(**objects)
        checkpointer.save(1, blocking=True)


def load(root: Path, **objects: Any) -> Any:
    return Checkpointer(root, save_every=None, signals=()).resume(**objects)


def test_inner_tensors_are_tensors_of_the_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, model=model(quantised(3)))
    with reshard.open(tmp_path) as saved:
        assert sorted(saved) == ["0.bias", "0.weight.codes", "0.weight.scale"]
    new = model(quantised(5))
    load(tmp_path, model=new)
    weight: Any = new[0].weight
    assert (weight.codes.unique().tolist(), weight.scale.unique().tolist()) == ([3], [3.0])


def test_nested_and_tied_ones(tmp_path: Path) -> None:
    def make(value: int) -> Any:
        inner = quantised(value)
        outer = Made((4, 4), torch.bfloat16, None, impl=inner, shift=torch.full((2,), float(value)))
        made: Any = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        made[0].weight = made[1].weight = nn.Parameter(outer, requires_grad=False)
        return made

    save(tmp_path, model=make(3))
    with reshard.open(tmp_path) as saved:
        assert sorted(saved) == ["0.weight.impl.codes", "0.weight.impl.scale", "0.weight.shift"]
    new = make(4)
    load(tmp_path, model=new)
    weight: Any = new[1].weight
    assert (weight.impl.codes.unique().tolist(), weight.shift.tolist()) == ([3], [3.0, 3.0])


def test_a_wrapper_of_a_weight_is_the_weight(tmp_path: Path) -> None:
    """A run with it goes on without it, and the other way round; its optimizer state belongs to the weight."""
    save(tmp_path / "cast", model=model(cast(3.0)))
    assert sorted(reshard.open(tmp_path / "cast")) == ["0.bias", "0.weight"]
    bare = model(torch.zeros(4, 4))
    load(tmp_path / "cast", model=bare)
    assert bare[0].weight.unique().tolist() == [3.0]
    save(tmp_path / "bare", model=bare)
    wrapped = model(cast(1.0))
    load(tmp_path / "bare", model=wrapped)
    assert wrapped[0].weight.weight.unique().tolist() == [3.0]
    save_file({"w": cast(2.0)}, tmp_path / "w.safetensors")
    assert load_file(tmp_path / "w.safetensors")["w"].unique().tolist() == [2.0]  # type: ignore[no-untyped-call]


def test_what_lies_beside_a_weight_of_the_same_shape_is_kept(tmp_path: Path) -> None:
    """The scale of an activation, or low-rank factors: they are not computed from the weight."""

    def made(value: float) -> Made:
        factors = {"down": torch.full((4, 2), value), "scale": torch.tensor(value)}
        return Made((4, 4), torch.float32, None, weight=torch.full((4, 4), value), **factors)

    save(tmp_path / "run", model=model(made(3.0)))
    found = model(made(1.0))
    load(tmp_path / "run", model=found)
    weight: Any = found[0].weight
    assert [one.unique().tolist() for one in (weight.weight, weight.down, weight.scale)] == [[3.0]] * 3
    with pytest.raises(UnsupportedError, match=r"`w` is a Made, which is made of other tensors: `weight`, `down`"):
        save_file({"w": made(1.0)}, tmp_path / "w.safetensors")


def test_other_options_or_no_record_are_refused(tmp_path: Path) -> None:
    save(tmp_path, model=model(quantised(3)))
    with pytest.raises(MismatchError, match=r"was saved as Made\(\(1, 2\)\), and is now Made\(\(9,\)\)"):
        load(tmp_path, model=model(quantised(3, (9,))))
    with pytest.raises(MismatchError, match=r"lacks `0\.weight`"):
        load(tmp_path, model=model(torch.zeros(4, 4)))


def test_what_cannot_be_kept_is_refused_with_its_class(tmp_path: Path) -> None:
    broken = Broken((4, 4), torch.float32, codes=torch.zeros(4, 4))
    with pytest.raises(UnsupportedError, match=r"`0\.weight` is a Broken, whose `__tensor_flatten__` fails"):
        load(tmp_path / "run", model=model(broken))
    trained = model(quantised(3), is_frozen=False)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    with pytest.raises(
        UnsupportedError, match=r"`0\.weight` is trained by a SGD, and is made of several tensors: Made"
    ):
        load(tmp_path / "run", model=trained, optimizer=optimizer)
    with pytest.raises(UnsupportedError, match=r"saving `w`: `w` is a Made, which is made of other tensors: `codes`"):
        save_file({"w": quantised(3)}, tmp_path / "w.safetensors")
    both = nn.ModuleDict({"a": model(quantised(3))[0]})
    inner = nn.Module()
    inner.register_buffer("codes", torch.zeros(1))
    with pytest.raises(ArgumentError, match=r"two tensors of the model are named `a\.weight\.codes`"):
        load(tmp_path / "run", model=[nn.ModuleDict({"a": nn.ModuleDict({"weight": inner})}), both])


def dcp_save(path: Path, state: dict[str, Any], *, alone: bool = True) -> None:
    dcp.save(state, storage_writer=Writer(path), no_dist=alone)  # type: ignore[attr-defined]


def dcp_load(path: Path, state: dict[str, Any], *, alone: bool = True) -> None:
    dcp.load(state, storage_reader=Reader(path), no_dist=alone)  # type: ignore[attr-defined]


def test_dcp_keeps_the_inner_tensors(tmp_path: Path) -> None:
    state = {"net": {"w": quantised(3), "cast": cast(2.0), "v": torch.ones(3)}, "step": 7}
    dcp_save(tmp_path / "run" / "iteration_00000001", state)
    with reshard.open(tmp_path / "run") as saved:
        assert sorted(saved) == ["net.cast", "net.v", "net.w.codes", "net.w.scale"]
    assert reshard.verify(tmp_path / "run").checkpoints[0].verified
    w = quantised(5)
    new: dict[str, Any] = {"net": {"w": w, "cast": torch.zeros(4, 4), "v": torch.zeros(3)}, "step": 0}
    dcp_load(tmp_path / "run", new)
    assert new["net"]["w"] is w
    assert (w.codes.unique().tolist(), w.scale.unique().tolist(), new["step"]) == ([3], [3.0], 7)
    assert new["net"]["cast"].unique().tolist() == [2.0]
    for value, words in (
        (quantised(5, (9,)), r"`net\.w` is Made\(\(1, 2\)\) in .*, and Made\(\(9,\)\) where it is loaded"),
        (torch.zeros(4, 4), r"`net\.w` is Made\(\(1, 2\)\) in .*, and a plain tensor of torch\.float32"),
    ):
        with pytest.raises(CheckpointException, match=words):
            dcp_load(tmp_path / "run", {"net": {"w": value}})
    with pytest.raises(CheckpointException, match=r"`net\.v` is a plain tensor of torch\.float32 in"):
        dcp_load(
            tmp_path / "run", {"net": {"v": Made((3,), torch.float32, codes=torch.zeros(3).byte(), s=torch.zeros(1))}}
        )
    with pytest.raises(CheckpointException, match=r"two tensors are named `w\.codes`"):
        dcp_save(tmp_path / "other", {"w": quantised(3), "w.codes": torch.ones(1)})
    assert not list((tmp_path / "other").glob("iteration*"))


def test_files_of_torch_with_a_wrapper_of_a_weight(tmp_path: Path) -> None:
    """They are decoded without the class; a tensor of several others is refused."""
    state = {"w": cast(2.0), "nested": nn.Parameter(cast(3.0)), "v": torch.ones(3)}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)  # type: ignore[attr-defined]
    torch.save(state, tmp_path / "w.pt")
    for path in (tmp_path / "dcp", tmp_path / "w.pt"):
        with reshard.open(path) as found:
            assert np.unique(found.read("w")).tolist() == [2.0]
            assert np.unique(found.read("nested")).tolist() == [3.0]
    reshard.convert(tmp_path / "dcp", tmp_path / "hf", to="huggingface")
    assert np.unique(reshard.open(tmp_path / "hf").read("w")).tolist() == [2.0]
    twice = Made((4, 4), torch.float32, None, a=torch.ones(4, 4), b=torch.zeros(4, 4))
    beside = Made((4, 4), torch.float32, None, weight=torch.ones(4, 4), factors=torch.zeros(4, 2))
    nested = Made((4, 4), torch.float32, None, weight=torch.ones(4, 4), factors=quantised(3))
    for name, one in {"several": quantised(3), "twice": twice, "beside": beside, "nested": nested}.items():
        dcp.save({"w": one}, checkpoint_id=tmp_path / name, no_dist=True)  # type: ignore[attr-defined]
        with pytest.raises(UnsupportedError, match=r"of the type `.*wrapped_tensors\.Made`"):
            reshard.open(tmp_path / name).read("w")


@pytest.mark.slow(disk=False)
def test_dcp_on_two_ranks(tmp_path: Path) -> None:
    """Copies are compared; a part of such a tensor is refused."""

    def work(group: Any) -> dict[str, Any]:
        rank = group.rank
        told: dict[str, Any] = {}
        mesh = init_device_mesh("cpu", (2,))
        plain = DTensor.from_local(torch.full((2, 4), float(rank)), mesh, [Shard(0)], run_check=False)
        copied = DTensor.from_local(quantised(3), mesh, [Replicate()], run_check=False)
        dcp_save(tmp_path / "run", {"w": quantised(4), "copied": copied, "v": plain}, alone=False)
        new: dict[str, Any] = {
            "w": quantised(0),
            "copied": DTensor.from_local(quantised(0), mesh, [Replicate()], run_check=False),
        }
        dcp_load(tmp_path / "run", new, alone=False)
        told["loaded"] = [new["w"].codes.unique().tolist(), new["copied"].to_local().codes.unique().tolist()]
        states: dict[str, dict[str, Any]] = {
            "differ": {"w": quantised(rank)},
            "part": {"w": DTensor.from_local(quantised(3), mesh, [Shard(0)], run_check=False)},
        }
        for name, state in states.items():
            try:
                dcp_save(tmp_path / name, state, alone=False)
            except CheckpointException as error:
                told[name] = str(error)
        return told

    with Job(2, work) as job:
        for rank, outcome in enumerate(job.outcomes()):
            assert outcome is not None
            told = outcome["value"]
            assert told["loaded"] == [[4], [3]]
            assert "`w`" in told["differ"], rank
            assert "`w` is a part of a Made, which is made of other tensors: `codes`, `scale`" in told["part"]
    assert sorted(reshard.open(tmp_path / "run")) == ["copied.codes", "copied.scale", "v", "w.codes", "w.scale"]
    assert not list((tmp_path / "part").glob("iteration*"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig"])
def test_quantised_weights_of_torchao(name: str, tmp_path: Path) -> None:
    library = pytest.importorskip("torchao.quantization")

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        made = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()
        library.quantize_(made, getattr(library, name)())
        return made.requires_grad_(requires_grad=False)

    old, new = make(0), make(1)
    save(tmp_path, model=old)
    load(tmp_path, model=new)
    given = torch.randn(2, 64).bfloat16()
    assert torch.equal(old(given), new(given))
