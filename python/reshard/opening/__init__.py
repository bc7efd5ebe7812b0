"""How a path becomes a `Checkpoint`: a file, a folder of whole weights, an iteration folder, or the best one of a root.

`folder` says when an iteration folder is a complete checkpoint, `root` which one of a root is taken, `rank_folders`
both of trees in which every rank has a file of its own. Nothing here writes, and damage found later, while bytes are
read, is not rolled back from: that is for `verbs.load`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from reshard.arguments import checked
from reshard.checkpoint import Checkpoint
from reshard.errors import CheckpointNotFoundError, EmptyRootError
from reshard.formats import registry
from reshard.formats.base import OpenOptions, StrategyLike
from reshard.formats.checkpoint1 import reader as rank_folders
from reshard.formats.checkpoint1.reader import CHECKPOINT1, RankSave, open_rank_files, strategy_for
from reshard.formats.checkpoint2 import names as checkpoint2
from reshard.formats.checkpoint2.reader import Chosen, chosen, marks, open_chosen
from reshard.formats.checkpoint2.root import CHECKPOINT2, best_of, is_damage, newer_than, order_of, reason_of
from reshard.storage.location import Location, locate
from reshard.words import show

if TYPE_CHECKING:
    import os

    from reshard import _core
    from reshard.formats.checkpoint2.candidates import Order
    from reshard.names import NamesLike

__all__ = [
    "Chosen",
    "RankSave",
    "StrategyLike",
    "best_of",
    "chosen",
    "is_damage",
    "iterations",
    "marks",
    "newer_than",
    "open",
    "open_chosen",
    "open_rank_files",
    "order_of",
    "rank_saves",
    "reason_of",
    "strategy_for",
]

_log = logging.getLogger("reshard")


@checked
def open(  # noqa: A001
    path: str | os.PathLike[str],
    *,
    strategy: StrategyLike | None = None,
    names: NamesLike | None = None,
    method: _core.ReadMethod = "auto",
) -> Checkpoint:
    """Open a checkpoint, whatever its format.

    Args:
        path: a `.safetensors` or `.ckpt` file (told apart by content), a Hugging Face folder, full weights in the
            MindSpore layout, the root of a Checkpoint 2.0 tree (the newest complete iteration is opened), or an
            iteration folder; the root of a Checkpoint 1.0 tree or any other folder of `rank_<number>` folders, or one
            of these.
        strategy: how rank folders make up whole tensors: the MindSpore strategy file of a stage, several merged, or the
            folder that holds them. Default: the folder `strategy` beside `path` or in it; without one, tensors can only
            be read rank by rank (`Checkpoint.stored`). What describes itself needs none. A tensor that the strategy
            does not list is whole if all ranks that hold it have the same bytes; these are compared at its first read.
        names: a name map under whose names the tensors are seen, see `Checkpoint.renamed`: a `NameMap`, its file or
            mapping, or a preset such as "qwen3-mindspore"; text that ends in ":reverse" goes the other way.
        method: "map" maps the files, "read" reads them piece by piece, "auto" decides by the file system.

    Returns:
        The opened checkpoint. Names that `reshard.torch.save_file` found tied are keys like others. Close it, or use it
        as a context manager; arrays that it gave out stay valid.

    Raises:
        EmptyRootError: there is nothing at `path`, or an empty folder, and it could become a checkpoint root: a run
            that starts there starts fresh.
        CheckpointNotFoundError: there is nothing that is a checkpoint.
        DamagedFileError: what is there violates its format, is not what its manifest says, or is a save that did not
            end; of a root: every iteration is, each with its reason.
        CoverageError: the stored shards do not cover a tensor.
        MismatchError: the strategy is one of other ranks or other tensors.
        NamesError: the name map does not fit the tensors.

    Example:
        >>> import numpy as np, reshard
        >>> reshard.save_file({"w": np.eye(2, dtype=np.float32)}, "w.safetensors")
        >>> with reshard.open("w.safetensors") as checkpoint:
        ...     checkpoint.keys(), checkpoint["w"].shape
        (['w'], (2, 2))
    """
    if names is not None:
        with open(path, strategy=strategy, method=method) as as_stored:
            return as_stored.renamed(names)
    return _open(locate(path), strategy, method)


def _open(target: Location, strategy: StrategyLike | None, method: _core.ReadMethod) -> Checkpoint:
    found = target.found()
    could_be_root = (
        target.suffix not in (".safetensors", ".ckpt") and checkpoint2.parse_iteration_folder(target.name) is None
    )
    if found is None:
        # A link that leads nowhere was meant to lead somewhere: a disk that is not mounted is no fresh start.
        kind = EmptyRootError if could_be_root and not target.exists() else CheckpointNotFoundError
        raise kind(f"there is nothing at {show(str(target))}", path=str(target))
    if could_be_root and found == "folder" and _is_empty(target):
        raise EmptyRootError(f"{show(str(target))} is an empty folder", path=str(target))
    format_ = registry.detect(target)
    if strategy is not None and not format_.traits.rank_folders:
        _log.warning("%s describes itself: the strategy is not needed, and is not looked at", target)
    return Checkpoint(format_.open(target, OpenOptions(method, strategy)))


def _is_empty(folder: Location) -> bool:
    """Whether there is nothing in a folder but what a first save that never ended leaves behind."""
    return all(name.startswith(".") for name in folder.names())


def iterations(path: str | os.PathLike[str]) -> Order | None:
    """Which iterations a checkpoint root offers, in the order in which `open` tries them.

    Args:
        path: the root; anything else that can be opened is none.

    Returns:
        As `order_of`; None if `path` is no root.

    Raises:
        StorageError: it cannot be listed.

    Example:
        >>> iterations("output/checkpoint").tracker  # doctest: +SKIP
        10
    """
    target = locate(path)
    if not target.is_folder() or registry.detect(target) is not CHECKPOINT2 or not CHECKPOINT2.is_root(target):
        return None
    return order_of(target)


def rank_saves(path: str | os.PathLike[str]) -> tuple[RankSave, ...] | None:
    """The saves of a folder of rank folders, in the order in which `open` tries them, then those that it never tries.

    Returns:
        The saves; None: `path` is no such folder.

    Raises:
        StorageError: a folder cannot be listed.

    Example:
        >>> [save.name for save in rank_saves("output/checkpoint")]  # doctest: +SKIP
        ['llama_rank_0-20_2.safetensors', 'llama_rank_0-15_2.safetensors']
    """
    target = locate(path)
    is_root = target.is_folder() and registry.detect(target) is CHECKPOINT1 and CHECKPOINT1.is_root(target)
    return rank_folders.rank_saves(target) if is_root else None
