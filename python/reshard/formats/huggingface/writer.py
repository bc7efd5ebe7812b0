"""Writing a Hugging Face folder: whole tensors in files of a largest size, the index, and what else makes a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard import _core
from reshard.conversion.destinations import (
    File,
    Written,
    check_folder_free,
    destination_folder,
    file_sizes,
    n_bytes_of,
    produced,
    whole_request,
)
from reshard.conversion.model_files import ModelFiles, find_model_files, told_dtype
from reshard.conversion.writer import Settings, Writer
from reshard.formats.huggingface import names as huggingface
from reshard.storage.location import Location, locate

if TYPE_CHECKING:
    from reshard.conversion.destinations import Job, Produce

__all__ = ["HuggingFaceWriter"]

_DEFAULT_BYTES = 4 << 30


class HuggingFaceWriter(Writer):
    """A Hugging Face folder."""

    name = "huggingface"
    default_part = "model"
    is_whole = True
    options = frozenset({"model_files"})

    def write(self, job: Job, settings: Settings) -> Written:
        """Write the folder; the files of a model that are no weights come from `model_files` or from the source."""
        model_files = settings.model_files
        if model_files is None and job.source.data.traits.is_pretrained:
            model_files = settings.source
        return _write(job, settings.max_bytes or _DEFAULT_BYTES, model_files)


def _write(job: Job, max_shard_bytes: int, model_files: Location | None = None) -> Written:
    """Write whole tensors in files of a largest size, the index of more than one, and what else makes a model.

    Args:
        job: the conversion.
        max_shard_bytes: most bytes of a file, headers not counted.
        model_files: the folder whose files that are no weights are copied; none if it is the destination itself.
    """
    check_folder_free(job)
    beside = ModelFiles()
    if model_files is not None and model_files.resolved() != locate(job.target).resolved():
        beside = find_model_files(model_files)
        beside.check_free(job.target)
    if model_files is not None and job.options.dtype is not None:
        warning = told_dtype(model_files, job.options.dtype)
        beside.warnings += [] if warning is None else [warning]
    request = whole_request(job.source, job.keys)
    sizes = [(name, n_bytes) for name, _, _, n_bytes in job.plan(request).arrays]
    shards = huggingface.plan_shards(sizes, max_shard_bytes)
    files = [
        File(huggingface.file_name(number, len(shards)), whole_request(job.source, keys))
        for number, keys in enumerate(shards, 1)
    ]
    with produced(job, job.target, files, file_sizes(job, files)) as fill:
        if isinstance(fill, Written):
            return fill
        return _publish(job, files, shards, sizes, fill, beside=beside)


def _publish(
    job: Job,
    files: list[File],
    shards: list[list[str]],
    sizes: list[tuple[str, int]],
    fill: Produce,
    *,
    beside: ModelFiles,
) -> Written:
    options = job.options
    with destination_folder(job) as folder:
        n_bytes = n_bytes_of(fill(folder))
        beside.copy(folder, file_mode=options.file_mode, folder_mode=options.folder_mode, durable=options.durable)
        if len(files) > 1:
            file_of = {key: file.name for file, keys in zip(files, shards, strict=True) for key in keys}
            total = sum(size for _, size in sizes)
            text = huggingface.index_text(file_of, total, _core.__version__)
            locate(folder / huggingface.INDEX_FILE).replace(text, options.file_mode, durable=options.durable)
    return Written(job.target, len(files), n_bytes, warnings=beside.warnings)
