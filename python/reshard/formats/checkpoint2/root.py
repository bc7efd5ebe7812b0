"""The root of a Checkpoint 2.0 tree: `commit.candidates` decides the order, from the facts that are gathered here."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.commit import candidates, roots
from reshard.commit.folder_facts import facts_of
from reshard.errors import ReshardError
from reshard.formats.base import Root
from reshard.formats.checkpoint2.reader import LockedManifest, open_folder
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.formats.base import CheckpointData, OpenOptions
    from reshard.storage.location import Location


class IterationsRoot(Root):
    """The iterations of a root. No shard file is opened before an iteration is.

    The manifest of the one that is probably opened is read once, under the lock. Of the others, only what decides the
    order is parsed.

    Args:
        root: the root of a Checkpoint 2.0 tree.
        options: the options of opening.
        exact: only this iteration.

    Raises:
        CheckpointNotFoundError: there is no such folder.
        StorageError: it cannot be listed.

    Example:
        >>> from reshard.formats.base import OpenOptions
        >>> from reshard.storage.location import locate
        >>> with IterationsRoot(locate("output/checkpoint"), OpenOptions()) as root:
        ...     root.open(root.order.candidates[0]).iteration
        400
    """

    is_ours = in_turn = True

    def __init__(self, root: Location, options: OpenOptions, *, exact: int | None = None) -> None:
        super().__init__(root, options)
        self._exact = exact
        tracker, fault = roots.read_tracker(root)
        self._entries = root.entries()
        listed, repeated = roots.scan(root, self._entries)
        self._known = roots.known_facts(root, self._entries) or {}
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
                if "/" in name  # in the trash
            ]
            self.order = replace(order, warnings=(*order.warnings, *lines))
        except BaseException:
            self.close()
            raise

    def open(self, one: candidates.Candidate) -> CheckpointData:
        """The data of an iteration. Raises as `reader.open_folder`."""
        locked = self._locked if one.name == self._probable else None
        return open_folder(self.path / one.name, self.options.method, one.iteration, locked=locked)

    def again(self) -> IterationsRoot:
        """The same root, listed once more."""
        return IterationsRoot(self.path, self.options, exact=self._exact)

    def newest_first(self) -> Sequence[candidates.Candidate]:
        """By the number."""
        return sorted(super().newest_first(), key=lambda one: one.iteration or 0, reverse=True)

    def ignored(self) -> Sequence[str]:
        """Folders whose names only resemble that of an iteration."""
        return roots.misnamed(self.path, self._entries)

    def close(self) -> None:
        """Release the lock, unless its iteration was opened."""
        if self._locked is not None:
            self._locked.release()

    def _lock(self) -> LockedManifest | None:
        try:
            return LockedManifest(self.path / self._probable) if self._probable else None
        except ReshardError:
            return None  # if it is opened, it raises again

    def _facts(self, iteration: int, name: str) -> candidates.Folder:
        if name in self._known:
            return self._known[name]
        manifest = None if name != self._probable or self._locked is None else self._locked.manifest
        return facts_of(self.path, iteration, name, manifest)
