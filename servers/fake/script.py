"""Scripted faults of the loopback server: which request misbehaves, and how.

A script is a JSON list of rules ``{"match": {"nth": 2}, "do": [{"first_token_ms": 300}]}``.
``nth`` counts POST /v1/completions in order of arrival, first is 1 (a launcher's readiness request
counts too); ``{"all": true}`` matches always. A rule on ``nth`` is in force from the arrival of
that request until the next one arrives, so it also governs the /metrics read in between.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ScriptError(ValueError):
    """A script that cannot be played, and why."""


BEHAVIOURS: Mapping[str, str] = {
    # what one answer looks like
    "first_token_ms": "number: wait this long before the event of the first token",
    "token_ms": "number: wait this long before each later token event",
    "tokens_per_event": "int: put so many tokens into one event (default 1)",
    "texts": "list of str: text of token i, the last one repeated; ids stay as they are",
    "no_token_ids": "true: leave token_ids out, as servers other than vLLM do",
    "other_output": "true: generate other tokens than this prompt normally gets",
    "raw": "list of [wait_ms, text]: the whole body instead of the normal events, exactly",
    "status": "{code, body, type, headers}: this instead of a stream; nothing is generated",
    "content_type": "str: media type of the stream (default text/event-stream; charset=utf-8)",
    "close_after": "{tokens, clean}: end there; clean ends the HTTP body, else the socket drops",
    "hang_after": "int: say nothing more after so many tokens, until the client leaves",
    "error_after": "{tokens, frame, then}: write frame there; then 'done', 'close' or 'continue'",
    "stop_after": "int: finish_reason stop after so many tokens, fewer than asked",
    "no_finish": "true: no finish_reason",
    "no_usage": "true: no usage chunk",
    "no_done": "true: no data: [DONE]",
    "extra_usage": "list of objects: usage chunks sent after the normal one",
    "prompt_tokens_off": "int: added to usage.prompt_tokens",
    "no_cached_tokens": "true: no prompt_tokens_details in usage",
    # what the server accounts for
    "miscount": "int: so many computed tokens are counted as GPU hits",
    "foreign": "int: so many requests of somebody else finish together with this one",
    "reset_counters": "true: every counter starts again from 0 after this request",
    "preempted": "true: it was preempted once, so its blocks are named twice",
    "lost_event": "true: the KV events of this request are numbered and never sent",
    "engine": "str: label of the engine that served this request (default 0)",
    "drop_stores": "true: the host tier stores nothing and finds nothing",
    "copy_s": "number: vLLM's own offloading copies and counts a request's stores for so long",
    "unhealthy": "true: LMCache inside vLLM says that it is not healthy",
    "lmcache_conf": "object: settings of LMCache inside vLLM in place of its own",
    "pinned_chunks": "int: so many chunks of LMCache inside vLLM stay pinned",
    # /metrics of both ports
    "metrics_status": "int: status of /metrics (307 carries a Location)",
    "metrics_empty": "true: 200 with an empty body",
    "metrics_lag_s": "number: counters are published so much later than they happen",
    "missing_series": "list of str: sample names that are left out",
    # the server as a process; only in a rule for all
    "health_closes": "true: /health says Connection: close, so the next request must connect anew",
    "accept_delay_ms": "number: a new connection is read only so much later",
    "keepalive_s": "number: an idle connection is closed after this time (default 5, as uvicorn)",
    "startup_s": "number: nothing listens before this time",
    "health_early": "true: during startup_s it listens, /health is 200 and completions are 503",
    "stderr_bytes": "int: so much is written to stderr before it listens",
    "die_after_s": "number: the process ends by itself so long after its start",
    "die_code": "int: its exit code then (default 1)",
    "sigterm_s": "number: it needs this long to end after SIGTERM",
}
"""Every behaviour a rule may name, and its parameter."""


@dataclass(frozen=True, slots=True)
class Script:
    """Rules in order; where two rules name the same behaviour the later one counts."""

    rules: tuple[tuple[int | None, Mapping[str, Any]], ...] = ()

    def at(self, n: int) -> dict[str, Any]:
        """Behaviours in force once ``n`` completions have arrived (0: none has)."""
        merged: dict[str, Any] = {}
        for nth, behaviours in self.rules:
            if nth is None or nth == n:
                merged.update(behaviours)
        return merged

    def always(self) -> dict[str, Any]:
        """Behaviours of the rules for all requests: those of the process itself."""
        return self.at(-1)


def parse_script(rules: Sequence[Mapping[str, Any]]) -> Script:
    """Check and order ``rules``; ScriptError names the rule and what it may hold."""
    parsed: list[tuple[int | None, Mapping[str, Any]]] = []
    for index, rule in enumerate(rules):
        if set(rule) != {"match", "do"}:
            raise ScriptError(f"rule {index} has {sorted(rule)}; it needs exactly match and do")
        behaviours: dict[str, Any] = {}
        for step in rule["do"]:
            behaviours.update(step)
        unknown = sorted(set(behaviours) - set(BEHAVIOURS))
        if unknown:
            raise ScriptError(f"rule {index} names {unknown}; known: {sorted(BEHAVIOURS)}")
        parsed.append((_nth(index, rule["match"]), behaviours))
    return Script(tuple(parsed))


def read_script(path: Path) -> Script:
    """The script in the JSON file ``path``; ScriptError where it is none."""
    try:
        rules = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ScriptError(str(error)) from None
    return parse_script(rules)


def _nth(index: int, match: Mapping[str, Any]) -> int | None:
    if match == {"all": True}:
        return None
    nth = match.get("nth")
    if set(match) != {"nth"} or isinstance(nth, bool) or not isinstance(nth, int) or nth < 1:
        raise ScriptError(
            f"rule {index} matches {dict(match)}; it must be {{'nth': k >= 1}} or {{'all': true}}"
        )
    return nth
