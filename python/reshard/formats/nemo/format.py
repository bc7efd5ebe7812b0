"""How checkpoints of NeMo are recognised. `reader` opens them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.formats.base import Format, Match
from reshard.formats.dcp.format import DCP
from reshard.formats.megatron.format import MEGATRON
from reshard.formats.nemo import archive, names

if TYPE_CHECKING:
    from reshard.formats.base import CheckpointData, OpenOptions
    from reshard.storage.location import Location


class Nemo(Format):
    """A checkpoint of NeMo 2, an archive of NeMo 1, or the folder of an unpacked archive."""

    traits = names.TRAITS

    def detect(self, path: Location) -> Match:
        """By the folder of the weights; by the suffix and the first bytes of an archive."""
        if not path.is_folder():
            if not path.name.endswith(names.SUFFIX):
                return Match.NO
            head = path.read_head(512, follow_links=True)
            return Match.YES if archive.is_archive(head) or head.startswith(archive.GZIP) else Match.NO
        if weights_of(path) is not None:
            return Match.YES
        is_unpacked = (path / names.CONFIG_FILE).is_file() and (path / names.WEIGHTS_FILE).is_file()
        return Match.YES if is_unpacked else Match.NO

    def open(self, path: Location, options: OpenOptions) -> CheckpointData:
        """The weights."""
        from reshard.formats.nemo import reader  # noqa: PLC0415  not needed by other formats

        if not path.is_folder():
            return reader.open_archive(path, options.method)
        weights = weights_of(path)
        return reader.open_folder(path, options) if weights is None else reader.open_weights(*weights, options)


def weights_of(path: Location) -> tuple[Location, Format] | None:
    """The folder of weights below a folder, and its format; None: there is none."""
    for name in names.WEIGHTS_FOLDERS:
        below = path / name
        if below.is_folder():
            found = next((one for one in (MEGATRON, DCP) if one.detect(below) is Match.YES), None)
            if found is not None:
                return below, found
    return None


NEMO = Nemo()
