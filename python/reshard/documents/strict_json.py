"""A strict parser for small JSON files from untrusted sources.

It accepts JSON of RFC 8259 in UTF-8, without duplicate names, NaN, Infinity, byte order mark and unpaired surrogates,
and with limits for integers and nesting. So two readers that accept a file read the same values. The core decodes
`metadata.json`, which can have hundreds of MB, under the same rules. The caller checks the values.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any, NoReturn

from reshard.errors import DamagedFileError
from reshard.storage.location import locate
from reshard.values.words import show

if TYPE_CHECKING:
    import os

_MAX_DEPTH = 16
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_LONG_NUMBER = re.compile("[0-9]{19}")  # any shorter one fits 64 bits


def read_json(
    path: str | os.PathLike[str], max_bytes: int, *, max_values: int | None = None, follow_links: bool = False
) -> object:
    """Read a JSON file.

    Args:
        path: the file.
        max_bytes: maximum size of the file in bytes.
        max_values: maximum number of values, for large files; see `parse_json`.
        follow_links: whether the last component of the path may be a symbolic link.

    Returns:
        The value: dict, list, str, int, float, bool or None.

    Raises:
        CheckpointNotFoundError: the file does not exist.
        DamagedFileError: the file is not valid JSON, not a regular file or too large; the message names the file.
        StorageError: the operating system failed to read it.
    """
    return parse_json(locate(path).read_small(max_bytes, follow_links=follow_links), str(path), max_values=max_values)


def parse_json(data: bytes, name: str, *, max_depth: int = _MAX_DEPTH, max_values: int | None = None) -> object:
    """Parse a JSON value.

    Args:
        data: the content of the file.
        name: name of the file, for messages.
        max_depth: maximum nesting depth of lists and objects.
        max_values: maximum number of values. Before the text is parsed, its commas and brackets are counted, those in
            texts too: a value of 2 bytes takes 50 times its size in memory.

    Raises:
        DamagedFileError: the content is not valid JSON.

    Example:
        >>> parse_json(b'{"a": [1, 2.5, null]}', "x.json")
        {'a': [1, 2.5, None]}
    """
    if data.startswith(b"\xef\xbb\xbf"):
        raise DamagedFileError(f"{show(name)} starts with a byte order mark, expected plain UTF-8", path=name)
    if max_values is not None and sum(map(data.count, (b",", b"[", b"{"))) > max_values:
        raise DamagedFileError(f"{show(name)} holds more than {max_values} values", path=name)
    try:
        # Decode here, because `json` also accepts bytes in UTF-16 and UTF-32.
        text = data.decode()
        integer = _integer if _LONG_NUMBER.search(text) else int  # a call for each integer takes long in large files
        value: object = json.loads(
            text, object_pairs_hook=_object, parse_int=integer, parse_float=_float, parse_constant=_constant
        )
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()  # raises for an unpaired surrogate
    except UnicodeEncodeError:
        raise DamagedFileError(
            f"{show(name)} holds text that is not valid Unicode (unpaired surrogate)", path=name
        ) from None
    except UnicodeDecodeError as error:
        raise DamagedFileError(f"{show(name)} is not UTF-8: byte {error.start}", path=name) from None
    except RecursionError:
        raise _too_deep(name, max_depth) from None
    except ValueError as error:
        raise DamagedFileError(f"{show(name)} is not valid JSON: {error}", path=name) from None
    level: list[Any] = [value] if isinstance(value, dict | list) else []
    for _ in range(max_depth):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return value
    raise _too_deep(name, max_depth)


def _too_deep(name: str, max_depth: int) -> DamagedFileError:
    return DamagedFileError(f"{show(name)} nests deeper than {max_depth} levels", path=name)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the name {show(twice)} is repeated in one object")
    return result


def _integer(text: str) -> int:
    value = int(text) if len(text) <= 20 else 1 << 63
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"the integer {show(text)} does not fit 64 bits")
    return value


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {show(text)} is out of range")
    return value


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")
