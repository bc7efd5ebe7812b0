"""Sizes in a name map: expressions of integers and names with `*` and `/`, such as `heads / kv_heads * dim`.

There are no parentheses and no precedence: expressions are evaluated from left to right, and every quotient must be an
integer. Names are sizes of the map or, in the definition of a size, fields of a model's `config.json`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAX_SIZE = 1 << 62
_MAX_TERMS = 16
_TERM = re.compile(r"[0-9]{1,18}|[A-Za-z_][A-Za-z0-9_]{0,63}")
_EXPRESSION = re.compile(rf"\s*({_TERM.pattern})((?:\s*[*/]\s*(?:{_TERM.pattern}))*)\s*")
_STEP = re.compile(rf"\s*([*/])\s*({_TERM.pattern})")


@dataclass(frozen=True)
class Expression:
    """A checked expression.

    Attributes:
        text: as written.
        terms: `(operator, number or name)`, the first operator is `*`.

    Example:
        >>> Expression.parse("heads / kv_heads * 64").value({"heads": 32, "kv_heads": 8})
        256
    """

    text: str
    terms: tuple[tuple[str, int | str], ...]

    @classmethod
    def parse(cls, text: str | int) -> Expression:
        """Parse an expression.

        Raises:
            ValueError: the text is not an expression.
        """
        match = _EXPRESSION.fullmatch(str(text)) if len(str(text)) <= 512 else None
        if match is None:
            raise ValueError(
                f"{show(str(text))} is not a size, expected an integer, or names and integers with `*` and `/`"
            )
        terms = [("*", match[1]), *_STEP.findall(match[2])]
        if len(terms) > _MAX_TERMS:
            raise ValueError(f"{show(str(text))} has more than {_MAX_TERMS} terms")
        return cls(str(text), tuple((sign, int(term) if term[0].isdigit() else term) for sign, term in terms))

    @property
    def names(self) -> tuple[str, ...]:
        """The names in the expression."""
        return tuple(term for _, term in self.terms if isinstance(term, str))

    def value(self, known: Mapping[str, int]) -> int:
        """Evaluate the expression.

        Raises:
            KeyError: a name is not known.
            ValueError: a quotient is not an integer, or the value is too large.
        """
        value = 1
        for sign, term in self.terms:
            number = term if isinstance(term, int) else known[term]
            if sign == "*":
                value *= number
            elif number == 0 or value % number:
                raise ValueError(f"{show(self.text)}: {value} is not divisible by {number}")
            else:
                value //= number
            if value >= _MAX_SIZE:
                raise ValueError(f"{show(self.text)} is too large")
        return value
