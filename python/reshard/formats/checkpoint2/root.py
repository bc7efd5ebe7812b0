"""Opening a checkpoint root: selection of the iteration that is opened.

`candidates` decides the order in which they are tried. This module gathers the facts for it and opens the first
iteration that is complete. If the root changes meanwhile, it is listed again, since a save that ends may remove
iterations.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from reshard.errors import ReshardError
from reshard.formats import manifest as manifests
from reshard.formats.base import Format, Match
from reshard.formats.checkpoint2 import candidates
from reshard.formats.checkpoint2 import names as checkpoint2
from reshard.formats.checkpoint2 import reader as folder
from reshard.formats.checkpoint2.reader import marks, open_folder
from reshard.formats.newest import nothing_complete, open_newest
from reshard.formats.tiled import names as tiles
from reshard.storage.location import Location, locate

if TYPE_CHECKING:
    import os

    from reshard import _core
    from reshard.formats.base import CheckpointData, OpenOptions

_log = logging.getLogger("reshard")

MAX_LOOKS = 5  # at a root that changes while it is listed


def order_of(root: str | os.PathLike[str], *, exact: int | None = None) -> candidates.Order:
    """The order in which the iterations of a root are tried, and those that are never tried. Opens no shard file.

    Args:
        root: the root of a Checkpoint 2.0 tree.
        exact: only this iteration.

    Raises:
        CheckpointNotFoundError: there is no such folder.
        StorageError: it cannot be listed.

    Example:
        >>> [one.name for one in order_of("output/checkpoint").candidates]
        ['iteration_00000400']
    """
    tracker, fault = checkpoint2.read_tracker(root)
    return candidates.order(_folders(locate(root)), tracker, fault, exact=exact)


def newer_than(root: str | os.PathLike[str], iteration: int) -> tuple[int, ...]:
    """Iterations above the selected one, ascending, which are skipped; without those that a save has already recorded.

    Raises:
        CheckpointNotFoundError: there is no such folder.
        StorageError: it cannot be listed.

    Example:
        >>> newer_than("output/checkpoint", 300)
        (400,)
    """
    folders = _folders(locate(root))
    recorded = candidates.left_behind(folders, checkpoint2.read_tracker(root)[0])
    return tuple(one.iteration for one in folders if one.iteration > iteration and one.iteration not in recorded)


def _folders(root: Location) -> tuple[candidates.Folder, ...]:
    return tuple(_folder_facts(root, iteration, name) for iteration, name in checkpoint2.list_iterations(root))


def _folder_facts(root: Location, iteration: int, name: str) -> candidates.Folder:
    is_tracked, _ = marks(root / name)
    try:
        manifest = manifests.read(root / name)
    except ReshardError:
        return candidates.Folder(iteration, name, is_tracked)
    return candidates.Folder(
        iteration, name, is_tracked, manifest.generation, manifest.previous_tracker, tuple(manifest.passed_over)
    )


def best_of(root: Location, method: _core.ReadMethod = "auto") -> CheckpointData:
    """Open the first candidate of a root that is complete.

    Args:
        root: the root of a Checkpoint 2.0 tree.
        method: as in `reshard.open`.

    Raises:
        DamagedFileError: no candidate is complete; the message names each candidate and its fault.
        UnsupportedError: a later release wrote the candidate.
        StorageError: the root cannot be listed, or this process lacks permission, memory or file handles.

    Example:
        >>> best_of(locate("output/checkpoint")).iteration
        400
    """
    before: candidates.Order | None = None
    for _ in range(MAX_LOOKS):
        order = order_of(root)
        if order == before:
            break
        before = order
        faults: dict[str, str] = {}
        folders = {one.name: partial(open_folder, root / one.name, method, one.iteration) for one in order.candidates}
        if (opened := open_newest(root, folders, faults, order.warnings)) is not None:
            return opened
        # A save may have ended meanwhile and retention may have removed iterations: list again until nothing changes.
    lines = [*order.warnings, *(f"{name}: {reason}" for name, reason in faults.items())]
    raise nothing_complete(root, [*lines, *(f"{one.name}: {one.reason}" for one in order.refused)])


# -- the formats of iteration folders


class Checkpoint2(Format):
    """A Checkpoint 2.0 tree or an iteration folder of one."""

    traits = folder.CHECKPOINT2

    def detect(self, path: Location) -> Match:
        """A root for certain; any other folder if no other format matches."""
        if not path.is_folder():
            return Match.NO
        return Match.YES if checkpoint2.is_root(path) else Match.FALLBACK

    def is_root(self, path: Location) -> bool:
        """Whether it holds iteration folders or a tracker."""
        return checkpoint2.is_root(path)

    def open(self, path: Location, options: OpenOptions) -> CheckpointData:
        """The best iteration of a root, or an iteration folder."""
        return best_of(path, options.method) if self.is_root(path) else open_folder(path, options.method)


class Tiled(Format):
    """Shard files that only tiles.json describes."""

    traits = folder.TILED

    def detect(self, path: Location) -> Match:
        """Detects tiles.json without the files of Checkpoint 2.0."""
        if not path.is_folder() or not (path / tiles.TILES_FILE).exists():
            return Match.NO
        others = (checkpoint2.METADATA_FILE, checkpoint2.COMMON_FILE)
        return Match.NO if any((path / name).exists() for name in others) else Match.YES

    def open(self, path: Location, options: OpenOptions) -> CheckpointData:
        """Open the folder like an iteration folder without metadata.json."""
        return open_folder(path, options.method)


CHECKPOINT2 = Checkpoint2()
TILED = Tiled()
