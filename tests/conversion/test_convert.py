"""`reshard.convert`: every destination, compared with numpy, MindSpore's reader and stock safetensors.

`test_convert_options` has the options, and `test_convert_failures` the state of the disk after a refused, failed,
interrupted or killed conversion.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file
from tests.conversion.models import (
    BOTH,
    EXPRESSIBLE,
    INEXPRESSIBLE,
    MODEL,
    OPTIMIZER,
    REST,
    assert_opens_as,
    huggingface,
    no_umask,
    noise,
    single,
)
from tests.helpers import original_reader
from tests.helpers.arrays import Arrays, assert_same
from tests.helpers.ckpt_files import dump
from tests.helpers.oracle import local_arrays, mesh_ranks

import reshard
from reshard.errors import ArgumentError, UnsupportedError

__all__ = ["huggingface", "no_umask", "single"]

SAMPLES = Path(__file__).parents[1] / "data" / "mindspore"
LAYOUTS = EXPRESSIBLE | {name: layout for name, (layout, _) in INEXPRESSIBLE.items()}


# -- Checkpoint 2.0


@pytest.mark.parametrize("dedup", [True, False])
@pytest.mark.parametrize("name", EXPRESSIBLE)
def test_the_original_reads_what_we_write(single: Path, tmp_path: Path, name: str, dedup: bool) -> None:  # noqa: FBT001
    layout = EXPRESSIBLE[name]
    report = reshard.convert(
        single, tmp_path / "root", layout=layout, files={"dedup": dedup}, commit={"durable": False}
    )
    folder = tmp_path / "root" / "iteration_00000042"
    assert (report.path, report.to, report.not_expressible) == (str(folder), "checkpoint2", {})
    assert (report.n_tensors, report.n_files) == (len(BOTH), len(list(folder.glob("*.safetensors"))))
    assert report.n_bytes == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert not (folder / "tiles.json").exists()
    for release in ("1.9.0", "head"):
        assert_same(original_reader.read_tree(tmp_path / "root", release), BOTH)
    original_reader.audit(folder, dedup=dedup)
    assert_opens_as(tmp_path / "root", BOTH, OPTIMIZER)


@pytest.mark.parametrize("name", LAYOUTS)
def test_without_dedup_each_ranks_files_are_what_it_holds(single: Path, tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    reshard.convert(single, tmp_path / "root", layout=layout, files={"dedup": False}, commit={"durable": False})
    folder, n_ranks = tmp_path / "root" / "iteration_00000042", max(mesh_ranks(layout)) + 1
    for rank in mesh_ranks(layout):
        found: Arrays = {}
        for part in ("model", "opt"):
            path = folder / f"{part}-{rank:07d}-{n_ranks:07d}.safetensors"
            found |= load_file(path) if path.exists() else {}
        assert_same(found, local_arrays(layout, BOTH, rank, list(OPTIMIZER)))


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("dedup", [True, False])
@pytest.mark.parametrize("name", INEXPRESSIBLE)
def test_what_metadata_json_cannot_say_is_in_tiles_json(
    single: Path,
    tmp_path: Path,
    name: str,
    dedup: bool,  # noqa: FBT001
    caplog: pytest.LogCaptureFixture,
) -> None:
    layout, keys = INEXPRESSIBLE[name]
    with caplog.at_level(logging.WARNING, "reshard"):
        report = reshard.convert(
            single, tmp_path / "root", layout=layout, files={"dedup": dedup}, commit={"durable": False}
        )
    told = [message for message in caplog.messages if "metadata.json cannot express" in message]
    assert len(told) == 1
    assert told[0] in report.warnings
    assert set(report.not_expressible) == set(keys.split())
    assert_opens_as(tmp_path / "root", BOTH, OPTIMIZER)
    with reshard.open(tmp_path / "root") as opened:
        assert set(opened.tiled_keys()) == set(keys.split())
    rest = {key: array for key, array in BOTH.items() if key not in keys.split()}
    assert_same(original_reader.read_tree(tmp_path / "root"), rest)
    # Once more from there, into plain tensors.
    reshard.convert(tmp_path / "root", tmp_path / "hf", part="all", commit={"durable": False})
    assert_opens_as(tmp_path / "hf", BOTH)


def test_what_metadata_json_cannot_say_can_be_refused(single: Path, tmp_path: Path) -> None:
    for layout, _ in INEXPRESSIBLE.values():
        with pytest.raises(UnsupportedError, match=r"metadata\.json cannot express") as caught:
            reshard.convert(single, tmp_path / "root", layout=layout, files={"strict_format": True})
        assert caught.value.key in BOTH
        assert not list(tmp_path.iterdir())
    reshard.convert(
        single, tmp_path / "root", layout=EXPRESSIBLE["tp2"], files={"strict_format": True}, commit={"durable": False}
    )


def test_types_that_mindspore_has_not_are_in_tiles_json(tmp_path: Path) -> None:
    arrays = {"w": noise(ml_dtypes.float8_e4m3fn, (8, 4), 1), "v": noise(np.float32, (4,), 2)}
    reshard.save_file(arrays, tmp_path / "in.safetensors")
    report = reshard.convert(
        tmp_path / "in.safetensors", tmp_path / "root", layout={"mesh": {"tp": 2}, "rules": [REST]}
    )
    assert set(report.not_expressible) == {"w"}
    assert_opens_as(tmp_path / "root", arrays)


@pytest.mark.parametrize(("tree", "iteration"), [("ckpt2", 10), ("ckpt2_dedup", 10), ("ckpt2_named", 7)])
def test_samples_again(tree: str, iteration: int, tmp_path: Path) -> None:
    """A tree of the original, cut anew, read by the original: counters and tensors are what they were."""
    layout = {"mesh": {"dp": 2, "tp": 2}, "rules": [{"match": ["*.weight"], "cut": ["tp"]}, REST]}
    source = SAMPLES / tree / "checkpoint"
    reshard.convert(source, tmp_path / "root", layout=layout, files={"prefix": "again"}, commit={"durable": False})
    expected = original_reader.read_shard_file(SAMPLES / tree / f"expected_{iteration:08d}.safetensors")
    found = original_reader.read_tree(tmp_path / "root", "head")
    step = found.pop("global_step", None)
    assert step is None or step.tolist() == [iteration]
    assert_same(found, expected)
    assert original_reader.read_common(tmp_path / "root", "head") == original_reader.read_common(source, "head")
    # As what the original wrote it says less than the original: the earlier release reads it while it can.
    common = json.loads((tmp_path / "root" / f"iteration_{iteration:08d}" / "common.json").read_text())
    assert ("ckpt_status" in common) == (tree != "ckpt2_named")


def test_counters_that_are_null_are_left_out(single: Path, huggingface: Path, tmp_path: Path) -> None:
    reshard.convert(single, tmp_path / "a", layout=EXPRESSIBLE["one"])
    reshard.convert(huggingface, tmp_path / "b", to="checkpoint2")
    of_190 = ["epoch_num", "step_num", "global_step", "loss_scale", "global_batch_size"]
    for root, folder in ((tmp_path / "a", "iteration_00000042"), (tmp_path / "b", "iteration_00000000")):
        assert list(json.loads((root / folder / "common.json").read_text())) == of_190
        original_reader.read_common(root, "1.9.0")
    assert original_reader.read_common(tmp_path / "a").loss_scale == 0.5
    assert original_reader.read_tree(tmp_path / "b").keys() == MODEL.keys()


@pytest.mark.parametrize("via", ["safetensors", "ckpt", "dcp"])
def test_counters_of_any_source_are_in_common_json(via: str, tmp_path: Path) -> None:
    counters = {"step_num": np.array(40), "loss_scale": np.array([2.0], np.float32), "epoch_num": np.array(2, np.int32)}
    state: dict[str, np.ndarray] = {"w": np.zeros(3), "adam_m.w": np.ones(3), "global_step": np.array([39], np.int32)}
    source = tmp_path / f"x.{via}"
    if via == "dcp":
        reshard.save(tmp_path / "from", 39, state, common={"step_num": 39, "global_step": 39})
        reshard.convert(tmp_path / "from", source, to="dcp")
    elif via == "ckpt":
        source.write_bytes(dump(state | counters))
    else:
        reshard.save_file(state | counters, source)
    for format_ in ("checkpoint2", "checkpoint1"):
        reshard.convert(source, tmp_path / format_, to=format_)
        loaded = reshard.load(tmp_path / format_)
        assert loaded.common is not None
        assert (loaded.common.global_step, loaded.decision.initial_step) == (39, 39 if via == "dcp" else 40)
        if via != "dcp":
            assert (loaded.common.epoch_num, loaded.common.loss_scale, loaded.iteration) == (2, 2.0, 40)
    assert reshard.load(tmp_path / "checkpoint2").iteration == (39 if via == "dcp" else 40)


def test_a_tensor_that_is_no_counter_is_not_left_out(tmp_path: Path) -> None:
    source = tmp_path / "x.safetensors"
    reshard.save_file({"w": np.zeros(3), "step_num": np.array(-1.5)}, source)
    with pytest.raises(UnsupportedError, match="step_num"):
        reshard.convert(source, tmp_path / "root", to="checkpoint2")
    assert not (tmp_path / "root").exists()
    reshard.convert(source, tmp_path / "root", to="checkpoint2", select={"drop": "step_num"})


def test_there_is_never_a_null_layout(huggingface: Path, tmp_path: Path) -> None:
    reshard.convert(huggingface, tmp_path / "root", to="checkpoint2", commit={"durable": False})
    metadata = json.loads((tmp_path / "root/iteration_00000000/metadata.json").read_text())
    for key, said in metadata["state_dict_metadata"].items():
        assert said["layout"]["tensor_map"] == [-1] * MODEL[key].ndim
        assert said["layout"]["device_matrix"] == [1]


@pytest.mark.parametrize(
    ("options", "folder", "name"),
    [
        ({}, "iteration_00000042", "model-0000000-0000001.safetensors"),
        ({"iteration": 0}, "iteration_00000000", "model-0000000-0000001.safetensors"),
        ({"iteration": 123456789}, "iteration_123456789", "model-0000000-0000001.safetensors"),
        ({"files": {"prefix": "my-run"}}, "iteration_00000042", "my-run-model-0000000-0000001.safetensors"),
        ({"files": {"prefix": "x"}, "iteration": 7}, "iteration_00000007", "x-opt-0000000-0000001.safetensors"),
    ],
)
def test_iteration_and_prefix(single: Path, tmp_path: Path, options: Any, folder: str, name: str) -> None:
    reshard.convert(single, tmp_path / "root", to="checkpoint2", **options)
    assert sorted(entry.name for entry in (tmp_path / "root").iterdir()) == [
        ".lock",
        ".writers",
        folder,
        "latest_checkpointed_iteration.txt",
    ]
    assert (tmp_path / "root" / folder / name).is_file()
    tracker = (tmp_path / "root/latest_checkpointed_iteration.txt").read_bytes()
    assert tracker == str(int(folder.removeprefix("iteration_"))).encode()
    assert_same(original_reader.read_tree(tmp_path / "root"), BOTH)


def test_parts(single: Path, tmp_path: Path) -> None:
    for part, expected in {"model": MODEL, "optimizer": OPTIMIZER, "all": BOTH}.items():
        for to in ("checkpoint2", "huggingface", "safetensors"):
            target = tmp_path / f"{part}-{to}"
            reshard.convert(single, target, to=to, part=part, commit={"durable": False})  # type: ignore[arg-type]
            assert_opens_as(target, expected)
    reshard.convert(single, tmp_path / "default", commit={"durable": False})
    assert_opens_as(tmp_path / "default", MODEL)


def test_a_part_of_a_layout_with_stages_counts_layers_over_everything(single: Path, tmp_path: Path) -> None:
    layout = EXPRESSIBLE["zero with stages"]
    reshard.convert(single, tmp_path / "root", layout=layout, part="optimizer", commit={"durable": False})
    assert_same(original_reader.read_tree(tmp_path / "root"), OPTIMIZER)


# -- Hugging Face and plain files


def test_a_hugging_face_folder_of_one_file(single: Path, tmp_path: Path) -> None:
    report = reshard.convert(single, tmp_path / "out")
    assert (report.to, report.n_files, report.path) == ("huggingface", 1, str(tmp_path / "out"))
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), MODEL)
    with safe_open(tmp_path / "out" / "model.safetensors", "numpy") as file:
        assert file.metadata()["format"] == "pt"


def test_the_file_size_is_accepted_where_save_pretrained_has_it(single: Path, tmp_path: Path) -> None:
    for number, size in enumerate((1000, "1KB", "0.5KiB")):
        short = reshard.convert(single, tmp_path / f"{number}", max_shard_size=size)  # type: ignore[arg-type]
        long = reshard.convert(single, tmp_path / f"{number} long", files={"max_shard_size": size})
        assert short.n_files == long.n_files > 1
        for path in sorted((tmp_path / f"{number}").iterdir()):
            assert path.read_bytes() == (tmp_path / f"{number} long" / path.name).read_bytes()
    with pytest.raises(ArgumentError, match=r"`max_shard_size` is given twice"):
        reshard.convert(single, tmp_path / "no", max_shard_size="5GB", files={"max_shard_size": "4GB"})
    for wrong in ("5 gigabytes", "5Gb", 0, 1.5):
        with pytest.raises(ArgumentError):
            reshard.convert(single, tmp_path / "no", max_shard_size=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "limit"), [("1MiB", 1 << 20), (1000, 1000), ("0.5KiB", 512), ("1KB", 1000), (1, 1)])
def test_a_hugging_face_folder_of_a_file_size(single: Path, tmp_path: Path, size: Any, limit: int) -> None:
    report = reshard.convert(single, tmp_path / "out", files={"max_shard_size": size}, commit={"durable": False})
    paths = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(paths) == report.n_files
    assert (len(paths) == 1) == (limit > sum(array.nbytes for array in MODEL.values()))
    found: Arrays = {}
    where: dict[str, str] = {}
    for number, path in enumerate(paths, 1):
        arrays = load_file(path)
        assert not set(arrays) & set(found)
        # Only a tensor that is larger by itself makes a file larger, and then it is alone.
        assert sum(array.nbytes for array in arrays.values()) <= limit or len(arrays) == 1
        found |= arrays
        where |= dict.fromkeys(arrays, path.name)
        assert path.name == (
            f"model-{number:05d}-of-{len(paths):05d}.safetensors" if len(paths) > 1 else "model.safetensors"
        )
    assert_same(found, MODEL)
    path = tmp_path / "out" / "model.safetensors.index.json"
    assert path.exists() == (len(paths) > 1)
    if path.exists():
        index = json.loads(path.read_text())
        assert index["weight_map"] == where
        assert index["metadata"]["total_size"] == sum(array.nbytes for array in MODEL.values())
    assert_opens_as(tmp_path / "out", MODEL)


def test_one_file(single: Path, tmp_path: Path) -> None:
    report = reshard.convert(single, tmp_path / "new/folder/out.safetensors", to="safetensors")
    assert (report.n_files, report.n_tensors) == (1, len(BOTH))
    assert [entry.name for entry in (tmp_path / "new/folder").iterdir()] == ["out.safetensors"]
    assert_same(load_file(tmp_path / "new/folder/out.safetensors"), BOTH)


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_file_a_rank(single: Path, tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    report = reshard.convert(single, tmp_path / "out", to="safetensors", layout=layout, commit={"durable": False})
    assert report.not_expressible == {}
    names = {"tiles.json"}
    for rank in mesh_ranks(layout):
        expected = local_arrays(layout, BOTH, rank, list(OPTIMIZER))
        assert_same(load_file(tmp_path / "out" / f"rank_{rank}.safetensors"), expected)
        names.add(f"rank_{rank}.safetensors")
    assert {entry.name for entry in (tmp_path / "out").iterdir()} == names
    assert_opens_as(tmp_path / "out", BOTH)


# -- there and back


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("name", LAYOUTS)
def test_there_and_back_is_the_identity(huggingface: Path, tmp_path: Path, name: str) -> None:
    """Through the layout, through another one, and back: NaN payloads and -0.0 too."""
    other = {"mesh": {"dp": 2, "tp": 3}, "rules": [{"match": "*", "cut": ["tp"], "uneven": "ceil", "flat": ["dp"]}]}
    reshard.convert(huggingface, tmp_path / "a", layout=LAYOUTS[name], commit={"durable": False})
    reshard.convert(tmp_path / "a", tmp_path / "b", layout=other, to="safetensors", commit={"durable": False})
    reshard.convert(
        tmp_path / "b", tmp_path / "c", layout=LAYOUTS[name], files={"dedup": False}, commit={"durable": False}
    )
    reshard.convert(tmp_path / "c", tmp_path / "hf", commit={"durable": False})
    assert_same(load_file(tmp_path / "hf" / "model.safetensors"), MODEL)
    for rank in mesh_ranks(LAYOUTS[name]):
        with reshard.open(tmp_path / "b") as opened:
            assert_same(opened.load(LAYOUTS[name], rank), local_arrays(LAYOUTS[name], MODEL, rank))
