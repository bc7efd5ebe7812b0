"""The formats in which `reshard.save` saves, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.write.phases import Draft


def _checkpoint1() -> type[Draft[Any, Any, Any, Any]]:
    from reshard.formats.checkpoint1.save import Checkpoint1Draft  # noqa: PLC0415  slow to import

    return Checkpoint1Draft


def _checkpoint2() -> type[Draft[Any, Any, Any, Any]]:
    from reshard.formats.checkpoint2.save import Checkpoint2Draft  # noqa: PLC0415  slow to import

    return Checkpoint2Draft


_FORMATS: dict[str, Callable[[], type[Draft[Any, Any, Any, Any]]]] = {
    "checkpoint2": _checkpoint2,
    "checkpoint1": _checkpoint1,
}


def save_format(name: str) -> type[Draft[Any, Any, Any, Any]]:
    """How a format is saved.

    Args:
        name: "checkpoint2" or "checkpoint1".

    Raises:
        ArgumentError: `save` has no format of this name.

    Example:
        >>> save_format("checkpoint1").traits.rank_folders
        True
    """
    if name not in _FORMATS:
        accepted = " and ".join(f'"{one}"' for one in _FORMATS)
        raise ArgumentError(f"`format` is {name!r}; {accepted} are accepted")
    return _FORMATS[name]()
