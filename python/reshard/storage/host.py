"""Facts of the host and of this process: what identifies the host, and its standard streams."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import TextIO


@functools.cache
def boot_id() -> str:
    """A number that differs between hosts and changes when a host starts; empty where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def open_standard_streams() -> None:
    """Connect standard streams that the process was started without to the null device.

    Without this, the next file that is opened gets the number of the closed stream, and what a library prints is
    written into that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  until the process ends


def disconnect(stream: TextIO) -> None:
    """Connect a standard stream that cannot be written to the null device.

    Without this, Python writes what is left in the buffer when the process ends, and that fails once more.
    """
    with contextlib.suppress(OSError):  # also that of a stream without a number, as in tests
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, stream.fileno())
        finally:
            os.close(null)


def process_start(pid: int) -> int | None:
    """When a process started, in ticks since the boot; None if it is not visible or has ended."""
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name in brackets may hold any characters; the fields follow the last bracket.
    fields = line.rpartition(b")")[2].split()
    if len(fields) < 20 or fields[0] in (b"Z", b"X"):
        return None
    return int(fields[19])


def link_target(path: str) -> str:
    """Where a symbolic link of the system leads; empty where it cannot be read."""
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""
