"""Writes a folder of `torch.distributed.checkpoint`: data files with one item for each chunk, and `.metadata`.

Each region of a tensor is written once, by one of the ranks that hold it. Values beside the tensors become entries of
their own, as `dcp.save` flattens them; those without a plain encoding are left out, and reported.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from reshard import _core
from reshard.conversion.destinations import (
    File,
    Written,
    check_folder_free,
    publish_folder,
)
from reshard.conversion.writer import Settings, Writer
from reshard.errors import ArgumentError, UnsupportedError
from reshard.formats import state
from reshard.formats.dcp.metadata import Chunk, Place, Tensor, encode
from reshard.formats.dcp.names import DATA_SUFFIX, METADATA_FILE, OPTIMIZER_ENTRY, data_file, is_ours
from reshard.formats.huggingface.names import plan_shards
from reshard.formats.run_state import is_optimizer
from reshard.formats.torch_file.archive import Composer, object_archive, tensor_archive
from reshard.formats.torch_file.encode import NotPlainError, torch_dtype
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reshard.conversion.destinations import Job
    from reshard.conversion.known_files import Mark
    from reshard.conversion.source import Source
    from reshard.layout import BoundLayout

_ALIGN_BYTES = 64
_MAX_VALUES = 100_000
_MAX_DEPTH = 90

Path = tuple[str | int, ...]


class DcpWriter(Writer):
    """A folder of `torch.distributed.checkpoint`."""

    name = "dcp"
    commits = (METADATA_FILE,)
    # A data file has no mark of its own.
    marks: ClassVar[Mapping[str, Mark]] = dict.fromkeys(
        (METADATA_FILE, DATA_SUFFIX), lambda entry: is_ours(entry.parent)
    )

    def writes_extra(self, job: Job) -> bool:
        """As values of the checkpoint. They name tensors as the source does, and are left out if these are renamed."""
        return not job.is_renamed

    def write(self, job: Job, settings: Settings) -> Written:
        """Write the data files, and `.metadata` last."""
        if settings.dedup is False:
            raise ArgumentError(
                '`dedup=False` has no meaning with `to="dcp"`: a folder of torch.distributed.checkpoint holds each '
                "region of a tensor once"
            )
        check_folder_free(job)
        values, paths, warnings = _state(job, settings) if settings.with_state else ({}, {}, [])
        folder = plan_folder(job, settings.layout, settings.max_bytes, values)
        names: dict[str, Path] = {key: (key,) for key in folder.tensors}
        names |= {name: paths[name] for name in folder.objects}
        if state_keys := [key for key in job.source.keys("optimizer") if key in names and not is_optimizer(key)]:
            names[OPTIMIZER_ENTRY] = tuple(state_keys)
        data = encode(folder.tensors, folder.objects, names)
        warnings = [*settings.layout.warnings, *warnings, *folder.warnings]
        return publish_folder(job, folder.files, {METADATA_FILE: data}, warnings=warnings)


# -- tensors


class _Region(NamedTuple):
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    n_bytes: int


@dataclass
class Folder:
    """The planned content of a folder.

    Attributes:
        files: the data files.
        tensors: the tensors by name, with the places of their chunks.
        objects: the place of each value that is no tensor.
        warnings: values that are left out.
    """

    files: list[File] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    objects: dict[str, Place] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def plan_folder(job: Job, bound: BoundLayout, max_bytes: int | None, values: Mapping[str, object]) -> Folder:
    """Plan the data files.

    Args:
        job: the conversion.
        bound: which rank holds which part of a tensor.
        max_bytes: largest size of the tensors of a file, or None: one file a rank.
        values: values that are no tensors, by name; they go into the first file.

    Raises:
        UnsupportedError: torch has no such dtype, or regions of a tensor overlap.
    """
    folder = Folder()
    for key, dtype, shape, _ in job.arrays(job.whole_request(job.keys)):
        torch_dtype(key, dtype)
        folder.tensors[key] = Tensor(dtype, tuple(shape))
    of_rank = _regions(folder, bound)
    first = Composer()
    for name, value in values.items():
        start = _aligned(first)
        try:
            archive = object_archive(value)
        except NotPlainError as error:
            folder.warnings.append(f"{show(name)} is not written: {error}")
            continue
        first.append(archive)
        folder.objects[name] = Place(data_file(min(of_rank), 0), start, archive.n_bytes)
    composer: Composer | None = first
    for rank, regions in sorted(of_rank.items()):
        sizes = [(str(number), region.n_bytes) for number, region in enumerate(regions)]
        shards = plan_shards(sizes, max_bytes) if max_bytes is not None else [[number for number, _ in sizes]]
        for number, shard in enumerate(shards):
            composer = composer or Composer()
            name = data_file(rank, number)
            request = _core.Request()
            for position in shard:
                region = regions[int(position)]
                tensor = folder.tensors[region.key]
                request.add_region(position, region.key, region.offset, region.shape)
                start = _aligned(composer)
                composer.append(tensor_archive(tensor.dtype, region.shape, region.n_bytes))
                place = Place(name, start, composer.n_bytes - start)
                tensor.chunks.append(Chunk(region.offset, region.shape, place))
            folder.files.append(File(name, request, composer.container()))
            composer = None
    return folder


def _aligned(composer: Composer) -> int:
    """Begin an item, so that its data is aligned in the file as it is in the item."""
    composer.literal(bytes(-composer.n_bytes % _ALIGN_BYTES))
    return composer.n_bytes


def _regions(folder: Folder, bound: BoundLayout) -> dict[int, list[_Region]]:
    """The regions that each rank writes: each region once, by the rank with the fewest bytes of those that hold it."""
    of_rank: dict[int, list[_Region]] = {}
    load = dict.fromkeys(bound.ranks, 0)
    regions: dict[_core.Layout, dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]]] = {}
    for key, tensor in folder.tensors.items():
        layout = bound.layouts[key]
        held = regions.get(layout)
        if held is None:
            held = regions[layout] = {}
            for rank in layout.holders():
                for tile in layout.tiles(rank):
                    held.setdefault((tile.offset, tile.shape), []).append(rank)
            if sum(math.prod(shape) for _, shape in held) != math.prod(tensor.shape):
                raise UnsupportedError(
                    f"parts of {show(key)} overlap in this layout, which torch.distributed.checkpoint cannot express",
                    key=key,
                )
            if not held:  # no element: one chunk, so that the tensor exists
                held[(0,) * len(tensor.shape), tensor.shape] = [bound.ranks[0]]
        bits = _core.dtype_bits(tensor.dtype)
        for (offset, shape), ranks in held.items():
            n_bytes = math.prod(shape) * bits // 8
            rank = min(ranks, key=lambda rank: (load[rank], rank))
            load[rank] += n_bytes
            of_rank.setdefault(rank, []).append(_Region(key, offset, shape, n_bytes))
    return of_rank


# -- other values


def _state(job: Job, settings: Settings) -> tuple[dict[str, object], dict[str, Path], list[str]]:
    """Values beside the tensors by name, the path of each, and what cannot be written."""
    source = job.source
    values: dict[str, object] = {}
    paths: dict[str, Path] = {}
    warnings: list[str] = []
    # The counters first: they are the position of the run, and another value with such a name is left out.
    extra = source.extra() if settings.with_extra else {}
    for name, value in (*_counters(source).items(), *extra.items()):
        try:
            leaves = list(_leaves((name,), value, [_MAX_VALUES]))
        except NotPlainError as error:
            warnings.append(f"{show(name)} is not written: {error}")
            continue
        for path, leaf in leaves:
            key = ".".join(map(str, path))
            if type(leaf) is type(values.get(key)) is int and leaf == values[key]:
                continue  # a counter that the source has as a value, too
            if key in paths or key in job.keys:
                warnings.append(f"{show(key)} is not written: another entry has this name")
            else:
                values[key], paths[key] = leaf, path
    if settings.with_extra and source.data.has_values_of_ranks():
        warnings.append("values of single ranks are written for rank 0 only")
    manifest = source.manifest if settings.with_extra else None
    others = [] if manifest is None else [name for name in manifest.files if _is_of_other_rank(name)]
    if others:
        warnings.append(f"the state of single ranks is written for rank 0 only: {listed(others, 3)} are left out")
    return values, paths, warnings


def _is_of_other_rank(name: str) -> bool:
    return name.startswith("extra-") and name.endswith(".json") and name != state.file_name(0)


def _counters(source: Source) -> dict[str, object]:
    """The counters of the run that are set, below `common`, and the iteration."""
    common = source.common
    counters: dict[str, object] = {}
    if source.iteration is not None:
        counters["iteration"] = source.iteration
    if common is not None:
        names = ("epoch_num", "step_num", "global_step", "loss_scale", "global_batch_size", "consumed_samples")
        known = {name: getattr(common, name) for name in names}
        counters["common"] = {name: value for name, value in known.items() if value is not None}
    return counters


def _leaves(path: Path, value: object, budget: list[int]) -> Iterator[tuple[Path, object]]:
    """The values that `dcp.save` stores as one entry each: dicts are flattened, and lists that contain dicts."""
    budget[0] -= 1
    if budget[0] < 0 or len(path) > _MAX_DEPTH:
        raise NotPlainError(f"it has more than {_MAX_VALUES} values, or is nested more than {_MAX_DEPTH} levels deep")
    if type(value) is dict and value:
        for key, item in value.items():
            yield from _leaves((*path, str(key)), item, budget)
    elif type(value) is list and _has_dict(value, budget, 0):
        for number, item in enumerate(value):
            yield from _leaves((*path, number), item, budget)
    else:
        yield path, value


def _has_dict(values: Sequence[object], budget: list[int], depth: int) -> bool:
    budget[0] -= len(values)
    if budget[0] < 0 or depth > _MAX_DEPTH:
        raise NotPlainError(f"it has more than {_MAX_VALUES} values, or is nested more than {_MAX_DEPTH} levels deep")
    return any(type(item) is dict or (type(item) is list and _has_dict(item, budget, depth + 1)) for item in values)
