"""Checks that the files of all ranks belong to one save, and finds damaged files by comparing them.

A `.ckpt` file that is truncated between two records is well-formed. Only a comparison with the files of other ranks
shows what is missing. If a file lacks something that another file has, the first is damaged. The same facts are
compared whether a save is opened as one checkpoint or each rank opens its own file.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.formats import counter_tensors
from reshard.formats.checkpoint1.state import SAVE_KEY
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from reshard.documents.common_info import CommonInfo
    from reshard.formats.rank_file import OpenedRankFile
    from reshard.layout.strategy import Strategy

SAME_ON_ALL = ("epoch_num", "step_num", "global_step")
"""Counters that must be equal in the files of one save; a loss scale may differ."""


@dataclass(frozen=True)
class FileFacts:
    """The facts of one rank's file that are compared.

    Attributes:
        counters: the counters in it, by name.
        has_crc: whether it ends with its CRC; None: the format has none.
        save: the id of its save; None: it has none.
    """

    counters: dict[str, int | float]
    has_crc: bool | None = None
    save: str | None = None

    @classmethod
    def of(cls, common: CommonInfo | None, file: OpenedRankFile) -> FileFacts:
        """The facts of a file with these counters."""
        values = {name: None if common is None else getattr(common, name) for name in counter_tensors.NAMES}
        counters = {name: value for name, value in values.items() if value is not None}
        return cls(counters, file.has_crc, file.metadata.get(SAVE_KEY))


def faults_of(files: Mapping[int, FileFacts]) -> dict[int, str]:
    """Why the files of some ranks are truncated, or belong to another save than those of the others, by rank.

    Example:
        >>> faults_of({0: FileFacts({"step_num": 4}), 1: FileFacts({})})
        {1: '`step_num` is missing, in the file of rank 0 it is 4: truncated, or of another save'}
    """
    found: dict[int, str] = {}
    for name in counter_tensors.NAMES:
        holder = next((rank for rank, file in files.items() if name in file.counters), None)
        for rank, file in files.items():
            if holder is None or rank in found:
                continue
            value, expected = file.counters.get(name), files[holder].counters[name]
            if value is None or (name in SAME_ON_ALL and value != expected):
                state = "is missing" if value is None else f"is {value}"
                found[rank] = (
                    f"`{name}` {state}, in the file of rank {holder} it is {expected}: truncated, or of another save"
                )
    holder = next((rank for rank, file in files.items() if file.save is not None), None)
    if holder is not None:
        others = (rank for rank, file in files.items() if file.save != files[holder].save)
        found = dict.fromkeys(others, f"it and the file of rank {holder} are of different saves") | found
    holder = next((rank for rank, file in files.items() if file.has_crc), None)
    if holder is not None:
        truncated = (rank for rank, file in files.items() if file.has_crc is False)
        found = dict.fromkeys(truncated, f"it has no CRC, but the file of rank {holder} has one: truncated") | found
    return dict(sorted(found.items()))


def lacking(strategy: Strategy, files: Mapping[int, Collection[str]]) -> dict[int, str]:
    """The files that lack tensors that other files of the same stage hold, by rank.

    If each shard is stored by one rank only, as without redundant copies, nothing is missing.

    Args:
        strategy: the strategy of the run.
        files: the keys in each rank's file, for every rank of the strategy.
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
        rank: f"{listed(map(show, keys))}: missing, but other ranks of stage {rank // n_devices} hold it: truncated"
        for rank, keys in sorted(missing.items())
        if keys
    }
