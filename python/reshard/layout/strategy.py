"""The meaning of a strategy: which region of a tensor lies on which rank.

The stage of a rank is its number divided by the devices of a stage; its coordinates follow from its position in the
stage. The axes in `tensor_map` divide the dims. Where the ranks that hold the same slice divide it further (ZeRO, in
the file `opt_weight_shard_*`), dim 0 has one more, innermost division. An ambiguous record is refused unless the shape
of the tensor resolves it. How the files are read is not known here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.errors import ArgumentError, CheckpointNotFoundError, LayoutError, MismatchError, UnsupportedError
from reshard.layout.device_cut import DeviceCut, shared_further
from reshard.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from reshard.layout.strategy_file import LayoutItem

__all__ = ["DeviceCut", "Strategy", "box_of"]


class Strategy:
    """How every parameter of a model is divided over all ranks, stage by stage.

    A key that no stage lists is whole on every rank.

    Attributes:
        source: the file or folder it was read from, for messages.
        n_stages: pipeline stages.
        devices_per_stage: ranks of each stage; rank = stage x this + position.
        world_size: ranks in all.

    Example:
        >>> from reshard.layout.strategy_file import LayoutItem
        >>> strategy = Strategy({0: {"w": LayoutItem((2, 2), ((0, -1),))}})
        >>> box_of(strategy, "w", 3, (4, 6))
        ((8, 6), (4, 0))
    """

    def __init__(self, stages: Mapping[int, Mapping[str, LayoutItem]], *, source: str = "strategy") -> None:
        """Combine the stages.

        Args:
            stages: the records of each stage, by name of the parameter.
            source: where they were read from, for messages.

        Raises:
            CheckpointNotFoundError: stages are missing.
            LayoutError: no stage lists a parameter, or the stages have different numbers of devices.
        """
        self.source = source
        self.stages = {stage: dict(stages[stage]) for stage in sorted(stages)}
        self.n_stages = max(self.stages, default=-1) + 1
        # A hostile number of a stage must not make a list of what is missing before it.
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
            told = ", ".join(f"{n} devices ({show(key)} in stage {stage})" for n, (stage, key) in devices.items())
            raise LayoutError(
                f"{show(source)}: stages must have one number of devices, found {told or 'no parameter at all'}",
                path=source,
            )
        (self.devices_per_stage,) = devices
        self.world_size = self.n_stages * self.devices_per_stage
        self._readings: dict[tuple[int, str, int], list[_Reading]] = {}

    def keys(self) -> tuple[str, ...]:
        """Every key that some stage lists, in the order of the stages."""
        return tuple(dict.fromkeys(key for items in self.stages.values() for key in items))

    def stages_of(self, key: str) -> tuple[int, ...]:
        """The stages that list a key; empty: it is whole on every rank."""
        return tuple(stage for stage, items in self.stages.items() if key in items)

    def check_unlisted(self, keys: Iterable[str]) -> None:
        """Refuse keys that the strategy lists with a stage number as prefix, or without the prefix that they have.

        Args:
            keys: keys of tensors with dims that no stage lists, which would be read as whole.

        Raises:
            MismatchError: the strategy was read as merged though it is not, or the reverse.
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
        """How a tensor is divided over the stage of a rank.

        Args:
            key: its name.
            rank: the global rank.
            ndim: the tensor's number of dims.
            shape: its global shape in elements, if known: it resolves ambiguous records.

        Returns:
            The partition; None if other stages hold the tensor.

        Raises:
            ArgumentError: there is no such rank.
            MismatchError: the tensor does not have the dims, or the shape, of the strategy.
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
        """How a tensor is divided on a stage that lists it, as far as this follows from its record without its shape.

        Args:
            key: the tensor.
            stage: the stage.

        Returns:
            The partition, and whether it is certain. If not, it is that of a tensor of several dims with one axis each;
            a tensor of one dim would be divided by all these axes.

        Raises:
            UnsupportedError: as `cut_of`, whatever the shape is.

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
        """Stage of a rank, and its position in it."""
        if not 0 <= rank < self.world_size:
            raise ArgumentError(
                f"{show(self.source)} has no rank {rank}: {self.n_stages} stages of {self.devices_per_stage} devices",
                hint="the strategy is of another run, or of only some of its stages" if rank > 0 else None,
            )
        return divmod(rank, self.devices_per_stage)

    def _read(self, key: str, stage: int, ndim: int) -> list[_Reading]:
        """What the record of a tensor of so many dims can mean, the likeliest first; none: not of this stage."""
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
        told = f"cuts it over devices {cut.dev_matrix} into {cut.parts()} parts"
        told += f" of {cut.sizes} rows" if cut.sizes is not None else ""
        told += f" and gives it the shape {reading.shape}" if reading.shape is not None else ""
        return MismatchError(
            f"{show(key)} is of {found}, which does not fit {show(self.source)}: it {told}",
            path=self.source,
            key=key,
            hint="is this the strategy with which the checkpoint was written?",
        )


def box_of(
    strategy: Strategy, key: str, rank: int, local_shape: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Where in the whole tensor a local array lies that the file of a rank holds.

    Args:
        strategy: how the checkpoint was divided.
        key: the tensor; one that the strategy does not list is whole on every rank.
        rank: the global rank.
        local_shape: the shape of the array of that rank.

    Returns:
        The shape of the whole tensor and the offset of the array in it; None if the strategy puts the tensor on other
        stages.

    Raises:
        ArgumentError: the strategy has no such rank.
        MismatchError: an array of this shape cannot be the rank's part.
        UnsupportedError: the record of the tensor uses a feature that is not supported.

    Example:
        >>> from reshard.layout.strategy_file import LayoutItem
        >>> table = LayoutItem((2, 2), ((0, -1),), opt_weight_shard_size=-1, opt_weight_shard_step=2)
        >>> strategy = Strategy({0: {"w": table}, 1: {}})
        >>> box_of(strategy, "w", 2, (4, 6)), box_of(strategy, "w", 4, (4, 6)), box_of(strategy, "step", 4, ())
        (((16, 6), (4, 0)), None, ((), ()))
    """
    local = tuple(local_shape)
    stage, position = strategy._position(rank)  # noqa: SLF001  one idea in two names
    readings = strategy._read(key, stage, len(local))  # noqa: SLF001
    for reading in readings:
        if (box := reading.box(position, local)) is not None:
            return box
    if not readings:
        return None
    raise strategy._mismatch(key, f"shape {local} on rank {rank}", readings[0])  # noqa: SLF001


# -------------------------------------------------------------------------------------------------- what a record means


@dataclass(frozen=True)
class _Where:
    source: str
    key: str

    def unsupported(self, message: str, hint: str | None = None) -> UnsupportedError:
        return UnsupportedError(
            f"{show(self.source)}: {show(self.key)} {message}", path=self.source, key=self.key, hint=hint
        )


@dataclass(frozen=True)
class _Reading:
    """One meaning of a record: the partition, and the global shape if the record contains it."""

    cut: DeviceCut
    shape: tuple[int, ...] | None

    def fits(self, shape: tuple[int, ...]) -> bool:
        if self.shape is not None and shape != self.shape:
            return False
        if self.cut.sizes is not None and shape[0] != sum(self.cut.sizes):
            return False
        return not any(extent % n for extent, n in list(zip(shape, self.cut.parts(), strict=True))[self._listed :])

    def box(self, position: int, local: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
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
        """How many dims have the sizes of their parts listed."""
        return 0 if self.cut.sizes is None else 1


def _readings(item: LayoutItem, ndim: int, where: _Where) -> Iterator[_Reading]:
    if item.field > 0:
        raise where.unsupported(f"is a table divided by field groups (field {item.field})")
    plain = DeviceCut(item.dev_matrix, _maps(item, ndim, where))
    cut = _shared_further(plain, item, where)
    split = item.param_split_shape
    n_parts = plain.parts()[0] if ndim else 1
    # The C++ writer lists rows, with an offset for each; the Python writer the shape. The lists can be of one length.
    is_shape = len(split) == ndim
    is_rows = ndim > 0 and len(split) == n_parts
    if not split and not item.indices_offset:
        yield _Reading(cut, None)
        return
    if not is_shape and not is_rows:
        raise where.unsupported(
            f"has the split shape {list(split)[:8]}, which is neither a shape of {ndim} dims nor the rows of its "
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
    """How many dims the tensor of a record can have, the likeliest first; what is not cut is alike in any number."""
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
    """The axes of each dim of a tensor of so many dims."""
    lists = [axes for axes in item.tensor_map if axes]
    if not _is_cut(item):
        return ((),) * ndim
    if len(lists) < len(item.tensor_map) == ndim:
        told = [list(axes) for axes in item.tensor_map]
        raise where.unsupported(f"has the tensor map {told}: an empty list can be a dim that is not cut, or nothing")
    maps: list[tuple[int, ...]] = lists
    # One list has one entry a dim or, of a 1-d tensor that several axes cut, all axes of its dim.
    if len(lists) == 1 and (ndim != 1 or min(lists[0]) < 0):
        maps = [(v,) for v in lists[0]]
    if len(maps) != ndim:
        raise MismatchError(
            f"{show(where.source)} cuts {len(maps)} dims of {show(where.key)}, which has {ndim}",
            path=where.source,
            key=where.key,
            hint="is this the strategy with which the checkpoint was written?",
        )
    return tuple(tuple(v for v in axes if v >= 0) for axes in maps)


def _shared_further(cut: DeviceCut, item: LayoutItem, where: _Where) -> DeviceCut:
    """The cut with what the ranks of one slice share further: their number modulo the share is the part of it."""
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
        raise where.unsupported(f"is shared by {share} ranks, while {n_holders} hold the same slice")
    shared = shared_further(cut, share)
    if shared is None:
        raise where.unsupported(
            f"is shared by {item.opt_weight_shard_size} ranks, which are no run of the device axes "
            f"{list(cut.dev_matrix)}"
        )
    return shared
