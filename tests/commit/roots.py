"""A root, and the names in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reshard.commit import protocol

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "root"
    protocol.release()


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())
