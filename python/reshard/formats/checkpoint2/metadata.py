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
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from reshard.errors import ArgumentError, UnsupportedError
from reshard.formats.checkpoint2.shards import FilePlan, TensorRecord, holders_of, shard_id
from reshard.formats.manifest import new_digest
from reshard.storage.location import locate
from reshard.words import listed, show

if TYPE_CHECKING:
    import hashlib
    import os
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from typing import BinaryIO

    from reshard import _core
    from reshard.formats.checkpoint2.names import Part
    from reshard.layout.partition import Cut, Places, TensorLayout

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
) -> bytes | None:
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

    Returns:
        The binary table of a large file, which is stored beside it, so that ranks need not read and decode the text;
        its form is in `rust/formats/src/metadata/table.rs`. None: the file is small.

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
    table, digest, n_bytes = _Table(), new_digest(), 0
    with locate(path).writing(mode, durable=durable) as file:
        piece: list[str] = []
        n_chars = 0
        for text in _texts(records, mesh, plan, prefix, table):
            piece.append(text)
            n_chars += len(text)
            if n_chars >= _PIECE_CHARS:
                n_bytes += _write(file, piece, digest)
                piece, n_chars = [], 0
        n_bytes += _write(file, piece, digest)
    return table.encoded(digest.hexdigest()) if n_bytes >= MIN_TABLE_BYTES else None


def _write(file: BinaryIO, piece: list[str], digest: hashlib.blake2b) -> int:
    data = "".join(piece).encode()
    digest.update(data)
    return file.write(data)


def _texts(
    records: Sequence[TensorRecord], mesh: _core.Mesh, plan: FilePlan, prefix: str | None, table: _Table
) -> Iterator[str]:
    """The file, in pieces. Thousands of tensors share a few grids, whose long lists are encoded once.

    Args:
        records: as in `write_metadata`.
        mesh: as there.
        plan: as there.
        prefix: as there.
        table: gets the same content.
    """
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
            table.add_kind(record, grid)
            if len(texts) == _MAX_TEXTS:  # a text can have megabytes
                texts.clear()
            text = texts[dtype, id(layout)] = _tensor(record, grid)
        yield f"{before}\n{_quoted(record.key)}:{text}"
        before = ","
    yield '},\n"storage_data":{'
    files: dict[Part, dict[int, tuple[str, frozenset[str]]]] = {"model": {}, "optimizer": {}}
    for file in plan.files:
        files[file.part][file.rank] = file.name(prefix), frozenset(file.keys)
    cells: dict[tuple[Places, tuple[str, ...], Part], list[_Cell]] = {}
    cells_of: dict[tuple[int, Part], list[_Cell]] = {}  # by address of the layout
    before = ""
    for record in records:
        key, _, part, layout = record
        of_grid = cells_of.get((id(layout), part))
        if of_grid is None:
            kind = layout.place, layout.partition.axes, part
            if kind not in cells:
                cells[kind] = _cells(mesh, layout.place, layout.partition.axes, files[part])
            of_grid = cells_of[id(layout), part] = cells[kind]
        text, held = _storage(key, of_grid)
        yield before + text
        table.add(record, of_grid, held)
        before = ","
    yield "}}\n"


class _Entry(NamedTuple):
    """A file in which a shard can be.

    Attributes:
        keys: what is in the file.
        text: the entry.
        names: the name of the file.
    """

    keys: frozenset[str]
    text: str
    names: tuple[str]


class _Cell(NamedTuple):
    """A shard of the tensors of one grid, in one part.

    Attributes:
        offset: its `global_offset`.
        entries: the files in which it can be.
    """

    offset: int
    entries: list[_Entry]


def _cells(
    mesh: _core.Mesh, place: Places, axes: tuple[str, ...], files: Mapping[int, tuple[str, frozenset[str]]]
) -> list[_Cell]:
    """The cells of a grid, given the name and the keys of the file of each rank."""
    found = []
    for offset, holders in holders_of(mesh, place, axes).items():
        group = _dump(list(holders))
        entries = []
        for rank in holders:
            if rank in files:
                name, keys = files[rank]
                text = f'{{"file_name":{_quoted(name)},"storage_rank":{rank},"rank_group":{group}}}'
                entries.append(_Entry(keys, text, (name,)))
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


def _storage(key: str, cells: Sequence[_Cell]) -> tuple[str, tuple[tuple[str, ...], ...]]:
    """The shards of a tensor, and the names of the files that hold each of them."""
    before, after = _shard_texts(key)
    texts: list[str] = []
    files: list[tuple[str, ...]] = []
    for offset, entries in cells:
        if len(entries) == 1 and key in entries[0][0]:  # mostly
            _, text, names = entries[0]
            texts.append(f"\n{before}{offset}{after}:[{text}]")
            files.append(names)
            continue
        held = [entry for entry in entries if key in entry.keys]
        if not held:
            raise ArgumentError(f"shard {offset} of {show(key)} is in no file of the plan", key=key)
        texts.append(f"\n{before}{offset}{after}:[{','.join([entry.text for entry in held])}]")
        files.append(tuple([entry.names[0] for entry in held]))
    return ",".join(texts), tuple(files)


class _Table:
    """The binary table, gathered while the text is written. Equal lists are stored once."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, int], bytes] = {}  # by dtype and address of the layout, as `_texts`
        self._layouts: dict[str, tuple[int, bytes]] = {}
        self._files: dict[str, int] = {}
        self._holders: dict[bytes, int] = {}
        self._numbers: dict[tuple[int, tuple[tuple[str, ...], ...]], bytes] = {}  # by address of the cells
        self._tensors: list[bytes] = []

    def add_kind(self, record: TensorRecord, grid: _Grid) -> None:
        """Tensors with this dtype and layout follow."""
        if grid.layout not in self._layouts:
            fields = json.loads(grid.layout)
            axes = [one if isinstance(one, list) else [one] if one >= 0 else [] for one in fields["tensor_map"]]
            self._layouts[grid.layout] = (
                len(self._layouts),
                b"".join(
                    (
                        _longs(fields["device_matrix"]),
                        _U32.pack(len(axes)),
                        *map(_longs, axes),
                        _counted_texts(fields["alias_name"]),
                        _longs(fields["rank_list"]),
                    )
                ),
            )
        self._kinds[record.dtype, id(record.layout)] = b"".join(
            (
                _counted_text(_DTYPES[record.dtype]),
                _longs(record.layout.shape),
                _longs(grid.fragmentations),
                _U32.pack(self._layouts[grid.layout][0] + 1),
            )
        )

    def add(self, record: TensorRecord, cells: Sequence[_Cell], held: tuple[tuple[str, ...], ...]) -> None:
        """A tensor, and the files that hold each of its cells."""
        number = self._numbers.get((id(cells), held))
        if number is None:
            for names in held:
                for name in names:
                    self._files.setdefault(name, len(self._files))
            starts, files = [0], []
            for _, names in sorted(zip((cell.offset for cell in cells), held, strict=True)):
                files += sorted(self._files[name] for name in names)
                starts.append(len(files))
            encoded = b"".join(_U32.pack(len(some)) + struct.pack(f"<{len(some)}I", *some) for some in (starts, files))
            number = _U32.pack(self._holders.setdefault(encoded, len(self._holders)))
            self._numbers[id(cells), held] = number
        self._tensors += (_counted_text(record.key), self._kinds[record.dtype, id(record.layout)], number)

    def encoded(self, digest: str) -> bytes:
        """The table of a `metadata.json` with this digest."""
        return b"".join(
            (
                b"RSMETA01",
                _counted_text(digest),
                _counted_texts(self._files),
                _U32.pack(len(self._layouts)),
                *(text for _, text in self._layouts.values()),
                _U32.pack(len(self._holders)),
                *self._holders,
                _U32.pack(len(self._tensors) // 3),
                *self._tensors,
            )
        )


_U32 = struct.Struct("<I")


def _counted_text(text: str) -> bytes:
    data = text.encode()
    return _U32.pack(len(data)) + data


def _counted_texts(texts: Collection[str]) -> bytes:
    return _U32.pack(len(texts)) + b"".join(map(_counted_text, texts))


def _longs(numbers: Sequence[int]) -> bytes:
    return _U32.pack(len(numbers)) + struct.pack(f"<{len(numbers)}Q", *numbers)


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
