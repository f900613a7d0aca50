"""HTTP/1.1 by hand, for servers that must be able to misbehave: connections, requests, replies."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from servers.ports import HOST

KEEPALIVE_S = 5.0  # uvicorn's default, which vLLM keeps
JSON = "application/json"
_MAX_HEAD_BYTES = 64 * 1024
_STOP_S = 5.0


@dataclass(frozen=True, slots=True)
class HttpRequest:
    method: str
    path: str
    headers: Mapping[str, str]  # names in lower case
    body: bytes
    received_ns: int  # first byte


class HangUp(Exception):  # noqa: N818  -- control flow: this connection ends here
    pass


class Link:
    """One client connection: HTTP/1.1 with keep-alive, written by hand."""

    def __init__(self, sock: socket.socket, stopping: threading.Event) -> None:
        self._sock, self._stopping = sock, stopping

    def read(self, *, keepalive_s: float) -> HttpRequest | None:
        """The next request; None when the client left or stayed idle for ``keepalive_s``."""
        self._sock.settimeout(keepalive_s)
        try:
            head = self._sock.recv(65536)
        except TimeoutError:
            return None
        received_ns = time.perf_counter_ns()
        self._sock.settimeout(_STOP_S)
        while b"\r\n\r\n" not in head:
            more = self._sock.recv(65536)
            if not more or len(head) > _MAX_HEAD_BYTES:
                return None
            head += more
        head, _, body = head.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {k.strip().lower(): v.strip() for k, _, v in (li.partition(":") for li in lines)}
        missing = int(headers.get("content-length", "0")) - len(body)
        pieces = [body]
        while missing > 0 and (piece := self._sock.recv(min(missing, 2**20))):
            pieces.append(piece)
            missing -= len(piece)
        self._sock.settimeout(None)
        method, path, _ = first.split(" ")
        return HttpRequest(method, path, headers, b"".join(pieces), received_ns)

    def reply(
        self, status: int, body: bytes, content_type: str, headers: Mapping[str, str] | None = None
    ) -> None:
        """One whole answer."""
        lines = [f"HTTP/1.1 {status} Scripted", f"content-type: {content_type}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        lines += [f"content-length: {len(body)}", "", ""]
        self._sock.sendall("\r\n".join(lines).encode() + body)

    def reply_json(self, body: object, *, status: int = 200) -> None:
        """One whole answer of JSON."""
        self.reply(status, json.dumps(body).encode(), JSON)

    def start_stream(self, content_type: str, response_id: str) -> None:
        """The head of a chunked answer, sent before anything is generated, as uvicorn does."""
        self._sock.sendall(
            f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\n"
            f"x-request-id: {response_id}\r\ntransfer-encoding: chunked\r\n\r\n".encode()
        )

    def chunk(self, payload: bytes) -> None:
        """One HTTP chunk in one write."""
        if payload:
            self._sock.sendall(b"%x\r\n%b\r\n" % (len(payload), payload))

    def end_stream(self) -> None:
        """The clean end of the chunked body."""
        self._sock.sendall(b"0\r\n\r\n")

    def wait(self, wait_ms: float) -> None:
        """Wait, but no longer than the server lives."""
        if wait_ms > 0 and self._stopping.wait(wait_ms / 1000):
            raise HangUp

    def wait_for_client_to_leave(self) -> None:
        """Return when the client closes its end, or the server stops."""
        self._sock.recv(1)


class Listener:
    """One port: accepts, and gives each connection a thread that calls ``answer`` per request."""

    def __init__(
        self,
        port: int,
        answer: Callable[[Link, HttpRequest], None],
        faults: Mapping[str, Any],
    ) -> None:
        self._answer = answer
        self._accept_delay_ms = float(faults.get("accept_delay_ms", 0))
        self._keepalive_s = float(faults.get("keepalive_s", KEEPALIVE_S))
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((HOST, port))
            self._socket.listen(512)
        except OSError:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name=f"fake-{self.port}", daemon=True)

    @property
    def n_open(self) -> int:
        """Connections open now."""
        with self._lock:
            return len(self._open)

    def start(self) -> None:
        """Accept from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Close everything; returns when the threads are gone (at most ``_STOP_S`` each)."""
        self._stopping.set()
        # Linux wakes a blocked accept() on shutdown; other systems say ENOTCONN and wake on close.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            links = list(self._open.items())
        for sock, _ in links:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in (self._thread, *(thread for _, thread in links)):
            if thread.ident is not None:
                thread.join(_STOP_S)

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                sock, _ = self._socket.accept()
            except OSError:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            thread = threading.Thread(target=self._serve, args=(sock,), daemon=True)
            with self._lock:
                self._open[sock] = thread
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        link = Link(sock, self._stopping)
        try:
            link.wait(self._accept_delay_ms)
            while request := link.read(keepalive_s=self._keepalive_s):
                self._answer(link, request)
        except HangUp:
            # Unsent bytes must still arrive: an orderly FIN, not a reset.
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the client left, or the server is stopping
        finally:
            with self._lock:
                self._open.pop(sock, None)
            sock.close()
