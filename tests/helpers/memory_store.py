"""A store in memory that behaves as an object store: no folders, no renames, no locks; each write is one step."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from reshard.errors import CheckpointNotFoundError, DamagedFileError, StorageError
from reshard.storage.location import Location
from reshard.storage.store import Abilities, Entry, HeldFile, Lock, Stat, Store, check_file, ignore

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
    from pathlib import Path

_PIECE_BYTES = 4 << 20
_etags = itertools.count(1)


def _before_change(name: str) -> None:
    """Called before each change with what it is; a test that kills puts a function of its own here."""


@dataclass(frozen=True)
class _Object:
    data: bytes
    etag: int
    modified_ns: int


class MemoryStore(Store):
    """Objects by their path. A folder exists while an object is below it."""

    def __init__(self, objects: dict[str, _Object] | None = None) -> None:
        self.objects = {} if objects is None else objects
        self.lock_of_objects = threading.RLock()

    def copy(self) -> MemoryStore:
        """Another store with the same objects."""
        with self.lock_of_objects:
            return MemoryStore(dict(self.objects))

    def export(self, folder: Path) -> None:
        """Write all objects as files into a local folder, which is made."""
        folder.mkdir()
        with self.lock_of_objects:
            for path, one in self.objects.items():
                file = folder / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(one.data)

    def put(
        self, path: str, data: bytes, what: str = "put", *, if_absent: bool = False, etag: int | None = None
    ) -> int:
        """The one write of an object store.

        Args:
            path: the object.
            data: its content.
            what: what the change is called.
            if_absent: fail if the object exists.
            etag: fail if the object is not the one with this ETag.

        Returns:
            The new ETag.
        """
        with self.lock_of_objects:
            _before_change(f"{what} {path}")
            found = self.objects.get(path)
            if if_absent and found is not None:
                raise FileExistsError(errno.EEXIST, "it exists", path)
            if etag is not None and (found is None or found.etag != etag):
                raise StorageError(f"`{path}` was replaced", path=path, errno=errno.ESTALE)
            self.objects[path] = _Object(data, next(_etags), time.time_ns())
            return self.objects[path].etag

    def get(self, path: str) -> _Object:
        """An object, if there is one."""
        with self.lock_of_objects:
            found = self.objects.get(path)
        if found is not None:
            return found
        if self._is_folder(path):
            raise DamagedFileError(f"`{path}` is not a regular file", path=path)
        raise CheckpointNotFoundError(f"there is no file `{path}`", path=path)

    def _is_folder(self, path: str) -> bool:
        with self.lock_of_objects:
            return any(one.startswith(f"{path}/") for one in self.objects)

    # -- reading

    def stat(self, path: str, *, follow_links: bool = False) -> Stat:
        with self.lock_of_objects:
            found = self.objects.get(path)
        if found is not None:
            return Stat("file", len(found.data), found.etag, found.modified_ns, found.modified_ns, 0)
        if not self._is_folder(path):
            raise CheckpointNotFoundError(f"there is no file or folder `{path}`", path=path)
        return Stat("folder", 0, path, 0, 0, 0)

    def entries(self, path: str) -> list[Entry]:
        with self.lock_of_objects:
            names = {one.removeprefix(f"{path}/") for one in self.objects if one.startswith(f"{path}/")}
        if not names:
            raise CheckpointNotFoundError(f"there is no folder `{path}`", path=path)
        return sorted({Entry(name.partition("/")[0], "folder" if "/" in name else "file") for name in names})

    def read_small(self, path: str, max_bytes: int, *, follow_links: bool = False) -> bytes:
        data = self.get(path).data
        if len(data) > max_bytes:
            raise DamagedFileError(f"`{path}` is larger than {max_bytes} bytes", path=path)
        return data

    def read_head(self, path: str, n_bytes: int, *, follow_links: bool = False) -> bytes:
        return self.get(path).data[:n_bytes]

    def read_tail(self, path: str, n_bytes: int, *, follow_links: bool = False) -> bytes:
        data = self.get(path).data
        return data[max(0, len(data) - n_bytes) :]

    def pieces(
        self, path: str, n_bytes: int | None = None, ranges: Sequence[tuple[int, int]] | None = None
    ) -> Iterator[bytes]:
        try:
            data = self.get(path).data
        except CheckpointNotFoundError as error:
            raise DamagedFileError(error.message, path=path) from error
        check_file(path, True, len(data), n_bytes)
        for begin, end in [(0, len(data))] if ranges is None else ranges:
            for place in range(begin, end, _PIECE_BYTES):
                piece = data[place : min(end, place + _PIECE_BYTES)]
                if len(piece) < min(end, place + _PIECE_BYTES) - place:
                    raise DamagedFileError(f"`{path}` was truncated while it was read", path=path)
                yield piece

    def open(self, path: str, *, follow_links: bool = False) -> BinaryIO:
        return io.BytesIO(self.get(path).data)

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
        self.put(path, data, "create", if_absent=True)

    @contextlib.contextmanager
    def writing(self, path: str, mode: int = 0o666, *, durable: bool) -> Iterator[BinaryIO]:
        file = io.BytesIO()
        yield file
        self.put(path, file.getvalue())

    def append_line(self, path: str, line: bytes, mode: int = 0o666, *, durable: bool) -> None:
        with self.lock_of_objects:
            found = self.objects.get(path)
            before = b"" if found is None else found.data
            self.put(path, before + (b"\n" if before and not before.endswith(b"\n") else b"") + line)

    def make_folder(self, path: str, mode: int = 0o777) -> None:
        if path in self.objects:
            raise StorageError(f"making `{path}`: it is a file", path=path, errno=errno.EEXIST)

    def sync_folder(self, path: str) -> None:
        pass

    def sync_together(self, files: Sequence[str], folders: Sequence[str]) -> None:
        pass

    def replace_after(
        self, path: str, data: bytes, mode: int = 0o666, *, files: Sequence[str], folders: Sequence[str]
    ) -> None:
        self.put(path, data)

    def set_mode(self, path: str, mode: int) -> None:
        pass

    def remove_file(self, path: str) -> None:
        with self.lock_of_objects:
            if path in self.objects:
                _before_change(f"delete {path}")
                del self.objects[path]

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
        announce(f"remove {first} of {path}")
        self.remove_file(f"{path}/{first}")
        announce(f"remove {path}")
        with self.lock_of_objects:
            inside = [one for one in self.objects if one.startswith(f"{path}/")]
        for one in sorted(inside, key=f"{path}/{last}".__eq__):
            if one.removeprefix(f"{path}/").partition("/")[0] not in keep:
                self.remove_file(one)
        if not keep:
            self.remove_file(path)

    def remove_empty_folder(self, path: str) -> None:
        if self._is_folder(path):
            raise StorageError(f"removing `{path}`: it is not empty", path=path, errno=errno.ENOTEMPTY)

    # -- who else is there

    def lock(self, path: str, *, shared: bool, seconds: float, make: bool = False) -> Lock:
        if not make:
            self.get(path)
        return _NoLock()

    def hold(self, path: str) -> HeldFile:
        return _HeldObject(self, path)

    def touched_ns(self, path: str) -> int | None:
        with self.lock_of_objects:
            found = self.objects.get(path)
        return None if found is None else found.modified_ns

    # -- what the store is

    def abilities(self, path: str) -> Abilities:
        return Abilities(renames_folders=False, exchanges=False)

    def folder_identity(self, path: str) -> Hashable:
        return path

    def free_bytes(self, path: str) -> int | None:
        return None

    def is_writable(self, path: str) -> bool:
        return True

    def same_filesystem(self, one: str, other: str) -> bool:
        return True

    def is_shared(self, path: str, shared_paths: str | None) -> bool:
        return True

    def volatile(self, path: str) -> str | None:
        return None


class _NoLock(Lock):
    errno = errno.ENOLCK

    def is_current(self) -> bool:
        return True

    def duplicate(self) -> Lock:
        return self

    def close(self) -> None:
        pass


class _HeldObject(HeldFile):
    """An object by its ETag, which each write of the holder changes."""

    def __init__(self, store: MemoryStore, path: str) -> None:
        self._store = store
        self._path = path
        self._etag = store.get(path).etag

    def beat(self) -> None:
        self.write(self._store.get(self._path).data)

    def write(self, data: bytes) -> None:
        self._etag = self._store.put(self._path, data, etag=self._etag)

    def is_current(self) -> bool:
        with self._store.lock_of_objects:
            found = self._store.objects.get(self._path)
        return found is not None and found.etag == self._etag

    def close(self) -> None:
        pass


def located(path: str = "run") -> Location:
    """A location in a new store."""
    return Location(MemoryStore(), path)
