"""Any name map over any stored layout gives what numpy gives, there and back again."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tests.helpers.names_oracle import whole_of
from tests.helpers.oracle import local_arrays
from tests.helpers.strategies import Array, Checkpoint, cases, layouts, some_ranks

import reshard
from reshard._core import Tile
from reshard.names.part_map import DimMap, PartMap, SwappedDim

if TYPE_CHECKING:
    from tests.helpers.strategies import Draw

KINDS = {"rename", "transpose", "join", "turns", "lay", "stack", "tied", "state", "to", "kept"}


@dataclass
class Case:
    """A name map, and the same tensors under both of its namings."""

    mapping: dict[str, Any]
    sides: dict[str, dict[str, Array]] = field(default_factory=lambda: {"from": {}, "to": {}})
    kinds: set[str] = field(default_factory=set)

    def state_keys(self, side: str) -> tuple[str, ...]:
        return tuple(key for key in self.sides[side] if key.startswith("adam."))

    def checkpoint(self, side: str) -> Checkpoint:
        return Checkpoint(self.sides[side], self.state_keys(side))


@dataclass
class Drawn:
    """A rule, and what the file does not say: rounds stand in `shape` in the place of what the turns multiply.

    Attributes:
        number: of the rule; indices and sizes end in it.
        shape: of a part as it lies in the whole.
        layers: how often the rule is applied.
    """

    number: int
    rule: dict[str, Any]
    sizes: dict[str, int]
    turns: list[int] | None
    shape: tuple[int, ...]
    layers: int

    @property
    def parts_side(self) -> str:
        to = self.rule["to"]
        return "to" if isinstance(to, list) or "{e" in to or "{f" in to else "from"


@st.composite
def rules(draw: Draw, n: int) -> Drawn:
    shape = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(1, 3)))]
    indices = draw(st.sampled_from(((), (), ("e",), ("e", "f"))))
    stack = [index for index in indices if draw(st.booleans())]
    lay = [index for index in indices if index not in stack]
    n_dims = len(shape) + len(stack)
    new = draw(st.permutations(range(n_dims)))[: len(stack)]
    old = [dim for dim in range(n_dims) if dim not in new]
    sizes = {index: draw(st.integers(1, 3)) for index in indices}
    if len(lay) > len(old):
        lay, sizes = lay[:1], {k: v for k, v in sizes.items() if k in (*lay[:1], *stack)}
    n_parts = draw(st.sampled_from((1, 2, 3)))
    rule: dict[str, Any] = {}
    turns: list[int] | None = None
    if n_parts > 1:
        rule["join"] = draw(st.sampled_from(old))
        if draw(st.booleans()):
            turns = [draw(st.integers(1, 3)) for _ in range(n_parts)]
            shape[old.index(rule["join"])] = draw(st.integers(1, 3))
            rule["turns"] = [f"{turn} * two / 2" if draw(st.booleans()) else turn for turn in turns]
            sizes["two"] = 2
    if draw(st.booleans()) or (n_parts == 1 and not indices and draw(st.booleans())):
        rule["transpose"] = draw(st.permutations(range(len(shape))))
    if lay:
        rule["lay"] = dict(zip(lay, draw(st.permutations(old)), strict=False))
    if stack:
        rule["stack"] = dict(zip(stack, new, strict=True))
    own = "".join(f".{{{index}}}" for index in (*rule.get("lay", {}), *rule.get("stack", {})))
    n_layers = draw(st.sampled_from((0, 1, 2)))
    layer = "layers.{i}." if n_layers else ""
    parts = [f"{layer}r{n}.p{k}{own}" for k in range(n_parts)]
    sides = ("to", "from") if draw(st.booleans()) and (n_parts > 1 or own) else ("from", "to")
    as_list = n_parts > 1 or (bool(own) and draw(st.booleans()))
    rule = {sides[0]: parts if as_list else parts[0], sides[1]: f"{layer}r{n}.whole", **rule}
    # Indices and names of sizes are told apart, each rule has its own.
    for word in sizes:
        rule = _replaced(rule, word, f"{word}{n}")
    return Drawn(n, rule, {f"{word}{n}": size for word, size in sizes.items()}, turns, tuple(shape), n_layers)


@st.composite
def name_maps(draw: Draw) -> Case:
    case = Case({"rules": []})
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    for n in range(draw(st.integers(1, 3))):
        drawn = draw(rules(n))
        if drawn.sizes:
            case.mapping.setdefault("sizes", {}).update(drawn.sizes)
        case.mapping["rules"].append(drawn.rule)
        words = {word for word in ("transpose", "join", "turns", "lay", "stack") if word in drawn.rule}
        case.kinds |= words or {"rename"}
        slots = ["", "adam."] if draw(st.booleans()) else [""]
        case.kinds |= ({"to"} if drawn.parts_side == "to" else set()) | ({"state"} if len(slots) > 1 else set())
        for i, slot in itertools.product(range(max(drawn.layers, 1)), slots):
            _add(case, drawn, i, slot, rng)
    if draw(st.booleans()):
        kept = rng.integers(0, 99, (2, 3))
        for side in case.sides.values():
            side["kept.w"] = kept
        case.kinds.add("kept")
    if draw(st.booleans()):
        side = draw(st.sampled_from(("from", "to")))
        key = draw(st.sampled_from([key for key in case.sides[side] if not key.startswith("adam.")]))
        case.mapping["rules"].append({side: "copy.w", "tied": key})
        for slot in ("", "adam."):
            if slot + key in case.sides[side]:
                case.sides[side][f"{slot}copy.w"] = case.sides[side][slot + key]
        case.kinds.add("tied")
    return case


def _replaced(value: Any, word: str, new: str) -> Any:
    if isinstance(value, dict):
        return {new if key == word else key: _replaced(item, word, new) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, word, new) for item in value]
    return (
        value.replace(f"{{{word}}}", f"{{{new}}}").replace(f"* {word} ", f"* {new} ")
        if isinstance(value, str)
        else value
    )


def _add(case: Case, drawn: Drawn, i: int, slot: str, rng: np.random.Generator) -> None:
    """The tensors of one application of a rule, on both sides."""
    rule, turns, side = drawn.rule, drawn.turns, drawn.parts_side
    whole = rule["from" if side == "to" else "to"]
    names = rule[side] if isinstance(rule[side], list) else [rule[side]]
    own = [*rule.get("lay", {}), *rule.get("stack", {})]
    stacked = set(rule.get("stack", {}).values())
    old = [dim for dim in range(len(drawn.shape) + len(stacked)) if dim not in stacked]
    arrays = {}
    for k, name in enumerate(names):
        extents = list(drawn.shape)
        if turns is not None:
            extents[old.index(rule["join"])] *= turns[k]
        order = list(rule.get("transpose", range(len(extents))))
        for values in itertools.product(*(range(drawn.sizes[index]) for index in own)):
            array = rng.integers(-(2**40), 2**40, [extents[order.index(dim)] for dim in range(len(extents))])
            arrays[k, *values] = array
            case.sides[side][slot + name.format(i=i, **dict(zip(own, values, strict=True)))] = array
    case.sides["from" if side == "to" else "to"][slot + whole.format(i=i)] = whole_of(rule, arrays, turns)


def save_source(folder: Path, checkpoint: Checkpoint) -> None:
    folder.mkdir()
    for part, is_state in (("model", False), ("opt", True)):
        arrays = {k: a for k, a in checkpoint.tensors.items() if (k in checkpoint.optimizer_keys) == is_state}
        if arrays:
            arrays = {key: np.ascontiguousarray(array) for key, array in arrays.items()}
            save_file(arrays, folder / f"{part}-0000000-0000001.safetensors")


def check_equal(found: dict[str, Array], expected: dict[str, Array]) -> None:
    assert sorted(found) == sorted(expected)
    for key, array in expected.items():
        assert found[key].shape == array.shape, key
        assert found[key].tolist() == array.tolist(), key


@pytest.mark.slow
def test_a_renamed_checkpoint_is_what_numpy_makes_of_it() -> None:
    seen: Counter[str] = Counter()

    @cases(110)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        case = data.draw(name_maps())
        seen.update(case.kinds)
        names = reshard.NameMap.from_mapping(case.mapping)
        source, target = data.draw(st.sampled_from((("from", "to"), ("to", "from"))))
        reverse = source == "to"
        stored, wanted = case.checkpoint(source), case.checkpoint(target)
        layout = data.draw(layouts(stored, max_ranks=8))
        other = data.draw(layouts(wanted, max_ranks=8))
        with tempfile.TemporaryDirectory() as name:
            save_source(Path(name) / "iteration_1", stored)
            reshard.convert(Path(name) / "iteration_1", Path(name) / "tree", layout=layout, commit={"durable": False})
            with (
                reshard.open(Path(name) / "tree") as opened,
                opened.renamed(names, reverse=reverse) as renamed,
                renamed.renamed(names, reverse=not reverse) as back,
            ):
                check_equal(renamed.load(), wanted.tensors)
                check_equal(back.load(), stored.tensors)
                assert sorted(renamed.keys("optimizer")) == sorted(wanted.optimizer_keys)
                for rank in data.draw(some_ranks(other, 2)):
                    expected = local_arrays(other, wanted.tensors, rank, wanted.optimizer_keys)
                    check_equal(renamed.load(other, rank=rank), expected)

    check()
    assert set(seen) == KINDS


@pytest.mark.slow(disk=False)
@cases(100)
@given(st.data())
def test_printed_and_reversed_maps_are_the_same_map(data: st.DataObject) -> None:
    case = data.draw(name_maps())
    names = reshard.NameMap.from_mapping(case.mapping)
    assert reshard.NameMap.from_mapping(names.to_mapping()) == names
    assert names.reversed().reversed() == names
    assert reshard.NameMap.from_mapping(names.reversed().to_mapping()) == names.reversed()
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "names.yaml").write_text(str(names))
        assert reshard.NameMap.from_yaml(Path(name) / "names.yaml") == names


def elements(tile: Any, factors: dict[int, tuple[int, ...]]) -> dict[int, int]:
    """Of each element along dim 0 that a tile holds, the element of the stored array that it is."""
    offset, shape, local, strides = tile
    n = len(factors.get(0, (1,)))
    found = {}
    for steps in itertools.product(*map(range, shape[:n])):
        at = [start + step for start, step in zip(offset, steps, strict=False)]
        row = 0
        for x, extent in zip(at, factors.get(0, (1,)), strict=False):
            row = row * extent + x
        assert all(x < extent for x, extent in zip(at, factors.get(0, ()), strict=False))
        found[row] = local + sum(step * stride for step, stride in zip(steps, strides, strict=False))
    return found


def all_elements(tiles: list[Any], factors: dict[int, tuple[int, ...]]) -> dict[int, int]:
    found = [elements(tile, factors) for tile in tiles]
    assert len(set(itertools.chain(*found))) == sum(map(len, found))
    return {row: at for one in found for row, at in one.items()}


@pytest.mark.slow(disk=False)
@cases(400)
@given(st.data())
def test_tiles_move_there_and_back(data: st.DataObject) -> None:
    """Every element of a box of the one lies in the tiles of the other where the part map says, once."""
    turn, before, after, rounds, skipped, more = (data.draw(st.integers(low, 4)) for low in (1, 0, 0, 1, 0, 0))
    period = before + turn + after
    start, n_whole = skipped * period + before, (skipped + rounds + more) * period
    link = DimMap(0, start, turn, period, rounds)
    part_map = PartMap((link,), ((1, 2),) if data.draw(st.booleans()) else ())
    n = turn * rounds
    begin = data.draw(st.integers(0, n - 1))
    end = data.draw(st.integers(begin + 1, n))
    where = {start + x // turn * period + x % turn: x for x in range(n)}
    moved = part_map.to_whole(Tile((begin,), (end - begin,), 100, (3,)))
    found = all_elements(moved, part_map.factors_of_whole((n_whole, 3)))
    assert found == {y: 100 + 3 * (x - begin) for y, x in where.items() if begin <= x < end}
    assert len(moved) <= 3, "however many rounds there are"
    # The other way: a box of the whole, of which the part takes what is its own.
    low = data.draw(st.integers(0, n_whole))
    high = data.draw(st.integers(low, n_whole))
    tile = Tile(
        (low, 1)[: 1 + len(part_map.fixed)],
        (high - low, 3)[: 1 + len(part_map.fixed)],
        7,
        (5, 1)[: 1 + len(part_map.fixed)],
    )
    moved = part_map.to_part(tile)
    beside = 1 if part_map.fixed else 0  # index 2 of a box that begins at 1
    expected = {x: 7 + 5 * (y - low) + beside for y, x in where.items() if low <= y < high}
    assert all_elements(moved, part_map.factors_of_part()) == expected
    assert len(moved) <= 3


@cases(200)
@given(st.data())
def test_swapped_tiles_move_there_and_back(data: st.DataObject) -> None:
    """As above, for a dim whose groups are transposed matrices."""
    rows, columns, n_groups = (data.draw(st.integers(1, 4)) for _ in range(3))
    n = rows * columns * n_groups
    part_map = PartMap((SwappedDim(0, rows, columns, n_groups),))
    where = np.arange(n).reshape(n_groups, columns, rows).swapaxes(1, 2).reshape(-1)
    begin = data.draw(st.integers(0, n - 1))
    end = data.draw(st.integers(begin + 1, n))
    tile = Tile((begin,), (end - begin,), 100, (3,))
    moved = part_map.to_whole(tile)
    assert all_elements(moved, part_map.factors_of_whole((n,))) == {
        int(y): 100 + 3 * (x - begin) for x, y in enumerate(where) if begin <= x < end
    }
    assert len(moved) <= 7, "however many groups there are"
    moved = part_map.to_part(tile)
    expected = {x: 100 + 3 * (int(y) - begin) for x, y in enumerate(where) if begin <= y < end}
    assert all_elements(moved, part_map.factors_of_part()) == expected


@pytest.mark.slow(disk=False)
@cases(50)
@given(st.data())
def test_a_rule_that_swaps(data: st.DataObject) -> None:
    """A conversion there and back, with any layout between."""
    a, b, n_groups, width = (data.draw(st.integers(1, 4)) for _ in range(4))
    shape = data.draw(st.sampled_from([(a * b * n_groups,), (a * b * n_groups, width)]))
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    names = reshard.NameMap.from_mapping({"sizes": {"n": "n"}, "rules": [{"from": "w", "to": "v", "swap": [a, "n"]}]})
    assert reshard.NameMap.from_mapping(names.to_mapping()) == names
    assert reshard.NameMap.from_mapping(names.reversed().to_mapping()) == names.reversed()
    assert names.reversed().reversed() == names
    with tempfile.TemporaryDirectory() as folder:
        reshard.save_file({"w": array}, f"{folder}/w.safetensors")
        reshard.convert(f"{folder}/w.safetensors", f"{folder}/v", names=names, config={"n": b})
        expected = array.reshape(n_groups, a, b, -1).swapaxes(1, 2).reshape(shape)
        assert np.array_equal(reshard.load_file(f"{folder}/v")["v"], expected)
        reshard.convert(f"{folder}/v", f"{folder}/w", names=names.reversed(), config={"n": b})
        assert np.array_equal(reshard.load_file(f"{folder}/w")["w"], array)
