"""Finds checkpoints near a path at which there is none, for hints of the command line.

A folder without a checkpoint is searched below. A path that does not exist is compared with existing names. The search
is limited in levels and entries, and opens only the files that detection opens.
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

from reshard.errors import ReshardError
from reshard.formats.checkpoint1 import names as checkpoint1
from reshard.formats.checkpoint2 import names as checkpoint2
from reshard.formats.full_weights import names as full_weights
from reshard.formats.huggingface import names as huggingface
from reshard.words import nearest

__all__ = ["near"]

_MAX_DEPTH = 3  # levels below a folder that are searched
_MAX_ENTRIES = 2000
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
    target = Path(path)
    try:
        if target.is_dir():
            return [] if _is_checkpoint(target) else [str(found) for found in _below(target)]
        if os.path.lexists(target):
            return []
        return [str(found) for found in _similar_paths(target)]
    except OSError:
        return []


def _is_checkpoint(folder: Path) -> bool:
    try:
        if checkpoint2.is_root(folder) or huggingface.detect(folder) or full_weights.detect(folder):
            return True
        return checkpoint1.is_root(folder)
    except (ReshardError, OSError):
        return False


def _below(folder: Path) -> list[Path]:
    """Checkpoints below a folder, the nearest first."""
    found: list[Path] = []
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


def _folders(parent: Path) -> list[str]:
    """Subfolders that are not hidden, sorted by name."""
    names: list[str] = []
    try:
        with os.scandir(parent) as entries:
            for entry in entries:
                if len(names) == _MAX_ENTRIES:
                    break
                if not entry.name.startswith(".") and entry.is_dir():
                    names.append(entry.name)
    except OSError:
        return []
    return sorted(names)


def _similar_paths(target: Path) -> list[Path]:
    """Existing paths whose components are equal or similar to those of a path that does not exist."""
    missing: list[str] = []
    base = target
    while base != base.parent and not base.is_dir():
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


def _similar_names(folder: Path, name: str) -> list[str]:
    names: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if len(names) == _MAX_ENTRIES:
                    break
                names.append(entry.name)
    except OSError:
        return []
    return nearest(name, sorted(names), _MAX_FOUND)
