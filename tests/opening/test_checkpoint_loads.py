"""`Checkpoint.load`: every argument does what it says, and nothing is read twice."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import subprocess
import sys
import textwrap
import time
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.helpers.arrays import Arrays, assert_same, whole_request
from tests.helpers.interrupts import interrupt
from tests.helpers.oracle import local_arrays
from tests.opening.small import BIAS, LAYOUT, TENSORS, UNLISTED, folder_of, ground_truth, small

import reshard
from reshard.errors import (
    ArgumentError,
    KeyNotFoundError,
    LayoutError,
    MismatchError,
    ReshardError,
    UnsupportedError,
)

__all__ = ["small"]

SAMPLES = Path(__file__).parents[1] / "data" / "mindspore"

# -- load


def test_a_layout_comes_as_mapping_path_or_object(small: reshard.Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "layout.yaml").write_text(json.dumps(LAYOUT))  # JSON is YAML
    for rank in range(4):
        expected = local_arrays(LAYOUT, TENSORS, rank)
        assert_same(small.load(LAYOUT, rank), expected)
        assert_same(small.load(tmp_path / "layout.yaml", rank), expected)
        assert_same(small.load(str(tmp_path / "layout.yaml"), rank=rank), expected)
        assert_same(small.load(reshard.ModelLayout.from_mapping(LAYOUT), rank), expected)
        assert_same(small.load(LAYOUT, rank, copy=False), expected)
        assert_same(small.load(LAYOUT, rank, keys=["half", "w"]), {key: expected[key] for key in ("w", "half")})


@pytest.mark.parametrize("tree", ["ckpt2", "ckpt2_dedup"])
def test_a_sample_under_another_layout(tree: str) -> None:
    layout = {
        "mesh": {"pp": 1, "tp": 4},
        "rules": [
            {"match": ["*embedding*", "*output_layer*", "*qkv*"], "cut": ["tp"]},
            {"match": "*linear_proj*", "cut": [None, "tp"]},
            {"match": "*experts*", "cut": [None, None, "tp"]},
            {"match": "*fc1*", "cut": ["tp"], "flat": ["pp"]},
            {"match": "*"},
        ],
    }
    with reshard.open(SAMPLES / tree / "checkpoint") as opened:
        # The oracle is told of the unlisted tensor too, so that both speak of the same keys.
        tensors = ground_truth(tree, 10) | ({UNLISTED: opened.read(UNLISTED)} if UNLISTED in opened else {})
        for rank in range(4):
            assert_same(opened.load(layout, rank), local_arrays(layout, tensors, rank, opened.keys("optimizer")))


def test_the_only_rank_of_a_layout_need_not_be_said(small: reshard.Checkpoint) -> None:
    one = {"mesh": {"tp": 1}, "ranks": [5], "rules": [{"match": "*"}]}
    assert_same(small.load(one), TENSORS)
    assert_same(small.load(one, 5), TENSORS)
    with pytest.raises(ArgumentError):
        small.load(one, 0)


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"layout": LAYOUT}, ArgumentError, "4 ranks"),
        ({"layout": LAYOUT, "rank": 4}, ArgumentError, "no rank 4"),
        ({"layout": LAYOUT, "rank": -1}, ArgumentError, "no rank -1"),
        ({"layout": LAYOUT, "rank": "0"}, ArgumentError, "rank"),
        ({"rank": 0}, ArgumentError, "without `layout`"),
        ({"part": "weights"}, ArgumentError, "`part`"),
        ({"keys": ["w", "gone"]}, KeyNotFoundError, "gone"),
        ({"keys": ["gone"], "layout": LAYOUT, "rank": 0}, KeyNotFoundError, "gone"),
        ({"dtype": "int32"}, UnsupportedError, "I32"),
        ({"dtype": "nonsense"}, UnsupportedError, "nonsense"),
        ({"threads": 0}, ArgumentError, "threads"),
        ({"threads": 100_000}, ArgumentError, "threads"),
        ({"layout": "no such file.yaml"}, ReshardError, "no such file"),
        ({"layout": {"mesh": {"tp": 2}, "rules": []}, "rank": 0}, LayoutError, "rule"),
        ({"layout": {"mesh": {"tp": 2}, "rules": [{"match": "w"}]}, "rank": 0}, LayoutError, "no rule matches"),
        ({"layout": {"mesh": {"tp": 3}, "rules": [{"match": "*", "cut": ["tp"]}]}, "rank": 0}, LayoutError, "w"),
        ({"out": {}, "copy": False}, ArgumentError, "out"),
        (
            {"out": {key: np.zeros_like(array) for key, array in TENSORS.items()}, "copy": False},
            ArgumentError,
            "exclude",
        ),
    ],
)
def test_arguments_that_cannot_be_meant(
    small: reshard.Checkpoint, arguments: dict[str, Any], error: type[ReshardError], named: str
) -> None:
    with pytest.raises(error, match=named):
        small.load(**arguments)


def test_parts_and_keys() -> None:
    with reshard.open(folder_of("ckpt2", 5)) as opened:
        expected = ground_truth("ckpt2", 5)
        states = {key for key in expected if key.startswith("adam_")}
        assert set(opened.load(part="model")) == set(expected) - states
        assert set(opened.load(part="optimizer")) == states | {UNLISTED}
        assert list(opened.load()) == opened.keys()
        assert list(opened.load(keys="shared.scale")) == ["shared.scale"]
        assert list(opened.load(keys={"shared.scale", BIAS})) == [k for k in opened if k in ("shared.scale", BIAS)]
        assert opened.load(keys=["shared.scale"], part="optimizer") == {}
        assert opened.load(keys=[]) == {}
        with pytest.raises(ArgumentError):
            opened.keys("weights")  # type: ignore[arg-type]


def test_a_cast_is_numpys(small: reshard.Checkpoint) -> None:
    for copy in (True, False):
        loaded = small.load(dtype=np.float16, copy=copy)
        expected = {key: a if a.dtype == np.int64 else a.astype(np.float16) for key, a in TENSORS.items()}
        assert_same(loaded, expected)
    assert small.load(dtype="bfloat16", keys="w")["w"].dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_threads_make_no_difference(small: reshard.Checkpoint, threads: int) -> None:
    assert_same(small.load(threads=threads), TENSORS)


def interleaved() -> Arrays:
    """Small arrays of a few kinds in turn, more than share a memory, and large ones between them."""
    random = np.random.default_rng(3)
    kinds = [
        ((), np.float64),
        ((3,), np.float32),
        ((2, 5), ml_dtypes.bfloat16),
        ((0, 3), np.int16),
        ((150_000,), np.float32),
    ]
    arrays = {
        f"{i}.{number}": random.integers(0, 100, shape).astype(dtype)
        for i in range(20)
        for number, (shape, dtype) in enumerate(kinds)
        if i != 7 or number != 1
    }
    return arrays | {"large": np.arange(600_000.0), "last": np.ones((), np.int8)}


def test_many_small_arrays_are_arrays_of_their_own(tmp_path: Path) -> None:
    expected = interleaved()
    _ = reshard.save(tmp_path / "run", 1, expected, commit={"durable": False})
    with reshard.open(tmp_path / "run") as opened:
        found = opened.load()
    assert list(found) == list(expected)
    assert_same(found, expected)
    places = []
    for name, array in found.items():
        assert array.flags.c_contiguous, name
        assert array.flags.writeable, name
        assert array.ctypes.data % 64 == 0 or not array.nbytes, name
        places.append((array.ctypes.data, array.nbytes))
    places = sorted(place for place in places if place[1])
    assert all(start + n_bytes <= after for (start, n_bytes), (after, _) in itertools.pairwise(places))


SOURCES: dict[str, dict[str, Any]] = {
    "one file": {},
    "whole in a file": {"mesh": {"tp": 1}, "rules": [{"match": "*"}]},
    "replicas": {"mesh": {"dp": 3}, "rules": [{"match": "*"}]},
    "parts": {"mesh": {"tp": 2}, "rules": [{"match": "*.2", "cut": ["tp"]}, {"match": "*"}]},
    "tiles": {"mesh": {"dp": 2}, "rules": [{"match": "*.2", "flat": ["dp"]}, {"match": "*"}]},
    "stored in another order": {"mesh": {"dp": 2}, "rules": [{"match": "*.2", "stored": [1, 0]}, {"match": "*"}]},
}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("dtype", [None, "F32"])
def test_whole_tensors_are_planned_as_a_request_for_them_is(name: str, dtype: str | None, tmp_path: Path) -> None:
    arrays = {key: array for key, array in interleaved().items() if array.size < 100}
    path = tmp_path / "all.safetensors"
    reshard.save_file(arrays, path)
    if SOURCES[name]:
        options: dict[str, Any] = {"files": {"dedup": False}, "commit": {"durable": False}}
        reshard.convert(path, tmp_path / "tree", to="checkpoint2", layout=SOURCES[name], **options)
        path = tmp_path / "tree"
    ordered = list(arrays)
    for keys in (ordered, ordered[::-1], ordered[::3], ordered[5:9] + ordered[1:3], []):
        with reshard.open(path) as one, reshard.open(path) as other:  # neither knows what the other has read
            index = one.data.index
            of_keys = index.whole_request([f"{key}!" for key in keys], keys)
            of_regions = whole_request({f"{key}!": arrays[key].shape for key in keys}, {f"{key}!": key for key in keys})
            again = other.data.index
            assert index.request_arrays(of_keys, dtype=dtype) == again.request_arrays(of_regions, dtype=dtype)
            whole = index.plan(of_keys, dtype=dtype)
            request = again.plan(of_regions, dtype=dtype)
            assert whole.arrays == request.arrays
            assert (whole.n_copies, whole.source_bytes) == (request.n_copies, request.source_bytes)
            for (buffer, start), (same, at), (_, _, _, n) in zip(
                whole.load(), request.load(), whole.arrays, strict=True
            ):
                assert memoryview(buffer)[start : start + n] == memoryview(same)[at : at + n]
            with pytest.raises(KeyNotFoundError, match="`nothing`"):
                index.whole_request([*keys, "nothing"])
            of_keys.add_region("part", ordered[0], (0,) * arrays[ordered[0]].ndim, arrays[ordered[0]].shape)
            assert [name for name, *_ in index.plan(of_keys).arrays] == [*(f"{key}!" for key in keys), "part"]
    with pytest.raises(ArgumentError, match="closed"):
        index.plan(of_regions)
    with pytest.raises(ArgumentError, match="closed"):
        index.plan(index.whole_request(ordered))


def test_joined_keys_come_as_one_array(small: reshard.Checkpoint) -> None:
    layout = {
        "mesh": {"dp": 2},
        "rules": [{"match": "w", "flat": {"axes": ["dp"], "join": "all", "align": 4}}, {"match": "*"}],
    }
    for rank in (0, 1):
        assert_same(small.load(layout, rank), local_arrays(layout, TENSORS, rank))


# -- out


def outs() -> Arrays:
    return {key: np.full_like(array, 3) for key, array in TENSORS.items()}


def test_given_arrays_are_filled_and_returned(small: reshard.Checkpoint) -> None:
    out = outs()
    loaded = small.load(out=out)
    assert_same(loaded, TENSORS)
    assert all(loaded[key] is out[key] for key in TENSORS)


def test_given_arrays_of_any_memory(small: reshard.Checkpoint, tmp_path: Path) -> None:
    block = shared_memory.SharedMemory(create=True, size=192)
    try:
        shared = np.ndarray((8, 6), np.float32, block.buf)
        mapped = np.memmap(tmp_path / "map", np.float32, "w+", shape=(8, 6))
        unaligned = np.zeros(193, np.uint8)[1:].view(np.float32).reshape(8, 6)
        for array in (shared, mapped, unaligned):
            small.load(keys="w", out={"w": array})
            assert array.tobytes() == TENSORS["w"].tobytes()
        del shared, array
    finally:
        block.close()
        block.unlink()


def test_parts_of_one_array_are_arrays_of_their_own(small: reshard.Checkpoint) -> None:
    both = np.zeros((2, 8, 6), np.float32)
    small.load(keys="w", out={"w": both[1]})
    assert not both[0].any()
    assert both[1].tobytes() == TENSORS["w"].tobytes()


def changed(**arrays: object) -> dict[str, Any]:
    return {key: array for key, array in (outs() | arrays).items() if array is not None}


def read_only() -> np.ndarray:
    array = np.zeros((8, 6), np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("out", "error", "named"),
    [
        (changed(w=None), ArgumentError, "'w'"),
        (changed(more=np.zeros(1)), ArgumentError, "'more'"),
        (changed(w=np.zeros((8, 6))), MismatchError, "`w` is float64"),
        (changed(w=np.zeros((8, 6), ">f4")), MismatchError, "`w`"),
        (changed(half=np.zeros((4, 4), np.uint16)), MismatchError, "`half` is uint16"),
        (changed(w=np.zeros((6, 8), np.float32)), MismatchError, r"`w`.*\(8, 6\)"),
        (changed(w=np.zeros(48, np.float32)), MismatchError, "`w`"),
        (changed(one=np.zeros(1)), MismatchError, "`one`"),
        (changed(w=np.zeros((6, 8), np.float32).T), ArgumentError, "`w`.*C-contiguous"),
        (changed(w=np.zeros((8, 12), np.float32)[:, ::2]), ArgumentError, "`w`.*C-contiguous"),
        (changed(w=read_only()), ArgumentError, "`w`.*writable"),
        (changed(w=[[0.0] * 6] * 8), ArgumentError, "`w` is a list"),
    ],
)
def test_given_arrays_that_do_not_fit(
    small: reshard.Checkpoint, out: dict[str, Any], error: type[ReshardError], named: str
) -> None:
    before = {key: np.copy(array) for key, array in out.items()}
    with pytest.raises(error, match=named):
        small.load(out=out)
    # Checks come before the first byte.
    assert all(np.array_equal(out[key], before[key]) for key in out)


def test_given_arrays_that_share_memory(tmp_path: Path) -> None:
    save_file({"a": np.ones(8, np.float32), "b": np.full(8, 2, np.float32)}, tmp_path / "ab.safetensors")
    room = np.zeros(12, np.float32)
    with reshard.open(tmp_path / "ab.safetensors") as opened:
        with pytest.raises(ArgumentError, match="share memory"):
            opened.load(out={"a": room[:8], "b": room[4:]})
        assert not room.any()


def test_after_damage_the_error_says_that_given_arrays_are_undefined(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"w": np.ones(1 << 16, np.float32)}, path)
    with reshard.open(path) as opened:
        os.truncate(path, 4096)
        with pytest.raises(ReshardError, match="undefined"):
            opened.load(out={"w": np.zeros(1 << 16, np.float32)})


# -- copy=False


def test_views_can_be_written_and_nobody_else_sees_it(small: reshard.Checkpoint) -> None:
    stored = Path(small.path).read_bytes()
    first, second = small.load(copy=False), small.load(copy=False)
    for array in first.values():
        assert array.flags.writeable
        array.reshape(-1).view(np.uint8)[:] = 0xAA
    assert Path(small.path).read_bytes() == stored
    assert_same(second, TENSORS)
    assert_same(small.load(), TENSORS)
    with reshard.open(small.path) as again:
        assert_same(again.load(copy=False), TENSORS)


def test_views_outlive_the_checkpoint_and_the_name_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    array = np.arange(1 << 18, dtype=np.float32)
    save_file({"w": array}, path)
    with reshard.open(path) as opened:
        views, arrays = opened.load(copy=False), opened.load()
        rows = opened.load({"mesh": {"tp": 4}, "rules": [{"match": "*", "cut": ["tp"]}]}, 2, copy=False)
    del opened
    path.unlink()
    assert np.array_equal(views["w"], array)
    assert np.array_equal(arrays["w"], array)
    assert np.array_equal(rows["w"], array[1 << 17 : 3 << 16])
    views["w"][:] = 0
    assert np.array_equal(rows["w"], array[1 << 17 : 3 << 16])


def test_a_view_costs_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"w": np.zeros(16 << 20, np.uint8)}, path)
    with reshard.open(path) as opened:
        view = opened.load(copy=False)["w"]
    page = ctypes.sizeof(ctypes.c_char) * os.sysconf("SC_PAGE_SIZE")
    maps = Path("/proc/self/maps").read_text()
    start = view.ctypes.data // page * page
    inside = [
        line
        for line in maps.splitlines()
        if int(line.split("-")[0], 16) <= start < int(line.split("-")[1].split()[0], 16)
    ]
    assert len(inside) == 1
    assert str(path) in inside[0]
    assert "rw-p" in inside[0]


# -- progress, Ctrl-C


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sparse file of 4 GiB: enough work to interrupt, without the time to write it."""
    path = tmp_path_factory.mktemp("big") / "big.safetensors"
    n_bytes = 4 << 30
    header = json.dumps(
        {"w": {"dtype": "U8", "shape": [1 << 16, n_bytes >> 16], "data_offsets": [0, n_bytes]}}
    ).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + n_bytes)
    return path


def test_progress_counts_up_to_the_total(small: reshard.Checkpoint, big: Path) -> None:
    calls: list[tuple[int, int]] = []
    small.load(progress=lambda done, total: calls.append((done, total)))
    n_bytes = sum(array.nbytes for array in TENSORS.values())
    assert calls[-1] == (n_bytes, n_bytes)
    calls.clear()
    with reshard.open(big) as opened:
        opened.load(
            {"mesh": {"tp": 32}, "rules": [{"match": "*", "cut": ["tp"]}]}, 0, progress=lambda *c: calls.append(c)
        )
    assert calls[0] == (0, 128 << 20)
    assert calls[-1] == (128 << 20, 128 << 20)
    assert len(calls) > 2
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


class StopError(Exception):
    pass


def test_an_exception_of_the_callback_stops_the_load(big: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done:
            raise StopError

    with reshard.open(big) as opened:
        started = time.process_time()
        with pytest.raises(StopError):
            opened.load(progress=stop)
        assert time.process_time() - started < 1  # of processor: all of it takes more
        # What is opened can still be read.
        assert opened.read("w", (0, slice(0, 4))).tolist() == [0] * 4


@pytest.mark.slow(disk=False)
def test_ctrl_c_stops_a_load(big: Path) -> None:
    code = """
    import sys, time, reshard
    opened = reshard.open(sys.argv[1])
    begun = time.process_time()
    opened.load({"mesh": {"tp": 32}, "rules": [{"match": "*", "cut": ["tp"]}]}, 0)
    print(time.process_time() - begun, flush=True)
    while True:
        opened.load()
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(big)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    seconds_of_a_part = float(process.stdout.readline())
    time.sleep(0.4)  # so that it is in a load of all; on a slow machine, in its begin
    assert interrupt(process) < 16 * seconds_of_a_part  # half of a load
