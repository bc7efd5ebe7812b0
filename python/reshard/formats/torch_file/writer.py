"""Writes files of `torch.save`: one file with all tensors, or a folder of `.bin` files with an index."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from reshard.conversion.writer import Settings, Writer
from reshard.errors import ArgumentError
from reshard.formats import weight_map
from reshard.formats.huggingface.writer import Style, write_folder
from reshard.formats.tiled.writer import write_one_file
from reshard.formats.torch_file import archive, names
from reshard.formats.torch_file.archive import state_dict
from reshard.formats.torch_file.encode import torch_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard import _core
    from reshard.conversion.destinations import Job, Written
    from reshard.conversion.known_files import Mark
    from reshard.storage.location import Location


class TorchWriter(Writer):
    """A file of `torch.save`, or a folder of `.bin` files."""

    name = "torch"
    commits = (names.SINGLE_FILE, names.INDEX_FILE)
    marks: ClassVar[Mapping[str, Mark]] = {
        **dict.fromkeys(names.SUFFIXES, archive.is_ours),
        names.INDEX_FILE: weight_map.is_ours,
    }
    keeps_others = True
    default_part = "model"
    is_whole = True
    options = frozenset({"model_files"})

    def is_one_file(self, target: Location) -> bool:
        """By the suffix of the destination."""
        return target.suffix in names.SUFFIXES

    def write(self, job: Job, settings: Settings) -> Written:
        """Write the file, or the folder as a Hugging Face folder is written."""
        if not self.is_one_file(job.target):
            return write_folder(job, settings, Style(names.file_name, names.INDEX_FILE, _container))
        for name, value in (("model_files", settings.model_files), ("max_shard_size", settings.max_bytes)):
            if value is not None:
                raise ArgumentError(f"{job.target} is one file: `{name}` has no meaning", path=str(job.target))
        return write_one_file(job, _container(job.target.name, job.arrays(job.whole_request(job.keys))))


def _container(file_name: str, arrays: Sequence[_core.PlannedArray]) -> _core.Container:
    for key, dtype, _, _ in arrays:
        torch_dtype(key, dtype)
    return state_dict(file_name.rpartition(".")[0], arrays)
