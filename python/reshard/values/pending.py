"""Work in the background: a `concurrent.futures.Future` that a daemon thread completes.

A process that is forked from the one that started the work does not have the thread; there the methods raise an error
instead of waiting forever. The work itself cannot wait for its own end.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from reshard.errors import ArgumentError
from reshard.values.arguments import check_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Pending(Future[T]):
    """The result of work in the background. It cannot be cancelled.

    Example:
        >>> pending = Pending("the sum", lambda: 1 + 2)
        >>> pending.start()
        >>> pending.result(timeout=60), pending.done()
        (3, True)
    """

    def __init__(self, what: str, work: Callable[[], T]) -> None:
        super().__init__()
        self._what = what
        self._work: Callable[[], T] | None = work
        self._pid = os.getpid()
        # A daemon thread: `write.background` waits for it at the end of the process.
        self._thread = threading.Thread(target=self._run, name=f"reshard: {what}", daemon=True)

    def start(self) -> None:
        """Start the work."""
        self.set_running_or_notify_cancel()
        self._thread.start()

    def _run(self) -> None:
        work, self._work = self._work, None
        assert work is not None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  raised by `result`
            del work  # and the objects that it refers to, before waiting threads continue
            self.set_exception(error)
        else:
            del work
            self.set_result(result)

    def done(self) -> bool:
        """Whether the work has ended, with a result or an error.

        Raises:
            ArgumentError: this process was forked from the one that does the work.
        """
        self._check_process()
        return super().done()

    def result(self, timeout: float | None = None) -> T:
        """Wait for the end of the work.

        Args:
            timeout: maximum time in seconds; None: no limit.

        Returns:
            The result of the work.

        Raises:
            TimeoutError: the work has not ended in time. It continues.
            ArgumentError: this process was forked from the one that does the work, or the work itself calls this.
            ReshardError: an error of the work.
        """
        self._wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end of the work, and return its error or None. Otherwise raises as `result`."""
        self._wait(timeout)
        return super().exception(0)

    def __repr__(self) -> str:
        state = "of another process" if self._pid != os.getpid() else "done" if super().done() else "pending"
        return f"<reshard.{type(self).__name__}: {self._what}, {state}>"

    def _wait(self, timeout: float | None) -> None:
        self._check_process()
        self._refuse_own_thread()
        if timeout is not None:
            check_seconds("timeout", timeout)
        try:
            super().exception(timeout)
        except TimeoutError:
            raise TimeoutError(f"{self._what} has not ended within {timeout:g} s") from None

    def _refuse_own_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise ArgumentError(
                f"{self._what} cannot wait for itself: this call is from its own `after`, `ready` or `progress`",
                hint="wait for it, or start the next one, in the thread of the training loop",
            )

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise ArgumentError(
                f"{self._what} belongs to process {self._pid}; this is {os.getpid()}, a child forked from it",
                hint="call this in the process that started it",
            )
