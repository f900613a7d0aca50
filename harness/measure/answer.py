"""What the bytes of one answer say: complete or not, how fast, how many tokens.

Pure: packets come stamped, and JSON is decoded only after the stream has ended.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.measure.sse import DONE, Event, SseParser

ERROR_BODY_BYTES = 500
MOST_MS = 1e9  # eleven days; anything beyond is no duration of a request


@dataclass(frozen=True, slots=True)
class StreamResult:
    """One request as the client saw it. None means not measured, never 0.

    ``complete``: HTTP 200, an event stream, as many tokens as asked for, finish_reason, ``[DONE]``
    and no error frame. Otherwise ``error`` says what was wrong and ``ttft_ms``, ``total_ms`` are
    None. ``total_ms`` ends at the last token event. ``first_byte_ms``: receipt of the first body
    byte. ``server_ttft_ms``: vLLM's queue_time_ms plus its
    time_to_first_token_ms, which alone leaves out an LMCache load; ``queue_ms`` is the former, from
    when the engine took the request in, which it does between two steps. ``output_sha256``: of the output
    token ids as a compact JSON list; of the text where the server returns no ids.
    ``sent_unix_ns`` labels the row; nothing is ever subtracted from it. ``sent_ns`` is the stamp that
    times start at (``perf_counter_ns``); None: never sent.
    """

    ttft_ms: float | None
    total_ms: float | None
    first_byte_ms: float | None
    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    server_ttft_ms: float | None
    queue_ms: float | None
    finish_reason: str | None
    complete: bool
    error: str | None
    output_sha256: str | None
    conn_reused: bool
    sent_unix_ns: int
    sent_ns: int | None


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
    fault: str | None = None
    _parser: SseParser = field(default_factory=SseParser)
    _last_ns: int = 0

    def add_packet(self, packet: bytes, *, now_ns: int) -> None:
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


def judge_answer(answer: Received, *, prompt_tokens: int, output_tokens: int) -> StreamResult:
    """Decode what arrived and decide whether it is a complete answer to what was asked."""
    story = _story_of(answer.events)
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
        prompt_tokens=_count(story.usage.get("prompt_tokens")),
        output_tokens=_count(story.usage.get("completion_tokens")),
        cached_tokens=_count(details.get("cached_tokens")) if isinstance(details, dict) else None,
        server_ttft_ms=_server_ttft_ms(story.metrics),
        queue_ms=_metric_ms(story.metrics, "queue_time_ms"),
        finish_reason=story.finish_reason,
        complete=error is None,
        error=error,
        output_sha256=story.output_sha256,
        conn_reused=answer.conn_reused,
        sent_unix_ns=answer.sent_unix_ns,
        sent_ns=sent_ns,
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


def _story_of(events: Sequence[tuple[int, Event]]) -> _Story:
    story = _Story()
    is_over = False
    for stamp, event in events:
        if event.data == DONE:
            is_over = True
            continue
        if event.name == "error":
            story.error = story.error or f"error frame: {event.data[:ERROR_BODY_BYTES]}"
            continue
        try:
            chunk = json.loads(event.data)
        except (ValueError, RecursionError) as fault:
            story.error = story.error or f"an event is not JSON ({fault}): {event.data[:80]}"
            continue
        if not _has_chunk_shape(chunk):
            story.error = story.error or f"an event is not a completion chunk: {event.data[:80]}"
        elif chunk.get("error") is not None or chunk.get("object") == "error":
            story.error = story.error or f"error frame: {_error_text(chunk)}"
        elif not is_over:  # tokens after [DONE] are not part of the answer, nor of its time
            _add_chunk(story, stamp, chunk)
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
        _holds(choice, _CHOICE)
        and _holds(choice.get("delta") or {}, _DELTA)
        and all(type(token) is int for token in choice.get("token_ids") or ())
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


def _add_chunk(story: _Story, stamp: int, chunk: Mapping[str, Any]) -> None:
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
    if story.finish_reason not in (None, "length", "stop"):
        return f"finish_reason is {story.finish_reason!r}: the server gave up"
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
    return value if type(value) is int and 0 <= value < 2**53 else None


def _server_ttft_ms(metrics: Mapping[str, Any]) -> float | None:
    """Queue plus prefill: an LMCache load counts as queue time, so neither alone will do."""
    queue, prefill = (
        _metric_ms(metrics, name) for name in ("queue_time_ms", "time_to_first_token_ms")
    )
    return None if queue is None or prefill is None else queue + prefill


def _metric_ms(metrics: Mapping[str, Any], name: str) -> float | None:
    """One of vLLM's own times of a request; None where it is none."""
    value = metrics.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < MOST_MS:
        return None
    return float(value)


def _ms(start_ns: int | None, stop_ns: int | None) -> float | None:
    return None if start_ns is None or stop_ns is None else (stop_ns - start_ns) / 1e6
