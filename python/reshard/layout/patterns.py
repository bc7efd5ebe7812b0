"""Patterns over tensor keys: globs, regular expressions, the index `{i}` of a `place` entry, and the order of keys.

A pattern is a glob or a regular expression with the prefix `re:`. Both must match the complete key. In a glob, `*` and
`?` are special, and both also match dots. The core compiles and searches the patterns in time linear in the length of
the key. This module does not depend on meshes or tensors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reshard import _core
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

_INDEX = "{i}"
_MAX_PATTERN = 4096  # characters
_MAX_EXPANDED = 1024  # patterns to which one pattern with braces expands
_MAX_EXPANDED_LENGTH = 1 << 16  # characters of all these patterns
_MAX_DEPTH = 16
_RANGE = re.compile(r"(-?[0-9]{1,9})\.\.(-?[0-9]{1,9})(?:\.\.(-?[0-9]{1,9}))?")
_DIGITS = re.compile(r"[0-9]+")


@dataclass(frozen=True)
class Pattern:
    """One compiled pattern.

    Attributes:
        text: the pattern as specified.
        key: the only key that the pattern matches; None if it contains a wildcard or is a regular expression.

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
            ValueError: the pattern is empty or too long, or its regular expression does not compile.
        """
        compiled = _core.Patterns([text])
        has_special = text.startswith("re:") or "*" in text or "?" in text
        return cls(text, None if has_special else text, compiled)

    @staticmethod
    def check(text: str) -> bool:
        """Check a pattern without compiling it.

        Returns:
            Whether the pattern is a regular expression with special characters.

        Raises:
            ValueError: the pattern is empty or too long, or its regular expression is invalid.
        """
        return _core.Patterns.check(text)

    def matches(self, key: str) -> bool:
        """Whether the pattern matches the complete key."""
        return self._compiled.find(key) is not None


@dataclass(frozen=True)
class IndexedPattern:
    """A pattern that contains `{i}` exactly once. `{i}` matches digits: the index of a layer or an expert.

    Example:
        >>> IndexedPattern.compile("layers.{i}.*").indices("layers.12.mlp.weight")
        {12}
        >>> sorted(IndexedPattern.compile("*.{i}.*").indices("layers.3.experts.5.w"))
        [3, 5]
    """

    text: str
    _compiled: _core.IndexPattern = field(repr=False, compare=False)

    @classmethod
    def compile(cls, text: str) -> IndexedPattern:
        """Compile a pattern with one `{i}`.

        Raises:
            ValueError: the text does not contain `{i}` exactly once, or is not a valid pattern.
        """
        return cls(text, _core.IndexPattern(text))

    @staticmethod
    def any_index(text: str) -> str:
        """Replace `{i}` with a wildcard. The result matches every key that `text` matches, and possibly more.

        Raises:
            ValueError: the text does not contain `{i}` exactly once.
        """
        if text.count(_INDEX) != 1:
            raise ValueError(f"{show(text)} must hold `{_INDEX}` exactly once")
        return text.replace(_INDEX, "(?:[0-9]+)" if text.startswith("re:") else "*")

    def indices(self, key: str) -> set[int]:
        """All values of `{i}` for which the pattern matches the key. More than one value means an ambiguous pattern.

        Raises:
            ValueError: an index has too many digits.
        """
        return set(self._compiled.indices(key))


class Matcher:
    """Finds the pattern lists that match a key. The cost of a search depends little on the number of patterns.

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
            groups: the patterns of each list, as specified.

        Raises:
            ValueError: a pattern is invalid, or the compiled regular expressions exceed the size limit.
        """
        self._n_groups = len(groups)
        self._place = [(g, e) for g, group in enumerate(groups) for e in range(len(group))]
        self._compiled = _core.Patterns([text for group in groups for text in group])

    def find(self, key: str) -> tuple[int, int] | None:
        """`(group, entry within it)` of the first pattern that matches the key, or None."""
        found = self._compiled.find(key)
        return None if found is None else self._place[found]

    def find_all(self, key: str) -> list[int]:
        """The indices of all groups with a pattern that matches the key, ascending."""
        return list(dict.fromkeys(self._place[n][0] for n in self._compiled.find_all(key)))

    def unused(self, keys: Collection[str]) -> list[int]:
        """The indices of the groups without a pattern that matches one of the keys, ascending."""
        used = {self._place[n][0] for n, is_used in enumerate(self._compiled.used(list(keys))) if is_used}
        return [group for group in range(self._n_groups) if group not in used]


def glob_of(key: str) -> str:
    r"""A pattern that matches only this key. Special characters in the key are escaped.

    Example:
        >>> glob_of("a.w"), glob_of("odd*name")
        ('a.w', 're:odd\\*name')
    """
    special = any(c in key for c in "*?{") or key.startswith("re:")
    return f"re:{re.escape(key)}" if special else key


def expand_braces(text: str) -> list[str]:
    """Expand the braces of a pattern as a shell does: `{a,b}` is a list of alternatives, `{0..7}` is a range.

    Braces can be nested. Braces without a comma or a range, such as `{i}`, and unmatched braces are not expanded. A
    regular expression (`re:`) is not expanded.

    Raises:
        ValueError: the pattern is empty or has more than 4096 characters, an expanded pattern contains braces that
            would be expanded again, or the braces expand to more than 1024 patterns or 65536 characters or are nested
            more than 16 deep.

    Example:
        >>> expand_braces("*.{q,k,v}_proj.{weight,bias}")[:3]
        ['*.q_proj.weight', '*.q_proj.bias', '*.k_proj.weight']
        >>> expand_braces("h.{08..10}.w"), expand_braces("layers.{i}.*")
        (['h.08.w', 'h.09.w', 'h.10.w'], ['layers.{i}.*'])
    """
    if not text:
        raise ValueError("a pattern cannot be empty")
    if len(text) > _MAX_PATTERN:
        raise ValueError(f"a pattern has at most {_MAX_PATTERN} characters, this one {len(text)}")
    if text.startswith("re:") or "{" not in text:
        return [text]
    expanded = _Braces(text).expanded()
    for one in expanded:
        # `{{1,2}..3}` expands to `{1..3}`. Saved in a layout file and read again, it would expand to other patterns.
        if one != text and "{" in one and _Braces(one).expanded() != [one]:
            raise ValueError(f"{show(text)} stands for {show(one)}, whose braces would have to be expanded once more")
    return expanded


class _Braces:
    """The braces of one text. Matching braces are found once, so the time is linear in the size of the output."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.close: dict[int, int] = {}
        opened: list[int] = []
        for n, c in enumerate(text):
            if c == "{":
                opened.append(n)
            elif c == "}" and opened:
                self.close[opened.pop()] = n

    def expanded(self, start: int = 0, end: int | None = None, depth: int = 0) -> list[str]:
        """All expansions of the characters `start` to `end` of the text."""
        if depth > _MAX_DEPTH:
            raise ValueError(f"braces in {show(self.text)} are nested more than {_MAX_DEPTH} deep")
        end = len(self.text) if end is None else end
        done, n, plain = [""], start, start
        while n < end:
            if n in self.close:
                choices = self._choices(n, self.close[n], depth)
                if choices is not None:
                    done = self._joined(self._joined(done, [self.text[plain:n]]), choices)
                    n = plain = self.close[n] + 1
                    continue
            n += 1
        return self._joined(done, [self.text[plain:end]])

    def _choices(self, opened: int, closed: int, depth: int) -> list[str] | None:
        """The expansions of one pair of braces; None if it is not expanded."""
        commas, n = [], opened + 1
        while n < closed:
            if self.text[n] == ",":
                commas.append(n)
            n = self.close[n] + 1 if n in self.close else n + 1
        if not commas:
            return self._range(self.text[opened + 1 : closed])
        starts = [opened + 1, *(comma + 1 for comma in commas)]
        ends = [*commas, closed]
        found: list[str] = []
        for first, last in zip(starts, ends, strict=True):
            found += self.expanded(first, last, depth + 1)
            self._refuse(len(found))
        return found

    def _range(self, inner: str) -> list[str] | None:
        match = _RANGE.fullmatch(inner)
        if match is None:
            return None
        first, last, step = int(match[1]), int(match[2]), abs(int(match[3] or 1)) or 1
        self._refuse(abs(last - first) // step + 1)
        is_padded = any(re.match("-?0[0-9]", text) for text in match.groups()[:2])
        width = max(len(match[1]), len(match[2])) if is_padded else 0
        numbers = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
        return [f"{number:0{width}d}" for number in numbers]

    def _joined(self, left: list[str], right: list[str]) -> list[str]:
        self._refuse(len(left) * len(right))
        if right == [""]:
            return left
        joined = [a + b for a in left for b in right]
        if len(joined) > 1 and sum(map(len, joined)) > _MAX_EXPANDED_LENGTH:
            raise ValueError(f"{show(self.text)} stands for more than {_MAX_EXPANDED_LENGTH} characters of patterns")
        return joined

    def _refuse(self, n: int) -> None:
        if n > _MAX_EXPANDED:
            raise ValueError(f"{show(self.text)} stands for more than {_MAX_EXPANDED} patterns")


def natural_order(key: str) -> tuple[object, ...]:
    """A sort key in which runs of digits compare as numbers.

    Example:
        >>> sorted(["h.10.b", "h.9.b", "h.b"], key=natural_order)
        ['h.9.b', 'h.10.b', 'h.b']
    """
    # Even positions contain text, odd positions contain digits. Digits compare by length, then as text. This also works
    # for numbers that `int` would reject as too long.
    parts = re.split(r"([0-9]+)", key)
    ordered: list[object] = []
    for n, part in enumerate(parts):
        digits = part.lstrip("0")
        ordered.append((len(digits), digits) if n % 2 else part)
    return (tuple(ordered), key)
