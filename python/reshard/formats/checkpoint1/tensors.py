"""Composes whole tensors of the local arrays of all ranks: the strategy gives the position of each array.

Copies of a shard on several ranks are replicas. A key that the strategy does not list is either optimizer state that is
sharded like its parameter, or whole on every rank. This module does not choose files and does not read strategies.
"""

from __future__ import annotations

import itertools
import logging
from hashlib import blake2b
from typing import TYPE_CHECKING

from reshard import _core, dtypes
from reshard.errors import CoverageError, DamagedFileError, MismatchError
from reshard.formats import counter_tensors
from reshard.formats.base import StoredTensor, UnplacedTensor
from reshard.formats.checkpoint1.agreement import SAME_ON_ALL, FileFacts, faults_of, lacking
from reshard.formats.checkpoint1.replicas import AssumedReplicas
from reshard.formats.outputs import load_all
from reshard.formats.rank_file import add_rank_file, placed
from reshard.layout.strategy import Strategy, region_of
from reshard.values.counters import OF_NO_PARAMETER
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from reshard.documents.common_info import CommonInfo
    from reshard.formats.rank_file import OpenedRankFile
    from reshard.storage.location import Location

_log = logging.getLogger("reshard")

_SMALL_BYTES = 4096
_SMALL_BYTES_OF_FILE = 1 << 20


class RankTensors:
    """The tensors in the files of all ranks."""

    def __init__(self, root: Location, files: Mapping[int, OpenedRankFile], strategy: Strategy | None) -> None:
        self.root = root
        self.files = files
        self.strategy = strategy
        self.held: dict[str, dict[int, _core.FileArray]] = {}
        for rank, file in files.items():
            for key, tensor in file.tensors.items():
                self.held.setdefault(key, {})[rank] = tensor
        self.keys = list(self.held)
        self.unplaced: dict[str, UnplacedTensor] = {}
        if strategy is None and len(files) > 1:
            self.unplaced = {
                key: UnplacedTensor(self._dtype(key), tuple(dict.fromkeys(one.shape for one in held.values())))
                for key, held in self.held.items()
                if not _is_counter(key, held.values())
            }
        self.unlisted = [] if strategy is None else [key for key in self.keys if not strategy.stages_of(key)]
        self.followed = {key: parameter for key in self.unlisted if (parameter := self._followed(key)) is not None}
        without_place = [key for key in self.keys if key not in self.unplaced] if strategy is None else self.unlisted
        # A loss scale may differ. The counters that may not differ are compared by `faults_of`.
        self.assumed = [key for key in without_place if key not in ("loss_scale", *SAME_ON_ALL) and len(files) > 1]
        self.digests: dict[str, dict[int, bytes]] = {}

    def name(self, rank: int) -> str:
        """The name of a rank's file in messages."""
        return show(self.files[rank].path.relative_to(self.root))

    def _followed(self, key: str) -> str | None:
        """The parameter whose layout unlisted state has, if their local arrays have the same shapes."""
        state = counter_tensors.parameter_of(key)
        if self.strategy is None or state is None or not self.strategy.stages_of(state[1]):
            return None
        parts = self.held.get(state[1], {})
        stages, n_devices = self.strategy.stages_of(state[1]), self.strategy.devices_per_stage
        # Without redundant copies a rank can hold the state and not the parameter, whose parts have one shape then.
        shapes = {part.shape for part in parts.values()}

        def has_same_shape(rank: int, shape: tuple[int, ...]) -> bool:
            if rank in parts:
                return parts[rank].shape == shape
            return rank // n_devices in stages and shapes == {shape}

        return state[1] if all(has_same_shape(rank, one.shape) for rank, one in self.held[key].items()) else None

    def placed(self, key: str) -> StoredTensor:
        """A whole tensor and the stored arrays of all ranks that it consists of.

        Raises:
            DamagedFileError: the dtype differs between ranks.
            MismatchError: the local arrays give different shapes of the tensor.
        """
        dtype = self._dtype(key)
        found: dict[tuple[int, ...], int] = {}
        stored: list[_core.StoredArray] = []
        for rank, tensor in self.held[key].items():
            shape, offset = self._region(key, rank, tensor.shape)
            found.setdefault(shape, rank)
            stored += placed(self.files[rank], key, offset)
        if len(found) > 1:
            (a, first), (b, second), *_ = found.items()
            why = "is not in the strategy and differs between ranks" if key in self.unlisted else ""
            why = why or "has different shapes"
            raise MismatchError(
                f"{show(key)} {why}: shape {a} from {self.name(first)}, {b} from {self.name(second)}",
                path=str(self.files[second].path),
                key=key,
                hint="pass the strategy with which the checkpoint was written",
            )
        return StoredTensor(dtype, next(iter(found)), stored)

    def _region(self, key: str, rank: int, local: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape of a whole tensor, and the offset of a rank's array in it."""
        whole = local, (0,) * len(local)
        if self.strategy is None:
            return whole
        if key in self.unlisted and key not in self.followed:
            return whole
        region = region_of(self.strategy, self.followed.get(key, key), rank, local)
        if region is None:
            stages = listed(self.strategy.stages_of(key))
            raise MismatchError(
                f"{self.name(rank)} holds {show(key)}, which is on stage {stages} in {show(self.strategy.source)}",
                path=str(self.files[rank].path),
                key=key,
                hint="pass the strategy with which the checkpoint was written",
            )
        return region

    def _dtype(self, key: str) -> str:
        found: dict[str, int] = {}
        for rank, tensor in self.held[key].items():
            found.setdefault(tensor.dtype, rank)
        if len(found) > 1:
            (a, first), (b, second), *_ = found.items()
            raise DamagedFileError(
                f"{show(key)} is {a} in {self.name(first)} and {b} in {self.name(second)}",
                path=str(self.files[second].path),
                key=key,
            )
        return next(iter(found))

    def overlaps(self, key: str, shape: tuple[int, ...]) -> bool:
        """Whether stored arrays of a tensor can overlap without being replicas."""
        # Ranks with the same shard may have split it into different records.
        if any(len(one.parts) > 1 for one in self.held[key].values()):
            return True
        if self.strategy is None:
            return False
        listed_key, n = self.followed.get(key, key), self.strategy.devices_per_stage
        stages = self.strategy.stages_of(listed_key)
        return len({self.strategy.cut_of(listed_key, stage * n, len(shape), shape) for stage in stages}) > 1

    def check_coverage(self, index: _core.Index) -> None:
        """Check that the stored arrays cover every tensor.

        Raises:
            CoverageError: a region is missing; the message lists the ranks whose files lack the tensor.
        """
        try:
            index.check_coverage()
        except CoverageError as error:
            if self.strategy is not None and error.key in self.held:
                n = self.strategy.devices_per_stage
                ranks = (s * n + i for s in self.strategy.stages_of(error.key) for i in range(n))
                lacking = [rank for rank in ranks if rank not in self.held[error.key]]
                error.path = str(self.root)
                error.message += f"; it is missing in the file of rank {listed(lacking)}"
            raise

    def replicas(self) -> AssumedReplicas:
        """The tensors that are assumed to be equal on all ranks, since no strategy describes them."""
        groups: dict[str, list[tuple[int, ...]]] = {}
        for key in self.assumed:
            at: dict[tuple[int, ...], list[int]] = {}
            for rank, tensor in self.held[key].items():
                at.setdefault(self._region(key, rank, tensor.shape)[1], []).append(rank)
            groups[key] = [tuple(sorted(ranks)) for ranks in at.values()]
        return AssumedReplicas(self.files, groups, {key: self._assumption(key) for key in self.assumed}, self.digests)

    def _assumption(self, key: str) -> str:
        if self.strategy is None:
            return f"without a strategy {show(key)} is read as one value, equal on all ranks"
        how = f"sharded like {show(self.followed[key])}" if key in self.followed else "whole on every rank"
        return f"{show(self.strategy.source)} does not list {show(key)}; it is assumed to be {how}"

    def warn(self) -> None:
        """Log values that are left out, and assumptions about tensors that the strategy does not list."""
        for rank, file in self.files.items():
            if file.strings:
                _log.warning(
                    "%s holds text values, which are left out: %s", self.name(rank), listed(map(show, file.strings))
                )
        if self.strategy is None:
            return
        if self.followed:
            names = listed(map(show, self.followed))
            _log.warning("%s does not list %s: assumed to be sharded like its parameter", self.strategy.source, names)
        whole = [
            key for key in self.unlisted if key not in self.followed and not _is_counter(key, self.held[key].values())
        ]
        if whole:
            names = listed(map(show, whole))
            _log.warning("%s does not list %s: assumed to be whole on every rank", self.strategy.source, names)

    def check(self, method: _core.ReadMethod) -> CommonInfo | None:
        """Compare the files with each other and with the strategy.

        Returns:
            The counters, or None if there are none.

        Raises:
            DamagedFileError: a rank's file is truncated, or belongs to another save than those of the others.
            MismatchError: the strategy has other names than the files.
        """
        found = self._counters(method)
        facts = {rank: FileFacts.of(found.get(rank), file) for rank, file in self.files.items()}
        faults = faults_of(facts)
        if self.strategy is not None and not faults:
            # Only a `.ckpt` file can be truncated between two tensors and still be well-formed.
            held = lacking(self.strategy, {rank: file.tensors.keys() for rank, file in self.files.items()})
            faults = {rank: fault for rank, fault in held.items() if self.files[rank].kind == "ckpt"}
        for rank, fault in faults.items():
            more = f"; also faults of {len(faults) - 1} more ranks" if len(faults) > 1 else ""
            raise DamagedFileError(f"{self.name(rank)}: {fault}{more}", path=str(self.files[rank].path))
        if self.strategy is not None:
            whole = [key for key in self.unlisted if key not in self.followed]
            self.strategy.check_unlisted(key for key in whole if any(one.shape for one in self.held[key].values()))
        return next(iter(found.values()), None)

    def _counters(self, method: _core.ReadMethod) -> dict[int, CommonInfo]:
        """The counters of each rank's file that has any. Also computes digests of small tensors."""
        found: dict[int, CommonInfo] = {}
        small = self._small()
        for rank, file in self.files.items():
            counters = [name for name in counter_tensors.NAMES if name in file.tensors]
            names = [*counters, *(key for key in small if key in file.tensors and key not in counters)]
            if not names:
                continue
            index = _core.Index()
            again = add_rank_file(index, file.path, method=method)
            shapes = {name: again.tensors[name].shape for name in names}
            for name, shape in shapes.items():
                if name in counters:
                    counter_tensors.check_shape(name, shape, str(file.path))  # before it is read: it can be of any size
                index.add_tiles(name, again.tensors[name].dtype, shape, placed(again, name, (0,) * len(shape)))
            # The checksum of a whole file is not compared yet: that would read all of it.
            plan = index.plan(index.whole_request(list(shapes)), verify=False)
            arrays = load_all(plan)
            if counters:
                found[rank] = counter_tensors.common_of(arrays, str(file.path))
            for key in small & arrays.keys():
                self.digests.setdefault(key, {})[rank] = blake2b(arrays[key].tobytes(), digest_size=16).digest()
            index.close()
        return found

    def _small(self) -> set[str]:
        """The assumed replicas that are compared at opening: small ones, up to a limit for each file."""
        n_bytes = {
            key: max(dtypes.n_bytes(one.dtype, one.shape) for one in self.held[key].values()) for key in self.assumed
        }
        sized = sorted((size, key) for key, size in n_bytes.items() if size <= _SMALL_BYTES)
        ends = itertools.accumulate(size for size, _ in sized)
        return {key for (_, key), end in zip(sized, ends, strict=True) if end <= _SMALL_BYTES_OF_FILE}


def _is_counter(key: str, held: Iterable[_core.FileArray]) -> bool:
    """Whether a key is a scalar or counter on every rank, independent of the sharding."""
    return all(not one.shape or (key in OF_NO_PARAMETER and one.shape == (1,)) for one in held)
