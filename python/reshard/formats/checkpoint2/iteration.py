"""The files of a Checkpoint 2.0 iteration and their content, planned for `save` and for `convert`.

A plan says which rank writes which arrays into which file, and how `metadata.json` describes them; `tiles.json`
describes those that it cannot express. A plan follows from dtypes, global shapes and either a bound layout or the
regions that ranks hold. It knows neither the bytes of the arrays nor how folders are published.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import threading
import zlib
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard import _core, dtypes
from reshard.commit.manifest import MAX_FILES, PlainEntry, digest_of, new_digest
from reshard.errors import CoverageError, ReshardError, UnsupportedError
from reshard.formats.checkpoint2 import names as checkpoint2
from reshard.formats.checkpoint2.metadata import WrittenMetadata, inexpressible, reasons_of, write_metadata
from reshard.formats.checkpoint2.shards import (
    FilePlan,
    HeldGrid,
    RecordKind,
    Records,
    TensorRecord,
    assign,
    assigned_to_one,
    shards_of,
)
from reshard.formats.tiled import names as tiles
from reshard.values.indexing import Region, row_major
from reshard.values.words import listed, show
from reshard.write.contents import DtypeAndPart, FileContent

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from reshard.layout import BoundLayout
    from reshard.layout.partition import TensorLayout
    from reshard.storage.location import Location

__all__ = [
    "Descriptions",
    "IterationPlan",
    "Kept",
    "Region",
    "check_copies",
    "describe_cut",
    "plan_layout",
    "plan_regions",
    "write_descriptions",
]


_MAX_SHARD_FILES = MAX_FILES - 16  # besides those that describe the iteration
_MAX_COPIES = 1 << 14
_MAX_KEPT_BYTES = 32 << 20  # of each file, for later saves
_UNPACKED_BYTES = 1 << 20
_MANY_LINES = 4096  # of tensors and files: they take milliseconds, and starting a thread takes a tenth of one
NOT_EXPRESSED = "metadata.json cannot express the layout"
"""Begins the warning about tensors that only this package reads."""


@dataclass(frozen=True)
class IterationPlan:
    """Everything about an iteration but the bytes of its tensors.

    Attributes:
        files: the shard files; a rank that writes nothing of a part has no file of it.
        records: the tensors that metadata.json describes.
        mesh: the device mesh.
        assigned: the files, as metadata.json needs them.
        prefix: first part of the names of the files.
        tiles: the content of tiles.json; None where metadata.json describes everything.
        holders: by array name, the groups of ranks whose copies hold the same bytes; empty for one rank.
        not_expressible: tensors that are only in tiles.json, with the reason.
        warnings: problems that do not stop the save.
    """

    files: tuple[FileContent, ...]
    records: Records
    mesh: _core.Mesh
    assigned: FilePlan
    prefix: str | None
    tiles: tiles.TilesFile | None
    holders: Mapping[str, list[tuple[int, ...]]]
    not_expressible: Mapping[str, str]
    warnings: tuple[str, ...]


def plan_layout(
    tensors: Mapping[str, DtypeAndPart],
    bound: BoundLayout,
    *,
    prefix: str | None = None,
    dedup: bool = True,
    strict: bool = False,
) -> IterationPlan:
    """Plan tensors that a layout partitions.

    Args:
        tensors: those that are written, by key; the layout may be bound to more.
        bound: the layout, bound to the tensors of the whole checkpoint.
        prefix: first part of the names of the shard files.
        dedup: write each shard once instead of once for every rank that holds it.
        strict: refuse a tensor whose layout metadata.json cannot express.

    Raises:
        UnsupportedError: `strict`, and a tensor is not expressible; too many files.
        ArgumentError: a prefix that cannot stand in a name; a key in both parts.
        LayoutError: as `BoundLayout.local_names`.

    Example:
        >>> from reshard.layout import ModelLayout
        >>> layout = ModelLayout.from_mapping({"mesh": {"tp": 2}, "rules": [{"match": "*", "cut": ["tp"]}]})
        >>> plan = plan_layout({"w": ("F32", "model")}, layout.bind({"w": (4, 2)}))
        >>> [(file.rank, file.arrays, file.name) for file in plan.files][1]
        (1, ('w',), 'model-0000001-0000002.safetensors')
    """
    checkpoint2.check_prefix(prefix)
    mesh = bound.mesh
    layouts: dict[TensorLayout, TensorLayout] = {}  # equal ones are one object
    joined = {key for join in bound.joins for key in join.keys}
    records = Records.of(
        TensorRecord(key, dtype, part, layouts.setdefault(layout, layout))
        for key, (dtype, part) in tensors.items()
        if key not in joined
        for layout in [bound.tensor_layouts[key]]
    )
    reasons = {key: "it is joined with others into one array" for key in tensors if key in joined}
    reasons |= _reasons(records, mesh)
    warnings = (*bound.warnings, *_inexpressible(reasons, strict=strict))
    shards: list[HeldGrid] = [*shards_of(records, mesh), *_joined_shards(tensors, bound)]
    assigned = assign(shards, bound.ranks, dedup=dedup)
    dtype_of = {key: dtype for key, (dtype, _) in tensors.items()}
    dtype_of |= {join.name: dtype_of[join.keys[0]] for join in bound.joins if join.keys[0] in dtype_of}
    files = _files(assigned, prefix, dtype_of)
    builder = tiles.Builder()
    for file in files if reasons else ():
        describe_cut(builder, bound, dtype_of, file, reasons)
    return IterationPlan(
        files,
        records.without(reasons),
        mesh,
        assigned,
        prefix,
        builder.build(bound.to_mapping()) if len(builder) else None,
        _holders(shards),
        reasons,
        warnings,
    )


def plan_regions(
    keys: Sequence[str],
    kind_of: Sequence[int],
    kinds: Sequence[tuple[RecordKind, Mapping[int, Region]]],
    n_ranks: int,
    *,
    prefix: str | None = None,
    dedup: bool = True,
    strict: bool = False,
) -> IterationPlan:
    """Plan tensors of which each rank holds a region, without a layout. metadata.json describes those that are whole.

    Args:
        keys: the tensors that are written, each once.
        kind_of: the number of the kind of each.
        kinds: a tensor, and what each rank holds of it. Equal regions are replicas; others must not overlap.
        n_ranks: the world size.
        prefix: as in `plan_layout`.
        dedup: as in `plan_layout`.
        strict: as in `plan_layout`.

    Raises:
        CoverageError: the regions leave a part of a tensor uncovered, or overlap.
        UnsupportedError, ArgumentError: as `plan_layout`.

    Example:
        >>> from reshard.layout import TensorLayout
        >>> kind = RecordKind("F32", "model", TensorLayout((4,))), {0: ((0,), (1,)), 1: ((1,), (3,))}
        >>> plan = plan_regions(["w"], [0], [kind], 2)
        >>> [file.rank for file in plan.files], list(plan.not_expressible)
        ([0, 1], ['w'])
    """
    checkpoint2.check_prefix(prefix)
    mesh = _core.Mesh([("dp", n_ranks)])
    held = [_by_region(regions) for _, regions in kinds]
    of_kinds = [kind for kind, _ in kinds]
    faults: list[str | None] = []
    for kind, ranks_of in zip(of_kinds, held, strict=True):
        whole = ((0,) * len(kind.layout.shape), kind.layout.shape)
        is_whole = set(ranks_of) == {whole} and len(ranks_of[whole]) == n_ranks
        not_whole = "each rank holds a region of it, and no layout says which"
        faults.append(inexpressible(kind, mesh) if is_whole else not_whole)
    reasons: dict[str, str] = {}
    described = Records(keys, of_kinds, kind_of)
    if any(faults):
        found = zip(keys, map(faults.__getitem__, kind_of), strict=True)
        reasons = {key: reason for key, reason in found if reason is not None}
        described = described.without(reasons)
    if n_ranks == 1:
        shards: list[HeldGrid] = []
        is_model = [kind.part == "model" for kind in of_kinds]
        model = keys if all(is_model) else [key for key, n in zip(keys, kind_of, strict=True) if is_model[n]]
        optimizer = () if all(is_model) else [key for key, n in zip(keys, kind_of, strict=True) if not is_model[n]]
        assigned = assigned_to_one({"model": model, "optimizer": optimizer})
    else:
        grids = [
            [
                ({number: ranks}, math.prod(shape) * dtypes.bits(kind.dtype))
                for number, ((_, shape), ranks) in enumerate(ranks_of.items())
            ]
            for kind, ranks_of in zip(of_kinds, held, strict=True)
        ]
        shards = [
            HeldGrid(key, of_kinds[kind].part, grid, n_bits)
            for key, kind in zip(keys, kind_of, strict=True)
            for grid, n_bits in grids[kind]
        ]
        assigned = assign(shards, range(n_ranks), dedup=dedup)
    of_dtypes = [kind.dtype for kind in of_kinds]
    is_one_width = len(set(map(dtypes.bits, of_dtypes))) <= 1
    of_keys = None if is_one_width else dict(zip(keys, map(of_dtypes.__getitem__, kind_of), strict=True))
    files = _files(assigned, prefix, of_keys)
    builder = tiles.Builder()
    numbers = dict(zip(keys, kind_of, strict=True)) if reasons else {}
    for file in files if reasons else ():
        for key in file.arrays:
            if key in reasons:
                (dtype, _, layout), regions = kinds[numbers[key]]
                offset, shape = regions[file.rank]
                own = (_core.Tile(offset, shape, 0, row_major(shape)),) if 0 not in shape else ()
                stored = tiles.TiledArray(file.name, key, shape, own)
                builder.add(key, dtype, layout.shape, stored)
    content = builder.build() if len(builder) else None
    _check_coverage(content)
    warnings = _inexpressible(reasons, strict=strict)
    return IterationPlan(files, described, mesh, assigned, prefix, content, _holders(shards), reasons, warnings)


def check_copies(plan: IterationPlan) -> None:
    """Refuse a plan without `dedup` in which too many ranks write copies of one shard.

    metadata.json lists all of these ranks for each copy: 1.6 GB of text for 16,384 copies.

    Raises:
        UnsupportedError: there is such a shard.
    """
    for key in plan.records.names:
        n_copies = max(map(len, plan.holders.get(key, ())), default=0)
        if n_copies > _MAX_COPIES:
            raise UnsupportedError(
                f"{n_copies} ranks write copies of {show(key)}, and metadata.json lists all of them for each copy; at "
                f"most {_MAX_COPIES} copies can be listed",
                key=key,
                hint="leave out `files=Files(dedup=False)`: each shard is then written once",
            )


@dataclass
class Kept:
    """What was written of a plan before: later saves of it need not make it again.

    Attributes:
        metadata: of metadata.json.
        tiles: size and digest of tiles.json, and its text, compressed.
    """

    metadata: WrittenMetadata | None = None
    tiles: tuple[PlainEntry, bytes] | None = None


def write_descriptions(
    plan: IterationPlan, folder: Location, *, mode: int, kept: Kept | None = None
) -> dict[str, PlainEntry | None]:
    """Write metadata.json with its table, and tiles.json where the plan has one. They are not synced.

    Args:
        plan: the plan of the iteration.
        folder: the staging folder of the iteration.
        mode: permission bits of the files, less the umask.
        kept: of this plan, for later saves; None: there are none.

    Returns:
        Size and digest of each, by name; None: they are not known.

    Raises:
        StorageError: the system failed.
    """
    metadata = write_metadata(
        folder / checkpoint2.METADATA_FILE,
        plan.records,
        plan.mesh,
        plan.assigned,
        prefix=plan.prefix,
        mode=mode,
        durable=False,
        known=None if kept is None else kept.metadata,
    )
    if kept is not None and len(metadata.table or b"") <= _MAX_KEPT_BYTES:
        kept.metadata = metadata
    written: dict[str, PlainEntry | None] = {checkpoint2.METADATA_FILE: metadata.entry}
    if metadata.table is not None:
        (folder / checkpoint2.METADATA_TABLE_FILE).replace(metadata.table, mode, durable=False)
        written[checkpoint2.METADATA_TABLE_FILE] = PlainEntry(len(metadata.table), digest_of(metadata.table))
    if plan.tiles is not None:
        written[tiles.TILES_FILE] = _write_tiles(plan.tiles, folder / tiles.TILES_FILE, mode, kept)
    return written


def _write_tiles(content: tiles.TilesFile, path: Location, mode: int, kept: Kept | None) -> PlainEntry | None:
    """Write tiles.json. Its text is kept: for many ranks, encoding it takes seconds."""
    if kept is None:
        tiles.write(path, content, mode, durable=False)
        return None
    if (known := kept.tiles) is not None:
        entry, packed = known
        with contextlib.suppress(zlib.error), path.writing(mode, durable=False) as file:
            for piece in _unpacked(packed):
                file.write(piece)
            return entry
    kept.tiles = None  # memory was damaged: it is encoded again
    digest, n_bytes, packer, parts = new_digest(), 0, zlib.compressobj(1), []
    with path.writing(mode, durable=False) as file:
        for piece in tiles.pieces(content):
            digest.update(piece)
            n_bytes += file.write(piece)
            parts.append(packer.compress(piece))
    entry = PlainEntry(n_bytes, digest.hexdigest())
    packed = b"".join([*parts, packer.flush()])
    if len(packed) <= _MAX_KEPT_BYTES:
        kept.tiles = entry, packed
    return entry


def _unpacked(packed: bytes) -> Iterator[bytes]:
    """The text of `zlib.compress`, in pieces. Raises zlib.error at the end if its checksum differs."""
    unpacker = zlib.decompressobj()
    while packed:
        yield unpacker.decompress(packed, _UNPACKED_BYTES)
        packed = unpacker.unconsumed_tail
    yield unpacker.flush()
    if not unpacker.eof:
        raise zlib.error("the text has no end")


class Descriptions:
    """The files of `write_descriptions`. After `start`, a thread writes long ones beside the shard files.

    Args:
        plan, folder, mode, kept: as for `write_descriptions`.
    """

    def __init__(self, plan: IterationPlan, folder: Location, *, mode: int, kept: Kept | None = None) -> None:
        self._write = functools.partial(write_descriptions, plan, folder, mode=mode, kept=kept)
        self._is_long = len(plan.records.names) + len(plan.files) >= _MANY_LINES
        self._writing = threading.Lock()
        self._outcome: Future[dict[str, PlainEntry | None]] = Future()

    def start(self) -> None:
        """Write them in a thread if they are long; else `result` does. Call `stop` even if this is interrupted."""
        if self._is_long:
            with contextlib.suppress(RuntimeError):  # the interpreter is about to end: `result` writes them
                threading.Thread(target=self._run, name="reshard descriptions", daemon=True).start()

    def _run(self) -> None:
        with self._writing:
            if not self._outcome.done():
                try:
                    self._outcome.set_result(self._write())
                except BaseException as error:  # noqa: BLE001  `result` raises it
                    self._outcome.set_exception(error)

    def stop(self) -> None:
        """Wait until nothing more is written into the folder. An interrupt is raised then; a second one at once."""
        try:
            self._end()
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        with self._writing:
            if not self._outcome.done():
                self._outcome.set_exception(ReshardError("the save was withdrawn before they were written"))

    def result(self) -> dict[str, PlainEntry | None]:
        """What `write_descriptions` returns, once they are written. Raises as it does."""
        self._run()
        return self._outcome.result()


def describe_cut(
    builder: tiles.Builder,
    bound: BoundLayout,
    dtype_of: Mapping[str, str],
    file: FileContent,
    described: Collection[str],
) -> None:
    """Add the arrays of a file that hold a part of a key in `described` to tiles.json.

    Args:
        builder: makes tiles.json.
        bound: the layout, bound to the tensors.
        dtype_of: the dtype of each.
        file: the content of the file.
        described: the keys that tiles.json describes.
    """
    layouts = bound.tensor_layouts
    for array in file.arrays:
        join = bound.join_named(array)
        keys = (key for key in ((array,) if join is None else join.keys) if key in described)
        first = next(keys, None)
        if first is None:
            continue
        for key in (first, *keys) if first not in builder else ():
            builder.expect(key, dtype_of[key], layouts[key].shape, overlapping=bool(layouts[key].partition.flat))
        by_key: dict[str, list[_core.Tile]] = {}
        if join is None:
            layout = bound.layouts[array]
            shape, by_key[array] = layout.local_shape(file.rank), layout.tiles(file.rank)
        else:
            n_elements, tiles_of_all = bound.joined(join).part(file.rank)
            shape = (n_elements,)
            for key, tile in tiles_of_all:
                if key in described:
                    by_key.setdefault(key, []).append(tile)
            # A key without elements is described once: its ranks may have a part that is equal to that of others. A
            # part that is padding alone is one of the first key.
            empty = (key for key in bound.empty_joined[array] if key in described and not builder.is_stored(key))
            by_key |= {key: [] for key in empty}
            if not by_key:
                held = (key for key in join.keys if key in described and bound.layouts[key].holds(file.rank))
                by_key = {key: [] for key in itertools.islice(held, 1)}
        for key, own in by_key.items():
            # Flattened blocks that share a block which is not split may overlap in it.
            overlapping = bool(layouts[key].partition.flat)
            stored = tiles.TiledArray(file.name, array, shape, tuple(own))
            builder.add(key, dtype_of[key], layouts[key].shape, stored, overlapping=overlapping)


def _reasons(records: Records, mesh: _core.Mesh) -> dict[str, str]:
    reasons = reasons_of(records, mesh)
    if not any(reasons):
        return {}
    found = ((key, reasons[kind]) for key, kind in zip(records.names, records.kind_of, strict=True))
    return {key: reason for key, reason in found if reason is not None}


def _joined_shards(tensors: Mapping[str, DtypeAndPart], bound: BoundLayout) -> list[HeldGrid]:
    """The distinct parts of joined arrays, and who holds each: found by what they consist of."""
    found: list[tuple[int, int, HeldGrid]] = []
    for n, join in enumerate(bound.joins):
        if not tensors.keys() >= set(join.keys):
            for rank in bound.ranks:
                bound.local_names(rank, list(tensors))  # an error if they are some of the keys of a rank
            continue
        _, part = tensors[join.keys[0]]
        for number, (n_elements, ranks) in enumerate(bound.joined(join).groups()):
            found.append((ranks[0], n, HeldGrid(join.name, part, {number: tuple(ranks)}, n_elements * 8)))
    return [shard for _, _, shard in sorted(found, key=lambda one: one[:2])]


def _inexpressible(reasons: Mapping[str, str], *, strict: bool) -> tuple[str, ...]:
    """The warning for tensors that metadata.json does not describe, or the error."""
    if not reasons:
        return ()
    key, reason = next(iter(reasons.items()))
    some = listed(map(show, reasons), 5)
    text = (
        f"{NOT_EXPRESSED} of {len(reasons)} tensors ({some}): {show(key)}: {reason}. "
        "They are described in tiles.json; a program that reads metadata.json alone, such as MindSpore Transformers, "
        "does not load them"
    )
    if strict:
        raise UnsupportedError(
            text, key=key, hint="choose another layout for them, or leave out `files=Files(strict_format=True)`"
        )
    return (text,)


def _files(assigned: FilePlan, prefix: str | None, dtype_of: Mapping[str, str] | None) -> tuple[FileContent, ...]:
    """The content of the files, given the dtype of each array; None: the elements of all have one width."""
    if len(assigned.files) > _MAX_SHARD_FILES:
        raise UnsupportedError(
            f"the ranks write {len(assigned.files)} shard files; a checkpoint can have {_MAX_SHARD_FILES}",
            hint="check the sizes in `mesh` of the layout",
        )
    widths = {dtype: dtypes.bits(dtype) for dtype in set((dtype_of or {}).values())}

    @functools.cache  # thousands of ranks hold parts of the same tensors
    def in_order(names: tuple[str, ...]) -> tuple[str, ...]:
        """As by `dtypes.file_order`; text is sorted much faster than tuples with text."""
        if dtype_of is None:
            return tuple(sorted(names))
        of_width: dict[int, list[str]] = {}
        for name in names:
            of_width.setdefault(widths[dtype_of[name]], []).append(name)
        return tuple(name for width in sorted(of_width, reverse=True) for name in sorted(of_width[width]))

    return tuple(FileContent(file.name(prefix), file.rank, in_order(file.keys)) for file in assigned.files)


def _holders(shards: Iterable[HeldGrid]) -> dict[str, list[tuple[int, ...]]]:
    holders: dict[str, list[tuple[int, ...]]] = {}
    for shard in shards:
        holders.setdefault(shard.key, []).extend(shard.grid.values())
    return holders


def _by_region(regions: Mapping[int, Region]) -> dict[Region, tuple[int, ...]]:
    """The ranks of each region, ascending."""
    ranks: dict[Region, list[int]] = {}
    for rank in sorted(regions):
        ranks.setdefault(regions[rank], []).append(rank)
    return {region: tuple(of_region) for region, of_region in ranks.items()}


def _check_coverage(content: tiles.TilesFile | None) -> None:
    """Check that the regions cover every tensor and do not overlap, as a reader does."""
    if content is None:
        return
    index = _core.Index()
    files: dict[str, int] = {}
    try:
        for key, tensor in content.tensors.items():
            stored = []
            for one in tensor.stored:
                if one.file not in files:
                    files[one.file] = index.add_file(one.file)  # nothing is opened
                stored.append(_core.StoredArray(files[one.file], one.name, one.shape, one.tiles))
            index.add_tiles(key, tensor.dtype, tensor.shape, stored)
        index.check_coverage()
    except CoverageError as error:
        error.message = f"the regions that the ranks hold: {error.message}"
        error.hint = (
            "each element is in one region, or in equal ones: check `offset` and `global_shape` of each `Shard`"
        )
        raise
