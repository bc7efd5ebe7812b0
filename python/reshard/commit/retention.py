"""Which iterations are kept, and how the others are removed.

`plan` decides, from facts alone. These are kept: the newest `keep` complete iterations, the one that the tracker names,
pinned ones, and on request every Nth and the best. These are never removed: incomplete ones and those of an unknown
form, those above the tracker (left by a rollback, or newer than this program knows), the newest verified one, and the
newest one that was not saved as unhealthy. One that alone records that a run skipped another one stays as long as that
is there: without the record it would be a candidate again. The facts come from the folder, not from the memory of
earlier saves.

An iteration is verified if all its bytes have been compared with its manifest since it was written: before a save was
published (`Verify.after_save`), by `verify`, by a load with `verify="full"`, or here. The result is recorded beside it
(`formats.proofs`); one that was found damaged does not count. Nothing is removed unless a verified one stays.

- `remove` (`prune`) compares the newest iteration that stays, if no newer one than those removed is verified, and the
  next one if that is damaged. `apply`, which follows a save, reads nothing: it removes nothing until one is verified.
- So that this is the case, a save whose `keep` would remove something while none of the newest is verified is read back
  by every rank before it is published (`must_read_back`): one save in `keep`. With `keep=1` it is every save.
- Where no iteration has a manifest, as MindSpore Transformers saves, the structure is all that can be checked.

An iteration is removed by a rename into the trash, the oldest first, and deleted there. If the disk is too full to make
the trash, it is deleted in place. One that is being read is skipped. `apply` never fails a save: an error of the system
becomes a warning.
"""

from __future__ import annotations

import contextlib
import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from reshard.commit import candidates, proofs, protocol, roots, save_log, staging
from reshard.commit import manifest as manifests
from reshard.commit.attempts import Retired, n_bytes_of
from reshard.commit.filesystem import MANIFEST_FILE, UNFINISHED_FILE
from reshard.commit.manifest import TRACKED_FILE, ManifestCache
from reshard.commit.scrub import is_damage, scrub_folder
from reshard.commit.trash import REMOVED, TRASH_FOLDER
from reshard.errors import CheckpointNotFoundError, DamagedFileError, ReshardError, StorageError
from reshard.values.events import Observers
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from reshard import _core
    from reshard.commit.manifest import Manifest
    from reshard.options import Retention
    from reshard.storage.location import Location
    from reshard.storage.store import Entry

_LAST_VERIFIED = "the last verified one"
_LAST_HEALTHY = "the last one that was not saved as unhealthy"
_RECORD = "it records that a run skipped iteration {}, which is still there"
_MANY = 20  # iterations beyond `keep` that wait for their first metric without a warning
_MAX_ROUNDS = 5  # in a root that changes while it is looked at

_log = logging.getLogger("reshard")


@dataclass(frozen=True)
class Verified:
    """Complete; its bytes have been compared with its manifest since it was written, and found right."""


@dataclass(frozen=True)
class Unverified:
    """Complete, as far as is known; it can be verified if it has a valid manifest."""

    has_manifest: bool = True


@dataclass(frozen=True)
class Incomplete:
    """Not complete, or damaged."""

    reason: str


@dataclass(frozen=True)
class Unreadable:
    """It could not be read, which is not damage."""

    reason: str


@dataclass(frozen=True)
class Debris:
    """The rest of a folder whose removal in place was interrupted."""


State: TypeAlias = Verified | Unverified | Incomplete | Unreadable | Debris


@dataclass(frozen=True)
class Facts:
    """The facts of one iteration.

    Attributes:
        iteration: its number.
        name: its folder.
        state: whether it is complete.
        is_pinned: whether it is pinned.
        is_passed_over: whether a later save recorded that it was refused at a roll-back.
        records: iterations whose record of this it holds.
        metrics: those in its manifest.
        is_unhealthy: whether its save recorded that the run was not healthy.
    """

    iteration: int
    name: str
    state: State = Unverified()
    is_pinned: bool = False
    is_passed_over: bool = False
    records: frozenset[int] = frozenset()
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_unhealthy: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether it is, verified or not."""
        return isinstance(self.state, Verified | Unverified)

    @property
    def is_verified(self) -> bool:
        """Whether all its bytes were found right."""
        return isinstance(self.state, Verified)


@dataclass(frozen=True)
class Removed:
    """What was removed, or would be.

    Attributes:
        iterations: the removed iterations, ascending.
        n_bytes: bytes of their files.
        kept: by iteration, why it stays.
        warnings: iterations that could not be removed, with the reason.
        failed: those of which the system refused the removal, ascending.
    """

    iterations: tuple[int, ...]
    n_bytes: int
    kept: Mapping[int, str]
    warnings: tuple[str, ...] = ()
    failed: tuple[int, ...] = ()


class _NoMetricError(DamagedFileError):
    """No iteration that exists has the metric of the best ones."""

    def __init__(self, message: str, *, path: str, n_iterations: int) -> None:
        super().__init__(message, path=path)
        self.n_iterations = n_iterations


def plan(
    facts: Sequence[Facts], retention: Retention, *, tracker: int | None, best: Collection[int] = ()
) -> tuple[list[Facts], dict[int, str]]:
    """Decide which iterations are removed.

    Args:
        facts: one entry for each iteration.
        retention: which iterations are kept; its metric is not used.
        tracker: the iteration that the tracker names, or None.
        best: iterations to keep for their metrics.

    Returns:
        The iterations that are removed, oldest first; and by iteration why the others stay.

    Example:
        >>> from reshard.options import Retention
        >>> facts = [Facts(n, f"iteration_{n:08d}", Verified()) for n in (100, 200, 300, 400)]
        >>> gone, kept = plan(facts, Retention(keep=2, keep_every=100_000), tracker=400, best=[100])
        >>> [one.iteration for one in gone], kept
        ([200], {100: 'one of the best', 300: 'one of the newest 2', 400: 'the tracker names it'})
    """
    keep, keep_every = retention.keep, retention.keep_every
    ordered = sorted(facts, key=lambda one: one.iteration)
    counted = _counted(ordered, tracker)
    newest = {one.iteration for one in counted[-keep:]}
    kept: dict[int, str] = {}
    for one in ordered:
        reason = None
        if isinstance(one.state, Debris):
            continue
        if isinstance(one.state, Unreadable):
            reason = f"could not be looked at: {one.state.reason}"
        elif isinstance(one.state, Incomplete):
            reason = f"not complete: {one.state.reason}"
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
        kept[verified[-1]] = _LAST_VERIFIED
    healthy = [one.iteration for one in counted if not one.is_unhealthy]
    if healthy and healthy[-1] not in kept and healthy[-1] != counted[-1].iteration:
        kept[healthy[-1]] = _LAST_HEALTHY
    there = {one.iteration for one in ordered}
    for one in ordered:
        if one.iteration not in kept and not isinstance(one.state, Debris) and (skipped := one.records & there):
            kept[one.iteration] = _RECORD.format(max(skipped))
    return [one for one in ordered if one.iteration not in kept], dict(sorted(kept.items()))


def _counted(facts: Sequence[Facts], tracker: int | None) -> list[Facts]:
    """Complete iterations that a restart may take, in their order."""
    return [
        one
        for one in facts
        if one.is_complete and not one.is_passed_over and (tracker is None or one.iteration <= tracker)
    ]


def to_verify(
    facts: Sequence[Facts], gone: Sequence[Facts], kept: Mapping[int, str], *, tracker: int | None
) -> list[Facts]:
    """What has to be verified before a plan is carried out: one of these, the newest first.

    Args:
        facts: those of the plan, ascending.
        gone: what it removes.
        kept: why the others stay.
        tracker: the iteration that the tracker names, or None.

    Returns:
        Iterations that a restart could take, that stay, and that are newer than those of them that go, or would go if
        another one were verified. None where one is verified, or where nothing goes but debris. If none of them can be
        verified and nothing that stays is, all that can be.

    Example:
        >>> from reshard.options import Retention
        >>> facts = [Facts(n, f"iteration_{n:08d}") for n in (100, 200, 300)]
        >>> gone, kept = plan(facts, Retention(keep=2), tracker=300)
        >>> [one.iteration for one in to_verify(facts, gone, kept, tracker=300)]
        [300, 200]
    """
    counted = _counted(facts, tracker)
    going = {one.iteration for one in gone} | {one for one, reason in kept.items() if reason == _LAST_VERIFIED}
    if not going - {one.iteration for one in gone if isinstance(one.state, Debris)}:
        return []
    last = max((one.iteration for one in counted if one.iteration in going), default=-1)
    newer = [one for one in reversed(counted) if one.iteration in kept and one.iteration > last]
    if any(one.is_verified for one in newer):
        return []
    candidates = [one for one in newer if one.state == Unverified()]
    if not candidates and not any(one.is_verified and one.iteration in kept for one in counted):
        candidates = [one for one in reversed(counted) if one.state == Unverified()]
    return candidates


def must_read_back(
    root: Location,
    iteration: int,
    keep: int,
    *,
    entries: Sequence[Entry] | None = None,
    cache: ManifestCache | None = None,
) -> bool:
    """Whether a save has to be read back for retention to remove anything after it.

    Args:
        root: the checkpoint root.
        iteration: what is being saved.
        keep: as in `apply`.
        entries: what the root holds; None: it is listed.
        cache: manifests that were read.

    Returns:
        True if there would be more than `keep` iterations, or some that were skipped, and none of the newest
        `keep - 1` that are there is verified.

    Raises:
        CheckpointNotFoundError, StorageError: the root cannot be listed.

    Example:
        >>> import numpy as np, reshard
        >>> for number in (1, 2):
        ...     _ = reshard.save("read-back", number, {"w": np.zeros(4)})
        >>> from reshard.storage.location import locate
        >>> must_read_back(locate("read-back"), 3, keep=2), must_read_back(locate("read-back"), 3, keep=3)
        (True, False)
    """
    listed, cache = roots.resolve_candidates(root, entries), cache or ManifestCache()
    there = [one for one in sorted(listed.folders, reverse=True) if one[0] != iteration]
    if len(there) < keep and not _has_passed_over(root, there, cache):
        return False
    n_left = keep - 1
    for number, name in there:
        if n_left == 0:
            break
        if listed.tracker is not None and number > listed.tracker:
            continue
        proof = _proof(root / name, cache)
        if proof is not None and proof.fault is None:
            return False
        n_left -= proof is None
    return True


def _has_passed_over(root: Location, there: Sequence[tuple[int, str]], cache: ManifestCache) -> bool:
    """Whether one of these iterations records that another one was skipped when a run resumed below it."""
    numbers = {number for number, _ in there}
    for _, name in there:
        with contextlib.suppress(ReshardError):
            if numbers & set(cache.read(root / name).passed_over):
                return True
    return False


def _proof(folder: Location, cache: ManifestCache) -> proofs.Proof | None:
    try:
        return proofs.read(folder, cache.read(folder))
    except ReshardError:
        return None


def apply(
    root: Location,
    retention: Retention,
    *,
    original_fault: Callable[[Location], str | None],
    dry_run: bool = False,
    durable: bool = True,
    verify: bool = True,
    verified: Collection[str] = (),
    observers: Observers | None = None,
    entries: Sequence[Entry] | None = None,
    cache: ManifestCache | None = None,
) -> Removed:
    """As `remove`, for the end of a save: what the system refuses is a warning.

    Before the first save with the metric of `best` nothing is removed, which is no warning until many saves lack it.

    Args:
        root: the checkpoint root.
        retention: which iterations are kept.
        dry_run: see `remove`, and so are the other arguments.
        durable: see `remove`.
        original_fault: see `remove`.
        verify: see `remove`.
        verified: see `remove`.
        observers: see `remove`.
        entries: see `remove`.
        cache: see `remove`.

    Raises:
        CheckpointNotFoundError: there is no such root.

    Example:
        >>> from reshard.storage.location import locate
        >>> import tempfile
        >>> from reshard.options import Retention
        >>> with tempfile.TemporaryDirectory() as root:
        ...     apply(locate(root), Retention(keep=2), original_fault=lambda folder: None).iterations
        ()
    """
    try:
        removed = remove(
            root,
            retention,
            dry_run=dry_run,
            durable=durable,
            original_fault=original_fault,
            verify=verify,
            verified=verified,
            observers=observers,
            entries=entries,
            cache=cache,
        )
    except _NoMetricError as error:
        if error.n_iterations <= retention.keep + _MANY:  # as before the first evaluation of a run
            _log.info("nothing is removed yet: %s", error.message)
            return Removed((), 0, {})
        removed = Removed((), 0, {}, (f"nothing is removed: {error.message}",))
    except (StorageError, DamagedFileError) as error:
        removed = Removed((), 0, {}, (f"retention stopped: {error.message}",))
    return removed


def remove(
    root: Location,
    retention: Retention,
    *,
    original_fault: Callable[[Location], str | None],
    dry_run: bool = False,
    durable: bool = True,
    verify: bool = True,
    verified: Collection[str] = (),
    progress: _core.Progress | None = None,
    observers: Observers | None = None,
    entries: Sequence[Entry] | None = None,
    cache: ManifestCache | None = None,
) -> Removed:
    """Remove the iterations of a root that are not to be kept.

    Args:
        root: the checkpoint root.
        retention: which iterations are kept.
        original_fault: returns why an iteration folder without manifest is not complete, or None.
        dry_run: remove nothing, and read no contents.
        durable: sync every change.
        verify: compare the newest that stays with its manifest, if nothing is removed otherwise.
        verified: digests of manifests whose files this process has just compared.
        progress: called as `progress(done_bytes, total_bytes)` while an iteration is compared.
        observers: called with an event `pruned` for each removed iteration.
        entries: what the root held a while ago: if nothing is to be removed then, it is not listed again. None: it is
            listed. Before anything is removed, it is listed under the lock.
        cache: manifests that were read.

    Raises:
        CheckpointNotFoundError: there is no such root.
        DamagedFileError: no iteration has the metric.
        StorageError: the root cannot be listed or locked. Nothing is removed.

    Example:
        >>> from reshard.storage.location import locate
        >>> import tempfile
        >>> from reshard.options import Retention
        >>> with tempfile.TemporaryDirectory() as root:
        ...     remove(locate(root), Retention(keep=2), original_fault=lambda folder: None).iterations
        ()
    """
    path, manifests_read = root.absolute(), cache or ManifestCache()
    judge, known = original_fault, set(verified)
    faults: dict[str, str] = {}  # found here, by the digest of the manifest
    warnings: list[str] = []

    def decide(entries: Sequence[Entry] | None = None) -> _Decision:
        with path.store.remembering():  # each decision looks anew
            facts, tracker = _look(path, judge, known, faults, entries=entries, cache=manifests_read)
            best = _best(path, facts, *retention.best) if retention.best else []
            gone, kept = plan(facts, retention, tracker=tracker, best=best)
            first = to_verify(facts, gone, kept, tracker=tracker)
        counted = {one.iteration for one in _counted(facts, tracker) if one.is_verified}
        return _Decision(gone, kept, first, has_verified=bool(counted & kept.keys()))

    decision = decide(entries)
    if dry_run:
        while verify and decision.first:
            one = decision.first[0]
            warnings.append(f"iteration {one.iteration} would be verified first; if it is damaged, less is removed")
            known.add(manifests.read(path / one.name).digest)
            decision = decide()
        gone = decision.gone
        n_bytes = sum(n_bytes_of(path / one.name) for one in gone)
        return Removed(tuple(one.iteration for one in gone), n_bytes, decision.kept, tuple(warnings))
    if not decision.gone and not decision.first:
        return Removed((), 0, decision.kept)
    unproven: dict[int, str] = {}

    def choose() -> list[tuple[int, str]] | None:
        """What is removed; None: something has to be verified first."""
        nonlocal decision
        decision = decide()
        unproven.clear()
        if decision.first and verify:
            return None
        if decision.first and not decision.has_verified:
            unproven.update((one.iteration, "nothing that would stay has been verified") for one in decision.gone)
            return []
        return [(one.iteration, one.name) for one in decision.gone]

    done = None
    for _ in range(_MAX_ROUNDS):
        while verify and decision.first:
            # Before the lock: comparing takes long, and saves wait for the lock.
            _verify(path / decision.first[0].name, known, faults, warnings, progress)
            decision = decide()
        done = protocol.retire(path, choose, durable=durable)
        if done is not None:
            break
    if done is None:
        warnings.append("no iteration is removed: the root changed each time it was looked at; try again")
        done = Retired()
    if unproven:
        first = decision.first[0].iteration
        warnings.append(f"no iteration is removed: {next(iter(unproven.values()))}; verify iteration {first}")
    warnings += done.warnings
    kept = dict(sorted({**decision.kept, **unproven, **done.kept}.items()))
    for iteration, n_bytes in done.sizes.items():
        # After the lock, too: a slow function must not keep saves waiting.
        (observers or Observers()).first("pruned", iteration, n_bytes=n_bytes, reason=f"not kept by {retention!r}")
    return Removed(tuple(done.sizes), sum(done.sizes.values()), kept, tuple(warnings), tuple(done.failed))


# -- the facts


def _look(
    root: Location,
    judge: Callable[[Location], str | None],
    verified: Collection[str],
    faults: Mapping[str, str],
    *,
    entries: Sequence[Entry] | None,
    cache: ManifestCache,
) -> tuple[list[Facts], int | None]:
    """The facts of all iterations, and the tracker.

    Args:
        root: the checkpoint root.
        judge: of an iteration without manifest, why it is not complete.
        verified: digests of manifests whose files were found right by this process.
        faults: and of those that were not, with the reason.
        entries: what it holds; None: it is listed.
        cache: manifests that were read.
    """
    listed = roots.resolve_candidates(root, entries)
    known = roots.known_facts(root) or {}
    folders = {iteration: root / name for iteration, name in listed.folders}
    found = {iteration: _judge(folders[iteration], name, cache, judge) for iteration, name in listed.folders}
    facts_of = [
        known.get(name) or _folder_facts(folders[iteration], iteration, name, found[iteration][0])
        for iteration, name in listed.folders
    ]
    behind = candidates.left_behind(tuple(facts_of), listed.tracker)
    recorded_by: dict[int, frozenset[int]] = {}
    for number, by in behind.items():
        recorded_by[by] = recorded_by.get(by, frozenset()) | {number}
    facts = []
    for iteration, name in sorted(listed.folders):
        folder, (manifest, state) = folders[iteration], found[iteration]
        if manifest is not None:
            state = _contents(folder, manifest, verified, faults)
        if isinstance(state, Incomplete | Unreadable) and staging.unfinished(folder) == REMOVED:
            state = Debris()
        facts.append(
            Facts(
                iteration=iteration,
                name=name,
                state=state,
                is_pinned=roots.is_pinned(folder),
                is_passed_over=iteration in behind,
                records=recorded_by.get(iteration, frozenset()),
                metrics={} if manifest is None else manifest.metrics,
                is_unhealthy=manifest is not None and manifest.ckpt_status == 1,
            )
        )
    return facts, listed.tracker


def _folder_facts(folder: Location, iteration: int, name: str, manifest: Manifest | None) -> candidates.Folder:
    is_tracked = (folder / TRACKED_FILE).exists()
    if manifest is None:
        return candidates.Folder(iteration, name, is_tracked)
    return candidates.Folder(
        iteration, name, is_tracked, manifest.generation, manifest.previous_tracker, tuple(manifest.passed_over)
    )


def _contents(
    folder: Location, manifest: Manifest, verified: Collection[str], faults: Mapping[str, str]
) -> Verified | Unverified | Incomplete:
    """The state of an iteration with a manifest by what was found in its contents."""
    if manifest.digest in verified:
        return Verified()
    if manifest.digest in faults:
        return Incomplete(faults[manifest.digest])
    proof = proofs.read(folder, manifest)
    if proof is not None and proof.fault is not None:
        return Incomplete(f"found damaged when it was verified: {proof.fault}")
    return Unverified() if proof is None else Verified()


def _judge(
    folder: Location, name: str, cache: ManifestCache, judge: Callable[[Location], str | None]
) -> tuple[Manifest | None, State]:
    """The manifest of a complete iteration, and its state before its contents are looked at."""
    if name.startswith(f"{TRASH_FOLDER}/"):
        return None, Incomplete("its replacement was interrupted: the next save moves it back")
    try:
        has_manifest = _is_there(folder / MANIFEST_FILE)
        if staging.unfinished(folder) not in (None, REMOVED):
            return None, Incomplete("it is being written")
        if not has_manifest:
            is_ours = (folder / UNFINISHED_FILE).exists()
            fault = "it was being removed" if is_ours else judge(folder)
            return None, Unverified(has_manifest=False) if fault is None else Incomplete(fault)
        manifest = cache.read(folder)
        manifests.check_sizes(folder, manifest)
    except ReshardError as error:
        return None, (Incomplete if is_damage(error) else Unreadable)(error.message)
    return manifest, Unverified()


def _is_there(path: Location) -> bool:
    """Whether there is a file; unlike `exists`, a folder that may not be searched is an error. Raises StorageError."""
    try:
        path.stat()
    except CheckpointNotFoundError:
        return False
    return True


def _best(root: Location, facts: Sequence[Facts], metric: str, n: int) -> list[int]:
    complete = {one.iteration for one in facts if one.is_complete}
    name = metric.removeprefix("-")
    # A manifest without metrics may be of a release that wrote them to the log alone.
    metrics = {record.iteration: record.metrics for record in save_log.read(root)} if complete else {}
    metrics |= {one.iteration: one.metrics for one in facts if one.metrics}
    values: dict[int, float] = {}
    for iteration, of_one in metrics.items():
        value = of_one.get(name, math.nan)
        if math.isfinite(value):
            values[iteration] = -value if metric != name else value
    if complete and not values.keys() & complete:
        # Then the best are not known: all are kept.
        others = sorted({other for of_one in metrics.values() for other in of_one})
        raise _NoMetricError(
            f"the log of saves in {show(str(root))} holds no metric {show(name)} of any iteration that exists, "
            f"and no manifest holds it{f'; they hold {listed(map(show, others))}' if others else ''}",
            path=str(root),
            n_iterations=len(complete),
        )
    ranked = sorted((value, -iteration) for iteration, value in values.items() if iteration in complete)
    return [-iteration for _, iteration in ranked[:n]]


def best_of(root: Location, metric: str) -> str | None:
    """The folder of the iteration with the best value of a metric in its manifest; None: no manifest has the metric.

    Args:
        root: the checkpoint root.
        metric: its name, as in `Retention.best`.

    Raises:
        StorageError: the root cannot be listed.

    Example:
        >>> import numpy as np, reshard
        >>> for n, loss in ((1, 2.0), (2, 1.0), (3, 4.0)):
        ...     _ = reshard.save("ranked", n, {"w": np.zeros(1)}, metrics={"loss": loss})
        >>> from reshard.storage.location import locate
        >>> [best_of(locate("ranked"), metric) for metric in ("loss", "-loss", "other")]
        ['iteration_00000002', 'iteration_00000003', None]
    """
    name, found = metric.removeprefix("-"), list[tuple[float, int, str]]()
    for iteration, folder in roots.list_iterations(root):
        try:
            value = manifests.read(root / folder).metrics.get(name, math.nan)
        except ReshardError:
            continue  # it is not complete
        if math.isfinite(value):
            found.append((-value if metric != name else value, -iteration, folder))
    return min(found)[2] if found else None


# -- removing


@dataclass(frozen=True)
class _Decision:
    """What is removed, why the rest stays, what has to be verified before, and whether a verified one stays."""

    gone: list[Facts]
    kept: dict[int, str]
    first: list[Facts]
    has_verified: bool


def _verify(
    folder: Location, known: set[str], faults: dict[str, str], warnings: list[str], progress: _core.Progress | None
) -> None:
    """Compare an iteration with its manifest, and record the result: in `known` or `faults`, and beside it."""
    with manifests.read_lock(folder) as lock:  # no other process removes it meanwhile
        manifest = manifests.read(folder)
        state = proofs.state_of(folder, manifest)
        done, total = 0, sum(entry.n_bytes for entry in manifest.shards.values())

        def advance(n_bytes: int) -> None:
            nonlocal done
            done += n_bytes
            if progress is not None:
                progress(done, total)

        found = scrub_folder(folder, manifest, advance=advance)
        if not lock.is_current():
            return  # it was saved again meanwhile: what is verified is decided again
    if found:
        fault = next((one for one in found if one.is_damage), found[0])
        verdict = "found damaged when it was verified" if fault.is_damage else "could not be verified"
        faults[manifest.digest] = f"{verdict}: {fault.file}: {fault.message}"
        warnings.append(f"{folder.name}: {faults[manifest.digest]}")
        if not fault.is_damage:
            return
    else:
        known.add(manifest.digest)
    try:
        proofs.write(folder, manifest, state, f"{fault.file}: {fault.message}" if found else None)
    except StorageError as error:
        warnings.append(f"{folder.name} was verified, and the result is not recorded: {error.message}")
