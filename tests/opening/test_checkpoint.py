"""`reshard.open` and `Checkpoint`, on real trees: every tensor is its ground truth, and each tree is found.

The ground truth was stored beside the samples when they were made, and is read here without `reshard`.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.helpers import original_reader
from tests.helpers.arrays import Arrays, assert_same
from tests.opening.small import BIAS, UNLISTED, folder_of, ground_truth

import reshard
from reshard import opening
from reshard.errors import (
    CheckpointNotFoundError,
    DamagedFileError,
    ReshardError,
    StorageError,
)

SAMPLES = Path(__file__).parents[1] / "data" / "mindspore"
TREES = [
    ("ckpt2", 5),
    ("ckpt2", 10),
    ("ckpt2_dedup", 5),
    ("ckpt2_dedup", 10),
    ("ckpt2_named", 7),
    ("ckpt2_single", 3),
]


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
