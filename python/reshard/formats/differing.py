"""Which field of nested state differs between ranks, for messages.

Each rank knows its own state only. The ranks exchange the fields as short texts. If the first field that differs is an
array, or a long list or text, they exchange digests of its parts until its first element that differs is found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from reshard.formats.state import digest_of
from reshard.values.words import ranks_named, show

if TYPE_CHECKING:
    from collections.abc import Iterator

Fields = dict[str, list[str]]
"""Two texts of each field by its path: the kind of a long value and its digest, or nothing and a short value."""

Gather = Callable[[Fields], Sequence[tuple[Fields, Sequence[int]]]]
"""Exchanges the fields of all ranks: distinct ones, with the ranks that have the same."""

MISSING: Any = object()
"""The state of a rank that has none, and is not compared."""

_MAX_ITEMS = 64  # of a list, each with its own path
_MAX_SHOWN = 60  # characters of a value
_N_PARTS = 256  # of a long value, in one exchange
_N_CHARACTERS = 24  # of a text, from the first that differs on


def difference(value: Any, gather: Gather, name: str = "") -> str:
    """The first field whose values differ between ranks, with the values. All ranks call this.

    Args:
        value: the state of this rank: dicts, lists, arrays, tensors and plain values; or `MISSING`.
        gather: exchanges fields; the result is the same on all ranks.
        name: the path of the state; empty: paths begin below it.

    Raises:
        ArgumentError: a value cannot be saved.

    Example:
        >>> def two_ranks(fields):
        ...     return [(fields, [0]), (fields | {"lr": ["", "0.25"]}, [1])]
        >>> difference({"step": 3, "lr": 0.5}, two_ranks)
        '`lr` is 0.5 on rank 0, 0.25 on rank 1'
    """
    own = {} if value is MISSING else dict(_leaves(value, name))
    path, found = _first(gather({where: _texts(one, where) for where, one in own.items()}))
    if not found:
        return "the order of its entries"
    kinds = {kind for kind, _ in found}
    if len(kinds) > 1 or kinds == {""}:
        return _sentence(path, found)
    items = _items(own[path]) if path in own else None
    start, end = 0, 0 if items is None else len(items)
    while True:
        size = max(1, -(-(end - start) // _N_PARTS))
        parts = [] if items is None else [(n, min(n + size, end)) for n in range(start, end, size)]
        part, _ = _first(gather({f"{n}:{m}": ["", digest_of(items[n:m], path)] for n, m in parts}))  # type: ignore[index]
        start, end = map(int, part.split(":"))  # also on ranks that do not have this field
        if end - start == 1:
            break
    place = {} if items is None else {path + _place(own[path], start): ["", _element(own[path], items, start)]}
    where, values = _first(gather(place))
    return _sentence(where, values)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, one in value.items():
            yield from _leaves(one, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple) and 0 < len(value) <= _MAX_ITEMS:
        for number, one in enumerate(value):
            yield from _leaves(one, f"{path}[{number}]")
    else:
        yield path, value


def _texts(value: Any, path: str) -> list[str]:
    """The kind of a long value and its digest, or nothing and the value."""
    is_array = hasattr(value, "dtype") and hasattr(value, "shape")
    shown = "" if is_array else repr(value)
    if 0 < len(shown) <= _MAX_SHOWN:
        return ["", shown]
    digest = digest_of(value, path or "state")
    if is_array:
        return [f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}", digest]
    kind = type(value).__name__
    return ["", f"a {kind}, digest {digest}"] if _items(value) is None else [f"a {kind} of length {len(value)}", digest]


def _items(value: Any) -> Any:
    """The elements of a long value in their order, as something with a length and slices; None: it has no order."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return value.reshape(-1)
    return value if isinstance(value, list | tuple | str | bytes) else None


def _place(value: Any, number: int) -> str:
    """Where an element of a long value is, after its path."""
    if isinstance(value, str | bytes | list | tuple):
        return f"[{number}{':' if isinstance(value, str | bytes) else ''}]"
    index: list[int] = []
    for n in reversed(tuple(value.shape)):
        number, rest = divmod(number, n)
        index.append(rest)
    return f"[{', '.join(map(str, reversed(index)))}]" if index else ""


def _element(value: Any, items: Any, number: int) -> str:
    if isinstance(value, str | bytes):
        return repr(items[number : number + _N_CHARACTERS])
    one = items[number]
    shown = repr(one.item() if hasattr(one, "item") else one)
    # A list may have any items, and there is more than one NaN.
    return (
        shown if len(shown) <= _MAX_SHOWN and "nan" not in shown else f"{shown[:_MAX_SHOWN]}, digest {digest_of(one)}"
    )


def _first(known: Sequence[tuple[Fields, Sequence[int]]]) -> tuple[str, dict[tuple[str, str], list[int]]]:
    """The first field that differs, and the ranks that have each value of it; nothing: none differs."""
    compared = [(fields, ranks) for fields, ranks in known if fields]
    for path in dict.fromkeys(path for fields, _ in compared for path in fields):
        found: dict[tuple[str, str], list[int]] = {}
        for fields, ranks in compared:
            kind, text = fields.get(path, ("", "missing"))
            found.setdefault((kind, text), []).extend(ranks)
        if len(found) > 1:
            return path, found
    return "", {}


def _sentence(path: str, found: Mapping[tuple[str, str], Sequence[int]]) -> str:
    values = ", ".join(f"{kind or text} on {ranks_named(ranks)}" for (kind, text), ranks in found.items())
    return f"{show(path)} is {values}" if path else f"it is {values}"
