"""Forecasts a conversion to a layout before it runs: bytes by rank and by file, transfers, disk and memory.

Only descriptions are read: headers and metadata, never tensor data. The transfers are those of the plans that a load
would execute. For very many ranks only some of them are planned; `Forecast` says which.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from reshard import _core, dtypes
from reshard.checkpoint import FileInfo
from reshard.formats.registry import writer_for
from reshard.options import Commit
from reshard.storage.changes import temporary_folder
from reshard.storage.location import locate
from reshard.values.argument_types import Part
from reshard.verbs.convert import convert
from reshard.verbs.verify import verify

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from reshard.checkpoint import Checkpoint, LayoutLike
    from reshard.layout import BoundLayout
    from reshard.write.contents import DtypeAndPart

_MAX_PLANNED = 400_000  # arrays in the plans of all ranks
_MIN_RANKS = 16  # that are planned
_MAX_SHARDS = 1_000_000  # that are assigned to files
_SAMPLE_BYTES = 96 << 20
_ROUNDS = 3  # of the measurement, of which the median counts


@dataclass(frozen=True)
class Forecast:
    """What a conversion to a layout will read, move and write.

    Attributes:
        n_tensors: number of tensors.
        n_bytes: bytes of the tensors, each once.
        mesh: sizes of the axes of the layout.
        sources: the files of the source.
        rank_bytes: by rank, the bytes of its arrays: what `load` allocates on it.
        files: the files that `convert` writes for the layout, each shard once, and the bytes of their arrays; None: too
            many shards to assign them.
        transfers: by rank and then by the number of a source file, the bytes that `load` copies. Copies of a shard in
            several files are read from one of them.
        warnings: rules of the layout without an effect, tensors that metadata.json cannot describe.
    """

    n_tensors: int
    n_bytes: int
    mesh: dict[str, int]
    sources: tuple[FileInfo, ...]
    rank_bytes: Mapping[int, int]
    files: tuple[FileInfo, ...] | None
    transfers: Mapping[int, Mapping[int, int]]
    warnings: tuple[str, ...]

    @property
    def written_bytes(self) -> int:
        """Bytes of the arrays that `convert` writes; without the padding of joined arrays if `files` is None."""
        return self.n_bytes if self.files is None else sum(file.n_bytes for file in self.files)


def forecast(checkpoint: Checkpoint, layout: LayoutLike, *, part: Part = "all") -> Forecast:
    """Forecast what a conversion of a checkpoint to a layout reads and writes.

    Args:
        checkpoint: the source.
        layout: the layout of the destination.
        part: "model", "optimizer" or "all".

    Raises:
        LayoutError: the layout does not match the tensors.
        CoverageError, MismatchError, UnsupportedError: the source does not allow it.
        DamagedFileError, StorageError: a header cannot be read.

    Example:
        >>> import numpy as np, reshard
        >>> reshard.save_file({"w": np.zeros((8, 2), np.float32)}, "forecast.safetensors")
        >>> layout = {"mesh": {"tp": 4}, "rules": [{"match": "w", "cut": ["tp"]}]}
        >>> with reshard.open("forecast.safetensors") as checkpoint:
        ...     found = forecast(checkpoint, layout)
        >>> found.n_bytes, found.rank_bytes[0], found.transfers[3]
        (64, 16, {0: 16})
    """
    bound = checkpoint.bind(layout)
    keys = checkpoint.keys(part)
    tensors = {key: (checkpoint.data.index.info(key)[0], checkpoint.data.part(key)) for key in keys}
    planned = _planned_ranks(bound.ranks, len(keys))
    chosen = None if part == "all" else keys
    transfers: dict[int, dict[int, int]] = {}
    exact: dict[int, int] = {}
    for rank in planned:
        # Not `Checkpoint.plan`: in rank folders it compares copies, which reads tensor data.
        plan = checkpoint.data.index.plan(bound.request(rank, chosen), verify=False)
        transfers[rank], exact[rank] = plan.source_bytes, plan.n_bytes
    computed = {} if len(planned) == len(bound.ranks) else rank_bytes(bound, tensors)
    files, warnings = _files(checkpoint.data.index, bound, tensors)
    return Forecast(
        n_tensors=len(keys),
        n_bytes=sum(dtypes.n_bytes(dtype, bound.layouts[key].shape) for key, (dtype, _) in tensors.items()),
        mesh=dict(bound.mesh.axes),
        sources=tuple(checkpoint.files()),
        rank_bytes={rank: exact.get(rank, computed.get(rank, 0)) for rank in sorted(bound.ranks)},
        files=files,
        transfers=transfers,
        warnings=tuple(dict.fromkeys((*bound.warnings, *warnings))),
    )


def _planned_ranks(ranks: list[int], n_tensors: int) -> list[int]:
    """All ranks, or evenly chosen ones if the plans of all would take too long."""
    ordered = sorted(ranks)
    n = min(len(ordered), max(_MIN_RANKS, _MAX_PLANNED // max(n_tensors, 1)))
    return [ordered[i * len(ordered) // n] for i in range(n)]


def rank_bytes(bound: BoundLayout, tensors: Mapping[str, DtypeAndPart]) -> dict[int, int]:
    """Bytes of each rank's arrays; of joined ones, as if each key were divided by itself."""
    bits: Counter[int] = Counter()
    layouts = {}  # equal ones are computed once
    for key, (dtype, _) in tensors.items():
        layout = bound.layouts[key]
        layouts[id(layout)] = layout
        bits[id(layout)] += dtypes.bits(dtype)
    total = dict.fromkeys(bound.ranks, 0)
    for number, layout in layouts.items():
        for rank in layout.holders():
            total[rank] += bits[number] * math.prod(layout.local_shape(rank)) // 8
    return total


def _files(
    index: _core.Index, bound: BoundLayout, tensors: Mapping[str, DtypeAndPart]
) -> tuple[tuple[FileInfo, ...] | None, tuple[str, ...]]:
    """The files that `convert` writes, with the bytes of their arrays, and its warnings."""
    mesh = dict(bound.mesh.axes)
    n_shards = sum(math.prod(mesh[axis] for axis in bound.tensor_layouts[key].partition.axes) for key in tensors)
    if n_shards > _MAX_SHARDS:
        return None, ()
    planned = writer_for(None, locate("."), has_layout=True).planned(tensors, bound)
    if planned is None:
        return None, ()
    files, warnings = planned
    sizes = index.request_bytes(bound.requests_of([(file.rank, file.arrays) for file in files]))
    return tuple(FileInfo(file.name, n_bytes) for file, n_bytes in zip(files, sizes, strict=True)), tuple(warnings)


# -- the speed of this machine


@dataclass(frozen=True)
class Speed:
    """Speeds that were measured in a folder: the median of three rounds with a model of 96 MiB, which is removed.

    Attributes:
        convert_bytes_per_s: `convert` of one file, which is in the page cache, to two files that are synced.
        read_bytes_per_s: `verify` of these files, past the page cache.
    """

    convert_bytes_per_s: float
    read_bytes_per_s: float

    def seconds(self, n_bytes: int, *, cached: bool) -> float:
        """Seconds for a conversion of so many bytes.

        Args:
            n_bytes: bytes that are read, and written once.
            cached: whether the source is in the page cache.

        Example:
            >>> Speed(100.0, 50.0).seconds(1000, cached=True), Speed(100.0, 50.0).seconds(1000, cached=False)
            (10.0, 30.0)
        """
        return n_bytes / self.convert_bytes_per_s + (0.0 if cached else n_bytes / self.read_bytes_per_s)


def measure_speed(folder: str | os.PathLike[str]) -> Speed:
    """Measure the speed of a conversion in a folder. Takes about two seconds, and writes 384 MiB that are removed.

    Raises:
        StorageError: the folder cannot be written, or has no space.

    Example:
        >>> measure_speed(".").convert_bytes_per_s > 0
        True
    """
    with temporary_folder("reshard-plan-", inside=folder) as made:
        rows = np.random.default_rng(0).integers(0, 256, (48, _SAMPLE_BYTES // 48), np.uint8)
        tensors = [(f"layers.{n}.weight", "U8", row.shape, row) for n, row in enumerate(rows)]
        _core.write_arrays(str(made / "source.safetensors"), tensors, durable=False)
        layout = {"mesh": {"tp": 2}, "rules": [{"match": "*", "cut": ["tp"]}]}
        converting, reading = [], []
        for n in range(_ROUNDS):
            start = time.perf_counter()
            convert(made / "source.safetensors", made / f"cut{n}", layout=layout, commit=Commit(durable=True))
            converted = time.perf_counter()
            verify(made / f"cut{n}")
            converting.append(converted - start)
            reading.append(time.perf_counter() - converted)
    return Speed(_SAMPLE_BYTES / sorted(converting)[_ROUNDS // 2], _SAMPLE_BYTES / sorted(reading)[_ROUNDS // 2])


def free_bytes(folder: str | os.PathLike[str]) -> int | None:
    """Bytes that can still be written below a folder; None: not known.

    Example:
        >>> free_bytes(".") > 0
        True
    """
    place = locate(folder)
    return place.store.free_bytes(place.path)
