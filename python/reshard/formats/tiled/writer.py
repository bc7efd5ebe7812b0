"""Writes plain `.safetensors` files: one file, or one for each rank with a tiles.json that describes them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, ClassVar

from reshard import dtypes
from reshard.commit import writer_mark
from reshard.commit.publication import made_folder, published_file
from reshard.conversion.buckets import home_of, left_in
from reshard.conversion.destinations import (
    File,
    Written,
    as_files,
    check_folder_free,
    dtypes_and_parts,
    file_sizes,
    is_our_file,
    n_bytes_of,
    produced,
    publish_folder,
    write_files,
    write_object,
)
from reshard.conversion.writer import Settings, Writer
from reshard.errors import DestinationExistsError
from reshard.formats.checkpoint2.iteration import describe_cut
from reshard.formats.tiled import names as tiles
from reshard.storage.changes import link_or_move, make_folders
from reshard.write.contents import FileContent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard import _core
    from reshard.commit.attempts import ValueRecord
    from reshard.conversion.destinations import Job
    from reshard.conversion.known_files import Mark
    from reshard.layout import BoundLayout
    from reshard.storage.location import Location


class SafetensorsWriter(Writer):
    """One `.safetensors` file, or one for each rank."""

    name = "safetensors"
    has_headers = True
    commits = (tiles.TILES_FILE,)
    marks: ClassVar[Mapping[str, Mark]] = {".safetensors": writer_mark.is_ours, tiles.TILES_FILE: tiles.is_ours}

    def is_one_file(self, target: Location) -> bool:
        """By the suffix of the destination."""
        return target.suffix == ".safetensors"

    def write(self, job: Job, settings: Settings) -> Written:
        """Write the file, or the files and tiles.json."""
        return _write(job, settings.layout)


def _write(job: Job, bound: BoundLayout) -> Written:
    """Write one file, or one per rank with tiles.json."""
    if job.target.suffix == ".safetensors":
        return write_one_file(job)
    check_folder_free(job)
    dtype_of = {key: dtype for key, (dtype, _) in dtypes_and_parts(job).items()}
    keys = frozenset(dtype_of)
    dtype_of |= {join.name: dtype_of[join.keys[0]] for join in bound.joins if join.keys[0] in dtype_of}
    builder = tiles.Builder()
    contents = []
    for rank in bound.ranks:
        names = bound.local_names(rank, job.keys)
        if names:
            ordered = sorted(names, key=lambda name: dtypes.file_order(name, dtype_of[name]))
            file = FileContent(f"rank_{rank}.safetensors", rank, tuple(ordered))
            describe_cut(builder, bound, dtype_of, file, keys)
            contents.append(file)

    def finish(folder: Location) -> dict[str, ValueRecord]:
        if len(builder):
            content = builder.build(bound.to_mapping())
            tiles.write(folder / tiles.TILES_FILE, content, job.options.file_mode, durable=job.options.durable)
        return {}

    return publish_folder(job, as_files(bound, contents), warnings=bound.warnings, finish=finish)


def write_one_file(job: Job, container: _core.Container | None = None) -> Written:
    """Write all tensors, whole, into the file that is the destination.

    Args:
        job: the conversion.
        container: the other bytes of the file; None: a safetensors file.

    Raises:
        DestinationExistsError: the file exists, and must not be replaced.
    """
    _check_file_free(job)
    durable, parent = job.options.durable, job.target.parent
    if not parent.is_local:
        return write_object(job, File(job.target.name, job.whole_request(job.keys), container))
    made = made_folder(parent, mode=job.options.folder_mode, durable=durable)
    publishing = functools.partial(
        published_file, job.target, replace=job.overwrite, durable=durable, keep_mode=job.options.keep_modes
    )
    if job.shared is None:
        with made, publishing() as path:
            files = [File(path.name, job.whole_request(job.keys), container)]
            n_bytes = n_bytes_of(write_files(job, parent, files, file_sizes(job, files)))
        return Written(job.target, 1, n_bytes)
    files = [File(job.target.name, job.whole_request(job.keys), container)]
    with made, produced(job, job.target, files, file_sizes(job, files)) as fill:
        if isinstance(fill, Written):
            return fill
        placed = job.shared.folder / "placed"
        make_folders(placed)
        with publishing(inside=job.shared.folder) as path:
            n_bytes = n_bytes_of(fill(placed))
            link_or_move(placed / job.target.name, path)
    return Written(job.target, 1, n_bytes)


def _check_file_free(job: Job) -> None:
    target = job.target
    if not target.exists():
        return
    if not target.is_local and job.shared is not None and left_in(home_of(target), job.shared.folder.name):
        return  # shares of this conversion are complete, and it is not published yet
    if not job.overwrite:
        raise DestinationExistsError(f"{target} exists", path=str(target), hint="give `overwrite=True` to replace it")
    if not is_our_file(job, target):
        raise DestinationExistsError(
            f"{target} was not written by an earlier conversion", path=str(target), hint="choose another destination"
        )
