"""An HTTP transport whose read time-out bounds a whole answer, head and body.

httpx bounds each read, not the sum of them: a server that sends one byte at a time would hold a
request for ever.
"""

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import httpx


class Bound:
    """Shuts a connection down at a set time, unless that is cancelled."""

    def __init__(self, connection: socket.socket | None) -> None:
        self.is_late = False
        self.connection = connection  # None while there is none
        self._timer: threading.Timer | None = None

    def cut_after(self, seconds: float) -> None:
        """Cut ``seconds`` from now, in place of what was set before."""
        self.cancel()
        self._timer = threading.Timer(seconds, self.cut)
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def cut(self) -> None:
        """Cut now; what the server still sends is not read."""
        self.is_late = True
        if self.connection is not None:
            with suppress(OSError):  # closed in this very moment
                self.connection.shutdown(socket.SHUT_RDWR)


class BoundedTransport(httpx.HTTPTransport):
    """``httpx.HTTPTransport`` that cuts a connection whose answer is not whole in time.

    The bound is the request's own read time-out; connecting has its own. The answer's extension
    ``bound`` can set another. For one request at a time to each origin: a connection is known by
    where it leads. Raises httpx.ReadTimeout at the bound.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._connections: dict[tuple[str, int | None], socket.socket] = {}

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        origin = (request.url.host, request.url.port)
        bound_s = request.extensions["timeout"]["read"]
        bound = Bound(self._connections.get(origin))
        inner = request.extensions.get("trace")

        def trace(name: str, info: Mapping[str, Any]) -> None:
            if name == "connection.connect_tcp.complete":
                bound.connection = info["return_value"].get_extra_info("socket")
                self._connections[origin] = bound.connection
                if bound.is_late:
                    bound.cut()
            if inner is not None:
                inner(name, info)

        request.extensions = {**request.extensions, "trace": trace}
        # Its thread starts before the request: a start must not sit between two packets.
        bound.cut_after(bound_s)
        try:
            response = super().handle_request(request)
        except httpx.TransportError as error:
            bound.cancel()
            if bound.is_late:
                raise _late(bound_s) from error
            raise
        assert isinstance(response.stream, httpx.SyncByteStream)
        response.stream = _BoundedBody(response.stream, bound, bound_s)
        response.extensions["bound"] = bound
        return response


class _BoundedBody(httpx.SyncByteStream):
    """The packets of a body until its connection is cut, which no clean end may hide."""

    def __init__(self, body: httpx.SyncByteStream, bound: Bound, bound_s: float) -> None:
        self._body, self._bound, self._bound_s = body, bound, bound_s

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from self._body
        except httpx.TransportError as error:
            if self._bound.is_late:
                raise _late(self._bound_s) from error
            raise
        if self._bound.is_late:
            raise _late(self._bound_s)

    def close(self) -> None:
        self._bound.cancel()
        self._body.close()


def _late(bound_s: float) -> httpx.ReadTimeout:
    return httpx.ReadTimeout(f"the answer was not whole after {bound_s:.1f} s")
