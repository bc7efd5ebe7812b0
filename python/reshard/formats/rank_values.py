"""Values that are no tensors, which several ranks have saved under one name.

A rank has its own value. One that has none, such as a rank of a run on more ranks, gets that of the others only if all
of them have the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard._core import Opaque
from reshard.errors import ArgumentError, MismatchError
from reshard.formats.state import digest_of
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Iterable


def agreed(name: str, values: Iterable[tuple[int, Any]], path: str) -> Any:
    """The one value that all ranks have.

    Args:
        name: its name.
        values: the number of each rank that has it, and its value; at least one.
        path: the checkpoint, for the error.

    Raises:
        MismatchError: they have different values.

    Example:
        >>> agreed("step", [(0, 7), (1, 7)], "run")
        7
    """
    (first, value), *others = values
    for rank, other in others:
        if _digest(other) != _digest(value):
            raise MismatchError(
                f"{show(path)}: ranks saved different values of {show(name)}: {_shown(value)} on rank {first}, "
                f"{_shown(other)} on rank {rank}",
                key=name,
                path=path,
                hint="a rank without a value of its own cannot choose: resume on the number of ranks that saved; are "
                "these files of one save?",
            )
    return value


def _digest(value: Any) -> str:
    try:
        return digest_of(_plain(value))
    except ArgumentError:  # of a class that is not saved
        return f"{type(value).__name__} {value!r}"


def _plain(value: Any) -> Any:
    """The value with objects of other classes as what they are made of."""
    if isinstance(value, Opaque):
        parts = (value.arguments, value.state, value.items, value.appended)
        return (value.name, *map(_plain, parts))
    if type(value) is dict:
        return {key: _plain(one) for key, one in value.items()}
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}, {text[:40]}..."
