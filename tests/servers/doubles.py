"""Doubles of Google Cloud Storage (its XML API), of Azure Blob Storage and of a server of files.

No package has an emulator of the first two that honours conditions, so that these answer as the documentation of the
services says: ranges, `If-Match`, lists with pages, objects that must be new, uploads in parts, removals. Signatures
are not checked. The server of files is only read.
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
from typing import TYPE_CHECKING, Literal, NamedTuple
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Iterator
    from email.message import Message
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
        uploads: parts of unfinished uploads by name and ID; Azure has one for each name.
        answers: what a bucket of Google answers to a query instead, by the name of the query: "uploads", "lifecycle".
        sends_etag: whether answers have an ETag.
        sends_ranges: whether ranges are honoured.
        weakens: whether ETags are weak: as conditions they never hold.
    """

    endpoint: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    log: list[tuple[str, str, str | None]] = field(default_factory=list)
    uploads: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    answers: dict[str, bytes] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    sends_etag: bool = True
    sends_ranges: bool = True
    weakens: bool = False

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

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
                self._answer(*_of_bucket(double, kind, query), {"Content-Type": "application/xml"})
                return
            elif "uploadId" in query or query.get("comp") == "blocklist":
                self._answer(200, _parts(double, name, query).encode(), {"Content-Type": "application/xml"})
                return
            self._send(double.objects.get(name), wanted if double.sends_ranges else None)

        def _send(self, data: bytes | None, wanted: str | None) -> None:
            if data is None:
                code = "BlobNotFound" if kind == "azure" else "NoSuchKey"
                self._answer(404, f"<Error><Code>{code}</Code></Error>".encode(), {"x-ms-error-code": code})
                return
            headers = {"Last-Modified": formatdate(1.7e9, usegmt=True)}
            e_tag = _e_tag(data)
            if double.sends_etag:
                headers["ETag"] = f"W/{e_tag}" if double.weakens else e_tag
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

        def _change(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            double.log.append((self.command, self.path, None))
            url = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
            path = urllib.parse.unquote(url.path).lstrip("/")
            path = path.removeprefix("devstoreaccount1/")
            container, _, name = path.partition("/")
            if container != _CONTAINER:
                code = "NoSuchBucket" if kind == "google" else "ContainerNotFound"
                self._answer(404, f"<Error><Code>{code}</Code></Error>".encode(), {"x-ms-error-code": code})
                return
            with double.lock:
                change = _google_change if kind == "google" else _azure_change
                status, answer, headers = change(double, _Request(self.command, name, query, body, self.headers))
            self._answer(status, answer, headers)

        do_GET = do_HEAD = _look  # noqa: N815  names of the base class
        if kind != "files":
            do_PUT = do_POST = do_DELETE = _change  # noqa: N815

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """A client that closes a connection is no error."""

    server = Server(("127.0.0.1", 0), Handler)
    double.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))  # it looks so often whether it shall end
    thread.start()
    try:
        yield double
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


_Answer = tuple[int, bytes, dict[str, str]]


class _Request(NamedTuple):
    method: str
    name: str
    query: dict[str, str]
    body: bytes
    headers: Message


def _e_tag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


def _failed(status: int, code: str) -> _Answer:
    return status, f"<Error><Code>{code}</Code></Error>".encode(), {"x-ms-error-code": code}


def _google_change(double: Double, one: _Request) -> _Answer:
    method, name, query, body, headers = one
    upload = (name, query.get("uploadId", ""))
    if method == "DELETE":
        found = double.uploads.pop(upload, None) if upload[1] else double.objects.pop(name, None)
        return _failed(404, "NoSuchUpload" if upload[1] else "NoSuchKey") if found is None else (204, b"", {})
    if "uploads" in query:
        upload = (name, f"upload-{len(double.log)}")
        double.uploads[upload] = {}
        return (
            200,
            f"<InitiateMultipartUploadResult><UploadId>{upload[1]}</UploadId></InitiateMultipartUploadResult>".encode(),
            {},
        )
    if upload[1] and upload not in double.uploads:
        return _failed(404, "NoSuchUpload")
    if method == "POST":
        parts = double.uploads.pop(upload)
        wanted = re.findall(r"<PartNumber>(\d+)</PartNumber>", body.decode())
        double.objects[name] = b"".join(parts[number] for number in wanted)
        e_tag = escape(_e_tag(double.objects[name]))
        return 200, f"<CompleteMultipartUploadResult><ETag>{e_tag}</ETag></CompleteMultipartUploadResult>".encode(), {}
    if upload[1]:
        double.uploads[upload][query["partNumber"]] = body
    elif headers.get("x-goog-if-generation-match") == "0" and name in double.objects:
        return _failed(412, "PreconditionFailed")
    else:
        double.objects[name] = body
    return 200, b"", {"ETag": _e_tag(body)}


def _azure_change(double: Double, one: _Request) -> _Answer:
    method, name, query, body, headers = one
    if query.get("comp") == "batch":
        boundary = re.search(r"boundary=(\S+)", headers["Content-Type"])
        assert boundary is not None
        answer = ""
        for number, path in enumerate(re.findall(r"^DELETE (\S+) HTTP", body.decode(), re.MULTILINE)):
            blob = urllib.parse.unquote(path.partition("?")[0]).lstrip("/").removeprefix("devstoreaccount1/")
            found = double.objects.pop(blob.removeprefix(f"{_CONTAINER}/"), None)
            status = "404 The specified blob does not exist." if found is None else "202 Accepted"
            answer += f"--{boundary[1]}\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\n"
            answer += f"HTTP/1.1 {status}\r\nx-ms-version: 2019\r\n\r\n"
        answer += f"--{boundary[1]}--\r\n"
        return 202, answer.encode(), {"Content-Type": f"multipart/mixed; boundary={boundary[1]}"}
    assert method == "PUT", method
    blocks = double.uploads.setdefault((name, ""), {})
    if query.get("comp") == "block":
        blocks[query["blockid"]] = body
        return 201, b"", {"ETag": _e_tag(body)}
    if query.get("comp") == "blocklist":
        wanted = re.findall(r"<Uncommitted>(.*?)</Uncommitted>", body.decode())
        if not all(one in blocks for one in wanted):
            return _failed(400, "InvalidBlockList")
        body = b"".join(blocks[one] for one in wanted)
    elif headers.get("If-None-Match") == "*" and name in double.objects:
        return _failed(409, "BlobAlreadyExists")
    del double.uploads[name, ""]
    double.objects[name] = body
    return 201, b"", {"ETag": _e_tag(body)}


def _of_bucket(double: Double, kind: Kind, query: dict[str, str]) -> tuple[int, bytes]:
    """The answer to a question about the bucket: a list of objects, of uploads, or of rules."""
    if kind == "azure":
        return 200, _azure_list(double, query).encode()
    for name, answer in double.answers.items():
        if name in query:
            return 200, answer
    if "lifecycle" in query:
        return 404, b"<Error><Code>NoSuchLifecycleConfiguration</Code></Error>"
    if "uploads" in query:
        uploads = [
            f"<Upload><Key>{escape(key)}</Key><UploadId>{escape(upload_id)}</UploadId></Upload>"
            for key, upload_id in double.uploads
            if key.startswith(query.get("prefix", ""))
        ]
        return 200, f"<ListMultipartUploadsResult>{''.join(uploads)}</ListMultipartUploadsResult>".encode()
    return 200, _google_list(double, query).encode()


def _parts(double: Double, name: str, query: dict[str, str]) -> str:
    """The parts of an upload, or the blocks of a blob that was not completed."""
    parts = double.uploads[name, query.get("uploadId", "")].values()
    if "comp" in query:
        blocks = "".join(f"<Block><Size>{len(part)}</Size></Block>" for part in parts)
        return f"<BlockList><UncommittedBlocks>{blocks}</UncommittedBlocks></BlockList>"
    return f"<ListPartsResult>{''.join(f'<Part><Size>{len(part)}</Size></Part>' for part in parts)}</ListPartsResult>"


def _page(double: Double, query: dict[str, str], limit: str, token: str) -> tuple[list[tuple[str, int | None]], str]:
    """Names and sizes of a page, None for a folder, and the token of the next page."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
    found: dict[str, int | None] = {}
    # A blob of which only blocks exist is listed on request.
    unfinished = {name: b"" for name, _ in double.uploads} if query.get("include") == "uncommittedblobs" else {}
    for name, data in sorted((unfinished | double.objects).items()):
        if name.startswith(prefix):
            rest = name[len(prefix) :]
            if delimiter and delimiter in rest:
                found[prefix + rest.partition(delimiter)[0] + delimiter] = None
            else:
                found[name] = len(data)
    start = query.get("start-after") or query.get("startFrom", "")
    entries = [one for one in sorted(found.items()) if one[0] >= start and one[0] > query.get(token, "")]
    if entries and entries[0][0] == query.get("start-after"):  # that of Azure is listed
        del entries[0]
    size = min(_PAGE, int(query.get(limit, _PAGE)))
    return entries[:size], entries[size - 1][0] if len(entries) > size else ""


def _google_list(double: Double, query: dict[str, str]) -> str:
    entries, token = _page(double, query, "max-keys", "continuation-token")
    items = [
        f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
        if size is None
        else f"<Contents><Key>{escape(name)}</Key><Size>{size}</Size>"
        f"<ETag>{escape(_e_tag(double.objects[name]))}</ETag>"
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
        else f"<Blob><Name>{escape(name)}</Name><Properties><Content-Length>{size}</Content-Length>"
        f"<Etag>{escape(_e_tag(double.objects.get(name, b'')))}</Etag>"
        f"<Last-Modified>{formatdate(1.7e9, usegmt=True)}</Last-Modified><ResourceType>file</ResourceType>"
        "<Content-Type>application/octet-stream</Content-Type></Properties></Blob>"
        for name, size in entries
    ]
    return (
        "<?xml version='1.0' encoding='utf-8'?><EnumerationResults>"
        f"<Blobs>{''.join(items)}</Blobs><NextMarker>{escape(token)}</NextMarker></EnumerationResults>"
    )
