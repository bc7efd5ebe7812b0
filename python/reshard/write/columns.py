"""Tensors on their way into a file, by kind: most of 100,000 of them differ in their name alone.

One object for each would take longer than to write them. A stage of a save derives a class from `Columns` whose kind
says what the stage knows of a tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence  # noqa: TC003  messages are decoded by their type hints
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator

K = TypeVar("K", bound=tuple[Any, ...])
R = TypeVar("R", bound=tuple[Any, ...])


@dataclass(frozen=True)
class Columns(ABC, Generic[K, R]):
    """Names and what they have in common. It iterates over rows: a name and the fields of its kind.

    Attributes:
        names: each once.
        kinds: what they have in common, each kind once, in the order in which names first have it.
        kind_of: the number of the kind of each name.
    """

    names: Sequence[str]
    kinds: Sequence[K]
    kind_of: Sequence[int]

    @staticmethod
    @abstractmethod
    def kind(fields: Iterable[Any]) -> K:
        """What a row says after its name."""

    @abstractmethod
    def __iter__(self) -> Iterator[R]: ...

    @classmethod
    def of(cls, rows: Iterable[R]) -> Self:
        """Those of single rows."""
        numbers: dict[K, int] = {}
        by_address: dict[tuple[int, ...], int] = {}  # of the fields of kinds, which are kept: without hashing
        names: list[str] = []
        kind_of: list[int] = []
        for name, *fields in rows:
            address = tuple(map(id, fields))
            number = by_address.get(address)
            if number is None:
                number = numbers.setdefault(cls.kind(fields), len(numbers))
                if number == len(by_address):
                    by_address[address] = number
            names.append(name)
            kind_of.append(number)
        return cls(tuple(names), tuple(numbers), tuple(kind_of))

    def __len__(self) -> int:
        return len(self.names)

    def named_kinds(self) -> Iterator[tuple[str, K]]:
        """Each name with its kind."""
        return zip(self.names, map(self.kinds.__getitem__, self.kind_of), strict=True)

    def without(self, names: Container[str]) -> Self:
        """Those with other names."""
        return type(self).of(row for row in self if row[0] not in names) if names else self
