"""vLLM's own offloading (``OffloadingConnector``; vLLM 0.32)."""

from collections.abc import Iterator
from typing import Any, Final

from servers.ports import Ports
from servers.tiers.base import Asked, HostTier, ServedTier, Transfer
from servers.tiers.play import Play, PlayedTier, Sample, TierNow
from sim.geometry import host_bytes
from sim.predict import Prediction

_BYTES_PER_S: Final = 10e9  # of the pretended copies


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
        return ["--kv-offloading-size", str(host.gib), "--kv-offloading-backend", "native"]

    def facts(self, asked: Asked) -> dict[str, Any]:
        """The GiB it was given: vLLM 0.32 publishes no more (0.33: ``kv_offload_config_info``)."""
        size = asked.cache.get("kv_offloading_size", "None")
        return {"host_bytes": None if size == "None" else host_bytes(float(size))}

    def play(self) -> Play:
        return NativePlay()


class NativePlay(Play):
    """Bytes and seconds of copies.

    Deprecated samples are the only ones of the connector's that exist from the start
    (``OffloadPromMetrics.__init__``); every other one appears with its first value.
    """

    cached_source = "host"
    zeros = tuple(
        (f"vllm:kv_offload_total_{what}_total", (("transfer_type", way),), 0.0)
        for what in ("bytes", "time")
        for way in ("CPU_to_GPU", "GPU_to_CPU")
    )

    def loaded(self, spec: PlayedTier, served: Prediction, *, evicted: int) -> Iterator[Sample]:
        return _copied("load", "CPU_to_GPU", spec.bytes_of(served.moved_tokens))

    def stored(self, spec: PlayedTier, served: Prediction) -> Iterator[Sample]:
        n_bytes = spec.bytes_of(served.stored_chunks * spec.chunk_tokens)
        return _copied("store", "GPU_to_CPU", n_bytes)

    def gauges(self, now: TierNow) -> Iterator[Sample]:
        share = now.open_chunks / now.spec.host_chunks if now.spec.host_chunks else 0.0
        yield "vllm:kv_offload_cpu_cache_usage_perc", (), share
        yield "vllm:kv_offload_cpu_cache_write_usage_perc", (), share
        yield "vllm:kv_offload_cpu_cache_read_usage_perc", (), 0.0


def _copied(what: str, way: str, n_bytes: int) -> Iterator[Sample]:
    if n_bytes:
        yield f"vllm:kv_offload_{what}_bytes_total", (), n_bytes
        yield f"vllm:kv_offload_{what}_time_total", (), n_bytes / _BYTES_PER_S
        yield "vllm:kv_offload_total_bytes_total", (("transfer_type", way),), n_bytes


TIER = NativeOffload()
