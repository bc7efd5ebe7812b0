"""Where work is done that is divided into shares.

The caller has a function of the number of a share. A place calls it for every number, in some process on some host, and
again in another one if that process died. What it returns comes back to the caller, who makes one result of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from reshard.ranks.group import ErrorRecord  # noqa: TC001  messages are decoded by their type hints
from reshard.values.fetched import Fetched

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.values.argument_types import Progress


M = TypeVar("M")
_NOTHING = Fetched()


@dataclass(frozen=True)
class Work(Generic[M]):
    """Some work that is divided into shares.

    Attributes:
        do: called as `do(message, share)`. It returns the bytes that it worked on, and a result.
        message: what it has to know. It can be pickled; for ranks it is a message (`ranks.messages`).
        result: the type of a result.
    """

    do: Callable[[M, int], tuple[int, Any]]
    message: M
    result: Any = Any

    def __call__(self, share: int) -> tuple[int, Any]:
        """Do a share."""
        return self.do(self.message, share)


@dataclass(frozen=True)
class ShareRun:
    """Where a share was done.

    Attributes:
        share: its number, from 0.
        host: the host.
        process: the number of the process there.
        n_bytes: bytes that it wrote or compared.
        seconds: how long it took.
        retried: why earlier attempts ended, one text for each.
    """

    share: int
    host: str
    process: int
    n_bytes: int
    seconds: float
    retried: tuple[str, ...] = ()


@dataclass(frozen=True)
class ShareDone:
    """What a process sends back of a share; its fields are those of `ShareRun`, with the result or the error.

    Attributes:
        fetched: what it has fetched from buckets.
    """

    host: str
    process: int
    seconds: float = 0.0
    n_bytes: int = 0
    result: Any = None
    error: ErrorRecord | None = None
    fetched: Fetched = _NOTHING


class Place(Protocol):
    """Processes that do the shares of some work: `reshard.ray.Ray`, or `reshard.ranks.led.LedRanks`."""

    @property
    def cpus(self) -> int | None:
        """Processors of each of them; None: all that it may use."""

    def n_shares(self, n_bytes: int) -> int:
        """Into how many shares work on so many bytes is divided."""

    def run(self, work: Work[Any], n_shares: int, done: Callable[[ShareRun], object]) -> list[Any]:
        """Do all shares.

        Args:
            work: does a share, given by its number. It and the results can be pickled.
            n_shares: how many there are.
            done: called after each share, in this process.

        Returns:
            The results, in the order of the shares.

        Raises:
            ReshardError: of a share, with the name of its host. No share is being done any more.
        """


def do_shares(
    on: Place, work: Work[Any], n_shares: int, n_bytes: int, progress: Progress | None
) -> tuple[list[Any], list[ShareRun]]:
    """Do all shares of some work, with one progress.

    Args:
        on: where.
        work: does a share, see `Place.run`.
        n_shares: how many there are.
        n_bytes: of all shares.
        progress: called as `progress(done_bytes, total_bytes)`.

    Returns:
        The results, and where each share was done, in the order of the shares.

    Raises:
        ReshardError: as `Place.run`.
    """
    runs: list[ShareRun] = []

    def done(run: ShareRun) -> None:
        runs.append(run)
        if progress is not None:
            progress(min(n_bytes, sum(one.n_bytes for one in runs)), n_bytes)

    if progress is not None:
        progress(0, n_bytes)
    results = on.run(work, n_shares, done)
    return results, sorted(runs, key=lambda run: run.share)
