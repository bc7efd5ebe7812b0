"""What a layout file makes of the tensors of a checkpoint: rules, places, optimizer state, joins, and the geometry."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from reshard import _core
from reshard.errors import ArgumentError, KeyNotFoundError, LayoutError
from reshard.layout import ModelLayout
from reshard.layout.partition import Partition, Places, TensorLayout
from reshard.layout.resolve import resolve

Shapes = dict[str, tuple[int, ...]]
MESH = {"pp": 2, "dp": 2, "tp": 4}


def layout(*rules: dict[str, Any], **fields: Any) -> ModelLayout:
    return ModelLayout.from_mapping({"mesh": MESH, "rules": list(rules), **fields})


def specs(given: ModelLayout, tensors: Shapes, optimizer_keys: tuple[str, ...] = ()) -> dict[str, TensorLayout]:
    return resolve(given, tensors, optimizer_keys).layouts


def lies(shape: tuple[int, ...], place: Places = (), **fields: Any) -> TensorLayout:
    return TensorLayout(shape, Partition(**fields), place)


def refused(given: ModelLayout, tensors: Shapes, optimizer_keys: tuple[str, ...] = ()) -> LayoutError:
    with pytest.raises(LayoutError) as caught:
        resolve(given, tensors, optimizer_keys)
    return caught.value


def placed(given: ModelLayout, keys: list[str], optimizer_keys: tuple[str, ...] = ()) -> dict[str, Any]:
    """`{key: [(axes, coordinate), ...]}` of scalars; `place` does not look at shapes."""
    found = specs(given, dict.fromkeys(keys, ()), optimizer_keys)
    return {key: [(list(axes), at) for axes, at in spec.place] for key, spec in found.items()}


# -- rules


def test_the_first_rule_that_matches_decides() -> None:
    given = layout({"match": "a.*", "cut": ["tp"]}, {"match": ["b", "*.w"], "cut": ["dp"]}, {"match": "*"})
    found = specs(given, dict.fromkeys(["a.w", "c.w", "b", "d"], (8, 8)))
    assert {key: spec.partition.cut for key, spec in found.items()} == {
        "a.w": (("tp",),),
        "c.w": (("dp",),),
        "b": (("dp",),),
        "d": (),
    }


def test_a_key_without_a_rule_is_refused_with_the_nearest_patterns() -> None:
    error = refused(layout({"match": "*.down_proj.weight"}, {"match": "*.norm.weight"}), {"l.down_proj.bias": (8,)})
    assert error.message == "no rule matches `l.down_proj.bias`"
    assert error.key == "l.down_proj.bias"
    assert error.hint is not None
    assert error.hint.startswith("the nearest patterns are `*.down_proj.weight`, `*.norm.weight`; ")
    assert refused(layout(), {"w": ()}).hint == 'a last rule `match: "*"` keeps the others unsharded'


MISFITS: list[tuple[dict[str, Any], tuple[int, ...], str, str | None]] = [
    (
        {"cut": ["tp"]},
        (6,),
        "dim 0 of `w` has 6 elements, not a multiple of tp (4)",
        "write `uneven: ceil` in its rule",
    ),
    (
        {"cut": [None, ["dp", "tp"]]},
        (1, 12),
        "dim 1 of `w` has 12 elements, not a multiple of dp (2) x tp (4)",
        "sizes",
    ),
    ({"cut": [None, "tp"]}, (8,), "`w` has 1 dim, and the rule `*` cuts dim 1", "put a rule for this key before it"),
    ({"cut": ["tp"], "sizes": {0: [1, 2, 3, 4]}}, (9,), "dim 0 of `w` has 9 elements, and its `sizes` sum to 10", None),
    ({"sizes": {1: [4]}}, (4,), "`w` has 1 dim, and `sizes` names dim 1", None),
    ({"cut": ["tp"], "blocks": {0: [8, 4]}}, (16,), "dim 0 of `w` has 16 elements, and its `blocks` sum to 12", None),
    ({"cut": ["tp"], "blocks": {0: [8, 6]}}, (14,), "block 1 of dim 0 of `w` has 6 elements", "uneven: ceil"),
    ({"cut": ["tp"], "blocks": {0: 3}}, (16,), "dim 0 of `w` has 16 elements: no 3 equal blocks", None),
    ({"blocks": {2: [1]}}, (1, 1), "`w` has 2 dims, and `blocks` names dim 2", None),
    ({"stored": [1, 0]}, (2,), "`w` has 1 dim, and `stored` of its rule orders 2", None),
]


@pytest.mark.parametrize(("rule", "shape", "message", "hint"), MISFITS)
def test_a_rule_that_does_not_fit_is_refused(
    rule: dict[str, Any], shape: tuple[int, ...], message: str, hint: str | None
) -> None:
    error = refused(layout({"match": "*", **rule}), {"w": shape})
    assert message in error.message
    assert error.key == "w"
    assert (hint or "") in (error.hint or "")


FITS: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    ({"cut": ["tp", None, None]}, (4,)),  # nulls beyond the dims say nothing
    ({"cut": ["tp"]}, (0, 3)),
    ({"cut": ["tp"], "uneven": "ceil"}, (6,)),
    ({"cut": ["tp"], "uneven": "ceil", "blocks": {0: [5, 1]}}, (6,)),
    ({"cut": ["tp"], "sizes": {0: [0, 6, 0, 0]}}, (6,)),
    ({"cut": ["tp"], "blocks": {0: [4, {"size": 3, "cut": None}]}}, (7,)),
    ({"sizes": {0: [7]}, "stored": [1, 0]}, (7, 2)),
    # 0-d tensors are never cut, whatever the rule says.
    ({"cut": ["tp"], "sizes": {0: [1, 2, 3, 4]}, "flat": ["dp"], "stored": [0]}, ()),
    ({"cut": [None, "tp"], "blocks": {1: [3]}}, ()),
]


@pytest.mark.parametrize(("rule", "shape"), FITS)
def test_a_rule_that_fits(rule: dict[str, Any], shape: tuple[int, ...]) -> None:
    found = specs(layout({"match": "*", **rule}), {"w": shape})["w"]
    assert found.shape == shape
    if not shape:
        assert found == lies(())


def test_equal_blocks_are_counted_by_the_shape() -> None:
    found = specs(layout({"match": "*", "cut": [None, "tp"], "blocks": {1: 3}}), {"a": (2, 24), "b": (2, 12)})
    mesh = _core.Mesh([("pp", 2), ("dp", 2), ("tp", 4)])
    # Rank 1 has the second quarter of each block: all blocks of a tensor have one size.
    assert [[tile.offset[1] for tile in _core.Layout(mesh, one).tiles(1)] for one in found.values()] == [
        [2, 10, 18],
        [1, 5, 9],
    ]


# -- place

LAYERS = [f"layers.{i}.{name}" for i in range(4) for name in ("w", "b")]


@pytest.mark.parametrize(
    ("entry", "coordinates"),
    [
        ({}, [0, 0, 1, 1]),
        ({"sizes": [3, 1]}, [0, 0, 0, 1]),
        ({"sizes": [0, 4]}, [1, 1, 1, 1]),
        ({"sizes": [4, 0]}, [0, 0, 0, 0]),
        ({"to": [0, 1, 0, 1]}, [0, 1, 0, 1]),
        ({"axis": ["pp", "dp"]}, [0, 1, 2, 3]),
        ({"axis": ["dp", "pp"], "sizes": [1, 0, 2, 1]}, [0, 2, 2, 3]),
        ({"match": ["layers.{i}.w", "layers.{i}.b"]}, [0, 0, 1, 1]),
        ({"match": "re:layers\\.{i}\\..*"}, [0, 0, 1, 1]),
    ],
)
def test_layers_in_blocks_by_sizes_and_by_a_list(entry: dict[str, Any], coordinates: list[int]) -> None:
    given = layout({"match": "*"}, place=[{"match": "layers.{i}.*", "axis": "pp", **entry}])
    axes = given.place[0].axes
    found = placed(given, [*LAYERS, "embed"])
    assert found == {
        "embed": [],
        **{f"layers.{i}.{name}": [(list(axes), at)] for i, at in enumerate(coordinates) for name in ("w", "b")},
    }


def test_the_number_of_indices_is_the_highest_plus_one() -> None:
    given = layout({"match": "*"}, place=[{"match": "layers.{i}.w", "axis": "pp"}])
    assert placed(given, ["layers.0.w", "layers.7.w", "layers.3.w", "layers.9.b"]) == {
        "layers.0.w": [(["pp"], 0)],
        "layers.7.w": [(["pp"], 1)],
        "layers.3.w": [(["pp"], 0)],
        "layers.9.b": [],
    }


@pytest.mark.parametrize(
    ("entry", "n", "message"),
    [
        ({}, 3, "place[0], `layers.{i}.*`: the checkpoint has indices 0 to 2: 3 are not a multiple of pp (2)"),
        ({"axis": ["pp", "tp"]}, 12, "the checkpoint has indices 0 to 11: 12 are not a multiple of pp (2) x tp (4)"),
        ({"sizes": [2, 2]}, 3, "the checkpoint has indices 0 to 2, and `sizes` sum to 4"),
        ({"to": [0, 1]}, 3, "the checkpoint has indices 0 to 2, and `to` gives the coordinates of 2"),
        ({"to": [0, 1, 0, 1]}, 3, "the checkpoint has indices 0 to 2, and `to` gives the coordinates of 4"),
    ],
)
def test_indices_that_do_not_fit_are_refused(entry: dict[str, Any], n: int, message: str) -> None:
    given = layout({"match": "*"}, place=[{"match": "layers.{i}.*", "axis": "pp", **entry}])
    assert message in refused(given, {f"layers.{i}.w": () for i in range(n)}).message


def test_two_possible_captures_are_refused() -> None:
    given = layout({"match": "*"}, place=[{"match": "*.{i}.*", "axis": "pp"}])
    error = refused(given, {"layers.3.experts.12.w": ()})
    assert error.message == "place[0], `*.{i}.*`: `{i}` could be 3 or 12 in `layers.3.experts.12.w`"
    assert error.key == "layers.3.experts.12.w"


def test_two_patterns_of_an_entry_that_disagree_are_refused() -> None:
    given = layout({"match": "*"}, place=[{"match": ["layers.{i}.*", "*.experts.{i}"], "axis": "pp"}])
    assert "could be 1 or 3" in refused(given, {"layers.3.experts.1": ()}).message


def test_every_entry_that_matches_applies() -> None:
    entries = [
        {"match": "layers.{i}.*", "axis": "pp"},
        {"match": "*.experts.{i}.*", "axis": ["dp", "tp"]},
        {"match": "embed*", "axis": "pp", "at": 0},
        {"match": ["norm", "head"], "axis": "pp", "at": -1},
    ]
    keys = [f"layers.{i}.experts.{e}.w" for i in range(2) for e in range(8)]
    found = placed(layout({"match": "*"}, place=entries), [*keys, "embed.w", "norm", "head"])
    assert found["layers.1.experts.5.w"] == [(["pp"], 1), (["dp", "tp"], 5)]
    assert (found["embed.w"], found["norm"], found["head"]) == ([(["pp"], 0)], [(["pp"], 1)], [(["pp"], 1)])


def test_a_key_that_no_rank_would_hold_is_refused() -> None:
    entries = [{"match": "w", "axis": "pp", "at": 0}, {"match": "w", "axis": ["dp", "pp"], "at": 3}]
    error = refused(layout({"match": "*"}, place=entries), {"w": (2,)})
    assert error.message == "no rank holds `w`: `place` asks for `pp` 0 and 1"
    agreeing = [{"match": "w", "axis": "pp", "at": 1}, {"match": "w", "axis": ["dp", "pp"], "at": 3}]
    assert len(placed(layout({"match": "*"}, place=agreeing), ["w"])["w"]) == 2


@pytest.mark.parametrize("rule", [{"cut": ["tp"]}, {"flat": ["tp"]}])
def test_an_axis_cannot_cut_and_place(rule: dict[str, Any]) -> None:
    given = layout({"match": "*", **rule}, place=[{"match": "w", "axis": ["dp", "tp"], "at": 0}])
    error = refused(given, {"w": (8,)})
    assert "axis `tp` cuts `w`, and `place` gives it to one coordinate" in error.message
    one = {
        "mesh": {"dp": 2, "tp": 1},
        "rules": [{"match": "*", **rule}],
        "place": [{"match": "w", "axis": "tp", "at": 0}],
    }
    assert specs(ModelLayout.from_mapping(one), {"w": (8,)})["w"].place == ((("tp",), 0),)


# -- optimizer

RULES = ({"match": "*.w", "cut": [None, "tp"]}, {"match": "step"}, {"match": "*"})


def test_state_follows_its_parameter() -> None:
    given = layout(*RULES, place=[{"match": "layers.{i}.w", "axis": "pp"}])
    tensors: Shapes = {
        "layers.0.w": (8, 8),
        "layers.1.w": (8, 8),
        "adam.m.layers.1.w": (8, 8),
        "factored.layers.1.w": (8,),
        "count.layers.1.w": (),
        "step": (),
        "other.w": (8, 8),
    }
    found = specs(given, tensors, tuple(tensors)[2:])
    assert found["adam.m.layers.1.w"] == found["layers.1.w"] == lies((8, 8), cut=((), ("tp",)), place=((("pp",), 1),))
    # Not of its shape: whole wherever the parameter is held.
    assert found["factored.layers.1.w"] == lies((8,), place=((("pp",), 1),))
    assert found["count.layers.1.w"] == lies((), place=((("pp",), 1),))
    # No parameter fits: its own key.
    assert found["step"] == lies(())
    assert found["other.w"] == lies((8, 8), cut=((), ("tp",)))


def test_the_longest_parameter_that_fits_is_followed() -> None:
    given = layout({"match": "w", "cut": ["dp"]}, {"match": "a.w", "cut": ["tp"]}, {"match": "*"})
    tensors: Shapes = dict.fromkeys(["w", "a.w", "m.a.w", "m.b.w", ".w", "m..w"], (8,))
    found = specs(given, tensors, ("m.a.w", "m.b.w", ".w", "m..w"))
    assert [found[key].partition.cut for key in ("m.a.w", "m.b.w")] == [(("tp",),), (("dp",),)]
    assert found[".w"].partition.cut == ()  # a slot has a name
    assert found["m..w"].partition.cut == (("dp",),)


def test_only_the_optimizer_part_follows() -> None:
    given = layout({"match": "w", "cut": ["tp"]}, {"match": "*"})
    tensors: Shapes = {"w": (8,), "ema.w": (8,)}
    assert specs(given, tensors)["ema.w"].partition.cut == ()
    assert specs(given, tensors, ("ema.w",))["ema.w"].partition.cut == (("tp",),)


def test_state_that_follows_is_not_seen_by_rules_and_places() -> None:
    given = layout(
        {"match": "w.1", "cut": ["tp"]},
        {"match": "m.*", "cut": ["dp"]},
        place=[{"match": "m.*", "axis": "pp", "at": 0}],
    )
    resolved = resolve(given, {"w.1": (8,), "m.w.1": (8,)}, ("m.w.1",))
    assert resolved.layouts["m.w.1"] == lies((8,), cut=(("tp",),))
    assert resolved.warnings == ["rules[1], `m.*`, matches no key", "place[0], `m.*`, matches no key"]


def test_state_need_not_follow() -> None:
    given = layout({"match": "m.w", "cut": ["dp"]}, {"match": "w", "cut": ["tp"]}, optimizer={"follow": False})
    found = specs(given, {"w": (8,), "m.w": (8,)}, ("m.w",))
    assert found["m.w"].partition.cut == (("dp",),)


def add(rule: dict[str, Any], shape: tuple[int, ...], dims: dict[int, list[str]], **fields: Any) -> TensorLayout:
    given = layout({"match": "*", **rule}, optimizer={"add": dims}, **fields)
    found = specs(given, {"w": shape, "m.w": shape, "n.w": shape}, ("m.w", "n.w"))
    assert found["m.w"] == found["n.w"]
    return found["m.w"]


def test_add_appends_its_axes_innermost() -> None:
    assert add({"cut": ["tp"]}, (16, 4), {0: ["dp"]}).partition.cut == (("tp", "dp"),)
    assert add({"cut": ["tp"]}, (16, 4), {1: ["dp"]}).partition.cut == (("tp",), ("dp",))
    assert add({}, (16, 4), {1: ["dp", "pp"]}).partition.cut == ((), ("dp", "pp"))
    assert add({"cut": ["tp"], "blocks": {0: [8, {"size": 3, "cut": None}]}}, (11, 4), {0: ["dp"]}).partition.cut == (
        ("tp", "dp"),
    )
    # Torch's chunks need not divide.
    assert add({"cut": ["tp"], "uneven": "ceil"}, (5, 4), {0: ["dp"]}).partition.cut == (("tp", "dp"),)
    assert add({}, (), {0: ["dp"]}) == lies(())


@pytest.mark.parametrize(
    ("rule", "shape"),
    [({"cut": ["tp"]}, (12, 2)), ({"cut": ["tp"], "blocks": {0: [8, 4]}}, (12, 2)), ({"cut": [None, "tp"]}, (3, 4))],
)
def test_a_dim_that_add_does_not_divide_keeps_the_cut_and_is_reported(
    rule: dict[str, Any], shape: tuple[int, ...]
) -> None:
    given = layout({"match": "*", **rule}, optimizer={"add": {0: ["dp"], 1: ["pp"]}})
    tensors: Shapes = {"w": shape, "m.w": shape, "n.w": shape}
    resolved = resolve(given, tensors, ("m.w", "n.w"))
    cut = resolved.layouts["w"].partition.cut
    assert resolved.layouts["m.w"].partition.cut[0] == (cut[0] if cut else ())
    warning = "optimizer: dp (2) does not divide dim 0 and leaves the parameter's cut of `m.w`, `n.w`"
    assert warning in resolved.warnings


def test_add_to_a_dim_that_is_not_there_is_reported() -> None:
    given = layout({"match": "*"}, optimizer={"add": {1: ["dp"]}})
    assert resolve(given, {"w": (8,), "m.w": (8,)}, ("m.w",)).warnings == [
        "optimizer: dp (2) does not divide dim 1 and leaves the parameter's cut of `m.w`"
    ]


@pytest.mark.parametrize(
    ("rule", "optimizer", "why"),
    [
        ({"cut": ["dp"]}, {"add": {0: ["dp"]}}, "axis `dp` cuts its parameter already"),
        ({"cut": [None, "dp"]}, {"add": {0: ["dp"]}}, "axis `dp` cuts its parameter already"),
        ({"cut": ["tp"], "sizes": {0: [2, 2, 2, 2]}}, {"add": {0: ["dp"]}}, "dim 0 of its parameter has `sizes`"),
        ({"flat": ["tp"]}, {"add": {0: ["dp"]}}, "its parameter is `flat`"),
        ({"flat": ["tp"]}, {"flat": ["dp"]}, "its parameter is `flat` already"),
        ({"cut": ["dp"]}, {"flat": ["dp"]}, "axis `dp` cuts its parameter already"),
        ({}, {"add": {0: ["pp"]}}, "axis `pp` places its parameter already"),
        ({}, {"flat": ["pp"]}, "axis `pp` places its parameter already"),
    ],
)
def test_state_that_cannot_be_cut_further_is_refused(rule: dict[str, Any], optimizer: dict[str, Any], why: str) -> None:
    place = [{"match": "w", "axis": "pp", "at": 0}]
    given = layout({"match": "*", **rule}, optimizer=optimizer, place=place)
    assert specs(given, {"w": (8, 8)})  # the parameter alone is fine
    error = refused(given, {"w": (8, 8), "m.w": (8, 8)}, ("m.w",))
    assert error.key == "m.w"
    assert error.message.endswith(f"of `optimizer` cannot cut `m.w` further: {why}")


def test_sizes_of_another_dim_do_not_hinder_add() -> None:
    assert add({"cut": ["tp"], "sizes": {0: [1, 1, 1, 5]}}, (8, 8), {1: ["dp"]}).partition.cut == (("tp",), ("dp",))


def test_state_can_be_flat() -> None:
    given = layout({"match": "*", "cut": ["tp"]}, optimizer={"flat": ["dp"]})
    found = specs(given, {"w": (8, 8), "s": (), "m.w": (8, 8), "m.s": ()}, ("m.w", "m.s"))
    assert found["m.w"] == lies((8, 8), cut=(("tp",),), flat=("dp",))
    assert found["m.s"] == lies(())


# -- joins

JOIN = {"match": ["*.b", "*"], "flat": {"axes": ["dp"], "join": "all", "align": 2}}


def test_a_join_is_in_the_order_of_the_patterns_and_then_by_numbers() -> None:
    keys = ["l.10.a", "l.9.b", "l.10.b", "l.9.a", "l.2.b"]
    (join,) = resolve(layout(JOIN), dict.fromkeys(keys, (3,))).joins
    assert (join.name, join.keys, join.align, join.axes) == (
        "all", ("l.2.b", "l.9.b", "l.10.b", "l.9.a", "l.10.a"), 2, ("dp",)
    )  # fmt: skip


def test_state_of_a_joined_parameter_is_joined_by_its_slot() -> None:
    tensors: Shapes = {"a": (3,), "b": (3,), "m.b": (3,), "m.a": (3,), "v.a": (3,), "n.a": ()}
    resolved = resolve(layout({"match": "*", "flat": JOIN["flat"]}), tensors, ("m.b", "m.a", "v.a", "n.a"))
    assert {join.name: join.keys for join in resolved.joins} == {
        "all": ("a", "b"),
        "m.all": ("m.a", "m.b"),
        "v.all": ("v.a",),
    }
    assert resolved.layouts["n.a"] == lies(())


def test_a_join_cannot_bear_the_name_of_a_tensor() -> None:
    error = refused(layout({"match": "*", "flat": JOIN["flat"]}), {"a": (3,), "all": (3,)})
    assert "the join `all` has the name of a tensor or of another join" in error.message


# -- what is reported


def test_rules_and_places_that_match_nothing_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    given = layout(
        {"match": ["a", "b"]},
        {"match": "never.*", "cut": ["tp"]},
        {"match": "*"},
        place=[{"match": "a", "axis": "pp", "at": 0}, {"match": "layers.{i}.nothing", "axis": "pp"}],
    )
    expected = ["rules[1], `never.*`, matches no key", "place[1], `layers.{i}.nothing`, matches no key"]
    with caplog.at_level(logging.WARNING, logger="reshard"):
        bound = given.bind({"a": (8,), "x": (8,)})
        given.bind({"a": (8,), "x": (8,)})
    assert bound.warnings == expected
    assert [record.getMessage() for record in caplog.records] == [f"layout: {text}" for text in expected]
    with pytest.raises(LayoutError, match=r"never.*layers"):
        given.bind({"a": (8,), "x": (8,)}, strict=True)


# -- geometry


def test_bound_layouts_are_those_of_the_core() -> None:
    given = ModelLayout.from_mapping(
        {
            "mesh": {"pp": 2, "tp": 2},
            "ranks": [3, 2, 1, 0],
            "rules": [{"match": "q", "cut": ["tp"], "blocks": {0: [4, {"size": 1, "cut": None}, 2]}}, {"match": "*"}],
            "place": [{"match": "q", "axis": "pp", "at": -1}],
        }
    )
    bound = given.bind({"n": (3,), "q": (7,)})
    assert bound.ranks == [3, 2, 1, 0]
    assert bound.mesh.axes == [("pp", 2), ("tp", 2)]
    assert list(bound.layouts) == ["n", "q"]
    assert [bound.holds(rank) for rank in (3, 2, 1, 0)] == [["n"], ["n"], ["n", "q"], ["n", "q"]]
    bound.holds(0).clear()
    assert bound.holds(1) == ["n", "q"]
    # Rank 1 stands at (1, 0): the first halves of the blocks that are cut, and all of the one that is not.
    elements = [(at + n, local + n) for (at,), (size,), local, _ in bound.layouts["q"].tiles(1) for n in range(size)]
    assert elements == [(0, 0), (1, 1), (4, 2), (5, 3)]
    assert bound.layouts["q"].local_shape(0) == (4,)


def test_layouts_that_are_equal_are_made_once() -> None:
    bound = layout({"match": "*", "cut": ["tp"]}).bind({f"l.{i}.w": (8, 8) for i in range(100)})
    assert len({id(made) for made in bound.layouts.values()}) == 1


JOINED = ModelLayout.from_mapping(
    {
        "mesh": {"pp": 2, "dp": 2},
        "rules": [{"match": "*.b", "flat": {"axes": ["dp"], "join": "biases", "align": 2}}, {"match": "*"}],
        "place": [{"match": "l.{i}.*", "axis": "pp"}],
    }
)
TENSORS: Shapes = {"head": (3,), "l.1.b": (3,), "l.1.w": (2,), "l.0.b": (3,), "x.b": (5,), "l.0.w": (2,)}


def test_a_rank_sees_a_join_where_its_first_key_would_be() -> None:
    bound = JOINED.bind(TENSORS)
    assert [join.keys for join in bound.joins] == [("l.0.b", "l.1.b", "x.b")]
    assert bound.local_names(0) == ["head", "biases", "l.0.w"]
    assert bound.local_names(2) == ["head", "biases", "l.1.w"]
    assert bound.local_names(2, ["l.1.w", "l.0.w"]) == ["l.1.w"]
    assert bound.local_names(2, []) == []
    # 3 elements of l.1.b from 0, 5 of x.b from 4, the end at a multiple of 2 parts x 2: 12, so 6 a rank.
    request = bound.request(2, ["x.b", "l.1.b"])
    assert len(request) == 1
    for rank, tiles in [
        (2, [("l.1.b", ((0,), (3,), 0, (1,))), ("x.b", ((0,), (2,), 4, (1,)))]),
        (3, [("x.b", ((2,), (3,), 0, (1,)))]),
    ]:
        assert len(bound.request(rank, ["x.b", "l.1.b"])) == 1
        assert bound.joined(bound.joins[0]).part(rank) == (6, tiles)


def test_a_part_of_a_join_is_refused() -> None:
    bound = JOINED.bind(TENSORS)
    with pytest.raises(LayoutError) as caught:
        bound.request(0, ["head", "x.b"])
    assert "`x.b` is asked for, but it is one array with `l.0.b`" in caught.value.message
    assert caught.value.key == "x.b"
    # Keys of the join that the rank does not hold need not be named.
    assert bound.local_names(0, ["x.b", "l.0.b"]) == ["biases"]


def test_unknown_ranks_and_keys_are_refused() -> None:
    bound = JOINED.bind(TENSORS)
    with pytest.raises(ArgumentError, match="the layout has no rank 4"):
        bound.local_names(4)
    with pytest.raises(KeyNotFoundError) as caught:
        bound.request(0, ["heads"])
    assert caught.value.hint == "the nearest names are `head`"


def test_an_error_of_the_core_gets_the_key() -> None:
    with pytest.raises(LayoutError) as caught:
        layout({"match": "*"}).bind({"w": (1 << 62, 1 << 62)})
    assert caught.value.key == "w"
    assert caught.value.message.startswith("`w`: ")


def test_a_scalar_in_a_join_is_one_element_of_it() -> None:
    given = ModelLayout.from_mapping(
        {"mesh": {"dp": 2}, "rules": [{"match": "*", "flat": {"axes": ["dp"], "join": "j"}}]}
    )
    bound = given.bind({"a": (), "b": (2,)})
    assert bound.joined(bound.joins[0]).part(0) == (2, [("a", ((), (), 0, ())), ("b", ((0,), (1,), 1, (1,)))])


def test_rules_with_one_partition_share_the_layouts_of_its_tensors() -> None:
    """So that 100,000 rules, one for each tensor, are checked and made into geometry once."""
    rules = [{"match": f"{n}.w", "cut": ["tp"]} for n in range(3)]
    layout = ModelLayout.from_mapping({"mesh": {"tp": 2}, "rules": rules})
    found = layout.bind({"0.w": (4, 2), "1.w": (4, 2), "2.w": (2, 2)})
    assert found.tensor_layouts["0.w"] is found.tensor_layouts["1.w"]
    assert found.layouts["0.w"] is found.layouts["1.w"]
    assert found.tensor_layouts["2.w"].shape == (2, 2)
    with pytest.raises(LayoutError, match=r"dim 0 of `1\.w` has 3 elements"):
        layout.bind({"0.w": (4, 2), "1.w": (3, 2), "2.w": (2, 2)})
