"""What is read of a bucket of a real S3 server and kept in a folder: fetched once for a host, checked, bounded."""

from __future__ import annotations

import fcntl
import itertools
import os
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner
from tests.helpers.small_saves import fork
from tests.servers.proxy import Fault, Proxy, before_server
from tests.servers.s3 import BUCKET

import reshard
from reshard.cli import main
from reshard.errors import ArgumentError, StorageError
from reshard.storage.remote import use_cache

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.servers.s3 import S3Server

_numbers = itertools.count()
_BLOCK = 4 << 20


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, s3: S3Server) -> Iterator[Path]:
    use_cache(tmp_path / "cache", "1GB")
    yield tmp_path / "cache"
    use_cache(None)


@pytest.fixture
def proxy(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with before_server(s3.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


@pytest.fixture
def file(s3: S3Server, tmp_path: Path) -> tuple[str, dict[str, np.ndarray]]:
    """The URL of a file of 21 MB, and what is in it."""
    rng = np.random.default_rng(7)
    tensors = {f"w{i}": rng.integers(0, 256, (3000, 1400), np.uint8) for i in range(5)}
    reshard.save_file(tensors, tmp_path / "m.safetensors")
    key = f"cache-{os.getpid()}-{next(_numbers)}/m.safetensors"
    s3.put(key, (tmp_path / "m.safetensors").read_bytes())
    return f"s3://{BUCKET}/{key}", tensors


def check(url: str, expected: dict[str, np.ndarray]) -> None:
    found = reshard.load_file(url)
    assert found.keys() == expected.keys()
    for key, one in expected.items():
        np.testing.assert_array_equal(found[key], one)


def fetched(proxy: Proxy) -> int:
    n = proxy.fetched_bytes(".safetensors")
    proxy.log.clear()
    return n


def blocks(cache: Path) -> list[Path]:
    return sorted((one for one in cache.glob("*/*") if one.name.isdigit()), key=lambda one: int(one.name))


def kept(cache: Path) -> int:
    """Bytes of all blocks."""
    return sum(one.stat().st_size for one in blocks(cache))


def test_what_was_read_is_not_fetched_again(proxy: Proxy, file: Any, cache: Path, tmp_path: Path) -> None:
    url, tensors = file
    size = (tmp_path / "m.safetensors").stat().st_size
    check(url, tensors)
    assert fetched(proxy) == size
    check(url, tensors)
    assert fetched(proxy) == 0
    with reshard.open(url) as opened:
        np.testing.assert_array_equal(opened.read("w3", (slice(5, 6), slice(7, 900, 3))), tensors["w3"][5:6, 7:900:3])
    assert fetched(proxy) == 0
    assert len(blocks(cache)) == -(-size // _BLOCK)


def test_a_part_fetches_its_blocks(proxy: Proxy, file: Any) -> None:
    url, tensors = file
    with reshard.open(url) as opened:
        np.testing.assert_array_equal(opened.read("w2"), tensors["w2"])
    assert fetched(proxy) <= 3 * _BLOCK
    check(url, tensors)
    assert fetched(proxy) <= 4 * _BLOCK


@pytest.mark.slow(disk=False)
def test_processes_of_a_host_fetch_each_byte_once(proxy: Proxy, file: Any, tmp_path: Path) -> None:
    url, tensors = file

    def load() -> bool:
        check(url, tensors)
        return True

    children = [fork(load) for _ in range(4)]
    assert [child.result(120) for child in children] == [True] * 4
    assert fetched(proxy) == (tmp_path / "m.safetensors").stat().st_size


def test_a_fork_does_not_keep_others_from_what_was_not_fetched(proxy: Proxy, file: Any) -> None:
    """A process that is forked while a block is fetched shares the lock of the block, and may run for days."""
    url, tensors = file
    forks: list[Any] = []

    def is_fetch(method: str, path: str) -> bool:
        return method == "GET" and path.endswith("/m.safetensors")

    def fork_once(method: str, path: str) -> None:
        with proxy.lock:
            if is_fetch(method, path) and not forks:
                forks.append(fork(signal.pause))

    def load() -> bool:
        check(url, tensors)
        return True

    proxy.before = fork_once
    proxy.faults = [Fault(is_fetch, 403, "AccessDenied", times=99)]
    try:
        with pytest.raises(StorageError, match="AccessDenied"):
            reshard.load_file(url)
        assert len(forks) == 1
        proxy.faults = []
        assert fork(load).result(60) is True
    finally:
        for one in forks:
            os.kill(one.pid, signal.SIGKILL)
            assert one.result() is None


@pytest.mark.parametrize("damage", ["a byte", "cut off", "empty"])
def test_a_damaged_block_is_fetched_again(proxy: Proxy, file: Any, cache: Path, damage: str) -> None:
    url, tensors = file
    check(url, tensors)
    fetched(proxy)
    block = blocks(cache)[2]
    content = block.read_bytes()
    middle = len(content) // 2
    damaged = {"a byte": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
               "cut off": content[:middle], "empty": b""}[damage]  # fmt: skip
    block.write_bytes(damaged)
    check(url, tensors)
    assert fetched(proxy) == _BLOCK
    assert block.read_bytes() == content
    check(url, tensors)
    assert fetched(proxy) == 0


def test_another_version_is_fetched(proxy: Proxy, s3: S3Server, file: Any, tmp_path: Path) -> None:
    url, tensors = file
    check(url, tensors)
    other = {key: one ^ 1 for key, one in tensors.items()}
    reshard.save_file(other, tmp_path / "other.safetensors")
    s3.put(url.removeprefix(f"s3://{BUCKET}/"), (tmp_path / "other.safetensors").read_bytes())
    check(url, other)


@pytest.mark.slow(disk=False)
def test_the_folder_is_bounded(file: Any, cache: Path) -> None:
    url, tensors = file
    use_cache(cache, "9MB")
    for _ in range(2):
        check(url, tensors)
        assert 0 < kept(cache) <= 9_000_000
    (cache / "notes").mkdir()
    (cache / "notes/1").write_text("of a user")
    check(url, tensors)
    assert (cache / "notes/1").read_text() == "of a user"


@pytest.mark.slow(disk=False)
def test_what_is_written_while_another_process_removes_counts(file: Any, cache: Path, s3: S3Server) -> None:
    url, tensors = file
    use_cache(cache, "9MB")
    with (cache / ".sweep").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        check(url, tensors)
        assert kept(cache) > 20_000_000
    small = url.replace("m.safetensors", "small.safetensors")
    reshard.save_file({"w": np.ones(1000)}, cache.with_name("small.safetensors"))
    s3.put(small.removeprefix(f"s3://{BUCKET}/"), cache.with_name("small.safetensors").read_bytes())
    check(small, {"w": np.ones(1000)})
    assert 0 < kept(cache) <= 9_000_000


def test_without_room_nothing_is_kept(proxy: Proxy, file: Any, cache: Path) -> None:
    url, tensors = file
    cache.rmdir()
    cache.write_text("a file in its place")
    check(url, tensors)
    assert fetched(proxy) > 0


@pytest.mark.slow(disk=False)
def test_a_root_is_loaded_through_the_cache(proxy: Proxy, s3: S3Server, cache: Path) -> None:
    url = f"s3://{BUCKET}/cache-{os.getpid()}-{next(_numbers)}"
    for iteration in (1, 2):
        reshard.save(url, iteration, {"w": np.full(1_000_000, iteration)})
        assert reshard.load(url).state["w"][0] == iteration
    fetched(proxy)
    assert reshard.load(url).iteration == 2
    assert fetched(proxy) == 0
    reshard.save(url, 2, {"w": np.full(1_000_000, 7)})
    assert reshard.load(url).state["w"][0] == 7
    use_cache(None)
    result = CliRunner().invoke(main, ["--cache", str(cache), "verify", url])
    assert result.exit_code == 0, result.output
    fetched(proxy)
    result = CliRunner().invoke(main, ["--cache", str(cache), "--cache-size", "1GB", "verify", url])
    assert result.exit_code == 0, result.output
    assert fetched(proxy) == 0


def test_options_of_a_bucket(proxy: Proxy, file: Any, tmp_path: Path) -> None:
    use_cache(None)
    url, tensors = file

    def load() -> int:
        options = reshard.BucketOptions(cache=tmp_path / "other", cache_size="1GB")
        place = reshard.locate(url, options)
        before = fetched(proxy)
        for _ in range(2):
            assert reshard.load_file(place).keys() == tensors.keys()
        return before

    assert fork(load).result(60) is not None
    assert len(blocks(tmp_path / "other")) > 4
    with pytest.raises(ArgumentError, match="much"):
        reshard.BucketOptions(cache=tmp_path, cache_size="much")
