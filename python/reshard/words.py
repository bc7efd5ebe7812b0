"""Foreign text in messages: shown so that it can do no harm, listed so that it stays short; the words that are near it.

Knows nothing of what the texts mean.
"""

from __future__ import annotations

import difflib
import itertools
from typing import TYPE_CHECKING

from reshard.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["check_text", "listed", "nearest", "show"]

_MAX_SHOWN = 256  # characters of a foreign text in a message


def check_text(value: object, what: str) -> None:
    """Refuse what is no text, or text that no file can hold.

    Raises:
        ArgumentError: so it is; the message says what it was meant to be.
    """
    if not isinstance(value, str):
        raise ArgumentError(f"a {what} must be text, found {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(f"a {what} has no UTF-8 form: {error}") from error


def nearest(text: str, candidates: Iterable[str], n: int = 3, *, cutoff: float = 0.6) -> list[str]:
    """Up to `n` candidates that are spelt like the text (at least by `cutoff`, 0 to 1), nearest first."""
    # difflib is quadratic in the length of the texts; an error message is not worth more than this.
    near = difflib.get_close_matches(text[:200], [c[:200] for c in candidates][:1000], n=n, cutoff=cutoff)
    return list(dict.fromkeys(near))


def show(text: str) -> str:
    r"""Foreign text in backticks, safe to print: what could drive a terminal is escaped, what is long is cut.

    Example:
        >>> show("a" + chr(27) + "[2J")
        '`a\\x1b[2J`'
    """
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:_MAX_SHOWN])
    return f"`{shown}{'...' if len(text) > _MAX_SHOWN else ''}`"


def ranks_named(ranks: Iterable[int]) -> str:
    """Some ranks, as they are named in a message.

    Example:
        >>> ranks_named([3]), ranks_named([0, 2])
        ('rank 3', 'ranks 0, 2')
    """
    several = list(ranks)
    return f"rank{'s' * (len(several) != 1)} {listed(several)}"


def listed(items: Iterable[object], most: int = 8, *, n_items: int | None = None) -> str:
    """The first of some names or numbers, and how many more there are.

    Args:
        items: what is listed; foreign texts are given through `show`.
        most: so many are named.
        n_items: how many there are, where nobody may count them: then no more than `most` are looked at.

    Example:
        >>> listed(range(3)), listed(range(100), 3), listed(range(10**18), 2, n_items=10**18)
        ('0, 1, 2', '0, 1, 2 and 97 more', '0, 1 and 999999999999999998 more')
    """
    items = iter(items)
    first = list(itertools.islice(items, most))
    n_more = sum(1 for _ in items) if n_items is None else n_items - len(first)
    return ", ".join(map(str, first)) + (f" and {n_more} more" if n_more else "")
