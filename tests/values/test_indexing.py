"""Regions of indices against numpy itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from reshard.errors import ReshardError
from reshard.values.indexing import TensorIndexError, as_integer, normalize_index


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)


def take(index: object, array: np.ndarray) -> np.ndarray:
    """Read the region only, then apply the rest."""
    offset, shape, post = normalize_index(index, array.shape)
    assert len(offset) == len(shape) == array.ndim
    for first, n_elements, n in zip(offset, shape, array.shape, strict=True):
        assert 0 <= first <= first + n_elements <= n
    region = array[tuple(slice(first, first + n) for first, n in zip(offset, shape, strict=True))]
    assert region.shape == shape
    return region[post]


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], Any]:
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=7))
    free = hnp.basic_indices(shape, allow_ellipsis=True, allow_newaxis=True, max_dims=8)
    # hypothesis keeps its slices inside the dims; ours also start and stop outside.
    bound = st.none() | st.integers(-9, 9)
    wild = st.tuples(*(st.builds(slice, bound, bound, st.sampled_from([None, 1, 2, 3, -1, -2, -3])) for _ in shape))
    return shape, draw(free | wild)


@pytest.mark.slow
@settings(max_examples=1000)
@given(cases())
def test_a_region_and_its_rest_are_what_numpy_takes(case: tuple[tuple[int, ...], Any]) -> None:
    shape, index = case
    array = numbered(shape)
    expected = array[index]
    got = take(index, array)
    assert isinstance(got, np.ndarray)
    assert got.shape == expected.shape
    np.testing.assert_array_equal(got, expected)


@pytest.mark.slow
@settings(max_examples=300)
@given(cases())
def test_a_region_is_the_smallest_one(case: tuple[tuple[int, ...], Any]) -> None:
    shape, index = case
    extent = normalize_index(index, shape).shape
    wanted = [positions[index] for positions in np.indices(shape)]
    if 0 in np.zeros(shape)[index].shape or 0 in shape:
        assert 0 in extent
    else:
        assert extent == tuple(int(positions.max() - positions.min()) + 1 for positions in wanted)


@pytest.mark.parametrize(
    ("index", "shape", "offset", "region"),
    [
        ((), (4, 6), (0, 0), (4, 6)),
        ((), (), (), ()),
        (Ellipsis, (), (), ()),
        (2, (4, 6), (2, 0), (1, 6)),
        (-1, (4, 6), (3, 0), (1, 6)),
        ((slice(1, 3), slice(2, 4)), (4, 6), (1, 2), (2, 2)),
        ((Ellipsis, slice(0, 2)), (4, 6), (0, 0), (4, 2)),
        (slice(None, None, 3), (8,), (0,), (7,)),
        (slice(None, None, -3), (8,), (1,), (7,)),
        (slice(5, 2), (8,), (5,), (0,)),
        (slice(100, 200), (8,), (8,), (0,)),
        ((None, 1), (4, 6), (1, 0), (1, 6)),
        (np.int64(3), (4,), (3,), (1,)),
        (np.array(3), (4,), (3,), (1,)),
        (slice(None, 2**70), (4,), (0,), (4,)),
    ],
)
def test_regions(index: object, shape: tuple[int, ...], offset: tuple[int, ...], region: tuple[int, ...]) -> None:
    assert normalize_index(index, shape)[:2] == (offset, region)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (4, "index 4 is out of range for dim 0 of 4 elements"),
        (-5, "index -5 is out of range"),
        ((0, 6), "for dim 1 of 6 elements"),
        (2**70, "is out of range"),
        ((0, 0, 0), "too many indices: 3 for a tensor of 2 dims"),
        ((..., 0, 0, 0), "too many indices"),
        ((..., ...), "only one"),
        (slice(None, None, 0), "slice of dim 0: slice step cannot be zero"),
        ((0, slice(1.0, 2.0)), "slice of dim 1"),
        (1.5, "type float is no index"),
        ("a", "type str is no index"),
        (True, "type bool is no index"),
        (np.bool_(True), "is no index"),
        ([0, 1], "type list is no index"),
        (np.array([0]), "type ndarray is no index"),
        (np.array(1.5), "type ndarray is no index"),
        (np.array([True, False, True, False]), "type ndarray is no index"),
        ((0, (1,)), "type tuple is no index"),
    ],
)
def test_what_is_no_basic_index_of_the_shape_is_refused(index: object, message: str) -> None:
    with pytest.raises(TensorIndexError, match=message) as caught:
        normalize_index(index, (4, 6))
    assert isinstance(caught.value, ReshardError)
    assert isinstance(caught.value, IndexError)


def test_an_empty_dim_has_no_element() -> None:
    with pytest.raises(IndexError):
        normalize_index(0, (0, 3))
    assert take(slice(None), numbered((0, 3))).shape == (0, 3)


@pytest.mark.parametrize(
    ("item", "expected"), [(3, 3), (np.int8(-1), -1), (True, None), (1.0, None), ([3], None), (None, None)]
)
def test_integers(item: object, expected: int | None) -> None:
    assert as_integer(item) == expected
