"""LMCache in vLLM's process, by its internal HTTP API (LMCache 0.5.6, ``LMCacheConnectorV1``)."""

from collections.abc import Mapping
from dataclasses import replace

from harness.counters.errors import MissingSeries
from harness.counters.pages import HostPages, Samples
from harness.counters.tiers.base import (
    Asked,
    CountedTier,
    HostReading,
    Measured,
    Rest,
    Unit,
    wait_if,
)
from servers.metrics import Series, gauge

# Gauges that call a function when they are read (Gauge.set_function), so they are live in the
# process that has them: LocalCPUBackend._setup_metrics, PinMonitor and
# BaseServiceFactory._create_health_monitor.
_RESIDENT = gauge("lmcache:local_cpu_hot_cache_count")
_PINNED = gauge("lmcache:pin_monitor_pinned_objects_count")
_HEALTHY = gauge("lmcache:lmcache_is_healthy")

RESIDENT = "lmcache_resident_chunks"
"""Our name for the chunks resident now; it may go down."""


class InProcessRest(Rest):
    """At rest: healthy, and nothing pinned.

    It stores inside the step that computed the chunks (``LMCacheConnectorV1Impl.wait_for_save``
    down to ``LocalCPUBackend.submit_put_task``, "synchronously put"), so when vLLM has counted the
    request as finished, its stores are over. Pins last from lookup to load. Unhealthy, LMCache
    neither stores nor loads, and answers go on.
    """

    def check(
        self,
        vllm: Samples,
        counters: Mapping[str, int],
        pages: HostPages | None,
        before: Mapping[str, int],
    ) -> HostReading | None:
        """The reading, once it is."""
        assert pages is not None
        samples = pages.metrics()
        is_healthy = of_worker(samples, _HEALTHY, pages)
        wait_if(None if is_healthy else "LMCache inside vLLM says that it is not healthy")
        pinned = of_worker(samples, _PINNED, pages)
        wait_if(f"LMCache inside vLLM has {pinned:.0f} chunks pinned" if pinned else None)
        return _reading(samples, pages)


class InProcessCounts(CountedTier):
    """Its ``lmcache:*`` counters are written every 10 s (``LMCacheStatsLogger``, log_interval), too
    late for one request; its gauges are live."""

    witness = RESIDENT
    loaded_sources = ("chunks_times_bytes",)
    state = (RESIDENT,)
    gauges = (_RESIDENT, _PINNED, _HEALTHY)
    has_pages = True

    def read(self, pages: HostPages) -> HostReading:
        """How many chunks are resident."""
        return _reading(pages.metrics(), pages)

    def rest(self, model_name: str, asked: Asked) -> Rest:
        """Healthy and unpinned."""
        return InProcessRest()

    def measured(self, gpu: Measured, moved: Mapping[str, int], unit: Unit) -> Measured:
        """The chunks a load must have moved, by its own rule.

        The lookup's hit ends with a chunk, and counts one token less when it is the whole prompt
        (``LMCacheConnectorV1Impl.get_num_new_matched_tokens``); from the chunk the GPU hit ends in
        on, whole chunks move (``start_load_kv``). What was stored is not known: only how many
        chunks are resident is, and stores evict.
        """
        split = gpu.split
        if split.host_loaded == 0:
            return replace(
                gpu, loaded_bytes=0, loaded_source=self.loaded_sources[0],
                chunk_bytes=unit.n_bytes,
            )  # fmt: skip
        end = split.gpu_hit + split.host_loaded
        if end + 1 == split.prompt_tokens and split.prompt_tokens % unit.tokens == 0:
            end += 1
        hit_chunks, rest = divmod(end, unit.tokens)
        if rest:
            return replace(
                gpu,
                chunk_bytes=unit.n_bytes,
                disagreement=f"the load ends at token {end}, LMCache's chunks of {unit.tokens} do not",
            )
        loaded = hit_chunks - split.gpu_hit // unit.tokens
        return replace(
            gpu,
            loaded_bytes=unit.bytes_of(loaded),
            loaded_source=self.loaded_sources[0],
            chunk_bytes=unit.n_bytes,
        )


def _reading(samples: Samples, pages: HostPages) -> HostReading:
    return HostReading({RESIDENT: int(of_worker(samples, _RESIDENT, pages))}, samples)


def of_worker(samples: Samples, series: Series, pages: HostPages) -> float:
    """The worker's value: the scheduler's half of the connector has the same gauges, always 0."""
    names = set()
    for labels, value in samples.get(series.name, ()):
        if labels.get("role") == "worker":
            if labels.get("served_model_name") == pages.model_name:
                return value
            names.add(str(labels.get("served_model_name")))
    raise MissingSeries(
        f"{pages.where} exports no {series.named} of a worker that serves {pages.model_name!r}"
        + (f"; it has {sorted(names)}" if names else ""),
        hint="kvcliff knows LMCache 0.5.6; install the pinned versions (make setup)",
    )


TIER = InProcessCounts()
