"""Messages that several ranks log, said by the first of them.

The reader of a file knows no ranks, and all ranks read the same files. So what is logged while ranks work together is
held back (`held_back`), exchanged, and logged by the first rank that has it (`release`).
"""

from __future__ import annotations

import contextlib
import logging
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_log = logging.getLogger("reshard")

_held: ContextVar[list[logging.LogRecord] | None] = ContextVar("held", default=None)


def _hold(record: logging.LogRecord) -> bool:
    held = _held.get()
    if held is None or not logging.INFO <= record.levelno <= logging.WARNING:
        return True
    held.append(record)
    return False


_log.addFilter(_hold)


@contextlib.contextmanager
def held_back() -> Iterator[list[logging.LogRecord]]:
    """Hold back what this package logs in this thread, errors excepted; it is in the list that this returns.

    Example:
        >>> with held_back() as held:
        ...     logging.getLogger("reshard").warning("%s is strange", "a file")
        >>> [one.getMessage() for one in held]
        ['a file is strange']
    """
    held: list[logging.LogRecord] = []
    token = _held.set(held)
    try:
        yield held
    finally:
        _held.reset(token)


def release(held: list[logging.LogRecord], said: Sequence[Sequence[str]] = ()) -> None:
    """Log what was held back, each text once, and forget it.

    Args:
        held: the records of this rank.
        said: the texts of the ranks before this one, which are logged there.

    Example:
        >>> with held_back() as held:
        ...     logging.getLogger("reshard").warning("strange")
        >>> release(held, [["strange"]])
        >>> held
        []
    """
    known = {text for of_rank in said for text in of_rank}
    for record in held:
        if record.getMessage() not in known:
            _log.handle(record)
        known.add(record.getMessage())
    held.clear()
