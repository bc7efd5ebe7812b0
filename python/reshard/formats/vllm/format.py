"""How a folder of the loader `sharded_state` of vLLM is recognised. `reader` opens it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.formats.base import Format, Match
from reshard.formats.vllm import names

if TYPE_CHECKING:
    from reshard.formats.base import CheckpointData, OpenOptions
    from reshard.storage.location import Location


class Vllm(Format):
    """A folder of the states of tensor-parallel ranks."""

    traits = names.TRAITS

    def detect(self, path: Location) -> Match:
        """By the name of a file."""
        return Match.YES if path.is_folder() and names.rank_files(path.names()) else Match.NO

    def open(self, path: Location, options: OpenOptions) -> CheckpointData:
        """Whole tensors of one rank; of several, the arrays of each rank, or with a layout whole tensors."""
        from reshard.formats.vllm import reader  # noqa: PLC0415  not needed by other formats

        return reader.open_folder(path, options)


VLLM = Vllm()
