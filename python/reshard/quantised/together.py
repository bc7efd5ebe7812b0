"""Keeps the parts of quantised weights together: names, selections and layouts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from reshard.errors import LayoutError, MismatchError
from reshard.layout.bind import bound_of
from reshard.layout.partition import Block, Partition, TensorLayout
from reshard.layout.resolve import Resolved
from reshard.quantised.kinds import KINDS
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from reshard import _core
    from reshard.layout import BoundLayout, ModelLayout
    from reshard.quantised.kinds import Follows, Quantised

_DEQUANTISE = '`dtype="bfloat16"` of a conversion, or `Checkpoint.dequantised()`, makes ordinary tensors of them'


def check_together(
    before: Mapping[str, Quantised],
    after: Callable[[], Mapping[str, Quantised]],
    old: _core.Index,
    new: _core.Index,
    keys: Collection[str],
) -> None:
    """Refuse a selection or a name map that separates parts of a quantised weight.

    Args:
        before: the quantised weights of the source.
        after: gives those among the tensors that are written.
        old: the index of the source.
        new: the index of the tensors that are written, with the same files.
        keys: the tensors that are written.

    Raises:
        MismatchError: a part is left out, changed, or no longer belongs to its weight by its name.
    """
    source = {_bytes(old, key): (one, role) for one in before.values() for role, key in one.parts.items()}
    of_file = {place: found for stored, found in source.items() for place in stored[1]}
    named: dict[tuple[str, str], str] = {}  # new name of each part, by the weight and the role
    for key in keys:
        stored = _bytes(new, key)
        found = source.get(stored)
        if found is not None:
            named[found[0].name, found[1]] = key
            continue
        touched = next((of_file[place] for place in stored[1] if place in of_file), None)
        if touched is not None:
            one, role = touched
            raise MismatchError(
                f"{show(key)} would be made of {show(one.parts[role])}, the {role} of {show(one.name)}, which is "
                f"quantised ({KINDS[one.kind].title}): it can be renamed, but not fused, split, resized or transposed",
                key=one.parts[role],
                hint=_DEQUANTISE,
            )
    of_each = [
        (one, {role: named[one.name, role] for role in one.parts if (one.name, role) in named})
        for one in before.values()
    ]
    of_each = [(one, written) for one, written in of_each if written]
    for one, written in of_each:
        _check_complete(one, written)
    if all(list(written.values()) == list(one.parts.values()) for one, written in of_each):
        return  # the names are the same
    try:
        belong = [(one.kind, dict(one.parts)) for one in after().values()]
    except MismatchError as error:
        raise MismatchError(
            f"with the new names the parts of quantised weights do not belong together: {error.message}",
            key=error.key,
            hint=f"rename all parts of a weight alike; {_DEQUANTISE}",
        ) from error
    for one, written in of_each:
        if (one.kind, written) not in belong:
            raise _apart(one, written)


def _check_complete(one: Quantised, written: Mapping[str, str]) -> None:
    left_out = next((role for role in one.parts if role not in written), None)
    if left_out is not None:
        kept = next(iter(written))
        raise MismatchError(
            f"{show(one.parts[kept])} would be written without {show(one.parts[left_out])}, the {left_out} of the same "
            f"quantised weight {show(one.name)}",
            key=one.parts[left_out],
            hint=f"select or leave out all parts of a weight; {_DEQUANTISE}",
        )
    if KINDS[one.kind].named and list(written.values()) != list(one.parts.values()):
        raise MismatchError(
            f"{show(one.name)} ({KINDS[one.kind].title}) cannot be renamed: the file describes it by its name",
            key=one.name,
            hint=_DEQUANTISE,
        )


def _apart(one: Quantised, written: Mapping[str, str]) -> MismatchError:
    role, key = next((role, key) for role, key in written.items() if key != one.parts[role])
    first = next(iter(written.values()))
    return MismatchError(
        f"{show(one.parts[role])} would be named {show(key)}, and then is no part of {show(first)}: "
        f"{show(one.name)} is quantised ({KINDS[one.kind].title}), and its parts are found by their names",
        key=one.parts[role],
        hint=f"rename all parts of a weight alike; {_DEQUANTISE}",
    )


def _bytes(index: _core.Index, key: str) -> tuple[tuple[int, ...], frozenset[tuple[int, str]], object]:
    """What a tensor consists of: its shape, and the stored arrays with their tiles."""
    stored = index.stored(key)
    return (
        index.shape(key),
        frozenset((array.file, array.name) for array in stored),
        tuple((array.file, array.name, tuple(map(tuple, map(_tile, array.tiles)))) for array in stored),
    )


def _tile(tile: _core.Tile) -> tuple[object, ...]:
    return (tuple(tile.offset), tuple(tile.shape), tile.local_offset, tuple(tile.local_strides))


def bind_together(
    layout: ModelLayout,
    shapes: Mapping[str, tuple[int, ...]],
    weights: Iterable[Quantised],
    *,
    optimizer_keys: Collection[str] = (),
) -> BoundLayout:
    """Apply a layout to tensors with quantised weights: parts are divided as their weight is.

    The rules of the layout apply to the packed tensor. Rules for the other parts have no effect.

    Args:
        layout: the layout.
        shapes: the global shape of every tensor, in order.
        weights: the quantised weights among them.
        optimizer_keys: as in `ModelLayout.bind`.

    Raises:
        LayoutError: as `ModelLayout.bind`; or a weight would be divided through values that belong together.
    """
    weights = list(weights)
    followers = {key for one in weights for key in one.parts.values() if key != one.packed}
    packed_shapes = {key: shape for key, shape in shapes.items() if key not in followers}
    try:
        bound = layout.bind(packed_shapes, optimizer_keys=optimizer_keys)
    except LayoutError as error:
        one = next((one for one in weights if one.is_whole and one.packed == error.key), None)
        if one is None:
            raise
        # The sizes of such a tensor are those of bytes in a row: advice on them would be wrong.
        raise _undivided(one, "divides it") from error
    mesh = dict(bound.mesh.axes)
    layouts = dict(bound.tensor_layouts)
    joined = {key: join.name for join in bound.joins for key in join.keys}
    made: dict[object, TensorLayout] = {}
    for one in weights:
        packed = layouts[one.packed]
        if one.packed in joined:
            raise LayoutError(
                f"{show(one.packed)} is quantised, and the layout joins it with others to {show(joined[one.packed])}",
                key=one.packed,
                hint=_DEQUANTISE,
            )
        bounds = _bounds(one, packed, mesh)
        for role, key in one.parts.items():
            if key != one.packed:
                follows = one.follows.get(role, ())
                like = (packed, shapes[key], follows)
                if like not in made:
                    made[like] = _following(packed, shapes[key], follows, bounds)
                layouts[key] = made[like]
    ordered = {key: layouts[key] for key in shapes}
    unused = [one for one in bound.unused if not one.matches(followers)]
    texts = {one.text for one in bound.unused} - {one.text for one in unused}
    warnings = [text for text in bound.warnings if text not in texts]
    return bound_of(bound.mesh, Resolved(ordered, bound.joins, warnings, unused), bound.to_mapping)


def _bounds(one: Quantised, layout: TensorLayout, mesh: Mapping[str, int]) -> dict[int, list[tuple[int, bool, int]]]:
    """By divided dim the blocks of the packed tensor: size, whether it is divided, and the size of its parts.

    Raises:
        LayoutError: a part would begin inside values that belong together.
    """
    partition = layout.partition
    divided = [dim for dim in range(len(layout.shape)) if math.prod(mesh[axis] for axis in partition.axes_of(dim)) > 1]
    if not divided and math.prod(mesh[axis] for axis in partition.flat) == 1 and not partition.is_reordered:
        return {}
    if one.is_whole or partition.is_reordered or math.prod(mesh[axis] for axis in partition.flat) > 1:
        raise _undivided(one, "reorders its dims" if partition.is_reordered else "divides it")
    return {
        dim: _bounds_of(one, layout, dim, math.prod(mesh[axis] for axis in partition.axes_of(dim))) for dim in divided
    }


def _undivided(one: Quantised, how: str) -> LayoutError:
    can = "kept whole" if one.is_whole else "divided by its dims only, in their order"
    return LayoutError(
        f"{show(one.packed)} is quantised ({KINDS[one.kind].title}), and the layout {how}: it can be {can}",
        key=one.packed,
        hint=f"keep it whole; or {_DEQUANTISE}",
    )


def _bounds_of(one: Quantised, layout: TensorLayout, dim: int, n: int) -> list[tuple[int, bool, int]]:
    partition, extent = layout.partition, layout.shape[dim]
    step = one.steps.get(dim, 1)
    blocks = partition.blocks_of(dim)
    of_dim = (
        [Block(extent)] if blocks is None else [Block(extent // blocks)] * blocks if isinstance(blocks, int) else blocks
    )
    sizes = partition.sizes_of(dim)
    found = []
    for block in of_dim:
        each = -(-block.size // n)
        found.append((block.size, block.is_cut, each))
        borders = [*sizes[:-1]] if sizes is not None else [each] if block.is_cut else []
        if block is not of_dim[-1]:
            borders.append(block.size)
        wrong = next((size for size in borders if size % step), None)
        if wrong is not None:
            raise _through(one, dim, extent, (wrong, n))
    return found


def _through(one: Quantised, dim: int, extent: int, cut: tuple[int, int]) -> LayoutError:
    (size, n), step = cut, one.steps[dim]
    near = [fit for fit in (size // step * step, -(-size // step) * step) if 0 < fit < extent]
    counts = (
        [m for m in range(1, extent // step + 1) if extent % (m * step) == 0 and m != n] if extent % step == 0 else [1]
    )
    fit = sorted(sorted(counts, key=lambda m: abs(m - n))[:2])
    return LayoutError(
        f"dim {dim} of {show(one.packed)} has {extent} elements, of which {step} at a time share a scale "
        f"({KINDS[one.kind].title}): parts of {size} elements would go through such a block",
        key=one.packed,
        hint=f"the nearest sizes that fit are {' and '.join(map(str, near)) or extent}; equal parts fit over "
        f"{' or '.join(map(str, fit))} ranks; or {_DEQUANTISE}",
    )


def _following(
    packed: TensorLayout,
    shape: tuple[int, ...],
    follows: tuple[Follows | None, ...],
    bounds: Mapping[int, list[tuple[int, bool, int]]],
) -> TensorLayout:
    """The layout of a part of a weight whose packed tensor has a layout."""
    cut: list[tuple[str, ...]] = []
    sizes: list[tuple[int, tuple[int, ...]]] = []
    blocks: list[tuple[int, tuple[Block, ...] | int]] = []
    partition = packed.partition
    for dim, of in enumerate(follows):
        if of is None or of.dim not in bounds:
            cut.append(())
            continue

        def scaled(n: int, of: Follows = of) -> int:
            return -(-n * of.own // of.packed)

        cut.append(partition.axes_of(of.dim))
        given = partition.sizes_of(of.dim)
        if given is not None:
            sizes.append((dim, tuple(map(scaled, given))))
        if partition.blocks_of(of.dim) is not None:
            blocks.append((dim, tuple(Block(scaled(size), is_cut=is_cut) for size, is_cut, _ in bounds[of.dim])))
    even = Partition(tuple(cut), partition.uneven, tuple(sizes), tuple(blocks))
    return TensorLayout(shape, even, packed.place)
