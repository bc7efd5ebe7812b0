"""The local file system as a store. Files are opened once: what is checked is what is read, and links are not followed.

Tensors' bytes do not come here; the core moves them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat as modes
from typing import TYPE_CHECKING, BinaryIO

from reshard.errors import CheckpointNotFoundError, DamagedFileError, StorageError
from reshard.storage.store import Entry, OpenedFolder, Stat, Store, check_file, failing
from reshard.words import show

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from io import FileIO

    from reshard.storage.store import Kind

__all__ = ["LOCAL", "LocalStore", "close_read"]

_PIECE_BYTES = 4 << 20
_GROWN_BYTES = 1 << 16  # what is asked for at a time of a file that grows while it is read
# Without O_NONBLOCK the open of a pipe waits for a writer for ever.
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_KINDS: dict[int, Kind] = {modes.S_IFREG: "file", modes.S_IFDIR: "folder", modes.S_IFLNK: "link"}


class LocalStore(Store):
    """The file system of this host."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LocalStore)

    def __hash__(self) -> int:
        return hash(LocalStore)

    def stat(self, path: str, *, follow_links: bool = False) -> Stat:
        """See `Store.stat`."""
        with failing("looking at", path):
            try:
                found = os.stat(path, follow_symlinks=follow_links)
            except FileNotFoundError:
                raise CheckpointNotFoundError(f"there is no file or folder {show(path)}", path=path) from None
        return Stat(
            _KINDS.get(modes.S_IFMT(found.st_mode), "other"),
            found.st_size,
            (found.st_dev, found.st_ino),
            found.st_mtime_ns,
            found.st_ctime_ns,
            modes.S_IMODE(found.st_mode),
        )

    def kind(self, path: str, *, follow_links: bool = False) -> Kind | None:
        """See `Store.kind`."""
        try:
            found = os.stat(path, follow_symlinks=follow_links).st_mode
        except (OSError, ValueError):  # a null character is a ValueError
            return None
        return _KINDS.get(modes.S_IFMT(found), "other")

    def names(self, path: str) -> list[str]:
        """See `Store.names`."""
        with failing("listing", path):
            try:
                return sorted(os.listdir(path))
            except FileNotFoundError:
                raise CheckpointNotFoundError(f"there is no folder {show(path)}", path=path) from None

    def entries(self, path: str) -> list[Entry]:
        """See `Store.entries`."""
        with failing("listing", path):
            try:
                with os.scandir(path) as entries:
                    return sorted(Entry(entry.name, _kind_of(entry)) for entry in entries)
            except FileNotFoundError:
                raise CheckpointNotFoundError(f"there is no folder {show(path)}", path=path) from None

    def read_small(self, path: str, max_bytes: int, *, follow_links: bool = False) -> bytes:
        """See `Store.read_small`."""
        data = self.read_head(path, max_bytes + 1, follow_links=follow_links)
        if len(data) > max_bytes:
            raise DamagedFileError(
                f"{show(path)} is larger than {max_bytes} bytes, more than such a file can be", path=path
            )
        return data

    def read_head(self, path: str, n_bytes: int, *, follow_links: bool = False) -> bytes:
        """See `Store.read_head`."""
        return _read_end(path, n_bytes, os.SEEK_SET, follow_links=follow_links)

    def read_tail(self, path: str, n_bytes: int, *, follow_links: bool = False) -> bytes:
        """See `Store.read_tail`."""
        return _read_end(path, n_bytes, os.SEEK_END, follow_links=follow_links)

    def pieces(
        self, path: str, n_bytes: int | None = None, ranges: Sequence[tuple[int, int]] | None = None
    ) -> Iterator[bytes]:
        """See `Store.pieces`."""
        return _pieces(path, path, None, n_bytes, ranges)

    def open(self, path: str, *, follow_links: bool = False) -> BinaryIO:
        """See `Store.open`."""
        handle, _ = _open(path, follow_links=follow_links)
        try:
            return open(handle, "rb")
        except BaseException:
            close_read(handle)
            raise

    def open_folder(self, path: str) -> OpenedFolder:
        """See `Store.open_folder`: by a handle, so that all entries are of one and the same folder."""
        return _LocalFolder(self, path)

    def absolute(self, path: str) -> str:
        """See `Store.absolute`."""
        return os.path.abspath(path)

    def resolve(self, path: str) -> str:
        """See `Store.resolve`."""
        return os.path.realpath(path)

    def local_path(self, path: str) -> str:
        """See `Store.local_path`."""
        return path


LOCAL = LocalStore()


class _LocalFolder(OpenedFolder):
    """A folder by its handle: a folder that takes its name meanwhile is not read."""

    def __init__(self, store: Store, path: str) -> None:
        self._store = store
        self._path = path
        with failing("opening", path):
            try:
                self._handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                raise CheckpointNotFoundError(f"there is no folder {show(path)}", path=path) from None

    def close(self) -> None:
        close_read(self._handle)

    def check(self, name: str, n_bytes: int) -> None:
        try:
            found = os.stat(name, dir_fd=self._handle, follow_symlinks=False)
        except FileNotFoundError:
            raise _no_file(self.path(name), DamagedFileError) from None
        except OSError as error:
            raise _failed("looking at", self.path(name), error) from None
        if not modes.S_ISREG(found.st_mode) or found.st_size != n_bytes:
            check_file(self.path(name), modes.S_ISREG(found.st_mode), found.st_size, n_bytes)

    def pieces(
        self, name: str, n_bytes: int | None = None, ranges: Sequence[tuple[int, int]] | None = None
    ) -> Iterator[bytes]:
        return _pieces(name, self.path(name), self._handle, n_bytes, ranges)


def close_read(handle: int) -> None:
    """Close a handle that was only read or locked. A failure, as on a lost network mount, changes nothing then."""
    with contextlib.suppress(OSError):
        os.close(handle)


def _kind_of(entry: os.DirEntry[str]) -> Kind:
    if entry.is_symlink():
        return "link"
    if entry.is_dir(follow_symlinks=False):
        return "folder"
    return "file" if entry.is_file(follow_symlinks=False) else "other"


def _open(path: str, *, follow_links: bool = False) -> tuple[int, int]:
    """A handle of a regular file, and its size in bytes. Raises as `Store.open` does."""
    try:
        handle = os.open(path, _READ | (0 if follow_links else os.O_NOFOLLOW))
    except FileNotFoundError:
        raise _no_file(path, CheckpointNotFoundError) from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DamagedFileError(f"{show(path)} is a symbolic link, expected a regular file", path=path) from None
        raise _failed("opening", path, error) from None
    found = os.fstat(handle)
    if not modes.S_ISREG(found.st_mode):
        close_read(handle)
        raise DamagedFileError(f"{show(path)} is not a regular file", path=path)
    return handle, found.st_size


def _read_end(path: str, n_bytes: int, whence: int, *, follow_links: bool) -> bytes:
    handle, size = _open(path, follow_links=follow_links)
    try:
        start = max(0, size - n_bytes) if whence == os.SEEK_END else 0
        with open(handle, "rb", buffering=0, closefd=False) as file:
            file.seek(start)
            return _read_there(file, size - start, n_bytes)
    except MemoryError:
        raise StorageError(
            f"reading {show(path)}: no memory for its {size} bytes", path=path, errno=errno.ENOMEM
        ) from None
    except OSError as error:
        raise _failed("reading", path, error) from None
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
        n_wanted = max(expected_bytes + 1 - n_bytes, _GROWN_BYTES)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _pieces(
    name: str, path: str, folder: int | None, n_bytes: int | None, ranges: Sequence[tuple[int, int]] | None
) -> Iterator[bytes]:
    """The pieces of a file.

    Args:
        name: what is opened.
        path: what messages call it.
        folder: a handle of the folder that `name` is in; None: `name` is a path.
        n_bytes: the size that it must have; None: any.
        ranges: `(begin, end)` in bytes; None: the whole file.
    """
    try:
        handle = os.open(name, _READ | os.O_NOFOLLOW, dir_fd=folder)
    except FileNotFoundError:
        raise _no_file(path, DamagedFileError) from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DamagedFileError(f"{show(path)} is not a regular file", path=path) from None
        raise _failed("opening", path, error) from None
    try:
        found = os.fstat(handle)
        check_file(path, modes.S_ISREG(found.st_mode), found.st_size, n_bytes)
        for begin, end in [(0, found.st_size)] if ranges is None else ranges:
            place = begin
            while place < end:
                piece = os.pread(handle, min(_PIECE_BYTES, end - place), place)
                if not piece:
                    raise DamagedFileError(
                        f"{show(path)} was truncated while it was read: {place} bytes, expected {found.st_size}",
                        path=path,
                    )
                place += len(piece)
                yield piece
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise _failed("reading", path, error) from None
    finally:
        close_read(handle)


_Missing = CheckpointNotFoundError | DamagedFileError


def _no_file(path: str, kind: type[_Missing]) -> _Missing:
    return kind(f"there is no file {show(path)}", path=path)


def _failed(doing: str, path: str, error: OSError) -> StorageError:
    return StorageError(f"{doing} {show(path)}: {error.strerror}", path=path, errno=error.errno)
