"""Full weights in the MindSpore layout: `part<i>.safetensors`, `param_name_map.json`, `hyper_param.safetensors`.

The map gives the file of each tensor. `hyper_param.safetensors` holds the counters of the run. This module reads and
writes the map and divides tensors over files. The caller opens the files and checks that the map matches their headers.
The documents of MindSpore show other names than `part<i>`: the map decides.
"""

from __future__ import annotations

import heapq
import json
import os
import re
from typing import TYPE_CHECKING

from reshard.commit import writer_mark
from reshard.errors import CheckpointNotFoundError
from reshard.formats import weight_map as maps
from reshard.storage.location import locate
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAP_FILE = "param_name_map.json"
HYPER_FILE = "hyper_param.safetensors"

_DEFAULT_PART_BYTES = 3 << 30
_PART = re.compile(r"part(0|[1-9][0-9]{0,6})\.safetensors")


def detect(path: str | os.PathLike[str]) -> bool:
    """Whether a folder holds full weights: the map, or a first part without one."""
    folder = locate(path)
    return (folder / MAP_FILE).exists() or (folder / file_name(0)).found() == "file"


def file_name(number: int) -> str:
    """The file name of a part.

    Args:
        number: number of the part, from 0.

    Example:
        >>> file_name(11)
        'part11.safetensors'
    """
    return f"part{number}.safetensors"


def plan_parts(tensors: Iterable[tuple[str, int]], max_bytes: int | None = None) -> list[list[str]]:
    """Divide tensors over parts as MindSpore does: the largest tensor first, each to the part with the fewest bytes.

    Args:
        tensors: `(name, bytes)`; tensors of equal size keep their order.
        max_bytes: largest size of a part in bytes, without headers. A larger tensor gets its own part. None: one part
            for each 3 GiB of all tensors, as MindSpore does; some parts may be larger.

    Returns:
        Names of tensors for each part; empty without tensors.

    Example:
        >>> plan_parts([("a", 4), ("b", 9), ("c", 4), ("d", 1)], 10)
        [['b'], ['a', 'c', 'd']]
    """
    sizes = sorted(tensors, key=lambda one: -one[1])
    total = sum(size for _, size in sizes)
    n_parts = min(-(-total // (max_bytes or _DEFAULT_PART_BYTES)) or 1, len(sizes))
    parts: list[list[str]] = [[] for _ in range(n_parts)]
    loads = [(0, number) for number in range(n_parts)]  # a heap: the part with the fewest bytes first
    for name, size in sizes:
        load, number = loads[0]
        if load and max_bytes is not None and load + size > max_bytes:
            number = len(parts)
            parts.append([])
            heapq.heappush(loads, (size, number))
        else:
            heapq.heapreplace(loads, (load + size, number))
        parts[number].append(name)
    return [part for part in parts if part]  # tensors without elements all go to one part


def map_text(weight_map: Mapping[str, str], total_size: int, version: str) -> str:
    """The text of a map, formatted as MindSpore does.

    Args:
        weight_map: the file of each tensor.
        total_size: bytes of all tensors.
        version: version of this package; it marks the map as written by this package.

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
    content = {"metadata": {"total_size": total_size, writer_mark.KEY: version}, "weight_map": dict(weight_map)}
    return json.dumps(content, ensure_ascii=False, indent=4)


def read_weight_map(folder: str | os.PathLike[str]) -> dict[str, str] | None:
    """The file of each tensor, from the map; None if there is no map and `part0.safetensors` is the only part.

    Raises:
        CheckpointNotFoundError: there is neither, or a file of the map is missing, or there are several parts and no
            map, so that a missing part could not be detected.
        DamagedFileError: the map is invalid, or a name in it is refused.
        StorageError: the system failed to read it.
    """
    path = locate(folder) / MAP_FILE
    if path.exists():
        return maps.read(path)
    parts = [name for name in path.parent.names() if _PART.fullmatch(name)]
    if parts != [file_name(0)]:
        raise CheckpointNotFoundError(
            f"{show(os.fspath(folder))} holds {len(parts)} parts, but not {MAP_FILE}, which lists the parts",
            path=os.fspath(folder),
            hint=f"copy {MAP_FILE} from the folder where the weights were merged",
        )
    return None
