"""The servers' counter pages: which series they export, under which name, and how to read them.

Names and lifetimes were checked against vLLM 0.32.0 (``vllm/v1/metrics/loggers.py``, the
connectors' own ``metrics.py``) and LMCache 0.5.6 (``lmcache/v1/mp_observability`` for its server,
``lmcache/observability.py`` for LMCache inside vLLM). Older vLLM is handled by which series exist,
never by the version string.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client.parser import text_string_to_metric_families

from harness.errors import MachineError
from servers.arms import TierKind


class CounterError(MachineError):
    """The counters cannot say what one request did."""


class ScrapeError(CounterError):
    """A counter page could not be read or holds a value no counter can have."""


class UnreachableError(ScrapeError):
    """Nothing accepts connections on the server's port any more."""


class MissingSeries(CounterError):  # noqa: N818 - says what happened, as the docs name it
    """A series this module needs is not exported; absent is not zero."""


class ForeignTraffic(CounterError):  # noqa: N818 - says what happened, as the docs name it
    """More than our one request moved the counters."""


class CounterReset(CounterError):  # noqa: N818 - says what happened, as the docs name it
    """The two readings come from different server processes, or a counter went down."""


Presence = Literal["always", "lazy", "optional"]


@dataclass(frozen=True, slots=True)
class Series:
    """One counter: our ``name`` for it and the exact Prometheus sample (``_total`` included).

    ``always``: exported from the first scrape on; absent means broken. ``lazy``: exported from its
    first event on, so absent means none yet. ``optional``: not in every version or transfer mode;
    absent stays absent in a Snapshot. ``per_unit``: what the sample is multiplied by to be kept as
    a whole number; 1 is a count already.
    """

    name: str
    sample: str
    presence: Presence
    label: tuple[str, str] | None = None
    per_unit: int = 1


_BY_SOURCE = "vllm:prompt_tokens_by_source_total"

# PrometheusStatLogger calls labels() for every reason, source and engine at construction, so these
# exist with 0 before the first request.
VLLM_SERIES = (
    Series("finished", "vllm:request_success_total", "always"),
    Series("preemptions", "vllm:num_preemptions_total", "always"),
    # The three numbers we want, counted at the first output token (vLLM >= 0.16).
    Series("prompt_computed", _BY_SOURCE, "optional", ("source", "local_compute")),
    Series("prompt_gpu_hit", _BY_SOURCE, "optional", ("source", "local_cache_hit")),
    Series("prompt_host_loaded", _BY_SOURCE, "optional", ("source", "external_kv_transfer")),
    # vLLM 0.16 until April 2026 (#33290, removed by #38709): there the three sum to P + recomputed.
    Series("prompt_recomputed", "vllm:prompt_tokens_recomputed_total", "optional"),
    # Fallback before 0.16; external_* since October 2025 (#26245).
    Series("prompt_tokens", "vllm:prompt_tokens_total", "optional"),
    Series("prefix_queries", "vllm:prefix_cache_queries_total", "optional"),
    Series("prefix_hits", "vllm:prefix_cache_hits_total", "optional"),
    Series("external_hits", "vllm:external_prefix_cache_hits_total", "optional"),
)

# On vLLM's page, one table per tier. Both connectors call labels() when they first observe a value
# (OffloadPromMetrics._get_prometheus_metric, SimpleCPUOffloadPromMetrics.observe). Bytes and
# seconds are the worker's, per finished copy (SingleDirectionOffloadingHandler.get_finished), and
# published with the step in which the copy is reported done (OffloadingConnectorScheduler
# .update_connector_output, then .get_stats): a load's before its request computes anything.
NATIVE_SERIES = (
    Series("native_load_bytes", "vllm:kv_offload_load_bytes_total", "lazy"),
    Series("native_load_ns", "vllm:kv_offload_load_time_total", "lazy", per_unit=10**9),
    Series("native_store_bytes", "vllm:kv_offload_store_bytes_total", "lazy"),
    Series("native_alloc_failures", "vllm:kv_offload_allocation_failure_total", "lazy"),
)
# Blocks of loads that have finished (SimpleCPUOffloadScheduler.update_connector_output). The
# connector counts no bytes; its save_outcomes_total leaves ordinary stores out.
SIMPLE_SERIES = (Series("simple_load_blocks", "vllm:simple_kv_offload_load_blocks_total", "lazy"),)

TIER_SERIES_OF_VLLM: Mapping[TierKind, tuple[Series, ...]] = {
    "native": NATIVE_SERIES,
    "simple": SIMPLE_SERIES,
}
"""What vLLM's page has more of, by tier. Nothing for LMCache inside vLLM: its ``lmcache:*``
counters are written every 10 s (``LMCacheStatsLogger``, log_interval), too late for one request."""

# OpenTelemetry exports a synchronous counter only after its first add(); each lazy entry names the
# subscriber under lmcache/v1/mp_observability/subscribers/metrics that adds to it. Labels here are
# LMCache's own (its model_name is the model's path, not the served name), so all are summed: the
# server is this launch's alone.
HOST_SERIES = (
    Series("host_lookups", "lmcache_mp_lookups_requests_total", "lazy"),  # lookup.py
    Series("host_hit_tokens", "lmcache_mp_lookup_hit_tokens_total", "lazy"),  # lookup.py
    Series("host_written_chunks", "lmcache_mp_l1_write_chunks_total", "lazy"),  # l1.py
    Series("host_evicted_chunks", "lmcache_mp_l1_evicted_chunks_total", "lazy"),  # l1.py
    Series(
        "host_alloc_failed_chunks",
        "lmcache_mp_l1_allocation_failure_chunks_total",
        "lazy",  # l1_failures.py
    ),
    Series(
        "host_read_failed_chunks",
        "lmcache_mp_l1_read_failure_chunks_total",
        "lazy",  # l1_failures.py
    ),
    # An observable counter (event_bus.py): exported from the start by the versions that have it.
    Series("host_dropped_events", "lmcache_mp_event_bus_dropped_events_total", "optional"),
    # Only the lmcache-driven transfer mode (GPU) moves these (engine.py, mp_transfer.py).
    Series("host_loaded_chunks", "lmcache_mp_num_chunks_loaded_total", "optional"),
    Series("host_submitted_stores", "lmcache_mp_num_submitted_stores_total", "optional"),
    Series("host_finished_stores", "lmcache_mp_num_finished_stores_total", "optional"),
    Series("host_submitted_retrieves", "lmcache_mp_num_submitted_retrieves_total", "optional"),
    Series("host_finished_retrieves", "lmcache_mp_num_finished_retrieves_total", "optional"),
)

RESIDENT_IN_PROCESS = "lmcache_resident_chunks"

STATE_NAMES = frozenset({"host_resident_chunks", "host_used_bytes", RESIDENT_IN_PROCESS})
"""Live state kept beside the counters, from LMCache's /status or its gauges; it may go down."""

_WITNESSES: Mapping[str, TierKind] = {
    "host_lookups": "lmcache-mp",
    RESIDENT_IN_PROCESS: "lmcache",
    "native_load_bytes": "native",
    "simple_load_blocks": "simple",
}

_SPLIT_NAMES = ("prompt_computed", "prompt_gpu_hit", "prompt_host_loaded")
_FALLBACK_NAMES = ("prompt_tokens", "prefix_queries", "prefix_hits")
OLD_SAMPLES = ("vllm:gpu_prefix_cache_hits_total", "vllm:gpu_prefix_cache_hit_rate")


def tier_of(counters: Iterable[str]) -> TierKind | None:
    """The host tier a reading is of: each kind's readings have a name of their own, from the first.

    None: no tier, or one that only vLLM's own counters tell of.
    """
    kinds = [_WITNESSES[name] for name in counters if name in _WITNESSES]
    if len(kinds) > 1:
        raise CounterError(f"counters of several host tiers in one reading: {', '.join(kinds)}")
    return kinds[0] if kinds else None


Samples = dict[str, list[tuple[Mapping[str, str], float]]]


def parse(text: str, *, wanted: Iterable[str], where: str) -> Samples:
    """Samples by exact name; ScrapeError when ``text`` is no Prometheus page.

    The parser strips ``_total`` from family names only, so samples are matched. It keeps
    ``_created`` timestamps and longer names apart, and knows every escape in a label.
    """
    prefixes = tuple(wanted)
    # Most of a page is histogram buckets; parsing only candidate lines takes 1 ms instead of 10.
    # Split at "\n" alone: splitlines() would also split inside label values.
    lines = [line for line in text.split("\n") if line.startswith(prefixes)]
    samples: Samples = {}
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except ValueError as error:
        raise ScrapeError(f"{where} is not a Prometheus page: {error}") from error
    return samples


def _count(samples: Samples, series: Series, model_name: str | None) -> int | None:
    """The series summed over engines and labels; None when no sample of ours matches."""
    total = None
    for labels, value in samples.get(series.sample, ()):
        if model_name is not None and labels.get("model_name") != model_name:
            continue
        if series.label is not None and labels.get(series.label[0]) != series.label[1]:
            continue
        is_counted = math.isfinite(value) and value >= 0
        if not is_counted or (series.per_unit == 1 and value % 1):
            raise ScrapeError(f"{series.sample}{dict(labels)} is {value}, not a count")
        total = (total or 0) + round(value * series.per_unit)
    return total


def counts(
    samples: Samples, table: tuple[Series, ...], *, model_name: str | None, where: str
) -> dict[str, int]:
    """Every series of ``table``, by our names; raises MissingSeries for one that must be there."""
    found: dict[str, int] = {}
    for series in table:
        count = _count(samples, series, model_name)
        if count is None and series.presence == "always":
            other = {labels.get("model_name") for labels, _ in samples.get(series.sample, ())}
            raise MissingSeries(
                f"{where} exports no {series.sample} for model {model_name!r}"
                + (f"; it has {sorted(map(str, other))}" if other else "")
            )
        if count is not None or series.presence == "lazy":
            found[series.name] = count or 0
    return found


def require_split(found: Mapping[str, int], *, with_host: bool, old: Iterable[str] = ()) -> None:
    """Refuse a server whose series cannot give the three token sources."""
    by_source = [name for name in _SPLIT_NAMES if name not in found]
    if not by_source:
        return
    needed = (*_FALLBACK_NAMES, *(("external_hits",) if with_host else ()))
    fallback = [name for name in needed if name not in found]
    if not fallback and len(by_source) == len(_SPLIT_NAMES):
        return
    samples = {s.name: s.sample + (f"{{{s.label[1]}}}" if s.label else "") for s in VLLM_SERIES}
    names = by_source if len(by_source) < len(_SPLIT_NAMES) else by_source + fallback
    outdated = sorted(old)
    raise MissingSeries(
        "vLLM exports no " + ", ".join(samples[name] for name in names)
        + (f"; it has only the outdated {', '.join(outdated)}" if outdated else ""),
        hint="use vLLM 0.16 or later, with statistics on (no --disable-log-stats)",
    )  # fmt: skip
