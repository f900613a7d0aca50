"""What the loopback server keeps: its tiers, its counters as both engines publish them, its ledger.

Metric names, labels and JSON shapes are those read from vLLM 0.32.0 (``v1/metrics/loggers.py``)
and from a running LMCache 0.5.6 MP server. LMCache publishes a counter only once it has moved.
"""

import hashlib
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from servers.fake import tiers as fake_tiers
from servers.fake.script import Script
from servers.fake.spec import FakeSpec
from sim.predict import Prediction, Predictor
from sim.tiers.host import align_up

Series = tuple[str, tuple[tuple[str, str], ...]]
Counters = dict[Series, float]

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

    def __init__(self, spec: FakeSpec, script: Script, *, ledger: Path | None = None) -> None:
        self.spec = spec
        self.script = script
        self.ledger: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        drop_stores = bool(script.always().get("drop_stores"))
        self._predictor = Predictor(spec.tiers(drop_stores=drop_stores))
        self._open_store = (0, 0.0)  # chunks, and until when
        self._created = time.time()
        self._arrived = 0
        self._running = 0
        self._counters: Counters = {}
        self._published: list[tuple[float, Counters]] = []
        self._file: IO[str] | None = ledger.open("a", encoding="utf-8") if ledger else None
        self._start_series()

    def close(self) -> None:
        """Close the ledger file."""
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
        self, prompt: Sequence[int], ids: Sequence[int], faults: Mapping[str, Any]
    ) -> Prediction:
        """Take ``prompt`` through the tiers and count it, as vLLM does by its first token."""
        with self._lock:
            served = self._predictor.request(prompt, len(ids), output_ids=ids)
            served = fake_tiers.as_tier_counts(self.spec, served)
            self._running += 1
            self._count_prompt(served, faults)
            self._publish()
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
            self._add_of_tier(fake_tiers.store_samples(self.spec, served), engine)
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
            series = {s: v for s, v in self._visible(faults).items() if s[0].startswith("vllm:")}
            base = [("engine", "0"), ("model_name", self.spec.model_name)]
            # Usage is back to 0 as soon as a request ends; while one runs any share will do.
            gauges: Counters = {
                _series("vllm:num_requests_running", base): self._running,
                _series("vllm:num_requests_waiting", base): 0,
                _series("vllm:kv_cache_usage_perc", base): 0.5 if self._running else 0,
                _series("vllm:cache_config_info", self._cache_config()): 1,
            }
            gauges |= {
                _series(f"vllm:{name}", [*base, *labels]): value
                for name, labels, value in self._offload_gauges()
            }
            for name, labels in series:
                # Start times that look like counts: prometheus_client writes one per counter.
                gauges[name.removesuffix("_total") + "_created", labels] = self._created
        return _render(series, gauges, faults)

    def host_metrics(self, faults: Mapping[str, Any]) -> str:
        """The body of LMCache's /metrics."""
        with self._lock:
            # A counter appears with its first event, as OpenTelemetry's exporter does it.
            series = {
                s: v for s, v in self._visible(faults).items() if v and s[0].startswith("lmcache")
            }
            tag = [("backend", "dram"), ("l1_tag", "_default")]
            used, total = self._host_bytes()
            gauges: Counters = {
                _series("lmcache_mp_event_bus_queue_depth", []): 0,
                _series("lmcache_mp_l1_memory_usage_bytes", tag): used,
                _series("lmcache_mp_l1_usage_ratio", tag): used / total if total else 0,
                _series("lmcache_mp_l1_staging_bytes", tag): 0,
                _series("lmcache_mp_active_prefetch_jobs", []): 0,
            }
        return _render(series, gauges, faults)

    def in_process_metrics(self, faults: Mapping[str, Any]) -> str:
        """The body of /metrics of LMCache's internal API, on the worker's port."""
        with self._lock:
            resident = self._predictor.resident_chunks
            gauges = {
                _series(f"lmcache:{name}", labels): value
                for name, labels, value in fake_tiers.in_process_gauges(
                    self.spec, resident=resident, faults=faults
                )
            }
        return _render({}, gauges, faults)

    def host_status(self) -> dict[str, Any]:
        """The body of LMCache's GET /status, as far as anybody here reads it."""
        with self._lock:
            used, total = self._host_bytes()
            count = self._predictor.resident_chunks
        manager = {
            "is_healthy": True,
            "total_object_count": count,
            "write_locked_count": 0,
            "read_locked_count": 0,
            "temporary_count": 0,
            "staging_object_count": 0,
            "staging_bytes": 0,
            "memory_used_bytes": used,
            "memory_total_bytes": total,
            "memory_configured_bytes": total,
            "capacity_bytes_by_backend": {"dram": total},
            "memory_usage_ratio": used / total if total else 0.0,
        }
        return {
            "is_healthy": True,
            "engine_type": "MPCacheServer",
            "chunk_size": self.spec.chunk_tokens,
            "active_sessions": 0,
            "storage_manager": {
                "is_healthy": True,
                "l1_managers": {"_default": manager},
                "l1_eviction_controllers": {"_default": self._eviction()},
                "l1_manager": manager,
                "l1_eviction_controller": self._eviction(),
            },
            "active_prefetch_jobs": 0,
        }

    def host_config(self) -> dict[str, Any]:
        """The body of LMCache's GET /config, as far as anybody here reads it."""
        eviction = {
            "eviction_policy": self.spec.policy,
            "trigger_watermark": self.spec.watermark,
            "eviction_ratio": self.spec.evict_ratio,
        }
        memory = {"size_in_bytes": self._host_bytes()[1], "use_lazy": False, "align_bytes": 4096}
        return {
            "mp": {"chunk_size": self.spec.chunk_tokens, "supported_transfer_mode": "auto"},
            "storage_manager": {
                "l1_manager_config": {"memory_config": memory, "eviction": eviction},
                "eviction_config": eviction,
                "l2_adapter_config": {"adapters": []},
            },
        }

    def _eviction(self) -> dict[str, Any]:
        return {
            "is_healthy": True,
            "eviction_policy": self.spec.policy,
            "trigger_watermark": self.spec.watermark,
            "eviction_ratio": self.spec.evict_ratio,
        }

    def _host_bytes(self) -> tuple[int, int]:
        """(used, total) bytes of the host tier."""
        unit = align_up(self.spec.chunk_bytes)
        return self._predictor.resident_chunks * unit, self.spec.total_host_bytes()

    def _offload_gauges(self) -> Iterator[fake_tiers.Sample]:
        """Exported from the first step on; while a request runs, as if it were being stored."""
        if not self._arrived:
            return iter(())
        chunks, until = self._open_store
        is_open = self._running > 0 or time.monotonic() < until
        return fake_tiers.offload_gauges(self.spec, open_chunks=chunks if is_open else 0)

    def _add_of_tier(self, samples: Iterator[fake_tiers.Sample], engine: str) -> None:
        base = [("engine", engine), ("model_name", self.spec.model_name)]
        for name, labels, n in samples:
            self._bump(_series(f"vllm:{name}", [*base, *labels]), n)

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
        if self.spec.kind == "native":
            zeros = ((n, (("transfer_type", t),), 0.0) for n, t in fake_tiers.ZEROS_OF_NATIVE)
            self._add_of_tier(zeros, "0")
        self._publish()

    def _add(self, family: str, n: float, engine: str, value: str = "") -> None:
        labels = [("engine", engine), ("model_name", self.spec.model_name)]
        if value:
            labels.append((_EXTRA_LABEL.get(family, "source"), value))
        self._bump(_series(f"vllm:{family}_total", labels), n)

    def _bump(self, series: Series, n: float) -> None:
        self._counters[series] = self._counters.get(series, 0) + n

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
        from_tier = "host" if self.spec.kind in ("native", "simple") else "external_unspecified"
        self._add("prompt_tokens_cached_by_source", external, engine, from_tier)
        # Without a prefix cache vLLM asks none (``KVCacheManager.get_computed_blocks``).
        queries = split.prompt_tokens if self.spec.prefix_caching else 0
        self._add("prefix_cache_queries", queries, engine)
        self._add("prefix_cache_hits", local, engine)
        if self.spec.host_chunks is not None:
            self._add("external_prefix_cache_queries", split.prompt_tokens - local, engine)
            self._add("external_prefix_cache_hits", external, engine)
            self._add_of_tier(fake_tiers.load_samples(self.spec, served), engine)
            if self.spec.kind == "lmcache-mp":
                self._count_host(served)
        labels = [("engine", engine), ("model_name", self.spec.model_name)]
        self._bump(_series(f"{_COMPUTED}_sum", labels), computed)
        self._bump(_series(f"{_COMPUTED}_count", labels), 1)
        self._bump(_series(f"{_COMPUTED}_bucket", [*labels, ("le", "+Inf")]), 1)

    def _count_host(self, served: Prediction) -> None:
        chunk = self.spec.chunk_tokens
        asked = served.split.prompt_tokens // chunk
        lookup = [("cache_salt", ""), ("model_name", self.spec.model_name)]
        store = [("cache_salt", ""), ("l1_tag", "_default")]
        lost = asked - served.hit_chunks - served.stored_chunks
        for name, labels, n in (
            ("lookup_requested_tokens", lookup, asked * chunk),
            ("lookup_hit_tokens", lookup, served.hit_chunks * chunk),
            ("lookup_hit_l1_tokens", lookup, served.hit_chunks * chunk),
            ("lookups_requests", lookup, 1),
            ("l1_write_chunks", store, served.stored_chunks),
            # LMCache counts released read locks here, loaded or not: more than was loaded.
            ("l1_read_chunks", store, served.hit_chunks),
            ("l1_allocation_failure_chunks", [("during", "l1_store"), lookup[1]], lost),
        ):
            self._bump(_series(f"lmcache_mp_{name}_total", labels), n)
        evicted = _series("lmcache_mp_l1_evicted_chunks_total", store)
        self._counters[evicted] = self._predictor.evicted_chunks

    def _publish(self, *, later_s: float = 0.0) -> None:
        self._published.append((time.monotonic() + later_s, dict(self._counters)))
        # Only a lagging script reads old states; nobody lags by more than a few requests.
        del self._published[:-64]

    def _visible(self, faults: Mapping[str, Any]) -> Counters:
        horizon = time.monotonic() - float(faults.get("metrics_lag_s", 0))
        due = [counters for at, counters in self._published if at <= horizon]
        return due[-1] if due else self._published[0][1]


def _series(name: str, labels: Sequence[tuple[str, str]]) -> Series:
    return name, tuple(sorted(labels))


def _render(counters: Counters, gauges: Counters, faults: Mapping[str, Any]) -> str:
    """Prometheus text format 0.0.4, as prometheus_client writes it."""
    missing = set(faults.get("missing_series", ()))
    lines = [
        "# HELP python_info Python platform information",
        "# TYPE python_info gauge",
        'python_info{implementation="CPython",major="3"} 1.0',
    ]
    last_family = ""
    # Sorted: the samples of one family must follow each other.
    every = [(s, "counter") for s in sorted(counters)] + [(s, "gauge") for s in sorted(gauges)]
    for series, kind in every:
        name, labels = series
        if name in missing:
            continue
        is_histogram = kind == "counter" and name.startswith(_COMPUTED)
        family = _COMPUTED if is_histogram else name
        if family != last_family:
            shown = "histogram" if is_histogram else kind
            lines += [f"# HELP {family} {family}", f"# TYPE {family} {shown}"]
            last_family = family
        text = ",".join(f'{key}="{_escape(value)}"' for key, value in labels)
        value = float((gauges if kind == "gauge" else counters)[series])
        lines.append(f"{name}{{{text}}} {value!r}" if text else f"{name} {value!r}")
    return "\n".join(lines) + "\n"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
