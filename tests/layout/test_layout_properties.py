"""Tiles of random layouts, painted on arrays, equal what the oracle cuts."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.oracle import element_numbers, mesh_ranks, rank_coordinates, rule_of
from tests.helpers.strategies import KINDS, Array, Checkpoint, cases, checkpoints, kinds, layouts, some_ranks

from reshard.layout import ModelLayout


def painted(numbers: Array, layout: Any, rank: int) -> tuple[Array, Array]:
    """The rank's local array with the elements of `numbers` where its tiles put them, and how often each is written."""
    local_shape = layout.local_shape(rank)
    local = np.zeros(int(np.prod(local_shape, dtype=np.int64)), numbers.dtype)
    n_writes = np.zeros_like(local)
    for offset, shape, local_offset, local_strides in layout.tiles(rank):
        assert len(offset) == len(shape) == len(local_strides) == numbers.ndim
        assert all(n > 0 and o >= 0 and o + n <= e for o, n, e in zip(offset, shape, numbers.shape, strict=True))
        for index in np.ndindex(shape):
            place = local_offset + sum(i * stride for i, stride in zip(index, local_strides, strict=True))
            assert 0 <= place < local.size
            local[place] = numbers[tuple(o + i for o, i in zip(offset, index, strict=True))]
            n_writes[place] += 1
    return local.reshape(local_shape), n_writes.reshape(local_shape)


@pytest.mark.slow
def test_tiles_of_every_rank_equal_the_oracle() -> None:
    seen: Counter[str] = Counter()

    @cases(500)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        checkpoint: Checkpoint = data.draw(checkpoints(dtypes=("U8", "BF16")))
        mapping = data.draw(layouts(checkpoint))
        seen.update(kinds(mapping))
        shapes, optimizer_keys = checkpoint.shapes, checkpoint.optimizer_keys
        bound = ModelLayout.from_mapping(mapping).bind(shapes, optimizer_keys=optimizer_keys)
        assert set(bound.layouts) == set(shapes)
        alone = {key for key in shapes if rule_of(mapping, key, shapes, optimizer_keys).join is None}
        for rank in data.draw(some_ranks(mapping, 6)):
            expected = element_numbers(mapping, shapes, rank, optimizer_keys)
            assert sorted(bound.local_names(rank)) == sorted(expected)
            first = 1
            for key, shape in shapes.items():
                numbers = np.arange(first, first + np.prod(shape, dtype=np.int64)).reshape(shape)
                first += numbers.size
                layout = bound.layouts[key]
                if key not in alone:
                    continue
                assert layout.holds(rank) == (key in expected)
                if key not in expected:
                    assert layout.tiles(rank) == []
                    continue
                local, n_writes = painted(numbers, layout, rank)
                assert local.tolist() == expected[key].tolist()
                assert n_writes.tolist() == (expected[key] > 0).astype(int).tolist()

    check()
    assert set(seen) == KINDS


@pytest.mark.slow
@cases(200)
@given(st.data())
def test_tiles_of_all_ranks_cover_every_tensor(data: st.DataObject) -> None:
    checkpoint: Checkpoint = data.draw(checkpoints(dtypes=("U8",)))
    mapping = data.draw(layouts(checkpoint))
    bound = ModelLayout.from_mapping(mapping).bind(checkpoint.shapes, optimizer_keys=checkpoint.optimizer_keys)
    for key, shape in checkpoint.shapes.items():
        layout = bound.layouts[key]
        covered = np.zeros(shape, bool)
        for rank in layout.holders():
            for offset, extent, _, _ in layout.tiles(rank):
                covered[tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))] = True
        assert covered.all()


@pytest.mark.slow(disk=False)
@cases(100)
@given(st.data())
def test_mesh_coordinates_and_holders_equal_the_oracle(data: st.DataObject) -> None:
    checkpoint: Checkpoint = data.draw(checkpoints(dtypes=("U8",)))
    mapping = data.draw(layouts(checkpoint))
    shapes, optimizer_keys = checkpoint.shapes, checkpoint.optimizer_keys
    bound = ModelLayout.from_mapping(mapping).bind(shapes, optimizer_keys=optimizer_keys)
    ranks = mesh_ranks(mapping)
    names = {rank: element_numbers(mapping, shapes, rank, optimizer_keys) for rank in ranks}
    for key in shapes:
        layout = bound.layouts[key]
        assert layout.mesh.ranks == ranks
        assert layout.mesh.n_ranks == len(ranks)
        if rule_of(mapping, key, shapes, optimizer_keys).join is None:
            assert layout.holders() == [rank for rank in ranks if key in names[rank]]
            assert [layout.mesh.coordinates(rank) for rank in ranks[:8]] == [
                rank_coordinates(mapping, rank) for rank in ranks[:8]
            ]
