"""Ports for servers that bind them themselves, later."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_FIRST = 25_000  # Ray gives those below to its workers


def unused_port() -> int:
    """A port that nobody uses, and that the system gives to no connection and to no server that asks for any port."""
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(100):
        port = random.SystemRandom().randrange(_FIRST, end)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise OSError(f"no port from {_FIRST} to {end} is free")
