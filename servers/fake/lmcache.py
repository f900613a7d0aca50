"""LMCache, beside vLLM and inside it, as the loopback server shows it: what anybody here reads.

Names, labels and JSON shapes are those of LMCache 0.5.6: a running MP server's, and
``observability.py`` and ``v1/internal_api_server`` of the one in vLLM's process.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from servers.fake.pages import Sample
from servers.fake.play import Play, TierNow
from servers.fake.spec import FakeSpec
from sim.predict import Prediction
from sim.units import GIB


class ServerPlay(Play):
    """Its server; a counter appears with its first event, as OpenTelemetry's exporter does it."""

    def loaded(self, spec: FakeSpec, served: Prediction, *, evicted: int) -> Iterator[Sample]:
        chunk = spec.chunk_tokens
        asked = served.split.prompt_tokens // chunk
        lookup = (("cache_salt", ""), ("model_name", spec.model_name))
        store = (("cache_salt", ""), ("l1_tag", "_default"))
        lost = asked - served.hit_chunks - served.stored_chunks
        for name, labels, n in (
            ("lookup_requested_tokens", lookup, asked * chunk),
            ("lookup_hit_tokens", lookup, served.hit_chunks * chunk),
            ("lookup_hit_l1_tokens", lookup, served.hit_chunks * chunk),
            ("lookups_requests", lookup, 1),
            ("l1_write_chunks", store, served.stored_chunks),
            # LMCache counts released read locks here, loaded or not: more than was loaded.
            ("l1_read_chunks", store, served.hit_chunks),
            ("l1_allocation_failure_chunks", (("during", "l1_store"), lookup[1]), lost),
            ("l1_evicted_chunks", store, evicted),
        ):
            if n:
                yield f"lmcache_mp_{name}_total", labels, n

    def gauges(self, now: TierNow) -> Iterator[Sample]:
        tag = (("backend", "dram"), ("l1_tag", "_default"))
        yield "lmcache_mp_event_bus_queue_depth", (), 0
        yield "lmcache_mp_l1_memory_usage_bytes", tag, now.used_bytes
        yield "lmcache_mp_l1_usage_ratio", tag, now.usage
        yield "lmcache_mp_l1_staging_bytes", tag, 0
        yield "lmcache_mp_active_prefetch_jobs", (), 0

    def pages(self, now: TierNow) -> Mapping[str, object]:
        return {
            "/healthcheck": {"status": "healthy"},
            "/status": _status(now),
            "/config": _config(now.spec),
        }


class InProcessPlay(Play):
    """Its internal API; its counters come too late to be shown."""

    def gauges(self, now: TierNow) -> Iterator[Sample]:
        """Of the worker, and of the scheduler's half of the connector: always 0."""
        is_healthy = not now.faults.get("unhealthy")
        for role, chunks, health in (("scheduler", 0, False), ("worker", now.resident, is_healthy)):
            labels = (
                ("model_name", "model"),
                ("role", role),
                ("served_model_name", now.spec.model_name),
                ("worker_id", "0"),
            )
            pinned = int(now.faults.get("pinned_chunks", 0))
            yield "lmcache:local_cpu_hot_cache_count", labels, chunks
            yield "lmcache:pin_monitor_pinned_objects_count", labels, pinned
            yield "lmcache:lmcache_is_healthy", labels, float(health)

    def pages(self, now: TierNow) -> Mapping[str, object]:
        settings = {
            "chunk_size": now.spec.chunk_tokens,
            "local_cpu": True,
            "max_local_cpu_size": now.spec.total_host_bytes() / GIB,
            "cache_policy": now.spec.policy,
            "save_unfull_chunk": False,
            "use_layerwise": False,
            "enable_async_loading": False,
            "local_disk": None,
            "remote_url": None,
        }
        changed: Mapping[str, Any] = now.faults.get("lmcache_conf", {})
        return {"/lmc_version": "0.5.6", "/conf": {**settings, **changed}}


def _status(now: TierNow) -> dict[str, Any]:
    total = now.spec.total_host_bytes()
    manager = {
        "is_healthy": True,
        "total_object_count": now.resident,
        "write_locked_count": 0,
        "read_locked_count": 0,
        "temporary_count": 0,
        "staging_object_count": 0,
        "staging_bytes": 0,
        "memory_used_bytes": now.used_bytes,
        "memory_total_bytes": total,
        "memory_configured_bytes": total,
        "capacity_bytes_by_backend": {"dram": total},
        "memory_usage_ratio": now.usage,
    }
    eviction = {"is_healthy": True, **_eviction(now.spec)}
    return {
        "is_healthy": True,
        "engine_type": "MPCacheServer",
        "chunk_size": now.spec.chunk_tokens,
        "active_sessions": 0,
        "storage_manager": {
            "is_healthy": True,
            "l1_managers": {"_default": manager},
            "l1_eviction_controllers": {"_default": eviction},
            "l1_manager": manager,
            "l1_eviction_controller": eviction,
        },
        "active_prefetch_jobs": 0,
    }


def _config(spec: FakeSpec) -> dict[str, Any]:
    memory = {"size_in_bytes": spec.total_host_bytes(), "use_lazy": False, "align_bytes": 4096}
    return {
        "mp": {"chunk_size": spec.chunk_tokens, "supported_transfer_mode": "auto"},
        "storage_manager": {
            "l1_manager_config": {"memory_config": memory, "eviction": _eviction(spec)},
            "eviction_config": _eviction(spec),
            "l2_adapter_config": {"adapters": []},
        },
    }


def _eviction(spec: FakeSpec) -> dict[str, Any]:
    return {
        "eviction_policy": spec.policy,
        "trigger_watermark": spec.watermark,
        "eviction_ratio": spec.evict_ratio,
    }
