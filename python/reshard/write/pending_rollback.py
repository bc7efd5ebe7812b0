"""What this process resumed from: the one fact that a load leaves for the first save after it.

A run that resumed from an older iteration than the newest has passed others over. Its first save may move the tracker
back, and its manifest says which iterations are no candidates from then on. Any other save below the tracker is
refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os

__all__ = ["PendingRollback", "forget", "get", "record"]


@dataclass(frozen=True)
class PendingRollback:
    """An iteration that was taken though newer ones are there.

    Attributes:
        iteration: the one that was taken.
        passed_over: the newer ones, ascending.
    """

    iteration: int
    passed_over: tuple[int, ...]


_taken: dict[Path, PendingRollback] = {}


def record(root: str | os.PathLike[str], iteration: int, passed_over: tuple[int, ...] = ()) -> None:
    """Remember that this process goes on from an iteration of a root, and which newer ones it passed over.

    Example:
        >>> record("output", 400, (500,))
        >>> get("output")
        PendingRollback(iteration=400, passed_over=(500,))
        >>> forget("output")
    """
    _taken[Path(root).resolve()] = PendingRollback(iteration, tuple(sorted(passed_over)))


def get(root: str | os.PathLike[str]) -> PendingRollback | None:
    """What was noted of a root and no save has used yet."""
    return _taken.get(Path(root).resolve())


def forget(root: str | os.PathLike[str]) -> None:
    """Once a save has recorded it, it has had its effect."""
    _taken.pop(Path(root).resolve(), None)
