"""Reading and extending the log of a checkpoint root in an object store; `log_records` says what is in it.

Only one operation of the store decides anything: to create an object that must not exist, of which one writer succeeds.
After any answer but success the object is read: it is ours, it is another's, or it is not there and is created again. A
lost answer therefore looks neither like a success nor like a lost race.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from reshard._core import PutNew
from reshard.commit import filesystem, log_records
from reshard.commit.log_records import LOG_FOLDER, Kind, Record, number_of, record_name
from reshard.errors import CheckpointNotFoundError, ReshardError, StorageError, UnsupportedError
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reshard.storage.location import Location

CLOCK_FILE = "clock"  # written to learn the time of the store
PROBE_FOLDER = ".probe"

_MAX_RECORD_BYTES = 64 << 20
_WHOLE_RECORDS = 1000  # older ones are replaced with stubs: their numbers stay taken
_MAX_REBASES = 1000
_RETRY_SECONDS = 60.0
_FIRST_WAIT, _LAST_WAIT = 0.05, 5.0
_PROBE_ROUNDS, _PROBE_WRITERS = 3, 8

_log = logging.getLogger("reshard")


class UnknownOutcomeError(StorageError):
    """It is not known whether a record was created."""


def head_of(root: Location) -> Record | None:
    """The newest record of a root, by two small requests; None: the root is no log.

    Raises:
        DamagedFileError: the record is damaged.
        StorageError: the store failed.
    """
    store = root.objects
    if store is None:
        return None
    folder = str(root / LOG_FOLDER)
    listed = store.below(folder, max_keys=1)
    if listed and number_of(listed[0][0]) is None:  # a file of another program
        listed = [one for one in store.below(folder) if number_of(one[0]) is not None]
    if not listed:
        return None
    n = number_of(listed[0][0])
    assert n is not None
    return read(root, n)


def read(root: Location, n: int) -> Record | None:
    """A record; None: it is a stub.

    Raises:
        CheckpointNotFoundError: there is none of this number.
        DamagedFileError: it is damaged.
        StorageError: the store failed.
    """
    store = root.objects
    assert store is not None
    path = str(root / LOG_FOLDER / record_name(n))
    return log_records.decode(store.read_object(path, _MAX_RECORD_BYTES), path, n)


def parents(root: Location) -> Iterator[tuple[str, str | None]]:
    """The digest of each save that was published, and that of the save that it went on from, newest first.

    That is the one that the tracker named then. After a run went back it is the newest one below the save that the run
    had not skipped. None: there is none. Records are read as they are asked for, down to those that are stubs by now.

    Raises:
        DamagedFileError, StorageError: as `read`.
    """
    later = head_of(root)
    while later is not None and later.n > 1:
        try:
            earlier = read(root, later.n - 1)
        except CheckpointNotFoundError:  # something else removes old records
            return
        if earlier is None:
            return
        yield from log_records.went_on_from(earlier, later)
        later = earlier


def append(root: Location, head: Record | None, kind: Kind, change: Callable[[Record], Record | None]) -> Record:
    """Append a record to whatever is the newest one then.

    Args:
        root: the checkpoint root.
        head: the newest record that is known.
        kind: what is done.
        change: makes the record of the one after the newest; None: nothing is left to do. What it raises is raised.

    Returns:
        The record that was appended, or the newest one if nothing was left to do.

    Raises:
        UnknownOutcomeError: it may have been appended.
        StorageError: the store failed, and nothing was appended.
    """
    for _ in range(_MAX_REBASES):
        made = change(next_record(head, kind))
        if made is None:
            assert head is not None
            return head
        if create(root, made):
            return made
        head = read(root, made.n)
        if head is None:  # more than a thousand records later
            raise _unknown(root, made, None)
    raise StorageError(
        f"{show(str(root))}: other processes appended {_MAX_REBASES} records meanwhile",
        path=str(root),
        errno=errno.EBUSY,
    )


def next_record(head: Record | None, kind: Kind) -> Record:
    """The record after `head`, with its state and an id of its own."""
    at = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return log_records.following(head, kind, os.urandom(16).hex(), at)


def create(root: Location, record: Record) -> bool:
    """Create a record. Returns whether it was: another process may have created one of its number.

    Raises:
        UnknownOutcomeError: it may have been created.
        StorageError: the store refused it, and nothing was created.
    """
    store = root.objects
    assert store is not None
    path, data = root / LOG_FOLDER / record_name(record.n), log_records.encode(record)
    filesystem.announce(f"append record {record.n}: {record.kind}")
    deadline, wait_s, reason = time.monotonic() + _RETRY_SECONDS, _FIRST_WAIT, None
    may_be_there = False
    while True:
        try:
            outcome, reason = store.put_new(str(path), data)
        except StorageError as error:
            if may_be_there:
                raise _unknown(root, record, error) from error
            raise
        if outcome is PutNew.CREATED:
            break
        may_be_there = True
        try:
            found = store.read_object(str(path), _MAX_RECORD_BYTES)
        except CheckpointNotFoundError:
            pass  # not there: created again
        except ReshardError as error:
            reason = error
        else:
            if found != data:
                return False
            break
        if time.monotonic() > deadline:
            raise _unknown(root, record, reason)
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, _LAST_WAIT)
    if record.n > _WHOLE_RECORDS:
        with contextlib.suppress(ReshardError):
            old = root / LOG_FOLDER / record_name(record.n - _WHOLE_RECORDS)
            store.replace(str(old), log_records.stub(), durable=True)
    return True


def _unknown(root: Location, record: Record, reason: Exception | None) -> UnknownOutcomeError:
    why = "" if reason is None else f": {reason.message if isinstance(reason, ReshardError) else reason}"
    return UnknownOutcomeError(
        f"it is not known whether record {record.n} ({record.kind}) of {show(str(root))} was created{why}",
        path=str(root),
        errno=errno.EIO,
        hint="the next save finds out, and so does `reshard explain`: either the whole change counts or nothing of it",
    )


def now_ns(root: Location) -> int:
    """The time by the clock of the store. Raises StorageError."""
    path = root / CLOCK_FILE
    path.store.replace(path.path, b"", durable=True)
    found = path.store.touched_ns(path.path)
    assert found is not None
    return found


def remove_below(root: Location, name: str, first: str) -> None:
    """Remove all objects in a folder of a root, one of them before the others.

    Args:
        root: the checkpoint root.
        name: the folder.
        first: the file without which the others count for nothing.

    Raises:
        StorageError: the store failed; a part may be left.
    """
    store = root.objects
    assert store is not None
    names = [one for one, _ in store.below(str(root / name))]
    filesystem.announce(f"remove {name}")
    if first in names:
        store.remove_files([str(root / name / first)])
    store.remove_files([str(root / name / one) for one in names if one != first])


def probe(root: Location) -> None:
    """Refuse a store in which an object can be created twice: several writers race for new objects.

    Raises:
        UnsupportedError: not exactly one of them won.
        StorageError: the store failed.
    """
    store = root.objects
    assert store is not None
    for _ in range(_PROBE_ROUNDS):
        path = str(root / PROBE_FOLDER / os.urandom(16).hex())
        filesystem.announce("probe")
        try:
            with ThreadPoolExecutor(_PROBE_WRITERS) as pool:
                writers = [pool.submit(store.put_new, path, b"%d" % n) for n in range(_PROBE_WRITERS)]
            outcomes = [writer.result()[0] for writer in writers]
        finally:  # also after an interrupt
            store.remove_files([path])
        n_won = outcomes.count(PutNew.CREATED)
        # With lost answers the winner is not known, but there is at most one.
        is_right = n_won == 1 or (n_won == 0 and PutNew.UNKNOWN in outcomes)
        if not is_right:
            raise UnsupportedError(
                f"{show(str(root))}: of {_PROBE_WRITERS} writers that created one new object at once, {n_won} were "
                "told that they had; a commit needs a store that lets exactly one win (PUT with `If-None-Match: *`)",
                path=str(root),
                hint="use another service or a newer release of this one, or save into a folder and copy it",
            )
