"""LMCache's server beside vLLM (``LMCacheMPConnector``; LMCache 0.5.6, vLLM 0.32)."""

import re
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
        del host
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
        return {
            "chunk_tokens": host.chunk_tokens,
            "policy": host.policy,
            "watermark": host.watermark,
            "evict_ratio": host.evict_ratio,
        }

    def seen_connector(self, name: str, log: str) -> str:
        """vLLM's own copy of the connector has the same name in the line that counts."""
        if _UPSTREAM.search(log):
            return f"{name}Upstream"
        return name if _EXTERNAL in log else f"{name} of unknown origin"


TIER = LMCacheServer()
