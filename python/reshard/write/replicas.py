"""Which ranks hold copies of which arrays, and what a rank does with its own before a save writes anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from reshard.errors import MismatchError
from reshard.values.words import ranks_named, show

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from reshard.ranks.group import Group
    from reshard.write.rank_facts import RankFacts

State: TypeAlias = "tuple[str, Mapping[str, np.ndarray]] | None"
"""Text and arrays of a rank's state files; None: it has none."""


class RankCopies(Protocol):
    """The copies that a rank holds, and its state."""

    @property
    def has_state(self) -> bool:
        """Whether state is saved besides the tensors."""

    def freeze(self, replicas: Replicas, rank: int) -> None:
        """Keep what the caller may change while the save is written in the background."""

    def settle(self, replicas: Replicas, channel: Group, timeout: float) -> State | BaseException:
        """Compare the copies of all ranks.

        Args:
            replicas: which ranks hold copies of what.
            channel: all these ranks.
            timeout: seconds that they wait for each other.

        Returns:
            The state of this rank, or the error of this step.
        """


@dataclass(frozen=True)
class Replicas:
    """Which ranks hold copies of which arrays.

    Attributes:
        rows: `(names, groups, may_differ)`: each group of ranks holds copies of one part of each of these arrays.
    """

    rows: tuple[tuple[tuple[str, ...], tuple[tuple[int, ...], ...], bool], ...] = ()

    @classmethod
    def of(cls, holders: Mapping[str, Sequence[tuple[int, ...]]], ranks: Sequence[RankFacts]) -> Replicas:
        """The replicas of a plan, and the further copies that ranks have reported.

        Example:
            >>> from reshard.write.arrays import Fact, Facts
            >>> from reshard.write.rank_facts import RankFacts
            >>> facts = [RankFacts("host", {}, Facts.of([Fact("w", "model", "F32", (2,))]))] * 2
            >>> Replicas.of({"w": [(0, 1)], "v": [(0,), (1,)]}, facts).rows
            ((('w',), ((0, 1),), False),)
        """
        may_differ: set[str] = set()
        for one in ranks:
            if any(kind.may_differ for kind in one.arrays.kinds):
                may_differ |= {fact.name for fact in one.arrays if fact.may_differ}
        groups = {name: tuple(tuple(group) for group in of_name) for name, of_name in holders.items()}
        more: dict[str, set[int]] = {}
        for rank, one in enumerate(ranks):
            for name in one.copies:
                more.setdefault(name, set()).add(rank)
        for name, holding in more.items():
            may_differ.add(name)
            saved_by = {rank for group in groups.get(name, ()) for rank in group}
            groups[name] = (tuple(sorted(holding | saved_by)),)
        names_of: dict[tuple[tuple[tuple[int, ...], ...], bool], list[str]] = {}
        for name, of_name in groups.items():
            several = tuple(group for group in of_name if len(group) > 1)
            if several:
                names_of.setdefault((several, name in may_differ), []).append(name)
        return cls(tuple((tuple(names), several, may) for (several, may), names in names_of.items()))

    def names(self, rank: int) -> list[str]:
        """The arrays of a rank that others hold copies of, in an order that all ranks know."""
        return [name for names, groups, _ in self.rows if any(rank in group for group in groups) for name in names]

    def differing(self, sums: Sequence[Mapping[str, int]]) -> list[str]:
        """The arrays whose copies differ, and may.

        Args:
            sums: the checksums of the copies of each rank, by name.

        Raises:
            MismatchError: copies of other arrays differ; the message names the first array, the ranks and the
                checksums.
        """
        found: list[str] = []
        refused: list[tuple[str, dict[int, list[int]]]] = []
        for names, groups, may in self.rows:
            for name in names:
                for group in groups:
                    ranks_of: dict[int, list[int]] = {}
                    for rank in group:
                        ranks_of.setdefault(sums[rank][name], []).append(rank)
                    if len(ranks_of) == 1:
                        continue
                    if not may:
                        refused.append((name, ranks_of))
                    elif name not in found[-1:]:
                        found.append(name)
        if refused:
            name, ranks_of = refused[0]
            copies = "; ".join(f"crc32c {one:08x} on {ranks_named(ranks)}" for one, ranks in ranks_of.items())
            more = f". So do {len(refused) - 1} more shards" if len(refused) > 1 else ""
            raise MismatchError(
                f"{show(name)}: the copies on the ranks that hold it differ: {copies}{more}",
                key=name,
                hint="replicas must be equal: find the step from which they differ. Arrays that differ on purpose are "
                'listed in `verify=Verify(may_differ=["<pattern>"])`: then each rank\'s copy is kept',
            )
        return found
