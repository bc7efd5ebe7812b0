"""Small files, read and written whole: one open, bounded; one rename, durable.

Knows nothing of what the files mean. Tensors' bytes never come here, the core moves those.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from reshard.errors import CheckpointNotFoundError, DamagedFileError, StorageError
from reshard.words import show

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import FileIO

__all__ = [
    "close_read",
    "fsync_folder",
    "read_head",
    "read_small_file",
    "read_tail",
    "write_file_atomically",
    "writing_atomically",
]

_PIECE_BYTES = 1 << 16  # of a file that grows while it is read


def read_small_file(path: str | os.PathLike[str], max_bytes: int, *, follow_links: bool = False) -> bytes:
    """Read a regular file whole, through one open: what is checked is what is read.

    Args:
        path: the file.
        max_bytes: a larger file is refused, before more than that is read.
        follow_links: whether the last component may be a symbolic link.

    Raises:
        CheckpointNotFoundError: there is no such file.
        DamagedFileError: it is a link, a folder, a pipe or a device, or larger than `max_bytes`.
        StorageError: the system failed to open or read it.
    """
    path = os.fspath(path)
    data = read_head(path, max_bytes + 1, follow_links=follow_links)
    if len(data) > max_bytes:
        raise DamagedFileError(
            f"{show(path)} is larger than {max_bytes} bytes, more than such a file can be", path=path
        )
    return data


def read_head(path: str | os.PathLike[str], n_bytes: int, *, follow_links: bool = False) -> bytes:
    """The first bytes of a regular file, as far as it has them. Raises as `read_small_file` does."""
    return _read_end(path, n_bytes, os.SEEK_SET, follow_links=follow_links)


def read_tail(path: str | os.PathLike[str], n_bytes: int, *, follow_links: bool = False) -> bytes:
    """The last bytes of a regular file, as far as it has them. Raises as `read_small_file` does."""
    return _read_end(path, n_bytes, os.SEEK_END, follow_links=follow_links)


def _read_end(path: str | os.PathLike[str], n_bytes: int, whence: int, *, follow_links: bool) -> bytes:
    path = os.fspath(path)
    # Without O_NONBLOCK the open of a pipe waits for a writer for ever.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if follow_links else os.O_NOFOLLOW)
    try:
        handle = os.open(path, flags)
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"there is no file {show(path)}", path=path) from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DamagedFileError(f"{show(path)} is a symbolic link, expected a regular file", path=path) from None
        raise StorageError(f"opening {show(path)}: {error.strerror}", path=path, errno=error.errno) from None
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise DamagedFileError(f"{show(path)} is not a regular file", path=path)
        start = max(0, found.st_size - n_bytes) if whence == os.SEEK_END else 0
        with open(handle, "rb", buffering=0, closefd=False) as file:
            file.seek(start)
            return _read_there(file, found.st_size - start, n_bytes)
    except MemoryError:
        raise StorageError(
            f"reading {show(path)}: no memory for its {found.st_size} bytes", path=path, errno=errno.ENOMEM
        ) from None
    except OSError as error:
        raise StorageError(f"reading {show(path)}: {error.strerror}", path=path, errno=error.errno) from None
    finally:
        close_read(handle)


def _read_there(file: FileIO, expected_bytes: int, max_bytes: int) -> bytes:
    """Read up to a limit, in memory for what the file has: one that grows is read on, with the limit as before."""
    pieces: list[bytes] = []
    n_bytes = 0
    n_wanted = expected_bytes + 1  # one more than expected: the same read finds the end
    while n_bytes < max_bytes and (piece := file.read(min(n_wanted, max_bytes - n_bytes))):
        pieces.append(piece)
        n_bytes += len(piece)
        n_wanted = max(expected_bytes + 1 - n_bytes, _PIECE_BYTES)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def close_read(handle: int) -> None:
    """Close a handle that was only read or locked. A failure, as on a lost network mount, changes nothing then."""
    with contextlib.suppress(OSError):
        os.close(handle)


def write_file_atomically(
    path: str | os.PathLike[str], data: bytes | str, mode: int = 0o666, *, durable: bool = True
) -> None:
    """Write a small file so that it appears under its name whole or not at all; one that was there is replaced.

    Args:
        path: the file to be.
        data: its content; text is written as UTF-8.
        mode: permission bits, less the umask.
        durable: whether the file and then its folder are synced before this returns.

    Raises:
        StorageError: the system failed; nothing has changed under `path`, and no temporary file is left.

    Example:
        >>> import tempfile, os
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_file_atomically(f"{folder}/note.txt", "7")
        ...     os.listdir(folder)
        ['note.txt']
    """
    with writing_atomically(path, mode, durable=durable) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def writing_atomically(path: str | os.PathLike[str], mode: int = 0o666, *, durable: bool = True) -> Iterator[BinaryIO]:
    """As `write_file_atomically`, for content that is made piece by piece: a binary file to write into.

    When the block ends well the file takes its name; when it raises, everything is as before.

    Raises:
        StorageError: as there.
    """
    target = Path(path)
    # Hidden, and of no suffix that a reader lists: a crash may leave it behind.
    temporary = target.with_name(f".{target.name[:200]}.{secrets.token_hex(8)}.tmp")
    try:
        # The mode is set when the file is made: at no instant can others read what they should not.
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
        try:
            with open(handle, "wb", buffering=1 << 20) as file:  # noqa: PTH123  of a handle, not of a path
                yield file
                file.flush()
                if durable:
                    os.fsync(handle)
            temporary.replace(target)
        except BaseException:
            # After a failed sync the pages may count as clean: the file is dropped, never synced a second time.
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        if durable:
            fsync_folder(target.parent)
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"writing {show(str(target))}: {error.strerror or error}", path=str(target), errno=error.errno
        ) from None


def fsync_folder(path: str | os.PathLike[str]) -> None:
    """Make the entries of a folder durable.

    Raises:
        StorageError: the system failed.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise StorageError(
            f"syncing the folder {show(os.fspath(path))}: {error.strerror}", path=os.fspath(path), errno=error.errno
        ) from None
