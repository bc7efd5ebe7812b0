"""The obviously-right reshard: what every rank of a layout holds, by cutting whole arrays with numpy.

It takes a layout as the plain mapping of a layout file and whole tensors, and cuts, flattens, pads and joins the
*data*: no offsets, strides or tiles are computed, so there is no geometry in here that could share a mistake with the
package. Which element lies where is found out by cutting arrays of element numbers the same way (`element_numbers`).

It knows nothing of `reshard`, does not check layouts (a layout that cannot be is undefined here), and is slow.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Shape: TypeAlias = tuple[int, ...]
Tile: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]


def local_arrays(
    mapping: Mapping[str, Any], tensors: Mapping[str, Array], rank: int, optimizer_keys: Collection[str] = ()
) -> dict[str, Array]:
    """What `rank` holds of `tensors` (the whole checkpoint, optimizer part included): `{name: array}`.

    The name is the key, or that of the join the key went into, of optimizer states `<slot>.<join>`. Arrays come in
    storage order.
    """
    at = Point(mapping["mesh"], rank_coordinates(mapping, rank))
    alone: dict[str, Array] = {}
    joined: dict[str, list[tuple[Rule, Array]]] = {}
    for key, tensor in tensors.items():
        if not holds(mapping, key, list(tensors), at, optimizer_keys):
            continue
        rule = rule_of(mapping, key, {k: t.shape for k, t in tensors.items()}, optimizer_keys)
        block = _cut_dims(tensor, rule, at)
        if rule.join is not None:
            joined.setdefault(rule.join, []).append((rule, block))
        elif rule.flat and tensor.ndim > 0:
            alone[key] = _flat_part([block], rule.flat, 1, at)
        else:
            alone[key] = block
    for name, members in joined.items():
        members.sort(key=lambda member: member[0].order)
        rule, _ = members[0]
        alone[name] = _flat_part([block for _, block in members], rule.flat, rule.align, at)
    return alone


def element_numbers(
    mapping: Mapping[str, Any], shapes: Mapping[str, Shape], rank: int, optimizer_keys: Collection[str] = ()
) -> dict[str, NDArray[np.int64]]:
    """For each local array of `rank` the number of the element at each place; 0 where zeros are padded.

    Elements are counted from 1, row-major within a tensor and on from one key to the next (see `key_of_element`).
    """
    numbers: dict[str, Array] = {}
    first = 1
    for key, shape in shapes.items():
        size = math.prod(shape)
        numbers[key] = np.arange(first, first + size, dtype=np.int64).reshape(shape)
        first += size
    return local_arrays(mapping, numbers, rank, optimizer_keys)


def key_of_element(shapes: Mapping[str, Shape], number: int) -> tuple[str, tuple[int, ...]]:
    """The key and the index in its tensor of an element number above 0."""
    first = 1
    for key, shape in shapes.items():
        size = math.prod(shape)
        if number < first + size:
            return key, tuple(int(i) for i in np.unravel_index(number - first, shape))
        first += size
    raise AssertionError(number)


def assemble(
    mapping: Mapping[str, Any],
    locals_by_rank: Mapping[int, Mapping[str, Array]],
    tensors: Mapping[str, tuple[Shape, np.dtype[Any]]],
    optimizer_keys: Collection[str] = (),
) -> dict[str, Array]:
    """The whole tensors from the local arrays of all ranks: the inverse of `local_arrays`.

    `tensors` is `{key: (shape, dtype)}`. Every element must be held by some rank.
    """
    shapes = {key: shape for key, (shape, _) in tensors.items()}
    whole = {key: np.zeros(shape, dtype) for key, (shape, dtype) in tensors.items()}
    found = {key: np.zeros(shape, bool) for key, shape in shapes.items()}
    for rank, arrays in locals_by_rank.items():
        for name, numbers in element_numbers(mapping, shapes, rank, optimizer_keys).items():
            assert arrays[name].shape == numbers.shape
            first = 1
            for key in shapes:
                here = (first <= numbers) & (numbers < first + whole[key].size)
                if here.any():
                    whole[key].reshape(-1)[numbers[here] - first] = arrays[name][here]
                    found[key].reshape(-1)[numbers[here] - first] = True
                first += whole[key].size
    assert all(f.all() for f in found.values())
    return whole


def element_tiles(
    mapping: Mapping[str, Any],
    shapes: Mapping[str, Shape],
    rank: int,
    optimizer_keys: Collection[str] = (),
    *,
    runs: bool,
) -> dict[str, list[tuple[str, Shape, list[Tile]]]]:
    """What `rank` holds of each key as explicit tiles: `{key: [(local name, local shape, tiles)]}`.

    A tile is one element, or, with `runs`, as many elements as follow each other both in the local array and in one
    row of the tensor. Elements are safe among other ranks' (two are equal or apart); runs of two ranks may overlap.
    """
    out: dict[str, list[tuple[str, Shape, list[Tile]]]] = {}
    for name, numbers in element_numbers(mapping, shapes, rank, optimizer_keys).items():
        tiles: dict[str, list[Tile]] = {}
        previous = None
        for place, number in enumerate(numbers.reshape(-1).tolist()):
            if number == 0:
                previous = None
                continue
            key, index = key_of_element(shapes, number)
            follows = previous is not None and previous[0] == key and number == previous[1] + 1
            if runs and follows and index and index[-1] > 0:
                offset, shape, local_offset, strides = tiles[key].pop()
                tiles[key].append((offset, (*shape[:-1], shape[-1] + 1), local_offset, strides))
            else:
                tiles.setdefault(key, []).append((index, (1,) * len(index), place, (1,) * len(index)))
            previous = (key, number)
        for key, of_key in tiles.items():
            out.setdefault(key, []).append((name, tuple(numbers.shape), of_key))
    return out


def mesh_ranks(mapping: Mapping[str, Any]) -> list[int]:
    """The global rank at each mesh point, first axis slowest."""
    n = math.prod(mapping["mesh"].values())
    ranks = mapping.get("ranks")
    return list(range(n)) if ranks is None else list(ranks)


def rank_coordinates(mapping: Mapping[str, Any], rank: int) -> dict[str, int]:
    """The coordinate of a global rank on every axis: where it stands in the array of all ranks."""
    mesh = mapping["mesh"]
    points = np.array(mesh_ranks(mapping)).reshape(tuple(mesh.values()))
    (where,) = np.argwhere(points == rank)
    return {axis: int(c) for axis, c in zip(mesh, where, strict=True)}


@dataclass(frozen=True)
class Point:
    """Where a rank stands: the sizes of the mesh's axes, and its coordinate on each."""

    mesh: Mapping[str, int]
    coordinates: Mapping[str, int]


# -- rules --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """What is done to one tensor: its rule's fields, in one spelling each."""

    cut: tuple[tuple[str, ...], ...] = ()
    ceil: bool = False
    sizes: Mapping[int, Sequence[int]] | None = None
    blocks: Mapping[int, Sequence[tuple[int, bool]]] | None = None
    flat: tuple[str, ...] = ()
    join: str | None = None
    align: int = 1
    order: Any = ()
    stored: tuple[int, ...] | None = None


def rule_of(
    mapping: Mapping[str, Any], key: str, shapes: Mapping[str, Shape], optimizer_keys: Collection[str] = ()
) -> Rule:
    """The rule of one key. State of the optimizer follows its parameter, if it has one and its shape."""
    parameter = parameter_of(key, shapes, optimizer_keys)
    if parameter is None:
        return _own_rule(mapping, key)
    if shapes[key] != shapes[parameter]:
        return Rule()
    rule = _own_rule(mapping, parameter)
    optimizer = mapping.get("optimizer") or {}
    cut = [*rule.cut] + [()] * (len(shapes[key]) - len(rule.cut))
    for dim, axes in (optimizer.get("add") or {}).items():
        if dim < len(shapes[key]) and _divides(shapes[key][dim], dim, (*cut[dim], *axes), rule, mapping["mesh"]):
            assert dim not in (rule.sizes or {})
            assert not rule.flat
            cut[dim] = (*cut[dim], *axes)
    flat = rule.flat
    if optimizer.get("flat"):
        assert not flat
        flat = tuple(optimizer["flat"])
    # The states of one slot are joined by themselves.
    join = None if rule.join is None else key.removesuffix(parameter) + rule.join
    return replace(rule, cut=tuple(cut), flat=flat, join=join)


def _own_rule(mapping: Mapping[str, Any], key: str) -> Rule:
    """The first rule that matches."""
    for raw in mapping["rules"]:
        patterns = _list(raw["match"])
        entry = next((i for i, pattern in enumerate(patterns) if captures(pattern, key) is not None), None)
        if entry is None:
            continue
        flat, join, align = raw.get("flat") or (), None, 1
        if isinstance(flat, Mapping):
            flat, join, align = flat["axes"], flat.get("join"), flat.get("align", 1)
        blocks = raw.get("blocks") or {}
        return Rule(
            cut=tuple(tuple(_list(axes)) for axes in raw.get("cut") or ()),
            ceil=raw.get("uneven", "refuse") == "ceil",
            sizes=raw.get("sizes"),
            blocks={
                dim: [(b, True) if isinstance(b, int) else (b["size"], False) for b in bs] for dim, bs in blocks.items()
            },
            flat=tuple(flat),
            join=join,
            align=align,
            order=(entry, natural(key)),
            stored=None if raw.get("stored") is None else tuple(raw["stored"]),
        )
    raise AssertionError(f"no rule for {key}")


def parameter_of(key: str, shapes: Collection[str], optimizer_keys: Collection[str]) -> str | None:
    """The model key that a tensor of the optimizer part follows: `<slot>.P`, the longest P that fits."""
    if key not in optimizer_keys:
        return None
    fitting = [p for p in shapes if p not in optimizer_keys and key.endswith("." + p)]
    return max(fitting, key=len, default=None)


def _divides(extent: int, dim: int, axes: Sequence[str], rule: Rule, mesh: Mapping[str, int]) -> bool:
    """Whether a dim, or each of its blocks that are cut, divides by the axes; torch's chunks always do."""
    blocks = (rule.blocks or {}).get(dim, [(extent, True)])
    return rule.ceil or all(size % n_parts(axes, mesh) == 0 for size, is_cut in blocks if is_cut)


def natural(key: str) -> list[str | int]:
    """A sort key in which digit runs count as numbers."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split("([0-9]+)", key))]


def captures(pattern: str, key: str) -> int | str | None:
    """What `{i}` stands for if the pattern matches the whole key; "" if it has no `{i}`; None if it does not match."""
    if pattern.startswith("re:"):
        return "" if re.fullmatch(pattern.removeprefix("re:"), key) else None
    match = _glob(pattern).fullmatch(key)
    if match is None:
        return None
    return int(match[1]) if match.groups() else ""


@cache
def _glob(pattern: str) -> re.Pattern[str]:
    parts = {"*": ".*", "?": ".", "{i}": "([0-9]+)"}
    regex = "".join(parts.get(part, re.escape(part)) for part in re.split(r"(\*|\?|\{i\})", pattern))
    return re.compile(regex, re.DOTALL)


def _list(value: object) -> list[Any]:
    """None, one thing or a list of things as a list."""
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)  # type: ignore[call-overload]


# -- place --------------------------------------------------------------------------------------------------------


def holds(
    mapping: Mapping[str, Any], key: str, keys: Sequence[str], at: Point, optimizer_keys: Collection[str] = ()
) -> bool:
    """Whether a rank at this point holds a key at all: every entry of `place` that matches must allow it."""
    key = parameter_of(key, keys, optimizer_keys) or key
    for entry in mapping.get("place") or ():
        index = _capture_of_any(entry["match"], key)
        if index is None:
            continue
        axes = _list(entry["axis"])
        parts = n_parts(axes, mapping["mesh"])
        if index == "":
            wanted = range(parts)[entry["at"]]
        else:
            found = [_capture_of_any(entry["match"], other) for other in keys]
            n = max(i for i in found if isinstance(i, int)) + 1
            # The coordinate of every index, written out, and then looked up.
            if "to" in entry:
                owners = list(entry["to"])
            elif "sizes" in entry:
                owners = [part for part, size in enumerate(entry["sizes"]) for _ in range(size)]
            else:
                owners = [part for part in range(parts) for _ in range(n // parts)]
            assert len(owners) == n
            wanted = owners[int(index)]
        if folded(axes, at) != wanted:
            return False
    return True


def _capture_of_any(patterns: object, key: str) -> int | str | None:
    return next((c for c in (captures(pattern, key) for pattern in _list(patterns)) if c is not None), None)


def n_parts(axes: Sequence[str], mesh: Mapping[str, int]) -> int:
    """How many parts several axes make together."""
    return math.prod(mesh[axis] for axis in axes)


def folded(axes: Sequence[str], at: Point) -> int:
    """Several coordinates as one, first = outermost: where the point stands in the list of all combinations."""
    points = np.arange(n_parts(axes, at.mesh)).reshape([at.mesh[axis] for axis in axes])
    return int(points[tuple(at.coordinates[axis] for axis in axes)])


# -- cutting ------------------------------------------------------------------------------------------------------


def _cut_dims(tensor: Array, rule: Rule, at: Point) -> Array:
    """The block of a rank: every dim cut, then put in storage order."""
    if tensor.ndim == 0:
        return tensor.copy()
    for dim, axes in enumerate(rule.cut):
        if rule.sizes and dim in rule.sizes and axes:
            parts = _split(tensor, rule.sizes[dim], dim)
            tensor = parts[folded(axes, at)]
        elif rule.blocks and dim in rule.blocks:
            blocks = _split(tensor, [size for size, _ in rule.blocks[dim]], dim)
            own = [
                _cut(block, dim, axes, at, ceil=rule.ceil) if is_cut else block
                for block, (_, is_cut) in zip(blocks, rule.blocks[dim], strict=True)
            ]
            tensor = np.concatenate(own, axis=dim)
        else:
            tensor = _cut(tensor, dim, axes, at, ceil=rule.ceil)
    if rule.stored is not None:
        tensor = np.transpose(tensor, rule.stored)
    return np.array(tensor, order="C")


def _cut(array: Array, dim: int, axes: Sequence[str], at: Point, *, ceil: bool) -> Array:
    """One part of one dim, axis after axis, first = outermost."""
    for axis in axes:
        parts = chunks(array, at.mesh[axis], dim) if ceil else np.split(array, at.mesh[axis], axis=dim)
        array = parts[at.coordinates[axis]]
    return array


def chunks(array: Array, n: int, dim: int) -> list[Array]:
    """torch.chunk, with empty chunks for the parts that it leaves out: each but the last few has ceil(extent / n)."""
    size = -(-array.shape[dim] // n)
    parts = []
    for _ in range(n):
        size = min(size, array.shape[dim])
        part, array = np.split(array, [size], axis=dim)
        parts.append(part)
    return parts


def _split(array: Array, sizes: Sequence[int], dim: int) -> list[Array]:
    """Parts of given sizes that make up the whole dim."""
    assert sum(sizes) == array.shape[dim]
    return np.split(array, np.cumsum(sizes)[:-1], axis=dim)


def _flat_part(blocks: Sequence[Array], axes: Sequence[str], align: int, at: Point) -> Array:
    """One part of blocks laid end to end: each start at a multiple of `align`, the end at one of parts x `align`."""
    whole = np.zeros(0, blocks[0].dtype)
    assert all(block.dtype == whole.dtype for block in blocks)
    for block in blocks:
        whole = np.concatenate([_padded(whole, align), block.reshape(-1)])
    whole = _padded(whole, align * n_parts(axes, at.mesh))
    for axis in axes:
        whole = np.split(whole, at.mesh[axis])[at.coordinates[axis]]
    return whole


def _padded(array: Array, multiple: int) -> Array:
    """A 1-D array with zero bytes appended up to a multiple."""
    return np.concatenate([array, np.zeros(-len(array) % multiple, array.dtype)])
