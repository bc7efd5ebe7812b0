"""Writing `metadata.json`: which shard of which tensor lies in which file, in the words that the original reads.

For each tensor the file says how the *stage* that holds it is cut: `device_matrix` (sizes of the mesh axes that `place`
leaves free), `rank_list` (the ranks on them) and `tensor_map` (for each dim the axis that cuts it, counted from 0 = the
last one; -1 for none; a list for several, the most significant first). For each shard it lists the files that hold it.

What those words cannot say is told by `expressible`, and described in `tiles.json`. Decoding the file, which can have
hundreds of MB, is the core's.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.errors import ArgumentError, UnsupportedError
from reshard.formats.checkpoint2.shards import FilePlan, Shard, TensorRecord, World, shard_id, shards_of
from reshard.storage.location import locate
from reshard.words import listed, show

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    from reshard.formats.checkpoint2.names import Part

__all__ = ["expressible", "write_metadata"]

# What MindSpore's reader of shard files knows. It refuses a whole file for one tensor of another dtype.
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
# Names of axes that mean something else in the original's layouts.
_RESERVED_AXES = ("", "None", "interleaved_parallel")


def expressible(record: TensorRecord, world: World) -> str | None:
    """Why `metadata.json` cannot describe a tensor; None if it can.

    Raises:
        LayoutError: the record names an axis or a coordinate that the mesh does not have.

    Example:
        >>> world = World((("tp", 4),))
        >>> expressible(TensorRecord("w", "BF16", (8, 6), cut=(("tp",),)), world)
        >>> expressible(TensorRecord("w", "BF16", (8, 6), cut=((), ("tp",))), world)
        'dim 1 has 6 elements, which 4 parts do not divide evenly'
    """
    reserved = [axis for axis in world.sizes if axis in _RESERVED_AXES]
    if reserved:
        return f"a mesh axis named {show(reserved[0])} means something else there"
    if record.dtype not in _DTYPES:
        return f"MindSpore has no shard files of {record.dtype}: its reader refuses the whole file that holds it"
    if record.flat:
        return "it is flattened and cut 1-D"
    if record.stored and record.stored != tuple(range(len(record.shape))):
        return "its dims are stored in another order"
    parts = [math.prod(world.sizes[axis] for axis in axes) for axes in _padded_cut(record)]
    for dim in (dim for dim, _ in record.blocks if parts[dim] > 1):
        return f"dim {dim} consists of blocks that are cut by themselves"
    for dim in (dim for dim, sizes in record.sizes if len(set(sizes)) > 1):
        return f"dim {dim} is cut into parts of different sizes"
    for dim, (extent, n_parts) in enumerate(zip(record.shape, parts, strict=True)):
        if extent % n_parts:
            return f"dim {dim} has {extent} elements, which {n_parts} parts do not divide evenly"
    fixed = world.fixed(record.place)
    both = [axis for axis in record.axes if axis in fixed and world.sizes[axis] > 1]
    if both:
        return f"axis {show(both[0])} both places it and cuts it"
    ranks = world.held(record.place)
    # The original takes `rank % len(rank_list)` for the position of a rank in its stage.
    if ranks[0] % len(ranks) or ranks != tuple(range(ranks[0], ranks[0] + len(ranks))):
        return f"the ranks that hold it, {listed(ranks)}, are not a contiguous and aligned run in the order of the mesh"
    return None


def write_metadata(
    path: str | os.PathLike[str],
    records: Sequence[TensorRecord],
    world: World,
    plan: FilePlan,
    *,
    prefix: str | None = None,
    mode: int = 0o666,
    durable: bool = True,
) -> None:
    """Write `metadata.json`, atomically and piece by piece: a large one never lies in memory.

    It is written without indentation, which the original's JSON reader does not need: the copies of replicated
    shards make the file grow with the square of the ranks, and each of its numbers would get a line of its own.

    Args:
        path: the file.
        records: the tensors to describe, each name once, all of them `expressible`.
        world: the mesh.
        plan: the files; every shard of the records must be in one.
        prefix: the prefix of the shard files.
        mode: permission bits, less the umask.
        durable: whether the file and its folder are synced.

    Raises:
        UnsupportedError: a record is not expressible.
        ArgumentError: a name stands twice, or a shard is in no file.
        LayoutError: a record names an axis or a coordinate that the mesh does not have.
        StorageError: the system failed; what was under the name is as it was.
    """
    seen: set[str] = set()
    for record in records:
        reason = expressible(record, world)
        if reason is not None:
            raise UnsupportedError(f"metadata.json cannot describe {show(record.key)}: {reason}", key=record.key)
        if record.key in seen:
            raise ArgumentError(f"{show(record.key)} is described twice", key=record.key)
        seen.add(record.key)
    with locate(path).writing(mode, durable=durable) as file:
        for text in _texts(records, world, plan, prefix):
            file.write(text.encode())


def _texts(records: Sequence[TensorRecord], world: World, plan: FilePlan, prefix: str | None) -> Iterator[str]:
    """The file, in pieces. Thousands of tensors share a handful of grids, whose long lists are spelled once."""
    grids: dict[object, _Grid] = {}
    comma = ""
    yield '{"state_dict_metadata":{'
    for record in records:
        cut = _padded_cut(record)
        grid = grids.get((record.place, cut))
        if grid is None:
            grid = grids[record.place, cut] = _grid(record, cut, world)
        yield f"{comma}\n{_dump(record.key)}:{_tensor(record, grid)}"
        comma = ","
    yield '},\n"storage_data":{'
    names = {file: _dump(file.name(prefix)) for file in plan.files}
    stored = {(file.part, file.rank, key): names[file] for file in plan.files for key in file.keys}
    groups: dict[tuple[int, ...], str] = {}
    comma = ""
    for shard in shards_of(records, world):
        yield f"{comma}\n{_dump(shard_id(shard.key, shard.offset))}:{_storage(shard, stored, groups)}"
        comma = ","
    yield "}}\n"


@dataclass(frozen=True)
class _Grid:
    """What all tensors of one cut and place share.

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


def _grid(record: TensorRecord, cut: tuple[tuple[str, ...], ...], world: World) -> _Grid:
    offsets = world.offsets(record.place, record.axes)
    n_seen: dict[int, int] = {}
    replicas = []
    for offset in offsets:
        replicas.append(n_seen.get(offset, 0))
        n_seen[offset] = replicas[-1] + 1
    fixed = world.fixed(record.place)
    # An axis of size 1 stays though it is fixed: a device matrix without any axis breaks the original.
    axes = [axis for axis in world.sizes if axis not in fixed or axis in record.axes] or [*world.sizes, "device"][:1]
    sizes = [world.sizes[axis] if axis not in fixed and axis in world.sizes else 1 for axis in axes]
    tensor_map = [[len(axes) - 1 - axes.index(axis) for axis in of_dim] for of_dim in cut]
    layout = {  # in this order: the original takes the values by position
        "device_matrix": sizes,
        "tensor_map": [one if len(one) > 1 else one[0] if one else -1 for one in tensor_map],
        "interleaved_parallel": False,
        "alias_name": axes,
        "rank_list": list(world.held(record.place)),
    }
    fragmentations = [math.prod(world.sizes[axis] for axis in of_dim) for of_dim in cut]
    return _Grid(_dump(replicas), fragmentations, _dump(layout), list(n_seen))


def _tensor(record: TensorRecord, grid: _Grid) -> str:
    local_shape = [extent // n for extent, n in zip(record.shape, grid.fragmentations, strict=True)]
    shape = _dump(local_shape)
    chunk = ",".join(f'{{"global_offset":[{offset}],"local_shape":{shape}}}' for offset in grid.offsets)
    return (
        f'{{"properties":{{"dtype":"{_DTYPES[record.dtype]}","replica_id":{grid.replica_id},'
        f'"allow_shape_mismatch":false,"allow_to_save":true}},'
        f'"global_shape":{_dump(list(record.shape))},"axis_fragmentations":{_dump(grid.fragmentations)},'
        f'"layout":{grid.layout},"chunk":[{chunk}]}}'
    )


def _storage(shard: Shard, stored: dict[tuple[Part, int, str], str], groups: dict[tuple[int, ...], str]) -> str:
    group = groups.get(shard.holders)
    if group is None:
        group = groups[shard.holders] = _dump(list(shard.holders))
    files = [(rank, stored.get((shard.part, rank, shard.key))) for rank in shard.holders]
    entries = [
        f'{{"file_name":{name},"storage_rank":{rank},"rank_group":{group}}}' for rank, name in files if name is not None
    ]
    if not entries:
        raise ArgumentError(f"shard {shard.offset} of {show(shard.key)} is in no file of the plan", key=shard.key)
    return f"[{','.join(entries)}]"


def _padded_cut(record: TensorRecord) -> tuple[tuple[str, ...], ...]:
    return record.cut + ((),) * (len(record.shape) - len(record.cut))


# Made once: `json.dumps` with options makes one for each call, and there is a call for every shard.
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def _dump(value: object) -> str:
    return _ENCODER.encode(value)
