"""Reads rank folders as one checkpoint: each rank's file holds its shard of every tensor.

A Checkpoint 1.0 root is such a tree, and so is any folder of `rank_<number>` folders. The files do not record the
positions of their arrays in the whole tensors. With the strategy of the run, the positions are known, and the coverage
of every tensor is checked. Copies of a shard on several ranks are replicas; any of them is sufficient. Without a
strategy, only counters are known to be whole; all other tensors can be read rank by rank only.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from reshard import _core
from reshard.commit.candidates import Candidate, Order
from reshard.commit.scrub import fault_of
from reshard.errors import (
    CheckpointNotFoundError,
    DamagedFileError,
    LayoutError,
    MismatchError,
    ReshardError,
    UnsupportedError,
)
from reshard.formats.base import CheckpointData, RankRoot, Shapes
from reshard.formats.checkpoint1 import names as checkpoint1
from reshard.formats.checkpoint1 import state as checkpoint1_state
from reshard.formats.checkpoint1.candidates import RankFolder, name_of_rank, order_saves
from reshard.formats.checkpoint1.names import TRAITS, named, rank_of_folder
from reshard.formats.checkpoint1.tensors import RankTensors
from reshard.formats.newest import open_newest
from reshard.formats.own_files import opened_again
from reshard.formats.rank_file import add_rank_file
from reshard.layout.strategy import Strategy
from reshard.layout.strategy_file import is_strategy
from reshard.layout.strategy_folder import read_strategy
from reshard.layout.strategy_like import device_layouts, named_mapping
from reshard.storage.location import locate
from reshard.values.words import counted, listed, show

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from reshard._core import DeviceLayout
    from reshard.commit.scrub import Fault
    from reshard.formats.base import OpenOptions, StrategyLike, UnplacedTensor
    from reshard.formats.checkpoint1.replicas import AssumedReplicas
    from reshard.formats.rank_file import OpenedRankFile
    from reshard.formats.rank_saves import SaveOrder
    from reshard.storage.location import Location
    from reshard.storage.store import Lock

_log = logging.getLogger("reshard")

_MAX_NAMED = 8


@dataclass(frozen=True, kw_only=True)
class RankFoldersData(CheckpointData):
    """The files of all ranks, one per rank, as one checkpoint.

    Attributes:
        files: the file of each rank.
        all_keys: names of all tensors in order; None: those of the index.
        without_place: tensors whose shards have no known position.
        known_strategy: the strategy, or None.
        followed: tensors that the strategy does not list, with the parameters whose layout they have.
        replicas: stored keys whose arrays on several ranks are assumed to be replicas.
        replicas_of: for each tensor, those of these stored keys that it consists of.
    """

    files: Mapping[int, OpenedRankFile]
    all_keys: tuple[str, ...] | None = None
    without_place: Mapping[str, UnplacedTensor] = field(default_factory=dict)
    known_strategy: Strategy | None = None
    followed: Mapping[str, str] = field(default_factory=dict)
    replicas: AssumedReplicas
    replicas_of: Mapping[str, frozenset[str]]

    def keys(self) -> Sequence[str] | None:
        """All tensors, in the order of the files."""
        return self.all_keys

    def unplaced(self) -> Mapping[str, UnplacedTensor]:
        """Tensors without a position."""
        return self.without_place

    def strategy(self) -> Strategy | None:
        """The strategy, or None."""
        return self.known_strategy

    def file_name(self, file: int) -> str:
        """Including the folder of the rank, since the files of all ranks can have the same name."""
        return locate(self.index.file_path(file)).relative_to(self.path)

    def rank_files(self) -> Mapping[int, list[int]]:
        """One file for each rank."""
        return {rank: [file.file] for rank, file in self.files.items()}

    def world_size(self) -> int:
        """The number of files."""
        return len(self.files)

    def extra_state(self, rank: int) -> dict[str, Any]:
        """Read from the files beside the weights of a rank."""
        only = next(iter(self.files.values())) if len(self.files) == 1 else None  # the folder of one rank was opened
        return checkpoint1_state.read(self.files.get(rank, only), self.files.get(0))

    def is_deduplicated(self) -> bool | None:
        """As the metadata of the files says."""
        flags = [file.metadata.get("remove_redundancy") for file in self.files.values()]
        return None if None in flags else "True" in flags

    def device_layouts(self, shapes: Callable[[], Shapes]) -> Mapping[str, DeviceLayout]:
        """From the strategy."""
        if self.known_strategy is None:
            return super().device_layouts(shapes)
        known = device_layouts(self.known_strategy, shapes(), self.followed)
        return {key: layout for key, layout in known.items() if layout is not None}

    def layout_mapping(self, shapes: Callable[[], Shapes]) -> Mapping[str, Any] | None:
        """From the strategy."""
        return None if self.known_strategy is None else named_mapping(self.known_strategy, shapes(), self.followed)

    def view(self, index: _core.Index, lock: Lock | None) -> Self:
        """Without the strategy, which describes the stored tensors."""
        view = super().view(index, lock)
        known, made = self.replicas.key_of, {}
        for key in index.keys() if known else ():
            sources = frozenset(known[name] for _, name, *_ in index.stored(key) if name in known)
            if sources:
                made[key] = sources
        return replace(view, all_keys=None, without_place={}, known_strategy=None, followed={}, replicas_of=made)

    def check(self, keys: Collection[str] | None) -> None:
        """Compare the copies of tensors that are assumed to be replicas, since the strategy does not list them."""
        found = self.replicas_of if keys is None else {key for key in keys if key in self.replicas_of}
        stored = {source for key in found for source in self.replicas_of[key]}

        def opened(numbers: Sequence[int]) -> _core.Index:
            return opened_again(self.index, numbers, None)

        self.replicas.check(stored, opened)


class RankFoldersRoot(RankRoot):
    """The saves in rank folders. No weight file is opened before a save is.

    Args:
        path: the folder of the rank folders, or of one rank.
        options: the options of opening; its strategy is that of the run. None: the one in the folder `strategy` in or
            beside the root, if any.
        folders: the folders of ranks, where they are not all that are in `path`.

    Example:
        >>> import numpy as np, reshard
        >>> from reshard.formats.base import OpenOptions
        >>> _ = reshard.save("run", 40, {"w": np.zeros(4)}, format="checkpoint1")
        >>> root = RankFoldersRoot(locate("run"), OpenOptions())
        >>> root.open(root.order.candidates[0]).common.step_num
        40
    """

    is_ours = True
    of_options = (LayoutError, MismatchError, UnsupportedError)

    def __init__(self, path: Location, options: OpenOptions, folders: Mapping[int, Location] | None = None) -> None:
        super().__init__(path, options)
        self._given = folders
        self._folders = checkpoint1.rank_folders(path) if folders is None else folders

    @cached_property
    def order(self) -> Order:  # type: ignore[override]  # the folders of all ranks are listed when it is asked for
        """The saves; one that is named by prefix and rank, if no other has the files of all ranks."""
        if self.numbered:
            return Order((Candidate(None, next(iter(self.numbered.values())).name, "named by prefix and rank"),))
        if self._given is None:
            return self._by_name
        # Missing files of other ranks are no fault here.
        return replace(self._by_name, candidates=tuple(replace(one, fault=None) for one in self._by_name.candidates))

    @cached_property
    def numbered(self) -> Mapping[int, Location]:
        """The files that are named by prefix and rank, if no save has the files of all ranks."""
        is_complete = self._given is not None or any(save.fault is None for save in self._by_name.candidates)
        return {} if is_complete else checkpoint1.numbered_files(self._folders)

    @cached_property
    def _by_name(self) -> SaveOrder:
        return order_saves({rank: look_at(folder) for rank, folder in self._folders.items()})

    @cached_property
    def _strategy(self) -> Strategy | None:
        given = self.options.strategy
        if self._given is not None:
            return None if given is None else as_strategy(given)
        return strategy_for(self.path, given)

    def check(self) -> None:
        """The strategy is read and has these ranks, and there are weight files."""
        _check_ranks(self.path, self._folders, self._strategy)
        if not (self.order.candidates or self.order.refused or self.order.warnings):
            where = show(str(self.path))
            raise CheckpointNotFoundError(f"the rank folders of {where} hold no weight files", path=str(self.path))

    def open(self, one: Candidate) -> RankFoldersData:
        """The data of a save."""
        return open_rank_files(self.path, self.files(one), self._strategy, self.options.method)

    def again(self) -> RankFoldersRoot:
        """The same folders, listed once more."""
        return RankFoldersRoot(self.path, self.options, self._given)

    def files(self, one: Candidate) -> Mapping[int, Location]:
        """The path of each rank's file of a save, whether it exists or not."""
        return self.numbered or files_of(one.name, self._folders)

    def compare(self, one: Candidate) -> tuple[list[int], list[Fault]]:
        """The CRC of each file, and the digests of its state."""
        compared: list[int] = []
        faults: list[Fault] = []
        for path in self.files(one).values():
            index, at = _core.Index(), path
            try:
                weights = add_rank_file(index, path)
                if index.verify_crc(weights.file):
                    compared.append(index.file_bytes(weights.file))
                at = path.with_name(checkpoint1_state.file_name(path.name))
                checkpoint1_state.read(weights)
            except ReshardError as error:
                faults.append(fault_of(error, str(at.relative_to(self.path))))
            index.close()
        return compared, faults

    def open_suffix(self, suffix: str) -> RankFoldersData:
        """The data of the files that `checkpoint1.choose_by_suffix` chooses."""
        files = checkpoint1.choose_by_suffix(self.path, suffix)
        return open_rank_files(self.path, files, self._strategy, self.options.method)


def open_root(path: Location, options: OpenOptions) -> CheckpointData:
    """Open the best save in rank folders that is complete on every rank.

    Raises:
        CheckpointNotFoundError: the folder of a rank is missing, or there are no weight files.
        DamagedFileError: no save is complete; the message lists each with its fault.
        UnsupportedError, LayoutError, MismatchError: the strategy is invalid, or does not match the files.
    """
    root = RankFoldersRoot(path, options)
    if not root.numbered:
        return open_newest(root)
    root.check()
    return root.open(root.order.candidates[0])


def open_rank_folder(folder: Location, options: OpenOptions) -> CheckpointData:
    """Open the folder of one rank. The arrays in its best file are read as whole tensors.

    Args:
        folder: the folder of the rank.
        options: the options of opening, with a strategy of one rank or without one.

    Raises:
        CheckpointNotFoundError: there is no weight file, or the strategy has several ranks.
        DamagedFileError: no file is complete.
    """
    rank = rank_of_folder(folder) or 0
    root = RankFoldersRoot(folder, options, {rank: folder})
    n_others = len(checkpoint1.rank_entries(named(folder).parent)) - 1
    if options.strategy is None and n_others > 0:
        _log.warning(
            "%s is opened without other ranks: arrays of rank %d are read as whole tensors; %d more rank folders exist",
            folder,
            rank,
            n_others,
        )
    return open_newest(root)


def files_of(save: str, folders: Mapping[int, Location]) -> dict[int, Location]:
    """The file of each rank in a save, from the name of any of them.

    Example:
        >>> files_of("llama_rank_0-20_2.ckpt", {1: locate("rank_1")})[1]
        Location('rank_1/llama_rank_1-20_2.ckpt')
    """
    return {rank: folder / name_of_rank(save, rank) for rank, folder in folders.items()}


def look_at(folder: Location) -> RankFolder:
    """List one rank's folder. No weight file is opened.

    Raises:
        StorageError: the folder cannot be listed.
    """
    meta, fault = None, None
    try:
        meta = checkpoint1.read_meta(folder)
    except CheckpointNotFoundError:
        pass
    except DamagedFileError as error:
        # Messages add the name of the folder.
        fault = error.message.replace(show(str(folder / checkpoint1.META_FILE)), "it", 1).removeprefix("it: ")
    return RankFolder(tuple(_weight_files(folder)), meta, fault)


def _weight_files(folder: Location) -> Iterator[tuple[str, int]]:
    """Names and modification times of the weight files of a rank."""
    for name in checkpoint1.list_weight_files(folder):
        with contextlib.suppress(CheckpointNotFoundError):  # retention may delete a file meanwhile
            yield name, (folder / name).stat().modified_ns


def open_rank_files(
    root: Location, files: Mapping[int, Location], strategy: StrategyLike | None, method: _core.ReadMethod = "auto"
) -> RankFoldersData:
    """Open one file of each rank as one checkpoint.

    Args:
        root: the folder that contains the rank folders.
        files: the file of each rank.
        strategy: the strategy of the run: a file, a folder of files, or a `Strategy`; None: not known.
        method: how files are read.

    Returns:
        The checkpoint. Without a strategy, tensors of several ranks have no position (`Checkpoint.unplaced`).

    Raises:
        CheckpointNotFoundError: a rank of the strategy has no file, or a file is missing.
        DamagedFileError: a file violates its format, lacks data that other ranks have, or belongs to another save;
            state beside a file is missing or altered.
        MismatchError: the strategy has other ranks, or the shape of an array contradicts it.
        CoverageError: no rank holds some part of a tensor.

    Example:
        >>> import os, numpy as np, reshard
        >>> os.makedirs("ranks/rank_0")
        >>> reshard.save_file({"w": np.zeros(4), "step_num": np.array(7)}, "ranks/rank_0/net.safetensors")
        >>> open_rank_files(locate("ranks"), {0: locate("ranks/rank_0/net.safetensors")}, None).iteration
        7
    """
    known = None if strategy is None else as_strategy(strategy)
    _check_ranks(root, files, known)
    index = _core.Index()
    ranks = {rank: add_rank_file(index, files[rank], method=method) for rank in sorted(files)}
    for file in ranks.values():
        checkpoint1_state.check(file)
    tensors = RankTensors(root, ranks, known)
    common = tensors.check(method)
    for key in tensors.keys:
        if key not in tensors.unplaced:
            stored = tensors.placed(key)
            overlaps = tensors.overlaps(key, stored.shape)
            index.add_tiles(key, stored.dtype, stored.shape, stored.stored, overlapping=overlaps)
    tensors.check_coverage(index)
    tensors.warn()
    return RankFoldersData(
        traits=TRAITS,
        path=root,
        index=index,
        method=method,
        common=common,
        iteration=None if common is None else common.step_num,
        strings=tuple(dict.fromkeys(name for file in ranks.values() for name in file.strings)),
        files=ranks,
        all_keys=tuple(tensors.keys),
        without_place=tensors.unplaced,
        known_strategy=known,
        followed=tensors.followed,
        replicas=(replicas := tensors.replicas()),
        replicas_of={key: frozenset({key}) for key in replicas.keys},
    )


# -- strategies


def as_strategy(strategy: StrategyLike) -> Strategy:
    """Read the strategy, if it is given as a path. Raises as `read_strategy`."""
    return strategy if isinstance(strategy, Strategy) else read_strategy(strategy)


def strategy_for(root: Location, given: StrategyLike | None) -> Strategy | None:
    """The given strategy, or the one in the folder, or the one beside it, where MindSpore Transformers writes it."""
    if given is not None:
        return as_strategy(given)
    # A folder beside the root may belong to another root, so the folder in this root comes first.
    for folder in (root / checkpoint1.STRATEGY_FOLDER, root.resolved().parent / checkpoint1.STRATEGY_FOLDER):
        if folder.is_folder() and any(is_strategy(folder / name) for name in folder.names()[:_MAX_NAMED]):
            _log.info("%s is opened with the strategy in %s", root, folder)
            return read_strategy(folder)
    return None


def _check_ranks(root: Location, ranks: Collection[int], strategy: Strategy | None) -> None:
    """Refuse a tree with missing ranks, as far as the number of ranks is known."""
    hint = "copy the folders of all ranks into one folder, or open the folder of one rank"
    # The largest rank comes from the name of a folder and can be huge: only the listed ranks are enumerated.
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
            f"{show(strategy.source)} has {counted(strategy.n_stages, 'stage')} of "
            f"{counted(strategy.devices_per_stage, 'rank')}",
            path=str(root),
            hint="open one rank without a strategy, or the parent folder with it" if len(ranks) == 1 else hint,
        )
    more = sorted(rank for rank in ranks if rank >= strategy.world_size)
    if more:
        raise MismatchError(
            f"{show(str(root))} has files of rank {listed(more)}, but {show(strategy.source)} has "
            f"{counted(strategy.world_size, 'rank')}",
            path=str(root),
            hint="pass the strategies of all pipeline stages: their folder, or the merged file",
        )
