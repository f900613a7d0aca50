"""Server-sent events from bytes: one incremental parser, no decoding before a line is whole."""

import re
from dataclasses import dataclass

MAX_LINE_BYTES = 16 * 2**20
DONE = "[DONE]"
_LINE_END = re.compile(rb"[\r\n]")
_LF = 0x0A
_BOM = b"\xef\xbb\xbf"


class StreamError(Exception):
    """The bytes of a stream break a limit or a format; the message has the numbers."""


@dataclass(frozen=True, slots=True)
class Event:
    """One dispatched server-sent event; ``name`` is "message" unless the stream named it."""

    name: str
    data: str


class SseParser:
    """Incremental server-sent-events parser on bytes (WHATWG HTML, 9.2.6).

    Lines end in CR, LF or CRLF and nothing else; they are decoded whole, as UTF-8. Packets may cut
    anywhere. One leading BOM is dropped, comments and unknown fields are ignored, an event without
    data is not dispatched; ``id`` and ``retry`` concern reconnecting, which is never done.
    """

    def __init__(self) -> None:
        self._pending = bytearray()  # the unfinished line
        self._searched = 0  # bytes of it known to hold no line end
        self._skip_lf = False
        self._at_start = True
        self._name = ""
        self._data: list[str] = []

    def feed(self, packet: bytes) -> list[Event]:
        """Events these bytes complete. Raises StreamError for a line over ``MAX_LINE_BYTES``."""
        self._pending += packet
        events: list[Event] = []
        start = 0
        while match := _LINE_END.search(self._pending, max(start, self._searched)):
            end = match.start()
            is_rest_of_crlf = self._skip_lf and end == start and self._pending[end] == _LF
            self._skip_lf = self._pending[end] != _LF
            if not is_rest_of_crlf:
                self._check_length(end - start)
                events += self._line(bytes(self._pending[start:end]))
            start = end + 1
        del self._pending[:start]
        self._searched = len(self._pending)
        self._skip_lf = self._skip_lf and not self._pending
        self._check_length(len(self._pending))
        return events

    def close(self) -> list[Event]:
        """The stream has ended: an unterminated event is discarded, except a bare ``[DONE]``."""
        if self._pending:
            self._line(bytes(self._pending))
            self._pending.clear()
        data, self._data = self._data, []
        return [Event("message", DONE)] if data == [DONE] else []

    def _check_length(self, n_bytes: int) -> None:
        if n_bytes > MAX_LINE_BYTES:
            raise StreamError(f"a line of the stream is longer than {MAX_LINE_BYTES} bytes")

    def _line(self, raw: bytes) -> list[Event]:
        if self._at_start:
            raw = raw.removeprefix(_BOM)
            self._at_start = False
        if not raw:
            return self._dispatch()
        # Malformed bytes become U+FFFD, as the standard's "UTF-8 decode" does.
        name, _, value = raw.decode("utf-8", errors="replace").partition(":")
        if name == "data":
            self._data.append(value.removeprefix(" "))
        elif name == "event":
            self._name = value.removeprefix(" ")
        return []

    def _dispatch(self) -> list[Event]:
        name, data = self._name or "message", "\n".join(self._data)
        self._name, self._data = "", []
        return [Event(name, data)] if data else []
