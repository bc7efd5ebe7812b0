"""What a rank of Checkpoint 1.0 keeps besides weights and counters, in files of our own that the original passes over.

    <root>/rank_<r>/<name>.extra.json      as `extra-<rank>.json` of 2.0, see `state`
    <root>/rank_<r>/<name>.extra.arrays    the arrays in it; only if there are any

where <name> is that of the weight file, less its extension. Neither ends as a weight file does. Both are written before
`meta.json` and go with their weight file. The state is `{"all": {...}, "own": {...}}`, what all ranks share and what
this one keeps for itself; since a rank may see no folder but its own, each has what all share.
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

__all__ = ["arrays_file_name", "dump", "file_name", "read"]

_SHARED = "all"
_OWN = "own"


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


def dump(shared: Mapping[str, object], own: Mapping[str, object]) -> tuple[str, dict[str, np.ndarray]]:
    """Text and arrays of a rank's state, as `state.dump` gives them. Raises ArgumentError as that does."""
    return state.dump({_SHARED: dict(shared), _OWN: dict(own)})


def read(own: str | os.PathLike[str] | None, first: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """The state that was saved beside weight files, by name; empty if there is none.

    Args:
        own: the rank's weight file; None: it has none.
        first: that of rank 0, whose word counts for what all share; None: it is not seen from here.

    Raises:
        DamagedFileError: what is there is not of the form.
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
        raise DamagedFileError(f"{show(str(path))} holds no state by name", path=str(path))
    return value


def _stem(file: FileName | str) -> str:
    return (file if isinstance(file, str) else file.name).rpartition(".")[0]
