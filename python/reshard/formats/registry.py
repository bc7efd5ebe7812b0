"""All formats: those that are opened, in the order in which they are tried, those that are converted to or saved.

A new format is a module with a subclass of `formats.base.Format` and one entry here. If the reader takes long to
import, the subclass is in a module `format`, which imports it when something is opened. To be written, it has a
subclass of `conversion.writer.Writer`, to be saved a subclass of `write.phases.Draft`, each with one entry.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from reshard.commit import roots
from reshard.errors import ArgumentError, DestinationExistsError, UnsupportedError
from reshard.formats.base import Match, OpenOptions, RankRoot
from reshard.formats.checkpoint1.format import CHECKPOINT1
from reshard.formats.checkpoint2.format import CHECKPOINT2, TILED
from reshard.formats.ckpt.reader import CKPT
from reshard.formats.dcp.format import DCP
from reshard.formats.deepspeed.format import DEEPSPEED
from reshard.formats.fsdp_ranks import names as shard_names
from reshard.formats.fsdp_ranks.format import FSDP_RANKS
from reshard.formats.full_weights.reader import FULL_WEIGHTS
from reshard.formats.gguf.format import GGUF
from reshard.formats.huggingface.reader import HUGGINGFACE
from reshard.formats.megatron.format import MEGATRON
from reshard.formats.nanotron.format import NANOTRON
from reshard.formats.nemo.format import NEMO
from reshard.formats.rank_saves import RankFormat
from reshard.formats.single_file.reader import SINGLE_FILE
from reshard.formats.torch_file.format import TORCH_FILE
from reshard.formats.torchtune.format import TORCHTUNE
from reshard.formats.trainer_run.format import TRAINER_RUN
from reshard.formats.vllm.format import VLLM
from reshard.formats.weight_files import names as weight_names
from reshard.formats.weight_files.format import WEIGHT_FILES
from reshard.storage.location import locate
from reshard.values.words import check_text, listed, show

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from reshard._core import ReadMethod
    from reshard.conversion.known_files import KnownFiles
    from reshard.conversion.writer import Writer
    from reshard.formats.base import CheckpointData, Format, Root
    from reshard.formats.chosen import Chosen
    from reshard.formats.rank_saves import RankSaves, SavesRoot
    from reshard.storage.location import Location
    from reshard.write.phases import Draft

FORMATS: tuple[Format, ...] = (
    HUGGINGFACE,
    FULL_WEIGHTS,
    MEGATRON,
    DCP,
    DEEPSPEED,
    FSDP_RANKS,
    NANOTRON,
    VLLM,
    CHECKPOINT2,
    CHECKPOINT1,
    TILED,
    TORCH_FILE,
    WEIGHT_FILES,
    TRAINER_RUN,
    TORCHTUNE,
    NEMO,
    GGUF,
    CKPT,
    SINGLE_FILE,
)

ITERATIONS = CHECKPOINT2
"""The format of the iterations of a root that has a tracker."""
SEVERAL_FILES = WEIGHT_FILES
"""The format of a list of files that is opened as one checkpoint."""
HIDDEN_FILES = frozenset(name for one in FORMATS for name in one.hidden_files)
"""Files whose names begin with a dot, and that belong to a checkpoint."""

# A folder of weights has these formats, too, if it holds a name map or tiles.json, as a copy of a model can.
_OF_THE_SAME_FILES = (FULL_WEIGHTS, TILED)
_TENSOR_FILES = (".bin", ".ckpt", ".pt", ".pth", ".safetensors")
_OTHER_FILES = (".ckpt", ".distcp", ".gguf", ".h5", ".npy", ".npz", ".onnx", ".safetensor")

_log = logging.getLogger("reshard")


def detect(path: Location) -> Format:
    """The format of an existing path: the first that matches, else the first that accepts it as a fallback.

    A folder with iterations that this package has completed is a root of Checkpoint 2.0, whatever lies beside them: a
    run is resumed from what was saved.

    Raises:
        StorageError: the system failed to list or read the path.

    Example:
        >>> import numpy as np, reshard
        >>> from reshard.storage.location import locate
        >>> reshard.save_file({"w": np.zeros(2)}, "w.safetensors")
        >>> detect(locate("w.safetensors")).traits.name
        'safetensors'
    """
    if roots.holds_saves(path):
        return CHECKPOINT2
    found: Format = SINGLE_FILE
    certainty = Match.NO
    for one in FORMATS:
        match = one.detect(path)
        if match is Match.YES:
            return one
        if match > certainty:
            found, certainty = one, match
    return found


def numbered_root(path: Location, iteration: int, options: OpenOptions) -> Root | None:
    """One iteration of a folder whose checkpoints are named `iteration_<number>`; None: it is no such folder.

    Args:
        path: the folder, which need not exist.
        iteration: the number.
        options: with which the iteration is opened.

    Raises:
        StorageError: the folder cannot be listed.

    Example:
        >>> from reshard.formats.base import OpenOptions
        >>> from reshard.storage.location import locate
        >>> numbered_root(locate("not/there"), 400, OpenOptions()) is None
        True
    """
    if not path.is_folder():
        return None
    found = (one.root(path, options, exact=iteration) for one in FORMATS)
    return next((root for root in found if root is not None), None)


def open_chosen(chosen: Chosen, *, method: ReadMethod = "auto") -> CheckpointData:
    """Open a folder that another rank has opened and checked. Shard files are opened when they are first used.

    Args:
        chosen: what that rank has sent.
        method: how files are read, as in `reshard.open`.

    Raises:
        MismatchError: the folder has another digest here.
        DamagedFileError: a file does not match the manifest or the description.
        CheckpointNotFoundError: it is missing, or not visible yet.

    Example:
        >>> import numpy as np, reshard
        >>> from reshard.opening import chosen
        >>> _ = reshard.save("run", 5, {"w": np.zeros(4)})
        >>> with reshard.open("run") as checkpoint:
        ...     known = chosen(checkpoint)
        >>> open_chosen(known).iteration
        5
    """
    return CHECKPOINT2.open(locate(chosen.folder), OpenOptions(method, known=chosen))


def rank_root(path: Location, options: OpenOptions) -> RankRoot | None:
    """The root of the rank folders in a folder, whatever lies beside them; None: there are none.

    Raises:
        StorageError: the folder cannot be listed.
    """
    found = (one.root(path, options) for one in FORMATS if one.traits.rank_folders)
    return next((root for root in found if isinstance(root, RankRoot)), None)


def saves_at(path: Location, of: Format | None = None, *, iteration: int | None = None) -> SavesRoot | None:
    """As `RankFormat.saves_at`, of the first format that has saves there.

    Args:
        path: the path.
        of: only this format; None: any.
        iteration: the requested save, by its number of steps.

    Raises:
        StorageError: the folder cannot be listed.
    """
    formats = [one for one in FORMATS if isinstance(one, RankFormat) and of in (None, one)]
    return next((found for one in formats if (found := one.saves_at(path, iteration)) is not None), None)


def rank_saves(root: SavesRoot) -> RankSaves:
    """The saves of a root that `saves_at` has returned, perhaps in another process."""
    of = next(one for one in FORMATS if isinstance(one, RankFormat) and one.traits.name == root.format)
    return of.rank_saves(root)


def note_renamed(source: Location, target: Location, *, durable: bool) -> None:
    """As `Format.note_renamed`, of whatever format the file is."""
    for one in FORMATS:
        one.note_renamed(source, target, durable=durable)


def matching(path: Location) -> list[Format]:
    """All formats that recognise an existing path, in the order in which they are tried."""
    return [one for one in FORMATS if one.detect(path) is Match.YES]


def of_name(path: Location, name: str) -> Format:
    """The format of this name.

    Args:
        path: an existing path.
        name: the name in its traits.

    Raises:
        ArgumentError: the path is not in this format, or the name is no text.

    Example:
        >>> import numpy as np, reshard
        >>> from reshard.storage.location import locate
        >>> reshard.save_file({"w": np.zeros(2)}, "w.safetensors")
        >>> of_name(locate("w.safetensors"), "safetensors").traits.name
        'safetensors'
    """
    check_text(name, "name of a format")
    possible = [one for one in FORMATS if one.detect(path) is not Match.NO]
    for one in possible:
        if one.traits.name == name:
            return one
    names = dict.fromkeys(one.traits.name for one in possible if one.detect(path) is Match.YES)
    raise ArgumentError(
        f"{show(str(path))} holds no checkpoint of the format {show(name)}",
        path=str(path),
        hint=f"its format can be {listed(names)}"
        if names
        else "no format recognises it; without `format` the error says what is there",
    )


def check_alone(data: CheckpointData, folder: Location) -> None:
    """Refuse weights beside a checkpoint of another format that holds the state of a run: either could be meant.

    So are whole weights beside the shards of FSDP ranks: they can be of another save. Of adapters, files of GGUF and
    other files with tensors a warning tells.

    Where DeepSpeed has partitioned the parameters, transformers writes weights without elements beside its checkpoint.

    Raises:
        UnsupportedError: there are two such checkpoints.
    """
    if data.traits.name == FSDP_RANKS.traits.name:
        beside = [one for one in matching(folder) if one.traits.is_pretrained]
        whole = [one.traits.name for one in beside if one is not GGUF and not _holds_adapters(one, folder)]
        if whole:
            raise UnsupportedError(
                f"{show(str(folder))} holds shards of FSDP ranks, and weights of the format {listed(whole)}",
                path=str(folder),
                hint=f"`format={data.traits.name!r}` opens the shards, `format={whole[0]!r}` the other weights",
            )
        for one in beside:
            _log.warning(
                "%s: the shards of the ranks are read; the other weights are not: `format=%r` opens them",
                folder,
                one.traits.name,
            )
        names = folder.names()
        read = {name for of_kind in shard_names.rank_files(names).values() for name in of_kind.values()}
        others = [name for name in names if name.endswith(_TENSOR_FILES) and name not in read]
        if others and not beside:
            _log.warning("%s: the shards of the ranks are read, and not %s", folder, listed(map(show, others)))
    if not data.traits.is_pretrained:
        return
    # The run of a Trainer is of the same weights.
    found = [one for one in matching(folder) if one is not TRAINER_RUN and not one.traits.is_pretrained]
    runs = [one.traits.name for one in found]
    others = [one.traits.name for one in found if one not in _OF_THE_SAME_FILES]
    keys = map(data.index.key, range(len(data.index)))
    empty = next((key for key in keys if data.index.shape(key)[:1] == (0,)), None)
    own = data.traits.name
    if empty is None and others:
        raise UnsupportedError(
            f"{show(str(folder))} holds checkpoints of the formats {own} and {listed(others)}",
            path=str(folder),
            hint=f"`format={own!r}` opens the weights, `format={others[0]!r}` the other checkpoint",
        )
    if empty is None:
        return
    what = f"the weights of the format {own} are placeholders: {show(empty)} has the shape {data.index.shape(empty)}"
    runs = runs or ([TRAINER_RUN.traits.name] if TRAINER_RUN.has_own_weights(folder) else [])
    if not runs:
        _log.warning("%s: %s", folder, what)
        return
    raise UnsupportedError(
        f"{show(str(folder))} holds checkpoints of the formats {own} and {listed(runs)}, and {what}",
        path=str(folder),
        key=empty,
        hint=f"`format={runs[0]!r}` opens the other one; the path of its own folder opens it, too",
    )


def _holds_adapters(of: Format, folder: Location) -> bool:
    """Whether the weights of this format in a folder are only those of adapters of a model."""
    return of is WEIGHT_FILES and {one.base for one in weight_names.sets_in(folder)} <= {
        weight_names.ADAPTER,
        weight_names.LORA,
    }


def run_beside_model(path: Location) -> Format | None:
    """The format of a run whose weights are opened as a model if no format is given; None: it holds no such run."""
    is_run = TRAINER_RUN.detect(path) is Match.YES and detect(path).traits.is_pretrained
    return TRAINER_RUN if is_run else None


def check_destination(path: Location, name: str, *, keeps_others: bool = True) -> None:
    """Refuse a folder that would be opened as another format than the one that is written into it.

    Args:
        path: the folder, which need not exist.
        name: of the format that is written.
        keeps_others: files of other formats stay where they are, not only folders of iterations.

    Raises:
        DestinationExistsError: it is such a folder; or a root of Megatron-Core, which has a tracker of the same name as
            Checkpoint 2.0.
        StorageError: the system failed to list or read the path.

    Example:
        >>> import numpy as np, reshard
        >>> from reshard.storage.location import locate
        >>> _ = reshard.save("destination", 1, {"w": np.zeros(2)})
        >>> check_destination(locate("destination"), "checkpoint2")
    """
    if path.found() != "folder":
        return
    found = detect(path)
    is_same = found.traits.name == name or found.detect(path) is not Match.YES
    is_same |= found is WEIGHT_FILES and name == HUGGINGFACE.traits.name  # which writes them, and is tried first
    if is_same or (name == CHECKPOINT2.traits.name and found is not MEGATRON):
        return  # completed iterations come first
    stay: tuple[Format, ...] = (CHECKPOINT2, MEGATRON)  # their folders are not replaced
    if name == HUGGINGFACE.traits.name:
        stay = (*stay, CHECKPOINT1, DEEPSPEED)  # beside their folders such weights cannot be opened
    if not keeps_others and found not in stay:
        return
    raise DestinationExistsError(
        f"{show(str(path))} is a checkpoint of the format {found.traits.name}, which would be opened instead of one of "
        f"the format {name}",
        path=str(path),
        hint="choose another folder",
    )


# -- formats that are written


@functools.cache
def writers() -> tuple[Writer, ...]:
    """The formats that a conversion writes."""
    # Slow to import.
    from reshard.formats.checkpoint1.writer import Checkpoint1Writer  # noqa: PLC0415
    from reshard.formats.checkpoint2.writer import Checkpoint2Writer  # noqa: PLC0415
    from reshard.formats.dcp.megatron_writer import MegatronWriter  # noqa: PLC0415
    from reshard.formats.dcp.writer import DcpWriter  # noqa: PLC0415
    from reshard.formats.deepspeed.universal_writer import UniversalWriter  # noqa: PLC0415
    from reshard.formats.full_weights.writer import FullWeightsWriter  # noqa: PLC0415
    from reshard.formats.huggingface.writer import HuggingFaceWriter  # noqa: PLC0415
    from reshard.formats.tiled.writer import SafetensorsWriter  # noqa: PLC0415
    from reshard.formats.torch_file.writer import TorchWriter  # noqa: PLC0415

    return (
        HuggingFaceWriter(),
        FullWeightsWriter(),
        Checkpoint2Writer(),
        Checkpoint1Writer(),
        SafetensorsWriter(),
        TorchWriter(),
        DcpWriter(),
        MegatronWriter(),
        UniversalWriter(),
    )


@functools.cache
def known_files() -> KnownFiles:
    """What names the files of the formats that a conversion writes."""
    from reshard.conversion.known_files import KnownFiles  # noqa: PLC0415  slow to import

    names = dict.fromkeys(name for one in writers() for name in one.commits)
    return KnownFiles(tuple(names), {name: mark for one in writers() for name, mark in one.marks.items()})


def writer_for(to: str | None, target: Location, *, has_layout: bool) -> Writer:
    """The writer of a format. Default: Checkpoint 2.0 with a layout, else by the suffix of the destination.

    Args:
        to: name of the format, or None for the default.
        target: the destination.
        has_layout: whether a layout is given.

    Raises:
        ArgumentError: there is no such format, or the destination has the suffix of a file that no format writes.

    Example:
        >>> from reshard.storage.location import locate
        >>> writer_for(None, locate("model.safetensors"), has_layout=False).name
        'safetensors'
    """
    known = {one.name: one for one in writers()}
    if to is None:
        if target.suffix in _OTHER_FILES and not target.is_folder():
            raise ArgumentError(
                f"{show(str(target))} is the name of a file of a format that is not written",
                path=str(target),
                hint="for one file choose a name with .safetensors, .bin, .pt or .pth; "
                'for a folder with this name give `to="huggingface"`',
            )
        by_suffix = (one.name for one in writers() if one.is_one_file(target))
        return known["checkpoint2" if has_layout else next(by_suffix, "huggingface")]
    if to not in known:
        accepted = ", ".join(f'"{name}"' for name in list(known)[:-1]) + f' or "{list(known)[-1]}"'
        raise ArgumentError(f"`to` is {to!r}; {accepted} are accepted")
    return known[to]


def _checkpoint1() -> type[Draft[Any, Any, Any, Any]]:
    from reshard.formats.checkpoint1.save import Checkpoint1Draft  # noqa: PLC0415  slow to import

    return Checkpoint1Draft


def _checkpoint2() -> type[Draft[Any, Any, Any, Any]]:
    from reshard.formats.checkpoint2.save import Checkpoint2Draft  # noqa: PLC0415  slow to import

    return Checkpoint2Draft


_DRAFTS: Mapping[str, Callable[[], type[Draft[Any, Any, Any, Any]]]] = {
    CHECKPOINT2.traits.name: _checkpoint2,
    CHECKPOINT1.traits.name: _checkpoint1,
}


def save_format(name: str) -> type[Draft[Any, Any, Any, Any]]:
    """How a format is saved.

    Args:
        name: one that `save` writes.

    Raises:
        ArgumentError: `save` has no format of this name.

    Example:
        >>> save_format("checkpoint1").traits.rank_folders
        True
    """
    if name not in _DRAFTS:
        accepted = " and ".join(f'"{one}"' for one in _DRAFTS)
        raise ArgumentError(f"`format` is {name!r}; {accepted} are accepted")
    return _DRAFTS[name]()
