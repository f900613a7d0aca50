"""LMCache in vLLM's process (``LMCacheConnectorV1``; LMCache 0.5.6, vLLM 0.32)."""

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
    lmcache_version,
    needed_url,
    transfer_config,
)
from servers.tiers.play import Play, Sample, TierNow
from sim.geometry import host_bytes
from sim.units import GIB

_KEYS: Final = (
    "chunk_size", "local_cpu", "max_local_cpu_size", "cache_policy", "save_unfull_chunk",
    "use_layerwise", "enable_async_loading", "local_disk", "remote_url",
)  # fmt: skip
_OFF: Final = (
    "save_unfull_chunk", "use_layerwise", "enable_async_loading", "local_disk", "remote_url",
)  # fmt: skip
# Which of the two copies ran (``LMCacheConnectorV1.__init__``, option use_native).
_VLLMS_COPY: Final = "Initializing native LMCache connector"


class LMCacheInProcess(ServedTier):
    """Chunks in vLLM's own memory, read over LMCache's internal HTTP server."""

    connector = "LMCacheConnectorV1"
    not_on_cpu = (
        "on vLLM's CPU build LMCache finds no connector for the device and turns itself off: "
        "every request is answered, nothing is cached, and each takes 3 s more"
    )
    has_lmcache = True
    size_is = "per worker, max_local_cpu_size"
    is_per_worker = True

    def env(self, host: HostTier, ports: Ports) -> dict[str, str]:
        """LMCache's settings, and the HTTP server of its worker 0.

        It listens on the start + 1 + rank (LMCache 0.5.6 ``internal_api_server``). Prometheus's
        multi-process mode, the other way, would lose its live gauges and vLLM's process start time.
        """
        return {
            "LMCACHE_LOCAL_CPU": "True",
            "LMCACHE_MAX_LOCAL_CPU_SIZE": str(host.gib),
            "LMCACHE_CHUNK_SIZE": str(host.chunk_tokens),
            "LMCACHE_CACHE_POLICY": host.policy,
            "LMCACHE_INTERNAL_API_SERVER_ENABLED": "True",
            "LMCACHE_INTERNAL_API_SERVER_HOST": HOST,
            "LMCACHE_INTERNAL_API_SERVER_PORT_START": str(ports.http - 1),
            "LMCACHE_INTERNAL_API_SERVER_INCLUDE_INDEX_LIST": "1",
        }

    def flags(self, host: HostTier, ports: Ports, transfer: Transfer) -> list[str]:
        """The connector, without vLLM's hybrid manager.

        Its adapter takes one KV cache group (LMCacheConnectorV1 has no SupportsHMA); vLLM would
        switch the hybrid manager off by itself, with a warning only.
        """
        return ["--disable-hybrid-kv-cache-manager", *transfer_config(self.connector)]

    def facts(self, asked: Asked) -> dict[str, Any]:
        """By its internal API (``v1/internal_api_server/vllm/conf_api.py``)."""
        url = needed_url(asked)
        config = answer_of(asked.client, f"{url}/conf?names={','.join(_KEYS)}")
        if missing := sorted(set(_KEYS) - set(config)):
            raise LaunchError(
                f"LMCache's /conf lacks {', '.join(missing)}: its effective settings are unknown",
                hint=UNKNOWN_SETTINGS,
            )
        modelled = {"local_cpu": True} | dict.fromkeys(_OFF)
        return {
            "lmcache_version": lmcache_version(asked.client, url),
            "chunk_tokens": int(config["chunk_size"]),
            "host_bytes": host_bytes(float(config["max_local_cpu_size"])),
            "policy": str(config["cache_policy"]),
            "unlike_modelled": tuple(
                f"{name} is {config[name]!r}, asked {value or False!r}"
                for name, value in modelled.items()
                if bool(config[name]) != bool(value)
            ),
        }

    def wanted(self, host: HostTier) -> dict[str, object]:
        """Its chunk and policy."""
        return {"chunk_tokens": host.chunk_tokens, "policy": host.policy}

    def seen_connector(self, name: str, log: str) -> str:
        """vLLM's own copy of the connector goes by the same name."""
        return f"{name} of vLLM's own copy" if _VLLMS_COPY in log else name

    def play(self) -> Play:
        return InProcessPlay()


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


TIER = LMCacheInProcess()
