"""A value that names a file or folder in a store, and `locate`, which makes one of a path.

    >>> locate("output") / "iteration_00000400" / "common.json"
    Location('output/iteration_00000400/common.json')

Public functions accept text, `os.PathLike` or a `Location`, call `locate` once, and pass the `Location` on. A location
is `os.PathLike` too: the core and other libraries take it as a path, or as the URL of an object.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from reshard.errors import ArgumentError, CheckpointNotFoundError, StorageError, UnsupportedError
from reshard.storage.local import LOCAL
from reshard.storage.objects import ObjectStore
from reshard.storage.store import NO_FAULT_OF_A_FILE, join, kind_words
from reshard.values.words import show

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from reshard.storage.remote import BucketOptions
    from reshard.storage.store import Entry, Kind, Lock, OpenedFolder, Stat, Store


BROKEN_LINK_HINT = "mount the disk of the target, or correct the link"
"""For an error about a `Location.broken_link`."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # one slash: `Path` joins the two of a URL
_LINKED = re.compile(r"/(s3|gs|az):/+(.+)", re.DOTALL)  # the target of a link, where slashes are joined
_REMOTE = re.compile(r"(?:s3|gs|az|https?)://")
_CREDENTIALS = re.compile(r"(:/+)[^@]*:[^@]*@|\?.*", re.DOTALL)  # `name:password@`, and a signature in the query


def locate(path: str | os.PathLike[str], options: BucketOptions | None = None) -> Location:
    """The location that a path or a URL names.

    Args:
        path: text, a path or a location: `s3://`, `gs://` and `az://` name objects in a bucket, `https://` and `http://`
            a file behind a server; any other path is one of the local file system. Links are not resolved.
        options: how the bucket of a URL is reached, in this whole process.

    Raises:
        ArgumentError: a URL of another kind, a `pathlib.Path` of a URL, or a path that begins with `~`. As a path it
            would name a folder `s3:` or `~` in the working directory. Or `options` are given for a path that is no
            URL, or for a bucket that has others already.
        UnsupportedError: it is a URL, and the core was compiled without the feature `remote`.

    Example:
        >>> locate("output//checkpoint/").name
        'checkpoint'
    """
    if isinstance(path, Location):
        return path
    if isinstance(path, str) and _REMOTE.match(path):
        from reshard.storage.remote import remote_store  # noqa: PLC0415  not needed without a URL

        return Location(*remote_store(path.rstrip("/"), options))
    if options is not None:
        raise ArgumentError(f"{show(str(path))} is no URL, and `options` are those of a bucket", path=str(path))
    text = str(Path(path))  # by way of Path: one spelling for "a//b/" and "a/b"
    if _URL.match(text):
        url = _CREDENTIALS.sub(r"\1", str(path))
        raise ArgumentError(
            f"{show(url)} is a URL, expected a path of a file system, or text that begins with s3://, gs://, az://, "
            "https:// or http://",
            path=url,
            hint="pass a URL as text, since `pathlib` joins its slashes. If a local folder has this name, pass its "
            "absolute path",
        )
    if text == "~" or text.startswith("~/"):
        raise ArgumentError(
            f"{show(str(path))} begins with `~`, which only a shell replaces by the home directory",
            path=text,
            hint="pass `os.path.expanduser(path)`. If a local folder has this name, pass its absolute path",
        )
    return Location(LOCAL, text)


def locate_destination(path: str | os.PathLike[str]) -> Location:
    """As `locate`, for a file or folder that is written, also in a bucket.

    Raises:
        ArgumentError: as `locate`.
        UnsupportedError: it is in a store that is only read.
    """
    found = locate(path)
    if found.store.is_read_only:
        raise UnsupportedError(
            f"{show(str(found))} is behind HTTP, which is only read",
            path=str(found),
            hint="write into a folder or a bucket (s3://, gs://, az://)",
        )
    return found


def locate_output(path: str | os.PathLike[str]) -> Location:
    """As `locate`, for a root of checkpoints, or a folder or file that gets its name by a rename.

    Raises:
        ArgumentError: as `locate`.
        UnsupportedError: it is in a store without commits.
    """
    return _checked(locate(path))


def _checked(found: Location) -> Location:
    if found.store.is_read_only or not found.store.takes_saves:
        raise UnsupportedError(
            f"{show(str(found))} is a URL, and this is saved into folders only",
            path=str(found),
            hint="save into a folder, and copy it into the bucket",
        )
    return found


def locate_root(path: str | os.PathLike[str]) -> Location:
    """As `locate`, for a root into which a run saves: a folder, or one of a bucket.

    Raises:
        ArgumentError: as `locate`.
        UnsupportedError: it is behind HTTP.
    """
    found = locate(path)
    return found if found.objects is not None else _checked(found)


def is_fault_of_file(error: StorageError) -> bool:
    """Whether an error of the system may be due to the content of its file: a part of a disk that cannot be read.

    On a network file system, EIO also means that the server does not answer. Another checkpoint would fail too, or the
    next attempt succeeds.

    Example:
        >>> is_fault_of_file(StorageError("a timeout", path="run", errno=errno.ETIMEDOUT))
        False
    """
    if error.errno == errno.EIO and error.path is not None:
        place = locate(error.path)
        return not place.store.is_shared(place.path, None)
    return error.errno not in NO_FAULT_OF_A_FILE


@dataclass(frozen=True, slots=True, repr=False)
class Location:
    """A file or folder of a store, whether it exists or not.

    Attributes:
        store: the store.
        path: its path there, as messages show it.

    Example:
        >>> folder = locate("/data/run")
        >>> (folder / "common.json").parent == folder, str(folder), folder.name
        (True, '/data/run', 'run')
    """

    store: Store
    path: str

    def __str__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"Location({self.path!r})"

    def __fspath__(self) -> str:
        """The path of a local file, or the URL of an object. Raises StorageError for another store."""
        return self.store.url(self.path)

    def __truediv__(self, name: str) -> Location:
        """An entry of this folder, or of a folder below it.

        Raises:
            ArgumentError: the name is absolute.
        """
        if name.startswith("/"):
            raise ArgumentError(f"{show(name)} is not relative to {show(self.path)}", path=self.path)
        path = self.path
        is_plain = path != "." and not path.endswith("/")  # as most are, which saves a call for each file
        return Location(self.store, f"{path}/{name}" if is_plain else join(path, name))

    @property
    def name(self) -> str:
        """The last component of the path."""
        return self.path.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The extension of the name with its dot, as `pathlib` has it; empty if there is none."""
        return Path(self.name).suffix

    @property
    def parent(self) -> Location:
        """The folder that holds it; the top folder is its own parent."""
        return Location(self.store, self.store.parent(self.path))

    @property
    def parents(self) -> Iterator[Location]:
        """The folders above it, the nearest first."""
        here = self
        while (folder := here.parent) != here:
            yield folder
            here = folder

    def with_name(self, name: str) -> Location:
        """Another entry of the same folder."""
        return self.parent / name

    def relative_to(self, folder: Location) -> str:
        """The path from a folder above to this location; the whole path if `folder` is not above it.

        Example:
            >>> locate("run/rank_0/w.ckpt").relative_to(locate("run"))
            'rank_0/w.ckpt'
        """
        return self.path.removeprefix(join(folder.path, ""))

    @property
    def local(self) -> Path:
        """The path in the file system of this host. Raises StorageError if the store is not one."""
        return Path(self.store.local_path(self.path))

    @property
    def is_local(self) -> bool:
        """Whether the store is the local file system."""
        return self.store == LOCAL

    def absolute(self) -> Location:
        """The same location, independent of the working directory. Links are not resolved."""
        return Location(self.store, self.store.absolute(self.path))

    def resolved(self) -> Location:
        """The one location of what several paths may name: links are resolved."""
        return Location(self.store, self.store.resolve(self.path))

    # -- looking

    def exists(self) -> bool:
        """Whether something bears the name; a link counts, whatever it names. Never raises."""
        return self.store.kind(self.path) is not None

    def kind(self, *, follow_links: bool = False) -> Kind | None:
        """What is there: "file", "folder", "link" or "other"; None if nothing is seen. Never raises."""
        return self.store.kind(self.path, follow_links=follow_links)

    def is_folder(self) -> bool:
        """Whether it is a folder, or a link to one. Never raises."""
        return self.store.kind(self.path, follow_links=True) == "folder"

    def is_file(self) -> bool:
        """Whether it is a regular file, or a link to one. Never raises."""
        return self.store.kind(self.path, follow_links=True) == "file"

    @property
    def objects(self) -> ObjectStore | None:
        """Its store, if objects can be created in it: a root there is a log of saves, see `commit.log`."""
        store = self.store
        return store if isinstance(store, ObjectStore) and not store.is_read_only else None

    def found(self) -> Kind | None:
        """What is there, links followed; None if nothing is. Raises StorageError if that cannot be seen."""
        try:
            return self.stat(follow_links=True).kind
        except CheckpointNotFoundError:
            return None
        except StorageError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):  # below a file; a link that names itself
                return None
            raise

    def broken_link(self) -> str | None:
        """The reason, for a message, of a symbolic link whose target does not exist; else None. Raises as `found`."""
        if self.kind() != "link" or self.found() is not None:
            return None
        target = str(self.resolved())
        if (url := _LINKED.search(target)) is not None:
            named = show(f"{url[1]}://{url[2]}")
            return f"it is a symbolic link to the URL {named}, which only text names: pass {named} itself"
        return f"it is a symbolic link to {show(target)}, which does not exist"

    def stat(self, *, follow_links: bool = False) -> Stat:
        """Its kind, size, identity, times and mode. Raises CheckpointNotFoundError, StorageError."""
        return self.store.stat(self.path, follow_links=follow_links)

    def names(self) -> list[str]:
        """The names in this folder, sorted. Raises CheckpointNotFoundError, StorageError."""
        return self.store.names(self.path)

    def entries(self) -> list[Entry]:
        """Names and kinds of what is in this folder, sorted by name. Raises CheckpointNotFoundError, StorageError."""
        return self.store.entries(self.path)

    def sizes(self) -> list[tuple[str, Kind, int]]:
        """Name, kind and bytes of what is in this folder, see `Store.sizes`."""
        return self.store.sizes(self.path)

    # -- reading

    def read_small(self, max_bytes: int, *, follow_links: bool = False) -> bytes:
        """Read a regular file as a whole, see `Store.read_small`."""
        return self.store.read_small(self.path, max_bytes, follow_links=follow_links)

    def read_head(self, n_bytes: int, *, follow_links: bool = False) -> bytes:
        """The first bytes of a regular file, see `Store.read_head`."""
        return self.store.read_head(self.path, n_bytes, follow_links=follow_links)

    def read_tail(self, n_bytes: int, *, follow_links: bool = False) -> bytes:
        """The last bytes of a regular file, see `Store.read_head`."""
        return self.store.read_tail(self.path, n_bytes, follow_links=follow_links)

    def pieces(self, n_bytes: int | None = None, ranges: Sequence[tuple[int, int]] | None = None) -> Iterator[bytes]:
        """Read a file in pieces of at most 4 MiB, see `Store.pieces`."""
        return self.store.pieces(self.path, n_bytes, ranges)

    def open(self, *, follow_links: bool = False) -> BinaryIO:
        """Open a regular file for reading, see `Store.open`."""
        return self.store.open(self.path, follow_links=follow_links)

    def opened(self) -> OpenedFolder:
        """This folder, to check and read several of its entries. Raises CheckpointNotFoundError, StorageError."""
        return self.store.open_folder(self.path)

    # -- changing: operations that crash tests stop at are in `filesystem`

    def replace(self, data: bytes | str, mode: int = 0o666, *, durable: bool = True) -> None:
        """Write a small file so that readers see the old content or all of the new.

        Args:
            data: its content; text is written as UTF-8.
            mode: permission bits, less the umask.
            durable: sync the file and then its folder.

        Raises:
            StorageError: the system failed; the file is as it was, and no temporary file is left.

        Example:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     (locate(folder) / "note.txt").replace("7")
            ...     locate(folder).names()
            ['note.txt']
        """
        content = data.encode() if isinstance(data, str) else data
        self.store.replace(self.path, content, mode, durable=durable)

    def check_replaceable(self) -> None:
        """Refuse a pipe, a socket or a device: a rename onto it would remove it, as `/dev/null`. Links are followed.

        Raises:
            StorageError: it is one of these.
        """
        if self.kind(follow_links=True) == "other":
            raise StorageError(f"{show(str(self))} is {kind_words('other')}, expected a file", path=str(self))

    def writing(self, mode: int = 0o666, *, durable: bool = True) -> AbstractContextManager[BinaryIO]:
        """A binary file to write into, which gets this name when the block ends without an error.

        Args:
            mode: permission bits, less the umask.
            durable: sync the file and then its folder.

        Raises:
            StorageError: the system failed; the file is as it was, and no temporary file is left.
        """
        return self.store.writing(self.path, mode, durable=durable)

    def create(self, data: bytes = b"", mode: int = 0o666, *, durable: bool = True) -> None:
        """Make a small file that must not exist, see `Store.create`. Raises FileExistsError, StorageError."""
        self.store.create(self.path, data, mode, durable=durable)

    def append_line(self, line: bytes, mode: int = 0o666, *, durable: bool = True) -> None:
        """Add a line to a file, see `Store.append_line`. Raises DamagedFileError, StorageError."""
        self.store.append_line(self.path, line, mode, durable=durable)

    def remove_file(self) -> None:
        """Remove a file or a link; no error if there is none. Raises StorageError."""
        self.store.remove_file(self.path)

    def lock(self, *, shared: bool = False, seconds: float = 0.0, make: bool = False) -> Lock:
        """Lock this file against other processes, see `Store.lock`. Raises LockHeldError, StorageError."""
        return self.store.lock(self.path, shared=shared, seconds=seconds, make=make)
