"""Metrics of a save: numbers by name. In JSON, nan and infinities are written as "nan", "inf" and "-inf"."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from reshard.errors import ArgumentError
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAX_CHARACTERS = 1 << 20  # of all names, and 32 more for each number
_TEXTS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def checked(metrics: Mapping[str, Any]) -> dict[str, int | float]:
    """Convert metrics to Python numbers; numpy and torch scalars are accepted.

    Args:
        metrics: 64-bit numbers by name; nan and infinities are allowed.

    Raises:
        ArgumentError: a name is not printable text, a value is not a 64-bit number, or they take more than 1 MiB.

    Example:
        >>> checked({"loss": 2.5})
        {'loss': 2.5}
    """
    found = {name: _plain(value) for name, value in metrics.items()}
    for name, value in found.items():
        if not isinstance(name, str) or not name.isprintable():
            raise ArgumentError("a metric's name is not printable text")
        if not is_number(value):
            raise ArgumentError(f"the metric {show(name)} is {show(repr(value))}, expected a number of 64 bits")
    if sum(map(len, found)) + 32 * len(found) > _MAX_CHARACTERS:
        raise ArgumentError(
            f"{len(found)} metrics are too many: their names and values have more than {_MAX_CHARACTERS} characters"
        )
    return found


def to_json(metrics: Mapping[str, int | float]) -> dict[str, int | float | str]:
    """Metrics as they are written to JSON.

    Example:
        >>> to_json({"loss": math.nan, "steps": 7})
        {'loss': 'nan', 'steps': 7}
    """
    return {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}


def from_json(value: Mapping[str, object]) -> dict[str, Any]:
    """The inverse of `to_json`. Values that are not numbers are returned unchanged; `checked` refuses them.

    Example:
        >>> from_json({"loss": "inf"})
        {'loss': inf}
    """
    return {name: _TEXTS.get(one, one) if isinstance(one, str) else one for name, one in value.items()}


def _plain(value: Any) -> Any:
    return value.item() if getattr(value, "ndim", None) == 0 else value


def is_number(value: object) -> bool:
    """Whether a value is a number of 64 bits, and no boolean."""
    if isinstance(value, bool):
        return False
    return isinstance(value, float) or (isinstance(value, int) and -(1 << 63) <= value < 1 << 63)
