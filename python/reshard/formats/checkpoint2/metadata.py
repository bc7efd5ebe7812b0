"""Writing `metadata.json`: which shard of which tensor lies in which file, in the form of MindSpore Transformers.

For each tensor the file records its partition over the *stage* that holds it: `device_matrix` (sizes of the mesh axes
that `place` leaves free), `rank_list` (the ranks on them) and `tensor_map` (for each dim the axis that divides it,
counted from 0 = the last one; -1 for none; a list for several, the outermost first). For each shard it lists the files
that hold it.

`inexpressible` returns why a tensor cannot be described so; such tensors are described in `tiles.json`. The core
encodes and decodes the file, which can have hundreds of MB.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, NamedTuple

from reshard import _core
from reshard.commit.manifest import PlainEntry, new_digest
from reshard.errors import UnsupportedError
from reshard.formats.checkpoint2.shards import FilePlan, RecordKind, Records, TensorRecord, holders_of, shard_id
from reshard.values.words import counted, listed, show

if TYPE_CHECKING:
    from reshard.layout.partition import Cut, Places, TensorLayout
    from reshard.storage.location import Location
    from reshard.write.contents import Part

MIN_TABLE_BYTES = 1 << 20  # a smaller file is decoded in some milliseconds

# The dtypes that MindSpore's reader of shard files knows. One tensor of another dtype makes it refuse the file.
_DTYPES = {
    "BOOL": "Bool",
    "U8": "UInt8",
    "I8": "Int8",
    "U16": "UInt16",
    "I16": "Int16",
    "U32": "UInt32",
    "I32": "Int32",
    "U64": "UInt64",
    "I64": "Int64",
    "F16": "Float16",
    "BF16": "BFloat16",
    "F32": "Float32",
    "F64": "Float64",
}
_LONGEST = (1 << 63) - 1  # any name
# Names of axes with another meaning in the layouts of MindSpore.
_RESERVED_AXES = ("", "None", "interleaved_parallel")


def inexpressible(record: TensorRecord | RecordKind, mesh: _core.Mesh) -> str | None:
    """Why `metadata.json` cannot describe a tensor; None if it can.

    Args:
        record: the tensor, or tensors of a kind.
        mesh: the mesh on which it lies.

    Raises:
        LayoutError: the record names an axis or a coordinate that the mesh does not have.

    Example:
        >>> from reshard._core import Mesh
        >>> from reshard.layout import Partition, TensorLayout
        >>> record = TensorRecord("w", "BF16", "model", TensorLayout((8, 6), Partition(((), ("tp",)))))
        >>> inexpressible(record, Mesh([("tp", 4)]))
        'dim 1 has 6 elements, which 4 parts do not divide evenly'
    """
    sizes, partition, shape, place = dict(mesh.axes), record.layout.partition, record.layout.shape, record.layout.place
    reserved = [axis for axis in sizes if axis in _RESERVED_AXES]
    if reserved:
        return f"a mesh axis named {show(reserved[0])} has another meaning there"
    if record.dtype not in _DTYPES:
        return f"MindSpore has no shard files of {record.dtype}: its reader refuses the whole file that holds it"
    if partition.flat:
        return "it is flattened and cut 1-D"
    if partition.is_reordered:
        return "its dims are stored in another order"
    parts = [math.prod(sizes[axis] for axis in axes) for axes in _padded_cut(record.layout)]
    for dim in (dim for dim, _ in partition.blocks if parts[dim] > 1):
        return f"dim {dim} consists of blocks that are cut by themselves"
    for dim in (dim for dim, own in partition.sizes if len(set(own)) > 1):
        return f"dim {dim} is cut into parts of different sizes"
    for dim, (extent, n_parts) in enumerate(zip(shape, parts, strict=True)):
        if extent % n_parts:
            return f"dim {dim} has {counted(extent, 'element')}, which {n_parts} parts do not divide evenly"
    fixed = mesh.fixed(place)
    both = [axis for axis in partition.axes if axis in fixed and sizes[axis] > 1]
    if both:
        return f"axis {show(both[0])} both places it and cuts it"
    ranks = mesh.held(place)
    # MindSpore Transformers computes the position of a rank in its stage as `rank % len(rank_list)`.
    if ranks[0] % len(ranks) or ranks != list(range(ranks[0], ranks[0] + len(ranks))):
        return f"the ranks that hold it, {listed(ranks)}, are not a contiguous and aligned run in the order of the mesh"
    return None


def reasons_of(records: Records, mesh: _core.Mesh) -> list[str | None]:
    """For each kind of tensors the reason why it is `inexpressible`, or None."""
    return [inexpressible(kind, mesh) for kind in records.kinds]


class WrittenMetadata(NamedTuple):
    """What was written.

    Attributes:
        entry: size and digest of the file.
        table: the binary table of a large file, which is stored beside it, so that ranks need not read and decode the
            text; its form is in `rust/formats/src/metadata/table.rs`. None: the file is small.
        checksum: crc32c of the file.
    """

    entry: PlainEntry
    table: bytes | None
    checksum: int


def write_metadata(
    path: Location,
    records: Records,
    mesh: _core.Mesh,
    plan: FilePlan,
    *,
    prefix: str | None = None,
    mode: int = 0o666,
    durable: bool = True,
    known: WrittenMetadata | None = None,
) -> WrittenMetadata:
    """Write `metadata.json` atomically and in pieces: a large file is never in memory as a whole.

    It is written without indentation: the copies of replicated shards make the file grow with the square of the number
    of ranks, and with indentation each number would have a line of its own.

    The digest takes more time than the text and the file together: a save that repeats an earlier one compares a
    checksum instead.

    Args:
        path: the file.
        records: the tensors to describe, each name once, none of them `inexpressible`.
        mesh: the mesh on which they lie.
        plan: the files; every shard of the records must be in one.
        prefix: the prefix of the shard files.
        mode: permission bits before the umask is applied.
        durable: whether the file and its folder are synced.
        known: what was written before of the same records, mesh, plan and prefix.

    Raises:
        UnsupportedError: a record is inexpressible.
        ArgumentError: two records have one name, or a shard is in no file.
        LayoutError: a record names an axis or a coordinate that the mesh does not have.
        StorageError: the operating system reported an error; the file that was there before is unchanged.
    """
    for number, reason in enumerate(reasons_of(records, mesh)):
        if reason is not None:
            key = records.names[records.kind_of.index(number)]
            raise UnsupportedError(f"metadata.json cannot describe {show(key)}: {reason}", key=key)
    encoder = _encoder(records, mesh, plan, prefix)
    digest, checksum, n_bytes = new_digest(), 0, 0
    with path.writing(mode, durable=durable) as file:
        for piece in encoder:
            if known is None:
                digest.update(piece)
            checksum = _core.crc32c(piece, checksum)
            n_bytes += file.write(piece)
    if known is None:
        entry = PlainEntry(n_bytes, digest.hexdigest())
        table = encoder.table(entry.digest) if n_bytes >= MIN_TABLE_BYTES else None
        return WrittenMetadata(entry, table, checksum)
    if (n_bytes, checksum) != (known.entry.n_bytes, known.checksum):  # memory was damaged, now or before
        return write_metadata(path, records, mesh, plan, prefix=prefix, mode=mode, durable=durable)
    return known


def _encoder(records: Records, mesh: _core.Mesh, plan: FilePlan, prefix: str | None) -> _core.MetadataEncoder:
    """What makes the text. Thousands of tensors share a few kinds, grids and lists of cells, which are listed once."""
    layouts: dict[_core.MetadataLayout, int] = {}
    grids: dict[tuple[Places, Cut], tuple[int, _core.MetadataGrid]] = {}
    cells: dict[tuple[Places, tuple[str, ...], Part], tuple[int, list[_core.MetadataCell]]] = {}
    kinds = []
    of_rank: dict[Part, dict[int, int]] = {"model": {}, "optimizer": {}}
    for number, file in enumerate(plan.files):
        of_rank[file.part][file.rank] = number
    for dtype, part, layout in records.kinds:
        place, cut, axes = layout.place, _padded_cut(layout), layout.partition.axes
        if (place, cut) not in grids:
            grids[place, cut] = len(grids), _grid(layout, cut, mesh, layouts)
        if (place, axes, part) not in cells:
            held = holders_of(mesh, place, axes).items()
            files = of_rank[part]
            found: list[_core.MetadataCell] = [
                (offset, ranks, [files[rank] for rank in ranks if rank in files]) for offset, ranks in held
            ]
            cells[place, axes, part] = len(cells), found
        kinds.append((_DTYPES[dtype], layout.shape, grids[place, cut][0], cells[place, axes, part][0]))
    keys = tuple(records.names)
    hold_all = [file.keys == keys for file in plan.files]
    numbers = {} if all(hold_all) else dict(zip(keys, range(len(keys)), strict=True))
    return _core.MetadataEncoder(
        keys,
        records.kind_of,
        kinds,
        [grid for _, grid in grids.values()],
        list(layouts),
        [of_kind for _, of_kind in cells.values()],
        [
            (file.name(prefix), file.rank, None if holds_all else list(map(numbers.get, file.keys)))
            for file, holds_all in zip(plan.files, hold_all, strict=True)
        ],
        {} if _core.are_plain(keys, _LONGEST) else {number: _shard_texts(key) for number, key in enumerate(keys)},
    )


def _grid(
    layout: TensorLayout, cut: Cut, mesh: _core.Mesh, layouts: dict[_core.MetadataLayout, int]
) -> _core.MetadataGrid:
    """The fields that all tensors with one partition and one place share; a new layout gets the next number."""
    place, own_axes, mesh_sizes = layout.place, layout.partition.axes, dict(mesh.axes)
    offsets = mesh.folded(own_axes, place)
    n_seen: dict[int, int] = {}
    replicas = []
    for offset in offsets:
        replicas.append(n_seen.get(offset, 0))
        n_seen[offset] = replicas[-1] + 1
    fixed = mesh.fixed(place)
    # An axis of size 1 stays though it is fixed: MindSpore Transformers fails on a device matrix without axes.
    axes = [axis for axis in mesh_sizes if axis not in fixed or axis in own_axes] or [*mesh_sizes, "device"][:1]
    sizes = tuple(mesh_sizes[axis] if axis not in fixed and axis in mesh_sizes else 1 for axis in axes)
    tensor_map = tuple(tuple(len(axes) - 1 - axes.index(axis) for axis in of_dim) for of_dim in cut)
    device_layout = (sizes, tensor_map, tuple(axes), tuple(mesh.held(place)))
    fragmentations = [math.prod(mesh_sizes[axis] for axis in of_dim) for of_dim in cut]
    return replicas, fragmentations, layouts.setdefault(device_layout, len(layouts)), list(n_seen)


def _shard_texts(key: str) -> tuple[str, str]:
    """The JSON of the names of the shards of a tensor, before and after their number."""
    before, after = _dump(shard_id(key, 0)).rsplit("0", 1)
    return before, after


def _padded_cut(layout: TensorLayout) -> Cut:
    """The axes of each dim, those without axes included."""
    cut = layout.partition.cut
    return cut + ((),) * (len(layout.shape) - len(cut))


def _dump(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
