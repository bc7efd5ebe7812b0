"""Files that the core writes into buckets: in parts, in bounded memory, whole or not there."""

from __future__ import annotations

import os
import re
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.servers import doubles
from tests.servers.proxy import Fault, Proxy, before_server
from tests.servers.s3 import BUCKET, SECRET

import reshard
from reshard.errors import StorageError, UnsupportedError
from reshard.storage import remote
from reshard.storage.location import Location, locate

if TYPE_CHECKING:
    from pathlib import Path

    from tests.servers.s3 import S3Server

pytestmark = pytest.mark.skipif(not remote.is_available(), reason="the core was compiled without the feature `remote`")

_PART = 16 << 20
_UPLOAD = re.compile(r"[?&](uploads|uploadId|comp=block)")


def tensors_of(n_bytes: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(n_bytes)
    n = n_bytes // 3
    return {"a": rng.integers(0, 256, n, np.uint8), "b": rng.integers(0, 256, n, np.uint8), "c": np.arange(n // 4)}


def sent(proxy: Proxy, what: str) -> int:
    return sum(re.search(what, f"{method} {path}") is not None for method, path, *_ in proxy.log)


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("n_bytes", [300, 5_000_000, 15_000_000, 30_000_000])
def test_a_file_in_a_bucket_is_byte_for_byte_that_of_a_disk(
    bucket: tuple[Location, Proxy], tmp_path: Path, n_bytes: int
) -> None:
    folder, proxy = bucket
    tensors = tensors_of(n_bytes)
    reshard.save_file(tensors, tmp_path / "w.safetensors", {"format": "np"})
    for _ in range(2):  # a second one replaces the first
        reshard.save_file(tensors, str(folder / "w.safetensors"), {"format": "np"})
        assert b"".join((folder / "w.safetensors").pieces()) == (tmp_path / "w.safetensors").read_bytes()
    total = (tmp_path / "w.safetensors").stat().st_size
    n_parts = -(-total // _PART)
    assert sent(proxy, "^PUT .*(partNumber|comp=block&)") == (0 if n_parts == 1 else 2 * n_parts)


@pytest.mark.slow(disk=False)
def test_a_part_that_fails_is_sent_again(bucket: tuple[Location, Proxy], tmp_path: Path) -> None:
    folder, proxy = bucket
    tensors = tensors_of(30_000_000)
    parts = re.compile(r"partNumber=2|comp=block&")
    proxy.faults = [
        Fault(lambda method, path: method == "PUT" and parts.search(path) is not None, 503, "SlowDown"),
        Fault(lambda method, path: method == "PUT" and parts.search(path) is not None, 500, "InternalError"),
        Fault(lambda method, path: method == "PUT" and parts.search(path) is not None, is_lost=True),
    ]
    reshard.save_file(tensors, str(folder / "w.safetensors"))
    assert [fault.times for fault in proxy.faults] == [0, 0, 0]
    reshard.save_file(tensors, tmp_path / "w.safetensors")
    assert b"".join((folder / "w.safetensors").pieces()) == (tmp_path / "w.safetensors").read_bytes()


def is_completion(method: str, path: str) -> bool:
    return (method == "POST" and "uploadId" in path) or "comp=blocklist" in path


@pytest.mark.slow(disk=False)
def test_a_completion_whose_answer_is_lost_has_happened(bucket: tuple[Location, Proxy], tmp_path: Path) -> None:
    folder, proxy = bucket
    tensors = tensors_of(30_000_000)
    reshard.save_file(tensors, tmp_path / "w.safetensors")
    proxy.faults = [Fault(is_completion, is_lost=True)]
    reshard.save_file(tensors, str(folder / "w.safetensors"))
    assert proxy.faults[0].times == 0
    assert b"".join((folder / "w.safetensors").pieces()) == (tmp_path / "w.safetensors").read_bytes()


@pytest.mark.slow(disk=False)
def test_an_upload_that_fails_is_ended_and_leaves_nothing(bucket: tuple[Location, Proxy], tmp_path: Path) -> None:
    folder, proxy = bucket
    file = folder / "w.safetensors"
    for matches in (lambda method, path: method == "PUT" and _UPLOAD.search(path) is not None, is_completion):
        proxy.log.clear()
        proxy.faults = [Fault(matches, 403, "AccessDenied", times=100)]
        with pytest.raises(StorageError, match="do not permit it \\(403 AccessDenied\\)") as caught:
            reshard.save_file(tensors_of(30_000_000), str(file))
        assert str(file) in caught.value.message
        assert "writing needs" in (caught.value.hint or "")
        assert SECRET not in repr(vars(caught.value))
        assert file.kind() is None
        if file.path.startswith(("s3", "gs")):
            assert sent(proxy, "^DELETE .*uploadId") == 1
    # What was there before stays.
    proxy.faults.clear()
    reshard.save_file({"old": np.ones(5)}, str(file))
    proxy.faults = [Fault(is_completion, 403, "AccessDenied", times=100)]
    with pytest.raises(StorageError, match="403"):
        reshard.save_file(tensors_of(30_000_000), str(file))
    assert reshard.load_file(str(file)).keys() == {"old"}


def test_unfinished_uploads_are_not_left(s3: S3Server) -> None:
    url = f"s3://{BUCKET}/left-{os.getpid()}/w.safetensors"
    with before_server(s3.port) as proxy, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        proxy.faults = [Fault(lambda _, path: "partNumber=3" in path, 403, "AccessDenied")]
        with pytest.raises(StorageError):
            reshard.save_file(tensors_of(30_000_000), url)
    status, answer = s3.request("GET", f"/{BUCKET}?uploads=")
    assert status == 200
    assert b"left-" not in answer


def test_the_store_refuses_bytes_that_changed_on_their_way(s3: S3Server) -> None:
    url = f"s3://{BUCKET}/changed-{os.getpid()}/w.safetensors"
    with before_server(s3.port) as proxy, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        for n_bytes in (1_000_000, 30_000_000):
            proxy.corrupts = lambda method, path: method == "PUT"
            with pytest.raises(StorageError):
                reshard.save_file(tensors_of(n_bytes), url)
            assert locate(url).kind() is None
            proxy.corrupts = None
    assert locate(url).kind() is None


def test_an_interrupted_upload_ends_soon(s3: S3Server) -> None:
    url, is_over = f"s3://{BUCKET}/interrupted-{os.getpid()}/w.safetensors", threading.Event()

    def interrupt(method: str, path: str) -> None:
        if "partNumber=2" in path:
            os.kill(os.getpid(), 2)
            is_over.wait(60)  # else it may be complete before the interrupt is seen

    with before_server(s3.port) as proxy, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        proxy.before = interrupt
        with pytest.raises(KeyboardInterrupt):
            reshard.save_file(tensors_of(30_000_000), url)
        proxy.before = None
        assert locate(url).kind() is None
        assert b"interrupted-" not in s3.request("GET", f"/{BUCKET}?uploads=")[1]
        is_over.set()


def test_a_file_behind_http_is_not_written() -> None:
    with doubles.running("files") as double:
        with pytest.raises(UnsupportedError, match="only read"):
            reshard.save_file({"w": np.zeros(2)}, f"{double.endpoint}/w.safetensors")
        assert double.log == []
