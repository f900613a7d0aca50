"""An HTTP transport whose read time-out bounds the whole head of an answer.

httpx bounds each read, not the sum of them: a server that sends its status line and headers one
byte at a time would hold a request for ever. Bodies are the callers' own to bound.
"""

import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import httpx

Origin = tuple[str, int | None]


class BoundedHeadTransport(httpx.HTTPTransport):
    """``httpx.HTTPTransport`` that cuts a connection whose answer's head is not whole in time.

    The bound is the request's own read time-out; connecting has its own. For one request at a time
    to each origin: a connection is known by where it leads. Raises httpx.ReadTimeout at the bound.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._sockets: dict[Origin, socket.socket] = {}

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send ``request`` and read the head of its answer within its read time-out."""
        origin = (request.url.host, request.url.port)
        bound_s = request.extensions["timeout"]["read"]
        inner = request.extensions.get("trace")
        is_late = threading.Event()

        def cut() -> None:
            is_late.set()
            if connection := self._sockets.get(origin):
                with suppress(OSError):  # closed in this very moment
                    connection.shutdown(socket.SHUT_RDWR)

        def trace(name: str, info: Mapping[str, Any]) -> None:
            if name == "connection.connect_tcp.complete":
                self._sockets[origin] = info["return_value"].get_extra_info("socket")
                if is_late.is_set():
                    cut()
            if inner is not None:
                inner(name, info)

        request.extensions = {**request.extensions, "trace": trace}

        timer = threading.Timer(bound_s, cut)
        timer.daemon = True
        timer.start()
        try:
            response = super().handle_request(request)
        except httpx.TransportError as error:
            if is_late.is_set():
                raise httpx.ReadTimeout(_late(bound_s)) from error
            raise
        finally:
            timer.cancel()
        if is_late.is_set():  # the head came in the moment it was cut
            response.close()
            raise httpx.ReadTimeout(_late(bound_s))
        return response


def _late(bound_s: float) -> str:
    return f"the head of the answer was not whole after {bound_s:.1f} s"
