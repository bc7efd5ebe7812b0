"""State as it lies in files: text, and a file of arrays beside it, which has sums where a manifest tells them.

Of Checkpoint 2.0 every rank that has state of its own has `extra-<rank>.json` in the iteration folder; what all ranks
share is in rank 0's. What a value may be, and how it is spelt, is for `state` to say.
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

__all__ = ["load_by_name", "read"]

_FILE = re.compile(r"extra-([0-9]{7,18})\.json")


def read(folder: Location, manifest: Manifest, rank: int) -> dict[str, Any]:
    """The state of an iteration folder as a rank sees it, by name.

    Args:
        folder: the iteration folder.
        manifest: of the folder.
        rank: whose own values are taken; a rank that saved none gets nothing under those names.

    Raises:
        DamagedFileError: a file is not what the manifest says, or not of the form.
        UnsupportedError: a later release wrote it.
        StorageError: the system failed to read it.
    """
    shared, own = _of_rank(folder, manifest, 0), _of_rank(folder, manifest, rank) if rank else {}
    if rank and not own:
        # What rank 0 kept for itself is told from the rest by what another rank kept.
        matches = map(_FILE.fullmatch, manifest.files)
        others = [number for match in matches if match is not None and (number := int(match[1]))]
        private = _of_rank(folder, manifest, min(others)) if others else {}
        shared = {name: value for name, value in shared.items() if name not in private}
    return shared | own


def _of_rank(folder: Location, manifest: Manifest, rank: int) -> dict[str, Any]:
    """What one rank saved."""
    name, arrays_name = state.file_name(rank), state.arrays_file_name(rank)
    if name not in manifest.files:
        return {}
    text = manifests.read_plain(folder, manifest, name, state.MAX_BYTES)
    is_there = arrays_name in manifest.shards
    return load_by_name(folder / name, text, folder / arrays_name if is_there else None, manifest)


def load_by_name(
    path: Location, text: bytes, arrays_path: Location | None, manifest: Manifest | None = None
) -> dict[str, Any]:
    """Decode state that is kept by name.

    Args:
        path: where the text was read, for messages.
        text: its content.
        arrays_path: the arrays that belong to it; None: there are none.
        manifest: tells the sums of the arrays; None: nobody does.

    Raises:
        DamagedFileError: it is not of the form, or its arrays differ from their sums.
        UnsupportedError: a later release wrote it.
        StorageError: the system failed to read the arrays.
    """
    arrays: dict[str, np.ndarray] = {}
    if arrays_path is not None:
        index, request = _core.Index(), _core.Request()
        file = index.add_file(str(arrays_path), follow_links=False)
        if manifest is not None:
            manifests.set_checksums(index, arrays_path.parent, manifest)
        for key, _, shape, *_ in index.file_tensors(file):
            index.add_whole(key, file)
            request.add_region(key, key, (0,) * len(shape), shape)
        arrays = load_all(index.plan(request))
    value = state.load(text, arrays, str(path))
    if not isinstance(value, dict):
        raise DamagedFileError(f"{show(str(path))} holds no state by name", path=str(path))
    return value
