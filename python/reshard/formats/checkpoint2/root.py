"""Opening a checkpoint root: selection of the iteration that is opened.

`candidates` decides the order in which they are tried. This module gathers the facts for it and opens the first
iteration that is complete. If the root changes meanwhile, it is listed again, since a save that ends may remove
iterations.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Self

from reshard.commit import candidates, roots
from reshard.commit import manifest as manifests
from reshard.commit.newest import nothing_complete, open_newest
from reshard.errors import ReshardError
from reshard.formats.checkpoint2.reader import LockedManifest, marks, open_folder
from reshard.values.words import show

if TYPE_CHECKING:
    from reshard import _core
    from reshard.commit.manifest import Manifest
    from reshard.formats.base import CheckpointData
    from reshard.storage.location import Location

_log = logging.getLogger("reshard")

MAX_LOOKS = 5  # at a root that changes while it is listed


def order_of(root: Location, *, exact: int | None = None) -> candidates.Order:
    """The order in which the iterations of a root are tried, and those that are never tried. Opens no shard file.

    Args:
        root: the root of a Checkpoint 2.0 tree.
        exact: only this iteration.

    Raises:
        CheckpointNotFoundError: there is no such folder.
        StorageError: it cannot be listed.

    Example:
        >>> from reshard.storage.location import locate
        >>> [one.name for one in order_of(locate("output/checkpoint")).candidates]
        ['iteration_00000400']
    """
    with Look(root, exact=exact) as look:
        return look.order


def newer_than(root: Location, iteration: int) -> tuple[int, ...]:
    """Iterations above the selected one, ascending, which are skipped; without those that a save has already recorded.

    Raises:
        CheckpointNotFoundError: there is no such folder.
        StorageError: it cannot be listed.

    Example:
        >>> from reshard.storage.location import locate
        >>> newer_than(locate("output/checkpoint"), 300)
        (400,)
    """
    listed = roots.list_iterations(root)
    if all(number <= iteration for number, _ in listed):
        return ()  # without reading the manifests
    folders = tuple(_folder_facts(root, number, name) for number, name in listed)
    recorded = candidates.left_behind(folders, roots.read_tracker(root)[0])
    return tuple(one.iteration for one in folders if one.iteration > iteration and one.iteration not in recorded)


class Look:
    """The order of the iterations of a root, with the manifest of the one that is probably opened.

    That manifest is read once, under the lock. Of the others, only what decides the order is parsed.

    Attributes:
        entries: what the root holds.
        order: the order in which the iterations are tried.

    Example:
        >>> from reshard.storage.location import locate
        >>> with Look(locate("output/checkpoint")) as look:
        ...     look.open(look.order.candidates[0], "auto").iteration
        400
    """

    def __init__(self, root: Location, *, exact: int | None = None) -> None:
        self._root = root
        tracker, fault = roots.read_tracker(root)
        self.entries = root.entries()
        listed, repeated = roots.scan(root, self.entries)
        wanted = tracker if exact is None else exact
        self._probable = next((name for one, name in listed if one == wanted), listed[-1][1] if listed else "")
        self._locked = self._lock()
        try:
            folders = tuple(self._facts(iteration, name) for iteration, name in listed)
            order = candidates.order(folders, tracker, fault, exact=exact)
            lines = [f"{show(name)} is skipped: {reason}" for name, reason in repeated]
            lines += [
                f"iteration {iteration} is read from {show(name)}: its replacement was interrupted, and the next save "
                "moves it back"
                for iteration, name in listed
                if "/" in name
            ]
            self.order = replace(order, warnings=(*order.warnings, *lines))
        except BaseException:
            self.close()
            raise

    def open(self, one: candidates.Candidate, method: _core.ReadMethod) -> CheckpointData:
        """Open a candidate. Raises as `reader.open_folder`."""
        locked = self._locked if one.name == self._probable else None
        return open_folder(self._root / one.name, method, one.iteration, locked=locked)

    def close(self) -> None:
        """Release the lock, unless its iteration was opened."""
        if self._locked is not None:
            self._locked.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lock(self) -> LockedManifest | None:
        try:
            return LockedManifest(self._root / self._probable) if self._probable else None
        except ReshardError:
            return None  # if it is opened, it raises again

    def _facts(self, iteration: int, name: str) -> candidates.Folder:
        if name != self._probable or self._locked is None or self._locked.manifest is None:
            return _folder_facts(self._root, iteration, name)
        return _folder(iteration, name, self._root, self._locked.manifest)


def _folder_facts(root: Location, iteration: int, name: str) -> candidates.Folder:
    try:
        head = manifests.read_head(root / name)
    except ReshardError:
        return candidates.Folder(iteration, name, marks(root / name)[0])
    return _folder(iteration, name, root, head)


def _folder(iteration: int, name: str, root: Location, head: manifests.Head | Manifest) -> candidates.Folder:
    is_tracked, _ = marks(root / name)
    return candidates.Folder(
        iteration, name, is_tracked, head.generation, head.previous_tracker, tuple(head.passed_over)
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
        >>> from reshard.storage.location import locate
        >>> best_of(locate("output/checkpoint")).iteration
        400
    """
    before: candidates.Order | None = None
    for _ in range(MAX_LOOKS):
        with Look(root) as look:
            order = look.order
            if order == before:
                break
            before = order
            faults: dict[str, str] = {}
            folders = {one.name: partial(look.open, one, method) for one in order.candidates}
            if (opened := open_newest(root, folders, faults, order.warnings)) is not None:
                return opened
        # A save may have ended meanwhile and retention may have removed iterations: list again until nothing changes.
    lines = [*order.warnings, *(f"{name}: {reason}" for name, reason in faults.items())]
    lines += [f"{one.name}: {one.reason}" for one in order.refused]
    raise nothing_complete(root, [*lines, *roots.misnamed(root)])
