"""The rules of a layout file that describe tensors whose layouts are known.

Keys with the same value, such as a partition, are combined into patterns that match exactly these keys. Whoever makes a
layout file of the rules resolves it and compares the result, so a pattern can be longer than necessary but not wrong.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import TYPE_CHECKING, Generic, TypeVar

from reshard.layout.patterns import Pattern, glob_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from reshard.layout.partition import Cut, Place

V = TypeVar("V", bound=Hashable)

NUMBER = re.compile(r"(?:(?<=\.)|^)[0-9]+(?=\.|$)")
"""An index in a key, such as that of a layer."""


class Patterns(Generic[V]):
    """Patterns by value.

    Args:
        values: the value of each key.
        wide: patterns to try for a key, wide ones first; one is used if all keys that it matches have the same value.
            Default: each key is its own pattern.

    Attributes:
        by_value: the patterns of each value.
        covered: the keys that these match.

    Example:
        >>> patterns = Patterns({"l.0.w": 1, "l.1.w": 1, "b": 2}, lambda key: [NUMBER.sub("*", key)])
        >>> for key in ("l.0.w", "l.1.w", "b"):
        ...     patterns.add(key)
        >>> patterns.by_value
        {1: ['l.*.w'], 2: ['b']}
    """

    def __init__(self, values: Mapping[str, V], wide: Callable[[str], Iterable[str]] = lambda _: ()) -> None:
        self.by_value: dict[V, list[str]] = {}
        self.covered: set[str] = set()
        self._values = values
        self._wide = wide
        self._tried: set[str] = set()

    def add(self, key: str) -> None:
        """Add a pattern that matches a key, unless one does."""
        if key in self.covered:
            return
        value, pattern, matched = self._values[key], glob_of(key), [key]
        for wide in self._wide(key):
            if wide in self._tried:
                continue
            self._tried.add(wide)
            matches = Pattern.compile(wide).matches
            found = [other for other in self._values if matches(other)]
            if all(self._values[other] == value for other in found):
                pattern, matched = wide, found
                break
        self.by_value.setdefault(value, []).append(pattern)
        self.covered.update(matched)


def rule_of(match: list[str], cut: Cut) -> dict[str, object]:
    """The rule of keys with a partition, as in a layout file."""
    return {"match": match, "cut": [list(axes) or None for axes in cut]}


def place_of(match: list[str], place: Place) -> dict[str, object]:
    """The entry of `place` of keys that lie at one coordinate, as in a layout file."""
    axes, at = place
    return {"match": match, "axis": list(axes), "at": at}
