"""Compares every byte of every file of a checkpoint with its manifest, past the page cache.

Opening stops at the first fault; this reports all faults. Without a manifest, only the structure is checked, and the
report says so. Nothing is repaired or removed. The result for an iteration folder is recorded beside it
(`formats.proofs`): retention keeps a verified iteration, and does not count a damaged one.

On request the values of the tensors are looked at as well (`verbs.health`), in the same pass where there are checksums.
"""

from __future__ import annotations

import contextlib
import functools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from reshard import opening
from reshard.checkpoint import Checkpoint
from reshard.commit import manifest as manifests
from reshard.commit import proofs
from reshard.commit.roots import list_iterations, parse_iteration_folder, published
from reshard.commit.scrub import Fault, fault_of, joined_faults, own_sums, scrub_folder, scrub_plain
from reshard.conversion.shares import MIN_CUT_BYTES, cut
from reshard.errors import (
    ArgumentError,
    CheckpointNotFoundError,
    GroupError,
    MismatchError,
    ReshardError,
    UnsupportedError,
)
from reshard.formats.base import RankRoot
from reshard.formats.left_out import LeftOut
from reshard.formats.replicas import is_any_of
from reshard.ranks.led import LedRanks
from reshard.ranks.places import Work, do_shares
from reshard.storage.location import Location, locate
from reshard.values.argument_types import Patterns, PlaceLike, Progress
from reshard.values.arguments import checked
from reshard.values.words import show
from reshard.verbs import health as healths
from reshard.verbs.health import HealthChecks, HealthFinding, Meter
from reshard.verbs.loads_in import Library, LoadsIn, parts_of
from reshard.verbs.loads_in import loads_in as compare_with

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Sequence

    from reshard.commit.candidates import Candidate
    from reshard.commit.manifest import Manifest
    from reshard.opening import StrategyLike
    from reshard.ranks.places import Place
    from reshard.storage.store import Lock

__all__ = ["Fault", "HealthFinding", "VerifiedCheckpoint", "VerifyReport", "verify"]

_MAX_TRIES = 3  # to compare an iteration that is saved again meanwhile

State: TypeAlias = Literal["whole", "damaged", "unreadable", "structure"]


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """The result for one checkpoint.

    Attributes:
        path: its folder or file; for rank folders the file of the first rank.
        iteration: the iteration, or None.
        verified: whether every byte was compared and is correct; the same as `state == "whole"`.
        n_files: number of files that were compared.
        n_bytes: bytes of these files.
        faults: damage, and files that could not be read.
        state: "whole": complete and correct; "damaged"; "unreadable": some files could not be read, or this version
            does not support them, and the others are correct; "structure": the structure is correct, but without a
            manifest or a CRC in each file, bytes were not compared.
        not_recorded: why the result is not recorded for retention; None: it is recorded, or this is not an iteration
            folder with a manifest.
        health: what was found with `health=True`; None: the values were not looked at, or the checkpoint has a fault.
        left_out: number, size and source of the tensors that the save leaves out (`leave_out_frozen`), in words; None:
            it has all tensors, or has a fault.
    """

    path: str
    iteration: int | None
    verified: bool
    n_files: int
    n_bytes: int
    faults: tuple[Fault, ...]
    state: State
    not_recorded: str | None = None
    health: tuple[HealthFinding, ...] | None = None
    left_out: str | None = None


@dataclass(frozen=True)
class VerifyReport:
    """The result of `verify`.

    Attributes:
        path: the path that was verified.
        checkpoints: for a root every iteration, newest first; for rank folders every save, in the order in which they
            are tried; else one checkpoint. What a job removes meanwhile is left out.
        seconds: duration.
        warnings: problems of a root itself, and folders in it that are not verified, as sentences.
        loads_in: whether the library of `loads_in` loads it; None: it was not asked.
    """

    path: str
    checkpoints: tuple[VerifiedCheckpoint, ...]
    seconds: float
    warnings: tuple[str, ...] = ()
    loads_in: LoadsIn | None = None

    @property
    def ok(self) -> bool:
        """Whether there are no faults and no differences. Without a manifest, only the structure was checked."""
        return not any(one.faults for one in self.checkpoints) and not (self.loads_in and self.loads_in.differences)

    @property
    def healthy(self) -> bool:
        """Whether no value is wrong; see `HealthFinding.is_alarm`. True also where values were not looked at."""
        return not any(finding.is_alarm for one in self.checkpoints for finding in one.health or ())

    @property
    def n_bytes(self) -> int:
        """Bytes that were compared."""
        return sum(one.n_bytes for one in self.checkpoints)


@checked
def verify(
    path: str | os.PathLike[str],
    *,
    strategy: StrategyLike | None = None,
    format: str | None = None,  # noqa: A002  as in `reshard.open`
    health: bool = False,
    since: int | None = None,
    may_be_infinite: Patterns = (),
    direct: bool = True,
    threads: int | None = None,
    progress: Progress | None = None,
    loads_in: Library | None = None,
    base: str | os.PathLike[str] | None = None,
    on: PlaceLike = None,
) -> VerifyReport:
    """Compare every byte of a checkpoint, or of all iterations of a root, with the manifest.

    With `health=True` it also looks for tensors that a healthy run does not have: with values that are not finite,
    second moments below zero, weights in bf16 or fp16 that are not the rounded fp32 weights of the optimizer, and
    copies in several files that differ. Files with checksums are read once for all of it; a weight that is not the
    rounded one, and a copy that differs, are read again. This takes buffers of 16 MiB, and 4 MiB for each thread, for
    any checkpoint.

    Args:
        path: anything that `reshard.open` opens; with `loads_in`, the folder of a model, an adapter or a pipeline.
        strategy: the strategy of rank folders, as in `reshard.open`.
        format: of a folder that holds checkpoints of several formats, which one is verified, as in `reshard.open`.
        health: look at the values of the tensors of each checkpoint without a fault.
        since: an older iteration of the root: list the floating-point tensors of the newest iteration, or of the one at
            `path`, that did not change since then, bit for bit. Such tensors are not wrong: whether a parameter is
            trained is not recorded; an optimizer has state for it or not. Implies `health`.
        may_be_infinite: with `health`, patterns of keys that hold infinities on purpose, such as masks, as in `Verify`.
        direct: read shard files past the page cache, if the file system allows it, so that the content of the disk is
            compared.
        threads: number of threads that read.
        progress: called as `progress(done_bytes, total_bytes)`.
        loads_in: also compare the names and shapes with those of the model that "transformers", "peft" or "diffusers"
            makes of the folder's config, without memory for its weights.
        base: for `loads_in="peft"`, the folder with the config.json of the base model. Default: what
            adapter_config.json names, a folder or a model in the cache of the Hub.
        on: where the shard files are compared: a `reshard.ray.Ray`, or `reshard.ranks.led.LedRanks`, all of which call
            this; not with `health`.

    Returns:
        All faults, and the files that could not be read, for example for lack of permission. Without a manifest only
        the structure is checked, and the result is not verified; but `.ckpt` files are compared with their CRC.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        StorageError: the system failed to list the root.
        UnsupportedError: the library of `loads_in` is not installed, or cannot make the model.
        ArgumentError: `since` is not an older iteration of the same root; an option belongs to one that is not given.

    Example:
        >>> import numpy as np, reshard
        >>> reshard.save_file({"w": np.eye(2)}, "w.safetensors")
        >>> report = reshard.verify("w.safetensors")
        >>> report.ok, report.checkpoints[0].verified
        (True, False)
        >>> for number, value in ((1, 0.5), (2, np.nan)):
        ...     _ = reshard.save("nan_run", number, {"w": np.array([1.0, value])})
        >>> report = reshard.verify("nan_run", health=True)
        >>> report.ok, report.healthy, [str(one) for one in report.checkpoints[0].health]
        (True, False, ['`w` holds 1 NaN; the first is at [1]'])
    """
    if on is not None and (health or since is not None):
        raise ArgumentError("`on` and `health` exclude each other: values are looked at by one process")
    if may_be_infinite and not health and since is None:
        raise ArgumentError("`may_be_infinite` belongs to `health`, which is not given")
    look = functools.partial(
        _verify,
        path,
        strategy=strategy,
        format=format,
        health=health,
        since=since,
        may_be_infinite=may_be_infinite,
        direct=direct,
        threads=threads,
        progress=progress,
        loads_in=loads_in,
        base=base,
        on=on,
    )
    lead = functools.partial(_until_found, look)
    return on.led(lead, _scrubbing, _Scrub, VerifyReport) if isinstance(on, LedRanks) else lead()


def _until_found(look: Callable[[], VerifyReport | None]) -> VerifyReport:
    """Look again if a job has removed all iterations meanwhile: it has saved newer ones before."""
    while True:
        report = look()
        if report is not None:
            return report


def _verify(
    path: str | os.PathLike[str],
    *,
    strategy: StrategyLike | None,
    format: str | None,  # noqa: A002
    health: bool,
    since: int | None,
    may_be_infinite: Patterns,
    direct: bool,
    threads: int | None,
    progress: Progress | None,
    loads_in: Library | None,
    base: str | os.PathLike[str] | None,
    on: Place | None,
) -> VerifyReport | None:
    """As `verify`. None: all iterations were removed meanwhile."""
    started = time.monotonic()
    target = published(locate(path))
    if base is not None and loads_in != "peft":
        raise ArgumentError('`base` belongs to `loads_in="peft"`, which is not given')
    parts = {} if loads_in is None else parts_of(target, loads_in)
    files = [file for part in parts.values() for file in part.files]
    asked = None
    if loads_in is not None:
        asked = compare_with(parts, loads_in, None if base is None else str(base))
    may_be = is_any_of(may_be_infinite, "may_be_infinite")
    # A format that is given is that of the folder itself, or the error of opening it says what it can be.
    warnings: tuple[str, ...] = ()
    jobs: Sequence[_CheckpointJob | _SaveJob] = [_CheckpointJob(target, strategy, is_given=True, of_format=format)]
    with target.store.remembering():
        found = None if format else opening.root_of(target, strategy=strategy)
    with found or contextlib.nullcontext() as root:
        saves = root.newest_first() if root is not None and root.is_ours else ()
        if isinstance(root, RankRoot):
            jobs = [_SaveJob(root, save) for save in saves] or jobs
        elif root is not None and root.is_ours:
            warnings = (*root.order.warnings, *root.ignored())
            jobs = [_CheckpointJob(root.place(one), None, is_given=False) for one in saves]
    if files and files != [target]:
        jobs = [_CheckpointJob(file, None, is_given=True) for file in files]
    if since is not None:
        _check_since(target, since, [job.path for job in jobs if isinstance(job, _CheckpointJob)])
    total, done = sum(job.n_bytes for job in jobs), 0

    def grow(n_bytes: int) -> None:
        nonlocal total
        total += n_bytes

    def advance(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        if progress is not None:
            progress(min(done, total), total)  # an iteration that was replaced meanwhile is compared again

    if not jobs:
        raise CheckpointNotFoundError(f"{show(str(target))} holds no iteration folder", path=str(target))
    is_divided = any(isinstance(job, _CheckpointJob) and job.manifest is not None for job in jobs)
    if on is not None and not is_divided and target.exists():
        raise UnsupportedError(
            f"{show(str(target))} has no manifest: `on` divides the files that a manifest lists between processes",
            path=str(target),
            hint="leave `on=` out",
        )
    meter = Meter(grow, advance)
    results = []
    for number, job in enumerate(jobs):
        sought = _HealthRequest(may_be, since if number == 0 else None) if health or since is not None else None
        scrub = functools.partial(scrub_folder if on is None else functools.partial(_scrub_on, on), direct=direct)
        results.append(job.run(meter, sought, functools.partial(scrub, threads=threads), threads=threads))
    checkpoints = tuple(one for one in results if one is not None)
    if not checkpoints:
        return None
    return VerifyReport(str(target), checkpoints, time.monotonic() - started, warnings, asked)


def _scrub_on(
    on: Place,
    folder: Location,
    manifest: Manifest,
    names: Collection[str] | None,
    *,
    direct: bool,
    values: None,
    threads: int | None,
    advance: Callable[[int], object],
) -> list[Fault]:
    """As `scrub_folder`, by the processes of a place: each compares as many bytes of the shard files."""
    del values  # nothing looks at them
    sizes = {
        name: size for name, size in manifest.sizes if name in manifest.shards and (names is None or name in names)
    }
    faults = scrub_plain(folder, manifest) if names is None else []
    if not sizes:
        return faults
    order, n_bytes = list(sizes), sum(sizes.values())
    n_shares = min(on.n_shares(n_bytes), sum(1 + size // MIN_CUT_BYTES for size in sizes.values()))
    own: list[dict[str, tuple[int, int]]] = [{} for _ in range(n_shares)]
    for ranges, parts in zip(own, cut([*sizes.values()], n_shares), strict=True):
        for part in parts:
            name = order[part.file]
            ranges[name] = _chunk_start(part.start, sizes[name]), _chunk_start(part.end, sizes[name])
    work = _scrubbing(_Scrub(str(folder.absolute()), manifest.digest, own, direct, threads or on.cpus))
    done = 0

    def report(done_bytes: int, _: int) -> None:
        nonlocal done
        advance(done_bytes - done)
        done = done_bytes

    try:
        results, _ = do_shares(on, work, n_shares, n_bytes, report)
    except CheckpointNotFoundError as error:
        if not folder.exists():  # a job has removed it
            raise
        raise GroupError(error.message, hint=error.hint) from None
    by_file: dict[str | None, list[Fault]] = {}
    for fault in (one for share in results for one in share):
        by_file.setdefault(fault.file, []).append(fault)
    for file, found in by_file.items():
        if file in sizes or not any(one.file == file for one in faults):
            faults += joined_faults(found)
    return faults


def _chunk_start(at: int, n_bytes: int) -> int:
    """Where the chunk of a byte of a file begins; the end of the file is that of the last chunk."""
    return at if at == n_bytes else at // manifests.CHUNK_BYTES * manifests.CHUNK_BYTES


@dataclass(frozen=True)
class _Scrub:
    """Files that several processes compare with the manifest that one of them has read.

    Attributes:
        path: the folder.
        digest: that of the manifest.
        own: the files of each share, and the first byte and the end of what it compares of each.
        direct: as in `verify`.
        threads: of each process.
    """

    path: str
    digest: str
    own: list[dict[str, tuple[int, int]]]
    direct: bool
    threads: int | None


def _scrubbing(sent: _Scrub) -> Work[_Scrub]:
    return Work(_sent_scrub, sent, list[Fault])


def _sent_scrub(sent: _Scrub, index: int) -> tuple[int, list[Fault]]:
    """Compare the files of a share, or its ranges of them."""
    folder = locate(sent.path)
    manifest = manifests.read(folder)
    if manifest.digest != sent.digest:
        raise MismatchError(
            f"{show(sent.path)} holds another save here than where the comparison began", path=sent.path
        )
    own = sent.own[index]
    faults = scrub_folder(folder, manifest, own, within=own, direct=sent.direct, threads=sent.threads)
    return sum(end - start for start, end in own.values()), faults


def _check_since(target: Location, since: int, folders: Sequence[Location]) -> None:
    """Refuse an iteration that is no older one of the same root."""
    newest = next((number for one in folders[:1] if (number := parse_iteration_folder(one.name)) is not None), None)
    if newest is None:
        raise ArgumentError(
            f"`since` is an iteration of a checkpoint root, and {show(str(target))} is neither one nor in one",
            hint="compare two other checkpoints with `reshard diff`",
        )
    if since >= newest:
        raise ArgumentError(f"`since` is {since}, which is not older than iteration {newest}")
    if since not in dict(list_iterations(folders[0].parent)):
        raise CheckpointNotFoundError(
            f"`since` is {since}, but {show(str(folders[0].parent))} has no such iteration",
            path=str(folders[0].parent),
            hint="`reshard inspect` lists those that it has",
        )


class _HealthRequest(NamedTuple):
    """What is looked at in a checkpoint besides damage.

    Attributes:
        may_be_infinite: whether infinities of a tensor are intended.
        since: the older iteration that it is compared with, or None.
    """

    may_be_infinite: Callable[[str], bool]
    since: int | None

    def findings(
        self, opened: Checkpoint, checks: HealthChecks | None, threads: int | None, meter: Meter
    ) -> tuple[HealthFinding, ...]:
        """All findings of a checkpoint without faults; `checks` are those made of its files, if they have checksums."""
        counts = healths.read_counts(opened, threads, meter) if checks is None else checks.found(opened)
        found = healths.wrong_values(opened, counts, self.may_be_infinite)
        found += healths.rounding(opened, checks, threads, meter)
        found += healths.replicas(opened, checks, threads, meter)
        if self.since is not None:
            root = locate(opened.path).parent
            with opening.open(root / dict(list_iterations(root))[self.since]) as older:
                found += healths.unchanged(opened, older, threads, meter)
        return tuple(found)


class _CheckpointJob:
    """One checkpoint. Its manifest is read by the constructor, so that the total number of bytes is known."""

    def __init__(
        self, path: Location, strategy: StrategyLike | None, *, is_given: bool, of_format: str | None = None
    ) -> None:
        self.path = path
        self.of_format = of_format
        self.strategy = strategy
        self.is_given = is_given  # False: found in a root
        self.faults: list[Fault] = []
        self.manifest: Manifest | None = None
        self.names: list[str] = []
        self._read_manifest()

    def _read_manifest(self) -> None:
        self.manifest, self.names = None, []
        path = self.path
        with path.store.remembering():
            folder = path if path.is_folder() else path.parent
            try:
                manifest = manifests.read(folder)
            except ReshardError:
                return  # opening it reports the error
        if path.is_folder():
            self.manifest, self.names = manifest, list(manifest.shards)
        elif path.name in manifest.shards:
            self.manifest, self.names = manifest, [path.name]

    @property
    def n_bytes(self) -> int:
        if self.manifest is None:
            return 0
        return sum(self.manifest.shards[name].n_bytes for name in self.names)

    def run(
        self, meter: Meter, sought: _HealthRequest | None, scrub: Callable[..., list[Fault]], *, threads: int | None
    ) -> VerifiedCheckpoint | None:
        """Compare the files; None: a job has removed the iteration since it was found."""
        folder = self.path if self.path.is_folder() else self.path.parent
        try:
            for n_left in reversed(range(_MAX_TRIES)):
                with (
                    folder.store.remembering(contents=True),
                    contextlib.nullcontext() if self.manifest is None else manifests.read_lock(folder) as lock,
                ):
                    if lock is not None:
                        self._read_manifest()  # the iteration may have been saved again since
                    result = self._compare(lock, meter, sought, scrub, threads=threads)
                    if lock is None or n_left == 0 or lock.is_current():
                        break
        except CheckpointNotFoundError:
            if self.is_given:
                raise
            return None
        return result if self.is_given or not result.faults or self.path.exists() else None

    def _compare(
        self,
        lock: Lock | None,
        meter: Meter,
        sought: _HealthRequest | None,
        scrub: Callable[..., list[Fault]],
        *,
        threads: int | None,
    ) -> VerifiedCheckpoint:
        self.faults = []
        health: tuple[HealthFinding, ...] | None = None
        left_out: LeftOut | None = None
        checks = None if sought is None or self.manifest is None else self._health_checks(self.manifest)
        n_files = n_bytes = 0
        before: str | None = None
        not_recorded: str | None = None
        if self.manifest is not None:
            folder = self.path if self.path.is_folder() else self.path.parent
            if parse_iteration_folder(self.path.name) is not None:
                try:
                    before = proofs.state_of(folder, self.manifest)
                except ReshardError as error:
                    not_recorded = error.message
            names = None if self.path.is_folder() else self.names
            self.faults += scrub(
                folder, self.manifest, names, values=None if checks is None else checks.values, advance=meter.advance
            )
            unread = {fault.file for fault in self.faults if not fault.is_damage}
            sizes = [
                size for name, size in self.manifest.sizes if name not in unread and (names is None or name in names)
            ]
            n_files, n_bytes = len(sizes), sum(sizes)
        iteration = None if self.manifest is None else self.manifest.iteration
        is_compared = self.manifest is not None
        if not self.faults:
            # The bytes are correct. Opening checks that the files form a checkpoint.
            try:
                with opening.open(self.path, strategy=self.strategy, format=self.of_format) as opened:
                    iteration = opened.iteration
                    opened.data.check_files()
                    with contextlib.suppress(ReshardError):  # of a state that a later release wrote
                        left_out = LeftOut.of_checkpoint(opened)
                    if self.manifest is None:
                        compared, faults = own_sums(opened._index)  # noqa: SLF001  as `scrub`, file by file
                        self.faults += faults
                        n_files, n_bytes = len(compared), sum(compared)
                        is_compared = n_files == len(opened.files())
                    if sought is not None and not self.faults:
                        health = sought.findings(opened, checks, threads, meter)
            except ReshardError as error:
                if isinstance(error, CheckpointNotFoundError | ArgumentError) and self.is_given:
                    raise
                name = None if error.path in (None, str(self.path)) else locate(str(error.path)).name
                self.faults.append(fault_of(error, name))
        state = _state(self.faults, is_compared=is_compared)
        is_current = lock is None or lock.is_current()  # else the folder holds another save now
        if self.manifest is not None and before is not None and state in ("whole", "damaged") and is_current:
            not_recorded = self._record(self.manifest, before)
        return VerifiedCheckpoint(
            str(self.path),
            iteration,
            state == "whole",
            n_files,
            n_bytes,
            tuple(self.faults),
            state,
            not_recorded,
            None if self.faults else health,
            None if self.faults or left_out is None else left_out.to_text(),
        )

    def _health_checks(self, manifest: Manifest) -> HealthChecks | None:
        """The checks of values that are made while the files are compared; None: they cannot be opened."""
        try:
            with opening.open(self.path, strategy=self.strategy) as opened:
                return HealthChecks.of(opened, {name: manifest.shards[name].header_bytes for name in self.names})
        except ReshardError:
            return None  # opening it again reports the error

    def _record(self, manifest: Manifest, before: str) -> str | None:
        """Record the result; returns why it cannot be recorded, or None."""
        first = next((fault for fault in self.faults if fault.is_damage), None)
        try:
            proofs.write(self.path, manifest, before, None if first is None else str(first))
        except ReshardError as error:
            return error.message
        return None


class _SaveJob:
    """One save in rank folders: the CRC of each file and the digests of its state are compared; then all are opened."""

    n_bytes = 0

    def __init__(self, root: RankRoot, save: Candidate) -> None:
        self.root, self.save = root, save

    def run(
        self, meter: Meter, sought: _HealthRequest | None, scrub: Callable[..., list[Fault]], *, threads: int | None
    ) -> VerifiedCheckpoint | None:
        """Compare the files; None: a job has removed the save since it was found."""
        del scrub  # there are no checksums beside the files
        health: tuple[HealthFinding, ...] | None = None
        files = self.root.files(self.save)
        compared, faults = self.root.compare(self.save)
        iteration = None
        if not faults:
            try:
                with Checkpoint(self.root.open(self.save)) as opened:
                    iteration = opened.iteration
                    if sought is not None:
                        health = sought.findings(opened, None, threads, meter)
            except ReshardError as error:
                faults.append(fault_of(error, None))
        if faults and self.save.fault is None and not all(one.exists() for one in files.values()):
            return None
        state = _state(faults, is_compared=len(compared) == len(files))
        return VerifiedCheckpoint(
            str(self.root.place(self.save)),
            iteration,
            state == "whole",
            len(compared),
            sum(compared),
            tuple(faults),
            state,
            health=None if faults else health,
        )


def _state(faults: Sequence[Fault], *, is_compared: bool) -> State:
    if faults:
        return "damaged" if any(fault.is_damage for fault in faults) else "unreadable"
    return "whole" if is_compared else "structure"
