"""Hypothesis strategies: small random checkpoints, and random layouts that are valid for them.

Layouts are made so that they are right from the start (an even cut is only drawn where the dim divides), since
drawing and rejecting would leave few examples. They are plain layout-file mappings; nothing of `reshard` is used.
"""

import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.helpers.oracle import captures, mesh_ranks, n_parts, parameter_of

Array: TypeAlias = NDArray[Any]
Shape: TypeAlias = tuple[int, ...]
Draw: TypeAlias = Callable[[st.SearchStrategy[Any]], Any]
Mapping: TypeAlias = dict[str, Any]

DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "I16": np.dtype(np.int16),
    "U16": np.dtype(np.uint16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "F32": np.dtype(np.float32),
    "C64": np.dtype(np.complex64),
    "F64": np.dtype(np.float64),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
}
"""The dtypes of whole bytes, by their names in a safetensors header."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

MAX_ELEMENTS = 384
EXTENTS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 16, 24, 36)
AXIS_NAMES = ("pp", "dp", "cp", "tp")
KEYS = (
    "embed.w",
    "head.w",
    "norm.b",
    "scale",
    "w",
    *(f"layers.{i}.{name}" for i in (0, 1, 2, 3, 10, 11) for name in ("w", "b")),
    *(f"layers.{i}.experts.{j}.w" for i in (0, 1) for j in (0, 1, 2, 3)),
)
SLOTS = ("exp_avg", "adam.v")


def cases(n: int) -> settings:
    """Settings of a property: the same `n` cases on every run, or other ones, `RESHARD_CASES_FACTOR` times as many.

    The factor may be a fraction.
    """
    factor = os.environ.get("RESHARD_CASES_FACTOR")
    return settings(
        max_examples=max(1, int(n * float(factor or 1))),
        print_blob=False,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )


@dataclass(frozen=True, repr=False)
class Checkpoint:
    """The whole tensors of a checkpoint, and which of them are of the optimizer part."""

    tensors: dict[str, Array]
    optimizer_keys: tuple[str, ...] = ()

    def __repr__(self) -> str:
        shown = {key: f"{self.dtypes[key]} {tensor.shape}" for key, tensor in self.tensors.items()}
        return f"Checkpoint({shown}, optimizer_keys={self.optimizer_keys})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: FBT001  (hypothesis reports by it)
        printer.text(repr(self))

    @property
    def shapes(self) -> dict[str, Shape]:
        return {key: tensor.shape for key, tensor in self.tensors.items()}

    @property
    def dtypes(self) -> dict[str, str]:
        return {key: DTYPE_NAMES[tensor.dtype] for key, tensor in self.tensors.items()}


# -- tensors ------------------------------------------------------------------------------------------------------


@st.composite
def small_shapes(draw: Draw, max_elements: int = MAX_ELEMENTS) -> Shape:
    """0-d to 5-d, extents 0, 1, primes and numbers of many divisors."""
    shape: list[int] = []
    n_elements = 1
    for _ in range(draw(st.sampled_from((2, 1, 3, 2, 4, 1, 2, 3, 5, 0)))):
        shape.append(draw(st.sampled_from([e for e in EXTENTS if n_elements * e <= max_elements])))
        n_elements *= shape[-1]
    if shape and _one_in(draw, 16):
        shape[draw(st.integers(0, len(shape) - 1))] = 0
    return tuple(shape)


@st.composite
def large_shapes(draw: Draw) -> Shape:
    """Up to some million elements, so that tensors and their runs are longer than any unit of work."""
    shape = list(draw(small_shapes()))
    if shape:
        shape[draw(st.integers(0, len(shape) - 1))] *= draw(st.sampled_from((4096, 1024, 4099, 600)))
    return tuple(shape)


def content(dtype: np.dtype[Any], shape: Shape, seed: int) -> Array:
    """Random bytes with negative zeros and quiet and signalling NaNs of various payloads strewn in."""
    rng = np.random.default_rng(seed)
    n_elements = int(np.prod(shape, dtype=np.int64))
    if dtype == np.bool_:
        return rng.integers(0, 2, n_elements).astype(np.bool_).reshape(shape)
    data = rng.integers(0, 256, (n_elements, dtype.itemsize), dtype=np.uint8)
    # Little-endian, the sign and the exponent last: -0.0, all ones (NaN), and NaNs with other payloads.
    for first, last in ((0x00, 0x80), (0xFF, 0xFF), (0x01, 0x7F), (0xA5, 0xFF)):
        chosen = rng.random(n_elements) < 0.05
        data[chosen] = first
        data[chosen, -1:] = last
        if last != 0x80:
            data[chosen, -2:-1] |= 0x80
    return data.reshape(-1).view(dtype).reshape(shape)


@st.composite
def checkpoints(
    draw: Draw,
    *,
    dtypes: Sequence[str] = tuple(DTYPES),
    shapes: st.SearchStrategy[Shape] | None = None,
    slots: Sequence[str] = SLOTS,
) -> Checkpoint:
    """1 to 6 keys of a model; sometimes states of an optimizer besides."""
    shapes = small_shapes() if shapes is None else shapes
    keys = draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=6, unique=True))
    common_shape, common_dtype = draw(shapes), draw(st.sampled_from(dtypes))
    seed = draw(st.integers(100, 2**32 - 1))
    tensors: dict[str, Array] = {}
    for i, key in enumerate(keys):
        shape = draw(shapes) if _one_in(draw, 3) else common_shape
        dtype = common_dtype if not _one_in(draw, 4) else draw(st.sampled_from(dtypes))
        tensors[key] = content(DTYPES[dtype], shape, seed + i)
    states: dict[str, Array] = {}
    if draw(st.booleans()):
        for i, key in enumerate(keys):
            if draw(st.booleans()):
                shape = tensors[key].shape if not _one_in(draw, 5) else draw(shapes)
                states[f"{draw(st.sampled_from(slots))}.{key}"] = content(DTYPES[common_dtype], shape, seed - i - 1)
        if _one_in(draw, 4):
            states["count"] = content(np.dtype(np.int64), () if draw(st.booleans()) else draw(shapes), seed - 9)
    return Checkpoint(tensors | states, tuple(states))


# -- layouts ------------------------------------------------------------------------------------------------------


@st.composite
def meshes(draw: Draw, max_ranks: int = 64) -> tuple[dict[str, int], list[int] | None]:
    """1 to 4 axes; sometimes ranks in an order of their own, with gaps."""
    mesh: dict[str, int] = {}
    n_ranks = 1
    for name in draw(st.permutations(AXIS_NAMES))[: draw(st.sampled_from((1, 1, 2, 2, 2, 3, 3, 4)))]:
        fitting = [s for s in (2, 2, 2, 2, 2, 1, 3, 3, 4, 4, 6, 8, 16, 5, 7) if n_ranks * s <= max_ranks]
        mesh[name] = draw(st.sampled_from(fitting))
        n_ranks *= mesh[name]
    if not _one_in(draw, 3):
        return mesh, None
    return mesh, Random(draw(st.integers(0, 2**16))).sample(range(3 * n_ranks), n_ranks)


@st.composite
def layouts(draw: Draw, checkpoint: Checkpoint, max_ranks: int = 64) -> Mapping:
    """A layout-file mapping that is valid for the checkpoint."""
    mesh, ranks = draw(meshes(max_ranks))
    mapping: Mapping = {"mesh": mesh} if ranks is None else {"mesh": mesh, "ranks": ranks}
    place, placed_on = _place(draw, mesh, list(checkpoint.tensors))
    followed = {
        parameter: state
        for state in checkpoint.optimizer_keys
        if (parameter := parameter_of(state, checkpoint.shapes, checkpoint.optimizer_keys)) is not None
        and checkpoint.shapes[parameter] == checkpoint.shapes[state]
    }
    optimizer, reserved = _optimizer(draw, mesh, checkpoint, list(followed), placed_on)

    keys = [
        key
        for key in draw(st.permutations(list(checkpoint.tensors)))
        if parameter_of(key, checkpoint.shapes, checkpoint.optimizer_keys) is None
    ]
    groups: list[list[str]] = []
    for key in keys:
        if groups and draw(st.booleans()):
            groups[draw(st.integers(0, len(groups) - 1))].append(key)
        else:
            groups.append([key])
    mapping["rules"] = []
    for i, group in enumerate(groups):
        rule: Mapping = {"match": _match(draw, group, [key for other in groups[i + 1 :] for key in other])}
        barred = {*reserved, *(axis for key in group for axis in placed_on[key])}
        states_cut = bool(optimizer) and any(key in followed for key in group)
        rule |= _rule(
            draw,
            mesh,
            [axis for axis in draw(st.permutations(list(mesh))) if axis not in barred],
            [checkpoint.shapes[key] for key in group],
            may_flatten=not states_cut,
            may_join=len({checkpoint.dtypes[key] for key in group}) == 1,
            no_sizes=set(optimizer.get("add", ())) if states_cut else set(),
            join=f"joined.{i}",
        )
        mapping["rules"].append(rule)
    if optimizer:
        mapping["optimizer"] = optimizer
    if place:
        mapping["place"] = place
    return mapping


def some_ranks(mapping: Mapping, n: int) -> st.SearchStrategy[list[int]]:
    """All ranks of a layout, or `n` of them if there are more."""
    ranks = mesh_ranks(mapping)
    if len(ranks) <= n:
        return st.just(ranks)
    return st.integers(0, 2**16).map(lambda seed: Random(seed).sample(ranks, n))


def kinds(mapping: Mapping) -> set[str]:
    """Which kinds of rules a layout has: to see that none is forgotten."""
    found = {"ranks"} if "ranks" in mapping else set()
    for rule in mapping["rules"]:
        found |= {name for name in ("blocks", "sizes", "stored") if name in rule}
        found |= {"ceil"} if rule.get("uneven") == "ceil" else set()
        found |= {"cut"} if any(rule.get("cut", ())) else {"whole"}
        found |= {"two axes on a dim" for axes in rule.get("cut", ()) if isinstance(axes, list) and len(axes) > 1}
        found |= {"join" if "join" in rule["flat"] else "flat"} if "flat" in rule else set()
        found |= {"flat after cut"} if "flat" in rule and "cut" in rule else set()
        found |= {"flat of blocks"} if "flat" in rule and "blocks" in rule else set()
        found |= {"flat of stored"} if "flat" in rule and "stored" in rule else set()
        found |= {"block not cut" for bs in rule.get("blocks", {}).values() for b in bs if isinstance(b, dict)}
    for entry in mapping.get("place", ()):
        found.add("place " + next((how for how in ("at", "to", "sizes") if how in entry), "evenly"))
        found |= {"place folded"} if isinstance(entry["axis"], list) and len(entry["axis"]) > 1 else set()
    return found | {f"optimizer {kind}" for kind in mapping.get("optimizer", ())}


KINDS = frozenset(
    {
        "ranks",
        "blocks",
        "sizes",
        "stored",
        "ceil",
        "cut",
        "whole",
        "two axes on a dim",
        "join",
        "flat",
        "flat after cut",
        "flat of blocks",
        "flat of stored",
        "block not cut",
        "place at",
        "place to",
        "place sizes",
        "place evenly",
        "place folded",
        "optimizer add",
        "optimizer flat",
    }
)
"""Everything that `kinds` can find."""


def _place(draw: Draw, mesh: dict[str, int], keys: Sequence[str]) -> tuple[list[Mapping], dict[str, set[str]]]:
    """Entries of `place`, and the axes on which each key is placed by them."""
    entries: list[Mapping] = []
    free = list(draw(st.permutations(list(mesh))))
    if draw(st.booleans()):
        for pattern in ("layers.{i}.*", "*.experts.{i}.*"):
            found = [i for key in keys if isinstance(i := captures(pattern, key), int)]
            if not (found and free and draw(st.booleans())):
                continue
            axes = [free.pop() for _ in range(min(len(free), draw(st.sampled_from((1, 1, 2)))))]
            n, parts = max(found) + 1, n_parts(axes, mesh)
            how = draw(st.sampled_from(("sizes", "to", "evenly", "evenly")))
            entry: Mapping = {"match": pattern, "axis": _one_or_list(draw, axes)}
            if how == "to":
                entry["to"] = [draw(st.integers(0, parts - 1)) for _ in range(n)]
            elif how == "sizes" or n % parts:
                entry["sizes"] = _composition(draw, n, parts)
            entries.append(entry)
        # Names that no pattern with an index takes, each on an axis of its own.
        for key in keys:
            if key in ("embed.w", "head.w", "norm.b", "scale") and draw(st.booleans()):
                axes = list(draw(st.permutations(list(mesh))))[: draw(st.sampled_from((1, 1, 2)))]
                parts = n_parts(axes, mesh)
                match = draw(st.sampled_from((key, [key], f"re:{re.escape(key)}", [key, "nothing.of.this.name"])))
                at = draw(st.integers(-parts, parts - 1))
                entries.append({"match": match, "axis": _one_or_list(draw, axes), "at": at})
    placed_on: dict[str, set[str]] = {key: set() for key in keys}
    for entry in entries:
        patterns = [entry["match"]] if isinstance(entry["match"], str) else entry["match"]
        for key in keys:
            if any(captures(pattern, key) is not None for pattern in patterns):
                placed_on[key] |= {entry["axis"]} if isinstance(entry["axis"], str) else set(entry["axis"])
    return entries, placed_on


def _optimizer(
    draw: Draw, mesh: dict[str, int], checkpoint: Checkpoint, followed: list[str], placed_on: dict[str, set[str]]
) -> tuple[Mapping, set[str]]:
    """The section `optimizer`, and the axes that rules must leave to it."""
    free = [axis for axis in draw(st.permutations(list(mesh))) if all(axis not in placed_on[key] for key in followed)]
    if not followed or not free or _one_in(draw, 4):
        return {}, set()
    axes = free[: draw(st.integers(1, 2))]
    n_dims = max(len(checkpoint.shapes[key]) for key in followed)
    if n_dims == 0 or _one_in(draw, 4):
        return {"flat": axes}, set(axes)
    dims = list(draw(st.permutations(range(n_dims))))
    if draw(st.booleans()):
        # A dim that divides for most.
        of_states = [checkpoint.shapes[key] for key in followed]
        dims.sort(key=lambda dim: sum(len(s) <= dim or s[dim] % mesh[axes[0]] != 0 for s in of_states))
    if len(axes) == 2 and n_dims > 1 and draw(st.booleans()):
        return {"add": {dims[0]: axes[:1], dims[1]: axes[1:]}}, set(axes)
    return {"add": {dims[0]: axes}}, set(axes)


def _match(draw: Draw, group: Sequence[str], later: Collection[str]) -> str | list[str]:
    """Patterns that match the keys of a group and none of the keys that later rules decide."""
    wide = [
        pattern
        for pattern in ("*", "re:.+", "layers.*", "*.w", "*.b")
        if all(captures(pattern, key) is not None for key in group)
        and all(captures(pattern, key) is None for key in later)
    ]
    if wide and draw(st.booleans()):
        wide = [draw(st.sampled_from(wide))]
        return wide[0] if draw(st.booleans()) else wide
    patterns: list[str] = []
    for key in group:
        words = key.split(".")
        word = draw(st.integers(0, len(words) - 1))
        char = draw(st.integers(0, len(key) - 1))
        pattern = draw(
            st.sampled_from(
                (
                    key,
                    ".".join([*words[:word], "*", *words[word + 1 :]]),
                    ".".join([*words[:word], "*"]),
                    ".".join(["*", *words[word:]]) if word else "*" + key,
                    key[:char] + "?" + key[char + 1 :],
                    "re:" + re.escape(key),
                )
            )
        )
        if any(captures(pattern, other) is not None for other in later):
            pattern = key
        if pattern not in patterns:
            patterns.append(pattern)
    return patterns[0] if len(patterns) == 1 and draw(st.booleans()) else patterns


def _rule(
    draw: Draw,
    mesh: dict[str, int],
    free: list[str],
    shapes: Sequence[Shape],
    *,
    may_flatten: bool,
    may_join: bool,
    no_sizes: Collection[int],
    join: str,
) -> Mapping:
    """What a rule does to tensors of these shapes with these axes."""
    rule: Mapping = {}
    alike = len(set(shapes)) == 1
    n_dims = min((len(shape) for shape in shapes if shape), default=0)
    ceil = _one_in(draw, 4)
    special = draw(st.sampled_from(("blocks", "sizes")))
    free = list(free)
    flat = [free.pop() for _ in range(min(len(free), draw(st.sampled_from((0, 0, 1, 1, 2)))))] if may_flatten else []
    cut: list[list[str]] = [[] for _ in range(n_dims)]
    if not _one_in(draw, 8):
        for dim in draw(st.permutations(range(n_dims))):
            extents = {shape[dim] for shape in shapes if shape}
            how = "plain"
            if alike and not (special == "sizes" and dim in no_sizes):
                how = draw(st.sampled_from(("plain", special)))
            for axis in list(free):
                even = all(extent % (n_parts(cut[dim], mesh) * mesh[axis]) == 0 for extent in extents)
                if (ceil or even or how != "plain") and not _one_in(draw, 4):
                    cut[dim].append(axis)
                    free.remove(axis)
            if not cut[dim]:
                continue
            (extent, *_) = extents
            parts = n_parts(cut[dim], mesh)
            if how == "sizes":
                rule.setdefault("sizes", {})[dim] = _composition(draw, extent, parts)
            elif how == "blocks":
                blocks = _blocks(draw, extent, 1 if ceil else parts)
                if blocks:
                    rule.setdefault("blocks", {})[dim] = blocks
                elif extent % parts and not ceil:
                    free += cut[dim]
                    cut[dim] = []
    if any(cut) or _one_in(draw, 8):
        last = max((dim + 1 for dim, axes in enumerate(cut) if axes), default=0)
        shown = cut[: draw(st.integers(last, n_dims))]
        rule["cut"] = [_one_or_list(draw, axes) if axes else None for axes in shown]
    if ceil:
        rule["uneven"] = "ceil"
    elif _one_in(draw, 8):
        rule["uneven"] = "refuse"
    if alike and n_dims > 1 and _one_in(draw, 3):
        rule["stored"] = list(draw(st.permutations(range(n_dims))))
    if flat:
        if may_join and not _one_in(draw, 3):
            rule["flat"] = {"axes": flat, "join": join}
            if draw(st.booleans()):
                rule["flat"]["align"] = draw(st.sampled_from((1, 2, 3, 8)))
        else:
            rule["flat"] = flat
    return rule


def _blocks(draw: Draw, extent: int, unit: int) -> list[Any]:
    """Blocks that make up a dim, those that are cut a multiple of `unit`; [] if none can be cut."""
    blocks: list[Any] = []
    left = extent
    while left >= unit and len(blocks) < 3:
        size = unit * draw(st.integers(1, left // unit))
        blocks.append(size)
        left -= size
    if blocks and left:
        blocks.insert(draw(st.integers(0, len(blocks))), {"size": left, "cut": None})
    if len(blocks) > 1 and isinstance(blocks[-1], int) and draw(st.booleans()):
        blocks[-1] = {"size": blocks[-1], "cut": None}
    return blocks if any(isinstance(block, int) for block in blocks) else []


def _composition(draw: Draw, total: int, parts: int) -> list[int]:
    """Parts of any size, 0 included, that sum to the total."""
    ends = sorted(Random(draw(st.integers(0, 2**16))).choices(range(total + 1), k=parts - 1))
    return [end - start for start, end in zip([0, *ends], [*ends, total], strict=True)]


def _one_in(draw: Draw, n: int) -> bool:
    """True in one of `n` cases. (Drawn integers prefer the ends of their range.)"""
    return bool(draw(st.sampled_from((False,) * (n - 1) + (True,))))


def _one_or_list(draw: Draw, axes: list[str]) -> str | list[str]:
    return axes[0] if len(axes) == 1 and draw(st.booleans()) else axes
