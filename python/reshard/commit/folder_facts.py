"""Facts about the iteration folders of a root, read from their manifests: `candidates` decides from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.commit import candidates, roots
from reshard.commit import manifest as manifests
from reshard.commit.log_records import generation_of
from reshard.errors import ReshardError

if TYPE_CHECKING:
    from reshard.commit.manifest import Head, Manifest
    from reshard.storage.location import Location


def facts_of(root: Location, iteration: int, name: str, head: Head | Manifest | None = None) -> candidates.Folder:
    """The facts of an iteration folder.

    Args:
        root: its root.
        iteration: its number.
        name: its name.
        head: its manifest, or the start of it; None: it is read. Without a valid one the folder has no generation.

    Raises:
        StorageError: the system failed to look at it.
    """
    is_tracked = (root / name / manifests.TRACKED_FILE).exists()
    if head is None:
        try:
            head = manifests.read_head(root / name)
        except ReshardError:
            return candidates.Folder(iteration, name, is_tracked)
    return candidates.Folder(
        iteration, name, is_tracked, head.generation, head.previous_tracker, tuple(head.passed_over)
    )


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
    recorded = candidates.left_behind(folders_of(root), roots.read_tracker(root)[0])
    return tuple(number for number, _ in listed if number > iteration and number not in recorded)


def folders_of(root: Location) -> tuple[candidates.Folder, ...]:
    """The facts of all iteration folders of a root, ascending. Raises as `newer_than`."""
    known = roots.known_facts(root) or {}
    return tuple(known.get(name) or facts_of(root, number, name) for number, name in roots.list_iterations(root))


def marks(folder: Location) -> tuple[bool, bool]:
    """Whether the tracker has ever named an iteration folder, and whether the folder is pinned."""
    known = roots.known_facts(folder.parent) if folder.objects is not None and generation_of(folder.name) else None
    is_tracked = (folder / manifests.TRACKED_FILE).exists() if known is None else folder.name in known
    return is_tracked, roots.is_pinned(folder)
