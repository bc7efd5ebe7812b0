"""A folder by handle: what is checked, opened and read are entries of one and the same folder, links not followed.

Names come out of files that a stranger may have written; they are plain components when they get here. Knows nothing
of what the files mean.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Self

from reshard.errors import CheckpointNotFoundError, DamagedFileError, StorageError
from reshard.storage.small_files import close_read
from reshard.words import show

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["OpenedFolder"]

_PIECE_BYTES = 4 << 20

_Missing = type[CheckpointNotFoundError | DamagedFileError]


class OpenedFolder:
    """A folder that is open for as long as the `with` block lasts.

    Args:
        folder: its path.

    Raises:
        CheckpointNotFoundError: there is no such folder.
        StorageError: the system failed to open it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as path:
        ...     _ = Path(path, "note").write_text("seven")
        ...     with OpenedFolder(path) as folder:
        ...         folder.check("note", 5)
        ...         list(folder.pieces("note"))
        [b'seven']
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._name = os.fspath(folder)
        try:
            self._handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointNotFoundError(f"there is no folder {show(self._name)}", path=self._name) from None
        except OSError as error:
            raise _failed("opening", self._name, error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        close_read(self._handle)

    def path(self, name: str) -> str:
        """The path of an entry, for messages."""
        return str(Path(self._name) / name)

    def check(self, name: str, n_bytes: int) -> None:
        """Check that an entry is a regular file of a size, without opening it.

        Raises:
            DamagedFileError: it is not.
            StorageError: the system failed.
        """
        try:
            found = os.stat(name, dir_fd=self._handle, follow_symlinks=False)
        except FileNotFoundError:
            raise self._missing(name, DamagedFileError) from None
        except OSError as error:
            raise _failed("looking at", self.path(name), error) from None
        self._check_found(name, found, n_bytes)

    def pieces(
        self, name: str, n_bytes: int | None = None, ranges: Sequence[tuple[int, int]] | None = None
    ) -> Iterator[bytes]:
        """Read a file through one open, in pieces of at most 4 MiB.

        Args:
            name: the entry.
            n_bytes: the size that it must have; None: any.
            ranges: `(begin, end)` in bytes, in the order in which they are read; None: all of it.

        Raises:
            DamagedFileError: it is missing, not regular, of another size, or was cut meanwhile.
            StorageError: the system failed.
        """
        handle = self.open(name, DamagedFileError)
        try:
            found = os.fstat(handle)
            n_bytes = found.st_size if n_bytes is None else n_bytes
            self._check_found(name, found, n_bytes)
            for begin, end in [(0, n_bytes)] if ranges is None else ranges:
                place = begin
                while place < end:
                    piece = os.pread(handle, min(_PIECE_BYTES, end - place), place)
                    if not piece:
                        raise DamagedFileError(
                            f"{show(self.path(name))} was cut while it was read: {place} bytes, expected {n_bytes}",
                            path=self.path(name),
                        )
                    place += len(piece)
                    yield piece
        except OSError as error:
            raise _failed("reading", self.path(name), error) from None
        finally:
            close_read(handle)

    def open(self, name: str, missing: _Missing) -> int:
        """Open an entry for reading.

        Args:
            name: the entry.
            missing: the class of the error if there is none.

        Returns:
            A handle of a regular file.

        Raises:
            CheckpointNotFoundError: there is none, if `missing` is this.
            DamagedFileError: there is none, or it is no regular file.
            StorageError: the system failed.
        """
        # Without O_NONBLOCK the open of a pipe waits for a writer for ever.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW
        try:
            handle = os.open(name, flags, dir_fd=self._handle)
        except FileNotFoundError:
            raise self._missing(name, missing) from None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise self._not_regular(name) from None
            raise _failed("opening", self.path(name), error) from None
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            close_read(handle)
            raise self._not_regular(name)
        return handle

    def _check_found(self, name: str, found: os.stat_result, n_bytes: int) -> None:
        if not stat.S_ISREG(found.st_mode):
            raise self._not_regular(name)
        if found.st_size != n_bytes:
            raise DamagedFileError(
                f"{show(self.path(name))} has {found.st_size} bytes, expected {n_bytes}", path=self.path(name)
            )

    def _missing(self, name: str, kind: _Missing) -> CheckpointNotFoundError | DamagedFileError:
        return kind(f"there is no file {show(self.path(name))}", path=self.path(name))

    def _not_regular(self, name: str) -> DamagedFileError:
        return DamagedFileError(f"{show(self.path(name))} is not a regular file", path=self.path(name))


def _failed(doing: str, path: str, error: OSError) -> StorageError:
    return StorageError(f"{doing} {show(path)}: {error.strerror}", path=path, errno=error.errno)
