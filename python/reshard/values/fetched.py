"""What was fetched from buckets and behind HTTP: by this process, and by others that worked for it."""

from __future__ import annotations

from dataclasses import dataclass

from reshard import _core


@dataclass(frozen=True)
class Fetched:
    """What was fetched from buckets and behind HTTP.

    Attributes:
        n_requests: number of requests, each try of one that was tried again.
        n_failed: those among them that got no answer, or one that says that the same request can succeed later.
        fetched_bytes: bytes of their answers.
        wanted_bytes: bytes of the arrays that were loaded or written from there.
        gap_bytes: gaps of fewer bytes were read when requests were planned last: that takes less time than another
            request. 0: none were planned.
        n_at_once: how many requests were made at once then.
        n_lost_workers: other processes that have died, whose requests are not in these numbers.
    """

    n_requests: int = 0
    n_failed: int = 0
    fetched_bytes: int = 0
    wanted_bytes: int = 0
    gap_bytes: int = 0
    n_at_once: int = 0
    n_lost_workers: int = 0

    def __add__(self, later: Fetched) -> Fetched:
        """Both; gap and number at once are the later ones, if requests were planned."""
        plan = later if later.n_at_once else self
        return Fetched(
            self.n_requests + later.n_requests,
            self.n_failed + later.n_failed,
            self.fetched_bytes + later.fetched_bytes,
            self.wanted_bytes + later.wanted_bytes,
            plan.gap_bytes,
            plan.n_at_once,
            self.n_lost_workers + later.n_lost_workers,
        )

    def __sub__(self, earlier: Fetched) -> Fetched:
        """What was fetched since `earlier`; gap and number at once are the last ones."""
        return Fetched(
            self.n_requests - earlier.n_requests,
            self.n_failed - earlier.n_failed,
            self.fetched_bytes - earlier.fetched_bytes,
            self.wanted_bytes - earlier.wanted_bytes,
            self.gap_bytes,
            self.n_at_once,
            self.n_lost_workers - earlier.n_lost_workers,
        )


class _Others:
    """What other processes have fetched for this one."""

    fetched = Fetched()


def fetched_here() -> Fetched:
    """What this process has fetched itself."""
    return Fetched(*_core.remote_counts()) if hasattr(_core, "remote_counts") else Fetched()


def fetched_so_far() -> Fetched:
    """What this process has fetched, and others for it."""
    return fetched_here() + _Others.fetched


def add_fetched(fetched: Fetched) -> None:
    """Count what another process has fetched for this one.

    Example:
        >>> before = fetched_so_far()
        >>> add_fetched(Fetched(n_requests=3, fetched_bytes=100))
        >>> (fetched_so_far() - before).n_requests
        3
    """
    _Others.fetched += fetched
