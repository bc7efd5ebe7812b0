"""Reads a Hugging Face folder: the tensors of the index, or those of the single file."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from reshard import _core
from reshard.formats import weight_map as maps
from reshard.formats.aliases import add_aliases
from reshard.formats.base import CheckpointData, Format, Match, Traits
from reshard.formats.huggingface import names as huggingface

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
    if weight_map is None:
        file = index.add_file(str(folder / huggingface.SINGLE_FILE), method=method)
        index.add_whole_file(file)
    else:
        # Files of a hub cache are symbolic links into its store, so links are followed.
        if huggingface.SINGLE_FILE not in weight_map.values() and (folder / huggingface.SINGLE_FILE).is_file():
            _log.warning(
                "%s holds an index of several files, which is read, and %s, which is not: transformers reads that one",
                folder,
                huggingface.SINGLE_FILE,
            )
        maps.add_tensors(index, folder, weight_map, partial(index.add_file, method=method))
    aliases = add_aliases(index)
    return CheckpointData(traits=HuggingFace.traits, path=folder, index=index, method=method, aliases=aliases)
