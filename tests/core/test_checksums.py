"""Checksums of chunks: computed when a file is written, compared when it is read or scrubbed; and snapshots."""

import os
import random
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from tests.helpers.crc32c import crc32c
from tests.helpers.plans import CHUNK_BYTES, tell_sums

from reshard import _core
from reshard.errors import ArgumentError, DamagedFileError

Method = Literal["map", "read"]
METHODS: tuple[Method, ...] = ("map", "read")


def test_crc32c_is_the_standard_one() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the check value in catalogues of CRCs
    for data in (b"", b"a", bytes(32), random.Random(1).randbytes(4099)):
        assert _core.crc32c(data) == crc32c(data)
        assert _core.crc32c(data[3:], _core.crc32c(data[:3])) == crc32c(data)
    with pytest.raises(ArgumentError, match="not contiguous"):
        _core.crc32c(np.zeros((4, 4))[:, 1])
    with pytest.raises(ArgumentError, match="not contiguous"):
        _core.crc32c(np.zeros((4, 3)).T)


def arrays() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(3)
    return {
        "big": generator.standard_normal((700, 1024)).astype(np.float32),
        "other": generator.integers(0, 1 << 60, (300, 777)),
        "small": generator.integers(0, 99, 5).astype(np.int16),
    }


def entries(tensors: dict[str, np.ndarray]) -> list[tuple[str, str, tuple[int, ...], np.ndarray]]:
    names = {"float32": "F32", "int64": "I64", "int16": "I16"}
    return [(key, names[str(array.dtype)], array.shape, array) for key, array in tensors.items()]


@pytest.mark.slow
def test_a_large_file_is_right_by_every_route(tmp_path: Path) -> None:
    # Not durable: the first 16 MiB go into the page cache, the next 32 MiB past it, the others by the faster route.
    tensors = {"w": np.random.default_rng(5).integers(0, 99, 9_000_001, np.int64)}
    written = [
        _core.write_arrays(str(tmp_path / name), entries(tensors), durable=durable, direct=direct)
        for name, durable, direct in [("any", False, True), ("past", True, True), ("cached", False, False)]
    ]
    content = {(tmp_path / name).read_bytes() for name in ("any", "past", "cached")}
    assert len(content) == 1
    assert content.pop()[-tensors["w"].nbytes :] == tensors["w"].tobytes()
    assert len({one.checksums for one in written}) == 1


@pytest.mark.parametrize("direct", [True, False])
def test_a_write_returns_the_checksums_of_the_file(tmp_path: Path, *, direct: bool) -> None:
    path = tmp_path / "a.safetensors"
    written = _core.write_arrays(str(path), entries(arrays()), metadata={"format": "pt"}, direct=direct)
    content = path.read_bytes()
    assert written.n_bytes == len(content)
    assert written.header_bytes == 8 + int.from_bytes(content[:8], "little")
    assert written.header_checksum == _core.crc32c(content[: written.header_bytes])
    chunks = [content[at : at + CHUNK_BYTES] for at in range(0, len(content), CHUNK_BYTES)]
    assert written.checksums == b"".join(_core.crc32c(chunk).to_bytes(4, "little") for chunk in chunks)
    assert _core.scrub(str(path), written.n_bytes, written.checksums, direct=direct) == []


def index_of(path: Path, content: bytes, method: Method) -> _core.Index:
    index = _core.Index()
    file = index.add_file(str(path), method=method)
    tell_sums(index, file, content)
    for tensor in index.file_tensors(file):
        index.add_whole(tensor.name, file)
    return index


REGIONS: dict[str, list[tuple[str, tuple[int, ...], tuple[int, ...]]]] = {
    "whole": [("big", (0, 0), (700, 1024)), ("other", (0, 0), (300, 777)), ("small", (0,), (5,))],
    "rows": [("big", (100, 0), (300, 1024)), ("other", (250, 0), (50, 777))],
    "columns": [("big", (0, 256), (700, 256)), ("other", (0, 7), (300, 70))],
    "one element": [("big", (699, 1023), (1, 1))],
}


def request_of(regions: list[tuple[str, tuple[int, ...], tuple[int, ...]]]) -> _core.Request:
    request = _core.Request()
    for i, (key, offset, shape) in enumerate(regions):
        request.add_region(f"{key} {i}", key, offset, shape)
    return request


def touched(path: Path, regions: list[tuple[str, tuple[int, ...], tuple[int, ...]]]) -> set[int]:
    """The chunks of the file that contain a byte of the regions."""
    index = _core.Index()
    file = index.add_file(str(path))
    start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    places = {one.name: (start + one.start, one.shape, one.end - one.start) for one in index.file_tensors(file)}
    chunks = set()
    for key, offset, shape in regions:
        first, extent, n_bytes = places[key]
        numbers = np.arange(np.prod(extent)).reshape(extent)
        item = n_bytes // numbers.size
        picked = numbers[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
        for at in (0, item - 1):
            chunks |= set(np.unique((first + picked * item + at) // CHUNK_BYTES).tolist())
    return chunks


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", REGIONS)
def test_a_changed_bit_is_found_only_by_reads_of_its_chunk(tmp_path: Path, kind: str, method: Method) -> None:
    path = tmp_path / "a.safetensors"
    written = _core.write_arrays(str(path), entries(arrays()))
    content = path.read_bytes()
    reads = touched(path, REGIONS[kind])
    rng = random.Random(kind)
    for _ in range(60):
        at = rng.randrange(written.header_bytes, written.n_bytes)
        change(path, at, content[at] ^ 1 << rng.randrange(8))
        index = index_of(path, content, method)
        plan = index.plan(request_of(REGIONS[kind]))
        out = [np.empty(n_bytes, np.uint8) for *_, n_bytes in plan.arrays]
        chunk = at // CHUNK_BYTES
        first, end = chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, written.n_bytes)
        attempts: list[Any] = [plan.load, lambda plan=plan, out=out: plan.fill(out)]
        attempts.append(lambda plan=plan: plan.write(str(tmp_path / "copy"), durable=False))
        for attempt in attempts:
            if chunk in reads:
                with pytest.raises(
                    DamagedFileError, match=f"bytes {first} to {end} differ from what was written"
                ) as info:
                    attempt()
                assert info.value.path == str(path)
                assert info.value.key is not None
                assert info.value.key.split()[0] in {key for key, *_ in REGIONS[kind]}
            else:
                attempt()
        assert not (tmp_path / "copy").exists() or chunk not in reads
        (tmp_path / "copy").unlink(missing_ok=True)
        index.plan(request_of(REGIONS[kind]), verify=False).load()
        assert _core.scrub(str(path), written.n_bytes, written.checksums) == [(first, end)]
        index.close()
        change(path, at, content[at])
    assert path.read_bytes() == content


def change(path: Path, at: int, byte: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([byte]))


@pytest.mark.parametrize("method", METHODS)
def test_a_view_is_verified_before_it_is_returned(tmp_path: Path, method: Method) -> None:
    path = tmp_path / "a.safetensors"
    _core.write_arrays(str(path), entries(arrays()))
    content = path.read_bytes()
    damaged = bytearray(content)
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    index = index_of(path, content, method)
    (key,) = [
        one.name for one in index.file_tensors(0) if one.end + 8 + int.from_bytes(content[:8], "little") == len(content)
    ]
    request = _core.Request()
    request.add_region(key, key, (0,) * len(index.shape(key)), index.shape(key))
    with pytest.raises(DamagedFileError, match="differ from what was written"):
        index.plan(request).views()
    assert index.plan(request, verify=False).views()[0] is not None


@pytest.mark.parametrize("method", METHODS)
def test_another_header_or_size_is_rejected(tmp_path: Path, method: Method) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {"small": arrays()["small"]}
    written = _core.write_arrays(str(path), entries(tensors), metadata={"format": "pt"})
    content = path.read_bytes()
    for bit in range(8 * written.header_bytes):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(DamagedFileError, match="header differs from the one"):
            index_of(path, content, method)
    for other in (content[:-1], content + b"\0", b""):
        path.write_bytes(other)
        with pytest.raises(DamagedFileError, match=f"has {len(other)} bytes, but {len(content)} were written"):
            index_of(path, content, method)
        with pytest.raises(DamagedFileError, match=f"has {len(other)} bytes, but {len(content)} were written"):
            _core.scrub(str(path), written.n_bytes, written.checksums)


def test_checksums_that_do_not_match_a_file_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    written = _core.write_arrays(str(path), entries(arrays()))
    index = _core.Index()
    file = index.add_file(str(path))
    for n_bytes, checksums in (
        (written.n_bytes, written.checksums[:-4]),
        (written.n_bytes, written.checksums[:-1]),
        (1, written.checksums),
    ):
        with pytest.raises(ArgumentError, match="checksums"):
            index.set_checksums(file, n_bytes, 0, 0, checksums)
    index.file_bytes(file)
    with pytest.raises(ArgumentError, match="already open"):
        index.set_checksums(file, written.n_bytes, written.header_bytes, written.header_checksum, written.checksums)


# -- snapshots


def test_a_snapshot_keeps_the_content_of_the_arrays(tmp_path: Path) -> None:
    pool = _core.SnapshotPool()
    tensors = arrays() | {"strided": arrays()["other"][:, ::3]}
    written = _core.write_arrays(str(tmp_path / "a"), entries(tensors), metadata={"format": "pt"})
    snapshot = pool.take(entries(tensors), metadata={"format": "pt"})
    for array in tensors.values():
        array[...] = 0
    taken = snapshot.write(str(tmp_path / "b"))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (taken.n_bytes, taken.checksums) == (written.n_bytes, written.checksums)
    assert pool.free_bytes == 0
    snapshot.close()
    assert pool.free_bytes >= written.n_bytes
    with pytest.raises(ArgumentError, match="closed"):
        snapshot.write(str(tmp_path / "c"))
    del snapshot
    assert pool.take(entries(arrays())).n_bytes < written.n_bytes
    small = _core.SnapshotPool(max_free_bytes=0)
    small.take(entries(arrays())).close()
    assert small.free_bytes == 0


def test_a_child_process_can_neither_write_nor_damage_a_snapshot(tmp_path: Path) -> None:
    pool = _core.SnapshotPool()
    snapshot = pool.take(entries(arrays()))
    pid = os.fork()
    if pid == 0:
        try:
            snapshot.write(str(tmp_path / "child"))
        except ArgumentError as error:
            snapshot.close()
            os._exit(7 if "the parent of this process" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert snapshot.write(str(tmp_path / "parent")).n_bytes == snapshot.n_bytes
