"""Messages between ranks: frozen dataclasses, and the one codec between them and JSON values.

A message is a dataclass whose type hints define its content: None, bool, int, float, str, bytes, `Literal`, `StrEnum`,
lists, tuples, sets, mappings with text or integers as keys, further messages, and unions of these. `Any` stands for a
JSON value, which is passed on as it is. `decode` checks every value: a message may come from another version of the
package. This module does not define messages.

A field that is mostly the same as in earlier messages is `recurring`. Where both sides remember such fields, a digest
takes its place (`ranks.recurring`).
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import enum
import functools
import hashlib
import itertools
import json
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Literal, Protocol, TypeAlias, Union, get_args, get_origin

from reshard.errors import GroupError

_Decoder: TypeAlias = Callable[[Any], Any]

_MAX_SHOWN = 80
_SCALARS = (type(None), bool, int, str)
_FORM = "reshard form"  # in the metadata of a recurring field: its form in messages, or None
_DIGESTS = "_digests_of_fields"  # in the instance of a message


class Form(Protocol):
    """The form of a value in messages: a message of its own, which is shorter."""

    @classmethod
    def of(cls, value: Any) -> Any:
        """The form of a value."""

    def value(self) -> Any:
        """The value again."""


def recurring(form: type[Form] | None = None) -> Mapping[str, Any]:
    """The metadata of a field of a message that is mostly the same as in earlier ones. Its value does not change.

    Args:
        form: its form in messages; None: as by its type hint.
    """
    return {_FORM: form}


Parts: TypeAlias = "dict[str, Callable[[], Any]]"
"""Recurring fields by digest: each is a function that returns the JSON value."""


@dataclasses.dataclass
class Known:
    """Recurring fields that the receiver of a message knows, by digest.

    Attributes:
        decoded: those of earlier messages; what is decoded of `sent` is added.
        sent: the JSON values of those that have come with this message.
    """

    decoded: dict[str, Any] = dataclasses.field(default_factory=dict)
    sent: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_known: ContextVar[Known | None] = ContextVar("known", default=None)  # to the decoders, while they decode


def encode(value: object, parts: Parts | None = None) -> Any:
    """A message as a JSON value: dataclasses are mappings by field name, named tuples are lists, bytes are base64.

    Args:
        value: a message, or a value of any type that is allowed in a message.
        parts: receives the recurring fields by digest, and the message has the digests in their places. None: the
            message has them itself.

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
        return [one if type(one) in _SCALARS else encode(one, parts) for one in value]
    if dataclasses.is_dataclass(value):
        forms = _forms(kind)
        return {
            name: _recurring(value, name, forms[name], parts) if name in forms else encode(getattr(value, name), parts)
            for name in _field_names(kind)
        }
    if isinstance(value, Mapping):
        return {str(key) if type(key) is int else key: encode(one, parts) for key, one in value.items()}
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, frozenset | set):
        return [encode(one) for one in sorted(value, key=repr)]
    if isinstance(value, str | int | float):
        return value
    raise TypeError(f"a message between ranks cannot hold a {kind.__name__}")


def _recurring(message: Any, name: str, form: type[Form] | None, parts: Parts | None) -> Any:
    """A recurring field: its digest if there are `parts`, to which it is added, else its JSON value."""

    def encoded() -> Any:
        value = getattr(message, name)
        return encode(value if form is None else form.of(value))

    if parts is None:
        return encoded()
    # A plan is kept by the program that made it, and its digest with it.
    known: dict[str, str] = message.__dict__.setdefault(_DIGESTS, {})
    kind = type(message)
    if name not in known:
        known[name] = digest_of(f"{kind.__module__}.{kind.__qualname__}.{name}", encoded())
    parts[known[name]] = encoded
    return known[name]


def digest_of(field: str, value: Any) -> str:
    """The digest of a recurring field.

    Args:
        field: the class of the message and the field: no digest is that of fields of two types.
        value: its JSON value.

    Example:
        >>> digest_of("Facts.names", ["w"])
        'Facts.names e9522d8d3f2e77eeab8bb3a21e8fcd4a'
    """
    return f"{field} {hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()}"


def decode(of: Any, value: Any, known: Known | None = None) -> Any:
    """The message that is encoded as a JSON value.

    Args:
        of: the type of the message, or any type that is allowed in a message, such as `tuple[int, ...]`.
        value: the result of `encode`, after JSON encoding and decoding.
        known: recurring fields in whose places the message has digests.

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
    token = _known.set(known)
    try:
        return _decoder(of)(value)
    except _MismatchError as error:
        path = "".join(reversed(error.path)).removeprefix(".")
        where = f" `{path}`" if path else ""
        raise GroupError(
            f"a message of another rank:{where} {error}", hint="do all ranks run the same version of reshard?"
        ) from None
    finally:
        _known.reset(token)


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
def _forms(message: type) -> Mapping[str, type[Form] | None]:
    """The recurring fields of a message, and the form of each."""
    return {one.name: one.metadata[_FORM] for one in dataclasses.fields(message) if _FORM in one.metadata}


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
    forms = _forms(of)
    decoders = [_recurred(hints[name], forms[name]) if name in forms else _decoder(hints[name]) for name in names]

    def message(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _MismatchError(value, of.__name__)
        if len(value) != len(names) or not all(map(value.__contains__, names)):
            odd = ", ".join(sorted(map(repr, value.keys() ^ set(names))))
            raise _MismatchError(list(value), f"the fields of {of.__name__}: {odd} is missing or unknown")
        return of(*_parts(decoders, map(value.__getitem__, names), lambda at: f".{names[at]}"))

    return message


def _recurred(hint: Any, form: type[Form] | None) -> _Decoder:
    """The decoder of a recurring field: of its JSON value, or of its digest, which is a text as no JSON value of it."""
    plain = _decoder(hint if form is None else form)

    def whole(value: Any) -> Any:
        if form is None:
            return plain(value)
        try:
            return plain(value).value()
        except IndexError:
            raise _MismatchError(value, f"numbers below those of the names in {form.__name__}") from None

    def field(value: Any) -> Any:
        if type(value) is not str:
            return whole(value)
        known = _known.get()
        if known is None or (value not in known.decoded and value not in known.sent):
            raise _MismatchError(value, "the digest of what is known")
        if value not in known.decoded:
            known.decoded[value] = whole(known.sent[value])
        return known.decoded[value]

    return field


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
