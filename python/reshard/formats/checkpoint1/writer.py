"""Writes rank folders: each rank's shard of every tensor, the counters in each file, and the strategy of the layout.

The files are `rank_<r>/net.safetensors`, as MindSpore's split tool names them. With a prefix they are named like those
of a save, with `meta.json`. A layout that a strategy cannot express is refused, since the result could not be opened.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from reshard import _core, dtypes
from reshard.conversion.destinations import (
    File,
    Written,
    check_folder_free,
    dtypes_and_parts,
    is_our_file,
    publish_folder,
    set_original_modes,
)
from reshard.conversion.writer import Settings, Writer
from reshard.errors import ArgumentError, ReshardError, UnsupportedError
from reshard.formats import counter_tensors
from reshard.formats.checkpoint1 import names as checkpoint1
from reshard.formats.checkpoint1 import save_plan as rank_plan
from reshard.formats.checkpoint1.names import STRATEGY_FOLDER, FileName, Meta
from reshard.formats.checkpoint1.save_plan import ShardAssignment, assign, check_prefix
from reshard.formats.checkpoint2.iteration import plan_layout
from reshard.layout.strategy_file import read_strategy_file
from reshard.layout.strategy_writer import strategy_of, write_stage_files
from reshard.storage.changes import temporary_folder
from reshard.values.counters import OF_NO_PARAMETER
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from reshard.commit.attempts import ValueRecord
    from reshard.conversion.destinations import Job
    from reshard.conversion.source import Source
    from reshard.layout import BoundLayout
    from reshard.layout.strategy import Strategy
    from reshard.storage.location import Location
    from reshard.write.contents import DtypeAndPart

_FILE = "net.safetensors"


class Checkpoint1Writer(Writer):
    """A folder for each rank, with the strategy files of the layout."""

    name = "checkpoint1"
    commits = (STRATEGY_FOLDER,)
    keeps_others = True
    metadata: ClassVar[Mapping[str, str]] = {"format": "ms", "remove_redundancy": "False"}
    options = frozenset({"iteration", "prefix", "modes"})
    counts_counters = True

    def write(self, job: Job, settings: Settings) -> Written:
        """Write the folders. By default, replicas are written on each rank."""
        return _write(job, settings)

    def apart(self, source: Source) -> Collection[str]:  # noqa: ARG002
        """All counters: they are in the file of every rank."""
        return OF_NO_PARAMETER


def _write(job: Job, settings: Settings) -> Written:
    """Write rank folders. With `dedup` each shard is written once per stage, which the files record.

    Raises:
        ArgumentError: an iteration without a prefix; a layout whose ranks are not 0, 1, 2, ...; a counter that the cast
            would change.
        UnsupportedError: a strategy cannot express the layout of a tensor.
        DestinationExistsError, LayoutError, StorageError: as `convert`.
    """
    bound = settings.layout
    names = _file_name(job, settings.prefix, settings.iteration)
    check_folder_free(job, functools.partial(_is_foreign, job, names=names))
    ranks = sorted(bound.ranks)
    if ranks != list(range(len(ranks))):
        raise ArgumentError(f"rank folders are numbered from 0, but the layout has rank {ranks[-1]} of {len(ranks)}")
    strategy = _strategy(job, bound)
    _check_counters(job)
    tensors = dtypes_and_parts(job)
    if settings.dedup:
        job = replace(job, options=replace(job.options, metadata=job.options.metadata | {"remove_redundancy": "True"}))
    assignment = _assignment(tensors, bound, strategy) if settings.dedup else ShardAssignment()
    subfolders = [checkpoint1.rank_folder_name(rank) for rank in ranks]

    def finish(folder: Location) -> dict[str, ValueRecord]:
        mode, durable = job.options.file_mode, job.options.durable
        if strategy is not None:
            of_stages = range(0, strategy.world_size, strategy.devices_per_stage)
            write_stage_files(strategy, folder / STRATEGY_FOLDER, ranks=of_stages, mode=mode, durable=durable)
        if names is not None:
            for rank, name in zip(ranks, subfolders, strict=True):
                meta = Meta(names.epoch, names.step, names.of_rank(rank).name)
                checkpoint1.write_meta(folder / name, meta, mode, durable=durable)
        if settings.original_modes:
            for name in subfolders:
                set_original_modes(folder / name)
        return {}

    with _with_counters(job):
        files = [
            File(f"{folder}/{_name(names, rank)}", _request(job, bound, tensors, assignment, rank))
            for rank, folder in zip(ranks, subfolders, strict=True)
        ]
        return publish_folder(
            job,
            files,
            subfolders=subfolders if strategy is None else [*subfolders, STRATEGY_FOLDER],
            is_ours=functools.partial(_is_ours, job, names=names),
            warnings=bound.warnings,
            finish=finish,
        )


def _strategy(job: Job, bound: BoundLayout) -> Strategy | None:
    """The strategy that describes the written tensors; None for one rank, which holds whole tensors.

    Raises:
        UnsupportedError: it cannot express the layout of a tensor.
    """
    joined = {key for join in bound.joins for key in join.keys}
    layouts = {key: bound.tensor_layouts[key] for key in job.keys}
    for key, layout in layouts.items():
        partition = layout.partition
        # Even on one rank the stored array differs from the tensor.
        if key in joined or partition.flat or partition.is_reordered:
            is_flat = bool(partition.flat)
            how = "in one array with others" if key in joined else "flattened" if is_flat else "in another dim order"
            raise UnsupportedError(
                f"{show(key)} would be stored {how}, which a strategy cannot express",
                key=key,
                hint="choose another layout for it; `select=Select(drop=...)` leaves it out",
            )
    return None if len(bound.ranks) == 1 else strategy_of(replace(bound, tensor_layouts=layouts, joins=[]))


# -- names


def _file_name(job: Job, prefix: str | None, iteration: int | None) -> FileName | None:
    """The name of rank 0's file; None: the same name on every rank."""
    if prefix is None:
        if iteration is not None:
            raise ArgumentError(
                "`iteration` stands in the names of rank files only together with `prefix`",
                hint=f"give `files=Files(prefix=...)` too; without both the files are `rank_<r>/{_FILE}`",
            )
        return None
    epoch, step = rank_plan.position(iteration) if iteration is not None else _position(job)
    return FileName(check_prefix(prefix), 0, None, "full", epoch, step, "safetensors")


def _position(job: Job) -> tuple[int, int]:
    """Epoch and step of the destination: those in the names of the source, or those of its iteration."""
    if job.source.data.traits.rank_folders:
        for file in job.source.files():
            name = checkpoint1.parse_file_name(file.name.rpartition("/")[2])
            if name is not None:
                return name.epoch, name.step
    return rank_plan.position(job.source.iteration or 0)


def _name(names: FileName | None, rank: int) -> str:
    return _FILE if names is None else names.of_rank(rank).name


# -- content of a file


def _request(
    job: Job, bound: BoundLayout, tensors: Mapping[str, DtypeAndPart], assignment: ShardAssignment, rank: int
) -> _core.Request:
    """A rank's arrays and the counters, wide elements first."""
    dtype_of = {key: dtype for key, (dtype, _) in tensors.items()}
    dtype_of |= {name: dtypes.name_of(array.dtype) for name, array in job.counters.items()}
    left_out = assignment.left_out(rank)
    request = _core.Request()
    held = [name for name in bound.local_names(rank, job.keys) if name not in left_out]
    for name in sorted([*held, *job.counters], key=lambda name: dtypes.file_order(name, dtype_of[name])):
        if name in job.counters:
            shape = job.counters[name].shape
            request.add_region(name, name, (0,) * len(shape), shape)
        else:
            request.add(name, name, bound.layouts[name], rank)
    return request


def _assignment(tensors: Mapping[str, DtypeAndPart], bound: BoundLayout, strategy: Strategy | None) -> ShardAssignment:
    """Assign each shard to one rank. Tensors that the strategy does not list are written by every rank."""
    if strategy is None:
        return ShardAssignment()
    holders = {key: held for key, held in plan_layout(tensors, bound).holders.items() if strategy.stages_of(key)}
    return assign(holders, [rank // strategy.devices_per_stage for rank in range(strategy.world_size)])


@contextlib.contextmanager
def _with_counters(job: Job) -> Iterator[None]:
    """Add the counters to the source as tensors, since files are streamed from their source."""
    if not job.counters:
        yield
        return
    with temporary_folder("reshard-") as folder:
        path = str(folder / "counters.safetensors")
        arrays = [
            (name, dtypes.name_of(array.dtype), array.shape, array) for name, array in sorted(job.counters.items())
        ]
        _core.write_arrays(path, arrays, durable=False)
        index = job.source.data.index
        file = index.add_file(path, follow_links=False)
        for name in job.counters:
            index.add_whole(name, file)
        yield


def _check_counters(job: Job) -> None:
    """Refuse tensors that have the name of a counter and are none, and a cast that would change one: it casts all."""
    counter_tensors.check_names({key: job.source.shape(key) for key in job.keys if key in counter_tensors.NAMES})
    counter_tensors.check_values(job.counters)
    if job.options.dtype is None:
        return
    to = dtypes.numpy_dtype(job.options.dtype)
    for name, array in job.counters.items():
        with np.errstate(all="ignore"):
            cast = array.astype(to)
        if np.issubdtype(array.dtype, np.floating) and cast.astype(array.dtype) != array:
            raise ArgumentError(
                f"the cast to {job.options.dtype} would change the counter `{name}` from {array.item()} to "
                f"{cast.item()}",
                key=name,
                hint=f'choose another dtype; `select=Select(drop=["{name}"])` leaves it out',
            )


# -- the destination


def _is_foreign(job: Job, entry: Location, names: FileName | None) -> bool:
    """Whether a folder at the destination was not written by an earlier conversion to the same names."""
    has_name = checkpoint1.parse_rank_folder(entry.name) is not None or entry.name == STRATEGY_FOLDER
    return has_name and not _is_ours(job, entry, names)


def _is_ours(job: Job, entry: Location, names: FileName | None) -> bool:
    """Whether a folder holds only what an earlier conversion to the same names wrote."""
    if entry.kind() != "folder":
        return False
    files = set(entry.names()) - {checkpoint1.META_FILE}
    if (rank := checkpoint1.parse_rank_folder(entry.name)) is not None:
        name = _name(names, rank)
        return files == {name} and is_our_file(job, entry / name)
    return entry.name == STRATEGY_FOLDER and all(_is_our_strategy(entry / name) for name in files)


def _is_our_strategy(path: Location) -> bool:
    """Whether this package wrote a strategy: its only operators are those of parameters."""
    try:
        content = read_strategy_file(path, follow_links=False)
    except ReshardError:
        return False
    return all(one.node_name in content.layouts or not content.layouts for one in content.operators)
