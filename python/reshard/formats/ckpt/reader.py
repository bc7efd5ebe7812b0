"""Reads a `.ckpt` file: its records are whole tensors."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from reshard import _core
from reshard.formats.base import CheckpointData, Format, Match
from reshard.formats.rank_file import add_rank_file, kind_of
from reshard.values.counters import AS_TENSORS
from reshard.values.traits import Traits
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from reshard.formats.base import OpenOptions
    from reshard.storage.location import Location

_log = logging.getLogger("reshard")


class Ckpt(Format):
    """A `.ckpt` file of MindSpore."""

    traits = Traits("ckpt", counters_as_tensors=True, counters=AS_TENSORS)

    def detect(self, path: Location) -> Match:
        """By the content of the file."""
        return Match.YES if not path.is_folder() and kind_of(path, follow_links=True) == "ckpt" else Match.NO

    def open(self, path: Location, options: OpenOptions) -> CheckpointData:
        """The tensors of the file. Text values are listed in `strings`."""
        return _open_ckpt(path, options.method)


CKPT = Ckpt()


def _open_ckpt(path: Location, method: _core.ReadMethod) -> CheckpointData:
    index = _core.Index()
    opened = add_rank_file(index, path, follow_links=True, method=method)
    for key in opened.tensors:
        index.add_whole(key, opened.file)
    if opened.strings:
        names = listed(map(show, opened.strings))
        _log.warning("%s: %d values are text, not tensors, and are left out: %s", path, len(opened.strings), names)
    return CheckpointData(
        traits=Ckpt.traits,
        path=path,
        index=index,
        method=method,
        strings=opened.strings,
    )
