"""vLLM's simple CPU offload, on vLLM's page (vLLM 0.32, ``SimpleCPUOffloadConnector``)."""

from collections.abc import Mapping
from dataclasses import replace

from harness.counters.tiers.base import Asked, CountedTier, Measured, Rest, Unit
from harness.counters.tiers.native import OffloadRest
from servers.metrics import Series, gauge


class SimpleCounts(CountedTier):
    """Blocks of loads that have finished (SimpleCPUOffloadScheduler.update_connector_output).

    It counts no bytes; its save_outcomes_total leaves ordinary stores out. The series appear with
    their first value (SimpleCPUOffloadPromMetrics.observe).
    """

    witness = "simple_load_blocks"
    loaded_sources = ("load_blocks_times_bytes",)
    vllm_series = (
        Series("simple_load_blocks", "vllm:simple_kv_offload_load_blocks_total", "lazy"),
    )
    # used_blocks never reaches 0: the pool's null block counts (SimpleCPUOffloadScheduler).
    gauges = (gauge("vllm:simple_kv_offload_pending_store_blocks", presence="optional"),)

    def rest(self, model_name: str, asked: Asked) -> Rest:
        """As of vLLM's other offloading: nothing pending, and seen twice the same."""
        return OffloadRest(self.gauges, model_name)

    def measured(self, gpu: Measured, moved: Mapping[str, int], unit: Unit) -> Measured:
        """Blocks loaded; a chunk is one block here."""
        blocks = moved["simple_load_blocks"]
        disagreement = None
        if blocks * unit.tokens != gpu.split.host_loaded:
            disagreement = (
                f"vLLM counts {gpu.split.host_loaded} tokens from the host and its offload "
                f"{blocks} blocks of {unit.tokens} loaded"
            )
        return replace(
            gpu,
            loaded_bytes=unit.bytes_of(blocks),
            loaded_source=self.loaded_sources[0],
            chunk_bytes=unit.n_bytes,
            disagreement=disagreement,
        )


TIER = SimpleCounts()
