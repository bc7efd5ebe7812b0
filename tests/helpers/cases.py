"""Cases of a parametrised test, some of which take seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable


def slow(values: Iterable[Any]) -> list[Any]:
    """These cases, marked `slow`: the fast suite has others of the test."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]
