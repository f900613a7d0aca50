"""vLLM's own offloading and its simple CPU offload, as the loopback server shows them.

Names, labels and lifetimes as read in vLLM 0.32.0 (``kv_connector/v1/offloading/metrics.py``,
``v1/kv_offload/cpu/manager.py``, ``v1/simple_kv_offload/metrics.py``).
"""

from collections.abc import Iterator
from dataclasses import replace

from servers.fake.pages import Sample
from servers.fake.play import Play, TierNow
from servers.fake.spec import FakeSpec
from sim.predict import Prediction
from sim.split import TokenSplit
from sim.tiers.settings import TierKind

_BYTES_PER_S = 10e9
"""How fast the pretended copies are."""


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

    def loaded(self, spec: FakeSpec, served: Prediction, *, evicted: int) -> Iterator[Sample]:
        return _copied("load", "CPU_to_GPU", spec.bytes_of(served.moved_tokens))

    def stored(self, spec: FakeSpec, served: Prediction) -> Iterator[Sample]:
        n_bytes = spec.bytes_of(served.stored_chunks * spec.chunk_tokens)
        return _copied("store", "GPU_to_CPU", n_bytes)

    def gauges(self, now: TierNow) -> Iterator[Sample]:
        share = now.open_chunks / now.spec.host_chunks if now.spec.host_chunks else 0.0
        yield "vllm:kv_offload_cpu_cache_usage_perc", (), share
        yield "vllm:kv_offload_cpu_cache_write_usage_perc", (), share
        yield "vllm:kv_offload_cpu_cache_read_usage_perc", (), 0.0


class SimplePlay(Play):
    """Blocks of loads; of stores it counts none. Played as ``native``, which is exact while nothing is evicted."""

    simulated_as: TierKind | None = "native"
    cached_source = "host"

    def counted(self, spec: FakeSpec, served: Prediction) -> Prediction:
        """It never loads a prompt's last block.

        (``SimpleCPUOffloadScheduler.get_num_new_matched_tokens``: max_hit_len.)
        """
        split, block = served.split, spec.block_size
        if split.computed > 0:
            return served
        return replace(
            served,
            split=TokenSplit(split.prompt_tokens, block, split.gpu_hit, split.host_loaded - block),
            loaded_chunks=served.loaded_chunks - 1,
            moved_tokens=served.moved_tokens - block,
        )

    def loaded(self, spec: FakeSpec, served: Prediction, *, evicted: int) -> Iterator[Sample]:
        if served.moved_tokens:
            blocks = served.moved_tokens // spec.block_size
            yield "vllm:simple_kv_offload_load_blocks_total", (), blocks

    def gauges(self, now: TierNow) -> Iterator[Sample]:
        yield "vllm:simple_kv_offload_pending_store_blocks", (), now.open_chunks
        # And the pool's null block.
        yield "vllm:simple_kv_offload_used_blocks", (), now.open_chunks + 1
        capacity = ("capacity_blocks", str(now.spec.host_chunks))
        others = (("backend", "cpu"), ("lazy_offload", "false"), ("page_cache", "false"))
        yield "vllm:simple_kv_offload_info", (*others, capacity), 1.0


def _copied(what: str, way: str, n_bytes: int) -> Iterator[Sample]:
    if n_bytes:
        yield f"vllm:kv_offload_{what}_bytes_total", (), n_bytes
        yield f"vllm:kv_offload_{what}_time_total", (), n_bytes / _BYTES_PER_S
        yield "vllm:kv_offload_total_bytes_total", (("transfer_type", way),), n_bytes
