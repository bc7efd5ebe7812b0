"""Writes a Hugging Face folder: whole tensors in files of limited size, the index, and the other files of a model."""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from reshard import _core
from reshard.commit import writer_mark
from reshard.conversion.destinations import File, check_folder_free, publish_folder
from reshard.conversion.library_model import check_shapes, model_of, published_shapes
from reshard.conversion.model_files import ModelFiles, dtype_warning, find_model_files
from reshard.conversion.writer import Settings, Writer
from reshard.errors import UnsupportedError
from reshard.formats import weight_map
from reshard.formats.huggingface import names as huggingface
from reshard.formats.weight_files import names as weight_files
from reshard.storage.location import locate
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reshard.commit.attempts import ValueRecord
    from reshard.conversion.destinations import Job, Written
    from reshard.conversion.known_files import Mark
    from reshard.storage.location import Location

_DEFAULT_BYTES = 4 << 30
_BASES = (huggingface.BASE, *weight_files.KEPT)


class HuggingFaceWriter(Writer):
    """A Hugging Face folder."""

    name = "huggingface"
    has_headers = True
    commits = (
        *(huggingface.file_name(1, 1, base) for base in _BASES),
        *(huggingface.index_file(base) for base in _BASES),
    )
    marks: ClassVar[Mapping[str, Mark]] = {
        ".safetensors": writer_mark.is_ours,
        **{huggingface.index_file(base): weight_map.is_ours for base in _BASES},
    }
    default_part = "model"
    is_whole = True
    options = frozenset({"model_files"})

    def write(self, job: Job, settings: Settings) -> Written:
        """Write the folder. Files of a model that are not weights are copied from `model_files` or from the source."""
        base = job.source.data.base_name
        style = Style(huggingface.file_name, huggingface.INDEX_FILE)
        if base is not None:  # the library of the weights expects these names
            style = Style(functools.partial(huggingface.file_name, base=base), huggingface.index_file(base))
        return write_folder(job, settings, style)


@dataclass(frozen=True)
class Style:
    """How files of weights are named and what they hold.

    Attributes:
        file_name: the name of a file, by its number from 1 and the count.
        index_file: the name of the index of several files.
        container: the other bytes of a file, by its name and its arrays; None: safetensors files.
    """

    file_name: Callable[[int, int], str]
    index_file: str
    container: Callable[[str, Sequence[_core.PlannedArray]], _core.Container] | None = None


def write_folder(job: Job, settings: Settings, style: Style) -> Written:
    """Write whole tensors in files of limited size, an index for several files, and the other files of a model.

    Args:
        job: the conversion.
        settings: the largest size of a file, and the folder whose files that are not weights are copied.
        style: how files are named and what they hold.

    Raises:
        DestinationExistsError: the destination holds files that must not be replaced.
    """
    model_files = settings.model_files
    if model_files is None and job.source.data.traits.is_pretrained and settings.source.is_folder():
        model_files = settings.source
    check_folder_free(job)
    copies = ModelFiles()
    if model_files is not None and model_files.resolved() != locate(job.target).resolved():
        copies = find_model_files(model_files, job.known_files.commits)
        if job.options.is_dequantised or job.options.quantised_as is not None:
            copies.set_quantisation(job.options.quantised_as)
        copies.check_free(job.target)
    if model_files is not None and settings.check_names and job.options.quantised_as is None:
        copies.warnings += _check_names(job, model_files)
    request = job.whole_request(job.keys)
    sizes = job.sizes(request)
    if model_files is not None:
        written: Counter[str] = Counter()
        for _, dtype, shape, _ in job.arrays(request):
            written[dtype] += math.prod(shape)
        warning = dtype_warning(model_files, written, is_cast=job.options.dtype is not None)
        copies.warnings += [] if warning is None else [warning]
    shards, max_bytes = [job.keys], settings.max_bytes or _DEFAULT_BYTES
    if sum(sizes) > max_bytes:
        shards = huggingface.plan_shards(zip(job.keys, sizes, strict=True), max_bytes)
    files = []
    by_name = {array[0]: array for array in job.arrays(request)} if style.container else {}
    for number, keys in enumerate(shards, 1):
        name = style.file_name(number, len(shards))
        container = style.container and style.container(name, [by_name[key] for key in keys])
        files.append(File(name, request if keys == job.keys else job.whole_request(keys), container))
    small = {}
    if len(files) > 1:
        file_of = {key: file.name for file, keys in zip(files, shards, strict=True) for key in keys}
        small[style.index_file] = huggingface.index_text(file_of, sum(sizes), _core.__version__)
    named = None if model_files is None else weight_map.weights_of_config(model_files)
    if model_files is not None and named not in (None, style.index_file if small else files[0].name):
        raise UnsupportedError(
            f"{show(str(model_files))}: config.json names {show(named)} as `transformers_weights`, and no file of this "
            "name is written: transformers could not load the folder",
            path=str(model_files / "config.json"),
            hint="give a folder whose config.json has no `transformers_weights` as `files=Files(model_files=...)`",
        )
    return publish_folder(job, files, small, warnings=copies.warnings, finish=functools.partial(_copy, copies, job))


def _check_names(job: Job, model_files: Location) -> list[str]:
    """Compare the tensors with those of the model of a config.json, if the library that has its class is installed.

    Returns:
        Warnings.

    Raises:
        MismatchError: they differ.
        UnsupportedError: the library cannot make the model.
    """
    model = model_of(str(model_files))
    expected = None if model is None else published_shapes(model)
    if expected is None:
        return []
    index = job.source.data.index
    found = {key: tuple(index.shape(key)) for key in job.keys}
    path, folder = str(job.source.path), str(model_files)
    return check_shapes(found, expected, model, path=path, folder=folder, left_out=job.left_out)


def _copy(copies: ModelFiles, job: Job, folder: Location) -> dict[str, ValueRecord]:
    options = job.options
    copies.copy(folder, file_mode=options.file_mode, folder_mode=options.folder_mode, durable=options.durable)
    return {}
