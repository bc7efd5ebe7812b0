"""How Checkpoint 2.0 trees and folders with only `tiles.json` are recognised. `root` and `reader` open them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.commit import roots
from reshard.formats.base import Format, Match, OpenOptions
from reshard.formats.checkpoint2 import names as checkpoint2
from reshard.formats.checkpoint2 import traits
from reshard.formats.newest import open_newest
from reshard.formats.tiled import names as tiles

if TYPE_CHECKING:
    from reshard.formats.base import CheckpointData
    from reshard.formats.checkpoint2.root import IterationsRoot
    from reshard.storage.location import Location


class Checkpoint2(Format):
    """A Checkpoint 2.0 tree or an iteration folder of one."""

    traits = traits.CHECKPOINT2

    def detect(self, path: Location) -> Match:
        """A root for certain; any other folder if no other format matches."""
        if not path.is_folder():
            return Match.NO
        return Match.YES if roots.is_root(path) else Match.FALLBACK

    def root(self, path: Location, options: OpenOptions, *, exact: int | None = None) -> IterationsRoot | None:
        """The iterations of a folder that holds iteration folders or a tracker."""
        from reshard.formats.checkpoint2.root import IterationsRoot  # noqa: PLC0415  slow to import

        return IterationsRoot(path, options, exact=exact) if roots.is_root(path) else None

    def open(self, path: Location, options: OpenOptions) -> CheckpointData:
        """The best iteration of a root, or an iteration folder."""
        from reshard.formats.checkpoint2 import reader  # noqa: PLC0415  slow to import

        known = options.known
        if known is not None:
            return reader.open_folder(path, options.method, known.iteration, known)
        root = self.root(path, options)
        return reader.open_folder(path, options.method) if root is None else open_newest(root)


class Tiled(Format):
    """Shard files that only tiles.json describes."""

    traits = traits.TILED

    def detect(self, path: Location) -> Match:
        """Detects tiles.json without the files of Checkpoint 2.0."""
        if not path.is_folder() or not (path / tiles.TILES_FILE).exists():
            return Match.NO
        others = (checkpoint2.METADATA_FILE, checkpoint2.COMMON_FILE)
        return Match.NO if any((path / name).exists() for name in others) else Match.YES

    def open(self, path: Location, options: OpenOptions) -> CheckpointData:
        """Open the folder like an iteration folder without metadata.json."""
        from reshard.formats.checkpoint2 import reader  # noqa: PLC0415  slow to import

        return reader.open_folder(path, options.method)


CHECKPOINT2 = Checkpoint2()
TILED = Tiled()
