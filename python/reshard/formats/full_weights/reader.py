"""Reads full weights in the MindSpore layout: the tensors of the map, and the counters beside them.

A merge by MindSpore writes the first rank's shards of the tensors that it leaves out into the file of the counters.
Such shards are not read.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from reshard import _core
from reshard.errors import DamagedFileError
from reshard.formats import counter_tensors
from reshard.formats import weight_map as maps
from reshard.formats.base import CheckpointData, Format, Match
from reshard.formats.full_weights import names as full_weights
from reshard.formats.outputs import load_all
from reshard.values.counters import AS_TENSORS
from reshard.values.traits import Traits
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from reshard.formats.base import OpenOptions
    from reshard.storage.location import Location

_log = logging.getLogger("reshard")

TRAITS = Traits("mindspore", counters_as_tensors=True, counters=AS_TENSORS)


class FullWeights(Format):
    """Full weights in the MindSpore layout."""

    traits = TRAITS

    def detect(self, path: Location) -> Match:
        """By the name map, or the first part."""
        return Match.YES if path.is_folder() and full_weights.detect(path) else Match.NO

    def open(self, path: Location, options: OpenOptions) -> CheckpointData:
        """The tensors of the map, and the counters beside them."""
        return open_full_weights(path, options.method)


FULL_WEIGHTS = FullWeights()


def open_full_weights(folder: Location, method: _core.ReadMethod) -> CheckpointData:
    """Open a folder for which `full_weights.detect` is true.

    Raises:
        CheckpointNotFoundError: a file is missing, or there are several parts without a map.
        DamagedFileError: a file violates its format, or does not match the map.

    Example:
        >>> import numpy as np, reshard
        >>> from reshard.storage.location import locate
        >>> reshard.save_file({"w": np.zeros(4)}, "w.safetensors")
        >>> _ = reshard.convert("w.safetensors", "full", to="mindspore")
        >>> open_full_weights(locate("full"), "auto").index.keys()
        ['w']
    """
    index = _core.Index()
    weight_map = full_weights.read_weight_map(folder)
    # Files of a download cache are symbolic links into its store, so links are followed.
    if weight_map is None:
        file = index.add_file(str(folder / full_weights.file_name(0)), method=method)
        index.add_whole_file(file)
    else:
        maps.add_tensors(index, folder, weight_map, partial(index.add_file, method=method))
    path = folder / full_weights.HYPER_FILE
    names = _add_counters(index, path, method) if path.is_file() else []
    data = CheckpointData(traits=TRAITS, path=folder, index=index, method=method)
    if not names:
        return data
    request = index.whole_request([name for name in names if name in counter_tensors.NAMES])
    common = counter_tensors.common_of(load_all(index.plan(request)), str(path))
    return replace(data, common=common, iteration=common.step_num)


def _add_counters(index: _core.Index, path: Location, method: _core.ReadMethod) -> list[str]:
    """Add the tensors of one element in the file of the counters; returns their names."""
    file = index.add_file(str(path), method=method)
    names, shards = [], []
    for tensor in index.file_tensors(file):
        name = tensor.name
        if name in index:
            raise DamagedFileError(f"{show(str(path))} and a part both hold {show(name)}", path=str(path), key=name)
        if math.prod(tensor.shape) == 1:
            index.add_whole(name, file)
            names.append(name)
        else:
            shards.append(name)
    if shards:
        _log.warning(
            "%s holds %s: the first rank's shard of tensors that a merge left out; it is skipped",
            path,
            listed(map(show, shards), 1),
        )
    return names
