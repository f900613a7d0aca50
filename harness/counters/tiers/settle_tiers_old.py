"""When a host tier is at rest, by kind of tier; the conditions of ``harness.measure.settle`` beside vLLM's.

Read in vLLM 0.32.0 and LMCache 0.5.6. Nothing here talks to a server.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.counters.pages import MissingSeries, Samples
from servers.arms import TierKind

OFFLOAD_GRACE_S = 1.0
"""How long an offloading gauge that stands still above 0 may hold up a settle that is else over.

vLLM 0.32 steps on while a copy is open (``has_pending_push_work``) and publishes the gauges with
the step that ends it, so they reach 0 by themselves. Where an engine goes idle before, the last
value stays until the next request, and waiting for 0 would make every request unsettled.
"""

OFFLOAD_GAUGES: Mapping[TierKind, tuple[str, ...]] = {
    # Shares of the store pinned by open copies (CPUOffloadingManager.get_stats).
    "native": (
        "vllm:kv_offload_cpu_cache_write_usage_perc",
        "vllm:kv_offload_cpu_cache_read_usage_perc",
    ),
    # Its used_blocks never reaches 0: the pool's null block counts (SimpleCPUOffloadScheduler).
    "simple": ("vllm:simple_kv_offload_pending_store_blocks",),
}

# Gauges of LMCache inside vLLM that call a function when they are read (Gauge.set_function), so
# they are live in the process that has them: LocalCPUBackend._setup_metrics, PinMonitor and
# BaseServiceFactory._create_health_monitor.
RESIDENT_CHUNKS = "lmcache:local_cpu_hot_cache_count"
_PINNED = "lmcache:pin_monitor_pinned_objects_count"
_HEALTHY = "lmcache:lmcache_is_healthy"
IN_PROCESS_GAUGES = (RESIDENT_CHUNKS, _PINNED, _HEALTHY)


class HopelessError(Exception):
    """A condition that no further waiting can mend."""


class NotYetError(Exception):
    """A settle condition that does not hold yet."""


def wait_if(reason: str | None) -> None:
    """NotYetError with ``reason``, when there is one."""
    if reason is not None:
        raise NotYetError(reason)


@dataclass(slots=True)
class OffloadRest:
    """Whether vLLM's own offloading is at rest: its gauges 0 and its counters still, seen twice.

    Twice, because the step after a request's end may still open a store, and only then makes the
    request's chunks the most recent (``OffloadingConnectorScheduler.build_connector_meta``). It
    follows at once; the second look comes ``settle.POLL_S`` later.
    """

    seen: tuple[tuple[str, float], ...] | None = None
    since: float = 0.0

    def check(
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


def offload_gauges(samples: Samples, kind: TierKind | None, *, model_name: str) -> dict[str, float]:
    """The gauges of ``kind`` that are exported; vLLM before 0.26 has none of the native ones."""
    found: dict[str, float] = {}
    for name in OFFLOAD_GAUGES.get(kind, ()) if kind else ():
        for labels, value in samples.get(name, ()):
            if labels.get("model_name") == model_name:
                found[name] = found.get(name, 0.0) + value
    return found


def check_in_process(samples: Samples, *, model_name: str, where: str) -> None:
    """Raise NotYetError until LMCache inside vLLM is at rest.

    It stores inside the step that computed the chunks (``LMCacheConnectorV1Impl.wait_for_save``
    down to ``LocalCPUBackend.submit_put_task``, "synchronously put"), so when vLLM has counted the
    request as finished, its stores are over. Pins last from lookup to load. Unhealthy, LMCache
    neither stores nor loads, and answers go on.
    """
    is_healthy = of_worker(samples, _HEALTHY, model_name=model_name, where=where)
    wait_if(None if is_healthy else "LMCache inside vLLM says that it is not healthy")
    pinned = of_worker(samples, _PINNED, model_name=model_name, where=where)
    wait_if(f"LMCache inside vLLM has {pinned:.0f} chunks pinned" if pinned else None)


def of_worker(samples: Samples, name: str, *, model_name: str, where: str) -> float:
    """The worker's value: the scheduler's half of the connector has the same gauges, always 0."""
    names = set()
    for labels, value in samples.get(name, ()):
        if labels.get("role") == "worker":
            if labels.get("served_model_name") == model_name:
                return value
            names.add(str(labels.get("served_model_name")))
    raise MissingSeries(
        f"{where} exports no {name} of a worker that serves {model_name!r}"
        + (f"; it has {sorted(names)}" if names else ""),
        hint="kvcliff knows LMCache 0.5.6; install the pinned versions (make setup)",
    )


@dataclass(frozen=True, slots=True)
class ServerState:
    """LMCache's /status: live, not behind its event bus. Counts are chunks; ratios in [0, 1]."""

    resident: int
    used_bytes: int
    busy: Mapping[str, int]
    usage_ratio: float
    watermark: float | None
    sessions: int

    def reason(self) -> str | None:
        """Why it is not at rest, with the number that says so; None when it is."""
        for name, count in self.busy.items():
            if count:
                return f"LMCache's {name} is {count}"
        if self.watermark is not None and self.usage_ratio >= self.watermark:
            return (
                f"LMCache is {self.usage_ratio:.3f} full, at or above its watermark "
                f"{self.watermark}: eviction is due"
            )
        return None


def server_state(status: Any) -> ServerState:
    """Read /status of 0.5.6 (one entry per L1 manager) or older (a single ``l1_manager``)."""
    try:
        storage = status["storage_manager"]
        l1 = _default_or(storage, "l1_managers", "l1_manager")
        eviction = _default_or(storage, "l1_eviction_controllers", "l1_eviction_controller")
        busy = {n: int(l1[n]) for n in ("read_locked_count", "write_locked_count")}
        busy["staging_object_count"] = int(l1.get("staging_object_count", 0))
        busy["active_prefetch_jobs"] = int(status["active_prefetch_jobs"])
        return ServerState(
            resident=int(l1["total_object_count"]),
            used_bytes=int(l1["memory_used_bytes"]),
            busy=busy,
            usage_ratio=float(l1["memory_usage_ratio"]),
            # noop never evicts: full is then a lasting state, not a pending one.
            watermark=None
            if eviction["eviction_policy"] == "noop"
            else float(eviction["trigger_watermark"]),
            sessions=int(status["active_sessions"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise MissingSeries(f"LMCache's /status has no usable {error}") from error


def _default_or(storage: Any, plural: str, singular: str) -> Any:
    if plural in storage:
        return storage[plural]["_default"]
    return storage[singular]


def check_server(before: Mapping[str, int], after: Mapping[str, int]) -> None:
    """LMCache's counters must have caught up with its live state.

    ``written - evicted == resident`` is exact while nothing is loaded from an L2: writes, evictions
    and clears are queued as events under the same lock that changes the resident objects
    (``L1Manager.finish_write``, ``delete``, ``clear``).
    """
    lookups = after["host_lookups"] - before.get("host_lookups", 0)
    if lookups not in (0, 1):
        raise HopelessError(f"LMCache's lookups moved by {lookups} where we sent 1 request")
    wait_if("LMCache has counted no lookup for the request" if lookups == 0 else None)
    kept = after["host_written_chunks"] - after["host_evicted_chunks"]
    if kept != after["host_resident_chunks"]:
        raise NotYetError(
            f"LMCache's counters say {kept} chunks are resident, its state "
            f"{after['host_resident_chunks']}"
        )
    for kind in ("stores", "retrieves"):
        open_copies = after.get(f"host_submitted_{kind}", 0) - after.get(f"host_finished_{kind}", 0)
        wait_if(f"LMCache has {open_copies} {kind} in flight" if open_copies else None)
