"""The formats that a conversion can write.

A new one is a subclass of `conversion.writer.Writer` and one entry here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.conversion.known_files import KnownFiles
from reshard.errors import ArgumentError
from reshard.formats.checkpoint1.writer import Checkpoint1Writer
from reshard.formats.checkpoint2.writer import Checkpoint2Writer
from reshard.formats.dcp.megatron_writer import MegatronWriter
from reshard.formats.dcp.writer import DcpWriter
from reshard.formats.deepspeed.universal_writer import UniversalWriter
from reshard.formats.full_weights.writer import FullWeightsWriter
from reshard.formats.huggingface.writer import HuggingFaceWriter
from reshard.formats.tiled.writer import SafetensorsWriter
from reshard.formats.torch_file.writer import TorchWriter
from reshard.values.words import show

if TYPE_CHECKING:
    from reshard.conversion.writer import Writer
    from reshard.storage.location import Location

WRITERS: tuple[Writer, ...] = (
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

KNOWN_FILES = KnownFiles(
    tuple(dict.fromkeys(name for one in WRITERS for name in one.commits)),
    {name: mark for one in WRITERS for name, mark in one.marks.items()},
)

_OTHER_FILES = (".ckpt", ".distcp", ".gguf", ".h5", ".npy", ".npz", ".onnx", ".safetensor")


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
    known = {one.name: one for one in WRITERS}
    if to is None:
        if target.suffix in _OTHER_FILES and not target.is_folder():
            raise ArgumentError(
                f"{show(str(target))} is the name of a file of a format that is not written",
                path=str(target),
                hint="for one file choose a name with .safetensors, .bin, .pt or .pth; "
                'for a folder with this name give `to="huggingface"`',
            )
        by_suffix = (one.name for one in WRITERS if one.is_one_file(target))
        return known["checkpoint2" if has_layout else next(by_suffix, "huggingface")]
    if to not in known:
        accepted = ", ".join(f'"{name}"' for name in list(known)[:-1]) + f' or "{list(known)[-1]}"'
        raise ArgumentError(f"`to` is {to!r}; {accepted} are accepted")
    return known[to]
