"""Files of `torch.save` with values that share their parts, with tensors inside others, and with odd shapes."""

from __future__ import annotations

import struct
import warnings
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.helpers.mesh_files import as_rank, distributed, save_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import reshard
import reshard.torch
from reshard.errors import DamagedFileError, ReshardError, UnsupportedError

if TYPE_CHECKING:
    from pathlib import Path


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def written(path: Path, pickled: bytes, *storages: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name, data in {"data.pkl": pickled, "version": b"3\n", "byteorder": b"little"}.items():
            file.writestr(f"archive/{name}", data)
        for number, data in enumerate(storages):
            file.writestr(f"archive/data/{number}", data)
    return path


def tensor(storage: str, extents: bytes = b"K\x01\x85", strides: bytes = b"K\x01\x85") -> bytes:
    held = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text(storage) + text("cpu") + b"K\x01tQ"
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + held
        + b"K\x00"
        + extents
        + strides
        + b"\x89ccollections\nOrderedDict\n)RtR"
    )


def int64(value: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value)


@pytest.mark.parametrize("call", ["cfoo\nbar\nh\x00R", "ctorch._tensor\n_rebuild_from_type_v2\nh\x01R"])
def test_what_many_values_share_is_not_looked_at_for_each(tmp_path: Path, call: str) -> None:
    """Twice as many values would take four times as long."""
    n = 20_000
    attributes = b"".join(text(f"a{i}") + b"N" for i in range(n))
    shared = text("s") + b"(" + b"N" * n + b"tq\x00s"
    shared += text("t") + b"(cfoo\nx\ncfoo\ny\n(cfoo\nz\nctorch\nfloat32\nK\x01\x85t}(" + attributes + b"utq\x01s"
    values = b"".join(text(f"k{i}") + call.encode() + b"s" for i in range(n))
    path = written(tmp_path / "w.pt", b"\x80\x02}" + shared + values + b".")
    with pytest.raises(UnsupportedError, match=r"unfold into more than|which is not supported"):
        reshard.open(path)


class Wrapped(torch.Tensor):
    @staticmethod
    def __new__(cls: Any, data: torch.Tensor, **_: Any) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)
        return made

    def __init__(self, data: torch.Tensor, **more: Any) -> None:
        self.held = data
        for name, value in more.items():
            setattr(self, name, value)

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        return NotImplemented

    def __repr__(self) -> str:  # type: ignore[override]
        return "Wrapped"


@pytest.mark.parametrize(
    ("more", "is_taken"),
    [
        ({}, True),
        ({"block_size": (1, 32), "options": {"dtype": torch.int8, "names": ["a"]}}, True),
        ({"_precomputed_scale": torch.ones(7)}, True),
        ({"scale": torch.ones(1)}, False),
        ({"scales": [torch.ones(1)]}, False),
        ({"parts": {"lora": torch.ones(2, 3)}}, False),
        ({"module": torch.nn.Linear(2, 3)}, False),
        ({"parameter": torch.nn.Parameter(torch.ones(3))}, False),
        ({"many": list(range(1000))}, False),
    ],
    ids=lambda one: str(one)[:20],
)
def test_a_tensor_made_of_others_is_only_one_of_them_if_it_has_no_more(
    tmp_path: Path, *, more: dict[str, Any], is_taken: bool
) -> None:
    torch.save({"w": Wrapped(torch.full((2, 3), 2.0), **more)}, tmp_path / "w.pt")
    if is_taken:
        assert np.unique(reshard.open(tmp_path / "w.pt").read("w")).tolist() == [2.0]
    else:
        with pytest.raises(UnsupportedError, match=r"of the type `.*Wrapped`"):
            reshard.open(tmp_path / "w.pt").read("w")


def test_the_last_value_of_an_attribute_of_a_dtensor_counts(tmp_path: Path) -> None:
    """As in a dict of Python."""
    made = b"cx\nL\n)R}" + text("shape") + b"K\x01\x85sb"
    mesh = b"cx\nM\n)R}(" + text("_layout") + made + text("_coordinate_on_dim") + b"K\x00\x85ub"
    replicate = b"ctorch.distributed.tensor.placement_types\nReplicate\n)R"
    spec = b"cx\nS\n)R}(" + text("mesh") + mesh + text("placements") + b"(" + replicate + b"tub"
    start = b"ctorch._tensor\n_rebuild_from_type_v2\n(cfoo\nx\n"
    start += b"ctorch.distributed.tensor\nDTensor\n(cx\nT\nctorch\nfloat32\n"
    held = text("_local_tensor") + tensor("0") + text("_local_tensor") + tensor("1") + text("_spec") + spec
    pickled = b"\x80\x02}" + text("w") + start + b"K\x01\x85t}(" + held + b"utRs."
    path = written(tmp_path / "w.pt", pickled, struct.pack("<f", 1), struct.pack("<f", 2))
    assert reshard.open(path).read("w").tolist() == [2.0]


@pytest.mark.parametrize("shape", [(2**62, 0), (0, 2**63 - 1), (2**40, 2**40, 0), (2**33, 0, 2**33)])
def test_a_shape_that_numpy_cannot_have_is_refused_also_without_elements(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    extents, strides = (b"(" + b"".join(map(int64, one)) + b"t" for one in (shape, (1,) * len(shape)))
    path = written(tmp_path / "w.pt", b"\x80\x02}" + text("w") + tensor("0", extents, strides) + b"s.", bytes(4))
    with pytest.raises(DamagedFileError, match="is too large"), reshard.open(path) as checkpoint:
        checkpoint.load()


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("sizes", [(2, 2), (3, 2)])
def test_fsdp_on_ranks_of_which_some_have_no_element(tmp_path: Path, sizes: tuple[int, int]) -> None:
    """torch stores the shape (0, 0) where the part of a rank has the shape (3, 0)."""
    n, weight = sizes[0] * sizes[1], torch.arange(6.0).reshape(6, 1)
    for rank in range(n):
        with as_rank(rank, n), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
            module = torch.nn.Module()
            module.w = torch.nn.Parameter(distributed(weight.clone(), mesh["tp"], [Shard(1)]))
            fully_shard(module, mesh=mesh["dp"])
            torch.save(module.state_dict(), tmp_path / f"model_world_size_{n}_rank_{rank}.pt")
    with reshard.open(tmp_path) as checkpoint:
        assert torch.equal(reshard.torch.as_tensor(checkpoint.read("w")), weight)


@pytest.mark.parametrize("name", ["a\x1b[31mb", "x" * 3000])
def test_a_name_that_is_refused_is_refused_by_open(tmp_path: Path, name: str) -> None:
    values = torch.ones(4, 2)
    save_ranks(tmp_path / "run", (2,), lambda mesh: {name: distributed(values, mesh, [Shard(0)])})
    with pytest.raises(ReshardError, match=r"model_world_size_2_rank_0\.pt.*the name"):
        reshard.open(tmp_path / "run")
