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
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from reshard import _core
from reshard.checkpoint import Checkpoint
from reshard.errors import CheckpointNotFoundError, CoverageError, DamagedFileError, MismatchError, StorageError
from reshard.formats import checkpoint1, checkpoint2, full_weights, huggingface, scalars
from reshard.formats.rank_file import add_rank_file, placed
from reshard.layout.strategy import Strategy, box_of
from reshard.layout.strategy_file import is_strategy
from reshard.layout.strategy_folder import read_strategy
from reshard.opening.root import is_damage, reason_of
from reshard.outputs import as_array
from reshard.resume.checkpoint1 import RankFolder, name_of_rank, order_saves
from reshard.small_files import show

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from reshard.formats.checkpoint2 import CommonInfo
    from reshard.formats.rank_file import LocalTensor, Placed, RankFile
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

_FOLDER = re.compile("rank_(0|[1-9][0-9]{0,17})")
_STRATEGY_FOLDER = "strategy"
_MAX_NAMED = 8
# What all ranks of one save agree on; where they do not, files of different saves lie together.
_SAME_ON_ALL = ("epoch_num", "step_num", "global_step")


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
    rank = rank_of_folder(folder)
    known = None if strategy is None else as_strategy(strategy)
    _check_ranks(folder, {rank: folder}, known)
    n_others = len(checkpoint1.rank_folders(folder.resolve().parent)) - 1
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


def rank_of_folder(folder: Path) -> int:
    """The rank in the name of a folder, or -1."""
    match = _FOLDER.fullmatch(folder.resolve().name)
    return -1 if match is None else int(match[1])


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
        DamagedFileError: a file violates its format, or files of different saves lie together.
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
    tree = _Tree(root, ranks, known)
    for key in tree.keys:
        if key not in tree.unplaced:
            # Ranks that hold the same part may have it in other records: these overlap, and are no replicas.
            is_split = any(len(one.parts) > 1 for one in tree.held[key].values())
            index.add_tiles(key, *tree.placed(key), overlapping=is_split)
    tree.prove(index)
    tree.warn()
    checkpoint = Checkpoint("checkpoint1", root, index)
    checkpoint._place_ranks(  # noqa: SLF001  made here, as all of it
        ranks, tree.keys, tree.unplaced, known, tree.followed
    )
    checkpoint._method = method  # noqa: SLF001
    checkpoint.strings = tuple(dict.fromkeys(name for file in ranks.values() for name in file.strings))
    checkpoint.common = tree.common(method)
    checkpoint.iteration = None if checkpoint.common is None else checkpoint.common.step_num
    return checkpoint


# -- strategies


def as_strategy(strategy: StrategyLike) -> Strategy:
    """What was given as such. Raises as `read_strategy` does."""
    return strategy if isinstance(strategy, Strategy) else read_strategy(strategy)


def strategy_for(root: Path, given: StrategyLike | None) -> Strategy | None:
    """The strategy that was given, or that lies in the folder, or where the original writes it: beside it."""
    if given is not None:
        return as_strategy(given)
    for folder in (root / _STRATEGY_FOLDER, root.resolve().parent / _STRATEGY_FOLDER):
        if folder.is_dir() and any(is_strategy(path) for path in sorted(folder.iterdir())[:_MAX_NAMED]):
            _log.info("%s is opened with the strategy in %s", root, folder)
            return read_strategy(folder)
    return None


def _check_ranks(root: Path, ranks: Collection[int], strategy: Strategy | None) -> None:
    """Refuse a tree in which ranks are missing, as far as they are known."""
    hint = "bring the folders of all ranks together; the folder of one rank can be opened alone"
    if strategy is None:
        if len(ranks) > 1 and (missing := _missing(ranks, max(ranks))):
            raise CheckpointNotFoundError(
                f"{show(str(root))} has no file of rank {_some(missing)}", path=str(root), hint=hint
            )
        return
    if missing := _missing(ranks, strategy.world_size):
        stages = dict.fromkeys(rank // strategy.devices_per_stage for rank in missing)
        raise CheckpointNotFoundError(
            f"{show(str(root))} has no file of rank {_some(missing)} (stage {_some(stages)}); "
            f"{show(strategy.source)} is one of {strategy.n_stages} stages of {strategy.devices_per_stage} ranks",
            path=str(root),
            hint="one rank is opened without a strategy; with it, open the folder above" if len(ranks) == 1 else hint,
        )
    more = sorted(rank for rank in ranks if rank >= strategy.world_size)
    if more:
        raise MismatchError(
            f"{show(str(root))} has files of rank {_some(more)}, and {show(strategy.source)} is one of "
            f"{strategy.world_size} ranks",
            path=str(root),
            hint="give the strategies of all pipeline stages: the folder that holds them, or the merged file",
        )


# -- from local arrays to whole tensors


class _Tree:
    """What the files of all ranks hold, key by key."""

    def __init__(self, root: Path, files: Mapping[int, RankFile], strategy: Strategy | None) -> None:
        self.root = root
        self.files = files
        self.strategy = strategy
        self.held: dict[str, dict[int, LocalTensor]] = {}
        for rank, file in files.items():
            for key, tensor in file.tensors.items():
                self.held.setdefault(key, {})[rank] = tensor
        self.keys = list(self.held)
        self.unplaced: dict[str, tuple[str, tuple[tuple[int, ...], ...]]] = {}
        if strategy is None and len(files) > 1:
            self.unplaced = {
                key: (self._dtype(key), tuple(dict.fromkeys(one.shape for one in held.values())))
                for key, held in self.held.items()
                if not _is_counter(key, held.values())
            }
        self.unlisted = [] if strategy is None else [key for key in self.keys if not strategy.stages_of(key)]
        self.followed = {key: parameter for key in self.unlisted if (parameter := self._followed(key)) is not None}

    def name(self, rank: int) -> str:
        """What messages call a rank's file."""
        return show(os.path.relpath(self.files[rank].path, self.root))

    def _followed(self, key: str) -> str | None:
        """The parameter as which state is cut that the strategy does not name: every part is of that one's shape."""
        state = scalars.parameter_of(key)
        if self.strategy is None or state is None or not self.strategy.stages_of(state[1]):
            return None
        parts = self.held.get(state[1], {})
        is_alike = all(rank in parts and parts[rank].shape == one.shape for rank, one in self.held[key].items())
        return state[1] if is_alike else None

    def placed(self, key: str) -> tuple[str, tuple[int, ...], Placed]:
        """A whole tensor as dtype and shape, and where its parts lie: what `Index.add_tiles` takes.

        Raises:
            DamagedFileError: the ranks differ in its dtype.
            MismatchError: their arrays are not parts of one tensor.
        """
        dtype = self._dtype(key)
        found: dict[tuple[int, ...], int] = {}
        stored: Placed = []
        for rank, tensor in self.held[key].items():
            shape, offset = self._box(key, rank, tensor.shape)
            found.setdefault(shape, rank)
            stored += placed(self.files[rank], key, offset)
        if len(found) > 1:
            (a, first), (b, second), *_ = found.items()
            why = "is not in the strategy, so that every rank would hold the same" if key in self.unlisted else ""
            why = why or "is a part of different tensors"
            raise MismatchError(
                f"{show(key)} {why}: by {self.name(first)} it has shape {a}, by {self.name(second)} {b}",
                path=str(self.files[second].path),
                key=key,
                hint="is this the strategy with which the checkpoint was written?",
            )
        return dtype, next(iter(found)), stored

    def _box(self, key: str, rank: int, local: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape of a whole tensor, and the offset of a rank's array in it."""
        whole = local, (0,) * len(local)
        if self.strategy is None:
            return whole
        if key in self.unlisted and key not in self.followed:
            return whole
        box = box_of(self.strategy, self.followed.get(key, key), rank, local)
        if box is None:
            stages = _some(self.strategy.stages_of(key))
            raise MismatchError(
                f"{self.name(rank)} holds {show(key)}, which {show(self.strategy.source)} places on stage {stages}",
                path=str(self.files[rank].path),
                key=key,
                hint="is this the strategy with which the checkpoint was written?",
            )
        return box

    def _dtype(self, key: str) -> str:
        found: dict[str, int] = {}
        for rank, tensor in self.held[key].items():
            found.setdefault(tensor.dtype, rank)
        if len(found) > 1:
            (a, first), (b, second), *_ = found.items()
            raise DamagedFileError(
                f"{show(key)} is {a} in {self.name(first)} and {b} in {self.name(second)}",
                path=str(self.files[second].path),
                key=key,
            )
        return next(iter(found))

    def prove(self, index: _core.Index) -> None:
        """Prove that no tensor has a hole; the error says which ranks do not hold it.

        Raises:
            CoverageError: one has.
        """
        try:
            index.prove()
        except CoverageError as error:
            if self.strategy is not None and error.key in self.held:
                n = self.strategy.devices_per_stage
                ranks = (s * n + i for s in self.strategy.stages_of(error.key) for i in range(n))
                lacking = [rank for rank in ranks if rank not in self.held[error.key]]
                error.path = str(self.root)
                error.message += f"; it is missing in the file of rank {_some(lacking)}"
            raise

    def warn(self) -> None:
        """Tell what is read otherwise than the files say."""
        for rank, file in self.files.items():
            if file.strings:
                _log.warning("%s holds text, which is passed over: %s", self.name(rank), _some(map(show, file.strings)))
        if self.strategy is None:
            return
        if self.followed:
            told = _some(map(show, self.followed))
            _log.warning("%s does not list %s: taken to be cut as its parameter", self.strategy.source, told)
        whole = [
            key for key in self.unlisted if key not in self.followed and not _is_counter(key, self.held[key].values())
        ]
        if whole:
            told = _some(map(show, whole))
            _log.warning("%s does not list %s: taken for whole on every rank", self.strategy.source, told)

    def common(self, method: _core.ReadMethod) -> CommonInfo | None:
        """The counters, of which all ranks must tell the same; None: there are none.

        Raises:
            DamagedFileError: they do not: files of different saves lie together.
        """
        found: dict[int, CommonInfo] = {}
        for rank, file in self.files.items():
            names = [name for name in scalars.NAMES if name in file.tensors]
            if not names:
                continue
            index = _core.Index()
            again = add_rank_file(index, file.path, method=method)
            request = _core.Request()
            for name in names:
                shape = again.tensors[name].shape
                if shape not in ((), (1,)):  # looked at before it is read: it can be of any size
                    raise DamagedFileError(
                        f"{self.name(rank)}: the counter `{name}` has shape {shape}, expected one element",
                        path=str(file.path),
                        key=name,
                    )
                index.add_tiles(name, again.tensors[name].dtype, shape, placed(again, name, (0,) * len(shape)))
                request.add_region(name, name, (0,) * len(shape), shape)
            # A sum of its own a file may have is not compared yet: that would read all of it.
            plan = index.plan(request, verify=False)
            places = zip(plan.arrays, plan.load(), strict=True)
            arrays = {name: as_array(*place, dtype, shape) for (name, dtype, shape, _), place in places}
            found[rank] = scalars.common_of(arrays, str(file.path))
            index.close()
        if not found:
            return None
        first, *others = found
        for rank in others:
            for name in _SAME_ON_ALL:
                a, b = getattr(found[first], name), getattr(found[rank], name)
                if a is not None and b is not None and a != b:
                    raise DamagedFileError(
                        f"`{name}` is {a} in {self.name(first)} and {b} in {self.name(rank)}: they are of two saves",
                        path=str(self.files[rank].path),
                        key=name,
                    )
        return found[first]


def _is_counter(key: str, held: Iterable[LocalTensor]) -> bool:
    """Whether every rank holds one and the same number under a key, however it is cut."""
    return all(not one.shape or (key in scalars.OF_NO_PARAMETER and one.shape == (1,)) for one in held)


def _missing(ranks: Collection[int], n: int) -> list[int]:
    """The first ranks of so many that are missing; not all of them, since a number can be anything."""
    return list(itertools.islice((rank for rank in range(n) if rank not in ranks), _MAX_NAMED + 1))


def _some(items: Iterable[object]) -> str:
    listed = list(itertools.islice(items, _MAX_NAMED + 1))
    more = ", ..." if len(listed) > _MAX_NAMED else ""
    return ", ".join(map(str, listed[:_MAX_NAMED])) + more
