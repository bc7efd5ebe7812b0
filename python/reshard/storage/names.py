"""Names of files and folders: what may be one component of a path in any store."""

from __future__ import annotations

import hashlib
import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_MAX_NAME_BYTES = 255
_MAX_START_BYTES = 150
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def component_fault(name: str) -> str | None:
    """Why a name out of a file or an argument is not one plain path component; None if it is.

    Example:
        >>> component_fault("../weights.safetensors")
        'it has a path separator in it'
    """
    n_bytes = len(name.encode(errors="surrogatepass"))
    if n_bytes > _MAX_NAME_BYTES:
        return f"it has {n_bytes} bytes, a name has at most {_MAX_NAME_BYTES}"
    if not name:
        return "it is empty"
    if name in (".", ".."):
        return "it names a folder"
    if "/" in name or "\\" in name:
        return "it has a path separator in it"
    if _CONTROL.search(name):
        return "it has a control character in it"
    return "it is not valid Unicode" if _SURROGATE.search(name) else None


def is_too_long(name: str) -> bool:
    """Whether a name is longer than a file system accepts. It is no damage: another system may accept it.

    Example:
        >>> is_too_long("a" * 255), is_too_long("a" * 256)
        (False, True)
    """
    return len(name.encode(errors="surrogatepass")) > _MAX_NAME_BYTES


def as_start(name: str) -> str:
    """What a longer name can begin with: a name, or the beginning of a long one and a digest of it.

    Example:
        >>> as_start("model.safetensors"), len(as_start("\u6a21" * 85).encode())
        ('model.safetensors', 149)
    """
    whole = os.fsencode(name)
    if len(whole) <= _MAX_START_BYTES:
        return name
    digest = hashlib.blake2b(whole, digest_size=8).hexdigest()
    return f"{whole[: _MAX_START_BYTES - 1 - len(digest)].decode(errors='ignore')}-{digest}"


def example_of(names: Iterable[str]) -> str:
    """The name that a message gives as an example: the first in order that is not hidden, else the first.

    Example:
        >>> example_of([".lock", "b.safetensors", "a.safetensors"])
        'a.safetensors'
    """
    return min(names, key=lambda name: (name.startswith("."), name))
