"""The memory of this process in pages of 2 MiB, for forks that take a fraction of the time."""

from __future__ import annotations

import contextlib
import ctypes
import re
from pathlib import Path

_HUGE = 2 << 20
_COLLAPSE = 25  # MADV_COLLAPSE, of Linux 6.1
_ANONYMOUS = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p [0-9a-f]+ 00:00 0 *(\[heap\])?$", re.MULTILINE)


def use() -> int:
    """Put what is in memory now into huge pages, as far as the system does this; returns how many bytes it was told.

    A fork copies an entry for each page of its parent, and the end of the child drops each: a tenth of a second for
    each GiB. Memory that is allocated later is as before.
    """
    told = 0
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for found in _ANONYMOUS.finditer(Path("/proc/self/maps").read_text()):
            start = -(-int(found[1], 16) // _HUGE) * _HUGE
            length = int(found[2], 16) // _HUGE * _HUGE - start
            if length > 0:
                advise(start, length, _COLLAPSE)  # what cannot be moved stays as it is
                told += length
    return told
