"""Checkpoints made by someone who means harm, or by a torn copy: each is refused with its reason, and none does more.

Each case is a good tree with one thing done to it. Whatever is outside of the tree stays unread: a bait lies beside it.
"""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save, save_file
from tests.helpers.sealed import FILES, metadata

import reshard
from reshard.errors import (
    CheckpointNotFoundError,
    CoverageError,
    DamagedFileError,
    MismatchError,
    ReshardError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

W = np.arange(8, dtype=np.float32).reshape(4, 2)
B = np.array([1, 2, 3], np.float32)
BAIT = "bait-model-0000000-0000001.safetensors"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A good iteration folder of two ranks, and the bait beside it."""
    folder = tmp_path / "root" / "iteration_00000001"
    folder.mkdir(parents=True)
    for rank in (0, 1):
        save_file({"w": W[2 * rank : 2 * rank + 2], "b": B}, folder / FILES["model", rank])
        save_file({"adam_m.w": W[2 * rank : 2 * rank + 2] + 1}, folder / FILES["opt", rank])
    (folder / "metadata.json").write_text(json.dumps(metadata((4, 2))))
    (folder / "common.json").write_text('{"step_num": 1, "global_step": 1}')
    (tmp_path / "root" / "latest_checkpointed_iteration.txt").write_text("1")
    save_file({"w": W, "b": B, "adam_m.w": W, "secret": B}, tmp_path / "root" / BAIT)
    return folder


def check_good(folder: Path) -> None:
    with reshard.open(folder) as opened:
        assert opened.keys() == ["w", "b", "adam_m.w"]
        for key, array in {"w": W, "b": B, "adam_m.w": W + 1}.items():
            assert opened.read(key).tobytes() == array.tobytes()
        assert opened.keys("optimizer") == ["adam_m.w"]


def test_the_tree_before_anything_is_done_to_it(tree: Path) -> None:
    check_good(tree)
    check_good(tree.parent)


# -- what is done to it


def edit(*path: Any, to: Any) -> Callable[[Path], object]:
    """Change one value in metadata.json."""

    def change(folder: Path) -> None:
        content = metadata((4, 2))
        inner = content
        for step in path[:-1]:
            inner = inner[step]
        inner[path[-1]] = to
        (folder / "metadata.json").write_text(json.dumps(content))

    return change


def drop(*path: Any) -> Callable[[Path], object]:
    """Leave one value out of metadata.json."""

    def change(folder: Path) -> None:
        content = metadata((4, 2))
        inner = content
        for step in path[:-1]:
            inner = inner[step]
        del inner[path[-1]]
        (folder / "metadata.json").write_text(json.dumps(content))

    return change


def replace(old: str, new: str) -> Callable[[Path], object]:
    """Change the text of metadata.json."""

    def change(folder: Path) -> None:
        text = (folder / "metadata.json").read_text()
        assert old in text
        (folder / "metadata.json").write_text(text.replace(old, new, 1))

    return change


def write(name: str, content: bytes | str | dict[str, np.ndarray]) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        data = save(content) if isinstance(content, dict) else content
        (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)

    return change


def instead(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Something else under the name of a file."""

    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return change


def cut_off(name: str, n_bytes: int) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:n_bytes])

    return change


def linked(target: str) -> Callable[[Path], object]:
    return lambda path: path.symlink_to(target)


def shard(header: Any, data: bytes = b"", n_header: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if n_header is None else n_header) + text + data


M0, M1, O1 = FILES["model", 0], FILES["model", 1], FILES["opt", 1]
SIZE_W = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
W_TENSOR, STORAGE = ("state_dict_metadata", "w"), ("storage_data", "('w', (0,))", 0)
ZEROS = bytes(28)
Case = tuple[str, "Callable[[Path], object]", type[ReshardError] | tuple[type[ReshardError], ...], str]

NAMES: list[Case] = [
    (f"a file name in metadata.json: {what}", edit(*STORAGE, "file_name", to=name), DamagedFileError, "name|string")
    for what, name in {
        "the folder above": f"../{BAIT}",
        "a folder above by a detour": f"x/../../{BAIT}",
        "absolute": "/etc/passwd",
        "a sub-folder": f"sub/{M0}",
        "backslashes": f"..\\{BAIT}",
        "empty": "",
        "the folder itself": ".",
        "the folder above alone": "..",
        "a NUL": f"{M0}\0.txt",
        "a line end": f"{M0}\n",
        "an escape sequence": "\x1b[2J.safetensors",
        "a number": 7,
        "nothing": None,
        "a list": [M0],
    }.items()
]
NAMES.append(
    ("a file name in metadata.json: too long", edit(*STORAGE, "file_name", to="a" * 300), UnsupportedError, "300 bytes")
)

METADATA: list[Case] = [
    ("no JSON", write("metadata.json", "hello"), DamagedFileError, "metadata"),
    ("cut off", cut_off("metadata.json", -40), DamagedFileError, "metadata"),
    ("empty", write("metadata.json", ""), DamagedFileError, "metadata"),
    ("a byte order mark", replace("{", "\ufeff{"), DamagedFileError, "metadata"),
    ("something after the end", replace("{", "{} {"), DamagedFileError, "metadata"),
    ("deep nesting", write("metadata.json", '{"state_dict_metadata":' + "[" * 100_000), DamagedFileError, "metadata"),
    ("a list", write("metadata.json", "[]"), DamagedFileError, "metadata"),
    ("no storage_data", drop("storage_data"), DamagedFileError, "storage_data"),
    ("no tensors", drop("state_dict_metadata"), DamagedFileError, "state_dict_metadata"),
    (
        "a tensor twice",
        replace(
            '"state_dict_metadata": {',
            '"state_dict_metadata": {"w": ' + json.dumps(metadata((4, 2))["state_dict_metadata"]["w"]) + ", ",
        ),
        DamagedFileError,
        "w",
    ),
    ("a field twice", replace('"global_shape"', '"global_shape": [4, 2], "global_shape"'), DamagedFileError, "twice"),
    ("a shape of text", edit(*W_TENSOR, "global_shape", to="4"), DamagedFileError, "metadata"),
    ("a negative extent", edit(*W_TENSOR, "global_shape", to=[-4, 2]), DamagedFileError, "metadata"),
    ("an extent with a fraction", edit(*W_TENSOR, "global_shape", to=[4.5, 2]), DamagedFileError, "metadata"),
    ("an extent of 2**64", edit(*W_TENSOR, "global_shape", to=[1 << 64, 2]), DamagedFileError, "metadata"),
    ("a product beyond 2**64", edit(*W_TENSOR, "global_shape", to=[1 << 40, 1 << 40]), DamagedFileError, "`w`"),
    ("a thousand dims", edit(*W_TENSOR, "global_shape", to=[1] * 1000), DamagedFileError, "metadata"),
    ("a larger tensor than is stored", edit(*W_TENSOR, "global_shape", to=[400, 2]), DamagedFileError, "`w`"),
    ("cuts of another tensor", edit(*W_TENSOR, "axis_fragmentations", to=[1, 2]), DamagedFileError, "`w`"),
    ("cuts of zero", edit(*W_TENSOR, "axis_fragmentations", to=[0, 1]), DamagedFileError, "`w`"),
    ("cuts of 2**40 parts", edit(*W_TENSOR, "axis_fragmentations", to=[1 << 40, 1]), DamagedFileError, "`w`"),
    ("cuts of too few dims", edit(*W_TENSOR, "axis_fragmentations", to=[2]), DamagedFileError, "`w`"),
    ("a chunk of another shape", edit(*W_TENSOR, "chunk", 1, "local_shape", to=[1, 2]), DamagedFileError, "`w`"),
    ("a chunk of 2**62 rows", edit(*W_TENSOR, "chunk", 1, "local_shape", to=[1 << 62, 2]), DamagedFileError, "`w`"),
    ("a chunk outside the grid", edit(*W_TENSOR, "chunk", 1, "global_offset", to=[2]), DamagedFileError, "`w`"),
    (
        "the same chunk twice",
        edit(*W_TENSOR, "chunk", 1, "global_offset", to=[0]),
        (DamagedFileError, CoverageError),
        "`w`",
    ),
    ("a chunk left out", drop(*W_TENSOR, "chunk", 1), (DamagedFileError, CoverageError), "`w`"),
    ("no chunk", edit(*W_TENSOR, "chunk", to=[]), (DamagedFileError, CoverageError), "`w`"),
    ("a chunk that nobody stores", drop("storage_data", "('w', (1,))"), (DamagedFileError, CoverageError), "`w`"),
    ("a chunk with no holder", edit("storage_data", "('w', (1,))", to=[]), (DamagedFileError, CoverageError), "'w'"),
    (
        "a chunk of no tensor",
        edit("storage_data", "('x', (0,))", to=[{"file_name": M0, "storage_rank": 0, "rank_group": [0]}]),
        DamagedFileError,
        "x",
    ),
    ("a storage key that is code", replace("('w', (0,))", "__import__('os').abort()"), DamagedFileError, "import"),
    ("a storage key of 2**70", replace("('w', (0,))", f"('w', ({1 << 70},))"), DamagedFileError, "metadata"),
    ("a dtype that is no text", edit(*W_TENSOR, "properties", "dtype", to=7), DamagedFileError, "`w`"),
    ("ranks that do not fit", edit(*W_TENSOR, "layout", "rank_list", to=[0]), DamagedFileError, "rank_list"),
    ("an axis that is not there", edit(*W_TENSOR, "layout", "tensor_map", to=[5, -1]), DamagedFileError, "tensor_map"),
    ("a mesh of 2**63", edit(*W_TENSOR, "layout", "device_matrix", to=[1 << 62, 4]), DamagedFileError, "device_matrix"),
    ("interleaved", edit(*W_TENSOR, "layout", "interleaved_parallel", to=True), UnsupportedError, "interleaved"),
    (
        "a tensor swapped for another part of itself",
        edit(*STORAGE, "file_name", to=FILES["opt", 0]),
        (DamagedFileError, CheckpointNotFoundError),
        "w",
    ),
]

KINDS: list[Case] = [
    ("a linked metadata.json", instead("metadata.json", linked(f"../{BAIT}")), DamagedFileError, "regular"),
    ("a metadata.json linked to nothing", instead("metadata.json", linked("gone")), DamagedFileError, "regular"),
    ("a pipe as metadata.json", instead("metadata.json", os.mkfifo), DamagedFileError, "regular"),
    ("a folder as metadata.json", instead("metadata.json", os.mkdir), DamagedFileError, "regular"),
    ("a linked shard file", instead(M0, linked(f"../{BAIT}")), DamagedFileError, "link"),
    ("a shard file linked to its neighbour", instead(M0, linked(M1)), DamagedFileError, "link"),
    ("a shard file linked to a device", instead(M0, linked("/dev/zero")), DamagedFileError, "link"),
    ("a pipe as a shard file", instead(M0, os.mkfifo), DamagedFileError, "regular"),
    ("a folder as a shard file", instead(M0, os.mkdir), DamagedFileError, "regular"),
    ("a missing shard file", instead(M0, lambda _: None), CheckpointNotFoundError, M0),
    ("a missing optimizer file", instead(O1, lambda _: None), CheckpointNotFoundError, O1),
    ("a linked common.json", instead("common.json", linked("metadata.json")), DamagedFileError, "link"),
    ("a pipe as common.json", instead("common.json", os.mkfifo), DamagedFileError, "regular"),
]

COUNTERS: list[Case] = [
    (f"common.json: {what}", write("common.json", text), DamagedFileError, r"common\.json")
    for what, text in {
        "a list": "[]",
        "text": '{"step_num": "1"}',
        "true": '{"step_num": true}',
        "negative": '{"step_num": -1}',
        "2**64": f'{{"step_num": {1 << 64}}}',
        "a million digits": f'{{"step_num": {"9" * 1_000_000}}}',
        "NaN": '{"loss_scale": NaN}',
        "1e999": '{"loss_scale": 1e999}',
        "a name twice": '{"step_num": 1, "step_num": 2}',
        "deep": '{"step_num": ' + "[" * 5000 + "]" * 5000 + "}",
        "2 MiB": '{"step_num": 1}' + " " * (2 << 20),
        "empty": "",
        "no UTF-8": '{"a": "',
    }.items()
]

SHARDS: list[Case] = [
    ("no byte", write(M0, b""), DamagedFileError, "0 bytes"),
    ("seven bytes", write(M0, bytes(7)), DamagedFileError, "7 bytes"),
    ("one byte less", cut_off(M0, -1), DamagedFileError, "ends at"),
    ("one byte more", lambda f: (f / M0).write_bytes((f / M0).read_bytes() + b"x"), DamagedFileError, "28.*29"),
    ("the header alone", cut_off(M0, 60), DamagedFileError, "length"),
    ("a header of 2**63 bytes", write(M0, shard(b"{}", n_header=1 << 63)), DamagedFileError, "length"),
    ("a header longer than the file", write(M0, shard(b"{}", n_header=1000)), DamagedFileError, "length"),
    ("a header of garbage", write(M0, shard(b"\xff" * 64)), DamagedFileError, "UTF-8"),
    (
        "a name twice",
        write(M0, shard(b'{"w": %s, "w": %s}' % ((json.dumps(SIZE_W).encode(),) * 2), ZEROS)),
        DamagedFileError,
        "`w`",
    ),
    (
        "two tensors in the same bytes",
        write(M0, shard({"w": SIZE_W, "b": SIZE_W}, ZEROS[:16])),
        DamagedFileError,
        "`b`",
    ),
    (
        "a hole",
        write(M0, shard({"w": SIZE_W, "b": {"dtype": "F32", "shape": [3], "data_offsets": [20, 32]}}, bytes(32))),
        DamagedFileError,
        "`b`",
    ),
    (
        "another size than its shape",
        write(M0, shard({"w": {**SIZE_W, "shape": [2, 3]}}, ZEROS[:16])),
        DamagedFileError,
        "`w`",
    ),
    ("an unknown dtype", write(M0, shard({"w": {**SIZE_W, "dtype": "F33"}}, ZEROS[:16])), ReshardError, "F33"),
    (
        "a shape of 2**64",
        write(M0, shard({"w": {**SIZE_W, "shape": [1 << 63, 4]}}, ZEROS[:16])),
        DamagedFileError,
        "`w`",
    ),
    (
        "offsets of 2**64",
        write(M0, shard({"w": {**SIZE_W, "data_offsets": [0, 1 << 64]}}, ZEROS[:16])),
        DamagedFileError,
        "`w`",
    ),
    (
        "offsets backwards",
        write(M0, shard({"w": {**SIZE_W, "data_offsets": [16, 0]}}, ZEROS[:16])),
        DamagedFileError,
        "`w`",
    ),
    ("another shape than metadata.json", write(M0, {"w": W[:1], "b": B}), (DamagedFileError, MismatchError), "`w`"),
    (
        "as many elements in another shape",
        write(M0, {"w": W[:2].T.copy().reshape(4, 1), "b": B}),
        (DamagedFileError, MismatchError),
        "`w`",
    ),
    (
        "another dtype than the other rank",
        write(M0, {"w": W[:2].astype(np.float16), "b": B}),
        (DamagedFileError, MismatchError),
        "`w`",
    ),
    ("a tensor left out", write(M0, {"b": B}), DamagedFileError, "`w`"),
    ("a tensor under another name", write(M0, {"v": W[:2], "b": B}), DamagedFileError, "`w`"),
    ("a tensor of another file planted", write(O1, {"adam_m.w": W[2:] + 1, "w": W[2:]}), DamagedFileError, "`w`"),
    ("a name in both parts", write(O1, {"adam_m.w": W[2:] + 1, "b": B}), DamagedFileError, "`b`"),
    (
        "unlisted, and different",
        lambda f: (write(M0, {"w": W[:2], "b": B, "x": B})(f), write(M1, {"w": W[2:], "b": B, "x": W})(f))[0],
        DamagedFileError,
        "`x`",
    ),
    (
        "unlisted, in both parts",
        lambda f: (write(M0, {"w": W[:2], "b": B, "x": B})(f), write(O1, {"adam_m.w": W[2:], "x": B})(f))[0],
        DamagedFileError,
        "`x`",
    ),
]

ALL = [*NAMES, *METADATA, *KINDS, *COUNTERS, *SHARDS]


@pytest.mark.parametrize(("change", "error", "named"), [case[1:] for case in ALL], ids=[case[0] for case in ALL])
def test_it_is_refused(tree: Path, change: Any, error: Any, named: str) -> None:
    change(tree)
    with pytest.raises(error) as caught:
        reshard.open(tree)
    said = str(caught.value).replace(str(tree), "")  # the folder is named after the case
    assert re.search(named, said), said
    assert "\x1b" not in said
    assert len(said) < 1000
    assert caught.value.path is None or Path(caught.value.path).is_relative_to(tree)
    # As the only iteration of a root it is refused with the same reason.
    with pytest.raises(DamagedFileError, match="iteration_00000001: "):
        reshard.open(tree.parent)


@pytest.mark.parametrize(
    "name", ["model-0000002-0000003.safetensors", "x.safetensors", ".model-0000000-0000002.safetensors.tmp", "x.txt"]
)
def test_files_that_no_description_names_are_not_looked_at(tree: Path, name: str) -> None:
    (tree / name).write_bytes(b"\xff" * 100)
    check_good(tree)
    (tree / name).unlink()
    os.mkfifo(tree / name)
    check_good(tree)


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.symlink_to("iteration_00000001/common.json"),
        lambda path: path.symlink_to("gone"),
        os.mkfifo,
        os.mkdir,
        lambda path: path.write_bytes(b"\xff\x00"),
        lambda path: path.write_text("1" * 100),
        lambda path: path.write_text("../1"),
        lambda path: path.write_text("1\n1"),
        lambda path: path.write_text(" 1"),
        lambda path: path.write_text("\u0661"),
    ],
    ids=["linked", "linked to nothing", "pipe", "folder", "bytes", "long", "path", "two", "blank", "arabic"],
)
def test_a_tracker_that_is_of_no_use_is_no_tracker(tree: Path, make: Any, caplog: pytest.LogCaptureFixture) -> None:
    tracker = tree.parent / "latest_checkpointed_iteration.txt"
    tracker.unlink()
    make(tracker)
    check_good(tree.parent)
    assert any("the tracker is invalid" in message for message in caplog.messages)


def test_linked_iteration_folders_are_passed_over(tree: Path) -> None:
    (tree.parent / "iteration_00000009").symlink_to(tree.name)
    (tree.parent / "latest_checkpointed_iteration.txt").write_text("9")
    with reshard.open(tree.parent) as opened:
        assert opened.path == tree


# -- without metadata.json


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"model-0000000-0000002.safetensors": {"w": W}}, "0000001-0000002"),
        ({"model-0000001-0000002.safetensors": {"w": W}}, "0000000-0000002"),
        ({"model-0000000-0000001.safetensors": {"w": W}, "opt-0000000-0000001.safetensors": {"w": W}}, "w"),
        (
            {"model-0000000-0000001.safetensors": {"w": W}, "x-model-0000000-0000001.safetensors": {"w": W}},
            "more than one",
        ),
        ({"model-0000000-0000001.safetensors": {"w": W}, "model-0000000-0000001.safetensor": {"w": W}}, "twice"),
        ({f"model-000000{i}-0000002.safetensors": {"w": W} for i in (0, 1)}, "w"),
        ({"model-0000000-9999999.safetensors": {"w": W}}, "9999998 more|missing"),
    ],
)
def test_shard_files_alone_that_do_not_fit(files: dict[str, dict[str, np.ndarray]], named: str, tmp_path: Path) -> None:
    for name, arrays in files.items():
        save_file(arrays, tmp_path / name)
    with pytest.raises(DamagedFileError, match=named):
        reshard.open(tmp_path)


# -- tiles.json


def tiles_json() -> Any:
    """`t` in two files, the first half in each."""
    return {
        "version": 1,
        "layout": None,
        "tensors": {
            "t": {
                "dtype": "F32",
                "shape": [4],
                "overlapping": False,
                "stored": [
                    {
                        "file": f"rank_{rank}.safetensors",
                        "name": "t",
                        "shape": [2],
                        "tiles": [[[2 * rank], [2], 0, [1]]],
                    }
                    for rank in (0, 1)
                ],
            }
        },
    }


T = np.array([5, 6, 7, 8], np.float32)


@pytest.fixture
def tiled(tmp_path: Path) -> Path:
    folder = tmp_path / "tiled"
    folder.mkdir()
    for rank in (0, 1):
        save_file({"t": T[2 * rank : 2 * rank + 2]}, folder / f"rank_{rank}.safetensors")
    (folder / "tiles.json").write_text(json.dumps(tiles_json()))
    save_file({"t": T}, tmp_path / "bait.safetensors")
    return folder


def test_tiles_before_anything_is_done_to_them(tiled: Path) -> None:
    with reshard.open(tiled) as opened:
        assert (opened.format, opened.tiled_keys()) == ("safetensors", ["t"])
        assert opened.read("t").tobytes() == T.tobytes()


FIRST = ("tensors", "t", "stored", 0)
TILES: list[tuple[str, tuple[Any, ...], Any, Any, str]] = [
    ("a file above", (*FIRST, "file"), "../bait.safetensors", DamagedFileError, "separator"),
    ("an absolute file", (*FIRST, "file"), "/etc/passwd", DamagedFileError, "separator"),
    ("an empty file name", (*FIRST, "file"), "", DamagedFileError, "empty"),
    ("a file that is not there", (*FIRST, "file"), "rank_7.safetensors", CheckpointNotFoundError, "rank_7"),
    ("a name that is not there", (*FIRST, "name"), "x", DamagedFileError, "`x`"),
    ("another stored shape", (*FIRST, "shape"), [3], (DamagedFileError, MismatchError), "`t`"),
    ("another dtype", ("tensors", "t", "dtype"), "F16", (DamagedFileError, MismatchError), "`t`"),
    ("an unknown dtype", ("tensors", "t", "dtype"), "F33", ReshardError, "F33"),
    ("a larger tensor", ("tensors", "t", "shape"), [5], (CoverageError, DamagedFileError), "`t`"),
    ("a smaller tensor", ("tensors", "t", "shape"), [3], DamagedFileError, "`t`"),
    ("a huge tensor", ("tensors", "t", "shape"), [(1 << 63) - 1], (CoverageError, DamagedFileError), "`t`"),
    ("an extent of 2**64", ("tensors", "t", "shape"), [1 << 64], DamagedFileError, "64 bits"),
    ("a negative extent", ("tensors", "t", "shape"), [-4], DamagedFileError, "`t`"),
    ("an extent that is true", ("tensors", "t", "shape"), [True], DamagedFileError, "`t`"),
    ("a tile that overlaps", (*FIRST, "tiles"), [[[1], [2], 0, [1]]], (CoverageError, DamagedFileError), "`t`"),
    ("a tile that leaves a hole", (*FIRST, "tiles"), [[[0], [1], 0, [1]]], CoverageError, "`t`"),
    ("a tile outside the tensor", (*FIRST, "tiles"), [[[3], [2], 0, [1]]], DamagedFileError, "`t`"),
    ("a tile outside the array", (*FIRST, "tiles"), [[[0], [2], 1, [1]]], DamagedFileError, "`t`"),
    ("strides beyond the array", (*FIRST, "tiles"), [[[0], [2], 0, [1 << 62]]], DamagedFileError, "`t`"),
    ("a tile of other dims", (*FIRST, "tiles"), [[[0, 0], [2, 1], 0, [1, 1]]], DamagedFileError, "dims"),
    ("no tile", (*FIRST, "tiles"), [], CoverageError, "`t`"),
    ("no array", ("tensors", "t", "stored"), [], (CoverageError, DamagedFileError), "`t`"),
    ("a tile of text", (*FIRST, "tiles"), ["x"], DamagedFileError, "`t`"),
    ("a later version", ("version",), 2, UnsupportedError, "version 2"),
    ("a version of text", ("version",), "1", DamagedFileError, "version"),
    ("another field", ("more",), 1, DamagedFileError, "more"),
    ("a layout of text", ("layout",), "x", DamagedFileError, "layout"),
]


@pytest.mark.parametrize(("path", "value", "error", "named"), [c[1:] for c in TILES], ids=[c[0] for c in TILES])
def test_tiles_are_refused(tiled: Path, path: tuple[Any, ...], value: Any, error: Any, named: str) -> None:
    content = tiles_json()
    inner = content
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    (tiled / "tiles.json").write_text(json.dumps(content))
    with pytest.raises(error) as caught:
        reshard.open(tiled)
    assert re.search(named, str(caught.value).replace(str(tiled), ""))


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, linked("../bait.safetensors"), linked("gone")])
def test_tiles_json_of_another_kind(tiled: Path, make: Any) -> None:
    (tiled / "tiles.json").unlink()
    make(tiled / "tiles.json")
    with pytest.raises(ReshardError, match=r"tiles\.json"):
        reshard.open(tiled)


def test_equal_regions_are_replicas(tiled: Path) -> None:
    content = tiles_json()
    content["tensors"]["t"]["stored"][0]["tiles"] *= 2
    (tiled / "tiles.json").write_text(json.dumps(content))
    with reshard.open(tiled) as opened:
        assert opened.read("t").tobytes() == T.tobytes()


def test_a_dtype_in_metadata_json_proves_nothing(tree: Path) -> None:
    """The original does not look at it either: the shard files say what they hold."""
    edit(*W_TENSOR, "properties", "dtype", to="Float7")(tree)
    check_good(tree)


def test_a_tensor_in_metadata_json_and_in_tiles_json(tree: Path) -> None:
    content = tiles_json()
    content["tensors"] = {"b": {**content["tensors"]["t"], "shape": [3]}}
    content["tensors"]["b"]["stored"] = [{"file": M0, "name": "b", "shape": [3], "tiles": [[[0], [3], 0, [1]]]}]
    (tree / "tiles.json").write_text(json.dumps(content))
    with pytest.raises(DamagedFileError, match="b"):
        reshard.open(tree)


# -- Hugging Face


@pytest.mark.parametrize(
    ("index", "error", "named"),
    [
        ({"weight_map": {"w": "../bait.safetensors"}}, DamagedFileError, "separator"),
        ({"weight_map": {"w": "/etc/passwd"}}, DamagedFileError, "separator"),
        ({"weight_map": {"w": "a/../x.safetensors"}}, DamagedFileError, "separator"),
        ({"weight_map": {"w": "..\\bait.safetensors"}}, DamagedFileError, "separator"),
        ({"weight_map": {"w": ".."}}, DamagedFileError, "folder"),
        ({"weight_map": {"w": ""}}, DamagedFileError, "empty"),
        ({"weight_map": {"w": "x.safetensors\0"}}, DamagedFileError, "control"),
        ({"weight_map": {"w": 3}}, DamagedFileError, "not text"),
        ({"weight_map": {"w": ["x.safetensors"]}}, DamagedFileError, "not text"),
        ({"weight_map": {"": "x.safetensors"}}, DamagedFileError, "name"),
        ({"weight_map": {"k" * 2000: "x.safetensors"}}, UnsupportedError, "name"),
        ({"weight_map": {}}, DamagedFileError, "`weight_map` is empty"),
        ({"weight_map": []}, DamagedFileError, "weight_map"),
        ([], DamagedFileError, "weight_map"),
        (
            {"weight_map": {"w": "index of a folder"}},
            DamagedFileError,
            "index of a folder`, which is a folder, expected a file",
        ),
        (
            {"weight_map": {"w": "pipe"}},
            DamagedFileError,
            "pipe`, which is a pipe, a socket or a device, expected a file",
        ),
        ({"weight_map": {"w": "x.safetensors", "v": "x.safetensors"}}, DamagedFileError, "`v`"),
        ({"weight_map": {"w": "torn.safetensors"}}, DamagedFileError, "torn|3 bytes"),
    ],
)
def test_an_index_is_refused(index: Any, error: type[ReshardError], named: str, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    (folder / "index of a folder").mkdir(parents=True)
    os.mkfifo(folder / "pipe")
    save_file({"w": W}, folder / "x.safetensors")
    (folder / "torn.safetensors").write_bytes(b"abc")
    save_file({"w": W}, tmp_path / "bait.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(error, match=named):
        reshard.open(folder)


@pytest.mark.parametrize("text", ["", "{", '{"weight_map": {"w": "x", "w": "y"}}', "\ufeff{}", "[" * 100_000])
def test_an_index_that_is_no_json(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(DamagedFileError):
        reshard.open(tmp_path)
