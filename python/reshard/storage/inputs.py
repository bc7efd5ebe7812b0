"""Files that a user gives as an argument, such as a layout or a model's configuration. Pipes are read too."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from reshard.errors import CheckpointNotFoundError
from reshard.storage.location import locate
from reshard.storage.store import failing
from reshard.words import show

if TYPE_CHECKING:
    import os


def read_input(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Read a file or a pipe, up to a limit.

    Args:
        path: the file; links are followed.
        max_bytes: at most so many bytes are read, and the rest is left.

    Raises:
        ArgumentError: it is a URL, or begins with `~`.
        CheckpointNotFoundError: there is no such file.
        StorageError: it is a folder, or the system failed to read it.
    """
    with failing("reading", path):
        try:
            with Path(locate(path)).open("rb") as file:
                return file.read(max_bytes)
        except FileNotFoundError:
            raise CheckpointNotFoundError(f"there is no file {show(str(path))}", path=str(path)) from None
