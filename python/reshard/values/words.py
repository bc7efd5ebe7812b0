"""Text for messages: escapes untrusted text, shortens lists, finds similar words."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

from reshard.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
_MAX_SHOWN = 256  # characters of untrusted text in a message


def check_text(value: object, what: str) -> None:
    """Check that a value is text that can be encoded as UTF-8.

    Args:
        value: the value.
        what: description of the value, for the message.

    Raises:
        ArgumentError: it is not.
    """
    if not isinstance(value, str):
        raise ArgumentError(f"a {what} must be text, found {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(f"a {what} cannot be encoded as UTF-8: {error}") from None


def nearest(text: str, candidates: Iterable[str], n: int = 3, *, cutoff: float = 0.6) -> list[str]:
    """Candidates with a similar spelling, most similar first.

    Args:
        text: the text.
        candidates: the candidates.
        n: maximum number of results.
        cutoff: minimum similarity, 0 to 1.
    """
    import difflib  # noqa: PLC0415  slow to import, and only needed for hints

    # difflib is quadratic in the length of the texts, so limit it.
    near = difflib.get_close_matches(text[:200], [c[:200] for c in candidates][:1000], n=n, cutoff=cutoff)
    return list(dict.fromkeys(near))


def show(text: str) -> str:
    r"""Untrusted text in backticks, safe to print: control characters are escaped, and long text is shortened.

    Example:
        >>> show("a" + chr(27) + "[2J")
        '`a\\x1b[2J`'
    """
    shown = text[:_MAX_SHOWN]
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)
    return f"`{shown}{'...' if len(text) > _MAX_SHOWN else ''}`"


def hub_hint(path: str) -> str | None:
    """A hint for a path without anything, if it may be the name of a repository of the Hugging Face Hub.

    Example:
        >>> hub_hint("Qwen/Qwen3-0.6B"), hub_hint("/data/run")
        ('a checkpoint is a local path; to download a model: `hf download Qwen/Qwen3-0.6B --local-dir FOLDER`', None)
    """
    if not _REPOSITORY.fullmatch(path):
        return None
    return f"a checkpoint is a local path; to download a model: `hf download {path} --local-dir FOLDER`"


def counted(n: int, noun: str) -> str:
    """A number with its noun.

    Example:
        >>> counted(1, "file"), counted(2, "file")
        ('1 file', '2 files')
    """
    return f"{n} {noun}{'' if n == 1 else 's'}"


def one_line(message: str) -> str:
    r"""A message of several lines, such as one with a line for each candidate, as a reason within another one.

    Example:
        >>> one_line("there is none:\n  step-2: torn\n  step-1: empty")
        'there is none: step-2: torn; step-1: empty'
    """
    first, *rest = message.split("\n")
    return " ".join([first, "; ".join(line.strip() for line in rest)]) if rest else message


def ranks_named(ranks: Iterable[int]) -> str:
    """Some ranks, for a message.

    Example:
        >>> ranks_named([3]), ranks_named([0, 2])
        ('rank 3', 'ranks 0, 2')
    """
    several = list(ranks)
    return f"rank{'s' * (len(several) != 1)} {listed(several)}"


def listed(items: Iterable[object], most: int = 8, *, n_items: int | None = None) -> str:
    """A list of names or numbers for a message: the first ones, and the number of the others.

    Args:
        items: the items; escape untrusted text by `show`.
        most: maximum number of items that are listed.
        n_items: the number of items, for very long iterables: then only the first `most` items are read.

    Example:
        >>> listed(range(3)), listed(range(100), 3), listed(range(10**18), 2, n_items=10**18)
        ('0, 1, 2', '0, 1, 2 and 97 more', '0, 1 and 999999999999999998 more')
    """
    items = iter(items)
    first = list(itertools.islice(items, most))
    n_more = sum(1 for _ in items) if n_items is None else n_items - len(first)
    return ", ".join(map(str, first)) + (f" and {n_more} more" if n_more else "")
