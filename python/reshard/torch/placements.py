"""How live tensors lie over the ranks: torch's placements in words that do not need torch.

The one idea: the ranks stand in a row, and every mesh dim is a *digit* of a rank's position in that row. A digit
`(outer, inner)` has the value `position % outer // inner`; dims that torch flattened out of others are several digits.
Meshes, slices of meshes and flattened meshes, of one root or of many, thus become numbers that can be compared, joined
and sent to other ranks: `common_layout` makes one mesh of them.

What is in the tensors is never touched, nothing is copied or communicated, and keys mean nothing here.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from reshard.errors import UnsupportedError
from reshard.words import show

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Digit", "Line", "Partition", "Placed", "Row", "digits_of", "is_sharded", "part_of", "place", "row_of"]

Digit: TypeAlias = tuple[int, int]
"""`(outer, inner)`: the value is `position % outer // inner`."""

Line: TypeAlias = tuple[Digit, ...]
"""One mesh dim as digits, outermost first."""


@dataclass(frozen=True)
class Row:
    """The order in which the ranks stand, and the mesh dims that are known of it.

    Attributes:
        n_ranks: how many ranks there are.
        order: the rank at each position; None: 0, 1, 2, ...
        spans: `(outer, inner, name)` of every digit of every mesh dim; None for a dim without a name.
        seen: the dims of each `DeviceMesh` as digits, once they were computed.
    """

    n_ranks: int
    order: tuple[int, ...] | None = None
    spans: frozenset[tuple[int, int, str | None]] = frozenset()
    seen: dict[Any, tuple[Line | None, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def lines(self, mesh: DeviceMesh) -> tuple[Line | None, ...]:
        """The dims of a mesh as digits, as this rank sees them; None for a dim that is none."""
        if mesh not in self.seen:
            self.seen[mesh] = _lines_of(mesh, None if self.order is None else _inverse(self.order))
        return self.seen[mesh]


@dataclass(frozen=True)
class Partition:
    """How a tensor is cut.

    Attributes:
        shape: the global shape, in elements.
        cuts: for each dim the mesh dims that cut it, first = outermost; missing dims are not cut.
        unsaid: why the cut cannot be said in digits; empty if it can.
    """

    shape: tuple[int, ...]
    cuts: tuple[tuple[Line, ...], ...] = ()
    unsaid: str = ""


@dataclass(frozen=True, eq=False)
class Placed:
    """A tensor of this rank.

    Attributes:
        local: what this rank holds; shares its memory with the live tensor.
        partition: how the whole is cut.
        offset: first element of `local` in the whole, one index a dim.
    """

    local: torch.Tensor
    partition: Partition
    offset: tuple[int, ...]


def digits_of(positions: Sequence[int]) -> Line | None:
    """The digits that positions count through, outermost first; None if they are no such digits.

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
    """The row in which the ranks stand, from the meshes of this rank's tensors.

    Args:
        tensors: all of them; those without a mesh say nothing.
        n_ranks: how many ranks there are.
        mesh: a mesh that is known besides.

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


def place(tensor: torch.Tensor, row: Row, key: str) -> Placed | None:
    """Where a tensor lies: its local part, and how the whole is cut.

    Args:
        tensor: plain tensors are whole; a DTensor lies as its placements say.
        row: made with the mesh of this tensor.
        key: its name, for messages.

    Returns:
        None if this rank is not in the tensor's mesh, and holds nothing of it.

    Raises:
        UnsupportedError: it is a sum that is pending (`Partial`), its local part is not what its placements say, or it
            is a tensor of a class whose content is not its memory.

    Example:
        >>> place(torch.zeros(2, 3), Row(4), "w").offset
        (0, 0)
    """
    if not _is_distributed(tensor):
        _refuse_wrapped(tensor, key)
        shape = tuple(tensor.shape)
        return Placed(tensor.detach(), Partition(shape), (0,) * len(shape))
    distributed: Any = tensor
    mesh: DeviceMesh = distributed.device_mesh
    coordinates = mesh.get_coordinate()
    if coordinates is None:
        return None
    with torch.no_grad():
        local: torch.Tensor = distributed.to_local()
    _refuse_wrapped(local, key)
    shape = tuple(tensor.shape)
    dims_of = _mesh_dims(tensor, key)
    offset, expected = part_of(shape, [[(mesh.size(d), coordinates[d]) for d in dims] for dims in dims_of])
    if local.numel() == math.prod(expected) == 0:
        local = local.reshape(expected)  # FSDP2 does not care in which dims a part is empty
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
        unsaid = f"the ranks of its mesh {mesh.mesh.tolist()} do not lie regularly among all {row.n_ranks}"
        return Placed(local, Partition(shape, unsaid=unsaid), offset)
    cuts = tuple(tuple(lines[d] or () for d in dims if mesh.size(d) > 1) for dims in dims_of)
    while cuts and not cuts[-1]:
        cuts = cuts[:-1]
    return Placed(local, Partition(shape, cuts), offset)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor of which a rank holds a part, be that the whole on a mesh of one rank.

    Example:
        >>> is_sharded(torch.zeros(3))
        False
    """
    distributed: Any = tensor
    return _is_distributed(tensor) and not all(one.is_replicate() for one in distributed.placements)


def part_of(shape: Sequence[int], cuts: Sequence[Sequence[tuple[int, int]]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and shape of one part, as `torch.chunk` cuts, one mesh dim after the other.

    Args:
        shape: the global shape.
        cuts: for each dim `(parts, which)` of each cut, first = outermost.

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
    """Whether it is a DTensor; without importing what a process that has none does not need."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def _refuse_wrapped(tensor: torch.Tensor, key: str) -> None:
    """Refuse classes of tensors that keep their content elsewhere, such as quantized ones."""
    if hasattr(tensor, "__tensor_flatten__"):
        raise UnsupportedError(
            f"{show(key)} is a {type(tensor).__name__}, which is made of other tensors",
            key=key,
            hint="put an object whose `state_dict` holds them into `Checkpointer.resume(extra={...})`",
        )


def _words(tensor: Any) -> str:
    return f"{tuple(tensor.placements)} over a mesh of {tuple(tensor.device_mesh.shape)}"


def _mesh_dims(tensor: Any, key: str) -> list[list[int]]:
    """For each dim of the tensor the mesh dims that cut it, first = outermost.

    Placements are applied from the left: of two that cut one dim the left one is outermost. A `_StridedShard` says that
    cuts which stand to its right come first; its split factor is the product of their sizes.
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
    """The order that a newer torch keeps beside plain `Shard` placements, where there is one."""
    for entry in getattr(getattr(tensor, "_spec", None), "shard_order", None) or ():
        if sorted(entry.mesh_dims) == sorted(dims_of[entry.tensor_dim]):
            dims_of[entry.tensor_dim] = list(entry.mesh_dims)
    return dims_of


# ------------------------------------------------------------------------------------------------------------ meshes


def _root_of(mesh: Any) -> DeviceMesh:
    """The mesh that this one was sliced out of; itself, where torch does not tell."""
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
