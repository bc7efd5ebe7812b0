"""Messages between ranks: frozen dataclasses, and the one codec between them and JSON values.

A message is a dataclass whose type hints define its content: None, bool, int, float, str, bytes, `Literal`, `StrEnum`,
lists, tuples, sets, mappings with text or integers as keys, further messages, and unions of these. `Any` stands for a
JSON value, which is passed on as it is. `decode` checks every value: a message may come from another version of the
package. This module does not define messages.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import enum
import functools
import itertools
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin

from reshard.errors import GroupError

_Decoder: TypeAlias = Callable[[Any], Any]

_MAX_SHOWN = 80
_SCALARS = (type(None), bool, int, str)


def encode(value: object) -> Any:
    """A message as a JSON value: dataclasses are mappings by field name, named tuples are lists, bytes are base64.

    Args:
        value: a message, or a value of any type that is allowed in a message.

    Raises:
        TypeError: the type of a value is not allowed in a message.

    Example:
        >>> encode({3: (1, b"ab")})
        {'3': [1, 'YWI=']}
    """
    kind: Any = type(value)
    if kind in _SCALARS or kind is float:
        return value
    if isinstance(value, list | tuple):
        return [one if type(one) in _SCALARS else encode(one) for one in value]
    if dataclasses.is_dataclass(value):
        return {name: encode(getattr(value, name)) for name in _field_names(kind)}
    if isinstance(value, Mapping):
        return {str(key) if type(key) is int else key: encode(one) for key, one in value.items()}
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, frozenset | set):
        return [encode(one) for one in sorted(value, key=repr)]
    if isinstance(value, str | int | float):
        return value
    raise TypeError(f"a message between ranks cannot hold a {kind.__name__}")


def decode(of: Any, value: Any) -> Any:
    """The message that is encoded as a JSON value.

    Args:
        of: the type of the message, or any type that is allowed in a message, such as `tuple[int, ...]`.
        value: the result of `encode`, after JSON encoding and decoding.

    Raises:
        GroupError: the value is not of this type; the message names the field.

    Example:
        >>> decode(dict[int, tuple[int, bytes]], {"3": [1, "YWI="]})
        {3: (1, b'ab')}
        >>> decode(list[int], [1, "2"])
        Traceback (most recent call last):
        reshard.errors.GroupError: a message of another rank: `[1]` is '2', expected int
        hint: do all ranks run the same version of reshard?
    """
    try:
        return _decoder(of)(value)
    except _MismatchError as error:
        path = "".join(reversed(error.path)).removeprefix(".")
        where = f" `{path}`" if path else ""
        raise GroupError(
            f"a message of another rank:{where} {error}", hint="do all ranks run the same version of reshard?"
        ) from None


class _MismatchError(Exception):
    """A value does not match its type hint; callers prepend the path to it."""

    def __init__(self, value: object, expected: str) -> None:
        shown = repr(value)
        super().__init__(f"is {shown if len(shown) <= _MAX_SHOWN else shown[:_MAX_SHOWN] + '...'}, expected {expected}")
        self.path: list[str] = []


@functools.cache
def _field_names(message: type) -> tuple[str, ...]:
    return tuple(one.name for one in dataclasses.fields(message) if one.init)


@functools.cache
def _decoder(of: Any) -> _Decoder:
    """The function that decodes values of a type hint; created once per type hint."""
    origin, arguments = get_origin(of), get_args(of)
    if of is Any or of is object:
        return lambda value: value
    if of is None or of in _SCALARS:
        return _scalar(type(None) if of is None else of)
    if of is float:
        return _float
    if of is bytes:
        return _bytes
    if origin is Literal:
        return _literal(arguments)
    if origin in (Union, types.UnionType):
        return _union(of)
    if dataclasses.is_dataclass(of):
        return _message(of)
    if isinstance(of, type) and issubclass(of, enum.StrEnum):
        return _member(of)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return _row([_decoder(one) for one in arguments])
    if isinstance(of, type) and issubclass(of, tuple) and hasattr(of, "_make"):
        return _named_tuple(of)
    if origin in (tuple, list, frozenset, Sequence, Collection):
        return _sequence(
            list if origin is list else frozenset if origin is frozenset else tuple, _decoder(arguments[0])
        )
    if origin in (dict, Mapping) and arguments[0] in (str, int):
        return _mapping(arguments[0], _decoder(arguments[1]))
    raise TypeError(f"a message between ranks cannot hold a {of}")


def _member(kind: type[enum.StrEnum]) -> _Decoder:
    def member(value: Any) -> Any:
        try:
            return kind(value)
        except ValueError:
            raise _MismatchError(value, " or ".join(repr(one.value) for one in kind)) from None

    return member


def _scalar(kind: type) -> _Decoder:
    def scalar(value: Any) -> Any:
        if type(value) is not kind:
            raise _MismatchError(value, "None" if kind is type(None) else kind.__name__)
        return value

    return scalar


def _float(value: Any) -> float:
    if type(value) not in (float, int):
        raise _MismatchError(value, "float")
    return float(value)


def _bytes(value: Any) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise _MismatchError(value, "base64") from None


def _literal(accepted: tuple[Any, ...]) -> _Decoder:
    def literal(value: Any) -> Any:
        if not any(type(value) is type(one) and value == one for one in accepted):
            raise _MismatchError(value, " or ".join(map(repr, accepted)))
        return value

    return literal


def _union(of: Any) -> _Decoder:
    alternatives = [_decoder(one) for one in get_args(of) if one is not type(None)]
    has_none = len(alternatives) < len(get_args(of))

    def union(value: Any) -> Any:
        if value is None and has_none:
            return None
        errors = []
        for one in alternatives:
            try:
                return one(value)
            except _MismatchError as error:
                errors.append(error)
        deepest = max(errors, key=lambda error: len(error.path))
        raise deepest if deepest.path else _MismatchError(value, str(of))

    return union


def _message(of: Any) -> _Decoder:
    hints = typing.get_type_hints(of)
    names = _field_names(of)
    decoders = [_decoder(hints[name]) for name in names]

    def message(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _MismatchError(value, of.__name__)
        if len(value) != len(names) or not all(map(value.__contains__, names)):
            odd = ", ".join(sorted(map(repr, value.keys() ^ set(names))))
            raise _MismatchError(list(value), f"the fields of {of.__name__}: {odd} is missing or unknown")
        return of(*_parts(decoders, map(value.__getitem__, names), lambda at: f".{names[at]}"))

    return message


def _named_tuple(of: Any) -> _Decoder:
    hints, names = typing.get_type_hints(of), of._fields
    decoders = [_decoder(hints[name]) for name in names]

    def named(value: Any) -> Any:
        if not isinstance(value, list) or len(value) != len(decoders):
            raise _MismatchError(value, f"the {len(decoders)} fields of {of.__name__}")
        return of._make(_parts(decoders, value, lambda at: f".{names[at]}"))

    return named


def _row(decoders: Sequence[_Decoder]) -> _Decoder:
    def row(value: Any) -> Any:
        if not isinstance(value, list) or len(value) != len(decoders):
            raise _MismatchError(value, f"a list of {len(decoders)}")
        return tuple(_parts(decoders, value, "[{}]".format))

    return row


def _sequence(kind: Callable[[Any], Any], decoder: _Decoder) -> _Decoder:
    def sequence(value: Any) -> Any:
        if not isinstance(value, list):
            raise _MismatchError(value, "a list")
        return kind(_parts(itertools.repeat(decoder), value, "[{}]".format))

    return sequence


def _mapping(key_kind: type, decoder: _Decoder) -> _Decoder:
    def mapping(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _MismatchError(value, "a mapping")
        keys = list(value) if key_kind is str else _parts(itertools.repeat(_integer), value, lambda _: " key")
        decoded = _parts(itertools.repeat(decoder), value.values(), lambda at: f"[{keys[at]!r}]")
        return dict(zip(keys, decoded, strict=True))

    return mapping


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise _MismatchError(text, "an integer") from None


def _parts(decoders: Iterable[_Decoder], values: Iterable[Any], step: Callable[[int], str]) -> list[Any]:
    """The parts of a value, decoded; `step` names the part of an index for an error."""
    decoded: list[Any] = []
    try:
        for decoder, value in zip(decoders, values):  # noqa: B905  an endless `repeat` of one decoder
            decoded.append(decoder(value))
    except _MismatchError as error:
        error.path.append(step(len(decoded)))
        raise
    return decoded
