"""How a path becomes a `Checkpoint`: a file, a folder of whole weights, an iteration folder, or the best one of a root.

`folder` says when an iteration folder is a complete checkpoint, `root` which one of a root is taken, `rank_folders`
both of trees in which every rank has a file of its own. Nothing here writes, and damage found later, while bytes are
read, is not rolled back from: that is for `verbs.load`.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from reshard import _core
from reshard.arguments import checked
from reshard.checkpoint import Checkpoint
from reshard.errors import CheckpointNotFoundError, EmptyRootError, StorageError
from reshard.formats import checkpoint1, checkpoint2, full_weights, huggingface, tiles
from reshard.formats import manifest as manifests
from reshard.formats.rank_file import add_rank_file, kind_of
from reshard.opening.folder import Chosen, chosen, marks, open_chosen, open_folder, opened_proof, unfinished
from reshard.opening.rank_folders import (
    RankSave,
    StrategyLike,
    open_rank_files,
    open_rank_folder,
    open_rank_folders,
    rank_of_folder,
    rank_saves,
    strategy_for,
)
from reshard.opening.root import best_of, is_damage, iterations, newer_than, order_of, reason_of
from reshard.opening.weights import open_full_weights
from reshard.small_files import show
from reshard.words import listed

if TYPE_CHECKING:
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
            MindSpore layout, the root of a Checkpoint 2.0 tree (the last complete iteration is taken, see
            `reshard.resume.resolve`), or an iteration folder; the root of a Checkpoint 1.0 tree or any other folder of
            `rank_<number>` folders, or one of these.
        strategy: how rank folders make up whole tensors: the MindSpore strategy file of a stage, several merged, or the
            folder that holds them. Default: the folder `strategy` beside `path` or in it; without one, tensors can only
            be read rank by rank (`Checkpoint.stored`). What describes itself needs none.
        names: a name map under whose names the tensors are seen, see `Checkpoint.renamed`: a `NameMap`, its file or
            mapping, or a preset such as "qwen3-mindspore"; text that ends in ":reverse" goes the other way.
        method: "map" maps the files, "read" reads them piece by piece, "auto" decides by the file system.

    Returns:
        The opened checkpoint. Close it, or use it as a context manager; arrays that it gave out stay valid.

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
    target = Path(path)
    try:
        exists = target.exists()
    except OSError as error:  # a name that is too long, a folder that may not be searched
        raise StorageError(f"looking for {target}: {error.strerror}", path=str(target), errno=error.errno) from None
    could_be_root = (
        target.suffix not in (".safetensors", ".ckpt") and checkpoint2.parse_iteration_folder(target.name) is None
    )
    if not exists:
        # A link that leads nowhere was meant to lead somewhere: a disk that is not mounted is no fresh start.
        kind = EmptyRootError if could_be_root and not target.is_symlink() else CheckpointNotFoundError
        raise kind(f"there is nothing at {show(str(target))}", path=str(target))
    if could_be_root and target.is_dir() and _is_empty(target):
        raise EmptyRootError(f"{show(str(target))} is an empty folder", path=str(target))
    checkpoint = _open_whole(target, method)
    if checkpoint is None:
        if checkpoint1.is_root(target):
            return open_rank_folders(target, strategy, method)
        if rank_of_folder(target) is not None and not _is_described(target):
            return open_rank_folder(target, strategy, method)
        checkpoint = open_folder(target, method)
    if strategy is not None:
        _log.warning("%s describes itself: the strategy is not needed, and is not looked at", target)
    return checkpoint


def _open_whole(target: Path, method: _core.ReadMethod) -> Checkpoint | None:
    """Open what says by itself what it is; None: it is another kind of folder."""
    if not target.is_dir():
        return _open_file(target, method)
    if huggingface.detect(target):
        return _open_huggingface(target, method)
    if full_weights.detect(target):
        return open_full_weights(target, method)
    if checkpoint2.is_root(target):
        return best_of(target, method)
    return None


def _is_described(folder: Path) -> bool:
    """Whether a folder that bears the name of a rank holds something else, such as an iteration or a conversion."""
    names = (checkpoint2.METADATA_FILE, tiles.TILES_FILE, manifests.MANIFEST_FILE)
    return any(os.path.lexists(folder / name) for name in names)


def _is_empty(folder: Path) -> bool:
    """Whether there is nothing in a folder but what a first save that never ended leaves behind."""
    with os.scandir(folder) as entries:
        return all(entry.name.startswith(".") for entry in entries)


# -- files, and folders of others


def _open_file(path: Path, method: _core.ReadMethod) -> Checkpoint:
    index = _core.Index()
    if kind_of(path, follow_links=True) == "ckpt":
        return _open_ckpt(index, path, method)
    file = index.add_file(str(path), method=method)
    with opened_proof(path.parent) as proof:
        manifest = proof.manifest
        if manifest is not None and path.name not in manifest.shards:
            _log.warning("%s is not in the manifest beside it: nothing that is read of it can be verified", path)
            manifest = None
        elif manifest is not None:
            manifests.set_sums(index, path.parent, manifest)
        elif proof.is_damaged and checkpoint2.WRITER_KEY in (index.file_metadata(file) or {}):
            raise unfinished(path, path.name, proof)
        index.add_whole_file(file)
        return Checkpoint("safetensors", path, index, manifest, proof.keep_lock() if manifest is not None else None)


def _open_ckpt(index: _core.Index, path: Path, method: _core.ReadMethod) -> Checkpoint:
    opened = add_rank_file(index, path, follow_links=True, method=method)
    for key in opened.tensors:
        index.add_whole(key, opened.file)
    if opened.strings:
        names = listed(map(show, opened.strings))
        _log.warning("%s: %d values are text and no tensors, and are left out: %s", path, len(opened.strings), names)
    checkpoint = Checkpoint("ckpt", path, index)
    checkpoint.strings = opened.strings
    return checkpoint


def _open_huggingface(folder: Path, method: _core.ReadMethod) -> Checkpoint:
    index = _core.Index()
    weight_map = huggingface.read_weight_map(folder)
    if weight_map is None:
        file = index.add_file(str(folder / huggingface.SINGLE_FILE), method=method)
        index.add_whole_file(file)
        return Checkpoint("huggingface", folder, index)
    # Files of a hub cache are symbolic links into its store: here links are followed.
    files = {name: index.add_file(str(folder / name), method=method) for name in dict.fromkeys(weight_map.values())}
    for key, name in weight_map.items():
        index.add_whole(key, files[name])
    return Checkpoint("huggingface", folder, index)
