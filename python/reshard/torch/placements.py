"""How live tensors lie over the ranks: torch's placements as plain numbers, without torch.

The ranks have an order, and every mesh dim is a *digit* of the position of a rank in it. A digit `(outer, inner)` has
the value `position % outer // inner`; a dim that torch flattened out of others is several digits. Meshes, slices of
meshes and flattened meshes, of one root or of many, become numbers that can be compared, merged and sent to other
ranks. `common_layout` makes one mesh of them.

The content of tensors is not read, nothing is copied or communicated, and the meaning of keys is not known here.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from reshard.errors import UnsupportedError
from reshard.torch.tensors import plain_tensor
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np
    from torch.distributed.device_mesh import DeviceMesh

Digit: TypeAlias = tuple[int, int]
"""`(outer, inner)`: the value is `position % outer // inner`."""

Line: TypeAlias = tuple[Digit, ...]
"""One mesh dim as digits, outermost first."""


@dataclass(frozen=True)
class Row:
    """The order of the ranks, and the known mesh dims over it.

    Attributes:
        n_ranks: how many ranks there are.
        order: the rank at each position; None: 0, 1, 2, ...
        spans: `(outer, inner, name)` of every digit of every mesh dim; name None: the dim has none.
        seen: a cache: the dims of each mesh as digits.
    """

    n_ranks: int
    order: tuple[int, ...] | None = None
    spans: frozenset[tuple[int, int, str | None]] = frozenset()
    seen: dict[Any, tuple[Line | None, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def lines(self, mesh: DeviceMesh) -> tuple[Line | None, ...]:
        """The dims of a mesh as digits, as this rank sees them; None for a dim that is not made of digits."""
        if mesh not in self.seen:
            self.seen[mesh] = _lines_of(mesh, None if self.order is None else _inverse(self.order))
        return self.seen[mesh]


@dataclass(frozen=True)
class DigitLayout:
    """How a tensor is divided, in digits of the positions of ranks.

    Attributes:
        shape: the global shape, in elements.
        cuts: for each dim the mesh dims that divide it, first = outermost; missing dims are not divided.
        reason: why digits cannot express the partition; empty if they can.
    """

    shape: tuple[int, ...]
    cuts: tuple[tuple[Line, ...], ...] = ()
    reason: str = ""


@dataclass(frozen=True, eq=False)
class LocalPart:
    """The part of a tensor that this rank holds.

    Attributes:
        local: the local tensor; shares its memory with the live tensor.
        layout: how the whole tensor is divided.
        offset: global offset of `local`, in elements, one for each dim.
    """

    local: torch.Tensor
    layout: DigitLayout
    offset: tuple[int, ...]


def digits_of(positions: Sequence[int]) -> Line | None:
    """The digits whose values positions enumerate in order, outermost first; None if there are none.

    Example:
        >>> digits_of([4, 6]), digits_of([0, 1, 4, 5]), digits_of([1, 0])
        (((4, 2),), ((8, 4), (2, 1)), None)
    """
    found: list[Digit] = []
    base = positions[0]
    rest = list(positions)
    while len(rest) > 1:
        inner = rest[1] - rest[0]
        n = 1
        while n < len(rest) and rest[n] == rest[0] + n * inner:
            n += 1
        if inner < 1 or len(rest) % n:
            return None
        found.insert(0, (inner * n, inner))
        rest = rest[::n]
    counted = [base]
    for outer, inner in found:
        counted = [p + inner * c for p in counted for c in range(outer // inner)]
    # Digits are zero where the counting starts, and do not run into each other.
    aligned = all(base % outer < inner for outer, inner in found)
    ordered = sorted(found)
    nested = all(low[0] <= high[1] for low, high in itertools.pairwise(ordered))
    return tuple(found) if counted == list(positions) and aligned and nested else None


def row_of(tensors: Iterable[torch.Tensor], n_ranks: int, mesh: DeviceMesh | None = None) -> Row:
    """The order of the ranks, from the meshes of this rank's tensors.

    Args:
        tensors: all tensors of this rank; those without a mesh are ignored.
        n_ranks: how many ranks there are.
        mesh: a further mesh.

    Example:
        >>> row_of([torch.zeros(3)], 4)
        Row(n_ranks=4, order=None, spans=frozenset())
    """
    distributed: list[Any] = [tensor for tensor in tensors if _is_distributed(tensor)]
    known = dict.fromkeys([mesh, *(tensor.device_mesh for tensor in distributed)])
    own = [one for one in known if one is not None and one.get_coordinate() is not None]
    meshes = dict.fromkeys([*own, *map(_root_of, own)])
    order = _order_of(meshes, n_ranks)
    row = Row(n_ranks, order)
    spans: set[tuple[int, int, str | None]] = set()
    for one in meshes:
        names = one.mesh_dim_names or (None,) * one.ndim
        for line, name in zip(row.lines(one), names, strict=True):
            spans |= {(*digit, name) for digit in line or ()}
    return replace(row, spans=frozenset(spans))


def local_part(tensor: torch.Tensor, row: Row, key: str) -> LocalPart | None:
    """The local part of a tensor, and how the whole is divided.

    Args:
        tensor: a plain tensor, which is whole, or a DTensor.
        row: made with the mesh of this tensor.
        key: its name, for messages.

    Returns:
        None if this rank is not in the tensor's mesh, and holds no part of it.

    Raises:
        UnsupportedError: it is a pending sum (`Partial`), its local part does not have the shape that follows from its
            placements, or its class stores the content elsewhere.

    Example:
        >>> local_part(torch.zeros(2, 3), Row(4), "w").offset
        (0, 0)
    """
    if not _is_distributed(tensor):
        tensor = plain_tensor(tensor, key)
        shape = tuple(tensor.shape)
        return LocalPart(tensor.detach(), DigitLayout(shape), (0,) * len(shape))
    distributed: Any = tensor
    mesh: DeviceMesh = distributed.device_mesh
    coordinates = mesh.get_coordinate()
    if coordinates is None:
        return None
    with torch.no_grad():
        local: torch.Tensor = distributed.to_local()
    local = plain_tensor(local, key)
    shape = tuple(tensor.shape)
    dims_of = _mesh_dims(tensor, key)
    offset, expected = part_of(shape, [[(mesh.size(d), coordinates[d]) for d in dims] for dims in dims_of])
    if local.numel() == math.prod(expected) == 0:
        local = local.reshape(expected)  # FSDP2 gives an empty part any shape
    if tuple(local.shape) != expected:
        raise UnsupportedError(
            f"{show(key)}: this rank holds an array of shape {tuple(local.shape)}, and of a tensor of shape {shape} "
            f"under {_words(tensor)} it should be {expected}",
            key=key,
            hint="`tensor.redistribute(placements=...)` to plain `Shard` and `Replicate` placements first",
        )
    lines = row.lines(mesh)
    used = [d for dims in dims_of for d in dims if mesh.size(d) > 1]
    if any(lines[d] is None for d in used):
        reason = f"the ranks of its mesh {mesh.mesh.tolist()} do not lie regularly among all {row.n_ranks}"
        return LocalPart(local, DigitLayout(shape, reason=reason), offset)
    cuts = tuple(tuple(lines[d] or () for d in dims if mesh.size(d) > 1) for dims in dims_of)
    while cuts and not cuts[-1]:
        cuts = cuts[:-1]
    return LocalPart(local, DigitLayout(shape, cuts), offset)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor of which each rank holds a part, also on a mesh of one rank.

    Example:
        >>> is_sharded(torch.zeros(3))
        False
    """
    distributed: Any = tensor
    return _is_distributed(tensor) and not all(one.is_replicate() for one in distributed.placements)


def part_of(shape: Sequence[int], cuts: Sequence[Sequence[tuple[int, int]]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and shape of one part, divided as by `torch.chunk`, one mesh dim after the other.

    Args:
        shape: the global shape, in elements.
        cuts: for each dim `(number of parts, index of the part)` of each mesh dim, first = outermost.

    Example:
        >>> part_of((7, 4), [[(2, 1), (2, 0)]])
        ((4, 0), (2, 4))
    """
    offset, extents = [0] * len(shape), list(shape)
    for dim, of_dim in enumerate(cuts):
        for n_parts, which in of_dim:
            each = -(-extents[dim] // n_parts)
            start = min(each * which, extents[dim])
            offset[dim] += start
            extents[dim] = min(each, extents[dim] - start)
    return tuple(offset), tuple(extents)


# -------------------------------------------------------------------------------------------------------- one tensor


def _is_distributed(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor; does not import `torch.distributed.tensor`."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def _words(tensor: Any) -> str:
    return f"{tuple(tensor.placements)} over a mesh of {tuple(tensor.device_mesh.shape)}"


def _mesh_dims(tensor: Any, key: str) -> list[list[int]]:
    """For each dim of the tensor the mesh dims that divide it, first = outermost.

    Placements are applied from the left: of two that divide one dim, the left one is outermost. Some placements to the
    right of a `_StridedShard` come before it; its split factor is the product of their sizes.
    """
    dims_of: list[list[int]] = [[] for _ in tensor.shape]
    for mesh_dim in reversed(range(len(tensor.placements))):
        placement = tensor.placements[mesh_dim]
        if placement.is_replicate():
            continue
        if placement.is_partial():
            raise UnsupportedError(
                f"{show(key)} is a sum whose parts lie on several ranks: {_words(tensor)}",
                key=key,
                hint="`tensor.redistribute(placements=...)` carries out the sum",
            )
        dim = getattr(placement, "dim", None)
        if dim is None or type(placement).__name__ not in {"Shard", "_StridedShard"}:
            raise UnsupportedError(f"{show(key)} has a placement that is not known: {_words(tensor)}", key=key)
        before = dims_of[dim]
        factors = [math.prod(tensor.device_mesh.size(d) for d in before[:n]) for n in range(len(before) + 1)]
        factor = getattr(placement, "split_factor", 1)
        if factor not in factors:
            raise UnsupportedError(
                f"{show(key)} is cut into strides that are no cut by mesh dims: {_words(tensor)}",
                key=key,
                hint="`tensor.redistribute(placements=...)` to plain `Shard` placements first",
            )
        before.insert(factors.index(factor), mesh_dim)
    return _shard_order(tensor, dims_of)


def _shard_order(tensor: Any, dims_of: list[list[int]]) -> list[list[int]]:
    """The order of the mesh dims, where a newer torch stores one beside plain `Shard` placements."""
    for entry in getattr(getattr(tensor, "_spec", None), "shard_order", None) or ():
        if sorted(entry.mesh_dims) == sorted(dims_of[entry.tensor_dim]):
            dims_of[entry.tensor_dim] = list(entry.mesh_dims)
    return dims_of


# ------------------------------------------------------------------------------------------------------------ meshes


def _root_of(mesh: Any) -> DeviceMesh:
    """The mesh from which this one was sliced; this mesh itself where torch does not record it."""
    tell = getattr(mesh, "_get_root_mesh", None)
    root: DeviceMesh = tell() if tell is not None else mesh
    return root


def _order_of(meshes: Iterable[DeviceMesh], n_ranks: int) -> tuple[int, ...] | None:
    """The order of a mesh over all ranks whose dims are no digits of 0, 1, 2, ..., if there is one."""
    irregular = []
    for mesh in meshes:
        ranks = tuple(mesh.mesh.flatten().tolist())
        if len(ranks) == n_ranks and not _is_regular(mesh):
            irregular.append(ranks)
    return min(irregular, default=None)


def _is_regular(mesh: DeviceMesh) -> bool:
    """Whether the dims of a mesh over all ranks are digits of 0, 1, 2, ..."""
    ranks = mesh.mesh.numpy()
    lines = [digits_of(_through((0,) * ranks.ndim, dim, ranks)) for dim in range(ranks.ndim)]
    counted = [int(ranks.flat[0])]
    for line in lines:
        for outer, inner in line or ():
            counted = [p + inner * c for p in counted for c in range(outer // inner)]
    return counted == ranks.flatten().tolist()


def _through(coordinates: Sequence[int], dim: int, ranks: np.ndarray) -> list[int]:
    """The ranks of a line of a mesh along a dim."""
    index: Any = (*coordinates[:dim], slice(None), *coordinates[dim + 1 :])
    line: list[int] = ranks[index].tolist()
    return line


def _lines_of(mesh: DeviceMesh, position: Mapping[int, int] | None) -> tuple[Line | None, ...]:
    coordinates = tuple(mesh.get_coordinate() or ())
    ranks = mesh.mesh.numpy()
    lines = []
    for dim in range(ranks.ndim):
        line = _through(coordinates, dim, ranks)
        lines.append(digits_of(line if position is None else [position[rank] for rank in line]))
    return tuple(lines)


def _inverse(order: Sequence[int]) -> dict[int, int]:
    return {rank: position for position, rank in enumerate(order)}
