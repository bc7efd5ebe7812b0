"""A load that goes on in the background: one thread a load, its error kept for whoever asks.

Knows threads and forks, and nothing of checkpoints: it runs what it is given.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from reshard.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.verbs.load import Loaded

__all__ = ["PendingLoad"]


class PendingLoad:
    """A load under way in the background. What `load_async` returns.

    Example:
        >>> import numpy as np, reshard
        >>> _ = reshard.save("pending", 5, {"w": np.zeros(4)})
        >>> pending = reshard.load_async("pending")
        >>> pending.result(timeout=60).iteration, pending.done()
        (5, True)
    """

    def __init__(self, work: Callable[[], Loaded]) -> None:
        self._pid = os.getpid()
        self._result: Loaded | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="reshard-load", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], Loaded]) -> None:
        try:
            self._result = work()
        except BaseException as error:  # noqa: BLE001  raised where somebody waits for it
            self._error = error

    def done(self) -> bool:
        """Whether the load has ended, well or not.

        Raises:
            ArgumentError: this process is a forked child of the one that loads.
        """
        self._check_process()
        return not self._thread.is_alive()

    def result(self, timeout: float | None = None) -> Loaded:
        """Wait for the load to end.

        Args:
            timeout: seconds; None: as long as it takes.

        Returns:
            What `load` returns.

        Raises:
            TimeoutError: it has not ended in time. It goes on.
            ArgumentError: this process is a forked child of the one that loads.
            ReshardError: whatever `load` raises.
        """
        self._check_process()
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the load has not ended within {timeout:g} s")
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise ArgumentError(
                f"this load belongs to process {self._pid}, of which this one is a forked child",
                hint="ask for it in the process that loads",
            )
