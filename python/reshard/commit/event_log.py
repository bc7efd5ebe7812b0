"""`events.jsonl` in a checkpoint root, a file of this package: one JSON line for every event, the latest last.

    {"kind": "published", "iteration": 500, "time": "2026-01-31T12:00:00.000+00:00", "rank": 0,
     "fields": {"n_bytes": 123, "seconds": 3.2}}

The log is written on request (`on_event=EventLog(root)`) and is informative: nothing but `reshard watch` reads it. A
log of more than 8 MiB is renamed to `events.1.jsonl`, which replaces the one before; so there are at most two files of
about that size. Invalid lines are skipped and counted.
"""

from __future__ import annotations

import collections
import json
import threading
from typing import TYPE_CHECKING

from reshard.documents.strict_json import parse_json
from reshard.errors import ArgumentError, CheckpointNotFoundError, DamagedFileError, ReshardError
from reshard.storage.location import locate
from reshard.values.arguments import checked
from reshard.values.events import Event

if TYPE_CHECKING:
    import os
    from collections.abc import Hashable

    from reshard.storage.location import Location

EVENT_FILE = "events.jsonl"
OLD_EVENT_FILE = "events.1.jsonl"

_MAX_FILE_BYTES = 8 << 20
_MAX_LINE_BYTES = 64 << 10
_MAX_WAITING = 256  # events from before the root is made


class EventLog:
    """A function for `on_event=` that appends the events of rank 0 to `events.jsonl` in a checkpoint root.

    Every line is appended by one write, without a sync. Events from before the root exists are written with the first
    one after that.

    Args:
        root: the checkpoint root.

    Example:
        >>> import numpy as np, reshard
        >>> _ = reshard.save("logged", 100, {"w": np.zeros(4)}, on_event=reshard.EventLog("logged"))
        >>> [event.kind for event in EventReader("logged").new()]
        ['begun', 'written', 'published']
    """

    @checked
    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = locate(root).absolute()
        self._waiting: collections.deque[Event] = collections.deque(maxlen=_MAX_WAITING)
        self._lock = threading.Lock()  # a save in the background and the training make events

    def __call__(self, event: Event) -> None:
        """Append an event of rank 0. Events of other ranks are left out.

        Raises:
            DamagedFileError: the log is a symbolic link or not a regular file.
            StorageError: the system failed to write; the log may end in a truncated line.
        """
        if event.rank != 0:
            return
        with self._lock:
            self._waiting.append(event)
            if not self._root.is_folder():
                return
            path = self._root / EVENT_FILE
            while self._waiting:
                line = json.dumps(self._waiting[0].to_json(), allow_nan=False).encode() + b"\n"
                if len(line) <= _MAX_LINE_BYTES:
                    path.append_line(line, durable=False)
                self._waiting.popleft()
            if path.stat().n_bytes > _MAX_FILE_BYTES:
                path.store.rename(path.path, (self._root / OLD_EVENT_FILE).path, replace=True)


def exists(root: str | os.PathLike[str]) -> bool:
    """Whether a root has a log of events. Never raises.

    Example:
        >>> exists("no/such/root")
        False
    """
    return (locate(root) / EVENT_FILE).is_file()


def follow_up(root: str | os.PathLike[str]) -> EventLog | None:
    """The log of a root if there is one, for commands that change the root of a run.

    Example:
        >>> follow_up("no/such/root") is None
        True
    """
    return EventLog(root) if exists(root) else None


class EventReader:
    """Reads the events of a root, and later those that were added.

    Attributes:
        n_bad: lines so far that are no events, such as one that a crash truncated.

    Args:
        root: the checkpoint root.

    Example:
        >>> import numpy as np, reshard
        >>> log = reshard.EventLog("read")
        >>> _ = reshard.save("read", 1, {"w": np.zeros(4)}, on_event=log)
        >>> reader = EventReader("read")
        >>> len(reader.new()), len(reader.new()), reader.n_bad
        (3, 0, 0)
        >>> _ = reshard.save("read", 2, {"w": np.zeros(4)}, on_event=log)
        >>> [event.iteration for event in reader.new()]
        [2, 2, 2]
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.n_bad = 0
        self._root = locate(root)
        self._identity: Hashable = None  # of the file that was read last
        self._offset = 0
        self._rest = b""  # a line without its end
        self._is_new = True

    def new(self) -> list[Event]:
        """The events since the last call; of the first call those of the current file and of the one before.

        Returns:
            The events, oldest first; none if there is no log.

        Raises:
            DamagedFileError: the log is a symbolic link or not a regular file.
            StorageError: the system failed to read it.
        """
        events: list[Event] = []
        path, old = self._root / EVENT_FILE, self._root / OLD_EVENT_FILE
        if self._is_new:
            events += self._read(old)
            self._end_of_file()
        try:
            identity = path.stat().identity
        except CheckpointNotFoundError:
            return events
        self._is_new = False
        if self._identity is not None and identity != self._identity:
            # The file was renamed since: what was added to it before comes first.
            if _identity(old) == self._identity:
                events += self._read(old)
            self._end_of_file()
        events += self._read(path)
        return events

    def _end_of_file(self) -> None:
        self.n_bad += bool(self._rest)
        self._identity, self._offset, self._rest = None, 0, b""

    def _read(self, path: Location) -> list[Event]:
        """The events of the lines that were added to a file, at most the last 16 MiB of it."""
        try:
            found = path.stat()
        except CheckpointNotFoundError:
            return []
        if found.n_bytes < self._offset:  # another program truncated it
            self._offset, self._rest = 0, b""
        begin = max(self._offset, found.n_bytes - 2 * _MAX_FILE_BYTES)
        if begin > self._offset:
            self._rest = b""
        events: list[Event] = []
        try:
            for piece in path.pieces(None, [(begin, found.n_bytes)] if found.n_bytes > begin else []):
                events += self._events(piece)
        except DamagedFileError:
            if path.kind() == "file" or not path.exists():  # it was truncated or renamed meanwhile: later
                return events
            raise
        self._identity, self._offset = found.identity, found.n_bytes
        return events

    def _events(self, data: bytes) -> list[Event]:
        *lines, rest = (self._rest + data).split(b"\n")
        # A line without an end does not grow without a limit.
        self._rest = rest if len(rest) <= _MAX_LINE_BYTES else rest[: _MAX_LINE_BYTES + 1]
        events = []
        for line in lines:
            event = _parse(line) if line else None
            if event is not None:
                events.append(event)
            self.n_bad += event is None and bool(line)
        return events


def _identity(path: Location) -> Hashable:
    try:
        return path.stat().identity
    except ReshardError:
        return None


def _parse(line: bytes) -> Event | None:
    """The event of a line; None if it is none."""
    if len(line) > _MAX_LINE_BYTES:
        return None
    try:
        return Event.from_json(parse_json(line, EVENT_FILE))
    except (DamagedFileError, ArgumentError):
        return None
