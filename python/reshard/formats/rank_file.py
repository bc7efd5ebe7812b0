"""The weight file of one rank, opened and checked: a `.safetensors` or a `.ckpt` file, detected by its content.

It holds *local arrays*: the rank's shard of each key. The file does not record the position of a local array in the
whole tensor; a strategy or a layout does, and `placed` shifts a local array to its position. An array may be stored in
several parts (records of a `.ckpt` file that exceed the size of one). Only this module and `ckpt` know these parts.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal, NamedTuple

from reshard._core import StoredArray
from reshard.errors import DamagedFileError, KeyNotFoundError, UnsupportedError
from reshard.formats.ckpt import names as ckpt
from reshard.storage.location import Location, locate
from reshard.values.words import counted, show

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from reshard import _core


CKPT_SUFFIX = ckpt.SUFFIX
"""Of a file of records."""

_OF_RANK = re.compile(r"_world_size_([0-9]{1,9})_rank_[0-9]{1,9}\.")


class OpenedRankFile(NamedTuple):
    """A rank's weight file in an index.

    Attributes:
        file: number of the file in the index.
        path: the path of the file.
        kind: the format of the file.
        tensors: the local arrays by key, in the order of the file.
        metadata: `__metadata__` of a safetensors file; empty for a `.ckpt` file.
        strings: keys whose value is text, not a tensor. They are reported and cannot be read.
        has_crc: whether a `.ckpt` file ends with its CRC; None: the format has none.
    """

    file: int
    path: Location
    kind: Literal["safetensors", "ckpt"]
    tensors: Mapping[str, _core.FileArray]
    metadata: Mapping[str, str]
    strings: tuple[str, ...]
    has_crc: bool | None = None


def add_rank_file(
    index: _core.Index,
    path: str | os.PathLike[str],
    *,
    follow_links: bool = False,
    method: _core.ReadMethod = "auto",
) -> OpenedRankFile:
    """Add a rank's weight file to an index. The file is opened, and everything but the bytes of tensors is checked.

    Keys are not added. The caller adds them at their positions in the whole tensors (see `placed`).

    Args:
        index: the index. After an error it keeps a file that nothing refers to.
        path: the file. Its format is detected by its content.
        follow_links: whether the last component may be a symbolic link.
        method: how its bytes are read.

    Raises:
        CheckpointNotFoundError: there is no such file.
        DamagedFileError: it is empty, truncated or zeroed, violates its format in another way, or is a link.
        UnsupportedError: it holds an unknown type, or Int4.
        StorageError: it cannot be read.

    Example:
        >>> import numpy as np, reshard
        >>> from reshard import _core
        >>> reshard.save_file({"w": np.zeros((2, 3), np.float32)}, "rank_0.safetensors")
        >>> add_rank_file(_core.Index(), "rank_0.safetensors").tensors["w"].shape
        (2, 3)
    """
    path = locate(path)
    kind = kind_of(path, follow_links=follow_links)
    add = index.add_ckpt_file if kind == "ckpt" else index.add_file
    file = add(str(path), follow_links=follow_links, method=method)
    tensors = {array.name: array for array in index.file_arrays(file)}
    has_crc = None
    if kind == "ckpt":
        has_crc = ckpt.has_crc(locate(path).read_tail(ckpt.TAIL_BYTES, follow_links=follow_links))
    check_no_int4(index, file)
    metadata, strings = index.file_metadata(file) or {}, tuple(index.file_strings(file))
    return OpenedRankFile(file, path, kind, tensors, metadata, strings, has_crc)


def check_no_int4(index: _core.Index, file: int) -> None:
    """Refuse a safetensors file with Int4 tensors of MindSpore: bytes of two elements, as the metadata records.

    Raises:
        UnsupportedError: it has such a tensor.
    """
    packed = {key for key, value in (index.file_metadata(file) or {}).items() if value == "Int4"}
    if not packed:
        return
    key = next((array.name for array in index.file_arrays(file) if array.name in packed), None)
    if key is not None:
        path = str(index.file_path(file))
        raise UnsupportedError(
            f"{show(path)}: {show(key)} is Int4, two elements in each byte, which is not supported",
            path=path,
            key=key,
            hint="save the tensor in another dtype",
        )


def kind_of(path: str | os.PathLike[str], *, follow_links: bool = False) -> Literal["safetensors", "ckpt"]:
    """The format of a weight file, by its content. If the content matches no format, the suffix decides.

    Raises:
        CheckpointNotFoundError: there is no such file.
        DamagedFileError: it is not a regular file.
        StorageError: it cannot be read.

    Example:
        >>> import numpy as np, reshard
        >>> reshard.save_file({"w": np.zeros(2)}, "safetensors.ckpt")
        >>> kind_of("safetensors.ckpt")
        'safetensors'
    """
    head = locate(path).read_head(ckpt.HEAD_BYTES, follow_links=follow_links)
    if ckpt.is_head(head):
        return "ckpt"
    is_named_ckpt = locate(path).suffix == ckpt.SUFFIX and not ckpt.is_safetensors_head(head)
    return "ckpt" if is_named_ckpt else "safetensors"


def is_of_one_rank(name: str) -> bool:
    """Whether a file is called as one of several that the ranks of a run wrote, each with its part of the state.

    Example:
        >>> is_of_one_rank("model_world_size_2_rank_0.pt"), is_of_one_rank("model_world_size_1_rank_0.pt")
        (True, False)
    """
    found = _OF_RANK.search(name)
    return found is not None and int(found[1]) > 1


def placed(rank_file: OpenedRankFile, key: str, offset: Sequence[int]) -> list[StoredArray]:
    """The stored parts of a local array, with tiles in coordinates of the whole tensor.

    Args:
        rank_file: the file that holds the array.
        key: name of the array.
        offset: first element of the local array in the global tensor, one index per dim.

    Returns:
        The stored arrays, as `Index.add_tiles` takes them. Lists of several ranks are concatenated.

    Raises:
        KeyNotFoundError: the file does not hold the key.
        DamagedFileError: the array and the offset differ in the number of dims.

    Example:
        >>> import numpy as np, reshard
        >>> from reshard import _core
        >>> reshard.save_file({"w": np.zeros((2, 3), np.float32)}, "rank_1.safetensors")
        >>> [array] = placed(add_rank_file(_core.Index(), "rank_1.safetensors"), "w", (2, 0))
        >>> array.name, array.shape, array.tiles
        ('w', (2, 3), [Tile(offset=(2, 0), shape=(2, 3), local_offset=0, local_strides=(3, 1))])
    """
    tensor = rank_file.tensors.get(key)
    if tensor is None:
        raise KeyNotFoundError(
            f"{show(str(rank_file.path))} does not hold {show(key)}", path=str(rank_file.path), key=key
        )
    if len(offset) != len(tensor.shape):
        raise DamagedFileError(
            f"{show(key)} in {show(str(rank_file.path))} has shape {tensor.shape}, expected "
            f"{counted(len(offset), 'dim')}",
            path=str(rank_file.path),
            key=key,
        )
    return [
        StoredArray(rank_file.file, part.name, part.shape, [_shifted(tile, offset) for tile in part.tiles])
        for part in tensor.parts
    ]


def _shifted(tile: _core.Tile, offset: Sequence[int]) -> _core.Tile:
    return tile._replace(offset=tuple(a + b for a, b in zip(tile.offset, offset, strict=True)))
