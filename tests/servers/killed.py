"""Processes that are killed at a request which they send through a proxy."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

from tests.helpers.small_saves import fork

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.servers.proxy import Proxy


def nth_change(number: int) -> Callable[[str, str], bool]:
    """Whether a request is the change with this number, from 0."""
    changes = itertools.count()
    return lambda method, _: method not in ("GET", "HEAD") and next(changes) == number


def is_killed(
    proxy: Proxy,
    act: Callable[[], object],
    at: Callable[[str, str], bool],
    *,
    when: str = "before",
) -> bool:
    """Do something in a process of its own that is killed at a request; whether it came that far.

    Args:
        proxy: its requests go through it.
        act: what it does.
        at: whether a request is that one, by its method and path.
        when: before or after the server gets the request. Nothing else that the process has sent arrives later.
    """
    pid, killed = Future[int](), threading.Event()

    def do() -> None:
        act()

    def refuse(*_: object) -> None:
        if killed.is_set():
            raise ConnectionAbortedError

    def kill(method: str, path: str) -> None:
        refuse()
        if at(method, path):
            killed.set()
            os.kill(pid.result(60), signal.SIGKILL)
            raise ConnectionAbortedError

    proxy.before, proxy.after = (kill, None) if when == "before" else (refuse, kill)
    try:
        child = fork(do)
        pid.set_result(child.pid)
        child.result(600)
        proxy.wait_for_the_dead()
    finally:
        proxy.before = proxy.after = None
    return killed.is_set()
