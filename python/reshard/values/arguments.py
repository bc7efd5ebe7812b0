"""Checks of the arguments of public functions, by the names of their parameters: a wrong type is an `ArgumentError`.

A parameter or a field of options takes the same kind of value wherever it has the same name, so one table serves all of
them. The meaning of a value is checked where it is used; here only values of a wrong type or range are refused.
Functions that all ranks call collectively check their arguments where an error of one rank reaches the others.
"""

from __future__ import annotations

import errno
import functools
import inspect
import math
import operator
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from reshard.errors import ArgumentError, StorageError
from reshard.values.words import check_text, show

P = ParamSpec("P")
T = TypeVar("T")

_MAX_SECONDS = 1e9  # threading refuses to wait for much longer
_MAX_NAME_BYTES = 255
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
    """Check the arguments of every call of a function.

    Example:
        >>> @checked
        ... def wait(timeout: float = 1.0) -> float:
        ...     return timeout
        >>> wait(timeout=None)
        Traceback (most recent call last):
        reshard.errors.ArgumentError: `timeout` is None, expected a number of seconds from 0 on
    """
    return checked_as()(function)


def checked_as(**own: Callable[[str, object], None]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """As `checked`, with other checks of some parameters, such as `path=check_paths`.

    Args:
        own: a check of each of these parameters, called with its name and its value.

    Example:
        >>> @checked_as(path=check_paths)
        ... def count(path: object) -> int:
        ...     return len(path) if isinstance(path, list) else 1
        >>> count(["a.bin", "b.bin"])
        2
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:
                return function(*args, **kwargs)  # Python's own message names the function
            for name, value in bound.arguments.items():
                check_one = own.get(name) or _CHECKS.get(name)
                if check_one is not None and not (value is None and signature.parameters[name].default is None):
                    check_one(name, value)
            return function(*args, **kwargs)

        return call

    return decorate


def check(**arguments: object) -> None:
    """Check arguments by their names; None is accepted for all of them.

    Raises:
        ArgumentError: a value has a type that a parameter of this name does not accept.
        StorageError: a path has a component that is longer than any file system accepts.

    Example:
        >>> check(path="model.safetensors", threads=4, progress=None)
    """
    check_given(**{name: value for name, value in arguments.items() if value is not None})


def check_given(**arguments: object) -> None:
    """Check arguments by their names; None is checked as any value is. Raises as `check`."""
    for name, value in arguments.items():
        _CHECKS[name](name, value)


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


def _path(name: str, value: object) -> None:
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
    if any(len(component) > _MAX_NAME_BYTES for component in encoded.split(b"/")) or len(encoded) > 4095:
        hint = (
            "it holds lines: give the path of a file, or a mapping (`yaml.safe_load(text)`)" if "\n" in path else None
        )
        raise StorageError(
            f"`{name}` is {show(path)}: the name is too long", path=path, errno=errno.ENAMETOOLONG, hint=hint
        )


def check_paths(name: str, value: object) -> None:
    """Refuse what is neither a path nor a list of paths."""
    if not isinstance(value, list | tuple):
        _path(name, value)
        return
    if not value:
        raise ArgumentError(f"`{name}` is an empty list, expected at least one path")
    for item in value:
        _path(name, item)


def _described(name: str, value: object) -> None:
    """A path, a mapping, or a value of one of this package's classes."""
    if isinstance(value, str | os.PathLike):
        _path(name, value)
    elif not isinstance(value, Mapping) and not type(value).__module__.startswith("reshard."):
        raise _wrong(name, value, "a path, a mapping, or an object of this package that is made of one")


def _own(name: str, value: object) -> None:
    if not type(value).__module__.startswith("reshard."):
        raise _wrong(name, value, "an object of this package")


def check_shapes(name: str, value: object) -> None:
    """Refuse a value that is not a mapping of keys to shapes."""
    _mapping(name, value)
    for key, shape in value.items():  # type: ignore[attr-defined]
        check_text(key, f"key of `{name}`")
        is_list = type(shape) is tuple or (isinstance(shape, Sequence) and not isinstance(shape, str | bytes))
        if not is_list or not all(type(extent) is int and 0 <= extent < _MAX_INTEGER for extent in shape):
            raise ArgumentError(f"`{name}` gives {show(key)} no shape: expected whole numbers from 0 on", key=key)


def _mapping(name: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise _wrong(name, value, "a mapping")


def _text_mapping(name: str, value: object) -> None:
    _mapping(name, value)
    for key, item in value.items():  # type: ignore[attr-defined]
        check_text(key, f"key of `{name}`")
        check_text(item, f"value of `{name}`")


def _sizes_by_name(name: str, value: object) -> None:
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


def _integer_or_none(name: str, value: object) -> None:
    if value is not None:
        _integer(name, value)


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


def _pair_of_integers(name: str, value: object) -> None:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise _wrong(name, value, "two whole numbers, as in (0, 4)")
    for item in value:
        _integer(name, item)


def _trained(name: str, value: object) -> None:
    if type(value).__name__ not in ("bool", "bool_"):
        check_texts(name, value)


def _size(name: str, value: object) -> None:
    if not isinstance(value, str):
        _integer(name, value)
    else:
        _text(name, value)


def check_choice(name: str, value: object, *accepted: str) -> None:
    """Refuse a value that is not one of the accepted texts."""
    if not isinstance(value, str) or value not in accepted:
        raise _wrong(name, value, " or ".join(f'"{one}"' for one in accepted))


def _choice(*accepted: str) -> Callable[[str, object], None]:
    return lambda name, value: check_choice(name, value, *accepted)


def _count(name: str, value: object) -> None:
    _integer(name, value)
    if value < 1:  # type: ignore[operator]
        raise _wrong(name, value, "a whole number from 1 on")


def _option(name: str, value: object) -> None:
    """Text, or a group of options: an object of its class or a mapping, see `reshard.options`."""
    if not isinstance(value, str | Mapping) and not type(value).__module__.startswith("reshard."):
        raise _wrong(name, value, "text, a mapping, or an object of this package that is made of one")


_CHECKS: dict[str, Callable[[str, object], None]] = {
    **dict.fromkeys(("root", "path", "src", "dst", "filename", "a", "b", "folder", "model_files", "base"), _path),
    **dict.fromkeys(
        ("layout", "config", "names", "strategy", "strategy_a", "strategy_b", "name_or_config", "name_map"),
        _described,
    ),
    "run": _own,
    "rank_local": _own,
    **dict.fromkeys(("keys", "optimizer_keys", "only", "drop"), check_texts),
    **dict.fromkeys(("may_differ", "may_be_infinite", "include", "exclude"), _patterns),
    "missing": _choice("error", "keep"),
    **dict.fromkeys(("unexpected", "other_optimizer"), _choice("error", "skip")),
    "shape": _choice("error", "grow", "trim", "skip"),
    **dict.fromkeys(("model", "tensors"), _mapping),
    **dict.fromkeys(
        ("environment", "coordinate", "optimizer", "extra", "shapes", "metrics", "rename", "out"), _mapping
    ),
    **dict.fromkeys(("pad", "trim"), _sizes_by_name),
    "metadata": _text_mapping,
    "plan": _text_mapping,
    "name": _text,
    "best": _metric_and_number,
    "max_shard_size": _size,
    "on_load": _choice("full", "touched", "structure"),
    "modes": _choice("mindspore-transformers"),
    "loads_in": _choice("transformers", "peft", "diffusers"),
    "save_trainable_params": _trained,
    "drift": _count,
    "max_failures": _count,
    "grace_s": check_seconds,
    "hf_every": _count,
    **dict.fromkeys(("format", "verify"), _option),
    "device": _device,
    **dict.fromkeys(("part", "to", "method", "framework", "backend", "entry", "prefix", "suffix", "name_regex"), _text),
    **dict.fromkeys(("format_a", "format_b"), _text),
    **dict.fromkeys(("rank", "iteration", "threads", "sink_size", "steps_per_epoch"), _integer),
    **dict.fromkeys(("keep", "keep_every"), _integer_or_none),
    **dict.fromkeys(("progress", "ready", "after", "after_publish"), _function),
    "on_event": _functions,
    **dict.fromkeys(
        (
            "after_save",
            "allow_fresh",
            "blocking",
            "async_save",
            "check_replicas",
            "compatible",
            "copy",
            "check_names",
            "dedup",
            "direct",
            "dry_run",
            "fresh_optimizer",
            "durable",
            "integrated_save",
            "leave_out_frozen",
            "links",
            "merge",
            "only_save_strategy",
            "overlap",
            "overwrite",
            "private",
            "reverse",
            "rollback",
            "save_network_params",
            "save_on_exception",
            "strict",
            "strict_format",
            "takeover",
        ),
        _flag,
    ),
    **dict.fromkeys(("group", "health"), _object),
    "signals": _integers,
    "since": _integer_or_none,
    "share": _pair_of_integers,
    "timeout": check_seconds,
}


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
