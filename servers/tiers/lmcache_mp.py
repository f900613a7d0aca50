"""LMCache's server beside vLLM (``LMCacheMPConnector``; LMCache 0.5.6, vLLM 0.32)."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from servers.errors import LaunchError
from servers.ports import HOST, Ports
from servers.tiers.base import (
    UNKNOWN_SETTINGS,
    Asked,
    HostTier,
    ServedTier,
    Transfer,
    answer_of,
    flat,
    lmcache_version,
    needed_url,
    transfer_config,
)
from servers.tiers.play import Play, PlayedTier, Sample, TierNow
from sim.predict import Prediction

# The module behind the `lmcache` command; `lmcache.v1.multiprocess.server` would start without the
# HTTP server that carries /metrics, /status and /config (LMCache 0.5.6).
_MODULE: Final = "lmcache.cli.main"
# Seconds vLLM waits for LMCache: the default 300 would hide a dead tier for five minutes.
_MQ_TIMEOUT_S: Final = 10
_HEARTBEAT_S: Final = 1
# Log lines of vLLM 0.32. The class with the Upstream suffix is vLLM's own copy, taken silently when
# lmcache's module does not import; it stores and rounds differently.
_EXTERNAL: Final = "Using external LMCacheMPConnector"
_UPSTREAM: Final = re.compile(
    r"LMCacheMPConnectorUpstream|External LMCacheMPConnector is not avail"
)
_TRANSFER: Final = re.compile(r"Creating transfer context \(device_type=\w+, mode=(\w+)\)")


class LMCacheServer(ServedTier):
    """Chunks in a process of their own, evicted at a watermark."""

    connector = "LMCacheMPConnector"
    has_lmcache = True
    has_server = True
    takes_policy = True
    size_is = "per server, --l1-size-gb"
    lies_in_shm = True  # where it is large enough; LMCache says so where it is not

    def flags(self, host: HostTier, ports: Ports, transfer: Transfer) -> list[str]:
        """The connector, and where and how it reaches the server."""
        extra: dict[str, str | int] = {
            "lmcache.mp.host": f"tcp://{HOST}",
            "lmcache.mp.port": ports.connector,
            "lmcache.mp.mq_timeout": _MQ_TIMEOUT_S,
            "lmcache.mp.heartbeat_interval": _HEARTBEAT_S,
            "lmcache.mp.mp_transfer_mode": transfer,
        }
        return transfer_config(self.connector, kv_connector_extra_config=extra)

    def server_argv(self, host: HostTier, ports: Ports, transfer: Transfer) -> tuple[str, ...]:
        """``lmcache server`` with a store of all its size from the start.

        Lazily grown memory rounds the size up to 64 MiB on CUDA, and the watermark then means a
        share of what has grown so far.
        """
        options = {
            "--host": HOST,
            "--port": ports.connector,
            "--http-host": HOST,
            "--http-port": ports.http,
            "--chunk-size": host.chunk_tokens,
            "--l1-size-gb": host.gib,
            "--eviction-policy": host.policy,
            "--eviction-trigger-watermark": host.watermark,
            "--eviction-ratio": host.evict_ratio,
            "--supported-transfer-mode": transfer,
        }
        return ("-m", _MODULE, "server", *flat(options), "--no-l1-use-lazy")

    def facts(self, asked: Asked) -> dict[str, Any]:
        """By the server's own HTTP side, and the mode of transfer by vLLM's log."""
        url = needed_url(asked)
        config = answer_of(asked.client, f"{url}/config")
        mode = _TRANSFER.search(asked.log)
        try:
            manager = config["storage_manager"]["l1_manager_config"]
            eviction = manager["eviction"]
            return {
                "lmcache_version": lmcache_version(asked.client, url),
                "chunk_tokens": int(config["mp"]["chunk_size"]),
                "host_bytes": int(manager["memory_config"]["size_in_bytes"]),
                "policy": str(eviction["eviction_policy"]),
                "watermark": float(eviction["trigger_watermark"]),
                "evict_ratio": float(eviction["eviction_ratio"]),
                "transfer": mode[1] if mode else None,
            }
        except (LookupError, TypeError) as error:
            raise LaunchError(
                f"LMCache's /config lacks {error}: its effective settings are unknown",
                hint=UNKNOWN_SETTINGS,
            ) from error

    def wanted(self, host: HostTier) -> dict[str, object]:
        """Everything it was given."""
        return host.settings()

    def seen_connector(self, name: str, log: str) -> str:
        """vLLM's own copy of the connector has the same name in the line that counts."""
        if _UPSTREAM.search(log):
            return f"{name}Upstream"
        return name if _EXTERNAL in log else f"{name} of unknown origin"

    def play(self) -> Play:
        return ServerPlay()


class ServerPlay(Play):
    """A counter appears with its first event, as OpenTelemetry's exporter does it; pages have what
    is read of them."""

    def loaded(self, spec: PlayedTier, served: Prediction, *, evicted: int) -> Iterator[Sample]:
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


def _status(now: TierNow) -> dict[str, Any]:
    manager = {
        "total_object_count": now.resident,
        "write_locked_count": 0,
        "read_locked_count": 0,
        "staging_object_count": 0,
        "memory_used_bytes": now.used_bytes,
        "memory_usage_ratio": now.usage,
    }
    return {
        "active_sessions": 0,
        "active_prefetch_jobs": 0,
        "storage_manager": {
            "l1_managers": {"_default": manager},
            "l1_eviction_controllers": {"_default": _eviction(now.spec)},
        },
    }


def _config(spec: PlayedTier) -> dict[str, Any]:
    memory = {"size_in_bytes": spec.total_host_bytes()}
    manager = {"memory_config": memory, "eviction": _eviction(spec)}
    return {
        "mp": {"chunk_size": spec.chunk_tokens},
        "storage_manager": {"l1_manager_config": manager},
    }


def _eviction(spec: PlayedTier) -> dict[str, Any]:
    return {
        "eviction_policy": spec.policy,
        "trigger_watermark": spec.watermark,
        "eviction_ratio": spec.evict_ratio,
    }


TIER = LMCacheServer()
