"""Reads a Hugging Face folder: the tensors of the index, or those of the single file."""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import TYPE_CHECKING

from reshard import _core, dtypes
from reshard.errors import DamagedFileError
from reshard.formats import weight_map as maps
from reshard.formats.aliases import add_aliases
from reshard.formats.base import CheckpointData, Format, Match, Traits
from reshard.formats.huggingface import names as huggingface
from reshard.formats.outputs import load_all
from reshard.storage.location import locate
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.formats.base import OpenOptions
    from reshard.storage.location import Location

_log = logging.getLogger("reshard")

_MOST_NAMES = 3  # that a warning lists
_COMPARED_BYTES = 64 << 20  # that are in memory at once, of each of two copies


class HuggingFace(Format):
    """A Hugging Face folder."""

    traits = Traits("huggingface", is_pretrained=True)

    def detect(self, path: Location) -> Match:
        """By the index or `model.safetensors`."""
        return Match.YES if path.is_folder() and huggingface.detect(path) else Match.NO

    def open(self, path: Location, options: OpenOptions) -> CheckpointData:
        """The tensors of the index, or those of the single file."""
        return _open_huggingface(path, options.method)


HUGGINGFACE = HuggingFace()


def _open_huggingface(folder: Location, method: _core.ReadMethod) -> CheckpointData:
    index = _core.Index()
    weight_map = huggingface.read_weight_map(folder)
    listing = None if weight_map is None else folder / huggingface.INDEX_FILE
    if weight_map is None:
        file = index.add_file(str(folder / huggingface.SINGLE_FILE), method=method)
        index.add_whole_file(file)
        if (folder / huggingface.INDEX_FILE).is_file():
            _log.warning(
                "%s holds %s, which is read, as transformers does, and an index of several files, which is not",
                folder,
                huggingface.SINGLE_FILE,
            )
    else:
        # Files of a hub cache are symbolic links into its store, so links are followed.
        maps.add_tensors(index, folder, weight_map, partial(index.add_file, method=method))
        _add_unlisted(index, folder, weight_map)
    for file in range(index.n_files):
        maps.refuse_differences(locate(index.file_path(file)), index.file_metadata(file))
    maps.refuse_differences(folder, None, index.keys())
    aliases = add_aliases(index)
    return CheckpointData(
        traits=HuggingFace.traits, path=folder, index=index, method=method, aliases=aliases, listing=listing
    )


def _add_unlisted(index: _core.Index, folder: Location, weight_map: Mapping[str, str]) -> None:
    """Add the tensors of the listed files that the index does not name: transformers loads them, too.

    Raises:
        DamagedFileError: two files hold one tensor with different content.
    """
    holder: dict[str, tuple[str, int]] = {}
    listed_files = {locate(index.file_path(file)).name: file for file in range(index.n_files)}
    for key, name in weight_map.items():
        holder[key] = name, listed_files[name]
    added = []
    for name, file in listed_files.items():
        for tensor in index.file_tensors(file):
            key = tensor.name
            first = holder.setdefault(key, (name, file))
            if key not in index:
                index.add_whole(key, file)
                added.append(key)
            elif first[1] != file and not _is_equal(index, first[1], file, key):
                raise DamagedFileError(
                    f"{show(str(folder))}: {show(first[0])} and {show(name)} both hold {show(key)}, with different "
                    "content",
                    path=str(folder / name),
                    key=key,
                    hint="one of them is of another save: remove the file that is not of this model, or convert the "
                    "right file alone",
                )
    if added:
        _log.warning(
            "%s does not name %s: read from the files that hold them, as transformers does",
            folder / huggingface.INDEX_FILE,
            listed(map(show, added), _MOST_NAMES),
        )
    others = [name for name in folder.names() if name.endswith(".safetensors") and name not in listed_files]
    if others:
        _log.warning(
            "%s holds weights that %s does not list, which are not read: %s",
            folder,
            huggingface.INDEX_FILE,
            listed(map(show, others), _MOST_NAMES),
        )


def _is_equal(index: _core.Index, first: int, second: int, key: str) -> bool:
    """Whether two files of an index hold a tensor with the same dtype, shape and bytes."""
    both = []
    for file in (first, second):
        alone = _core.Index()
        alone.add_whole(key, alone.add_file(index.file_path(file)))
        both.append(alone)
    if both[0].info(key) != both[1].info(key):
        return False
    dtype, shape = both[0].info(key)
    n_rows = shape[0] if shape else 1
    step = max(1, _COMPARED_BYTES * 8 // max(1, math.prod(shape[1:]) * dtypes.bits(dtype)))
    for row in range(0, n_rows, step):
        offset = (row, *(0 for _ in shape[1:])) if shape else ()
        part = (min(step, n_rows - row), *shape[1:]) if shape else ()
        request = _core.Request()
        request.add_region(key, key, offset, part)
        found = [load_all(one.plan(request, verify=False))[key].tobytes() for one in both]
        if found[0] != found[1]:
            return False
    return True
