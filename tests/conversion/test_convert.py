"""`reshard.convert`: every destination and option, compared with numpy, MindSpore's reader and stock safetensors.

`test_convert_failures` has the state of the disk after a refused, failed, interrupted or killed conversion.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tests.helpers import original_reader
from tests.helpers.arrays import Arrays, assert_same
from tests.helpers.ckpt_files import dump
from tests.helpers.oracle import local_arrays, mesh_ranks
from tests.helpers.threads import in_threads

import reshard
from reshard.commit import manifest
from reshard.errors import ArgumentError, LayoutError, ReshardError, UnsupportedError
from reshard.formats import state, state_files
from reshard.storage.location import locate

if TYPE_CHECKING:
    from collections.abc import Iterator

SAMPLES = Path(__file__).parents[1] / "data" / "mindspore"


BF16 = ml_dtypes.bfloat16


def noise(dtype: Any, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Any bits: NaNs of every payload, infinities, -0.0."""
    n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(np.random.default_rng(seed).bytes(n_bytes), dtype).reshape(shape).copy()


MODEL: Arrays = {
    "embed.weight": noise(BF16, (24, 8), 1),
    **{f"layers.{i}.qkv.weight": noise(BF16, (16, 8), 10 + i) for i in range(4)},
    **{f"layers.{i}.out.weight": noise(BF16, (8, 12), 20 + i) for i in range(4)},
    **{f"layers.{i}.experts.weight": noise(np.float32, (4, 4, 6), 30 + i) for i in range(4)},
    **{f"layers.{i}.norm.weight": noise(np.float32, (8,), 40 + i) for i in range(4)},
    "head.weight": noise(np.float16, (24, 8), 2),
    "scale": noise(np.float32, (), 3),
    "ids": noise(np.int64, (6,), 4),
    "none": noise(np.float32, (0, 4), 5),
}
OPTIMIZER: Arrays = {
    f"{slot}.{key}": noise(np.float32, array.shape, 100 + i)
    for i, (slot, key, array) in enumerate((s, k, a) for s in ("exp_avg", "exp_avg_sq") for k, a in MODEL.items())
    if array.dtype == BF16
} | {"step": np.array([7], np.int32)}
BOTH = MODEL | OPTIMIZER

TP = [
    {"match": ["embed.*", "head.*", "*.qkv.*"], "cut": ["tp"]},
    {"match": "*.out.*", "cut": [None, "tp"]},
    {"match": "*.experts.*", "cut": [None, None, "tp"]},
]
REST = {"match": "*"}
PIPELINE = [
    {"match": "layers.{i}.*", "axis": "pp"},
    {"match": "embed.*", "axis": "pp", "at": 0},
    {"match": "head.*", "axis": "pp", "at": -1},
]
Layout = dict[str, Any]
EXPRESSIBLE: dict[str, Layout] = {
    "one": {"mesh": {"tp": 1}, "rules": [REST]},
    "replicated": {"mesh": {"dp": 3}, "rules": [REST]},
    "tp2": {"mesh": {"tp": 2}, "rules": [*TP, REST]},
    "tp4": {"mesh": {"tp": 4}, "rules": [{"match": "*.experts.*", "cut": ["tp"]}, *TP, REST]},
    "dp2 tp2": {"mesh": {"dp": 2, "tp": 2}, "rules": [*TP, REST]},
    "tp2 dp2": {"mesh": {"tp": 2, "dp": 2}, "rules": [*TP, REST]},
    "pp2 tp2": {"mesh": {"pp": 2, "tp": 2}, "rules": [*TP, REST], "place": PIPELINE},
    "pp4": {"mesh": {"pp": 4}, "rules": [REST], "place": PIPELINE},
    "pp2 dp2 tp2": {"mesh": {"pp": 2, "dp": 2, "tp": 2}, "rules": [*TP, REST], "place": PIPELINE},
    "pp uneven": {
        "mesh": {"pp": 2, "tp": 2},
        "rules": [*TP, REST],
        "place": [{"match": "layers.{i}.*", "axis": "pp", "sizes": [3, 1]}],
    },
    "two axes on a dim": {
        "mesh": {"dp": 2, "tp": 2},
        "rules": [{"match": "embed.*", "cut": [["dp", "tp"]]}, {"match": "head.*", "cut": [["tp", "dp"]]}, *TP, REST],
    },
    "two dims": {"mesh": {"dp": 2, "tp": 2}, "rules": [{"match": "*.weight", "cut": ["tp"]}, REST]},
    "an axis of one": {"mesh": {"dp": 1, "tp": 2, "cp": 1}, "rules": [*TP, REST]},
    "zero": {"mesh": {"dp": 2, "tp": 2}, "rules": [*TP, REST], "optimizer": {"add": {0: ["dp"]}}},
    "zero with stages": {
        "mesh": {"pp": 2, "dp": 2, "tp": 2},
        "rules": [*TP, REST],
        "place": PIPELINE,
        "optimizer": {"add": {0: ["dp"]}},
    },
}
# Each with the keys that metadata.json cannot express.
INEXPRESSIBLE: dict[str, tuple[Layout, str]] = {
    "ceil": (
        {"mesh": {"tp": 5}, "rules": [{"match": ["embed.*", "ids"], "cut": ["tp"], "uneven": "ceil"}, REST]},
        "embed.weight ids exp_avg.embed.weight exp_avg_sq.embed.weight",
    ),
    "sizes": (
        {"mesh": {"tp": 3}, "rules": [{"match": "head.weight", "cut": ["tp"], "sizes": {0: [20, 0, 4]}}, REST]},
        "head.weight",
    ),
    "blocks": (
        {
            "mesh": {"tp": 4},
            "rules": [
                {"match": "layers.0.qkv.*", "cut": ["tp"], "blocks": {0: [8, {"size": 4, "cut": None}, 4]}},
                REST,
            ],
        },
        "layers.0.qkv.weight exp_avg.layers.0.qkv.weight exp_avg_sq.layers.0.qkv.weight",
    ),
    "flat": (
        {"mesh": {"dp": 5}, "rules": [{"match": ["head.weight", "ids"], "flat": ["dp"]}, REST]},
        "head.weight ids",
    ),
    "flat after a cut": (
        {"mesh": {"tp": 2, "dp": 3}, "rules": [{"match": "head.weight", "cut": ["tp"], "flat": ["dp"]}, *TP, REST]},
        "head.weight",
    ),
    "flat optimizer": (
        {"mesh": {"dp": 3}, "rules": [REST], "optimizer": {"flat": ["dp"]}},
        " ".join(key for key in OPTIMIZER if key != "step"),
    ),
    "stored": (
        {"mesh": {"tp": 2}, "rules": [{"match": "head.weight", "cut": ["tp"], "stored": [1, 0]}, REST]},
        "head.weight",
    ),
    "joined": (
        {
            "mesh": {"dp": 4},
            "rules": [{"match": "*.norm.weight", "flat": {"axes": ["dp"], "join": "norms", "align": 3}}, REST],
        },
        " ".join(f"layers.{i}.norm.weight" for i in range(4)),
    ),
    "joined in stages": (
        {
            "mesh": {"pp": 2, "dp": 2},
            "rules": [{"match": ["*.norm.weight"], "flat": {"axes": ["dp"], "join": "norms"}}, REST],
            "place": PIPELINE,
        },
        " ".join(f"layers.{i}.norm.weight" for i in range(4)),
    ),
    "ranks in another order": ({"mesh": {"tp": 2}, "ranks": [1, 0], "rules": [*TP, REST]}, " ".join(BOTH)),
    "ranks with gaps": ({"mesh": {"tp": 2}, "ranks": [4, 9], "rules": [*TP, REST]}, " ".join(BOTH)),
}
LAYOUTS = EXPRESSIBLE | {name: layout for name, (layout, _) in INEXPRESSIBLE.items()}


@pytest.fixture(scope="module")
def huggingface(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, written by stock safetensors."""
    folder = tmp_path_factory.mktemp("hf")
    save_file(MODEL, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model and optimizer as one device leaves them: no metadata.json."""
    folder = tmp_path_factory.mktemp("single") / "iteration_0000042"
    folder.mkdir()
    save_file(MODEL, folder / "model-0000000-0000001.safetensors")
    save_file(OPTIMIZER, folder / "opt-0000000-0000001.safetensors")
    (folder / "common.json").write_text(
        json.dumps({"epoch_num": 1, "step_num": 42, "global_step": 42, "loss_scale": 0.5, "ckpt_status": None})
    )
    return folder


def assert_opens_as(path: Path, expected: Arrays, optimizer: Arrays | None = None) -> None:
    with reshard.open(path) as opened:
        assert_same(opened.load(), expected)
        if optimizer is not None:
            assert set(opened.keys("optimizer")) == set(optimizer)


@pytest.fixture(autouse=True)
def no_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


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


# -- options


@pytest.mark.parametrize("layout", [None, EXPRESSIBLE["zero"], INEXPRESSIBLE["joined"][0]])
def test_a_cast(single: Path, tmp_path: Path, layout: Layout | None) -> None:
    reshard.convert(single, tmp_path / "out", dtype="bfloat16", part="all", layout=layout, commit={"durable": False})
    with reshard.open(tmp_path / "out") as opened:
        found = opened.load()
    assert set(found) == set(BOTH)
    for key, array in BOTH.items():
        if array.dtype.kind == "i":
            assert_same({key: found[key]}, {key: array})
            continue
        assert found[key].dtype == BF16
        with np.errstate(all="ignore"):
            expected = array.astype(BF16)
        # The payload of a NaN that is cast is nobody's promise.
        assert np.array_equal(found[key].astype(np.float32), expected.astype(np.float32), equal_nan=True), key
        if array.dtype == BF16:
            assert_same({key: found[key]}, {key: array})


@pytest.mark.parametrize("memory", ["8MiB", 8 << 20, "1GiB"])
@pytest.mark.parametrize("threads", [1, 3])
def test_memory_and_threads_make_no_difference(single: Path, tmp_path: Path, memory: Any, threads: int) -> None:
    reshard.convert(single, tmp_path / "out", memory=memory, threads=threads, commit={"durable": False})
    assert_opens_as(tmp_path / "out", MODEL)


@pytest.mark.parametrize(
    "options",
    [
        {"memory": "lots"},
        {"memory": 1},
        {"memory": "1KiB"},
        {"memory": 0},
        {"memory": -1},
        {"memory": "0MiB"},
        {"memory": True},
        {"memory": 1.5},
        {"memory": None},
        {"files": {"max_shard_size": "lots"}},
        {"files": {"max_shard_size": 0}},
        {"to": "gguf"},
        {"part": "weights"},
        {"threads": 0},
        {"threads": 10**6},
        {"iteration": 3},
        {"files": {"prefix": "x"}},
        {"files": {"modes": "mindspore-transformers"}},
        {"files": {"modes": "0777"}, "to": "checkpoint2"},
        {"iteration": -1, "to": "checkpoint2"},
        {"iteration": True, "to": "checkpoint2"},
        {"iteration": "3", "to": "checkpoint2"},
        {"iteration": 10**18, "to": "checkpoint2"},
        {"files": {"prefix": ""}, "to": "checkpoint2"},
        {"files": {"prefix": "a/b"}, "to": "checkpoint2"},
        {"files": {"prefix": ".."}, "to": "checkpoint2"},
        {"files": {"prefix": ".hidden"}, "to": "checkpoint2"},
        {"files": {"prefix": "a\nb"}, "to": "checkpoint2"},
        {"files": {"prefix": "x" * 200}, "to": "checkpoint2"},
        {"layout": EXPRESSIBLE["tp2"], "to": "huggingface"},
    ],
    ids=repr,
)
def test_options_that_cannot_be_meant(single: Path, tmp_path: Path, options: Any) -> None:
    with pytest.raises(ArgumentError):
        reshard.convert(single, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"dtype": "int8"}, UnsupportedError),
        ({"dtype": "nonsense"}, ReshardError),
        ({"layout": "no such.yaml"}, ReshardError),
        ({"layout": {"mesh": {"tp": 7}, "rules": [*TP, REST]}}, LayoutError),
        ({"layout": {"mesh": {"tp": 2}, "rules": TP}}, LayoutError),
        ({"layout": {"mesh": {"tp": 2}, "rules": [*TP, REST], "place": [{"match": "*", "axis": "x"}]}}, LayoutError),
    ],
)
def test_what_does_not_fit_the_source(single: Path, tmp_path: Path, options: Any, error: type[ReshardError]) -> None:
    with pytest.raises(error):
        reshard.convert(single, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_one_file_for_several_ranks(single: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="one file"):
        reshard.convert(single, tmp_path / "o.safetensors", to="safetensors", layout=EXPRESSIBLE["tp2"])


def test_a_part_of_which_there_is_nothing(huggingface: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="nothing to write"):
        reshard.convert(huggingface, tmp_path / "out", part="optimizer")


@pytest.mark.parametrize("to", ["huggingface", "checkpoint2", "safetensors"])
def test_progress_goes_once_from_nothing_to_the_total(single: Path, tmp_path: Path, to: Any) -> None:
    calls: list[tuple[int, int]] = []
    layout = None if to == "huggingface" else EXPRESSIBLE["pp2 tp2"]
    reshard.convert(
        single,
        tmp_path / "out",
        to=to,
        layout=layout,
        files={"max_shard_size": 1000},
        part="all",
        commit={"durable": False},
        progress=lambda done, total: calls.append((done, total)),
    )
    (total,) = {total for _, total in calls}
    done = [done for done, _ in calls]
    assert (done[0], done[-1]) == (0, total)
    assert done == sorted(done)
    n_bytes = sum(array.nbytes for array in BOTH.values())
    assert total == n_bytes if to == "huggingface" else total >= n_bytes


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_permissions(single: Path, tmp_path: Path, mask: int) -> None:
    os.umask(mask)
    reshard.convert(single, tmp_path / "c2", to="checkpoint2", layout=INEXPRESSIBLE["flat"][0])
    reshard.convert(single, tmp_path / "hf", files={"max_shard_size": 1000})
    reshard.convert(single, tmp_path / "st", to="safetensors", layout=EXPRESSIBLE["tp2"])
    reshard.convert(single, tmp_path / "one.safetensors", to="safetensors")
    for name in ("c2", "hf", "st"):
        for path in (tmp_path / name, *(tmp_path / name).rglob("*")):
            expected = (0o777 if path.is_dir() else 0o666) & ~mask
            assert oct(stat.S_IMODE(path.stat().st_mode)) == oct(expected), path
    assert stat.S_IMODE((tmp_path / "one.safetensors").stat().st_mode) == 0o666 & ~mask


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_permissions_of_the_original(tmp_path: Path, mask: int) -> None:
    os.umask(mask)
    said = json.loads((SAMPLES / "ckpt2" / "modes_as_written.json").read_text())
    reshard.convert(
        SAMPLES / "ckpt2" / "checkpoint", tmp_path / "root", to="checkpoint2", files={"modes": "mindspore-transformers"}
    )
    modes = {Path(name).name: mode for name, mode in said.items()}
    ours = {"manifest.json", "checksums.bin"}
    for path in (tmp_path / "root").rglob("[!.]*"):
        if ".writers" in path.parts:
            continue
        if path.suffix == ".safetensors":
            expected = 0o400
        elif path.is_dir():
            expected = 0o750
        else:
            expected = 0o640
            assert path.name in modes.keys() | ours
        assert oct(stat.S_IMODE(path.stat().st_mode)) == oct(expected), path
    assert stat.S_IMODE((tmp_path / "root").stat().st_mode) == 0o750


def test_files_name_their_writer(single: Path, tmp_path: Path) -> None:
    reshard.convert(single, tmp_path / "c2", to="checkpoint2")
    reshard.convert(single, tmp_path / "hf")
    for path, name in ((tmp_path / "c2", "ms"), (tmp_path / "hf", "pt")):
        for file in path.rglob("*.safetensors"):
            with safe_open(file, "numpy") as opened:
                assert opened.metadata() == {"format": name, "reshard": reshard.__version__}


def test_data_begins_on_a_boundary_of_64_bytes(single: Path, tmp_path: Path) -> None:
    reshard.convert(single, tmp_path / "root", layout=EXPRESSIBLE["pp2 dp2 tp2"], commit={"durable": False})
    for path in (tmp_path / "root").rglob("*.safetensors"):
        n_header = int.from_bytes(path.read_bytes()[:8], "little")
        assert (8 + n_header) % 64 == 0


def test_many_small_rank_files_are_written_without_a_thread_for_each(tmp_path: Path) -> None:
    n = 2048
    save_file({"w": np.arange(2 * n, dtype=np.int32)}, tmp_path / "m.safetensors")
    layout = {"mesh": {"tp": n}, "rules": [{"match": "*", "cut": ["tp"]}]}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    reshard.convert(
        tmp_path / "m.safetensors", tmp_path / "ranks", to="safetensors", layout=layout, commit={"durable": False}
    )
    # Each hand-over to another thread is at least one: with a thread for each file there were four.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before < n
    for rank in (0, 1, n - 1):
        written = load_file(tmp_path / "ranks" / f"rank_{rank}.safetensors")
        assert written["w"].tolist() == [2 * rank, 2 * rank + 1]


@pytest.mark.parametrize("form", ["file", "files", "ranks", "replicas", "empty", "mixed"])
def test_many_tensors_are_written_as_few_are(form: str, tmp_path: Path) -> None:
    """More than one thread plans at a time, and in an order that is not that of the files."""
    n = 20_000
    data = np.random.default_rng(0).integers(0, 255, (n, 4), np.uint8)
    order = np.random.default_rng(1).permutation(n)
    arrays = {f"t{i}": data[i] if i % 3 else data[i].astype(np.float16) for i in map(int, order)}
    if form in ("empty", "mixed"):
        arrays["t7"] = np.zeros((0, 3), np.float32)
    source, first = tmp_path / "source.safetensors", tmp_path / "first"
    save_file(arrays, source)
    layout: dict[str, Any] = {"mesh": {"tp": 2}, "rules": [{"match": "t1*", "cut": ["tp"]}, {"match": "*", "cut": []}]}
    files: dict[str, Any] = {"dedup": form != "replicas"}
    match form:
        case "file" | "empty":
            first = source
        case "files":
            reshard.convert(source, first, to="huggingface", files={"max_shard_size": 40_000})
        case _:
            if form == "ranks":
                layout["rules"] = [{"match": "*", "cut": []}]
            reshard.convert(source, first, layout=layout, to="checkpoint2", files=files)
    cases: tuple[dict[str, Any], ...] = ({}, {"dtype": "F32"}, {"select": {"rename": {"t": "u"}}})
    for number, options in enumerate(cases):
        target = tmp_path / f"target{number}.safetensors"
        reshard.convert(first, target, commit={"durable": False}, **options)
        cast, prefix = "dtype" in options, "u" if "select" in options else "t"
        expected = {
            prefix + key[1:]: array.astype(np.float32) if cast and array.dtype == np.float16 else array
            for key, array in arrays.items()
        }
        assert_same(load_file(target), expected)


def test_state_that_is_not_written_is_a_warning(tmp_path: Path) -> None:
    state = {"w": np.ones((2, 2), np.float32)}
    reshard.save(tmp_path / "with", 7, state, extra={"scheduler": {"last_epoch": 3}})
    reshard.save(tmp_path / "without", 7, state)
    (warning,) = reshard.convert(tmp_path / "with", tmp_path / "new", to="checkpoint1").warnings
    assert "is not written: scheduler. A strict resume from it is refused; resume from the source" in warning
    assert not reshard.convert(tmp_path / "without", tmp_path / "other", to="checkpoint1").warnings


def test_state_goes_into_another_iteration(tmp_path: Path) -> None:
    """Text and arrays, of each rank, whatever the layout; the weights alone have none."""

    def save(group: Any) -> None:
        extra = {
            "scheduler": {"last_epoch": 3, "lrs": np.linspace(0, 1, 5)},
            "random": reshard.per_rank(np.arange(4) + group.rank),
        }
        layout = {"mesh": {"tp": 2}, "rules": [{"match": "w", "cut": ["tp"]}]}
        reshard.save(
            tmp_path / "source", 7, {"w": np.full((1, 2), group.rank)}, extra=extra, layout=layout, group=group
        )

    in_threads(2, save)
    cuts = {"mesh": {"tp": 2, "dp": 2}, "rules": [{"match": "w", "cut": [None, "tp"]}]}
    for number, options in enumerate([{}, {"layout": cuts}, {"select": {"rename": {"w": "w"}}}, {"dtype": "F32"}]):
        target = tmp_path / f"target{number}"
        report = reshard.convert(tmp_path / "source", target, to="checkpoint2", **options)  # type: ignore[arg-type]
        assert not report.warnings
        with reshard.open(target) as checkpoint:
            checkpoint.scrub()
            shared = checkpoint.extra(2)  # a rank that the source did not have
            assert set(shared) == {"scheduler"}
            for rank in range(2):
                found = checkpoint.extra(rank)
                assert found["random"].tolist() == (np.arange(4) + rank).tolist()
                assert found["scheduler"]["last_epoch"] == 3
                assert np.array_equal(found["scheduler"]["lrs"], np.linspace(0, 1, 5))
    weights = reshard.convert(tmp_path / "source", tmp_path / "weights", to="checkpoint2", part="model")
    assert not weights.warnings
    with reshard.open(tmp_path / "weights") as checkpoint:
        assert not checkpoint.extra()


def test_a_file_of_an_iteration_has_no_state_beside_its_tensors(tmp_path: Path) -> None:
    folder = Path(reshard.save(tmp_path / "source", 7, {"w": np.ones(2)}, extra={"note": 1}).path)
    reshard.convert(folder / "model-0000000-0000001.safetensors", tmp_path / "target", to="checkpoint2", iteration=7)
    with reshard.open(tmp_path / "target") as checkpoint:
        assert not checkpoint.extra()


FUSED = {"rules": [{"from": ["w", "v"], "to": "wv", "join": 0}, {"from": "b", "to": "b"}]}


@pytest.mark.parametrize(
    ("options", "is_lost"),
    [
        ({"layout": {"mesh": {"dp": 2}, "rules": [{"match": "*"}]}}, False),
        ({"select": {"drop": "v"}}, False),
        ({"select": {"rename": {"b": "new.b"}}}, True),
        ({"select": {"rename": {"w": "v", "v": "w"}}}, True),
        ({"names": FUSED}, True),
        ({"dtype": "BF16"}, True),
    ],
    ids=["layout", "drop", "rename", "swap", "fuse", "cast"],
)
def test_state_of_tensors_goes_into_another_iteration_if_they_stay_the_same(
    options: Any, tmp_path: Path, *, is_lost: bool
) -> None:
    def save(group: Any) -> None:
        tensors = {"w": np.zeros(4, np.float32), "v": np.ones(4, np.float32), "b": np.full(2, group.rank, np.float32)}
        reshard.save(
            tmp_path / "source",
            7,
            tensors,
            extra={"note": 1},
            layout={"mesh": {"dp": 2}, "rules": [{"match": "*"}]},
            group=group,
            verify={"may_differ": ["b"]},
        )

    assert in_threads(2, save) == [None, None]
    report = reshard.convert(tmp_path / "source", tmp_path / "target", to="checkpoint2", **options)
    with reshard.open(tmp_path / "target") as checkpoint:
        found = [checkpoint.extra(rank) for rank in range(2)]
    if is_lost:
        assert report.warnings[0].startswith(
            "the state of the run beside the tensors is not written: note, rank_local."
        )
        assert found == [{}, {}]
    else:
        assert not report.warnings
        assert [one["rank_local"]["differing"]["b"].tolist() for one in found] == [[0, 0], [1, 1]]


@pytest.mark.parametrize(
    ("rename", "expected"),
    [
        (
            {"": "pre."},
            ["pre.layers.1.w", "pre.w", "adam.v.pre.layers.1.w", "adam_m.pre.b.w", "mine.pre.w", "pre.count"],
        ),
        ({"layers.": "h."}, ["h.1.w", "w", "adam.v.h.1.w", "adam_m.b.w", "mine.w", "count"]),
        ({"adam.v.layers.": "v."}, ["layers.1.w", "w", "v.1.w", "adam_m.b.w", "mine.w", "count"]),
        ({"b.": "c."}, ["layers.1.w", "w", "adam.v.layers.1.w", "adam_m.c.w", "mine.w", "count"]),
    ],
)
def test_state_of_any_slot_is_renamed_like_its_parameter(
    rename: dict[str, str], expected: list[str], tmp_path: Path
) -> None:
    model, state = ["layers.1.w", "w"], ["adam.v.layers.1.w", "adam_m.b.w", "mine.w", "count"]
    given = [{key: np.full(2, n) for n, key in enumerate(keys, first)} for first, keys in ((0, model), (2, state))]
    reshard.save(tmp_path / "source", 7, *given)
    reshard.convert(tmp_path / "source", tmp_path / "target", to="checkpoint2", select={"rename": rename})
    with reshard.open(tmp_path / "target") as opened:
        assert (set(opened.keys("model")), set(opened.keys("optimizer"))) == (set(expected[:2]), set(expected[2:]))
        assert [opened.read(key)[0] for key in expected] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("to", ["huggingface", "torch", "mindspore", "safetensors", "checkpoint1"])
def test_state_that_is_not_written_is_reported_by_every_format(to: Any, tmp_path: Path) -> None:
    reshard.save(tmp_path / "source", 7, {"w": np.ones(2)}, extra={"note": 1})
    (warning,) = reshard.convert(tmp_path / "source", tmp_path / "target", to=to, part="all").warnings
    assert "the state of the run beside the tensors is not written: note." in warning
    assert not reshard.convert(tmp_path / "source", tmp_path / "weights", to=to, part="model").warnings


def test_a_name_that_no_state_file_has_is_no_rank(tmp_path: Path) -> None:
    """A manifest of another program: the file counts as any other one."""
    folder = Path(reshard.save(tmp_path / "source", 7, {"w": np.ones(2)}, extra={"note": 1}).path)
    known = manifest.read(locate(folder))
    files = {name.replace("extra-", "extra-0"): entry for name, entry in known.files.items()}
    (folder / "extra-0000000.json").rename(folder / "extra-00000000.json")
    manifest.write(locate(folder), replace(known, files=files, digest=""))
    with reshard.open(folder) as checkpoint:
        assert checkpoint.manifest is not None
        assert state_files.ranks(checkpoint.manifest) == []
    assert not reshard.convert(folder, tmp_path / "target", to="checkpoint2").warnings
    with reshard.open(tmp_path / "target") as checkpoint:
        assert not checkpoint.extra()


@pytest.mark.parametrize("rank", [0, 7, 9_999_999, 10_000_000, 10**18 - 1])
def test_the_rank_in_the_name_of_a_state_file(rank: int) -> None:
    def ranks(name: str) -> list[int]:
        return state_files.ranks(SimpleNamespace(files={name: None}))  # type: ignore[arg-type]

    assert ranks(state.file_name(rank)) == [rank]
    assert ranks(state.file_name(rank).replace("-", "-0")) == []


@pytest.mark.parametrize("name", ["w.ckpt", "w.npz", "w.safetensor"])
def test_the_name_of_another_file_does_not_become_a_folder(name: str, tmp_path: Path) -> None:
    source, target = tmp_path / "w.safetensors", tmp_path / name
    reshard.save_file({"w": np.zeros(2)}, source)
    with pytest.raises(ArgumentError, match=rf"{name}` is the name of a file of a format that is not written"):
        reshard.convert(source, target)
    assert not target.exists()
    reshard.convert(source, target, to="huggingface")
    assert target.is_dir()


def test_a_source_and_a_destination_inside_each_other_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "run"
    reshard.save(root, 1, {"w": np.zeros(2)}, commit={"durable": False})
    inside = root / "iteration_00000001"
    for source, target, message in (
        (root, root, "are the same"),
        (root, root / "hf", f"destination {root / 'hf'} is inside source {root}"),
        (inside, root, f"source {inside} is inside destination {root}"),
    ):
        with pytest.raises(ArgumentError) as caught:
            reshard.convert(source, target)
        assert message in caught.value.message


def test_only_these_tensors_are_written(tmp_path: Path) -> None:
    model = {"a.w": np.full(2, 1.0), "a.b": np.full(2, 2.0), "b.w": np.full(2, 3.0)}
    optimizer = {f"exp_avg.{name}": array + 10 for name, array in model.items()}
    optimizer["extra.ema.a.w"] = np.full(2, 7.0)
    reshard.save(tmp_path / "run", 5, model, optimizer=optimizer)
    for only, rename, right in (
        ("extra.ema.", {"extra.ema.": ""}, {"a.w": 7.0}),
        (["a.b", "b."], None, {"a.b": 2, "b.w": 3, "exp_avg.a.b": 12, "exp_avg.b.w": 13}),
        ("b.w", {"b.": "c."}, {"c.w": 3.0, "exp_avg.c.w": 13.0}),
    ):
        target = tmp_path / "out.safetensors"
        reshard.convert(tmp_path / "run", target, select={"only": only, "rename": rename}, overwrite=True)
        with reshard.open(target) as found:
            assert {key: found.read(key)[0] for key in found} == right
    reshard.convert(tmp_path / "run", tmp_path / "model", select={"only": "b."}, part="model")
    assert sorted(reshard.open(tmp_path / "model")) == ["b.w"]
    with pytest.raises(ArgumentError, match="`only` has `c`, and no tensor name begins with this text"):
        reshard.convert(tmp_path / "run", tmp_path / "none", select={"only": ["a.", "c"]})
    reshard.convert(tmp_path / "run", tmp_path / "again", to="checkpoint2", select={"only": "a."})
    assert reshard.open(tmp_path / "again").iteration == 5
