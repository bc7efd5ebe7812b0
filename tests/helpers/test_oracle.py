"""The oracle against small examples worked by hand from the rules of the layout file, and against torch.

Each case lists, rank by rank, the elements that the rank must hold; tensors hold their element numbers, from 1 where
zeros are padded.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.oracle import (
    assemble,
    captures,
    chunks,
    element_numbers,
    element_tiles,
    local_arrays,
    mesh_ranks,
    natural,
    rank_coordinates,
)

Expected = list[Any] | None


def counted(*shape: int, first: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.arange(first, first + int(np.prod(shape)), dtype=np.int64).reshape(shape)


def check(
    mapping: Mapping[str, Any],
    tensors: Mapping[str, Any],
    expected: Mapping[str, list[Any]],
    optimizer_keys: tuple[str, ...] = (),
) -> None:
    """`expected`: for each local name one nested list a rank in mesh order, None where the rank has no such array."""
    found: dict[str, list[Any]] = {name: [] for name in expected}
    for rank in mesh_ranks(mapping):
        arrays = local_arrays(mapping, tensors, rank, optimizer_keys)
        assert arrays.keys() <= expected.keys()
        for name in expected:
            found[name].append(arrays[name].tolist() if name in arrays else None)
    assert found == expected


def one(rule: Mapping[str, Any], mesh: Mapping[str, int], tensor: Any, expected: list[Any]) -> None:
    """One tensor `w` under one rule."""
    check({"mesh": mesh, "rules": [{"match": "w", **rule}]}, {"w": tensor}, {"w": expected})


def test_nothing_said_is_whole_on_every_rank() -> None:
    one({}, {"dp": 3}, counted(2), [[0, 1]] * 3)


def test_even_cut() -> None:
    one({"cut": ["tp"]}, {"tp": 2}, counted(4, 2), [[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
    one({"cut": [None, "tp"]}, {"tp": 2}, counted(2, 4), [[[0, 1], [4, 5]], [[2, 3], [6, 7]]])


def test_first_axis_of_the_mesh_varies_slowest_and_others_make_replicas() -> None:
    one({"cut": ["tp"]}, {"dp": 2, "tp": 2}, counted(2), [[0], [1], [0], [1]])
    one({"cut": ["dp"]}, {"dp": 2, "tp": 2}, counted(2), [[0], [0], [1], [1]])


def test_several_axes_on_one_dim_first_is_outermost() -> None:
    one({"cut": [["dp", "tp"]]}, {"dp": 2, "tp": 2}, counted(4), [[0], [1], [2], [3]])
    one({"cut": [["tp", "dp"]]}, {"dp": 2, "tp": 2}, counted(4), [[0], [2], [1], [3]])
    one({"cut": [["tp", "dp"]]}, {"dp": 3, "tp": 2}, counted(6), [[0], [3], [1], [4], [2], [5]])


def test_two_dims_on_two_axes() -> None:
    one({"cut": ["tp", "dp"]}, {"dp": 2, "tp": 2}, counted(2, 2), [[[0]], [[2]], [[1]], [[3]]])


def test_ranks_name_the_mesh_points() -> None:
    mapping = {"mesh": {"dp": 2, "tp": 2}, "ranks": [7, 3, 0, 9], "rules": [{"match": "*", "cut": ["dp", "tp"]}]}
    assert [rank_coordinates(mapping, r)["dp"] for r in (7, 3, 0, 9)] == [0, 0, 1, 1]
    assert {r: local_arrays(mapping, {"w": counted(2, 2)}, r)["w"].tolist() for r in (0, 3, 7, 9)} == {
        7: [[0]],
        3: [[1]],
        0: [[2]],
        9: [[3]],
    }


def test_ceil_chunks_as_torch() -> None:
    # ceil(5 / 4) = 2: 2, 2, 1 and nothing.
    one({"cut": ["tp"], "uneven": "ceil"}, {"tp": 4}, counted(5), [[0, 1], [2, 3], [4], []])


def test_ceil_axis_after_axis_is_not_ceil_of_the_product() -> None:
    # 5 over dp 2: 3 and 2; each over tp 2: 2 + 1 and 1 + 1. (Over 4 at once it would be 2, 2, 1, 0.)
    one({"cut": [["dp", "tp"]], "uneven": "ceil"}, {"dp": 2, "tp": 2}, counted(5), [[0, 1], [2], [3], [4]])


@pytest.mark.parametrize("n", range(1, 9))
def test_ceil_equals_torch_chunk(n: int) -> None:
    for extent in range(20):
        tensor = torch.arange(extent * 2).reshape(extent, 2)
        expected = [c.numpy() for c in torch.chunk(tensor, n, dim=0)]
        found = chunks(tensor.numpy(), n, 0)
        assert len(found) == n
        assert [f.tolist() for f in found[: len(expected)]] == [e.tolist() for e in expected]
        assert all(f.shape == (0, 2) for f in found[len(expected) :])


def test_explicit_sizes() -> None:
    one({"cut": ["tp"], "sizes": {0: [3, 0, 1]}}, {"tp": 3}, counted(4), [[0, 1, 2], [], [3]])
    one(
        {"cut": [None, ["dp", "tp"]], "sizes": {1: [2, 1, 0, 1]}},
        {"tp": 2, "dp": 2},
        counted(1, 4),
        [[[0, 1]], [[]], [[2]], [[3]]],
    )


def test_blocks_are_cut_by_themselves() -> None:
    # q: 4 rows, k: 2, v: 2, as a fused projection.
    one({"cut": ["tp"], "blocks": {0: [4, 2, 2]}}, {"tp": 2}, counted(8), [[0, 1, 4, 6], [2, 3, 5, 7]])


def test_a_block_that_is_not_cut_is_whole_on_every_rank() -> None:
    rule = {"cut": ["tp"], "blocks": {0: [4, {"size": 1, "cut": None}, 2]}}
    one(rule, {"tp": 2}, counted(7), [[0, 1, 4, 5], [2, 3, 4, 6]])


def test_blocks_cut_by_two_axes_and_on_two_dims() -> None:
    one(
        {"cut": [["dp", "tp"]], "blocks": {0: [4, 4]}},
        {"dp": 2, "tp": 2},
        counted(8),
        [[0, 4], [1, 5], [2, 6], [3, 7]],
    )
    one(
        {"cut": ["dp", "tp"], "blocks": {0: [2, {"size": 1, "cut": None}], 1: [2, 2]}},
        {"dp": 2, "tp": 2},
        counted(3, 4),
        [
            [[0, 2], [8, 10]],
            [[1, 3], [9, 11]],
            [[4, 6], [8, 10]],
            [[5, 7], [9, 11]],
        ],
    )


def test_blocks_in_ceil_chunks() -> None:
    one({"cut": ["tp"], "uneven": "ceil", "blocks": {0: [3, 1]}}, {"tp": 2}, counted(4), [[0, 1, 3], [2]])


def test_flat_is_padded_with_zeros_to_a_multiple() -> None:
    one({"flat": ["dp"]}, {"dp": 2}, counted(5, 1, first=1), [[1, 2, 3], [4, 5, 0]])
    one({"flat": ["dp"]}, {"dp": 4}, counted(2, first=1), [[1], [2], [0], [0]])


def test_flat_after_cut_flattens_the_local_block() -> None:
    # Columns in parts of 2 and 1: the blocks are [[1, 2], [4, 5]] and [[3], [6]], each then cut over dp.
    one(
        {"cut": [None, "tp"], "sizes": {1: [2, 1]}, "flat": ["dp"]},
        {"dp": 2, "tp": 2},
        counted(2, 3, first=1),
        [[1, 2], [3], [4, 5], [6]],
    )


def test_flat_over_two_axes_first_is_outermost() -> None:
    one({"flat": ["tp", "dp"]}, {"dp": 2, "tp": 2}, counted(4, first=1), [[1], [3], [2], [4]])


def test_fsdp_like_flat_shard_of_a_matrix_crosses_rows() -> None:
    # 3 x 5 = 15 elements over 4: 4 each, the last with one zero; shard 1 ends row 0, shard 2 ends row 1.
    one(
        {"flat": ["fsdp"]},
        {"fsdp": 4},
        counted(3, 5, first=1),
        [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 0]],
    )


def test_stored_order_permutes_the_array_but_not_the_cut() -> None:
    # 2 x 4, dim 1 cut in two, arrays come as (dim 1, dim 0).
    one(
        {"cut": [None, "tp"], "stored": [1, 0]},
        {"tp": 2},
        counted(2, 4),
        [[[0, 4], [1, 5]], [[2, 6], [3, 7]]],
    )


def test_stored_order_of_three_dims_names_the_global_dim_at_each_position() -> None:
    tensor = counted(2, 3, 4)
    mapping = {"mesh": {"tp": 1}, "rules": [{"match": "*", "stored": [2, 0, 1]}]}
    (array,) = local_arrays(mapping, {"w": tensor}, 0).values()
    assert array.shape == (4, 2, 3)
    assert array[3, 1, 2] == tensor[1, 2, 3]
    assert array[1, 0, 2] == tensor[0, 2, 1]


def test_flat_of_stored_order_flattens_storage() -> None:
    # Storage of [[1, 2, 3], [4, 5, 6]] transposed: 1 4 2 5 3 6.
    one({"stored": [1, 0], "flat": ["dp"]}, {"dp": 2}, counted(2, 3, first=1), [[1, 4, 2], [5, 3, 6]])


def test_join_lays_keys_end_to_end_in_natural_order() -> None:
    check(
        {"mesh": {"dp": 2}, "rules": [{"match": "b*", "flat": {"axes": ["dp"], "join": "biases"}}]},
        {"b10": counted(2, first=10), "b2": counted(1, 2, first=20), "b1": counted(1, first=30)},
        {"biases": [[30, 20, 21], [10, 11, 0]]},
    )


def test_join_order_of_match_entries_comes_first() -> None:
    check(
        {"mesh": {"dp": 1}, "rules": [{"match": ["z*", "*"], "flat": {"axes": ["dp"], "join": "all"}}]},
        {"a": counted(1, first=1), "z10": counted(1, first=2), "z9": counted(1, first=3)},
        {"all": [[3, 2, 1]]},
    )


def test_join_align_rounds_every_start_and_the_end() -> None:
    # Starts 0, 4 (after 3), 8 (after 4 + 1); end 8 + 2 = 10, up to 2 x 4 = 16.
    check(
        {"mesh": {"dp": 2}, "rules": [{"match": "*", "flat": {"axes": ["dp"], "join": "j", "align": 4}}]},
        {"a": counted(3, first=1), "b": counted(1, first=4), "c": counted(2, first=5)},
        {"j": [[1, 2, 3, 0, 4, 0, 0, 0], [5, 6, 0, 0, 0, 0, 0, 0]]},
    )


def test_join_of_cut_blocks() -> None:
    check(
        {"mesh": {"dp": 2, "tp": 2}, "rules": [{"match": "*", "cut": ["tp"], "flat": {"axes": ["dp"], "join": "j"}}]},
        {"a": counted(2, 2, first=1), "b": counted(2, first=5)},
        # Blocks of tp 0: 1 2 | 5, of tp 1: 3 4 | 6; each padded to 4 and cut over dp.
        {"j": [[1, 2], [3, 4], [5, 0], [6, 0]]},
    )


def test_join_takes_the_keys_that_the_rank_holds() -> None:
    check(
        {
            "mesh": {"pp": 2, "dp": 2},
            "rules": [{"match": "*", "flat": {"axes": ["dp"], "join": "j"}}],
            "place": [{"match": "l.{i}", "axis": "pp"}, {"match": "e", "axis": "pp", "at": 0}],
        },
        {"e": counted(2, first=1), "l.0": counted(2, first=3), "l.1": counted(2, first=5)},
        {"j": [[1, 2], [3, 4], [5], [6]]},
    )


def test_place_evenly_sizes_and_to() -> None:
    tensors = {f"l.{i}": counted(1, first=i) for i in range(4)}

    def where(**how: Any) -> list[list[int]]:
        mapping = {"mesh": {"pp": 2}, "rules": [{"match": "*"}], "place": [{"match": "l.{i}", "axis": "pp", **how}]}
        return [[int(k[2:]) for k in local_arrays(mapping, tensors, rank)] for rank in range(2)]

    assert where() == [[0, 1], [2, 3]]
    assert where(sizes=[3, 1]) == [[0, 1, 2], [3]]
    assert where(sizes=[0, 4]) == [[], [0, 1, 2, 3]]
    assert where(to=[0, 1, 0, 1]) == [[0, 2], [1, 3]]


def test_place_counts_up_to_the_highest_index_even_where_indices_are_missing() -> None:
    check(
        {"mesh": {"pp": 2}, "rules": [{"match": "*"}], "place": [{"match": "l.{i}.*", "axis": "pp"}]},
        {"l.1.w": counted(1), "l.3.w": counted(1, first=5)},
        {"l.1.w": [[0], None], "l.3.w": [None, [5]]},
    )


def test_place_at_counts_from_the_end_if_negative_and_others_are_everywhere() -> None:
    check(
        {"mesh": {"pp": 3}, "rules": [{"match": "*"}], "place": [{"match": ["h", "x.*"], "axis": "pp", "at": -1}]},
        {"h": counted(1), "n": counted(1)},
        {"h": [None, None, [0]], "n": [[0], [0], [0]]},
    )


def test_place_on_folded_axes_first_is_outermost() -> None:
    check(
        {
            "mesh": {"dp": 2, "tp": 2},
            "rules": [{"match": "*"}],
            "place": [{"match": "e.{i}", "axis": ["tp", "dp"]}],
        },
        {f"e.{i}": counted(1, first=i) for i in range(4)},
        {
            "e.0": [[0], None, None, None],
            "e.1": [None, None, [1], None],
            "e.2": [None, [2], None, None],
            "e.3": [None, None, None, [3]],
        },
    )


def test_every_matching_place_applies() -> None:
    check(
        {
            "mesh": {"pp": 2, "ep": 2},
            "rules": [{"match": "*"}],
            "place": [{"match": "l.{i}.*", "axis": "pp"}, {"match": "*.e.{i}", "axis": "ep"}],
        },
        {"l.0.e.1": counted(1), "l.1.e.0": counted(1, first=5)},
        {"l.0.e.1": [None, [0], None, None], "l.1.e.0": [None, None, [5], None]},
    )


def test_optimizer_state_follows_rule_and_place_of_the_longest_parameter_that_fits() -> None:
    check(
        {
            "mesh": {"pp": 2, "tp": 2},
            "rules": [{"match": "l.w", "cut": ["tp"]}, {"match": "*"}],
            "place": [{"match": "l.w", "axis": "pp", "at": 1}],
        },
        {"w": counted(2), "l.w": counted(2, first=2), "m.l.w": counted(2, first=4), "m.w": counted(2, first=6)},
        {
            "w": [[0, 1]] * 4,
            "l.w": [None, None, [2], [3]],
            "m.l.w": [None, None, [4], [5]],
            "m.w": [[6, 7]] * 4,
        },
        optimizer_keys=("m.l.w", "m.w"),
    )


def test_optimizer_state_of_another_shape_is_whole_where_its_parameter_is() -> None:
    check(
        {
            "mesh": {"pp": 2, "tp": 2},
            "rules": [{"match": "*", "cut": ["tp"]}],
            "place": [{"match": "w", "axis": "pp", "at": 0}],
            "optimizer": {"add": {0: ["tp"]}},
        },
        {"w": counted(2), "step.w": counted(4)},
        {"w": [[0], [1], None, None], "step.w": [[0, 1, 2, 3], [0, 1, 2, 3], None, None]},
        optimizer_keys=("step.w",),
    )


def test_optimizer_tensor_without_parameter_sees_its_own_key() -> None:
    check(
        {"mesh": {"tp": 2}, "rules": [{"match": "count", "cut": ["tp"]}, {"match": "w"}]},
        {"w": counted(2), "count": counted(2)},
        {"w": [[0, 1]] * 2, "count": [[0], [1]]},
        optimizer_keys=("count",),
    )


def test_optimizer_add_cuts_innermost() -> None:
    check(
        {"mesh": {"dp": 2, "tp": 2}, "rules": [{"match": "*", "cut": ["tp"]}], "optimizer": {"add": {0: ["dp"]}}},
        {"w": counted(4), "m.w": counted(4)},
        {"w": [[0, 1], [2, 3], [0, 1], [2, 3]], "m.w": [[0], [2], [1], [3]]},
        optimizer_keys=("m.w",),
    )


def test_optimizer_add_cuts_inside_each_block() -> None:
    check(
        {
            "mesh": {"dp": 2, "tp": 2},
            "rules": [{"match": "*", "cut": ["tp"], "blocks": {0: [4, {"size": 1, "cut": None}, 4]}}],
            "optimizer": {"add": {0: ["dp"]}},
        },
        {"w": counted(9), "m.w": counted(9)},
        {
            "w": [[0, 1, 4, 5, 6], [2, 3, 4, 7, 8], [0, 1, 4, 5, 6], [2, 3, 4, 7, 8]],
            "m.w": [[0, 4, 5], [2, 4, 7], [1, 4, 6], [3, 4, 8]],
        },
        optimizer_keys=("m.w",),
    )


def test_optimizer_add_keeps_the_cut_of_a_dim_that_does_not_divide() -> None:
    check(
        {"mesh": {"dp": 2, "tp": 2}, "rules": [{"match": "*", "cut": ["tp"]}], "optimizer": {"add": {0: ["dp"]}}},
        {"w": counted(6), "m.w": counted(6)},
        {"w": [[0, 1, 2], [3, 4, 5]] * 2, "m.w": [[0, 1, 2], [3, 4, 5]] * 2},
        optimizer_keys=("m.w",),
    )


def test_optimizer_flat_flattens_the_block_of_the_parameter() -> None:
    check(
        {"mesh": {"dp": 2, "tp": 2}, "rules": [{"match": "*", "cut": ["tp"]}], "optimizer": {"flat": ["dp"]}},
        {"w": counted(2, 3), "m.w": counted(2, 3)},
        {"w": [[[0, 1, 2]], [[3, 4, 5]]] * 2, "m.w": [[0, 1], [3, 4], [2, 0], [5, 0]]},
        optimizer_keys=("m.w",),
    )


def test_optimizer_states_of_joined_parameters_are_joined_by_slot_in_the_order_of_the_parameters() -> None:
    check(
        {"mesh": {"dp": 2}, "rules": [{"match": ["b", "a"], "flat": {"axes": ["dp"], "join": "j"}}]},
        {
            "a": counted(1, first=1),
            "b": counted(2, first=2),
            "m.a": counted(1, first=4),
            "v.b": counted(2, first=5),
            "m.b": counted(2, first=7),
            "step.a": counted(1, 1, first=9),
        },
        {"j": [[2, 3], [1, 0]], "m.j": [[7, 8], [4, 0]], "v.j": [[5], [6]], "step.a": [[[9]]] * 2},
        optimizer_keys=("m.a", "v.b", "m.b", "step.a"),
    )


def test_zero_dims_are_never_cut_and_empty_tensors_stay_empty() -> None:
    one({"cut": ["tp"], "flat": ["dp"]}, {"dp": 2, "tp": 2}, counted(), [0] * 4)
    one({"cut": ["tp"]}, {"tp": 2}, counted(0), [[], []])
    one({"cut": [None, "tp"]}, {"tp": 2}, counted(2, 0), [[[], []], [[], []]])
    one({"cut": ["tp"], "uneven": "ceil"}, {"tp": 2}, counted(1, 2), [[[0, 1]], []])
    one({"flat": ["dp"]}, {"dp": 2}, counted(0, 3), [[], []])


def test_globs_match_the_whole_key_dots_included() -> None:
    assert captures("*.w", "a.b.w") == ""
    assert captures("a.?", "a.b") == ""
    assert captures("a.?", "a.bc") is None
    assert captures("a", "ab") is None
    assert captures("a.b", "axb") is None
    assert captures("[ab]", "a") is None
    assert captures("re:a|b", "b") == ""
    assert captures("re:a", "ab") is None
    assert captures("l.{i}.*", "l.12.w") == 12
    assert captures("l.{i}.*", "l.x.w") is None


def test_natural_order() -> None:
    assert sorted(["l.10.b", "l.9.b", "k", "l.9.a", "l"], key=natural) == ["k", "l", "l.9.a", "l.9.b", "l.10.b"]


def test_rules_are_tried_in_order() -> None:
    check(
        {"mesh": {"tp": 2}, "rules": [{"match": ["a", "c"]}, {"match": "re:[ab]", "cut": ["tp"]}, {"match": "*"}]},
        {"a": counted(2), "b": counted(2), "c": counted(2)},
        {"a": [[0, 1]] * 2, "b": [[0], [1]], "c": [[0, 1]] * 2},
    )


def test_element_numbers_mark_padding_and_assemble_inverts() -> None:
    mapping = {
        "mesh": {"dp": 2},
        "rules": [{"match": ["a", "c"], "flat": {"axes": ["dp"], "join": "j"}}, {"match": "b", "cut": [None, "dp"]}],
    }
    shapes = {"a": (3,), "b": (1, 2), "c": ()}
    numbers = {rank: {k: v.tolist() for k, v in element_numbers(mapping, shapes, rank).items()} for rank in range(2)}
    assert numbers == {0: {"j": [1, 2], "b": [[4]]}, 1: {"j": [3, 6], "b": [[5]]}}
    tensors = {"a": counted(3).astype(np.int16), "b": counted(1, 2).astype(np.int16), "c": np.array(7, np.int16)}
    pieces = {rank: local_arrays(mapping, tensors, rank) for rank in range(2)}
    whole = assemble(mapping, pieces, {k: (v.shape, v.dtype) for k, v in tensors.items()})
    assert {k: v.tolist() for k, v in whole.items()} == {k: v.tolist() for k, v in tensors.items()}


def test_element_tiles() -> None:
    mapping = {"mesh": {"dp": 2}, "rules": [{"match": "*", "flat": ["dp"]}]}
    assert element_tiles(mapping, {"w": (2, 3)}, 1, runs=True) == {"w": [("w", (3,), [((1, 0), (1, 3), 0, (1, 1))])]}
    assert element_tiles(mapping, {"w": (5,)}, 1, runs=False) == {
        "w": [("w", (3,), [((3,), (1,), 0, (1,)), ((4,), (1,), 1, (1,))])]
    }
    assert element_tiles(mapping, {"w": (2, 2)}, 0, runs=True) == {"w": [("w", (2,), [((0, 0), (1, 2), 0, (1, 1))])]}
    assert element_tiles(mapping, {"w": ()}, 0, runs=True) == {"w": [("w", (), [((), (), 0, ())])]}
