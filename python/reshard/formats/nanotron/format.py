"""How a checkpoint of nanotron is recognised. `reader` opens it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.formats.base import Format, Match
from reshard.formats.nanotron import names

if TYPE_CHECKING:
    from reshard.formats.base import CheckpointData, OpenOptions
    from reshard.storage.location import Location


class Nanotron(Format):
    """The folder of a step of nanotron."""

    traits = names.TRAITS

    def detect(self, path: Location) -> Match:
        """By its metadata and the folder of its weights."""
        is_one = (path / names.METADATA_FILE).is_file() and (path / names.MODEL_FOLDER).is_folder()
        return Match.YES if is_one else Match.NO

    def open(self, path: Location, options: OpenOptions) -> CheckpointData:
        """The whole tensors of the shards of all ranks."""
        from reshard.formats.nanotron import reader  # noqa: PLC0415  not needed by other formats

        return reader.open_folder(path, options.method)


NANOTRON = Nanotron()
