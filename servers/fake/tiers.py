"""What the loopback server exports of host tiers inside vLLM: its own offloading, and LMCache.

Names, labels and lifetimes as read in vLLM 0.32.0 (``kv_connector/v1/offloading/metrics.py``,
``v1/kv_offload/cpu/manager.py``, ``v1/simple_kv_offload/metrics.py``) and in LMCache 0.5.6
(``observability.py``, ``v1/internal_api_server``).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from servers.fake.spec import FakeSpec
from sim.predict import Prediction
from sim.split import TokenSplit

LOAD_BYTES_PER_S = 10e9
"""How fast the pretended loads are."""

ZEROS_OF_NATIVE = (
    ("kv_offload_total_bytes_total", "CPU_to_GPU"),
    ("kv_offload_total_bytes_total", "GPU_to_CPU"),
    ("kv_offload_total_time_total", "CPU_to_GPU"),
    ("kv_offload_total_time_total", "GPU_to_CPU"),
)
"""Deprecated samples, by transfer_type: the only ones of the connector's that exist from the start
(``OffloadPromMetrics.__init__``); every other one appears with its first value."""

Sample = tuple[str, tuple[tuple[str, str], ...], float]
"""A sample's name without ``vllm:``, labels beside engine and model, and a value."""


def as_tier_counts(spec: FakeSpec, served: Prediction) -> Prediction:
    """``served`` as the tier accounts for it: ``simple`` never loads a prompt's last block.

    (``SimpleCPUOffloadScheduler.get_num_new_matched_tokens``: max_hit_len.)
    """
    split, block = served.split, spec.block_size
    if spec.kind != "simple" or split.computed > 0:
        return served
    return replace(
        served,
        split=TokenSplit(split.prompt_tokens, block, split.gpu_hit, split.host_loaded - block),
        loaded_chunks=served.loaded_chunks - 1,
        moved_tokens=served.moved_tokens - block,
    )


def load_samples(spec: FakeSpec, served: Prediction) -> Iterator[Sample]:
    """What a finished load adds to vLLM's counters; nothing without one."""
    n_bytes = _bytes_of(spec, served.moved_tokens)
    if n_bytes == 0:
        return
    if spec.kind == "native":
        yield "kv_offload_load_bytes_total", (), n_bytes
        yield "kv_offload_load_time_total", (), n_bytes / LOAD_BYTES_PER_S
        yield "kv_offload_total_bytes_total", (("transfer_type", "CPU_to_GPU"),), n_bytes
    elif spec.kind == "simple":
        yield "simple_kv_offload_load_blocks_total", (), served.moved_tokens // spec.block_size


def store_samples(spec: FakeSpec, served: Prediction) -> Iterator[Sample]:
    """What a finished store adds to vLLM's counters; the simple offload counts none."""
    n_bytes = _bytes_of(spec, served.stored_chunks * spec.chunk_tokens)
    if n_bytes and spec.kind == "native":
        yield "kv_offload_store_bytes_total", (), n_bytes
        yield "kv_offload_store_time_total", (), n_bytes / LOAD_BYTES_PER_S
        yield "kv_offload_total_bytes_total", (("transfer_type", "GPU_to_CPU"),), n_bytes


def offload_gauges(spec: FakeSpec, *, open_chunks: int) -> Iterator[Sample]:
    """vLLM's gauges of its own copies, of which ``open_chunks`` chunks are not over."""
    if spec.kind == "native":
        share = open_chunks / spec.host_chunks if spec.host_chunks else 0.0
        yield "kv_offload_cpu_cache_usage_perc", (), share
        yield "kv_offload_cpu_cache_write_usage_perc", (), share
        yield "kv_offload_cpu_cache_read_usage_perc", (), 0.0
    elif spec.kind == "simple":
        yield "simple_kv_offload_pending_store_blocks", (), open_chunks
        yield "simple_kv_offload_used_blocks", (), open_chunks + 1  # the pool's null block
        capacity = ("capacity_blocks", str(spec.host_chunks))
        others = (("backend", "cpu"), ("lazy_offload", "false"), ("page_cache", "false"))
        yield "simple_kv_offload_info", (*others, capacity), 1.0


def in_process_gauges(
    spec: FakeSpec, *, resident: int, faults: Mapping[str, Any]
) -> Iterator[Sample]:
    """``lmcache:`` gauges of the worker, and of the scheduler's half of the connector: always 0."""
    is_healthy = not faults.get("unhealthy")
    for role, chunks, health in (("scheduler", 0, False), ("worker", resident, is_healthy)):
        labels = (
            ("model_name", "model"),
            ("role", role),
            ("served_model_name", spec.model_name),
            ("worker_id", "0"),
        )
        yield "local_cpu_hot_cache_count", labels, chunks
        yield "pin_monitor_pinned_objects_count", labels, int(faults.get("pinned_chunks", 0))
        yield "lmcache_is_healthy", labels, float(health)


def in_process_config(spec: FakeSpec) -> dict[str, Any]:
    """GET /conf of LMCache's internal API, as far as anybody here reads it."""
    return {
        "chunk_size": spec.chunk_tokens,
        "local_cpu": True,
        "max_local_cpu_size": spec.total_host_bytes() / 2**30,
        "cache_policy": spec.policy,
        "save_unfull_chunk": False,
        "use_layerwise": False,
        "enable_async_loading": False,
        "local_disk": None,
        "remote_url": None,
    }


def _bytes_of(spec: FakeSpec, n_tokens: int) -> int:
    return n_tokens * spec.chunk_bytes // spec.chunk_tokens
