"""What goes into the files of a save or a conversion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard import _core

Part = Literal["model", "optimizer"]

DtypeAndPart: TypeAlias = tuple[str, Part]
"""What a layout does not say of a tensor: its dtype, by its safetensors name, and the part that it belongs to."""


@dataclass(frozen=True)
class FileContent:
    """The planned content of a shard file.

    Attributes:
        name: its name.
        rank: the rank that writes it.
        arrays: names of the arrays in it, in the order in which they are stored.
    """

    name: str
    rank: int
    arrays: tuple[str, ...]


class JointProgress:
    """Progress over several files as one."""

    def __init__(self, call: _core.Progress | None, total_bytes: int) -> None:
        self._call = call
        self._total_bytes = total_bytes
        self._before = 0

    def of_file(self, n_bytes: int) -> Callable[[int, int], object] | None:
        """The callback for the next file, which has so many bytes."""
        start, call = self._before, self._call
        self._before += n_bytes
        return None if call is None else lambda done, _: call(start + done, self._total_bytes)
