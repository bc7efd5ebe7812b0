"""Checks of the arguments of public functions, by their annotations: a value of a wrong type is an `ArgumentError`.

A `Literal` says which texts are accepted; `_CHECKS` has the checks of other types; `argument_types` has the types of
which a plain one does not say enough. An argument of a type that its module imports for the type checker alone is
checked where it is used. So is the meaning of every value: here a wrong type or range is refused.
Functions that all ranks call collectively check their arguments where an error of one rank reaches the others.
"""

from __future__ import annotations

import builtins
import collections.abc
import errno
import functools
import inspect
import math
import operator
import os
import re
import sys
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, ParamSpec, Self, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from reshard.errors import ArgumentError, StorageError
from reshard.values.argument_types import (
    AnyText,
    Count,
    Described,
    Device,
    GroupLike,
    Patterns,
    PlaceLike,
    Rows,
    Seconds,
    Size,
)
from reshard.values.words import check_text, show

P = ParamSpec("P")
T = TypeVar("T")
Check: TypeAlias = Callable[[str, object], None]

_MAX_SECONDS = 1e9  # threading refuses to wait for much longer
_MAX_NAME_BYTES = 255
_MAX_PATH_BYTES = 4095
_URL = re.compile("[A-Za-z][A-Za-z0-9]+://")
_MAX_INTEGER = 1 << 63
_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT", 1)
}
# A letter alone is a power of 1024, as for `dd`, `sort` and Slurm.
_UNITS |= {case(prefix): _UNITS[f"{prefix}iB"] for prefix in "KMGT" for case in (str.upper, str.lower)}
_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?) ?([A-Za-z]{0,3})")


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """Check the arguments of every call of a function by the types in its signature.

    Example:
        >>> @checked
        ... def wait(timeout: Seconds = 1.0) -> float:
        ...     return timeout
        >>> wait(timeout=None)
        Traceback (most recent call last):
        reshard.errors.ArgumentError: `timeout` is None, expected a number of seconds from 0 on
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # Python's own message names the function
        _check(checks_of(function), bound.arguments)
        return function(*args, **kwargs)

    return call


def check(function: Callable[..., object], **arguments: object) -> None:
    """Check some arguments of a function by the types in its signature.

    Args:
        function: a function with these parameters.
        arguments: values by the names of the parameters.

    Raises:
        ArgumentError: a value has another type than its parameter.
        StorageError: a path has a component that is longer than any file system accepts.

    Example:
        >>> def read(path: str | os.PathLike[str], threads: int | None = None) -> None: ...
        >>> check(read, path="model.safetensors", threads=None)
    """
    _check(checks_of(inspect.unwrap(function)), arguments)


def check_fields(instance: object) -> None:
    """Check the fields of a dataclass by their types. Raises as `check`."""
    of: Any = type(instance)
    checks = checks_of(of)
    _check(checks, {name: getattr(instance, name) for name in checks})


def _check(checks: Mapping[str, Check], values: Mapping[str, object]) -> None:
    for name, value in values.items():
        if name in checks:
            checks[name](name, value)


@functools.cache
def checks_of(function: Any) -> dict[str, Check]:
    """The checks of the parameters of a function, or of the fields of a class, by their names."""
    own = vars(sys.modules[function.__module__])
    names = _Names(vars(builtins) | vars(collections.abc) | {"os": os} | own | dict.fromkeys(_DESCRIBED, Described))
    found = {}
    for name, annotation in get_type_hints(function, {}, names, include_extras=True).items():
        check_one = check_of(annotation)
        if check_one is not None and name != "return":
            found[name] = check_one
    return found


class _Names(dict[str, Any]):
    """The names in annotations."""

    def __getitem__(self, name: str) -> Any:
        found = self.get(name)
        return _Unknown() if found is None or isinstance(found, str) else found


class _Unknown:
    """A type that only the type checker knows, or a type made of it: its values are checked where they are used."""

    def __getattr__(self, _: str) -> Self:
        return self

    def __getitem__(self, _: object) -> Self:
        return self

    def __or__(self, _: object) -> Self:
        return self

    __ror__ = __or__


def check_of(of: Any) -> Check | None:
    """The check of the values of a type; None: there is none, and the values are checked where they are used.

    Args:
        of: the type, as in an annotation.

    Example:
        >>> check_of(Literal["error", "skip"] | None)("missing", "kip")
        Traceback (most recent call last):
        reshard.errors.ArgumentError: `missing` is 'kip', expected "error" or "skip"
    """
    is_union = get_origin(of) in (Union, types.UnionType)
    alternatives = [one for one in (get_args(of) if is_union else [of]) if one is not type(None)]
    found = _CHECKS.get(frozenset(alternatives)) or _CHECKS.get(frozenset(map(_without_items, alternatives)))
    if len(alternatives) == 1 and get_origin(alternatives[0]) is Literal:
        found = functools.partial(_choice, get_args(alternatives[0]))
    elif len(alternatives) == 1 and isinstance(alternatives[0], type) and "reshard." in alternatives[0].__module__:
        found = functools.partial(_instance, alternatives[0])
    if found is None or not is_union or type(None) not in get_args(of):
        return found
    return lambda name, value: None if value is None else found(name, value)


def _without_items(of: Any) -> Any:
    return str if getattr(of, "__metadata__", None) == (AnyText,) else get_origin(of) or of


def check_seconds(name: str, value: object) -> None:
    """Refuse a value that is not a number of seconds."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or math.isnan(value) or value < 0:  # type: ignore[arg-type,operator]
        raise _wrong(name, value, "a number of seconds from 0 on")
    if value > _MAX_SECONDS:  # type: ignore[operator]
        raise _wrong(name, value, f"at most {_MAX_SECONDS:.0f} seconds", "give a large number, such as 1e9")


def _wrong(name: str, value: object, expected: str, hint: str | None = None) -> ArgumentError:
    is_plain = value is None or isinstance(value, bool | float | str)
    found = show(repr(value))[1:-1] if is_plain else f"of type {type(value).__name__}"
    return ArgumentError(f"`{name}` is {found}, expected {expected}", hint=hint)


def check_path(name: str, value: object) -> None:
    """Refuse what is not a path, or one that no file system accepts."""
    try:
        path = os.fspath(value)  # type: ignore[call-overload]
    except TypeError:
        raise _wrong(name, value, "a path: text or an os.PathLike") from None
    if not isinstance(path, str):
        raise _wrong(name, value, "a path as text, not as bytes")
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        raise _wrong(name, path, "a path: no file system has such characters") from None
    if b"\0" in encoded:
        raise StorageError(
            f"`{name}` is {show(path)}: a path cannot hold the character NUL", path=path, errno=errno.EINVAL
        )
    is_url = _URL.match(path) is not None  # the signature in a URL can be longer than a name
    if not is_url and (max(map(len, encoded.split(b"/"))) > _MAX_NAME_BYTES or len(encoded) > _MAX_PATH_BYTES):
        hint = (
            "it holds lines: give the path of a file, or a mapping (`yaml.safe_load(text)`)" if "\n" in path else None
        )
        raise StorageError(
            f"`{name}` is {show(path)}: the name is too long", path=path, errno=errno.ENAMETOOLONG, hint=hint
        )


def check_paths(name: str, value: object) -> None:
    """Refuse what is neither a path nor a list of paths."""
    if not isinstance(value, list | tuple):
        check_path(name, value)
        return
    if not value:
        raise ArgumentError(f"`{name}` is an empty list, expected at least one path")
    for item in value:
        check_path(name, item)


def check_described(name: str, value: object) -> None:
    """Refuse what is neither a path, a mapping, nor an object of this package."""
    if isinstance(value, str | os.PathLike):
        check_path(name, value)
    elif not isinstance(value, Mapping) and not type(value).__module__.startswith("reshard."):
        raise _wrong(name, value, "a path, a mapping, or an object of this package that is made of one")


def check_shapes(name: str, value: object) -> None:
    """Refuse a value that is not a mapping of keys to shapes."""
    _mapping(name, value)
    for key, shape in value.items():  # type: ignore[attr-defined]
        if type(key) is not str or not key.isascii():
            check_text(key, f"key of `{name}`")
        is_list = type(shape) is tuple or (isinstance(shape, Sequence) and not isinstance(shape, str | bytes))
        for extent in shape if is_list else (None,):
            if type(extent) is not int or not 0 <= extent < _MAX_INTEGER:
                raise ArgumentError(f"`{name}` gives {show(key)} no shape: expected whole numbers from 0 on", key=key)


def _mapping(name: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise _wrong(name, value, "a mapping")


def _text_mapping(name: str, value: object) -> None:
    _mapping(name, value)
    for key, item in value.items():  # type: ignore[attr-defined]
        check_text(key, f"key of `{name}`")
        check_text(item, f"value of `{name}`")


def _rows(name: str, value: object) -> None:
    example = f'a mapping of names to sizes, as in {name}={{"lm_head.": "vocab_size"}}'
    if not isinstance(value, Mapping):
        raise _wrong(name, value, example)
    for key, item in value.items():
        if not isinstance(key, str) or not key:
            raise _wrong(name, key, f"names of tensors or beginnings of names: {example}")
        if not isinstance(item, str) and (
            isinstance(plain_integer(item), bool) or type(plain_integer(item)) is not int
        ):
            raise _wrong(f"{name}[{key!r}]", item, "a number of rows, or a field of config.json such as vocab_size")


def _metric_and_number(name: str, value: object) -> None:
    if not isinstance(value, tuple | list) or len(value) != 2 or not isinstance(value[0], str):
        raise _wrong(name, value, 'the name of a metric and a number, as in ("loss", 3)')
    _integer(name, value[1])


def _device(name: str, value: object) -> None:
    if not isinstance(value, str | int) and not hasattr(value, "type"):
        raise _wrong(name, value, 'a device, such as "cpu"')


def check_texts(name: str, value: object) -> None:
    """Refuse a value that is neither text nor a list or set of texts."""
    if isinstance(value, str):
        check_text(value, f"value of `{name}`")
        return
    if not isinstance(value, Collection) or isinstance(value, bytes | bytearray | memoryview):
        raise _wrong(name, value, "a list or a set of names")
    for item in value:
        check_text(item, f"name in `{name}`")


def _patterns(name: str, value: object) -> None:
    if isinstance(value, str):
        raise _wrong(name, value, 'a list of patterns, such as ["<pattern>"]')
    check_texts(name, value)


def _text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise _wrong(name, value, "text")
    check_text(value, f"value of `{name}`")


def _integer(name: str, value: object) -> None:
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise _wrong(name, value, "a whole number") from None
    if isinstance(value, bool):
        raise _wrong(name, value, "a whole number")
    if not -_MAX_INTEGER <= number < _MAX_INTEGER:
        raise ArgumentError(f"`{name}` has more than 63 bits, expected a whole number of at most 63 bits")


def plain_integer(value: Any) -> Any:
    """An integer of another package, such as one of numpy, as an int; any other value unchanged.

    Example:
        >>> import numpy as np
        >>> plain_integer(np.int64(5)), plain_integer(True), plain_integer("5")
        (5, True, '5')
    """
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


def _function(name: str, value: object) -> None:
    if not callable(value) or isinstance(value, type):
        raise _wrong(name, value, "a function")


def _functions(name: str, value: object) -> None:
    functions = value if isinstance(value, list | tuple) else [value]
    if not all(callable(one) and not isinstance(one, type) for one in functions):
        raise _wrong(name, value, "a function, or a list of functions")


def _flag(name: str, value: object) -> None:
    if type(value).__name__ not in ("bool", "bool_"):  # numpy's is called either
        raise _wrong(name, value, "True or False")


def _integers(name: str, value: object) -> None:
    if not isinstance(value, Collection) or isinstance(value, str | bytes | Mapping):
        raise _wrong(name, value, "a list of whole numbers")
    for item in value:
        _integer(name, item)


def _object(name: str, value: object) -> None:
    try:
        bool(value == 0)
    except (TypeError, ValueError):
        raise _wrong(name, value, "an object with the methods that its documentation names") from None


def _place(name: str, value: object) -> None:
    if value is not None and not all(callable(getattr(value, method, None)) for method in ("n_shares", "run")):
        raise _wrong(name, value, "where work is done, such as `reshard.ray.Ray()`")


def _pair_of_integers(name: str, value: object) -> None:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise _wrong(name, value, "two whole numbers, as in (0, 4)")
    for item in value:
        _integer(name, item)


def _flag_or_texts(name: str, value: object) -> None:
    if type(value).__name__ not in ("bool", "bool_"):
        check_texts(name, value)


def _size(name: str, value: object) -> None:
    if not isinstance(value, str):
        _integer(name, value)
    else:
        _text(name, value)


def _instance(of: type, name: str, value: object) -> None:
    if not isinstance(value, of):
        raise _wrong(name, value, f"a `{of.__name__}`")


def _choice(accepted: Collection[str], name: str, value: object) -> None:
    if not isinstance(value, str) or value not in accepted:
        raise _wrong(name, value, " or ".join(f'"{one}"' for one in accepted))


def _count(name: str, value: object) -> None:
    _integer(name, value)
    if value < 1:  # type: ignore[operator]
        raise _wrong(name, value, "a whole number from 1 on")


_DESCRIBED = ("ConfigLike", "LayoutLike", "NamesLike", "StrategyLike")
"""Types of modules above this one: a path, a mapping or an object that is made of one."""

_CHECKS: dict[frozenset[Any], Check] = {
    frozenset([bool]): _flag,
    frozenset([int]): _integer,
    frozenset([str]): _text,
    frozenset([str, os.PathLike]): check_path,
    frozenset([str, os.PathLike, Sequence]): check_paths,
    frozenset([str, os.PathLike, Mapping]): check_described,
    frozenset([Collection]): check_texts,
    frozenset([str, Sequence]): check_texts,
    frozenset([bool, Collection]): _flag_or_texts,
    frozenset([Sequence[int]]): _integers,
    frozenset([tuple[int, int]]): _pair_of_integers,
    frozenset([tuple[str, int]]): _metric_and_number,
    frozenset([Mapping]): _mapping,
    frozenset([Mapping[str, str]]): _text_mapping,
    frozenset([Callable]): _function,
    frozenset([Callable, Sequence]): _functions,
    frozenset([Count]): _count,
    frozenset([Described]): check_described,
    frozenset([Device]): _device,
    frozenset([GroupLike]): _object,
    frozenset([Patterns]): _patterns,
    frozenset([PlaceLike]): _place,
    frozenset([Rows]): _rows,
    frozenset([Seconds]): check_seconds,
    frozenset([Size]): _size,
}
"""The check of a type, or of a union of types: as it is annotated, or without the types of its items."""


def parse_size(size: str | int) -> int:
    """A number of bytes from text such as "4GiB" or "4G" (2**30), "500MB" (10**6) or "4096", or from an integer.

    Args:
        size: the text or the number; a fraction of a byte is dropped.

    Returns:
        Bytes, at least 1.

    Raises:
        ArgumentError: it is no such text, or less than one byte, or more than 2**63 - 1.

    Example:
        >>> parse_size("4GiB"), parse_size("4G"), parse_size("500MB"), parse_size(4096)
        (4294967296, 4294967296, 500000000, 4096)
    """
    hint = 'write it as "4GiB" or "4G" (2**30 bytes), "500MB" (10**6 bytes) or a number of bytes'
    size = plain_integer(size)
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if match is None or match[2] not in _UNITS:
            raise ArgumentError(f"{show(size)} is not a size", hint=hint)
        from fractions import Fraction  # noqa: PLC0415  slow to import, and rarely needed

        n_bytes = int(Fraction(match[1]) * _UNITS[match[2]])
    elif isinstance(size, int) and not isinstance(size, bool):
        n_bytes = size
    else:
        raise ArgumentError(f"a size is text or an integer, not {type(size).__name__}", hint=hint)
    if not 1 <= n_bytes < 1 << 63:
        raise ArgumentError(f"a size is from 1 to 2**63 - 1 bytes: {size}", hint=hint)
    return n_bytes
