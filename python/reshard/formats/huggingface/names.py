"""A Hugging Face model folder: `model.safetensors`, or several files and `model.safetensors.index.json`.

This module reads and writes the index, names the files, and divides tensors over them. The caller opens the files and
checks that the index matches their headers. `config.json`, tokenizers and similar files are not used here.
"""

from __future__ import annotations

import json
import os
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Literal

from reshard.commit import writer_mark
from reshard.errors import ArgumentError, CheckpointNotFoundError
from reshard.formats import weight_map as maps
from reshard.storage.location import locate
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

BASE = "model"
SINGLE_FILE = f"{BASE}.safetensors"
INDEX_FILE = f"{BASE}.safetensors.index.json"


def detect(path: str | os.PathLike[str]) -> Literal["index", "single"] | None:
    """Whether a folder holds a model in a single file, or with an index. A single file takes precedence.

    Source: `_get_resolved_checkpoint_files` of transformers 5 asks in this order.
    """
    folder = locate(path)
    if (folder / SINGLE_FILE).found() == "file":
        return "single"
    return "index" if (folder / INDEX_FILE).found() == "file" else None


def index_file(base: str) -> str:
    """The name of the index of files whose names begin with this.

    Example:
        >>> index_file("model")
        'model.safetensors.index.json'
    """
    return f"{base}.safetensors.index.json"


def file_name(number: int, count: int, base: str = BASE) -> str:
    """The name of a file of a model; without numbers if there is only one.

    Args:
        number: number of the file, from 1.
        count: number of files.
        base: what the name begins with.

    Raises:
        ArgumentError: the number is not from 1 to the count.

    Example:
        >>> file_name(2, 12), file_name(1, 1)
        ('model-00002-of-00012.safetensors', 'model.safetensors')
    """
    if not 1 <= number <= count:
        raise ArgumentError(f"file {number} of {count}: the number must be from 1 to {count}")
    return f"{base}.safetensors" if count == 1 else f"{base}-{number:05d}-of-{count:05d}.safetensors"


def plan_shards(tensors: Iterable[tuple[str, int]], max_shard_bytes: int) -> list[list[str]]:
    """Divide tensors over files as Hugging Face does: in order, a new file when the next tensor does not fit.

    A tensor larger than the limit gets its own file; the current file continues after it.

    Args:
        tensors: `(name, bytes)` in order.
        max_shard_bytes: largest size of a file in bytes, without its header.

    Returns:
        Names of tensors for each file; empty without tensors.

    Example:
        >>> plan_shards([("a", 4), ("b", 9), ("c", 4), ("d", 1)], 8)
        [['b'], ['a', 'c'], ['d']]
    """
    files: list[list[str]] = []
    current: list[str] = []
    n_bytes = 0
    for name, size in tensors:
        if size > max_shard_bytes:
            files.append([name])
            continue
        if n_bytes + size > max_shard_bytes:
            files.append(current)
            current, n_bytes = [], 0
        current.append(name)
        n_bytes += size
    return [*files, current] if current else files


def index_text(weight_map: Mapping[str, str], total_size: int, version: str) -> str:
    """The text of an index.

    Args:
        weight_map: the file of each tensor.
        total_size: bytes of all tensors.
        version: version of this package; it marks the index as written by this package.

    Example:
        >>> print(index_text({"w": "model-00001-of-00002.safetensors"}, 8, "1.0"), end="")
        {
          "metadata": {
            "reshard": "1.0",
            "total_size": 8
          },
          "weight_map": {
            "w": "model-00001-of-00002.safetensors"
          }
        }
    """
    metadata = {writer_mark.KEY: version, "total_size": total_size}
    text = json.dumps({"metadata": metadata, "weight_map": {}}, ensure_ascii=False, indent=2)
    # `json.dumps` of an object with indents takes five times as long.
    of_files = {name: encode_basestring(name) for name in set(weight_map.values())}
    keys = sorted(weight_map)
    entries = ",\n".join([f"    {encode_basestring(key)}: {of_files[weight_map[key]]}" for key in keys])
    end = "{}\n}"
    return f"{text.removesuffix(end)}{{\n{entries}\n  }}\n}}\n" if entries else f"{text}\n"


def read_weight_map(folder: str | os.PathLike[str]) -> dict[str, str] | None:
    """The file of each tensor, from the index; None if there is only `model.safetensors`.

    Symbolic links are followed, since the files of a download cache are links. An index without the wrapper
    `weight_map` is accepted too.

    Raises:
        CheckpointNotFoundError: there is neither, or a file of the index is missing.
        DamagedFileError: the index is invalid, or a name in it is refused.
        StorageError: the system failed to read it.
    """
    path = locate(folder) / INDEX_FILE
    kind = detect(folder)
    if kind is None:
        raise CheckpointNotFoundError(
            f"{show(os.fspath(folder))} holds neither {INDEX_FILE} nor {SINGLE_FILE}", path=os.fspath(folder)
        )
    if kind == "single":
        return None
    return maps.read(path)
