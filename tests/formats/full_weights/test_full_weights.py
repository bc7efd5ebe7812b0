"""Full weights in the MindSpore layout: read, and written as MindSpore's own tool writes them."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import reshard
from reshard.errors import (
    ArgumentError,
    CheckpointNotFoundError,
    DamagedFileError,
    DestinationExistsError,
    ReshardError,
    UnsupportedError,
)
from reshard.formats.base import StoredTensor
from reshard.formats.full_weights import names as full_weights
from reshard.verbs.selection import new_names

if TYPE_CHECKING:
    from reshard.options import Target

SAMPLES = Path(__file__).parents[2] / "data" / "mindspore"
FULL = SAMPLES / "full_ms"
COUNTERS = {"epoch_num": 20, "step_num": 40, "global_step": 40, "loss_scale": 65536.0, "global_batch_size": 8}


def read(path: Path) -> dict[str, np.ndarray]:
    """A file's tensors by the safetensors package; bfloat16 too."""
    return load_file(path)


EXPECTED = read(SAMPLES / "full_ms_expected.safetensors")


def bits(array: np.ndarray) -> tuple[Any, ...]:
    return array.dtype.str, array.shape, array.tobytes()


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return {key: bits(array) for key, array in a.items()} == {key: bits(array) for key, array in b.items()}


def weight_map(folder: Path) -> dict[str, str]:
    content = json.loads((folder / full_weights.MAP_FILE).read_text())["weight_map"]
    assert isinstance(content, dict)
    return content


def written(folder: Path) -> dict[str, np.ndarray]:
    """What a destination holds, by its map, read by the safetensors package."""
    files = {name: read(folder / name) for name in set(weight_map(folder).values())}
    assert sorted(weight_map(folder)) == sorted(key for arrays in files.values() for key in arrays)
    return {key: files[name][key] for key, name in weight_map(folder).items()}


# -- reading


def test_the_sample_is_opened() -> None:
    with reshard.open(FULL) as checkpoint:
        assert checkpoint.format == "mindspore"
        loaded = checkpoint.load()
        assert same({key: loaded[key] for key in EXPECTED}, EXPECTED)
        assert {key: loaded[key].item() for key in loaded if key not in EXPECTED} == COUNTERS
        assert checkpoint.common is not None
        assert {name: getattr(checkpoint.common, name) for name in COUNTERS} == COUNTERS
        assert checkpoint.keys("model") == [key for key in weight_map(FULL) if not key.startswith("adam_m.")]


def test_the_map_is_followed_whatever_the_files_are_called(tmp_path: Path) -> None:
    # So the documents show it.
    names = {f"part{i}.safetensors": f"model-{i + 1:05d}-of-00003.safetensors" for i in range(3)}
    for old, new in names.items():
        shutil.copy(FULL / old, tmp_path / new)
    bare = {key: names[name] for key, name in weight_map(FULL).items()}
    for content in (bare, {"weight_map": bare}, {"metadata": {"total_size": 1, "more": []}, "weight_map": bare}):
        (tmp_path / full_weights.MAP_FILE).write_text(json.dumps(content))
        with reshard.open(tmp_path) as checkpoint:
            assert same(checkpoint.load(), EXPECTED)
            assert checkpoint.common is None


def test_a_single_part_needs_no_map_and_several_do(tmp_path: Path) -> None:
    shutil.copy(FULL / "part0.safetensors", tmp_path)
    shutil.copy(FULL / "hyper_param.safetensors", tmp_path)
    with reshard.open(tmp_path) as checkpoint:
        assert sorted(checkpoint.keys("model")) == ["head.weight"]
    shutil.copy(FULL / "part1.safetensors", tmp_path)
    with pytest.raises(CheckpointNotFoundError, match=r"holds 2 parts, but not param_name_map\.json"):
        reshard.open(tmp_path)


GOOD = '"weight_map": {"head.weight": "part0.safetensors"}'
HOSTILE: dict[str, tuple[str | bytes, type[ReshardError], str]] = {
    "empty": ("", DamagedFileError, "not valid JSON"),
    "no object": ("[]", DamagedFileError, "no object"),
    "no map": ('{"weight_map": []}', DamagedFileError, "no object"),
    "no tensor": ('{"weight_map": {}}', DamagedFileError, "`weight_map` is empty"),
    "a name twice": (f"{{{GOOD}, {GOOD}}}", DamagedFileError, "`weight_map` is repeated in one object"),
    "no file": ('{"weight_map": {"head.weight": "part7.safetensors"}}', CheckpointNotFoundError, "lists missing files"),
    "a number": ('{"weight_map": {"head.weight": 0}}', DamagedFileError, "not text"),
    "out of the folder": ('{"weight_map": {"head.weight": "../part0.safetensors"}}', DamagedFileError, "separator"),
    "absolute": ('{"weight_map": {"head.weight": "/etc/passwd"}}', DamagedFileError, "separator"),
    "the folder": ('{"weight_map": {"head.weight": ".."}}', DamagedFileError, "folder"),
    "itself": ('{"weight_map": {"head.weight": "param_name_map.json"}}', DamagedFileError, "param_name_map"),
    "no such tensor": ('{"weight_map": {"tail.weight": "part0.safetensors"}}', DamagedFileError, "tail"),
    "a long name": (json.dumps({"weight_map": {"w" * 1025: "part0.safetensors"}}), UnsupportedError, "1024"),
    "an empty name": ('{"weight_map": {"": "part0.safetensors"}}', DamagedFileError, "must have 1 to 1024 bytes"),
    "not UTF-8": (b'{"weight_map": {"\xff": "part0.safetensors"}}', DamagedFileError, "UTF-8"),
    "a mark": (b"\xef\xbb\xbf{}", DamagedFileError, "byte order mark"),
    "deep": ('{"metadata": ' + "[" * 100 + "]" * 100 + f", {GOOD}}}", DamagedFileError, "deep"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_map_of_a_stranger(name: str, tmp_path: Path) -> None:
    content, error, text = HOSTILE[name]
    shutil.copy(FULL / "part0.safetensors", tmp_path)
    (tmp_path / full_weights.MAP_FILE).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(error, match=text) as raised:
        reshard.open(tmp_path)
    assert raised.value.path is not None


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"step_num": np.array(-1)}, "step_num"),
        ({"step_num": np.array(1.5)}, "step_num"),
        ({"loss_scale": np.array(np.nan, np.float32)}, "loss_scale"),
        ({"head.weight": np.zeros(1, np.float32)}, "both hold"),
    ],
    ids=["negative", "half a step", "not finite", "a part's"],
)
def test_counters_of_a_stranger(tmp_path: Path, arrays: dict[str, np.ndarray], text: str) -> None:
    shutil.copy(FULL / "part0.safetensors", tmp_path)
    save_file(arrays, tmp_path / full_weights.HYPER_FILE)
    with pytest.raises(DamagedFileError, match=text):
        reshard.open(tmp_path)


def test_parts_of_one_rank_that_a_merge_left_behind_are_no_tensors(caplog: pytest.LogCaptureFixture) -> None:
    folder = SAMPLES / "strategy" / "unified_filtered"
    assert "adam_m.l0.proj.weight" in read(folder / "hyper_param.safetensors")
    with caplog.at_level(logging.WARNING, "reshard"), reshard.open(folder) as checkpoint:
        assert not [key for key in checkpoint if key.startswith("adam_m.")]
        assert checkpoint.common is not None
        assert checkpoint.common.global_step == 40
    assert "`adam_m.l0.proj.weight` and 1 more: the first rank's shard of tensors that a merge left out" in caplog.text


# -- dividing over parts


def test_parts_are_those_of_the_original() -> None:
    order = list(weight_map(SAMPLES / "strategy" / "unified"))  # the order in which it met them, the largest first
    parts = full_weights.plan_parts([(key, EXPECTED[key].nbytes) for key in order], 1600)
    of_original: dict[str, list[str]] = {}
    for key, name in weight_map(SAMPLES / "strategy" / "unified_parts").items():
        of_original.setdefault(name, []).append(key)
    assert dict(zip(sorted(of_original), parts, strict=True)) == of_original


def test_one_part_for_each_three_gib_of_all() -> None:
    gib = 1 << 30
    assert [len(full_weights.plan_parts([(str(i), gib) for i in range(n)])) for n in (1, 3, 4, 6, 7)] == [1, 1, 2, 2, 3]
    assert len(full_weights.plan_parts([("huge", 100 * gib)])) == 1
    assert full_weights.plan_parts([]) == []
    assert full_weights.plan_parts([("none", 0), ("nothing", 0)]) == [["none", "nothing"]]


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 60) | st.none())
def test_every_tensor_is_in_one_part_and_no_part_is_too_large(sizes: list[int], most: int | None) -> None:
    tensors = [(f"t{i}", size) for i, size in enumerate(sizes)]
    parts = full_weights.plan_parts(tensors, most)
    assert sorted(name for part in parts for name in part) == sorted(name for name, _ in tensors)
    size_of = dict(tensors)
    for part in parts:
        assert part
        n_bytes = sum(size_of[name] for name in part)
        assert most is None or n_bytes <= most or [name for name in part if size_of[name]] == part[:1]


# -- writing


def test_written_again_it_is_the_same(tmp_path: Path) -> None:
    report = reshard.convert(FULL, tmp_path / "out", to="mindspore")
    assert (report.to, report.n_tensors, report.n_files) == ("mindspore", 15, 2)
    assert same(written(tmp_path / "out"), EXPECTED)
    assert same(read(tmp_path / "out" / "hyper_param.safetensors"), read(FULL / "hyper_param.safetensors"))
    content = json.loads((tmp_path / "out" / "param_name_map.json").read_text())
    assert content["metadata"]["total_size"] == sum(array.nbytes for array in EXPECTED.values()) == 4128
    # As the original's: in the order in which they are dealt out, the largest first.
    sizes = [EXPECTED[key].nbytes for key in content["weight_map"]]
    assert sizes == sorted(sizes, reverse=True)
    with safe_open(tmp_path / "out" / "part0.safetensors", "np") as file:
        assert file.metadata().items() >= {"format": "ms", "remove_redundancy": "False"}.items()
    assert reshard.diff(FULL, tmp_path / "out").equal


def test_no_part_is_larger_than_asked_for(tmp_path: Path) -> None:
    reshard.convert(FULL, tmp_path / "out", to="mindspore", files={"max_shard_size": 800}, commit={"durable": False})
    assert same(written(tmp_path / "out"), EXPECTED)
    parts = sorted((tmp_path / "out").glob("part*"))
    assert [path.name for path in parts] == [f"part{i}.safetensors" for i in range(len(parts))]
    assert max(sum(array.nbytes for array in read(path).values()) for path in parts) <= 800


def test_of_a_checkpoint_2_0_the_counters_become_tensors(tmp_path: Path) -> None:
    source = SAMPLES / "ckpt2" / "checkpoint"
    reshard.convert(source, tmp_path / "out", to="mindspore", commit={"durable": False})
    expected = read(SAMPLES / "ckpt2" / "expected_00000010.safetensors")
    arrays = written(tmp_path / "out")
    assert same(arrays, {key: array for key, array in expected.items() if key != "global_step"})
    hyper = read(tmp_path / "out" / "hyper_param.safetensors")
    common = json.loads((source / "iteration_00000010" / "common.json").read_text())
    assert {key: array.item() for key, array in hyper.items()} == {
        key: value for key, value in common.items() if value is not None and key in COUNTERS
    }
    assert {key: (array.dtype.str, array.shape) for key, array in hyper.items()} == {
        "epoch_num": ("<i8", ()),
        "step_num": ("<i8", ()),
        "global_step": ("<i4", (1,)),
        "loss_scale": ("<f4", ()),
        "global_batch_size": ("<i8", ()),
    }
    # And back: into common.json, not into the weights.
    reshard.convert(tmp_path / "out", tmp_path / "back", to="checkpoint2", iteration=10, commit={"durable": False})
    back = json.loads((tmp_path / "back" / "iteration_00000010" / "common.json").read_text())
    assert {key: back[key] for key in COUNTERS} == {key: common[key] for key in COUNTERS}
    with reshard.open(tmp_path / "back") as checkpoint:
        assert sorted(checkpoint) == sorted([*arrays, "global_step"])


def test_weights_alone_come_without_counters(tmp_path: Path) -> None:
    reshard.convert(FULL, tmp_path / "out", to="mindspore", part="model", commit={"durable": False})
    assert not (tmp_path / "out" / "hyper_param.safetensors").exists()
    assert sorted(weight_map(tmp_path / "out")) == sorted(key for key in EXPECTED if not key.startswith("adam_m."))


def test_a_cast_leaves_counters_alone(tmp_path: Path) -> None:
    reshard.convert(FULL, tmp_path / "out", to="mindspore", dtype="float16", commit={"durable": False})
    assert written(tmp_path / "out")["l0.qkv.weight"].dtype == np.float16
    assert same(read(tmp_path / "out" / "hyper_param.safetensors"), read(FULL / "hyper_param.safetensors"))


def test_to_hugging_face_only_weights_go(tmp_path: Path) -> None:
    reshard.convert(FULL, tmp_path / "hf", commit={"durable": False})
    arrays = read(tmp_path / "hf" / "model.safetensors")
    assert same(arrays, {key: array for key, array in EXPECTED.items() if not key.startswith("adam_m.")})
    assert arrays["l0.proj.weight"].dtype == ml_dtypes.bfloat16


def test_overwrite_replaces_an_earlier_conversion_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "out"
    reshard.convert(FULL, out, to="mindspore", files={"max_shard_size": 800}, commit={"durable": False})
    (out / "notes.txt").write_text("kept")
    with pytest.raises(DestinationExistsError):
        reshard.convert(FULL, out, to="mindspore", commit={"durable": False})
    reshard.convert(FULL, out, to="mindspore", part="model", overwrite=True, commit={"durable": False})
    assert sorted(path.name for path in out.iterdir()) == ["notes.txt", "param_name_map.json", "part0.safetensors"]
    # The original's own are not ours to replace.
    shutil.copytree(FULL, tmp_path / "theirs")
    before = sorted(path.name for path in FULL.iterdir())
    with pytest.raises(DestinationExistsError, match="not written by an earlier conversion"):
        reshard.convert(out, tmp_path / "theirs", to="mindspore", overwrite=True, commit={"durable": False})
    assert sorted(path.name for path in (tmp_path / "theirs").iterdir()) == before


def test_permissions_of_the_original(tmp_path: Path) -> None:
    reshard.convert(
        FULL, tmp_path / "out", to="mindspore", files={"modes": "mindspore-transformers"}, commit={"durable": False}
    )
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "out").iterdir()}
    assert modes == {
        "part0.safetensors": "0o400",
        "hyper_param.safetensors": "0o400",
        "param_name_map.json": "0o640",
    }


# -- leaving out and renaming


def test_left_out_and_renamed_as_the_original_and_no_stray_parts(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"select": {"drop": "adam_m."}}, "unified_filtered"),
        ({"select": {"drop": ["adam_m."], "rename": {"": "model."}}}, "unified_renamed"),
    ]
    for options, name in cases:
        reshard.convert(FULL, tmp_path / name, to="mindspore", commit={"durable": False}, **options)
        original = SAMPLES / "strategy" / name
        assert same(written(tmp_path / name), written(original))
        hyper = read(original / "hyper_param.safetensors")
        strays = {key for key in hyper if key.startswith("adam_m.")}
        assert strays  # the original puts the first rank's parts of what it left out there
        ours = read(tmp_path / name / "hyper_param.safetensors")
        assert same(ours, {key: array for key, array in hyper.items() if key not in strays})


def test_what_was_left_out_is_nowhere(tmp_path: Path) -> None:
    formats: tuple[Target, ...] = ("mindspore", "huggingface", "checkpoint2", "safetensors")
    for to in formats:
        drop = ["adam_m.", "loss_scale", "l0."]
        reshard.convert(FULL, tmp_path / to, to=to, part="all", select={"drop": drop}, commit={"durable": False})
        with reshard.open(tmp_path / to) as checkpoint:
            kept = [key for key in EXPECTED if not key.startswith(tuple(drop))]
            assert sorted(key for key in checkpoint if key not in COUNTERS) == sorted(kept)
            assert same(checkpoint.load(keys=kept), {key: EXPECTED[key] for key in kept})
            assert "loss_scale" not in checkpoint
            assert checkpoint.common is None or checkpoint.common.loss_scale is None
        assert not any(b"adam_m" in path.read_bytes() for path in (tmp_path / to).rglob("*") if path.is_file())


def test_names_can_be_exchanged_and_a_layout_speaks_of_new_ones(tmp_path: Path) -> None:
    rename = {"head.weight": "embed.weight", "embed.weight": "head.weight", "l0.": "layers.0."}
    layout = {"mesh": {"tp": 2}, "rules": [{"match": "layers.0.qkv.*", "cut": ["tp"]}, {"match": "*"}]}
    reshard.convert(FULL, tmp_path / "out", layout=layout, select={"rename": rename}, commit={"durable": False})
    with reshard.open(tmp_path / "out") as checkpoint:
        assert bits(checkpoint.read("embed.weight")) == bits(EXPECTED["head.weight"])
        assert bits(checkpoint.read("head.weight")) == bits(EXPECTED["embed.weight"])
        assert len(checkpoint["layers.0.qkv.weight"].shards) == 2
        # State follows its parameter, in its name and in its cut.
        assert bits(checkpoint.read("adam_m.embed.weight")) == bits(EXPECTED["adam_m.head.weight"])
        assert len(checkpoint["adam_m.layers.0.qkv.weight"].shards) == 2


@pytest.mark.parametrize(
    ("drop", "rename", "expected"),
    [
        ([], {"a.": "b."}, {"a.w": "b.w", "adam_m.a.w": "adam_m.b.w", "c": "c", "step_num": "step_num"}),
        ([], {"a.": "x.", "a.w": "y"}, {"a.w": "y", "adam_m.a.w": "adam_m.y", "c": "c", "step_num": "step_num"}),
        ([], {"adam_m.a.": "m."}, {"a.w": "a.w", "adam_m.a.w": "m.w", "c": "c", "step_num": "step_num"}),
        ([], {"": "p."}, {"a.w": "p.a.w", "adam_m.a.w": "adam_m.p.a.w", "c": "p.c", "step_num": "step_num"}),
        ([], {"step_num": "steps"}, {"a.w": "a.w", "adam_m.a.w": "adam_m.a.w", "c": "c", "step_num": "steps"}),
        (["a."], {"c": "a.w"}, {"c": "a.w", "step_num": "step_num"}),
        (["adam_", "c"], {}, {"a.w": "a.w", "step_num": "step_num"}),
    ],
)
def test_new_names(drop: list[str], rename: dict[str, str], expected: dict[str, str]) -> None:
    assert new_names(["a.w", "adam_m.a.w", "c", "step_num"], drop, rename) == expected


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"select": {"rename": {"head.weight": "embed.weight"}}}, "would both be named"),
        ({"select": {"rename": {"head.weight": ""}}}, "an empty name"),
        ({"select": {"rename": {"head.weight": 3}}}, "a value of `rename` must be text, found int"),
        ({"select": {"drop": [3]}}, "a name in `drop` must be text, found int"),
        ({"select": {"drop": ""}}, "which matches every name"),
        ({"select": {"drop": ["l", "h", "e", "adam_m.", "g", "s"]}}, "nothing to write"),
        ({"select": {"drop": "head*"}}, "(?s)`drop` has `head\\*`.*it is not a pattern.*`head` matches every name"),
        ({"select": {"rename": {"*": "x."}}}, "`rename` has `\\*`"),
        ({"select": {"suffix": "20_2"}}, "no folders `rank_"),
    ],
)
def test_names_that_cannot_be_meant(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        reshard.convert(FULL, tmp_path / "out", to="mindspore", **options)
    assert not (tmp_path / "out").exists()


def test_a_beginning_that_no_name_has_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "reshard"):
        reshard.convert(
            FULL,
            tmp_path / "out",
            to="mindspore",
            select={"drop": ["adamw."], "rename": {"layer.": "x."}},
            commit={"durable": False},
        )
    assert caplog.text.count("no tensor name begins with") == 2


def test_a_view_of_files_that_changed_meanwhile_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "full"
    shutil.copytree(FULL, folder)
    with reshard.open(folder) as checkpoint:
        info, stored = checkpoint["head.weight"], checkpoint._index.stored("head.weight")
        shutil.copy(FULL / "part1.safetensors", folder / "part0.safetensors")
        with pytest.raises(DamagedFileError, match="is not the file that was opened before"):
            checkpoint.view({"w": StoredTensor(info.dtype, info.shape, stored)})
