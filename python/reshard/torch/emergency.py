"""Saving before the machine is taken away: how ranks that learn of it at different steps save at the same one.

A signal only sets a flag. At the end of its step s the rank that saw it posts a *notice* on a board, "save at step
s + 1", and every rank looks at the board at the end of each of its steps: one question to the rendezvous store, no
collective. At the step of the notice, or the first one after it, a rank asks the others where they are. If all are at
the same step, that is where they save; else all now know the highest step, and meet again one step after it.

A rank that waits there must be missed by nobody: no rank may then be in a step after the notice's that another has to
take part in. With s + 1 that is so wherever a step cannot end before all ranks have come to it, as on the CPU, or where
its loss is looked at. Where hosts queue work for their devices and look up only every n steps, the notice has to say
s + n: that is `drift`. Nothing waits for ever in any case; a notice that failed costs its save.

The board is also how a save by the clock comes about: rank 0's clock counts, and its notice tells the others.

Nothing here knows what is saved.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from reshard.collective import Collective
from reshard.errors import ArgumentError
from reshard.group import TorchGroup, session

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from reshard.group import Group

__all__ = ["EXIT_CODE", "LAST_WORDS_S", "Board", "Notice", "Rendezvous", "Signals", "board_of"]

EXIT_CODE = 75
"""What a process ends with that was told to end and has saved: EX_TEMPFAIL, "try again later"."""

LAST_WORDS_S = 5.0
"""Seconds that there always are for what is to be done before the end."""

_log = logging.getLogger("reshard")


class Signals:
    """Signals that ask for a save, noticed at the end of a step. A second one changes nothing.

    A process forked from this one, such as a worker of a DataLoader, dies of them as if nobody had set a handler.

    Args:
        numbers: the signals. Handlers can be set in the main thread alone: elsewhere they are left as they are, with a
            warning.

    Example:
        >>> signals = Signals([signal.SIGUSR1])
        >>> os.kill(os.getpid(), signal.SIGUSR1)
        >>> signals.seen, signals.age_s() < 60
        ('SIGUSR1', True)
        >>> signals.close()
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._pid = os.getpid()
        self._before: dict[int, Any] = {}
        self._first: tuple[int, float] | None = None
        self._stays = False
        if numbers and threading.current_thread() is not threading.main_thread():
            _log.warning("signals are not watched: handlers can be set in the main thread alone")
            return
        for number in numbers:
            self._before[number] = signal.signal(number, self._handle)

    @property
    def seen(self) -> str | None:
        """The name of the first one that came, or None."""
        return None if self._first is None else signal.Signals(self._first[0]).name

    @property
    def number(self) -> int | None:
        """The number of the first one that came, or None."""
        return None if self._first is None else self._first[0]

    def age_s(self) -> float:
        """Seconds since it came."""
        return 0.0 if self._first is None else time.monotonic() - self._first[1]

    def stay(self) -> None:
        """Go on until the process ends, whoever calls `close`."""
        self._stays = True

    def close(self) -> None:
        """Set back the handlers that were there before."""
        if self._stays:
            return
        if os.getpid() == self._pid and threading.current_thread() is threading.main_thread():
            for number, before in self._before.items():
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if os.getpid() != self._pid:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self._first is None:
            self._first = (number, time.monotonic())


@dataclass(frozen=True)
class Notice:
    """What all ranks are to do together.

    Attributes:
        step: at the end of which.
        why: for the log, "SIGTERM on rank 3".
        leave: whether to end the process afterwards.
        seconds: how long there is from when it is seen.
    """

    step: int
    why: str
    leave: bool
    seconds: float


class Board(Protocol):
    """Where a rank can leave word, and look for it without waiting."""

    def post(self, name: str, text: str) -> None:
        """Leave a text under a name, unless there is one."""

    def read(self, name: str) -> str | None:
        """The text, if there is one."""


class _OwnBoard:
    """The board of a process that is alone."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def post(self, name: str, text: str) -> None:
        self._texts.setdefault(name, text)

    def read(self, name: str) -> str | None:
        return self._texts.get(name)


class _StoreBoard:
    """The rendezvous store of torch.distributed."""

    def __init__(self, group: TorchGroup) -> None:
        self._store: Any = group._store  # noqa: SLF001  one house
        self._is_lost = False

    def post(self, name: str, text: str) -> None:
        self._ask(lambda: self._store.compare_set(f"notice/{name}", "", text))

    def read(self, name: str) -> str | None:
        found = self._ask(lambda: self._store.check([f"notice/{name}"]))
        text = self._ask(lambda: self._store.get(f"notice/{name}")) if found else None
        return None if text is None else text.decode()

    def _ask(self, question: Callable[[], Any]) -> Any:
        """A server that is gone costs the notices, not the training."""
        if self._is_lost:
            return None
        try:
            return question()
        except RuntimeError as error:
            self._is_lost = True
            _log.warning("the rendezvous store is lost, and with it emergency saves: %s", error)
            return None


def board_of(group: Group) -> Board | None:
    """The board of a group; None if it has none. A group of a user's own has one if it has `post` and `read`.

    Example:
        >>> from reshard.group import SingleProcess
        >>> board = board_of(SingleProcess())
        >>> board.read("a")
        >>> board.post("a", "word")
        >>> board.read("a")
        'word'
    """
    if group.world_size == 1:
        return _OwnBoard()
    if isinstance(group, TorchGroup):
        return _StoreBoard(group)
    has_one = callable(getattr(group, "post", None)) and callable(getattr(group, "read", None))
    return group if has_one else None  # type: ignore[return-value]


class Rendezvous:
    """How the ranks of one run come to save at the same step.

    Args:
        group: all its ranks make one, and call `look` at the end of every step.
        board: what its ranks have in common.
        run: text that no other run on this board has, the same on all ranks.
        drift: steps by which one rank can be ahead of another, at least 1.
    """

    def __init__(self, group: Group, board: Board, run: str, drift: int = 1) -> None:
        self._group = group
        self._board = board
        self._run = run
        self._drift = drift if group.world_size > 1 else 0
        self._number = 0  # of the next notice
        self._target: tuple[Notice, float] | None = None  # and when it was seen

    def ask(self, step: int, why: str, *, leave: bool, seconds: float) -> None:
        """Post a notice at the end of a step, unless there is one."""
        notice = Notice(step + self._drift, why, leave, seconds)
        self._board.post(self._name, json.dumps(asdict(notice)))

    def look(self, step: int, timeout: float) -> Notice | None:
        """What is to be done now, at the end of a step, by all ranks; None: go on.

        Args:
            step: the one that ended.
            timeout: seconds that ranks wait for each other, at most.

        Returns:
            The notice, once all ranks are at this step; `seconds` is what is left.

        Raises:
            GroupError: a rank did not come in time. The notice is forgotten.
        """
        if self._target is None:
            text = self._board.read(self._name)
            if text is None:
                return None
            self._target = (_parsed(text), time.monotonic())
        notice, seen = self._target
        if step < notice.step:
            return None
        left_s = notice.seconds - (time.monotonic() - seen)
        try:
            # However late it is: the others may come at once.
            steps = Collective(session(self._group, "notice"), min(timeout, max(left_s, LAST_WORDS_S))).share(step, int)
        except BaseException:
            self._target = None
            self._number += 1
            raise
        if len(set(steps)) > 1:
            self._target = (replace(notice, step=max(steps) + 1), seen)
            return None
        self._target = None
        self._number += 1
        return replace(notice, seconds=max(notice.seconds - (time.monotonic() - seen), 0.0))

    @property
    def _name(self) -> str:
        return f"{self._run}/{self._number}"


def _parsed(text: str) -> Notice:
    try:
        value = json.loads(text)
        return Notice(int(value["step"]), str(value["why"]), bool(value["leave"]), float(value["seconds"]))
    except (ValueError, TypeError, KeyError) as error:
        raise ArgumentError(f"the board of the group holds something else than notices: {error!r}") from error
