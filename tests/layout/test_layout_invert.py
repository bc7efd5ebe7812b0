"""Global shapes follow from what every rank holds: the oracle cuts, the inversion finds the shapes again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.oracle import holds, local_arrays, mesh_ranks, parameter_of, rule_of
from tests.helpers.strategies import Checkpoint, Mapping, cases, checkpoints, layouts

from reshard.errors import LayoutError, MismatchError
from reshard.layout import ModelLayout
from reshard.layout.invert import check_local_shapes, global_shapes, join_members

if TYPE_CHECKING:
    Shapes = dict[str, dict[int, tuple[int, ...]]]


def local_shapes(mapping: Mapping, checkpoint: Checkpoint) -> Shapes:
    shapes: Shapes = {}
    for rank in mesh_ranks(mapping):
        for name, array in local_arrays(mapping, checkpoint.tensors, rank, checkpoint.optimizer_keys).items():
            shapes.setdefault(name, {})[rank] = array.shape
    return shapes


def must_be_told(mapping: Mapping, checkpoint: Checkpoint, key: str) -> bool:
    """What the arrays of the ranks do not say: flattened tensors, and state whose shape is not its parameter's."""
    parameter = parameter_of(key, checkpoint.shapes, checkpoint.optimizer_keys)
    rule = rule_of(mapping, key, checkpoint.shapes, checkpoint.optimizer_keys)
    if parameter is None:
        return bool(rule.flat)
    return rule.join is not None or checkpoint.shapes[key] != checkpoint.shapes[parameter]


@pytest.mark.slow(disk=False)
def test_shapes_are_found_again() -> None:
    @cases(150)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        checkpoint: Checkpoint = data.draw(checkpoints())
        mapping = data.draw(layouts(checkpoint, max_ranks=12))
        given_shapes = local_shapes(mapping, checkpoint)
        told = {k: s for k, s in checkpoint.shapes.items() if must_be_told(mapping, checkpoint, k)}
        keys = {name: of_ranks for name, of_ranks in given_shapes.items() if name in checkpoint.tensors}
        layout = ModelLayout.from_mapping(mapping)
        found = global_shapes(layout, keys, told, checkpoint.optimizer_keys)
        assert found == checkpoint.shapes
        bound = layout.bind(found, optimizer_keys=checkpoint.optimizer_keys)
        check_local_shapes(bound, given_shapes)
        for join in bound.joins:
            slot = join.name[: join.name.index("joined.")]
            of_parameters = {
                k: parameter_of(k, checkpoint.shapes, checkpoint.optimizer_keys) is not None for k in found
            }
            of_slot = [k for k, of_parameter in of_parameters.items() if of_parameter == bool(slot)]
            assert set(join.keys) <= set(join_members(layout, join.name[len(slot) :], of_slot, slot))

    check()


TP2: dict[str, Any] = {"mesh": {"dp": 2, "tp": 2}, "rules": [{"match": "*", "cut": ["tp"]}]}
CEIL = TP2 | {"rules": [{"match": "*", "cut": ["tp"], "uneven": "ceil"}]}
FLAT = TP2 | {"rules": [{"match": "*", "flat": ["tp"]}]}


@pytest.mark.parametrize(
    ("mapping", "shapes", "words"),
    [
        (TP2, {0: (2, 3), 1: (2, 3), 2: (1, 3), 3: (2, 3)}, "2 elements on rank 0 and 1 on rank 2"),
        (TP2, {0: (2, 3), 1: (2, 4), 2: (2, 3), 3: (2, 3)}, "3 elements on rank 0 and 4 on rank 1"),
        (TP2, {0: (2, 3), 1: (1, 3), 2: (2, 3), 3: (1, 3)}, "cuts it evenly"),
        (TP2, {0: (2, 3), 1: (2,)}, "2 dims on rank 0 and 1 on rank 1"),
        (TP2, {0: (2,), 7: (2,)}, "no rank 7"),
        (CEIL, {0: (2, 3), 2: (2, 3)}, "1 of the 2 parts"),
        (FLAT, {0: (2,), 1: (2,)}, "flattened"),
        ({"mesh": {"tp": 2}, "rules": [{"match": "other"}]}, {0: (2,)}, "no rule matches"),
    ],
)
def test_what_cannot_be_is_refused(mapping: Mapping, shapes: dict[int, tuple[int, ...]], words: str) -> None:
    with pytest.raises(LayoutError, match=words) as error:
        global_shapes(ModelLayout.from_mapping(mapping), {"a.w": shapes}, {})
    assert error.value.key == "a.w"


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"w": {0: (2,), 1: (2,), 2: (2,)}}, "rank 3 gave no `w`"),
        ({"w": dict.fromkeys(range(4), (2,)), "v": {1: (2,)}}, "rank 1 gave `v`"),
        ({"w": dict.fromkeys(range(3), (2,)) | {3: (3,)}}, r"rank 3 gave an array of shape \(3,\)"),
    ],
)
def test_local_shapes_that_are_not_the_layouts(shapes: Shapes, words: str) -> None:
    bound = ModelLayout.from_mapping(TP2).bind({"w": (4,)})
    with pytest.raises(MismatchError, match=words):
        check_local_shapes(bound, shapes)


def test_state_of_another_shape_is_whole() -> None:
    shapes: Shapes = {
        "w": dict.fromkeys(range(4), (2, 3)),
        "m.w": dict.fromkeys(range(4), (2, 3)),
        "s.w": {0: (), 1: ()},
    }
    shapes["r.w"] = dict.fromkeys(range(4), (5,))
    found = global_shapes(ModelLayout.from_mapping(TP2), shapes, {}, ("m.w", "s.w", "r.w"))
    assert found == {"w": (4, 3), "m.w": (4, 3), "s.w": (), "r.w": (5,)}


def test_layout_ranks_that_hold_nothing_are_no_matter() -> None:
    mapping = {"mesh": {"pp": 2}, "rules": [{"match": "*"}], "place": [{"match": "*", "axis": "pp", "at": 1}]}
    found = global_shapes(ModelLayout.from_mapping(mapping), {"w": {1: (3,)}}, {})
    check_local_shapes(ModelLayout.from_mapping(mapping).bind(found), {"w": {1: (3,)}})
    assert found == {"w": (3,)}
    assert holds(mapping, "w", ["w"], _point(1), ())


def _point(pp: int) -> Any:
    from tests.helpers.oracle import Point

    return Point({"pp": 2}, {"pp": pp})
