"""The servers' own counters around one request: where its prompt tokens came from.

A reading is a Snapshot of raw counters; two of them that bracket exactly one finished request give
a Measured. Only differences of raw counters are used: hit-rate gauges describe other requests too,
and no absent series is ever read as zero unless its table entry says why absence means "none yet".

Names and meanings were checked against vLLM 0.32.0 (``vllm/v1/metrics/loggers.py``) and LMCache
0.5.6 (``lmcache/v1/mp_observability``). Older vLLM is handled by which series exist, never by the
version string.
"""

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from harness.errors import MachineError
from sim.split import TokenSplit

POLL_S = 0.015
"""Pause between two looks while settling; a look itself costs 10-20 ms of server and parser."""

SCRAPE_TIMEOUT_S = 5.0
"""One GET; a healthy server answers in under 10 ms, so longer means it is stuck."""

SESSIONS_GRACE_S = 0.25
"""How long leaked LMCache sessions may hold up a settle whose other conditions all hold.

Sessions leak when END_SESSION overtakes STORE and then live for 600 s, so waiting for zero is best
effort. A live session otherwise ends within milliseconds of the response.
"""


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
    absent stays absent in a Snapshot.
    """

    name: str
    sample: str
    presence: Presence
    label: tuple[str, str] | None = None


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

# Live state from LMCache's /status, kept beside the counters; these may go down.
STATE_NAMES = frozenset({"host_resident_chunks", "host_used_bytes"})

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_KV_USAGE = "vllm:kv_cache_usage_perc"
_BUS_DEPTH = "lmcache_mp_event_bus_queue_depth"
_PROCESS_START = "process_start_time_seconds"

_SPLIT_NAMES = ("prompt_computed", "prompt_gpu_hit", "prompt_host_loaded")
_FALLBACK_NAMES = ("prompt_tokens", "prefix_queries", "prefix_hits")
_OLD_SAMPLES = ("vllm:gpu_prefix_cache_hits_total", "vllm:gpu_prefix_cache_hit_rate")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Raw counters of one reading, by the names of the tables above; ``host`` None: no host tier.

    ``launch`` identifies the server processes (the caller's launch id plus the start times the
    servers report, where they do).
    """

    vllm: Mapping[str, int]
    host: Mapping[str, int] | None
    launch: str

    def flat(self) -> dict[str, int]:
        """Both servers' counters in one dict, as the journal keeps them; names do not collide."""
        return {**self.vllm, **(self.host or {})}


@dataclass(frozen=True, slots=True)
class Settled:
    """The reading after a request. ``unsettled`` None: every condition held; else which did not.

    ``after`` is None only when the servers could not be read at all; ``unsettled`` then says why.
    """

    after: Snapshot | None
    settle_ms: float
    unsettled: str | None


@dataclass(frozen=True, slots=True)
class Measured:
    """What the counters say one request did. None: not measured (host fields: no host tier).

    ``hit_chunks``: chunks LMCache's lookup found, counted from the prompt's start and including
    those the GPU held too. ``loaded_chunks``/``loaded_bytes``: what moved host to GPU, whole
    chunks; ``loaded_source`` says from which counter. ``stored_*``: what became resident in the
    host tier. ``chunk_bytes``: bytes of one chunk, measured from the tier's state if it holds any.
    ``disagreement``: how vLLM's and LMCache's ledgers contradict each other; None if they agree.
    """

    split: TokenSplit
    split_source: Literal["prompt_tokens_by_source", "prefix_cache_hits"]
    finished: int
    hit_chunks: int | None = None
    loaded_chunks: int | None = None
    loaded_bytes: int | None = None
    loaded_source: Literal["chunks_loaded_counter", "lookup_hits"] | None = None
    stored_chunks: int | None = None
    stored_tokens: int | None = None
    alloc_failed_chunks: int | None = None
    read_failed_chunks: int | None = None
    evicted_chunks: int | None = None
    chunk_bytes: int | None = None
    disagreement: str | None = None


def delta(
    before: Snapshot,
    after: Snapshot,
    *,
    prompt_tokens: int,
    chunk_tokens: int | None,
    chunk_bytes: int | None,
) -> Measured:
    """What one request of ``prompt_tokens`` tokens did between two readings of one launch.

    Raises CounterReset, ForeignTraffic, MissingSeries or CounterError instead of guessing.
    """
    if before.launch != after.launch:
        raise CounterReset(
            f"the readings come from two server processes: {before.launch} and {after.launch}",
            hint="a server restarted during the session; its cache is gone, so run it again",
        )
    return derive(
        before.flat(),
        after.flat(),
        prompt_tokens=prompt_tokens,
        chunk_tokens=chunk_tokens,
        chunk_bytes=chunk_bytes,
    )


def derive(
    before: Mapping[str, int],
    after: Mapping[str, int],
    *,
    prompt_tokens: int,
    chunk_tokens: int | None,
    chunk_bytes: int | None,
) -> Measured:
    """The same from two flat counter dicts (``Snapshot.flat``), for re-deriving a journal's rows.

    ``chunk_tokens`` is None without a host tier; ``chunk_bytes`` is used only while the tier is
    empty and so cannot be measured. Raises as ``delta``.
    """
    moved = _moved(before, after)
    if moved["preemptions"]:
        raise CounterError(
            f"{moved['preemptions']} preemptions happened: a preempted request counts its own "
            "blocks again, so its tokens cannot be attributed",
            hint="give the server more KV blocks or shorten the prompts",
        )
    _require_one(moved["finished"], "vLLM finished", "requests")
    split, source = _split(moved, prompt_tokens)
    if "host_lookups" not in moved:
        return Measured(split, source, finished=1)
    if chunk_tokens is None:
        raise ValueError("chunk_tokens is None but the counters include a host tier")
    return _with_host(
        Measured(split, source, finished=1),
        moved,
        chunk_tokens=chunk_tokens,
        chunk_bytes=_chunk_bytes(after) or chunk_bytes,
    )


def _moved(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Differences of the counters present after; one absent before was first exported between."""
    gone = sorted(set(before) - set(after))
    if gone:
        raise MissingSeries(f"{', '.join(gone)} no longer exported after the request")
    for name in ("finished", "preemptions"):
        if name not in before or name not in after:
            raise MissingSeries(f"{name} is not among the counters: {sorted(after)}")
    appeared = set(after) - set(before) - STATE_NAMES
    late = sorted(appeared - {s.name for s in HOST_SERIES if s.presence == "optional"})
    if late:
        raise MissingSeries(f"{', '.join(late)} not exported before the request, only after it")
    moved = {n: v - before.get(n, 0) for n, v in after.items() if n not in STATE_NAMES}
    for name, change in moved.items():
        if change < 0:
            raise CounterReset(
                f"counter {name} fell from {before[name]} to {after[name]}",
                hint="the server restarted or its metrics were reset; run the session again",
            )
    return moved


def _require_one(count: int, what: str, unit: str) -> None:
    if count > 1:
        raise ForeignTraffic(
            f"{what} {count} {unit} where we sent 1",
            hint="another client uses this server; give the run a server of its own",
        )
    if count < 1:
        raise CounterError(f"{what} no {unit} between the readings, expected 1")


def _split(
    moved: Mapping[str, int], prompt_tokens: int
) -> tuple[TokenSplit, Literal["prompt_tokens_by_source", "prefix_cache_hits"]]:
    if all(name in moved for name in _SPLIT_NAMES):
        computed, gpu_hit, loaded = (moved[name] for name in _SPLIT_NAMES)
        # Until April 2026 a token recomputed after a full hit was counted as a hit as well.
        again = moved.get("prompt_recomputed", 0)
        from_gpu = min(again, gpu_hit)
        gpu_hit, loaded = gpu_hit - from_gpu, loaded - (again - from_gpu)
        return _checked(prompt_tokens, computed, gpu_hit, loaded), "prompt_tokens_by_source"
    _require_split(moved, with_host="host_lookups" in moved)
    if moved["prefix_queries"] != prompt_tokens:
        # vLLM < 0.27 queries again each time a connector defers the request (#48860).
        raise CounterError(
            f"vllm:prefix_cache_queries_total rose by {moved['prefix_queries']} for a prompt of "
            f"{prompt_tokens} tokens: hits are counted more than once",
            hint="use a vLLM that exports vllm:prompt_tokens_by_source_total (0.16 or later)",
        )
    # Without a host tier nothing external can be hit, exported or not.
    gpu_hit, loaded = moved["prefix_hits"], moved.get("external_hits", 0)
    computed = moved["prompt_tokens"] - gpu_hit - loaded
    return _checked(prompt_tokens, computed, gpu_hit, loaded), "prefix_cache_hits"


def _checked(prompt_tokens: int, computed: int, gpu_hit: int, host_loaded: int) -> TokenSplit:
    total = computed + gpu_hit + host_loaded
    numbers = f"{computed} computed + {gpu_hit} GPU + {host_loaded} host"
    if total > prompt_tokens:
        raise ForeignTraffic(
            f"{numbers} = {total} prompt tokens, our prompt has {prompt_tokens}",
            hint="another client's request, or a request counted twice, is in the difference",
        )
    if total < prompt_tokens or min(computed, gpu_hit, host_loaded) < 0:
        raise CounterError(
            f"{numbers} = {total} prompt tokens do not account for our prompt of {prompt_tokens}"
        )
    return TokenSplit(prompt_tokens, computed, gpu_hit, host_loaded)


def _with_host(
    gpu: Measured, moved: Mapping[str, int], *, chunk_tokens: int, chunk_bytes: int | None
) -> Measured:
    if moved.get("host_dropped_events"):
        raise CounterError(
            f"LMCache dropped {moved['host_dropped_events']} events, so its counters are short"
        )
    _require_one(moved["host_lookups"], "LMCache counted", "lookups")
    hit_chunks, rest = divmod(moved["host_hit_tokens"], chunk_tokens)
    if rest:
        raise CounterError(
            f"LMCache hit {moved['host_hit_tokens']} tokens, no multiple of {chunk_tokens}: "
            "its chunk size is not the one asked for"
        )
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
    return Measured(
        gpu.split,
        gpu.split_source,
        finished=gpu.finished,
        hit_chunks=hit_chunks,
        loaded_chunks=loaded,
        loaded_bytes=0 if loaded == 0 else None if chunk_bytes is None else loaded * chunk_bytes,
        loaded_source="chunks_loaded_counter" if counted else "lookup_hits",
        stored_chunks=stored,
        stored_tokens=stored * chunk_tokens,
        alloc_failed_chunks=moved["host_alloc_failed_chunks"],
        read_failed_chunks=moved["host_read_failed_chunks"],
        evicted_chunks=moved["host_evicted_chunks"],
        chunk_bytes=chunk_bytes,
        disagreement=_disagreement(
            gpu.split,
            hit_tokens=hit_chunks * chunk_tokens,
            due=due,
            loaded=loaded,
            read_failed=moved["host_read_failed_chunks"],
        ),
    )


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


def _chunk_bytes(counters: Mapping[str, int]) -> int | None:
    resident, used = counters.get("host_resident_chunks"), counters.get("host_used_bytes")
    if not resident or used is None or used % resident:  # chunks being written blur the quotient
        return None
    return used // resident


Samples = dict[str, list[tuple[Mapping[str, str], float]]]


def _parse(text: str, *, wanted: Iterable[str], where: str) -> Samples:
    """Samples by exact name. The parser strips ``_total`` from family names only, so match samples.

    It keeps ``_created`` timestamps and longer names apart, and knows every escape in a label.
    """
    names = frozenset(wanted)
    prefixes = tuple(names)
    # Most of a page is histogram buckets; parsing only candidate lines takes 1 ms instead of 10.
    # Split at "\n" alone: splitlines() would also split inside label values.
    lines = [line for line in text.split("\n") if line.startswith(prefixes)]
    samples: Samples = {}
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                if sample.name in names:
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
        if not math.isfinite(value) or value < 0 or value != int(value):
            raise ScrapeError(f"{series.sample}{dict(labels)} is {value}, not a count")
        total = (total or 0) + int(value)
    return total


def _counts(
    samples: Samples, table: tuple[Series, ...], *, model_name: str | None, where: str
) -> dict[str, int]:
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


def _require_split(found: Mapping[str, int], *, with_host: bool, old: Iterable[str] = ()) -> None:
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


@dataclass(frozen=True, slots=True)
class _HostState:
    """LMCache's /status: live, not behind its event bus. Counts are chunks; ratios in [0, 1]."""

    resident: int
    used_bytes: int
    busy: Mapping[str, int]
    usage_ratio: float
    watermark: float | None
    sessions: int

    def reason(self) -> str | None:
        for name, count in self.busy.items():
            if count:
                return f"LMCache's {name} is {count}"
        if self.watermark is not None and self.usage_ratio >= self.watermark:
            return (
                f"LMCache is {self.usage_ratio:.3f} full, at or above its watermark "
                f"{self.watermark}: eviction is due"
            )
        return None


def _host_state(status: Any) -> _HostState:
    """Read /status of 0.5.6 (one entry per L1 manager) or older (a single ``l1_manager``)."""
    try:
        storage = status["storage_manager"]
        l1 = _default_or(storage, "l1_managers", "l1_manager")
        eviction = _default_or(storage, "l1_eviction_controllers", "l1_eviction_controller")
        busy = {n: int(l1[n]) for n in ("read_locked_count", "write_locked_count")}
        busy["staging_object_count"] = int(l1.get("staging_object_count", 0))
        busy["active_prefetch_jobs"] = int(status["active_prefetch_jobs"])
        return _HostState(
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


@dataclass(slots=True)
class _Progress:
    """What one settle has seen so far."""

    blocks_freed: bool = False
    sessions_until: float | None = None


class _HopelessError(Exception):
    """A condition that no further waiting can mend."""


class Scraper:
    """Reads one launch's counters over HTTP. Never follows proxies or redirects."""

    def __init__(
        self, base_url: str, *, lmcache_url: str | None, model_name: str, launch_id: str
    ) -> None:
        self._vllm_url = base_url.rstrip("/") + "/metrics"
        self._host_url = None if lmcache_url is None else lmcache_url.rstrip("/")
        self._model_name = model_name
        self._launch_id = launch_id
        self._client = httpx.Client(
            trust_env=False,
            headers={"Accept": "text/plain; version=0.0.4", "Accept-Encoding": "identity"},
            # uvicorn closes idle connections after 5 s; drop ours first, or a GET races the close.
            limits=httpx.Limits(keepalive_expiry=2.0),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def read(self) -> Snapshot:
        """One reading of all counters, settled or not. Raises ScrapeError or MissingSeries."""
        vllm = self._vllm_samples(SCRAPE_TIMEOUT_S)
        if self._host_url is None:
            return self._snapshot(vllm, None, None)
        state = self._host_status(SCRAPE_TIMEOUT_S)
        return self._snapshot(vllm, self._host_samples(SCRAPE_TIMEOUT_S), state)

    def settle(self, before: Snapshot, *, deadline_s: float) -> Settled:
        """Wait until the one request sent since ``before`` has left no work behind in the servers.

        Then the next request meets a state that does not depend on timing, and the counters are
        final. Never raises for a server's state: what never held within ``deadline_s`` seconds is
        ``unsettled``, with the latest reading if there is one. ``settle_ms`` is the time it took.
        """
        start = time.monotonic()
        end = start + deadline_s
        progress = _Progress()
        after: Snapshot | None = None
        while True:
            remaining = end - time.monotonic()
            try:
                after = self._look(before, progress, timeout_s=max(remaining, POLL_S))
                reason = None
                break
            except (UnreachableError, _HopelessError) as error:
                reason = str(error)
                break
            except (CounterError, _NotYetError) as error:
                reason = str(error)
            if time.monotonic() + POLL_S >= end:
                break
            time.sleep(POLL_S)
        settle_ms = (time.monotonic() - start) * 1e3
        if reason is not None:
            after = self._read_if_possible()
        return Settled(after, settle_ms, reason)

    def _read_if_possible(self) -> Snapshot | None:
        try:
            return self.read()
        except CounterError:
            return None

    def _look(self, before: Snapshot, progress: _Progress, *, timeout_s: float) -> Snapshot:
        """The settled reading, or _NotYetError with the first condition that does not hold."""
        vllm = self._vllm_samples(timeout_s)
        self._check_vllm(vllm, before, progress)
        if self._host_url is None:
            return self._same_launch(before, self._snapshot(vllm, None, None))
        # The order proves that the counters are final without a pause: state first, then an empty
        # event bus, then the counters. Every event of a session is queued before the session ends,
        # and one thread handles them in order, so an empty bus after that means all were counted.
        state = self._host_status(timeout_s)
        _wait_if(state.reason())
        self._wait_for_sessions(state, progress)
        depth = self._gauge(self._host_samples(timeout_s), _BUS_DEPTH, ours=False)
        _wait_if(f"LMCache's event bus still holds {depth:.0f} events" if depth else None)
        samples = self._host_samples(timeout_s)
        after = self._same_launch(before, self._snapshot(vllm, samples, state))
        _check_host(before.host or {}, after.host or {})
        return after

    def _check_vllm(self, samples: Samples, before: Snapshot, progress: _Progress) -> None:
        finished = self._counts_of_vllm(samples)["finished"] - before.vllm["finished"]
        if finished < 0 or finished > 1:
            raise _HopelessError(f"vLLM's finished requests moved by {finished} where we sent 1")
        _wait_if("vLLM has not counted the request as finished" if finished == 0 else None)
        running = self._gauge(samples, _RUNNING)
        waiting = self._gauge(samples, _WAITING)
        usage = self._gauge(samples, _KV_USAGE)
        # The gauge is published with step statistics and may lag: zero once after success will do.
        progress.blocks_freed = progress.blocks_freed or usage == 0
        if running or waiting:
            raise _NotYetError(f"vLLM has {running:.0f} requests running and {waiting:.0f} waiting")
        if not progress.blocks_freed:
            raise _NotYetError(
                f"{_KV_USAGE} is {usage:.4f} and was never 0 since the request finished"
            )

    def _wait_for_sessions(self, state: _HostState, progress: _Progress) -> None:
        if not state.sessions:
            return
        now = time.monotonic()
        if progress.sessions_until is None:
            progress.sessions_until = now + SESSIONS_GRACE_S
        if now < progress.sessions_until:
            raise _NotYetError(f"LMCache's active_sessions is {state.sessions}")

    def _same_launch(self, before: Snapshot, after: Snapshot) -> Snapshot:
        if before.launch != after.launch:
            raise _HopelessError(f"a server was restarted: {before.launch} became {after.launch}")
        return after

    def _snapshot(self, vllm: Samples, host: Samples | None, state: _HostState | None) -> Snapshot:
        counts: dict[str, int] | None = None
        if host is not None and state is not None:
            self._gauge(host, _BUS_DEPTH, ours=False)  # absent: LMCache's metrics are switched off
            counts = _counts(host, HOST_SERIES, model_name=None, where=f"{self._host_url}/metrics")
            counts |= {"host_resident_chunks": state.resident, "host_used_bytes": state.used_bytes}
        started = [
            f"{who}@{samples[_PROCESS_START][0][1]:.2f}"
            for who, samples in (("vllm", vllm), ("lmcache", host or {}))
            if samples.get(_PROCESS_START)
        ]
        return Snapshot(self._counts_of_vllm(vllm), counts, " ".join([self._launch_id, *started]))

    def _counts_of_vllm(self, samples: Samples) -> dict[str, int]:
        found = _counts(samples, VLLM_SERIES, model_name=self._model_name, where=self._vllm_url)
        old = [name for name in _OLD_SAMPLES if name in samples]
        _require_split(found, with_host=self._host_url is not None, old=old)
        return found

    def _gauge(self, samples: Samples, name: str, *, ours: bool = True) -> float:
        values = [
            value
            for labels, value in samples.get(name, ())
            if not ours or labels.get("model_name") == self._model_name
        ]
        if not values:
            raise MissingSeries(
                f"no {name} is exported", hint="the server's metrics are switched off"
            )
        return sum(values)

    def _vllm_samples(self, timeout_s: float) -> Samples:
        text = self._get(self._vllm_url, timeout_s).text
        wanted = [s.sample for s in VLLM_SERIES]
        wanted += [_RUNNING, _WAITING, _KV_USAGE, _PROCESS_START, *_OLD_SAMPLES]
        return _parse(text, wanted=wanted, where=self._vllm_url)

    def _host_samples(self, timeout_s: float) -> Samples:
        url = f"{self._host_url}/metrics"
        wanted = [s.sample for s in HOST_SERIES] + [_BUS_DEPTH, _PROCESS_START]
        return _parse(self._get(url, timeout_s).text, wanted=wanted, where=url)

    def _host_status(self, timeout_s: float) -> _HostState:
        url = f"{self._host_url}/status"
        try:
            return _host_state(self._get(url, timeout_s).json())
        except ValueError as error:
            raise ScrapeError(f"{url} is not JSON: {error}") from error

    def _get(self, url: str, timeout_s: float) -> httpx.Response:
        try:
            response = self._client.get(url, timeout=min(timeout_s, SCRAPE_TIMEOUT_S))
        except httpx.ConnectError as error:
            raise UnreachableError(f"GET {url}: {error}") from error
        except httpx.HTTPError as error:
            raise ScrapeError(f"GET {url}: {type(error).__name__} {error}".rstrip()) from error
        if response.status_code != 200:
            raise ScrapeError(f"GET {url} answered HTTP {response.status_code}, expected 200")
        if not response.content.strip():
            raise ScrapeError(f"GET {url} answered 200 with an empty page")
        return response


class _NotYetError(Exception):
    """A settle condition that does not hold yet."""


def _wait_if(reason: str | None) -> None:
    if reason is not None:
        raise _NotYetError(reason)


def _check_host(before: Mapping[str, int], after: Mapping[str, int]) -> None:
    """LMCache's counters must have caught up with its live state.

    ``written - evicted == resident`` is exact while nothing is loaded from an L2: writes, evictions
    and clears are queued as events under the same lock that changes the resident objects
    (``L1Manager.finish_write``, ``delete``, ``clear``).
    """
    lookups = after["host_lookups"] - before["host_lookups"]
    if lookups not in (0, 1):
        raise _HopelessError(f"LMCache's lookups moved by {lookups} where we sent 1 request")
    _wait_if("LMCache has counted no lookup for the request" if lookups == 0 else None)
    kept = after["host_written_chunks"] - after["host_evicted_chunks"]
    if kept != after["host_resident_chunks"]:
        raise _NotYetError(
            f"LMCache's counters say {kept} chunks are resident, its state "
            f"{after['host_resident_chunks']}"
        )
    for kind in ("stores", "retrieves"):
        open_copies = after.get(f"host_submitted_{kind}", 0) - after.get(f"host_finished_{kind}", 0)
        _wait_if(f"LMCache has {open_copies} {kind} in flight" if open_copies else None)
