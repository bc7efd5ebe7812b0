"""Full weights in the MindSpore layout: `part<i>.safetensors`, `param_name_map.json`, `hyper_param.safetensors`.

The map tells the file of each tensor, the counters of the run lie in the last of the three. Knows the map, and how
tensors are divided over files. Whether the names in the map are those in the headers is for the caller to check, who
opens the files. The documents of the original show other names than `part<i>` for them: the map is followed.
"""

from __future__ import annotations

import heapq
import json
import os
import re
from typing import TYPE_CHECKING

from reshard.errors import CheckpointNotFoundError
from reshard.formats import weight_map as maps
from reshard.storage.location import locate
from reshard.words import show

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["HYPER_FILE", "MAP_FILE", "detect", "file_name", "map_text", "plan_parts", "read_weight_map"]

MAP_FILE = "param_name_map.json"
HYPER_FILE = "hyper_param.safetensors"

_DEFAULT_PART_BYTES = 3 << 30
_PART = re.compile(r"part(0|[1-9][0-9]{0,6})\.safetensors")


def detect(path: str | os.PathLike[str]) -> bool:
    """Whether a folder holds full weights: the map, or a first part without one."""
    folder = locate(path)
    return (folder / MAP_FILE).exists() or (folder / file_name(0)).found() == "file"


def file_name(number: int) -> str:
    """The name of a part.

    Args:
        number: which, from 0.

    Example:
        >>> file_name(11)
        'part11.safetensors'
    """
    return f"part{number}.safetensors"


def plan_parts(tensors: Iterable[tuple[str, int]], max_bytes: int | None = None) -> list[list[str]]:
    """Divide tensors over parts as the original does: the largest first, each to the part that has least.

    Args:
        tensors: `(name, bytes)`; of equal ones the first goes first.
        max_bytes: there are at least as many parts as all tensors need at this size, and none is larger, headers not
            counted: what fits nowhere gets a part of its own. None: as many as the original makes, one for each 3 GiB
            of all tensors, of which some may be larger than that.

    Returns:
        Names by part; no part for no tensors.

    Example:
        >>> plan_parts([("a", 4), ("b", 9), ("c", 4), ("d", 1)], 10)
        [['b'], ['a', 'c', 'd']]
    """
    sizes = sorted(tensors, key=lambda one: -one[1])
    total = sum(size for _, size in sizes)
    n_parts = min(-(-total // (max_bytes or _DEFAULT_PART_BYTES)) or 1, len(sizes))
    parts: list[list[str]] = [[] for _ in range(n_parts)]
    loads = [(0, number) for number in range(n_parts)]  # a heap: the least loaded first, of equal ones the first
    for name, size in sizes:
        load, number = loads[0]
        if load and max_bytes is not None and load + size > max_bytes:
            number = len(parts)
            parts.append([])
            heapq.heappush(loads, (size, number))
        else:
            heapq.heapreplace(loads, (load + size, number))
        parts[number].append(name)
    return [part for part in parts if part]  # tensors without elements all go to one


def map_text(weight_map: Mapping[str, str], total_size: int, version: str) -> str:
    """The text of a map, laid out as the original does.

    Args:
        weight_map: the file of each tensor.
        total_size: bytes of all tensors.
        version: of this package; by it a later run knows its own map again.

    Example:
        >>> print(map_text({"w": "part0.safetensors"}, 8, "1.0"))
        {
            "metadata": {
                "total_size": 8,
                "reshard": "1.0"
            },
            "weight_map": {
                "w": "part0.safetensors"
            }
        }
    """
    content = {"metadata": {"total_size": total_size, maps.WRITER: version}, "weight_map": dict(weight_map)}
    return json.dumps(content, ensure_ascii=False, indent=4)


def read_weight_map(folder: str | os.PathLike[str]) -> dict[str, str] | None:
    """The file of each tensor, as the map says; None where there is no map and `part0.safetensors` is the only part.

    Raises:
        CheckpointNotFoundError: there is neither, or a file that the map names is missing, or there are several parts
            and no map, so that nobody can tell whether one is missing.
        DamagedFileError: the map is not such JSON, or a name in it is refused.
        StorageError: the system failed to read it.
    """
    path = locate(folder) / MAP_FILE
    if path.exists():
        return maps.read(path)
    parts = [name for name in path.parent.names() if _PART.fullmatch(name)]
    if parts != [file_name(0)]:
        raise CheckpointNotFoundError(
            f"{show(os.fspath(folder))} holds {len(parts)} parts and no {MAP_FILE}, which says what belongs together",
            path=os.fspath(folder),
            hint="copy it from where the weights were merged",
        )
    return None
