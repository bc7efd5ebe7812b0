"""Arrays that are given to the core as columns: what is written, and how they are looked at."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard import _core, dtypes
from reshard.errors import ArgumentError, MismatchError
from reshard.write.arrays import LocalArrays, local_arrays

if TYPE_CHECKING:
    from pathlib import Path


class Own(np.ndarray):
    """A subclass, which may answer in another way."""


BASE = np.arange(4 * 6 * 5, dtype=np.float32).reshape(4, 6, 5)
ARRAYS: dict[str, np.ndarray] = {
    "whole": BASE,
    "rows": BASE[1:3],
    "columns": BASE[:, 2:4],
    "fortran": np.asfortranarray(BASE),
    "transposed": BASE.T,
    "every second": BASE[::2, ::3, ::2],
    "backwards": BASE[::-1, :, ::-1],
    "empty": BASE[:0],
    "empty inside": np.zeros((3, 0, 2), np.int8),
    "scalar": np.array(7, np.int64),
    "one": np.ones((1, 1), bool),
    "broadcast": np.broadcast_to(np.arange(5, dtype=np.int16), (3, 5)),
    "bfloat16": np.arange(12).astype(ml_dtypes.bfloat16).reshape(3, 4),
    "bfloat16 columns": np.arange(12).astype(ml_dtypes.bfloat16).reshape(3, 4)[:, 1:3],
    "float8": np.arange(6).astype(ml_dtypes.float8_e4m3fn),
    "complex": np.arange(3).astype(np.complex64),
    "subclass": BASE.copy().view(Own),
    "subclass columns": BASE[..., 1].view(Own),
}


def read_only(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


def columns_of(arrays: dict[str, np.ndarray]) -> _core.ArrayColumns:
    kinds = [(dtypes.name_of(array.dtype), array.shape) for array in arrays.values()]
    return _core.ArrayColumns(list(arrays), kinds, list(range(len(kinds))), list(arrays.values()))


def bytes_written(path: Path, tensors: Any) -> bytes:
    written = _core.write_arrays(str(path), tensors, durable=False)
    return path.read_bytes()[written.header_bytes :]


@pytest.mark.parametrize("name", ARRAYS)
def test_what_is_written_is_what_numpy_copies(tmp_path: Path, name: str) -> None:
    array = ARRAYS[name]
    expected = np.ascontiguousarray(array).tobytes()
    assert bytes_written(tmp_path / "columns", columns_of({name: array})) == expected
    assert bytes_written(tmp_path / "read only", columns_of({name: read_only(array)})) == expected
    one = (name, dtypes.name_of(array.dtype), array.shape, array)
    assert bytes_written(tmp_path / "tuple", [one]) == expected


@pytest.mark.parametrize("n", [5, 5000])  # many are planned in parallel
def test_a_snapshot_of_columns_is_the_file_of_tuples(tmp_path: Path, n: int) -> None:
    arrays = {f"{number:04} {name}": array for number in range(n // 5) for name, array in list(ARRAYS.items())[:5]}
    tuples = [(name, dtypes.name_of(array.dtype), array.shape, array) for name, array in arrays.items()]
    _core.write_arrays(str(tmp_path / "tuples"), tuples, durable=False)
    _core.write_arrays(str(tmp_path / "columns"), columns_of(arrays), durable=False)
    _core.SnapshotPool().take(columns_of(arrays)).write(str(tmp_path / "snapshot"), durable=False)
    expected = (tmp_path / "tuples").read_bytes()
    assert (tmp_path / "columns").read_bytes() == expected
    assert (tmp_path / "snapshot").read_bytes() == expected


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda array: array[:, 4:], id="columns"),
        pytest.param(lambda array: array[:, ::2], id="every second column"),
        pytest.param(lambda array: array[::-2], id="rows backwards"),
        pytest.param(lambda array: array.T, id="transposed"),
        pytest.param(lambda array: np.broadcast_to(array[:1], array.shape), id="broadcast"),
        pytest.param(lambda array: array[:0, 2:], id="empty"),
    ],
)
def test_bytes_of_two_elements_in_any_order(tmp_path: Path, view: Any) -> None:
    array = view(np.arange(32, dtype=np.uint8).reshape(4, 8))
    kind = ("F4", (array.shape[0], 2 * array.shape[1]))
    expected = array.tobytes()
    assert bytes_written(tmp_path / "tuples", [("w", *kind, array)]) == expected
    assert bytes_written(tmp_path / "columns", _core.ArrayColumns(["w"], [kind], [0], [array])) == expected


def test_a_field_of_packed_records(tmp_path: Path) -> None:
    records = np.zeros(5, [("a", "<f4"), ("b", "i1")])
    records["a"] = np.arange(5)
    assert bytes_written(tmp_path / "file", [("w", "F32", (5,), records["a"])]) == records["a"].tobytes()


def test_arrays_of_another_kind_are_refused(tmp_path: Path) -> None:
    for kind in [("F32", (3, 2)), ("F32", (6,)), ("F64", (2, 3)), ("BF16", (2, 3))]:
        columns = _core.ArrayColumns(["w"], [kind], [0], [np.zeros((2, 3), np.float32)])
        with pytest.raises(MismatchError, match=r"`w` is .* but its buffer has 24 bytes of shape \[2, 3\]"):
            _core.write_arrays(str(tmp_path / "a"), columns)
    for objects in [np.array([None, 1]), np.zeros(2, [("a", object)])]:
        columns = _core.ArrayColumns(["w"], [("I64", (2,))], [0], [objects])
        with pytest.raises(ArgumentError, match="`w` is an array of Python objects"):
            _core.write_arrays(str(tmp_path / "a"), columns)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("names", "kind_of", "memory"),
    [(["a", "b"], [0], [BASE]), (["a"], [1], [BASE]), (["a"], [0], []), (["a"], [], [BASE])],
)
def test_columns_that_do_not_fit_are_refused(names: list[str], kind_of: list[int], memory: list[np.ndarray]) -> None:
    with pytest.raises(ArgumentError, match="columns of arrays"):
        _core.ArrayColumns(names, [("F32", BASE.shape)], kind_of, memory)


def test_a_snapshot_holds_no_array(tmp_path: Path) -> None:
    array = np.zeros(3, np.float32)
    gone = weakref.ref(array)
    n_before = sys.getrefcount(array)
    columns = columns_of({"w": array})
    snapshot = _core.SnapshotPool().take(columns)
    del columns
    gc.collect()
    assert sys.getrefcount(array) == n_before
    del array
    assert gone() is None
    snapshot.write(str(tmp_path / "a"))


SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
KINDS = st.tuples(st.sampled_from([np.float32, np.int8, ml_dtypes.bfloat16, np.complex64]), SHAPES)


@settings(max_examples=200)
@given(st.lists(KINDS, max_size=12))
def test_kinds_are_those_of_each_array(kinds: list[tuple[Any, tuple[int, ...]]]) -> None:
    arrays = [np.zeros(shape, dtype) for dtype, shape in kinds]
    found = _core.array_kinds(arrays)
    assert found is not None
    assert [found[0][number] for number in found[1]] == [(array.dtype, array.shape) for array in arrays]
    assert list(dict.fromkeys(found[1])) == list(range(len(found[0])))


def test_kinds_of_what_is_no_plain_array() -> None:
    for other in (BASE.view(Own), [1.0], None, memoryview(b"a"), np.float32(1)):
        assert _core.array_kinds([BASE, other]) is None
    assert _core.array_kinds([]) == ([], [])


def test_equal_dtypes_that_are_two_objects_are_one_kind() -> None:
    others = [np.zeros(2, np.dtype(np.float32).newbyteorder("=")), np.zeros(2, np.dtype("f4", metadata={"a": 1}))]
    arrays = local_arrays({"a": np.zeros(2, np.float32), "b": others[0], "c": others[1]}, {"d": others[0]})
    assert len(arrays.kinds) == 2  # of the model and of the optimizer
    assert list(arrays.kind_of) == [0, 0, 0, 1]


@settings(max_examples=200)
@given(st.permutations(range(9)), st.integers(0, 9), st.booleans())
def test_another_order(order: list[int], n: int, are_copies: bool) -> None:  # noqa: FBT001
    names = [f"layer {number}" for number in range(9)]
    chosen = [names[number] for number in order[:n]]
    if are_copies:
        chosen = ["".join(name) for name in map(list, chosen)]
    memory = [np.full(2, number, np.float32) for number in range(9)]
    arrays = LocalArrays(names, memory, local_arrays({"a": memory[0]}, None).kinds, [0] * 9)
    found = arrays.only(tuple(chosen))
    assert list(found.names) == chosen
    assert [int(array[0]) for array in found.memory] == order[:n]
    expected = None if are_copies and n else ([memory[number] for number in order[:n]], order[:n])
    found_by_core = _core.reordered(names, chosen, (memory, list(range(9))))
    if expected is None:
        assert found_by_core is None
    else:
        assert found_by_core is not None
        assert all(one is other for one, other in zip(found_by_core[0], expected[0], strict=True))
        assert found_by_core[1] == expected[1]


def test_another_order_of_names_that_are_made_when_asked() -> None:
    class Lazy(list[str]):
        def __iter__(self) -> Any:
            return (f"name {i}" for i in range(len(self)))

    names = Lazy("abcde")
    assert _core.reordered(names, Lazy("edc"), (list("abcde"), [0, 1, 2, 3, 4])) is None


def test_another_order_of_columns_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="another length"):
        _core.reordered(["a", "b"], ["a"], ([1], [2, 3]))
    assert _core.reordered(["a"], ["b"], ([1], [2])) is None
