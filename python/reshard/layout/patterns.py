"""Patterns over tensor keys: globs, regular expressions, the index `{i}` of a `place` entry, and the order of keys.

A pattern is a glob over the whole key in which only `*` and `?` are special (both match dots), or `re:` and a regular
expression that must match the whole key. The core compiles and searches them, in time linear in the key. This module
knows nothing of meshes or tensors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reshard import _core
from reshard.words import show

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

__all__ = ["IndexPattern", "Matcher", "Pattern", "glob_of", "natural_order"]

_INDEX = "{i}"


@dataclass(frozen=True)
class Pattern:
    """One compiled pattern.

    Attributes:
        text: as written.
        key: the only key it matches, or None if it holds a wildcard or is a regular expression.

    Example:
        >>> Pattern.compile("*.bias").matches("layers.0.attn.bias")
        True
    """

    text: str
    key: str | None
    _compiled: _core.Patterns = field(repr=False, compare=False)

    @classmethod
    def compile(cls, text: str) -> Pattern:
        """Compile one pattern.

        Raises:
            ValueError: it is empty, too long, or its regular expression does not compile; the text says which.
        """
        compiled = _core.Patterns([text])
        has_special = text.startswith("re:") or "*" in text or "?" in text
        return cls(text, None if has_special else text, compiled)

    @staticmethod
    def check(text: str) -> bool:
        """Check a pattern without compiling it; whether it is a regular expression with special characters.

        Raises:
            ValueError: it is empty, too long, or no regular expression; the text says which.
        """
        return _core.Patterns.check(text)

    def matches(self, key: str) -> bool:
        """Whether it matches the whole key."""
        return self._compiled.find(key) is not None


@dataclass(frozen=True)
class IndexPattern:
    """A pattern that holds `{i}` exactly once: one run of digits, whose value is the index of a layer or an expert.

    Example:
        >>> IndexPattern.compile("layers.{i}.*").indices("layers.12.mlp.weight")
        {12}
        >>> sorted(IndexPattern.compile("*.{i}.*").indices("layers.3.experts.5.w"))
        [3, 5]
    """

    text: str
    _compiled: _core.IndexPattern = field(repr=False, compare=False)

    @classmethod
    def compile(cls, text: str) -> IndexPattern:
        """Compile a pattern with one `{i}`.

        Raises:
            ValueError: it does not hold `{i}` exactly once, or is no pattern.
        """
        return cls(text, _core.IndexPattern(text))

    @staticmethod
    def any_index(text: str) -> str:
        """A pattern without `{i}` that matches every key that the one with it matches, and possibly others.

        Raises:
            ValueError: it does not hold `{i}` exactly once.
        """
        if text.count(_INDEX) != 1:
            raise ValueError(f"{show(text)} must hold `{_INDEX}` exactly once")
        return text.replace(_INDEX, "(?:[0-9]+)" if text.startswith("re:") else "*")

    def indices(self, key: str) -> set[int]:
        """Every value that `{i}` can have when the pattern matches the key; more than one means that it is ambiguous.

        Raises:
            ValueError: an index is too long to be one.
        """
        return set(self._compiled.indices(key))


class Matcher:
    """Finds which of many pattern lists match a key; 100,000 patterns cost little more than a few.

    Example:
        >>> matcher = Matcher([["a.w"], ["*.b", "*.w"]])
        >>> matcher.find("a.w"), matcher.find("c.w"), matcher.find("c")
        ((0, 0), (1, 1), None)
        >>> matcher.find_all("a.w"), matcher.unused(["a.w"])
        ([0, 1], [])
    """

    def __init__(self, groups: Sequence[Sequence[str]]) -> None:
        """Compile the patterns.

        Args:
            groups: the patterns of each list, as written.

        Raises:
            ValueError: one is no pattern, or all regular expressions are too large together.
        """
        self._n_groups = len(groups)
        self._place = [(g, e) for g, group in enumerate(groups) for e in range(len(group))]
        self._compiled = _core.Patterns([text for group in groups for text in group])

    def find(self, key: str) -> tuple[int, int] | None:
        """`(group, entry within it)` of the first pattern that matches the key, or None."""
        found = self._compiled.find(key)
        return None if found is None else self._place[found]

    def find_all(self, key: str) -> list[int]:
        """Every group of which a pattern matches the key, ascending."""
        return list(dict.fromkeys(self._place[n][0] for n in self._compiled.find_all(key)))

    def unused(self, keys: Collection[str]) -> list[int]:
        """The groups of which no pattern matches any of the keys, ascending."""
        used = {self._place[n][0] for n, is_used in enumerate(self._compiled.used(list(keys))) if is_used}
        return [group for group in range(self._n_groups) if group not in used]


def glob_of(key: str) -> str:
    r"""A pattern that matches exactly this key, whatever characters it holds.

    Example:
        >>> glob_of("a.w"), glob_of("odd*name")
        ('a.w', 're:odd\\*name')
    """
    special = "*" in key or "?" in key or _INDEX in key or key.startswith("re:")
    return f"re:{re.escape(key)}" if special else key


def natural_order(key: str) -> tuple[object, ...]:
    """A sort key in which runs of digits compare as numbers.

    Example:
        >>> sorted(["h.10.b", "h.9.b", "h.b"], key=natural_order)
        ['h.9.b', 'h.10.b', 'h.b']
    """
    # Even places hold text, odd ones digits. Digits compare by length, then as text: no number is too long for that.
    parts = re.split(r"([0-9]+)", key)
    ordered: list[object] = []
    for n, part in enumerate(parts):
        digits = part.lstrip("0")
        ordered.append((len(digits), digits) if n % 2 else part)
    return (tuple(ordered), key)
