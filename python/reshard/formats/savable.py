"""The formats in which `reshard.save` saves, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.errors import ArgumentError
from reshard.formats.checkpoint1.save import Checkpoint1Save
from reshard.formats.checkpoint2.save import Checkpoint2Save

if TYPE_CHECKING:
    from reshard.write.collective_save import SaveFormat

__all__ = ["save_format"]

_FORMATS: dict[str, type[SaveFormat]] = {one.traits.name: one for one in (Checkpoint2Save, Checkpoint1Save)}


def save_format(name: str) -> type[SaveFormat]:
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
    return _FORMATS[name]
