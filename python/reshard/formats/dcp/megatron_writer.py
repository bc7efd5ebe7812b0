"""Writes the weights of a Megatron-Core checkpoint in its `torch_dist` format.

    latest_checkpointed_iteration.txt    the iteration, or `release` for weights that no run has trained further
    iter_<N> or release/                 a folder of torch.distributed.checkpoint
        common.pt                        values that all ranks share
        metadata.json                    the name and version of the format

The names of the tensors are those of the source: a name map gives those that a Megatron model expects.

Source: `megatron/core/dist_checkpointing` of megatron-core 0.16.1; `megatron/training/checkpointing.py`.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.conversion.destinations import (
    Written,
    check_folder_free,
    is_our_file,
    publish_folder,
)
from reshard.conversion.writer import Settings, Writer
from reshard.errors import ArgumentError
from reshard.formats.dcp import names
from reshard.formats.dcp.metadata import encode
from reshard.formats.dcp.writer import plan_folder
from reshard.formats.torch_file.archive import object_archive

if TYPE_CHECKING:
    from reshard.conversion.destinations import Job
    from reshard.storage.location import Location

_COMMON_FILE = "common.pt"
_FORMAT_FILE = "metadata.json"
_RELEASE = "release"
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


class MegatronWriter(Writer):
    """The weights of a Megatron-Core checkpoint."""

    name = "megatron"
    commits = (names.TRACKER_FILE,)
    default_part = "model"
    options = frozenset({"iteration"})

    def write(self, job: Job, settings: Settings) -> Written:
        """Write the folder of the iteration, and the tracker last.

        Raises:
            ArgumentError: more than the weights is to be written.
        """
        if settings.with_state or settings.dedup is False:
            raise ArgumentError(
                '`to="megatron"` writes weights, each region once: leave `part` and `dedup` out',
                hint="the state of an optimizer belongs to the arguments of a run, which a conversion does not have",
            )
        check_folder_free(job)
        iteration = settings.iteration if settings.iteration is not None else job.source.iteration
        sub = _RELEASE if iteration is None else f"iter_{iteration:07d}"
        planned = plan_folder(job, settings.layout, settings.max_bytes, {})
        files = [replace(file, name=f"{sub}/{file.name}") for file in planned.files]
        small: dict[str, bytes | str] = {
            f"{sub}/{_COMMON_FILE}": object_archive(
                {"checkpoint_version": 3.0, "iteration": iteration or 0}
            ).container()[0],
            f"{sub}/{names.METADATA_FILE}": encode(planned.tensors, {}),
            f"{sub}/{_FORMAT_FILE}": json.dumps(_FORMAT),
            names.TRACKER_FILE: _RELEASE if iteration is None else str(iteration),
        }
        path, warnings = job.target / sub, settings.layout.warnings
        return publish_folder(
            job, files, small, path=path, subfolders=[sub], is_ours=functools.partial(_is_ours, job), warnings=warnings
        )


def _is_ours(job: Job, entry: Location) -> bool:
    """Whether an entry of the destination was written by an earlier conversion."""
    if entry.kind() == "folder":
        return names.is_ours(entry)
    if entry.name == names.TRACKER_FILE:
        folders = [name for name in entry.parent.names() if name.startswith((_RELEASE, "iter_"))]
        return all(names.is_ours(entry.parent / name) for name in folders)
    return is_our_file(job, entry)
