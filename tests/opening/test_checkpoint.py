"""`reshard.open` and `Checkpoint`, on real trees: every tensor is its ground truth, every argument does what it says.

The ground truth was stored beside the samples when they were made, and is read here without `reshard`. Damaged and
hostile trees are in `test_hostile_trees`.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.helpers import original_reader
from tests.helpers.arrays import Arrays, assert_same, whole_request
from tests.helpers.oracle import local_arrays

import reshard
from reshard import opening
from reshard.errors import (
    ArgumentError,
    CheckpointNotFoundError,
    DamagedFileError,
    DestinationExistsError,
    KeyNotFoundError,
    LayoutError,
    MismatchError,
    ReshardError,
    StorageError,
    UnsupportedError,
)
from reshard.formats.checkpoint2 import reader

SAMPLES = Path(__file__).parents[1] / "data" / "mindspore"
TREES = [
    ("ckpt2", 5),
    ("ckpt2", 10),
    ("ckpt2_dedup", 5),
    ("ckpt2_dedup", 10),
    ("ckpt2_named", 7),
    ("ckpt2_single", 3),
]
# Saved beside the parameters of a run; the ground truth does not list it.
UNLISTED = "global_step"
BIAS = "decoder.layers.1.mlp.router.expert_bias"


def ground_truth(tree: str, iteration: int) -> Arrays:
    return original_reader.read_shard_file(SAMPLES / tree / f"expected_{iteration:08d}.safetensors")


def folder_of(tree: str, iteration: int) -> Path:
    return SAMPLES / tree / "checkpoint" / f"iteration_{iteration:08d}"


def assert_truth(opened: reshard.Checkpoint, expected: Arrays, iteration: int) -> None:
    """Every way to read gives the ground truth, whole and in a slice."""
    assert set(opened.keys()) - {UNLISTED} == set(expected)
    for method in (dict(opened.load()), opened.load(copy=False), {key: opened.read(key) for key in opened}):
        step = method.pop(UNLISTED, None)
        assert step is None or step.tolist() == [iteration]
        assert_same(method, expected)
    for key, array in expected.items():
        cut = tuple(slice(1, None) for _ in array.shape)
        assert opened.read(key, cut).tobytes() == array[cut].tobytes()
        assert opened[key].shape == array.shape
        assert opened[key].n_bytes == array.nbytes


# -- the samples


@pytest.mark.parametrize(("tree", "iteration"), TREES)
def test_an_iteration_folder_is_its_ground_truth(tree: str, iteration: int) -> None:
    with reshard.open(folder_of(tree, iteration)) as opened:
        assert (opened.format, opened.iteration, opened.path) == ("checkpoint2", iteration, folder_of(tree, iteration))
        assert opened.common is not None
        assert opened.common.global_step == iteration
        assert_truth(opened, ground_truth(tree, iteration), iteration)


@pytest.mark.parametrize(
    ("tree", "iteration"), [("ckpt2", 10), ("ckpt2_dedup", 10), ("ckpt2_named", 7), ("ckpt2_single", 3)]
)
@pytest.mark.parametrize("method", ["map", "read"])
def test_a_root_is_its_trackers_iteration(tree: str, iteration: int, method: Any) -> None:
    with reshard.open(str(SAMPLES / tree / "checkpoint"), method=method) as opened:
        assert (opened.iteration, opened.skipped) == (iteration, ())
        assert opened.path == folder_of(tree, iteration)
        assert_truth(opened, ground_truth(tree, iteration), iteration)


@pytest.mark.parametrize("tree", ["ckpt2", "ckpt2_dedup"])
def test_every_rank_loads_what_it_held_by_the_layout_of_the_checkpoint(tree: str) -> None:
    """Also `shared.scale`: both stages hold it, and metadata.json has only the layout of the first."""
    with reshard.open(folder_of("ckpt2", 10)) as every_copy, reshard.open(folder_of(tree, 10)) as opened:
        layout = reshard.ModelLayout.like(opened)
        for rank in range(8):
            held = every_copy.stored(rank)
            loaded = opened.load(layout, rank=rank)
            assert held.keys() - {"global_step"} <= loaded.keys()
            for key in held.keys() & loaded.keys():
                assert loaded[key].tobytes() == held[key].tobytes(), (key, rank)


def test_optimizer_files_that_metadata_does_not_name_are_read(tmp_path: Path) -> None:
    """Of an optimizer without state: its files hold `global_step` alone, which metadata.json does not list."""
    folder = tmp_path / "iteration_00000010"
    shutil.copytree(folder_of("ckpt2", 10), folder)
    metadata = json.loads((folder / "metadata.json").read_text())
    names = {key: [entry["file_name"] for entry in of] for key, of in metadata["storage_data"].items()}
    in_optimizer = {key for key, of in names.items() if "-opt-" in of[0]}
    assert in_optimizer
    metadata["storage_data"] = {key: of for key, of in metadata["storage_data"].items() if key not in in_optimizer}
    tensors = {
        key: of for key, of in metadata["state_dict_metadata"].items() if f"('{key}', (0,))" in metadata["storage_data"]
    }
    (folder / "metadata.json").write_text(json.dumps(metadata | {"state_dict_metadata": tensors}))
    for path in folder.glob("*-opt-*"):
        step = original_reader.read_shard_file(path)[UNLISTED]
        path.chmod(0o600)
        save_file({UNLISTED: step}, path, {"format": "ms"})
    with reshard.open(folder) as opened:
        assert opened.keys("optimizer") == [UNLISTED]
        assert opened.read(UNLISTED).tolist() == [10]


def test_an_undescribed_tensor_with_different_values_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "iteration_00000010"
    shutil.copytree(folder_of("ckpt2", 10), folder)
    with reshard.open(folder):
        assert not caplog.messages
    path = folder / "demo-opt-0000003-0000008.safetensors"
    arrays = original_reader.read_shard_file(path)
    path.chmod(0o600)
    save_file(arrays | {UNLISTED: arrays[UNLISTED] + 1}, path, {"format": "ms"})
    with reshard.open(folder) as opened:
        assert opened.read(UNLISTED).shape == (1,)
    (message,) = caplog.messages
    assert "`global_step` is not in the description" in message
    assert "`demo-opt-0000003-0000008.safetensors` hold different values" in message


def test_the_tensor_that_the_original_cannot_load() -> None:
    """It has no layout and lies on the second stage alone, where the original does not look."""
    with reshard.open(SAMPLES / "ckpt2" / "checkpoint") as opened:
        assert opened.read(BIAS).tobytes() == ground_truth("ckpt2", 10)[BIAS].tobytes()
        (shard,) = opened[BIAS].shards
        assert shard.files == tuple(f"demo-model-{rank:07d}-0000008.safetensors" for rank in (4, 5, 6, 7))


def test_counters_are_those_of_common_json() -> None:
    with reshard.open(folder_of("ckpt2", 10)) as opened:
        common = opened.common
    stored = json.loads((folder_of("ckpt2", 10) / "common.json").read_text())
    assert common is not None
    assert {name: getattr(common, name) for name in stored} == stored


@pytest.mark.parametrize("tree", ["ckpt2", "ckpt2_dedup", "ckpt2_named"])
def test_shards_are_those_of_metadata_json(tree: str) -> None:
    iteration = 7 if tree == "ckpt2_named" else 10
    metadata = json.loads((folder_of(tree, iteration) / "metadata.json").read_text())
    with reshard.open(folder_of(tree, iteration)) as opened:
        for key, said in metadata["state_dict_metadata"].items():
            cuts = said["axis_fragmentations"]
            expected = {}
            for chunk in said["chunk"]:
                (number,) = chunk["global_offset"]
                at = np.unravel_index(number, cuts) if cuts else ()
                offset = tuple(int(i) * n for i, n in zip(at, chunk["local_shape"], strict=True))
                holders = metadata["storage_data"][str((key, (number,)))]
                expected[offset, tuple(chunk["local_shape"])] = {entry["file_name"] for entry in holders}
            info = opened[key]
            assert {(shard.offset, shard.shape): set(shard.files) for shard in info.shards} == expected
            assert info.part == ("optimizer" if key.startswith(("adam_", "exp_avg")) else "model")
        assert set(opened.keys("model")) | set(opened.keys("optimizer")) == set(opened.keys())
        named = {entry["file_name"] for entries in metadata["storage_data"].values() for entry in entries}
        assert {(file.name, file.n_bytes) for file in opened.files()} == {
            (name, (folder_of(tree, iteration) / name).stat().st_size) for name in named
        }


def test_a_hugging_face_folder_and_its_files() -> None:
    folder = SAMPLES / "full_hf"
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    expected: Arrays = {}
    for name in set(weight_map.values()):
        expected |= original_reader.read_shard_file(folder / name)
        with reshard.open(folder / name) as file:
            assert (file.format, file.iteration, file.common) == ("safetensors", None, None)
            assert_same(file.load(), original_reader.read_shard_file(folder / name))
    with reshard.open(folder) as opened:
        assert (opened.format, opened.iteration, opened.common) == ("huggingface", None, None)
        assert opened.keys() == list(weight_map)
        assert opened.keys("optimizer") == []
        assert {key: opened[key].shards[0].files for key in opened} == {k: (name,) for k, name in weight_map.items()}
        assert_truth(opened, expected, 0)


# -- other names, and no metadata.json


def copied(tree: str, folder: Path) -> Path:
    """A copy of a sample's root whose files may be changed."""
    shutil.copytree(SAMPLES / tree / "checkpoint", folder)
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


@pytest.mark.parametrize("digits", [1, 7, 8, 9, 12, 17])
def test_iteration_folders_of_any_width(digits: int, tmp_path: Path) -> None:
    root = copied("ckpt2_named", tmp_path / "root")
    name = f"iteration_{7:0{digits}d}"
    (root / "iteration_00000007").rename(root / name)
    for path in (root, root / name):
        with reshard.open(path) as opened:
            assert (opened.iteration, opened.path.name) == (7, name)
            assert_truth(opened, ground_truth("ckpt2_named", 7), 7)


@pytest.mark.parametrize("tree", ["ckpt2_dedup", "ckpt2_named", "ckpt2_single"])
def test_shard_files_of_the_suffix_in_the_documents(tree: str, tmp_path: Path) -> None:
    iteration = dict(TREES)[tree]
    root = copied(tree, tmp_path / "root")
    folder = root / f"iteration_{iteration:08d}"
    for path in folder.glob("*.safetensors"):
        path.rename(path.with_suffix(".safetensor"))
    metadata = folder / "metadata.json"
    if metadata.exists():
        metadata.write_text(metadata.read_text().replace(".safetensors", ".safetensor"))
    with reshard.open(root) as opened:
        assert_truth(opened, ground_truth(tree, iteration), iteration)
        assert all(file.name.endswith(".safetensor") for file in opened.files())


def test_shard_files_with_more_digits_and_another_prefix(tmp_path: Path) -> None:
    root = copied("ckpt2_named", tmp_path / "root")
    folder = root / "iteration_00000007"
    metadata = (folder / "metadata.json").read_text()
    for path in folder.glob("*.safetensors"):
        name = path.name.replace("checkpoint-", "my-model-run-").replace("-000", "-000000")
        path.rename(path.with_name(name))
        metadata = metadata.replace(path.name, name)
    (folder / "metadata.json").write_text(metadata)
    with reshard.open(root) as opened:
        assert_truth(opened, ground_truth("ckpt2_named", 7), 7)
        assert opened["exp_avg.lm.fc.weight"].part == "optimizer"


def test_whole_tensors_need_no_metadata_json(tmp_path: Path) -> None:
    """Two pipeline stages, as two ranks would leave them."""
    folder = tmp_path / "iteration_0000001"
    folder.mkdir()
    arrays: list[Any] = [np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(4, dtype=np.int64)]
    for rank, array in enumerate(arrays):
        save_file({f"layers.{rank}.w": array}, folder / f"x-model-{rank:07d}-0000002.safetensors")
        save_file({f"adam_m.layers.{rank}.w": array + 1}, folder / f"x-opt-{rank:07d}-0000002.safetensors")
    with reshard.open(folder) as opened:
        assert (opened.format, opened.iteration, opened.common) == ("checkpoint2", 1, None)
        assert opened.keys("model") == ["layers.0.w", "layers.1.w"]
        assert_same(
            opened.load(),
            {f"layers.{i}.w": arrays[i] for i in (0, 1)} | {f"adam_m.layers.{i}.w": arrays[i] + 1 for i in (0, 1)},
        )


def test_cut_tensors_need_metadata_json(tmp_path: Path) -> None:
    root = copied("ckpt2", tmp_path / "root")
    (root / "iteration_00000010" / "metadata.json").unlink()
    with pytest.raises(ReshardError, match=r"metadata\.json"):
        reshard.open(root / "iteration_00000010")


def test_a_common_json_is_not_needed(tmp_path: Path) -> None:
    root = copied("ckpt2", tmp_path / "root")
    (root / "iteration_00000010" / "common.json").unlink()
    with reshard.open(root) as opened:
        assert (opened.iteration, opened.common) == (10, None)


# -- which iteration of a root


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def test_a_damaged_iteration_is_passed_over_with_its_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = copied("ckpt2", tmp_path / "root")
    damaged = root / "iteration_00000010" / "demo-opt-0000003-0000008.safetensors"
    truncate(damaged)
    with caplog.at_level(logging.WARNING, "reshard"), reshard.open(root) as opened:
        assert opened.iteration == 5
        ((name, reason),) = opened.skipped
        assert name == "iteration_00000010"
        assert damaged.name in reason
        assert_truth(opened, ground_truth("ckpt2", 5), 5)
    assert any("iteration_00000010" in message and reason in message for message in caplog.messages)


def test_with_every_iteration_damaged_the_error_names_each(tmp_path: Path) -> None:
    root = copied("ckpt2", tmp_path / "root")
    (root / "iteration_00000010" / "metadata.json").write_text("{}")
    (root / "iteration_00000005" / "demo-model-0000001-0000008.safetensors").unlink()
    with pytest.raises(DamagedFileError) as caught:
        reshard.open(root)
    assert caught.value.path == str(root)
    for part in ("iteration_00000010: ", "iteration_00000005: ", "demo-model-0000001-0000008.safetensors"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("tracker", "iteration", "warns"),
    [("5", 5, False), ("5\n", 5, False), ("", 10, True), ("ten", 10, True), ("777", 10, True), ("-5", 10, True)],
)
def test_what_a_tracker_says(
    tracker: str, iteration: int, *, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = copied("ckpt2", tmp_path / "root")
    (root / "latest_checkpointed_iteration.txt").write_text(tracker)
    with caplog.at_level(logging.WARNING, "reshard"), reshard.open(root) as opened:
        assert opened.iteration == iteration
    assert bool(caplog.messages) == warns


def test_a_root_without_a_tracker_is_its_newest_iteration(tmp_path: Path) -> None:
    root = copied("ckpt2", tmp_path / "root")
    (root / "latest_checkpointed_iteration.txt").unlink()
    with reshard.open(root) as opened:
        assert opened.iteration == 10


def test_iterations_of_a_root_and_of_anything_else(tmp_path: Path) -> None:
    order = opening.iterations(SAMPLES / "ckpt2" / "checkpoint")
    assert order is not None
    assert [one.name for one in order.candidates] == ["iteration_00000010", "iteration_00000005"]
    assert opening.iterations(SAMPLES / "full_hf") is None
    assert opening.iterations(folder_of("ckpt2", 5)) is None
    assert opening.iterations(tmp_path / "nothing") is None


@pytest.mark.parametrize("name", ["nothing", "a" * 300, "a\0b", "loop", "empty", "text"])
def test_what_is_no_checkpoint(name: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "readme.txt").write_text("hello")
    with pytest.raises(ReshardError) as caught:
        reshard.open(tmp_path / name)
    assert isinstance(caught.value, CheckpointNotFoundError | StorageError)
    assert caught.value.path is not None


# -- Hugging Face folders


def test_a_folder_of_a_download_cache(tmp_path: Path) -> None:
    """Every file of a revision is a link into the store of blobs."""
    blobs, revision = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    revision.mkdir(parents=True)
    for path in (SAMPLES / "full_hf").iterdir():
        shutil.copy(path, blobs / f"blob-{path.name[:12]}-{path.stat().st_size}")
        (revision / path.name).symlink_to(f"../../blobs/blob-{path.name[:12]}-{path.stat().st_size}")
    with reshard.open(revision) as opened, reshard.open(SAMPLES / "full_hf") as plain:
        assert opened.format == "huggingface"
        assert_same(opened.load(), plain.load())


def test_a_folder_with_one_file(tmp_path: Path) -> None:
    save_file({"w": np.ones(3, np.float16)}, tmp_path / "model.safetensors")
    save_file({"w": np.zeros(3, np.float16)}, tmp_path / "other.safetensors")
    with reshard.open(tmp_path) as opened:
        assert (opened.format, opened.keys(), opened.read("w").tolist()) == ("huggingface", ["w"], [1, 1, 1])


@pytest.mark.parametrize(
    ("weight_map", "error", "named"),
    [
        ({"a": "x.safetensors", "b": "x.safetensors"}, DamagedFileError, "`b`"),
        ({"a": "x.safetensors", "b": "y.safetensors"}, CheckpointNotFoundError, "y.safetensors"),
        ({"a": "y.safetensors"}, CheckpointNotFoundError, "y.safetensors"),
    ],
)
def test_an_index_that_names_what_is_not_there(
    weight_map: dict[str, str], error: type[ReshardError], named: str, tmp_path: Path
) -> None:
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "x.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(error, match=named):
        reshard.open(tmp_path)


def test_a_file_of_unknown_suffix(tmp_path: Path) -> None:
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "weights.bin")
    with reshard.open(tmp_path / "weights.bin") as opened:
        assert opened.read("w").tolist() == [1, 1, 1]


# -- load


TENSORS: Arrays = {
    "w": np.arange(48, dtype=np.float32).reshape(8, 6),
    "half": np.arange(16).astype(ml_dtypes.bfloat16).reshape(4, 4),
    "ids": np.arange(5, dtype=np.int64),
    "one": np.array(7, np.float64),
    "none": np.zeros((0, 3), np.float32),
}
LAYOUT: dict[str, Any] = {
    "mesh": {"dp": 2, "tp": 2},
    "rules": [
        {"match": "w", "cut": ["tp", "dp"]},
        {"match": "half", "cut": [None, "tp"]},
        {"match": "*"},
    ],
}


@pytest.fixture
def small(tmp_path: Path) -> Any:
    """A file with `TENSORS` in it."""
    reshard.save_file(TENSORS, tmp_path / "small.safetensors")
    with reshard.open(tmp_path / "small.safetensors") as opened:
        yield opened


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


def interrupt(code: str, *arguments: object) -> float:
    """Run code that prints `go` and then works for long, press Ctrl-C; the seconds until it is over."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"go\n"
    time.sleep(0.4)
    assert process.poll() is None
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    try:
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode in (-signal.SIGINT, 130), errors.decode()
    assert b"KeyboardInterrupt" in errors
    return time.monotonic() - started


def test_ctrl_c_stops_a_load(big: Path) -> None:
    code = """
    import sys, reshard
    opened = reshard.open(sys.argv[1])
    print("go", flush=True)
    while True:
        opened.load()
    """
    assert interrupt(code, big) < 8  # less than one on an idle machine, and all of a load takes more


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
