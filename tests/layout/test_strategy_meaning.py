"""What a strategy means for each rank, held to the original's own slices and to the rules in plain numpy."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.layout.strategy_oracle import COUNTERS, cut_out, cuts, oracle

import reshard
from reshard.errors import (
    ArgumentError,
    CheckpointNotFoundError,
    LayoutError,
    MismatchError,
    UnsupportedError,
)
from reshard.layout import DeviceCut, ModelLayout, Strategy, read_strategy, region_of
from reshard.layout.strategy_file import LayoutItem

DATA = Path(__file__).parents[1] / "data" / "mindspore"


@pytest.mark.parametrize(
    ("strategy", "slices", "full"),
    [
        ("strategy/src_strategy", "strategy/src_rank_slices", "strategy"),
        ("strategy/src_strategy_json", "strategy/src_rank_slices", "strategy"),
        ("strategy/merged/src_merged_strategy.ckpt", "strategy/src_rank_slices_dedup", "strategy"),
        ("strategy/dst_strategy", "strategy/expected_dst_slices", "strategy"),
        ("strategy/merged/dst_merged_strategy.ckpt", "strategy/split_unified", "strategy"),
        ("strategy_py/src_strategy", "strategy_py/src_rank_slices", "strategy_py"),
        ("strategy_py/merged/merged_ckpt_strategy.ckpt", "strategy_py/src_rank_slices", "strategy_py"),
    ],
)
def test_every_slice_of_the_original_lies_where_it_is_said(strategy: str, slices: str, full: str) -> None:
    read = read_strategy(DATA / strategy)
    whole = reshard.load_file(DATA / full / "expected_full.safetensors")
    covered = {key: np.zeros(array.shape, bool) for key, array in whole.items()}
    for rank in range(read.world_size):
        (file,) = (DATA / slices / f"rank_{rank}").iterdir()
        own = reshard.load_file(file)
        listed = {key for key in read.keys() if rank // read.devices_per_stage in read.stages_of(key)}  # noqa: SIM118
        if "dedup" not in slices:
            assert own.keys() - COUNTERS == listed
        for key, array in own.items():
            if key in COUNTERS:
                assert region_of(read, key, rank, array.shape) == (array.shape, (0,) * array.ndim)
                continue
            region = region_of(read, key, rank, array.shape)
            assert region is not None
            shape, offset = region
            assert shape == whole[key].shape
            assert array.dtype == whole[key].dtype
            assert np.array_equal(cut_out(whole[key], offset, array.shape), array)
            cut_out(covered[key], offset, array.shape)[...] = True
        for key in set(whole) - listed:
            assert region_of(read, key, rank, (1,)) is None
    assert all(array.all() for array in covered.values())


@pytest.mark.parametrize("root", ["ckpt2/checkpoint/iteration_00000005", "ckpt2_named/checkpoint/iteration_00000007"])
def test_cuts_count_parts_as_metadata_json_does(root: str) -> None:
    """Its layouts come from the original's own builder: nested where the optimizer shares a slice further."""
    metadata = json.loads((DATA / root / "metadata.json").read_text())
    nested = 0
    for key, tensor in metadata["state_dict_metadata"].items():
        layout = tensor["layout"]
        if layout is None:
            continue
        maps = [axes if isinstance(axes, list) else [axes] for axes in layout["tensor_map"]]
        nested += any(len(axes) > 1 for axes in maps)
        cut = DeviceCut(tuple(layout["device_matrix"]), tuple(tuple(v for v in axes if v >= 0) for axes in maps))
        assert list(cut.parts()) == tensor["axis_fragmentations"]
        stage = min(layout["rank_list"])
        for number in range(math.prod(cut.parts())):
            for holder in metadata["storage_data"][str((key, (number,)))]:
                rank = holder["storage_rank"]
                if rank in layout["rank_list"]:  # a tensor of two stages
                    assert np.ravel_multi_index(cut.part_of(rank - stage), cut.parts()) == number
    assert nested or "named" in root


@pytest.mark.slow(disk=False)
def test_every_rank_has_what_the_rules_say() -> None:
    checked = 0

    @settings(max_examples=250)
    @given(cuts(), st.integers(0, 2))
    def check(cut: tuple[LayoutItem, tuple[int, ...]], before: int) -> None:
        nonlocal checked
        item, shape = cut
        n = math.prod(item.dev_matrix)
        other = LayoutItem((n,), ((-1,),))
        strategy = Strategy({**{stage: {f"x{stage}": other} for stage in range(before)}, before: {"w": item}})
        whole = np.arange(math.prod(shape)).reshape(shape)
        for position, expected in enumerate(oracle(item, shape)):
            try:
                region = region_of(strategy, "w", before * n + position, expected.shape)
            except UnsupportedError:
                assert math.prod(item.dev_matrix) % 3 == 0, "powers of two can always be shared"
                return
            assert region is not None
            assert region[0] == shape
            assert np.array_equal(cut_out(whole, region[1], expected.shape), expected)
            if before:
                assert region_of(strategy, "w", position, expected.shape) is None
        checked += 1

    check()
    assert checked > 200


@pytest.mark.parametrize(
    ("matrix", "tensor_map", "share", "step"),
    [
        ((3, 2), (-1, -1), 3, 1),
        ((3, 1, 2), (1, -1), 3, 1),  # an axis of one device between them, even if it is named
        ((4, 3, 2), (-1, 0), 6, 2),
        ((2, 3, 2), (2, -1), 3, 1),
        ((2, 2, 3, 2), (0, 3), 2, 2),
    ],
)
def test_neighbouring_free_axes_are_shared_as_one(
    matrix: tuple[int, ...], tensor_map: tuple[int, ...], share: int, step: int
) -> None:
    """A share need not be a product of the axes' sizes: the number of the holder counts over all of them."""
    item = LayoutItem(matrix, (tensor_map,), opt_weight_shard_size=share, opt_weight_shard_step=step)
    strategy = Strategy({0: {"w": item}})
    whole = np.arange(24 * 4).reshape(24, 4)
    layout = ModelLayout.from_strategy(strategy).bind({"w": (24, 4)}).layouts["w"]
    for rank, expected in enumerate(oracle(item, whole.shape)):
        region = region_of(strategy, "w", rank, expected.shape)
        assert region is not None
        assert np.array_equal(cut_out(whole, region[1], expected.shape), expected)
        ((offset, local, _, _),) = layout.tiles(rank)
        assert (offset, local) == (region[1], expected.shape)


@settings(max_examples=60)
@given(st.data())
def test_uneven_rows(data: st.DataObject) -> None:
    matrix = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    v = data.draw(st.integers(0, len(matrix) - 1))
    n = matrix[len(matrix) - 1 - v]
    rows = tuple(data.draw(st.lists(st.integers(0, 5), min_size=n, max_size=n)))
    item = LayoutItem(matrix, ((v, -1),), rows, tuple(range(n)))
    strategy = Strategy({0: {"table": item}})
    whole = np.arange(sum(rows) * 2).reshape(-1, 2)
    parts = np.split(whole, np.cumsum(rows)[:-1])
    for rank in range(math.prod(matrix)):
        part = parts[int(np.unravel_index(rank, matrix)[len(matrix) - 1 - v])]
        region = region_of(strategy, "table", rank, part.shape)
        assert region is not None
        assert region[0] == whole.shape
        assert np.array_equal(cut_out(whole, region[1], part.shape), part)
        with pytest.raises(MismatchError, match="does not fit"):
            region_of(strategy, "table", rank, (len(part) + 1, 2))


ONE_OF_TWO = LayoutItem((2, 2), ((0, -1),))


@pytest.mark.parametrize(
    ("item", "shapes"),
    [
        # A lone list is one entry a dim, or all axes of the one dim there is.
        (LayoutItem((2, 3), ((1, 0),)), {(4, 5): (8, 15), (4,): (24,)}),
        (LayoutItem((2, 3), ((-1, 0),)), {(4, 5): (4, 15), (4,): None}),
        # The Python writer's shape, or rows: as long as both, what the array fits.
        (LayoutItem((2,), ((0, -1),), (8, 4)), {(4, 4): (8, 4), (8, 3): (12, 3), (5, 4): None}),
        (LayoutItem((2,), ((0, -1),), (8, 4), (0, 8)), {(8, 3): (12, 3), (4, 4): None}),
        (LayoutItem((2,), ((0, -1, -1),), (8, 4)), {(8, 3, 1): (12, 3, 1), (4, 4, 1): None}),
        (LayoutItem((2,), ((0, -1, -1),), (8, 4, 5)), {(4, 4, 5): (8, 4, 5), (4, 4, 4): None}),
        # Nothing is cut: whatever the array is, it is whole.
        (LayoutItem((2, 1), ((0, -1),)), {(): (), (3,): (3,), (2, 3, 4): (2, 3, 4)}),
        (LayoutItem((2,), ()), {(): (), (3,): (3,)}),
        # Empty lists count for nothing, unless they could be dims.
        (LayoutItem((2, 3), ((1,), (), (0,))), {(4, 5): (8, 15), (4, 5, 6): UnsupportedError}),
        (LayoutItem((2, 3), ((), (1, 0))), {(4, 5): UnsupportedError, (4,): (24,)}),
    ],
)
def test_the_tensor_settles_what_is_open(item: LayoutItem, shapes: dict[tuple[int, ...], Any]) -> None:
    strategy = Strategy({0: {"w": item}})
    for local, expected in shapes.items():
        if isinstance(expected, tuple):
            assert region_of(strategy, "w", 0, local) == (expected, (0,) * len(local))
        else:
            with pytest.raises(expected or MismatchError) as caught:
                region_of(strategy, "w", 0, local)
            assert caught.value.key == "w"


@pytest.mark.parametrize(
    ("item", "local", "message"),
    [
        (LayoutItem((2, 2), ((0, -1),), field=3), (4, 4), "a table divided by field groups (field 3)"),
        (LayoutItem((2, 2), ((0, -1),), (1, 2, 3)), (4, 4), "neither a shape of 2 dims nor the rows of its 2 parts"),
        (
            LayoutItem((2, 2), ((0, -1),), (3, 5), (0, 3), opt_weight_shard_size=2, opt_weight_shard_step=2),
            (4, 4),
            "rows that are shared further",
        ),
        (LayoutItem((2, 2), ((0, -1),), opt_weight_shard_size=2, opt_weight_shard_step=1), (4, 4), "1 apart, while"),
        (
            LayoutItem((2, 2), ((0, -1),), opt_weight_shard_size=4, opt_weight_shard_step=2),
            (4, 4),
            "4 ranks, while 2 hold",
        ),
        (
            LayoutItem((2, 3), ((-1, -1),), opt_weight_shard_size=4, opt_weight_shard_step=1),
            (4, 4),
            "4 ranks, while 6 hold",
        ),
        (
            LayoutItem((4, 2, 3), ((1, -1),), opt_weight_shard_size=2, opt_weight_shard_step=1),
            (4, 4),
            "no run of the device",
        ),
        (LayoutItem((2,), ((),), opt_weight_shard_size=2, opt_weight_shard_step=1), (), "has no dims, and is shared"),
    ],
)
def test_what_is_not_known_is_refused(item: LayoutItem, local: tuple[int, ...], message: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        region_of(Strategy({0: {"w": item}}, source="s.ckpt"), "w", 0, local)
    assert message in caught.value.message
    assert caught.value.key == "w"
    assert "s.ckpt" in str(caught.value)


def test_ranks_and_stages() -> None:
    strategy = Strategy({0: {"a": ONE_OF_TWO, "t": ONE_OF_TWO}, 1: {}, 2: {"t": LayoutItem((4,), ((0, -1),))}})
    assert (strategy.n_stages, strategy.devices_per_stage, strategy.world_size) == (3, 4, 12)
    assert strategy.stages_of("t") == (0, 2)
    assert strategy.stages_of("other") == ()
    assert region_of(strategy, "t", 1, (2, 2)) == ((4, 2), (2, 0))  # each stage by its own record
    assert region_of(strategy, "t", 5, (2, 2)) is None
    assert region_of(strategy, "t", 9, (2, 2)) == ((8, 2), (2, 0))
    assert region_of(strategy, "other", 5, (2, 2)) == ((2, 2), (0, 0))
    assert strategy.cut_of("t", 5, 2) is None
    assert strategy.cut_of("t", 9, 2) == DeviceCut((4,), ((0,), ()))
    for rank in (-1, 12):
        with pytest.raises(ArgumentError, match=f"no rank {rank}: 3 stages of 4 devices"):
            region_of(strategy, "t", rank, (2, 2))
    with pytest.raises(MismatchError, match="cuts 2 dims of `t`, which has 3"):
        region_of(strategy, "t", 0, (2, 2, 2))
    with pytest.raises(MismatchError, match=r"shape \(3, 2\)"):
        strategy.cut_of("t", 0, 2, (3, 2))


def test_stages_that_do_not_make_one_strategy() -> None:
    with pytest.raises(CheckpointNotFoundError, match="no strategy of stage 0, 2; its last stage is 3"):
        Strategy({1: {"a": ONE_OF_TWO}, 3: {"a": ONE_OF_TWO}})
    with pytest.raises(LayoutError, match="one number of devices"):
        Strategy({0: {"a": ONE_OF_TWO}, 1: {"a": LayoutItem((2,), ((0, -1),))}})
    with pytest.raises(LayoutError, match="no parameter at all"):
        Strategy({})
