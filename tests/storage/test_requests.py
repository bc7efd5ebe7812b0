"""How requests for ranges are planned: by how long earlier ones to the same service took."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.helpers.small_saves import fork
from tests.servers.proxy import Fault, before_server

import reshard
from reshard.storage import remote
from reshard.values.fetched import Fetched, fetched_so_far

if TYPE_CHECKING:
    from pathlib import Path

    from tests.servers.proxy import Proxy
    from tests.servers.s3 import S3Server

    from reshard.checkpoint import Checkpoint

pytestmark = pytest.mark.skipif(not remote.is_available(), reason="the core was compiled without the feature `remote`")

SMALL, BETWEEN = 300_000, 5_500_000
DELAYS_S = (
    0.15,
    1,
    5,
    25,
)  # before an answer: one after the other, until what is between takes less time, however slowly


@pytest.fixture
def url(s3: S3Server, tmp_path: Path) -> str:
    """The URL of a file with two small tensors, and a large one between them."""
    rng = np.random.default_rng(0)
    sizes = {"a": SMALL, "b": BETWEEN, "c": SMALL}
    tensors = {key: rng.integers(0, 256, n_bytes, np.uint8) for key, n_bytes in sizes.items()}
    reshard.save_file(tensors, tmp_path / "m.safetensors")
    s3.put("requests/m.safetensors", (tmp_path / "m.safetensors").read_bytes())
    return "s3://reshard/requests/m.safetensors"


def planned(opened: Checkpoint, proxy: Proxy, below: int = 1 << 62) -> tuple[int, int, Fetched]:
    """Load both small tensors: ranges and bytes of the load, and how it was planned.

    Repeated until the gap is below a number: on a machine that does other work, answers take long for some time.
    """
    end = time.monotonic() + 120
    while True:
        opened.load(keys=["c"])  # the first requests make connections
        proxy.log.clear()
        found = opened.load(keys=["a", "c"])
        assert {key: one.nbytes for key, one in found.items()} == {"a": SMALL, "c": SMALL}
        if fetched_so_far().gap_bytes < below or time.monotonic() > end:
            ranges = proxy.ranges()
            return len(ranges), sum(ranges.values()), fetched_so_far()


def load(url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, below: int = 1 << 62) -> tuple[int, int, Fetched]:
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    with reshard.open(url) as opened:
        return planned(opened, proxy, below)


@pytest.mark.slow(disk=False)
def test_a_gap_is_read_where_a_request_takes_longer(url: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with before_server(s3.port) as proxy:
        n_requests, n_bytes, near = load(url, proxy, monkeypatch, BETWEEN)
    assert near.gap_bytes < BETWEEN
    assert (n_requests, n_bytes) == (2, 2 * SMALL)
    for delay_s in DELAYS_S:
        with before_server(s3.port) as proxy:
            proxy.before = lambda *_, delay_s=delay_s: time.sleep(delay_s)
            n_requests, n_bytes, far = load(url, proxy, monkeypatch)
        if far.gap_bytes > BETWEEN:
            break
    assert far.gap_bytes > BETWEEN
    assert (n_requests, n_bytes) == (1, 2 * SMALL + BETWEEN)


@pytest.mark.slow(disk=False)
def test_a_service_that_has_too_many_requests_gets_fewer(
    url: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with before_server(s3.port) as proxy:
        _, _, before = load(url, proxy, monkeypatch)
        assert before.n_at_once == 32
        proxy.faults.append(Fault(lambda method, _: method == "GET", status=503, code="SlowDown"))
        _, _, after = load(url, proxy, monkeypatch)
    assert after.n_at_once == 16


def test_what_was_fetched_at_opening_is_not_fetched_again(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tensors = {key: np.full(5000, at, np.uint8) for at, key in enumerate("ab")}
    reshard.save_file(tensors, tmp_path / "m.safetensors")
    s3.put("requests/small.safetensors", (tmp_path / "m.safetensors").read_bytes())
    with before_server(s3.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        with reshard.open("s3://reshard/requests/small.safetensors") as opened:
            proxy.log.clear()
            found = opened.load()
        assert proxy.log == []
    assert all(np.array_equal(found[key], one) for key, one in tensors.items())


@pytest.mark.slow(disk=False)
def test_a_forked_process_measures_for_itself(url: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with before_server(s3.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        with reshard.open(url) as opened:
            near = planned(opened, proxy, BETWEEN)[2].gap_bytes
            for delay_s in DELAYS_S:
                proxy.before = lambda *_, delay_s=delay_s: time.sleep(delay_s)
                far = fork(lambda: planned(opened, proxy)[2].gap_bytes).result(600)
                if far > BETWEEN:
                    break
    assert far > BETWEEN > near


@pytest.mark.slow(disk=False)
def test_what_is_kept_in_a_folder_is_fetched_by_one_request(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    sizes = {"a": 9_000_000, "b": SMALL, "c": BETWEEN, "d": SMALL}
    tensors = {key: rng.integers(0, 256, n_bytes, np.uint8) for key, n_bytes in sizes.items()}
    reshard.save_file(tensors, tmp_path / "m.safetensors")
    s3.put("requests/kept.safetensors", (tmp_path / "m.safetensors").read_bytes())
    try:
        for delay_s in DELAYS_S:
            remote.use_cache(tmp_path / f"cache-{delay_s}", "1GB")
            with before_server(s3.port) as proxy:
                monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
                proxy.before = lambda *_, delay_s=delay_s: time.sleep(delay_s)
                with reshard.open("s3://reshard/requests/kept.safetensors") as opened:
                    proxy.log.clear()
                    found = opened.load(keys=["b", "d"])
            if fetched_so_far().gap_bytes > BETWEEN:
                break
        assert len(proxy.log) == 1
    finally:
        remote.use_cache(None)
    assert all(np.array_equal(one, tensors[key]) for key, one in found.items())
