"""Reads a folder of `transformers.Trainer` as a run: the weights, and the optimizer below `optimizer.state`."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from reshard import _core
from reshard.documents.common_info import CommonInfo
from reshard.documents.strict_json import read_json
from reshard.errors import CheckpointNotFoundError, DamagedFileError, UnsupportedError
from reshard.formats import run_state
from reshard.formats.base import CheckpointData, Match
from reshard.formats.dcp import reader as dcp
from reshard.formats.dcp.format import DCP
from reshard.formats.deepspeed import run
from reshard.formats.deepspeed.format import DEEPSPEED
from reshard.formats.deepspeed.reader import DeepSpeedData
from reshard.formats.huggingface.reader import HUGGINGFACE
from reshard.formats.torch_file.format import TORCH_FILE
from reshard.formats.trainer_run import names
from reshard.formats.weight_files.format import WEIGHT_FILES
from reshard.storage.location import locate
from reshard.values.indexing import row_major
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.formats.base import OpenOptions, PartName
    from reshard.storage.location import Location

_log = logging.getLogger("reshard")

_MAX_STATE_BYTES = 64 << 20
_MAX_STEP = 1 << 62


@dataclass(frozen=True, kw_only=True)
class _RunData(CheckpointData):
    """The weights with the state of the run.

    Attributes:
        state: what `trainer_state.json` holds.
        values: values of the optimizer and of the scheduler.
    """

    state: Mapping[str, Any]
    values: run_state.Values

    def part(self, key: str) -> PartName:
        """By the prefix that the reader gives to the optimizer."""
        return "optimizer" if key.startswith(names.PREFIX) else "model"

    def slot_of(self, key: str) -> tuple[str, str] | None:
        """By the parts of the name: `optimizer.state.<parameter>.<slot>`."""
        found = run_state.state_of(key) if key.startswith(names.PREFIX) else None
        return None if found is None else (found[1], found[0])

    def extra_state(self, rank: int) -> dict[str, Any]:  # noqa: ARG002  random states are not read
        """The values of the optimizer and of the scheduler, and `trainer_state`."""
        return {**self.values.by_name, **({"trainer_state": dict(self.state)} if self.state else {})}

    def file_name(self, file: int) -> str:
        """The path of a file in the folder: the files of the folders of DCP have the same names."""
        return locate(self.index.file_path(file)).relative_to(self.path)

    def run_values(self, rank: int = 0) -> run_state.Values:  # noqa: ARG002
        """Those of the optimizer and of the scheduler."""
        return self.values


def open_folder(folder: Location, options: OpenOptions) -> CheckpointData:
    """Open the weights of a folder, with the state beside them.

    Raises:
        CheckpointNotFoundError: there are no weights.
        DamagedFileError: `trainer_state.json` is invalid; or as `reshard.open`.
        UnsupportedError: it holds weights or an optimizer twice, in shards and as a whole; or as `reshard.open`.
        StorageError: as `reshard.open`.
    """
    there = folder.names()
    of_run = names.files(there)
    if of_run is None:
        raise CheckpointNotFoundError(f"{show(str(folder))} holds no state of a run any more", path=str(folder))
    rivals = names.rivals(there)
    if rivals is not None:
        first, second = (show(str(folder / name)) for name in rivals)
        raise UnsupportedError(
            f"{first} and {second} both fit: they can be of different saves into this folder",
            path=str(folder / rivals[0]),
            hint="move the one of the older save to another folder; each can be opened alone by its path",
        )
    if names.OPTIMIZER_FILE in there and of_run.model is not None:
        _log.warning(
            "%s: %s is read, and %s is not: beside an optimizer of FSDP, Trainer of transformers 4.31 to 4.35 saves "
            "in it what rank 0 has. If it is of another save into this folder, move the files of one of them",
            folder,
            of_run.optimizer,
            names.OPTIMIZER_FILE,
        )
    state, step = _state(folder / names.STATE_FILE) if of_run.has_state else ({}, None)
    if of_run.is_deepspeed:
        return _of_deepspeed(folder, of_run, options, state, step)
    weights = _weights(folder, of_run, options)
    index = weights.index
    if of_run.model == names.SHARDED_MODEL:
        index = _core.Index()
        _add(index, weights.index, names.MODEL_PREFIX)
    optimizer, scheduler = folder / of_run.optimizer, folder / of_run.scheduler
    values = _with_scheduler(_add_optimizer(index, optimizer, options), scheduler)
    kept = {one.name: getattr(weights, one.name) for one in fields(CheckpointData) if one.init}
    return _RunData(
        **kept
        | {
            "traits": names.TRAITS,
            "path": folder,
            "index": index,
            "iteration": step,
            "common": None if step is None else CommonInfo(step_num=step, global_step=step),
            "model_files": folder,  # as those of the weights
            "state": state,
            "values": values,
        }
    )


def _of_deepspeed(
    folder: Location, of_run: names.RunFiles, options: OpenOptions, state: Mapping[str, Any], step: int | None
) -> CheckpointData:
    """A run whose weights and optimizer are a checkpoint of DeepSpeed below the folder."""
    data = DEEPSPEED.open(folder, options)
    assert isinstance(data, DeepSpeedData)
    if data.iteration not in (None, step):
        raise DamagedFileError(
            f"{show(str(folder / names.STATE_FILE))} is of step {step}, the checkpoint of DeepSpeed in "
            f"{show(str(data.path))} of step {data.iteration}",
            path=str(folder),
            hint="files of two checkpoints lie in this folder, or the run began with a checkpoint of DeepSpeed, whose "
            "steps are counted on; `format='deepspeed'` opens that of DeepSpeed alone",
        )
    index, values = run.index_of(data)
    return _RunData(
        traits=names.TRAITS,
        path=folder,
        index=index,
        method=options.method,
        iteration=step,
        common=CommonInfo(step_num=step, global_step=step),
        model_files=folder,
        state=state,
        values=_with_scheduler(values, folder / of_run.scheduler),
    )


def _with_scheduler(values: run_state.Values, file: Location) -> run_state.Values:
    """The values with those of the file of the scheduler, if it is there, in place of others of a scheduler."""
    if not file.is_file():
        return values
    of_scheduler = run_state.flat_values({"lr_scheduler": _object_of(file)})
    by_name = {name: one for name, one in values.by_name.items() if values.path(name)[0] not in run.SCHEDULERS}
    return run_state.Values({**by_name, **of_scheduler.by_name}, {**values.paths, **of_scheduler.paths})


def scheduler_state(folder: Location) -> dict[str, Any]:
    """The state of the scheduler in its file.

    Args:
        folder: of the run.

    Raises:
        DamagedFileError, StorageError: the file cannot be read.
    """
    file = folder / names.SCHEDULER_FILE
    state = _object_of(file)
    if not isinstance(state, dict):
        raise DamagedFileError(f"{show(str(file))} holds no state of a scheduler", path=str(file))
    return state


def _weights(folder: Location, of_run: names.RunFiles, options: OpenOptions) -> CheckpointData:
    """The weights: those that FSDP saved, from which Trainer resumes, else those of a model."""
    if of_run.model is not None:
        path = folder / of_run.model
        format_ = DCP if of_run.model == names.SHARDED_MODEL else TORCH_FILE
        return format_.open(path, options)
    found = next((one for one in (HUGGINGFACE, TORCH_FILE, WEIGHT_FILES) if one.detect(folder) is Match.YES), None)
    if found is None:
        raise CheckpointNotFoundError(
            f"{show(str(folder))} holds the state of a run, and no weights",
            path=str(folder),
            hint="they are missing here, or in another folder",
        )
    return found.open(folder, options)


def _add_optimizer(index: _core.Index, path: Location, options: OpenOptions) -> run_state.Values:
    """Add the state of the optimizer to an index; returns its other values."""
    if path.is_folder():
        data = dcp.open_folder(path, options.method)
        _add(index, data.index, "")
        values = data.run_values()
        return run_state.Values(dict(values.by_name), values.paths)
    tensors, _ = _core.read_torch_file(str(path))
    number = index.add_torch_file(str(path), method=options.method)
    for name, dtype, shape in tensors:
        tile = _core.Tile((0,) * len(shape), shape, 0, row_major(shape))
        index.add_tiles(names.PREFIX + name, dtype, shape, [_core.StoredArray(number, name, shape, [tile])])
    return run_state.flat_values({"optimizer": _object_of(path)})


def _add(index: _core.Index, other: _core.Index, prefix: str) -> None:
    """Add the tensors of another index, under their names without a prefix."""
    first = index.add_files_of(other)
    for key in other.keys():  # noqa: SIM118  an index is no mapping
        stored = [_core.StoredArray(one.file + first, one.name, one.shape, one.tiles) for one in other.stored(key)]
        index.add_tiles(key.removeprefix(prefix), *other.info(key), stored)


def _state(path: Location) -> tuple[dict[str, Any], int]:
    """The state of the trainer, and its number of steps."""
    state = read_json(path, _MAX_STATE_BYTES, follow_links=True)
    step = state.get("global_step") if isinstance(state, dict) else None
    if not isinstance(state, dict) or type(step) is not int or not 0 <= step <= _MAX_STEP:
        raise DamagedFileError(f"{show(str(path))} has no number of steps, `global_step`", path=str(path))
    return state, step


def _object_of(path: Location) -> object:
    return _core.read_torch_object(str(path.resolved()), 0, path.stat(follow_links=True).n_bytes)
