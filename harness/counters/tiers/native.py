"""vLLM's own offloading, on vLLM's page (vLLM 0.32, ``OffloadingConnector``)."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from harness.counters.pages import HostPages, Samples, gauge_values
from harness.counters.tiers.base import (
    Asked,
    CountedTier,
    HostReading,
    Measured,
    NotYetError,
    Rest,
    Unit,
)
from servers.metrics import Series, gauge

OFFLOAD_GRACE_S = 1.0
"""How long an offloading gauge that stands still above 0 may hold up a settle that is else over.

vLLM 0.32 steps on while a copy is open (``has_pending_push_work``) and publishes the gauges with
the step that ends it, so they reach 0 by themselves. Where an engine goes idle before, the last
value stays until the next request, and waiting for 0 would make every request unsettled.
"""


@dataclass(slots=True)
class OffloadRest(Rest):
    """At rest: its gauges 0 and its counters still, seen twice.

    Twice, because the step after a request's end may still open a store, and only then makes the
    request's chunks the most recent (``OffloadingConnectorScheduler.build_connector_meta``). It
    follows at once; the second look comes ``settle.POLL_S`` later.
    """

    gauges: tuple[Series, ...]
    model_name: str
    seen: tuple[tuple[str, float], ...] | None = None
    since: float = 0.0

    def check(
        self,
        vllm: Samples,
        counters: Mapping[str, int],
        pages: HostPages | None,
        before: Mapping[str, int],
    ) -> HostReading | None:
        """Until it is; vLLM's page has everything."""
        values = gauge_values(vllm, self.gauges, self.model_name)
        self.check_state(values, counters, now=time.monotonic())
        return None

    def check_state(
        self, gauges: Mapping[str, float], counters: Mapping[str, int], *, now: float
    ) -> None:
        """Raise NotYetError until it is; ``now`` in seconds of a clock that never goes back."""
        seen = (*sorted(gauges.items()), *sorted(counters.items()))
        if seen != self.seen:
            self.seen, self.since = seen, now
            raise NotYetError("vLLM's offloading was not seen twice in the same state")
        busy = [f"{name} is {value:g}" for name, value in sorted(gauges.items()) if value]
        if busy and now - self.since < OFFLOAD_GRACE_S:
            raise NotYetError(", ".join(busy))


class NativeCounts(CountedTier):
    """Bytes and seconds of finished copies.

    The connector calls labels() when it first observes a value
    (OffloadPromMetrics._get_prometheus_metric). Bytes and seconds are the worker's, per finished
    copy (SingleDirectionOffloadingHandler.get_finished), and published with the step in which the
    copy is reported done (OffloadingConnectorScheduler.update_connector_output, then .get_stats):
    a load's before its request computes anything.
    """

    witness = "native_load_bytes"
    loaded_sources = ("kv_offload_load_bytes",)
    vllm_series = (
        Series("native_load_bytes", "vllm:kv_offload_load_bytes_total", "lazy"),
        Series("native_load_ns", "vllm:kv_offload_load_time_total", "lazy", per_unit=10**9),
        Series("native_store_bytes", "vllm:kv_offload_store_bytes_total", "lazy"),
        Series("native_alloc_failures", "vllm:kv_offload_allocation_failure_total", "lazy"),
    )
    # Shares of the store pinned by open copies (CPUOffloadingManager.get_stats); since vLLM 0.26.
    gauges = (
        gauge("vllm:kv_offload_cpu_cache_write_usage_perc", presence="optional"),
        gauge("vllm:kv_offload_cpu_cache_read_usage_perc", presence="optional"),
    )

    def rest(self, model_name: str, asked: Asked) -> Rest:
        """Its gauges, and its counters twice the same."""
        return OffloadRest(self.gauges, model_name)

    def measured(self, gpu: Measured, moved: Mapping[str, int], unit: Unit) -> Measured:
        """Bytes of the load, as its worker copied them.

        A load is whole blocks, from the GPU hit on, and counted in full when all of the prompt was
        found: then 0 tokens count as computed, although one is (``_lookup_complete_chunks``). What
        was stored stays unknown: it may be published with a later request's step.
        """
        loaded = moved["native_load_bytes"]
        tokens = gpu.split.host_loaded
        disagreement = None
        if bool(loaded) != bool(tokens):
            disagreement = f"vLLM counts {tokens} tokens from the host and its offloading {loaded} bytes loaded"
        return replace(
            gpu,
            loaded_bytes=loaded,
            loaded_source=self.loaded_sources[0],
            chunk_bytes=unit.n_bytes,
            disagreement=disagreement,
        )


TIER = NativeCounts()
