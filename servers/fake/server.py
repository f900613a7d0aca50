"""A loopback server that answers like vLLM 0.32 and LMCache 0.5.6, and misbehaves on command.

``python -m servers.fake --port P --model-name NAME --num-gpu-blocks N …`` or, in a test,
``with FakeServer(FakeSpec(...), script=[...]) as fake``. Real sockets and bytes, one thread per
connection, standard library only; faults are those of ``servers.fake.script``. Its ledger says
what it served and when, on the clock ``time.perf_counter_ns`` (CLOCK_MONOTONIC, so comparable
with a client in another process of the same machine).
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from servers.fake.answer import Answer, Write
from servers.fake.engine import FakeEngine
from servers.fake.http import JSON, HangUp, HttpRequest, Link, Listener
from servers.fake.script import Script, parse_script
from servers.fake.spec import FakeSpec
from servers.ports import HOST
from sim.errors import SpecError
from sim.predict import Prediction

SSE = "text/event-stream; charset=utf-8"
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


class FakeServer:
    """Both HTTP ports of the fake; a context manager. Ports may be 0: then see ``base_url``.

    ``script``: rules as in ``servers.fake.script``. ``ledger``: one dict per completion, in order
    of completion; ``seen``: every request line that arrived, on both ports. ``events_port``: where
    a reader listens for KV events; None publishes none.
    """

    def __init__(
        self,
        spec: FakeSpec | None = None,
        *,
        script: Sequence[Mapping[str, Any]] | Script = (),
        port: int = 0,
        lmcache_http_port: int = 0,
        ledger: Path | None = None,
        events_port: int | None = None,
    ) -> None:
        """Bind at once (OSError when a port is taken); serve from ``__enter__`` on."""
        self.spec = spec or FakeSpec()
        parsed = script if isinstance(script, Script) else parse_script(script)
        self.seen: list[str] = []
        self._engine = FakeEngine(self.spec, parsed, ledger=ledger, events_port=events_port)
        self._ready_at = 0.0
        self._vllm = Listener(port, self._answer_vllm, parsed.always())
        self._host = (
            Listener(lmcache_http_port, self._answer_lmcache, {})
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

    def __exit__(self, *_: object) -> None:
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

    def _answer_vllm(self, link: Link, request: HttpRequest) -> None:
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

    def _answer_lmcache(self, link: Link, request: HttpRequest) -> None:
        self.seen.append(f"lmcache {request.method} {request.path}")
        path = request.path.partition("?")[0]
        if path == "/metrics":
            self._metrics(link, self._engine.host_metrics)
        elif path in (pages := self._engine.host_pages()):
            link.reply_json(pages[path])
        else:
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

    def _metrics(self, link: Link, render: Callable[[Mapping[str, Any]], str]) -> None:
        faults = self._engine.faults()
        status = int(faults.get("metrics_status", 200))
        text = "" if status != 200 or faults.get("metrics_empty") else render(faults)
        headers = {"location": "/metrics/"} if status in (301, 302, 307, 308) else {}
        link.reply(status, text.encode(), PROMETHEUS, headers)

    def _completion(self, link: Link, request: HttpRequest) -> None:
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
        answer = Answer(self.spec, request, asked, faults)
        try:
            served = self._engine.serve(
                asked["prompt"], answer.ids, faults, asked.get("session_id")
            )
        except SpecError as error:  # more blocks than the pool has
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
        link: Link,
        answer: Answer,
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
            raise HangUp

    def _play(
        self,
        link: Link,
        writes: Sequence[Write],
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
        link: Link,
        answer: Answer,
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


def _entry(
    n: int, request: HttpRequest, asked: Mapping[str, Any], *, status: int, end: str
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
