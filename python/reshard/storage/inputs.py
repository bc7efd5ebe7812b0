"""Files that a user gives as an argument, such as a layout or a model's configuration. Pipes are read too."""

from __future__ import annotations

import os
import select
import stat
from typing import TYPE_CHECKING

from reshard.errors import CheckpointNotFoundError, StorageError
from reshard.storage.location import locate
from reshard.storage.store import failing
from reshard.values.words import show

if TYPE_CHECKING:
    from pathlib import Path

_WRITER_SECONDS = 10.0  # until another process must have opened a pipe


def read_input(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Read a file or a pipe, up to a limit.

    Args:
        path: the file; links are followed.
        max_bytes: at most so many bytes are read, and the rest is left.

    Raises:
        ArgumentError: it is a URL of another kind, or begins with `~`.
        CheckpointNotFoundError: there is no such file.
        StorageError: it is a folder, or a pipe that no process opens for writing, or the system failed to read it.
    """
    with failing("reading", path):
        try:
            location = locate(path)
            if not location.is_local:
                return location.read_head(max_bytes)
            file_path = location.local
            if stat.S_ISFIFO(file_path.stat().st_mode):
                return _read_pipe(file_path, max_bytes)
            with file_path.open("rb") as file:
                return file.read(max_bytes)
        except FileNotFoundError:
            raise CheckpointNotFoundError(f"there is no file {show(str(path))}", path=str(path)) from None


def _read_pipe(path: Path, max_bytes: int) -> bytes:
    # Opening a pipe waits for a writer, without a limit unless the descriptor does not block.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        poll = select.poll()
        poll.register(file, select.POLLIN)
        first = b""
        if not poll.poll(_WRITER_SECONDS * 1000):
            try:
                first = os.read(file.fileno(), max_bytes)
            except BlockingIOError:
                pass  # a process has opened it, and has not written yet
            else:
                if not first:
                    raise StorageError(
                        f"reading {show(str(path))}: a pipe that no process has opened for writing in "
                        f"{_WRITER_SECONDS:g} s",
                        path=str(path),
                        hint="start the program that writes into it, or give a file",
                    )
        os.set_blocking(file.fileno(), True)
        return first + file.read(max_bytes - len(first))
