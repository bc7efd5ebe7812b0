"""How the root of a run of Megatron-Core, and a folder of one iteration, are recognised. `reader` opens them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.formats.base import Format, Match, Traits
from reshard.formats.dcp.names import DATA_SUFFIX, METADATA_FILE
from reshard.formats.megatron import names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.formats.base import CheckpointData, OpenOptions
    from reshard.storage.location import Location

__all__ = ["MEGATRON", "has_rank_folders", "iterations"]

_HEAD_BYTES = 512


class Megatron(Format):
    """A folder of one iteration of Megatron-Core, or the root of a run."""

    traits = Traits("megatron", takes_strategy=True)

    def detect(self, path: Location) -> Match:
        """By the names of files and folders, and the first bytes of `metadata.json`."""
        if not path.is_folder():
            return Match.NO
        listed = path.names()
        return Match.YES if _is_iteration(path, listed) or iterations(path, listed) else Match.NO

    def is_root(self, path: Location) -> bool:
        """Whether it holds folders of iterations, and is none itself."""
        listed = path.names()
        return not _is_iteration(path, listed) and bool(iterations(path, listed))

    def open(self, path: Location, options: OpenOptions) -> CheckpointData:
        """One iteration; of a root, the newest that can be opened."""
        from reshard.formats.megatron import reader  # noqa: PLC0415  slow to import

        return (reader.open_root if self.is_root(path) else reader.open_iteration)(path, options)


MEGATRON = Megatron()


def _is_iteration(folder: Location, listed: Sequence[str]) -> bool:
    """Whether a folder with these names holds one iteration."""
    if any(names.numbers_of_rank(name) is not None for name in listed) and has_rank_folders(folder):
        return True
    if names.CONFIG_FILE in listed and (folder / names.CONFIG_FILE).is_file():
        return b'"sharded_backend"' in (folder / names.CONFIG_FILE).read_head(_HEAD_BYTES)
    is_dcp = METADATA_FILE in listed or any(name.endswith(DATA_SUFFIX) for name in listed)
    return is_dcp and (names.COMMON_FILE in listed or _is_named(folder.name))


def _is_named(name: str) -> bool:
    """Whether a folder is named like an iteration."""
    return name == names.RELEASE or names.iteration_of(name) is not None


def iterations(root: Location, listed: Sequence[str]) -> list[str]:
    """Names of the folders of iterations, the newest first, and `release` last."""
    named = [(names.iteration_of(name), name) for name in listed if _is_named(name)]
    found = sorted(((-1 if number is None else number, name) for number, name in named), reverse=True)
    folders = [root / name for _, name in found if (root / name).is_folder()]
    return [folder.name for folder in folders if _is_iteration(folder, folder.names())]


def has_rank_folders(folder: Location) -> bool:
    """Whether a folder holds the folder of a model-parallel rank."""
    return any(names.numbers_of_rank(name) is not None and (folder / name).is_folder() for name in folder.names())
