"""Retention by hand: which iterations of a root go, and which are kept whatever happens.

The rules are those of `save(..., keep=...)`, told at `write.retention`; here a checkpoint of the original, which has no
manifest, counts as complete only if it can be opened.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from reshard.arguments import checked
from reshard.checkpoint import Checkpoint
from reshard.errors import CheckpointNotFoundError, ReshardError
from reshard.formats.checkpoint2 import names as checkpoint2
from reshard.formats.checkpoint2.reader import open_folder
from reshard.opening import is_damage, reason_of
from reshard.words import show
from reshard.write import retention
from reshard.write.retention import Removed, pin, unpin

if TYPE_CHECKING:
    from reshard import _core
    from reshard.storage.location import Location

__all__ = ["Removed", "pin", "prune", "unpin"]


@checked
def prune(
    root: str | os.PathLike[str],
    keep: int,
    *,
    keep_every: int | None = None,
    keep_best: tuple[str, int] | None = None,
    dry_run: bool = False,
    progress: _core.Progress | None = None,
) -> Removed:
    """Remove the iterations of a root that are not to be kept.

    Never removed are the tracker's iteration, what is pinned, what is above the tracker, what is not complete or was
    found damaged, the newest verified one, and what somebody reads. Nothing is removed unless one that stays and is
    newer has been verified since it was written, by `verify`, by `verify_after_save` or by `load(verify="full")`. If
    none has, the newest one that stays is verified first, and the next one if it is damaged.

    Args:
        root: the checkpoint root.
        keep: how many complete iterations to keep, the newest; at least 1.
        keep_every: keep every iteration that this number divides, too.
        keep_best: a metric of the saves, and how many iterations with its lowest values to keep; with a `-` before the
            name, those with its highest.
        dry_run: remove nothing and verify nothing, and tell what would go.
        progress: called as `progress(done_bytes, total_bytes)` while an iteration is verified.

    Returns:
        What went, and of the others why they stay.

    Raises:
        ArgumentError: a number is below 1.
        CheckpointNotFoundError: there is no such root.
        DamagedFileError: no iteration has the metric.
        StorageError: the root cannot be listed or locked, for want of permission for example. Nothing is removed.

    Example:
        >>> import numpy as np, reshard
        >>> for iteration in (1, 2, 3):
        ...     _ = reshard.save("pruned", iteration, {"w": np.zeros(4)})
        >>> reshard.pin("pruned", 1)
        >>> reshard.prune("pruned", keep=1).iterations
        (2,)
    """
    if not checkpoint2.list_iterations(root):
        raise CheckpointNotFoundError(f"{show(os.fspath(root))} holds no iteration folder", path=os.fspath(root))
    return retention.remove(
        root,
        keep=keep,
        keep_every=keep_every,
        keep_best=keep_best,
        dry_run=dry_run,
        original_fault=_fault,
        progress=progress,
    )


def _fault(folder: Location) -> str | None:
    """Why an iteration folder without a manifest is no complete checkpoint; None if it is."""
    try:
        Checkpoint(open_folder(folder, "auto")).close()
    except ReshardError as error:
        if not is_damage(error):
            raise
        return reason_of(error)
    return None
