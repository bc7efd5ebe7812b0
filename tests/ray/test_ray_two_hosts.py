"""Two hosts with a cable between them: a worker of Ray is killed, then the connection of the process that leads."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reshard

pytest.importorskip("ray", reason="pip install 'reshard[ray]'")

from tests.helpers.hosts import Host, on_two_hosts
from tests.helpers.ray_cluster import RayCluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.slow

PATIENCE_S = 120


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where Ray keeps its files: the paths of sockets are short."""
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    yield folder / "ray"
    shutil.rmtree(folder, ignore_errors=True)


def until(is_so: Callable[[], object], conversion: subprocess.Popen[str]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end, "nothing happens"
        assert conversion.poll() is None, conversion.communicate()
        time.sleep(0.002)


def test_a_worker_then_the_connection_is_killed(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left, no worker goes on, and the next conversion writes what one machine does."""
    monkeypatch.setenv("RAY_CLIENT_RECONNECT_GRACE_PERIOD", "1")
    arrays = {f"w{i}": np.random.default_rng(i).standard_normal((8192, 1024)).astype(np.float32) for i in range(8)}
    src, alone, dst = (tmp_path / f"{name}.safetensors" for name in ("src", "alone", "dst"))
    reshard.save_file(arrays, src)
    reshard.convert(src, alone)

    def act(a: Host, b: Host) -> list[Any]:
        for host in (a, b):  # a connection that is cut ends after seconds, not minutes
            subprocess.run(host.command("sh", "-c", "echo 3 > /proc/sys/net/ipv4/tcp_retries2"), check=True)
        cluster, address = RayCluster(folder), f"--node-ip-address={a.address}"
        head = ["--head", "--port=6379", "--num-cpus=0", "--include-dashboard=false", "--ray-client-server-port=10001"]
        cluster.start(*head, address, before=a.command())
        cluster.start(address, "--num-cpus=1", before=a.command())
        words = ["-m", "reshard", "convert", str(src), str(dst), "--on", f"ray://{a.address}:10001"]

        def start() -> subprocess.Popen[str]:
            environment = os.environ | {"RAY_AUTH_MODE": "disabled"}
            command = b.command(sys.executable, *words)
            return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

        conversion = start()
        until(cluster.workers, conversion)
        first = cluster.workers()[0]
        os.kill(first, signal.SIGKILL)
        until(lambda: set(cluster.workers()) - {first}, conversion)
        b.cable(plugged=False)
        _, errors = conversion.communicate(timeout=PATIENCE_S)
        failed = conversion.returncode
        end = time.monotonic() + PATIENCE_S
        while cluster.workers():
            assert time.monotonic() < end, "workers go on without the process that leads"
            time.sleep(0.01)
        left = sorted(path.name for path in tmp_path.iterdir())
        b.cable(plugged=True)
        again = start()
        said = again.communicate(timeout=PATIENCE_S)
        assert again.returncode == 0, said
        return [failed, errors, left]

    failed, errors, left = on_two_hosts(act, seconds=4 * PATIENCE_S)
    assert failed == 1, errors
    assert "does not answer any more: " in errors
    assert "Traceback" not in errors
    assert left == ["alone.safetensors", "src.safetensors"]
    assert dst.read_bytes() == alone.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "alone.safetensors",
        "dst.safetensors",
        "src.safetensors",
    ]
