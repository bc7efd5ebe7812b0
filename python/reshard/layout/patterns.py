"""Patterns over tensor keys: globs, regular expressions, the index `{i}` of a `place` entry, and the order of keys.

A pattern is a glob over the whole key in which `*` and `?` are special (both match dots), or `re:` and a regular
expression that must match the whole key. This module knows nothing of meshes or tensors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.words import show

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["IndexPattern", "Matcher", "Pattern", "expand_braces", "glob_of", "natural_order"]

_MAX_PATTERN = 4096  # characters
_MAX_INDEX_DIGITS = 18
_INDEX = "{i}"
_MAX_EXPANDED = 1024  # patterns that one with braces stands for
_MAX_EXPANDED_LENGTH = 1 << 16  # characters of all of them
_MAX_DEPTH = 16
_RANGE = re.compile(r"(-?[0-9]{1,9})\.\.(-?[0-9]{1,9})(?:\.\.(-?[0-9]{1,9}))?")
_DIGITS = re.compile(r"[0-9]+")


@dataclass(frozen=True)
class Pattern:
    """One compiled pattern.

    Attributes:
        text: as written.
        key: the only key it matches, or None if it holds a wildcard or is a regular expression.
        regex: matches the whole key.

    Example:
        >>> Pattern.compile("*.bias").matches("layers.0.attn.bias")
        True
    """

    text: str
    key: str | None
    regex: re.Pattern[str]

    @classmethod
    def compile(cls, text: str) -> Pattern:
        """Compile one pattern.

        Raises:
            ValueError: it is empty, too long, or its regular expression does not compile; the text says which.
        """
        _refuse_length(text)
        if text.startswith("re:"):
            return cls(text, None, _compile_re(text[3:]))
        special = "*" in text or "?" in text
        return cls(text, None if special else text, re.compile(_glob_regex(text), re.DOTALL))

    def matches(self, key: str) -> bool:
        """Whether it matches the whole key."""
        return self.regex.fullmatch(key) is not None


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
    before: re.Pattern[str] | None  # of a glob: what stands left and right of the index
    after: re.Pattern[str] | None
    whole: re.Pattern[str] | None  # of a regular expression

    @classmethod
    def compile(cls, text: str) -> IndexPattern:
        """Compile a pattern with one `{i}`.

        Raises:
            ValueError: it does not hold `{i}` exactly once, or is no pattern.
        """
        _refuse_length(text)
        if text.count(_INDEX) != 1:
            raise ValueError(f"{show(text)} must hold `{_INDEX}` exactly once")
        if text.startswith("re:"):
            return cls(text, None, None, _compile_re(text[3:].replace(_INDEX, "(?:[0-9]+)")))
        before, after = text.split(_INDEX)
        return cls(
            text, re.compile(_glob_regex(before), re.DOTALL), re.compile(_glob_regex(after), re.DOTALL), whole=None
        )

    def indices(self, key: str) -> set[int]:
        """Every value that `{i}` can have when the pattern matches the key; more than one means that it is ambiguous.

        Raises:
            ValueError: an index is too long to be one.
        """
        if self.whole is not None:
            return self._indices_re(key)
        assert self.before is not None
        assert self.after is not None
        found: set[int] = set()
        for run in _DIGITS.finditer(key):
            ends = [e for e in range(run.start() + 1, run.end() + 1) if self.after.fullmatch(key, e)]
            if not ends:
                continue
            for start in range(run.start(), run.end()):
                if not self.before.fullmatch(key, 0, start):
                    continue
                for end in ends:
                    if end > start:
                        found.add(_index(key[start:end]))
                    if len(found) > 1:
                        return found
        return found

    def _indices_re(self, key: str) -> set[int]:
        """A regular expression cannot be taken apart: try each number that the key holds in the place of `{i}`."""
        assert self.whole is not None
        found: set[int] = set()
        if self.whole.fullmatch(key) is None:
            return found
        numbers = {
            key[start:end]
            for run in _DIGITS.finditer(key)
            for start in range(run.start(), run.end())
            for end in range(start + 1, min(run.end(), start + _MAX_INDEX_DIGITS) + 1)
        }
        for number in sorted(numbers, key=lambda n: (len(n), n)):
            if _compile_re(self.text[3:].replace(_INDEX, f"(?:{number})")).fullmatch(key):
                found.add(_index(number))
                if len(found) > 1:
                    break
        if not found:
            raise ValueError(f"the index in {show(key)} has more than {_MAX_INDEX_DIGITS} digits")
        return found


class Matcher:
    """Finds the first of many pattern lists that matches a key; lists of thousands of plain keys cost a look-up.

    Example:
        >>> matcher = Matcher([[Pattern.compile("a.w")], [Pattern.compile("*.b"), Pattern.compile("*.w")]])
        >>> matcher.find("a.w"), matcher.find("c.w"), matcher.find("c")
        ((0, 0), (1, 1), None)
    """

    def __init__(self, groups: Sequence[Sequence[Pattern]]) -> None:
        self._place = [(g, e) for g, group in enumerate(groups) for e in range(len(group))]
        self._exact: dict[str, int] = {}
        self._wild: list[tuple[int, Pattern]] = []
        for n, (g, e) in enumerate(self._place):
            pattern = groups[g][e]
            if pattern.key is not None:
                self._exact.setdefault(pattern.key, n)
            else:
                self._wild.append((n, pattern))

    def find(self, key: str) -> tuple[int, int] | None:
        """`(group, entry within it)` of the first pattern that matches the key, or None."""
        exact = self._exact.get(key, len(self._place))
        for n, pattern in self._wild:
            if n > exact:
                break
            if pattern.matches(key):
                return self._place[n]
        return self._place[exact] if exact < len(self._place) else None


def glob_of(key: str) -> str:
    r"""A pattern that matches exactly this key, whatever characters it holds.

    Example:
        >>> glob_of("a.w"), glob_of("odd*name")
        ('a.w', 're:odd\\*name')
    """
    special = any(c in key for c in "*?{") or key.startswith("re:")
    return f"re:{re.escape(key)}" if special else key


def expand_braces(text: str) -> list[str]:
    """The patterns that one with braces stands for, as in a shell: `{a,b}` is one of several, `{0..7}` one of a range.

    Braces may be nested. Those without a comma or a range, such as `{i}`, and those that have no counterpart stand for
    themselves. A regular expression (`re:`) is not expanded.

    Raises:
        ValueError: it is too long, or what it stands for has such braces itself; they are more than 1024 patterns or
            65536 characters, or nested more than 16 deep.

    Example:
        >>> expand_braces("*.{q,k,v}_proj.{weight,bias}")[:3]
        ['*.q_proj.weight', '*.q_proj.bias', '*.k_proj.weight']
        >>> expand_braces("h.{08..10}.w"), expand_braces("layers.{i}.*")
        (['h.08.w', 'h.09.w', 'h.10.w'], ['layers.{i}.*'])
    """
    _refuse_length(text)
    if text.startswith("re:"):
        return [text]
    expanded = _Braces(text).expanded()
    for one in expanded:
        # Such as of `{{1,2}..3}`: written down and read again, it would be other patterns.
        if one != text and "{" in one and _Braces(one).expanded() != [one]:
            raise ValueError(f"{show(text)} stands for {show(one)}, whose braces would have to be expanded once more")
    return expanded


class _Braces:
    """Braces of one text. Counterparts are found once, so that time is linear in what comes out."""

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
        """All texts for which the part from `start` to `end` stands."""
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
        """What one pair of braces stands for; None: itself."""
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
    # Even places hold text, odd ones digits. Digits compare by length, then as text: no number is too long for that.
    parts = re.split(r"([0-9]+)", key)
    ordered: list[object] = []
    for n, part in enumerate(parts):
        digits = part.lstrip("0")
        ordered.append((len(digits), digits) if n % 2 else part)
    return (tuple(ordered), key)


def _refuse_length(text: str) -> None:
    if not text:
        raise ValueError("a pattern cannot be empty")
    if len(text) > _MAX_PATTERN:
        raise ValueError(f"a pattern has at most {_MAX_PATTERN} characters, this one {len(text)}")


def _glob_regex(glob: str) -> str:
    """The regular expression of a glob.

    What stands between two stars is taken at its first occurrence, and never tried again (an atomic group): for a glob
    the leftmost choice is as good as any, and time stays linear however many stars there are.
    """
    first, *rest = ("".join("." if c == "?" else re.escape(c) for c in chunk) for chunk in glob.split("*"))
    if not rest:
        return first
    *middle, last = rest
    return first + "".join(f"(?>.*?{chunk})" for chunk in middle if chunk) + ".*" + last


def _compile_re(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"{show(f're:{text}')} does not compile: {error}") from None
    except (RecursionError, OverflowError, MemoryError):
        raise ValueError(f"{show(f're:{text}')} does not compile: it is nested too deeply or too large") from None


def _index(digits: str) -> int:
    if len(digits) > _MAX_INDEX_DIGITS:
        raise ValueError(f"the index {show(digits)} has more than {_MAX_INDEX_DIGITS} digits")
    return int(digits)
