"""Which iterations are kept, and how the others are removed.

`plan` decides, from facts alone. Kept are: the newest `keep` complete ones, what the tracker names, what is pinned,
every Nth and the best if asked for. Not removed either, whatever is asked for: what is incomplete or not understood
(evidence, and nobody's to judge), what lies above the tracker (left by a roll-back, or newer than this program knows),
and the newest verified one. Whatever is in memory of earlier saves plays no part: the facts come from the directory.

`apply` takes an iteration away by a rename into the trash, one after the other, the oldest first, and removes it there.
One that is being read is passed over. It never fails a save: what the system refuses is a warning.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from reshard import _core
from reshard.arguments import checked
from reshard.errors import ArgumentError, CheckpointNotFoundError, DamagedFileError, ReshardError, StorageError
from reshard.formats import checkpoint2, save_log
from reshard.formats import manifest as manifests
from reshard.formats.manifest import MANIFEST_FILE, PINNED_FILE
from reshard.small_files import show
from reshard.write import claims, staging, steps, trash
from reshard.write.steps import UNFINISHED_FILE
from reshard.write.trash import REMOVED, TRASH_FOLDER

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from reshard.formats.manifest import Manifest

__all__ = ["Facts", "Removed", "apply", "pin", "plan", "unpin"]

_log = logging.getLogger("reshard")


@dataclass(frozen=True)
class Facts:
    """What retention knows of one iteration.

    Attributes:
        iteration: its number.
        name: its folder.
        fault: why it is not complete; None: it is.
        is_verified: whether a manifest proves that.
        is_pinned: whether somebody pinned it.
        is_passed_over: whether a later save recorded that it was refused at a roll-back.
        is_debris: whether it is what is left of one that was being removed, in place.
    """

    iteration: int
    name: str
    fault: str | None = None
    is_verified: bool = False
    is_pinned: bool = False
    is_passed_over: bool = False
    is_debris: bool = False


@dataclass(frozen=True)
class Removed:
    """What was removed, or would be.

    Attributes:
        iterations: what went, ascending.
        n_bytes: bytes of their files.
        kept: by iteration, why it stays.
        warnings: what should have gone and did not, and why.
    """

    iterations: tuple[int, ...]
    n_bytes: int
    kept: Mapping[int, str]
    warnings: tuple[str, ...] = ()


def plan(
    facts: Sequence[Facts],
    *,
    tracker: int | None,
    keep: int,
    keep_every: int | None = None,
    best: Collection[int] = (),
) -> tuple[list[Facts], dict[int, str]]:
    """Decide what goes.

    Args:
        facts: one entry an iteration.
        tracker: the iteration that the tracker names, or None.
        keep: how many complete ones to keep, the newest; at least 1.
        keep_every: keep every iteration that this number divides, too.
        best: iterations to keep for their metrics.

    Returns:
        What goes, oldest first; and by iteration why the others stay.

    Raises:
        ArgumentError: `keep` or `keep_every` is below 1.

    Example:
        >>> facts = [Facts(n, f"iteration_{n:08d}", is_verified=True) for n in (100, 200, 300, 400)]
        >>> gone, kept = plan(facts, tracker=400, keep=2, keep_every=100_000, best=[100])
        >>> [one.iteration for one in gone], kept
        ([200], {100: 'one of the best', 300: 'one of the newest 2', 400: 'the tracker names it'})
    """
    for name, value in (("keep", keep), ("keep_every", keep_every)):
        if value is not None and (type(value) is not int or value < 1):
            raise ArgumentError(f"`{name}` is a number of iterations from 1 on, not {value!r}")
    ordered = sorted(facts, key=lambda one: one.iteration)
    counted = [
        one
        for one in ordered
        if one.fault is None and not one.is_passed_over and (tracker is None or one.iteration <= tracker)
    ]
    newest = {one.iteration for one in counted[-keep:]}
    kept: dict[int, str] = {}
    for one in ordered:
        reason = None
        if one.is_debris:
            continue
        if one.fault is not None:
            reason = f"not complete: {one.fault}"
        elif one.iteration == tracker:
            reason = "the tracker names it"
        elif one.is_pinned:
            reason = "pinned"
        elif tracker is not None and one.iteration > tracker:
            reason = "above the tracker"
        elif one.iteration in newest:
            reason = f"one of the newest {keep}"
        elif one.iteration in best:
            reason = "one of the best"
        elif keep_every is not None and one.iteration % keep_every == 0:
            reason = f"every {keep_every}"
        if reason is not None:
            kept[one.iteration] = reason
    verified = [one.iteration for one in counted if one.is_verified]
    if verified and not kept.keys() & verified:
        kept[verified[-1]] = "the last verified one"
    return [one for one in ordered if one.iteration not in kept], dict(sorted(kept.items()))


def apply(
    root: str | os.PathLike[str],
    *,
    keep: int,
    keep_every: int | None = None,
    keep_best: tuple[str, int] | None = None,
    dry_run: bool = False,
    durable: bool = True,
    original_fault: Callable[[Path], str | None] | None = None,
) -> Removed:
    """Remove the iterations of a root that are not to be kept.

    Args:
        root: the checkpoint root.
        keep: how many complete ones to keep, the newest; at least 1.
        keep_every: keep every iteration that this number divides, too.
        keep_best: a metric of the log of saves, and how many iterations with its lowest values to keep; with a `-`
            before the name, those with its highest.
        dry_run: remove nothing.
        durable: sync every change.
        original_fault: says of an iteration folder without manifest why it is not complete, or None. By default it is
            complete if every shard file that it names is there.

    Raises:
        ArgumentError: a number is below 1.
        CheckpointNotFoundError: there is no such root.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     apply(root, keep=2).iterations
        ()
    """
    path = Path(os.path.abspath(root))  # noqa: PTH100  not resolved: a link stays the user's business
    done, warnings, kept = _Done([], 0), list[str](), dict[int, str]()

    def decide() -> list[Facts]:
        facts, tracker = _look(path, original_fault or _original_fault)
        best = _best(path, facts, *keep_best) if keep_best else []
        gone, reasons = plan(facts, tracker=tracker, keep=keep, keep_every=keep_every, best=best)
        kept.update(reasons)
        return gone

    try:
        if dry_run:
            gone = decide()
            return Removed(tuple(one.iteration for one in gone), sum(_n_bytes(path / one.name) for one in gone), kept)
        checkpoint2.list_iterations(path)  # before a lock is made in what is no root
        with claims.locked(path):
            gone = decide()
            if gone:
                steps.make_folder(path / TRASH_FOLDER, 0o750, durable=durable)
            for one in gone:
                _remove(path, one, done, kept, warnings, durable=durable)
    except (StorageError, DamagedFileError) as error:
        warnings.append(f"retention stopped: {error.message}")
    if done.iterations:
        # Outside the lock: deleting takes long, and what is in the trash is nobody's.
        warnings += trash.empty(path, durable=durable)
    for line in warnings:
        _log.warning("%s", line)
    return Removed(tuple(done.iterations), done.n_bytes, dict(sorted(kept.items())), tuple(warnings))


@checked
def pin(root: str | os.PathLike[str], iteration: int) -> None:
    """Keep an iteration whatever retention is asked for; once is enough.

    Raises:
        CheckpointNotFoundError: there is no such iteration.
        StorageError: the system failed.
    """
    with claims.locked(_existing(root)):
        folder = _folder(root, iteration)
        with contextlib.suppress(FileExistsError):
            steps.make_file(folder / PINNED_FILE, durable=True)


@checked
def unpin(root: str | os.PathLike[str], iteration: int) -> None:
    """Let an iteration go the way of all others again.

    Raises:
        CheckpointNotFoundError: there is no such iteration.
        StorageError: the system failed.
    """
    with claims.locked(_existing(root)):
        folder = _folder(root, iteration)
        steps.remove_file(folder / PINNED_FILE)
        steps.sync(folder)


def _existing(root: str | os.PathLike[str]) -> Path:
    checkpoint2.list_iterations(root)
    return Path(root)


def _folder(root: str | os.PathLike[str], iteration: int) -> Path:
    name = dict(checkpoint2.list_iterations(root)).get(iteration)
    if name is None:
        raise CheckpointNotFoundError(
            f"there is no iteration {iteration} in {show(os.fspath(root))}", path=os.fspath(root)
        )
    return Path(root) / name


# -- the facts


def _look(root: Path, judge: Callable[[Path], str | None]) -> tuple[list[Facts], int | None]:
    candidates = checkpoint2.resolve_candidates(root)
    found = {iteration: (name, *_judge(root / name, judge)) for iteration, name in candidates.folders}
    # Refused by a save of a later claim: what has been saved again since is not meant.
    epochs: dict[int, int] = {}
    for _, manifest, _ in found.values():
        for one in manifest.passed_over if manifest else ():
            assert manifest is not None
            epochs[one] = max(epochs.get(one, 0), manifest.epoch)
    facts = [
        Facts(
            iteration=iteration,
            name=name,
            fault=fault,
            is_verified=manifest is not None and fault is None,
            is_pinned=os.path.lexists(root / name / PINNED_FILE),
            is_debris=fault is not None and staging.unfinished(root / name) == REMOVED,
            is_passed_over=epochs.get(iteration, -1) > (manifest.epoch if manifest else -1),
        )
        for iteration, (name, manifest, fault) in sorted(found.items())
    ]
    return facts, candidates.tracker


def _judge(folder: Path, judge: Callable[[Path], str | None]) -> tuple[Manifest | None, str | None]:
    """The manifest, and why the iteration is not complete."""
    if staging.unfinished(folder) not in (None, REMOVED):
        return None, "it is being written"
    try:
        if not os.path.lexists(folder / MANIFEST_FILE):
            is_ours = os.path.lexists(folder / UNFINISHED_FILE)
            return None, "it was being removed" if is_ours else judge(folder)
        manifest = manifests.read(folder)
        manifests.check_sizes(folder, manifest)
    except ReshardError as error:
        return None, error.message
    return manifest, None


def _original_fault(folder: Path) -> str | None:
    """Why an iteration without manifest is not complete, by what is there; its payload proves nothing."""
    metadata = folder / checkpoint2.METADATA_FILE
    if os.path.lexists(metadata):
        index = _core.Index.from_metadata(str(metadata))
        paths = [Path(index.file_path(number)) for number in range(index.n_files)]
    else:
        paths = [folder / name for name in checkpoint2.list_shard_files(folder)]
    if not paths:
        return "it holds no shard files"
    missing = next((one for one in paths if not one.is_file()), None)
    if missing is not None:
        return f"there is no file {show(missing.name)}"
    index = _core.Index()
    if "reshard" in (index.file_metadata(index.add_file(str(paths[0]), follow_links=False)) or {}):
        return "it holds shard files of ours, and no manifest"
    return None


def _best(root: Path, facts: Sequence[Facts], metric: str, n: int) -> list[int]:
    if type(n) is not int or n < 1:
        raise ArgumentError(f"`keep_best` names a metric and a number from 1 on, not {n!r}")
    complete = {one.iteration for one in facts if one.fault is None}
    name = metric.removeprefix("-")
    values: dict[int, float] = {}
    for record in save_log.read(root):
        value = record.metrics.get(name, math.nan)
        if math.isfinite(value):
            values[record.iteration] = -value if metric != name else value
    if complete and not values.keys() & complete:
        # Without the log the best cannot be told from the rest: then all are kept.
        raise DamagedFileError(
            f"the log of saves in {show(str(root))} tells of no metric {show(name)} of any iteration that is there",
            path=str(root),
        )
    ranked = sorted((value, -iteration) for iteration, value in values.items() if iteration in complete)
    return [-iteration for _, iteration in ranked[:n]]


# -- removing


@dataclass
class _Done:
    iterations: list[int]
    n_bytes: int


def _remove(root: Path, one: Facts, done: _Done, kept: dict[int, str], warnings: list[str], *, durable: bool) -> None:
    folder = root / one.name
    n_bytes = _n_bytes(folder)
    with trash.reader_held_off(folder) as is_free:
        if not is_free:
            kept[one.iteration] = "it is being read"
            warnings.append(f"iteration {one.iteration} is being read: it is removed another time")
            return
        try:
            trash.remove(root, folder, one.iteration, durable=durable)
        except StorageError as error:
            kept[one.iteration] = "it could not be removed"
            warnings.append(f"iteration {one.iteration} could not be removed: {error.message}")
            return
    done.iterations.append(one.iteration)
    done.n_bytes += n_bytes


def _n_bytes(folder: Path) -> int:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
    return 0
