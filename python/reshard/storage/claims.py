"""Who may write into a checkpoint root: one process at a time, by a claim; and the lock under which it does so.

A claim is a file `.writers/epoch_<n>`, made with O_EXCL, n one more than the highest there is. It says who holds it,
and its holder touches it every few seconds. A process claims a root once, keeps the claim until it ends, and looks
before each change whether its claim is still the highest: whoever was paused, declared dead and overtaken stops there.

Another claim is dead if its process is gone (same boot, same pid namespace: the start time tells a pid that was used
again), or if it was not touched while it was watched for 30 s. Clocks of different machines are never compared. The
lock `.lock` keeps processes that can see it apart for the moment of a change; on a file system whose locks are only
local or none at all, the claims alone do.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from reshard import _core
from reshard.errors import ClaimedError, DamagedFileError, ReshardError, StorageError
from reshard.storage import filesystem
from reshard.storage.small_files import close_read, read_small_file
from reshard.strict_json import parse_json
from reshard.words import show
from reshard.write import process_end

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "LOCK_FILE",
    "WRITERS_FOLDER",
    "Claim",
    "check",
    "held",
    "hold",
    "is_alive",
    "living_claim",
    "locked",
    "release",
]

LOCK_FILE = ".lock"
WRITERS_FOLDER = ".writers"

_BEAT_SECONDS = 5.0
_WATCH_SECONDS = 30.0
_LOCK_SECONDS = 60.0  # publication takes milliseconds; a recovery with large headers to check, seconds
_MAX_CLAIM_BYTES = 4096
_EPOCH = re.compile("epoch_([0-9]{1,18})")
_log = logging.getLogger("reshard")


@dataclass(frozen=True)
class Claim:
    """A claim that this process holds.

    Attributes:
        root: the checkpoint root.
        epoch: its number; no other claim of this root has it.
        handle: the open claim file: its times are the heartbeat, its inode tells it from a later file of that name.
        stop: ends the heartbeat.
        beat: the thread that touches it.
    """

    root: Path
    epoch: int
    handle: int = field(repr=False)
    stop: threading.Event = field(repr=False)
    beat: threading.Thread = field(repr=False)


_held: dict[tuple[int, int], Claim] = {}
_held_lock = threading.Lock()


# -- the lock


@contextlib.contextmanager
def locked(root: Path) -> Iterator[bool]:
    """Hold the lock of a root, which must exist; waits for at most a minute.

    Yields:
        Whether the file system has locks at all.

    Raises:
        StorageError: somebody else held it all the time, or the system failed.
    """
    path = root / LOCK_FILE
    with filesystem.failing("opening", path):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    try:
        is_real = _lock(handle, path)
        try:
            yield is_real
        finally:
            # Said, not left to the close: a child that was forked meanwhile has the handle open too.
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)
    finally:
        close_read(handle)


def _lock(handle: int, path: Path) -> bool:
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise StorageError(
                    f"{show(str(path))} was held by another process for {_LOCK_SECONDS:g} s",
                    path=str(path),
                    errno=errno.EWOULDBLOCK,
                    hint="a process that was stopped in the middle of a change may hold it: end it, or let it go on",
                ) from None
            time.sleep(0.02)
        except OSError as error:
            _log.warning("%s: the file system has no locks (%s); claims alone keep writers apart", path, error.strerror)
            return False
        else:
            return True


# -- claims


def hold(root: Path, *, takeover: bool = False, durable: bool = True, folder_mode: int = 0o777) -> Claim:
    """The claim of this process on a root: the one that it has, or a new one.

    Args:
        root: a folder that exists.
        takeover: overtake other claims, whether they are alive or not.
        durable: sync what is made.
        folder_mode: permission bits of `.writers`, less the umask.

    Raises:
        ClaimedError: another process has a live claim, or has overtaken ours.
        StorageError: the system failed, or the lock was not free in time.
    """
    with filesystem.failing("looking at", root):
        found = root.stat()
    key = (found.st_dev, found.st_ino)
    with _held_lock:
        claim = _held.get(key)
        if claim is not None:
            try:
                check(claim)
            except ClaimedError:
                if not takeover:
                    raise
                _drop(claim)
                del _held[key]
            else:
                return claim
        claim = _held[key] = _claim(root, takeover=takeover, durable=durable, folder_mode=folder_mode)
        return claim


def held(root: Path) -> Claim | None:
    """The claim that this process has on a root, if it has one. Raises StorageError."""
    with filesystem.failing("looking at", root):
        found = root.stat()
    return _held.get((found.st_dev, found.st_ino))


def is_alive(root: Path, epoch: int) -> bool | None:
    """Whether the process with a claim of this number still writes; None: it runs where it cannot be seen from here.

    Raises:
        StorageError: the system failed.
    """
    writers = root / WRITERS_FOLDER
    epochs = _epochs(writers)
    if not epochs or epochs[-1] != epoch:
        return False  # released, or overtaken by a later claim
    owner = _owner(writers / f"epoch_{epoch}")
    if owner is not None and owner.get("pid") == os.getpid() and held(root) is not None:
        return True
    is_dead = _is_dead(owner, is_real_lock=False)
    return None if is_dead is None else not is_dead


def check(claim: Claim) -> None:
    """Check that a claim is still the highest: that nobody has overtaken this process.

    Raises:
        ClaimedError: somebody has, or the claim was removed.
        StorageError: the system failed.
    """
    writers = claim.root / WRITERS_FOLDER
    epochs = _epochs(writers)
    path = writers / f"epoch_{claim.epoch}"
    if epochs and epochs[-1] > claim.epoch:
        who = _describe(_owner(writers / f"epoch_{epochs[-1]}"))
        raise ClaimedError(
            f"{show(str(claim.root))} was taken over by {who}, which made claim {epochs[-1]}; ours is {claim.epoch}",
            path=str(claim.root),
            hint="two jobs write into one root; stop one, or give them different roots",
        )
    with filesystem.failing("looking at", path):
        try:
            is_ours = os.path.samestat(path.lstat(), os.fstat(claim.handle))
        except FileNotFoundError:
            is_ours = False
    if not is_ours:
        raise ClaimedError(
            f"the claim {show(str(path))} of this process was removed",
            path=str(claim.root),
            hint="start the program again; `takeover=True` claims the root again",
        )


def living_claim(root: Path) -> ClaimedError | None:
    """The error for a root that another process of this machine has claimed and is alive; None: none is seen."""
    try:
        if not root.is_dir() or held(root) is not None:
            return None
        owners = [_owner(root / WRITERS_FOLDER / f"epoch_{epoch}") for epoch in _epochs(root / WRITERS_FOLDER)]
    except (OSError, ReshardError):
        return None  # what cannot be looked at is reported where it is claimed
    return next((_claimed(root, one) for one in owners if _is_dead(one, is_real_lock=True) is False), None)


def release(root: Path | None = None) -> None:
    """Give back the claim on a root, or all of this process; another process may then claim at once. Never raises."""
    with _held_lock:
        for key, claim in list(_held.items()):
            if root is None or _is_same(root, key):
                with contextlib.suppress(OSError, ReshardError):
                    check(claim)
                    # The number stays taken: no later claim has it, so that a late writer finds itself overtaken.
                    os.truncate(claim.handle, 0)
                    os.pwrite(claim.handle, b'{"released":true}', 0)
                _drop(claim)
                del _held[key]


def _is_same(root: Path, key: tuple[int, int]) -> bool:
    try:
        found = root.stat()
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == key


def _drop(claim: Claim) -> None:
    claim.stop.set()
    claim.beat.join()  # before the close: its handle must not touch a file that takes the number over
    close_read(claim.handle)


def _forget() -> None:
    """In a forked child: the parent's claims are not ours, and its heartbeat does not run here."""
    global _held_lock  # noqa: PLW0603  the parent may have held it at the fork
    _held_lock = threading.Lock()
    for claim in _held.values():
        with contextlib.suppress(OSError):
            close_read(claim.handle)
    _held.clear()


os.register_at_fork(after_in_child=_forget)
# At import, so that what is registered later, the wait for pending saves for one, runs before it.
process_end.call_at_end(release, process_end.CLAIMS)


def _claim(root: Path, *, takeover: bool, durable: bool, folder_mode: int) -> Claim:
    writers = root / WRITERS_FOLDER
    filesystem.make_folder(writers, folder_mode, durable=durable)
    quiet: dict[str, int] = {}  # claims that were watched, and their heartbeat then
    while True:
        with locked(root) as is_real:
            unknown: dict[str, int] = {}
            for epoch in [] if takeover else _epochs(writers):
                path = writers / f"epoch_{epoch}"
                beat = _beat(path)
                owner = _owner(path)
                is_dead = True if beat is None or beat == quiet.get(path.name) else _is_dead(owner, is_real)
                if is_dead is None:
                    assert beat is not None
                    unknown[path.name] = beat
                elif not is_dead:
                    raise _claimed(root, owner)
            if not unknown:
                made = _make(root, writers, durable=durable)
                if made is not None:
                    return made
        # Outside the lock, which others may need meanwhile.
        quiet |= _watch(root, writers, unknown)


def _make(root: Path, writers: Path, *, durable: bool) -> Claim | None:
    """A new claim; None if somebody was faster, who is then to be looked at."""
    dead = _epochs(writers)
    epoch = dead[-1] + 1 if dead else 1
    path = writers / f"epoch_{epoch}"
    try:
        filesystem.make_file(path, json.dumps(_me()).encode(), durable=durable)
    except FileExistsError:
        return None
    with filesystem.failing("opening", path):
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    for old in dead:  # only now: at every moment the highest number is there
        with contextlib.suppress(StorageError):
            filesystem.remove_file(writers / f"epoch_{old}")
    process_end.call_at_end(release, process_end.CLAIMS)  # once more: this may be a forked worker
    stop = threading.Event()
    beat = threading.Thread(target=_touch, args=(handle, stop), name="reshard-claim", daemon=True)
    beat.start()
    return Claim(root, epoch, handle, stop, beat)


def _touch(handle: int, stop: threading.Event) -> None:
    while not stop.wait(_BEAT_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(handle)


def _watch(root: Path, writers: Path, beats: dict[str, int]) -> dict[str, int]:
    """Watch claims whose process cannot be seen.

    Returns:
        The same claims and heartbeats, once none of them has changed for the whole time.

    Raises:
        ClaimedError: one was touched.
    """
    if beats:
        _log.warning("%s: watching %d other claims for %g s", root, len(beats), _WATCH_SECONDS)
    deadline = time.monotonic() + _WATCH_SECONDS
    while beats and time.monotonic() < deadline:
        time.sleep(min(0.25, _WATCH_SECONDS / 10))
        for name, beat in beats.items():
            now = _beat(writers / name)
            if now is not None and now != beat:
                raise _claimed(root, _owner(writers / name))
    return beats


def _epochs(writers: Path) -> list[int]:
    """The numbers of all claims, ascending."""
    return sorted(int(match[1]) for name in filesystem.names(writers) if (match := _EPOCH.fullmatch(name)))


def _beat(path: Path) -> int | None:
    """When a claim was last touched, by the clock of its file system; None if it is gone."""
    with filesystem.failing("opening", path):
        try:
            # By an open: on a network one asks the server, a mere stat may answer what it was a minute ago.
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        try:
            return os.fstat(handle).st_mtime_ns
        finally:
            close_read(handle)


# -- who


def _me() -> dict[str, object]:
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "boot_id": _first_line("/proc/sys/kernel/random/boot_id"),
        "pid_namespace": _link("/proc/self/ns/pid"),
        "pid": pid,
        "started": _started(pid),
        "writer": f"reshard {_core.__version__}",
    }


def _owner(path: Path) -> dict[str, object] | None:
    """What a claim says; None if it is torn or gone."""
    try:
        content = parse_json(read_small_file(path, _MAX_CLAIM_BYTES), str(path))
    except (DamagedFileError, FileNotFoundError):
        return None
    return content if isinstance(content, dict) else None


def _is_dead(owner: dict[str, object] | None, is_real_lock: bool) -> bool | None:  # noqa: FBT001
    """Whether the holder of a claim is gone; None: it cannot be seen from here."""
    if owner is None:
        # A claim is written under the lock, which we hold: whoever was writing this one is gone.
        return True if is_real_lock else None
    if owner.get("released") is True:
        return True
    me = _me()
    pid = owner.get("pid")
    if owner.get("boot_id") != me["boot_id"] or owner.get("pid_namespace") != me["pid_namespace"]:
        return None
    if type(pid) is not int or not 0 < pid < 1 << 31 or not me["boot_id"] or not me["pid_namespace"]:
        return None
    if pid == me["pid"]:
        return True  # ours, and not held: its making failed, or an earlier process had our number
    started = _started(pid)
    if started is None:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return None  # it is somebody else's, and hidden
        return True  # it has ended, and its parent has not looked yet
    return started != owner.get("started")


def _started(pid: int) -> int | None:
    """When a process started, in ticks since the boot; None if it cannot be seen or has ended."""
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name in brackets may hold anything; what follows the last bracket is plain.
    fields = line.rpartition(b")")[2].split()
    if len(fields) < 20 or fields[0] in (b"Z", b"X"):
        return None
    return int(fields[19])


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""


def _describe(owner: dict[str, object] | None) -> str:
    if owner is None or "pid" not in owner:
        return "another process"
    return f"process {show(str(owner.get('pid')))} on host {show(str(owner.get('host')))}"


def _claimed(root: Path, owner: dict[str, object] | None) -> ClaimedError:
    return ClaimedError(
        f"{show(str(root))} is claimed by {_describe(owner)}, which is alive",
        path=str(root),
        hint="end that job or give this one another root; `takeover=True` overtakes it: its saves fail from then on",
    )
