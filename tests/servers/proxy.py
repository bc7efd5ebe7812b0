"""A proxy before an S3 server: it counts requests and bytes, and makes faults that no real server makes on demand."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator

_BLOCK_BYTES = 1 << 18


@dataclass
class Fault:
    """What is done with requests.

    Attributes:
        matches: whether a request is one of them, by its method and path.
        status: answered instead of the server; None: the answer of the server is cut off.
        code: of the answer.
        headers: of the answer.
        times: how many requests are answered so.
        keep_bytes: of an answer that is cut off, how many bytes are sent.
        is_lost: the request is carried out, and nothing of its answer is sent.
    """

    matches: Callable[[str, str], bool]
    status: int | None = None
    code: str = "Injected"
    headers: dict[str, str] = field(default_factory=dict)
    times: int = 1
    keep_bytes: int = 0
    is_lost: bool = False


@dataclass
class Proxy:
    """A running proxy.

    Attributes:
        endpoint: its URL.
        log: method, path, range and bytes of the answer of each request.
        faults: those to come.
        before: called with method and path before a request is passed on.
        after: called with method and path once the server has answered a request.
        corrupts: whether one bit of the body of a request is changed before it is passed on.
        connections: those that are open, by the address of the client.
    """

    endpoint: str
    log: list[tuple[str, str, str | None, int]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    before: Callable[[str, str], None] | None = None
    after: Callable[[str, str], None] | None = None
    corrupts: Callable[[str, str], bool] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    connections: dict[tuple[str, int], socket.socket] = field(default_factory=dict)

    def wait_for_the_dead(self) -> None:
        """Wait until all is passed on that clients have sent which are gone."""
        deadline = time.monotonic() + 600
        with socket.create_connection(("127.0.0.1", int(self.endpoint.rpartition(":")[2]))) as last:
            address = last.getsockname()  # it is accepted after those that came before
            while address not in self.connections or self._is_one_gone():
                assert time.monotonic() < deadline
                time.sleep(0.001)

    def _is_one_gone(self) -> bool:
        """Whether a connection is open whose client has sent more, or has closed it."""
        with self.lock:
            connections = list(self.connections.values())
        for connection in connections:
            try:
                connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except OSError:
                pass
            return True
        return False

    def fetched_bytes(self, suffix: str) -> int:
        """The bytes of all answers to GET for objects with this ending."""
        with self.lock:
            return sum(n for method, path, _, n in self.log if method == "GET" and path.split("?")[0].endswith(suffix))

    def ranges(self, start: int = 0) -> dict[tuple[str, str | None], int]:
        """The bytes of each range that was asked for, from a request on: one that is late is sent a second time."""
        with self.lock:
            return {(path, range_): n_bytes for method, path, range_, n_bytes in self.log[start:] if method == "GET"}

    def take_fault(self, method: str, path: str) -> Fault | None:
        """The fault that this request meets."""
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and fault.matches(method, path):
                    fault.times -= 1
                    return fault
        return None


@contextlib.contextmanager
def before_server(port: int, tls: ssl.SSLContext | None = None) -> Iterator[Proxy]:
    """Run a proxy before the server at a port of this host, also one that speaks TLS as `localhost`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None:
            pass

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if (before := proxy.before) is not None:  # a test can end it meanwhile
                before(self.command, self.path)
            fault = proxy.take_fault(self.command, self.path)
            if fault is not None and fault.status is not None:
                self._fail(fault)
                return
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
                connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    connection.putheader(name, value)
                if body and proxy.corrupts is not None and proxy.corrupts(self.command, self.path):
                    body = body[:-1] + bytes([body[-1] ^ 1])
                connection.endheaders(body or None)
                response = connection.getresponse()
                if (after := proxy.after) is not None:
                    after(self.command, self.path)
                if fault is not None and fault.is_lost:
                    response.read()
                    self.close_connection = True
                    self.connection.close()
                else:
                    self._answer(response, fault)

        def _answer(self, response: http.client.HTTPResponse, fault: Fault | None) -> None:
            self.send_response(response.status)
            for name, value in response.getheaders():
                if name.lower() not in ("connection", "transfer-encoding", "date", "server", "content-length"):
                    self.send_header(name, value)
            length = response.getheader("Content-Length")
            data = response.read() if length is None else b""
            self.send_header("Content-Length", str(len(data)) if length is None else length)
            has_body = self.command != "HEAD"
            block = data or (response.read(_BLOCK_BYTES) if has_body else b"")
            sent, is_begun = 0, False
            while True:
                following = response.read(_BLOCK_BYTES) if has_body and fault is None else b""
                if fault is None or data:
                    sent += len(block)
                if not following:  # before the client has the end of the answer, after which a test reads the log
                    with proxy.lock:
                        proxy.log.append((self.command, self.path, self.headers.get("Range"), sent))
                if not is_begun:
                    self.end_headers()
                    is_begun = True
                if fault is not None and not data:
                    self.wfile.write(block[: fault.keep_bytes])
                    self.close_connection = True
                    self.connection.close()
                    break
                self.wfile.write(block)
                if not following:
                    break
                block = following

        def _fail(self, fault: Fault) -> None:
            body = f"<Error><Code>{fault.code}</Code><Message>as intended</Message></Error>".encode()
            self.send_response(fault.status or 500)
            for name, value in fault.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on  # noqa: N815  names of the base class

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def process_request(self, request: Any, client_address: Any) -> None:
            with proxy.lock:
                proxy.connections[client_address] = request
            super().process_request(request, client_address)

        def close_request(self, request: Any) -> None:
            with proxy.lock:
                proxy.connections = {address: one for address, one in proxy.connections.items() if one is not request}
            super().close_request(request)

        def handle_error(self, *_: object) -> None:
            """A client that closes a connection is no error."""

    server = Server(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    of = "http://127.0.0.1" if tls is None else "https://localhost"
    proxy = Proxy(f"{of}:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))  # it looks so often whether it shall end
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
