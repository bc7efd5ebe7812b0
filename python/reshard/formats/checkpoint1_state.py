"""What a rank of Checkpoint 1.0 keeps besides weights and counters, in files of our own that the original passes over.

    <root>/rank_<r>/<the weight file's name, less its extension>.extra.json      as `extra-<rank>.json` of 2.0, see `state`
    <root>/rank_<r>/<the same>.extra.arrays                                      the arrays in it; only if there are any

Neither ends as a weight file does. They are written before `meta.json` and go with their weight file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard import _core
from reshard.errors import CheckpointNotFoundError, DamagedFileError
from reshard.formats import state
from reshard.outputs import as_array
from reshard.small_files import read_small_file, show

if TYPE_CHECKING:
    import os

    import numpy as np

    from reshard.formats.checkpoint1 import FileName

__all__ = ["arrays_file_name", "file_name", "read"]


def file_name(file: FileName | str) -> str:
    """Name of the file with the state that belongs to a weight file.

    Example:
        >>> file_name("llama_rank_1-20_2.safetensors"), arrays_file_name("llama_rank_1-20_2.safetensors")
        ('llama_rank_1-20_2.extra.json', 'llama_rank_1-20_2.extra.arrays')
    """
    return f"{_stem(file)}.extra.json"


def arrays_file_name(file: FileName | str) -> str:
    """Name of the file with the arrays of that state."""
    return f"{_stem(file)}.extra.arrays"


def read(weights: str | os.PathLike[str]) -> dict[str, Any]:
    """The state that was saved beside a rank's weight file, by name; empty if there is none.

    Args:
        weights: the weight file.

    Raises:
        DamagedFileError: what is there is not of the form.
        UnsupportedError: a later release wrote it.
        StorageError: the system failed to read it.
    """
    path = Path(weights)
    try:
        text = read_small_file(path.with_name(file_name(path.name)), state.MAX_BYTES)
    except CheckpointNotFoundError:
        return {}
    arrays: dict[str, np.ndarray] = {}
    if path.with_name(arrays_file_name(path.name)).exists():
        index, request = _core.Index(), _core.Request()
        file = index.add_file(str(path.with_name(arrays_file_name(path.name))), follow_links=False)
        for key, _, shape, *_ in index.file_tensors(file):
            index.add_whole(key, file)
            request.add_region(key, key, (0,) * len(shape), shape)
        plan = index.plan(request)
        arrays = {
            name: as_array(*place, dtype, shape)
            for (name, dtype, shape, _), place in zip(plan.arrays, plan.load(), strict=True)
        }
    name = str(path.with_name(file_name(path.name)))
    value = state.load(text, arrays, name)
    if not isinstance(value, dict):
        raise DamagedFileError(f"{show(name)} holds no state by name", path=name)
    return value


def _stem(file: FileName | str) -> str:
    return (file if isinstance(file, str) else file.name).rpartition(".")[0]
