"""What this process knows of a checkpoint root between two calls: one `RootSession` for each root that it writes into.

Functions such as `save` and `load` do not hand anything to each other: what one has to know of the other is here. An
object that writes for a whole run, such as a `Checkpointer`, owns the session from its first step until it is closed,
and a second one on the same root is refused. What a format remembers of its saves is a class of its own, see `of`.

A session is found by the folder, whatever its path. A fork begins without sessions: the claims are its parent's.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from reshard.errors import ClaimedError, ReshardError
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from reshard.storage.location import Location
    from reshard.storage.store import Abilities, HeldFile

T = TypeVar("T")

_END_SECONDS = 10.0  # for a heartbeat to end


@dataclass(eq=False)
class Claim:
    """A claim that this process holds; `claims` makes and releases it.

    Attributes:
        root: the checkpoint root.
        generation: its number; no other claim of this root has it.
        file: the claim file: its time of modification is the heartbeat.
        stop: ends the heartbeat.
        beat: the thread that touches the file.
        at_end: called by that thread when it ends.
        abilities: of the root's store, once they were tested under this claim.
    """

    root: Location
    generation: int
    file: HeldFile = field(repr=False)
    stop: threading.Event = field(repr=False)
    beat: threading.Thread = field(repr=False)
    at_end: list[Callable[[], object]] = field(repr=False)
    abilities: Abilities | None = None


class PassedOver(NamedTuple):
    """An iteration that a run resumed from although newer ones exist.

    The first save after it may move the tracker back, and its manifest says which iterations are not candidates from
    then on. Any other save below the tracker is refused.

    Attributes:
        iteration: the one that it resumed from.
        newer: the newer ones, ascending.
    """

    iteration: int
    newer: tuple[int, ...]


class RootSession:
    """What this process knows of a root.

    Attributes:
        root: the checkpoint root.
        claim: the claim of this process on it, or None.
        claiming: held while the claim is made or released.
        resumed: from what this process resumed although newer iterations exist, until a save has recorded it; None: it
            goes on from the newest.

    Example:
        >>> import os
        >>> from reshard.storage.location import locate
        >>> os.mkdir("output")
        >>> session = session_of(locate("output"))
        >>> session.resumed = PassedOver(400, (500,))
        >>> session_of(locate("./output")).resumed
        PassedOver(iteration=400, newer=(500,))
    """

    def __init__(self, root: Location) -> None:
        self.root = root
        self.claim: Claim | None = None
        self.claiming = threading.Lock()
        self.resumed: PassedOver | None = None
        self._owner: weakref.ref[object] | None = None
        self._notes: dict[type, object] = {}

    def move(self, root: Location) -> None:
        """Forget what was known except for the claim: the folder was moved, or is a new one with the same identity."""
        self.root, self.resumed = root, None
        self._notes.clear()

    def of(self, kind: type[T]) -> T:
        """What a module remembers of this root: an object of its own class, made at the first call."""
        if kind not in self._notes:
            self._notes[kind] = kind()
        return cast("T", self._notes[kind])

    def own(self, owner: object) -> None:
        """Let an object write into this root until it is dropped or `leave` is called.

        Raises:
            ClaimedError: another object of this process does.
        """
        if self._other(owner) is not None:
            gc.collect()  # one that was dropped can wait for the garbage collection
        kind = self._other(owner)
        if kind is not None:
            raise ClaimedError(
                f"{show(str(self.root))} is claimed by another {kind} of this process, which is not closed",
                path=str(self.root),
                hint="close it first, or give this one another root: two that save into one root replace each other's "
                "iterations",
            )
        self._owner = weakref.ref(owner)

    def _other(self, owner: object) -> str | None:
        """The class of another living owner. Does not return that owner, which would keep it alive."""
        other = None if self._owner is None else self._owner()
        return None if other is None or other is owner else type(other).__name__

    def leave(self, owner: object) -> None:
        """Let others own the session; no effect if `owner` does not own it."""
        if self._owner is not None and self._owner() is owner:
            self._owner = None


_sessions: dict[Hashable, RootSession] = {}
_lock = threading.Lock()


def session_of(root: Location) -> RootSession:
    """The session of an existing root.

    Raises:
        CheckpointNotFoundError: there is no such folder.
        StorageError: the system failed.
    """
    key = _key(root)
    with _lock:
        session = _sessions.get(key)
        if session is None:
            session = _sessions[key] = RootSession(root)
        elif session.root != root and not _is_folder(session.root, key):
            session.move(root)
        return session


def find_session(root: Location) -> RootSession | None:
    """As `session_of`; None if there is no such folder, or the system failed. Never raises."""
    try:
        return session_of(root)
    except (OSError, ReshardError):
        return None


def sessions() -> list[RootSession]:
    """All sessions of this process."""
    return list(_sessions.values())


def _key(root: Location) -> Hashable:
    return (root.store, root.store.folder_identity(root.path))


def _is_folder(root: Location, key: Hashable) -> bool:
    with contextlib.suppress(OSError, ReshardError):
        return _key(root) == key
    return False


def forget_all() -> None:
    """Forget all sessions without releasing their claims: what a forked child does, whose parent holds them."""
    global _lock  # noqa: PLW0603  the parent may have held it at the fork
    _lock = threading.Lock()
    for session in _sessions.values():
        if session.claim is not None:
            if session.claim.beat.is_alive():  # not in a child; it must not touch another file with the same descriptor
                session.claim.stop.set()
                session.claim.beat.join(_END_SECONDS)
            if not session.claim.beat.is_alive():  # else it waits for a file system: the file stays open
                session.claim.file.close()
            session.claim = None
    _sessions.clear()


os.register_at_fork(after_in_child=forget_all)
