"""A real server that ignores conditions, nanio: saves into it are refused before anything is written that counts."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sysconfig
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.helpers.ports import unused_port

import reshard
from reshard.errors import UnsupportedError
from reshard.storage import remote

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_START_SECONDS = 60


@pytest.fixture
def nanio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a bucket `weights` of the server."""
    found = shutil.which("nanio") or shutil.which("nanio", path=sysconfig.get_path("scripts"))
    if found is None or not remote.is_available():
        pytest.skip("needs the server: pip install nanio")
    port = unused_port()
    (tmp_path / "data/weights").mkdir(parents=True)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in (
        ("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}"),
        ("AWS_ACCESS_KEY_ID", "test"),
        ("AWS_SECRET_ACCESS_KEY", "testsecret"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ALLOW_HTTP", "true"),
    ):
        monkeypatch.setenv(name, value)
    environment = {"PATH": os.environ["PATH"], "NANIO_ACCESS_KEY": "test", "NANIO_SECRET_KEY": "testsecret"}
    command = [found, "serve", "--data-dir", str(tmp_path / "data"), "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + _START_SECONDS
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert process.poll() is None, "the server has ended"
            assert time.monotonic() < end, "the server does not answer"
            time.sleep(0.1)
        yield tmp_path / "data/weights"
    finally:
        process.kill()
        process.wait()


def test_a_store_that_lets_several_writers_win_is_refused(nanio: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"of 8 writers that created one new object at once, [2-8] were told"):
        reshard.save("s3://weights/run", 1, {"w": np.ones(4)})
    left = [path.name for path in nanio.rglob("*") if path.is_file() and path.suffix in (".json", ".safetensors")]
    assert left == []
