"""Leases: how a reader of a root that is a log keeps retention from removing what it reads.

    <root>/readers/<folder>.<random>      written again every `_REFRESH_SECONDS` while the checkpoint is open

The order makes it exact. A reader writes its lease and then looks at the newest record: it reads only what is
published there. Retention publishes that an iteration is retired and then lists the leases. One of the two sees the
other. A lease that was not written for `LEASE_SECONDS`, by the clock of the store, is that of a process that has ended.

A reader that may not write has no lease. For its sake retired files stay for `GRACE_SECONDS`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from typing import TYPE_CHECKING

from reshard.commit import log
from reshard.commit.log_records import iteration_of
from reshard.errors import CheckpointNotFoundError, ReshardError
from reshard.storage.store import Lock
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Collection

    from reshard.storage.location import Location

READERS_FOLDER = "readers"
LEASE_SECONDS = 600.0
GRACE_SECONDS = 3600.0
_REFRESH_SECONDS = 60.0

_log = logging.getLogger("reshard")


class Lease(Lock):
    """A lease on the folder of an iteration."""

    def __init__(self, path: Location | None) -> None:
        self._path = path
        self._pid = os.getpid()
        self._n_owners = 1
        self.errno = errno.EACCES if path is None else None

    def is_current(self) -> bool:
        """See `Lock.is_current`: the names of an iteration are never used again."""
        return True

    def duplicate(self) -> Lease:
        """See `Lock.duplicate`."""
        with _lock:
            self._n_owners += 1
        return self

    def close(self) -> None:
        """See `Lock.close`."""
        with _lock:
            self._n_owners -= 1
            if self._n_owners != 0 or self._path is None:
                return
            _held.pop(self, None)
            if not _held:
                _wake.set()
        if self._pid == os.getpid():  # a fork holds none of its parent's
            with contextlib.suppress(ReshardError, OSError):
                self._path.remove_file()

    def refresh(self) -> None:
        """Write it again. Never raises."""
        if self._path is not None:
            with contextlib.suppress(ReshardError, OSError):
                self._path.store.replace(self._path.path, b"", durable=True)


_held: dict[Lease, None] = {}
_lock = threading.Lock()
_refreshing: threading.Thread | None = None


def take(folder: Location) -> Lease | None:
    """Keep the files of an iteration; None: it is not in a root that is a log.

    Raises:
        CheckpointNotFoundError: it is no longer published.
        StorageError: the store failed.
    """
    root = folder.parent
    if iteration_of(folder.name) is None or root.objects is None:
        return None
    path: Location | None = root / READERS_FOLDER / f"{folder.name}.{os.urandom(8).hex()}"
    assert path is not None
    try:
        path.store.replace(path.path, b"", durable=True)
    except ReshardError as error:
        _log.debug("no lease for %s: %s", folder, error.message)
        path = None
    lease = Lease(path)
    try:
        head = log.head_of(root)
    except BaseException:
        lease.close()
        raise
    if head is None or head.by_name(folder.name) is None:
        lease.close()
        if head is None:
            return None
        raise CheckpointNotFoundError(
            f"{show(str(folder))} is no longer published: another save has replaced it, or retention has removed it",
            path=str(folder),
            hint="open the root again",
        )
    _keep(lease)
    return lease


def _keep(lease: Lease) -> None:
    global _refreshing  # noqa: PLW0603  one for all leases
    with _lock:
        _held[lease] = None
        if _refreshing is None:
            _wake.clear()
            _refreshing = threading.Thread(target=_refresh, name="reshard-leases", daemon=True)
            try:
                _refreshing.start()
            except RuntimeError:  # at the end of the process: what is read now is read before the lease expires
                _refreshing = None


def _refresh() -> None:
    global _refreshing  # noqa: PLW0603
    while True:
        _wake.wait(_REFRESH_SECONDS)
        with _lock:
            leases = list(_held)
            if not leases:
                _refreshing = None
                return
            _wake.clear()
        for lease in leases:
            lease.refresh()


def _forget() -> None:
    """A fork holds no lease of its parent, and has no thread of it."""
    global _lock, _refreshing, _wake
    _lock, _refreshing, _wake = threading.Lock(), None, threading.Event()
    _held.clear()


_wake = threading.Event()
os.register_at_fork(after_in_child=_forget)


def unread(root: Location, names: Collection[str], now_ns: int) -> set[str]:
    """The folders on which nobody has a lease. Leases of processes that have ended are removed.

    Args:
        root: the checkpoint root.
        names: folders that are retired.
        now_ns: the time by the clock of the store.

    Raises:
        StorageError: the store failed.
    """
    store = root.objects
    assert store is not None
    held, old = set(), []
    for name, found in store.below(str(root / READERS_FOLDER)):
        if now_ns - found.modified_ns > LEASE_SECONDS * 1e9:
            old.append(str(root / READERS_FOLDER / name))
        else:
            held.add(name.rpartition(".")[0])
    with contextlib.suppress(ReshardError):
        store.remove_files(old)
    return set(names) - held
