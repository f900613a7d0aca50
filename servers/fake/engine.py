"""What the loopback server keeps: its tiers, its counters as both engines publish them, its ledger.

Metric names and labels are those of vLLM 0.32.0 (``v1/metrics/loggers.py``); what a host tier adds is
in its file of ``servers/tiers``.
"""

import hashlib
import json
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from servers.fake.events import EventPublisher
from servers.fake.pages import Series, Values, is_vllms, render, series
from servers.fake.script import Script
from servers.fake.spec import FakeSpec
from servers.tiers.play import Sample, TierNow
from sim.predict import Prediction, Predictor

VLLM_COUNTERS: Mapping[str, tuple[str, ...]] = {
    "prompt_tokens": (),
    "prompt_tokens_by_source": ("local_compute", "local_cache_hit", "external_kv_transfer"),
    "prompt_tokens_cached": (),
    "prompt_tokens_cached_by_source": ("device", "host", "p2p", "disk", "external_unspecified"),
    "prefix_cache_queries": (),
    "prefix_cache_hits": (),
    "external_prefix_cache_queries": (),
    "external_prefix_cache_hits": (),
    "generation_tokens": (),
    "num_preemptions": (),
    "request_success": ("stop", "length", "abort", "error", "repetition"),
}
"""Counter families without prefix and ``_total``, with the values of their one extra label."""

_EXTRA_LABEL = {"request_success": "finished_reason"}  # every other family with values: "source"
_COMPUTED = "vllm:request_prefill_kv_computed_tokens"  # a histogram


def output_ids(prompt: Sequence[int], n: int, *, salt: str = "") -> list[int]:
    """``n`` token ids that depend on the whole prompt; id i is the visible ASCII character i."""
    seed = hashlib.sha256(f"{salt}{list(prompt)}".encode()).digest()
    return [33 + hashlib.sha256(seed + i.to_bytes(4, "big")).digest()[0] % 94 for i in range(n)]


class FakeEngine:
    """State of one server process; every method may be called from any thread."""

    def __init__(
        self,
        spec: FakeSpec,
        script: Script,
        *,
        ledger: Path | None = None,
        events_port: int | None = None,
    ) -> None:
        self.spec = spec
        self.script = script
        self.ledger: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        drop_stores = bool(script.always().get("drop_stores"))
        self._play = spec.play()
        self._predictor = Predictor(spec.tiers(drop_stores=drop_stores))
        self._open_store = (0, 0.0)  # chunks, and until when
        self._created = time.time()
        self._arrived = 0
        self._running = 0
        self._counters: Values = {}
        self._published: list[tuple[float, Values]] = []
        self._events = EventPublisher(events_port, spec.block_size) if events_port else None
        self._file: IO[str] | None = ledger.open("a", encoding="utf-8") if ledger else None
        self._start_series()

    def close(self) -> None:
        """Close the ledger file and the connection to the reader of events."""
        if self._events is not None:
            self._events.close()
        if self._file is not None:
            self._file.close()

    def arrive(self) -> int:
        """Count one POST /v1/completions; returns its number, first is 1."""
        with self._lock:
            self._arrived += 1
            return self._arrived

    def faults(self) -> dict[str, Any]:
        """Behaviours in force now."""
        with self._lock:
            return self.script.at(self._arrived)

    def serve(
        self,
        prompt: Sequence[int],
        ids: Sequence[int],
        faults: Mapping[str, Any],
        session_id: str | None = None,
    ) -> Prediction:
        """Take ``prompt`` through the tiers and count it, as vLLM does by its first token.

        ``session_id``: the client's own name for the request, which its KV events carry.
        """
        with self._lock:
            evicted = self._predictor.evicted_chunks
            served = self._predictor.request(prompt, len(ids), output_ids=ids)
            served = self._play.counted(self.spec, served)
            evicted = self._predictor.evicted_chunks - evicted
            self._running += 1
            self._count_prompt(served, faults)
            loaded = self._play.loaded(self.spec, served, evicted=evicted)
            self._add_samples(loaded, str(faults.get("engine", "0")))
            self._publish()
            self._name_blocks([*prompt, *ids[:-1]], served, faults, session_id)
            return served

    def finish(
        self, served: Prediction, reason: str, n_tokens: int, faults: Mapping[str, Any]
    ) -> None:
        """Count the end of a request, as vLLM does before it writes the last event.

        Its stores may still be copied then; they are counted when they are over.
        """
        with self._lock:
            self._running -= 1
            engine = str(faults.get("engine", "0"))
            self._add("generation_tokens", n_tokens, engine)
            self._add("request_success", 1, engine, reason)
            self._add("request_success", int(faults.get("foreign", 0)), engine, "length")
            if faults.get("reset_counters"):
                self._counters = {}
                self._start_series()
            self._publish()
            copy_s = float(faults.get("copy_s", 0))
            self._open_store = (served.stored_chunks, time.monotonic() + copy_s)
            self._add_samples(self._play.stored(self.spec, served), engine)
            self._publish(later_s=copy_s)

    def note(self, entry: dict[str, Any]) -> None:
        """Write one finished request into the ledger."""
        with self._lock:
            self.ledger.append(entry)
            if self._file is not None:
                self._file.write(json.dumps(entry) + "\n")
                self._file.flush()

    def vllm_metrics(self, faults: Mapping[str, Any]) -> str:
        """The body of vLLM's /metrics."""
        with self._lock:
            counters = {s: v for s, v in self._visible(faults).items() if is_vllms(s[0])}
            base = [("engine", "0"), ("model_name", self.spec.model_name)]
            # Usage is back to 0 as soon as a request ends; while one runs any share will do.
            gauges: Values = {
                series("vllm:num_requests_running", base): self._running,
                series("vllm:num_requests_waiting", base): 0,
                series("vllm:kv_cache_usage_perc", base): 0.5 if self._running else 0,
                series("vllm:cache_config_info", self._cache_config()): 1,
            }
            # Those of a tier are exported from the first step on.
            samples = self._play.gauges(self._tier_now(faults)) if self._arrived else ()
            gauges |= {
                series(name, [*base, *labels]): value
                for name, labels, value in samples
                if is_vllms(name)
            }
            for name, labels in counters:
                # Start times that look like counts: prometheus_client writes one per counter.
                gauges[name.removesuffix("_total") + "_created", labels] = self._created
        return self._page(counters, gauges, faults)

    def host_metrics(self, faults: Mapping[str, Any]) -> str:
        """The body of LMCache's /metrics."""
        with self._lock:
            counters = {s: v for s, v in self._visible(faults).items() if not is_vllms(s[0])}
            gauges = {
                series(name, labels): value
                for name, labels, value in self._play.gauges(self._tier_now(faults))
                if not is_vllms(name)
            }
        return self._page(counters, gauges, faults)

    def host_pages(self) -> Mapping[str, object]:
        """What else LMCache answers, as JSON by path."""
        faults = self.faults()
        with self._lock:
            return self._play.pages(self._tier_now(faults))

    def _name_blocks(
        self,
        tokens: Sequence[int],
        served: Prediction,
        faults: Mapping[str, Any],
        session_id: str | None,
    ) -> None:
        """Publish what the request names: every full block but those it found on the GPU."""
        if self._events is None or not self.spec.prefix_caching:
            return
        is_lost = bool(faults.get("lost_event"))
        for _ in range(2 if faults.get("preempted") else 1):
            self._events.stored(
                tokens, start=served.split.gpu_hit, session_id=session_id, is_lost=is_lost
            )

    def _page(self, counters: Values, gauges: Values, faults: Mapping[str, Any]) -> str:
        without = faults.get("missing_series", ())
        return render(counters, gauges, histogram=_COMPUTED, without=without)

    def _tier_now(self, faults: Mapping[str, Any]) -> TierNow:
        """While a request runs, as if what the last one stored were being stored."""
        chunks, until = self._open_store
        is_open = self._running > 0 or time.monotonic() < until
        resident = self._predictor.resident_chunks
        return TierNow(self.spec, resident, chunks if is_open else 0, faults)

    def _add_samples(self, samples: Iterable[Sample], engine: str) -> None:
        base = [("engine", engine), ("model_name", self.spec.model_name)]
        for name, labels, n in samples:
            self._bump(series(name, [*base, *labels] if is_vllms(name) else labels), n)

    def _cache_config(self) -> list[tuple[str, str]]:
        return [
            ("block_size", str(self.spec.block_size)),
            ("enable_prefix_caching", str(self.spec.prefix_caching)),
            ("engine", "0"),
            ("kv_offloading_size", self.spec.kv_offloading_size),
            ("num_gpu_blocks", str(self.spec.num_gpu_blocks)),
        ]

    def _start_series(self) -> None:
        """vLLM publishes each of its counters from the start, at 0."""
        for family, values in VLLM_COUNTERS.items():
            for value in values or ("",):
                self._add(family, 0, "0", value)
        self._add_samples(self._play.zeros, "0")
        self._publish()

    def _add(self, family: str, n: float, engine: str, value: str = "") -> None:
        labels = [("engine", engine), ("model_name", self.spec.model_name)]
        if value:
            labels.append((_EXTRA_LABEL.get(family, "source"), value))
        self._bump(series(f"vllm:{family}_total", labels), n)

    def _bump(self, key: Series, n: float) -> None:
        self._counters[key] = self._counters.get(key, 0) + n

    def _count_prompt(self, served: Prediction, faults: Mapping[str, Any]) -> None:
        engine = str(faults.get("engine", "0"))
        split = served.split
        moved = int(faults.get("miscount", 0))
        computed, local, external = split.computed - moved, split.gpu_hit + moved, split.host_loaded
        self._add("prompt_tokens", split.prompt_tokens, engine)
        self._add("prompt_tokens_by_source", computed, engine, "local_compute")
        self._add("prompt_tokens_by_source", local, engine, "local_cache_hit")
        self._add("prompt_tokens_by_source", external, engine, "external_kv_transfer")
        self._add("prompt_tokens_cached", local + external, engine)
        self._add("prompt_tokens_cached_by_source", local, engine, "device")
        source = self._play.cached_source
        self._add("prompt_tokens_cached_by_source", external, engine, source)
        # Without a prefix cache vLLM asks none (``KVCacheManager.get_computed_blocks``).
        queries = split.prompt_tokens if self.spec.prefix_caching else 0
        self._add("prefix_cache_queries", queries, engine)
        self._add("prefix_cache_hits", local, engine)
        if self.spec.host_chunks is not None:
            self._add("external_prefix_cache_queries", split.prompt_tokens - local, engine)
            self._add("external_prefix_cache_hits", external, engine)
        self._add("num_preemptions", 1 if faults.get("preempted") else 0, engine)
        labels = [("engine", engine), ("model_name", self.spec.model_name)]
        self._bump(series(f"{_COMPUTED}_sum", labels), computed)
        self._bump(series(f"{_COMPUTED}_count", labels), 1)
        self._bump(series(f"{_COMPUTED}_bucket", [*labels, ("le", "+Inf")]), 1)

    def _publish(self, *, later_s: float = 0.0) -> None:
        self._published.append((time.monotonic() + later_s, dict(self._counters)))
        # Only a lagging script reads old states; nobody lags by more than a few requests.
        del self._published[:-64]

    def _visible(self, faults: Mapping[str, Any]) -> Values:
        horizon = time.monotonic() - float(faults.get("metrics_lag_s", 0))
        due = [counters for at, counters in self._published if at <= horizon]
        return due[-1] if due else self._published[0][1]
