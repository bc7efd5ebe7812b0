"""Folders whose index or weight files are damaged, contradict each other or lead elsewhere: each is refused."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reshard
from reshard.errors import ReshardError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BASE = "diffusion_pytorch_model"
INDEX = f"{BASE}.safetensors.index.json"
A, B = f"{BASE}-00001-of-00002.safetensors", f"{BASE}-00002-of-00002.safetensors"
MAP = {"a": A, "b": B}


def index(value: Any) -> Callable[[Path], object]:
    return lambda folder: (folder / INDEX).write_bytes(
        value if isinstance(value, bytes) else json.dumps(value).encode()
    )


def files(**of: Any) -> Callable[[Path], object]:
    return index({"weight_map": {**MAP, **of}})


def content(header: bytes, data: bytes = b"") -> Callable[[Path], object]:
    return lambda folder: (folder / A).write_bytes(len(header).to_bytes(8, "little") + header + data)


def tensor(dtype: str, shape: str, offsets: str) -> Callable[[Path], object]:
    return content(f'{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}'.encode(), b"data")


def replaced(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return change


def numbered(change: Callable[[Path], object]) -> Callable[[Path], object]:
    def without_index(folder: Path) -> None:
        (folder / INDEX).unlink()
        change(folder)

    return without_index


def saved(name: str, **tensors: Any) -> Callable[[Path], object]:
    return lambda folder: reshard.save_file(tensors, folder / name)


def copied(name: str) -> Callable[[Path], object]:
    return lambda folder: shutil.copy(folder / A, folder / name)


NESTED = b"[" * 100_000
HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "an empty index": (index(b""), "is not valid JSON"),
    "null": (index(None), "it has no object `weight_map`"),
    "a list": (index([]), "it has no object `weight_map`"),
    "no map": (index({"metadata": {}}), "the file of `metadata` is not text"),
    "a list as map": (index({"weight_map": [A, B]}), "it has no object `weight_map`"),
    "text as map": (index({"weight_map": A}), "it has no object `weight_map`"),
    "null as map": (index({"weight_map": None}), "it has no object `weight_map`"),
    "an empty map": (index({"weight_map": {}}), "`weight_map` is empty"),
    "a number as file": (files(a=1), "the file of `a` is not text"),
    "null as file": (files(a=None), "the file of `a` is not text"),
    "a list as file": (files(a=[A]), "the file of `a` is not text"),
    "an empty name": (files(a=""), "is refused: it is empty"),
    "a dot": (files(a="."), "is refused: it names a folder"),
    "two dots": (files(a=".."), "is refused: it names a folder"),
    "a file of the folder above": (files(a=f"../{A}"), "is refused: it has a path separator"),
    "an absolute path": (files(a="/etc/passwd"), "is refused: it has a path separator"),
    "a NUL": (files(a="x\0y"), "is refused: it has a control character"),
    "a line break": (files(a="x\n.safetensors"), "is refused: it has a control character"),
    "a long name": (files(a="x" * 5000), "is refused"),
    "a missing file": (files(b="gone.safetensors"), "lists missing files: `gone.safetensors`"),
    "a tensor that no file has": (files(c=B), "does not hold the expected tensor `c`"),
    "a tensor of another file": (files(a=B), "does not hold the expected tensor `a`"),
    "no UTF-8": (index(b'{"weight_map": {"\xff": "x"}}'), "is not UTF-8: byte 17"),
    "an index that is cut off": (index(b'{"weight_map": {"a": "'), "is not valid JSON"),
    "text behind the index": (index(json.dumps({"weight_map": MAP}).encode() + b" x"), "is not valid JSON: Extra data"),
    "a tensor twice": (index(f'{{"weight_map": {{"a": "{A}", "a": "{B}"}}}}'.encode()), "the name `a` is repeated"),
    "two maps": (index(f'{{"weight_map": {{}}, "weight_map": {{"a": "{A}"}}}}'.encode()), "`weight_map` is repeated"),
    "an index that is nested deeply": (index(NESTED), "nests deeper than"),
    "NaN": (index(b'{"weight_map": NaN}'), "NaN is not a JSON number"),
    "an empty file": (lambda folder: (folder / A).write_bytes(b""), "the file has 0 bytes"),
    "three bytes": (lambda folder: (folder / A).write_bytes(b"\x08\0\0"), "the file has 3 bytes"),
    "a long header": (
        lambda folder: (folder / A).write_bytes((1 << 62).to_bytes(8, "little") + b"{}"),
        "at most 100000000",
    ),
    "no JSON": (content(b"hello"), "the header must start with `{`"),
    "a list as header": (content(b"[]"), "the header must start with `{`"),
    "an unknown dtype": (tensor("F3", "[1]", "[0,4]"), "unknown dtype `F3`"),
    "other bytes than the shape": (tensor("F32", "[9]", "[0,4]"), r"needs 36 bytes, but data_offsets \[0, 4\] have 4"),
    "bytes beyond the end": (tensor("F32", "[1]", "[4,8]"), "the file has only 4 bytes of data"),
    "a negative extent": (tensor("F32", "[-1]", "[0,4]"), "expected a plain integer"),
    "an extent beyond 64 bits": (tensor("F32", "[99999999999999999999]", "[0,4]"), "expected a plain integer"),
    "an element count beyond 64 bits": (tensor("F32", "[4294967296,4294967296,9]", "[0,4]"), "tensor `a`"),
    "tensors that are cut off": (lambda folder: os.truncate(folder / A, 100), "bytes"),
    "a folder as file": (replaced(A, lambda file: file.mkdir()), "which is a folder, expected a file"),
    "a link to nothing": (replaced(A, lambda file: file.symlink_to("gone")), f"lists missing files: `{A}`"),
    "a link to itself": (replaced(A, lambda file: file.symlink_to(file)), f"lists missing files: `{A}`"),
    "a pipe": (replaced(A, os.mkfifo), "which is a pipe, a socket or a device"),
    "numbers of two saves": (
        numbered(copied(f"{BASE}-00001-of-00003.safetensors")),
        "of several saves: .* count 2, 3 files",
    ),
    "number 0": (numbered(copied(f"{BASE}-00000-of-00002.safetensors")), "its number is not from 1 to 2"),
    "a number beyond the count": (
        numbered(copied(f"{BASE}-00003-of-00002.safetensors")),
        "its number is not from 1 to 2",
    ),
    "the last number": (
        numbered(lambda folder: (folder / B).unlink()),
        f"holds 1 of 2 files of weights; missing: `{B}`",
    ),
    "one tensor with two values": (
        numbered(saved(B, a=np.zeros((2, 3), np.float32))),
        "both hold `a`, with different content",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_folders(tmp_path: Path, case: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    saved(A, a=np.ones((2, 3), np.float32))(folder)
    saved(B, b=np.ones(3, np.float32))(folder)
    index({"metadata": {"total_size": 36}, "weight_map": MAP})(folder)
    with reshard.open(folder) as checkpoint:
        assert sorted(checkpoint) == ["a", "b"]
    change, message = HOSTILE[case]
    change(folder)
    with pytest.raises(ReshardError, match=message) as caught:
        reshard.open(folder)
    assert str(folder) in str(caught.value.path)
    assert len(str(caught.value)) < 7000
    with pytest.raises(ReshardError):
        reshard.convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
