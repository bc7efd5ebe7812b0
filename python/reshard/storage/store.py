"""The interface of a store, which holds files under paths, such as a local file system or an object store.

Everything that reads, writes, lists, locks or removes files calls a `Store`, mostly through a `Location`. Paths are
text with `/` between their components. Stores do not interpret the content of files.

A commit of a checkpoint requires of a store:

- `create`: create a file that must not exist; of several writers one succeeds. Claims of a root depend on it.
- `replace`: a reader sees the old content or the new one, never a part. The manifest and the tracker depend on it.
- once `create`, `replace` or `writing` has returned, every process lists and reads the file.
- `abilities`: where folders cannot be renamed, iterations are written in their final folder, and only the manifest
  makes them complete.

Locks, times, free space and permissions are optional: the methods document the results of a store without them.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import os
from typing import TYPE_CHECKING, BinaryIO, Literal, NamedTuple, Self, TypeAlias

from reshard.errors import CheckpointNotFoundError, DamagedFileError, ReshardError, StorageError
from reshard.values.words import counted, show

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
    from contextlib import AbstractContextManager

# Error numbers of a store that cannot rename folders, or not between folders.
NO_FOLDER_RENAME = frozenset((errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM))
# Error numbers of a full disk, and of a quota that is used up.
NO_SPACE = frozenset((errno.ENOSPC, errno.EDQUOT))
# Error numbers of the process, the system or a connection, which say nothing about the content of a file. Another
# checkpoint would fail too, or the next attempt succeeds: the newest one must not be skipped.
NO_FAULT_OF_A_FILE = frozenset(
    number
    for name in (
        *("EMFILE", "ENFILE", "ENOMEM", "ENOBUFS", "EACCES", "EPERM", "EROFS", "ENOSPC", "EDQUOT"),
        *("EINTR", "EAGAIN", "EBUSY", "ENOLCK", "ETIMEDOUT", "ESTALE", "ENOTCONN", "ESHUTDOWN", "ECOMM"),
        *("ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EHOSTDOWN", "EHOSTUNREACH"),
        *("ENETDOWN", "ENETRESET", "ENETUNREACH", "ENOKEY", "EKEYEXPIRED", "EKEYREVOKED", "EKEYREJECTED"),
    )
    if (number := getattr(errno, name, None)) is not None  # some are of Linux only
)
PROBE_PREFIX = ".probe."  # of the folders that `Store.abilities` creates and removes

Kind: TypeAlias = Literal["file", "folder", "link", "other"]


class Stat(NamedTuple):
    """The status of a file or folder.

    Attributes:
        kind: "file", "folder", "link" or "other" (a pipe, a device).
        n_bytes: its size.
        identity: differs from that of a later file with the same path: device and inode, or an ETag.
        modified_ns: when its content was last written, nanoseconds of the store's clock.
        changed_ns: when its content or its attributes last changed; programs cannot set it.
        mode: permission bits; 0 in a store without them.
    """

    kind: Kind
    n_bytes: int
    identity: Hashable
    modified_ns: int
    changed_ns: int
    mode: int


class Entry(NamedTuple):
    """A name in a folder, and its kind. Links are not followed."""

    name: str
    kind: Kind


class Abilities(NamedTuple):
    """The atomic operations of a store on folders.

    Attributes:
        renames_folders: rename a folder, also into another folder.
        exchanges: exchange two names.
    """

    renames_folders: bool
    exchanges: bool


class LockHeldError(StorageError):
    """Another process held a lock for the whole time."""


@contextlib.contextmanager
def failing(doing: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise errors of the system as a StorageError that names the action.

    Args:
        doing: the action, such as "opening".
        path: the file or folder.

    Raises:
        StorageError: the block raised an OSError. Errors of this package pass.

    Example:
        >>> with failing("opening", "a/file"):
        ...     raise OSError(5, "Input/output error")
        Traceback (most recent call last):
        reshard.errors.StorageError: opening `a/file`: Input/output error
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, ReshardError):
            raise
        raise StorageError(
            f"{doing} {show(str(path))}: {error.strerror or error}", path=str(path), errno=error.errno
        ) from error


def join(folder: str, name: str) -> str:
    """The path of an entry of a folder.

    Example:
        >>> join("a", "b/c"), join("/", "a"), join(".", "a")
        ('a/b/c', '/a', 'a')
    """
    if folder == ".":
        return name
    return folder + name if folder.endswith("/") else f"{folder}/{name}"


def ignore(_: str) -> None:
    """Ignore the announcement of an operation."""


class Lock(abc.ABC):
    """A lock of a file that this process holds until `close`.

    Attributes:
        errno: error number of a failed lock; None: the lock is held.
    """

    errno: int | None = None

    @property
    def is_real(self) -> bool:
        """Whether the lock excludes other processes."""
        return self.errno is None

    @property
    def reason(self) -> str:
        """Why the lock failed; empty if it is held."""
        return "" if self.errno is None else os.strerror(self.errno)

    @abc.abstractmethod
    def is_current(self) -> bool:
        """Whether the path still names the file that is locked. Raises StorageError."""

    @abc.abstractmethod
    def duplicate(self) -> Lock:
        """A second owner of a shared lock, which lasts until both are closed. Raises StorageError."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release the lock. Never raises; a second call has no effect."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class HeldFile(abc.ABC):
    """A file that this process created and keeps open: a claim, whose modification time is the heartbeat."""

    @abc.abstractmethod
    def beat(self) -> None:
        """Set the time of modification to now. Raises StorageError."""

    @abc.abstractmethod
    def write(self, data: bytes) -> None:
        """Replace the content, which need not be atomic. Raises StorageError."""

    @abc.abstractmethod
    def is_current(self) -> bool:
        """Whether its path still names this file. Raises StorageError."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the file, which is not removed. Never raises."""


class Store(abc.ABC):
    """A store of files. All paths are paths in this store.

    Unless a method says otherwise, it raises CheckpointNotFoundError if a path does not exist, and StorageError if the
    system failed.

    Attributes:
        is_read_only: whether nothing can be written into it.
        is_opened_by_core: whether the core reads its files.
        takes_saves: whether a checkpoint can be committed in it.
    """

    is_read_only = False
    is_opened_by_core = False
    takes_saves = True

    # -- reading

    @abc.abstractmethod
    def stat(self, path: str, *, follow_links: bool = False) -> Stat:
        """The status of a path.

        Args:
            path: the path.
            follow_links: whether symbolic links are followed.
        """

    @abc.abstractmethod
    def entries(self, path: str) -> list[Entry]:
        """The entries of a folder, sorted by name."""

    @abc.abstractmethod
    def read_small(self, path: str, max_bytes: int, *, follow_links: bool = False) -> bytes:
        """Read a regular file as a whole, through one open.

        Args:
            path: the file.
            max_bytes: a larger file is refused before more than that is read.
            follow_links: whether the last component may be a symbolic link.

        Raises:
            CheckpointNotFoundError: there is no such file.
            DamagedFileError: it is a link, a folder, a pipe or a device, or larger than `max_bytes`.
            StorageError: the system failed to open or read it.
        """

    @abc.abstractmethod
    def read_head(self, path: str, n_bytes: int, *, follow_links: bool = False) -> bytes:
        """The first bytes of a regular file, or all of a shorter one.

        Args:
            path: the file.
            n_bytes: maximum number of bytes.
            follow_links: whether the last component may be a symbolic link.

        Raises:
            CheckpointNotFoundError: there is no such file.
            DamagedFileError: it is a link, a folder, a pipe or a device.
            StorageError: the system failed to open or read it.
        """

    @abc.abstractmethod
    def read_tail(self, path: str, n_bytes: int, *, follow_links: bool = False) -> bytes:
        """The last bytes of a regular file. Arguments and errors are those of `read_head`."""

    @abc.abstractmethod
    def pieces(
        self, path: str, n_bytes: int | None = None, ranges: Sequence[tuple[int, int]] | None = None
    ) -> Iterator[bytes]:
        """Read a file through one open, in pieces of at most 4 MiB.

        Args:
            path: the file.
            n_bytes: the size that it must have; None: any.
            ranges: `(begin, end)` in bytes, in the order in which they are read; None: the whole file.

        Raises:
            DamagedFileError: it is missing, not regular, of another size, or was truncated while it was read.
            StorageError: the system failed.
        """

    @abc.abstractmethod
    def open(self, path: str, *, follow_links: bool = False) -> BinaryIO:
        """Open a regular file for reading; the result is seekable.

        Raises:
            CheckpointNotFoundError: there is no such file.
            DamagedFileError: it is a link (without `follow_links`), a folder, a pipe or a device.
            StorageError: the system failed.
        """

    def names(self, path: str) -> list[str]:
        """The names in a folder, sorted."""
        return [entry.name for entry in self.entries(path)]

    def sizes(self, path: str) -> list[tuple[str, Kind, int]]:
        """Name, kind and bytes of each entry of a folder, sorted by name. Links are not followed."""
        found = ((name, self.stat(join(path, name))) for name in self.names(path))
        return [(name, stat.kind, stat.n_bytes) for name, stat in found]

    def kind(self, path: str, *, follow_links: bool = False) -> Kind | None:
        """The kind of a path, or None if it does not exist or is not accessible. Never raises."""
        try:
            return self.stat(path, follow_links=follow_links).kind
        except ReshardError:
            return None

    def remembering(self, *, contents: bool = False) -> AbstractContextManager[None]:  # noqa: ARG002
        """While the block lasts, a store may remember what is in a folder, and with `contents` small files, too."""
        return contextlib.nullcontext()

    def open_folder(self, path: str) -> OpenedFolder:
        """Open a folder to check and read its entries."""
        return OpenedFolder(self, path)

    def absolute(self, path: str) -> str:
        """The path in a form that does not depend on the working directory."""
        return path

    def resolve(self, path: str) -> str:
        """The canonical path of a file or folder."""
        return self.absolute(path)

    def parent(self, path: str) -> str:
        """The path of the folder that holds an entry; that of the top folder is itself."""
        folder, slash, _ = path.rpartition("/")
        return folder or slash or "."

    def url(self, path: str) -> str:
        """The text that names a path in this store for other programs: the path of a local file, or a URL.

        Raises:
            StorageError: this store has neither.
        """
        return self.local_path(path)

    def local_path(self, path: str) -> str:
        """The path in the file system of this host.

        Raises:
            StorageError: this store is not a local file system.
        """
        raise StorageError(f"{show(path)} is not on a file system of this host", path=path, errno=errno.EOPNOTSUPP)

    # -- changing

    @abc.abstractmethod
    def create(
        self,
        path: str,
        data: bytes = b"",
        mode: int = 0o666,
        *,
        durable: bool,
        announce: Callable[[str], None] = ignore,
    ) -> None:
        """Create a small file that must not exist; of several writers one succeeds.

        Args:
            path: the file, in a folder that exists.
            data: its content. After a crash the file may exist with a part of it.
            mode: permission bits, less the umask.
            durable: sync the file. Its name becomes durable with `sync_folder`.
            announce: called before the sync, with a text that names it.

        Raises:
            FileExistsError: it exists.
            StorageError: the system failed; the file is removed again if that is possible.
        """

    @abc.abstractmethod
    def writing(self, path: str, mode: int = 0o666, *, durable: bool) -> AbstractContextManager[BinaryIO]:
        """A file to write into, which gets its final name if the block ends without an error.

        An existing file of this name is replaced. If the block raises, nothing changes.

        Args:
            path: the file, in a folder that exists.
            mode: permission bits, less the umask.
            durable: sync the file and then its folder before the block ends.

        Raises:
            StorageError: the system failed; nothing has changed at `path`, and no temporary file is left.
        """

    def replace(self, path: str, data: bytes, mode: int = 0o666, *, durable: bool) -> None:
        """Write a small file so that readers see the old content or all of the new. Arguments as in `writing`."""
        with self.writing(path, mode, durable=durable) as file:
            file.write(data)

    @abc.abstractmethod
    def append_line(self, path: str, line: bytes, mode: int = 0o666, *, durable: bool) -> None:
        """Append a line to a file; creates the file if it does not exist.

        If a crash left a last line without a newline, the newline is added first. A store that cannot append replaces
        the file: lines of two writers at the same time may be lost there.

        Args:
            path: the file, in a folder that exists.
            line: the line with its newline.
            mode: permission bits of a new file, less the umask.
            durable: sync the file, and its folder if the file is new.

        Raises:
            DamagedFileError: it is a link or not a regular file.
            StorageError: the system failed; a part of the line may be written.
        """

    @abc.abstractmethod
    def make_folder(self, path: str, mode: int = 0o777) -> None:
        """Create a folder in an existing folder; an existing folder is not changed.

        In a store without folders this has no effect: there a folder exists while it holds entries.

        Args:
            path: the folder.
            mode: permission bits, less the umask.
        """

    @abc.abstractmethod
    def sync_folder(self, path: str) -> None:
        """Make the names in a folder durable. Has no effect where every change is durable when its call returns."""

    @abc.abstractmethod
    def sync_together(self, files: Sequence[str], folders: Sequence[str]) -> None:
        """Make files that were written with `durable=False`, and the names in folders, durable, all at the same time.

        Has no effect where every change is durable when its call returns.

        Args:
            files: the files.
            folders: the folders.

        Raises:
            StorageError: the system failed; after that none of them counts as durable.
        """

    @abc.abstractmethod
    def replace_after(
        self, path: str, data: bytes, mode: int = 0o666, *, files: Sequence[str], folders: Sequence[str]
    ) -> None:
        """Write a small file as `replace` does, once its content, other files and the names in folders are durable.

        Its own name becomes durable with `sync_folder`.

        Args:
            path: the file, in a folder that exists.
            data: its content.
            mode: permission bits, less the umask.
            files: files that were written with `durable=False`.
            folders: folders.

        Raises:
            StorageError: the system failed; nothing has changed at `path`, and none of the files counts as durable.
        """

    def rename(self, source: str, target: str, *, replace: bool = False) -> None:
        """Rename a file or folder.

        Args:
            source: the file or folder.
            target: its new name.
            replace: whether an existing file is replaced, in one step.

        Raises:
            FileExistsError: the target exists, without `replace`.
            StorageError: the system failed, or the store cannot rename (`NO_FOLDER_RENAME` has its error number).
        """
        what = f"renaming {show(source)} to {show(target)}{', which it replaces' if replace else ''}"
        raise StorageError(f"{what}: this store cannot", path=target, errno=errno.EOPNOTSUPP)

    def exchange(self, one: str, other: str) -> None:
        """Exchange two names in one step. Raises StorageError, also if the store does not support it."""
        raise StorageError(
            f"exchanging {show(one)} and {show(other)}: this store cannot", path=other, errno=errno.EOPNOTSUPP
        )

    def link(self, source: str, target: str) -> None:
        """Create a hard link. Raises StorageError, also if the store does not support it."""
        raise StorageError(
            f"linking {show(source)} as {show(target)}: this store cannot", path=target, errno=errno.EOPNOTSUPP
        )

    @abc.abstractmethod
    def set_mode(self, path: str, mode: int) -> None:
        """Set the permission bits of a file or folder; has no effect in a store without them."""

    @abc.abstractmethod
    def remove_file(self, path: str) -> None:
        """Remove a file or a link; no error if there is none."""

    @abc.abstractmethod
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
        """Remove a folder with everything in it; links are not followed. No error if there is none.

        Args:
            path: the folder.
            first: the name that is removed first.
            last: the name that is removed last.
            keep: names of entries that stay; then the folder stays too.
            durable: make the removal of `first` durable before other entries are removed.
            announce: called before each of the two steps, with a text that names it.
        """

    @abc.abstractmethod
    def remove_empty_folder(self, path: str) -> None:
        """Remove an empty folder. Raises StorageError if it is not empty."""

    # -- other processes

    @abc.abstractmethod
    def lock(self, path: str, *, shared: bool, seconds: float, make: bool = False) -> Lock:
        """Lock a file against other processes.

        Args:
            path: the file.
            shared: whether other processes may hold a shared lock at the same time.
            seconds: seconds to wait for another process.
            make: create the file if it does not exist.

        Returns:
            The lock. In a store without locks, `is_real` is False and `errno` is the reason.

        Raises:
            LockHeldError: another process held the lock for the whole time.
        """

    @abc.abstractmethod
    def hold(self, path: str) -> HeldFile:
        """Hold a file that this process has created, to touch it and to detect that it was replaced."""

    @abc.abstractmethod
    def touched_ns(self, path: str) -> int | None:
        """When a file was last modified, nanoseconds of the store's clock, not from a cache; None: there is no file."""

    # -- properties of the store

    @abc.abstractmethod
    def abilities(self, path: str) -> Abilities:
        """The atomic operations on folders, found by a test in a folder.

        Raises:
            StorageError: the system failed with an error other than a missing ability.
        """

    def renames_by_copy(self, path: str) -> bool:  # noqa: ARG002
        """Whether a rename of a folder copies its files one by one. Then `abilities` has no renames."""
        return False

    @abc.abstractmethod
    def folder_identity(self, path: str) -> Hashable:
        """A value that identifies a folder independently of its path; in a store without folders, the path."""

    @abc.abstractmethod
    def free_bytes(self, path: str) -> int | None:
        """Bytes that can still be written below a folder; None: the store has no known limit."""

    @abc.abstractmethod
    def is_writable(self, path: str) -> bool:
        """Whether this process may create files in a folder, as far as the store reports. Never raises."""

    @abc.abstractmethod
    def same_filesystem(self, one: str, other: str) -> bool:
        """Whether two folders are on one file system, so that a rename between them is atomic."""

    @abc.abstractmethod
    def is_shared(self, path: str, shared_paths: str | None) -> bool:
        """Whether other hosts can read files below a path, see `mounts.is_shared`; always in an object store."""

    @abc.abstractmethod
    def volatile(self, path: str) -> str | None:
        """Why the content of a path is lost at a power failure even if it was synced; None: it is not."""


class OpenedFolder:
    """A folder whose entries are checked and read, for as long as the `with` block lasts.

    Names may come from untrusted files. The caller has checked that they are plain components.

    Args:
        store: the store of the folder.
        path: the folder.

    Raises:
        CheckpointNotFoundError: there is no such folder.

    Example:
        >>> import tempfile
        >>> from reshard.storage.location import locate
        >>> with tempfile.TemporaryDirectory() as path:
        ...     _ = (locate(path) / "note").local.write_text("seven")
        ...     with locate(path).opened() as folder:
        ...         folder.check("note", 5)
        ...         list(folder.pieces("note"))
        [b'seven']
    """

    def __init__(self, store: Store, path: str) -> None:
        self._store = store
        self._path = path
        if store.kind(path, follow_links=True) != "folder":
            raise CheckpointNotFoundError(f"there is no folder {show(path)}", path=path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release what the folder holds."""

    def path(self, name: str) -> str:
        """The path of an entry, for messages."""
        return join(self._path, name)

    def check(self, name: str, n_bytes: int) -> None:
        """Check that an entry is a regular file of a size, without opening it.

        Raises:
            DamagedFileError: it is another kind of file or has another size.
            StorageError: the system failed.
        """
        try:
            found = self._store.stat(self.path(name))
        except CheckpointNotFoundError as error:
            raise DamagedFileError(f"there is no file {show(self.path(name))}", path=self.path(name)) from error
        check_file(self.path(name), found.kind == "file", found.n_bytes, n_bytes)

    def pieces(
        self, name: str, n_bytes: int | None = None, ranges: Sequence[tuple[int, int]] | None = None
    ) -> Iterator[bytes]:
        """Read an entry as `Store.pieces` does.

        Args:
            name: the entry.
            n_bytes: the size that it must have; None: any.
            ranges: `(begin, end)` in bytes, in the order in which they are read; None: the whole file.

        Raises:
            DamagedFileError: it is missing, not regular, of another size, or was truncated while it was read.
            StorageError: the system failed.
        """
        return self._store.pieces(self.path(name), n_bytes, ranges)


def kind_words(kind: Kind | None) -> str:
    """What an entry is, for messages; None: a link whose target is missing.

    Example:
        >>> kind_words("other"), kind_words(None)
        ('a pipe, a socket or a device', 'a symbolic link to nothing')
    """
    words = {"file": "a file", "folder": "a folder", "link": "a symbolic link", "other": "a pipe, a socket or a device"}
    return "a symbolic link to nothing" if kind is None else words[kind]


def check_file(path: str, is_file: bool, found_bytes: int, n_bytes: int | None) -> None:  # noqa: FBT001
    """Check that a path is a regular file of a size.

    Args:
        path: the path, for the message.
        is_file: whether it is a regular file.
        found_bytes: its size.
        n_bytes: the size that it must have; None: any.

    Raises:
        DamagedFileError: it is another kind of file or has another size.
    """
    if not is_file:
        raise DamagedFileError(f"{show(path)} is not a regular file", path=path)
    if n_bytes not in (None, found_bytes):
        raise DamagedFileError(f"{show(path)} has {counted(found_bytes, 'byte')}, expected {n_bytes}", path=path)
