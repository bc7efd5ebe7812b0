"""Proof of everything: every byte of every file of a checkpoint against its manifest, past the page cache.

Unlike opening, which stops at the first fault, this goes on and names them all. Where there is no manifest, the
structure is all that can be checked, and the report says so. Nothing is repaired or removed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from reshard import _core, opening
from reshard.arguments import checked
from reshard.errors import CheckpointNotFoundError, DamagedFileError, ReshardError
from reshard.formats import manifest as manifests
from reshard.formats.rank_file import add_rank_file
from reshard.formats.scrub import scrub_file
from reshard.small_files import show

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from reshard.formats.manifest import Manifest
    from reshard.opening import RankSave, StrategyLike

__all__ = ["Fault", "VerifiedCheckpoint", "VerifyReport", "verify"]


@dataclass(frozen=True)
class Fault:
    """Something that is not as it should be.

    Attributes:
        file: name of the file, or None where it is about the folder.
        message: what is wrong.
        begin: of bytes that differ in a shard file, the first, counted from the start of the file; else None.
        end: the byte after the last.
        tensors: names of the stored tensors that have bytes in there.
    """

    file: str | None
    message: str
    begin: int | None = None
    end: int | None = None
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """What was found out about one checkpoint.

    Attributes:
        path: its folder or file; in rank folders the first rank's file.
        iteration: its number, or None.
        verified: whether every byte was compared: there is a manifest, or each file is a `.ckpt` with a CRC.
        n_files: files that were compared.
        n_bytes: their bytes.
        faults: what is wrong; nothing if it is whole.
    """

    path: str
    iteration: int | None
    verified: bool
    n_files: int
    n_bytes: int
    faults: tuple[Fault, ...]


@dataclass(frozen=True)
class VerifyReport:
    """What was found out.

    Attributes:
        path: what was verified.
        checkpoints: of a root every iteration, newest first; of rank folders every save, in the order in which they
            are tried; else the one.
        seconds: how long it took.
    """

    path: str
    checkpoints: tuple[VerifiedCheckpoint, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong anywhere. What has no manifest counts as right if its structure is."""
        return not any(one.faults for one in self.checkpoints)

    @property
    def n_bytes(self) -> int:
        """Bytes that were compared."""
        return sum(one.n_bytes for one in self.checkpoints)


@checked
def verify(
    path: str | os.PathLike[str],
    *,
    strategy: StrategyLike | None = None,
    direct: bool = True,
    threads: int | None = None,
    progress: _core.Progress | None = None,
) -> VerifyReport:
    """Compare every byte of a checkpoint, or of all iterations of a root, with the manifest.

    Args:
        path: anything that `reshard.open` opens.
        strategy: of rank folders, how they make up whole tensors: as in `reshard.open`.
        direct: read shard files past the page cache, where the file system allows it: what the disk holds is proven.
        threads: threads that read.
        progress: called as `progress(done_bytes, total_bytes)`.

    Returns:
        All faults. What has no manifest is checked in its structure and marked as not verified; but `.ckpt` files with
        a CRC are compared with that.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        StorageError: the root cannot be listed.

    Example:
        >>> import numpy as np, reshard
        >>> reshard.save_file({"w": np.eye(2)}, "w.safetensors")
        >>> report = reshard.verify("w.safetensors")
        >>> report.ok, report.checkpoints[0].verified
        (True, False)
    """
    started = time.monotonic()
    target = Path(path)
    order, saves = opening.iterations(target), opening.rank_saves(target)
    jobs: Sequence[_Job | _SaveJob]
    if saves:
        known = opening.strategy_for(target, strategy)
        jobs = [_SaveJob(target, save, known) for save in saves]
    elif order is not None:
        found = sorted((*order.candidates, *order.refused), key=lambda one: -one.iteration)
        jobs = [_Job(target / one.name, None, is_given=False) for one in found]
    else:
        jobs = [_Job(target, strategy, is_given=True)]
    total, done = sum(job.n_bytes for job in jobs), 0

    def advance(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        if progress is not None:
            progress(done, total)

    checkpoints = tuple(job.run(advance, direct=direct, threads=threads) for job in jobs)
    if not checkpoints:
        raise CheckpointNotFoundError(f"{show(str(target))} holds no iteration folder", path=str(target))
    return VerifyReport(str(target), checkpoints, time.monotonic() - started)


class _Job:
    """One checkpoint: its manifest is read at once, so that the bytes of all are known before the first is read."""

    def __init__(self, path: Path, strategy: StrategyLike | None, *, is_given: bool) -> None:
        self.path = path
        self.strategy = strategy
        self.is_given = is_given  # and not found in a root
        self.faults: list[Fault] = []
        self.manifest: Manifest | None = None
        self.names: list[str] = []
        folder = path if path.is_dir() else path.parent
        try:
            manifest = manifests.read(folder)
        except ReshardError:
            return  # opening says what that means
        if path.is_dir():
            self.manifest, self.names = manifest, list(manifest.shards)
        elif path.name in manifest.shards:
            self.manifest, self.names = manifest, [path.name]

    @property
    def n_bytes(self) -> int:
        if self.manifest is None:
            return 0
        return sum(self.manifest.shards[name].n_bytes for name in self.names)

    def run(self, advance: Callable[[int], None], *, direct: bool, threads: int | None) -> VerifiedCheckpoint:
        n_files = 0
        n_bytes = self.n_bytes
        if self.manifest is not None:
            folder = self.path if self.path.is_dir() else self.path.parent
            if self.path.is_dir():
                self._plain_files(folder, self.manifest)
                n_files = len(self.manifest.files)
                n_bytes += sum(entry.n_bytes for entry in self.manifest.files.values())
            for shard in self.names:
                self._shard_file(folder, self.manifest, shard, advance, direct=direct, threads=threads)
            n_files += len(self.names)
        iteration = None if self.manifest is None else self.manifest.iteration
        is_verified = self.manifest is not None
        if not self.faults:
            # The files are what they were; whether together they are a checkpoint is told by opening them.
            try:
                with opening.open(self.path, strategy=self.strategy) as opened:
                    iteration = opened.iteration
                    if self.manifest is None:
                        proven = self._own_sums(opened._index)  # noqa: SLF001  what `scrub` does, told file by file
                        n_files, n_bytes = len(proven), sum(proven)
                        is_verified = n_files == len(opened.files())
            except ReshardError as error:
                if isinstance(error, CheckpointNotFoundError) and self.is_given:
                    raise
                name = None if error.path in (None, str(self.path)) else Path(str(error.path)).name
                self.faults.append(Fault(name, error.message, tensors=() if error.key is None else (error.key,)))
        return VerifiedCheckpoint(str(self.path), iteration, is_verified, n_files, n_bytes, tuple(self.faults))

    def _own_sums(self, index: _core.Index) -> list[int]:
        """Compare files that have a sum of their own, `.ckpt` with a CRC; the sizes of those."""
        proven = []
        for file in range(index.n_files):
            try:
                if index.prove_file(file):
                    proven.append(index.file_bytes(file))
            except DamagedFileError as error:
                self.faults.append(Fault(Path(index.file_path(file)).name, error.message))
        return proven

    def _plain_files(self, folder: Path, manifest: Manifest) -> None:
        for name, entry in manifest.files.items():
            try:
                manifests.read_plain(folder, manifest, name, entry.n_bytes)
            except ReshardError as error:
                self.faults.append(Fault(name, error.message))

    def _shard_file(
        self,
        folder: Path,
        manifest: Manifest,
        name: str,
        advance: Callable[[int], None],
        *,
        direct: bool,
        threads: int | None,
    ) -> None:
        told = 0

        def tell(done_bytes: int, _: int) -> None:
            nonlocal told
            advance(done_bytes - told)
            told = done_bytes

        try:
            sums = manifests.read_sums(folder, manifest, [name])[name]
            for damage in scrub_file(folder, manifest, name, sums, direct=direct, threads=threads, progress=tell):
                self.faults.append(Fault(name, str(damage), damage.begin, damage.end, damage.tensors))
        except ReshardError as error:
            about = manifests.CHECKSUMS_FILE if str(error.path).endswith(manifests.CHECKSUMS_FILE) else name
            if about == name or not any(fault.file == about for fault in self.faults):
                self.faults.append(Fault(about, error.message))
        advance(manifest.shards[name].n_bytes - told)


class _SaveJob:
    """One save in rank folders: every file is opened and compared with its CRC, if it has one, then all together."""

    n_bytes = 0

    def __init__(self, root: Path, save: RankSave, strategy: StrategyLike | None) -> None:
        self.root, self.save, self.strategy = root, save, strategy

    def run(self, advance: Callable[[int], None], *, direct: bool, threads: int | None) -> VerifiedCheckpoint:
        del advance, direct, threads  # no sums are kept beside the files
        faults: list[Fault] = []
        proven: list[int] = []
        for path in self.save.files.values():
            index = _core.Index()
            try:
                file = add_rank_file(index, path).file
                if index.prove_file(file):
                    proven.append(index.file_bytes(file))
            except ReshardError as error:
                faults.append(Fault(str(path.relative_to(self.root)), error.message))
            index.close()
        iteration = None
        if not faults:
            try:
                with opening.open_rank_files(self.root, self.save.files, self.strategy) as opened:
                    iteration = opened.iteration
            except ReshardError as error:
                faults.append(Fault(None, error.message, tensors=() if error.key is None else (error.key,)))
        files = list(self.save.files.values())
        is_verified = len(proven) == len(files)
        return VerifiedCheckpoint(str(files[0]), iteration, is_verified, len(proven), sum(proven), tuple(faults))
