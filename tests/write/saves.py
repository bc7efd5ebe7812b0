"""Small arrays and a layout that several files of tests save."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from reshard.commit import protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

TP2 = {"mesh": {"tp": 2}, "rules": [{"match": "*.w", "cut": ["tp"]}, {"match": "*"}]}

SQUARE = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture(autouse=True)
def no_claim_outlives_a_test() -> Iterator[None]:
    yield
    protocol.release()
