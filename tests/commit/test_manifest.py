"""The commit record: it proves itself, and everything that it lists; whatever is altered or cut off is noticed."""

from __future__ import annotations

import dataclasses
import fcntl
import gc
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.crc32c import crc32c

from reshard.commit import manifest as manifests
from reshard.commit.manifest import Manifest, PlainEntry, ShardEntry
from reshard.errors import (
    ArgumentError,
    CheckpointNotFoundError,
    DamagedFileError,
    ReshardError,
    StorageError,
    UnsupportedError,
)
from reshard.storage.location import locate

CHUNK = 256 * 1024


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def shard_bytes(n_data: int, seed: int) -> tuple[bytes, int]:
    """A safetensors file and the bytes before its data."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [n_data], "data_offsets": [0, n_data]}}).encode()
    header += b" " * (-len(header) % 8)
    data = bytes((seed + i) % 251 for i in range(251)) * (n_data // 251 + 1)
    return len(header).to_bytes(8, "little") + header + data[:n_data], 8 + len(header)


def make(folder: Path, n_data: tuple[int, ...] = (CHUNK + 100, 0, 50), **changes: Any) -> Manifest:
    """A folder with shard files, two other files and their sums; its manifest is not yet written."""
    folder.mkdir(parents=True, exist_ok=True)
    shards, all_checksums = {}, b""
    for index, n in enumerate(n_data):
        content, header_bytes = shard_bytes(n, index)
        name = f"model-{index:07d}-{len(n_data):07d}.safetensors"
        (folder / name).write_bytes(content)
        chunks = [content[i : i + CHUNK] for i in range(0, len(content), CHUNK)]
        # The sums of large chunks only have to be 4 bytes here: they are compared by their digest.
        checksums = b"".join(hashlib.blake2b(chunk, digest_size=4).digest() for chunk in chunks)
        header_checksum = crc32c(content[:header_bytes])
        shards[name] = ShardEntry(
            len(content), header_bytes, header_checksum, len(all_checksums) // 4, digest(checksums), index
        )
        all_checksums += checksums
    files = {"common.json": b"{}", "metadata.json": b'{"a": 1}', "checksums.bin": all_checksums}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    facts: dict[str, Any] = {
        "iteration": 400,
        "generation": 3,
        "attempt": "0123456789abcdef" * 2,
        "world_size": len(n_data),
        "previous_tracker": 300,
        "passed_over": (350, 320),
        "writer": "reshard 1.0",
        "saved_at": "2026-01-31T12:00:00.5Z",
        "ckpt_status": None,
        "shards": shards,
        "files": {name: PlainEntry(len(content), digest(content)) for name, content in files.items()},
    }
    return Manifest(**(facts | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "iteration_00000400"


# -- the record


def test_what_is_written_is_read(folder: Path) -> None:
    manifest = make(folder)
    manifests.write(locate(folder), manifest)
    assert manifests.read(locate(folder)) == manifest
    assert manifests.read(locate(str(folder))).digest == manifest.digest
    assert not list(folder.glob("*.tmp"))


def test_the_file_is_plain_json_whose_digest_is_over_what_stands_before_it(folder: Path) -> None:
    manifests.write(locate(folder), make(folder))
    data = (folder / "manifest.json").read_bytes()
    content = json.loads(data)
    assert list(content) == [
        "version", "iteration", "epoch", "attempt", "world_size", "previous_tracker", "passed_over", "writer",
        "saved_at", "ckpt_status", "shards", "files", "digest",
    ]  # fmt: skip
    assert content["version"] == 1
    assert content["digest"] == digest(data[: data.rindex(b',\n"digest":')])
    assert content["shards"]["model-0000000-0000003.safetensors"]["first_chunk"] == 0
    assert content["shards"]["model-0000001-0000003.safetensors"]["first_chunk"] == 2
    assert content["files"]["common.json"] == {"n_bytes": 2, "digest": digest(b"{}")}


def test_every_flipped_bit_is_noticed(folder: Path) -> None:
    manifests.write(locate(folder), make(folder, (10,)))
    path = folder / "manifest.json"
    data = path.read_bytes()
    handle = os.open(path, os.O_WRONLY)
    for place, byte in enumerate(data):
        for bit in range(8):
            os.pwrite(handle, bytes([byte ^ 1 << bit]), place)
            with pytest.raises(DamagedFileError) as caught:
                manifests.read(locate(folder))
            assert caught.value.path == str(path)
        os.pwrite(handle, data[place : place + 1], place)
    os.close(handle)
    manifests.read(locate(folder))


def test_every_truncation_and_zeroed_tail_is_noticed(folder: Path) -> None:
    manifests.write(locate(folder), make(folder, (10,)))
    path = folder / "manifest.json"
    data = path.read_bytes()
    for n in range(len(data)):
        for damaged in (data[:n], data[:n] + bytes(len(data) - n)):
            path.write_bytes(damaged)
            with pytest.raises(DamagedFileError):
                manifests.read(locate(folder))
    for more in (b"\n", b" ", b"\0", data):
        path.write_bytes(data + more)
        with pytest.raises(DamagedFileError):
            manifests.read(locate(folder))


@pytest.mark.parametrize(
    ("name", "is_refused"),
    [
        ("iteration_00000401", True),
        ("iteration_401", True),
        ("401.3.0123456789abcdef", True),
        ("400.3.0123456789abcdef", False),
        ("iteration_0000400", False),
        ("best", False),
    ],
)
def test_a_manifest_of_another_iteration_is_stale(name: str, *, is_refused: bool, tmp_path: Path) -> None:
    manifests.write(locate(tmp_path / name), make(tmp_path / name))
    if is_refused:
        with pytest.raises(DamagedFileError, match="of iteration 400, its folder that of 401"):
            manifests.read(locate(tmp_path / name))
    else:
        manifests.read(locate(tmp_path / name))


def rewritten(folder: Path, change: Any) -> None:
    """The manifest with a change of its text, and a digest that fits."""
    path = folder / "manifest.json"
    body = path.read_bytes().rpartition(b',\n"digest":')[0]
    changed = change(body)
    assert changed != body
    path.write_bytes(changed + f',\n"digest":"{digest(changed)}"}}\n'.encode())


def sub(old: bytes, new: bytes) -> Any:
    return lambda body: re.sub(old, lambda _: new, body, count=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (sub(b'"version":1', b'"version":true'), "`version` is missing or not an integer"),
        (sub(b'"version":1', b'"Version":1'), "`version` is missing"),
        (sub(b'"epoch":3', b'"epoch": 3'), "not spelt as a manifest is written"),
        (sub(b'"epoch":3', b'"epoch":3,"epoch":3'), "is repeated"),
        (sub(b'"epoch":3', b'"epoch":3,"more":3'), "the file has an unknown field `more`"),
        (sub(b'"epoch":3,', b""), "the file lacks `epoch`"),
        (sub(b'"epoch":3', b'"epoch":3.0'), "`epoch` is not an integer from 0"),
        (sub(b'"epoch":3', b'"epoch":-3'), "`epoch` is not an integer from 0"),
        (sub(b'"epoch":3', b'"epoch":true'), "`epoch` is not an integer from 0"),
        (sub(b'"epoch":3', b'"epoch":9223372036854775808'), "does not fit 64 bits"),
        (sub(b'"epoch":3', b'"epoch":NaN'), "NaN is not a JSON number"),
        (sub(b'"previous_tracker":300', b'"previous_tracker":"300"'), "`previous_tracker` is not an integer"),
        (sub(b'"passed_over":.350,320.', b'"passed_over":350'), "`passed_over` is not a list"),
        (sub(b'"passed_over":.350,320.', b'"passed_over":[null]'), "`passed_over` is not an integer"),
        (sub(b'"attempt":"01', b'"attempt":"XY'), "`attempt` is not 32 hex digits"),
        (sub(b'"writer":"reshard 1.0"', b'"writer":"\\u001b[2J"'), "`writer` is not printable"),
        (sub(b'"saved_at":"2026', b'"saved_at":"202X'), "`saved_at` is not a time"),
        (sub(b'"n_bytes":2,', b'"n_bytes":null,'), "`common.json`: `n_bytes` is not an integer"),
        (sub(b'"n_bytes":2,', b'"n_bytes":2,"mode":1,'), "`common.json`: it has an unknown field `mode`"),
        (sub(b'"header_bytes":[0-9]+', b'"header_bytes":7'), "`header_bytes` is 7"),
        (sub(b'"header_bytes":[0-9]+', b'"header_bytes":999999'), "`header_bytes` is 999999"),
        (sub(b'"header_sum":[0-9]+', b'"header_sum":4294967296'), "a checksum has 32 bits"),
        (sub(b'"first_chunk":2', b'"first_chunk":1'), "`first_chunk` is 1, expected 2"),
        (sub(b'"n_bytes":16,', b'"n_bytes":20,'), "`files` lists no checksums.bin of 16 bytes"),
        (sub(b'"checksums.bin"', b'"checksum.bin"'), "`files` lists no checksums.bin"),
        (sub(b'"metadata.json"', b'"model-0000000-0000003.safetensors"'), "is listed twice"),
        (sub(b'"shards":{\n', b'"shards":[{\n'), "not valid JSON"),
        (lambda body: b'{"version":1,\n"shards":' + b"[" * 50 + b"]" * 50, "nests deeper"),
        (lambda body: b"\xef\xbb\xbf" + body, "byte order mark"),
        (lambda body: b'{"version":[' + b"," * 8_000_000, "holds more than 8000000 values"),
    ],
)  # fmt: skip
def test_a_forged_digest_saves_no_malformed_record(change: Any, message: str, folder: Path) -> None:
    manifests.write(locate(folder), make(folder))
    rewritten(folder, change)
    with pytest.raises(DamagedFileError, match=re.escape(message)):
        manifests.read(locate(folder))


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "/etc/passwd", "../x", "a/b", "a\\b", "a\0", "a\n", "x" * 256, ".tracked", ".x", "manifest.json"],
)
def test_hostile_names_are_refused(name: str, folder: Path) -> None:
    manifest = make(folder)
    manifests.write(locate(folder), manifest)
    rewritten(folder, sub(b'"metadata.json"', json.dumps(name).encode()))
    with pytest.raises(DamagedFileError, match="is refused"):
        manifests.read(locate(folder))
    with pytest.raises(ArgumentError, match="is refused"):
        dataclasses.replace(manifest, files={**manifest.files, name: PlainEntry(0, digest(b""))}, digest="")


def test_a_later_version_is_told_from_damage(folder: Path) -> None:
    manifests.write(locate(folder), make(folder))
    rewritten(folder, sub(b'"version":1', b'"version":3,"new":[]'))
    with pytest.raises(UnsupportedError, match="is of version 3; this release reads versions 1 and 2"):
        manifests.read(locate(folder))


def test_a_digest_that_is_told_must_fit(folder: Path) -> None:
    manifest = make(folder)
    assert dataclasses.replace(manifest, digest=manifest.digest) == manifest
    with pytest.raises(ArgumentError, match="`digest` is not that of the record"):
        dataclasses.replace(manifest, iteration=401)


def test_without_a_manifest(folder: Path) -> None:
    for act in (manifests.read, manifests.read_lock):
        with pytest.raises(CheckpointNotFoundError):
            act(locate(folder))
        folder.mkdir(exist_ok=True)
        with pytest.raises(CheckpointNotFoundError):
            act(locate(folder))
        folder.rmdir()


@pytest.mark.parametrize("make_other", [lambda path: path.symlink_to("common.json"), Path.mkdir, os.mkfifo])
def test_what_is_no_regular_file_is_no_manifest(make_other: Any, folder: Path) -> None:
    make(folder)
    make_other(folder / "manifest.json")
    for act in (manifests.read, manifests.read_lock):
        with pytest.raises(DamagedFileError):
            act(locate(folder))


# -- what it lists


def test_sizes(folder: Path) -> None:
    manifest = make(folder)
    manifests.check_sizes(locate(folder), manifest)
    for name, _ in manifest.sizes:
        path = folder / name
        data = path.read_bytes()
        for n in {0, len(data) - 1, len(data) + 1} - {len(data)}:
            path.write_bytes((data + b"\0")[:n])
            with pytest.raises(DamagedFileError, match=f"has {n} bytes?, expected {len(data)}") as caught:
                manifests.check_sizes(locate(folder), manifest)
            assert caught.value.path == str(path)
        path.unlink()
        with pytest.raises(DamagedFileError, match=rf"there is no file .*{name}"):
            manifests.check_sizes(locate(folder), manifest)
        (folder.parent / "outside").write_bytes(data)
        path.symlink_to("../outside")
        with pytest.raises(DamagedFileError, match="is not a regular file"):
            manifests.check_sizes(locate(folder), manifest)
        path.unlink()
        path.write_bytes(data)
    manifests.check_sizes(locate(folder), manifest)
    with pytest.raises(CheckpointNotFoundError):
        manifests.check_sizes(locate(folder / "absent"), manifest)


def test_headers(folder: Path) -> None:
    manifest = make(folder)
    manifests.check_headers(locate(folder), manifest)
    name = "model-0000002-0000003.safetensors"
    path, data = folder / name, (folder / name).read_bytes()
    for place in range(manifest.shards[name].header_bytes):
        path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        with pytest.raises(DamagedFileError, match=r"the header of .* was altered") as caught:
            manifests.check_headers(locate(folder), manifest)
        assert caught.value.path == str(path)
        manifests.check_headers(locate(folder), manifest, ["model-0000000-0000003.safetensors"])
    path.write_bytes(data[:-1])
    with pytest.raises(DamagedFileError, match="expected"):
        manifests.check_headers(locate(folder), manifest)


def test_sums_are_read_for_the_files_asked_for(folder: Path) -> None:
    manifest = make(folder)
    data = (folder / "checksums.bin").read_bytes()
    first, second, third = manifest.shards
    assert manifests.read_checksums(locate(folder), manifest) == {
        first: data[:8],
        second: data[8:12],
        third: data[12:16],
    }
    assert manifests.read_checksums(locate(folder), manifest, [third]) == {third: data[12:]}
    assert manifests.read_checksums(locate(folder), manifest, {third, first}) == {first: data[:8], third: data[12:]}
    assert manifests.read_checksums(locate(folder), manifest, []) == {}
    with pytest.raises(ArgumentError, match="lists no shard file `x`"):
        manifests.read_checksums(locate(folder), manifest, ["x"])


def test_every_flipped_bit_of_the_sums_is_noticed_and_named(folder: Path) -> None:
    manifest = make(folder)
    path = folder / "checksums.bin"
    data = path.read_bytes()
    for place in range(len(data)):
        for bit in range(8):
            path.write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
            hit = list(manifest.shards)[0 if place < 8 else 1 if place < 12 else 2]
            with pytest.raises(DamagedFileError, match=f"the checksums of `{hit}` differ"):
                manifests.read_checksums(locate(folder), manifest)
            others = [name for name in manifest.shards if name != hit]
            manifests.read_checksums(locate(folder), manifest, others)
    for n in range(len(data)):
        path.write_bytes(data[:n])
        with pytest.raises(DamagedFileError, match=f"has {n} bytes?, expected 16"):
            manifests.read_checksums(locate(folder), manifest)
    path.unlink()
    with pytest.raises(DamagedFileError, match="there is no file"):
        manifests.read_checksums(locate(folder), manifest)


def test_plain_files(folder: Path) -> None:
    manifest = make(folder)
    path = folder / "metadata.json"
    data = path.read_bytes()
    assert manifests.read_plain(locate(folder), manifest, "metadata.json", len(data)) == data
    with pytest.raises(DamagedFileError, match="has 8 bytes; such a file has at most 7"):
        manifests.read_plain(locate(folder), manifest, "metadata.json", 7)
    for place in range(len(data)):
        for bit in range(8):
            path.write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
            with pytest.raises(DamagedFileError, match="was altered"):
                manifests.read_plain(locate(folder), manifest, "metadata.json", 100)
    for damaged in (data[:-1], data + b" ", b""):
        path.write_bytes(damaged)
        with pytest.raises(DamagedFileError, match="expected 8"):
            manifests.read_plain(locate(folder), manifest, "metadata.json", 100)
    (folder / "planted.json").write_bytes(b"{}")
    with pytest.raises(CheckpointNotFoundError, match=r"lists no file `planted\.json`"):
        manifests.read_plain(locate(folder), manifest, "planted.json", 100)


def test_a_failing_disk_is_no_damage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = make(folder)

    def pread(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", pread)
    with pytest.raises(StorageError, match="Input/output error") as caught:
        manifests.read_plain(locate(folder), manifest, "common.json", 100)
    assert caught.value.errno == 5
    with pytest.raises(StorageError):
        manifests.read_checksums(locate(folder), manifest)


def n_handles() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_no_handle_is_left_open(folder: Path) -> None:
    manifest = make(folder)
    manifests.write(locate(folder), manifest)
    gc.collect()  # files of objects of other tests are not closed in between
    before = n_handles()
    (folder / "common.json").write_bytes(b"!")
    for act in (
        lambda: manifests.check_sizes(locate(folder), manifest),
        lambda: manifests.read_plain(locate(folder), manifest, "common.json", 10),
        lambda: manifests.read_plain(locate(folder), manifest, "absent", 10),
        lambda: manifests.read_lock(locate(folder / "absent")),
    ):
        with pytest.raises(ReshardError):
            act()
    manifests.read(locate(folder))
    manifests.read_checksums(locate(folder), manifest)
    manifests.read_lock(locate(folder)).close()
    assert n_handles() == before


# -- the reader's lock


def is_locked(folder: Path) -> bool:
    with (folder / "manifest.json").open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_readers_share_the_lock(folder: Path) -> None:
    manifests.write(locate(folder), make(folder))
    assert not is_locked(folder)
    one, other = manifests.read_lock(locate(folder)), manifests.read_lock(locate(folder))
    one.close()
    assert is_locked(folder)
    other.close()
    assert not is_locked(folder)


def test_a_folder_that_is_renamed_away_while_it_is_locked_is_no_longer_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests.write(locate(folder), make(folder))
    real = fcntl.flock

    def rename_then_lock(handle: int, operation: int) -> None:
        folder.rename(folder.with_name("trash"))
        real(handle, operation)

    monkeypatch.setattr(fcntl, "flock", rename_then_lock)
    gc.collect()  # files of objects of other tests are not closed in between
    before = n_handles()
    with pytest.raises(CheckpointNotFoundError, match="was removed while it was opened"):
        manifests.read_lock(locate(folder))
    assert n_handles() == before


def test_a_folder_that_is_being_removed_is_waited_for_until_a_deadline(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests.write(locate(folder), make(folder))
    monkeypatch.setattr(manifests, "_LOCK_SECONDS", 0.05)
    with (folder / "manifest.json").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(CheckpointNotFoundError, match="was removed"):
            manifests.read_lock(locate(folder))
    manifests.read_lock(locate(folder)).close()


def test_without_locks_reading_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifests.write(locate(folder), make(folder))

    def flock(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    manifests.read_lock(locate(folder)).close()
