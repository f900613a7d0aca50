"""Stream one completion and time it: the client side of every measured request.

``ttft_ms`` runs from just before the request is written on an already open connection to receipt
of the bytes that complete the first event with a generated token. Stamps are taken on receipt of
each packet with ``time.perf_counter_ns``; JSON is decoded only after the stream has ended.
"""

import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

CONNECT_S = 5.0
MAX_LINE_BYTES = 16 * 2**20
ERROR_BODY_BYTES = 500
DONE = "[DONE]"
# Once [DONE] is here the answer is whole; a body that does not end soon after only costs the
# connection, which the next request then opens again, outside its clock.
_END_AFTER_DONE_S = 1.0
_LINE_END = re.compile(rb"[\r\n]")
_LF = 0x0A
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class StreamResult:
    """One request as the client saw it. None means not measured, never 0.

    ``complete``: HTTP 200, an event stream, as many tokens as asked for, finish_reason, ``[DONE]``
    and no error frame. Otherwise ``error`` says what was wrong and ``ttft_ms``, ``total_ms`` are
    None and ``itl_ms`` is empty. ``total_ms`` ends at the last token event. ``itl_ms``: gaps
    between token events, in arrival order, one fewer than there are events. ``first_byte_ms``:
    receipt of the first body byte. ``server_ttft_ms``: vLLM's queue_time_ms plus its
    time_to_first_token_ms, which alone leaves out an LMCache load. ``output_sha256``: of the output
    token ids as a compact JSON list; of the text where the server returns no ids.
    ``sent_unix_ns`` labels the row; nothing is ever subtracted from it.
    """

    ttft_ms: float | None
    total_ms: float | None
    first_byte_ms: float | None
    itl_ms: tuple[float, ...]
    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    server_ttft_ms: float | None
    finish_reason: str | None
    complete: bool
    error: str | None
    output_sha256: str | None
    conn_reused: bool
    sent_unix_ns: int
    response_id: str | None


class StreamError(Exception):
    """The bytes of a stream break a limit or a format; the message has the numbers."""


@dataclass(frozen=True, slots=True)
class Event:
    """One dispatched server-sent event; ``name`` is "message" unless the stream named it."""

    name: str
    data: str
    last_id: str = ""


class SseParser:
    """Incremental server-sent-events parser on bytes (WHATWG HTML, 9.2.6).

    Lines end in CR, LF or CRLF and nothing else; they are decoded whole, as UTF-8. Packets may cut
    anywhere. One leading BOM is dropped, comments and unknown fields are ignored, an event without
    data is not dispatched. ``retry_ms`` is the last ``retry`` seen.
    """

    def __init__(self) -> None:
        self.retry_ms: int | None = None
        self._pending = bytearray()  # the unfinished line
        self._searched = 0  # bytes of it known to hold no line end
        self._skip_lf = False
        self._at_start = True
        self._name = ""
        self._data: list[str] = []
        self._last_id = ""

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
        return [Event("message", DONE, self._last_id)] if data == [DONE] else []

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
        self._field(name, value.removeprefix(" "))
        return []

    def _field(self, name: str, value: str) -> None:
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._name = value
        elif name == "id" and "\0" not in value:
            self._last_id = value
        elif name == "retry" and value.isascii() and value.isdigit():
            self.retry_ms = int(value)

    def _dispatch(self) -> list[Event]:
        name, data = self._name or "message", "\n".join(self._data)
        self._name, self._data = "", []
        return [Event(name, data, self._last_id)] if data else []


def open_client(base_url: str, *, deadline_s: float) -> httpx.Client:
    """A client for ``base_url``: no proxy, no retry, no redirect, no limit on connections.

    ``deadline_s`` bounds each read of requests that set no deadline of their own.
    """
    limits = httpx.Limits(max_connections=None, keepalive_expiry=None)
    return httpx.Client(
        base_url=base_url,
        trust_env=False,
        timeout=_timeout(deadline_s),
        transport=httpx.HTTPTransport(retries=0, trust_env=False, limits=limits),
    )


def complete_prompt(
    client: httpx.Client,
    *,
    model: str,
    prompt: Sequence[int],
    output_tokens: int,
    deadline_s: float,
    request_id: str,
) -> StreamResult:
    """Send one prompt of token ids and read its stream to the end; every fault becomes a result.

    The connection is opened or verified by a GET before the clock starts. The request is sent once.
    ``deadline_s`` runs from the sending to ``[DONE]``, however the packets dribble.
    """
    answer = Received(sent_unix_ns=time.time_ns())
    payload = json.dumps(
        request_body(model=model, prompt=prompt, output_tokens=output_tokens),
        separators=(",", ":"),
    ).encode()
    try:
        _verify_connection(client, deadline_s)
        _exchange(client, payload, answer, deadline_s=deadline_s, request_id=request_id)
    except (httpx.HTTPError, StreamError) as fault:
        answer.fault = _describe(fault, answer, deadline_s)
    return judge(answer, prompt_tokens=len(prompt), output_tokens=output_tokens)


def request_body(*, model: str, prompt: Sequence[int], output_tokens: int) -> dict[str, Any]:
    """The body of POST /v1/completions, every sampling field explicit.

    A model's generation_config would otherwise set temperature, top_p, top_k, min_p or
    repetition_penalty (vLLM ``CompletionRequest.to_sampling_params``).
    """
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": output_tokens,
        "min_tokens": 0,
        "ignore_eos": True,
        "stop": [],
        "stop_token_ids": [],
        "n": 1,
        "seed": 0,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


@dataclass(slots=True)
class Received:
    """Everything that arrived of one answer, stamped (``perf_counter_ns``) but not yet decoded."""

    sent_unix_ns: int
    sent_ns: int | None = None
    conn_reused: bool = True
    status: int | None = None
    media_type: str = ""
    first_byte_ns: int | None = None
    head: bytes = b""  # of a body that is no event stream
    events: list[tuple[int, Event]] = field(default_factory=list)  # stamp of the completing packet
    is_done: bool = False
    deadline_passed: bool = False
    fault: str | None = None
    _parser: SseParser = field(default_factory=SseParser)
    _last_ns: int = 0

    def take(self, packet: bytes, *, now_ns: int) -> None:
        """Add a packet of the body, received at ``now_ns``. Raises StreamError."""
        self._last_ns = now_ns
        self.first_byte_ns = self.first_byte_ns or now_ns
        self._add(self._parser.feed(packet))

    def end(self) -> None:
        """The body has ended, cleanly or not."""
        self._add(self._parser.close())

    def _add(self, events: Sequence[Event]) -> None:
        self.events += [(self._last_ns, event) for event in events]
        self.is_done = self.is_done or any(event.data == DONE for event in events)


def _timeout(read_s: float) -> httpx.Timeout:
    return httpx.Timeout(read_s, connect=min(CONNECT_S, read_s))


def _verify_connection(client: httpx.Client, deadline_s: float) -> None:
    """Leave an open, idle connection in the pool; any HTTP answer proves it.

    A server may close an idle connection in the moment this is sent. That costs one new attempt:
    nothing measured was sent yet.
    """
    for attempt in (1, 2):
        try:
            client.get("/health", timeout=_timeout(deadline_s))
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            if attempt == 2:
                raise
        else:
            return


def _exchange(
    client: httpx.Client, payload: bytes, answer: Received, *, deadline_s: float, request_id: str
) -> None:
    """Write the request, read the whole answer into ``answer``."""

    def trace(name: str, info: Mapping[str, Any]) -> None:
        if name == "http11.send_request_headers.started":
            answer.sent_unix_ns = time.time_ns()
            answer.sent_ns = time.perf_counter_ns()
        elif name == "connection.connect_tcp.started":
            answer.conn_reused = False

    request = client.build_request(
        "POST",
        "/v1/completions",
        content=payload,
        headers={
            "Content-Type": "application/json",
            "Accept": "text/event-stream",
            "Accept-Encoding": "identity",  # the raw bytes are parsed as they come
            "X-Request-Id": request_id,
        },
        timeout=_timeout(deadline_s),
        extensions={"trace": trace},
    )
    # The timer's thread starts before the request: its start must not sit between two packets.
    with _cutter(answer) as cutter:
        cutter.cut_after(deadline_s)
        response = client.send(request, stream=True)
        try:
            cutter.socket = response.extensions["network_stream"].get_extra_info("socket")
            if answer.deadline_passed:
                raise httpx.ReadTimeout("the head of the answer came too late")
            _read(response, answer, cutter.cut_after)
        finally:
            response.close()


class _Cutter:
    """Shuts a connection down at a set time: httpx bounds each read, not the sum of them."""

    def __init__(self, answer: Received) -> None:
        self.socket: socket.socket | None = None  # None while httpx's own timeout is the bound
        self._answer = answer
        self._timer: threading.Timer | None = None

    def cut_after(self, seconds: float) -> None:
        """Cut ``seconds`` from now, in place of what was set before."""
        self.cancel()
        self._timer = threading.Timer(seconds, self._cut)
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        """Do not cut."""
        if self._timer is not None:
            self._timer.cancel()

    def _cut(self) -> None:
        self._answer.deadline_passed = not self._answer.is_done
        if self.socket is not None:
            with suppress(OSError):  # closed in this very moment
                self.socket.shutdown(socket.SHUT_RDWR)


@contextmanager
def _cutter(answer: Received) -> Iterator[_Cutter]:
    cutter = _Cutter(answer)
    try:
        yield cutter
    finally:
        cutter.cancel()


def _read(response: httpx.Response, answer: Received, cut_after: Callable[[float], None]) -> None:
    """Stamp and split the body; nothing is decoded here, so no stamp waits for a decoder."""
    answer.status = response.status_code
    answer.media_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if answer.status != 200 or answer.media_type != "text/event-stream":
        answer.head = _head(response)
        return
    try:
        for packet in response.iter_raw():
            now_ns = time.perf_counter_ns()
            was_done = answer.is_done
            answer.take(packet, now_ns=now_ns)
            if answer.is_done and not was_done:
                cut_after(_END_AFTER_DONE_S)
    finally:
        answer.end()


def _head(response: httpx.Response) -> bytes:
    head = b""
    for packet in response.iter_raw():
        head += packet
        if len(head) >= ERROR_BODY_BYTES:
            break
    return head[:ERROR_BODY_BYTES]


def _describe(fault: Exception, answer: Received, deadline_s: float) -> str:
    seen = f"{len(answer.events)} events had arrived"
    if isinstance(fault, httpx.ConnectError | httpx.ConnectTimeout):
        return f"no connection: {fault}"
    if answer.deadline_passed or isinstance(fault, httpx.TimeoutException):
        return f"deadline: the stream had not ended after {deadline_s:g} s; {seen}"
    if isinstance(fault, StreamError):
        return str(fault)
    return f"truncated: {fault}; {seen}"


def judge(answer: Received, *, prompt_tokens: int, output_tokens: int) -> StreamResult:
    """Decode what arrived and decide whether it is a complete answer to what was asked."""
    story = _tell(answer.events)
    stamps = story.token_stamps
    error = _http_error(answer) or _stream_error(answer, story)
    error = error or _count_error(story, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    sent_ns = answer.sent_ns
    is_timed = error is None and sent_ns is not None
    details = story.usage.get("prompt_tokens_details")
    return StreamResult(
        ttft_ms=_ms(sent_ns, stamps[0]) if is_timed else None,
        total_ms=_ms(sent_ns, stamps[-1]) if is_timed else None,
        first_byte_ms=_ms(sent_ns, answer.first_byte_ns),
        itl_ms=tuple((b - a) / 1e6 for a, b in pairwise(stamps)) if is_timed else (),
        prompt_tokens=_count(story.usage.get("prompt_tokens")),
        output_tokens=_count(story.usage.get("completion_tokens")),
        cached_tokens=_count(details.get("cached_tokens")) if isinstance(details, dict) else None,
        server_ttft_ms=_server_ttft_ms(story.metrics),
        finish_reason=story.finish_reason,
        complete=error is None,
        error=error,
        output_sha256=story.output_sha256,
        conn_reused=answer.conn_reused,
        sent_unix_ns=answer.sent_unix_ns,
        response_id=story.response_id,
    )


@dataclass(slots=True)
class _Story:
    """What the events of one stream say."""

    id_stamps: list[int] = field(default_factory=list)  # of events with token ids
    text_stamps: list[int] = field(default_factory=list)  # of events with text
    returns_ids: bool = False
    ids: list[int] = field(default_factory=list)
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    response_id: str | None = None
    error: str | None = None

    @property
    def token_stamps(self) -> list[int]:
        """Receipt of each token event, in order (C1): by ids where the server returns them."""
        return self.id_stamps if self.returns_ids else self.text_stamps

    @property
    def output_sha256(self) -> str | None:
        """Digest of the output; None where there is none."""
        if not self.token_stamps:
            return None
        output = json.dumps(self.ids, separators=(",", ":")) if self.returns_ids else self.text
        return hashlib.sha256(output.encode("utf-8", errors="surrogatepass")).hexdigest()


def _tell(events: Sequence[tuple[int, Event]]) -> _Story:
    story = _Story()
    for stamp, event in events:
        if event.data == DONE:
            continue
        if event.name == "error":
            story.error = story.error or f"error frame: {event.data[:ERROR_BODY_BYTES]}"
            continue
        try:
            chunk = json.loads(event.data)
        except ValueError as fault:
            story.error = story.error or f"an event is not JSON ({fault}): {event.data[:80]}"
            continue
        if not _has_chunk_shape(chunk):
            story.error = story.error or f"an event is not a completion chunk: {event.data[:80]}"
        elif chunk.get("error") is not None or chunk.get("object") == "error":
            story.error = story.error or f"error frame: {_error_text(chunk)}"
        else:
            _tell_chunk(story, stamp, chunk)
    return story


_CHUNK: Mapping[str, type] = {"id": str, "choices": list, "usage": dict, "metrics": dict}
_CHOICE: Mapping[str, type] = {
    "text": str,
    "token_ids": list,
    "finish_reason": str,
    "delta": dict,
    "usage": dict,
}
_DELTA: Mapping[str, type] = {"content": str, "reasoning_content": str, "reasoning": str}


def _has_chunk_shape(chunk: Any) -> bool:
    """Whether everything read from ``chunk`` below is null or of the type it is read as."""
    return _holds(chunk, _CHUNK) and all(
        _holds(choice, _CHOICE) and _holds(choice.get("delta") or {}, _DELTA)
        for choice in chunk.get("choices") or ()
    )


def _holds(value: object, types: Mapping[str, type]) -> bool:
    return isinstance(value, dict) and all(
        value.get(name) is None or isinstance(value[name], kind) for name, kind in types.items()
    )


def _error_text(chunk: Mapping[str, Any]) -> str:
    error = chunk.get("error") or chunk
    text = error.get("message") if isinstance(error, Mapping) else error
    return str(text or json.dumps(chunk))[:ERROR_BODY_BYTES]


def _tell_chunk(story: _Story, stamp: int, chunk: Mapping[str, Any]) -> None:
    story.response_id = story.response_id or chunk.get("id")
    story.metrics = chunk.get("metrics") or story.metrics
    _merge(story.usage, chunk.get("usage"))
    for choice in chunk.get("choices") or ():
        _merge(story.usage, choice.get("usage"))  # some servers nest it here
        story.finish_reason = choice.get("finish_reason") or story.finish_reason
        ids = choice.get("token_ids")
        if ids is not None:
            story.returns_ids = True
            story.ids += ids
            story.id_stamps += [stamp] if ids else []
        text = _text(choice)
        story.text += text
        story.text_stamps += [stamp] if text else []


def _text(choice: Mapping[str, Any]) -> str:
    """Generated text of a completion's or a chat's choice; reasoning is generated text too."""
    delta = choice.get("delta") or {}
    parts = (choice.get("text"), delta.get("reasoning_content"), delta.get("reasoning"))
    return "".join(part for part in (*parts, delta.get("content")) if part)


def _merge(into: dict[str, Any], update: Mapping[str, Any] | None) -> None:
    """Add ``update``, object by object; the last value that is not null stays."""
    for key, value in (update or {}).items():
        if isinstance(value, Mapping):
            inner = into.get(key)
            into[key] = inner = inner if isinstance(inner, dict) else {}
            _merge(inner, value)
        elif value is not None:
            into[key] = value


def _http_error(answer: Received) -> str | None:
    head = answer.head.decode("utf-8", errors="replace")
    if answer.status is None:
        return answer.fault or "nothing arrived"
    if answer.status != 200:
        return f"HTTP {answer.status}: {head}"
    if answer.media_type != "text/event-stream":
        return f"HTTP 200 with {answer.media_type or 'no media type'}, no event stream: {head}"
    return None


def _stream_error(answer: Received, story: _Story) -> str | None:
    if story.error is not None:
        return story.error
    if answer.fault is not None and not answer.is_done:
        return answer.fault
    if not story.token_stamps:
        n = _count(story.usage.get("completion_tokens"))
        return f"no_visible_text: usage says {n} output tokens, none arrived" if n else "no token"
    missing = [] if story.finish_reason else ["finish_reason"]
    missing += [] if answer.is_done else [DONE]
    if missing:
        n = len(story.token_stamps)
        return f"truncated: the stream ended without {' and '.join(missing)}; {n} token events"
    return None


def _count_error(story: _Story, *, prompt_tokens: int, output_tokens: int) -> str | None:
    n_prompt = _count(story.usage.get("prompt_tokens"))
    n_output = _count(story.usage.get("completion_tokens"))
    if n_prompt is None or n_output is None:
        return "no usage: the numbers of prompt and output tokens are not known"
    if n_prompt != prompt_tokens:
        return f"usage says {n_prompt} prompt tokens, {prompt_tokens} were sent"
    if n_output != output_tokens:
        return f"usage says {n_output} output tokens, {output_tokens} were asked for"
    if story.returns_ids and len(story.ids) != n_output:
        return f"usage says {n_output} output tokens, {len(story.ids)} token ids arrived"
    return None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _server_ttft_ms(metrics: Mapping[str, Any]) -> float | None:
    """Queue plus prefill: an LMCache load counts as queue time, so neither alone will do."""
    parts = [metrics.get(name) for name in ("queue_time_ms", "time_to_first_token_ms")]
    known = [float(part) for part in parts if isinstance(part, int | float)]
    return sum(known) if len(known) == len(parts) else None


def _ms(start_ns: int | None, stop_ns: int | None) -> float | None:
    return None if start_ns is None or stop_ns is None else (stop_ns - start_ns) / 1e6
