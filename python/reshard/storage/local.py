"""The local file system as a store. Files are opened once: what is checked is what is read, and links are not followed.

What root makes in a folder of another user is given to that user. Tensors' bytes do not come here; the core moves them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat as modes
import time
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from reshard import _core
from reshard.errors import CheckpointNotFoundError, DamagedFileError, StorageError
from reshard.storage import mounts
from reshard.storage.store import (
    NO_FOLDER_RENAME,
    PROBE_PREFIX,
    Abilities,
    Entry,
    HeldFile,
    Lock,
    LockHeldError,
    OpenedFolder,
    Stat,
    Store,
    check_file,
    failing,
    ignore,
    join,
)
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
    from io import FileIO

    from reshard.storage.store import Kind

_PIECE_BYTES = 4 << 20
_GROWN_BYTES = 1 << 16  # what is asked for at a time of a file that grows while it is read
# Without O_NONBLOCK the open of a pipe waits for a writer for ever.
_SAFE = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_KINDS: dict[int, Kind] = {modes.S_IFREG: "file", modes.S_IFDIR: "folder", modes.S_IFLNK: "link"}


class LocalStore(Store):
    """The file system of this host."""

    is_opened_by_core = True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LocalStore)

    def __hash__(self) -> int:
        return hash(LocalStore)

    def stat(self, path: str, *, follow_links: bool = False) -> Stat:
        """See `Store.stat`."""
        try:
            found = os.stat(path, follow_symlinks=follow_links)
        except FileNotFoundError:
            raise CheckpointNotFoundError(f"there is no file or folder {show(path)}", path=path) from None
        except OSError as error:
            raise _failed("looking at", path, error) from error
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
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            raise CheckpointNotFoundError(f"there is no folder {show(path)}", path=path) from None
        except OSError as error:
            raise _failed("listing", path, error) from error

    def entries(self, path: str) -> list[Entry]:
        """See `Store.entries`."""
        return _scan(path, _entry_of)

    def sizes(self, path: str) -> list[tuple[str, Kind, int]]:
        """See `Store.sizes`."""
        with _listing(path):
            found = _core.folder_sizes(path)
        return [(name, _KINDS.get(modes.S_IFMT(mode), "other"), n_bytes) for name, mode, n_bytes in found]

    def read_small(self, path: str, max_bytes: int, *, follow_links: bool = False) -> bytes:
        """See `Store.read_small`."""
        data = _read_end(path, max_bytes + 1, os.SEEK_SET, follow_links=follow_links, max_size=max_bytes)
        if len(data) > max_bytes:  # it has grown
            raise _too_large(path, max_bytes)
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

    # -- changing

    def create(
        self,
        path: str,
        data: bytes = b"",
        mode: int = 0o666,
        *,
        durable: bool,
        announce: Callable[[str], None] = ignore,
    ) -> None:
        """See `Store.create`."""
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
        except FileExistsError:
            raise
        except OSError as error:
            raise _failed("making", path, error) from error
        try:
            _give(handle, path)
            with failing("writing", path):
                _write(handle, data)
                if durable:
                    announce(f"sync {os.path.basename(path)}")
                    os.fsync(handle)
                # A network file system reports here that it could not keep the data. The handle is gone after that.
                open_handle, handle = handle, -1
                os.close(open_handle)
        except BaseException:
            # After a failed sync the pages may count as clean: the file is removed, never synced a second time.
            with contextlib.suppress(OSError):
                os.unlink(path)
            if handle >= 0:
                close_read(handle)
            raise

    @contextlib.contextmanager
    def writing(self, path: str, mode: int = 0o666, *, durable: bool) -> Iterator[BinaryIO]:
        """See `Store.writing`: a temporary file in the same folder, synced, then renamed."""
        with (
            failing("writing", path),
            _renamed(path, mode) as (handle, _),
            open(handle, "wb", buffering=1 << 20) as file,
        ):
            yield file
            file.flush()
            if durable:
                os.fsync(handle)
        if durable:
            self.sync_folder(os.path.dirname(path) or ".")

    def replace_after(
        self, path: str, data: bytes, mode: int = 0o666, *, files: Sequence[str], folders: Sequence[str]
    ) -> None:
        """See `Store.replace_after`."""
        with failing("writing", path), _renamed(path, mode) as (handle, temporary):
            try:
                _write(handle, data)
            finally:
                os.close(handle)  # where a network file system reports that it could not keep the data
            self.sync_together([*files, temporary], folders)

    def append_line(self, path: str, line: bytes, mode: int = 0o666, *, durable: bool) -> None:
        """See `Store.append_line`."""
        handle, n_bytes = _open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, mode)
        try:
            _give(handle, path)
            with failing("writing", path):
                if n_bytes and os.pread(handle, 1, n_bytes - 1) != b"\n":
                    line = b"\n" + line
                # In one call, so that the lines of two writers are not mixed. If the system writes only a part, as on a
                # full disk or at a limit of the file size, the next call reports why.
                _write(handle, line)
                if durable:
                    os.fsync(handle)
                open_handle, handle = handle, -1
                os.close(open_handle)  # where a network file system reports that it could not keep the data
        finally:
            if handle >= 0:
                close_read(handle)
        if durable and n_bytes == 0:
            self.sync_folder(os.path.dirname(path) or ".")

    def make_folder(self, path: str, mode: int = 0o777) -> None:
        """See `Store.make_folder`."""
        with failing("making", path):
            try:
                os.mkdir(path, mode)
            except FileExistsError:
                if not os.path.isdir(path):
                    raise
                return
        if os.geteuid() == 0:
            with contextlib.suppress(OSError):
                handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    _give(handle, path)
                finally:
                    close_read(handle)

    def sync_folder(self, path: str) -> None:
        """See `Store.sync_folder`."""
        with failing("syncing the folder", path):
            _sync(path, os.O_DIRECTORY)

    def sync_together(self, files: Sequence[str], folders: Sequence[str]) -> None:
        """See `Store.sync_together`: each by a thread of the core, as a journal commits once what comes together."""
        try:
            _core.sync_together(files, folders)
        except OSError as error:
            raise _failed("syncing", error.filename or (*files, *folders)[0], error) from error

    def rename(self, source: str, target: str, *, replace: bool = False) -> None:
        """See `Store.rename`.

        Where the system cannot refuse a name that is taken, the core looks before it renames. A folder is safe all the
        same: every system refuses a rename onto a folder that is not empty.
        """
        try:
            if replace:
                os.replace(source, target)
            else:
                _core.rename(source, target, exchange=False)
        except OSError as error:
            if not replace and error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                raise FileExistsError(errno.EEXIST, "it exists", target) from error
            raise _failed(f"renaming {show(source)} to", target, error) from error

    def exchange(self, one: str, other: str) -> None:
        """See `Store.exchange`."""
        with failing(f"exchanging {show(one)} and", other):
            _core.rename(one, other, exchange=True)

    def link(self, source: str, target: str) -> None:
        """See `Store.link`."""
        with failing(f"linking {show(source)} as", target):
            os.link(source, target, follow_symlinks=False)

    def set_mode(self, path: str, mode: int) -> None:
        """See `Store.set_mode`."""
        with failing("setting the permissions of", path):
            os.chmod(path, mode)

    def remove_file(self, path: str) -> None:
        """See `Store.remove_file`."""
        with failing("removing", path), contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def remove_folder(
        self,
        path: str,
        *,
        first: str,
        last: str,
        keep: Collection[str] = (),
        durable: bool,
        announce: Callable[[str], None],
    ) -> None:
        """See `Store.remove_folder`: by handles."""
        parent_path, base = os.path.split(path)
        with failing("removing", path), contextlib.ExitStack() as stack:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            parent = os.open(parent_path or ".", flags)
            stack.callback(os.close, parent)
            try:
                folder = os.open(base, flags | os.O_NOFOLLOW, dir_fd=parent)
            except FileNotFoundError:
                return
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                    raise
                os.unlink(base, dir_fd=parent)
                return
            stack.callback(os.close, folder)
            announce(f"remove {first} of {base}")
            with contextlib.suppress(FileNotFoundError):
                os.unlink(first, dir_fd=folder)
                if durable:
                    os.fsync(folder)
            announce(f"remove {base}")
            for name in sorted(os.listdir(folder), key=last.__eq__):
                if name not in keep:
                    _remove(name, folder)
            if not keep:
                with contextlib.suppress(FileNotFoundError):
                    os.rmdir(base, dir_fd=parent)

    def remove_empty_folder(self, path: str) -> None:
        """See `Store.remove_empty_folder`."""
        with failing("removing", path):
            os.rmdir(path)

    # -- who else is there

    def lock(self, path: str, *, shared: bool, seconds: float, make: bool = False) -> Lock:
        """See `Store.lock`: flock(2)."""
        refusal: PermissionError | None = None
        if make:
            with failing("opening", path):
                handle, refusal = _open_lock(path)
        else:
            handle, _ = _open(path)
        lock = _LocalLock(path, handle, shared=shared)
        try:
            lock.errno = _flock(handle, path, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, seconds)
        except BaseException:
            lock.close()
            raise
        if refusal is not None and lock.errno is not None:  # NFS locks exclusively only what is open for writing
            lock.close()
            raise _failed("opening", path, refusal)
        return lock

    def hold(self, path: str) -> HeldFile:
        """See `Store.hold`."""
        with failing("opening", path):
            return _LocalHeldFile(path, os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW))

    def touched_ns(self, path: str) -> int | None:
        """See `Store.touched_ns`."""
        with failing("opening", path):
            try:
                # On a network file system an open asks the server; a mere stat may return what it was a minute ago.
                handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            except FileNotFoundError:
                return None
            try:
                return os.fstat(handle).st_mtime_ns
            finally:
                close_read(handle)

    # -- what the store is

    def abilities(self, path: str) -> Abilities:
        """See `Store.abilities`."""
        if self.renames_by_copy(path):
            return Abilities(renames_folders=False, exchanges=False)
        folder = join(path, f"{PROBE_PREFIX}{os.urandom(8).hex()}")
        try:
            with failing("probing", folder):
                os.makedirs(f"{folder}/one/inner/file")
            try:
                self.rename(f"{folder}/one/inner", f"{folder}/two")
            except StorageError as error:
                if error.errno not in NO_FOLDER_RENAME:
                    raise
                return Abilities(renames_folders=False, exchanges=False)
            with failing("probing", folder):
                # Where names cannot be exchanged the core makes three renames instead, the first one to `one.old`, and
                # a crash between them would lose both names. With this folder in the way it cannot.
                os.makedirs(f"{folder}/one.old/in the way")
            try:
                self.exchange(f"{folder}/one", f"{folder}/two")
            except StorageError:
                return Abilities(renames_folders=True, exchanges=False)
            return Abilities(renames_folders=True, exchanges=True)
        finally:
            _remove_tree(folder, ignore_errors=True)

    def renames_by_copy(self, path: str) -> bool:
        """See `Store.renames_by_copy`: by the type of the file system."""
        return mounts.renames_by_copy(mounts.filesystem_type(path))

    def folder_identity(self, path: str) -> Hashable:
        """See `Store.folder_identity`: device and inode."""
        return self.stat(path, follow_links=True).identity

    def free_bytes(self, path: str) -> int | None:
        """See `Store.free_bytes`: what a user without privileges can write."""
        with failing("looking at", path):
            found = os.statvfs(path)
        return found.f_bavail * found.f_frsize if found.f_blocks else None

    def is_writable(self, path: str) -> bool:
        """See `Store.is_writable`."""
        # A program with set user ID writes with the rights of its effective user.
        return os.access(path, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)

    def same_filesystem(self, one: str, other: str) -> bool:
        """See `Store.same_filesystem`."""
        with failing("looking at", other):
            return os.stat(one).st_dev == os.lstat(other).st_dev

    def is_shared(self, path: str, shared_paths: str | None) -> bool:
        """See `Store.is_shared`."""
        return mounts.is_shared(path, shared_paths)

    def volatile(self, path: str) -> str | None:
        """See `Store.volatile`."""
        return mounts.volatile(path)


LOCAL = LocalStore()


class _LocalFolder(OpenedFolder):
    """A folder by its handle: a folder that takes its name meanwhile is not read."""

    def __init__(self, store: Store, path: str) -> None:
        self._store = store
        self._path = path
        try:
            self._handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointNotFoundError(f"there is no folder {show(path)}", path=path) from None
        except OSError as error:
            raise _failed("opening", path, error) from error

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


class _LocalLock(Lock):
    """A lock by flock(2) of an open handle."""

    def __init__(self, path: str, handle: int, *, shared: bool) -> None:
        self._path = path
        self._handle = handle
        self._shared = shared

    def is_current(self) -> bool:
        return _is_at(self._handle, self._path)

    def duplicate(self) -> Lock:
        with failing("locking", self._path):
            other = _LocalLock(self._path, os.dup(self._handle), shared=self._shared)
        other.errno = self.errno
        return other

    def close(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            if not self._shared:
                # Explicitly, not only by the close: a child that was forked meanwhile has the handle open too. A shared
                # lock may have another owner, for which it must not end.
                with contextlib.suppress(OSError):
                    fcntl.flock(handle, fcntl.LOCK_UN)
            close_read(handle)


class _LocalHeldFile(HeldFile):
    """A file by its handle: its inode tells it from a later file of the same name."""

    def __init__(self, path: str, handle: int) -> None:
        self._path = path
        self._handle = handle

    def beat(self) -> None:
        with failing("touching", self._path):
            os.utime(self._handle)

    def write(self, data: bytes) -> None:
        with failing("writing", self._path):
            os.truncate(self._handle, 0)
            os.pwrite(self._handle, data, 0)

    def is_current(self) -> bool:
        return _is_at(self._handle, self._path)

    def close(self) -> None:
        close_read(self._handle)


def _is_at(handle: int, path: str) -> bool:
    """Whether a path names the file that is open."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(handle))
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _failed("looking at", path, error) from error


def _open_lock(path: str) -> tuple[int, PermissionError | None]:
    """A handle of a lock file, which is made if it is missing. Raises OSError, StorageError.

    Returns:
        The handle; and why it is open for reading only, or None.
    """
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        handle = os.open(path, flags | os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError as error:  # the file of another user, in a folder of this one
        with contextlib.suppress(OSError):
            if os.access(os.path.dirname(path) or ".", os.W_OK | os.X_OK, effective_ids=True):
                return os.open(path, flags | os.O_RDONLY), error
        raise
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise StorageError(
            f"{show(path)} is a symbolic link, expected a file", path=path, errno=error.errno, hint="remove the link"
        ) from None
    _give(handle, path)
    return handle, None


def _flock(handle: int, path: str, operation: int, seconds: float) -> int | None:
    """Lock a handle; the error number of a file system without locks. Raises LockHeldError."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(handle, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise LockHeldError(
                    f"{show(path)} was held by another process for {seconds:g} s", path=path, errno=errno.EWOULDBLOCK
                ) from None
            time.sleep(0.01)
        except OSError as error:
            return error.errno
        else:
            return None


def close_read(handle: int) -> None:
    """Close a handle that was only read or locked. A failure, as on a lost network mount, changes nothing then."""
    with contextlib.suppress(OSError):
        os.close(handle)


_Scanned = TypeVar("_Scanned", bound=tuple[Any, ...])


def _scan(path: str, of: Callable[[os.DirEntry[str]], _Scanned]) -> list[_Scanned]:
    """A value of each entry of a folder, sorted."""
    with _listing(path), os.scandir(path) as entries:
        return sorted(map(of, entries))


@contextlib.contextmanager
def _listing(path: str) -> Iterator[None]:
    """Errors of listing a folder."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"there is no folder {show(path)}", path=path) from None
    except OSError as error:
        raise _failed("listing", path, error) from error


def _entry_of(entry: os.DirEntry[str]) -> Entry:
    if entry.is_symlink():
        return Entry(entry.name, "link")
    if entry.is_dir(follow_symlinks=False):
        return Entry(entry.name, "folder")
    return Entry(entry.name, "file" if entry.is_file(follow_symlinks=False) else "other")


def _open(path: str, flags: int = os.O_RDONLY, mode: int = 0, *, follow_links: bool = False) -> tuple[int, int]:
    """A handle of a regular file, and its size in bytes. Raises as `Store.open` does."""
    try:
        handle = os.open(path, flags | _SAFE | (0 if follow_links else os.O_NOFOLLOW), mode)
    except FileNotFoundError as error:
        if flags & os.O_CREAT:
            raise _failed("opening", path, error) from None
        raise _no_file(path, CheckpointNotFoundError) from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DamagedFileError(f"{show(path)} is a symbolic link, expected a regular file", path=path) from None
        raise _failed("opening", path, error) from None
    try:
        found = os.fstat(handle)
    except OSError as error:
        close_read(handle)
        raise _failed("looking at", path, error) from None
    if not modes.S_ISREG(found.st_mode):
        close_read(handle)
        raise DamagedFileError(f"{show(path)} is not a regular file", path=path)
    return handle, found.st_size


def _too_large(path: str, max_bytes: int) -> DamagedFileError:
    return DamagedFileError(f"{show(path)} is larger than {max_bytes} bytes, more than such a file can be", path=path)


def _read_end(path: str, n_bytes: int, whence: int, *, follow_links: bool, max_size: int | None = None) -> bytes:
    handle, size = _open(path, follow_links=follow_links)
    try:
        if max_size is not None and size > max_size:  # before gigabytes of a sparse file are read
            raise _too_large(path, max_size)
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
        handle = os.open(name, os.O_RDONLY | _SAFE | os.O_NOFOLLOW, dir_fd=folder)
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
    return StorageError(f"{doing} {show(path)}: {error.strerror or error}", path=path, errno=error.errno)


def _write(handle: int, data: bytes) -> None:
    """Write all of `data`, however little of it the system takes at a time. Raises OSError."""
    while data:
        data = data[os.write(handle, data) :]


def _give(handle: int, path: str) -> bool:
    """As root, give a new file or folder to the owner of the folder that it is in. Never raises.

    An operator's `sudo reshard` would otherwise leave files that the user of the training cannot change. A file with
    content or a second name is not new. Where root may not give files away, as on some network file systems, nothing
    changes.

    Returns:
        Whether it was given to another user.
    """
    if os.geteuid() != 0:
        return False
    with contextlib.suppress(OSError):
        owner, made = os.stat(os.path.dirname(path) or "."), os.fstat(handle)
        is_new = modes.S_ISDIR(made.st_mode) or (made.st_size == 0 and made.st_nlink == 1)
        if owner.st_uid != 0 and made.st_uid == 0 and is_new:
            os.fchown(handle, owner.st_uid, owner.st_gid)
            return True
    return False


def _remove(name: str, folder: int) -> None:
    """Remove an entry of an open folder, whatever it is."""
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.EPERM):
            raise
        _remove_tree(name, dir_fd=folder)  # by handles too, where there are such, as on Linux


@contextlib.contextmanager
def _renamed(path: str, mode: int) -> Iterator[tuple[int, str]]:
    """A new temporary file beside `path`, by handle and path, renamed to `path` when the block ends without an error.

    The block closes the handle.
    """
    folder, name = os.path.split(path)
    # Hidden, and with no suffix that a reader lists: a crash may leave it behind.
    temporary = os.path.join(folder, f".{os.fsdecode(os.fsencode(name)[:200])}.{os.urandom(8).hex()}.tmp")
    # The mode is set when the file is made: at no time can others read what they should not.
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        if _give(handle, path):
            with contextlib.suppress(OSError):
                old = os.lstat(path).st_mode
                if modes.S_ISREG(old):  # the umask of root may be narrower than that of the user
                    os.fchmod(handle, modes.S_IMODE(old) & mode)
        yield handle, temporary
        os.replace(temporary, path)
    except BaseException:
        # After a failed sync the pages may count as clean: the file is removed, never synced a second time.
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _sync(path: str, flags: int) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_tree(path: str, *, ignore_errors: bool = False, dir_fd: int | None = None) -> None:
    import shutil  # noqa: PLC0415  slow to import, and rarely needed

    shutil.rmtree(path, ignore_errors=ignore_errors, dir_fd=dir_fd)
