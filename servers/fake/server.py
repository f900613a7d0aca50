"""A loopback server that answers like vLLM 0.32 and LMCache 0.5.6, and misbehaves on command.

``python -m servers.fake.server --port P --model-name NAME --num-gpu-blocks N …`` or, in a test,
``with FakeServer(FakeSpec(...), script=[...]) as fake``. Real sockets and bytes, one thread per
connection, standard library only; faults are those of ``servers.fake.script``. Its ledger says
what it served and when, on the clock ``time.perf_counter_ns`` (CLOCK_MONOTONIC, so comparable
with a client in another process of the same machine).
"""

import argparse
import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from servers.fake.engine import FakeEngine, output_ids
from servers.fake.script import Script, parse_script, read_script
from servers.fake.spec import FakeSpec
from servers.fake.tiers import in_process_config
from sim.predict import Prediction
from sim.tiers.settings import TIER_KINDS

HOST = "127.0.0.1"
KEEPALIVE_S = 5.0  # uvicorn's default, which vLLM keeps
SCRIPT_VARIABLE = "KVCLIFF_FAKE_SCRIPT"
LEDGER_VARIABLE = "KVCLIFF_FAKE_LEDGER"
SSE = "text/event-stream; charset=utf-8"
JSON = "application/json"
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_MAX_HEAD_BYTES = 64 * 1024
_STOP_S = 5.0


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    path: str
    headers: Mapping[str, str]  # names in lower case
    body: bytes
    received_ns: int  # first byte


@dataclass(frozen=True, slots=True)
class _Write:
    """Wait, then write; ``marks`` name what this write means for the accounts."""

    wait_ms: float
    payload: bytes
    marks: frozenset[str] = frozenset()


class FakeServer:
    """Both HTTP ports of the fake; a context manager. Ports may be 0: then see ``base_url``.

    ``script``: rules as in ``servers.fake.script``. ``ledger``: one dict per completion, in order
    of completion; ``seen``: every request line that arrived, on both ports.
    """

    def __init__(
        self,
        spec: FakeSpec | None = None,
        *,
        script: Sequence[Mapping[str, Any]] | Script = (),
        port: int = 0,
        lmcache_http_port: int = 0,
        ledger: Path | None = None,
    ) -> None:
        """Bind at once (OSError when a port is taken); serve from ``__enter__`` on."""
        self.spec = spec or FakeSpec()
        parsed = script if isinstance(script, Script) else parse_script(script)
        self.seen: list[str] = []
        self._engine = FakeEngine(self.spec, parsed, ledger=ledger)
        self._ready_at = 0.0
        self._vllm = _Listener(port, self._answer_vllm, parsed.always())
        self._host = (
            _Listener(lmcache_http_port, self._answer_lmcache, {})
            if self.spec.has_lmcache_port
            else None
        )

    @property
    def base_url(self) -> str:
        """Where vLLM answers."""
        return f"http://{HOST}:{self._vllm.port}"

    @property
    def lmcache_url(self) -> str | None:
        """Where LMCache answers: its server's HTTP side, or its internal API in vLLM's process."""
        return None if self._host is None else f"http://{HOST}:{self._host.port}"

    @property
    def ledger(self) -> list[dict[str, Any]]:
        """What was served so far, a copy."""
        return list(self._engine.ledger)

    @property
    def open_connections(self) -> int:
        """Client connections on the vLLM port that are open now."""
        return self._vllm.n_open

    def completions_seen(self) -> int:
        """How many completions arrived, answered or not."""
        return self.seen.count("POST /v1/completions")

    def __enter__(self) -> Self:
        self._vllm.start()
        if self._host is not None:
            self._host.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End every connection and thread; idempotent."""
        self._vllm.stop()
        if self._host is not None:
            self._host.stop()
        self._engine.close()

    def not_ready_for(self, seconds: float) -> None:
        """Answer completions with 503 for ``seconds``, /health with 200."""
        self._ready_at = time.monotonic() + seconds

    def _answer_vllm(self, link: "_Link", request: _Request) -> None:
        self.seen.append(f"{request.method} {request.path}")
        match request.method, request.path:
            case "POST", "/v1/completions":
                self._completion(link, request)
            case "GET", "/health":
                closes = self._engine.faults().get("health_closes")
                headers = {"connection": "close"} if closes else {}
                link.reply(200, b"", "text/plain", headers)
            case "GET", "/version":
                link.reply_json({"version": self.spec.version})
            case "GET", "/v1/models":
                link.reply_json({"object": "list", "data": [self._model_card()]})
            case "GET", "/metrics":
                self._metrics(link, self._engine.vllm_metrics)
            case _:
                link.reply_json({"detail": "Not Found"}, status=404)

    def _answer_lmcache(self, link: "_Link", request: _Request) -> None:
        self.seen.append(f"lmcache {request.method} {request.path}")
        if self.spec.kind == "lmcache":
            self._answer_internal_api(link, request)
            return
        match request.method, request.path:
            case "GET", "/healthcheck":
                link.reply_json({"status": "healthy"})
            case "GET", "/status":
                link.reply_json(self._engine.host_status())
            case "GET", "/config":
                link.reply_json(self._engine.host_config())
            case "GET", "/metrics":
                self._metrics(link, self._engine.host_metrics)
            case _:
                link.reply_json({"detail": "Not Found"}, status=404)

    def _answer_internal_api(self, link: "_Link", request: _Request) -> None:
        match request.method, request.path.partition("?")[0]:
            case "GET", "/lmc_version":
                link.reply(200, b'"0.5.6"', JSON)
            case "GET", "/conf":
                changed = self._engine.faults().get("lmcache_conf", {})
                config = in_process_config(self.spec) | changed
                link.reply(200, json.dumps(config).encode(), "text/plain")
            case "GET", "/metrics":
                self._metrics(link, self._engine.in_process_metrics)
            case _:
                link.reply_json({"detail": "Not Found"}, status=404)

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self.spec.model_name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "vllm",
            "root": self.spec.model_name,
            "max_model_len": self.spec.max_model_len,
        }

    def _metrics(self, link: "_Link", render: Callable[[Mapping[str, Any]], str]) -> None:
        faults = self._engine.faults()
        status = int(faults.get("metrics_status", 200))
        text = "" if status != 200 or faults.get("metrics_empty") else render(faults)
        headers = {"location": "/metrics/"} if status in (301, 302, 307, 308) else {}
        link.reply(status, text.encode(), PROMETHEUS, headers)

    def _completion(self, link: "_Link", request: _Request) -> None:
        n = self._engine.arrive()
        faults = self._engine.script.at(n)
        asked = json.loads(request.body)
        refusal = self._refusal(asked)
        if "status" in faults:
            refusal = faults["status"]
        if refusal is not None:
            self._engine.note(_entry(n, request, asked, status=refusal["code"], end="refused"))
            body = refusal.get("body", "")
            payload = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            headers = refusal.get("headers", {})
            link.reply(refusal["code"], payload, refusal.get("type", JSON), headers)
            return
        answer = _Answer(self.spec, request, asked, faults)
        try:
            served = self._engine.serve(asked["prompt"], answer.ids, faults)
        except ValueError as error:  # more blocks than the pool has
            self._engine.note(_entry(n, request, asked, status=400, end="refused"))
            link.reply_json(_error(400, "BadRequestError", str(error))["body"], status=400)
            return
        entry = _entry(n, request, asked, status=200, end="done") | _sources(served)
        deliver = self._stream if asked.get("stream") else self._whole
        deliver(link, answer, served, entry, faults)

    def _refusal(self, asked: Mapping[str, Any]) -> dict[str, Any] | None:
        if time.monotonic() < self._ready_at:
            return _error(503, "ServiceUnavailableError", "the model is still loading")
        if asked.get("model") != self.spec.model_name:
            return _error(404, "NotFoundError", f"The model `{asked.get('model')}` does not exist.")
        prompt, limit = asked["prompt"], self.spec.max_model_len
        if len(prompt) >= limit:
            return _error(
                400,
                "BadRequestError",
                f"This model's maximum context length is {limit} tokens. However, your prompt "
                f"contains {len(prompt)} tokens.",
            )
        return None

    def _stream(
        self,
        link: "_Link",
        answer: "_Answer",
        served: Prediction,
        entry: dict[str, Any],
        faults: Mapping[str, Any],
    ) -> None:
        try:
            link.start_stream(str(faults.get("content_type", SSE)), answer.response_id)
            cached_tokens = entry["gpu_hit"] + entry["host_loaded"]
            self._play(link, answer.writes(cached_tokens), served, entry, faults)
        except OSError:
            entry["end"] = "client left"
        if not entry["finished"]:
            self._engine.finish(served, "abort", entry["output_tokens"], faults)
        self._engine.note(entry)
        if entry["end"] != "done":
            raise _HangUp

    def _play(
        self,
        link: "_Link",
        writes: Sequence[_Write],
        served: Prediction,
        entry: dict[str, Any],
        faults: Mapping[str, Any],
    ) -> None:
        """Write the answer out; ``entry`` learns what was written, when, and how it ended."""
        for write in writes:
            link.wait(write.wait_ms)
            if "finish" in write.marks:
                # vLLM's counters move before the last token's event is written.
                reason = "stop" if "stop_after" in faults else "length"
                self._engine.finish(served, reason, entry["output_tokens"] + 1, faults)
                entry["finished"] = True
            if "token" in write.marks:
                entry["first_token_ns"] = entry["first_token_ns"] or time.perf_counter_ns()
                entry["output_tokens"] += 1
            if "hang" in write.marks:
                entry["end"] = "hang"
                link.wait_for_client_to_leave()
                return
            if "drop" in write.marks:
                entry["end"] = "dropped"
                return
            link.chunk(write.payload)
        link.end_stream()

    def _whole(
        self,
        link: "_Link",
        answer: "_Answer",
        served: Prediction,
        entry: dict[str, Any],
        faults: Mapping[str, Any],
    ) -> None:
        """A completion without ``stream``: one JSON body."""
        link.wait(float(faults.get("first_token_ms", 0)))
        entry |= {"output_tokens": len(answer.ids), "finished": True}
        self._engine.finish(served, "length", len(answer.ids), faults)
        self._engine.note(entry)
        link.reply_json(answer.whole(entry["gpu_hit"] + entry["host_loaded"]))


class _HangUp(Exception):  # noqa: N818  -- control flow: this connection ends here
    pass


def _entry(
    n: int, request: _Request, asked: Mapping[str, Any], *, status: int, end: str
) -> dict[str, Any]:
    return {
        "n": n,
        "request_id": request.headers.get("x-request-id"),
        "prompt_tokens": len(asked["prompt"]),
        "asked_tokens": asked.get("max_tokens"),
        "status": status,
        "received_ns": request.received_ns,
        "first_token_ns": None,
        "output_tokens": 0,
        "finished": False,
        "end": end,
    }


def _sources(served: Prediction) -> dict[str, int]:
    return {
        "computed": served.split.computed,
        "gpu_hit": served.split.gpu_hit,
        "host_loaded": served.split.host_loaded,
        "hit_chunks": served.hit_chunks,
        "loaded_chunks": served.loaded_chunks,
        "stored_chunks": served.stored_chunks,
    }


def _error(code: int, kind: str, message: str) -> dict[str, Any]:
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return {"code": code, "body": body}


class _Answer:
    """The events of one completion, in vLLM's shapes, bent as the script says."""

    def __init__(
        self,
        spec: FakeSpec,
        request: _Request,
        asked: Mapping[str, Any],
        faults: Mapping[str, Any],
    ) -> None:
        self._spec, self._asked, self._faults = spec, asked, faults
        self._prompt: list[int] = asked["prompt"]
        n = min(int(asked.get("max_tokens", 16)), spec.max_model_len - len(self._prompt))
        salt = "other" if faults.get("other_output") else ""
        self.ids = output_ids(self._prompt, int(faults.get("stop_after", n)), salt=salt)
        self.response_id = f"cmpl-{request.headers.get('x-request-id', f'{id(request):x}')}"
        self._base = {
            "id": self.response_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": spec.model_name,
        }

    def writes(self, cached_tokens: int) -> list[_Write]:
        """Every write of the stream, in order."""
        if "raw" in self._faults:
            return _raw_writes(self._faults["raw"])
        writes = self._tail(cached_tokens)
        step = int(self._faults.get("tokens_per_event", 1))
        groups = [range(a, min(a + step, len(self.ids))) for a in range(0, len(self.ids), step)]
        events = [self._token_event(group) for group in groups]
        return self._broken_off([*events, *writes], step)

    def whole(self, cached_tokens: int) -> dict[str, Any]:
        """The body of the answer when no stream was asked for."""
        choice = self._choice(range(len(self.ids)))
        return {**self._base, "choices": [choice], "usage": self._usage(cached_tokens)}

    def _token_event(self, group: range) -> _Write:
        name = "token_ms" if group.start else "first_token_ms"
        marks = {"token", "finish"} if group.stop == len(self.ids) else {"token"}
        chunk = {**self._base, "choices": [self._choice(group)]}
        return _Write(float(self._faults.get(name, 0)), _frame(chunk), frozenset(marks))

    def _choice(self, group: range) -> dict[str, Any]:
        is_last = group.stop == len(self.ids) and not self._faults.get("no_finish")
        reason = "stop" if "stop_after" in self._faults else "length"
        choice: dict[str, Any] = {
            "index": 0,
            "text": "".join(self._text(i) for i in group),
            "logprobs": None,
            "finish_reason": reason if is_last else None,
            "stop_reason": None,
        }
        if self._asked.get("return_token_ids") and not self._faults.get("no_token_ids"):
            choice["prompt_token_ids"] = None if group.start else self._prompt
            choice["token_ids"] = [self.ids[i] for i in group]
        return choice

    def _text(self, index: int) -> str:
        texts: list[str] | None = self._faults.get("texts")
        return texts[min(index, len(texts) - 1)] if texts else chr(self.ids[index])

    def _usage(self, cached_tokens: int) -> dict[str, Any]:
        n_prompt = len(self._prompt) + int(self._faults.get("prompt_tokens_off", 0))
        usage: dict[str, Any] = {
            "prompt_tokens": n_prompt,
            "total_tokens": n_prompt + len(self.ids),
            "completion_tokens": len(self.ids),
        }
        if not self._faults.get("no_cached_tokens"):
            usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
        return usage

    def _tail(self, cached_tokens: int) -> list[_Write]:
        frames: list[bytes] = []
        options = self._asked.get("stream_options") or {}
        if options.get("include_usage") and not self._faults.get("no_usage"):
            first_ms = float(self._faults.get("first_token_ms", 0))
            usage_chunk = {
                **self._base,
                "choices": [],
                "usage": self._usage(cached_tokens),
                # The scripted delay, as vLLM would split it: a little queue, the rest prefill.
                "metrics": {"time_to_first_token_ms": first_ms, "queue_time_ms": 0.25},
            }
            frames.append(_frame(usage_chunk))
        for usage in self._faults.get("extra_usage", ()):
            frames.append(_frame({**self._base, "choices": [], "usage": usage}))
        if not self._faults.get("no_done"):
            frames.append(b"data: [DONE]\n\n")
        return [_Write(0, frame) for frame in frames]

    def _broken_off(self, writes: list[_Write], step: int) -> list[_Write]:
        """``writes`` with the break the script asks for; token counts round up to whole events."""
        if "close_after" in self._faults:
            close = self._faults["close_after"]
            kept = writes[: -(-int(close["tokens"]) // step)]
            return kept if close.get("clean") else [*kept, _Write(0, b"", frozenset({"drop"}))]
        if "hang_after" in self._faults:
            kept = writes[: -(-int(self._faults["hang_after"]) // step)]
            return [*kept, _Write(0, b"", frozenset({"hang"}))]
        if "error_after" in self._faults:
            fault = self._faults["error_after"]
            at = -(-int(fault["tokens"]) // step)
            frame = _Write(0, str(fault["frame"]).encode())
            rest = {
                "continue": writes[at:],
                "done": [_Write(0, b"data: [DONE]\n\n")],
                "close": [_Write(0, b"", frozenset({"drop"}))],
            }
            return [*writes[:at], frame, *rest[fault.get("then", "done")]]
        return writes


def _raw_writes(pieces: Sequence[Sequence[Any]]) -> list[_Write]:
    writes = []
    for index, (wait_ms, text) in enumerate(pieces):
        payload = text if isinstance(text, bytes) else str(text).encode()
        # The accounts cannot know what raw bytes mean: everything is counted before the first.
        writes.append(_Write(float(wait_ms), payload, frozenset({"finish"} if not index else ())))
    return writes


def _frame(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


class _Link:
    """One client connection: HTTP/1.1 with keep-alive, written by hand."""

    def __init__(self, sock: socket.socket, stopping: threading.Event) -> None:
        self._sock, self._stopping = sock, stopping

    def read(self, *, keepalive_s: float) -> _Request | None:
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
        return _Request(method, path, headers, b"".join(pieces), received_ns)

    def reply(
        self, status: int, body: bytes, content_type: str, headers: Mapping[str, str] | None = None
    ) -> None:
        """One whole answer."""
        lines = [f"HTTP/1.1 {status} Scripted", f"content-type: {content_type}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        lines += [f"content-length: {len(body)}", "", ""]
        self._sock.sendall("\r\n".join(lines).encode() + body)

    def reply_json(self, body: Mapping[str, Any], *, status: int = 200) -> None:
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
            raise _HangUp

    def wait_for_client_to_leave(self) -> None:
        """Return when the client closes its end, or the server stops."""
        self._sock.recv(1)


class _Listener:
    """One port: accepts, and gives each connection a thread that calls ``answer`` per request."""

    def __init__(
        self,
        port: int,
        answer: Callable[[_Link, _Request], None],
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
        link = _Link(sock, self._stopping)
        try:
            link.wait(self._accept_delay_ms)
            while request := link.read(keepalive_s=self._keepalive_s):
                self._answer(link, request)
        except _HangUp:
            # Unsent bytes must still arrive: an orderly FIN, not a reset.
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the client left, or the server is stopping
        finally:
            with self._lock:
                self._open.pop(sock, None)
            sock.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT, or until the script says die; returns the exit code."""
    started = time.monotonic()
    stop = _StopSign()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    args = _arguments(argv)
    try:
        script = read_script(args.script) if args.script else Script()
    except (OSError, ValueError) as error:
        sys.stderr.write(f"ERROR: script {args.script}: {error}\n")
        return 2
    faults = script.always()
    _fill_stderr(int(faults.get("stderr_bytes", 0)))
    startup_s = float(faults.get("startup_s", 0))
    die_at = started + float(faults["die_after_s"]) if "die_after_s" in faults else None
    is_early = bool(faults.get("health_early"))
    if not is_early and _stopped(stop, min(started + startup_s, die_at or started + startup_s)):
        return _end(faults)
    if die_at is not None and time.monotonic() >= die_at:
        return _die(faults)
    try:
        server = _server(args, script)
    except OSError as error:
        sys.stderr.write(f"ERROR: [Errno {error.errno}] {error.strerror} ({HOST}:{args.port})\n")
        return 1
    with server:
        if is_early:
            server.not_ready_for(startup_s)
        sys.stderr.write(f"INFO: fake server on {server.base_url}, LMCache {server.lmcache_url}\n")
        sys.stderr.flush()
        if not _stopped(stop, die_at):
            return _die(faults)
    return _end(faults)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m servers.fake.server", allow_abbrev=False)
    default = FakeSpec()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--lmcache-http-port", type=int)
    parser.add_argument("--script", type=Path, default=os.environ.get(SCRIPT_VARIABLE))
    parser.add_argument("--ledger", type=Path, default=os.environ.get(LEDGER_VARIABLE))
    for field in fields(FakeSpec):
        value = getattr(default, field.name)
        option = f"--{field.name.replace('_', '-')}"
        if isinstance(value, bool):
            parser.add_argument(option, action=argparse.BooleanOptionalAction, default=value)
            continue
        choices = TIER_KINDS if field.name == "host_kind" else None
        kind = int if value is None else type(value)
        parser.add_argument(option, type=kind, default=value, choices=choices)
    args = parser.parse_args(argv)
    if (args.lmcache_http_port is not None) != _spec(args).has_lmcache_port:
        parser.error(
            "--lmcache-http-port goes with --host-chunks of the kinds lmcache-mp and lmcache, and "
            "with nothing else"
        )
    return args


def _spec(args: argparse.Namespace) -> FakeSpec:
    return FakeSpec(**{field.name: getattr(args, field.name) for field in fields(FakeSpec)})


def _server(args: argparse.Namespace, script: Script) -> FakeServer:
    return FakeServer(
        _spec(args),
        script=script,
        port=args.port,
        lmcache_http_port=args.lmcache_http_port or 0,
        ledger=args.ledger,
    )


class _StopSign:
    """Set by a signal handler. A threading.Event may deadlock there: its wait holds the lock that
    its set takes, and both are then in the main thread.
    """

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()

    def set(self) -> None:
        """Raise the sign for good."""
        os.write(self._write_end, b"x")

    def wait(self, timeout_s: float | None) -> bool:
        """Whether the sign is up within ``timeout_s`` (None: wait for ever)."""
        return bool(select.select([self._read_end], [], [], timeout_s)[0])


def _stopped(stop: _StopSign, until: float | None) -> bool:
    """Whether a signal came before ``until`` (monotonic seconds; None: wait for ever)."""
    return stop.wait(None if until is None else max(0.0, until - time.monotonic()))


def _fill_stderr(n_bytes: int) -> None:
    line = "x" * 99 + "\n"
    for _ in range(-(-n_bytes // len(line))):
        sys.stderr.write(line)


def _die(faults: Mapping[str, Any]) -> int:
    sys.stderr.write("ERROR: EngineCore encountered a fatal error (scripted)\n")
    return int(faults.get("die_code", 1))


def _end(faults: Mapping[str, Any]) -> int:
    # Not interruptible on purpose: this is the server that needs its time after SIGTERM.
    time.sleep(float(faults.get("sigterm_s", 0)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
