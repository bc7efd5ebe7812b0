"""The interface of a store: a place that keeps files under paths, such as a local file system or an object store.

Everything that reads, writes, lists, locks or removes files calls a `Store`, mostly through a `Location`. Paths are
text with `/` between their components. No store knows what the files mean.

A commit of a checkpoint requires of a store:

- `create`: make a file that must not exist; of several writers one wins. Claims of a root depend on it.
- `replace`: a reader sees the old content or the new one, never a part. The manifest and the tracker depend on it.
- a file that `create`, `replace` or `writing` has returned from is listed and read by every process from then on.
- `abilities`: where folders cannot be renamed, iterations are written in their final folder, and the manifest alone
  makes them complete.

Locks, times, free space and permissions are optional: the methods say what a store without them returns.
"""

from __future__ import annotations

import abc
import contextlib
import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Literal, NamedTuple, Self, TypeAlias

from reshard.errors import CheckpointNotFoundError, DamagedFileError, ReshardError, StorageError
from reshard.words import show

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
    from contextlib import AbstractContextManager

__all__ = [
    "NO_FOLDER_RENAME",
    "PROBE_PREFIX",
    "Abilities",
    "Entry",
    "HeldFile",
    "Kind",
    "Lock",
    "LockHeldError",
    "OpenedFolder",
    "Stat",
    "Store",
    "check_file",
    "failing",
    "ignore",
    "join",
]

# Error numbers of a store that cannot rename folders, or not between folders.
NO_FOLDER_RENAME = frozenset((errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM))
PROBE_PREFIX = ".probe."  # of the folders that `Store.abilities` makes and removes

Kind: TypeAlias = Literal["file", "folder", "link", "other"]


class Stat(NamedTuple):
    """What a store knows of a file or folder without reading it.

    Attributes:
        kind: "file", "folder", "link" or "other" (a pipe, a device).
        n_bytes: its size.
        identity: differs from that of a later file with the same path: device and inode, or an ETag.
        modified_ns: when its content was last written, nanoseconds of the store's clock.
        changed_ns: when its content or its attributes last changed; no program can set it back.
        mode: permission bits; 0 in a store without them.
    """

    kind: Kind
    n_bytes: int
    identity: Hashable
    modified_ns: int
    changed_ns: int
    mode: int


class Entry(NamedTuple):
    """A name in a folder, and what bears it. A link is not followed."""

    name: str
    kind: Kind


@dataclass(frozen=True)
class Abilities:
    """What a store can do with a folder in one step.

    Attributes:
        renames_folders: give a folder another name, in another folder.
        exchanges: exchange two names.
    """

    renames_folders: bool
    exchanges: bool


class LockHeldError(StorageError):
    """Another process held a lock for the whole time."""


@contextlib.contextmanager
def failing(doing: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise errors of the system as a StorageError that says what was being done.

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
    """Announce an operation to nobody."""


class Lock(abc.ABC):
    """A lock of a file that this process holds until `close`.

    Attributes:
        errno: why the store could not lock, an error number; None: the lock is held.
    """

    errno: int | None = None

    @property
    def is_real(self) -> bool:
        """Whether the lock keeps other processes out."""
        return self.errno is None

    @abc.abstractmethod
    def is_current(self) -> bool:
        """Whether the path still names the file that is locked. Raises StorageError."""

    @abc.abstractmethod
    def duplicate(self) -> Lock:
        """A second owner of a shared lock, which lasts until both are closed. Raises StorageError."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give the lock back. Never raises; a second call has no effect."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class HeldFile(abc.ABC):
    """A file that this process made and keeps watching: a claim, whose time of modification is the heartbeat."""

    @abc.abstractmethod
    def touch(self) -> None:
        """Set the time of modification to now. Raises StorageError."""

    @abc.abstractmethod
    def write(self, data: bytes) -> None:
        """Replace the content, which need not be atomic. Raises StorageError."""

    @abc.abstractmethod
    def is_current(self) -> bool:
        """Whether its path still names this file. Raises StorageError."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop watching; the file stays. Never raises."""


class Store(abc.ABC):
    """A place that keeps files. Every path is one of this store.

    Unless a method says otherwise, it raises CheckpointNotFoundError if there is nothing at a path, and StorageError if
    the system failed.
    """

    # -- reading

    @abc.abstractmethod
    def stat(self, path: str, *, follow_links: bool = False) -> Stat:
        """What is at a path.

        Args:
            path: the path.
            follow_links: whether a symbolic link counts as what it names.
        """

    @abc.abstractmethod
    def entries(self, path: str) -> list[Entry]:
        """What is in a folder, sorted by name."""

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
            n_bytes: at most so many.
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
        """Open a regular file for reading; it can be positioned.

        Raises:
            CheckpointNotFoundError: there is no such file.
            DamagedFileError: it is a link (without `follow_links`), a folder, a pipe or a device.
            StorageError: the system failed.
        """

    def names(self, path: str) -> list[str]:
        """The names in a folder, sorted."""
        return [entry.name for entry in self.entries(path)]

    def kind(self, path: str, *, follow_links: bool = False) -> Kind | None:
        """What is at a path, or None if there is nothing or it cannot be seen. Never raises."""
        try:
            return self.stat(path, follow_links=follow_links).kind
        except ReshardError:
            return None

    def open_folder(self, path: str) -> OpenedFolder:
        """A folder whose entries are checked and read."""
        return OpenedFolder(self, path)

    def absolute(self, path: str) -> str:
        """The path in a form that does not depend on the working directory."""
        return path

    def resolve(self, path: str) -> str:
        """The one path of a file or folder that several paths may name."""
        return self.absolute(path)

    def local_path(self, path: str) -> str:
        """The path in the file system of this host.

        Raises:
            StorageError: this store is not one.
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
        """Make a small file that must not exist; of several writers one succeeds.

        Args:
            path: the file, in a folder that exists.
            data: its content. A crash may leave a part of it; its name is there then.
            mode: permission bits, less the umask.
            durable: sync the file. Its name becomes durable with `sync_folder`.
            announce: called before the sync, with text that says what follows.

        Raises:
            FileExistsError: it exists.
            StorageError: the system failed; the file is removed again if that is possible.
        """

    @abc.abstractmethod
    def writing(self, path: str, mode: int = 0o666, *, durable: bool) -> AbstractContextManager[BinaryIO]:
        """A file to write into, which gets its name when the block ends without an error.

        A file that had the name is replaced. If the block raises, nothing changes.

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
        """Add a line to a file, which is made if there is none.

        A last line without its newline, which a crash left, is ended first. A store that cannot append replaces the
        file: lines of two writers at the same time may be lost there.

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
        """Make a folder in a folder that exists; one that is there is left as it is.

        In a store without folders this has no effect: a folder exists there while something is in it.

        Args:
            path: the folder.
            mode: permission bits, less the umask.
        """

    @abc.abstractmethod
    def sync_folder(self, path: str) -> None:
        """Make the names in a folder durable. Has no effect where every change is durable when its call returns."""

    def rename(self, source: str, target: str, *, replace: bool = False) -> None:
        """Give a file or folder another name.

        Args:
            source: what is renamed.
            target: its new name.
            replace: whether a file that has the name is replaced, in one step.

        Raises:
            FileExistsError: the name is taken, without `replace`.
            StorageError: the system failed, or the store cannot rename (`NO_FOLDER_RENAME` has its error number).
        """
        what = f"renaming {show(source)} to {show(target)}{', which it replaces' if replace else ''}"
        raise StorageError(f"{what}: this store cannot", path=target, errno=errno.EOPNOTSUPP)

    def exchange(self, one: str, other: str) -> None:
        """Exchange two names in one step. Raises StorageError, also where the store cannot."""
        raise StorageError(
            f"exchanging {show(one)} and {show(other)}: this store cannot", path=other, errno=errno.EOPNOTSUPP
        )

    def link(self, source: str, target: str) -> None:
        """Give a file a second name. Raises StorageError, also where the store cannot."""
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
        """Remove a folder with everything in it; no link in it or in its place is followed. No error if there is none.

        Args:
            path: the folder.
            first: the name that is removed first.
            last: the name that is removed last.
            keep: names of what stays, and with it the folder.
            durable: make it durable that `first` is gone before anything else goes.
            announce: called before each of the two steps, with text that says what follows.
        """

    @abc.abstractmethod
    def remove_empty_folder(self, path: str) -> None:
        """Remove a folder that has nothing in it. Raises StorageError if it has."""

    # -- who else is there

    @abc.abstractmethod
    def lock(self, path: str, *, shared: bool, seconds: float, make: bool = False) -> Lock:
        """Lock a file against other processes.

        Args:
            path: the file.
            shared: whether others may hold a shared lock at the same time.
            seconds: how long to wait for another process.
            make: make the file if there is none.

        Returns:
            The lock. In a store without locks it is not real, and its `errno` says why.

        Raises:
            LockHeldError: another process held the lock for the whole time.
        """

    @abc.abstractmethod
    def hold(self, path: str) -> HeldFile:
        """A file that this process has created, to touch it and to see whether it is replaced."""

    @abc.abstractmethod
    def touched_ns(self, path: str) -> int | None:
        """When a file was last modified, nanoseconds of the store's clock, not from a cache; None: there is no file."""

    # -- what the store is

    @abc.abstractmethod
    def abilities(self, path: str) -> Abilities:
        """What the store can do with folders, found by trying in a folder.

        Raises:
            StorageError: the system failed in another way than by not being able to.
        """

    @abc.abstractmethod
    def folder_identity(self, path: str) -> Hashable:
        """What tells a folder from others, whichever path names it. A store without folders has the path itself."""

    @abc.abstractmethod
    def free_bytes(self, path: str) -> int | None:
        """Bytes that can still be written below a folder; None: the store has no limit that it knows of."""

    @abc.abstractmethod
    def is_writable(self, path: str) -> bool:
        """Whether this process may make files in a folder, as far as the store says. Never raises."""

    @abc.abstractmethod
    def same_filesystem(self, one: str, other: str) -> bool:
        """Whether a rename between two folders can be one step: they are on one file system."""

    @abc.abstractmethod
    def is_shared(self, path: str, shared_paths: str | None) -> bool:
        """Whether other hosts see what is written below a path, see `mounts.is_shared`; always in an object store."""

    @abc.abstractmethod
    def volatile(self, path: str) -> str | None:
        """What makes a path lose its content with the power, whatever is synced; None: nothing does."""


class OpenedFolder:
    """A folder whose entries are checked and read, for as long as the `with` block lasts.

    Names come from files that a stranger may have written; they are plain components when they get here.

    Args:
        store: where it is.
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
            DamagedFileError: it is not.
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


def check_file(path: str, is_file: bool, found_bytes: int, n_bytes: int | None) -> None:  # noqa: FBT001
    """Check that what was found is a regular file of a size.

    Args:
        path: the path, for the message.
        is_file: whether it is a regular file.
        found_bytes: its size.
        n_bytes: the size that it must have; None: any.

    Raises:
        DamagedFileError: it is not.
    """
    if not is_file:
        raise DamagedFileError(f"{show(path)} is not a regular file", path=path)
    if n_bytes not in (None, found_bytes):
        raise DamagedFileError(f"{show(path)} has {found_bytes} bytes, expected {n_bytes}", path=path)
