"""A folder of `torch.distributed.checkpoint`: its tensors from their chunks, and its other values.

`.metadata` is a pickle. It is decoded by the core and never executed. Chunks that overlap or leave a part of a tensor
uncovered are refused, and so is a chunk whose item has another shape or dtype than `.metadata` says: torch reads these
without an error. Where the ranks saved without collectives, each wrote a description of its own, and what several ranks
wrote of one tensor is compared before it is read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Self

from reshard import _core
from reshard.errors import (
    CheckpointNotFoundError,
    DamagedFileError,
    MismatchError,
    ReshardError,
    UnsupportedError,
)
from reshard.formats import run_state
from reshard.formats.base import CheckpointData
from reshard.formats.dcp import sharded_files
from reshard.formats.dcp.data_files import check_data_files
from reshard.formats.dcp.names import (
    DATA_SUFFIX,
    MAX_METADATA_BYTES,
    METADATA_FILE,
    OPTIMIZER_ENTRY,
    is_ours,
    rank_of_file,
    rank_of_metadata,
    step_of,
)
from reshard.formats.dcp.traits import TRAITS
from reshard.formats.rank_values import agreed
from reshard.storage.location import Location, locate
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from reshard.documents.common_info import CommonInfo
    from reshard.formats.base import PartName
    from reshard.storage.store import Lock

_log = logging.getLogger("reshard")

# name, file, first byte, bytes, transforms
# the ranks that have a value, each with its own one
_Held = list[tuple[int, _core.DcpObject]]


class _Decoded(Mapping[str, object]):
    """Values by name, each decoded when it is first looked up: one that cannot be is no error if nobody needs it."""

    def __init__(self, stored: Mapping[str, _Held], read: Callable[[_Held], object]) -> None:
        self._stored = stored
        self._read = cache(lambda name: read(stored[name]))

    def __getitem__(self, name: str) -> object:
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


@dataclass(frozen=True, kw_only=True)
class DcpData(CheckpointData):
    """A folder with its values that are no tensors.

    Attributes:
        objects: each value that is no tensor; of a folder without collectives by rank.
        by_rank: of a folder without collectives the tensors of each rank.
        compared: tensors of which several ranks wrote a part, and which were compared.
        descriptions: name of `.metadata`, or of those of the ranks; empty: there is none.
        recorded: returns the stored names of tensors that `.metadata` records as state of the optimizer.
        is_view: the tensors can have other names than the stored arrays.
    """

    objects: Sequence[Sequence[_core.DcpObject]] = ((),)
    by_rank: Sequence[_core.Index] = ()
    compared: set[str] = field(default_factory=set)
    descriptions: Sequence[str] = ()
    recorded: Callable[[], Collection[str]] = frozenset
    is_view: bool = False

    def part(self, key: str) -> PartName:
        """By the name: trainers save the state of an optimizer below `optimizer` or `optim`. Or as recorded."""
        if run_state.is_optimizer(key):
            return "optimizer"
        recorded = self.recorded()
        if not recorded or not self.is_view:
            return "optimizer" if key in recorded else "model"
        stored = self.index.stored(key)
        names = (one.name.partition("@")[2] for one in stored if one.file != _core.ZEROS)  # behind a number
        return "optimizer" if any(name in recorded for name in names) else "model"

    def slot_of(self, key: str) -> tuple[str, str] | None:
        """By the parts of the name: `<optimizer>.state.<parameter>.<slot>`."""
        found = run_state.state_of(key)
        return None if found is None else (found[1], found[0])

    def view(self, index: _core.Index, lock: Lock | None) -> Self:
        """As `CheckpointData.view`."""
        return replace(super().view(index, lock), is_view=True)

    def extra_state(self, rank: int) -> dict[str, Any]:
        """The values that are no tensors, by name. Without collectives each rank has values of its own."""
        return dict(self._values(rank))

    def _values(self, rank: int) -> Mapping[str, object]:
        """The same; each is decoded when it is looked up."""
        held: dict[str, _Held] = {}
        for saved_by, objects in enumerate(self.objects):
            for one in objects:
                held.setdefault(one.name, []).append((saved_by, one))
        own = {one.name: [(rank, one)] for one in (self.objects[rank] if rank < len(self.objects) else ())}
        return _Decoded(held | own, self._agreed)

    def _agreed(self, held: _Held) -> object:
        name = held[0][1].name
        return agreed(name, ((rank, self._read(one)) for rank, one in held), str(self.path))

    def _read(self, one: _core.DcpObject) -> object:
        try:
            return _core.read_torch_object(
                str(self.place / one.file), one.start, one.n_bytes, transforms=one.transforms
            )
        except ReshardError as error:
            error.message = f"{show(one.name)}: {error.message}"
            raise

    def world_size(self) -> int | None:
        """By the names of the files: as many ranks as the highest one that wrote something."""
        ranks = (rank_of_file(self.file_name(file)) for file in range(self.index.n_files))
        return max((rank + 1 for rank in ranks if rank is not None), default=None)

    def read_common(self) -> CommonInfo | None:
        """The step, from the values of the trainer, the name of the folder or the counters of the optimizer.

        Raises:
            MismatchError: without collectives, ranks saved different steps.
        """
        objects = {one.name: one for objects in reversed(self.objects) for one in objects}

        def common(own: Mapping[str, _core.DcpObject]) -> CommonInfo | None:
            return run_state.common_of(self.index, own, lambda name: self._read(own[name]), self.iteration)

        found = common(objects)
        for rank, of_rank in enumerate(self.objects if len(self.objects) > 1 else ()):
            other = common(objects | {one.name: one for one in of_rank})
            if found is not None and other is not None and other.global_step != found.global_step:
                raise MismatchError(
                    f"{show(str(self.path))}: rank {rank} saved step {other.global_step}, and another rank step "
                    f"{found.global_step}",
                    path=str(self.path),
                    hint="open the folder of one save: these files are of several",
                )
        return found

    def has_values_of_ranks(self) -> bool:
        """Each rank wrote its own."""
        return len(self.objects) > 1

    def run_values(self, rank: int = 0) -> run_state.Values:
        """The values that are no tensors, with the paths that `.metadata` records."""
        if not self.descriptions:
            return run_state.Values()
        values = self._values(rank)
        paths: dict[str, list[tuple[int, tuple[str | int, ...]]]] = {}
        for saved_by, description in enumerate(self.descriptions):
            data = (self.place / description).read_small(MAX_METADATA_BYTES)
            of_rank: dict[str, tuple[str | int, ...]] = dict(_core.read_dcp_paths(data))
            for name, one in of_rank.items():
                paths.setdefault(name, []).append((saved_by, one))
        found = {name: agreed(name, held, str(self.path)) for name, held in paths.items()}
        return run_state.Values(values, found)

    def check(self, keys: Collection[str] | None) -> None:
        """Compare the parts that several ranks wrote: without collectives nobody chose one of them."""
        held: dict[tuple[str, tuple[int, ...], tuple[int, ...]], int] = {}
        for rank, index in enumerate(self.by_rank):
            # The keys of another view may be others.
            names = index.keys() if keys is None or self.is_renamed else (key for key in keys if key in index)
            for key in names:
                if key in self.compared:
                    continue
                for region in index.shards(key):
                    first = held.setdefault((key, region.offset, region.shape), rank)
                    if first == rank:
                        continue
                    arrays = (
                        run_state.read_region(self.by_rank[one], key, region.offset, region.shape)
                        for one in (first, rank)
                    )
                    if len({array.tobytes() for array in arrays}) > 1:
                        raise MismatchError(
                            f"{show(str(self.path))}: ranks {first} and {rank} saved different values of {show(key)} "
                            f"at {region.offset}",
                            path=str(self.path),
                            key=key,
                            hint="ranks that hold the same parameter must make the same steps",
                        )
        self.compared.update(key for key, *_ in held)


def open_folder(folder: Location, method: _core.ReadMethod) -> DcpData:
    """Open the folder of one save; data files are opened when they are first needed.

    Raises:
        CheckpointNotFoundError: it was not finished, is none, or lacks a file.
        DamagedFileError, CoverageError, StorageError: as `reshard.open`.
    """
    names = folder.names()
    shard_files = {name: parsed for name in names if (parsed := sharded_files.parse_name(name)) is not None}
    if METADATA_FILE not in names and shard_files:
        return _open_shard_files(folder, shard_files, method)
    by_rank = {rank: name for name in names if (rank := rank_of_metadata(name)) is not None}
    if METADATA_FILE not in names and by_rank:
        return _open_ranks(folder, by_rank, method)
    try:
        data = (folder / METADATA_FILE).read_small(MAX_METADATA_BYTES)
    except CheckpointNotFoundError:
        if not any(name.endswith(DATA_SUFFIX) for name in names):
            raise CheckpointNotFoundError(
                f"{show(str(folder))} holds no checkpoint of torch.distributed.checkpoint", path=str(folder)
            ) from None
        raise CheckpointNotFoundError(
            f"{show(str(folder))} has data files of torch.distributed.checkpoint, but no `{METADATA_FILE}`: the "
            "save was not finished",
            path=str(folder),
            hint="use another step; `.metadata` is written last, and without it the files cannot be read",
        ) from None
    index, objects, unsupported, files = _core.open_dcp(str(folder), data, method=method)
    del data  # it can have a hundred megabytes
    index.check_coverage()  # torch leaves a hole as it was, and reads overlaps in any order
    _warn_of(folder, unsupported)
    holds_safetensors = _holds_safetensors(index)
    # `.metadata` has no valid positions for safetensors files.
    check_data_files(folder, [(name, 0 if holds_safetensors else end) for name, end in files], METADATA_FILE)
    if holds_safetensors:
        index = _safetensors_index(folder, index, objects, method)
    return DcpData(
        traits=TRAITS._replace(has_sums=not holds_safetensors),
        path=folder,
        index=index,
        method=method,
        iteration=step_of(folder.name),
        objects=[objects],
        descriptions=[METADATA_FILE],
        recorded=cache(partial(_recorded_as_optimizer, folder)),
    )


def _recorded_as_optimizer(folder: Location) -> frozenset[str]:
    """The tensors that this package has recorded as state of the optimizer. What others wrote is not decoded again."""
    if not is_ours(folder):
        return frozenset()
    data = (folder / METADATA_FILE).read_small(MAX_METADATA_BYTES)
    if OPTIMIZER_ENTRY.encode() not in data:  # texts are UTF-8 in a pickle of ours
        return frozenset()
    paths = _core.read_dcp_paths(data)
    return frozenset(str(key) for name, path in paths if name == OPTIMIZER_ENTRY for key in path)


def _warn_of(folder: Location, unsupported: Sequence[tuple[str, str]]) -> None:
    if unsupported:
        names = listed(f"{show(name)} ({why})" for name, why in unsupported)
        _log.warning("%s: %d tensors cannot be read and are left out: %s", folder, len(unsupported), names)


# -- a description of each rank


def _open_ranks(folder: Location, by_rank: Mapping[int, str], method: _core.ReadMethod) -> DcpData:
    """A folder whose ranks saved without collectives. The sizes of tensors are global, so coverage tells what lacks."""
    lacking = next((rank for rank in range(max(by_rank) + 1) if rank not in by_rank), None)
    if lacking is not None:
        raise CheckpointNotFoundError(
            f"{show(str(folder))} has `__{max(by_rank)}{METADATA_FILE}`, but no `__{lacking}{METADATA_FILE}`: a rank "
            "did not finish its save",
            path=str(folder),
            hint="use another checkpoint; each rank writes its description last",
        )
    texts = [(by_rank[rank], (folder / by_rank[rank]).read_small(MAX_METADATA_BYTES)) for rank in sorted(by_rank)]
    index, _, unsupported, files = _core.open_dcp_ranks(str(folder), texts, method=method)
    index.check_coverage()
    check_data_files(folder, files, texts[0][0])
    _warn_of(folder, unsupported)
    opened = [_core.open_dcp_ranks(str(folder), [text], method=method) for text in texts]
    return DcpData(
        traits=TRAITS,
        path=folder,
        index=index,
        method=method,
        iteration=step_of(folder.name),
        objects=[one.objects for one in opened],
        by_rank=[one.tensors for one in opened],
        descriptions=[name for name, _ in texts],
    )


# -- safetensors


def _open_shard_files(
    folder: Location, names: Mapping[str, sharded_files.FileName], method: _core.ReadMethod
) -> DcpData:
    index, shards = sharded_files.read_index(folder, list(names), method)
    sharded_files.check_files(folder, names, shards)
    traits = TRAITS._replace(has_sums=False)
    return DcpData(traits=traits, path=folder, index=index, method=method, iteration=step_of(folder.name))


def _holds_safetensors(index: _core.Index) -> bool:
    """Whether the data files are safetensors files: torch writes all of them in one form."""
    if not index.n_files:
        return False
    try:
        return sharded_files.is_safetensors(locate(index.file_path(0)).read_head(16))
    except CheckpointNotFoundError:
        return False  # `check_data_files` names it


def _safetensors_index(
    folder: Location, described: _core.Index, objects: Sequence[_core.DcpObject], method: _core.ReadMethod
) -> _core.Index:
    """The index of data files that are safetensors files."""
    if objects:
        raise UnsupportedError(
            f"{show(str(folder))}: {show(objects[0].name)} is no tensor, and torch's writer puts such values in front "
            "of the header of a safetensors file: the files cannot be read",
            path=str(folder),
            hint="save again with `SerializationFormat.TORCH_SAVE`",
        )
    files = [str(described.file_path(file))[len(str(folder)) + 1 :] for file in range(described.n_files)]
    index, _ = sharded_files.read_index(folder, files, method)
    for n in range(len(described)):
        key = described.key(n)
        found = index.info(key) if key in index else None
        if found != described.info(key):
            dtype, shape = described.info(key)
            what = "nothing" if found is None else f"{found[0]} {found[1]}"
            raise DamagedFileError(
                f"{show(str(folder))}: `{METADATA_FILE}` says that {show(key)} is {dtype} {shape}, and the data files "
                f"hold {what}",
                path=str(folder),
                key=key,
            )
    return index
