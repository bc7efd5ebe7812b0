"""Which field of nested state differs between ranks, for messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reshard.formats.state import digest_of
from reshard.values.words import ranks_named, show

_MAX_ITEMS = 64  # of a list, each with its own path
_MAX_SHOWN = 60  # characters of a value


def fields_of(value: object, name: str = "") -> dict[str, str]:
    """The fields of nested state with their values as short texts, by path.

    Args:
        value: dicts, lists and plain values. A value with a long text, and an array, has a digest.
        name: its path.

    Raises:
        ArgumentError: a value cannot be saved.

    Example:
        >>> fields_of({"best": 0.5, "betas": [0.9, 0.99], "counts": {"a": "x"}})
        {'best': '0.5', 'betas[0]': '0.9', 'betas[1]': '0.99', 'counts.a': "'x'"}
    """
    found: dict[str, str] = {}
    if isinstance(value, Mapping) and value:
        for key, one in value.items():
            found |= fields_of(one, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple) and 0 < len(value) <= _MAX_ITEMS:
        for number, one in enumerate(value):
            found |= fields_of(one, f"{name}[{number}]")
    else:
        text = "" if hasattr(value, "dtype") else repr(value)
        found[name] = text if 0 < len(text) <= _MAX_SHOWN else f"a {type(value).__name__}, digest {digest_of(value)}"
    return found


def first_difference(known: Sequence[tuple[Mapping[str, str], Sequence[int]]]) -> str:
    """The first field whose values differ between ranks, with the values.

    Args:
        known: the result of `fields_of` of one rank, and the ranks that have the same.

    Example:
        >>> first_difference([({"step": "3", "best": "0.5"}, [0]), ({"step": "3", "best": "0.25"}, [1, 2])])
        '`best` is 0.5 on rank 0, 0.25 on ranks 1, 2'
    """
    for name in dict.fromkeys(name for fields, _ in known for name in fields):
        ranks_of: dict[str, list[int]] = {}
        for fields, ranks in known:
            ranks_of.setdefault(fields.get(name, "missing"), []).extend(ranks)
        if len(ranks_of) > 1:
            values = ", ".join(f"{text} on {ranks_named(ranks)}" for text, ranks in ranks_of.items())
            return f"{show(name)} is {values}" if name else f"it is {values}"
    return "the order of its entries"
