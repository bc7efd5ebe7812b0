"""Tiles in factored dims: what is read of them is what numpy reads of the reshaped tensor, and nonsense is refused."""

from __future__ import annotations

import itertools
import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tests.helpers.oracle import local_arrays, mesh_ranks
from tests.helpers.plans import bind, loaded
from tests.helpers.strategies import Checkpoint, cases, layouts

from reshard._core import Index, Request, StoredArray, Tile
from reshard.errors import ArgumentError, CoverageError, DamagedFileError, ReshardError, UnsupportedError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tests.helpers.strategies import Draw

    Array = NDArray[Any]

Box = tuple[slice, ...]


@st.composite
def factored_shapes(draw: Draw) -> list[list[int]]:
    """The factors of each dim."""
    factors = st.lists(st.integers(1, 5), min_size=1, max_size=3)
    dims: list[list[int]] = draw(st.lists(factors, min_size=1, max_size=3))
    return dims if math.prod(map(math.prod, dims)) <= 3000 else dims[:1]


@st.composite
def cells(draw: Draw, shape: tuple[int, ...]) -> list[Box]:
    """A grid over a shape."""
    sides = []
    for extent in shape:
        cuts = draw(st.lists(st.integers(0, extent), max_size=2))
        bounds = sorted({0, extent, *cuts})
        sides.append([slice(*pair) for pair in itertools.pairwise(bounds)])
    return list(itertools.product(*sides))


def stored_cell(cell: Array, order: list[int], lead: int) -> tuple[Array, int, tuple[int, ...]]:
    """A flat array that holds a cell in storage order behind some other elements; where it begins, and its strides."""
    ready = np.ascontiguousarray(cell.transpose(order))
    strides = [0] * cell.ndim
    for at, dim in enumerate(order):
        strides[dim] = ready.strides[at] // ready.itemsize
    return np.concatenate([np.full(lead, -1), ready.ravel()]), lead, tuple(strides)


def box_around(numbers: Array, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The smallest box that holds elements, which are told by their row-major numbers."""
    indices = np.array(np.unravel_index(numbers.ravel(), shape)).reshape(len(shape), -1)
    low, high = indices.min(axis=1), indices.max(axis=1)
    return tuple(low.tolist()), tuple((high - low + 1).tolist())


def read(index: Index, key: str, box: Box, shape: tuple[int, ...]) -> Array:
    request = Request()
    starts, stops, _ = zip(*(one.indices(extent) for one, extent in zip(box, shape, strict=True)), strict=True)
    extents = [stop - start for start, stop in zip(starts, stops, strict=True)]
    request.add_region("found", key, starts, extents)
    return np.frombuffer(loaded(index.plan(request))["found"], np.int64).reshape(extents)


@pytest.mark.slow
@cases(150)
@given(st.data())
def test_factored_tiles_are_read_like_a_reshaped_array(data: st.DataObject) -> None:
    dims = data.draw(factored_shapes())
    shape, inner = tuple(map(math.prod, dims)), tuple(itertools.chain(*dims))
    whole = np.random.default_rng(0).integers(0, 2**60, shape)
    numbers = np.arange(whole.size).reshape(inner)
    factors = {dim: own for dim, own in enumerate(dims) if len(own) > 1 or data.draw(st.booleans())}
    boxes = data.draw(cells(inner))
    stored, arrays, expected_shards = [], {}, []
    for n, box in enumerate(boxes):
        order = list(data.draw(st.permutations(range(len(inner)))))
        array, lead, strides = stored_cell(whole.reshape(inner)[box], order, data.draw(st.integers(0, 2)))
        extents = tuple(one.stop - one.start for one in box)
        tile = Tile(tuple(one.start for one in box), extents, lead, strides)
        arrays[f"cell{n}"] = array
        stored.append(StoredArray(0, f"cell{n}", array.shape, [tile]))
        expected_shards.append((*box_around(numbers[box], shape), [0]))
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "cells.safetensors"
        save_file(arrays, path)
        index = Index()
        index.add_file(str(path))
        index.add_tiles("w", "I64", shape, stored, factors=factors)
        index.add_tiles("again", "I64", shape, index.stored("w"))
        assert index.check() == []
        holed = Index()
        holed.add_file(str(path))
        holed.add_tiles("w", "I64", shape, stored[:-1], factors=factors)
        with pytest.raises(CoverageError):
            holed.check_coverage()
        assert index.shape("w") == shape
        assert sorted(index.shards("w")) == sorted(expected_shards)
        for _ in range(3):
            ends = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in shape]
            box = tuple(slice(*pair) for pair in ends)
            assert (read(index, "w", box, shape) == whole[box]).all()
            assert (read(index, "again", box, shape) == whole[box]).all()
            if np.isin(numbers.reshape(shape)[box], numbers[boxes[-1]]).any():
                with pytest.raises(CoverageError):
                    read(holed, "w", box, shape)
            else:
                assert (read(holed, "w", box, shape) == whole[box]).all()
        checkpoint = Checkpoint({"w": whole})
        mapping = data.draw(layouts(checkpoint, max_ranks=6))
        bound = bind(checkpoint, mapping)
        for rank in mesh_ranks(mapping):
            expected = local_arrays(mapping, {"w": whole}, rank)
            if "w" in expected:
                request = Request()
                request.add("w", "w", bound.layouts["w"], rank)
                assert loaded(index.plan(request))["w"] == expected["w"].tobytes()


# -- arguments that mean nothing

ROWS = [
    Tile((0, 0), (3, 1), 0, (1, 1)),
    Tile((0, 1), (3, 1), 3, (1, 1)),
]  # of two arrays in turns, which lie one after the other


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ({0: (2, 2)}, r"factors \(2, 2\) of dim 0: expected positive numbers with the product 6"),
        ({0: (6, 0)}, r"factors \(6, 0\) of dim 0"),
        ({0: (0, 0)}, r"factors \(0, 0\) of dim 0"),
        ({0: ()}, r"factors \(\) of dim 0"),
        ({0: (1 << 63, 2)}, "with the product 6"),
        ({0: (1 << 33, 1 << 31, 6)}, "with the product 6"),
        ({0: (2**63 + 3, 2)}, "with the product 6"),  # 6 if it wrapped around
        ({1: (3, 2)}, r"factors of dim 1: the shape \(6,\) has no such dim"),
        ({0: (3, 2), 9: (1,)}, r"factors of dim 9: the shape \(6,\) has no such dim"),
        ({0: (3, 2, *(1,) * 8)}, "add more than 8 dims"),
        ({0: (1,) * 100_000}, "add more than 8 dims"),
        ({0: (2, 3)}, r"a tile of offset \(0, 0\) shape \(3, 1\) is outside the shape \(2, 3\)"),
        ({0: (3, 2, 1)}, r"is outside the shape \(3, 2, 1\)"),
        ({}, r"is outside the shape \(6,\)"),
    ],
)
def test_factors_that_do_not_fit(factors: dict[int, tuple[int, ...]], message: str) -> None:
    index = Index()
    index.add_file("not opened")
    with pytest.raises((ArgumentError, DamagedFileError), match=message) as raised:
        index.add_tiles("w", "U8", (6,), [StoredArray(0, "w", (6,), ROWS)], factors=factors)
    assert raised.value.key == "w"
    for wrong in ({0: (3, -2)}, {-1: (3, 2)}, {0: (1 << 64, 1)}, {0: 6}, {"0": (3, 2)}, [(0, (3, 2))]):
        with pytest.raises((ReshardError, OverflowError, TypeError)):
            index.add_tiles("w", "U8", (6,), [StoredArray(0, "w", (6,), ROWS)], factors=wrong)  # type: ignore[arg-type]
    index.add_tiles("w", "U8", (6,), [StoredArray(0, "w", (6,), ROWS)], factors={0: (3, 2)})
    assert index.shards("w") == [((0,), (5,), [0]), ((1,), (5,), [0])]


def test_what_is_too_much_is_not_told_one_by_one() -> None:
    n = 1 << 40
    index = Index()
    index.add_file("not opened")
    halves = [Tile((0, k), (n, 1), k * n, (1, 1)) for k in (0, 1)]
    index.add_tiles("w", "U8", (2 * n,), [StoredArray(0, "w", (2 * n,), halves)], factors={0: (n, 2)})
    index.check_coverage()
    assert index.shards("w") == [((k,), (2 * n - 1,), [0]) for k in (0, 1)]
    with pytest.raises(UnsupportedError, match=f"`w` consists of {2 * n} runs of interleaved rows"):
        index.stored("w")


def test_a_hole_is_named_in_the_dims_of_the_tensor() -> None:
    index = Index()
    index.add_file("not opened")
    rows = [Tile((0, 1, 0), (3, 1, 4), 0, (4, 1, 1)), Tile((0, 0, 0), (2, 1, 4), 12, (4, 1, 1))]
    index.add_tiles("w", "U8", (6, 4), [StoredArray(0, "w", (6, 4), rows)], factors={0: (3, 2)})
    with pytest.raises(CoverageError, match=r"`w` leave offset \(4, 0\) shape \(1, 4\) uncovered"):
        index.check_coverage()


def test_tiles_that_overlap_in_factored_dims_are_refused() -> None:
    index = Index()
    index.add_file("not opened")
    with pytest.raises(CoverageError, match="are not replicas of each other"):
        index.add_tiles(
            "w",
            "U8",
            (6,),
            [StoredArray(0, "w", (6,), [ROWS[0], Tile((1, 0), (1, 2), 3, (1, 1))])],
            factors={0: (3, 2)},
        )
