"""Reads a Hugging Face folder: the tensors of the index, or those of the single file."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from reshard import _core
from reshard.formats import weight_map as maps
from reshard.formats.aliases import add_aliases
from reshard.formats.base import CheckpointData, Format, Match
from reshard.formats.huggingface import names as huggingface
from reshard.storage.location import locate
from reshard.values.traits import Traits

if TYPE_CHECKING:
    from reshard.formats.base import OpenOptions
    from reshard.storage.location import Location

_log = logging.getLogger("reshard")


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
    maps.check_config(folder, huggingface.SINGLE_FILE if weight_map is None else huggingface.INDEX_FILE)
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
        maps.add_unlisted(index, folder, huggingface.INDEX_FILE, add=_core.Index.add_file)
    for file in range(index.n_files):
        maps.refuse_differences(locate(index.file_path(file)), index.file_metadata(file))
    maps.refuse_differences(folder, None, index.keys())
    aliases = add_aliases(index)
    return CheckpointData(
        traits=HuggingFace.traits, path=folder, index=index, method=method, aliases=aliases, listing=listing
    )
