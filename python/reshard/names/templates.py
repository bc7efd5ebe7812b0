"""Templates for tensor names with indices: `layers.{i}.w` matches these names with any integer for `{i}`.

Numbers have no leading zeros. So formatting a template with the numbers of a match returns the same name, and renaming
and renaming back is the identity.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from reshard import _core
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

T = TypeVar("T")

_MAX_TEMPLATE = 1024  # characters
_MAX_VARIABLES = 8
_VARIABLE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]{0,63})\}")
_NUMBER = "(0|[1-9][0-9]{0,17})"
_DIGITS = re.compile(r"[0-9]+")


@dataclass(frozen=True)
class Template:
    """One compiled template.

    Attributes:
        text: as written.
        variables: the names in braces, in order.

    Example:
        >>> template = Template.compile("layers.{i}.w")
        >>> template.match("layers.12.w"), template.format({"i": 3})
        ({'i': 12}, 'layers.3.w')
    """

    text: str
    variables: tuple[str, ...]
    _compiled: _core.Expression = field(repr=False, compare=False)

    @classmethod
    def compile(cls, text: str) -> Template:
        """Compile a template.

        Raises:
            ValueError: the text is empty or too long, a brace is not part of a variable, or a variable is repeated or
                directly follows another.
        """
        if not text or not text.isprintable():
            raise ValueError(f"expected a name of printable characters, found {show(text)}")
        if len(text) > _MAX_TEMPLATE:
            raise ValueError(f"a name has at most {_MAX_TEMPLATE} characters, this one {len(text)}")
        # Items at odd indices are variables, the others the text between them.
        parts = _VARIABLE.split(text)
        variables = tuple(parts[1::2])
        for literal in parts[::2]:
            if "{" in literal or "}" in literal:
                raise ValueError(f"{show(text)}: a brace that is not part of a `{{variable}}`")
        if "" in parts[2:-1:2]:
            raise ValueError(f"{show(text)}: two adjacent indices are ambiguous")
        if len(variables) > _MAX_VARIABLES or len(set(variables)) != len(variables):
            raise ValueError(f"{show(text)}: expected different indices, at most {_MAX_VARIABLES}")
        regex = "".join(_NUMBER if n % 2 else re.escape(part) for n, part in enumerate(parts))
        return cls(text, variables, _core.Expression(regex))

    def match(self, name: str) -> dict[str, int] | None:
        """The numbers by variable, if the template matches the name; else None."""
        numbers = self._compiled.groups(name)
        return None if numbers is None else dict(zip(self.variables, map(int, filter(None, numbers)), strict=True))

    def format(self, numbers: Mapping[str, int]) -> str:
        """The name for these numbers."""
        return _VARIABLE.sub(lambda match: str(numbers[match[1]]), self.text)


@dataclass(frozen=True)
class TemplateMatch(Generic[T]):
    """A template that matches a name.

    Attributes:
        slot: prefix of the name before the match, such as `adam_m.` for optimizer state of the matched tensor; or "".
        value: the value of the template.
        numbers: the numbers by variable.
    """

    slot: str
    value: T
    numbers: dict[str, int]


class Templates(Generic[T]):
    """Finds the first of many templates that matches a name, with one dictionary look-up.

    Example:
        >>> templates = Templates([(Template.compile("h.{i}.w"), "weight"), (Template.compile("h.{i}.b"), "bias")])
        >>> templates.find("h.7.b").value, templates.find("h.7.c")
        ('bias', None)
    """

    def __init__(self, templates: list[tuple[Template, T]]) -> None:
        self._by_skeleton: dict[str, list[tuple[Template, T]]] = {}
        for template, value in templates:
            # A template and the names that it matches are equal if each number is replaced by `#`.
            self._by_skeleton.setdefault(_skeleton(_VARIABLE.sub("0", template.text)), []).append((template, value))

    def find(self, name: str) -> TemplateMatch[T] | None:
        """The first template that matches the whole name."""
        for template, value in self._by_skeleton.get(_skeleton(name), ()):
            if (numbers := template.match(name)) is not None:
                return TemplateMatch("", value, numbers)
        return None

    def find_state(self, name: str) -> Iterator[tuple[str, TemplateMatch[T]]]:
        """The name as `<slot>.<rest>`: every rest that a template matches, longest first, with the match."""
        at = name.find(".")
        while at >= 0:
            rest = name[at + 1 :]
            if (found := self.find(rest)) is not None:
                yield rest, TemplateMatch(name[: at + 1], found.value, found.numbers)
            at = name.find(".", at + 1)


def _skeleton(name: str) -> str:
    return _DIGITS.sub("#", name)
