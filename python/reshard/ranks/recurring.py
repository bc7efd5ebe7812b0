"""A step that rank 0 decides, in which only what is new is sent: the rest of the messages is known from earlier steps.

A save by thousands of ranks is mostly like the one before: every rank holds arrays of the same names and shapes, and
rank 0 plans the same files. These are `recurring` fields of the messages. A message has digests in their places:

    1. every rank sends its message, and the digests of the decisions that it remembers
    2. rank 0 asks for the fields that it does not know, each of the first rank that has it; mostly there are none
    3. rank 0 sends its decision, with those fields that one of the ranks does not remember

What is remembered is found by its digest alone: it can come from any step of any group in which this process was the
same rank. Nothing is assumed of another rank but what it has said in this step. What the last steps have not used is
forgotten, such as that of a run with another number of ranks, and so is the oldest if all of it is too large.
"""

from __future__ import annotations

import collections
import json
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from reshard.errors import GroupError
from reshard.ranks.collective import capture
from reshard.ranks.messages import Known, Parts, decode, digest_of, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from reshard.ranks.collective import Collective

R = TypeVar("R")
Sent = TypeVar("Sent")

_STEPS = 4  # whose fields are remembered: a run may save a model and its average in turns
_MAX_BYTES = 64 << 20  # of them, as JSON; the reports of 4,096 ranks have two megabytes


@dataclass(frozen=True)
class _Message:
    """What a rank sends to rank 0.

    Attributes:
        value: its message.
        parts: the digests of its recurring fields.
        known: those that it remembers of decisions.
    """

    value: Any
    parts: tuple[str, ...]
    known: tuple[str, ...]


@dataclass(frozen=True)
class _Answer:
    """What rank 0 sends.

    Attributes:
        asked: the rank that is asked for each recurring field, by digest; empty: rank 0 has decided.
        value: the decision.
        parts: its recurring fields, by digest; None: all ranks remember it.
    """

    asked: dict[str, int] = field(default_factory=dict)
    value: Any = None
    parts: dict[str, Any] = field(default_factory=dict)


class _Memory:
    """The recurring fields of the last steps of a rank, of what it received and of what it decided."""

    def __init__(self) -> None:
        self.received: dict[str, Any] = {}  # on rank 0, from the others
        self.decided: dict[str, Any] = {}
        self._steps: collections.deque[frozenset[str]] = collections.deque(maxlen=_STEPS)
        self._n_bytes: dict[str, int] = {}
        self._lock = threading.Lock()  # another thread may be in a step of another group

    def end_step(self, received: Known, decided: Known, used: frozenset[str]) -> None:
        """Remember what a step has used, and forget what none of the last ones did, or too much of them."""
        n_bytes = {digest: len(json.dumps(value)) for digest, value in {**received.sent, **decided.sent}.items()}
        with self._lock:
            self._steps.append(used)
            self._n_bytes |= n_bytes
            kept = frozenset().union(*self._steps)
            while sum(self._n_bytes.get(digest, 0) for digest in kept) > _MAX_BYTES:
                self._steps.popleft()
                kept = frozenset().union(*self._steps)
            self.received = {key: one for key, one in {**self.received, **received.decoded}.items() if key in kept}
            self.decided = {key: one for key, one in {**self.decided, **decided.decoded}.items() if key in kept}
            self._n_bytes = {digest: n for digest, n in self._n_bytes.items() if digest in kept}


_memories: collections.defaultdict[int, _Memory] = collections.defaultdict(_Memory)  # by rank


def combine(
    ranks: Collective,
    outcome: Sent | BaseException,
    choose: Callable[[list[Sent]], R] | None,
    sent: Any,
    decided: Any,
) -> R:
    """Let rank 0 decide from the outcomes of all ranks, as `Collective.combine` does. Recurring fields are sent once.

    Args:
        ranks: all ranks.
        outcome: this rank's message, or the exception that was raised on it.
        choose: called on rank 0 with the messages of all ranks, unless one of them failed; not used elsewhere.
        sent: the type of the messages.
        decided: the type of what `choose` returns.

    Returns:
        What `choose` returned, on every rank; raises as `Collective.share`.

    Example:
        >>> from reshard.ranks.collective import ALONE
        >>> combine(ALONE, 7, sum, int, int)
        7
    """
    memory = _memories[ranks.rank]
    # What is remembered may be forgotten by a step of another thread until the answer has come.
    received, known = Known(dict(memory.received)), Known(dict(memory.decided))
    own: Parts = {}

    def message() -> _Message:
        if isinstance(outcome, BaseException):
            raise outcome
        value = encode(outcome, own)
        return _Message(value, tuple(own), tuple(known.decoded))

    messages: list[_Message] = []  # on rank 0

    def first(of_ranks: list[_Message]) -> _Answer:
        messages.extend(of_ranks)
        received.sent = {digest: make() for digest, make in own.items() if digest not in received.decoded}
        asked: dict[str, int] = {}
        for rank, one in enumerate(of_ranks):
            for digest in one.parts:
                if digest not in received.decoded and digest not in received.sent:
                    asked.setdefault(digest, rank)
        return _Answer(asked=asked) if asked else decision()

    def second(of_ranks: list[dict[str, Any]]) -> _Answer:
        came = {digest: value for one in of_ranks for digest, value in one.items()}
        _check(came)
        received.sent = {**received.sent, **came}
        return decision()

    def decision() -> _Answer:
        assert choose is not None
        values: list[Sent] = []
        for number, one in enumerate(messages):
            is_same = number > 0 and one.value == messages[number - 1].value
            values.append(values[-1] if is_same else decode(sent, one.value, received))
        parts: Parts = {}
        value = encode(choose(values), parts)
        of_all = set.intersection(*(set(one.known) for one in messages))
        return _Answer(
            value=value, parts={digest: None if digest in of_all else make() for digest, make in parts.items()}
        )

    answer = ranks.combine(capture(message), first, _Message, _Answer)
    if answer.asked:
        mine = capture(lambda: {digest: own[digest]() for digest, rank in answer.asked.items() if rank == ranks.rank})
        answer = ranks.combine(mine, second, dict[str, Any], _Answer)
    known.sent = {digest: value for digest, value in answer.parts.items() if value is not None}
    _check(known.sent)
    result: R = decode(decided, answer.value, known)
    used = {digest for one in messages for digest in one.parts} | answer.parts.keys()
    memory.end_step(received, known, frozenset(used))
    return result


def _check(parts: Mapping[str, Any]) -> None:
    """Refuse a field of another digest. Raises GroupError."""
    for digest, value in parts.items():
        if digest_of(digest.rpartition(" ")[0], value) != digest:
            raise GroupError(
                f"`{digest}` came with another content", hint="do all ranks run the same version of reshard?"
            )
