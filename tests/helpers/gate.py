"""Holding a save up at one place, for tests of what happens meanwhile."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from reshard.commit import protocol

if TYPE_CHECKING:
    import pytest


class Gate:
    """Holds a save up just before it is sealed, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        real = protocol.seal

        def seal(*args: Any, **options: Any) -> Any:
            self.reached.set()
            assert self._open.wait(30)
            return real(*args, **options)

        monkeypatch.setattr(protocol, "seal", seal)

    def open(self) -> None:
        self._open.set()
