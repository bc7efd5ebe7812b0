"""Roll a checkpoint root back: the next restart resumes from a given iteration.

The tracker is moved to that iteration. Newer iterations are marked as tracked, so that the reading rules of
`checkpoint2.candidates` skip them; none is deleted. The first save after the restart records them as skipped. The line
of the iteration in the log of saves is repeated: copies of those that were removed meanwhile are known by it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard import opening
from reshard.commit import claims, protocol, roots, save_log
from reshard.commit import manifest as manifests
from reshard.errors import (
    ArgumentError,
    CheckpointNotFoundError,
    DamagedFileError,
    ReshardError,
    StorageError,
    hints_without,
)
from reshard.formats import registry
from reshard.formats.health import last_healthy
from reshard.storage.location import Location, locate_root
from reshard.values.argument_types import Progress
from reshard.values.arguments import check, plain_integer
from reshard.values.events import Observers, OnEvent
from reshard.values.words import listed, show
from reshard.verbs.verify import verify as verify_checkpoint

if TYPE_CHECKING:
    import os


_log = logging.getLogger("reshard")


@dataclass(frozen=True)
class Rollback:
    """What a rollback changed, or would change.

    Attributes:
        iteration: the iteration that the next restart resumes from.
        previous: the iteration that the tracker named before; None: there was no valid tracker.
        newer: iterations above it, ascending. They stay on disk and a restart does not take them.
        verified: whether every byte of the iteration was compared with its manifest.
    """

    iteration: int
    previous: int | None
    newer: tuple[int, ...]
    verified: bool


@hints_without("takeover")
def rollback(
    root: str | os.PathLike[str],
    iteration: int | None = None,
    *,
    healthy: bool = False,
    verify: bool = True,
    dry_run: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
    on_event: OnEvent | None = None,
) -> Rollback:
    """Make the next restart resume from an iteration of a root, which may be older or newer than the tracker's.

    The tracker is moved to `iteration`. Newer iterations stay on disk, and a restart skips them. The first save of the
    run that resumes here may have a lower number than they have; it replaces the one of its own number.

    Args:
        root: the root of a Checkpoint 2.0 tree. No other process may write into it.
        iteration: the iteration to resume from. It must be complete. None: the one that `healthy` selects.
        healthy: resume from the newest iteration that was saved as healthy: neither its loss nor its values were bad.
        verify: compare every byte of the iteration with its manifest first. False: only sizes, headers and the small
            files are compared. Of an iteration without a manifest only the structure can be checked.
        dry_run: change nothing, and report what would change.
        threads: threads that read.
        progress: called as `progress(done_bytes, total_bytes)`.
        on_event: a function, or a list of functions, called with the `Event` of the rollback.

    Returns:
        What was changed.

    Raises:
        ArgumentError: the iteration is not an integer from 0 to 10**18 - 1, or not exactly one of `iteration` and
            `healthy` is given.
        CheckpointNotFoundError: there is no such root, no such iteration in it, or no healthy one.
        ClaimedError: another process writes into the root.
        DamagedFileError: the iteration is not complete, or bytes of it differ from its manifest.
        StorageError: the system failed, or a file of the iteration could not be read. The tracker names the old
            iteration or the new one.

    Example:
        >>> import numpy as np, reshard
        >>> for iteration in (100, 200, 300):
        ...     _ = reshard.save("rolled_back", iteration, {"w": np.full(4, iteration)})
        >>> reshard.rollback("rolled_back", 200)
        Rollback(iteration=200, previous=300, newer=(300,), verified=True)
        >>> reshard.open("rolled_back").iteration
        200
    """
    check(rollback, on_event=on_event)
    path = locate_root(root).absolute()
    if (iteration is None) is not healthy:
        raise ArgumentError(
            f"iteration {iteration}, healthy {healthy}: expected exactly one of them",
            hint="give the iteration, or `healthy=True` for the newest that was saved as healthy",
        )
    if iteration is None:
        iteration = _last_healthy(path)
    iteration = plain_integer(iteration)
    roots.iteration_folder_name(iteration)  # refuses an invalid iteration
    if dry_run:
        is_verified = _check(_folder(path, iteration), verify=verify, threads=threads, progress=progress)
        return _changes(path, iteration, verified=is_verified)
    roots.list_iterations(path)  # refuses a path that is not a folder, before anything is made in it
    if not roots.is_root(path):
        raise _not_found(path, iteration)
    is_ours = claims.held(path) is not None
    try:
        # A save that was sealed and not published is published first: it is newer and must not be lost.
        for line in protocol.recover(path):
            _log.warning("%s: %s", path, line)
        is_verified = _check(_folder(path, iteration), verify=verify, threads=threads, progress=progress)
        changes = _move(path, iteration, verified=is_verified)
    finally:
        if not is_ours:
            protocol.release(path)
    newer = listed(map(str, changes.newer)) if changes.newer else None
    Observers.of(on_event)("rolled_back", iteration, previous=changes.previous, newer=newer, verified=is_verified)
    return changes


def _last_healthy(root: Location) -> int:
    found = last_healthy(root)
    if found is None:
        raise CheckpointNotFoundError(
            f"no iteration in {show(str(root))} was saved as healthy",
            path=str(root),
            hint="health is recorded by saves of this release: choose an iteration, and look at its values",
        )
    return found


def _folder(root: Location, iteration: int) -> Location:
    name = dict(roots.list_iterations(root)).get(iteration)
    if name is None:
        raise _not_found(root, iteration)
    return root / name


def _not_found(root: Location, iteration: int) -> CheckpointNotFoundError:
    hint = roots.missing_hint(root)
    if not roots.list_iterations(root) and registry.detect(root).traits.rank_folders:
        hint = "rank folders have no tracker: `load_checkpoint` of the configuration names the file to resume from"
    return CheckpointNotFoundError(f"there is no iteration {iteration} in {show(str(root))}", path=str(root), hint=hint)


def _check(folder: Location, *, verify: bool, threads: int | None = None, progress: Progress | None = None) -> bool:
    """Refuse an iteration that is not complete; whether all its bytes were compared."""
    if not verify:
        with opening.open(folder, format=registry.ITERATIONS.traits.name) as opened:
            opened.data.check_files()
        return False
    report = verify_checkpoint(folder, threads=threads, progress=progress)
    for one in report.checkpoints:
        for fault in sorted(one.faults, key=lambda fault: not fault.is_damage):
            name = "" if fault.file is None or fault.file in fault.message else f"{show(fault.file)}: "
            if not fault.is_damage:
                raise StorageError(
                    f"{show(str(folder))} could not be read: {name}{fault.message}",
                    path=str(folder),
                    hint="run this as the user of the training, or give this user read permission; it is not known to "
                    "be damaged",
                )
            raise DamagedFileError(
                f"{show(str(folder))} is damaged: {name}{fault.message}",
                path=str(folder),
                hint="choose another iteration: `reshard verify` shows which are undamaged",
            )
    return all(one.verified for one in report.checkpoints)


def _changes(root: Location, iteration: int, *, verified: bool) -> Rollback:
    newer = tuple(number for number, _ in roots.list_iterations(root) if number > iteration)
    return Rollback(iteration, roots.resolve_candidates(root).tracker, newer, verified)


def _move(root: Location, iteration: int, *, verified: bool) -> Rollback:
    """Move the tracker."""
    found: list[Rollback] = []

    def check() -> int:
        _check(_folder(root, iteration), verify=False)  # another process may have removed it meanwhile
        found[:] = [_changes(root, iteration, verified=verified)]
        return iteration

    protocol.go_back(root, check)
    order = opening.iterations(root)
    first = next(iter(order.candidates if order is not None else ()), None)
    if first is None or first.iteration != iteration:
        taken = "none" if first is None else f"iteration {first.iteration}, {first.reason}"
        raise DamagedFileError(
            f"{show(str(root))}: the tracker names iteration {iteration} now, and a restart would take {taken}",
            path=str(root),
        )
    if root.is_local:
        _repeat_line(root, iteration)
    return found[0]


def _repeat_line(root: Location, iteration: int) -> None:
    """Repeat the line of an iteration at the end of the log of saves: those between were left, though removed later."""
    try:
        lines, attempt = save_log.read_all(root), manifests.read_head(_folder(root, iteration)).attempt
        line = next((one for one in reversed(lines) if one.attempt == attempt), None)
        if line is not None and line != lines[-1]:
            save_log.append(root, line)
    except ReshardError as error:
        _log.warning("%s: the log of saves does not say that the run went back: %s", root, error)
