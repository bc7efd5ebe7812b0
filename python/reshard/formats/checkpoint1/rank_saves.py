"""The saves of a Checkpoint 1.0 tree, as the processes of a run find them together.

Rank folders are divided over the processes: folder r belongs to process r modulo the number of processes. This works
for a shared folder, and if each host has the folders of its own ranks only. Process 0 combines the results. A file is
checked by opening it. Of its content, only the counters are read.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from reshard.commit.scrub import is_damage, reason_of
from reshard.documents.common_info import CommonInfo  # noqa: TC001  messages are decoded by their type hints
from reshard.errors import CheckpointNotFoundError, DamagedFileError, ReshardError
from reshard.formats import counter_tensors
from reshard.formats.checkpoint1 import health
from reshard.formats.checkpoint1 import names as checkpoint1
from reshard.formats.checkpoint1.agreement import FileFacts, faults_of
from reshard.formats.checkpoint1.candidates import RankFolder, name_of_rank, order_saves
from reshard.formats.checkpoint1.reader import look_at, open_rank_files, strategy_for
from reshard.formats.rank_saves import CheckedSave, FolderView, FoundSaves, RankSaves
from reshard.ranks.collective import capture
from reshard.storage.location import locate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard import _core
    from reshard.formats.base import OpenOptions
    from reshard.formats.checkpoint1.names import Extension
    from reshard.formats.checkpoint1.reader import RankFoldersData
    from reshard.ranks.collective import Collective
    from reshard.storage.location import Location


class Checkpoint1Saves(RankSaves):
    """The saves of a Checkpoint 1.0 tree, or of any other folder of rank folders.

    Example:
        >>> from reshard.formats.rank_saves import SavesRoot
        >>> Checkpoint1Saves(SavesRoot("checkpoint1", "checkpoint")).place("x_rank_0-20_2.ckpt", 3)
        Location('checkpoint/rank_3/x_rank_3-20_2.ckpt')
    """

    traits = checkpoint1.TRAITS

    def find(self, ranks: Collective, *, by_time: bool, extension: Extension | None, healthy_only: bool) -> FoundSaves:
        """By the names of the files, and what each `meta.json` says."""
        root = locate(self.root.path)

        def combine(seen: list[dict[int, RankFolder]]) -> FoundSaves:
            found = dict(sorted((rank, folder) for one in seen for rank, folder in one.items()))
            order = order_saves(found, by_time=by_time, extension=extension, named=self.root.named)
            statuses, warning = _health(root) if healthy_only else ({}, None)
            self.folders = tuple(_view(rank, folder) for rank, folder in found.items())
            if warning is not None:
                order = replace(order, warnings=(*order.warnings, warning))
            return FoundSaves(order, {one.name: statuses[one.name] for one in order.candidates if one.name in statuses})

        seen = capture(lambda: {rank: look_at(folder) for rank, folder in _own_folders(root, ranks).items()})
        return ranks.combine(seen, combine, dict[int, RankFolder], FoundSaves)

    def check(self, save: str, ranks: Collective, method: _core.ReadMethod) -> CheckedSave:
        """The structure of each file, and whether the files belong together."""
        reports = ranks.each(lambda: self._check(save, ranks, method), _Report)
        faults = sorted((rank, fault) for report in reports for rank, fault in report.faults.items())
        if not faults:
            files = dict(sorted((rank, file) for report in reports for rank, file in report.files.items()))
            faults = [(rank, f"{name_of_rank(save, rank)}: {fault}") for rank, fault in faults_of(files).items()]
        common = next((report.common for report in reports if report.files), None)
        return CheckedSave(tuple(faults), common, any(report.has_optimizer for report in reports))

    def _check(self, save: str, ranks: Collective, method: _core.ReadMethod) -> _Report:
        """Open this process's own files of a save."""
        report = _Report({}, {}, None, has_optimizer=False)
        for rank in _own_folders(locate(self.root.path), ranks):
            try:
                data = open_own(self.place(save, rank), method)
            except ReshardError as error:
                if not is_damage(error):
                    raise
                report.faults[rank] = reason_of(error)
                continue
            with contextlib.closing(data.index):
                if not report.files:
                    report = replace(report, common=data.common)
                if counter_tensors.holds_optimizer(data.all_keys or ()):
                    report = replace(report, has_optimizer=True)
                (file,) = data.files.values()
                report.files[rank] = FileFacts.of(data.common, file)
        return report

    def labels(self) -> Mapping[str, str]:
        """Epoch and step alone, if nothing else differs; else the name without the rank."""
        named = {name: checkpoint1.parse_file_name(name) for view in self.folders for name in view.files}
        of_meta = {view.meta: checkpoint1.parse_file_name(view.meta) for view in self.folders if view.meta is not None}
        kinds = {one and (one.prefix, one.kind, one.extension) for one in named.values()}
        is_plain = len(kinds) == 1 and None not in kinds
        return {
            name: one.suffix if is_plain else one.of_rank(0).name.replace("_rank_0", "_rank_*", 1)
            for name, one in (of_meta | named).items()
            if one is not None
        }

    def place(self, save: str, rank: int) -> Location:
        """In the folder of the rank."""
        return locate(self.root.path) / checkpoint1.rank_folder_name(rank) / name_of_rank(save, rank)

    def open(self, save: str, n_ranks: int, options: OpenOptions) -> RankFoldersData:
        """With the given strategy, or the one in or beside the root."""
        root = locate(self.root.path)
        files = {rank: self.place(save, rank) for rank in range(n_ranks)}
        return open_rank_files(root, files, strategy_for(root, options.strategy), options.method)

    def open_own(self, save: str, rank: int, method: _core.ReadMethod) -> RankFoldersData:
        """Its counters are `common`."""
        return open_own(self.place(save, rank), method)


@dataclass(frozen=True)
class _Report:
    """What a process found in its own files of a save.

    Attributes:
        faults: why the files of some ranks are damaged.
        files: what is compared of the other files.
        common: the counters in the first of these; None: it has none.
        has_optimizer: whether any of them holds state of the optimizer.
    """

    faults: dict[int, str]
    files: dict[int, FileFacts]
    common: CommonInfo | None
    has_optimizer: bool


def open_own(path: Location, method: _core.ReadMethod) -> RankFoldersData:
    """Open the file of one rank. Raises as `open_rank_files`."""
    return open_rank_files(path.parent, {0: path}, None, method)


def _own_folders(root: Location, ranks: Collective) -> dict[int, Location]:
    """The rank folders that belong to this process."""
    try:
        folders = checkpoint1.rank_folders(root)
    except CheckpointNotFoundError:
        return {}  # the folders are those of another host's ranks; missing ones are found when all are combined
    return {rank: folder for rank, folder in folders.items() if rank % ranks.world_size == ranks.rank}


def _view(rank: int, folder: RankFolder) -> FolderView:
    meta = None if folder.meta is None else folder.meta.last_ckpt_file
    return FolderView(rank, meta, folder.meta_fault, tuple(sorted(name for name, _ in folder.files)))


def _health(root: Location) -> tuple[dict[str, int], str | None]:
    """The recorded status of each save, by rank 0's file (0: healthy), or why it is not known."""
    try:
        found = health.read(root)
    except CheckpointNotFoundError as error:
        return {}, f"{error.message}: no save is known to be healthy"
    except DamagedFileError as error:
        return {}, error.message
    return {name_of_rank(name, 0): status for name, status in found.items()}, None
