"""`Checkpoint.read` and its slices, in threads, of files that change, and what errors are."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.opening.small import LAYOUT, TENSORS, UNLISTED, ground_truth, small

import reshard
from reshard.errors import (
    ArgumentError,
    CheckpointNotFoundError,
    DamagedFileError,
    DestinationExistsError,
    KeyNotFoundError,
    MismatchError,
    ReshardError,
    StorageError,
)
from reshard.formats.checkpoint2 import reader

__all__ = ["small"]

SAMPLES = Path(__file__).parents[1] / "data" / "mindspore"

# -- reading


def test_a_slice_is_numpys(small: reshard.Checkpoint) -> None:
    for index in (None, 1, -1, (2, 3), (slice(1, 5), 2), slice(None, None, -2), (..., 0), (None, 1), (), ...):
        expected = TENSORS["w"] if index is None else TENSORS["w"][index]
        found = small.read("w", index)
        assert found.shape == expected.shape
        assert found.tobytes() == np.asarray(expected).tobytes()
    assert small.read("one").tolist() == 7
    assert small.read("none").shape == (0, 3)


@pytest.mark.parametrize("index", [8, -9, (0, 0, 0), (0, slice(0, 1, 0)), [1, 2], 1.5, True, "w"])
def test_an_index_that_does_not_fit(small: reshard.Checkpoint, index: object) -> None:
    with pytest.raises(ArgumentError):
        small.read("w", index)


def test_a_slice_into_a_given_array(small: reshard.Checkpoint) -> None:
    for index in (None, 1, slice(2, 5), (slice(None), 3), slice(None, None, -3)):
        expected = TENSORS["w"] if index is None else TENSORS["w"][index]
        out = np.zeros(expected.shape, np.float32)
        assert small.read("w", index, out) is out
        assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("index", [None, 1, (slice(None), 3)])
@pytest.mark.parametrize("out", [np.zeros(5, np.float32), np.zeros((8, 1 << 16)), [0.0] * 6, np.float32(0)])
def test_a_given_array_that_does_not_fit_is_refused_before_anything_is_read(
    index: object, out: Any, tmp_path: Path
) -> None:
    save_file({"w": np.zeros((8, 1 << 16), np.float32)}, tmp_path / "w.safetensors")
    with reshard.open(tmp_path / "w.safetensors") as opened:
        os.truncate(tmp_path / "w.safetensors", 100)  # what is read now is an error of its own
        with pytest.raises((MismatchError, ArgumentError)):
            opened.read("w", index, out)


def test_what_is_not_there(small: reshard.Checkpoint) -> None:
    for call in (small.read, small.__getitem__):
        with pytest.raises(KeyNotFoundError) as caught:
            call("gone")
        assert caught.value.key == "gone"
        assert isinstance(caught.value, KeyError)
    assert "gone" not in small
    assert 3 not in small
    assert len(small) == len(TENSORS)
    assert list(small) == small.keys()
    assert set(small) == set(TENSORS)


def test_a_closed_checkpoint(small: reshard.Checkpoint) -> None:
    before = small.keys()
    small.close()
    small.close()
    assert small.keys() == before
    for call in (small.load, lambda: small.read("w"), lambda: small.load(LAYOUT, 0), lambda: small.load(copy=False)):
        with pytest.raises(ArgumentError, match="closed"):
            call()
    assert "small.safetensors" in repr(small)


def test_descriptors_are_let_go() -> None:
    def n_open() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    gc.collect()  # files of objects of other tests are not closed in between
    before = n_open()
    for _ in range(3):
        with reshard.open(SAMPLES / "ckpt2" / "checkpoint") as opened:
            views = opened.load(copy=False)
    assert n_open() == before
    assert views


def test_eight_threads_read_one_checkpoint() -> None:
    expected = ground_truth("ckpt2", 10)
    layout = {"mesh": {"tp": 2}, "rules": [{"match": "*qkv*", "cut": ["tp"]}, {"match": "*"}]}
    start = threading.Barrier(8)
    with reshard.open(SAMPLES / "ckpt2" / "checkpoint") as opened:
        keys = [key for key in opened if key != UNLISTED]

        def work(number: int) -> int:
            start.wait()
            n_same = 0
            for i in range(40):
                key = keys[(number * 7 + i) % len(keys)]
                n_same += opened.read(key).tobytes() == expected[key].tobytes()
                n_same += opened.load(layout, i % 2, keys=[key])[key].nbytes in (
                    expected[key].nbytes,
                    expected[key].nbytes // 2,
                )
                n_same += opened.load(keys=[key], copy=False)[key].tobytes() == expected[key].tobytes()
                n_same += opened[key].shape == expected[key].shape
            return n_same

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(work, range(8))) == [160] * 8


def test_closing_while_others_read() -> None:
    """They get what they asked for or are told that it is closed."""
    for _ in range(5):
        opened = reshard.open(SAMPLES / "ckpt2" / "checkpoint")
        expected = ground_truth("ckpt2", 10)["output_layer.weight"].tobytes()

        def work(opened: reshard.Checkpoint = opened, expected: bytes = expected) -> str:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                try:
                    assert opened.read("output_layer.weight").tobytes() == expected
                except ArgumentError as error:
                    return error.message
            return "never closed"

        with ThreadPoolExecutor(4) as pool:
            results = [pool.submit(work) for _ in range(4)]
            time.sleep(0.002)
            opened.close()
            assert {result.result() for result in results} == {"the checkpoint is closed"}


# -- files that change after they were opened


def test_a_file_that_was_truncated_meanwhile_is_an_error_and_no_signal(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    code = """
    import os, sys, numpy as np, reshard
    from safetensors.numpy import save_file
    path, w = sys.argv[1], np.ones((1024, 4096), np.float32)
    for method in ("map", "read", "auto"):
        for act in (
            lambda opened: opened.load(),
            lambda opened: opened.load(out={"w": np.empty_like(w)}),
            lambda opened: opened.read("w"),
        ):
            save_file({"w": w}, path)
            opened = reshard.open(path, method=method)
            os.truncate(path, 1 << 20)
            try:
                act(opened)
            except (reshard.errors.DamagedFileError, reshard.errors.StorageError) as error:
                print(str(error).splitlines()[0], error.path == path, flush=True)
            os.unlink(path)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    told = done.stdout.splitlines()
    assert len(told) == 9
    assert all(str(path) in line and line.endswith("True") for line in told)


def test_a_file_that_was_replaced_meanwhile_is_read_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"w": np.zeros(4, np.float32)}, path)
    with reshard.open(path) as opened:
        save_file({"w": np.ones(4, np.float32)}, tmp_path / "new")
        (tmp_path / "new").rename(path)
        assert opened.read("w").tolist() == [0] * 4


# -- errors


@pytest.mark.parametrize(
    "error",
    [
        ReshardError("it failed", path="/x", key="w", hint="try again"),
        ArgumentError("a", hint="b"),
        KeyNotFoundError("a", key="k"),
        StorageError("a", path="/x", errno=28),
        DestinationExistsError("a", path="/x"),
        CheckpointNotFoundError("a"),
    ],
)
def test_errors_can_be_pickled(error: ReshardError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_errors_that_were_raised_can_be_pickled(small: reshard.Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "bad.safetensors").write_bytes(b"\xff" * 100)
    calls: list[Any] = [
        lambda: small.read("gone"),
        lambda: small.load(LAYOUT),
        lambda: small.read("w", 99),
        lambda: small.load({"mesh": {"tp": 3}, "rules": [{"match": "*", "cut": ["tp"]}]}, 0),
        lambda: reshard.open(tmp_path / "gone"),
        lambda: reshard.open(tmp_path / "bad.safetensors"),
    ]
    for call in calls:
        with pytest.raises(ReshardError) as caught:
            call()
        again = pickle.loads(pickle.dumps(caught.value))
        assert (type(again), str(again), vars(again)) == (
            type(caught.value),
            str(caught.value),
            {k: v for k, v in vars(caught.value).items() if k != "__notes__"},
        )


def test_an_iteration_that_is_saved_again_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "run"
    for iteration in (100, 200):
        reshard.save(root, iteration, {"w": np.full(8, float(iteration))})
    again = iter([1.0, 2.0])
    unlisted = reader._unlisted

    def replaced(*arguments: Any) -> Any:
        value = next(again, None)
        if value is not None:  # after the checksums were read, and before the files are opened
            reshard.save(root, 200, {"w": np.full(8, value)})
        return unlisted(*arguments)

    monkeypatch.setattr(reader, "_unlisted", replaced)
    with reshard.open(root / "iteration_00000200") as checkpoint:
        assert checkpoint.read("w").tolist() == [2.0] * 8


def test_an_iteration_that_is_saved_again_while_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "run"
    for iteration in (100, 200):
        reshard.save(root, iteration, {"w": np.full(8, iteration)})
    load = reshard.Checkpoint.load
    n_loads = 0

    def replaced(checkpoint: reshard.Checkpoint, *arguments: Any, **options: Any) -> Any:
        nonlocal n_loads
        n_loads += 1
        if n_loads == 1:  # a file that is opened when it is first used is that of another save
            reshard.save(root, 200, {"w": np.full(8, 7)})
            raise DamagedFileError("bytes differ from what was written", path=str(root))
        return load(checkpoint, *arguments, **options)

    monkeypatch.setattr(reshard.Checkpoint, "load", replaced)
    loaded = reshard.load(root)
    assert (loaded.iteration, loaded.state["w"].tolist(), n_loads) == (200, [7] * 8, 2)
    assert [one.iteration for one in loaded.decision.verdicts if not one.taken] in ([], [100])


def test_a_masked_array_is_not_filled(tmp_path: Path) -> None:
    reshard.save_file({"w": np.arange(3.0)}, tmp_path / "w.safetensors")
    out = np.ma.masked_array(np.zeros(3), [False, True, False])
    with reshard.open(tmp_path / "w.safetensors") as checkpoint:
        with pytest.raises(ArgumentError, match="MaskedArray, expected a numpy array"):
            checkpoint.load(out={"w": out})
        with pytest.raises(ArgumentError, match="MaskedArray, expected a numpy array"):
            checkpoint.read("w", slice(None, None, -1), out=out)
