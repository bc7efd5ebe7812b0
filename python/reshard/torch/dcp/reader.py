"""`Reader`: `dcp.load` from any checkpoint that `reshard.open` opens.

The planner of DCP sees each tensor as one chunk: what is stored where is the business of this package, which reads any
region of a tensor. So a rank has one read for each of its shards. All reads of a rank are one plan, whose copies are
verified and run in parallel, straight into the memory of the tensors where that is contiguous.
"""

from __future__ import annotations

import io
import math
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from reshard import _core, dtypes
from reshard.errors import ArgumentError, CoverageError, MismatchError, UnsupportedError
from reshard.formats.outputs import fill
from reshard.formats.state_loader import TorchSaved
from reshard.opening import open as open_checkpoint
from reshard.options import Verify
from reshard.storage.location import locate
from reshard.torch.dcp.writer import STATE_NAME, Writer
from reshard.torch.tensors import as_tensor, from_tensor, inner_tensors, torch_dtype
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.distributed.checkpoint.metadata import STORAGE_TYPES
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

    from reshard.checkpoint import Checkpoint
    from reshard.options import VerifyLike

_STAGED_BYTES = 256 << 20  # for tensors that are on a device or not contiguous


class Reader(StorageReader):
    """Loads what `torch.distributed.checkpoint` plans, for `dcp.load`, on any number of ranks.

    Every block that is read is compared with its checksum. Values that are no tensors are loaded if a `Writer`,
    `dcp.save` or `torch.save` wrote them. Those of a `Writer` are decoded by DCP with the loader of torch, which runs
    code of the file: load checkpoints that you trust. Those of torch are decoded here without running code.

    Args:
        path: anything that `reshard.open` opens, such as the path of a `Writer`; of a root the newest complete
            iteration. `dcp.load(..., checkpoint_id=...)` replaces it.
        cast: whether a tensor is cast to the dtype of the tensor that it is loaded into. If not, another dtype is an
            error; DCP alone casts without a word.
        verify: `on_load` says what is compared, as in `reshard.load`.
        threads: threads of the copies.

    Raises:
        ArgumentError: an option has a value that is not accepted.

    Example:
        >>> import torch, torch.distributed.checkpoint as dcp
        >>> _ = dcp.save({"w": torch.ones(2, 3)}, storage_writer=Writer("dcp/step-8"))
        >>> state = {"w": torch.zeros(2, 3)}
        >>> dcp.load(state, storage_reader=Reader("dcp/step-8"))
        >>> state["w"].sum()
        tensor(6.)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        cast: bool = False,
        verify: VerifyLike | None = None,
        threads: int | None = None,
    ) -> None:
        self.path = os.fspath(path)
        self.cast = cast
        self.verify = Verify.of(verify).on_load
        self.threads = threads
        self._checkpoint: Checkpoint | None = None
        self._objects: dict[str, bytes] = {}
        self._values: Mapping[str, object] = {}
        self._inner: dict[str, Any] = {}  # tensors that are made of others

    @property
    def checkpoint_id(self) -> str:
        """The path of the checkpoint."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path of the local file system, or the URL of a folder in a bucket."""
        return Writer.validate_checkpoint_id(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin with another checkpoint, at this path if one is given."""
        self.close()
        if checkpoint_id is not None:
            self.path = str(locate(checkpoint_id))

    def close(self) -> None:
        """Close the files, if they are open."""
        if self._checkpoint is not None:
            self._checkpoint.close()
        self._checkpoint, self._objects, self._values, self._inner = None, {}, {}, {}

    def read_metadata(self) -> Metadata:
        """Open the checkpoint: its tensors and its other values.

        Raises:
            ReshardError: as `reshard.open`.
        """
        self.close()
        checkpoint = self._checkpoint = open_checkpoint(self.path)
        known: dict[str, STORAGE_TYPES] = {}
        for key in checkpoint:
            if key not in checkpoint.unplaced() and not dtypes.is_packed(dtype := checkpoint.data.index.info(key)[0]):
                size = torch.Size(checkpoint.shape(key))
                whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
                known[key] = TensorStorageMetadata(TensorProperties(dtype=torch_dtype(dtype)), size, [whole])
        state = checkpoint.data.encoded_state()
        self._objects = {name: one.data for name, one in state.items() if isinstance(one, TorchSaved)}
        paths = state.get(STATE_NAME, {}).get("paths", {})
        values = checkpoint.data.run_values(dist.get_rank() if dist.is_available() and dist.is_initialized() else 0)
        if values is not None:  # written by torch
            self._values, paths = values.by_name, values.paths
        self._inner = dict(state.get(STATE_NAME, {}).get("inner", {}))
        for name, one in self._inner.items():
            size = torch.Size(one["shape"])
            whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            known[name] = TensorStorageMetadata(TensorProperties(dtype=torch_dtype(one["dtype"])), size, [whole])
        known |= {name: BytesStorageMetadata() for name in (*self._objects, *self._values) if name not in known}
        return Metadata(known, planner_data={key: paths.get(key, (key,)) for key in known}, storage_data={})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002, FBT001
        """Take the values of this rank in the group that loads. The checkpoint is open."""
        values = self._opened().data.run_values(kwargs["rank"]) if "rank" in kwargs else None
        if values is not None:
            self._values = values.by_name

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add to the plan which checkpoint this rank has opened."""
        checkpoint = self._opened()
        plan.storage_data = (str(checkpoint.path), None if checkpoint.manifest is None else checkpoint.manifest.digest)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: refuse ranks that have opened different checkpoints. Raises MismatchError."""
        for rank, plan in enumerate(plans):
            if plan.storage_data != plans[0].storage_data:
                raise MismatchError(
                    f"rank 0 has opened {plans[0].storage_data}, and rank {rank} {plan.storage_data}",
                    path=self.path,
                    hint="was it saved meanwhile? Load again, from the path of one iteration",
                )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Load what this rank has planned.

        Raises:
            MismatchError: a tensor has another dtype than the tensor that it is loaded into, or another kind of value.
            DamagedFileError, StorageError: as `Checkpoint.load`; the tensors are then undefined.
        """
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                self._load_object(item, planner)
        self._load_tensors([item for item in plan.items if item.type != LoadItemType.BYTE_IO], planner)
        self.close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _opened(self) -> Checkpoint:
        if self._checkpoint is None:
            raise ArgumentError(f"{show(self.path)} is not open", hint="`dcp.load` calls `read_metadata` first")
        return self._checkpoint

    def _load_object(self, item: ReadItem, planner: LoadPlanner) -> None:
        name = item.dest_index.fqn
        live = getattr(planner, "state_dict", {})
        if isinstance(live, dict) and isinstance(live.get(name), torch.Tensor):
            raise MismatchError(
                f"{show(name)} is a tensor, and no tensor in {self._opened().path}: it would keep its content",
                key=name,
                path=str(self._opened().path),
            )
        stored = item.storage_index.fqn
        data = self._objects[stored] if stored in self._objects else self._encoded(stored)
        planner.load_bytes(item, io.BytesIO(data))

    def _encoded(self, name: str) -> bytes:
        """A value that torch wrote, as `torch.save` encodes it. It was decoded without running code of the file."""
        data = io.BytesIO()
        try:
            torch.save(self._values[name], data)
        except TypeError:  # of an `Opaque`
            path = str(self._opened().path)
            raise UnsupportedError(
                f"{show(name)} of {path} holds an object of a class, which only code of the file could make",
                key=name,
                path=path,
                hint=f"leave {show(name)} out of the state; if you trust it, torch's `FileSystemReader` loads it",
            ) from None
        return data.getvalue()

    def _load_tensors(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        checkpoint, request = self._opened(), _core.Request()
        targets: list[torch.Tensor] = []
        keys: set[str] = set()
        live: list[torch.Tensor] = []
        for item in items:
            live.append(planner.resolve_tensor(item))
            for key, offset, target in self._targets(item, live[-1].detach()):
                request.add_region(str(len(targets)), key, offset, tuple(target.shape))
                targets.append(target)
                keys.add(key)
        if not targets:
            return
        plan = checkpoint.plan(request, verify=self.verify, keys=keys)
        stored = [array.dtype for array in plan.arrays]
        taken: set[int] = set()  # tied tensors: two copies into one memory are not run at once
        direct: list[int] = []
        for number, target in enumerate(targets):
            is_plain = (
                target.device.type == "cpu" and target.is_contiguous() and target.dtype == torch_dtype(stored[number])
            )
            if is_plain and target.data_ptr() not in taken:
                direct.append(number)
                taken.add(target.data_ptr())
        if direct:
            fill(plan.only(direct), [from_tensor(targets[number])[0] for number in direct], self.threads)
        others = sorted(set(range(len(targets))).difference(direct))
        for batch in _batches(others, [array.n_bytes for array in plan.arrays]):
            arrays = [np.empty(tuple(targets[number].shape), dtypes.numpy_dtype(stored[number])) for number in batch]
            fill(plan.only(batch), arrays, self.threads)
            for number, array in zip(batch, arrays, strict=True):
                targets[number].copy_(as_tensor(array))
        for item, tensor in zip(items, live, strict=True):
            planner.commit_tensor(item, tensor)

    def _targets(self, item: ReadItem, target: torch.Tensor) -> list[tuple[str, list[int], torch.Tensor]]:
        """The tensors that an item is loaded into, checked, each with the key and the offset of what it gets."""
        name, path = item.storage_index.fqn, str(self._opened().path)
        if target.shape != item.lengths:
            raise CoverageError(
                f"{show(name)}: the planner gives a tensor of shape {tuple(target.shape)} for {tuple(item.lengths)}",
                key=name,
                path=path,
            )
        parts, text = inner_tensors(target, name)
        stored = self._inner[name]["is"] if name in self._inner else ""
        if text != stored:
            was, now = (one or f"a plain tensor of {target.dtype}" for one in (stored, text))
            raise MismatchError(
                f"{show(name)} is {was} in {path}, and {now} where it is loaded",
                key=name,
                path=path,
                hint="quantise the model with the same configuration",
            )
        if text and list(parts) != self._inner[name]["parts"]:
            raise MismatchError(
                f"{show(name)} is made of {listed(map(show, self._inner[name]['parts']))} in {path}, and of "
                f"{listed(map(show, parts))} where it is loaded",
                key=name,
                path=path,
            )
        first = item.storage_index.offset or (0,) * len(item.lengths)
        offset = [a + b for a, b in zip(first, item.storage_offsets, strict=True)]
        for part, tensor in parts.items():
            key = f"{name}.{part}" if part else name
            dtype = torch_dtype(self._opened().data.index.info(key)[0])
            if tensor.dtype != dtype and (text or not self.cast):
                raise MismatchError(
                    f"{show(key)} is {dtype} in {path}, and {tensor.dtype} where it is loaded",
                    key=key,
                    path=path,
                    hint=None if text else "load it into a tensor of that dtype; `cast=True` of the `Reader` casts it",
                )
        if not text:
            return [(name, offset, parts[""])]
        for part, tensor in parts.items():
            key = f"{name}.{part}"
            shape = tuple(self._opened().shape(key))
            if shape != tuple(tensor.shape):
                raise MismatchError(
                    f"{show(key)} has shape {shape} in {path}, and {tuple(tensor.shape)} where it is loaded",
                    key=key,
                    path=path,
                )
        return [(f"{name}.{part}", [0] * tensor.dim(), tensor) for part, tensor in parts.items()]


def _batches(numbers: list[int], n_bytes: list[int]) -> Iterator[list[int]]:
    """The numbers in groups that take a bounded number of bytes together, or are alone."""
    batch: list[int] = []
    for number in numbers:
        if batch and math.fsum(n_bytes[one] for one in (*batch, number)) > _STAGED_BYTES:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch
