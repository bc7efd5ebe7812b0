"""The formats that can be opened, in the order in which they are tried.

A new format is a module with a subclass of `formats.base.Format` and one entry here. If the reader takes long to
import, the subclass is in a module `format`, which imports it when something is opened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.errors import ArgumentError, DestinationExistsError
from reshard.formats.base import Match
from reshard.formats.checkpoint1.format import CHECKPOINT1
from reshard.formats.checkpoint2.format import CHECKPOINT2, TILED
from reshard.formats.ckpt.reader import CKPT
from reshard.formats.dcp.format import DCP
from reshard.formats.deepspeed.format import DEEPSPEED
from reshard.formats.fsdp_ranks.format import FSDP_RANKS
from reshard.formats.full_weights.reader import FULL_WEIGHTS
from reshard.formats.gguf.format import GGUF
from reshard.formats.huggingface.reader import HUGGINGFACE
from reshard.formats.megatron.format import MEGATRON
from reshard.formats.nanotron.format import NANOTRON
from reshard.formats.nemo.format import NEMO
from reshard.formats.single_file.reader import SINGLE_FILE
from reshard.formats.torch_file.format import TORCH_FILE
from reshard.formats.torchtune.format import TORCHTUNE
from reshard.formats.trainer_run.format import TRAINER_RUN
from reshard.formats.vllm.format import VLLM
from reshard.formats.weight_files.format import WEIGHT_FILES
from reshard.values.words import check_text, listed, show

if TYPE_CHECKING:
    from reshard.formats.base import Format, OpenOptions, Root
    from reshard.storage.location import Location

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
    if CHECKPOINT2.holds_saves(path):
        return CHECKPOINT2
    fallback = None
    for one in FORMATS:
        match = one.detect(path)
        if match is Match.YES:
            return one
        if match is Match.FALLBACK and fallback is None:
            fallback = one
    assert fallback is not None  # each kind of path has a fallback
    return fallback


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
