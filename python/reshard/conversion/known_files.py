"""Files by which conversions know what earlier ones wrote: those of all formats that are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from reshard.storage.location import Location

    Mark = Callable[[Location], bool]


@dataclass(frozen=True)
class KnownFiles:
    """`commits` and `marks` of all writers, see `conversion.writer.Writer`. A name that several have has one mark."""

    commits: tuple[str, ...]
    marks: Mapping[str, Mark]

    def mark_of(self, entry: Location) -> Mark | None:
        """The mark of files with this name or suffix; None: no format opens them."""
        return self.marks.get(entry.name, self.marks.get(entry.suffix))
