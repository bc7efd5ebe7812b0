"""Ctrl-C in a process that works, and what it costs until it is over."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess

_PATIENCE_S = 600


def interrupt(process: subprocess.Popen[bytes]) -> float:
    """Press Ctrl-C; the seconds of processor that the process takes from then on.

    What else runs on the machine does not count, and a late look at the begin makes them fewer.
    """
    process.send_signal(signal.SIGINT)
    begun, deadline = _processor_s(process.pid), time.monotonic() + _PATIENCE_S
    try:
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            assert time.monotonic() < deadline, "it does not end"
            time.sleep(0.01)
        seconds = _processor_s(process.pid) - begun
    finally:
        process.kill()
    _, errors = process.communicate()
    assert process.returncode in (-signal.SIGINT, 130), errors.decode()
    assert b"KeyboardInterrupt" in errors
    return seconds


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
