"""How the root of a run of Megatron-Core, and a folder of one iteration, are recognised. `reader` opens them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.formats.base import Format, Match
from reshard.formats.megatron import names

if TYPE_CHECKING:
    from reshard.formats.base import CheckpointData, OpenOptions
    from reshard.storage.location import Location


class Megatron(Format):
    """A folder of one iteration of Megatron-Core, or the root of a run."""

    traits = names.TRAITS

    def detect(self, path: Location) -> Match:
        """By the names of files and folders, and the first bytes of `metadata.json`."""
        if not path.is_folder():
            return Match.NO
        listed = path.names()
        return Match.YES if names.is_iteration(path, listed) or names.iterations(path, listed) else Match.NO

    def is_root(self, path: Location) -> bool:
        """Whether it holds folders of iterations, and is none itself."""
        listed = path.names()
        return not names.is_iteration(path, listed) and bool(names.iterations(path, listed))

    def open(self, path: Location, options: OpenOptions) -> CheckpointData:
        """One iteration; of a root, the newest that can be opened."""
        from reshard.formats.megatron import reader  # noqa: PLC0415  slow to import

        return (reader.open_root if self.is_root(path) else reader.open_iteration)(path, options)


MEGATRON = Megatron()
