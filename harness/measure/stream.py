"""Stream one completion and time it: the client side of every measured request.

``ttft_ms`` runs from just before the request is written on an already open connection to receipt
of the bytes that complete the first event with a generated token. Stamps are taken on receipt of
each packet with ``time.perf_counter_ns``; JSON is decoded only after the stream has ended.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

import httpx

from harness.measure.answer import ERROR_BODY_BYTES, Received, StreamResult, judge_answer
from harness.measure.bounded_http import BoundedTransport
from harness.measure.sse import StreamError

CONNECT_S = 5.0
# Once [DONE] is here the answer is whole; a body that does not end soon after only costs the
# connection, which the next request then opens again, outside its clock.
_END_AFTER_DONE_S = 1.0


def open_client(base_url: str, *, deadline_s: float) -> httpx.Client:
    """A client for ``base_url``: no proxy, no retry, no redirect, no limit on connections.

    ``deadline_s`` bounds the answers to requests that set no deadline of their own. One request at
    a time.
    """
    limits = httpx.Limits(max_connections=None, keepalive_expiry=None)
    return httpx.Client(
        base_url=base_url,
        trust_env=False,
        timeout=_timeout(deadline_s),
        transport=BoundedTransport(retries=0, trust_env=False, limits=limits),
    )


def complete_prompt(
    client: httpx.Client,
    *,
    model: str,
    prompt: Sequence[int],
    output_tokens: int,
    deadline_s: float,
    request_id: str,
    session_id: str | None = None,
    is_just_used: bool = False,
    wait_for_turn: Callable[[], None] | None = None,
) -> StreamResult:
    """Send one prompt of token ids and read its stream to the end; every fault becomes a result.

    The connection is opened or verified by a GET before the clock starts, unless it ``is_just_used``.
    The request is sent once, when ``wait_for_turn`` returns. ``session_id``: what the server's KV
    events call it. ``deadline_s`` runs from the sending to ``[DONE]``, however the packets dribble.
    """
    answer = Received(sent_unix_ns=time.time_ns())
    body = request_body(model=model, prompt=prompt, output_tokens=output_tokens)
    if session_id is not None:
        body["session_id"] = session_id
    payload = json.dumps(body, separators=(",", ":")).encode()
    try:
        if not is_just_used:
            _verify_connection(client, deadline_s)
        _exchange(client, payload, answer, deadline_s=deadline_s, request_id=request_id,
                  wait_for_turn=wait_for_turn)  # fmt: skip
    except (httpx.HTTPError, StreamError) as fault:
        answer.fault = _describe(fault, answer, deadline_s)
    return judge_answer(answer, prompt_tokens=len(prompt), output_tokens=output_tokens)


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
    client: httpx.Client,
    payload: bytes,
    answer: Received,
    *,
    deadline_s: float,
    request_id: str,
    wait_for_turn: Callable[[], None] | None,
) -> None:
    """Write the request when its turn has come, read the whole answer into ``answer``."""

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
    if wait_for_turn is not None:
        wait_for_turn()
    with closing(client.send(request, stream=True)) as response:
        _read(response, answer)


def _read(response: httpx.Response, answer: Received) -> None:
    """Stamp and split the body; nothing is decoded here, so no stamp waits for a decoder."""
    answer.status = response.status_code
    answer.media_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if answer.status != 200 or answer.media_type != "text/event-stream":
        answer.head = next(response.iter_raw(ERROR_BODY_BYTES), b"")
        return
    try:
        for packet in response.iter_raw():
            now_ns = time.perf_counter_ns()
            was_done = answer.is_done
            answer.add_packet(packet, now_ns=now_ns)
            if answer.is_done and not was_done:
                response.extensions["bound"].cut_after(_END_AFTER_DONE_S)
    finally:
        answer.end()


def _describe(fault: Exception, answer: Received, deadline_s: float) -> str:
    seen = f"{len(answer.events)} events had arrived"
    if isinstance(fault, httpx.ConnectError | httpx.ConnectTimeout):
        return f"no connection: {fault}"
    if isinstance(fault, httpx.TimeoutException):
        return f"deadline: the stream had not ended after {deadline_s:g} s; {seen}"
    if isinstance(fault, StreamError):
        return str(fault)
    return f"truncated: {fault}; {seen}"
