"""Running a step on all ranks: every rank learns the results, or every rank raises the same error.

An error on one rank must not leave the others waiting. Therefore a step that fails is not raised where it happens: its
exception is the outcome that this rank reports, and it is raised on all ranks once all have reported. `Collective` is
the one place that does this; `group` has the messages below it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from reshard.group import SingleProcess, agree

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.group import Group

__all__ = ["ALONE", "Collective", "capture"]

T = TypeVar("T")
R = TypeVar("R")


def capture(work: Callable[[], T]) -> T | BaseException:
    """The result of a function, or the exception that it raised.

    Args:
        work: what is called.

    Returns:
        What it returns. An exception that it raises is returned, whatever its class: other ranks wait for it.

    Example:
        >>> capture(lambda: 1 // 0)
        ZeroDivisionError('integer division or modulo by zero')
    """
    try:
        return work()
    except BaseException as error:  # noqa: BLE001  an interrupt, too, must be reported to the other ranks
        return error


@dataclass(frozen=True)
class Collective:
    """Steps that all ranks of a channel take in the same order.

    Values are JSON-able and small: every rank receives those of all.

    Attributes:
        channel: the group, or a session of one.
        timeout: seconds that a rank waits for the others at each step.

    Example:
        >>> ALONE.each(lambda: 7), ALONE.combine(7, sum), ALONE.first(lambda: "x")
        ([7], 7, 'x')
    """

    channel: Group
    timeout: float

    @property
    def rank(self) -> int:
        """This process, from 0."""
        return self.channel.rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.channel.world_size

    def share(self, outcome: object) -> list[Any]:
        """Exchange outcomes that were captured before.

        Args:
            outcome: this rank's value, or the exception that it met.

        Returns:
            The values of all ranks in rank order.

        Raises:
            GroupError: a rank did not answer in time.
            ReshardError: what ranks met, the same on all. An interrupt of this process stays what it is.
        """
        try:
            return agree(self.channel, outcome, self.timeout)
        except Exception:
            if isinstance(outcome, BaseException) and not isinstance(outcome, Exception):
                raise outcome from None
            raise

    def each(self, step: Callable[[], Any]) -> list[Any]:
        """Run a step on every rank. Returns the values of all ranks in rank order; raises as `share`."""
        return self.share(capture(step))

    def first(self, step: Callable[[], T]) -> T:
        """Run a step on rank 0 alone. Returns its value on every rank; raises as `share`."""
        result: T = self.share(capture(step) if self.rank == 0 else None)[0]
        return result

    def combine(self, outcome: object, decide: Callable[[list[Any]], R] | None) -> R:
        """Let rank 0 decide from the outcomes of all ranks.

        Args:
            outcome: this rank's value, or the exception that it met.
            decide: is called on rank 0 with the values of all ranks, unless one of them failed; not used elsewhere.

        Returns:
            What `decide` returned, on every rank; raises as `share`.
        """
        failed = isinstance(outcome, BaseException)
        try:
            brought = self.channel.gather({"failed": True} if failed else {"value": outcome}, timeout=self.timeout)
        except Exception:
            if isinstance(outcome, BaseException) and not isinstance(outcome, Exception):
                raise outcome from None
            raise
        decided: object = outcome if failed else None
        if brought is not None and decide is not None and not any("failed" in one for one in brought):
            values = [one["value"] for one in brought]
            decided = capture(lambda: decide(values))
        result: R = self.share(decided)[0]
        return result


ALONE = Collective(SingleProcess(), 0.0)
"""This process without others."""
