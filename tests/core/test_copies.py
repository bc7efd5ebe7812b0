"""Stored arrays that are read as copies of each other: the core finds the first one that differs."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reshard
from reshard import _core
from reshard.errors import DamagedFileError, MismatchError, UnsupportedError
from reshard.formats.rank_replicas import HeldArray

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = (4, 6, 5)
N_FILES = 3


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> _core.Index:
    """Files with an array of zeros and ones each, in both formats."""
    folder = tmp_path_factory.mktemp("copies")
    made = _core.Index()
    for number in range(N_FILES):
        reshard.save_file({"w": values(number)}, folder / f"{number}.safetensors")
        made.add_file(str(folder / f"{number}.safetensors"))
    for number in range(N_FILES):
        torch.save({"w": torch.from_numpy(values(number))}, folder / f"{number}.pt")
        made.add_torch_file(str(folder / f"{number}.pt"))
    return made


def values(number: int) -> np.ndarray:
    """Mostly zeros, so that parts are often equal."""
    return (np.random.default_rng(number).random(SHAPE) < 0.02).astype(np.int16)


@st.composite
def groups(draw: st.DrawFn) -> list[list[HeldArray]]:
    """Parts of the arrays, each with its own first element and strides."""
    found = []
    for _ in range(draw(st.integers(0, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        group = []
        for rank in range(draw(st.integers(0, 4))):
            strides = tuple(draw(st.integers(0, 8)) for _ in shape)
            row_major = draw(st.booleans())
            used = tuple(int(np.prod(shape[dim + 1 :])) for dim in range(len(shape))) if row_major else strides
            last = sum((n - 1) * stride for n, stride in zip(shape, used, strict=True)) if 0 not in shape else 0
            start = draw(st.integers(0, int(np.prod(SHAPE)) - 1 - last)) if last < np.prod(SHAPE) else 0
            file = draw(st.integers(0, 2 * N_FILES - 1))
            group.append(HeldArray(rank, file, "w", SHAPE, start, shape, "I16", None if row_major else strides))
        found.append(group)
    return found


def elements(one: HeldArray) -> np.ndarray:
    strides = one.strides or [int(np.prod(one.shape[dim + 1 :])) for dim in range(len(one.shape))]
    places = itertools.product(*map(range, one.shape))
    flat = values(one.file % N_FILES).reshape(-1)
    return np.array([flat[one.start + int(np.dot(place, strides))] for place in places])


@given(groups())
def test_the_first_part_that_differs(index: _core.Index, groups: list[list[HeldArray]]) -> None:
    found = (
        (n, number)
        for n, group in enumerate(groups)
        for number, one in enumerate(group)
        if not np.array_equal(elements(one), elements(group[0]))
    )
    assert index.first_different(groups) == next(found, None)


def test_strides_of_the_file(tmp_path: Path) -> None:
    """A tensor that is stored with strides of its own is compared by its elements."""
    plain = torch.arange(12.0).reshape(3, 4)
    changed = plain.clone()
    changed[2, 1] = 0
    index = _core.Index()
    for number, tensor in enumerate((plain, plain.T.contiguous().T, changed.T.contiguous().T)):
        torch.save({"w": tensor}, tmp_path / f"{number}.pt")
        index.add_torch_file(str(tmp_path / f"{number}.pt"))
    one, other, third = (HeldArray(rank, rank, "w", (3, 4), 0, (3, 4), "F32") for rank in range(3))
    assert index.first_different([[one, other]]) is None
    assert index.first_different([[one, other], [one, other, third]]) == (1, 2)
    with pytest.raises(UnsupportedError, match="strides of its own"):
        index.first_different([[one, other._replace(start=4, shape=(2, 4))]])


def test_large_and_many_parts(tmp_path: Path) -> None:
    """Parts that are larger than what is read at once, and more of them."""
    large = np.zeros(3 << 20, np.int16)
    many = np.zeros(20_000, np.int16)
    index = _core.Index()
    for number in range(3):
        if number == 2:
            large[-1] = many[17_001] = 1
        reshard.save_file({"large": large, "many": many}, tmp_path / f"{number}.safetensors")
        index.add_file(str(tmp_path / f"{number}.safetensors"))

    def group(name: str, array: np.ndarray, start: int, n: int, files: tuple[int, ...]) -> list[HeldArray]:
        return [HeldArray(file, file, name, array.shape, start, (n,), "I16") for file in files]

    equal = [group("many", many, n, 1, (0, 1)) for n in range(many.size)]
    assert index.first_different([*equal, group("large", large, 0, large.size, (0, 1))]) is None
    assert index.first_different([*equal, group("large", large, 0, large.size, (0, 1, 2))]) == (many.size, 2)
    others = [group("many", many, n, 1, (1, 0, 2)) for n in range(many.size)]
    assert index.first_different(others) == (17_001, 2)


def test_what_is_no_part(tmp_path: Path) -> None:
    reshard.save_file({"w": np.zeros((3, 4), np.float32)}, tmp_path / "a.safetensors")
    index = _core.Index()
    index.add_file(str(tmp_path / "a.safetensors"))
    whole = HeldArray(0, 0, "w", (3, 4), 0, (3, 4), "F32")
    assert index.first_different([[], [whole], [whole, whole]]) is None
    with pytest.raises(DamagedFileError, match="outside"):
        index.first_different([[whole, whole._replace(start=1)]])
    with pytest.raises(DamagedFileError, match="outside"):
        index.first_different([[whole, whole._replace(strides=(4,))]])
    with pytest.raises(DamagedFileError, match="does not hold"):
        index.first_different([[whole, whole._replace(stored="v")]])
    with pytest.raises(MismatchError, match=r"expected F64 \(3, 4\), found F32"):
        index.first_different([[whole._replace(dtype="F64"), whole]])
