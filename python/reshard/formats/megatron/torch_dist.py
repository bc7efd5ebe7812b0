"""A `torch_dist` folder: tensors as `torch.distributed.checkpoint` stores them, and the common state.

Tensors have the names of `.metadata`. The layers of a model are one tensor with the layer as its first dim, unless they
differ. A flattened state of the optimizer (`fully_sharded_model_space`) is read in the shape of its parameter.
`metadata.json` is written last: without it the save was not finished.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reshard import _core
from reshard.documents.strict_json import read_json
from reshard.errors import CheckpointNotFoundError, DamagedFileError, UnsupportedError
from reshard.formats.base import CheckpointData
from reshard.formats.dcp.data_files import check_data_files
from reshard.formats.dcp.names import MAX_METADATA_BYTES, METADATA_FILE
from reshard.formats.megatron import names
from reshard.formats.megatron.common_state import counters_of, iteration_in, plain
from reshard.formats.run_state import is_optimizer
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.formats.base import PartName
    from reshard.storage.location import Location

_log = logging.getLogger("reshard")

_BACKEND = ("torch_dist", 1)
_MAX_CONFIG_BYTES = 1 << 16
_BUCKET = re.compile(r"(.*\.)?optimizer\.distributed\.dp_group_idx_[0-9]+\.gbuf_idx_.*\.bucket_idx_[0-9]+\..*")


@dataclass(frozen=True, kw_only=True)
class TorchDistData(CheckpointData):
    """A `torch_dist` folder.

    Attributes:
        objects: each value that is no tensor, but the common state.
        state: the common state.
    """

    objects: Sequence[_core.DcpObject] = ()
    state: Mapping[str, Any] = field(default_factory=dict)

    def part(self, key: str) -> PartName:
        """By the name: the state of an optimizer is saved below `optimizer`."""
        return "optimizer" if is_optimizer(key) else "model"

    def slot_of(self, key: str) -> tuple[str, str] | None:
        """By the parts of the name: `optimizer.state.<slot>.<parameter>`."""
        _, _, name = key.partition(".state.")
        slot, dot, parameter = name.partition(".")
        return (slot, parameter) if dot and self.part(key) == "optimizer" else None

    def extra_state(self, rank: int) -> dict[str, Any]:  # noqa: ARG002  every value has a name of its own
        """The common state, and the objects of single ranks by their names, such as `rng_state/shard_0.1_2.2`."""
        return {**self.state, **{one.name: _read(self.place, one) for one in self.objects}}


def open_torch_dist(folder: Location, method: _core.ReadMethod) -> CheckpointData:
    """Open a folder of one iteration.

    Args:
        folder: the folder.
        method: how files are read.

    Raises:
        CheckpointNotFoundError: the save was not finished, or a file is missing.
        DamagedFileError: a file violates its format, or the folder holds files of two iterations.
        CoverageError: the chunks of a tensor leave a part of it uncovered.
        UnsupportedError: the folder is in another format of Megatron-Core.
    """
    _check_backend(folder)
    try:
        data = (folder / METADATA_FILE).read_small(MAX_METADATA_BYTES)
    except CheckpointNotFoundError:
        raise DamagedFileError(
            f"{show(str(folder))} has a `{names.CONFIG_FILE}` of Megatron-Core, but no `{METADATA_FILE}`, which says "
            "where its tensors are",
            path=str(folder),
            hint="use another iteration; without `.metadata` the files cannot be read",
        ) from None
    index, objects, unsupported, files = _core.open_dcp(str(folder), data, method=method)
    index.check_coverage()
    check_data_files(folder, files, METADATA_FILE)
    if unsupported:
        left_out = listed(f"{show(name)} ({why})" for name, why in unsupported)
        _log.warning("%s: %d tensors cannot be read and are left out: %s", folder, len(unsupported), left_out)
    state, file = _common_state(folder, objects)
    iteration = iteration_in(state, file, names.iteration_of(folder.name))
    if any(map(_BUCKET.fullmatch, index.keys())):
        _log.warning(
            "%s: the optimizer was saved in flat buckets (dp_reshardable). The files do not record which parameter "
            "lies where in a bucket, so each bucket is a tensor with one dim",
            folder,
        )
    return TorchDistData(
        traits=names.TRAITS,
        path=folder,
        index=index,
        method=method,
        iteration=iteration,
        common=counters_of(state, iteration),
        objects=[one for one in objects if not one.name.startswith(names.COMMON_OBJECT)],
        state=state,
    )


def _check_backend(folder: Location) -> None:
    path = folder / names.CONFIG_FILE
    if not path.exists():
        raise CheckpointNotFoundError(
            f"{show(str(folder))} has no `{names.CONFIG_FILE}`: the save was not finished",
            path=str(folder),
            hint="use another iteration; Megatron-Core writes `metadata.json` last",
        )
    content = read_json(path, _MAX_CONFIG_BYTES)
    config = content if isinstance(content, dict) else {}
    found = config.get("sharded_backend"), config.get("sharded_backend_version", 1)
    if found != _BACKEND:
        raise UnsupportedError(
            f"{show(str(folder))} has the sharded backend {show(str(found[0]))} of version {show(str(found[1]))}; "
            "`torch_dist` of version 1 can be read",
            path=str(path),
            hint="load it with Megatron-LM and save it in its format `torch_dist`",
        )


def _common_state(folder: Location, objects: Sequence[_core.DcpObject]) -> tuple[dict[str, Any], Location]:
    """The common state and the file that holds it: `common.pt`, or an item from release 0.19 on."""
    found = next((one for one in objects if one.name.startswith(names.COMMON_OBJECT)), None)
    if found is not None:
        file = folder / found[1]
        value = _read(folder, found)
        return plain(value[0] if isinstance(value, list) and len(value) == 1 else value, file), file
    file = folder / names.COMMON_FILE
    if not file.exists():
        raise DamagedFileError(
            f"{show(str(folder))} has no common state: there is no `{names.COMMON_FILE}`, and `{METADATA_FILE}` lists "
            "none",
            path=str(folder),
            hint="use another iteration, or copy the missing file",
        )
    n_bytes = file.stat().n_bytes
    return plain(_core.read_torch_object(str(file), 0, n_bytes), file), file


def _read(folder: Location, one: _core.DcpObject) -> object:
    _, file, start, n_bytes, transforms = one
    return _core.read_torch_object(str(folder / file), start, n_bytes, transforms=transforms)
