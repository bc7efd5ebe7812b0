"""Buckets behind TLS with a private authority, and behind a proxy."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import ssl
import subprocess
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.servers.proxy import Proxy, before_server
from tests.servers.s3 import BUCKET

import reshard
from reshard.errors import ArgumentError, ReshardError, StorageError
from reshard.storage import remote

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.servers.s3 import S3Server

pytestmark = [
    pytest.mark.skipif(not remote.is_available(), reason="the core was compiled without the feature `remote`"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl"),
]

_numbers = itertools.count()
_OF_PROXIES = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY")


def openssl(folder: Path, command: str) -> None:
    subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `ca.pem` of an authority, and with what it has signed for `localhost`: `host.pem`, `host.key`."""
    folder = tmp_path_factory.mktemp("authority")
    key = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
    openssl(folder, f"req -x509 {key} -keyout ca.key -out ca.pem -days 30 -subj /CN=private")
    openssl(folder, f"req {key} -keyout host.key -out host.csr -subj /CN=localhost")
    (folder / "names").write_text("subjectAltName=DNS:localhost\nbasicConstraints=CA:FALSE\n")
    openssl(folder, "x509 -req -in host.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out host.pem -extfile names")
    return folder


@pytest.fixture
def behind_tls(s3: S3Server, authority: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority / "host.pem", authority / "host.key")
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR", *_OF_PROXIES, *map(str.lower, _OF_PROXIES), "AWS_ALLOW_HTTP"):
        monkeypatch.delenv(name, raising=False)
    with before_server(s3.port, context) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


def save_and_load() -> None:
    url = f"s3://{BUCKET}/tls-{os.getpid()}-{next(_numbers)}/w.safetensors"
    reshard.save_file({"w": np.arange(4.0)}, url)
    assert reshard.load_file(url)["w"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "AWS_CA_BUNDLE"])
def test_a_private_authority_is_trusted(
    behind_tls: Proxy, authority: Path, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, str(authority / "ca.pem"))
    save_and_load()
    assert behind_tls.log


def test_what_is_not_trusted_is_said_at_once(
    behind_tls: Proxy, s3: S3Server, authority: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without another try, which would end alike."""

    def error() -> ReshardError:
        with pytest.raises(ReshardError) as caught:
            save_and_load()
        assert "tried" not in caught.value.message
        return caught.value

    host = behind_tls.endpoint.removeprefix("https://")
    found = error()
    assert f"the certificate of {host} is signed by an authority that is not trusted here" in found.message
    assert "set SSL_CERT_FILE to a file with the certificate of that authority in PEM" in str(found.hint)
    assert "AWS_CA_BUNDLE" in str(found.hint)
    monkeypatch.setenv("SSL_CERT_FILE", "/none.pem")
    assert "SSL_CERT_FILE is `/none.pem`: let it name a file" in str(error().hint)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authority / "ca.pem"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", behind_tls.endpoint.replace("localhost", "127.0.0.1"))
    found = error()
    assert f"the certificate of {host.replace('localhost', '127.0.0.1')} is for another name" in found.message
    assert "write a name of the certificate in AWS_ENDPOINT_URL" in str(found.hint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://127.0.0.1:{s3.port}")
    found = error()
    assert f"127.0.0.1:{s3.port} does not answer with TLS" in found.message
    assert "a service without TLS needs http:// there" in str(found.hint)
    for name, what in (("none.pem", "which cannot be read"), ("text", "which has no certificate")):
        (tmp_path / "text").write_text("no certificate")
        monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / name))
        found = error()
        assert isinstance(found, ArgumentError)
        assert f"AWS_CA_BUNDLE names `{tmp_path / name}`, {what}" in found.message


@pytest.mark.usefixtures("s3")
def test_without_tls_no_authority_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "none.pem"))
    save_and_load()


@contextlib.contextmanager
def tunnels(refusal: str | None = None) -> Iterator[tuple[str, list[str]]]:
    """A proxy that makes tunnels to this host: its URL, and the first line of each request.

    Args:
        refusal: the status with which it refuses all requests instead.
    """
    lines: list[str] = []

    def pass_on(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def serve(client: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            head += client.recv(4096)
        lines.append(head.split(b"\r\n")[0].decode())
        if refusal is not None:
            client.sendall(f"HTTP/1.1 {refusal}\r\nContent-Length: 0\r\n\r\n".encode())
            client.close()
            return
        port = int(lines[-1].split()[1].rpartition(":")[2])
        with client, socket.create_connection(("127.0.0.1", port)) as server:
            client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            back = threading.Thread(target=pass_on, args=(server, client), daemon=True)
            back.start()
            pass_on(client, server)
            back.join()

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", lines
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_requests_go_through_the_proxy_of_the_environment(
    behind_tls: Proxy, authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authority / "ca.pem"))
    with tunnels() as (url, lines):
        monkeypatch.setenv("HTTPS_PROXY", url)
        save_and_load()
        host = behind_tls.endpoint.removeprefix("https://")
        assert set(lines) == {f"CONNECT {host} HTTP/1.1"}


def test_a_proxy_that_cannot_be_reached_is_named(behind_tls: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    for retry_s in (0.3, 3, 30):  # until a second try is not too late
        options = reshard.BucketOptions(retry_s=retry_s)
        with pytest.raises(StorageError, match="cannot be reached") as caught:
            reshard.open(reshard.locate(f"s3://proxy-{os.getpid()}-{next(_numbers)}/w.safetensors", options))
        if "tried" in caught.value.message:
            break
    assert "and the proxy that HTTPS_PROXY names" in str(caught.value.hint)
    assert "tried" in caught.value.message
    assert not behind_tls.log


@pytest.mark.parametrize("scheme", ["https", "http"])
def test_a_proxy_that_requires_a_name_is_named_at_once_without_its_password(
    behind_tls: Proxy, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    with tunnels("407 Proxy Authentication Required") as (url, lines):
        place, variable = url.removeprefix("http://"), f"{scheme.upper()}_PROXY"
        monkeypatch.setenv(variable, f"http://me:secret@{place}")
        options = reshard.BucketOptions(endpoint=f"{scheme}://service.invalid", allow_http=True, retry_s=30)
        folder = reshard.locate(f"s3://proxy-{os.getpid()}-{next(_numbers)}", options)
        with pytest.raises(StorageError, match=rf"the proxy {place}, which {variable} names, requires") as caught:
            reshard.open(folder / "w.safetensors")
        assert f"in {variable}, as http://NAME:PASSWORD@{place}" in str(caught.value.hint)
        with pytest.raises(StorageError, match="requires a name"):
            (folder / "new").create(b"claim")
        assert len(lines) == 2, "it is not tried again"
    assert "secret" not in f"{caught.value} {caught.value.hint}"
    assert not behind_tls.log


def test_a_proxy_that_refuses_a_connection_is_named(behind_tls: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    with tunnels("403 Forbidden") as (url, lines):
        monkeypatch.setenv("HTTPS_PROXY", url)
        place = url.removeprefix("http://")
        folder = reshard.locate(f"s3://proxy-{os.getpid()}-{next(_numbers)}", reshard.BucketOptions(retry_s=0.3))
        with pytest.raises(StorageError, match=f"the proxy {place}, which HTTPS_PROXY names, makes no") as caught:
            reshard.open(folder / "w.safetensors")
        assert lines
    assert "answers 403" in str(caught.value.hint)
    assert "NO_PROXY" in str(caught.value.hint)
    assert not behind_tls.log
