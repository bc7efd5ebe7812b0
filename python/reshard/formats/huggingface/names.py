"""A Hugging Face model folder: `model.safetensors`, or several files and `model.safetensors.index.json`.

Knows the index and how files are named and filled. Whether the names in the index are those in the headers is for the
caller to check, who opens the files. The model's `config.json`, tokenizers and the like are left alone.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Literal

from reshard.errors import ArgumentError, CheckpointNotFoundError
from reshard.formats import weight_map as maps
from reshard.storage.location import locate
from reshard.words import show

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = [
    "INDEX_FILE",
    "SINGLE_FILE",
    "detect",
    "file_name",
    "index_text",
    "plan_shards",
    "read_weight_map",
]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def detect(path: str | os.PathLike[str]) -> Literal["index", "single"] | None:
    """Whether a folder holds a model, and how: with an index, which goes first, or as one file."""
    folder = locate(path)
    if (folder / INDEX_FILE).found() == "file":
        return "index"
    return "single" if (folder / SINGLE_FILE).found() == "file" else None


def file_name(number: int, count: int) -> str:
    """The name of a file of a model; of a single one without numbers.

    Args:
        number: which file, from 1.
        count: how many there are.

    Raises:
        ArgumentError: the number is not from 1 to the count.

    Example:
        >>> file_name(2, 12), file_name(1, 1)
        ('model-00002-of-00012.safetensors', 'model.safetensors')
    """
    if not 1 <= number <= count:
        raise ArgumentError(f"file {number} of {count}: the number is from 1 to the count")
    return SINGLE_FILE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def plan_shards(tensors: Iterable[tuple[str, int]], max_shard_bytes: int) -> list[list[str]]:
    """Divide tensors over files as Hugging Face does: in order, each file filled until the next tensor does not fit.

    A tensor larger than the limit gets a file of its own, and the file being filled goes on after it.

    Args:
        tensors: `(name, bytes)` in order.
        max_shard_bytes: most bytes of a file, headers not counted.

    Returns:
        Names by file; no file for no tensors.

    Example:
        >>> plan_shards([("a", 4), ("b", 9), ("c", 4), ("d", 1)], 8)
        [['b'], ['a', 'c'], ['d']]
    """
    files: list[list[str]] = []
    filling: list[str] = []
    n_bytes = 0
    for name, size in tensors:
        if size > max_shard_bytes:
            files.append([name])
            continue
        if n_bytes + size > max_shard_bytes:
            files.append(filling)
            filling, n_bytes = [], 0
        filling.append(name)
        n_bytes += size
    return [*files, filling] if filling else files


def index_text(weight_map: Mapping[str, str], total_size: int, version: str) -> str:
    """The text of an index.

    Args:
        weight_map: the file of each tensor.
        total_size: bytes of all tensors.
        version: of this package; by it a later run knows its own index again.

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
    content = {"metadata": {maps.WRITER: version, "total_size": total_size}, "weight_map": dict(weight_map)}
    return json.dumps(content, ensure_ascii=False, indent=2, sort_keys=True) + "\n"


def read_weight_map(folder: str | os.PathLike[str]) -> dict[str, str] | None:
    """The file of each tensor, as the index says; None where there is only `model.safetensors`.

    Links are followed: the files of a download cache are links. A map that lies in the file without the wrapper
    `weight_map` is accepted too.

    Raises:
        CheckpointNotFoundError: there is neither, or a file that the index names is missing.
        DamagedFileError: the index is not such JSON, or a name in it is refused.
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
