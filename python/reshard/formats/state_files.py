"""Reads state from files: a text and a file of arrays, verified if a manifest lists them.

In Checkpoint 2.0, every rank with rank-local state has `extra-<rank>.json` in the iteration folder. Shared state is in
the file of rank 0. The module `state` defines the encoding.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from reshard import _core
from reshard.errors import DamagedFileError
from reshard.formats import manifest as manifests
from reshard.formats import state
from reshard.outputs import load_all
from reshard.words import show

if TYPE_CHECKING:
    import numpy as np

    from reshard.formats.manifest import Manifest
    from reshard.storage.location import Location

_FILE = re.compile(r"extra-([0-9]{7,18})\.json")


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
        matches = map(_FILE.fullmatch, manifest.files)
        others = [number for match in matches if match is not None and (number := int(match[1]))]
        private = _of_rank(folder, manifest, min(others)) if others else {}
        shared = {name: value for name, value in shared.items() if name not in private}
    return shared | own


def _of_rank(folder: Location, manifest: Manifest, rank: int) -> dict[str, Any]:
    """The content of the file of one rank."""
    name, arrays_name = state.file_name(rank), state.arrays_file_name(rank)
    if name not in manifest.files:
        return {}
    text = manifests.read_plain(folder, manifest, name, state.MAX_BYTES)
    is_there = arrays_name in manifest.shards
    return load_by_name(folder / name, text, folder / arrays_name if is_there else None, manifest)


def load_by_name(
    path: Location, text: bytes, arrays_path: Location | None, manifest: Manifest | None = None
) -> dict[str, Any]:
    """Decode state whose top level is a dict.

    Args:
        path: the file of the text, for messages.
        text: content of the file.
        arrays_path: the file of the arrays; None: there are none.
        manifest: the manifest with the checksums of the arrays; None: they are not verified.

    Raises:
        DamagedFileError: it is invalid, or its arrays differ from their checksums.
        UnsupportedError: a later release wrote it.
        StorageError: the system failed to read the arrays.
    """
    arrays: dict[str, np.ndarray] = {}
    if arrays_path is not None:
        index = _core.Index()
        file = index.add_file(str(arrays_path), follow_links=False)
        if manifest is not None:
            manifests.set_checksums(index, arrays_path.parent, manifest)
        index.add_whole_file(file)
        arrays = load_all(index.plan(index.whole_request(index.keys())))
    value = state.load(text, arrays, str(path))
    if not isinstance(value, dict):
        raise DamagedFileError(f"{show(str(path))} does not hold a dict of state", path=str(path))
    return value
