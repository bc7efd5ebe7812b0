"""Compute the region of each tensor on each rank from the records of a strategy.

The stage of a rank is the rank divided by the number of devices of a stage. Its coordinates follow from its position in
the stage. The axes in `tensor_map` partition the dims. If ranks with the same slice partition it further (ZeRO, in the
file `opt_weight_shard_*`), dim 0 has one more, innermost axis. An ambiguous record is an error unless the shape of the
tensor resolves it. This module does not read files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.errors import ArgumentError, CheckpointNotFoundError, LayoutError, MismatchError, UnsupportedError
from reshard.layout.device_cut import DeviceCut, shared_further
from reshard.values.words import counted, listed, show

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from reshard.layout.strategy_file import LayoutItem

__all__ = ["DeviceCut", "Strategy", "region_of"]


class Strategy:
    """The partition of every parameter of a model over the ranks of each stage.

    A key that no stage lists is replicated on every rank.

    Attributes:
        source: the file or folder of the strategy, for messages.
        n_stages: the number of pipeline stages.
        devices_per_stage: the number of ranks of each stage. rank = stage x `devices_per_stage` + position.
        world_size: the total number of ranks.

    Example:
        >>> from reshard.layout.strategy_file import LayoutItem
        >>> strategy = Strategy({0: {"w": LayoutItem((2, 2), ((0, -1),))}})
        >>> region_of(strategy, "w", 3, (4, 6))
        ((8, 6), (4, 0))
    """

    def __init__(self, stages: Mapping[int, Mapping[str, LayoutItem]], *, source: str = "strategy") -> None:
        """Combine the stages.

        Args:
            stages: the records of each stage, by parameter name.
            source: the file or folder of the records, for messages.

        Raises:
            CheckpointNotFoundError: stages are missing.
            LayoutError: no stage lists a parameter, or the stages have different numbers of devices.
        """
        self.source = source
        self.stages = {stage: dict(stages[stage]) for stage in sorted(stages)}
        self.n_stages = max(self.stages, default=-1) + 1
        # A damaged file can contain a very large stage number: do not build a list of all missing stages.
        n_missing = self.n_stages - len(self.stages)
        if n_missing:
            named = listed((n for n in range(self.n_stages) if n not in self.stages), n_items=n_missing)
            raise CheckpointNotFoundError(
                f"{show(source)} holds no strategy of stage {named}; its last stage is {self.n_stages - 1}",
                path=source,
                hint="give the folder with the strategy files of all stages, or the merged file",
            )
        devices: dict[int, tuple[int, str]] = {}
        for stage, items in self.stages.items():
            for key, item in items.items():
                devices.setdefault(math.prod(item.dev_matrix), (stage, key))
        if len(devices) != 1:
            counts = ", ".join(
                f"{counted(n, 'device')} ({show(key)} in stage {stage})" for n, (stage, key) in devices.items()
            )
            raise LayoutError(
                f"{show(source)}: stages must have one number of devices, found {counts or 'no parameter at all'}",
                path=source,
            )
        (self.devices_per_stage,) = devices
        self.world_size = self.n_stages * self.devices_per_stage
        self._readings: dict[tuple[int, str, int], list[_Reading]] = {}

    def keys(self) -> tuple[str, ...]:
        """The keys of all stages without duplicates, in the order of the stages."""
        return tuple(dict.fromkeys(key for items in self.stages.values() for key in items))

    def stages_of(self, key: str) -> tuple[int, ...]:
        """The stages that list a key. Empty: the tensor is replicated on every rank."""
        return tuple(stage for stage, items in self.stages.items() if key in items)

    def check_unlisted(self, keys: Iterable[str]) -> None:
        """Check that the strategy does not list the keys with an added or a removed stage prefix.

        Args:
            keys: keys of tensors with at least one dim that no stage lists. They are assumed to be replicated.

        Raises:
            MismatchError: the strategy was read as merged but is not, or is merged but was not read as such.
        """
        with_stage = {f"{stage}-{key}": key for stage, items in self.stages.items() for key in items}
        numbers = set(map(str, self.stages))
        without = {key.partition("-")[2]: key for key in self.keys() if key.partition("-")[0] in numbers}
        for key in keys:
            listed_as = with_stage.get(key, without.get(key))
            if listed_as is not None:
                raise MismatchError(
                    f"{show(self.source)} does not list {show(key)}, but {show(listed_as)}: is it merged or not? Names "
                    "in a merged strategy begin with the number of their stage",
                    path=self.source,
                    key=key,
                    hint="call the file of a stage `ckpt_strategy_rank_<r>.ckpt`, and a merged one otherwise",
                )

    def cut_of(self, key: str, rank: int, ndim: int, shape: Sequence[int] | None = None) -> DeviceCut | None:
        """The partition of a tensor over the stage of a rank.

        Args:
            key: the key of the tensor.
            rank: the global rank.
            ndim: the number of dims of the tensor.
            shape: the global shape in elements, if known. It resolves ambiguous records.

        Returns:
            The partition; None if only other stages hold the tensor.

        Raises:
            ArgumentError: the strategy does not have this rank.
            MismatchError: the number of dims or the shape of the tensor does not match the strategy.
            UnsupportedError: the record of the tensor uses a feature that is not supported.
        """
        stage, _ = self._position(rank)
        readings = self._read(key, stage, ndim)
        if not readings:
            return None
        if shape is None:
            return readings[0].cut
        for reading in readings:
            if reading.fits(tuple(shape)):
                return reading.cut
        raise self._mismatch(key, f"shape {tuple(shape)}", readings[0])

    def likely_cut(self, key: str, stage: int) -> tuple[DeviceCut, bool]:
        """The most probable partition of a tensor on a stage that lists it, without the shape of the tensor.

        Args:
            key: the key of the tensor.
            stage: the stage.

        Returns:
            The partition, and whether it is certain. An uncertain partition assumes a tensor of several dims with one
            axis for each dim. A tensor of one dim would be partitioned by all these axes.

        Raises:
            UnsupportedError: as `cut_of`, for every possible number of dims.

        Example:
            >>> from reshard.layout.strategy_file import LayoutItem
            >>> items = {"w": LayoutItem((2, 4), ((1, -1),)), "w_or_b": LayoutItem((2, 4), ((1, 0),))}
            >>> strategy = Strategy({0: items})
            >>> [(cut.parts(), is_certain) for key in items for cut, is_certain in [strategy.likely_cut(key, 0)]]
            [((2, 1), True), ((2, 4), False)]
        """
        readings: list[_Reading] = []
        refused: list[UnsupportedError] = []
        for ndim in _possible_dims(self.stages[stage][key]):
            try:
                readings += self._read(key, stage, ndim)
            except UnsupportedError as error:
                refused.append(error)
        if not readings:
            raise refused[0]
        is_certain = readings[0].shape is not None or len({reading.cut.as_words() for reading in readings}) == 1
        return readings[0].cut, is_certain

    def _position(self, rank: int) -> tuple[int, int]:
        """The stage of a rank, and the position of the rank in the stage."""
        if not 0 <= rank < self.world_size:
            raise ArgumentError(
                f"{show(self.source)} has no rank {rank}: {counted(self.n_stages, 'stage')} of "
                f"{counted(self.devices_per_stage, 'device')}",
                hint="the strategy is of another run, or of only some of its stages" if rank > 0 else None,
            )
        return divmod(rank, self.devices_per_stage)

    def _read(self, key: str, stage: int, ndim: int) -> list[_Reading]:
        """The interpretations of a record, most probable first. Empty if the stage does not hold the tensor."""
        if (stage, key, ndim) not in self._readings:
            readings: list[_Reading] = []
            if key in self.stages[stage]:
                readings = list(_readings(self.stages[stage][key], ndim, _Where(self.source, key)))
            elif not self.stages_of(key):
                readings = [_Reading(DeviceCut((self.devices_per_stage,), ((),) * ndim), None)]
            self._readings[stage, key, ndim] = readings
        return self._readings[stage, key, ndim]

    def _mismatch(self, key: str, found: str, reading: _Reading) -> MismatchError:
        cut = reading.cut
        layout = f"cuts it over devices {cut.dev_matrix} into {cut.parts()} parts"
        layout += f" of {cut.sizes} rows" if cut.sizes is not None else ""
        layout += f" and gives it the shape {reading.shape}" if reading.shape is not None else ""
        return MismatchError(
            f"{show(key)} is of {found}, which does not fit {show(self.source)}: it {layout}",
            path=self.source,
            key=key,
            hint="is this the strategy with which the checkpoint was written?",
        )


def region_of(
    strategy: Strategy, key: str, rank: int, local_shape: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The global shape of a tensor and the offset of the local array of a rank in it.

    Args:
        strategy: the strategy of the checkpoint.
        key: the key of the tensor. A tensor that the strategy does not list is replicated on every rank.
        rank: the global rank.
        local_shape: the shape of the array of that rank, in elements.

    Returns:
        The global shape and the offset of the array, both in elements; None if only other stages hold the tensor.

    Raises:
        ArgumentError: the strategy does not have this rank.
        MismatchError: the local shape does not match the partition of the tensor on this rank.
        UnsupportedError: the record of the tensor uses a feature that is not supported.

    Example:
        >>> from reshard.layout.strategy_file import LayoutItem
        >>> table = LayoutItem((2, 2), ((0, -1),), opt_weight_shard_size=-1, opt_weight_shard_step=2)
        >>> strategy = Strategy({0: {"w": table}, 1: {}})
        >>> region_of(strategy, "w", 2, (4, 6)), region_of(strategy, "w", 4, (4, 6)), region_of(strategy, "step", 4, ())
        (((16, 6), (4, 0)), None, ((), ()))
    """
    local = tuple(local_shape)
    stage, position = strategy._position(rank)  # noqa: SLF001  one idea in two names
    readings = strategy._read(key, stage, len(local))  # noqa: SLF001
    for reading in readings:
        if (region := reading.region(position, local)) is not None:
            return region
    if not readings:
        return None
    raise strategy._mismatch(key, f"shape {local} on rank {rank}", readings[0])  # noqa: SLF001


# ------------------------------------------------------------------------------------------- interpretation of a record


@dataclass(frozen=True)
class _Where:
    source: str
    key: str

    def unsupported(self, message: str) -> UnsupportedError:
        return UnsupportedError(f"{show(self.source)}: {show(self.key)} {message}", path=self.source, key=self.key)


@dataclass(frozen=True)
class _Reading:
    """One interpretation of a record: the partition, and the global shape if the record contains it."""

    cut: DeviceCut
    shape: tuple[int, ...] | None

    def fits(self, shape: tuple[int, ...]) -> bool:
        if self.shape is not None and shape != self.shape:
            return False
        if self.cut.sizes is not None and shape[0] != sum(self.cut.sizes):
            return False
        return not any(extent % n for extent, n in list(zip(shape, self.cut.parts(), strict=True))[self._listed :])

    def region(self, position: int, local: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        parts, part = self.cut.parts(), self.cut.part_of(position)
        shape = [extent * n for extent, n in zip(local, parts, strict=True)]
        offset = [extent * k for extent, k in zip(local, part, strict=True)]
        if self.cut.sizes is not None:
            if local[0] != self.cut.sizes[part[0]]:
                return None
            shape[0], offset[0] = sum(self.cut.sizes), sum(self.cut.sizes[: part[0]])
        if self.shape is not None and tuple(shape) != self.shape:
            return None
        return tuple(shape), tuple(offset)

    @property
    def _listed(self) -> int:
        """The number of leading dims with a list of part sizes: 0 or 1."""
        return 0 if self.cut.sizes is None else 1


def _readings(item: LayoutItem, ndim: int, where: _Where) -> Iterator[_Reading]:
    if item.field > 0:
        raise where.unsupported(f"is a table divided by field groups (field {item.field})")
    plain = DeviceCut(item.dev_matrix, _maps(item, ndim, where))
    cut = _shared_further(plain, item, where)
    split = item.param_split_shape
    n_parts = plain.parts()[0] if ndim else 1
    # The C++ writer lists rows with an offset for each part. The Python writer lists the global shape. Both lists can
    # have the same length.
    is_shape = len(split) == ndim
    is_rows = ndim > 0 and len(split) == n_parts
    if not split and not item.indices_offset:
        yield _Reading(cut, None)
        return
    if not is_shape and not is_rows:
        raise where.unsupported(
            f"has the split shape {list(split)[:8]}, which is neither a shape of {counted(ndim, 'dim')} nor the "
            "rows of its "
            f"{n_parts} parts"
        )
    by_shape = _Reading(cut, split)
    if not is_rows:
        yield by_shape
        return
    if cut != plain:
        if is_shape and not item.indices_offset:
            yield by_shape
            return
        raise where.unsupported(f"has parts of {list(split)[:8]} rows that are shared further by the optimizer")
    by_rows = _Reading(DeviceCut(cut.dev_matrix, cut.tensor_map, split), None)
    if len(item.indices_offset) == len(split) or not is_shape:
        yield by_rows
    else:
        yield by_shape
        yield by_rows


def _possible_dims(item: LayoutItem) -> list[int]:
    """The possible numbers of dims of the tensor of a record, most probable first.

    The record of a replicated tensor does not determine the number of dims.
    """
    lists = [axes for axes in item.tensor_map if axes]
    dims = [len(lists[0]) if len(lists) == 1 else len(lists)]
    if not _is_cut(item):
        dims += [len(item.param_split_shape), 1]
    elif len(lists) == 1 and min(lists[0]) >= 0:
        dims.append(1)
    return list(dict.fromkeys(dims))


def _is_cut(item: LayoutItem) -> bool:
    return any(v >= 0 and item.dev_matrix[len(item.dev_matrix) - 1 - v] > 1 for axes in item.tensor_map for v in axes)


def _maps(item: LayoutItem, ndim: int, where: _Where) -> tuple[tuple[int, ...], ...]:
    """The device axes that partition each of the `ndim` dims of a tensor."""
    lists = [axes for axes in item.tensor_map if axes]
    if not _is_cut(item):
        return ((),) * ndim
    if len(lists) < len(item.tensor_map) == ndim:
        axes_of = [list(axes) for axes in item.tensor_map]
        raise where.unsupported(f"has the tensor map {axes_of}: an empty list can be a dim that is not cut, or nothing")
    maps: list[tuple[int, ...]] = lists
    # One list has one entry for each dim. For a 1-D tensor partitioned by several axes, it has all axes of the dim.
    if len(lists) == 1 and (ndim != 1 or min(lists[0]) < 0):
        maps = [(v,) for v in lists[0]]
    if len(maps) != ndim:
        raise MismatchError(
            f"{show(where.source)} cuts {counted(len(maps), 'dim')} of {show(where.key)}, which has {ndim}",
            path=where.source,
            key=where.key,
            hint="is this the strategy with which the checkpoint was written?",
        )
    return tuple(tuple(v for v in axes if v >= 0) for axes in maps)


def _shared_further(cut: DeviceCut, item: LayoutItem, where: _Where) -> DeviceCut:
    """The partition, extended by the further partition of a slice among the ranks that hold it.

    The part of a rank is its position among these ranks modulo the number of parts.
    """
    matrix = cut.dev_matrix
    free = cut.free_axes
    n_holders = math.prod(matrix[axis] for axis in free)
    share = n_holders if item.opt_weight_shard_size == -1 else item.opt_weight_shard_size
    if share <= 1:
        return cut
    if not cut.tensor_map:
        raise where.unsupported("has no dims, and is shared further by the optimizer")
    if len(free) == 1 and item.opt_weight_shard_step != (step := math.prod(matrix[free[0] + 1 :])):
        raise where.unsupported(
            f"is shared by ranks {item.opt_weight_shard_step} apart, while those that hold the same slice are {step} "
            "apart"
        )
    if n_holders % share:
        raise where.unsupported(f"is shared by {counted(share, 'rank')}, while {n_holders} hold the same slice")
    shared = shared_further(cut, share)
    if shared is None:
        raise where.unsupported(
            f"is shared by {item.opt_weight_shard_size} ranks, which are no run of the device axes "
            f"{list(cut.dev_matrix)}"
        )
    return shared
