"""Rank folders, opened as one checkpoint: each rank's own file holds its part of every tensor, a strategy tells where.

A Checkpoint 1.0 root is such a tree, and so is any folder of `rank_<number>` folders. Nothing in the files says how
their arrays make up the whole tensors. With the strategy of the run that is known, and proven to leave no hole; copies
that several ranks hold are replicas, so it does not matter whether each of them wrote its own. Without one, only what
is no array at all (counters) can be told to be whole; everything else can be read rank by rank, and not as a tensor.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from reshard import _core
from reshard.checkpoint import Checkpoint
from reshard.errors import CheckpointNotFoundError, CoverageError, DamagedFileError, MismatchError, StorageError
from reshard.formats import checkpoint1, checkpoint2, full_weights, huggingface
from reshard.formats.rank_file import add_rank_file
from reshard.layout.strategy import Strategy
from reshard.layout.strategy_file import is_strategy
from reshard.layout.strategy_folder import read_strategy
from reshard.opening.rank_tensors import RankTensors
from reshard.opening.root import is_damage, reason_of
from reshard.resume.checkpoint1 import RankFolder, name_of_rank, order_saves
from reshard.small_files import show
from reshard.words import listed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from reshard.resume.checkpoint1 import SaveOrder

__all__ = [
    "RankSave",
    "StrategyLike",
    "as_strategy",
    "files_of",
    "look_at",
    "open_rank_files",
    "open_rank_folder",
    "open_rank_folders",
    "order_of_saves",
    "rank_of_folder",
    "rank_saves",
    "strategy_for",
]

_log = logging.getLogger("reshard")

StrategyLike: TypeAlias = Strategy | str | os.PathLike[str]

_MAX_NAMED = 8


def open_rank_folders(root: Path, strategy: StrategyLike | None, method: _core.ReadMethod) -> Checkpoint:
    """Open the best save of a folder of rank folders that every rank has whole.

    Raises:
        CheckpointNotFoundError: the folder of a rank is missing, or there are no weight files.
        DamagedFileError: no save is whole; the message names each and its fault.
        UnsupportedError, LayoutError, MismatchError: the strategy is none, or is not that of these files.

    Example:
        >>> open_rank_folders(Path("output/checkpoint"), "output/strategy", "auto").common.step_num  # doctest: +SKIP
        40
    """
    known = strategy_for(root, strategy)
    folders = checkpoint1.rank_folders(root)
    _check_ranks(root, folders, known)
    return _open_best(root, folders, order_of_saves(folders), known, method)


def open_rank_folder(folder: Path, strategy: StrategyLike | None, method: _core.ReadMethod) -> Checkpoint:
    """Open the folder of one rank: what its best file holds is taken for whole tensors.

    Raises:
        CheckpointNotFoundError: there is no weight file, or the strategy is one of several ranks.
        DamagedFileError: no file is whole.
    """
    rank = rank_of_folder(folder) or 0
    known = None if strategy is None else as_strategy(strategy)
    _check_ranks(folder, {rank: folder}, known)
    n_others = len(checkpoint1.rank_entries(_named(folder).parent)) - 1
    if known is None and n_others > 0:
        _log.warning(
            "%s is opened alone: the arrays of rank %d are taken for whole tensors, and %d rank folders lie beside it",
            folder,
            rank,
            n_others,
        )
    order = order_of_saves({rank: folder})
    # That the other ranks have no files here is no fault.
    candidates = tuple(replace(save, fault=None) for save in order.candidates)
    return _open_best(folder, {rank: folder}, replace(order, candidates=candidates), known, method)


def _open_best(
    root: Path, folders: Mapping[int, Path], order: SaveOrder, strategy: Strategy | None, method: _core.ReadMethod
) -> Checkpoint:
    """Open the first save that every rank has whole. A strategy that does not fit is no reason to try another one."""
    faults: dict[str, str] = {}
    for save in order.candidates:
        if save.fault is not None:
            faults[save.name] = save.fault
            continue
        try:
            checkpoint = open_rank_files(root, files_of(save.name, folders), strategy, method)
        except (CheckpointNotFoundError, CoverageError, DamagedFileError, StorageError) as error:
            if not is_damage(error):
                raise
            faults[save.name] = reason_of(error)
            continue
        for warning in order.warnings:
            _log.warning("%s: %s", root, warning)
        for name, reason in faults.items():
            _log.warning("%s: %s passed over: %s", root, name, reason)
        checkpoint.skipped = tuple(faults.items())
        return checkpoint
    lines = [*order.warnings, *(f"{name}: {reason}" for name, reason in faults.items())]
    lines += [f"{one.name}: {one.reason}" for one in order.refused]
    if not lines:
        raise CheckpointNotFoundError(f"the rank folders of {show(str(root))} hold no weight files", path=str(root))
    told = "".join(f"\n  {line}" for line in lines)
    raise DamagedFileError(f"there is no complete checkpoint in {show(str(root))}:{told}", path=str(root))


def files_of(save: str, folders: Mapping[int, Path]) -> dict[int, Path]:
    """The file of each rank of a save; it is told by the name of any of them.

    Example:
        >>> files_of("llama_rank_0-20_2.ckpt", {1: Path("rank_1")})[1].as_posix()
        'rank_1/llama_rank_1-20_2.ckpt'
    """
    return {rank: folder / name_of_rank(save, rank) for rank, folder in folders.items()}


@dataclass(frozen=True)
class RankSave:
    """A save in rank folders.

    Attributes:
        name: what tells it from others: the name of rank 0's file.
        files: the file of each rank, there or not.
        why: half a sentence on why it stands where it does, or is never opened.
        fault: ranks that have no file of it; None: all have one.
        is_candidate: whether `open` would try it.
    """

    name: str
    files: Mapping[int, Path]
    why: str
    fault: str | None
    is_candidate: bool


def rank_saves(path: str | os.PathLike[str]) -> tuple[RankSave, ...] | None:
    """The saves of a folder of rank folders: in the order in which they are tried, then those that never are.

    Returns:
        The saves; None: it is no such folder, or one that describes itself.

    Raises:
        StorageError: a folder cannot be listed.

    Example:
        >>> [save.name for save in rank_saves("output/checkpoint")]  # doctest: +SKIP
        ['llama_rank_0-20_2.safetensors', 'llama_rank_0-15_2.safetensors']
    """
    root = Path(path)
    kinds = (huggingface.detect, full_weights.detect, checkpoint2.is_root)
    if not root.is_dir() or any(detect(root) for detect in kinds) or not checkpoint1.is_root(root):
        return None
    folders = checkpoint1.rank_folders(root)
    order = order_of_saves(folders)
    told = [(save, True) for save in order.candidates] + [(save, False) for save in order.refused]
    return tuple(
        RankSave(save.name, files_of(save.name, folders), save.reason, save.fault, is_candidate)
        for save, is_candidate in told
    )


def order_of_saves(folders: Mapping[int, Path]) -> SaveOrder:
    """In which order the saves of rank folders are tried; no weight file is opened.

    Raises:
        StorageError: a folder cannot be listed.

    Example:
        >>> [save.name for save in order_of_saves(rank_folders("output/checkpoint")).candidates]  # doctest: +SKIP
        ['llama_rank_0-20_2.safetensors', 'llama_rank_0-15_2.safetensors']
    """
    return order_saves({rank: look_at(folder) for rank, folder in folders.items()})


def look_at(folder: Path) -> RankFolder:
    """What one rank's folder offers; no weight file is opened.

    Raises:
        StorageError: the folder cannot be listed.
    """
    meta, fault = None, None
    try:
        meta = checkpoint1.read_meta(folder)
    except CheckpointNotFoundError:
        pass
    except DamagedFileError as error:
        # It is told with the folder's name.
        fault = error.message.replace(show(str(folder / checkpoint1.META_FILE)), "it", 1).removeprefix("it: ")
    return RankFolder(tuple(_weight_files(folder)), meta, fault)


def _weight_files(folder: Path) -> Iterator[tuple[str, int]]:
    """Names and times of the weight files of a rank."""
    for name in checkpoint1.list_weight_files(folder):
        with contextlib.suppress(FileNotFoundError):  # retention may remove one meanwhile
            yield name, (folder / name).lstat().st_mtime_ns


def rank_of_folder(folder: Path) -> int | None:
    """The rank in the name of a folder."""
    return checkpoint1.parse_rank_folder(_named(folder).name)


def _named(folder: Path) -> Path:
    """A folder under the name that tells its rank: the one that was given, or the one to which that is a link."""
    given = Path(os.path.abspath(folder))  # noqa: PTH100  not resolved: a rank's folder may be a link
    return folder.resolve() if checkpoint1.parse_rank_folder(given.name) is None else given


def open_rank_files(
    root: Path, files: Mapping[int, Path], strategy: StrategyLike | None, method: _core.ReadMethod = "auto"
) -> Checkpoint:
    """Open one file of each rank as one checkpoint.

    Args:
        root: the folder under which they lie.
        files: the file of each rank.
        strategy: how the run cut its tensors: a file, a folder of them, or what was read of them; None: not known.
        method: how files are read.

    Returns:
        The checkpoint. Without a strategy, tensors of several ranks have no place in it (`Checkpoint.unplaced`).

    Raises:
        CheckpointNotFoundError: a rank of the strategy has no file, or a file is not there.
        DamagedFileError: a file violates its format, lacks what those of other ranks have, or is of another save.
        MismatchError: the strategy is one of other ranks, or an array cannot be the part that it makes of it.
        CoverageError: no rank holds a part of a tensor.

    Example:
        >>> files = choose_by_suffix("output/checkpoint", "15_2")  # doctest: +SKIP
        >>> open_rank_files(Path("output/checkpoint"), files, "output/strategy").keys()  # doctest: +SKIP
        ['embed.weight', 'layers.0.w', 'adam_m.layers.0.w', 'global_step']
    """
    known = None if strategy is None else as_strategy(strategy)
    _check_ranks(root, files, known)
    index = _core.Index()
    ranks = {rank: add_rank_file(index, files[rank], method=method) for rank in sorted(files)}
    tensors = RankTensors(root, ranks, known)
    common = tensors.check(method)
    for key in tensors.keys:
        if key not in tensors.unplaced:
            # Ranks that hold the same part may have it in other records: these overlap, and are no replicas.
            is_split = any(len(one.parts) > 1 for one in tensors.held[key].values())
            index.add_tiles(key, *tensors.placed(key), overlapping=is_split)
    tensors.prove(index)
    tensors.warn()
    checkpoint = Checkpoint("checkpoint1", root, index)
    checkpoint._place_ranks(  # noqa: SLF001  made here, as all of it
        ranks, tensors.keys, tensors.unplaced, known, tensors.followed, replicas=tensors.replicas()
    )
    checkpoint._method = method  # noqa: SLF001
    checkpoint.strings = tuple(dict.fromkeys(name for file in ranks.values() for name in file.strings))
    checkpoint.common = common
    checkpoint.iteration = None if common is None else common.step_num
    return checkpoint


# -- strategies


def as_strategy(strategy: StrategyLike) -> Strategy:
    """What was given as such. Raises as `read_strategy` does."""
    return strategy if isinstance(strategy, Strategy) else read_strategy(strategy)


def strategy_for(root: Path, given: StrategyLike | None) -> Strategy | None:
    """The strategy that was given, or that lies in the folder, or where the original writes it: beside it."""
    if given is not None:
        return as_strategy(given)
    # Beside a root there may be another one, and its strategy: what lies in this one is its own.
    for folder in (root / checkpoint1.STRATEGY_FOLDER, root.resolve().parent / checkpoint1.STRATEGY_FOLDER):
        if folder.is_dir() and any(is_strategy(path) for path in sorted(folder.iterdir())[:_MAX_NAMED]):
            _log.info("%s is opened with the strategy in %s", root, folder)
            return read_strategy(folder)
    return None


def _check_ranks(root: Path, ranks: Collection[int], strategy: Strategy | None) -> None:
    """Refuse a tree in which ranks are missing, as far as they are known."""
    hint = "bring the folders of all ranks together; the folder of one rank can be opened alone"
    # The largest rank comes out of a folder's name: no more are looked at than are named.
    n = strategy.world_size if strategy is not None else max(ranks) + 1 if len(ranks) > 1 else 0
    missing = list(itertools.islice((rank for rank in range(n) if rank not in ranks), 8))
    n_missing = n - sum(0 <= rank < n for rank in ranks)
    if strategy is None:
        if n_missing:
            raise CheckpointNotFoundError(
                f"{show(str(root))} has no file of rank {listed(missing, n_items=n_missing)}", path=str(root), hint=hint
            )
        return
    if n_missing:
        stages = dict.fromkeys(rank // strategy.devices_per_stage for rank in missing)
        raise CheckpointNotFoundError(
            f"{show(str(root))} has no file of rank {listed(missing, n_items=n_missing)} (stage {listed(stages)}); "
            f"{show(strategy.source)} is one of {strategy.n_stages} stages of {strategy.devices_per_stage} ranks",
            path=str(root),
            hint="one rank is opened without a strategy; with it, open the folder above" if len(ranks) == 1 else hint,
        )
    more = sorted(rank for rank in ranks if rank >= strategy.world_size)
    if more:
        raise MismatchError(
            f"{show(str(root))} has files of rank {listed(more)}, and {show(strategy.source)} is one of "
            f"{strategy.world_size} ranks",
            path=str(root),
            hint="give the strategies of all pipeline stages: the folder that holds them, or the merged file",
        )
