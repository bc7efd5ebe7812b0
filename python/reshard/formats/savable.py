"""The formats in which `reshard.save` saves, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.errors import ArgumentError
from reshard.formats.checkpoint1.reader import TRAITS as CHECKPOINT1
from reshard.formats.checkpoint2.reader import CHECKPOINT2

if TYPE_CHECKING:
    from reshard.formats.base import Traits

__all__ = ["save_traits"]

_TRAITS = {one.name: one for one in (CHECKPOINT2, CHECKPOINT1)}


def save_traits(name: str) -> Traits:
    """The traits of the format of a save.

    Args:
        name: "checkpoint2" or "checkpoint1".

    Raises:
        ArgumentError: `save` has no format of this name.

    Example:
        >>> save_traits("checkpoint1").rank_folders
        True
    """
    if name not in _TRAITS:
        accepted = " and ".join(f'"{one}"' for one in _TRAITS)
        raise ArgumentError(f"`format` is {name!r}; {accepted} are accepted")
    return _TRAITS[name]
