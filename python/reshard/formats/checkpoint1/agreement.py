"""What the files of all ranks in one save have in common, and which rank's file is damaged where they do not.

A `.ckpt` that was cut off between two records is well-formed: only the files of the other ranks tell what it lacks. So
whoever takes a save, as one checkpoint or each rank its own file, compares the same facts of them here. What one file
lacks and another has is damage of the first.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.formats import scalars
from reshard.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from reshard.formats.checkpoint2.common import CommonInfo
    from reshard.layout.strategy import Strategy

__all__ = ["SAME_ON_ALL", "FileFacts", "faults_of", "lacking"]

SAME_ON_ALL = ("epoch_num", "step_num", "global_step")
"""Counters that must be equal in the files of one save; a loss scale may differ."""


@dataclass(frozen=True)
class FileFacts:
    """What is compared of one rank's file.

    Attributes:
        counters: those that it holds, by name.
        has_sum: whether it ends with a sum of itself; None: its format has none.
    """

    counters: dict[str, int | float]
    has_sum: bool | None = None

    @classmethod
    def of(cls, common: CommonInfo | None, *, has_sum: bool | None) -> FileFacts:
        """Those of a file with these counters."""
        values = {name: None if common is None else getattr(common, name) for name in scalars.NAMES}
        return cls({name: value for name, value in values.items() if value is not None}, has_sum)


def faults_of(files: Mapping[int, FileFacts]) -> dict[int, str]:
    """Why the files of some ranks cannot be whole and of one save with those of the others, by rank.

    Example:
        >>> faults_of({0: FileFacts({"step_num": 4}), 1: FileFacts({})})
        {1: '`step_num` is not there, and in the file of rank 0 it is 4: cut short, or of another save'}
    """
    found: dict[int, str] = {}
    for name in scalars.NAMES:
        holder = next((rank for rank, file in files.items() if name in file.counters), None)
        for rank, file in files.items():
            if holder is None or rank in found:
                continue
            value, expected = file.counters.get(name), files[holder].counters[name]
            if value is None or (name in SAME_ON_ALL and value != expected):
                told = "is not there" if value is None else f"is {value}"
                found[rank] = (
                    f"`{name}` {told}, and in the file of rank {holder} it is {expected}: cut short, or of another save"
                )
    holder = next((rank for rank, file in files.items() if file.has_sum), None)
    if holder is not None:
        cut = (rank for rank, file in files.items() if file.has_sum is False)
        found = dict.fromkeys(cut, f"it does not end with a sum, as the file of rank {holder} does: cut short") | found
    return dict(sorted(found.items()))


def lacking(strategy: Strategy, files: Mapping[int, Collection[str]]) -> dict[int, str]:
    """Which files lack tensors that others of their stage hold, by rank.

    Where each part is kept by one rank alone, nothing is missing: so does a run that writes no replicas.

    Args:
        strategy: how the run cut its tensors.
        files: the keys that each rank's file holds; of every rank of the strategy.
    """
    n_devices = strategy.devices_per_stage
    held = Counter((rank // n_devices, key) for rank, keys in files.items() for key in keys)
    listed_keys = {at for at in held if at[1] in strategy.stages[at[0]]}
    if all(held[at] <= strategy.stages[at[0]][at[1]].n_parts() for at in listed_keys):
        return {}
    by_stage: dict[int, set[str]] = {stage: set() for stage in strategy.stages}
    for stage, key in listed_keys:
        by_stage[stage].add(key)
    missing = {rank: sorted(by_stage[rank // n_devices].difference(keys)) for rank, keys in files.items()}
    return {
        rank: f"{listed(map(show, keys))}: not there, and other ranks of stage {rank // n_devices} hold it: cut short"
        for rank, keys in sorted(missing.items())
        if keys
    }
