"""A save that goes on in the background: one thread, at most one pending save a process, no error lost.

Knows threads, forks and the end of the process, and nothing of checkpoints: it runs what it is given. The error of a
pending save surfaces where somebody can act on it: at `result`, at the next save, or in the log when the process ends.
A forked child has none of the parent's threads: for it the parent's save does not exist, and asking for it is an error.
A process that ends by `os._exit` or by a signal runs no exit function (`process_end`): its pending save is lost.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Generic, TypeVar

from reshard import _core
from reshard.arguments import check_seconds
from reshard.errors import ArgumentError, ReshardError
from reshard.write import process_end

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PendingSave", "finish_previous", "snapshot_pool", "start"]

_log = logging.getLogger("reshard")

T = TypeVar("T")


class PendingSave(Generic[T]):
    """A save under way in the background. What `save(..., blocking=False)` returns.

    The end of the process waits for it, also in a worker of `multiprocessing`. A process that ends by `os._exit`, as a
    child made by `os.fork` often does, or that is killed, does not: call `result` first.

    Attributes:
        iteration: the iteration that is saved.

    Example:
        >>> import numpy as np, reshard
        >>> pending = reshard.save("async", 5, {"w": np.zeros(4)}, blocking=False)
        >>> pending.result(timeout=60).iteration, pending.done()
        (5, True)
    """

    def __init__(
        self, iteration: int, work: Callable[..., T], progress: _core.Progress | None, exit_seconds: float
    ) -> None:
        self.iteration = iteration
        self._pid = os.getpid()
        self._work = work
        self._tell = progress
        self._exit_seconds = exit_seconds
        self._progress = (0, 0)
        self._result: T | None = None
        self._error: BaseException | None = None
        self._is_seen = False
        self._thread = threading.Thread(target=self._run, name=f"reshard-save-{iteration}", daemon=True)

    def __repr__(self) -> str:
        state = "of another process" if self._pid != os.getpid() else "done" if self._is_done() else "pending"
        return f"<reshard.PendingSave of iteration {self.iteration}, {state}>"

    def done(self) -> bool:
        """Whether the save has ended, well or not.

        Raises:
            ArgumentError: this process is a forked child of the one that saves.
        """
        self._check_process()
        return self._is_done()

    def result(self, timeout: float | None = None) -> T:
        """Wait for the save to end.

        Args:
            timeout: seconds; None: as long as it takes.

        Returns:
            What a blocking save returns.

        Raises:
            TimeoutError: it has not ended in time. It goes on.
            ArgumentError: this process is a forked child of the one that saves.
            ReshardError: the save failed: whatever a blocking one raises.
        """
        self._check_process()
        if timeout is not None:
            check_seconds("timeout", timeout)
        self._refuse_own_thread()
        self._thread.join(timeout)
        if not self._is_done():
            raise TimeoutError(f"the save of iteration {self.iteration} has not ended within {timeout:g} s")
        self._is_seen = True
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # set where there is no error

    def let_go(self) -> None:
        """Keep the end of the interpreter from waiting for it: unless it ends before, it is lost.

        Raises:
            ArgumentError: this process is a forked child of the one that saves.
        """
        self._check_process()
        self._exit_seconds = 0.0

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes of this rank that are written, and in total; (0, 0) before the first.

        Raises:
            ArgumentError: this process is a forked child of the one that saves.
        """
        self._check_process()
        return self._progress

    def _run(self) -> None:
        try:
            self._result = self._work(progress=self._advance)
        except BaseException as error:  # noqa: BLE001  whatever it is, it is told where somebody waits for it
            self._error = error
        finally:
            del self._work  # and with it the snapshots

    def _advance(self, done_bytes: int, total_bytes: int) -> None:
        self._progress = (done_bytes, total_bytes)
        if self._tell is not None:
            self._tell(done_bytes, total_bytes)

    def _is_done(self) -> bool:
        return not self._thread.is_alive()

    def _refuse_own_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise ArgumentError(
                f"the save of iteration {self.iteration} has not ended: this is called from within it, by `after`, "
                "`ready` or `progress`",
                hint="wait for it, or start the next save, in the thread of the training loop",
            )

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise ArgumentError(
                f"the save of iteration {self.iteration} belongs to process {self._pid}; this is {os.getpid()}, a "
                "child forked from it",
                hint="ask for it in the process that saves",
            )


_lock = threading.Lock()
_pending: PendingSave[object] | None = None
_pool: _core.SnapshotPool | None = None


def start(
    iteration: int, work: Callable[..., T], progress: _core.Progress | None, *, exit_seconds: float
) -> PendingSave[T]:
    """Run `work(progress=...)` in the background. `finish_previous` must have come before.

    Args:
        iteration: what is saved.
        work: the save; it is given what to call with `(done_bytes, total_bytes)`.
        progress: called with the same besides, from the background.
        exit_seconds: how long the end of the interpreter waits for it.
    """
    global _pending  # noqa: PLW0603  one pending save a process is the point
    pending = PendingSave(iteration, work, progress, exit_seconds)
    with _lock:
        _pending = pending  # type: ignore[assignment]
    # Not at import: what a save needs to its end is registered then, and what is registered last runs first.
    process_end.call_at_end(_finish_at_exit, process_end.SAVES)
    pending._thread.start()  # noqa: SLF001  both are this module's
    return pending


def finish_previous(timeout: float) -> None:
    """Wait for the pending save, if there is one, and raise its error unless somebody has seen that already.

    Raises:
        ReshardError: it failed, or it has not ended in time.
    """
    global _pending  # noqa: PLW0603
    with _lock:
        previous = _pending
    if previous is None:
        return
    previous._refuse_own_thread()  # noqa: SLF001
    previous._thread.join(timeout)  # noqa: SLF001
    if not previous._is_done():  # noqa: SLF001
        raise ReshardError(
            f"the save of iteration {previous.iteration} is still under way after {timeout:g} s, and one at a time "
            "can be",
            hint="save more seldom, or give it a longer `timeout=`",
        )
    with _lock:
        if _pending is previous:
            _pending = None
    if previous._error is not None and not previous._is_seen:  # noqa: SLF001
        previous._is_seen = True  # noqa: SLF001
        previous._error.add_note(  # noqa: SLF001
            f"(the save of iteration {previous.iteration} failed in the background; this is told at the next save)"
        )
        raise previous._error  # noqa: SLF001


def snapshot_pool() -> _core.SnapshotPool:
    """The memory that snapshots take and give back, kept from save to save."""
    global _pool  # noqa: PLW0603
    with _lock:
        if _pool is None:
            _pool = _core.SnapshotPool()
        return _pool


def _finish_at_exit() -> None:
    """The last chance: wait for the pending save, and tell of an error that nobody has seen."""
    global _pending
    with _lock:
        pending, _pending = _pending, None  # it is called twice in some processes
    if pending is None or pending._pid != os.getpid():  # noqa: SLF001
        return
    started = time.monotonic()
    pending._thread.join(pending._exit_seconds)  # noqa: SLF001
    if not pending._is_done():  # noqa: SLF001
        _log.error(
            "the save of iteration %d had not ended %.0f s after the program: it is not published",
            pending.iteration,
            time.monotonic() - started,
        )
    elif pending._error is not None and not pending._is_seen:  # noqa: SLF001
        _log.error("the save of iteration %d failed in the background: %s", pending.iteration, pending._error)  # noqa: SLF001


def _forget_after_fork() -> None:
    """A child has no thread of its parent's save, must not wait for a lock that died with one, and shares no memory."""
    global _lock, _pending, _pool  # noqa: PLW0603
    _lock = threading.Lock()
    _pending = None
    _pool = None


os.register_at_fork(after_in_child=_forget_after_fork)
