"""Checkpoint 2.0: names of folders and files, the tracker, and common.json."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers import original_reader

from reshard.commit import roots
from reshard.documents.common_info import CommonInfo
from reshard.documents.strict_json import parse_json
from reshard.errors import ArgumentError, CheckpointNotFoundError, DamagedFileError
from reshard.formats.checkpoint2 import names as checkpoint2
from reshard.storage.location import locate

SAMPLES = Path(__file__).parents[2] / "data" / "mindspore"


# -- names


@pytest.mark.parametrize(
    ("name", "iteration"),
    [
        ("iteration_00000005", 5),
        ("iteration_0000005", 5),
        ("iteration_5", 5),
        ("iteration_123456789", 123456789),
        ("iteration_000000000000000000000000007", 7),
        ("iteration_0", 0),
        ("iteration_", None),
        ("iteration_-5", None),
        ("iteration_5.tmp", None),
        ("iteration_5\n", None),
        ("iteration_\u0665", None),
        ("Iteration_5", None),
        ("xiteration_5", None),
        ("iteration_" + "9" * 19, None),
    ],
)
def test_iteration_folders(name: str, iteration: int | None) -> None:
    assert roots.parse_iteration_folder(name) == iteration


@pytest.mark.parametrize("iteration", [-1, True, "5", 5.0, 10**18, None])
def test_no_folder_for_what_is_no_iteration(iteration: Any) -> None:
    with pytest.raises(ArgumentError, match="an iteration is an integer"):
        roots.iteration_folder_name(iteration)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model-0000000-0000008.safetensors", (None, "model", 0, 8)),
        ("demo-opt-0000003-0000008.safetensors", ("demo", "optimizer", 3, 8)),
        ("my-run-model-opt-0000003-0000008.safetensor", ("my-run-model", "optimizer", 3, 8)),
        ("a-model-12345678-123456789.safetensors", ("a", "model", 12345678, 123456789)),
        ("model-000000-0000008.safetensors", None),
        ("model-0000000-000008.safetensors", None),
        ("model-0000008-0000008.safetensors", None),
        ("amodel-0000000-0000008.safetensors", None),
        ("-model-0000000-0000008.safetensors", None),
        (".model-0000000-0000008.safetensors", None),
        ("model-0000000-0000008.safetensors.tmp", None),
        ("model-0000000-0000008.ckpt", None),
        ("model-\u0660\u0660\u0660\u0660\u0660\u0660\u0660-0000008.safetensors", None),
        ("a\nb-model-0000000-0000008.safetensors", None),
        (f"model-0000000-{'9' * 19}.safetensors", None),
    ],
)
def test_shard_file_names(name: str, expected: Any) -> None:
    parsed = checkpoint2.parse_shard_file_name(name)
    assert (parsed and (parsed.prefix, parsed.part, parsed.index, parsed.count)) == expected
    if parsed and not name.endswith("safetensor"):
        assert checkpoint2.shard_file_name(parsed.part, parsed.index, parsed.count, parsed.prefix) == name


@pytest.mark.parametrize(
    ("prefix", "fault"),
    [
        ("", "empty"),
        ("..", "names a folder"),
        ("a/b", "separator"),
        ("a\\b", "separator"),
        ("/etc", "separator"),
        ("a\0b", "control"),
        ("a\x1b[2J", "control"),
        (".hidden", "hidden"),
        ("x" * 129, "128 bytes"),
        ("x" * 300, "255"),
        ("\ud800", "Unicode"),
    ],
)
def test_prefixes_that_cannot_begin_a_name(prefix: str, fault: str) -> None:
    with pytest.raises(ArgumentError, match=fault):
        checkpoint2.shard_file_name("model", 0, 1, prefix)


# -- the tracker, and the order of iterations


TRACKERS: list[tuple[str, bytes, int | str]] = [
    ("plain", b"10", 10),
    ("newline", b"10\n", 10),
    ("zero", b"0", 0),
    ("padded", b"00000010", 10),
    ("empty", b"", "holds b''"),
    ("only a newline", b"\n", "expected decimal digits"),
    ("two newlines", b"10\n\n", "expected decimal digits"),
    ("spaces", b" 10", "expected decimal digits"),
    ("carriage return", b"10\r\n", "expected decimal digits"),
    ("negative", b"-1", "expected decimal digits"),
    ("underscore", b"1_0", "expected decimal digits"),
    ("not a number", b"release", "expected decimal digits"),
    ("NUL padding", b"10\0\0\0", "expected decimal digits"),
    ("Arabic digits", "\u0661\u0660".encode(), "expected decimal digits"),
    ("byte order mark", b"\xef\xbb\xbf10", "expected decimal digits"),
    ("19 digits", b"9" * 19, "expected decimal digits"),
    ("33 bytes", b"0" * 33, "larger than 32 bytes"),
    ("a gigabyte of nothing", b"0" * 5000, "larger than 32 bytes"),
]


@pytest.mark.parametrize(("data", "expected"), [pytest.param(*row[1:], id=row[0]) for row in TRACKERS])
def test_trackers(data: bytes, expected: int | str, tmp_path: Path) -> None:
    (tmp_path / roots.TRACKER_FILE).write_bytes(data)
    iteration, reason = roots.read_tracker(locate(tmp_path))
    if isinstance(expected, int):
        assert (iteration, reason) == (expected, None)
    else:
        assert iteration is None
        assert reason is not None
        assert expected in reason


def test_a_tracker_that_is_no_regular_file_is_none(tmp_path: Path) -> None:
    path = tmp_path / roots.TRACKER_FILE
    assert roots.read_tracker(locate(tmp_path)) == (None, None)
    (tmp_path / "real").write_text("5")
    path.symlink_to("real")
    assert "symbolic link" in str(roots.read_tracker(locate(tmp_path))[1])
    path.unlink()
    path.mkdir()
    assert "not a regular file" in str(roots.read_tracker(locate(tmp_path))[1])
    path.rmdir()
    os.mkfifo(path)
    assert "not a regular file" in str(roots.read_tracker(locate(tmp_path))[1])


def test_the_tracker_is_what_the_original_reads(tmp_path: Path) -> None:
    roots.write_tracker(locate(tmp_path), 123456789)
    assert (tmp_path / roots.TRACKER_FILE).read_bytes() == b"123456789"
    (tmp_path / "iteration_123456789").mkdir()
    assert original_reader.iteration_folder(tmp_path).name == "iteration_123456789"
    with pytest.raises(ArgumentError):
        roots.write_tracker(locate(tmp_path), -1)


def make_root(root: Path, names: list[str], tracker: str | None) -> None:
    for name in names:
        (root / name).mkdir()
    if tracker is not None:
        (root / roots.TRACKER_FILE).write_text(tracker)


@pytest.mark.parametrize(
    ("names", "tracker", "expected"),
    [
        (["iteration_00000005", "iteration_00000010"], "10", [10, 5]),
        (["iteration_00000005", "iteration_00000010"], "5", [5, 10]),
        (["iteration_9", "iteration_00000010", "iteration_100000000"], None, [100000000, 10, 9]),
        (["iteration_00000005", "iteration_00000010"], "junk", [10, 5]),
        (["iteration_00000005"], "7", [5]),
        ([".staging", "iteration_5.tmp", "other"], None, []),
    ],
)
def test_candidates_are_the_trackers_first_then_downwards(
    names: list[str], tracker: str | None, expected: list[int], tmp_path: Path
) -> None:
    make_root(tmp_path, names, tracker)
    candidates = roots.resolve_candidates(locate(tmp_path))
    assert [iteration for iteration, _ in candidates.folders] == expected
    assert [iteration for iteration, _ in roots.list_iterations(locate(tmp_path))] == sorted(expected)
    useful = tracker is None or (tracker.isdigit() and int(tracker) in expected)
    assert (candidates.tracker_reason is None) == useful
    assert (candidates.tracker is not None) == (useful and tracker is not None)


def test_links_and_files_are_no_iterations(tmp_path: Path) -> None:
    make_root(tmp_path, ["iteration_00000005"], None)
    (tmp_path / "iteration_00000006").symlink_to("iteration_00000005")
    (tmp_path / "iteration_00000007").write_text("")
    assert roots.list_iterations(locate(tmp_path)) == [(5, "iteration_00000005")]
    with pytest.raises(CheckpointNotFoundError):
        roots.list_iterations(locate(tmp_path / "absent"))


def test_of_two_folders_of_one_number_the_8_digit_one_counts(tmp_path: Path) -> None:
    make_root(tmp_path, ["iteration_0000005", "iteration_00000005", "iteration_0000000007", "iteration_007"], None)
    candidates = roots.resolve_candidates(locate(tmp_path))
    assert candidates.folders == ((7, "iteration_007"), (5, "iteration_00000005"))
    assert [name for name, _ in candidates.ignored] == ["iteration_0000005", "iteration_0000000007"]
    assert candidates.ignored[0][1].startswith("iteration 5 is read from iteration_00000005: nothing")


def test_what_is_a_root(tmp_path: Path) -> None:
    assert not roots.is_root(locate(tmp_path))
    make_root(tmp_path, ["iteration_3"], None)
    assert roots.is_root(locate(tmp_path))
    (tmp_path / "iteration_3" / roots.TRACKER_FILE).write_text("junk")
    assert roots.is_root(locate(tmp_path / "iteration_3"))


# -- folders without metadata.json


def test_shard_files_of_the_one_device_sample() -> None:
    names = checkpoint2.list_shard_files(locate(SAMPLES / "ckpt2_single" / "checkpoint" / "iteration_00000003"))
    assert names == ["one-model-0000000-0000001.safetensors", "one-opt-0000000-0000001.safetensors"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], []),
        (["other.safetensors", ".model-0000000-0000001.safetensors", "model-0000000-0000001.safetensors.tmp"], []),
        (["opt-0000000-0000001.safetensor", "model-0000000-0000001.safetensor"], [1, 0]),
        (["p-model-0000001-0000002.safetensors", "p-model-0000000-0000002.safetensors"], [1, 0]),
        (["model-0000001-0000002.safetensors"], "1 of 2 model files; `model-0000000-0000002.safetensors` is missing"),
        (["p-opt-0000000-0000009.safetensors"], "`p-opt-0000003-0000009.safetensors` and 5 more are missing"),
        (["model-0000000-999999999999.safetensors"], "and 999999999995 more are missing"),
        (["model-0000000-0000001.safetensors", "model-0000000-0000001.safetensor"], "holds model file 0 twice"),
        (["a-model-0000000-0000001.safetensors", "b-model-0000000-0000001.safetensors"], "more than one save"),
        (["model-0000000-0000001.safetensors", "model-0000000-0000002.safetensors"], "more than one save"),
    ],
)
def test_shard_files_are_complete_or_refused(names: list[str], expected: list[int] | str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"")
    if isinstance(expected, str):
        with pytest.raises(DamagedFileError) as caught:
            checkpoint2.list_shard_files(locate(tmp_path))
        assert expected in str(caught.value)
    else:
        assert checkpoint2.list_shard_files(locate(tmp_path)) == [names[i] for i in expected]


# -- common.json


def test_common_info_of_the_samples() -> None:
    found = CommonInfo.read(locate(SAMPLES / "ckpt2" / "checkpoint" / "iteration_00000010" / "common.json"))
    assert found == CommonInfo(2, 10, 10, 32768.0, 32, 320, 0)
    text = (SAMPLES / "ckpt2" / "checkpoint" / "iteration_00000010" / "common.json").read_text()
    assert found.to_json() == text  # nothing is null there, so nothing is left out


def test_release_190_reads_our_common_info(tmp_path: Path) -> None:
    common = CommonInfo(epoch_num=1, step_num=7, global_step=np.int64(7), loss_scale=1, unknown=("note",))  # type: ignore[arg-type]
    common.write(locate(tmp_path / "common.json"))
    assert dataclass_values(original_reader.read_common(tmp_path)) == [1, 7, 7, 1.0, None, None]
    assert CommonInfo.read(locate(tmp_path / "common.json")) == common
    names = ["epoch_num", "step_num", "global_step", "loss_scale", "global_batch_size"]
    assert list(json.loads((tmp_path / "common.json").read_text())) == names
    CommonInfo(ckpt_status=1).write(locate(tmp_path / "common.json"))
    assert original_reader.read_common(tmp_path).ckpt_status == 1


def dataclass_values(value: object) -> list[Any]:
    return list(vars(value).values())


def test_unknown_counters_are_kept_by_name(tmp_path: Path) -> None:
    (tmp_path / "common.json").write_text('{"global_step": 3, "learning_rate": [1], "z": null}')
    found = CommonInfo.read(locate(tmp_path / "common.json"))
    assert found == CommonInfo(global_step=3)
    assert found.unknown == ("learning_rate", "z")


COMMON: list[tuple[str, bytes, str]] = [
    ("text for a number", b'{"global_step": "5"}', "`global_step` is text, expected an integer"),
    ("a fraction", b'{"global_step": 5.5}', "`global_step` is 5.5"),
    ("a boolean", b'{"epoch_num": true}', "`epoch_num` is true or false"),
    ("negative", b'{"step_num": -1}', "`step_num` is -1"),
    ("a list", b'{"step_num": [1]}', "`step_num` is a list"),
    ("NaN for an integer", b'{"global_step": NaN}', "NaN is not a JSON number"),
    ("an infinite scale", b'{"loss_scale": Infinity}', "Infinity is not a JSON number"),
    ("a scale out of range", b'{"loss_scale": 1e999}', "out of range"),
    ("a scale as text", b'{"loss_scale": "1.0"}', "`loss_scale` is text, expected a finite number"),
    ("65 bits", b'{"global_step": 9223372036854775808}', "does not fit 64 bits"),
    ("a thousand digits", b'{"global_step": ' + b"9" * 1000 + b"}", "does not fit 64 bits"),
    ("a name twice", b'{"global_step": 1, "global_step": 2}', "`global_step` is repeated"),
    ("a name twice, spelled apart", b'{"global_step": 1, "global\\u005fstep": 2}', "`global_step` is repeated"),
    ("a name twice deep inside", b'{"x": [{"a": 1, "a": 1}]}', "`a` is repeated"),
    ("no object", b"[1]", "holds a list, expected an object"),
    ("null", b"null", "holds null"),
    ("empty", b"", "not valid JSON"),
    ("torn", b'{"global_step": 5', "not valid JSON"),
    ("more after the end", b"{}{}", "not valid JSON"),
    ("NUL after the end", b"{}\0", "not valid JSON"),
    ("a comment", b"{} // x", "not valid JSON"),
    ("single quotes", b"{'global_step': 1}", "not valid JSON"),
    ("byte order mark", b"\xef\xbb\xbf{}", "byte order mark"),
    ("UTF-16", "{}".encode("utf-16-le"), "not valid JSON"),
    ("not UTF-8", b'{"\xff": 1}', "is not UTF-8: byte 2"),
    ("unpaired surrogate", b'{"\\ud800": 1}', "not valid Unicode"),
    ("a control character", b'{"a\nb": 1}', "not valid JSON"),
    ("17 levels", b'{"x":' + b"[" * 16 + b"]" * 16 + b"}", "nests deeper than 16"),
    ("a million levels", b"[" * 1000000, "deeper than 16"),
    ("more than a MiB", b" " * (1 << 20) + b"{}", "larger than 1048576 bytes"),
]


@pytest.mark.parametrize(("data", "message"), [pytest.param(*row[1:], id=row[0]) for row in COMMON])
def test_common_info_that_is_damaged(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "common.json"
    path.write_bytes(data)
    with pytest.raises(DamagedFileError) as caught:
        CommonInfo.read(locate(path))
    assert message in str(caught.value)
    assert caught.value.path == str(path)
    assert str(path) in str(caught.value)


def test_strict_json_accepts_what_is_json() -> None:
    deep = b"[" * 16 + b"]" * 16
    assert parse_json(deep, "x") is not None
    assert parse_json(b' {"a": [-1, 0.5, true, null, "\\ud83d\\ude00", -9223372036854775808]}\n', "x") == {
        "a": [-1, 0.5, True, None, "😀", -(1 << 63)]
    }


@pytest.mark.parametrize(
    "fields", [{"global_step": -1}, {"global_step": "5"}, {"global_step": np.array([5])}, {"loss_scale": float("nan")}]
)
def test_common_info_refuses_what_it_would_not_read(fields: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="expected"):
        CommonInfo(**fields)
