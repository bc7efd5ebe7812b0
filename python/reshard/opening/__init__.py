"""Opens a path as a `Checkpoint`: a file, a folder of whole weights, an iteration folder, or the best one of a root.

The format packages decide whether a checkpoint is complete, and which one of a root is opened. Nothing here writes. If
damage is found later, while bytes are read, `verbs.load` falls back to another checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from reshard.checkpoint import Checkpoint
from reshard.commit import manifest as manifests
from reshard.commit import roots
from reshard.errors import (
    ArgumentError,
    CheckpointNotFoundError,
    DamagedFileError,
    EmptyRootError,
    MismatchError,
    ReshardError,
    StorageError,
)
from reshard.formats import registry
from reshard.formats.base import Match, OpenOptions, RankRoot, StrategyLike
from reshard.lazy import exports
from reshard.opening import several
from reshard.storage.location import BROKEN_LINK_HINT, Location, locate
from reshard.values.argument_types import ReadMethod
from reshard.values.arguments import checked
from reshard.values.words import counted, hub_hint, show

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from reshard.commit.candidates import Order
    from reshard.commit.folder_facts import marks as marks
    from reshard.commit.folder_facts import newer_than as newer_than
    from reshard.commit.scrub import is_damage as is_damage
    from reshard.commit.scrub import reason_of as reason_of
    from reshard.formats.base import Root
    from reshard.formats.chosen import Chosen as Chosen
    from reshard.formats.registry import open_chosen as open_chosen
    from reshard.names import NamesLike

_names, __getattr__ = exports(
    __name__,
    {
        "reshard.formats.chosen": ["Chosen"],
        "reshard.formats.registry": ["open_chosen"],
        "reshard.commit.folder_facts": ["marks", "newer_than"],
        "reshard.commit.scrub": ["is_damage", "reason_of"],
    },
)
__all__ = [*_names, "StrategyLike", "chosen", "iterations", "open", "root_of"]  # noqa: PLE0604  names, found above

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_OTHERS = (
    (
        (_LFS_POINTER,),
        "a pointer of Git LFS: the file itself was not downloaded",
        "run `git lfs pull` in the clone, or download the model with `hf download`",
    ),
    (
        (b"<!doctype html", b"<html", b"<?xml"),
        "the text of a page: a server answered with it in place of the file",
        "download the file again; that of a gated model needs a token",
    ),
    ((b"\x89hdf\r\n\x1a\n",), "an HDF5 file, as Keras writes it, which is not read", None),
)
"""Lower-case first bytes, what such a file is, and what to do."""
_LOST_FILES = "lost+found"  # made by mkfs in the top folder of a volume; fsck puts files without a name there
_log = logging.getLogger("reshard")


@checked
def open(  # noqa: A001
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    strategy: StrategyLike | None = None,
    names: NamesLike | None = None,
    method: ReadMethod = "auto",
    format: str | None = None,  # noqa: A002  as in `save`
) -> Checkpoint:
    """Open a checkpoint, whatever its format.

    Args:
        path: a `.safetensors` or `.ckpt` file (detected by content), a Hugging Face folder, full weights in the
            MindSpore layout, the root of a Checkpoint 2.0 tree (the newest complete iteration is opened), or an
            iteration folder; the root of a Checkpoint 1.0 tree or any other folder of `rank_<number>` folders, or one
            of these folders. A list of weight files, or a pattern of their names such as `model/part-*.safetensors`, is
            opened as one checkpoint with the tensors of all of them.
        strategy: the strategy of rank folders: the MindSpore strategy file of a stage, a merged file, or the folder of
            the files. Default: the folder `strategy` beside `path` or in it; without one, tensors can only be read rank
            by rank (`Checkpoint.stored`). A tensor that the strategy does not list is whole if all ranks that hold it
            have the same bytes; these are compared when it is first read. For rank folders of Megatron-LM, a layout
            file whose rules are tried before those of Megatron-LM. For several ranks of vLLM, a layout file that says
            how they divide the tensors. Other formats need none.
        names: a name map that renames the tensors, see `Checkpoint.renamed`: a `NameMap`, its file or mapping, or a
            preset such as "qwen3-mindspore". A text that ends in ":reverse" applies the map in reverse.
        method: "map" maps the files, "read" reads them at positions, "auto" decides by the file system.
        format: of a folder that holds checkpoints of several formats, which one is opened, such as "huggingface" or
            "deepspeed": a value of `Checkpoint.format`.

    Returns:
        The opened checkpoint. All names of tensors that `reshard.torch.save_file` stored as tied are keys. Close it, or
        use it as a context manager; arrays that it returned stay valid.

    Raises:
        EmptyRootError: there is nothing at `path`, or an empty folder, and it could become a checkpoint root: a run
            starts fresh there.
        CheckpointNotFoundError: there is no checkpoint at `path`.
        DamagedFileError: the checkpoint violates its format, differs from its manifest, or is an unfinished save; for a
            root: no iteration is complete, each with its reason.
        CoverageError: the stored shards do not cover a tensor.
        MismatchError: the strategy has other ranks or other tensors.
        NamesError: the name map does not match the tensors.
        ArgumentError: the path holds no checkpoint of `format`.
        UnsupportedError: weights are placeholders without elements, beside a checkpoint of another format.

    Example:
        >>> import numpy as np, reshard
        >>> reshard.save_file({"w": np.eye(2, dtype=np.float32)}, "w.safetensors")
        >>> with reshard.open("w.safetensors") as checkpoint:
        ...     checkpoint.keys(), checkpoint["w"].shape
        (['w'], (2, 2))
    """
    files = several.files_of(path)
    target = several.common_folder(files) if isinstance(path, list | tuple) else locate(path)  # type: ignore[arg-type]
    target = roots.published(target)

    def as_stored() -> Checkpoint:
        if files is None:
            return _open(target, strategy, method, format)
        return _open_files(files, target, strategy, method, format)

    with target.store.remembering():
        if names is None:
            opened = as_stored()
        else:
            with as_stored() as stored:
                opened = stored.renamed(names)
    # A pickled checkpoint is opened again by its own folder: a root may have a newer one by then.
    is_iteration = opened.path.name != target.name and roots.parse_iteration_folder(opened.path.name) is not None
    again = str((locate(opened.path) if is_iteration else target).absolute())
    those = again if files is None else tuple(str(file.absolute()) for file in files)
    options = (strategy, names, method)
    opened._reopen = partial(_open_again, those, opened.iteration, *options, of_format=format)  # noqa: SLF001
    return opened


def _open_files(
    files: Sequence[Location],
    target: Location,
    strategy: StrategyLike | None,
    method: ReadMethod,
    name: str | None,
) -> Checkpoint:
    """Open the files that a list or a pattern names."""
    if strategy is not None or name not in (None, registry.SEVERAL_FILES.traits.name):
        raise ArgumentError(
            f"{counted(len(files), 'file')} of weights {'are' if len(files) > 1 else 'is'} opened as one checkpoint: "
            "`strategy` and `format` have no meaning there",
            path=str(target),
        )
    return Checkpoint(registry.SEVERAL_FILES.open_files(files, target, method))


def _open_again(
    path: str | tuple[str, ...],
    iteration: int | None,
    strategy: StrategyLike | None,
    names: NamesLike | None,
    method: ReadMethod,
    *,
    of_format: str | None,
) -> Checkpoint:
    """Open a checkpoint that was pickled. Raises MismatchError if its path has another iteration now."""
    opened = open(path, strategy=strategy, names=names, method=method, format=of_format)
    if opened.iteration != iteration:
        opened.close()
        place = str(opened.path)
        raise MismatchError(
            f"{show(place)} holds iteration {opened.iteration}, and held {iteration} when it was pickled",
            path=place,
            hint="open it again in the process that pickled it",
        )
    return opened


def _open(target: Location, strategy: StrategyLike | None, method: ReadMethod, name: str | None) -> Checkpoint:
    found = target.found()
    could_be_root = target.suffix not in (".safetensors", ".ckpt") and roots.parse_iteration_folder(target.name) is None
    if found is None:
        # A broken link can mean that a disk is not mounted, so it is not an empty root.
        if (broken := target.broken_link()) is not None:
            raise CheckpointNotFoundError(
                f"there is nothing at {show(str(target))}: {broken}", path=str(target), hint=BROKEN_LINK_HINT
            )
        kind = EmptyRootError if could_be_root and not target.exists() else CheckpointNotFoundError
        hint = None if target.parent.exists() else hub_hint(str(target))
        raise kind(f"there is nothing at {show(str(target))}", path=str(target), hint=hint)
    if could_be_root and found == "folder" and _is_empty(target):
        raise EmptyRootError(f"{show(str(target))} is an empty folder", path=str(target))
    format_ = registry.detect(target) if name is None else registry.of_name(target, name)
    if strategy is not None and not (format_.traits.rank_folders or format_.traits.takes_strategy):
        _log.warning("%s does not consist of rank folders: the strategy is ignored", target)
    try:
        data = format_.open(target, OpenOptions(method, strategy))
    except (DamagedFileError, CheckpointNotFoundError) as error:
        _check_downloaded(error)
        if format_.detect(target) is Match.FALLBACK and error.path == str(target):
            _say_what_is_there(error, target)
        elif isinstance(error, DamagedFileError) and found == "file" and format_.may_be_foreign(target):
            _say_which_archive(error, target)
        raise
    if name is None and found == "folder":
        registry.check_alone(data, target)
    return Checkpoint(data)


def _say_what_is_there(error: ReshardError, target: Location) -> None:
    """Complete the message of an error: no format recognised the path."""
    from reshard.opening.what_is_there import what_is_there  # noqa: PLC0415  not needed without such an error

    if not isinstance(error, CheckpointNotFoundError):
        return
    there = what_is_there(target)
    error.message = f"{error.message}: {there.text}"
    error.hint = there.hint or error.hint


def _say_which_archive(error: DamagedFileError, file: Location) -> None:
    """Complete the message of an error: a zip archive of another tool looks like a torch file."""
    from reshard.opening.what_is_there import what_is_there  # noqa: PLC0415  not needed without such an error

    there = what_is_there(file)
    error.message = f"{error.message}: {there.text}"
    error.hint = error.hint or there.hint


def _check_downloaded(error: ReshardError) -> None:
    """Raises DamagedFileError if the first bytes of the file of an error say what it is instead of weights.

    Git leaves such a file in a clone in place of one that LFS stores, and a server answers with a page.
    """
    if error.path is None or (file := locate(error.path)).kind(follow_links=True) != "file":
        return
    head = file.read_head(len(_LFS_POINTER), follow_links=True)
    for starts, what, hint in _OTHERS:
        if head.lower().startswith(starts) and (isinstance(error, DamagedFileError) or starts == (_LFS_POINTER,)):
            raise DamagedFileError(f"{show(str(file))} is {what}", path=error.path, hint=hint) from None


def _is_empty(folder: Location) -> bool:
    """Whether a folder contains at most what an unfinished first save leaves: hidden entries and a log of events.

    A `.metadata` without its data files is a damaged checkpoint: a run must not start over because of it. The folder
    `lost+found` of a new volume is ignored if it is empty.

    Raises:
        StorageError: a folder cannot be listed.
    """
    from reshard.commit.event_log import EVENT_FILE, OLD_EVENT_FILE  # noqa: PLC0415  slow to import

    rest = {
        entry.name
        for entry in folder.entries()
        if not (entry.name.startswith(".") and entry.name not in registry.HIDDEN_FILES)
        and not (entry.name in (EVENT_FILE, OLD_EVENT_FILE) and entry.kind == "file")
    }
    if rest != {_LOST_FILES}:
        return not rest
    try:
        return not (folder / _LOST_FILES).names()
    except StorageError as error:
        error.hint = "if the volume is new, use a folder in it as the checkpoint root"
        raise


def chosen(checkpoint: Checkpoint) -> Chosen | None:
    """What other ranks need to open the same checkpoint; None: they open its path."""
    known, manifest = checkpoint.data.chosen, checkpoint.data.manifest
    return known if known is None or manifest is None else replace(known, outline=manifests.outline(manifest))


def root_of(path: str | os.PathLike[str], *, strategy: StrategyLike | None = None) -> Root | None:
    """The checkpoints of a root, in the order in which `open` tries them. It opens none, and is left by the caller.

    Args:
        path: the root.
        strategy: as in `open`, for those that are opened with it.

    Returns:
        None if `path` is no root: one checkpoint, or nothing.

    Raises:
        StorageError: it cannot be listed.

    Example:
        >>> import numpy as np, reshard
        >>> _ = reshard.save("run", 10, {"w": np.zeros(4)})
        >>> with root_of("run") as root:
        ...     root.order.tracker
        10
    """
    target = locate(path)
    return registry.detect(target).root(target, OpenOptions(strategy=strategy)) if target.is_folder() else None


def iterations(path: str | os.PathLike[str]) -> Order | None:
    """The iterations of a checkpoint root, in the order in which `open` tries them; None for other paths.

    Raises:
        StorageError: it cannot be listed.

    Example:
        >>> import numpy as np, reshard
        >>> _ = reshard.save("run", 10, {"w": np.zeros(4)})
        >>> iterations("run").tracker
        10
    """
    with root_of(path) or contextlib.nullcontext() as root:
        return root.order if root is not None and root.is_ours and not isinstance(root, RankRoot) else None
