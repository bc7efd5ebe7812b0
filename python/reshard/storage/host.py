"""What identifies this host: its name alone may be that of every container."""

from __future__ import annotations

import functools
from pathlib import Path

__all__ = ["boot_id"]


@functools.cache
def boot_id() -> str:
    """A number that differs between hosts and changes when a host starts; empty where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
