"""How folders of weight files under other names, and folders of components, are recognised. `reader` opens them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.formats.base import Format, Match
from reshard.formats.huggingface.reader import HUGGINGFACE
from reshard.formats.torch_file.format import TORCH_FILE
from reshard.formats.weight_files import names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard import _core
    from reshard.formats.base import CheckpointData, OpenOptions
    from reshard.storage.location import Location


class WeightFiles(Format):
    """A folder of weight files, the index of some of them, or a folder of components."""

    traits = names.TRAITS

    def detect(self, path: Location) -> Match:
        """By the names of its files, or the name of an index. Models under the usual names are of other formats."""
        if not path.is_folder():
            return Match.YES if names.parse_index(path.name) is not None else Match.NO
        if any(one.detect(path) is Match.YES for one in (HUGGINGFACE, TORCH_FILE)):
            return Match.NO
        if (path / names.PIPELINE_FILE).is_file():
            return Match.YES
        return Match.YES if names.sets_in(path) else Match.NO

    def open(self, path: Location, options: OpenOptions) -> CheckpointData:
        """The tensors of the set of files without a variant, or of all components."""
        from reshard.formats.weight_files import reader  # noqa: PLC0415  slow to import

        if not path.is_folder():
            return reader.open_index(path, options.method)
        if (path / names.PIPELINE_FILE).is_file():
            return reader.open_pipeline(path, options)
        return reader.open_folder(path, options.method)

    def open_files(self, files: Sequence[Location], path: Location, method: _core.ReadMethod) -> CheckpointData:
        """The tensors of several files as one checkpoint. See `reader.open_files`."""
        from reshard.formats.weight_files import reader  # noqa: PLC0415  slow to import

        return reader.open_files(files, path, method)


WEIGHT_FILES = WeightFiles()
