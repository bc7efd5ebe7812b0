"""The iteration that this process resumed from: what a load records for the first save after it.

A run that resumed from an older iteration than the newest has skipped others. Its first save may move the tracker back,
and its manifest says which iterations are not candidates from then on. Any other save below the tracker is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from reshard.storage.location import Location


class PendingRollback(NamedTuple):
    """An iteration that a run resumed from although newer ones exist.

    Attributes:
        iteration: the one that it resumed from.
        passed_over: the newer ones, ascending.
    """

    iteration: int
    passed_over: tuple[int, ...]


_pending: dict[Location, PendingRollback] = {}


def record(root: Location, iteration: int, passed_over: tuple[int, ...] = ()) -> None:
    """Record that this process resumed from an iteration of a root, and which newer ones it skipped.

    Args:
        root: the checkpoint root.
        iteration: what it resumed from.
        passed_over: the newer iterations.

    Example:
        >>> from reshard.storage.location import locate
        >>> record(locate("output"), 400, (500,))
        >>> get(locate("output"))
        PendingRollback(iteration=400, passed_over=(500,))
        >>> forget(locate("output"))
    """
    _pending[root.resolved()] = PendingRollback(iteration, tuple(sorted(passed_over)))


def get(root: Location) -> PendingRollback | None:
    """What was recorded of a root and no save has used yet."""
    return _pending.get(root.resolved())


def forget(root: Location) -> None:
    """Drop the record of a root, once a save has written it down."""
    _pending.pop(root.resolved(), None)
