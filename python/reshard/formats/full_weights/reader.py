"""Full weights in the MindSpore layout, opened: the tensors that the map names, and the counters beside them.

What a merge of the original has left out it writes into the file of the counters, as the first rank's part of it: such
a part is no tensor, and is not taken for one.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from reshard import _core
from reshard.errors import DamagedFileError
from reshard.formats import scalars
from reshard.formats.base import CheckpointData, Format, Match, Traits
from reshard.formats.full_weights import names as full_weights
from reshard.outputs import load_all
from reshard.words import listed, show

if TYPE_CHECKING:
    from reshard.formats.base import OpenOptions
    from reshard.storage.location import Location

__all__ = ["FULL_WEIGHTS", "open_full_weights"]

_log = logging.getLogger("reshard")

TRAITS = Traits("mindspore", counters_as_tensors=True)


class FullWeights(Format):
    """Full weights in the MindSpore layout."""

    traits = TRAITS

    def detect(self, path: Location) -> Match:
        """By the name map, or the first part."""
        return Match.YES if path.is_folder() and full_weights.detect(path) else Match.NO

    def open(self, path: Location, options: OpenOptions) -> CheckpointData:
        """The tensors that the map names, and the counters beside them."""
        return open_full_weights(path, options.method)


FULL_WEIGHTS = FullWeights()


def open_full_weights(folder: Location, method: _core.ReadMethod) -> CheckpointData:
    """Open a folder that `full_weights.detect` knows.

    Raises:
        CheckpointNotFoundError: a file is missing, or there are several parts without a map.
        DamagedFileError: a file is not what its format or the map says.

    Example:
        >>> open_full_weights(locate("unified_safe"), "auto").common.global_step  # doctest: +SKIP
        40
    """
    index = _core.Index()
    weight_map = full_weights.read_weight_map(folder)
    # Files of a download cache are symbolic links into its store: here links are followed.
    if weight_map is None:
        file = index.add_file(str(folder / full_weights.file_name(0)), method=method)
        index.add_whole_file(file)
    else:
        files = {name: index.add_file(str(folder / name), method=method) for name in dict.fromkeys(weight_map.values())}
        for key, name in weight_map.items():
            index.add_whole(key, files[name])
    path = folder / full_weights.HYPER_FILE
    names = _add_counters(index, path, method) if path.is_file() else []
    data = CheckpointData(traits=TRAITS, path=folder, index=index, method=method, follow_links=True)
    if not names:
        return data
    request = _core.Request()
    for name in names:
        if name in scalars.NAMES:
            shape = index.shape(name)
            request.add_region(name, name, (0,) * len(shape), shape)
    common = scalars.common_of(load_all(index.plan(request)), str(path))
    return replace(data, common=common, iteration=common.step_num)


def _add_counters(index: _core.Index, path: Location, method: _core.ReadMethod) -> list[str]:
    """Add what the file holds of one element; their names."""
    file = index.add_file(str(path), method=method)
    names, strays = [], []
    for name, _, shape, *_ in index.file_tensors(file):
        if name in index:
            raise DamagedFileError(f"{show(str(path))} and a part both hold {show(name)}", path=str(path), key=name)
        if math.prod(shape) == 1:
            index.add_whole(name, file)
            names.append(name)
        else:
            strays.append(name)
    if strays:
        _log.warning(
            "%s holds %s: a merge that left them out has put the first rank's part of them there; passed over",
            path,
            listed(map(show, strays), 1),
        )
    return names
