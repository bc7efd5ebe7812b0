"""Emergency saves: how ranks that receive a signal at different steps save at the same step.

A signal handler only sets a flag. At the end of its step s the rank that received the signal posts a *notice*, "save at
step s + 1". Every rank checks for a notice at the end of each step: one request to the rendezvous store, no collective.
At the step of the notice, or at its first step after it, a rank gathers the steps of all ranks. If all are at the same
step, they save there. If not, all ranks now know the highest step, and repeat this one step after it.

While a rank waits for the others, no other rank may run a step that needs the waiting rank. With s + 1 this holds if no
rank can end a step before all ranks have reached it, as on the CPU or where the loss is read every step. If the host
queues work for the device and synchronizes only every n steps, the notice must say s + n; this is `drift`. All waits
have a timeout: if the ranks do not meet, that save fails and the training goes on.

Saves at time intervals use the same mechanism: the clock of rank 0 decides, and rank 0 posts the notice.

This module does not know what is saved.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
import weakref
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from reshard.errors import ArgumentError
from reshard.ranks.collective import Collective
from reshard.ranks.group import TorchGroup, log_of_all, session
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from reshard.ranks.group import Group

EXIT_CODE = 75
"""Exit code of a process that was signalled to end and has saved: EX_TEMPFAIL, "try again later"."""

EXIT_GRACE_S = 5.0
"""Minimum time for the work before the process ends, in seconds, even if the grace period is over."""

_log = logging.getLogger("reshard")


class Signals:
    """Handlers of the signals that request a save. The training loop checks `seen` at the end of each step.

    Only the first signal counts. In a process forked from this one, such as a DataLoader worker, these signals have
    their default effect. An object that is dropped without `close` gives the handlers back.

    Args:
        numbers: the signals. Python sets signal handlers only in the main thread: in other threads nothing is set, and
            a warning is logged.

    Raises:
        ArgumentError: a signal cannot be handled. The handlers are as before.

    Example:
        >>> signals = Signals([signal.SIGUSR1])
        >>> os.kill(os.getpid(), signal.SIGUSR1)
        >>> signals.seen, signals.age_s() < 60
        ('SIGUSR1', True)
        >>> signals.close()
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._first: tuple[int, float] | None = None
        before: dict[int, Any] = {}
        if numbers and threading.current_thread() is not threading.main_thread():
            log_of_all(None, "signals are not handled: signal handlers can be set only in the main thread")
            numbers = ()
        handle = _handler(weakref.ref(self), os.getpid(), before)
        # Called by `close`, or when this object is dropped. It must not refer to the object.
        self._give_back = weakref.finalize(self, _restore, os.getpid(), before, handle)
        self._give_back.atexit = False
        try:
            for number in numbers:
                known = signal.getsignal(number)
                signal.signal(number, handle)
                before.setdefault(number, known)
        except (ValueError, TypeError, OSError, OverflowError) as error:
            self._give_back()
            raise ArgumentError(
                f"`signals` has {show(repr(number))}, which cannot be handled: {error}",
                hint="`signals` takes numbers of the module `signal`, without SIGKILL and SIGSTOP",
            ) from None

    @property
    def seen(self) -> str | None:
        """The name of the first signal that arrived, or None."""
        return None if self._first is None else signal.Signals(self._first[0]).name

    @property
    def number(self) -> int | None:
        """The number of the first signal that arrived, or None."""
        return None if self._first is None else self._first[0]

    def age_s(self) -> float:
        """Seconds since the first signal arrived; 0.0 if none has."""
        return 0.0 if self._first is None else time.monotonic() - self._first[1]

    def arrived(self, number: int) -> None:
        """Note a signal. Only the first one counts."""
        if self._first is None:
            self._first = (number, time.monotonic())

    def stay(self) -> None:
        """Keep the handlers until the process ends: `close` has no effect afterwards."""
        found = self._give_back.detach()
        if found is not None:
            found[2][1].clear()  # what was before is not restored by the handler either

    def close(self) -> None:
        """Restore the previous handlers."""
        self._give_back()


def _handler(owner: weakref.ref[Signals], pid: int, before: dict[int, Any]) -> Callable[[int, FrameType | None], None]:
    """The handler of signals for an object that it does not keep alive."""

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        signals = owner()
        if os.getpid() == pid and signals is not None:
            signals.arrived(number)
            return
        if os.getpid() == pid and number not in before:
            return  # the process ends
        # Another process, or the owner was dropped in another thread, which cannot restore handlers.
        known = signal.SIG_DFL if os.getpid() != pid else before[number]
        signal.signal(number, signal.SIG_DFL if known is None else known)
        os.kill(os.getpid(), number)

    return handle


def _restore(pid: int, before: dict[int, Any], handle: object) -> None:
    """Restore handlers that nobody has replaced since."""
    if os.getpid() != pid or threading.current_thread() is not threading.main_thread():
        return
    for number, known in before.items():
        if signal.getsignal(number) is handle:
            signal.signal(number, signal.SIG_DFL if known is None else known)


@dataclass(frozen=True)
class Notice:
    """A request that all ranks save at the same step.

    Attributes:
        step: the step at whose end ranks save.
        why: the reason, for the log, such as "SIGTERM on rank 3".
        leave: whether the process ends after the save.
        seconds: time limit in seconds, from when the notice is read.
    """

    step: int
    why: str
    leave: bool
    seconds: float


class NoticeStore(Protocol):
    """A store that all ranks share, in which ranks post and read text without waiting."""

    def post(self, name: str, text: str) -> None:
        """Store a text under a name, unless the name has one."""

    def read(self, name: str) -> str | None:
        """The text of a name, or None."""


class _LocalNoticeStore:
    """The notices of a single process."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def post(self, name: str, text: str) -> None:
        self._texts.setdefault(name, text)

    def read(self, name: str) -> str | None:
        return self._texts.get(name)


class _TorchNoticeStore:
    """The rendezvous store of torch.distributed."""

    def __init__(self, group: TorchGroup) -> None:
        self._store: Any = group._store  # noqa: SLF001  same package
        self._is_lost = False

    def post(self, name: str, text: str) -> None:
        self._call(lambda: self._store.compare_set(f"notice/{name}", "", text))

    def read(self, name: str) -> str | None:
        found = self._call(lambda: self._store.check([f"notice/{name}"]))
        text = self._call(lambda: self._store.get(f"notice/{name}")) if found else None
        return None if text is None else text.decode()

    def _call(self, operation: Callable[[], Any]) -> Any:
        """Run an operation on the store. If the store is lost, log that and go on without notices."""
        if self._is_lost:
            return None
        try:
            return operation()
        except RuntimeError as error:
            self._is_lost = True
            _log.warning("the rendezvous store is not reachable, emergency saves are disabled: %s", error)
            return None


def notice_store_of(group: Group) -> NoticeStore | None:
    """The notice store of a group, or None. A user-defined group is its own store if it has `post` and `read`.

    Example:
        >>> from reshard.ranks.group import SingleProcess
        >>> store = notice_store_of(SingleProcess())
        >>> store.read("a")
        >>> store.post("a", "text")
        >>> store.read("a")
        'text'
    """
    if group.world_size == 1:
        return _LocalNoticeStore()
    if isinstance(group, TorchGroup):
        return _TorchNoticeStore(group)
    has_one = callable(getattr(group, "post", None)) and callable(getattr(group, "read", None))
    return group if has_one else None  # type: ignore[return-value]


class Rendezvous:
    """Agrees on the step at which all ranks of a run save.

    Args:
        group: the group; every rank creates a `Rendezvous` and calls `poll` at the end of every step.
        store: the notice store that the ranks share.
        run: text that identifies the run in the store, the same on all ranks.
        drift: number of steps by which one rank can be ahead of another, at least 1.
    """

    def __init__(self, group: Group, store: NoticeStore, run: str, drift: int = 1) -> None:
        self._group = group
        self._store = store
        self._run = run
        self._drift = drift if group.world_size > 1 else 0
        self._number = 0  # number of the next notice
        self._target: tuple[Notice, float] | None = None  # the notice, and the time at which it was read

    def post(self, step: int, why: str, *, leave: bool, seconds: float) -> None:
        """Post a notice, unless another one is pending.

        Args:
            step: the step that ended.
            why: the reason, for the log.
            leave: whether the process ends after the save.
            seconds: time limit in seconds, from when a rank reads the notice.
        """
        notice = Notice(step + self._drift, why, leave, seconds)
        self._store.post(self._name, json.dumps(asdict(notice)))

    def poll(self, step: int, timeout: float) -> Notice | None:
        """Check for a notice at the end of a step.

        Args:
            step: the step that ended.
            timeout: maximum time that ranks wait for each other, in seconds.

        Returns:
            The notice, if all ranks are at its step: all ranks save now, and `seconds` is the remaining time. Else
            None.

        Raises:
            GroupError: a rank did not answer in time. The notice is discarded.
        """
        if self._target is None:
            text = self._store.read(self._name)
            if text is None:
                return None
            self._target = (_parsed(text), time.monotonic())
        notice, seen = self._target
        if step < notice.step:
            return None
        left_s = notice.seconds - (time.monotonic() - seen)
        try:
            # Always wait a minimum time, even after the limit: the other ranks may arrive in a moment.
            steps = Collective(session(self._group, "notice"), min(timeout, max(left_s, EXIT_GRACE_S))).share(step, int)
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
        raise ArgumentError(f"`read` of the group returned text that is not a notice: {error!r}") from None
