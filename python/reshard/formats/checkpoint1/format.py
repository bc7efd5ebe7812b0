"""How rank folders, and the folder of one rank, are recognised. `reader` opens them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from reshard.commit.filesystem import MANIFEST_FILE
from reshard.errors import CheckpointNotFoundError, DamagedFileError
from reshard.formats.base import Match, OpenOptions
from reshard.formats.checkpoint1 import names as checkpoint1
from reshard.formats.checkpoint2 import names as checkpoint2
from reshard.formats.full_weights import names as full_weights
from reshard.formats.rank_saves import RankFormat, SavesRoot
from reshard.formats.tiled import names as tiles

if TYPE_CHECKING:
    from reshard.formats.base import CheckpointData
    from reshard.formats.checkpoint1.rank_saves import Checkpoint1Saves
    from reshard.formats.checkpoint1.reader import RankFoldersRoot
    from reshard.storage.location import Location


class Checkpoint1(RankFormat):
    """A Checkpoint 1.0 tree, any other folder of rank folders, or the folder of one rank."""

    traits = checkpoint1.TRAITS

    def detect(self, path: Location) -> Match:
        """By the names of the folders, except a folder `rank_<r>` that holds another format."""
        if not path.is_folder():
            return Match.NO
        is_one_rank = checkpoint1.rank_of_folder(path) is not None and not _is_described(path)
        return Match.YES if is_one_rank or checkpoint1.is_root(path) else Match.NO

    def root(self, path: Location, options: OpenOptions, *, exact: int | None = None) -> RankFoldersRoot | None:
        """The saves in a folder that contains rank folders."""
        from reshard.formats.checkpoint1.reader import RankFoldersRoot  # noqa: PLC0415  slow to import

        return RankFoldersRoot(path, options) if exact is None and checkpoint1.is_root(path) else None

    def saves_at(self, path: Location, iteration: int | None = None) -> SavesRoot | None:
        """By the names of the folders, or of the file and its folder."""
        if path.is_folder():
            # An interrupted merge can have written this file before the first part.
            is_merge = iteration is None and (path / full_weights.HYPER_FILE).is_file()
            is_tree = checkpoint1.is_root(path) and not is_merge
            return SavesRoot(self.traits.name, str(path), iteration=iteration) if is_tree else None
        parsed = checkpoint1.parse_file_name(path.name)
        if parsed is None or path.parent.name != checkpoint1.rank_folder_name(parsed.rank):
            return None
        return SavesRoot(self.traits.name, str(path.parent.parent), path.name)

    def rank_saves(self, root: SavesRoot) -> Checkpoint1Saves:
        """The saves of a tree."""
        from reshard.formats.checkpoint1.rank_saves import Checkpoint1Saves  # noqa: PLC0415  slow to import

        return Checkpoint1Saves(root)

    def note_renamed(self, source: Location, target: Location, *, durable: bool) -> None:
        """Copy the `meta.json` that names the file. A resume works without one that is missing or damaged."""
        with contextlib.suppress(CheckpointNotFoundError, DamagedFileError):
            meta = checkpoint1.read_meta(source.parent)
            if meta.last_ckpt_file == source.name:
                checkpoint1.write_meta(target.parent, meta._replace(last_ckpt_file=target.name), durable=durable)

    def open(self, path: Location, options: OpenOptions) -> CheckpointData:
        """Open the best save that every rank has, or the best file of one rank."""
        from reshard.formats.checkpoint1 import reader  # noqa: PLC0415  slow to import

        return (reader.open_root if checkpoint1.is_root(path) else reader.open_rank_folder)(path, options)


CHECKPOINT1 = Checkpoint1()


def _is_described(folder: Location) -> bool:
    """Whether a folder named like a rank folder holds another format, such as an iteration or a conversion."""
    names = (checkpoint2.METADATA_FILE, tiles.TILES_FILE, MANIFEST_FILE)
    return any((folder / name).exists() for name in names)
