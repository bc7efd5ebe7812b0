"""Recognises GGUF files and folders of them, and opens them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.formats.base import Format, Match
from reshard.formats.gguf import names

if TYPE_CHECKING:
    from reshard.formats.base import CheckpointData, OpenOptions
    from reshard.storage.location import Location


class GgufFormat(Format):
    """A GGUF file, the parts of a divided model, or a folder with one model."""

    traits = names.TRAITS

    def detect(self, path: Location) -> Match:
        """By the first bytes of a file, and by the names in a folder."""
        if path.is_folder():
            return Match.YES if any(name.endswith(names.SUFFIX) for name in path.names()) else Match.NO
        is_gguf = path.read_head(len(names.MAGIC), follow_links=True) == names.MAGIC
        return Match.YES if is_gguf else Match.NO

    def open(self, path: Location, options: OpenOptions) -> CheckpointData:
        """The tensors of a model. Those of blocks are quantised weights."""
        from reshard.formats.gguf.reader import open_gguf  # noqa: PLC0415  not needed by other formats

        return open_gguf(path, options.method)


GGUF = GgufFormat()
