"""Gathers the facts of a resume decision from a Checkpoint 1.0 tree: the content of each rank's folder.

Rank folders are divided over the processes: folder r belongs to process r modulo the number of processes. This works
for a shared folder, and if each host has the folders of its own ranks only. Process 0 combines the results. The
processes then check the candidates in order, each its own files, until one is complete on all ranks. A file is checked
by opening it. Of its content, only the counters are read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from reshard.checkpoint import Checkpoint
from reshard.commit import roots
from reshard.commit.scrub import is_damage, reason_of
from reshard.config import split_iteration
from reshard.documents.common_info import CommonInfo  # noqa: TC001  messages are decoded by their type hints
from reshard.errors import CheckpointNotFoundError, DamagedFileError, ReshardError
from reshard.formats import counter_tensors, registry
from reshard.formats.base import OpenOptions
from reshard.formats.checkpoint1 import health as checkpoint1_health
from reshard.formats.checkpoint1 import names as checkpoint1
from reshard.formats.checkpoint1.agreement import FileFacts, faults_of
from reshard.formats.checkpoint1.candidates import RankFolder, SaveOrder, name_of_rank, order_saves
from reshard.formats.checkpoint1.reader import look_at, open_rank_files, rank_files
from reshard.formats.full_weights import names as full_weights
from reshard.ranks.collective import ALONE, capture
from reshard.resume import (
    CandidateFacts,
    Complete,
    Damaged,
    RankFolderFacts,
    Refused,
    ResumeFacts,
    RunFacts,
    Unreadable,
    evaluate,
)
from reshard.resume.choose import is_settled
from reshard.storage.location import Location, locate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard import _core
    from reshard.commit.candidates import Candidate
    from reshard.config import Config
    from reshard.ranks.collective import Collective

# -- the requested tree


@dataclass(frozen=True)
class SavesRoot:
    """A Checkpoint 1.0 tree, and the requested save in it.

    Attributes:
        path: the folder of the rank folders.
        named: the requested save, by the name of one of its files; None: any.
        iteration: the requested save, by its number of steps; None: any.
    """

    path: str
    named: str | None = None
    iteration: int | None = None


def saves_root(config: Config, world_size: int = 1) -> SavesRoot | None:
    """The Checkpoint 1.0 tree that a configuration loads; None: it loads another format.

    Args:
        config: the configuration. With several ranks, the path of a file in a rank's folder selects the file of each
            rank in the same save.
        world_size: number of processes that load.

    Raises:
        StorageError: the system failed to list a folder.
    """
    path = locate(config.load_path)
    if not config.load_path:
        return None
    if path.is_folder():
        found = registry.detect(path)
        is_tree = found.traits.rank_folders and found.root(path, OpenOptions()) is not None
        # An interrupted merge can have written this file before the first part.
        is_merge = (path / full_weights.HYPER_FILE).is_file()
        return SavesRoot(str(path), config.resume_file) if is_tree and not is_merge else None
    root, iteration = split_iteration(config.load_path)
    place = locate(root)
    if iteration is not None and place.is_folder() and not roots.is_root(place) and checkpoint1.is_root(place):
        return SavesRoot(root, config.resume_file, iteration)
    parsed = checkpoint1.parse_file_name(path.name)
    if world_size > 1 and parsed is not None and path.parent.name == checkpoint1.rank_folder_name(parsed.rank):
        return SavesRoot(str(path.parent.parent), path.name)
    return None


def path_of(root: str, save: str, rank: int) -> Location:
    """The path of a rank's file in a save.

    Args:
        root: the folder of the rank folders.
        save: the name of any rank's file in the save.
        rank: the rank.

    Example:
        >>> path_of("checkpoint", "x_rank_0-20_2.ckpt", 3)
        Location('checkpoint/rank_3/x_rank_3-20_2.ckpt')
    """
    return locate(root) / checkpoint1.rank_folder_name(rank) / name_of_rank(save, rank)


# -- the facts


def gather_saves(
    config: Config,
    run: RunFacts,
    tree: SavesRoot,
    *,
    ranks: Collective = ALONE,
    method: _core.ReadMethod = "auto",
    faults: Mapping[str, str] | None = None,
    keep_going: bool = False,
) -> ResumeFacts:
    """Gather the facts of a Checkpoint 1.0 tree. Its saves are checked in order until one is complete.

    Args:
        config: the configuration.
        run: the run that is about to start.
        tree: the tree, and the requested save in it.
        ranks: the processes; all call this function.
        method: how files are read, as in `reshard.open`.
        faults: damage that was found while loading: the reason by the path of rank 0's file.
        keep_going: as in `opening.gather.gather`; for one process only.

    Returns:
        The facts, equal on all processes, except for `ranks`, which only process 0 has.

    Raises:
        StorageError: a file cannot be read. This is not damage, so the save is not skipped.
    """
    views: list[RankFolderFacts] = []
    root, exact = tree.path, tree.iteration

    def combine(seen: list[dict[int, RankFolder]]) -> _Found:
        found = dict(sorted((rank, folder) for one in seen for rank, folder in one.items()))
        order = order_saves(found, by_time=config.by_timestamp, extension=config.load_format, named=tree.named)
        statuses, warning = _health(root) if config.healthy_only else ({}, None)
        views.extend(_view(rank, folder) for rank, folder in found.items())
        if warning is not None:
            order = replace(order, warnings=(*order.warnings, warning))
        return _Found(order, {one.name: statuses[one.name] for one in order.candidates if one.name in statuses})

    own = (ranks.rank, ranks.world_size)
    seen = capture(lambda: _look(root, own))
    saves = ranks.combine(seen, combine, dict[int, RankFolder], _Found)
    order = saves.order
    facts = ResumeFacts(root, "rank_folders", run=run, warnings=order.warnings)
    refused = tuple(
        CandidateFacts(str(path_of(root, one.name, 0)), why=one.reason, state=Refused(one.reason))
        for one in order.refused
    )
    found: list[CandidateFacts] = []
    for n, save in enumerate(order.candidates):
        known = (faults or {}).get(str(path_of(root, save.name, 0)))
        one = _candidate(root, save, order.n_ranks, known)
        if isinstance(one.state, Complete):
            try:
                reports = ranks.each(lambda: _check(root, save.name, own, method), _Report)  # noqa: B023  done at once
                one = _checked(one, reports, saves.statuses.get(save.name))
            except ReshardError as error:
                if not keep_going or is_damage(error):
                    raise
                one = replace(one, state=Unreadable(reason_of(error)))
            if exact is not None and isinstance(one.state, Complete) and one.iteration != exact:
                one = replace(one, state=Refused(f"iteration {exact} is requested"))
        found.append(one)
        facts = replace(facts, candidates=tuple(found))
        if is_settled(evaluate(config, facts)):
            found += [_candidate(root, other, order.n_ranks, None) for other in order.candidates[n + 1 :]]
            break
    return replace(facts, candidates=(*found, *refused), ranks=_with_faults(views, found))


@dataclass(frozen=True)
class _Found:
    """The saves of a tree in the order in which they are tried, and the health that is recorded of some, by name."""

    order: SaveOrder
    statuses: dict[str, int]


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


def _look(root: str, own: tuple[int, int]) -> dict[int, RankFolder]:
    """The rank folders that belong to this process."""
    number, count = own
    try:
        folders = checkpoint1.rank_folders(locate(root))
    except CheckpointNotFoundError:
        return {}  # the folders are those of another host's ranks; missing ones are found when all are combined
    return {rank: look_at(folder) for rank, folder in folders.items() if rank % count == number}


def _candidate(root: str, save: Candidate, n_ranks: int, fault: str | None) -> CandidateFacts:
    """The facts of a save before its files are opened."""
    fault = fault or save.fault
    return CandidateFacts(
        str(path_of(root, save.name, 0)),
        why=save.reason,
        state=Complete() if fault is None else Damaged(fault),
        world_size=n_ranks,
        is_legacy=True,
        counters=checkpoint1.TRAITS.counters,
    )


def _check(root: str, save: str, own: tuple[int, int], method: _core.ReadMethod) -> _Report:
    """Open this process's own files of a save."""
    number, count = own
    faults: dict[int, str] = {}
    files: dict[int, FileFacts] = {}
    common: CommonInfo | None = None
    has_optimizer = False
    try:
        ranks = [rank for rank in checkpoint1.rank_folders(locate(root)) if rank % count == number]
    except CheckpointNotFoundError:
        ranks = []
    for rank in ranks:
        try:
            checkpoint = open_own(path_of(root, save, rank), method)
        except ReshardError as error:
            if not is_damage(error):
                raise
            faults[rank] = reason_of(error)
            continue
        with checkpoint:
            if not files:
                common = checkpoint.common
            has_optimizer |= holds_optimizer(checkpoint)
            (file,) = rank_files(checkpoint).values()
            files[rank] = FileFacts.of(checkpoint.common, file)
    return _Report(faults, files, common, has_optimizer)


def _checked(candidate: CandidateFacts, reports: Sequence[_Report], status: int | None) -> CandidateFacts:
    """A candidate with what all processes found of it."""
    faults = sorted((rank, fault) for report in reports for rank, fault in report.faults.items())
    common = next((report.common for report in reports if report.files), None)
    if not faults:
        files = dict(sorted((rank, file) for report in reports for rank, file in report.files.items()))
        save = locate(candidate.path).name
        faults = [(rank, f"{name_of_rank(save, rank)}: {fault}") for rank, fault in faults_of(files).items()]
    if faults:
        rank, fault = faults[0]
        more = f", and {len(faults) - 1} more ranks' files" if len(faults) > 1 else ""
        return replace(candidate, state=Damaged(f"rank {rank}: {fault}{more}"), rank_faults=tuple(faults))
    if common is not None:
        common = replace(common, unknown=(), ckpt_status=common.ckpt_status if status is None else status)
    return replace(
        candidate,
        iteration=None if common is None else common.step_num,
        common=common,
        has_optimizer=any(report.has_optimizer for report in reports),
    )


def _view(rank: int, folder: RankFolder) -> RankFolderFacts:
    meta = None if folder.meta is None else folder.meta.last_ckpt_file
    return RankFolderFacts(rank, meta, folder.meta_fault, tuple(sorted(name for name, _ in folder.files)))


def _with_faults(views: list[RankFolderFacts], found: list[CandidateFacts]) -> tuple[RankFolderFacts, ...]:
    """The content of each rank's folder, with the faults of its files."""
    faults: dict[int, list[tuple[str, str]]] = {}
    for candidate in found:
        for rank, fault in candidate.rank_faults:
            name = name_of_rank(locate(candidate.path).name, rank)
            faults.setdefault(rank, []).append((name, fault))
    return tuple(replace(view, faults=tuple(faults.get(view.rank, ()))) for view in views)


# -- the file of one rank


def open_own(path: Location, method: _core.ReadMethod = "auto") -> Checkpoint:
    """Open the file of one rank: its local arrays are the tensors, and its counters are `common`.

    Raises:
        CheckpointNotFoundError, DamagedFileError, UnsupportedError, StorageError: as `open_rank_files`.

    Example:
        >>> import numpy as np, reshard
        >>> _ = reshard.save("run", 40, {"w": np.zeros(4)}, format="checkpoint1")
        >>> open_own(locate("run/rank_0/CKP_rank_0-1_40.safetensors")).common.step_num
        40
    """
    return Checkpoint(open_rank_files(path.parent, {0: path}, None, method))


def is_deduplicated(checkpoint: Checkpoint, *, default: bool) -> bool:
    """Whether a rank's file lacks shards that another rank wrote, from its metadata, else `default`."""
    flags = [file.metadata.get("remove_redundancy") for file in rank_files(checkpoint).values()]
    return default if None in flags else "True" in flags


def counters_of(checkpoint: Checkpoint) -> CommonInfo | None:
    """The counters that a file of Checkpoint 1.0 stores as tensors; None if it has none.

    Raises:
        DamagedFileError: a counter has an invalid value.
        StorageError: the file cannot be read.
    """
    names = [name for name in counter_tensors.NAMES if name in checkpoint]
    path = str(checkpoint.path)
    for name in names:
        counter_tensors.check_shape(name, checkpoint.shape(name), path)  # before it is read: it can be of any size
    return counter_tensors.common_of(checkpoint.load(keys=names, threads=1), path) if names else None


def holds_optimizer(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint holds optimizer state other than counters, by the names of its tensors."""
    return any(counter_tensors.is_state(key) and key not in counter_tensors.NAMES for key in checkpoint)


def _health(root: str) -> tuple[dict[str, int], str | None]:
    """The recorded status of each save, by rank 0's file (0: healthy), or why it is not known."""
    try:
        found = checkpoint1_health.read(locate(root))
    except CheckpointNotFoundError as error:
        return {}, f"{error.message}: no save is known to be healthy"
    except DamagedFileError as error:
        return {}, error.message
    return {name_of_rank(name, 0): status for name, status in found.items()}, None
