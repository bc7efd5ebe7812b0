"""What one rank does in a Checkpoint 1.0 save: look into its folder, write its files, write `meta.json`, remove files.

Names, and who keeps what, are decided by `save_plan`; the order of these steps is that of `save`.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from reshard import _core, dtypes
from reshard.commit import filesystem, folder_protocol
from reshard.errors import CheckpointNotFoundError, ReshardError
from reshard.formats import counter_tensors
from reshard.formats.checkpoint1 import names as checkpoint1
from reshard.formats.checkpoint1 import save_plan as rank_plan
from reshard.formats.checkpoint1 import state as checkpoint1_state
from reshard.formats.checkpoint1.names import Meta, rank_folder_name
from reshard.formats.outputs import load_all
from reshard.storage.changes import remove_file
from reshard.storage.location import Location, locate
from reshard.values.words import show
from reshard.write.arrays import LocalArrays, local_arrays
from reshard.write.contents import JointProgress
from reshard.write.shard_files import WrittenFile, read_back

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy as np

    from reshard.documents.common_info import CommonInfo
    from reshard.formats.checkpoint1.names import FileKind, FileName
    from reshard.formats.checkpoint1.save_plan import FolderView, Naming
    from reshard.formats.checkpoint1.strategies import Strategies
    from reshard.write.arrays import LocalArray
    from reshard.write.phases import SaveTask
    from reshard.write.replicas import State
    from reshard.write.shard_files import ShardFile

_WEIGHTS_MODE = 0o444  # weights are read-only, as those of MindSpore Transformers

_ROOTS: dict[FileKind, str] = {"full": "", "network": "_network", "trainable": "_trainable"}


@dataclass(frozen=True)
class WrittenWeights:
    """A file of weights that was written.

    Attributes:
        name: its name.
        n_bytes: its size.
        digest: of its content.
        not_finite: names of its arrays with values that are not finite, and the worst one.
    """

    name: str
    n_bytes: int
    digest: str
    not_finite: tuple[tuple[str, _core.NotFinite], ...] = ()


def folder_of(root: Location, rank: int, kind: FileKind = "full") -> Location:
    """The folder of a rank's files of a kind.

    Args:
        root: the checkpoint root.
        rank: the rank.
        kind: all tensors, the weights of the network, or the trained weights alone.

    Example:
        >>> import pathlib
        >>> str(folder_of(pathlib.Path("output/checkpoint"), 3, "network"))
        'output/checkpoint_network/rank_3'
    """
    return root.with_name(root.name + _ROOTS[kind]) / rank_folder_name(rank)


def look(root: Location, rank: int, n_ranks: int, prefix: str, at: tuple[int, int]) -> FolderView:
    """Look into the folders of a rank before a save.

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
    own: LocalArrays,
    common: CommonInfo,
    naming: Naming,
    left_out: set[str],
    *,
    network: bool,
    trainable: frozenset[str] | None,
) -> dict[FileKind, LocalArrays]:
    """The arrays in each file of this rank; the file of all arrays first.

    Args:
        own: what this rank holds. A counter that it gave as a tensor is kept.
        common: the other counters.
        naming: gives the epoch, where `common` does not.
        left_out: what another rank keeps.
        network: whether the weights are saved a second time by themselves.
        trainable: names of the weights that are trained, to be saved by themselves; None: they are not.
    """
    if common.epoch_num is None:
        common = replace(common, epoch_num=naming.epoch)
    counters = {name: array for name, array in counter_tensors.arrays_of(common).items() if name not in own}
    arrays = [array for name, array in own.items() if name not in left_out]
    weights = [array for array in arrays if array.part == "model"]
    found: dict[FileKind, list[LocalArray]] = {"full": [*arrays, *local_arrays(None, counters).values()]}
    if network:
        found["network"] = weights
    if trainable is not None:
        found["trainable"] = [array for array in weights if array.name in trainable]
    return {
        kind: LocalArrays.of(sorted(of_kind, key=lambda array: dtypes.file_order(array.name, array.dtype)))
        for kind, of_kind in found.items()
    }


@dataclass(eq=False)
class RankSide:
    """What one rank does with its files in one save.

    Attributes:
        task: the save.
        rank: this one.
        naming: what files are called.
        counters: names of counters that the caller gave as tensors.
        save: the id of the save, if it has state files; None: it has none.
        files: its files by kind, ready to be written.
    """

    task: SaveTask
    rank: int
    naming: Naming
    counters: Sequence[str] = ()
    save: str | None = None
    files: dict[FileKind, ShardFile] = field(default_factory=dict)
    _made: list[Location] = field(default_factory=list)

    @property
    def file(self) -> FileName:
        """The file from which a restart resumes."""
        return self.naming.file(self.rank)

    def write(
        self, state: State, strategy: Strategies | None, *, reads_back: bool, progress: _core.Progress | None
    ) -> tuple[WrittenWeights, ...]:
        """Write and sync everything but `meta.json`.

        Args:
            state: text and arrays of the state files; None: this rank has no state.
            strategy: what this rank writes of how tensors are partitioned; None: nothing.
            reads_back: whether the files are read back.
            progress: called as `progress(done_bytes, total_bytes)`.

        Raises:
            ReshardError: a file of that name exists, or the system failed.
        """
        task = self.task
        joint = JointProgress(progress, sum(file.n_bytes for file in self.files.values()))
        written = []
        for kind, file in self.files.items():
            folder = folder_of(task.root, self.rank, kind)
            folder_protocol.make_root(folder, task.folder_mode, durable=task.durable)
            _sweep(folder, self.file)
            written.append(self._write_weights(folder / file.name, file, joint.of_file(file.n_bytes), reads_back))
        if self.files and self.save is not None:
            self._write_state(*(state or checkpoint1_state.dump({}, {})), self.save)
        if strategy is not None:
            strategy.write(task.file_mode, task.folder_mode, durable=task.durable)
        return tuple(written)

    def _write_weights(
        self,
        path: Location,
        file: ShardFile,
        progress: Callable[[int, int], object] | None,
        reads_back: bool,  # noqa: FBT001
    ) -> WrittenWeights:
        self._begin(path)
        task = self.task
        written = file.write(str(path), durable=task.durable, mode=task.file_mode & _WEIGHTS_MODE, progress=progress)
        if reads_back:
            read_back(str(path), written, task.options.threads)
        if path.name == self.file.name:
            _check_counters(path, self.counters)
        digest = hashlib.blake2b(
            written.header_checksum.to_bytes(4, "little") + written.checksums, digest_size=16
        ).hexdigest()
        name = f"{path.parent.parent.name}/{path.parent.name}/{path.name}"
        return WrittenWeights(name, written.n_bytes, digest, WrittenFile.of(written).not_finite)

    def _write_state(self, text: str, arrays: Mapping[str, np.ndarray], save: str) -> None:
        folder, task = folder_of(self.task.root, self.rank), self.task
        if arrays:
            path = folder / checkpoint1_state.arrays_file_name(self.file)
            self._begin(path)
            tensors = local_arrays(arrays, None).tensors()
            _core.write_arrays(str(path), tensors, durable=task.durable, mode=task.file_mode)
        path = folder / checkpoint1_state.file_name(self.file)
        self._begin(path)
        content = checkpoint1_state.file_text(text, arrays, save)
        locate(path).replace(content, task.file_mode, durable=task.durable)

    def _begin(self, path: Location) -> None:
        """Refuse a name that exists: the file is of another save."""
        filesystem.announce(f"write {path.name}")
        if path.exists():
            raise ReshardError(
                f"{show(str(path))} has appeared since this save began",
                path=str(path),
                hint="does another job save here?",
            )
        self._made.append(path)

    def withdraw(self) -> None:
        """Remove the files of a save that has failed on all ranks; not once it is confirmed. Never raises."""
        for path in self._made:
            remove_file(path)

    def confirm(self) -> None:
        """Write `meta.json`: a restart may take this save from now on. Raises StorageError."""
        self._made.clear()  # other ranks may confirm even if this one fails
        filesystem.announce(f"write {checkpoint1.META_FILE} of rank {self.rank}")
        folder, meta = folder_of(self.task.root, self.rank), Meta(self.file.epoch, self.file.step, self.file.name)
        try:
            checkpoint1.write_meta(folder, meta, self.task.file_mode, durable=self.task.durable)
        except ReshardError as error:
            error.message = f"all files are written, but the save could not be marked as complete: {error.message}"
            raise

    def remove(self, outdated: Iterable[tuple[int, int]]) -> list[str]:
        """Remove this rank's files of older saves. Returns warnings."""
        warnings = []
        for epoch, step in outdated:
            old = replace(self.naming, epoch=epoch, step=step).file(self.rank)
            for kind in _ROOTS:
                folder = folder_of(self.task.root, self.rank, kind)
                names = [old._replace(kind=kind).name]
                if kind == "full":
                    names += [checkpoint1_state.file_name(old), checkpoint1_state.arrays_file_name(old)]
                for name in names:
                    try:
                        filesystem.remove_file(folder / name)
                    except ReshardError as error:
                        warnings.append(f"an older file is not removed: {error}")
        return warnings


def _check_counters(path: Location, names: Sequence[str]) -> None:
    """Refuse counters that could not be read again. Before the file is written they may not have their values."""
    if names:
        index = _core.Index()
        index.add_whole_file(index.add_file(str(path)))
        counter_tensors.check_values(load_all(index.plan(index.whole_request(names))))
        index.close()


def _sweep(folder: Location, file: FileName) -> None:
    """Remove partial files, under hidden names, of a writer that was killed: no other process has a claim."""
    weights = rf"{re.escape(file.prefix)}_rank_{file.rank}[-_].*"
    debris = re.compile(rf"\.(?:{weights}|{re.escape(checkpoint1.META_FILE)}\..*)\.tmp")
    for name in filesystem.names(folder):
        if debris.fullmatch(name):
            with contextlib.suppress(ReshardError):
                filesystem.remove_file(folder / name)
