"""Writing rank folders: each rank's own part of every tensor, the counters in each, and the strategy that tells how.

The files are `rank_<r>/net.safetensors`, as the original's tool that splits names them, or with a prefix those of a
save of a training run, with `meta.json`. What a strategy has no words for is refused: nobody could put the parts
together again.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from reshard import _core, dtypes
from reshard.errors import ArgumentError, DestinationExistsError
from reshard.formats import checkpoint1
from reshard.formats.checkpoint1 import FileName, Meta
from reshard.verbs.destinations import (
    File,
    Written,
    bind,
    destination_folder,
    file_sizes,
    is_our_file,
    n_bytes_of,
    produced,
    set_original_modes,
    whole_tensors,
)
from reshard.write.iteration import file_order

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from reshard.checkpoint import LayoutLike
    from reshard.layout import BoundLayout
    from reshard.verbs.destinations import Job

__all__ = ["to_checkpoint1"]

STRATEGY_FOLDER = "strategy"
_FILE = "net.safetensors"


def to_checkpoint1(
    job: Job, layout: LayoutLike | None, *, prefix: str | None, iteration: int | None, original_modes: bool
) -> Written:
    """Write a folder of rank folders.

    Raises:
        ArgumentError: an iteration without a prefix; a layout whose ranks are not numbered from 0; a counter that the
            cast would change.
        UnsupportedError: a strategy cannot tell how a tensor is cut.
        DestinationExistsError, LayoutError, StorageError: as told at `convert`.
    """
    names = _file_name(job, prefix, iteration)
    _check_free(job)
    bound = bind(job.source, layout)
    ranks = sorted(bound.ranks)
    if ranks != list(range(len(ranks))):
        raise ArgumentError(f"rank folders are numbered from 0, and the layout has rank {ranks[-1]} of {len(ranks)}")
    _check_counters(job)
    dtype_of = {key: tensor.dtype for key, tensor in whole_tensors(job).items()}
    subfolders = [checkpoint1.rank_folder_name(rank) for rank in ranks]
    with _with_counters(job):
        files = [
            File(f"{folder}/{_name(names, rank)}", _request(job, bound, rank, dtype_of))
            for rank, folder in zip(ranks, subfolders, strict=True)
        ]
        with produced(job, job.target, files, file_sizes(job, files)) as fill:
            if isinstance(fill, Written):
                return fill
            with destination_folder(job, subfolders, _is_our_folder) as folder:
                n_bytes = n_bytes_of(fill(folder))
                if names is not None:
                    for rank, name in zip(ranks, subfolders, strict=True):
                        meta = Meta(names.epoch, names.step, names.of_rank(rank).name)
                        checkpoint1.write_meta(folder / name, meta, job.options.file_mode, durable=job.options.durable)
                if original_modes:
                    for name in subfolders:
                        set_original_modes(folder / name)
    return Written(job.target, len(files), n_bytes, warnings=list(bound.warnings))


# -- names


def _file_name(job: Job, prefix: str | None, iteration: int | None) -> FileName | None:
    """The name of rank 0's file; None: every rank's is the same."""
    if prefix is None:
        if iteration is not None:
            raise ArgumentError(
                "`iteration` stands in the names of rank files only together with `prefix`",
                hint=f"give `prefix` too, or leave both out: the files are then `rank_<r>/{_FILE}`",
            )
        return None
    epoch, step = (iteration, 1) if iteration is not None else _position(job)
    name = FileName(prefix, 0, None, "full", epoch, step, "safetensors")
    if checkpoint1.parse_file_name(name.name) != name or "rank" in prefix:
        raise ArgumentError(
            f"`prefix` is {prefix!r}, which does not come back out of the name {name.name!r}",
            hint='a prefix has no path separator, and not the word "rank" in it',
        )
    return name


def _position(job: Job) -> tuple[int, int]:
    """Epoch and step of the destination: those in the source's names, or the iteration as with a sink size of 1."""
    if job.source.format == "checkpoint1":
        for file in job.source.files():
            name = checkpoint1.parse_file_name(Path(file.name).name)
            if name is not None:
                return name.epoch, name.step
    return job.source.iteration or 0, 1


def _name(names: FileName | None, rank: int) -> str:
    return _FILE if names is None else names.of_rank(rank).name


# -- what a file holds


def _request(job: Job, bound: BoundLayout, rank: int, dtype_of: Mapping[str, str]) -> _core.Request:
    """A rank's own arrays and the counters, wide elements first."""
    held = {**dtype_of} | {name: dtypes.name_of(array.dtype) for name, array in job.counters.items()}
    request = _core.Request()
    for name in file_order([*bound.local_names(rank, job.keys), *job.counters], held):
        if name in job.counters:
            shape = job.counters[name].shape
            request.add_region(name, name, (0,) * len(shape), shape)
        else:
            bound.add_to(request, name, rank)
    return request


@contextlib.contextmanager
def _with_counters(job: Job) -> Iterator[None]:
    """The counters as tensors of the source: a file streams what its source holds."""
    if not job.counters:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="reshard-") as folder:
        path = str(Path(folder) / "counters.safetensors")
        arrays = [
            (name, dtypes.name_of(array.dtype), array.shape, array) for name, array in sorted(job.counters.items())
        ]
        _core.write_arrays(path, arrays, durable=False)
        index = job.source._index  # noqa: SLF001  it is the conversion's own view
        file = index.add_file(path, follow_links=False)
        for name in job.counters:
            index.add_whole(name, file)
        yield


def _check_counters(job: Job) -> None:
    """Refuse a cast that would change a counter, since all of a file is cast."""
    if job.options.dtype is None:
        return
    to = dtypes.numpy_dtype(job.options.dtype)
    for name, array in job.counters.items():
        with np.errstate(all="ignore"):
            cast = array.astype(to)
        if np.issubdtype(array.dtype, np.floating) and cast.astype(array.dtype) != array:
            raise ArgumentError(
                f"the cast to {job.options.dtype} would turn the counter `{name}` from {array.item()} into "
                f"{cast.item()}",
                key=name,
                hint=f'leave it out with drop=["{name}"], or choose another dtype',
            )


# -- the destination


def _check_free(job: Job) -> None:
    target = job.target
    if not target.exists():
        return
    if not target.is_dir():
        raise DestinationExistsError(f"{target} is a file; the destination is to be a folder", path=str(target))
    entries = list(target.iterdir())
    if not entries:
        return
    if not job.overwrite:
        raise DestinationExistsError(
            f"{target} holds {len(entries)} entries, such as {entries[0].name}",
            path=str(target),
            hint="choose another destination, or give `overwrite` to replace the files of an earlier conversion",
        )
    names = [*map(checkpoint1.rank_folder_name, checkpoint1.rank_folders(target)), STRATEGY_FOLDER]
    foreign = [entry for entry in entries if entry.name in names and not _is_our_folder(entry)]
    if foreign:
        raise DestinationExistsError(
            f"{foreign[0]} holds what was not written by an earlier conversion, and would be lost",
            path=str(foreign[0]),
            hint="move it away, or choose another destination",
        )


def _is_our_folder(entry: Path) -> bool:
    """Whether a folder of a rank holds one file that was written here, and nothing else but its `meta.json`."""
    if entry.is_symlink() or not entry.is_dir() or not entry.name.startswith("rank_"):
        return False
    names = {one.name for one in entry.iterdir()} - {checkpoint1.META_FILE}
    return len(names) == 1 and is_our_file(entry / names.pop())
