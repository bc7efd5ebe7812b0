"""Types of arguments that several functions take, and of which a plain type does not say enough to check a value.

`arguments` has the check of each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Literal, TypeAlias


class AnyText:
    """Marks a `Literal` of which other texts are refused where they are used, with a message of its own."""


Count: TypeAlias = Annotated[int, "from 1 on"]
Described: TypeAlias = Annotated[Any, "a path, a mapping, or an object of this package that is made of one"]
Device: TypeAlias = Annotated[Any, "a device, such as 'cpu'"]
GroupLike: TypeAlias = Annotated[object, "has the methods of a group of ranks"]
PlaceLike: TypeAlias = Annotated[Any, "does the shares of some work"]
Part: TypeAlias = Literal["all", "model", "optimizer"]
Patterns: TypeAlias = Annotated[Collection[str], "a list of patterns, not one of them"]
Progress: TypeAlias = Callable[[int, int], object]
ReadMethod: TypeAlias = Literal["auto", "map", "read"]
Rows: TypeAlias = Annotated[Mapping[str, int | str], "numbers of rows, or fields of config.json that say them"]
Seconds: TypeAlias = Annotated[float, "from 0 on"]
Size: TypeAlias = Annotated[str | int, "bytes, such as 4096 or '4KiB'"]
VerifyMode: TypeAlias = Literal["full", "touched", "structure"]
