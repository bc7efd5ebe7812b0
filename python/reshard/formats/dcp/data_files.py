"""The data files that a `.metadata` lists: whether they are there and long enough, before one of them is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.errors import CheckpointNotFoundError, DamagedFileError
from reshard.storage.store import check_file
from reshard.values.words import counted, listed, show

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reshard.storage.location import Location

_MAX_NAMED = 5


def check_data_files(folder: Location, files: Iterable[tuple[str, int]], description: str) -> None:
    """Refuse a folder of which files are missing or cut short.

    Args:
        folder: the folder.
        files: name and least size in bytes of each data file; 0: any size.
        description: name of the file that lists them.

    Raises:
        CheckpointNotFoundError: files are missing.
        DamagedFileError: one is shorter, or is not a regular file.
        StorageError: the system failed.
    """
    missing = []
    for name, n_bytes in files:
        path = folder / name
        try:
            found = path.stat()
        except CheckpointNotFoundError:
            missing.append(name)
            continue
        check_file(str(path), found.kind == "file", found.n_bytes, None)
        if found.n_bytes < n_bytes:
            raise DamagedFileError(
                f"{show(str(path))} has {counted(found.n_bytes, 'byte')}, expected at least {n_bytes}: it is cut short",
                path=str(path),
            )
    if missing:
        raise CheckpointNotFoundError(
            f"{show(str(folder / description))} lists missing files: {listed(map(show, missing), _MAX_NAMED)}",
            path=str(folder / description),
            hint="the save or a copy of it is incomplete",
        )
