"""Functions that are called when a process ends, also in a worker of `multiprocessing`.

Such a worker ends by `os._exit`, which skips `atexit`, after it has called the finalizers of `multiprocessing.util`.
So a function is registered with both; it must be harmless to call twice. A process that is killed, or that calls
`os._exit` itself, calls neither, and nothing in the process can change that.
"""

from __future__ import annotations

import atexit
import os
from multiprocessing import util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# Priorities of finalizers, the highest first: below those of pools of workers (15), above those of managers (0).
SAVES = 10
CLAIMS = 5  # a save needs its claim

_at_exit: set[Callable[[], None]] = set()
_finalizers: dict[Callable[[], None], util.Finalize] = {}


def call_at_end(function: Callable[[], None], priority: int) -> None:
    """Call a function when this process ends; a second registration in the same process has no effect.

    Args:
        function: must not raise, and does nothing when it is called again.
        priority: `SAVES` or `CLAIMS`; the order in a worker of `multiprocessing`. Elsewhere the function that is
            registered last is called first.

    Example:
        >>> call_at_end(lambda: None, SAVES)
    """
    if function not in _at_exit:
        atexit.register(function)
        _at_exit.add(function)
    finalizer = _finalizers.get(function)
    # A worker removes the finalizers that it has inherited when it starts.
    if finalizer is None or not finalizer.still_active():
        _finalizers[function] = util.Finalize(None, function, exitpriority=priority)


# Finalizers of the parent are not called in a forked child; functions of `atexit` are.
os.register_at_fork(after_in_child=_finalizers.clear)
