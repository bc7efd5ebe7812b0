"""Retention by hand: which iterations of a root are removed, and which are kept in any case.

The rules are those of `save(..., keep=...)`, see `write.retention`. A checkpoint of MindSpore Transformers, which has
no manifest, counts as complete only if it can be opened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard import opening
from reshard.commit import protocol, roots
from reshard.commit.protocol import pin, unpin
from reshard.commit.retention import Removed, remove
from reshard.errors import ArgumentError, CheckpointNotFoundError, ReshardError
from reshard.formats import registry
from reshard.options import explains_moved, retention_of
from reshard.storage.location import locate_root
from reshard.values.argument_types import Progress
from reshard.values.arguments import checked
from reshard.values.events import Observers, OnEvent
from reshard.values.words import show

if TYPE_CHECKING:
    import os

    from reshard.options import RetentionLike
    from reshard.storage.location import Location

__all__ = ["Removed", "pin", "prune", "unpin"]


@explains_moved
@checked
def prune(
    root: str | os.PathLike[str],
    keep: int | None = None,
    *,
    retention: RetentionLike | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    on_event: OnEvent | None = None,
) -> Removed:
    """Remove the iterations of a root that are not to be kept.

    These are never removed: the iteration that the tracker names, pinned iterations, iterations above the tracker,
    incomplete and damaged ones, the newest verified one, and those that a process reads. Nothing is removed unless a
    newer iteration that stays has been verified since it was written, by `verify`, by `Verify(after_save=True)` or by
    `load(verify="full")`. If there is none, the newest one that stays is verified first, and the next one if it is
    damaged.

    Args:
        root: the checkpoint root.
        keep: how many complete iterations to keep, the newest; short for `retention=Retention(keep=...)`.
        retention: which iterations are kept: a `Retention` or a mapping of its fields. It or `keep` is needed.
        dry_run: remove nothing and verify nothing, and report what would be removed.
        progress: called as `progress(done_bytes, total_bytes)` while an iteration is verified.
        on_event: a function, or a list of functions, called with an `Event` for each removed iteration.

    Returns:
        What was removed, and why the others stay.

    Raises:
        ArgumentError: a number is below 1; neither `keep` nor `retention` is given, or both are.
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
    known = retention_of(keep, retention)
    if known is None:
        raise ArgumentError("`prune` needs `keep` or `retention`", hint="for example `keep=5`")
    place = locate_root(root)
    if not roots.list_iterations(place):
        message = f"{show(str(place))} holds no iteration folder"
        raise CheckpointNotFoundError(message, path=str(place), hint=roots.missing_hint(place))
    if not dry_run:
        protocol.clean(place)
    return remove(
        place,
        known,
        dry_run=dry_run,
        original_fault=_fault,
        progress=progress,
        observers=Observers.of(on_event),
    )


def _fault(folder: Location) -> str | None:
    """Why an iteration folder without a manifest is not a complete checkpoint; None if it is."""
    try:
        with opening.open(folder, format=registry.ITERATIONS.traits.name) as opened:
            opened.data.check_files()
    except ReshardError as error:
        if not opening.is_damage(error):
            raise
        return opening.reason_of(error)
    return None
