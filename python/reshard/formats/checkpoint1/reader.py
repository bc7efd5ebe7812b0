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
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from reshard import _core
from reshard.errors import CheckpointNotFoundError, CoverageError, DamagedFileError, MismatchError, StorageError
from reshard.formats import manifest as manifests
from reshard.formats.base import CheckpointData, Format, Match, Shapes, Traits
from reshard.formats.checkpoint1 import names as checkpoint1
from reshard.formats.checkpoint1 import state as checkpoint1_state
from reshard.formats.checkpoint1.candidates import RankFolder, name_of_rank, order_saves
from reshard.formats.checkpoint1.tensors import RankTensors
from reshard.formats.checkpoint2 import names as checkpoint2
from reshard.formats.checkpoint2.root import is_damage, reason_of
from reshard.formats.own_files import opened_again
from reshard.formats.rank_file import add_rank_file
from reshard.formats.tiled import names as tiles
from reshard.layout.strategy import Strategy
from reshard.layout.strategy_file import is_strategy
from reshard.layout.strategy_folder import read_strategy
from reshard.layout.strategy_like import device_layouts, named_mapping
from reshard.storage.location import locate
from reshard.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from reshard.checkpoint import Checkpoint
    from reshard.formats.base import OpenOptions, StrategyLike, Unplaced
    from reshard.formats.checkpoint1.candidates import SaveOrder
    from reshard.formats.checkpoint1.replicas import AssumedReplicas
    from reshard.formats.rank_file import RankFile
    from reshard.layout.like import DeviceLayout
    from reshard.storage.location import Location
    from reshard.storage.store import Lock

__all__ = [
    "CHECKPOINT1",
    "RankSave",
    "as_strategy",
    "files_of",
    "look_at",
    "open_rank_files",
    "open_rank_folder",
    "open_rank_folders",
    "order_of_saves",
    "rank_files",
    "rank_of_folder",
    "rank_saves",
    "strategy_for",
]

_log = logging.getLogger("reshard")

_MAX_NAMED = 8


TRAITS = Traits("checkpoint1", counters_as_tensors=True, expects_manifest=True, rank_folders=True)


class Checkpoint1(Format):
    """A Checkpoint 1.0 tree, any other folder of rank folders, or the folder of one rank."""

    traits = TRAITS

    def detect(self, path: Location) -> Match:
        """By the names of the folders; a folder named like a rank's can hold something else, which describes itself."""
        if not path.is_folder():
            return Match.NO
        is_one_rank = rank_of_folder(path) is not None and not _is_described(path)
        return Match.YES if is_one_rank or checkpoint1.is_root(path) else Match.NO

    def is_root(self, path: Location) -> bool:
        """Whether it holds folders of ranks."""
        return checkpoint1.is_root(path)

    def open(self, path: Location, options: OpenOptions) -> CheckpointData:
        """The best save that every rank has, or the best file of one rank."""
        open_it = open_rank_folders if self.is_root(path) else open_rank_folder
        return open_it(path, options.strategy, options.method)


CHECKPOINT1 = Checkpoint1()


def _is_described(folder: Location) -> bool:
    """Whether a folder that has the name of a rank holds something else, such as an iteration or a conversion."""
    names = (checkpoint2.METADATA_FILE, tiles.TILES_FILE, manifests.MANIFEST_FILE)
    return any((folder / name).exists() for name in names)


@dataclass(frozen=True, kw_only=True)
class RankFoldersData(CheckpointData):
    """Files of ranks, one each, as one checkpoint.

    Attributes:
        files: the file of each rank.
        all_keys: names of all tensors in order; None: those of the index.
        without_place: tensors whose parts have no known position.
        known_strategy: the strategy, if there is one.
        followed: tensors that the strategy does not list, and the parameters whose layout they have.
        replicas: stored keys of which several ranks hold arrays that are read as replicas.
        replicas_of: of each tensor, the stored keys among these of which it is made.
    """

    files: Mapping[int, RankFile]
    all_keys: tuple[str, ...] | None = None
    without_place: Mapping[str, Unplaced] = field(default_factory=dict)
    known_strategy: Strategy | None = None
    followed: Mapping[str, str] = field(default_factory=dict)
    replicas: AssumedReplicas
    replicas_of: Mapping[str, frozenset[str]]

    def keys(self) -> Sequence[str] | None:
        """All tensors in the order of the files."""
        return self.all_keys

    def unplaced(self) -> Mapping[str, Unplaced]:
        """Tensors that no strategy describes."""
        return self.without_place

    def strategy(self) -> Strategy | None:
        """The strategy, if there is one."""
        return self.known_strategy

    def file_name(self, file: int) -> str:
        """With the folder of the rank: the files of all ranks can have the same name."""
        return locate(self.index.file_path(file)).relative_to(self.path)

    def rank_files(self) -> Mapping[int, list[int]]:
        """One file for each rank."""
        return {rank: [file.file] for rank, file in self.files.items()}

    def world_size(self) -> int:
        """As many ranks as there are files."""
        return len(self.files)

    def extra_state(self, rank: int) -> dict[str, Any]:
        """From the files beside the weights of a rank."""
        paths = {number: file.path for number, file in self.files.items()}
        alone = next(iter(paths.values())) if len(paths) == 1 else None  # the folder of one rank, opened by itself
        return checkpoint1_state.read(paths.get(rank, alone), paths.get(0))

    def device_layouts(self, shapes: Callable[[], Shapes]) -> Mapping[str, DeviceLayout]:
        """As the strategy records them."""
        if self.known_strategy is None:
            return super().device_layouts(shapes)
        known = device_layouts(self.known_strategy, shapes(), self.followed)
        return {key: layout for key, layout in known.items() if layout is not None}

    def layout_mapping(self, shapes: Callable[[], Shapes]) -> Mapping[str, Any] | None:
        """As the strategy records it."""
        return None if self.known_strategy is None else named_mapping(self.known_strategy, shapes(), self.followed)

    def view(self, index: _core.Index, lock: Lock | None) -> Self:
        """Without the strategy, which is about the stored tensors."""
        view = super().view(index, lock)
        known, made = self.replicas.key_of, {}
        for key in index.keys() if known else ():
            sources = frozenset(known[name] for _, name, *_ in index.stored(key) if name in known)
            if sources:
                made[key] = sources
        return replace(view, all_keys=None, without_place={}, known_strategy=None, followed={}, replicas_of=made)

    def check(self, keys: Collection[str] | None) -> None:
        """Compare what ranks hold of tensors that are read as replicas because the strategy does not list them."""
        found = self.replicas_of if keys is None else {key for key in keys if key in self.replicas_of}
        stored = {source for key in found for source in self.replicas_of[key]}

        def opened(numbers: Sequence[int]) -> _core.Index:
            ckpt = {n for n, number in enumerate(numbers) if number in self.ckpt_files}
            return opened_again(self.index, numbers, None, ckpt=ckpt, method=self.method)

        self.replicas.check(stored, opened)


def rank_files(checkpoint: Checkpoint) -> Mapping[int, RankFile]:
    """The file of each rank of a checkpoint of rank folders; of any other none."""
    return checkpoint.data.files if isinstance(checkpoint.data, RankFoldersData) else {}


def open_rank_folders(root: Location, strategy: StrategyLike | None, method: _core.ReadMethod) -> CheckpointData:
    """Open the best save of a folder of rank folders that every rank has whole.

    Raises:
        CheckpointNotFoundError: the folder of a rank is missing, or there are no weight files.
        DamagedFileError: no save is whole; the message names each and its fault.
        UnsupportedError, LayoutError, MismatchError: the strategy is none, or is not that of these files.

    Example:
        >>> open_rank_folders(locate("output/checkpoint"), "output/strategy", "auto").common.step_num  # doctest: +SKIP
        40
    """
    known = strategy_for(root, strategy)
    folders = checkpoint1.rank_folders(root)
    _check_ranks(root, folders, known)
    return _open_best(root, folders, order_of_saves(folders), known, method)


def open_rank_folder(folder: Location, strategy: StrategyLike | None, method: _core.ReadMethod) -> CheckpointData:
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
    root: Location,
    folders: Mapping[int, Location],
    order: SaveOrder,
    strategy: Strategy | None,
    method: _core.ReadMethod,
) -> CheckpointData:
    """Open the first save that every rank has whole. A strategy that does not fit is no reason to try another one."""
    faults: dict[str, str] = {}
    for save in order.candidates:
        if save.fault is not None:
            faults[save.name] = save.fault
            continue
        try:
            data = open_rank_files(root, files_of(save.name, folders), strategy, method)
        except (CheckpointNotFoundError, CoverageError, DamagedFileError, StorageError) as error:
            if not is_damage(error):
                raise
            faults[save.name] = reason_of(error)
            continue
        for warning in order.warnings:
            _log.warning("%s: %s", root, warning)
        for name, reason in faults.items():
            _log.warning("%s: %s passed over: %s", root, name, reason)
        return replace(data, skipped=tuple(faults.items()))
    lines = [*order.warnings, *(f"{name}: {reason}" for name, reason in faults.items())]
    lines += [f"{one.name}: {one.reason}" for one in order.refused]
    if not lines:
        raise CheckpointNotFoundError(f"the rank folders of {show(str(root))} hold no weight files", path=str(root))
    told = "".join(f"\n  {line}" for line in lines)
    raise DamagedFileError(f"there is no complete checkpoint in {show(str(root))}:{told}", path=str(root))


def files_of(save: str, folders: Mapping[int, Location]) -> dict[int, Location]:
    """The file of each rank of a save; it is told by the name of any of them.

    Example:
        >>> files_of("llama_rank_0-20_2.ckpt", {1: locate("rank_1")})[1]
        Location('rank_1/llama_rank_1-20_2.ckpt')
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
    files: Mapping[int, Location]
    why: str
    fault: str | None
    is_candidate: bool


def rank_saves(root: Location) -> tuple[RankSave, ...]:
    """The saves of a folder of rank folders, as `opening.rank_saves` returns them. Raises StorageError."""
    folders = checkpoint1.rank_folders(root)
    order = order_of_saves(folders)
    told = [(save, True) for save in order.candidates] + [(save, False) for save in order.refused]
    return tuple(
        RankSave(save.name, files_of(save.name, folders), save.reason, save.fault, is_candidate)
        for save, is_candidate in told
    )


def order_of_saves(folders: Mapping[int, Location]) -> SaveOrder:
    """In which order the saves of rank folders are tried; no weight file is opened.

    Raises:
        StorageError: a folder cannot be listed.

    Example:
        >>> [save.name for save in order_of_saves(rank_folders("output/checkpoint")).candidates]  # doctest: +SKIP
        ['llama_rank_0-20_2.safetensors', 'llama_rank_0-15_2.safetensors']
    """
    return order_saves({rank: look_at(folder) for rank, folder in folders.items()})


def look_at(folder: Location) -> RankFolder:
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


def _weight_files(folder: Location) -> Iterator[tuple[str, int]]:
    """Names and times of the weight files of a rank."""
    for name in checkpoint1.list_weight_files(folder):
        with contextlib.suppress(CheckpointNotFoundError):  # retention may remove one meanwhile
            yield name, (folder / name).stat().modified_ns


def rank_of_folder(folder: Location) -> int | None:
    """The rank in the name of a folder."""
    return checkpoint1.parse_rank_folder(_named(folder).name)


def _named(folder: Location) -> Location:
    """A folder under the name that tells its rank: the one that was given, or the one to which that is a link."""
    given = folder.absolute()
    return folder.resolved() if checkpoint1.parse_rank_folder(given.name) is None else given


def open_rank_files(
    root: Location, files: Mapping[int, Location], strategy: StrategyLike | None, method: _core.ReadMethod = "auto"
) -> RankFoldersData:
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
        >>> open_rank_files(locate("output/checkpoint"), files, "output/strategy").keys()  # doctest: +SKIP
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
    return RankFoldersData(
        traits=TRAITS,
        path=root,
        index=index,
        method=method,
        common=common,
        iteration=None if common is None else common.step_num,
        strings=tuple(dict.fromkeys(name for file in ranks.values() for name in file.strings)),
        ckpt_files=frozenset(file.file for file in ranks.values() if file.kind == "ckpt"),
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
    """What was given as such. Raises as `read_strategy` does."""
    return strategy if isinstance(strategy, Strategy) else read_strategy(strategy)


def strategy_for(root: Location, given: StrategyLike | None) -> Strategy | None:
    """The strategy that was given, or that lies in the folder, or where the original writes it: beside it."""
    if given is not None:
        return as_strategy(given)
    # Beside a root there may be another one, and its strategy: what lies in this one is its own.
    for folder in (root / checkpoint1.STRATEGY_FOLDER, root.resolved().parent / checkpoint1.STRATEGY_FOLDER):
        if folder.is_folder() and any(is_strategy(folder / name) for name in folder.names()[:_MAX_NAMED]):
            _log.info("%s is opened with the strategy in %s", root, folder)
            return read_strategy(folder)
    return None


def _check_ranks(root: Location, ranks: Collection[int], strategy: Strategy | None) -> None:
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
