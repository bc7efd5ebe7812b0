"""Reads the files of all FSDP ranks as one checkpoint: model, optimizer under `optimizer.`, and state beside them."""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from reshard import _core
from reshard.errors import CheckpointNotFoundError, DamagedFileError
from reshard.formats import mesh_shards, run_state
from reshard.formats.base import CheckpointData, Match
from reshard.formats.fsdp_ranks import names
from reshard.formats.huggingface.reader import HUGGINGFACE
from reshard.formats.outputs import load_all
from reshard.formats.rank_values import agreed
from reshard.formats.torch_file.format import TORCH_FILE
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from reshard.documents.common_info import CommonInfo
    from reshard.formats.base import PartName
    from reshard.formats.rank_replicas import Replicas
    from reshard.storage.location import Location

_log = logging.getLogger("reshard")

_MAX_NAMED = 3
_PREFIX = "optimizer."
_MISSING_HINT = "copy the files of all ranks into one folder"


@dataclass(frozen=True, kw_only=True)
class _RanksData(CheckpointData):
    """The files of all ranks.

    Attributes:
        files: numbers of the files of each rank.
        extra_files: paths of the files with the state beside the tensors, by rank.
        optimizer_files: paths of the files with the optimizer, by rank.
        replicas: arrays that are read as copies of each other.
    """

    files: Mapping[int, list[int]]
    extra_files: Mapping[int, Location]
    optimizer_files: Mapping[int, Location]
    replicas: Replicas

    @cached_property
    def _of_optimizer(self) -> Mapping[str, object]:
        """Values of the optimizer that are no tensors, by name: all ranks have the same."""
        found = [
            (rank, run_state.flat_values({"optimizer": _object_of(path)}).by_name)
            for rank, path in sorted(self.optimizer_files.items())
        ]
        names = dict.fromkeys(name for _, values in found for name in values)
        return {
            name: agreed(name, ((rank, values.get(name)) for rank, values in found), str(self.path)) for name in names
        }

    def part(self, key: str) -> PartName:
        """By the prefix that the reader gives to the optimizer."""
        return "optimizer" if key.startswith(_PREFIX) else "model"

    def slot_of(self, key: str) -> tuple[str, str] | None:
        """By the parts of the name: `optimizer.state.<parameter>.<slot>`."""
        found = run_state.state_of(key) if key.startswith(_PREFIX) else None
        return None if found is None else (found[1], found[0])

    def rank_files(self) -> Mapping[int, list[int]]:
        """Model and optimizer of each rank."""
        return self.files

    def world_size(self) -> int:
        """From the names of the files."""
        return len(self.files)

    def extra_state(self, rank: int) -> dict[str, Any]:
        """The scheduler and the random states of a rank, by path, and the values of the optimizer."""
        found = dict(self._of_optimizer)
        path = self.extra_files.get(rank)
        if path is None:
            return found
        tensors, objects = _core.read_torch_file(str(path))
        index = _core.Index()
        number = index.add_torch_file(str(path))
        for key, *_ in tensors:
            index.add_whole(key, number)
        arrays = load_all(index.plan(index.whole_request([key for key, *_ in tensors])))
        index.close()
        return {**found, **dict(objects), **arrays}

    def read_common(self) -> CommonInfo | None:
        """The number in the name of the folder, or the steps of the optimizer."""
        has_state = any(self.part(self.index.key(n)) == "optimizer" for n in range(len(self.index)))
        return run_state.common_of(self.index, (), lambda _: None, self.iteration) if has_state else None

    def has_values_of_ranks(self) -> bool:
        """Each rank wrote its own."""
        return len(self.extra_files) > 1

    def run_values(self, rank: int = 0) -> run_state.Values:
        """The values of the optimizer, and the scheduler."""
        files = {rank: self.extra_files[rank]} if rank in self.extra_files else self.extra_files
        held = [(one, _scheduler_of(path)) for one, path in sorted(files.items())]
        scheduler = agreed("lr_scheduler", held, str(self.path)) if held else None
        found = run_state.Values() if scheduler is None else run_state.flat_values({"lr_scheduler": scheduler})
        return run_state.Values({**self._of_optimizer, **found.by_name}, found.paths)

    def check(self, keys: Collection[str] | None) -> None:
        """Compare the copies that several ranks hold."""
        self.replicas.check(self.index, self.index.keys() if keys is None else keys)


def _object_of(path: Location) -> object:
    return _core.read_torch_object(str(path.resolved()), 0, path.stat(follow_links=True).n_bytes, with_tensors=False)


def _scheduler_of(path: Location) -> object:
    extra = _object_of(path)
    return extra.get("lr_scheduler") if isinstance(extra, dict) else None


def open_folder(folder: Location, method: _core.ReadMethod) -> CheckpointData:
    """Open the files of all ranks in a folder.

    Raises:
        CheckpointNotFoundError: the file of a rank is missing.
        DamagedFileError: the files are of several runs; or as `reshard.open`.
        CoverageError, UnsupportedError, StorageError: as `reshard.open`.
    """
    found = names.rank_files(folder.names())
    sizes = sorted(size for kind, size in found if kind == names.MODEL)
    if len(sizes) > 1:
        raise DamagedFileError(
            f"{show(str(folder))} holds files of runs with {listed(map(str, sizes))} ranks",
            path=str(folder),
            hint="move the files of one of them to another folder",
        )
    (size,) = sizes
    missing = _missing(found[names.MODEL, size], size)
    if missing:
        raise CheckpointNotFoundError(
            f"{show(str(folder))} holds {len(found[names.MODEL, size])} of {size} files of the ranks; missing: "
            f"{_named(names.MODEL, size, missing, size - len(found[names.MODEL, size]))}",
            path=str(folder / names.file_name(names.MODEL, size, missing[0])),
            hint=_MISSING_HINT,
        )
    index = _core.Index()
    files: dict[int, list[int]] = {}
    tensors: list[tuple[_core.RankTensors, Collection[str]]] = []
    optimizer_files: dict[int, Location] = {}
    for kind, prefix in ((names.MODEL, ""), (names.OPTIMIZER, _PREFIX)):
        of_kind = found.get((kind, size), {})
        if of_kind and (missing := _missing(of_kind, size)):
            _log.warning(
                "%s: the optimizer is not read: missing: %s",
                folder,
                _named(kind, size, missing, size - len(of_kind)),
            )
            continue
        if not of_kind:
            continue
        read = []
        for rank in range(size):
            path = str(folder / of_kind[rank])
            file = index.add_torch_file(path, method=method, prefix=prefix)
            files.setdefault(rank, []).append(file)
            read.append((path, file, rank))
        of_ranks = _core.read_torch_ranks(read, prefix=prefix, n_ranks=size)
        held = of_ranks.tensors()
        if kind == names.MODEL:
            mesh_shards.refuse_flat(held)
        else:
            has_values = of_ranks.has_values()
            optimizer_files = {rank: folder / of_kind[rank] for rank in range(size) if has_values[rank]}
        flattened = _flattened(held, size) if kind == names.OPTIMIZER else ()
        if flattened:
            _log.warning(
                "%s: state of the optimizer is not read, because each rank flattened its own part of the model, and no "
                "file says how: %s. Where they are no ShardedTensors, the file of a rank can be opened alone",
                folder,
                listed(map(show, flattened), _MAX_NAMED),
            )
        tensors.append((of_ranks, [key for key in dict.fromkeys(one.key for one in held) if key not in flattened]))
    replicas = mesh_shards.add_tensors(index, tensors, _MISSING_HINT)
    extra = found.get((names.EXTRA, size), {})
    of_model = folder / names.MODEL_FILES
    if any(one.detect(of_model) is Match.YES for one in (HUGGINGFACE, TORCH_FILE) if of_model.is_folder()):
        _log.warning(
            "%s: the shards of the ranks are read; the weights in %s are not: open that folder", folder, of_model
        )
    return _RanksData(
        traits=names.TRAITS,
        path=folder,
        index=index,
        method=method,
        iteration=names.step_of([folder.name, folder.absolute().parent.name]),
        model_files=of_model if of_model.is_folder() else None,
        files=files,
        extra_files={rank: folder / name for rank, name in extra.items()},
        optimizer_files=optimizer_files,
        replicas=replicas,
    )


def _flattened(tensors: Sequence[_core.RankTensor], size: int) -> Collection[str]:
    """The state of an optimizer that FSDP1 keeps for flattened parameters.

    It is called so, or, of several ranks, no shard of a mesh and no number.
    """
    plain = {one.key for one in tensors if one.kind is _core.TensorKind.TENSOR and one.local not in ((), (1,))}
    return {one.key: None for one in tensors if mesh_shards.is_flat(one.key) or (size > 1 and one.key in plain)}


def _missing(files: Mapping[int, str], size: int) -> list[int]:
    """The first ranks without a file."""
    return list(itertools.islice((rank for rank in range(size) if rank not in files), _MAX_NAMED))


def _named(kind: str, size: int, ranks: Sequence[int], count: int) -> str:
    return listed([show(names.file_name(kind, size, rank)) for rank in ranks], _MAX_NAMED, n_items=count)
