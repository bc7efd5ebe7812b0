"""Checks of single values of a configuration file: fields, lists, names and numbers.

Each error names the file, the line and the field, what was expected and what was found.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from reshard.documents.strict_yaml import Lines, Step, at_path
from reshard.errors import LayoutError, ReshardError
from reshard.values.words import nearest, show

T = TypeVar("T")

_MAX_NAME = 256  # characters of an axis or a join


@dataclass(frozen=True)
class At:
    """The position of a value in a file, for messages.

    Attributes:
        source: path of the file; None: the value does not come from a file.
        lines: the line of each value.
        path: mapping keys and list indices that lead to the value.
        what: the kind of file.
        error_class: the class of errors about the value.
    """

    source: str | None
    lines: Lines
    path: tuple[Step, ...] = ()
    what: str = "layout"
    error_class: type[ReshardError] = LayoutError

    def __truediv__(self, step: Step) -> At:
        return At(self.source, self.lines, (*self.path, step), self.what, self.error_class)

    def error(self, message: str, *, hint: str | None = None) -> ReshardError:
        """The error about this value."""
        line = next((self.lines[p] for n in range(len(self.path), -1, -1) if (p := self.path[:n]) in self.lines), None)
        where = self.source or self.what
        if line is not None:
            where += f", line {line}"
        return self.error_class(f"{where}: {at_path(self.path)}{message}", path=self.source, hint=hint)


def read_fields(
    at: At, value: object, *, required: Sequence[str] = (), optional: Sequence[str] = ()
) -> Mapping[str, object]:
    """Check that a value is a mapping with all `required` fields, and no other fields than these and `optional`.

    Args:
        at: position of the value.
        value: the value.
        required: names of required fields.
        optional: names of optional fields.
    """
    known = [*required, *optional]
    if not isinstance(value, Mapping):
        raise at.error(f"expected a mapping with {and_words([f'`{name}`' for name in known])}, found {found(value)}")
    for name in value:
        if name not in known:
            near = nearest(str(name), known, n=1)
            hint = f"did you mean `{near[0]}`?" if near else None
            where = at / name if isinstance(name, str | int) else at
            accepted = and_words([f"`{n}`" for n in known])
            raise where.error(f"unknown field {show(str(name))}; accepted are {accepted}", hint=hint)
    for name in required:
        if name not in value:
            raise at.error(f"`{name}` is missing")
    return value


def read_items(at: At, value: object, parse: Callable[[At, object], T]) -> list[T]:
    """Parse the items of a list.

    Args:
        at: position of the list.
        value: the list.
        parse: called as `parse(position, item)` for each item.
    """
    if not is_list(value):
        raise at.error(f"expected a list, found {found(value)}")
    return [parse(at / n, item) for n, item in enumerate(cast("Sequence[object]", value))]


def read_by_dim(at: At, value: object, parse: Callable[[At, object], T]) -> dict[int, T]:
    """Parse the values of a mapping by dim. Dims may be text, as in JSON.

    Args:
        at: position of the mapping.
        value: the mapping.
        parse: called as `parse(position, item)` for each value.
    """
    if not isinstance(value, Mapping):
        raise at.error(f"expected dims and their values, as in {{0: ...}}, found {found(value)}")
    by_dim: dict[int, T] = {}
    for key, item in value.items():
        if isinstance(key, str) and re.fullmatch("[0-9]{1,4}", key):
            dim = int(key)
        elif isinstance(key, int) and not isinstance(key, bool) and key >= 0:
            dim = key
        else:
            raise at.error(f"expected a dim, counted from 0, found {found(key)}")
        if dim in by_dim:
            raise at.error(f"dim {dim} is repeated")
        by_dim[dim] = parse(at / key, item)
    return by_dim


def read_name(at: At, value: object) -> str:
    """Check that a value is a name: 1 to 256 printable characters."""
    if not isinstance(value, str) or not value or len(value) > _MAX_NAME or not value.isprintable():
        raise at.error(f"expected a name of 1 to {_MAX_NAME} printable characters, found {found(value)}")
    return value


def read_integer(at: At, value: object, minimum: int) -> int:
    """Check that a value is an integer of at least `minimum` and below 2^63; numpy integers are accepted.

    Args:
        at: position of the value.
        value: the value.
        minimum: smallest accepted value.
    """
    number: int | None = None
    if not isinstance(value, bool):
        try:
            number = operator.index(value)  # type: ignore[arg-type]  # any object is allowed
        except TypeError:
            number = None
    if number is None or not minimum <= number < 1 << 63:
        raise at.error(f"expected an integer of at least {minimum}, found {found(value)}")
    return number


def is_list(value: object) -> bool:
    """Whether the value is a list or a tuple."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def found(value: object) -> str:
    """The value, for a message."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str | int | float):
        return show(str(value))
    if isinstance(value, Mapping):
        return "a mapping"
    return "a list" if is_list(value) else f"a {type(value).__name__}"


def and_words(words: Sequence[str]) -> str:
    """The words with commas and a last `and`."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
