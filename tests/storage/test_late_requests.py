"""A request for a range that takes much longer than others is sent a second time, and the first answer counts."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.servers.proxy import before_server

from reshard import _core
from reshard.storage import remote
from reshard.values.fetched import fetched_so_far

if TYPE_CHECKING:
    from tests.servers.s3 import S3Server

pytestmark = pytest.mark.skipif(not remote.is_available(), reason="the core was compiled without the feature `remote`")


@pytest.mark.slow(disk=False)
def test_a_request_that_hangs_is_sent_again(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.random.default_rng(0).bytes(3 << 20)
    s3.put("late/object.bin", data)
    hangs, ends, was_left = threading.Event(), threading.Event(), []

    def hang(method: str, _: str) -> None:
        if method == "GET" and not hangs.is_set():
            hangs.set()
            was_left.append(ends.wait(120))

    with before_server(s3.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        opened = _core.RemoteObject("s3://reshard/late/object.bin")
        for number in range(10):  # how long requests take is known
            opened.read(number * 300_000, 300_000)
        before = fetched_so_far()
        proxy.before = hang
        try:
            found = opened.read(100_000, 1 << 20)
            assert hangs.is_set()
            assert was_left == []  # it still hangs
        finally:
            ends.set()
    assert found == data[100_000 : 100_000 + (1 << 20)]
    fetched = fetched_so_far() - before
    assert fetched.n_requests == 2
    assert fetched.fetched_bytes >= 1 << 20
