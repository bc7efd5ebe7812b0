"""A load in the background: a `concurrent.futures.Future` that one daemon thread completes."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from reshard.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PendingLoad"]

T = TypeVar("T")


class PendingLoad(Future[T]):
    """A load in the background, returned by `load_async`. It cannot be cancelled.

    Example:
        >>> import numpy as np, reshard
        >>> _ = reshard.save("pending", 5, {"w": np.zeros(4)})
        >>> pending = reshard.load_async("pending")
        >>> pending.result(timeout=60).iteration, pending.done()
        (5, True)
    """

    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__()
        self._pid = os.getpid()
        self.set_running_or_notify_cancel()
        # A daemon: the interpreter does not wait for a load that nobody waits for.
        threading.Thread(target=self._run, args=(work,), name="reshard-load", daemon=True).start()

    def _run(self, work: Callable[[], T]) -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  raised by `result`
            self.set_exception(error)
        else:
            self.set_result(result)

    def done(self) -> bool:
        """Whether the load has ended, with a result or an error.

        Raises:
            ArgumentError: this process was forked from the one that loads.
        """
        self._check_process()
        return super().done()

    def result(self, timeout: float | None = None) -> T:
        """Wait for the load to end.

        Args:
            timeout: seconds; None: as long as it takes.

        Returns:
            What `load` returns.

        Raises:
            TimeoutError: it has not ended in time. It goes on.
            ArgumentError: this process was forked from the one that loads.
            ReshardError: whatever `load` raises.
        """
        self._check_process()
        try:
            return super().result(timeout)
        except TimeoutError:
            if super().done():
                raise  # the load itself raised it
            raise TimeoutError(f"the load has not ended within {timeout:g} s") from None

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the load to end; its error, or None. Raises as `result` does, except for that error."""
        self._check_process()
        return super().exception(timeout)

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise ArgumentError(
                f"this load belongs to process {self._pid}, from which this one was forked",
                hint="ask for it in the process that loads",
            )
