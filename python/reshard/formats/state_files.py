"""Reads state from files: a text and a file of arrays, verified if a manifest lists them.

In Checkpoint 2.0, every rank with rank-local state has `extra-<rank>.json` in the iteration folder. Shared state is in
the file of rank 0. The module `state` defines the encoding.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from reshard import _core
from reshard.commit import manifest as manifests
from reshard.errors import DamagedFileError
from reshard.formats import state
from reshard.formats.outputs import load_all
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np

    from reshard.commit.manifest import Manifest
    from reshard.storage.location import Location

_FILE = re.compile(r"extra-([0-9]{7}|[1-9][0-9]{7,17})\.json")  # as `state.file_name` spells them


def read(folder: Location, manifest: Manifest, rank: int) -> dict[str, Any]:
    """The state of an iteration folder for a rank, by name.

    Args:
        folder: the iteration folder.
        manifest: the manifest of the folder.
        rank: the rank whose rank-local values are returned. If it saved none, those names are missing.

    Raises:
        DamagedFileError: a file differs from the manifest, or is invalid.
        UnsupportedError: a later release wrote it.
        StorageError: the system failed to read it.
    """
    shared, own = _of_rank(folder, manifest, 0), _of_rank(folder, manifest, rank) if rank else {}
    if rank and not own:
        # The names in the file of another rank show which values of rank 0 are rank-local.
        other = next((number for number in ranks(manifest) if number), None)
        private = {} if other is None else _of_rank(folder, manifest, other)
        shared = {name: value for name, value in shared.items() if name not in private}
    return shared | own


def _of_rank(folder: Location, manifest: Manifest, rank: int) -> dict[str, Any]:
    """The content of the file of one rank."""
    name, arrays_name = state.file_name(rank), state.arrays_file_name(rank)
    if name not in manifest.files:
        return {}
    text = manifests.read_plain(folder, manifest, name, state.MAX_BYTES)
    arrays = read_arrays(folder / arrays_name, manifest) if arrays_name in manifest.shards else {}
    return load_by_name(folder / name, text, arrays)


def ranks(manifest: Manifest) -> list[int]:
    """The ranks whose state an iteration folder holds.

    Args:
        manifest: the manifest of the folder.
    """
    matches = map(_FILE.fullmatch, manifest.files)
    return sorted(int(match[1]) for match in matches if match is not None)


def has_rank_local(folder: Location, manifest: Manifest) -> bool:
    """Whether the state of a rank may hold what a save stores for each rank: its text has that name.

    Arguments and errors as `read`.
    """
    name = f'"{state.RANK_LOCAL}"'.encode()
    texts = (manifests.read_plain(folder, manifest, state.file_name(rank), state.MAX_BYTES) for rank in ranks(manifest))
    return any(name in text for text in texts)


def stored(folder: Location, manifest: Manifest | None) -> Iterator[tuple[int, tuple[bytes, dict[str, np.ndarray]]]]:
    """Each rank whose state an iteration folder holds, with its text and its arrays, not decoded.

    Args:
        folder: the iteration folder.
        manifest: the manifest of the folder; None: it has none, and so no state.

    Raises:
        ReshardError: as `read`.
    """
    if manifest is None:
        return
    for rank in ranks(manifest):
        text = manifests.read_plain(folder, manifest, state.file_name(rank), state.MAX_BYTES)
        arrays_name = state.arrays_file_name(rank)
        arrays = read_arrays(folder / arrays_name, manifest) if arrays_name in manifest.shards else {}
        yield rank, (text, arrays)


def read_arrays(path: Location, manifest: Manifest | None = None) -> dict[str, np.ndarray]:
    """The arrays of a file.

    Args:
        path: the file.
        manifest: the manifest with the checksums of the file; None: they are not verified.

    Raises:
        DamagedFileError: it is invalid, or differs from its checksums.
        StorageError: the system failed to read it.
    """
    index = _core.Index()
    file = index.add_file(str(path), follow_links=False)
    if manifest is not None:
        manifests.set_checksums(index, path.parent, manifest)
    index.add_whole_file(file)
    return load_all(index.plan(index.whole_request(index.keys())))


def load_by_name(path: Location, text: bytes, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Decode state whose top level is a dict.

    Args:
        path: the file of the text, for messages.
        text: content of the file.
        arrays: its arrays.

    Raises:
        DamagedFileError: it is invalid.
        UnsupportedError: a later release wrote it.
    """
    value = state.load(text, arrays, str(path))
    if not isinstance(value, dict):
        raise DamagedFileError(f"{show(str(path))} does not hold a dict of state", path=str(path))
    return value
