"""Finds checkpoints near a path at which there is none, for hints of the command line.

A folder without a checkpoint is searched below. A path that does not exist is compared with existing names. The search
is limited in levels and entries, and opens only the files that detection opens.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from reshard.errors import ReshardError
from reshard.formats import registry
from reshard.formats.base import Match
from reshard.storage.location import Location, locate
from reshard.values.words import nearest

if TYPE_CHECKING:
    import os

_MAX_DEPTH = 3  # levels below a folder that are searched
_MAX_ENTRIES = 300
_MAX_FOUND = 3


def near(path: str | os.PathLike[str]) -> list[str]:
    """Paths of checkpoints below a path, or with a similar name.

    Args:
        path: the path without a checkpoint.

    Returns:
        At most three paths; empty if the path is a checkpoint, or nothing is found.

    Example:
        >>> import numpy as np, reshard
        >>> _ = reshard.save("output/checkpoint", 1, {"w": np.zeros(4)})
        >>> near("output/chekpoint")
        ['output/checkpoint']
    """
    target = locate(path)
    if target.is_folder():
        return [] if _is_checkpoint(target) else [str(found) for found in _below(target)]
    return [] if target.exists() else [str(found) for found in _similar_paths(target)]


def _is_checkpoint(folder: Location) -> bool:
    try:
        return registry.detect(folder).detect(folder) is Match.YES
    except ReshardError:
        return False


def _below(folder: Location) -> list[Location]:
    """Checkpoints below a folder, the nearest first."""
    found: list[Location] = []
    queue = deque([(folder, 0)])
    n_entries = 0
    while queue and len(found) < _MAX_FOUND:
        parent, depth = queue.popleft()
        for name in _folders(parent):
            n_entries += 1
            if n_entries > _MAX_ENTRIES:
                return found
            if _is_checkpoint(parent / name):
                found.append(parent / name)
            elif depth + 1 < _MAX_DEPTH:
                queue.append((parent / name, depth + 1))
    return found[:_MAX_FOUND]


def _folders(parent: Location) -> list[str]:
    """Subfolders that are not hidden, sorted by name."""
    try:
        entries = [one for one in parent.entries() if one.kind in ("folder", "link") and not one.name.startswith(".")]
    except ReshardError:
        return []
    names = sorted(one.name for one in entries)[:_MAX_ENTRIES]
    return [name for name in names if (parent / name).is_folder()]


def _similar_paths(target: Location) -> list[Location]:
    """Existing paths whose components are equal or similar to those of a path that does not exist."""
    missing: list[str] = []
    base = target
    while base != base.parent and not base.is_folder():
        missing.insert(0, base.name)
        base = base.parent
    found = [base]
    for name in missing:
        found = [
            folder / other
            for folder in found
            for other in ([name] if (folder / name).exists() else _similar_names(folder, name))
        ][:_MAX_FOUND]
    return found


def _similar_names(folder: Location, name: str) -> list[str]:
    names = [one for one in _names(folder) if one.startswith(".") == name.startswith(".")]
    return nearest(name, names[:_MAX_ENTRIES], _MAX_FOUND)


def _names(folder: Location) -> list[str]:
    """The names in a folder, sorted; none if it cannot be listed."""
    try:
        return folder.names()
    except ReshardError:
        return []
