"""vLLM's own offloading (``OffloadingConnector``; vLLM 0.32)."""

from typing import Any

from servers.ports import Ports
from servers.tiers.base import Asked, HostTier, ServedTier, Transfer
from sim.geometry import host_bytes


class NativeOffload(ServedTier):
    """Blocks in pinned host memory, evicted when a store needs room."""

    connector = "OffloadingConnector"
    not_on_cpu = "vLLM's CPU build refuses it: CPU offloading needs a CUDA-alike or XPU device"
    keeps_blocks = True
    size_is: str | None = "for all workers, --kv-offloading-size"
    lies_in_shm = True  # shared_offload_region.py
    prior_chunk_s = 0.05e-3  # blocks are small

    def flags(self, host: HostTier, ports: Ports, transfer: Transfer) -> list[str]:
        """GiB over all ranks (``VllmConfig._post_init_kv_transfer_config``)."""
        del ports, transfer
        return ["--kv-offloading-size", str(host.gib), "--kv-offloading-backend", "native"]

    def facts(self, asked: Asked) -> dict[str, Any]:
        """The GiB it was given: vLLM 0.32 publishes no more (0.33: ``kv_offload_config_info``)."""
        size = asked.cache.get("kv_offloading_size", "None")
        return {"host_bytes": None if size == "None" else host_bytes(float(size))}


TIER = NativeOffload()
