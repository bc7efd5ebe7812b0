"""Where the system refuses threads, files are still written, no later save fails, and nothing waits forever."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")

LIMIT = """
import resource

def limit(more_bytes):
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more_bytes, resource.RLIM_INFINITY))
"""

# The memory for the pieces fits, the stacks of the threads that write them do not.
SAVE = """
import numpy as np, reshard
from reshard.errors import StorageError

large, small = np.arange(40 << 20, dtype=np.uint8), np.ones(2 << 20, np.uint8)
reshard.save("root", 1, {"w": small})
n_failures = 0
for n, more_bytes in enumerate(range(32 << 20, 48 << 20, 1 << 20), 1):
    limit(more_bytes)
    try:
        reshard.save("root", 2 * n, {"w": large})
    except (StorageError, MemoryError):
        n_failures += 1
        saved = None
    else:
        saved = 2 * n
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    reshard.save("root", 2 * n + 1, {"w": small})
    for iteration, expected in ((saved, large), (2 * n + 1, small)):
        if iteration is not None:
            with reshard.open("root/iteration_%08d" % iteration) as checkpoint:
                assert (checkpoint.load()["w"] == expected).all()
assert n_failures < 16
"""

# Each pool that cannot be made raises an error, which is an object of Python.
POOLS = """
import faulthandler, sys, threading, time
from reshard import _core
from reshard.errors import StorageError

faulthandler.dump_traceback_later(50, exit=True)
sys.setswitchinterval(1e-6)
content, n_errors, go = bytes(3 << 20), [0], threading.Event()

def work(n_threads):
    go.wait()
    end = time.monotonic() + 2
    while time.monotonic() < end:
        try:
            _core.write_arrays("w.safetensors", [("a", "U8", (3 << 20,), content)], durable=False, threads=n_threads)
        except StorageError:
            n_errors[0] += 1

_core.write_arrays("w.safetensors", [("a", "U8", (3 << 20,), content)], durable=False, threads=1)
threads = [threading.Thread(target=work, args=(900 + n,)) for n in range(2)]
for thread in threads:
    thread.start()
limit(60 << 20)
go.set()
for thread in threads:
    thread.join()
assert n_errors[0] > 0
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", [pytest.param(SAVE, id="save"), pytest.param(POOLS, id="pools")])
def test_refused_threads(script: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMIT + script], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
