"""What holds for every test process."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

# A job that a shell starts in the background ignores Ctrl-C, and so would the processes that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before torch is imported: tests fork ranks off this process, which wait for ever for the threads of a pool that only
# their parent has, once it has one.
os.environ["OMP_NUM_THREADS"] = "1"

# Fast tests write to memory: they sync thousands of files, which takes minutes on a busy disk. The /dev/shm of 64 MiB
# that containers have by default is too small.
_MEMORY = Path("/dev/shm")
if _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free >= 8 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The folder of a test: in memory, but on the disk for tests that are marked `slow` or `disk`."""
    if not any(request.node.get_closest_marker(name) for name in ("slow", "disk")):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield Path(folder)
