"""Doubles of Google Cloud Storage (its XML API), of Azure Blob Storage and of a server of files, for reading.

No package has an emulator of the first two that honours conditions, so that these answer as the documentation of the
services says: ranges, `If-Match`, lists with pages. Signatures are not checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
import urllib.parse
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Literal
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Kind = Literal["google", "azure", "files"]
_PAGE = 3  # entries of a list; small, so that tests see several pages
_CONTAINER = "weights"


@dataclass
class Double:
    """A running double.

    Attributes:
        endpoint: its URL.
        objects: contents by name.
        log: method, path with query, and range of each request.
        sends_etag: whether answers have an ETag.
        sends_ranges: whether ranges are honoured.
    """

    endpoint: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    log: list[tuple[str, str, str | None]] = field(default_factory=list)
    sends_etag: bool = True
    sends_ranges: bool = True

    def upload(self, folder: Path, prefix: str) -> None:
        """Store all files of a folder."""
        for file in folder.rglob("*"):
            if file.is_file():
                self.objects[f"{prefix}/{file.relative_to(folder)}"] = file.read_bytes()


@contextlib.contextmanager
def running(kind: Kind) -> Iterator[Double]:
    """Run a double with the bucket or container `weights`."""
    double = Double()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def _look(self) -> None:
            wanted = self.headers.get("x-ms-range") or self.headers.get("Range")
            double.log.append((self.command, self.path, wanted))
            url = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
            path = urllib.parse.unquote(url.path).lstrip("/")
            if kind == "azure":
                path = path.removeprefix("devstoreaccount1/")
            container, _, name = path.partition("/")
            if kind == "files":
                name = path
            elif container != _CONTAINER:
                code = "NoSuchBucket" if kind == "google" else "ContainerNotFound"
                self._answer(404, f"<Error><Code>{code}</Code></Error>".encode(), {})
                return
            elif not name:
                body = _google_list(double, query) if kind == "google" else _azure_list(double, query)
                self._answer(200, body.encode(), {"Content-Type": "application/xml"})
                return
            self._send(double.objects.get(name), wanted if double.sends_ranges else None)

        def _send(self, data: bytes | None, wanted: str | None) -> None:
            if data is None:
                code = "BlobNotFound" if kind == "azure" else "NoSuchKey"
                self._answer(404, f"<Error><Code>{code}</Code></Error>".encode(), {"x-ms-error-code": code})
                return
            headers = {"Last-Modified": formatdate(1.7e9, usegmt=True)}
            e_tag = f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
            if double.sends_etag:
                headers["ETag"] = e_tag
            if self.headers.get("If-Match", e_tag) not in (e_tag, "*") and double.sends_etag:
                self._answer(412, b"", {})
                return
            if wanted is None:
                self._answer(200, data, headers)
                return
            found = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted)
            assert found is not None, wanted
            first, last = int(found[1]), min(int(found[2] or len(data)), len(data) - 1)
            if first >= len(data):
                self._answer(416, b"<Error><Code>InvalidRange</Code></Error>", {})
                return
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            self._answer(206, data[first : last + 1], headers)

        do_GET = do_HEAD = _look  # noqa: N815  names of the base class

    class Server(ThreadingHTTPServer):
        daemon_threads = True

    server = Server(("127.0.0.1", 0), Handler)
    double.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield double
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _page(double: Double, query: dict[str, str], limit: str, token: str) -> tuple[list[tuple[str, int | None]], str]:
    """Names and sizes of a page, None for a folder, and the token of the next page."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
    found: dict[str, int | None] = {}
    for name, data in sorted(double.objects.items()):
        if name.startswith(prefix):
            rest = name[len(prefix) :]
            if delimiter and delimiter in rest:
                found[prefix + rest.partition(delimiter)[0] + delimiter] = None
            else:
                found[name] = len(data)
    entries = [one for one in sorted(found.items()) if one[0] > query.get(token, "")]
    size = min(_PAGE, int(query.get(limit, _PAGE)))
    return entries[:size], entries[size - 1][0] if len(entries) > size else ""


def _google_list(double: Double, query: dict[str, str]) -> str:
    entries, token = _page(double, query, "max-keys", "continuation-token")
    items = [
        f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
        if size is None
        else f"<Contents><Key>{escape(name)}</Key><Size>{size}</Size><ETag>&quot;1&quot;</ETag>"
        "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        for name, size in entries
    ]
    more = f"<NextContinuationToken>{escape(token)}</NextContinuationToken>" if token else ""
    return f"<?xml version='1.0' encoding='UTF-8'?><ListBucketResult>{''.join(items)}{more}</ListBucketResult>"


def _azure_list(double: Double, query: dict[str, str]) -> str:
    entries, token = _page(double, query, "maxresults", "marker")
    items = [
        f"<BlobPrefix><Name>{escape(name)}</Name></BlobPrefix>"
        if size is None
        else f"<Blob><Name>{escape(name)}</Name><Properties><Content-Length>{size}</Content-Length><Etag>1</Etag>"
        f"<Last-Modified>{formatdate(1.7e9, usegmt=True)}</Last-Modified><ResourceType>file</ResourceType>"
        "<Content-Type>application/octet-stream</Content-Type></Properties></Blob>"
        for name, size in entries
    ]
    return (
        "<?xml version='1.0' encoding='utf-8'?><EnumerationResults>"
        f"<Blobs>{''.join(items)}</Blobs><NextMarker>{escape(token)}</NextMarker></EnumerationResults>"
    )
