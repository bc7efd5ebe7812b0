"""Models that take no space, and the memory that a program takes."""

import json
import struct
import subprocess
import sys
import time
from pathlib import Path

MIB = 1 << 20
ROW = 4096


def sparse_model(path: Path, n_mib: int) -> Path:
    """A model of this size, in tensors of 24 MiB, that takes no space: all zeros, never written."""
    n_tensors = n_mib // 24
    n_bytes = 24 * MIB
    header = {
        f"layers.{i}.weight": {
            "dtype": "BF16",
            "shape": [n_bytes // ROW // 2, ROW],
            "data_offsets": [i * n_bytes, (i + 1) * n_bytes],
        }
        for i in range(n_tensors)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + n_tensors * n_bytes)
    return path


_LOOK = """
def look(*_):
    found = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon:"))
    look.peak = max(look.peak, found)
look.peak = 0
{program}
look()
print(look.peak)
"""


def peak_mib(program: str, *arguments: object) -> float:
    """The highest RssAnon of a program that runs in a new interpreter, in MiB.

    The system does not record it. Whoever looks from outside can miss any moment, so the program itself looks at its
    end, and where it calls `look()`, which can be its `progress`.
    """
    command = [sys.executable, "-c", _LOOK.replace("{program}", program), *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    peak_kib = 0
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        # A process that has ended but was not waited for has no memory.
        found = [int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:")]
        peak_kib = max(peak_kib, *found, 0)
        time.sleep(0.001)
    printed, errors = process.communicate()
    assert process.returncode == 0, errors
    return max(peak_kib, int(printed.split()[-1])) / 1024
