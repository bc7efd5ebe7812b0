"""Small files: whole or not at all, one open; and sizes in bytes."""

from __future__ import annotations

import os
import stat
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from reshard.arguments import parse_size
from reshard.errors import ArgumentError, CheckpointNotFoundError, DamagedFileError, ReshardError, StorageError
from reshard.storage.location import locate
from reshard.storage.names import component_fault


def test_a_file_is_written_whole_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "common.json"
    old = os.umask(0o027)
    try:
        locate(path).replace("one", 0o666)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        locate(path).replace(b"two", 0o400)
        locate(path).replace(b"three", 0o400)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o400
    assert path.read_bytes() == b"three"
    assert [entry.name for entry in tmp_path.iterdir()] == ["common.json"]


def test_a_write_that_fails_leaves_everything_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "common.json"
    path.write_text("old")

    class StopError(Exception):
        pass

    def write_half() -> None:
        with locate(path).writing() as file:
            file.write(b"half")
            raise StopError

    with pytest.raises(StopError):
        write_half()
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(StorageError, match="Input/output error") as caught:
        locate(path).replace("new")
    assert caught.value.errno == 5
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["common.json"]
    monkeypatch.undo()
    with pytest.raises(StorageError, match="No such file or directory"):
        locate(tmp_path / "absent" / "x").replace("new")


def test_the_file_is_synced_before_it_is_renamed_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(handle: int) -> None:
        steps.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        real_fsync(handle)

    def replace(source: str, target: str) -> None:
        steps.append("rename")
        assert Path(source).name.startswith(".")
        assert not source.endswith((".safetensors", ".safetensor"))
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    locate(tmp_path / "model.safetensors").replace(b"x")
    assert steps == ["file", "rename", "folder"]
    steps.clear()
    locate(tmp_path / "x").replace(b"x", durable=False)
    assert steps == ["rename"]


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda path: None, CheckpointNotFoundError),
        (lambda path: path.symlink_to("elsewhere"), DamagedFileError),
        (lambda path: path.mkdir(), DamagedFileError),
        (os.mkfifo, DamagedFileError),
    ],
)
def test_only_regular_files_are_read(make: Any, error: type[ReshardError], tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("{}")
    path = tmp_path / "file"
    make(path)
    with pytest.raises(error):
        locate(path).read_small(10)


# -- sizes and names


@pytest.mark.parametrize(
    ("size", "n_bytes"),
    [
        (1, 1),
        ("1", 1),
        ("512B", 512),
        ("4GiB", 4 * 2**30),
        ("500MB", 500 * 10**6),
        ("5GB", 5 * 10**9),
        ("1.5 KiB", 1536),
        ("0.1GB", 10**8),
        ("2TiB", 2**41),
        ("3 KB", 3000),
        ("5G", 5 * 2**30),
        ("512M", 512 * 2**20),
        ("1.5k", 1536),
        ("9223372036854775807", 2**63 - 1),
    ],
)
def test_sizes(size: str | int, n_bytes: int) -> None:
    assert parse_size(size) == n_bytes


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("", "is not a size"),
        ("4X", "is not a size"),
        ("GiB", "is not a size"),
        ("4 gigabytes", "`4 gigabytes` is not a size"),
        ("4Gb", "is not a size"),
        ("4gib", "is not a size"),
        ("4iB", "is not a size"),
        ("-4GiB", "is not a size"),
        ("+4GiB", "is not a size"),
        ("1e9", "is not a size"),
        ("4  GiB", "is not a size"),
        ("4GiB\n", "is not a size"),
        ("\u0664GiB", "is not a size"),
        (".5GiB", "is not a size"),
        ("nan", "is not a size"),
        ("9" * 5000, "is not a size"),
        ("0", "from 1 to"),
        ("0.5B", "from 1 to"),
        ("9223372036854775808", "from 1 to"),
        ("99999999TiB", "from 1 to"),
        (0, "from 1 to"),
        (-1, "from 1 to"),
        (True, "not bool"),
        (1.5, "not float"),
        (None, "not NoneType"),
    ],
)
def test_what_is_no_size(size: Any, message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        parse_size(size)
    assert message in str(caught.value)
    assert 'write it as "4GiB"' in str(caught.value)


@pytest.mark.parametrize("name", ["a", "model-00001-of-00002.safetensors", "spåce d", "a..b", "...", "x" * 255, "-rf"])
def test_plain_components(name: str) -> None:
    assert component_fault(name) is None


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "/", "a/b", "/a", "a/", "..\\a", "a\0", "a\n", "a\x7f", "a\x85", "x" * 256, "é" * 128, "\udcff"],
)
def test_what_is_no_plain_component(name: str) -> None:
    assert component_fault(name) is not None


def test_a_file_is_read_in_memory_for_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * 5000)
    tracemalloc.start()
    try:
        assert locate(path).read_small(4 << 30) == b"x" * 5000
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        with (tmp_path / "sparse").open("wb") as file:
            file.truncate(1 << 40)
        with pytest.raises(DamagedFileError, match="larger than 268435456 bytes"):
            locate(tmp_path / "sparse").read_small(1 << 28)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    with pytest.raises(DamagedFileError, match="larger than 4999 bytes"):
        locate(path).read_small(4999)
    assert locate(path).read_head(10) == b"x" * 10
    assert locate(path).read_tail(10) == b"x" * 10
    # The size of such a file is told as 0: it is read as one that grew.
    assert locate("/proc/self/status").read_small(1 << 20).startswith(b"Name:")
