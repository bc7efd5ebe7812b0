"""Tensors in flat arrays, joined or divided between ranks, against the place of each element, looked up one by one."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard
from reshard import _core
from reshard.formats.outputs import load_all

DTYPES = {"F32": np.float32, "F64": np.float64, "I16": np.int16, "U8": np.uint8}
shapes = st.lists(st.lists(st.integers(0, 7), max_size=4).map(tuple), min_size=1, max_size=6)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_each_element_is_read_from_its_place(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    dtype = data.draw(st.sampled_from(sorted(DTYPES)))
    n_ranks = data.draw(st.none() | st.integers(1, 9))  # None: one line with all
    tensors = data.draw(shapes)
    gap = data.draw(st.integers(0, 3))
    parts = [-(-math.prod(shape) // (n_ranks or 1)) for shape in tensors]
    starts = [sum(parts[:i]) + gap * i for i in range(len(parts))]
    left = starts[-1] + parts[-1] + gap
    sizes: list[int] = []
    while left or not sizes:
        sizes.append(data.draw(st.integers(0, left)) if len(sizes) < 5 else left)
        left -= sizes[-1]
    folder = tmp_path_factory.mktemp("flat")
    rng = np.random.default_rng(0)
    held: list[dict[str, np.ndarray]] = []  # of each rank, or of each array of the only line
    index = _core.Index()
    for number in range(n_ranks or len(sizes)):
        own = range(len(sizes)) if n_ranks else [number]
        held.append({f"a{i}": rng.integers(0, 255, sizes[i]).astype(DTYPES[dtype]) for i in own})
        reshard.save_file(held[-1], folder / f"{number}.safetensors")
        index.add_file(str(folder / f"{number}.safetensors"))
    if n_ranks:
        lines = _core.FlatLines.divided(range(n_ranks), [(f"a{i}", n) for i, n in enumerate(sizes)])
    else:
        lines = _core.FlatLines.joined([(i, f"a{i}", n) for i, n in enumerate(sizes)])
    assert lines.n == sum(sizes)

    def element(rank: int, at: int) -> Any:
        for number, n in enumerate(sizes):
            if at < n:
                return held[rank if n_ranks else number][f"a{number}"][at]
            at -= n
        raise AssertionError

    expected = {}
    for i, (shape, start, part) in enumerate(zip(tensors, starts, parts, strict=True)):
        elements = [element(e // part, start + e % part) for e in range(math.prod(shape))]
        expected[f"t{i}"] = np.array(elements, DTYPES[dtype]).reshape(shape)
        index.add_flat(f"t{i}", dtype, shape, lines, start)
    index.check_coverage()
    index.check()
    listed = _core.Index()
    for number in range(index.n_files):
        listed.add_file(index.file_path(number))
    for key, right in expected.items():
        listed.add_tiles(key, dtype, right.shape, index.stored(key))
        holders = {file for region in index.shards(key) for file in region.files}
        assert index.holders(key) == sorted(holders)
        assert sum(math.prod(region.shape) for region in index.shards(key)) == right.size
        cut = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in right.shape]
        offset, extent = [start for start, _ in cut], [end - start for start, end in cut]
        for one in (index, listed):  # as regions of each array, too
            request = _core.Request()
            request.add_region(key, key, (0,) * right.ndim, right.shape)
            request.add_region("part", key, offset, extent)
            loaded = load_all(one.plan(request))
            assert loaded[key].tobytes() == right.tobytes(), key
            assert loaded["part"].tobytes() == right[tuple(slice(*of) for of in cut)].tobytes(), (key, cut)


def test_tensors_divided_alike_have_one_place(tmp_path: Path) -> None:
    index = _core.Index()
    files = [index.add_file(str(tmp_path / name)) for name in "abc"]
    one, other = (_core.FlatLines.divided(files, [(name, 20), ("more", 20)]) for name in "xy")
    turned = _core.FlatLines.divided(files[::-1], [("x", 40)])
    index.add_flat("first", "F32", (5, 3), one, 0)
    index.add_flat("second", "BF16", (5, 3), other, 30)
    index.add_flat("turned", "F32", (5, 3), turned, 0)
    index.add_flat("cut", "F32", (5, 3), one, 17)
    index.add_flat("joined", "F32", (5, 3), _core.FlatLines.joined([(files[0], "x", 15)]), 0)
    place_of = dict(zip(index.keys(), index.places(), strict=True))
    assert place_of["first"] == place_of["second"]
    assert len(set(place_of.values())) == len(place_of) - 1
    assert index.shards("first") == index.shards("second") != index.shards("cut")


def test_a_tensor_of_another_index_is_the_same(tmp_path: Path) -> None:
    arrays = {"x": np.arange(20.0), "w": np.arange(6).reshape(2, 3)}
    reshard.save_file(arrays, tmp_path / "a.safetensors")
    index, other = _core.Index(), _core.Index()
    file = index.add_file(str(tmp_path / "a.safetensors"))
    lines = _core.FlatLines.divided([file, file], [("x", 20)])
    index.add_flat("flat", "F64", (3, 5), lines, 2)
    index.add_whole("w", file)
    with pytest.raises(reshard.errors.ReshardError, match="other files"):
        other.add_same("v", index, "w")
    other.add_file(str(tmp_path / "a.safetensors"))
    for key, name in (("more", "flat"), ("flat", "flat"), ("v", "w")):
        other.add_same(key, index, name)
        assert other.stored(key) == index.stored(name)
        assert other.info(key) == index.info(name)
    with pytest.raises(reshard.errors.ReshardError, match="stored twice"):
        other.add_same("flat", index, "w")
    with pytest.raises(reshard.errors.ReshardError, match="no tensor `u`"):
        other.add_same("u", index, "u")
    assert other.places()[0] == other.places()[1], "it is as compact"


def test_what_lies_outside_of_the_arrays_is_refused(tmp_path: Path) -> None:
    index = _core.Index()
    file = index.add_file(str(tmp_path / "a"))
    lines = _core.FlatLines.divided([file, file], [("x", 20)])
    index.add_flat("fits", "F32", (39,), lines, 0)
    for shape, start in (((41,), 0), ((39,), 1), ((1,), 20), ((1 << 40, 1 << 40), 0)):
        with pytest.raises(reshard.errors.ReshardError, match=r"elements|too large") as caught:
            index.add_flat("t", "F32", shape, lines, start)
        assert caught.value.key == "t"
    with pytest.raises(reshard.errors.ReshardError, match="no file 1"):
        index.add_flat("t", "F32", (1,), _core.FlatLines.joined([(1, "x", 1)]), 0)
    with pytest.raises(reshard.errors.ReshardError, match="no file"):
        _core.FlatLines.divided([], [])
