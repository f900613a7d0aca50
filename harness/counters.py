"""The servers' own counters around one request: where its prompt tokens came from.

A reading is a Snapshot of raw counters; two of them that bracket exactly one finished request give
a Measured. Only differences of raw counters are used: hit-rate gauges describe other requests too,
and no absent series is ever read as zero unless its table entry says why absence means "none yet".

Names and meanings were checked against vLLM 0.32.0 (``vllm/v1/metrics/loggers.py``) and LMCache
0.5.6 (``lmcache/v1/mp_observability``). Older vLLM is handled by which series exist, never by the
version string.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client.parser import text_string_to_metric_families

from harness.errors import MachineError
from sim.split import TokenSplit


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

_SPLIT_NAMES = ("prompt_computed", "prompt_gpu_hit", "prompt_host_loaded")
_FALLBACK_NAMES = ("prompt_tokens", "prefix_queries", "prefix_hits")
OLD_SAMPLES = ("vllm:gpu_prefix_cache_hits_total", "vllm:gpu_prefix_cache_hit_rate")


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
    require_split(moved, with_host="host_lookups" in moved)
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
    hit_chunks = _hit_chunks(moved, chunk_tokens)
    _require_one(moved["host_lookups"], "LMCache counted", "lookups")
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


def _chunk_bytes(counters: Mapping[str, int]) -> int | None:
    resident, used = counters.get("host_resident_chunks"), counters.get("host_used_bytes")
    if not resident or used is None or used % resident:  # chunks being written blur the quotient
        return None
    return used // resident


Samples = dict[str, list[tuple[Mapping[str, str], float]]]


def parse(text: str, *, wanted: Iterable[str], where: str) -> Samples:
    """Samples by exact name; ScrapeError when ``text`` is no Prometheus page.

    The parser strips ``_total`` from family names only, so samples are matched. It keeps ``_created`` timestamps and longer names apart, and knows every escape in a label.
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
        if not math.isfinite(value) or value < 0 or value != int(value):
            raise ScrapeError(f"{series.sample}{dict(labels)} is {value}, not a count")
        total = (total or 0) + int(value)
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
