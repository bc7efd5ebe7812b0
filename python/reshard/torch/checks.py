"""What values that come from users and files are put through in this package: integers within bounds, text to print."""

from __future__ import annotations

import math
import operator

from reshard.errors import ArgumentError

__all__ = ["MAX_COUNT", "MAX_SEED", "count", "seconds", "shown"]

MAX_COUNT = 1 << 62
"""More than anything that is counted; sums of a few still fit 64 bits."""

MAX_SEED = (1 << 63) - 1
"""The largest integer that every JSON file of this package can hold."""


def count(name: str, value: object, least: int = 0, most: int = MAX_COUNT) -> int:
    """The value, if it is an integer (numpy's too; a boolean is none) within bounds.

    Args:
        name: what it is, for the error.
        value: anything.
        least: the least that is accepted.
        most: the most.

    Raises:
        ArgumentError: it is not.

    Example:
        >>> count("rank", 3, 0, 7)
        3
    """
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if not least <= number <= most:
        raise ArgumentError(f"{name} is {shown(value)}, expected an integer, {least} to {most}")
    return number


def seconds(name: str, value: object) -> float:
    """The value, if it is a time in seconds.

    Args:
        name: what it is, for the error.
        value: anything.

    Raises:
        ArgumentError: it is not a number, negative, or not finite.

    Example:
        >>> seconds("timeout", 600)
        600.0
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf:  # type: ignore[operator]
        raise ArgumentError(f"{name} is {shown(value)}, expected a number of seconds, 0 or more")
    return float(value)  # type: ignore[arg-type]


def shown(value: object) -> str:
    r"""A value that may come from a file, safe to print: escaped and cut.

    Example:
        >>> print(shown("größer"))
        'gr\xf6\xdfer'
    """
    text = ascii(value)
    return text if len(text) <= 200 else text[:197] + "..."
