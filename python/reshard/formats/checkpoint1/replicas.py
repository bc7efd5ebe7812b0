"""Arrays of several ranks that are read as replicas because nothing describes their partition.

A strategy file does not list every tensor. An unlisted tensor is read as one that each rank holds whole, or as one with
the partition of its parameter. Ranks that then hold the same region must hold the same bytes; otherwise the partition
is unknown, and no bytes are returned. Small arrays are compared by digest when the files are opened, large ones when
the tensor is first read. Which tensors these are is decided by the caller.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import TYPE_CHECKING, TypeAlias

from reshard import _core, dtypes
from reshard.errors import MismatchError
from reshard.formats.outputs import load_all
from reshard.formats.rank_file import placed
from reshard.values.indexing import Region, in_batches, regions
from reshard.values.words import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    import numpy as np

    from reshard.formats.rank_file import OpenedRankFile

Groups: TypeAlias = "Mapping[str, Sequence[tuple[int, ...]]]"
"""By key, the ranks whose arrays of it are read as replicas of each other."""

_Unit: TypeAlias = tuple[str, tuple[int, ...], Region]

_BATCH_BYTES = 16 << 20
_MAX_ARRAYS = 4096  # of one plan


class AssumedReplicas:
    """The tensors of rank folders whose ranks are assumed to hold the same bytes."""

    def __init__(
        self,
        files: Mapping[int, OpenedRankFile],
        groups: Groups,
        reasons: Mapping[str, str],
        digests: Mapping[str, Mapping[int, bytes]],
    ) -> None:
        """Note what is assumed, and compare what is known already.

        Args:
            files: the file of each rank.
            groups: what is assumed.
            reasons: by key why, as the beginning of a sentence.
            digests: of small arrays: by key and rank. All ranks that hold the key, or none.
        """
        self._files = files
        self._groups = {key: [ranks for ranks in of_key if len(ranks) > 1] for key, of_key in groups.items()}
        self._reasons = reasons
        self._equal: set[str] = set()
        self._different: dict[str, tuple[int, list[int]]] = {}
        for key in self._groups.keys() & digests.keys():
            for first, *others in self._groups[key]:
                found = [rank for rank in others if digests[key][rank] != digests[key][first]]
                if found:
                    self._different.setdefault(key, (first, found))
            if key not in self._different:
                self._equal.add(key)

    @property
    def keys(self) -> list[str]:
        """The tensors that several ranks hold."""
        return [key for key, of_key in self._groups.items() if of_key]

    @functools.cached_property
    def key_of(self) -> dict[str, str]:
        """The key of each of their arrays by its stored name, for views of the files under other keys."""
        return {
            part.name: key
            for key, of_key in self._groups.items()
            for rank in itertools.chain.from_iterable(of_key)
            for part in self._files[rank].tensors[key].parts
        }

    def check(self, keys: Collection[str], reopen: Callable[[list[int]], _core.Index]) -> None:
        """Compare the arrays of keys that have not been compared yet, in bounded memory.

        Args:
            keys: of the tensors that are about to be read; others than those assumed are ignored.
            reopen: makes an index of the files of these numbers, in their order.

        Raises:
            MismatchError: ranks hold different bytes; the message names the key and the ranks.
            DamagedFileError: they do because a file is damaged.
            StorageError: a file cannot be read.
        """
        pending = [key for key in self._groups if key in keys and key not in self._equal]
        compared = [key for key in pending if key not in self._different]
        if compared:
            for key, first, others in self._compare(compared, reopen):
                self._different.setdefault(key, (first, others))
            self._equal.update(key for key in compared if key not in self._different)
        for key in pending:
            if key in self._different:
                self._refuse(key, reopen)

    def _compare(
        self, keys: list[str], reopen: Callable[[list[int]], _core.Index]
    ) -> Iterator[tuple[str, int, list[int]]]:
        """The keys whose ranks differ, with the first rank and those that differ from it."""
        ranks = sorted({rank for key in keys for rank in itertools.chain.from_iterable(self._groups[key])})
        index = reopen([self._files[rank].file for rank in ranks])
        for number, rank in enumerate(ranks):
            for key in keys:
                if any(rank in group for group in self._groups[key]):
                    tensor = self._files[rank].tensors[key]
                    parts = placed(self._files[rank], key, (0,) * len(tensor.shape))
                    stored = [part._replace(file=number) for part in parts]
                    index.add_tiles(f"{rank} {key}", tensor.dtype, tensor.shape, stored, overlapping=len(stored) > 1)
        try:
            for batch in in_batches(self._units(keys), lambda one: one[1], _BATCH_BYTES, _MAX_ARRAYS):
                different = _different(index, [unit for unit, _ in batch])
                if different:
                    yield from ((key, first, others) for (key, first), others in different.items())
                    return
        finally:
            index.close()

    def _units(self, keys: list[str]) -> Iterator[tuple[_Unit, int]]:
        """What is compared at a time, with its bytes."""
        for key in keys:
            for group in self._groups[key]:
                tensor = self._files[group[0]].tensors[key]
                bits = dtypes.bits(tensor.dtype)
                for region in regions(tensor.shape, _BATCH_BYTES * 8 // bits, bits):
                    yield (key, group, region), math.prod(region[1]) * bits // 8

    def _refuse(self, key: str, reopen: Callable[[list[int]], _core.Index]) -> None:
        first, others = self._different[key]
        numbers = [self._files[rank].file for rank in (first, *others)]
        index = reopen(numbers)
        for number in range(len(numbers)):
            index.verify_crc(number)  # a damaged file is the fault of nothing else
        index.close()
        raise MismatchError(
            f"{self._reasons[key]}, but the bytes on rank {listed(others)} differ from those on rank {first}",
            path=str(self._files[others[0]].path),
            key=key,
            hint="list the tensor in the strategy files, or leave it out with `select=Select(drop=...)`; "
            "`Checkpoint.stored(rank)` reads the array of one rank",
        )


def _different(index: _core.Index, units: list[_Unit]) -> dict[tuple[str, int], list[int]]:
    """By key and first rank of a group, the ranks whose bytes differ from those of the first."""
    expected: dict[int, np.ndarray] = {}
    found: dict[tuple[str, int], list[int]] = {}
    for rank in sorted({rank for _, group, _ in units for rank in group}):
        held = [(n, unit) for n, unit in enumerate(units) if rank in unit[1]]
        request = _core.Request()
        for n, (key, _, (offset, shape)) in held:
            request.add_region(str(n), f"{rank} {key}", offset, shape)
        arrays = load_all(index.plan(request, verify=False))  # a sum of the file itself would cost reading all of it
        for n, (key, group, _) in held:
            own = arrays[str(n)]
            if rank == group[0]:
                expected[n] = own
            elif own.tobytes() != expected[n].tobytes():
                ranks = found.setdefault((key, group[0]), [])
                ranks += [] if rank in ranks else [rank]
    return found
