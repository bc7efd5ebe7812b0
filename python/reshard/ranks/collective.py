"""Run a step on all ranks: every rank receives the results, or every rank raises the same error.

An error on one rank must not leave the others waiting. Therefore a step that fails is not raised where it happens: its
exception is the outcome that this rank reports, and it is raised on all ranks once all have reported. `Collective` is
the one place that does this. What ranks send are messages (`messages`), and a `Group` carries them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from reshard.ranks.group import SingleProcess, agree, decide, tell
from reshard.ranks.messages import decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.ranks.group import Group

T = TypeVar("T")
R = TypeVar("R")
Sent = TypeVar("Sent")


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

    Values are small messages, see `messages`: every rank receives those of all. Where a step has values, the type of
    the message is an argument (`of`), and a value of another type is an error that names the field. In a world of one
    process, values are returned unchanged.

    Attributes:
        channel: the group, or a session of one.
        timeout: seconds that a rank waits for the others at each step.

    Example:
        >>> ALONE.each(lambda: 7, int), ALONE.combine(7, sum, int, int), ALONE.first(lambda: "x", str)
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

    def share(self, outcome: T | BaseException, of: Any = Any) -> list[T]:
        """Exchange outcomes that were captured before.

        Args:
            outcome: this rank's value, or the exception that was raised on it.
            of: the type of the values; `Any`: JSON values.

        Returns:
            The values of all ranks in rank order.

        Raises:
            GroupError: a rank did not answer in time, or its value is of another type.
            ReshardError: the errors of the ranks, the same on all ranks. An interrupt of this process is raised
                unchanged.
        """
        return self.decoded(of, agree(self.channel, self._encoded(outcome), self.timeout))

    def each(self, step: Callable[[], T], of: Any = Any) -> list[T]:
        """Run a step on every rank. Returns the values of all ranks in rank order; raises as `share`."""
        return self.share(capture(step), of)

    def first(self, step: Callable[[], T] | None, of: Any = Any) -> T:
        """Run a step on rank 0 alone; elsewhere it may be None. Returns its value on every rank; raises as `share`.

        No other rank can report an error here: it reports it in the next step.
        """
        if step is None:
            outcome = None
        elif self.world_size == 1:
            return step()
        else:
            outcome = self._encoded(capture(step)) if self.rank == 0 else None
        result: T = self.decoded(of, [tell(self.channel, outcome, self.timeout)])[0]
        return result

    def combine(
        self,
        outcome: Sent | BaseException,
        choose: Callable[[list[Sent]], R] | None,
        sent: Any = Any,
        decided: Any = Any,
    ) -> R:
        """Let rank 0 decide from the outcomes of all ranks.

        Args:
            outcome: this rank's value, or the exception that was raised on it.
            choose: called on rank 0 with the values of all ranks, unless one of them failed; not used elsewhere.
            sent: the type of the values of the ranks; `Any`: JSON values.
            decided: the type of what `choose` returns; `Any`: a JSON value.

        Returns:
            What `choose` returned, on every rank; raises as `share`.
        """

        def answer(values: list[Any]) -> Any:
            return None if choose is None else choose(self.decoded(sent, values))

        result: R
        if self.world_size == 1:
            result = answer(self.share(outcome))
            return result
        encoded = self._encoded(outcome)
        chosen = decide(self.channel, encoded, lambda values: encode(answer(values)), self.timeout)
        result = self.decoded(decided, [chosen])[0]
        return result

    def fail(self, error: BaseException) -> NoReturn:
        """Report an error in place of this rank's next message to rank 0. Raises it, and an error on all ranks."""
        self.combine(error, None)
        raise error

    def _encoded(self, outcome: object) -> Any:
        if self.world_size == 1 or isinstance(outcome, BaseException):
            return outcome
        return capture(lambda: encode(outcome))

    def decoded(self, of: Any, values: list[Any]) -> list[Any]:
        """The messages of all ranks from their JSON values; equal ones are one object.

        Args:
            of: the type of the messages.
            values: the JSON values, in rank order.

        Raises:
            GroupError: a value is of another type.
        """
        if self.world_size == 1:
            return values
        if all(value is values[0] for value in values):
            return [decode(of, values[0])] * len(values)
        # Ranks often report the same: comparing two messages takes a fifth of the time to decode one.
        decoded: list[Any] = []
        for number, value in enumerate(values):
            is_same = number > 0 and value == values[number - 1]
            decoded.append(decoded[-1] if is_same else decode(of, value))
        return decoded


ALONE = Collective(SingleProcess(), 0.0)
"""The collective of a single process."""
