"""Plans of joined arrays: tiles.json lists a tensor where it has elements, however many ranks there are."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import LayoutError, UnsupportedError
from reshard.formats.checkpoint2.iteration import IterationPlan, plan_layout
from reshard.formats.tiled import names as tiles
from reshard.layout import BoundLayout, ModelLayout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard import _core
    from reshard.write.contents import DtypeAndPart

LAYOUT: dict[str, Any] = {
    "mesh": {"pp": 2, "dp": 8, "tp": 2},
    "rules": [
        {"match": "*.norm", "flat": {"axes": ["dp"], "join": "norms"}},
        {"match": "*.w", "cut": ["tp"], "uneven": "ceil", "flat": {"axes": ["dp"], "join": "weights", "align": 4}},
    ],
    "place": [{"match": "{i}.*", "axis": "pp"}],
}


def planned(layout: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> tuple[BoundLayout, IterationPlan]:
    tensors: dict[str, DtypeAndPart] = dict.fromkeys(shapes, ("F32", "model"))
    bound = ModelLayout.from_mapping(layout).bind(shapes)
    return bound, plan_layout(tensors, bound)


def parts(bound: BoundLayout, array: str, rank: int) -> tuple[int, list[tuple[str, _core.Tile]]]:
    join = bound.join_named(array)
    assert join is not None
    return bound.joined(join).part(rank)


@given(
    mesh=st.tuples(*[st.integers(1, 3)] * 3),
    align=st.integers(1, 5),
    rows=st.lists(st.integers(0, 7), min_size=1, max_size=6),
)
def test_each_part_with_elements_is_listed_once(mesh: tuple[int, ...], align: int, rows: list[int]) -> None:
    rows = [*rows, *[2] * (mesh[0] - len(rows))]  # each stage has one
    shapes = {f"{i % mesh[0]}.{i}.{kind}": (n, 3) for i, n in enumerate(rows) for kind in ("w", "norm")}
    rules = [LAYOUT["rules"][0], LAYOUT["rules"][1] | {"flat": {"axes": ["dp"], "join": "weights", "align": align}}]
    layout = LAYOUT | {"mesh": dict(zip(("pp", "dp", "tp"), mesh, strict=True)), "rules": rules}
    bound, plan = planned(layout, shapes)
    assert plan.tiles is not None
    listed: dict[tuple[str, str], dict[str, tuple[_core.Tile, ...]]] = {}
    for key, tensor in plan.tiles.tensors.items():
        assert tensor.stored, f"no array of {key}"
        for stored in tensor.stored:
            listed.setdefault((stored.file, stored.name), {})[key] = stored.tiles
    arrays = {(file.name, array): file.rank for file in plan.files for array in file.arrays}
    assert listed.keys() == arrays.keys()
    for (file, array), rank in arrays.items():
        expected: dict[str, list[_core.Tile]] = {}
        for key, tile in parts(bound, array, rank)[1]:
            expected.setdefault(key, []).append(tile)
        found = listed[file, array]
        assert {key: list(own) for key, own in found.items() if own} == expected
        without = [key for key, own in found.items() if not own]
        assert all(0 in shapes[key] for key in without) or len(found) == 1
    # Ranks with equal parts hold copies of one shard.
    for array, holders in plan.holders.items():
        by_part: dict[str, list[int]] = {}
        for rank in bound.ranks:
            if array in bound.local_names(rank):
                by_part.setdefault(str(parts(bound, array, rank)), []).append(rank)
        assert sorted(holders) == sorted(map(tuple, by_part.values()))


def test_the_lists_grow_with_ranks_and_tensors_not_with_their_product() -> None:
    shapes = {f"{i % 2}.{i}.{kind}": (8, 5) for i in range(200) for kind in ("w", "norm")}
    layout = LAYOUT | {"mesh": {"pp": 2, "dp": 64, "tp": 2}}
    _, plan = planned(layout, shapes)
    assert plan.tiles is not None
    n_entries = sum(len(tensor.stored) for tensor in plan.tiles.tensors.values())
    n_arrays = sum(len(file.arrays) for file in plan.files)
    # An entry for each array, and one for each tensor that begins behind the start of an array.
    assert n_entries <= n_arrays + 3 * len(shapes)
    assert all(math.prod(one.shape) > 0 for one in plan.tiles.tensors["0.0.w"].stored)


def test_tensors_are_listed_in_the_order_of_their_join() -> None:
    shapes = {f"{i % 2}.{i}.w": (4, 5) for i in reversed(range(20))}
    bound, plan = planned(LAYOUT | {"mesh": {"dp": 8, "tp": 2, "pp": 2}}, shapes)
    assert plan.tiles is not None
    assert list(plan.tiles.tensors) == list(bound.joins[0].keys)


def test_some_keys_of_a_join_are_refused() -> None:
    shapes = {"0.a.w": (4, 5), "0.b.w": (4, 5), "1.a.w": (4, 5)}
    bound = ModelLayout.from_mapping(LAYOUT).bind(shapes)
    with pytest.raises(LayoutError, match=r"`0.a.w` is asked for, but it is one array with `0.b.w`"):
        plan_layout({"0.a.w": ("F32", "model")}, bound)


def test_a_list_that_no_reader_accepts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, plan = planned(LAYOUT, {f"{i % 2}.{i}.w": (4, 5) for i in range(20)})
    assert plan.tiles is not None
    n_bytes = len(b"".join(tiles.pieces(plan.tiles)))
    monkeypatch.setattr(tiles, "MAX_BYTES", n_bytes + 64)
    assert len(b"".join(tiles.pieces(plan.tiles))) == n_bytes
    monkeypatch.setattr(tiles, "MAX_BYTES", n_bytes)
    with pytest.raises(
        UnsupportedError, match=r"tiles.json would have more than 0 MiB: it lists the parts of 20 tensors"
    ):
        list(tiles.pieces(plan.tiles))
