"""A Hugging Face model folder: `model.safetensors`, or several files and `model.safetensors.index.json`.

Knows the index and how files are named and filled. Whether the names in the index are those in the headers is for the
caller to check, who opens the files. The model's `config.json`, tokenizers and the like are left alone.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from reshard.errors import ArgumentError, CheckpointNotFoundError, DamagedFileError, ReshardError
from reshard.small_files import component_fault, show
from reshard.strict_json import read_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = [
    "INDEX_FILE",
    "SINGLE_FILE",
    "detect",
    "file_name",
    "index_text",
    "index_writer",
    "plan_shards",
    "read_weight_map",
]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_WRITER = "reshard"
_MAX_INDEX_BYTES = 128 << 20
_MAX_TENSORS = 1_000_000
_MAX_NAME_BYTES = 1024
_MAX_NAMED = 3  # names that a message lists before it only counts


def detect(path: str | os.PathLike[str]) -> Literal["index", "single"] | None:
    """Whether a folder holds a model, and how: with an index, which goes first, or as one file."""
    folder = Path(path)
    if (folder / INDEX_FILE).is_file():
        return "index"
    return "single" if (folder / SINGLE_FILE).is_file() else None


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
    content = {"metadata": {_WRITER: version, "total_size": total_size}, "weight_map": dict(weight_map)}
    return json.dumps(content, ensure_ascii=False, indent=2, sort_keys=True) + "\n"


def index_writer(path: str | os.PathLike[str]) -> str | None:
    """The version of this package that wrote an index; None if another writer did, or it cannot be read."""
    try:
        content = read_json(path, _MAX_INDEX_BYTES)
    except ReshardError:
        return None
    metadata = content.get("metadata") if isinstance(content, dict) else None
    version = metadata.get(_WRITER) if isinstance(metadata, dict) else None
    return version if isinstance(version, str) else None


def read_weight_map(folder: str | os.PathLike[str]) -> dict[str, str] | None:
    """The file of each tensor, as the index says; None where there is only `model.safetensors`.

    Links are followed: the files of a download cache are links. A map that lies in the file without the wrapper
    `weight_map` is accepted too.

    Raises:
        CheckpointNotFoundError: there is neither, or a file that the index names is missing.
        DamagedFileError: the index is not such JSON, or a name in it is refused.
        StorageError: the system failed to read it.
    """
    path = Path(folder) / INDEX_FILE
    kind = detect(folder)
    if kind is None:
        raise CheckpointNotFoundError(
            f"{show(os.fspath(folder))} holds neither {INDEX_FILE} nor {SINGLE_FILE}", path=os.fspath(folder)
        )
    if kind == "single":
        return None
    content = read_json(path, _MAX_INDEX_BYTES, follow_links=True)
    weight_map = content.get("weight_map", content) if isinstance(content, dict) else None
    if not isinstance(weight_map, dict):
        raise _damaged(path, "it holds no object `weight_map`")
    if not weight_map:
        raise _damaged(path, "`weight_map` names no tensor")
    if len(weight_map) > _MAX_TENSORS:
        raise _damaged(path, f"`weight_map` names {len(weight_map)} tensors; at most {_MAX_TENSORS} are allowed")
    for key, name in weight_map.items():
        if not 1 <= len(key.encode()) <= _MAX_NAME_BYTES:
            raise _damaged(path, f"a tensor's name has from 1 to {_MAX_NAME_BYTES} bytes, not {len(key.encode())}")
        if not isinstance(name, str):
            raise _damaged(path, f"the file of {show(key)} is not text")
    for name in dict.fromkeys(weight_map.values()):
        fault = component_fault(name)
        if fault is not None:
            raise _damaged(path, f"the file name {show(name)} is refused: {fault}")
    _check_present(path, weight_map)
    return weight_map


def _check_present(path: Path, weight_map: Mapping[str, str]) -> None:
    missing = [name for name in dict.fromkeys(weight_map.values()) if not (path.parent / name).is_file()]
    if missing:
        more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
        raise CheckpointNotFoundError(
            f"{show(str(path))} names files that are not there: {', '.join(map(show, missing[:_MAX_NAMED]))}{more}",
            path=str(path),
            hint="the download or copy of the model is incomplete",
        )


def _damaged(path: Path, fault: str) -> DamagedFileError:
    return DamagedFileError(f"{show(str(path))}: {fault}", path=str(path))
