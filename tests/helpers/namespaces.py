"""Namespaces of one's own: mounts, networks and processes of which nothing remains, whatever happens in a test.

An ordinary user has them in a user namespace. Where neither is permitted tests are skipped, unless `RESHARD_MUST_MOUNT`
is set, as CI does: there they fail.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.helpers.small_saves import fork

if TYPE_CHECKING:
    from collections.abc import Callable

LIBC = ctypes.CDLL(None, use_errno=True)
NEWNS, NEWUTS, NEWUSER, NEWPID, NEWNET = 0x00020000, 0x04000000, 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 1 << 12, 1 << 14, 1 << 18


def checked(result: int) -> None:
    """Raise the error of a call of the C library."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def own_mounts() -> None:
    """Mounts of this process are nobody else's from here on. Raises PermissionError."""
    uid, gid = os.getuid(), os.getgid()
    try:
        checked(LIBC.unshare(NEWNS))
    except PermissionError:
        checked(LIBC.unshare(NEWNS | NEWUSER))
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    checked(LIBC.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))


def in_namespaces(act: Callable[[], Any], seconds: float = 120) -> Any:
    """What `act` returns in a forked process that may mount and do all else that `own_mounts` permits."""

    def run() -> list[Any]:
        try:
            own_mounts()
        except PermissionError as error:
            return [str(error), None]
        return [None, act()]

    refusal, result = fork(run).result(seconds)
    if refusal is not None:
        refuse(f"namespaces are not permitted here: {refusal}")
    return result


def refuse(why: str) -> None:
    """Skip the test, or fail it where it must run."""
    assert not os.environ.get("RESHARD_MUST_MOUNT"), why
    pytest.skip(why)
