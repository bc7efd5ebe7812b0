"""A save in the background: one thread, at most one pending save a process, and no error is lost.

This module runs a function that it is given, and knows threads, forks and the end of the process. The error of a
pending save is raised by `result` or by the next save, or is logged when the process ends. A forked child has none of
the parent's threads: there the parent's save does not exist, and using it is an error. A process that ends by
`os._exit` or by a signal runs no exit functions (`process_end`): its pending save is lost.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from reshard import _core
from reshard.commit import process_end
from reshard.errors import ReshardError
from reshard.values.pending import Pending

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.storage.location import Location

_log = logging.getLogger("reshard")

T = TypeVar("T")


class PendingSave(Pending[T]):
    """A save in the background, a `concurrent.futures.Future`. What `save(..., blocking=False)` returns.

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
        self,
        iteration: int,
        work: Callable[..., T],
        progress: _core.Progress | None,
        exit_seconds: float,
        root: Location,
    ) -> None:
        super().__init__(f"the save of iteration {iteration}", functools.partial(work, progress=self._advance))
        self.iteration = iteration
        self.exit_seconds = exit_seconds
        self.root = root
        self.is_error_seen = False
        self._report = progress
        self._progress = (0, 0)

    def let_go(self) -> None:
        """Do not wait for it at the end of the process. If it has not ended by then, it is lost.

        Raises:
            ArgumentError: this process was forked from the one that saves.
        """
        self._check_process()
        self.exit_seconds = 0.0

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes of this rank that are written, and in total; (0, 0) before the first.

        Raises:
            ArgumentError: this process was forked from the one that saves.
        """
        self._check_process()
        return self._progress

    def has_ended(self, timeout: float) -> bool:
        """Wait for the end, at most `timeout` seconds. Returns whether it has ended; its error stays unseen."""
        self._refuse_own_thread()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def unseen_error(self) -> BaseException | None:
        """The error of a save that has ended, unless a caller has seen it; it counts as seen from now on."""
        error = None if self.is_error_seen else Future.exception(self, 0)
        self.is_error_seen = True
        return error

    def _wait(self, timeout: float | None) -> None:
        super()._wait(timeout)
        self.is_error_seen = True  # the caller gets it

    def _advance(self, done_bytes: int, total_bytes: int) -> None:
        self._progress = (done_bytes, total_bytes)
        if self._report is not None:
            self._report(done_bytes, total_bytes)


_lock = threading.Lock()
_pending: PendingSave[object] | None = None
_pool: _core.SnapshotPool | None = None


def start(
    iteration: int, work: Callable[..., T], progress: _core.Progress | None, *, exit_seconds: float, root: Location
) -> PendingSave[T]:
    """Run `work(progress=...)` in the background. `finish_previous` must have come before.

    Args:
        iteration: what is saved.
        work: the save; it is given what to call with `(done_bytes, total_bytes)`.
        progress: called with the same besides, from the background.
        exit_seconds: how long the end of the interpreter waits for it.
        root: the checkpoint root.
    """
    global _pending  # noqa: PLW0603  one pending save a process is the point
    pending = PendingSave(iteration, work, progress, exit_seconds, root)
    # Not at import: exit functions that are registered last run first, and saves need those registered at import.
    process_end.call_at_end(_finish_at_exit, process_end.SAVES)
    with _lock:  # whoever sees a pending save can wait for it: its thread runs
        _pending = pending  # type: ignore[assignment]
        pending.start()
    return pending


def finish_previous(timeout: float, root: Location | None = None) -> None:
    """Wait for the pending save, if there is one, and raise its error unless a caller has seen it.

    Args:
        timeout: seconds.
        root: the checkpoint root of the next save. The error of a save into another root is logged and not raised.

    Raises:
        ReshardError: it failed, or it has not ended in time.
    """
    global _pending  # noqa: PLW0603
    with _lock:
        previous = _pending
    if previous is None:
        return
    if not previous.has_ended(timeout):
        raise ReshardError(
            f"the save of iteration {previous.iteration} is still under way after {timeout:g} s, and one at a time "
            "can be",
            hint="save more seldom, or give it a longer `timeout=`",
        )
    with _lock:
        if _pending is previous:
            _pending = None
    error = previous.unseen_error()
    if error is not None and root not in (None, previous.root):
        _log.error("the save of iteration %d into %s failed: %s", previous.iteration, previous.root, error)
    elif error is not None:
        error.add_note(
            f"(the save of iteration {previous.iteration} failed in the background; the next save reports this)"
        )
        raise error


def snapshot_pool() -> _core.SnapshotPool:
    """The memory of snapshots, kept from save to save."""
    global _pool  # noqa: PLW0603
    with _lock:
        if _pool is None:
            _pool = _core.SnapshotPool()
        return _pool


def _finish_at_exit() -> None:
    """Wait for the pending save at the end of the process, and log an error that no caller has seen."""
    global _pending
    with _lock:
        pending, _pending = _pending, None  # it is called twice in some processes
    if pending is None:
        return
    started = time.monotonic()
    if not pending.has_ended(pending.exit_seconds):
        _log.error(
            "the save of iteration %d had not ended %.0f s after the program: it is not published",
            pending.iteration,
            time.monotonic() - started,
        )
    elif (error := pending.unseen_error()) is not None:
        _log.error("the save of iteration %d failed in the background: %s", pending.iteration, error)


def _forget_after_fork() -> None:
    """A forked child has no thread of its parent's save: it gets a new lock, no pending save and no pool."""
    global _lock, _pending, _pool  # noqa: PLW0603
    _lock = threading.Lock()
    _pending = None
    _pool = None


os.register_at_fork(after_in_child=_forget_after_fork)
