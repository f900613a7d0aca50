"""What the counters say one request moved to and from the host tier, by kind of tier.

Each tier counts something else: LMCache's server chunks found and written, vLLM's own offloading
bytes copied, its simple offload blocks loaded. LMCache inside vLLM counts nothing in time, but what
it loads follows from the tokens vLLM counts. What no counter tells stays None.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from harness.counters.pages import (
    HOST_SERIES,
    TIER_SERIES_OF_VLLM,
    CounterError,
    ForeignTraffic,
    MissingSeries,
    tier_of,
)
from servers.arms import TierKind
from sim.split import TokenSplit

LoadedSource = Literal[
    "chunks_loaded_counter",
    "lookup_hits",
    "kv_offload_load_bytes",
    "chunks_times_bytes",
    "load_blocks_times_bytes",
]


@dataclass(frozen=True, slots=True)
class Measured:
    """What the counters say one request did. None: not measured (host fields: no host tier).

    ``hit_chunks``: chunks LMCache's lookup found, counted from the prompt's start and including
    those the GPU held too. ``loaded_chunks``/``loaded_bytes``: what moved host to GPU, whole
    chunks; ``loaded_source`` says from which counter. ``load_s``: seconds the copy took on the
    device, where the tier times it. ``stored_*``: what became resident in the host tier.
    ``chunk_bytes``: bytes of one chunk, measured from the tier's state if it holds any.
    ``disagreement``: how vLLM's ledger and the tier's contradict each other; None if they agree.
    """

    split: TokenSplit
    split_source: Literal["prompt_tokens_by_source", "prefix_cache_hits"]
    finished: int
    hit_chunks: int | None = None
    loaded_chunks: int | None = None
    loaded_bytes: int | None = None
    loaded_source: LoadedSource | None = None
    load_s: float | None = None
    stored_chunks: int | None = None
    stored_tokens: int | None = None
    alloc_failed_chunks: int | None = None
    read_failed_chunks: int | None = None
    evicted_chunks: int | None = None
    chunk_bytes: int | None = None
    disagreement: str | None = None


@dataclass(frozen=True, slots=True)
class Unit:
    """The tier's unit, a chunk: ``tokens``, and ``n_bytes`` where they are known."""

    tokens: int
    n_bytes: int | None

    def bytes_of(self, n_chunks: int) -> int | None:
        """Bytes of ``n_chunks``; no chunks have none, whatever the unit."""
        if n_chunks == 0:
            return 0
        return None if self.n_bytes is None else n_chunks * self.n_bytes


def with_tier(
    gpu: Measured,
    moved: Mapping[str, int],
    after: Mapping[str, int],
    *,
    chunk_tokens: int | None,
    chunk_bytes: int | None,
) -> Measured:
    """``gpu`` with what the tier did, from the differences ``moved`` and the reading ``after``.

    The kind of tier follows from the names in ``after``. Raises ValueError without
    ``chunk_tokens`` where there is a tier, CounterError where its counters are not all there or
    contradict themselves.
    """
    kind = tier_of(after)
    if kind is None:
        return gpu
    if chunk_tokens is None:
        raise ValueError("chunk_tokens is None but the counters include a host tier")
    series = HOST_SERIES if kind == "lmcache-mp" else TIER_SERIES_OF_VLLM.get(kind, ())
    if missing := sorted(s.name for s in series if s.presence == "lazy" and s.name not in moved):
        raise MissingSeries(f"{', '.join(missing)} not among the counters of a {kind} tier")
    unit = Unit(chunk_tokens, _chunk_bytes(after) or chunk_bytes)
    return _BY_KIND[kind](gpu, moved, unit)


def require_one(count: int, what: str, unit: str) -> None:
    """Raise unless exactly one happened between the readings."""
    if count > 1:
        raise ForeignTraffic(
            f"{what} {count} {unit} where we sent 1",
            hint="another client uses this server; give the run a server of its own",
        )
    if count < 1:
        raise CounterError(f"{what} no {unit} between the readings, expected 1")


def _of_native(gpu: Measured, moved: Mapping[str, int], unit: Unit) -> Measured:
    """vLLM's own offloading: bytes and seconds of the load, as its worker copied them.

    A load is whole blocks, from the GPU hit on, and counted in full when all of the prompt was
    found: then 0 tokens count as computed, although one is (``_lookup_complete_chunks``, vLLM
    0.32). What was stored stays unknown: it may be published with a later request's step.
    """
    loaded = moved["native_load_bytes"]
    tokens = gpu.split.host_loaded
    disagreement = None
    if bool(loaded) != bool(tokens):
        disagreement = (
            f"vLLM counts {tokens} tokens from the host and its offloading {loaded} bytes loaded"
        )
    return replace(
        gpu,
        loaded_bytes=loaded,
        loaded_source="kv_offload_load_bytes",
        load_s=moved["native_load_ns"] / 1e9 if loaded else None,
        chunk_bytes=unit.n_bytes,
        disagreement=disagreement,
    )


def _of_simple(gpu: Measured, moved: Mapping[str, int], unit: Unit) -> Measured:
    """vLLM's simple CPU offload: blocks of finished loads; a chunk is one block here."""
    blocks = moved["simple_load_blocks"]
    disagreement = None
    if blocks * unit.tokens != gpu.split.host_loaded:
        disagreement = (
            f"vLLM counts {gpu.split.host_loaded} tokens from the host and its offload {blocks} "
            f"blocks of {unit.tokens} loaded"
        )
    return replace(
        gpu,
        loaded_chunks=blocks,
        loaded_bytes=unit.bytes_of(blocks),
        loaded_source="load_blocks_times_bytes",
        chunk_bytes=unit.n_bytes,
        disagreement=disagreement,
    )


def _of_lmcache_in_process(gpu: Measured, moved: Mapping[str, int], unit: Unit) -> Measured:
    """LMCache inside vLLM: the chunks a load must have moved, by its own rule.

    The lookup's hit ends with a chunk, and counts one token less when it is the whole prompt
    (``LMCacheConnectorV1Impl.get_num_new_matched_tokens``); from the chunk the GPU hit ends in on,
    whole chunks move (``start_load_kv``). What was stored is not known: only how many chunks are
    resident is, and stores evict.
    """
    del moved  # no counter of LMCache's is written in time, see ``counter_pages``
    split = gpu.split
    if split.host_loaded == 0:
        return replace(
            gpu, loaded_chunks=0, loaded_bytes=0, loaded_source="chunks_times_bytes",
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
        hit_chunks=hit_chunks,
        loaded_chunks=loaded,
        loaded_bytes=unit.bytes_of(loaded),
        loaded_source="chunks_times_bytes",
        chunk_bytes=unit.n_bytes,
    )


def _of_lmcache_server(gpu: Measured, moved: Mapping[str, int], unit: Unit) -> Measured:
    """LMCache's own server: what its lookup found and its store wrote."""
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
        hit_chunks=hit_chunks,
        loaded_chunks=loaded,
        loaded_bytes=unit.bytes_of(loaded),
        loaded_source="chunks_loaded_counter" if counted else "lookup_hits",
        stored_chunks=stored,
        stored_tokens=stored * chunk_tokens,
        alloc_failed_chunks=moved["host_alloc_failed_chunks"],
        read_failed_chunks=moved["host_read_failed_chunks"],
        evicted_chunks=moved["host_evicted_chunks"],
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


def _chunk_bytes(counters: Mapping[str, int]) -> int | None:
    resident, used = counters.get("host_resident_chunks"), counters.get("host_used_bytes")
    if not resident or used is None or used % resident:  # chunks being written blur the quotient
        return None
    return used // resident


_BY_KIND: Mapping[TierKind, Callable[[Measured, Mapping[str, int], Unit], Measured]] = {
    "lmcache-mp": _of_lmcache_server,
    "lmcache": _of_lmcache_in_process,
    "native": _of_native,
    "simple": _of_simple,
}
