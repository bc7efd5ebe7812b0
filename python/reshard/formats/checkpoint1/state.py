"""State of a rank in Checkpoint 1.0 besides weights and counters, in extra files that MindSpore Transformers ignores.

    <root>/rank_<r>/<name>.extra.json      as `extra-<rank>.json` of Checkpoint 2.0, see `formats.state`
    <root>/rank_<r>/<name>.extra.arrays    the arrays in it; only if there are any

<name> is the name of the weight file without its extension. Neither name ends like that of a weight file. Both files
are written before `meta.json` and are deleted with their weight file. The state is `{"all": {...}, "own": {...}}`:
shared state and rank-local state. Every rank stores the shared state, since it may not see the folders of other ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.errors import CheckpointNotFoundError, DamagedFileError
from reshard.formats import state
from reshard.formats.state_files import load_by_name
from reshard.storage.location import Location, locate
from reshard.words import show

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    import numpy as np

    from reshard.formats.checkpoint1.names import FileName

_SHARED = "all"
_OWN = "own"


def file_name(file: FileName | str) -> str:
    """Name of the state file of a weight file.

    Example:
        >>> file_name("llama_rank_1-20_2.safetensors"), arrays_file_name("llama_rank_1-20_2.safetensors")
        ('llama_rank_1-20_2.extra.json', 'llama_rank_1-20_2.extra.arrays')
    """
    return f"{_stem(file)}.extra.json"


def arrays_file_name(file: FileName | str) -> str:
    """Name of the file with the arrays of the state."""
    return f"{_stem(file)}.extra.arrays"


def dump(shared: Mapping[str, object], own: Mapping[str, object]) -> tuple[str, dict[str, np.ndarray]]:
    """Encode a rank's state as a text and arrays. Raises ArgumentError as `formats.state.dump`."""
    return state.dump({_SHARED: dict(shared), _OWN: dict(own)})


def read(own: str | os.PathLike[str] | None, first: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """The state that was saved beside weight files, by name; empty if there is none.

    Args:
        own: the rank's weight file; None: it has none.
        first: the weight file of rank 0, from which shared state is read; None: it is not visible to this rank.

    Raises:
        DamagedFileError: a state file is invalid.
        UnsupportedError: a later release wrote it.
        StorageError: the system failed to read it.
    """
    of_own = {} if own is None else _read(locate(own))
    of_first = of_own if first is None or first == own else _read(locate(first))
    found: dict[str, Any] = {**(of_first or of_own).get(_SHARED, {}), **of_own.get(_OWN, {})}
    return found


def _read(weights: Location) -> dict[str, dict[str, Any]]:
    path = weights.with_name(file_name(weights.name))
    try:
        text = locate(path).read_small(state.MAX_BYTES)
    except CheckpointNotFoundError:
        return {}
    of_arrays = weights.with_name(arrays_file_name(weights.name))
    value = load_by_name(path, text, of_arrays if of_arrays.exists() else None)
    if set(value) != {_SHARED, _OWN} or not all(type(one) is dict for one in value.values()):
        raise DamagedFileError(f"{show(str(path))} does not hold a dict of state", path=str(path))
    return value


def _stem(file: FileName | str) -> str:
    return (file if isinstance(file, str) else file.name).rpartition(".")[0]
