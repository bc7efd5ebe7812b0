"""Shards of tensors in files of `torch.save`, of each rank one: where each lies, and whole tensors.

Of a DTensor, a tensor of a device mesh, a file holds the local tensor of its rank, the mesh with the coordinates of the
rank, and a placement for each axis of the mesh. The part that a rank holds is computed as torch computes it, and its
shape has to be that of the stored local tensor.

Of a ShardedTensor, as FSDP1 saves it without a mesh, a file holds the regions of its rank, and lists the regions of all
ranks. All ranks have to list the same ones, and their files have to hold each of them.

These are values of the pickle: nothing is executed.

Source: `torch/distributed/tensor/_utils.py`, `placement_types.py` and `torch/distributed/device_mesh.py` of torch 2.4
to 2.15; for ShardedTensors `rust/formats/src/torch_file/regions.rs`.
"""

from __future__ import annotations

import itertools
import logging
import math
import struct
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from reshard import _core
from reshard.errors import CoverageError, DamagedFileError, UnsupportedError
from reshard.formats.rank_replicas import HeldArray, Replicas
from reshard.formats.run_state import is_optimizer
from reshard.values.indexing import row_major
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

_log = logging.getLogger("reshard")

_MAX_AXES = 16
_MAX_SIZES = 256  # of one axis: lists in a file can contain each other
_MAX_RANKS = 1 << 31
_Meshes: TypeAlias = "dict[int, tuple[list[int] | None, list[int] | None]]"
"""The sizes of the axes of each mesh of a file and the coordinates of its rank, by the `id` of the mesh."""

_MIXED_HINT = "the files are of different saves, or not of all ranks of one run"


class RankTensor(NamedTuple):
    """A tensor in the file of a rank.

    Attributes:
        rank: the rank.
        file: the number of its file in the index.
        path: the path of the file.
        name: its name in the file.
        key: its name in the checkpoint.
        dtype: its safetensors name.
        local: the shape of what is stored, in elements.
        shape: the shape of the whole tensor, in elements; None: it is no shard.
        spec: the mesh and the placements of a DTensor; None: the offset is known.
        regions: of a ShardedTensor the regions of all ranks, as `TorchRegions.all`.
        offset: of what is stored the first element in the whole tensor; None without a spec: the file holds no region
            of it.
        n_ranks: of a ShardedTensor the number of ranks of its run, as the file says.
    """

    rank: int
    file: int
    path: str
    name: str
    key: str
    dtype: str
    local: tuple[int, ...]
    shape: tuple[int, ...] | None = None
    spec: object = None
    regions: bytes | None = None
    offset: tuple[int, ...] | None = None
    n_ranks: int | None = None

    @property
    def kind(self) -> str:
        """What torch calls it."""
        return "ShardedTensor" if self.regions is not None else "DTensor" if self.shape is not None else "tensor"


_FLAT = frozenset(("_flat_param", "flat_param"))
"""What FSDP1 calls the parameters of a module in one tensor."""


def is_flat(key: str) -> bool:
    """Whether a tensor is the parameters of a module of FSDP1, one after the other, or belongs to them.

    Example:
        >>> is_flat("layers.0._flat_param"), is_flat("layers.0.weight")
        (True, False)
    """
    return not _FLAT.isdisjoint(key.split("."))


def refuse_flat(tensors: Sequence[RankTensor], *, is_alone: bool = False) -> None:
    """Refuse flat parameters: each rank has a part of them, and no file says where a parameter begins.

    Args:
        tensors: those of a file. State of an optimizer is let through.
        is_alone: the name of the file does not say that a rank wrote it. Then only ShardedTensors, and tensors of one
            dim that are called as FSDP1 calls its parameters, are refused. For others there is a warning.

    Raises:
        UnsupportedError: there are some.
    """
    flat = [one for one in tensors if is_flat(one.key) and not is_optimizer(one.key)]
    certain = [
        one
        for one in flat
        if not is_alone or one.regions is not None or (len(one.local) == 1 and one.key.rpartition(".")[2] in _FLAT)
    ]
    if not certain:
        if flat:
            _log.warning(
                "%s: %s is read as an ordinary tensor: FSDP1 gives such names to the parameters of a module in one "
                "tensor",
                flat[0].path,
                show(flat[0].name),
            )
        return
    raise UnsupportedError(
        f"{show(certain[0].path)}: {show(certain[0].name)} holds the parameters of a module of FSDP1 one after the "
        "other, or the part of one rank of them, and no file says where each begins",
        path=certain[0].path,
        key=certain[0].key,
        hint="save the state dict under `StateDictType.SHARDED_STATE_DICT` or `FULL_STATE_DICT`, not under "
        "`LOCAL_STATE_DICT`",
    )


def read(
    path: str,
    file: int,
    rank: int,
    prefix: str = "",
    *,
    n_ranks: int | None = None,
    same: dict[bytes, bytes] | None = None,
) -> tuple[list[RankTensor], list[tuple[str, object]]]:
    """The tensors of a file, and its other values by their names in the file.

    Args:
        path: the file.
        file: its number in the index.
        rank: the rank that wrote it. If the name does not say it, that in its ShardedTensors comes first.
        prefix: what stands before the names of its tensors in the checkpoint.
        n_ranks: how many ranks there are by its name, which says the rank, too; None: it says nothing.
        same: lists of regions in the files of other ranks, which are kept once.

    Raises:
        DamagedFileError: another rank wrote it than its name says, or several; or as `reshard.open`.
        UnsupportedError, StorageError: as `reshard.open`.
    """
    tensors, shards, regions, objects = _core.read_torch_shards(path)
    same = {} if same is None else same
    found = [RankTensor(rank, file, path, name, prefix + name, dtype, shape) for name, dtype, shape in tensors]
    found += [
        RankTensor(rank, file, path, name, prefix + name, dtype, local, shape, spec)
        for name, dtype, local, shape, spec in shards
    ]
    for name, dtype, shape, held, all_, wrote, n_wrote in regions:
        if n_ranks is not None and (wrote, n_wrote) != (rank, n_ranks):
            raise DamagedFileError(
                f"{show(path)}: {show(name)} was saved by rank {wrote} of {n_wrote}, and the name of the file says "
                f"rank {rank} of {n_ranks}",
                path=path,
                key=prefix + name,
                hint="the file was renamed, or is of another run: copy it again",
            )
        if (wrote, n_wrote) != regions[0][5:7]:
            raise DamagedFileError(
                f"{show(path)}: {show(name)} was saved by rank {wrote} of {n_wrote}, and {show(regions[0][0])} by rank "
                f"{regions[0][5]} of {regions[0][6]}",
                path=path,
                key=prefix + name,
                hint="save the file of each rank alone",
            )
        of_all = RankTensor(rank, file, path, name, prefix + name, dtype, (), shape, None, same.setdefault(all_, all_))
        of_all = of_all._replace(n_ranks=n_wrote)
        found += [of_all._replace(name=stored, local=extent, offset=at) for stored, at, extent in held] or [of_all]
    if regions:
        found = [one._replace(rank=regions[0][5]) for one in found]
    # Millions of objects of all ranks together: only what follows from them is kept.
    meshes: _Meshes = {}
    found = [one if one.spec is None else one._replace(spec=None, offset=part_of(one, meshes)[0]) for one in found]
    return found, objects


def add_tensors(index: _core.Index, tensors: Iterable[RankTensor], hint: str) -> Replicas:
    """Add the whole tensors of the shards of all ranks to an index. Tensors that are no shards are copies.

    Args:
        index: with the files.
        tensors: those of all ranks.
        hint: what to do if the ranks do not hold all of a tensor.

    Returns:
        The copies that several ranks hold, to be compared before they are read.

    Raises:
        DamagedFileError: ranks describe a tensor differently, or a local tensor has another shape than its part.
        CoverageError: the shards of a tensor leave a hole, or overlap.
        UnsupportedError: a placement is not supported.
    """
    by_key: dict[str, list[RankTensor]] = {}
    of_run: RankTensor | None = None
    for tensor in tensors:
        if tensor.n_ranks is not None:
            of_run = of_run or tensor
            if tensor.n_ranks != of_run.n_ranks:
                raise DamagedFileError(
                    f"{show(tensor.path)}: {show(tensor.key)} was saved by a rank of {tensor.n_ranks}, and "
                    f"{show(of_run.key)} in {show(of_run.path)} by one of {of_run.n_ranks}",
                    path=tensor.path,
                    key=tensor.key,
                    hint=_MIXED_HINT,
                )
        by_key.setdefault(tensor.key, []).append(tensor)
    copies: dict[str, list[list[HeldArray]]] = {}
    for key, held in by_key.items():
        first = held[0]
        shape = first.local if first.shape is None else first.shape
        for one in held:
            of_one = one.local if one.shape is None else one.shape
            if (one.dtype, of_one, one.kind) != (first.dtype, shape, first.kind):
                raise DamagedFileError(
                    f"{show(one.path)}: {show(key)} is a {one.kind} of {one.dtype} and shape {of_one}, and a "
                    f"{first.kind} of {first.dtype} and shape {shape} in {show(first.path)}",
                    path=one.path,
                    key=key,
                    hint=_MIXED_HINT,
                )
            if one.regions != first.regions:
                raise DamagedFileError(
                    f"{show(one.path)}: {show(key)} has {_other_region(one, first)} in {show(first.path)}",
                    path=one.path,
                    key=key,
                    hint=_MIXED_HINT,
                )
        parts: dict[tuple[tuple[int, ...], tuple[int, ...]], list[RankTensor]] = {}
        for one in held:
            if one.regions is not None and one.offset is None:
                continue  # the rank has no region of it
            offset, extent = part_of(one)
            if 0 not in extent:
                parts.setdefault((offset, extent), []).append(one)
        stored = [
            _core.StoredArray(one.file, one.name, extent, [_core.Tile(offset, extent, 0, row_major(extent))])
            for (offset, extent), of_part in parts.items()
            for one in of_part
        ]
        n_held = sum(math.prod(extent) for _, extent in parts)
        if n_held < math.prod(shape):
            there = ", ".join(str(one.rank) for one in held[:8])
            raise CoverageError(
                f"{show(key)} has {math.prod(shape)} elements, and the files of the ranks {there}"
                f"{' and more' if len(held) > 8 else ''} hold {n_held} of them{_absent(first, parts)}",
                path=first.path,
                key=key,
                hint=hint,
            )
        try:
            index.add_tiles(key, first.dtype, shape, stored)
        except CoverageError as error:
            others = " and the files of other ranks" if any(one.file != first.file for one in held) else ""
            error.message = f"{show(first.path)}{others}: {error.message}"
            error.path, error.hint = first.path, _MIXED_HINT
            raise
        groups = [
            [HeldArray(one.rank, one.file, one.name, extent, 0, extent, one.dtype) for one in of_part]
            for (_, extent), of_part in parts.items()
            if len(of_part) > 1
        ]
        if groups:
            copies[key] = groups
    return Replicas(
        copies, "the ranks should hold copies: the files are of different saves, or a rank went on without the others"
    )


def _regions(tensor: RankTensor) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The first element and the shape of the regions of all ranks."""
    n_dims = len(tensor.shape or ())
    numbers = [number for (number,) in struct.iter_unpack("<Q", tensor.regions or b"")]
    starts = range(0, len(numbers), 2 * n_dims) if n_dims else ()
    return [(tuple(numbers[at : at + n_dims]), tuple(numbers[at + n_dims : at + 2 * n_dims])) for at in starts]


def _other_region(one: RankTensor, first: RankTensor) -> str:
    """What one rank lists otherwise than the first."""
    pairs = itertools.zip_longest(_regions(one), _regions(first))
    n, (found, expected) = next((n, pair) for n, pair in enumerate(pairs) if pair[0] != pair[1])
    words = [
        "no region" if region is None else f"a region of shape {region[1]} at {region[0]}"
        for region in (found, expected)
    ]
    return f"{words[0]} as number {n}, and {words[1]}"


def _absent(first: RankTensor, held: Collection[tuple[tuple[int, ...], tuple[int, ...]]]) -> str:
    """A region that is listed, and that no file holds."""
    absent = next((one for one in _regions(first) if one not in held and 0 not in one[1]), None)
    return "" if absent is None else f"; the region of shape {absent[1]} at {absent[0]} is in none of the files"


def part_of(tensor: RankTensor, meshes: _Meshes | None = None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first element and the shape of what a rank holds.

    Args:
        tensor: the tensor.
        meshes: those of its file that are known, while the objects of the file live.

    Raises:
        DamagedFileError: the mesh or a placement is invalid, or the stored tensor has another shape.
        UnsupportedError: a placement is not supported.
    """
    if tensor.shape is None:
        return (0,) * len(tensor.local), tensor.local
    if tensor.offset is not None:
        return tensor.offset, tensor.local
    offset, extent = [0] * len(tensor.shape), list(tensor.shape)
    for dim, size, coordinate in _cuts(tensor, len(tensor.shape), {} if meshes is None else meshes):
        chunk = -(-extent[dim] // size)
        start = min(extent[dim], chunk * coordinate)
        offset[dim] += start
        extent[dim] = min(chunk, extent[dim] - start)
    if tuple(extent) != tensor.local:
        raise _damaged(
            tensor, f"its part of {tensor.shape} has the shape {tuple(extent)}, and {tensor.local} is stored"
        )
    return tuple(offset), tuple(extent)


def _cuts(tensor: RankTensor, n_dims: int, meshes: _Meshes) -> list[tuple[int, int, int]]:
    """The dim, the number of parts and the number of the part of this rank, of each cut, in their order."""
    spec = _attributes(tensor.spec)
    mesh, placements = spec.get("mesh"), spec.get("placements")
    if id(mesh) not in meshes:
        attributes = _attributes(mesh)
        sizes = _sizes(attributes)
        meshes[id(mesh)] = sizes, None if sizes is None else _coordinate(attributes, sizes, tensor.rank)
    sizes, coordinate = meshes[id(mesh)]
    if sizes is None or not isinstance(placements, tuple | list) or len(placements) != len(sizes):
        raise _damaged(tensor, "its mesh and its placements do not belong together")
    if coordinate is None:
        raise UnsupportedError(
            f"{show(tensor.path)}: {show(tensor.name)} does not say which rank of its mesh wrote it",
            path=tensor.path,
            key=tensor.key,
        )
    plain: list[tuple[int, int]] = []  # axis and dim
    strided: list[tuple[int, int, int]] = []  # with the split factor
    for axis, placement in enumerate(placements):
        kind = placement.name.rpartition(".")[2] if isinstance(placement, _core.Opaque) else ""
        if kind == "Replicate":
            continue
        if kind not in ("Shard", "_StridedShard"):
            raise UnsupportedError(
                f"{show(tensor.path)}: {show(tensor.name)} has the placement {show(kind or str(placement))}, and no "
                "file holds its values",
                path=tensor.path,
                key=tensor.key,
                hint="redistribute it to `Shard` or `Replicate` before it is saved",
            )
        of_kind = _placement(placement)
        dim = None if of_kind is None else of_kind[0]
        if of_kind is None or dim is None or not -n_dims <= dim < n_dims:
            raise _damaged(tensor, f"its placement on axis {axis} of the mesh is invalid")
        if kind == "Shard":
            plain.append((axis, dim % n_dims))
        else:
            strided.append((axis, dim % n_dims, of_kind[1]))
    for axis, dim, factor in strided:
        right = [(other, of) for other, of in plain if other > axis and of == dim]
        same = [other for other, of, _ in strided if of == dim]
        if len(same) > 1 or factor != math.prod(sizes[other] for other, _ in right):
            raise UnsupportedError(
                f"{show(tensor.path)}: {show(tensor.name)} has a strided placement with the split factor {factor} on a "
                "mesh of other sizes, which is not supported",
                path=tensor.path,
                key=tensor.key,
            )
    _check_order(tensor, spec.get("shard_order"), plain, is_strided=bool(strided))
    # A strided cut is made after those of the axes to its right.
    ordered = [*plain, *((axis, dim) for axis, dim, _ in strided)]
    return [(dim, sizes[axis], coordinate[axis]) for axis, dim in ordered]


def _check_order(tensor: RankTensor, order: object, plain: Sequence[tuple[int, int]], *, is_strided: bool) -> None:
    """Refuse cuts of a dim in another order than that of the axes, which newer versions of torch can record."""
    if is_strided or not isinstance(order, tuple | list):
        return
    for entry in order:
        parts = entry.arguments if isinstance(entry, _core.Opaque) else entry
        of_dim, axes = parts if isinstance(parts, tuple | list) and len(parts) == 2 else (None, None)
        if not isinstance(axes, tuple | list) or list(axes) != sorted(axis for axis, dim in plain if dim == of_dim):
            raise UnsupportedError(
                f"{show(tensor.path)}: {show(tensor.name)} is cut in another order than that of the axes of its mesh",
                path=tensor.path,
                key=tensor.key,
            )


def _placement(placement: _core.Opaque) -> tuple[int, int] | None:
    """The dim and the split factor of a placement, from its attributes or its arguments."""
    attributes = _attributes(placement)
    dim, factor = attributes.get("dim"), attributes.get("split_factor", 1)
    given = placement.state if isinstance(placement.state, tuple) else placement.arguments
    if dim is None and given:
        dim, factor = given[0], given[1] if len(given) > 1 else 1
    return (dim, factor) if type(dim) is int and type(factor) is int else None


def _sizes(mesh: dict[str, object]) -> list[int] | None:
    """The sizes of the axes of a mesh."""
    layout = mesh.get("_layout")
    if layout is not None:
        described = _attributes(layout)
        axes = described.get("axes")
        if isinstance(axes, tuple | list):
            sizes = [_product(_attributes(axis).get("shape")) for axis in axes]
        else:
            shape = described.get("shape")
            sizes = [_product(one) for one in (shape if isinstance(shape, tuple | list) else [shape])]
    else:
        tensor = mesh.get("mesh")  # of older versions
        arguments = tensor.arguments if isinstance(tensor, _core.Opaque) else None
        shape = arguments[2] if isinstance(arguments, tuple) and len(arguments) > 2 else None
        sizes = [_product(one) for one in shape] if isinstance(shape, tuple | list) else [0]
    found = [size for size in sizes if size is not None and size < _MAX_RANKS]
    return found if len(found) == len(sizes) <= _MAX_AXES else None


def _product(shape: object) -> int | None:
    """The number of ranks of an axis, which can be made of several."""
    product, left = 1, [shape]
    for _ in range(_MAX_SIZES):
        if not left:
            return product
        one = left.pop()
        if type(one) is int and 0 < one < _MAX_RANKS:
            product *= one
        elif isinstance(one, tuple | list) and len(one) <= _MAX_AXES:
            left += one
        else:
            break
    return None


def _coordinate(mesh: dict[str, object], sizes: Sequence[int], rank: int) -> list[int] | None:
    """The coordinates of the rank that wrote a mesh."""
    known = mesh.get("_coordinate_on_dim")
    found: list[Any] = list(known) if isinstance(known, tuple | list) else []
    if not isinstance(known, tuple | list):
        ranks = mesh.get("_flatten_mesh_list", mesh.get("_flatten_rank_map"))
        if not isinstance(ranks, tuple | list) or len(ranks) != math.prod(sizes) or rank not in ranks:
            return None
        place = ranks.index(rank)
        for size in reversed(sizes):
            found.insert(0, place % size)
            place //= size
    of_axes = list(zip(found, sizes, strict=False))
    is_right = len(found) == len(sizes) and all(type(at) is int and 0 <= at < size for at, size in of_axes)
    return [at for at, _ in of_axes] if is_right else None


def _attributes(value: object) -> dict[str, object]:
    """The attributes of an object; empty if it is none."""
    state = value.state if isinstance(value, _core.Opaque) else None
    parts = state if isinstance(state, tuple) else (state,)  # with `__slots__` a pair
    found: dict[str, object] = {}
    for one in parts:
        if isinstance(one, dict):
            found |= {key: item for key, item in one.items() if isinstance(key, str)}
    return found


def _damaged(tensor: RankTensor, fault: str) -> DamagedFileError:
    return DamagedFileError(
        f"{show(tensor.path)}: {show(tensor.name)} is invalid: {fault}", path=tensor.path, key=tensor.key
    )
