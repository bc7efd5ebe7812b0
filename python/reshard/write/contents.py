"""What goes into the files of a save or a conversion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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


@dataclass(frozen=True)
class FileTable:
    """The form of the contents of files in messages: each name is in it once, and so is each list of names.

    Attributes:
        names: of the arrays of all files.
        lists: the numbers of the names, for each list of arrays.
        files: the name of each file, its rank, and the number of its list.

    Example:
        >>> files = (FileContent("a", 0, ("v", "w")), FileContent("b", 1, ("v", "w")))
        >>> FileTable.of(files).lists, FileTable.of(files).value() == files
        (((0, 1),), True)
    """

    names: tuple[str, ...]
    lists: tuple[tuple[int, ...], ...]
    files: tuple[tuple[str, int, int], ...]

    @classmethod
    def of(cls, value: Sequence[FileContent]) -> FileTable:
        """That of files."""
        numbers: dict[str, int] = {}
        lists: dict[tuple[str, ...], int] = {}
        files = [(file.name, file.rank, lists.setdefault(file.arrays, len(lists))) for file in value]
        of_lists = [tuple(numbers.setdefault(name, len(numbers)) for name in one) for one in lists]
        return cls(tuple(numbers), tuple(of_lists), tuple(files))

    def value(self) -> tuple[FileContent, ...]:
        """The files. Raises IndexError: a number is that of no name or list."""
        if any(number < 0 for numbers in (*self.lists, [number for _, _, number in self.files]) for number in numbers):
            raise IndexError
        lists = [tuple(map(self.names.__getitem__, one)) for one in self.lists]
        return tuple(FileContent(name, rank, lists[number]) for name, rank, number in self.files)


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
