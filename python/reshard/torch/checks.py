"""Checks of values from users and files: integers within bounds, times, and text that is safe to print."""

from __future__ import annotations

import math
import operator

from reshard.errors import ArgumentError

MAX_COUNT = 1 << 62
"""The largest count that is accepted. Sums of a few counts still fit 64 bits."""

MAX_SEED = (1 << 63) - 1
"""The largest seed: the largest integer that the JSON files of this package can hold."""


def count(name: str, value: object, least: int = 0, most: int = MAX_COUNT) -> int:
    """Check that a value is an integer within bounds, and return it. numpy integers are accepted, booleans are not.

    Args:
        name: name of the value, for the error message.
        value: the value to check.
        least: smallest accepted value.
        most: largest accepted value.

    Raises:
        ArgumentError: the value is not an integer, or out of bounds.

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
    """Check that a value is a time in seconds, and return it.

    Args:
        name: name of the value, for the error message.
        value: the value to check.

    Raises:
        ArgumentError: the value is not a number, negative, or not finite.

    Example:
        >>> seconds("timeout", 600)
        600.0
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf:  # type: ignore[operator]
        raise ArgumentError(f"{name} is {shown(value)}, expected a number of seconds, 0 or more")
    return float(value)  # type: ignore[arg-type]


def shown(value: object) -> str:
    r"""The `ascii` form of a value that may come from a file, shortened to 200 characters: safe to print.

    Example:
        >>> print(shown("größer"))
        'gr\xf6\xdfer'
    """
    text = ascii(value)
    return text if len(text) <= 200 else text[:197] + "..."
