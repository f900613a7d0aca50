"""Every metric of vLLM's that kvcliff reads, and what a series is.

What a host tier adds stands in that tier's file of ``harness/counters/tiers``; together they are
``harness.counters.tiers.registry.ALL_SERIES``, which the doctor looks for in the engines' source.
A metric that an engine renames is one line: the new name in front, the old one among ``earlier``.
"""

from dataclasses import dataclass
from typing import Final, Literal

Presence = Literal["always", "lazy", "optional"]
Kind = Literal["counter", "gauge", "info"]


@dataclass(frozen=True, slots=True)
class Series:
    """One metric: our ``name`` for it and the exact Prometheus sample (``_total`` included).

    ``always``: exported from the first scrape on; absent means broken. ``lazy``: exported from its
    first event on, so absent means none yet. ``optional``: not in every version or transfer mode;
    absent stays absent in a Snapshot. ``per_unit``: what the sample is multiplied by to be kept as
    a whole number; 1 is a count already. ``earlier``: names the same number had in older versions.
    """

    name: str
    sample: str
    presence: Presence = "always"
    label: tuple[str, str] | None = None
    per_unit: int = 1
    kind: Kind = "counter"
    earlier: tuple[str, ...] = ()

    @property
    def samples(self) -> tuple[str, ...]:
        """Its names, the newest first."""
        return (self.sample, *self.earlier)

    @property
    def named(self) -> str:
        """Its names, for messages."""
        label = f"{{{self.label[1]}}}" if self.label else ""
        return " or ".join(sample + label for sample in self.samples)


def gauge(sample: str, *earlier: str, presence: Presence = "always") -> Series:
    """A gauge: read as it stands, kept in no journal, so it needs no name of ours."""
    return Series(sample, sample, presence, kind="gauge", earlier=earlier)


def _by_source(name: str, source: str) -> Series:
    sample = "vllm:prompt_tokens_by_source_total"
    return Series(name, sample, "optional", ("source", source))


FINISHED: Final = Series("finished", "vllm:request_success_total")
OTHERS_FINISHED: Final = "others_finished"
"""Our name for the same of the other models that a server serves, adapters included."""

# PrometheusStatLogger calls labels() for every reason, source and engine at construction, so these
# exist with 0 before the first request.
VLLM_SERIES: Final = (
    FINISHED,
    Series("preemptions", "vllm:num_preemptions_total"),
    # The three numbers we want, counted at the first output token (vLLM >= 0.16).
    _by_source("prompt_computed", "local_compute"),
    _by_source("prompt_gpu_hit", "local_cache_hit"),
    _by_source("prompt_host_loaded", "external_kv_transfer"),
    # vLLM 0.16 until April 2026 (#33290, removed by #38709): there the three sum to P + recomputed.
    Series("prompt_recomputed", "vllm:prompt_tokens_recomputed_total", "optional"),
    # Fallback before 0.16; external_* since October 2025 (#26245).
    Series("prompt_tokens", "vllm:prompt_tokens_total", "optional"),
    Series("prefix_queries", "vllm:prefix_cache_queries_total", "optional"),
    Series("prefix_hits", "vllm:prefix_cache_hits_total", "optional"),
    Series("external_hits", "vllm:external_prefix_cache_hits_total", "optional"),
)
NAMED: Final = {series.name: series.named for series in VLLM_SERIES}
"""What messages call a series, by our name."""

OUTDATED: Final = ("vllm:gpu_prefix_cache_hits_total", "vllm:gpu_prefix_cache_hit_rate")
"""Named in errors alone: before May 2025 (#18354) hits were counted in another unit."""

RUNNING: Final = gauge("vllm:num_requests_running")
WAITING: Final = gauge("vllm:num_requests_waiting")
KV_USAGE: Final = gauge("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
VLLM_GAUGES: Final = (RUNNING, WAITING, KV_USAGE)

PROCESS_START: Final = gauge("process_start_time_seconds", presence="optional")
"""prometheus_client's own, of vLLM and of LMCache's server."""

CACHE_INFO: Final = Series("cache_config", "vllm:cache_config_info", kind="info")
