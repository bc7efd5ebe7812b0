"""A Hugging Face folder: the index, and the division of tensors over files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard
from reshard.errors import ArgumentError, CheckpointNotFoundError, DamagedFileError, ReshardError, UnsupportedError
from reshard.formats import weight_map as maps
from reshard.formats.huggingface import names as huggingface
from reshard.formats.huggingface.names import INDEX_FILE, SINGLE_FILE

SAMPLE = Path(__file__).parents[2] / "data" / "mindspore" / "full_hf"


def make(folder: Path, *names: str, index: object = None) -> Path:
    for name in names:
        (folder / name).write_bytes(b"")
    if index is not None:
        (folder / INDEX_FILE).write_bytes(index if isinstance(index, bytes) else json.dumps(index).encode())
    return folder


def test_the_sample() -> None:
    assert huggingface.detect(SAMPLE) == "index"
    weight_map = huggingface.read_weight_map(SAMPLE)
    assert weight_map == json.loads((SAMPLE / INDEX_FILE).read_text())["weight_map"]
    assert maps.writer(SAMPLE / INDEX_FILE) is None


def test_what_is_a_model_folder(tmp_path: Path) -> None:
    assert huggingface.detect(tmp_path) is None
    assert huggingface.detect(tmp_path / "absent") is None
    with pytest.raises(CheckpointNotFoundError, match=r"holds neither model\.safetensors\.index\.json nor"):
        huggingface.read_weight_map(tmp_path)
    make(tmp_path, SINGLE_FILE)
    assert huggingface.detect(tmp_path) == "single"
    assert huggingface.read_weight_map(tmp_path) is None
    make(tmp_path, index={"w": "model-00001-of-00002.safetensors"})
    assert huggingface.detect(tmp_path) == "single"  # as transformers does
    (tmp_path / SINGLE_FILE).unlink()
    assert huggingface.detect(tmp_path) == "index"


@pytest.mark.parametrize(
    "index",
    [
        {"metadata": {"total_size": 8}, "weight_map": {"w": "a.safetensors", "v": "b.safetensors"}},
        {"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}},
        {"w": "a.safetensors", "v": "b.safetensors"},
    ],
)
def test_maps_with_and_without_the_wrapper(index: object, tmp_path: Path) -> None:
    make(tmp_path, "a.safetensors", "b.safetensors", "unused.safetensors", index=index)
    assert huggingface.read_weight_map(tmp_path) == {"w": "a.safetensors", "v": "b.safetensors"}


def test_links_of_a_download_cache_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    (blobs / "1").write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
    (blobs / "2").write_bytes(b"")
    (snapshot / INDEX_FILE).symlink_to("../blobs/1")
    (snapshot / "a.safetensors").symlink_to("../blobs/2")
    assert huggingface.read_weight_map(snapshot) == {"w": "a.safetensors"}


def wrapped(name: object) -> object:
    return {"weight_map": {"w": name}}


HOSTILE: list[tuple[str, object, type[ReshardError], str]] = [
    ("no object", [], DamagedFileError, "has no object `weight_map`"),
    ("map a list", {"weight_map": []}, DamagedFileError, "has no object `weight_map`"),
    ("map null", {"weight_map": None}, DamagedFileError, "has no object `weight_map`"),
    ("map empty", {"weight_map": {}}, DamagedFileError, "`weight_map` is empty"),
    ("nothing", {}, DamagedFileError, "`weight_map` is empty"),
    ("file a number", wrapped(1), DamagedFileError, "the file of `w` is not text"),
    ("file null", wrapped(None), DamagedFileError, "is not text"),
    ("file a list", wrapped(["a"]), DamagedFileError, "is not text"),
    ("wrapper of something else", {"metadata": {}, "w": "a"}, DamagedFileError, "the file of `metadata` is not text"),
    ("file above", wrapped("../secret.safetensors"), DamagedFileError, "path separator"),
    ("file absolute", wrapped("/etc/passwd"), DamagedFileError, "path separator"),
    ("file in a folder", wrapped("sub/a.safetensors"), DamagedFileError, "path separator"),
    ("file with a backslash", wrapped("..\\a"), DamagedFileError, "path separator"),
    ("file is this folder", wrapped("."), DamagedFileError, "names a folder"),
    ("file is the parent", wrapped(".."), DamagedFileError, "names a folder"),
    ("file empty", wrapped(""), DamagedFileError, "it is empty"),
    ("file with NUL", wrapped("a\0.safetensors"), DamagedFileError, "control character"),
    ("file with an escape", wrapped("\x1b[2J"), DamagedFileError, "`\\x1b[2J` is refused"),
    ("file of 256 bytes", wrapped("a" * 256), UnsupportedError, "has 256 bytes"),
    ("file missing", wrapped("absent.safetensors"), CheckpointNotFoundError, "`absent.safetensors`"),
    ("file a folder", wrapped("folder"), DamagedFileError, "folder`, which is a folder, expected a file"),
    ("key empty", {"weight_map": {"": "a"}}, DamagedFileError, "must have 1 to 1024 bytes, not 0"),
    ("key long", {"weight_map": {"k" * 1025: "a"}}, UnsupportedError, "not 1025"),
    ("key twice", b'{"weight_map": {"w": "a", "w": "b"}}', DamagedFileError, "`w` is repeated"),
    ("map twice", b'{"weight_map": {"w": "a"}, "weight_map": {"v": "b"}}', DamagedFileError, "is repeated"),
    ("total NaN", b'{"metadata": {"total_size": NaN}, "weight_map": {"w": "a"}}', DamagedFileError, "NaN"),
    ("torn", b'{"weight_map": {"w": "a"', DamagedFileError, "not valid JSON"),
    ("byte order mark", b"\xef\xbb\xbf{}", DamagedFileError, "byte order mark"),
    ("deep", b'{"x": ' + b"[" * 100 + b"]" * 100 + b"}", DamagedFileError, "deeper than 16"),
]


@pytest.mark.parametrize(("index", "error", "message"), [pytest.param(*row[1:], id=row[0]) for row in HOSTILE])
def test_hostile_indices(index: object, error: type[ReshardError], message: str, tmp_path: Path) -> None:
    make(tmp_path, index=index)
    (tmp_path / "folder").mkdir()
    with pytest.raises(error) as caught:
        huggingface.read_weight_map(tmp_path)
    assert message in str(caught.value)
    assert str(tmp_path / INDEX_FILE) in str(caught.value)
    assert maps.writer(tmp_path / INDEX_FILE) is None


@pytest.mark.parametrize("hostile", [b"[],", b"[[[[[]]]]],", b"{},", b"0,"], ids=str)
def test_an_index_of_many_values_is_refused_before_it_is_parsed(hostile: bytes, tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_bytes(b'{"weight_map": {"a": [' + hostile * 2_000_000 + b"0]}}")
    with pytest.raises(DamagedFileError, match="holds more than 2000000 values"):
        reshard.open(tmp_path)


@pytest.mark.parametrize(
    ("make_it", "what"),
    [
        (os.mkfifo, "a pipe, a socket or a device"),
        (Path.mkdir, "a folder"),
        (lambda path: path.symlink_to("nothing"), "a symbolic link to nothing"),
    ],
    ids=["pipe", "folder", "link"],
)
def test_a_model_that_is_no_file(make_it: Any, what: str, tmp_path: Path) -> None:
    make_it(tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointNotFoundError, match=rf"holds no checkpoint: `model\.safetensors` is {what}, expected"
    ):
        reshard.open(tmp_path)


def test_missing_files_are_counted(tmp_path: Path) -> None:
    make(tmp_path, index={f"w{i}": huggingface.file_name(i, 9) for i in range(1, 10)})
    with pytest.raises(CheckpointNotFoundError, match=r"`model-00003-of-00009\.safetensors` and 6 more"):
        huggingface.read_weight_map(tmp_path)


def test_of_a_single_file_and_an_index_the_file_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    several = huggingface.file_name(1, 2)
    make(tmp_path, index={"w": several})
    for name, value in ((several, 1), ("model.safetensors", 2)):
        reshard.save_file({"w": np.full(2, value)}, tmp_path / name)
    with reshard.open(tmp_path) as opened:
        assert opened.read("w").tolist() == [2, 2]
    assert "holds model.safetensors, which is read, as transformers does, and an index" in caplog.text


def two_files(folder: Path, *, listed: dict[str, int], **more: np.ndarray) -> dict[str, np.ndarray]:
    """A folder of two files with the tensors a and b, and c and d, whose index has the names `listed`."""
    arrays = {name: np.full((3, 2), i, np.float32) for i, name in enumerate("abcd")}
    files = [huggingface.file_name(i, 2) for i in (1, 2)]
    reshard.save_file({"a": arrays["a"], "b": arrays["b"]}, folder / files[0])
    reshard.save_file({"c": arrays["c"], "d": arrays["d"], **more}, folder / files[1])
    make(folder, index={"weight_map": {name: files[file] for name, file in listed.items()}})
    return arrays


def test_tensors_of_listed_files_that_the_index_omits_are_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arrays = two_files(tmp_path, listed={"a": 0, "d": 1})
    reshard.save_file({"head": np.zeros(2)}, tmp_path / "mtp.safetensors")
    reshard.convert(tmp_path, tmp_path.parent / f"{tmp_path.name}.safetensors")
    with reshard.open(tmp_path.parent / f"{tmp_path.name}.safetensors") as opened:
        assert {key: opened.read(key).tobytes() for key in opened} == {k: v.tobytes() for k, v in arrays.items()}
    assert "does not name `b`, `c`: read from the files that hold them" in caplog.text
    assert "does not list, which are not read: `mtp.safetensors`" in caplog.text


@pytest.mark.parametrize("listed", [{"a": 0, "b": 0, "c": 1, "d": 1}, {"b": 0, "c": 1}])
@pytest.mark.parametrize("value", [0, 7])
def test_a_tensor_in_two_files_is_refused_if_its_contents_differ(
    listed: dict[str, int], value: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reshard.formats.weight_map._COMPARED_BYTES", 8)
    again = np.zeros((3, 2), np.float32)
    again[2] = value
    two_files(tmp_path, listed=listed, a=again)
    if value:
        with pytest.raises(DamagedFileError, match=r"-00001-of.*-00002-of.*both hold `a`, with different content"):
            reshard.open(tmp_path)
    else:
        assert len(reshard.open(tmp_path)) == 4


DIFFERENCES: dict[str, Any] = {
    "xor": {"xor": True, "base": "step_10"},
    "xor as text": {"encoding": "sparse_xor", "total_size": 8},
    "sparse": {"sparse": "true", "base_model": "Qwen/Qwen3-0.6B"},
    "base": {"base": "out/step_10"},
    "base step": {"base_step": "10", "step": "11"},
    "delta": {"format": "delta"},
    "is_delta": {"is_delta": 1},
}
MODELS: dict[str, Any] = {
    "nothing": {},
    "of transformers": {"total_size": 8, "total_parameters": 2},
    "of mergekit": {"mergekit_version": "0.1.0", "format": "pt"},
    "what it was tuned from": {"base_model": "Qwen/Qwen3-0.6B", "base_model_revision": "main"},
    "no difference": {"delta": "false", "xor": 0, "sparse": ""},
    "a tied name": {"model.delta.weight": "model.w"},
    "of a trainer of images": {"ss_base_model_version": "sdxl_base_v1-0", "modelspec.architecture": "xl/base/delta"},
}


@pytest.mark.parametrize("place", ["index", "file"])
@pytest.mark.parametrize("kind", [*DIFFERENCES, *MODELS])
def test_metadata_of_differences_is_refused(kind: str, place: str, tmp_path: Path) -> None:
    metadata = {**DIFFERENCES, **MODELS}[kind]
    texts = {key: str(value) for key, value in metadata.items()}
    reshard.save_file({"w": np.zeros(2)}, tmp_path / "m.safetensors", texts if place == "file" else None)
    if place == "index":
        text = json.dumps({"metadata": metadata, "weight_map": {"w": "m.safetensors"}})
        (tmp_path / INDEX_FILE).write_text(text)
    else:
        (tmp_path / "m.safetensors").rename(tmp_path / SINGLE_FILE)
    if kind in MODELS:
        reshard.open(tmp_path).close()
        return
    with pytest.raises(UnsupportedError, match="describes differences from other weights, and no model: its metadata"):
        reshard.convert(tmp_path, tmp_path.with_name("out"))


@pytest.mark.parametrize("names", [("w.indices", "w.values"), ("w_idx", "w_vals")])
def test_pairs_of_indices_and_values_are_refused(names: tuple[str, str], tmp_path: Path) -> None:
    first, second = names
    tensors: dict[str, np.ndarray] = {first: np.arange(2), second: np.zeros(2, np.float32)}
    reshard.save_file(tensors, tmp_path / SINGLE_FILE)
    with pytest.raises(UnsupportedError, match=rf"no model: its tensors are pairs of .*, such as `{first}`"):
        reshard.open(tmp_path)
    # One buffer of a model, and a module named so.
    reshard.save_file({**tensors, **{f"{i}.weight": np.zeros(1) for i in range(2)}}, tmp_path / SINGLE_FILE)
    reshard.open(tmp_path).close()
    reshard.save_file({"head.values": np.zeros(1), "body.indices": np.zeros(1)}, tmp_path / SINGLE_FILE)
    reshard.open(tmp_path).close()


def test_our_index_is_known_again(tmp_path: Path) -> None:
    names = [huggingface.file_name(i, 2) for i in (1, 2)]
    text = huggingface.index_text({"z": names[0], "a": names[1]}, 12, "0.1.0")
    make(tmp_path, *names, index=text.encode())
    assert huggingface.read_weight_map(tmp_path) == {"a": names[1], "z": names[0]}
    assert json.loads(text)["metadata"] == {"reshard": "0.1.0", "total_size": 12}
    assert list(json.loads(text)["weight_map"]) == ["a", "z"]
    assert maps.writer(tmp_path / INDEX_FILE) == "0.1.0"
    (tmp_path / INDEX_FILE).unlink()
    assert maps.writer(tmp_path / INDEX_FILE) is None


@pytest.mark.parametrize(("number", "count"), [(0, 1), (2, 1), (-1, 3), (1, 0)])
def test_no_name_for_what_is_no_file(number: int, count: int) -> None:
    with pytest.raises(ArgumentError, match=r"the number must be from 1 to -?\d+"):
        huggingface.file_name(number, count)


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ([], 8, []),
        ([8], 8, [[0]]),
        ([9], 8, [[0]]),
        ([4, 4, 4], 8, [[0, 1], [2]]),
        ([4, 5, 4], 8, [[0], [1], [2]]),
        ([1, 9, 1], 8, [[1], [0, 2]]),
        ([9, 9], 8, [[0], [1]]),
        ([0, 0], 1, [[0, 1]]),
    ],
)
def test_files_are_filled_in_order(sizes: list[int], limit: int, expected: Any) -> None:
    assert huggingface.plan_shards([(str(i), size) for i, size in enumerate(sizes)], limit) == [
        [str(i) for i in one] for one in expected
    ]


@pytest.mark.slow(disk=False)
@given(sizes=st.lists(st.integers(0, 20), max_size=30), limit=st.integers(1, 25))
def test_every_tensor_has_one_file_within_the_limit(sizes: list[int], limit: int) -> None:
    found = huggingface.plan_shards([(str(i), size) for i, size in enumerate(sizes)], limit)
    assert sorted(int(name) for names in found for name in names) == list(range(len(sizes)))
    for names in found:
        assert names == sorted(names, key=int)
        assert len(names) == 1 or sum(sizes[int(name)] for name in names) <= limit


def test_the_text_of_an_index_is_that_of_json() -> None:
    for weight_map in ({}, {"b": "f", "a": 'g"\\', "\u00e9\n\u2028": "f"}):
        content = {"metadata": {"reshard": "1", "total_size": 8}, "weight_map": weight_map}
        expected = json.dumps(content, ensure_ascii=False, indent=2, sort_keys=True) + "\n"
        assert huggingface.index_text(weight_map, 8, "1") == expected
