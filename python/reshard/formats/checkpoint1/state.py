"""State of a rank in Checkpoint 1.0 besides weights and counters, in extra files that MindSpore Transformers ignores.

    <root>/rank_<r>/<name>.extra.json      as `extra-<rank>.json` of Checkpoint 2.0, see `formats.state`
    <root>/rank_<r>/<name>.extra.arrays    the arrays in it; only if there are any

<name> is the name of the weight file without its extension. Neither name ends like that of a weight file. Both files
are written before `meta.json` and are deleted with their weight file. The state is `{"all": {...}, "own": {...}}`:
shared state and rank-local state. Every rank stores the shared state, since it may not see the folders of other ranks.

Two lines precede the state in the text:

    {"digest":"<blake2b, 128 bits, of every byte after this line>",
    "save":"<32 hex digits>","arrays":"<digest of the arrays>",
    "version":1,"state":VALUE}

`save` is unique to the save. The `__metadata__` of each weight file of a save with state has it too, as `reshard.save`,
so that a weight file and a state file of different saves are refused, and a missing state file is noticed. If any rank
has state, every rank writes a state file. Files of earlier builds have neither these lines nor that entry.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reshard import _core
from reshard.commit import manifest as manifests
from reshard.errors import CheckpointNotFoundError, DamagedFileError
from reshard.formats import state
from reshard.formats.state_files import load_by_name, read_arrays
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.formats.checkpoint1.names import FileName
    from reshard.formats.rank_file import OpenedRankFile
    from reshard.storage.location import Location

SAVE_KEY = "reshard.save"
"""The entry of the `__metadata__` of a weight file that has a state file: the id of its save."""

_SHARED = "all"
_OWN = "own"
_HEAD = re.compile(rb'\{"digest":"([0-9a-f]{32})",\n"save":"([0-9a-f]{32})","arrays":"([0-9a-f]{32})",\n')
_DIGEST_LINE_BYTES = len(b'{"digest":"') + 32 + len(b'",\n')
_HEAD_BYTES = 256  # at most


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


def file_text(text: str, arrays: Mapping[str, np.ndarray], save: str) -> str:
    """Content of the state file.

    Args:
        text: the state, as `dump` encodes it.
        arrays: the arrays in it.
        save: the id of the save, 32 hex digits.

    Example:
        >>> text, arrays = dump({"seed": 3}, {})
        >>> print(file_text(text, arrays, "0" * 32))
        {"digest":"8ca19de549ffaccf8d0c524ffe85070a",
        "save":"00000000000000000000000000000000","arrays":"cae66941d9efbd404e4d88758ea67670",
        "version":1,"state":{"all":{"seed":3},"own":{}}}
    """
    rest = f'"save":"{save}","arrays":"{_digest_of(arrays)}",\n{text[1:]}'
    return f'{{"digest":"{manifests.digest_of(rest.encode())}",\n{rest}'


def check(weights: OpenedRankFile) -> None:
    """Check that the text beside a weight file is unchanged and of the same save; the arrays are not read.

    Args:
        weights: the weight file.

    Raises:
        DamagedFileError: the state file is missing, altered or of another save.
        StorageError: the system failed to read it.
    """
    _read_text(weights)


def read(own: OpenedRankFile | None, first: OpenedRankFile | None = None) -> dict[str, Any]:
    """The state that was saved beside weight files, by name; empty if there is none.

    Args:
        own: the rank's weight file; None: it has none.
        first: the weight file of rank 0, from which shared state is read; None: it is not visible to this rank.

    Raises:
        DamagedFileError: a state file is missing, altered, invalid or of another save.
        UnsupportedError: a later release wrote it.
        StorageError: the system failed to read it.
    """
    of_own = {} if own is None else _read(own)
    of_first = of_own if first is None or first is own else _read(first)
    found: dict[str, Any] = {**(of_first or of_own).get(_SHARED, {}), **of_own.get(_OWN, {})}
    return found


def _read(weights: OpenedRankFile) -> dict[str, dict[str, Any]]:
    found = _read_text(weights)
    if found is None:
        return {}
    of_arrays = weights.path.with_name(arrays_file_name(weights.path.name))
    arrays = read_arrays(of_arrays) if of_arrays.exists() else {}
    if found.arrays_digest not in (None, _digest_of(arrays)):
        what = "is altered, or of another save" if arrays else "is missing"
        raise DamagedFileError(
            f"{show(str(of_arrays))} {what}: its digest in {show(found.path.name)} is {found.arrays_digest}",
            path=str(of_arrays),
        )
    value = load_by_name(found.path, found.text, arrays)
    if set(value) != {_SHARED, _OWN} or not all(type(one) is dict for one in value.values()):
        raise DamagedFileError(f"{show(str(found.path))} does not hold a dict of state", path=str(found.path))
    return value


class _StateText(NamedTuple):
    """The state as `dump` encoded it; without a digest of the arrays if an earlier build wrote it."""

    path: Location
    text: bytes
    arrays_digest: str | None = None


def _read_text(weights: OpenedRankFile) -> _StateText | None:
    """The text beside a weight file, verified; None: there is none, and none was written. Raises as `check`."""
    place = weights.path.with_name(file_name(weights.path.name))
    path, save = str(place), weights.metadata.get(SAVE_KEY)
    try:
        data = place.read_small(state.MAX_BYTES + _HEAD_BYTES)
    except CheckpointNotFoundError:
        if save is None:
            return None
        raise DamagedFileError(
            f"{show(path)} is missing: the save of {show(weights.path.name)} wrote state",
            path=path,
            hint="copy `*.extra.json` and `*.extra.arrays` together with the weight files",
        ) from None
    head = _HEAD.match(data)
    if head is None and save is None:
        return _StateText(place, data)
    if head is None:
        raise DamagedFileError(
            f"{show(path)} does not begin with its digest: it is altered, or of another save than "
            f"{show(weights.path.name)}",
            path=path,
        )
    expected, found, of_arrays = (one.decode() for one in head.groups())
    digest = manifests.digest_of(data[_DIGEST_LINE_BYTES:])
    if digest != expected:
        raise DamagedFileError(f"{show(path)} is altered: its digest is {digest}, expected {expected}", path=path)
    if found != save:
        of_weights = "has no id of a save" if save is None else f"is of the save {save[:32]!a}"
        raise DamagedFileError(
            f"{show(path)} is of the save {found}, but {show(weights.path.name)} {of_weights}: one of them is of "
            "another save",
            path=path,
        )
    return _StateText(place, b"{" + data[head.end() :], of_arrays)


def _digest_of(arrays: Mapping[str, np.ndarray]) -> str:
    """A digest of the bytes of arrays. The text holds their dtypes and shapes."""
    digest = manifests.new_digest()
    for name, array in sorted(arrays.items()):
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        digest.update(f"{name} {data.size} {_core.crc32c(data)}\n".encode())
    return digest.hexdigest()


def _stem(file: FileName | str) -> str:
    return (file if isinstance(file, str) else file.name).rpartition(".")[0]
