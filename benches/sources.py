"""The model in each format that is loaded or converted, in one folder; `create` writes it, outside of all clocks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import ml_dtypes
import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import reshard
import reshard.verbs.convert
from benches import fresh, model
from benches.machine import LIBRARIES, Unavailable

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.device_mesh import DeviceMesh

    from benches.fresh import Member

Form = Literal["hf", "tree", "root", "dcp", "dcp_tree", "orbax", "rank_folders", "zero3"]
_WRITE_BYTES = 4 << 20
_SUB_GROUP_ELEMENTS = 10**8


@dataclass(frozen=True)
class Sources:
    """A folder, and the size of the model in it. The size 0 stands for one small tensor, which cases load first.

    Attributes:
        folder: where everything is.
        size_gb: 10^9 bytes.
        mindspore: a Python interpreter that has MindSpore, if there is one.
    """

    folder: Path
    size_gb: float
    mindspore: str = sys.executable

    def at(self, form: Form) -> Path:
        """Where the model is in a format."""
        return self.folder / form

    @property
    def path(self) -> Path:
        """The model as one file."""
        return self.at("hf") / "model.safetensors"

    @property
    def small(self) -> Sources:
        """The same formats with one small tensor."""
        return Sources(self.folder / "small", 0)

    @property
    def target(self) -> Path:
        """What a case writes."""
        return self.folder / "out"

    def files(self, form: Form) -> list[Path]:
        """All files of a format."""
        return [path for path in sorted(self.at(form).rglob("*")) if path.is_file()]

    def shards(self, form: Form) -> list[Path]:
        """Its safetensors files, by rank."""
        return sorted(self.at(form).rglob("*.safetensors"))

    def n_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(array.nbytes for array in model.read(self.path).values())


def create(sources: Sources, *forms: Form) -> None:
    """Write the model in some formats, small and large. Those of libraries that are not installed are left out.

    `hf` is always written first, the others are made from it.
    """
    if sources.size_gb:
        create(sources.small, *forms)
    sources.folder.mkdir(parents=True, exist_ok=True)
    sources.at("hf").mkdir()
    fresh.run(model.write, sources.path, sources.size_gb)
    for form in forms:
        if form == "dcp_tree":
            fresh.run_together(model.N_RANKS, _write_dcp_tree, sources)
        elif form != "hf":
            fresh.run(_WRITERS[form], sources)
    subprocess.run(["sync", "-f", sources.folder], check=True)


def _write_tree(sources: Sources) -> None:
    reshard.verbs.convert.convert(sources.at("hf"), sources.at("tree"), layout=model.LAYOUT)


def _write_rank_folders(sources: Sources) -> None:
    reshard.verbs.convert.convert(sources.at("hf"), sources.at("rank_folders"), to="checkpoint1", layout=model.LAYOUT)


def _write_root(sources: Sources) -> None:
    """One iteration with a manifest, its shard file in the page cache in large folios."""
    with reshard.open(sources.path) as checkpoint:
        reshard.save(sources.at("root"), 1, checkpoint.load())
    for file in sources.at("root").rglob("*.safetensors"):
        copy = file.with_suffix(".copy")
        with file.open("rb") as source, copy.open("wb") as target:
            while piece := source.read(_WRITE_BYTES):
                target.write(piece)
            os.fsync(target)
        copy.replace(file)


def _write_dcp(sources: Sources) -> None:
    dcp.save(whole_tensors(sources.path), storage_writer=dcp.FileSystemWriter(sources.at("dcp")), no_dist=True)


def _write_dcp_tree(member: Member, sources: Sources) -> tuple[float, float]:
    """One safetensors file per rank, as `HuggingFaceStorageWriter` writes them."""
    store = sources.folder / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=member.rank, world_size=member.n)
    state = shard_tensors(sources.path, member.rank, init_device_mesh("cpu", (member.n,)))
    writer = HuggingFaceStorageWriter(str(sources.at("dcp_tree")), save_distributed=True)
    dcp.save(state, storage_writer=writer)
    torch.distributed.destroy_process_group()
    store.unlink(missing_ok=True)
    return 0.0, 0.0


def _write_orbax(sources: Sources) -> None:
    try:
        LIBRARIES["Orbax"].require()
    except Unavailable:
        return
    import orbax.checkpoint  # noqa: PLC0415

    arrays = {key: array.view(ml_dtypes.bfloat16) for key, array in model.read(sources.path).items()}
    orbax.checkpoint.PyTreeCheckpointer().save(sources.at("orbax"), arrays)


def _write_zero3(sources: Sources) -> None:
    """fp32 weights as ZeRO-3 of DeepSpeed 0.19 saves them: flat parts of all parameters, in sub-groups.

    The optimizer has no further state: no conversion to weights reads it.
    """
    expected = model.read(sources.path)
    folder = sources.at("zero3") / "global_step1"
    folder.mkdir(parents=True)
    description = {
        "module": OrderedDict((key, torch.empty(0, dtype=torch.bfloat16)) for key in expected),
        "buffer_names": [],
        "param_shapes": [OrderedDict((key, torch.Size(array.shape)) for key, array in expected.items())],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "global_steps": 1,
        "dp_world_size": model.N_RANKS,
        "mp_world_size": 1,
        "ds_version": "0.19.8",
    }
    for rank in range(model.N_RANKS):
        torch.save(description, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        groups: list[list[torch.Tensor]] = [[]]
        for array in expected.values():
            n = -(-array.size // model.N_RANKS)
            own = array.reshape(-1)[rank * n : (rank + 1) * n].astype(np.uint32) << 16
            if sum(part.numel() for part in groups[-1]) > _SUB_GROUP_ELEMENTS:
                groups.append([])
            groups[-1].append(torch.from_numpy(np.pad(own, (0, n - own.size)).view(np.float32)))
        flat = [torch.cat(parts) for parts in groups]
        inner = {"state": {}, "param_groups": [{"lr": 1e-3, "params": list(range(len(flat)))}]}
        state = {
            "zero_stage": 3,
            "partition_count": model.N_RANKS,
            "optimizer_state_dict": inner,
            "fp32_flat_groups": flat,
        }
        file = folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0.19.8"}, file)
    (sources.at("zero3") / "latest").write_text("global_step1")


def whole_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The model as tensors in memory."""
    return {key: torch.from_numpy(array.copy()).view(torch.bfloat16) for key, array in model.read(path).items()}


def shard_tensors(path: Path, rank: int, mesh: DeviceMesh) -> dict[str, DTensor]:
    """A rank's shards under `model.LAYOUT` as DTensors in memory."""
    return {
        key: as_shard(key, torch.from_numpy(array[model.own_slice(key, array.shape, rank, mesh.size())].copy()), mesh)
        for key, array in model.read(path).items()
    }


def as_shard(key: str, local: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A DTensor of a rank's shard, which is given as bits."""
    dim = model.cut_dim(key)
    placement = Replicate() if dim is None else Shard(dim)
    return DTensor.from_local(local.view(torch.bfloat16), mesh, [placement], run_check=False)


_WRITERS = {
    "tree": _write_tree,
    "root": _write_root,
    "dcp": _write_dcp,
    "orbax": _write_orbax,
    "rank_folders": _write_rank_folders,
    "zero3": _write_zero3,
}
