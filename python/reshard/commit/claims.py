"""Claims, by which one process at a time may write into a checkpoint root, and the lock that it holds while writing.

A claim is a file `.writers/epoch_<n>`, created exclusively. `n`, its generation, is one more than the highest existing
one (a fencing token). The file records its holder, which touches it every few seconds. A process claims a root once,
keeps the claim until it ends, and checks before each change that its claim is still the highest. A process that was
paused, declared dead and replaced fails at this check. In an object store a claim is a record of the log instead, see
`log_claims`.

Another claim is dead if its process has ended (on the same boot and pid namespace; the start time detects a reused
pid), or if it was not touched while it was watched for 30 s. Clocks of different machines are never compared. The lock
`.lock` excludes other processes during a change. In a store whose locks are local or missing, only the claims exclude
them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from reshard.commit import filesystem, log_claims, owners, process_end
from reshard.commit.session import Claim, find_session, session_of, sessions
from reshard.errors import ClaimedError, ReshardError, StorageError
from reshard.storage.store import LockHeldError
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reshard.commit.session import RootSession
    from reshard.storage.location import Location
    from reshard.storage.store import HeldFile

LOCK_FILE = ".lock"
WRITERS_FOLDER = ".writers"

_BEAT_SECONDS = 5.0
_WATCH_SECONDS = 30.0
_RELEASE_SECONDS = 4.0  # of a claim in a bucket: without it others watch the claim for longer
_NOT_RELEASED = (
    "the claim on %s is not released yet: the service does not answer. The next process that writes there sees that "
    "this one has ended, which takes longer on another host"
)
_LOCK_SECONDS = 60.0  # publication takes milliseconds; a recovery that checks large headers takes seconds
_CLAIM_FILE = re.compile("epoch_([0-9]{1,18})")
_log = logging.getLogger("reshard")


# -- the lock


@contextlib.contextmanager
def locked(root: Location) -> Iterator[bool]:
    """Hold the lock of an existing root; waits for at most a minute.

    Yields:
        Whether the store has locks.

    Raises:
        StorageError: another process held it for the whole time, or the system failed.
    """
    try:
        lock = (root / LOCK_FILE).lock(seconds=_LOCK_SECONDS, make=True)
    except LockHeldError as error:
        error.hint = "a process that was stopped in the middle of a change may hold it: end it, or let it continue"
        raise
    with lock:
        if lock.errno is not None:
            _log.warning("%s: the store has no locks (%s); claims alone separate writers", root, lock.reason)
        yield lock.is_real


# -- claims


def hold(root: Location, *, takeover: bool = False, durable: bool = True, folder_mode: int = 0o777) -> Claim:
    """Return the claim of this process on a root; creates it if there is none.

    Args:
        root: an existing folder.
        takeover: replace other claims, even if they are alive.
        durable: sync the created files and folders.
        folder_mode: permission bits of `.writers`, less the umask.

    Raises:
        ClaimedError: another process has a live claim, or has replaced the claim of this process.
        StorageError: the system failed, or the lock was not free in time.
    """
    session = session_of(root)
    with session.claiming:  # of this root only: a bucket that does not answer stops no save on a disk
        if session.claim is not None:
            try:
                check(session.claim)
            except ClaimedError:
                if not takeover:
                    raise
                _drop(session)
            else:
                return session.claim
        for other in sessions():
            if other is not session and other.root == root and other.claim is not None:
                _log.warning(
                    "%s is not the folder that this process has claimed: that one was removed or renamed, or a file "
                    "system was mounted or unmounted there. Saves go into the new folder",
                    root,
                )
                _drop(other)
        if root.objects is not None:
            session.claim = _started(root, *log_claims.make(root, takeover=takeover), log_claims.BEAT_SECONDS)
            return session.claim
        session.claim = _claim(root, takeover=takeover, durable=durable, folder_mode=folder_mode)
        return session.claim


def held(root: Location) -> Claim | None:
    """The claim that this process has on a root, if it has one. Raises CheckpointNotFoundError, StorageError."""
    return session_of(root).claim


def is_alive(root: Location, generation: int) -> bool | None:
    """Whether the process with a claim of this generation still writes; None: it runs on a host that is not visible.

    Raises:
        StorageError: the system failed.
    """
    if root.objects is not None:
        return log_claims.is_alive(root, generation)
    writers = root / WRITERS_FOLDER
    generations = _generations(writers)
    if not generations or generations[-1] != generation:
        return False  # released, or replaced by a later claim
    owner = owners.read_owner(_file(writers, generation))
    if owner is not None and owner.get("pid") == os.getpid() and held(root) is not None:
        return True
    is_dead = owners.is_dead(owner, is_real_lock=False)
    return None if is_dead is None else not is_dead


def check(claim: Claim) -> None:
    """Check that a claim is still the highest: that no other process has replaced it.

    Raises:
        ClaimedError: another process has replaced it, or the claim was removed.
        StorageError: the system failed.
    """
    if claim.root.objects is not None:
        log_claims.check(claim)
        return
    writers = claim.root / WRITERS_FOLDER
    generations = _generations(writers)
    path = _file(writers, claim.generation)
    if generations and generations[-1] > claim.generation:
        who = owners.describe(owners.read_owner(_file(writers, generations[-1])))
        raise ClaimedError(
            f"{show(str(claim.root))} was taken over by {who}, which made claim {generations[-1]}; ours is "
            f"{claim.generation}",
            path=str(claim.root),
            hint="two jobs write into one root; stop one, or give them different roots",
        )
    if not claim.file.is_current():
        raise ClaimedError(
            f"the claim {show(str(path))} of this process was removed",
            path=str(claim.root),
            hint="start the program again; `commit=Commit(takeover=True)` claims the root again",
        )


def living_claim(root: Location) -> ClaimedError | None:
    """The error for a root that another living process of this machine has claimed; None: there is no such process."""
    try:
        if not root.is_folder() or held(root) is not None:
            return None
        if root.objects is not None:
            return log_claims.living_claim(root)
        writers = root / WRITERS_FOLDER
        found = [owners.read_owner(_file(writers, one)) for one in _generations(writers)]
    except (OSError, ReshardError):
        return None  # other errors are reported when the root is claimed
    return next((owners.claimed(root, one) for one in found if owners.is_dead(one, is_real_lock=True) is False), None)


def release(root: Location | None = None) -> None:
    """Release the claim on a root, or all claims of this process, so that others can claim it. Never raises."""
    asked = sessions() if root is None else [find_session(root)]
    for session in asked:
        if session is None:
            continue
        is_local = session.root.objects is None
        # A service that does not answer holds nobody up; its requests are repeated for a minute.
        end = time.monotonic() + _RELEASE_SECONDS
        if not session.claiming.acquire(timeout=-1 if is_local else _RELEASE_SECONDS):
            _log.warning(_NOT_RELEASED, session.root)
            continue
        try:
            if session.claim is not None:
                if is_local:
                    _say_released(session.claim)
                else:
                    session.claim.at_end.append(partial(_say_released, session.claim))
                _drop(session, max(0.0, end - time.monotonic()))
        finally:
            session.claiming.release()


def _say_released(claim: Claim) -> None:
    with contextlib.suppress(OSError, ReshardError):
        check(claim)
        # The generation stays in use: no later claim gets it, so that a late writer detects that it was replaced.
        claim.file.write(b'{"released":true}')


def _drop(session: RootSession, seconds: float | None = None) -> None:
    """Forget a claim. Of one in a bucket, wait so long until its thread has ended, which says that it is released."""
    claim, session.claim = session.claim, None
    if claim is None:
        return
    claim.stop.set()
    if session.root.objects is None:
        claim.beat.join()  # before the close: the heartbeat must not touch another file with a reused file descriptor
        claim.file.close()
        return
    claim.beat.join(_RELEASE_SECONDS if seconds is None else seconds)
    if claim.beat.is_alive() and claim.at_end:
        _log.warning(_NOT_RELEASED, session.root)


# Registered at import, so that exit functions that are registered later, such as the wait for saves, run before it.
process_end.call_at_end(release, process_end.CLAIMS)


def _claim(root: Location, *, takeover: bool, durable: bool, folder_mode: int) -> Claim:
    writers = root / WRITERS_FOLDER
    filesystem.make_folder(writers, folder_mode, durable=durable)
    quiet: dict[int, int] = {}  # claims that were watched, and their heartbeat then
    while True:
        with locked(root) as is_real:
            unknown: dict[int, int] = {}
            for generation in [] if takeover else _generations(writers):
                path = _file(writers, generation)
                beat = _beat(path)
                owner = owners.read_owner(path)
                is_dead = True if beat is None or beat == quiet.get(generation) else owners.is_dead(owner, is_real)
                if is_dead is None:
                    assert beat is not None
                    unknown[generation] = beat
                elif not is_dead:
                    raise owners.claimed(root, owner)
            if not unknown:
                made = _make(root, writers, durable=durable)
                if made is not None:
                    return made
        # Outside the lock, which other processes may need meanwhile.
        quiet |= _watch(root, writers, unknown)


def _make(root: Location, writers: Location, *, durable: bool) -> Claim | None:
    """Create a claim; None if another process created one first, which is then checked."""
    dead = _generations(writers)
    generation = dead[-1] + 1 if dead else 1
    path = _file(writers, generation)
    try:
        filesystem.make_file(path, json.dumps(owners.me()).encode(), durable=durable)
    except FileExistsError:
        return None
    file = path.store.hold(path.path)
    for old in dead:  # only now, so that the highest generation exists at every time
        with contextlib.suppress(StorageError):
            filesystem.remove_file(_file(writers, old))
    return _started(root, generation, file, _BEAT_SECONDS)


def _started(root: Location, generation: int, file: HeldFile, seconds: float) -> Claim:
    """A claim whose heartbeat has begun."""
    process_end.call_at_end(release, process_end.CLAIMS)  # once more: this may be a forked worker
    stop = threading.Event()
    at_end: list[Callable[[], object]] = []
    beat = threading.Thread(target=_touch, args=(file, stop, seconds, at_end), name="reshard-claim", daemon=True)
    beat.start()
    return Claim(root, generation, file, stop, beat, at_end)


def _touch(file: HeldFile, stop: threading.Event, seconds: float, at_end: list[Callable[[], object]]) -> None:
    while not stop.wait(seconds):
        with contextlib.suppress(Exception):  # of any kind: the claim must not look dead
            file.beat()
    for act in at_end:
        act()


def _watch(root: Location, writers: Location, beats: dict[int, int]) -> dict[int, int]:
    """Watch claims whose process is not visible on this host.

    Args:
        root: the checkpoint root.
        writers: the folder of the claims.
        beats: the heartbeat of each claim, by generation.

    Returns:
        The same claims and heartbeats, once none of them has changed for the whole time.

    Raises:
        ClaimedError: one was touched.
    """
    if beats:
        who = owners.describe(owners.read_owner(_file(writers, max(beats))))
        _log.warning("%s was claimed by %s: waiting %g s to see whether it is alive", root, who, _WATCH_SECONDS)
    deadline = time.monotonic() + _WATCH_SECONDS
    while beats and time.monotonic() < deadline:
        time.sleep(min(0.25, _WATCH_SECONDS / 10))
        for generation, beat in beats.items():
            now = _beat(_file(writers, generation))
            if now is not None and now != beat:
                raise owners.claimed(root, owners.read_owner(_file(writers, generation)))
    return beats


def _file(writers: Location, generation: int) -> Location:
    return writers / f"epoch_{generation}"


def _generations(writers: Location) -> list[int]:
    """The generations of all claims, ascending."""
    return sorted([int(match[1]) for name in filesystem.names(writers) if (match := _CLAIM_FILE.fullmatch(name))])


def _beat(path: Location) -> int | None:
    """When a claim was last touched, by the clock of its store; None if it does not exist."""
    return path.store.touched_ns(path.path)
