"""Saves in the background that several threads start: each can wait for the one before."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from reshard.storage.location import locate
from reshard.write import background

if TYPE_CHECKING:
    from pathlib import Path


def test_pending_save_can_be_waited_for(tmp_path: Path) -> None:
    """Whoever sees the pending save of another thread can wait for it at once."""
    errors: list[BaseException] = []

    def save() -> None:
        for n in range(100):
            try:
                background.finish_previous(60)
                background.start(n, lambda progress: None, None, exit_seconds=1, root=locate(tmp_path))
            except BaseException as error:  # noqa: BLE001  reported below
                errors.append(error)

    threads = [threading.Thread(target=save) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    background.finish_previous(60)
    assert not errors
