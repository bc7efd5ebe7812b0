"""Retention by hand: which iterations of a root go, and which are kept whatever happens.

The rules are those of `save(..., keep=...)`, told at `write.retention`; here a checkpoint of the original, which has no
manifest, counts as complete only if it can be opened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.arguments import checked
from reshard.errors import ReshardError
from reshard.opening import reason_of
from reshard.opening.folder import open_folder
from reshard.write import retention
from reshard.write.retention import Removed, pin, unpin

if TYPE_CHECKING:
    import os
    from pathlib import Path

__all__ = ["Removed", "pin", "prune", "unpin"]


@checked
def prune(
    root: str | os.PathLike[str],
    keep: int,
    *,
    keep_every: int | None = None,
    keep_best: tuple[str, int] | None = None,
    dry_run: bool = False,
) -> Removed:
    """Remove the iterations of a root that are not to be kept.

    Never removed are the tracker's iteration, what is pinned, what is above the tracker, what is not complete, the
    newest verified one, and what somebody reads.

    Args:
        root: the checkpoint root.
        keep: how many complete iterations to keep, the newest; at least 1.
        keep_every: keep every iteration that this number divides, too.
        keep_best: a metric of the log of saves, and how many iterations with its lowest values to keep; with a `-`
            before the name, those with its highest.
        dry_run: remove nothing, and tell what would go.

    Returns:
        What went, and of the others why they stay.

    Raises:
        ArgumentError: a number is below 1.
        CheckpointNotFoundError: there is no such root.

    Example:
        >>> import numpy as np, reshard
        >>> for iteration in (1, 2, 3):
        ...     _ = reshard.save("pruned", iteration, {"w": np.zeros(4)})
        >>> reshard.pin("pruned", 1)
        >>> reshard.prune("pruned", keep=1).iterations
        (2,)
    """
    return retention.apply(
        root, keep=keep, keep_every=keep_every, keep_best=keep_best, dry_run=dry_run, original_fault=_fault
    )


def _fault(folder: Path) -> str | None:
    """Why an iteration folder without a manifest is no complete checkpoint; None if it is."""
    try:
        open_folder(folder, "auto").close()
    except ReshardError as error:
        return reason_of(error)
    return None
