"""Who has claimed a checkpoint root: what a process says of itself, and whether another one has ended."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from reshard import _core
from reshard.documents.strict_json import parse_json
from reshard.errors import ClaimedError, DamagedFileError
from reshard.storage import host
from reshard.values.words import show

if TYPE_CHECKING:
    from reshard.storage.location import Location

_MAX_CLAIM_BYTES = 4096


def me() -> dict[str, object]:
    """This process."""
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "boot_id": host.boot_id(),
        "pid_namespace": host.link_target("/proc/self/ns/pid"),
        "pid": pid,
        "started": host.process_start(pid),
        "writer": f"reshard {_core.__version__}",
    }


def read_owner(path: Location) -> dict[str, object] | None:
    """The content of a claim; None if it is truncated or does not exist."""
    try:
        content = parse_json(path.read_small(_MAX_CLAIM_BYTES), str(path))
    except (DamagedFileError, FileNotFoundError):
        return None
    return content if isinstance(content, dict) else None


def is_dead(owner: dict[str, object] | None, is_real_lock: bool) -> bool | None:  # noqa: FBT001
    """Whether the holder of a claim has ended; None: it is not visible on this host."""
    if owner is None:
        # A claim is written under the lock, which this process holds: the writer of this claim has ended.
        return True if is_real_lock else None
    if owner.get("released") is True:
        return True
    mine = me()
    pid = owner.get("pid")
    if owner.get("boot_id") != mine["boot_id"] or owner.get("pid_namespace") != mine["pid_namespace"]:
        return None
    if type(pid) is not int or not 0 < pid < 1 << 31 or not mine["boot_id"] or not mine["pid_namespace"]:
        return None
    if pid == mine["pid"]:
        return True  # has our pid but is not held: its creation failed, or an earlier process had the same pid
    started = host.process_start(pid)
    if started is None:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return None  # the process of another user, and hidden
        return True  # it has ended, and its parent has not waited for it yet
    return started != owner.get("started")


def describe(owner: dict[str, object] | None) -> str:
    """The holder of a claim, for messages."""
    if owner is None or "pid" not in owner:
        return "another process"
    return f"process {show(str(owner.get('pid')))} on host {show(str(owner.get('host')))}"


def claimed(root: Location, owner: dict[str, object] | None) -> ClaimedError:
    """The error for a root that another process has claimed, which is alive."""
    return ClaimedError(
        f"{show(str(root))} is claimed by {describe(owner)}, which is alive",
        path=str(root),
        hint="end that job or give this one another root; `commit=Commit(takeover=True)` takes the root from it, and "
        "its saves then fail",
    )
