"""How folders of torchtune are recognised. `reader` opens them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.formats.base import Format, Match
from reshard.formats.torchtune import names

if TYPE_CHECKING:
    from reshard.formats.base import CheckpointData, OpenOptions
    from reshard.storage.location import Location


class Torchtune(Format):
    """The folder of a run of torchtune. The folder of an epoch alone is of the format of its weights."""

    traits = names.TRAITS

    def detect(self, path: Location) -> Match:
        """By the folders of epochs beside that of the state, or by the names of older files."""
        if not path.is_folder():
            return Match.NO
        there = path.names()
        is_run = names.STATE_FOLDER in there and bool(names.epochs(there))
        return Match.YES if is_run or names.old_files(there) else Match.NO

    def open(self, path: Location, options: OpenOptions) -> CheckpointData:
        """The weights of the newest epoch."""
        from reshard.formats.torchtune import reader  # noqa: PLC0415  slow to import

        return reader.open_folder(path, options)


TORCHTUNE = Torchtune()
