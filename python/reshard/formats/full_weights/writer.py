"""Writes full weights in the MindSpore layout: whole tensors in parts, their map, and the counters beside them.

Tensors that the conversion leaves out are in none of the files. The file of the counters holds counters only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from reshard import _core, dtypes
from reshard.commit import writer_mark
from reshard.conversion.destinations import (
    File,
    Written,
    check_folder_free,
    publish_folder,
    set_original_modes,
)
from reshard.conversion.writer import Settings, Writer
from reshard.formats import counter_tensors, weight_map
from reshard.formats.full_weights import names as full_weights
from reshard.values.counters import OF_NO_PARAMETER

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from reshard.commit.attempts import ValueRecord
    from reshard.conversion.destinations import Job
    from reshard.conversion.known_files import Mark
    from reshard.conversion.source import Source
    from reshard.storage.location import Location


class FullWeightsWriter(Writer):
    """Full weights in the MindSpore layout."""

    name = "mindspore"
    commits = (full_weights.MAP_FILE,)
    marks: ClassVar[Mapping[str, Mark]] = {
        ".safetensors": writer_mark.is_ours,
        full_weights.MAP_FILE: weight_map.is_ours,
    }
    metadata: ClassVar[Mapping[str, str]] = {"format": "ms", "remove_redundancy": "False"}
    is_whole = True
    options = frozenset({"modes"})
    counts_counters = True

    def write(self, job: Job, settings: Settings) -> Written:
        """Write the parts, the name map and the counters."""
        return _write(job, settings.max_bytes, original_modes=settings.original_modes)

    def apart(self, source: Source) -> Collection[str]:  # noqa: ARG002
        """All counters: they have a file of their own."""
        return OF_NO_PARAMETER


def _write(job: Job, max_part_bytes: int | None, *, original_modes: bool) -> Written:
    """Write whole tensors in parts of limited size, or in as many parts as MindSpore writes.

    Raises:
        DestinationExistsError, UnsupportedError, StorageError: as `convert`.
    """
    check_folder_free(job)
    counter_tensors.check_values(job.counters)
    arrays = job.arrays(job.whole_request(job.keys))
    dtype_of = {name: dtype for name, dtype, _, _ in arrays}
    parts = full_weights.plan_parts([(name, n_bytes) for name, _, _, n_bytes in arrays], max_part_bytes)
    order = {name: dtypes.file_order(name, dtype) for name, dtype in dtype_of.items()}.__getitem__
    files = [
        File(full_weights.file_name(number), job.whole_request(sorted(names, key=order)))
        for number, names in enumerate(parts)
    ]
    file_of = {key: file.name for file, names in zip(files, parts, strict=True) for key in names}
    text = full_weights.map_text(file_of, sum(one[3] for one in arrays), _core.__version__)

    def finish(folder: Location) -> dict[str, ValueRecord]:
        written = _write_counters(job, folder / full_weights.HYPER_FILE)
        if original_modes:
            set_original_modes(folder)
        return written

    return publish_folder(job, files, {full_weights.MAP_FILE: text}, finish=finish)


def _write_counters(job: Job, path: Location) -> dict[str, ValueRecord]:
    """Write the file of the counters, if there are any. Returns what was written."""
    if not job.counters:
        return {}
    counters = sorted(job.counters.items())
    written = _core.write_arrays(
        str(path),
        [(name, dtypes.name_of(array.dtype), array.shape, array) for name, array in counters],
        metadata=job.options.metadata,
        durable=job.options.durable,
        mode=job.options.file_mode,
    )
    return {path.name: written}
