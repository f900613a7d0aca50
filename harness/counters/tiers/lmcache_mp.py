"""LMCache's server beside vLLM: its own counters and its live state (LMCache 0.5.6).

OpenTelemetry exports a synchronous counter only after its first add(); each lazy entry names the
subscriber under lmcache/v1/mp_observability/subscribers/metrics that adds to it. Labels are
LMCache's own (its model_name is the model's path, not the served name), so all are summed: the
server is this launch's alone.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from harness.counters.errors import CounterError, ForeignTraffic, MissingSeries
from harness.counters.pages import HostPages, Samples, counts, gauge_value
from harness.counters.tiers.base import (
    Asked,
    CountedTier,
    HostReading,
    Measured,
    NotYetError,
    Rest,
    Unit,
    require_one,
    wait_if,
)
from servers.metrics import Series, gauge
from sim.split import TokenSplit

SESSIONS_GRACE_S = 0.25
"""How long leaked LMCache sessions may hold up a settle whose other conditions all hold.

Sessions leak when END_SESSION overtakes STORE and then live for 600 s, so waiting for zero is best
effort. A live session otherwise ends within milliseconds of the response.
"""

_BUS_DEPTH = gauge("lmcache_mp_event_bus_queue_depth")


@dataclass(slots=True)
class ServerRest(Rest):
    """The order of looks proves that the counters are final without a pause.

    State first, then an empty event bus, then the counters. Every event of a session is queued
    before the session ends, and one thread handles them in order, so an empty bus after that
    means all were counted.
    """

    asked: Asked
    sessions_until: float | None = None

    def check(
        self,
        vllm: Samples,
        counters: Mapping[str, int],
        pages: HostPages | None,
        before: Mapping[str, int],
    ) -> HostReading | None:
        """The reading, once it is."""
        assert pages is not None
        state = server_state(pages.status())
        wait_if(state.reason())
        self._wait_for_sessions(state)
        depth = gauge_value(pages.metrics(), _BUS_DEPTH, where=pages.where)
        wait_if(f"LMCache's event bus still holds {depth:.0f} events" if depth else None)
        reading = _reading(pages, state)
        check_server(before, reading.counters, self.asked)
        return reading

    def _wait_for_sessions(self, state: "ServerState") -> None:
        if not state.sessions:
            return
        now = time.monotonic()
        if self.sessions_until is None:
            self.sessions_until = now + SESSIONS_GRACE_S
        if now < self.sessions_until:
            raise NotYetError(f"LMCache's active_sessions is {state.sessions}")


class ServerCounts(CountedTier):
    """Chunks found, written, loaded, evicted, refused."""

    witness = "host_lookups"
    loaded_sources = ("chunks_loaded_counter", "lookup_hits")
    state = ("host_resident_chunks", "host_used_bytes")  # of /status
    refused = "host_alloc_failed_chunks"
    has_pages = True
    gauges = (_BUS_DEPTH,)
    host_series = (
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

    def read(self, pages: HostPages) -> HostReading:
        """Its counters and its live state."""
        return _reading(pages, server_state(pages.status()))

    def rest(self, model_name: str, asked: Asked) -> Rest:
        """State, bus and counters, in that order."""
        return ServerRest(asked)

    def chunk_bytes(self, counters: Mapping[str, int]) -> int | None:
        """Bytes in use over chunks resident; chunks being written blur the quotient."""
        resident, used = (counters.get(name) for name in self.state)
        if not resident or used is None or used % resident:
            return None
        return used // resident

    def measured(self, gpu: Measured, moved: Mapping[str, int], unit: Unit) -> Measured:
        """What its lookup found and its store wrote."""
        chunk_tokens = unit.tokens
        hit_chunks = _hit_chunks(moved, chunk_tokens)
        require_one(moved["host_lookups"], "LMCache counted", "lookups")
        stored = moved["host_written_chunks"]
        if max(stored, hit_chunks) > gpu.split.prompt_tokens // chunk_tokens:
            raise ForeignTraffic(
                f"LMCache stored {stored} and found {hit_chunks} chunks of {chunk_tokens} tokens, "
                f"more than our prompt of {gpu.split.prompt_tokens} tokens has",
                hint="another client uses this server, or an earlier request's store came late",
            )
        counted = "host_loaded_chunks" in moved
        due = _chunks_due(gpu.split, hit_chunks, chunk_tokens=chunk_tokens)
        loaded = moved["host_loaded_chunks"] if counted else due
        return replace(
            gpu,
            loaded_bytes=unit.bytes_of(loaded),
            loaded_source=self.loaded_sources[0 if counted else 1],
            stored_tokens=stored * chunk_tokens,
            chunk_bytes=unit.n_bytes,
            disagreement=_disagreement(
                gpu.split,
                hit_tokens=hit_chunks * chunk_tokens,
                due=due,
                loaded=loaded,
                read_failed=moved["host_read_failed_chunks"],
            ),
        )


def _hit_chunks(moved: Mapping[str, int], chunk_tokens: int) -> int:
    if moved.get("host_dropped_events"):
        raise CounterError(
            f"LMCache dropped {moved['host_dropped_events']} events, so its counters are short"
        )
    chunks, rest = divmod(moved["host_hit_tokens"], chunk_tokens)
    if rest:
        raise CounterError(
            f"LMCache hit {moved['host_hit_tokens']} tokens, no multiple of {chunk_tokens}: "
            "its chunk size is not the one asked for"
        )
    return chunks


def _chunks_due(split: TokenSplit, hit_chunks: int, *, chunk_tokens: int) -> int:
    """Chunks the load must have moved: from the one the GPU hit ends in to the lookup's end.

    LMCache loads whole chunks (``lmcache_mp_metadata.GetRetrieveMetadata``), so this exceeds
    ``host_loaded`` tokens when the GPU hit ends inside a chunk.
    """
    if split.host_loaded == 0:
        return 0
    return max(0, hit_chunks - split.gpu_hit // chunk_tokens)


def _disagreement(
    split: TokenSplit, *, hit_tokens: int, due: int, loaded: int, read_failed: int
) -> str | None:
    """Lookup is not retrieval: say where LMCache's ledger contradicts vLLM's, or None.

    The connector asks for the lookup's hit beyond the GPU's, less one token when the hit is the
    whole prompt (``LMCacheMPConnector.get_num_new_matched_tokens``).
    """
    expected = max(0, hit_tokens - split.gpu_hit - (hit_tokens == split.prompt_tokens))
    if split.host_loaded != expected:
        return (
            f"vLLM counts {split.host_loaded} tokens from the host; LMCache's lookup found "
            f"{hit_tokens}, of which {expected} lie beyond the GPU hit of {split.gpu_hit}"
        )
    if loaded != due:
        return f"LMCache loaded {loaded} chunks where vLLM's counts need {due}"
    if read_failed:
        return f"LMCache failed to read {read_failed} chunks; vLLM recomputes those silently"
    return None


def _reading(pages: HostPages, state: "ServerState") -> HostReading:
    samples = pages.metrics()
    gauge_value(samples, _BUS_DEPTH, where=pages.where)  # absent: LMCache's metrics are off
    found = counts(samples, ServerCounts.host_series, model_name=None, where=pages.where)
    return HostReading(
        found | dict(zip(ServerCounts.state, (state.resident, state.used_bytes), strict=True)),
        samples,
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
        if "l1_managers" in storage:
            l1 = storage["l1_managers"]["_default"]
            eviction = storage["l1_eviction_controllers"]["_default"]
        else:
            l1, eviction = storage["l1_manager"], storage["l1_eviction_controller"]
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


def check_server(before: Mapping[str, int], after: Mapping[str, int], asked: Asked) -> None:
    """LMCache's counters must have caught up with its live state.

    ``written - evicted == resident`` is exact while nothing is loaded from an L2: writes, evictions
    and clears are queued as events under the same lock that changes the resident objects
    (``L1Manager.finish_write``, ``delete``, ``clear``). A preempted request is looked up anew, so
    of several in flight there may be more lookups than requests.
    """
    lookups = after["host_lookups"] - before.get("host_lookups", 0)
    asked.check(
        lookups if asked.most == 1 else min(lookups, asked.most),
        what="LMCache's lookups",
        missing="LMCache has counted no lookup for the request",
    )
    kept = after["host_written_chunks"] - after["host_evicted_chunks"]
    if kept != after["host_resident_chunks"]:
        raise NotYetError(
            f"LMCache's counters say {kept} chunks are resident, its state "
            f"{after['host_resident_chunks']}"
        )
    for kind in ("stores", "retrieves"):
        open_copies = after.get(f"host_submitted_{kind}", 0) - after.get(f"host_finished_{kind}", 0)
        wait_if(f"LMCache has {open_copies} {kind} in flight" if open_copies else None)


TIER = ServerCounts()
