"""What one rank does in a Checkpoint 1.0 save: look what is in its folder, write its files, make them count, tidy up.

Names and who keeps what are decided by `rank_plan`; when each of these steps comes, by `checkpoint1`.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from reshard import _core, dtypes
from reshard.errors import CheckpointNotFoundError, ReshardError
from reshard.formats import counter_tensors
from reshard.formats.checkpoint1 import names as checkpoint1
from reshard.formats.checkpoint1 import save_plan as rank_plan
from reshard.formats.checkpoint1 import state as checkpoint1_state
from reshard.formats.checkpoint1.names import Meta, rank_folder_name
from reshard.storage import filesystem, protocol
from reshard.storage.changes import remove_file
from reshard.storage.location import locate
from reshard.words import show
from reshard.write.arrays import local_arrays
from reshard.write.collective_save import read_back
from reshard.write.iteration import JointProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from reshard.formats.checkpoint1.names import FileKind, FileName
    from reshard.formats.checkpoint1.save_plan import Naming, RankView
    from reshard.formats.checkpoint1.strategies import Strategies
    from reshard.group import Group
    from reshard.write.arrays import LocalArray
    from reshard.write.collective_save import Own, Terms
    from reshard.write.replicas import Copies, State
    from reshard.write.shard_files import ShardFile

__all__ = ["RankSide", "Row", "arrays_by_kind", "folder_of", "look", "n_bytes_of"]

_WEIGHTS_MODE = 0o444  # weights are read-only, as the original's are

_ROOTS: dict[FileKind, str] = {"full": "", "network": "_network", "trainable": "_trainable"}

Row = tuple[str, int, str]
"""Name, size and digest of a file that was written."""


def folder_of(root: Path, rank: int, kind: FileKind = "full") -> Path:
    """Where a rank's files of a kind lie.

    Example:
        >>> import pathlib
        >>> str(folder_of(pathlib.Path("output/checkpoint"), 3, "network"))
        'output/checkpoint_network/rank_3'
    """
    return root.with_name(root.name + _ROOTS[kind]) / rank_folder_name(rank)


def look(root: Path, rank: int, n_ranks: int, prefix: str, at: tuple[int, int]) -> RankView:
    """What a rank finds in its folders before a save.

    Args:
        root: the checkpoint root.
        rank: this rank.
        n_ranks: ranks of this world.
        prefix: of the names to be.
        at: their epoch and step.

    Raises:
        StorageError: a folder cannot be listed.
    """
    files: list[FileName] = []
    for kind in _ROOTS:
        with contextlib.suppress(CheckpointNotFoundError):
            files += checkpoint1.list_files(folder_of(root, rank, kind), None)
    folder = folder_of(root, rank)
    try:
        checkpoint1.read_meta(folder)
        has_meta = True
    except ReshardError:
        has_meta = False
    return rank_plan.view_of(
        files,
        prefix,
        at,
        has_folder=locate(folder).is_folder(),
        has_meta=has_meta,
        has_more=locate(root / rank_folder_name(n_ranks)).is_folder(),
    )


def arrays_by_kind(
    own: Own, naming: Naming, left_out: set[str], *, network: bool, trainable: frozenset[str] | None
) -> dict[FileKind, list[LocalArray]]:
    """What stands in each file of this rank, the one that counts first.

    Args:
        own: what it brings along. A counter that it gave as a tensor is that; others are made of `own.common`.
        naming: says the epoch, where `own.common` does not.
        left_out: what another rank keeps.
        network: whether the weights are saved by themselves.
        trainable: names of those that are trained, if these are; None: they are not.
    """
    common = own.common if own.common.epoch_num is not None else replace(own.common, epoch_num=naming.epoch)
    counters = {name: array for name, array in counter_tensors.arrays_of(common).items() if name not in own.arrays}
    arrays = [array for name, array in own.arrays.items() if name not in left_out]
    weights = [array for array in arrays if array.part == "model"]
    found: dict[FileKind, list[LocalArray]] = {"full": [*arrays, *local_arrays(None, counters).values()]}
    if network:
        found["network"] = weights
    if trainable is not None:
        found["trainable"] = [array for array in weights if array.name in trainable]
    # Wide elements first, so that every tensor begins on a multiple of its element.
    return {
        kind: sorted(of_kind, key=lambda array: (-dtypes.bits(array.dtype), array.name))
        for kind, of_kind in found.items()
    }


def n_bytes_of(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> int:
    """Bytes of arrays, given dtype and shape of each.

    Example:
        >>> n_bytes_of([("F32", (2, 3)), ("BF16", ())])
        26
    """
    return sum(math.prod(shape) * dtypes.bits(dtype) // 8 for dtype, shape in shapes)


@dataclass(eq=False)
class RankSide:
    """One rank's side of one save.

    Attributes:
        terms: how.
        rank: this one.
        naming: what files are called.
        files: its files by kind, ready to be written, or the exception in which making them ended.
        copies: what it holds copies of; and its state.
        strategy: what it writes of how tensors are cut; None: nothing.
    """

    terms: Terms
    rank: int
    naming: Naming
    files: Mapping[FileKind, ShardFile] | BaseException
    copies: Copies
    strategy: Strategies | None
    _made: list[Path] = field(default_factory=list)
    _state: State | BaseException = None

    @property
    def file(self) -> FileName:
        """The file that counts."""
        return self.naming.file(self.rank)

    def settle(self, channel: Group) -> None:
        """Compare copies, all ranks together, before anything is written. Raises as `Copies.settle`."""
        self._state = self.copies.settle(channel, self.terms.timeout)

    def write(self, progress: _core.Progress | None) -> list[Row]:
        """Write everything but `meta.json`, and have it on the disk.

        Raises:
            ReshardError: a name is taken, or the system failed.
        """
        if isinstance(self.files, BaseException):
            raise self.files
        if isinstance(self._state, BaseException):
            raise self._state
        joint = JointProgress(progress, sum(file.n_bytes for file in self.files.values()))
        rows: list[Row] = []
        for kind, file in self.files.items():
            folder = folder_of(self.terms.root, self.rank, kind)
            protocol.make_root(folder, self.terms.folder_mode, durable=self.terms.durable)
            _sweep(folder, self.file)
            rows.append(self._write_weights(folder / file.name, file, joint.of_file(file.n_bytes)))
        if self.files and self._state is not None:
            self._write_state(*self._state)
        if self.strategy is not None:
            self.strategy.write(self.terms.file_mode, self.terms.folder_mode, durable=self.terms.durable)
        return rows

    def _write_weights(self, path: Path, file: ShardFile, progress: Callable[[int, int], object] | None) -> Row:
        self._begin(path)
        written = file.write(
            str(path), durable=self.terms.durable, mode=self.terms.file_mode & _WEIGHTS_MODE, progress=progress
        )
        if self.terms.verify:
            read_back(str(path), written, self.terms.threads)
        told = hashlib.blake2b(
            written.header_checksum.to_bytes(4, "little") + written.checksums, digest_size=16
        ).hexdigest()
        return f"{path.parent.parent.name}/{path.parent.name}/{path.name}", written.n_bytes, told

    def _write_state(self, text: str, arrays: Mapping[str, object]) -> None:
        folder = folder_of(self.terms.root, self.rank)
        if arrays:
            path = folder / checkpoint1_state.arrays_file_name(self.file)
            own = [(one.name, one.dtype, one.shape, one.buffer()) for one in local_arrays(arrays, None).values()]
            self._begin(path)
            _core.write_arrays(str(path), own, durable=self.terms.durable, mode=self.terms.file_mode)
        path = folder / checkpoint1_state.file_name(self.file)
        self._begin(path)
        locate(path).replace(text, self.terms.file_mode, durable=self.terms.durable)

    def _begin(self, path: Path) -> None:
        """Refuse a name that is taken: what stands under it is of another save."""
        filesystem.announce(f"write {path.name}")
        if locate(path).exists():
            raise ReshardError(
                f"{show(str(path))} has appeared since this save began",
                path=str(path),
                hint="does another job save here?",
            )
        self._made.append(path)

    def withdraw(self) -> None:
        """Leave nothing of a save that all know to have failed. Never raises."""
        for path in self._made:
            remove_file(path)

    def make_count(self) -> None:
        """Write `meta.json`: a restart may take this save from now on. Raises StorageError."""
        filesystem.announce(f"write {checkpoint1.META_FILE} of rank {self.rank}")
        folder, meta = folder_of(self.terms.root, self.rank), Meta(self.file.epoch, self.file.step, self.file.name)
        try:
            checkpoint1.write_meta(folder, meta, self.terms.file_mode, durable=self.terms.durable)
        except ReshardError as error:
            # Nothing is taken back: other ranks may have told by now, and the files are whole.
            error.message = f"all files are written, but it is not told that the save is complete: {error.message}"
            raise

    def remove(self, outdated: Iterable[tuple[int, int]]) -> list[str]:
        """Remove this rank's files of older saves; what failed."""
        warnings = []
        for epoch, step in outdated:
            old = replace(self.naming, epoch=epoch, step=step).file(self.rank)
            for kind in _ROOTS:
                folder = folder_of(self.terms.root, self.rank, kind)
                names = [replace(old, kind=kind).name]
                if kind == "full":
                    names += [checkpoint1_state.file_name(old), checkpoint1_state.arrays_file_name(old)]
                for name in names:
                    try:
                        filesystem.remove_file(folder / name)
                    except ReshardError as error:
                        warnings.append(f"an older file is not removed: {error}")
        return warnings


def _sweep(folder: Path, file: FileName) -> None:
    """Remove what a writer that was killed has left half-written, under hidden names: the root is ours alone."""
    weights = rf"{re.escape(file.prefix)}_rank_{file.rank}[-_].*"
    debris = re.compile(rf"\.(?:{weights}|{re.escape(checkpoint1.META_FILE)}\..*)\.tmp")
    for name in filesystem.names(folder):
        if debris.fullmatch(name):
            with contextlib.suppress(ReshardError):
                filesystem.remove_file(folder / name)
