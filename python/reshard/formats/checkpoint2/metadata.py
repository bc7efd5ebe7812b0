"""Writing `metadata.json`: which shard of which tensor lies in which file, in the form of MindSpore Transformers.

For each tensor the file records its partition over the *stage* that holds it: `device_matrix` (sizes of the mesh axes
that `place` leaves free), `rank_list` (the ranks on them) and `tensor_map` (for each dim the axis that divides it,
counted from 0 = the last one; -1 for none; a list for several, the outermost first). For each shard it lists the files
that hold it.

`inexpressible` returns why a tensor cannot be described so; such tensors are described in `tiles.json`. The core
decodes the file, which can have hundreds of MB.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from reshard import _core
from reshard.errors import ArgumentError, UnsupportedError
from reshard.formats.checkpoint2.names import METADATA_FILE, METADATA_TABLE_FILE
from reshard.formats.checkpoint2.shards import FilePlan, TensorRecord, holders_of, shard_id
from reshard.formats.manifest import digest_of
from reshard.formats.own_files import MAX_METADATA_BYTES
from reshard.storage.location import locate
from reshard.words import listed, show

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from reshard.formats.checkpoint2.names import Part
    from reshard.layout.partition import Cut, Places, TensorLayout
    from reshard.storage.location import Location

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
_PIECE_CHARS = 1 << 20  # that are written together
_MAX_TEXTS = 64
# Names of axes with another meaning in the layouts of MindSpore.
_RESERVED_AXES = ("", "None", "interleaved_parallel")


def inexpressible(record: TensorRecord, mesh: _core.Mesh) -> str | None:
    """Why `metadata.json` cannot describe a tensor; None if it can.

    Args:
        record: the tensor.
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
            return f"dim {dim} has {extent} elements, which {n_parts} parts do not divide evenly"
    fixed = mesh.fixed(place)
    both = [axis for axis in partition.axes if axis in fixed and sizes[axis] > 1]
    if both:
        return f"axis {show(both[0])} both places it and cuts it"
    ranks = mesh.held(place)
    # MindSpore Transformers computes the position of a rank in its stage as `rank % len(rank_list)`.
    if ranks[0] % len(ranks) or ranks != list(range(ranks[0], ranks[0] + len(ranks))):
        return f"the ranks that hold it, {listed(ranks)}, are not a contiguous and aligned run in the order of the mesh"
    return None


def reasons_of(records: Iterable[TensorRecord], mesh: _core.Mesh) -> Iterator[tuple[TensorRecord, str | None]]:
    """The records, each with the reason why it is `inexpressible`; found once for records that share a layout."""
    known: dict[tuple[str, int], str | None] = {}
    held: list[TensorLayout] = []  # the key has the address of the layout, which must not be reused
    for record in records:
        kind = (record.dtype, id(record.layout))
        if kind not in known:
            held.append(record.layout)
            known[kind] = inexpressible(record, mesh)
        yield record, known[kind]


def write_metadata(
    path: str | os.PathLike[str],
    records: Sequence[TensorRecord],
    mesh: _core.Mesh,
    plan: FilePlan,
    *,
    prefix: str | None = None,
    mode: int = 0o666,
    durable: bool = True,
) -> None:
    """Write `metadata.json` atomically and in pieces: a large file is never in memory as a whole.

    It is written without indentation: the copies of replicated shards make the file grow with the square of the number
    of ranks, and with indentation each number would have a line of its own.

    Args:
        path: the file.
        records: the tensors to describe, each name once, none of them `inexpressible`.
        mesh: the mesh on which they lie.
        plan: the files; every shard of the records must be in one.
        prefix: the prefix of the shard files.
        mode: permission bits before the umask is applied.
        durable: whether the file and its folder are synced.

    Raises:
        UnsupportedError: a record is inexpressible.
        ArgumentError: two records have one name, or a shard is in no file.
        LayoutError: a record names an axis or a coordinate that the mesh does not have.
        StorageError: the operating system reported an error; the file that was there before is unchanged.
    """
    seen: set[str] = set()
    for record, reason in reasons_of(records, mesh):
        if reason is not None:
            raise UnsupportedError(f"metadata.json cannot describe {show(record.key)}: {reason}", key=record.key)
        if record.key in seen:
            raise ArgumentError(f"{show(record.key)} is described twice", key=record.key)
        seen.add(record.key)
    with locate(path).writing(mode, durable=durable) as file:
        piece, n_chars = [], 0
        for text in _texts(records, mesh, plan, prefix):
            piece.append(text)
            n_chars += len(text)
            if n_chars >= _PIECE_CHARS:
                file.write("".join(piece).encode())
                piece, n_chars = [], 0
        file.write("".join(piece).encode())


def write_table(folder: Location, *, mode: int) -> bool:
    """Write the binary table of a large `metadata.json` beside it, so that ranks need not read and decode the text.

    The table is decoded from the file, so it cannot say anything else. The manifest lists both. It is not synced.

    Args:
        folder: the folder of the `metadata.json`.
        mode: permission bits of the table, less the umask.

    Returns:
        Whether it is large, so that there is a table.

    Raises:
        StorageError: the system failed.
    """
    place = folder / METADATA_FILE
    if place.stat().n_bytes < MIN_TABLE_BYTES:
        return False
    data = place.read_small(MAX_METADATA_BYTES)
    table = _core.metadata_table(data, digest_of(data))
    (folder / METADATA_TABLE_FILE).replace(table, mode, durable=False)
    return True


def _texts(records: Sequence[TensorRecord], mesh: _core.Mesh, plan: FilePlan, prefix: str | None) -> Iterator[str]:
    """The file, in pieces. Thousands of tensors share a few grids, whose long lists are encoded once."""
    grids: dict[object, _Grid] = {}
    texts: dict[tuple[str, int], str] = {}  # by dtype and address of the layout, which `records` keeps
    before = ""
    yield '{"state_dict_metadata":{'
    for record in records:
        dtype, layout = record.dtype, record.layout
        text = texts.get((dtype, id(layout)))
        if text is None:
            place, cut = layout.place, _padded_cut(layout)
            grid = grids.get((place, cut))
            if grid is None:
                grid = grids[place, cut] = _grid(layout, cut, mesh)
            if len(texts) == _MAX_TEXTS:  # a text can have megabytes
                texts.clear()
            text = texts[dtype, id(layout)] = _tensor(record, grid)
        yield f"{before}\n{_quoted(record.key)}:{text}"
        before = ","
    yield '},\n"storage_data":{'
    files: dict[Part, dict[int, tuple[str, frozenset[str]]]] = {"model": {}, "optimizer": {}}
    for file in plan.files:
        files[file.part][file.rank] = _dump(file.name(prefix)), frozenset(file.keys)
    cells: dict[tuple[Places, tuple[str, ...], Part], list[_Cell]] = {}
    cells_of: dict[tuple[int, Part], list[_Cell]] = {}  # by address of the layout
    before = ""
    for key, _, part, layout in records:
        of_grid = cells_of.get((id(layout), part))
        if of_grid is None:
            kind = layout.place, layout.partition.axes, part
            if kind not in cells:
                cells[kind] = _cells(mesh, layout.place, layout.partition.axes, files[part])
            of_grid = cells_of[id(layout), part] = cells[kind]
        yield before + _storage(key, of_grid)
        before = ","
    yield "}}\n"


class _Cell(NamedTuple):
    """A shard of the tensors of one grid, in one part.

    Attributes:
        offset: its `global_offset`.
        entries: of each file in which it can be, the keys in the file and the text of the entry.
    """

    offset: int
    entries: list[tuple[frozenset[str], str]]


def _cells(
    mesh: _core.Mesh, place: Places, axes: tuple[str, ...], files: Mapping[int, tuple[str, frozenset[str]]]
) -> list[_Cell]:
    """The cells of a grid, given the name, as JSON, and the keys of the file of each rank."""
    found = []
    for offset, holders in holders_of(mesh, place, axes).items():
        group = _dump(list(holders))
        entries = []
        for rank in holders:
            if rank in files:
                name, keys = files[rank]
                entries.append((keys, f'{{"file_name":{name},"storage_rank":{rank},"rank_group":{group}}}'))
        found.append(_Cell(offset, entries))
    return found


@dataclass(frozen=True)
class _Grid:
    """The fields that all tensors with one partition and one place share.

    Attributes:
        replica_id: the list as text.
        fragmentations: number of parts of each dim.
        layout: the object as text.
        offsets: the `global_offset` of each shard, in the order in which ascending ranks first hold it.
    """

    replica_id: str
    fragmentations: list[int]
    layout: str
    offsets: list[int]


def _grid(layout: TensorLayout, cut: Cut, mesh: _core.Mesh) -> _Grid:
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
    sizes = [mesh_sizes[axis] if axis not in fixed and axis in mesh_sizes else 1 for axis in axes]
    tensor_map = [[len(axes) - 1 - axes.index(axis) for axis in of_dim] for of_dim in cut]
    device_layout = {  # in this order: MindSpore Transformers takes the values by position
        "device_matrix": sizes,
        "tensor_map": [one if len(one) > 1 else one[0] if one else -1 for one in tensor_map],
        "interleaved_parallel": False,
        "alias_name": axes,
        "rank_list": mesh.held(place),
    }
    fragmentations = [math.prod(mesh_sizes[axis] for axis in of_dim) for of_dim in cut]
    return _Grid(_dump(replicas), fragmentations, _dump(device_layout), list(n_seen))


def _tensor(record: TensorRecord, grid: _Grid) -> str:
    local_shape = [extent // n for extent, n in zip(record.layout.shape, grid.fragmentations, strict=True)]
    shape = _dump(local_shape)
    chunk = ",".join(f'{{"global_offset":[{offset}],"local_shape":{shape}}}' for offset in grid.offsets)
    return (
        f'{{"properties":{{"dtype":"{_DTYPES[record.dtype]}","replica_id":{grid.replica_id},'
        f'"allow_shape_mismatch":false,"allow_to_save":true}},'
        f'"global_shape":{_dump(list(record.layout.shape))},"axis_fragmentations":{_dump(grid.fragmentations)},'
        f'"layout":{grid.layout},"chunk":[{chunk}]}}'
    )


def _storage(key: str, cells: Sequence[_Cell]) -> str:
    """The shards of a tensor."""
    before, after = _shard_texts(key)
    texts = []
    for offset, entries in cells:
        if len(entries) == 1 and key in entries[0][0]:  # mostly
            texts.append(f"\n{before}{offset}{after}:[{entries[0][1]}]")
            continue
        held = [text for keys, text in entries if key in keys]
        if not held:
            raise ArgumentError(f"shard {offset} of {show(key)} is in no file of the plan", key=key)
        texts.append(f"\n{before}{offset}{after}:[{','.join(held)}]")
    return ",".join(texts)


def _shard_texts(key: str) -> tuple[str, str]:
    """The texts of the shards of a tensor, before and after their number, in which alone they differ."""
    if key.isascii() and key.isprintable() and "'" not in key and '"' not in key and "\\" not in key:
        return f"\"('{key}', (", ',))"'
    before, after = _dump(shard_id(key, 0)).rsplit("0", 1)
    return before, after


def _padded_cut(layout: TensorLayout) -> Cut:
    """The axes of each dim, those without axes included."""
    cut = layout.partition.cut
    return cut + ((),) * (len(layout.shape) - len(cut))


# One encoder: `json.dumps` with options makes one in each call, and it is called for every shard.
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_quoted = json.encoder.encode_basestring  # as `_dump` of text


def _dump(value: object) -> str:
    return _ENCODER.encode(value)
