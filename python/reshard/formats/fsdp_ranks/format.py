"""How the files of FSDP ranks are recognised. `reader` opens them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.formats.base import Format, Match
from reshard.formats.fsdp_ranks import names

if TYPE_CHECKING:
    from reshard.formats.base import CheckpointData, OpenOptions
    from reshard.storage.location import Location


class FsdpRanks(Format):
    """A folder of the files of FSDP ranks."""

    traits = names.TRAITS

    def detect(self, path: Location) -> Match:
        """By the name of a file with shards of the model."""
        if not path.is_folder():
            return Match.NO
        return Match.YES if any(kind == names.MODEL for kind, _ in names.rank_files(path.names())) else Match.NO

    def open(self, path: Location, options: OpenOptions) -> CheckpointData:
        """The whole tensors of the shards of all ranks."""
        from reshard.formats.fsdp_ranks import reader  # noqa: PLC0415  slow to import

        return reader.open_folder(path, options.method)


FSDP_RANKS = FsdpRanks()
