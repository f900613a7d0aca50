"""The events of one completion, in vLLM's shapes, bent as the script says."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from servers.fake.engine import output_ids
from servers.fake.http import HttpRequest
from servers.fake.spec import FakeSpec


@dataclass(frozen=True, slots=True)
class Write:
    """Wait, then write; ``marks`` name what this write means for the accounts."""

    wait_ms: float
    payload: bytes
    marks: frozenset[str] = frozenset()


class Answer:
    """The events of one completion, in vLLM's shapes, bent as the script says."""

    def __init__(
        self,
        spec: FakeSpec,
        request: HttpRequest,
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

    def writes(self, cached_tokens: int) -> list[Write]:
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

    def _token_event(self, group: range) -> Write:
        name = "token_ms" if group.start else "first_token_ms"
        marks = {"token", "finish"} if group.stop == len(self.ids) else {"token"}
        chunk = {**self._base, "choices": [self._choice(group)]}
        return Write(float(self._faults.get(name, 0)), _frame(chunk), frozenset(marks))

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

    def _tail(self, cached_tokens: int) -> list[Write]:
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
        return [Write(0, frame) for frame in frames]

    def _broken_off(self, writes: list[Write], step: int) -> list[Write]:
        """``writes`` with the break the script asks for; token counts round up to whole events."""
        if "close_after" in self._faults:
            close = self._faults["close_after"]
            kept = writes[: -(-int(close["tokens"]) // step)]
            return kept if close.get("clean") else [*kept, Write(0, b"", frozenset({"drop"}))]
        if "hang_after" in self._faults:
            kept = writes[: -(-int(self._faults["hang_after"]) // step)]
            return [*kept, Write(0, b"", frozenset({"hang"}))]
        if "error_after" in self._faults:
            fault = self._faults["error_after"]
            at = -(-int(fault["tokens"]) // step)
            frame = Write(0, str(fault["frame"]).encode())
            rest = {
                "continue": writes[at:],
                "done": [Write(0, b"data: [DONE]\n\n")],
                "close": [Write(0, b"", frozenset({"drop"}))],
            }
            return [*writes[:at], frame, *rest[fault.get("then", "done")]]
        return writes


def _raw_writes(pieces: Sequence[Sequence[Any]]) -> list[Write]:
    writes = []
    for index, (wait_ms, text) in enumerate(pieces):
        payload = text if isinstance(text, bytes) else str(text).encode()
        # The accounts cannot know what raw bytes mean: everything is counted before the first.
        writes.append(Write(float(wait_ms), payload, frozenset({"finish"} if not index else ())))
    return writes


def _frame(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"
