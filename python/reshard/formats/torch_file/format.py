"""How files of `torch.save`, and folders of them, are recognised. `reader` opens them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.formats import torch_head
from reshard.formats.base import Format, Match
from reshard.formats.torch_file import names

if TYPE_CHECKING:
    from reshard.formats.base import CheckpointData, OpenOptions
    from reshard.storage.location import Location


class TorchFile(Format):
    """A file of `torch.save`, or a folder of `.bin` files."""

    traits = names.TRAITS

    def detect(self, path: Location) -> Match:
        """By the first bytes of a file; by the index or the one file of a folder."""
        if path.is_folder():
            return (
                Match.YES
                if any((path / name).is_file() for name in (names.INDEX_FILE, names.SINGLE_FILE))
                else Match.NO
            )
        return Match.YES if torch_head.is_head(path.read_head(torch_head.HEAD_BYTES, follow_links=True)) else Match.NO

    def open(self, path: Location, options: OpenOptions) -> CheckpointData:
        """The tensors of a file, or those of the one file of a folder, or of the files that its index lists."""
        from reshard.formats.torch_file import reader  # noqa: PLC0415  slow to import

        if not path.is_folder():
            return reader.open_file(path, path, options.method)
        if (path / names.SINGLE_FILE).is_file():  # transformers asks in this order
            return reader.open_single(path, options.method)
        return reader.open_index(path, options.method)

    def may_be_foreign(self, file: Location) -> bool:
        """A zip archive of another tool looks like one of torch."""
        return not file.name.endswith(names.SUFFIXES)


TORCH_FILE = TorchFile()
