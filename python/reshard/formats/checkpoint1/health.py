"""`<root>/../health_ckpts.json`: the status that a health monitor recorded for each save of a Checkpoint 1.0 root.

    [{"is_health": 0, "ckpt_name": "llama_rank_0-20_2.safetensors"}, ...]

In spite of the key's name, 0 means healthy and 1 means not healthy. Rank 0's file name stands for the files of all
ranks. `resume` decides which saves are loaded.
"""

from __future__ import annotations

import json
from typing import Any

from reshard.documents.strict_json import read_json
from reshard.errors import CheckpointNotFoundError, DamagedFileError
from reshard.storage.location import Location, locate
from reshard.values.words import show

HEALTH_FILE = "health_ckpts.json"

_MAX_BYTES = 64 << 20
_MAX_VALUES = 1 << 22  # three for each save


def health_path(root: Location) -> Location:
    """The path of the health file of a root.

    Example:
        >>> str(health_path(locate("output/checkpoint")))
        'output/health_ckpts.json'
    """
    return root.parent / HEALTH_FILE


def read(root: Location) -> dict[str, int]:
    """The status of each save by the name of rank 0's file: 0 is healthy, 1 is not. Invalid entries are ignored.

    Raises:
        CheckpointNotFoundError: there is no such file.
        DamagedFileError: it is not JSON, or not a list.
        StorageError: the system failed to read it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as output:
        ...     _ = note(locate(output) / "checkpoint", "llama_rank_0-20_2.safetensors", 1)
        ...     read(locate(output) / "checkpoint")
        {'llama_rank_0-20_2.safetensors': 1}
    """
    statuses: dict[str, int] = {}
    for record in _records(health_path(root)):
        name, status = (record.get("ckpt_name"), record.get("is_health")) if isinstance(record, dict) else (None, None)
        if isinstance(name, str) and isinstance(status, int):
            statuses[name] = int(status != 0)
    return statuses


def note(root: Location, name: str, status: int, mode: int = 0o666, *, durable: bool = True) -> str | None:
    """Add the status of a save.

    Args:
        root: the checkpoint root.
        name: name of rank 0's file.
        status: 0: healthy, 1: not healthy.
        mode: permission bits of the file, before the umask.
        durable: sync it before this returns.

    Returns:
        A warning if an invalid file was replaced; else None.

    Raises:
        StorageError: the system failed; the file is unchanged.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as output:
        ...     note(locate(output) / "checkpoint", "llama_rank_0-20_2.safetensors", 0)
        ...     health_path(locate(output) / "checkpoint").read_small(1000).decode()
        '[{"is_health": 0, "ckpt_name": "llama_rank_0-20_2.safetensors"}]'
    """
    path = health_path(root)
    warning = None
    try:
        records = _records(path)
    except CheckpointNotFoundError:
        records = []
    except DamagedFileError as error:
        records, warning = [], f"the recorded health of earlier saves is lost: {error.message}"
    text = json.dumps([*records, {"is_health": status, "ckpt_name": name}])
    locate(path).replace(text, mode, durable=durable)
    return warning


def _records(path: Location) -> list[Any]:
    records = read_json(path, _MAX_BYTES, max_values=_MAX_VALUES)
    if not isinstance(records, list):
        raise DamagedFileError(f"{show(str(path))} does not hold a list of saves", path=str(path))
    return records
